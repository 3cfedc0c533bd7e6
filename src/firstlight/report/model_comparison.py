"""Write the comparison of two models as an HTML page. The `report` module describes the properties
of pages."""

from __future__ import annotations

from pathlib import Path

from firstlight.evaluation.comparison import ModelComparison, Segment
from firstlight.files.atomic import write_file
from firstlight.report.report import render_page


def write_page(comparison: ModelComparison, path: Path) -> None:
    """Write the HTML page that compares two models.

    Raises:
        StorageError: the file can't be written.
    """
    values = {"found": comparison, "strength": _strength}
    write_file(path, render_page("models.html", values))


def _strength(segment: Segment) -> int:
    """Return the intensity of a segment's colour, which is the difference between the models in
    bits, limited to 4."""
    return min(round(abs(segment.after - segment.before)), 4)

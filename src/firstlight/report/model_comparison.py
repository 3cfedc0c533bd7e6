"""Write the comparison of two models as an HTML page; see `report` for the properties of pages."""

from __future__ import annotations

from pathlib import Path

from firstlight.evaluation.comparison import ModelComparison, Segment
from firstlight.evaluation.scores import with_error
from firstlight.files.atomic import write_file
from firstlight.report.report import render_page, require_replaceable

#: Difference in bits from which a segment has the strongest colour.
_STRONG_BITS = 4.0


def require_page_path(path: Path) -> None:
    """Check that a page can be written to a path.

    Raises:
        ConfigError: the name does not end in .html or .htm.
        InputError: the file exists and is not a report.
    """
    require_replaceable(path, option="--page")


def write_page(comparison: ModelComparison, path: Path) -> None:
    """Write the page of a comparison.

    Raises:
        StorageError: the file can't be written.
    """
    write_file(path, page_of(comparison))


def page_of(comparison: ModelComparison) -> str:
    """Return the HTML page of a comparison."""
    values = {"found": comparison, "with_error": with_error, "strength": _strength}
    return render_page("models.html", values)


def _strength(segment: Segment) -> int:
    """Return the strength of a segment's colour, from 0 (unchanged) to 4."""
    return min(round(4 * abs(segment.after - segment.before) / _STRONG_BITS), 4)

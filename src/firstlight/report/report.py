"""Writes the report of a run, or of several runs: an HTML page and a PNG picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from firstlight.errors import ConfigError, InputError
from firstlight.files.atomic import write_file
from firstlight.report.compare import RunComparison, compare, comparison_page
from firstlight.report.html import run_page
from firstlight.report.page import is_page
from firstlight.report.pictures import PICTURE_ORIGIN, comparison_picture, picture_of
from firstlight.report.records import RunRecord, read_run, require_run

REPORT_NAME = "report.png"
HTML_NAME = "report.html"
#: Default file of the comparison of several runs.
COMPARISON_NAME = "comparison.html"
#: Bytes from the beginning of a PNG file in which `PICTURE_ORIGIN` is searched.
_HEAD_BYTES = 1000


def draw_report(run_folder: Path) -> Path:
    """Write report.png and report.html of a run, finished or not, into its folder; return the path
    of report.png.

    Args:
        run_folder: the run folder of `train`, with metrics.jsonl.

    Raises:
        StorageError: a file can't be written.
        CheckpointError: a file of the run is damaged.
    """
    run = read_run(run_folder)
    write_run(run, run_folder / HTML_NAME, run_folder / REPORT_NAME)
    return run_folder / REPORT_NAME


def write_run(run: RunRecord, html: Path, picture: Path) -> None:
    """Write a run's page and picture, each atomically.

    Args:
        run: the run.
        html, picture: paths of the page and the picture.

    Raises:
        StorageError: a file can't be written.
    """
    for path, content in ((picture, picture_of(run)), (html, run_page(run))):
        write_file(path, content)


@dataclass(frozen=True)
class WrittenReport:
    """A report that was written.

    Attributes:
        page, picture: paths of the HTML page and the PNG picture.
        comparison: the run or runs that the report shows.
    """

    page: Path
    picture: Path
    comparison: RunComparison


def write_report(folders: Sequence[Path], out: Path | None = None) -> WrittenReport:
    """Write the report of a run, or of several runs. The runs may be active.

    Args:
        folders: run folders, at least one.
        out: path of the page; the picture gets the same name with .png. None is report.html in the
            run folder, or for several runs comparison.html in the current folder.

    Raises:
        InputError: a folder is missing or not a run folder, or `out` is a file that is not a
            report.
        CheckpointError: a file of a run is damaged.
        ConfigError: a folder is given twice, or `out` does not end in .html or .htm.
        StorageError: a file system error.
    """
    for folder in folders:
        require_run(folder)
    if out is None and len(folders) > 1:
        out = Path(COMPARISON_NAME)
    if out is not None:
        _require_replaceable(out)
    found = compare([read_run(folder) for folder in folders])
    if len(folders) == 1:
        html = folders[0] / HTML_NAME if out is None else out
        picture = folders[0] / REPORT_NAME if out is None else out.with_suffix(".png")
        write_run(found.runs[0], html, picture)
        return WrittenReport(html, picture, found)
    assert out is not None
    write_file(out.with_suffix(".png"), comparison_picture(found))
    write_file(out, comparison_page(found))
    return WrittenReport(out, out.with_suffix(".png"), found)


def _require_replaceable(out: Path) -> None:
    """Refuse a path that does not end in .html, and existing files that are no reports."""
    if out.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(
            f"--out {out} must end in .html: the picture gets the same name with .png"
        )
    for path, is_ours in ((out, is_page), (out.with_suffix(".png"), _is_picture)):
        if (path.exists() or path.is_symlink()) and not (path.is_file() and is_ours(path)):
            raise InputError(
                f"{path} exists already, is no report, and is not overwritten: name another --out"
            )


def _is_picture(path: Path) -> bool:
    with open(path, "rb") as file:
        head = file.read(_HEAD_BYTES)
    return head.startswith(b"\x89PNG") and PICTURE_ORIGIN.encode() in head


def as_json(report: WrittenReport) -> dict[str, Any]:
    """A report as a JSON object: its files; label, `final_numbers` and findings of each run; and
    the recipe keys that differ, with each run's value (null if a recipe lacks the key)."""
    found = report.comparison
    named = zip(found.labels, found.numbers, found.findings, strict=True)
    return {
        "report": str(report.page),
        "picture": str(report.picture),
        "runs": [
            {"label": label, **numbers, "findings": [one.as_json() for one in findings]}
            for label, numbers, findings in named
        ],
        "differences": {
            key: [value if _is_json(value) else None for value in values]
            for key, values in found.differences.items()
        },
    }


def _is_json(value: object) -> bool:
    return isinstance(value, str | int | float | bool | list | dict)

"""Writes the report of a run, or of several runs: an HTML page and a PNG picture."""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from firstlight.errors import ConfigError, InputError
from firstlight.files.atomic import write_file
from firstlight.report.charts import (
    NOTE_INCHES,
    PICTURE_ORIGIN,
    draw_in_picture,
    draw_title,
    plain_text,
    png,
)
from firstlight.report.compare import RunComparison, compare, compared_charts, warnings_of
from firstlight.report.page import (
    comparison_page,
    further_charts,
    is_page,
    key_figures,
    loss_chart,
    run_page,
)
from firstlight.report.summary import final_numbers, findings_of
from firstlight.run_log.names import HTML_NAME, REPORT_NAME
from firstlight.run_log.reader import RunRecord, read_run, require_run

#: Default file of the comparison of several runs.
COMPARISON_NAME = "comparison.html"
#: Bytes from the beginning of a PNG file in which `PICTURE_ORIGIN` is searched.
_HEAD_BYTES = 1000
#: Heights in inches: a chart beside that of the losses, a title, a line of a sample.
_CHART_INCHES = 2.6
_TITLE_INCHES = 0.4
_LINE_INCHES = 0.14
#: Characters of a line across the picture; largest number of lines of a column of samples, and
#: fewest lines for which another column is begun.
_CHARACTERS = 160
_MAX_LINES = 18
_FEWEST_LINES = 6
#: Largest number of characters of a sample that are used.
_MAX_TEXT = 10_000


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


# Pictures


def picture_of(run: RunRecord) -> bytes:
    """The picture of a run as a PNG file's bytes."""
    # Figure instead of pyplot, which would look for a window system and keep global state.
    from matplotlib.figure import Figure

    findings = findings_of(run)
    notes = [
        plain_text(line)
        for one in findings
        for text in (f"{one.text}.", f"What helps: {one.advice}.")
        for line in textwrap.wrap(text, _CHARACTERS)
    ]
    samples = _sample_columns(run.samples)
    rows = max((len(column) for column in samples), default=0)
    charts = further_charts(run.metrics)
    beside = [name for name in ("rate", "norm", "speed", "batch") if name in charts]
    heights = [_CHART_INCHES] * max(len(beside), 2)
    mosaic = [["loss", "loss", name] for name in beside] or [["loss"], ["loss"]]
    if rows:
        heights.append(_TITLE_INCHES + rows * _LINE_INCHES)
        mosaic.append(["text"] * len(mosaic[0]))
    height = sum(heights) + 2 * _TITLE_INCHES + NOTE_INCHES * len(notes)
    figure = Figure(figsize=(13, height), layout="constrained")
    grid: dict[str, Any] = figure.subplot_mosaic(mosaic, height_ratios=heights[: len(mosaic)])
    draw_in_picture(grid["loss"], loss_chart(run, findings))
    for name in beside:
        draw_in_picture(grid[name], charts[name], log=charts[name].has_log and name == "norm")
    if rows:
        _draw_samples(grid["text"], samples, run.samples[-1]["step"])
    figures = [f"{one.name} {one.value} {one.unit}" for one in key_figures(final_numbers(run))]
    title = f"firstlight · {plain_text(run.name)}\n{'  ·  '.join(figures)}"
    draw_title(figure, title, notes)
    return png(figure)


def loss_picture(run: RunRecord) -> bytes:
    """The chart of a run's losses as a PNG file's bytes, for publishing: without the run's samples,
    and without its findings, which may contain paths of this machine."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    draw_in_picture(figure.subplots(), loss_chart(run, ()))
    return png(figure)


def comparison_picture(found: RunComparison) -> bytes:
    """The losses of several runs by steps, tokens and hours, as a PNG file's bytes."""
    from matplotlib.figure import Figure

    charts = compared_charts(found)[:2]
    notes = [plain_text(line) for text in warnings_of(found) for line in textwrap.wrap(text, 170)]
    height = 4 * len(charts) + NOTE_INCHES * len(notes)
    figure = Figure(figsize=(15, height), layout="constrained")
    grid: Any = figure.subplots(len(charts), 3, squeeze=False)
    for row, by_axis in zip(grid, charts, strict=True):
        for axes, chart in zip(row, by_axis.values(), strict=True):
            draw_in_picture(axes, chart)
    draw_title(figure, "firstlight · runs side by side", notes)
    return png(figure)


def _sample_columns(samples: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The lines of the last step's samples, in columns: up to four, as many as fit side by side."""
    lines: list[str] = []
    for sample in samples:
        if sample["step"] != samples[-1]["step"]:
            continue
        # Only as much of a text as the picture could show.
        text = (sample["prompt"] + sample["text"])[:_MAX_TEXT].expandtabs(4)
        for line in text.splitlines():
            lines += textwrap.wrap(line, _CHARACTERS, drop_whitespace=False) or [""]
        lines.append("")
    lines = lines[:-1]
    longest = max((_width(line) for line in lines), default=0)
    columns = next(n for n in (4, 3, 2, 1) if n == 1 or n * (longest + 3) <= _CHARACTERS)
    # Few lines are easier to read in one column.
    columns = min(columns, -(-len(lines) // _FEWEST_LINES))
    height = min(-(-len(lines) // columns), _MAX_LINES) if lines else 0
    return [lines[i * height : (i + 1) * height] for i in range(columns)] if height else []


def _width(line: str) -> int:
    """The width of a line in a monospaced font, in columns: wide East Asian characters take two."""
    return len(line) + sum(unicodedata.east_asian_width(c) in "WF" for c in line)


def _draw_samples(axes: Any, columns: Sequence[Sequence[str]], step: int) -> None:
    axes.axis("off")
    axes.set_title(f"sample at step {step:,}", loc="left", fontsize="medium")
    for number, column in enumerate(columns):
        text, place = plain_text("\n".join(column)), number / len(columns)
        axes.text(
            place, 1, text, family="monospace", fontsize=8, va="top", transform=axes.transAxes
        )

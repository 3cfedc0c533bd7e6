"""report.png and report.html: what a run did, at a glance and in full."""

from __future__ import annotations

import io
import math
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from firstlight.files import write_file
from firstlight.training.report_html import run_page
from firstlight.training.report_run import RunRecord, read_run
from firstlight.training.report_series import Metrics, Series, smooth, smoothed, thin

__all__ = [
    "HTML_NAME",
    "PICTURE_ORIGIN",
    "REPORT_NAME",
    "draw_report",
    "picture_of",
    "png",
    "shown",
    "smooth",
    "write_run",
]

REPORT_NAME = "report.png"
HTML_NAME = "report.html"
_MIB = 2**20
#: Of a curve in a picture, which is narrower than that in pixels.
_BUCKETS = 1000
#: Characters of a text that are looked at.
_MAX_TEXT = 10_000
#: By which a picture of ours is told from others.
PICTURE_ORIGIN = "firstlight report"


def draw_report(run_folder: Path) -> Path:
    """Draw a run, finished or not, into its report.png and report.html; return the former's path.

    Args:
        run_folder: where `train` wrote metrics.jsonl.

    Raises:
        StorageError: a file can't be written.
        CheckpointError: a file of the run is damaged.
    """
    run = read_run(run_folder)
    write_run(run, run_folder / HTML_NAME, run_folder / REPORT_NAME)
    return run_folder / REPORT_NAME


def write_run(run: RunRecord, html: Path, picture: Path) -> None:
    """Write a run's page and picture, each whole or not at all.

    Raises:
        StorageError: a file can't be written.
    """
    for path, content in ((picture, picture_of(run)), (html, run_page(run))):
        write_file(path, content)


def picture_of(run: RunRecord) -> bytes:
    """A run as a PNG."""
    # Drawn without pyplot: no window system is looked for, no global state is left behind.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 8), layout="constrained")
    grid: dict[str, Any] = figure.subplot_mosaic(
        [["loss", "loss", "rate"], ["loss", "loss", "speed"], ["text"] * 3],
        height_ratios=[1, 1, 0.7],
    )
    _draw_loss(grid["loss"], run.metrics)
    _draw_events(grid["loss"], run.events)
    _draw_rate(grid["rate"], run.metrics)
    _draw_speed(grid["speed"], run.metrics)
    _draw_samples(grid["text"], run.samples)
    figure.suptitle(f"firstlight · {shown(run.name)}")
    return png(figure)


def png(figure: Any) -> bytes:
    """A figure of matplotlib's as a file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    picture = io.BytesIO()
    with warnings.catch_warnings():
        # A sample may be in a script that the font lacks; its boxes are warning enough.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        FigureCanvasAgg(figure).print_png(picture, metadata={"Software": PICTURE_ORIGIN})
    return picture.getvalue()


def _points(series: Series) -> tuple[Any, Any]:
    thinned = thin(series, _BUCKETS)
    return thinned.x, thinned.y


def _draw_loss(axes: Any, metrics: Metrics) -> None:
    losses = metrics.series("train/loss")
    axes.plot(*_points(losses), color="tab:blue", alpha=0.25, linewidth=0.8)
    axes.plot(*_points(smoothed(losses)), color="tab:blue", label="train/loss")
    label, loss, bits = "val/loss", metrics.last("val/loss"), metrics.last("bits_per_byte")
    if loss is not None and bits is not None:
        label += f": {loss:.3f} nats a token, {bits:.3f} bits a byte"
    axes.plot(*_points(metrics.series("val/loss")), "o-", color="tab:orange", label=label)
    beside = metrics.series("train_eval/loss")
    if len(beside):
        axes.plot(*_points(beside), "o-", color="tab:green", label="train_eval/loss")
    axes.set(xlabel="step", ylabel="loss (nats a token)")
    axes.legend(loc="upper right")
    axes.grid(alpha=0.3)


def _draw_events(axes: Any, events: Sequence[Mapping[str, Any]]) -> None:
    for event in events:
        axes.axvline(event["step"], color="tab:red", linestyle=":", linewidth=0.8)
        axes.annotate(
            f" {shown(event['event'])}",
            (event["step"], 0.01),
            xycoords=("data", "axes fraction"),
            color="tab:red",
            fontsize=7,
            rotation=90,
        )


def _draw_rate(axes: Any, metrics: Metrics) -> None:
    rates = metrics.series("learning_rate")
    axes.plot(*_points(rates), color="tab:green", label="learning rate")
    axes.set(xlabel="step", ylabel="learning rate")
    norms = axes.twinx()
    found = metrics.series("grad_norm")
    norms.plot(*_points(found), color="tab:red", alpha=0.4, linewidth=0.8)
    norms.set_ylabel("gradient norm", color="tab:red")
    if len(found) and found.y.max() > 0:
        norms.set_yscale("log")
    axes.grid(alpha=0.3)


def _draw_speed(axes: Any, metrics: Metrics) -> None:
    rates = metrics.series("tokens_per_second")
    axes.plot(*_points(rates), color="tab:purple", linewidth=0.8)
    axes.set(xlabel="step", ylabel="tokens/s")
    if len(rates) and rates.y.max() > 0:
        axes.set_ylim(0, 1.2 * rates.y.max())
    shares, memory = metrics.values("mfu"), metrics.values("memory_bytes")
    if len(rates) and len(shares) and len(memory):
        axes.set_title(
            f"median {np.median(rates.y):,.0f} tokens/s, MFU {np.median(shares):.1%}, "
            f"peak {math.ceil(memory.max() / _MIB):,} MiB",
            fontsize="medium",
        )
    axes.grid(alpha=0.3)


def _draw_samples(axes: Any, samples: Sequence[Mapping[str, Any]]) -> None:
    axes.axis("off")
    if not samples:
        return
    last = [sample for sample in samples if sample["step"] == samples[-1]["step"]]
    lines: list[str] = []
    for sample in last:
        # No more of a text than could be in the picture.
        text = (sample["prompt"] + sample["text"])[:_MAX_TEXT].expandtabs(4)
        for line in text.splitlines():
            lines += textwrap.wrap(line, 150, drop_whitespace=False) or [""]
        lines.append("")
    axes.set_title(f"sample at step {samples[-1]['step']}", loc="left", fontsize="medium")
    text = shown("\n".join(lines[:18]))
    axes.text(0, 1, text, family="monospace", fontsize=8, va="top", transform=axes.transAxes)


def shown(text: str) -> str:
    """Text as matplotlib draws it: no control characters, and no formulas, which a dollar sign
    would start."""
    printable = "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)
    return printable.replace("$", r"\$")

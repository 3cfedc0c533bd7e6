"""Draws runs and comparisons of runs as PNG pictures by matplotlib."""

from __future__ import annotations

import io
import math
import textwrap
import unicodedata
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from firstlight.evaluation.positions import ByPosition
from firstlight.report.axes import second_axis
from firstlight.report.charts import Chart, Line
from firstlight.report.compare import AXES, CHARTS, RunComparison, compared_lines, warnings_of
from firstlight.report.findings import findings_of
from firstlight.report.page import loss_unit
from firstlight.report.records import RunRecord
from firstlight.report.series import Metrics, Series, smoothed, thin

_MIB = 2**20
#: Buckets of a thinned curve (see `thin`), more than its pixels: in the picture of a run, and in
#: that of a comparison.
_BUCKETS, _BUCKETS_OF_SEVERAL = 1000, 350
#: Heights in inches: a chart of the right column, a title, a line of a sample, a line of a warning.
_CHART_INCHES, _TITLE_INCHES, _LINE_INCHES, NOTE_INCHES = 2.8, 0.4, 0.14, 0.19
#: Colour of warnings.
_WARNING = "#b3261e"
#: Characters of a line across the picture; largest number of lines of a column of samples, and
#: fewest lines for which another column is begun.
_CHARACTERS, _MAX_LINES, _FEWEST_LINES = 160, 18, 6
#: Wanted number of ticks of a second x axis.
_SECOND_TICKS = 7
#: Largest number of characters of a sample that are used.
_MAX_TEXT = 10_000
#: Entry `Software` of the PNG metadata, by which a report's picture is recognised.
PICTURE_ORIGIN = "firstlight report"


def picture_of(run: RunRecord) -> bytes:
    """The picture of a run as a PNG file's bytes."""
    # Figure instead of pyplot, which would look for a window system and keep global state.
    from matplotlib.figure import Figure

    findings = findings_of(run)
    notes = [
        shown(line)
        for one in findings
        for text in (f"{one.text}.", f"What helps: {one.advice}.")
        for line in textwrap.wrap(text, _CHARACTERS)
    ]
    samples = _sample_columns(run.samples)
    rows = max((len(column) for column in samples), default=0)
    heights = [_CHART_INCHES, _CHART_INCHES]
    is_trained = len(run.metrics.series("learning_rate")) > 0
    mosaic = [["loss", "loss", "rate"], ["loss", "loss", "speed"]] if is_trained else [["loss"]] * 2
    batch = run.metrics.series("global_batch_tokens")
    if has_ramp := is_trained and len(np.unique(batch.y)) > 1:
        heights.append(_CHART_INCHES)
        mosaic.append(["loss", "loss", "batch"])
    if rows:
        heights.append(_TITLE_INCHES + rows * _LINE_INCHES)
        mosaic.append(["text"] * len(mosaic[0]))
    figure = Figure(
        figsize=(13, sum(heights) + _TITLE_INCHES + NOTE_INCHES * len(notes)), layout="constrained"
    )
    grid: dict[str, Any] = figure.subplot_mosaic(mosaic, height_ratios=heights)
    _draw_loss(grid["loss"], run)
    _draw_events(grid["loss"], run.events)
    for one in findings:
        if one.kind == "overfitting":
            _draw_line(grid["loss"], one.since_step, "lowest validation loss", "tab:orange")
    _draw_second_axes(grid["loss"], run.metrics)
    if is_trained:
        _draw_rate(grid["rate"], run.metrics)
        _draw_speed(grid["speed"], run.metrics)
    if has_ramp:
        grid["batch"].plot(*_points(batch), color="tab:brown", drawstyle="steps-mid")
        grid["batch"].set(xlabel="step", ylabel="tokens a step", ylim=(0, 1.1 * batch.y.max()))
        grid["batch"].grid(alpha=0.3)
    if rows:
        _draw_samples(grid["text"], samples, run.samples[-1]["step"])
    draw_title(figure, f"firstlight · {shown(run.name)}", notes)
    return png(figure)


def loss_picture(run: RunRecord) -> bytes:
    """The chart of a run's losses as a PNG file's bytes, for publishing: without the run's samples,
    and without its findings, which may contain paths of this machine."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    _draw_loss(axes, run)
    _draw_events(axes, run.events)
    return png(figure)


def position_picture(curves: Mapping[str, ByPosition], contexts: Mapping[str, int]) -> bytes:
    """The chart of perplexity by position, as a PNG file's bytes.

    Args:
        curves: each model's result, by the model's name.
        contexts: each model's context length in tokens, drawn as a dotted line.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    for name, found in curves.items():
        middles = [(one.first + one.last) / 2 for one in found.stretches]
        perplexities = [one.perplexity for one in found.stretches]
        (line,) = axes.plot(middles, perplexities, label=shown(name))
        if contexts[name] < found.seq_len:
            axes.axvline(contexts[name], color=line.get_color(), linestyle=":")
    axes.set(xlabel="position", ylabel="perplexity", yscale="log", xlim=(0, None))
    axes.set_title("dotted: the end of a model's context", fontsize=10)
    axes.legend()
    axes.grid(alpha=0.3, which="both")
    return png(figure)


def draw_title(figure: Any, title: str, notes: Sequence[str]) -> None:
    """Write a title above a figure, and below the title the warnings.

    Args:
        figure: matplotlib's figure.
        title: the title.
        notes: lines of warnings; each needs `NOTE_INCHES` of the figure's height.
    """
    figure.suptitle("\n".join([title, *notes]), color=_WARNING if notes else "black", fontsize=11)


def png(figure: Any) -> bytes:
    """A matplotlib figure as a PNG file's bytes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    picture = io.BytesIO()
    with warnings.catch_warnings():
        # A sample may be in a script that the font lacks; the boxes in the picture show that.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        FigureCanvasAgg(figure).print_png(picture, metadata={"Software": PICTURE_ORIGIN})
    return picture.getvalue()


def _points(series: Series) -> tuple[Any, Any]:
    thinned = thin(series, _BUCKETS)
    return thinned.x, thinned.y


def _draw_loss(axes: Any, run: RunRecord) -> None:
    metrics, unit = run.metrics, loss_unit(run)
    losses = metrics.series("train/loss")
    if len(losses):
        axes.plot(*_points(losses), color="tab:blue", alpha=0.25, linewidth=0.8)
        axes.plot(*_points(smoothed(losses)), color="tab:blue", label="train/loss")
    else:
        axes.set_xticks([0])
    label, loss, bits = "val/loss", metrics.last("val/loss"), metrics.last("bits_per_byte")
    if loss is not None and bits is not None:
        label += f": {loss:.3f} {unit}, {bits:.3f} bits a byte"
    axes.plot(*_points(metrics.series("val/loss")), "o-", color="tab:orange", label=label)
    beside = metrics.series("train_eval/loss")
    if len(beside):
        axes.plot(*_points(beside), "o-", color="tab:green", label="train_eval/loss")
    axes.set(xlabel="step", ylabel=f"loss ({unit})")
    if Chart("loss", unit, [Line("train/loss", losses, 0)]).needs_log:
        axes.set_yscale("log")
    axes.legend(loc="upper right")
    axes.grid(alpha=0.3)


def _draw_second_axes(axes: Any, metrics: Metrics) -> None:
    """Add x axes to the chart of losses: tokens seen below the steps, epochs above the plot."""
    low, high = axes.get_xlim()
    for name, key, edge, distance in (
        ("tokens seen", "tokens_seen", "bottom", 36),
        ("epochs", "epoch", "top", 0),
    ):
        if (second := second_axis(name, metrics.series(key))) is None:
            continue
        beside = axes.twiny()
        beside.set_xlim(low, high)
        ticks = second.ticks(low, high, _SECOND_TICKS)
        beside.set_xticks([place for place, _ in ticks], [number for _, number in ticks])
        beside.xaxis.set_ticks_position(edge)
        beside.xaxis.set_label_position(edge)
        beside.spines[edge].set_position(("outward", distance))
        beside.set_xlabel(name)


def _draw_events(axes: Any, events: Sequence[Mapping[str, Any]]) -> None:
    for event in events:
        _draw_line(axes, event["step"], shown(event["event"]), "tab:red")


def _draw_line(axes: Any, step: int, text: str, colour: str) -> None:
    axes.axvline(step, color=colour, linestyle=":", linewidth=0.8)
    place, units = (step, 0.01), ("data", "axes fraction")
    axes.annotate(f" {text}", place, xycoords=units, color=colour, fontsize=7, rotation=90)


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
        text, place = shown("\n".join(column)), number / len(columns)
        axes.text(
            place, 1, text, family="monospace", fontsize=8, va="top", transform=axes.transAxes
        )


def shown(text: str) -> str:
    """A text for matplotlib: control characters are replaced, and dollar signs, which would start a
    formula, are escaped."""
    printable = "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)
    return printable.replace("$", r"\$")


def comparison_picture(found: RunComparison) -> bytes:
    """The losses of several runs by steps, tokens and hours, as a PNG file's bytes."""
    from matplotlib.figure import Figure

    notes = [shown(line) for text in warnings_of(found) for line in textwrap.wrap(text, 170)]
    figure = Figure(figsize=(15, 8 + NOTE_INCHES * len(notes)), layout="constrained")
    grid: Any = figure.subplots(2, len(AXES))
    for row, (key, title, _) in enumerate(CHARTS[:2]):
        for column, (axis, name) in enumerate(AXES.items()):
            axes, lines = grid[row][column], compared_lines(found, key, axis)
            for line in lines:
                curve = thin(line.series, _BUCKETS_OF_SEVERAL)
                marker = "o" if line.dotted else None
                colour = f"C{line.colour % 10}"
                axes.plot(
                    curve.x,
                    curve.y,
                    color=colour,
                    marker=marker,
                    markersize=3,
                    label=shown(line.name),
                )
            axes.set(xlabel=name, ylabel=f"{title.lower()} (nats a token)")
            axes.locator_params(axis="x", nbins=6)
            if Chart(title, "", lines).needs_log:
                axes.set_yscale("log")
            axes.grid(alpha=0.3)
    grid[0][0].legend(fontsize="small")
    draw_title(figure, "firstlight · runs side by side", notes)
    return png(figure)

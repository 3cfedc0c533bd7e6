"""Draw charts with matplotlib, either as SVG markup for HTML pages or as PNG pictures.

matplotlib is imported inside functions, because the import takes about a second.
"""

from __future__ import annotations

import io
import json
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from markupsafe import Markup

from firstlight.console import compact, visible
from firstlight.evaluation.perplexity import ByPosition
from firstlight.run_log.reader import Floats, Series, thin

#: Colours of pages and charts as (light mode, dark mode), keyed by their names in the style sheet
#: of the pages. Charts are first drawn in the light colours, and `svg` then replaces the colours
#: with CSS variables.
COLOURS = {
    "ink": ("#1d2126", "#e6e8ea"),
    "soft": ("#6a727c", "#98a1ab"),
    "grid": ("#eceef0", "#272b31"),
    "panel": ("#ffffff", "#1b1e23"),
    "c0": ("#2a6fdb", "#6aa5ff"),
    "c1": ("#d9541e", "#ff8f5c"),
    "c2": ("#16855b", "#4ec994"),
    "c3": ("#8b4fc1", "#bd90f0"),
    "c4": ("#b8860b", "#e2b84a"),
    "c5": ("#0b8fa8", "#45c4dc"),
    "c6": ("#c2367a", "#f07fb4"),
    "c7": ("#5b6470", "#a2acb8"),
    "rollback": ("#c62828", "#ff6b6b"),
    "resumed": ("#7a8694", "#8b96a3"),
}
_NAMES = {light: name for name, (light, _) in COLOURS.items()}
#: Number of line colours (c0, c1, ...). Additional lines are dashed and reuse the colours.
LINE_COLOURS = 8
#: Name of the colour for each kind of event. All other kinds use the colour c3.
_MARKS = {
    "rollback": "rollback",
    "diverged": "rollback",
    "out-of-memory": "c4",
    "resumed": "resumed",
    "decision": "resumed",
    "lowest-validation-loss": "c1",
}
#: `Software` entry in the PNG metadata that identifies the picture of a report.
PICTURE_ORIGIN = "firstlight report"
#: Each point of a line is marked with a dot if the line has at most this number of points.
_FEW = 60
#: Ratio of the largest to the smallest value above which small values are not visible on a linear
#: axis.
_HIDING = 1000
#: Values up to this limit can't be shown on a logarithmic axis.
_TINY = 1e-300
#: Maximum number of events in a chart. If there are more, only the last ones are drawn.
_MAX_MARKS = 120


@dataclass(frozen=True)
class Line:
    """A curve in a chart.

    Attributes:
        name: name of the curve in the legend and the read-out.
        series: points of the curve.
        colour: zero-based number of the colour; see `LINE_COLOURS`.
        faint: True to draw the curve in the background and omit it from the legend.
        errors: half of the length of each point's error bar, as an array of shape [N]; None for no
            error bars.
    """

    name: str
    series: Series
    colour: int
    faint: bool = False
    errors: Floats | None = None

    @property
    def is_dashed(self) -> bool:
        """True if the line reuses the colour of an earlier line."""
        return self.colour // LINE_COLOURS % 2 == 1

    @property
    def style(self) -> str:
        """CSS classes of the curve's legend entry."""
        return f"c{self.colour % LINE_COLOURS}{' dashed' if self.is_dashed else ''}"


@dataclass(frozen=True)
class Mark:
    """An event, drawn as a vertical line at `x`. Its kind is shown in the legend."""

    x: float
    kind: str


@dataclass(frozen=True)
class Chart:
    """A chart with its curves.

    Attributes:
        title: quantity shown in the chart.
        unit: unit of the y axis, or "" if the title already contains it.
        lines: the curves.
        x_name: name of the x axis.
        zero: True to begin a linear y axis at 0.
        marks: events.
        below, above: tuples (name, series) of additional quantities as functions of x. The quantity
            in `below` is shown as an additional x axis below the first x axis, and the quantity in
            `above` as an additional x axis above the plot. None for no additional axis.
    """

    title: str
    unit: str
    lines: Sequence[Line]
    x_name: str = "step"
    zero: bool = False
    marks: Sequence[Mark] = ()
    below: tuple[str, Series] | None = None
    above: tuple[str, Series] | None = None

    @property
    def has_log(self) -> bool:
        """True if at least one value is positive and can therefore be shown on a logarithmic
        axis."""
        return any(bool((line.series.y > _TINY).any()) for line in self.lines)

    @property
    def needs_log(self) -> bool:
        """True if most of a curve would not be visible on a linear axis, for example because a run
        diverged. This is assumed if all values are positive and the largest value is more than
        1,000 times the smallest value.
        """
        values = np.concatenate([np.empty(0), *(line.series.y for line in self.lines)])
        return (
            bool(len(values)) and values.min() > 0 and bool(values.max() > _HIDING * values.min())
        )

    def thinned(self, buckets: int) -> Chart:
        """Return a copy of the chart in which the number of points per curve is reduced with
        `thin`. Curves with error bars are not changed.
        """
        lines = [
            line if line.errors is not None else replace(line, series=thin(line.series, buckets))
            for line in self.lines
        ]
        return replace(self, lines=lines)


def draw(axes: Any, chart: Chart, *, log: bool = False) -> None:
    """Draw a chart.

    Args:
        axes: matplotlib axes.
        chart: the chart.
        log: True to draw a logarithmic y axis. Values that are not positive are then omitted.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    lines = [_positive(line) if log else line for line in chart.lines]
    lines = [line for line in lines if len(line.series)]
    if not lines:
        axes.axis("off")
        axes.text(0.5, 0.5, "nothing yet", color=_light("soft"), ha="center", va="center")
        return
    # Lines whose names begin with an underscore do not appear in a picture's legend.
    named: set[str] = set()
    for mark in chart.marks[-_MAX_MARKS:]:
        axes.axvline(
            mark.x,
            color=_light(_MARKS.get(mark.kind, "c3")),
            linestyle=(0, (3, 3)),
            linewidth=1.4,
            label=f"{'_' if mark.kind in named else ''}{mark.kind.replace('-', ' ')}",
        )
        named.add(mark.kind)
    for line in lines:
        is_dotted = not line.faint and len(line.series) <= _FEW
        axes.errorbar(
            line.series.x,
            line.series.y,
            yerr=line.errors,
            color=_light(f"c{line.colour % LINE_COLOURS}"),
            linestyle=(0, (4, 3)) if line.is_dashed else "-",
            linewidth=1 if line.faint else 1.8,
            alpha=0.3 if line.faint else 1,
            marker="o" if is_dotted else None,
            markersize=3.5,
            elinewidth=1.2,
            capsize=3,
            label=f"_{line.name}" if line.faint else plain_text(line.name),
            # Lines are not clipped, because the ends of the curves are at the edges of the plot.
            clip_on=False,
        )
    axes.margins(x=0)
    numbers = FuncFormatter(lambda value, _: compact(float(f"{value:.10g}")))
    if log:
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        factors = (1.0, 2.0, 5.0) if high < 1000 * low else (1.0,)
        axes.yaxis.set_major_locator(LogLocator(subs=factors))
        axes.yaxis.set_minor_locator(NullLocator())
    elif chart.zero:
        lowest, highest = (min(end(line.series.y) for line in lines) for end in (np.min, np.max))
        low, high = axes.get_ylim()
        axes.set_ylim(0 if lowest >= 0 else low, 0 if highest <= 0 and lowest < 0 else high)
    axes.xaxis.set_major_locator(MaxNLocator(7, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(numbers)
    axes.yaxis.set_major_formatter(numbers)
    axes.set_xlabel(chart.x_name, color=_light("soft"))
    axes.grid(axis="y", color=_light("grid"))
    axes.set_axisbelow(True)
    axes.tick_params(colors=_light("soft"), length=0)
    axes.spines[["left", "top", "right"]].set_visible(False)
    axes.spines["bottom"].set_color(_light("soft"))
    for name, edge in ((chart.below, "bottom"), (chart.above, "top")):
        if name is not None:
            _draw_second_axis(axes, *name, edge)


def _draw_second_axis(axes: Any, name: str, series: Series, edge: str) -> None:
    """Draw an additional x axis with ticks at round values of a quantity. Do nothing if the
    quantity decreases anywhere or never increases.
    """
    from matplotlib.ticker import MaxNLocator

    rises = np.diff(series.y, prepend=-np.inf) > 0
    if (np.diff(series.y) < 0).any() or rises.sum() < 2:
        return
    x, y = series.x[rises], series.y[rises]
    low, high = np.interp(axes.get_xlim(), x, y)
    ticks = MaxNLocator(7, steps=[1, 2, 5, 10]).tick_values(low, high)
    ticks = ticks[(ticks >= low) & (ticks <= high)]
    beside = axes.secondary_xaxis(edge)
    beside.set_xticks(np.interp(ticks, y, x), [compact(float(f"{tick:.10g}")) for tick in ticks])
    beside.tick_params(colors=_light("soft"), length=0)
    beside.spines[edge].set(visible=False)
    if edge == "bottom":
        beside.spines[edge].set_position(("outward", 34))
    beside.set_xlabel(name, color=_light("soft"))


def _light(name: str) -> str:
    return COLOURS[name][0]


def _positive(line: Line) -> Line:
    shown = line.series.y > _TINY
    series = Series(line.series.x[shown], line.series.y[shown])
    return replace(line, series=series, errors=None if line.errors is None else line.errors[shown])


# Pages

#: Margins around the plot for tick labels and axis names, and the additional margin for each
#: additional x axis, all in pixels.
_LEFT = 52
_RIGHT = 14
_TOP = 10
_BOTTOM = 38
_SECOND = 34


def svg(chart: Chart, width: int, height: int, *, log: bool = False) -> Markup:
    """Return a chart as SVG markup. Its colours are CSS variables of the page.

    Args:
        chart: the chart.
        width, height: size in pixels before the page scales the chart. Each additional x axis
            increases the height.
        log: True to draw a logarithmic y axis; see `draw`.
    """
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    top = _TOP + _SECOND * (chart.above is not None)
    bottom = _BOTTOM + _SECOND * (chart.below is not None)
    height += top + bottom - _TOP - _BOTTOM
    style = {
        "svg.fonttype": "none",
        # The ids inside the drawing are derived from this salt, because they must be unique on a
        # page.
        "svg.hashsalt": f"{visible(chart.title)} {chart.x_name} {width} {log}",
        "font.size": 11.5,
        "font.sans-serif": ["DejaVu Sans"],
    }
    stream = io.StringIO()
    with matplotlib.rc_context(style):
        # An SVG drawing has 72 dots per inch.
        figure = Figure(figsize=(width / 72, height / 72), dpi=72)
        inside = (width - _LEFT - _RIGHT) / width, (height - top - bottom) / height
        axes = figure.add_axes((_LEFT / width, bottom / height, *inside))
        for background in (figure.patch, axes.patch):
            background.set_visible(False)
        draw(axes, chart, log=log)
        metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        FigureCanvasSVG(figure).print_svg(stream, metadata=metadata)
    drawn = stream.getvalue()
    # Remove the style sheet and the group ids that matplotlib writes, because they would apply to
    # the whole page.
    drawn = re.sub(r"<style.*?</style>", "", drawn[drawn.index(">", drawn.index("<svg")) + 1 :])
    drawn = re.sub(r'<g id="[^"]*"', "<g", drawn)
    drawn = re.sub(r"#[0-9a-f]{6}\b", lambda found: f"var(--{_NAMES[found[0]]})", drawn)
    # readout.js uses the limits of the x axis and the margins to find the values under the pointer.
    ends = [*axes.get_xlim(), _LEFT, _RIGHT, top, bottom]
    opening = Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}" data-ends="{}">').format(
        width,
        height,
        visible(f"{chart.title} by {chart.x_name}"),
        " ".join(f"{float(end)!r}" for end in ends) if axes.axison else "",
    )
    # The markup does not need to be escaped, because it is written by matplotlib and contains no
    # text other than numbers and axis names.
    return opening + Markup(re.sub(r"\s+", " ", drawn))


def data_of(chart: Chart) -> str:
    """Return the data for a chart's read-out as JSON. It contains the name, style, x values and y
    values of each curve.
    """
    curves = [
        {
            "name": visible(line.name),
            "style": line.style,
            "x": [float(f"{x:.12g}") for x in line.series.x.tolist()],
            "y": [float(f"{y:.6g}") for y in line.series.y.tolist()],
        }
        for line in chart.lines
        if len(line.series)
    ]
    return json.dumps({"x": chart.x_name, "curves": curves}, allow_nan=False)


# Pictures

#: Number of buckets into which `thin` divides a curve in a picture. It exceeds the width of the
#: chart in pixels.
_BUCKETS = 1000
#: Colour of warnings, and height in inches of a line of text in a warning.
_WARNING, NOTE_INCHES = "#b3261e", 0.19


def plain_text(text: str) -> str:
    """Prepare a string for matplotlib. Control characters are replaced, and dollar signs are
    escaped, because they would start a formula. If the string begins with an underscore, a space is
    inserted before it, because matplotlib would otherwise omit the curve from the legend.
    """
    printable = "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)
    return (" " if text.startswith("_") else "") + printable.replace("$", r"\$")


def draw_in_picture(axes: Any, chart: Chart, *, log: bool | None = None) -> None:
    """Draw a chart with its title and legend.

    Args:
        axes: matplotlib axes.
        chart: the chart.
        log: True for a logarithmic y axis, False for a linear y axis, None to choose the axis based
            on the values.
    """
    draw(axes, chart.thinned(_BUCKETS), log=chart.needs_log if log is None else log)
    title = f"{chart.title} ({chart.unit})" if chart.unit else chart.title
    axes.set_title(plain_text(title), loc="left", fontsize="medium")
    if len(axes.get_legend_handles_labels()[0]) > 1:
        axes.legend(fontsize="small", frameon=False)


def draw_title(figure: Any, title: str, notes: Sequence[str]) -> None:
    """Add a title above a figure, and warnings below the title.

    Args:
        figure: matplotlib figure.
        title: the title.
        notes: warnings, one per line. Each line takes `NOTE_INCHES` of the figure's height.
    """
    figure.suptitle("\n".join([title, *notes]), color=_WARNING if notes else "black", fontsize=11)


def png(figure: Any) -> bytes:
    """Return a matplotlib figure as PNG bytes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    picture = io.BytesIO()
    with warnings.catch_warnings():
        # The font may lack some characters of a sample. They appear as boxes in the picture, so
        # matplotlib's warnings about them are not needed.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        FigureCanvasAgg(figure).print_png(picture, metadata={"Software": PICTURE_ORIGIN})
    return picture.getvalue()


def position_picture(name: str, found: ByPosition, context: int) -> bytes:
    """Draw the perplexity at each position and return the chart as PNG bytes.

    Args:
        name: name of the model.
        found: perplexity of the model at each position.
        context: context length of the model in tokens, drawn as a dotted line.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    middles = [(one.first + one.last) / 2 for one in found.stretches]
    (line,) = axes.plot(middles, [one.perplexity for one in found.stretches])
    if context < found.seq_len:
        axes.axvline(context, color=line.get_color(), linestyle=":", label="end of the context")
        axes.legend()
    axes.set(xlabel="position", ylabel="perplexity", yscale="log", xlim=(0, None))
    axes.set_title(plain_text(name), fontsize=10)
    axes.grid(alpha=0.3, which="both")
    return png(figure)

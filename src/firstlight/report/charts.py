"""Charts of the HTML pages, drawn as SVG markup without styles and scripts. (The PNG pictures are
drawn by matplotlib: see pictures.py.)"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from markupsafe import Markup

from firstlight.console import compact, visible
from firstlight.report.axes import (
    Scale,
    SecondAxis,
    linear_range,
    linear_ticks,
    log_range,
    log_ticks,
)
from firstlight.report.series import Floats, Series, thin

#: Number of line colours in the pages' style. Further lines use the same colours, dashed.
COLOURS = 8
#: Largest number of points for which a line's points are drawn as dots.
_FEW = 60
#: Ratio of the largest to the smallest value from which a linear axis hides the small values.
_HIDING = 1000
#: Largest number of events drawn in one chart; if there are more, they are thinned evenly.
_MAX_MARKS = 120


@dataclass(frozen=True)
class Line:
    """A curve of a chart.

    Attributes:
        name: the curve's name in the legend and the read-out.
        series: points of the curve.
        colour: number of the colour, from 0; see `COLOURS`.
        faint: True draws the curve in the background, without an entry in the legend.
        errors: half the length of each point's error bar, [N]; None draws no error bars.
    """

    name: str
    series: Series
    colour: int
    faint: bool = False
    errors: Floats | None = None

    @property
    def style(self) -> str:
        """The CSS classes of the curve's elements."""
        dashes = " dashed" if self.colour // COLOURS % 2 else ""
        return f"c{self.colour % COLOURS}{dashes}{' faint' if self.faint else ''}"

    @property
    def dotted(self) -> bool:
        """True if the line's points are drawn."""
        return not self.faint and len(self.series) <= _FEW


@dataclass(frozen=True)
class Mark:
    """An event, drawn as a vertical line.

    Attributes:
        x: its value on the x axis.
        kind: CSS class of the page's style, and name in the legend.
        text: description, shown as a tooltip.
    """

    x: float
    kind: str
    text: str


@dataclass(frozen=True)
class Chart:
    """A chart with its curves.

    Attributes:
        title: the quantity that the chart shows.
        unit: unit of the y axis; "" if the title already names it.
        lines: the curves.
        x_name: name of the x axis.
        width, height: size in pixels, before the page scales it.
        zero: True lets a linear y axis begin at 0.
        marks: events.
        below, above: additional x axes below the first one and above the plot.
    """

    title: str
    unit: str
    lines: Sequence[Line]
    x_name: str = "step"
    width: int = 520
    height: int = 240
    zero: bool = False
    marks: Sequence[Mark] = ()
    below: SecondAxis | None = None
    above: SecondAxis | None = None

    @property
    def top(self) -> int:
        """Height of the space above the plot, in pixels."""
        return _TOP + _SECOND * (self.above is not None)

    @property
    def bottom(self) -> int:
        """Height of the space below the plot, in pixels."""
        return _BOTTOM + _SECOND * (self.below is not None)

    @property
    def has_log(self) -> bool:
        """True if a value is above 0, so that a logarithmic axis would show it."""
        return any(bool((line.series.y > 0).any()) for line in self.lines)

    @property
    def needs_log(self) -> bool:
        """True if a linear axis would hide most of the curves, because of a run that diverged: all
        values are above 0, and the largest is more than 1,000 times the smallest."""
        values = np.concatenate([np.empty(0), *(line.series.y for line in self.lines)])
        return (
            bool(len(values)) and values.min() > 0 and bool(values.max() > _HIDING * values.min())
        )


#: Margins around the plot for ticks and names, in pixels.
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 10, 38
#: Additional margin for a second x axis, in pixels.
_SECOND = 34


def thinned(chart: Chart, buckets: int) -> Chart:
    """The chart with its curves thinned by `thin`, except those with error bars."""
    lines = [
        line if line.errors is not None else replace(line, series=thin(line.series, buckets))
        for line in chart.lines
    ]
    return replace(chart, lines=lines)


def data_of(chart: Chart) -> str:
    """The data of a chart's read-out as JSON: name, style, x and y of each curve."""
    curves = [
        {
            "name": visible(line.name),
            "style": line.style,
            "x": [_short(x, 12) for x in line.series.x.tolist()],
            "y": [_short(y, 6) for y in line.series.y.tolist()],
        }
        for line in chart.lines
        if len(line.series)
    ]
    return json.dumps({"x": chart.x_name, "unit": chart.unit, "curves": curves}, allow_nan=False)


def _short(value: float, digits: int) -> float | int:
    number = float(f"{value:.{digits}g}")
    return int(number) if number.is_integer() and abs(number) < 2**53 else number


def svg(chart: Chart, *, log: bool = False) -> Markup:
    """Draw a chart.

    Args:
        chart: the chart.
        log: True draws a logarithmic y axis, which leaves out values that are not above 0.
    """
    lines = [_positive(line) for line in chart.lines] if log else list(chart.lines)
    lines = [line for line in lines if len(line.series)]
    if not lines:
        return _frame(
            chart,
            Markup('<text class="nothing" x="{}" y="{}">nothing yet</text>').format(
                chart.width // 2, chart.height // 2
            ),
        )
    x, y = _scales(chart, lines, log)
    parts = [_grid(chart, x, y)]
    parts += _drawn_marks(chart, x)
    for line in sorted(lines, key=lambda line: not line.faint):
        parts += _drawn(line, x, y)
    # readout.js needs the axes and margins to find the values under the pointer.
    margins = f"{_LEFT} {_RIGHT} {chart.top} {chart.bottom}"
    ends = f"{x.low!r} {x.high!r} {y.low!r} {y.high!r} {int(log)} {margins}"
    return _frame(chart, Markup("").join(parts), ends)


def _frame(chart: Chart, inside: Markup, ends: str = "") -> Markup:
    return Markup(
        '<svg viewBox="0 0 {width} {height}" role="img" aria-label="{title}" data-ends="{ends}">'
        "{inside}</svg>"
    ).format(
        width=chart.width,
        height=chart.height,
        title=visible(f"{chart.title} by {chart.x_name}"),
        ends=ends,
        inside=inside,
    )


def _positive(line: Line) -> Line:
    shown = line.series.y > 0
    errors = None if line.errors is None else line.errors[shown]
    series = Series(line.series.x[shown], line.series.y[shown])
    return replace(line, series=series, errors=errors)


def _scales(chart: Chart, lines: Sequence[Line], log: bool) -> tuple[Scale, Scale]:
    """The x and the y axis, with ranges that contain all lines, error bars and marks."""
    xs = np.concatenate([line.series.x for line in lines] + [np.array([m.x for m in chart.marks])])
    lows, highs = [], []
    for line in lines:
        errors = np.zeros(len(line.series)) if line.errors is None else line.errors
        lows.append(float((line.series.y - (0 if log else errors)).min()))
        highs.append(float((line.series.y + errors).max()))
    first, last = linear_range(float(xs.min()), float(xs.max()), zero=False, margin=0.0)
    if log:
        low, high = log_range(min(lows), max(highs))
    else:
        low, high = linear_range(min(lows), max(highs), zero=chart.zero)
    return (
        Scale(first, last, _LEFT, chart.width - _RIGHT),
        Scale(low, high, chart.height - chart.bottom, chart.top, log),
    )


def _grid(chart: Chart, x: Scale, y: Scale) -> Markup:
    """Grid lines with their numbers, and the x axes with ticks and names."""
    left, right, top, bottom = _LEFT, chart.width - _RIGHT, chart.top, chart.height - chart.bottom
    ticks = (log_ticks if y.log else linear_ticks)(y.low, y.high, (bottom - top) // 32)
    parts = []
    for tick in ticks:
        place = f"{y.place(tick):.1f}"
        parts.append(
            Markup(
                '<path class="grid" d="M{0} {2}H{1}"/><text class="y" x="{3}" y="{2}" dy="4">{4}'
                "</text>"
            ).format(left, right, place, left - 8, compact(tick))
        )
    count = max((right - left) // 84, 4)
    # For each x axis: ticks, name, length of the ticks' lines, y of the axis, and the offsets of
    # numbers and name from it, in pixels.
    rows = [([(t, compact(t)) for t in _x_ticks(x, count)], chart.x_name, 5, bottom, 18, 34)]
    if chart.below is not None:
        rows.append((chart.below.ticks(x.low, x.high, count), chart.below.name, 0, bottom, 52, 68))
    if chart.above is not None:
        rows.append((chart.above.ticks(x.low, x.high, count), chart.above.name, -5, top, -9, -25))
    name = Markup('<text class="name" x="{}" y="{}">{}</text>')
    for numbers, title, line, edge, number_y, name_y in rows:
        for tick, number in numbers:
            drawn = Markup(
                '<path class="tick" d="M{0} {1}v{2}"/><text class="x" x="{0}" y="{3}">{4}</text>'
            ).format(f"{x.place(tick):.1f}", edge, line, edge + number_y, number)
            parts.append(drawn)
        parts.append(name.format((left + right) // 2, edge + name_y, title))
    parts.append(Markup('<path class="axis" d="M{} {}H{}"/>').format(left, bottom, right))
    return Markup("").join(parts)


def _x_ticks(x: Scale, count: int) -> Iterator[float]:
    """The ticks of the x axis that are within the plot."""
    for tick in linear_ticks(x.low, x.high, count):
        if x.start - 1 <= x.place(tick) <= x.end + 1:
            yield tick


def _drawn(line: Line, x: Scale, y: Scale) -> list[Markup]:
    """The SVG elements of a curve: line, dots and error bars."""
    places = [
        (f"{x.place(a):.1f}".removesuffix(".0"), f"{y.place(b):.1f}".removesuffix(".0"))
        for a, b in zip(line.series.x.tolist(), line.series.y.tolist(), strict=True)
    ]
    style = line.style
    parts = []
    if len(places) > 1:
        path = "L".join(f"{a} {b}" for a, b in places)
        parts.append(Markup('<path class="line {}" d="M{}"/>').format(style, path))
    if line.dotted or len(places) == 1:
        dots = Markup("").join(
            Markup('<circle class="dot {}" cx="{}" cy="{}" r="{}"/>').format(style, a, b, 3)
            for a, b in places
        )
        parts.append(dots)
    if line.errors is not None:
        parts.append(_error_bars(line, x, y))
    return parts


def _error_bars(line: Line, x: Scale, y: Scale) -> Markup:
    assert line.errors is not None
    bars = []
    triples = (line.series.x.tolist(), line.series.y.tolist(), line.errors.tolist())
    for a, b, error in zip(*triples, strict=True):
        if not math.isfinite(error) or error <= 0:
            continue
        low = max(b - error, y.low) if y.log else b - error
        place = x.place(a)
        above, below = y.place(b + error), y.place(low)
        bars.append(f"M{place:.1f} {below:.1f}V{above:.1f}M{place - 3:.1f} {above:.1f}h6")
        bars.append(f"M{place - 3:.1f} {below:.1f}h6")
    return Markup('<path class="error {}" d="{}"/>').format(line.style, "".join(bars))


def _drawn_marks(chart: Chart, x: Scale) -> Iterator[Markup]:
    marks = chart.marks
    if len(marks) > _MAX_MARKS:
        chosen = {round(i * (len(marks) - 1) / (_MAX_MARKS - 1)) for i in range(_MAX_MARKS)}
        marks = [mark for i, mark in enumerate(marks) if i in chosen]
    for mark in marks:
        yield Markup('<path class="mark {}" d="M{} {}V{}"><title>{}</title></path>').format(
            mark.kind,
            f"{x.place(mark.x):.1f}",
            chart.top,
            chart.height - chart.bottom,
            visible(mark.text),
        )

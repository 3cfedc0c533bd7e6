"""Charts of the pages: axes with ranges and ticks, drawn as SVG markup of our own, without a style
or a script in it. The pictures (PNG) are matplotlib's."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from markupsafe import Markup

from firstlight.console import compact, visible
from firstlight.report.records import Floats, Series, thin

#: Ranges smaller than this share of their numbers are rounding.
_NOTHING = 1e-9
_TINY = 1e-300
#: Powers of ten that floats have with room to spare.
_MOST = 305.0


@dataclass(frozen=True)
class Scale:
    """From a quantity to a place: linear or logarithmic.

    Attributes:
        low, high: the quantity at both ends; above 0 where `log`.
        start, end: the places of these, in pixels.
    """

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def place(self, value: float) -> float:
        """Where a quantity stands, in pixels."""
        low, high, value = (
            (math.log10(self.low), math.log10(self.high), math.log10(value))
            if self.log
            else (self.low, self.high, value)
        )
        return self.start + (value - low) / (high - low) * (self.end - self.start)


def linear_range(
    low: float, high: float, *, zero: bool, margin: float = 0.05
) -> tuple[float, float]:
    """A range that shows all from `low` to `high`, with some room, and is never empty.

    Args:
        zero: the range begins (or ends) at 0.
        margin: the room, as a share of what is shown.
    """
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    greatest = max(abs(low), abs(high))
    if greatest < _TINY:
        return (0.0, 1.0)
    if high - low < _NOTHING * greatest:
        low, high = low - 0.1 * greatest, high + 0.1 * greatest
    room = margin * (high - low)
    return (
        low if zero and low == 0 else low - room,
        high if zero and high == 0 else high + room,
    )


def log_range(low: float, high: float, margin: float = 0.05) -> tuple[float, float]:
    """The same for a logarithmic axis; both are above 0."""
    first, last = math.log10(max(low, _TINY)), math.log10(max(high, _TINY))
    room = margin * (last - first) if last - first > 1e-6 else 0.2
    return 10 ** max(first - room, -_MOST), 10 ** min(last + room, _MOST)


def linear_ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers from `low` to `high`: multiples of 1, 2 or 5 times a power of
    ten."""
    rough = (high - low) / max(count, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first, last = math.ceil(low / step - _NOTHING), math.floor(high / step + _NOTHING)
    # By division where the step is below 1: 3 / 10 is the float nearest to 0.3, 3 * 0.1 is not.
    inverse = round(1 / step)
    if inverse > 1 and math.isclose(step * inverse, 1):
        return [number / inverse for number in range(first, last + 1)]
    return [number * step for number in range(first, last + 1)]


#: Up to so many powers of ten, what stands between them.
_FACTORS: Sequence[tuple[float, Sequence[float]]] = (
    (1, (1, 1.5, 2, 3, 5, 7)),
    (2, (1, 2, 5)),
    (3, (1, 3)),
    (math.inf, (1,)),
)


def log_ticks(low: float, high: float, count: int) -> list[float]:
    """Round numbers from `low` to `high` (both above 0) on a logarithmic axis: powers of ten where
    there are many of them, 1, 2 and 5 times these else, and multiples within one."""
    decades = math.log10(high) - math.log10(low)
    if decades < 0.7:
        return [tick for tick in linear_ticks(low, high, count) if tick > 0]
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = next(chosen for most, chosen in _FACTORS if decades <= most)
    every = max(1, math.ceil(decades / max(count, 1)))
    ticks = [f * 10.0**e for e in exponents if e % every == 0 for f in factors]
    return [tick for tick in ticks if low <= tick <= high]


#: Colours that a page's style has; more lines begin again, dashed.
COLOURS = 8
#: Lines of fewer points have dots.
_FEW = 60
#: Times the smallest value from which on a linear axis shows nothing of it.
_HIDING = 1000
#: Events drawn in one chart, the first and the last among them.
_MAX_MARKS = 120


@dataclass(frozen=True)
class Line:
    """A curve of a chart.

    Attributes:
        name: the curve's name in the legend and the read-out.
        series: points of the curve.
        colour: number of it, from 0.
        faint: True draws it in the background, without a place in the legend.
        errors: (N,), half the length of each point's error bar; without, there are none.
    """

    name: str
    series: Series
    colour: int
    faint: bool = False
    errors: Floats | None = None

    @property
    def style(self) -> str:
        """The classes of its elements."""
        dashes = " dashed" if self.colour // COLOURS % 2 else ""
        return f"c{self.colour % COLOURS}{dashes}{' faint' if self.faint else ''}"

    @property
    def dotted(self) -> bool:
        """Whether its points are drawn."""
        return not self.faint and len(self.series) <= _FEW


@dataclass(frozen=True)
class Mark:
    """Something that happened at a place of the x axis; `kind` is a class of the page's style."""

    x: float
    kind: str
    text: str


@dataclass(frozen=True)
class Chart:
    """A chart with its curves.

    Attributes:
        title: the quantity that the chart shows.
        unit: unit of the y axis; "" where the title has it.
        lines: the curves, in the order they are drawn.
        x_name: name of the x axis.
        width, height: sizes in pixels, before a page stretches it.
        zero: a linear y axis begins at 0.
        marks: vertical lines.
    """

    title: str
    unit: str
    lines: Sequence[Line]
    x_name: str = "step"
    width: int = 520
    height: int = 240
    zero: bool = False
    marks: Sequence[Mark] = ()

    @property
    def has_log(self) -> bool:
        """Whether anything could be seen on a logarithmic axis."""
        return any(bool((line.series.y > 0).any()) for line in self.lines)

    @property
    def needs_log(self) -> bool:
        """Whether a linear axis would hide most of the curves: one is of a run that diverged."""
        values = np.concatenate([np.empty(0), *(line.series.y for line in self.lines)])
        return (
            bool(len(values)) and values.min() > 0 and bool(values.max() > _HIDING * values.min())
        )


#: Pixels around the plot: for ticks and names.
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 10, 38


def thinned(chart: Chart, buckets: int) -> Chart:
    """The chart with no more points than can be seen."""
    lines = [
        line if line.errors is not None else replace(line, series=thin(line.series, buckets))
        for line in chart.lines
    ]
    return replace(chart, lines=lines)


def data_of(chart: Chart) -> str:
    """What a chart's read-out needs, as JSON: for each curve that is read, its x and y."""
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
    """Draw a chart; what is not above 0 is left out of a logarithmic one."""
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
    ends = f"{x.low!r} {x.high!r} {y.low!r} {y.high!r} {int(log)} {_LEFT} {_RIGHT} {_TOP} {_BOTTOM}"
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
        Scale(low, high, chart.height - _BOTTOM, _TOP, log),
    )


def _grid(chart: Chart, x: Scale, y: Scale) -> Markup:
    """Grid lines with the numbers beside them, and the name of the x axis."""
    left, right, top, bottom = _LEFT, chart.width - _RIGHT, _TOP, chart.height - _BOTTOM
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
    for tick in _x_ticks(x, max((right - left) // 84, 4)):
        place = f"{x.place(tick):.1f}"
        parts.append(
            Markup(
                '<path class="tick" d="M{0} {1}v5"/><text class="x" x="{0}" y="{2}">{3}</text>'
            ).format(place, bottom, bottom + 18, compact(tick))
        )
    parts.append(Markup('<path class="axis" d="M{} {}H{}"/>').format(left, bottom, right))
    name = Markup('<text class="name" x="{}" y="{}">{}</text>')
    parts.append(name.format((left + right) // 2, chart.height - 4, chart.x_name))
    return Markup("").join(parts)


def _x_ticks(x: Scale, count: int) -> Iterator[float]:
    """Ticks of the x axis whose numbers stay inside the picture."""
    for tick in linear_ticks(x.low, x.high, count):
        if x.start - 1 <= x.place(tick) <= x.end + 1:
            yield tick


def _drawn(line: Line, x: Scale, y: Scale) -> list[Markup]:
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
            mark.kind, f"{x.place(mark.x):.1f}", _TOP, chart.height - _BOTTOM, visible(mark.text)
        )

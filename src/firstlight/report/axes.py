"""X and y axes of charts: ranges, ticks, and second x axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from firstlight.console import compact
from firstlight.report.series import Series

#: A range that is smaller than this fraction of its values is treated as a rounding error.
_NOTHING = 1e-9
#: Smaller numbers are treated as 0.
_TINY = 1e-300
#: Largest power of ten of an axis: floats reach 1e308.
_MOST = 305.0


@dataclass(frozen=True)
class Scale:
    """Maps values to positions on an axis, linearly or logarithmically.

    Attributes:
        low, high: values at both ends of the axis; above 0 if `log`.
        start, end: positions of both ends, in pixels.
        log: True for a logarithmic axis.
    """

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def place(self, value: float) -> float:
        """The position of a value on the axis, in pixels."""
        low, high, value = (
            (math.log10(self.low), math.log10(self.high), math.log10(value))
            if self.log
            else (self.low, self.high, value)
        )
        return self.start + (value - low) / (high - low) * (self.end - self.start)


def linear_range(
    low: float, high: float, *, zero: bool, margin: float = 0.05
) -> tuple[float, float]:
    """The range of a linear axis that contains `low` to `high` with a margin; it is never empty.

    Args:
        low, high: lowest and highest value that is shown.
        zero: True extends the range to 0.
        margin: margin at each end, as a fraction of the range; none at 0 if `zero`.
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
    """The range of a logarithmic axis that contains `low` to `high`, both above 0, with a margin at
    each end, as a fraction of the range in powers of ten."""
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
    # For steps below 1, divide: 3 / 10 is the float nearest to 0.3, but 3 * 0.1 is not.
    inverse = round(1 / step)
    if inverse > 1 and math.isclose(step * inverse, 1):
        return [number / inverse for number in range(first, last + 1)]
    return [number * step for number in range(first, last + 1)]


#: Largest number of powers of ten on an axis -> factors of the ticks within each power of ten.
_FACTORS: Sequence[tuple[float, Sequence[float]]] = (
    (1, (1, 1.5, 2, 3, 5, 7)),
    (2, (1, 2, 5)),
    (3, (1, 3)),
    (math.inf, (1,)),
)


def log_ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers from `low` to `high` (both above 0) for a logarithmic axis.

    These are powers of ten for a wide range, also multiples of them (see `_FACTORS`) for a narrower
    one, and the ticks of a linear axis for less than 0.7 powers of ten.
    """
    decades = math.log10(high) - math.log10(low)
    if decades < 0.7:
        return [tick for tick in linear_ticks(low, high, count) if tick > 0]
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = next(chosen for most, chosen in _FACTORS if decades <= most)
    every = max(1, math.ceil(decades / max(count, 1)))
    ticks = [f * 10.0**e for e in exponents if e % every == 0 for f in factors]
    return [tick for tick in ticks if low <= tick <= high]


@dataclass(frozen=True)
class SecondAxis:
    """An additional x axis for a quantity that rises with the quantity of the first x axis.

    Attributes:
        name: name of the quantity.
        series: values of the quantity (y) by values of the first axis (x), both rising; at least
            two points.
    """

    name: str
    series: Series

    def ticks(self, low: float, high: float, count: int) -> list[tuple[float, str]]:
        """About `count` ticks at round numbers: pairs of the value on the first axis at which a
        tick is, and the tick's number as text.

        Args:
            low, high: values at the ends of the first axis.
            count: wanted number of ticks.
        """
        x, y = self.series.x, self.series.y
        first, last = np.interp((low, high), x, y).tolist()
        ticks = linear_ticks(first, last, count) if last > first else []
        return [(float(np.interp(tick, y, x)), compact(tick)) for tick in ticks]


def second_axis(name: str, series: Series) -> SecondAxis | None:
    """A second axis for a quantity by steps; None if the quantity falls, or never rises."""
    if len(series) < 2 or (np.diff(series.y) < 0).any():
        return None
    rises = np.concatenate([[True], np.diff(series.y) > 0])
    return SecondAxis(name, Series(series.x[rises], series.y[rises])) if rises.sum() > 1 else None

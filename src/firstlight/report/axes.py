"""X and y axes of charts: ranges, ticks, and a second x axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from firstlight.console import compact
from firstlight.report.series import Series

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
        """Position of a quantity on the axis, in pixels."""
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
        margin: the room at both ends, as a share of the range.
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


#: (greatest number of powers of ten, factors of the ticks within each of them)
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


@dataclass(frozen=True)
class SecondAxis:
    """An x axis beside the first one, of a quantity that rises with it.

    Attributes:
        name: name of the quantity.
        series: the quantity (y) by the first axis (x), both rising; at least two points.
    """

    name: str
    series: Series

    def ticks(self, low: float, high: float, count: int) -> list[tuple[float, str]]:
        """(place on the first axis, number) of about `count` round numbers.

        Args:
            low, high: the ends of the first axis.
        """
        x, y = self.series.x, self.series.y
        first, last = np.interp((low, high), x, y).tolist()
        ticks = linear_ticks(first, last, count) if last > first else []
        return [(float(np.interp(tick, y, x)), compact(tick)) for tick in ticks]


def second_axis(name: str, series: Series) -> SecondAxis | None:
    """The axis of a quantity by steps; None where it does not rise."""
    if len(series) < 2 or (np.diff(series.y) < 0).any():
        return None
    rises = np.concatenate([[True], np.diff(series.y) > 0])
    return SecondAxis(name, Series(series.x[rises], series.y[rises])) if rises.sum() > 1 else None

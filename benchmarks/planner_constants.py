"""Fitting the constants of the GPU speed model to measured steps, and the file with a machine's
constants."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from firstlight.files.atomic import write_json
from firstlight.hardware.gpus import GPU
from firstlight.planner.memory.prediction import MemoryPrediction
from firstlight.planner.speed.gpu import (
    BOUNDS,
    DEFAULT_SHARES,
    FORMAT,
    MeasuredGpu,
    Range,
    all_measured,
    read_measured,
    shares_of,
)
from firstlight.planner.speed.throughput import Workload, predict_speed

#: Rounds over all constants.
_ROUNDS = 4
#: Number of search steps for one constant; each narrows its interval to 0.62 of the width.
_TRIES = 9
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class TimedStep:
    """A training step that was measured.

    Attributes:
        counted: operators of all micro-batches of the step, see `all_micro_batches`.
        work: see `Workload`.
        seconds: median time of the step.
    """

    counted: MemoryPrediction
    work: Workload
    seconds: float


def relative_errors(
    steps: Sequence[TimedStep], gpu: GPU, constants: Mapping[str, float] | None
) -> list[float]:
    """Return the relative error of each step's predicted time; positive if the prediction is too
    long.

    Args:
        steps: measured steps.
        gpu: the GPU that they ran on.
        constants: values by the names in `BOUNDS`; None takes the data sheet's model.
    """
    shares = DEFAULT_SHARES if constants is None else shares_of(constants)
    return [
        predict_speed(one.counted, one.work, gpu, shares).step_seconds.expected / one.seconds - 1
        for one in steps
    ]


def fit_constants(steps: Sequence[TimedStep], gpu: GPU) -> dict[str, float]:
    """Return the constants that fit measured steps best.

    Coordinate descent: each constant in turn is set to the minimum of the mean squared logarithm of
    predicted over measured seconds (golden-section search on a logarithmic scale), for `_ROUNDS`
    rounds. A constant that no step depends on keeps the value of the data sheet's model.

    Args:
        steps: measured steps, at least one.
        gpu: the GPU that they ran on.
    """
    found = {name: _expected(name) for name in BOUNDS}

    def loss(name: str) -> Callable[[float], float]:
        def of(logarithm: float) -> float:
            errors = relative_errors(steps, gpu, {**found, name: math.exp(logarithm)})
            return statistics.fmean(math.log1p(max(error, -0.999)) ** 2 for error in errors)

        return of

    for _ in range(_ROUNDS):
        for name, (low, high) in BOUNDS.items():
            place = math.log(found[name])
            best, least = _minimum(loss(name), math.log(low), math.log(high))
            # If the loss does not depend on a constant, its value is unchanged.
            if least < loss(name)(place) * (1 - 1e-9):
                found[name] = min(max(math.exp(best), low), high)
    return found


def _expected(name: str) -> float:
    share: Range = getattr(DEFAULT_SHARES, name)
    return share.expected


def _minimum(function: Callable[[float], float], low: float, high: float) -> tuple[float, float]:
    """Return the argument and the value of a function's approximate minimum between two bounds, by
    golden-section search."""
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_left, at_right = function(left), function(right)
    for _ in range(_TRIES):
        if at_left < at_right:
            high = right
            right = left
            at_right = at_left
            left = high - _GOLDEN * (high - low)
            at_left = function(left)
        else:
            low = left
            left = right
            at_left = at_right
            right = low + _GOLDEN * (high - low)
            at_right = function(right)
    return (left, at_left) if at_left < at_right else (right, at_right)


def save_measured(path: Path, name: str, measured: MeasuredGpu) -> None:
    """Write the measurements of a GPU type to a file, keeping those of other types. A file that is
    missing, damaged or in another format is recreated.

    Raises:
        StorageError: a file system error prevents writing.
    """
    gpus = {key: asdict(value) for key, value in read_measured(path).items()}
    write_json(path, {"format": FORMAT, "gpus": {**gpus, name: asdict(measured)}})
    # Clear the cache so that the next prediction in this process uses the new file.
    all_measured.cache_clear()

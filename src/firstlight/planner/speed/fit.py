"""The constants of the speed model of GPUs, fitted on steps that were measured on one.

Each constant in turn is put where the squares of the relative errors of all steps are least (by
golden-section search on a logarithmic scale), some rounds long. A constant that no step depends on
stays where the data sheet's model has it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from firstlight.hardware.gpus import GPU
from firstlight.planner.memory.prediction import MemoryPrediction
from firstlight.planner.speed.gpu import BOUNDS, DEFAULT_SHARES, Range, shares_of
from firstlight.planner.speed.throughput import Workload, predict_speed

_ROUNDS = 4
#: Tries of one constant in a round: each narrows it to 0.62 of the width.
_TRIES = 9
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class TimedStep:
    """A training step that was measured.

    Attributes:
        counted: its operators, see `speed_recipes.count_operators`.
        work: see `Workload`.
        seconds: median time of the step.
    """

    counted: MemoryPrediction
    work: Workload
    seconds: float


def relative_errors(
    steps: Sequence[TimedStep], gpu: GPU, constants: Mapping[str, float] | None
) -> list[float]:
    """The relative error of each step's predicted time; positive is too slow.

    Args:
        constants: values by the names in `BOUNDS`; None is the data sheet's model.
    """
    shares = DEFAULT_SHARES if constants is None else shares_of(constants)
    return [
        predict_speed(one.counted, one.work, gpu, shares).step_seconds.expected / one.seconds - 1
        for one in steps
    ]


def fit_constants(steps: Sequence[TimedStep], gpu: GPU) -> dict[str, float]:
    """The constants that fit measured steps best.

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
            # Where nothing depends on a constant, every place is as good.
            if least < loss(name)(place) * (1 - 1e-9):
                found[name] = min(max(math.exp(best), low), high)
    return found


def _expected(name: str) -> float:
    share: Range = getattr(DEFAULT_SHARES, name)
    return share.expected


def _minimum(function: Callable[[float], float], low: float, high: float) -> tuple[float, float]:
    """The place and the value of a function's minimum between two places, about."""
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_left, at_right = function(left), function(right)
    for _ in range(_TRIES):
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = high - _GOLDEN * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + _GOLDEN * (high - low)
            at_right = function(right)
    return (left, at_left) if at_left < at_right else (right, at_right)

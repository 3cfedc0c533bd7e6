"""The speed of a recipe's training step on a machine."""

from __future__ import annotations

import dataclasses
import functools

from firstlight.models.accounting import count_parameters, meta_model, train_flops_per_token
from firstlight.planner.calibration import Calibration
from firstlight.planner.calibration_store import (
    load_calibration,
    measure_operators,
    save_calibration,
)
from firstlight.planner.machine import Machine
from firstlight.planner.prediction import MemoryPrediction, OperatorCount
from firstlight.planner.ranks import exchange_of
from firstlight.planner.throughput import SpeedPrediction, Workload, predict_speed
from firstlight.training.config import Recipe

#: For operators of a recipe that were never timed on this machine.
_MEASURING_SECONDS = 3.0

#: What runs once a step, however many micro-batches it has.
_ONCE = ("clipping", "optimizer")

#: Micro-batches that a trace has at most.
_TRACED = 2


def speed_of(
    prediction: MemoryPrediction, recipe: Recipe, machine: Machine, *, measures: bool = True
) -> SpeedPrediction | None:
    """How fast a recipe trains; None on a GPU whose rates are not known.

    Args:
        prediction: of its training step, in one process.
        recipe: settled.
        machine: to run on.
        measures: whether this machine's CPU has those operators timed that were not before, the
            costliest first, for some seconds.
    """
    assert recipe.model is not None
    assert recipe.data.seq_len is not None
    if machine.gpu is None and machine.target.kind == "cuda":
        return None
    count = machine.count
    accumulation = recipe.batch.accumulation(recipe.data.seq_len, count)
    prediction = _whole_step(prediction, accumulation)
    model = meta_model(recipe.model)
    work = Workload(
        tokens_a_step=recipe.batch.rows * recipe.data.seq_len * accumulation * count,
        flops_per_token=train_flops_per_token(
            model, recipe.data.seq_len, frozen=recipe.lora is not None
        ),
        precision=recipe.efficiency.precision,
        compiled=recipe.efficiency.compile is True,
        cuda_graphs=recipe.efficiency.compile_mode in ("reduce-overhead", "max-autotune"),
        exchange=exchange_of(recipe, count_parameters(model).total, count),
    )
    if machine.gpu is not None:
        return predict_speed(prediction, work, machine.gpu)
    calibration = this_calibration()
    before = len(calibration.entries)
    if measures:
        measure_operators(calibration, _unknown(calibration, prediction), _MEASURING_SECONDS)
    if len(calibration.entries) > before:
        save_calibration(calibration)
    return predict_speed(prediction, work, calibration)


@functools.cache
def this_calibration() -> Calibration:
    """This machine's store, with what its reference operators take now."""
    return load_calibration()


def _unknown(calibration: Calibration, prediction: MemoryPrediction) -> tuple[OperatorCount, ...]:
    """None where all but a tenth of the time is known."""
    known, total = 0.0, 0.0
    for entry in prediction.operators:
        estimate = calibration.seconds(entry.operator)
        total += entry.count * estimate.seconds
        known += entry.count * estimate.seconds * (estimate.source == "measured")
    return () if known >= 0.9 * total else prediction.operators


def _whole_step(prediction: MemoryPrediction, accumulation: int) -> MemoryPrediction:
    """With the operators of all micro-batches."""
    traced = min(_TRACED, accumulation)
    if traced == accumulation:
        return prediction
    operators = tuple(
        entry
        if entry.operator.phase in _ONCE
        else dataclasses.replace(entry, count=round(entry.count * accumulation / traced))
        for entry in prediction.operators
    )
    return dataclasses.replace(prediction, operators=operators)

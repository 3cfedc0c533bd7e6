"""The speed of a recipe's training step on a machine."""

from __future__ import annotations

import functools

from firstlight.models.accounting import count_parameters, meta_model
from firstlight.planner.calibration import Calibration
from firstlight.planner.calibration_store import (
    load_calibration,
    measure_operators,
    save_calibration,
)
from firstlight.planner.machine import Machine
from firstlight.planner.parts import copies_of
from firstlight.planner.prediction import MemoryPrediction, OperatorCount
from firstlight.planner.ranks import exchange_of
from firstlight.planner.speed_kinds import transposed_factors
from firstlight.planner.speed_recipes import all_micro_batches, predict_recipe_speed
from firstlight.planner.throughput import SpeedPrediction
from firstlight.recipe import ResolvedRecipe


def speed_of(
    prediction: MemoryPrediction,
    recipe: ResolvedRecipe,
    machine: Machine,
    *,
    measuring_seconds: float,
) -> SpeedPrediction | None:
    """How fast a recipe trains; None on a GPU whose rates are not known.

    Args:
        prediction: of what one process has of its training step, not compiled.
        recipe: the resolved recipe.
        machine: to run on.
        measuring_seconds: for which this machine's CPU has those operators timed that were not
            before, the costliest first.
    """
    if machine.gpu is None and machine.target.kind == "cuda":
        return None
    copies = copies_of(recipe, machine.count)
    accumulation = recipe.batch.accumulation(recipe.data.seq_len, copies)
    counted = all_micro_batches(prediction, accumulation)
    parameters = count_parameters(meta_model(recipe.model)).total
    exchange = exchange_of(recipe, parameters, machine.count, prediction.host_bytes)
    if machine.gpu is not None:
        return predict_recipe_speed(recipe, machine.gpu, counted, exchange)
    calibration = this_calibration()
    before = len(calibration.entries)
    if measuring_seconds:
        measure_operators(calibration, _unknown(calibration, counted), measuring_seconds)
    if len(calibration.entries) > before:
        save_calibration(calibration)
    return predict_recipe_speed(recipe, calibration, counted, exchange)


@functools.cache
def this_calibration() -> Calibration:
    """This machine's store, with what its reference operators take now."""
    return load_calibration()


def _unknown(calibration: Calibration, prediction: MemoryPrediction) -> tuple[OperatorCount, ...]:
    """None where all but a tenth of the time is known."""
    known, total = 0.0, 0.0
    transposed = transposed_factors(prediction.operators)
    for entry in prediction.operators:
        estimate = calibration.seconds(
            entry.operator, transposed.get(entry.operator, (False, False))
        )
        total += entry.count * estimate.seconds
        known += entry.count * estimate.seconds * (estimate.source == "measured")
    return () if known >= 0.9 * total else prediction.operators

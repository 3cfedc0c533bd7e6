"""A recipe's speed: what `throughput.py` needs to know of it."""

from __future__ import annotations

import functools
from dataclasses import replace

from firstlight.hardware.gpus import GPU
from firstlight.models.accounting import count_parameters, meta_model, train_flops_per_token
from firstlight.planner.memory.kernels import OperatorCount, Target
from firstlight.planner.memory.prediction import MemoryPrediction
from firstlight.planner.memory.program import uncompiled
from firstlight.planner.memory.ranks import copies_of, engine_of
from firstlight.planner.memory.recipe import trace_memory
from firstlight.planner.plan.machine import Machine
from firstlight.planner.speed.calibration import Calibration
from firstlight.planner.speed.operators import transposed_factors
from firstlight.planner.speed.store import (
    load_calibration,
    measure_operators,
    save_calibration,
)
from firstlight.planner.speed.throughput import Exchange, SpeedPrediction, Workload, predict_speed
from firstlight.recipe import ResolvedRecipe


def workload_of(recipe: ResolvedRecipe, exchange: Exchange | None = None) -> Workload:
    """What speed is predicted of, beside the operators.

    Args:
        recipe: the resolved recipe.
        exchange: communication of several processes; None is one process.
    """
    model, batch, seq_len = recipe.model, recipe.batch, recipe.data.seq_len
    exchange = exchange or Exchange()
    return Workload(
        global_batch_tokens=batch.rows
        * seq_len
        * batch.accumulation(seq_len, exchange.processes)
        * exchange.processes,
        flops_per_token=train_flops_per_token(
            meta_model(model), seq_len, frozen=recipe.lora is not None
        ),
        precision=recipe.efficiency.precision,
        compiled=recipe.efficiency.compile,
        cuda_graphs=recipe.efficiency.compile_mode in ("reduce-overhead", "max-autotune"),
        exchange=exchange,
    )


#: Micro-batches that `trace_memory` traces of a step at most.
_TRACED_MICRO_BATCHES = 2
#: Phases that each micro-batch has.
_EACH_MICRO_BATCH = ("forward", "loss", "backward of loss", "backward")


def all_micro_batches(prediction: MemoryPrediction, count: int) -> MemoryPrediction:
    """A prediction with the operators of all micro-batches of a step, from that of a trace.

    Args:
        prediction: prediction for a step of `count` micro-batches, at most two of which were
            traced.
        count: micro-batches.
    """
    if count <= _TRACED_MICRO_BATCHES:
        return prediction
    operators = tuple(
        OperatorCount(entry.operator, round(entry.count * count / _TRACED_MICRO_BATCHES))
        if entry.operator.phase in _EACH_MICRO_BATCH
        else entry
        for entry in prediction.operators
    )
    return replace(prediction, operators=operators)


def count_operators(recipe: ResolvedRecipe, target: Target | None = None) -> MemoryPrediction:
    """The operators of a recipe's step, as `predict_speed` takes them: not compiled, of all layers
    and micro-batches. The memory in it is not a compiled run's.

    Args:
        recipe: the resolved recipe.
        target: the device to predict for; None is this machine's CPU.

    Raises:
        ConfigError: the recipe's methods can't work together.
    """
    prediction = trace_memory(uncompiled(recipe), target)
    return all_micro_batches(prediction, recipe.batch.accumulation(recipe.data.seq_len))


def predict_recipe_speed(
    recipe: ResolvedRecipe,
    machine: Calibration | GPU,
    counted: MemoryPrediction,
    exchange: Exchange | None = None,
) -> SpeedPrediction:
    """How fast a recipe's training goes.

    Args:
        recipe: the resolved recipe.
        machine: the calibrated machine, or a GPU of the table.
        counted: result of `count_operators`.
        exchange: communication of several processes; None is one process.
    """
    return predict_speed(counted, workload_of(recipe, exchange), machine)


def exchange_of(
    recipe: ResolvedRecipe, parameters: int, processes: int, host_bytes: int = 0
) -> Exchange:
    """What the processes send each other in a step.

    Args:
        recipe: the resolved recipe.
        parameters: number of the model's parameters.
        processes: number of processes.
        host_bytes: bytes of a micro-batch's activations that are offloaded to the CPU's memory.
    """
    cut, copies = recipe.distributed, copies_of(recipe, processes)
    engine = engine_of(recipe, processes)
    micro_batches = recipe.batch.accumulation(recipe.data.seq_len, copies)
    half = recipe.efficiency.precision in ("bf16", "bf16_params")
    offloads = cut.offload != "none"
    own = parameters / (cut.tensor_parallel * cut.pipeline)
    state = 12.0 * own / copies
    tokens = recipe.batch.micro_batch_size * recipe.data.seq_len
    return Exchange(
        engine="fsdp" if engine == "fsdp" else "ddp" if copies > 1 else "none",
        processes=copies,
        weight_bytes=own * (2.0 if half else 4.0),
        gradient_bytes=4.0 * own,
        micro_batches=micro_batches,
        tensor_parallel=cut.tensor_parallel,
        hidden_bytes=tokens * recipe.model.hidden_size * (2.0 if half else 4.0),
        layers=recipe.model.num_hidden_layers // cut.pipeline,
        stages=cut.pipeline,
        # Gradients there, weights back; activations there and back.
        offloaded_bytes=(2 / 3 * state if offloads else 0.0) + 2.0 * host_bytes * micro_batches,
    )


def estimate_speed(
    prediction: MemoryPrediction,
    recipe: ResolvedRecipe,
    machine: Machine,
    *,
    measuring_seconds: float,
) -> SpeedPrediction | None:
    """How fast a recipe trains; None on a GPU whose rates are not known.

    Args:
        prediction: memory and operators of one process's training step, not compiled.
        recipe: the resolved recipe.
        machine: the machine to run on.
        measuring_seconds: time for measuring operators that were never timed on this machine's CPU,
            the costliest first.
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

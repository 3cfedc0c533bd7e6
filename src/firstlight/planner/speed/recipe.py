"""The predicted speed of a recipe (input of `throughput.py`), and the fit of a GPU's constants to
measured steps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from firstlight.hardware.gpus import GPU
from firstlight.methods.compilation import records_cuda_graphs
from firstlight.models.accounting import count_parameters, meta_model, train_flops_per_token
from firstlight.planner.memory.kernels import OperatorCount
from firstlight.planner.memory.prediction import MemoryPrediction
from firstlight.planner.memory.ranks import copies_of, engine_of
from firstlight.planner.plan.machine import Machine
from firstlight.planner.speed.exchange import Exchange
from firstlight.planner.speed.gpu import BOUNDS, DEFAULT_SHARES, Range, shares_of
from firstlight.planner.speed.throughput import SpeedPrediction, Workload, predict_speed
from firstlight.recipe import ResolvedRecipe


def workload_of(recipe: ResolvedRecipe, exchange: Exchange | None = None) -> Workload:
    """The properties of a recipe's step that its speed depends on, besides the operators.

    Args:
        recipe: the resolved recipe.
        exchange: communication of several processes; None for one process.
    """
    model = recipe.model
    batch = recipe.batch
    seq_len = recipe.data.seq_len
    exchange = exchange or Exchange()
    return Workload(
        global_batch_tokens=batch.rows
        * seq_len
        * batch.accumulation(seq_len, exchange.processes)
        * exchange.processes,
        flops_per_token=train_flops_per_token(
            meta_model(model), seq_len, frozen=recipe.lora is not None
        ),
        precision=recipe.efficiency.products,
        # The backend cudagraphs records torch's own kernels, and fuses none.
        compiled=recipe.efficiency.compile and recipe.efficiency.compile_backend != "cudagraphs",
        cuda_graphs=records_cuda_graphs(recipe.efficiency),
        dispatches=recipe.efficiency.activation_checkpointing == "selective",
        updates=updates_of(recipe),
        exchange=exchange,
    )


def updates_of(recipe: ResolvedRecipe) -> int:
    """Number of calls of torch optimizers in a step: one for each trained parameter if the backward
    pass updates."""
    if not recipe.efficiency.optimizer_in_backward:
        return 1
    # Adapters are not counted, nor frozen weights left out.
    return sum(1 for _ in meta_model(recipe.model).parameters())


#: Largest number of micro-batches of a step that `trace_memory` traces.
_TRACED_MICRO_BATCHES = 2
#: Phases that each micro-batch has.
_EACH_MICRO_BATCH = ("forward", "loss", "backward of loss", "backward")


def all_micro_batches(prediction: MemoryPrediction, count: int) -> MemoryPrediction:
    """The prediction with the operators of all micro-batches of a step, not only the traced ones.

    Args:
        prediction: prediction for a step of `count` micro-batches; at most two of them were traced.
        count: number of micro-batches of the step.
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


def exchange_of(
    recipe: ResolvedRecipe, parameters: int, processes: int, host_bytes: int = 0
) -> Exchange:
    """Communication of a recipe's step: between processes, and between CPU and GPU.

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
        gathers_weights=engine.keeps_shards,
        processes=copies,
        weight_bytes=own * (2.0 if half else 4.0),
        gradient_bytes=4.0 * own,
        micro_batches=micro_batches,
        tensor_parallel=cut.tensor_parallel,
        hidden_bytes=tokens * recipe.model.hidden_size * (2.0 if half else 4.0),
        layers=recipe.model.num_hidden_layers // cut.pipeline,
        stages=cut.pipeline,
        # 8 bytes a parameter: fp32 gradients to the CPU, weights back. Activations go both ways.
        offloaded_bytes=(2 / 3 * state if offloads else 0.0) + 2.0 * host_bytes * micro_batches,
    )


def estimate_speed(
    prediction: MemoryPrediction, recipe: ResolvedRecipe, machine: Machine
) -> SpeedPrediction | None:
    """Predict a recipe's training speed on GPUs of the table; None for another machine.

    Args:
        prediction: memory and operators of one process's training step without torch.compile.
        recipe: the resolved recipe.
        machine: the machine to run on.
    """
    if machine.gpu is None:
        return None
    copies = copies_of(recipe, machine.count)
    accumulation = recipe.batch.accumulation(recipe.data.seq_len, copies)
    counted = all_micro_batches(prediction, accumulation)
    parameters = count_parameters(meta_model(recipe.model)).total
    exchange = exchange_of(recipe, parameters, machine.count, prediction.host_bytes)
    return predict_speed(counted, workload_of(recipe, exchange), machine.gpu)


# Constants of the speed model of GPUs, fitted on steps that were measured on one

#: Rounds over all constants.
_ROUNDS = 4
#: Steps of the search for one constant: each narrows its interval to 0.62 of the width.
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
    """The relative error of each step's predicted time; positive if the prediction is too long.

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
    """The constants that fit measured steps best.

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
            # If the loss does not depend on a constant, its value stays as it is.
            if least < loss(name)(place) * (1 - 1e-9):
                found[name] = min(max(math.exp(best), low), high)
    return found


def _expected(name: str) -> float:
    share: Range = getattr(DEFAULT_SHARES, name)
    return share.expected


def _minimum(function: Callable[[float], float], low: float, high: float) -> tuple[float, float]:
    """The argument and the value of a function's approximate minimum between two bounds, by
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

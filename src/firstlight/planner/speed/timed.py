"""The speed of training on this machine, from timed steps of the real model.

The model, optimizer and methods of a recipe train for a few steps on random tokens. If that would
take too long, a micro-batch of fewer sequences is timed, and if it still would, models with fewer
layers. The time of a full step follows from these: the passes take time in proportion to the
sequences, and both passes and update take the same time for each further layer.

torch.compile is not timed, because compiling takes longer than an entire plan.
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from firstlight.hardware.device import Hardware, peak_flops, synchronize
from firstlight.methods.precision import dtype_of
from firstlight.models.accounting import count_parameters, meta_model, train_flops_per_token
from firstlight.parallel.engine import DistributedConfig
from firstlight.planner.memory.layers import are_alike, with_layers
from firstlight.planner.memory.program import uncompiled
from firstlight.planner.speed.gpu import Range
from firstlight.planner.speed.throughput import SpeedPrediction
from firstlight.recipe import ResolvedRecipe
from firstlight.recipe.resolve import USUAL_MFU
from firstlight.training.micro_batch_trials import trial_program

#: Steps that are timed after a first step, which allocates memory and loads kernels. The faster one
#: counts, because other programs can only make a step slower.
_STEPS = 2

#: Maximum seconds that the steps of a recipe should take. One step of a model of two layers with
#: one sequence is timed in any case.
SECONDS = 3.0

#: Tokens of a micro-batch, by kind of device, below which a token takes longer.
BUSY_TOKENS = {"cpu": 1024, "cuda": 16384}

#: Assumed seconds for creating a parameter and updating it in all steps, by kind of device.
_PARAMETER_SECONDS = {"cpu": 2e-8, "cuda": 1e-9}

#: Maximum relative error of a full timed step, and of a step that was computed from smaller ones
#: (docs/benchmarks/planner.md).
_ERROR = 0.15
_SCALED_ERROR = 0.2

#: `hardware.device.peak_flops`, which takes some time, cached for each precision.
_peak_flops = functools.cache(peak_flops)


@dataclass(frozen=True)
class StepTime:
    """The time of a training step, without torch.compile.

    Attributes:
        passes: seconds of the forward and backward pass of a micro-batch.
        update: seconds of clipping and update.
        peak_flops: FLOP/s of large matrix products in the recipe's precision, see
            `hardware.device.peak_flops`.
        timed: the part of the step that was timed, as text for the user; "" for all of it.
    """

    passes: float
    update: float
    peak_flops: float
    timed: str = ""

    def seconds(self, micro_batches: int) -> float:
        """Return the seconds of a step with this number of micro-batches."""
        return micro_batches * self.passes + self.update


def time_step(recipe: ResolvedRecipe, hardware: Hardware, seconds: float = SECONDS) -> StepTime:
    """Time the training step of a recipe on this machine, in this process.

    Args:
        recipe: the resolved recipe of a run with one process.
        hardware: the device to run on.
        seconds: maximum time that the steps should take.

    Raises:
        ConfigError: the recipe's methods can't be combined.
        RuntimeError, MemoryError: the step does not fit into memory.
    """
    recipe = uncompiled(recipe).model_copy(update={"distributed": DistributedConfig()})
    kind, rows = hardware.device.type, recipe.batch.rows
    depth, least = recipe.model.num_hidden_layers, min(2, recipe.model.num_hidden_layers - 1)
    peak = _peak_flops(hardware.device, dtype_of(recipe.efficiency.precision))

    def expected(rows: int, layers: int) -> float:
        model = meta_model(with_layers(recipe, layers).model)
        flops = train_flops_per_token(model, recipe.data.seq_len) * rows * recipe.data.seq_len
        made = _PARAMETER_SECONDS[kind] * count_parameters(model).total
        return (1 + _STEPS) * flops / (USUAL_MFU * peak) + made

    timed_rows = rows
    while timed_rows > 1 and expected(timed_rows, depth) > seconds:
        if timed_rows * recipe.data.seq_len <= BUSY_TOKENS[kind]:
            break
        timed_rows = -(-timed_rows // 2)
    share = rows / timed_rows
    of_rows = "" if timed_rows == rows else f"{timed_rows} of {rows} sequences"
    if least < 1 or not are_alike(recipe.model) or expected(timed_rows, depth) <= seconds:
        passes, update = _timed(recipe, hardware, timed_rows, seconds)
        return StepTime(share * passes, update, peak, of_rows)
    # The deeper of two models, whose difference is the time of further layers.
    deep = next(
        (n for n in range(depth, least, -1) if expected(timed_rows, n) <= seconds / 2), least + 1
    )
    few = _timed(with_layers(recipe, least), hardware, timed_rows, seconds / 2)
    more = _timed(with_layers(recipe, deep), hardware, timed_rows, seconds / 2)
    further = (depth - deep) / (deep - least)
    passes, update = (b + further * max(b - a, 0.0) for a, b in zip(few, more, strict=True))
    of_layers = f"{least} and {deep} of {depth} layers"
    timed = f"{of_rows}, {of_layers}" if of_rows else of_layers
    return StepTime(share * passes, update, peak, timed)


def _timed(
    recipe: ResolvedRecipe, hardware: Hardware, rows: int, most_seconds: float
) -> tuple[float, float]:
    """Return the seconds of the passes and of the update of a step of one micro-batch of `rows`
    sequences.

    No further step is begun after `most_seconds`: on a CPU, steps in some precisions are much
    slower than their matrix products, by which the size of the step was chosen.
    """
    batch: dict[str, Any] = {"micro_batch_size": rows, "gradient_accumulation_steps": 1}
    batch |= {"global_batch_tokens": None, "ramp_start_tokens": None, "ramp_steps": None}
    program, tokens = trial_program(recipe.with_keys("batch", **batch), hardware)
    optimizer = program.optimizer
    clip, passed = optimizer.clip_gradients, 0.0

    def clipped(*args: Any) -> Tensor:
        nonlocal passed
        synchronize(hardware.device)
        passed = time.perf_counter()
        return clip(*args)

    setattr(optimizer, "clip_gradients", clipped)  # noqa: B010  (a method of this object only)
    times: list[tuple[float, float]] = []
    begun = time.perf_counter()
    while len(times) < 1 + _STEPS:
        if times and time.perf_counter() - begun > most_seconds:
            break
        synchronize(hardware.device)
        start = time.perf_counter()
        # An update with a learning rate of 0 takes as much time as any other.
        program.step([tokens], lr_scale=0.0)
        synchronize(hardware.device)
        times.append((passed - start, time.perf_counter() - passed))
    return min(times[1:] or times, key=sum)


def timed_speed(recipe: ResolvedRecipe, step: StepTime, gain: float = 1.0) -> SpeedPrediction:
    """Return the speed of a recipe whose step was timed.

    Args:
        recipe: the resolved recipe of a run with one process.
        step: result of `time_step`.
        gain: expected speed with torch.compile as a multiple of the speed without it.
    """
    seq_len, frozen = recipe.data.seq_len, recipe.lora is not None
    micro_batches = recipe.batch.accumulation(seq_len)
    tokens = micro_batches * recipe.batch.rows * seq_len
    flops = train_flops_per_token(meta_model(recipe.model), seq_len, frozen=frozen)
    error = _SCALED_ERROR if step.timed else _ERROR
    seconds = Range.around(step.seconds(micro_batches) / gain, error)
    rates = Range(*(tokens / one for one in seconds))
    source = f"steps timed here{f' ({step.timed})' if step.timed else ''}"
    if recipe.efficiency.compile:
        source += f", without torch.compile; with it usually {gain:.2f} times as fast"
    return SpeedPrediction(
        step_seconds=seconds,
        tokens_per_second=rates,
        mfu=Range(*(rate * flops / step.peak_flops for rate in rates)),
        phases={"passes": micro_batches * step.passes / gain, "optimizer": step.update / gain},
        source=source,
    )


def usual_speed(recipe: ResolvedRecipe, rate: float, hardware: Hardware) -> SpeedPrediction:
    """Return the speed of a recipe whose steps can't be timed, from that of new models of its size.

    Args:
        recipe: the resolved recipe.
        rate: tokens per second of a new model of its size on this machine.
        hardware: the device to run on.
    """
    seq_len = recipe.data.seq_len
    tokens = recipe.batch.accumulation(seq_len) * recipe.batch.rows * seq_len
    seconds = Range.around(tokens / rate, _SCALED_ERROR)
    rates = Range(*(tokens / one for one in seconds))
    flops = train_flops_per_token(meta_model(recipe.model), seq_len)
    peak = _peak_flops(hardware.device, dtype_of(recipe.efficiency.precision))
    return SpeedPrediction(
        step_seconds=seconds,
        tokens_per_second=rates,
        mfu=Range(*(one * flops / peak for one in rates)),
        phases={},
        source="new models of this size timed here, without DeepSpeed and offloading",
    )

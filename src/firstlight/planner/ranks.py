"""From one process to one of several: what an engine leaves of each part on a device.

A trace is of a process that has everything. What DDP and FSDP2 change is arithmetic on its parts,
the one of `models.accounting.rank_memory`, which is compared with what two real processes hold.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from firstlight.errors import ConfigError
from firstlight.models.accounting import rank_memory
from firstlight.planner.exchange import Exchange
from firstlight.planner.prediction import MemoryPrediction, PhasePeak
from firstlight.training.config import Recipe

#: What NCCL takes of each GPU beside torch's allocator; its channels' buffers, as seen with
#: eight GPUs and its defaults.
_NCCL_BYTES = 400 * 2**20

_CUT = ("weights", "gradients", "optimizer_states")


def engine_of(recipe: Recipe, processes: int) -> str:
    """What "auto" is with so many processes."""
    engine = recipe.distributed.engine
    if engine == "auto":
        return "ddp" if processes > 1 else "none"
    return engine


def of_one_rank(prediction: MemoryPrediction, recipe: Recipe, processes: int) -> MemoryPrediction:
    """The memory of one of several processes.

    Args:
        prediction: of one process with its micro-batch.
        recipe: settled.
        processes: how many share the batch.

    Raises:
        ConfigError: it can't be said of this engine.
    """
    engine = engine_of(recipe, processes)
    cut = recipe.distributed
    if cut.tensor_parallel > 1 or cut.pipeline > 1:
        raise ConfigError(
            "distributed.tensor_parallel and pipeline are not planned: plan with "
            "distributed.engine fsdp, or without"
        )
    if engine == "deepspeed":
        return _of_deepspeed(prediction, recipe, processes)
    if processes == 1:
        return prediction
    if engine == "fsdp":
        prediction = _of_fsdp(prediction, recipe, processes)
    return dataclasses.replace(
        prediction,
        overhead_bytes=prediction.overhead_bytes + _NCCL_BYTES,
        notes=(
            *prediction.notes,
            f"{engine} on {processes} devices is worked out, not traced; NCCL's buffers are taken "
            "for 400 MiB",
        ),
    )


def _of_fsdp(prediction: MemoryPrediction, recipe: Recipe, processes: int) -> MemoryPrediction:
    assert recipe.model is not None
    assert recipe.data.seq_len is not None
    pieces = recipe.distributed.shard or processes
    offloads = recipe.distributed.offload == "cpu"
    tokens = recipe.data.seq_len * recipe.batch.rows
    shared = rank_memory(recipe.model, tokens, "fsdp", processes, shard=pieces, offload=offloads)
    alone = rank_memory(recipe.model, tokens)
    # autocast's copies are in the trace; fsdp puts weights together in bf16 in their place.
    gathered = max(shared.computing - alone.computing, 0)
    accumulates = recipe.batch.accumulation(recipe.data.seq_len, processes) > 1

    def cut(peak: PhasePeak) -> PhasePeak:
        parts = dict(peak.parts)
        for name in _CUT:
            if name not in parts:
                continue
            if name == "gradients" and accumulates:
                continue
            parts[name] = 0 if offloads else -(-parts[name] // pieces)
        parts["communication"] = parts.get("communication", 0) + gathered
        parts = {name: size for name, size in parts.items() if size}
        return PhasePeak(sum(parts.values()), parts)

    return _with_peaks(prediction, cut, shared.host)


def _with_peaks(
    prediction: MemoryPrediction, changed: Callable[[PhasePeak], PhasePeak], host_bytes: int
) -> MemoryPrediction:
    """With every phase's peak changed, and more in the host's memory."""
    phases = {name: changed(peak) for name, peak in prediction.phases.items()}
    phase = max(phases, key=lambda name: phases[name].bytes)
    gaps = prediction.reserved_bytes - prediction.peak_bytes
    return dataclasses.replace(
        prediction,
        peak_bytes=phases[phase].bytes,
        phase=phase,
        parts=phases[phase].parts,
        phases=phases,
        reserved_bytes=phases[phase].bytes + gaps,
        host_bytes=prediction.host_bytes + host_bytes,
    )


def _of_deepspeed(prediction: MemoryPrediction, recipe: Recipe, processes: int) -> MemoryPrediction:
    """ZeRO: stage 1 cuts optimizer states, 2 gradients too, 3 weights too; offloading moves them to
    the CPU, weights at stage 3 only."""
    stage = recipe.distributed.zero_stage or 2
    cut = _CUT[::-1][:stage]
    offloads = recipe.distributed.offload != "none"
    moved = cut if offloads else ()

    def shared(peak: PhasePeak) -> PhasePeak:
        parts = {
            name: 0 if name in moved else -(-size // processes) if name in cut else size
            for name, size in peak.parts.items()
        }
        parts = {name: size for name, size in parts.items() if size}
        return PhasePeak(sum(parts.values()), parts)

    host = sum(
        max(peak.parts.get(name, 0) for peak in prediction.phases.values()) // processes
        for name in moved
    )
    found = _with_peaks(prediction, shared, host)
    note = (
        "DeepSpeed is worked out, not traced: its buffers of up to 500 million numbers come on top"
    )
    return dataclasses.replace(found, notes=(*found.notes, note))


def exchange_of(recipe: Recipe, parameters: int, processes: int, host_bytes: int = 0) -> Exchange:
    """What the processes send each other in a step.

    Args:
        recipe: settled.
        parameters: of the model.
        processes: how many share the batch.
        host_bytes: of activations that wait in the CPU's memory, of a micro-batch.
    """
    assert recipe.data.seq_len is not None
    engine = engine_of(recipe, processes)
    micro_batches = recipe.batch.accumulation(recipe.data.seq_len, processes)
    half = recipe.efficiency.precision in ("bf16", "bf16_params")
    offloads = recipe.distributed.offload != "none"
    state = 12.0 * parameters / processes
    return Exchange(
        engine="fsdp" if engine == "fsdp" else "ddp" if processes > 1 else "none",
        processes=processes,
        weight_bytes=parameters * (2.0 if half else 4.0),
        gradient_bytes=4.0 * parameters,
        micro_batches=micro_batches,
        # Gradients there, weights back; activations there and back.
        offloaded_bytes=(2 / 3 * state if offloads else 0.0) + 2.0 * host_bytes * micro_batches,
    )

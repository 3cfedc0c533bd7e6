"""From one process to one of several: what an engine leaves of each part on a device.

A trace is of a process that shares nothing. What DDP and FSDP2 change is arithmetic on its parts,
which is compared with what two real processes take (tests/distributed/test_rank_memory.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from firstlight.models.accounting import count_parameters, is_inside_a_layer, meta_model
from firstlight.planner.exchange import Exchange
from firstlight.planner.parts import (
    copies_of,
    engine_of,
    is_put_together_in_bf16,
    own_part,
    with_own_tables,
    with_peaks,
)
from firstlight.planner.prediction import MemoryPrediction, PhasePeak
from firstlight.recipe import ResolvedRecipe

#: What NCCL takes of each GPU beside torch's allocator; its channels' buffers, as seen with
#: eight GPUs and its defaults.
_NCCL_BYTES = 400 * 2**20

#: The share of the forward pass' activations above which no layer's gradient is complete yet.
_EARLY = 0.8

#: Of a machine's memory, what is worth a note.
_MUCH = 2**30

_CUT = ("weights", "gradients", "optimizer_states")


def of_one_rank(
    prediction: MemoryPrediction, recipe: ResolvedRecipe, processes: int
) -> MemoryPrediction:
    """The memory of one of several processes.

    Args:
        prediction: of `own_part` in one process.
        recipe: the resolved recipe.
        processes: how many there are.

    Raises:
        ConfigError: the model or the batch can't be cut so.
    """
    part, copies = own_part(recipe, processes), copies_of(recipe, processes)
    engine = engine_of(recipe, processes)
    if engine == "deepspeed":
        return _of_deepspeed(prediction, recipe, processes)
    if processes == 1:
        return prediction
    prediction = with_own_tables(prediction, recipe, part)
    ways = [f"{engine} on {copies} devices"] if copies > 1 else []
    if engine == "fsdp" and copies > 1:
        prediction = _of_fsdp(prediction, recipe, part, processes)
    elif engine == "ddp":
        prediction = _of_ddp(prediction, part)
    for key in ("tensor_parallel", "pipeline"):
        if (count := getattr(recipe.distributed, key)) > 1:
            ways.append(f"{key} {count}")
    return dataclasses.replace(
        prediction,
        overhead_bytes=prediction.overhead_bytes + _NCCL_BYTES,
        notes=(
            *prediction.notes,
            f"{', '.join(ways)}: one device's part is traced, what it shares is worked out; NCCL's "
            "buffers are taken for 400 MiB",
            *_of_the_host(recipe, processes),
        ),
    )


def _of_the_host(recipe: ResolvedRecipe, processes: int) -> Iterator[str]:
    """What the start takes of the CPU's memory, where that is much."""
    # Stages of a pipeline make their own layers.
    own = 4 * count_parameters(meta_model(recipe.model)).total / recipe.distributed.pipeline
    if processes * own >= _MUCH:
        yield (
            f"at the start each process makes its model in the CPU's memory: {processes} x "
            f"{own / 2**30:.1f} GiB, on all machines together"
        )


def _of_ddp(prediction: MemoryPrediction, part: ResolvedRecipe) -> MemoryPrediction:
    """DDP keeps all gradients in its buckets, between steps too; those that wait for the next
    micro-batch are not in them yet."""
    buckets = max(peak.parts.get("gradients", 0) for peak in prediction.phases.values())
    accumulates = part.batch.accumulation(part.data.seq_len) > 1

    def kept(_: str, peak: PhasePeak) -> PhasePeak:
        parts = dict(peak.parts)
        if accumulates:
            parts["communication"] = parts.get("communication", 0) + buckets
        else:
            parts["gradients"] = buckets
        return PhasePeak(sum(parts.values()), parts)

    return with_peaks(prediction, kept)


def _of_fsdp(
    prediction: MemoryPrediction, recipe: ResolvedRecipe, part: ResolvedRecipe, processes: int
) -> MemoryPrediction:
    """FSDP2: pieces of the state, and beside them what is put together at the moment. What is
    outside of the layers is whole from the forward pass to the end of the backward pass."""
    copies = copies_of(recipe, processes)
    pieces = part.distributed.shard or copies
    offloads = part.distributed.offload == "cpu"
    state = 0 if offloads else 1
    in_bf16 = is_put_together_in_bf16(recipe, processes)
    size = 2 if in_bf16 else 4
    parameters = list(meta_model(part.model).named_parameters())
    outside = sum(p.numel() for name, p in parameters if not is_inside_a_layer(name))
    inside = sum(p.numel() for name, p in parameters if is_inside_a_layer(name))
    layer = inside // part.model.num_hidden_layers
    accumulates = part.batch.accumulation(part.data.seq_len) > 1
    keeps = not part.distributed.reshard_after_forward
    forward = prediction.phases.get("forward")
    kept = 0 if forward is None else forward.parts.get("activations", 0)
    # What is computed again makes the peak's place of no layer in particular.
    keeps_all = part.efficiency.activation_checkpointing == "none"

    def together(phase: str, peak: PhasePeak) -> int:
        """Weights, and gradients on their way."""
        if phase in ("optimizer", "clipping"):
            return 0
        if phase == "backward":
            whole = size * (outside + (inside if keeps else 2 * layer))
            if keeps_all and peak.parts.get("activations", 0) > _EARLY * kept:
                return whole
            if part.lora is not None:
                return whole
            # A layer's gradient, and that as it is added up and received.
            return whole + layer * (size + 4) + 4 * layer // pieces
        # The layer whose backward pass comes first is there already.
        return size * (outside + (inside if keeps else layer))

    def gradients(phase: str, whole: int) -> int:
        # With weights in bf16 there are those of the fp32 ones too.
        whole = min(whole, 4 * (outside + inside))
        if phase in ("optimizer", "clipping"):
            return state * whole // pieces
        if accumulates:
            return whole
        early = min(whole, size * outside)
        return early + state * 4 * (whole - early) // size // pieces

    def cut(phase: str, peak: PhasePeak) -> PhasePeak:
        if phase == "setup" and part.preference is not None:
            # The process that makes the references of the pairs has the whole model then.
            return peak
        parts = dict(peak.parts)
        whole = parts.get("gradients", 0)
        held = 4 * (outside + inside) if in_bf16 else parts.get("weights", 0)
        # Traced with weights in bf16, which has the fp32 ones among the states.
        states = parts.get("optimizer_states", 0) - (held if in_bf16 else 0)
        parts["weights"] = state * -(-held // pieces)
        parts["optimizer_states"] = state * -(-max(states, 0) // pieces)
        parts["gradients"] = gradients(phase, whole)
        parts["communication"] = parts.get("communication", 0) + together(phase, peak)
        parts = {name: size for name, size in parts.items() if size}
        return PhasePeak(sum(parts.values()), parts)

    host = 16 * (outside + inside) // pieces if offloads else 0
    return with_peaks(prediction, cut, host)


def _of_deepspeed(
    prediction: MemoryPrediction, recipe: ResolvedRecipe, processes: int
) -> MemoryPrediction:
    """ZeRO: stage 1 cuts optimizer states, 2 gradients too, 3 weights too; offloading moves them to
    the CPU, weights at stage 3 only."""
    stage = recipe.distributed.zero_stage or 2
    cut = _CUT[::-1][:stage]
    offloads = recipe.distributed.offload != "none"
    moved = cut if offloads else ()

    def shared(phase: str, peak: PhasePeak) -> PhasePeak:
        if phase == "setup":
            # DeepSpeed is given the whole model, on the device.
            return peak
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
    found = with_peaks(prediction, shared, host)
    note = (
        "DeepSpeed is worked out, not traced: its buffers of up to 500 million numbers come on top"
    )
    notes = (*found.notes, note, *_of_the_host(recipe, processes))
    return dataclasses.replace(found, notes=notes)


def exchange_of(
    recipe: ResolvedRecipe, parameters: int, processes: int, host_bytes: int = 0
) -> Exchange:
    """What the processes send each other in a step.

    Args:
        recipe: the resolved recipe.
        parameters: of the model.
        processes: how many there are.
        host_bytes: of activations that wait in the CPU's memory, of a micro-batch.
    """
    cut, copies = recipe.distributed, copies_of(recipe, processes)
    engine = engine_of(recipe, processes)
    micro_batches = recipe.batch.accumulation(recipe.data.seq_len, copies)
    half = recipe.efficiency.precision in ("bf16", "bf16_params")
    offloads = cut.offload != "none"
    own = parameters / (cut.tensor_parallel * cut.pipeline)
    state = 12.0 * own / copies
    tokens = recipe.batch.rows * recipe.data.seq_len
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

"""Compute the memory use of one process in a distributed run from the memory use of a
single-process run.

The traced process does not communicate. The effects of DDP, FSDP2 and DeepSpeed are computed from
the parts of its memory, such as weights and gradients. For DDP and FSDP2, tests compare the results
with the memory use of two real processes (tests/distributed/test_rank_memory.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from firstlight.errors import ConfigError
from firstlight.models import ModelConfig
from firstlight.models.accounting import count_parameters, is_inside_a_layer, meta_model
from firstlight.parallel.deepspeed import zero_settings
from firstlight.parallel.engine import DistributedConfig, Engine
from firstlight.parallel.engine_choice import ENGINES, engine_name, named_engine
from firstlight.parallel.pipeline import unstageable
from firstlight.parallel.sharding import unshardable
from firstlight.planner.memory.prediction import MemoryPrediction, PhasePeak
from firstlight.recipe import Recipe, ResolvedRecipe

#: Bytes per GPU that NCCL allocates for channel buffers, outside torch's allocator. The value was
#: measured with eight GPUs and NCCL's default settings.
_NCCL_BYTES = 400 * 2**20

#: The backward pass is assumed not to have completed the gradients of any layer as long as more
#: than this fraction of the forward pass's activations is in memory.
_EARLY = 0.8

#: Kinds of memory content whose size is proportional to the number of parameters.
STATE = ("weights", "gradients", "optimizer_states")

#: Phases that occur only in the last stage of a pipeline.
_LAST = ("loss", "backward of loss")

#: The plan contains a note about CPU memory if the processes need at least this many bytes of it at
#: the start of a run.
_MUCH = 2**30


def of_one_rank(
    prediction: MemoryPrediction, recipe: ResolvedRecipe, processes: int, *, on_cpu: bool = False
) -> MemoryPrediction:
    """Return the memory prediction for one process in a distributed run.

    Args:
        prediction: memory prediction for a single process with the recipe returned by `own_part`.
        recipe: the resolved recipe.
        processes: number of processes.
        on_cpu: True if the processes run on a CPU, whose memory also holds offloaded tensors.

    Raises:
        ConfigError: the model or the batch can't be divided among the processes.
    """
    part, copies = own_part(recipe, processes), copies_of(recipe, processes)
    engine = engine_of(recipe, processes)
    if engine.updates_itself:
        return _of_deepspeed(prediction, recipe, processes, on_cpu)
    if processes == 1:
        return prediction
    prediction = with_own_tables(prediction, recipe, part)
    by = [f"{engine.name} on {copies} devices"] if copies > 1 else []
    if engine.keeps_shards and copies > 1:
        prediction = _of_fsdp(prediction, recipe, part, processes, on_cpu=on_cpu)
    elif engine.keeps_buckets:
        prediction = _of_ddp(prediction, part)
    for key in ("tensor_parallel", "pipeline"):
        if (count := getattr(recipe.distributed, key)) > 1:
            by.append(f"{key} {count}")
    return dataclasses.replace(
        prediction,
        overhead_bytes=prediction.overhead_bytes + _NCCL_BYTES,
        notes=(
            *prediction.notes,
            f"{', '.join(by)}: one device's part is traced, and the effect of sharing is "
            "calculated; NCCL's buffers are assumed to take 400 MiB",
            *_of_the_host(recipe, processes),
        ),
    )


def _of_the_host(recipe: ResolvedRecipe, processes: int) -> Iterator[str]:
    """If all processes together need a lot of CPU memory at the start of a run, yield a note about
    it."""
    # The weights are created in fp32. Each stage of a pipeline creates only its own layers.
    own = 4 * count_parameters(meta_model(recipe.model)).total / recipe.distributed.pipeline
    if processes * own >= _MUCH:
        yield (
            f"at the start, each process creates its model in CPU memory: {processes} x "
            f"{own / 2**30:.1f} GiB, on all machines together"
        )


def _of_ddp(prediction: MemoryPrediction, part: ResolvedRecipe) -> MemoryPrediction:
    """Return the memory prediction for DDP.

    DDP's gradient buckets hold one copy of all gradients and stay allocated between steps. With
    gradient accumulation, the accumulated gradients are allocated in addition to the buckets.
    """
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
    prediction: MemoryPrediction,
    recipe: ResolvedRecipe,
    part: ResolvedRecipe,
    processes: int,
    *,
    on_cpu: bool,
) -> MemoryPrediction:
    """Return the memory prediction for FSDP2.

    FSDP2 always keeps a shard of the weights, gradients and optimizer states in memory. During the
    forward and backward pass, it also keeps the gathered parameters of one or two layers, and all
    parameters outside the layers. With `reshard_after_forward: false`, it keeps the gathered
    parameters of all layers.
    """
    pieces = part.distributed.shard or copies_of(recipe, processes)
    # On a CPU, the shards are in CPU memory whether or not offloading is enabled.
    offloads = part.distributed.offload == "cpu" and not on_cpu
    state = 0 if offloads else 1
    in_bf16 = is_put_together_in_bf16(recipe, processes)
    size = 2 if in_bf16 else 4
    sizes = {name: p.numel() for name, p in meta_model(part.model).named_parameters()}
    inside = sum(size for name, size in sizes.items() if is_inside_a_layer(name))
    outside = sum(sizes.values()) - inside
    layer = inside // part.model.num_hidden_layers
    accumulates = part.batch.accumulation(part.data.seq_len) > 1
    keeps = not part.distributed.reshard_after_forward
    kept = prediction.phases.get("forward", PhasePeak(0, {})).parts.get("activations", 0)
    # With activation checkpointing, the peak can occur at any layer.
    keeps_all = part.efficiency.activation_checkpointing == "none"

    def together(phase: str, peak: PhasePeak) -> int:
        """Return the size in bytes of the gathered weights and of the gradients that are being
        reduced."""
        if phase in ("optimizer", "clipping"):
            return 0
        if phase == "backward":
            whole = size * (outside + (inside if keeps else 2 * layer))
            is_early = keeps_all and peak.parts.get("activations", 0) > _EARLY * kept
            if is_early or part.lora is not None:
                return whole
            # The additional memory consists of the gradient of a layer, the fp32 copy of the
            # gradient for the reduction, and the received shard.
            return whole + layer * (size + 4) + 4 * layer // pieces
        # One layer is gathered at a time. At the end of the forward pass, the last layer stays
        # gathered, because it is the first layer of the backward pass.
        return size * (outside + (inside if keeps else layer))

    def gradients(phase: str, whole: int) -> int:
        # With bf16 weights, the trace contains gradients of the fp32 master weights as well.
        whole = min(whole, 4 * (outside + inside))
        if phase in ("optimizer", "clipping"):
            return state * whole // pieces
        if accumulates:
            return whole
        early = min(whole, size * outside)
        return early + state * 4 * (whole - early) // size // pieces

    def cut(phase: str, peak: PhasePeak) -> PhasePeak:
        if phase == "setup" and part.preference is not None:
            # During setup, one process computes the reference log-probabilities of the pairs with
            # the full model.
            return peak
        parts = dict(peak.parts)
        held = 4 * (outside + inside) if in_bf16 else parts.get("weights", 0)
        # In a trace with bf16 weights, the fp32 master weights are counted as optimizer states.
        states = parts.get("optimizer_states", 0) - (held if in_bf16 else 0)
        parts["weights"] = state * -(-held // pieces)
        parts["optimizer_states"] = state * -(-max(states, 0) // pieces)
        parts["gradients"] = gradients(phase, parts.get("gradients", 0))
        parts["communication"] = parts.get("communication", 0) + together(phase, peak)
        return _sum(parts)

    # The state consists of the weights, the gradients and two moments.
    host = 16 * (outside + inside) // pieces if offloads else 0
    return with_peaks(prediction, cut, host)


def _of_deepspeed(
    prediction: MemoryPrediction, recipe: ResolvedRecipe, processes: int, on_cpu: bool
) -> MemoryPrediction:
    zero = _ZeRO(prediction, recipe, processes, on_cpu)
    host = 0 if on_cpu else sum(zero.moved.values())
    found = with_peaks(prediction, zero.shared, host)
    return dataclasses.replace(found, notes=(*found.notes, *_of_the_host(recipe, processes)))


class _ZeRO:
    """Memory use of DeepSpeed's ZeRO (Rajbhandari et al. 2019, arXiv 1910.02054).

    Stage 1 shards the optimizer states. Stage 2 also shards the gradients, and stage 3 also shards
    the weights. Offloading moves the shards to CPU memory. The additional buffers are modelled
    after DeepSpeed 0.19.

    Attributes:
        held: bytes that are always in the device's memory.
        moved: bytes that offloading moves to CPU memory.
    """

    def __init__(
        self, prediction: MemoryPrediction, recipe: ResolvedRecipe, processes: int, on_cpu: bool
    ) -> None:
        self.stage = recipe.distributed.zero_stage or 2
        self.on_cpu = on_cpu
        self.processes = processes
        self.offloads = recipe.distributed.offload != "none"
        self.accumulates = recipe.batch.accumulation(recipe.data.seq_len, processes) > 1
        self.recomputes = recipe.efficiency.activation_checkpointing != "none"
        phases = prediction.phases
        self.kept = phases.get("forward", PhasePeak(0, {})).parts.get("activations", 0)

        sizes = [4 * p.numel() for p in meta_model(recipe.model).parameters()]
        self.whole = sum(sizes)
        self.shard = -(-self.whole // processes)
        # The embedding and the output head have the same size. The gradient of the head is computed
        # first, and the gradient of the embedding last.
        self.table = sizes[0]
        settings = zero_settings(recipe.distributed, [size // 4 for size in sizes], on_cpu=on_cpu)
        self.overlaps = settings["overlap_comm"] and self.stage < 3
        # Gradients are copied into a bucket. When the bucket is full, its gradients are reduced.
        # With overlapping communication, a second bucket is filled at the same time.
        self.buffer = 4 * int(settings["reduce_bucket_size"])
        self.bucket = self.buffer * (2 if self.overlaps else 1)
        self.fills = self.buffer < self.whole
        # `small` is the size of the parameters that stage 3 always keeps gathered. `gathered` is
        # the size of all parameters that are gathered at the same time during the forward and
        # backward pass. Parameters are freed only if the limit `live` would be exceeded. A single
        # process does not gather parameters.
        threshold = 4 * settings["stage3_param_persistence_threshold"]
        live = 4 * int(settings["stage3_max_live_parameters"])
        self.small = sum(size for size in sizes if size <= threshold) if processes > 1 else 0
        self.gathered = min(self.whole, live) if processes > 1 else 0

        moments = max(peak.parts.get("optimizer_states", 0) for peak in phases.values())
        states = -(-moments // processes)
        held_by = self._held_by_stage_3 if self.stage == 3 else self._held_by_stages_1_and_2
        self.held, self.moved = held_by(states, max(sizes))

    def _held_by_stages_1_and_2(
        self, states: int, largest: int
    ) -> tuple[dict[str, int], dict[str, int]]:
        """Return the number of bytes that are always on the device and the number of bytes that are
        moved to the CPU's memory."""
        if not self.offloads:
            # The update makes a copy of the weights' shard, even if the weights are already in
            # fp32.
            return {"weights": self.whole + self.shard, "optimizer_states": states}, {}
        # Updated weights are moved through one buffer. Gradients are moved through two buffers, one
        # on the GPU and one on the CPU. Each buffer is as large as the largest parameter. Stage 2
        # sums the gradients of the micro-batches in CPU memory.
        moved = {
            "weights": 2 * self.shard,
            "gradients": self.shard * (2 if self.accumulates and self.stage == 2 else 1),
            "optimizer_states": states,
            "communication": largest,
        }
        return {"weights": self.whole, "communication": largest}, moved

    def _held_by_stage_3(self, states: int, _: int) -> tuple[dict[str, int], dict[str, int]]:
        """Return the number of bytes that are always on the device and the number of bytes that are
        moved to the CPU's memory."""
        # The gradient bucket and a buffer for the shard of the gradients exist during the entire
        # run. Small parameters stay gathered.
        buffers = {"communication": self.bucket + self.small}
        # The update makes a copy of the weights' shard, even if the weights are already in fp32.
        weights = {"weights": 2 * self.shard}
        if self.offloads:
            # During the update, a second buffer of gradients is in memory together with the copy of
            # the weights.
            return buffers, {**weights, "gradients": 2 * self.shard, "optimizer_states": states}
        return {**weights, **buffers, "gradients": self.shard, "optimizer_states": states}, {}

    def shared(self, phase: str, peak: PhasePeak) -> PhasePeak:
        """Return the peak of one process in a phase, computed from the traced peak of a single
        process."""
        if phase == "setup":
            # DeepSpeed shards the model only after the full model is on the device.
            return peak
        others = {name: size for name, size in peak.parts.items() if name not in STATE}
        is_early = not self.recomputes and others.get("activations", 0) > _EARLY * self.kept
        always = [self.held, self.moved] if self.on_cpu else [self.held]
        found = _total(others, *always, self._passing(phase, late=not is_early))
        if not _is_backward(phase):
            return found
        # The traced process has its peak at the start or at the end of the backward pass. With
        # DeepSpeed's buffers, the peak may move to the opposite end.
        at_start = _total({"activations": self.kept}, *always, self._passing(phase))
        at_end = _total(*always, self._passing(phase, late=True))
        return max(found, at_start, at_end, key=lambda peak: peak.bytes)

    def _passing(self, phase: str, *, late: bool = False) -> dict[str, int]:
        """Return the size in bytes of the gradients and buffers that exist only in this phase.

        Args:
            phase: name of the phase.
            late: True for the end of the backward pass, False for its start.
        """
        if phase in ("clipping", "optimizer"):
            if self.offloads:
                return {}
            # For the update, the shard of the gradients is copied into a single tensor. In stage 3,
            # the buffer from which it is copied also stays allocated.
            copies = 1 if self.stage == 3 or phase == "clipping" else 2
            return {"gradients": self.shard * copies}
        if _is_backward(phase):
            if self.stage == 3:
                return self._stage_3_backward(late)
            return self._stages_1_and_2_backward(late)
        if phase not in ("forward", *_LAST):
            return {}
        if self.stage == 3:
            return {"communication": max(self.gathered - self.small, 0)}
        # In stage 1, the bucket stays allocated until the last micro-batch.
        keeps = self.accumulates and self.stage == 1
        return {"gradients": self._summed(), "communication": self.bucket if keeps else 0}

    def _stage_3_backward(self, late: bool) -> dict[str, int]:
        parameters = max(self.gathered - self.small, 0)
        if not late:
            return {"gradients": self.table, "communication": parameters}
        # For the reduction, the gradients in the bucket are copied and arranged by process. On
        # CPUs, Gloo makes an additional copy for communication.
        ordered = min(self.buffer, self.whole) * (2 if self.on_cpu else 1)
        # The weights of a layer are freed after its backward pass. The weights of the embedding
        # stay in memory.
        parameters = parameters if self.fills else min(parameters, self.table)
        return {"gradients": self._waiting(), "communication": parameters + ordered}

    def _stages_1_and_2_backward(self, late: bool) -> dict[str, int]:
        summed = self._summed()
        if not late:
            # The bucket is created when the first gradient is available, which is the gradient of
            # the head.
            return {"gradients": summed + self.table, "communication": self.bucket}
        if self.stage == 1 and not self.overlaps:
            # All gradients are in memory before the first gradient is copied into the bucket.
            return {"gradients": self.whole, "communication": self.bucket}
        # With several processes, a copy of the bucket is used for communication. If the bucket
        # contains all gradients, the shard is created after this communication. Otherwise, it is
        # created when the first bucket is full.
        own = 0 if self.offloads else self.shard
        copied = min(self.buffer, self.whole) if self.processes > 1 else 0
        own = own + self._waiting() + copied if self.fills else max(own, self.table, copied)
        return {"gradients": summed + own, "communication": self.bucket}

    def _waiting(self) -> int:
        """Return the size in bytes of the gradients that are in the bucket at the end of the
        backward pass. The bucket is reduced when the next gradient does not fit in it, or after the
        last gradient."""
        return self.table if self.fills else 0

    def _summed(self) -> int:
        """Return the size in bytes of the gradients from earlier micro-batches, which stages 1 and
        2 keep in memory."""
        if not self.accumulates:
            return 0
        if self.stage == 1:
            return self.whole
        return 0 if self.offloads else self.shard


def _is_backward(phase: str) -> bool:
    return "backward" in phase and phase not in _LAST


def _total(*kinds: Mapping[str, int]) -> PhasePeak:
    """Return the peak that results if all given parts of memory are in use at the same time."""
    parts: dict[str, int] = {}
    for kind in kinds:
        for name, size in kind.items():
            parts[name] = parts.get(name, 0) + size
    return _sum(parts)


def own_part(recipe: ResolvedRecipe, processes: int) -> ResolvedRecipe:
    """Return a recipe for a single process whose step corresponds to one process's share of the
    distributed step. It contains the process's share of the batch, the attention heads, the MLPs
    and the layers, but the full embedding and output head. `with_own_tables` then corrects the
    prediction for the embedding and the output head.

    Args:
        recipe: the resolved recipe.
        processes: total number of processes.

    Raises:
        ConfigError: the model or the batch can't be divided among the processes.
    """
    copies = copies_of(recipe, processes)
    cut = recipe.distributed
    batch = recipe.batch
    model = recipe.model
    # This call raises an error if the batch can't be divided evenly.
    batch.accumulation(recipe.data.seq_len, copies)
    if batch.global_batch_tokens is not None:
        tokens = batch.global_batch_tokens // copies
        batch = batch.model_copy(update={"global_batch_tokens": tokens})
    if problems := list(why_not_cut(model, cut)):
        raise ConfigError("; ".join(problems))
    names = ("num_attention_heads", *model.tensor_parallel_sizes)
    changes = {name: getattr(model, name) // cut.tensor_parallel for name in names}
    # If the layers can't be divided evenly among the pipeline stages, use the largest stage.
    changes["num_hidden_layers"] = -(-model.num_hidden_layers // cut.pipeline)
    model = model.model_copy(update=changes)
    efficiency = recipe.efficiency
    if is_put_together_in_bf16(recipe, processes):
        # The activations between layers have the same dtype as the gathered weights.
        efficiency = efficiency.model_copy(update={"precision": "bf16_params"})
    changed: dict[str, Any] = {"batch": batch, "model": model, "efficiency": efficiency}
    # Sharded checkpoints are disabled, because a single process does not write them.
    changed["checkpoint"] = recipe.checkpoint.model_copy(update={"sharded": False})
    return recipe.model_copy(update=changed)


def why_not_cut(model: ModelConfig, cut: DistributedConfig) -> Iterator[str]:
    """Yield sentences that explain why a model can't be divided among processes as configured."""
    if cut.tensor_parallel > 1:
        yield from unshardable(model, cut.tensor_parallel)
    if cut.pipeline > 1:
        yield from unstageable(model, cut.pipeline)


def engine_of(recipe: Recipe, processes: int) -> type[Engine]:
    """Return the class of the engine that distributes the model of a recipe over processes. For a
    single process, this is `Engine`.

    Raises:
        ConfigError: the engine can't run with this number of processes.
    """
    cut = recipe.distributed
    needs_others = not named_engine(cut).updates_itself
    if processes * cut.tensor_parallel * cut.pipeline == 1 and needs_others:
        return Engine
    try:
        return ENGINES[engine_name(cut, processes)]
    except ConfigError as error:
        raise ConfigError(str(error).replace("--nproc", "--gpus")) from None


def is_put_together_in_bf16(recipe: ResolvedRecipe, processes: int) -> bool:
    """Return True if FSDP keeps shards in fp32 and gathers layers in bf16. With LoRA adapters,
    gathered parameters keep their dtype, so the result is False."""
    return (
        copies_of(recipe, processes) > 1
        and engine_of(recipe, processes).keeps_shards
        and recipe.efficiency.precision == "bf16"
        and recipe.lora is None
    )


def copies_of(recipe: Recipe, processes: int) -> int:
    """Return the number of copies of the model. Each copy is distributed over a group of processes,
    all of which process the same part of the batch.

    Raises:
        ConfigError: the processes can't be divided into full groups.
    """
    group = recipe.distributed.tensor_parallel * recipe.distributed.pipeline
    if processes % group:
        raise ConfigError(
            f"{processes} processes can't be divided into groups of distributed.tensor_parallel x "
            f"pipeline = {group}: plan for {-(-processes // group) * group}"
        )
    return processes // group


def with_own_tables(
    prediction: MemoryPrediction, recipe: ResolvedRecipe, part: ResolvedRecipe
) -> MemoryPrediction:
    """Correct the prediction for the recipe returned by `own_part`, so that it contains only one
    process's share of the embedding and the output head. With a pipeline, use the stage that needs
    the most memory, which is either the first or the last stage.

    Args:
        prediction: memory prediction for `part`.
        recipe: the resolved recipe with the full model.
        part: the recipe returned by `own_part`.
    """
    cut = recipe.distributed
    if cut.tensor_parallel > 1:
        share = _share_elsewhere(part, cut.tensor_parallel, head=True, table=True)
        prediction = with_peaks(prediction, lambda _, peak: _without(peak, share))
    if cut.pipeline == 1:
        return prediction
    passes = part.batch.accumulation(part.data.seq_len)
    # The pipeline schedule is 1F1B. With fewer micro-batches than stages, it is GPipe, which runs
    # all forward passes first.
    waiting = 1 if passes >= cut.pipeline else passes
    hidden = 4 * part.batch.micro_batch_size * part.data.seq_len * part.model.hidden_size
    head, table = _share_elsewhere(part, 0, head=True), _share_elsewhere(part, 0, table=True)
    forward = prediction.phases.get("forward")
    kept = 0 if forward is None or passes == 1 else forward.parts.get("activations", 0)

    def first(name: str, peak: PhasePeak) -> PhasePeak:
        if name in _LAST:
            return PhasePeak(0, {})
        more = kept * (min(cut.pipeline, passes) - 1) if name in ("forward", "backward") else 0
        peak = _without(peak, head, activations=more, communication=2 * hidden)
        return _sum({key: size for key, size in peak.parts.items() if key != "logits_and_loss"})

    def last(name: str, peak: PhasePeak) -> PhasePeak:
        more = kept * (waiting - 1) if name in ("forward", "backward", *_LAST) else 0
        return _without(peak, table, activations=more, communication=2 * hidden)

    # The stages in between have neither an embedding nor an output head, and they keep the
    # activations of fewer micro-batches than the first stage.
    ends = [with_peaks(prediction, one) for one in (first, last)]
    return max(ends, key=lambda one: one.peak_bytes)


def _share_elsewhere(
    part: ResolvedRecipe, pieces: int, *, head: bool = False, table: bool = False
) -> float:
    """Return the fraction of the parameters in `part` that are stored on other processes.

    Args:
        part: the recipe returned by `own_part`.
        pieces: number of shards into which the head and the embedding are divided; 0 if this
            process stores neither of them.
        head: True if the head is sharded.
        table: True if the embedding is sharded. If the embedding is tied to the head, the shared
            weight is counted once.
    """
    model = meta_model(part.model)
    weights = [
        *([model.lm_head.weight] if head else []),
        *([model.embedding.weight] if table else []),
    ]
    elsewhere = 0
    # The number of rows is rounded up, because the first process stores the most rows.
    for p in {id(p): p for p in weights}.values():
        own = -(-len(p) // pieces) if pieces else 0
        elsewhere += (len(p) - own) * (p.numel() // len(p))
    return elsewhere / sum(p.numel() for p in model.parameters())


def _without(peak: PhasePeak, share: float, **more: int) -> PhasePeak:
    """Return the peak with the sizes of the parts in `STATE` reduced by the fraction `share`, and
    with the bytes in `more` added to other parts."""
    parts = {
        name: round(size * (1 - share)) if name in STATE else size
        for name, size in peak.parts.items()
    }
    for name, size in more.items():
        parts[name] = parts.get(name, 0) + size
    return _sum(parts)


def _sum(parts: dict[str, int]) -> PhasePeak:
    parts = {name: size for name, size in parts.items() if size}
    return PhasePeak(sum(parts.values()), parts)


def with_peaks(
    prediction: MemoryPrediction,
    changed: Callable[[str, PhasePeak], PhasePeak],
    host_bytes: int = 0,
) -> MemoryPrediction:
    """Return a copy of the prediction in which the peak of every phase is replaced and `host_bytes`
    is added to the bytes in host memory."""
    phases = {name: changed(name, peak) for name, peak in prediction.phases.items()}
    phases = {name: peak for name, peak in phases.items() if peak.bytes}
    phase = max(phases, key=lambda name: phases[name].bytes)
    # Assume that the difference between reserved and allocated memory is the same as in
    # `prediction`.
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

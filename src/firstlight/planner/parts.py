"""What one of several processes has of a model that they compute together, as a model of its own.

With tensor parallelism each has some of every layer's heads and of its MLP, and rows of the
vocabulary; with a pipeline some of the layers, and at its ends the embedding or the head. So a
smaller model is traced in the place of the whole one; the tables of the vocabulary, and the
micro-batches that are on their way through a pipeline, are arithmetic on that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from firstlight.errors import ConfigError
from firstlight.models import ModelConfig
from firstlight.models.accounting import meta_model
from firstlight.parallel.config import DistributedConfig
from firstlight.parallel.engine import engine_name
from firstlight.parallel.pipeline import unstageable
from firstlight.parallel.tensor_parallel import uncuttable
from firstlight.planner.prediction import MemoryPrediction, PhasePeak
from firstlight.recipe import Recipe, ResolvedRecipe

#: What there is for each parameter.
STATE = ("weights", "gradients", "optimizer_states")

#: Phases that only the last stage has.
_LAST = ("loss", "backward of loss")


def own_part(recipe: ResolvedRecipe, processes: int) -> ResolvedRecipe:
    """What one of several processes computes of a step, as a recipe for one: its share of the
    batch, heads, MLP and layers, but whole tables of the vocabulary.

    Args:
        recipe: the resolved recipe.
        processes: of all groups together.

    Raises:
        ConfigError: model or batch can't be cut so.
    """
    copies = copies_of(recipe, processes)
    cut, batch, model = recipe.distributed, recipe.batch, recipe.model
    # Says what is wrong with a batch that does not come out even.
    batch.accumulation(recipe.data.seq_len, copies)
    if batch.global_batch_tokens is not None:
        tokens = batch.global_batch_tokens // copies
        batch = batch.model_copy(update={"global_batch_tokens": tokens})
    if problems := list(why_not_cut(model, cut)):
        raise ConfigError("; ".join(problems))
    names = ("num_attention_heads", *model.tensor_parallel_sizes)
    changes = {name: getattr(model, name) // cut.tensor_parallel for name in names}
    # Not all stages have as many.
    changes["num_hidden_layers"] = -(-model.num_hidden_layers // cut.pipeline)
    model = model.model_copy(update=changes)
    efficiency = recipe.efficiency
    if is_put_together_in_bf16(recipe, processes):
        # What lies between layers is of the weights' dtype.
        efficiency = efficiency.model_copy(update={"precision": "bf16_params"})
    changed: dict[str, Any] = {"batch": batch, "model": model, "efficiency": efficiency}
    # Of one process there are no pieces.
    changed["checkpoint"] = recipe.checkpoint.model_copy(update={"sharded": False})
    return recipe.model_copy(update=changed)


def why_not_cut(model: ModelConfig, cut: DistributedConfig) -> Iterator[str]:
    """Why a model can't be spread over processes as a recipe asks, each reason a sentence."""
    if cut.tensor_parallel > 1:
        yield from uncuttable(model, cut.tensor_parallel)
    if cut.pipeline > 1:
        yield from unstageable(model, cut.pipeline)


def engine_of(recipe: Recipe, processes: int) -> str:
    """How so many processes share a recipe's model; one needs nobody to share with.

    Raises:
        ConfigError: the engine can't be that of so many.
    """
    cut = recipe.distributed
    if processes * cut.tensor_parallel * cut.pipeline == 1 and cut.engine != "deepspeed":
        return "none"
    try:
        return engine_name(cut, processes)
    except ConfigError as error:
        raise ConfigError(str(error).replace("--nproc", "--gpus")) from None


def is_put_together_in_bf16(recipe: ResolvedRecipe, processes: int) -> bool:
    """Whether fsdp has pieces in fp32 and whole layers in bf16; adapters are left as they are."""
    return (
        copies_of(recipe, processes) > 1
        and engine_of(recipe, processes) == "fsdp"
        and recipe.efficiency.precision == "bf16"
        and recipe.lora is None
    )


def copies_of(recipe: Recipe, processes: int) -> int:
    """How many groups of processes have a model of their own, each a part of the batch.

    Raises:
        ConfigError: the processes don't make whole groups.
    """
    group = recipe.distributed.tensor_parallel * recipe.distributed.pipeline
    if processes % group:
        raise ConfigError(
            f"distributed.tensor_parallel x pipeline is {group}, of which {processes} processes "
            f"don't make whole groups: plan for {-(-processes // group) * group}"
        )
    return processes // group


def with_own_tables(
    prediction: MemoryPrediction, recipe: ResolvedRecipe, part: ResolvedRecipe
) -> MemoryPrediction:
    """The prediction of a part with what one process really has of the vocabulary's tables; of a
    pipeline, that of the first or the last stage, whichever needs more.

    Args:
        prediction: of the part.
        recipe: of the whole model.
        part: from `own_part`.
    """
    cut = recipe.distributed
    if cut.tensor_parallel > 1:
        share = _share_elsewhere(part, cut.tensor_parallel, ("embed_tokens", "lm_head"))
        prediction = with_peaks(prediction, lambda _, peak: _without(peak, share))
    if cut.pipeline == 1:
        return prediction
    passes = part.batch.accumulation(part.data.seq_len)
    # One forward and one backward in turn; without enough micro-batches all forward passes first.
    waiting = 1 if passes >= cut.pipeline else passes
    hidden = 4 * part.batch.rows * part.data.seq_len * part.model.hidden_size
    head, table = (_share_elsewhere(part, 0, (name,)) for name in ("lm_head", "embed_tokens"))
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

    ends = [with_peaks(prediction, one) for one in (first, last)]
    return max(ends, key=lambda one: one.peak_bytes)


def _share_elsewhere(part: ResolvedRecipe, pieces: int, tables: tuple[str, ...]) -> float:
    """The share of a part's parameters that other processes have.

    Args:
        pieces: that tables are cut into; 0 is all of them elsewhere.
        tables: parts of their names.
    """
    parameters = dict(meta_model(part.model).named_parameters())
    elsewhere = 0
    for name, p in parameters.items():
        if any(table in name for table in tables):
            own = -(-len(p) // pieces) if pieces else 0
            elsewhere += (len(p) - own) * (p.numel() // len(p))
    return elsewhere / sum(p.numel() for p in parameters.values())


def _without(peak: PhasePeak, share: float, **more: int) -> PhasePeak:
    """With less of what there is for each parameter, and more of other parts."""
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
    """With every phase's peak changed, and more in the host's memory."""
    phases = {name: changed(name, peak) for name, peak in prediction.phases.items()}
    phases = {name: peak for name, peak in phases.items() if peak.bytes}
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

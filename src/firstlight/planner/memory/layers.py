"""Predicts the memory of a deep model from that of the same model with few layers.

If all layers are alike, each adds the same: the bytes at a given point of a step are a linear
function of the number of layers. But with more layers, the peak may be at another point: early in
the backward pass, when all activations are in memory, or late, when all gradients are. Each stretch
of the step is therefore extrapolated separately, and the largest result counts.

Compiling a model with one more layer costs seconds. But the memory that a layer adds is known
before inductor fuses operators: the tensors saved for the backward pass, and gradients. The line
therefore begins at a shallow model that is compiled completely, and has the slope of the graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from firstlight.models import ModelConfig, padded_vocab_size
from firstlight.planner.memory.kernels import LISTS, Layout, OperatorCount, Target, total_bytes
from firstlight.planner.memory.prediction import (
    LATE_BACKWARD,
    MIDDLE_BACKWARD,
    MemoryPrediction,
    PhasePeak,
)
from firstlight.recipe import ResolvedRecipe

#: Layers of the shallower of the two traced models; the other has one more.
_FEW = 2

#: Layers of a model compiled as a whole that are traced through inductor, by its activation
#: checkpointing. With "full", the peak is often at a layer that is neither first nor last: with two
#: layers, up to 4 % was missing. With "selective" and "budget", a layer that is both first and last
#: keeps tensors that no other layer keeps: with one layer, the prediction was up to 7 % too high.
_FEW_COMPILED = {"none": 1, "selective": 2, "budget": 2, "full": 3}

#: The same with blockwise attention, which allocates much memory internally. Inductor does not know
#: of that memory, and orders the operators around it differently in a layer that is both first and
#: last: with one layer, 3 % were missing.
_FEW_BLOCKWISE = 2

#: Phases in which nothing compiled runs.
_EAGER = ("setup", "clipping", "optimizer")

Join = Callable[[Sequence[MemoryPrediction]], MemoryPrediction]


def in_fewer_layers(recipe: ResolvedRecipe) -> tuple[list[ResolvedRecipe], Join]:
    """Return shallow recipes to trace, and the function that derives the recipe's prediction.

    Args:
        recipe: the resolved recipe; it is traced itself if its layers differ or are few.

    Returns:
        The recipes, the deepest first; and the function, which takes their predictions in this
        order, each with its backward pass in two stretches (see `prediction.predict`).
    """
    depth = recipe.model.num_hidden_layers
    if depth <= _FEW + 1 or not are_alike(recipe.model):
        return [recipe], lambda found: merged(found[0])
    # Two shallow models determine the line: its slope is the memory that one layer adds.
    steps = depth - _FEW - 1
    return (
        [with_layers(recipe, count) for count in (_FEW + 1, _FEW)],
        lambda found: _deeper(found[1], found[0], steps),
    )


def few_compiled_layers(
    recipe: ResolvedRecipe,
) -> tuple[ResolvedRecipe, ResolvedRecipe, int] | None:
    """Return the shallow recipes from which `from_graphs` predicts a recipe compiled as a whole.

    Args:
        recipe: the resolved recipe.

    Returns:
        The recipe with few layers, the recipe with one more layer, and the number of layers that
        the recipe has beyond the few. None if its layers are not alike, or not more than these.
    """
    depth = recipe.model.num_hidden_layers
    few = _FEW_COMPILED[recipe.efficiency.activation_checkpointing]
    if recipe.efficiency.attention == "blockwise":
        few = max(few, _FEW_BLOCKWISE)
    if depth <= few + 1 or not are_alike(recipe.model):
        return None
    return with_layers(recipe, few), with_layers(recipe, few + 1), depth - few


def from_graphs(
    fused: MemoryPrediction,
    graphs: MemoryPrediction,
    more: MemoryPrediction,
    steps: int,
    *,
    accumulates: bool = False,
) -> MemoryPrediction:
    """Predict the memory of a compiled model from that of a shallow compiled model and from graphs.

    Each prediction has its backward pass in three stretches (see `prediction.predict`).

    Args:
        fused: prediction for the shallow model, as inductor compiles it.
        graphs: prediction for the same model, with its graphs run operator by operator.
        more: prediction for the graphs of the model with one more layer.
        steps: number of layers to add to the shallow model.
        accumulates: True if gradients of an earlier micro-batch are in memory.

    Returns:
        The prediction, with the operators of the graphs.
    """
    accumulated = _new_gradients(fused, more) if accumulates else 0
    # Late in the backward pass, all gradients are in memory, as after it. With updates in the
    # backward pass, there are no gradients after it.
    eager = [name for name in ("clipping", "optimizer") if "gradients" in more.phases[name].parts]
    ending = min(eager, key=lambda name: more.phases[name].bytes, default="optimizer")

    def slope(place: str) -> tuple[PhasePeak, PhasePeak]:
        before = fused if place in _EAGER or place not in graphs.phases else graphs
        return before.phases[place], more.phases[place]

    places = {name: slope(name) for name in fused.phases if name in more.phases}
    if LATE_BACKWARD in places:
        before, after = slope(ending)
        places[LATE_BACKWARD] = before, _with_more(after, accumulated)
    if MIDDLE_BACKWARD in places:
        early, middle = places["backward"], places[MIDDLE_BACKWARD]
        # The graphs' peak is in the middle with few layers, and early with one more layer.
        if early[0].bytes < middle[0].bytes <= early[1].bytes > middle[1].bytes:
            places["backward"] = middle[0], early[1]
        # In the middle, layers are added before or after the layer of the peak: the larger counts.
        ends = (places["backward"], places[LATE_BACKWARD])
        places[MIDDLE_BACKWARD] = max(ends, key=lambda pair: pair[1].bytes - pair[0].bytes)
    phases = {name: _continued(fused.phases[name], *pair, steps) for name, pair in places.items()}
    found = replace(
        fused,
        host_bytes=fused.host_bytes + (more.host_bytes - graphs.host_bytes) * steps,
        operators=tuple(at_depth(graphs.operators, more.operators, steps - 1)),
    )
    return _with_phases(found, phases, fused.reserved_bytes - fused.peak_bytes)


def _new_gradients(few: MemoryPrediction, more: MemoryPrediction) -> int:
    """Return the bytes of a layer's gradients as the backward pass creates them: only for trained
    parameters, in the parameters' dtype."""
    ends = [found.phases["optimizer"].parts for found in (few, more)]
    return min(ends[1].get(part, 0) - ends[0].get(part, 0) for part in ("weights", "gradients"))


def _with_more(peak: PhasePeak, gradients: int) -> PhasePeak:
    parts = peak.parts | {"gradients": peak.parts.get("gradients", 0) + gradients}
    return PhasePeak(peak.bytes + gradients, parts)


def _continued(peak: PhasePeak, few: PhasePeak, more: PhasePeak, steps: int) -> PhasePeak:
    """Return the peak plus `steps` times the difference between the peaks `more` and `few`."""
    total = peak.bytes + (more.bytes - few.bytes) * steps
    parts = {}
    for name in dict.fromkeys((*peak.parts, *few.parts, *more.parts)):
        each = more.parts.get(name, 0) - few.parts.get(name, 0)
        parts[name] = max(peak.parts.get(name, 0) + each * steps, 0)
    # The parts of the graphs' peaks may differ from those of `peak`: no part may be negative, and
    # the excess that this causes is taken from the largest parts.
    excess = sum(parts.values()) - total
    for name in sorted(parts, key=parts.__getitem__, reverse=True):
        taken = min(excess, parts[name])
        parts[name] -= taken
        excess -= taken
    return PhasePeak(total, {name: size for name, size in parts.items() if size})


def _deeper(few: MemoryPrediction, more: MemoryPrediction, steps: int) -> MemoryPrediction:
    """Return the prediction for `steps` more layers than in `more`, which has one more layer than
    `few`."""
    phases = {name: _line(few.phases[name], more.phases[name], steps) for name in more.phases}
    gaps = [found.reserved_bytes - found.peak_bytes for found in (few, more)]
    found = replace(
        more,
        host_bytes=more.host_bytes + (more.host_bytes - few.host_bytes) * steps,
        operators=tuple(at_depth(few.operators, more.operators, steps)),
    )
    return _with_phases(found, phases, max(gaps))


def _with_phases(
    prediction: MemoryPrediction, phases: dict[str, PhasePeak], gap: int
) -> MemoryPrediction:
    """Return the prediction with the phases of a deep model; its allocator reserves `gap` bytes
    beyond the peak."""
    phase = max(phases, key=lambda name: phases[name].bytes)
    peak = phases[phase]
    found = replace(
        prediction,
        peak_bytes=peak.bytes,
        phase=phase,
        parts=peak.parts,
        phases=phases,
        # More layers do not need a larger gap: each reuses the memory that the previous layer
        # freed.
        reserved_bytes=peak.bytes + gap,
    )
    return merged(found)


def padded_logits_bytes(recipe: ResolvedRecipe, target: Target) -> int:
    """Return the bytes of the copy of the logits' gradient that a step compiled as a whole makes on
    a GPU: 0 if their rows are multiples of 16 bytes.

    Otherwise inductor pads the operands of matrix products (its `pad_mm`). On an H100, the step of
    a GPT-2 with 50,257 logits took exactly this copy more than predicted without it.
    """
    config = recipe.efficiency
    is_short = config.precision in ("bf16", "fp16")
    if target.kind != "cuda" or config.loss_chunk_tokens or not is_short:
        return 0
    rows = padded_vocab_size(recipe.model.vocab_size, config.vocab_multiple)
    padded = padded_vocab_size(rows, 8)
    tokens = recipe.batch.micro_batch_size * recipe.data.seq_len
    return 2 * padded * tokens if padded > rows else 0


def with_temporary(prediction: MemoryPrediction, phase: str, size: int) -> MemoryPrediction:
    """Return the prediction with a temporary tensor of `size` bytes at the peak of a phase."""
    if not size or phase not in prediction.phases:
        return prediction
    peak = prediction.phases[phase]
    parts = peak.parts | {"temporaries": peak.parts.get("temporaries", 0) + size}
    phases = prediction.phases | {phase: PhasePeak(peak.bytes + size, parts)}
    return _with_phases(prediction, phases, prediction.reserved_bytes - prediction.peak_bytes)


def merged(prediction: MemoryPrediction) -> MemoryPrediction:
    """Return the prediction with the backward pass as one phase."""
    # The stretches are only for extrapolation; a plan shows one backward pass.
    phases = dict(prediction.phases)
    later = [phases.pop(name) for name in (MIDDLE_BACKWARD, LATE_BACKWARD) if name in phases]
    if later:
        early = phases.get("backward", later[0])
        phases["backward"] = max(early, *later, key=lambda peak: peak.bytes)
    is_later = prediction.phase in (MIDDLE_BACKWARD, LATE_BACKWARD)
    return replace(prediction, phases=phases, phase="backward" if is_later else prediction.phase)


def are_alike(config: ModelConfig) -> bool:
    """Return True if all layers attend to as many tokens, and all or none have experts."""
    # GPT-2 may scale the scores of each layer by a different number, which takes no memory.
    kinds = {
        (replace(config.attention_spec(i), scale=None), config.has_experts(i))
        for i in range(config.num_hidden_layers)
    }
    return len(kinds) == 1


def _line(few: PhasePeak, more: PhasePeak, steps: int) -> PhasePeak:
    parts = {}
    for name in dict.fromkeys((*more.parts, *few.parts)):
        at_more = more.parts.get(name, 0)
        parts[name] = max(at_more + (at_more - few.parts.get(name, 0)) * steps, 0)
    return PhasePeak(sum(parts.values()), {name: size for name, size in parts.items() if size})


def with_layers(recipe: ResolvedRecipe, count: int) -> ResolvedRecipe:
    """Return the recipe with another number of layers of its model."""
    return recipe.with_keys("model", num_hidden_layers=count)


def at_depth(
    few: Sequence[OperatorCount], more: Sequence[OperatorCount], steps: int
) -> list[OperatorCount]:
    """Return the operators of a deep model from those of two shallow models.

    Args:
        few: counts of the model with fewer layers.
        more: counts of the model with one more layer.
        steps: layers that the deep model has beyond `more`.
    """
    before = {entry.operator: entry.count for entry in few}
    found = []
    for entry in more:
        each = entry.count - before.get(entry.operator, 0)
        # An operator over lists of all parameters occurs once, with longer lists.
        is_list = not entry.operator.outputs and entry.operator not in before
        # Operators of both models occur once in the deep one; additional ones once per layer.
        count = entry.count if is_list else entry.count + max(each, 0) * steps
        found.append(OperatorCount(entry.operator, count))
        if is_list:
            found += _longer_lists(entry, few, steps)
    return found


def _longer_lists(
    entry: OperatorCount, few: Sequence[OperatorCount], steps: int
) -> list[OperatorCount]:
    """Return the operators that a list operator of the shallow model adds in a deeper model: on the
    tensors of one more layer, once for each further layer."""
    one = entry.operator
    like = [e.operator for e in few if (e.operator.name, e.operator.phase) == (one.name, one.phase)]
    lists = LISTS.get(one.base_name, 1)
    for other in like:
        pairs = zip(_equal_parts(one.inputs, lists), _equal_parts(other.inputs, lists), strict=True)
        # Differences list by list, in the same order: tensors of one parameter stay together.
        added = [tuple((Counter(more) - Counter(less)).elements()) for more, less in pairs]
        inputs = tuple(layout for part in added for layout in part)
        if inputs and len(inputs) == len(one.inputs) - len(other.inputs):
            layer = replace(one, inputs=inputs, moved_bytes=total_bytes(inputs))
            return [OperatorCount(layer, entry.count * steps)]
    return []


def _equal_parts(layouts: Sequence[Layout], lists: int) -> list[Sequence[Layout]]:
    size = len(layouts) // lists
    return [layouts[i * size : (i + 1) * size] for i in range(lists)]

"""A deep model's memory from that of the same model with few layers.

All layers being alike, each adds the same: bytes at a given place of a step are a straight line in
the number of layers. But the peak may be at another place with more of them, early in the backward
pass, where all activations are there, or late, where all gradients are. So lines are drawn through
stretches of the step, and the highest counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from firstlight.models import GPT2Config, ModelConfig, MoEConfig
from firstlight.planner.prediction import LATE_BACKWARD, MemoryPrediction, PhasePeak
from firstlight.planner.speed_kinds import at_depth
from firstlight.training.config import Recipe

#: Layers of the shallower of the two models that are traced; the other has one more. Where forward
#: passes are computed again, compiled, one is too few: a layer that is first and last keeps what no
#: other keeps (3 to 47 % at 12 layers); so with adapters (60 %). Of models that are compiled whole
#: without these, 1 and 2 were seen to give the same bytes as 2 and 3, in two thirds of the time.
_FEW, _FEW_COMPILED = 2, 1

Join = Callable[[Sequence[MemoryPrediction]], MemoryPrediction]


def in_fewer_layers(recipe: Recipe) -> tuple[list[Recipe], Join]:
    """Recipes to be traced in full, and what makes of their predictions that of the recipe.

    Args:
        recipe: where its layers are not alike, or it has no more of them, it is to be traced
            itself.

    Returns:
        The recipes, the deepest first; and a function of what they take, with `LATE_BACKWARD` as a
        phase.
    """
    assert recipe.model is not None
    depth, few = recipe.model.num_hidden_layers, _few(recipe)
    if depth <= few + 1 or not _are_alike(recipe.model):
        return [recipe], lambda found: merged(found[0])
    steps = depth - few - 1
    return (
        [_with_layers(recipe, count) for count in (few + 1, few)],
        lambda found: _deeper(found[1], found[0], steps),
    )


def _few(recipe: Recipe) -> int:
    config = recipe.efficiency
    compiles = config.compile is True and not config.compile_regional
    is_plain = recipe.lora is None and recipe.preference is None
    keeps = config.activation_checkpointing == "none"
    return _FEW_COMPILED if compiles and is_plain and keeps else _FEW


def _deeper(few: MemoryPrediction, more: MemoryPrediction, steps: int) -> MemoryPrediction:
    """Of a model with `steps` layers more than `more`, which has one more than `few`."""
    phases = {name: _line(few.phases[name], more.phases[name], steps) for name in more.phases}
    phase = max(phases, key=lambda name: phases[name].bytes)
    peak = phases[phase].bytes
    gaps = [found.reserved_bytes - found.peak_bytes for found in (few, more)]
    found = replace(
        more,
        peak_bytes=peak,
        phase=phase,
        parts=phases[phase].parts,
        phases=phases,
        # Of layers that are alike, the next reuses what the last left.
        reserved_bytes=peak + max(gaps),
        host_bytes=more.host_bytes + (more.host_bytes - few.host_bytes) * steps,
        operators=tuple(at_depth(few.operators, more.operators, steps)),
    )
    return merged(found)


def merged(prediction: MemoryPrediction) -> MemoryPrediction:
    """Without `LATE_BACKWARD`: the backward pass is one phase."""
    phases = dict(prediction.phases)
    late = phases.pop(LATE_BACKWARD, None)
    if late is not None:
        early = phases.get("backward", late)
        phases["backward"] = max(early, late, key=lambda peak: peak.bytes)
    phase = "backward" if prediction.phase == LATE_BACKWARD else prediction.phase
    return replace(prediction, phases=phases, phase=phase)


def _are_alike(config: ModelConfig) -> bool:
    """Whether all layers attend to as many tokens, and all or none have experts."""
    if isinstance(config, GPT2Config):
        return True
    layers = range(config.num_hidden_layers)
    has_experts = isinstance(config, MoEConfig) and config.has_experts
    kinds = {(config.window(i), bool(has_experts and has_experts(i))) for i in layers}
    return len(kinds) == 1


def _line(few: PhasePeak, more: PhasePeak, steps: int) -> PhasePeak:
    parts = {}
    for name in dict.fromkeys((*more.parts, *few.parts)):
        at_more = more.parts.get(name, 0)
        parts[name] = max(at_more + (at_more - few.parts.get(name, 0)) * steps, 0)
    return PhasePeak(sum(parts.values()), {name: size for name, size in parts.items() if size})


def _with_layers(recipe: Recipe, count: int) -> Recipe:
    assert recipe.model is not None
    model = recipe.model.model_copy(update={"num_hidden_layers": count})
    return recipe.model_copy(update={"model": model})

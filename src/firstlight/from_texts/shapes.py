"""The models among which a new one is chosen, and those that fit the values given by the user."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from firstlight.console import parse_count, rounded
from firstlight.errors import ConfigError, nearest
from firstlight.planner.advise import defaults
from firstlight.planner.advise.law import ModelSize


def candidate_shapes(
    vocab_size: int, fixed: Mapping[str, Any], size: str | None = None
) -> list[ModelSize]:
    """The candidate models: those of `defaults.SHAPES`, or the one of a given size, with given
    width and depth, and with widths that given heads divide.

    Args:
        vocab_size: vocabulary size of the tokenizer.
        fixed: values given by the user, by `section.key`.
        size: a name of `defaults.SIZES`, or a number of parameters such as "10M"; None takes all.

    Raises:
        ConfigError: the size is unknown, or no width fits the given heads.
    """
    known = defaults.SHAPES if size is None else _of_size(size, vocab_size, fixed)
    width, depth = fixed.get("model.hidden_size"), fixed.get("model.num_hidden_layers")
    pairs = dict.fromkeys((width or w, depth or d) for w, d in known)
    fitting = [(w, d) for w, d in pairs if _fits_heads(w, fixed)]
    if not fitting:
        given = " and ".join(f"--{key} {fixed[key]}" for key in HEADS if key in fixed)
        widths = ", ".join(dict.fromkeys(str(w) for w, _ in pairs))
        step = 2 * fixed[HEADS[0]] if HEADS[0] in fixed else defaults.HEAD_DIM * fixed[HEADS[1]]
        raise ConfigError(
            f"no width of {widths} goes with {given}: set --model.hidden_size to a multiple of "
            f"{step}"
        )
    return [ModelSize(w, d, vocab_size, _seq_len(w, fixed)) for w, d in fitting]


#: Smallest size of a head of a width that is chosen.
_LEAST_HEAD = 16
#: Keys with which not every width is valid.
HEADS = ("model.num_attention_heads", "model.num_key_value_heads")


def sections_for(fixed: Mapping[str, Any]) -> dict[str, Any]:
    """Sections of a recipe with keys that will be chosen, with which the given ones are valid."""
    layout, size = defaults.LAYOUT, defaults.HEAD_DIM
    found: dict[str, Any] = {"schedule": {"kind": layout["schedule.kind"]}}
    if "optimizer.name" not in fixed:
        found["optimizer"] = {"learning_rate": layout["optimizer.learning_rate"]}
    if not any(name.startswith("model.") for name in fixed):
        return found
    model = {"model_type": layout["model.model_type"]}
    width, heads = fixed.get("model.hidden_size"), fixed.get(HEADS[0]) or fixed.get(HEADS[1])
    if isinstance(heads, int) and heads > 0:
        model |= {"hidden_size": size * heads, "num_attention_heads": heads}
    elif isinstance(width, int) and width > 0:
        model["num_attention_heads"] = 1 if width % size else width // size
    return {**found, "model": model}


def head_count(width: int, fixed: Mapping[str, Any]) -> int:
    """The number of attention heads for a width (hidden_size).

    Raises:
        ConfigError: the width is given without heads, and is no multiple of a head's size.
    """
    if given := fixed.get(HEADS[0]):
        return int(given)
    size = defaults.HEAD_DIM
    if width % size:
        raise ConfigError(
            f"model.hidden_size {width} is no multiple of {size}, the size of a head: take "
            f"{math.ceil(width / size) * size}, or set --model.num_attention_heads"
        )
    return width // size


def _fits_heads(width: int, fixed: Mapping[str, Any]) -> bool:
    if not any(key in fixed for key in HEADS):
        return True
    if "model.hidden_size" in fixed:
        return True  # the model's own rules decide
    heads = head_count(width, fixed)
    # Rotary embeddings turn pairs of a head's dimensions, and tiny heads see little.
    divides = width % (2 * heads) == 0 and width >= _LEAST_HEAD * heads
    return divides and heads % int(fixed.get(HEADS[1]) or heads) == 0


def _seq_len(width: int, fixed: Mapping[str, Any]) -> int:
    """The tokens of a sequence: given, or usual for the width within a given context."""
    usual = next(seq_len for most, seq_len in defaults.SEQ_LENS if width <= most)
    context = fixed.get("model.max_position_embeddings") or usual
    return fixed.get("data.seq_len") or min(usual, context)


def parameters_of(size: str) -> float:
    """The number of parameters of a size such as "10M".

    Raises:
        ConfigError: `size` is not a number above 0.
    """
    try:
        found = parse_count(size)
    except ConfigError:
        found = 0.0
    if not found:
        raise ConfigError(
            f"--size {size} is unknown{nearest(size, defaults.SIZES)}: choose one of "
            f"{', '.join(defaults.SIZES)}, or a number of parameters such as 10M"
        )
    return found


def _of_size(size: str, vocab_size: int, fixed: Mapping[str, Any]) -> Sequence[tuple[int, int]]:
    """The shape of a size, alone; of a number of parameters, the nearest that fits given heads."""
    if size in defaults.SIZES:
        return [defaults.SIZES[size]]
    wanted = parameters_of(size)

    def parameters(shape: tuple[int, int]) -> int:
        return ModelSize(*shape, vocab_size, 256).parameters

    fitting = [one for one in defaults.SHAPES if _fits_heads(one[0], fixed)] or defaults.SHAPES
    nearest_shape = min(fitting, key=lambda one: abs(math.log(parameters(one) / wanted)))
    if not 0.5 <= parameters(nearest_shape) / wanted <= 2:
        first, last = (rounded(parameters(fitting[place])) for place in (0, -1))
        raise ConfigError(
            f"--size {size}: with this text's vocabulary, sizes from {first} to {last} parameters "
            "are known; set --model.hidden_size and --model.num_hidden_layers for another"
        )
    return [nearest_shape]

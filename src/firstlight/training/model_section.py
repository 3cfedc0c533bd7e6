"""The recipe's `model` section compared with the config of an existing model, which is that of
--init-from or of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from firstlight.errors import ConfigError
from firstlight.models import DEFAULT_FAMILY, ModelConfig
from firstlight.recipe import Recipe

#: Keys of the `model` section that may change the model of --init-from: those of its positions.
_POSITION_KEYS = frozenset(("max_position_embeddings", "rope_scaling", "rope_theta"))


def with_positions(
    recipe: Recipe, config: ModelConfig, init_from: str | Path, tell: Callable[[str], None]
) -> ModelConfig:
    """The config of the model of --init-from, with the position keys of the recipe's `model`
    section if that has no other keys. A section with other keys describes a model of its own, and
    changes nothing.

    Args:
        recipe: the recipe.
        config: config of the model.
        init_from: name of the model, for messages.
        tell: called with a message if the config is changed.

    Raises:
        ConfigError: the model can't have these positions.
    """
    # Without model_type: a section that does not name it has the default.
    names = set() if recipe.model is None else _written_keys(recipe.model) - {"model_type"}
    changes = {name: getattr(recipe.model, name) for name in sorted(names)}
    is_same = all(getattr(config, name, None) == value for name, value in changes.items())
    if is_same or not names <= _POSITION_KEYS:
        return config
    if not config.has_rotary:
        raise ConfigError(
            f"{init_from} is a {config.model_type} model, whose positions are learned and can't be "
            "changed: leave out the model section"
        )
    if recipe.lora is not None:
        raise ConfigError(
            f"checkpoints of lora refer to {init_from} with its own positions: leave out the lora "
            "section, or the model section"
        )
    try:
        changed = type(config)(**{**config.model_dump(), **changes})
    except ValidationError as error:
        first = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise ConfigError(f"model: {init_from} can't have these positions: {first}") from error
    tell(f"the positions of {init_from} are changed: {', '.join(f'model.{n}' for n in changes)}")
    return changed


def contradictions(recipe: Recipe, config: ModelConfig) -> list[str]:
    """The keys, as `model.KEY`, that the recipe sets to another value than `config` has."""
    if recipe.model is None:
        return []
    # Only keys that the recipe names: a default contradicts nothing.
    found = changed_keys(recipe.model.model_dump(), config.model_dump())
    given = _written_keys(recipe.model) - ({"vocab_size"} if not recipe.model.vocab_size else set())
    if not given <= _POSITION_KEYS | {"model_type"}:
        given |= {"model_type"}
    elif recipe.model.model_type == DEFAULT_FAMILY:
        given -= {"model_type"}  # positions alone name no family
    return [f"model.{name}" for name in found if name in given]


def _written_keys(model: ModelConfig) -> set[str]:
    """The keys that a recipe's `model` section names, without those that validation filled in."""
    usual = type(model).model_validate({"model_type": model.model_type})
    filled = usual.model_fields_set - {"model_type"}
    return {
        name
        for name in model.model_fields_set
        if name not in filled or getattr(model, name) != getattr(usual, name)
    }


def changed_keys(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The keys whose values differ, a missing key counting as None; sorted."""
    return sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))

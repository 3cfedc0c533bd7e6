"""The recipe's `model` section compared with the config of an existing model: that of --init-from,
or of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from firstlight.errors import ConfigError
from firstlight.models import DEFAULT_FAMILY, ModelConfig
from firstlight.recipe import Recipe

#: Keys of a `model` section that may change the model of --init-from: its positions.
_POSITION_KEYS = frozenset(("max_position_embeddings", "rope_scaling", "rope_theta"))


def with_positions(
    recipe: Recipe, config: ModelConfig, init_from: str | Path, tell: Callable[[str], None]
) -> ModelConfig:
    """The config of --init-from with the recipe's positions, where its `model` section names those
    and nothing else: a whole section is of another model.

    Raises:
        ConfigError: the model can't have them.
    """
    # A section without model_type got the default one.
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
    """The `model.` keys that the recipe sets to something else than `config` has."""
    if recipe.model is None:
        return []
    # A key that the recipe leaves out is a default, which contradicts nothing.
    found = changed_keys(recipe.model.model_dump(), config.model_dump())
    given = _written_keys(recipe.model) - ({"vocab_size"} if not recipe.model.vocab_size else set())
    if not given <= _POSITION_KEYS | {"model_type"}:
        given |= {"model_type"}
    elif recipe.model.model_type == DEFAULT_FAMILY:
        given -= {"model_type"}  # positions alone name no family
    return [f"model.{name}" for name in found if name in given]


def _written_keys(model: ModelConfig) -> set[str]:
    """The keys of a recipe's `model` section, without those that were filled in."""
    usual = type(model).model_validate({"model_type": model.model_type})
    filled = usual.model_fields_set - {"model_type"}
    return {
        name
        for name in model.model_fields_set
        if name not in filled or getattr(model, name) != getattr(usual, name)
    }


def changed_keys(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The keys whose values differ, or that only one has."""
    return sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))

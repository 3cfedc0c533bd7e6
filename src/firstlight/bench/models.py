"""Models that benchmarks can select by name, and configurations for the planner's benchmark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from firstlight.errors import ConfigError, nearest
from firstlight.models import ModelConfig
from firstlight.recipe import load_recipe, parse_recipe

#: Name of the small model used by `--quick`.
SMALL = "small"


def gpt2(
    hidden_size: int, num_hidden_layers: int, num_attention_heads: int, vocab_size: int = 50257
) -> dict[str, Any]:
    """Return the `model` section of a recipe for a GPT-2 model."""
    return {
        "model_type": "gpt2",
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "num_hidden_layers": num_hidden_layers,
        "num_attention_heads": num_attention_heads,
    }


def llama(
    hidden_size: int,
    intermediate_size: int,
    num_hidden_layers: int,
    num_attention_heads: int,
    num_key_value_heads: int,
    **more: Any,
) -> dict[str, Any]:
    """Return the `model` section of a recipe for a Llama model. Keys in `more` are added to the
    section and take precedence over its other values."""
    return {
        "model_type": "llama",
        "vocab_size": 32768,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_hidden_layers,
        "num_attention_heads": num_attention_heads,
        "num_key_value_heads": num_key_value_heads,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        **more,
    }


ROPE: dict[str, Any] = {"rope_theta": 500000.0}
LLAMA_3 = {**ROPE, "vocab_size": 128256, "max_position_embeddings": 131072}
LLAMA_110M = llama(768, 2048, 12, 12, num_key_value_heads=4, **ROPE)

#: `model` sections of the models that can be selected by name. The keys are the names.
MODELS: dict[str, dict[str, Any]] = {
    # As in GPT-2, the vocabulary size is odd.
    SMALL: gpt2(256, 4, 4, 16001),
    "gpt2-124m": gpt2(768, 12, 12),
    "gpt2-355m": gpt2(1024, 24, 16),
    "gpt2-774m": gpt2(1280, 36, 20),
    "llama-110m": LLAMA_110M,
    # The shape of SmolLM2-135M.
    "smollm2-135m": llama(
        576, 1536, 30, 9, num_key_value_heads=3, vocab_size=49152, rope_theta=100000.0
    ),
    # The shape of Llama 3.2 1B.
    "llama-1b": llama(2048, 8192, 16, 32, num_key_value_heads=8, **LLAMA_3),
}

#: Mapping from model names used in earlier versions to the current names. The earlier names are
#: still accepted.
OLD_NAMES = {"gpt2-350m": "gpt2-355m"}

#: Vocabulary size of GPT-2, used for recipes that do not specify a vocabulary size.
_VOCAB_SIZE = 50257


def config_of(values: dict[str, Any], where: str = "the model") -> ModelConfig:
    """Return the config of the model described by a recipe's `model` section.

    Args:
        values: values of the section.
        where: description of the source of the values, for error messages.

    Raises:
        ConfigError: the section is invalid.
    """
    config = parse_recipe({"data": {"dir": "-"}, "model": values}, where).model
    assert config is not None
    return config


def find_model(name: str) -> ModelConfig:
    """Return the config of a model specified by a name in `MODELS` or by a recipe file (.yaml).

    Raises:
        ConfigError: the name is unknown, or the recipe is invalid or does not specify a model.
    """
    name = OLD_NAMES.get(name, name)
    if name in MODELS:
        return config_of(MODELS[name], f"model {name}")
    if not name.endswith((".yaml", ".yml")):
        hint = nearest(name, MODELS) or f": use {', '.join(MODELS)}, or a RECIPE.yaml"
        raise ConfigError(f"model '{name}' is unknown{hint}")
    config = load_recipe(name).model
    if config is None:
        raise ConfigError(f"recipe {Path(name)} has no model: add a `model:` section")
    return config if config.vocab_size else config.model_copy(update={"vocab_size": _VOCAB_SIZE})

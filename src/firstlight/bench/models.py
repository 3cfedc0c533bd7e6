"""The models that benchmarks measure, by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from firstlight.errors import ConfigError, nearest
from firstlight.models import Model, ModelConfig, allocate, build_model
from firstlight.recipe import load_recipe, parse_recipe

#: The name of the small model of `--quick`.
SMALL = "small"


def gpt2(
    hidden_size: int, num_hidden_layers: int, num_attention_heads: int, vocab_size: int = 50257
) -> dict[str, Any]:
    """The `model` section of a GPT-2."""
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
    """The `model` section of a Llama."""
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


_UNTIED: dict[str, Any] = {
    "vocab_size": 4000,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
_ROPE: dict[str, Any] = {"rope_theta": 500000.0}
_LLAMA_3 = {**_ROPE, "vocab_size": 128256, "max_position_embeddings": 131072}
_LLAMA_110M = llama(768, 2048, 12, 12, 4, **_ROPE)

#: The `model` section of the models that a person can name.
MODELS: dict[str, dict[str, Any]] = {
    # A vocabulary that no power of two divides, as GPT-2's.
    SMALL: gpt2(256, 4, 4, 16001),
    "gpt2-124m": gpt2(768, 12, 12),
    "gpt2-350m": gpt2(1024, 24, 16),
    "gpt2-774m": gpt2(1280, 36, 20),
    "llama-110m": _LLAMA_110M,
    # The shape of Llama 3.2 1B.
    "llama-1b": llama(2048, 8192, 16, 32, 8, **_LLAMA_3),
}

#: Models of single benchmarks.
_MORE_MODELS: dict[str, dict[str, Any]] = {
    # Two layers, for dry runs.
    "tiny-gpt2": gpt2(96, 2, 4, 2000),
    "tiny-llama": llama(96, 256, 2, 4, 2, vocab_size=2000, max_position_embeddings=512),
    # Of `bench planner`'s memory.
    "gpt2 small": gpt2(128, 3, 4, 4000),
    "gpt2 medium": gpt2(256, 6, 8, 4000),
    "gpt2 large": gpt2(512, 4, 8, 4000),
    "llama small": llama(128, 384, 3, 4, 2, **_UNTIED),
    "llama medium": llama(256, 704, 6, 8, 4, **_UNTIED),
    "llama large": llama(512, 1408, 4, 8, 8, **_UNTIED),
    "gpt2-384": {**gpt2(384, 6, 6, 8192), "max_position_embeddings": 2048},
    "llama-384": llama(384, 1024, 6, 6, 2, vocab_size=8192),
    "llama-512": llama(512, 1536, 8, 8, 8, vocab_size=32000, tie_word_embeddings=False),
    "llama-400m": llama(1024, 3584, 24, 16, 8, **_ROPE, max_position_embeddings=8192),
    "llama-narrow": llama(384, 1024, 12, 6, 2, **_ROPE),
    "mistral-110m": {**_LLAMA_110M, "model_type": "mistral", "sliding_window": 1024},
    "qwen2-110m": {**_LLAMA_110M, "model_type": "qwen2"},
    "qwen3-110m": {**_LLAMA_110M, "model_type": "qwen3", "head_dim": 128},
    "mixtral-small": {
        "model_type": "mixtral",
        "vocab_size": 32000,
        "hidden_size": 768,
        "intermediate_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "max_position_embeddings": 2048,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
    # The shapes of Llama 3.2 3B and Llama 3.1 8B.
    "llama-3b": llama(3072, 8192, 28, 24, 8, **_LLAMA_3),
    "llama-8b": llama(4096, 14336, 32, 32, 8, **_LLAMA_3, tie_word_embeddings=False),
}

#: Vocabulary of a recipe's model that leaves it to the tokenizer: GPT-2's.
_VOCAB_SIZE = 50257


def model_values(name: str) -> dict[str, Any]:
    """The `model` section of a model of the benchmarks."""
    return dict(MODELS.get(name) or _MORE_MODELS[name])


def config_of(values: dict[str, Any], where: str = "the model") -> ModelConfig:
    """The model of a `model` section.

    Raises:
        ConfigError: the section is wrong.
    """
    config = parse_recipe({"data": {"dir": "-"}, "model": values}, where).model
    assert config is not None
    return config


def find_model(name: str) -> ModelConfig:
    """The model of a name in `MODELS`, or of a recipe file's `model` section.

    Raises:
        ConfigError: there is no such model, or the recipe is wrong or has none.
    """
    if name in MODELS:
        return config_of(MODELS[name], f"model {name}")
    if not name.endswith((".yaml", ".yml")):
        hint = nearest(name, MODELS) or f": use {', '.join(MODELS)}, or a RECIPE.yaml"
        raise ConfigError(f"model '{name}' is unknown{hint}")
    config = load_recipe(name).model
    if config is None:
        raise ConfigError(f"recipe {Path(name)} has no model: add a `model:` section")
    return config if config.vocab_size else config.model_copy(update={"vocab_size": _VOCAB_SIZE})


def random_model(config: ModelConfig, device: torch.device, vocab_multiple: int = 1) -> Model:
    """A model with random fp32 weights, made on the device: one of 8 billion parameters takes a
    second there, and nothing of the machine's own memory.
    """
    with torch.device("meta"):
        model = build_model(config, vocab_multiple)
    allocate(model, device)
    model.init_weights(torch.Generator(device).manual_seed(0))
    return model


def changed_recipe(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe's values with other ones set.

    Args:
        values: nested values of a recipe.
        changes: values by `section.key`, or whole sections.
    """
    result = dict(values)
    for key, value in changes.items():
        section, _, name = key.partition(".")
        result[section] = {**result.get(section, {}), name: value} if name else value
    return result

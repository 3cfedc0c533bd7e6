"""Model families: each one file, one config, one plain `nn.Module`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from firstlight.models.cache import Cache, KVCache, RaggedCache
from firstlight.models.gpt2 import GPT2, GPT2Config
from firstlight.models.llama import Llama
from firstlight.models.llama_config import LlamaConfig, MoEConfig

__all__ = [
    "FAMILIES",
    "GPT2",
    "Cache",
    "Family",
    "GPT2Config",
    "KVCache",
    "Llama",
    "LlamaConfig",
    "MoEConfig",
    "Model",
    "ModelConfig",
    "RaggedCache",
    "allocate",
    "build_model",
    "empty_model",
    "padded_vocab_size",
]

Model = GPT2 | Llama
ModelConfig = GPT2Config | LlamaConfig | MoEConfig


@dataclass(frozen=True)
class Family:
    """A family's config class and model class."""

    config: type[GPT2Config] | type[LlamaConfig] | type[MoEConfig]
    model: type[GPT2] | type[Llama]


#: `model_type` of config.json -> family
FAMILIES: dict[str, Family] = {
    "gpt2": Family(GPT2Config, GPT2),
    "llama": Family(LlamaConfig, Llama),
    "mistral": Family(LlamaConfig, Llama),
    "qwen2": Family(LlamaConfig, Llama),
    "qwen3": Family(LlamaConfig, Llama),
    "mixtral": Family(MoEConfig, Llama),
    "qwen3_moe": Family(MoEConfig, Llama),
}


def build_model(config: ModelConfig, vocab_multiple: int = 1) -> Model:
    """The model of a config, on torch's current default device, not initialised.

    Args:
        config: its shape.
        vocab_multiple: the embedding's and the head's rows are padded to a multiple of this.
    """
    rows = padded_vocab_size(config.vocab_size, vocab_multiple)
    if isinstance(config, GPT2Config):
        return GPT2(config, rows)
    return Llama(config, rows)


def padded_vocab_size(vocab_size: int, multiple: int) -> int:
    """The next multiple of `multiple` from `vocab_size` up."""
    return -(-vocab_size // multiple) * multiple


def empty_model(config: ModelConfig, vocab_multiple: int = 1) -> Model:
    """The model of a config with memory for its parameters (on the CPU) but no values in it:
    to be initialised or loaded, without paying for torch's default initialisation first."""
    with torch.device("meta"):
        model = build_model(config, vocab_multiple)
    allocate(model, torch.device("cpu"))
    return model


@torch.no_grad()
def allocate(model: Model, device: torch.device) -> None:
    """Give a model on the meta device memory, without values but for the rows that pad its
    vocabulary: they are zero, for what they hold would reach the gradients."""
    model.to_empty(device=device)
    model.finish_loading()
    embedding = model.transformer.wte if isinstance(model, GPT2) else model.model.embed_tokens
    for weight in (embedding.weight, model.lm_head.weight):
        weight[model.config.vocab_size :].zero_()

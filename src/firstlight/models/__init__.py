"""Model families: each one file, one config, one plain `nn.Module`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from firstlight.models.gpt2 import GPT2, GPT2Config
from firstlight.models.llama import Llama, LlamaConfig

__all__ = [
    "FAMILIES",
    "GPT2",
    "Family",
    "GPT2Config",
    "Llama",
    "LlamaConfig",
    "Model",
    "ModelConfig",
    "build_model",
    "empty_model",
]

Model = GPT2 | Llama
ModelConfig = GPT2Config | LlamaConfig


@dataclass(frozen=True)
class Family:
    """A family's config class and model class."""

    config: type[GPT2Config] | type[LlamaConfig]
    model: type[GPT2] | type[Llama]


#: `model_type` of config.json -> family
FAMILIES: dict[str, Family] = {
    "gpt2": Family(GPT2Config, GPT2),
    "llama": Family(LlamaConfig, Llama),
}


def build_model(config: ModelConfig) -> Model:
    """The model of a config, on torch's current default device, not initialised."""
    if isinstance(config, GPT2Config):
        return GPT2(config)
    return Llama(config)


def empty_model(config: ModelConfig) -> Model:
    """The model of a config with memory for its parameters (on the CPU) but no values in it:
    to be initialised or loaded, without paying for torch's default initialisation first."""
    with torch.device("meta"):
        model = build_model(config)
    model.to_empty(device="cpu")
    model.finish_loading()
    return model

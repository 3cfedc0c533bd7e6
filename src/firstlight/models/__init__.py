"""Model families: their config classes, their models (plain `nn.Module`s), and `FAMILIES`, the
table that lists all of them.

Families that use `LlamaConfig` are defined in `llama_families.py`. If the layers of such a family
differ from the layers of `Llama`, its model class is in `llama_variants.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from firstlight.models.cache import Cache, KVCache, RaggedCache
from firstlight.models.deepseek import Deepseek, DeepseekConfig
from firstlight.models.family import FamilySpec
from firstlight.models.gpt2 import GPT2, GPT2Config
from firstlight.models.gpt_neox import GPTNeoX, GPTNeoXConfig
from firstlight.models.gpt_oss import GptOss, GptOssConfig
from firstlight.models.lfm2 import Lfm2, Lfm2Config
from firstlight.models.llama import Llama
from firstlight.models.llama_config import LlamaConfig
from firstlight.models.llama_variants import VARIANTS
from firstlight.models.mixtral import Mixtral, MoEConfig
from firstlight.models.nanochat import NanoChat, NanoChatConfig
from firstlight.models.qwen3_next import (
    Qwen3Next,
    Qwen3NextConfig,
    Qwen35,
    Qwen35Config,
    Qwen35MoEConfig,
)

__all__ = [
    "DEFAULT_FAMILY",
    "FAMILIES",
    "GPT2",
    "Cache",
    "Deepseek",
    "DeepseekConfig",
    "Family",
    "GPT2Config",
    "GPTNeoX",
    "GPTNeoXConfig",
    "GptOss",
    "GptOssConfig",
    "KVCache",
    "Lfm2",
    "Lfm2Config",
    "Llama",
    "LlamaConfig",
    "Mixtral",
    "MoEConfig",
    "Model",
    "ModelConfig",
    "NanoChat",
    "NanoChatConfig",
    "Qwen3Next",
    "Qwen3NextConfig",
    "Qwen35",
    "Qwen35Config",
    "Qwen35MoEConfig",
    "RaggedCache",
    "allocate",
    "build_model",
    "empty_model",
    "families_with",
    "padded_vocab_size",
]

Model = GPT2 | Llama
ModelConfig = (
    GPT2Config
    | LlamaConfig
    | MoEConfig
    | GPTNeoXConfig
    | NanoChatConfig
    | GptOssConfig
    | DeepseekConfig
    | Qwen3NextConfig
    | Qwen35Config
    | Qwen35MoEConfig
    | Lfm2Config
)


@dataclass(frozen=True)
class Family:
    """The config class, the model class and the specification of a model family."""

    config: type[ModelConfig]
    model: type[GPT2] | type[Llama]
    spec: FamilySpec


#: Config classes and their model classes. `VARIANTS` replaces the model class of some families.
_CLASSES: tuple[tuple[type[ModelConfig], type[GPT2] | type[Llama]], ...] = (
    (GPT2Config, GPT2),
    (LlamaConfig, Llama),
    (MoEConfig, Mixtral),
    (GPTNeoXConfig, GPTNeoX),
    (NanoChatConfig, NanoChat),
    (GptOssConfig, GptOss),
    (DeepseekConfig, Deepseek),
    (Qwen3NextConfig, Qwen3Next),
    (Qwen35Config, Qwen35),
    (Qwen35MoEConfig, Qwen35),
    (Lfm2Config, Lfm2),
)

#: Families, keyed by the `model_type` in config.json.
FAMILIES: dict[str, Family] = {
    name: Family(config, VARIANTS.get(name, model), spec)
    for config, model in _CLASSES
    for name, spec in config.families.items()
}

#: Default `model_type` of a recipe.
DEFAULT_FAMILY = LlamaConfig.default_type()


def families_with(has: Callable[[Family], object]) -> str:
    """Return the names of all families for which `has` returns a true value, as a phrase such as
    "llama, qwen2 and phi3"."""
    *others, last = (name for name, family in FAMILIES.items() if has(family))
    return f"{', '.join(others)} and {last}"


def build_model(config: ModelConfig, vocab_multiple: int = 1) -> Model:
    """Create a model from its config on torch's current default device. The parameters are not
    initialised.

    Args:
        config: config of the model.
        vocab_multiple: the embedding and the head are padded so that their number of rows is a
            multiple of this number.
    """
    rows = padded_vocab_size(config.vocab_size, vocab_multiple)
    return FAMILIES[config.model_type].model(config, rows)  # type: ignore[arg-type]


def padded_vocab_size(vocab_size: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `vocab_size`."""
    return -(-vocab_size // multiple) * multiple


def empty_model(config: ModelConfig, vocab_multiple: int = 1) -> Model:
    """Create a model from its config on the CPU. Memory is allocated for the parameters, but the
    parameters are not initialised.

    This skips torch's default initialisation, which takes time. The caller must initialise the
    parameters or load their values. See `build_model` for the arguments.
    """
    with torch.device("meta"):
        model = build_model(config, vocab_multiple)
    allocate(model, torch.device("cpu"))
    return model


@torch.no_grad()
def allocate(model: Model, device: torch.device) -> None:
    """Allocate memory on `device` for the parameters of a model on the meta device.

    The parameters are left uninitialised, except for the padding rows beyond the vocabulary. These
    rows are set to zero, because arbitrary values in them would affect the gradients.
    """
    model.to_empty(device=device)
    model.finish_loading()
    for weight in (model.embedding.weight, model.lm_head.weight):
        weight[model.config.vocab_size :].zero_()

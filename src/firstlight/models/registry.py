"""The table of model families: config class, model class and facts of each family.

The entries of Llama-like families are in `llama_families.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from firstlight.models.deepseek import Deepseek
from firstlight.models.deepseek_config import DeepseekConfig
from firstlight.models.family import FamilySpec
from firstlight.models.gpt2 import GPT2, GPT2Config
from firstlight.models.gpt_neox import GPTNeoX, GPTNeoXConfig
from firstlight.models.gpt_oss import GptOss, GptOssConfig
from firstlight.models.llama import Llama
from firstlight.models.llama_config import LlamaConfig, MoEConfig
from firstlight.models.nanochat import NanoChat, NanoChatConfig
from firstlight.models.qwen3_next import Qwen3Next
from firstlight.models.qwen3_next_config import Qwen3NextConfig

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
)


@dataclass(frozen=True)
class Family:
    """A family's config class, model class and facts."""

    config: type[ModelConfig]
    model: type[GPT2] | type[Llama]
    spec: FamilySpec


#: `model_type` of config.json -> family
FAMILIES: dict[str, Family] = {
    "gpt2": Family(GPT2Config, GPT2, GPT2Config.families["gpt2"]),
    **{name: Family(LlamaConfig, Llama, spec) for name, spec in LlamaConfig.families.items()},
    **{name: Family(MoEConfig, Llama, spec) for name, spec in MoEConfig.families.items()},
    **{name: Family(GPTNeoXConfig, GPTNeoX, s) for name, s in GPTNeoXConfig.families.items()},
    **{name: Family(NanoChatConfig, NanoChat, s) for name, s in NanoChatConfig.families.items()},
    **{name: Family(GptOssConfig, GptOss, spec) for name, spec in GptOssConfig.families.items()},
    **{name: Family(DeepseekConfig, Deepseek, s) for name, s in DeepseekConfig.families.items()},
    **{name: Family(Qwen3NextConfig, Qwen3Next, s) for name, s in Qwen3NextConfig.families.items()},
}

#: `model_type` of a recipe that does not give it.
DEFAULT_FAMILY = LlamaConfig.default_type()


def families_with(has: Callable[[Family], object]) -> str:
    """Names of the families for which `has` is true, as in a sentence: "llama, qwen2 and phi3"."""
    *others, last = (name for name, family in FAMILIES.items() if has(family))
    return f"{', '.join(others)} and {last}"


def build_model(config: ModelConfig, vocab_multiple: int = 1) -> Model:
    """Create the model of a config on torch's current default device, not initialised.

    Args:
        config: the model's config.
        vocab_multiple: the rows of embedding and head are padded to a multiple of this number.
    """
    rows = padded_vocab_size(config.vocab_size, vocab_multiple)
    return FAMILIES[config.model_type].model(config, rows)  # type: ignore[arg-type]


def padded_vocab_size(vocab_size: int, multiple: int) -> int:
    """The least multiple of `multiple` that is at least `vocab_size`."""
    return -(-vocab_size // multiple) * multiple


def empty_model(config: ModelConfig, vocab_multiple: int = 1) -> Model:
    """Create the model of a config on the CPU with allocated parameters that have no values yet, so
    that torch's default initialisation takes no time. The caller initialises or loads them.

    Arguments as in `build_model`.
    """
    with torch.device("meta"):
        model = build_model(config, vocab_multiple)
    allocate(model, torch.device("cpu"))
    return model


@torch.no_grad()
def allocate(model: Model, device: torch.device) -> None:
    """Allocate the parameters of a model that is on the meta device. Values are not set, except for
    the rows beyond the vocabulary, which are zero: random values there would reach the
    gradients."""
    model.to_empty(device=device)
    model.finish_loading()
    for weight in (model.embedding.weight, model.lm_head.weight):
        weight[model.config.vocab_size :].zero_()

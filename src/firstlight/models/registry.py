"""The table of model families: the config class, the model class and the facts of each."""

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

#: The family of a recipe that names none.
DEFAULT_FAMILY = LlamaConfig.default_type()


def families_with(has: Callable[[Family], object]) -> str:
    """The families that have something, for a sentence: "llama and qwen2"."""
    *others, last = (name for name, family in FAMILIES.items() if has(family))
    return f"{', '.join(others)} and {last}"


def build_model(config: ModelConfig, vocab_multiple: int = 1) -> Model:
    """The model of a config, on torch's current default device, not initialised.

    Args:
        config: its shape.
        vocab_multiple: the embedding's and the head's rows are padded to a multiple of this.
    """
    rows = padded_vocab_size(config.vocab_size, vocab_multiple)
    return FAMILIES[config.model_type].model(config, rows)  # type: ignore[arg-type]


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
    """Allocate memory for a model on the meta device. Values are not set, except for the rows that
    pad its vocabulary: they are zero, because their values would reach the gradients."""
    model.to_empty(device=device)
    model.finish_loading()
    for weight in (model.embedding.weight, model.lm_head.weight):
        weight[model.config.vocab_size :].zero_()

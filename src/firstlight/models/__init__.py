"""Model families: config classes, models (plain `nn.Module`s), and the table of both."""

from __future__ import annotations

from firstlight.models.cache import Cache, KVCache, RaggedCache
from firstlight.models.deepseek import Deepseek
from firstlight.models.deepseek_config import DeepseekConfig
from firstlight.models.gpt2 import GPT2, GPT2Config
from firstlight.models.gpt_neox import GPTNeoX, GPTNeoXConfig
from firstlight.models.gpt_oss import GptOss, GptOssConfig
from firstlight.models.llama import Llama
from firstlight.models.llama_config import LlamaConfig, MoEConfig
from firstlight.models.nanochat import NanoChat, NanoChatConfig
from firstlight.models.qwen3_next import Qwen3Next
from firstlight.models.qwen3_next_config import Qwen3NextConfig
from firstlight.models.registry import (
    DEFAULT_FAMILY,
    FAMILIES,
    Family,
    Model,
    ModelConfig,
    allocate,
    build_model,
    empty_model,
    families_with,
    padded_vocab_size,
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
    "Llama",
    "LlamaConfig",
    "MoEConfig",
    "Model",
    "ModelConfig",
    "NanoChat",
    "NanoChatConfig",
    "Qwen3Next",
    "Qwen3NextConfig",
    "RaggedCache",
    "allocate",
    "build_model",
    "empty_model",
    "families_with",
    "padded_vocab_size",
]

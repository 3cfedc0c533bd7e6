"""A small model of each family, with sizes for which a GPU's fused kernels are used."""

from __future__ import annotations

from typing import Any

from firstlight.models import FAMILIES, GPT2Config, ModelConfig

TOKENS = 96

#: Sizes for which a GPU's fused kernels are used: head dimension 64, experts of a multiple of 16.
_SIZES: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": TOKENS,
}
_GROUPED: dict[str, Any] = {
    **_SIZES,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 320,
    "tie_word_embeddings": False,
}
#: All experts for each token, because the visited expert may depend on rounding.
_EXPERTS: dict[str, Any] = {**_GROUPED, "num_experts": 4, "num_experts_per_tok": 4}
#: Settings of a family in addition to these sizes.
_OWN_KEYS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 40},
    "granite": {
        "embedding_multiplier": 6.0,
        "attention_multiplier": 0.05,
        "residual_multiplier": 0.5,
        "logits_scaling": 3.0,
    },
    "qwen3_moe": {"moe_intermediate_size": 96},
    "gpt_neox": {"num_key_value_heads": 4},
    "deepseek_v2": {"num_key_value_heads": 4},
    "deepseek_v3": {"num_key_value_heads": 4},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "qwen3_5_moe_text": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"]},
}


def usual_config(family: str) -> ModelConfig:
    """Return the config of a family's model with these sizes."""
    own = _OWN_KEYS.get(family, {})
    kind = FAMILIES[family].config
    if kind is GPT2Config:
        return GPT2Config(**_SIZES, **own)
    sizes = _EXPERTS if "num_experts" in kind.model_fields else _GROUPED
    return kind.model_validate({**sizes, **own, "model_type": family})

"""The Llama-like families: what differs between them, an entry each.

`LlamaConfig` is the config class of the dense ones, `MoEConfig` of those with experts.
"""

from __future__ import annotations

from typing import Any

from firstlight.models.family import ExpertNames, FamilySpec, GGUFSpec

#: What Hugging Face's config classes take for a key that config.json leaves out, where it is not
#: what a recipe's default is. A family's own values stand in its entry.
HF_DEFAULTS: dict[str, Any] = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-6,
}

_NO_BIAS = ("attention_bias", (False,), False)
_ALL_ROPE = ("default", "linear", "llama3")

#: Granite's keys.
MULTIPLIERS = (
    "embedding_multiplier",
    "attention_multiplier",
    "residual_multiplier",
    "logits_scaling",
)

DENSE: dict[str, FamilySpec] = {
    "llama": FamilySpec(
        "LlamaForCausalLM",
        GGUFSpec("llama", rotates_pairs=True, rope_kinds=_ALL_ROPE),
        own_keys=("attention_bias", "mlp_bias"),
        hf_defaults={
            "vocab_size": 32000,
            "intermediate_size": 11008,
            "max_position_embeddings": 2048,
        },
    ),
    "mistral": FamilySpec(
        "MistralForCausalLM",
        GGUFSpec("llama", rotates_pairs=True, rope_kinds=_ALL_ROPE),
        own_keys=("sliding_window",),
        hf_defaults={
            "vocab_size": 32000,
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
        },
    ),
    "qwen2": FamilySpec(
        "Qwen2ForCausalLM",
        GGUFSpec("qwen2"),
        own_keys=("sliding_window", "max_window_layers"),
        hf_defaults={
            "vocab_size": 151936,
            "intermediate_size": 22016,
            "num_key_value_heads": 32,
            "max_position_embeddings": 32768,
        },
        qkv_bias=True,
        has_window_switch=True,
        tokenizer_split="qwen2",
    ),
    "qwen3": FamilySpec(
        "Qwen3ForCausalLM",
        GGUFSpec("qwen3", fixed=(_NO_BIAS,)),
        own_keys=("attention_bias", "sliding_window", "max_window_layers"),
        hf_defaults={
            "vocab_size": 151936,
            "intermediate_size": 22016,
            "num_key_value_heads": 32,
            "head_dim": 128,
            "max_position_embeddings": 32768,
        },
        qk_norm=True,
        has_window_switch=True,
    ),
    "granite": FamilySpec(
        "GraniteForCausalLM",
        GGUFSpec(
            "granite",
            rotates_pairs=True,
            numbers={
                "embedding_multiplier": "embedding_scale",
                "attention_multiplier": "attention.scale",
                "residual_multiplier": "residual_scale",
                "logits_scaling": "logit_scale",
            },
        ),
        own_keys=("attention_bias", "mlp_bias", *MULTIPLIERS),
        hf_defaults={
            "vocab_size": 32000,
            "intermediate_size": 11008,
            "max_position_embeddings": 2048,
            "attention_multiplier": 1.0,
        },
    ),
}

ROUTED: dict[str, FamilySpec] = {
    "mixtral": FamilySpec(
        "MixtralForCausalLM",
        GGUFSpec("llama", rotates_pairs=True, rope_kinds=_ALL_ROPE),
        own_keys=("sliding_window",),
        hf_defaults={
            "vocab_size": 32000,
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "router_aux_loss_coef": 0.001,
        },
        experts=ExpertNames(
            gate="block_sparse_moe.experts.{}.w1.weight",
            up="block_sparse_moe.experts.{}.w3.weight",
            down="block_sparse_moe.experts.{}.w2.weight",
            router="block_sparse_moe.gate.weight",
            size="intermediate_size",
        ),
    ),
    "qwen3_moe": FamilySpec(
        "Qwen3MoeForCausalLM",
        GGUFSpec(
            "qwen3moe",
            fixed=(
                _NO_BIAS,
                ("norm_topk_prob", (True,), False),
                ("decoder_sparse_step", (1,), 1),
                ("mlp_only_layers", ([], None), None),
            ),
        ),
        own_keys=("attention_bias", "sliding_window"),
        hf_defaults={
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 24,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
            "router_aux_loss_coef": 0.001,
        },
        qk_norm=True,
        has_window_switch=True,
        experts=ExpertNames(
            gate="mlp.experts.{}.gate_proj.weight",
            up="mlp.experts.{}.up_proj.weight",
            down="mlp.experts.{}.down_proj.weight",
            router="mlp.gate.weight",
            size="moe_intermediate_size",
        ),
    ),
}

#: Keys that not all families have.
OWN_KEYS: frozenset[str] = frozenset(
    key for spec in (DENSE | ROUTED).values() for key in spec.own_keys
)

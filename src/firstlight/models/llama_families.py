"""Specifications of the dense Llama-like families, which use `LlamaConfig`.

To add a family, add an entry to `DENSE`. If the layers of the family differ from Llama's layers,
the family also needs a model class in `llama_variants.py`. Families with experts are defined in
`mixtral.py`.
"""

from __future__ import annotations

from typing import Any

from firstlight.models.family import (
    BlockNorms,
    FamilySpec,
    GGUFSpec,
    RopeSpec,
    hf_values,
)

NO_BIAS = {"attention_bias": (False,)}
_NO_BIASES = {**NO_BIAS, "mlp_bias": (False,)}
_CAP = {"final_logit_softcapping": "final_logit_softcapping"}
YARN_ROPE = ("default", "linear", "yarn")
ALL_ROPE = (*YARN_ROPE, "llama3")

#: Keys that are specific to Granite.
MULTIPLIERS = (
    "embedding_multiplier",
    "attention_multiplier",
    "residual_multiplier",
    "logits_scaling",
)

# Default sizes shared by several Hugging Face config classes. Sizes that are not listed here are
# derived from other keys.
_SIZES_OF_LLAMA: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}
SIZES_OF_MISTRAL: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}
_SIZES_OF_QWEN: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
}
_SIZES_OF_OLMO: dict[str, Any] = {
    "vocab_size": 50304,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}
_KEYS_OF_GEMMA: dict[str, Any] = {
    "head_dim": 256,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True,
}

_OLMO_NORMS = BlockNorms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
_GEMMA_NORMS = BlockNorms(
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
_WIDE_QK_NORM = "queries and keys are normalised over all heads together"

DENSE: dict[str, FamilySpec] = {
    "llama": FamilySpec(
        "LlamaForCausalLM",
        GGUFSpec("llama", rotates_pairs=True, rope_kinds=ALL_ROPE),
        own_keys=("attention_bias", "mlp_bias"),
        hf_defaults=hf_values(**_SIZES_OF_LLAMA),
        divides_width=True,
    ),
    "mistral": FamilySpec(
        "MistralForCausalLM",
        GGUFSpec("llama", rotates_pairs=True, rope_kinds=ALL_ROPE),
        own_keys=("sliding_window",),
        hf_defaults=hf_values(**SIZES_OF_MISTRAL, sliding_window=4096),
        composites=("mistral3",),
    ),
    "ministral3": FamilySpec(
        "Ministral3ForCausalLM",
        GGUFSpec(
            "mistral3",
            rotates_pairs=True,
            rope_kinds=YARN_ROPE,
            fixed={"sliding_window": (None,)},
            numbers={"llama_4_scaling_beta": "attention.temperature_scale"},
            optional=("llama_4_scaling_beta",),
        ),
        own_keys=("sliding_window", "llama_4_scaling_beta"),
        hf_defaults=hf_values(
            **SIZES_OF_MISTRAL
            | {
                "vocab_size": 131072,
                "num_hidden_layers": 34,
                "head_dim": 128,
                "max_position_embeddings": 262144,
                "rms_norm_eps": 1e-5,
            },
        ),
        rope=RopeSpec(
            default={
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 16.0,
                "original_max_position_embeddings": 16384,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale_all_dim": 1.0,
                "mscale": 1.0,
                "llama_4_scaling_beta": 0.1,
            }
        ),
        requires_known_keys=True,
        composites=("mistral3",),
    ),
    "qwen2": FamilySpec(
        "Qwen2ForCausalLM",
        GGUFSpec("qwen2", rope_kinds=YARN_ROPE),
        own_keys=("sliding_window", "max_window_layers", "layer_types"),
        hf_defaults=hf_values(**_SIZES_OF_QWEN),
        qkv_bias=True,
        has_window_switch=True,
        tokenizer_split="qwen2",
    ),
    "qwen3": FamilySpec(
        "Qwen3ForCausalLM",
        GGUFSpec("qwen3", rope_kinds=YARN_ROPE, fixed=NO_BIAS),
        own_keys=("attention_bias", "sliding_window", "max_window_layers", "layer_types"),
        hf_defaults=hf_values(**_SIZES_OF_QWEN, head_dim=128),
        qk_norm="head",
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
        hf_defaults=hf_values(**_SIZES_OF_LLAMA, attention_multiplier=1.0),
    ),
    "smollm3": FamilySpec(
        "SmolLM3ForCausalLM",
        GGUFSpec("smollm3", rotates_pairs=True, fixed=_NO_BIASES),
        own_keys=(
            "attention_bias",
            "mlp_bias",
            "sliding_window",
            "layer_types",
            "no_rope_layers",
        ),
        hf_defaults=hf_values(
            vocab_size=128256,
            hidden_size=2048,
            intermediate_size=11008,
            num_hidden_layers=36,
            num_attention_heads=16,
            num_key_value_heads=4,
            max_position_embeddings=32768,
            rope_theta=2e6,
            sliding_window=None,
            tie_word_embeddings=True,
        ),
        has_window_switch=True,
        no_rope_every=4,
    ),
    "phi3": FamilySpec(
        "Phi3ForCausalLM",
        GGUFSpec("phi3", rope_kinds=("default", "longrope"), exact_heads=True),
        own_keys=("sliding_window", "partial_rotary_factor"),
        hf_defaults=hf_values(
            vocab_size=32064,
            hidden_size=3072,
            intermediate_size=8192,
            num_hidden_layers=32,
            num_attention_heads=32,
            max_position_embeddings=4096,
            rms_norm_eps=1e-5,
            sliding_window=None,
        ),
        fused=True,
        rope=RopeSpec(
            kinds=("longrope",),
            other_kinds={"su": "longrope", "yarn": "longrope"},
            original_positions=4096,
        ),
        indivisible="one matrix holds queries, keys and values",
    ),
    "olmo2": FamilySpec(
        "Olmo2ForCausalLM",
        GGUFSpec("olmo2", fixed=NO_BIAS, head="written", exact_heads=True),
        own_keys=("attention_bias",),
        hf_defaults=hf_values(**_SIZES_OF_OLMO, rms_norm_eps=1e-5),
        qk_norm="width",
        norms=_OLMO_NORMS,
        indivisible=_WIDE_QK_NORM,
    ),
    "olmo3": FamilySpec(
        "Olmo3ForCausalLM",
        GGUFSpec("olmo2", fixed=NO_BIAS, head="written", has_windows=True, exact_heads=True),
        own_keys=("attention_bias", "sliding_window", "layer_types", "rope_local_base_freq"),
        hf_defaults=hf_values(
            **_SIZES_OF_OLMO,
            rms_norm_eps=1e-5,
            sliding_window=4096,
            rope_theta=5e5,
            rope_local_base_freq=5e5,
        ),
        qk_norm="width",
        norms=_OLMO_NORMS,
        rope=RopeSpec(nested=True),
        full_attention_every=4,
        indivisible=_WIDE_QK_NORM,
    ),
    "arcee": FamilySpec(
        "ArceeForCausalLM",
        GGUFSpec("arcee", rotates_pairs=True, rope_kinds=ALL_ROPE, fixed=_NO_BIASES),
        own_keys=("attention_bias", "mlp_bias"),
        hf_defaults=hf_values(
            vocab_size=32000,
            hidden_size=2560,
            intermediate_size=18432,
            num_hidden_layers=32,
            num_attention_heads=32,
            max_position_embeddings=4096,
            rms_norm_eps=1e-5,
        ),
        activation="relu2",
        gated=False,
        divides_width=True,
    ),
    "glm4": FamilySpec(
        "Glm4ForCausalLM",
        GGUFSpec("glm4"),
        own_keys=("attention_bias", "partial_rotary_factor"),
        hf_defaults=hf_values(
            vocab_size=151552,
            hidden_size=4096,
            intermediate_size=13696,
            num_hidden_layers=40,
            num_attention_heads=32,
            num_key_value_heads=2,
            max_position_embeddings=131072,
            rms_norm_eps=1.5625e-7,
            head_dim=128,
            attention_bias=True,
        ),
        output_bias=False,
        norms=BlockNorms(
            after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm"
        ),
        fused="mlp",
        rope=RopeSpec(partial_factor=0.5),
        indivisible="one matrix holds the MLP's gate and up projection",
    ),
    "gemma2": FamilySpec(
        "Gemma2ForCausalLM",
        GGUFSpec(
            "gemma2",
            fixed=NO_BIAS,
            numbers={**_CAP, "attn_logit_softcapping": "attn_logit_softcapping"},
            head="tied",
            has_windows=True,
            needs_window=True,
            wide_scale_layers=46,
        ),
        own_keys=(
            "attention_bias",
            "sliding_window",
            "layer_types",
            "query_pre_attn_scalar",
            "attn_logit_softcapping",
            "final_logit_softcapping",
        ),
        hf_defaults=hf_values(
            vocab_size=256000,
            hidden_size=2304,
            intermediate_size=9216,
            num_hidden_layers=26,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=8192,
            **_KEYS_OF_GEMMA,
            attn_logit_softcapping=50.0,
            final_logit_softcapping=30.0,
        ),
        norms=_GEMMA_NORMS,
        norm_kind="one_plus",
        activation="gelu_pytorch_tanh",
        activation_key="hidden_activation",
        full_attention_every=2,
        divides_width=True,
    ),
    "gemma3_text": FamilySpec(
        "Gemma3ForCausalLM",
        GGUFSpec(
            "gemma3",
            fixed=NO_BIAS,
            numbers=_CAP,
            optional=tuple(_CAP),
            has_windows=True,
            has_window_base=True,
            wide_scale_layers=62,
        ),
        own_keys=(
            "attention_bias",
            "sliding_window",
            "layer_types",
            "query_pre_attn_scalar",
            "final_logit_softcapping",
            "rope_local_base_freq",
        ),
        hf_defaults=hf_values(
            vocab_size=262208,
            hidden_size=2304,
            intermediate_size=9216,
            num_hidden_layers=26,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=131072,
            **_KEYS_OF_GEMMA,
            rope_theta=1e6,
            rope_local_base_freq=1e4,
        ),
        qk_norm="head",
        norms=_GEMMA_NORMS,
        norm_kind="one_plus",
        activation="gelu_pytorch_tanh",
        activation_key="hidden_activation",
        rope=RopeSpec(nested=True, local_theta_key="rope_local_base_freq"),
        full_attention_every=6,
        period_key="sliding_window_pattern",
        divides_width=True,
        composites=("gemma3",),
        other_keys={"attn_logit_softcapping": (None,)},
    ),
    "stablelm": FamilySpec(
        "StableLmForCausalLM",
        GGUFSpec("stablelm", head="written"),
        own_keys=(
            "attention_bias",
            "partial_rotary_factor",
            "qk_layernorm",
            "use_parallel_residual",
        ),
        json_names={"rms_norm_eps": "layer_norm_eps", "attention_bias": "use_qkv_bias"},
        hf_defaults=hf_values(
            vocab_size=50304,
            hidden_size=2560,
            intermediate_size=6912,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=32,
            max_position_embeddings=4096,
            rms_norm_eps=1e-5,
        ),
        output_bias=False,
        norm_kind="layer",
        rope=RopeSpec(partial_factor=0.25),
        divides_width=True,
        derived_keys=("head_dim",),
    ),
}

#: Keys that some families do not have.
OWN_KEYS: frozenset[str] = frozenset(key for spec in DENSE.values() for key in spec.own_keys)

#: Keys added after the first families. They are omitted when the config of a family without them is
#: dumped, so that the hashes of older configs stay valid.
LATER_KEYS: frozenset[str] = frozenset(
    (
        *MULTIPLIERS,
        "layer_types",
        "no_rope_layers",
        "partial_rotary_factor",
        "rope_local_base_freq",
        "query_pre_attn_scalar",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "llama_4_scaling_beta",
        "qk_layernorm",
        "use_parallel_residual",
    )
)

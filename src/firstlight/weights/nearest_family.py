"""The supported family that is nearest to a config.json of an unsupported one, for error messages.

Families are compared by the keys of their config.json, by their activation and by traits of the
architecture, such as experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from firstlight.models import FAMILIES

#: Keys of config.json that are not compared, since they say little about the architecture.
_NOT_OF_THE_ARCHITECTURE = frozenset(
    (
        "architectures",
        "auto_map",
        "model_type",
        "transformers_version",
        "name_or_path",
        "dtype",
        "torch_dtype",
        "use_cache",
        "pretraining_tp",
        "quantization_config",
        "initializer_range",
        "init_std",
        "initializer_factor",
        "rescale_prenorm_residual",
        "head_dim",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "sep_token_id",
        "id2label",
        "label2id",
        "num_labels",
        "problem_type",
        "classifier_dropout",
        "is_encoder_decoder",
        "is_decoder",
        "tie_encoder_decoder",
        "decoder_start_token_id",
        "chunk_size_feed_forward",
        "return_dict",
        "task_specific_params",
        "gradient_checkpointing",
        "scale_attn_weights",
        "reorder_and_upcast_attn",
        "scale_attn_by_inverse_layer_idx",
        "n_ctx",
        "sliding_window_pattern",
        "use_mamba_kernels",
        "use_mambapy",
        "attn_implementation",
        "model_max_length",
        "rotary_emb_base",
        "forced_eos_token_id",
        "forced_bos_token_id",
        "layerdrop",
        "use_bidirectional_attention",
        "router_jitter_noise",
        "input_jitter_noise",
    )
)
_NOT_OF_THE_ARCHITECTURE_ENDS = ("_token_id", "dropout", "_pdrop", "_dropout_prob", "loss_coef")
_NOT_OF_THE_ARCHITECTURE_STARTS = ("_", "output_", "summary_", "tie_", "num_logits_to_keep")

#: Other families' names of keys -> firstlight's.
_SAME_KEYS = {
    **dict.fromkeys(("n_embd", "d_model", "hidden_dim"), "hidden_size"),
    **dict.fromkeys(("n_layer", "n_layers", "num_layers"), "num_hidden_layers"),
    **dict.fromkeys(("n_head", "n_heads", "num_heads"), "num_attention_heads"),
    **dict.fromkeys(("num_kv_heads", "n_head_kv"), "num_key_value_heads"),
    **dict.fromkeys(("n_positions", "max_seq_len"), "max_position_embeddings"),
    **dict.fromkeys(("n_inner", "d_ff", "ffn_dim", "ffn_hidden_size"), "intermediate_size"),
    **dict.fromkeys(("activation_function", "activation", "hidden_activation"), "hidden_act"),
    **dict.fromkeys(("layer_norm_epsilon", "norm_epsilon", "norm_eps"), "layer_norm_eps"),
    **dict.fromkeys(("conv_kernel", "d_conv", "mamba_d_conv"), "linear_conv_kernel_dim"),
    **dict.fromkeys(("rotary_pct", "partial_rotary_factor"), "partial_rotary_factor"),
    **dict.fromkeys(("num_local_experts", "n_routed_experts", "moe_num_experts"), "num_experts"),
    **dict.fromkeys(("moe_k", "moe_topk", "num_experts_per_token"), "num_experts_per_tok"),
    "parallel_attn": "use_parallel_residual",
    # MiniCPM computes Granite's multipliers from these.
    "scale_emb": "embedding_multiplier",
    "scale_depth": "residual_multiplier",
    "dim_model_base": "logits_scaling",
}
#: Keys of a norm's epsilon: of RMSNorm in families with the activation SiLU, else of LayerNorm.
_EITHER_NORM = ("layer_norm_epsilon", "norm_epsilon", "norm_eps")

_STATE = "a state in place of attention"
#: Trait of an architecture -> (beginnings of the keys that show it, its weight in comparisons).
_TRAITS = {
    "experts": (("num_experts", "moe_", "expert"), 2),
    _STATE: (
        ("linear_", "ssm_", "state_size", "mamba_", "conv_", "conv1d", "lru_", "rwkv"),
        3,
    ),
    "latent attention": (("kv_lora_rank",), 2),
    "rotary positions": (("rope_", "rotary_", "partial_rotary"), 1),
    "LayerNorm": (("layer_norm_eps",), 1),
}

#: Number of different keys that count as much as a difference in one trait of weight 1.
_TRAIT_KEYS = 6
#: Maximum number of keys in a message.
_SHOWN = 8


def nearest_family(content: Mapping[str, Any]) -> str:
    """The supported family with the most similar config.json, and the differences from it.

    Args:
        content: the object in config.json.

    Returns:
        The end of a sentence, such as ": the nearest is llama, which has no clip_qkv"; "" if no
        key is shared with the nearest family.
    """
    text = content.get("text_config")
    asked = text if isinstance(text, Mapping) else content
    keys, kind = _keys_of(asked), str(asked.get("model_type"))
    if kind in FAMILIES and asked is text:
        return f": its text_config is a {kind}, and its other parts are not read"
    found: list[tuple[int, str]] = []
    for name, family in FAMILIES.items():
        known = family.config.from_hf({"model_type": name}).to_hf()
        # Models with a recurrent state are only compared with each other: a config.json of few
        # keys would otherwise seem near to any family.
        if (_STATE in _traits(asked)) != (_STATE in _traits(known)):
            continue
        has, all_keys = _keys_of(known), _all_keys_of(known)
        apart = sum(
            weight * (2 if trait in _traits(asked) else 1)
            for trait, (_, weight) in _TRAITS.items()
            if trait in _traits(asked) ^ _traits(known)
        )
        apart += _act_of(asked) not in (None, _act_of(known))
        alike = len(keys & has) - len(has - keys) - len(keys - all_keys)
        found.append((alike - _TRAIT_KEYS * apart, name))
    _, name = max(found, key=lambda one: one[0])
    known = FAMILIES[name].config.from_hf({"model_type": name}).to_hf()
    all_keys = _all_keys_of(known)
    if not keys & all_keys:
        return ""
    lacks = sorted(key for key in _with_rope(asked) if _our_name(key, asked) in keys - all_keys)
    differs = [f"has no {_listed(lacks)}"] if lacks else []
    act = _act_of(known)
    if _act_of(asked) not in (None, act):
        differs.append(f"has hidden_act {act!r} in place of {_act_of(asked)!r}")
    more_traits = sorted(_traits(known) - _traits(asked))
    if "rms_norm_eps" not in asked:
        # OPT and others have LayerNorm without a key for its epsilon.
        more_traits = [trait for trait in more_traits if trait != "LayerNorm"]
    differs += [f"has {', '.join(more_traits)}"] if more_traits else []
    own = "; of its parts only the text_config was compared" if asked is text else ""
    said = " and ".join(differs) or _small_differences(asked, name, known)
    return f": the nearest is {name}, which {said}{own}{_no_decoder(content)}"


def _small_differences(asked: Mapping[str, Any], name: str, known: Mapping[str, Any]) -> str:
    """The differences from a family whose config.json has all keys of `asked` with a value, as the
    end of a sentence.

    Args:
        asked: the object in config.json.
        name: the family.
        known: a config.json of the family.
    """
    all_keys = _all_keys_of(known)
    # Keys that are null or false by default, such as OLMo's clip_qkv and SeedOSS'
    # attention_out_bias, still show that the classes differ.
    unset = sorted(
        key
        for key in asked
        if _is_of_the_architecture(key) and _our_name(key, asked) not in all_keys
    )
    if unset:
        return f"has no {_listed(unset)} (off here) and another class"
    shared = _keys_of(asked) & all_keys
    renamed = sorted(key for key in asked if key not in known and _our_name(key, asked) in shared)
    others = f", other names for {_listed(renamed)}," if renamed else ""
    return f"has the same keys in config.json{others} and another class"


def _listed(names: list[str]) -> str:
    """The first `_SHOWN` names, and the number of the remaining ones."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"


def _our_name(key: str, config: Mapping[str, Any]) -> str:
    """firstlight's name of a key of config.json."""
    # In EXAONE 3 and Mamba, the epsilon of RMSNorm has the usual name of LayerNorm's.
    if key in _EITHER_NORM and _act_of(config) == "silu":
        return "rms_norm_eps"
    return _SAME_KEYS.get(key, key)


def _act_of(config: Mapping[str, Any]) -> str | None:
    """The activation that a config.json names (variants under one name); None if it names none."""
    for key, value in config.items():
        if _SAME_KEYS.get(key, key) == "hidden_act" and isinstance(value, str):
            return {"swish": "silu", "gelu_pytorch_tanh": "gelu", "gelu_new": "gelu"}.get(
                value, value
            )
    return None


def _keys_of(config: Mapping[str, Any]) -> set[str]:
    """The keys that describe the architecture, under firstlight's names. A key whose value is
    false, 0, null or empty counts as missing."""
    return {
        _our_name(key, config)
        for key, value in _with_rope(config).items()
        if value and _is_of_the_architecture(key)
    }


def _all_keys_of(known: Mapping[str, Any]) -> set[str]:
    """All keys of a supported family's config.json, under firstlight's names."""
    return {_SAME_KEYS.get(key, key) for key in _with_rope(known)}


def _with_rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A config.json with transformers 4's key `partial_rotary_factor`, if its rope_parameters say
    that only a part of each head is rotated."""
    rope = config.get("rope_parameters")
    part = rope.get("partial_rotary_factor", 1) if isinstance(rope, Mapping) else 1
    return {**config, "partial_rotary_factor": part} if part != 1 else config


def _is_of_the_architecture(key: str) -> bool:
    """True if a key of config.json describes an architecture."""
    return (
        key not in _NOT_OF_THE_ARCHITECTURE
        and not key.startswith(_NOT_OF_THE_ARCHITECTURE_STARTS)
        and not key.endswith(_NOT_OF_THE_ARCHITECTURE_ENDS)
    )


def _traits(config: Mapping[str, Any]) -> Set[str]:
    """The traits of an architecture, by the keys of its config.json."""
    keys = {_our_name(key, config) for key, value in config.items() if value}
    found = {
        trait
        for trait, (starts, _) in _TRAITS.items()
        if any(key.startswith(starts) for key in keys)
    }
    if any("head" in key for key in keys):
        found.add("attention")
    elif {"hidden_size", "num_hidden_layers"} <= keys:
        # RWKV's config.json shows its state only by the absence of keys about heads.
        found.add(_STATE)
    # Baichuan, MiniCPM, and Falcon without ALiBi have rotary positions without a key for the base.
    is_plain = {"rms_norm_eps", "max_position_embeddings"} <= keys and _STATE not in found
    if is_plain or config.get("alibi") is False:
        found.add("rotary positions")
    # Families with neither, such as BLOOM, add a bias to the scores, and have no greatest position.
    if "max_position_embeddings" in keys and "rotary positions" not in found:
        found.add("learned positions")
    return found


def _no_decoder(content: Mapping[str, Any]) -> str:
    """The end of a sentence about a model that is no causal language model; "" if it is one."""
    if content.get("is_encoder_decoder"):
        return "; it is an encoder with a decoder, firstlight has decoders alone"
    classes = content.get("architectures")
    if not isinstance(classes, list) or not classes or content.get("text_config"):
        return ""
    if any(str(name).endswith(("ForCausalLM", "LMHeadModel")) for name in classes):
        return ""
    return f"; its class {classes[0]} is no causal language model"

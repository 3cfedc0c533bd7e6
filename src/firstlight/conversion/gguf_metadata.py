"""The entries of a GGUF file that describe a model's shape. `gguf_writer` adds the tokenizer's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from firstlight.conversion.gguf_layout import ModelShape, Rope, yarn_factors
from firstlight.errors import ModelError
from firstlight.models import FAMILIES
from firstlight.models.rope import rope_magnitude

if TYPE_CHECKING:
    from gguf import GGUFWriter

#: Keys of config.json without a GGUF key; their values are kept in the entry `KEPT`.
KEPT_KEYS = (
    "model_type",
    "activation_function",
    "hidden_act",
    "attn_pdrop",
    "aux_loss_alpha",
    "embd_pdrop",
    "initializer_range",
    "tie_word_embeddings",
    "layer_types",
    "max_window_layers",
    "n_group",
    "resid_pdrop",
    "router_aux_loss_coef",
    "topk_group",
    "use_sliding_window",
)
#: GGUF entry of firstlight's own: a JSON object with settings that have no GGUF key.
KEPT = "firstlight.config"


def add_model(
    writer: GGUFWriter, config: Mapping[str, Any], shape: ModelShape, rope: Rope | None
) -> None:
    """Add the entries from which llama.cpp reads a model's shape, and firstlight.config.

    Args:
        writer: the writer of the GGUF file.
        config: Hugging Face's config.json as an object.
        shape: shape of the model.
        rope: settings of rotary positions; None for learned positions.

    Raises:
        ModelError: a number is missing or invalid.
    """
    writer.add_type("model")
    writer.add_vocab_size(shape.vocab_size)
    writer.add_context_length(shape.max_positions)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_block_count(shape.num_layers)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(shape.num_heads)
    kept = {key: config[key] for key in KEPT_KEYS if config.get(key) is not None}
    if rope is None:
        writer.add_layer_norm_eps(_epsilon(config, "layer_norm_epsilon"))
    else:
        if shape.family.norm_kind == "layer":
            writer.add_layer_norm_eps(shape.model.rms_norm_eps)
        else:
            writer.add_layer_norm_rms_eps(_epsilon(config, "rms_norm_eps"))
        if "use_parallel_residual" in shape.family.own_keys:
            writer.add_parallel_residual(shape.parallel)
        heads, key_length, value_length = shape.cached_sizes
        writer.add_head_count_kv(heads)
        writer.add_key_length(key_length)
        writer.add_value_length(value_length)
        writer.add_rope_dimension_count(shape.rotary_dim)
        writer.add_rope_freq_base(rope.theta)
        _add_kinds_of_layers(writer, config, shape)
        if (part := shape.model.partial_rotary_factor) is not None:
            kept["partial_rotary_factor"] = part
        kept |= _add_rope_scaling(writer, shape, rope)
    if shape.num_experts:
        writer.add_expert_count(shape.num_experts)
        writer.add_expert_used_count(shape.num_experts_per_tok)
        writer.add_expert_feed_forward_length(shape.expert_size)
    for key, name in shape.family.gguf.numbers.items():
        if (number := getattr(shape.model, key)) is not None:
            writer.add_float32(f"{shape.architecture}.{name}", number)
    for key, name in shape.family.gguf.counts.items():
        writer.add_uint32(f"{shape.architecture}.{name}", getattr(shape.model, key) or 0)
    if shape.family.gguf.layer == "latent":
        _add_latent(writer, shape)
    if shape.family.gguf.layer == "delta":
        model = shape.model
        writer.add_ssm_inner_size(model.linear_num_value_heads * model.linear_value_head_dim)
        kinds = [model.is_linear(layer) for layer in range(shape.num_layers)]
        writer.add_array(f"{shape.architecture}.attention.recurrent_layers", kinds)
    writer.add_string(KEPT, json.dumps(kept))


def _add_rope_scaling(writer: GGUFWriter, shape: ModelShape, rope: Rope) -> dict[str, Any]:
    """Add the entries for the rescaling of rotary positions. Return the settings as an entry of
    firstlight.config if GGUF's entries do not hold all of them."""
    import gguf

    if rope.kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope.scaling["factor"])
    if rope.kind == "llama3":
        # The file has the divisors of the frequencies, from which the settings can't be computed.
        return {"rope_scaling": {"rope_type": rope.kind, **rope.scaling}}
    if rope.kind not in ("longrope", "yarn"):
        return {}
    scaling = shape.model.rope_scaling
    if rope.kind == "yarn":
        magnitude, multiplier = yarn_factors(shape)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(scaling.factor)
        if multiplier:
            # For DeepSeek, llama.cpp divides the entry by 0.1.
            writer.add_rope_scaling_yarn_log_mul(0.1 * multiplier)
    else:
        magnitude = rope_magnitude(scaling, shape.max_positions)
    writer.add_rope_scaling_orig_ctx_len(scaling.original_max_position_embeddings)
    writer.add_rope_scaling_attn_factors(magnitude)
    return {"rope_scaling": scaling.model_dump(exclude_none=True)}


def _add_latent(writer: GGUFWriter, shape: ModelShape) -> None:
    """Add the entries for latent attention's heads and for the routing of tokens to experts."""
    from gguf import ExpertGatingFuncType

    model, gating = shape.model, shape.family.gguf.gating
    writer.add_key_length_mla(model.head_dim)
    writer.add_expert_weights_norm(model.norm_topk_prob)
    writer.add_expert_gating_func(ExpertGatingFuncType[gating.upper()])
    if model.topk_group < model.n_group:
        writer.add_expert_group_count(model.n_group)
        writer.add_expert_group_used_count(model.topk_group)


def _add_kinds_of_layers(writer: GGUFWriter, config: Mapping[str, Any], shape: ModelShape) -> None:
    """Add the entries for the sliding window and for the rotary base of layers that have it."""
    window, spec, model = window_of(config), shape.family.gguf, shape.model
    if spec.has_windows:
        window = model.sliding_window
        if window is None and spec.needs_window:
            # llama.cpp needs a window for this family: one that covers the whole context.
            window = shape.max_positions
    if window is not None:
        writer.add_sliding_window(window)
    if spec.has_window_base:
        name = f"{shape.architecture}.rope.freq_base_swa"
        writer.add_float32(name, model.rope_local_base_freq)


def _epsilon(config: Mapping[str, Any], key: str) -> float:
    value = config.get(key)
    if not isinstance(value, float) or not 0 < value < 1:
        raise ModelError(f"config.json: {key} is {value!r}, not a small number above 0")
    return value


def window_of(config: Mapping[str, Any]) -> int | None:
    """The sliding window in tokens that a config.json has in use; None if there is none."""
    window = config.get("sliding_window")
    family = FAMILIES[config["model_type"]].spec
    always = "sliding_window" in family.own_keys and not family.has_window_switch
    uses = config.get("use_sliding_window", always)
    return window if uses and isinstance(window, int) and window > 0 else None

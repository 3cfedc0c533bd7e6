"""GGUF architectures, and checks that refuse models that llama.cpp does not support."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from firstlight.errors import ModelError
from firstlight.models import FAMILIES
from firstlight.models.family import FamilySpec, GGUFSpec
from firstlight.models.rope import Llama3Rope, YarnRope, rope_magnitude
from firstlight.weights.huggingface import config_from_hf

#: model_type of Hugging Face's config.json -> general.architecture
ARCHITECTURES = {
    name: family.spec.gguf.architecture
    for name, family in FAMILIES.items()
    if family.spec.gguf.architecture
}

#: Exclusive upper limit for integers in GGUF metadata, most of which llama.cpp reads as int32.
_MOST = 2**31


def supported_model(config: Mapping[str, Any]) -> Any:
    """Return the model config of a Hugging Face config.json, after checking that llama.cpp supports
    it.

    Raises:
        ModelError: llama.cpp does not support the family or one of its settings, or a setting is
            invalid.
    """
    model_type = str(config.get("model_type"))
    if model_type not in ARCHITECTURES:
        why = ": llama.cpp files of it are not implemented" if model_type in FAMILIES else ""
        raise ModelError(
            f"model_type '{model_type}' can't be converted to GGUF{why} (supported: "
            f"{', '.join(ARCHITECTURES)})"
        )
    family = FAMILIES[model_type].spec
    for key, values in _fixed(model_type).items():
        value = config.get(key, family.hf_defaults.get(key, values[0]))
        if value not in values:
            raise ModelError(
                f"llama.cpp does not support {model_type} with {key} {value!r}: GGUF requires "
                f"{values[0]!r}"
            )
    # Derived keys are computed from other keys, and the config classes of some families do not have
    # them.
    model = config_from_hf(
        {key: value for key, value in config.items() if key not in family.derived_keys},
        "config.json",
    )
    for key, value in model.model_dump().items():
        if isinstance(value, int) and value >= _MOST:
            raise ModelError(f"{key} {value} can't be stored in GGUF: it must be below {_MOST}")
    _check_computed(family, model)
    return model


def _fixed(model_type: str) -> dict[str, tuple[Any, ...]]:
    """Return the settings that llama.cpp fixes for a family; see `GGUFSpec.fixed`."""
    family = FAMILIES[model_type].spec
    fixed = dict(family.gguf.fixed)
    if not FAMILIES[model_type].config.has_rotary:
        return fixed
    # llama.cpp uses the tanh approximation of GELU, which is close to the exact function, so the
    # difference is a note (`gguf_notes`) and not an error.
    if family.activation != "gelu":
        fixed[family.activation_key] = (family.activation,)
    if "partial_rotary_factor" not in family.own_keys:
        fixed["partial_rotary_factor"] = (1, None)
    return fixed


def _check_computed(family: FamilySpec, model: Any) -> None:
    """Refuse settings for which llama.cpp computes a different result.

    Args:
        family: facts of the family.
        model: the model's config.

    Raises:
        ModelError: there is such a setting; the message names it.
    """
    rope = getattr(model, "rope_scaling", None)
    kind = "default" if rope is None else rope.rope_type
    if kind not in family.gguf.rope_kinds:
        named = [n for n in ARCHITECTURES if kind in FAMILIES[n].spec.gguf.rope_kinds]
        can = f"; it can for {', '.join(named)}" if named else ""
        raise ModelError(f"rope type '{kind}' can't be stored in GGUF for {model.model_type}{can}")
    faults = [*_wrong_layers(family, model), *_wrong_rotation(family, model)]
    if family.gguf.layer == "latent":
        faults += _wrong_latents(model, family.gguf)
    if faults:
        raise ModelError(
            f"llama.cpp does not support {model.model_type} with {faults[0]} can be converted to "
            "GGUF"
        )


def _wrong_layers(family: FamilySpec, model: Any) -> Iterator[str]:
    """Yield the settings of layers and head for which llama.cpp computes a different result."""
    spec = family.gguf
    if spec.layer == "delta":
        sizes = model.linear_key_head_dim, model.linear_value_head_dim
        if sizes[0] != sizes[1]:
            yield f"linear_value_head_dim {sizes[1]}: only linear_key_head_dim, {sizes[0]}"
    if "query_pre_attn_scalar" in family.own_keys:
        scalar = model.head_dim
        if model.num_hidden_layers == spec.wide_scale_layers:
            scalar = model.hidden_size // model.num_attention_heads
        if model.query_pre_attn_scalar != scalar:
            yield f"query_pre_attn_scalar {model.query_pre_attn_scalar}: only {scalar}"
    for key in spec.numbers:
        if getattr(model, key) is None and key not in spec.optional:
            yield f"{key} None: only a number"
    if spec.has_windows and model.layer_types is not None:
        yield "layer_types with another pattern: only the family's pattern"
    if spec.head == "tied" and not model.tie_word_embeddings:
        yield "an untied head: only tie_word_embeddings true"
    if spec.exact_heads and model.head_dim * model.num_attention_heads != model.hidden_size:
        yield f"head_dim {model.head_dim}: only hidden_size / num_attention_heads"


def _wrong_rotation(family: FamilySpec, model: Any) -> Iterator[str]:
    """Yield the settings of rotary positions for which llama.cpp computes a different result."""
    if getattr(model, "rotary_dim", 0) % 2:
        yield f"{model.rotary_dim} rotated dimensions: only an even number"
    rope = getattr(model, "rope_scaling", None)
    if isinstance(rope, YarnRope):
        if rope.factor < 1:
            yield f"yarn with factor {rope.factor}: only at least 1"
        if (rope.beta_fast, rope.beta_slow) != (32.0, 1.0):
            yield "yarn with other bounds: only beta_fast 32 and beta_slow 1"
    if isinstance(rope, Llama3Rope) and rope.low_freq_factor >= rope.high_freq_factor:
        yield f"low_freq_factor {rope.low_freq_factor}: only less than high_freq_factor"
    if getattr(model, "no_rope_layers", None) is not None:
        yield "no_rope_layers with another pattern: only the family's pattern"
    if family.gguf.has_windows and not family.gguf.has_window_base:
        local = model.rope_local_base_freq if "rope_local_base_freq" in family.own_keys else None
        if model.sliding_window is not None and local not in (None, model.rope_theta):
            yield f"a rotary base of {local} in layers with a window: only {model.rope_theta}"


def _wrong_latents(model: Any, spec: GGUFSpec) -> Iterator[str]:
    """Yield the settings of latent attention for which llama.cpp computes a different result."""
    layers, rope = model.num_hidden_layers, model.rope_scaling
    # llama.cpp recognises models without q_lora_rank by these sizes and does not read the key.
    lacks_rank = layers in (26, 27) or (layers == 48 and model.vocab_size == 128256)
    if model.q_lora_rank is not None and lacks_rank:
        yield f"q_lora_rank in {layers} layers: only null"
    if model.topk_group < model.n_group and spec.gating == "softmax":
        yield f"topk_group {model.topk_group} of n_group {model.n_group}: only all groups"
    if isinstance(rope, YarnRope) and rope.factor == 1 and rope_magnitude(rope, 1) != 1:
        yield f"attention_factor {rope.attention_factor} in yarn of factor 1: only 1"

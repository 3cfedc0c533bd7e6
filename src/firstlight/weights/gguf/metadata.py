"""Convert a model's shape and settings between config.json and the metadata of GGUF files.

`add_model` writes the metadata entries of a model, and `config_of` reads them. `supported_model`
rejects models for which llama.cpp would compute different results. The metadata entries of the
tokenizer are written by the module `writer`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from firstlight.errors import ModelError
from firstlight.models import FAMILIES
from firstlight.models.family import ExpertNames, FamilySpec, GGUFSpec
from firstlight.models.llama_config import with_query_growth
from firstlight.models.rope import (
    LinearRope,
    Llama3Rope,
    LongRope,
    YarnRope,
    rope_magnitude,
    yarn_magnitude,
)
from firstlight.weights.huggingface import TOKENS_KEY, config_from_hf, sampling_settings

if TYPE_CHECKING:
    from gguf import GGUFWriter

#: Keys of config.json that have no equivalent in GGUF. Their values are stored in the metadata
#: entry `KEPT`.
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
    TOKENS_KEY,
)
#: GGUF keys of the sizes that all model families have, without the architecture prefix. Each key is
#: mapped to the corresponding key in firstlight's model config.
_SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}

#: GGUF tensor with the factors by which the rotary frequencies of Llama 3 models are divided.
ROPE_FACTORS = "rope_freqs.weight"
#: GGUF tensors with the factors by which LongRoPE divides the rotary frequencies.
ROPE_FACTORS_LONG, ROPE_FACTORS_SHORT = "rope_factors_long.weight", "rope_factors_short.weight"

#: Metadata entry that only firstlight uses. Its value is a JSON object with the settings for which
#: GGUF has no key.
KEPT = "firstlight.config"

#: GGUF key for each sampling setting of generation_config.json.
_SAMPLING = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
#: GGUF keys for the tokens at which generation ends. These are the tokenizer's end-of-text token
#: and two additional tokens.
_ENDS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))

#: Shapes of the tensors in a file, keyed by tensor name. The outermost dimension comes first.
Shapes = Mapping[str, tuple[int, ...]]

#: Minimum number of tensors per layer, over all model families.
_LAYER_TENSORS = 5

#: Value of expert_gating_func for sigmoid scores, from llama.cpp's `llama_expert_gating_func_type`.
_SIGMOID = 2

#: RoPE settings that are the same in all published Llama 3.1, 3.2 and 3.3 models.
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

#: general.architecture for each model_type of Hugging Face's config.json.
ARCHITECTURES = {
    name: family.spec.gguf.architecture
    for name, family in FAMILIES.items()
    if family.spec.gguf.architecture
}

#: Exclusive upper limit for integers in GGUF metadata. llama.cpp reads most of them as int32.
_MOST = 2**31


def add_model(writer: GGUFWriter, config: Mapping[str, Any], model: Any) -> None:
    """Add the metadata entries that describe a model.

    Most entries are those from which llama.cpp reads the shape and settings of the model. The entry
    firstlight.config stores the settings for which GGUF has no key.

    Args:
        writer: writer for the GGUF file.
        config: content of the Hugging Face config.json.
        model: the corresponding model config, as returned by `supported_model`.
    """
    family = model.family
    writer.add_type("model")
    writer.add_vocab_size(model.vocab_size)
    for key, name in _SIZES.items():
        writer.add_uint32(f"{writer.arch}.{key}", getattr(model, name))
    kept = {key: config[key] for key in KEPT_KEYS if config.get(key) is not None}
    if not model.has_rotary:
        writer.add_layer_norm_eps(model.layer_norm_epsilon)
    else:
        if family.norm_kind == "layer":
            writer.add_layer_norm_eps(model.rms_norm_eps)
        else:
            writer.add_layer_norm_rms_eps(model.rms_norm_eps)
        if "use_parallel_residual" in family.own_keys:
            writer.add_parallel_residual(model.use_parallel_residual)
        heads, key_length, value_length = _cached_sizes(model)
        writer.add_head_count_kv(heads)
        writer.add_key_length(key_length)
        writer.add_value_length(value_length)
        writer.add_rope_dimension_count(model.rotary_dim)
        writer.add_rope_freq_base(model.rope_theta)
        _add_windows(writer, model)
        if (part := model.partial_rotary_factor) is not None:
            kept["partial_rotary_factor"] = part
        kept |= _add_rope_scaling(writer, model)
    if model.expert_count:
        writer.add_expert_count(model.num_experts)
        writer.add_expert_used_count(model.num_experts_per_tok)
        size = "intermediate_size" if family.experts is None else family.experts.size
        writer.add_expert_feed_forward_length(getattr(model, size))
    for key, name in family.gguf.numbers.items():
        if (number := getattr(model, key)) is not None:
            writer.add_float32(f"{writer.arch}.{name}", number)
    for key, name in family.gguf.counts.items():
        writer.add_uint32(f"{writer.arch}.{name}", getattr(model, key) or 0)
    if family.gguf.layer == "latent":
        _add_latent(writer, model)
    if family.gguf.has_delta:
        _add_linear(writer, model)
    writer.add_string(KEPT, json.dumps(kept))


def add_sampling(writer: GGUFWriter, generation: Mapping[str, Any]) -> None:
    """Add metadata entries for the sampling settings in a generation_config.json."""
    for name, value in sampling_settings(generation).items():
        (writer.add_int32 if name == "top_k" else writer.add_float32)(_SAMPLING[name], value)


def generation_of(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Build the content of generation_config.json from the metadata of a GGUF file.

    The result contains the sampling settings and the ids of the end-of-text tokens.
    """
    content: dict[str, Any] = {}
    for name, key in _SAMPLING.items():
        value = metadata.get(key)
        if isinstance(value, int | float) and math.isfinite(value):
            content[name] = value if isinstance(value, int) else float(str(np.float32(value)))
    if "temperature" in content:
        content["do_sample"] = content["temperature"] != 0
        if not content["do_sample"]:
            del content["temperature"]  # transformers refuses to save a temperature of 0.
    if ends := [metadata[key] for key in _ENDS if type(metadata.get(key)) is int]:
        content["eos_token_id"] = ends
    return content


def _cached_sizes(model: Any) -> tuple[int | list[int], int, int]:
    """Return the number of heads, the key size and the value size in llama.cpp's KV cache. For
    LFM2, there is one number of heads per layer, which is 0 for convolutions.

    With multi-head latent attention, llama.cpp caches a single head. The cached key consists of the
    KV latent and the rotated part of the key. The cached value is the KV latent.
    """
    if model.family.gguf.layer == "latent":
        rank = model.kv_lora_rank
        return 1, rank + model.rotary_dim, rank
    heads = model.num_key_value_heads
    if model.family.gguf.layer == "conv":
        layers = range(model.num_hidden_layers)
        heads = [0 if model.is_conv(layer) else heads for layer in layers]
    return heads, model.head_dim, model.head_dim


def _add_rope_scaling(writer: GGUFWriter, model: Any) -> dict[str, Any]:
    """Add the metadata entries for RoPE scaling.

    Returns:
        A dict with the RoPE settings to store in firstlight.config. It is empty if GGUF has entries
        for all of the model's RoPE settings.
    """
    import gguf

    scaling = model.rope_scaling
    if scaling is None:
        return {}
    if isinstance(scaling, LinearRope):
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(scaling.factor)
        return {}
    # For Llama 3, GGUF files contain only the frequency factors that `rope_factors` returns. The
    # settings can't be recovered from these factors.
    if not isinstance(scaling, Llama3Rope):
        magnitude = rope_magnitude(scaling, model.max_position_embeddings)
        if isinstance(scaling, YarnRope):
            magnitude, multiplier = _yarn_factors(model)
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(scaling.factor)
            if multiplier:
                # For DeepSeek, llama.cpp divides this entry by 0.1.
                writer.add_rope_scaling_yarn_log_mul(0.1 * multiplier)
        writer.add_rope_scaling_orig_ctx_len(scaling.original_max_position_embeddings)
        writer.add_rope_scaling_attn_factors(magnitude)
    return {"rope_scaling": scaling.model_dump(exclude_none=True)}


def _yarn_factors(model: Any) -> tuple[float, float]:
    """Return the YaRN parameters attn_factor and m for llama.cpp.

    The parameter attn_factor scales cos and sin. If m is 0, llama.cpp also multiplies cos and sin
    by YaRN's default magnitude. The parameter m scales DeepSeek's attention scores, which llama.cpp
    multiplies by the square of attn_factor and by the square of 1 + 0.1 m ln(factor).
    """
    rope = model.rope_scaling
    wanted, own = rope_magnitude(rope, model.max_position_embeddings), yarn_magnitude(rope.factor)
    if model.family.gguf.layer != "latent" or rope.factor == 1:
        return wanted / own, 0.0
    scale = (model.attention_spec(0).scale or 1.0) * math.sqrt(model.head_dim)
    multiplier = (math.sqrt(scale) / wanted - 1) / (0.1 * math.log(rope.factor))
    return (wanted / own, 0.0) if abs(multiplier) < 1e-9 else (wanted, multiplier)


def rope_factors(model: Any) -> dict[str, Tensor]:
    """Return the tensors by which llama.cpp divides the rotary frequencies, keyed by GGUF name.

    Each tensor is fp32 and has the shape [rotary_dim / 2]. Only models with the RoPE types "llama3"
    and "longrope" have such tensors.
    """
    scaling = getattr(model, "rope_scaling", None)
    if isinstance(scaling, LongRope):
        return {
            ROPE_FACTORS_LONG: torch.tensor(scaling.long_factor, dtype=torch.float32),
            ROPE_FACTORS_SHORT: torch.tensor(scaling.short_factor, dtype=torch.float32),
        }
    if isinstance(scaling, Llama3Rope):
        return {ROPE_FACTORS: llama3_factors(scaling, model.rope_theta, model.rotary_dim)}
    return {}


def llama3_factors(scaling: Llama3Rope, theta: float, rotary_dim: int) -> Tensor:
    """Return the factors by which llama.cpp divides the rotary frequencies of a Llama 3 model, as
    an fp32 tensor of shape [rotary_dim / 2].

    Source: the frequency scaling of Llama 3.1 (meta-llama/llama-models `apply_scaling`).
    """
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim
    wavelengths = 2 * math.pi * theta**exponents
    turns = scaling.original_max_position_embeddings / wavelengths
    blend = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 / ((1 - blend) / scaling.factor + blend)).float()


def _add_latent(writer: GGUFWriter, model: Any) -> None:
    """Add the metadata entries for multi-head latent attention and for expert routing."""
    from gguf import ExpertGatingFuncType

    writer.add_key_length_mla(model.head_dim)
    writer.add_expert_weights_norm(model.norm_topk_prob)
    writer.add_expert_gating_func(ExpertGatingFuncType[model.family.gguf.gating.upper()])
    if model.topk_group < model.n_group:
        writer.add_expert_group_count(model.n_group)
        writer.add_expert_group_used_count(model.topk_group)


def _add_linear(writer: GGUFWriter, model: Any) -> None:
    """Add the metadata entries for linear attention with a gated delta rule."""
    if model.family.gguf.layer == "tiled_delta":
        # llama.cpp requires the sections of positions in pictures, which are equal for text.
        writer.add_rope_dimension_sections([11, 11, 10, 0])
    writer.add_ssm_inner_size(model.linear_num_value_heads * model.linear_value_head_dim)
    kinds = [model.is_linear(layer) for layer in range(model.num_hidden_layers)]
    writer.add_array(f"{writer.arch}.attention.recurrent_layers", kinds)


def _add_windows(writer: GGUFWriter, model: Any) -> None:
    """Add the metadata entries for the sliding window, and for the rotary base of the layers that
    use sliding-window attention.
    """
    window, spec = model.sliding_window, model.family.gguf
    if window is None and spec.needs_window:
        # llama.cpp requires a sliding window for this model family, so use one that covers the full
        # context.
        window = model.max_position_embeddings
    if window is not None:
        writer.add_sliding_window(window)
    if spec.has_window_base:
        writer.add_float32(f"{writer.arch}.rope.freq_base_swa", model.rope_local_base_freq)


class _Values:
    """The metadata entries in a GGUF file that have names of the form `ARCHITECTURE.KEY`."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str) -> None:
        self._metadata = metadata
        self.architecture = architecture

    def whole(self, key: str, default: int | None = None) -> int:
        """Return the value of a key that must be an integer. Raise a ModelError if the value is
        anything else, such as a list with one integer per layer.
        """
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ModelError(f"{self.architecture}.{key} is {value!r}, not an integer")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """Return the value of a key that must be a finite float. Raise a ModelError if the value is
        anything else.

        GGUF stores floats in fp32. The result is therefore rounded to as many decimal digits as
        fp32 can represent.
        """
        value = self.get(key, default)
        if not isinstance(value, float) or not math.isfinite(value):
            raise ModelError(f"{self.architecture}.{key} is {value!r}, not a number")
        return float(str(np.float32(value)))

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key without checking its type."""
        return self._metadata.get(f"{self.architecture}.{key}", default)


def config_of(
    metadata: Mapping[str, Any], stored: Shapes, factors: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Build Hugging Face's config.json for a GGUF file.

    Args:
        metadata: metadata entries of the file.
        stored: shapes of all tensors in the file that are not in `factors`.
        factors: tensors in the file by which the rotary frequencies are divided, keyed by name.

    Raises:
        ModelError: the file is damaged, or the model's family or settings are not supported.
    """
    architecture = str(metadata.get("general.architecture"))
    if architecture not in ARCHITECTURES.values():
        raise ModelError(
            f"models of the architecture '{architecture}' are not supported "
            f"(supported: {', '.join(dict.fromkeys(ARCHITECTURES.values()))})"
        )
    values = _Values(metadata, architecture)
    rotary = FAMILIES[_families_of(architecture)[0]].config.has_rotary
    kept = _kept(metadata, architecture)
    layers, embedding = values.whole("block_count"), stored.get("token_embd.weight")
    # Check the number of layers first. With the number from a damaged file, `tensor_rules` could
    # run almost forever.
    if embedding is None or layers > len(stored) // _LAYER_TENSORS:
        raise ModelError(f"the file contains {len(stored)} tensors, too few for {layers} layers")
    config: dict[str, Any] = {
        "vocab_size": embedding[0],
        "tie_word_embeddings": "output.weight" not in stored,
        **(_llama_config(values, kept, stored) if rotary else _gpt2_config(values)),
    }
    config |= {key: kept[key] for key in KEPT_KEYS if key in kept}
    for name in ("bos_token_id", "eos_token_id"):
        if isinstance(token_id := metadata.get(f"tokenizer.ggml.{name}"), int):
            config[name] = token_id
    if rotary:
        # Always write this key. Some config classes in transformers have a default id, which may be
        # outside the vocabulary.
        config["pad_token_id"] = None
        config |= _rope_config(values, kept, factors, config)
    family = FAMILIES[config["model_type"]].spec
    config = {family.json_names.get(key, key): value for key, value in config.items()}
    for key in family.derived_keys:
        del config[key]
    return {"architectures": [family.architecture], **config}


def _kept(metadata: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """Return the JSON object stored in firstlight.config, or {} if firstlight did not write the
    file.
    """
    try:
        kept = json.loads(metadata.get(KEPT, "{}"))
    except (TypeError, ValueError, RecursionError) as error:
        raise ModelError(f"the file is damaged: {KEPT} is not JSON") from error
    if not isinstance(kept, dict) or (
        "model_type" in kept and ARCHITECTURES.get(str(kept["model_type"])) != architecture
    ):
        raise ModelError(f"the file is damaged: {KEPT} does not match the architecture")
    return kept


def _gpt2_config(values: _Values) -> dict[str, Any]:
    names = FAMILIES["gpt2"].config.hf_names
    sizes = {names[ours]: values.whole(key) for key, ours in _SIZES.items()}
    return {
        "model_type": "gpt2",
        **sizes,
        "n_ctx": sizes["n_positions"],
        "layer_norm_epsilon": values.real("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
        **dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0),
        "scale_attn_weights": True,
    }


def _llama_config(values: _Values, kept: Mapping[str, Any], stored: Shapes) -> dict[str, Any]:
    """Return the config entries of a model with rotary position embeddings, under the keys that
    firstlight uses. The RoPE settings are not included.
    """
    sizes = {ours: values.whole(key) for key, ours in _SIZES.items()}
    hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    head_dim = values.whole("attention.key_length", hidden // max(heads, 1))
    window, experts = values.whole("attention.sliding_window", 0), values.whole("expert_count", 0)
    model_type = kept.get("model_type") or _family_of(values, experts, window)
    family = FAMILIES[model_type].spec
    is_latent = family.gguf.layer == "latent"
    rotary_dim = values.whole("rope.dimension_count", head_dim)
    is_whole = rotary_dim == head_dim or "partial_rotary_factor" in family.own_keys
    value_dim = values.whole("attention.value_length", head_dim)
    if is_latent:
        # The key length in llama.cpp is the size of the KV latent plus that of the rotated part.
        # head_dim in Hugging Face's config.json is the size of the rotated part only.
        head_dim = rotary_dim
    elif value_dim != head_dim or not is_whole:
        raise ModelError(
            "heads whose keys, values and rotary part differ in size are not supported"
        )
    eps = "layer_norm_epsilon" if family.norm_kind == "layer" else "layer_norm_rms_epsilon"
    config: dict[str, Any] = {
        "model_type": model_type,
        **sizes,
        "num_key_value_heads": (
            heads
            if is_latent or family.gguf.layer == "conv"
            else values.whole("attention.head_count_kv", heads)
        ),
        "head_dim": head_dim,
        family.activation_key: family.activation,
        "rms_norm_eps": values.real(f"attention.{eps}"),
        # Write this key even if there is no sliding window, because Mistral's config class uses a
        # window by default.
        "sliding_window": window or None,
    }
    if "attention_bias" in family.own_keys:
        biases = ("blk.0.attn_q.bias", "blk.0.attn_qkv.bias")
        config["attention_bias"] = any(name in stored for name in biases)
    if "mlp_bias" in family.own_keys:
        config["mlp_bias"] = "blk.0.ffn_up.bias" in stored
    config |= _layer_config(values, stored, family, config)
    if experts:
        fields = {*FAMILIES[model_type].config.model_fields, "num_local_experts"}
        expert_config = _expert_config(values, stored, family.experts, experts)
        config |= {key: value for key, value in expert_config.items() if key in fields}
    if is_latent:
        config |= _latent_config(values, rotary_dim)
    if family.gguf.has_delta:
        config |= _linear_config(values)
    if family.gguf.layer == "conv":
        config |= _conv_config(values)
    for key, name in family.gguf.counts.items():
        count = values.whole(name)
        config[key] = None if key in family.gguf.optional and count == 0 else count
    numbers = family.gguf.numbers
    return config | {
        key: None if key in family.gguf.optional and values.get(name) is None else values.real(name)
        for key, name in numbers.items()
    }


def _latent_config(values: _Values, rotary_dim: int) -> dict[str, Any]:
    """Return the config entries for DeepSeek's multi-head latent attention and for its expert
    routing.
    """
    return {
        "qk_nope_head_dim": values.whole("attention.key_length_mla") - rotary_dim,
        "qk_rope_head_dim": rotary_dim,
        "norm_topk_prob": values.get("expert_weights_norm", False) is True,
        "n_group": values.whole("expert_group_count", 1),
        "topk_group": values.whole("expert_group_used_count", 1),
    }


def _linear_config(values: _Values) -> dict[str, Any]:
    """Return the config entries for Qwen3-Next's linear attention."""
    layers, kinds = values.whole("block_count"), values.get("attention.recurrent_layers")
    if not isinstance(kinds, list):
        period = max(values.whole("full_attention_interval", 4), 1)
        kinds = [(layer + 1) % period != 0 for layer in range(layers)]
    heads = max(values.whole("ssm.time_step_rank"), 1)
    return {
        "linear_value_head_dim": values.whole("ssm.inner_size") // heads,
        "layer_types": [
            "linear_attention" if is_linear else "full_attention" for is_linear in kinds
        ],
    }


def _conv_config(values: _Values) -> dict[str, Any]:
    """Return the config entries for LFM2's layers with convolutions."""
    counts = values.get("attention.head_count_kv")
    if not isinstance(counts, list) or not all(type(count) is int for count in counts):
        raise ModelError(f"{values.architecture}.attention.head_count_kv is not a list of integers")
    return {
        "num_key_value_heads": max(counts, default=0),
        "layer_types": ["full_attention" if count else "conv" for count in counts],
        "block_auto_adjust_ff_dim": False,
    }


def _layer_config(
    values: _Values, stored: Shapes, family: FamilySpec, config: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the config entries for model families whose layers differ from Llama's or from each
    other.
    """
    own, found = family.own_keys, dict[str, Any]()
    if "query_pre_attn_scalar" in own:
        wide = config["num_hidden_layers"] == family.gguf.wide_scale_layers
        width = config["hidden_size"] // max(config["num_attention_heads"], 1)
        found["query_pre_attn_scalar"] = width if wide else config["head_dim"]
    if "qk_layernorm" in own:
        norm = stored.get("blk.0.attn_q_norm.weight")
        found["qk_layernorm"] = norm is not None
        # Check the number of heads first, because `tensor_rules` yields a norm for each head and
        # would run almost forever if the number were damaged.
        if norm is not None and norm[0] != config["num_attention_heads"]:
            raise ModelError(f"the file is damaged: it has norms for {norm[0]} heads")
    if "use_parallel_residual" in own:
        is_parallel = "blk.0.ffn_norm.weight" not in stored
        found["use_parallel_residual"] = values.get("use_parallel_residual", is_parallel) is True
    pattern = values.get("attention.sliding_window_pattern")
    if "layer_types" in own and isinstance(pattern, list):
        found["layer_types"] = [
            "sliding_attention" if has_window else "full_attention" for has_window in pattern
        ]
    return found


def _families_of(architecture: str) -> list[str]:
    return [name for name in ARCHITECTURES if ARCHITECTURES[name] == architecture]


def _family_of(values: _Values, experts: int, window: int) -> str:
    """Return the `model_type` of the first model family of the architecture that fits the file.

    A family fits if it uses the gating function specified in the file, has experts if and only if
    `experts` is not 0, and supports a sliding window if `window` is not 0. If no family fits,
    return the first family that uses the gating function.
    """
    gating = "sigmoid" if values.get("expert_gating_func") == _SIGMOID else "softmax"
    forms = {name: FAMILIES[name].spec.gguf for name in _families_of(values.architecture)}
    named = [n for n, form in forms.items() if form.layer != "latent" or form.gating == gating]
    for name in named:
        family = FAMILIES[name].spec
        has_window = not window or "sliding_window" in family.own_keys
        has_experts = "num_experts" in FAMILIES[name].config.model_fields
        if has_window and has_experts == (experts > 0):
            return name
    return named[0]


def _expert_config(
    values: _Values, stored: Shapes, names: ExpertNames | None, experts: int
) -> dict[str, Any]:
    """Return the config entries for a mixture of experts."""
    layers = values.whole("block_count")
    routers = (stored.get(f"blk.{layer}.ffn_gate_inp.weight") for layer in range(layers))
    router = next((shape for shape in routers if shape is not None), None)
    # Check the number of experts first, because `tensor_rules` yields tensors for each expert. Each
    # expert has three matrices with at least one element.
    numbers = sum(math.prod(shape) for shape in stored.values())
    if router is None or router[0] != experts or 3 * layers * experts > numbers:
        raise ModelError(f"the file is damaged: its routers do not have {experts} experts")
    used = {"num_experts_per_tok": values.whole("expert_used_count")}
    if names is None or names.size == "intermediate_size":
        return {"num_local_experts": experts, **used}
    size = values.whole("expert_feed_forward_length", values.whole("feed_forward_length"))
    return {
        "num_experts": experts,
        **used,
        "moe_intermediate_size": size,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _rope_config(
    values: _Values,
    kept: Mapping[str, Any],
    factors: Mapping[str, Tensor],
    config: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the config entries for RoPE, under the keys used by transformers 4 and under those
    used by transformers 5.
    """
    family, found = FAMILIES[config["model_type"]].spec, dict[str, Any]()
    theta = values.real("rope.freq_base", 10_000.0)
    kind = values.get("rope.scaling.type", "none")
    scaling: dict[str, Any] | None = None
    rotary_dim = values.whole("rope.dimension_count", config["head_dim"])
    if ROPE_FACTORS_LONG in factors and ROPE_FACTORS_SHORT in factors:
        scaling = _longrope_scaling(values, kept.get("rope_scaling"), factors)
        found["original_max_position_embeddings"] = scaling["original_max_position_embeddings"]
    elif ROPE_FACTORS in factors:
        known = kept.get("rope_scaling")
        scaling = _llama3_scaling(known, theta, factors[ROPE_FACTORS], rotary_dim)
    elif kind == "linear":
        scaling = {"rope_type": "linear", "factor": values.real("rope.scaling.factor")}
    elif kind == "yarn":
        scaling = _yarn_scaling(values, kept.get("rope_scaling"))
    elif kind != "none":
        raise ModelError(
            f"rope scaling {kind!r} is not supported (supported: linear, yarn and Llama 3's)"
        )
    if "llama_4_scaling_beta" in family.own_keys:
        beta, positions = config["llama_4_scaling_beta"], config["max_position_embeddings"]
        scaling = with_query_growth(scaling, beta, positions)
    rope = {"rope_theta": theta, **(scaling or {"rope_type": "default"})}
    if "partial_rotary_factor" in family.own_keys:
        part = kept.get("partial_rotary_factor", rotary_dim / config["head_dim"])
        rope["partial_rotary_factor"] = found["partial_rotary_factor"] = part
    if family.rope.nested:
        usual = 10_000.0 if family.rope.local_theta_key else theta
        local = {"rope_type": "default", "rope_theta": values.real("rope.freq_base_swa", usual)}
        rope = {"full_attention": rope, "sliding_attention": local}
    return {**found, "rope_parameters": rope, "rope_theta": theta, "rope_scaling": scaling}


def _longrope_scaling(values: _Values, known: Any, factors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the LongRoPE settings.

    If firstlight.config contains settings, they are passed as `known`, and this function returns
    them. Otherwise, the settings are read from the GGUF entries of the file.
    """
    if isinstance(known, dict):
        return {**known, "rope_type": "longrope"}
    return {
        "rope_type": "longrope",
        "short_factor": factors[ROPE_FACTORS_SHORT].tolist(),
        "long_factor": factors[ROPE_FACTORS_LONG].tolist(),
        "original_max_position_embeddings": values.whole("rope.scaling.original_context_length"),
        "attention_factor": values.real("rope.scaling.attn_factor", 1.0),
    }


def _yarn_scaling(values: _Values, known: Any) -> dict[str, Any]:
    """Return the YaRN settings.

    If firstlight.config contains settings, they are passed as `known`, and this function returns
    them. Otherwise, the settings are read from the GGUF entries of the file.
    """
    if isinstance(known, dict):
        return {**known, "rope_type": "yarn"}
    factor = values.real("rope.scaling.factor")
    multiplier = values.real("rope.scaling.yarn_log_multiplier", 0.0)
    scaling = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": values.whole("rope.scaling.original_context_length"),
    }
    own = values.real("rope.scaling.attn_factor", 1.0)
    if FAMILIES[_families_of(values.architecture)[0]].spec.gguf.layer == "latent":
        if own != 1:
            raise ModelError(f"yarn with an attn_factor of {own} is not supported: it must be 1")
        # Invert `_yarn_factors`. The file contains 0.1 m rather than m, because llama.cpp divides
        # the stored value by 0.1.
        multiplier = round(multiplier / 0.1, 6)
        if multiplier:
            return {**scaling, "mscale": multiplier, "mscale_all_dim": multiplier}
        return {**scaling, "attention_factor": yarn_magnitude(factor), "mscale_all_dim": 1.0}
    # llama.cpp multiplies attn_factor by YaRN's default magnitude.
    return scaling if own == 1 else {**scaling, "attention_factor": own * yarn_magnitude(factor)}


def _llama3_scaling(known: Any, theta: float, factors: Tensor, rotary_dim: int) -> dict[str, Any]:
    """Return the RoPE settings of a Llama 3 model.

    If firstlight.config contains settings, they are passed as `known`, and this function returns
    them. Otherwise, it returns the settings of the published models, `_LLAMA3`, with the factor
    inferred from `factors`.

    Raises:
        ModelError: these settings do not produce the frequency factors that the file contains.
            `factors` is an fp32 tensor of shape [rotary_dim / 2].
    """
    scaling = known if isinstance(known, dict) else {"factor": factors.max().item(), **_LLAMA3}
    scaling = {**scaling, "rope_type": "llama3"}
    model: Any = config_from_hf({"model_type": "llama", "rope_scaling": scaling}, "the file")
    expected = llama3_factors(model.rope_scaling, theta, rotary_dim)
    if expected.shape != factors.shape:
        raise ModelError(f"the file is damaged: tensor {ROPE_FACTORS} does not match the heads")
    if not torch.allclose(expected, factors, rtol=1e-4):
        raise ModelError(f"tensor {ROPE_FACTORS} does not contain Llama 3's rotary factors")
    return scaling


def supported_model(config: Mapping[str, Any]) -> Any:
    """Check that llama.cpp supports the model described by a Hugging Face config.json, and return
    its model config.

    Raises:
        ModelError: llama.cpp does not support the model family or one of the model's settings, or a
            setting is invalid.
    """
    model_type = str(config.get("model_type"))
    if model_type not in ARCHITECTURES:
        why = ": GGUF files of this family are not implemented" if model_type in FAMILIES else ""
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
    # Omit keys that are computed from other keys, because some of transformers' config classes do
    # not accept them.
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
    """Return the settings for which llama.cpp supports only certain values, in the format of
    `GGUFSpec.fixed`.
    """
    family = FAMILIES[model_type].spec
    fixed = dict(family.gguf.fixed)
    if not FAMILIES[model_type].config.has_rotary:
        return fixed
    # llama.cpp uses the tanh approximation of GELU instead of the exact function. The difference is
    # so small that it is not an error. `gguf_notes` reports it to the user.
    if family.activation != "gelu":
        fixed[family.activation_key] = (family.activation,)
    if "partial_rotary_factor" not in family.own_keys:
        fixed["partial_rotary_factor"] = (1, None)
    return fixed


def _check_computed(family: FamilySpec, model: Any) -> None:
    """Raise an error if the model has a setting with which llama.cpp would compute a different
    result.

    Args:
        family: specification of the model family.
        model: config of the model.

    Raises:
        ModelError: the model has such a setting. The message names the setting.
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
    """Yield the settings of the layers and the output head with which llama.cpp would compute a
    different result.
    """
    spec = family.gguf
    if spec.has_delta:
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
        yield "layer_types with a different pattern: only the family's pattern"
    if spec.head == "tied" and not model.tie_word_embeddings:
        yield "an untied head: only tie_word_embeddings true"
    if spec.exact_heads and model.head_dim * model.num_attention_heads != model.hidden_size:
        yield f"head_dim {model.head_dim}: only hidden_size / num_attention_heads"


def _wrong_rotation(family: FamilySpec, model: Any) -> Iterator[str]:
    """Yield the RoPE settings with which llama.cpp would compute a different result."""
    if getattr(model, "rotary_dim", 0) % 2:
        yield f"{model.rotary_dim} rotated dimensions: only an even number"
    rope = getattr(model, "rope_scaling", None)
    if isinstance(rope, YarnRope):
        if rope.factor < 1:
            yield f"yarn with factor {rope.factor}: only a factor of at least 1"
        if (rope.beta_fast, rope.beta_slow) != (32.0, 1.0):
            yield "yarn with other bounds: only beta_fast 32 and beta_slow 1"
    if isinstance(rope, Llama3Rope) and rope.low_freq_factor >= rope.high_freq_factor:
        yield f"low_freq_factor {rope.low_freq_factor}: only a value below high_freq_factor"
    if getattr(model, "no_rope_layers", None) is not None:
        yield "no_rope_layers with a different pattern: only the family's pattern"
    if family.gguf.has_windows and not family.gguf.has_window_base:
        local = model.rope_local_base_freq if "rope_local_base_freq" in family.own_keys else None
        if model.sliding_window is not None and local not in (None, model.rope_theta):
            yield (
                f"a rotary base of {local} in layers with a sliding window: only {model.rope_theta}"
            )


def _wrong_latents(model: Any, spec: GGUFSpec) -> Iterator[str]:
    """Yield the settings of multi-head latent attention with which llama.cpp would compute a
    different result.
    """
    layers, rope = model.num_hidden_layers, model.rope_scaling
    # llama.cpp does not read q_lora_rank. It uses these sizes to recognise models that do not have
    # it.
    lacks_rank = layers in (26, 27) or (layers == 48 and model.vocab_size == 128256)
    if model.q_lora_rank is not None and lacks_rank:
        yield f"q_lora_rank in {layers} layers: only null"
    if model.topk_group < model.n_group and spec.gating == "softmax":
        yield f"topk_group {model.topk_group} of n_group {model.n_group}: only all groups"
    if isinstance(rope, YarnRope) and rope.factor == 1 and rope_magnitude(rope, 1) != 1:
        yield f"attention_factor {rope.attention_factor} in yarn with factor 1: only 1"

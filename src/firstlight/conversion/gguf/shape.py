"""The shape and the rotary settings of a model in a GGUF file, and checks that refuse models which
llama.cpp does not compute."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from firstlight.errors import ModelError
from firstlight.models import FAMILIES
from firstlight.models.family import FamilySpec, GGUFSpec
from firstlight.models.rope import YarnRope, rope_magnitude, yarn_magnitude
from firstlight.weights.huggingface import config_from_hf

#: model_type of Hugging Face's config.json -> general.architecture
ARCHITECTURES = {
    name: family.spec.gguf.architecture
    for name, family in FAMILIES.items()
    if family.spec.gguf.architecture
}

#: GGUF's tensor of Llama 3's frequency divisors, `Rope.factors`.
ROPE_FACTORS = "rope_freqs.weight"

#: GGUF's tensors of LongRoPE's frequency divisors.
ROPE_FACTORS_LONG, ROPE_FACTORS_SHORT = "rope_factors_long.weight", "rope_factors_short.weight"

_LLAMA3_KEYS = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True)
class Rope:
    """Rotary positions.

    Attributes:
        theta: base of the frequencies.
        kind: "default", "linear", "llama3", "yarn" or "longrope".
        scaling: numbers of the kind: `factor` for "linear" and "yarn"; for "llama3" also
            `low_freq_factor`, `high_freq_factor` and `original_max_position_embeddings`.
    """

    theta: float
    kind: str
    scaling: Mapping[str, float]

    def factors(self, rotary_dim: int) -> Tensor | None:
        """Divisors of the frequencies in llama.cpp, fp32 [rotary_dim / 2]; None unless `kind` is
        "llama3".

        Source: the rescaling of Llama 3.1 (meta-llama/llama-models `apply_scaling`).
        """
        if self.kind != "llama3":
            return None
        factor, original = self.scaling["factor"], self.scaling[_LLAMA3_KEYS[2]]
        low, high = self.scaling[_LLAMA3_KEYS[0]], self.scaling[_LLAMA3_KEYS[1]]
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim
        wavelengths = 2 * math.pi * self.theta**exponents
        blend = ((original / wavelengths - low) / (high - low)).clamp(0, 1)
        return (1 / ((1 - blend) / factor + blend)).float()


@dataclass(frozen=True)
class ModelShape:
    """The sizes from which a model's tensors and their shapes follow.

    `family` is the entry of `model_type`. `rotary` is True for rotary positions, False for learned
    ones. `expert_size` is the width inside an expert; it and `num_experts` are 0 for dense models.
    `tied` is True if the head is the embedding and has no tensor of its own. `model` is the whole
    config.
    """

    model_type: str
    family: FamilySpec
    rotary: bool
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    num_experts: int
    num_experts_per_tok: int
    expert_size: int
    tied: bool
    model: Any

    @property
    def qkv_bias(self) -> bool:
        """True if queries, keys and values have biases."""
        return bool(getattr(self.model, "qkv_bias", True))

    @property
    def attention_bias(self) -> bool:
        """True if the attention's projections have biases; `FamilySpec.output_bias` can exempt the
        output projection."""
        return bool(getattr(self.model, "attention_bias", True))

    @property
    def mlp_bias(self) -> bool:
        """True if the MLP's projections have biases."""
        return bool(getattr(self.model, "mlp_bias", True))

    @property
    def qk_norm(self) -> str | None:
        """Kind of the norm of queries and keys, see `DecoderConfig.qk_norm`."""
        return getattr(self.model, "qk_norm", None)

    @property
    def parallel(self) -> bool:
        """True if attention and MLP read the same input (`use_parallel_residual`)."""
        return bool(getattr(self.model, "use_parallel_residual", False))

    @property
    def rotary_dim(self) -> int:
        """Rotated dimensions of each head; 0 for learned positions."""
        return int(getattr(self.model, "rotary_dim", 0))

    @property
    def cached_sizes(self) -> tuple[int, int, int]:
        """(heads, size of a key, size of a value) in llama.cpp's cache. Latent attention caches one
        head: the KV latent and the key's rotated part as the key, the KV latent as the value."""
        if self.family.gguf.layer == "latent":
            rank = self.model.kv_lora_rank
            return 1, rank + self.rotary_dim, rank
        return self.num_kv_heads, self.head_dim, self.head_dim

    @property
    def architecture(self) -> str:
        """The value of general.architecture."""
        return self.family.gguf.architecture


def require_known(config: Mapping[str, Any]) -> str:
    """The `model_type` of a config.json.

    Raises:
        ModelError: the family can't be put into GGUF.
    """
    model_type = str(config.get("model_type"))
    if model_type not in ARCHITECTURES:
        why = ": llama.cpp does not know it" if model_type in FAMILIES else ""
        raise ModelError(
            f"model_type '{model_type}' can't be put into GGUF{why} (can: "
            f"{', '.join(ARCHITECTURES)})"
        )
    return model_type


def shape_of(config: Mapping[str, Any], *, tied: bool) -> ModelShape:
    """The shape of the model of a Hugging Face config.json.

    Args:
        config: the config.json as an object.
        tied: True if the head is the embedding.

    Raises:
        ModelError: llama.cpp does not support the family or one of its settings, or a number is
            missing or invalid.
    """
    model_type = require_known(config)
    family, config_class = FAMILIES[model_type].spec, FAMILIES[model_type].config
    rotary = config_class.has_rotary
    fixed = {**family.gguf.fixed, **(_fixed_rotary(family) if rotary else {})}
    for key, values in fixed.items():
        value = config.get(key, family.hf_defaults.get(key, values[0]))
        if value not in values:
            raise ModelError(
                f"llama.cpp has no {model_type} with {key} {value!r}: only {values[0]!r} can be "
                "put into GGUF"
            )

    # Derived keys follow from other keys, and some families' config classes do not know them.
    config = {key: value for key, value in config.items() if key not in family.derived_keys}

    def size(ours: str, default: Any = None) -> int:
        return _positive(config, config_class.hf_names.get(ours, ours), default)

    hidden, heads = size("hidden_size"), size("num_attention_heads")
    head_dim = family.hf_defaults.get("head_dim") if "head_dim" not in config else None
    experts = expert_size = 0
    if "num_experts" in config_class.model_fields:
        # transformers 5 writes num_local_experts for most families.
        key = family.json_names.get("num_experts", "num_local_experts")
        experts = _positive(config, key, config.get("num_experts"))
        inside = "intermediate_size" if family.experts is None else family.experts.size
        expert_size = _positive(config, inside)
    width = (expert_size or None) if rotary else 4 * hidden
    sizes = {
        "vocab_size": size("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": size("intermediate_size", width),
        "num_layers": size("num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": size("num_key_value_heads", heads) if rotary else heads,
        "head_dim": size("head_dim", head_dim or hidden // heads) if rotary else hidden // heads,
        "max_positions": size("max_position_embeddings"),
        "num_experts": experts,
        "num_experts_per_tok": size("num_experts_per_tok") if experts else 0,
        "expert_size": expert_size,
    }
    _check_sizes(sizes, rotary=rotary)
    model = config_from_hf(config, "config.json")
    _check_computed(family, model)
    return ModelShape(
        model_type=model_type, family=family, rotary=rotary, tied=tied, model=model, **sizes
    )


def _fixed_rotary(family: FamilySpec) -> dict[str, tuple[Any, ...]]:
    """Settings that llama.cpp fixes for a rotary family; see `GGUFSpec.fixed`."""
    fixed: dict[str, tuple[Any, ...]] = {}
    # llama.cpp computes the tanh approximation of GELU, which is near the exact one: the
    # difference is a note (`gguf_notes`), not an error.
    if family.activation != "gelu":
        fixed[family.activation_key] = (family.activation,)
    if "partial_rotary_factor" not in family.own_keys:
        fixed["partial_rotary_factor"] = (1, None)
    return fixed


def _check_computed(family: FamilySpec, model: Any) -> None:
    """Refuse settings for which llama.cpp computes something else.

    Args:
        family: facts of the family.
        model: the model's config.

    Raises:
        ModelError: there is such a setting; the message names it.
    """
    faults = [*_wrong_layers(family, model), *_wrong_rotation(family, model)]
    if family.gguf.layer == "latent":
        faults += _wrong_latents(model, family.gguf)
    if faults:
        raise ModelError(
            f"llama.cpp has no {model.model_type} with {faults[0]} can be put into GGUF"
        )


def _wrong_layers(family: FamilySpec, model: Any) -> Iterator[str]:
    """Settings of layers and head for which llama.cpp computes something else."""
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
        yield "layer_types of another pattern: only the family's own"
    if spec.head == "tied" and not model.tie_word_embeddings:
        yield "a head of its own: only tie_word_embeddings true"
    if spec.exact_heads and model.head_dim * model.num_attention_heads != model.hidden_size:
        yield f"head_dim {model.head_dim}: only hidden_size / num_attention_heads"


def _wrong_rotation(family: FamilySpec, model: Any) -> Iterator[str]:
    """Settings of rotary positions for which llama.cpp computes something else."""
    if getattr(model, "rotary_dim", 0) % 2:
        yield f"{model.rotary_dim} rotated dimensions: only an even number"
    rope = getattr(model, "rope_scaling", None)
    if isinstance(rope, YarnRope):
        if rope.factor < 1:
            yield f"yarn of factor {rope.factor}: only 1 and more"
        if (rope.beta_fast, rope.beta_slow) != (32.0, 1.0):
            yield "yarn of other bounds: only beta_fast 32 and beta_slow 1"
    if getattr(model, "no_rope_layers", None) is not None:
        yield "no_rope_layers of another pattern: only the family's own"
    if family.gguf.has_windows and not family.gguf.has_window_base:
        local = model.rope_local_base_freq if "rope_local_base_freq" in family.own_keys else None
        if model.sliding_window is not None and local not in (None, model.rope_theta):
            yield f"a rotary base of {local} in layers with a window: only {model.rope_theta}"


def _wrong_latents(model: Any, spec: GGUFSpec) -> Iterator[str]:
    """Settings of latent attention for which llama.cpp computes something else."""
    layers, rope = model.num_hidden_layers, model.rope_scaling
    # By these sizes llama.cpp recognises models without q_lora_rank, and does not read the key.
    lacks_rank = layers in (26, 27) or (layers == 48 and model.vocab_size == 128256)
    if model.q_lora_rank is not None and lacks_rank:
        yield f"q_lora_rank in {layers} layers: only null"
    if model.topk_group < model.n_group and spec.gating == "softmax":
        yield f"topk_group {model.topk_group} of n_group {model.n_group}: only all groups"
    if isinstance(rope, YarnRope) and rope.factor == 1 and rope_magnitude(rope, 1) != 1:
        yield f"attention_factor {rope.attention_factor} in yarn of factor 1: only 1"


def _check_sizes(sizes: Mapping[str, int], *, rotary: bool) -> None:
    """Refuse combinations of sizes that are invalid or that llama.cpp refuses."""
    if sizes["num_heads"] % sizes["num_kv_heads"]:
        raise ModelError(
            f"config.json: num_attention_heads {sizes['num_heads']} is not a multiple of "
            f"num_key_value_heads {sizes['num_kv_heads']}"
        )
    if not rotary and sizes["hidden_size"] % sizes["num_heads"]:
        raise ModelError(
            f"config.json: n_embd {sizes['hidden_size']} is not a multiple of n_head "
            f"{sizes['num_heads']}"
        )
    if rotary and sizes["head_dim"] % 2:
        raise ModelError(f"config.json: head_dim {sizes['head_dim']} is odd: rotary positions pair")
    if sizes["num_experts_per_tok"] > sizes["num_experts"]:
        raise ModelError(
            f"config.json: num_experts_per_tok {sizes['num_experts_per_tok']} is more than the "
            f"{sizes['num_experts']} experts there are"
        )


def rope_of(config: Mapping[str, Any]) -> Rope:
    """The rotary settings of a config.json, under the keys of transformers 5 or 4.

    Raises:
        ModelError: llama.cpp lacks the kind of scaling for the family, or a number is missing.
    """
    model_type = str(config.get("model_type"))
    family = FAMILIES.get(model_type)
    usual_settings = {} if family is None else family.spec.rope.default
    # If a file has both keys, rope_scaling takes precedence, as in transformers.
    settings = config.get("rope_scaling") or config.get("rope_parameters") or usual_settings
    if not isinstance(settings, Mapping):
        raise ModelError(f"config.json: the rotary settings are {settings!r}, not an object")
    # Where each kind of layer has its own settings, those of layers without a window.
    settings = settings.get("full_attention", settings)
    # The config.json of early Llamas lacks rope_theta; that of other families always has it.
    usual = 10_000.0 if model_type == "llama" else None
    names = {} if family is None else family.spec.json_names
    usual = 10_000.0 if "rope_theta" in names else usual
    given = config.get(names.get("rope_theta", "rope_theta"))
    theta = _number(settings, "rope_theta", given or usual)
    kind = str(settings.get("rope_type") or settings.get("type") or "default")
    keys: dict[str, tuple[str, ...]] = {
        "default": (),
        "linear": ("factor",),
        "llama3": ("factor", *_LLAMA3_KEYS),
        "longrope": (),
        "yarn": ("factor",),
    }
    kind = kind if family is None else family.spec.rope.other_kinds.get(kind, kind)
    if kind not in (() if family is None else family.spec.gguf.rope_kinds):
        named = [n for n in ARCHITECTURES if kind in FAMILIES[n].spec.gguf.rope_kinds]
        can = f"; it can for {', '.join(named)}" if named else ""
        raise ModelError(f"rope type '{kind}' can't be put into GGUF for {model_type}{can}")
    scaling = {key: _number(settings, key) for key in keys[kind]}
    if kind == "llama3" and not scaling["low_freq_factor"] < scaling["high_freq_factor"]:
        raise ModelError("config.json: low_freq_factor must be less than high_freq_factor")
    return Rope(theta, kind, scaling)


def rope_factors(shape: ModelShape, rope: Rope) -> dict[str, Tensor]:
    """Tensors with divisors of the rotary frequencies, fp32 [rotary_dim / 2], by GGUF's names; none
    for kinds other than "llama3" and "longrope"."""
    if rope.kind == "longrope":
        scaling = shape.model.rope_scaling
        return {
            ROPE_FACTORS_LONG: torch.tensor(scaling.long_factor, dtype=torch.float32),
            ROPE_FACTORS_SHORT: torch.tensor(scaling.short_factor, dtype=torch.float32),
        }
    factors = rope.factors(shape.rotary_dim)
    return {} if factors is None else {ROPE_FACTORS: factors}


def yarn_factors(shape: ModelShape) -> tuple[float, float]:
    """YaRN's numbers for llama.cpp: (attn_factor, m).

    attn_factor is the factor of cos and sin. If m is 0, llama.cpp multiplies it by YaRN's own
    magnitude. m is a factor of DeepSeek's attention scores: llama.cpp multiplies the scores by the
    square of attn_factor and the square of 1 + 0.1 m ln(factor).
    """
    model, rope = shape.model, shape.model.rope_scaling
    wanted, own = rope_magnitude(rope, shape.max_positions), yarn_magnitude(rope.factor)
    if shape.family.gguf.layer != "latent" or rope.factor == 1:
        return wanted / own, 0.0
    scale = (model.attention_spec(0).scale or 1.0) * math.sqrt(model.head_dim)
    multiplier = (math.sqrt(scale) / wanted - 1) / (0.1 * math.log(rope.factor))
    return (wanted / own, 0.0) if abs(multiplier) < 1e-9 else (wanted, multiplier)


def _positive(config: Mapping[str, Any], key: str, default: Any = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise ModelError(f"config.json lacks {key}")
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**31:
        raise ModelError(f"config.json: {key} is {value!r}, not a positive whole number")
    return value


def _number(settings: Mapping[str, Any], key: str, default: Any = None) -> float:
    value = settings.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise ModelError(f"config.json: the rotary settings' {key} is {value!r}, no number above 0")
    return value

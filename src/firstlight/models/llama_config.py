"""The config of the Llama-like families, and its conversion from and to config.json. The
differences between the families are specified in `llama_families.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeAlias

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from firstlight.errors import ModelError
from firstlight.models.family import AttentionSpec, FamilyConfig, FamilySpec, not_a_key
from firstlight.models.llama_families import DENSE, LATER_KEYS, OWN_KEYS
from firstlight.models.rope import ROPE_KINDS, RopeScaling, check_rope

#: Maximum number of layers of a model.
MOST_LAYERS = 10_000

LayerType = Literal["full_attention", "sliding_attention"]

if TYPE_CHECKING:
    # Type checkers can't evaluate a Literal whose values are read from a table.
    DenseType: TypeAlias = str
else:
    DenseType = Literal[tuple(DENSE)]


class DecoderConfig(FamilyConfig):
    """Config keys of the Llama-like families. They have the same names and meanings as in Hugging
    Face's configs."""

    model_type: str
    vocab_size: int = Field(0, ge=0)
    """vocabulary size in tokens; 0 uses the tokenizer's."""
    hidden_size: int = Field(256, gt=0)
    """width of the residual stream."""
    intermediate_size: int = Field(0, ge=0)
    """inner width of the MLP; 0 uses 8/3 * hidden_size, rounded up to a multiple of 32 (4 *
    hidden_size in gpt_neox and nanochat). In models with experts, it applies to layers without
    experts."""
    num_hidden_layers: int = Field(4, gt=0, le=MOST_LAYERS)
    """number of layers."""
    num_attention_heads: int = Field(4, gt=0)
    """number of query heads."""
    num_key_value_heads: int = Field(0, ge=0)
    """number of key and value heads; 0 uses num_attention_heads."""
    head_dim: int = Field(0, ge=0)
    """number of dimensions per head, an even number; 0 uses hidden_size / num_attention_heads. If
    head_dim is set, hidden_size does not need to be a multiple of num_attention_heads (except in
    llama, arcee, gemma2, gemma3_text, stablelm)."""
    max_position_embeddings: int = Field(1024, gt=0)
    """maximum sequence length in tokens."""
    rms_norm_eps: float = Field(1e-5, gt=0)
    """term added to the mean square in RMSNorm, and to the variance in LayerNorm (stablelm,
    gpt_neox)."""
    rope_theta: float = Field(10_000.0, gt=0)
    """base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """rescaling of the rotary frequencies: null (no rescaling), {rope_type: linear, factor},
    {rope_type: llama3, factor, low_freq_factor, high_freq_factor,
    original_max_position_embeddings}, {rope_type: dynamic, factor}, {rope_type: yarn, factor,
    original_max_position_embeddings} or {rope_type: longrope, short_factor, long_factor,
    original_max_position_embeddings}."""
    attention_bias: bool = False
    """biases on the attention projections (except the output projection in glm4 and stablelm)."""
    mlp_bias: bool = False
    """biases on the projections of the MLP (llama, granite, smollm3, arcee)."""
    sliding_window: int | None = Field(None, gt=0)
    """size of the sliding window: the number of tokens that a token attends to, including itself;
    with null, a token attends to all earlier tokens. llama, granite, olmo2, arcee, glm4, stablelm
    and gpt_neox do not support a window."""
    max_window_layers: int = Field(0, ge=0)
    """number of initial layers without the sliding window (qwen2, qwen3)."""
    tie_word_embeddings: bool = False
    """use the token embedding as the weight of the head."""
    initializer_range: float = Field(0.02, gt=0, le=1)
    """standard deviation of the initial weights."""
    embedding_multiplier: float = Field(1.0, gt=0)
    """factor applied to the embeddings (granite)."""
    attention_multiplier: float | None = Field(None, gt=0)
    """factor applied to attention scores; null uses 1 / sqrt(head_dim) (granite)."""
    residual_multiplier: float = Field(1.0, gt=0)
    """factor applied to the outputs of attention and of the MLP before they are added to the
    residual stream (granite)."""
    logits_scaling: float = Field(1.0, gt=0)
    """divisor of the logits (granite)."""

    layer_types: list[LayerType] | None = None
    """list with "full_attention" or "sliding_attention" for each layer. null uses the default of
    the family. In gemma2, olmo3 and gemma3_text, every second, fourth and sixth layer has full
    attention. In smollm3, layers without rotary positions have the sliding window. In qwen2 and
    qwen3, all layers after the first max_window_layers have it."""
    no_rope_layers: list[int] | None = None
    """list with a 1 for each layer with rotary positions and a 0 for each layer without them; with
    null, every fourth layer has no rotary positions (smollm3)."""
    partial_rotary_factor: float | None = Field(None, gt=0, le=1)
    """fraction of each head that is rotated; null uses 1 in phi3, 0.5 in glm4, and 0.25 in stablelm
    and gpt_neox."""
    rope_local_base_freq: float | None = Field(None, gt=0)
    """base of the rotary frequencies in layers with a sliding window (olmo3, gemma3_text); null
    uses rope_theta."""
    query_pre_attn_scalar: int | None = Field(None, gt=0)
    """number by whose square root attention scores are divided; null uses head_dim (gemma2,
    gemma3_text)."""
    attn_logit_softcapping: float | None = Field(None, gt=0)
    """soft cap c of the attention scores s, which become c tanh(s / c); null disables the cap
    (gemma2)."""
    final_logit_softcapping: float | None = Field(None, gt=0)
    """soft cap c of the logits z, which become c tanh(z / c); null disables the cap (gemma2,
    gemma3_text)."""
    llama_4_scaling_beta: float | None = Field(None, gt=0)
    """factor b of the growth of queries beyond the original context n of rope_scaling: the query at
    position p is multiplied by 1 + b ln(1 + floor(p / n)); null disables it (ministral3)."""
    qk_layernorm: bool = False
    """normalise each query and key head with a separate LayerNorm (stablelm)."""
    use_parallel_residual: bool = False
    """compute attention and the MLP in parallel, from the same residual stream (stablelm,
    gpt_neox)."""

    @model_serializer(mode="wrap")
    def _leave_later_keys_out(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # The `LATER_KEYS` are omitted from the dumped section of families that do not have them.
        # For families that do have them, a value of None is omitted if it is the default. The
        # section is then the same as before these keys were added, so that the hash of a base model
        # matches the hash stored in existing LoRA runs.
        own, fields = self.family.own_keys, type(self).model_fields
        return {
            name: value
            for name, value in dump(self).items()
            if name not in LATER_KEYS
            or (name in own and (value is not None or fields[name].default is not None))
        }

    @classmethod
    def usual_width(cls, hidden_size: int) -> int:
        """Return the default inner width of the MLP. With this width, the three matrices of SwiGLU
        have about as many weights as the two matrices of a plain MLP of width 4 * hidden_size."""
        return math.ceil(hidden_size * 8 / 3 / 32) * 32

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, values: Any) -> Any:
        return cls._filled_in(dict(values)) if isinstance(values, dict) else values

    @classmethod
    def _filled_in(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Return the keys with all missing, null and 0 values replaced by values derived from other
        keys.

        Raises:
            ValueError: hidden_size is not a multiple of num_attention_heads, although the family or
                a missing head_dim requires it.
        """
        spec = cls.families.get(values.get("model_type", cls.default_type()), FamilySpec(""))
        hidden, heads = values.get("hidden_size", 256), values.get("num_attention_heads", 4)
        if isinstance(hidden, int) and isinstance(heads, int) and hidden > 0 and heads > 0:
            # transformers rejects a Llama model with such a hidden_size even if head_dim is
            # specified.
            if hidden % heads and (spec.divides_width or not values.get("head_dim")):
                advice = "model_type mistral with head_dim" if spec.divides_width else "head_dim"
                raise ValueError(
                    f"hidden_size {hidden} must be a multiple of num_attention_heads {heads} "
                    f"(or set {advice})"
                )
            values["head_dim"] = values.get("head_dim") or hidden // heads
            values["num_key_value_heads"] = values.get("num_key_value_heads") or heads
            values["intermediate_size"] = values.get("intermediate_size") or cls.usual_width(hidden)
        _fill_in_own_keys(values, spec)
        return values

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.require_multiple("num_attention_heads", of="num_key_value_heads")
        heads = self.num_attention_heads
        derived = {"head_dim": self.hidden_size // heads, "num_key_value_heads": heads}
        for name in self.family.derived_keys:
            if getattr(self, name) != derived[name]:
                raise ValueError(
                    f"{name} {getattr(self, name)} must be {derived[name]} in {self.model_type}"
                )
        if self.head_dim % 2 and self.rotary_dim == self.head_dim:
            raise ValueError(f"head_dim {self.head_dim} must be even for rotary positions")
        # Keys of other families must have their default values. This family's config.json does not
        # contain these keys, so an exported config would describe a different model.
        for name in sorted(OWN_KEYS - set(self.family.own_keys)):
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(not_a_key(name, self.model_type))
        if self.max_window_layers and self.sliding_window is None:
            raise ValueError("max_window_layers has no effect without sliding_window: set both")
        for name in ("layer_types", "no_rope_layers"):
            listed = getattr(self, name)
            if listed is not None and len(listed) != self.num_hidden_layers:
                raise ValueError(
                    f"{name} has {len(listed)} entries, but num_hidden_layers is "
                    f"{self.num_hidden_layers}"
                )
        self._check_rope()
        return self

    @model_validator(mode="after")
    def _check_visited(self) -> Self:
        if self.visited_experts > self.expert_count:
            raise ValueError(
                f"num_experts_per_tok {self.visited_experts} is more than "
                f"num_experts {self.expert_count}"
            )
        return self

    def _check_rope(self) -> None:
        kinds, scaling = self.family.rope.kinds, self.rope_scaling
        if scaling is not None and kinds and scaling.rope_type not in kinds:
            raise ValueError(
                f"rope_scaling: {self.model_type} does not support rope_type {scaling.rope_type} "
                f"(supported: {', '.join(kinds)})"
            )
        if self.rotary_dim < 2:
            raise ValueError(
                f"partial_rotary_factor {self.partial_rotary_factor} of head_dim {self.head_dim} "
                "leaves fewer than two dimensions to rotate"
            )
        known = hasattr(scaling, "original_max_position_embeddings")
        if self.llama_4_scaling_beta is not None and not known:
            raise ValueError(
                "llama_4_scaling_beta requires rope_scaling with original_max_position_embeddings: "
                "set both, or neither"
            )
        check_rope(scaling, self.rotary_dim, self.rope_theta, nested=self.family.rope.nested)

    @property
    def qkv_bias(self) -> bool:
        """True if the query, key and value projections have biases."""
        return self.attention_bias or self.family.qkv_bias

    @property
    def output_bias(self) -> bool:
        """True if the output projection of attention has a bias."""
        return self.attention_bias and self.family.output_bias

    @property
    def qk_norm(self) -> str | None:
        """Kind of normalisation of queries and keys: the value of `FamilySpec.qk_norm`, or "own" if
        each head has a norm with separate weights."""
        return "own" if self.qk_layernorm else self.family.qk_norm

    @property
    def indivisible(self) -> str:
        """Reason why tensor parallelism can't shard this model's layers; "" if they can be
        sharded."""
        if self.qk_layernorm:
            return "each head of queries and keys has a separate norm (qk_layernorm)"
        return super().indivisible

    @property
    def rotary_dim(self) -> int:
        """Number of rotated dimensions of each head (R). The first R dimensions are rotated."""
        return int(self.head_dim * (self.partial_rotary_factor or 1.0))

    @property
    def logit_softcap(self) -> float | None:
        """See `FamilyConfig.logit_softcap`."""
        return self.final_logit_softcapping

    def attention_spec(self, layer: int) -> AttentionSpec:
        """See `FamilyConfig.attention_spec`."""
        scale = self.attention_multiplier
        if self.query_pre_attn_scalar is not None:
            scale = self.query_pre_attn_scalar**-0.5
        window = self.sliding_window if self.has_window(layer) else None
        rope: int | None = int(window is not None and self.rope_local_base_freq is not None)
        if not self.has_rope(layer):
            rope = None
        return AttentionSpec(window, scale=scale, softcap=self.attn_logit_softcapping, rope=rope)

    def has_rope(self, layer: int) -> bool:
        """Return True if a layer (counted from 0) has rotary positions."""
        if self.no_rope_layers is not None:
            return bool(self.no_rope_layers[layer])
        every = self.family.no_rope_every
        return not every or (layer + 1) % every != 0

    def has_window(self, layer: int) -> bool:
        """Return True if a layer (counted from 0) has the sliding window."""
        if self.sliding_window is None:
            return False
        if self.layer_types is not None:
            return self.layer_types[layer] == "sliding_attention"
        if self.family.no_rope_every:
            return not self.has_rope(layer)
        every = self.family.full_attention_every
        return (layer + 1) % every != 0 if every else layer >= self.max_window_layers

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Create the config from a Hugging Face `config.json`.

        Raises:
            ModelError: the config has a setting that would change the outputs and is not
                implemented.
        """
        kind = str(config.get("model_type", cls.default_type()))
        values = values_from_json(cls.families[kind], tuple(cls.model_fields), config)
        return cls(**{**values, "model_type": kind})

    def to_hf(self) -> dict[str, Any]:
        """Return the Hugging Face `config.json` of this model."""
        values = self.model_dump(exclude={"rope_theta", "rope_scaling", *OWN_KEYS})
        for name in self.family.derived_keys:
            del values[name]
        return config_json(self.family, self, values)


def _fill_in_own_keys(values: dict[str, Any], spec: FamilySpec) -> None:
    """Derive unset keys from other keys, and remove lists that repeat the family's default, so that
    equal models have equal configs. Values of the wrong type are ignored here, because field
    validation rejects them later."""
    own, size = spec.own_keys, values.get("head_dim")
    if isinstance(size, int) and size > 0:
        for name, usual in (("attention_multiplier", size**-0.5), ("query_pre_attn_scalar", size)):
            if name in own and values.get(name) is None:
                values[name] = usual
    if "partial_rotary_factor" in own and values.get("partial_rotary_factor") is None:
        values["partial_rotary_factor"] = spec.rope.partial_factor
    if "rope_local_base_freq" in own and values.get("rope_local_base_freq") is None:
        values["rope_local_base_freq"] = values.get("rope_theta", 10_000.0)
    layers = values.get("num_hidden_layers")
    if spec.has_default_types and isinstance(layers, int) and 0 < layers <= MOST_LAYERS:
        _open_default_lists(values, spec)


def _open_default_lists(values: dict[str, Any], spec: FamilySpec) -> None:
    """Remove `layer_types` and `no_rope_layers` if they repeat the family's default, and
    `sliding_window` if no layer has the window."""
    layers = range(values["num_hidden_layers"])
    every = spec.no_rope_every or spec.full_attention_every
    is_special = [(i + 1) % every == 0 for i in layers]
    rotated = [int(not special) for special in is_special]
    full = is_special
    if spec.no_rope_every:
        if values.get("no_rope_layers") == rotated:
            del values["no_rope_layers"]
        full = [bool(has) for has in values.get("no_rope_layers") or rotated]
    usual = ["full_attention" if is_full else "sliding_attention" for is_full in full]
    if values.get("layer_types") == usual:
        del values["layer_types"]
    kinds = values.get("layer_types") or usual
    if values.get("sliding_window") is None or "sliding_attention" not in kinds:
        values |= {"layer_types": None, "sliding_window": None}


class LlamaConfig(DecoderConfig):
    """Configuration of a dense model."""

    families: ClassVar[Mapping[str, FamilySpec]] = DENSE
    tensor_parallel_sizes = ("num_key_value_heads", "intermediate_size")
    has_pipeline = True

    model_type: DenseType = "llama"
    """the model family: one of llama, mistral, qwen2, qwen3, granite, smollm3, phi3, olmo2, olmo3,
    arcee, glm4, gemma2, gemma3_text, stablelm, ministral3."""


# Read and write config.json, in the formats of transformers 4 and 5

#: Keys for which null in config.json is a valid value. For all other keys, null means the default.
_NULLABLE = ("attn_logit_softcapping", "final_logit_softcapping")

#: Settings read only by `_windows_from_json` and `_rope_from_json`.
_READ_APART = ("sliding_window", "max_window_layers", "layer_types", "partial_rotary_factor")

_SAME_ACTIVATION = {"swish": "silu"}


def values_from_json(
    spec: FamilySpec, names: Sequence[str], config: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the values for the fields of a config class, read from a config.json.

    Args:
        spec: specification of the family.
        names: fields of the config class.
        config: the content of config.json.

    Raises:
        ModelError: the config has a setting that would change the outputs and is not implemented.
    """
    _check_built(spec, config, has_choice=spec.activation_key in names)
    # Keys of config.json are renamed to the field names of the config class. If config.json
    # contains a key under both names, transformers reads the family's name.
    own = {ours: config[theirs] for ours, theirs in spec.json_names.items() if theirs in config}
    config = {**{key: value for key, value in config.items() if key not in spec.json_names}, **own}
    values = dict(spec.hf_defaults)
    common = set(names) - {"rope_theta", "rope_scaling", *OWN_KEYS, *spec.derived_keys}
    given = {ours: ours for ours in common if ours in config}
    if "num_experts" in names and "num_local_experts" in config:
        # Mixtral's config.json, and transformers 5 for all families, use a different key for the
        # number of experts.
        given["num_experts"] = "num_local_experts"
    for ours, theirs in given.items():
        if config[theirs] is not None:
            values[ours] = config[theirs]
        elif ours in ("num_key_value_heads", "head_dim"):
            values.pop(ours, None)  # null means that the value is derived from the other sizes
    for name in set(spec.own_keys) - set(_READ_APART):
        if config.get(name) is not None or (name in _NULLABLE and name in config):
            values[name] = config[name]
    layers, every = values["num_hidden_layers"], config.get("no_rope_layer_interval")
    # The types are checked here, because lists of this length are created before the fields are
    # validated.
    for key, value in (("num_hidden_layers", layers), ("no_rope_layer_interval", every or 1)):
        if type(value) is not int:
            raise ModelError(f"{key} is {value!r}, but must be an integer: correct the file")
    if layers > MOST_LAYERS:
        raise ModelError(f"num_hidden_layers {layers} is more than {MOST_LAYERS:,}")
    if spec.no_rope_every and every and values.get("no_rope_layers") is None:
        values["no_rope_layers"] = [int((i + 1) % every != 0) for i in range(layers)]
    if values.get("no_rope_layers") is not None:
        # transformers accepts a list with more entries than layers.
        values["no_rope_layers"] = list(values["no_rope_layers"])[:layers]
    values |= _windows_from_json(spec, config, values)
    return {**values, **_rope_from_json(spec, config, values)}


def _check_built(spec: FamilySpec, config: Mapping[str, Any], *, has_choice: bool) -> None:
    """Raise an error for an activation or a kind of attention that is not implemented. If
    `has_choice` is True, the config class has a key for the activation, so the activation is not
    checked."""
    activation = config.get(spec.activation_key) or spec.activation
    if not has_choice and _SAME_ACTIVATION.get(activation, activation) != spec.activation:
        raise ModelError(
            f"{spec.activation_key} '{activation}' is not supported: only '{spec.activation}' is"
        )
    if config.get("use_bidirectional_attention"):
        raise ModelError("use_bidirectional_attention is not supported: only causal attention is")


def _windows_from_json(
    spec: FamilySpec, config: Mapping[str, Any], values: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the values of `sliding_window`, `max_window_layers` and `layer_types` for a
    config.json."""
    if "sliding_window" not in spec.own_keys:
        return {}
    window = config.get("sliding_window", spec.hf_defaults.get("sliding_window"))
    kinds = config.get("layer_types")
    if spec.has_window_switch:
        # SmolLM3's class in transformers reads use_sliding_window only if layer_types is missing.
        is_on = config.get("use_sliding_window") or (spec.no_rope_every and kinds is not None)
        if not is_on:
            return {}
        window = config.get("sliding_window", spec.hf_defaults.get("sliding_window", 4096))
    period = config.get(spec.period_key) if spec.period_key else None
    layers = values["num_hidden_layers"]
    if kinds is None and isinstance(period, int) and period > 0:
        kinds = [
            "sliding_attention" if (i + 1) % period else "full_attention" for i in range(layers)
        ]
    if "max_window_layers" not in spec.own_keys or window is None:
        listed = {} if "layer_types" not in spec.own_keys or kinds is None else list(kinds)
        return {"sliding_window": window, **({"layer_types": listed} if listed else {})}
    first = config.get("max_window_layers", 28)
    if kinds is not None:
        kinds = list(kinds)
        first = kinds.count("full_attention")
        rest = len(kinds) - first
        if kinds != ["full_attention"] * first + ["sliding_attention"] * rest:
            return {"sliding_window": window, "layer_types": kinds}
        if len(kinds) != layers:
            raise ModelError(f"layer_types has {len(kinds)} entries for {layers} layers")
    if first >= layers:
        return {}
    return {"sliding_window": window, "max_window_layers": first}


def _rope_from_json(
    spec: FamilySpec, config: Mapping[str, Any], values: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the values of `rope_theta`, `rope_scaling` and all other keys that configure rotary
    positions."""
    # transformers 5 writes a single object, rope_parameters. transformers 4 writes two keys,
    # rope_theta and rope_scaling. If config.json contains both forms, transformers reads the two
    # keys.
    settings = config.get("rope_scaling") or config.get("rope_parameters") or spec.rope.default
    found: dict[str, Any] = {}
    if spec.rope.nested:
        nested = config.get("rope_parameters") or {}
        settings = {**(nested.get("full_attention") or {}), **(config.get("rope_scaling") or {})}
        local = nested.get("sliding_attention") or {}
        if local.get("rope_type", "default") != "default":
            raise ModelError(
                f"rope type '{local['rope_type']}' of layers with a sliding window is not "
                "supported: only default is"
            )
        usual = spec.hf_defaults["rope_local_base_freq"]
        if spec.rope.local_theta_key:
            usual = config.get(spec.rope.local_theta_key, usual)
        found["rope_local_base_freq"] = float(local.get("rope_theta", usual))
    rope = dict(settings)
    theta = rope.pop("rope_theta", config.get("rope_theta", values.get("rope_theta", 10_000.0)))
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    rope.pop("type", None)
    kind = spec.rope.other_kinds.get(kind, kind)
    if spec.rope.nested:
        # transformers looks for the key truncate one level above the settings of each kind of
        # layer. No config.json contains the key at that level, so its value has no effect.
        rope.pop("truncate", None)
    part = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if "partial_rotary_factor" in spec.own_keys:
        found["partial_rotary_factor"] = None if part is None else float(part)
    elif part not in (None, 1.0):
        raise ModelError(
            "partial_rotary_factor: this family does not support rotating only a part of each head"
        )
    if "llama_4_scaling_beta" in spec.own_keys:
        found["llama_4_scaling_beta"] = rope.get("llama_4_scaling_beta") or None
    scaling = (
        None if kind == "default" else _scaling_from_json(kind, rope, spec, config, values=values)
    )
    return {
        **found,
        "rope_theta": 10_000.0 if theta is None else float(theta),
        "rope_scaling": scaling,
    }


def _scaling_from_json(
    kind: str,
    rope: Mapping[str, Any],
    spec: FamilySpec,
    config: Mapping[str, Any],
    *,
    values: Mapping[str, Any],
) -> dict[str, Any]:
    """Convert the rotary settings of a config.json to the value of `rope_scaling` in a recipe. The
    kind of scaling must not be "default".

    Raises:
        ModelError: the kind of scaling is not supported.
    """
    if kind not in ROPE_KINDS:
        raise ModelError(
            f"rope type '{kind}' is not supported (supported: default, {', '.join(ROPE_KINDS)})"
        )
    fields = ROPE_KINDS[kind].model_fields
    # Keys that belong to other kinds of scaling are ignored, as in transformers.
    scaling = {name: rope[name] for name in fields if rope.get(name) is not None}
    scaling["rope_type"] = kind
    positions = config.get("max_position_embeddings", values.get("max_position_embeddings"))
    if "original_max_position_embeddings" in fields:
        # As in transformers, a key at the top level of config.json takes precedence over the same
        # key in the rotary settings.
        apart = config.get("original_max_position_embeddings") or spec.rope.original_positions
        original = apart or scaling.get("original_max_position_embeddings") or positions
        scaling["original_max_position_embeddings"] = original
        if kind == "yarn" and "factor" not in scaling and positions and original:
            scaling["factor"] = positions / original
    return scaling


def with_query_growth(
    scaling: Mapping[str, Any] | None, beta: float | None, positions: int
) -> dict[str, Any]:
    """Return the rotary settings of a Ministral 3 model in config.json. transformers requires both
    numbers of the growth of queries, even if they have no effect.

    Args:
        scaling: rotary settings without the growth of queries, or None.
        beta: value of `llama_4_scaling_beta`.
        positions: maximum number of positions of the model.
    """
    growth = {"llama_4_scaling_beta": beta or 0.0}
    usual = {"rope_type": "default", "original_max_position_embeddings": positions}
    return {**usual, **(scaling or {}), **growth}


def config_json(
    spec: FamilySpec, model: DecoderConfig, values: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the Hugging Face `config.json` of a model.

    Args:
        spec: specification of the family.
        model: config of the model.
        values: values of the config.json keys that all families share.
    """
    own = {name: getattr(model, name) for name in spec.own_keys}
    if spec.has_window_switch:
        own["use_sliding_window"] = model.sliding_window is not None
    if "max_window_layers" in own and model.sliding_window is None:
        own["max_window_layers"] = model.num_hidden_layers
    layers = range(model.num_hidden_layers)
    if "layer_types" in own and (spec.has_default_types or model.layer_types is not None):
        own["layer_types"] = [
            "sliding_attention" if model.has_window(i) else "full_attention" for i in layers
        ]
        if spec.full_attention_every and model.sliding_window is None:
            # transformers always creates a mask with a window, even if no layer uses it, so the
            # window must have a value.
            own["sliding_window"] = model.max_position_embeddings
    elif "layer_types" in own:
        del own["layer_types"]
    if "no_rope_layers" in own:
        own["no_rope_layers"] = [int(model.has_rope(i)) for i in layers]
    scaling = model.rope_scaling.model_dump(exclude_none=True) if model.rope_scaling else None
    rope: dict[str, Any] = {"rope_theta": model.rope_theta, **(scaling or {"rope_type": "default"})}
    if "partial_rotary_factor" in own:
        rope["partial_rotary_factor"] = own["partial_rotary_factor"]
    if "llama_4_scaling_beta" in own:
        scaling = with_query_growth(
            scaling, own.pop("llama_4_scaling_beta"), model.max_position_embeddings
        )
        rope |= scaling
    if spec.rope.original_positions and scaling:
        own["original_max_position_embeddings"] = scaling["original_max_position_embeddings"]
    if spec.rope.nested:
        local = {"rope_type": "default", "rope_theta": own.pop("rope_local_base_freq")}
        if spec.rope.local_theta_key:
            own[spec.rope.local_theta_key] = local["rope_theta"]
        rope = {"full_attention": rope, "sliding_attention": local}
    content = {
        "architectures": [spec.architecture],
        **values,
        **own,
        spec.activation_key: spec.activation,
        "attention_dropout": 0.0,
        # Some config classes of transformers have a default token id, which can be beyond the
        # vocabulary.
        "pad_token_id": None,
        # transformers 5 reads rope_parameters. transformers 4 and other programs read the keys
        # rope_theta and rope_scaling. Therefore, both forms are written.
        "rope_parameters": rope,
        "rope_theta": model.rope_theta,
        "rope_scaling": scaling,
    }
    return {spec.json_names.get(key, key): value for key, value in content.items()}

"""Shapes of the Llama-like families: Llama, Mistral, Qwen2, Qwen3, Granite, and with experts
Mixtral and Qwen3-MoE. They are one architecture; what differs between them stands in
`family.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeAlias

from pydantic import (
    BaseModel,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from firstlight.errors import ModelError
from firstlight.models.family import (
    DENSE,
    HF_DEFAULTS,
    MULTIPLIERS,
    OWN_KEYS,
    ROUTED,
    AttentionSpec,
    FamilyConfig,
    FamilySpec,
)
from firstlight.models.ops import RopeScaling

#: What each kind of rotary scaling reads.
_ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        *("factor", "low_freq_factor", "high_freq_factor"),
        "original_max_position_embeddings",
    ),
}

if TYPE_CHECKING:
    # A type checker can not see which names the tables have.
    DenseType: TypeAlias = str
    RoutedType: TypeAlias = str
else:
    DenseType, RoutedType = Literal[tuple(DENSE)], Literal[tuple(ROUTED)]


class _DecoderConfig(FamilyConfig):
    """The keys that all families of this file share; names and meanings are Hugging Face's."""

    #: The family of a config that doesn't name it.
    default_type: ClassVar[str] = "llama"

    model_type: str
    vocab_size: int = Field(0, ge=0)
    """tokens the model knows; 0 takes the tokenizer's."""
    hidden_size: int = Field(256, gt=0)
    """width of the residual stream."""
    intermediate_size: int = Field(0, ge=0)
    """width inside the MLP; 0 is 8/3 hidden_size, rounded up to a multiple of 32. In models with
    experts: of the layers without experts."""
    num_hidden_layers: int = Field(4, gt=0, le=10_000)
    """number of layers."""
    num_attention_heads: int = Field(4, gt=0)
    """query heads."""
    num_key_value_heads: int = Field(0, ge=0)
    """key and value heads; 0 is as many as query heads."""
    head_dim: int = Field(0, ge=0)
    """size of a head, even; 0 is hidden_size / num_attention_heads. Where it is given, hidden_size
    need not be a multiple of num_attention_heads (except in llama)."""
    max_position_embeddings: int = Field(1024, gt=0)
    """the context limit in tokens."""
    rms_norm_eps: float = Field(1e-5, gt=0)
    """term added to the mean square in RMSNorm."""
    rope_theta: float = Field(10_000.0, gt=0)
    """base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """null, {rope_type: linear, factor} or {rope_type: llama3, factor, low_freq_factor,
    high_freq_factor, original_max_position_embeddings}."""
    attention_bias: bool = False
    """biases on all the attention's projections (llama, qwen3, granite, qwen3_moe)."""
    mlp_bias: bool = False
    """biases on the MLP's projections (llama, granite)."""
    sliding_window: int | None = Field(None, gt=0)
    """a token sees so many tokens, itself included; null is all (not llama, granite)."""
    max_window_layers: int = Field(0, ge=0)
    """the first so many layers see all tokens all the same (qwen2, qwen3)."""
    tie_word_embeddings: bool = False
    """the head is the embedding, transposed."""
    initializer_range: float = Field(0.02, gt=0, le=1)
    """standard deviation of the initial weights."""
    embedding_multiplier: float = Field(1.0, gt=0)
    """factor of the embeddings (granite)."""
    attention_multiplier: float | None = Field(None, gt=0)
    """factor of the attention's scores; null is 1 / sqrt(head_dim) (granite)."""
    residual_multiplier: float = Field(1.0, gt=0)
    """factor of what attention and MLP add to the residual stream (granite)."""
    logits_scaling: float = Field(1.0, gt=0)
    """divisor of the logits (granite)."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in_multiplier(cls, values: Any) -> Any:
        # Runs after `_fill_in`, which works head_dim out.
        spec = cls.families.get(values.get("model_type", cls.default_type))
        if spec is None or "attention_multiplier" not in spec.own_keys:
            return values
        size = values.get("head_dim")
        # A size that is no number is refused by its own field.
        if values.get("attention_multiplier") is None and isinstance(size, int) and size > 0:
            values["attention_multiplier"] = size**-0.5
        return values

    @model_serializer(mode="wrap")
    def _leave_multipliers_out(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # The sections of other families stay what they were before there were these keys, and so
        # do the hashes that runs with `lora` know their bases by.
        left_out = set(MULTIPLIERS) - set(self.family.own_keys)
        return {name: value for name, value in dump(self).items() if name not in left_out}

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        values = dict(values)
        hidden, heads = values.get("hidden_size", 256), values.get("num_attention_heads", 4)
        if isinstance(hidden, int) and isinstance(heads, int) and hidden > 0 and heads > 0:
            # transformers refuses a Llama folder of such a width even where head_dim is given.
            is_llama = values.get("model_type", cls.default_type) == "llama"
            if hidden % heads and (is_llama or not values.get("head_dim")):
                advice = "model_type mistral with head_dim" if is_llama else "head_dim"
                raise ValueError(
                    f"hidden_size {hidden} must be a multiple of num_attention_heads {heads} "
                    f"(or give {advice})"
                )
            values["head_dim"] = values.get("head_dim") or hidden // heads
            values["num_key_value_heads"] = values.get("num_key_value_heads") or heads
            values["intermediate_size"] = (
                values.get("intermediate_size") or math.ceil(hidden * 8 / 3 / 32) * 32
            )
        return values

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} must be a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} must be even for rotary positions")
        for name in sorted(OWN_KEYS - set(self.family.own_keys)):
            if getattr(self, name) != type(self).model_fields[name].default:
                families = (DENSE | ROUTED).items()
                has = ", ".join(kind for kind, spec in families if name in spec.own_keys)
                raise ValueError(f"{name} is not a key of {self.model_type} models (of {has})")
        if self.max_window_layers and self.sliding_window is None:
            raise ValueError("max_window_layers means nothing without sliding_window")
        return self

    @property
    def qkv_bias(self) -> bool:
        """Whether the query, key and value projections have biases."""
        return self.attention_bias or self.family.qkv_bias

    def attention_spec(self, layer: int) -> AttentionSpec:
        """Attention of a layer, counted from 0."""
        window = self.sliding_window if layer >= self.max_window_layers else None
        return AttentionSpec(window, scale=self.attention_multiplier)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """From a Hugging Face `config.json`.

        Raises:
            ModelError: it asks for something that would change the outputs and isn't built.
        """
        if config.get("hidden_act", "silu") not in ("silu", "swish"):
            raise ModelError(
                f"hidden_act '{config['hidden_act']}' is not supported: only 'silu' is"
            )
        kind = str(config.get("model_type", cls.default_type))
        spec = cls.families[kind]
        values = {**HF_DEFAULTS, **spec.hf_defaults}
        names = set(cls.model_fields) - {"rope_theta", "rope_scaling", *OWN_KEYS}
        given = {ours: ours for ours in names if ours in config} | _other_names(cls, config)
        for ours, theirs in given.items():
            if config[theirs] is not None:
                values[ours] = config[theirs]
            elif ours in ("num_key_value_heads", "head_dim"):
                values.pop(ours, None)  # null: worked out from the other sizes
        own = set(spec.own_keys) - {"sliding_window", "max_window_layers"}
        values |= {name: config[name] for name in own if config.get(name) is not None}
        values |= _windows_from_hf(spec, config, values)
        return cls(**{**values, **_rope_from_hf(config, values), "model_type": kind})

    def to_hf(self) -> dict[str, Any]:
        """The Hugging Face `config.json` of this model."""
        values = self.model_dump(exclude={"rope_theta", "rope_scaling", *OWN_KEYS})
        own = {name: getattr(self, name) for name in self.family.own_keys}
        if self.family.has_window_switch:
            own["use_sliding_window"] = self.sliding_window is not None
        if "max_window_layers" in own and self.sliding_window is None:
            own["max_window_layers"] = self.num_hidden_layers
        scaling = self.rope_scaling.model_dump() if self.rope_scaling else None
        return {
            "architectures": [self.family.architecture],
            **values,
            **own,
            "hidden_act": "silu",
            "attention_dropout": 0.0,
            # Both spellings: transformers 5 reads the first, 4 and other programs the rest.
            "rope_parameters": {
                "rope_theta": self.rope_theta,
                **(scaling or {"rope_type": "default"}),
            },
            "rope_theta": self.rope_theta,
            "rope_scaling": scaling,
        }


def _other_names(cls: type[BaseModel], config: Mapping[str, Any]) -> dict[str, str]:
    """Mixtral's files, and transformers 5 for all, call the number of experts otherwise."""
    if "num_experts" in cls.model_fields and "num_local_experts" in config:
        return {"num_experts": "num_local_experts"}
    return {}


def _windows_from_hf(
    spec: FamilySpec, config: Mapping[str, Any], values: Mapping[str, Any]
) -> dict[str, Any]:
    """`sliding_window` and `max_window_layers` of a config.json."""
    if "sliding_window" not in spec.own_keys:
        return {}
    if not spec.has_window_switch:
        window = config.get("sliding_window", spec.hf_defaults.get("sliding_window"))
        return {"sliding_window": window}
    if not config.get("use_sliding_window"):
        return {}
    window = config.get("sliding_window", 4096)
    if "max_window_layers" not in spec.own_keys or window is None:
        return {"sliding_window": window}
    layers = values["num_hidden_layers"]
    first = config.get("max_window_layers", 28)
    kinds = config.get("layer_types")
    if kinds is not None:
        kinds = list(kinds)
        first = kinds.count("full_attention")
        rest = len(kinds) - first
        if len(kinds) != layers or kinds != ["full_attention"] * first + (
            ["sliding_attention"] * rest
        ):
            raise ModelError(
                "layer_types other than full attention first and sliding attention after it "
                "are not supported"
            )
    if first >= layers:
        return {}
    return {"sliding_window": window, "max_window_layers": first}


def _rope_from_hf(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling` of a config.json."""
    # transformers 5 keeps the rotary settings in one object, 4 in two keys; where both stand,
    # it reads the two.
    rope = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    theta = rope.pop("rope_theta", config.get("rope_theta", defaults.get("rope_theta", 10_000.0)))
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    rope.pop("type", None)
    if kind not in _ROPE_KEYS:
        raise ModelError(f"rope type '{kind}' is not supported: default, linear, llama3 are")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError("rotary positions of a part of the head only are not supported")
    if kind == "llama3":
        rope.setdefault(
            "original_max_position_embeddings", config.get("max_position_embeddings", 2048)
        )
    # Others stand there for other kinds, and mean nothing to this one.
    scaling = {"rope_type": kind, **{key: rope[key] for key in _ROPE_KEYS[kind] if key in rope}}
    return {
        "rope_theta": 10_000.0 if theta is None else float(theta),
        "rope_scaling": scaling if kind != "default" else None,
    }


class LlamaConfig(_DecoderConfig):
    """Shape of a dense model."""

    families = DENSE
    tensor_parallel_sizes = ("num_key_value_heads", "intermediate_size")
    has_pipeline = True

    model_type: DenseType = "llama"
    """"llama", "mistral", "qwen2" (biases on queries, keys and values), "qwen3" (queries and keys
    normalised by head) or "granite" (four multipliers)."""


class MoEConfig(_DecoderConfig):
    """Shape of a Mixture-of-Experts model: each token visits a few of the experts of an MLP."""

    families = ROUTED
    default_type: ClassVar[str] = "mixtral"

    model_type: RoutedType = "mixtral"
    """"mixtral" or "qwen3_moe" (queries and keys normalised by head)."""
    num_experts: int = Field(8, gt=0, le=10_000)
    """experts a layer."""
    num_experts_per_tok: int = Field(2, gt=0)
    """experts that each token visits."""
    moe_intermediate_size: int = Field(0, ge=0)
    """width inside an expert; 0 is intermediate_size."""
    norm_topk_prob: bool = True
    """the visited experts' weights are scaled to sum to 1 (always, in mixtral)."""
    router_aux_loss_coef: float = Field(0.01, ge=0)
    """weight of the load-balancing loss in training (Fedus et al. 2021)."""
    decoder_sparse_step: int = Field(1, gt=0)
    """every so many layers have experts, counted from 1 (qwen3_moe)."""
    mlp_only_layers: list[int] = Field([])
    """layers, counted from 0, without experts (qwen3_moe)."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in_experts(cls, values: Any) -> Any:
        # Runs before the base's, which works intermediate_size out the same way.
        if isinstance(values, dict) and not values.get("moe_intermediate_size"):
            hidden = values.get("hidden_size", 256)
            size = values.get("intermediate_size")
            if isinstance(hidden, int):
                size = size or math.ceil(hidden * 8 / 3 / 32) * 32
                return {**values, "moe_intermediate_size": size}
        return values

    @model_validator(mode="after")
    def _check_experts(self) -> Self:
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                f"num_experts_per_tok {self.num_experts_per_tok} is more than "
                f"num_experts {self.num_experts}"
            )
        if self.model_type == "mixtral" and (
            self.moe_intermediate_size != self.intermediate_size
            or not self.norm_topk_prob
            or self.decoder_sparse_step != 1
            or self.mlp_only_layers
        ):
            raise ValueError(
                "mixtral models have one intermediate_size, normalised weights and experts in "
                "every layer: model_type qwen3_moe has the choice"
            )
        if not any(self.has_experts(layer) for layer in range(self.num_hidden_layers)):
            raise ValueError("no layer has experts: use a dense model_type")
        return self

    @property
    def expert_count(self) -> int:
        """Experts of a layer that has some."""
        return self.num_experts

    @property
    def router_loss_coefficient(self) -> float:
        """Weight of the load-balancing loss in training."""
        return self.router_aux_loss_coef

    def has_experts(self, layer: int) -> bool:
        """Whether a layer (counted from 0) has experts in place of an MLP."""
        return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0

    def to_hf(self) -> dict[str, Any]:
        """The Hugging Face `config.json` of this model."""
        content = super().to_hf() | {"output_router_logits": False}
        # transformers 5 writes the number under Mixtral's name for both, 4 reads each its own.
        content["num_local_experts"] = self.num_experts
        if self.model_type == "mixtral":
            for name in (
                *("num_experts", "moe_intermediate_size", "norm_topk_prob"),
                *("decoder_sparse_step", "mlp_only_layers"),
            ):
                del content[name]
        return content

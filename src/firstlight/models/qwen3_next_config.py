"""Configuration of Qwen3-Next models, read from and written to config.json. `qwen3_next.py` has the
model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from firstlight.models.family import (
    GGUF_EXPERTS,
    QWEN_EXPERTS,
    AttentionSpec,
    FamilySpec,
    GGUFSpec,
    RopeSpec,
    hf_values,
)
from firstlight.models.llama_config import MoEConfig
from firstlight.models.llama_json import values_from_json

_FULL, _LINEAR = "full_attention", "linear_attention"


def _usual_types(layers: int, period: int) -> list[str]:
    """The kinds of all layers, if every `period`-th layer has full attention."""
    return [_LINEAR if (i + 1) % period else _FULL for i in range(layers)]


class Qwen3NextConfig(MoEConfig):
    """Configuration of a Qwen3-Next model."""

    families: ClassVar[Mapping[str, FamilySpec]] = {
        "qwen3_next": FamilySpec(
            "Qwen3NextForCausalLM",
            GGUFSpec(
                "qwen3next",
                rope_kinds=("default", "linear", "yarn"),
                fixed={"attention_bias": (False,), **GGUF_EXPERTS},
                counts={
                    "linear_conv_kernel_dim": "ssm.conv_kernel",
                    "linear_key_head_dim": "ssm.state_size",
                    "linear_num_key_heads": "ssm.group_count",
                    "linear_num_value_heads": "ssm.time_step_rank",
                    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
                },
                layer="delta",
                inner_eps=1e-6,
            ),
            own_keys=("attention_bias", "layer_types", "partial_rotary_factor"),
            hf_defaults=hf_values(
                vocab_size=151936,
                hidden_size=2048,
                intermediate_size=5632,
                num_hidden_layers=48,
                num_attention_heads=16,
                num_key_value_heads=2,
                max_position_embeddings=32768,
                experts=(512, 10),
                head_dim=256,
                moe_intermediate_size=512,
                shared_expert_intermediate_size=512,
                linear_key_head_dim=128,
                linear_value_head_dim=128,
                linear_num_key_heads=16,
                linear_num_value_heads=32,
            ),
            qk_norm="head",
            norm_kind="one_plus",
            rope=RopeSpec(partial_factor=0.25),
            experts=QWEN_EXPERTS,
            # Layers for multi-token prediction (MTP), which transformers does not load either.
            left_out=("mtp.",),
        )
    }

    model_type: Literal["qwen3_next"] = "qwen3_next"
    """"qwen3_next"."""
    layer_types: list[Literal["full_attention", "linear_attention"]] | None = None  # type: ignore[assignment]
    """"full_attention" or "linear_attention" (gated delta rule) for each layer; null is full
    attention in every fourth layer, or in the last layer of a model with fewer."""
    linear_conv_kernel_dim: int = Field(4, gt=0, le=1024)
    """width of the causal convolution in layers with linear attention, in tokens."""
    linear_key_head_dim: int = Field(32, gt=0)
    """size of a query and key head in layers with linear attention."""
    linear_value_head_dim: int = Field(32, gt=0)
    """size of a value head in layers with linear attention."""
    linear_num_key_heads: int = Field(4, gt=0)
    """query and key heads of layers with linear attention."""
    linear_num_value_heads: int = Field(8, gt=0)
    """value heads of layers with linear attention, a multiple of linear_num_key_heads."""
    shared_expert_intermediate_size: int = Field(0, ge=0)
    """inner width of the shared expert, which is applied to every token; 0 is
    moe_intermediate_size."""

    @classmethod
    def _filled_in(cls, values: dict[str, Any]) -> dict[str, Any]:
        values = super()._filled_in(values)
        shared = "shared_expert_intermediate_size"
        values[shared] = values.get(shared) or values["moe_intermediate_size"]
        layers = values.get("num_hidden_layers", cls.model_fields["num_hidden_layers"].default)
        kinds = values.get("layer_types")
        if isinstance(layers, int) and kinds and kinds == _usual_types(layers, min(layers, 4)):
            # Removed if it is the default, so that equal models have equal configs.
            del values["layer_types"]
        return values

    @model_validator(mode="after")
    def _check_linear(self) -> Self:
        if all(self.is_linear(layer) for layer in range(self.num_hidden_layers)):
            raise ValueError(
                "no layer has full_attention, without which transformers' cache does not work: "
                "give one in layer_types"
            )
        self.require_multiple("linear_num_value_heads", of="linear_num_key_heads")
        return self

    @property
    def state_shapes(self) -> Mapping[int, tuple[tuple[int, ...], ...]]:
        """See `FamilyConfig.state_shapes`. A layer with linear attention has two states: the last
        inputs of its convolution [W - 1, X], and the state of its delta rule [H, D, E] (letters as
        in `qwen3_next.py`)."""
        keys = self.linear_num_key_heads * self.linear_key_head_dim
        heads, size = self.linear_num_value_heads, self.linear_value_head_dim
        inputs = self.linear_conv_kernel_dim - 1, 2 * keys + heads * size
        shapes = inputs, (heads, self.linear_key_head_dim, size)
        return {i: shapes for i in range(self.num_hidden_layers) if self.is_linear(i)}

    def is_linear(self, layer: int) -> bool:
        """True if a layer (counted from 0) has linear attention."""
        if self.layer_types is not None:
            return self.layer_types[layer] == _LINEAR
        return (layer + 1) % min(self.num_hidden_layers, 4) != 0

    def attention_spec(self, layer: int) -> AttentionSpec:
        """See `FamilyConfig.attention_spec`."""
        if not self.is_linear(layer):
            return super().attention_spec(layer)
        size = self.linear_key_head_dim * self.linear_value_head_dim
        return AttentionSpec(rope=None, state_size=self.linear_num_value_heads * size)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """See `DecoderConfig.from_hf`."""
        kind = cls.default_type()
        values = values_from_json(cls.families[kind], tuple(cls.model_fields), config)
        kinds, period = config.get("layer_types"), config.get("full_attention_interval") or 4
        values["layer_types"] = list(kinds or _usual_types(values["num_hidden_layers"], period))
        return cls(**{**values, "model_type": kind})

    def to_hf(self) -> dict[str, Any]:
        """The Hugging Face `config.json` of this model."""
        content = super().to_hf()
        del content["num_local_experts"]
        kinds = [_LINEAR if self.is_linear(i) else _FULL for i in range(self.num_hidden_layers)]
        return content | {"layer_types": kinds}

"""Configuration of DeepSeek-V2 (arXiv 2405.04434) and DeepSeek-V3 (arXiv 2412.19437) models, read
from and written to config.json. `deepseek.py` has the model.

Terms of the papers: multi-head latent attention (MLA) computes the keys and values of all heads
from one low-rank vector per token, the KV latent. Routed experts are chosen for each token by a
router; shared experts are applied to every token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from firstlight.errors import ModelError
from firstlight.models.family import (
    QWEN_EXPERTS,
    AttentionSpec,
    FamilySpec,
    GGUFSpec,
    RopeSpec,
    hf_values,
)
from firstlight.models.llama_config import DecoderConfig
from firstlight.models.llama_json import values_from_json
from firstlight.models.rope import YarnRope

_JSON_NAMES = {"num_experts": "n_routed_experts", "router_aux_loss_coef": "aux_loss_alpha"}
_GGUF = GGUFSpec(
    "deepseek2",
    rope_kinds=("default", "yarn"),
    fixed={"attention_bias": (False,), "mlp_bias": (False,), "rope_interleave": (True,)},
    numbers={"routed_scaling_factor": "expert_weights_scale"},
    counts={
        "kv_lora_rank": "attention.kv_lora_rank",
        "q_lora_rank": "attention.q_lora_rank",
        "v_head_dim": "attention.value_length_mla",
        "first_k_dense_replace": "leading_dense_block_count",
        "n_shared_experts": "expert_shared_count",
    },
    optional=("q_lora_rank",),
    layer="latent",
    inner_eps=1e-6,
)
_SIZES = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "router_aux_loss_coef": 0.001,
}


class DeepseekConfig(DecoderConfig):
    """Configuration of a DeepSeek-V2 or V3 model: latent attention and routed experts."""

    families: ClassVar[Mapping[str, FamilySpec]] = {
        "deepseek_v2": FamilySpec(
            "DeepseekV2ForCausalLM",
            _GGUF,
            own_keys=("attention_bias", "mlp_bias"),
            json_names=_JSON_NAMES,
            hf_defaults={
                **hf_values(
                    vocab_size=102400,
                    hidden_size=4096,
                    intermediate_size=11008,
                    num_hidden_layers=32,
                    num_attention_heads=32,
                    max_position_embeddings=2048,
                ),
                **_SIZES,
                "num_experts": 64,
                "n_shared_experts": 2,
                "moe_intermediate_size": 1407,
                "first_k_dense_replace": 0,
                "routed_scaling_factor": 1.0,
                "norm_topk_prob": False,
            },
            rope=RopeSpec(turns_neighbours=True, in_fp32=True, polar=True),
            divides_width=True,
            experts=QWEN_EXPERTS,
        ),
        "deepseek_v3": FamilySpec(
            "DeepseekV3ForCausalLM",
            replace(_GGUF, gating="sigmoid"),
            own_keys=("attention_bias",),
            json_names=_JSON_NAMES,
            hf_defaults={
                **hf_values(
                    vocab_size=129280,
                    hidden_size=7168,
                    intermediate_size=18432,
                    num_hidden_layers=61,
                    num_attention_heads=128,
                    num_key_value_heads=128,
                    max_position_embeddings=4096,
                ),
                **_SIZES,
                "num_experts": 256,
                "num_experts_per_tok": 8,
                "n_shared_experts": 1,
                "moe_intermediate_size": 2048,
                "first_k_dense_replace": 3,
                "n_group": 8,
                "topk_group": 4,
                "routed_scaling_factor": 2.5,
            },
            rope=RopeSpec(turns_neighbours=True),
            experts=QWEN_EXPERTS,
            has_buffers=True,
        ),
    }

    model_type: Literal["deepseek_v2", "deepseek_v3"] = "deepseek_v3"
    """"deepseek_v2" or "deepseek_v3" (also for Moonlight)."""
    kv_lora_rank: int = Field(64, gt=0)
    """rank of the latent vector from which keys and values are computed."""
    q_lora_rank: int | None = Field(None, gt=0)
    """rank of the latent vector from which queries are computed; null computes queries directly by
    one full matrix."""
    qk_nope_head_dim: int = Field(32, gt=0)
    """dimensions of each query and key head without rotary positions (RoPE)."""
    qk_rope_head_dim: int = Field(16, gt=0)
    """dimensions of each query and key head with rotary positions, an even number; all heads share
    one rotated key."""
    v_head_dim: int = Field(32, gt=0)
    """dimensions of each value head."""
    rope_interleave: bool = True
    """true rotates the pairs of dimensions (2i, 2i + 1), false (i, i + R/2), where R is
    qk_rope_head_dim (deepseek_v3)."""
    first_k_dense_replace: int = Field(1, ge=0)
    """number of layers, from the first on, that have a dense MLP in place of experts."""
    num_experts: int = Field(8, gt=0, le=10_000)
    """routed experts of a layer, not counting the shared experts."""
    num_experts_per_tok: int = Field(2, gt=0)
    """routed experts of each token, in addition to the shared experts."""
    n_shared_experts: int = Field(1, gt=0)
    """shared experts, which are applied to every token; they are stored as one MLP."""
    moe_intermediate_size: int = Field(64, gt=0)
    """inner width of an expert."""
    n_group: int = Field(1, gt=0)
    """groups of experts for group-limited routing; 1 is off."""
    topk_group: int = Field(1, gt=0)
    """groups selected for each token; its experts are chosen from these groups."""
    routed_scaling_factor: float = Field(1.0, gt=0)
    """factor on the routing weights of each token's experts."""
    norm_topk_prob: bool = True
    """normalise each token's routing weights to sum to 1, before routed_scaling_factor
    (deepseek_v3)."""
    router_aux_loss_coef: float = Field(0.001, ge=0)
    """weight of the load-balancing loss in training."""

    @classmethod
    def _filled_in(cls, values: dict[str, Any]) -> dict[str, Any]:
        sizes = [
            values.get(name, cls.model_fields[name].default)
            for name in ("qk_nope_head_dim", "qk_rope_head_dim")
        ]
        if values.get("model_type") == "deepseek_v2":
            values.setdefault("norm_topk_prob", False)
        if all(isinstance(size, int) for size in sizes):
            values["head_dim"] = sum(sizes)
        return super()._filled_in(values)

    @model_validator(mode="after")
    def _check_latents(self) -> Self:
        if self.num_key_value_heads != self.num_attention_heads:
            raise ValueError(
                f"num_key_value_heads {self.num_key_value_heads} must be num_attention_heads "
                f"{self.num_attention_heads}: all heads read one compressed vector"
            )
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"qk_rope_head_dim {self.qk_rope_head_dim} must be even")
        if self.model_type == "deepseek_v2" and (self.norm_topk_prob or not self.rope_interleave):
            raise ValueError("norm_topk_prob and rope_interleave are keys of deepseek_v3 models")
        return self

    # Overrides `DecoderConfig._check_visited`: with groups, a token has fewer experts to choose
    # from.
    @model_validator(mode="after")
    def _check_visited(self) -> Self:
        if self.num_experts % self.n_group or self.topk_group > self.n_group:
            raise ValueError(
                f"num_experts {self.num_experts} must be a multiple of n_group {self.n_group}, and "
                f"topk_group {self.topk_group} at most that"
            )
        group = self.num_experts // self.n_group
        if self.num_experts_per_tok > group * self.topk_group:
            raise ValueError(
                f"num_experts_per_tok {self.num_experts_per_tok} is more than the "
                f"{group * self.topk_group} experts of topk_group {self.topk_group}"
            )
        if self.model_type == "deepseek_v3" and group < 2:
            raise ValueError("a group must have two experts: deepseek_v3 compares their two best")
        if self.first_k_dense_replace >= self.num_hidden_layers:
            raise ValueError(
                f"first_k_dense_replace {self.first_k_dense_replace} leaves no layer with experts"
            )
        return self

    @property
    def rotary_dim(self) -> int:
        """Dimensions of each query and key head that are rotated (R)."""
        return self.qk_rope_head_dim

    @property
    def cached_numbers(self) -> int:
        """Elements cached per token and layer: the KV latent and the rotated key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def has_experts(self, layer: int) -> bool:
        """True if a layer (counted from 0) has experts in place of an MLP."""
        return layer >= self.first_k_dense_replace

    def attention_spec(self, layer: int) -> AttentionSpec:
        """See `FamilyConfig.attention_spec`."""
        scale, rope = self.head_dim**-0.5, self.rope_scaling
        if isinstance(rope, YarnRope) and rope.mscale_all_dim and rope.factor > 1:
            # YaRN multiplies query and key by mscale, so that the score gets its square.
            scale *= (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2
        return AttentionSpec(scale=scale, value_dim=self.v_head_dim)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """See `DecoderConfig.from_hf`."""
        kind = str(config.get("model_type", cls.default_type()))
        # In config.json head_dim means qk_rope_head_dim; in a `DecoderConfig` it is the sum of
        # qk_nope_head_dim and qk_rope_head_dim.
        config = {key: value for key, value in config.items() if key != "head_dim"}
        is_v2 = kind == "deepseek_v2"
        usual = {
            "scoring_func": "softmax" if is_v2 else "sigmoid",
            "moe_layer_freq": 1,
            **({} if is_v2 else {"topk_method": "noaux_tc"}),
        }
        for key, value in usual.items():
            if config.get(key, value) != value:
                raise ModelError(f"{key} {config[key]!r} is not supported: only {value!r} is")
        values = values_from_json(cls.families[kind], tuple(cls.model_fields), config)
        if "q_lora_rank" in config:
            values["q_lora_rank"] = config["q_lora_rank"]
        if is_v2 and config.get("topk_method", "greedy") == "greedy":
            values |= {"n_group": 1, "topk_group": 1}
        return cls(**{**values, "model_type": kind})

    def to_hf(self) -> dict[str, Any]:
        """The Hugging Face `config.json` of this model."""
        content = super().to_hf() | {"head_dim": self.qk_rope_head_dim, "moe_layer_freq": 1}
        if self.model_type == "deepseek_v3":
            more = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
            return content | more | {"num_nextn_predict_layers": 0}
        del content["rope_interleave"]
        method = "greedy" if self.n_group == 1 else "group_limited_greedy"
        return content | {"scoring_func": "softmax", "topk_method": method}

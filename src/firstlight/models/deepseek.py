"""DeepSeek-V2 (arXiv 2405.04434) and DeepSeek-V3 (arXiv 2412.19437). These models have multi-head
latent attention, routed experts and shared experts.

The keys and values of all heads are computed from a single vector per token, the KV latent. The
cache stores this latent and one rotated key per token, which all heads share. Experts are divided
into groups. For each token, the groups with the best scores are selected first, and the experts are
then chosen from these groups. In V3, the scores of the experts are sigmoids. A bias is added to the
scores when experts are chosen, but it does not affect the weights of their outputs. Parameters have
the same names as in Hugging Face's `DeepseekV2ForCausalLM` and `DeepseekV3ForCausalLM`. Moonlight
uses the architecture of DeepSeek-V3.

Shape letters are defined in `models/ops.py` and `models/moe.py`. These letters are added:

    L   rank of the KV latent (`kv_lora_rank`)
    R   number of rotated dimensions of a head (`qk_rope_head_dim`)
    G   number of expert groups
    X   number of experts per group
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from firstlight.errors import ModelError
from firstlight.models.blockwise import blockwise_attention
from firstlight.models.cache import Cache, KVCache
from firstlight.models.family import (
    QWEN_EXPERTS,
    AttentionSpec,
    FamilySpec,
    GGUFSpec,
    RopeSpec,
    hf_values,
)
from firstlight.models.language_model import InitConfig
from firstlight.models.llama import Llama, LlamaMLP, RMSNorm
from firstlight.models.llama_config import DecoderConfig, values_from_json
from firstlight.models.mixtral import RoutedBlock
from firstlight.models.moe import Experts, RoutedMLP, Router, balancing_loss
from firstlight.models.ops import AttentionOptions, SelfAttention, attention
from firstlight.models.rope import (
    Ropes,
    YarnRope,
    apply_rope,
    apply_rope_as_complex,
    apply_rope_from_neighbours,
)

#: Epsilon of the norms of the query and KV latents. As in Hugging Face's classes, this value does
#: not depend on `rms_norm_eps`.
_LATENT_EPS = 1e-6

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
            rope=RopeSpec(polar=True),
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
            experts=QWEN_EXPERTS,
            has_buffers=True,
        ),
    }

    model_type: Literal["deepseek_v2", "deepseek_v3"] = "deepseek_v3"
    """"deepseek_v2" or "deepseek_v3" (also used by Moonlight)."""
    kv_lora_rank: int = Field(64, gt=0)
    """rank of the latent vector from which keys and values are computed."""
    q_lora_rank: int | None = Field(None, gt=0)
    """rank of the latent vector from which queries are computed; null computes the queries
    directly, with one full matrix."""
    qk_nope_head_dim: int = Field(32, gt=0)
    """number of dimensions of each query and key head without rotary positions (RoPE)."""
    qk_rope_head_dim: int = Field(16, gt=0)
    """number of dimensions of each query and key head with rotary positions, an even number; all
    heads share one rotated key."""
    v_head_dim: int = Field(32, gt=0)
    """number of dimensions of each value head."""
    rope_interleave: bool = True
    """true rotates the pairs of dimensions (2i, 2i + 1); false rotates the pairs (i, i + R/2),
    where R is qk_rope_head_dim (deepseek_v3)."""
    first_k_dense_replace: int = Field(1, ge=0)
    """number of initial layers that have a dense MLP instead of experts."""
    num_experts: int = Field(8, gt=0, le=10_000)
    """number of routed experts per layer, not counting the shared experts."""
    num_experts_per_tok: int = Field(2, gt=0)
    """number of routed experts per token, in addition to the shared experts."""
    n_shared_experts: int = Field(1, gt=0)
    """number of shared experts, which are applied to every token and stored as one MLP."""
    moe_intermediate_size: int = Field(64, gt=0)
    """inner width of an expert."""
    n_group: int = Field(1, gt=0)
    """number of expert groups for group-limited routing; 1 disables it."""
    topk_group: int = Field(1, gt=0)
    """number of groups selected for each token, from which its experts are chosen."""
    routed_scaling_factor: float = Field(1.0, gt=0)
    """factor applied to the routing weights of each token's experts."""
    norm_topk_prob: bool = True
    """normalise each token's routing weights to sum to 1 before they are multiplied by
    routed_scaling_factor (deepseek_v3)."""
    router_aux_loss_coef: float = Field(0.001, ge=0)
    """weight of the load-balancing loss during training."""

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
                f"num_key_value_heads {self.num_key_value_heads} must equal num_attention_heads "
                f"{self.num_attention_heads}: all heads read one compressed vector"
            )
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"qk_rope_head_dim {self.qk_rope_head_dim} must be even")
        if self.model_type == "deepseek_v2" and (self.norm_topk_prob or not self.rope_interleave):
            raise ValueError("norm_topk_prob and rope_interleave are keys of deepseek_v3 models")
        return self

    # This method overrides `DecoderConfig._check_visited`, because group-limited routing restricts
    # each token to the experts of some groups.
    @model_validator(mode="after")
    def _check_visited(self) -> Self:
        if self.num_experts % self.n_group or self.topk_group > self.n_group:
            raise ValueError(
                f"num_experts {self.num_experts} must be a multiple of n_group {self.n_group}, and "
                f"topk_group {self.topk_group} must be at most n_group"
            )
        group = self.num_experts // self.n_group
        if self.num_experts_per_tok > group * self.topk_group:
            raise ValueError(
                f"num_experts_per_tok {self.num_experts_per_tok} is more than the "
                f"{group * self.topk_group} experts in {self.topk_group} groups (topk_group)"
            )
        if self.model_type == "deepseek_v3" and group < 2:
            raise ValueError(
                "a group must have at least two experts, because deepseek_v3 ranks groups by their "
                "best two: lower n_group"
            )
        if self.first_k_dense_replace >= self.num_hidden_layers:
            raise ValueError(
                f"first_k_dense_replace {self.first_k_dense_replace} leaves no layer with "
                "experts: lower it"
            )
        return self

    @property
    def rotary_dim(self) -> int:
        """Number of rotated dimensions of each query and key head (R)."""
        return self.qk_rope_head_dim

    @property
    def cached_numbers(self) -> int:
        """Number of elements cached per token and layer: the sum of the sizes of the KV latent and
        the rotated key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def has_experts(self, layer: int) -> bool:
        """Return True if a layer (counted from 0) has experts instead of an MLP."""
        return layer >= self.first_k_dense_replace

    def attention_spec(self, layer: int) -> AttentionSpec:
        """See `FamilyConfig.attention_spec`."""
        scale, rope = self.head_dim**-0.5, self.rope_scaling
        if isinstance(rope, YarnRope) and rope.mscale_all_dim and rope.factor > 1:
            # YaRN multiplies both queries and keys by mscale, so the scores are multiplied by its
            # square.
            scale *= (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2
        return AttentionSpec(scale=scale, value_dim=self.v_head_dim)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """See `DecoderConfig.from_hf`."""
        kind = str(config.get("model_type", cls.default_type()))
        # In config.json, head_dim means qk_rope_head_dim. In a `DecoderConfig`, it is the sum of
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
        """Return the Hugging Face `config.json` of this model."""
        content = super().to_hf() | {"head_dim": self.qk_rope_head_dim, "moe_layer_freq": 1}
        if self.model_type == "deepseek_v3":
            more = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
            return content | more | {"num_nextn_predict_layers": 0}
        del content["rope_interleave"]
        method = "greedy" if self.n_group == 1 else "group_limited_greedy"
        return content | {"scoring_func": "softmax", "topk_method": method}


class DeepseekAttention(SelfAttention):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

    def __init__(self, config: DeepseekConfig, layer: int) -> None:
        super().__init__()
        C = config.hidden_size
        H = config.num_attention_heads
        bias = config.attention_bias
        self.layer = layer
        self.heads = H
        self.scale = config.attention_spec(layer).scale
        self.key_sizes = config.qk_nope_head_dim, config.qk_rope_head_dim
        self.latent_sizes = config.kv_lora_rank, config.qk_rope_head_dim
        self.expanded_sizes = config.qk_nope_head_dim, config.v_head_dim
        queries = H * config.head_dim
        latent = sum(self.latent_sizes)
        rank = config.q_lora_rank
        self.is_compressed = rank is not None
        if rank is None:
            self.q_proj = nn.Linear(C, queries, bias=False)
        else:
            self.q_a_proj = nn.Linear(C, rank, bias=bias)
            self.q_a_layernorm = RMSNorm(rank, _LATENT_EPS)
            self.q_b_proj = nn.Linear(rank, queries, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(C, latent, bias=bias)
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, _LATENT_EPS)
        self.kv_b_proj = nn.Linear(config.kv_lora_rank, H * sum(self.expanded_sizes), bias=False)
        self.o_proj = nn.Linear(H * config.v_head_dim, C, bias=bias)
        # In transformers, DeepSeek-V2 computes the rotation with complex numbers in fp32, but
        # DeepSeek-V3 does not.
        self.rotates_complex = config.family.rope.polar
        self.rotate = apply_rope
        if config.rope_interleave:
            is_complex = self.rotates_complex
            self.rotate = apply_rope_as_complex if is_complex else apply_rope_from_neighbours
        # torch's fused kernel for CPUs requires value heads of the same size as key heads.
        has_one_size = config.v_head_dim == config.head_dim
        self.attend = attention if has_one_size else blockwise_attention

    def forward(self, x_BTC: Tensor, ropes: Ropes, mask: Any, cache: Cache | None) -> Tensor:
        """Compute multi-head latent attention. See `LlamaAttention.forward` for the arguments and
        the result."""
        if self.is_compressed:
            q_BTC = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_BTC)))
        else:
            q_BTC = self.q_proj(x_BTC)
        q_BHTD = q_BTC.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        q_nope, q_rope = q_BHTD.split(self.key_sizes, dim=-1)
        latent_BTL, k_BTR = self.kv_a_proj_with_mqa(x_BTC).split(self.latent_sizes, dim=-1)
        latent_B1SL, k_B1SR = self.kv_a_layernorm(latent_BTL)[:, None], k_BTR[:, None]
        cos, sin = (t if self.rotates_complex else t.to(q_rope.dtype) for t in ropes[0])
        dtype = q_rope.dtype
        q_rope, k_B1SR = (self.rotate(x, cos, sin).to(dtype) for x in (q_rope, k_B1SR))
        if cache is not None:
            # The cache stores only L + R elements per token and layer, so every forward pass
            # recomputes the keys and values of all heads from the latents.
            latent_B1SL, k_B1SR = cache.update(self.layer, latent_B1SL, k_B1SR)
        kv_BSHD = self.kv_b_proj(latent_B1SL[:, 0]).unflatten(-1, (self.heads, -1))
        k_nope, v_BHSD = kv_BSHD.transpose(1, 2).split(self.expanded_sizes, dim=-1)
        # On GPUs, torch's fp32 kernel reads 16 bytes at a time and fails if the values are not
        # aligned.
        if self.expanded_sizes[0] * v_BHSD.element_size() % 16:
            v_BHSD = v_BHSD.contiguous()
        # All heads share one rotated key.
        k_BHSD = torch.cat((k_nope, k_B1SR.to(k_nope.dtype).expand(-1, self.heads, -1, -1)), -1)
        q_BHTD = torch.cat((q_nope, q_rope), -1)
        y_BHTD = self.attend(q_BHTD, k_BHSD, v_BHSD, AttentionOptions(mask, scale=self.scale))
        return self.o_proj(y_BHTD.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class DeepseekRouter(Router):
    """The router of a layer. Its linear projection has no bias.

    Attributes:
        has_bias: True for DeepSeek-V3, whose routers have an `e_score_correction_bias`.
        e_score_correction_bias: fp32 bias [E] added to the scores when experts are chosen. Only
            DeepSeek-V3 has this bias. It is a buffer, always in fp32, that is saved with the
            weights but receives no gradient.
    """

    e_score_correction_bias: Tensor

    def __init__(self, config: DeepseekConfig) -> None:
        super().__init__(config.hidden_size, config.num_experts, bias=False)
        self.has_bias = config.model_type == "deepseek_v3"
        if self.has_bias:
            self.register_buffer("e_score_correction_bias", torch.zeros(config.num_experts))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = self.e_score_correction_bias if self.has_bias else None
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if before is not None:
            moved = self.e_score_correction_bias
            is_empty = before.is_meta or moved.is_meta
            # `model.to(torch.bfloat16)` must not round the bias.
            self.e_score_correction_bias = (
                torch.zeros_like(moved, dtype=torch.float32)
                if is_empty
                else before.to(moved.device)
            )
        return self

    def forward(self, x_NC: Tensor) -> Tensor:
        """Return the logits [N, E], computed in fp32 even under autocast, as in transformers."""
        with torch.autocast(x_NC.device.type, enabled=False):
            return F.linear(x_NC.float(), self.weight.float())


class DeepseekMLP(RoutedMLP):
    """The experts of a layer: routed experts, and shared experts that process every token."""

    def __init__(self, config: DeepseekConfig) -> None:
        super().__init__()
        self.config = config
        width = config.moe_intermediate_size
        self.gate = DeepseekRouter(config)
        self.experts = Experts(config.num_experts, config.hidden_size, width)
        shared = {"intermediate_size": width * config.n_shared_experts}
        self.shared_experts = LlamaMLP(config.model_copy(update=shared))

    def scores(self, logits_NE: Tensor) -> Tensor:
        """Return the scores of the experts, fp32 [N, E], for the router's logits [N, E]. The scores
        are the sigmoid of the logits in V3, and the softmax in V2."""
        return logits_NE.sigmoid() if self.gate.has_bias else logits_NE.softmax(-1)

    def chosen(self, scores_NE: Tensor) -> Tensor:
        """Choose the experts of each token from the scores [N, E], and return their indices, int64
        [N, K]. The best `topk_group` groups are selected first. The K experts with the highest
        scores are then chosen from these groups. In V3, the bias is added to the scores before
        groups and experts are ranked."""
        config = self.config
        # The choice of experts is not differentiable. The bias affects which experts are chosen,
        # but not the weights of their outputs.
        wanted_NE = scores_NE.detach()
        if self.gate.has_bias:
            wanted_NE = wanted_NE + self.gate.e_score_correction_bias
        if config.n_group > 1:
            groups_NGX = wanted_NE.view(len(wanted_NE), config.n_group, -1)
            # V3 ranks groups by the sum of their two best scores, V2 by the best score.
            best = groups_NGX.topk(2 if self.gate.has_bias else 1, dim=-1).values.sum(-1)
            kept_NG = best.topk(config.topk_group, dim=-1).indices
            is_out_NG = torch.ones_like(best, dtype=torch.bool).scatter_(1, kept_NG, False)
            wanted_NE = groups_NGX.masked_fill(is_out_NG[..., None], -math.inf).flatten(1)
        # The indices are not sorted by score, as in transformers. The outputs of the experts are
        # added in the order of the indices, so a different order would change the rounding.
        return wanted_NE.topk(config.num_experts_per_tok, dim=-1, sorted=False).indices

    def route(self, x_NC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `RoutedMLP.route`."""
        logits_NE = self.gate(x_NC)
        scores_NE = self.scores(logits_NE)
        experts_NK = self.chosen(scores_NE)
        weights_NK = scores_NE.gather(1, experts_NK)
        if self.config.norm_topk_prob:
            # 1e-20 is added, as in transformers, to avoid a division by zero: the sigmoids of very
            # low logits can all be 0.
            weights_NK = weights_NK / (weights_NK.sum(-1, keepdim=True) + 1e-20)
        return logits_NE, weights_NK * self.config.routed_scaling_factor, experts_NK

    def forward(self, x_BTC: Tensor) -> tuple[Tensor, Tensor]:
        """Return the layer's output, [B, T, C], and the router's logits, [N, E]."""
        y_BTC, logits_NE = super().forward(x_BTC)
        return y_BTC + self.shared_experts(x_BTC), logits_NE


class DeepseekBlock(RoutedBlock):
    """One layer: latent attention, followed by a dense MLP or experts."""

    attention_class, experts_class = DeepseekAttention, DeepseekMLP


class Deepseek(Llama):
    """A DeepSeek language model. See `LanguageModel` for the interface that all models share."""

    config: DeepseekConfig  # type: ignore[assignment]

    block_class = DeepseekBlock

    def init_weights(self, generator: torch.Generator, init: InitConfig | None = None) -> None:
        """Draw the initial weights as in `LanguageModel.init_weights`, and set the routers'
        `e_score_correction_bias` to zero."""
        super().init_weights(generator, init)
        for module in self.modules():
            if isinstance(module, DeepseekRouter) and module.has_bias:
                module.e_score_correction_bias.zero_()

    def make_cache(self, batch_size: int, max_tokens: int, dtype: torch.dtype) -> KVCache:
        """Create an empty cache. `KVCache.keys` stores the KV latents [B, 1, S, L].
        `KVCache.values` stores the rotated keys [B, 1, S, R], which all heads share."""
        config = self.config
        return KVCache(
            config.num_hidden_layers,
            1,
            config.kv_lora_rank,
            value_dim=config.qk_rope_head_dim,
            batch_size=batch_size,
            max_tokens=max_tokens,
            dtype=dtype,
            device=self.embedding.weight.device,
        )

    def balance(self, router_logits: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Compute the load-balancing loss of a forward pass. See `LanguageModel.balance` for the
        arguments and the result.

        The loss uses the experts chosen by group-limited routing, and scores normalised to sum to 1
        for each token (DeepSeek-V3, arXiv 2412.19437, equations 17 to 20). Means are taken over all
        tokens of the forward pass."""
        layers = [layer.mlp for layer in self.layers if isinstance(layer.mlp, DeepseekMLP)]
        scores = [mlp.scores(one) for mlp, one in zip(layers, router_logits, strict=True)]
        chosen = [mlp.chosen(one) for mlp, one in zip(layers, scores, strict=True)]
        return balancing_loss([one / one.sum(-1, keepdim=True) for one in scores], chosen)

"""Modules of the Llama-like models: norms, attention, MLP and block.

Parameter names are those of Hugging Face's classes. Shape letters as in `models/ops.py`, and F, the
inner width of the MLP. The rotary tables cos and sin are [T, R], or [B, 1, T, R] if positions
differ between sequences.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firstlight.models.blockwise import blockwise_attention
from firstlight.models.cache import Cache
from firstlight.models.llama_config import DecoderConfig
from firstlight.models.moe import RoutedMLP, SparseMLP
from firstlight.models.ops import AttentionOptions, SelfAttention, at_least_fp32, attention
from firstlight.models.rope import Ropes, apply_rope, apply_rope_to_neighbours


def _relu_squared(x: Tensor) -> Tensor:
    """relu(x)^2 (So et al. 2021, Primer, arXiv 2109.08668)."""
    return F.relu(x).square()


#: config.json's name of an activation -> function.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "relu2": _relu_squared,
    "gelu_pytorch_tanh": functools.partial(F.gelu, approximate="tanh"),
}


def rms_norm(x: Tensor, eps: float) -> Tensor:
    """x / rms(x) over the last dimension, [..., size] to [..., size]: computed in fp32 at least,
    then rounded to the dtype of `x`."""
    return F.rms_norm(at_least_fp32(x), x.shape[-1:], None, eps).to(x.dtype)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, [..., size] to [..., size] (Zhang and Sennrich
    2019, arXiv 1910.07467). The mean of squares is computed in fp32 at least.

    Args:
        size: length of the last dimension.
        eps: term added to the mean of squares.
        kind: see `FamilySpec.norm_kind`.
    """

    def __init__(self, size: int, eps: float, kind: str = "rounded") -> None:
        super().__init__()
        if kind != "bare":
            self.weight = nn.Parameter(torch.ones(size))
        self.eps, self.kind = eps, kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "bare":
            return rms_norm(x, self.eps)
        normal = F.rms_norm(at_least_fp32(x), self.weight.shape, None, self.eps)
        # Each kind rounds at the same step as its class in transformers, so that logits are equal.
        if self.kind == "rounded":
            return normal.to(x.dtype) * self.weight
        # Gemma stores the factor minus 1, so that weight decay pulls the factor towards 1.
        weight = at_least_fp32(self.weight)
        return (normal * (1.0 + weight if self.kind == "one_plus" else weight)).to(x.dtype)


class HeadNorms(nn.Module):
    """LayerNorm of each head, [B, T, H, D] to [B, T, H, D], with a weight for each head and no
    bias.

    Args:
        heads, head_dim: H and D.
        eps: term added to the variance.
    """

    def __init__(self, heads: int, head_dim: int, eps: float) -> None:
        super().__init__()
        # One module per head, only for the names in the family's files: `forward` computes all
        # heads at once.
        self.norms = nn.ModuleList(nn.LayerNorm(head_dim, eps, bias=False) for _ in range(heads))
        self.eps = eps

    def forward(self, x_BTHD: Tensor) -> Tensor:
        weight_HD = at_least_fp32(torch.stack(list(self.parameters())))
        # Without weights, because `layer_norm` would use the same weight for all heads.
        normal = F.layer_norm(at_least_fp32(x_BTHD), x_BTHD.shape[-1:], eps=self.eps)
        return (normal * weight_HD).to(x_BTHD.dtype)


def make_norm(config: DecoderConfig, size: int) -> RMSNorm | nn.LayerNorm:
    """Create the family's norm over a last dimension of `size`."""
    kind = config.family.norm_kind
    if kind == "layer":
        return nn.LayerNorm(size, config.rms_norm_eps)
    return RMSNorm(size, config.rms_norm_eps, kind)


class LlamaAttention(SelfAttention):
    """Grouped-query self-attention (Ainslie et al. 2023, arXiv 2305.13245) with rotary positions.

    Subclasses can replace `add_projections`, `project`, `turn` and `put_out`.
    """

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        family, spec = config.family, config.attention_spec(layer)
        self.layer, self.head_dim = layer, config.head_dim
        self.scale = spec.scale
        self.softcap = spec.softcap
        self.rope = spec.rope
        D = config.head_dim
        self.sizes = (config.num_attention_heads * D, *(config.num_key_value_heads * D,) * 2)
        self.add_projections(config)
        self.qk_norm = config.qk_norm
        self.q_norm_name = "q_norm"
        self.k_norm_name = "k_norm"
        if self.qk_norm == "own":
            self.q_norm_name, self.k_norm_name = "q_layernorm", "k_layernorm"
            for name, size in zip(("q_layernorm", "k_layernorm"), self.sizes[:2], strict=True):
                self.add_module(name, HeadNorms(size // D, D, config.rms_norm_eps))
        elif self.qk_norm is not None:
            sizes = (D, D) if self.qk_norm == "head" else self.sizes[:2]
            self.q_norm, self.k_norm = (make_norm(config, size) for size in sizes)
        self.turns_in_fp32 = family.rope.in_fp32
        self.turn = apply_rope_to_neighbours if family.rope.turns_neighbours else apply_rope
        self.sinks = nn.Parameter(torch.empty(config.num_attention_heads)) if spec.sinks else None
        # torch's fused kernels support neither soft caps nor sinks.
        is_plain = self.softcap is None and not spec.sinks
        self.attend = attention if is_plain else blockwise_attention

    def forward(self, x_BTC: Tensor, ropes: Ropes, mask: Any, cache: Cache | None) -> Tensor:
        """Attention, [B, T, C] to [B, T, C].

        Args:
            x_BTC: the layer's input, normalised if the family has a norm before attention.
            ropes: the model's rotary tables.
            mask: result of the model's `make_mask`.
            cache: keys and values of earlier tokens.
        """
        return self.put_out(self.attended(*self.project(x_BTC), ropes, mask, cache))

    def attended(
        self,
        q_BTHD: Tensor,
        k_BTKD: Tensor,
        v_BTKD: Tensor,
        ropes: Ropes,
        mask: Any,
        cache: Cache | None,
    ) -> Tensor:
        """The concatenated outputs of the heads, [B, T, H D], from the results of `project`; other
        arguments as in `forward`."""
        B, T = q_BTHD.shape[:2]
        # Queries and keys are normalised before the rotation, which keeps their length.
        if self.qk_norm == "width":
            q_BTHD = self.q_norm(q_BTHD.flatten(2)).view(q_BTHD.shape)
            k_BTKD = self.k_norm(k_BTKD.flatten(2)).view(k_BTKD.shape)
        elif self.qk_norm is not None:
            q_BTHD = getattr(self, self.q_norm_name)(q_BTHD)
            k_BTKD = getattr(self, self.k_norm_name)(k_BTKD)
        # Views without a copy: the kernels accept any strides of heads and tokens.
        v_BKSD = v_BTKD.transpose(1, 2)
        q_BHTD, k_BKSD = q_BTHD.transpose(1, 2), k_BTKD.transpose(1, 2)
        if self.rope is not None:
            dtype = q_BHTD.dtype
            # The tables are fp32: products with them would be fp32, too.
            cos, sin = (t if self.turns_in_fp32 else t.to(dtype) for t in ropes[self.rope])
            q_BHTD, k_BKSD = (self.turn(x, cos, sin).to(dtype) for x in (q_BHTD, k_BKSD))
        # Keys are cached after their rotation, because a token's position never changes.
        if cache is not None:
            k_BKSD, v_BKSD = cache.update(self.layer, k_BKSD, v_BKSD)
        # No family of this architecture has dropout of attention weights.
        options = AttentionOptions(mask, 0.0, self.scale, self.softcap, sinks=self.sinks)
        y_BHTD = self.attend(q_BHTD, k_BKSD, v_BKSD, options)
        return y_BHTD.transpose(1, 2).reshape(B, T, -1)

    def add_projections(self, config: DecoderConfig) -> None:
        """Create the projections, under the names of the family's files."""
        C, bias = config.hidden_size, config.qkv_bias
        self.is_fused = config.family.fused is True
        if self.is_fused:
            self.qkv_proj = nn.Linear(C, sum(self.sizes), bias=bias)
        else:
            self.q_proj, self.k_proj, self.v_proj = (
                nn.Linear(C, size, bias=bias) for size in self.sizes
            )
        out_bias = config.attention_bias and config.family.output_bias
        self.o_proj = nn.Linear(self.sizes[0], C, bias=out_bias)

    def project(self, x_BTC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, T, H, D], keys and values [B, T, K, D] of the layer's input [B, T, C]."""
        if self.is_fused:
            parts = self.qkv_proj(x_BTC).split(self.sizes, dim=-1)
        else:
            parts = self.q_proj(x_BTC), self.k_proj(x_BTC), self.v_proj(x_BTC)
        # `view` and not `unflatten`, which causes graph breaks when the planner traces a compiled
        # step.
        heads = (*x_BTC.shape[:2], -1, self.head_dim)
        q_BTHD, k_BTKD, v_BTKD = (part.view(heads) for part in parts)
        return q_BTHD, k_BTKD, v_BTKD

    def put_out(self, y_BTC: Tensor) -> Tensor:
        """Output projection of the concatenated heads' outputs, [B, T, H D] to [B, T, C]."""
        return self.o_proj(y_BTC)  # type: ignore[no-any-return]


class LlamaMLP(nn.Module):
    """MLP with the family's activation, with a gate (as in SwiGLU; Shazeer 2020, arXiv 2002.05202)
    or without, [B, T, C] to [B, T, C]."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        C = config.hidden_size
        hidden = config.intermediate_size
        bias = config.mlp_bias
        self.is_gated, self.is_fused = config.family.gated, bool(config.family.fused)
        self.activation = ACTIVATIONS[config.family.activation]
        if self.is_fused:
            self.gate_up_proj = nn.Linear(C, 2 * hidden, bias=bias)
        else:
            if self.is_gated:
                self.gate_proj = nn.Linear(C, hidden, bias=bias)
            self.up_proj = nn.Linear(C, hidden, bias=bias)
        self.down_proj = nn.Linear(hidden, C, bias=bias)

    def forward(self, x_BTC: Tensor) -> Tensor:
        if self.is_fused:
            # One product for both; the gate's rows come first, as in the family's files.
            gate_BTF, up_BTF = self.gate_up_proj(x_BTC).chunk(2, dim=-1)
            hidden_BTF = self.activation(gate_BTF) * up_BTF
        elif self.is_gated:
            hidden_BTF = self.activation(self.gate_proj(x_BTC)) * self.up_proj(x_BTC)
        else:
            hidden_BTF = self.activation(self.up_proj(x_BTC))
        return self.down_proj(hidden_BTF)  # type: ignore[no-any-return]


class LlamaBlock(nn.Module):
    """One layer: attention and an MLP or experts. Each has a norm before it, after it, or both, and
    is added to the residual stream.

    Attributes:
        attention_class, mlp_class, experts_class: classes of the parts, which subclasses replace.
    """

    attention_class: ClassVar[Callable[..., SelfAttention]] = LlamaAttention
    mlp_class: ClassVar[Callable[..., nn.Module]] = LlamaMLP
    experts_class: ClassVar[Callable[..., RoutedMLP]] = SparseMLP

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.has_window = config.attention_spec(layer).window is not None
        self.add_attention(config, layer)
        self.mlp = (self.experts_class if config.has_experts(layer) else self.mlp_class)(config)
        self.residual_multiplier = config.residual_multiplier
        self.is_parallel, self.norms = config.use_parallel_residual, config.family.norms
        if self.is_parallel:
            # The MLP has the same normalised input as attention.
            self.norms = dataclasses.replace(self.norms, before_mlp=None)
        norms = self.norms
        # Norms have the names of the family's files.
        for name in (
            norms.before_attention,
            norms.after_attention,
            norms.before_mlp,
            norms.after_mlp,
        ):
            if name is not None:
                self.add_module(name, make_norm(config, config.hidden_size))

    def add_attention(self, config: Any, layer: int) -> None:
        """Create the module that mixes tokens (attention), under its name in the family's files."""
        self.self_attn = self.attention_class(config, layer)

    def mix(self, x_BTC: Tensor, ropes: Any, masks: Any, cache: Cache | None) -> Tensor:
        """Mix tokens by attention, [B, T, C] to [B, T, C]; arguments as in `forward`."""
        # torch.compile of torch 2.11 does not support a bool as an index.
        mask = masks[int(self.has_window)]
        return self.self_attn(x_BTC, ropes, mask, cache)  # type: ignore[no-any-return]

    def forward(
        self, x_BTC: Tensor, ropes: Ropes, masks: tuple[Any, Any], cache: Cache | None
    ) -> tuple[Tensor, Tensor | None]:
        """The residual stream [B, T, C] after this layer, and the router's logits [N, E] (None
        without experts).

        Args:
            x_BTC: the residual stream before this layer.
            ropes: the model's rotary tables.
            masks: mask of layers without a window, and mask of layers with a window.
            cache: keys and values of earlier tokens.
        """
        norms = self.norms
        input_BTC = self._norm(norms.before_attention, x_BTC)
        y_BTC = self._norm(norms.after_attention, self.mix(input_BTC, ropes, masks, cache))
        if self.is_parallel:
            # Attention and MLP read the same norm (Wang and Komatsuzaki 2021, GPT-J), so that
            # neither depends on the other.
            return x_BTC + y_BTC + self.mlp(input_BTC), None
        x_BTC = x_BTC + multiplied(y_BTC, self.residual_multiplier)
        y_BTC, router_logits = self._norm(norms.before_mlp, x_BTC), None
        if isinstance(self.mlp, RoutedMLP):
            y_BTC, router_logits = self.mlp(y_BTC)
        else:
            y_BTC = self.mlp(y_BTC)
        y_BTC = self._norm(norms.after_mlp, y_BTC)
        return x_BTC + multiplied(y_BTC, self.residual_multiplier), router_logits

    def _norm(self, name: str | None, x_BTC: Tensor) -> Tensor:
        return x_BTC if name is None else getattr(self, name)(x_BTC)


def multiplied(x: Tensor, factor: float) -> Tensor:
    """`x` [...] times a factor."""
    # Factors other than 1 are rare (Granite, Gemma): 1 saves a pass over the tensor.
    return x if factor == 1 else x * factor

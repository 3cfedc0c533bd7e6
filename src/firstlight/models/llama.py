"""Llama and its kin: RMSNorm, rotary positions, grouped-query attention, SwiGLU or experts.

Parameter names are those of Hugging Face's classes. One architecture by configuration
(`llama_config.py`) and by facts of its family (`llama_families.py`): which norms a layer has, what
is normalised and how it is rounded, the MLP's activation and gate, matrices that lie in one,
windows and rotary tables of each layer, caps of scores and logits. Experts are in `moe.py`.

Shape letters as in `models/ops.py`, and F, the width inside the MLP; cos and sin, the rotary
tables, are [T, R], or [B, 1, T, R] where positions differ between sequences.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firstlight.models.blockwise import blockwise_attention
from firstlight.models.language_model import Cache, LanguageModel, token_positions
from firstlight.models.llama_config import LlamaConfig, MoEConfig
from firstlight.models.moe import SparseMLP
from firstlight.models.ops import Embedding, SelfAttention, at_least_fp32, attention
from firstlight.models.rope import (
    apply_rope,
    apply_rope_to_neighbours,
    depends_on_length,
    rope_frequencies,
    rope_magnitude,
    rope_tables,
)

AnyLlamaConfig = LlamaConfig | MoEConfig


def _relu_squared(x: Tensor) -> Tensor:
    """relu(x)^2 (So et al. 2021, Primer)."""
    return F.relu(x).square()


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "relu2": _relu_squared,
    "gelu_pytorch_tanh": functools.partial(F.gelu, approximate="tanh"),
}


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, [..., size] to [..., size], the mean of squares
    taken in fp32 (Zhang and Sennrich 2019).

    Args:
        size: length of the last dimension.
        eps: term added to the mean of squares.
        kind: see `FamilySpec.norm_kind`.
    """

    def __init__(self, size: int, eps: float, kind: str = "rounded") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps, self.kind = eps, kind

    def forward(self, x: Tensor) -> Tensor:
        normal = F.rms_norm(at_least_fp32(x), self.weight.shape, None, self.eps)
        # Each rounds where its class in transformers does: the logits are the same.
        if self.kind == "rounded":
            return normal.to(x.dtype) * self.weight
        weight = at_least_fp32(self.weight)
        return (normal * (1.0 + weight if self.kind == "one_plus" else weight)).to(x.dtype)


class LlamaAttention(SelfAttention):
    """Grouped-query self-attention (Ainslie et al. 2023) with rotary positions."""

    def __init__(self, config: AnyLlamaConfig, layer: int) -> None:
        super().__init__()
        family, spec = config.family, config.attention_spec(layer)
        self.layer, self.head_dim = layer, config.head_dim
        self.scale, self.softcap, self.rope = spec.scale, spec.softcap, spec.rope
        C, D, bias = config.hidden_size, config.head_dim, config.qkv_bias
        self.sizes = (config.num_attention_heads * D, *(config.num_key_value_heads * D,) * 2)
        if family.fused is True:
            self.qkv_proj = nn.Linear(C, sum(self.sizes), bias=bias)
        else:
            self.q_proj, self.k_proj, self.v_proj = (
                nn.Linear(C, size, bias=bias) for size in self.sizes
            )
        out_bias = config.attention_bias and family.output_bias
        self.o_proj = nn.Linear(self.sizes[0], C, bias=out_bias)
        self.is_fused, self.qk_norm = family.fused is True, family.qk_norm
        self.q_norm = self.k_norm = None
        if self.qk_norm is not None:
            sizes = (D, D) if self.qk_norm == "head" else self.sizes[:2]
            self.q_norm, self.k_norm = (
                RMSNorm(size, config.rms_norm_eps, family.norm_kind) for size in sizes
            )
        self.turns_in_fp32 = family.rope.in_fp32
        self.turn = apply_rope_to_neighbours if family.rope.turns_neighbours else apply_rope
        # torch's fused kernels have no cap.
        self.attend = attention if self.softcap is None else blockwise_attention

    def forward(
        self,
        x_BTC: Tensor,
        ropes: tuple[tuple[Tensor, Tensor], ...],
        mask: Any,
        cache: Cache | None,
    ) -> Tensor:
        """[B, T, C] to [B, T, C].

        Args:
            x_BTC: the layer's input, normalised where the family does.
            ropes: rotary tables, cos and sin of each.
            mask: mask as `make_mask` gives it.
            cache: keys and values of earlier tokens.
        """
        B, T, _ = x_BTC.shape
        if self.is_fused:
            q, k, v = self.qkv_proj(x_BTC).split(self.sizes, dim=-1)
        else:
            q, k, v = self.q_proj(x_BTC), self.k_proj(x_BTC), self.v_proj(x_BTC)
        if self.q_norm is not None and self.k_norm is not None and self.qk_norm == "width":
            q, k = self.q_norm(q), self.k_norm(k)
        q_BTHD, k_BTKD = (x.view(B, T, -1, self.head_dim) for x in (q, k))
        v_BKSD = v.view(B, T, -1, self.head_dim).transpose(1, 2)
        # Qwen3 normalises before the rotation: a rotated vector keeps its length.
        if self.q_norm is not None and self.k_norm is not None and self.qk_norm == "head":
            q_BTHD, k_BTKD = self.q_norm(q_BTHD), self.k_norm(k_BTKD)
        q_BHTD, k_BKSD = q_BTHD.transpose(1, 2), k_BTKD.transpose(1, 2)
        if self.rope is not None:
            dtype = q_BHTD.dtype
            # The tables are fp32, and would make bf16 queries and keys fp32 as well.
            cos, sin = (t if self.turns_in_fp32 else t.to(dtype) for t in ropes[self.rope])
            q_BHTD, k_BKSD = (self.turn(x, cos, sin).to(dtype) for x in (q_BHTD, k_BKSD))
        # Cached keys are rotated already: a token's position never changes.
        if cache is not None:
            k_BKSD, v_BKSD = cache.update(self.layer, k_BKSD, v_BKSD)
        # No family of this architecture drops attention weights out.
        y_BHTD = self.attend(
            q_BHTD, k_BKSD, v_BKSD, dropout=0.0, mask=mask, scale=self.scale, softcap=self.softcap
        )
        return self.o_proj(y_BHTD.transpose(1, 2).reshape(B, T, -1))  # type: ignore[no-any-return]


class LlamaMLP(nn.Module):
    """SwiGLU (Shazeer 2020) or the family's activation, with or without a gate, [B, T, C] to
    [B, T, C]."""

    def __init__(self, config: AnyLlamaConfig) -> None:
        super().__init__()
        C, hidden, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.is_gated, self.is_fused = config.family.gated, bool(config.family.fused)
        self.activation = _ACTIVATIONS[config.family.activation]
        if self.is_fused:
            self.gate_up_proj = nn.Linear(C, 2 * hidden, bias=bias)
        else:
            if self.is_gated:
                self.gate_proj = nn.Linear(C, hidden, bias=bias)
            self.up_proj = nn.Linear(C, hidden, bias=bias)
        self.down_proj = nn.Linear(hidden, C, bias=bias)

    def forward(self, x_BTC: Tensor) -> Tensor:
        if self.is_fused:
            gate_BTF, up_BTF = self.gate_up_proj(x_BTC).chunk(2, dim=-1)
            hidden_BTF = self.activation(gate_BTF) * up_BTF
        elif self.is_gated:
            hidden_BTF = self.activation(self.gate_proj(x_BTC)) * self.up_proj(x_BTC)
        else:
            hidden_BTF = self.activation(self.up_proj(x_BTC))
        return self.down_proj(hidden_BTF)  # type: ignore[no-any-return]


class LlamaBlock(nn.Module):
    """One layer: attention and MLP or experts, each with a norm before it, behind it or both, and
    added to the residual stream."""

    def __init__(self, config: AnyLlamaConfig, layer: int) -> None:
        super().__init__()
        self.has_window = config.attention_spec(layer).window is not None
        self.self_attn = LlamaAttention(config, layer)
        self.mlp: LlamaMLP | SparseMLP
        if isinstance(config, MoEConfig) and config.has_experts(layer):
            self.mlp = SparseMLP(config)
        else:
            self.mlp = LlamaMLP(config)
        self.residual_multiplier = config.residual_multiplier
        self.norms = norms = config.family.norms
        # Under the names of the family's files.
        for name in (
            *(norms.before_attention, norms.after_attention),
            *(norms.before_mlp, norms.after_mlp),
        ):
            if name is not None:
                norm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.family.norm_kind)
                self.add_module(name, norm)

    def forward(
        self,
        x_BTC: Tensor,
        ropes: tuple[tuple[Tensor, Tensor], ...],
        masks: tuple[Any, Any],
        cache: Cache | None,
    ) -> tuple[Tensor, Tensor | None]:
        """The residual stream [B, T, C] after this layer, and the router's logits [N, E], None
        without experts.

        Args:
            x_BTC: the residual stream before this layer.
            ropes: rotary tables, cos and sin of each.
            masks: mask of the layers without a window, and mask of those with one.
            cache: keys and values of earlier tokens.
        """
        norms, mask = self.norms, masks[self.has_window]
        y_BTC = self.self_attn(self._norm(norms.before_attention, x_BTC), ropes, mask, cache)
        y_BTC = self._norm(norms.after_attention, y_BTC)
        x_BTC = x_BTC + _multiplied(y_BTC, self.residual_multiplier)
        y_BTC, router_logits = self._norm(norms.before_mlp, x_BTC), None
        if isinstance(self.mlp, SparseMLP):
            y_BTC, router_logits = self.mlp(y_BTC)
        else:
            y_BTC = self.mlp(y_BTC)
        y_BTC = self._norm(norms.after_mlp, y_BTC)
        return x_BTC + _multiplied(y_BTC, self.residual_multiplier), router_logits

    def _norm(self, name: str | None, x_BTC: Tensor) -> Tensor:
        return x_BTC if name is None else getattr(self, name)(x_BTC)


def _multiplied(x: Tensor, factor: float) -> Tensor:
    # Granite alone has other factors: others are spared a pass over the tensor.
    return x if factor == 1 else x * factor


class LlamaDecoder(nn.Module):
    """Embedding, layers and final norm: Hugging Face's `model`."""

    def __init__(self, config: AnyLlamaConfig, padded_vocab_size: int) -> None:
        super().__init__()
        self.embed_tokens = Embedding(padded_vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(LlamaBlock(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.family.norm_kind)


class Llama(LanguageModel):
    """A language model of the Llama architecture (Touvron et al. 2023); see `LanguageModel`.

    Attributes:
        rope_frequencies: rotary angles from one position to the next, fp32 [R/2] in any dtype of
            the model.
        local_rope_frequencies: the same of the layers with a window, where they have a base of
            their own.
        embedding_factor: factor of the embeddings.
    """

    config: AnyLlamaConfig

    embedding_name = "model.embed_tokens"
    layers_name = "model.layers"
    final_modules = ("model.norm", "lm_head")
    residual_projections = ("o_proj.", "down_proj")
    # "inputs" are whole on all processes and used by several sharded modules, of which "columns"
    # keep their own outputs, and "rows" add theirs up; the "table" is sharded by rows of the
    # vocabulary, the "head" too, whose outputs are gathered.
    tensor_parallel_plan: ClassVar[Mapping[str, str]] = {
        "model.embed_tokens": "table",
        "model.layers.*.self_attn": "inputs",
        "model.layers.*.self_attn.q_proj": "columns",
        "model.layers.*.self_attn.k_proj": "columns",
        "model.layers.*.self_attn.v_proj": "columns",
        "model.layers.*.self_attn.o_proj": "rows",
        "model.layers.*.mlp": "inputs",
        "model.layers.*.mlp.gate_proj": "columns",
        "model.layers.*.mlp.up_proj": "columns",
        "model.layers.*.mlp.down_proj": "rows",
        "lm_head": "head",
    }

    def __init__(self, config: AnyLlamaConfig, padded_vocab_size: int | None = None) -> None:
        super().__init__(config)
        rows = padded_vocab_size or config.vocab_size
        self.model = LlamaDecoder(config, rows)
        self.lm_head = nn.Linear(config.hidden_size, rows, bias=False)
        self.rope_frequencies: Tensor
        self.local_rope_frequencies: Tensor
        # Not in the weights' file: they follow from the config.
        self.register_buffer("rope_frequencies", torch.empty(0), persistent=False)
        if config.rope_local_base_freq is not None:
            self.register_buffer("local_rope_frequencies", torch.empty(0), persistent=False)
        self.norm_init = 0.0 if config.family.norm_kind == "one_plus" else 1.0
        self.finish_loading()

    def embed(self, input_ids: Tensor) -> Tensor:
        """The first layer's input [B, T, C]; a later stage of a pipeline replaces it."""
        return _multiplied(self.model.embed_tokens(input_ids), self.embedding_factor)

    def finish(self, x_BTC: Tensor) -> Tensor:
        """The head's input [B, T, C]: see `LanguageModel.finish`."""
        # Granite divides its logits; the hidden states are fewer numbers than those.
        return _multiplied(self.model.norm(x_BTC), 1 / self.config.logits_scaling)

    def finish_loading(self) -> None:
        """Make what a weights file does not hold: the tie of the head, the rotary tables and the
        factor of the embeddings."""
        super().finish_loading()
        self._make_tables()

    def _make_tables(self) -> None:
        config, weight = self.config, self.model.embed_tokens.weight
        self.rope_frequencies = self._frequencies(0)
        if config.rope_local_base_freq is not None:
            with torch.device("cpu"):
                local = rope_frequencies(config.rotary_dim, config.rope_local_base_freq, None)
            self.local_rope_frequencies = local.to(weight.device)
        self.embedding_factor = config.embedding_multiplier
        if config.family.scales_embeddings:
            # Rounded as the embeddings are, as in transformers.
            root = torch.tensor(config.hidden_size**0.5, dtype=weight.dtype, device="cpu")
            self.embedding_factor = root.item()

    def _frequencies(self, length: int) -> Tensor:
        """Rotary frequencies of a text of so many tokens, fp32 [R/2]."""
        config = self.config
        # Computed on the CPU also for a model on "meta" or a GPU: the same bits everywhere.
        with torch.device("cpu"):
            frequencies = rope_frequencies(
                config.rotary_dim,
                config.rope_theta,
                config.rope_scaling,
                length=length,
                max_positions=config.max_position_embeddings,
            )
        return frequencies.to(self.model.embed_tokens.weight.device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # `model.to(torch.bfloat16)` must not round the rotary tables, nor `to_empty` empty them.
        self._make_tables()
        return self

    def _ropes(self, positions: Tensor, length: int) -> tuple[tuple[Tensor, Tensor], ...]:
        """Rotary tables, cos and sin of each, at `positions` ([T] or [B, T]) in a text of so many
        tokens."""
        config = self.config
        frequencies = self.rope_frequencies
        if depends_on_length(config.rope_scaling):
            frequencies = self._frequencies(length)
        # In fp32: bf16 can not tell position 257 from 258.
        tables = rope_tables(frequencies, positions, torch.float32)
        magnitude = rope_magnitude(config.rope_scaling, config.max_position_embeddings)
        if magnitude != 1:
            tables = (tables[0] * magnitude, tables[1] * magnitude)
        if config.rope_local_base_freq is None:
            return (tables,)
        return tables, rope_tables(self.local_rope_frequencies, positions, torch.float32)

    def decode(
        self, input_ids: Tensor, document_ids: Tensor | None, cache: Cache | None
    ) -> tuple[Tensor, list[Tensor]]:
        """The last layer's output [B, T, C], and the logits [N, E] of each layer with a router: see
        `LanguageModel.decode`."""
        positions, cache_positions, total = token_positions(input_ids, document_ids, cache)
        # Computed once for all layers. A text in a cache is as long as it may become: frequencies
        # that changed while it grows would not be those of the keys in the cache.
        length = input_ids.shape[1] if cache is None else cache.max_tokens
        ropes = self._ropes(positions, length)
        # The masks too: at most two, whatever the number of layers.
        window = self.config.sliding_window
        mask = self.make_mask(cache_positions, total, None, document_ids)
        masks = (mask, mask)
        if window is not None:
            masks = (mask, self.make_mask(cache_positions, total, window, document_ids))
        x_BTC = self.embed(input_ids)
        router_logits: list[Tensor] = []
        for layer in self.model.layers:
            x_BTC, logits_NE = layer(x_BTC, ropes, masks, cache)
            if logits_NE is not None:
                router_logits.append(logits_NE)
        return x_BTC, router_logits

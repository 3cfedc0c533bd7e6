"""Llama and its kin: RMSNorm, rotary positions, grouped-query attention, SwiGLU or experts.

Parameter names are those of Hugging Face's classes. One architecture by configuration
(`llama_config.py`): Llama 2, 3, 3.1 and 3.2, Mistral (sliding window), Qwen2 (biases on queries,
keys and values), Qwen3 (queries and keys normalised), Granite (four multipliers), Mixtral and
Qwen3-MoE (`moe.py`).

Shape letters as in `models/ops.py`, and F, the width inside the MLP; cos and sin, the rotary
tables, are [T, D], or [B, 1, T, D] where positions differ between sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firstlight.models.language_model import Cache, LanguageModel, token_positions
from firstlight.models.llama_config import LlamaConfig, MoEConfig
from firstlight.models.moe import SparseMLP
from firstlight.models.ops import (
    Embedding,
    SelfAttention,
    apply_rope,
    at_least_fp32,
    attention,
    rope_frequencies,
    rope_tables,
)

AnyLlamaConfig = LlamaConfig | MoEConfig


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, [..., size] to [..., size], the mean of squares
    taken in fp32 (Zhang and Sennrich 2019)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        # Rounded before the weight is multiplied in, as in transformers: the logits are the same.
        return (
            F.rms_norm(at_least_fp32(x), self.weight.shape, None, self.eps).to(x.dtype)
            * self.weight
        )


class LlamaAttention(SelfAttention):
    """Grouped-query self-attention (Ainslie et al. 2023) with rotary positions."""

    def __init__(self, config: AnyLlamaConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        self.scale = config.attention_spec(layer).scale
        C, D, bias = config.hidden_size, config.head_dim, config.qkv_bias
        self.q_proj = nn.Linear(C, config.num_attention_heads * D, bias=bias)
        self.k_proj = nn.Linear(C, config.num_key_value_heads * D, bias=bias)
        self.v_proj = nn.Linear(C, config.num_key_value_heads * D, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * D, C, bias=config.attention_bias)
        has_norms = config.family.qk_norm
        self.q_norm = RMSNorm(D, config.rms_norm_eps) if has_norms else None
        self.k_norm = RMSNorm(D, config.rms_norm_eps) if has_norms else None
        self.attend = attention

    def forward(
        self, x_BTC: Tensor, cos: Tensor, sin: Tensor, mask: Any, cache: Cache | None
    ) -> Tensor:
        """[B, T, C] to [B, T, C]; `cos`, `sin`: rotary tables; `mask` as `make_mask` gives it."""
        B, T, _ = x_BTC.shape
        q_BTHD = self.q_proj(x_BTC).view(B, T, -1, self.head_dim)
        k_BTKD = self.k_proj(x_BTC).view(B, T, -1, self.head_dim)
        v_BKSD = self.v_proj(x_BTC).view(B, T, -1, self.head_dim).transpose(1, 2)
        # Qwen3 normalises before the rotation: a rotated vector keeps its length.
        if self.q_norm is not None and self.k_norm is not None:
            q_BTHD, k_BTKD = self.q_norm(q_BTHD), self.k_norm(k_BTKD)
        q_BHTD, k_BKSD = q_BTHD.transpose(1, 2), k_BTKD.transpose(1, 2)
        # The tables are fp32, and would make bf16 queries and keys fp32 as well.
        cos, sin = cos.to(q_BHTD.dtype), sin.to(q_BHTD.dtype)
        q_BHTD, k_BKSD = apply_rope(q_BHTD, cos, sin), apply_rope(k_BKSD, cos, sin)
        # Cached keys are rotated already: a token's position never changes.
        if cache is not None:
            k_BKSD, v_BKSD = cache.update(self.layer, k_BKSD, v_BKSD)
        # No family of this architecture drops attention weights out.
        y_BHTD = self.attend(q_BHTD, k_BKSD, v_BKSD, dropout=0.0, mask=mask, scale=self.scale)
        return self.o_proj(y_BHTD.transpose(1, 2).reshape(B, T, -1))  # type: ignore[no-any-return]


class LlamaMLP(nn.Module):
    """SwiGLU (Shazeer 2020), [B, T, C] to [B, T, C]."""

    def __init__(self, config: AnyLlamaConfig) -> None:
        super().__init__()
        C, hidden, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(C, hidden, bias=bias)
        self.up_proj = nn.Linear(C, hidden, bias=bias)
        self.down_proj = nn.Linear(hidden, C, bias=bias)

    def forward(self, x_BTC: Tensor) -> Tensor:
        hidden_BTF = F.silu(self.gate_proj(x_BTC)) * self.up_proj(x_BTC)
        return self.down_proj(hidden_BTF)  # type: ignore[no-any-return]


class LlamaBlock(nn.Module):
    """One layer: attention and MLP or experts, each behind a norm and added to the residual
    stream."""

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
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        x_BTC: Tensor,
        cos: Tensor,
        sin: Tensor,
        masks: tuple[Any, Any],
        cache: Cache | None,
    ) -> tuple[Tensor, Tensor | None]:
        """The residual stream [B, T, C] after this layer, and the router's logits [N, E], None
        without experts.

        Args:
            x_BTC: the residual stream before this layer.
            cos, sin: rotary tables.
            masks: mask of the layers without a window, and mask of those with one.
            cache: keys and values of earlier tokens.
        """
        mask = masks[self.has_window]
        y_BTC = self.self_attn(self.input_layernorm(x_BTC), cos, sin, mask, cache)
        x_BTC = x_BTC + _multiplied(y_BTC, self.residual_multiplier)
        y_BTC, router_logits = self.post_attention_layernorm(x_BTC), None
        if isinstance(self.mlp, SparseMLP):
            y_BTC, router_logits = self.mlp(y_BTC)
        else:
            y_BTC = self.mlp(y_BTC)
        return x_BTC + _multiplied(y_BTC, self.residual_multiplier), router_logits


def _multiplied(x: Tensor, factor: float) -> Tensor:
    # Granite alone has other factors: others are spared a pass over the tensor.
    return x if factor == 1 else x * factor


class LlamaDecoder(nn.Module):
    """Embedding, layers and final norm: Hugging Face's `model`."""

    def __init__(self, config: AnyLlamaConfig, padded_vocab_size: int) -> None:
        super().__init__()
        self.embed_tokens = Embedding(padded_vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(LlamaBlock(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Llama(LanguageModel):
    """A language model of the Llama architecture (Touvron et al. 2023); see `LanguageModel`.

    Attributes:
        rope_frequencies: rotary angles from one position to the next, fp32 [D/2] in any dtype of
            the model.
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
        # Not in the weights' file: it follows from the config.
        self.register_buffer("rope_frequencies", torch.empty(0), persistent=False)
        self.finish_loading()

    def embed(self, input_ids: Tensor) -> Tensor:
        """The first layer's input [B, T, C]; a later stage of a pipeline replaces it."""
        return _multiplied(self.model.embed_tokens(input_ids), self.config.embedding_multiplier)

    def finish(self, x_BTC: Tensor) -> Tensor:
        """The head's input [B, T, C]: see `LanguageModel.finish`."""
        # Granite divides its logits; the hidden states are fewer numbers than those.
        return _multiplied(self.model.norm(x_BTC), 1 / self.config.logits_scaling)

    def finish_loading(self) -> None:
        """Make what a weights file does not hold: the tie of the head and the rotary table."""
        super().finish_loading()
        self._make_rope_table()

    def _make_rope_table(self) -> None:
        # Computed on the CPU also for a model on "meta" or a GPU: the same bits everywhere.
        with torch.device("cpu"):
            frequencies = rope_frequencies(
                self.config.head_dim, self.config.rope_theta, self.config.rope_scaling
            )
        self.rope_frequencies = frequencies.to(self.model.embed_tokens.weight.device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # `model.to(torch.bfloat16)` must not round the rotary table, nor `to_empty` empty it.
        self._make_rope_table()
        return self

    def decode(
        self, input_ids: Tensor, document_ids: Tensor | None, cache: Cache | None
    ) -> tuple[Tensor, list[Tensor]]:
        """The last layer's output [B, T, C], and the logits [N, E] of each layer with a router: see
        `LanguageModel.decode`."""
        positions, cache_positions, total = token_positions(input_ids, document_ids, cache)
        # Computed once for all layers, in fp32: bf16 can not tell position 257 from 258.
        cos, sin = rope_tables(self.rope_frequencies, positions, torch.float32)
        # The masks too: at most two, whatever the number of layers.
        window = self.config.sliding_window
        mask = self.make_mask(cache_positions, total, None, document_ids)
        masks = (mask, mask)
        if window is not None:
            masks = (mask, self.make_mask(cache_positions, total, window, document_ids))
        x_BTC = self.embed(input_ids)
        router_logits: list[Tensor] = []
        for layer in self.model.layers:
            x_BTC, logits_NE = layer(x_BTC, cos, sin, masks, cache)
            if logits_NE is not None:
                router_logits.append(logits_NE)
        return x_BTC, router_logits

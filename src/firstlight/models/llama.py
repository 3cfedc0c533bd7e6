"""Llama and its kin: RMSNorm, rotary positions, grouped-query attention, SwiGLU or experts.

Parameter names are those of Hugging Face's classes. One architecture by configuration
(`llama_config.py`): Llama 2, 3, 3.1 and 3.2, Mistral (sliding window), Qwen2 (biases on queries,
keys and values), Qwen3 (queries and keys normalised), Granite (four multipliers), Mixtral and
Qwen3-MoE (`moe.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firstlight.models.cache import Cache, KVCache
from firstlight.models.llama_config import LlamaConfig, MoEConfig
from firstlight.models.moe import RouterStatistics, SparseMLP, load_balancing_loss
from firstlight.models.ops import (
    IGNORE_INDEX,
    Embedding,
    HeadLoss,
    MaskFunction,
    SelfAttention,
    apply_rope,
    at_least_fp32,
    attention,
    dense_mask,
    document_positions,
    head_loss,
    rope_frequencies,
    rope_tables,
)

AnyLlamaConfig = LlamaConfig | MoEConfig


class RMSNorm(nn.Module):
    """x / rms(x) * weight, the mean of squares taken in fp32 (Zhang and Sennrich 2019)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return (
            F.rms_norm(at_least_fp32(x), self.weight.shape, None, self.eps).to(x.dtype)
            * self.weight
        )


class Attention(SelfAttention):
    """Grouped-query self-attention with rotary positions."""

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
        B, T, _ = x_BTC.shape
        q_BTHD = self.q_proj(x_BTC).view(B, T, -1, self.head_dim)
        k_BTKD = self.k_proj(x_BTC).view(B, T, -1, self.head_dim)
        v_BKSD = self.v_proj(x_BTC).view(B, T, -1, self.head_dim).transpose(1, 2)
        if self.q_norm is not None and self.k_norm is not None:
            q_BTHD, k_BTKD = self.q_norm(q_BTHD), self.k_norm(k_BTKD)
        q_BHTD, k_BKSD = q_BTHD.transpose(1, 2), k_BTKD.transpose(1, 2)
        cos, sin = cos.to(q_BHTD.dtype), sin.to(q_BHTD.dtype)
        q_BHTD, k_BKSD = apply_rope(q_BHTD, cos, sin), apply_rope(k_BKSD, cos, sin)
        if cache is not None:
            k_BKSD, v_BKSD = cache.update(self.layer, k_BKSD, v_BKSD)
        y_BHTD = self.attend(q_BHTD, k_BKSD, v_BKSD, dropout=0.0, mask=mask, scale=self.scale)
        return self.o_proj(y_BHTD.transpose(1, 2).reshape(B, T, -1))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020)."""

    def __init__(self, config: AnyLlamaConfig) -> None:
        super().__init__()
        C, hidden, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(C, hidden, bias=bias)
        self.up_proj = nn.Linear(C, hidden, bias=bias)
        self.down_proj = nn.Linear(hidden, C, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    """One decoder layer: attention and MLP, each behind a norm and added to the stream."""

    def __init__(self, config: AnyLlamaConfig, layer: int) -> None:
        super().__init__()
        self.has_window = config.attention_spec(layer).window is not None
        self.self_attn = Attention(config, layer)
        self.mlp: MLP | SparseMLP
        if isinstance(config, MoEConfig) and config.has_experts(layer):
            self.mlp = SparseMLP(config)
        else:
            self.mlp = MLP(config)
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
        """The stream after this layer, and the router's logits where it has experts.

        `masks` are that of the layers without a window, and that of those with one.
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
    return x if factor == 1 else x * factor


class Decoder(nn.Module):
    """Embedding, layers and final norm: what Hugging Face calls `model`."""

    def __init__(self, config: AnyLlamaConfig, padded_vocab_size: int) -> None:
        super().__init__()
        self.embed_tokens = Embedding(padded_vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Llama(nn.Module):
    """A language model of the Llama architecture.

    Its parameters are not initialised: call `init_weights()` or load some.

    Args:
        config: its shape.
        padded_vocab_size: rows of the embedding and the head, for sizes that matrix units like;
            None is as many as there are tokens. Rows beyond the vocabulary are zero, and have
            no logits.

    Attributes:
        router_statistics: what the routers did in training since it was last emptied; None for
            a dense model.
        head_loss: how the loss is computed from the last hidden states; replaced from outside.
        make_mask: what makes the masks for the layers' `attend`; replaced with it.
    """

    head_loss: HeadLoss
    make_mask: MaskFunction

    #: Names of the module with the token embedding, and of the modules behind the layers.
    embedding_name = "model.embed_tokens"
    final_modules = ("model.norm", "lm_head")
    #: The cut of each module under tensor parallelism: "inputs" are whole on all processes and
    #: used by several cut modules, of which "columns" keep their own outputs, and "rows" add theirs
    #: up; the "table" is cut by rows of the vocabulary, the "head" too, whose outputs are gathered.
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
        super().__init__()
        self.config = config
        rows = padded_vocab_size or config.vocab_size
        self.model = Decoder(config, rows)
        self.lm_head = nn.Linear(config.hidden_size, rows, bias=False)
        self.head_loss, self.make_mask = head_loss, dense_mask
        self.router_statistics = RouterStatistics() if config.expert_count else None
        self.rope_frequencies: Tensor
        self.register_buffer("rope_frequencies", torch.empty(0), persistent=False)
        self.finish_loading()

    @property
    def embedding(self) -> Embedding:
        """The token embedding."""
        return self.model.embed_tokens

    @property
    def layers(self) -> nn.ModuleList:
        """The layers, first to last."""
        return self.model.layers

    def embed(self, input_ids: Tensor) -> Tensor:
        """The first layer's input, [B, T, C]; a later stage of a pipeline replaces it."""
        return _multiplied(self.model.embed_tokens(input_ids), self.config.embedding_multiplier)

    def finish(self, x_BTC: Tensor) -> Tensor:
        """The head's input from the last layer's output, both [B, T, C]; all but the last stage
        of a pipeline replace it."""
        return _multiplied(self.model.norm(x_BTC), 1 / self.config.logits_scaling)

    def finish_loading(self) -> None:
        """Make what is not in the weights' file: the tie of the head and the rotary table."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self._make_rope_table()

    def _make_rope_table(self) -> None:
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

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        """Normal(0, initializer_range); the projections that write into the residual stream
        scaled by 1/sqrt(2 layers), so that its variance does not grow with depth (GPT-2)."""
        std = self.config.initializer_range
        residual_std = std / math.sqrt(2 * self.config.num_hidden_layers)
        vocabulary = (self.model.embed_tokens.weight, self.lm_head.weight)
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            is_residual = "o_proj." in name or "down_proj" in name
            rows = self.config.vocab_size if any(parameter is p for p in vocabulary) else None
            parameter[:rows].normal_(0.0, residual_std if is_residual else std, generator=generator)
            if rows is not None:
                parameter[rows:].zero_()

    def make_cache(self, batch_size: int, max_tokens: int, dtype: torch.dtype) -> KVCache:
        """An empty key-value cache on the model's device."""
        return KVCache(
            self.config.num_hidden_layers,
            self.config.num_key_value_heads,
            self.config.head_dim,
            batch_size=batch_size,
            max_tokens=max_tokens,
            dtype=dtype,
            device=self.model.embed_tokens.weight.device,
        )

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        document_ids: Tensor | None = None,
        *,
        cache: Cache | None = None,
        logits_to_keep: int = 0,
    ) -> Tensor:
        """Logits [B, T, V] of the next token; with `labels` [B, T], the summed loss instead.

        In training, a model with experts adds to that sum `router_aux_loss_coef` times the
        load-balancing loss of this forward pass for every valid label.

        Args:
            input_ids: int64 [B, T].
            labels: the token after each input token, or -100 to leave it out of the loss.
            document_ids: int [B, T], equal for tokens next to each other of one document: tokens
                see their own document only, and positions start anew in each. Not with a cache.
            cache: keys and values of the tokens before these; the new ones are added.
            logits_to_keep: only the last so many positions' logits; 0 for all.
        """
        T = total = input_ids.shape[1]
        if cache is None:
            places = torch.arange(T, device=input_ids.device)
        else:
            places, total = cache.positions(T), cache.total(T)
        positions = places if document_ids is None else document_positions(document_ids)
        cos, sin = rope_tables(self.rope_frequencies, positions, torch.float32)
        window = self.config.sliding_window
        mask = self.make_mask(places, total, None, document_ids)
        masks = (mask, mask)
        if window is not None:
            masks = (mask, self.make_mask(places, total, window, document_ids))
        x_BTC = self.embed(input_ids)
        router_logits: list[Tensor] = []
        for layer in self.model.layers:
            x_BTC, logits_NE = layer(x_BTC, cos, sin, masks, cache)
            if logits_NE is not None:
                router_logits.append(logits_NE)
        if cache is not None:
            cache.advance(T)
        x_BTC = self.finish(x_BTC[:, -logits_to_keep:] if logits_to_keep else x_BTC)
        vocab_size = self.config.vocab_size
        if labels is None:
            return self.lm_head(x_BTC)[..., :vocab_size]  # type: ignore[no-any-return]
        loss = self.head_loss(x_BTC, self.lm_head, vocab_size, labels)
        if self.training and router_logits:
            loss = loss + self._router_loss_sum(router_logits, labels)
        return loss

    def _router_loss_sum(self, router_logits: list[Tensor], labels: Tensor) -> Tensor:
        assert isinstance(self.config, MoEConfig)
        assert self.router_statistics is not None
        auxiliary, visits_LE = load_balancing_loss(router_logits, self.config.num_experts_per_tok)
        valid = (labels != IGNORE_INDEX).sum()
        self.router_statistics.add(auxiliary.detach() * valid, visits_LE)
        return self.config.router_aux_loss_coef * auxiliary * valid

"""The Llama-like models: RMSNorm, rotary positions, grouped-query attention, SwiGLU or experts.

All families share one architecture with settings: the model's config (`llama_config.py`) and the
facts of its family (`llama_families.py`). Settings are, for example, the norms of a layer and their
rounding, the MLP's activation and gate, fused matrices, windows, rotary tables, and soft caps of
scores and logits. The layers are in `llama_layers.py`, experts in `moe.py`. Parameter names are
those of Hugging Face's classes.

Shape letters as in `llama_layers.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from firstlight.models.cache import Cache
from firstlight.models.language_model import LanguageModel, token_positions
from firstlight.models.llama_config import DecoderConfig, LlamaConfig, MoEConfig
from firstlight.models.llama_layers import LlamaBlock, make_norm, multiplied
from firstlight.models.ops import Embedding
from firstlight.models.rope import (
    DynamicRope,
    LongRope,
    Ropes,
    dynamic_frequencies,
    rope_frequencies,
    rope_magnitude,
    rope_tables,
)


class LlamaDecoder(nn.Module):
    """Embedding, layers and final norm: Hugging Face's `model`."""

    def __init__(
        self, config: DecoderConfig, padded_vocab_size: int, block: type[LlamaBlock]
    ) -> None:
        super().__init__()
        self.embed_tokens = Embedding(padded_vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(block(config, i) for i in range(config.num_hidden_layers))
        self.norm = make_norm(config, config.hidden_size)


class Llama(LanguageModel):
    """A language model of the Llama architecture (Touvron et al. 2023, arXiv 2302.13971); see
    `LanguageModel`.

    Attributes:
        rope_frequencies: rotary frequencies, see `rope.rope_frequencies`; fp32 [R/2] for a model of
            any dtype.
        local_rope_frequencies: rotary frequencies of the layers with a window; only if their base
            is set.
        long_rope_frequencies: rotary frequencies for texts longer than the original context; only
            with LongRoPE.
        embedding_factor: factor of the embeddings.
        block_class: class of a layer.
    """

    config: LlamaConfig | MoEConfig

    block_class: ClassVar[type[LlamaBlock]] = LlamaBlock

    embedding_name = "model.embed_tokens"
    layers_name = "model.layers"
    final_modules = ("model.norm", "lm_head")
    residual_projections: ClassVar[tuple[str, ...]] = ("o_proj.", "down_proj")
    # Kinds of tensor parallelism:
    # "inputs": a module whose input is replicated, for the sharded modules inside it;
    # "columns": a linear layer sharded by output features, whose output stays sharded;
    # "rows": a linear layer sharded by input features, whose outputs are summed over processes;
    # "table": the embedding, sharded by the vocabulary;
    # "head": the head, sharded by the vocabulary, whose outputs are gathered.
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

    def __init__(self, config: DecoderConfig, padded_vocab_size: int | None = None) -> None:
        super().__init__(config)
        rows = padded_vocab_size or config.vocab_size
        self.add_decoder(rows)
        self.lm_head = nn.Linear(config.hidden_size, rows, bias=False)
        self.rope_frequencies: Tensor
        self.local_rope_frequencies: Tensor
        # Not persistent: the frequencies follow from the config.
        self.register_buffer("rope_frequencies", torch.empty(0), persistent=False)
        if config.rope_local_base_freq is not None:
            self.register_buffer("local_rope_frequencies", torch.empty(0), persistent=False)
        if isinstance(config.rope_scaling, LongRope):
            self.long_rope_frequencies: Tensor
            self.register_buffer("long_rope_frequencies", torch.empty(0), persistent=False)
        # Gemma's norms add 1 to their weight, so that a weight of zero means a factor of 1.
        self.norm_init = 0.0 if config.family.norm_kind == "one_plus" else 1.0
        self.finish_loading()

    def add_decoder(self, rows: int) -> None:
        """Create embedding (with `rows` rows), layers and final norm, under the names of the
        family's files."""
        self.model = LlamaDecoder(self.config, rows, self.block_class)

    def embed(self, input_ids: Tensor) -> Tensor:
        """The first layer's input [B, T, C] from token ids, int64 [B, T].

        In pipeline parallelism, all stages but the first replace this method.
        """
        return multiplied(self.embedding(input_ids), self.embedding_factor)

    def finish(self, x_BTC: Tensor) -> Tensor:
        """The head's input [B, T, C]: see `LanguageModel.finish`."""
        # Granite divides its logits; dividing the hidden states is the same, with fewer elements.
        return multiplied(self.final_norm(x_BTC), 1 / self.config.logits_scaling)

    def finish_loading(self) -> None:
        """Set what weights files do not contain: the tie of the head, the rotary frequencies and
        the factor of the embeddings."""
        super().finish_loading()
        self._make_tables()

    def _make_tables(self) -> None:
        config = self.config
        weight = self.embedding.weight
        scaling = self.config.rope_scaling
        self.rope_frequencies = self._frequencies(is_long=False)
        if isinstance(scaling, LongRope):
            self.long_rope_frequencies = self._frequencies(is_long=True)
        if config.rope_local_base_freq is not None:
            with torch.device("cpu"):
                local = rope_frequencies(config.rotary_dim, config.rope_local_base_freq, None)
            self.local_rope_frequencies = local.to(weight.device)
        self.embedding_factor = config.embedding_multiplier
        if config.family.scales_embeddings:
            # Rounded to the dtype of the embeddings, as in transformers.
            root = torch.tensor(config.hidden_size**0.5, dtype=weight.dtype, device="cpu")
            self.embedding_factor = root.item()

    def _frequencies(self, *, is_long: bool) -> Tensor:
        """Rotary frequencies, fp32 [R/2] on the model's device; `is_long` as in
        `rope.rope_frequencies`."""
        config = self.config
        # Computed on the CPU for models on any device, so that the bits are the same everywhere.
        with torch.device("cpu"):
            frequencies = rope_frequencies(
                config.rotary_dim, config.rope_theta, config.rope_scaling, is_long=is_long
            )
        return frequencies.to(self.embedding.weight.device)

    def _frequencies_at(self, length: int | Tensor) -> Tensor:
        """Rotary frequencies for texts of `length` tokens: fp32 [R/2], or [B, 1, R/2] for lengths
        int64 [B]."""
        config = self.config
        scaling = self.config.rope_scaling
        short = self.rope_frequencies
        limit = config.max_position_embeddings
        if isinstance(scaling, LongRope):
            limit = scaling.original_max_position_embeddings
        elif not isinstance(scaling, DynamicRope):
            return short
        if isinstance(length, int) and length <= limit:
            return short
        if isinstance(scaling, LongRope):
            long = self.long_rope_frequencies
        else:
            length = torch.as_tensor(length, device=short.device)
            long = dynamic_frequencies(
                config.rotary_dim, config.rope_theta, scaling, length, max_positions=limit
            )
        if isinstance(length, int) or length.dim() == 0:
            return long
        is_long_B11 = (length > limit)[:, None, None]
        return torch.where(is_long_B11, long if long.dim() == 1 else long[:, None], short)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # Again, because `model.to(torch.bfloat16)` has rounded the frequencies, and `to_empty` has
        # left them without values.
        self._make_tables()
        return self

    def _ropes(self, positions: Tensor, length: int | Tensor) -> Ropes:
        """The model's rotary tables in fp32: one pair (cos, sin), or two if layers with a window
        have another base.

        Args:
            positions: positions of the tokens, int64 [T] or [B, T].
            length: tokens of the texts, see `Cache.text_length`.
        """
        config = self.config
        frequencies = self._frequencies_at(length)
        # torch's compiler can't generate code for complex numbers.
        polar = config.family.rope.polar and not torch.compiler.is_compiling()
        # In fp32, because bf16 can't represent position 257.
        tables = rope_tables(frequencies, positions, torch.float32, polar=polar)
        # YaRN and LongRoPE make queries and keys longer, which sharpens the softmax: it is over
        # more tokens in a longer context.
        magnitude = rope_magnitude(config.rope_scaling, config.max_position_embeddings)
        if magnitude != 1:
            tables = (tables[0] * magnitude, tables[1] * magnitude)
        if config.rope_local_base_freq is None:
            return (tables,)
        # Layers with a window see only near tokens, so their frequencies are not rescaled for a
        # longer context (Gemma 3).
        return tables, rope_tables(self.local_rope_frequencies, positions, torch.float32)

    def make_masks(
        self, cache_positions: Tensor, total: int, document_ids: Tensor | None, positions: Tensor
    ) -> tuple[Any, Any]:
        """Masks of layers without a window and of layers with a window, each a result of
        `make_mask`; the first again if the model has no window.

        Args:
            cache_positions, total, positions: results of `token_positions`.
            document_ids: document of each token [B, T], see `forward`.
        """
        window = self.config.sliding_window
        mask = self.make_mask(cache_positions, total, None, document_ids)
        if window is None:
            return mask, mask
        return mask, self.make_mask(cache_positions, total, window, document_ids)

    def decode(
        self, input_ids: Tensor, document_ids: Tensor | None, cache: Cache | None
    ) -> tuple[Tensor, list[Tensor]]:
        """See `LanguageModel.decode`."""
        positions, cache_positions, total = token_positions(input_ids, document_ids, cache)
        # Rotary tables and masks are computed once for all layers.
        new = input_ids.shape[1]
        length = new if cache is None else cache.text_length(new)
        ropes = self._ropes(positions, length)
        masks = self.make_masks(cache_positions, total, document_ids, positions)
        x_BTC = self.embed(input_ids)
        router_logits: list[Tensor] = []
        for layer in self.layers:
            x_BTC, logits_NE = layer(x_BTC, ropes, masks, cache)
            if logits_NE is not None:
                router_logits.append(logits_NE)
        return x_BTC, router_logits

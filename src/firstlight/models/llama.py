"""Llama (Touvron et al. 2023, arXiv 2302.13971). The model consists of an embedding, pre-norm
layers, a final norm and a head. Each layer has grouped-query attention with rotary positions, and a
SwiGLU MLP.

The classes are ordered from the smallest module to the complete model. Families with different
layers derive their classes from the classes in this file. Small variants are defined in
`llama_variants.py`. Larger variants have separate files, such as `gpt_oss.py`. The config is
defined in `llama_config.py`, and the specifications of the families are in `llama_families.py`.
Parameters have the same names as in Hugging Face's `LlamaForCausalLM`.

Shape letters are defined in `models/ops.py`. In addition, F is the inner width of the MLP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firstlight.models.cache import Cache
from firstlight.models.language_model import LanguageModel, token_positions
from firstlight.models.llama_config import DecoderConfig, LlamaConfig
from firstlight.models.ops import (
    AttentionOptions,
    Embedding,
    SelfAttention,
    at_least_fp32,
    attention,
)
from firstlight.models.rope import Ropes, RotaryTables, apply_rope


def normalized(x: Tensor, eps: float) -> Tensor:
    """Divide x [..., size] by its root mean square over the last dimension. The result has the same
    shape and is in at least fp32, because the mean of the squares would have only 8 bits of
    precision in bf16."""
    return F.rms_norm(at_least_fp32(x), x.shape[-1:], None, eps)


class RMSNorm(nn.Module):
    """RMSNorm (Zhang and Sennrich 2019, arXiv 1910.07467): x / rms(x) * weight, where rms is the
    root mean square over the last dimension. Inputs and outputs have shape [..., size].

    Args:
        size: length of the last dimension.
        eps: term added to the mean of the squares.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        # The result is rounded before it is multiplied by the weight, as in transformers, so that
        # the logits are identical.
        return normalized(x, self.eps).to(x.dtype) * self.weight


class LlamaAttention(SelfAttention):
    """Grouped-query self-attention (Ainslie et al. 2023, arXiv 2305.13245) with rotary positions.

    Attributes:
        norm_class: norm that is applied to queries and keys, in families with QK-norm.
    """

    norm_class: ClassVar[type[nn.Module]] = RMSNorm

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        D = config.head_dim
        spec = config.attention_spec(layer)
        self.layer, self.head_dim = layer, D
        self.scale, self.rope = spec.scale, spec.rope
        # Total widths of the queries, keys and values of all heads.
        keys = config.num_key_value_heads * D
        self.sizes = (config.num_attention_heads * D, keys, keys)
        self.add_projections(config)
        self.has_qk_norm = config.qk_norm == "head"
        if self.has_qk_norm:
            self.q_norm = self.norm_class(D, config.rms_norm_eps)
            self.k_norm = self.norm_class(D, config.rms_norm_eps)
        # The function is an attribute, so that efficiency methods can replace it with a different
        # kernel.
        self.attend = attention

    def add_projections(self, config: DecoderConfig) -> None:
        """Create the projections. Their names match the family's checkpoint files."""
        C, bias = config.hidden_size, config.qkv_bias
        q_size, k_size, v_size = self.sizes
        self.q_proj = nn.Linear(C, q_size, bias=bias)
        self.k_proj = nn.Linear(C, k_size, bias=bias)
        self.v_proj = nn.Linear(C, v_size, bias=bias)
        self.o_proj = nn.Linear(q_size, C, bias=config.output_bias)

    def project(self, x_BTC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [B, T, H, D], keys [B, T, K, D] and values [B, T, K, D] for the layer's
        input [B, T, C]."""
        # `unflatten` is not used, because it causes graph breaks when the planner traces a compiled
        # step.
        heads = (*x_BTC.shape[:2], -1, self.head_dim)
        q_BTHD = self.q_proj(x_BTC).view(heads)
        k_BTKD = self.k_proj(x_BTC).view(heads)
        v_BTKD = self.v_proj(x_BTC).view(heads)
        return q_BTHD, k_BTKD, v_BTKD

    def normalize(self, q_BTHD: Tensor, k_BTKD: Tensor) -> tuple[Tensor, Tensor]:
        """Apply the family's norms to queries and keys, without changing their shapes."""
        if not self.has_qk_norm:
            return q_BTHD, k_BTKD
        return self.q_norm(q_BTHD), self.k_norm(k_BTKD)

    def rotate(self, q_BHTD: Tensor, k_BKTD: Tensor, ropes: Ropes) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys by their positions, without changing their shapes."""
        assert self.rope is not None
        # Without the cast, the fp32 tables would promote the products to fp32.
        cos, sin = (table.to(q_BHTD.dtype) for table in ropes[self.rope])
        return apply_rope(q_BHTD, cos, sin), apply_rope(k_BKTD, cos, sin)

    def options(self, mask: Any) -> AttentionOptions:
        """Return the options passed to the attention kernel in addition to queries, keys and
        values."""
        return AttentionOptions(mask, scale=self.scale)

    def forward(self, x_BTC: Tensor, ropes: Ropes, mask: Any, cache: Cache | None) -> Tensor:
        """Compute attention. The result has the shape [B, T, C].

        Args:
            x_BTC: input of the layer, normalised if the family has a norm before attention.
            ropes: the model's rotary tables.
            mask: result of the model's `make_mask`.
            cache: keys and values of earlier tokens.
        """
        q_BTHD, k_BTKD, v_BTKD = self.project(x_BTC)
        # Queries and keys are normalised before the rotation. The rotation does not change their
        # length.
        q_BTHD, k_BTKD = self.normalize(q_BTHD, k_BTKD)
        # Transposed views do not have to be copied, because the kernels accept any strides in the
        # head and token dimensions.
        q_BHTD, k_BKSD, v_BKSD = (x.transpose(1, 2) for x in (q_BTHD, k_BTKD, v_BTKD))
        q_BHTD, k_BKSD = self.rotate(q_BHTD, k_BKSD, ropes)
        # Keys are cached after their rotation, because a token's position never changes.
        if cache is not None:
            k_BKSD, v_BKSD = cache.update(self.layer, k_BKSD, v_BKSD)
        y_BHTD = self.attend(q_BHTD, k_BKSD, v_BKSD, self.options(mask))
        y_BTC = y_BHTD.transpose(1, 2).reshape(*x_BTC.shape[:2], -1)
        return self.o_proj(y_BTC)  # type: ignore[no-any-return]


class LlamaMLP(nn.Module):
    """SwiGLU (Shazeer 2020, arXiv 2002.05202), an MLP whose hidden activations are multiplied by a
    gate. Inputs and outputs have shape [B, T, C]."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        C, hidden = config.hidden_size, config.intermediate_size
        bias = config.mlp_bias
        self.gate_proj = nn.Linear(C, hidden, bias=bias)
        self.up_proj = nn.Linear(C, hidden, bias=bias)
        self.down_proj = nn.Linear(hidden, C, bias=bias)

    def forward(self, x_BTC: Tensor) -> Tensor:
        hidden_BTF = F.silu(self.gate_proj(x_BTC)) * self.up_proj(x_BTC)
        return self.down_proj(hidden_BTF)  # type: ignore[no-any-return]


class LlamaBlock(nn.Module):
    """One layer, which consists of attention and an MLP. Their inputs are normalised, and their
    outputs are added to the residual stream.

    Attributes:
        attention_class, mlp_class, norm_class: classes of attention, MLP and norms, which
            subclasses override.
    """

    attention_class: ClassVar[Callable[..., SelfAttention]] = LlamaAttention
    mlp_class: ClassVar[Callable[..., nn.Module]] = LlamaMLP
    norm_class: ClassVar[type[nn.Module]] = RMSNorm

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.has_window = config.attention_spec(layer).window is not None
        self.add_attention(config, layer)
        self.mlp = self.make_mlp(config, layer)
        self.add_norms(config)

    def add_attention(self, config: Any, layer: int) -> None:
        """Create the layer's attention module, or the module that the family uses in its place. The
        name of the module matches the family's checkpoint files."""
        self.self_attn = self.attention_class(config, layer)

    def make_mlp(self, config: Any, layer: int) -> nn.Module:
        """Create the layer's MLP."""
        return self.mlp_class(config)

    def add_norms(self, config: DecoderConfig) -> None:
        """Create the norms. Their names match the family's checkpoint files."""
        self.input_layernorm = self.norm_class(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = self.norm_class(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, x_BTC: Tensor, ropes: Ropes, masks: tuple[Any, Any], cache: Cache | None
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the layer. Return the residual stream [B, T, C] after the layer, and the router's
        logits [N, E]. The logits are None for a layer without experts.

        Args:
            x_BTC: residual stream before this layer, [B, T, C].
            ropes: the model's rotary tables.
            masks: the mask for layers without a sliding window, and the mask for layers with one.
            cache: keys and values of earlier tokens.
        """
        mask = self.own_mask(masks)
        x_BTC = x_BTC + self.self_attn(self.input_layernorm(x_BTC), ropes, mask, cache)
        return x_BTC + self.mlp(self.post_attention_layernorm(x_BTC)), None

    def own_mask(self, masks: tuple[Any, Any]) -> Any:
        """Return the mask for this layer."""
        # torch.compile of torch 2.11 does not support a bool as an index.
        return masks[int(self.has_window)]


class LlamaDecoder(nn.Module):
    """The embedding, the layers and the final norm. Hugging Face's model classes call
    this module `model`."""

    def __init__(
        self, config: DecoderConfig, padded_vocab_size: int, block: type[LlamaBlock]
    ) -> None:
        super().__init__()
        self.embed_tokens = Embedding(padded_vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(block(config, i) for i in range(config.num_hidden_layers))
        self.norm = block.norm_class(config.hidden_size, config.rms_norm_eps)


class Llama(LanguageModel):
    """A language model of the Llama architecture. `LanguageModel.forward` computes the logits or
    the loss from the result of `decode`.

    Attributes:
        rotary: rotary frequencies, from which each forward pass computes tables of cos and sin.
        block_class: class of a layer.
    """

    config: LlamaConfig

    block_class: ClassVar[type[LlamaBlock]] = LlamaBlock

    embedding_name = "model.embed_tokens"
    layers_name = "model.layers"
    final_modules = ("model.norm", "lm_head")
    residual_projections: ClassVar[tuple[str, ...]] = ("o_proj.", "down_proj")
    # Kinds of sharding in tensor parallelism. "inputs" is a module with sharded submodules and a
    # replicated input. "columns" is a linear layer sharded by output features; its output stays
    # sharded. "rows" is a linear layer sharded by input features; its outputs are summed over
    # processes. "table" is the embedding, sharded over the vocabulary. "head" is the head, sharded
    # over the vocabulary; its outputs are gathered.
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
        self.rotary = RotaryTables(config)
        self.finish_loading()

    def add_decoder(self, rows: int) -> None:
        """Create the embedding, the layers and the final norm. Their names match the family's
        checkpoint files. `rows` is the number of rows of the embedding."""
        self.model = LlamaDecoder(self.config, rows, self.block_class)

    def finish_loading(self) -> None:
        """Set up the parts that weight files do not contain: the tied head and the rotary
        frequencies."""
        super().finish_loading()
        self.rotary.reset(self.embedding.weight.device)

    def embed(self, input_ids: Tensor) -> Tensor:
        """Return the first layer's input [B, T, C] for token ids, int64 [B, T].

        In pipeline parallelism, this method is replaced in all stages except the first one.
        """
        return self.embedding(input_ids)  # type: ignore[no-any-return]

    def make_masks(
        self, cache_positions: Tensor, total: int, document_ids: Tensor | None, positions: Tensor
    ) -> tuple[Any, Any]:
        """Return the mask for layers without a sliding window and the mask for layers with one.
        Both are made by `make_mask`. If the model does not have a sliding window, they are the same
        object.

        Args:
            cache_positions, total, positions: results of `token_positions`.
            document_ids: id of each token's document, int [B, T] (see `LanguageModel.forward`).
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
        ropes = self.rotary.tables(positions, new if cache is None else cache.text_length(new))
        masks = self.make_masks(cache_positions, total, document_ids, positions)
        x_BTC = self.embed(input_ids)
        router_logits: list[Tensor] = []
        for layer in self.layers:
            x_BTC, logits_NE = layer(x_BTC, ropes, masks, cache)
            if logits_NE is not None:
                router_logits.append(logits_NE)
        return x_BTC, router_logits

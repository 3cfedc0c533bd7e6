"""Variants of Llama's layers for families that differ from `llama.py` in only a few lines.

`VARIANTS` maps each of these families to its model class. All other families use `Llama` itself.
The specifications of all families are in `llama_families.py`. Shape letters are defined in
`llama.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firstlight.models.blockwise import blockwise_attention
from firstlight.models.cache import Cache
from firstlight.models.llama import Llama, LlamaAttention, LlamaBlock, LlamaMLP, RMSNorm, normalized
from firstlight.models.llama_config import DecoderConfig
from firstlight.models.ops import AttentionOptions, at_least_fp32
from firstlight.models.rope import Ropes, apply_rope, apply_rope_to_neighbours

# Modules that several families use


class WideRMSNorm(RMSNorm):
    """RMSNorm that rounds its result after multiplying by the weight (OLMo, gpt-oss)."""

    def forward(self, x: Tensor) -> Tensor:
        return (normalized(x, self.eps) * at_least_fp32(self.weight)).to(x.dtype)


class OnePlusRMSNorm(RMSNorm):
    """RMSNorm that multiplies by 1 + weight and then rounds its result (Gemma, Qwen3-Next). Because
    the stored weight is the factor minus 1, weight decay pulls the factor towards 1."""

    def forward(self, x: Tensor) -> Tensor:
        return (normalized(x, self.eps) * (1.0 + at_least_fp32(self.weight))).to(x.dtype)


class FusedMLP(nn.Module):
    """SwiGLU with a single matrix for the gate and up projections. Inputs and outputs have shape
    [B, T, C]."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        C, hidden = config.hidden_size, config.intermediate_size
        bias = config.mlp_bias
        self.gate_up_proj = nn.Linear(C, 2 * hidden, bias=bias)
        self.down_proj = nn.Linear(hidden, C, bias=bias)

    def forward(self, x_BTC: Tensor) -> Tensor:
        # The rows of the gate come first, as in the families' checkpoint files.
        gate_BTF, up_BTF = self.gate_up_proj(x_BTC).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate_BTF) * up_BTF)  # type: ignore[no-any-return]


class OutputNormBlock(LlamaBlock):
    """A layer that normalises the outputs of attention and of the MLP before they are added to the
    residual stream. `FamilySpec.norms` contains the names of these norms and, if the family also
    normalises the inputs, the names of the input norms."""

    def add_norms(self, config: DecoderConfig) -> None:
        """See `LlamaBlock.add_norms`."""
        self.norms = config.family.norms
        for name in vars(self.norms).values():
            if name is not None:
                self.add_module(name, self.norm_class(config.hidden_size, config.rms_norm_eps))

    def forward(
        self, x_BTC: Tensor, ropes: Ropes, masks: tuple[Any, Any], cache: Cache | None
    ) -> tuple[Tensor, None]:
        """See `LlamaBlock.forward`."""
        norms = self.norms
        y_BTC = self._norm(norms.before_attention, x_BTC)
        y_BTC = self.self_attn(y_BTC, ropes, self.own_mask(masks), cache)
        x_BTC = x_BTC + self._norm(norms.after_attention, y_BTC)
        y_BTC = self.mlp(self._norm(norms.before_mlp, x_BTC))
        return x_BTC + self._norm(norms.after_mlp, y_BTC), None

    def _norm(self, name: str | None, x_BTC: Tensor) -> Tensor:
        return x_BTC if name is None else getattr(self, name)(x_BTC)


# Arcee


class ArceeMLP(nn.Module):
    """An MLP with squared ReLU (So et al. 2021, Primer, arXiv 2109.08668) and without a gate.
    Inputs and outputs have shape [B, T, C]."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        C, hidden = config.hidden_size, config.intermediate_size
        bias = config.mlp_bias
        self.up_proj = nn.Linear(C, hidden, bias=bias)
        self.down_proj = nn.Linear(hidden, C, bias=bias)

    def forward(self, x_BTC: Tensor) -> Tensor:
        return self.down_proj(F.relu(self.up_proj(x_BTC)).square())  # type: ignore[no-any-return]


class ArceeBlock(LlamaBlock):
    """One layer of Arcee's AFM."""

    mlp_class = ArceeMLP


class Arcee(Llama):
    """A language model of Arcee's AFM family: a Llama whose MLPs have no gate."""

    block_class = ArceeBlock


# Gemma


class GemmaAttention(LlamaAttention):
    """Gemma's attention: with a soft cap on the scores in Gemma 2, and with norms of queries and
    keys in Gemma 3."""

    norm_class = OnePlusRMSNorm

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.softcap = config.attn_logit_softcapping
        if self.softcap is not None:
            # torch's fused kernels do not support a soft cap.
            self.attend = blockwise_attention

    def options(self, mask: Any) -> AttentionOptions:
        """See `LlamaAttention.options`."""
        return AttentionOptions(mask, scale=self.scale, softcap=self.softcap)


class GemmaMLP(LlamaMLP):
    """GeGLU (Shazeer 2020, arXiv 2002.05202): an MLP whose gate is the tanh approximation of
    GELU."""

    def forward(self, x_BTC: Tensor) -> Tensor:
        hidden_BTF = F.gelu(self.gate_proj(x_BTC), approximate="tanh") * self.up_proj(x_BTC)
        return self.down_proj(hidden_BTF)  # type: ignore[no-any-return]


class GemmaBlock(OutputNormBlock):
    """One layer that normalises the inputs and outputs of attention and of the MLP."""

    attention_class = GemmaAttention
    mlp_class = GemmaMLP
    norm_class = OnePlusRMSNorm


class Gemma(Llama):
    """A Gemma 2 or Gemma 3 language model (arXiv 2408.00118, 2503.19786). It also multiplies the
    embeddings by sqrt(hidden_size)."""

    block_class = GemmaBlock
    # The norms add 1 to their weights, so a weight of zero means a factor of 1.
    norm_init = 0.0

    def finish_loading(self) -> None:
        """See `Llama.finish_loading`."""
        super().finish_loading()
        self._set_embedding_factor()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._set_embedding_factor()
        return self

    def _set_embedding_factor(self) -> None:
        # The factor is rounded to the dtype of the embeddings, as in transformers.
        dtype = self.embedding.weight.dtype
        root = torch.tensor(self.config.hidden_size**0.5, dtype=dtype, device="cpu")
        self.embedding_factor = root.item()

    def embed(self, input_ids: Tensor) -> Tensor:
        """Return the first layer's input [B, T, C] for token ids. See `Llama.embed` for the
        arguments."""
        return super().embed(input_ids) * self.embedding_factor


# GLM-4


class Glm4Attention(LlamaAttention):
    """Attention whose rotary positions rotate pairs of neighbouring dimensions."""

    def rotate(self, q_BHTD: Tensor, k_BKTD: Tensor, ropes: Ropes) -> tuple[Tensor, Tensor]:
        """See `LlamaAttention.rotate`."""
        cos, sin = (table.to(q_BHTD.dtype) for table in ropes[0])
        rotated_q = apply_rope_to_neighbours(q_BHTD, cos, sin)
        return rotated_q, apply_rope_to_neighbours(k_BKTD, cos, sin)


class Glm4Block(OutputNormBlock):
    """One layer that normalises the inputs and outputs of attention and of the MLP."""

    attention_class, mlp_class = Glm4Attention, FusedMLP


class Glm4(Llama):
    """A GLM-4 language model."""

    block_class = Glm4Block


# Granite


class GraniteBlock(LlamaBlock):
    """One layer that multiplies the outputs of attention and of the MLP by a factor."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.factor = config.residual_multiplier

    def forward(
        self, x_BTC: Tensor, ropes: Ropes, masks: tuple[Any, Any], cache: Cache | None
    ) -> tuple[Tensor, None]:
        """See `LlamaBlock.forward`."""
        mask = self.own_mask(masks)
        y_BTC = self.self_attn(self.input_layernorm(x_BTC), ropes, mask, cache)
        x_BTC = x_BTC + y_BTC * self.factor
        return x_BTC + self.mlp(self.post_attention_layernorm(x_BTC)) * self.factor, None


class Granite(Llama):
    """A language model of IBM's Granite 3 family, which multiplies embeddings, residual branches
    and logits by factors."""

    block_class = GraniteBlock

    def embed(self, input_ids: Tensor) -> Tensor:
        """Return the first layer's input [B, T, C] for token ids. See `Llama.embed` for the
        arguments."""
        return super().embed(input_ids) * self.config.embedding_multiplier

    def finish(self, x_BTC: Tensor) -> Tensor:
        """Return the head's input [B, T, C] for the last layer's output. See `LanguageModel.finish`
        for the arguments."""
        # The hidden states are divided instead of the logits. The effect is the same, and hidden
        # states have fewer elements.
        return super().finish(x_BTC) * (1 / self.config.logits_scaling)


# OLMo


class OlmoAttention(LlamaAttention):
    """Attention that normalises queries and keys over all heads together, and rotates them in
    fp32."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.q_norm = WideRMSNorm(self.sizes[0], config.rms_norm_eps)
        self.k_norm = WideRMSNorm(self.sizes[1], config.rms_norm_eps)

    def normalize(self, q_BTHD: Tensor, k_BTKD: Tensor) -> tuple[Tensor, Tensor]:
        """See `LlamaAttention.normalize`."""
        q_BTHD = self.q_norm(q_BTHD.flatten(2)).view(q_BTHD.shape)
        return q_BTHD, self.k_norm(k_BTKD.flatten(2)).view(k_BTKD.shape)

    def rotate(self, q_BHTD: Tensor, k_BKTD: Tensor, ropes: Ropes) -> tuple[Tensor, Tensor]:
        """See `LlamaAttention.rotate`."""
        assert self.rope is not None
        tables, dtype = ropes[self.rope], q_BHTD.dtype
        return apply_rope(q_BHTD, *tables).to(dtype), apply_rope(k_BKTD, *tables).to(dtype)


class OlmoBlock(OutputNormBlock):
    """One layer that normalises only the outputs of attention and of the MLP."""

    attention_class, norm_class = OlmoAttention, WideRMSNorm


class Olmo(Llama):
    """An OLMo 2 or OLMo 3 language model (arXiv 2501.00656, 2512.13961)."""

    block_class = OlmoBlock


# Phi-3


class Phi3Attention(LlamaAttention):
    """Attention with one matrix for queries, keys and values."""

    def add_projections(self, config: DecoderConfig) -> None:
        """See `LlamaAttention.add_projections`."""
        C, bias = config.hidden_size, config.qkv_bias
        self.qkv_proj = nn.Linear(C, sum(self.sizes), bias=bias)
        self.o_proj = nn.Linear(self.sizes[0], C, bias=config.output_bias)

    def project(self, x_BTC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `LlamaAttention.project`."""
        heads = (*x_BTC.shape[:2], -1, self.head_dim)
        q, k, v = self.qkv_proj(x_BTC).split(self.sizes, dim=-1)
        return q.view(heads), k.view(heads), v.view(heads)


class Phi3Block(LlamaBlock):
    """One layer with fused projections."""

    attention_class, mlp_class = Phi3Attention, FusedMLP


class Phi3(Llama):
    """A Phi-3 or Phi-4 language model."""

    block_class = Phi3Block


# SmolLM3


class SmolLM3Attention(LlamaAttention):
    """Attention without rotary positions in some layers (Yang et al. 2025, arXiv 2501.18795)."""

    def rotate(self, q_BHTD: Tensor, k_BKTD: Tensor, ropes: Ropes) -> tuple[Tensor, Tensor]:
        """See `LlamaAttention.rotate`."""
        if self.rope is None:
            return q_BHTD, k_BKTD
        return super().rotate(q_BHTD, k_BKTD, ropes)


class SmolLM3Block(LlamaBlock):
    """One layer, with or without rotary positions."""

    attention_class = SmolLM3Attention


class SmolLM3(Llama):
    """A SmolLM3 language model."""

    block_class = SmolLM3Block


# StableLM


class HeadNorms(nn.Module):
    """LayerNorm over each head, with separate weights for each head and without biases. Inputs and
    outputs have shape [B, T, H, D].

    Args:
        heads, head_dim: H and D.
        eps: term added to the variance.
    """

    def __init__(self, heads: int, head_dim: int, eps: float) -> None:
        super().__init__()
        # There is a separate module for each head, but only to match the names in the family's
        # checkpoint files. `forward` normalises all heads at once.
        self.norms = nn.ModuleList(nn.LayerNorm(head_dim, eps, bias=False) for _ in range(heads))
        self.eps = eps

    def forward(self, x_BTHD: Tensor) -> Tensor:
        weight_HD = at_least_fp32(torch.stack(list(self.parameters())))
        # `layer_norm` is called without weights, because it would apply the same weights to all
        # heads.
        normal = F.layer_norm(at_least_fp32(x_BTHD), x_BTHD.shape[-1:], eps=self.eps)
        return (normal * weight_HD).to(x_BTHD.dtype)


class StableLMAttention(LlamaAttention):
    """Attention that normalises each query and key head with separate weights if `qk_layernorm` is
    true."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.has_head_norms = config.qk_layernorm
        if self.has_head_norms:
            D, eps = config.head_dim, config.rms_norm_eps
            self.q_layernorm = HeadNorms(config.num_attention_heads, D, eps)
            self.k_layernorm = HeadNorms(config.num_key_value_heads, D, eps)

    def normalize(self, q_BTHD: Tensor, k_BTKD: Tensor) -> tuple[Tensor, Tensor]:
        """See `LlamaAttention.normalize`."""
        if not self.has_head_norms:
            return q_BTHD, k_BTKD
        return self.q_layernorm(q_BTHD), self.k_layernorm(k_BTKD)


class StableLMBlock(LlamaBlock):
    """One layer. With `use_parallel_residual`, attention and the MLP read the output of the same
    norm, so neither depends on the other (Wang and Komatsuzaki 2021, GPT-J)."""

    attention_class, norm_class = StableLMAttention, nn.LayerNorm

    def add_norms(self, config: DecoderConfig) -> None:
        """See `LlamaBlock.add_norms`."""
        self.is_parallel = config.use_parallel_residual
        super().add_norms(config)
        if self.is_parallel:
            del self.post_attention_layernorm

    def forward(
        self, x_BTC: Tensor, ropes: Ropes, masks: tuple[Any, Any], cache: Cache | None
    ) -> tuple[Tensor, Tensor | None]:
        """See `LlamaBlock.forward`."""
        if not self.is_parallel:
            return super().forward(x_BTC, ropes, masks, cache)
        input_BTC = self.input_layernorm(x_BTC)
        y_BTC = self.self_attn(input_BTC, ropes, self.own_mask(masks), cache)
        return x_BTC + y_BTC + self.mlp(input_BTC), None


class StableLM(Llama):
    """A StableLM 2 language model."""

    block_class = StableLMBlock


# Ministral 3


class Ministral3Attention(LlamaAttention):
    """Attention whose queries grow with their position beyond the original context, which sharpens
    the softmax over more tokens."""

    def rotate(self, q_BHTD: Tensor, k_BKTD: Tensor, ropes: Ropes) -> tuple[Tensor, Tensor]:
        """See `LlamaAttention.rotate`."""
        q_BHTD, k_BKTD = super().rotate(q_BHTD, k_BKTD, ropes)
        for growth, _ in ropes[1:]:
            q_BHTD = q_BHTD * growth.to(q_BHTD.dtype)
        return q_BHTD, k_BKTD


class Ministral3Block(LlamaBlock):
    """One layer of Ministral 3."""

    attention_class = Ministral3Attention


class Ministral3(Llama):
    """A Ministral 3 language model."""

    block_class = Ministral3Block


#: Model classes of the `LlamaConfig` families that can't use `Llama` itself, keyed by `model_type`.
VARIANTS: dict[str, type[Llama]] = {
    "granite": Granite,
    "smollm3": SmolLM3,
    "phi3": Phi3,
    "olmo2": Olmo,
    "olmo3": Olmo,
    "arcee": Arcee,
    "glm4": Glm4,
    "gemma2": Gemma,
    "gemma3_text": Gemma,
    "stablelm": StableLM,
    "ministral3": Ministral3,
}

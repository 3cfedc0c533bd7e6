"""Llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Parameter names and config keys are those of Hugging Face's `LlamaForCausalLM`, so import
and export are the identity. Covers Llama 2, 3, 3.1 (frequency rescaling) and 3.2 (tied).
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn

from firstlight.errors import ModelError
from firstlight.models.cache import KVCache
from firstlight.models.ops import (
    RopeScaling,
    apply_rope,
    attention,
    cross_entropy_sum,
    rope_frequencies,
    rope_tables,
)

#: What Hugging Face's LlamaConfig takes for a key that config.json leaves out, where it is not
#: what a recipe's default is.
_HF_DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
}


class LlamaConfig(BaseModel):
    """Shape of a Llama model; names and meanings are Hugging Face's.

    model_type: "llama".
    vocab_size: tokens the model knows; 0 takes the tokenizer's.
    hidden_size: width of the residual stream.
    intermediate_size: width inside the MLP; 0 is 8/3 hidden_size, rounded up to a multiple of 32.
    num_hidden_layers: depth.
    num_attention_heads: query heads.
    num_key_value_heads: key and value heads; 0 is as many as query heads.
    head_dim: size of a head, even; 0 is hidden_size / num_attention_heads.
    max_position_embeddings: the context limit in tokens.
    rms_norm_eps: added under the norms' root.
    rope_theta: base of the rotary frequencies.
    rope_scaling: null, {rope_type: linear, factor} or {rope_type: llama3, factor,
        low_freq_factor, high_freq_factor, original_max_position_embeddings}.
    attention_bias: biases on the attention's projections.
    mlp_bias: biases on the MLP's projections.
    tie_word_embeddings: the head is the embedding, transposed.
    initializer_range: standard deviation of the initial weights.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    model_type: Literal["llama"] = "llama"
    vocab_size: int = Field(0, ge=0)
    hidden_size: int = Field(256, gt=0)
    intermediate_size: int = Field(0, ge=0)
    num_hidden_layers: int = Field(4, gt=0)
    num_attention_heads: int = Field(4, gt=0)
    num_key_value_heads: int = Field(0, ge=0)
    head_dim: int = Field(0, ge=0)
    max_position_embeddings: int = Field(1024, gt=0)
    rms_norm_eps: float = Field(1e-5, gt=0)
    rope_theta: float = Field(10_000.0, gt=0)
    rope_scaling: RopeScaling | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    initializer_range: float = Field(0.02, gt=0, le=1)

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        values = dict(values)
        hidden, heads = values.get("hidden_size", 256), values.get("num_attention_heads", 4)
        if isinstance(hidden, int) and isinstance(heads, int) and hidden > 0 and heads > 0:
            values["head_dim"] = values.get("head_dim") or hidden // heads
            values["num_key_value_heads"] = values.get("num_key_value_heads") or heads
            values["intermediate_size"] = (
                values.get("intermediate_size") or math.ceil(hidden * 8 / 3 / 32) * 32
            )
        return values

    @model_validator(mode="after")
    def _check(self) -> LlamaConfig:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} must be a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.hidden_size % self.num_attention_heads:
            # Also where head_dim is given: transformers would refuse the saved folder.
            raise ValueError(
                f"hidden_size {self.hidden_size} must be a multiple of "
                f"num_attention_heads {self.num_attention_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} must be even for rotary positions")
        return self

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> LlamaConfig:
        """From a Hugging Face `config.json`.

        Raises:
            ModelError: it asks for something that would change the outputs and isn't built.
        """
        if config.get("hidden_act", "silu") != "silu":
            raise ModelError(
                f"hidden_act '{config['hidden_act']}' is not supported: only 'silu' is"
            )
        # transformers 5 keeps the rotary settings in one object, 4 in two keys; where both stand,
        # it reads the two.
        rope = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
        theta = rope.pop("rope_theta", config.get("rope_theta", 10_000.0))
        kind = rope.pop("rope_type", rope.pop("type", "default"))
        rope.pop("type", None)
        if kind not in ("default", "linear", "llama3"):
            raise ModelError(f"rope type '{kind}' is not supported: default, linear, llama3 are")
        names = set(cls.model_fields) - {"rope_theta", "rope_scaling", "model_type"}
        known = {name: config[name] for name in names if config.get(name) is not None}
        scaling = None if kind == "default" else {"rope_type": kind, **rope}
        values = {**_HF_DEFAULTS, **known}
        return cls(rope_theta=float(theta), rope_scaling=scaling, **values)  # type: ignore[arg-type]

    def to_hf(self) -> dict[str, Any]:
        """The Hugging Face `config.json` of this model."""
        values = self.model_dump(exclude={"rope_theta", "rope_scaling"})
        scaling = self.rope_scaling.model_dump() if self.rope_scaling else {"rope_type": "default"}
        return {
            "architectures": ["LlamaForCausalLM"],
            **values,
            "hidden_act": "silu",
            "attention_dropout": 0.0,
            # Both spellings: transformers 5 reads the first, 4 and other programs the rest.
            "rope_parameters": {"rope_theta": self.rope_theta, **scaling},
            "rope_theta": self.rope_theta,
            "rope_scaling": self.rope_scaling.model_dump() if self.rope_scaling else None,
        }


class RMSNorm(nn.Module):
    """x / rms(x) * weight, the mean of squares taken in fp32 (Zhang and Sennrich 2019)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, None, self.eps).to(x.dtype) * self.weight


class Attention(nn.Module):
    """Grouped-query self-attention with rotary positions."""

    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        C, D, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.q_proj = nn.Linear(C, config.num_attention_heads * D, bias=bias)
        self.k_proj = nn.Linear(C, config.num_key_value_heads * D, bias=bias)
        self.v_proj = nn.Linear(C, config.num_key_value_heads * D, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * D, C, bias=bias)

    def forward(self, x_BTC: Tensor, cos: Tensor, sin: Tensor, cache: KVCache | None) -> Tensor:
        B, T, _ = x_BTC.shape
        q_BHTD = self.q_proj(x_BTC).view(B, T, -1, self.head_dim).transpose(1, 2)
        k_BKSD = self.k_proj(x_BTC).view(B, T, -1, self.head_dim).transpose(1, 2)
        v_BKSD = self.v_proj(x_BTC).view(B, T, -1, self.head_dim).transpose(1, 2)
        cos, sin = cos.to(q_BHTD.dtype), sin.to(q_BHTD.dtype)
        q_BHTD, k_BKSD = apply_rope(q_BHTD, cos, sin), apply_rope(k_BKSD, cos, sin)
        if cache is not None:
            k_BKSD, v_BKSD = cache.update(self.layer, k_BKSD, v_BKSD)
        y_BHTD = attention(q_BHTD, k_BKSD, v_BKSD)
        return self.o_proj(y_BHTD.transpose(1, 2).reshape(B, T, -1))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        C, hidden, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(C, hidden, bias=bias)
        self.up_proj = nn.Linear(C, hidden, bias=bias)
        self.down_proj = nn.Linear(hidden, C, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    """One decoder layer: attention and MLP, each behind a norm and added to the stream."""

    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x_BTC: Tensor, cos: Tensor, sin: Tensor, cache: KVCache | None) -> Tensor:
        x_BTC = x_BTC + self.self_attn(self.input_layernorm(x_BTC), cos, sin, cache)
        return x_BTC + self.mlp(self.post_attention_layernorm(x_BTC))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """Embedding, layers and final norm: what Hugging Face calls `model`."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Llama(nn.Module):
    """A Llama language model.

    Its parameters are not initialised: call `init_weights()` or load some.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.rope_frequencies: Tensor
        self.register_buffer("rope_frequencies", torch.empty(0), persistent=False)
        self.finish_loading()

    def finish_loading(self) -> None:
        """Make what is not in the weights' file: the tie of the head and the rotary table."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        device = self.model.embed_tokens.weight.device
        with torch.device("cpu"):
            frequencies = rope_frequencies(
                self.config.head_dim, self.config.rope_theta, self.config.rope_scaling
            )
        self.rope_frequencies = frequencies.to(device)

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        """Normal(0, initializer_range); the projections that write into the residual stream
        scaled by 1/sqrt(2 layers), so that its variance does not grow with depth (GPT-2)."""
        std = self.config.initializer_range
        residual_std = std / math.sqrt(2 * self.config.num_hidden_layers)
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            else:
                is_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                parameter.normal_(0.0, residual_std if is_residual else std, generator=generator)

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
        *,
        cache: KVCache | None = None,
        logits_to_keep: int = 0,
    ) -> Tensor:
        """Logits [B, T, V] of the next token; with `labels` [B, T], the summed loss instead.

        Args:
            input_ids: int64 [B, T].
            labels: the token after each input token, or -100 to leave it out of the loss.
            cache: keys and values of the tokens before these; the new ones are added.
            logits_to_keep: only the last so many positions' logits; 0 for all.
        """
        start = cache.length if cache is not None else 0
        T = input_ids.shape[1]
        positions_T = torch.arange(start, start + T, device=input_ids.device)
        cos, sin = rope_tables(self.rope_frequencies, positions_T, torch.float32)
        x_BTC = self.model.embed_tokens(input_ids)
        for layer in self.model.layers:
            x_BTC = layer(x_BTC, cos, sin, cache)
        if cache is not None:
            cache.length += T
        x_BTC = self.model.norm(x_BTC[:, -logits_to_keep:] if logits_to_keep else x_BTC)
        logits_BTV: Tensor = self.lm_head(x_BTC)
        return logits_BTV if labels is None else cross_entropy_sum(logits_BTV, labels)

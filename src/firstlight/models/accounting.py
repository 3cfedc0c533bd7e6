"""Parameters, FLOPs and cache bytes, counted from the model itself.

Give it a model on the meta device and nothing is allocated.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from firstlight.models import Model, ModelConfig, build_model


@dataclass(frozen=True)
class ParameterCount:
    """Numbers of parameters; a tied head counts once, under `embedding`."""

    embedding: int
    attention: int
    mlp: int
    norm: int
    head: int

    @property
    def total(self) -> int:
        """All parameters."""
        return self.embedding + self.attention + self.mlp + self.norm + self.head


def meta_model(config: ModelConfig) -> Model:
    """The model without memory for its parameters."""
    with torch.device("meta"):
        return build_model(config)


def count_parameters(model: nn.Module) -> ParameterCount:
    """Count a model's parameters by what they do."""
    counts = dict.fromkeys(("embedding", "attention", "mlp", "norm", "head"), 0)
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        if parts[0] == "lm_head":
            part = "head"
        elif parts[-2] in ("embed_tokens", "wte", "wpe"):
            part = "embedding"
        elif "self_attn" in parts or "attn" in parts:
            part = "attention"
        elif "mlp" in parts:
            part = "mlp"
        else:
            part = "norm"
        counts[part] += parameter.numel()
    return ParameterCount(**counts)


def train_flops_per_token(model: Model, seq_len: int) -> float:
    """FLOPs of one token's forward and backward pass (recomputation not counted).

    6 for each weight of a matrix product (2 forward, 4 backward; the head included, also when
    tied; the embedding look-up costs none), and for attention 6 * layers * heads * head_dim *
    seq_len: scores and weighted sum, of which causality leaves half (Chowdhery et al. 2022,
    appendix B, counts the whole).
    """
    config = model.config
    matrix_weights = sum(
        parameter.numel()
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter.dim() == 2 and name.split(".")[-2] not in ("embed_tokens", "wte", "wpe")
    )
    attention = config.num_hidden_layers * config.num_attention_heads * config.head_dim * seq_len
    return 6.0 * matrix_weights + 6.0 * attention


def cache_bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes that one token takes in the key-value cache."""
    return (
        2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * dtype.itemsize
    )

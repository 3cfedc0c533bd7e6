"""The key-value cache of generation: keys and values of all tokens so far, by layer."""

from __future__ import annotations

import torch
from torch import Tensor


class KVCache:
    """Room for `max_tokens` tokens of `batch_size` sequences, allocated once.

    Args:
        num_layers, num_key_value_heads, head_dim: of the model.
        batch_size: sequences.
        max_tokens: prompt and new tokens together.
        dtype, device: of the keys and values.

    Attributes:
        length: tokens stored so far; the model adds to it at the end of a forward pass.
    """

    def __init__(
        self,
        num_layers: int,
        num_key_value_heads: int,
        head_dim: int,
        *,
        batch_size: int,
        max_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_layers, batch_size, num_key_value_heads, max_tokens, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.length = 0

    @property
    def max_tokens(self) -> int:
        """How many tokens there is room for."""
        return self.keys.shape[3]

    def update(self, layer: int, k_BKTD: Tensor, v_BKTD: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new tokens' keys and values; return those of all tokens, [B, K, S, D]."""
        end = self.length + k_BKTD.shape[2]
        assert end <= self.max_tokens, "the cache is full"
        self.keys[layer, :, :, self.length : end] = k_BKTD
        self.values[layer, :, :, self.length : end] = v_BKTD
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]

"""The key-value cache of generation: keys and values of all tokens so far, by layer."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Cache(Protocol):
    """The cache of a forward pass over `new` tokens (T).

    Shape letters as in `models/ops.py`.
    """

    def positions(self, new: int) -> Tensor:
        """Of the new tokens in their sequence, int64 [T], or [B, T] where they differ."""

    def total(self, new: int) -> int:
        """Number of cache positions to look at, the new tokens' included (S)."""

    def update(self, layer: int, k_BKTD: Tensor, v_BKTD: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values of the new tokens; return those to look at, [B, K, S, D]."""

    def advance(self, new: int) -> None:
        """Count the new tokens, which every layer has stored."""


class KVCache:
    """Room for `max_tokens` tokens of `batch_size` sequences, allocated once. All sequences are of
    one length.

    Args:
        num_layers, num_key_value_heads, head_dim: sizes of the model.
        batch_size: sequences.
        max_tokens: prompt and new tokens together.
        dtype, device: dtype and device of the keys and values.

    Attributes:
        keys, values: [B, K, max_tokens, D] of each layer. Tensors of their own, since a compiled
            step would copy all layers to write into one.
        length: tokens stored so far.
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
        shape = (batch_size, num_key_value_heads, max_tokens, head_dim)
        self.keys, self.values = (
            [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
            for _ in range(2)
        )
        self.length = 0

    @property
    def max_tokens(self) -> int:
        """How many tokens there is room for."""
        return self.keys[0].shape[2]

    def positions(self, new: int) -> Tensor:
        """Of the next `new` tokens in their sequence, int64 [T], or [B, T] where they differ."""
        return torch.arange(self.length, self.length + new, device=self.keys[0].device)

    def total(self, new: int) -> int:
        """How many tokens there are to look at beside the next `new` ones, those included."""
        return self.length + new

    def update(self, layer: int, k_BKTD: Tensor, v_BKTD: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new tokens' keys and values; return those of all tokens, [B, K, S, D]."""
        end = self.length + k_BKTD.shape[2]
        assert end <= self.max_tokens, "the cache is full"
        keys, values = self.keys[layer], self.values[layer]
        keys[:, :, self.length : end] = k_BKTD
        values[:, :, self.length : end] = v_BKTD
        return keys[:, :, :end], values[:, :, :end]

    def advance(self, new: int) -> None:
        """Count `new` tokens that every layer has stored."""
        self.length += new

    def sequence(self, row: int) -> KVCache:
        """An empty cache of one sequence, in the memory of this one's row."""
        view = copy.copy(self)
        view.keys, view.values = (
            [layer[row : row + 1] for layer in stored] for stored in (self.keys, self.values)
        )
        view.length = 0
        return view


class RaggedCache:
    """The first `len(lengths)` sequences of a cache, each of a length of its own, as one batch.

    What lies in a row beyond its length is never looked at.

    Args:
        keys, values: tensors of a `KVCache`, whose memory they share.
        lengths: tokens of each sequence so far, int64 [B] on the cache's device.
        reach: number of cache positions to look at: more than any length, at most `max_tokens`. A
            number that stays the same for many steps keeps the shapes the same.
    """

    def __init__(
        self, keys: Sequence[Tensor], values: Sequence[Tensor], lengths: Tensor, reach: int
    ) -> None:
        self.keys, self.values = keys, values
        self.lengths, self.reach = lengths, reach

    def positions(self, new: int) -> Tensor:
        """Of the next `new` tokens of each sequence, int64 [B, T]."""
        return self.lengths[:, None] + torch.arange(new, device=self.lengths.device)

    def total(self, new: int) -> int:
        """The cache positions to look at; the mask leaves out those beyond each sequence."""
        return self.reach

    def update(self, layer: int, k_BKTD: Tensor, v_BKTD: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values of the new tokens; return those to look at, [B, K, S, D]."""
        count = len(self.lengths)
        rows_B1 = torch.arange(count, device=k_BKTD.device)[:, None]
        cache_positions_BT = self.positions(k_BKTD.shape[2])
        keys, values = self.keys[layer], self.values[layer]
        keys[rows_B1, :, cache_positions_BT] = k_BKTD.transpose(1, 2).to(keys.dtype)
        values[rows_B1, :, cache_positions_BT] = v_BKTD.transpose(1, 2).to(values.dtype)
        return keys[:count, :, : self.reach], values[:count, :, : self.reach]

    def advance(self, new: int) -> None:
        """Count `new` tokens that every layer has stored."""
        self.lengths = self.lengths + new

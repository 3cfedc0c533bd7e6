"""The key-value cache of generation: keys and values of all tokens so far, by layer."""

from __future__ import annotations

import copy
from typing import Protocol

import torch
from torch import Tensor


class Cache(Protocol):
    """What a model needs of a cache in a forward pass over `new` tokens (T)."""

    def positions(self, new: int) -> Tensor:
        """Of the new tokens in their sequence, int64 [T], or [B, T] where they differ."""

    def total(self, new: int) -> int:
        """How many places there are to look at, those of the new tokens included (S)."""

    def update(self, layer: int, k_BKTD: Tensor, v_BKTD: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new tokens' keys and values; return those of all places, [B, K, S, D]."""

    def advance(self, new: int) -> None:
        """Count the new tokens, which every layer has stored."""


class KVCache:
    """Room for `max_tokens` tokens of `batch_size` sequences, allocated once. All sequences are of
    one length.

    Args:
        num_layers, num_key_value_heads, head_dim: of the model.
        batch_size: sequences.
        max_tokens: prompt and new tokens together.
        dtype, device: of the keys and values.

    Attributes:
        keys, values: [layers, B, K, max_tokens, D].
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
        shape = (num_layers, batch_size, num_key_value_heads, max_tokens, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.length = 0

    @property
    def max_tokens(self) -> int:
        """How many tokens there is room for."""
        return self.keys.shape[3]

    def positions(self, new: int) -> Tensor:
        """Of the next `new` tokens in their sequence, int64 [T], or [B, T] where they differ."""
        return torch.arange(self.length, self.length + new, device=self.keys.device)

    def total(self, new: int) -> int:
        """How many tokens there are to look at beside the next `new` ones, those included."""
        return self.length + new

    def update(self, layer: int, k_BKTD: Tensor, v_BKTD: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new tokens' keys and values; return those of all tokens, [B, K, S, D]."""
        end = self.length + k_BKTD.shape[2]
        assert end <= self.max_tokens, "the cache is full"
        self.keys[layer, :, :, self.length : end] = k_BKTD
        self.values[layer, :, :, self.length : end] = v_BKTD
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]

    def advance(self, new: int) -> None:
        """Count `new` tokens that every layer has stored."""
        self.length += new

    def sequence(self, row: int) -> KVCache:
        """An empty cache of one sequence, in the memory of this one's row."""
        view = copy.copy(self)
        view.keys, view.values = self.keys[:, row : row + 1], self.values[:, row : row + 1]
        view.length = 0
        return view


class RaggedCache:
    """The first `len(lengths)` sequences of a cache, each of a length of its own, as one batch.

    What lies in a row beyond its length is never looked at.

    Args:
        cache: whose memory it is.
        lengths: tokens of each sequence so far, int64 [B] on the cache's device.
        reach: how many places are looked at: more than any length, at most `max_tokens`. A
            number that stays the same for many steps keeps the shapes the same.
    """

    def __init__(self, cache: KVCache, lengths: Tensor, reach: int) -> None:
        count = len(lengths)
        self.keys, self.values = cache.keys[:, :count], cache.values[:, :count]
        self.lengths, self.reach = lengths, reach

    def positions(self, new: int) -> Tensor:
        """Of the next `new` tokens of each sequence, int64 [B, T]."""
        return self.lengths[:, None] + torch.arange(new, device=self.lengths.device)

    def total(self, new: int) -> int:
        """The places that are looked at; the mask leaves out those beyond each sequence."""
        return self.reach

    def update(self, layer: int, k_BKTD: Tensor, v_BKTD: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new tokens' keys and values; return those of all places, [B, K, S, D]."""
        places = self.positions(k_BKTD.shape[2])[:, None, :, None].expand_as(k_BKTD)
        keys, values = self.keys[layer], self.values[layer]
        keys.scatter_(2, places, k_BKTD.to(keys.dtype))
        values.scatter_(2, places, v_BKTD.to(values.dtype))
        return keys[:, :, : self.reach], values[:, :, : self.reach]

    def advance(self, new: int) -> None:
        """Count `new` tokens that every layer has stored."""
        self.lengths += new

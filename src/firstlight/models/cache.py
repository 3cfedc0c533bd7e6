"""Caches of a model's forward passes: keys and values of earlier tokens, or recurrent states of
layers with linear attention.

Shape letters as in `models/ops.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor


class Cache(Protocol):
    """Interface of caches for a forward pass over `new` tokens (T) of each sequence.

    Shape letters as in `models/ops.py`.
    """

    @property
    def max_tokens(self) -> int:
        """Capacity of each sequence, in tokens."""

    def positions(self, new: int) -> Tensor:
        """Return the positions of the new tokens in their sequence, int64 [T], or [B, T] if
        sequences have different lengths."""

    def total(self, new: int) -> int:
        """Return the number of cache positions that attention reads, including the new tokens
        (S)."""

    def text_length(self, new: int) -> int | Tensor:
        """Return the length of the sequences in tokens, including the new tokens: a single number
        for all sequences, or int64 [B]. The "dynamic" and "longrope" rotary frequencies depend on
        it."""

    def update(self, layer: int, k_BKTD: Tensor, v_BKTD: Tensor) -> tuple[Tensor, Tensor]:
        """Store a layer's keys and values [B, K, T, D] of the new tokens.

        Returns:
            Keys and values of the cache positions that attention reads, [B, K, S, D] each.
        """

    def state(self, layer: int) -> tuple[Tensor, ...]:
        """Return a linear-attention layer's state after the tokens so far: tensors [B, ...] in at
        least fp32, zeros before the first token."""

    def set_state(self, layer: int, state: Sequence[Tensor]) -> None:
        """Replace a layer's state with the state after the new tokens, of the same shapes."""

    def advance(self, new: int) -> None:
        """Add `new` to the length; called after every layer has stored the new tokens."""


class KVCache:
    """Keys and values of `batch_size` sequences of equal length, with up to `max_tokens` tokens,
    allocated once.

    Args:
        num_layers, num_key_value_heads, head_dim: sizes of the model.
        batch_size: number of sequences.
        max_tokens: capacity of each sequence, for its prompt and new tokens together.
        dtype, device: dtype and device of keys and values.
        value_dim: dimension of a value head; None for `head_dim`.
        states: layer (from 0) -> shapes, without the batch dimension, of the states that the layer
            stores instead of keys and values.

    Attributes:
        keys, values: one tensor [B, K, max_tokens, D] per layer; K is 0 in layers with states. With
            a single tensor for all layers, a compiled step would copy all of it to write one layer.
        states: tensors [B, ...] of each layer, in at least fp32; () for layers with attention.
        length: number of tokens stored so far.
        least_length: minimum length that every sequence will reach, for rotary frequencies that
            depend on the length.
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
        value_dim: int | None = None,
        states: Mapping[int, Sequence[tuple[int, ...]]] | None = None,
    ) -> None:
        states = states or {}
        heads = [0 if layer in states else num_key_value_heads for layer in range(num_layers)]
        # Zeros instead of empty memory: attention multiplies unused positions by a weight of 0, and
        # 0 times NaN is NaN.
        self.keys, self.values = (
            [
                torch.zeros(batch_size, K, max_tokens, size, dtype=dtype, device=device)
                for K in heads
            ]
            for size in (head_dim, head_dim if value_dim is None else value_dim)
        )
        # A state is a sum over all tokens so far: in bf16, contributions of late tokens would be
        # lost to rounding.
        wide = torch.promote_types(dtype, torch.float32)
        self.states = [
            tuple(
                torch.zeros(batch_size, *shape, dtype=wide, device=device)
                for shape in states.get(layer, ())
            )
            for layer in range(num_layers)
        ]
        self.length = self.least_length = 0

    @property
    def has_states(self) -> bool:
        """True if some layers keep a state, which can't be reset to an earlier token."""
        return any(self.states)

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the cache: keys, values and states."""
        return [*self.keys, *self.values, *(one for state in self.states for one in state)]

    @property
    def max_tokens(self) -> int:
        """Capacity of each sequence, in tokens."""
        return self.keys[0].shape[2]

    def positions(self, new: int) -> Tensor:
        """Return the positions of the next `new` tokens, int64 [T]."""
        return torch.arange(self.length, self.length + new, device=self.keys[0].device)

    def total(self, new: int) -> int:
        """Return the number of tokens that attention reads: the stored tokens and the next `new`
        tokens."""
        return self.length + new

    def text_length(self, new: int) -> int:
        """See `Cache.text_length`."""
        return max(self.length + new, self.least_length)

    def update(self, layer: int, k_BKTD: Tensor, v_BKTD: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new tokens' keys and values [B, K, T, D]; return views of all tokens' keys and
        values, [B, K, S, D]."""
        end = self.length + k_BKTD.shape[2]
        assert end <= self.max_tokens, "the cache is full"
        keys, values = self.keys[layer], self.values[layer]
        keys[:, :, self.length : end] = k_BKTD
        values[:, :, self.length : end] = v_BKTD
        return keys[:, :, :end], values[:, :, :end]

    def state(self, layer: int) -> tuple[Tensor, ...]:
        """See `Cache.state`."""
        # Before the first token, the memory may hold the state of another sequence.
        return tuple(one if self.length else torch.zeros_like(one) for one in self.states[layer])

    def set_state(self, layer: int, state: Sequence[Tensor]) -> None:
        """See `Cache.set_state`."""
        for stored, new in zip(self.states[layer], state, strict=True):
            stored.copy_(new)

    def advance(self, new: int) -> None:
        """See `Cache.advance`."""
        self.length += new

    def sequence(self, row: int, count: int = 1) -> KVCache:
        """Return an empty cache of `count` sequences that shares the memory of this cache's rows,
        starting at `row`.

        A prompt computed with it does not need to be copied into the row.
        """
        view, end = copy.copy(self), row + count
        view.keys, view.values = (
            [layer[row:end] for layer in stored] for stored in (self.keys, self.values)
        )
        view.states = [tuple(one[row:end] for one in state) for state in self.states]
        view.length = view.least_length = 0
        return view

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of row `source` to row `target`, and its states."""
        for layer in (*self.keys, *self.values):
            layer[target, :, :length] = layer[source, :, :length]
        for state in self.states:
            for one in state:
                one[target] = one[source]

    def reorder(self, rows_B: Tensor) -> None:
        """Replace row b with row `rows_B[b]`, int64 [B], for each b."""
        for tensor in self.tensors:
            # Indexing makes a copy first, so rows can be swapped.
            tensor.copy_(tensor[rows_B])

    def begin_with(self, other: KVCache, rows_B: Tensor) -> None:
        """Copy row `rows_B[b]`, int64 [B], of another cache to row b of this empty cache."""
        for layer, computed in zip(
            (*self.keys, *self.values), (*other.keys, *other.values), strict=True
        ):
            # Several rows may begin with the same prompt, which is computed only once.
            layer[:, :, : other.length] = computed[rows_B, :, : other.length]
        for own, states in zip(self.states, other.states, strict=True):
            for one, computed in zip(own, states, strict=True):
                one.copy_(computed[rows_B])
        self.length = other.length

    def ragged(self, lengths: Tensor, reach: int) -> RaggedCache:
        """Return the first `len(lengths)` sequences with individual lengths: see `RaggedCache`."""
        return RaggedCache(self.keys, self.values, lengths, reach, states=self.states)


class RaggedCache:
    """The first `len(lengths)` sequences of a `KVCache` as one batch with individual lengths. It
    shares the memory of the `KVCache`.

    Positions beyond a row's length have no effect, because the model masks them.

    Args:
        keys, values: `KVCache.keys` and `KVCache.values`.
        lengths: number of tokens of each sequence so far, int64 [B] on the cache's device.
        reach: number of cache positions that attention reads: more than any length, at most
            `max_tokens`. Steps with the same value have the same shapes.
        states: `KVCache.states`; if there are any, no sequence may be empty.
    """

    def __init__(
        self,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        lengths: Tensor,
        reach: int,
        states: Sequence[tuple[Tensor, ...]] = (),
    ) -> None:
        self.keys = keys
        self.values = values
        self.states = states
        self.lengths, self.reach = lengths, reach
        #: Rows [B, 1] and positions [B, T] of the new tokens; the same in all layers.
        self._places: tuple[Tensor, Tensor] | None = None

    @property
    def max_tokens(self) -> int:
        """Capacity of each sequence, in tokens."""
        return self.keys[0].shape[2]

    def positions(self, new: int) -> Tensor:
        """Return the positions of the next `new` tokens of each sequence, int64 [B, T]."""
        return self.lengths[:, None] + torch.arange(new, device=self.lengths.device)

    def total(self, new: int) -> int:
        """Return the number of cache positions that attention reads; the mask hides those beyond
        each sequence's length."""
        return self.reach

    def text_length(self, new: int) -> Tensor:
        """See `Cache.text_length`."""
        return self.lengths + new

    def update(self, layer: int, k_BKTD: Tensor, v_BKTD: Tensor) -> tuple[Tensor, Tensor]:
        """See `Cache.update`."""
        count = len(self.lengths)
        if self._places is None:
            rows_B1 = torch.arange(count, device=k_BKTD.device)[:, None]
            self._places = rows_B1, self.positions(k_BKTD.shape[2])
        rows_B1, cache_positions_BT = self._places
        keys, values = self.keys[layer], self.values[layer]
        # With index tensors on both sides of the head dimension, B and T come first, so K and V are
        # transposed. Unlike slice assignment, index assignment does not cast, so `to` is needed.
        keys[rows_B1, :, cache_positions_BT] = k_BKTD.transpose(1, 2).to(keys.dtype)
        values[rows_B1, :, cache_positions_BT] = v_BKTD.transpose(1, 2).to(values.dtype)
        return keys[:count, :, : self.reach], values[:count, :, : self.reach]

    def state(self, layer: int) -> tuple[Tensor, ...]:
        """See `Cache.state`."""
        return tuple(one[: len(self.lengths)] for one in self.states[layer])

    def set_state(self, layer: int, state: Sequence[Tensor]) -> None:
        """See `Cache.set_state`."""
        for stored, new in zip(self.states[layer], state, strict=True):
            stored[: len(self.lengths)] = new

    def advance(self, new: int) -> None:
        """See `Cache.advance`."""
        # Not in place: the tensor belongs to the caller.
        self.lengths, self._places = self.lengths + new, None

"""Caches that forward passes read and extend. They store the keys and values of earlier tokens, and
the recurrent states of layers with linear attention.

Shape letters are defined in `models/ops.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor


class Cache(Protocol):
    """Interface of all caches. In its methods, `new` (T) is the number of tokens per sequence that
    the forward pass processes.

    Shape letters are defined in `models/ops.py`.
    """

    @property
    def max_tokens(self) -> int:
        """Capacity of each sequence, in tokens."""

    def positions(self, new: int) -> Tensor:
        """Return the positions of the new tokens in their sequences: int64 [T], or [B, T] if the
        sequences have different lengths."""

    def total(self, new: int) -> int:
        """Return S, the number of cache positions that attention reads, including the positions of
        the new tokens."""

    def text_length(self, new: int) -> int | Tensor:
        """Return the length of the sequences in tokens, including the new tokens. The result is a
        single integer for all sequences, or int64 [B]. The "dynamic" and "longrope" rotary
        frequencies depend on this length."""

    def update(self, layer: int, k_BKTD: Tensor, v_BKTD: Tensor) -> tuple[Tensor, Tensor]:
        """Store the keys and values of the new tokens, [B, K, T, D], for one layer.

        Returns:
            Keys and values of the cache positions that attention reads, [B, K, S, D] each.
        """

    def state(self, layer: int) -> tuple[Tensor, ...]:
        """Return the state of a linear-attention layer after all tokens so far, as tensors [B, ...]
        in at least fp32. They are zero before the first token."""

    def set_state(self, layer: int, state: Sequence[Tensor]) -> None:
        """Replace a layer's recurrent state with its state after the new tokens. The shapes of the
        tensors do not change."""

    def advance(self, new: int) -> None:
        """Increase the length of all sequences by `new` tokens. Called after all layers have stored
        the new tokens."""


class KVCache:
    """A cache for `batch_size` sequences of equal length, with up to `max_tokens` tokens each. All
    of its memory is allocated at creation.

    Args:
        num_layers, num_key_value_heads, head_dim: dimensions of the model.
        batch_size: number of sequences.
        max_tokens: capacity of each sequence in tokens, including its prompt and new tokens.
        dtype, device: dtype and device of keys and values.
        value_dim: dimension of a value head; None for `head_dim`.
        states: shapes of the recurrent states that some layers store instead of keys and values,
            keyed by the zero-based layer index. The shapes do not include the batch dimension.

    Attributes:
        keys, values: one tensor [B, K, max_tokens, D] per layer. In layers that store recurrent
            states, K is 0. With a single tensor for all layers, a compiled step would copy the
            whole tensor in order to write one layer.
        states: recurrent states of each layer, as a tuple of tensors [B, ...] in at least fp32. The
            tuple is empty for layers that store keys and values.
        length: number of tokens stored so far.
        least_length: lower bound, in tokens, on the sequence length used to compute rotary
            frequencies that depend on this length. It is set when the sequences are known to become
            at least this long.
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
        # The memory is filled with zeros, because attention multiplies unused positions by a weight
        # of 0, and 0 times NaN is NaN.
        self.keys, self.values = (
            [
                torch.zeros(batch_size, K, max_tokens, size, dtype=dtype, device=device)
                for K in heads
            ]
            for size in (head_dim, head_dim if value_dim is None else value_dim)
        )
        # A state is a sum over all tokens so far. In bf16, contributions of late tokens would be
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
        """True if some layers keep a recurrent state, which can't be rewound to an earlier
        token."""
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
        """Return the number of tokens that attention reads: the tokens already stored and the next
        `new` tokens."""
        return self.length + new

    def text_length(self, new: int) -> int:
        """See `Cache.text_length`."""
        return max(self.length + new, self.least_length)

    def update(self, layer: int, k_BKTD: Tensor, v_BKTD: Tensor) -> tuple[Tensor, Tensor]:
        """Store the keys and values of the new tokens, which have shape [B, K, T, D]. Return views
        of the keys and values of all tokens, which have shape [B, K, S, D]."""
        end = self.length + k_BKTD.shape[2]
        assert end <= self.max_tokens, "the cache is full"
        keys, values = self.keys[layer], self.values[layer]
        keys[:, :, self.length : end] = k_BKTD
        values[:, :, self.length : end] = v_BKTD
        return keys[:, :, :end], values[:, :, :end]

    def state(self, layer: int) -> tuple[Tensor, ...]:
        """See `Cache.state`."""
        # Before the first token, the memory can still contain the state of a previous sequence.
        return tuple(one if self.length else torch.zeros_like(one) for one in self.states[layer])

    def set_state(self, layer: int, state: Sequence[Tensor]) -> None:
        """See `Cache.set_state`."""
        for stored, new in zip(self.states[layer], state, strict=True):
            stored.copy_(new)

    def advance(self, new: int) -> None:
        """See `Cache.advance`."""
        self.length += new

    def sequence(self, row: int, count: int = 1) -> KVCache:
        """Return an empty cache for `count` sequences. It shares the memory of this cache's
        sequences, starting with the sequence at index `row`.

        After a prompt has been processed with the returned cache, its keys and values do not have
        to be copied into this cache.
        """
        view, end = copy.copy(self), row + count
        view.keys, view.values = (
            [layer[row:end] for layer in stored] for stored in (self.keys, self.values)
        )
        view.states = [tuple(one[row:end] for one in state) for state in self.states]
        view.length = view.least_length = 0
        return view

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copy the recurrent states and the first `length` tokens of sequence `source` to sequence
        `target`."""
        for layer in (*self.keys, *self.values):
            layer[target, :, :length] = layer[source, :, :length]
        for state in self.states:
            for one in state:
                one[target] = one[source]

    def reorder(self, rows_B: Tensor) -> None:
        """Replace each sequence b with sequence `rows_B[b]`. `rows_B` is int64 [B]."""
        for tensor in self.tensors:
            # Indexing makes a copy first, so sequences can be swapped.
            tensor.copy_(tensor[rows_B])

    def begin_with(self, other: KVCache, rows_B: Tensor) -> None:
        """For each b, copy sequence `rows_B[b]` of another cache to sequence b of this cache, which
        must be empty. `rows_B` is int64 [B]."""
        for layer, computed in zip(
            (*self.keys, *self.values), (*other.keys, *other.values), strict=True
        ):
            # Several sequences can start with the same prompt, which is then processed only once.
            layer[:, :, : other.length] = computed[rows_B, :, : other.length]
        for own, states in zip(self.states, other.states, strict=True):
            for one, computed in zip(own, states, strict=True):
                one.copy_(computed[rows_B])
        self.length = other.length

    def ragged(self, lengths: Tensor, reach: int) -> RaggedCache:
        """Return a `RaggedCache` for the first `len(lengths)` sequences, in which each sequence can
        have a different length."""
        return RaggedCache(self.keys, self.values, lengths, reach, states=self.states)


class RaggedCache:
    """A cache for sequences of different lengths. It contains the first `len(lengths)` sequences of
    a `KVCache` and shares the memory of the `KVCache`.

    Cache positions beyond the length of a sequence have no effect, because the model masks them.

    Args:
        keys, values: `KVCache.keys` and `KVCache.values`.
        lengths: number of tokens of each sequence so far, int64 [B] on the cache's device.
        reach: number of cache positions that attention reads. It must be greater than every length,
            and at most `max_tokens`. Decoding steps with the same `reach` have the same tensor
            shapes.
        states: `KVCache.states`. If there are any recurrent states, every sequence must already
            contain at least one token.
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
        #: Indices of the sequences [B, 1] and positions of the new tokens [B, T]. They are the same
        #: in all layers.
        self._places: tuple[Tensor, Tensor] | None = None

    @property
    def max_tokens(self) -> int:
        """Capacity of each sequence, in tokens."""
        return self.keys[0].shape[2]

    def positions(self, new: int) -> Tensor:
        """Return the positions of the next `new` tokens of each sequence, int64 [B, T]."""
        return self.lengths[:, None] + torch.arange(new, device=self.lengths.device)

    def total(self, new: int) -> int:
        """Return the number of cache positions that attention reads. The mask hides positions
        beyond the length of a sequence."""
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
        # Because there are index tensors on both sides of the head dimension, torch moves the
        # dimensions B and T to the front. The new keys and values are transposed to match. Unlike
        # slice assignment, index assignment does not convert the dtype, so `to` is needed.
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
        # The lengths are not updated in place, because the tensor belongs to the caller.
        self.lengths, self._places = self.lengths + new, None

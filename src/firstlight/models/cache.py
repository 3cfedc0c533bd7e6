"""Caches of a model's forward passes: keys and values of earlier tokens, or a state of them all.

Shape letters as in `models/ops.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor


class Cache(Protocol):
    """The cache of a forward pass over `new` tokens (T).

    Shape letters as in `models/ops.py`.
    """

    @property
    def max_tokens(self) -> int:
        """Number of tokens that each sequence has room for."""

    def positions(self, new: int) -> Tensor:
        """Positions of the new tokens in their sequence, int64 [T], or [B, T] where they differ."""

    def total(self, new: int) -> int:
        """Number of cache positions to look at, the new tokens' included (S)."""

    def text_length(self, new: int) -> int | Tensor:
        """Tokens of each text, the new ones included, or of each of them, int64 [B]: the length by
        which some rotary positions go."""

    def update(self, layer: int, k_BKTD: Tensor, v_BKTD: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values of the new tokens; return those to look at, [B, K, S, D]."""

    def state(self, layer: int) -> tuple[Tensor, ...]:
        """State of a layer without keys and values after the tokens so far, fp32 [B, ...] each;
        zeros before the first token."""

    def set_state(self, layer: int, state: Sequence[Tensor]) -> None:
        """Replace a layer's state by the one after the new tokens, of the same shapes."""

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
        value_dim: size of a value's head; None is a key's.
        states: shapes, without the batch, of the states that layers keep in place of keys and
            values, by the layer's number; such a layer has no keys and values.

    Attributes:
        keys, values: [B, K, max_tokens, D] of each layer. Tensors of their own, since a compiled
            step would copy all layers to write into one.
        states: tensors [B, ...] of each layer, in fp32 at least; () for most.
        length: tokens stored so far.
        least_length: length that each text is known to reach, for rotary positions that go by it.
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
        # Zeros: the mask gives unused positions weight 0, and 0 times a NaN in empty memory is NaN.
        self.keys, self.values = (
            [
                torch.zeros(batch_size, K, max_tokens, size, dtype=dtype, device=device)
                for K in heads
            ]
            for size in (head_dim, head_dim if value_dim is None else value_dim)
        )
        # A state adds up all tokens so far: bf16 would lose the late ones.
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
        """True if some layers keep a state, which can't be cut back to earlier tokens."""
        return any(self.states)

    @property
    def tensors(self) -> list[Tensor]:
        """All its memory."""
        return [*self.keys, *self.values, *(one for state in self.states for one in state)]

    @property
    def max_tokens(self) -> int:
        """Greatest number of tokens in the cache."""
        return self.keys[0].shape[2]

    def positions(self, new: int) -> Tensor:
        """Positions of the next `new` tokens, int64 [T], or [B, T] where sequences differ."""
        return torch.arange(self.length, self.length + new, device=self.keys[0].device)

    def total(self, new: int) -> int:
        """Number of tokens that attention reads: those so far and the next `new` ones."""
        return self.length + new

    def text_length(self, new: int) -> int:
        """See `Cache.text_length`."""
        return max(self.length + new, self.least_length)

    def update(self, layer: int, k_BKTD: Tensor, v_BKTD: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new tokens' keys and values; return those of all tokens, [B, K, S, D]."""
        end = self.length + k_BKTD.shape[2]
        assert end <= self.max_tokens, "the cache is full"
        keys, values = self.keys[layer], self.values[layer]
        keys[:, :, self.length : end] = k_BKTD
        values[:, :, self.length : end] = v_BKTD
        # Views: looking at the cache copies nothing.
        return keys[:, :, :end], values[:, :, :end]

    def state(self, layer: int) -> tuple[Tensor, ...]:
        """See `Cache.state`."""
        # The memory may hold what another sequence left there.
        return tuple(one if self.length else torch.zeros_like(one) for one in self.states[layer])

    def set_state(self, layer: int, state: Sequence[Tensor]) -> None:
        """See `Cache.set_state`."""
        for stored, new in zip(self.states[layer], state, strict=True):
            stored.copy_(new)

    def advance(self, new: int) -> None:
        """Count `new` tokens that every layer has stored."""
        self.length += new

    def sequence(self, row: int) -> KVCache:
        """An empty cache of one sequence, in the memory of this one's row."""
        # In its place already: a prompt that is computed for a row need not be copied there.
        view = copy.copy(self)
        view.keys, view.values = (
            [layer[row : row + 1] for layer in stored] for stored in (self.keys, self.values)
        )
        view.states = [tuple(one[row : row + 1] for one in state) for state in self.states]
        view.length = view.least_length = 0
        return view

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Put the first `length` tokens of one row into another; states are copied whole."""
        for layer in (*self.keys, *self.values):
            layer[target, :, :length] = layer[source, :, :length]
        for state in self.states:
            for one in state:
                one[target] = one[source]

    def reorder(self, rows_B: Tensor) -> None:
        """Copy to each row the content of the row of this number, int64 [B]."""
        for tensor in self.tensors:
            # The right side is a copy, so rows may change places with each other.
            tensor.copy_(tensor[rows_B])

    def begin_with(self, other: KVCache, rows_B: Tensor) -> None:
        """Copy to each row of an empty cache the row of another cache of this number, int64 [B]."""
        for layer, computed in zip(
            (*self.keys, *self.values), (*other.keys, *other.values), strict=True
        ):
            # A prompt that was computed once may begin several rows.
            layer[:, :, : other.length] = computed[rows_B, :, : other.length]
        for own, states in zip(self.states, other.states, strict=True):
            for one, computed in zip(own, states, strict=True):
                one.copy_(computed[rows_B])
        self.length = other.length

    def ragged(self, lengths: Tensor, reach: int) -> RaggedCache:
        """Its first sequences, each with its own length: see `RaggedCache`."""
        return RaggedCache(self.keys, self.values, lengths, reach, self.states)


class RaggedCache:
    """The first `len(lengths)` sequences of a cache, each with its own length, as one batch.

    The positions of a row beyond its length are never read.

    Args:
        keys, values: tensors of a `KVCache`, whose memory they share.
        lengths: tokens of each sequence so far, int64 [B] on the cache's device.
        reach: number of cache positions to look at: more than any length, at most `max_tokens`. A
            number that stays the same for many steps keeps the shapes the same.
        states: states of a `KVCache`; no sequence may be empty if there are some.
    """

    def __init__(
        self,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        lengths: Tensor,
        reach: int,
        states: Sequence[tuple[Tensor, ...]] = (),
    ) -> None:
        self.keys, self.values, self.states = keys, values, states
        self.lengths, self.reach = lengths, reach

    @property
    def max_tokens(self) -> int:
        """Greatest number of tokens of a sequence in the cache."""
        return self.keys[0].shape[2]

    def positions(self, new: int) -> Tensor:
        """Positions of the next `new` tokens of each sequence, int64 [B, T]."""
        return self.lengths[:, None] + torch.arange(new, device=self.lengths.device)

    def total(self, new: int) -> int:
        """The cache positions to look at; the mask leaves out those beyond each sequence."""
        return self.reach

    def text_length(self, new: int) -> Tensor:
        """See `Cache.text_length`."""
        return self.lengths + new

    def update(self, layer: int, k_BKTD: Tensor, v_BKTD: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values of the new tokens; return those to look at, [B, K, S, D]."""
        count = len(self.lengths)
        rows_B1 = torch.arange(count, device=k_BKTD.device)[:, None]
        cache_positions_BT = self.positions(k_BKTD.shape[2])
        keys, values = self.keys[layer], self.values[layer]
        # Indices around the heads' dimension put B and T in front of it.
        # Unlike that to a slice, an assignment by indices does not cast.
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
        """Count `new` tokens that every layer has stored."""
        # Not in place: the caller may go on with its own lengths.
        self.lengths = self.lengths + new

"""Which tokens make which row, and in which order rows are seen: pure functions.

A split is one long stream of tokens. Row i predicts tokens i*T+1 ... i*T+T from the token
before each, so that every token but the very first is predicted exactly once; the last row
may be shorter.
"""

from __future__ import annotations

import hashlib


def num_rows(num_tokens: int, seq_len: int) -> int:
    """How many rows of `seq_len` predictions a stream of `num_tokens` gives."""
    return -(-max(num_tokens - 1, 0) // seq_len)


def row_span(row: int, seq_len: int) -> slice:
    """The tokens of a row: its inputs and, one further, its labels (cut at the stream's end)."""
    return slice(row * seq_len, row * seq_len + seq_len + 1)


def shuffled_index(position: int, length: int, seed: int, epoch: int) -> int:
    """Element `position` of a random permutation of `range(length)`, in O(1) memory.

    Each (seed, epoch) gives another permutation. It is a 4-round Feistel network over the
    smallest even number of bits that holds `length`, walked until it lands inside the range
    (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).
    """
    assert 0 <= position < length
    half_bits = max((length - 1).bit_length() + 1, 2) // 2
    mask = (1 << half_bits) - 1
    keys = _round_keys(seed, epoch)
    index = position
    while True:
        left, right = index >> half_bits, index & mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        index = left << half_bits | right
        if index < length:
            return index


def _round_keys(seed: int, epoch: int) -> list[int]:
    digest = hashlib.sha256(f"firstlight row order {seed} {epoch}".encode()).digest()
    return [int.from_bytes(digest[i : i + 8], "little") for i in range(0, 32, 8)]


def _mix(value: int) -> int:
    """The finalizer of splitmix64 (Steele et al. 2014): mixes every bit into every other."""
    value &= 0xFFFFFFFFFFFFFFFF
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    value = (value ^ value >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return value ^ value >> 31

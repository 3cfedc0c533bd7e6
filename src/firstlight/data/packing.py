"""The tokens of each row, and the order in which rows are seen: pure functions.

A split is one long stream of tokens. Row i predicts tokens i*T+1 ... i*T+T from the token
before each, so that every token but the very first is predicted exactly once; the last row
may be shorter.

With document masking, a row's tokens are numbered by document, and a token is predicted only
from its own document:

    bos text eos | bos text eos     the eos is the last prediction of a document; the label
                                    after it, the next document's bos, is masked
    text eos | text eos             without bos, an eos opens the document after it: it is
                                    predicted as the end of the one and stands, as an input, at
                                    position 0 of the other, whose first token is predicted
                                    from it. No label is masked, and a model learns how
                                    documents begin.
    text | text                     the first token of a document is not predicted

Rows of examples (conversations) are packed otherwise: see `pack_best_fit` and `examples`.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort

import numpy as np
import numpy.typing as npt


def num_rows(num_tokens: int, seq_len: int) -> int:
    """How many rows of `seq_len` predictions a stream of `num_tokens` gives."""
    return -(-max(num_tokens - 1, 0) // seq_len)


def row_span(row: int, seq_len: int) -> slice:
    """The tokens of a row: its inputs and, one further, its labels (cut at the stream's end)."""
    return slice(row * seq_len, row * seq_len + seq_len + 1)


def separate_documents(
    starts: npt.NDArray[np.int64], num_inputs: int, *, eos_opens: bool
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """Number the documents of a row's inputs, and find the labels that lie in another document.

    Args:
        starts: positions of documents' first tokens among the row's num_inputs + 1 tokens,
            ascending, int64 [documents].
        num_inputs: inputs of the row.
        eos_opens: the token before a start is, as an input, the first of the document.

    Returns:
        The number of each input's document, from 0 within the row, int32 [num_inputs]; and the
        positions of the labels to mask, int64.
    """
    inner = starts[starts > 0]
    masked = inner[:0] if eos_opens else inner - 1
    first_inputs = inner - 1 if eos_opens else inner
    begins = np.zeros(num_inputs, dtype=np.int32)
    begins[first_inputs[(first_inputs > 0) & (first_inputs < num_inputs)]] = 1
    return np.cumsum(begins, dtype=np.int32), masked


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


def pack_best_fit(
    lengths: npt.NDArray[np.int64], capacity: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Put whole items into as few rows as best-fit decreasing finds: the longest first, each into
    the fullest row that still has room for it (Johnson et al. 1974; at most 11/9 of the fewest
    rows there could be). The same lengths give the same rows.

    Args:
        lengths: length of each item, from 1 to `capacity`, int64 [items].
        capacity: length of a row.

    Returns:
        The items of all rows, row by row [items], and the index of each row's first one, with the
        end of the last [rows + 1].
    """
    order = np.argsort(-lengths, kind="stable")
    rows: list[list[int]] = []
    rows_of_room: dict[int, list[int]] = {}
    rooms: list[int] = []  # the keys of `rows_of_room`, ascending
    for item in order.tolist():
        length = int(lengths[item])
        assert 1 <= length <= capacity
        index = bisect_left(rooms, length)
        if index == len(rooms):
            row, room = len(rows), capacity
            rows.append([])
        else:
            room = rooms[index]
            row = rows_of_room[room].pop()
            if not rows_of_room[room]:
                del rows_of_room[room], rooms[index]
        rows[row].append(item)
        if left := room - length:
            if left not in rows_of_room:
                rows_of_room[left] = []
                insort(rooms, left)
            rows_of_room[left].append(row)
    items = np.array([item for row in rows for item in row], dtype=np.int64)
    starts = np.cumsum([0, *map(len, rows)], dtype=np.int64)
    return items, starts

"""Ways to cut documents: a tail for validation, a limited number of first tokens, and parts to
compress.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from typing import TYPE_CHECKING, Protocol

from firstlight.errors import ConfigError

if TYPE_CHECKING:
    # It imports tokenizers, which takes too long before the first message of a scan.
    from firstlight.data.encoding import TextPiece
    from firstlight.data.shards import TokenArray


def cut_tail(text: str, fraction: Fraction) -> tuple[str, str]:
    """(the text without its last `fraction`, that last part), cut after a line if one ends near.

    Args:
        text: the text.
        fraction: share of the text's characters, from 0 to 1.
    """
    position = math.floor(len(text) * (1 - fraction))
    # The search for a line end goes back until the second part would have twice its length.
    line_end = text.rfind("\n", max(2 * position - len(text), 0), position) + 1
    position = line_end or position
    return text[:position], text[position:]


def within_tokens(
    encoded: Iterable[tuple[TextPiece, TokenArray]],
    max_tokens: int,
    val_fraction: Fraction,
    separators: int,
    encode: Callable[[str], TokenArray],
) -> Iterator[tuple[TextPiece, TokenArray]]:
    """The pieces that fit into `max_tokens`; iteration ends once both splits are full.

    Args:
        encoded: each piece with its tokens, in order.
        max_tokens: largest number of tokens of both splits together, separators included.
        val_fraction: share of `max_tokens` for the validation split; with 0, that split has no
            limit.
        separators: number of separator tokens (bos, eos) that each document gets.
        encode: the tokens of a text.

    Yields:
        (piece, tokens). The document that exceeds the limit of its split is cut at the limit, and
        the piece with the cut has `last` set. Later documents of the split are left out.

    Raises:
        ConfigError: `max_tokens` leaves no room for text beside the separators of one document.
    """
    held_out = round(max_tokens * val_fraction)
    left = {"train": max_tokens - held_out, "val": held_out}
    open_splits = {split for split in left if left[split] > separators}
    if not open_splits:
        raise ConfigError(f"max_tokens {max_tokens} has no room for text: give more")
    for piece, tokens in encoded:
        split = piece.split
        if split == "val" and not val_fraction:
            yield piece, tokens
            continue
        if split not in open_splits:
            continue
        room = left[split] - separators
        if len(tokens) > room:
            text = longest_prefix(piece.text, room, len(tokens), lambda text: len(encode(text)))
            piece, tokens = piece._replace(text=text, last=True), encode(text)
            open_splits.remove(split)
        if piece.text or not piece.first:
            yield piece, tokens
        left[split] -= len(tokens) + (separators if piece.last else 0)
        if piece.last and left[split] <= separators:
            open_splits.discard(split)
        if not open_splits:
            return


def longest_prefix(text: str, room: int, tokens: int, count: Callable[[str], int]) -> str:
    """The longest prefix of a text, in whole characters, with at most `room` tokens.

    The prefix can have a few tokens fewer than `room`: the next character may be several tokens, or
    may change how the characters before it are merged. It is found by bisection, as if more
    characters never had fewer tokens.

    Args:
        text: the text.
        room: largest number of tokens of the prefix, fewer than the text has.
        tokens: number of tokens of the text.
        count: a function that gives the number of tokens of a text.
    """
    # Starting from an estimate finds a short prefix without encoding all of a long text again.
    fits, too_long = 0, len(text)
    guess = room * len(text) // tokens + 16
    while guess < too_long:
        if count(text[:guess]) > room:
            too_long = guess
            break
        fits, guess = guess, 2 * guess
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        if count(text[:middle]) > room:
            too_long = middle
        else:
            fits = middle
    return text[:fits]


#: Bytes that are compressed at a time: xz takes a fifth of a second for these of a genome.
_COMPRESSED_BYTES = 1 << 16


class _Compressor(Protocol):
    def compress(self, data: bytes, /) -> bytes: ...


def compress(compressor: _Compressor, data: bytes) -> int:
    """Compress data in small parts, because a signal is handled only between two calls of zlib or
    lzma; return the number of compressed bytes, without those that `compressor` still holds."""
    starts = range(0, len(data), _COMPRESSED_BYTES)
    return sum(len(compressor.compress(data[at : at + _COMPRESSED_BYTES])) for at in starts)

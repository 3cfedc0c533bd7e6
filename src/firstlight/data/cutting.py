"""Ways to cut documents: a tail for validation, the text between Project Gutenberg's header and
licence, a limited number of first tokens, and parts to compress.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from typing import TYPE_CHECKING, Protocol

from firstlight.errors import ConfigError

if TYPE_CHECKING:
    # It imports tokenizers, which takes too long before the first message of a scan.
    from firstlight.data.encoding import TextPiece
    from firstlight.data.shards import TokenArray

#: Project Gutenberg's lines around the text of a book:
#: - start, since 2003: "*** START OF THE PROJECT GUTENBERG EBOOK TITLE ***", where the title may
#:   take several lines. Some years have THIS instead of THE, ETEXT instead of EBOOK, or no blanks
#:   after the asterisks.
#: - print, before 2003, the end of the header: "*END*THE SMALL PRINT! FOR PUBLIC DOMAIN
#:   ETEXTS*Ver.04.29.93*END*".
#: - end: "*** END OF THE PROJECT GUTENBERG EBOOK ..." or "End of (the|this) Project Gutenberg('s)
#:   ...", or both.
_MARKS = re.compile(
    r"^[ \t\[]*(?:"
    r"(?P<start>\*+[ \t]*START[ \t]+OF[ \t]+(?:TH(?:E|IS)[ \t]+)?PROJECT[ \t]+GUTENBERG"
    r"(?:(?:[^\n]|\n(?![ \t\r]*\n)){0,600}?\*{3}[^\n]*|[^\n]*))"
    r"|(?P<print>\*+[ \t]*END[ \t]*(?:\*[ \t]*)?THE[ \t]+SMALL[ \t]+PRINT[^\n]*)"
    r"|(?P<end>(?:\*+[ \t]*)?(?:END|ENDE|FIN)[ \t]+(?:(?:OF|DIESES|DE)[ \t]+)?"
    r"(?:TH(?:E|IS)[ \t]+)?PROJE[CK]T[ \t]+GUTENBERG[^\n]*)"
    r")",
    re.IGNORECASE | re.MULTILINE,
)
#: The paragraph of credits after the start line, in books released before 2020.
_CREDITS = re.compile(
    r"\s*(?:This )?(?:e-?(?:text|book) )?(?:was )?(?:produced|prepared|transcribed) (?:by|from)\b"
    r"(?:[^\n]|\n(?![ \t\r]*\n)){0,2000}",
    re.IGNORECASE,
)


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


def without_gutenberg(text: str) -> str:
    """The text without Project Gutenberg's header, credits and licence (see `_MARKS`).

    Of a file with several books, every book is kept. A text in which no line begins with such a
    mark is returned unchanged; "" is returned if there is no text between the marks.
    """
    books, begin, is_inside, is_marked = [], 0, True, False
    for mark in _MARKS.finditer(text):
        if mark["print"] is not None and not text[mark.end() :].strip():
            continue  # a few books have the small print after the text
        if mark["end"] is not None:
            if is_inside:
                books.append(text[begin : mark.start()])
            is_inside = False
        else:
            if is_inside and is_marked and mark["print"] is None:
                books.append(text[begin : mark.start()])  # a book without a line at its end
            begin, is_inside = mark.end(), True
        is_marked = True
    if not is_marked:
        return text
    if is_inside:
        books.append(text[begin:])
    bodies = (_CREDITS.sub("", book, count=1) if _CREDITS.match(book) else book for book in books)
    kept = [body for body in (body.strip() for body in bodies) if body]
    return "\n\n\n".join(kept) + "\n" if kept else ""


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
        val_fraction: share of `max_tokens` for the validation split.
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

"""Documents divided into parts: a tail for validation, pieces to encode, the text between Project
Gutenberg's header and licence, and a limited number of first tokens.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction

from firstlight.data.encoding import TextPiece
from firstlight.data.shards import TokenArray
from firstlight.errors import ConfigError

#: Longer documents are encoded in parts of about this many characters.
_PIECE_CHARACTERS = 1 << 18

_NEWLINE_AFTER_LETTER = re.compile(r"(?<=[^\W\d_])\n")

#: The lines around the text of a book. Since 2003 "*** START OF THE PROJECT GUTENBERG EBOOK TITLE
#: ***", with THIS in place of THE for some years, ETEXT before, with or without blanks after the
#: asterisks, and a title that may take further lines; before that, the header ended with "*END*THE
#: SMALL PRINT! FOR PUBLIC DOMAIN ETEXTS*Ver.04.29.93*END*". The text ends with "*** END OF THE
#: PROJECT GUTENBERG EBOOK ..." or "End of (the|this) Project Gutenberg('s) ...", or both.
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
#: The paragraph of credits that follows the mark in books of before 2020.
_CREDITS = re.compile(
    r"\s*(?:This )?(?:e-?(?:text|book) )?(?:was )?(?:produced|prepared|transcribed) (?:by|from)\b"
    r"(?:[^\n]|\n(?![ \t\r]*\n)){0,2000}",
    re.IGNORECASE,
)


def cut_tail(text: str, fraction: Fraction) -> tuple[str, str]:
    """The text without its last `fraction`, and that; cut at the end of a line if one is near."""
    position = math.floor(len(text) * (1 - fraction))
    # No further back than makes the second part twice as long as asked for.
    line_end = text.rfind("\n", max(2 * position - len(text), 0), position) + 1
    position = line_end or position
    return text[:position], text[position:]


def cut_long(text: str) -> list[str]:
    """Pieces whose encodings join to the whole's: cut between a letter and a newline."""
    pieces = []
    start = 0
    while len(text) - start > _PIECE_CHARACTERS:
        match = _NEWLINE_AFTER_LETTER.search(text, start + _PIECE_CHARACTERS)
        if match is None:
            break
        pieces.append(text[start : match.start()])
        start = match.start()
    return [*pieces, text[start:]]


def without_gutenberg(text: str) -> str:
    """A text without the header, credits and licence of Project Gutenberg around it.

    A file of several books, one after the other, keeps each book. A text without their marks at
    the beginnings of lines is returned as it is; "" is returned where nothing stands between them.
    """
    books, begin, is_inside, is_marked = [], 0, True, False
    for mark in _MARKS.finditer(text):
        if mark["print"] is not None and not text[mark.end() :].strip():
            continue  # a few books have the small print behind the text
        if mark["end"] is not None:
            if is_inside:
                books.append(text[begin : mark.start()])
            is_inside = False
        else:
            if is_inside and is_marked and mark["print"] is None:
                books.append(text[begin : mark.start()])  # of a book whose end has no mark
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
    """The pieces that fit into a number of tokens; iteration ends once both splits have theirs.

    Args:
        encoded: each piece with its tokens, in order.
        max_tokens: tokens of both splits, separators included.
        val_fraction: share of them that is for validation.
        separators: number of tokens between documents, for each document.
        encode: encodes a text.

    Yields:
        Pieces with their tokens. The document that passes its split's number is cut there, and its
        piece is the `last`; later documents of the split are left out.

    Raises:
        ConfigError: the tokens are too few for the separators of a document.
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
    """The longest beginning of a text, in whole characters, that is at most `room` tokens long.

    It can be a few tokens shorter: the next character may be several tokens, or may change how the
    characters before it are merged.

    Args:
        text: the text.
        room: number of tokens, fewer than the text has.
        tokens: number of tokens of the text.
        count: number of tokens of a text.
    """
    # A short beginning of a long text is found without encoding the whole again.
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

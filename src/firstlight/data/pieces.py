"""Documents cut for encoding: into splits, and long ones into pieces that join to the whole."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction

from firstlight.data.records import Document

#: Longer documents are encoded in parts of about this many characters.
_PIECE_CHARACTERS = 1 << 18
#: How many characters are read ahead to find out whether there are enough documents to split.
_LOOKAHEAD_CHARACTERS = 1 << 28

_NEWLINE_AFTER_LETTER = re.compile(r"(?<=[^\W\d_])\n")


@dataclass(frozen=True)
class TextPiece:
    """A part of a document on its way to the encoder.

    Attributes:
        split: "train" or "val".
        first: whether it begins its document's part in the split.
        last: whether it ends it.
    """

    text: str
    split: str
    first: bool
    last: bool


def look_ahead(
    documents: Iterator[Document], fraction: Fraction
) -> tuple[bool, Iterator[Document]]:
    """Whether there are at least 1/fraction documents, and all of them again."""
    wanted = math.ceil(1 / fraction) if fraction else 0
    seen: list[Document] = []
    characters = 0
    while len(seen) < wanted and characters < _LOOKAHEAD_CHARACTERS:
        document = next(documents, None)
        if document is None:
            break
        seen.append(document)
        characters += len(document.text)
    return len(seen) >= wanted, itertools.chain(seen, documents)


def cut_tail(text: str, fraction: Fraction) -> tuple[str, str]:
    """The text without its last `fraction`, and that; cut at a line's end where one is near."""
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


def batches(pieces: Iterable[TextPiece], characters: int) -> Iterator[list[TextPiece]]:
    """The pieces in their order, in lists of at least `characters` (the last may be shorter)."""
    batch: list[TextPiece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
        if size >= characters:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch

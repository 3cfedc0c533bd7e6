"""The bits of a character by a trigram model: a measure of how hard a text is to learn, found in a
tenth of a second."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from firstlight.pipeline import settings
from firstlight.pipeline.held_out import HeldOut

#: Characters of a piece of the sample, and the most that the sample keeps.
_PIECE, _KEPT = 1 << 13, 5 << 19
#: Most characters that the model is trained and tested on.
_TRAINED, _TESTED = 1 << 20, 3 << 16
#: Fewest characters of held-out text for the test. With fewer, one of so many pieces is taken.
_FEWEST, _TEST_PART = 1 << 11, 8
#: Code points are smaller than 2 to this power; three fit into 64 bits.
_BITS = 21

_Codes = np.ndarray[tuple[int], np.dtype[np.uint64]]


@dataclass(frozen=True)
class _Piece:
    """A part of a document.

    Attributes:
        digest: hash of the document.
        text: the part.
        end: characters of the part before the end of the document that may be held out.
    """

    digest: bytes
    text: str
    end: int


class TrigramSample:
    """A sample of a corpus in pieces, spread evenly over it."""

    def __init__(self) -> None:
        self._every, self._seen, self._characters = 1, 0, 0
        self._pieces: list[_Piece] = []

    def add(self, digest: bytes, text: str, end: int) -> None:
        """Take pieces of a document.

        Args:
            digest: hash of the document.
            text: its text.
            end: number of characters before the part that is held out if the ends of documents are.
        """
        count = -(-len(text) // _PIECE)
        for number in range(-self._seen % self._every, count, self._every):
            start = number * _PIECE
            piece = text[start : start + _PIECE]
            self._pieces.append(_Piece(digest, piece, min(max(end - start, 0), len(piece))))
            self._characters += len(piece)
        self._seen += count
        while self._characters > _KEPT and len(self._pieces) > 1:
            self._pieces = self._pieces[::2]
            self._every *= 2
            self._characters = sum(len(piece.text) for piece in self._pieces)

    def bits_per_character(self, held: HeldOut) -> float:
        """The bits that a trigram model of the training text needs for a character of the held-out
        text, both as far as they are in the sample; `settings.TRIGRAM_BITS` if there is too little
        text to tell."""
        train, test = [], []
        for piece in self._pieces:
            end = len(piece.text)
            if held.digests is not None:
                end = 0 if piece.digest in held.digests else end
            elif piece.digest not in held.whole:
                end = piece.end
            train += [piece.text[:end]] if end else []
            test += [piece.text[end:]] if end < len(piece.text) else []
        if sum(map(len, test)) < _FEWEST:
            test += train[_TEST_PART // 2 :: _TEST_PART]
            del train[_TEST_PART // 2 :: _TEST_PART]
        known, wanted = _codes(train, _TRAINED), _codes(test, _TESTED)
        if not len(known) or not len(wanted):
            return settings.TRIGRAM_BITS
        return trigram_bits(known, wanted)


def _codes(pieces: Sequence[str], most: int) -> _Codes:
    """The code points of pieces in a random order, `most` at most."""
    order = np.random.default_rng(0).permutation(len(pieces))
    # Without a newline, the first letters of each piece would follow those of another.
    text = "\n".join(pieces[i] for i in order)[:most]
    return np.frombuffer(text.encode("utf-32-le"), "<u4").astype(np.uint64)


def trigram_bits(train: _Codes, test: _Codes) -> float:
    """Mean bits that a trigram model of `train` needs for a character of `test`.

    The model mixes the counts of contexts of two, one and no characters by the method of Witten and
    Bell (1991, method C). A character that it has not seen costs 21 bits more than its context's
    share.

    Args:
        train: code points, at least one.
        test: code points, at least one.
    """
    bits = np.uint64(_BITS)
    probability = np.full(len(test), 2.0**-_BITS)
    for seen, wanted in zip(_sequences(train), _sequences(test), strict=True):
        known, counts = np.unique(seen, return_counts=True)
        contexts, first, kinds = np.unique(known >> bits, return_index=True, return_counts=True)
        totals = np.add.reduceat(counts, first)
        place = np.minimum(np.searchsorted(contexts, wanted >> bits), len(contexts) - 1)
        has_context = contexts[place] == wanted >> bits
        same = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
        count = np.where(known[same] == wanted, counts[same], 0)
        mixed = (count + kinds[place] * probability) / (totals[place] + kinds[place])
        probability = np.where(has_context, mixed, probability)
    return float(-np.log2(probability).mean())


def _sequences(text: _Codes) -> Iterator[_Codes]:
    """Each character as a number, then with the one before it, then with the two before it."""
    yield (found := text)
    for _ in range(2):
        before = np.concatenate([np.zeros(1, np.uint64), found[:-1]])
        yield (found := (before << np.uint64(_BITS)) | text)

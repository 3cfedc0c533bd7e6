"""Measure how difficult text is to learn, by compressing a sample of the text with xz and with
n-gram models. This takes one to four seconds."""

from __future__ import annotations

import lzma
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from firstlight.data.opening import compress
from firstlight.from_texts.held_out import HeldOut
from firstlight.planner.advise import defaults
from firstlight.planner.advise.law import Hardness

#: The sample consists of pieces of text. These constants are the number of characters in a piece
#: and the maximum number of characters in the sample.
_PIECE, _KEPT = 1 << 13, 5 << 19
#: Maximum number of characters on which the n-gram models are trained and tested.
_TRAINED, _TESTED = 1 << 20, 3 << 16
#: Minimum number of held-out characters for testing the n-gram models. If there are fewer, one out
#: of every `_TEST_PART` training pieces is used for testing instead of for training.
_FEWEST, _TEST_PART = 1 << 11, 8
#: Context lengths of the two n-gram models, in characters.
_CONTEXT, _LONG_CONTEXT = 3, 8
#: Number of bits that represent a code point, and number of bits that represent the index of a
#: context.
_BITS = 21

_Codes = np.ndarray[tuple[int], np.dtype[np.uint64]]


@dataclass(frozen=True)
class _Piece:
    """A part of a document.

    Attributes:
        digest: hash of the document.
        text: text of the part.
        end: number of characters of this part that come before the tail of the document. If the
            ends of documents are held out, the tail is not used for training.
    """

    digest: bytes
    text: str
    end: int


class TextSample:
    """A sample of a corpus. It consists of short pieces of text that are spread evenly over the
    corpus."""

    def __init__(self) -> None:
        self._every = 1
        self._seen = 0
        self._characters = 0
        self._pieces: list[_Piece] = []

    def add(self, digest: bytes, text: str, end: int) -> None:
        """Add pieces of a document to the sample.

        Args:
            digest: hash of the document.
            text: text of the document.
            end: if the ends of documents are held out, number of characters before the end of this
                document.
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

    def hardness(self, held: HeldOut) -> Hardness:
        """Measure how difficult the text is to learn, based on the sample.

        If there is too little text for a measurement, the n-gram bits of ordinary text are assumed.
        """
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
        known, wanted = _shuffled(train)[:_TRAINED], _shuffled(test)[:_TESTED]
        xz = xz_bits_per_byte((known or wanted).encode("utf-8"))
        if not known or not wanted:
            return Hardness(xz, defaults.NGRAM_BITS, 1.0)
        bits = ngram_bits(_codes(known), _codes(wanted), _LONG_CONTEXT)
        short = max(bits[_CONTEXT], defaults.LEAST_NGRAM_BITS)
        ratio = max(bits[_LONG_CONTEXT], defaults.LEAST_NGRAM_BITS) / short
        # The held-out pieces are compressed in their original order. In random order, xz would find
        # fewer repetitions.
        return Hardness(xz, short, ratio, xz_bits_per_byte("".join(test).encode("utf-8")))


def xz_bits_per_byte(data: bytes) -> float:
    """Return the size of the data after compression with xz, in bits per byte."""
    xz = lzma.LZMACompressor()
    return 8 * (compress(xz, data) + len(xz.flush())) / max(len(data), 1)


def _shuffled(pieces: Sequence[str]) -> str:
    """Return the pieces of text in random order, joined by newlines."""
    order = np.random.default_rng(0).permutation(len(pieces))
    # Without the newline, the beginning of a piece of text would appear to continue the previous
    # piece.
    return "\n".join(pieces[i] for i in order)


def _codes(text: str) -> _Codes:
    """Return the code points of a string as a uint64 array of shape [characters]."""
    return np.frombuffer(text.encode("utf-32-le"), "<u4").astype(np.uint64)


def ngram_bits(train: _Codes, test: _Codes, context: int) -> list[float]:
    """Return the mean bits per character on `test` of n-gram models trained on `train`, with one
    value for each context length from 0 to `context`.

    A model mixes the counts of all contexts up to its longest context with method C of Witten and
    Bell (1991). A character that does not occur in `train` costs 21 bits, in addition to the bits
    for the event that a new character occurs.

    Args:
        train: code points, non-empty.
        test: code points, non-empty.
        context: largest context length, in characters.
    """
    found = []
    bits = np.uint64(_BITS)
    probability = np.full(len(test), 2.0**-_BITS)
    # Each context is represented by a number. This array contains the number of each character's
    # context, which is 0 for the empty context.
    before, wanted_before = np.zeros_like(train), np.zeros_like(test)
    for _ in range(context + 1):
        seen, wanted = (before << bits) | train, (wanted_before << bits) | test
        known, number, counts = np.unique(seen, return_inverse=True, return_counts=True)
        contexts, first, kinds = np.unique(known >> bits, return_index=True, return_counts=True)
        totals = np.add.reduceat(counts, first)
        place = np.minimum(np.searchsorted(contexts, wanted_before), len(contexts) - 1)
        has_context = contexts[place] == wanted_before
        same = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
        is_known = known[same] == wanted
        count = np.where(is_known, counts[same], 0)
        mixed = (count + kinds[place] * probability) / (totals[place] + kinds[place])
        probability = np.where(has_context, mixed, probability)
        found.append(float(-np.log2(probability).mean()))
        # The next longer context of a character consists of the previous character and the previous
        # character's context. All contexts that do not occur in `train` get one common number,
        # which is not used for any context in `train`.
        before = _shifted(number)
        wanted_before = _shifted(np.where(is_known, same, len(known)))
    return found


def _shifted(numbers: np.ndarray[tuple[int], np.dtype[np.int64]]) -> _Codes:
    """Shift an array of context numbers by one character. Each character gets the number of the
    previous character, and the first character gets a number that is larger than all others."""
    first = np.full(1, (1 << _BITS) - 1, np.uint64)
    return np.concatenate([first, numbers[:-1].astype(np.uint64)])

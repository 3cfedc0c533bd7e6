"""How well a text's characters follow from the two before: a measure of how hard the text is to
learn, which costs a quarter of a second."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from firstlight.pipeline import settings
from firstlight.pipeline.held_out import HeldOut

#: Characters of a piece of the sample, and the most that the sample keeps.
_PIECE, _KEPT = 1 << 13, 5 << 19
#: Most characters that the model is trained and tested on.
_TRAINED, _TESTED = 1 << 20, 3 << 16
#: Fewest characters of held-out text for the test. With fewer, one of so many pieces is taken.
_FEWEST, _TEST_PART = 1 << 14, 8
#: Code points are smaller than 2 to this power; three fit into 64 bits.
_BITS = 21

_Codes = np.ndarray[tuple[int], np.dtype[np.uint64]]


class TrigramSample:
    """A sample of pieces that are spread evenly over a corpus."""

    def __init__(self) -> None:
        self._every, self._seen, self._characters = 1, 0, 0
        self._pieces: list[tuple[bytes, bool, str]] = []

    def add(self, digest: bytes, text: str, end: int) -> None:
        """Take pieces of a document.

        Args:
            digest: hash of the document.
            text: its text.
            end: where its end begins, which may be held out.
        """
        starts = [*range(0, end, _PIECE), *range(end, len(text), _PIECE)]
        for number in range(-self._seen % self._every, len(starts), self._every):
            start = starts[number]
            stop = starts[number + 1] if number + 1 < len(starts) else len(text)
            self._pieces.append((digest, start >= end, text[start:stop]))
            self._characters += stop - start
        self._seen += len(starts)
        while self._characters > _KEPT and len(self._pieces) > 1:
            self._pieces = self._pieces[::2]
            self._every *= 2
            self._characters = sum(len(piece) for _, _, piece in self._pieces)

    def bits_per_character(self, held: HeldOut) -> float:
        """The bits that a trigram model of the training text needs for a character of the held-out
        text, both as far as they are in the sample; `settings.TRIGRAM_BITS` if there is too little
        text to tell."""

        def is_held(digest: bytes, is_end: bool) -> bool:
            if held.digests is None:
                return is_end and digest not in held.whole
            return digest in held.digests

        parts: list[list[str]] = [[], []]
        for digest, is_end, piece in self._pieces:
            parts[is_held(digest, is_end)].append(piece)
        if sum(map(len, parts[1])) < _FEWEST:
            parts[1] += parts[0][_TEST_PART // 2 :: _TEST_PART]
            del parts[0][_TEST_PART // 2 :: _TEST_PART]
        train, test = (
            _codes(pieces, most) for pieces, most in zip(parts, (_TRAINED, _TESTED), strict=True)
        )
        if not len(train) or not len(test):
            return settings.TRIGRAM_BITS
        return trigram_bits(train, test)


def _codes(pieces: Sequence[str], most: int) -> _Codes:
    """The code points of pieces in a random order, `most` at most."""
    order = np.random.default_rng(0).permutation(len(pieces))
    text = "".join(pieces[i] for i in order)[:most]
    return np.frombuffer(text.encode("utf-32-le", "replace"), "<u4").astype(np.uint64)


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

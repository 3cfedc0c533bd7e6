"""Finds near-duplicates among documents by a sketch of each: a bottom-k MinHash of its shingles.

A shingle is a window of bytes of the text, after normalising white space and lower-casing. The
smallest hashes in the union of two sketches are a random sample of both documents' shingles. The
fraction of them that is in both sketches estimates the documents' Jaccard similarity (Broder 1997).
"""

from __future__ import annotations

import functools
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Hashes: TypeAlias = npt.NDArray[np.uint64]

#: Bytes of a shingle: about five words, or a line of code.
_SHINGLE_BYTES = 32
#: Number of hashes of a sketch, and of those that are keys of the index of similar documents.
_SKETCH, _KEYS = 48, 8
#: Number of bytes of a document from which its sketch is made, the first ones.
_MOST_BYTES = 1 << 20
#: Estimated Jaccard similarity from which two documents are near-duplicates.
_SIMILAR = 0.5

#: Base of the rolling hash: an odd number with irregular bits, 2^64 divided by the golden ratio.
_BASE = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class NearDuplicates:
    """Groups of documents that are similar to each other, found one document at a time.

    Args:
        most: largest number of documents whose sketches are kept (each about 600 bytes and 8
            entries of a dictionary). Later documents are not compared, to bound the memory.

    Attributes:
        groups: group of each document, in the order of `add`. The number of a group is that of its
            first document.
        bridged: groups with a document that is similar to a document of another group.
        compared: number of documents that were compared with earlier ones.
    """

    def __init__(self, most: int = 100_000) -> None:
        self.groups: list[int] = []
        self.bridged: set[int] = set()
        self.compared = 0
        self._most = most
        self._sketches: dict[int, Hashes] = {}
        self._found_by: dict[int, int] = {}

    def add(self, text: str) -> bool:
        """Add the next document; return True if it is similar to an earlier one."""
        number = len(self.groups)
        self.groups.append(number)
        if len(self._sketches) >= self._most:
            return False
        self.compared += 1
        found = sketch(text)
        keys: list[int] = found[:_KEYS].tolist()
        similar = [
            self.groups[other]
            for other in {self._found_by[key] for key in keys if key in self._found_by}
            if similarity(found, self._sketches[other]) >= _SIMILAR
        ]
        if similar:
            # The document joins the earliest group, that of a validation document if there is one.
            self.groups[number] = min(similar)
        if len(set(similar)) > 1:
            self.bridged.update(similar)
        if len(found):
            self._sketches[number] = found
        for key in keys:
            self._found_by.setdefault(key, number)
        return self.groups[number] != number


def sketch(text: str) -> Hashes:
    """The smallest hashes of a text's shingles, ascending, at most 48; empty for a text that is
    shorter than a shingle."""
    data = " ".join(text[:_MOST_BYTES].lower().split()).encode("utf-8")[:_MOST_BYTES]
    count = len(data) - _SHINGLE_BYTES + 1
    if count < 1:
        return np.empty(0, np.uint64)
    powers, inverses = _powers()
    # Polynomial hash: that of the prefix up to the window's end, less that of the prefix before the
    # window, divided by a power of the base, so that it does not depend on the window's position.
    before = np.zeros(len(data) + 1, np.uint64)
    np.cumsum(np.frombuffer(data, np.uint8) * powers[: len(data)], out=before[1:])
    hashes = (before[_SHINGLE_BYTES:] - before[:count]) * inverses[:count]
    hashes ^= hashes >> np.uint64(32)
    hashes *= np.uint64(_BASE)
    # Repeated windows have equal hashes: take more than needed, since duplicates are removed.
    most = min(4 * _SKETCH, count)
    return np.unique(np.partition(hashes, most - 1)[:most])[:_SKETCH]


def similarity(one: Hashes, other: Hashes) -> float:
    """The Jaccard similarity of two documents, estimated from their sketches; 0 if both are
    empty."""
    union = np.union1d(one, other)[:_SKETCH]
    if not len(union):
        return 0.0
    common = np.intersect1d(one, other, assume_unique=True)
    return float(np.isin(common, union, assume_unique=True).sum() / len(union))


@functools.cache
def _powers() -> tuple[Hashes, Hashes]:
    """The powers of the base, and their inverses, modulo 2^64, uint64 [2^20] each."""
    count = np.uint64(1)
    found = []
    for base in (_BASE, pow(_BASE, -1, 1 << 64)):
        powers = np.full(_MOST_BYTES, base & _MASK, np.uint64)
        powers[0] = count
        found.append(np.multiply.accumulate(powers))
    return found[0], found[1]

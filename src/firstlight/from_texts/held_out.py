"""Choose which documents of a corpus to hold out, so that near-duplicates are not split between
training and validation.

Near-duplicates are found by comparing sketches of the documents. A sketch is a bottom-k MinHash of
a document's shingles. A shingle is a window of bytes of the document's text, which is first
converted to lower case with normalised whitespace. The smallest hashes in the union of two sketches
are a random sample of the shingles of both documents. The fraction of these hashes that occur in
both sketches is an estimate of the documents' Jaccard similarity (Broder 1997).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from firstlight.data.records import digest_of

if TYPE_CHECKING:
    # Imported here, because this module imports tokenizers, which would delay the first message.
    from firstlight.data.prepare import SplitOf
import functools
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Hashes: TypeAlias = npt.NDArray[np.uint64]

#: Length of a shingle in bytes. It is about five words or one line of code.
_SHINGLE_BYTES = 32
#: _SKETCH is the number of hashes in a sketch. The first _KEYS hashes of each sketch are used as
#: keys in the index of documents.
_SKETCH, _KEYS = 48, 8
#: Maximum number of bytes of a document, counted from its start, from which its sketch is computed.
_MOST_BYTES = 1 << 20
#: Minimum estimated Jaccard similarity of near-duplicates.
_SIMILAR = 0.5

#: Base of the rolling hash. It is 2^64 divided by the golden ratio, rounded to an odd number, and
#: its bits are irregular.
_BASE = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class NearDuplicates:
    """Groups of similar documents, found by adding one document at a time.

    Args:
        most: maximum number of documents whose sketches are kept. Each sketch takes about 600 bytes
            and 8 dictionary entries. Once this number is reached, further documents are not
            compared, to limit the memory.

    Attributes:
        groups: group number of each document, in the order in which they were added. The number of
            a group is the number of its first document.
        bridged: numbers of the groups that contain a document similar to a document in a different
            group.
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
        """Add the next document, and return True if it is similar to an earlier document."""
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
            # If several groups are similar, the document is added to the earliest one. Validation
            # documents are added first, so their groups take precedence.
            self.groups[number] = min(similar)
        if len(set(similar)) > 1:
            self.bridged.update(similar)
        if len(found):
            self._sketches[number] = found
        for key in keys:
            self._found_by.setdefault(key, number)
        return self.groups[number] != number


def sketch(text: str) -> Hashes:
    """Return the smallest hashes of a document's shingles in ascending order, as a uint64 array of
    at most 48 elements. The array is empty if the document is shorter than a shingle."""
    data = " ".join(text[:_MOST_BYTES].lower().split()).encode("utf-8")[:_MOST_BYTES]
    count = len(data) - _SHINGLE_BYTES + 1
    if count < 1:
        return np.empty(0, np.uint64)
    powers, inverses = _powers()
    # The polynomial hash of a window is the hash of the text up to the end of the window, minus the
    # hash of the text before the window. Dividing the difference by a power of the base makes it
    # independent of the window's position.
    before = np.zeros(len(data) + 1, np.uint64)
    np.cumsum(np.frombuffer(data, np.uint8) * powers[: len(data)], out=before[1:])
    hashes = (before[_SHINGLE_BYTES:] - before[:count]) * inverses[:count]
    hashes ^= hashes >> np.uint64(32)
    hashes *= np.uint64(_BASE)
    # Windows with the same text have equal hashes. More hashes than needed are selected here,
    # because duplicates are removed afterwards.
    most = min(4 * _SKETCH, count)
    return np.unique(np.partition(hashes, most - 1)[:most])[:_SKETCH]


def similarity(one: Hashes, other: Hashes) -> float:
    """Estimate the Jaccard similarity of two documents from their sketches. Return 0 if both
    sketches are empty."""
    union = np.union1d(one, other)[:_SKETCH]
    if not len(union):
        return 0.0
    common = np.intersect1d(one, other, assume_unique=True)
    return float(np.isin(common, union, assume_unique=True).sum() / len(union))


@functools.cache
def _powers() -> tuple[Hashes, Hashes]:
    """Return the powers of the base and their inverses modulo 2^64, each as a uint64 array of shape
    [2^20]."""
    count = np.uint64(1)
    found = []
    for base in (_BASE, pow(_BASE, -1, 1 << 64)):
        powers = np.full(_MOST_BYTES, base & _MASK, np.uint64)
        powers[0] = count
        found.append(np.multiply.accumulate(powers))
    return found[0], found[1]


#: Fraction of the bytes of a corpus that are held out, and maximum number of held-out bytes. More
#: held-out text would hardly improve the estimate of the loss.
HELD_OUT_SHARE = 0.1
HELD_OUT_BYTES = 1 << 20


@dataclass(frozen=True)
class HeldOut:
    """The split of a corpus into training and validation text.

    Attributes:
        digests: hashes of the documents that are held out. None if the ends of all documents are
            held out instead of whole documents.
        fraction: held-out fraction of the text.
        whole: if the ends of documents are held out, hashes of the documents that are nevertheless
            used for training in full, because a similar document may contain the same text.
        similar: number of held-out documents that are similar to an earlier held-out document.
        left_out: hashes of documents that are excluded from training, because they are similar to
            validation documents given by the user.
        left_out_bytes: UTF-8 bytes of the documents in `left_out`.
    """

    digests: frozenset[bytes] | None
    fraction: float
    whole: frozenset[bytes] = frozenset()
    similar: int = 0
    left_out: frozenset[bytes] = frozenset()
    left_out_bytes: int = 0

    def splitter(self) -> SplitOf:
        """Return a function that receives the text of a document and returns its split. Use the
        function for a single pass over the documents in their original order.

        The function returns None for documents to skip, such as duplicates of earlier documents. It
        returns "tail" for documents whose end is held out.
        """
        seen: set[bytes] = set()

        def split_of(text: str) -> Literal["train", "val", "tail"] | None:
            digest = digest_of(text)
            if digest in seen or digest in self.left_out:
                return None
            seen.add(digest)
            if self.digests is None:
                return "train" if digest in self.whole else "tail"
            return "val" if digest in self.digests else "train"

        return split_of


def hold_out(near: NearDuplicates, sizes: Mapping[bytes, int]) -> HeldOut:
    """Select the text to hold out. Whole documents are held out if there are enough documents, and
    otherwise the ends of documents.

    Args:
        near: near-duplicates among the documents.
        sizes: size of each document in bytes, keyed by the hash of its text. The documents have the
            same order as in `near.groups`.
    """
    digests, counts = list(sizes), list(sizes.values())
    share = held_out_share(sum(counts))
    chosen = held_out_groups(near.groups, counts, near.bridged)
    if chosen is not None:
        similar = len(chosen) - len({near.groups[number] for number in chosen})
        return HeldOut(frozenset(digests[number] for number in chosen), share, similar=similar)
    members = Counter(near.groups)
    others = {group for group, count in members.items() if count == 1} - near.bridged
    alike = [number for number, group in enumerate(near.groups) if group not in others]
    # If most of the text consists of similar documents, there would be too little text to hold out.
    is_most = 2 * sum(counts[number] for number in alike) > sum(counts)
    return HeldOut(None, share, frozenset(() if is_most else (digests[n] for n in alike)))


def hold_out_given(near: NearDuplicates, sizes: Mapping[bytes, int], count: int) -> HeldOut:
    """Return the split for a corpus whose first `count` documents were given by the user for
    validation.

    Args:
        near, sizes: near-duplicates and sizes of the documents; see `hold_out`.
        count: number of validation documents, without duplicates.
    """
    digests, counts = list(sizes), list(sizes.values())
    given = set(near.groups[:count])
    alike = [n for n, group in enumerate(near.groups) if n >= count and group in given]
    return HeldOut(
        frozenset(digests[:count]),
        sum(counts[:count]) / max(sum(counts), 1),
        similar=count - len(given),
        left_out=frozenset(digests[n] for n in alike),
        left_out_bytes=sum(counts[n] for n in alike),
    )


def held_out_groups(
    groups: Sequence[int], sizes: Sequence[int], bridged: Collection[int] = ()
) -> list[int] | None:
    """Select the documents to hold out, in whole groups of near-duplicates.

    The groups are visited in order, and a group is held out whenever the bytes held out so far are
    less than the desired share of the bytes visited so far. This spreads the held-out documents
    over the corpus. A group that is larger than the held-out share of the entire corpus is never
    held out.

    Args:
        groups: group number of each document.
        sizes: size of each document in bytes.
        bridged: groups that are never held out, because they are similar to other groups. Merging
            similar groups would also keep near-duplicates together. However, adding a document to
            the corpus could then move other documents between the splits.

    Returns:
        The indices of the held-out documents in ascending order. The result is None if whole groups
        can't make up the desired share. In this case, the ends of documents should be held out.
    """
    members: dict[int, list[int]] = {}
    for number, group in enumerate(groups):
        members.setdefault(group, []).append(number)
    total = sum(sizes)
    share = held_out_share(total)
    if len(members) * HELD_OUT_SHARE < 1:
        return None
    held: list[int] = []
    seen = taken = 0
    for group, numbers in members.items():
        size = sum(sizes[number] for number in numbers)
        if group not in bridged and taken < share * seen and size <= share * total:
            held += numbers
            taken += size
        seen += size
    # If most of the text is in a few documents, whole documents can't make up the desired share.
    return sorted(held) if taken >= share * total / 2 else None


def held_out_share(text_bytes: int) -> float:
    """Return the fraction of a corpus's bytes to hold out, rounded to four significant digits."""
    share = min(HELD_OUT_SHARE, HELD_OUT_BYTES / max(text_bytes, 1))
    return float(f"{share:.4g}")

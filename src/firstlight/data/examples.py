"""Prepared conversations: examples that are never split over rows and never attend to each other.

An example of n tokens takes n - 1 positions of a row: all its tokens but the last are inputs, and
all but the first are predicted. Rows of T positions are packed by `pack_best_fit`. Within a row,
each example is a separate document, in which positions start at 0 and to which attention is
limited. The remaining positions are one more document. Its labels are -100, like those of all
tokens outside the loss mask. The two examples of a preference pair are in one row, one after the
other. Which examples share a row depends on the lengths and T alone; the order of the rows differs
in each epoch, as with text (see `loader`).
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from firstlight.data.conversations import REASONS
from firstlight.data.corpus import Corpus, DocumentIds, Kind, RowIds, TokenDataset
from firstlight.data.shards import LABELLED_VERSION, REJECTED_NAME, read_manifest
from firstlight.errors import DataError

LongPolicy = Literal["refuse", "drop", "cut"]

#: Name of the file with the origin (file and line) of each example of a split, one a line.
ORIGINS_NAME = "{split}-examples.txt"


@dataclass(frozen=True)
class Packing:
    """The rows of a split for one row length. For preference data, "example" means pair here.

    Attributes:
        examples: indices of the examples of all rows, row by row, int64 [examples].
        starts: index in `examples` of each row's first example, then their number, [rows + 1].
        num_labels: labels of an epoch.
        num_inputs: positions that examples take, in all rows together.
        dropped: number of examples that are longer than a row and left out.
        cut: number of examples that are longer than a row and cut to its length.
        seq_len: positions of a row.
    """

    examples: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    num_labels: int
    num_inputs: int
    dropped: int
    cut: int
    seq_len: int

    def __len__(self) -> int:
        return len(self.starts) - 1

    def row(self, index: int) -> list[int]:
        """Indices of the examples (for preference data, of the pairs) of a row."""
        return list(map(int, self.examples[self.starts[index] : self.starts[index + 1]]))

    @property
    def filled(self) -> float:
        """Share of the rows' positions that examples take, from 0 to 1."""
        return self.num_inputs / (len(self) * self.seq_len)

    def record(self) -> dict[str, Any]:
        """The entries for the run log."""
        return {
            "rows": len(self),
            "examples": len(self.examples),
            "dropped": self.dropped,
            "cut": self.cut,
            "learned_tokens": self.num_labels,
            "filled": round(self.filled, 4),
        }


def pack_best_fit(
    lengths: npt.NDArray[np.int64], capacity: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Pack whole items into rows by best-fit decreasing: the longest items first, each into the
    fullest row that still has room for it (Johnson et al. 1974). The result has at most about 11/9
    of the least possible number of rows. The same lengths give the same rows.

    Args:
        lengths: length of each item, from 1 to `capacity`, int64 [items].
        capacity: length of a row.

    Returns:
        (indices of the items of all rows, row by row, int64 [items]; index in them of each row's
        first item, then the number of items, int64 [rows + 1])
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


class ExampleDataset(TokenDataset):
    """One split of prepared conversations.

    Args:
        folder, split, verify: see `TokenDataset`.
        long: policy for an example longer than a row: "refuse" raises an error, "drop" leaves the
            example out, "cut" cuts off its end (and leaves it out if no label remains).

    Attributes:
        lengths: number of tokens of each example, int64 [examples].
        num_labels: labels of all examples.
        together: number of adjacent examples that are always in the same row, called a unit below.

    Raises:
        DataError: see `TokenDataset`; or the folder holds text.
    """

    version = LABELLED_VERSION
    kind: Kind = "chat"
    has_examples = True
    together = 1
    #: Name of the examples, or of the pairs, in messages.
    unit = "conversations"

    def __init__(
        self, folder: str | Path, split: str, *, verify: bool = True, long: LongPolicy = "refuse"
    ) -> None:
        super().__init__(folder, split, verify=verify)
        self.long = long
        entry = self.manifest["splits"][split]
        self.lengths = np.concatenate(
            [np.diff(shard.offsets().astype(np.int64)) for shard in self._shards]
        )
        self._offsets = np.concatenate([[0], np.cumsum(self.lengths)])
        self.num_labels: int = entry.get("learned", -1)
        self._packings: dict[int, Packing] = {}
        self._require_whole(verify)

    def _require_whole(self, verify: bool) -> None:
        found = self.num_labels
        if verify:
            found = sum(int(shard.loss_mask().sum()) for shard in self._shards)
        if found != self.num_labels or int(self.lengths.min()) < 2:
            raise DataError(
                f"{self.folder}: the examples of '{self.split}' don't fit its manifest: prepare "
                "them again"
            )

    def example(self, index: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """(tokens, int64 [N]; loss mask, bool [N]) of an example of N tokens."""
        start, stop = int(self._offsets[index]), int(self._offsets[index + 1])
        shard = int(np.searchsorted(self._starts, start, side="right")) - 1
        base = self._starts[shard]
        return self[start:stop], self._shards[shard].loss_mask(start - base, stop - base)

    def origin(self, index: int) -> str:
        """File and line of an example, for messages."""
        path = self.folder / ORIGINS_NAME.format(split=self.split)
        try:
            with open(path, encoding="utf-8") as file:
                return next(itertools.islice(file, index, None)).rstrip("\n")
        # A folder that was downloaded lacks the file: only shards and tokenizer are fetched.
        except (OSError, UnicodeDecodeError, StopIteration):
            return f"{self.folder}, example {index + 1} of '{self.split}'"

    def packing(self, seq_len: int) -> Packing:
        """The rows of `seq_len` positions.

        Raises:
            DataError: an example is longer than a row and `long` is "refuse", or no example is
                left.
        """
        if seq_len not in self._packings:
            self._packings[seq_len] = self._packed(seq_len)
        return self._packings[seq_len]

    def _packed(self, seq_len: int) -> Packing:
        # Positions of each unit: of an example, or of both examples of a pair.
        sizes = (self.lengths - 1).reshape(-1, self.together).sum(1)
        long = np.flatnonzero(sizes > seq_len)
        if len(long) and self.long == "refuse":
            raise DataError(self._refusal(long, seq_len))
        keep = np.ones(len(sizes), dtype=bool)
        lost = 0
        for index in long.tolist():
            for loss_mask in (self.example(i)[1] for i in self._of_unit(index)):
                kept = int(loss_mask[: seq_len + 1].sum()) if self.long == "cut" else 0
                keep[index] = kept > 0
                lost += int(loss_mask.sum()) - kept
        kept_ones = np.flatnonzero(keep)
        if not len(kept_ones):
            cut = ", or choose data.long cut (learn their beginnings)"
            raise DataError(
                f"no example of the '{self.split}' split of {self.folder} fits into data.seq_len "
                f"{seq_len}: raise it up to the model's context, start from a model with a longer "
                f"context{cut if self.long == 'drop' and self.together == 1 else ''}"
            )
        lengths = np.minimum(sizes[kept_ones], seq_len)
        items, starts = pack_best_fit(lengths, seq_len)
        dropped = len(sizes) - len(kept_ones)
        return Packing(
            examples=kept_ones[items],
            starts=starts,
            num_labels=self.num_labels - lost,
            num_inputs=int(lengths.sum()),
            dropped=dropped,
            cut=len(long) - dropped,
            seq_len=seq_len,
        )

    def examples_of_row(self, row: int, seq_len: int) -> list[int]:
        """Indices of the examples of a row, in their order; of each pair, the chosen one first."""
        return [i for unit in self.packing(seq_len).row(row) for i in self._of_unit(unit)]

    def _of_unit(self, unit: int) -> range:
        return range(unit * self.together, (unit + 1) * self.together)

    def _refusal(self, long: npt.NDArray[np.int64], seq_len: int) -> str:
        longest = int(long[np.argmax(self.lengths[long])])
        return (
            f"{len(long):,} of {self.num_documents:,} examples of '{self.split}' are longer than "
            f"a row of data.seq_len {seq_len}, the longest with {self.lengths[longest]:,} tokens "
            f"at {self.origin(longest)}: raise data.seq_len to {self.lengths[longest] - 1:,}, or "
            "choose data.long drop (leave them out) or cut (learn their beginnings)"
        )

    def num_rows(self, seq_len: int) -> int:
        return len(self.packing(seq_len))

    def require_row(self, seq_len: int) -> None:
        self.packing(seq_len)

    def fill_row(
        self, row: int, input_ids: RowIds, labels: RowIds, document_ids: DocumentIds | None
    ) -> None:
        assert document_ids is not None
        seq_len, position = len(input_ids), 0
        examples = self.examples_of_row(row, seq_len)
        for number, index in enumerate(examples):
            tokens, loss_mask = self.example(index)
            tokens, loss_mask = tokens[: seq_len + 1], loss_mask[: seq_len + 1]
            end = position + len(tokens) - 1
            input_ids[position:end] = tokens[:-1]
            labels[position:end][loss_mask[1:]] = tokens[1:][loss_mask[1:]]
            document_ids[position:end] = number
            position = end
        document_ids[position:] = len(examples)

    def predicts_first(self, first_id: int | None) -> bool:
        return False

    def _num_predicted(self, *, document_masking: bool, first_id: int | None = None) -> int:
        return self.num_labels

    def label_share(self, seq_len: int) -> float:
        packing = self.packing(seq_len)
        return packing.num_labels / (len(packing) * seq_len)

    def describe(self, seq_len: int) -> Iterator[str]:
        packing, name = self.packing(seq_len), f"data: {self.split}"
        yield (
            f"{name}: {len(packing.examples):,} {self.unit} in {len(packing):,} rows of {seq_len}, "
            f"{packing.filled:.1%} filled; {packing.num_labels:,} tokens to learn"
        )
        total = self.num_documents // self.together
        for count, fate in ((packing.dropped, "left out"), (packing.cut, "cut")):
            if count:
                yield f"{name}: {count:,} of {total:,} {self.unit} are too long and {fate}"
        if self.split != "train":
            return
        documents, chat = self.manifest["documents"], self.manifest["chat"]
        for reason, count in documents["rejected"].items():
            yield (
                f"{name}: {count:,} of {documents['read']:,} records left out: {REASONS[reason]}; "
                f"listed in {self.folder / REJECTED_NAME}"
            )
        if chat["torn_answers"]:
            yield (
                f"{name}: {chat['torn_answers']:,} answers begin inside a token that begins in the "
                "prompt; that token is not learned"
            )
        if chat.get("warning"):
            yield f"warning: {chat['warning']}"

    def records(self, seq_len: int) -> list[dict[str, Any]]:
        read = {"records": self.manifest["documents"]} if self.split == "train" else {}
        own = {"dir": str(self.folder), "split": self.split, "long": self.long}
        return [own | self.packing(seq_len).record() | read | self.manifest["chat"]]

    def identity(self) -> dict[str, Any]:
        return {"long": self.long}


class PreferenceDataset(ExampleDataset):
    """One split of prepared preference pairs: examples 2 i and 2 i + 1 are the chosen and the
    rejected answer of pair i.

    Args:
        folder, split, verify, long: see `ExampleDataset`. A long pair is never cut, because half an
            answer can't be compared with the other answer.

    Attributes:
        references: log-probability of each example's answer before training, fp64 [examples]; NaN
            for examples that are left out. None until the run has set it.
        reference_model: name and sha256 of the model that computed `references`.

    Raises:
        DataError: see `ExampleDataset`; or `long` is "cut".
    """

    kind: Kind = "preference"
    together = 2
    unit = "preference pairs"

    references: npt.NDArray[np.float64] | None = None
    reference_model: dict[str, str] | None = None

    def _require_whole(self, verify: bool) -> None:
        super()._require_whole(verify)
        name = self.folder
        if self.long == "cut":
            raise DataError(f"data.long cut is not for pairs, as in {name}: refuse or drop them")
        if len(self.lengths) % 2:
            raise DataError(f"{name}: '{self.split}' has half of a pair: prepare it again")

    def references_of(self, rows: Sequence[int], seq_len: int) -> npt.NDArray[np.float64]:
        most_in_a_row = 2 * int(np.diff(self.packing(seq_len).starts).max())
        result = np.full((len(rows), most_in_a_row), np.nan)
        for i, row in enumerate(rows):
            examples = self.examples_of_row(row, seq_len)
            result[i, : len(examples)] = 0 if self.references is None else self.references[examples]
        return result

    def identity(self) -> dict[str, Any]:
        return {**super().identity(), "reference": self.reference_model}

    def _refusal(self, long: npt.NDArray[np.int64], seq_len: int) -> str:
        sizes = (self.lengths - 1).reshape(-1, 2).sum(1)
        longest = int(long[np.argmax(sizes[long])])
        return (
            f"{len(long):,} of {len(sizes):,} pairs of '{self.split}' are longer than a row of "
            f"data.seq_len {seq_len}, which holds both answers with their prompts; the longest "
            f"takes {sizes[longest]:,} at {self.origin(2 * longest)}: raise data.seq_len, or "
            "choose data.long drop (leave them out)"
        )


def open_split(
    folder: str | Path, split: str, *, verify: bool = True, long: LongPolicy = "refuse"
) -> TokenDataset:
    """A split of a prepared folder that holds text, conversations or preference pairs.

    Args:
        folder, split, verify: see `TokenDataset`.
        long: see `ExampleDataset`; not used for text.

    Raises:
        DataError: see `TokenDataset` and `PreferenceDataset`.
    """
    kind = kind_of(read_manifest(Path(folder).expanduser()))
    if kind == "preference":
        return PreferenceDataset(folder, split, verify=verify, long=long)
    if kind == "chat":
        return ExampleDataset(folder, split, verify=verify, long=long)
    return TokenDataset(folder, split, verify=verify)


def kind_of(manifest: Mapping[str, Any]) -> Kind:
    """The kind of data in a prepared folder, according to its manifest."""
    if manifest["version"] != LABELLED_VERSION:
        return "text"
    return "preference" if manifest.get("pairs") is True else "chat"


def preference_splits(splits: Iterable[Corpus | None]) -> list[PreferenceDataset]:
    """Those of the splits that hold preference pairs: a run has to set their `references`."""
    return [split for split in splits if isinstance(split, PreferenceDataset)]

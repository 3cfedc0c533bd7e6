"""Read splits whose rows are packed with `pack_best_fit`: conversations, preference pairs, and text
in rows that start at document boundaries.

Conversations are examples that are never split across rows and never attend to each other. An
example of n tokens takes n - 1 positions of a row: all its tokens except the last are inputs, and
all except the first are predicted. Within a row, each example is a separate document: positions
start at 0, and attention is limited to the example. Any unused positions at the end of the row form
an additional document. The labels of these positions, and of all tokens outside the loss mask, are
-100. The two examples of a preference pair are adjacent in the same row. The assignment of examples
to rows depends only on their lengths and the row length. The order of the rows differs in each
epoch, as with text (see `loader`).

Text is packed with `data.row_alignment: document`. Each document is split into pieces of at most
one row, and the pieces are packed into rows without further splitting (Ding et al. 2024, arXiv
2404.10830). Only documents longer than a row are therefore split, and every token is predicted once
per epoch, as in a stream. The rest of a row is padding without labels. A row starts at the
beginning of a document, unless the row consists only of later pieces of long documents.

Rows of text are a pure function of the document lengths and the row length, and are shuffled like
the rows of a stream. The loader's state is therefore still a single number.

The first input of a text document depends on the special tokens around its text:

    bos text eos     the bos; a document of n tokens takes n - 1 positions
    text eos         an eos, from which the first token is predicted, as in a stream; a document of
                     n tokens takes n positions
    text             the first token, which is not predicted; a document of n tokens takes n - 1
                     positions
"""

from __future__ import annotations

import functools
import itertools
import json
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from firstlight.console import counted
from firstlight.data.conversations import REASONS
from firstlight.data.corpus import Corpus, DocumentIds, Kind, RowIds, TokenDataset
from firstlight.data.shards import LABELLED_VERSION, REJECTED_NAME, read_manifest
from firstlight.errors import DataError
from firstlight.tokenizer.messages import LOST

LongPolicy = Literal["refuse", "drop", "cut"]
#: Method of dividing text into rows. "stream" concatenates all documents and splits the result.
#: "document" packs whole documents into rows.
RowAlignment = Literal["stream", "document"]

#: Maximum number of files listed in a message about rejected records.
_SHOWN_FILES = 5
#: Maximum number of unused fields listed in a message.
_SHOWN_FIELDS = 10
#: Name of the file that lists where each example of a split was read from. Each line contains the
#: file and line of one example.
ORIGINS_NAME = "{split}-examples.txt"


@dataclass(frozen=True)
class Packing:
    """Packed rows of a split for one row length. For preference data, each "example" in this class
    is a pair.

    Attributes:
        examples: indices of the examples in all rows, row by row, int64 [examples].
        starts: index in `examples` of each row's first example, followed by the total number of
            examples, [rows + 1].
        num_labels: number of labels per epoch.
        num_inputs: total number of positions that examples occupy in all rows.
        dropped: number of examples dropped because they are longer than a row.
        cut: number of examples truncated because they are longer than a row.
        seq_len: number of positions per row.
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
        """Return the indices of the examples in a row. For preference data, return the indices of
        the pairs.
        """
        return list(map(int, self.examples[self.starts[index] : self.starts[index + 1]]))

    @property
    def filled(self) -> float:
        """Fraction of all positions that are occupied by examples, from 0 to 1."""
        return self.num_inputs / (len(self) * self.seq_len)

    def record(self) -> dict[str, Any]:
        """Return the entries for the run log."""
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
    """Pack items into rows by best-fit decreasing: the items are placed from longest to shortest,
    each in the fullest row that has enough room (Johnson et al. 1974). The number of rows is at
    most about 11/9 of the minimum. The same lengths always result in the same rows.

    Args:
        lengths: length of each item, from 1 to `capacity`, int64 [items].
        capacity: length of a row.

    Returns:
        Two arrays. The first one contains the indices of the items in all rows, row by row, int64
        [items]. The second one contains the position of each row's first item in the first array,
        followed by the number of items, int64 [rows + 1].
    """
    order = np.argsort(-lengths, kind="stable")
    rows: list[list[int]] = []
    rows_of_room: dict[int, list[int]] = {}
    rooms: list[int] = []  # Keys of `rows_of_room` in ascending order.
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
        long: how to handle an example that is longer than a row. "refuse" raises an error, and
            "drop" drops the example. "cut" truncates the example, or drops it if no label would
            remain.

    Attributes:
        lengths: number of tokens of each example, int64 [examples].
        num_labels: number of labels in all examples.
        together: number of adjacent examples that always share a row. It is 2 for preference pairs,
            and otherwise 1. These examples together are called a unit in this module.

    Raises:
        DataError: see `TokenDataset`; also raised if the folder contains text.
    """

    version = LABELLED_VERSION
    kind: Kind = "chat"
    has_examples = True
    together = 1
    #: Plural noun for the units, used in messages.
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
                f"{self.folder}: the examples of '{self.split}' don't match its manifest: "
                "prepare them again"
            )

    def example(self, index: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Return the tokens, int64 [N], and the loss mask, bool [N], of the example at `index`,
        which has N tokens.
        """
        start, stop = int(self._offsets[index]), int(self._offsets[index + 1])
        shard = int(np.searchsorted(self._starts, start, side="right")) - 1
        base = self._starts[shard]
        return self[start:stop], self._shards[shard].loss_mask(start - base, stop - base)

    def origin(self, index: int) -> str:
        """Return the file and line of an example, for use in messages."""
        path = self.folder / ORIGINS_NAME.format(split=self.split)
        try:
            with open(path, encoding="utf-8") as file:
                return next(itertools.islice(file, index, None)).rstrip("\n")
        # A downloaded folder lacks this file, because only the shards and the tokenizer are
        # downloaded.
        except (OSError, UnicodeDecodeError, StopIteration):
            return f"{self.folder}, example {index + 1} of '{self.split}'"

    def packing(self, seq_len: int) -> Packing:
        """Return the packed rows of `seq_len` positions.

        Raises:
            DataError: an example is longer than a row and `long` is "refuse", or no examples are
                left.
        """
        if seq_len not in self._packings:
            self._packings[seq_len] = self._packed(seq_len)
        return self._packings[seq_len]

    def _packed(self, seq_len: int) -> Packing:
        # Number of positions that each unit takes in a row. A unit is an example or, for preference
        # data, both examples of a pair.
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
            cut = ", or set data.long to cut (train on their beginnings)"
            raise DataError(
                f"no example of the '{self.split}' split of {self.folder} fits into data.seq_len "
                f"{seq_len}: raise it (up to the model's context) or start from a model with a "
                f"longer context{cut if self.long == 'drop' and self.together == 1 else ''}"
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
        """Return the indices of the examples in a row, in order. In each pair, the chosen answer
        comes first.
        """
        return [i for unit in self.packing(seq_len).row(row) for i in self._of_unit(unit)]

    def _of_unit(self, unit: int) -> range:
        return range(unit * self.together, (unit + 1) * self.together)

    def _refusal(self, long: npt.NDArray[np.int64], seq_len: int) -> str:
        longest = int(long[np.argmax(self.lengths[long])])
        return (
            f"{len(long):,} of {self.num_documents:,} examples of '{self.split}' are longer than "
            f"a row of data.seq_len {seq_len}, the longest with {self.lengths[longest]:,} tokens "
            f"at {self.origin(longest)}: raise data.seq_len to {self.lengths[longest] - 1:,}, or "
            "set data.long to drop (exclude them) or cut (train on their beginnings)"
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
            f"{name}: {len(packing.examples):,} {self.unit} in {len(packing):,} rows of {seq_len} "
            f"tokens, {packing.filled:.1%} filled; {packing.num_labels:,} tokens to train on"
        )
        total = self.num_documents // self.together
        for count, fate in ((packing.dropped, "left out"), (packing.cut, "cut")):
            if count:
                yield f"{name}: {count:,} of {total:,} {self.unit} are too long and {fate}"
        if self.split == "train":
            yield from chat_notes(self.folder, self.manifest)

    def records(self, seq_len: int) -> list[dict[str, Any]]:
        read = {"records": self.manifest["documents"]} if self.split == "train" else {}
        own = {"dir": str(self.folder), "split": self.split, "long": self.long}
        return [own | self.packing(seq_len).record() | read | self.manifest["chat"]]

    def identity(self) -> dict[str, Any]:
        return {"long": self.long}


class PreferenceDataset(ExampleDataset):
    """One split of prepared preference pairs. Examples 2 i and 2 i + 1 contain the chosen and the
    rejected answer of pair i.

    Args:
        folder, split, verify, long: see `ExampleDataset`. A pair is never truncated, because a
            truncated answer can't be compared with a complete one.

    Attributes:
        references: log-probability of each example's answer before training, fp64 [examples]; NaN
            for dropped examples. None until the run sets it.
        reference_model: name and sha256 of the model that computed `references`.

    Raises:
        DataError: see `ExampleDataset`; also raised if `long` is "cut".
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
            raise DataError(
                f"data.long cut does not support preference pairs ({name}): set it to refuse or "
                "drop"
            )
        if len(self.lengths) % 2:
            raise DataError(f"{name}: '{self.split}' has an incomplete pair: prepare it again")

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
            f"takes {sizes[longest]:,} at {self.origin(2 * longest)}: raise data.seq_len, or set "
            "data.long to drop (exclude them)"
        )


# Text in rows that start at document boundaries

#: Number of pieces that are packed at a time. Packing this many pieces takes a fraction of a
#: second, and packing more of them at a time would not fill the rows better.
_BLOCK = 1 << 16


@dataclass(frozen=True)
class AlignedRows:
    """Packed rows of a text split. Each row consists of pieces of documents. The arrays contain one
    element for each piece, in the order of the rows.

    Attributes:
        labels: position in the stream of each piece's first label, int64 [pieces].
        lengths: number of positions in each piece, int64 [pieces].
        opens: mask that is True for each piece at the beginning of a document, bool [pieces].
        starts: index of each row's first piece, followed by the number of pieces, int64 [rows + 1].
    """

    labels: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    opens: npt.NDArray[np.bool_]
    starts: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.starts) - 1


def align_rows(
    offsets: npt.NDArray[np.int64], seq_len: int, *, predicts_first: bool
) -> AlignedRows:
    """Split documents into pieces, and pack the pieces into rows.

    Args:
        offsets: position in the stream of each document's first token, followed by the number of
            tokens, int64 [documents + 1].
        seq_len: number of positions per row.
        predicts_first: True if the first token of a document is also a label.
    """
    skipped = 0 if predicts_first else 1
    sizes = np.diff(offsets) - skipped
    counts = np.maximum(-(-sizes // seq_len), 0)
    document = np.repeat(np.arange(len(sizes)), counts)
    # Number of each piece within its document.
    number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    labels = offsets[document] + skipped + number * seq_len
    lengths = np.minimum(sizes[document] - number * seq_len, seq_len)
    rows = _pack(lengths, seq_len)
    # Within a row, pieces that begin a document come before all other pieces, so that the row
    # starts at a document boundary if possible.
    order = np.lexsort((np.arange(len(rows)), number > 0, rows))
    starts = np.concatenate([[0], np.cumsum(np.bincount(rows))]).astype(np.int64)
    return AlignedRows(labels[order], lengths[order], number[order] == 0, starts)


def _pack(lengths: npt.NDArray[np.int64], seq_len: int) -> npt.NDArray[np.int64]:
    """Pack pieces into rows. The argument contains the length of each piece, int64 [pieces]. Return
    the index of each piece's row, int64 [pieces].
    """
    rows = np.empty(len(lengths), dtype=np.int64)
    whole = lengths == seq_len
    count = int(whole.sum())
    rows[whole] = np.arange(count)
    short = np.flatnonzero(~whole)
    for first in range(0, len(short), _BLOCK):
        block = short[first : first + _BLOCK]
        items, starts = pack_best_fit(lengths[block], seq_len)
        rows[block[items]] = count + np.repeat(np.arange(len(starts) - 1), np.diff(starts))
        count += len(starts) - 1
    return rows


class AlignedDataset(TokenDataset):
    """One split of prepared text, in which every row starts at a document boundary if possible.

    Args:
        folder, split, verify: see `TokenDataset`.

    Raises:
        DataError: see `TokenDataset`.
    """

    def __init__(self, folder: str | Path, split: str, *, verify: bool = True) -> None:
        super().__init__(folder, split, verify=verify)
        self._rows: dict[int, AlignedRows] = {}

    def rows(self, seq_len: int) -> AlignedRows:
        """Return the packed rows of `seq_len` positions."""
        if seq_len not in self._rows:
            self._rows[seq_len] = align_rows(
                self._offsets, seq_len, predicts_first=self.eos_separates
            )
        return self._rows[seq_len]

    @functools.cached_property
    def _offsets(self) -> npt.NDArray[np.int64]:
        starts = self.document_starts(slice(0, self.num_tokens))
        return np.concatenate([starts, [self.num_tokens]]).astype(np.int64)

    def num_rows(self, seq_len: int) -> int:
        return len(self.rows(seq_len))

    def require_row(self, seq_len: int) -> None:
        if not self.num_rows(seq_len):
            raise DataError(f"the '{self.split}' split of {self.folder} has no token to predict")

    def fill_row(
        self, row: int, input_ids: RowIds, labels: RowIds, document_ids: DocumentIds | None
    ) -> None:
        rows, position = self.rows(len(input_ids)), 0
        pieces = range(int(rows.starts[row]), int(rows.starts[row + 1]))
        for number, piece in enumerate(pieces):
            first, length = int(rows.labels[piece]), int(rows.lengths[piece])
            end = position + length
            labels[position:end] = self[first : first + length]
            if rows.opens[piece] and self.eos_separates:
                # The first document of the stream has no token before it.
                input_ids[position] = self.manifest["eos_token_id"]
            else:
                input_ids[position] = self[first - 1 : first][0]
            input_ids[position + 1 : end] = labels[position : end - 1]
            if document_ids is not None:
                document_ids[position:end] = number
            position = end
        if document_ids is not None:
            document_ids[position:] = len(pieces)

    def label_share(self, seq_len: int) -> float:
        rows = self.rows(seq_len)
        return float(rows.lengths.sum()) / (len(rows) * seq_len)

    def describe(self, seq_len: int) -> Iterator[str]:
        rows = self.rows(seq_len)
        opening = rows.opens[rows.starts[:-1]].mean()
        yield (
            f"data: {self.split}: {self.num_documents:,} documents in {len(rows):,} rows of "
            f"{seq_len} tokens, {self.label_share(seq_len):.1%} filled; {opening:.1%} of the rows "
            "begin with a document, the others begin inside a document that is longer than a row"
        )

    def identity(self) -> dict[str, Any]:
        return {"row_alignment": "document"}

    def _num_predicted(self, *, document_masking: bool, first_id: int | None = None) -> int:
        sizes = np.diff(self._offsets) - (not self.eos_separates)
        return int(np.maximum(sizes, 0).sum())


# Open splits of any kind


def open_split(
    folder: str | Path, split: str, *, verify: bool = True, long: LongPolicy = "refuse"
) -> TokenDataset:
    """Open a split of a prepared folder with text, conversations or preference pairs.

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


def _left_out(folder: Path, documents: Mapping[str, Any]) -> Iterator[str]:
    """Yield one message for each reason why records were rejected. Each message lists the affected
    files and shows the first rejected record.

    Args:
        folder: the prepared folder.
        documents: the `documents` entry of the folder's manifest.
    """
    files: dict[str, Counter[str]] = {}
    first: dict[str, str] = {}
    path = folder / REJECTED_NAME
    if path.is_file():
        with open(path, encoding="utf-8") as lines:
            for entry in map(json.loads, lines):
                reason = entry["reason"]
                files.setdefault(reason, Counter())[entry["file"]] += 1
                first.setdefault(reason, f"{entry['file']}:{entry['line']}: {entry['detail']}")
    advice = dict.fromkeys(LOST, " (on_bad keep trains on the rest of such records)")
    advice["held_out"] = ""
    for reason, count in documents["rejected"].items():
        of_files = files.get(reason, Counter())
        shown = ", ".join(f"{n:,} of {file}" for file, n in of_files.most_common(_SHOWN_FILES))
        more = ", ..." if len(of_files) > _SHOWN_FILES else ""
        yield (
            f"{count:,} of {documents['read']:,} records rejected: {REASONS[reason]}"
            + (f" ({shown}{more})" if len(of_files) > 1 else "")
            + (f"; first: {first[reason]}" if reason in first else "")
            + f"; listed in {path}"
            + advice.get(reason, " (on_bad refuse stops at the first one)")
        )


def chat_notes(folder: Path, manifest: Mapping[str, Any]) -> Iterator[str]:
    """Yield messages about the conversations in a prepared folder, based on its manifest."""
    chat = manifest["chat"]
    yield from _left_out(folder, manifest["documents"])
    if count := chat["torn_answers"]:
        yield (
            f"{count:,} answers begin in the middle of a token that begins in the prompt; that "
            "token is not trained on"
        )
    of_all = f"of {manifest['documents']['written']:,} records"
    if count := chat.get("duplicates"):
        yield f"{count:,} {of_all} are duplicates of earlier records: every copy is trained on"
    if count := chat.get("control_tokens"):
        yield (
            f"warning: {count:,} {of_all} contain control tokens such as <|im_start|> inside "
            "messages, where they are treated as plain text"
        )
    for reason, lost in chat.get("lost", {}).items():
        yield f"{lost['records']:,} {of_all} with {REASONS[reason]}; first: {lost['first']}"
    if fields := chat.get("unused_fields"):
        shown = [f"{name} ({counted(n, 'record')})" for name, n in fields.items()]
        more = ", ..." if len(shown) > _SHOWN_FIELDS else ""
        yield f"fields not used for training: {', '.join(shown[:_SHOWN_FIELDS])}{more}"
    if chat.get("warning"):
        yield f"warning: {chat['warning']}"


def kind_of(manifest: Mapping[str, Any]) -> Kind:
    """Return the kind of data in a prepared folder, given the folder's manifest."""
    if manifest["version"] != LABELLED_VERSION:
        return "text"
    return "preference" if manifest.get("pairs") is True else "chat"


def preference_splits(splits: Iterable[Corpus | None]) -> list[PreferenceDataset]:
    """Return the splits that contain preference pairs. A training run must set `references` on each
    of them.
    """
    return [split for split in splits if isinstance(split, PreferenceDataset)]


def open_training_split(
    folder: str | Path, *, verify: bool, long: LongPolicy, row_alignment: RowAlignment
) -> TokenDataset:
    """Open the training split of a prepared folder; `row_alignment` applies only to text.

    Raises:
        DataError: see `TokenDataset`.
    """
    manifest = read_manifest(Path(folder).expanduser())
    if row_alignment == "document" and kind_of(manifest) == "text":
        return AlignedDataset(folder, "train", verify=verify)
    return open_split(folder, "train", verify=verify, long=long)

"""Rows of text that begin with documents: `data.row_alignment: document`.

Each document is cut into pieces of at most one row, and whole pieces are packed into rows by
`pack_best_fit` (Ding et al. 2024, arXiv 2404.10830). So only documents longer than a row are cut,
and every token is predicted once an epoch, as in a stream. The rest of a row is padding without
labels. A row begins with the beginning of a document, unless all its pieces are later pieces of
long documents.

The rows are a pure function of the documents' lengths and the row's length, and are shuffled like
all rows of text, so the loader's state is still one number.

The first input of a document depends on the tokens around its text:

    bos text eos     the bos; a document of n tokens takes n - 1 positions
    text eos         an eos, from which the first token is predicted, as in a stream; a document of
                     n tokens takes n positions
    text             the first token, which is not predicted; n - 1 positions
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from firstlight.data.corpus import DocumentIds, RowIds, TokenDataset
from firstlight.data.examples import LongPolicy, kind_of, open_split, pack_best_fit
from firstlight.data.loader import RowAlignment
from firstlight.data.shards import read_manifest
from firstlight.errors import DataError

#: Number of pieces that are packed at a time. A block takes a fraction of a second, and larger
#: blocks would not fill the rows better.
_BLOCK = 1 << 16


@dataclass(frozen=True)
class AlignedRows:
    """The rows of a split: its pieces, row by row.

    Attributes:
        labels: position in the stream of each piece's first label, int64 [pieces].
        lengths: number of positions of each piece, int64 [pieces].
        opens: True for a piece that begins a document, bool [pieces].
        starts: index of each row's first piece, then the number of pieces, int64 [rows + 1].
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
    """Cut documents into pieces, and pack the pieces into rows.

    Args:
        offsets: position in the stream of each document's first token, then the number of tokens,
            int64 [documents + 1].
        seq_len: positions of a row.
        predicts_first: the first token of a document is a label, too.
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
    # Within a row, pieces that begin a document come before later pieces of other documents, so
    # that the row begins with a document if it can.
    order = np.lexsort((np.arange(len(rows)), number > 0, rows))
    starts = np.concatenate([[0], np.cumsum(np.bincount(rows))]).astype(np.int64)
    return AlignedRows(labels[order], lengths[order], number[order] == 0, starts)


def _pack(lengths: npt.NDArray[np.int64], seq_len: int) -> npt.NDArray[np.int64]:
    """The row of each piece, int64 [pieces], from the pieces' lengths, int64 [pieces]."""
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
    """One split of prepared text in rows that begin with documents.

    Args:
        folder, split, verify: see `TokenDataset`.

    Raises:
        DataError: see `TokenDataset`.
    """

    def __init__(self, folder: str | Path, split: str, *, verify: bool = True) -> None:
        super().__init__(folder, split, verify=verify)
        self._rows: dict[int, AlignedRows] = {}

    def rows(self, seq_len: int) -> AlignedRows:
        """The rows of `seq_len` positions."""
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
                # No token is read, because there is none before the first document of the stream.
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
            f"{seq_len}, {self.label_share(seq_len):.1%} filled; {opening:.1%} of the rows begin "
            "with a document, the others inside of one that is longer than a row"
        )

    def identity(self) -> dict[str, Any]:
        return {"row_alignment": "document"}

    def _num_predicted(self, *, document_masking: bool, first_id: int | None = None) -> int:
        sizes = np.diff(self._offsets) - (not self.eos_separates)
        return int(np.maximum(sizes, 0).sum())


def open_training_split(
    folder: str | Path, *, verify: bool, long: LongPolicy, row_alignment: RowAlignment
) -> TokenDataset:
    """The training split of a prepared folder; `row_alignment` applies to text only.

    Raises:
        DataError: see `TokenDataset`.
    """
    manifest = read_manifest(Path(folder).expanduser())
    if row_alignment == "document" and kind_of(manifest) == "text":
        return AlignedDataset(folder, "train", verify=verify)
    return open_split(folder, "train", verify=verify, long=long)

"""Batches for training, in an order that is a pure function of the seed and a position.

The loader's whole state is one number, how many rows have been handed out to all ranks
together: that makes resuming exact at any step of any epoch, on any number of ranks, and free.

Threads, not processes, read ahead: numpy copies, searches and waits for the disk without
holding the interpreter, and nothing has to be sent from one process to another.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from firstlight.data.corpus import Corpus, TokenDataset

IGNORE_INDEX = -100


@dataclass(frozen=True)
class Batch:
    """Rows of tokens: B rows of T positions.

    Attributes:
        input_ids: int64 [B, T].
        labels: int64 [B, T]; `labels[b, t]` is the token after `input_ids[b, t]`, or -100.
        num_valid: number of labels that are not -100.
        document_ids: int32 [B, T]: the number of each input token's document, counted from 0
            within its row; None without document masking.
        references: log-probability before training of each document's answer, fp64 [B, D], for
            preference pairs: 0 if it is not known, NaN without such a document. Documents 2 i and
            2 i + 1 are a pair.
    """

    input_ids: Tensor
    labels: Tensor
    num_valid: int
    document_ids: Tensor | None = None
    references: Tensor | None = None

    @property
    def num_terms(self) -> int:
        """The number of terms of the loss: valid labels, or pairs."""
        if self.references is None:
            return self.num_valid
        return int(self.references.isfinite().sum()) // 2

    @property
    def inputs(self) -> tuple[Any, ...]:
        """The arguments of a loss function."""
        further = () if self.references is None else (self.references,)
        return self.input_ids, self.labels, self.document_ids, *further

    def to(self, device: torch.device) -> Batch:
        """The batch on `device`; asynchronously from pinned memory to a GPU."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def uncounted(self) -> Batch:
        """The same tokens without labels and pairs."""
        references = self.references
        return replace(
            self,
            labels=torch.full_like(self.labels, IGNORE_INDEX),
            num_valid=0,
            references=None if references is None else torch.full_like(references, math.nan),
        )

    def split(self, rows: int) -> list[Batch]:
        """The batch as micro-batches of `rows` rows, in their order; B is a multiple of `rows`."""
        count = len(self.input_ids)
        assert count % rows == 0
        return [self] if count == rows else [self._part(i, rows) for i in range(0, count, rows)]

    def _part(self, first: int, rows: int) -> Batch:
        part = self._map(lambda tensor: tensor[first : first + rows])
        return replace(part, num_valid=int((part.labels != IGNORE_INDEX).sum()))

    def pin_memory(self) -> Batch:
        """The batch in page-locked memory."""
        return self._map(Tensor.pin_memory)

    def _map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        return Batch(
            change(self.input_ids),
            change(self.labels),
            self.num_valid,
            None if self.document_ids is None else change(self.document_ids),
            None if self.references is None else change(self.references),
        )


def rows_to_batch(
    dataset: TokenDataset,
    rows: list[int],
    seq_len: int,
    fill_id: int,
    *,
    document_masking: bool = False,
) -> Batch:
    """The given rows of a split as one batch.

    A short row is filled up with `fill_id` and labels of -100, as a document of its own. Rows of
    examples need document masking.

    Args:
        dataset: the split.
        rows: numbers of the rows.
        seq_len: predictions a row.
        fill_id: any token.
        document_masking: number the documents, and predict tokens from their own document
            only (see `packing`).
    """
    places = [(dataset, row) for row in rows]
    return _batch_of(places, seq_len, fill_id, document_masking=document_masking)


def _batch_of(
    rows: list[tuple[TokenDataset, int]], seq_len: int, fill_id: int, *, document_masking: bool
) -> Batch:
    """See `rows_to_batch`; each row may be of another split."""
    document_ids = np.empty((len(rows), seq_len), dtype=np.int32) if document_masking else None
    input_ids = np.full((len(rows), seq_len), fill_id, dtype=np.int64)
    labels = np.full((len(rows), seq_len), IGNORE_INDEX, dtype=np.int64)
    # All rows are of one split where there are pairs.
    references = rows[0][0].references_of([row for _, row in rows], seq_len)
    for i, (dataset, row) in enumerate(rows):
        documents = None if document_ids is None else document_ids[i]
        dataset.fill_row(row, input_ids[i], labels[i], documents)
    return Batch(
        torch.from_numpy(input_ids),
        torch.from_numpy(labels),
        int((labels != IGNORE_INDEX).sum()),
        None if document_ids is None else torch.from_numpy(document_ids),
        None if references is None else torch.from_numpy(references),
    )


class TokenLoader:
    """Endless shuffled batches over the rows of a split, or of a mix of several; each epoch in
    another order.

    A batch may begin in one epoch and end in the next. The following batches are read by
    threads while the current one is computed on; which batches come does not depend on how
    many of either there are. With several ranks, the batches of all of them, in the order of
    the ranks, are the next `micro_batch_size` x `world_size` rows of the one order.

    Args:
        dataset: the split, or a mix.
        seq_len: predictions a row.
        micro_batch_size: rows a batch.
        seed: decides the order.
        rows_seen: position to start from, of a `state_dict()` of any rank.
        document_masking: number the documents, and predict tokens from their own only.
        rank, world_size: this rank's part of each global batch, and the number of parts.
        workers: threads that read ahead; more than one helps where the disk is slow; 0 reads
            in the calling thread, when a batch is asked for.
        prefetch: batches that are read ahead.
        pin_memory: hand out page-locked tensors, for asynchronous copies to a GPU.

    Raises:
        DataError: the split, or one of the mix, is shorter than one row, or has examples that
            don't fit into one.
    """

    def __init__(
        self,
        dataset: Corpus,
        seq_len: int,
        micro_batch_size: int,
        seed: int,
        *,
        rows_seen: int = 0,
        document_masking: bool = False,
        rank: int = 0,
        world_size: int = 1,
        workers: int = 1,
        prefetch: int = 2,
        pin_memory: bool = False,
    ) -> None:
        assert 0 <= rank < world_size
        assert rows_seen >= 0
        assert workers >= 0
        assert prefetch > 0
        dataset.require_row(seq_len)
        self.dataset, self.seq_len, self.seed = dataset, seq_len, seed
        self.micro_batch_size, self.document_masking = micro_batch_size, document_masking
        self.rank, self.global_rows = rank, micro_batch_size * world_size
        self.prefetch, self.pin_memory = prefetch, pin_memory
        self.rows_per_epoch = dataset.num_rows(seq_len)
        self.rows_seen = rows_seen
        self._readers = ThreadPoolExecutor(workers, "loader") if workers else None
        self._ahead: deque[Future[Batch]] = deque()
        self._read_ahead()

    def __enter__(self) -> TokenLoader:
        return self

    def __exit__(self, *_: object) -> None:
        if self._readers is not None:
            self._readers.shutdown(cancel_futures=True)

    def next_batch(self) -> Batch:
        """This rank's `micro_batch_size` rows of the next global batch.

        An error of a reading thread is raised here, and again by every later call.
        """
        if self._readers is None:
            batch = self._read(self.rows_seen)
        else:
            batch = self._ahead[0].result()
            self._ahead.popleft()
        self.rows_seen += self.global_rows
        self._read_ahead()
        return batch

    def state_dict(self) -> dict[str, int]:
        """The loader's position, the same on every rank; batches that were read ahead but not
        handed out do not count."""
        return {"rows_seen": self.rows_seen}

    def _read_ahead(self) -> None:
        while self._readers is not None and len(self._ahead) < self.prefetch:
            first = self.rows_seen + len(self._ahead) * self.global_rows
            self._ahead.append(self._readers.submit(self._read, first))

    def _read(self, global_first: int) -> Batch:
        """This rank's part of the global batch that begins with the row of this count."""
        first = global_first + self.rank * self.micro_batch_size
        rows = [
            self.dataset.row_at(count, self.seq_len, self.seed)
            for count in range(first, first + self.micro_batch_size)
        ]
        batch = _batch_of(rows, self.seq_len, 0, document_masking=self.document_masking)
        return batch.pin_memory() if self.pin_memory else batch

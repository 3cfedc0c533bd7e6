"""Batches for training, in an order that is a pure function of the seed and a position.

The loader's whole state is one number, how many rows have been handed out: that makes
resuming exact at any step of any epoch, and free.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from firstlight.data.packing import num_rows, row_span, shuffled_index
from firstlight.data.shards import TokenDataset
from firstlight.errors import DataError

IGNORE_INDEX = -100


@dataclass(frozen=True)
class Batch:
    """Rows of tokens.

    Attributes:
        input_ids: int64 [B, T].
        labels: int64 [B, T]; `labels[b, t]` is the token after `input_ids[b, t]`, or -100.
        num_valid: how many labels are not -100.
    """

    input_ids: Tensor
    labels: Tensor
    num_valid: int

    def to(self, device: torch.device) -> Batch:
        """The batch on `device`; asynchronously from pinned memory to a GPU."""
        return Batch(
            self.input_ids.to(device, non_blocking=True),
            self.labels.to(device, non_blocking=True),
            self.num_valid,
        )


def rows_to_batch(dataset: TokenDataset, rows: list[int], seq_len: int, fill_id: int) -> Batch:
    """The given rows as one batch. A short last row is filled up with `fill_id`, its labels
    with -100."""
    input_ids = np.full((len(rows), seq_len), fill_id, dtype=np.int64)
    labels = np.full((len(rows), seq_len), IGNORE_INDEX, dtype=np.int64)
    for i, row in enumerate(rows):
        tokens = dataset[row_span(row, seq_len)]
        input_ids[i, : len(tokens) - 1] = tokens[:-1]
        labels[i, : len(tokens) - 1] = tokens[1:]
    num_valid = int((labels != IGNORE_INDEX).sum())
    return Batch(torch.from_numpy(input_ids), torch.from_numpy(labels), num_valid)


class TokenLoader:
    """Endless shuffled batches over the rows of a split; each epoch in another order.

    A batch may begin in one epoch and end in the next. The following batch is read by a
    thread while the current one is computed on.

    Args:
        dataset: the split.
        seq_len: predictions a row.
        micro_batch_size: rows a batch.
        seed: decides the order.
        rows_seen: position to start from, of a `state_dict()`.
        pin_memory: hand out page-locked tensors, for asynchronous copies to a GPU.

    Raises:
        DataError: the split is shorter than one row.
    """

    def __init__(
        self,
        dataset: TokenDataset,
        seq_len: int,
        micro_batch_size: int,
        seed: int,
        *,
        rows_seen: int = 0,
        pin_memory: bool = False,
    ) -> None:
        require_row(dataset, seq_len)
        self.dataset, self.seq_len, self.seed = dataset, seq_len, seed
        self.micro_batch_size, self.pin_memory = micro_batch_size, pin_memory
        self.rows_per_epoch = num_rows(dataset.num_tokens, seq_len)
        self.rows_seen = rows_seen
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="loader")
        self._next: Future[Batch] = self._reader.submit(self._read, rows_seen)

    def __enter__(self) -> TokenLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.shutdown(cancel_futures=True)

    def next_batch(self) -> Batch:
        """The next `micro_batch_size` rows."""
        batch = self._next.result()
        self.rows_seen += self.micro_batch_size
        self._next = self._reader.submit(self._read, self.rows_seen)
        return batch

    def state_dict(self) -> dict[str, int]:
        """Where the loader stands; what was read ahead but not handed out does not count."""
        return {"rows_seen": self.rows_seen}

    def _read(self, first: int) -> Batch:
        rows = []
        for count in range(first, first + self.micro_batch_size):
            epoch, position = divmod(count, self.rows_per_epoch)
            rows.append(shuffled_index(position, self.rows_per_epoch, self.seed, epoch))
        batch = rows_to_batch(self.dataset, rows, self.seq_len, fill_id=0)
        if self.pin_memory:
            batch = Batch(batch.input_ids.pin_memory(), batch.labels.pin_memory(), batch.num_valid)
        return batch


def require_row(dataset: TokenDataset, seq_len: int) -> None:
    """Refuse a split that is shorter than one row.

    Raises:
        DataError: it has fewer than `seq_len` + 1 tokens.
    """
    if dataset.num_tokens < seq_len + 1:
        raise DataError(
            f"the '{dataset.split}' split of {dataset.folder} has {dataset.num_tokens} tokens, "
            f"fewer than one row of data.seq_len {seq_len} needs ({seq_len + 1}): "
            "lower data.seq_len or prepare more text"
        )

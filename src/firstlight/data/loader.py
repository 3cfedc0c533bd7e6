"""Define the `data` section of a recipe, and load training batches.

The order of the rows is a pure function of the seed, so the state of the loader is a single number:
the total number of rows read by all ranks. A run can therefore resume exactly and without delay at
any step of any epoch, with any number of ranks.

Batches are read ahead by threads instead of processes. Threads can work in parallel here, because
disk reads and numpy's copies and searches release Python's global interpreter lock, and they do not
need to send batches between processes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from firstlight.data.conversations import PAIRS_ARE_SELF_DESCRIBING, ChatForm
from firstlight.data.corpus import Corpus, TokenDataset, whole_weights
from firstlight.data.packing import LongPolicy, RowAlignment
from firstlight.hardware.device import single_threaded_pool
from firstlight.section import Section

#: Label of a position that does not contribute to the loss; the default `ignore_index` of PyTorch's
#: cross entropy.
IGNORE_INDEX = -100


@dataclass(frozen=True)
class Batch:
    """A batch of B rows with T positions each.

    Attributes:
        input_ids: token ids, int64 [B, T].
        labels: int64 [B, T]; `labels[b, t]` is the token that follows `input_ids[b, t]`, or -100 to
            exclude the position from the loss.
        num_valid: number of labels that are not -100.
        document_ids: zero-based document number of each input token within its row, int32 [B, T];
            None without document masking.
        references: for preference pairs, the log-probability of each document's answer under the
            reference model, which is the model before training. The shape is fp64 [B, D], where D
            is the maximum number of documents in a row. Documents 2 i and 2 i + 1 form a pair. A
            value of 0 means that the log-probability is unknown, and NaN means that the row has
            fewer documents. For other data, `references` is None.
    """

    input_ids: Tensor
    labels: Tensor
    num_valid: int
    document_ids: Tensor | None = None
    references: Tensor | None = None

    @property
    def num_terms(self) -> int:
        """Number of terms in the loss. For preference data, this is the number of pairs. Otherwise,
        it is the number of valid labels.
        """
        if self.references is None:
            return self.num_valid
        return int(self.references.isfinite().sum()) // 2

    @property
    def inputs(self) -> tuple[Any, ...]:
        """Arguments of a loss function: input_ids, labels, document_ids and, for preference pairs,
        references.
        """
        further = () if self.references is None else (self.references,)
        return self.input_ids, self.labels, self.document_ids, *further

    def to(self, device: torch.device) -> Batch:
        """Return a copy on `device`. Copying from pinned memory to a GPU is asynchronous."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def uncounted(self) -> Batch:
        """Return a copy of the batch that does not contribute to the loss. The copy contains the
        same tokens, but no labels or pairs.
        """
        references = self.references
        return replace(
            self,
            labels=torch.full_like(self.labels, IGNORE_INDEX),
            num_valid=0,
            references=None if references is None else torch.full_like(references, math.nan),
        )

    def split(self, rows: int) -> list[Batch]:
        """Split the batch into micro-batches of `rows` rows, in order; B must be a multiple of
        `rows`."""
        count = len(self.input_ids)
        assert count % rows == 0
        return [self] if count == rows else [self._part(i, rows) for i in range(0, count, rows)]

    def _part(self, first: int, rows: int) -> Batch:
        part = self._map(lambda tensor: tensor[first : first + rows])
        return replace(part, num_valid=int((part.labels != IGNORE_INDEX).sum()))

    def pin_memory(self) -> Batch:
        """Return a copy of the batch in page-locked memory."""
        return self._map(Tensor.pin_memory)

    def _map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        return Batch(
            change(self.input_ids),
            change(self.labels),
            self.num_valid,
            None if self.document_ids is None else change(self.document_ids),
            references=None if self.references is None else change(self.references),
        )


def rows_to_batch(
    dataset: TokenDataset,
    rows: list[int],
    seq_len: int,
    fill_id: int,
    *,
    document_masking: bool = False,
) -> Batch:
    """Combine rows of a split into one batch.

    A short row is padded with `fill_id`, and the padding has labels of -100 and its own document
    number. Rows of conversations require document masking.

    Args:
        dataset: the split.
        rows: indices of the rows.
        seq_len: number of positions per row.
        fill_id: token id for padding, which can be any id in the vocabulary.
        document_masking: True to number the documents and predict each token only from tokens of
            the same document (see `corpus`).
    """
    places = [(dataset, row) for row in rows]
    return _batch_of(places, seq_len, fill_id, document_masking=document_masking)


def _batch_of(
    rows: list[tuple[TokenDataset, int]], seq_len: int, fill_id: int, *, document_masking: bool
) -> Batch:
    """Combine rows into one batch, like `rows_to_batch`. Each row is specified as (split, row
    index), so the rows can come from different corpora.
    """
    document_ids = np.empty((len(rows), seq_len), dtype=np.int32) if document_masking else None
    input_ids = np.full((len(rows), seq_len), fill_id, dtype=np.int64)
    labels = np.full((len(rows), seq_len), IGNORE_INDEX, dtype=np.int64)
    # Read the references of all rows from the first split, because corpora of preference pairs are
    # never mixed.
    references = rows[0][0].references_of([row for _, row in rows], seq_len)
    for i, (dataset, row) in enumerate(rows):
        documents = None if document_ids is None else document_ids[i]
        dataset.fill_row(row, input_ids[i], labels[i], documents)
    return Batch(
        torch.from_numpy(input_ids),
        torch.from_numpy(labels),
        int((labels != IGNORE_INDEX).sum()),
        None if document_ids is None else torch.from_numpy(document_ids),
        references=None if references is None else torch.from_numpy(references),
    )


class TokenLoader:
    """Infinite iterator over shuffled batches of rows from a split or a mix of corpora. The order
    of the rows differs in each epoch.

    A batch may begin in one epoch and end in the next. Threads read the next batches while the
    current one is processed. The number of threads and the number of prefetched batches do not
    affect the content of the batches. With several ranks, the next `micro_batch_size` x
    `world_size` rows form a global batch, and each rank gets consecutive rows of the global batch,
    in rank order. The loader is a context manager that stops the threads on exit.

    Args:
        dataset: the split, or a mix of corpora.
        seq_len: number of positions per row.
        micro_batch_size: number of rows per batch.
        seed: random seed for the row order.
        rows_seen: total number of rows that all ranks have already read, as in the `state_dict()`
            of any rank.
        document_masking: True to number the documents and predict each token only from tokens of
            the same document.
        rank: rank of this process, which selects its part of each global batch.
        world_size: number of ranks, which is the number of parts of a global batch.
        workers: number of threads that read batches ahead. More than one thread helps if the disk
            is slow. With 0, each batch is read on request by the calling thread.
        prefetch: number of batches to read ahead.
        pin_memory: True to return page-locked tensors, for asynchronous copies to a GPU.

    Raises:
        DataError: a split is shorter than one row, or contains examples that don't fit into a row.
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
        self.dataset = dataset
        self.seq_len = seq_len
        self.seed = seed
        self.micro_batch_size, self.document_masking = micro_batch_size, document_masking
        self.rank, self.global_rows = rank, micro_batch_size * world_size
        self.prefetch, self.pin_memory = prefetch, pin_memory
        self.rows_per_epoch = dataset.num_rows(seq_len)
        self.rows_seen = rows_seen
        self._readers = single_threaded_pool(workers, "loader") if workers else None
        self._ahead: deque[Future[Batch]] = deque()
        self._read_ahead()

    def __enter__(self) -> TokenLoader:
        return self

    def __exit__(self, *_: object) -> None:
        if self._readers is not None:
            self._readers.shutdown(cancel_futures=True)

    def next_batch(self) -> Batch:
        """Return this rank's `micro_batch_size` rows of the next global batch.

        An error in a reading thread is raised by this call and by every later call.
        """
        if self._readers is None:
            batch = self._read(self.rows_seen)
        else:
            batch = self._ahead[0].result()
            self._ahead.popleft()
        self.rows_seen += self.global_rows
        self._read_ahead()
        return batch

    def read_again(self, rows_seen: int) -> None:
        """Continue at row `rows_seen`, and discard the batches that were read ahead. Call this
        after the order of the following rows has changed.
        """
        for batch in self._ahead:
            batch.cancel()
        self._ahead.clear()
        self.rows_seen = rows_seen
        self._read_ahead()

    def state_dict(self) -> dict[str, int]:
        """Return {"rows_seen": total number of rows read by all ranks}, which is the same on every
        rank. Batches that were prefetched but not returned are not counted.
        """
        return {"rows_seen": self.rows_seen}

    def _read_ahead(self) -> None:
        while self._readers is not None and len(self._ahead) < self.prefetch:
            first = self.rows_seen + len(self._ahead) * self.global_rows
            self._ahead.append(self._readers.submit(self._read, first))

    def _read(self, global_first: int) -> Batch:
        """Read this rank's part of the global batch that begins at position `global_first`."""
        first = global_first + self.rank * self.micro_batch_size
        rows = [
            self.dataset.row_at(count, self.seq_len, self.seed)
            for count in range(first, first + self.micro_batch_size)
        ]
        batch = _batch_of(rows, self.seq_len, 0, document_masking=self.document_masking)
        return batch.pin_memory() if self.pin_memory else batch


class MixedCorpus(Section):
    """One corpus in `data.mix`."""

    dir: str = Field(min_length=1)
    """folder written by `firstlight prepare`, or its URL."""
    weight: float = Field(gt=0)
    """sampling weight: rows are drawn from each corpus in proportion to its weight."""
    name: str | None = Field(None, pattern=r"^[\w.-]+$")
    """name used in the metrics val/loss/NAME and epoch/NAME; null uses the last part of `dir`."""

    @property
    def label(self) -> str:
        """Name of the corpus; defaults to the last part of `dir`."""
        return self.name or self.dir.rstrip("/").rpartition("/")[2] or self.dir


class DataConfig(Section):
    """The `data` section. Exactly one of `dir`, `mix` and `files` must be set."""

    kind: Literal["text", "chat", "preference"] | None = None
    """kind of data: text for plain text, chat for conversations, preference for pairs of answers;
    null uses the kind of `dir`."""
    dir: str | None = Field(min_length=1)
    """folder written by `firstlight prepare`, or the URL of such a folder (s3://, gs://,
    hf://datasets/..., https://), which is downloaded into a cache.
    """
    mix: list[MixedCorpus] | None = Field(None, min_length=1)
    """several prepared folders with the same tokenizer: a list of {dir, weight, name}. Each corpus
    contributes rows in exact proportion to its weight, in its own shuffled order, and is repeated
    as often as needed. An epoch has as many rows as all corpora together. val/loss is the mean of
    the corpora's losses, weighted by `weight`; the loss of each corpus is also a metric."""
    keep: str | None = Field(None, min_length=1)
    """prepared folder of text that the model should not forget. Its validation split is evaluated
    together with that of the new data (kept/bits_per_byte), and the checkpoint with the lowest sum
    of the bits per byte of both is the best one."""
    replay: float | None = Field(None, ge=0, lt=1)
    """fraction of the training rows that are taken from the text in `keep`; null chooses 0, 0.05,
    0.1 or 0.25 after a tenth of the run, and means 0 for preference pairs and without `keep`."""
    files: list[str] | None = Field(None, min_length=1)
    """conversations or, with kind preference, preference pairs: .jsonl, .json and .parquet files,
    folders, globs, hf:NAME[:CONFIG[:SPLIT]]. They are prepared when the run starts, and kept in the
    cache.
    """
    val_files: list[str] | None = Field(None, min_length=1)
    """files of conversations for validation; null holds out `val_fraction` of `files`."""
    val_fraction: float = Field(0.1, ge=0, lt=1)
    """fraction of the examples in `files` to hold out for validation; 0 disables validation."""
    format: ChatForm = "auto"
    """format of the records of `files`: alpaca, messages or sharegpt; auto detects the format of
    each record from its keys."""
    template: str | None = Field(None, min_length=1)
    """the chat template of `files`: chatml, hermes (ChatML with tools), llama2, llama3, alpaca or a
    .jinja file; null uses the tokenizer's template. It is saved with the model."""
    tokenizer: str | None = Field(None, min_length=1)
    """tokenizer for `files`, a folder or file; null uses the tokenizer of --init-from."""
    train_on: Literal["assistant", "last", "answers", "all"] = "assistant"
    """tokens of `files` to train on: assistant for everything the assistant writes (answers, tool
    calls, reasoning) and the end-of-turn tokens; last for the assistant's last message only;
    answers for the same tokens as assistant except the reasoning; all for all tokens.
    """
    on_bad: Literal["refuse", "skip", "keep"] = "refuse"
    """handling of a record in `files` that is not a conversation, or contains text that the chat
    template omits: refuse to start, skip the record, or keep the part that the template renders.
    """
    long: LongPolicy = "refuse"
    """handling of conversations longer than a row: refuse to start, drop them, or cut off their
    ends.
    """
    seq_len: int | None = Field(None, gt=0)
    """number of tokens per training row; null uses the model's max_position_embeddings."""
    verify: bool = True
    """true verifies the shards against the sha256 in their manifest before the first step."""
    document_masking: bool = False
    """true limits attention to documents: a token attends only to its own document, and positions
    start at 0 in each document. Always true for conversations.
    """
    row_alignment: RowAlignment = "stream"
    """method of dividing text into training rows: "stream" concatenates all documents and splits
    the result into rows, which may begin inside a document; "document" packs whole documents into
    rows, starts rows at document boundaries, and splits only documents longer than a row.
    Conversations are always packed. Validation text always uses "stream".
    """
    workers: int = Field(1, ge=0, le=64)
    """number of threads that read rows ahead, which does not affect the order of the rows. With 0,
    rows are read when a step needs them.
    """
    prefetch: int = Field(2, ge=1, le=1024)
    """number of micro-batches to read ahead. At least the micro-batches of one step are always
    read ahead."""
    pin_memory: bool | None = None
    """true keeps batches in page-locked memory, so that copies to a GPU overlap with computation;
    null means true with a CUDA GPU.
    """

    @model_validator(mode="before")
    @classmethod
    def _without_dir(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        # A single file may be specified without a list.
        values = {
            name: [value] if name in ("files", "val_files") and isinstance(value, str) else value
            for name, value in values.items()
        }
        if values.get("kind") in ("chat", "preference"):
            values = {"document_masking": True, **values}
        # `dir` is required unless `mix` or `files` is set.
        if values.get("mix") is not None or values.get("files") is not None:
            return {"dir": None, **values}
        return values

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if sum(place is not None for place in (self.dir, self.mix, self.files)) != 1:
            raise ValueError(
                "set exactly one of dir (a prepared folder), mix (several folders with weights) "
                "and files (conversations, with kind chat)"
            )
        if self.files is not None and self.kind not in ("chat", "preference"):
            raise ValueError(
                "files must contain conversations: set kind to chat, or to preference for pairs "
                "(prepare text with `firstlight prepare`)"
            )
        if self.kind == "preference":
            self._require_for_pairs()
        if self.kind in ("chat", "preference") and not self.document_masking:
            raise ValueError(NO_MASKING)
        given = [name for name in _OF_FILES if name in self.model_fields_set]
        changed = [n for n in given if getattr(self, n) != type(self).model_fields[n].default]
        if self.files is None and changed:
            raise ValueError(
                "keys that apply only to files, not to prepared folders, must be omitted: "
                f"{', '.join(changed)}"
            )
        if self.keep is None and self.replay:
            raise ValueError("replay needs keep, the folder of the kept text: set both or neither")
        if self.keep is not None and self.mix is not None:
            raise ValueError("keep supports a single corpus: use dir or files instead of mix")
        if self.val_files is not None and "val_fraction" in changed and self.val_fraction:
            raise ValueError(
                "val_files and val_fraction are mutually exclusive: set only one of them"
            )
        if self.mix is not None:
            whole_weights([corpus.weight for corpus in self.mix])
        labels = [corpus.label for corpus in self.mix or ()]
        twice = next((label for label in labels if labels.count(label) > 1), None)
        if twice is not None:
            raise ValueError(
                f"two corpora in mix are called '{twice}': set a different name for each"
            )
        return self

    def _require_for_pairs(self) -> None:
        if self.mix is not None:
            raise ValueError("preference pairs can't be mixed: use dir or files")
        if self.replay:
            raise ValueError("replay does not support preference pairs: omit it, or set it to 0")
        if self.long == "cut":
            raise ValueError("long cut does not support preference pairs: set it to refuse or drop")
        if self.train_on != "assistant" or self.format != "auto":
            raise ValueError(PAIRS_ARE_SELF_DESCRIBING)


#: Keys of the `data` section that apply only to `files`.
_OF_FILES = ("val_files", "val_fraction", "format", "template", "tokenizer", "train_on", "on_bad")
NO_MASKING = (
    "document_masking can't be disabled for conversations, because examples never attend to "
    "each other"
)

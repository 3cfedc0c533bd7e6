"""A global batch cut into micro-batches that fit into memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch

from firstlight.data.loader import IGNORE_INDEX, Batch
from firstlight.training.fit import cuts


def recut(batches: Iterable[Batch], rows: int) -> list[Batch]:
    """The same rows in the same order, as micro-batches of `rows` rows.

    Args:
        batches: each of a multiple of `rows` rows.
        rows: of each micro-batch.
    """
    return [part for batch in batches for part in _parts(batch, rows)]


def fewer_rows(rows: int) -> int:
    """The next smaller micro-batch that cuts one of `rows` rows evenly, at most half as large;
    0 if there is none."""
    return next(itertools.islice(cuts(rows), 1, None), 0)


def _parts(batch: Batch, rows: int) -> list[Batch]:
    count = len(batch.input_ids)
    assert count % rows == 0
    if count == rows:
        return [batch]
    labels = torch.split(batch.labels, rows)
    documents: list[torch.Tensor | None] = [None] * len(labels)
    if batch.document_ids is not None:
        documents = [*torch.split(batch.document_ids, rows)]
    references: list[torch.Tensor | None] = [None] * len(labels)
    if batch.references is not None:
        references = [*torch.split(batch.references, rows)]
    return [
        Batch(ids, part, int((part != IGNORE_INDEX).sum()), own, known)
        for ids, part, own, known in zip(
            torch.split(batch.input_ids, rows), labels, documents, references, strict=True
        )
    ]

"""Rows that begin with documents (`data.row_alignment: document`)."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import firstlight
from firstlight.data.corpus import TokenDataset
from firstlight.data.loader import TokenLoader, rows_to_batch
from firstlight.data.packing import AlignedDataset, align_rows, open_training_split
from firstlight.data.shards import ShardWriter
from firstlight.errors import CheckpointError
from firstlight.files.atomic import write_json

_EOS, _BOS = 1, 2


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=60),
    st.integers(1, 12),
    st.booleans(),
)
def test_aligned_rows_predict_every_token_once_and_start_with_documents(
    sizes: list[int], seq_len: int, predicts_first: bool
) -> None:
    offsets = np.cumsum([0, *sizes])
    rows = align_rows(offsets, seq_len, predicts_first=predicts_first)
    predicted = Counter[int]()
    opening = set()
    for row in range(len(rows)):
        pieces = range(rows.starts[row], rows.starts[row + 1])
        # No row is empty or longer than `seq_len`, and pieces that begin a document,
        # if any, come first in their row.
        assert 0 < sum(rows.lengths[i] for i in pieces) <= seq_len
        assert rows.opens[pieces[0]] or not any(rows.opens[i] for i in pieces)
        for i in pieces:
            first = int(rows.labels[i])
            predicted.update(range(first, first + int(rows.lengths[i])))
            if rows.opens[i]:
                opening.add(first)
    skipped = 0 if predicts_first else 1
    assert predicted == Counter(
        place
        for start, stop in itertools.pairwise(offsets)
        for place in range(start + skipped, stop)
    )
    starts = zip(offsets, sizes, strict=False)
    assert opening == {start + skipped for start, size in starts if size > skipped}
    # Only documents longer than a row are split, into pieces of the row length.
    parts = (part for size in sizes for part in _cut(max(size - skipped, 0), seq_len))
    assert sorted(rows.lengths) == sorted(parts)


def _cut(size: int, seq_len: int) -> list[int]:
    parts = [seq_len] * (size // seq_len)
    return [*parts, size % seq_len] if size % seq_len else parts


@given(st.lists(st.integers(1, 500), min_size=200, max_size=600))
def test_aligned_rows_are_nearly_full(sizes: list[int]) -> None:
    rows = align_rows(np.cumsum([0, *sizes]), 64, predicts_first=True)
    # Best-fit decreasing needs at most 11/9 of the minimum number of rows, plus 4/9.
    assert len(rows) <= 11 / 9 * -(-sum(sizes) // 64) + 1
    again = align_rows(np.cumsum([0, *sizes]), 64, predicts_first=True)
    both = zip(vars(rows).values(), vars(again).values(), strict=True)
    assert all(np.array_equal(one, other) for one, other in both)


def make_dataset(
    folder: Path, documents: list[list[int]], *, bos: int | None = None, eos: int | None = None
) -> AlignedDataset:
    """Write a split of these documents, in shards of two documents each."""
    with ShardWriter(folder, "train", np.dtype("<u2"), 12) as writer:
        for document in documents:
            writer.write(np.array(document, dtype="<u2"))
    split = {"documents": len(documents), "tokens": sum(map(len, documents)), "text_bytes": 99}
    manifest = {
        "format": "firstlight-tokens",
        "version": 1,
        "vocab_size": 100,
        "tokenizer_sha256": "",
        "bos_token_id": bos,
        "eos_token_id": eos,
        "splits": {"train": {**split, "shards": writer.shards}},
    }
    write_json(folder / "manifest.json", manifest)
    return AlignedDataset(folder, "train")


def pairs_of(dataset: AlignedDataset, seq_len: int) -> list[list[tuple[int, int, int]]]:
    """Return (input, label, document) for each position with a label, row by row."""
    count = dataset.num_rows(seq_len)
    batch = rows_to_batch(dataset, list(range(count)), seq_len, 0, document_masking=True)
    assert batch.document_ids is not None
    found = []
    for row in range(count):
        rows = (one[row].tolist() for one in (batch.input_ids, batch.labels, batch.document_ids))
        found.append([entry for entry in zip(*rows, strict=True) if entry[1] != -100])
    return found


def test_aligned_rows_without_bos_split_documents_at_eos(tmp_path: Path) -> None:
    documents = [[10, 11, _EOS], [20, _EOS], [30, 31, 32, 33, 34, _EOS], [40, 41, 42, _EOS]]
    dataset = make_dataset(tmp_path, documents, eos=_EOS)
    assert pairs_of(dataset, 5) == [
        [(_EOS, 30, 0), (30, 31, 0), (31, 32, 0), (32, 33, 0), (33, 34, 0)],
        # The rest of the long document comes after the document that shares its row.
        [(_EOS, 40, 0), (40, 41, 0), (41, 42, 0), (42, _EOS, 0), (34, _EOS, 1)],
        [(_EOS, 10, 0), (10, 11, 0), (11, _EOS, 0), (_EOS, 20, 1), (20, _EOS, 1)],
    ]
    assert dataset.label_share(5) == 1.0
    assert dataset.bits_a_nat(document_masking=False) == pytest.approx(15 / 99 / np.log(2))
    (line,) = dataset.describe(5)
    assert "4 documents in 3 rows of 5 tokens, 100.0% filled; 100.0% of the rows begin with" in line


@pytest.mark.parametrize(("bos", "eos"), [(_BOS, _EOS), (None, None)])
def test_aligned_rows_first_token_without_context_is_not_predicted(
    tmp_path: Path, bos: int | None, eos: int | None
) -> None:
    documents = [[_BOS, 10, 11, _EOS], [_BOS, 20], [_BOS], [_BOS, 30, 31, 32, 33, _EOS]]
    dataset = make_dataset(tmp_path, documents, bos=bos, eos=eos)
    assert pairs_of(dataset, 4) == [
        [(_BOS, 30, 0), (30, 31, 0), (31, 32, 0), (32, 33, 0)],
        [(_BOS, 10, 0), (10, 11, 0), (11, _EOS, 0), (_BOS, 20, 1)],
        [(33, _EOS, 0)],
    ]
    assert dataset.label_share(4) == 9 / 12
    assert dataset.bits_a_nat(document_masking=False) == pytest.approx(9 / 99 / np.log(2))


def test_aligned_loader_resumes_anywhere_from_rows_seen(data: Path) -> None:
    dataset = open_training_split(data, verify=True, long="refuse", row_alignment="document")
    assert isinstance(dataset, AlignedDataset)
    epoch = dataset.num_rows(32)

    def batches(rows_seen: int, count: int) -> list[torch.Tensor]:
        with TokenLoader(dataset, 32, 4, 7, rows_seen=rows_seen) as loader:
            return [loader.next_batch().labels for _ in range(count)]

    whole = batches(0, 20)
    assert all(map(torch.equal, batches(48, 8), whole[12:]))
    # Every token occurs exactly once per epoch.
    with TokenLoader(dataset, 32, 1, 7) as loader:
        seen = torch.cat([loader.next_batch().labels.flatten() for _ in range(epoch)])
    stream = TokenDataset(data, "train")
    assert torch.equal(seen[seen != -100].sort().values, torch.from_numpy(np.sort(stream[0:])))


def test_aligned_run_resumes_unchanged_and_only_with_same_alignment(
    tmp_path: Path, recipe: dict[str, Any]
) -> None:
    recipe["data"]["row_alignment"] = "document"
    recipe["evaluation"]["train_rows"] = 4
    whole = firstlight.train({**recipe, "run": {**recipe["run"], "dir": str(tmp_path / "whole")}})
    # Simulate a kill after step 8: the logs are truncated to that step.
    short = firstlight.train(recipe)
    newest = sorted(short.checkpoint.parent.iterdir())[-1]
    for file in newest.iterdir():
        file.unlink()
    newest.rmdir()
    stream = {**recipe, "data": {**recipe["data"], "row_alignment": "stream"}}
    with pytest.raises(CheckpointError, match="row_alignment was document and is now stream"):
        firstlight.train(stream, resume=True)
    again = firstlight.train(recipe, resume=True)
    assert again.train_loss == whole.train_loss
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    assert [line["step"] for line in found] == list(range(1, 13))
    weights = [(one.checkpoint / "model.safetensors").read_bytes() for one in (whole, again)]
    assert weights[0] == weights[1]

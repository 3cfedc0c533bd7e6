"""Tests of rows and their order: every token once per epoch, and the same batches after any
restart.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from firstlight.data.corpus import TokenDataset, num_rows, row_span, shuffled_index
from firstlight.data.loader import Batch, TokenLoader, rows_to_batch
from firstlight.data.shards import ShardWriter
from firstlight.errors import DataError
from firstlight.files.atomic import write_json
from waiting import PATIENCE_SECONDS

SEEDS = st.integers(0, 2**63)


def make_dataset(folder: Path, num_tokens: int) -> TokenDataset:
    """Return a split whose token at position i is i + 1, in shards of 50 tokens."""
    with ShardWriter(folder, "train", np.dtype("<u2"), 50) as writer:
        for start in range(0, num_tokens, 10):
            writer.write(np.arange(start + 1, min(start + 10, num_tokens) + 1, dtype="<u2"))
    split = {
        "documents": -(-num_tokens // 10),
        "tokens": num_tokens,
        "text_bytes": num_tokens,
        "shards": writer.shards,
    }
    manifest = {
        "format": "firstlight-tokens",
        "version": 1,
        "vocab_size": 65536,
        "tokenizer_sha256": "",
        "splits": {"train": split},
    }
    write_json(folder / "manifest.json", manifest)
    return TokenDataset(folder, "train")


def take(
    dataset: TokenDataset,
    count: int,
    *,
    seq_len: int = 8,
    micro_batch_size: int = 3,
    seed: int = 1,
    rows_seen: int = 0,
    document_masking: bool = False,
    workers: int = 1,
    prefetch: int = 2,
) -> list[Batch]:
    with TokenLoader(
        dataset,
        seq_len,
        micro_batch_size,
        seed,
        rows_seen=rows_seen,
        document_masking=document_masking,
        workers=workers,
        prefetch=prefetch,
    ) as loader:
        return [loader.next_batch() for _ in range(count)]


@pytest.fixture(scope="module")
def whole(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[TokenDataset, dict[bool, list[Batch]]]:
    """Return a split of 16 rows, the last of which is short, and its first 14 batches, built
    without a loader.
    """
    dataset = make_dataset(tmp_path_factory.mktemp("split"), 124)
    order = [shuffled_index(i % 16, 16, 1, i // 16) for i in range(42)]
    return dataset, {
        masking: [
            rows_to_batch(dataset, order[i : i + 3], 8, 0, document_masking=masking)
            for i in range(0, 42, 3)
        ]
        for masking in (False, True)
    }


def reading_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("loader")]


def same(left: Sequence[Batch], right: Sequence[Batch]) -> bool:
    return len(left) == len(right) and all(
        torch.equal(a.input_ids, b.input_ids)
        and torch.equal(a.labels, b.labels)
        and a.num_valid == b.num_valid
        and (a.document_ids is None) == (b.document_ids is None)
        and (
            a.document_ids is None
            or b.document_ids is None
            or torch.equal(a.document_ids, b.document_ids)
        )
        for a, b in zip(left, right, strict=True)
    )


@pytest.mark.parametrize(
    "num_tokens, seq_len, rows",
    [(0, 4, 0), (1, 4, 0), (2, 4, 1), (5, 4, 1), (6, 4, 2), (9, 4, 2), (10, 4, 3), (3, 1, 2)],
)
def test_num_rows_matches_expected_values(num_tokens: int, seq_len: int, rows: int) -> None:
    assert num_rows(num_tokens, seq_len) == rows


@given(num_tokens=st.integers(0, 300), seq_len=st.integers(1, 40))
def test_loader_rows_predict_every_token_but_first_exactly_once(
    num_tokens: int, seq_len: int
) -> None:
    stream = list(range(num_tokens))
    rows = [stream[row_span(row, seq_len)] for row in range(num_rows(num_tokens, seq_len))]
    assert [token for row in rows for token in row[1:]] == stream[1:]
    assert all(2 <= len(row) <= seq_len + 1 for row in rows)
    assert all(len(row) == seq_len + 1 for row in rows[:-1])


@given(length=st.integers(1, 400), seed=SEEDS, epoch=st.integers(0, 10**6))
def test_shuffled_index_is_a_permutation(length: int, seed: int, epoch: int) -> None:
    order = [shuffled_index(position, length, seed, epoch) for position in range(length)]
    assert sorted(order) == list(range(length))


@given(data=st.data(), length=st.integers(1, 2**48), seed=SEEDS)
def test_shuffled_index_of_huge_corpus_is_in_range_and_unique(
    data: st.DataObject, length: int, seed: int
) -> None:
    places = st.integers(0, length - 1)
    positions = data.draw(st.lists(places, unique=True, max_size=20))
    order = [shuffled_index(position, length, seed, 0) for position in positions]
    assert len(set(order)) == len(order)
    assert all(0 <= index < length for index in order)


@given(seed=SEEDS, epoch=st.integers(0, 1000))
def test_shuffle_order_differs_by_epoch_and_seed(seed: int, epoch: int) -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return [shuffled_index(position, 200, seed, epoch) for position in range(200)]

    this = order(seed, epoch)
    assert this != list(range(200))
    assert this != order(seed, epoch + 1)
    assert this != order(seed + 1, epoch)
    assert this == order(seed, epoch)


def test_shuffle_order_matches_pinned_values() -> None:
    """A change of these numbers would change the data of every resumed run."""
    assert [shuffled_index(i, 10, 0, 0) for i in range(10)] == [7, 6, 8, 2, 9, 5, 0, 4, 1, 3]
    assert [shuffled_index(i, 10, 0, 1) for i in range(10)] == [6, 1, 8, 2, 3, 0, 9, 5, 7, 4]
    far = [shuffled_index(i, 10**9, 42, 7) for i in range(3)]
    assert far == [847376485, 993224937, 908877576]


def test_shuffle_order_is_well_mixed() -> None:
    """Over many epochs, neighbours end up far apart, and no index is more frequent than others at
    any position.
    """
    length, epochs = 64, 2000
    orders = np.array(
        [[shuffled_index(i, length, 3, epoch) for i in range(length)] for epoch in range(epochs)]
    )
    # The mean distance of two random positions among 64 is 64/3; the standard error here is about
    # 0.05.
    assert abs(np.abs(np.diff(orders, axis=1)).mean() - (length + 1) / 3) < 0.5
    counts = np.array([np.bincount(orders[:, i], minlength=length) for i in range(length)])
    expected = epochs / length
    assert ((counts - expected) ** 2 / expected).sum() / (length - 1) ** 2 < 1.2


def test_loader_epoch_yields_every_token_once(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path, 121)  # 15 rows of 8, in batches of 3
    for epoch in range(3):
        batches = take(dataset, 5, rows_seen=15 * epoch)
        labels = torch.cat([batch.labels.flatten() for batch in batches])
        assert sorted(labels.tolist()) == list(range(2, 122))
        assert all(batch.num_valid == 24 for batch in batches)


def test_loader_labels_are_next_tokens(tmp_path: Path) -> None:
    for batch in take(make_dataset(tmp_path, 121), 5):
        assert batch.input_ids.shape == batch.labels.shape == (3, 8)
        assert batch.input_ids.dtype == batch.labels.dtype == torch.int64
        assert torch.equal(batch.labels, batch.input_ids + 1)


def test_loader_short_last_row_is_padded_and_padding_not_predicted(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path, 20)
    batch = rows_to_batch(dataset, [2, 0], 8, fill_id=7)
    assert batch.input_ids.tolist() == [[17, 18, 19, *[7] * 5], list(range(1, 9))]
    assert batch.labels.tolist() == [[18, 19, 20, *[-100] * 5], list(range(2, 10))]
    assert batch.num_valid == 11


def test_loader_epoch_with_short_row_predicts_every_token_once(tmp_path: Path) -> None:
    batches = take(make_dataset(tmp_path, 124), 16, micro_batch_size=1)
    labels = [label for batch in batches for label in batch.labels.flatten().tolist()]
    assert sorted(label for label in labels if label != -100) == list(range(2, 125))
    assert labels.count(-100) == 5
    assert sum(batch.num_valid for batch in batches) == 123


@pytest.mark.parametrize("micro_batch_size", [1, 2, 4, 7, 40])
def test_loader_batch_may_span_two_epochs(tmp_path: Path, micro_batch_size: int) -> None:
    """The rows are an endless sequence that is divided into batches of any size."""
    dataset = make_dataset(tmp_path, 121)
    single = take(dataset, 80, micro_batch_size=1)
    batches = take(dataset, 80 // micro_batch_size, micro_batch_size=micro_batch_size)
    together = torch.cat([batch.input_ids for batch in batches])
    assert torch.equal(together, torch.cat([b.input_ids for b in single])[: len(together)])


def test_loader_epochs_have_different_orders(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path, 121)
    assert not same(take(dataset, 5), take(dataset, 5, rows_seen=15))
    assert not same(take(dataset, 5), take(dataset, 5, seed=2))


def test_loader_resumed_at_any_batch_yields_same_rows(tmp_path: Path) -> None:
    # 16 rows, the last of which is short; 16 is not divisible by 3.
    dataset = make_dataset(tmp_path, 124)
    whole = take(dataset, 14)
    for done in range(14):
        assert same(whole[done:], take(dataset, 14 - done, rows_seen=3 * done))


def test_loader_resumed_several_times_yields_same_rows(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path, 124)
    state = {"rows_seen": 0}
    parts: list[Batch] = []
    for count in (1, 0, 4, 2, 6):
        with TokenLoader(dataset, 8, 3, 1, rows_seen=state["rows_seen"]) as loader:
            parts += [loader.next_batch() for _ in range(count)]
            state = loader.state_dict()
    assert state == {"rows_seen": 39}
    assert same(parts, take(dataset, 13))


def test_loader_distant_position_is_reached_immediately(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path, 121)
    epoch, position = 10**12, 14  # The last row of an epoch and the first row of the next.
    rows = [shuffled_index(position, 15, 1, epoch), shuffled_index(0, 15, 1, epoch + 1)]
    expected = rows_to_batch(dataset, rows, 8, fill_id=0)
    found = take(dataset, 1, micro_batch_size=2, rows_seen=15 * epoch + position)
    assert same(found, [expected])


@pytest.mark.parametrize("prefetch", [1, 2, 7])
def test_loader_state_excludes_rows_read_ahead(tmp_path: Path, prefetch: int) -> None:
    with TokenLoader(make_dataset(tmp_path, 121), 8, 4, 1, prefetch=prefetch) as loader:
        assert loader.state_dict() == {"rows_seen": 0}
        loader.next_batch()
        assert loader.state_dict() == {"rows_seen": 4}


@given(
    workers=st.integers(1, 8),
    prefetch=st.integers(1, 8),
    done=st.integers(0, 12),
    document_masking=st.booleans(),
)
@settings(max_examples=60)
def test_loader_threads_and_prefetch_do_not_change_batches(
    whole: tuple[TokenDataset, dict[bool, list[Batch]]],
    workers: int,
    prefetch: int,
    done: int,
    document_masking: bool,
) -> None:
    dataset, expected = whole
    found = take(
        dataset,
        14 - done,
        rows_seen=3 * done,
        document_masking=document_masking,
        workers=workers,
        prefetch=prefetch,
    )
    assert same(found, expected[document_masking][done:])


def test_loader_batches_keep_order_if_first_is_read_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = make_dataset(tmp_path, 124)
    expected = take(dataset, 4, micro_batch_size=1)
    read, others = TokenDataset.__getitem__, threading.Semaphore(0)
    first = row_span(shuffled_index(0, 16, 1, 0), 8)

    def slow(self: TokenDataset, span: slice) -> Any:
        if span == first:
            for number in range(3):
                assert others.acquire(timeout=PATIENCE_SECONDS), (
                    f"waited for three reads beside the first batch's; seen last: {number}"
                )
        else:
            others.release()
        return read(self, span)

    monkeypatch.setattr(TokenDataset, "__getitem__", slow)
    assert same(take(dataset, 4, micro_batch_size=1, workers=2, prefetch=4), expected)


@pytest.mark.parametrize("workers, prefetch, running", [(1, 8, 1), (3, 8, 3), (8, 3, 3)])
def test_loader_uses_requested_number_of_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int, prefetch: int, running: int
) -> None:
    dataset, together = make_dataset(tmp_path, 121), threading.Barrier(running)
    read = TokenDataset.__getitem__

    def meet(self: TokenDataset, span: slice) -> Any:
        # The barrier breaks unless this many threads arrive concurrently.
        together.wait(timeout=PATIENCE_SECONDS)
        return read(self, span)

    monkeypatch.setattr(TokenDataset, "__getitem__", meet)
    with TokenLoader(dataset, 8, 1, 1, workers=workers, prefetch=prefetch) as loader:
        loader.next_batch()
        assert running <= len(reading_threads()) <= workers
        together.abort()


def test_loader_close_leaves_no_thread(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path, 121)
    for count in (0, 1, 5):
        with TokenLoader(dataset, 8, 3, 1, workers=4, prefetch=8) as loader:
            for _ in range(count):
                loader.next_batch()
        assert not reading_threads()


def test_loader_error_in_caller_leaves_no_thread(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path, 121)

    def interrupted() -> None:
        with TokenLoader(dataset, 8, 3, 1, workers=4, prefetch=8) as loader:
            loader.next_batch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not reading_threads()


def test_loader_pins_whole_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset, pinned = make_dataset(tmp_path, 121), []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor.dtype)
        return tensor.clone()

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    expected = rows_to_batch(dataset, [0, 3], 8, 0, document_masking=True)
    assert same([expected.pin_memory()], [expected])
    assert pinned == [torch.int64, torch.int64, torch.int32]
    with TokenLoader(dataset, 8, 1, 1, prefetch=1, pin_memory=True) as loader:
        loader.next_batch()
    assert len(pinned) in (5, 7), "two tensors a batch, and perhaps the batch read ahead"


def test_loader_returned_batches_do_not_change(tmp_path: Path) -> None:
    with TokenLoader(make_dataset(tmp_path, 121), 8, 3, 1) as loader:
        first = loader.next_batch()
        copy = first.input_ids.clone()
        first.input_ids.fill_(-1)
        for _ in range(6):
            batch = loader.next_batch()
            assert (batch.input_ids >= 0).all()
    assert not torch.equal(copy, first.input_ids)


@pytest.mark.parametrize("workers, prefetch", [(1, 1), (1, 2), (4, 6)])
def test_loader_error_during_prefetch_reaches_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int, prefetch: int
) -> None:
    dataset = make_dataset(tmp_path, 121)

    def broken(self: TokenDataset, span: slice) -> None:
        raise OSError("the disk is gone")

    def drain(loader: TokenLoader) -> None:
        monkeypatch.setattr(TokenDataset, "__getitem__", broken)
        for _ in range(prefetch + 1):  # Rows that were read before the error are still returned.
            loader.next_batch()

    with TokenLoader(dataset, 8, 3, 1, workers=workers, prefetch=prefetch) as loader:
        loader.next_batch()
        with pytest.raises(OSError, match="the disk is gone"):
            drain(loader)
        state = loader.state_dict()
        with pytest.raises(OSError, match="the disk is gone"):  # Nothing is skipped.
            loader.next_batch()
        assert loader.state_dict() == state
    assert not reading_threads()


@pytest.mark.parametrize("num_tokens, refused", [(0, True), (8, True), (9, False)])
def test_loader_split_shorter_than_one_row_raises_data_error(
    tmp_path: Path, num_tokens: int, refused: bool
) -> None:
    dataset = make_dataset(tmp_path, num_tokens)
    if not refused:
        dataset.require_row(8)
        assert take(dataset, 1, micro_batch_size=1)[0].num_valid == 8
        return
    message = rf"'train' split of .* has {num_tokens} tokens, .*seq_len 8 needs \(9\)"
    with pytest.raises(DataError, match=message):
        dataset.require_row(8)
    with pytest.raises(DataError, match=message):
        TokenLoader(dataset, 8, 1, 1)

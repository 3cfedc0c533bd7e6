"""Tests of mixes of corpora: exact shares at every position, each corpus in its own order, and the
same rows for any batch size.
"""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from firstlight.data.corpus import (
    FIRST_REPLAY_SHARE,
    MAX_PERIOD,
    CorpusPart,
    MixedDataset,
    ReplayedDataset,
    TokenDataset,
    Turns,
    num_rows,
    shuffled_index,
    whole_weights,
)
from firstlight.data.loader import TokenLoader
from firstlight.data.shards import ShardWriter
from firstlight.errors import ConfigError, DataError
from firstlight.files.atomic import write_json

PARTS = st.lists(st.integers(1, 60), min_size=1, max_size=8)
SEQ_LEN = 4


def make_dataset(folder: Path, first: int, num_tokens: int, tokenizer: str = "t") -> TokenDataset:
    """Return a split whose token at position i is `first` + i, so that each row identifies its
    origin.
    """
    folder.mkdir()
    with ShardWriter(folder, "train", np.dtype("<u2"), 50) as writer:
        writer.write(np.arange(first, first + num_tokens, dtype="<u2"))
    split = {
        "documents": 1,
        "tokens": num_tokens,
        "text_bytes": num_tokens,
        "shards": writer.shards,
    }
    manifest = {
        "format": "firstlight-tokens",
        "version": 1,
        "vocab_size": 65536,
        "tokenizer_sha256": tokenizer,
        "splits": {"train": split},
    }
    write_json(folder / "manifest.json", manifest)
    return TokenDataset(folder, "train")


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> list[TokenDataset]:
    """Return corpora of 5, 13 and 8 rows of `SEQ_LEN`; the last row of the last corpus is short."""
    folder = tmp_path_factory.mktemp("mix")
    sizes = (21, 53, 31)
    return [make_dataset(folder / str(i), 1000 * i, size) for i, size in enumerate(sizes)]


def mixed(datasets: list[TokenDataset], *parts: int) -> MixedDataset:
    return MixedDataset(
        [CorpusPart(f"c{i}", d, p) for i, (d, p) in enumerate(zip(datasets, parts, strict=True))]
    )


def rows_of(
    dataset: TokenDataset | MixedDataset,
    count: int,
    *,
    rows_seen: int = 0,
    micro_batch_size: int = 1,
    world_size: int = 1,
    workers: int = 0,
    seed: int = 7,
) -> list[list[int]]:
    """Return `count` rows, starting after `rows_seen` rows, as read by all ranks together."""
    loaders = [
        TokenLoader(
            dataset,
            SEQ_LEN,
            micro_batch_size,
            seed,
            rows_seen=rows_seen,
            rank=rank,
            world_size=world_size,
            workers=workers,
        )
        for rank in range(world_size)
    ]
    rows: list[list[int]] = []
    while len(rows) < count:
        for loader in loaders:
            rows += loader.next_batch().input_ids.tolist()
    for loader in loaders:
        loader.__exit__()
    return rows[:count]


@pytest.mark.parametrize(
    "weights, whole",
    [
        ([1], [1]),
        ([0.3], [1]),
        ([0.7, 0.3], [7, 3]),
        ([7.0, 3.0], [7, 3]),
        ([0.1, 0.2, 0.3], [1, 2, 3]),
        ([50, 30, 20], [5, 3, 2]),
        ([1e-7, 3e-7], [1, 3]),
        ([1e15, 2e15], [1, 2]),
        ([0.999999, 0.000001], [999999, 1]),
        ([2 / 3, 2 / 3], [1, 1]),
        ([1.5, 0.25], [6, 1]),
    ],
)
def test_whole_weights_keep_written_integers(weights: list[float], whole: list[int]) -> None:
    assert whole_weights(weights) == whole


@given(weights=st.lists(st.integers(1, 10**4), min_size=1, max_size=6), scale=st.integers(-6, 6))
def test_whole_weights_keep_ratio_and_are_minimal(weights: list[int], scale: int) -> None:
    whole = whole_weights([float(f"{weight}e{scale}") for weight in weights])
    assert math.gcd(*whole) == 1
    assert [Fraction(w, weights[0]) for w in weights] == [Fraction(w, whole[0]) for w in whole]


@pytest.mark.parametrize("weights", [[], [0.0], [1, -1], [1, math.inf], [1, math.nan]])
def test_mix_non_positive_weights_raise_config_error(weights: list[float]) -> None:
    with pytest.raises(ConfigError, match="the weights of a mix must be above 0"):
        whole_weights(weights)


def test_mix_weights_with_too_many_digits_raise_and_suggest_working_ones() -> None:
    assert sum(whole_weights([MAX_PERIOD - 1, 1])) == MAX_PERIOD
    with pytest.raises(ConfigError, match="round the weights, for example to 1000, 1"):
        whole_weights([MAX_PERIOD, 1])
    said = (
        r"mix with the weights \(0\.333333333, 0\.6666666667\) has a period of 9,999,999,997 rows, "
        r"more than the limit of 1,000,000: round the weights, for example to 333, 667"
    )
    with pytest.raises(ConfigError, match=said):
        whole_weights([0.333333333, 0.6666666667])


@given(parts=PARTS, periods=st.integers(1, 2))
def test_mix_shares_are_exact_at_every_position(parts: list[int], periods: int) -> None:
    turns, period = Turns(parts), sum(parts)
    given_rows = [0] * len(parts)
    for position in range(min(periods * period, 300)):
        assert turns.counts(position) == given_rows
        corpus, own = turns.at(position)
        assert own == given_rows[corpus], "no row of a corpus is left out or given twice"
        given_rows[corpus] += 1
        for count, part in zip(given_rows, parts, strict=True):
            # In integers: |count - n * part / period| < 1.
            assert abs(count * period - (position + 1) * part) < period
    assert turns.counts(periods * period) == [periods * part for part in parts]


@given(parts=PARTS, start=st.integers(0, 10**15))
def test_mix_position_is_found_without_earlier_ones(parts: list[int], start: int) -> None:
    turns, period = Turns(parts), sum(parts)
    before = turns.counts(start)
    assert sum(before) == start
    corpus, own = turns.at(start)
    assert own == before[corpus]
    assert turns.counts(start + 1) == [n + (i == corpus) for i, n in enumerate(before)]
    for count, part in zip(before, parts, strict=True):
        assert abs(count * period - start * part) < period


@settings(max_examples=5)
@given(st.lists(st.integers(1, 3 * 10**4), min_size=30, max_size=30))
def test_mix_shares_are_exact_with_many_corpora_and_long_period(parts: list[int]) -> None:
    period = sum(parts)
    turns = Turns(parts)
    corpora = np.array([turns.at(position)[0] for position in range(0, period, 997)])
    assert set(corpora) <= set(range(30))
    for position in range(0, period + 1, 9973):
        for count, part in zip(turns.counts(position), parts, strict=True):
            assert abs(count * period - position * part) < period


def test_mix_equal_weights_alternate() -> None:
    assert [Turns([1, 1, 1]).at(position)[0] for position in range(6)] == [0, 1, 2, 0, 1, 2]


def test_mix_order_matches_pinned_values() -> None:
    """The order is pinned, because a different order would change the data of resumed runs."""
    turns = Turns([7, 3])
    assert "".join(str(turns.at(n)[0]) for n in range(20)) == "00100100010010010001"
    turns = Turns([5, 3, 2])
    assert "".join(str(turns.at(n)[0]) for n in range(10)) == "0102010102"


def test_mix_each_corpus_is_permuted_per_epoch(
    datasets: list[TokenDataset],
) -> None:
    dataset = mixed(datasets, 3, 1, 2)
    rows = rows_of(dataset, 240)
    for number, corpus in enumerate(datasets):
        own = [row[0] - 1000 * number for row in rows if row[0] // 1000 == number]
        length = num_rows(corpus.num_tokens, SEQ_LEN)
        assert len(own) >= 2 * length
        expected = [
            SEQ_LEN * shuffled_index(i % length, length, 7, i // length) for i in range(len(own))
        ]
        assert own == expected
        assert sorted(own[:length]) == sorted(own[length : 2 * length])
        assert own[:length] != own[length : 2 * length], "another order in each epoch"


def test_mix_of_one_corpus_equals_that_corpus(datasets: list[TokenDataset]) -> None:
    assert rows_of(mixed(datasets[:1], 4), 30) == rows_of(datasets[0], 30)


@pytest.mark.parametrize("micro_batch_size, world_size", [(1, 1), (3, 1), (2, 4), (5, 3)])
@pytest.mark.parametrize("workers", [0, 3])
def test_mix_order_does_not_depend_on_batch_size_or_resume(
    datasets: list[TokenDataset], micro_batch_size: int, world_size: int, workers: int
) -> None:
    dataset = mixed(datasets, 7, 3, 5)
    expected = rows_of(dataset, 120)
    found = rows_of(
        dataset,
        120,
        micro_batch_size=micro_batch_size,
        world_size=world_size,
        workers=workers,
    )
    assert found == expected
    assert rows_of(dataset, 60, rows_seen=47) == expected[47:107]


def test_mix_short_last_row_of_corpus_is_padded(datasets: list[TokenDataset]) -> None:
    dataset = mixed(datasets, 1, 1, 1)
    with TokenLoader(dataset, SEQ_LEN, 24, 7) as loader:
        batch = loader.next_batch()
    short = batch.input_ids[:, 0] == 2000 + 28
    assert int(short.sum()) == 1
    assert batch.labels[short].tolist() == [[2029, 2030, -100, -100]]
    assert batch.num_valid == 24 * SEQ_LEN - 2


def test_mix_epoch_length_is_number_of_rows(datasets: list[TokenDataset]) -> None:
    dataset = mixed(datasets, 5, 13, 8)
    assert dataset.num_rows(SEQ_LEN) == 26
    with TokenLoader(dataset, SEQ_LEN, 1, 7) as loader:
        assert loader.rows_per_epoch == 26
    # If the weights are proportional to the sizes, each row occurs once.
    assert Counter(map(tuple, rows_of(dataset, 26))).most_common(1)[0][1] == 1
    assert dataset.turns.counts(26) == [5, 13, 8]
    assert dataset.epochs_by_corpus(13, SEQ_LEN)["c1"] == pytest.approx(0.5, abs=0.08)
    assert dataset.epochs_by_corpus(52, SEQ_LEN) == {"c0": 2.0, "c1": 2.0, "c2": 2.0}


def test_mix_document_masking_follows_each_corpus(datasets: list[TokenDataset]) -> None:
    with TokenLoader(mixed(datasets, 1, 1, 1), SEQ_LEN, 12, 7, document_masking=True) as loader:
        batch = loader.next_batch()
    assert batch.document_ids is not None
    assert batch.document_ids.dtype == torch.int32


def test_mix_corpora_with_different_tokenizers_raise_data_error(
    datasets: list[TokenDataset], tmp_path: Path
) -> None:
    other = make_dataset(tmp_path / "other", 0, 40, tokenizer="u")
    with pytest.raises(DataError, match="different tokenizers") as caught:
        mixed([datasets[0], other], 1, 1)
    assert str(other.folder) in str(caught.value)
    assert str(datasets[0].folder) in str(caught.value)


def test_mix_corpus_named_twice_raises_data_error(
    datasets: list[TokenDataset], tmp_path: Path
) -> None:
    with pytest.raises(DataError, match="is in the mix twice"):
        mixed([datasets[0], datasets[0]], 1, 1)


def test_mix_corpus_without_a_full_row_raises_data_error(datasets: list[TokenDataset]) -> None:
    dataset = mixed(datasets, 1, 1, 1)
    dataset.require_row(20)
    message = rf"of {datasets[0].folder} has 21 tokens, .*seq_len 21 needs \(22\)"
    with pytest.raises(DataError, match=message):
        dataset.require_row(21)
    with pytest.raises(DataError, match=message):
        TokenLoader(dataset, 21, 1, 1)


def test_mix_manifest_contains_corpora_and_weights(datasets: list[TokenDataset]) -> None:
    manifests = [mixed(datasets, *parts).manifest for parts in ((1, 1, 1), (2, 1, 1), (2, 2, 2))]
    manifests.append(mixed([datasets[1], datasets[0], datasets[2]], 1, 1, 1).manifest)
    assert len({str(manifest) for manifest in manifests}) == 4
    assert mixed(datasets, 7, 3, 5).identity() == {"mix": "7:3:5"}


# Replay: rows of kept text among the rows of new text, with a share that can change in a run


@given(
    change=st.integers(0, 120),
    share=st.sampled_from([0.0, 0.05, 0.1, 0.25]),
    first=st.sampled_from([None, 0.0, 0.05, 0.3]),
)
@settings(max_examples=60)
def test_replay_share_is_exact_before_and_after_change(
    change: int, share: float, first: float | None, datasets: list[TokenDataset]
) -> None:
    new, kept = datasets[1:]
    replayed = ReplayedDataset(new, kept, first)
    plain = ReplayedDataset(new, kept, first)
    replayed.change_share(change, share)
    before = FIRST_REPLAY_SHARE if first is None else first
    found = [replayed.row_at(position, SEQ_LEN, 7) for position in range(change + 100)]
    assert found[:change] == [plain.row_at(position, SEQ_LEN, 7) for position in range(change)]
    counts = [sum(one is kept for one, _ in part) for part in (found[:change], found[change:])]
    assert abs(counts[0] - before * change) < 1
    assert abs(counts[1] - share * 100) < 1
    # Each corpus is read in its own order, without a gap at the change.
    for corpus in (new, kept):
        own = [row for one, row in found if one is corpus]
        assert own == [corpus.row_at(n, SEQ_LEN, 7)[1] for n in range(len(own))]
        name = "new" if corpus is new else "kept"
        epochs = replayed.epochs_by_corpus(len(found), SEQ_LEN)[name]
        assert epochs == len(own) / corpus.num_rows(SEQ_LEN)


def test_replay_epoch_has_as_many_rows_as_new_text(datasets: list[TokenDataset]) -> None:
    replayed = ReplayedDataset(datasets[0], datasets[1], 0.25)
    assert replayed.num_rows(SEQ_LEN) == datasets[0].num_rows(SEQ_LEN)
    assert not replayed.is_open


def test_loader_read_again_returns_rows_of_new_share(datasets: list[TokenDataset]) -> None:
    new, kept = datasets[1:]
    replayed = ReplayedDataset(new, kept, None)
    with TokenLoader(replayed, SEQ_LEN, 2, 7, workers=2, prefetch=6) as loader:
        for _ in range(3):
            loader.next_batch()
        replayed.change_share(4, 0.5)
        loader.read_again(4)
        found = loader.next_batch().input_ids.tolist()
    expected = [replayed.row_at(position, SEQ_LEN, 7) for position in (4, 5)]
    assert sorted(one is kept for one, _ in expected) == [False, True]
    texts = [one[row * SEQ_LEN : (row + 1) * SEQ_LEN].tolist() for one, row in expected]
    assert found == texts

"""Bugs of other trainers in data: what is learned from, in which order, and after a stop."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from small import counting_split, make_split
from tokenizers import models, pre_tokenizers

from firstlight.data.corpus import TokenDataset
from firstlight.data.loader import TokenLoader
from firstlight.data.prepare import prepare
from firstlight.data.shards import Shard
from firstlight.errors import DataError
from firstlight.evaluation.perplexity import evaluate_split
from firstlight.tokenizer import Tokenizer
from firstlight.training.loop import train
from waiting import PATIENCE_SECONDS


def rows_from(dataset: TokenDataset, rows_seen: int, count: int, **options: Any) -> list[list[int]]:
    """The first `count` rows, one a batch, from a position on."""
    with TokenLoader(dataset, 8, 1, 1, rows_seen=rows_seen, workers=0, **options) as loader:
        return [loader.next_batch().input_ids[0].tolist() for _ in range(count)]


# Order and position


def test_loader_resumed_in_second_epoch_keeps_its_order(tmp_path: Path) -> None:
    """transformers #40691, accelerate #4071: a run resumed in its second epoch saw the first's
    order again."""
    dataset = counting_split(tmp_path, 161)  # 20 rows
    whole = rows_from(dataset, 0, 60)
    assert whole[:20] != whole[20:40] != whole[40:]
    assert rows_from(dataset, 33, 27) == whole[33:]


def test_loader_resumed_twice_yields_same_rows(tmp_path: Path) -> None:
    """KempnerForge #57, composer #3725: the position was counted from the last start."""
    dataset = counting_split(tmp_path, 161)
    whole, found, seen = rows_from(dataset, 0, 50), [], 0
    for count in (7, 18, 9, 16):
        with TokenLoader(dataset, 8, 1, 1, rows_seen=seen) as loader:
            found += [loader.next_batch().input_ids[0].tolist() for _ in range(count)]
            seen = loader.state_dict()["rows_seen"]
    assert found == whole
    assert seen == 50


def test_run_resumed_at_epoch_end_trains_to_the_end(recipe: dict[str, Any]) -> None:
    """verl #7401, streaming #700, torchdata #1437: the loader was at its end, the run exited 0."""
    recipe["evaluation"] = {"every_steps": 0, "max_rows": 1, "sample_tokens": 1}
    dataset = TokenDataset(recipe["data"]["dir"], "train")
    recipe["batch"] = {"micro_batch_size": -(-(dataset.num_tokens - 1) // 32)}  # an epoch
    recipe["schedule"] = {"max_steps": 3, "warmup_steps": 1}
    recipe["checkpoint"] = {"every_steps": 1}
    steps: list[int] = []

    def stop(record: Any) -> None:
        assert record["epoch"] == record["step"]
        if record["step"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(recipe, on_step=stop)
    result = train(recipe, resume=True, on_step=lambda record: steps.append(record["step"]))
    assert steps == [2, 3]
    assert result.step == 3


def test_loader_resume_does_not_read_earlier_data_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers #11284: hours of batches were made and thrown away."""
    dataset, reads = counting_split(tmp_path, 161), []
    read = TokenDataset.__getitem__

    def counted(self: TokenDataset, span: slice) -> Any:
        reads.append(span)
        return read(self, span)

    monkeypatch.setattr(TokenDataset, "__getitem__", counted)
    rows_from(dataset, 5000, 3)
    assert len(reads) == 3


def test_loader_resume_restores_position_of_every_rank(tmp_path: Path) -> None:
    """Megatron-Bridge #5637, prime-rl #1035: after a resume every rank read the first one's part,
    or rows were seen twice and others never."""
    dataset = counting_split(tmp_path, 161)
    whole, found, seen = rows_from(dataset, 0, 60), [], 0
    for world_size in (4, 3, 2):
        loaders = [
            TokenLoader(dataset, 8, 1, 1, rows_seen=seen, rank=r, world_size=world_size, workers=0)
            for r in range(world_size)
        ]
        for _ in range(4):
            found += [loader.next_batch().input_ids[0].tolist() for loader in loaders]
        (seen,) = {loader.state_dict()["rows_seen"] for loader in loaders}
    assert found == whole[: len(found)]
    assert seen == len(found) == 36


def test_loader_resume_yields_rows_read_ahead(tmp_path: Path) -> None:
    dataset = counting_split(tmp_path, 161)
    with TokenLoader(dataset, 8, 1, 1, workers=2, prefetch=8) as loader:
        before = [loader.next_batch().input_ids[0].tolist() for _ in range(3)]
        state = loader.state_dict()
    after = rows_from(dataset, state["rows_seen"], 5)
    assert before + after == rows_from(dataset, 0, 8)


def test_loader_batches_keep_order_whichever_reader_finishes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = counting_split(tmp_path, 161)
    whole, read = rows_from(dataset, 0, 12), TokenLoader._read
    others = threading.Semaphore(0)

    def first_last(self: TokenLoader, first: int) -> Any:
        if first == 0:
            for number in range(3):
                assert others.acquire(timeout=PATIENCE_SECONDS), (
                    f"waited for three reads beside the first batch's; seen last: {number}"
                )
        batch = read(self, first)
        others.release()
        return batch

    monkeypatch.setattr(TokenLoader, "_read", first_last)
    with TokenLoader(dataset, 8, 1, 1, workers=2, prefetch=4) as loader:
        assert [loader.next_batch().input_ids[0].tolist() for _ in range(12)] == whole


# What is learned from


def test_loader_last_partial_row_of_epoch_is_kept(tmp_path: Path) -> None:
    dataset = counting_split(tmp_path, 30)  # rows of 8, 8, 8 and 5 predictions
    with TokenLoader(dataset, 8, 2, 1, workers=0) as loader:
        labels = torch.cat([loader.next_batch().labels.flatten() for _ in range(2)])
    assert sorted(labels[labels != -100].tolist()) == list(range(2, 31))


def test_loader_last_token_of_row_is_predicted(tmp_path: Path) -> None:
    """The label after a row is the next row's first token, also in the next shard."""
    dataset = TokenDataset(
        make_split(tmp_path, [range(1, 9), range(9, 17), range(17, 26)], shard_tokens=8), "train"
    )
    with TokenLoader(dataset, 8, 3, 1, workers=0) as loader:
        batch = loader.next_batch()
    assert torch.equal(batch.labels, batch.input_ids + 1)


def words(vocab_size: int) -> Tokenizer:
    """A tokenizer of the words w0, w1, ..."""
    vocabulary = {f"w{number}": number for number in range(vocab_size)}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return Tokenizer(backend, eos_token="w1")


def test_prepare_ids_above_65535_do_not_overflow(tmp_path: Path) -> None:
    """transformers #2825: 16 bits for a vocabulary that needs 17."""
    source = tmp_path / "text.txt"
    source.write_text("w5 w65535 w65536 w69999")
    prepare([source], words(70_000), tmp_path / "data", val_fraction=0)
    assert TokenDataset(tmp_path / "data", "train")[0:5].tolist() == [5, 65535, 65536, 69999, 1]


def test_prepared_shards_with_too_few_bytes_per_token_raise_data_error(tmp_path: Path) -> None:
    folder = make_split(tmp_path, [[5, 65535, 0, 3, 1]], vocab_size=70_000)
    for verify in (True, False):
        with pytest.raises(DataError, match=r"2 bytes per token, too few .* of 70000"):
            TokenDataset(folder, "train", verify=verify)


def test_prepare_tokenizer_with_ids_beyond_vocabulary_raises_data_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "text.txt"
    source.write_text("w5 w6")
    monkeypatch.setattr(Tokenizer, "encode_batch", lambda *_: [[5, 65536 + 6]])
    with pytest.raises(DataError, match="produced id 65542, beyond its vocabulary of 300 tokens"):
        prepare([source], words(300), tmp_path / "data", val_fraction=0)
    assert not (tmp_path / "data").exists()


def test_train_token_id_beyond_vocabulary_raises_before_model(tmp_path: Path) -> None:
    """A GPU answers with a device-side assert hours later, or reads another tensor's memory."""
    folder = make_split(tmp_path, [range(40), [7, 299, 300, 8], range(40)], vocab_size=300)
    with pytest.raises(DataError, match="contains token id 300, beyond its vocabulary of 300"):
        TokenDataset(folder, "train")
    unverified = TokenDataset(folder, "train", verify=False)
    assert len(unverified[0:42]) == 42
    with pytest.raises(DataError, match=r"the 'train' split of .* contains token id 300, beyond"):
        unverified[0:43]


def change_offsets(path: Path, change: Sequence[tuple[int, int]]) -> None:
    """Set document offsets of a shard: (which, to what)."""
    offsets = Shard(path).offsets()
    content, start = path.read_bytes(), path.stat().st_size - 8 * len(offsets)
    values = np.frombuffer(content[start:], "<u8").copy()
    for index, value in change:
        values[index] = value
    path.write_bytes(content[:start] + values.tobytes())


@pytest.mark.parametrize(
    "change", [[(1, 9), (2, 4)], [(0, 1)], [(3, 11)], [(3, 13)], [(1, 2**64 - 1)], [(2, 13)]]
)
def test_dataset_invalid_document_offsets_raise_data_error(
    tmp_path: Path, change: list[tuple[int, int]]
) -> None:
    folder = make_split(tmp_path, [range(4), range(5), range(3)])
    change_offsets(folder / "train-00000.bin", change)
    with pytest.raises(DataError, match="document offsets are invalid"):
        TokenDataset(folder, "train", verify=False)


def test_prepare_keeps_end_of_document_token(tmp_path: Path) -> None:
    """Two documents run into one another, and a model never learns to stop."""
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text(f"w{number + 5} w9")
    prepare([tmp_path], words(20), tmp_path / "data", val_fraction=0)
    assert TokenDataset(tmp_path / "data", "train")[0:99].tolist() == [5, 9, 1, 6, 9, 1, 7, 9, 1]


def test_dataset_shard_listed_twice_raises_data_error(tmp_path: Path) -> None:
    folder = make_split(tmp_path, [range(60), range(60)])
    manifest = TokenDataset(folder, "train").manifest
    split = manifest["splits"]["train"]
    split["shards"][1] = split["shards"][0]
    shutil.rmtree(folder)
    folder.mkdir()
    make_split(folder, [range(60), range(60)], splits=manifest["splits"])
    with pytest.raises(DataError, match="lists a shard of 'train' twice"):
        TokenDataset(folder, "train")


def test_validation_loss_is_mean_over_tokens_not_batches(tmp_path: Path) -> None:
    """The short last batch counted as much as a whole one."""
    dataset = counting_split(tmp_path, 28)  # rows of 8, 8, 8 and 3 predictions
    found = evaluate_split(
        lambda ids, labels, _=None: labels[labels != -100].double().sum(),
        dataset,
        seq_len=8,
        batch_size=3,
        device=torch.device("cpu"),
    )
    assert found.tokens == 27
    assert found.loss == pytest.approx(sum(range(2, 29)) / 27)


def test_dataset_with_other_tokenizer_raises_data_error(
    recipe: dict[str, Any], data: Path, tmp_path: Path
) -> None:
    """The shards' ids mean other words than the tokenizer beside them says."""
    copy = tmp_path / "data"
    shutil.copytree(data, copy)
    words(320).save_pretrained(copy)
    recipe["data"]["dir"] = str(copy)
    with pytest.raises(DataError, match="the shards were not prepared with the tokenizer"):
        train(recipe)

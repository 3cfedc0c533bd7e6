"""Tests of examples packed into rows: unsplit, separate from each other, in a reproducible order,
and cached.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from builders import draw_records, say, with_template, write_lines
from firstlight.cli.main import main
from firstlight.data.chat import ChatOptions, cached_chat, prepare_chat
from firstlight.data.corpus import CorpusPart, MixedDataset, TokenDataset
from firstlight.data.loader import IGNORE_INDEX, TokenLoader, rows_to_batch
from firstlight.data.packing import ExampleDataset, open_split, pack_best_fit
from firstlight.data.shards import ShardWriter, manifest_digest
from firstlight.errors import DataError, InputError
from firstlight.files.atomic import write_json
from firstlight.models import GPT2Config, LlamaConfig, ModelConfig, empty_model
from firstlight.tokenizer import Tokenizer

_SHAPE: dict[str, Any] = {"vocab_size": 41, "num_hidden_layers": 2, "max_position_embeddings": 64}
_MODELS: list[ModelConfig] = [
    GPT2Config(hidden_size=18, num_attention_heads=3, **_SHAPE),
    LlamaConfig(hidden_size=24, num_attention_heads=6, num_key_value_heads=2, **_SHAPE),
]


def make_examples(
    folder: Path,
    lengths: Sequence[int],
    *,
    shard_tokens: int = 10**6,
    seed: int = 0,
    long: Any = "refuse",
) -> ExampleDataset:
    """Write a training split of random examples with these lengths; only the last token of each is
    a label.
    """
    generator = np.random.default_rng(seed)
    learned_tokens = 0
    folder.mkdir(exist_ok=True)
    with ShardWriter(folder, "train", np.dtype("<u2"), shard_tokens, labelled=True) as writer:
        for length in lengths:
            learned = generator.random(length) < 0.4
            learned[0], learned[-1] = False, True
            learned_tokens += int(learned.sum())
            writer.write(generator.integers(0, 41, length).astype("<u2"), learned)
    split = {
        "documents": len(lengths),
        "tokens": sum(lengths),
        "learned": learned_tokens,
        "text_bytes": 1,
        "shards": writer.shards,
    }
    manifest = {
        "format": "firstlight-tokens",
        "version": 2,
        "vocab_size": 41,
        "tokenizer_sha256": "",
        "chat": {"template_sha256": "t", "torn_answers": 0},
        "documents": {"rejected": {}},
        "splits": {"train": split},
    }
    write_json(folder / "manifest.json", manifest)
    return ExampleDataset(folder, "train", long=long)


# Packing


@given(lengths=st.lists(st.integers(1, 20), max_size=60), capacity=st.integers(20, 40))
def test_packing_places_every_item_in_one_row_that_fits(lengths: list[int], capacity: int) -> None:
    items, starts = pack_best_fit(np.array(lengths, dtype=np.int64), capacity)
    assert sorted(items.tolist()) == list(range(len(lengths)))
    rows = [items[a:b].tolist() for a, b in itertools.pairwise(starts)]
    filled = [sum(lengths[i] for i in row) for row in rows]
    assert all(0 < total <= capacity for total in filled)
    # Any two rows together contain more than fits in one row; otherwise they would share a row.
    assert all(a + b > capacity for n, a in enumerate(filled) for b in filled[n + 1 :])


@given(lengths=st.lists(st.integers(1, 12), max_size=40))
def test_packing_is_best_fit_decreasing(lengths: list[int]) -> None:
    """A simple algorithm that examines all rows for each item leaves the same free space in each
    row.
    """
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= length]
        if fitting:
            rooms.remove(min(fitting))
            rooms.append(min(fitting) - length)
        else:
            rooms.append(12 - length)
    items, starts = pack_best_fit(np.array(lengths, dtype=np.int64), 12)
    rows = [items[a:b].tolist() for a, b in itertools.pairwise(starts)]
    assert sorted(12 - sum(lengths[i] for i in row) for row in rows) == sorted(rooms)


def test_packing_matches_known_rows() -> None:
    items, starts = pack_best_fit(np.array([2, 7, 3, 5, 3]), 10)
    assert items.tolist() == [1, 2, 3, 4, 0]
    assert starts.tolist() == [0, 2, 5]


# Rows


@pytest.mark.parametrize("shard_tokens", [1, 25, 10**6])
def test_packed_rows_hold_whole_examples_as_documents_with_labels(
    tmp_path: Path, shard_tokens: int
) -> None:
    lengths = [5, 9, 3, 17, 2, 8]
    dataset = make_examples(tmp_path, lengths, shard_tokens=shard_tokens)
    packing = dataset.packing(16)
    batch = rows_to_batch(dataset, list(range(len(packing))), 16, 7, document_masking=True)
    assert batch.document_ids is not None
    seen = []
    for row in range(len(packing)):
        position = 0
        for number, index in enumerate(packing.row(row)):
            tokens, learned = dataset.example(index)
            end = position + len(tokens) - 1
            assert batch.input_ids[row, position:end].tolist() == tokens[:-1].tolist()
            expected = np.where(learned[1:], tokens[1:], IGNORE_INDEX).tolist()
            assert batch.labels[row, position:end].tolist() == expected
            assert batch.document_ids[row, position:end].tolist() == [number] * (end - position)
            position = end
            seen.append(index)
        assert batch.input_ids[row, position:].tolist() == [7] * (16 - position)
        assert batch.labels[row, position:].tolist() == [IGNORE_INDEX] * (16 - position)
        filler = batch.document_ids[row, position:].tolist()
        assert filler == [len(packing.row(row))] * (16 - position)
    assert sorted(seen) == list(range(6))
    assert batch.num_valid == dataset.num_labels == packing.num_labels


@pytest.mark.parametrize("config", _MODELS, ids=["gpt2", "llama"])
def test_packed_batch_gradient_equals_that_of_single_examples(
    tmp_path: Path, config: ModelConfig
) -> None:
    dataset = make_examples(tmp_path, [5, 9, 3, 17, 2, 8, 30, 12])
    model = empty_model(config)
    model.init_weights(torch.Generator().manual_seed(1))
    model.double().eval()
    batch = rows_to_batch(
        dataset, list(range(len(dataset.packing(32)))), 32, 0, document_masking=True
    )
    logits = model(batch.input_ids, document_ids=batch.document_ids)
    packed = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum")
    (packed / batch.num_valid).backward()  # type: ignore[no-untyped-call]
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    alone = torch.zeros((), dtype=torch.float64)
    for index in range(8):
        tokens, learned = dataset.example(index)
        labels = np.where(learned, tokens, IGNORE_INDEX)[1:]
        logits = model(torch.from_numpy(tokens[None, :-1]))
        alone = alone + F.cross_entropy(logits[0], torch.from_numpy(labels), reduction="sum")
    (alone / dataset.num_labels).backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(packed, alone, rtol=1e-12, atol=0)
    assert len(found) > 10
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-12, atol=1e-12)


def test_packed_epoch_reshuffles_every_example_and_resumes_from_rows_seen(
    tmp_path: Path,
) -> None:
    dataset = make_examples(tmp_path, [2 + i % 13 for i in range(50)])
    rows = dataset.num_rows(16)
    with TokenLoader(dataset, 16, 1, seed=3, document_masking=True) as loader:
        assert loader.rows_per_epoch == rows
        batches = [loader.next_batch() for _ in range(2 * rows)]
    assert sum(batch.num_valid for batch in batches[:rows]) == dataset.num_labels
    epochs = [[b.input_ids.tolist() for b in part] for part in (batches[:rows], batches[rows:])]
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert epochs[0] != epochs[1]
    with TokenLoader(dataset, 16, 1, 3, rows_seen=rows + 2, document_masking=True) as loader:
        again = loader.next_batch()
    assert torch.equal(again.labels, batches[rows + 2].labels)
    parts = []
    for rank in range(2):
        with TokenLoader(
            dataset, 16, 1, 3, document_masking=True, rank=rank, world_size=2
        ) as loader:
            parts.append(loader.next_batch())
    assert torch.equal(parts[1].input_ids, batches[1].input_ids)


# Long examples


def test_packing_too_long_examples_raise_and_name_longest(tmp_path: Path) -> None:
    dataset = make_examples(tmp_path, [5, 18, 30, 17])
    (tmp_path / "train-examples.txt").write_text("a:1\na:2\na:9\nb:1\n")
    with pytest.raises(DataError) as caught:
        dataset.packing(16)
    message = str(caught.value)
    assert "2 of 4 examples of 'train' are longer than a row of data.seq_len 16" in message
    assert "the longest with 30 tokens at a:9: raise data.seq_len to 29" in message
    assert len(dataset.packing(29)) > 0
    (tmp_path / "train-examples.txt").unlink()
    with pytest.raises(DataError, match=r"30 tokens at .*, example 3 of 'train'"):
        ExampleDataset(tmp_path, "train").packing(16)


def test_packing_long_examples_are_dropped_or_cut_and_counted(tmp_path: Path) -> None:
    lengths = [5, 18, 30, 17]
    make_examples(tmp_path, lengths)
    dropped = ExampleDataset(tmp_path, "train", long="drop")
    packing = dropped.packing(16)
    assert sorted(packing.examples.tolist()) == [0, 3]
    assert (packing.dropped, packing.cut) == (2, 0)
    cut = ExampleDataset(tmp_path, "train", long="cut")
    packing = cut.packing(16)
    assert sorted(packing.examples.tolist()) == [0, 1, 2, 3]
    assert (packing.dropped, packing.cut) == (0, 2)
    for dataset in (dropped, cut):
        packing = dataset.packing(16)
        rows = list(range(len(packing)))
        batch = rows_to_batch(dataset, rows, 16, 0, document_masking=True)
        assert batch.num_valid == packing.num_labels
        assert packing.num_inputs == round(packing.filled * batch.input_ids.numel())


def test_packing_truncated_example_without_labels_is_dropped(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, "train", np.dtype("<u2"), labelled=True) as writer:
        for length in (4, 9):
            learned = np.arange(length) == length - 1
            writer.write(np.arange(length).astype("<u2"), learned)
    dataset = make_examples(tmp_path / "x", [4])
    manifest = dict(dataset.manifest)
    split = {"documents": 2, "tokens": 13, "learned": 2, "text_bytes": 1, "shards": writer.shards}
    write_json(tmp_path / "manifest.json", {**manifest, "splits": {"train": split}})
    packing = ExampleDataset(tmp_path, "train", long="cut").packing(6)
    assert (packing.dropped, packing.cut, packing.num_labels) == (1, 0, 1)
    says = "no example of the 'train' split .* fits .* start from a model with a longer context"
    with pytest.raises(DataError, match=f"{says}, or set data.long to cut"):
        ExampleDataset(tmp_path, "train", long="drop").packing(2)
    with pytest.raises(DataError, match=f"{says}$"):
        ExampleDataset(tmp_path, "train", long="cut").packing(2)


# Folders


def test_open_split_distinguishes_text_from_conversations(tmp_path: Path, data: Path) -> None:
    make_examples(tmp_path, [4, 5])
    with pytest.raises(DataError, match="contains conversations, not text"):
        TokenDataset(tmp_path, "train")
    with pytest.raises(DataError, match="contains text, not conversations"):
        ExampleDataset(data, "train")
    assert isinstance(open_split(tmp_path, "train"), ExampleDataset)
    assert not isinstance(open_split(data, "train"), ExampleDataset)


def test_example_dataset_damaged_labels_raise(tmp_path: Path) -> None:
    make_examples(tmp_path, [4, 5])
    path = tmp_path / "train-00000.bin"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(DataError, match="is damaged"):
        ExampleDataset(tmp_path, "train")
    path.write_bytes(bytes(content[:-1]))
    with pytest.raises(DataError, match="wrong size"):
        ExampleDataset(tmp_path, "train", verify=False)


@pytest.mark.parametrize("change", [{"learned": 99}, {"learned": None}])
def test_packing_manifest_not_matching_labels_raises_data_error(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    manifest = make_examples(tmp_path, [4, 5]).manifest
    manifest["splits"]["train"].update(change)
    write_json(tmp_path / "manifest.json", manifest)
    with pytest.raises(DataError, match="don't match its manifest"):
        ExampleDataset(tmp_path, "train")


def test_mix_conversations_with_different_templates_raises(tmp_path: Path) -> None:
    one = make_examples(tmp_path / "a", [4, 5])
    make_examples(tmp_path / "b", [4, 6], seed=2)
    manifest = json.loads((tmp_path / "b" / "manifest.json").read_text())
    manifest["chat"]["template_sha256"] = "other"
    write_json(tmp_path / "b" / "manifest.json", manifest)
    other = ExampleDataset(tmp_path / "b", "train")
    with pytest.raises(DataError, match="different chat templates"):
        MixedDataset([CorpusPart("a", one, 1), CorpusPart("b", other, 1)])


# Preparation


@pytest.fixture(scope="module")
def chatml(tokenizer: Tokenizer) -> Tokenizer:
    return with_template(tokenizer, "chatml")


def test_prepared_chat_tokens_match_inference(tmp_path: Path, chatml: Tokenizer) -> None:
    records = draw_records(40)
    path = write_lines(tmp_path / "a.jsonl", records)
    manifest = prepare_chat([path], chatml, tmp_path / "out")
    assert manifest["split_by"] == "example"
    assert [manifest["splits"][name]["documents"] for name in ("train", "val")] == [36, 4]
    train = ExampleDataset(tmp_path / "out", "train")
    first = chatml.encode_chat(say(records[0]["instruction"], records[0]["output"]))
    tokens, learned = train.example(0)
    assert tokens.tolist() == first
    assert chatml.decode(tokens[learned].tolist()) == records[0]["output"]
    assert train.origin(1) == f"{path}:3"  # The second example is held out.
    assert Tokenizer.from_pretrained(tmp_path / "out").chat_template == chatml.chat_template
    names = ("manifest.json", "train-00000.bin", "val-00000.bin")
    prepare_chat([path], chatml, tmp_path / "again")
    for name in names:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_prepare_chat_equal_conversations_are_held_out_together(
    tmp_path: Path, chatml: Tokenizer
) -> None:
    records = draw_records(20) * 3
    path = write_lines(tmp_path / "a.jsonl", records)
    prepare_chat([path], chatml, tmp_path / "out", options=ChatOptions(val_fraction=0.25))
    splits = [ExampleDataset(tmp_path / "out", name) for name in ("train", "val")]
    seen = [{split.example(i)[0].tobytes() for i in range(split.num_documents)} for split in splits]
    assert not seen[0] & seen[1]
    assert [split.num_documents for split in splits] == [45, 15]


def test_prepare_chat_accepts_validation_files(tmp_path: Path, chatml: Tokenizer) -> None:
    train = write_lines(tmp_path / "a.jsonl", draw_records(6))
    val = write_lines(tmp_path / "b.jsonl", draw_records(3, seed=1))
    manifest = prepare_chat([train], chatml, tmp_path / "out", val_inputs=[val])
    assert manifest["split_by"] == "files"
    assert [manifest["splits"][name]["documents"] for name in ("train", "val")] == [6, 3]
    empty = write_lines(tmp_path / "c.jsonl", [])
    with pytest.raises(InputError, match="validation inputs contain no conversations"):
        prepare_chat([train], chatml, tmp_path / "none", val_inputs=[empty])


def test_prepare_chat_learning_all_tokens_counts_them_as_learned(
    tmp_path: Path, chatml: Tokenizer
) -> None:
    path = write_lines(tmp_path / "a.jsonl", draw_records(5))
    options = ChatOptions(train_on="all", val_fraction=0)
    manifest = prepare_chat([path], chatml, tmp_path / "out", options=options)
    split = manifest["splits"]["train"]
    assert split["learned"] == split["tokens"] - split["documents"]


def test_prepare_chat_template_without_end_of_turn_warns(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    template = "{%- for m in messages -%}{{- m.role ~ ':' ~ m.content ~ '\\n' -}}{%- endfor -%}"
    template += "{%- if add_generation_prompt -%}{{- 'assistant:' -}}{%- endif -%}"
    path = write_lines(tmp_path / "a.jsonl", draw_records(3))
    manifest = prepare_chat([path], tokenizer.extended([], template), tmp_path / "out")
    assert "does not learn to end" in manifest["chat"]["warning"]


# The cache


def test_prepare_chat_same_conversations_are_prepared_once(
    tmp_path: Path, chatml: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FIRSTLIGHT_CACHE", str(tmp_path / "cache"))
    path = write_lines(tmp_path / "a.jsonl", draw_records(12))
    told: list[str] = []

    def cached(**options: Any) -> Path:
        told.clear()
        return cached_chat([str(path)], [], chatml, None, ChatOptions(**options), told.append)

    folder = cached()
    assert told == [f"preparing the conversations of {path}"]
    assert (cached(), told) == (folder, [])
    assert cached(train_on="all") != folder
    # Damaged folders are prepared again.
    shard = folder / "train-00000.bin"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert cached() == folder
    assert told
    assert shard.read_bytes() == content
    os.unlink(folder / "manifest.json")
    assert cached() == folder
    # Different content gets a different folder; the same content under another path gives the same
    # bytes.
    copy = tmp_path / "copy.jsonl"
    shutil.copy(path, copy)
    write_lines(path, draw_records(13))
    assert cached() != folder
    other = cached_chat([str(copy)], [], chatml, None, ChatOptions(), told.append)
    assert (other / "manifest.json").read_bytes() == (folder / "manifest.json").read_bytes()


def test_manifest_digest_ignores_unused_fields(tmp_path: Path, chatml: Tokenizer) -> None:
    records = [{"messages": say("a", "b")}] * 4
    plain = prepare_chat([write_lines(tmp_path / "a.jsonl", records)], chatml, tmp_path / "a")
    more = [{"id": 1, **record} for record in records]
    counted = prepare_chat([write_lines(tmp_path / "b.jsonl", more)], chatml, tmp_path / "b")
    assert counted["chat"]["unused_fields"] == {"id": 4}
    digest = hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()
    assert manifest_digest(counted) == manifest_digest(plain) == digest
    other = counted | {"chat": counted["chat"] | {"train_on": "all"}}
    assert manifest_digest(other) != digest


# The command


def test_prepare_chat_command_prepares_conversations(
    tmp_path: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer.save_pretrained(tmp_path / "tok")
    path = write_lines(tmp_path / "a.jsonl", [*draw_records(10), {"messages": []}])
    common = ["--tokenizer", str(tmp_path / "tok"), "--out", str(tmp_path / "out")]
    command = ["prepare", str(path), "--kind", "chat", *common]
    assert main([*command, "--template", "chatml"]) == 1
    assert "tokenizer extend" in capsys.readouterr().err
    assert main([*command, "--template", "alpaca"]) == 1
    assert f"{path}:11: there is no message" in capsys.readouterr().err
    assert main([*command, "--template", "alpaca", "--on-bad", "skip", "--json"]) == 0
    captured = capsys.readouterr()
    assert "train: 9 conversations" in captured.err
    assert (
        f"1 of 11 records rejected: an empty conversation or message; first: {path}:11: "
        "there is no message" in captured.err
    )
    assert json.loads(captured.out)["documents"]["rejected"] == {"empty": 1}
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("some text to learn " * 20)
    (tmp_path / "text" / "blank.txt").write_text(" ")
    text = ["prepare", str(tmp_path / "text"), "--out", str(tmp_path / "shards")]
    assert main([*text, "--tokenizer", str(tmp_path / "tok"), "--val-fraction", "0"]) == 0
    assert "1 of 2 documents rejected: empty or only whitespace" in capsys.readouterr().err
    assert main([*command, "--workers", "2"]) == 2
    assert main(["prepare", str(path), *common, "--train-on", "all"]) == 2
    assert "add --kind chat" in capsys.readouterr().err

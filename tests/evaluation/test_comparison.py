"""Tests of the comparison of two models: rows, segments, paired errors and marks."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch

from builders import draw_records, draw_weights, write_lines
from firstlight import compare, evaluate, train
from firstlight.data.prepare import prepare
from firstlight.errors import ConfigError, DataError, FirstlightError, InputError
from firstlight.evaluation.comparison import (
    ComparedValue,
    Row,
    compare_rows,
    compare_scores,
    documents_of,
    passages_of,
    rows_of,
)
from firstlight.evaluation.scores import Metric, TaskResult
from firstlight.lora.loading import LoadedModel
from firstlight.models import LlamaConfig, empty_model
from firstlight.tokenizer import Tokenizer, train_tokenizer

SEQ_LEN = 32


def make_model(folder: Path, tokenizer: Tokenizer, seed: int, context: int = 64) -> LoadedModel:
    config = LlamaConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=context,
    )
    model = empty_model(config).eval()
    draw_weights(model, seed, 0.4)
    return LoadedModel(model, tokenizer, (), folder, trained_on={})


@pytest.fixture
def before(tmp_path: Path, tokenizer: Tokenizer) -> LoadedModel:
    return make_model(tmp_path / "before", tokenizer, 0)


@pytest.fixture
def after(tmp_path: Path, tokenizer: Tokenizer) -> LoadedModel:
    return make_model(tmp_path / "after", tokenizer, 1)


@pytest.fixture(scope="module")
def other_tokenizer(texts: list[str]) -> Tokenizer:
    return train_tokenizer(texts, 280)


@pytest.fixture
def text(tmp_path: Path, texts: list[str]) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(texts[:4]) + "ü 🙂 日本\n", encoding="utf-8")
    return path


def scored(document: int, segments: list[str], *bits: Any) -> Row:
    edges = np.cumsum([0, *map(len, segments)], dtype=np.int32)
    return Row(document, "".join(segments), edges, bits=[np.array(own, float) for own in bits])


@torch.no_grad()
def slow_bits(loaded: LoadedModel, ids: list[int]) -> float:
    """Bits of a row, with a separate forward pass for each token."""
    assert loaded.tokenizer is not None
    context = [loaded.tokenizer.separator_id, *ids]
    bits = 0.0
    for position, token in enumerate(ids, start=1):
        logits = loaded.model(torch.tensor([context[:position]]))[0, -1].double()
        bits -= float(logits.log_softmax(-1)[token]) / math.log(2)
    return bits


# Rows and segments


def test_rows_of_equal_tokenizers_have_tokens_as_segments(
    before: LoadedModel, after: LoadedModel, tokenizer: Tokenizer
) -> None:
    text = "the bird sings\n🙂 and  falls "
    (row,) = rows_of("text", [text], [before, after], SEQ_LEN)
    assert "".join(row.segments) == text
    assert row.text == text
    tokens = [tokenizer.decode([one]) for one in row.ids[0].tolist()]
    # The emoji has several tokens, which have no edge within the character.
    assert [one for one in tokens if "\ufffd" not in one] == [
        one for one in row.segments if "🙂" not in one
    ]
    assert sum("🙂" in one for one in row.segments) == 1
    assert row.counts[0].tolist() == row.counts[1].tolist()
    assert row.counts[0][-1] == len(tokens)


def test_rows_of_different_tokenizers_cover_text_and_share_edges(
    before: LoadedModel, tmp_path: Path, texts: list[str], other_tokenizer: Tokenizer
) -> None:
    other = make_model(tmp_path / "other", other_tokenizer, 1, context=48)
    rows = rows_of("text", texts[:3], [before, other], 24)
    for number, text in enumerate(texts[:3]):
        own = [row for row in rows if row.document == number]
        assert "".join(segment for row in own for segment in row.segments) == text
        for index, loaded in enumerate((before, other)):
            assert loaded.tokenizer is not None
            ids = [token for row in own for token in row.ids[index]]
            assert ids == loaded.tokenizer.encode(text)
    for row in rows:
        for loaded, row_ids, counts in zip((before, other), row.ids, row.counts, strict=True):
            assert 0 < len(row_ids) <= 24
            assert loaded.tokenizer is not None
            decode = loaded.tokenizer.decode
            pieces = [decode(row_ids[a:b].tolist()) for a, b in itertools.pairwise(counts)]
            assert pieces == row.segments
    # Rows are as long as they can be: the next segment would not fit.
    assert max(len(ids) for row in rows for ids in row.ids) >= 22


def test_rows_of_long_document_are_those_of_one_encoding(
    before: LoadedModel, tmp_path: Path, texts: list[str], other_tokenizer: Tokenizer
) -> None:
    # Longer than the pieces in which documents are encoded.
    text = "".join(texts)
    text *= 600_000 // len(text)
    other = make_model(tmp_path / "other", other_tokenizer, 1)
    rows = rows_of("text", [text], [before, other], None)
    assert "".join(row.text for row in rows) == text
    assert {row.document for row in rows} == {0}
    for index, loaded in enumerate((before, other)):
        assert loaded.tokenizer is not None
        assert [token for row in rows for token in row.ids[index]] == loaded.tokenizer.encode(text)


def test_rows_take_little_memory(before: LoadedModel, after: LoadedModel, texts: list[str]) -> None:
    text = "".join(texts)
    text *= 600_000 // len(text)
    tracemalloc.start()
    try:
        rows = rows_of("text", [text], [before, after], None)
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    tokens = sum(len(row.ids[0]) for row in rows)
    # A segment of one token takes 20 bytes, and bytes of its text. Lists of Python objects would
    # take more than 200.
    assert kept < 50 * tokens
    assert peak < 500 * tokens


def test_rows_of_real_tokenizers_cover_spaces_and_characters_of_several_tokens(
    shared: Path, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    text = "  two  spaces\n\n\tTab 🙂 日本語 naïve e\u0301 “quotes” \r\nend  \n" * 3
    names = ("gpt2-tokenizer", "llama2-tokenizer", "llama3-tokenizer")
    real = [Tokenizer.from_pretrained(shared / "models" / name) for name in names]
    model = make_model(tmp_path, tokenizer, 0)
    models = [dataclasses.replace(model, tokenizer=one) for one in (*real, tokenizer)]
    for pair in itertools.combinations_with_replacement(models, 2):
        rows = rows_of("text", [text], pair, None)
        assert "".join(segment for row in rows for segment in row.segments) == text
        for index, loaded in enumerate(pair):
            assert loaded.tokenizer is not None
            ids = [token for row in rows for token in row.ids[index]]
            assert ids == loaded.tokenizer.encode(text)


def test_rows_seq_len_beyond_context_raises_data_error(
    before: LoadedModel, after: LoadedModel
) -> None:
    with pytest.raises(DataError, match="seq_len 65 exceeds the model's context of 64"):
        rows_of("text", ["a"], [before, after], 65)


def test_rows_text_without_token_names_document_model_and_character(
    before: LoadedModel, tmp_path: Path
) -> None:
    words = {"<unk>": 0, "the": 1, "bird": 2}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    unknowing = Tokenizer(backend, eos_token="<unk>")
    other = make_model(tmp_path / "other", unknowing, 0)
    (row,) = rows_of("text", ["the  bird "], [before, other], None)
    assert "".join(row.segments) == "the  bird "
    with pytest.raises(InputError, match=r"text: document 2 can't be .*other: .* for 'cat'"):
        rows_of("text", ["the bird", "the cat"], [before, other], None)


def test_rows_keep_characters_that_normalizer_composes(
    before: LoadedModel, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    backend.normalizer = tokenizers.normalizers.NFC()  # as in Qwen 2
    composing = Tokenizer(backend, eos_token=tokenizer.eos_token, bos_token=tokenizer.bos_token)
    other = make_model(tmp_path / "other", composing, 0)
    text = "the cafe\u0301 e\u0323\u0301 \u1112\u1161\u11ab bird"
    (row,) = rows_of("text", [text], [before, other], None)
    assert "".join(row.segments) == text
    assert row.ids[1].tolist() == composing.encode(text)
    # There is no edge within the characters that become one token.
    assert {"e\u0301", "e\u0323", "\u1112\u1161\u11ab"} <= set(row.segments)


def test_rows_segment_longer_than_row_raises_input_error(
    before: LoadedModel, tmp_path: Path
) -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "ab" * 20: 1}, "<s>"))
    other = make_model(tmp_path / "other", Tokenizer(backend, eos_token="<s>"), 0)
    with pytest.raises(InputError, match=r"document 1 has a piece of .* longer than a row"):
        rows_of("text", ["ab" * 20], [before, other], 4)


# Losses


def test_compare_bits_match_slow_loop_for_both_tokenizers(
    before: LoadedModel, tmp_path: Path, text: Path, other_tokenizer: Tokenizer
) -> None:
    other = make_model(tmp_path / "other", other_tokenizer, 1)
    found = compare(before, other, texts=text, seq_len=SEQ_LEN, batch_size=3)
    assert not found.same_tokenizer
    (value,) = found.texts
    documents = documents_of(str(text))
    size = sum(len(document.encode()) for document in documents)
    rows = rows_of("text", documents, [before, other], SEQ_LEN)
    assert (value.bytes, value.units, value.unit) == (size, len(rows), "row")
    for index, (loaded, one) in enumerate(((before, value.before), (other, value.after))):
        expected = sum(slow_bits(loaded, row.ids[index].tolist()) for row in rows) / size
        assert one.value == pytest.approx(expected, rel=1e-5)


def test_compare_model_with_itself_has_no_difference(before: LoadedModel, text: Path) -> None:
    found = compare(before, before, texts=[text], seq_len=SEQ_LEN)
    assert found.same_tokenizer
    assert found.texts[0].difference == Metric(0.0, 0.0)
    assert found.worse == found.better == []


def test_compare_tokenizer_with_more_special_tokens_is_the_same(
    before: LoadedModel, after: LoadedModel, text: Path, tokenizer: Tokenizer
) -> None:
    chat = dataclasses.replace(after, tokenizer=tokenizer.extended(["<|im_start|>"]))
    for pair in ((before, chat), (chat, before)):
        assert compare(*pair, texts=[text], sample=1).same_tokenizer


def test_compare_sample_evaluates_few_rows(
    before: LoadedModel, after: LoadedModel, text: Path
) -> None:
    few = compare(before, after, texts=text, seq_len=SEQ_LEN, sample=3, seed=1)
    assert [one.units for one in few.texts] == [3]
    again = compare(before, after, texts=text, seq_len=SEQ_LEN, sample=3, seed=1)
    assert again == few


# Errors of differences


def test_paired_error_of_rows_is_that_of_their_differences() -> None:
    rows = [
        scored(0, ["ab", "cd"], [3, 5], [4, 5]),  # 1 bit more
        scored(0, ["abcd"], [20], [22]),  # 2 bits more
        scored(1, ["ab", "ü"], [1, 1], [2, 3]),  # 3 bits more; ü has two bytes
    ]
    compared = compare_rows("text", rows)
    assert (compared.bytes, compared.unit, compared.units) == (12, "row", 3)
    assert compared.before.value == 30 / 12
    assert compared.after.value == 36 / 12
    assert compared.difference.value == 6 / 12
    # The rows differ by -1, 0 and 1 bits from the mean of 2: sqrt(3/2 * 2) / 12.
    assert compared.difference.stderr == pytest.approx(math.sqrt(3) / 12)
    # Their own errors are much larger: 8, 20 and 2 bits, around 10.
    assert compared.before.stderr == pytest.approx(math.sqrt(3 / 2 * (4 + 100 + 64)) / 12)


def test_paired_error_of_many_documents_is_over_documents() -> None:
    rows = [
        scored(document, ["ab"], [1.0], [1.0 + document % 2])
        for document in range(30)
        for _ in range(2)
    ]
    found = compare_rows("text", rows)
    assert (found.unit, found.units, found.bytes) == ("document", 30, 120)
    # Documents of 4 bytes differ by 0 or 2 bits, around 1.
    assert found.difference.value == 30 / 120
    expected = math.sqrt(30 / 29 * 30) / 120
    assert found.difference.stderr == pytest.approx(expected)


def test_paired_error_of_one_row_is_unknown() -> None:
    found = compare_rows("text", [scored(0, ["ab"], [1], [2])])
    assert found.difference == Metric(0.5, None)
    assert found.cells()[-1] == "1 row"


def test_paired_error_of_scores_is_over_items() -> None:
    def result(scores: list[float], mean: float, loss: float) -> TaskResult:
        metrics = {"acc": Metric(mean, 0.25), "perplexity": Metric(loss, None)}
        return TaskResult("t", metrics, 4, item_scores={"acc": scores, "perplexity": [1.0] * 4})

    before, after = result([1, 0, 0, 1], 0.5, 3.0), result([1, 1, 0, 1], 0.75, 5.0)
    acc, perplexity = compare_scores([before], [after])
    assert isinstance(acc, ComparedValue)
    assert (acc.name, acc.difference.value, acc.units, acc.unit) == ("t acc", 0.25, 4, "item")
    assert acc.cells() == ["t acc", "0.50 ± 0.25", "0.75 ± 0.25", "+0.25 ± 0.25", "4 items"]
    # Differences of the items: 0, 1, 0, 0.
    assert acc.difference.stderr == pytest.approx(0.25)
    # Its value is not the mean over the items.
    assert perplexity.difference == Metric(2.0, None)


def test_scores_of_task_group_have_no_units() -> None:
    result = TaskResult("group", {"acc": Metric(0.5, 0.1)}, None)
    (found,) = compare_scores([result], [result])
    assert found.units is None
    assert found.cells()[-1] == ""


# Passages


def test_passages_mark_fewest_segments_with_half_of_the_difference() -> None:
    segments = ["the ", "old ", "king ", "of ", "Spain"]
    row = scored(2, segments, [1, 1, 1, 1, 1], [2, 4, 7, 0, 2])
    (worse,) = passages_of({"a": [row]}, 5, sign=1)
    assert (worse.text, worse.document, worse.difference) == ("a", 3, 10.0)
    # The segments that got worse did so by 1 + 3 + 6 + 1 bits, half of which is 5.5.
    assert [one.text for one in worse.segments if one.marked] == ["king "]
    assert passages_of({"a": [row]}, 5, sign=-1) == []
    better = scored(0, segments, [1, 1, 1, 1, 1], [0, 1, 0, 0, 3])
    (found,) = passages_of({"a": [better]}, 5, sign=-1)
    assert found.difference == -1.0
    assert [one.text for one in found.segments if one.marked] == ["the ", "king "]


def test_passages_are_sorted_limited_and_end_at_lines() -> None:
    segments = ["x" * 150, "\n", "y" * 160, "\n", "z" * 330, "end"]
    row = scored(0, segments, [0.0] * 6, [1, 0, 2, 0, 5, 4])
    found = passages_of({"a": [row]}, 3, sign=1)
    assert [one.difference for one in found] == [5.0, 4.0, 3.0]
    assert ["".join(s.text for s in one.segments) for one in found] == [
        "z" * 330,
        "end",
        "x" * 150 + "\n" + "y" * 160 + "\n",
    ]


# What to compare on


def test_compare_without_texts_uses_validation_text_of_runs(
    recipe: dict[str, Any], before: LoadedModel, data: Path
) -> None:
    run = train(recipe | {"schedule": {"max_steps": 1}})
    found = compare(before, run.checkpoint)
    assert [one.name for one in found.texts] == [str(data)]
    assert found.texts[0].bytes == 4302
    # `evaluate` also counts the end of each document, and continues rows across documents.
    expected = evaluate(run.checkpoint).bits_per_byte
    assert found.texts[0].after.value == pytest.approx(expected, rel=0.1)


def test_compare_runs_on_copies_of_same_data_lists_validation_text_once(
    recipe: dict[str, Any], data: Path, tmp_path: Path
) -> None:
    runs = []
    for name in ("one", "two"):
        shutil.copytree(data, tmp_path / name / "data")
        recipe["run"]["dir"] = str(tmp_path / name / "run")
        recipe["data"]["dir"] = str(tmp_path / name / "data")
        runs.append(train(recipe | {"schedule": {"max_steps": 1}}).checkpoint)
    assert [one.name for one in compare(*runs).texts] == [str(tmp_path / "one" / "data")]


def test_compare_without_texts_includes_kept_text_and_names_missing_text(
    recipe: dict[str, Any],
    before: LoadedModel,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    old = tmp_path / "run" / "kept"
    (tmp_path / "old.txt").write_text("".join(f"the moon and {n}\n\n" * 9 for n in range(99)))
    tokenizer = Tokenizer.from_pretrained(data)
    prepare([tmp_path / "old.txt"], tokenizer, old, val_fraction=0.5)
    recipe["run"]["dir"] = str(tmp_path / "run")
    shutil.copytree(data, tmp_path / "new")
    recipe["data"] |= {"dir": str(tmp_path / "new"), "keep": str(old)}
    start = train(recipe | {"run": {"dir": str(tmp_path / "first")}, "schedule": {"max_steps": 1},
                            "data": recipe["data"] | {"keep": None}})  # fmt: skip
    run = train(recipe | {"schedule": {"max_steps": 1}}, init_from=start.checkpoint)
    found = compare(before, run.checkpoint)
    assert [one.name for one in found.texts] == [str(tmp_path / "new"), f"kept text in {old}"]
    assert found.texts[1].bytes == sum(len(one.encode()) for one in documents_of(str(old)))
    # The run folder is moved, and the new text is deleted.
    moved = (tmp_path / "run").rename(tmp_path / "moved")
    shutil.rmtree(tmp_path / "new")
    checkpoint = next((moved / "checkpoints").iterdir())
    capsys.readouterr()
    again = compare(before, checkpoint)
    assert [one.name for one in again.texts] == [f"kept text in {moved / 'kept'}"]
    gone = f"the held-out text of {tmp_path / 'new'} was moved or deleted"
    assert capsys.readouterr().err == f"not compared: {gone}; name it with --text to include it\n"
    with pytest.raises(ConfigError, match=f"^{re.escape(gone)}: add data to compare"):
        compare(before, start.checkpoint)


@pytest.mark.parametrize(
    ("before", "after", "difference", "error", "said"),
    [
        (2.0, 1.0, -1.0, 0.1, "50% fewer bits for a"),
        (2.0, 1.9, -0.1, 0.1, "5.0% fewer bits for a (within twice the standard error)"),
        (2.0, 2.0, 0.0, 0.0, "the same number of bits for a"),
        (2.0, 2.0, 1e-6, 1e-6, "the same number of bits for a"),
        (2.0, 1.0, -1.0, None, "50% fewer bits for a (a single row, too little to know the error)"),
    ],
)
def test_compared_value_in_words_tells_doubtful_changes(
    before: float, after: float, difference: float, error: float | None, said: str
) -> None:
    values = Metric(before, None), Metric(after, None), Metric(difference, error)
    assert ComparedValue("a", *values, unit="row", units=1).in_words == said


def test_compare_conversations_names_options_that_take_them(
    before: LoadedModel, after: LoadedModel, tmp_path: Path
) -> None:
    write_lines(tmp_path / "chats.jsonl", draw_records(2))
    with pytest.raises(InputError, match=r"chats\.jsonl:1: conversations, not text: .*--prompts"):
        compare(before, after, texts=tmp_path / "chats.jsonl")


def test_compare_prepared_folder_equals_its_texts(
    before: LoadedModel, after: LoadedModel, tmp_path: Path, tokenizer: Tokenizer, corpus: Path
) -> None:
    prepare([corpus], tokenizer, tmp_path / "prepared", val_fraction=0.999)
    documents = documents_of(str(tmp_path / "prepared"))
    assert set(documents) < set(documents_of(str(corpus)))
    assert len(documents) > 100


def test_compare_nothing_given_names_options(before: LoadedModel, after: LoadedModel) -> None:
    with pytest.raises(ConfigError, match="--text FILE, --tasks TASK or --prompt TEXT"):
        compare(before, after)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"texts": "missing.txt"}, "missing.txt"),
        ({"prompts": "a", "sample": 0}, "sample must be at least 1, not 0"),
        ({"prompts": "a", "items": 5}, "items applies to tasks, and none are given"),
        ({"prompts": "a", "sample": 5}, "sample applies to texts, and none are given"),
        ({"prompts": "a", "max_new_tokens": 0}, "max_new_tokens"),
        ({"prompts": "a", "passages": -1}, "passages must be at least 0, not -1"),
        ({"prompts": "a", "seed": -1}, "seed must be at least 0, not -1"),
        ({"prompts": "a", "chat_template": False}, "chat_template applies to tasks"),
    ],
)
def test_compare_bad_argument_raises_error(
    options: dict[str, Any], said: str, before: LoadedModel, after: LoadedModel
) -> None:
    with pytest.raises(FirstlightError, match=said):
        compare(before, after, **options)


def test_compare_blank_and_binary_texts_raise_input_error(tmp_path: Path) -> None:
    (tmp_path / "blank.txt").write_text(" \n", encoding="utf-8")
    with pytest.raises(InputError, match="contains no text"):
        documents_of(str(tmp_path / "blank.txt"))
    (tmp_path / "bad.jsonl").write_text(json.dumps({"text": 1}) + "\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"bad.jsonl:1: the text is int"):
        documents_of(str(tmp_path / "bad.jsonl"))


@pytest.mark.parametrize("options", [{"seq_len": 65}, {"prompts": "the bird " * 99}])
def test_compare_bad_input_is_reported_before_tasks_and_losses(
    options: dict[str, Any], before: LoadedModel, after: LoadedModel, text: Path, tmp_path: Path
) -> None:
    items = tmp_path / "items.jsonl"
    items.write_text(json.dumps({"ctx": "a", "endings": ["b", "c"], "label": 0}), encoding="utf-8")
    progress: list[int] = []
    options = {"tasks": f"hellaswag,{items}", **options}
    with pytest.raises(FirstlightError, match="context of 64"):
        compare(
            before, after, texts=text, on_progress=lambda done, _: progress.append(done), **options
        )
    assert progress == []


def test_compare_answers_are_greedy_and_need_no_template(
    before: LoadedModel, after: LoadedModel
) -> None:
    found = compare(before, after, prompts=["the bird", "a star"], max_new_tokens=6)
    assert [one.prompt for one in found.answers] == ["the bird", "a star"]
    assert found.texts == []
    again = compare(after, before, prompts="the bird", max_new_tokens=6)
    assert (again.answers[0].before, again.answers[0].after) == (
        found.answers[0].after,
        found.answers[0].before,
    )

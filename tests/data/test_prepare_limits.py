"""Tests of preparing a part of the texts: a limited number of documents or tokens, validation
inputs, books without their licence, and random tokens instead of texts.
"""

from __future__ import annotations

import gzip
import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from firstlight.cli.prepare import prepare_command
from firstlight.data import encoding
from firstlight.data.chat import ChatOptions, prepare_chat
from firstlight.data.cleaning import without_gutenberg
from firstlight.data.corpus import TokenDataset
from firstlight.data.prepare import longest_prefix, prepare
from firstlight.data.shards import Shard
from firstlight.data.sources import SOURCES_NAME, find_sources
from firstlight.errors import ConfigError, InputError
from firstlight.tokenizer import formats
from tokenizer_files import tiny

TOKENIZER = tiny("tokenizer.json")


def write_jsonl(path: Path, texts: Sequence[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def contents(folder: Path) -> dict[str, bytes]:
    """Return the files of a prepared folder, without the names of its inputs."""
    files = (path for path in folder.iterdir() if path.name != SOURCES_NAME)
    return {path.name: path.read_bytes() for path in files}


def texts_of(folder: Path, split: str) -> list[str]:
    found = []
    for path in sorted(folder.glob(f"{split}-*.bin")):
        tokens, offsets = Shard(path).tokens(), Shard(path).offsets().tolist()
        spans = itertools.pairwise(offsets)
        found += [TOKENIZER.decode(tokens[start:stop].tolist()) for start, stop in spans]
    return found


def tokens_of(manifest: dict[str, Any]) -> dict[str, int]:
    return {split: entry["tokens"] for split, entry in manifest["splits"].items()}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write 300 documents of different lengths, with an invalid line before every tenth
    document."""
    generator = random.Random(7)
    words = "the light of stone and river é 日本 under winter".split()
    lines = []
    for number in range(300):
        if number % 10 == 0:
            lines.append("broken")
        text = " ".join(generator.choices(words, k=generator.randint(1, 80)))
        lines.append(json.dumps({"text": f"{number} {text}\n"}))
    path = tmp_path_factory.mktemp("corpus") / "a.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def unreadable(folder: Path) -> Path:
    """Create a file that raises an error when it is read."""
    (folder / "z.jsonl.gz").write_bytes(gzip.compress(b'{"text": "late"}\n' * 1000)[:-5])
    return folder / "z.jsonl.gz"


def test_prepare_max_documents_writes_first_documents_only(tmp_path: Path) -> None:
    texts = [f"document {number}\n" * 20 for number in range(12)]
    (tmp_path / "a.jsonl").write_text(f"broken\n{json.dumps({'text': texts[0]})}\n")
    write_jsonl(tmp_path / "b.jsonl", texts[1:])
    inputs = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    manifest = prepare(
        [*inputs, unreadable(tmp_path)], TOKENIZER, tmp_path / "out", max_documents=12
    )
    assert manifest["max_documents"] == 12
    assert manifest["documents"] == {"read": 13, "written": 12, "rejected": {"broken_json": 1}}
    prepare(inputs, TOKENIZER, tmp_path / "alone")
    one, other = contents(tmp_path / "out"), contents(tmp_path / "alone")
    assert one.pop("manifest.json") != other.pop("manifest.json")
    assert one == other
    # Nine documents are too few to hold one out, and their number is known before the split.
    manifest = prepare([*inputs, unreadable(tmp_path)], TOKENIZER, tmp_path / "9", max_documents=9)
    assert (manifest["split_by"], manifest["documents"]["written"]) == ("tail", 9)


@pytest.mark.parametrize("max_tokens, fraction", [(1000, 0.1), (2503, 0.25), (777, 0), (4, 0.5)])
def test_prepare_max_tokens_is_shared_by_both_splits(
    tmp_path: Path, corpus: Path, max_tokens: int, fraction: float
) -> None:
    out = tmp_path / "out"
    inputs = [corpus, unreadable(tmp_path)]
    manifest = prepare(inputs, TOKENIZER, out, val_fraction=fraction, max_tokens=max_tokens)
    assert manifest["max_tokens"] == max_tokens
    held_out = round(max_tokens * fraction)
    wanted = {"train": max_tokens - held_out, "val": held_out}
    for split, number in tokens_of(manifest).items():
        # A character of several bytes may take several tokens.
        assert number <= wanted[split] < number + 4
        texts = texts_of(out, split)
        entry = manifest["splits"][split]
        assert (entry["documents"], entry["text_bytes"]) == (
            len(texts),
            len("".join(texts).encode()),
        )
        if split == "val":
            assert entry["gzip_bytes"] == len(gzip.compress("".join(texts).encode(), 9))
    assert set(tokens_of(manifest)) == {split for split, number in wanted.items() if number}
    # All documents of a split except the last are complete.
    whole = [json.loads(line)["text"] for line in corpus.read_text().splitlines() if line[0] == "{"]
    for split in tokens_of(manifest):
        *before, last = texts_of(out, split)
        assert set(before) <= set(whole)
        assert any(text.startswith(last) for text in whole)
    documents = manifest["documents"]
    assert documents["read"] == documents["written"] + sum(documents["rejected"].values())


def test_prepare_limited_output_does_not_depend_on_worker_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, corpus: Path
) -> None:
    monkeypatch.setattr(encoding, "_BATCH_CHARACTERS", 700)
    monkeypatch.setattr(formats, "_PIECE_CHARACTERS", 100)
    for workers in (1, 2):
        prepare([corpus], TOKENIZER, tmp_path / f"{workers}", workers=workers, max_tokens=1500)
    monkeypatch.setattr(encoding, "_BATCH_CHARACTERS", 1 << 20)
    prepare([corpus], TOKENIZER, tmp_path / "3", workers=1, max_tokens=1500)
    one = contents(tmp_path / "1")
    assert set(one) >= {"rejected.jsonl", "train-00000.bin", "val-00000.bin"}
    assert contents(tmp_path / "2") == one
    # Documents that were read ahead, valid or not, do not affect the output.
    assert contents(tmp_path / "3") == one


def test_prepare_limited_long_text_fills_both_splits(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("the river of stone\n" * 4000, encoding="utf-8")
    out = tmp_path / "out"
    manifest = prepare([tmp_path / "book.txt"], TOKENIZER, out, max_tokens=2000)
    assert tokens_of(manifest) == {"train": 1800, "val": 200}
    assert manifest["documents"]["written"] == 1
    assert texts_of(out, "train")[0].startswith("the river of stone\nthe river")


def test_prepare_limit_above_corpus_size_changes_only_manifest(
    tmp_path: Path, corpus: Path
) -> None:
    prepare([corpus], TOKENIZER, tmp_path / "all")
    prepare([corpus], TOKENIZER, tmp_path / "out", max_tokens=10**9, max_documents=10**9)
    one, other = contents(tmp_path / "all"), contents(tmp_path / "out")
    assert json.loads(other.pop("manifest.json")) == {
        **json.loads(one.pop("manifest.json")),
        "max_tokens": 10**9,
        "max_documents": 10**9,
    }
    assert one == other


def test_prepare_limit_too_small_for_text_raises_config_error(tmp_path: Path, corpus: Path) -> None:
    with pytest.raises(ConfigError, match="max_tokens 1 leaves no room for text: raise it"):
        prepare([corpus], TOKENIZER, tmp_path / "out", max_tokens=1)
    with pytest.raises(ConfigError, match="max_tokens must be at least 1, not 0"):
        prepare([corpus], TOKENIZER, tmp_path / "out", max_tokens=0)
    with pytest.raises(ConfigError, match="max_documents must be at least 1, not 0"):
        prepare([corpus], TOKENIZER, tmp_path / "out", max_documents=0)
    assert list(tmp_path.iterdir()) == []


@given(text=st.text(min_size=1, max_size=60), room=st.integers(0, 200))
def test_longest_prefix_is_as_long_as_token_limit_allows(text: str, room: int) -> None:
    def count(part: str) -> int:
        return len(part.encode("utf-8", "surrogatepass"))

    tokens = count(text)
    room %= tokens
    found = longest_prefix(text, room, tokens, count)
    assert text.startswith(found)
    assert count(found) <= room < count(text[: len(found) + 1])


def test_longest_prefix_with_later_merges_stays_below_token_limit() -> None:
    tokens = {"t": 1, "th": 1, "tha": 3, "thai": 2}
    assert longest_prefix("thai", 1, 2, tokens.__getitem__) == "th"
    tokens["thai"] = 4
    assert longest_prefix("thai", 2, 4, tokens.__getitem__) == "th"


# Project Gutenberg

_HEADER = "The Project Gutenberg EBook of X, by Y\r\n\r\nTitle: X\r\n\r\nLanguage: English\r\n\r\n"
_BOOK = "X\n\nBY Y\n\nChapter 1\n\nIt began.\n\n* * *\n\nThe end of the project was near."
_LICENCE = "\nSection 1. General Terms of Use\n*** END: FULL LICENSE ***\n"
_STARTS = [
    "*** START OF THE PROJECT GUTENBERG EBOOK X ***\n",
    "*** START OF THIS PROJECT GUTENBERG EBOOK X ***\r\n\r\n",
    "***START OF THE PROJECT GUTENBERG EBOOK X***\n\nE-text prepared by Z\nand a team\n\n",
    "*** START OF THIS PROJECT GUTENBERG EBOOK THE TRAGEDY OF X,\nPRINCE OF Y ***\n\n"
    "Produced by Z, HTML version\nby W.\n\n\n",
    "*** START OF THE PROJECT GUTENBERG ETEXT X\n\n",
    "*** START OF PROJECT GUTENBERG EBOOK 1 ***\n",
    "***START**THE SMALL PRINT!**FOR PUBLIC DOMAIN ETEXTS**START***\nWhy is this here?\n"
    "*END*THE SMALL PRINT! FOR PUBLIC DOMAIN ETEXTS*Ver.04.29.93*END*\n",
    "*END THE SMALL PRINT! FOR PUBLIC DOMAIN ETEXTS*Ver.02.11.02*END*\n",
]
_ENDS = [
    "*** END OF THE PROJECT GUTENBERG EBOOK X ***\n",
    "*** END OF THIS PROJECT GUTENBERG EBOOK X ***\r\n",
    "***END OF THE PROJECT GUTENBERG EBOOK X***\n",
    "End of Project Gutenberg's X, by Y\n\n*** END OF THIS PROJECT GUTENBERG EBOOK X ***\n",
    "End of the Project Gutenberg EBook of X, by Y\n\n",
    "End of this Project Gutenberg Etext of X\n",
    "END OF THE PROJECT GUTENBERG ETEXT OF X\n",
    "Ende dieses Projekt Gutenberg Etextes X\n",
]


@pytest.mark.parametrize("start", _STARTS)
def test_without_gutenberg_removes_every_header_format(start: str) -> None:
    text = f"{_HEADER}{start}{_BOOK}\n\n{_ENDS[0]}{_LICENCE}"
    assert without_gutenberg(text) == _BOOK + "\n"


@pytest.mark.parametrize("end", _ENDS)
def test_without_gutenberg_removes_every_licence_format(end: str) -> None:
    text = f"{_HEADER}{_STARTS[0]}\n\n{_BOOK}\n\n\n{end}{_LICENCE}"
    assert without_gutenberg(text) == _BOOK + "\n"


def test_without_gutenberg_text_without_markers_is_unchanged() -> None:
    quoted = 'The line "*** START OF THE PROJECT GUTENBERG EBOOK" comes first.\n'
    for text in ("", "  \n", _BOOK, f"{quoted}{_BOOK}\r\n ", _HEADER + _BOOK, _LICENCE):
        assert without_gutenberg(text) == text


def test_without_gutenberg_keeps_every_book_in_one_file() -> None:
    one = f"{_HEADER}{_STARTS[6]}First.\n\n{_ENDS[3]}{_LICENCE}"
    two = f"{_HEADER}{_STARTS[1]}Second.\n"  # A book without an end mark.
    three = f"{_STARTS[0]}Third.\n{_ENDS[0]}"
    found = without_gutenberg(one + two + three)
    assert found == "First.\n\n\nSecond.\n\n\nThird.\n"
    assert without_gutenberg(f"{_BOOK}\n{_ENDS[4]}\n{_STARTS[7]}\n") == _BOOK + "\n"
    assert without_gutenberg(f"{_HEADER}{_STARTS[0]}\n\n{_ENDS[0]}{_LICENCE}") == ""


def test_prepare_gutenberg_books_omit_header_and_licence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "books"
    folder.mkdir()
    (folder / "a.txt").write_text(f"{_HEADER}{_STARTS[0]}{_BOOK}\n{_ENDS[0]}{_LICENCE}")
    (folder / "b.txt").write_text("A letter.\n")
    (folder / "c.txt").write_text(f"{_HEADER}{_STARTS[0]}\n{_ENDS[0]}{_LICENCE}")
    TOKENIZER.save_pretrained(tmp_path / "tokenizer")
    out = tmp_path / "out"
    place = ["--tokenizer", str(tmp_path / "tokenizer"), "--out", str(out), "--val-fraction", "0"]
    prepare_command.main([str(folder), *place], standalone_mode=False)
    assert texts_of(out, "train") == [_BOOK + "\n", "A letter.\n"]
    manifest = json.loads((out / "manifest.json").read_text())
    one = {"documents": 1, "files": 1}
    assert manifest["cleaned"] == {"crlf": one, "gutenberg": one}
    assert manifest["documents"] == {"read": 3, "written": 2, "rejected": {"empty": 1}}
    said = capsys.readouterr().err
    assert "1 file: Project Gutenberg's header and licence removed (--as-is keeps them)" in said
    options = ["--as-is", "--strip-gutenberg", "--overwrite"]
    prepare_command.main([str(folder), *place, *options], standalone_mode=False)
    assert len(texts_of(out, "train")) == 3
    assert "cleaned" not in json.loads((out / "manifest.json").read_text())
    assert json.loads((out / SOURCES_NAME).read_text())["options"] == ["--as-is"]
    again = prepare([folder], TOKENIZER, out, val_fraction=0, strip_gutenberg=False, overwrite=True)
    assert again["cleaned"] == manifest["cleaned"]  # The argument of earlier versions.


# Validation inputs


@pytest.mark.parametrize("workers", [1, 2])
def test_prepare_validation_inputs_become_validation_split(tmp_path: Path, workers: int) -> None:
    texts, held = tmp_path / "texts", tmp_path / "texts" / "held.txt"
    texts.mkdir()
    (texts / "a.txt").write_text("one two three\n<|endoftext|>\nheld out\n<|endoftext|>\nfour")
    held.write_text("held out\n<|endoftext|>\nalso held out\n<|endoftext|>\nheld out")
    options: dict[str, Any] = {"val_inputs": [held], "workers": workers}
    manifest = prepare([texts], TOKENIZER, tmp_path / "out", **options)
    assert texts_of(tmp_path / "out", "val") == ["held out", "also held out"]
    assert texts_of(tmp_path / "out", "train") == ["one two three", "four"]
    assert (manifest["split_by"], manifest["documents"]["rejected"]) == ("files", {"duplicate": 2})
    read_by = json.loads((tmp_path / "out" / SOURCES_NAME).read_text())["options"]
    assert read_by == ["--val-input", "held.txt"]
    limits: dict[str, Any] = {"max_tokens": 2, "max_documents": 1, "overwrite": True}
    prepare([texts], TOKENIZER, tmp_path / "out", **options, **limits)
    assert texts_of(tmp_path / "out", "val") == ["held out", "also held out"]
    assert len(texts_of(tmp_path / "out", "train")) == 1


def test_prepare_validation_inputs_without_text_or_with_all_text_raise(tmp_path: Path) -> None:
    for name, text in (("a.txt", "a text"), ("b.txt", "a text"), ("c.txt", " ")):
        (tmp_path / name).write_text(text)
    for name, message in (("b.txt", "no text to train on"), ("c.txt", "inputs contain no")):
        with pytest.raises(InputError, match=message):
            prepare([tmp_path / "a.txt"], TOKENIZER, tmp_path / "out", val_inputs=[tmp_path / name])
    with pytest.raises(ConfigError, match=r"^val_inputs .* and val_fraction"):
        prepare(["a.txt"], TOKENIZER, tmp_path / "out", val_inputs=["b.txt"], val_fraction=0.2)
    with pytest.raises(ConfigError, match=r"^val_inputs .* and val_fraction"):
        prepare_chat(
            *(["a.jsonl"], TOKENIZER, tmp_path / "out"),
            val_inputs=["b.jsonl"],
            options=ChatOptions(val_fraction=0.2),
        )
    with pytest.raises(InputError, match="no text to train on other than the held-out text"):
        prepare([tmp_path / "a.txt"], TOKENIZER, tmp_path / "out", split_of=lambda _: "val")
    assert not (tmp_path / "out").exists()


# Random tokens


def test_prepare_random_tokens_have_requested_count_and_are_uniform(tmp_path: Path) -> None:
    manifest = prepare(["random:200k"], TOKENIZER, tmp_path / "a")
    assert tokens_of(manifest) == {"train": 180_000, "val": 20_000}
    dataset = TokenDataset(tmp_path / "a", "train")
    tokens = dataset[0 : dataset.num_tokens]
    starts = dataset.document_starts(slice(0, dataset.num_tokens))
    assert starts.tolist() == list(range(0, 180_000, 1024))
    eos = TOKENIZER.eos_token_id
    assert np.flatnonzero(tokens == eos).tolist() == [*(starts[1:] - 1), 180_000 - 1]
    counts = np.bincount(tokens[tokens != eos], minlength=TOKENIZER.vocab_size)
    plain = [i for i in range(TOKENIZER.vocab_size) if i not in TOKENIZER.special_token_ids]
    assert counts[list(TOKENIZER.special_token_ids)].sum() == 0
    mean = counts.sum() / len(plain)
    assert np.abs(counts[plain] - mean).max() < 6 * mean**0.5
    assert manifest["splits"]["train"]["text_bytes"] > 100_000


def test_prepare_random_tokens_depend_on_seed(tmp_path: Path) -> None:
    for name, drawn in (("a", "random:5000"), ("b", "random:5e3:0"), ("c", "random:5k:1")):
        prepare([drawn], TOKENIZER, tmp_path / name)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    one, other = contents(tmp_path / "a"), contents(tmp_path / "c")
    assert one["train-00000.bin"] != other["train-00000.bin"]
    manifest = prepare(["random:1"], TOKENIZER, tmp_path / "d", val_fraction=0)
    assert tokens_of(manifest) == {"train": 1}


@pytest.mark.parametrize(
    "inputs, arguments, error, message",
    [
        (
            ["random:"],
            {},
            InputError,
            (
                r"random: is not of the form random:TOKENS\[:SEED\]: use "
                r"for example"
            ),
        ),
        (["random:0"], {}, InputError, r"random:0 is not of the form random:TOKENS"),
        (["random:10:x"], {}, InputError, r"random:10:x is not of the form random:TOKENS"),
        (
            ["random:10", "stdlib"],
            {},
            InputError,
            (
                r"random:10 can't be combined with other "
                r"inputs"
            ),
        ),
        (["random:10"], {"max_tokens": 5}, ConfigError, "random:10 already specifies"),
    ],
)
def test_prepare_invalid_random_tokens_raise_and_leave_nothing(
    tmp_path: Path,
    inputs: list[str],
    arguments: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        prepare(inputs, TOKENIZER, tmp_path / "out", **arguments)
    with pytest.raises(InputError, match="use it as the only input of firstlight prepare"):
        find_sources(inputs)
    assert list(tmp_path.iterdir()) == []


def test_prepare_limits_accept_unit_suffixes(tmp_path: Path, corpus: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path / "tokenizer")
    place = ["--tokenizer", str(tmp_path / "tokenizer"), "--out", str(tmp_path / "out")]
    limits = ["--max-documents", "0.2k", "--max-tokens", "1k"]
    prepare_command.main([str(corpus), *place, *limits], standalone_mode=False)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert (manifest["max_documents"], manifest["max_tokens"]) == (200, 1000)
    assert sum(tokens_of(manifest).values()) in range(990, 1001)
    with pytest.raises(ConfigError, match="--max-documents, --max-tokens and --as-is are"):
        prepare_command.main(
            [str(corpus), *place, "--kind", "chat", "--max-tokens", "9"], standalone_mode=False
        )

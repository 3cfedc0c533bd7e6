"""What firstlight reads of an input, and that nothing is lost in silence."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from firstlight.data.contents import Document, contents_of, documents_of
from firstlight.data.formats import reading
from firstlight.data.prepare import prepare
from firstlight.errors import InputError
from firstlight.tokenizer import train_tokenizer

_IMAGE = b"\x89PNG\r\n" + bytes(range(32))
_ADVICE = "an image: exclude it, or extract its text with tesseract"


@pytest.fixture(autouse=True)
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with files of six kinds, two of which can't be read."""
    monkeypatch.setenv("FIRSTLIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    folder = Path("in")
    folder.mkdir()
    (folder / "a.txt").write_text("word " * 400)
    (folder / "b.jsonl").write_text('{"text": "One"}\n{"text": 3}\n{"text": "Two"}\n')
    (folder / "c.ipynb").write_text(json.dumps({"cells": [{"source": "A note"}]}))
    (folder / "d.ipynb").write_text("no JSON")
    (folder / "e.png").write_bytes(_IMAGE)
    zipfile.ZipFile(folder / "g.zip", "w").close()
    with zipfile.ZipFile(folder / "z.zip", "w") as archive:
        archive.writestr("f/a.txt", "A text")
        archive.writestr("f/b.jsonl", '{"text": "Three"}\n{"text": "Four"}\n')
        archive.writestr("x.png", _IMAGE)
    return folder


def test_contents_count_kinds_and_name_what_is_left_out() -> None:
    found = contents_of("in")
    assert [(one.kind, one.files, one.documents, one.text_bytes) for one in found.kinds] == [
        (".txt", 1, 1, 2000),
        ("archive", 1, 3, 15),
        (".jsonl", 1, 2, 6),
        ("notebook", 1, 1, 6),
    ]
    assert sum(one.share for one in found.kinds) == pytest.approx(1.0)
    assert found.kinds[0].share == 2000 / 2027
    left_out = {(one.place, one.left_out.partition(" (")[0]) for one in found.left_out}
    assert left_out == {
        ("in/b.jsonl:2", "the text is int, not a string"),
        ("in/d.ipynb", "it is not a notebook, or is damaged: replace it"),
        ("in/e.png", f"{_ADVICE} in/e.png in/e"),
        ("in/g.zip", "it contains no documents: exclude it"),
        ("in/z.zip", "x.png: an image"),
    }
    assert all(one.left_out and not one.text for one in found.left_out)


def test_passages_are_whole_words_and_depend_on_the_seed() -> None:
    Path("in/a.txt").write_text(" ".join(f"word{number}" for number in range(1000)))
    passages = [contents_of("in/a.txt", seed=seed).kinds[0].passages for seed in (0, 0, 1)]
    assert passages[0] == passages[1] != passages[2]
    words = passages[0][0].text.split()
    first = int(words[0].removeprefix("word"))
    assert words == [f"word{first + number}" for number in range(len(words))]
    assert 300 < len(passages[0][0].text) <= 400


def test_passages_are_limited_and_drawn_from_all_documents() -> None:
    Path("in/b.jsonl").write_text("".join(f'{{"text": "t{n}"}}\n' for n in range(50)))
    drawn = set()
    for seed in range(30):
        [kind] = contents_of("in/b.jsonl", seed=seed, passages=2).kinds
        assert len(kind.passages) == 2
        drawn |= {int(one.text[1:]) for one in kind.passages}
    assert max(drawn) > 40
    assert len(drawn) > 25


@pytest.mark.parametrize("file", ["b.jsonl", "in/b.jsonl"])
def test_documents_of_file_have_every_place(file: str) -> None:
    assert list(documents_of("in", file)) == [
        Document("in/b.jsonl:1", "One"),
        Document("in/b.jsonl:2", "", "the text is int, not a string"),
        Document("in/b.jsonl:3", "Two"),
    ]


@pytest.mark.parametrize("item", ["in", "in/z.zip"])
def test_documents_of_member_are_found_in_archives(item: str) -> None:
    assert list(documents_of(item, "f/a.txt")) == [Document("in/z.zip, f/a.txt", "A text")]
    assert [one.text for one in documents_of(item, "f/b.jsonl")] == ["Three", "Four"]
    [image] = documents_of(item, "x.png")
    assert image.left_out == "x.png: an image"


def test_documents_of_unknown_file_name_the_nearest() -> None:
    with pytest.raises(InputError, match=r"in contains no file f/c\.txt.*did you mean 'f/a\.txt'"):
        list(documents_of("in", "f/c.txt"))


def test_prepare_lists_each_document_that_a_reader_left_out() -> None:
    tokenizer = train_tokenizer(["word " * 50], 260)
    tokenizer.save_pretrained(Path("tokenizer"))
    manifest = prepare(["in"], Path("tokenizer"), Path("out"), val_fraction=0.0)
    entries = map(json.loads, Path("out/rejected.jsonl").read_text().splitlines())
    found = [(one["file"], one["detail"]) for one in entries if one["reason"] == "unreadable"]
    assert found == [
        ("in/d.ipynb", "it is not a notebook, or is damaged: replace it"),
        ("in/g.zip", "it contains no documents: exclude it"),
        ("in/z.zip", "x.png: an image"),
    ]
    assert manifest["documents"]["rejected"] == {"no_text": 1, "unreadable": 3}
    assert manifest["documents"]["read"] == 7 + 4


def test_read_all_names_documents_without_readable_parts() -> None:
    with zipfile.ZipFile("in/y.zip", "w") as archive:
        archive.writestr("x.png", _IMAGE)
    [line] = reading.read_all([Path("in/y.zip"), Path("in/c.ipynb")])
    assert line == "read 1 notebook; left out 1: in/y.zip: x.png: an image"

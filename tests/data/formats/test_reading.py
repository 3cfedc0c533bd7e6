"""Documents that are not plain text as sources: limits, the cache, and messages."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import zipfile
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from firstlight.data.formats import reading
from firstlight.data.formats.registry import FORMATS, Format
from firstlight.data.records import read_documents
from firstlight.data.sources import find_sources, listed, text_size, unread_files
from firstlight.errors import InputError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("FIRSTLIGHT_CACHE", str(folder))
    return folder


def notebook(path: Path, *texts: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"cells": [{"source": text} for text in texts]}))
    return path


def test_documents_have_text_file_and_place(tmp_path: Path) -> None:
    notebook(tmp_path / "in/a.ipynb", "some text")
    (tmp_path / "in/b.html").write_text("<p>a page</p>")
    (tmp_path / "in/c.html").write_text("<script>x</script>")
    (tmp_path / "in/d.txt").write_text("plain")
    found = list(read_documents(find_sources([tmp_path / "in"])))
    assert [one.value for one in found] == ["some text", "a page", None, "plain"]
    assert [one.place for one in found[:2]] == [f"{tmp_path}/in/a.ipynb", f"{tmp_path}/in/b.html"]
    error = found[2].error
    assert error is not None
    assert error.reason == "unreadable"
    assert "has no text" in str(error)


def test_read_all_counts_documents_and_names_those_left_out(tmp_path: Path) -> None:
    paths = [notebook(tmp_path / f"{number}.ipynb", "text") for number in range(3)]
    (tmp_path / "p.html").write_text("<body></body>")
    plain = tmp_path / "plain.txt"
    plain.write_text("text")
    [line] = reading.read_all([*paths, tmp_path / "p.html", plain, None])
    assert line.startswith(f"read 3 notebooks; left out 1: {tmp_path}/p.html: the page has no text")
    assert reading.read_all([plain]) == []


def test_read_all_counts_mails_and_what_is_left_out_of_a_file(tmp_path: Path) -> None:
    mails = tmp_path / "a.mbox"
    parts = "Content-Type: multipart/mixed; boundary=b\n\n" + "--b\n\n\n" * 1001
    one = "From a Mon Mar  1 10:00:00 2021\nFrom: a\n\nHello\n\n"
    mails.write_text(f"{one}From b Mon Mar  1 11:00:00 2021\nFrom: b\n{parts}\n\n{one}")
    (tmp_path / "b.eml").write_text("From: c\nDate: Mon, 1 Mar 2021 10:00:00 +0000\n\nHi\n")
    (tmp_path / "c.ipynb").write_text("no JSON")
    [line] = reading.read_all([mails, tmp_path / "b.eml", tmp_path / "c.ipynb"])
    start, found, problems = line.partition("; left out 2: ")
    assert (start, bool(found)) == ("read 2 mails (4 messages)", True)
    assert problems == (
        f"{mails}: message 2: the mail has more than 1,000 parts; {tmp_path}/c.ipynb: it is not a "
        "notebook, or is damaged: replace it"
    )


def test_package_that_cannot_be_imported_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/lxml.py").write_text("raise ImportError('libxslt is missing')")
    (tmp_path / "p.html").write_text("<p>text</p>")
    monkeypatch.syspath_prepend(tmp_path / "broken")
    monkeypatch.delitem(sys.modules, "lxml", raising=False)
    with pytest.raises(InputError, match="lxml can't be imported \\(libxslt is missing\\): reinst"):
        reading.read_all([tmp_path / "p.html"])


def test_only_changed_files_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (notebook(tmp_path / f"{name}.ipynb", name) for name in "ab")
    reading.read_all([first, second])
    notebook(second, "changed")
    calls: list[Path] = []
    read = reading._read

    def counted(path: Path, *arguments: Any) -> Any:
        calls.append(path)
        return read(path, *arguments)

    monkeypatch.setattr(reading, "_read", counted)
    reading.read_all([first, second])
    assert calls == [second]
    assert list(reading.documents_in(second)) == [("", "changed", "")]
    assert list(reading.documents_in(first)) == [("", "a", "")]


def test_text_size_of_document_is_that_of_its_text(tmp_path: Path) -> None:
    path = notebook(tmp_path / "a.ipynb", "äö")
    [source] = find_sources([path])
    assert text_size(source) == path.stat().st_size
    reading.read_all([path])
    assert text_size(source) == 4


def test_zip_bomb_is_left_out_with_one_line(tmp_path: Path) -> None:
    path = tmp_path / "bomb.docx"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("word/document.xml", "<a>" + "<b/>" * 24_000_000 + "</a>")
    assert path.stat().st_size < 1_000_000
    [(_, text, problem)] = reading.documents_in(path)
    assert text == ""
    assert "too large" in problem or "MiB of memory" in problem
    assert "\n" not in problem


def test_document_that_exceeds_time_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "endless_reader.py"
    module.write_text("def read(path):\n    while True:\n        pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(FORMATS, ".endless", Format("endless", "endless_reader"))
    monkeypatch.setattr(reading, "_SECONDS", 0.2)
    path = tmp_path / "a.endless"
    path.touch()
    [(_, _, problem)] = reading.documents_in(path)
    assert problem.startswith("reading it takes more than 0.2 s of CPU time")
    assert not [
        name for _, _, names in os.walk(tmp_path / "cache") for name in names if "jsonl" in name
    ]


def test_error_of_a_reader_leaves_the_file_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_reader.py").write_text("def read(path):\n    yield '', 'x'\n    1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(FORMATS, ".broken", Format("broken", "broken_reader"))
    (tmp_path / "a.broken").touch()
    assert list(reading.documents_in(tmp_path / "a.broken")) == [
        ("", "x", ""),
        ("", "", "it is damaged (division by zero): replace it"),
    ]


@pytest.mark.parametrize("name", ["endless", "large"])
def test_documents_before_a_limit_are_kept_and_a_large_file_is_read_whole(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "endless_reader.py").write_text(
        "def read(path):\n    yield 'page 1', 'text'\n    yield 'page 2 is empty', ''\n"
        "    while True:\n        pass\n"
    )
    (tmp_path / "large_reader.py").write_text(
        "def read(path):\n    for number in range(50):\n        sum(range(1_000_000))\n"
        "        yield f'page {number + 1}', 'letters ' * 20_000\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(FORMATS, ".made", Format("made file", f"{name}_reader"))
    monkeypatch.setattr(reading, "_SECONDS", 0.5)
    path = tmp_path / "a.made"
    path.touch()
    [line] = reading.read_all([path, path])
    found = list(reading.documents_in(path))
    if name == "large":
        assert line == "read 2 made files (100 pages)"
        assert [place for place, _, _ in found] == [f"page {number}" for number in range(1, 51)]
    else:
        assert "left out 4: " in line
        assert found[0] == ("page 1", "text", "")
        assert found[1] == ("", "", "page 2 is empty")
        assert found[2][2] == (
            "only its beginning was read, because the whole takes more than 0.5 s of CPU time or "
            "300 MiB of memory: split it"
        )


def test_missing_reader_is_named_once_with_the_count_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a.pdf", "b.pdf", "c.docx", "d.png"):
        (tmp_path / name).write_bytes(b"\x00\x01")
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)
    unread = unread_files([tmp_path])
    assert [path.name for path in unread] == ["a.pdf", "b.pdf", "c.docx", "d.png"]
    assert listed({".pdf": 2, ".docx": 1, ".png": 1}) == (
        "2 .pdf, 1 .docx, 1 .png; pip install 'firstlight[documents]' reads 3 of them"
    )


def test_incomplete_text_in_the_cache_is_read_again(tmp_path: Path, cache: Path) -> None:
    path = notebook(tmp_path / "a.ipynb", "some text")
    reading.read_all([path])
    [stored] = cache.rglob("*.jsonl")
    stored.write_text("")
    assert list(reading.documents_in(path)) == [("", "some text", "")]


def test_interrupted_file_is_not_remembered_as_unreadable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    """An error about one file stops the readers of the others."""
    (tmp_path / "slow_reader.py").write_text(
        "import time\ndef read(path):\n    time.sleep(60)\n    yield '', 'text'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(FORMATS, ".slow", Format("slow", "slow_reader"))
    monkeypatch.setattr(reading, "usable_cpus", lambda: 2)
    (tmp_path / "b.slow").touch()
    with pytest.raises(InputError, match=r"gone\.slow can't be read"):
        read_then_fail(tmp_path, monkeypatch)
    assert not list(cache.rglob("*.json"))


def read_then_fail(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read two files in parallel, the first of which is removed before it is read."""
    paths = [folder / "gone.slow", folder / "b.slow"]
    paths[0].touch()
    read = reading._read

    def removed(path: Path, *arguments: Any) -> Any:
        if path == paths[0]:
            # Wait until the child has opened the file to which it writes.
            while not list((folder / "cache").rglob("*.jsonl.*")):
                Event().wait(0.01)
            path.unlink()
        return read(path, *arguments)

    monkeypatch.setattr(reading, "_read", removed)
    reading.read_all(paths)


def _mails(folder: Path) -> list[Path]:
    """Write a mail, and before it by name the reply that quotes it."""
    folder.mkdir()
    text = "Date: {} Mar 2021 10:00:00 +0000\nFrom: a@b.org\n\n{}\n\n-- \nAnn\n"
    (folder / "b.eml").write_text(text.format(1, "Where? When?"))
    (folder / "a.eml").write_text(text.format(2, "Here.\n\n> Where?\n> When?"))
    return sorted(folder.iterdir())


def _body(path: Path) -> str:
    [(_, text, _)] = reading.documents_in(path)
    return text.partition("\n\n")[2]


def test_mails_of_a_folder_repeat_nothing_until_the_earlier_one_is_removed(tmp_path: Path) -> None:
    reply, first = _mails(tmp_path / "in")
    reading.read_all([reply, first])
    assert _body(first) == "Where? When?\n\n-- \nAnn"
    assert _body(reply) == "Here."
    first.unlink()
    reading.read_all([reply])
    assert _body(reply) == "Here.\n\n> Where?\n> When?\n\n-- \nAnn"


def test_mails_of_a_folder_are_read_again_only_after_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = _mails(tmp_path / "in")
    (tmp_path / "other").mkdir()
    other = notebook(tmp_path / "other/a.ipynb", "text")
    calls: list[str] = []
    read = reading._read

    def counted(path: Path, *arguments: Any) -> Any:
        calls.append(path.name)
        return read(path, *arguments)

    monkeypatch.setattr(reading, "_read", counted)
    monkeypatch.setattr(reading, "usable_cpus", lambda: 1)
    reading.read_all([*paths, other])
    reading.read_all([*paths, other])
    assert calls == ["b.eml", "a.eml", "a.ipynb"]
    (tmp_path / "in/c.eml").write_text("From: a@b.org\nSubject: c\n\nNew.\n")
    reading.read_all([*paths, tmp_path / "in/c.eml", other])
    assert calls[3:] == ["c.eml", "b.eml", "a.eml"]


def test_read_all_counts_the_mails_of_an_mbox_that_is_not_in_order(tmp_path: Path) -> None:
    mail = "From - Mon Mar  1 10:00:00 2021\nDate: {} Mar 2021 10:00:00 +0000\n\nText {}.\n\n"
    path = tmp_path / "a.mbox"
    path.write_text("".join(mail.format(day, day) for day in (3, 1, 2)))
    plain = tmp_path / "plain.txt"
    plain.write_text("text")
    assert reading.read_all([path, plain]) == ["read 1 mail (3 messages)"]


def test_mail_that_needs_lxml_names_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lxml.py").write_text("raise ImportError")
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "a.eml"
    path.write_text("From: a@b.org\nSubject: c\nContent-Type: text/html\n\n<p>Text.\n")
    needed = "reading HTML mails needs the 'lxml' package: pip install 'firstlight[documents]'"
    assert list(reading.documents_in(path)) == [("", "", needed)]

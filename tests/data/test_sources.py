"""Tests of inputs: every kind is found in a fixed order, and each document is read or rejected with
file and line.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import json
import lzma
import os
import random
import subprocess
import sys
import sysconfig
import tracemalloc
import types
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from firstlight.data.records import (
    REASONS,
    Record,
    find_records,
    kind_of_records,
    read_documents,
    read_records,
)
from firstlight.data.sources import (
    DataSource,
    by_ending,
    distinct_inputs,
    find_sources,
    listed,
    neutral_name,
    note_on_inputs,
    unread_files,
    unread_lines,
)
from firstlight.errors import InputError, MissingDependencyError

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
zstandard = pytest.importorskip("zstandard")


def read(*inputs: str | Path, text_key: str = "text") -> list[Record]:
    return list(read_documents(find_sources(inputs), text_key))


def texts_of(*inputs: str | Path, text_key: str = "text") -> list[str]:
    found = read(*inputs, text_key=text_key)
    return [record.value for record in found if record.error is None]


def seen(records: Iterable[Record]) -> list[tuple[Any, ...]]:
    """Return (text, origin, line) for each document, and (origin, line, reason, detail) for each
    rejected record.
    """
    return [
        (r.value, r.origin, r.line)
        if r.error is None
        else (r.origin, r.line, r.error.reason, str(r.error))
        for r in records
    ]


def names(*inputs: str | Path) -> list[str]:
    return [source.name for source in find_sources(inputs)]


def reasons_of(*inputs: str | Path) -> list[tuple[int, str]]:
    return [(r.line, r.error.reason) for r in read(*inputs) if r.error is not None]


def jsonl(*texts: str) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def make_tree(root: Path, *files: str) -> None:
    for name in files:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"text of {name}\n", encoding="utf-8")


COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.compress,
}

_JAPANESE = (
    "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。何でも薄暗いじめじめした所で"
    "ニャーニャー泣いていた事だけは記憶している。吾輩はここで始めて人間というものを見た。\n"
) * 3
_CHINESE = (
    "天地玄黄，宇宙洪荒。日月盈昃，辰宿列张。寒来暑往，秋收冬藏。闰余成岁，律吕调阳。云腾致雨，露结为霜。\n"
) * 3
_KOREAN = "나랏말싸미 중국에 달아 문자와로 서로 사맛디 아니할세 이런 젼차로 어린 백성이.\n" * 5
_FRENCH = "Voilà où étaient brûlés, à côté, les mûriers âgés: été, août, forêt, goût.\n" * 2
_RUSSIAN = "Съешь же ещё этих мягких французских булок, да выпей чаю; а потом ещё.\n"
_UKRAINIAN = "Садок вишневий коло хати, хрущі над вишнями гудуть, плугатарі з плугами йдуть.\n"
_LITHUANIAN = (
    "Visi žmonės gimsta laisvi ir lygūs savo orumu ir teisėmis. Ąžuolas, šuo, žąsis.\n" * 3
)
_POLISH = "Zażółć gęślą jaźń, wieść o pchnięciu w tę łódź jeża i ośm skrzyń fig.\n" * 3
_GREEK = "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία, και τρέχω στην άκρη της πόλης.\n" * 3
_ARABIC = "نص حكيم له سر قاطع وذو شأن عظيم مكتوب على ثوب أخضر ومغلف بجلد أزرق.\n" * 3


# Finding


def test_neutral_name_removes_local_folders_and_secrets() -> None:
    names = {
        "/home/ada/acme/notes.txt": "notes.txt",
        "../acme/": "acme",
        "texts/notes.txt": "texts/notes.txt",
        "file:///home/ada/acme": "acme",
        "https://ada:hunter2@data.example.com:8000/corpus?key=1": "https://data.example.com:8000/corpus",
        "hf://datasets/a/b": "hf://datasets/a/b",
        "hf:a/b:c:train": "hf:a/b:c:train",
    }
    assert {item: neutral_name(item) for item in names} == names


def test_find_sources_folder_lists_text_files_in_fixed_order(tmp_path: Path) -> None:
    wanted = ["B.TXT", "a-b/z.txt", "a.md", "a/b.py", "a/c/d.jsonl", "a/c/d.jsonl.gz", "b.parquet"]
    make_tree(tmp_path, *reversed(wanted))
    make_tree(
        tmp_path, "a/data.png", "a/.hidden.txt", "a/~$x.txt", ".git/x.txt", "a/__pycache__/x.py"
    )
    make_tree(tmp_path, "node_modules/m/readme.md", "x.parquet.gz")
    for name in ("notes", "x.txt.bak"):
        (tmp_path / name).write_bytes(bytes(range(32)))
    assert names(tmp_path) == [str(tmp_path / name) for name in wanted]
    assert by_ending(unread_files([tmp_path])) == {"": 1, ".bak": 1, ".parquet.gz": 1, ".png": 1}


def test_unread_files_are_counted_by_suffix_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tree(tmp_path, "a.txt", "a.PPT", "b.ppt", "c.tar.zst", "d/e.png")
    make_tree(tmp_path, ".x.png", "d/.git/y.png")
    (tmp_path / "d" / "notes 1. draft").write_bytes(bytes(range(32)))
    monkeypatch.chdir(tmp_path)
    counts = {".ppt": 2, "": 1, ".png": 1, ".tar.zst": 1}
    assert list(by_ending(unread_files([".", "*", tmp_path / "d", "stdlib"])).items()) == list(
        counts.items()
    )
    os.mkfifo("d/pipe.p.txt")
    os.symlink("nowhere", "d/gone.p.txt")
    os.symlink("circle.p.txt", "circle.p.txt")
    assert by_ending(unread_files(["*.p*", "d"])) == {
        "broken link": 2,
        ".ppt": 1,
        ".png": 1,
        "": 1,
        "pipe": 1,
    }
    assert unread_files(["a.txt"]) == []
    assert listed(counts) == "2 .ppt, 1 without a suffix, 1 .png, 1 .tar.zst"


def test_listed_files_have_one_command_per_type_for_three_types() -> None:
    counts = {".gz": 9, ".pdf.gz": 4, ".bz2": 2, ".xz": 1, ".zst": 1}
    ways = {
        ".gz": "unpack them with gzip -dc < FILE.gz > FILE",
        ".bz2": "unpack them with bzip2 -dc < FILE.bz2 > FILE",
        ".xz": "unpack it with xz -dc < FILE.xz > FILE",
    }
    shown = [
        f"{count} {end}{f' ({ways[end]})' if end in ways else ''}" for end, count in counts.items()
    ]
    assert listed(counts) == ", ".join(shown)


def test_by_ending_part_of_compressed_file_name_is_not_a_suffix() -> None:
    names = ["changelog.Debian.gz", "a.amd64.gz", "b.pdf.gz", "c.tar.gz", "d.txt.gz"]
    assert by_ending([Path(name) for name in names]) == {
        ".gz": 2,
        ".pdf.gz": 1,
        ".tar.gz": 1,
        ".txt.gz": 1,
    }


def test_find_sources_compressed_text_needs_no_text_suffix(tmp_path: Path) -> None:
    text = b"some words\n" * 100
    texts = ["NEWS.xz", "README.gz", "THANKS.zst", "changelog.Debian.gz", "notes.bz2"]
    for name in texts:
        (tmp_path / name).write_bytes(COMPRESSORS[Path(name).suffix](text))
    others = {
        "binary.gz": gzip.compress(bytes(range(256))),
        "damaged.gz": gzip.compress(text)[:20],
        "not.gz": text,
        "page.html.gz": gzip.compress(b"<p>some words</p>"),
        "paper.pdf.gz": gzip.compress(b"%PDF-1.4"),
        "rows.json.gz": gzip.compress(b'[{"a": "b"}]'),
    }
    for name, content in others.items():
        (tmp_path / name).write_bytes(content)
    assert names(tmp_path) == [str(tmp_path / name) for name in texts]
    assert [file.name for file in unread_files([tmp_path])] == list(others)
    assert texts_of(tmp_path) == [text.decode()] * len(texts)
    with pytest.raises(
        InputError, match=r"unpack it with gzip -dc < \S+paper.pdf.gz > \S+paper.pdf "
    ):
        find_sources([tmp_path / "paper.pdf.gz"])


def test_unread_lines_give_path_and_reason(tmp_path: Path) -> None:
    make_tree(tmp_path, "a.ppt", "b.pdf", "b.txt")
    os.symlink("nowhere", tmp_path / "c")
    files = [tmp_path / name for name in ("a.ppt", "b.pdf", "b.txt", "c", "gone")]
    lines = [line.split("\t") for line in unread_lines(files).splitlines()]
    assert [path for path, _ in lines] == [str(file) for file in files]
    assert [reason for _, reason in lines] == [
        "a presentation: save it as PDF, and use that file",
        "no conversations",
        "no conversations",
        "a broken link",
        f"No such file or directory at {files[4]}",
    ]


def test_find_sources_folder_skips_non_regular_files(tmp_path: Path) -> None:
    make_tree(tmp_path, "real.txt")
    (tmp_path / "dangling.txt").symlink_to("nowhere")
    (tmp_path / "folder.txt").mkdir()
    os.mkfifo(tmp_path / "pipe.txt")
    assert names(tmp_path) == [str(tmp_path / "real.txt")]


def test_find_sources_file_reached_twice_is_read_once_at_first_place(tmp_path: Path) -> None:
    make_tree(tmp_path, "a.txt", "b.txt", "c.txt")
    (tmp_path / "link.txt").symlink_to("a.txt")
    inputs = [tmp_path / "b.txt", tmp_path, tmp_path / "*.txt", tmp_path / ".." / tmp_path.name]
    assert [Path(name).name for name in names(*inputs)] == ["b.txt", "a.txt", "c.txt"]


def test_find_sources_keeps_given_order(tmp_path: Path) -> None:
    make_tree(tmp_path, "a.txt", "b.txt")
    assert names(tmp_path / "b.txt", tmp_path / "a.txt") == [
        str(tmp_path / "b.txt"),
        str(tmp_path / "a.txt"),
    ]


def test_find_sources_double_star_crosses_folders(tmp_path: Path) -> None:
    make_tree(tmp_path, "a.txt", "x/b.txt", "x/y/c.txt", "x/d.png")
    assert names(f"{tmp_path}/*.txt") == [str(tmp_path / "a.txt")]
    assert names(f"{tmp_path}/**/*.txt") == [
        str(tmp_path / name) for name in ("a.txt", "x/b.txt", "x/y/c.txt")
    ]
    assert names(f"{tmp_path}/x/*") == [str(tmp_path / "x/b.txt")]
    assert names(f"{tmp_path}/?.txt") == [str(tmp_path / "a.txt")]


def test_find_sources_existing_name_with_brackets_is_not_a_glob(tmp_path: Path) -> None:
    make_tree(tmp_path, "part[1].txt", "part1.txt", "dir[1]/a.txt")
    assert names(tmp_path / "part[1].txt") == [str(tmp_path / "part[1].txt")]
    assert names(tmp_path / "dir[1]") == [str(tmp_path / "dir[1]/a.txt")]


def test_find_sources_expands_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tree(tmp_path, "a.txt")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert texts_of("~/a.txt") == ["text of a.txt\n"]
    assert texts_of("~/*.txt") == ["text of a.txt\n"]


def test_find_sources_stdlib_is_standard_library_without_tests() -> None:
    found = names("stdlib")
    assert found == sorted(found)
    assert {"stdlib/os.py", "stdlib/json/__init__.py", "stdlib/asyncio/events.py"} <= set(found)
    parts = {part for name in found for part in name.split("/")}
    assert not parts & {"test", "tests", "idle_test", "site-packages", "dist-packages"}
    assert all(name.endswith(".py") for name in found)
    first = next(iter(read_documents(find_sources(["stdlib"]))))
    root = Path(sysconfig.get_paths()["stdlib"])
    assert first.value == (root / found[0].removeprefix("stdlib/")).read_text(encoding="utf-8")


def test_find_sources_folder_named_stdlib_needs_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tree(tmp_path, "stdlib/mine.txt")
    monkeypatch.chdir(tmp_path)
    assert names("./stdlib") == ["stdlib/mine.txt"]
    assert "stdlib/os.py" in names("stdlib")
    assert note_on_inputs(["stdlib"]).endswith("for the file or folder of that name")
    assert note_on_inputs(["./stdlib"]) == ""


def test_note_on_inputs_counts_inputs_named_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    os.symlink("texts", "linked")
    again: list[str | Path] = [
        "texts",
        "texts/",
        "./texts",
        tmp_path / "texts",
        "linked",
        "stdlib",
        "./stdlib",
    ]
    assert distinct_inputs(again) == ["texts", "stdlib", "./stdlib"]
    assert note_on_inputs(again) == ("inputs that repeat an earlier one, read once: 4 of 7")
    assert note_on_inputs(["texts", "./other"]) == ""


def test_note_on_inputs_names_unsearched_linked_folders(tmp_path: Path) -> None:
    make_tree(tmp_path, "texts/a.txt", "other/b.txt")
    assert note_on_inputs([tmp_path / "texts"]) == ""
    (tmp_path / "texts/more").symlink_to(tmp_path / "other")
    (tmp_path / "texts/.hidden").symlink_to(tmp_path / "other")
    assert [source.path for source in find_sources([tmp_path / "texts"])] == [
        tmp_path / "texts/a.txt"
    ]
    assert note_on_inputs([tmp_path / "texts"]).startswith(f"{tmp_path}/texts/more: links to fold")
    assert note_on_inputs([tmp_path / "texts", tmp_path / "other"]) == ""
    assert note_on_inputs([tmp_path / "texts", tmp_path / "texts/more"]) == ""
    (tmp_path / "texts/again").symlink_to(tmp_path / "other")
    assert " and 1 more: links" in note_on_inputs([tmp_path / "texts"])
    # `find_sources` raises the error for an input that does not exist.
    assert note_on_inputs(["~nobody-of-that-name/texts"]) == ""


def test_find_sources_stdlib_without_source_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(InputError, match="standard library's source is not installed at"):
        find_sources(["stdlib"])


@pytest.mark.parametrize(
    "item, message",
    [
        ("corpsu", r"corpsu does not exist \(did you mean 'corpus'\?\)"),
        ("stdlb", r"stdlb does not exist \(did you mean 'stdlib'\?\)"),
        ("corpus/zzz/a.txt", r"corpus/zzz/a\.txt does not exist: specify files"),
        ("corpus/*.txt", r"corpus/\*\.txt matches no text files \(firstlight reads plain text "),
        ("no[xyz]", r"matches no text files"),
        ("empty", r"folder empty contains no text files .*\): add some$"),
        (
            "corpus",
            r"folder corpus contains no text files; it has 1 \.ods: corpus/table\.ods is a .*"
            r"\(firstlight reads plain text and code with any suffix or none, \.jsonl, \.ndjson, ",
        ),
        (
            "corpus/table.ods",
            r"table\.ods is a spreadsheet: save it as CSV in a spreadsheet program",
        ),
        ("https://a.org/b.txt", r"https://a\.org/b\.txt is a URL: download it with curl -LO "),
        (
            "pipe.txt",
            r"pipe\.txt is a pipe, neither a file .*: inputs .* cat \S*pipe\.txt > pipe\.txt\.txt",
        ),
        ("hf:", r"hf: requires the name of a dataset"),
        ("hf::x", r"hf: requires the name of a dataset"),
        ("", r"an input is empty"),
        ("~nobody-of-that-name/a.txt", r"~nobody-of-that-name/a\.txt can't be found: "),
        ("x" * 300, r"can't be found: File name too long"),
        ("a\0b", r"does not exist"),
    ],
)
def test_find_sources_missing_inputs_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, item: str, message: str
) -> None:
    make_tree(tmp_path, "corpus/table.ods")
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe.txt")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=message):
        find_sources([item])


def test_find_sources_no_input_raises() -> None:
    with pytest.raises(InputError, match="there is no input"):
        find_sources([])


def test_find_sources_unreadable_folder_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tree(tmp_path, "a.txt", "closed/b.txt")
    scandir = os.scandir

    def refused(path: str) -> Any:
        if Path(path).name == "closed":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refused)
    message = r"can't be read: permission denied at .*closed: make it readable \(chmod u\+rX\)"
    with pytest.raises(InputError, match=message):
        find_sources([tmp_path])


def test_source_size_is_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"12345")
    assert [source.size for source in find_sources([tmp_path, "hf:a/b"])] == [5, 0]


# Text files


def test_read_text_file_is_one_document_byte_for_byte(tmp_path: Path) -> None:
    text = "erste\r\nzweite\rdritte\x00\u2028vierte <|endoftext|>\n\n "
    (tmp_path / "a.md").write_bytes(text.encode())
    as_is = find_sources([tmp_path], as_is=True)
    assert seen(list(read_documents(as_is))) == [(text, str(tmp_path / "a.md"), 1)]
    text = "erste\nzweite\rdritte\x00\u2028vierte"
    assert seen(read(tmp_path)) == [(text, str(tmp_path / "a.md"), 1)]


def test_read_text_file_splits_documents_at_separators(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\r\n<|endoftext|>\nnot \xff UTF-8\n<|endoftext|>\n\n three\nlines\n")
    first, bad, last = read(path)
    assert (first.value, first.line, first.changes) == ("one", 1, ("<|endoftext|>",))
    assert (bad.error and bad.error.reason, bad.line) == ("bad_utf8", 3)
    assert (last.value, last.line) == (" three\nlines", 6)
    limited = [replace(find_sources([path])[0], most_bytes=20)]
    assert [record.value for record in read_documents(limited)] == ["one"]


def test_read_records_are_cleaned_and_split_like_text_files(tmp_path: Path) -> None:
    texts = ["a\r\nb", "One.<|endoftext|>Two.<|endoftext|>", "<|endoftext|> is a token"]
    (tmp_path / "a.ndjson").write_bytes(jsonl(*texts))
    found = read(tmp_path)
    assert [(one.value, one.line, one.changes) for one in found] == [
        ("a\nb", 1, ("crlf",)),
        ("One.", 2, ("<|endoftext|>",)),
        ("Two.", 2, ("<|endoftext|>",)),
        ("<|endoftext|> is a token", 3, ("kept <|endoftext|>",)),
    ]


@pytest.mark.parametrize("text", ["<|endoftext|>", "</s>\r\n<|endoftext|>\n", " <|endoftext|> "])
def test_read_record_of_only_separators_is_rejected_as_empty(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(text, "One."))
    with (tmp_path / "b.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["text"], [text], ["One."]])
    found = [(one.value, str(one.error)) for one in read(tmp_path)]
    assert found == [(None, "separators without text"), ("One.", "None")] * 2


def test_find_sources_reads_text_of_any_suffix_and_counts_others(tmp_path: Path) -> None:
    texts = ["LICENSE", "README", "a.abc", "b.SRT", "c.log.gz", "d.yaml"]
    make_tree(tmp_path, *texts, "e.json", "f.html.gz", "g.tex.7z")
    (tmp_path / "c.log.gz").write_bytes(gzip.compress(b"a line"))
    (tmp_path / "README").write_text("wide", encoding="utf-16")
    (tmp_path / "h.dat").write_bytes(bytes(range(256)))
    (tmp_path / "i").write_bytes(gzip.compress(b"text" * 100))
    assert [Path(name).name for name in names(tmp_path)] == texts
    unread = {"": 1, ".7z": 1, ".dat": 1, ".html.gz": 1, ".json": 1}
    assert by_ending(unread_files([tmp_path])) == unread
    assert names(tmp_path / "a.abc") == [str(tmp_path / "a.abc")]
    with pytest.raises(InputError, match=r"h\.dat is a binary file: exclude it \(firstlight reads"):
        find_sources([tmp_path / "h.dat"])


def test_read_compressed_content_with_other_suffix_suggests_unpack_command(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(gzip.compress(b"text" * 100))
    (record,) = read(path)
    command = str(record.error).partition("unpack it with ")[2]
    subprocess.run(command, shell=True, check=True)
    assert (tmp_path / "a.plain.txt").read_bytes() == b"text" * 100


def test_read_records_of_chats_between_people_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "export.json"
    path.write_text(json.dumps({"name": "A", "type": "private_group", "messages": [{"text": "a"}]}))
    (source,) = find_records([path])
    assert kind_of_records(source) is None
    with pytest.raises(InputError, match=r"Telegram: none of its senders is an assistant"):
        list(read_records([source]))


def test_read_records_of_claude_export_returns_conversations(tmp_path: Path) -> None:
    path = tmp_path / "conversations.json"
    messages = [{"text": "a", "sender": "human"}, {"text": "b", "sender": "assistant"}]
    path.write_text(json.dumps([{"uuid": "1", "name": "A", "chat_messages": messages}]))
    (record,) = read_records(find_records([path]))
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert record.value == {"messages": turns}
    # The export is delivered in an archive, in which it is found like in a folder.
    with zipfile.ZipFile(tmp_path / "claude.zip", "w") as archive:
        archive.write(path, "conversations.json")
        archive.writestr("users.json", "[]")
    (source,) = find_records([tmp_path / "claude.zip"])
    assert kind_of_records(source) == "chat"
    assert [one.value for one in read_records([source])] == [record.value]
    zipfile.ZipFile(tmp_path / "other.zip", "w").close()
    (source,) = find_records([tmp_path / "other.zip"])
    assert kind_of_records(source) is None
    with pytest.raises(InputError, match=r"no conversations\.json of ChatGPT or Claude"):
        list(read_records([source]))


def test_read_table_stopped_early_raises_no_late_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unraisable: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    (tmp_path / "a.csv").write_text("text\n" + "a\n" * 10)
    records = read_documents(find_sources([tmp_path]))
    assert next(records).value == "a"
    records.close()
    assert unraisable == []


# A byte-order mark is never part of the text.
@pytest.mark.parametrize(
    "encoding", ["utf-8", "utf-8-sig", "utf-16-le", "utf-16-be", "utf-16", "utf-32-le", "utf-32-be"]
)
@pytest.mark.parametrize("suffix", ["", ".gz", ".bz2", ".xz", ".zst"])
def test_read_unicode_with_byte_order_mark_returns_text_for_every_file_type(
    tmp_path: Path, encoding: str, suffix: str
) -> None:
    # Longer than a block of bytes, with characters that span two blocks.
    text = "ein Grüßchen 日本 🙂\r\n" * (2600 if suffix else 5000)
    mark = "\ufeff" if encoding.endswith(("le", "be")) else ""
    record = json.dumps({"text": text}, ensure_ascii=False)
    for kind, content in (
        *((kind, text) for kind in ("txt", "md", "py")),
        ("jsonl", f"{record}\n{record}\n"),
        ("csv", f'text,n\n"{text}",1\n"{text}",2\n'),
        ("tsv", f'n\ttext\n1\t"{text}"\n2\t"{text}"\n'),
    ):
        path = tmp_path / f"a.{kind}{suffix}"
        path.write_bytes(COMPRESSORS[suffix]((mark + content).encode(encoding)))
        documents = read_documents(find_sources([path], as_is=True))
        assert {one.value for one in documents} == {text}, kind
        assert len(read(path)) == (1 if content == text else 2)


@pytest.mark.parametrize(
    ("content", "line", "detail"),
    [
        ("eins\nzwei\nGrüße\n".encode("latin-1"), 3, "byte 0xfc is not UTF-8{} -f WINDOWS-1252 "),
        ("Il était une fois…\n".encode("cp1252"), 1, "byte 0xe9 is not UTF-8{} -f WINDOWS-1252 "),
        (_FRENCH.encode("latin-1"), 1, "byte 0xe0 is not UTF-8{} -f WINDOWS-1252 "),
        ("Widziałem żółtą gęś\n".encode("cp1250"), 1, "byte 0xb3 is not UTF-8{} -f ENCODING "),
        ("schön, für\n".encode("cp850"), 1, "byte 0x94 is not UTF-8{} -f ENCODING "),
        ("天地玄黄 宇宙洪荒\n".encode("gb18030"), 1, "byte 0xcc is not UTF-8{} -f ENCODING "),
        ("吾輩は猫である。名前はまだ無い。".encode("cp932"), 1, "byte 0x8c{utf8}{} -f ENCODING "),
        (_JAPANESE.encode("cp932"), 1, "byte 0x8c is not UTF-8{} -f CP932 "),
        (_JAPANESE.encode("euc-jp"), 1, "byte 0xb8 is not UTF-8{} -f EUC-JP "),
        (_CHINESE.encode("gb18030"), 1, "byte 0xcc is not UTF-8{} -f GB18030 "),
        (_KOREAN.encode("cp949"), 1, "byte 0xb3 is not UTF-8{} -f CP949 "),
        (_GREEK.encode("cp1253"), 1, "byte 0xce is not UTF-8{} -f CP1253 "),
        (_ARABIC.encode("cp1256"), 1, "byte 0xe4 is not UTF-8{} -f CP1256 "),
        (_POLISH.encode("iso8859-2"), 1, "byte 0xbf is not UTF-8{} -f ENCODING "),
        (_RUSSIAN.encode("cp1251"), 1, "byte 0xd1 is not UTF-8{} -f CP1251 "),
        (_RUSSIAN.encode("iso8859-5") * 400, 1, "byte 0xc1 is not UTF-8{} -f ISO8859-5 "),
        (_ARABIC.encode("iso8859-6"), 1, "byte 0xe6 is not UTF-8{} -f ENCODING "),
        (f"Άκου: {_GREEK}".encode("iso8859-7"), 1, "byte 0xb6 is not UTF-8{} -f ENCODING "),
        (_UKRAINIAN.encode("koi8-u"), 1, "byte 0xf3 is not UTF-8{} -f KOI8-U "),
        (_UKRAINIAN.encode("mac-cyrillic"), 1, "byte 0x91 is not UTF-8{} -f ENCODING "),
        (_LITHUANIAN.encode("cp775"), 1, "byte 0xd8 is not UTF-8{} -f ENCODING "),
        (_RUSSIAN.encode("koi8-r"), 1, "byte 0xf3 is not UTF-8{} -f KOI8-R "),
        (b"# coding: iso-8859-15\nx = '\xa4'\n", 2, "byte 0xa4 is not UTF-8{} -f ISO8859-15 "),
        ("Grüße\n".encode() * 3 + b"\xff\n", 4, "byte 0xff is not UTF-8{} -c -f UTF-8 "),
        ("ohne Marke".encode("utf-16-le"), 1, "the file is UTF-16LE{} -f UTF-16LE "),
        ("ohne Marke".encode("utf-16-be"), 1, "the file is UTF-16BE{} -f UTF-16BE "),
        ("ohne Marke".encode("utf-32-le"), 1, "the file is UTF-32LE{} -f UTF-32LE "),
        (_JAPANESE.encode("utf-16-le"), 1, "the file is UTF-16LE{} -f UTF-16LE "),
        (_JAPANESE.encode("utf-16-be"), 1, "the file is UTF-16BE{} -f UTF-16BE "),
        (_CHINESE.encode("utf-16-le"), 1, "the file is UTF-16LE{} -f UTF-16LE "),
        (_KOREAN.encode("utf-16-be"), 1, "the file is UTF-16BE{} -f UTF-16BE "),
        (_RUSSIAN.encode("utf-16-le"), 1, "the file is UTF-16LE{} -f UTF-16LE "),
        (_RUSSIAN.encode("utf-16-be"), 1, "the file is UTF-16BE{} -f UTF-16BE "),
        (_GREEK.encode("utf-16-be"), 1, "the file is UTF-16BE{} -f UTF-16BE "),
        (_ARABIC.encode("utf-16-le"), 1, "the file is UTF-16LE{} -f UTF-16LE "),
        (_ARABIC.encode("utf-16-be"), 1, "the file is UTF-16BE{} -f UTF-16BE "),
    ],
)
def test_read_other_encodings_suggest_conversion_command(
    tmp_path: Path, content: bytes, line: int, detail: str
) -> None:
    path = tmp_path / "an old file.txt"
    path.write_bytes(content)
    (found,) = read(path)
    assert found.error is not None
    assert (found.line, found.error.reason) == (line, "bad_utf8")
    begin = detail.format(": convert it with iconv", utf8=" is not UTF-8")
    new = tmp_path / "an old file.utf-8.txt"
    command = f"-t utf-8 '{path}' > '{new}'"
    assert str(found.error).startswith(begin + command), found.error
    if "ENCODING" not in detail:
        shell = str(found.error)[str(found.error).index("iconv") :]
        subprocess.run(shell, shell=True, check="-c" not in detail)
        assert "�" not in texts_of(new)[0]


@pytest.mark.parametrize("seed", range(20))
def test_read_binary_file_is_not_reported_as_utf_16(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    words = _CHINESE.encode("gb18030") + _JAPANESE.encode("cp932")
    for content in (
        draw.randbytes(5000),
        gzip.compress(draw.randbytes(5000), mtime=0)[10:],
        b"".join(draw.choice((b"\0\1\2", b"name", words[:40])) for _ in range(300)),
        # 16-bit numbers that are Greek and Cyrillic letters.
        b"".join(draw.randrange(900, 1500).to_bytes(2, "little") for _ in range(900)),
        # In UTF-16, pairs of ASCII letters are rare Chinese characters.
        b"".join(b"".join(draw.choices((b"some", b"text"), k=20)) + b"\1\2" for _ in range(99)),
    ):
        (tmp_path / "a.txt").write_bytes(content)
        (found,) = read(tmp_path / "a.txt")
        assert found.error is not None
        assert "UTF-16" not in str(found.error)


def test_read_compressed_file_suggests_conversion_through_decompressor(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress('{"text": "für"}\n'.encode("cp1252")))
    (found,) = read(tmp_path / "a.jsonl.gz")
    assert found.error is not None
    shell = str(found.error)[str(found.error).index("gzip -dc ") :]
    subprocess.run(shell, shell=True, check=True)
    assert texts_of(tmp_path / "a.utf-8.jsonl.gz") == ["für"]


def test_read_truncated_utf16_keeps_text_before_break(tmp_path: Path) -> None:
    for suffix, before in (("jsonl", ""), ("csv", "text\n")):
        lines = ['{"text": "a"}', '{"text": "b"}'] if suffix == "jsonl" else ["a", "b"]
        content = (before + "\n".join(lines) + "\n").encode("utf-16") + b"\x00\xd8\x00"
        path = tmp_path / f"a.{suffix}"
        path.write_bytes(content)
        assert texts_of(path) == ["a", "b"]
        assert reasons_of(path) == [(4 if before else 3, "bad_utf16")]
    (tmp_path / "a.txt").write_bytes("a\nb".encode("utf-16") + b"\x00")
    assert reasons_of(tmp_path / "a.txt") == [(2, "bad_utf16")]


# Tables


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_read_table_yields_text_column(tmp_path: Path, delimiter: str, newline: str) -> None:
    huge = "x," * 400_000
    texts = ["plain", "a, b; c\td", 'said "so"', "two\nlines\n\n", "日本 🙂", huge]
    path = tmp_path / ("a.tsv" if delimiter == "\t" else "a.csv")
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter=delimiter, lineterminator=newline)
        writer.writerow(["id", "body"])
        writer.writerows(enumerate(texts))
    assert texts_of(path, text_key="body") == texts
    assert [entry.line for entry in read(path, text_key="body")] == [2, 3, 4, 5, 9, 10]


def test_read_bad_rows_are_rejected_by_line_and_reason(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(
        b'id,text\n1,good\n2\n3,a,b\n\n4,"x" y\n5," "\n6,\xe9t\xe9\n'
        b'7,"good\ntoo"\n8,"open\nto the end\n'
    )
    assert texts_of(path) == ["good", "good\ntoo"]
    assert reasons_of(path) == [
        (3, "broken_row"),
        (4, "broken_row"),
        (5, "empty"),
        (6, "broken_row"),
        (7, "empty"),
        (8, "bad_utf8"),
        (11, "broken_row"),
    ]
    details = {r.line: str(r.error) for r in read(path) if r.error is not None}
    assert details[3] == "1 fields, but the header has 2"
    assert details[11] == "a quote is not closed (lines 11 to 12)"
    assert details[8].startswith("byte 0xe9 is not UTF-8: convert it with iconv -f WINDOWS-1252 ")


def test_read_table_without_text_column_names_its_columns(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id;texts\n1;2\n", encoding="utf-8")
    (tmp_path / "b.txt").write_text("still read", encoding="utf-8")
    (tmp_path / "c.csv").write_text("", encoding="utf-8")
    detail = (
        "no column 'text' (did you mean 'texts'?) (columns: id, "
        "texts): use --text-key to name the column that contains the text"
    )
    assert seen(read(tmp_path)) == [
        (str(tmp_path / "a.csv"), 1, "no_text", detail),
        ("still read", str(tmp_path / "b.txt"), 1),
    ]


@pytest.mark.parametrize("content", [b"", b" ", b"\n\t\r\n", "\u3000\u2029".encode()])
def test_read_empty_document_is_rejected(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    assert reasons_of(tmp_path) == [(1, "empty")]


# JSONL


@pytest.mark.parametrize("suffix", COMPRESSORS)
def test_read_jsonl_yields_one_document_per_line_for_any_compression(
    tmp_path: Path, suffix: str
) -> None:
    path = tmp_path / f"a.JSONL{suffix.upper()}"
    path.write_bytes(COMPRESSORS[suffix](jsonl("first", "zwei\nZeilen", "日本")))
    assert seen(read(path)) == [
        ("first", str(path), 1),
        ("zwei\nZeilen", str(path), 2),
        ("日本", str(path), 3),
    ]


@pytest.mark.parametrize("suffix", COMPRESSORS)
def test_read_compressed_text_files_succeeds(tmp_path: Path, suffix: str) -> None:
    text = "größer " * 100_000
    (tmp_path / f"a.txt{suffix}").write_bytes(COMPRESSORS[suffix](text.encode()))
    assert texts_of(tmp_path) == [text]


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])
def test_read_concatenated_compressed_parts_yields_all_documents(
    tmp_path: Path, suffix: str
) -> None:
    compress = COMPRESSORS[suffix]
    parts = [jsonl(f"{number} " * 5000) for number in range(4)]
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(b"".join(compress(part) for part in parts))
    assert texts_of(path) == [f"{number} " * 5000 for number in range(4)]


def test_read_zst_file_with_large_window_succeeds(tmp_path: Path) -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=28, compression_level=1)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    content = compressor.compress(jsonl("long ago")) + compressor.flush()
    (tmp_path / "a.jsonl.zst").write_bytes(content)
    assert texts_of(tmp_path) == ["long ago"]


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])
@pytest.mark.parametrize("left_out", [1, 3, 9, 1000])
def test_read_truncated_compressed_file_raises(tmp_path: Path, suffix: str, left_out: int) -> None:
    generator = random.Random(0)
    content = COMPRESSORS[suffix](jsonl(*(generator.randbytes(20).hex() for _ in range(3000))))
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(content[:-left_out])
    with pytest.raises(InputError, match=rf"a\.jsonl\{suffix} (is damaged|can't be read): "):
        read(path)


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])
@pytest.mark.parametrize("damage", [b"x" * 200, b"{}"])
def test_read_file_with_wrong_compression_suffix_raises(
    tmp_path: Path, suffix: str, damage: bytes
) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(damage)
    with pytest.raises(InputError, match=rf"a\.jsonl\{suffix} (is damaged|can't be read): "):
        read(path)


def test_read_gzip_damaged_in_the_middle_raises(tmp_path: Path) -> None:
    content = bytearray(gzip.compress(jsonl(*map(str, range(5000)))))
    content[len(content) // 2] ^= 0xFF
    (tmp_path / "a.jsonl.gz").write_bytes(content)
    with pytest.raises(InputError, match=r"a\.jsonl\.gz (is damaged|can't be read): "):
        read(tmp_path)


def test_read_bad_lines_are_rejected_by_number_and_reason(tmp_path: Path) -> None:
    lines = [
        b'{"text": "good"}',
        b'{"text": "broken"',
        b"",
        b'{"text": "\xff"}',
        b'{"body": 1, "id": 2}',
        b'{"text": null}',
        b'{"text": ["a"]}',
        b'{"text": "  \\n"}',
        b'{"text": "\\ud800"}',
        b'"text"',
        b"null",
        b"[" * 100_000,
        b"1" * 5000,
        b'{"text": "last, without a newline"}',
    ]
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join(lines))
    found = read(path)
    assert len(found) == len(lines)
    assert texts_of(path) == ["good", "last, without a newline"]
    assert reasons_of(path) == [
        (2, "broken_json"),
        (3, "empty"),
        (4, "bad_utf8"),
        (5, "no_text"),
        (6, "no_text"),
        (7, "no_text"),
        (8, "empty"),
        (9, "bad_utf8"),
        (10, "no_text"),
        (11, "no_text"),
        (12, "broken_json"),
        (13, "broken_json"),
    ]
    details = {r.line: str(r.error) for r in found if r.error is not None}
    assert details[4].startswith("byte 0xff is not UTF-8: convert it with iconv -f ENCODING ")
    assert details[5].startswith(
        "no field 'text' (fields: body, id): use --text-key to name the field "
    )
    assert details[7] == "the text is list, not a string"
    assert {r.error.reason for r in found if r.error is not None} <= set(REASONS)
    assert {e.origin for e in found} == {str(path)}


def test_read_text_key_selects_field(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"content": "x", "text": "y"}\n', encoding="utf-8")
    assert texts_of(tmp_path, text_key="content") == ["x"]


def test_read_byte_order_mark_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + jsonl("x"))
    assert texts_of(tmp_path) == ["x"]


def test_read_windows_line_endings_are_accepted(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "x"}\r\n{"text": "y"}\r\n')
    assert texts_of(tmp_path) == ["x", "y"]


def test_read_file_type_follows_last_suffix_only(tmp_path: Path) -> None:
    make_tree(tmp_path, "about.jsonl.txt", "x.txt.jsonl")
    assert texts_of(tmp_path) == ["text of about.jsonl.txt\n"]
    assert reasons_of(tmp_path) == [(1, "broken_json")]


def test_read_empty_jsonl_file_yields_no_documents(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"")
    assert read(tmp_path) == []


# Parquet


def write_parquet(path: Path, **columns: Any) -> None:
    parquet.write_table(pyarrow.table(columns), path, row_group_size=2)


def test_read_parquet_row_is_one_document(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_parquet(path, id=[1, 2, 3, 4, 5], text=["eins", None, "日本", " ", "fünf"])
    assert seen(read(path)) == [
        ("eins", str(path), 1),
        (str(path), 2, "no_text", "the text is NoneType, not a string"),
        ("日本", str(path), 3),
        (str(path), 4, "empty", "empty or only whitespace"),
        ("fünf", str(path), 5),
    ]


@pytest.mark.parametrize("kind", ["large_string", "dictionary"])
def test_read_parquet_supports_every_string_encoding(tmp_path: Path, kind: str) -> None:
    column = pyarrow.array(["x", "y", "x"])
    column = column.dictionary_encode() if kind == "dictionary" else column.cast(kind)
    write_parquet(tmp_path / "a.parquet", text=column)
    assert texts_of(tmp_path) == ["x", "y", "x"]


def test_read_parquet_row_with_invalid_utf8_is_rejected_and_rest_read(tmp_path: Path) -> None:
    binary = pyarrow.array([b"good", b"\xff\xfe", b"too"])
    column = pyarrow.StringArray.from_buffers(3, binary.buffers()[1], binary.buffers()[2])
    write_parquet(tmp_path / "a.parquet", text=column)
    assert texts_of(tmp_path) == ["good", "too"]
    assert reasons_of(tmp_path) == [(2, "bad_utf8")]


def test_read_parquet_without_text_column_is_rejected_and_rest_read(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", body=["x"], id=[1])
    write_parquet(tmp_path / "b.parquet", text=["y"])
    bad, good = read(tmp_path)
    assert (bad.line, bad.error and bad.error.reason, good.value) == (1, "no_text", "y")
    assert str(bad.error).startswith("no column 'text' (columns: body, id): use --text-key ")
    assert texts_of(tmp_path / "a.parquet", text_key="body") == ["x"]


@pytest.mark.parametrize("keep", [0, 3, 100, -1, -200])
def test_read_damaged_parquet_file_raises(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "a.parquet"
    write_parquet(path, text=["x"] * 100)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(InputError, match=r"a\.parquet is not a readable Parquet file"):
        read(path)


# Errors that concern an entire file


def test_read_vanished_file_raises_and_is_named(tmp_path: Path) -> None:
    make_tree(tmp_path, "a.txt")
    found = find_sources([tmp_path])
    (tmp_path / "a.txt").unlink()
    with pytest.raises(InputError, match=r"a\.txt can't be read: No such file"):
        list(read_documents(found))


def test_read_file_without_permission_raises_with_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tree(tmp_path, "a.txt")
    found = find_sources([tmp_path])

    # Tests may run as root, which can read every file.
    def refused(path: Path, mode: str) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("firstlight.data.opening.open", refused, raising=False)
    message = r"can't be read: permission denied at .*a\.txt: make it readable \(chmod u\+rX\), or"
    with pytest.raises(InputError, match=message):
        list(read_documents(found))


@pytest.mark.parametrize(
    "name, package",
    [("a.jsonl.zst", "zstandard"), ("a.txt.zst", "zstandard"), ("a.parquet", "pyarrow.parquet")],
)
def test_read_missing_optional_package_names_install_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, package: str
) -> None:
    make_tree(tmp_path, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingDependencyError) as caught:
        read(tmp_path)
    assert str(caught.value) == (
        f"reading {tmp_path / name} needs the '{package.split('.')[0]}' package: "
        "pip install 'firstlight[data]'"
    )


# Hugging Face datasets


@pytest.fixture
def fake_datasets(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """Install a `datasets` module that records its calls and yields `rows`."""
    fake = types.SimpleNamespace(calls=[], rows=[])

    def load_dataset(*args: Any, **kwargs: Any) -> Iterator[Any]:
        fake.calls.append((args, kwargs))
        for row in fake.rows:
            if isinstance(row, Exception):
                raise row
            yield row

    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    return fake


def test_read_hub_dataset_streams_rows(fake_datasets: types.SimpleNamespace) -> None:
    fake_datasets.rows = [{"text": "a"}, {"text": None}, {"title": "b"}, {"text": "c"}]
    found = read_documents(find_sources(["hf:owner/name"]))
    assert next(found) == Record("hf:owner/name", 1, "a", is_line=False)
    assert [(r.line, r.error is None) for r in found] == [
        (2, False),
        (3, False),
        (4, True),
    ]
    assert fake_datasets.calls == [(("owner/name", None), {"split": "train", "streaming": True})]


def test_read_hub_dataset_accepts_configuration(fake_datasets: types.SimpleNamespace) -> None:
    fake_datasets.rows = [{"body": "a"}]
    assert texts_of("hf:wikitext:wikitext-2-raw-v1", text_key="body") == ["a"]
    assert fake_datasets.calls[0][0] == ("wikitext", "wikitext-2-raw-v1")


@pytest.mark.parametrize(
    "item, config, split",
    [
        ("hf:x:small:validation", "small", "validation"),
        ("hf:x::test", None, "test"),
        ("hf:x:small:", "small", "train"),
    ],
)
def test_read_hub_dataset_accepts_split(
    fake_datasets: types.SimpleNamespace, item: str, config: str | None, split: str
) -> None:
    fake_datasets.rows = [{"text": "a"}]
    assert texts_of(item) == ["a"]
    assert fake_datasets.calls == [(("x", config), {"split": split, "streaming": True})]


@pytest.mark.parametrize("error", [OSError, ValueError, RuntimeError, KeyError, Exception])
def test_read_hub_dataset_failing_midway_raises_one_line_error(
    fake_datasets: types.SimpleNamespace, error: type[Exception]
) -> None:
    fake_datasets.rows = [{"text": "a"}, error("first line\nsecond line")]
    with pytest.raises(InputError, match=r"^dataset hf:x can't be read: .*first line") as caught:
        read("hf:x")
    assert "\n" not in str(caught.value)


def test_read_error_without_message_is_named_by_type(fake_datasets: types.SimpleNamespace) -> None:
    fake_datasets.rows = [TimeoutError()]
    with pytest.raises(InputError, match=r"dataset hf:x can't be read: TimeoutError"):
        read("hf:x")


def test_read_hub_dataset_without_package_names_install_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    message = r"reading hf:x needs the 'datasets' package: pip install 'firstlight\[data\]'"
    with pytest.raises(MissingDependencyError, match=message):
        read("hf:x")


def test_find_sources_hub_dataset_needs_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert find_sources(["hf:a/b:c", "hf:a/b:c"]) == [DataSource("hf:a/b:c", dataset="a/b:c")]


@pytest.mark.parametrize(
    "name", ["bomb.txt.gz", "bomb.jsonl.gz", "bomb.txt.bz2", "bomb.txt.xz", "bomb.txt.zst"]
)
def test_read_decompression_bomb_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    packers: dict[str, Any] = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}
    packers["zst"] = zstandard.ZstdCompressor().compress
    size = 200_000_000
    if name.endswith((".bz2", ".xz")):
        # Compressing these formats takes long, so use a quarter of the size and of the limit.
        size //= 4
        monkeypatch.setattr("firstlight.data.opening._MOST_UNPACKED_BYTES", 12_500_000)
    (tmp_path / name).write_bytes(packers[name.rpartition(".")[2]](b" " * size))
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match="unpacks to more than 100 times its size"):
            read(tmp_path / name)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 0.75 * size


def test_read_compressed_lines_count_more_than_their_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lines.jsonl.gz"
    path.write_bytes(gzip.compress(b"{}\n" * 10_000))
    assert len(read(path)) == 10_000
    monkeypatch.setattr("firstlight.data.opening._MOST_UNPACKED_BYTES", 100_000)
    with pytest.raises(InputError, match="unpacks to more than 100 times its size"):
        read(path)


@pytest.mark.parametrize("rows", [1, 1000])
def test_read_parquet_decompression_bomb_raises(tmp_path: Path, rows: int) -> None:
    path = tmp_path / "bomb.parquet"
    # One long text, or a text that all rows share and that is stored once.
    table = pyarrow.table({"text": ["a" * (60_000_000 // rows)] * rows})
    parquet.write_table(table, path, compression="zstd")
    with pytest.raises(InputError, match=r"bomb\.parquet .*unpacks to more than 100 times"):
        read(path)


def test_read_parquet_rows_may_share_long_text(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", text=["a" * 20_000_000, "b"] * 2)
    assert list(map(len, texts_of(tmp_path / "a.parquet"))) == [20_000_000, 1] * 2


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.txt.gz", "a.csv.gz", "a.jsonl", "a.txt"])
def test_read_compressed_document_has_size_limit(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("firstlight.data.opening._LARGEST_DOCUMENT_BYTES", 10_000)

    def write(text: str) -> Path:
        wraps = {"jsonl": jsonl(text), "txt": text.encode(), "csv": f"text\n{text}\n".encode()}
        content = wraps[name.split(".")[1]]
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
        return tmp_path / name

    assert texts_of(write("a " * 4_000 + "a")) == ["a " * 4_000 + "a"]
    if name.endswith("gz"):
        (found,) = read(write("a " * 100_000 + "a"))
        assert found.error is not None
        assert (found.value, found.error.reason) == (None, "too_long")
    else:  # The size of the file is the size of the text.
        assert texts_of(write("a " * 100_000 + "a")) == ["a " * 100_000 + "a"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_read_json_with_millions_of_lists_is_rejected(tmp_path: Path, name: str) -> None:
    content = b"[" + b"[]," * 2_000_000 + b"[]]\n" + jsonl("good")
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    bomb, good = read(tmp_path / name)
    assert "2,000,002 lists and objects" in str(bomb.error)
    assert good.value == "good"

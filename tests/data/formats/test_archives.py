"""Tests of `data.formats.archives`."""

from __future__ import annotations

import io
import json
import stat
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from firstlight.data.formats import UnreadableDocument
from firstlight.data.formats.archives import read

_MAIL = "From: a@b.org\nSubject: c\n\nA mail.\n"


def _zip(path: Path, members: Mapping[str, Any]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def _tar(path: Path, members: list[tuple[str, bytes, bytes]]) -> Path:
    mode: Any = "w:" + path.suffix[1:].replace("tar", "")
    with tarfile.open(path, mode) as archive:
        for name, kind, content in members:
            entry = tarfile.TarInfo(name)
            entry.type, entry.size, entry.linkname = kind, len(content), "target"
            archive.addfile(entry, io.BytesIO(content))
    return path


def test_read_zip_reads_every_kind_and_names_members(tmp_path: Path) -> None:
    members = {
        "texts/a.txt": "A text.",
        "texts/b.jsonl": '{"text": "One"}\n{"text": "Two"}\n',
        "mail/c.eml": _MAIL,
        "__MACOSX/._a.txt": "hidden",
        "~$letter.docx": "hidden",
        ".DS_Store": "hidden",
        "d.png": b"\x89PNG\r\n" + bytes(range(32)),
    }
    assert list(read(_zip(tmp_path / "a.zip", members))) == [
        ("texts/a.txt", "A text."),
        ("texts/b.jsonl", "One"),
        ("texts/b.jsonl, 2", "Two"),
        ("mail/c.eml", "From: a@b.org\nSubject: c\n\nA mail."),
        ("d.png: an image", ""),
    ]


def test_read_zip_counts_members_without_text_by_kind(tmp_path: Path) -> None:
    picture = b"\x89PNG\r\n" + bytes(range(32))
    members = {f"{number}.png": picture for number in range(1_200)} | {"a.json": "{}", "b.txt": "B"}
    found = list(read(_zip(tmp_path / "a.zip", members)))
    assert found == [
        ("b.txt", "B"),
        ("0.png and 1,199 more, each an image", ""),
        ("a.json: JSON, which must have one text per line", ""),
    ]


def test_read_zip_of_chatgpt_does_not_name_the_files_beside_the_chats(tmp_path: Path) -> None:
    message = {"author": {"role": "user"}, "content": {"content_type": "text", "parts": ["Hi"]}}
    chats = [{"title": "Tea", "mapping": {"a": {"parent": None, "message": message}}}]
    members = {"conversations.json": json.dumps(chats), "user.json": "{}", "chat.html": "<p></p>"}
    found = list(read(_zip(tmp_path / "a.zip", members)))
    assert found == [("conversations.json, Tea", "user: Hi")]


def test_read_zip_reads_mails_by_date_and_quotations_once(tmp_path: Path) -> None:
    mail = "Date: {} Mar 2021 10:00:00 +0000\n\n{}\n"
    members = {
        "a.eml": mail.format(2, "Here.\n\n> Where are you?"),
        "b/c.eml": mail.format(1, "Where are you?"),
    }
    found = [
        (place, text.partition("\n\n")[2])
        for place, text in read(_zip(tmp_path / "a.zip", members))
    ]
    assert found == [("b/c.eml, 2021-03-01", "Where are you?"), ("a.eml, 2021-03-02", "Here.")]


def test_read_zip_reads_members_whose_names_clash_or_are_too_long(tmp_path: Path) -> None:
    names = ["a", "a/b.txt", "c\\d.txt", "c", "x" * 300 + ".txt", "e.txt"]
    path = _zip(tmp_path / "a.zip", {name: f"Text {name[:2]}." for name in names})
    with pytest.warns(UserWarning, match="Duplicate name"), zipfile.ZipFile(path, "a") as archive:
        archive.writestr("e.txt", "The second.")
    assert list(read(path)) == [
        *((name, f"Text {name[:2]}.") for name in names),
        ("e.txt", "The second."),
    ]


def test_read_zip_reads_the_members_beside_a_damaged_one(tmp_path: Path) -> None:
    path = _zip(tmp_path / "a.zip", {"a.txt": "First. " * 50, "b.txt": "Second."})
    content = bytearray(path.read_bytes())
    content[40] ^= 0xFF
    path.write_bytes(content)
    (place, text), second = read(path)
    assert place.startswith("a.txt: it is damaged (")
    assert (text, second) == ("", ("b.txt", "Second."))


def test_read_truncated_tar_reads_the_members_before_the_damage(tmp_path: Path) -> None:
    names = ["a.txt", "b.txt"]
    path = _tar(tmp_path / "a.tar", [(name, tarfile.REGTYPE, b"x" * 2_000) for name in names])
    path.write_bytes(path.read_bytes()[:4_000])
    found: list[tuple[str, str]] = []
    with pytest.raises(UnreadableDocument, match="the archive is damaged: unexpected end of data"):
        found.extend(read(path))
    assert found == [
        ("b.txt: it is damaged (unexpected end of data)", ""),
        ("a.txt", "x" * 2_000),
    ]


def test_read_zip_reads_the_members_after_one_that_a_reader_fails_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(path: Path, seen: set[int]) -> Any:
        raise IndexError("no index")

    monkeypatch.setattr("firstlight.data.formats.mail.read", failing)
    found = list(read(_zip(tmp_path / "a.zip", {"a.eml": _MAIL, "b.txt": "B"})))
    assert sorted(found) == [("a.eml, it is damaged (no index)", ""), ("b.txt", "B")]


def test_read_zip_reads_the_members_after_damaged_compressed_xml(tmp_path: Path) -> None:
    members = {"a.xml.gz": b"\x1f\x8b damaged", "b.txt": "B"}
    found = list(read(_zip(tmp_path / "a.zip", members)))
    assert ("b.txt", "B") in found
    assert sorted(text for _, text in found) == ["", "B"]


def test_read_zip_advice_does_not_name_the_temporary_folder(tmp_path: Path) -> None:
    content = "Der Bär läuft über die Brücke. " * 20
    ((place, text),) = read(_zip(tmp_path / "a.zip", {"b/a.txt": content.encode("cp1252")}))
    command = "iconv -f WINDOWS-1252 -t utf-8 a.txt > a.utf-8.txt"
    assert (place, text) == (f"b/a.txt, byte 0xe4 is not UTF-8: convert it with {command}", "")


def test_read_zip_that_is_a_word_document_is_rejected(tmp_path: Path) -> None:
    members = {"[Content_Types].xml": "<Types/>", "word/document.xml": "<a/>"}
    with pytest.raises(UnreadableDocument, match=r"it is a Word document: rename it to .* \.docx"):
        list(read(_zip(tmp_path / "a.zip", members)))
    assert list(read(_zip(tmp_path / "b.zip", {"word/a.txt": "A"}))) == [("word/a.txt", "A")]


def test_read_tar_reads_a_file_with_a_hard_link_once(tmp_path: Path) -> None:
    members = [("target", tarfile.REGTYPE, b"Good."), ("b.txt", tarfile.LNKTYPE, b"")]
    assert list(read(_tar(tmp_path / "a.tar", members))) == [("target", "Good.")]


def test_read_zip_of_slack_finds_the_names_beside_the_channels(tmp_path: Path) -> None:
    members = {
        "users.json": '[{"id": "U1", "name": "ann"}]',
        "general/2021-03-04.json": (
            '[{"type": "message", "user": "U1", "ts": "1614852000", "text": "Hi"}]'
        ),
    }
    found = list(read(_zip(tmp_path / "a.zip", members)))
    assert ("general/2021-03-04.json, general, 2021-03-04", "ann: Hi") in found


@pytest.mark.parametrize("name", ["../a.txt", "/a.txt", "b/../../a.txt", "..\\a.txt", "C:\\a.txt"])
def test_read_zip_leaves_out_names_that_point_out(tmp_path: Path, name: str) -> None:
    archive = _zip(tmp_path / "a.zip", {name: "bad", "b.txt": "Good."})
    assert list(read(archive)) == [
        (f"{name}: its name points out of the archive", ""),
        ("b.txt", "Good."),
    ]
    assert [file.name for file in tmp_path.iterdir()] == ["a.zip"]


@pytest.mark.parametrize("ending", [".tar", ".tar.gz", ".tar.bz2", ".tar.xz"])
def test_read_tar_leaves_out_links_devices_and_archives(tmp_path: Path, ending: str) -> None:
    path = _tar(
        tmp_path / f"a{ending}",
        [
            ("a.txt", tarfile.REGTYPE, b"Good."),
            ("b.txt", tarfile.SYMTYPE, b""),
            ("c.txt", tarfile.LNKTYPE, b""),
            ("d.txt", tarfile.CHRTYPE, b""),
            ("e", tarfile.DIRTYPE, b""),
            ("f.zip", tarfile.REGTYPE, b"PK"),
            ("../g.txt", tarfile.REGTYPE, b"bad"),
        ],
    )
    assert list(read(path)) == [
        ("b.txt: a link", ""),
        ("c.txt: a link", ""),
        ("d.txt: a device", ""),
        ("f.zip: an archive inside an archive: unpack it", ""),
        ("../g.txt: its name points out of the archive", ""),
        ("a.txt", "Good."),
    ]


def test_read_zip_leaves_out_links(tmp_path: Path) -> None:
    link = zipfile.ZipInfo("a.txt")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(link, "/etc/passwd")
    assert list(read(path)) == [("a.txt: a link", "")]


def test_read_bomb_is_rejected_before_it_fills_the_disk(tmp_path: Path) -> None:
    archive = _zip(tmp_path / "a.zip", {"a.txt": bytes(60_000_000)})
    with pytest.raises(UnreadableDocument, match="it unpacks to more than 100 times its size"):
        list(read(archive))


def test_read_many_empty_members_is_rejected(tmp_path: Path) -> None:
    members = [(f"{number}", tarfile.REGTYPE, b"") for number in range(50_000)]
    archive = _tar(tmp_path / "a.tar.xz", members)
    with pytest.raises(UnreadableDocument, match="it unpacks to more than 100 times its size"):
        list(read(archive))


@pytest.mark.parametrize("name", ["a.zip", "a.tar.gz"])
def test_read_damaged_archive_is_rejected(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"PK\x03\x04 and no more")
    with pytest.raises(UnreadableDocument, match="the archive is damaged: "):
        list(read(tmp_path / name))


def test_read_zip_names_package_that_a_member_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    archive = _zip(tmp_path / "a.zip", {"a.pdf": b"%PDF-1.4\n"})
    says = "a.pdf, a PDF: pip install 'firstlight[documents]' to read it"
    assert list(read(archive)) == [(says, "")]

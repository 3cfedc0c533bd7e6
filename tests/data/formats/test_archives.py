"""Tests of `data.formats.archives`."""

from __future__ import annotations

import io
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
        ".DS_Store": "hidden",
        "d.png": b"\x89PNG\r\n" + bytes(range(32)),
    }
    *found, (place, text) = read(_zip(tmp_path / "a.zip", members))
    assert found == [
        ("texts/a.txt", "A text."),
        ("texts/b.jsonl", "One"),
        ("texts/b.jsonl, 2", "Two"),
        ("mail/c.eml", "From: a@b.org\nSubject: c\n\nA mail."),
    ]
    advice = "exclude it, or extract its text with tesseract d.png d"
    assert place == f"d.png, d.png is an image: {advice}"
    assert text == ""


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

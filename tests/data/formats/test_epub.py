"""Books in EPUB format with missing, empty and short files."""

from __future__ import annotations

import zipfile
from pathlib import Path

from firstlight.data.formats import epub

#: Text that is not joined with the next chapter.
_LONG = " ".join(["of a chapter"] * 8)


def _read(
    folder: Path, spine: list[str], files: dict[str, str], more: str = ""
) -> list[tuple[str, str]]:
    path = folder / "a.epub"
    items = "".join(f'<item id="{name}" href="{name}"/>' for name in spine)
    refs = "".join(f'<itemref idref="{name}"/>' for name in spine)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("META-INF/container.xml", '<c><rootfile full-path="in/b.opf"/></c>')
        archive.writestr("in/b.opf", f"<package>{items}{refs}{more}</package>")
        for name, text in files.items():
            content = f"<html><head><title>t</title></head><body><p>{text}</p></body></html>"
            archive.writestr(f"in/{name}", content if text else "")
    return list(epub.read(path))


def test_read_chapter_that_is_missing_or_empty_does_not_end_the_book(tmp_path: Path) -> None:
    files = {"a.html": f"A {_LONG}", "empty.html": "", "c.html": f"C {_LONG}"}
    assert _read(tmp_path, ["a.html", "gone.html", "empty.html", "c.html"], files) == [
        ("chapter 1", f"A {_LONG}"),
        ("in/gone.html: the file is missing: replace the book", ""),
        ("chapter 2", f"C {_LONG}"),
    ]


def test_read_names_with_escapes_and_capitals_are_found(tmp_path: Path) -> None:
    files = {"a%20b.html": f"A {_LONG}", "C.html": f"C {_LONG}", "d e.html": f"D {_LONG}"}
    chapters = _read(tmp_path, ["a%20b.html", "c.html", "d%20e.html"], files)
    assert chapters == [(f"chapter {n}", f"{name} {_LONG}") for n, name in enumerate("ACD", 1)]


def test_read_title_pages_are_joined_and_contents_left_out(tmp_path: Path) -> None:
    files = {"title.html": "A Book", "toc.html": f"Contents {_LONG}", "a.html": f"A {_LONG}"}
    guide = '<reference type="toc" href="toc.html#top"/>'
    chapters = _read(tmp_path, ["title.html", "toc.html", "a.html"], files, guide)
    assert chapters == [("chapter 1", f"A Book\n\nA {_LONG}")]
    assert _read(tmp_path, ["title.html"], files) == [("chapter 1", "A Book")]

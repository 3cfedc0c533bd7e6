"""Documents whose suffix does not state their format."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest

from firstlight.data.formats.registry import format_of


def _package(*names: str) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name in names:
            archive.writestr(name, "application/epub+zip" if name == "mimetype" else "\0")
    return content.getvalue()


_PAGE = b"<!DOCTYPE html>\n<html><body>Text</body></html>"
_PDF = b"%PDF-1.4\n%\0\1"


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("page", _PAGE, "web page"),
        ("page.php", b"\xef\xbb\xbf<!-- saved -->\n" + _PAGE, "web page"),
        ("page.php", b"<html><?php echo 1 ?></html>", None),
        ("page.md", _PAGE, None),
        ("letter.doc", rb"{\rtf1 text}", "RTF document"),
        ("letter.doc", _PAGE, "web page"),
        ("letter.doc", b"\xd0\xcf\x11\xe0", None),
        ("a.html", _PDF, "PDF"),
        ("paper", _PDF, "PDF"),
        ("a.pdf", _package("mimetype", "x"), "EPUB"),
        ("a.docx", rb"{\rtf1 text}", "RTF document"),
        ("a.docx", _package("docProps/x", "word/document.xml"), "Word document"),
        ("a.docx", _package("docProps/x"), "Word document"),
        ("a.pdf", b"not a PDF", "PDF"),
        ("archive", _package("x"), None),
        ("a.txt", b"Some text", None),
    ],
)
def test_format_of_document_is_found_by_its_first_bytes(
    tmp_path: Path, name: str, content: bytes, expected: str | None
) -> None:
    (tmp_path / name).write_bytes(content)
    found = format_of(tmp_path / name)
    assert (found.name if found else None) == expected

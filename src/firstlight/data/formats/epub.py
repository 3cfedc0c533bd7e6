"""Books in EPUB format: one document for each file of the book, in reading order."""

from __future__ import annotations

import posixpath
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import unquote

from firstlight.data.formats import UnreadableDocument
from firstlight.data.formats.html import parsed, text_of
from firstlight.data.formats.paragraphs import attribute, package, parsed_xml, tag_of

#: A file with fewer characters, such as a title page, is joined with the next file.
_LEAST_CHARACTERS = 100


def read(path: Path) -> Iterator[tuple[str, str]]:
    """Yield ("chapter N", text) for each file of the book with text. Pairs without text name the
    files that can't be read.

    Raises:
        UnreadableDocument: the book is damaged, encrypted, or has no text.
    """
    with package(path) as content:
        container = content("META-INF/container.xml")
        if container is None:
            raise UnreadableDocument("it is not an EPUB: exclude it")
        roots = [one for one in parsed_xml(container).iter() if tag_of(one) == "rootfile"]
        name = attribute(roots[0], "full-path") if roots else ""
        if (opf := content(name)) is None:
            raise UnreadableDocument("its list of contents is missing: replace it")
        encrypted = content("META-INF/encryption.xml") or b""
        number, short = 0, ""
        is_empty = True
        for file in (posixpath.join(posixpath.dirname(name), one) for one in _files(opf)):
            if unquote(file).encode() in encrypted:
                raise UnreadableDocument("it is encrypted (DRM): use a copy without it")
            try:
                text = _text(content, file)
            except (UnreadableDocument, zipfile.BadZipFile, zlib.error) as error:
                is_empty = False
                yield f"{file}: {error}", ""
                continue
            text = "\n\n".join(filter(None, (short, text)))
            short = text if len(text) < _LEAST_CHARACTERS else ""
            if text and not short:
                number += 1
                yield f"chapter {number:,}", text
        if short:
            yield f"chapter {number + 1:,}", short
        elif not number and is_empty:
            raise UnreadableDocument("it has no text, only images: use an edition with text")


def _files(opf: bytes) -> Iterator[str]:
    """Yield the names of a book's files in reading order, without its table of contents."""
    book = parsed_xml(opf)
    items = {attribute(one, "id"): one for one in book.iter() if tag_of(one) == "item"}
    contents = {
        attribute(one, "href").partition("#")[0]
        for one in book.iter()
        if tag_of(one) == "reference" and attribute(one, "type") == "toc"
    }
    for ref in (one for one in book.iter() if tag_of(one) == "itemref"):
        item = items.get(attribute(ref, "idref"))
        if item is None or "nav" in attribute(item, "properties").split():
            continue
        if (file := attribute(item, "href")) not in contents:
            yield file


def _text(content: Callable[[str], bytes | None], file: str) -> str:
    """Return the text of a file, whose name may be stored with or without escapes."""
    for name in (unquote(file), file):
        if (part := content(posixpath.normpath(name))) is not None:
            return text_of(parsed(part)) if part.strip() else ""
    raise UnreadableDocument("the file is missing: replace the book")

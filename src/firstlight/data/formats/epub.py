"""Books in EPUB format: one document for each file of the book, in reading order."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

from firstlight.data.formats import UnreadableDocument
from firstlight.data.formats.html import parsed, text_of
from firstlight.data.formats.paragraphs import attribute, package, parsed_xml, tag_of


def read(path: Path) -> Iterator[tuple[str, str]]:
    """Yield ("chapter N", text) for each file of the book with text.

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
        book = parsed_xml(opf)
        items = {attribute(one, "id"): one for one in book.iter() if tag_of(one) == "item"}
        encrypted = content("META-INF/encryption.xml") or b""
        number = 0
        for ref in (one for one in book.iter() if tag_of(one) == "itemref"):
            item = items.get(attribute(ref, "idref"))
            if item is None or "nav" in attribute(item, "properties").split():
                continue
            file = posixpath.join(posixpath.dirname(name), unquote(attribute(item, "href")))
            if file.encode() in encrypted:
                raise UnreadableDocument("it is encrypted (DRM): use a copy without it")
            part = content(posixpath.normpath(file))
            if part is not None and (text := text_of(parsed(part))):
                number += 1
                yield f"chapter {number:,}", text
        if not number:
            raise UnreadableDocument("it has no text, only images: use an edition with text")

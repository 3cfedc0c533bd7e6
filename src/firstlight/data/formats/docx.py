"""Word documents: the text without deleted passages, and each footnote once, at the end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from firstlight.data.formats import UnreadableDocument
from firstlight.data.formats.paragraphs import Paragraphs, attribute, package, parsed_xml, tag_of

#: Deleted and moved text, the second version of drawings, and instructions of fields.
_DROPPED = frozenset("del moveFrom Fallback instrText delText pPr rPr sectPr tblPr".split())
_CHARACTERS = {"tab": "\t", "noBreakHyphen": "-", "cr": "\n", "br": "\n"}
_NOTES = {"footnoteReference": "footnote", "endnoteReference": "endnote"}


def read(path: Path) -> Iterator[tuple[str, str]]:
    """Yield ("", text) of a Word document.

    Raises:
        UnreadableDocument: the document is damaged, encrypted, or has no text.
    """
    with package(path) as content:
        main = content("word/document.xml")
        if main is None:
            raise UnreadableDocument("it is not a Word document: exclude it")
        notes: dict[tuple[str, str], Any] = {}
        for kind in _NOTES.values():
            if (found := content(f"word/{kind}s.xml")) is not None:
                notes |= {(kind, attribute(one, "id")): one for one in parsed_xml(found)}
        out = Paragraphs()
        used: list[tuple[str, str]] = []
        _walk(parsed_xml(main), out, used)
        for number, key in enumerate(used, start=1):
            if key in notes:
                out.mark(f"[{number}] ")
                _walk(notes[key], out, [])
        if not (text := out.text()):
            raise UnreadableDocument("it has no text: exclude it")
        yield "", text


def _walk(node: Any, out: Paragraphs, used: list[tuple[str, str]]) -> None:
    tag = tag_of(node)
    if tag in _DROPPED:
        return
    if tag == "t":
        out.add(node.text)
    elif tag in ("br", "cr") and attribute(node, "type") != "page":
        out.add_break()
    elif tag in _CHARACTERS:
        out.add(_CHARACTERS[tag])
    elif tag in _NOTES:
        used.append((_NOTES[tag], attribute(node, "id")))
        out.add(f"[{len(used)}]")
    elif tag == "tbl":
        out.end_group()
        for row in (one for one in node if tag_of(one) == "tr"):
            out.add_row([_cell(cell, used) for cell in row if tag_of(cell) == "tc"])
        out.end_group()
    else:
        if tag == "p":
            out.mark("- ") if _is_item(node) else out.end_group()
        for child in node:
            _walk(child, out, used)
        if tag == "p":
            out.end()


def _cell(cell: Any, used: list[tuple[str, str]]) -> str:
    inner = Paragraphs()
    _walk(cell, inner, used)
    return inner.line()


def _is_item(paragraph: Any) -> bool:
    """Return True for an item of a list."""
    properties = [child for child in paragraph[:1] if tag_of(child) == "pPr"]
    return any(tag_of(one) == "numPr" for child in properties for one in child)

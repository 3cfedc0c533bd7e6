"""OpenDocument texts: the text without deleted passages, and each footnote once, at the end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from firstlight.data.formats import UnreadableDocument
from firstlight.data.formats.paragraphs import Paragraphs, attribute, package, parsed_xml, tag_of

#: Deleted text, comments, and definitions of fields and forms.
_DROPPED = frozenset(
    "tracked-changes annotation sequence-decls variable-decls user-field-decls forms desc "
    "title".split()
)
_PARAGRAPHS, _SPANS = ("p", "h"), ("span", "a", "ruby-base", "meta")
#: Maximum number of spaces that one element stands for; a damaged file may have any number.
_MOST_SPACES = 100


def read(path: Path) -> Iterator[tuple[str, str]]:
    """Yield ("", text) of an OpenDocument text.

    Raises:
        UnreadableDocument: the document is damaged, encrypted, or has no text.
    """
    with package(path) as content:
        if b"encryption-data" in (content("META-INF/manifest.xml") or b""):
            raise UnreadableDocument("it is encrypted: save it without a password")
        main = content("content.xml")
        if main is None:
            raise UnreadableDocument("it is not an OpenDocument text: exclude it")
        tree = parsed_xml(main)
        out = Paragraphs()
        notes: list[Any] = []
        for body in (one for one in tree if tag_of(one) == "body"):
            _walk(body, out, notes)
        for number, note in enumerate(notes, start=1):
            out.mark(f"[{number}] ")
            _walk(note, out, [])
        if not (text := out.text()):
            raise UnreadableDocument("it has no text: exclude it")
        yield "", text


def _walk(node: Any, out: Paragraphs, notes: list[Any]) -> None:
    """Add the text of an element. The text after it belongs to its parent."""
    tag = tag_of(node)
    if not tag or tag in _DROPPED:
        return
    if tag in ("s", "tab"):
        out.add(" " * min(int(attribute(node, "c") or 1), _MOST_SPACES))
    elif tag == "line-break":
        out.add_break()
    elif tag == "note":
        notes += [one for one in node if tag_of(one) == "note-body"]
        out.add(f"[{len(notes)}]")
    elif tag == "table":
        out.end()
        for row in (one for one in node.iter() if tag_of(one) == "table-row"):
            out.add_row([_cell(cell, notes) for cell in row if tag_of(cell) == "table-cell"])
        out.end_group()
    else:
        if tag == "list-item":
            out.mark("- ")
        elif tag in _PARAGRAPHS:
            out.end()
        # White space between other elements is not text.
        has_text = tag in _PARAGRAPHS or tag in _SPANS
        out.add(node.text if has_text else None)
        for child in node:
            _walk(child, out, notes)
            out.add(child.tail if has_text else None)
        if tag == "list":
            out.end_group()
        elif tag in _PARAGRAPHS:
            out.end()


def _cell(cell: Any, notes: list[Any]) -> str:
    inner = Paragraphs()
    _walk(cell, inner, notes)
    return inner.line()

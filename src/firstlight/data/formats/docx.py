"""Word documents: the text without deleted or hidden parts, and each footnote once, at the end."""

from __future__ import annotations

import posixpath
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from firstlight.data.formats import UnreadableDocument
from firstlight.data.formats.paragraphs import (
    CODE_STYLE,
    Paragraphs,
    attribute,
    numeral,
    outermost,
    package,
    parsed_xml,
    tag_of,
)

#: Deleted and moved text, the second version of drawings, and instructions of fields.
_DROPPED = frozenset("del moveFrom Fallback instrText delText pPr rPr sectPr tblPr".split())
_CHARACTERS = {"tab": "\t", "noBreakHyphen": "-"}
_NOTES = {"footnoteReference": "footnotes", "endnoteReference": "endnotes"}
_NUMERALS = {"lowerLetter": "a", "upperLetter": "A", "lowerRoman": "i", "upperRoman": "I"}


def read(path: Path) -> Iterator[tuple[str, str]]:
    """Yield ("", text) of a Word document.

    Raises:
        UnreadableDocument: the document is damaged, encrypted, or has no text.
    """
    with package(path) as content:
        name = _related(content, "").get("officeDocument", "word/document.xml")
        main = content(name)
        if main is None:
            raise UnreadableDocument("it is not a Word document: exclude it")
        text = _Document(content, name).text(parsed_xml(main))
        if not text:
            raise UnreadableDocument("it has no text: exclude it")
        yield "", text


def _related(content: Callable[[str], bytes | None], part: str) -> dict[str, str]:
    """Return the names of the files to which a file in the package refers, by what they are."""
    folder, name = posixpath.split(part)
    if (found := content(posixpath.join(folder, "_rels", f"{name}.rels"))) is None:
        return {}
    return {
        attribute(one, "Type").rpartition("/")[2]: posixpath.normpath(
            posixpath.join("/", folder, attribute(one, "Target"))
        )[1:]
        for one in parsed_xml(found)
    }


class _Document:
    """A document that is being read.

    Attributes:
        out: the text so far.
    """

    def __init__(self, content: Callable[[str], bytes | None], name: str) -> None:
        self.out = Paragraphs(is_typed=True)
        self._files = _related(content, name)
        self._folder = posixpath.dirname(name)
        self._content = content
        self._used: list[tuple[str, str]] = []
        self._styles = {
            attribute(one, "styleId"): one for one in self._part("styles") if tag_of(one) == "style"
        }
        self._lists = _Lists(self._part("numbering"))

    def text(self, tree: Any) -> str:
        """Return the text of the document, followed by its notes."""
        self._walk(tree)
        notes = {
            (kind, attribute(one, "id")): one
            for kind in _NOTES.values()
            for one in self._part(kind)
        }
        for number, key in enumerate(list(self._used), start=1):
            if key in notes:
                self.out.mark(f"[{number}] ")
                self._walk(notes[key])
        return self.out.text()

    def _part(self, kind: str) -> Any:
        """Return the tree of a file in the package, or no elements if there is no such file."""
        name = self._files.get(kind, posixpath.join(self._folder, f"{kind}.xml"))
        found = self._content(name)
        return () if found is None else parsed_xml(found)

    def _walk(self, node: Any) -> None:
        tag, out = tag_of(node), self.out
        if tag in _DROPPED or (tag == "r" and _is_hidden(node)):
            return
        if tag == "t":
            out.add(node.text)
        elif tag in ("br", "cr") and attribute(node, "type") != "page":
            out.add_break()
        elif tag in _CHARACTERS:
            out.add(_CHARACTERS[tag])
        elif tag in _NOTES:
            self._used.append((_NOTES[tag], attribute(node, "id")))
            out.add(f"[{len(self._used)}]")
        elif tag == "tbl":
            out.end_group()
            for row in outermost(node, "tr"):
                out.add_cells([self._cell(cell) for cell in outermost(row, "tc")])
            out.end_group()
        elif tag == "p":
            self._paragraph(node)
        else:
            for child in node:
                self._walk(child)

    def _paragraph(self, node: Any) -> None:
        properties = _child(node, "pPr")
        style = self._styles.get(_value(properties, "pStyle"), ())
        numbered = [_child(one, "numPr") for one in (properties, _child(style, "pPr"))]
        mark = self._lists.mark(*numbered)
        if mark:
            self.out.mark(mark)
        else:
            self.out.end_group()
        for child in node:
            self._walk(child)
        self.out.end(is_code=bool(CODE_STYLE.search(_value(style, "name"))))

    def _cell(self, cell: Any) -> Paragraphs:
        outer, self.out = self.out, Paragraphs(is_typed=True)
        self._walk(cell)
        inner, self.out = self.out, outer
        return inner


class _Lists:
    """The numbers of the items of lists."""

    def __init__(self, numbering: Any) -> None:
        self._levels: dict[tuple[str, str], Any] = {}
        self._lists: dict[str, str] = {}
        self._restarts: set[str] = set()
        for one in numbering:
            if tag_of(one) == "abstractNum":
                name = attribute(one, "abstractNumId")
                levels = [level for level in one if tag_of(level) == "lvl"]
                self._levels |= {(name, attribute(level, "ilvl")): level for level in levels}
            elif tag_of(one) == "num":
                number = attribute(one, "numId")
                self._lists[number] = _value(one, "abstractNumId")
                if any(tag_of(node) == "startOverride" for node in one.iter()):
                    self._restarts.add(number)
        self._counts: Counter[tuple[str, str]] = Counter()

    def mark(self, own: Any, styled: Any) -> str:
        """Return the mark of the next item, such as "- " or "2. ", or "" outside of lists.

        Args:
            own: the element `numPr` of the paragraph, which may be empty.
            styled: the element `numPr` of the paragraph's style, which may be empty.
        """
        number = _value(own, "numId") or _value(styled, "numId")
        depth = _value(own, "ilvl") or _value(styled, "ilvl") or "0"
        if number in ("", "0"):
            return ""
        name = self._lists.get(number, "")
        if number in self._restarts:
            self._restarts.remove(number)
            self._counts = Counter({k: n for k, n in self._counts.items() if k[0] != name})
        for key in [key for key in self._counts if key[0] == name and key[1] > depth]:
            del self._counts[key]
        self._counts[name, depth] += 1
        level = self._levels.get((name, depth), ())
        if _value(level, "numFmt") in ("", "bullet"):
            return "- "
        label = self._label(name, _value(level, "lvlText"))
        return f"{label} " if label else ""

    def _label(self, name: str, pattern: str) -> str:
        """Fill in the numbers of a label such as "%1.%2)"."""

        def number(found: re.Match[str]) -> str:
            depth = str(int(found[1]) - 1)
            level = self._levels.get((name, depth), ())
            if _value(level, "numFmt") == "none":
                return ""
            count = int(_value(level, "start") or 1) + max(self._counts[name, depth], 1) - 1
            return numeral(count, _NUMERALS.get(_value(level, "numFmt"), "1"))

        return re.sub(r"%([1-9])", number, pattern).strip()


def _is_hidden(run: Any) -> bool:
    hidden = _child(_child(run, "rPr"), "vanish")
    return hidden != () and attribute(hidden, "val") not in ("0", "false", "off")


def _child(node: Any, tag: str) -> Any:
    """Return the first child with a name, or no elements if there is none."""
    return next((child for child in node if tag_of(child) == tag), ())


def _value(node: Any, tag: str) -> str:
    """Return the value of the first child with a name, or ""."""
    child = _child(node, tag)
    return "" if child == () else attribute(child, "val")

"""OpenDocument texts: the text without deleted passages, and each footnote once, at the end."""

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

#: Deleted text, comments, pictures, scripts, and definitions of fields and forms.
_DROPPED = frozenset(
    "tracked-changes annotation sequence-decls variable-decls user-field-decls forms desc title "
    "binary-data script ruby-text event-listeners".split()
)
_PARAGRAPHS, _FRAMES = ("p", "h"), ("frame", "text-box", "g")
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
        if not (text := _Document(content).text(parsed_xml(main))):
            raise UnreadableDocument("it has no text: exclude it")
        yield "", text


class _Document:
    """A document that is being read.

    Attributes:
        out: the text so far.
    """

    def __init__(self, content: Callable[[str], bytes | None]) -> None:
        self.out = Paragraphs(is_typed=True)
        self._content = content
        self._notes: list[Any] = []
        self._parents: dict[str, str] = {}
        self._levels: dict[tuple[str, str], Any] = {}
        self._counts: Counter[tuple[str, str]] = Counter()

    def text(self, tree: Any) -> str:
        """Return the text of the document, followed by its notes."""
        styles = self._content("styles.xml")
        for root in (tree, *(() if styles is None else (parsed_xml(styles),))):
            for one in root.iter():
                if tag_of(one) == "style":
                    self._parents[attribute(one, "name")] = attribute(one, "parent-style-name")
                elif tag_of(one) == "list-style":
                    name = attribute(one, "name")
                    self._levels |= {(name, attribute(level, "level")): level for level in one}
        for body in (one for one in tree if tag_of(one) == "body"):
            self._walk(body)
        for number, note in enumerate(list(self._notes), start=1):
            self.out.mark(f"[{number}] ")
            self._walk(note)
        return self.out.text()

    def _walk(self, node: Any, lists: tuple[str, ...] = (), *, is_inside: bool = False) -> None:
        """Add the text of an element. The text after it belongs to its parent.

        Args:
            node: the element.
            lists: names of the styles of the lists around the element.
            is_inside: True inside of a paragraph. Elsewhere, white space is not text.
        """
        tag, out = tag_of(node), self.out
        if not tag or tag in _DROPPED:
            return
        if tag in ("s", "tab"):
            spaces = " " * min(int(attribute(node, "c") or 1), _MOST_SPACES)
            out.add("\t" if tag == "tab" else spaces)
        elif tag == "line-break":
            out.add_break()
        elif tag == "note":
            self._notes += [one for one in node if tag_of(one) == "note-body"]
            out.add(f"[{len(self._notes)}]")
        elif tag == "object":
            self._formula(attribute(node, "href"))
        elif tag == "table":
            out.end_group()
            for row in outermost(node, "table-row"):
                out.add_cells([self._cell(cell) for cell in outermost(row, "table-cell")])
            out.end_group()
        elif tag == "list":
            self._list(node, lists)
        else:
            is_inside = tag in _PARAGRAPHS or (is_inside and tag not in _FRAMES)
            self._inside(node, lists, is_inside=is_inside)

    def _list(self, node: Any, lists: tuple[str, ...]) -> None:
        # A list in a list has the style of the list around it.
        name = attribute(node, "style-name") or (lists[-1] if lists else "")
        is_continued = attribute(node, "continue-numbering") == "true"
        if not is_continued and not attribute(node, "continue-list"):
            self._counts[name, str(len(lists) + 1)] = 0
        for item in node:
            if tag_of(item) == "list-item":
                self.out.mark(self._mark(item, (*lists, name)))
            self._walk(item, (*lists, name))
        if not lists:
            self.out.end_group()

    def _inside(self, node: Any, lists: tuple[str, ...], *, is_inside: bool) -> None:
        is_paragraph = tag_of(node) in _PARAGRAPHS
        if is_paragraph:
            self.out.end()
        self._add(node.text, is_inside=is_inside)
        for child in node:
            self._walk(child, lists, is_inside=is_inside)
            self._add(child.tail, is_inside=is_inside)
        if is_paragraph:
            name = attribute(node, "style-name")
            names = f"{name} {self._parents.get(name, '')}"
            self.out.end(is_code=CODE_STYLE.search(names) is not None)

    def _add(self, text: str | None, *, is_inside: bool) -> None:
        # White space in XML counts as one space, and outside of paragraphs it is not text.
        if is_inside and text:
            self.out.add(re.sub(r"\s+", " ", text))

    def _mark(self, item: Any, lists: tuple[str, ...]) -> str:
        """Return the mark of an item of a list, such as "- " or "2. "."""
        key = (lists[-1], str(len(lists)))
        level = self._levels.get(key)
        self._counts[key] += 1
        if level is None or not (style := attribute(level, "num-format")):
            return "- "
        if start := attribute(item, "start-value"):
            self._counts[key] = int(start) - int(attribute(level, "start-value") or 1) + 1
        number = self._counts[key] + int(attribute(level, "start-value") or 1) - 1
        label = f"{attribute(level, 'num-prefix')}{numeral(number, style)}"
        return f"{label}{attribute(level, 'num-suffix') or '.'} "

    def _formula(self, name: str) -> None:
        """Add a formula as it was written in the formula editor."""
        found = self._content(posixpath.normpath(posixpath.join(name, "content.xml")))
        if found is None or tag_of(tree := parsed_xml(found)) != "math":
            return
        written = [one for one in tree.iter() if tag_of(one) == "annotation"]
        self.out.add("".join((written[0] if written else tree).itertext()))

    def _cell(self, cell: Any) -> Paragraphs:
        outer, self.out = self.out, Paragraphs(is_typed=True)
        self._walk(cell)
        inner, self.out = self.out, outer
        return inner

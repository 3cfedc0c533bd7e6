"""MediaWiki dumps: .xml files, also compressed, with one document per article."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from firstlight.data.formats import UnreadableDocument
from firstlight.data.kinds import HEAD_BYTES
from firstlight.data.opening import head_of, open_compressed, optional

#: Numbers of the namespaces of files and categories, whose names depend on the wiki's language.
_FILES, _CATEGORIES = "6", "14"
#: Templates that stand for their text, and the parts of them that a reader sees.
_SHOWN = {
    **dict.fromkeys(("lang", "transl", "transliteration"), slice(-1, None)),
    **dict.fromkeys(("convert", "cvt"), slice(2)),
    **dict.fromkeys(
        "nowrap nobr nts small big abbr ipa smallcaps sup sub mvar em strong quote flag ill "
        "blockquote".split(),
        slice(1),
    ),
}
#: Tags whose content is not text. "ref" is here because a footnote has its place at the end.
_DROPPED = frozenset(
    "gallery timeline score imagemap graph hiero inputbox categorytree templatedata section style "
    "script references templatestyles".split()
)


def is_dump(head: bytes) -> bool:
    """Return True if the first bytes of a file, decompressed, begin a MediaWiki dump."""
    return re.match(rb"(?:\xef\xbb\xbf)?\s*(?:<\?xml[^>]*>\s*)?<mediawiki[\s>]", head) is not None


def read(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the title and the text of each article in a dump. The last pairs, without text, count
    the pages that were left out.

    Raises:
        UnreadableDocument: the file is not a dump, defines XML entities, or is damaged.
        MissingDependencyError: mwparserfromhell is not installed.
    """
    if not is_dump(head_of(path)[:HEAD_BYTES]):
        # A definition of entities could only stand before the first element.
        raise UnreadableDocument("it does not begin as a MediaWiki dump: exclude it")
    parser = optional("mwparserfromhell", f"reading {path.name}", "documents")
    names = {"file", "image", "category"}
    left_out: Counter[str] = Counter()
    try:
        with open_compressed(path) as file:
            for kind, page in _elements(file):
                if kind == "namespace" and page.get("key") in (_FILES, _CATEGORIES):
                    names.add((page.text or "").lower())
                elif kind == "page":
                    fields = {_tag(one): one.text or "" for one in page.iter()}
                    if "redirect" in fields:
                        left_out["redirects"] += 1
                        continue
                    if fields.get("ns", "0") != "0":
                        is_talk = int(fields["ns"]) % 2
                        left_out["talk pages" if is_talk else "pages that are not articles"] += 1
                        continue
                    article = _Article(names)
                    text = article.text(parser.parse(fields.get("text", "")))
                    left_out["templates"] += article.templates
                    if text:
                        yield fields["title"], f"{fields['title']}\n\n{text}"
    except (ElementTree.ParseError, ValueError, OSError, EOFError) as error:
        raise UnreadableDocument(f"the dump is damaged: {error}") from error
    yield from ((f"left out: {count:,} {name}", "") for name, count in left_out.items() if count)


def _tag(element: ElementTree.Element) -> str:
    return element.tag.rpartition("}")[2]


def _elements(file: Any) -> Iterator[tuple[str, ElementTree.Element]]:
    """Yield each namespace and page, with the last revision of the page only. Elements that were
    read are removed, because a dump can be larger than the memory."""
    parents: list[ElementTree.Element] = []
    for event, element in ElementTree.iterparse(file, ("start", "end")):
        if event == "start":
            if _tag(element) == "revision":
                for earlier in parents[-1].findall(element.tag)[:-1]:
                    parents[-1].remove(earlier)
            parents.append(element)
            continue
        parents.pop()
        if (tag := _tag(element)) in ("page", "namespace"):
            yield tag, element
        if len(parents) == 1:
            parents[0].clear()


class _Article:
    """Converts the markup of an article to what a person reads: links as their text, a table as one
    line per row, and each footnote once at the end. Images and categories are left out.

    Attributes:
        templates: number of templates that were left out.
    """

    def __init__(self, names: set[str]) -> None:
        """Create a converter.

        Args:
            names: prefixes of links to files and categories, in lower case.
        """
        self.templates = 0
        self._names = names
        self._notes: dict[str, None] = {}
        self._code: list[str] = []
        self._numbers: dict[str, int] = {}

    def text(self, code: Any) -> str:
        """Return the text of an article, which mwparserfromhell has parsed."""
        text = "\n".join(" ".join(line.split()) for line in self._render(code).split("\n")).strip()
        text = re.sub(r"\n{3,}", "\n\n", "\n\n".join([text, *filter(None, self._notes)]))
        return re.sub(r"\0(\d+)\0", lambda found: self._code[int(found[1])], text)

    def _render(self, code: Any) -> str:
        parts = []
        marks = ""
        for node in code.nodes if code is not None else ():
            kind = type(node).__name__
            if kind == "Tag" and node.wiki_markup in ("*", "#", ":", ";"):
                marks += str(node.wiki_markup)
                continue
            text = self._node(node)
            if marks:
                text, marks = self._mark(marks) + text.lstrip(), ""
            if kind == "Heading" or re.search(r"\n[^\n]|\n\n", text):
                self._numbers.clear()
            parts.append(text)
        return "".join(parts)

    def _mark(self, marks: str) -> str:
        """Return the mark of an item of a list, and count the items of numbered lists."""
        self._numbers = {key: n for key, n in self._numbers.items() if len(key) <= len(marks)}
        if marks[-1] == "#":
            self._numbers[marks] = self._numbers.get(marks, 0) + 1
            return f"{self._numbers[marks]}. "
        return "- " if marks[-1] == "*" else ""

    def _node(self, node: Any) -> str:
        kind = type(node).__name__
        if kind == "Text":
            return re.sub(r"__[A-Z]+__", "", str(node))
        if kind == "HTMLEntity":
            return str(node.normalize())
        if kind == "Heading":
            return f"\n\n{self._render(node.title).strip()}\n\n"
        if kind == "Argument":
            return self._render(node.default)
        if kind == "ExternalLink":
            return self._render(node.title) if node.brackets else str(node.url)
        if kind == "Wikilink":
            return self._link(node)
        if kind == "Template":
            return self._template(node)
        return self._tag(node) if kind == "Tag" else ""

    def _link(self, node: Any) -> str:
        prefix, colon, rest = str(node.title).strip().partition(":")
        # Links to the article in other languages have a code in lower case: [[de:Ulm]].
        is_language = re.fullmatch(r"[a-z]{2,3}(-[a-z-]+)?", prefix) and rest[:1].strip()
        if colon and (prefix.lower() in self._names or is_language):
            return ""
        return self._render(node.title if node.text is None else node.text).removeprefix(":")

    def _template(self, node: Any) -> str:
        name = str(node.name).strip().lower()
        if name.startswith("formatnum:"):
            return name.removeprefix("formatnum:")
        shown = _SHOWN.get("lang" if name.startswith("lang-") else name)
        values = [self._render(one.value).strip() for one in node.params if not one.showkey]
        if shown is None or not values:
            self.templates += 1
            return ""
        return " ".join(values[shown])

    def _tag(self, node: Any) -> str:
        name = str(node.tag).strip().lower()
        if name == "ref":
            self._notes[self._render(node.contents).strip()] = None
        elif name == "table":
            # The cells of the first row may stand before the first mark of a row.
            rows = [node.contents, *(row.contents for row in _tags(node.contents, "tr"))]
            cells = [[self._render(one.contents) for one in _tags(row, "th", "td")] for row in rows]
            lines = [" | ".join(" ".join(cell.split()) for cell in row) for row in cells]
            return "\n".join(["\n", *filter(None, lines), "\n"])
        elif name in ("br", "hr"):
            return "\n"
        elif name in ("syntaxhighlight", "source", "pre"):
            self._code.append(str(node.contents).strip("\n"))
            return f"\n\n\0{len(self._code) - 1}\0\n\n"
        elif name in ("math", "chem", "ce"):
            return f"${node.contents}$"
        elif name == "nowiki":
            return str(node.contents or "")
        elif name not in _DROPPED:
            return self._render(node.contents)
        return ""


def _tags(code: Any, *names: str) -> list[Any]:
    return [one for one in code.nodes if str(getattr(one, "tag", "")).lower() in names]

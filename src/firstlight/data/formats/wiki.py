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
                    elif fields.get("ns", "0") != "0":
                        is_talk = int(fields["ns"]) % 2
                        left_out["talk pages" if is_talk else "pages that are not articles"] += 1
                    elif text := _plain(parser, fields.get("text", ""), names):
                        title = fields["title"]
                        yield title, f"{title}\n\n{text}"
    except (ElementTree.ParseError, ValueError, OSError, EOFError) as error:
        raise UnreadableDocument(f"the dump is damaged: {error}") from error
    yield from ((f"left out: {count:,} {name}", "") for name, count in left_out.items())


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


def _plain(parser: Any, markup: str, names: set[str]) -> str:
    """Return the text that a reader of an article sees: links as their text, a table as one line
    per row, and each footnote once at the end. Templates, images and categories are left out.

    Args:
        parser: the module mwparserfromhell.
        markup: the article in wiki markup.
        names: prefixes of links to files and categories, in lower case.
    """
    code = parser.parse(re.sub(r"__[A-Z]+__|<gallery[\s\S]*?</gallery>", "", markup))
    notes: dict[str, None] = {}
    for link in code.filter_wikilinks():
        prefix = str(link.title).partition(":")[0].strip().lower()
        if ":" in link.title and (prefix in names or re.fullmatch(r"[a-z]{2,3}", prefix)):
            _drop(code, link)
    for tag in code.filter_tags(matches=lambda tag: tag.tag in ("ref", "table")):
        inner = tag.contents if tag.contents is not None else parser.parse("")
        if tag.tag == "ref":
            notes[inner.strip_code().strip()] = None
            _drop(code, tag)
        else:
            # The cells of the first row may stand before the first mark of a row.
            rows = [inner, *(row.contents for row in _tags(inner, "tr"))]
            cells = [_tags(row, "th", "td") for row in rows]
            lines = [
                " | ".join(" ".join(one.contents.strip_code().split()) for one in row)
                for row in cells
            ]
            _drop(code, tag, "\n".join(filter(None, lines)))
    text = re.sub(r"(?m)^[ \t]+|[ \t]+$", "", code.strip_code()).strip()
    return re.sub(r"\n{3,}", "\n\n", "\n\n".join([text, *filter(None, notes)]))


def _tags(code: Any, *names: str) -> list[Any]:
    return list(code.filter_tags(recursive=False, matches=lambda tag: tag.tag in names))


def _drop(code: Any, node: Any, text: str = "") -> None:
    """Replace a node by a text. A node inside another one that was replaced before is gone."""
    try:
        code.replace(node, text)
    except ValueError:
        return

"""Web pages: their readable part, without menus, scripts, forms and notices about cookies."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

from lxml import etree, html

from firstlight.data.formats import UnreadableDocument
from firstlight.data.formats.paragraphs import Paragraphs, attribute, parsed_xml, tag_of

_INLINE = frozenset(
    "a abbr acronym b bdi bdo big cite code data del dfn em font i ins kbd label mark math q rp "
    "ruby s samp small span strike strong sub sup time tt u var wbr nobr blink".split()
)
_DROPPED = frozenset(
    "script style noscript template nav form button select textarea input svg iframe object embed "
    "canvas audio video dialog menu rt head map annotation".split()
)
#: Elements that belong to a page rather than to its text unless they are inside the text.
_AROUND = frozenset("header footer aside".split())
_ROLES = frozenset(
    "navigation banner contentinfo search dialog alertdialog menu menubar toolbar "
    "complementary".split()
)
#: Words in the class or id of elements that are not part of the text.
_ASIDE = re.compile(
    r"(?i)(?:^|[\s_-])(?:cookies?|consent|gdpr|breadcrumbs?|sidebar|navbar|nav|navigation|menu|"
    r"pagination|social|share|sharing|advert|advertisement|ads|popup|modal|newsletter|headerlink|"
    r"skip-link|sphinxsidebar|noprint|printfooter|mw-editsection|related)(?:$|[\s_-])"
)
_DECLARED = re.compile(
    rb"""(?i)<(?:meta[^>]{0,200}?charset|\?xml[^>]{0,80}?encoding)\s*=\s*["']?([-\w]+)"""
)
_ENTITY = re.compile(r"&(?!(?:lt|gt|amp|quot|apos);)([A-Za-z]\w{1,31});")
#: A block is a menu if it has at least this number of links with at least this share of its text.
_MENU_LINKS, _MENU_SHARE = 4, 0.75


def read(path: Path) -> Iterator[tuple[str, str]]:
    """Yield ("", text) of a web page.

    Raises:
        UnreadableDocument: the page has no text.
    """
    tree = parsed(path.read_bytes())
    body = next((node for node in tree.iter() if tag_of(node) == "body"), tree)
    root = _main(body)
    out = Paragraphs()
    _walk(root, out, is_page=True)
    text = out.text()
    if not text:
        raise UnreadableDocument(
            "the page has no text; its text may be loaded by a script: save it in a browser"
        )
    yield "", text


def parsed(content: bytes) -> Any:
    """Parse HTML or XHTML, and return its tree.

    Raises:
        UnreadableDocument: the content is empty.
    """
    text = _decoded(content)
    if text.lstrip().startswith("<?xml") or "http://www.w3.org/1999/xhtml" in text[:1000]:
        try:
            whole = _ENTITY.sub(lambda found: unescape(found[0]), text)
            return parsed_xml(re.sub(r"^\s*<\?xml[^>]*\?>", "", whole))
        except UnreadableDocument:
            pass  # Many pages declare XHTML and are not well-formed.
    text = re.sub(r"^\s*<\?xml[^>]*\?>", "", text)
    try:
        return html.document_fromstring(text, parser=html.HTMLParser(no_network=True))
    except (etree.ParserError, ValueError) as error:
        raise UnreadableDocument("the page is empty: exclude it") from error


def text_of(tree: Any) -> str:
    """Return the text of a part of a book, with everything in its body."""
    out = Paragraphs()
    body = next((node for node in tree.iter() if tag_of(node) == "body"), tree)
    _walk(body, out, is_page=False)
    return out.text()


def _decoded(content: bytes) -> str:
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return content.decode("utf-16", "replace")
    declared = _DECLARED.search(content[:4096])
    for name in ["utf-8"] if declared is None else [declared[1].decode(), "utf-8"]:
        try:
            return content.decode("utf-8-sig" if name.lower() == "utf-8" else name)
        except (LookupError, UnicodeDecodeError):
            continue
    return content.decode("cp1252", "replace")


def _main(body: Any) -> Any:
    """Return the element that contains the text of a page, if one is marked as such."""
    marked = [
        node
        for node in body.iter()
        if tag_of(node) in ("main", "article") or attribute(node, "role") == "main"
    ]
    total = _length(body)
    sizes = [(_length(node), node) for node in marked[:50]]
    largest = max(sizes, key=lambda entry: entry[0], default=(0, body))
    # A page of short articles has none that contains most of the text.
    return largest[1] if largest[0] > 0.3 * total else body


def _length(node: Any) -> int:
    return sum(len(text.strip()) for text in node.itertext())


def _is_around(node: Any, tag: str) -> bool:
    """Return True for an element of a page that is not part of its text."""
    names = f"{node.get('class', '')} {node.get('id', '')}"
    style = node.get("style", "").replace(" ", "")
    if (
        node.get("role") in _ROLES
        or "hidden" in node.attrib
        or node.get("aria-hidden") == "true"
        or "display:none" in style
        or _ASIDE.search(names)
    ):
        return True
    if tag in _AROUND:
        return not any(tag_of(one) in ("main", "article") for one in node.iterancestors())
    if tag in ("ul", "ol", "div", "table", "section", "p", "dl"):
        links = list(node.iter("a", "{http://www.w3.org/1999/xhtml}a"))
        if len(links) >= _MENU_LINKS:
            return sum(map(_length, links)) >= _MENU_SHARE * _length(node)
    return False


def _walk(node: Any, out: Paragraphs, *, is_page: bool) -> None:
    """Add the text of an element. The text after it belongs to its parent."""
    tag = tag_of(node)
    if (
        not tag
        or tag in _DROPPED
        or (is_page and tag not in ("body", "html") and _is_around(node, tag))
    ):
        return
    if tag in ("br", "hr"):
        out.add_break()
    elif tag == "pre":
        out.add_verbatim("".join(node.itertext()))
    elif tag == "table" and not any(tag_of(one) == "table" for one in node.iterdescendants()):
        _add_table(node, out, is_page=is_page)
    else:
        is_block = tag not in _INLINE
        if tag == "li":
            items = [one for one in node.itersiblings(preceding=True) if tag_of(one) == "li"]
            is_ordered = node.getparent() is not None and tag_of(node.getparent()) == "ol"
            out.mark(f"{len(items) + 1}. " if is_ordered else "- ")
        elif is_block:
            out.end()
        out.add(node.text)
        for child in node:
            _walk(child, out, is_page=is_page)
            out.add(child.tail)
        if tag in ("ul", "ol"):
            out.end_group()
        elif is_block:
            out.end()


def _add_table(table: Any, out: Paragraphs, *, is_page: bool) -> None:
    out.end()
    for row in table.iter():
        if tag_of(row) == "caption":
            _walk(row, out, is_page=is_page)
        if tag_of(row) != "tr":
            continue
        cells = []
        for cell in row:
            inner = Paragraphs()
            _walk(cell, inner, is_page=is_page)
            cells += [inner.line()] if tag_of(cell) in ("td", "th") else []
        out.add_row(cells)
    out.end_group()

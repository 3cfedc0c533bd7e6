"""Web pages: their readable part, without menus, scripts, forms and notices about cookies."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

from lxml import etree, html

from firstlight.data.formats import UnreadableDocument
from firstlight.data.formats.paragraphs import Paragraphs, attribute, parsed_xml, tag_of
from firstlight.data.kinds import HEAD_BYTES, binary_file, kind_by_bytes
from firstlight.data.opening import decoded

#: Elements that begin and end a paragraph. All others, also unknown ones, are parts of a line.
_BLOCKS = frozenset(
    "address article aside blockquote body caption center dd details dialog dir div dl dt fieldset "
    "figcaption figure footer form h1 h2 h3 h4 h5 h6 header hgroup hr html legend li main nav ol "
    "option p pre section summary table tbody td tfoot th thead title tr ul".split()
)
_DROPPED = frozenset(
    "script style noscript template nav button select textarea input svg iframe object embed "
    "canvas audio video dialog menu rt rp head map annotation".split()
)
#: Elements that belong to a page rather than to its text unless they are inside the text.
_AROUND = frozenset("header footer aside".split())
_TEXTS = ("main", "article")
_ROLES = frozenset(
    "navigation banner contentinfo search dialog alertdialog menu menubar toolbar "
    "complementary".split()
)
#: Words in the class or id of elements that are not part of the text.
_ASIDE = re.compile(
    r"(?i)(?:^|[\s_-])(?:cookies?|consent|gdpr|breadcrumbs?|navbar|pagination|advertisement|popup|"
    r"modal|newsletter|headerlink|skip-link|sphinxsidebar|noprint|printfooter|mw-editsection)"
    r"(?:$|[\s_-])"
)
#: Words in the class or id of elements that are not part of the text if most of it is links.
_LINKED = re.compile(
    r"(?i)(?:^|[\s_-])(?:sidebar|nav|navigation|menu|social|share|sharing|advert|ads|related)"
    r"(?:$|[\s_-])"
)
_DECLARED = re.compile(
    rb"""(?i)<(?:meta[^>]{0,200}?charset|\?xml[^>]{0,80}?encoding)\s*=\s*["']?([-\w]+)"""
)
_ENTITY = re.compile(r"&(?!(?:lt|gt|amp|quot|apos);)([A-Za-z]\w{1,31});")
#: The text of links to footnotes and back. Without brackets, a number would belong to a word.
_NOTE = re.compile(r"\d{1,4}|[↩↑^]\ufe0e?")
#: A block is a menu if it has at least this number of links with at least this share of its text.
_MENU_LINKS, _MENU_SHARE = 4, 0.75
#: An element with more than this share of a page's text is part of the text, whatever its class is.
_MOST_SHARE = 0.5
#: A form with fewer characters than this is a search or a login, and not a page in a form.
_FORM_LENGTH = 300
#: Several paragraphs in a cell of a table are one line up to this number of characters.
_CELL_LENGTH = 200


def read(path: Path) -> Iterator[tuple[str, str]]:
    """Yield ("", text) of a web page.

    Raises:
        UnreadableDocument: the page has no text, or the file is not a web page.
    """
    content = path.read_bytes()
    head = content[:HEAD_BYTES]
    if (kind := kind_by_bytes(head)) is not None:
        raise UnreadableDocument(binary_file(path, kind))
    tree = parsed(content)
    body = next((node for node in tree.iter() if tag_of(node) == "body"), tree)
    root = _main(body)
    out = Paragraphs()
    _walk(root, out, _length(root))
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
        return html.document_fromstring(
            text, parser=html.HTMLParser(no_network=True, huge_tree=True)
        )
    except (etree.ParserError, ValueError) as error:
        raise UnreadableDocument("the page is empty: exclude it") from error


def text_of(tree: Any) -> str:
    """Return the text of a part of a book, with everything in its body."""
    out = Paragraphs()
    _walk(next((node for node in tree.iter() if tag_of(node) == "body"), tree), out)
    return out.text()


def _decoded(content: bytes) -> str:
    declared = _DECLARED.search(content[:4096])
    text = decoded(content, declared[1].decode("ascii", "replace") if declared else None)
    if text is None:
        raise UnreadableDocument("its encoding is unknown: convert it to UTF-8")
    return text


def _main(body: Any) -> Any:
    """Return the element that contains the text of a page, if it is marked as such. Of several
    articles, it is the element that contains them all."""
    for names, role in ((("main",), "main"), (("article",), "article")):
        marked = [n for n in body.iter() if tag_of(n) in names or attribute(n, "role") == role]
        if marked:
            common = set(marked[0].iterancestors()) | {marked[0]}
            for node in marked[1:]:
                common &= set(node.iterancestors()) | {node}
            found = max(common, key=lambda node: sum(1 for _ in node.iterancestors()))
            if _length(found) > 0.3 * _length(body):
                return found
    return body


def _length(node: Any) -> int:
    return sum(len(text.strip()) for text in node.itertext())


def _is_around(node: Any, tag: str, page: int) -> bool:
    """Return True for an element of a page that is not part of its text.

    Args:
        node, tag: the element and its name.
        page: length of the page's text.
    """
    names = f"{node.get('class', '')} {node.get('id', '')}"
    style = node.get("style", "").replace(" ", "")
    is_around = (
        node.get("role") in _ROLES
        or "hidden" in node.attrib
        or node.get("aria-hidden") == "true"
        or "display:none" in style
        or _ASIDE.search(names)
        or (tag == "form" and _length(node) < _FORM_LENGTH)
        or (tag in _AROUND and not any(tag_of(n) in _TEXTS for n in node.iterancestors()))
    )
    is_named = _LINKED.search(names) is not None
    if not is_around and (is_named or tag in ("ul", "ol", "div", "table", "section", "p", "dl")):
        links = [n for n in node.iter() if tag_of(n) == "a"]
        if is_named or len(links) >= _MENU_LINKS:
            share = _MOST_SHARE if is_named else _MENU_SHARE
            is_around = sum(map(_length, links)) >= share * _length(node)
    if tag == "header" and is_around and not _ASIDE.search(names):
        # The title of a page often stands above its text.
        titles = [n for n in node.iter() if tag_of(n) == "h1"]
        is_around = sum(map(_length, titles)) < _MOST_SHARE * _length(node)
    return bool(is_around) and _length(node) <= _MOST_SHARE * page


def _walk(node: Any, out: Paragraphs, page: int = 0, mark: str = "- ") -> None:
    """Add the text of an element. The text after it belongs to its parent.

    Args:
        node: the element.
        out: paragraphs to which its text is added.
        page: length of the page's text; 0 for a part of a book, in which all text is read.
        mark: number or bullet of the element, if it is an item of a list.
    """
    tag = tag_of(node)
    is_inside = tag not in ("body", "html")
    if not tag or tag in _DROPPED or (page and is_inside and _is_around(node, tag, page)):
        return
    if tag in ("br", "hr"):
        out.add_break()
    elif tag == "a" and (note := _note_mark(node)) is not None:
        out.add(note)
    elif tag == "pre":
        out.add_verbatim("".join(_verbatim(node)))
    elif tag != "table" or not _add_table(node, out, page):
        is_block = tag in _BLOCKS
        if tag == "li":
            out.mark(mark)
        elif is_block:
            out.end()
        out.add(node.text)
        number = 0
        for child in node:
            number += tag_of(child) == "li"
            _walk(child, out, page, f"{number}. " if tag == "ol" else "- ")
            out.add(child.tail)
        is_nested = node.getparent() is not None and tag_of(node.getparent()) == "li"
        if tag in ("ul", "ol") and not is_nested:
            out.end_group()
        elif is_block:
            out.end()


def _note_mark(link: Any) -> str | None:
    """Return the mark of a footnote in brackets, "" for a link from a footnote back to the text, or
    None for any other link."""
    text = "".join(link.itertext()).strip()
    if "#" not in attribute(link, "href") or not _NOTE.fullmatch(text):
        return None
    return f"[{text}]" if text.isdigit() else ""


def _verbatim(node: Any) -> Iterator[str]:
    yield "\n" if tag_of(node) == "br" else (node.text or "")
    for child in node:
        yield from _verbatim(child) if tag_of(child) else ()
        yield child.tail or ""


def _add_table(table: Any, out: Paragraphs, page: int) -> bool:
    """Add a table as lines. Return False, and add nothing, for a table that only arranges texts:
    one with tables or several long paragraphs in a cell, or with one cell per row."""
    rows = [row for row in table.iter() if tag_of(row) == "tr"]
    cells = [[one for one in row if tag_of(one) in ("td", "th")] for row in rows]
    if any(tag_of(one) == "table" for one in table.iterdescendants()):
        return False
    texts = []
    for row in cells:
        texts.append([Paragraphs() for _ in row])
        for cell, inner in zip(row, texts[-1], strict=True):
            _walk(cell, inner, page)
    inside = [inner for row in texts for inner in row]
    has_paragraphs = any(one.count() > 1 and len(one.text()) > _CELL_LENGTH for one in inside)
    if has_paragraphs or max(map(len, texts), default=0) <= 1:
        return False
    out.end()
    for caption in table:
        if tag_of(caption) == "caption":
            _walk(caption, out, page)
    for row in texts:
        out.add_row([inner.line() for inner in row])
    out.end_group()
    return True

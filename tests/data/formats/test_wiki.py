"""Tests of `data.formats.wiki` with dumps as MediaWiki writes them."""

from __future__ import annotations

import bz2
from pathlib import Path
from xml.sax.saxutils import escape

import pytest

from firstlight.data.formats import UnreadableDocument
from firstlight.data.formats.wiki import read

pytest.importorskip("mwparserfromhell")

_HEAD = """\
<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/" version="0.11" xml:lang="de">
  <siteinfo>
    <sitename>Wiki</sitename>
    <namespaces>
      <namespace key="0" case="first-letter" />
      <namespace key="6" case="first-letter">Datei</namespace>
      <namespace key="14" case="first-letter">Kategorie</namespace>
    </namespaces>
  </siteinfo>
"""
_ARTICLE = """\
{{Infobox City|name=Ulm|area={{nts|118}}}}
[[Datei:Ulm.jpg|thumb|View of [[Ulm]]]]
'''Ulm''' is a [[city|large city]] on the [[Danube]].<ref name="a">{{cite|x}} A ''good'' book.</ref>
It is old.<ref name="a" /> See [https://ulm.de its page].<!-- a comment -->

== History ==
* First
* Second

{| class="wikitable"
! Year !! People
|-
| 1900 || {{formatnum:42,000}}
|}
__NOTOC__
[[Kategorie:City]] [[en:Ulm]]
"""


def _page(title: str, *texts: str, ns: int = 0, more: str = "") -> str:
    revisions = "".join(
        f"<revision><id>{number}</id><contributor><username>A</username></contributor>"
        f'<text bytes="9" xml:space="preserve">{escape(text)}</text></revision>'
        for number, text in enumerate(texts)
    )
    return f"<page><title>{title}</title><ns>{ns}</ns><id>1</id>{more}{revisions}</page>\n"


def _read(path: Path, *pages: str, head: str = _HEAD) -> list[tuple[str, str]]:
    content = f"{head}{''.join(pages)}</mediawiki>\n".encode()
    path.write_bytes(bz2.compress(content) if path.suffix == ".bz2" else content)
    return list(read(path))


@pytest.mark.parametrize("name", ["a.xml", "a.xml.bz2"])
def test_read_article_keeps_what_a_person_reads(tmp_path: Path, name: str) -> None:
    assert _read(tmp_path / name, _page("Ulm", _ARTICLE)) == [
        (
            "Ulm",
            "Ulm\n\nUlm is a large city on the Danube.\nIt is old. See its page.\n\n"
            "History\n\n- First\n- Second\n\nYear | People\n1900 | 42,000\n\nA good book.",
        ),
        ("left out: 2 templates", ""),
    ]


def test_read_dump_counts_redirects_and_pages_that_are_not_articles(tmp_path: Path) -> None:
    found = _read(
        tmp_path / "a.xml",
        _page("One", "Earlier text.", "Last text."),
        _page("Two", "#REDIRECT [[One]]", more='<redirect title="One" />'),
        _page("Talk:One", "Hello", ns=1),
        _page("User talk:A", "Hello", ns=3),
        _page("User:A", "I am A.", ns=2),
        _page("Empty", ""),
    )
    assert found == [
        ("One", "One\n\nLast text."),
        ("left out: 1 redirects", ""),
        ("left out: 2 talk pages", ""),
        ("left out: 1 pages that are not articles", ""),
    ]


def test_read_dump_with_entities_is_rejected(tmp_path: Path) -> None:
    levels = "".join(f'<!ENTITY a{n} "{f"&a{n - 1};" * 10}">' for n in range(1, 12))
    head = f'<?xml version="1.0"?><!DOCTYPE mediawiki [<!ENTITY a0 "a">{levels}]>{_HEAD}'
    with pytest.raises(UnreadableDocument, match="it does not begin as a MediaWiki dump"):
        _read(tmp_path / "a.xml", _page("A", "&a11;"), head=head)


def test_read_truncated_dump_yields_its_articles_and_then_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "a.xml"
    path.write_text(_HEAD + _page("One", "Text.") + "<page><title>Two", "utf-8")
    pages = read(path)
    assert next(pages) == ("One", "One\n\nText.")
    with pytest.raises(UnreadableDocument, match="the dump is damaged: "):
        next(pages)


@pytest.mark.parametrize(
    ("markup", "expected"),
    [
        (
            "It is {{unknown|x}} {{convert|5|km|mi}} from {{lang|fr|la mer}}, {{nowrap|not far}}.",
            "It is 5 km from la mer, not far.",
        ),
        (
            "See [[DNA: The Story]], [[:Kategorie:City|all]], [[w:Ulm]].[[de:Ulm]][[zh-yue:Ulm]]",
            "See DNA: The Story, all, w:Ulm.",
        ),
        (
            "Steps:\n# one\n# two\n## two, one\n# three\n\nText\n# one\n* item",
            "Steps:\n1. one\n2. two\n1. two, one\n3. three\n\nText\n1. one\n- item",
        ),
        ("Text\n== Head ==\nMore\n=== Sub ===\nEnd", "Text\n\nHead\n\nMore\n\nSub\n\nEnd"),
        (
            "Code:\n<syntaxhighlight lang=py>\ndef f():\n    return __A__\n\n\n# * [[x]]\n"
            "</syntaxhighlight>\n",
            "Code:\n\ndef f():\n    return __A__\n\n\n# * [[x]]",
        ),
        (
            "The value <math>x^2</math> of <nowiki>[[x]]</nowiki><br>{{{1|one}}} &amp; two"
            "<gallery>\nA.jpg\n</gallery>",
            "The value $x^2$ of [[x]]\none & two",
        ),
    ],
)
def test_read_article_keeps_links_lists_headings_and_code(
    tmp_path: Path, markup: str, expected: str
) -> None:
    (_, text), *_ = _read(tmp_path / "a.xml", _page("T", markup))
    assert text == f"T\n\n{expected}"

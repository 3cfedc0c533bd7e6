"""The sizes of README.md, CHANGELOG.md and docs/: lines, words, and words per sentence."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_DOCS = sorted(
    path for path in (_ROOT / "docs").rglob("*.md") if path.parent != _ROOT / "docs" / "reference"
)
_PAGES = [_ROOT / "README.md", _ROOT / "SECURITY.md", *_DOCS]
#: The longest sentence of a page, in words.
_LONGEST = 40


def _paragraphs(page: str) -> Iterator[str]:
    """The paragraphs and list items of a page, without code blocks, tables, headings, pictures."""
    page = re.sub(r"^```.*?^```|<!--.*?-->", "", page, flags=re.M | re.S)
    block: list[str] = []
    for line in [*page.splitlines(), ""]:
        is_item = re.match(r" {0,3}(?:[-*]|\d+\.) ", line)
        if is_item or not line.strip() or re.match(r"    |\||#|!\[", line):
            if block:
                yield " ".join(block)
            block = [line[is_item.end() :]] if is_item else []
        else:
            block.append(line.strip())


def _sentences(page: str) -> Iterator[str]:
    """The sentences of a page; code within a line and the text of a link count as words."""
    for paragraph in _paragraphs(page):
        text = re.sub(r"`[^`]*`", "CODE", paragraph)
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
        yield from re.split(r"(?<=[.!?])[\"')*\]]*\s+(?=[\"'(*\[]*[A-Z0-9])", text)


def test_documented_sentences_exclude_code_tables_and_headings() -> None:
    page = (
        "# A title\n\nOne `a. B` two [three\nfour](x.md#y). Five (0.5 s). 6 seven:\n\n"
        "    firstlight train. A\n\n| a. B | c |\n\n- eight\n  nine\n1. ten **Eleven.** Twelve\n"
        "```\nA. B.\n```\n"
    )
    assert list(_sentences(page)) == [
        "One CODE two three four.",
        "Five (0.5 s).",
        "6 seven:",
        "eight nine",
        "ten **Eleven.",
        "Twelve",
    ]


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: str(page.relative_to(_ROOT)))
def test_page_has_no_sentence_over_40_words(page: Path) -> None:
    sentences = list(_sentences(page.read_text(encoding="utf-8")))
    assert sentences
    assert [one for one in sentences if len(one.split()) > _LONGEST] == []


def test_readme_has_at_most_120_lines() -> None:
    assert len((_ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def test_docs_have_at_most_45000_words() -> None:
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in _DOCS) <= 45_000


def test_changelog_has_at_most_60_lines_per_version() -> None:
    text = (_ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.split(r"^## ", text, flags=re.M)[1:]
    assert versions
    assert [one.splitlines()[0] for one in versions if len(one.splitlines()) > 60] == []


def test_architecture_page_has_at_most_4000_words_and_40_per_decision() -> None:
    text = (_ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert len(text.split()) <= 4000
    decisions = re.findall(r"^- (.*(?:\n  .*)*)", text.partition("## Decisions")[2], flags=re.M)
    assert len(decisions) > 50
    assert [decision for decision in decisions if len(decision.split()) > 40] == []

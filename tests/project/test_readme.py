"""README.md: its length, its table beside other programs, and its figures, which stand in docs/."""

from __future__ import annotations

import re
from pathlib import Path

from firstlight.models import FAMILIES

_ROOT = Path(__file__).parents[2]
_README = (_ROOT / "README.md").read_text(encoding="utf-8")
_PROGRAMS = (
    *("firstlight", "nanoGPT", "nanochat", "litgpt", "torchtitan", "HF Trainer", "axolotl"),
    "unsloth",
)


def test_it_is_short() -> None:
    # Without the table of families, which has a row for each.
    assert len(_README.splitlines()) - len(FAMILIES) <= 127


def _table() -> list[list[str]]:
    """The cells of each row of the table beside other programs, its titles first."""
    text = _README.partition("## Comparison with other programs")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return [rows[0], *rows[2:]]


def test_each_answer_about_a_program_leads_to_where_it_is_documented() -> None:
    titles, *rows = _table()
    assert tuple(re.sub(r"\[([^]]+)\].*", r"\1", title) for title in titles) == _PROGRAMS
    addresses = ["docs/", *(re.sub(r".*\((.*)\)", r"\1/blob/", one) for one in titles[1:])]
    assert len(rows) >= 20
    for question, *answers in rows:
        assert len(answers) == len(_PROGRAMS), question
        kinds = "yes|partly|no" if "Families" not in question else r"\d+\+?|hundreds|those of \w+"
        for answer, address in zip(answers, addresses, strict=True):
            found = re.fullmatch(rf'\[({kinds})\]\(([^ )]+)( "[^"]+")?\)', answer)
            assert found, (question, answer)
            assert found[2].startswith(address), (question, answer)
            # "partly" says which part.
            assert found[3] or found[1] != "partly", (question, answer)


def _families() -> int:
    """Number of families in the table of docs/model-families.md."""
    page = (_ROOT / "docs" / "model-families.md").read_text(encoding="utf-8")
    table = page.partition("## Agreement with transformers")[2].partition("\n## ")[0]
    return len(re.findall(r"^\| [^|]+ \| `\w+` \| \d", table, re.M))


def test_the_number_of_families_is_that_of_their_page() -> None:
    row = next(row for row in _table() if row[0].startswith("Families"))
    assert row[1] == f"[{_families()}](docs/model-families.md)"
    assert f" {_families()} families, logits are within" in _README


def test_figures_of_the_promises_are_those_of_the_pages_that_they_name() -> None:
    text = _README.partition("## Five promises")[2].partition("\n## ")[0]
    promises = re.split(r"^\d\. ", text, flags=re.M)[1:]
    assert len(promises) == 5
    for promise in promises:
        page = re.search(r"\[(?:Figures|Each guarantee)\]\((docs/[^)#]+)", promise)
        assert page, promise
        shown = (_ROOT / page[1]).read_text(encoding="utf-8")
        said = re.sub(r"`[^`]*`|\]\([^)]*\)", "", promise)
        # Numbers of two digits and more: "1.56", "3,952", "2.6e-5", the 124 of "GPT-2 124M".
        figures = re.findall(r"(?<![\w.])\d[\d.,]*\d(?:e-\d)?", said)
        families = [f"{_families()}"] if f"{_families()} families" in said else []
        assert [one for one in figures if one not in shown and one not in families] == []
        assert figures, promise
        assert re.search(r"Tests?:\s+`(?:benchmarks/)?tests/", promise), promise


def test_the_figures_of_the_demo_are_those_of_the_quickstart() -> None:
    shown = (_ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    demo = shown.partition("## The demo")[2].partition("\n## ")[0]
    said = re.search(
        r"needs ([\d.]+)\nbits per byte of held-out files, gzip ([\d.]+) and xz ([\d.]+)",
        _README,
    )
    assert said
    assert f"**{said[1]}** (gzip -9 on the same bytes: {said[2]}, xz: {said[3]};" in demo

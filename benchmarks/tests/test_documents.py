"""Tests of `benchmarks documents`: the measures, and a call without and with another program."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import documents
from benchmarks.__main__ import main
from benchmarks.documents import (
    Made,
    distance,
    document_table,
    missing_pairs,
    plain,
    share_wrong,
    source_of,
)
from firstlight.errors import ConfigError

_PARAGRAPH = "The paragraph number {} of this manual is long enough to count as one that has prose"


@pytest.fixture
def manual(tmp_path: Path) -> Path:
    """Return a manual of twelve paragraphs of prose, a list and a short line."""
    paragraphs = [_PARAGRAPH.format(number) + " in\nit, twice." for number in range(12)]
    path = tmp_path / "sources" / "manual.en.txt"
    path.parent.mkdir()
    path.write_text("\n\n".join(["Short.", "- " + "item " * 30, *paragraphs]), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [("kitten", "sitting", 3), ("", "abc", 3), ("abc", "", 3), ("flaw", "lawn", 2), ("äß", "äß", 0),
     ("ab" * 500, "b" + "ab" * 499 + "x", 2)],
)  # fmt: skip
def test_distance_counts_changed_characters(left: str, right: str, expected: int) -> None:
    assert distance(left, right) == expected


def test_plain_text_has_no_marks_of_layout() -> None:
    text = "# A\n\n- b\u00ad c\n2. d\n| e | f |\n|---|:-:|\n  ---- ----\n[1] g - 3-4\n"
    assert plain(text) == "A b c d e f g - 3-4"


def test_share_wrong_has_footnotes_anywhere_but_once() -> None:
    made = Made("EPUB", Path("a.epub"), "one two three", ["a note"])
    assert share_wrong(made, "one [1] two\n\n[1] a note\n\nthree") == 0
    assert share_wrong(made, "one two three") == 6 / 19
    assert share_wrong(made, "one two three a note a note") == 7 / 19
    assert share_wrong(made, "ome two three\na note") == 1 / 19


def test_missing_pairs_are_counted_with_their_number() -> None:
    assert missing_pairs("a b a b c", "B, c! a b") == 2 / 4
    assert missing_pairs("\u4e2d\u6587\u4e2d", "\u4e2d \u6587") == 1 / 2


def test_source_has_prose_only_with_footnotes_lists_and_tables(manual: Path) -> None:
    source = source_of(manual, 10_000)
    assert source.language == "en"
    assert "Short" not in source.text
    assert "item" not in source.text
    first = _PARAGRAPH.format(0) + " in it, twice."
    assert source.text.split("\n\n")[:2] == ["The paragraph number 0 o", first]
    # The fourth paragraph has a footnote, the sixth a list and a table after it.
    assert source.notes == ["has prose in it, twice. 3 The paragraph number 3 o"]
    assert "[^1]: " in source.markdown
    assert "| 5 |" in source.markdown
    assert len(source_of(manual, 150).text.split("\n\n")) == 3


def test_source_without_language_or_prose_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "manual.txt").write_text("text")
    with pytest.raises(ConfigError, match=r"rename it to NAME\.LANGUAGE\.txt"):
        source_of(tmp_path / "manual.txt", 100)
    (tmp_path / "manual.de.txt").write_text("Kurz.\n\n* Liste")
    with pytest.raises(ConfigError, match="no paragraph of prose"):
        source_of(tmp_path / "manual.de.txt", 100)


def test_documents_bench_reads_each_document_once(
    tmp_path: Path, manual: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The only other program is a script that writes one paragraph of the manual's two."""
    first, second = _PARAGRAPH.format(1) + " in it.", _PARAGRAPH.format(2) + " in it."
    manual.write_text(f"{first}\n\n{second}")
    page = manual.with_name("manual.en.html")
    page.write_text(f"<nav><a href='#'>Menu</a></nav><p>{first}</p><p>{second}</p>")
    program = tmp_path / "programs" / "trafilatura"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\nimport os\nos.mkdir('out')\n")
    with program.open("a") as file:
        file.write(f"open('out/a.txt', 'w').write({first!r})\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    out = tmp_path / "out"
    words = ["documents", str(manual.parent), "--out", str(out), "--turns", "2", "--reads", "1"]
    assert main(words) == 0
    found = capsys.readouterr()
    assert "not installed: pandoc, soffice, chromium, pdftotext; " in found.err
    runs = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert [(run["kind"], run["document"], run["wrong"]) for run in runs] == [
        ("mail", "manual.en.eml", 0), ("mbox", "manual.en.mbox", 0),
        ("manual, HTML", "manual.en.html", 0),
    ]  # fmt: skip
    words_in_first = len(first.split())
    assert runs[2]["other_wrong"] == words_in_first / (2 * words_in_first - 1)
    assert [len(run["seconds"]) for run in runs] == [2, 2, 2]
    rows = [line.split() for line in found.out.splitlines()]
    assert rows[0][:6] == ["wrong", "in", "%", "files", "en", "MB/s"]
    assert [row[0] for row in rows[1:4]] == ["mail", "manual,", "mbox"]
    assert rows[1][1:3] == ["1", "0.00"]
    assert (out / "documents.png").is_file()
    monkeypatch.setattr(documents, "measure", lambda *_: pytest.fail("measured again"))
    assert main(words) == 0


def test_document_table_has_the_worst_share_and_the_median_speed() -> None:
    run = {"kind": "PDF", "bytes": 2_000_000, "other": "pdftotext", "language": "de"}
    runs = [
        {**run, "wrong": 0.01, "seconds": [1, 9, 2], "other_wrong": 0.5, "other_seconds": [4]},
        {**run, "wrong": 0.02, "seconds": [2]},
        {**run, "kind": "mail", "language": "en", "other": "", "wrong": 0, "seconds": [4]},
    ]
    assert document_table(runs) == [
        ["wrong in %", "files", "de", "en", "MB/s", "other program"],
        ["PDF", "2", "2.00/50.00", "", "1.00/0.50", "pdftotext"],
        ["mail", "1", "", "0.00", "0.50", ""],
    ]

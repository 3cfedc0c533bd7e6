"""The page of two compared models shows all results, and escapes their texts."""

from __future__ import annotations

from pathlib import Path

from firstlight.evaluation.comparison import (
    ComparedAnswer,
    ComparedValue,
    ModelComparison,
    Passage,
    Segment,
)
from firstlight.evaluation.scores import Metric
from firstlight.report.model_comparison import write_page
from report_runs import HOSTILE, Page


def value(name: str, unit: str, size: int | None = None) -> ComparedValue:
    before, after = Metric(1.5, 0.01), Metric(1.25, 0.02)
    return ComparedValue(name, before, after, Metric(-0.25, 0.005), unit, 40, size)


def page_of(comparison: ModelComparison, folder: Path) -> Page:
    write_page(comparison, folder / "page.html")
    return Page((folder / "page.html").read_text(encoding="utf-8")).harmless()


def test_model_page_shows_values_marks_and_answers(tmp_path: Path) -> None:
    segments = (
        Segment("the ", 1.0, 1.0, marked=False),
        Segment("king", 1.0, 7.25, marked=True),
        Segment("\n", 2.0, 1.0, marked=False),
    )
    texts = [value("a.txt", "documents", 1000), value("b.txt", "rows", 500)]
    page = page_of(
        ModelComparison(
            "base",
            "tuned",
            same_tokenizer=False,
            texts=texts,
            total=value("all texts", "rows", 1500),
            worse=[Passage("a.txt", 3, 5.25, segments)],
            better=[],
            tasks=[value("hellaswag acc", "items")],
            answers=[ComparedAnswer("Who?", "I", "you")],
        ),
        tmp_path,
    )
    assert page.texts("h1") == ["base → tuned"]
    row = ["1.500 ± 0.010", "1.250 ± 0.020", "-0.2500 ± 0.0050"]
    assert page.texts("td") == [
        *(*row, "40 documents"),
        *(*row, "40 rows"),
        *(*row, "40 rows"),
        *(*row, "40 items"),
    ]
    assert page.texts("h2") == [
        "Bits per byte lower is better",
        "Tasks",
        "Passages that got worse",
        "Answers",
    ]
    assert "a.txt, document 3 +5.2 bits" in page.texts("h3")
    spans = [a for tag, a in page.elements if tag == "span" and "title" in a]
    assert [one["class"] for one in spans] == ["rise s4 carries", "fall s1"]
    assert spans[0]["title"] == "1.00 → 7.25 bits"
    assert page.texts("pre") == ["the king\n", "I", "you"]
    assert "Different tokenizers" in " ".join(page.texts("p"))


def test_model_page_escapes_hostile_texts(tmp_path: Path) -> None:
    text = "".join(HOSTILE)
    segments = (Segment(text, 1.0, 2.0, marked=True), Segment(text, 1.0, 1.0, marked=False))
    passage = Passage(text, 1, 1.0, segments)
    page_of(
        ModelComparison(
            text,
            text,
            same_tokenizer=True,
            texts=[value(text, "rows", 1)],
            total=value(text, "rows", 1),
            worse=[passage],
            better=[passage],
            tasks=[value(text, "items")],
            answers=[ComparedAnswer(text, text, text)],
        ),
        tmp_path,
    )

"""README.md and docs/comparison.md: figures that are on the linked pages, and answers about other
programs."""

from __future__ import annotations

import re
from pathlib import Path

from firstlight.models import FAMILIES

_ROOT = Path(__file__).parents[2]
_README = (_ROOT / "README.md").read_text(encoding="utf-8")
_COMPARISON = (_ROOT / "docs" / "comparison.md").read_text(encoding="utf-8")
#: Where the files of each program lie, by the column of docs/comparison.md.
_ADDRESSES = {
    "firstlight": "",
    "nanoGPT": "https://github.com/karpathy/nanoGPT/blob/master/",
    "nanochat": "https://github.com/karpathy/nanochat/blob/master/",
    "litgpt": "https://github.com/Lightning-AI/litgpt/blob/main/",
    "torchtitan": "https://github.com/pytorch/torchtitan/blob/main/",
    "HF": "https://github.com/huggingface/",
    "axolotl": "https://github.com/axolotl-ai-cloud/axolotl/blob/main/",
    "unsloth": "https://github.com/unslothai/unsloth/blob/main/",
}
#: Rows of README.md, and those of docs/comparison.md with the same answers.
_ROWS = {
    "trains a tokenizer": "Trains a tokenizer on your texts",
    "raw text in, model out; automatic settings": (
        "One command from a folder of texts, settings chosen"
    ),
    "plans memory and speed": "Plans memory and speed, for other hardware too",
    "resume, bit for bit": "Resumes bit for bit after a kill, tested",
    "trains on a CPU": "Trains on a CPU",
    "GGUF and Ollama": "Exports to GGUF and Ollama",
    "reinforcement learning": "Reinforcement learning (GRPO)",
    "images": "Images, audio",
}


def _table(text: str) -> dict[str, dict[str, str]]:
    """The cells of the table in a text, by their row and their column."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    titles = [re.sub(r"\[([^]]+)\].*", r"\1", title) for title in rows[0]]
    return {name: dict(zip(titles, cells, strict=True)) for name, *cells in rows[2:]}


def _section(title: str) -> str:
    return _README.partition(f"## {title}\n")[2].partition("\n## ")[0]


def test_readme_program_answers_link_to_file_of_its_repository() -> None:
    table = _table(_COMPARISON)
    assert len(table) >= 30
    for question, cells in table.items():
        assert list(cells) == list(_ADDRESSES), question
        for program, cell in cells.items():
            if cell in ("not found", "-"):
                assert program != "firstlight", question
                continue
            link = re.fullmatch(r"\[([^]]+)\]\(([^ )]+)\)", cell)
            assert link, (question, program)
            assert link[2].startswith(_ADDRESSES[program]), (question, program)
            assert program != "firstlight" or "//" not in link[2], question


def test_readme_answers_match_comparison_page() -> None:
    table, whole = _table(_section("Comparison with other programs")), _table(_COMPARISON)
    assert list(table) == list(_ROWS)
    for name, cells in table.items():
        for program, said in cells.items():
            column = {"HF, TRL": "HF"}.get(program, program)
            answer = re.sub(r"\[([^]]+)\].*", r"\1", whole[_ROWS[name]][column])
            assert said == (answer if answer in ("yes", "no") else "partly"), (name, program)


def test_readme_number_of_families_matches_table() -> None:
    cell = _table(_COMPARISON)["Model families it loads"]["firstlight"]
    assert cell == f"[{len(FAMILIES)}](model-families.md)"
    assert f"In {len(FAMILIES)} families, logits are within" in _README


def test_readme_figures_match_linked_pages() -> None:
    promises = re.split(r"^\d\. ", _section("Five promises"), flags=re.M)[1:]
    assert len(promises) == 5
    for promise in promises:
        page = re.search(r"\[(?:figures|each guarantee)\]\((docs/[^)#]+)", promise)
        assert page, promise
        shown = (_ROOT / page[1]).read_text(encoding="utf-8")
        said = re.sub(r"`[^`]*`|\]\([^)]*\)", "", promise.partition("\n\n")[0])
        # Numbers of two digits and more: "1.56", "3,952", "2.6e-5", the 124 of "GPT-2 124M".
        figures = re.findall(r"(?<![\w.])\d[\d.,]*\d(?:e-\d)?", said)
        counts = [f"{len(FAMILIES)}"] if "families" in said else []
        assert [one for one in figures if one not in shown and one not in counts] == []
        assert figures, promise


def test_readme_demo_figures_match_quickstart() -> None:
    shown = (_ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    demo = shown.partition("## The demo")[2].partition("\n## ")[0]
    said = re.search(
        r"reaches ([\d.]+) bits per byte, compared with ([\d.]+) for gzip and ([\d.]+) for xz",
        " ".join(_README.split()),
    )
    assert said
    assert f"**{said[1]}** (gzip -9 on the same bytes: {said[2]}, xz: {said[3]};" in demo

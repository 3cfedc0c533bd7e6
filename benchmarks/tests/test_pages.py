"""benchmarks/pages.py: blocks of pages, their replacement, and a second call."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks import pages
from benchmarks.__main__ import benchmarks
from firstlight.cli.bench import bench_group

PAGE = """# A page
<!-- benchmark one, 3 minutes: python -m benchmarks loading --repeats 3 -->
old \\1 figures
<!-- end -->
Between.
<!-- benchmark two, 4 minutes: firstlight bench gemm -->
others
<!-- end -->
The end.
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a page, in which `pages` works on an idle machine."""
    docs = tmp_path / "docs"
    for name in ("benchmarks", "images"):
        (docs / name).mkdir(parents=True)
    (docs / "benchmarks" / "page.md").write_text(PAGE, encoding="utf-8")
    monkeypatch.setattr(pages, "others_share", lambda: 0.02)
    monkeypatch.setattr(pages, "PAGES", docs / "benchmarks")
    monkeypatch.setattr(pages, "IMAGES", docs / "images")
    monkeypatch.setattr(pages, "RESULTS", tmp_path / "bench-results")
    return tmp_path


def test_benchmark_pages_have_blocks_with_existing_commands() -> None:
    blocks = pages.blocks()
    names = {path.name for path in pages.PAGES.glob("*.md") if not path.name.startswith("gpu-")}
    names -= {"learning.md", "budget.md"}
    assert {block.page.name for block in blocks if block.page is not None} == names
    for learning in (False, True):
        named = [one for one in blocks if one.name.startswith("learning-") is learning]
        assert 0 < sum(one.minutes for one in named if "budget" not in one.name) < 120
    for block in blocks:
        program, *words = shlex.split(block.command)
        group, words = (
            (bench_group, words[1:]) if program == "firstlight" else (benchmarks, words[2:])
        )
        name, *options = words
        command = group.commands[name]
        with command.make_context(name, [*options, "--out", "x"]) as context:
            assert not context.args


def test_benchmark_pages_update_replaces_blocks_and_resumes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []
    fails = ["two"]

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        asked.append(command[1:])
        out = Path(command[-1])
        out.mkdir(parents=True, exist_ok=True)
        (out / "picture.png").write_bytes(out.name.encode())
        text = f"figures of {out.name} \\g<0>\nwritten: x\n"
        return subprocess.CompletedProcess(command, int(out.name in fails), text)

    monkeypatch.setattr(subprocess, "run", run)
    page, images = pages.PAGES / "page.md", pages.IMAGES
    with pytest.raises(SystemExit, match="stopped at two: the same command resumes there"):
        pages.main(["one", "two"])
    text = page.read_text(encoding="utf-8")
    assert "```text\nfigures of one \\g<0>\n```\n\n![one](../images/one.png)\n" in text
    assert "old" not in text
    assert "\n<!-- end -->\nBetween.\n" in text
    assert "\nothers\n<!-- end -->\nThe end.\n" in text
    assert (images / "one.png").read_bytes() == b"one"
    fails.clear()
    pages.main(["one", "two"])
    results = pages.RESULTS
    assert asked == [
        ["-m", "benchmarks", "loading", "--repeats", "3", "--out", str(results / "one")],
        *(["-m", "firstlight", "bench", "gemm", "--out", str(results / "two")] for _ in range(2)),
    ]
    assert "figures of two" in page.read_text(encoding="utf-8")


def test_benchmark_pages_taking_hours_are_measured_by_name_only(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[str] = []
    monkeypatch.setattr(pages, "measure", lambda block: measured.append(block.name))

    def asked(*names: str) -> list[str]:
        measured.clear()
        pages.main(list(names))
        return [*measured]

    assert asked() == ["one", "two"]
    apart = [block.name for block in pages.blocks() if block.page is None]
    learning = [name for name in apart if name.startswith("learning")]
    assert len(learning) > 4
    assert learning[-1] == "learning-minute"
    assert asked("learning") == learning
    assert asked("two", "learning-bytes") == ["two", "learning-bytes"]
    assert asked("learning-30m") == ["learning-30m"]
    assert asked("budget") == ["budget-3m", "budget-10m", "budget-30m"]
    assert {*learning, *asked("budget")} == {*apart}


def test_benchmark_pages_update_on_busy_machine_exits(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "others_share", lambda: 0.4)
    with pytest.raises(SystemExit, match="40% of the processors are busy: call again"):
        pages.main(["one"])
    assert "old" in (pages.PAGES / "page.md").read_text(encoding="utf-8")

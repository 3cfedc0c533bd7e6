"""scripts/benchmarks.py: blocks of pages, their replacement, and what a second call does."""

from __future__ import annotations

import importlib.util
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from firstlight.cli.bench import bench_group

ROOT = Path(__file__).resolve().parents[2]

PAGE = """# A page
<!-- benchmark one, 3 minutes: firstlight bench loading --repeats 3 -->
old \\1 figures
<!-- end -->
Between.
<!-- benchmark two, 4 minutes: firstlight bench gemm -->
others
<!-- end -->
The end.
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, with folders of its own and a machine that is quiet."""
    place = ROOT / "scripts" / "benchmarks.py"
    specification = importlib.util.spec_from_file_location("benchmarks", place)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    # A dataclass looks its module up.
    monkeypatch.setitem(sys.modules, "benchmarks", module)
    specification.loader.exec_module(module)
    pages = tmp_path / "docs" / "benchmarks"
    for folder in (pages, tmp_path / "docs" / "images"):
        folder.mkdir(parents=True)
    (pages / "page.md").write_text(PAGE, encoding="utf-8")
    monkeypatch.setattr(module, "others_share", lambda: 0.02)
    return module


def in_folder(script: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "PAGES", folder / "docs" / "benchmarks")
    monkeypatch.setattr(script, "IMAGES", folder / "docs" / "images")
    monkeypatch.setattr(script, "RESULTS", folder / "benchmarks")


def test_each_page_has_blocks_whose_commands_there_are(script: ModuleType) -> None:
    blocks = script.blocks()
    pages = {path.name for path in script.PAGES.glob("*.md") if not path.name.startswith("gpu-")}
    pages -= {"learning.md", "budget.md"}
    assert {block.page.name for block in blocks if block.page is not None} == pages
    for learning in (False, True):
        named = [one for one in blocks if one.name.startswith("learning-") is learning]
        assert 0 < sum(one.minutes for one in named if "budget" not in one.name) < 120
    for block in blocks:
        name, *options = shlex.split(block.command)[2:]
        command = bench_group.commands[name]
        with command.make_context(name, [*options, "--out", "x"]) as context:
            assert not context.args


def test_figures_and_pictures_are_replaced_and_a_second_call_goes_on(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_folder(script, tmp_path, monkeypatch)
    asked: list[list[str]] = []
    fails = ["two"]

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        asked.append(command[3:])
        out = Path(command[-1])
        out.mkdir(parents=True, exist_ok=True)
        (out / "picture.png").write_bytes(out.name.encode())
        text = f"figures of {out.name} \\g<0>\nwritten: x\n"
        return subprocess.CompletedProcess(command, int(out.name in fails), text)

    monkeypatch.setattr(script.subprocess, "run", run)
    page, images = script.PAGES / "page.md", script.IMAGES
    with pytest.raises(SystemExit, match="stopped at two: the same command goes on there"):
        script.main(["one", "two"])
    text = page.read_text(encoding="utf-8")
    assert "```text\nfigures of one \\g<0>\n```\n\n![one](../images/one.png)\n" in text
    assert "old" not in text
    assert "\n<!-- end -->\nBetween.\n" in text
    assert "\nothers\n<!-- end -->\nThe end.\n" in text
    assert (images / "one.png").read_bytes() == b"one"
    fails.clear()
    script.main(["one", "two"])
    results = script.RESULTS
    assert asked == [
        ["bench", "loading", "--repeats", "3", "--out", str(results / "one")],
        *(["bench", "gemm", "--out", str(results / "two")] for _ in range(2)),
    ]
    assert "figures of two" in page.read_text(encoding="utf-8")


def test_pages_that_take_hours_are_measured_by_name_only(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_folder(script, tmp_path, monkeypatch)
    measured: list[str] = []
    monkeypatch.setattr(script, "measure", lambda block: measured.append(block.name))

    def asked(*names: str) -> list[str]:
        measured.clear()
        script.main(list(names))
        return [*measured]

    assert asked() == ["one", "two"]
    apart = [block.name for block in script.blocks() if block.page is None]
    learning = [name for name in apart if name.startswith("learning")]
    assert len(learning) > 4
    assert learning[-1] == "learning-minute"
    assert asked("learning") == learning
    assert asked("two", "learning-bytes") == ["two", "learning-bytes"]
    assert asked("learning-30m") == ["learning-30m"]
    assert asked("budget") == ["budget-3m", "budget-10m", "budget-30m"]
    assert {*learning, *asked("budget")} == {*apart}


def test_a_busy_machine_is_refused(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_folder(script, tmp_path, monkeypatch)
    monkeypatch.setattr(script, "others_share", lambda: 0.4)
    with pytest.raises(SystemExit, match="40% of the processors are busy: call again"):
        script.main(["one"])
    assert "old" in (script.PAGES / "page.md").read_text(encoding="utf-8")

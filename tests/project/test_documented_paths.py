"""The files and tests that README.md and the pages of docs/ name are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_FOLDERS = (_ROOT, _ROOT / "src" / "firstlight", _ROOT / "docs")
_PAGES = ["README.md", *sorted(str(path.relative_to(_ROOT)) for path in _ROOT.glob("docs/**/*.md"))]
#: Pages that name folders of the repository; others name those of runs, too.
_WITH_FOLDERS = ["docs/architecture.md", "docs/contributing.md"]
_TESTS = {path.name for path in (_ROOT / "tests").rglob("test_*.py")}


def _lost(names: set[str]) -> list[str]:
    """Those of the names that are no file or folder; placeholders and files of the demo's corpus
    are left out."""
    own = {name for name in names if "/" in name and "NAME" not in name}
    own -= {"encodings/", "pydoc_data/topics.py"}
    return [name for name in sorted(own) if not any((at / name).exists() for at in _FOLDERS)]


@pytest.mark.parametrize("page", _PAGES)
def test_documented_files_and_tests_exist(page: str) -> None:
    text = (_ROOT / page).read_text(encoding="utf-8")
    suffixes = r"\.(?:py|md|yaml|yml|ipynb|sbatch)"
    assert _lost(set(re.findall(rf"`([\w./-]+{suffixes})(?:::\w+)?`", text))) == []
    tests = {name for name in re.findall(r"\btest_\w+\.py\b", text) if "NAME" not in name}
    assert tests - _TESTS == set()


@pytest.mark.parametrize("page", _WITH_FOLDERS)
def test_documented_folders_exist(page: str) -> None:
    named = set(re.findall(r"`([\w./-]+/)`", (_ROOT / page).read_text(encoding="utf-8")))
    assert named
    assert _lost(named) == []

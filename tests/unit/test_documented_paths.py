"""The files that README.md, docs/architecture.md and docs/contributing.md name are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_FOLDERS = (_ROOT, _ROOT / "src" / "firstlight", _ROOT / "docs")


@pytest.mark.parametrize("page", ["README.md", "docs/architecture.md", "docs/contributing.md"])
def test_every_file_that_a_page_names_is_there(page: str) -> None:
    text = (_ROOT / page).read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w./-]+(?:/|\.py|\.md))`", text))
    assert named
    # Placeholders, and files of the demo's corpus.
    own = {name for name in named if "/" in name and "NAME" not in name}
    own -= {"encodings/", "pydoc_data/topics.py"}
    assert [name for name in sorted(own) if not any((at / name).exists() for at in _FOLDERS)] == []

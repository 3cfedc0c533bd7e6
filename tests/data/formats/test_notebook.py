"""Notebooks with the output of programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from firstlight.data.formats import notebook


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ({"text": "\r 10%|#\r100%|##\nnext\r\n\x1b[32mgreen\x1b[0m"}, "100%|##\nnext\r\ngreen"),
        ({"text": "<p>"}, "<p>"),
        ({"output_type": "display_data", "data": {"text/plain": "<Figure size 6x4>"}}, ""),
        ({"output_type": "execute_result", "data": {"text/plain": ["[<Line at 0x7>]"]}}, ""),
        ({"output_type": "execute_result", "data": {"text/plain": "1 < 2 > 0"}}, "1 < 2 > 0"),
    ],
)
def test_read_output_is_what_a_person_sees(
    tmp_path: Path, output: dict[str, object], expected: str
) -> None:
    cell = {"source": "x", "outputs": [{"output_type": "stream"} | output]}
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": [cell]}), encoding="utf-8")
    text = "\n\n".join(filter(None, ("x", expected)))
    assert list(notebook.read(tmp_path / "a.ipynb")) == [("", text)]

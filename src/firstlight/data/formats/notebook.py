"""Jupyter notebooks: their text, code, and printed results."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from firstlight.data.formats import UnreadableDocument

#: Control sequences of terminals, and what a progress bar wrote before its last state.
_TERMINAL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|(?m:^[^\n]*\r)(?!\n)")
#: An object that was not printed as text, such as <Figure size 640x480 with 1 Axes>.
_OBJECT = re.compile(r"\s*\[?<[^<>]*>\]?\s*")


def read(path: Path) -> Iterator[tuple[str, str]]:
    """Yield ("", text) of a notebook.

    Raises:
        UnreadableDocument: the file is not a notebook, or has no text.
    """
    try:
        book = json.loads(path.read_bytes())
        # Before version 4 of the format, cells were in worksheets, and code was in `input`.
        sheets = [book, *book.get("worksheets", [])]
        parts = [part for one in sheets for cell in one.get("cells", []) for part in _parts(cell)]
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise UnreadableDocument("it is not a notebook, or is damaged: replace it") from error
    if not (text := "\n\n".join(part.strip("\n") for part in parts if part.strip())):
        raise UnreadableDocument("it has no text: exclude it")
    yield "", text


def _parts(cell: dict[str, Any]) -> Iterator[str]:
    yield _joined(cell.get("source", cell.get("input", "")))
    for output in cell.get("outputs", []):
        plain = output.get("data", {}).get("text/plain", "")
        text = _TERMINAL.sub("", _joined(output.get("text", plain)))
        if output.get("output_type") == "stream" or not _OBJECT.fullmatch(text):
            yield text


def _joined(lines: str | list[str]) -> str:
    return lines if isinstance(lines, str) else "".join(lines)

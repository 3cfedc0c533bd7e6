"""Documents in rich text format: the text, and each footnote once, at the end."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from striprtf.striprtf import rtf_to_text

from firstlight.data.formats import UnreadableDocument

#: The beginning of a footnote, and what begins or ends a group, unless it is escaped.
_NOTE = re.compile(r"\{(?:\\\*)?\\footnote\b ?")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


def read(path: Path) -> Iterator[tuple[str, str]]:
    """Yield ("", text) of a document in rich text format.

    Raises:
        UnreadableDocument: the file is not in this format, or has no text.
    """
    content = path.read_bytes()
    if not content.startswith(b"{\\rtf"):
        raise UnreadableDocument("it is not in rich text format: exclude it")
    # Bytes above 127 are only allowed as escapes. latin-1 keeps the others as they are.
    text = rtf_to_text(_with_notes_last(content.decode("latin-1")), errors="replace")
    lines = [line.rstrip().rstrip("|").replace("|", "\t") for line in text.splitlines()]
    text = re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()
    if not text:
        raise UnreadableDocument("it has no text: exclude it")
    yield "", text


def _with_notes_last(content: str) -> str:
    """Move the footnotes to the end of a document, because striprtf leaves them out."""
    kept: list[str] = []
    notes: list[str] = []
    place = 0
    while (begin := _NOTE.search(content, place)) is not None:
        depth, end = 1, len(content)
        for brace in _BRACE.finditer(content, begin.end()):
            depth += (brace[0] == "{") - (brace[0] == "}")
            if not depth:
                end = brace.start()
                break
        notes.append(content[begin.end() : end])
        kept += [content[place : begin.start()], f"[{len(notes)}]"]
        place = end + 1
    rest = content[place:]
    last = rest.rfind("}") if notes else len(rest)
    marked = (f"\\par [{number}] {{{note}}}" for number, note in enumerate(notes, start=1))
    return "".join([*kept, rest[:last], *marked, rest[last:]])

"""Documents in rich text format."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from striprtf.striprtf import rtf_to_text

from firstlight.data.formats import UnreadableDocument


def read(path: Path) -> Iterator[tuple[str, str]]:
    """Yield ("", text) of a document in rich text format.

    Raises:
        UnreadableDocument: the file is not in this format, or has no text.
    """
    content = path.read_bytes()
    if not content.startswith(b"{\\rtf"):
        raise UnreadableDocument("it is not in rich text format: exclude it")
    # Bytes above 127 are only allowed as escapes. latin-1 keeps the others as they are.
    text = rtf_to_text(content.decode("latin-1"), errors="replace")
    lines = [line.rstrip().rstrip("|").replace("|", "\t") for line in text.splitlines()]
    text = re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()
    if not text:
        raise UnreadableDocument("it has no text: exclude it")
    yield "", text

"""Readers of documents that are not plain text: one module for each format.

Each module has a function `read(path)` that yields (place, text) of each document: its place in the
file, such as "chapter 2", and its text. A pair whose text is "" states in its place what was left
out and why. The readers run in a child process with limits, because the files are not trusted.
"""

from __future__ import annotations

from firstlight.errors import FirstlightError


class UnreadableDocument(FirstlightError):  # noqa: N818 - it becomes a rejected document
    """Raised if a file can't be read. The message is the reason and what would help, in one
    line."""

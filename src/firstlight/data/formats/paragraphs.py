"""Collect the text of a document as paragraphs, and read the XML files in a ZIP package."""

from __future__ import annotations

import contextlib
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lxml import etree

from firstlight.data.formats import UnreadableDocument

#: Maximum unpacked size in bytes of a file in a package.
_MOST_BYTES = 100_000_000
#: Soft hyphens, and other characters of no width that only allow or forbid a line break.
_INVISIBLE = dict.fromkeys(map(ord, "\xad\u200b\u2060\ufeff"))


class Paragraphs:
    """The paragraphs of a document. A blank line separates them; items of lists and rows of tables
    are separated by a line end."""

    def __init__(self) -> None:
        self._blocks: list[tuple[str, bool]] = []
        self._parts: list[str] = []
        self._mark = ""

    def add(self, text: str | None) -> None:
        """Append text to the current paragraph. White space in it counts as one space."""
        if text:
            self._parts.append(re.sub(r"\s+", " ", text.translate(_INVISIBLE)))

    def add_break(self) -> None:
        """Begin a new line in the current paragraph."""
        self._parts.append("\n")

    def mark(self, mark: str) -> None:
        """End the current paragraph, and begin the next one, an item of a list, with a mark."""
        self.end()
        self._mark = mark

    def end(self) -> None:
        """End the current paragraph."""
        lines = "".join(self._parts).split("\n")
        text = "\n".join(" ".join(line.split()) for line in lines).strip()
        self._parts.clear()
        if text:
            self._blocks.append((self._mark + text, bool(self._mark)))
            self._mark = ""

    def add_row(self, cells: list[str]) -> None:
        """Append a row of a table as a line, with a tab between two cells."""
        row = "\t".join(cells).rstrip()
        if row.strip():
            self._blocks.append((row, True))

    def add_verbatim(self, text: str) -> None:
        """Append a paragraph whose white space is kept."""
        self.end()
        if text.strip():
            self._blocks.append((text.strip("\n"), False))

    def end_group(self) -> None:
        """End a list or a table, so that a blank line follows."""
        self.end()
        if self._blocks:
            self._blocks[-1] = (self._blocks[-1][0], False)

    def text(self) -> str:
        """Return the text of all paragraphs."""
        self.end()
        parts = [
            part for text, is_line in self._blocks for part in (text, "\n" if is_line else "\n\n")
        ]
        return "".join(parts[:-1])

    def count(self) -> int:
        """Return the number of paragraphs."""
        self.end()
        return len(self._blocks)

    def line(self) -> str:
        """Return the text of all paragraphs as one line, for a cell of a table."""
        return " ".join(self.text().split())


def tag_of(node: Any) -> str:
    """Return the name of an element without its namespace, or "" for a comment or an entity."""
    return node.tag.rpartition("}")[2] if isinstance(node.tag, str) else ""


def attribute(node: Any, name: str) -> str:
    """Return an attribute of an element in any namespace, or ""."""
    return next((v for key, v in node.attrib.items() if key.rpartition("}")[2] == name), "")


def parsed_xml(content: bytes | str) -> Any:
    """Parse XML. Entities are not resolved, and nothing else is loaded.

    Raises:
        UnreadableDocument: the XML is damaged.
    """
    parser = etree.XMLParser(resolve_entities=False, no_network=True, load_dtd=False)
    try:
        return etree.fromstring(content, parser)
    except (etree.XMLSyntaxError, ValueError) as error:
        raise UnreadableDocument(
            f"its XML is damaged or too large ({error}): export it again"
        ) from error


@contextlib.contextmanager
def package(path: Path) -> Iterator[Callable[[str], bytes | None]]:
    """Open a ZIP package. Yield a function that returns the content of the file with a given name,
    or None if there is no such file.

    Raises:
        UnreadableDocument: the package is damaged or encrypted, or a file is too large.
    """
    try:
        with zipfile.ZipFile(path) as archive:

            def content(name: str) -> bytes | None:
                try:
                    entry = archive.getinfo(name)
                except KeyError:
                    return None
                with archive.open(entry) as file:
                    found = file.read(_MOST_BYTES + 1)
                if len(found) > _MOST_BYTES:
                    raise UnreadableDocument(
                        f"{name} in it unpacks to more than 100 MB: exclude it"
                    )
                return found

            yield content
    except zipfile.BadZipFile as error:
        with path.open("rb") as file:
            is_encrypted = file.read(4) == b"\xd0\xcf\x11\xe0"
        advice = "encrypted: save it without a password" if is_encrypted else "damaged: replace it"
        raise UnreadableDocument(f"it is {advice}") from error
    except RuntimeError as error:  # A member is encrypted.
        raise UnreadableDocument("it is encrypted: save it without a password") from error
    except (OSError, EOFError, zlib.error, NotImplementedError) as error:
        raise UnreadableDocument(f"it is damaged ({error}): replace it") from error

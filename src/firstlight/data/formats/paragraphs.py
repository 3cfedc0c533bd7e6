"""Collect the text of a document as paragraphs, and read the XML files in a ZIP package."""

from __future__ import annotations

import contextlib
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from firstlight.data.formats import UnreadableDocument

#: Maximum unpacked size in bytes of a file in a package.
_MOST_BYTES = 100_000_000
#: Indentation of a line: a tab or at least two spaces.
_INDENT = re.compile(r"(?:\t|  )[ \t]*")
#: Names of styles for paragraphs of code.
CODE_STYLE = re.compile(r"(?i)preformatted|code|verbatim|listing|plain.?text")
#: Soft hyphens, and other characters of no width that only allow or forbid a line break.
_INVISIBLE = dict.fromkeys(map(ord, "\xad\u200b\u2060\ufeff"))


class Paragraphs:
    """The paragraphs of a document. A blank line separates them; items of lists and rows of tables
    are separated by a line end."""

    def __init__(self, *, is_typed: bool = False) -> None:
        """Create an empty text.

        Args:
            is_typed: True for formats in which white space counts, as a person typed it. The
                indentation of lines is kept, and an indented paragraph follows the one before
                without a blank line, as in code and verse.
        """
        self._is_typed = is_typed
        self._blocks: list[tuple[str, bool]] = []
        self._parts: list[str] = []
        self._mark = ""
        self._is_after_code = False

    def add(self, text: str | None) -> None:
        """Append text to the current paragraph. White space in it counts as one space, except at
        the beginning of a line that a person typed."""
        if text:
            text = text.translate(_INVISIBLE)
            self._parts.append(text if self._is_typed else re.sub(r"\s+", " ", text))

    def add_break(self) -> None:
        """Begin a new line in the current paragraph."""
        self._parts.append("\n")

    def mark(self, mark: str) -> None:
        """End the current paragraph, and begin the next one, an item of a list, with a mark."""
        self.end()
        self._mark = mark

    def end(self, *, is_code: bool = False) -> None:
        """End the current paragraph. Paragraphs of code keep their white space, and follow each
        other without a blank line unless an empty one is between them."""
        text = "".join(self._parts)
        self._parts.clear()
        if not text.strip():
            self._is_after_code &= not is_code
            return
        if is_code:
            text = text.strip("\n").rstrip()
        else:
            lines = []
            for line in text.split("\n"):
                indent = _INDENT.match(line) if self._is_typed else None
                lines.append(((indent[0] if indent else "") + " ".join(line.split())).rstrip())
            text = "\n".join(lines).strip("\n")
            text = self._mark + text.strip() if self._mark else text
        self._append(text, is_line=bool(self._mark), is_code=is_code)
        self._mark = ""

    def _append(self, text: str, *, is_line: bool = False, is_code: bool = False) -> None:
        if self._blocks and (self._is_after_code if is_code else text[0].isspace()):
            self._blocks[-1] = (self._blocks[-1][0], True)
        self._blocks.append((text, is_line))
        self._is_after_code = is_code

    def add_all(self, other: Paragraphs) -> None:
        """Append the paragraphs of another text."""
        self.end()
        other.end()
        for text, is_line in other._blocks:
            self._append(text, is_line=is_line)

    def add_row(self, cells: list[str]) -> None:
        """Append a row of a table as a line, with a tab between two cells."""
        row = "\t".join(cells).rstrip()
        if row.strip():
            self._blocks.append((row, True))

    def add_cells(self, cells: Sequence[Paragraphs]) -> None:
        """Append a row of a table as a line, or as its paragraphs if only one of its cells has
        text, because such tables only arrange text on a page."""
        filled = [cell for cell in cells if cell.text()]
        if len(filled) == 1 and filled[0].count() > 1:
            self.end_group()
            self.add_all(filled[0])
            self.end_group()
        else:
            self.add_row([cell.line() for cell in cells])

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


def numeral(number: int, style: str) -> str:
    """Return the number of an item of a list.

    Args:
        number: the number.
        style: "a" or "A" for letters, "i" or "I" for Roman numbers, and "1" for digits.
    """
    if style in ("a", "A") and 1 <= number <= 26:
        text = chr(ord("a") + number - 1)
    elif style in ("i", "I") and 1 <= number <= 39:
        ones = ("", "i", "ii", "iii", "iv", "v", "vi", "vii", "viii", "ix")
        text = "x" * (number // 10) + ones[number % 10]
    else:
        return str(number)
    return text.upper() if style.isupper() else text


def tag_of(node: Any) -> str:
    """Return the name of an element without its namespace, or "" for a comment or an entity."""
    return node.tag.rpartition("}")[2] if isinstance(node.tag, str) else ""


def attribute(node: Any, name: str) -> str:
    """Return an attribute of an element in any namespace, or ""."""
    return next((v for key, v in node.attrib.items() if key.rpartition("}")[2] == name), "")


def outermost(node: Any, tag: str) -> Iterator[Any]:
    """Yield the elements with a name below a node, without those inside of another one."""
    for child in node:
        if tag_of(child) == tag:
            yield child
        else:
            yield from outermost(child, tag)


def parsed_xml(content: bytes | str) -> Any:
    """Parse XML. Entities are not resolved, and nothing else is loaded.

    Raises:
        UnreadableDocument: the XML is damaged.
    """
    from lxml import etree

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
    in upper or lower case, or None if there is no such file.

    Raises:
        UnreadableDocument: the package is damaged or encrypted, or a file is too large.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            entries = {entry.filename.lower(): entry for entry in archive.infolist()}

            def content(name: str) -> bytes | None:
                if (entry := entries.get(name.lower())) is None:
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

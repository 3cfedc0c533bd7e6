"""Reader of CSV and TSV files: each row is one document."""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import IO

from firstlight.data.conversations import BadRecordError
from firstlight.data.kinds import conversation_text
from firstlight.data.opening import (
    EncodingProblem,
    bad_byte,
    largest_document,
    utf8_stream,
)
from firstlight.errors import nearest

#: Delimiters of .csv files. Spreadsheets write semicolons in locales whose decimal mark is a comma.
_DELIMITERS = (",", ";", "\t")


def without_text(names: Sequence[str], text_key: str, what: str) -> BadRecordError:
    """The error that no field is called `text_key`.

    Args:
        names: the names of the fields.
        text_key: the missing name.
        what: "field" or "column", for the message.
    """
    if (problem := conversation_text(names)) is not None:
        return BadRecordError("conversation", problem)
    listed = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    return BadRecordError(
        "no_text",
        f"no {what} '{text_key}'{nearest(text_key, names)} ({what}s: {listed or 'none'}): name the "
        "one with the text with --text-key",
    )


def read_table(
    file: IO[bytes], path: Path, text_key: str
) -> Generator[tuple[int, str | BadRecordError], None, None]:
    """The rows of a table (RFC 4180) below its header.

    Args:
        file: the table's bytes, decompressed.
        path: the file. Its ending and size are used, and its name in messages.
        text_key: name of the column that holds the text.

    Yields:
        (first line of the row, its text or the reason why the row is rejected).
    """
    # csv has one limit for the process, none for each reader.
    csv.field_size_limit(largest_document(path))
    line = 0
    try:
        stream = utf8_stream(file, path)
        # Invalid UTF-8 becomes lone surrogates, so that its row alone is rejected, not the file.
        text = io.TextIOWrapper(stream, "utf-8", "surrogateescape", newline="")
        try:
            for line, found in _table_rows(text, path, text_key):
                if isinstance(found, str) and (byte := _undecoded(found)) is not None:
                    yield line, BadRecordError("bad_utf8", bad_byte(byte, path))
                else:
                    yield line, found
        finally:
            text.detach()  # the caller, who opened the file, closes it
    except EncodingProblem as problem:
        yield line + 1, BadRecordError(problem.reason, str(problem))


def _table_rows(
    text: io.TextIOWrapper, path: Path, text_key: str
) -> Iterator[tuple[int, str | BadRecordError]]:
    lines = _Lines(text, largest_document(path))
    try:
        first = next(lines, "")
    except BadRecordError as error:
        yield 1, error
        return
    delimiter = _delimiter(first, path, text_key)
    # The header may take several lines: a quoted name may hold a newline.
    reader = csv.reader(itertools.chain([first], lines), delimiter=delimiter, strict=True)
    header: list[str] | None = None
    column = 0
    while True:
        begin = reader.line_num + 1
        lines.row_characters = 0
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield begin, BadRecordError("broken_row", _damage(error, begin, reader.line_num))
            continue
        except BadRecordError as error:
            yield begin, error
            continue
        if header is None:
            if not fields:
                continue
            header = fields
            if text_key not in header:
                yield begin, without_text(header, text_key, "column")
                return
            column = header.index(text_key)
        elif not fields:
            yield begin, BadRecordError("empty", "blank line")
        elif len(fields) != len(header):
            detail = f"{len(fields)} fields, but the header has {len(header)}"
            yield begin, BadRecordError("broken_row", detail)
        else:
            yield begin, fields[column]


class _Lines:
    """Iterator over the lines of a table, with a limit on the characters of a row.

    Args:
        text: the table.
        most: largest number of characters of a row; a longer row raises BadRecordError.

    Attributes:
        row_characters: characters read of the current row, which the reader sets to 0 for a new
            row: a quoted field may hold newlines, so a row may take several lines.
    """

    def __init__(self, text: io.TextIOWrapper, most: int) -> None:
        self._text, self._most = text, most
        self.row_characters = 0

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        line = self._text.readline(self._most + 1)
        if not line:
            raise StopIteration
        self.row_characters += len(line)
        if self.row_characters > self._most:
            while line and not line.endswith(("\n", "\r")):
                line = self._text.readline(self._most)
            raise BadRecordError("too_long", f"the row has more than {self._most:,} characters")
        return line


def _delimiter(first: str, path: Path, text_key: str) -> str:
    """The delimiter of a table: a tab for .tsv; otherwise the one with which the first line has the
    column `text_key`, or else the most frequent one in the first line."""
    if ".tsv" in (ending.lower() for ending in path.suffixes[-2:]):
        return "\t"
    for delimiter in _DELIMITERS:
        try:
            if text_key in next(csv.reader([first], delimiter=delimiter), []):
                return delimiter
        except csv.Error:
            continue
    return max(_DELIMITERS, key=first.count)


def _damage(error: csv.Error, begin: int, end: int) -> str:
    """The message about a row, in the lines `begin` to `end`, that csv can't read."""
    lines = f" (lines {begin} to {end})" if end > begin else ""
    if "unexpected end" in str(error):
        return f"a quote is not closed{lines}"
    return f"{error}{lines}"


def _undecoded(text: str) -> int | None:
    """The first byte that is not UTF-8, from its lone surrogate (PEP 383); None if all bytes are
    UTF-8."""
    if text.isascii():
        return None
    found = next((character for character in text if "\udc80" <= character <= "\udcff"), None)
    return None if found is None else ord(found) - 0xDC00

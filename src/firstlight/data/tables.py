"""Rows of .csv and .tsv files, as streams: the text column, or why a row has no text."""

from __future__ import annotations

import csv
import io
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from firstlight.data.conversations import BadRecordError
from firstlight.data.opening import EncodingProblem, bad_byte, utf8_stream
from firstlight.errors import nearest

TABLE_SUFFIXES = (".csv", ".tsv")

#: Spreadsheets write semicolons where the decimal mark is a comma.
_DELIMITERS = (",", ";", "\t")


def read_rows(
    file: IO[bytes], path: Path, text_key: str
) -> Iterator[tuple[int, str | BadRecordError]]:
    """(line, text) of each row below the header; the line is that on which the row begins.

    Fields in double quotes may hold delimiters, newlines and doubled quotes, and be of any size. A
    .csv file is separated by commas, or by the semicolons or tabs that its header has instead.

    Args:
        text_key: name of the column with the text.
    """
    # The limit is the module's, not the reader's.
    csv.field_size_limit(sys.maxsize)
    line = 0
    try:
        stream = utf8_stream(file, path)
        # Bytes that are not UTF-8 come through marked, so that the row is rejected, not the file.
        text = io.TextIOWrapper(stream, "utf-8", "surrogateescape", newline="")
        try:
            for line, found in _rows(text, path, text_key):
                if isinstance(found, str) and (byte := _undecoded(found)) is not None:
                    yield line, BadRecordError("bad_utf8", bad_byte(byte, path))
                else:
                    yield line, found
        finally:
            text.detach()  # the file is closed by who opened it
    except EncodingProblem as problem:
        yield line + 1, BadRecordError(problem.reason, str(problem))


def _rows(
    text: io.TextIOWrapper, path: Path, text_key: str
) -> Iterator[tuple[int, str | BadRecordError]]:
    first = text.readline()
    delimiter = _delimiter(first, path, text_key)
    # The header may go on over lines: a quoted name may hold a newline.
    reader = csv.reader(itertools.chain([first], text), delimiter=delimiter, strict=True)
    header: list[str] | None = None
    column = 0
    while True:
        begin = reader.line_num + 1
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield begin, BadRecordError("broken_row", _damage(error, begin, reader.line_num))
            continue
        if header is None:
            if not fields:
                continue
            header = fields
            if text_key not in header:
                yield begin, BadRecordError("no_text", _no_column(header, text_key))
                return
            column = header.index(text_key)
        elif not fields:
            yield begin, BadRecordError("empty", "blank line")
        elif len(fields) != len(header):
            detail = f"{len(fields)} fields, but the header has {len(header)}"
            yield begin, BadRecordError("broken_row", detail)
        else:
            yield begin, fields[column]


def _delimiter(first: str, path: Path, text_key: str) -> str:
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
    lines = f" (lines {begin} to {end})" if end > begin else ""
    if "unexpected end" in str(error):
        return f"a quote is not closed{lines}"
    return f"{error}{lines}"


def _no_column(header: list[str], text_key: str) -> str:
    names = ", ".join(header[:8]) + (", ..." if len(header) > 8 else "")
    hint = nearest(text_key, header)
    return (
        f"no column '{text_key}'{hint} (columns: {names}): name the one with the text with "
        "--text-key"
    )


def _undecoded(text: str) -> int | None:
    """The first byte that could not be decoded; None where all could."""
    if text.isascii():
        return None
    found = next((character for character in text if "\udc80" <= character <= "\udcff"), None)
    return None if found is None else ord(found) - 0xDC00

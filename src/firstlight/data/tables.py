"""Read tables in bounded memory: CSV and TSV (`read_table`), Parquet (`read_parquet`) and Arrow
(`read_arrow`). Each row becomes one object.

In Parquet, many rows can share one stored copy of a value: either in the dictionary of a column, or
as a common prefix of strings (DELTA_BYTE_ARRAY). A small file can therefore contain more text than
fits in memory. The header of the first page of a column provides an upper bound on the length of a
shared value. If a shared value may be long, there are two options: either fewer rows are read at a
time, or the rows also share the value in memory, with pyarrow's `read_dictionary`. Other columns
are not read as dictionaries, because pyarrow would then keep all distinct strings of a row group in
memory.
"""

from __future__ import annotations

import csv
import io
import itertools
import re
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from firstlight.data.conversations import BadRecordError
from firstlight.data.kinds import conversation_kind, conversation_text
from firstlight.data.opening import (
    EncodingProblem,
    bad_byte,
    largest_document,
    optional,
    require_unpacked_size,
    utf8_stream,
)
from firstlight.errors import InputError, first_line, nearest

#: Possible delimiters of .csv files. Spreadsheet programs use semicolons in locales where the comma
#: is the decimal separator.
_DELIMITERS = (",", ";", "\t")
#: Maximum number of rows of a Parquet file that are read at a time. If fewer than `_FEW_ROWS` would
#: fit in memory, the rows share values in memory instead.
_BATCH_ROWS, _FEW_ROWS = 1024, 8
#: A batch with more bytes than this is converted to objects one row at a time.
_BATCH_BYTES = 1 << 24
#: Maximum size in bytes of one column of a batch, if each row has its own copy of the value.
_COPIED_BYTES = 1 << 26
#: Two sizes in bytes: the number of bytes at the beginning of a page header that are read to find
#: the type and size of the page, and the size of pyarrow's read buffer.
_HEAD_BYTES, _BLOCK_BYTES = 32, 1 << 16
#: Minimum number of bytes that are counted for each row and each list element, because a file can
#: contain rows and list elements that take no space.
_ROW_BYTES, _PLACE_BYTES = 16, 4
#: Values of Parquet's `PageType`: data pages (versions 1 and 2), and dictionary pages.
_DATA_PAGES, _DICTIONARY_PAGE = (0, 3), 2


def without_text(names: Sequence[str], text_key: str, what: str) -> BadRecordError:
    """Return the error for records without a `text_key` field.

    Args:
        names: names of the existing fields.
        text_key: name of the missing field.
        what: noun for a field in the message: "field" or "column".
    """
    if (problem := conversation_text(names)) is not None:
        return BadRecordError("conversation", problem)
    listed = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    return BadRecordError(
        "no_text",
        f"no {what} '{text_key}'{nearest(text_key, names)} ({what}s: {listed or 'none'}): "
        f"use --text-key to name the {what} that contains the text",
    )


def read_table(
    file: IO[bytes], path: Path, text_key: str | None
) -> Generator[tuple[int, dict[str, str] | BadRecordError], None, None]:
    """Yield the rows of a table (RFC 4180) after its header.

    Args:
        file: stream that contains the decompressed table.
        path: path of the file. It is used to determine the suffix and size of the file, and its
            name for messages.
        text_key: the column to read; None reads all columns.

    Yields:
        Pairs. The first element is the number of the row's first line. The second element is the
        row as {column: text}, or the reason why the row is rejected.
    """
    # The csv module's limit on the length of a field applies to the entire process, not to a single
    # reader.
    csv.field_size_limit(largest_document(path))
    line = 0
    try:
        stream = utf8_stream(file, path)
        # Decode invalid UTF-8 to lone surrogates, so that only the affected row is rejected and not
        # the entire file.
        text = io.TextIOWrapper(stream, "utf-8", "surrogateescape", newline="")
        try:
            for line, found in _table_rows(text, path, text_key):
                texts = found.values() if isinstance(found, dict) else ()
                if (byte := next(filter(None, map(_undecoded, texts)), None)) is not None:
                    yield line, BadRecordError("bad_utf8", bad_byte(byte, path))
                else:
                    yield line, found
        finally:
            text.detach()  # Leave the file open: the caller opened it and will close it.
    except EncodingProblem as problem:
        yield line + 1, BadRecordError(problem.reason, str(problem))


def _table_rows(
    text: io.TextIOWrapper, path: Path, text_key: str | None
) -> Iterator[tuple[int, dict[str, str] | BadRecordError]]:
    lines = _Lines(text, largest_document(path))
    try:
        first = next(lines, "")
    except BadRecordError as error:
        yield 1, error
        return
    delimiter = _delimiter(first, path, text_key)
    # The header may span several lines, because a quoted name may contain a newline.
    reader = csv.reader(itertools.chain([first], lines), delimiter=delimiter, strict=True)
    header: list[str] | None = None
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
            if (problem := _header_problem(header, text_key)) is not None:
                yield begin, problem
                return
        elif not fields:
            if text_key is not None:
                yield begin, BadRecordError("empty", "blank line")
        elif len(fields) != len(header):
            detail = f"{len(fields)} fields, but the header has {len(header)}"
            yield begin, BadRecordError("broken_row", detail)
        else:
            names = header if text_key is None else [text_key]
            yield begin, {name: fields[header.index(name)] for name in names}


def _header_problem(header: Sequence[str], text_key: str | None) -> BadRecordError | None:
    """Return the error for a table that lacks a `text_key` column, or whose first line contains
    sentences or numbers instead of column names. Return None for any other table.
    """
    if text_key in header or (text_key is None and conversation_kind(header, "") is not None):
        return None
    if not any(re.search(r"[.?!]\s*\Z|\A[\d.]+\Z|.{60}", name) for name in header):
        return None if text_key is None else without_text(header, text_key, "column")
    return BadRecordError(
        "broken_row",
        f"the first line must name the columns, but begins with '{header[0][:40]}': add a line "
        f"such as {'question,answer' if len(header) > 1 else 'text'} before it",
    )


class _Lines:
    """Iterator over the lines of a table, with a limit on the number of characters per row.

    Args:
        text: the table.
        most: maximum number of characters in a row; a longer row raises BadRecordError.

    Attributes:
        row_characters: number of characters read so far in the current row. The reader resets it to
            0 for each row, because a row spans several lines if a quoted field contains newlines.
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


def _delimiter(first: str, path: Path, text_key: str | None) -> str:
    """Return the delimiter of a table.

    For .tsv files, it is a tab. For other files, it is the first delimiter that splits the header
    into names that include `text_key` or, if `text_key` is None, the columns of conversations. If
    there is no such delimiter, it is the most frequent one in the header.
    """
    if ".tsv" in (ending.lower() for ending in path.suffixes[-2:]):
        return "\t"
    for delimiter in _DELIMITERS:
        try:
            names = next(csv.reader([first], delimiter=delimiter), [])
            if conversation_kind(names) is not None if text_key is None else text_key in names:
                return delimiter
        except csv.Error:
            continue
    return max(_DELIMITERS, key=first.count)


def _damage(error: csv.Error, begin: int, end: int) -> str:
    """Return the error message for a row, in lines `begin` to `end` of the file, that the csv
    module can't read.
    """
    lines = f" (lines {begin} to {end})" if end > begin else ""
    if "unexpected end" in str(error):
        return f"a quote is not closed{lines}"
    return f"{error}{lines}"


def _undecoded(text: str) -> int | None:
    """Return the first byte that was not valid UTF-8, or None if all bytes were valid. Invalid
    bytes have been decoded to lone surrogates (PEP 383).
    """
    if text.isascii():
        return None
    found = next((character for character in text if "\udc80" <= character <= "\udcff"), None)
    return None if found is None else ord(found) - 0xDC00


# Parquet and Arrow


def read_parquet(
    path: Path, origin: str, text_key: str | None
) -> Iterator[tuple[int, Any | BadRecordError]]:
    """Yield the rows of a Parquet file as objects.

    Args:
        path: the file.
        origin: the file's name in messages.
        text_key: the column to read; None reads all columns.

    Yields:
        Pairs. The first element is the one-based number of the row. The second element is the row
        as {column: value}, or the reason why the row is rejected.

    Raises:
        InputError: the file is damaged.
        OSError: the file can't be read, or decompresses to far more than text does (see
            `require_unpacked_size`).
        MissingDependencyError: pyarrow is not installed.
    """
    parquet = optional("pyarrow.parquet", f"reading {path}")
    arrow = optional("pyarrow", f"reading {path}")
    try:
        footer = parquet.read_metadata(path)
        groups = [footer.row_group(index) for index in range(footer.num_row_groups)]
        stored = sum(group.total_byte_size for group in groups)
        require_unpacked_size(path, max(stored, _ROW_BYTES * footer.num_rows))
        names = footer.schema.to_arrow_schema().names
        if text_key is not None and text_key not in names:
            yield 1, without_text(names, text_key, "column")
            return
        columns = None if text_key is None else [text_key]
        most_rows, shared = _plan(path, footer, columns)
        with parquet.ParquetFile(path, read_dictionary=shared) as file:
            batches = file.iter_batches(batch_size=most_rows, columns=columns)
            yield from enumerate(_rows_of(batches, path, most_rows), start=1)
    except arrow.ArrowException as error:
        raise InputError(
            f"{origin} is not a readable Parquet file: {first_line(error)}: replace it, or "
            "exclude it"
        ) from error


def read_arrow(path: Path, origin: str) -> Iterator[tuple[int, Any | BadRecordError]]:
    """Yield the rows of a file in Arrow's IPC format, as written by
    `datasets.Dataset.save_to_disk`.

    Args, Yields, Raises: see `read_parquet`.
    """
    arrow = optional("pyarrow", f"reading {path}")

    def batches() -> Iterator[Any]:
        with arrow.OSFile(str(path)) as file:
            try:
                found = arrow.ipc.open_stream(file)
            except arrow.ArrowInvalid:
                whole = arrow.ipc.open_file(file)
                found = map(whole.get_batch, range(whole.num_record_batches))
            for batch in found:
                # Validate the batch, because pyarrow trusts the offsets in the file and reads out
                # of bounds if they are wrong.
                batch.validate(full=True)
                yield batch

    try:
        yield from enumerate(_rows_of(batches(), path, _BATCH_ROWS), start=1)
    # A damaged column name may not be valid UTF-8.
    except (arrow.ArrowException, UnicodeDecodeError) as error:
        raise InputError(
            f"{origin} is not a readable Arrow file: {first_line(error)}: replace it, or exclude it"
        ) from error


def _rows_of(batches: Iterable[Any], path: Path, most_rows: int) -> Iterator[Any]:
    """Yield the rows of all batches of a file. At most `most_rows` rows exist as Python objects at
    a time.
    """
    arrow = optional("pyarrow", f"reading {path}")
    total = 0
    for batch in batches:
        size = sum(_value_bytes(column, arrow) for column in batch.columns)
        total += size
        require_unpacked_size(path, total)
        rows = 1 if size > _BATCH_BYTES else most_rows
        for first in range(0, batch.num_rows, rows):
            yield from _batch_rows(batch.slice(first, rows))


def _plan(path: Path, footer: Any, columns: list[str] | None) -> tuple[int, list[str]]:
    """Plan how to read a file in bounded memory.

    Args:
        path: the file.
        footer: the file's metadata (`pyarrow.parquet.FileMetaData`).
        columns: the columns to read; None reads all columns.

    Returns:
        The number of rows to read at a time, and the paths of the columns whose values are shared
        in memory.

    Raises:
        InputError: the memory for a column can't be limited.
        OSError: a column decompresses to far more than text does.
    """
    rows, shared = _BATCH_ROWS, []
    for index in range(footer.num_columns):
        leaf = footer.schema.column(index)
        if columns is not None and leaf.path.partition(".")[0] not in columns:
            continue
        chunks = [footer.row_group(group).column(index) for group in range(footer.num_row_groups)]
        encodings = ", ".join(sorted({name for chunk in chunks for name in chunk.encodings}))
        is_text, is_nested = leaf.physical_type == "BYTE_ARRAY", leaf.max_repetition_level > 0
        # pyarrow can share values only in text columns without a DELTA encoding.
        can_share = is_text and "DELTA" not in encodings
        # For each row group, compute the maximum size of a value. Then compute how many copies of
        # the largest value fit into a batch.
        longest = [_longest_shared(path, chunk) if is_text else _width(leaf) for chunk in chunks]
        if can_share and not is_nested and "." not in leaf.path:
            longest = [_longest_found(path, leaf.path, *found) for found in enumerate(longest)]
        copies = _COPIED_BYTES // max([1, *longest])
        values = max((chunk.num_values for chunk in chunks), default=0)
        if is_nested:
            require_unpacked_size(path, values * _PLACE_BYTES)
        if not is_nested:
            if can_share and copies < _FEW_ROWS:
                shared.append(leaf.path)
            else:
                rows = max(1, min(rows, copies))
        # Limiting the number of rows does not help for a nested column, because each row may
        # contain any number of its values.
        elif not is_text:
            require_unpacked_size(path, values * _width(leaf))
        elif can_share and copies < values:
            shared.append(leaf.path)
        elif copies < values:
            raise InputError(
                f"column {leaf.path} of {path} is stored as {encodings}, with which a small file "
                "can require an unlimited amount of memory: write the column with other encodings"
            )
    return rows, shared


def _width(leaf: Any) -> int:
    """Return the size in bytes of a value in a column that does not contain text. `leaf` is the
    `ColumnSchema` of the column.
    """
    if leaf.physical_type == "FIXED_LEN_BYTE_ARRAY":
        return int(leaf.length)
    return 12 if leaf.physical_type == "INT96" else 8


def _longest_shared(path: Path, chunk: Any) -> int:
    """Return an upper bound on the size in bytes of a value shared by several rows. The bound is
    taken from the header of the first page.

    Args:
        path: the Parquet file.
        chunk: metadata of a column in a row group (`ColumnChunkMetaData`).

    Returns:
        The size of the dictionary page if there is one. Otherwise, the size of the column if its
        encoding is DELTA_BYTE_ARRAY or the header can't be read, and 0 if rows do not share values.
    """
    offsets = (chunk.dictionary_page_offset, chunk.data_page_offset)
    with path.open("rb") as file:
        file.seek(max(0, min((offset for offset in offsets if offset), default=0)))
        kind, size = _page_head(file.read(_HEAD_BYTES))
    if "DELTA_BYTE_ARRAY" in chunk.encodings or kind not in (*_DATA_PAGES, _DICTIONARY_PAGE):
        return int(chunk.total_uncompressed_size)
    return size if kind == _DICTIONARY_PAGE else 0


def _longest_found(path: Path, column: str, group: int, page_bytes: int) -> int:
    """Read the dictionary of a column, and return the size in bytes of its longest string.

    Args:
        path: the Parquet file.
        column: path of the text column.
        group: index of the row group.
        page_bytes: size of the dictionary page in bytes.

    Returns:
        The size of the longest string. If the exact size would not change the plan, or if pyarrow
        does not return the complete dictionary, the result is `page_bytes`.
    """
    if not _COPIED_BYTES // _BATCH_ROWS < page_bytes <= _COPIED_BYTES // _FEW_ROWS:
        return page_bytes
    parquet = optional("pyarrow.parquet", f"reading {path}")
    compute = optional("pyarrow.compute", f"reading {path}")
    with parquet.ParquetFile(path, read_dictionary=[column], buffer_size=_BLOCK_BYTES) as file:
        for batch in file.iter_batches(batch_size=1, row_groups=[group], columns=[column]):
            texts = batch.column(0).dictionary
            sizes = compute.binary_length(texts)
            # In a plain page, each string is stored as its length (four bytes) followed by its
            # bytes.
            if 4 * len(texts) + (compute.sum(sizes).as_py() or 0) == page_bytes:
                return int(compute.max(sizes).as_py())
            break
    return page_bytes


def _page_head(head: bytes) -> tuple[int | None, int]:
    """Read the header of a page. Return the type of the page, and the size of the decompressed page
    in bytes. The type is None if the header is invalid.

    The type and size are the first two fields of the Thrift struct `PageHeader`, in the compact
    protocol. Each field consists of the byte 0x15 (the next field is a 32-bit integer) and a number
    in zigzag encoding, 7 bits per byte.
    """
    values, place = [], 0
    for _ in range(2):
        if head[place : place + 1] != b"\x15":
            return None, 0
        number = shift = 0
        while True:
            place += 1
            if place == len(head):
                return None, 0
            number |= (head[place] & 0x7F) << shift
            shift += 7
            if head[place] < 0x80:
                break
        place += 1
        values.append((number >> 1) ^ -(number & 1))
    return values[0], values[1]


def _batch_rows(batch: Any) -> list[Any]:
    """Convert the rows of a batch to objects. A row with invalid UTF-8 becomes a BadRecordError."""
    arrow = optional("pyarrow", "reading Parquet")
    # Decode dictionary-encoded strings first, because converting them to objects directly takes
    # much longer.
    for index, column in enumerate(batch.columns):
        if arrow.types.is_dictionary(column.type):
            batch = batch.set_column(index, batch.schema.names[index], column.dictionary_decode())
    try:
        rows: list[Any] = batch.to_pylist()
    except UnicodeDecodeError as error:
        if batch.num_rows == 1:
            return [BadRecordError("bad_utf8", str(error))]
        rows = [row for i in range(batch.num_rows) for row in _batch_rows(batch.slice(i, 1))]
    return rows


def _value_bytes(column: Any, arrow: Any) -> int:
    """Return the total size of the values in a column, in bytes. A string that several rows share
    is counted once for each of these rows.
    """
    kind = column.type
    if arrow.types.is_dictionary(kind):
        compute = optional("pyarrow.compute", "reading Parquet")
        sizes = compute.binary_length(column.dictionary)
        return compute.sum(sizes.take(column.indices).cast("int64")).as_py() or 0
    if arrow.types.is_struct(kind):
        return sum(_value_bytes(inner, arrow) for inner in column.flatten())
    if arrow.types.is_nested(kind):
        return _value_bytes(column.flatten(), arrow)
    return int(column.nbytes)

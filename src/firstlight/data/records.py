"""Read text, JSONL, JSON, CSV, Parquet and Arrow files, and Hugging Face datasets.

`read_records` yields conversations and preference pairs, and `read_documents` yields text
documents. Each result includes the file and line from which it was read.

A *document* is a text file, a line of a JSONL file, or a row of a table (CSV, Parquet). If it
contains separators (see `cleaning`), it is split into several documents. A document that can't be
read is returned as a `Record` with an error, so the number of documents read always equals the
number accepted plus the number rejected.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

import pydantic_core

from firstlight.data.cleaning import CHAT, SUBTITLES, TRANSCRIPT, cleaned, split_documents
from firstlight.data.conversations import (
    LEARNED,
    BadRecordError,
    control_tokens,
    is_messages,
    is_written,
    message_field,
    transcript_field,
    transcript_of,
)
from firstlight.data.formats.chats import conversations, is_with_assistant
from firstlight.data.formats.reading import documents_in
from firstlight.data.formats.registry import format_of
from firstlight.data.kinds import (
    HEAD_BYTES,
    MESSAGE_FIELDS,
    SYSTEM_FIELDS,
    conversation_kind,
    exported_chats,
    field_name,
    start_from,
)
from firstlight.data.opening import (
    EncodingProblem,
    bad_byte,
    blocks_of,
    decoded_utf8,
    encoding_of,
    largest_document,
    open_compressed,
    optional,
    read_at_most,
    utf8_stream,
)
from firstlight.data.sources import (
    LINES_SUFFIXES,
    TABLE_SUFFIXES,
    DataSource,
    compressed,
    find_sources,
    holds_one_document,
    is_code,
    is_subtitles,
)
from firstlight.data.tables import read_arrow, read_parquet, read_table, without_text
from firstlight.errors import InputError, MissingDependencyError, describe_read_error, first_line
from firstlight.tokenizer.messages import TOOLS

#: Both ChatGPT and Claude deliver the JSON file of an export in a .zip file.
_JSON_SUFFIXES = (*compressed(".json"), ".zip")
RECORD_SUFFIXES = (*LINES_SUFFIXES, *_JSON_SUFFIXES, *TABLE_SUFFIXES, ".parquet", ".arrow")

#: Maximum size in bytes of a line in a JSONL file of records (`_MAX_LINE_BYTES`) and of a JSON file
#: (`_MAX_JSON_BYTES`). A longer line is rejected without being read into memory. A larger JSON file
#: is rejected because it can only be parsed as a whole.
_MAX_LINE_BYTES = 64 << 20
_MAX_JSON_BYTES = 4 << 30
#: Maximum number of lists and objects in a JSON document. It is limited because each list or object
#: takes at least 64 bytes of memory. In a long document, the limit is one list or object per
#: `_VALUE_BYTES` bytes.
_MAX_VALUES, _VALUE_BYTES = 1_000_000, 8
#: Number of bytes at the beginning of a JSON file from which `kind_of_records` detects its kind.
_JSON_HEAD_BYTES = 1 << 20
#: Size in bytes that is assumed for each rejected document when the limit `DataSource.most_bytes`
#: is applied.
_REJECTED_BYTES = 1000
#: Maximum fraction of the text that a single character can make up. Text that exceeds this limit is
#: useless for training.
COMMON_SHARE = 0.999

#: Number of records at the beginning of a source from which its kind is detected. More than one is
#: read because some of them may be damaged.
_TOLD_BY = 10

_ONLY_LICENCE = "Project Gutenberg's header and licence without text"
_ONLY_SEPARATORS = "separators without text"
_ONLY_TIMES = "subtitle times without text"
_REPLACE = "replace it, or exclude it"

REASONS = {
    "bad_utf8": "not valid UTF-8",
    "bad_utf16": "not valid UTF-16 or UTF-32",
    "binary": "not a text file",
    "conversation": "conversations where text was expected",
    "broken_row": "not a valid row of a table",
    "broken_json": "not a valid JSON line",
    "no_text": "no text in the text field",
    "empty": "empty or only whitespace",
    "unreadable": "unreadable",
    "too_long": "larger than the limit for a document",
    "duplicate": "a duplicate of an earlier document",
}


class Record(NamedTuple):  # four times as fast to create as a frozen dataclass
    """A record or a document, or the reason why it could not be read.

    Attributes:
        origin: the file, or `hf:NAME`.
        line: one-based line number in a JSONL file or table; for other sources, one-based number of
            the record.
        value: the JSON value of a record, or the text of a document; None if there is an error.
        error: the reason why the record can't be read, or None.
        is_line: True if `line` is a line number, False if it is the number of a record.
        changes: names of the changes that were made while the text was cleaned (see `cleaning`).
        within: place in a document that is not plain text, such as "chapter 3".
    """

    origin: str
    line: int
    value: Any
    error: BadRecordError | None = None
    is_line: bool = True
    changes: tuple[str, ...] = ()
    within: str | None = None

    @property
    def place(self) -> str:
        """File and line (or record number, or place in a document), for messages."""
        if self.within is not None:
            return ", ".join(part for part in (self.origin, self.within) if part)
        return f"{self.origin}:{self.line}" if self.is_line else f"{self.origin} record {self.line}"


def find_records(inputs: Sequence[str | Path]) -> list[DataSource]:
    """Resolve inputs to datasets and files that contain records, like `find_sources`. A .txt file
    that is specified directly is read as conversations written as text, while .txt files in folders
    are ignored.

    Raises:
        InputError: an input does not exist, matches nothing, or does not contain records.
    """
    written = [item for item in inputs if str(item).lower().endswith(".txt")]
    others = [item for item in inputs if item not in written]
    sources = find_sources(others, RECORD_SUFFIXES) if others or not written else []
    return [*sources, *(find_sources(written, (".txt",)) if written else ())]


#: Words that indicate a split if they occur in the name of a file or folder, mapped to that split.
_SPLITS = dict.fromkeys(("train", "training"), "train")
_SPLITS |= dict.fromkeys("valid validation validate val dev eval evaluation".split(), "val")
_SPLITS |= dict.fromkeys(("test", "testing"), "test")
#: Maximum number of files per split that are listed in the message about splits.
_SHOWN_FILES = 3


class Splits(NamedTuple):
    """Sources of records, grouped by split.

    Attributes:
        train, val: sources of the training and validation splits; `val` is empty if part of `train`
            should be held out.
        test: files of test data, which are not read.
        note: message about files that are not used for training because of their names; "" if there
            are no such files.
    """

    train: list[DataSource]
    val: list[DataSource]
    test: list[DataSource]
    note: str = ""


def find_splits(
    inputs: Sequence[str | Path],
    val_inputs: Sequence[str | Path] = (),
    found: Sequence[DataSource] | None = None,
) -> Splits:
    """Assign the datasets and the files with records in the inputs to splits.

    In folders and globs, the split of a file is determined by the names of the file and its
    folders, such as train.jsonl, valid-00000-of-00002.parquet, chats.test.csv or dev/a.json. Files
    with other names are used for training. If the names of all files in a folder or glob indicate
    validation or test data, the names are ignored and all of the files are used for training.

    Args:
        inputs: see `find_records`.
        val_inputs: inputs for validation, used instead of the validation files in folders.
        found: the sources among `inputs` to assign to splits; None assigns all of them.

    Raises:
        InputError: see `find_records`.
    """
    sources = find_records(inputs) if found is None else found
    names: dict[str, str] = {}
    for item in map(str, inputs):
        root = Path(item).expanduser()
        if item.startswith("hf:") or root.is_file():
            continue
        try:
            inside = find_records([item])
        except InputError:  # The input contains other files only.
            continue
        # For a glob, use only the name of the file itself, without the names of its folders.
        of_item = {
            source.name: _split_named(
                source.path.relative_to(root).parts if root.is_dir() else source.path.parts[-1:]
            )
            for source in inside
            if source.path is not None
        }
        if not {"val", "test"}.issuperset(of_item.values()):
            names |= of_item
    by_name: dict[str, list[DataSource]] = {"train": [], "val": [], "test": []}
    for source in sources:
        by_name[names.get(source.name) or "train"].append(source)
    own_val, test = by_name["val"], by_name["test"]
    use = "excluded, because other validation data was specified" if val_inputs else "validated on"
    parts = []
    for group, fate in ((own_val, use), (test, "excluded as test data")):
        more = f" and {len(group) - _SHOWN_FILES:,} more" if len(group) > _SHOWN_FILES else ""
        shown = ", ".join(source.name for source in group[:_SHOWN_FILES])
        parts += [f"{shown}{more} {fate}"] if group else []
    val = find_records(val_inputs) if val_inputs else own_val
    return Splits(by_name["train"], val, test, "; ".join(parts))


def _split_named(parts: Sequence[str]) -> str:
    """Return the split indicated by the first or last word in the name of a file or of one of its
    folders, or "" if no name indicates a split.
    """
    for part in parts:
        words = re.split(r"[-_.]", part.lower())
        left_out = {"of", *"".join(RECORD_SUFFIXES).split(".")}
        words = [word for word in words if not word.isdigit() and word not in left_out]
        for word in (words[0], words[-1]) if words else ():
            if word in _SPLITS:
                return _SPLITS[word]
    return ""


def read_records(
    sources: Sequence[DataSource], text_key: str | None = None
) -> Generator[Record, None, None]:
    """Yield every record of the sources, in order. Closing the generator closes the file being
    read.

    Args:
        text_key: name of the text field if only text is needed; None if complete records are
            needed. If it is specified, text files are also read, a blank line is treated as a bad
            record, and a line can be as long as `largest_document`.

    Raises:
        InputError: a file can't be read at all (permissions, damaged compression), was changed
            while it was read, or is a JSON file without a list of records.
        MissingDependencyError: a package that a source needs is not installed.
    """
    for source in sources:
        with _unchanged(source):
            yield from _records_of(source, text_key)


@contextlib.contextmanager
def _unchanged(source: DataSource) -> Iterator[None]:
    """Raise an error if another program changes the source's file during the `with` block.

    Raises:
        InputError: the file was changed. This error replaces any error about the content of the
            file, because the change may have caused it.
    """
    before, problem = mark_of(source), None
    try:
        yield
    except InputError as error:
        problem = error
    if mark_of(source) != before:
        raise InputError(
            f"{source.name} was changed while it was being read: run the command again once no "
            "program writes to it"
        ) from problem
    if problem is not None:
        raise problem


def _records_of(source: DataSource, text_key: str | None) -> Generator[Record, None, None]:
    """Yield the records of one source; see `read_records`."""
    if source.dataset is not None:
        for number, row in enumerate(_dataset_rows(source), start=1):
            value = row if text_key is not None else _filled(row)
            yield Record(source.name, number, value, is_line=False)
        return
    assert source.path is not None
    path = source.path
    name = source.name
    ending = source.path.name.lower()
    try:
        if ending.endswith((".parquet", ".arrow")):
            is_arrow = ending.endswith(".arrow")
            rows = read_arrow(path, name) if is_arrow else read_parquet(path, name, text_key)
            for line, found in rows:
                error = found if isinstance(found, BadRecordError) else None
                value = found if text_key is not None else _filled(found)
                yield Record(name, line, None if error else value, error, is_line=False)
            return
        if text_key is not None and format_of(path) is not None:
            yield from _parts_of(path, name, text_key)
            return
        with open_compressed(path) as file:
            if ending.endswith(LINES_SUFFIXES):
                yield from _read_lines(file, path, name, text_key)
            elif ending.endswith(TABLE_SUFFIXES):
                # End the reader before the file is closed, even if the caller stops early.
                with closing(read_table(file, path, text_key)) as lines:
                    for line, row in lines:
                        error = row if isinstance(row, BadRecordError) else None
                        yield Record(name, line, None if error else row, error)
            elif text_key is None and not ending.endswith(".txt"):
                yield from _read_list(file, path, name)
            else:
                yield from _read_text(file, path, source, text_key or "text")
    except OSError as error:
        raise InputError(f"{name} can't be read: {describe_read_error(error)}") from error
    except EOFError as error:
        raise InputError(f"{name} is damaged: {error}: {_REPLACE}") from error


def _parts_of(path: Path, name: str, text_key: str) -> Iterator[Record]:
    """Yield the parts of a document that is not plain text, such as its chapters."""
    for number, (place, text, problem) in enumerate(documents_in(path), start=1):
        error = BadRecordError("unreadable", problem) if problem else None
        value = None if error else {text_key: text}
        yield Record(name, number, value, error, is_line=False, within=place)


def _filled(value: Any) -> Any:
    """Remove null entries from a row of Arrow data. Arrow gives all objects in a column the same
    keys, so each tool call would otherwise also contain the arguments of all other tools, as nulls.
    """
    if isinstance(value, dict):
        return {key: _filled(entry) for key, entry in value.items() if entry is not None}
    return [_filled(entry) for entry in value] if isinstance(value, list) else value


def kind_of_records(
    source: DataSource, text_key: str = "text"
) -> Literal["chat", "preference"] | None:
    """Detect the value of `prepare --kind` for a source from its first records. Return None for
    text documents and if the source can't be read. Only the first MiB of a long JSON file is read.

    Args:
        source: a source of records.
        text_key: name of the text field, in case the records are text documents.
    """
    damage = (OSError, EOFError, EncodingProblem)
    with contextlib.suppress(InputError, MissingDependencyError, *damage):
        path = source.path
        if path is not None and path.name.lower().endswith(".txt"):
            return None
        if path is not None and path.name.lower().endswith(_JSON_SUFFIXES):
            with open_compressed(path) as file:
                head = file.read(_JSON_HEAD_BYTES)
            if len(head) == _JSON_HEAD_BYTES:
                if exported_chats(head[:HEAD_BYTES]) is not None:
                    return None
                if is_with_assistant(head[:HEAD_BYTES]):
                    return "chat"
                values = _first_values(head.decode(encoding_of(head, path), "ignore"))
                return _kind_of(values, text_key)
        with closing(read_records([source])) as records:
            values = [record.value for record in itertools.islice(records, _TOLD_BY)]
            return _kind_of(values, text_key)
    return None


def _kind_of(values: Sequence[Any], text_key: str) -> Literal["chat", "preference"] | None:
    """Return the most common kind of data among the first records of a source."""
    kinds: list[Literal["chat", "preference"] | None] = []
    for value in values:
        if is_messages(value):
            kinds.append("chat")
        elif isinstance(value, dict):
            kind = conversation_kind([str(key) for key in value], text_key)
            if text_key in value:
                is_chat = message_field({text_key: value[text_key]}) is not None
                is_chat |= text_key == "text" and is_written(value["text"])
            else:
                is_chat = bool(message_field(value) or transcript_field(value))
            kinds.append("chat" if kind is None and is_chat else kind)
    return max(kinds, key=kinds.count, default=None)


def _first_values(text: str) -> list[Any]:
    """Parse the first values in JSON that may be truncated. The JSON is a single object, a list of
    values, or one value per line.
    """
    for parts in ([text], text.split("\n", _TOLD_BY)[:_TOLD_BY]):
        with contextlib.suppress(ValueError, RecursionError):
            found = [
                pydantic_core.from_json(part, allow_partial="trailing-strings") for part in parts
            ]
            if len(parts) > 1:
                return found
            if isinstance(found[0], dict) and len(found[0]) > 1:
                *complete, _ = found[0].items()  # The last value may be truncated.
                if all(_is_record(value) for _, value in complete):
                    found[0] = dict(complete)
            return _records_in(found[0])[:_TOLD_BY]
    return []


def _records_in(value: Any, *, is_inner: bool = False) -> list[Any]:
    """Return the records in a JSON file, whose value is one of:

        a list of records
        a single record, or a bare list of messages
        an object of records, keyed by id
        an object of columns
        an object with one list of records, such as {"data": [...]}; the list may be nested in
            another object

    Args:
        value: the value.
        is_inner: True if `value` is a nested part of the file's value, which need not contain
            records.

    Raises:
        ValueError: an object has several lists of records.
    """
    if isinstance(value, list):
        return [value] if _is_conversation(value) else value
    if not isinstance(value, dict):
        return [value]
    # The list of records may be in a field that usually contains the messages of a single record.
    for name in MESSAGE_FIELDS:
        entries = value.get(name)
        if (
            isinstance(entries, list)
            and entries
            and _is_record(entries[0])
            and not _is_turn(entries[0], value, name)
        ):
            if isinstance(entries[0], list):
                entries = _conversations_in_columns(value, len(entries))
            return _with_shared(value, entries)
    if conversation_kind(value) is not None:
        rows = _rows_of_columns(value)
        has_text = any(isinstance(one, str) for row in rows for one in row.values())
        return rows if has_text and len(value) > 1 else [value]
    if value and all(map(_is_record, value.values())):
        return list(value.values())
    inner = {
        key: _records_in(one, is_inner=True)
        for key, one in value.items()
        if isinstance(one, dict | list)
    }
    records = {key: found for key, found in inner.items() if found and _is_record(found[0])}
    lists = records or {
        key: found
        for key, found in inner.items()
        if found and isinstance(value[key], list) and isinstance(found[0], dict)
    }
    if len(lists) > 1:
        if is_inner and not records:
            return [value]
        names = ", ".join(lists)
        raise ValueError(
            f"it contains several lists of objects ({names}): write each of them to a separate "
            f"file, for example with jq -c '.{next(iter(lists))}[]' FILE > "
            f"{next(iter(lists))}.jsonl"
        )
    # If the only list contains messages, the value is a single record.
    if _has_messages(value):
        return [value]
    return _with_shared(value, next(iter(lists.values()), [value]))


def _conversations_in_columns(value: dict[str, Any], count: int) -> list[Any]:
    """Return the records in an object whose lists of `count` values are the columns.

    Raises:
        ValueError: the object contains a different number of system messages or loss weights.
    """
    columns: dict[str, Any] = {}
    for key, one in value.items():
        for_all = key in TOOLS and isinstance(one, list) and bool(one) and isinstance(one[0], dict)
        if isinstance(one, list) and len(one) == count and not for_all:
            columns[key] = one
        elif isinstance(one, list) and field_name(key) in (*SYSTEM_FIELDS, *LEARNED):
            raise ValueError(
                f"it has {len(one)} values of `{key}` for {count} records: give one per record, "
                "or a single one for all"
            )
    return _rows_of_columns(columns)


def _with_shared(value: dict[str, Any], records: list[Any]) -> list[Any]:
    """Return the records of a file. If the file specifies a system message, tools or a loss weight
    for all records, add them to each record that does not contain its own.
    """
    kinds: tuple[tuple[Sequence[str], type | tuple[type, ...]], ...] = (
        (SYSTEM_FIELDS, str),
        (TOOLS, object),
        (LEARNED, (bool, int, float, str)),
    )
    for fields, kind in kinds:
        shared = {
            key: one
            for key, one in value.items()
            if field_name(key) in fields and isinstance(one, kind)
        }
        if shared:
            rows = [one if isinstance(one, dict) else {"messages": one} for one in records]
            records = [one if _has_any(one, fields) else one | shared for one in rows]
    return records


def _has_any(record: dict[str, Any], fields: Sequence[str]) -> bool:
    return any(field_name(key) in fields for key, value in record.items() if value is not None)


def _rows_of_columns(value: dict[str, Any]) -> list[Any]:
    """Return the records in an object of columns, or [] for any other object. A column is a list of
    values or, as written by pandas, an object that maps row numbers to values.
    """
    columns = [
        list(one.values()) if isinstance(one, dict) and all(map(str.isdecimal, one)) else one
        for one in value.values()
    ]
    if not all(isinstance(one, list) and len(one) == len(columns[0]) for one in columns):
        return []
    return [dict(zip(value, row, strict=True)) for row in zip(*columns, strict=True)]


#: Fields that occur only in records with a single conversation.
_CONVERSATION_IDS = frozenset(
    "id conversation_id conv_id dialog_id dialogue_id chat_id session_id thread_id".split()
)


def _is_record(value: Any) -> bool:
    """Return True for a complete conversation or preference pair, and False for a single turn of a
    conversation.
    """
    if isinstance(value, list):
        return _is_conversation(value)
    if not isinstance(value, dict):
        return False
    is_known = conversation_kind(value, "") is not None and not value.keys() <= {"input", "output"}
    return is_known or _has_messages(value)


def _has_messages(value: dict[str, Any]) -> bool:
    """Return True for a record in which exactly one field, with any name, contains a list of
    messages.
    """
    name = message_field(value)
    return name is not None and isinstance(value[name], list) and _is_conversation(value[name])


def _is_turn(entry: Any, value: dict[str, Any], name: str) -> bool:
    """Return True if a list contains the turns of one conversation, each a question with its
    answer, rather than separate records.

    Args:
        entry: first entry of the list.
        value: value of the file, which is an object that contains the list.
        name: name of the field that contains the list, one of `MESSAGE_FIELDS`.
    """
    if not isinstance(entry, dict) or conversation_kind(entry, "") != "chat":
        return False
    if not entry.keys().isdisjoint(MESSAGE_FIELDS):
        return False
    of_one = name == "conversation" or not _CONVERSATION_IDS.isdisjoint(map(field_name, value))
    return of_one or "assistant" in map(field_name, entry)


def _is_conversation(value: list[Any]) -> bool:
    """Return True for a bare list of messages, and False for a list of records, even if the records
    have a `role` field.
    """
    return is_messages(value) and all(
        conversation_kind([str(key) for key in entry]) is None
        and not {"content", "value", "parts", "tool_calls"}.isdisjoint(entry)
        for entry in value
    )


def read_documents(
    sources: Sequence[DataSource], text_key: str = "text"
) -> Generator[Record, None, None]:
    """Yield every document of the sources, in order. Closing the generator closes the file being
    read.

    Args:
        text_key: name of the text field in JSONL lines, or of the text column in tables and
            datasets.

    Raises:
        InputError, MissingDependencyError: see `read_records`.
    """
    for source in sources:
        clean = functools.partial(
            cleaned, is_code=is_code(source), is_subtitles=is_subtitles(source)
        )
        left = math.inf if source.most_bytes is None else source.most_bytes
        with _unchanged(source), closing(_records_of(source, text_key)) as records:
            for record in records:
                for document in _documents_of(record, source, text_key, clean):
                    yield document
                    # Rejected documents also count towards the limit. Otherwise, a dataset that
                    # lacks the text field would be read to its end.
                    left -= _REJECTED_BYTES if document.error is not None else 0
                    if source.most_bytes is not None and document.error is None:
                        left -= len(document.value.encode("utf-8"))
                if left <= 0:
                    break


def with_words(documents: Iterable[Record]) -> Generator[Record, None, None]:
    """Yield the documents, and raise an error if they consist almost entirely of one repeated
    character. Counting stops as soon as enough different characters have been found.

    Raises:
        InputError: at least 99.9% of the text is the same character.
    """
    character = ""
    count = 0
    total = 0
    for document in documents:
        if document.error is None and count >= COMMON_SHARE * total:
            character = character or document.value[len(document.value) // 2]
            count += document.value.count(character)
            total += len(document.value)
        yield document
    if total and count >= COMMON_SHARE * total:
        raise InputError(one_character(character, count / total))


def one_character(character: str, share: float) -> str:
    """Return the error message for text that consists almost entirely of one repeated character."""
    return (
        f"{share:.1%} of the text is the single character {character!r}, which is useless for "
        "training: use text with words"
    )


def mark_of(source: DataSource) -> tuple[int, int, int] | None:
    """Return (inode, size, ctime in ns) of a source's file, or None if there is no such file. The
    ctime is used because programs can set the mtime, but not the ctime."""
    try:
        found = None if source.path is None else source.path.stat()
    except OSError:
        return None
    return None if found is None else (found.st_ino, found.st_size, found.st_ctime_ns)


def _documents_of(
    record: Record,
    source: DataSource,
    text_key: str,
    clean: Callable[[str], tuple[str, tuple[str, ...]]],
) -> Iterator[Record]:
    """Split a record's text at separators, clean the parts, and yield the resulting documents."""
    try:
        if record.error is not None:
            raise record.error
        text = _text_of(record.value, text_key)
    except BadRecordError as error:
        yield record._replace(value=None, error=error)
        return
    if source.as_is:
        yield record._replace(value=text)
        return
    marks = tuple(f"{CHAT}{mark}" for mark in control_tokens(text))
    if not marks and (transcript := transcript_of(text)) is not None:
        marks = (f"{TRANSCRIPT}{transcript.name}",)
    parts = [(text, record.changes + marks)]
    # Text files have already been split at separators.
    if "<" in text and not holds_one_document(source):
        found = split_documents([text.encode("utf-8")])
        parts = [((one.content or b"").decode("utf-8"), one.changes + marks) for one in found]
    for part, changes in parts:
        text, made = clean(part)
        # Text that consists only of separators results in one empty part.
        reason = _ONLY_SEPARATORS
        if part:
            reason = _ONLY_TIMES if SUBTITLES in made else _ONLY_LICENCE
        problem = BadRecordError("empty", reason) if not text else None
        yield record._replace(value=text or None, error=problem, changes=changes + made)


def _text_of(record: object, text_key: str) -> str:
    """Return the text of a record.

    Raises:
        BadRecordError: the record has no text.
    """
    if not isinstance(record, dict):
        raise BadRecordError("no_text", f"not an object with a '{text_key}' field")
    if text_key not in record:
        raise without_text([str(key) for key in record], text_key, "field")
    text = record[text_key]
    if message_field({text_key: text}) is not None:
        problem = f"the '{text_key}' field contains messages, not text: {start_from('chat')}"
        raise BadRecordError("conversation", problem)
    if not isinstance(text, str):
        raise BadRecordError("no_text", f"the text is {type(text).__name__}, not a string")
    if not text.strip():
        raise BadRecordError("empty", REASONS["empty"])
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRecordError("bad_utf8", f"lone surrogate at character {error.start}") from None
    return text


def digest_of(text: str) -> bytes:
    """Return a hash of a document's text."""
    return hashlib.blake2b(text.encode("utf-8"), digest_size=16).digest()


def nothing_read(rejected: Counter[str], first: str) -> str:
    """Return the error message for inputs in which no usable document was found.

    Args:
        rejected: number of rejected documents for each reason.
        first: location of the first rejected document, and the reason why it was rejected.
    """
    if not rejected:
        return "the corpus is empty: the inputs contain no documents"
    if rejected.total() == 1:
        # For all other reasons, the message already includes advice.
        remedy = ": give files with text" if rejected["empty"] else ""
        return f"the corpus is empty: {first}{remedy}"
    reasons = ", ".join(f"{count:,} {REASONS[reason]}" for reason, count in rejected.items())
    return (
        f"the corpus is empty: all {rejected.total():,} documents read were rejected ({reasons}); "
        f"first: {first}"
    )


def _read_text(file: IO[bytes], path: Path, source: DataSource, text_key: str) -> Iterator[Record]:
    """Yield the documents of a text file, split at separators but not cleaned."""
    largest = largest_document(path)
    name, is_whole = source.name, source.as_is
    try:
        blocks = blocks_of(utf8_stream(file, path), source.most_bytes)
        parts = split_documents(blocks, largest, is_code=is_code(source), is_whole=is_whole)
        for line, content, changes in parts:
            if content is None:
                problem = f"the text has more than {largest:,} bytes"
                yield Record(name, line, None, BadRecordError("too_long", problem))
                continue
            try:
                text = decoded_utf8(content, path)
            except EncodingProblem as bad:
                error = BadRecordError(bad.reason, str(bad))
                yield Record(name, line + bad.line - 1, None, error)
            else:
                yield Record(name, line, {text_key: text}, changes=changes)
    except EncodingProblem as bad:
        yield Record(name, bad.line, None, BadRecordError(bad.reason, str(bad)))


def _read_lines(file: IO[bytes], path: Path, origin: str, text_key: str | None) -> Iterator[Record]:
    most = _MAX_LINE_BYTES if text_key is None else largest_document(path)
    number = 0
    try:
        stream = utf8_stream(file, path)
        while line := stream.readline(most):
            number += 1
            if len(line) == most and not line.endswith(b"\n"):
                while (rest := stream.readline(most)) and not rest.endswith(b"\n"):
                    pass
                problem = f"the line has more than {most:,} bytes"
                yield Record(origin, number, None, BadRecordError("too_long", problem))
            elif line.strip():
                yield _parsed(
                    line, path, origin, number, prefix="not JSON: " if text_key is None else ""
                )
            elif text_key is not None:
                yield Record(origin, number, None, BadRecordError("empty", "blank line"))
    except EncodingProblem as bad:
        yield Record(origin, number + 1, None, BadRecordError(bad.reason, str(bad)))


def _parsed(line: bytes, path: Path, origin: str, number: int, prefix: str) -> Record:
    try:
        _require_few_values(line)
        return Record(origin, number, json.loads(line.decode("utf-8")))
    except UnicodeDecodeError as error:
        problem = bad_byte(line[error.start], path)
        return Record(origin, number, None, BadRecordError("bad_utf8", problem))
    except json.JSONDecodeError as error:
        problem = f"{prefix}{error.msg.removesuffix(' at')} at column {error.colno}"
        return Record(origin, number, None, BadRecordError("broken_json", problem))
    except (ValueError, RecursionError) as error:
        return Record(origin, number, None, BadRecordError("broken_json", f"{prefix}{error}"))


def _require_few_values(content: bytes) -> None:
    """Reject a JSON document whose parsed value would take far more memory than its text.

    Raises:
        ValueError: the content has too many lists and objects.
    """
    if len(content) <= _MAX_VALUES:
        return
    count = content.count(b"[") + content.count(b"{")
    if count > max(_MAX_VALUES, len(content) // _VALUE_BYTES):
        raise ValueError(
            f"it contains {count:,} lists and objects, more than one per {_VALUE_BYTES} bytes"
        )


def _read_list(file: IO[bytes], path: Path, origin: str) -> Iterator[Record]:
    most = min(_MAX_JSON_BYTES, largest_document(path))
    try:
        content = read_at_most(utf8_stream(file, path), most)
        text = decoded_utf8(content, path) if len(content) <= most else ""
    except EncodingProblem as problem:
        raise InputError(f"{origin}:{problem.line}: {problem}") from problem
    if len(content) > most:
        raise InputError(
            f"{origin} has more than {most:,} bytes, but a JSON file must be read as a whole: "
            "convert it to JSONL, with one record per line"
        )
    try:
        _require_few_values(content)
        values = json.loads(text)
    except json.JSONDecodeError as error:
        # The first line is a complete record and more data follows, so read the file as JSONL.
        if error.msg == "Extra data" and "\n" not in text[: error.pos].strip():
            with open_compressed(path) as lines:
                yield from _read_lines(lines, path, origin, None)
            return
        if not text.strip():
            raise InputError(f"{origin} is empty: replace it, or exclude it") from error
        what = f"not JSON: {error.msg.removesuffix(' at')} at column {error.colno}"
        raise InputError(f"{origin}:{error.lineno}: {what}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{origin} is not JSON: {error}") from error
    try:
        values = conversations(values) or values
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{origin} contains chats in an unknown format: exclude it") from error
    if (kind := exported_chats(content[:HEAD_BYTES])) is not None:
        raise InputError(f"{origin} is {kind.name}: {kind.advice(path)}")
    if not isinstance(values, list | dict):
        raise InputError(f"{origin} must contain a record, a list of records, or JSONL")
    try:
        records = _records_in(values)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{origin} can't be read as records: {error}") from error
    for number, value in enumerate(records, start=1):
        yield Record(origin, number, value, is_line=False)


def _dataset_rows(source: DataSource) -> Iterator[object]:
    """Stream a split of the Hugging Face dataset `NAME[:CONFIG[:SPLIT]]`, "train" by default."""
    assert source.dataset is not None
    datasets = optional("datasets", f"reading {source.name}")
    name, config, split = (*source.dataset.split(":", 2), "", "")[:3]
    try:
        yield from datasets.load_dataset(
            name, config or None, split=split or "train", streaming=True
        )
    # The libraries behind this call raise different errors for unknown names and formats, and for
    # problems with the network or the server.
    except Exception as error:
        raise InputError(f"dataset {source.name} can't be read: {first_line(error)}") from error
    finally:
        # pyarrow aborts the process if a reference cycle keeps an unfinished scan alive until
        # Python exits (https://github.com/apache/arrow/issues/45214).
        gc.collect()

"""What firstlight reads of an input: files, documents and text of each kind, random passages, and
what is left out and why."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from firstlight.data.formats.reading import read_all
from firstlight.data.formats.registry import format_of
from firstlight.data.records import Record, read_documents
from firstlight.data.sources import (
    DataSource,
    by_ending,
    find_sources,
    unread_files,
    unread_lines,
)
from firstlight.errors import InputError, nearest

#: Maximum number of characters of a passage.
_PASSAGE_CHARACTERS = 400


@dataclass(frozen=True)
class Document:
    """A document or a passage of it.

    Attributes:
        place: file and place in the file.
        text: the text, or "" if the document is left out.
        left_out: the reason why the document is left out, or "".
    """

    place: str
    text: str
    left_out: str = ""


@dataclass
class KindContents:
    """What was read of one kind of files.

    Attributes:
        kind: name of the format, such as "PDF", or the suffix of text files.
        files, documents, text_bytes: numbers of files, documents and UTF-8 bytes of text.
        share: fraction of the text of the input.
        passages: passages of random documents.
    """

    kind: str
    files: int = 0
    documents: int = 0
    text_bytes: int = 0
    share: float = 0.0
    passages: list[Document] = field(default_factory=list)


@dataclass(frozen=True)
class Contents:
    """What was read of an input.

    Attributes:
        input: the INPUT.
        kinds: contents of each kind of files, those with the most text first.
        left_out: documents and files that are left out, in the order of reading.
    """

    input: str
    kinds: Sequence[KindContents]
    left_out: Sequence[Document]


def contents_of(
    item: str,
    *,
    text_key: str = "text",
    as_is: bool = False,
    seed: int = 0,
    passages: int = 3,
    progress: bool = False,
) -> Contents:
    """Read an input as `prepare` does, and describe what was read.

    Args:
        item: a file, folder, glob, "stdlib" or "hf:NAME[:CONFIG[:SPLIT]]".
        text_key: field that holds the text in JSONL lines, tables and datasets.
        as_is: True to neither clean nor split text.
        seed: seed of the random passages.
        passages: number of passages of each kind.
        progress: True to show a progress bar while documents are read.

    Raises:
        InputError: the input can't be read.
    """
    sources = find_sources([item], as_is=as_is)
    read_all([source.path for source in sources], progress=progress)
    kinds: dict[str, KindContents] = {}
    left_out: list[Document] = []
    draw = random.Random(seed)
    for source in sources:
        kind = _kind_of(source)
        documents = 0
        with closing(read_documents([source], text_key)) as records:
            for record in records:
                if record.error is not None:
                    left_out.append(_document(record))
                    continue
                documents += 1
                _add(kinds.setdefault(kind, KindContents(kind)), record, draw, passages)
        if documents:
            kinds[kind].files += 1
    lines = unread_lines(unread_files([item])).splitlines()
    for name, _, reason in (line.partition("\t") for line in lines):
        left_out.append(Document(name, "", reason))
    total = sum(one.text_bytes for one in kinds.values())
    for one in kinds.values():
        one.share = one.text_bytes / total
    ordered = sorted(kinds.values(), key=lambda one: -one.text_bytes)
    return Contents(item, ordered, left_out)


def documents_of(
    item: str, file: str, *, text_key: str = "text", as_is: bool = False
) -> Iterator[Document]:
    """Yield the documents of one file, in order, including those that are left out.

    Args:
        item: the INPUT that contains the file: a folder, an archive or a folder of archives.
        file: path of the file in the INPUT, or any path.
        text_key, as_is: see `contents_of`.

    Raises:
        InputError: there is no such file, or it can't be read.
    """
    paths = [Path(item).expanduser() / file, Path(file).expanduser()]
    if path := next((path for path in paths if path.is_file()), None):
        yield from map(_document, read_documents(find_sources([path], as_is=as_is), text_key))
        return
    sources = find_sources([item], as_is=as_is)
    members: dict[str, None] = {}
    is_found = False
    for record in read_documents(sources, text_key):
        # The place of a document in an archive begins with the name of the member.
        text = str(record.error) if record.error is not None else record.within
        if (text and text.startswith((f"{file}, ", f"{file}: "))) or text == file:
            is_found = True
            yield _document(record)
        elif record.within:
            members.setdefault(record.within.partition(", ")[0])
    if not is_found:
        names = [*(source.name for source in sources), *members]
        raise InputError(f"{item} contains no file {file}{nearest(file, names)}: check its name")


def _kind_of(source: DataSource) -> str:
    if source.path is None:
        return "dataset"
    if (found := format_of(source.path)) is not None:
        return found.name
    return next(iter(by_ending([source.path]))) or "text without a suffix"


def _document(record: Record) -> Document:
    if record.error is not None:
        return Document(record.place, "", str(record.error))
    return Document(record.place, record.value)


def _add(kind: KindContents, record: Record, draw: random.Random, passages: int) -> None:
    """Count a document. Every document of the kind is equally likely to be among the passages."""
    kind.documents += 1
    kind.text_bytes += len(record.value.encode("utf-8"))
    number = draw.randrange(kind.documents)
    if len(kind.passages) < passages:
        kind.passages.append(Document(record.place, _passage(record.value, draw)))
    elif number < passages:
        kind.passages[number] = Document(record.place, _passage(record.value, draw))


def _passage(text: str, draw: random.Random) -> str:
    """Return a random part of a text that begins and ends with a whole word, if there are words."""
    start = draw.randrange(max(len(text) - _PASSAGE_CHARACTERS, 0) + 1)
    part = text[start : start + _PASSAGE_CHARACTERS]
    words = part.split(maxsplit=1)
    if start and len(words) > 1:
        part = words[1]
    if start + _PASSAGE_CHARACTERS < len(text):
        part = part.rsplit(maxsplit=1)[0]
    return part.strip()

"""Where text comes from: files, folders, globs, the standard library, Hugging Face datasets.

A *document* is one text file, one line of a JSONL file or one row of a table (CSV, Parquet).
Whatever can't be read as a document comes out as a `Rejected`, with the file, the line and the
reason, so that documents in = documents out + rejected. Files of another kind are counted by
`unread_files`.
"""

from __future__ import annotations

import gc
import glob
import json
import os
import sysconfig
import zlib
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from firstlight.data.opening import (
    EncodingProblem,
    bad_byte,
    decoded,
    open_compressed,
    optional,
    utf8_stream,
)
from firstlight.data.tables import TABLE_SUFFIXES, BadRow, read_rows
from firstlight.errors import InputError, describe_os_error, nearest

TEXT_SUFFIXES = (".txt", ".md", ".py")
COMPRESSIONS = ("", ".gz", ".zst", ".bz2")
SUFFIXES = (
    *(
        suffix + compression
        for suffix in (*TEXT_SUFFIXES, ".jsonl", *TABLE_SUFFIXES)
        for compression in COMPRESSIONS
    ),
    ".parquet",
)
_JSONL_SUFFIXES = tuple(".jsonl" + compression for compression in COMPRESSIONS)
_TABLE_SUFFIXES = tuple(suffix + end for suffix in TABLE_SUFFIXES for end in COMPRESSIONS)

#: Folders that hold no text of a person's corpus.
_SKIPPED_FOLDERS = frozenset({"__pycache__", "node_modules"})
#: Parts of the standard library's folder that are left out of the default corpus.
_STDLIB_LEFT_OUT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages"})


@dataclass(frozen=True)
class Document:
    """One text, and where it came from (`line` is 1 for whole files)."""

    text: str
    origin: str
    line: int


@dataclass(frozen=True)
class Rejected:
    """One document that was not read: `reason` is one of `REASONS`, `detail` is for people."""

    origin: str
    line: int
    reason: str
    detail: str


REASONS = {
    "bad_utf8": "not valid UTF-8",
    "bad_utf16": "not valid UTF-16",
    "broken_row": "not a valid row of a table",
    "broken_json": "not a valid JSON line",
    "no_text": "no text in the text field",
    "empty": "nothing but white space",
}


@dataclass(frozen=True)
class Source:
    """One file, or one dataset, to read documents from."""

    name: str
    path: Path | None = None
    dataset: str | None = None

    @property
    def size(self) -> int:
        """Bytes on disk; 0 for datasets."""
        return self.path.stat().st_size if self.path is not None else 0


def find_sources(
    inputs: Sequence[str | Path], suffixes: tuple[str, ...] = SUFFIXES
) -> list[Source]:
    """Resolve INPUTs to files and datasets, in a deterministic order, each file once.

    An INPUT is a file, a folder (searched recursively, hidden folders left out), a glob
    (`**` crosses folders), the word `stdlib` (the source of the running Python's standard
    library without its tests) or `hf:NAME[:CONFIG]`.

    Args:
        suffixes: of files that are meant; other than the default ones leave `stdlib` out.

    Raises:
        InputError: an input does not exist, matches nothing, or is of an unknown kind.
    """
    if not inputs:
        raise InputError("no input given: name files, folders, globs, `stdlib` or `hf:NAME`")
    sources: dict[str, Source] = {}
    for item in inputs:
        try:
            found = _resolve(str(item), suffixes)
        # RuntimeError: the home folder of an unknown user.
        except (OSError, RuntimeError) as error:
            reason = describe_os_error(error) if isinstance(error, OSError) else error
            raise InputError(f"input {item} can't be found: {reason}") from error
        for source in found:
            key = str(source.path.resolve()) if source.path is not None else source.name
            sources.setdefault(key, source)
    return list(sources.values())


def _resolve(item: str, suffixes: tuple[str, ...]) -> list[Source]:
    if not item:
        raise InputError("an input is empty: name a file, a folder, a glob, `stdlib` or `hf:NAME`")
    if item == "stdlib" and suffixes == SUFFIXES and not Path(item).exists():
        return _standard_library()
    if item.startswith("hf:"):
        if not item[3:]:
            raise InputError("hf: needs a dataset's name, for instance hf:roneneldan/TinyStories")
        return [Source(name=item, dataset=item[3:])]
    path = Path(item).expanduser()
    if path.is_dir():
        found = sorted(
            _files_under(path, suffixes), key=lambda file: file.relative_to(path).as_posix()
        )
        if not found:
            others = listed(by_ending(unread_files([path], suffixes)))
            there = f"; it has {others}" if others else ""
            raise InputError(f"folder {item} holds no {_kinds(suffixes)}{there}")
        return [Source(name=str(file), path=file) for file in found]
    if path.is_file():
        if not path.name.lower().endswith(suffixes):
            way = _CONVERTERS.get(path.suffix.lower())
            raise InputError(
                f"{item} is of an unknown kind: known are {', '.join(_main_suffixes(suffixes))}"
                + (f" (text of it: {way})" if way else "")
            )
        return [Source(name=item, path=path)]
    if path.exists():
        raise InputError(f"{item} is neither a file nor a folder")
    if any(character in item for character in "*?["):
        names = sorted(glob.glob(str(path), recursive=True))
        files = [Path(name) for name in names if os.path.isfile(name)]
        files = [file for file in files if file.name.lower().endswith(suffixes)]
        if not files:
            raise InputError(f"{item} matches no {_kinds(suffixes)}")
        return [Source(name=str(file), path=file) for file in files]
    siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    raise InputError(f"{item} does not exist{nearest(path.name, [*siblings, 'stdlib'])}")


def _main_suffixes(suffixes: tuple[str, ...]) -> list[str]:
    if suffixes == SUFFIXES:
        return [*TEXT_SUFFIXES, ".jsonl[.gz|.zst]", *TABLE_SUFFIXES, ".parquet"]
    return [".jsonl[.gz|.zst]", ".json", ".parquet"]


def _kinds(suffixes: tuple[str, ...]) -> str:
    what = "text files" if suffixes == SUFFIXES else "files of records"
    return f"{what} ({', '.join(_main_suffixes(suffixes))})"


def unread_files(inputs: Sequence[str | Path], suffixes: tuple[str, ...] = SUFFIXES) -> list[Path]:
    """The files of no known kind in the folders and globs among INPUTs, hidden ones left out.

    Raises:
        InputError: a folder can't be read.
    """
    found: set[Path] = set()
    for path in (Path(item).expanduser() for item in inputs):
        if path.is_dir():
            found.update(_files_under(path, ("",)))
        elif not path.exists() and any(character in str(path) for character in "*?["):
            names = glob.glob(str(path), recursive=True)
            found.update(Path(name) for name in names if os.path.isfile(name))
    others = {file.resolve(): file for file in found if not file.name.lower().endswith(suffixes)}
    return sorted(others.values())


def by_ending(files: Sequence[Path]) -> dict[str, int]:
    """The number of files by ending (lower case, "" for none), the most frequent first."""
    counts = Counter(_ending(file.name.lower()) for file in files)
    return dict(sorted(counts.items(), key=lambda entry: (-entry[1], entry[0])))


def _ending(name: str) -> str:
    """The last ending of a file's name, with that before a compression's: .tar.gz."""
    stem, dot, last = name.rpartition(".")
    if not stem or not dot or not last.isalnum() or len(last) > 10:
        return ""
    if f".{last}" in COMPRESSIONS and (before := _ending(stem)):
        return f"{before}.{last}"
    return f".{last}"


#: How files of other kinds become text.
_CONVERTERS = {
    ".pdf": "pdftotext FILE.pdf",
    ".docx": "pandoc FILE.docx -t plain -o FILE.txt",
    ".odt": "pandoc FILE.odt -t plain -o FILE.txt",
    ".epub": "pandoc FILE.epub -t plain -o FILE.txt",
    ".html": "pandoc FILE.html -t plain -o FILE.txt",
    ".xlsx": "a spreadsheet program, saved as .csv",
}


def listed(unread: Mapping[str, int]) -> str:
    """`by_ending` for people: "7 .pdf, 2 without an ending"; and how such become text."""
    shown = ", ".join(f"{count:,} {end or 'without an ending'}" for end, count in unread.items())
    ways = [_CONVERTERS[end] for end in unread if end in _CONVERTERS]
    return f"{shown} (text of them: {'; '.join(ways)})" if ways else shown


def _files_under(folder: Path, suffixes: tuple[str, ...]) -> Iterator[Path]:
    def unreadable(error: OSError) -> None:
        raise InputError(f"folder {folder} can't be read: {describe_os_error(error)}")

    for root, folders, names in os.walk(folder, onerror=unreadable):
        folders[:] = [f for f in folders if f not in _SKIPPED_FOLDERS and not f.startswith(".")]
        for name in names:
            file = Path(root) / name
            # Not links to nothing, and not pipes, which would be waited for without end.
            if name.lower().endswith(suffixes) and not name.startswith(".") and file.is_file():
                yield file


def _standard_library() -> list[Source]:
    """The .py files of the running interpreter's standard library, tests left out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [f for f in folders if f not in _STDLIB_LEFT_OUT | _SKIPPED_FOLDERS]
        files += [Path(folder) / name for name in names if name.endswith(".py")]
    if not files:
        raise InputError(f"the standard library's source is not installed at {root}")
    files.sort(key=lambda file: file.relative_to(root).as_posix())
    return [Source(name=f"stdlib/{file.relative_to(root).as_posix()}", path=file) for file in files]


def read_documents(
    sources: Sequence[Source], text_key: str = "text"
) -> Generator[Document | Rejected, None, None]:
    """Every document of the sources, in order. Closing it closes the file that is being read.

    Args:
        text_key: the field of JSONL lines, or column of tables and datasets, that holds the text.

    Raises:
        InputError: a file as a whole can't be read (permissions, damaged compression).
    """
    for source in sources:
        if source.dataset is not None:
            yield from _read_dataset(source, text_key)
            continue
        assert source.path is not None
        try:
            if source.path.name.lower().endswith(".parquet"):
                yield from _read_parquet(source.path, source.name, text_key)
                continue
            with open_compressed(source.path) as file:
                name = source.path.name.lower()
                if name.endswith(_JSONL_SUFFIXES):
                    yield from _read_jsonl(file, source.path, source.name, text_key)
                elif name.endswith(_TABLE_SUFFIXES):
                    yield from _read_table(file, source.path, source.name, text_key)
                else:
                    yield _read_text(file.read(), source.path, source.name)
        except OSError as error:
            raise InputError(f"{source.name} can't be read: {describe_os_error(error)}") from error
        except (EOFError, zlib.error) as error:
            raise InputError(f"{source.name} is damaged: {error}") from error


def _accept(text: object, origin: str, line: int) -> Document | Rejected:
    """A document, or why it is none."""
    if not isinstance(text, str):
        return Rejected(origin, line, "no_text", f"the text is {type(text).__name__}, not a string")
    if not text.strip():
        return Rejected(origin, line, "empty", REASONS["empty"])
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return Rejected(origin, line, "bad_utf8", f"lone surrogate at character {error.start}")
    return Document(text, origin, line)


def _read_text(content: bytes, path: Path, origin: str) -> Document | Rejected:
    try:
        text = decoded(content, path)
    except EncodingProblem as problem:
        return Rejected(origin, problem.line, problem.reason, str(problem))
    return _accept(text, origin, 1)


def _read_jsonl(
    file: IO[bytes], path: Path, origin: str, text_key: str
) -> Iterator[Document | Rejected]:
    number = 0
    try:
        for number, line in enumerate(utf8_stream(file, path), start=1):
            if not line.strip():
                yield Rejected(origin, number, "empty", "blank line")
                continue
            try:
                record = json.loads(line.decode("utf-8"))
            except UnicodeDecodeError as error:
                detail = bad_byte(line[error.start], path)
                yield Rejected(origin, number, "bad_utf8", detail)
                continue
            except (ValueError, RecursionError) as error:
                yield Rejected(origin, number, "broken_json", str(error))
                continue
            yield _from_record(record, origin, number, text_key)
    except EncodingProblem as problem:
        yield Rejected(origin, number + 1, problem.reason, str(problem))


def _read_table(
    file: IO[bytes], path: Path, origin: str, text_key: str
) -> Iterator[Document | Rejected]:
    for line, found in read_rows(file, path, text_key):
        if isinstance(found, BadRow):
            yield Rejected(origin, line, found.reason, found.detail)
        else:
            yield _accept(found, origin, line)


def _from_record(record: object, origin: str, line: int, text_key: str) -> Document | Rejected:
    if not isinstance(record, dict):
        return Rejected(origin, line, "no_text", f"not an object with a '{text_key}' field")
    if text_key not in record:
        fields = ", ".join(map(str, list(record)[:8])) or "none"
        return Rejected(origin, line, "no_text", f"no field '{text_key}' (fields: {fields})")
    return _accept(record[text_key], origin, line)


def _read_parquet(path: Path, origin: str, text_key: str) -> Iterator[Document | Rejected]:
    parquet = optional("pyarrow.parquet", f"reading {path}")
    arrow = optional("pyarrow", f"reading {path}")
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if text_key not in names:
                raise InputError(
                    f"{origin} has no column '{text_key}' (columns: {', '.join(names)}): "
                    "name the one with the text with --text-key"
                )
            row = 0
            for batch in file.iter_batches(columns=[text_key]):
                for value in batch.column(0):
                    row += 1
                    try:
                        text = value.as_py()
                    except UnicodeDecodeError as error:
                        yield Rejected(origin, row, "bad_utf8", str(error))
                        continue
                    yield _accept(text, origin, row)
    except arrow.ArrowException as error:
        raise InputError(f"{origin} is not a readable Parquet file: {error}") from error


def _read_dataset(source: Source, text_key: str) -> Iterator[Document | Rejected]:
    for number, record in enumerate(dataset_rows(source), start=1):
        yield _from_record(record, source.name, number, text_key)


def dataset_rows(source: Source) -> Iterator[object]:
    """Stream the train split of a Hugging Face dataset: `NAME` or `NAME:CONFIG`.

    Raises:
        InputError: it can't be read.
        MissingDependencyError: the package for it is not installed.
    """
    assert source.dataset is not None
    datasets = optional("datasets", f"reading {source.name}")
    name, _, config = source.dataset.partition(":")
    try:
        yield from datasets.load_dataset(name, config or None, split="train", streaming=True)
    # Names, networks, servers and file formats fail here, each library with its own errors.
    except Exception as error:
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(f"dataset {source.name} can't be read: {first_line}") from error
    finally:
        # A scan that is not read to its end and lives on in a cycle until Python ends has pyarrow
        # abort the process (https://github.com/apache/arrow/issues/45214).
        gc.collect()

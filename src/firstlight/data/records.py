"""Records of JSONL, JSON and Parquet files and of Hugging Face datasets, with where they stand."""

from __future__ import annotations

import json
import zlib
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from firstlight.data.conversations import BadRecordError
from firstlight.data.opening import (
    EncodingProblem,
    bad_byte,
    decoded,
    open_compressed,
    optional,
    utf8_stream,
)
from firstlight.data.sources import (
    COMPRESSIONS,
    Source,
    dataset_rows,
    find_sources,
)
from firstlight.errors import InputError, describe_os_error

RECORD_SUFFIXES = (
    *(suffix + compression for suffix in (".jsonl", ".json") for compression in COMPRESSIONS),
    ".parquet",
)
_LINES_SUFFIXES = tuple(".jsonl" + compression for compression in COMPRESSIONS)

#: A line that is longer is not read into memory; nor is a JSON file, which has to be as a whole.
_MAX_LINE_BYTES = 64 << 20
_MAX_JSON_BYTES = 4 << 30


@dataclass(frozen=True)
class Record:
    """One record, or why there is none.

    Attributes:
        origin: the file, or `hf:NAME`.
        line: of a JSONL file the line, else the record's number; from 1 on.
        value: what is there; of a record that can't be read, None.
        error: why it can't be.
        is_line: whether `line` is one.
    """

    origin: str
    line: int
    value: Any
    error: BadRecordError | None = None
    is_line: bool = True

    @property
    def place(self) -> str:
        """Where it stands, for people."""
        return f"{self.origin}:{self.line}" if self.is_line else f"{self.origin} record {self.line}"


def find_records(inputs: Sequence[str | Path]) -> list[Source]:
    """Resolve inputs to files of records and datasets: see `find_sources`.

    Raises:
        InputError: one does not exist, matches nothing, or holds no records.
    """
    return find_sources(inputs, RECORD_SUFFIXES)


def read_records(sources: Sequence[Source]) -> Generator[Record, None, None]:
    """Every record of the sources, in order.

    Raises:
        InputError: a file as a whole can't be read, or a JSON file is not a list.
        MissingDependencyError: a package for it is not installed.
    """
    for source in sources:
        if source.dataset is not None:
            for number, row in enumerate(dataset_rows(source), start=1):
                yield Record(source.name, number, row, is_line=False)
            continue
        assert source.path is not None
        name = source.path.name.lower()
        try:
            if name.endswith(".parquet"):
                yield from _read_parquet(source.path, source.name)
                continue
            with open_compressed(source.path) as file:
                reader = _read_lines if name.endswith(_LINES_SUFFIXES) else _read_list
                yield from reader(file, source.path, source.name)
        except OSError as error:
            raise InputError(f"{source.name} can't be read: {describe_os_error(error)}") from error
        except (EOFError, zlib.error) as error:
            raise InputError(f"{source.name} is damaged: {error}") from error


def _read_lines(file: IO[bytes], path: Path, origin: str) -> Iterator[Record]:
    number = 0
    try:
        stream = utf8_stream(file, path)
        while line := stream.readline(_MAX_LINE_BYTES):
            number += 1
            if len(line) == _MAX_LINE_BYTES and not line.endswith(b"\n"):
                while (rest := stream.readline(_MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
                    pass
                problem = f"the line has more than {_MAX_LINE_BYTES:,} bytes"
                yield Record(origin, number, None, BadRecordError("too_long", problem))
            elif line.strip():
                yield _parsed(line, path, origin, number)
    except EncodingProblem as bad:
        yield Record(origin, number + 1, None, BadRecordError(bad.reason, str(bad)))


def _parsed(line: bytes, path: Path, origin: str, number: int) -> Record:
    try:
        return Record(origin, number, json.loads(line.decode("utf-8")))
    except UnicodeDecodeError as error:
        problem = bad_byte(line[error.start], path)
        return Record(origin, number, None, BadRecordError("bad_utf8", problem))
    except (ValueError, RecursionError) as error:
        return Record(origin, number, None, BadRecordError("broken_json", f"not JSON: {error}"))


def _read_list(file: IO[bytes], path: Path, origin: str) -> Iterator[Record]:
    content = file.read(_MAX_JSON_BYTES + 1)
    if len(content) > _MAX_JSON_BYTES:
        raise InputError(
            f"{origin} has more than {_MAX_JSON_BYTES:,} bytes, and JSON has to be read as a "
            "whole: make it JSONL, with one record a line"
        )
    try:
        values = json.loads(decoded(content, path))
    except EncodingProblem as problem:
        raise InputError(f"{origin}:{problem.line}: {problem}") from problem
    except json.JSONDecodeError as error:
        advice = "; if it has one record a line, call it .jsonl" if error.lineno > 1 else ""
        raise InputError(f"{origin}:{error.lineno}: not JSON: {error.msg}{advice}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{origin} is not JSON: {error}") from error
    if not isinstance(values, list):
        raise InputError(f"{origin} must be a list of records (or JSONL, with one a line)")
    for number, value in enumerate(values, start=1):
        yield Record(origin, number, value, is_line=False)


def _read_parquet(path: Path, origin: str) -> Iterator[Record]:
    parquet = optional("pyarrow.parquet", f"reading {path}")
    arrow = optional("pyarrow", f"reading {path}")
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for place in range(batch.num_rows):
                    number += 1
                    yield _parquet_record(batch, place, origin, number)
    except arrow.ArrowException as error:
        raise InputError(f"{origin} is not a readable Parquet file: {error}") from error


def _parquet_record(batch: Any, place: int, origin: str, number: int) -> Record:
    try:
        value = batch.slice(place, 1).to_pylist()[0]
    except UnicodeDecodeError as error:
        problem = BadRecordError("bad_utf8", str(error))
        return Record(origin, number, None, problem, is_line=False)
    return Record(origin, number, value, is_line=False)

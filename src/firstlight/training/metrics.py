"""metrics.jsonl: one line a step, exact floats, never a step twice."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from firstlight.errors import CheckpointError
from firstlight.files import storage_errors, write_file

METRICS_NAME = "metrics.jsonl"
SAMPLES_NAME = "samples.jsonl"


class JsonLines:
    """A file of JSON objects, one a line, appended to while a run goes on.

    Floats are written so that reading gives the same float. A line that the disk refuses is
    taken back, so that the file is always whole lines.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with storage_errors(path):
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - closed by close()

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one object.

        Raises:
            StorageError: the disk is full or not writable; the file is as before.
        """
        line = (json.dumps(record, ensure_ascii=False) + "\n").encode()
        with storage_errors(self._path):
            size = os.fstat(self._file.fileno()).st_size
            try:
                while line:  # an almost full disk takes a part of it
                    line = line[self._file.write(line) :]
            except OSError:
                os.truncate(self._path, size)
                raise

    def sync(self) -> None:
        """Force the lines to the disk."""
        with storage_errors(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """All objects of the file; a last line that a kill cut short is left out.

    Raises:
        CheckpointError: a line in the middle is damaged.
    """
    if not path.exists():
        return []
    lines = path.read_bytes().splitlines(keepends=True)
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except ValueError as error:
            if number == len(lines):
                break
            raise CheckpointError(f"{path}:{number} is damaged: {error}") from error
    return records


def keep_until(path: Path, step: int) -> None:
    """Drop the lines after `step`: the run is about to do those steps again."""
    if path.exists():
        kept = [record for record in read_json_lines(path) if record["step"] <= step]
        lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in kept)
        write_file(path, "".join(lines))

"""metrics.jsonl: one line a step, exact floats, never a step twice."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from firstlight.errors import CheckpointError, InputError
from firstlight.files.atomic import read_file, remove_file, storage_errors, write_file
from firstlight.files.disk import AppendedFile

#: Ten million steps.
_MAX_BYTES = 1 << 32

#: With a smaller share of learned tokens, their rate is shown beside that of all. Of text all are
#: learned, but for the padding of an epoch's last row.
MOSTLY_LEARNED = 0.9

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
            self._file = AppendedFile(path)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one object.

        Raises:
            StorageError: the disk is full or not writable; the file is as before.
        """
        line = json.dumps(record, ensure_ascii=False) + "\n"
        with storage_errors(self._path):
            self._file.append(line.encode())

    def sync(self) -> None:
        """Force the lines to the disk."""
        with storage_errors(self._path):
            self._file.sync()

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
    try:
        lines = read_file(path, _MAX_BYTES).splitlines(keepends=True)
    except InputError as error:
        raise CheckpointError(str(error)) from error
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(_record(line))
        except (ValueError, RecursionError) as error:
            if number == len(lines):
                break
            raise CheckpointError(f"{path}:{number} is damaged: {error}") from error
    return records


def _record(line: bytes) -> dict[str, Any]:
    record = json.loads(line)
    if not isinstance(record, dict) or type(record.get("step")) is not int:
        raise ValueError("it is no object with a step")
    return record


def keep_until(path: Path, step: int) -> None:
    """Drop the lines after `step`: the run is about to do those steps again. A link is replaced
    by a file."""
    if not path.exists():
        remove_file(path)  # a link to nothing, that would be written through
    else:
        kept = [record for record in read_json_lines(path) if record["step"] <= step]
        lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in kept)
        write_file(path, "".join(lines))

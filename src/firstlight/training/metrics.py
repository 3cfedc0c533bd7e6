"""The lines that a run writes as it goes: metrics.jsonl, samples.jsonl and events.jsonl, and the
same for TensorBoard. One line a step, exact floats, never a step twice."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from firstlight.errors import CheckpointError, InputError
from firstlight.files.atomic import read_file, remove_file, storage_errors, write_file
from firstlight.files.disk import AppendedFile
from firstlight.training.tensorboard_log import TENSORBOARD_NAME, TensorBoardLog

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


def last_start(run_folder: Path) -> dict[str, Any]:
    """What was recorded when the run was last started or resumed; {} if nothing was.

    Raises:
        CheckpointError: a line in the middle of the file is damaged.
    """
    lines = read_json_lines(run_folder / STARTS_NAME)
    return lines[-1] if lines else {}


EVENTS_NAME = "events.jsonl"
STARTS_NAME = "starts.jsonl"


class RunLogs:
    """The logs of a run, open to be appended to. A context; closed at its end.

    Metrics and samples of a step are there together or not at all, as far as later resuming
    is concerned: what is there of steps after the checkpoint's is dropped.

    Args:
        folder: the run folder.
        last_step: the last step whose lines stay; 0 drops all.
        events: the lines of events.jsonl; a file that is there is replaced. Without any, there
            is no such file.
        tensorboard: write all of it into the folder's tensorboard/, too; else what is there stays.

    Raises:
        CheckpointError: a line in the middle of a file is damaged.
        StorageError: the disk refuses.
    """

    def __init__(
        self,
        folder: Path,
        last_step: int,
        events: Sequence[Mapping[str, Any]] = (),
        *,
        tensorboard: bool = False,
    ) -> None:
        self._folder = folder
        self._tensorboard = TensorBoardLog(folder / TENSORBOARD_NAME) if tensorboard else None
        self._open(last_step)
        self.write_events(events)

    def __enter__(self) -> RunLogs:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def write_step(
        self, record: Mapping[str, Any], samples: Iterable[Mapping[str, Any]] = ()
    ) -> None:
        """Append a step's metrics, and the texts written after it."""
        samples = list(samples)
        for sample in samples:
            self._samples.write(sample)
        self._metrics.write(record)
        if self._tensorboard is not None:
            self._tensorboard.write(record, samples)

    def write_events(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Make events.jsonl these lines."""
        path = self._folder / EVENTS_NAME
        if events:
            write_file(path, "".join(json.dumps(e, ensure_ascii=False) + "\n" for e in events))
        else:
            remove_file(path)

    def drop_after(self, step: int) -> None:
        """Forget the lines after a step: the run is about to do those steps again."""
        self._close()
        self._open(step)

    def sync(self) -> None:
        """Force all lines to the disk."""
        self._samples.sync()
        self._metrics.sync()

    def _open(self, last_step: int) -> None:
        for name in (METRICS_NAME, SAMPLES_NAME):
            if last_step:
                keep_until(self._folder / name, last_step)
            else:
                remove_file(self._folder / name)
        self._metrics = JsonLines(self._folder / METRICS_NAME)
        self._samples = JsonLines(self._folder / SAMPLES_NAME)
        if self._tensorboard is not None:
            lines = (read_json_lines(self._folder / name) for name in (METRICS_NAME, SAMPLES_NAME))
            self._tensorboard.begin(*lines)

    def _close(self) -> None:
        self._metrics.close()
        self._samples.close()
        if self._tensorboard is not None:
            self._tensorboard.close()


class SilentLogs:
    """Has the methods of `RunLogs`, and writes nothing: the main process does."""

    def __enter__(self) -> SilentLogs:
        return self

    def __exit__(self, *_: object) -> None: ...

    def write_step(
        self, record: Mapping[str, Any], samples: Iterable[Mapping[str, Any]] = ()
    ) -> None:
        """Nothing."""

    def write_events(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Nothing."""

    def drop_after(self, step: int) -> None:
        """Nothing."""

    def sync(self) -> None:
        """Nothing."""

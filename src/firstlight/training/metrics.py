"""Each step's figures: the lines of metrics.jsonl, samples.jsonl and events.jsonl, the same for
TensorBoard, and the progress on stderr. One line a step, exact floats, never a step twice."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.progress import TextColumn

from firstlight.console import progress_bar, rounded, say
from firstlight.files.atomic import remove_file, storage_errors, write_file
from firstlight.files.disk import AppendedFile
from firstlight.report.records import (
    EVENTS_NAME,
    METRICS_NAME,
    MOSTLY_LEARNED,
    SAMPLES_NAME,
    read_json_lines,
)
from firstlight.training.tensorboard_log import TENSORBOARD_NAME, TensorBoardLog


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


def keep_until(path: Path, step: int) -> None:
    """Drop the lines after `step`: the run is about to do those steps again. A link is replaced
    by a file."""
    if not path.exists():
        remove_file(path)  # a link to nothing, that would be written through
    else:
        kept = [record for record in read_json_lines(path) if record["step"] <= step]
        lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in kept)
        write_file(path, "".join(lines))


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


_SECONDS_BETWEEN_LINES = 15.0


class TrainingProgress:
    """Shows steps, loss, tokens/s, memory and the time left: a live bar on a terminal, a
    line now and then in a log.

    Args:
        max_steps: steps of the whole run.
        start_step: the step that the bar begins at.
        shown: False shows nothing at all.
    """

    def __init__(self, max_steps: int, start_step: int, *, shown: bool) -> None:
        self._shown, self._max_steps, self._done = shown, max_steps, 0
        self._bar = progress_bar(TextColumn("{task.fields[figures]}"), shown=shown)
        self._task = self._bar.add_task(
            "training", total=max_steps, completed=start_step, figures=""
        )
        self._last_line = self._begun = time.monotonic()

    def __enter__(self) -> TrainingProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._bar.stop()

    def step(self, record: Mapping[str, Any]) -> None:
        """Show a step's figures."""
        self._done += 1
        loss = record["train/loss"]
        figures = (
            f"step {record['step']}/{self._max_steps}  "
            f"loss {'overflow' if loss is None else format(loss, '.3f')}  "
            f"{'(skipped)  ' if record.get('skipped') else ''}"
            f"{_rates(record)}  "
            f"{record['memory_bytes'] / 2**30:.2f} GiB"
        )
        self._bar.update(self._task, completed=record["step"], figures=figures)
        now = time.monotonic()
        is_last = record["step"] == self._max_steps
        due = now - self._last_line >= _SECONDS_BETWEEN_LINES or is_last
        if self._shown and self._bar.disable and due:
            self._last_line = now
            left = (now - self._begun) / self._done * (self._max_steps - record["step"])
            say(f"{figures}  {left:.0f} s left")

    def message(self, text: str) -> None:
        """Print a line above the bar."""
        if not self._shown:
            return
        if self._bar.disable:
            say(text)
        else:
            self._bar.console.print(text, markup=False)


def _rates(record: Mapping[str, Any]) -> str:
    """Tokens and sequences a second; with conversations also the tokens of them that are learned.
    The metrics of an older release have less."""
    tokens = record["tokens_per_second"]
    learned, samples = (record.get(f"{n}_per_second") for n in ("learned_tokens", "samples"))
    text = f"{tokens:,.0f} tokens/s"
    if learned is not None and learned < MOSTLY_LEARNED * tokens:
        text += f" ({learned:,.0f} learned)"
    return text if samples is None else f"{text}  {rounded(samples)} samples/s"

"""Each step's figures: the lines of metrics.jsonl, samples.jsonl and events.jsonl, the same for
TensorBoard. One line a step, exact floats, never a step twice."""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from firstlight.checkpoint.manifest import RUN_NAME
from firstlight.files.atomic import remove_file, set_aside, storage_errors, write_file
from firstlight.files.disk import AppendedFile
from firstlight.report.length import LENGTH_NAME
from firstlight.report.records import (
    EVENTS_NAME,
    METRICS_NAME,
    RECIPE_NAME,
    SAMPLES_NAME,
    STARTS_NAME,
    read_json_lines,
    sound_json_lines,
)
from firstlight.report.report import HTML_NAME, REPORT_NAME
from firstlight.training.forecast import FORECAST_NAME
from firstlight.training.tensorboard_log import TENSORBOARD_NAME, TensorBoardLog

#: Files that a run writes into its folder beside its checkpoints, and can do without.
_DERIVED = (
    *(METRICS_NAME, SAMPLES_NAME, EVENTS_NAME, STARTS_NAME, RECIPE_NAME, RUN_NAME),
    *(LENGTH_NAME, FORECAST_NAME, REPORT_NAME, HTML_NAME),
)


def clear_file_names(folder: Path) -> Iterator[str]:
    """Rename folders, pipes and devices of a run folder that have the name of a file which a run
    writes there.

    Yields:
        a warning for each.

    Raises:
        StorageError: the disk refuses.
    """
    for path in (folder / name for name in _DERIVED):
        # Renamed and not deleted: it is somebody's.
        if path.exists() and not path.is_file():
            yield f"warning: {path} was not a file, and was renamed to {set_aside(path)}"


class JsonLines:
    """A file of JSON objects, one in each line, that a run appends to.

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
        with storage_errors(self._path):
            self._file.append(json_line(record).encode())

    def sync(self) -> None:
        """Force the lines to the disk."""
        with storage_errors(self._path):
            self._file.sync()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def json_line(record: Mapping[str, Any]) -> str:
    """A line of a log; escaped where it holds half of a surrogate pair, which UTF-8 has no bytes
    for."""
    line = json.dumps(record, ensure_ascii=False) + "\n"
    try:
        line.encode()
    except UnicodeEncodeError:
        return json.dumps(record) + "\n"
    return line


def keep_until(path: Path, step: int, *, samples: bool = False) -> tuple[list[int], str | None]:
    """Drop the lines after `step`, since the run is about to do those steps again, and damaged
    ones: the reports read what stays. A damaged file, or a path that is not a file, is kept under
    another name. A link is replaced by a file.

    Args:
        samples: it is samples.jsonl, whose lines hold texts, several of one step; else a step has
            one line.

    Returns:
        (steps of the lines that stay; the problem of the file and its new name, None without a
        problem).

    Raises:
        StorageError: the disk refuses.
    """
    if not path.exists():
        remove_file(path)  # a link to nothing, that would be written through
        return [], None
    records, problem = sound_json_lines(path)
    there = [record for record in records if record["step"] <= step]
    sound = [record for record in there if record["step"] >= 0]
    if samples:
        texts = ("prompt", "text")
        sound = [one for one in sound if all(isinstance(one.get(key), str) for key in texts)]
    kept = [sound[place] for place in _rising([one["step"] for one in sound], several=samples)]
    if len(kept) < len(there):
        problem = problem or f"{path} is damaged: a line has no texts, or a step out of order"
    if problem is not None:
        problem += f"; the old file is now {set_aside(path)}"
    write_file(path, "".join(map(json_line, kept)))
    return [record["step"] for record in kept], problem


def _rising(steps: Sequence[int], *, several: bool) -> list[int]:
    """Places of a longest rising subsequence (patience sorting): a wrong step, too large or too
    small, is left out alone.

    Args:
        several: a step may stand there several times.
    """
    find = bisect_right if several else bisect_left
    # For each length, the subsequence with the least last step: that step and its place.
    ends: list[int] = []
    places: list[int] = []
    before: list[int] = []
    for place, step in enumerate(steps):
        # In the list of least last steps, which rises, the longest that this step can follow.
        length = find(ends, step)
        before.append(places[length - 1] if length else -1)
        # If a step has two lines, the first one stays: others were added to the file.
        if ends[length : length + 1] != [step]:
            ends[length : length + 1] = [step]
            places[length : length + 1] = [place]
    chosen, place = [], places[-1] if places else -1
    while place >= 0:
        chosen.append(place)
        place = before[place]
    return chosen[::-1]


def missing_steps(steps: Iterable[int], first: int, last: int) -> str:
    """The steps from `first` to `last` that have no line, such as "3, 7 to 9"; "" if all have."""
    gaps, expected = [], first
    for step in (*sorted(steps), last + 1):
        if step > expected:
            gaps.append(f"{expected}" if step == expected + 1 else f"{expected} to {step - 1}")
        expected = max(expected, step + 1)
    return ", ".join(gaps)


class RunLogs:
    """The logs of a run, open to be appended to. A context; closed at its end.

    Metrics and samples of a step are there together or not at all, for later resuming: lines of
    steps after the checkpoint's step are dropped.

    Args:
        folder: the run folder.
        last_step: the last step whose lines stay; -1 drops all.
        events: the lines of events.jsonl; a file that is there is replaced. Without any, there
            is no such file.
        is_branch: the run branches off another one after `last_step`, and has no lines yet.
        tensorboard: write all metrics into the folder's tensorboard/, too; otherwise that folder is
            left as it is.
        tell: called with a message for each file in which lines are damaged or missing: logs are
            derived, and never keep a run from going on.

    Raises:
        StorageError: the disk refuses.
    """

    def __init__(
        self,
        folder: Path,
        last_step: int,
        events: Sequence[Mapping[str, Any]] = (),
        *,
        is_branch: bool = False,
        tensorboard: bool = False,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._folder, self._is_branch, self._tell = folder, is_branch, tell
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
            # Texts first: a step whose metrics are there is complete.
            self._samples.write(sample)
        self._metrics.write(record)
        if self._tensorboard is not None:
            self._tensorboard.write(record, samples)

    def write_events(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Make events.jsonl these lines."""
        path = self._folder / EVENTS_NAME
        if events:
            write_file(path, "".join(map(json_line, events)))
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
            if last_step >= 0:
                path, samples = self._folder / name, name == SAMPLES_NAME
                steps, problem = keep_until(path, last_step, samples=samples)
                self._say_damage(name, steps, problem, last_step)
            else:
                remove_file(self._folder / name)
        self._metrics = JsonLines(self._folder / METRICS_NAME)
        self._samples = JsonLines(self._folder / SAMPLES_NAME)
        if self._tensorboard is not None:
            # Rewritten from the logs that stay, so that it has no step twice.
            lines = (read_json_lines(self._folder / name) for name in (METRICS_NAME, SAMPLES_NAME))
            self._tensorboard.begin(*lines)

    def _say_damage(
        self, name: str, steps: Sequence[int], problem: str | None, last_step: int
    ) -> None:
        if problem is not None:
            self._tell(f"warning: {problem}; the run goes on without the damaged lines")
        if name != METRICS_NAME:
            return
        # A run that branched off another one, or continues its schedule, begins at a later step.
        starts, _ = sound_json_lines(self._folder / STARTS_NAME)
        begins = starts[0]["step"] if starts else last_step if self._is_branch else 0
        first = begins + 1 if starts or not steps else min(steps)
        if gaps := missing_steps(steps, first, last_step):
            self._tell(
                f"warning: {self._folder / name} has no lines of steps {gaps}: weights and later "
                "steps are not affected, reports lack them"
            )

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

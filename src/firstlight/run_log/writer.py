"""Write the logs of a run: metrics.jsonl, samples.jsonl and events.jsonl.

metrics.jsonl has exactly one line per step. Floats are written with enough digits to be read back
exactly.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from firstlight.checkpoint.manifest import RUN_NAME
from firstlight.files.atomic import remove_file, set_aside, storage_errors, write_file
from firstlight.files.disk import AppendedFile
from firstlight.run_log.names import (
    EVENTS_NAME,
    FORECAST_NAME,
    HTML_NAME,
    LENGTH_NAME,
    METRICS_NAME,
    RECIPE_NAME,
    REPORT_NAME,
    SAMPLES_NAME,
    STARTS_NAME,
)
from firstlight.run_log.reader import sound_json_lines

#: Names of the files, other than checkpoints, that a run writes to its folder. A run can be resumed
#: without these files.
_DERIVED = (
    METRICS_NAME,
    SAMPLES_NAME,
    EVENTS_NAME,
    STARTS_NAME,
    RECIPE_NAME,
    RUN_NAME,
    LENGTH_NAME,
    FORECAST_NAME,
    REPORT_NAME,
    HTML_NAME,
)


def clear_file_names(folder: Path) -> Iterator[str]:
    """Rename folders, pipes and devices in a run folder if they have names that the run needs for
    its own files.

    Yields:
        A warning for each renamed path.

    Raises:
        StorageError: a file system error.
    """
    for path in (folder / name for name in _DERIVED):
        # Rename the path instead of deleting it, because it was not created by the run.
        if path.exists() and not path.is_file():
            yield f"warning: {path} was not a file, and was renamed to {set_aside(path)}"


class JsonLines:
    """A file with one JSON object per line, to which a run appends.

    Floats can be read back exactly. If only a part of a line could be written, this part is
    removed, so the file always consists of complete lines.

    Args:
        path: the file, which is created if it does not exist.

    Raises:
        StorageError: the file can't be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with storage_errors(path):
            self._file = AppendedFile(path)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one object.

        Raises:
            StorageError: the disk is full or not writable; the file is unchanged.
        """
        with storage_errors(self._path):
            self._file.append(json_line(record).encode())

    def sync(self) -> None:
        """Sync all appended lines to the disk."""
        with storage_errors(self._path):
            self._file.sync()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def json_line(record: Mapping[str, Any]) -> str:
    """Return a line of a log as a string that can be encoded as UTF-8. If the record contains a
    lone surrogate, which UTF-8 can't represent, all non-ASCII characters are escaped.
    """
    line = json.dumps(record, ensure_ascii=False) + "\n"
    try:
        line.encode()
    except UnicodeEncodeError:
        return json.dumps(record) + "\n"
    return line


def keep_until(path: Path, step: int, *, samples: bool = False) -> tuple[list[int], str | None]:
    """Remove damaged lines from a log. Also remove all lines for later steps than `step`, because
    the run will write them again.

    If the file is damaged, or the path is not a file, it is kept under a different name. A symbolic
    link is replaced with a file.

    Args:
        path: the log.
        step: the last step whose lines are kept.
        samples: True for samples.jsonl, where lines contain sample texts and a step can have
            several lines; False for a log with one line per step.

    Returns: The steps of the lines that were kept, and a message about the damage, or None if the
    file is not damaged. The message includes the new name of the damaged file.

    Raises:
        StorageError: a file system error.
    """
    if not path.exists():
        # Remove a broken symbolic link, so that the log is not written to its target.
        remove_file(path)
        return [], None
    records, problem = sound_json_lines(path)
    there = [record for record in records if record["step"] <= step]
    sound = [record for record in there if record["step"] >= 0]
    if samples:
        texts = ("prompt", "text")
        sound = [one for one in sound if all(isinstance(one.get(key), str) for key in texts)]
    kept = [sound[place] for place in _rising([one["step"] for one in sound], several=samples)]
    if len(kept) < len(there):
        problem = problem or f"{path} is damaged: a line has no texts, or its step is out of order"
    if problem is not None:
        problem += f"; the old file is now {set_aside(path)}"
    write_file(path, "".join(map(json_line, kept)))
    return [record["step"] for record in kept], problem


def _rising(steps: Sequence[int], *, several: bool) -> list[int]:
    """Return the indices of the lines in a longest subsequence with increasing steps, found by
    patience sorting. This omits a line whose step is wrong because of damage, and keeps the correct
    lines around it.

    Args:
        steps: steps of the lines, in file order.
        several: True if a step can occur several times.
    """
    find = bisect_right if several else bisect_left
    # Among all increasing subsequences of a given length, keep the one with the lowest last step.
    # For each length, `ends` contains this last step, and `places` contains its index. For each
    # step, `before` contains the index of the preceding step in its subsequence.
    ends: list[int] = []
    places: list[int] = []
    before: list[int] = []
    for place, step in enumerate(steps):
        # Find the longest subsequence to which this step can be appended. `ends` is sorted, so
        # bisection finds it.
        length = find(ends, step)
        before.append(places[length - 1] if length else -1)
        # If a step has two lines, keep the first line, because the second line was added to the
        # file later.
        if ends[length : length + 1] != [step]:
            ends[length : length + 1] = [step]
            places[length : length + 1] = [place]
    chosen, place = [], places[-1] if places else -1
    while place >= 0:
        chosen.append(place)
        place = before[place]
    return chosen[::-1]


def missing_steps(steps: Iterable[int], first: int, last: int) -> str:
    """Return the steps from `first` to `last` that do not have a line, as a string such as "3, 7 to
    9", or "" if there are none.
    """
    gaps, expected = [], first
    for step in (*sorted(steps), last + 1):
        if step > expected:
            gaps.append(f"{expected}" if step == expected + 1 else f"{expected} to {step - 1}")
        expected = max(expected, step + 1)
    return ", ".join(gaps)


class RunLogs:
    """The logs of a run, open for appending. Used as a context manager, it closes the logs on exit.

    When a run is resumed, all lines for steps after the checkpoint are dropped. The logs therefore
    contain either both the metrics and the samples of a step, or neither.

    Args:
        folder: the run folder.
        last_step: the last step whose lines are kept; -1 drops all lines.
        events: lines with which to replace the content of events.jsonl. If there are none, the file
            is removed.
        is_branch: True if the run branches off from another run after `last_step`. The logs of such
            a run are empty at first.
        tell: function that is called with a message about each file with damaged or missing lines.
            The run can continue despite such lines.

    Raises:
        StorageError: a file system error.
    """

    def __init__(
        self,
        folder: Path,
        last_step: int,
        events: Sequence[Mapping[str, Any]] = (),
        *,
        is_branch: bool = False,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._folder = folder
        self._is_branch = is_branch
        self._tell = tell
        self._open(last_step)
        self.write_events(events)

    def __enter__(self) -> RunLogs:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def write_step(
        self, record: Mapping[str, Any], samples: Iterable[Mapping[str, Any]] = ()
    ) -> None:
        """Append the metrics of a step, and the sample texts that were generated after it."""
        for sample in samples:
            # Write the samples first, so that a step with metrics is always complete.
            self._samples.write(sample)
        self._metrics.write(record)

    def write_events(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Replace the content of events.jsonl with the given lines. If there are none, remove the
        file.
        """
        path = self._folder / EVENTS_NAME
        if events:
            write_file(path, "".join(map(json_line, events)))
        else:
            remove_file(path)

    def drop_after(self, step: int) -> None:
        """Drop all lines after a step, because the run will repeat the steps that follow it."""
        self._close()
        self._open(step)

    def sync(self) -> None:
        """Sync all lines to the disk."""
        self._samples.sync()
        self._metrics.sync()

    def _open(self, last_step: int) -> None:
        """Open the logs, and drop all lines after a step. With -1, drop all lines."""
        for name in (METRICS_NAME, SAMPLES_NAME):
            if last_step >= 0:
                path, samples = self._folder / name, name == SAMPLES_NAME
                steps, problem = keep_until(path, last_step, samples=samples)
                self._say_damage(name, steps, problem, last_step)
            else:
                remove_file(self._folder / name)
        self._metrics = JsonLines(self._folder / METRICS_NAME)
        self._samples = JsonLines(self._folder / SAMPLES_NAME)

    def _say_damage(
        self, name: str, steps: Sequence[int], problem: str | None, last_step: int
    ) -> None:
        """Report damaged lines and steps that do not have metrics."""
        if problem is not None:
            self._tell(f"warning: {problem}; the run continues without the damaged lines")
        if name != METRICS_NAME:
            return
        # If a run branches off from another run or continues another run's schedule, its logs do
        # not contain the steps before its own start.
        starts, _ = sound_json_lines(self._folder / STARTS_NAME)
        begins = starts[0]["step"] if starts else last_step if self._is_branch else 0
        first = begins + 1 if starts or not steps else min(steps)
        if gaps := missing_steps(steps, first, last_step):
            self._tell(
                f"warning: {self._folder / name} has no lines for steps {gaps}: weights and "
                "later steps are not affected, but reports do not show these steps"
            )

    def _close(self) -> None:
        self._metrics.close()
        self._samples.close()


class SilentLogs:
    """Replacement for `RunLogs` in all processes except the main one. Its methods do nothing."""

    def __enter__(self) -> SilentLogs:
        return self

    def __exit__(self, *_: object) -> None: ...

    def write_step(
        self, record: Mapping[str, Any], samples: Iterable[Mapping[str, Any]] = ()
    ) -> None:
        """Do nothing."""

    def write_events(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Do nothing."""

    def drop_after(self, step: int) -> None:
        """Do nothing."""

    def sync(self) -> None:
        """Do nothing."""

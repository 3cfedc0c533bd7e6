"""Read the files in a run folder, even while the run is active.

The functions read complete files, or return metrics as curves. `LineFollower` and `StepFollower`
read lines while another process writes them.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic_core import from_json

from firstlight.errors import CheckpointError, InputError, nearest
from firstlight.files.atomic import read_file, read_json_object
from firstlight.recipe.load import MAX_RECIPE_BYTES, parse_yaml
from firstlight.run_log.names import (
    EVENTS_NAME,
    LENGTH_NAME,
    METRICS_NAME,
    RECIPE_NAME,
    SAMPLES_NAME,
    STARTS_NAME,
)

Floats = npt.NDArray[np.float64]
Axis = Literal["step", "tokens", "hours"]

#: Maximum size of a log file in bytes, which is enough for about ten million steps.
MAX_LOG_BYTES = 1 << 32
#: Number of lines that are parsed before they are converted to arrays. The parsed lines take only a
#: few MB of memory.
_LINES = 4096
#: Maximum absolute value of a metric. Calculations with larger values could overflow.
_GREATEST = 1e100
#: Maximum step. A float can represent every integer up to this number.
MAX_STEP = 2**53


@dataclass(frozen=True)
class Series:
    """Points of a curve, in the order in which the run logged them.

    Attributes:
        x, y: coordinates of the points, each of shape [N]. All values are finite.
    """

    x: Floats
    y: Floats

    def __len__(self) -> int:
        return len(self.x)


@dataclass(frozen=True)
class Metrics:
    """The numbers in metrics.jsonl, stored by column.

    Attributes:
        steps: step number of each of the N lines in increasing order, as an array of shape [N].
        columns: for each metric, a pair of arrays of shape [M]. The first array contains the
            zero-based indices of the lines that have a number for the metric, and the second array
            contains these numbers. Values other than finite numbers, such as null or strings, are
            omitted.
    """

    steps: Floats
    columns: Mapping[str, tuple[npt.NDArray[np.intp], Floats]]

    def values(self, key: str) -> Floats:
        """Return all numbers that were logged for a metric, as an array of shape [M]. The array is
        empty if there are none.
        """
        return self.columns[key][1] if key in self.columns else np.empty(0)

    def last(self, key: str) -> float | None:
        """Return the last number that was logged for a metric, or None if there is none."""
        found = self.values(key)
        return float(found[-1]) if len(found) else None

    def series(self, key: str, axis: Axis = "step") -> Series:
        """Return the curve of a metric.

        Args:
            key: key of the metric.
            axis: quantity on the x axis, which is "step", "tokens" (the number of tokens seen) or
                "hours" (the hours of training).
        """
        if key not in self.columns:
            return Series(np.empty(0), np.empty(0))
        lines, values = self.columns[key]
        x = self._axis(axis)[lines]
        known = np.isfinite(x)
        return Series(x[known], values[known])

    def _axis(self, axis: Axis) -> Floats:
        if axis == "tokens":
            return self._filled("tokens_seen", math.nan)
        return self.steps if axis == "step" else self.hours

    @property
    def hours(self) -> Floats:
        """Hours of training up to each line, as an array of shape [N]. They include the time for
        the steps and the time spent waiting for saves.
        """
        seconds = self._filled("seconds", 0.0) + self._filled("save_stall_seconds", 0.0)
        return np.cumsum(seconds) / 3600

    def _filled(self, key: str, missing: float) -> Floats:
        result = np.full(len(self.steps), missing)
        if key in self.columns:
            lines, values = self.columns[key]
            result[lines] = values
        return result


def read_metrics(path: Path) -> Metrics:
    """Read metrics.jsonl. A missing file is treated as empty. An incomplete last line, left by a
    killed process, is omitted.

    Raises:
        CheckpointError: the file can't be read, a line other than the last one is damaged, or steps
            do not increase.
    """
    steps = [np.empty(0)]
    pieces: dict[str, list[tuple[npt.NDArray[np.intp], Floats]]] = {}
    lines, count = _sound_lines(path), 0
    while records := list(itertools.islice(lines, _LINES)):
        steps.append(np.array([record["step"] for record in records], dtype=np.float64))
        _gather(records, count, pieces)
        count += len(records)
    columns = {
        key: (np.concatenate([a for a, _ in found]), np.concatenate([b for _, b in found]))
        for key, found in pieces.items()
    }
    metrics = Metrics(np.concatenate(steps), columns)
    falling = np.flatnonzero(np.diff(metrics.steps) <= 0)
    if len(falling):
        line = int(falling[0])
        before, after = metrics.steps[line : line + 2]
        raise CheckpointError(
            f"{path}:{line + 2} is damaged: step {after:.0f} comes after step {before:.0f}"
        )
    return metrics


def _gather(
    records: Sequence[Mapping[str, Any]],
    first: int,
    pieces: dict[str, list[tuple[npt.NDArray[np.intp], Floats]]],
) -> None:
    """Append the numbers in several lines to the columns.

    Args:
        records: parsed lines.
        first: index of the first line in the file.
        pieces: for each metric, a list of arrays that together form its column. The lists are
            extended in place.
    """
    keys = set().union(*records) - {"step"}
    for key in sorted(keys):
        values = [record.get(key) for record in records]
        try:
            # numpy converts None to NaN here.
            numbers = np.array(values, dtype=np.float64)
        except (ValueError, TypeError, OverflowError):
            numbers = np.array([_number(value) for value in values])
        lines = np.flatnonzero(np.abs(numbers) <= _GREATEST)
        if len(lines):
            pieces.setdefault(key, []).append((lines + first, numbers[lines]))


def _number(value: object) -> float:
    try:
        return float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return math.nan


def smoothed(series: Series) -> Series:
    """Return the exponential moving average of a curve. The half-life is 2 % of the number of
    points. The initial bias of the average is corrected as in Adam (Kingma and Ba 2015, section 3).
    """
    decay = 0.5 ** (1 / max(len(series) / 50, 1))
    average = 0.0
    weight = 0.0
    result = []
    for value in series.y.tolist():
        average = decay * average + (1 - decay) * value
        weight = decay * weight + (1 - decay)
        result.append(average / weight)
    return Series(series.x, np.array(result, dtype=np.float64))


def thin(series: Series, buckets: int = 800) -> Series:
    """Reduce a curve to at most 2 x `buckets` + 2 points. If a bucket is about one pixel wide, the
    reduced curve looks the same.

    The points are divided into buckets with equal numbers of points. The lowest and highest points
    of each bucket and the first and last points of the curve are kept. A curve that already has at
    most 2 x `buckets` + 2 points is returned unchanged.
    """
    count = len(series)
    if count <= 2 * buckets + 2:
        return series
    edges = np.arange(buckets + 1) * count // buckets
    kept = {0, count - 1}
    for start, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        part = series.y[start:end]
        kept |= {start + int(part.argmin()), start + int(part.argmax())}
    chosen = np.array(sorted(kept))
    return Series(series.x[chosen], series.y[chosen])


#: Maximum size of a resolved recipe as a multiple of `MAX_RECIPE_BYTES`. It is larger than the
#: recipe that the user wrote because it contains all keys.
_RESOLVED = 8


@dataclass(frozen=True)
class RunRecord:
    """Contents of the files in a run folder.

    Attributes:
        folder: the run folder.
        metrics: numbers in metrics.jsonl.
        samples: lines of samples.jsonl.
        events: lines of events.jsonl.
        starts: lines of starts.jsonl.
        length: content of length.json; empty for a run without a time budget.
        recipe: the resolved recipe; empty if the file is missing.
        recipe_text: text of recipe.yaml, or "" if the file is missing.
    """

    folder: Path
    metrics: Metrics
    samples: Sequence[Mapping[str, Any]]
    events: Sequence[Mapping[str, Any]]
    starts: Sequence[Mapping[str, Any]]
    length: Mapping[str, Any]
    recipe: Mapping[str, Any]
    recipe_text: str

    @property
    def name(self) -> str:
        """Name of the run folder."""
        return self.folder.resolve().name

    @property
    def start(self) -> Mapping[str, Any]:
        """Object on the last line of starts.jsonl, or {} if there is none."""
        return self.starts[-1] if self.starts else {}

    @property
    def last_step(self) -> int:
        """Last logged step, or 0 if no step has been logged."""
        return int(self.metrics.steps[-1]) if len(self.metrics.steps) else 0

    @property
    def max_steps(self) -> int | None:
        """Planned number of steps of the run, or None if unknown. For a run that
        `evaluation.patience` ended, the number of steps that it has."""
        if any(e["event"] == "early stop" and e["step"] == self.last_step for e in self.events):
            return self.last_step
        return _max_steps(self.recipe, self.length, self.start)

    @property
    def what_happened(self) -> list[Mapping[str, Any]]:
        """Events of the run that a report shows, sorted by step. They include resumptions and the
        decision about the number of steps. Events that lack a value required to describe them are
        omitted (see `left_out`).
        """
        found = [event for event in self._happened if _lacking(event) is None]
        return sorted(found, key=lambda event: event["step"])

    @property
    def left_out(self) -> list[str]:
        """Messages about the events that are omitted from reports because they lack a value
        required to describe them.
        """
        return [
            f"{self.folder}: {event['event']!r} at step {event['step']:,} is left out: its record "
            f"has no {key}"
            for event in self._happened
            if (key := _lacking(event)) is not None
        ]

    @property
    def _happened(self) -> list[Mapping[str, Any]]:
        starts = (start for start in self.starts if start["step"] > 0)
        resumed = (
            {**s, "event": "branched" if "branched_from" in s else "resumed"} for s in starts
        )
        return [*self.events, *resumed, *decisions(self.length)]


#: Names and types of the values that are required to describe an event in a report, keyed by event
#: name.
_DESCRIBED_BY: Mapping[str, Mapping[str, tuple[type, ...]]] = {
    "rollback": {"to_step": (int,), "reason": (str,)},
    "out of memory": {"micro_batch_rows": (int,), "before": (int,)},
    "diverged": {"reason": (str,)},
    "resumed": {"time": (str,)},
    "branched": {"branched_from": (str,), "time": (str,)},
    "length": {"max_steps": (int,), "max_minutes": (int, float)},
    "correction": {"max_steps": (int,), "before": (int,)},
    "replay": {"share": (int, float)},
    "early stop": {"evaluations": (int,)},
}


def _lacking(event: Mapping[str, Any]) -> str | None:
    """Return the name of the first missing value that is required to describe an event, or None if
    all required values are present.
    """
    kinds = _DESCRIBED_BY.get(event["event"], {})
    return next((key for key, kind in kinds.items() if type(event.get(key)) not in kind), None)


def _max_steps(
    recipe: Mapping[str, Any], length: Mapping[str, Any], start: Mapping[str, Any]
) -> int | None:
    schedule = recipe.get("schedule")
    found = schedule.get("max_steps") if isinstance(schedule, dict) else None
    found = length.get("max_steps", start.get("max_steps", found))
    return found if type(found) is int and found >= 0 else None


def planned_length(folder: Path) -> tuple[int | None, float | None, int | None]:
    """Return three numbers without reading the metrics: the planned steps, the planned minutes, and
    the step limit of a run with a time budget. Numbers that are unknown or do not apply to the run
    are None.

    Raises:
        CheckpointError: a file of the run folder is damaged.
    """
    recipe, length = _read_recipe(folder / RECIPE_NAME)[0], read_length(folder)
    steps = _max_steps(recipe, length, last_start(folder))
    limit = length.get("max_steps", length.get("most_steps"))
    return steps or length.get("predicted_steps"), length.get("max_minutes"), limit


def read_run(folder: Path) -> RunRecord:
    """Read a run folder. Missing files are treated as empty, because the run may not have written
    them yet.

    Raises:
        CheckpointError: a file of the run folder is damaged.
    """
    recipe, text = _read_recipe(folder / RECIPE_NAME)
    return RunRecord(
        folder,
        read_metrics(folder / METRICS_NAME),
        _read_lines(folder / SAMPLES_NAME, "prompt", "text"),
        _read_lines(folder / EVENTS_NAME, "event"),
        _read_lines(folder / STARTS_NAME),
        read_length(folder),
        recipe,
        text,
    )


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Return all objects in a JSON Lines file, or [] if the file is missing. An incomplete last
    line, left by a killed process, is omitted.

    Raises:
        CheckpointError: the file can't be read, or a line other than the last one is damaged.
    """
    return list(_sound_lines(path))


def sound_json_lines(path: Path) -> tuple[list[dict[str, Any]], str | None]:
    """Return the objects on all readable lines of a JSON Lines file, and a message about the first
    problem, or None if there was no problem.

    A problem is an unreadable file or a damaged line. An incomplete last line, left by a killed
    process, is ignored.
    """
    lines = list(_lines(path))
    problem = next((str(line) for line in lines if isinstance(line, CheckpointError)), None)
    return [line for line in lines if not isinstance(line, CheckpointError)], problem


def _sound_lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in _lines(path):
        if isinstance(line, CheckpointError):
            raise line
        yield line


def _lines(path: Path) -> Iterator[dict[str, Any] | CheckpointError]:
    """Yield each line of a log as an object, or as an error if the line is damaged. If the file
    can't be read, yield a single error. A missing file is treated as empty, and an incomplete last
    line is omitted.
    """
    if not path.exists():
        return
    try:
        content = read_file(path, MAX_LOG_BYTES)
    except InputError as error:
        yield CheckpointError(str(error))
        return
    file = io.BytesIO(content)
    for number, line in enumerate(file, start=1):
        try:
            yield _record(line)
        except (ValueError, RecursionError) as error:
            if file.tell() < len(content):
                yield CheckpointError(f"{path}:{number} is damaged: {error}")


def _record(line: bytes) -> dict[str, Any]:
    try:
        record = from_json(line)
    except ValueError:
        # `json.loads` is slower than `from_json`, but it can read everything that `json.dumps` can
        # write, including lone surrogates.
        record = json.loads(line.decode("utf-8-sig"))
    step = record.get("step") if isinstance(record, dict) else None
    if type(step) is not int or abs(step) > MAX_STEP:
        raise ValueError(f"it is not an object with a step up to {MAX_STEP:,}")
    return record  # type: ignore[no-any-return]


def _read_lines(path: Path, *texts: str) -> list[dict[str, Any]]:
    lines = read_json_lines(path)
    for line in lines:
        if not all(isinstance(line.get(key), str) for key in texts):
            raise CheckpointError(f"{path} is damaged: a line has no {' and '.join(texts)}")
    return lines


def last_start(run_folder: Path) -> dict[str, Any]:
    """Return the object that describes the last time a run was started or resumed, or {} if there
    is none.

    Raises:
        CheckpointError: see `read_json_lines`.
    """
    return (read_json_lines(run_folder / STARTS_NAME) or [{}])[-1]


def require_run(folder: Path) -> None:
    """Raise an error if a path is not a run folder.

    Raises:
        InputError: the path does not exist, is a file, or is a folder that does not contain a run.
    """
    if not folder.exists():
        siblings = [p.name for p in folder.parent.iterdir()] if folder.parent.is_dir() else []
        raise InputError(f"run folder {folder} does not exist{nearest(folder.name, siblings)}")
    if not folder.is_dir():
        raise InputError(f"{folder} is a file: specify the run folder that contains it")
    if any((folder / name).exists() for name in (METRICS_NAME, RECIPE_NAME)):
        return
    run = folder.resolve().parent.parent
    if (run / METRICS_NAME).exists():
        raise InputError(f"{folder} is a checkpoint: use its run folder, {run}")
    hint = "use one written by `firstlight train`"
    raise InputError(
        f"{folder} is not a run folder, because it does not contain {METRICS_NAME}: {hint}"
    )


def _read_recipe(path: Path) -> tuple[Mapping[str, Any], str]:
    """Return the parsed values of recipe.yaml and the text of the file, or ({}, "") if the file is
    missing.
    """
    if not path.exists():
        return {}, ""
    try:
        content = read_file(path, _RESOLVED * MAX_RECIPE_BYTES)
        values = parse_yaml(content)
    except InputError as error:
        raise CheckpointError(str(error)) from error
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} is damaged: it has no sections")
    return values, content.decode("utf-8")


# Functions for runs with a time budget.

#: Maximum number that length.json can contain. A float can represent every integer up to this
#: number.
_MOST_STEPS = 2**53

#: Keys of length.json, with the accepted types and the minimum value of each key.
_LENGTH_KEYS: Sequence[tuple[str, tuple[type, ...], int]] = (
    ("max_minutes", (int, float), 0),
    ("predicted_steps", (int,), 1),
    ("seconds_used", (int, float), 0),
    ("most_steps", (int,), 1),
    ("max_steps", (int,), 1),
    ("decided_at", (int,), 0),
)


def read_length(run_folder: Path) -> dict[str, Any]:
    """Return the content of length.json for a run with a time budget, or {} for other runs.

    Returns:
        An object that contains some of these keys:

        - "max_minutes": the time budget in minutes.
        - "predicted_steps": the number of steps predicted when the run started.
        - "most_steps": the maximum number of steps in the recipe, if there is one.
        - "seconds_used": the seconds of training so far.
        - "max_steps": the number of steps in the run, once it has been decided.
        - "decided_at": the number of completed steps when "max_steps" was decided.
        - "replaced": a list of the earlier values of "max_steps" if it was corrected later. Each
          entry is a pair of the earlier value and the number of completed steps when it was
          replaced.

    Raises:
        CheckpointError: the file is damaged.
    """
    path = run_folder / LENGTH_NAME
    if not path.exists():
        return {}
    record = read_json_object(path, CheckpointError, "is damaged: it is not an object")
    for key, kind, least in _LENGTH_KEYS:
        value = record.get(key, least)
        if type(value) not in kind or not least <= value <= _MOST_STEPS:
            raise CheckpointError(f"{path} is damaged: {key} is {value!r:.100}")
    if ("max_steps" in record) != ("decided_at" in record):
        raise CheckpointError(f"{path} is damaged: it has only one of max_steps and decided_at")
    if not _are_corrections(record.get("replaced", []), record.get("decided_at", _MOST_STEPS)):
        raise CheckpointError(f"{path} is damaged: replaced is {record['replaced']!r:.100}")
    return record


def _are_corrections(value: Any, decided_at: int) -> bool:
    """Return True if a value is a valid list for the key "replaced" of length.json. Its entries
    must be pairs of a number of steps and a number of completed steps, sorted by completed steps.
    """
    if type(value) is not list:
        return False
    last = decided_at
    for pair in value:
        if type(pair) is not list or [type(number) for number in pair] != [int, int]:
            return False
        if not last < pair[1] < pair[0] <= _MOST_STEPS:
            return False
        last = pair[1]
    return True


def decisions(length: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return an event for the decision about the number of steps and one for each later correction.
    Return [] if the number of steps has not been decided yet.

    Args:
        length: result of `read_length`.
    """
    if "max_steps" not in length:
        return []
    replaced = length.get("replaced", [])
    numbers = [*(number for number, _ in replaced), length["max_steps"]]
    events = [{**length, "step": length["decided_at"], "max_steps": numbers[0], "event": "length"}]
    for (before, step), number in zip(replaced, numbers[1:], strict=True):
        events.append({"step": step, "max_steps": number, "before": before, "event": "correction"})
    return events


# Growing logs


class LineFollower:
    """Reads a growing file with one JSON object per line. Each line is read exactly once, as soon
    as it is complete.

    A file that does not exist yet is treated as empty. If the file is replaced, for example because
    a resumed run rewrites its logs, the new file is read from its beginning.

    Args:
        path: path of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        # Keep the file open, so that its inode number can't be reused by a file that replaces it.
        self._file: FileIO | None = None
        self._rest = b""

    def new(self) -> tuple[list[dict[str, Any]], bool]:
        """Return the objects written since the last call, and whether the file was replaced.

        If the file was replaced, the result starts with the first line of the new file. Lines that
        are not JSON objects are omitted.
        """
        is_other = self._reopen()
        if self._file is None:
            return [], is_other
        *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        return [found for line in lines if (found := _object(line)) is not None], is_other

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _reopen(self) -> bool:
        """Open the file that is currently at the path. Return True if it has replaced the file that
        was previously open.
        """
        try:
            now = os.stat(self._path)
        except OSError:
            now = None
        if self._file is not None:
            held = os.fstat(self._file.fileno())
            same = now is not None and os.path.samestat(now, held)
            if same and held.st_size >= self._file.tell():
                return False
        was_open = self._file is not None
        self.close()
        self._rest = b""
        if now is not None:
            try:
                self._file = FileIO(self._path, "rb")
            except OSError:
                self._file = None
        return was_open


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


class StepFollower:
    """Reads the metrics and the sample texts of each step while a run writes them.

    Args:
        metrics, samples: paths of metrics.jsonl and samples.jsonl.
    """

    def __init__(self, metrics: Path, samples: Path) -> None:
        self._metrics, self._samples = LineFollower(metrics), LineFollower(samples)
        self._waiting: list[dict[str, Any]] = []

    def new(self) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
        """Return the metrics and the sample texts of each step that was written since the last
        call, as a list of pairs. Steps that a run repeats after a rollback or a resumption are
        returned again.
        """
        records, _ = self._metrics.new()
        # The samples of a step are written before its metrics, so they already exist.
        samples, is_other = self._samples.new()
        self._waiting = samples if is_other else self._waiting + samples
        steps = []
        for record in records:
            step = record.get("step")
            if type(step) is int:
                steps.append((record, [one for one in self._waiting if one.get("step") == step]))
        if steps:
            last = steps[-1][0]["step"]
            self._waiting = [one for one in self._waiting if one.get("step", 0) > last]
        return steps

    def close(self) -> None:
        """Close the files."""
        self._metrics.close()
        self._samples.close()

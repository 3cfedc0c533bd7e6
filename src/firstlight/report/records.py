"""A run folder, read for its report at any moment of the run: columns of metrics.jsonl as arrays,
thinned to what a picture can show, and the other files."""

from __future__ import annotations

import io
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic_core import from_json

from firstlight.errors import CheckpointError, InputError, nearest
from firstlight.files.atomic import read_file
from firstlight.recipe.load import MAX_RECIPE_BYTES, parse_yaml
from firstlight.report.length import decisions, read_length

#: With a smaller share of learned tokens, their rate is shown beside that of all. Of text all are
#: learned, but for the padding of an epoch's last row.
MOSTLY_LEARNED = 0.9

METRICS_NAME = "metrics.jsonl"
SAMPLES_NAME = "samples.jsonl"
EVENTS_NAME = "events.jsonl"
STARTS_NAME = "starts.jsonl"
RECIPE_NAME = "recipe.yaml"

Floats = npt.NDArray[np.float64]
Axis = Literal["step", "tokens", "hours"]

#: Ten million steps.
_MAX_BYTES = 1 << 32
#: Lines that are turned into arrays at once: their objects take some MB.
_LINES = 4096
#: Greater ones are no figures, and what is computed from them may be no floats.
_GREATEST = 1e100
#: Floats count up to here.
_MAX_STEP = 2**53


@dataclass(frozen=True)
class Series:
    """Points of a curve, in the order of the run.

    Attributes:
        x, y: (N,), finite.
    """

    x: Floats
    y: Floats

    def __len__(self) -> int:
        return len(self.x)


@dataclass(frozen=True)
class Metrics:
    """The numbers of metrics.jsonl, by column.

    Attributes:
        steps: step of each line, rising, `[N]`.
        columns: two arrays for each key: the line numbers (from 0) with a number, and the numbers.
            What is no finite number (null, true, a text) is left out.
    """

    steps: Floats
    columns: Mapping[str, tuple[npt.NDArray[np.intp], Floats]]

    def values(self, key: str) -> Floats:
        """All numbers of a key; none where it is missing."""
        return self.columns[key][1] if key in self.columns else np.empty(0)

    def last(self, key: str) -> float | None:
        """The last number of a key."""
        found = self.values(key)
        return float(found[-1]) if len(found) else None

    def series(self, key: str, axis: Axis = "step") -> Series:
        """A key's curve over steps, tokens seen, or hours of training."""
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
        """(N,), of training up to each line: its steps and what saving held them up."""
        seconds = self._filled("seconds", 0.0) + self._filled("save_stall_seconds", 0.0)
        return np.cumsum(seconds) / 3600

    def _filled(self, key: str, missing: float) -> Floats:
        result = np.full(len(self.steps), missing)
        if key in self.columns:
            lines, values = self.columns[key]
            result[lines] = values
        return result


def read_metrics(path: Path) -> Metrics:
    """The columns of metrics.jsonl; a last line that a kill cut short is left out, and a missing
    file is an empty one.

    Raises:
        CheckpointError: a line in the middle is damaged, or steps don't rise.
    """
    if not path.exists():
        return Metrics(np.empty(0), {})
    try:
        content = read_file(path, _MAX_BYTES)
    except InputError as error:
        raise CheckpointError(str(error)) from error
    steps: list[Floats] = []
    pieces: dict[str, list[tuple[npt.NDArray[np.intp], Floats]]] = {}
    file, count = io.BytesIO(content), 0
    while lines := list(itertools.islice(file, _LINES)):
        records = _records(path, count, lines, is_end=file.tell() == len(content))
        steps.append(np.array([record["step"] for record in records], dtype=np.float64))
        _gather(records, count, pieces)
        count += len(records)
    columns = {
        key: (np.concatenate([a for a, _ in found]), np.concatenate([b for _, b in found]))
        for key, found in pieces.items()
    }
    metrics = Metrics(np.concatenate([np.empty(0), *steps]), columns)
    falling = np.flatnonzero(np.diff(metrics.steps) <= 0)
    if len(falling):
        line = int(falling[0])
        before, after = metrics.steps[line : line + 2]
        raise CheckpointError(
            f"{path}:{line + 2} is damaged: step {after:.0f} comes after step {before:.0f}"
        )
    return metrics


def _records(
    path: Path, before: int, lines: Sequence[bytes], *, is_end: bool
) -> list[dict[str, Any]]:
    """The objects of some lines, `before` of which stand before them.

    Args:
        is_end: the last of them is the file's; it may be cut short.
    """
    try:
        records = [from_json(line) for line in lines]
        if set(map(type, records)) == {dict} and all(map(_has_step, records)):
            return records
    except ValueError:
        pass
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            # The slower of the two reads all that it writes, such as halves of characters.
            record = json.loads(line)
            if not isinstance(record, dict) or not _has_step(record):
                raise ValueError("it is no object with a step")
        except (ValueError, RecursionError) as error:
            if is_end and number == len(lines):
                break
            raise CheckpointError(f"{path}:{before + number} is damaged: {error}") from error
        records.append(record)
    return records


def _has_step(record: Mapping[str, Any]) -> bool:
    step = record.get("step")
    return type(step) is int and -_MAX_STEP < step < _MAX_STEP


def _gather(
    records: Sequence[Mapping[str, Any]],
    first: int,
    pieces: dict[str, list[tuple[npt.NDArray[np.intp], Floats]]],
) -> None:
    """Append the numbers of some lines, the first of which is number `first`, to the columns."""
    keys = set().union(*records) - {"step"}
    for key in sorted(keys):
        values = [record.get(key) for record in records]
        try:
            # None becomes NaN.
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
    """A curve's exponential moving average that starts unbiased (Kingma and Ba 2015, section 3),
    with a half-life of a fiftieth of its points."""
    decay = 0.5 ** (1 / max(len(series) / 50, 1))
    average, weight, result = 0.0, 0.0, []
    for value in series.y.tolist():
        average = decay * average + (1 - decay) * value
        weight = decay * weight + (1 - decay)
        result.append(average / weight)
    return Series(series.x, np.array(result, dtype=np.float64))


def thin(series: Series, buckets: int = 800) -> Series:
    """At most 2 x `buckets` + 2 points of a curve, which look the same where a bucket is a pixel.

    Each bucket holds equally many points, of which the lowest and the highest stay, as do the
    first and the last of all. A curve of no more points than that is returned as it is.
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


#: A resolved recipe is longer than the one that it was made of.
_RESOLVED = 8


@dataclass(frozen=True)
class RunRecord:
    """The files of a run folder, read.

    Attributes:
        folder: the run folder.
        metrics: metrics of its steps.
        samples: the lines of samples.jsonl.
        events: the lines of events.jsonl.
        starts: the lines of starts.jsonl.
        length: content of length.json of a run in minutes; empty for other runs.
        recipe: the resolved recipe; empty where there is none.
        recipe_text: its file; "" where there is none.
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
        """Of the folder."""
        return self.folder.resolve().name

    @property
    def start(self) -> Mapping[str, Any]:
        """The last line of starts.jsonl, or nothing."""
        return self.starts[-1] if self.starts else {}

    @property
    def last_step(self) -> int:
        """The last step that is logged; 0 before the first."""
        return int(self.metrics.steps[-1]) if len(self.metrics.steps) else 0

    @property
    def max_steps(self) -> int | None:
        """Steps of the whole run, where known."""
        schedule = self.recipe.get("schedule")
        found = schedule.get("max_steps") if isinstance(schedule, dict) else None
        found = self.length.get("max_steps", self.start.get("max_steps", found))
        return found if type(found) is int and found >= 0 else None

    @property
    def what_happened(self) -> list[Mapping[str, Any]]:
        """Events, resumptions and the decision on the length of a run in minutes, by step."""
        starts = (start for start in self.starts if start["step"] > 0)
        resumed = (
            {**s, "event": "branched" if "branched_from" in s else "resumed"} for s in starts
        )
        happened = [*self.events, *resumed, *decisions(self.length)]
        return sorted(happened, key=lambda event: event["step"])


def read_run(folder: Path) -> RunRecord:
    """Read a run folder. What is not there (a run that has not come so far) is empty.

    Raises:
        CheckpointError: a file of it is damaged.
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
    """All objects of the file; a last line that a kill cut short is left out.

    Raises:
        CheckpointError: a line in the middle is damaged.
    """
    records, problem = sound_json_lines(path)
    if problem is not None:
        raise CheckpointError(problem)
    return records


def sound_json_lines(path: Path) -> tuple[list[dict[str, Any]], str | None]:
    """(the objects of all lines that can be read, what is wrong with the first line that can't, or
    with the file, None if nothing is); a last line that a kill cut short is nothing wrong."""
    if not path.exists():
        return [], None
    try:
        lines = read_file(path, _MAX_BYTES).splitlines(keepends=True)
    except InputError as error:
        return [], str(error)
    records, problem = [], None
    for number, line in enumerate(lines, start=1):
        try:
            records.append(_record(line))
        except (ValueError, RecursionError) as error:
            if number < len(lines):
                problem = problem or f"{path}:{number} is damaged: {error}"
    return records, problem


def _record(line: bytes) -> dict[str, Any]:
    record = json.loads(line)
    if not isinstance(record, dict) or type(record.get("step")) is not int:
        raise ValueError("it is no object with a step")
    return record


def _read_lines(path: Path, *texts: str) -> list[dict[str, Any]]:
    lines = read_json_lines(path)
    for line in lines:
        if not all(isinstance(line.get(key), str) for key in texts):
            raise CheckpointError(f"{path} is damaged: a line has no {' and '.join(texts)}")
        if abs(line["step"]) > _MAX_STEP:
            raise CheckpointError(f"{path} is damaged: a step is above {_MAX_STEP:,}")
    return lines


def last_start(run_folder: Path) -> dict[str, Any]:
    """What was recorded when the run was last started or resumed; {} if nothing was.

    Raises:
        CheckpointError: a line in the middle of the file is damaged.
    """
    return (read_json_lines(run_folder / STARTS_NAME) or [{}])[-1]


def require_run(folder: Path) -> None:
    """Refuse what is no run folder.

    Raises:
        InputError: it is missing, a file, or a folder of another kind.
    """
    if not folder.exists():
        siblings = [p.name for p in folder.parent.iterdir()] if folder.parent.is_dir() else []
        raise InputError(f"run folder {folder} does not exist{nearest(folder.name, siblings)}")
    if not folder.is_dir():
        raise InputError(f"{folder} is a file: name the run folder that it is in")
    if any((folder / name).exists() for name in (METRICS_NAME, RECIPE_NAME)):
        return
    run = folder.resolve().parent.parent
    if (run / METRICS_NAME).exists():
        raise InputError(f"{folder} is a checkpoint: name its run folder, {run}")
    hint = "name one that `firstlight train` wrote"
    raise InputError(f"{folder} is no run folder: it has no {METRICS_NAME} ({hint})")


def _read_recipe(path: Path) -> tuple[Mapping[str, Any], str]:
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

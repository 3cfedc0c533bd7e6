"""Reads the numbers of metrics.jsonl as arrays, one column for each key, and smooths and thins
curves."""

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

from firstlight.errors import CheckpointError, InputError
from firstlight.files.atomic import read_file

Floats = npt.NDArray[np.float64]
Axis = Literal["step", "tokens", "hours"]

#: Largest accepted size of a run's log file in bytes: about ten million steps.
MAX_LOG_BYTES = 1 << 32
#: Number of lines that are converted to arrays at a time, so that their objects take only some MB.
_LINES = 4096
#: Largest accepted absolute value: computing with larger ones could overflow.
_GREATEST = 1e100
#: Largest accepted step: up to here a float can represent every integer.
MAX_STEP = 2**53


@dataclass(frozen=True)
class Series:
    """Points of a curve, in the order of the run.

    Attributes:
        x, y: finite coordinates of the points, [N] each.
    """

    x: Floats
    y: Floats

    def __len__(self) -> int:
        return len(self.x)


@dataclass(frozen=True)
class Metrics:
    """The numbers of metrics.jsonl, by column.

    Attributes:
        steps: step of each of the N lines, rising, [N].
        columns: key -> the indices (from 0) of the lines that have a number, and the numbers,
            [M] each. Values that are not finite numbers (null, a text) are left out.
    """

    steps: Floats
    columns: Mapping[str, tuple[npt.NDArray[np.intp], Floats]]

    def values(self, key: str) -> Floats:
        """All numbers of a key, [M]; empty if there are none."""
        return self.columns[key][1] if key in self.columns else np.empty(0)

    def last(self, key: str) -> float | None:
        """The last number of a key; None if there is none."""
        found = self.values(key)
        return float(found[-1]) if len(found) else None

    def series(self, key: str, axis: Axis = "step") -> Series:
        """The curve of a key.

        Args:
            key: key of the metric.
            axis: quantity of the x axis: "step", "tokens" (tokens seen), or "hours" (of training).
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
        """Hours of training up to each line, [N]: time of the steps, and of saves for which they
        waited."""
        seconds = self._filled("seconds", 0.0) + self._filled("save_stall_seconds", 0.0)
        return np.cumsum(seconds) / 3600

    def _filled(self, key: str, missing: float) -> Floats:
        result = np.full(len(self.steps), missing)
        if key in self.columns:
            lines, values = self.columns[key]
            result[lines] = values
        return result


def read_metrics(path: Path) -> Metrics:
    """Read metrics.jsonl. A missing file has no lines; an incomplete last line, which a killed
    process leaves, is left out.

    Raises:
        CheckpointError: the file can't be read, another line than the last one is damaged, or steps
            don't rise.
    """
    if not path.exists():
        return Metrics(np.empty(0), {})
    try:
        content = read_file(path, MAX_LOG_BYTES)
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
    """The objects of some lines.

    Args:
        path: the file, for messages.
        before: number of lines before these in the file.
        lines: the lines.
        is_end: True if the last of them is the last line of the file, which may be incomplete.
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
            # `json` is slower than `from_json`, but reads everything that it writes itself, such as
            # single surrogates.
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
    return type(step) is int and -MAX_STEP < step < MAX_STEP


def _gather(
    records: Sequence[Mapping[str, Any]],
    first: int,
    pieces: dict[str, list[tuple[npt.NDArray[np.intp], Floats]]],
) -> None:
    """Append the numbers of some lines to columns.

    Args:
        records: objects of the lines.
        first: index of the first line in the file.
        pieces: columns in pieces, by key; changed in place.
    """
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
    """The exponential moving average of a curve, with a half-life of a fiftieth of its points, and
    with the bias correction of Adam (Kingma and Ba 2015, section 3)."""
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
    """Reduce a curve to at most 2 x `buckets` + 2 points that look the same if a bucket is about a
    pixel wide.

    The points are divided into buckets of equal numbers of points. The lowest and the highest point
    of each bucket are kept, and the first and the last point of the curve. A curve that has at most
    this number of points is returned unchanged.
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

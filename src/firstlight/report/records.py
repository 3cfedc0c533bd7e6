"""Reads the files of a run folder for reports, at any time of the run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from firstlight.errors import CheckpointError, InputError, nearest
from firstlight.files.atomic import read_file
from firstlight.recipe.load import MAX_RECIPE_BYTES, parse_yaml
from firstlight.report.length import decisions, read_length
from firstlight.report.series import MAX_LOG_BYTES, MAX_STEP, Metrics, read_metrics

#: The rate of learned tokens (tokens with a loss) is shown if it is below this fraction of the rate
#: of all tokens. In plain text all tokens are learned, except the padding of an epoch's last row.
MOSTLY_LEARNED = 0.9

METRICS_NAME = "metrics.jsonl"
SAMPLES_NAME = "samples.jsonl"
EVENTS_NAME = "events.jsonl"
STARTS_NAME = "starts.jsonl"
RECIPE_NAME = "recipe.yaml"

#: Largest size of a resolved recipe as a multiple of `MAX_RECIPE_BYTES`, because it has all keys.
_RESOLVED = 8


@dataclass(frozen=True)
class RunRecord:
    """The contents of a run folder's files.

    Attributes:
        folder: the run folder.
        metrics: the metrics of the steps (metrics.jsonl).
        samples: the lines of samples.jsonl.
        events: the lines of events.jsonl.
        starts: the lines of starts.jsonl.
        length: the contents of length.json; empty if the run's length is not given in minutes.
        recipe: the resolved recipe; empty if the file is missing.
        recipe_text: the text of recipe.yaml; "" if the file is missing.
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
        """The folder's name."""
        return self.folder.resolve().name

    @property
    def start(self) -> Mapping[str, Any]:
        """The last line of starts.jsonl; {} if there is none."""
        return self.starts[-1] if self.starts else {}

    @property
    def last_step(self) -> int:
        """The last logged step; 0 before the first."""
        return int(self.metrics.steps[-1]) if len(self.metrics.steps) else 0

    @property
    def max_steps(self) -> int | None:
        """The planned number of steps of the run; None if unknown."""
        return _max_steps(self.recipe, self.length, self.start)

    @property
    def what_happened(self) -> list[Mapping[str, Any]]:
        """Events, resumptions and the decision about the run's length, sorted by step."""
        starts = (start for start in self.starts if start["step"] > 0)
        resumed = (
            {**s, "event": "branched" if "branched_from" in s else "resumed"} for s in starts
        )
        happened = [*self.events, *resumed, *decisions(self.length)]
        return sorted(happened, key=lambda event: event["step"])


def _max_steps(
    recipe: Mapping[str, Any], length: Mapping[str, Any], start: Mapping[str, Any]
) -> int | None:
    schedule = recipe.get("schedule")
    found = schedule.get("max_steps") if isinstance(schedule, dict) else None
    found = length.get("max_steps", start.get("max_steps", found))
    return found if type(found) is int and found >= 0 else None


def planned_length(folder: Path) -> tuple[int | None, float | None, int | None]:
    """The planned length of a run in steps and in minutes, and the step at which a run in minutes
    ends even if minutes are left, without reading its metrics. Each is None if it is unknown or the
    run has no such limit.

    Raises:
        CheckpointError: a file of the run folder is damaged.
    """
    recipe, length = _read_recipe(folder / RECIPE_NAME)[0], read_length(folder)
    steps = _max_steps(recipe, length, last_start(folder))
    limit = length.get("max_steps", length.get("most_steps"))
    return steps or length.get("predicted_steps"), length.get("max_minutes"), limit


def read_run(folder: Path) -> RunRecord:
    """Read a run folder. Files that are missing (because the run has not written them yet) are
    empty.

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
    """All objects of a file of JSON lines; [] if the file is missing. An incomplete last line of a
    killed process is left out.

    Raises:
        CheckpointError: the file can't be read, or another line than the last one is damaged.
    """
    records, problem = sound_json_lines(path)
    if problem is not None:
        raise CheckpointError(problem)
    return records


def sound_json_lines(path: Path) -> tuple[list[dict[str, Any]], str | None]:
    """The objects of all readable lines of a file of JSON lines, and a message about the first
    unreadable line or about the file; None without a problem. An incomplete last line, which a
    killed process leaves, is no problem."""
    if not path.exists():
        return [], None
    try:
        lines = read_file(path, MAX_LOG_BYTES).splitlines(keepends=True)
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
    record = json.loads(line.decode("utf-8-sig"))
    step = record.get("step") if isinstance(record, dict) else None
    if type(step) is not int or abs(step) > MAX_STEP:
        raise ValueError(f"it is no object with a step up to {MAX_STEP:,}")
    return dict(record)


def _read_lines(path: Path, *texts: str) -> list[dict[str, Any]]:
    lines = read_json_lines(path)
    for line in lines:
        if not all(isinstance(line.get(key), str) for key in texts):
            raise CheckpointError(f"{path} is damaged: a line has no {' and '.join(texts)}")
    return lines


def last_start(run_folder: Path) -> dict[str, Any]:
    """The record of the run's last start or resumption; {} if there is none.

    Raises:
        CheckpointError: see `read_json_lines`.
    """
    return (read_json_lines(run_folder / STARTS_NAME) or [{}])[-1]


def require_run(folder: Path) -> None:
    """Refuse a path that is not a run folder.

    Raises:
        InputError: the path does not exist, is a file, or is another folder.
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
    """The values and the text of recipe.yaml; {} and "" if it is missing."""
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

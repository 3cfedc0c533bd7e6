"""Reads length.json of a run folder: the number of steps of a run whose length is given in
minutes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from firstlight.errors import CheckpointError
from firstlight.files.atomic import read_json_object

LENGTH_NAME = "length.json"

#: Largest accepted number: up to here a float can represent every integer.
_MOST = 2**53

#: Keys of the file, with the types and the smallest value that are accepted.
_KEYS: Sequence[tuple[str, tuple[type, ...], int]] = (
    ("max_minutes", (int, float), 0),
    ("predicted_steps", (int,), 1),
    ("seconds_used", (int, float), 0),
    ("most_steps", (int,), 1),
    ("max_steps", (int,), 1),
    ("decided_at", (int,), 0),
)


def read_length(run_folder: Path) -> dict[str, Any]:
    """The contents of length.json of a run whose length is given in minutes; {} for other runs.

    Returns:
        An object with some of these keys:

        - "max_minutes": the planned length in minutes.
        - "predicted_steps": the number of steps that was predicted at the run's start.
        - "most_steps": the recipe's limit of steps, if it has one.
        - "seconds_used": the seconds of training so far.
        - "max_steps": the run's number of steps, after it is decided.
        - "decided_at": the number of completed steps when it was decided.
        - "replaced": if the number of steps was corrected, a list with a pair for each earlier one:
          that number, and the number of completed steps when another one replaced it.

    Raises:
        CheckpointError: the file is damaged.
    """
    path = run_folder / LENGTH_NAME
    if not path.exists():
        return {}
    record = read_json_object(path, CheckpointError, "is damaged: it is no object")
    for key, kind, least in _KEYS:
        value = record.get(key, least)
        if type(value) not in kind or not least <= value <= _MOST:
            raise CheckpointError(f"{path} is damaged: {key} is {value!r:.100}")
    if ("max_steps" in record) != ("decided_at" in record):
        raise CheckpointError(f"{path} is damaged: max_steps and decided_at belong together")
    if not _are_corrections(record.get("replaced", []), record.get("decided_at", _MOST)):
        raise CheckpointError(f"{path} is damaged: replaced is {record['replaced']!r:.100}")
    return record


def _are_corrections(value: Any, decided_at: int) -> bool:
    """True for a list of pairs (number of steps, completed steps), in the order of the latter."""
    if type(value) is not list:
        return False
    last = decided_at
    for pair in value:
        if type(pair) is not list or [type(number) for number in pair] != [int, int]:
            return False
        if not last < pair[1] < pair[0] <= _MOST:
            return False
        last = pair[1]
    return True


def decisions(length: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The decision about the number of steps and its corrections, as events of the run; [] before
    the decision.

    Args:
        length: the result of `read_length`.
    """
    if "max_steps" not in length:
        return []
    replaced = length.get("replaced", [])
    numbers = [*(number for number, _ in replaced), length["max_steps"]]
    events = [{**length, "step": length["decided_at"], "max_steps": numbers[0], "event": "length"}]
    for (before, step), number in zip(replaced, numbers[1:], strict=True):
        events.append({"step": step, "max_steps": number, "before": before, "event": "correction"})
    return events

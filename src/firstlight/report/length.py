"""length.json of a run folder: the number of steps of a run whose length is given in minutes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from firstlight.errors import CheckpointError
from firstlight.files.atomic import read_json_object

LENGTH_NAME = "length.json"

#: Floats count up to here.
_MOST = 2**53

#: Keys, their types and least values.
_KEYS: Sequence[tuple[str, tuple[type, ...], int]] = (
    ("max_minutes", (int, float), 0),
    ("predicted_steps", (int,), 1),
    ("seconds_used", (int, float), 0),
    ("most_steps", (int,), 1),
    ("max_steps", (int,), 1),
    ("decided_at", (int,), 0),
)


def read_length(run_folder: Path) -> dict[str, Any]:
    """The recorded length of a run in minutes: "max_minutes", "predicted_steps" (at its start),
    "most_steps" (if the recipe limits them), "seconds_used", and once its number of steps is
    decided "max_steps" and "decided_at", the steps that were done by then. {} for other runs.

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
    return record


def decisions(length: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The decision on the number of steps as an event of the run; [] before it."""
    if "max_steps" not in length:
        return []
    return [{**length, "step": length["decided_at"], "event": "length"}]

"""Measures the rows of `gpu` in calls of some minutes, with one file of results.

- The rows of all parts are measured in the order of their `value`. Rows of the same value take
  turns: all first turns come before the second turns. Turns after the first come with the rows of
  the next value, unless the value is 1.
- A row that would not end in time is left for the next call; later rows that fit into the time are
  measured.
- results.json is replaced after every measurement: the next call continues from there.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from firstlight.bench.runner import RowOutcome
from firstlight.console import say
from firstlight.errors import InputError
from firstlight.files.atomic import read_json, write_json
from firstlight.hardware.fresh_process import error_of

RESULTS_NAME = "results.json"

#: Seconds at the end of a call in which nothing is measured.
_MARGIN = 5.0

#: Version of the format of results.json.
_FORMAT = 1

#: Outcomes by name of the part and name of the row.
Outcomes = dict[str, dict[str, RowOutcome]]


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        name: name in tables, unique within its part.
        module: module that measures; see `process.ask`.
        request: JSON values for the measurement. Two are added: "work", a folder for files that
            rows of the same call share, and "keep", the folder of the results, for small files.
        seconds: upper estimate of the first turn's duration, with the start of the process.
        value: priority across all parts; rows with lower values are measured first.
        turns: number of measurements of the row.
        limit: time limit of a turn in seconds; None is three times `seconds` plus 60.
        plain: True measures without the environment variables of `firstlight train`.
        skip: the reason why this machine can't measure the row; "" if it can.
    """

    name: str
    module: str
    request: Mapping[str, Any]
    seconds: float
    value: int = 5
    turns: int = 1
    limit: float | None = None
    plain: bool = False
    skip: str = ""

    @property
    def digest(self) -> str:
        """Hash of module and request: a row is measured again if they have changed."""
        content = json.dumps([self.module, self.request], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]


@dataclass
class Results:
    """The contents of results.json.

    Attributes:
        folder: folder of the file.
        machine: facts of the machine that measured; {} before the first call.
        calls: "date", "seconds" and "turns" of each call.
        outcomes: outcomes of all rows that were tried, by part and row.
    """

    folder: Path
    machine: dict[str, Any] = field(default_factory=dict)
    calls: list[dict[str, Any]] = field(default_factory=list)
    outcomes: Outcomes = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> Results:
        """The results in a folder; empty results if it has no results.json.

        Raises:
            InputError: the file has another format.
        """
        path = folder / RESULTS_NAME
        if not path.exists():
            return cls(folder)
        content = read_json(path)
        try:
            if content["format"] != _FORMAT:
                raise ValueError
            outcomes = {
                part: {name: RowOutcome(**entry) for name, entry in rows.items()}
                for part, rows in content["outcomes"].items()
            }
            return cls(folder, dict(content["machine"]), list(content["calls"]), outcomes)
        except (KeyError, TypeError, ValueError, AttributeError):
            raise InputError(
                f"{path} is not a file of results of this version: choose another folder"
            ) from None

    def write(self) -> None:
        """Replace results.json.

        Raises:
            StorageError: a file system error.
        """
        content = asdict(self)
        write_json(content.pop("folder") / RESULTS_NAME, {"format": _FORMAT, **content})

    def outcome(self, part: str, row: Row, *, retry: bool = False) -> RowOutcome:
        """The row's outcome so far; a new one if the row's digest has changed, or if `retry` is
        True and a turn has failed."""
        rows = self.outcomes.setdefault(part, {})
        found = rows.get(row.name)
        if found is None or found.digest != row.digest or (retry and found.problem):
            found = rows[row.name] = RowOutcome(row.digest)
        return found


@dataclass(frozen=True)
class Turn:
    """One measurement of a row of a part; numbers of turns begin at 0."""

    part: str
    row: Row
    number: int

    @property
    def title(self) -> str:
        """Name of the turn in messages."""
        turns = f", turn {self.number + 1} of {self.row.turns}" if self.row.turns > 1 else ""
        return f"{self.part}: {self.row.name}{turns}"


def order(parts: Mapping[str, Sequence[Row]]) -> list[Turn]:
    """All turns of all rows in the order in which they are measured."""
    turns = [
        Turn(part, row, number)
        for part, rows in parts.items()
        for row in rows
        if not row.skip
        for number in range(row.turns)
    ]

    def place(turn: Turn) -> tuple[int, int]:
        later = turn.number if turn.row.value > 1 else 0
        return turn.row.value + later, turn.number

    return sorted(turns, key=place)


#: (row, request, time limit in seconds) -> the measurement's result; see `process.ask`.
Measure = Callable[[Row, dict[str, Any], float], dict[str, Any]]


@dataclass(frozen=True)
class Call:
    """One call of `benchmarks gpu`.

    Attributes:
        minutes: duration of the call.
        work: folder for files that rows of the call share.
        measure: function that runs a measurement.
        begun: time at which the call began, by `clock`; None is now.
        clock: monotonic clock in seconds.
    """

    minutes: float
    work: Path
    measure: Measure
    begun: float | None = None
    clock: Callable[[], float] = time.monotonic


def run_rows(parts: Mapping[str, Sequence[Row]], results: Results, call: Call) -> list[Turn]:
    """Measure the turns that have no result yet, as far as the call's time allows.

    Returns:
        The turns that are left for the next call.

    Raises:
        StorageError: a file system error.
    """
    begun = call.clock() if call.begun is None else call.begun
    end = begun + 60 * call.minutes - _MARGIN
    entry = results.calls[-1] if results.calls else {}
    left_over = []
    waiting = [turn for turn in order(parts) if _is_waiting(turn, results)]
    for number, turn in enumerate(waiting, start=1):
        outcome = results.outcome(turn.part, turn.row)
        # An earlier turn of the row may have failed in this call.
        if not _is_waiting(turn, results):
            continue
        expected, left = outcome.expected_seconds(turn.row.seconds), end - call.clock()
        if expected > left or len(outcome.runs) < turn.number:
            left_over.append(turn)
            continue
        clock = f"{max(0, int(left)) // 60}:{max(0, int(left)) % 60:02d} left"
        say(f"[{number}/{len(waiting)}] {turn.title}: about {expected:.0f} s; {clock}")
        cut = _take_turn(turn, outcome, results, call, left)
        if cut:
            left_over.append(turn)
        entry["seconds"] = round(call.clock() - begun, 1)
        entry["turns"] = entry.get("turns", 0) + (not cut)
        results.write()
    return left_over


def _is_waiting(turn: Turn, results: Results) -> bool:
    outcome = results.outcome(turn.part, turn.row)
    return not outcome.problem and len(outcome.runs) <= turn.number


def _take_turn(turn: Turn, outcome: RowOutcome, results: Results, call: Call, left: float) -> bool:
    """Measure one turn; True if the end of the call stopped it."""
    row = turn.row
    limit = 3 * row.seconds + 60 if row.limit is None else row.limit
    request = {**row.request, "work": str(call.work), "keep": str(results.folder)}
    start = call.clock()
    found = call.measure(row, request, min(limit, left))
    seconds = round(call.clock() - start, 2)
    if found.get("error", {}).get("type") == "TimeoutError" and limit > left:
        outcome.cut_after = seconds
        say("    not done at the end of this call: it is tried again in the next")
        return True
    try:
        json.dumps(found, allow_nan=False)  # results.json can't hold NaN or infinity, either
    except ValueError:
        found = error_of("Failed", "a figure of its result is not a finite number")
    outcome.add(found, seconds)
    if outcome.problem:
        say(f"    failed after {seconds:.0f} s: {outcome.problem}")
    else:
        say(f"    {seconds:.0f} s" + (f": {found['line']}" if found.get("line") else ""))
    return False

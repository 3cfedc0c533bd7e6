"""Runs the rows of `bench gpu`, in calls of some minutes.

- The rows of all parts are measured in the order of their `value`; those of one value take turns
  (A B A B): all first turns come before the second ones.
- A row whose seconds would not fit into the time that is left is left for the next call, and
  those after it that do fit are measured.
- results.json is replaced after every measurement, so that an interruption leaves it whole. The
  next call goes on from there: the file is all that it needs.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from firstlight.bench.runner import RowOutcome
from firstlight.console import say
from firstlight.errors import InputError
from firstlight.files.atomic import read_json, write_json

RESULTS_NAME = "results.json"

#: Seconds at the end of a call in which nothing is measured any more.
_MARGIN = 5.0

#: The version of results.json.
_FORMAT = 1

#: Part -> row -> its outcome.
Outcomes = dict[str, dict[str, RowOutcome]]


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        name: name in tables, unique within its part.
        module: the module that measures, run as `python -m MODULE REQUEST`; it ends in
            `process.answer`.
        request: JSON values for the measurement. "work" and "keep" are added to them: a folder for
            files that further rows of the call may use, and the folder of the results, where
            files that are small may be left to be kept.
        seconds: expected duration of the first turn, the start of the process included; rather
            too much than too little.
        value: place in the order; rows with the lower number are measured first, whatever their
            part.
        turns: measurements of the row.
        limit: seconds after which a turn is ended; None is three times `seconds` and a minute.
        plain: True leaves the environment of `firstlight train` out.
        skip: the reason why the row can't be measured on this machine; "" where it can.
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
        """Hash of the declaration: results of another declaration are measured again."""
        content = json.dumps([self.module, self.request], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]


@dataclass
class Results:
    """The file of results.

    Attributes:
        folder: the folder with the file.
        machine: facts of the machine that measured; {} before the first call.
        calls: entry of each call: "date", "seconds", "turns", "command".
        outcomes: outcomes of all rows that were tried.
    """

    folder: Path
    machine: dict[str, Any] = field(default_factory=dict)
    calls: list[dict[str, Any]] = field(default_factory=list)
    outcomes: Outcomes = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> Results:
        """The results in a folder; empty ones where it has no such file.

        Raises:
            InputError: the file is not one of these.
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
        """Replace the file.

        Raises:
            StorageError: the disk refused.
        """
        outcomes = {
            part: {name: asdict(outcome) for name, outcome in rows.items()}
            for part, rows in self.outcomes.items()
        }
        content = {"format": _FORMAT, "machine": self.machine, "calls": self.calls}
        write_json(self.folder / RESULTS_NAME, {**content, "outcomes": outcomes})

    def outcome(self, part: str, row: Row, *, retry: bool = False) -> RowOutcome:
        """The row's outcome so far, a new one where it is of another declaration or, with `retry`,
        where a turn failed."""
        rows = self.outcomes.setdefault(part, {})
        found = rows.get(row.name)
        if found is None or found.digest != row.digest or (retry and found.problem):
            found = rows[row.name] = RowOutcome(row.digest)
        return found


@dataclass(frozen=True)
class Turn:
    """One turn of a row of a part; numbers begin at 0."""

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
    keyed = [
        ((row.value, turn, place, number), Turn(part, row, turn))
        for place, (part, rows) in enumerate(parts.items())
        for number, row in enumerate(rows)
        if not row.skip
        for turn in range(row.turns)
    ]
    return [turn for _, turn in sorted(keyed, key=lambda entry: entry[0])]


#: (row, its request, its time limit in seconds) -> the measurement's result; see `process.ask`.
Measure = Callable[[Row, dict[str, Any], float], dict[str, Any]]


@dataclass(frozen=True)
class Call:
    """One call of `bench gpu`.

    Attributes:
        minutes: duration of the call.
        work: folder of files that rows of the call share.
        measure: function that runs a measurement.
        begun: time of the call's begin, by `clock`; None is now.
        clock: function that returns seconds, which never go back.
    """

    minutes: float
    work: Path
    measure: Measure
    begun: float | None = None
    clock: Callable[[], float] = time.monotonic


def run_rows(parts: Mapping[str, Sequence[Row]], results: Results, call: Call) -> list[Turn]:
    """Measure what has no result yet, as far as the call's time allows.

    Returns:
        The turns that were left for the next call.

    Raises:
        StorageError: the disk refused.
    """
    begun = call.clock() if call.begun is None else call.begun
    end = begun + 60 * call.minutes - _MARGIN
    entry = results.calls[-1] if results.calls else {}
    left_over = []
    waiting = [turn for turn in order(parts) if _is_waiting(turn, results)]
    for number, turn in enumerate(waiting, start=1):
        outcome = results.outcome(turn.part, turn.row)
        # An earlier turn of it may have failed, or been left over, in this call.
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
    """Measure one turn; True if the call's end cut it off."""
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
        # The file of results can't hold them.
        json.dumps(found, allow_nan=False)
    except ValueError:
        message = "a figure of its result is not a finite number"
        found = {"error": {"type": "Failed", "message": message}}
    outcome.add(found, seconds)
    if outcome.problem:
        say(f"    failed after {seconds:.0f} s: {outcome.problem}")
    else:
        say(f"    {seconds:.0f} s" + (f": {found['line']}" if found.get("line") else ""))
    return False


def waiting_seconds(turns: Iterable[Turn], results: Results) -> float:
    """Expected duration of turns that are left."""
    return sum(
        results.outcome(one.part, one.row).expected_seconds(one.row.seconds) for one in turns
    )

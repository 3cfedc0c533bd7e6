"""Runs the rows of a benchmark, each in a fresh process, as far as the time allows.

A benchmark declares rows and a measurement: a module that takes a row's request and returns a JSON
object. Turns, the order, time limits, what failed, and the file of results are done here:

- The rows of all parts are measured in the order of their `value`; those of one value take turns
  (A B A B): all first turns come before the second ones.
- A row whose seconds would not fit into the time that is left is left for the next call, and
  those after it that do fit are measured.
- results.json is replaced after every measurement, so that an interruption leaves it whole. The
  next call goes on from there: the file is all that it needs.
- Whatever becomes of a row's process (out of memory, a crash, its time limit) is the row's result,
  and ends no other.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from firstlight.console import say
from firstlight.errors import InputError
from firstlight.files.atomic import read_json, write_json

RESULTS_NAME = "results.json"

#: Of the minutes of a call, seconds in which nothing is measured any more.
_MARGIN = 5.0

#: The version of results.json.
_FORMAT = 1


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        name: unique within its part; it stands in tables.
        module: the module that measures, run as `python -m MODULE REQUEST`; it ends in
            `fresh_process.answer`.
        request: JSON values for the measurement. "work" and "keep" are added to them: a folder for
            files that further rows of the call may use, and the folder of the results, where
            files that are small may be left to be kept.
        seconds: expected duration of the first turn, the start of the process included; rather
            too much than too little.
        value: rows with the lower number are measured first, whatever their part.
        turns: measurements of the row.
        limit: seconds after which a turn is ended; None is three times `seconds` and a minute.
        plain: the process gets the person's environment, without that of `firstlight train`.
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
class Outcome:
    """Results of a row.

    Attributes:
        digest: `Row.digest` of the row when it was measured.
        runs: the measurement's results, one for each turn.
        seconds: duration of each turn, the start of its process included.
        problem: the reason why a turn has no result; "" while there is none.
        cut_after: seconds after which the end of a call cut a turn off; 0 if none did.
    """

    digest: str = ""
    runs: list[dict[str, Any]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    problem: str = ""
    cut_after: float = 0.0

    def expected_seconds(self, row: Row) -> float:
        """Expected duration of the row's next turn."""
        if self.seconds:
            return 1.2 * self.seconds[-1]
        return max(row.seconds, 1.5 * self.cut_after)

    def values(self, key: str) -> list[float]:
        """The numbers under a key of all turns; numbers in lists are put together."""
        found: list[float] = []
        for run in self.runs:
            value = run.get(key)
            if isinstance(value, list):
                found += value
            elif value is not None:
                found.append(value)
        return found

    def median(self, key: str) -> float | None:
        """The median of `values`; None where there are none."""
        found = self.values(key)
        return statistics.median(found) if found else None


#: Part -> row -> its outcome.
Outcomes = dict[str, dict[str, Outcome]]


@dataclass
class Results:
    """The file of results.

    Attributes:
        folder: the folder with the file.
        machine: facts of the machine that measured; {} before the first call.
        calls: one entry for each call: "date", "seconds", "turns", "command".
        outcomes: of all rows that were tried.
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
                part: {name: Outcome(**entry) for name, entry in rows.items()}
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
        content = {
            "format": _FORMAT,
            "machine": self.machine,
            "calls": self.calls,
            "outcomes": outcomes,
        }
        write_json(self.folder / RESULTS_NAME, content)

    def outcome(self, part: str, row: Row, *, retry: bool = False) -> Outcome:
        """The row's outcome so far, a new one where it is of another declaration.

        Args:
            part: the part's name.
            row: one of the part.
            retry: also a new one where a turn failed.
        """
        rows = self.outcomes.setdefault(part, {})
        found = rows.get(row.name)
        if found is None or found.digest != row.digest or (retry and found.problem):
            found = rows[row.name] = Outcome(row.digest)
        return found


@dataclass(frozen=True)
class Job:
    """One turn of a row."""

    part: str
    row: Row
    turn: int

    @property
    def title(self) -> str:
        """Its name for people."""
        turns = f", turn {self.turn + 1} of {self.row.turns}" if self.row.turns > 1 else ""
        return f"{self.part}: {self.row.name}{turns}"


def order(parts: Mapping[str, Sequence[Row]]) -> list[Job]:
    """All turns of all rows in the order in which they are measured."""
    keyed = [
        ((row.value, turn, place, number), Job(part, row, turn))
        for place, (part, rows) in enumerate(parts.items())
        for number, row in enumerate(rows)
        if not row.skip
        for turn in range(row.turns)
    ]
    return [job for _, job in sorted(keyed, key=lambda entry: entry[0])]


#: (row, its request, seconds that it may take) -> the measurement's result, or {"error": ...} as
#: `fresh_process.ask` says it.
Measure = Callable[[Row, dict[str, Any], float], dict[str, Any]]


@dataclass(frozen=True)
class Call:
    """How one call measures.

    Attributes:
        minutes: the time of the call.
        work: folder of files that rows of the call share.
        measure: runs the measurement.
        begun: when the call began, by `clock`; None is now.
        clock: seconds that only ever go on.
    """

    minutes: float
    work: Path
    measure: Measure
    begun: float | None = None
    clock: Callable[[], float] = time.monotonic


def run_rows(parts: Mapping[str, Sequence[Row]], results: Results, call: Call) -> list[Job]:
    """Measure what has no result yet, as far as the call's time allows.

    Args:
        parts: each part's rows.
        results: what is known; it is added to, and written after every turn.
        call: the time and the measurement.

    Returns:
        The turns that were left for the next call.

    Raises:
        StorageError: the disk refused.
    """
    begun = call.clock() if call.begun is None else call.begun
    end = begun + 60 * call.minutes - _MARGIN
    entry = results.calls[-1] if results.calls else {}
    left_over = []
    waiting = [job for job in order(parts) if _is_waiting(job, results)]
    for number, job in enumerate(waiting, start=1):
        outcome = results.outcome(job.part, job.row)
        # An earlier turn of it may have failed, or been left over, in this call.
        if not _is_waiting(job, results):
            continue
        expected, left = outcome.expected_seconds(job.row), end - call.clock()
        if expected > left or len(outcome.runs) < job.turn:
            left_over.append(job)
            continue
        say(
            f"[{number}/{len(waiting)}] {job.title}: about {expected:.0f} s; "
            f"{_clock_text(left)} left"
        )
        cut = _take_turn(job, outcome, results, call, left)
        if cut:
            left_over.append(job)
        entry["seconds"] = round(call.clock() - begun, 1)
        entry["turns"] = entry.get("turns", 0) + (not cut)
        results.write()
    return left_over


def _is_waiting(job: Job, results: Results) -> bool:
    outcome = results.outcome(job.part, job.row)
    return not outcome.problem and len(outcome.runs) <= job.turn


def _take_turn(job: Job, outcome: Outcome, results: Results, call: Call, left: float) -> bool:
    """Measure one turn, and put its result into the outcome; whether the call's end cut it off."""
    row = job.row
    limit = 3 * row.seconds + 60 if row.limit is None else row.limit
    request = {**row.request, "work": str(call.work), "keep": str(results.folder)}
    start = call.clock()
    found = call.measure(row, request, min(limit, left))
    seconds = round(call.clock() - start, 2)
    error = found.get("error")
    if error is None and not _is_finite(found):
        error = {"type": "Failed", "message": "a figure of its result is not a finite number"}
    if error is None:
        outcome.runs.append(found)
        outcome.seconds.append(seconds)
        say(f"    {seconds:.0f} s" + (f": {found['line']}" if found.get("line") else ""))
        return False
    if error["type"] == "TimeoutError" and limit > left:
        outcome.cut_after = seconds
        say("    not done at the end of this call: it is tried again in the next")
        return True
    outcome.problem = " ".join(str(error["message"]).split())[:400]
    say(f"    failed after {seconds:.0f} s: {outcome.problem}")
    return False


def _is_finite(found: Mapping[str, Any]) -> bool:
    """Whether the file of results can hold a result: it has no NaN and no infinity."""
    try:
        json.dumps(found, allow_nan=False)
    except ValueError:
        return False
    return True


def _clock_text(seconds: float) -> str:
    whole = max(0, int(seconds))
    return f"{whole // 60}:{whole % 60:02d}"


def waiting_seconds(jobs: Iterable[Job], results: Results) -> float:
    """Expected duration of turns that are left."""
    return sum(results.outcome(job.part, job.row).expected_seconds(job.row) for job in jobs)

"""Runs the rows of every benchmark, each in a fresh process.

A benchmark declares rows and a measurement: a module that takes a row's request and returns a JSON
object. A failure of a row's process (out of memory, a crash, its time limit) does not end the other
rows, and the row is not tried again. Rows take turns (A B A B), so that other work of the machine
affects all of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from firstlight.console import progress_bar

#: Types of errors after which a row counts as skipped ("refused"), not as failed.
_REFUSALS = ("ConfigError", "MissingDependencyError", "ModelError", "TimeoutError")

#: Result of one measurement, or {"error": ...}; see `fresh_process.ask`.
Found = Mapping[str, Any]


@dataclass
class RowOutcome:
    """Results of a row.

    Attributes:
        runs: results of the measurement, by turn.
        problem: the reason why a turn has no result; "" without a problem.
        refused: True if the row can't be measured on this machine, or the time was over.
    """

    runs: list[dict[str, Any]] = field(default_factory=list)
    problem: str = ""
    refused: bool = False

    def add(self, found: Found) -> None:
        """Record the result of a turn, or the error message as problem."""
        if "error" in found:
            self.problem = " ".join(str(found["error"]["message"]).split())
            self.refused = found["error"]["type"] in _REFUSALS
        else:
            self.runs.append(dict(found))

    @property
    def is_done(self) -> bool:
        """True if a turn was tried."""
        return bool(self.runs or self.problem)

    def values(self, key: str) -> list[float]:
        """The values of a key over all turns; lists of values are joined."""
        found: list[float] = []
        for run in self.runs:
            if (value := run.get(key)) is not None:
                found += value if isinstance(value, list) else [value]
        return found

    def median(self, key: str) -> float | None:
        """The median of `values`; None without values."""
        found = self.values(key)
        return statistics.median(found) if found else None


def take_turns(
    title: str,
    names: Sequence[str],
    turns: int,
    outcome_of: Callable[[str], RowOutcome],
    measure: Callable[[str], Found],
    on_turn: Callable[[], None],
    before_turn: Callable[[], None] = lambda: None,
) -> None:
    """Measure all rows, turn after turn, with a progress bar.

    Args:
        title: name of the benchmark.
        names: names of the rows in their order.
        turns: number of measurements of each row.
        outcome_of: function from a name to an outcome; rows that share it are measured once.
        measure: function from a name to the result of one measurement.
        on_turn: function that is called after every measurement.
        before_turn: function that is called before each turn of all rows.
    """
    with progress_bar() as progress:
        task = progress.add_task(title, total=turns * len(names))
        for turn in range(turns):
            before_turn()
            for name in names:
                progress.update(task, description=f"{title}: {name}")
                outcome = outcome_of(name)
                # A row with an outcome for this turn shares it; a failed row would fail again.
                if not outcome.problem and len(outcome.runs) == turn:
                    outcome.add(measure(name))
                    on_turn()
                progress.advance(task)

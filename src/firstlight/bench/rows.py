"""Options and rows of the benchmarks. Importing this module does not import torch.

A benchmark defines rows and a module that measures a single row. The module receives a request and
returns a JSON object. Each row is measured in a fresh process. If this process runs out of memory,
crashes or times out, the other rows are not affected, and the row is not retried. The rows are
measured in turn (A B A B), so that other load on the machine affects them equally.

The docstring of an options class also provides the help text of each option. Default values are in
brackets.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from firstlight.console import progress_bar
from firstlight.errors import ConfigError, nearest

#: Result of a benchmark as a JSON object, and the type of functions that receive the results
#: measured so far.
Result = dict[str, Any]
Keep = Callable[[Result], None]

#: Result of one measurement, or {"error": ...} if it failed (see `fresh_process.ask`).
Found = Mapping[str, Any]

#: Types of errors after which a row is treated as skipped ("refused") and not as failed.
_REFUSALS = ("ConfigError", "MissingDependencyError", "ModelError", "TimeoutError")


@dataclass(frozen=True)
class StepsBench:
    """Options of the benchmarks that train for some steps.

    Attributes:
        seq_len: tokens per sequence. [1024, 256 with --quick; at most the context]
        micro_batch_size: sequences per step of the plain run. [4 on a CPU, 16 on a GPU]
        steps: timed steps per run. [4 on a CPU, 20 on a GPU]
        repeats: number of measurements of each row. [3; 1 with --quick]
        device: device to run on: auto, cpu, cuda or cuda:1.
    """

    model: str | None = None
    seq_len: int | None = None
    micro_batch_size: int | None = None
    steps: int | None = None
    repeats: int | None = None
    device: str = "auto"
    quick: bool = False


@dataclass(frozen=True)
class MethodsBench(StepsBench):
    """Options of `bench methods`.

    Attributes:
        model: model to train: gpt2-124m, gpt2-355m, gpt2-774m, llama-110m, llama-1b, small, or
            the model of a recipe. [gpt2-124m; small with --quick]
        rows: names of the rows to measure (a row of the ladder includes the rows before it), or
            `alone` or `ladder` for an entire table.
        quick: use a small model, one turn and fewer rows; takes at most five minutes.
    """

    rows: Sequence[str] = ()


@dataclass(frozen=True)
class GemmBench:
    """Options of `bench gemm`.

    Attributes:
        device: device to run on: auto, cpu, cuda, cuda:1, mps.
        dtype: number formats: fp32, tf32, bf16, fp16. [all formats that the hardware supports]
        model: model that defines the shapes: gpt2-124m, gpt2-355m, gpt2-774m, gpt2-1558m.
        quick: use smaller products and fewer rounds; takes less than a minute.
    """

    device: str = "auto"
    dtype: Sequence[str] = ()
    model: str = "gpt2-124m"
    quick: bool = False


def require_known(kind: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Check names given by the user.

    Args:
        kind: noun by which error messages refer to the names, such as "row".
        names: the names to check.
        known: all valid names.

    Raises:
        ConfigError: a name is unknown.
    """
    known = list(known)
    for name in names:
        if name not in known:
            hint = nearest(name, known) or f": use {', '.join(known)}"
            raise ConfigError(f"{kind} '{name}' is unknown{hint}")


def require_positive(least: int = 1, **values: int) -> None:
    """Check numbers given by the user.

    Args:
        least: minimum value.
        values: the numbers, keyed by name.

    Raises:
        ConfigError: a number is below `least`.
    """
    for name, value in values.items():
        if value < least:
            raise ConfigError(f"{name} is {value}, but must be at least {least}")


@dataclass
class RowOutcome:
    """Results of a row.

    Attributes:
        runs: results of the measurements, one for each turn.
        problem: reason why one of the turns does not have a result; "" if all turns have a result.
        refused: True if the row can't be measured on this machine, or if no time was left to
            measure it.
    """

    runs: list[dict[str, Any]] = field(default_factory=list)
    problem: str = ""
    refused: bool = False

    def add(self, found: Found) -> None:
        """Record the result of a turn. If the measurement failed, record its error message as the
        problem."""
        if "error" in found:
            self.problem = " ".join(str(found["error"]["message"]).split())
            self.refused = found["error"]["type"] in _REFUSALS
        else:
            self.runs.append(dict(found))

    @property
    def is_done(self) -> bool:
        """True if at least one turn has a result or an error."""
        return bool(self.runs or self.problem)

    def values(self, key: str) -> list[float]:
        """Return the values of a key in the results of all turns. Values that are lists are
        concatenated."""
        found: list[float] = []
        for run in self.runs:
            if (value := run.get(key)) is not None:
                found += value if isinstance(value, list) else [value]
        return found

    def median(self, key: str) -> float | None:
        """Return the median of `values`, or None if there are none."""
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
    """Measure all rows in several turns, and show a progress bar.

    Args:
        title: name of the benchmark.
        names: names of the rows, in order.
        turns: number of measurements per row.
        outcome_of: function that returns the `RowOutcome` for the name of a row. Rows that share a
            `RowOutcome` are measured only once.
        measure: function that performs one measurement for a name and returns the result.
        on_turn: function called after every measurement.
        before_turn: function called before each turn, which measures every row once.
    """
    with progress_bar() as progress:
        task = progress.add_task(title, total=turns * len(names))
        for turn in range(turns):
            before_turn()
            for name in names:
                progress.update(task, description=f"{title}: {name}")
                outcome = outcome_of(name)
                # Skip the measurement if a row with the same recipe has already been measured in
                # this turn, or if the row has already failed and would fail again.
                if not outcome.problem and len(outcome.runs) == turn:
                    outcome.add(measure(name))
                    on_turn()
                progress.advance(task)

"""What the benchmarks share: their options, which the command line reads without importing torch,
and their rows, each measured in a fresh process.

A benchmark declares rows and a measurement: a module that takes a row's request and returns a JSON
object. A failure of a row's process (out of memory, a crash, its time limit) does not end the other
rows, and the row is not tried again. Rows take turns (A B A B), so that other work of the machine
affects all of them.

The text of an attribute of an option class is the help of its option; the values that stand for
None are in brackets.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from firstlight.console import progress_bar
from firstlight.errors import ConfigError, nearest

#: Result of a benchmark as JSON object; function that is called with the result so far.
Result = dict[str, Any]
Keep = Callable[[Result], None]

#: Result of one measurement, or {"error": ...}; see `fresh_process.ask`.
Found = Mapping[str, Any]

#: Types of errors after which a row counts as skipped ("refused"), not as failed.
_REFUSALS = ("ConfigError", "MissingDependencyError", "ModelError", "TimeoutError")


@dataclass(frozen=True)
class StepsBench:
    """Options of the benchmarks that train for some steps.

    Attributes:
        seq_len: tokens of a sequence. [1024, 256 with --quick; at most the context]
        micro_batch_size: sequences of a step of the plain run. [4 on a CPU, 16 on a GPU]
        steps: timed steps of a run. [4 on a CPU, 20 on a GPU]
        repeats: turns of all rows. [3; 1 with --quick]
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
        rows: only these rows, as the tables name them (a rung of the ladder brings those below
            it), or `alone` or `ladder` for a whole table.
        quick: a small model, one turn, fewer rows, and an end after five minutes at most.
    """

    rows: Sequence[str] = ()


@dataclass(frozen=True)
class GemmBench:
    """Options of `bench gemm`.

    Attributes:
        device: device to run on: auto, cpu, cuda, cuda:1, mps.
        dtype: number formats: fp32, tf32, bf16, fp16. [all that the hardware multiplies]
        model: model with the shapes: gpt2-124m, gpt2-355m, gpt2-774m, gpt2-1558m.
        quick: smaller products, fewer rounds: under a minute.
    """

    device: str = "auto"
    dtype: Sequence[str] = ()
    model: str = "gpt2-124m"
    quick: bool = False


def require_known(kind: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Check names given by the user.

    Args:
        kind: noun for the names in error messages, such as "row".
        names: the given names.
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
        least: minimum of the numbers.
        values: the numbers by name.

    Raises:
        ConfigError: a number is below `least`.
    """
    for name, value in values.items():
        if value < least:
            raise ConfigError(f"{name} is {value}: at least {least} is needed")


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
        """Return the values of a key over all turns; lists of values are joined."""
        found: list[float] = []
        for run in self.runs:
            if (value := run.get(key)) is not None:
                found += value if isinstance(value, list) else [value]
        return found

    def median(self, key: str) -> float | None:
        """Return the median of `values`; None without values."""
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

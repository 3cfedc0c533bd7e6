"""Runs the rows of every benchmark, each in a fresh process.

A benchmark declares rows and a measurement: a module that takes a row's request and returns a JSON
object. Whatever becomes of a row's process (out of memory, a crash, its time limit) is the row's
result, and ends no other. Rows take turns (A B A B), so that what else the machine does falls on
all of them; what has failed once is not tried again.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from firstlight.bench.models import SMALL, find_model
from firstlight.bench.options import StepsBench, require_positive
from firstlight.console import progress_bar
from firstlight.errors import ConfigError
from firstlight.hardware.device import Hardware, find_hardware
from firstlight.models import ModelConfig
from firstlight.models.accounting import count_parameters, meta_model, train_flops_per_token

#: Errors that say that a row can't be measured here, rather than that it went wrong.
_REFUSALS = ("ConfigError", "MissingDependencyError", "ModelError", "TimeoutError")

#: Result of one measurement, or {"error": ...}; see `process.ask`.
Found = Mapping[str, Any]


@dataclass
class RowOutcome:
    """Results of a row.

    Attributes:
        digest: `Row.digest` of the row when it was measured.
        runs: the measurement's results, one for each turn.
        seconds: duration of each turn, the start of its process included.
        problem: the reason why a turn has no result; "" while there is none.
        cut_after: seconds after which the end of a call cut a turn off; 0 if none did.
        refused: True if the problem is that firstlight refused the row, or that time was up.
    """

    digest: str = ""
    runs: list[dict[str, Any]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    problem: str = ""
    cut_after: float = 0.0
    refused: bool = False

    def add(self, found: Found, seconds: float = 0.0) -> None:
        """Note the result of a turn, or the reason why it has none."""
        if "error" not in found:
            self.runs.append(dict(found))
            self.seconds.append(seconds)
            return
        self.problem = " ".join(str(found["error"]["message"]).split())
        self.refused = found["error"]["type"] in _REFUSALS

    def expected_seconds(self, declared: float) -> float:
        """Expected duration of the next turn, if `declared` is that of the first."""
        if self.seconds:
            return 1.2 * self.seconds[-1]
        return max(declared, 1.5 * self.cut_after)

    @property
    def is_done(self) -> bool:
        """True if a turn was tried."""
        return bool(self.runs or self.problem)

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
        title: the benchmark's name.
        names: the rows' names, in their order.
        turns: measurements of each row.
        outcome_of: function from a name to the outcome that the row's turns are added to; rows
            that share one are measured once.
        measure: function from a name to the result of one measurement.
        on_turn: called after every measurement.
        before_turn: called before each turn of all rows.
    """
    with progress_bar() as progress:
        task = progress.add_task(title, total=turns * len(names))
        for turn in range(turns):
            before_turn()
            for name in names:
                progress.update(task, description=f"{title}: {name}")
                outcome = outcome_of(name)
                # What failed once fails again.
                if not outcome.problem and len(outcome.runs) == turn:
                    outcome.add(measure(name))
                    on_turn()
                progress.advance(task)


def run_bench(
    title: str,
    names: Sequence[str],
    turns: int,
    measure: Callable[[str], Found],
    summarize: Callable[[dict[str, RowOutcome]], dict[str, Any]],
    on_run: Callable[[dict[str, Any]], None],
    before_turn: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Measure all rows of a benchmark; see `take_turns`.

    Args:
        title, names, turns, measure, before_turn: arguments of `take_turns`.
        summarize: function from the outcomes so far to the result.
        on_run: called with the result so far after every measurement, so that an interruption
            leaves it.

    Returns:
        The result, with "complete".
    """
    outcomes = {name: RowOutcome() for name in names}

    def result(complete: bool) -> dict[str, Any]:
        return {**summarize(outcomes), "complete": complete}

    take_turns(
        title,
        names,
        turns,
        outcomes.__getitem__,
        measure,
        lambda: on_run(result(False)),
        before_turn,
    )
    done = result(True)
    on_run(done)
    return done


def machine_facts(hardware: Hardware) -> dict[str, Any]:
    """Facts of this machine that stand in every result."""
    return {
        "name": hardware.name,
        "device": str(hardware.device),
        "memory_bytes": hardware.memory_bytes,
        "threads": torch.get_num_threads(),
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "torch": str(torch.__version__),
    }


def has_package(name: str) -> bool:
    """True if a package is installed."""
    return importlib.util.find_spec(name) is not None


@dataclass(frozen=True)
class StepsPlan:
    """A `StepsBench` in which nothing is open; see there."""

    name: str
    model: ModelConfig
    hardware: Hardware
    seq_len: int
    micro_batch_size: int
    steps: int
    repeats: int

    def head(self, warmup_steps: int) -> dict[str, Any]:
        """The part of a result that is known before anything is measured."""
        model = meta_model(self.model)
        return {
            "model": self.name,
            "parameters": count_parameters(model).total,
            "seq_len": self.seq_len,
            "micro_batch_size": self.micro_batch_size,
            "steps": self.steps,
            "warmup_steps": warmup_steps,
            "repeats": self.repeats,
            "flops_per_token": train_flops_per_token(model, self.seq_len),
            "machine": machine_facts(self.hardware),
        }


def plan_steps(bench: StepsBench, command: str) -> StepsPlan:
    """Decide what is open.

    Raises:
        ConfigError: a value is out of range, or the model or the device unknown.
    """
    hardware = find_hardware(bench.device)
    if hardware.device.type not in ("cpu", "cuda"):
        raise ConfigError(f"{command} runs on cpu and cuda, not on {hardware.device.type}")
    name = bench.model or (SMALL if bench.quick else "gpt2-124m")
    model = find_model(name)
    on_gpu = hardware.device.type == "cuda"
    limit = model.max_position_embeddings
    usual = {
        "seq_len": min(256 if bench.quick else 1024, limit),
        "micro_batch_size": 16 if on_gpu else 4,
        "steps": 20 if on_gpu else 4,
        "repeats": 1 if bench.quick else 3,
    }
    given = {key: getattr(bench, key) for key in usual}
    chosen = {key: usual[key] if value is None else value for key, value in given.items()}
    require_positive(**chosen)
    if chosen["seq_len"] > limit:
        raise ConfigError(f"seq_len {chosen['seq_len']} is more than {name}'s context of {limit}")
    return StepsPlan(name, model, hardware, **chosen)


def steps_title(result: Mapping[str, Any]) -> str:
    """Heading of a picture of a result."""
    size = f"{result['micro_batch_size']} x {result['seq_len']} tokens a step"
    end = "" if result["complete"] else " (not complete)"
    return f"{result['model']}, {size}; {result['machine']['name']}{end}"

"""Runs the rows of `firstlight bench methods`, each time in a fresh process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from firstlight.bench.forked import ForkServer, end_group, signals_waiting
from firstlight.bench.fresh_process import last_words
from firstlight.bench.methods_rows import Row, changes_up_to, recipe_of
from firstlight.console import progress_bar
from firstlight.errors import ConfigError
from firstlight.hardware.environment import TRAINING

#: The tables' names: each method alone, and each added to those before it.
ALONE, LADDER = "alone", "ladder"

TIME_IS_UP = "the time of --quick was over"

#: Errors that say that a method can't work here, rather than that it went wrong.
_REFUSALS = ("ConfigError", "MissingDependencyError", "ModelError")


@dataclass
class Outcome:
    """What came of one recipe, which may stand in both tables.

    Attributes:
        changes: its keys (`section.key`), beside the plain recipe's.
        problem: why it isn't measured, or not any more; "" while nothing went wrong.
        failed: whether the problem came up in running.
        runs: what `methods_once` said, a turn each.
    """

    changes: Mapping[str, Any]
    problem: str = ""
    failed: bool = False
    runs: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Work:
    """What every run has in common.

    Attributes:
        plain: values of the recipe that the rows change.
        data: a file of `write_tokens`.
        caches: a folder for what torch.compile keeps, so that the first turn compiles.
        steps: timed steps a run.
        warmup_steps: steps before those.
        deadline: of `time.monotonic`; None is none.
        server: starts the processes that live in the environment of training; None starts each
            from nothing.
    """

    plain: Mapping[str, Any]
    data: Path
    caches: Path
    steps: int
    warmup_steps: int
    deadline: float | None
    server: ForkServer | None = None


class Runner:
    """Runs rows in turns, and knows what came of each.

    Args:
        tables: the rows of ALONE and LADDER.
        skipped: (table, row's name) -> why it is not tried.
    """

    def __init__(
        self, tables: Mapping[str, Sequence[Row]], skipped: Mapping[tuple[str, str], str]
    ) -> None:
        self.tables = tables
        self.outcomes = {
            (table, row.name): Outcome(row.changes, skipped[table, row.name])
            for table, rows in tables.items()
            for row in rows
            if (table, row.name) in skipped
        }
        self._by_recipe: dict[tuple[str, bool], Outcome] = {}

    def run(self, work: Work, repeats: int, on_run: Callable[[], None]) -> None:
        """Measure all rows, in `repeats` turns.

        Args:
            on_run: called after every run.
        """
        order = self._order()
        with progress_bar() as progress:
            task = progress.add_task("methods", total=repeats * len(order))
            for turn in range(repeats):
                for table, row in order:
                    progress.update(task, description=f"{table}: {row.name}")
                    outcome = self._outcome(table, row)
                    # A recipe that stands in both tables had its turn already.
                    if not outcome.problem and len(outcome.runs) == turn:
                        measure(outcome, row.huge_pages, work)
                        on_run()
                    progress.advance(task)

    def _order(self) -> list[tuple[str, Row]]:
        """The ladder first, and what compiles last: where time is short, that is left out."""
        ladder = [(LADDER, row) for row in self.tables[LADDER]]
        alone = [(ALONE, row) for row in self.tables[ALONE]]
        compiling = [i for i, (_, row) in enumerate(ladder) if _compiles(row)]
        first = compiling[0] if compiling else len(ladder)
        return [
            *ladder[:first],
            *(entry for entry in alone if not _compiles(entry[1])),
            *ladder[first:],
            *(entry for entry in alone if _compiles(entry[1])),
        ]

    def _outcome(self, table: str, row: Row) -> Outcome:
        """The row's outcome so far. A rung's recipe is made when it is first asked for."""
        if (table, row.name) in self.outcomes:
            return self.outcomes[table, row.name]
        changes = dict(row.changes)
        if table == LADDER:
            ladder = self.tables[LADDER]
            left_out = {
                name
                for (where, name), it in self.outcomes.items()
                if where == LADDER and it.problem
            }
            changes = changes_up_to(ladder, list(ladder).index(row), left_out)
        recipe = (json.dumps(changes, sort_keys=True), row.huge_pages)
        outcome = self._by_recipe.setdefault(recipe, Outcome(changes))
        self.outcomes[table, row.name] = outcome
        return outcome


def _compiles(row: Row) -> bool:
    return "efficiency.compile" in row.changes


def measure(outcome: Outcome, huge_pages: bool, work: Work) -> None:
    """Run an outcome's recipe once more; the run, or what went wrong, is put into it."""
    try:
        recipe = recipe_of(work.plain, outcome.changes)
    except ConfigError as error:
        outcome.problem = str(error)
        return
    request = {
        "recipe": recipe.model_dump(),
        "data": str(work.data),
        "warmup_steps": work.warmup_steps,
        "steps": work.steps,
        "threads": torch.get_num_threads(),
    }
    seconds = None if work.deadline is None else work.deadline - time.monotonic()
    try:
        if seconds is not None and seconds <= 0:
            raise TimeoutError
        if work.server is not None and not huge_pages:
            code, out, err = work.server.run(request, seconds)
        else:
            environment = child_environment(huge_pages, work.caches)
            code, out, err = _run_process(request, environment, seconds)
    except TimeoutError:
        outcome.problem = TIME_IS_UP
        return
    if code:
        outcome.problem, outcome.failed = last_words(code, err), True
        return
    result = json.loads(out.splitlines()[-1])
    if "error" in result:
        outcome.problem = result["error"]["message"]
        outcome.failed = result["error"]["type"] not in _REFUSALS
        return
    outcome.runs.append(result)


def child_environment(huge_pages: bool, caches: Path) -> dict[str, str]:
    """That of `firstlight train`, where what the person has set stands.

    Args:
        huge_pages: whether torch takes them for large tensors.
        caches: for what torch.compile keeps.
    """
    environment = TRAINING | os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(caches)}
    if huge_pages:
        environment["THP_MEM_ALLOC_ENABLE"] = "1"
    return environment


def _run_process(
    request: Mapping[str, Any], environment: Mapping[str, str], seconds: float | None
) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of `methods_once`. Whatever interrupts it ends the process, and
    those that it started.

    Raises:
        TimeoutError: it took longer than `seconds`.
    """
    process = None
    try:
        with signals_waiting():
            process = subprocess.Popen(
                # -P: what lies in the current folder is not imported.
                [sys.executable, "-P", "-m", "firstlight.bench.methods_once", json.dumps(request)],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                encoding="utf-8",
                errors="replace",
                # A group of its own, torch.compile's helpers among them.
                start_new_session=True,
            )
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        raise TimeoutError from None
    finally:
        if process is not None:
            with process:  # waits for it and closes its pipes
                # No helper outlives its row: it would slow the next one.
                end_group(process.pid)
    return process.returncode, out, err

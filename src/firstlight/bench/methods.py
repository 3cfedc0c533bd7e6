"""`firstlight bench methods`: speed and memory of each efficiency method on this machine.

There are two tables:

- "alone": each method alone, compared with the plain run. Plain is fp32, attention as two matrix
  products, AdamW parameter by parameter, nothing compiled, one micro-batch per step.
- "ladder": the methods of Raschka's "PyTorch Performance Tips for Faster LLM Training" in its
  order, each added to those before it. The first row of a GPT-2 has its mask, LayerNorm and GELU
  written out (`written_out`).

Fresh processes train every row for a few steps (`steps` describes the measurements). With
`quick` on a CPU, they are forks of one process that has only done the imports. The rows take turns
(A B C, A B C). The number of threads, the data and the initial weights are the same for all. Rates
are medians over the timed steps of all turns. A row that can't run on this machine is skipped with
the reason; a row that fails is shown with its error, and the ladder continues without it.

MFU is relative to the same rate in all rows: the machine's rate of bf16 matrix products
(`hardware.device.peak_flops`), or of fp32 products if a CPU computes them faster. It is the higher
of the values at the start and at the end. Operations that are computed twice, as with activation
checkpointing, count once.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from firstlight.bench.methods_rows import (
    ALONE,
    LADDER,
    PLAIN,
    PROCESSES,
    WRITTEN_OUT,
    MethodOutcome,
    MethodRow,
    alone_rows,
    changes_up_to,
    ladder_rows,
    larger_batch,
    plain_recipe,
    summarize,
    why_skipped,
)
from firstlight.bench.options import Keep, MethodsBench, Result, require_known
from firstlight.bench.runner import Found, take_turns
from firstlight.bench.steps import StepsPlan, plan_steps, write_tokens
from firstlight.errors import ConfigError
from firstlight.hardware.device import Hardware, peak_flops
from firstlight.hardware.fresh_process import (
    ForkServer,
    ask,
    ask_ranks,
    error_of,
    training_environment,
)
from firstlight.models import GPT2Config
from firstlight.recipe import parse_resolved_recipe
from firstlight.recipe.load import changed_recipe

_MODULE = "firstlight.bench.steps"

TIME_IS_UP = "the time of --quick was over"

#: Seconds after which `--quick` starts no measurement, so that it ends within five minutes.
QUICK_SECONDS = 275.0

#: Number of untimed steps: a CPU's heap still grows in the fourth step. `--quick` has only two.
WARMUP_STEPS, QUICK_WARMUP_STEPS = 5, 2

Tables = Mapping[str, Sequence[MethodRow]]


def recipe_keys(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Those changes of a row whose keys are keys of a recipe."""
    return {key: value for key, value in changes.items() if key not in (WRITTEN_OUT, PROCESSES)}


def processes_here(hardware: Hardware) -> int:
    """The number of processes of the row `+ddp`: one for each GPU, two on a CPU with several
    threads, otherwise 1."""
    if hardware.device.type == "cuda":
        return torch.cuda.device_count()
    return 2 if hardware.device.type == "cpu" and torch.get_num_threads() > 1 else 1


def tables_of(bench: MethodsBench, plan: StepsPlan) -> dict[str, list[MethodRow]]:
    """The chosen rows of both tables; see `choose_rows`."""
    size = (plan.micro_batch_size, plan.seq_len, plan.hardware)
    is_gpt2 = isinstance(plan.model, GPT2Config)
    processes = processes_here(plan.hardware)
    ladder = ladder_rows(plan.micro_batch_size, plan.hardware, is_gpt2=is_gpt2, processes=processes)
    return choose_rows({ALONE: alone_rows(*size), LADDER: ladder}, bench.rows)


def choose_rows(
    tables: dict[str, list[MethodRow]], names: Sequence[str]
) -> dict[str, list[MethodRow]]:
    """The rows that are chosen by their names or by the name of their table; all without names.

    A named row of the table "alone" brings the plain run, with which it is compared. A named row of
    the ladder brings the rows before it, whose methods it includes.

    Args:
        tables: all rows by table.
        names: names of rows and tables.

    Raises:
        ConfigError: a name is unknown.
    """
    rows = dict.fromkeys(row.name for rows in tables.values() for row in rows)
    require_known("row", names, [*tables, *rows])
    if not names:
        return tables
    alone = [row for row in tables[ALONE] if ALONE in names or row.name in {PLAIN.name, *names}]
    ladder = tables[LADDER]
    if LADDER not in names:
        named = [i for i, row in enumerate(ladder) if row is not PLAIN and row.name in names]
        ladder = ladder[: named[-1] + 1] if named else []
    if ladder and alone == [PLAIN] and PLAIN.name not in names:
        alone = []
    return {ALONE: alone, LADDER: ladder}


def bench_methods(bench: MethodsBench, on_run: Keep) -> Result:
    """Measure all rows.

    Args:
        bench: the options.
        on_run: function that is called with the result so far after each run.

    Returns:
        The values of `StepsPlan.head`, "quick", "complete", and under "alone" and "ladder" the rows
        of each table as `summarize` returns them. "machine" also has the base of MFU,
        "matmul_flops", and its "matmul_dtype".

    Raises:
        ConfigError: an option is invalid.
        InputError: this Python has no source of its standard library to train on.
        StorageError: a file system error.
    """
    deadline = time.monotonic() + QUICK_SECONDS if bench.quick else None
    plan = plan_steps(bench, "bench methods")
    tables = tables_of(bench, plan)
    warmup_steps = QUICK_WARMUP_STEPS if bench.quick else WARMUP_STEPS
    head = {**plan.head(warmup_steps), "quick": bench.quick}
    machine = head["machine"]
    machine |= _ceiling(plan.hardware)
    runs = MethodRuns(tables)
    for label, (_, row) in runs.rows.items():
        reason = why_skipped(row, plan.hardware, plan.micro_batch_size, bench.quick)
        if reason:
            runs.outcomes[label] = MethodOutcome(problem=reason, refused=True, changes=row.changes)

    def result(complete: bool) -> Result:
        return {**head, "complete": complete, **runs.summaries(head)}

    with contextlib.ExitStack() as stack:
        temporary = tempfile.TemporaryDirectory(
            prefix="firstlight-bench-", ignore_cleanup_errors=True
        )
        folder = Path(stack.enter_context(temporary))
        server = None
        if bench.quick and plan.hardware.device.type == "cpu":
            environment = child_environment(False, folder / "caches")
            server = stack.enter_context(ForkServer(environment, _MODULE))
        rows_a_step = larger_batch(plan.micro_batch_size)["batch.micro_batch_size"]
        rows_a_step *= processes_here(plan.hardware)
        count = (warmup_steps + plan.steps) * rows_a_step * plan.seq_len + 1
        data = folder / "tokens.safetensors"
        write_tokens(data, count, plan.model.vocab_size)
        device = str(plan.hardware.device)
        plain = plain_recipe(plan.model, device, plan.seq_len, plan.micro_batch_size)
        request = {"data": str(data), "warmup_steps": warmup_steps, "steps": plan.steps}
        work = MethodsWork(plain, request, folder / "caches", deadline, server)
        runs.measure_all(work, plan.repeats, lambda: on_run(result(False)))
    # The machine may have been slower at the start, and MFU would then be too high.
    machine |= max(machine, _ceiling(plan.hardware), key=lambda found: found["matmul_flops"])
    done = result(True)
    on_run(done)
    return done


def _ceiling(hardware: Hardware) -> dict[str, Any]:
    """The base of MFU: "matmul_flops", FLOP/s of matrix products, and their "matmul_dtype"."""
    dtypes = [torch.bfloat16] if hardware.bf16 else []
    tries = 1
    if hardware.device.type == "cpu":
        # Some CPUs convert bf16 and multiply it at half of fp32's rate. Other work on the machine
        # can only lower the measured value.
        dtypes, tries = [*dtypes, torch.float32], 9
    rates = {
        dtype: max(peak_flops(hardware.device, dtype) for _ in range(tries))
        for dtype in dtypes or [torch.float32]
    }
    fastest = max(rates, key=lambda dtype: rates[dtype])
    return {"matmul_flops": rates[fastest], "matmul_dtype": str(fastest).removeprefix("torch.")}


@dataclass(frozen=True)
class MethodsWork:
    """Settings that all runs have in common.

    Attributes:
        plain: values of the recipe that the rows change.
        request: "data", "warmup_steps" and "steps" of every request of `steps`.
        caches: cache folder of torch.compile; it is empty at first, so that the first turn
            compiles.
        deadline: time by `time.monotonic` after which nothing is measured; None without a limit.
        server: process whose forks measure the rows that need no other environment; None starts a
            fresh Python for every row.
    """

    plain: Mapping[str, Any]
    request: Mapping[str, Any]
    caches: Path
    deadline: float | None = None
    server: ForkServer | None = None

    def measure(self, changes: Mapping[str, Any], *, huge_pages: bool) -> Found:
        """Train the plain recipe with some keys changed, once.

        Args:
            changes: values by key, see `MethodRow.changes`.
            huge_pages: see `MethodRow.huge_pages`.

        Returns:
            The result of `steps`, or {"error": {"type", "message"}}.
        """
        values = changed_recipe(self.plain, recipe_keys(changes))
        try:
            recipe = parse_resolved_recipe(values, "this method")
        except ConfigError as error:
            return error_of("ConfigError", str(error))
        request = {
            "recipe": recipe.model_dump(),
            "resolved": True,
            **self.request,
            "threads": torch.get_num_threads(),
            "written_out": list(changes.get(WRITTEN_OUT, ())),
        }
        seconds = None if self.deadline is None else self.deadline - time.monotonic()
        if seconds is not None and seconds <= 0:
            return error_of("TimeoutError", TIME_IS_UP)
        environment = child_environment(huge_pages, self.caches)
        if (processes := changes.get(PROCESSES, 1)) > 1:
            found = ask_ranks(_MODULE, request, environment, processes, seconds)
        elif self.server is not None and not huge_pages:
            found = self.server.ask(request, seconds)
        else:
            found = ask(_MODULE, request, environment, seconds)
        if found.get("error", {}).get("type") == "TimeoutError":
            return error_of("TimeoutError", TIME_IS_UP)
        return found


def child_environment(huge_pages: bool, caches: Path) -> dict[str, str]:
    """Environment variables of `firstlight train`, with the compiler's cache and huge pages set.

    Args:
        huge_pages: True lets torch take huge pages for large tensors.
        caches: cache folder of torch.compile.
    """
    environment = training_environment() | {"TORCHINDUCTOR_CACHE_DIR": str(caches)}
    return environment | ({"THP_MEM_ALLOC_ENABLE": "1"} if huge_pages else {})


class MethodRuns:
    """The rows of both tables with their outcomes.

    Attributes:
        rows: table and row by their label, "table: name".
        outcomes: outcomes by label.
    """

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self.rows = {
            f"{table}: {row.name}": (table, row) for table, rows in tables.items() for row in rows
        }
        self.outcomes: dict[str, MethodOutcome] = {}
        self._by_recipe: dict[tuple[str, bool], MethodOutcome] = {}

    def measure_all(self, work: MethodsWork, repeats: int, on_run: Callable[[], None]) -> None:
        """Measure all rows in `repeats` turns, and call `on_run` after every run."""

        def measure(label: str) -> Found:
            changes = self._outcome(label).changes
            return work.measure(changes, huge_pages=self.rows[label][1].huge_pages)

        take_turns("methods", self._order(), repeats, self._outcome, measure, on_run)

    def _order(self) -> list[str]:
        """The labels in the order of measurement: first those that don't compile, then those that
        do, in both cases the ladder first. If the time runs out, the last ones are not measured."""
        ladder = [label for label, (table, _) in self.rows.items() if table == LADDER]
        alone = [label for label in self.rows if label not in ladder]
        compiling = [label for label in self.rows if "efficiency.compile" in self._changes(label)]
        first = next((i for i, label in enumerate(ladder) if label in compiling), len(ladder))
        return [
            *ladder[:first],
            *(label for label in alone if label not in compiling),
            *ladder[first:],
            *(label for label in alone if label in compiling),
        ]

    def _changes(self, label: str) -> Mapping[str, Any]:
        return self.rows[label][1].changes

    def _outcome(self, label: str) -> MethodOutcome:
        """The row's outcome so far.

        The changes of a row of the ladder are determined when the row is measured for the first
        time, since they leave out the rows before it that failed.
        """
        if label in self.outcomes:
            return self.outcomes[label]
        table, row = self.rows[label]
        changes = dict(row.changes)
        if table == LADDER:
            ladder = self.tables[LADDER]
            left_out = {
                self.rows[other][1].name
                for other, outcome in self.outcomes.items()
                if self.rows[other][0] == LADDER and outcome.problem
            }
            changes = changes_up_to(ladder, list(ladder).index(row), left_out)
        recipe = (json.dumps(changes, sort_keys=True), row.huge_pages)
        # A recipe that is in both tables is measured once.
        outcome = self._by_recipe.setdefault(recipe, MethodOutcome(changes=changes))
        self.outcomes[label] = outcome
        return outcome

    def summaries(self, head: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
        """Each table's rows; see `summarize`."""
        return {
            table: summarize(
                [(row, self.outcomes.get(f"{table}: {row.name}")) for row in rows], head
            )
            for table, rows in self.tables.items()
        }

"""`firstlight bench methods`: what each efficiency method buys on this machine.

Two tables: each method alone beside the plain run, and the ladder, each method added to those
before it. Plain is fp32, attention as two matrix products, AdamW parameter by parameter, nothing
compiled, one micro-batch a step.

Every row is trained for a few steps by fresh processes (`methods_once` says what they measure;
with `quick` on a CPU they are forks of one that has only imported what all need); the rows take
turns (A B C, A B C); the number of threads, the data and the initial weights are
the same for all. Rates are medians over the timed steps of all turns. A row that can't run here is
skipped and says why; one that fails says that, and the ladder goes on without it.

MFU has one base for all rows, so that rows compare: the machine's rate of bf16 matrix products, or
of fp32 ones where a CPU multiplies those faster, as measured at the start and at the end, whichever
is higher. Operations that are done twice, as with activation checkpointing, count once.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from firstlight.bench.forked import ForkServer
from firstlight.bench.methods_data import write_tokens
from firstlight.bench.methods_rows import (
    PLAIN,
    SMALL,
    Row,
    alone_rows,
    find_model,
    ladder_rows,
    larger_batch,
    plain_recipe,
    why_skipped,
)
from firstlight.bench.methods_run import ALONE, LADDER, Outcome, Runner, Work, child_environment
from firstlight.errors import ConfigError, nearest
from firstlight.hardware.device import Hardware, find_hardware, peak_flops
from firstlight.models import ModelConfig
from firstlight.models.accounting import count_parameters, meta_model, train_flops_per_token

#: Seconds after which `--quick` measures no more: the result is there within five minutes.
QUICK_SECONDS = 275.0

#: Steps that are not timed: a CPU's heap still grows in the fourth. `--quick` takes the first two.
WARMUP_STEPS, QUICK_WARMUP_STEPS = 5, 2


@dataclass(frozen=True)
class MethodsBench:
    """What is to be measured.

    Attributes:
        model: a name or recipe, see `find_model`; None is gpt2-124m, or with `quick` the small one.
        seq_len: tokens a row of a batch; None is 1024, with `quick` 256, or the model's context
            where that is less.
        micro_batch_size: rows a step of the plain run; None is 4 on a CPU, 16 on a GPU.
        steps: timed steps a run; None is 4 on a CPU, 20 on a GPU.
        repeats: turns of all rows; None is 3, with `quick` 1.
        rows: names of rows or tables; empty is all. The plain run is always among them.
        device: as in a recipe's `run.device`.
        quick: leave out some rows, and measure no more after `QUICK_SECONDS`.
    """

    model: str | None = None
    seq_len: int | None = None
    micro_batch_size: int | None = None
    steps: int | None = None
    repeats: int | None = None
    rows: Sequence[str] = ()
    device: str = "auto"
    quick: bool = False


@dataclass(frozen=True)
class Plan:
    """A `MethodsBench` with everything worked out; see there."""

    name: str
    model: ModelConfig
    hardware: Hardware
    seq_len: int
    micro_batch_size: int
    steps: int
    repeats: int
    quick: bool
    warmup_steps: int
    tables: dict[str, list[Row]]


def make_plan(bench: MethodsBench) -> Plan:
    """Work out what is left open.

    Raises:
        ConfigError: a value is out of range, or a name unknown.
    """
    hardware = find_hardware(bench.device)
    if hardware.device.type not in ("cpu", "cuda"):
        raise ConfigError(f"bench methods runs on cpu and cuda, not on {hardware.device.type}")
    name = bench.model or (SMALL if bench.quick else "gpt2-124m")
    model = find_model(name)
    on_gpu = hardware.device.type == "cuda"
    limit = model.max_position_embeddings
    numbers = {
        "seq_len": (bench.seq_len, min(256 if bench.quick else 1024, limit)),
        "micro_batch_size": (bench.micro_batch_size, 16 if on_gpu else 4),
        "steps": (bench.steps, 20 if on_gpu else 4),
        "repeats": (bench.repeats, 1 if bench.quick else 3),
    }
    chosen = {key: usual if given is None else given for key, (given, usual) in numbers.items()}
    for key, value in chosen.items():
        if value < 1:
            raise ConfigError(f"{key} is {value}: at least 1 is needed")
    if chosen["seq_len"] > limit:
        raise ConfigError(f"seq_len {chosen['seq_len']} is more than {name}'s context of {limit}")
    shape = (chosen["micro_batch_size"], chosen["seq_len"])
    tables = {ALONE: alone_rows(*shape, hardware), LADDER: ladder_rows(*shape, hardware)}
    return Plan(
        name=name,
        model=model,
        hardware=hardware,
        quick=bench.quick,
        warmup_steps=QUICK_WARMUP_STEPS if bench.quick else WARMUP_STEPS,
        tables=choose_rows(tables, bench.rows),
        **chosen,
    )


def choose_rows(tables: dict[str, list[Row]], names: Sequence[str]) -> dict[str, list[Row]]:
    """The rows that are named, or whose table is, with the plain run; all where none is named.

    A rung of the ladder brings those below it, which it stands on.

    Raises:
        ConfigError: a name is unknown.
    """
    known = [*tables, *dict.fromkeys(row.name for rows in tables.values() for row in rows)]
    for name in names:
        if name not in known:
            hint = nearest(name, known) or f": use {', '.join(known)}"
            raise ConfigError(f"row '{name}' is unknown{hint}")
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


def bench_methods(plan: Plan, on_run: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Measure all rows.

    Args:
        plan: what.
        on_run: called with the result so far after every run, so that an interruption leaves it.

    Returns:
        "model" and its "parameters", "seq_len", "micro_batch_size", "steps", "warmup_steps",
        "repeats", "quick", "flops_per_token", "machine", "complete", and for each table ("alone",
        "ladder") its rows as `summarize` gives them.

    Raises:
        InputError: there is nothing to train on.
        StorageError: the disk refused.
    """
    deadline = time.monotonic() + QUICK_SECONDS if plan.quick else None
    head = _head(plan)
    reasons = {
        (table, row.name): why_skipped(row, plan.hardware, plan.micro_batch_size, plan.quick)
        for table, rows in plan.tables.items()
        for row in rows
    }
    runner = Runner(plan.tables, {place: reason for place, reason in reasons.items() if reason})

    def result(complete: bool) -> dict[str, Any]:
        tables = {
            table: summarize([(row, runner.outcomes.get((table, row.name))) for row in rows], head)
            for table, rows in plan.tables.items()
        }
        return {**head, "complete": complete, **tables}

    with contextlib.ExitStack() as stack:
        temporary = tempfile.TemporaryDirectory(
            prefix="firstlight-bench-", ignore_cleanup_errors=True
        )
        folder = Path(stack.enter_context(temporary))
        server = None
        if plan.quick and plan.hardware.device.type == "cpu":
            environment = child_environment(True, folder / "caches")
            server = stack.enter_context(ForkServer(environment))
        rows_a_step = larger_batch(plan.micro_batch_size)["batch.micro_batch_size"]
        count = (plan.warmup_steps + plan.steps) * rows_a_step * plan.seq_len + 1
        write_tokens(folder / "tokens.safetensors", count, plan.model.vocab_size)
        work = Work(
            plain=plain_recipe(
                plan.model, str(plan.hardware.device), plan.seq_len, plan.micro_batch_size
            ),
            data=folder / "tokens.safetensors",
            caches=folder / "caches",
            steps=plan.steps,
            warmup_steps=plan.warmup_steps,
            deadline=deadline,
            server=server,
        )
        runner.run(work, plan.repeats, lambda: on_run(result(False)))
    # The machine may have been slower at the start: a share above 100 % would say nothing.
    machine = head["machine"]
    machine |= max(machine, _ceiling(plan.hardware), key=lambda found: found["matmul_flops"])
    done = result(True)
    on_run(done)
    return done


def _head(plan: Plan) -> dict[str, Any]:
    model, hardware = meta_model(plan.model), plan.hardware
    return {
        "model": plan.name,
        "parameters": count_parameters(model).total,
        "seq_len": plan.seq_len,
        "micro_batch_size": plan.micro_batch_size,
        "steps": plan.steps,
        "warmup_steps": plan.warmup_steps,
        "repeats": plan.repeats,
        "quick": plan.quick,
        "flops_per_token": train_flops_per_token(model, plan.seq_len),
        "machine": {
            "name": hardware.name,
            "device": str(hardware.device),
            "memory_bytes": hardware.memory_bytes,
            "threads": torch.get_num_threads(),
            "cpus": os.cpu_count(),
            "torch": str(torch.__version__),
            **_ceiling(hardware),
        },
    }


def _ceiling(hardware: Hardware) -> dict[str, Any]:
    """The base of MFU: "matmul_flops", FLOP/s of matrix products, and their "matmul_dtype"."""
    dtypes = [torch.bfloat16] if hardware.bf16 else []
    tries = 1
    if hardware.device.type == "cpu":
        # Some CPUs convert bf16 and multiply it at half of fp32's rate. Other work on the machine
        # only ever lowers what is measured.
        dtypes, tries = [*dtypes, torch.float32], 9
    rates = {
        dtype: max(peak_flops(hardware.device, dtype) for _ in range(tries))
        for dtype in dtypes or [torch.float32]
    }
    fastest = max(rates, key=lambda dtype: rates[dtype])
    return {
        "matmul_flops": rates[fastest],
        "matmul_dtype": str(fastest).removeprefix("torch."),
    }


def summarize(
    rows: Sequence[tuple[Row, Outcome | None]], head: dict[str, Any]
) -> list[dict[str, Any]]:
    """The medians of a table's rows and their ratios to its first row.

    Args:
        rows: with what came of them; None is nothing yet.
        head: "seq_len", "micro_batch_size", "flops_per_token" and "machine" of the result.

    Returns:
        For each row its "name", its "keys" of the recipe, "status" ("measured", "skipped",
        "failed", "waiting"), the "reason" for that, and where it is measured:
        "micro_batch_size", "gradient_accumulation_steps"; "samples_per_second", the median over
        all timed steps, with "_min" and "_max"; "tokens_per_second"; "mfu"; "peak_bytes";
        "speed_ratio" and "memory_ratio", to the first row (None without it); "final_loss", the
        last step's; "first_step_seconds" of the first turn; "runs".
    """
    result = [_summary(row, outcome, head) for row, outcome in rows]
    if not result or result[0]["status"] != "measured":
        return result
    first = result[0]
    for row in result:
        if row["status"] == "measured":
            row["speed_ratio"] = row["samples_per_second"] / first["samples_per_second"]
            row["memory_ratio"] = row["peak_bytes"] / first["peak_bytes"]
    return result


def _summary(row: Row, outcome: Outcome | None, head: dict[str, Any]) -> dict[str, Any]:
    changes = dict(row.changes if outcome is None else outcome.changes)
    entry: dict[str, Any] = {"name": row.name, "keys": changes, "huge_pages": row.huge_pages}
    if outcome is None or not (outcome.runs or outcome.problem):
        return {**entry, "status": "waiting", "reason": "not measured yet"}
    if not outcome.runs:
        status = "failed" if outcome.failed else "skipped"
        return {**entry, "status": status, "reason": outcome.problem}
    micro = changes.get("batch.micro_batch_size", head["micro_batch_size"])
    passes = changes.get("batch.gradient_accumulation_steps", 1)
    rates = [micro * passes / seconds for run in outcome.runs for seconds in run["step_seconds"]]
    tokens_per_second = statistics.median(rates) * head["seq_len"]
    return {
        **entry,
        "status": "measured",
        "reason": outcome.problem,
        "micro_batch_size": micro,
        "gradient_accumulation_steps": passes,
        "samples_per_second": statistics.median(rates),
        "samples_per_second_min": min(rates),
        "samples_per_second_max": max(rates),
        "tokens_per_second": tokens_per_second,
        "mfu": tokens_per_second * head["flops_per_token"] / head["machine"]["matmul_flops"],
        "peak_bytes": statistics.median(run["peak_bytes"] for run in outcome.runs),
        "speed_ratio": None,
        "memory_ratio": None,
        "final_loss": statistics.median(run["losses"][-1] for run in outcome.runs),
        "first_step_seconds": outcome.runs[0]["first_step_seconds"],
        "runs": outcome.runs,
    }

"""`benchmarks scaling`: tokens per second, overhead of distribution, and memory, by engine
and number of processes.

Each row is a run of several processes on this machine with the same micro-batch size, so a step of
n processes has n times the tokens ("weak scaling"). With the engines tensor and pipeline, the
processes compute the same sequences together, so a step has the tokens of one process. On a CPU, n
processes share the cores evenly; on GPUs, each process has a separate GPU. The rows take turns;
numbers are medians over the turns.

A rank trains a model with random weights on random tokens, first with the row's engine, and then
alone, all ranks at the same time. The step with the engine takes more time, for exchanging
gradients and weights and for waiting for other ranks: this is the overhead.
"""

from __future__ import annotations

import gc
import importlib
import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from benchmarks.options import ScalingBench
from benchmarks.rows import has_package, run_bench
from firstlight.bench.display import Panel, draw_panels
from firstlight.bench.models import find_model
from firstlight.bench.rows import Found, Keep, Result, RowOutcome, require_known, require_positive
from firstlight.bench.steps import EPOCH_TOKENS
from firstlight.data.loader import Batch
from firstlight.errors import ConfigError
from firstlight.hardware.device import Hardware, find_hardware, machine_facts, synchronize
from firstlight.hardware.fresh_process import ask_ranks, training_environment
from firstlight.hardware.process_memory import begin_peak, peaks
from firstlight.models import empty_model
from firstlight.models.accounting import meta_model
from firstlight.parallel import barrier, find_world, gather_objects
from firstlight.parallel.engine import Engine
from firstlight.recipe import ResolvedRecipe, parse_recipe
from firstlight.recipe.resolve import facts_here, resolve
from firstlight.training.processes import run_processes
from firstlight.training.program import TrainingProgram

#: The `distributed` section of a recipe by name of the engine, for a number of processes.
ENGINES: dict[str, Callable[[int], dict[str, Any]]] = {
    "ddp": lambda _: {"engine": "ddp"},
    "fsdp": lambda _: {"engine": "fsdp"},
    "fsdp-kept": lambda _: {"engine": "fsdp", "reshard_after_forward": False},
    "fsdp-offload": lambda _: {"engine": "fsdp", "offload": "cpu"},
    "hybrid": lambda _: {"engine": "fsdp", "shard": 2},
    "tensor": lambda count: {"tensor_parallel": count},
    "pipeline": lambda count: {"pipeline": count},
    "zero-1": lambda _: {"engine": "deepspeed", "zero_stage": 1},
    "zero-2": lambda _: {"engine": "deepspeed", "zero_stage": 2},
    "zero-3": lambda _: {"engine": "deepspeed", "zero_stage": 3},
}

#: Engines whose processes compute the same sequences together.
_TOGETHER = ("tensor", "pipeline")


def scaling_rows(bench: ScalingBench) -> list[tuple[str, int]]:
    """Return the engine and number of processes of each row. The first row is one process without
    an engine.

    Without `--engines`, the rows have all engines that support the model and are installed.

    Raises:
        ConfigError: a value is out of range, or a name is unknown.
    """
    require_positive(processes=bench.nproc, steps=bench.steps, repeats=bench.repeats)
    sizes = ("seq_len", "micro_batch_size", "accumulation")
    require_positive(**{name: getattr(bench, name) for name in sizes})
    require_known("engine", bench.engines, ENGINES)
    counts = sorted({2**power for power in range(1, 20) if 2**power < bench.nproc})
    if bench.nproc > 1:
        counts.append(bench.nproc)
    model, left_out = find_model(bench.model), set()
    if not model.tensor_parallel_sizes:
        left_out.add("tensor")
    if not model.has_pipeline:
        left_out.add("pipeline")
    if not has_package("deepspeed"):
        left_out |= {"zero-1", "zero-2", "zero-3"}
    engines = bench.engines or [name for name in ENGINES if name not in left_out]
    rows = [("none", 1)]
    for count in counts:
        for name in engines:
            # With two processes, hybrid's groups of two are the same as fsdp.
            if name != "hybrid" or (count > 2 and count % 2 == 0):
                rows.append((name, count))
    return rows


def step_tokens(bench: ScalingBench, engine: str, count: int) -> int:
    """Return the tokens of a step over all processes."""
    rows = bench.micro_batch_size * (1 if engine in _TOGETHER else count)
    return bench.seq_len * rows * bench.accumulation


def bench_scaling(bench: ScalingBench, on_run: Keep) -> Result:
    """Measure all rows.

    Returns:
        "model", "parameters", "seq_len", "micro_batch_size", "accumulation", "precision",
        "repeats", "machine", "complete", and "rows": see `summarize`.

    Raises:
        ConfigError: an option is invalid, or there are fewer GPUs than processes.
    """
    hardware = find_hardware(bench.device)
    if hardware.device.type == "cuda" and bench.nproc > torch.cuda.device_count():
        raise ConfigError(
            f"{bench.nproc} processes need as many GPUs, but this machine has "
            f"{torch.cuda.device_count()}: lower --nproc"
        )
    model = meta_model(find_model(bench.model))
    head = {
        "model": bench.model,
        "parameters": sum(p.numel() for p in model.parameters()),
        "seq_len": bench.seq_len,
        "micro_batch_size": bench.micro_batch_size,
        "accumulation": bench.accumulation,
        "precision": bench.precision,
        "repeats": bench.repeats,
        "machine": {**machine_facts(hardware), "cores": os.cpu_count()},
    }
    rows = {f"{engine}, {count}": (engine, count) for engine, count in scaling_rows(bench)}
    return run_bench(
        "scaling",
        list(rows),
        bench.repeats,
        lambda name: _ask_ranks_of(bench, *rows[name], hardware),
        summarize=lambda found: {
            **head,
            "rows": summarize(bench, {rows[name]: outcome for name, outcome in found.items()}),
        },
        on_run=on_run,
    )


def _ask_ranks_of(bench: ScalingBench, engine: str, count: int, hardware: Hardware) -> Found:
    """Run a row's processes once; return the result of rank 0, or an error."""
    recipe = {
        "run": {"device": hardware.device.type},
        "data": {"dir": "-", "seq_len": bench.seq_len},
        "model": find_model(bench.model).model_dump(),
        "batch": {
            "micro_batch_size": bench.micro_batch_size,
            "gradient_accumulation_steps": bench.accumulation,
        },
        "efficiency": {"precision": bench.precision, "compile": False},
        "distributed": {} if engine == "none" else ENGINES[engine](count),
    }
    cores = os.cpu_count() or 1
    threads = max(1, cores // count) if hardware.device.type == "cpu" else torch.get_num_threads()
    request = {"recipe": recipe, "steps": bench.steps, "threads": threads}
    return ask_ranks("benchmarks.scaling", request, training_environment(), count)


def summarize(
    bench: ScalingBench, outcomes: Mapping[tuple[str, int], RowOutcome]
) -> list[dict[str, Any]]:
    """Return the medians of each row.

    Returns:
        For each row "engine", "processes" and "reason" (the error message, or ""); of a measured
        row also:

        - "tokens_per_second" over all processes
        - "speedup" relative to one process; None if that was not measured
        - "sharing_share": fraction of a step's time that is overhead; None for one process
        - "peak_bytes" of each rank, the largest over the turns
    """
    alone, result = outcomes[("none", 1)].runs, []
    for (engine, count), outcome in outcomes.items():
        good = outcome.runs
        entry: dict[str, Any] = {"engine": engine, "processes": count, "reason": outcome.problem}
        if good:
            tokens = step_tokens(bench, engine, count)
            rates = [tokens / run["step_seconds"] for run in good]
            work = tokens / step_tokens(bench, "none", 1)
            ratios = [
                work * one["step_seconds"] / run["step_seconds"]
                for one, run in zip(alone, good, strict=False)
            ]
            shares = [
                1 - work / count * run["alone_seconds"] / run["step_seconds"]
                for run in good
                if run["alone_seconds"] is not None
            ]
            entry |= {
                "tokens_per_second": statistics.median(rates),
                "speedup": statistics.median(ratios) if ratios else None,
                "sharing_share": statistics.median(shares) if shares else None,
                "peak_bytes": [
                    max(run["peak_bytes"][rank] for run in good) for rank in range(count)
                ],
            }
        result.append(entry)
    return result


def draw(result: Mapping[str, Any]) -> bytes:
    """Return a PNG of each row's tokens per second, and of the highest peak memory among its
    ranks."""
    rows = [row for row in result["rows"] if "tokens_per_second" in row]
    names = [f"{row['engine']}, {row['processes']}" for row in rows]
    rates = [row["tokens_per_second"] for row in rows]
    memory = [max(row["peak_bytes"]) / 1e6 for row in rows]
    panels = [
        Panel("tokens/s of all processes", names, rates),
        Panel("peak memory of a process, MB", names, memory, colors="tab:orange"),
    ]
    machine = result["machine"]
    return draw_panels(f"{result['model']} · {machine['name']}, {machine['cores']} cores", [panels])


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Train as one rank of a row's run, with the engine and then alone.

    Args:
        request: "recipe", values with a model; "steps", number of timed steps; "threads".

    Returns:
        The same on all ranks:

        - "step_seconds": seconds of a step with the engine: each rank's median over the steps after
          the first two, and the largest of these
        - "alone_seconds": the same of training alone; None with one rank
        - "peak_bytes" of each rank, above its level after the imports
    """
    given = parse_recipe(request["recipe"])
    if find_world().size == 1:
        given = given.model_copy(update={"distributed": type(given.distributed)()})
    torch.set_num_threads(request["threads"])
    with run_processes(given) as (hardware, engine):
        facts = facts_here(hardware, processes=engine.world.size, epoch_tokens=EPOCH_TOKENS)
        recipe = resolve(given, facts)
        if engine.keeps_shards:
            # Imported before `begin_peak`, so that its memory does not count as the run's.
            importlib.import_module("torch.distributed.fsdp")
        level = begin_peak()
        seconds = _median_step(recipe, hardware, engine, request["steps"])
        peak, _ = peaks(hardware.device, level)
        gc.collect()
        alone = None
        if engine.world.size > 1:
            alone = _median_step(recipe, hardware, None, request["steps"])
        found = gather_objects([seconds, alone, peak])
    alones = [entry[1] for entry in found if entry[1] is not None]
    return {
        "step_seconds": max(entry[0] for entry in found),
        "alone_seconds": max(alones) if alones else None,
        "peak_bytes": [entry[2] for entry in found],
    }


def _median_step(
    recipe: ResolvedRecipe, hardware: Hardware, engine: Engine | None, steps: int
) -> float:
    """Return the median seconds of this rank's steps after the first two; all ranks begin each step
    together.

    Args:
        recipe: the recipe.
        hardware: hardware of this rank.
        engine: engine of the run; None trains alone.
        steps: number of timed steps.
    """
    initial = torch.Generator().manual_seed(0)
    if engine is None:
        model = empty_model(recipe.model)
        model.init_weights(initial)
    else:
        model = engine.new_model(recipe.model, recipe.efficiency.vocab_multiple, generator=initial)
    program = TrainingProgram(recipe, model, hardware, engine)
    generator = torch.Generator().manual_seed(find_world().rank if engine is None else engine.rank)
    shape = (recipe.batch.rows, recipe.data.seq_len + 1)
    taken = []
    for _ in range(2 + steps):
        batches = []
        for _ in range(recipe.batch.gradient_accumulation_steps or 1):
            ids = torch.randint(recipe.model.vocab_size, shape, generator=generator)
            batch = Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), ids[:, 1:].numel())
            batches.append(batch.to(hardware.device))
        barrier()
        synchronize(hardware.device)
        start = time.perf_counter()
        program.step(batches, 0.1)
        synchronize(hardware.device)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[2:])

"""One rank of one row of `firstlight bench scaling`, in a process of its own.

All ranks train a model of random weights on random tokens, first by the row's engine, and then
each for itself, all at the same time: what the engine's step takes longer is for exchanging
gradients and weights, and for waiting for each other.
"""

from __future__ import annotations

import gc
import importlib
import statistics
import sys
import time
from typing import Any

import torch

from firstlight.bench.fresh_process import answer
from firstlight.bench.memory import peak_resident_bytes, reset_peak, resident_bytes
from firstlight.data.loader import Batch
from firstlight.hardware.device import Hardware, synchronize
from firstlight.models import empty_model
from firstlight.parallel import barrier, find_world, gather_objects
from firstlight.parallel.engine import Engine
from firstlight.recipe import Recipe, parse_recipe
from firstlight.training.processes import run_processes
from firstlight.training.program import TrainingProgram


def scaling_once(request: dict[str, Any]) -> dict[str, Any]:
    """Train as the module's head says.

    Args:
        request: "recipe" with its model, "steps", "threads".

    Returns:
        "step_seconds" and "alone_seconds", medians over the steps after the first two, the
        slowest rank's; "peak_bytes" of each rank above its level after the imports. The same on
        all ranks. "alone_seconds" is None where there is one rank, or the plain model doesn't fit.
    """
    recipe = parse_recipe(request["recipe"])
    if find_world().size == 1:
        recipe = recipe.model_copy(update={"distributed": type(recipe.distributed)()})
    torch.set_num_threads(request["threads"])
    with run_processes(recipe) as (hardware, engine):
        if engine.keeps_shards:
            # What comes late otherwise doesn't count as memory of the run.
            importlib.import_module("torch.distributed.fsdp")
        gc.collect()
        reset_peak()
        level = resident_bytes()
        seconds = _median_step(recipe, hardware, engine, request["steps"])
        peak = max(peak_resident_bytes(), level) - level
        if hardware.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(hardware.device)
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
    recipe: Recipe, hardware: Hardware, engine: Engine | None, steps: int
) -> float | None:
    """Seconds of a step, all ranks beginning each together; None where memory ran out alone."""
    assert recipe.model is not None
    assert recipe.data.seq_len is not None
    initial = torch.Generator().manual_seed(0)
    if engine is None:
        model = empty_model(recipe.model)
        model.init_weights(initial)
    else:
        model = engine.new_model(recipe.model, recipe.efficiency.vocab_multiple, initial)
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


if __name__ == "__main__":
    answer(scaling_once, sys.argv[1])

"""Find the largest micro-batch size that fits in memory. Each size is tried in a separate process.

A process that runs out of memory may be unable to continue or may be killed by the system, so
trials never run in the training process. `recipe/resolve.py` decides whether they are needed.
"""

from __future__ import annotations

import itertools
import math
import os
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from firstlight.data.loader import Batch
from firstlight.errors import ConfigError
from firstlight.hardware.device import (
    Hardware,
    find_hardware,
    free_memory_bytes,
    is_out_of_memory,
    peak_memory_bytes,
    synchronize,
)
from firstlight.hardware.fresh_process import ask, error_of
from firstlight.models import empty_model
from firstlight.parallel.engine import DistributedConfig
from firstlight.recipe import ResolvedRecipe, parse_resolved_recipe
from firstlight.training.program import TrainingProgram
from firstlight.training.starting_model import attach

#: Fraction of the free memory that a trial can use on a CPU. The rest is left for other programs.
_SHARE = 0.9


def largest_micro_batch(
    recipe: ResolvedRecipe, hardware: Hardware, tell: Callable[[str], None], processes: int = 1
) -> int:
    """Return the largest micro-batch size, in rows (sequences), for which a training step fits in
    the free memory.

    The trials begin with the full global batch. Each following size is the largest divisor of the
    global batch that is at most half of the previous size, so that the global batch stays the same.

    Args:
        recipe: recipe with batch.global_batch_tokens; its micro-batch size is ignored.
        hardware: the device to run on.
        tell: called with a message about the result.
        processes: number of processes that share each step. A trial runs only the share of a single
            process.

    Raises:
        ConfigError: the global batch can't be divided evenly, not even one row fits, or the
            recipe's methods can't be combined.
    """
    whole = recipe.batch.global_rows(recipe.data.seq_len)
    total, rest = divmod(whole, processes)
    if rest:
        raise ConfigError(
            f"batch.global_batch_tokens is {whole} rows, which can't be divided evenly among "
            f"{processes} processes: set it to a multiple of {processes} x {recipe.data.seq_len} "
            "tokens"
        )
    # The trial runs in a single process. Its recipe contains only the part of the batch that one
    # process of the run computes.
    tokens = total * recipe.data.seq_len
    # If the global batch grows during the run, the micro-batch size must also divide the smaller
    # global batches at the start.
    first = (recipe.batch.ramp_start_tokens or 0) // (recipe.data.seq_len * processes)
    batch = {"global_batch_tokens": tokens, "ramp_start_tokens": None, "ramp_steps": None}
    recipe = recipe.with_keys("batch", **batch).model_copy(
        update={"distributed": DistributedConfig()}
    )
    for rows in cuts(math.gcd(total, first)):
        if try_rows(recipe, hardware, rows) is not None:
            tell(
                f"micro-batch of {rows} rows, the largest that fits in memory (of {total} rows "
                "per step)"
            )
            return rows
    raise ConfigError(
        f"not even a micro-batch of one row of {recipe.data.seq_len} tokens fits into the memory "
        f"of {hardware.name}: lower data.seq_len, or set efficiency.activation_checkpointing to "
        "full and efficiency.loss_chunk_tokens to 512"
    )


def cuts(total: int) -> Iterator[int]:
    """Yield divisors of `total` in descending order, starting with `total` itself. Each of the
    following divisors is the largest one that is at most half of the previous divisor.
    """
    rows = total
    while rows:
        yield rows
        rows = next((n for n in range(rows // 2, 0, -1) if total % n == 0), 0)


def fewer_rows(rows: int) -> int:
    """Return the next smaller micro-batch size. This is the largest divisor of `rows` that is at
    most half of `rows`, or 0 if there is none.
    """
    return next(itertools.islice(cuts(rows), 1, None), 0)


@dataclass(frozen=True)
class Trial:
    """Measurements from a trial of two steps.

    Attributes:
        peak_bytes: peak of torch's allocator in bytes on a GPU; growth of the resident memory in
            bytes on a CPU.
        step_seconds: duration of the second step in seconds, scaled to the number of micro-batches
            in a full step.
    """

    peak_bytes: int
    step_seconds: float


def try_rows(recipe: ResolvedRecipe, hardware: Hardware, rows: int) -> Trial | None:
    """Run two steps with a micro-batch of `rows` rows in a separate process. Return None if the
    micro-batch does not fit or the process is killed by a signal.

    Args:
        recipe: recipe of one process; its micro-batch size is ignored.
        hardware: the device to run on.
        rows: rows of the micro-batch.

    Raises:
        ConfigError: the recipe's methods can't be combined, or the trial failed for another reason.
    """
    values = recipe.with_keys("batch", micro_batch_size=rows).model_dump()
    request = {"recipe": values, "device": str(hardware.device)}
    found = ask("firstlight.training.micro_batch_trials", request, os.environ)
    if "error" not in found:
        return Trial(**found)
    kind, message = found["error"]["type"], found["error"]["message"]
    # The process may have been killed by the system because memory ran out.
    if kind in ("MemoryError", "Killed"):
        return None
    if kind == "Failed":
        raise ConfigError(f"batch.micro_batch_size auto failed: {message} (set a number instead)")
    raise ConfigError(message)


def trial_program(recipe: ResolvedRecipe, hardware: Hardware) -> tuple[TrainingProgram, Batch]:
    """Create the program of a recipe with new weights, and a micro-batch of random tokens on the
    device.

    Raises:
        ConfigError: the recipe's methods can't be combined.
    """
    model = empty_model(recipe.model, recipe.efficiency.vocab_multiple)
    model.init_weights(torch.Generator().manual_seed(0), recipe.init)
    attach(model, recipe, hardware)
    program = TrainingProgram(recipe, model, hardware)
    shape = (recipe.batch.rows, recipe.data.seq_len)
    input_ids = torch.randint(recipe.model.vocab_size, shape)
    documents = references = None
    if recipe.preference is not None:
        # Each row contains one preference pair. The two halves of the row are the two answers.
        documents = (torch.arange(shape[1]) >= shape[1] // 2).int().expand(shape).contiguous()
        references = torch.zeros((shape[0], 2), dtype=torch.float64)
    elif recipe.data.document_masking:
        documents = torch.zeros(shape, dtype=torch.int32)
    # Give every token a label, because memory use is then highest for a batch of this shape.
    batch = Batch(input_ids, input_ids, input_ids.numel(), documents, references=references)
    return program, batch.to(hardware.device)


def try_step(recipe: ResolvedRecipe, hardware: Hardware) -> Trial:
    """Run two steps in this process. The first step creates the optimizer's state, so memory peaks
    in the second step.

    Raises:
        RuntimeError, MemoryError: the micro-batch does not fit in memory.
    """
    on_gpu = hardware.device.type == "cuda"
    level = 0 if on_gpu else psutil.Process().memory_info().rss
    program, batch = trial_program(recipe, hardware)
    # If a step has several micro-batches, run two of them, because the gradients of the first
    # micro-batch are in memory while the second one is processed.
    count = min(2, recipe.batch.accumulation(recipe.data.seq_len))
    seconds = 0.0
    for _ in range(2):
        synchronize(hardware.device)
        start = time.perf_counter()
        # Use a learning rate of 0. Such an update takes as much memory and time as any other
        # update.
        program.step([batch] * count, lr_scale=0.0)
        synchronize(hardware.device)
        seconds = time.perf_counter() - start
    whole = recipe.batch.accumulation(recipe.data.seq_len) / count
    return Trial(max(peak_memory_bytes(hardware.device) - level, 0), seconds * whole)


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Run the training steps of one trial and return their measurements. `try_rows` uses
    `hardware.fresh_process` to call this function in a separate process.
    """
    hardware = find_hardware(request["device"])
    recipe = parse_resolved_recipe(request["recipe"])
    if hardware.device.type == "cpu":
        _limit_memory(int(_SHARE * free_memory_bytes(hardware.device)))
    try:
        return asdict(try_step(recipe, hardware))
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return error_of("MemoryError", str(error))


def _limit_memory(more: int) -> None:
    """Make allocations fail after `more` additional bytes, before the system begins to swap or kill
    processes. Do nothing on systems without /proc.
    """
    status = Path("/proc/self/status")
    if not status.exists():
        return
    lines = dict(line.split(":", 1) for line in status.read_text(encoding="utf-8").splitlines())
    # Use RLIMIT_DATA, which counts private memory. RLIMIT_AS would also count mapped files and
    # libraries.
    used = int(lines["VmData"].split()[0]) * 1024
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = used + more if hard == resource.RLIM_INFINITY else min(used + more, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))

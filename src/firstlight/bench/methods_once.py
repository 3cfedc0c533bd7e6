"""Train a few steps of one recipe, in a process of its own, and say what they took.

    python -m firstlight.bench.methods_once REQUEST

REQUEST is a JSON object:

    recipe        a recipe's values, with its model and data.seq_len
    data          a file of `methods_data.write_tokens`
    warmup_steps  steps that are not timed
    steps         steps that are
    threads       for torch

What is measured, in this order:

1. Everything that the recipe needs is imported, torch's compiler and 8-bit libraries too; then
   the resident memory of the process is noted, and its peak set back to it.
2. Model, optimizer and loss function are made as `firstlight train` makes them.
3. `first_step_seconds`: the first step, with compilation. It and the other warm-up steps are the
   only ones that allocate and compile.
4. `step_seconds`: of each timed step, from its batches on the device to the updated parameters.

Step s trains on rows s x rows a step and following, so that recipes with as many rows a step see
the same tokens. `losses` are those before each update, of all steps. The learning rate rises over
the first four steps and then stays.

`peak_bytes` is on a CPU the peak of resident memory above the level of step 1, and
`total_peak_bytes` that of the whole process; on a GPU both are the peak of what was allocated.

The one line on stdout is a JSON object of these; or {"error": {"type", "message"}} where
firstlight refuses the recipe.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from firstlight.bench.memory import peak_resident_bytes, reset_peak, resident_bytes
from firstlight.bench.methods_data import Tokens
from firstlight.data.loader import Batch
from firstlight.errors import FirstlightError
from firstlight.hardware.device import Hardware, find_hardware, synchronize
from firstlight.models import empty_model
from firstlight.recipe import Recipe, parse_recipe
from firstlight.training.program import TrainingProgram
from firstlight.training.starting_model import attach

#: Steps over which the learning rate rises.
_RISE_STEPS = 4


def methods_once(request: dict[str, Any]) -> dict[str, Any]:
    """Train as the module's head says, and return the measurements.

    Args:
        request: see there.

    Raises:
        FirstlightError: the recipe is refused, or the loss stopped being a number.
    """
    recipe = parse_recipe(request["recipe"])
    hardware = find_hardware(recipe.run.device)
    _import_libraries(recipe)
    torch.set_num_threads(request["threads"])
    assert recipe.data.seq_len is not None
    tokens = Tokens(Path(request["data"]), recipe.data.seq_len)
    gc.collect()
    reset_peak()
    level = resident_bytes()
    step = _program(recipe, hardware)
    losses, seconds = [], []
    for number in range(request["warmup_steps"] + request["steps"]):
        batches = [batch.to(hardware.device) for batch in _batches(tokens, recipe, number)]
        synchronize(hardware.device)
        start = time.perf_counter()
        losses.append(step(batches, min(1.0, (number + 1) / _RISE_STEPS)))
        synchronize(hardware.device)
        seconds.append(time.perf_counter() - start)
    # The kernel counts in batches, so that the peak may read lower than what was there.
    peak = max(peak_resident_bytes(), level)
    if hardware.device.type == "cuda":
        peak, level = torch.cuda.max_memory_allocated(hardware.device), 0
    return {
        "first_step_seconds": seconds[0],
        "step_seconds": seconds[request["warmup_steps"] :],
        "losses": losses,
        "peak_bytes": peak - level,
        "total_peak_bytes": peak,
    }


def _import_libraries(recipe: Recipe) -> None:
    """Import what the recipe needs and imports late, so that it doesn't count as its memory.

    A missing one is refused later, by what needs it.
    """
    names = ["torch._dynamo"]  # which torch's optimizers import at their first step
    if recipe.lora is not None and recipe.lora.quantize == "nf4":
        names.append("bitsandbytes")
    if recipe.efficiency.compile:
        names.append("torch._inductor.compile_fx")
    if "8bit" in recipe.optimizer.name:
        library = recipe.optimizer.eight_bit_library
        names.append("bitsandbytes" if library == "auto" else library)
    for name in names:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def _program(recipe: Recipe, hardware: Hardware) -> Callable[[Sequence[Batch], float], float]:
    """A function that makes one optimizer step at a share of the peak learning rate, and returns
    its loss."""
    assert recipe.model is not None
    torch.manual_seed(recipe.run.seed)
    model = empty_model(recipe.model, recipe.efficiency.vocab_multiple)
    model.init_weights(torch.Generator().manual_seed(recipe.run.seed))
    if recipe.lora is not None:
        attach(model, recipe, hardware)
    program = TrainingProgram(recipe, model, hardware)
    return lambda batches, share: program.step(batches, share).loss


def _batches(tokens: Tokens, recipe: Recipe, step: int) -> list[Batch]:
    """The micro-batches of a step, from 0."""
    micro = recipe.batch.rows
    count = recipe.batch.accumulation(tokens.seq_len)
    first = step * micro * count
    return [
        tokens.batch(first + micro * i, micro, recipe.data.document_masking) for i in range(count)
    ]


def _prefer_to_be_killed() -> None:
    """Where memory runs out, Linux ends this process and not the one that reports it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def main(request: str) -> None:
    """Do what a request asks for, and write the one line of the result."""
    _prefer_to_be_killed()
    result: dict[str, Any]
    try:
        result = methods_once(json.loads(request))
    except FirstlightError as error:
        result = {"error": {"type": type(error).__name__, "message": str(error)}}
    # Past whatever a library may print.
    os.write(1, (json.dumps(result) + "\n").encode())


if __name__ == "__main__":
    main(sys.argv[1])

"""Train a few steps of GPT-2 with one program, in a process of its own, and say what they took.

    python -m firstlight.bench.training_once REQUEST

REQUEST is a JSON object:

    program           "firstlight", a name of `reference_loops`, or "trainer"
    recipe            a recipe's values, with its model, data.seq_len and device
    micro_batch_size  rows a step, which every program but firstlight computes at once
    data              a file of `methods_data.write_tokens`, or a prepared corpus
    warmup_steps      steps that are not timed
    steps             steps that are
    threads           for torch
    compile           false compiles no other program than firstlight, for dry runs

What is measured, in this order:

1. Everything that the program needs is imported, torch's compiler too; then the resident memory
   of the process is noted, and its peak set back to it.
2. Model and optimizer are made.
3. `first_step_seconds`: the first step, with compilation.
4. `step_seconds`: of each timed step, from its batch on the device to the updated parameters;
   for the Trainer from its `on_step_begin` to its `on_step_end`. `step_cpu_seconds` is the
   processor's time in it, of all threads: it suffers less from other work on the machine, but
   counts threads that wait by spinning.

Step s trains on rows s x rows a step and following, the same for all programs. `losses` are those
before each update, of all steps. The learning rate rises over the first four steps and then stays.

`total_peak_bytes` is on a CPU the peak of the process's resident memory and `peak_bytes` what of
that is above the level of step 1; on a GPU both are the peak of what was allocated.

The one line on stdout is a JSON object of these, and with firstlight `chosen`, the keys of the
recipe that were left to it; or {"error": {"type", "message"}} where firstlight refuses.
"""

from __future__ import annotations

import gc
import importlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from firstlight.bench.fresh_process import answer
from firstlight.bench.memory import peak_resident_bytes, reset_peak, resident_bytes
from firstlight.bench.methods_data import ShardRows, Tokens, open_rows
from firstlight.bench.reference_loops import LoopStep, autocast_loop, pure_bf16_loop
from firstlight.data.loader import Batch
from firstlight.hardware.device import Hardware, find_hardware, synchronize
from firstlight.models import GPT2Config, LlamaConfig, empty_model
from firstlight.recipe import Recipe, parse_recipe
from firstlight.recipe.resolve import facts_here, resolve
from firstlight.training.fit import largest_micro_batch
from firstlight.training.program import TrainingProgram

#: Steps over which the learning rate rises.
_RISE_STEPS = 4

#: What is left open is decided as for a run of this length.
EPOCH_TOKENS = 10**9


class StepClock:
    """Notes what each step takes.

    Attributes:
        seconds: of each step so far.
        cpu_seconds: the processor's, of all threads.
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self._device = device
        self._start = (0.0, 0.0)

    def start(self) -> None:
        """A step begins."""
        synchronize(self._device)
        self._start = (time.perf_counter(), time.process_time())

    def stop(self) -> None:
        """It is done."""
        synchronize(self._device)
        self.seconds.append(time.perf_counter() - self._start[0])
        self.cpu_seconds.append(time.process_time() - self._start[1])


def training_once(request: dict[str, Any]) -> dict[str, Any]:
    """Train as the module's head says, and return the measurements.

    Args:
        request: see there.

    Raises:
        FirstlightError: the recipe is refused, or the loss stopped being a number.
    """
    recipe = parse_recipe(request["recipe"])
    hardware = find_hardware(recipe.run.device)
    _import_libraries(request["program"], recipe)
    torch.set_num_threads(request["threads"])
    torch.manual_seed(recipe.run.seed)
    assert recipe.data.seq_len is not None
    tokens = open_rows(Path(request["data"]), recipe.data.seq_len)
    gc.collect()
    reset_peak()
    level = resident_bytes()
    clock = StepClock(hardware.device)
    chosen: dict[str, Any] = {}
    steps = request["warmup_steps"] + request["steps"]
    if request["program"] == "firstlight":
        losses, chosen = _firstlight(recipe, tokens, steps, hardware, clock)
    else:
        rows = request["micro_batch_size"]
        batches = (tokens.batch(step * rows, rows, documents=False) for step in range(steps))
        if request["program"] == "trainer":
            from firstlight.bench.reference_trainer import train_with_trainer

            compiles = request.get("compile", True)
            losses = train_with_trainer(recipe, batches, steps, rows, clock, compile_model=compiles)
        else:
            loop = _loop(request, recipe, hardware)
            losses = _run_loop(loop, recipe, batches, hardware, clock)
    # The kernel counts in batches, so that the peak may read lower than what was there.
    peak = max(peak_resident_bytes(), level)
    if hardware.device.type == "cuda":
        peak, level = torch.cuda.max_memory_allocated(hardware.device), 0
    return {
        "first_step_seconds": clock.seconds[0],
        "step_seconds": clock.seconds[request["warmup_steps"] :],
        "step_cpu_seconds": clock.cpu_seconds[request["warmup_steps"] :],
        "losses": losses,
        "peak_bytes": peak - level,
        "total_peak_bytes": peak,
        "chosen": chosen,
    }


def _import_libraries(program: str, recipe: Recipe) -> None:
    """Import what comes late otherwise, so that it doesn't count as the program's memory."""
    importlib.import_module("torch._dynamo")
    if program != "firstlight" or recipe.efficiency.compile:
        importlib.import_module("torch._inductor.compile_fx")
    if program == "trainer":
        importlib.import_module("transformers.trainer")


def _share_of_peak(step: int) -> float:
    return min(1.0, (step + 1) / _RISE_STEPS)


def _firstlight(
    recipe: Recipe, tokens: Tokens | ShardRows, steps: int, hardware: Hardware, clock: StepClock
) -> tuple[list[float], dict[str, Any]]:
    """The losses, and what was chosen for the keys that the recipe leaves open."""
    facts = facts_here(
        hardware,
        epoch_tokens=EPOCH_TOKENS,
        largest_micro_batch=lambda open_: largest_micro_batch(open_, hardware, lambda _: None),
    )
    decided = resolve(recipe, facts)
    model = empty_model(decided.model, decided.efficiency.vocab_multiple)
    model.init_weights(torch.Generator().manual_seed(decided.run.seed))
    program = TrainingProgram(decided, model, hardware)
    micro, count = decided.batch.rows, decided.batch.accumulation(tokens.seq_len)
    masked = decided.data.document_masking
    losses = []
    for step in range(steps):
        first = step * micro * count
        batches = [
            tokens.batch(first + micro * i, micro, masked).to(hardware.device) for i in range(count)
        ]
        clock.start()
        losses.append(program.step(batches, _share_of_peak(step)).loss)
        clock.stop()
    chosen = {
        "batch.micro_batch_size": micro,
        "batch.gradient_accumulation_steps": count,
        "efficiency.precision": decided.efficiency.precision,
        "efficiency.attention": decided.efficiency.attention,
        "efficiency.compile": decided.efficiency.compile,
        "efficiency.loss_chunk_tokens": decided.efficiency.loss_chunk_tokens,
    }
    return losses, chosen


def _loop(request: dict[str, Any], recipe: Recipe, hardware: Hardware) -> LoopStep:
    program, config, compiles = request["program"], recipe.model, request.get("compile", True)
    assert isinstance(config, GPT2Config | LlamaConfig)
    if program == "pure-bf16":
        assert isinstance(config, GPT2Config)
        return pure_bf16_loop(config, hardware.device, compile_model=compiles)
    bf16 = program == "reference"
    return autocast_loop(config, hardware.device, bf16=bf16, compile_model=compiles)


def _run_loop(
    loop: LoopStep, recipe: Recipe, batches: Iterator[Batch], hardware: Hardware, clock: StepClock
) -> list[float]:
    losses = []
    for step, batch in enumerate(batches):
        batch = batch.to(hardware.device)
        rate = recipe.optimizer.learning_rate * _share_of_peak(step)
        clock.start()
        losses.append(loop(batch.input_ids, batch.labels, rate))
        clock.stop()
    return losses


if __name__ == "__main__":
    answer(training_once, sys.argv[1])

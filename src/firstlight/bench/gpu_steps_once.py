"""Memory and speed of recipes' steps on a device, several recipes in one process.

    python -m firstlight.bench.gpu_steps_once REQUEST

REQUEST is a JSON object:

    cases    list of {"name", "kind", "recipe", "generation"}, see `planner_memory.Case`
    device   "cuda", or "cpu" of a dry run
    steps    steps that are timed, at most
    seconds  of timing a recipe, after which no step begins
    threads  for torch; absent leaves torch's choice
    target   the device that is predicted for, see `gpu_predictions.target_request`; absent predicts
             nothing

Random weights are made on the device, and the tokens are random. On a GPU, what is measured of a
recipe, in this order:

1. Everything of the recipe before is given up: Python's garbage, the allocator's cache, cuBLAS's
   workspaces. What is still allocated is `left_bytes`, which doesn't count below.
2. The weights are made (and frozen, and put into 4 bits); the allocator's peak is set back.
3. Optimizer and loss function are made as `firstlight train` makes them, and three steps are
   trained. Of a recipe that compiles the peak is set back once more after the first: what
   compiling itself takes is not the step's.
4. `peak_bytes` and `reserved_bytes` are the allocator's peaks, `driver_bytes` what the driver
   says that the GPU holds more than before this process began to use it.
5. `step_seconds` of each timed step, from the batch on the device to the updated parameters.

Evaluations and generations are no steps: they have 1 to 4 alone. On a CPU the peak is that of
torch's allocator (`planner_memory_once`), and nothing is known of a driver.

The one line on stdout is a JSON object with "cases", a list of such figures with the recipe's
"name" and the "reason" why it could not be measured ("" where it was); and "line", them as text.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from firstlight.bench.driver_memory import driver_used_bytes
from firstlight.bench.fresh_process import answer
from firstlight.bench.gpu_predictions import predict_case, predicting
from firstlight.bench.planner_memory_once import measure_on_cpu, random_batch
from firstlight.bench.random_model import random_model
from firstlight.errors import FirstlightError
from firstlight.generation.batch import BatchDecoder
from firstlight.generation.engine import DTYPES
from firstlight.hardware.device import find_hardware, is_out_of_memory, synchronize
from firstlight.recipe import ResolvedRecipe, parse_resolved_recipe
from firstlight.training.program import TrainingProgram
from firstlight.training.starting_model import attach

#: What may be left of the recipe before: cuBLAS's handles, tables of libraries.
_MOST_LEFT = 16 * 2**20

#: Steps before any is timed.
_WARMUP_STEPS = 3


def gpu_steps_once(request: dict[str, Any]) -> dict[str, Any]:
    """Measure the cases of a request, see the module's head."""
    if "threads" in request:
        torch.set_num_threads(request["threads"])
    idle = driver_used_bytes() if request["device"] == "cuda" else None
    cases = request["cases"]
    calls = [(predict_case, (case, request["target"])) for case in cases if "target" in request]
    with predicting(calls, beside=request["device"] == "cuda") as predictions:
        found = [_case(case, request, idle) for case in cases]
        for result, prediction in zip(found, predictions(), strict=False):
            result.update(prediction)
    return {"cases": found, "line": "; ".join(map(_in_words, found))}


def _case(case: Mapping[str, Any], request: Mapping[str, Any], idle: int | None) -> dict[str, Any]:
    result: dict[str, Any] = {"name": case["name"], "kind": case["kind"], "reason": ""}
    try:
        return result | _measure(case, request, idle)
    except FirstlightError as error:
        return result | {"reason": str(error)}
    except Exception as error:  # noqa: BLE001  (whatever a recipe ran into is its result)
        return result | {"reason": _reason(error)}


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())[:300]
    if is_out_of_memory(error):
        return f"out of memory: {text}"
    return f"{type(error).__name__}: {text}"


def _in_words(result: Mapping[str, Any]) -> str:
    if result["reason"]:
        return f"{result['name']}: {result['reason'][:80]}"
    speed = ""
    if result.get("predicted_bytes"):
        speed = f" ({result['predicted_bytes'] / result['peak_bytes'] - 1:+.1%} predicted)"
    if result.get("step_seconds"):
        speed += f", {result['tokens_a_step'] / min(result['step_seconds']):,.0f} tokens/s"
    return f"{result['name']}: {result['peak_bytes'] / 2**20:,.0f} MiB{speed}"


def _measure(
    case: Mapping[str, Any], request: Mapping[str, Any], idle: int | None
) -> dict[str, Any]:
    recipe, kind = parse_resolved_recipe(case["recipe"]), case["kind"]
    if request["device"] == "cpu":
        peak = measure_on_cpu(recipe, kind, case.get("generation"))
        found: dict[str, Any] = {"peak_bytes": peak.peak_bytes}
        if kind == "training":
            found |= _train(recipe, request, contextlib.nullcontext)
        return found
    peaks = _Peaks(idle)
    if kind == "generation":
        _generate(recipe, case["generation"], peaks)
        return peaks.found
    timed = _train(recipe, request, peaks.measured, evaluates=kind == "evaluation")
    return peaks.found | timed


class _Peaks:
    """The memory of one recipe on a GPU.

    Args:
        idle: bytes that the driver said were in use before this process.

    Attributes:
        found: the figures of the module's head.
    """

    def __init__(self, idle: int | None) -> None:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        torch._dynamo.reset()
        # The workspaces that cuBLAS keeps for each stream come from torch's allocator.
        clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
        if clear is not None:
            clear()
        _give_back()
        left = torch.cuda.memory_allocated()
        self.found: dict[str, Any] = {"left_bytes": left}
        self._idle = idle
        if left > _MOST_LEFT:
            raise RuntimeError(f"{left:,} bytes of the recipe before are still allocated")

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Note the peaks of what runs inside, with all that was allocated before; the last time
        counts."""
        _give_back()
        torch.cuda.reset_peak_memory_stats()
        yield
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - self.found["left_bytes"]
        self.found |= {"peak_bytes": peak, "reserved_bytes": torch.cuda.max_memory_reserved()}
        used = driver_used_bytes()
        if used is not None and self._idle is not None:
            self.found["driver_bytes"] = used - self._idle


def _give_back() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def _train(
    recipe: ResolvedRecipe,
    request: Mapping[str, Any],
    measured: Callable[[], contextlib.AbstractContextManager[object]],
    *,
    evaluates: bool = False,
) -> dict[str, Any]:
    """The seconds of steps, and tokens of one; with `evaluates` neither.

    Args:
        measured: a context for that of which memory is measured.
    """
    hardware = find_hardware(request["device"])
    device = hardware.device
    model = random_model(recipe.model, device, recipe.efficiency.vocab_multiple)
    if recipe.lora is not None:
        attach(model, recipe, hardware)
    batch = random_batch(recipe).to(device)
    batches = [batch] * recipe.batch.accumulation(recipe.data.seq_len)
    with measured():
        begun = time.perf_counter()
        program = TrainingProgram(recipe, model, hardware)
        program.step(batches, lr_scale=1.0)
        first = time.perf_counter() - begun
        if recipe.efficiency.compile is not True and not evaluates:
            _steps(program, batches)
    if evaluates:
        program.optimizer.zero_grad()
        program.model.eval()
        with measured(), torch.inference_mode():
            program.evaluation_loss(*batch.inputs)
        return {}
    if recipe.efficiency.compile is True:
        with measured():
            _steps(program, batches)
    seconds: list[float] = []
    while len(seconds) < request["steps"] and sum(seconds) < request["seconds"]:
        synchronize(device)
        start = time.perf_counter()
        program.step(batches, lr_scale=1.0)
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    tokens = len(batches) * batch.input_ids.numel()
    return {"step_seconds": seconds, "tokens_a_step": tokens, "first_step_seconds": first}


def _steps(program: TrainingProgram, batches: list[Any]) -> None:
    for _ in range(_WARMUP_STEPS - 1):
        program.step(batches, lr_scale=1.0)


def _generate(recipe: ResolvedRecipe, options: Mapping[str, Any], peaks: _Peaks) -> None:
    prompt, new = options["prompt_tokens"], options["max_new_tokens"]
    model = random_model(recipe.model, torch.device("cuda"))
    dtype = DTYPES[options["dtype"]]
    assert dtype is not None
    model = model.to(dtype).eval()
    with peaks.measured(), torch.inference_mode():
        decoder = BatchDecoder(model, options["sequences"], prompt + new)
        for _ in range(options["sequences"]):
            decoder.add([0] * prompt)
        for _ in range(new - 1):
            decoder.step([0] * options["sequences"])


if __name__ == "__main__":
    answer(gpu_steps_once, sys.argv[1])

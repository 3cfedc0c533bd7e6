"""Memory and speed of recipes' steps on a device, several recipes in one process.

    python -m firstlight.hardware.fresh_process benchmarks.planner_steps REQUEST

REQUEST is a JSON object:

    cases    list of `PlannerCase.request`
    device   "cuda", or "cpu" in a dry run
    steps    maximum number of timed steps of a recipe
    seconds  duration of a recipe's timed steps after which no step begins

Random weights are made on the device, and the tokens are random. For each recipe on a GPU:

1. The memory of the previous recipe is released: Python's garbage, the allocator's cache, cuBLAS
    workspaces. The bytes still allocated are `left_bytes`, which `peak_bytes` does not include.
2. The weights are made (frozen and quantized if the recipe says so); the allocator's peak is reset.
3. Optimizer and loss function are created as in `firstlight train`, and three steps are trained.
   For a recipe that compiles, the peak is reset again after the first step, because the memory of
   compiling is not part of a step.
4. `peak_bytes` and `reserved_bytes` are the allocator's peaks of allocated and reserved memory.
   `driver_bytes` is the growth of the GPU's used memory since before this process used the GPU.
5. `step_seconds` of each timed step, from the batch on the device to the updated parameters.

Evaluations and generations have no step 5. On a CPU, the peak is that of torch's allocator
(`measure_on_cpu`), and there is no `driver_bytes`.

The process prints one line on stdout: a JSON object with "cases", the list of these figures with
the recipe's "name", "kind" and "reason" (the error message, or "").
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from benchmarks.memory import driver_used_bytes
from benchmarks.models import random_model
from benchmarks.planner_memory import decode, measure_on_cpu, random_batch
from firstlight.errors import FirstlightError
from firstlight.generation.engine import DTYPES
from firstlight.hardware.device import find_hardware, is_out_of_memory, synchronize
from firstlight.recipe import ResolvedRecipe, parse_resolved_recipe
from firstlight.training.program import TrainingProgram
from firstlight.training.starting_model import attach

#: Maximum bytes left by the previous recipe, for cuBLAS handles and tables of libraries.
_MOST_LEFT = 16 * 2**20

#: Number of steps before the timed ones.
_WARMUP_STEPS = 3


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Measure the cases of a request; the module's docstring describes request and result."""
    on_gpu, cases = request["device"] == "cuda", request["cases"]
    idle = driver_used_bytes() if on_gpu else None
    return {"cases": [_case(case, request, idle) for case in cases]}


def _case(case: Mapping[str, Any], request: Mapping[str, Any], idle: int | None) -> dict[str, Any]:
    result: dict[str, Any] = {"name": case["name"], "kind": case["kind"], "reason": ""}
    try:
        return result | _measure_case(case, request, idle)
    except FirstlightError as error:
        return result | {"reason": str(error)}
    except Exception as error:  # noqa: BLE001  (whatever a recipe ran into is its result)
        kind = "out of memory" if is_out_of_memory(error) else type(error).__name__
        return result | {"reason": f"{kind}: {' '.join(str(error).split())[:300]}"}


def _measure_case(
    case: Mapping[str, Any], request: Mapping[str, Any], idle: int | None
) -> dict[str, Any]:
    recipe, kind = parse_resolved_recipe(case["recipe"]), case["kind"]
    if request["device"] == "cpu":
        peak = measure_on_cpu(recipe, kind, case["generation"])
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
        idle: the GPU's used bytes before this process used it, from the driver; None if unknown.

    Attributes:
        found: the figures of steps 1 and 4 in the module's docstring.

    Raises:
        RuntimeError: the previous recipe left more than `_MOST_LEFT` bytes.
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
            raise RuntimeError(f"{left:,} bytes of the previous recipe are still allocated")

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Record the peaks of the block, including memory allocated before it. If used again, the
        later values replace the earlier ones."""
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
    """Train: "step_seconds", "tokens_a_step", "first_step_seconds"; {} if `evaluates`."""
    hardware = find_hardware(request["device"])
    device = hardware.device
    model = random_model(recipe.model, device, recipe.efficiency.vocab_multiple)
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
    dtype = DTYPES[options["dtype"]]
    assert dtype is not None
    model = random_model(recipe.model, torch.device("cuda")).to(dtype).eval()
    with peaks.measured(), torch.inference_mode():
        decode(model, options)


STEPS_MODULE = "benchmarks.planner_steps"

"""Memory and speed of recipes' steps on a device, several recipes in one process.

    python -m firstlight.hardware.fresh_process benchmarks.planner_steps REQUEST

REQUEST is a JSON object:

    cases    list of `PlannerCase.request`
    device   "cuda", or "cpu" in a dry run
    steps    maximum number of timed steps of a recipe
    seconds  duration of a recipe's timed steps after which no step begins
    target   device for which the planner predicts, see `target_request`; if it is missing, nothing
             is predicted

Random weights are made on the device, and the tokens are random. For each recipe on a GPU:

1. The memory of the recipe before is released: Python's garbage, the allocator's cache, cuBLAS's
   workspaces. The bytes still allocated are `left_bytes`, which `peak_bytes` leaves out.
2. The weights are made (frozen and quantized if the recipe says so); the allocator's peak is reset.
3. Optimizer and loss function are made as `firstlight train` makes them, and three steps are
   trained. For a recipe that compiles, the peak is reset again after the first step, because the
   memory of compiling is not part of a step.
4. `peak_bytes` and `reserved_bytes` are the allocator's peaks of allocated and reserved memory.
   `driver_bytes` is the growth of the GPU's used memory since before this process used the GPU.
5. `step_seconds` of each timed step, from the batch on the device to the updated parameters.

Evaluations and generations have no step 5. On a CPU, the peak is that of torch's allocator
(`measure_on_cpu`), and there is no `driver_bytes`.

The process prints one line on stdout: a JSON object with "cases", the list of these figures with
the recipe's "name", "kind" and "reason" (the error message, or ""), and "line", the same in words.

If the machine has enough cores, the planner predicts in other processes while the GPU measures.
They see no GPU, since the planner needs only meta tensors. A prediction keeps the operators of a
step, packed into a text of some kB, so that other constants can predict the step's speed later.
"""

from __future__ import annotations

import base64
import contextlib
import gc
import gzip
import json
import multiprocessing
import multiprocessing.pool
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from benchmarks.gpu.parts import BenchMachine
from benchmarks.memory import driver_used_bytes
from benchmarks.models import PlannerCase, random_model
from benchmarks.planner_memory import decode, measure_on_cpu, predict_memory, random_batch
from firstlight.errors import FirstlightError
from firstlight.generation.engine import DTYPES
from firstlight.hardware.device import find_hardware, is_out_of_memory, synchronize
from firstlight.hardware.environment import usable_cpus
from firstlight.planner.memory.kernels import (
    Layout,
    Operator,
    OperatorCount,
    Target,
    cuda_target,
    this_cpu,
)
from firstlight.planner.memory.prediction import MemoryPrediction
from firstlight.planner.memory.program import uncompiled
from firstlight.planner.memory.recipe import trace_memory
from firstlight.planner.plan.processes import PRELOADED
from firstlight.planner.speed.throughput import all_micro_batches
from firstlight.recipe import ResolvedRecipe, parse_resolved_recipe
from firstlight.training.program import TrainingProgram
from firstlight.training.starting_model import attach

#: Maximum bytes left by the recipe before, for cuBLAS's handles and tables of libraries.
_MOST_LEFT = 16 * 2**20

#: Number of steps before the timed ones.
_WARMUP_STEPS = 3


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Measure the cases of a request; the module's docstring describes request and result."""
    on_gpu, cases = request["device"] == "cuda", request["cases"]
    idle = driver_used_bytes() if on_gpu else None
    calls = [(predict_case, (case, request["target"])) for case in cases if "target" in request]
    with predicting(calls, beside=on_gpu) as predictions:
        found = [_case(case, request, idle) for case in cases]
        for result, prediction in zip(found, predictions(), strict=False):
            result.update(prediction)
    return {"cases": found, "line": "; ".join(map(_in_words, found))}


def _case(case: Mapping[str, Any], request: Mapping[str, Any], idle: int | None) -> dict[str, Any]:
    result: dict[str, Any] = {"name": case["name"], "kind": case["kind"], "reason": ""}
    try:
        return result | _measure_case(case, request, idle)
    except FirstlightError as error:
        return result | {"reason": str(error)}
    except Exception as error:  # noqa: BLE001  (whatever a recipe ran into is its result)
        kind = "out of memory" if is_out_of_memory(error) else type(error).__name__
        return result | {"reason": f"{kind}: {' '.join(str(error).split())[:300]}"}


def _in_words(result: Mapping[str, Any]) -> str:
    if result["reason"]:
        return f"{result['name']}: {result['reason'][:80]}"
    speed = ""
    if result.get("predicted_bytes"):
        speed = f" ({result['predicted_bytes'] / result['peak_bytes'] - 1:+.1%} predicted)"
    if result.get("step_seconds"):
        speed += f", {result['tokens_a_step'] / min(result['step_seconds']):,.0f} tokens/s"
    return f"{result['name']}: {result['peak_bytes'] / 2**20:,.0f} MiB{speed}"


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
        RuntimeError: the recipe before left more than `_MOST_LEFT` bytes.
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

#: Minimum number of cores for predicting in other processes.
_MANY_CORES = 4

#: Seconds for which all predictions are waited for after the measurement. They must end before the
#: row's time limit (`runner.Row.limit`), which would discard the measurement, too.
_SECONDS = 60.0

#: A function of a module (so that it can be pickled) and its arguments.
Predict = tuple[Callable[..., dict[str, Any]], tuple[Any, ...]]


def target_request(machine: BenchMachine) -> dict[str, Any] | None:
    """A machine's device for a request's "target"; None is the CPU on which the planner runs."""
    if machine.device == "cpu":
        return None
    name = machine.name if machine.gpu is None else machine.gpu.name
    return {"name": name, "capability": list(machine.capability)}


def steps_request(
    machine: BenchMachine, cases: Sequence[PlannerCase], seconds: float
) -> dict[str, Any]:
    """The request for measuring `cases` for `seconds` each; see the module's docstring."""
    return {
        "cases": [case.request(machine.device) for case in cases],
        "device": machine.device,
        "steps": 2 if machine.dry else 12,
        "seconds": seconds,
        "target": target_request(machine),
    }


def target_of(request: Mapping[str, Any] | None) -> Target:
    """The planner's target for a device of `target_request`."""
    if request is None:
        return this_cpu()
    major, minor = request["capability"]
    return cuda_target(request["name"], (major, minor))


def predict_case(case: Mapping[str, Any], target: Mapping[str, Any] | None) -> dict[str, Any]:
    """The predicted memory of one configuration, and the operators of its step.

    Returns:
        "predicted_bytes" of tensors and "predicted_reserved_bytes" of the allocator at the peak,
        "predicted_phase" of the peak, "host_bytes" that are offloaded, "prediction_seconds", and
        for training "operators", see `packed`.
    """
    start = time.perf_counter()
    recipe, device = parse_resolved_recipe(case["recipe"]), target_of(target)
    found = predict_memory(recipe, case["kind"], case["generation"], device)
    seconds = time.perf_counter() - start
    entry = memory_entry(found) | {"prediction_seconds": round(seconds, 2)}
    if case["kind"] != "training":
        return entry
    if recipe.efficiency.compile is True:
        found = trace_memory(uncompiled(recipe), device)
    counted = all_micro_batches(found, recipe.batch.accumulation(recipe.data.seq_len))
    return entry | {"operators": packed(counted.operators)}


def memory_entry(found: MemoryPrediction) -> dict[str, Any]:
    """A prediction's values for the keys of memory; see `predict_case`."""
    return {
        "predicted_bytes": found.peak_bytes,
        "predicted_reserved_bytes": found.reserved_bytes,
        "predicted_phase": found.phase,
        "host_bytes": found.host_bytes,
    }


def packed(counts: Sequence[OperatorCount]) -> str:
    """Counted operators as text: JSON, compressed with gzip, in base 85."""
    values = [
        (
            one.name,
            one.phase,
            entry.count,
            _names(one.inputs),
            _names(one.outputs),
            one.flops,
            one.moved_bytes,
            one.options,
        )
        for entry in counts
        for one in (entry.operator,)
    ]
    content = json.dumps(values, separators=(",", ":")).encode()
    return base64.b85encode(gzip.compress(content, 9, mtime=0)).decode()


def unpacked(text: str) -> MemoryPrediction:
    """The inverse of `packed`, as a prediction with these operators and no memory."""
    operators = []
    for name, phase, count, inputs, outputs, flops, moved, options in json.loads(
        gzip.decompress(base64.b85decode(text))
    ):
        one = Operator(
            name,
            phase,
            _layouts(inputs),
            _layouts(outputs),
            flops=flops,
            moved_bytes=moved,
            options=options,
        )
        operators.append(OperatorCount(one, count))
    return MemoryPrediction(
        0, "", {}, {}, reserved_bytes=0, overhead_bytes=0, host_bytes=0, operators=tuple(operators)
    )


def _layouts(values: Sequence[Any]) -> tuple[Layout, ...]:
    return tuple((tuple(shape), getattr(torch, dtype)) for shape, dtype in values)


def _names(layouts: Sequence[Layout]) -> list[tuple[list[int], str]]:
    return [(list(shape), str(dtype).removeprefix("torch.")) for shape, dtype in layouts]


@contextlib.contextmanager
def predicting(
    calls: Sequence[Predict], *, beside: bool
) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """Predict while the block runs; yields a function that waits for the predictions and returns
    them in the order of `calls`. One that failed is {"prediction_problem": message}.

    Args:
        calls: function and arguments of each prediction.
        beside: True predicts in other processes if the machine has enough cores; otherwise the
            predictions are made when their results are asked for.
    """
    if not calls or not beside or usable_cpus() < _MANY_CORES:
        yield lambda: [_answer(*call) for call in calls]
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    pool = context.Pool(min(len(calls), usable_cpus() // 2), _without_gpu, maxtasksperchild=1)
    try:
        asked = [pool.apply_async(_answer, call) for call in calls]
        yield lambda: _answers(asked)
    finally:
        pool.terminate()
        pool.join()


def _answer(function: Callable[..., dict[str, Any]], arguments: Sequence[Any]) -> dict[str, Any]:
    try:
        return function(*arguments)
    except FirstlightError as error:
        return {"prediction_problem": str(error)}
    except Exception as error:  # noqa: BLE001  (it must not cost the measurement)
        text = " ".join(str(error).split())[:300]
        return {"prediction_problem": f"{type(error).__name__}: {text}"}


def _answers(
    asked: Sequence[multiprocessing.pool.AsyncResult[dict[str, Any]]],
) -> list[dict[str, Any]]:
    end, found = time.monotonic() + _SECONDS, []
    for one in asked:
        try:
            found.append(one.get(max(end - time.monotonic(), 0.0)))
        except multiprocessing.TimeoutError:
            # The process is too slow, or was killed.
            found.append({"prediction_problem": f"no answer in {_SECONDS:.0f} s"})
    return found


def _without_gpu() -> None:
    # CUDA reads the variable when it is first used, which is later.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

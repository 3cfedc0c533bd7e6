"""The planner's predictions of configurations, made beside their measurement.

On a GPU's machine, the processes that predict run while the GPU measures. They see no GPU: tensors
without memory on a CPU are all that the planner needs. Of a step they keep the operators, packed
into a text of some kB, so that its speed can be predicted later with other constants.
"""

from __future__ import annotations

import base64
import contextlib
import gzip
import json
import multiprocessing
import multiprocessing.pool
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from firstlight.bench.gpu_machine import BenchMachine
from firstlight.bench.models import PlannerCase
from firstlight.errors import FirstlightError
from firstlight.planner.memory.kernels import (
    Layout,
    Operator,
    OperatorCount,
    Target,
    cuda_target,
    this_cpu,
)
from firstlight.planner.memory.module import predict_generation
from firstlight.planner.memory.prediction import MemoryPrediction
from firstlight.planner.memory.program import uncompiled
from firstlight.planner.memory.recipe import predict_evaluation, trace_memory
from firstlight.planner.speed.recipe import all_micro_batches
from firstlight.recipe import ResolvedRecipe, parse_resolved_recipe

#: The module that answers `steps_request`.
STEPS_MODULE = "firstlight.bench.planner_steps"

#: Cores from which on predictions have processes of their own.
_MANY_CORES = 4

#: Seconds that all predictions together may take once the measurement is done: less than
#: a row may take longer than expected (`calls.Row.limit`), which would cost the measurement.
_SECONDS = 60.0

#: A function of a module with its arguments.
Predict = tuple[Callable[..., dict[str, Any]], tuple[Any, ...]]


def target_request(machine: BenchMachine) -> dict[str, Any] | None:
    """The device of a machine for requests; None is the CPU that predicts."""
    if machine.device == "cpu":
        return None
    name = machine.name if machine.gpu is None else machine.gpu.name
    return {"name": name, "capability": list(machine.capability)}


def steps_request(
    machine: BenchMachine, cases: Sequence[PlannerCase], seconds: float
) -> dict[str, Any]:
    """A request of `planner_steps`."""
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
        "predicted_bytes" of tensors, "predicted_reserved_bytes" of the allocator,
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


def predict_memory(
    recipe: ResolvedRecipe,
    kind: str,
    generation: Mapping[str, Any] | None,
    target: Target | None = None,
) -> MemoryPrediction:
    """The predicted memory of a recipe.

    Args:
        recipe: recipe with its model.
        kind: "training", "evaluation" or "generation".
        generation: see `PlannerCase`.
        target: device that is predicted for; None is this CPU.
    """
    if kind == "generation":
        assert generation is not None
        return predict_generation(recipe.model, **generation, target=target)
    if kind == "evaluation":
        return predict_evaluation(recipe, target)
    return trace_memory(recipe, target)


def memory_entry(found: MemoryPrediction) -> dict[str, Any]:
    """The keys of a prediction's memory, see `predict_case`."""
    return {
        "predicted_bytes": found.peak_bytes,
        "predicted_reserved_bytes": found.reserved_bytes,
        "predicted_phase": found.phase,
        "host_bytes": found.host_bytes,
    }


def packed(counts: Sequence[OperatorCount]) -> str:
    """Counted operators as text."""
    values = [
        [
            one.name,
            one.phase,
            entry.count,
            _names(one.inputs),
            _names(one.outputs),
            one.flops,
            one.moved_bytes,
            one.options,
        ]
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
        one = Operator(name, phase, _layouts(inputs), _layouts(outputs), flops, moved, options)
        operators.append(OperatorCount(one, count))
    return MemoryPrediction(0, "", {}, {}, 0, 0, 0, tuple(operators))


def _layouts(values: Sequence[Any]) -> tuple[Layout, ...]:
    return tuple((tuple(shape), getattr(torch, dtype)) for shape, dtype in values)


def _names(layouts: Sequence[Layout]) -> list[tuple[list[int], str]]:
    return [(list(shape), str(dtype).removeprefix("torch.")) for shape, dtype in layouts]


@contextlib.contextmanager
def predicting(
    calls: Sequence[Predict], *, beside: bool
) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """Predict while the block runs; yields what waits for the predictions, in the calls' order.

    Args:
        calls: function and arguments of each prediction. An error is its result:
            "prediction_problem".
        beside: True takes processes of their own, where there are cores for them; else predictions
            are made when they are waited for.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    if not calls or not beside or cores < _MANY_CORES:
        yield lambda: [_answer(*call) for call in calls]
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["firstlight.planner.plan.preloaded"])
    pool = context.Pool(min(len(calls), cores // 2), _without_gpu, maxtasksperchild=1)
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
    end = time.monotonic() + _SECONDS
    return [_wait(one, max(end - time.monotonic(), 0.0)) for one in asked]


def _wait(
    asked: multiprocessing.pool.AsyncResult[dict[str, Any]], seconds: float
) -> dict[str, Any]:
    try:
        return asked.get(seconds)
    except multiprocessing.TimeoutError:
        # Of a process that was killed nothing comes, either.
        return {"prediction_problem": f"no answer in {_SECONDS:.0f} s"}


def _without_gpu() -> None:
    """Hide the GPU from a process that predicts."""
    # CUDA reads it when it is first used.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

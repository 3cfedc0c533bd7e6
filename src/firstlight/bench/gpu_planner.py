"""Rows of a part of `firstlight bench gpu`: the planner's figures beside measured ones.

Memory is that of every configuration of `gpu_cases`. Speed is that of those which train: the
constants of the data sheet's speed model are fitted on some of them (`planner/speed/fit.py`), and
the error is that of the others.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from firstlight.bench.gpu_cases import GPUCase, dry_grid, gpu_grid
from firstlight.bench.gpu_machine import Machine
from firstlight.bench.gpu_pages import Findings
from firstlight.bench.gpu_predictions import target_request, unpacked
from firstlight.bench.planner_speed import percentile
from firstlight.bench.runner import Row
from firstlight.hardware.gpus import GPU, find_gpu
from firstlight.models.accounting import count_parameters, meta_model
from firstlight.planner.memory.ranks import exchange_of
from firstlight.planner.speed.fit import TimedStep, fit_constants, relative_errors
from firstlight.planner.speed.gpu import MeasuredGpu
from firstlight.planner.speed.recipe import workload_of
from firstlight.recipe import parse_resolved_recipe

#: The part's name.
NAME = "planner"

STEPS_MODULE = "firstlight.bench.gpu_steps_once"

#: Configurations that one process measures, and of those that compile.
_TOGETHER, _COMPILED_TOGETHER = 7, 2

#: Configurations at the grid's beginning that are measured before the others.
FIRST = 20

#: Seconds of a process before its first configuration, of one, and of one that compiles.
_START_SECONDS, _CASE_SECONDS, _COMPILED_SECONDS = 12.0, 3.5, 40.0

#: A GPU whose data sheet stands for a CPU's in a dry run, so that its code runs.
_DRY_GPU = "H100"


def grid_of(machine: Machine) -> tuple[GPUCase, ...]:
    """The configurations for a machine."""
    return dry_grid() if machine.dry else gpu_grid()


def steps_request(machine: Machine, cases: Sequence[GPUCase], seconds: float) -> dict[str, Any]:
    """A request of `gpu_steps_once`.

    Args:
        machine: the machine that measures.
        cases: the configurations.
        seconds: of timing each.
    """
    request: dict[str, Any] = {
        "cases": [case.request(machine.device) for case in cases],
        "device": machine.device,
        "steps": 2 if machine.dry else 12,
        "seconds": seconds,
        "target": target_request(machine),
    }
    return request


def _groups(machine: Machine) -> Iterator[tuple[int, list[GPUCase]]]:
    """The configurations by process, each group with its place in the order of all rows: the
    first twenty, the rest, and what compiles, which has processes of its own."""
    cases = [
        (4 if case.slow else 2 if number < FIRST else 3, case)
        for number, case in enumerate(grid_of(machine))
        if not machine.lacks(*case.needs)
    ]
    for value in (2, 3, 4):
        these = [case for own, case in cases if own == value]
        together = _COMPILED_TOGETHER if value == 4 else _TOGETHER
        for start in range(0, len(these), together):
            yield value, these[start : start + together]


def planner_rows(machine: Machine) -> list[Row]:
    """The part's rows: several configurations each."""
    rows = []
    for number, (value, group) in enumerate(_groups(machine)):
        each = 1.0 if machine.dry else _COMPILED_SECONDS if group[0].slow else _CASE_SECONDS
        rows.append(
            Row(
                f"configurations {number + 1}",
                STEPS_MODULE,
                steps_request(machine, group, 1.2),
                seconds=(5.0 if machine.dry else _START_SECONDS) + each * len(group),
                value=value,
            )
        )
    return rows


@dataclass(frozen=True)
class _Timed:
    """A configuration that was timed.

    Attributes:
        case: the configuration.
        step: its operators and its time.
    """

    case: GPUCase
    step: TimedStep


def _results(found: Findings) -> dict[str, dict[str, Any]]:
    """What is known of each configuration, by its name."""
    return {
        one["name"]: one
        for row in found.measured(NAME)
        for run in found.outcome(NAME, row.name).runs
        for one in run["cases"]
    }


def memory_results(found: Findings) -> list[dict[str, Any]]:
    """The configurations as `planner_memory.summary` takes them, in the grid's order; "reason" is
    why one has no error."""
    known, results = _results(found), []
    for case in grid_of(found.machine):
        one = known.get(case.name, {"reason": "not measured yet"})
        missing = found.machine.lacks(*case.needs)
        reason = missing or one["reason"] or one.get("prediction_problem", "")
        entry = {**one, "name": case.name, "reason": reason}
        if not reason:
            entry["error"] = one["predicted_bytes"] / one["peak_bytes"] - 1
            entry["seconds"] = one["prediction_seconds"]
        results.append(entry)
    return results


def timed_steps(found: Findings) -> list[_Timed]:
    """The configurations that were timed and whose operators are known."""
    known, timed = _results(found), []
    for case in grid_of(found.machine):
        one = known.get(case.name, {})
        if one.get("reason") or not one.get("step_seconds") or "operators" not in one:
            continue
        recipe = parse_resolved_recipe(case.recipe("cpu"))
        parameters = count_parameters(meta_model(recipe.model)).total
        work = workload_of(recipe, exchange_of(recipe, parameters, 1, one["host_bytes"]))
        seconds = statistics.median(one["step_seconds"])
        timed.append(_Timed(case, TimedStep(unpacked(one["operators"]), work, seconds)))
    return timed


@dataclass(frozen=True)
class SpeedFit:
    """The speed model, fitted.

    Attributes:
        gpu: the kind of GPU that it is of.
        measured: the constants; None where there are too few steps for them.
        sheet_errors: relative error of each timed configuration by the data sheet.
        errors: the same by the fitted constants; {} without.
        held_out: names of the configurations that are not fitted.
    """

    gpu: GPU
    measured: MeasuredGpu | None
    sheet_errors: Mapping[str, float]
    errors: Mapping[str, float]
    held_out: Sequence[str]

    def sizes(self, errors: Mapping[str, float]) -> list[float]:
        """Sizes of the held-out configurations' errors, the least first."""
        return sorted(abs(errors[name]) for name in self.held_out if name in errors)


def fit_speed(found: Findings) -> SpeedFit | None:
    """Fit the speed model; None where nothing was timed, or the GPU has no data sheet."""
    gpu = find_gpu(_DRY_GPU) if found.machine.dry else found.machine.gpu
    timed = timed_steps(found)
    if gpu is None or not timed:
        return None
    names = [one.case.name for one in timed]
    steps = [one.step for one in timed]
    sheet = dict(zip(names, relative_errors(steps, gpu, None), strict=True))
    held_out = [one.case.name for one in timed if not one.case.fitted]
    fitted = [one.step for one in timed if one.case.fitted]
    if not fitted or not held_out:
        return SpeedFit(gpu, None, sheet, {}, held_out)
    constants = fit_constants(fitted, gpu)
    errors = dict(zip(names, relative_errors(steps, gpu, constants), strict=True))
    sizes = sorted(abs(errors[name]) for name in held_out)
    measured = MeasuredGpu(
        constants=constants,
        error=percentile(sizes, 0.95),
        fitted=len(fitted),
        held_out=len(held_out),
        torch=found.machine.torch,
        context_bytes=_context_bytes(found),
    )
    return SpeedFit(gpu, measured, sheet, errors, held_out)


def _context_bytes(found: Findings) -> int | None:
    """What the driver counts of a process beside torch's allocator, in the median."""
    sizes = [
        one["driver_bytes"] - one["reserved_bytes"]
        for one in memory_results(found)
        if not one["reason"] and "driver_bytes" in one
    ]
    return round(statistics.median(sizes)) if sizes else None

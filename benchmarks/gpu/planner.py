"""The planner's predictions compared with the measurements of items L, and the fit of its
constants.

Memory is compared for every measured configuration of `models.gpu_grid`, speed for those that
train. The constants of the speed model are fitted on some of them, and the error is measured on the
others. Nothing here needs a GPU.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.models import PlannerCase, dry_grid, gpu_grid
from benchmarks.pages import markdown_table
from benchmarks.planner_constants import (
    TimedStep,
    fit_constants,
    relative_errors,
    save_measured,
)
from benchmarks.planner_memory import predict_memory
from benchmarks.planner_speed import percentile
from firstlight.console import say
from firstlight.errors import InputError
from firstlight.files.cache import cache_folder
from firstlight.hardware.gpus import GPU, find_gpu
from firstlight.models.accounting import count_parameters, meta_model
from firstlight.planner.memory.kernels import Target, cuda_target
from firstlight.planner.memory.program import uncompiled
from firstlight.planner.memory.recipe import trace_memory
from firstlight.planner.speed.gpu import BOUNDS, DEFAULT_SHARES, MeasuredGpu, measured_gpu
from firstlight.planner.speed.throughput import all_micro_batches, exchange_of, workload_of
from firstlight.recipe import parse_resolved_recipe

#: Name of the file of constants in the folder of the results.
MEASURED_NAME = "measured_gpus.json"

#: GPU whose data sheet replaces the CPU's in a dry run, so that it runs the same code.
_DRY_GPU = "H100"

_MIB = 2**20


@dataclass(frozen=True)
class Compared:
    """One configuration, measured and predicted.

    Attributes:
        case: the configuration.
        measured_mib: measured peak of torch's allocator.
        predicted_mib: predicted peak.
        step: the measured step with its counted operators; None if nothing was timed.
    """

    case: PlannerCase
    measured_mib: float
    predicted_mib: float
    step: TimedStep | None

    @property
    def memory_error(self) -> float:
        """Relative error of the predicted memory."""
        return self.predicted_mib / self.measured_mib - 1


def compare(lines: Sequence[Mapping[str, Any]], gpu: GPU) -> Iterator[Compared]:
    """Predict the measured configurations, which takes a second or two each.

    Args:
        lines: lines of `quick`; if a configuration has several rows, the last one counts.
        gpu: the GPU on which they were measured.
    """
    rows = {
        row["row"]: row
        for line in lines
        if line["item"].startswith("L-")
        for row in line["rows"]
        if "allocated_mib" in row
    }
    target = cuda_target(gpu.name, gpu.capability)
    for case in dry_grid() if lines[-1]["dry"] else gpu_grid():
        if case.name in rows:
            say(f"predicting {case.name}")
            yield _compared(case, rows[case.name], target)


def _compared(case: PlannerCase, row: Mapping[str, Any], target: Target) -> Compared:
    recipe = parse_resolved_recipe(case.recipe("cuda"))
    found = predict_memory(recipe, case.kind, case.generation, target)
    step = None
    if "ms" in row:
        compiled = recipe.efficiency.compile is True
        counted = trace_memory(uncompiled(recipe), target) if compiled else found
        counted = all_micro_batches(counted, case.accumulation)
        parameters = count_parameters(meta_model(recipe.model)).total
        work = workload_of(recipe, exchange_of(recipe, parameters, 1, found.host_bytes))
        step = TimedStep(counted, work, row["ms"] / 1000)
    return Compared(case, row["allocated_mib"], found.peak_bytes / _MIB, step)


def fit(lines: Sequence[Mapping[str, Any]], folder: Path) -> str:
    """Fit the constants of the speed model, and write them.

    They are written to the folder, from which they can be copied into the package, and to the
    cache, where the planner on this machine finds them from then on. Constants of a dry run are
    only written to the folder.

    Args:
        lines: lines of `quick`; only those with the GPU of the last line are used.
        folder: folder of the lines.

    Returns:
        Tables of the errors and of the constants, in Markdown.

    Raises:
        ConfigError: the GPU is not in the table of data sheets.
        InputError: no configuration was measured.
    """
    last = lines[-1]
    lines = [line for line in lines if line["device"] == last["device"]]
    gpu = find_gpu(_DRY_GPU) if last["dry"] else find_gpu(last["device"], last.get("memory_bytes"))
    found = list(compare(lines, gpu))
    timed = [(one.case, one.step) for one in found if one.step is not None]
    fitted = [step for case, step in timed if case.fitted]
    if not fitted or len(fitted) == len(timed):
        raise InputError(f"{folder} lacks configurations of the planner: measure --items L first")
    constants = fit_constants(fitted, gpu)
    steps = [step for _, step in timed]
    sheet, errors = (relative_errors(steps, gpu, one) for one in (None, constants))
    held_out = [number for number, (case, _) in enumerate(timed) if not case.fitted]
    sizes = sorted(abs(errors[number]) for number in held_out)
    contexts = [
        row["context_mib"] for line in lines for row in line["rows"] if "context_mib" in row
    ]
    known = measured_gpu(gpu)
    context = None if known is None else known.context_bytes
    if contexts:
        context = round(statistics.median(contexts) * _MIB)
    measured = MeasuredGpu(
        constants=constants,
        error=percentile(sizes, 0.95),
        fitted=len(fitted),
        held_out=len(held_out),
        torch=last["torch"],
        context_bytes=context,
    )
    places = [folder / MEASURED_NAME]
    places += [] if last["dry"] else [cache_folder() / "calibration" / "gpus.json"]
    for path in places:
        save_measured(path, gpu.name, measured)
    memory = sorted(abs(one.memory_error) for one in found)
    parts = [
        f"Memory of {len(found)} configurations: 95 of 100 within {percentile(memory, 0.95):.1%}, "
        f"at most {max(0.0, *(-one.memory_error for one in found)):.1%} too little.\n",
        _memory_table(found),
        f"Speed: {measured.source}; half within {statistics.median(sizes):.1%}.\n",
        _speed_table(timed, sheet, errors),
        _constants_table(constants),
        f"written: {', '.join(map(str, places))}\n",
    ]
    return "\n".join(parts)


def _memory_table(found: Sequence[Compared]) -> str:
    rows = [
        (one.case.name, f"{one.predicted_mib:,.0f}", f"{one.measured_mib:,.0f}", f"{error:+.2%}")
        for one in sorted(found, key=lambda one: -abs(one.memory_error))
        for error in (one.memory_error,)
    ]
    return markdown_table(("configuration", "predicted MiB", "measured MiB", "error"), rows)


def _speed_table(
    timed: Sequence[tuple[PlannerCase, TimedStep]], sheet: Sequence[float], errors: Sequence[float]
) -> str:
    rows = [
        (
            case.name,
            f"{step.seconds:.4f}",
            f"{unfitted:+.1%}",
            f"{error:+.1%}",
            "fitted" if case.fitted else "held out",
        )
        for (case, step), unfitted, error in zip(timed, sheet, errors, strict=True)
    ]
    rows.sort(key=lambda row: -abs(float(row[3].rstrip("%"))))
    return markdown_table(("configuration", "measured s", "data sheet", "fitted", ""), rows)


def _constants_table(constants: Mapping[str, float]) -> str:
    rows = [
        (name, f"{getattr(DEFAULT_SHARES, name).expected:.3g}", f"{constants[name]:.3g}")
        for name in BOUNDS
    ]
    return markdown_table(("constant", "from the data sheet", "fitted"), rows)

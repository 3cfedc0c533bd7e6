"""Part "planner" of `python -m benchmarks gpu`: the planner's predictions against measurements.

Memory is compared for every configuration of `models.gpu_grid`, speed for those that train. The
constants of the speed model are fitted on some of these (`planner/speed/throughput.py`), and the
error is reported for the others.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu_parts import BenchMachine, Findings, Page, Part, Row
from benchmarks.models import PlannerCase, dry_grid, gpu_grid
from benchmarks.pages import markdown_table
from benchmarks.planner_constants import (
    TimedStep,
    fit_constants,
    relative_errors,
    save_measured,
)
from benchmarks.planner_memory import (
    ALLOWED_ERROR,
    ALLOWED_SHORTAGE,
    draw_memory_errors,
    draw_peaks,
    draw_shares,
    summary,
)
from benchmarks.planner_speed import GOAL, percentile
from benchmarks.planner_steps import STEPS_MODULE, steps_request, unpacked
from firstlight.bench.display import cells, new_figure, png_of
from firstlight.files.cache import cache_folder
from firstlight.hardware.gpus import GPU, find_gpu
from firstlight.models.accounting import count_parameters, meta_model
from firstlight.planner.speed.gpu import BOUNDS, DEFAULT_SHARES, MeasuredGpu
from firstlight.planner.speed.throughput import exchange_of, workload_of
from firstlight.recipe import parse_resolved_recipe

#: The part's name.
NAME = "planner"

#: Number of configurations that one process measures; number of those that compile.
_TOGETHER, _COMPILED_TOGETHER = 7, 2

#: Number of configurations at the grid's beginning that are measured before the others.
FIRST = 20

#: Expected seconds of a process before its first configuration, of a configuration, and of a
#: configuration that compiles.
_START_SECONDS = 12.0
_CASE_SECONDS = 3.5
_COMPILED_SECONDS = 40.0

#: GPU whose data sheet a dry run uses for the CPU, so that it runs the same code.
_DRY_GPU = "H100"


def grid_of(machine: BenchMachine) -> tuple[PlannerCase, ...]:
    """The configurations for a machine."""
    return dry_grid() if machine.dry else gpu_grid()


def _groups(machine: BenchMachine) -> Iterator[tuple[int, list[PlannerCase]]]:
    """(`Row.value`, the configurations of one process) for each process: first those with the first
    `FIRST` configurations, then the rest, then those that compile."""
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


def planner_rows(machine: BenchMachine) -> list[Row]:
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


def _results(found: Findings) -> dict[str, dict[str, Any]]:
    """The results of each configuration, by its name."""
    return {
        one["name"]: one
        for row in found.measured(NAME)
        for run in found.outcome(NAME, row.name).runs
        for one in run["cases"]
    }


def memory_results(found: Findings) -> list[dict[str, Any]]:
    """The results of all configurations for `planner_memory.summary`, in the grid's order.

    Each has "name" and "reason" (why it has no error, or ""), and with both a measurement and a
    prediction "error" (predicted / measured - 1) and "seconds" of the prediction.
    """
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


def timed_steps(found: Findings) -> list[tuple[PlannerCase, TimedStep]]:
    """The configurations that were timed and whose operators are known, with their steps."""
    known, timed = _results(found), []
    for case in grid_of(found.machine):
        one = known.get(case.name, {})
        if one.get("reason") or not one.get("step_seconds") or "operators" not in one:
            continue
        recipe = parse_resolved_recipe(case.recipe("cpu"))
        parameters = count_parameters(meta_model(recipe.model)).total
        work = workload_of(recipe, exchange_of(recipe, parameters, 1, one["host_bytes"]))
        seconds = statistics.median(one["step_seconds"])
        timed.append((case, TimedStep(unpacked(one["operators"]), work, seconds)))
    return timed


@dataclass(frozen=True)
class SpeedFit:
    """The fitted speed model of a kind of GPU, and its errors.

    Attributes:
        gpu: data sheet of the GPU.
        measured: the fitted constants; None if there are too few steps to fit them.
        sheet_errors: relative error of the prediction from the data sheet, by configuration.
        errors: relative error of the prediction from the fitted constants, by configuration; {} if
            there are none.
        held_out: names of the configurations that are not used for fitting.
    """

    gpu: GPU
    measured: MeasuredGpu | None
    sheet_errors: Mapping[str, float]
    errors: Mapping[str, float]
    held_out: Sequence[str]

    def sizes(self, errors: Mapping[str, float]) -> list[float]:
        """Absolute errors of the held-out configurations, in ascending order."""
        return sorted(abs(errors[name]) for name in self.held_out if name in errors)


def fit_speed(found: Findings) -> SpeedFit | None:
    """Fit the speed model; None if nothing was timed, or the GPU has no data sheet."""
    gpu = find_gpu(_DRY_GPU) if found.machine.dry else found.machine.gpu
    timed = timed_steps(found)
    if gpu is None or not timed:
        return None
    names, steps = [case.name for case, _ in timed], [step for _, step in timed]
    sheet = dict(zip(names, relative_errors(steps, gpu, None), strict=True))
    held_out = [case.name for case, _ in timed if not case.fitted]
    fitted = [step for case, step in timed if case.fitted]
    if not fitted or not held_out:
        return SpeedFit(gpu, None, sheet, {}, held_out=held_out)
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
    return SpeedFit(gpu, measured, sheet, errors, held_out=held_out)


def _context_bytes(found: Findings) -> int | None:
    """The median bytes of a process that the driver counts beyond the memory that torch's allocator
    holds: the CUDA context and kernels; None if unknown."""
    sizes = [
        one["driver_bytes"] - one["reserved_bytes"]
        for one in memory_results(found)
        if not one["reason"] and "driver_bytes" in one
    ]
    return round(statistics.median(sizes)) if sizes else None


_MIB = 2**20

#: File of the fitted constants in the folder of the results.
_MEASURED_NAME = "measured_gpus.json"


def _page(found: Findings) -> Page:
    memory, fit = memory_results(found), fit_speed(found)
    if fit is not None and fit.measured is not None and found.folder is not None:
        # In the results' folder, to be copied into the package for all users; in the cache, where
        # the planner finds it on this machine from now on.
        save_measured(found.folder / _MEASURED_NAME, fit.gpu.name, fit.measured)
        if not found.machine.dry:
            own = cache_folder() / "calibration" / "gpus.json"
            save_measured(own, fit.gpu.name, fit.measured)
    text = "\n".join(
        (
            "## Memory\n",
            *_memory_text(memory),
            "## Speed\n",
            *_speed_text(found, fit),
            "![predicted against measured](../images/gpu-planner.png)\n",
        )
    )
    return Page("\n".join(_summary(memory, fit)), text, {"gpu-planner.png": _draw(memory, fit)})


def _summary(memory: Sequence[Mapping[str, Any]], fit: SpeedFit | None) -> Iterator[str]:
    found = summary(memory)
    if found["count"]:
        yield (
            f"- Memory of {found['count']} configurations, the allocator's peak: 95 of 100 within "
            f"{found['error_95']:.1%} (goal {ALLOWED_ERROR:.0%}), at most "
            f"{found['worst_shortage']:.1%} too little (goal {ALLOWED_SHORTAGE:.0%})."
        )
    if fit is not None and fit.measured is not None:
        sheet = percentile(fit.sizes(fit.sheet_errors), 0.95)
        half = statistics.median(fit.sizes(fit.errors))
        yield (
            f"- Speed, with constants fitted on {fit.measured.fitted} configurations: 95 of 100 of "
            f"the {fit.measured.held_out} others within {fit.measured.error:.0%} "
            f"(goal {GOAL:.0%}), half within {half:.1%}; with unfitted constants {sheet:.0%}."
            + (" Some of them set four further figures." if fit.gpu.name == "H100" else "")
        )


def _memory_text(memory: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    found = summary(memory)
    if not found["count"]:
        yield "Nothing was measured and predicted.\n"
        return
    rows = [
        ("configurations", "", f"{found['count']}"),
        ("95 of 100 within", f"{ALLOWED_ERROR:.0%}", f"{found['error_95']:.2%}"),
        ("half within", "", f"{found['median_error']:.2%}"),
        ("most that was too little", f"{ALLOWED_SHORTAGE:.0%}", f"{found['worst_shortage']:.2%}"),
        ("seconds of a prediction, 95 of 100", "10", f"{found['prediction_seconds_95']:.1f}"),
    ]
    yield markdown_table(("allocator's peak", "goal", "found"), rows)
    good = [one for one in memory if not one["reason"]]
    held = [
        one["predicted_reserved_bytes"] / one["reserved_bytes"] - 1
        for one in good
        if one.get("reserved_bytes")
    ]
    if held:
        beside = [
            one["driver_bytes"] - one["reserved_bytes"] for one in good if "driver_bytes" in one
        ]
        driver = ""
        if beside:
            driver = (
                f" The driver counts {statistics.median(beside) / _MIB:,.0f} MiB more than that "
                f"({min(beside) / _MIB:,.0f} to {max(beside) / _MIB:,.0f}): context, kernels."
            )
        yield (
            f"What the allocator holds at its peak, gaps included, is off by {min(held):+.1%} to "
            f"{max(held):+.1%}, in the median by {statistics.median(held):+.1%}.{driver}\n"
        )
    each = "{name} | {predicted_bytes:mebi} | {peak_bytes:mebi} | {error:+.2%} | {predicted_phase}"
    ordered = sorted(good, key=lambda one: -abs(one["error"]))
    header = ("configuration", "predicted MiB", "measured MiB", "error", "peak in")
    yield markdown_table(header, [cells(each, one) for one in ordered])
    missing = [(one["name"], one["reason"]) for one in memory if one["reason"]]
    if missing:
        yield markdown_table(("configuration without a figure", "reason"), missing)


#: The fitted constants: description, and format of the value.
_CONSTANTS = {
    "products": ("share of the peak in large matrix products", "{:.0%}"),
    "attention": ("share of the peak in fused attention, forward", "{:.0%}"),
    "bandwidth": ("share of the memory's bandwidth", "{:.0%}"),
    "launch_seconds": ("starting an operator from Python, seconds", "{:.1e}"),
    "fused_traffic": ("passes of compiled kernels over what stands between products", "{:.2f}"),
}


def _speed_text(found: Findings, fit: SpeedFit | None) -> Iterator[str]:
    if fit is None:
        yield (
            "Nothing was timed, or the GPU is not in the table of data sheets "
            "(`src/firstlight/hardware/gpus.py`).\n"
        )
        return
    if found.machine.dry:
        yield f"A dry run: a CPU's times beside the data sheet of a {fit.gpu.name}.\n"
    if fit.measured is not None:
        yield (
            "Some constants of the data sheet's speed model were guessed; these are fitted on "
            f"{fit.measured.fitted} configurations:\n"
        )
        rows = [
            (
                words,
                template.format(getattr(DEFAULT_SHARES, name).expected),
                template.format(fit.measured.constants[name]),
            )
            for name, (words, template) in _CONSTANTS.items()
        ]
        assert list(_CONSTANTS) == list(BOUNDS)
        yield markdown_table(("constant", "from the data sheet", "fitted"), rows)
        rows = [
            (
                title,
                f"{percentile(fit.sizes(errors), 0.95):.1%}",
                f"{statistics.median(fit.sizes(errors)):.1%}",
            )
            for title, errors in (
                ("by unfitted constants", fit.sheet_errors),
                ("by the fitted constants", fit.errors),
            )
        ]
        if fit.gpu.name == "H100" and not found.machine.dry:
            yield (
                "Four more figures were set by what an H100 took on 2026-11-26, some of it held\n"
                "out here: the speed of products in fp32, and of products with rows that are no\n"
                "multiple of 16 bytes, and the host's time in selective checkpointing and in a\n"
                "call of an optimizer (`src/firstlight/planner/speed/gpu.py`).\n"
            )
        yield f"Errors of the {fit.measured.held_out} configurations that were held out:\n"
        header = (
            f"step time (goal: 95 of 100 within {GOAL:.0%})",
            "95 of 100 within",
            "half within",
        )
        yield markdown_table(header, rows)
        yield (
            f"The constants are in `{_MEASURED_NAME}` of the folder of the results. With those of\n"
            f"`src/firstlight/planner/speed/{_MEASURED_NAME}`, which come with the package,\n"
            '`firstlight plan` says "measured on this GPU type".\n'
        )
    yield markdown_table(
        ("configuration", "measured s", "data sheet", "fitted", ""), list(_speed_rows(found, fit))
    )


def _speed_rows(found: Findings, fit: SpeedFit) -> Iterator[tuple[str, ...]]:
    seconds = {
        one["name"]: statistics.median(one["step_seconds"])
        for one in memory_results(found)
        if one.get("step_seconds")
    }
    order = sorted(
        fit.sheet_errors, key=lambda name: -abs(fit.errors.get(name, fit.sheet_errors[name]))
    )
    for name in order:
        fitted = f"{fit.errors[name]:+.1%}" if name in fit.errors else ""
        role = "held out" if name in fit.held_out else "fitted"
        yield name, f"{seconds[name]:.4f}", f"{fit.sheet_errors[name]:+.1%}", fitted, role


def _draw(memory: Sequence[Mapping[str, Any]], fit: SpeedFit | None) -> bytes:
    """A PNG: predicted against measured memory, and the errors of memory and of speed."""
    good = [one for one in memory if not one["reason"]]
    figure = new_figure(13, 4.6)
    draw_peaks(figure.add_subplot(1, 3, 1), good)
    draw_memory_errors(figure.add_subplot(1, 3, 2), good, "error of memory, %")
    speed: Any = figure.add_subplot(1, 3, 3)
    if fit is not None:
        for title, found, color in (
            ("by the data sheet", fit.sheet_errors, "tab:orange"),
            ("fitted", fit.errors, "tab:blue"),
        ):
            values = [100 * found[name] for name in fit.held_out if name in found]
            draw_shares(speed, values, color, title)
        speed.legend(loc="lower right", fontsize="small")
    speed.axvspan(-100 * GOAL, 100 * GOAL, color="tab:green", alpha=0.12)
    speed.set(xlabel="error of the step's time, held out, %", ylabel="share of configurations")
    figure.suptitle(f"{len(good)} configurations; green is the goal")
    return png_of(figure)


PLANNER = Part(
    NAME,
    "The planner's figures",
    "Memory and speed as `firstlight plan` predicts them without a GPU, beside what training "
    "steps, evaluations and generation take on it.",
    planner_rows,
    page=_page,
)

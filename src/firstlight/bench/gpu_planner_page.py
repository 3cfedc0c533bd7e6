"""The page of `firstlight bench gpu`'s part on the planner."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from firstlight.bench.gpu_pages import Findings, Page, Part, markdown_table, png_of
from firstlight.bench.gpu_planner import (
    NAME,
    SpeedFit,
    fit_speed,
    memory_results,
    planner_rows,
)
from firstlight.bench.planner_memory import ALLOWED_ERROR, ALLOWED_SHORTAGE, summary
from firstlight.bench.planner_speed import GOAL, percentile
from firstlight.data.remote import cache_folder
from firstlight.planner.speed.gpu import BOUNDS, DEFAULT_SHARES, save_measured

_GIB, _MIB = 2**30, 2**20

#: File of the fitted constants in the folder of the results.
_MEASURED_NAME = "measured_gpus.json"


def _page(found: Findings) -> Page:
    memory, fit = memory_results(found), fit_speed(found)
    if fit is not None and fit.measured is not None and found.folder is not None:
        # For everybody, once it stands in the package; and for this machine at once.
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
    found = summary([dict(one) for one in memory])
    if found["count"]:
        yield (
            f"- Memory of {found['count']} configurations, the allocator's peak: 95 of 100 within "
            f"{found['error_95']:.1%} (goal {ALLOWED_ERROR:.0%}), at most "
            f"{found['worst_shortage']:.1%} too little (goal {ALLOWED_SHORTAGE:.0%})."
        )
    if fit is not None and fit.measured is not None:
        sheet = percentile(fit.sizes(fit.sheet_errors), 0.95)
        yield (
            f"- Speed, fitted on {fit.measured.fitted} configurations: 95 of 100 of "
            f"{fit.measured.held_out} others within {fit.measured.error:.0%} (goal {GOAL:.0%}); by "
            f"the data sheet alone {sheet:.0%}."
        )


def _memory_text(memory: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    found = summary([dict(one) for one in memory])
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
    listed = [
        (
            one["name"],
            f"{one['predicted_bytes'] / _MIB:,.0f}",
            f"{one['peak_bytes'] / _MIB:,.0f}",
            f"{one['error']:+.2%}",
            one["predicted_phase"],
        )
        for one in sorted(good, key=lambda one: -abs(one["error"]))
    ]
    header = ("configuration", "predicted MiB", "measured MiB", "error", "peak in")
    yield markdown_table(header, listed)
    missing = [(one["name"], one["reason"]) for one in memory if one["reason"]]
    if missing:
        yield markdown_table(("configuration without a figure", "reason"), missing)


#: What the fitted constants are, in words and as text of a value.
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
                ("by the data sheet", fit.sheet_errors),
                ("by the fitted constants", fit.errors),
            )
        ]
        yield f"Errors of the {fit.measured.held_out} configurations that were held out:\n"
        header = (
            f"step time (goal: 95 of 100 within {GOAL:.0%})",
            "95 of 100 within",
            "half within",
        )
        yield markdown_table(header, rows)
        yield (
            f"The constants stand in `{_MEASURED_NAME}` of the folder of the results and in the\n"
            "cache of the machine that wrote this page. Copied to\n"
            f"`src/firstlight/planner/{_MEASURED_NAME}`, they are everybody's, and `firstlight\n"
            f"plan` says of a {fit.gpu.name} that it was measured on this GPU type.\n"
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
    """Predicted against measured memory, and the errors of memory and of speed, as a PNG."""
    # Drawn without pyplot: no window system is looked for, no global state is left behind.
    from matplotlib.figure import Figure

    good = [one for one in memory if not one["reason"]]
    figure = Figure(figsize=(13, 4.6), layout="constrained")
    peaks: Any = figure.add_subplot(1, 3, 1)
    measured = [one["peak_bytes"] / _GIB for one in good]
    predicted = [one["predicted_bytes"] / _GIB for one in good]
    ends = [min(measured, default=0.1) / 1.3, 1.3 * max(measured, default=1.0)]
    peaks.plot(ends, ends, color="tab:gray", linewidth=0.8)
    peaks.scatter(measured, predicted, s=14, color="tab:blue")
    peaks.set(xscale="log", yscale="log", xlabel="measured peak, GiB", ylabel="predicted peak, GiB")
    errors: Any = figure.add_subplot(1, 3, 2)
    _draw_shares(errors, [100 * one["error"] for one in good], "tab:blue", "memory")
    errors.axvspan(-100 * ALLOWED_SHORTAGE, 100 * ALLOWED_ERROR, color="tab:green", alpha=0.12)
    errors.set(xlabel="error of memory, %", ylabel="share of configurations")
    speed: Any = figure.add_subplot(1, 3, 3)
    if fit is not None:
        for title, found, color in (
            ("by the data sheet", fit.sheet_errors, "tab:orange"),
            ("fitted", fit.errors, "tab:blue"),
        ):
            values = [100 * found[name] for name in fit.held_out if name in found]
            _draw_shares(speed, values, color, title)
        speed.legend(loc="lower right", fontsize="small")
    speed.axvspan(-100 * GOAL, 100 * GOAL, color="tab:green", alpha=0.12)
    speed.set(xlabel="error of the step's time, held out, %", ylabel="share of configurations")
    figure.suptitle(f"{len(good)} configurations; green is the goal")
    return png_of(figure)


def _draw_shares(axes: Any, values: Sequence[float], color: str, label: str) -> None:
    ordered = sorted(values)
    shares = [(i + 1) / len(ordered) for i in range(len(ordered))]
    if ordered:
        axes.step(ordered, shares, where="post", color=color, label=label)


PLANNER = Part(
    NAME,
    "The planner's figures",
    "Memory and speed as `firstlight plan` predicts them without a GPU, beside what training "
    "steps, evaluations and generation take on it.",
    planner_rows,
    _page,
)

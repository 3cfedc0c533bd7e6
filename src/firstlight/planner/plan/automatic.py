"""Use the planner in `firstlight train` for forecasts, for advice after a run ran out of memory,
and for `--plan auto`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

from firstlight.errors import ConfigError, FirstlightError, TrainingError
from firstlight.hardware.device import Hardware, find_hardware, free_memory_bytes
from firstlight.hardware.fresh_process import ask
from firstlight.planner.plan.estimate import (
    Candidate,
    Estimate,
    Estimator,
    best_estimate,
    estimate,
    methods,
    micro_batches,
    nearest_estimates,
    open_micro_batch,
    sequences_per_step,
)
from firstlight.planner.plan.machine import Machine, find_machine, resolve_for
from firstlight.planner.speed.throughput import BUSY_TOKENS
from firstlight.recipe import Recipe, ResolvedRecipe, parse_recipe, parse_resolved_recipe
from firstlight.training.forecast import Forecast
from firstlight.training.micro_batch_trials import Trial, try_rows

#: Changes to the recipe that `advice` tries in this order. Each change reduces the memory used for
#: activations or logits.
_ADVICE = ("chunked loss", "activation checkpointing, selective", "activation checkpointing, full")

_GIB = 2**30


def forecast_run(recipe: ResolvedRecipe, hardware: Hardware, processes: int) -> Forecast | None:
    """See `Forecaster.forecast`."""
    machine = _this_machine(hardware, processes)
    if machine is None:
        return None
    found = estimate(recipe, machine)
    if machine.gpu is None and recipe.schedule.max_minutes is not None:
        # The speed is required, because the warm-up is a fraction of the number of steps that fit
        # in the time budget.
        found = Estimator().timed(found, machine)
    return forecast_from(found)


def forecast_from(found: Estimate) -> Forecast | None:
    """Convert an estimate to the forecast of a run. Return None if the memory use is unknown."""
    if not found.phases:
        return None
    phase, peak = found.peak
    rate = found.tokens_per_second
    return Forecast(
        peak.bytes,
        phase,
        peak.parts,
        None if rate is None else (rate.slow, rate.expected, rate.fast),
        phases={name: one.bytes for name, one in found.phases.items()},
    )


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Return a forecast, advice or a plan, as specified by the request. `hardware.fresh_process`
    calls this function in a separate process."""
    hardware = find_hardware(request["device"])
    if request["what"] == "plan":
        return _plan(parse_recipe(request["recipe"]), hardware, request["init_from"])
    recipe = parse_resolved_recipe(request["recipe"])
    if request["what"] == "forecast":
        forecast = forecast_run(recipe, hardware, request["processes"])
        return {"answer": None if forecast is None else dataclasses.asdict(forecast)}
    return {"answer": advice(recipe, hardware, request["processes"])}


def advice(recipe: ResolvedRecipe, hardware: Hardware, processes: int) -> str | None:
    """See `Forecaster.advise`."""
    machine = _this_machine(hardware, processes)
    if machine is None:
        return None
    estimator = Estimator()
    first = estimator.estimate(Candidate(recipe, machine, evaluates=False))
    if first.training is None:
        return None
    peak, own = first.training, first.tokens_per_second
    largest = sorted(peak.parts.items(), key=lambda part: -part[1])[:3]
    filled = ", ".join(f"{part.replace('_', ' ')} {size / _GIB:.1f}" for part, size in largest)
    text = f"the peak in the {peak.phase} is {peak.peak_bytes / _GIB:.1f} GiB ({filled})"
    known = dict(methods(recipe, machine))
    tried = estimator.estimate_all(
        [
            Candidate(recipe, machine, name, known[name], evaluates=False)
            for name in _ADVICE
            if name in known
        ]
    )
    good = [one for one in tried if one.training is not None]
    if not good:
        return text
    # If the run ran out of memory even though the estimate predicted that it would fit, less memory
    # is available than was reported. In this case, suggest the change that saves the most memory.
    fitting = [] if first.fits else [one for one in good if one.fits]
    best = max(fitting, key=_rate) if fitting else min(good, key=lambda one: one.needed_bytes)
    (option,) = (f"{key} {value}" for key, value in best.changes.items())
    assert best.training is not None
    change = f"with {option} it would be {best.training.peak_bytes / _GIB:.1f} GiB"
    if own is not None and best.tokens_per_second is not None:
        change += f", at {best.tokens_per_second.expected / own.expected:.2f} of the speed"
    return f"{text}; {change}"


def _rate(one: Estimate) -> float:
    return 0.0 if one.tokens_per_second is None else one.tokens_per_second.expected


def _this_machine(hardware: Hardware, processes: int) -> Machine | None:
    machine = find_machine()
    # The forecast would be wrong if the planner detected a different kind of device than the run
    # uses.
    if machine.target.kind != hardware.device.type:
        return None
    return dataclasses.replace(machine, count=processes)


def _plan(recipe: Recipe, hardware: Hardware, init_from: str | None) -> dict[str, Any]:
    told: list[str] = []
    try:
        planned = planned_recipe(recipe, hardware, told.append, init_from)
    except FirstlightError as error:
        return {"told": told, "problem": str(error)}
    return {"told": told, "recipe": planned.model_dump(mode="json")}


def planned_elsewhere(
    recipe: Recipe, hardware: Hardware, tell: Callable[[str], None], init_from: str | None = None
) -> Recipe:
    """Call `planned_recipe` in a separate process, so that memory left allocated by planning is not
    counted as memory of the run.

    Args:
        recipe, hardware, tell, init_from: arguments of `planned_recipe`.

    Raises:
        ConfigError: see `planned_recipe`.
        TrainingError: the process failed.
    """
    request = {
        "what": "plan",
        # Pass only the keys that were set, because the plan can choose values for all other keys.
        "recipe": recipe.model_dump(mode="json", exclude_unset=True),
        "device": str(hardware.device),
        "init_from": init_from,
    }
    found = ask("firstlight.planner.plan.automatic", request, os.environ)
    if "error" in found:
        raise TrainingError(f"--plan auto failed: {found['error']['message']}")
    for line in found["told"]:
        tell(line)
    if "problem" in found:
        raise ConfigError(found["problem"])
    return parse_recipe(found["recipe"])


def planned_recipe(
    recipe: Recipe, hardware: Hardware, tell: Callable[[str], None], init_from: str | None = None
) -> Recipe:
    """Return the recipe with the settings of the best plan for this machine. A trial of two steps
    confirms that these settings fit in memory.

    Args:
        recipe: the recipe as written.
        hardware: device to run on.
        tell: function that is called with a message about the result.
        init_from: folder of the initial model.

    Raises:
        ConfigError: the recipe can't be planned, or no settings fit in memory. In the second case,
            the message names the nearest settings that would fit.
    """
    machine = _this_machine(hardware, 1)
    if machine is None:
        raise ConfigError(f"--plan auto does not support run.device {hardware.device}: remove it")
    resolved = open_micro_batch(resolve_for(recipe, machine, init_from))
    if resolved.preference is not None:
        raise ConfigError("--plan auto does not support preference pairs: remove it")
    first = estimate(resolved, machine, evaluates=False)
    if first.problem:
        raise ConfigError(first.problem)
    best = best_estimate(resolved, machine)
    if best is None:
        names = [one.name for one in nearest_estimates(resolved, machine)]
        nearest = f"; these would fit: {', '.join(names)}" if names else ""
        raise ConfigError(f"none of the plan's candidates fits into this machine's memory{nearest}")
    found = _corrected(best, machine, hardware, tell)
    # With `init_from`, the run reads the model config and the adapter settings from the model
    # folder. The corresponding sections of the recipe are therefore kept as written.
    kept: dict[str, Any] = {"model": recipe.model}
    if recipe.lora is not None:
        kept["lora"] = recipe.lora
    return Recipe.model_validate(dict(found) | (kept if init_from else {}))


def _corrected(
    best: Estimate, machine: Machine, hardware: Hardware, tell: Callable[[str], None]
) -> ResolvedRecipe:
    """Return the recipe of a candidate with a micro-batch size that was confirmed by a trial of two
    steps."""
    assert best.training is not None
    recipe = best.recipe
    # Checkpoints are disabled in trials.
    copied = best.training.parts.get("checkpoint_copy", 0)
    tried = best.training.peak_bytes - copied
    sizes = list(micro_batches(recipe, machine))
    written = recipe.batch.micro_batch_size
    if written not in sizes:
        sizes = [written, *(size for size in sizes if size < written)]
    place = sizes.index(written)
    trial = _try(recipe, machine, hardware, sizes[place])
    while trial is None and place + 1 < len(sizes):
        tell(
            f"plan: a micro-batch of {sizes[place]} rows does not fit, contrary to the plan: "
            "trying fewer rows"
        )
        place += 1
        trial = _try(recipe, machine, hardware, sizes[place])
    if trial is None:
        raise ConfigError("--plan auto: not even a micro-batch of one row fits: lower data.seq_len")
    busy = sizes[place] * recipe.data.seq_len >= BUSY_TOKENS[machine.target.kind]
    if place > 0 and sizes[place] == written and not busy:
        # If the trial took less memory than predicted, a larger micro-batch may fit.
        share = trial.peak_bytes / max(tried, 1)
        larger = sizes[place - 1] / sizes[place] * share * (best.needed_bytes - copied) + copied
        if larger <= 0.95 * free_memory_bytes(hardware.device):
            more = _try(recipe, machine, hardware, sizes[place - 1])
            if more is not None and more.step_seconds < trial.step_seconds:
                trial, place = more, place - 1
    tell(
        f"plan: {best.name}, micro-batch of {sizes[place]} rows; peak memory predicted "
        f"{tried / _GIB:.2f} GiB, measured {trial.peak_bytes / _GIB:.2f} GiB"
    )
    return _cut(recipe, machine, sizes[place])


def _try(recipe: ResolvedRecipe, machine: Machine, hardware: Hardware, size: int) -> Trial | None:
    """Run two steps with the recipe's global batch size, divided into micro-batches of `size`
    sequences. Return None if memory ran out."""
    try:
        return try_rows(_cut(recipe, machine, size), hardware, size)
    except FirstlightError as error:
        raise ConfigError(f"--plan auto: {error}") from error


def _cut(recipe: ResolvedRecipe, machine: Machine, size: int) -> ResolvedRecipe:
    batch = {"micro_batch_size": size}
    if recipe.batch.global_batch_tokens is None:
        batch["gradient_accumulation_steps"] = sequences_per_step(recipe, machine) // size
    return recipe.with_keys("batch", **batch)

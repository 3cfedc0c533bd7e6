"""Fit a plan to its machine: find a micro-batch size that fits in memory, measure (CPU) or predict
(GPU) the speed of fine-tuning, and train the fitted recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from firstlight.data.shards import REJECTED_NAME, UNREAD_NAME
from firstlight.from_texts.plan import Choices, RunPlan
from firstlight.from_texts.run_folder import (
    DATA_FOLDER,
    RECIPE_NAME,
    TOO_LONG_NAME,
    OnStep,
    RunCall,
)
from firstlight.hardware.device import Hardware
from firstlight.hardware.environment import cores_are_busy
from firstlight.models.accounting import count_parameters, meta_model, train_flops_per_token
from firstlight.planner.advise import defaults
from firstlight.planner.advise.law import Length, MachineFacts
from firstlight.planner.advise.speed import MEASURED, PREDICTED, predicted_rate, timed_rate
from firstlight.planner.memory.program import uncompiled
from firstlight.planner.plan.automatic import forecast_run
from firstlight.planner.plan.estimate import estimate
from firstlight.planner.plan.machine import Machine, resolve_for, with_changes
from firstlight.recipe import Recipe, ResolvedRecipe, parse_recipe
from firstlight.training.forecast import Forecast
from firstlight.training.loop import TrainResult, train


def _parameters(recipe: ResolvedRecipe) -> int:
    """Return the parameter count of a recipe's model, without adapters. Keys set by the user can
    make this model differ from all candidates.
    """
    return count_parameters(meta_model(recipe.model)).total


#: Keys that divide a step into micro-batches. If the user sets one of them, it is not changed.
_CUTS = frozenset({"batch.micro_batch_size", "batch.gradient_accumulation_steps"})


def fitting_choices(
    choices: Choices,
    recipe_of: Callable[[Choices], ResolvedRecipe],
    fixed: Mapping[str, Any],
    machine: Machine,
) -> tuple[Choices, int | None]:
    """Return choices whose micro-batch size is halved until the run fits in memory, and the
    expected memory in bytes, or None if it can't be predicted. The choices also have the exact
    parameter count. `fitted_recipe` does the same once the data is prepared.

    Args:
        choices: all settings.
        recipe_of: function from choices to the run's recipe.
        fixed: values given by the user, keyed by `section.key`, which are kept.
        machine: machine to train on.
    """
    key = "batch.micro_batch_size"
    while True:
        recipe = recipe_of(choices)
        found, rows = estimate(recipe, machine), choices[key]
        if found.problem or found.fits or rows == 1 or not _CUTS.isdisjoint(fixed):
            needed = None if found.problem else found.needed_bytes
            return replace(choices, parameters=_parameters(recipe)), needed
        choices = choices.with_value(key, rows // 2)


def facts_for_model(recipe: ResolvedRecipe, machine: Machine) -> MachineFacts:
    """Return a machine with its speed for a recipe's model without torch.compile: measured on a
    CPU, predicted for a GPU.

    Raises:
        ConfigError: the GPU's speed is unknown.
    """
    recipe = uncompiled(recipe)
    kind, seq_len = machine.target.kind, recipe.data.seq_len
    frozen = recipe.lora is not None
    flops = train_flops_per_token(meta_model(recipe.model), seq_len, frozen=frozen)
    steps = []
    is_busy = kind == "cpu" and cores_are_busy()
    rows = max(defaults.MICRO_BATCH_TOKENS[kind] // seq_len, 1)
    busy, few = (with_changes(recipe, {"batch.micro_batch_size": n}) for n in (rows, 1))
    if kind == "cpu":
        rate, origin = timed_rate(busy, machine), MEASURED
    else:
        rate, origin = predicted_rate(busy, machine), PREDICTED
        steps = [(flops, seq_len / predicted_rate(few, machine))]
    return MachineFacts(
        machine.name,
        kind,
        [(flops, rate)],
        machine.usable_bytes,
        origin=origin,
        compiler=machine.compiler,
        steps=steps,
        is_busy=is_busy,
    )


@dataclass(frozen=True)
class FittedRecipe:
    """A recipe whose micro-batch size was reduced to fit in memory.

    Attributes:
        recipe: recipe to train.
        resolved: the same recipe with all open keys resolved, as written to the run folder.
        choices: choices with the recipe's final micro-batch size and time budget, and the exact
            parameter count.
        forecast: expected memory and speed; None if they can't be predicted.
    """

    recipe: Recipe
    resolved: ResolvedRecipe
    choices: Choices
    forecast: Forecast | None


def fitted_recipe(
    plan: RunPlan,
    values: dict[str, Any],
    length: Callable[[], Length],
    start: str | None = None,
) -> FittedRecipe:
    """Return a plan's recipe, with the micro-batch size halved until the run fits in memory. If the
    user sets the size or the number of micro-batches, it is kept.

    Args:
        plan: plan of the run.
        values: sections of the recipe, changed in place.
        length: function that returns the remaining length of the run. It is called last, because
            fitting itself takes time.
        start: name or folder of the initial model; None for a new model.
    """
    # The tokenizer may have fewer tokens than the requested vocab_size.
    overrides = [one for one in plan.request.overrides if one[0] != "model.vocab_size"]
    choices, machine = plan.choices, plan.machine
    given = any(name in _CUTS for name, _ in overrides)
    values["batch"]["divide_micro_batch"] = True
    while True:
        recipe = parse_recipe(values, "the chosen recipe", overrides)
        resolved = resolve_for(recipe, machine, start)
        forecast = forecast_run(resolved, machine.hardware, 1)
        rows = resolved.batch.micro_batch_size
        if forecast is None or forecast.peak_bytes <= machine.usable_bytes or rows == 1 or given:
            break
        values["batch"]["micro_batch_size"] = rows // 2
    choices = replace(choices, parameters=_parameters(resolved))
    choices = choices.with_value("batch.micro_batch_size", rows)
    if "schedule.max_minutes" in choices.keys:
        left = length().seconds
        assert left is not None
        values["schedule"]["max_minutes"] = minutes = round(left / 60, 4)
        choices = choices.with_value("schedule.max_minutes", minutes)
    if forecast is not None and plan.speed.origin == MEASURED:
        rate = choices.tokens_per_second
        forecast = replace(forecast, tokens_per_second=(0.7 * rate, rate, 1.3 * rate))
    recipe = parse_recipe(values, "the chosen recipe", overrides)
    return FittedRecipe(recipe, resolve_for(recipe, machine, start), choices, forecast)


def train_plan(
    plan: RunPlan,
    data: Mapping[str, Any],
    prompts: Sequence[str],
    call: RunCall,
    *,
    start: str | None = None,
    on_step: Callable[[Choices], OnStep] | None = None,
    names_files: bool = True,
) -> TrainResult:
    """Fit a plan's recipe to the memory, write it to the run folder, and train.

    Args:
        plan: plan chosen from the prepared data.
        data: keys of the recipe's `data` section in addition to the chosen keys.
        prompts: prompts of the sample texts.
        call: run folder, time and messages.
        start: name or folder of the initial model; None for a new model.
        on_step: function from the final choices to a callback for each step's metrics; None uses
            the callback of `call`.
        names_files: True to name the files with the settings and the skipped inputs to the user.
    """
    values = plan.choices.values
    values["run"] = {"dir": str(call.folder)}
    values["data"] = {**data, **values["data"]}
    values["evaluation"]["sample_prompts"] = prompts[: plan.choices.samples]
    fitted = fitted_recipe(plan, values, lambda: call.length(plan.request), start)
    forecast = fitted.forecast
    memory = plan.memory_bytes if forecast is None else forecast.peak_bytes
    plan = replace(plan, choices=fitted.choices, memory_bytes=memory)
    call.write_recipe(fitted.resolved, plan.choices, plan.request)
    for line in plan.lines():
        call.tell(line)
    for line in _written_lines(plan, call) if names_files else ():
        call.tell(line)
    call.remember(begun=True, expected=plan.choices.bits_per_byte)
    return train(
        fitted.recipe,
        init_from=plan.request.init_from,
        on_step=call.on_step if on_step is None else on_step(plan.choices),
        progress=call.progress,
        is_announced=True,
        forecaster=KnownForecast(forecast),
        began=call.measured,
    )


def _written_lines(plan: RunPlan, call: RunCall) -> Iterator[str]:
    """Yield lines for the user that name the files with every choice and with the skipped
    inputs."""
    recipe = call.folder / RECIPE_NAME
    if call.explain:
        yield from plan.table()
    option = "" if call.explain else " (--explain shows them)"
    yield f"all settings with their reasons: {recipe}{option}"
    # Texts are prepared in the run's data folder, conversations in the cache.
    names = UNREAD_NAME, REJECTED_NAME, TOO_LONG_NAME, f"{DATA_FOLDER}/{REJECTED_NAME}"
    lists = [call.folder / name for name in names]
    if written := [str(path) for path in lists if path.is_file()]:
        yield f"full lists of the skipped inputs: {', '.join(written)}"


class KnownForecast:
    """A `training.forecast.Forecaster` that returns an existing forecast."""

    def __init__(self, forecast: Forecast | None) -> None:
        self._forecast = forecast

    def forecast(
        self, recipe: ResolvedRecipe, hardware: Hardware, processes: int
    ) -> Forecast | None:
        """See `Forecaster`; the arguments are ignored."""
        return self._forecast

    def advise(self, recipe: ResolvedRecipe, hardware: Hardware, processes: int) -> str | None:
        """See `Forecaster`."""
        from firstlight.planner.plan.processes import RunForecaster

        with RunForecaster() as forecaster:
            return forecaster.advise(recipe, hardware, processes)

"""Adapt a plan to the machine and train. The micro-batch size is reduced until the run fits in
memory. The speed of fine-tuning is measured on a CPU and predicted for a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

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
from firstlight.planner.plan.automatic import forecast_from
from firstlight.planner.plan.estimate import estimate
from firstlight.planner.plan.machine import Machine, resolve_for, with_changes
from firstlight.recipe import Recipe, ResolvedRecipe, parse_recipe
from firstlight.training.forecast import Forecast
from firstlight.training.loop import TrainResult, train

PlanT = TypeVar("PlanT", bound=RunPlan)


def _parameters(recipe: ResolvedRecipe) -> int:
    """Return the parameter count of a recipe's model, without adapters. The count is computed from
    the recipe because keys set by the user can make the model differ from all candidates.
    """
    return count_parameters(meta_model(recipe.model)).total


#: Recipe keys that determine how a step is divided into micro-batches. Values set by the user are
#: not changed.
_CUTS = frozenset({"batch.micro_batch_size", "batch.gradient_accumulation_steps"})


def facts_for_model(recipe: ResolvedRecipe, machine: Machine) -> MachineFacts:
    """Return facts about the machine, including its speed for the model of a recipe without
    torch.compile. The speed is measured on a CPU and predicted for a GPU.

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
        choices: chosen settings, with the final micro-batch size, time budget and exact number of
            parameters filled in.
        forecast: expected memory and speed; None if they can't be predicted.
    """

    recipe: Recipe
    resolved: ResolvedRecipe
    choices: Choices
    forecast: Forecast | None

    def applied_to(self, plan: PlanT) -> PlanT:
        """Return a copy of the plan with the choices and the expected memory use of this recipe."""
        memory = None if self.forecast is None else self.forecast.peak_bytes
        return replace(plan, choices=self.choices, memory_bytes=memory)


def fitted_recipe(
    plan: RunPlan, folder: Path | None = None, length: Callable[[], Length] | None = None
) -> FittedRecipe:
    """Return the recipe of a plan after halving its micro-batch size until the run fits in memory.
    If the user has set the size or number of micro-batches, the micro-batch size is not changed.

    Args:
        plan: plan of the run.
        folder: run folder; None if the plan is only shown and not trained.
        length: function that returns the remaining length of the run; None to keep the length in
            the plan. It is called last, because finding a micro-batch size that fits takes time.
    """
    # The tokenizer may have fewer tokens than the requested vocab_size.
    overrides = [one for one in plan.request.overrides if one[0] != "model.vocab_size"]
    choices, machine = plan.choices, plan.machine
    values = choices.values
    if folder is not None:
        values["run"] = {"dir": str(folder)}
    values["data"] = {**plan.data, **values["data"]}
    values["evaluation"]["sample_prompts"] = list(plan.prompts[: choices.samples])
    values["batch"]["divide_micro_batch"] = True

    def parsed() -> tuple[Recipe, ResolvedRecipe]:
        recipe = parse_recipe(values, "the chosen recipe", overrides)
        return recipe, resolve_for(recipe, machine, plan.start)

    is_given = not _CUTS.isdisjoint(plan.request.fixed)
    while True:
        _, resolved = parsed()
        found, rows = estimate(resolved, machine), resolved.batch.micro_batch_size
        if found.problem or found.fits or rows == 1 or is_given:
            break
        values["batch"]["micro_batch_size"] = rows // 2
    choices = replace(choices, parameters=_parameters(resolved))
    choices = choices.with_value("batch.micro_batch_size", rows)
    if length is not None and "schedule.max_minutes" in choices.keys:
        left = length().seconds
        assert left is not None
        values["schedule"]["max_minutes"] = minutes = round(left / 60, 4)
        choices = choices.with_value("schedule.max_minutes", minutes)
    forecast = forecast_from(found)
    if forecast is not None and plan.speed.origin == MEASURED:
        rate = choices.tokens_per_second
        forecast = replace(forecast, tokens_per_second=(0.7 * rate, rate, 1.3 * rate))
    return FittedRecipe(*parsed(), choices, forecast)


def train_plan(
    plan: RunPlan,
    call: RunCall,
    *,
    on_step: Callable[[Choices], OnStep] | None = None,
    names_files: bool = True,
) -> TrainResult:
    """Reduce the micro-batch size of a plan's recipe until the run fits in memory, write the recipe
    to the run folder, and train.

    Args:
        plan: plan chosen from the prepared data.
        call: run folder, time and messages.
        on_step: function that is called with the final choices and returns a callback for each
            step's metrics; None to use the callback of `call`.
        names_files: True to show the user the paths of the files that list the settings and the
            skipped inputs.
    """
    fitted = fitted_recipe(plan, call.folder, lambda: call.length(plan.request))
    plan = fitted.applied_to(plan)
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
        chose_compiling="efficiency.compile" not in plan.request.fixed,
        forecaster=KnownForecast(fitted.forecast),
        began=call.measured,
    )


def _written_lines(plan: RunPlan, call: RunCall) -> Iterator[str]:
    """Yield lines for the user with the paths of the files that list all choices and the skipped
    inputs."""
    recipe = call.folder / RECIPE_NAME
    if call.explain:
        yield from plan.table()
    option = "" if call.explain else " (--explain shows them)"
    yield f"all settings with their reasons: {recipe}{option}"
    # Text is prepared in the run's data folder. Conversations are prepared in the cache folder.
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
        """Return the existing forecast. The arguments of `Forecaster.forecast` are ignored."""
        return self._forecast

    def advise(self, recipe: ResolvedRecipe, hardware: Hardware, processes: int) -> str | None:
        """See `Forecaster`."""
        from firstlight.planner.plan.processes import RunForecaster

        with RunForecaster() as forecaster:
            return forecaster.advise(recipe, hardware, processes)

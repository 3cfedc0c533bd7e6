"""The machine to train on: its speed for some models, and the memory of runs.

The speed is measured on this machine's CPU, and for new models on its GPU. That of other machines,
and of fine-tuning on a GPU, is predicted.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from firstlight.errors import ConfigError
from firstlight.hardware.device import Hardware, free_memory_bytes, is_out_of_memory
from firstlight.hardware.environment import cores_are_busy
from firstlight.models.accounting import count_parameters, meta_model, train_flops_per_token
from firstlight.pipeline.chosen import Choices
from firstlight.planner.advise import defaults
from firstlight.planner.advise.law import Length, MachineFacts, ModelSize
from firstlight.planner.plan.automatic import forecast_run
from firstlight.planner.plan.estimate import Candidate, Estimate, Estimator
from firstlight.planner.plan.machine import Machine, find_machine, resolve_for, with_changes
from firstlight.planner.speed.timed import time_step
from firstlight.recipe import Recipe, ResolvedRecipe, parse_recipe
from firstlight.training.forecast import Forecast

#: (hidden_size, num_hidden_layers) of the models whose speed is measured, by kind of device, or
#: predicted, and their vocabulary size.
_TIMED_SHAPES = {"cpu": ((128, 4), (320, 6)), "cuda": ((192, 4), (768, 12))}
_PREDICTED_SHAPES = ((192, 4), (512, 8), (1024, 16))
_VOCABULARY = 4096
#: Tokens of a measured step on a CPU. With half of them, a token takes up to 1.4 times as long,
#: because of the update's share.
_TIMED_TOKENS = defaults.BATCH_TOKENS
#: (free bytes of a GPU, tokens of a measured step). In bf16, 32,768 tokens of the larger model take
#: 22 GiB, and 8,192 take 7 GiB; other precisions take up to twice as much.
_TOKENS_OF_MEMORY = ((48 << 30, 32_768), (16 << 30, 8192), (6 << 30, 2048))
#: Origins of a speed, as they are shown.
_MEASURED, _PREDICTED = "measured here", "predicted by the planner"


def machine_facts(gpu: str | None = None, device: str = "auto") -> tuple[Machine, MachineFacts]:
    """A machine and its speed for new models.

    Args:
        gpu: name of a GPU of another machine; None is this machine.
        device: `run.device` of a run on this machine.

    Raises:
        ConfigError: the GPU, its speed or the device is unknown.
    """
    machine = find_machine(gpu, device=device)
    kind = machine.target.kind
    timed_tokens = _timed_tokens(machine)
    is_busy = kind == "cpu" and cores_are_busy()
    try:
        rates, steps = _speeds(machine, timed_tokens)
    except RuntimeError as error:
        # Another program has taken memory of the GPU that was free.
        if kind != "cuda" or not is_out_of_memory(error):
            raise
        if machine.gpu is None:
            problem = "has too little free memory to measure its speed"
            raise ConfigError(f"{machine.name} {problem}: end what else uses it") from None
        timed_tokens = 0
        rates, steps = _speeds(machine, timed_tokens)
    if kind == "cuda" and machine.is_here:
        # The memory of the measured models, of which some are in reference cycles.
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    # If a smaller model is slower than a larger one, because of kernel launches or noise, it gets
    # the larger one's rate: `MachineFacts` needs rates that don't rise with size.
    rates = [
        (flops, max(rate, *(r for _, r in rates[i:]))) for i, (flops, rate) in enumerate(rates)
    ]
    usable, origin = machine.usable_bytes, _MEASURED if timed_tokens else _PREDICTED
    return machine, MachineFacts(
        machine.name, kind, rates, usable, origin, machine.compiles, steps, is_busy
    )


def _speeds(
    machine: Machine, timed_tokens: int
) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """The speed of a machine for some models.

    Args:
        timed_tokens: tokens of a measured step; 0 if the speed is predicted.

    Returns:
        Two lists with a pair for each model: (FLOPs of a token, tokens per second), and for a GPU
        (FLOPs of a token, seconds of a step of few tokens).
    """
    kind = machine.target.kind
    seq_len = 256 if kind == "cpu" else 512
    many = timed_tokens or defaults.MICRO_BATCH_TOKENS[kind]
    # On a GPU, a step of few tokens takes the time of starting its kernels.
    step_tokens = (many,) if kind == "cpu" else (many, seq_len)
    rates, steps = [], []
    for shape in _TIMED_SHAPES[kind] if timed_tokens else _PREDICTED_SHAPES:
        size = ModelSize(*shape, _VOCABULARY, seq_len)
        recipes = [resolve_for(_speed_recipe(size, tokens), machine) for tokens in step_tokens]
        find = _timed_rate if timed_tokens else _predicted_rate
        rate, *few = (find(recipe, machine) for recipe in recipes)
        rates.append((size.flops_per_token, rate))
        steps += [(size.flops_per_token, seq_len / one) for one in few]
    return rates, steps


def _timed_tokens(machine: Machine) -> int:
    """The tokens of a measured step of many tokens; 0 if the machine's speed is not measured: it is
    another machine, its memory is taken, or it is an Apple GPU."""
    kind = machine.target.kind
    if not machine.is_here or kind not in _TIMED_SHAPES:
        return 0
    if kind == "cpu":
        return _TIMED_TOKENS
    free = free_memory_bytes(machine.hardware.device)
    return next((tokens for size, tokens in _TOKENS_OF_MEMORY if free >= size), 0)


def _speed_recipe(shape: ModelSize, tokens: int) -> Recipe:
    """A recipe of a new model with the usual layout, for finding its speed in steps of one
    micro-batch of `tokens` tokens."""
    values: dict[str, Any] = {
        "data": {"dir": "unused", "seq_len": shape.seq_len},
        "batch": {"micro_batch_size": tokens // shape.seq_len},
        "efficiency": {"compile": False},
        "schedule": {"max_steps": 1000},
        "evaluation": {"sample_prompts": []},
    }
    given = {
        **defaults.LAYOUT,
        "model.vocab_size": shape.vocab_size,
        "model.hidden_size": shape.hidden_size,
        "model.num_hidden_layers": shape.num_hidden_layers,
        "model.num_attention_heads": shape.hidden_size // defaults.HEAD_DIM,
        "model.intermediate_size": shape.intermediate_size,
        "model.max_position_embeddings": shape.seq_len,
    }
    return parse_recipe(nested(values, given), "the recipe of a speed")


def nested(values: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """The sections `values` (section -> key -> value) with additional values by `section.key`."""
    found = {section: dict(keys) for section, keys in values.items()}
    for name, value in more.items():
        section, _, key = name.partition(".")
        found.setdefault(section, {})[key] = value
    return found


def _timed_rate(recipe: ResolvedRecipe, machine: Machine) -> float:
    """Tokens per second of steps of one micro-batch, which are timed on this machine."""
    seconds = time_step(recipe, machine.hardware).seconds(1)
    return recipe.batch.rows * recipe.data.seq_len / seconds


def _predicted_rate(recipe: ResolvedRecipe, machine: Machine) -> float:
    """Tokens per second of a recipe on a GPU.

    Raises:
        ConfigError: the GPU's speed is unknown.
    """
    found = Estimator().estimate(Candidate(recipe, machine, evaluates=False))
    if found.tokens_per_second is None:
        raise ConfigError(f"the speed of {machine.name} is not known: name another --gpu")
    return found.tokens_per_second.expected


def estimate_run(recipe: ResolvedRecipe, machine: Machine) -> Estimate:
    """The expected memory of a run with its evaluations, and for a GPU its speed."""
    return Estimator().estimate(Candidate(recipe, machine))


def _parameters(recipe: ResolvedRecipe) -> int:
    """The number of parameters of a recipe's model, without adapters. A model with given keys can
    differ from the candidates among which it was chosen."""
    return count_parameters(meta_model(recipe.model)).total


#: Keys that cut a step into micro-batches, which then stay as they are.
_CUTS = frozenset({"batch.micro_batch_size", "batch.gradient_accumulation_steps"})


def fitting_choices(
    choices: Choices,
    recipe_of: Callable[[Choices], ResolvedRecipe],
    fixed: Mapping[str, Any],
    machine: Machine,
) -> tuple[Choices, int | None]:
    """Choices whose micro-batch is halved until the run fits into memory, as `fitted_recipe` does
    once the data is prepared, with the parameters counted; and the expected memory in bytes, None
    if it can't be predicted.

    Args:
        choices: all settings.
        recipe_of: function from choices to the recipe of the run.
        fixed: values of keys that the user has given, which stay.
        machine: the machine to train on.
    """
    key = "batch.micro_batch_size"
    while True:
        recipe = recipe_of(choices)
        found, rows = estimate_run(recipe, machine), choices[key]
        if found.problem or found.fits or rows == 1 or not _CUTS.isdisjoint(fixed):
            needed = None if found.problem else found.needed_bytes
            return replace(choices, parameters=_parameters(recipe)), needed
        choices = choices.with_value(key, rows // 2)


def fitting_before_data(
    choices: Choices,
    overrides: Sequence[tuple[str, str]],
    fixed: Mapping[str, Any],
    machine: Machine,
) -> tuple[Choices, int | None]:
    """`fitting_choices` for a new model's run whose texts are not prepared yet.

    Args:
        choices: all settings.
        overrides: pairs (`section.key`, value as YAML text).
        fixed: the values of the overrides.
        machine: the machine to train on.
    """

    def recipe_of(choices: Choices) -> ResolvedRecipe:
        values = choices.values
        values["data"] |= {"dir": "unused"}
        recipe = parse_recipe(values, "the chosen recipe", overrides)
        return resolve_for(recipe, machine)

    return fitting_choices(choices, recipe_of, fixed, machine)


def facts_for_model(recipe: ResolvedRecipe, machine: Machine) -> MachineFacts:
    """A machine and its speed for the model of a recipe, measured on a CPU, predicted for a GPU.

    Raises:
        ConfigError: the GPU's speed is unknown.
    """
    kind, seq_len = machine.target.kind, recipe.data.seq_len
    frozen = recipe.lora is not None
    flops = train_flops_per_token(meta_model(recipe.model), seq_len, frozen=frozen)
    steps = []
    is_busy = kind == "cpu" and cores_are_busy()
    rows = max(defaults.MICRO_BATCH_TOKENS[kind] // seq_len, 1)
    busy, few = (with_changes(recipe, {"batch.micro_batch_size": n}) for n in (rows, 1))
    if kind == "cpu":
        rate, origin = _timed_rate(busy, machine), _MEASURED
    else:
        rate, origin = _predicted_rate(busy, machine), _PREDICTED
        steps = [(flops, seq_len / _predicted_rate(few, machine))]
    usable = machine.usable_bytes
    return MachineFacts(
        machine.name, kind, [(flops, rate)], usable, origin, machine.compiles, steps, is_busy
    )


@dataclass(frozen=True)
class FittedRecipe:
    """A recipe whose micro-batch was adapted to the memory.

    Attributes:
        recipe: the recipe to train.
        resolved: the same recipe with all open keys resolved, as it is written to the run folder.
        choices: the choices with the recipe's final micro-batch size and minutes, and its number of
            parameters.
        forecast: expected memory and speed; None if they can't be predicted.
    """

    recipe: Recipe
    resolved: ResolvedRecipe
    choices: Choices
    forecast: Forecast | None

    @property
    def memory_bytes(self) -> int | None:
        """Expected memory of the run in bytes; None if it can't be predicted."""
        return None if self.forecast is None else self.forecast.peak_bytes


def fitted_recipe(
    values: dict[str, Any],
    overrides: Sequence[tuple[str, str]],
    choices: Choices,
    machine: Machine,
    speed: MachineFacts,
    length: Callable[[], Length],
    init_from: str | None = None,
) -> FittedRecipe:
    """The recipe of the choices, with the micro-batch size halved until the run fits into memory. A
    micro-batch size given by the user, or their number, is kept.

    Args:
        values: sections of the recipe; changed in place.
        overrides: pairs (`section.key`, value as YAML text).
        choices: all settings.
        machine: this machine.
        speed: its speed.
        length: function that returns the remaining length of the run. It is called at the end,
            because fitting takes time, too.
        init_from: name or folder of the model to start from; None for a new model.
    """
    given = any(name in _CUTS for name, _ in overrides)
    values["batch"]["divide_micro_batch"] = True
    while True:
        recipe = parse_recipe(values, "the chosen recipe", overrides)
        resolved = resolve_for(recipe, machine, init_from)
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
    # A compiled run is faster than what was measured, without compiling.
    compiles = resolved.efficiency.compile
    if forecast is not None and speed.origin == _MEASURED and not compiles:
        rate = choices.tokens_per_second
        forecast = replace(forecast, tokens_per_second=(0.7 * rate, rate, 1.3 * rate))
    recipe = parse_recipe(values, "the chosen recipe", overrides)
    return FittedRecipe(recipe, resolve_for(recipe, machine, init_from), choices, forecast)


class KnownForecast:
    """A `training.forecast.Forecaster` that returns a forecast that was made before."""

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

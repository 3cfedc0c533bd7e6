"""Implement `firstlight plan`, which estimates the memory use and speed of a recipe on a machine,
searches for the best settings, and suggests the best model for a budget."""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from firstlight.errors import ConfigError
from firstlight.hardware.compiling import Compiling
from firstlight.hardware.device import synchronize
from firstlight.hardware.environment import cores_are_busy
from firstlight.methods.compilation import needs_compiling
from firstlight.methods.precision import dtype_of, packet_note
from firstlight.models import ModelConfig
from firstlight.models.accounting import count_parameters, matrix_shapes, meta_model
from firstlight.optim.config import OPTIMIZERS, OptimizerConfig
from firstlight.parallel.engine_choice import named_engine
from firstlight.planner.advise import defaults
from firstlight.planner.advise.defaults import NEW_MODEL_RATES, new_model_rates
from firstlight.planner.advise.law import MachineFacts, TextFacts
from firstlight.planner.advise.model import (
    Suggestion,
    model_ladder,
    suggest,
    tokens_in_time,
    usual_text,
    with_steps,
)
from firstlight.planner.advise.speed import new_model_speed
from firstlight.planner.memory.ranks import copies_of, why_not_cut
from firstlight.planner.plan.estimate import (
    Candidate,
    Estimate,
    Estimator,
    best_estimate,
    method_table,
    nearest_estimates,
    open_micro_batch,
    reasons_for,
)
from firstlight.planner.plan.machine import (
    Machine,
    PlannedRun,
    epoch_tokens,
    planned_run,
    resolve_for,
    with_changes,
)
from firstlight.planner.speed.gpu import DEFAULT_SHARES, PACKET_BYTES
from firstlight.planner.speed.throughput import usual_speed
from firstlight.recipe import Recipe, ResolvedRecipe
from firstlight.recipe.resolve import open_compile_modes


@dataclass(frozen=True)
class Budget:
    """The budget of a training run, in time or tokens.

    Attributes:
        seconds, tokens: length of the run; at most one of them is set.
        price_per_hour: price of one device per hour, in any currency.
    """

    seconds: float | None = None
    tokens: float | None = None
    price_per_hour: float | None = None

    def __post_init__(self) -> None:
        for name in ("seconds", "tokens", "price_per_hour"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name.replace('_', ' ')} is {value}: it must be greater than 0")
        if self.seconds is not None and self.tokens is not None:
            raise ConfigError("--budget and --tokens both limit the run: set only one of them")

    @property
    def is_given(self) -> bool:
        """True if `seconds` or `tokens` is set."""
        return self.seconds is not None or self.tokens is not None


@dataclass(frozen=True)
class Plan:
    """The results of a plan.

    Attributes:
        machine: machine for which the plan was made.
        recipe: recipe, resolved for the machine.
        as_it_stands: estimate for `recipe`.
        run: length of the recipe's run; None if it depends on data that is not on this machine.
        best: fastest candidate that fits; None if no candidate fits or if there was no search.
        reasons: reason for each key that `best` resolves or changes.
        methods: for each method that the recipe does not use, the estimate for the recipe with this
            method added; see `method_table`.
        nearest: if no candidate fits, estimates for changed settings that would fit.
        budget: time or tokens to train with, and the price.
        warnings: warnings about model sizes that are slow on this machine.
        notes: assumptions of the plan about this machine and the run.
        suggestion: model and schedule for the budget.
        suggested: the estimate for `suggestion`.
        replacements: old and new values of the keys that the suggestion changes in the recipe as
            written, keyed by `section.key`. The old value is None for a key that the recipe does
            not set.
    """

    machine: Machine
    recipe: ResolvedRecipe
    as_it_stands: Estimate
    run: PlannedRun | None = None
    best: Estimate | None = None
    reasons: dict[str, str] = field(default_factory=dict)
    methods: list[Estimate] = field(default_factory=list)
    nearest: list[Estimate] = field(default_factory=list)
    budget: Budget = Budget()
    warnings: Sequence[str] = ()
    notes: Sequence[str] = ()
    suggestion: Suggestion | None = None
    suggested: Estimate | None = None
    replacements: dict[str, tuple[Any, Any]] = field(default_factory=dict)

    @functools.cached_property
    def parameters(self) -> int:
        """Number of the model's parameters."""
        return count_parameters(meta_model(self.recipe.model)).total

    @property
    def chosen(self) -> ResolvedRecipe | None:
        """The recipe to train. This is the suggested recipe if there is a suggestion, and otherwise
        the recipe of the best candidate."""
        found = self.suggested or self.best
        return None if found is None else found.recipe

    @property
    def run_seconds(self) -> float | None:
        """Total duration of the run's steps in seconds. If there was a search, this is the duration
        with the best settings. None if the duration is unknown or no candidate fits."""
        taken = self.best or self.as_it_stands
        if self.run is None or taken.tokens_per_second is None or not taken.fits:
            return None
        return self.run.tokens / taken.tokens_per_second.expected

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        machine = {
            "name": self.machine.name,
            "count": self.machine.count,
            "memory_bytes": self.machine.memory_bytes,
            "usable_bytes": self.machine.usable_bytes,
        }
        suggestion: dict[str, Any] | None = None
        if self.suggestion is not None:
            suggestion = dataclasses.asdict(self.suggestion)
            suggestion["config"] = self.suggestion.config.model_dump(mode="json")
            suggestion["bits_per_byte"] = self.suggestion.bits_per_byte
            suggestion["cost"] = cost(self.suggestion.seconds, self.budget, self.machine)
        run: dict[str, Any] | None = None
        if self.run is not None:
            seconds = self.run_seconds
            price = None if seconds is None else cost(seconds, self.budget, self.machine)
            run = {**dataclasses.asdict(self.run), "seconds": seconds, "cost": price}
            # Programs that read the output of --json expect the global batch size under this key.
            batch = run.pop("batch")
            run["rows_a_step"] = batch["size"]
            if batch["ramp_steps"]:
                run |= {"rows_at_start": batch["start"], "ramp_steps": batch["ramp_steps"]}
        return {
            "machine": machine,
            "parameters": self.parameters,
            "run": run,
            "vocab_size": self.recipe.model.vocab_size,
            "precision": self.recipe.efficiency.precision,
            "as_it_stands": self.as_it_stands.to_json(),
            "best": None if self.best is None else self.best.to_json(),
            "reasons": self.reasons,
            "methods": [one.to_json() for one in self.methods],
            "warnings": list(self.warnings),
            "notes": list(self.notes),
            "nearest": [one.to_json() for one in self.nearest],
            "suggestion": suggestion,
            "suggested": None if self.suggested is None else self.suggested.to_json(),
            "replacements": self.replacements,
            "recipe": None if self.chosen is None else self.chosen.model_dump(mode="json"),
        }


def make_plan(
    recipe: Recipe,
    machine: Machine,
    *,
    init_from: str | None = None,
    budget: Budget | None = None,
    searches: bool = True,
    estimator: Estimator | None = None,
) -> Plan:
    """Plan a run.

    Args:
        recipe: the recipe as written.
        machine: machine to run on.
        init_from: folder of the initial model.
        budget: time or tokens for which to suggest a model, and the price; None for no suggestion.
        searches: True to search for the best settings and to estimate each method; False to
            estimate only the unchanged recipe.
        estimator: estimator to use; None creates one.

    Raises:
        ConfigError: the recipe is invalid on every machine. Also raised if a budget is set but the
            recipe trains existing weights, or if a price is set but neither a budget nor the length
            of the run is known.
        ModelError: `init_from` is not the folder of a model.
    """
    budget = budget or Budget()
    if budget.is_given and (why := _starting_weights(recipe, init_from)):
        raise ConfigError(
            f"--budget and --tokens suggest a new model, but {why}: omit them, and set "
            "schedule.max_minutes to train for a given time"
        )
    resolved = resolve_for(recipe, machine, init_from)
    estimator = estimator or Estimator()
    estimator.tell("as it stands")
    first = estimator.estimate(Candidate(resolved, machine, "as it stands"))
    notes = _notes(recipe, machine)
    first = estimator.timed(first, machine)
    if first.problem:
        raise ConfigError(first.problem)
    run = _planned_run_for(first, machine)
    if budget.price_per_hour is not None and run is None and not budget.is_given:
        raise ConfigError(
            "--price-per-hour needs the length of the run: set schedule.max_steps, --budget or "
            "--tokens"
        )
    here = machine.hardware.device if machine.is_here else None
    warnings = list(alignment_warnings(resolved, here, machine.hardware.capability))
    plan = Plan(machine, resolved, first, run, budget=budget, warnings=warnings, notes=notes)
    if searches:
        best = best_estimate(open_micro_batch(resolved), machine, estimator, first)
        reasons = {} if best is None else reasons_for(recipe, best, first, machine)
        nearest = [] if best is not None else nearest_estimates(resolved, machine, estimator)
        methods = method_table(resolved, machine, estimator)
        if best is not None and resolved.schedule.max_minutes is not None:
            run = _planned_run_for(best, machine)
        plan = dataclasses.replace(
            plan, best=best, reasons=reasons, nearest=nearest, methods=methods, run=run
        )
    if budget.is_given:
        found = _for_budget(plan, budget, estimator, recipe)
        plan = dataclasses.replace(plan, **found)
        assert plan.suggested is not None
        changed = _replacements(recipe, resolved, plan.suggested.recipe)
        plan = dataclasses.replace(plan, replacements=changed)
    return plan


def _notes(written: Recipe, machine: Machine) -> list[str]:
    """Return `Plan.notes`. Call this function immediately before measuring the speed of this
    machine's CPU, because it checks whether other programs are using the cores at the moment."""
    notes = []
    if machine.is_here and machine.target.kind == "cpu" and cores_are_busy():
        notes.append("other programs are using this CPU: it may be faster than measured")
    lengths = (epoch_tokens(written), written.schedule.max_steps, written.schedule.max_minutes)
    if written.efficiency.compile == "auto" and lengths == (None, None, None):
        notes.append(
            "the length of the run is unknown without the data: efficiency.compile auto is "
            "planned as for a long run"
        )
    return notes


def _starting_weights(recipe: Recipe, init_from: str | None) -> str:
    """Return text that explains why the shape of the model can't be changed because the recipe
    trains existing weights. Return "" for a new model."""
    if init_from is not None:
        return "--init-from names the weights to start from"
    if recipe.model is None:
        return "a recipe without a model section starts from existing weights"
    for section in ("lora", "preference"):
        if getattr(recipe, section) is not None:
            return f"a recipe with a {section} section starts from existing weights"
    return ""


def _replacements(
    written: Recipe, resolved: ResolvedRecipe, suggested: ResolvedRecipe
) -> dict[str, tuple[Any, Any]]:
    """Return `Plan.replacements`."""
    found: dict[str, tuple[Any, Any]] = {}
    given, before = written.model_dump(mode="json"), resolved.model_dump(mode="json")
    for section, values in suggested.model_dump(mode="json").items():
        set_keys = getattr(getattr(written, section), "model_fields_set", ())
        for key, new in (values or {}).items():
            default = (given[section] or {}).get(key)
            # If the recipe does not set a key, its old value is the value that would be used
            # without a budget.
            old = default if key in set_keys else before[section].get(key)
            if old != new:
                found[f"{section}.{key}"] = old, new
            elif default != new:
                found[f"{section}.{key}"] = None, new
    return found


def _planned_run_for(estimate: Estimate, machine: Machine) -> PlannedRun | None:
    """Return the length of a run with the recipe and the speed of an estimate."""
    speed = estimate.tokens_per_second
    return planned_run(estimate.recipe, machine, None if speed is None else speed.expected)


#: Maximum number of models to try. If a model does not fit in memory, a smaller model is tried. If
#: the speed of a model differs from the assumed speed, the model that is suggested for the new
#: speed is tried.
_TRIES = 6

#: Bytes per parameter in training with fp32 AdamW.
_STATE_BYTES = 16


def _for_budget(
    plan: Plan, budget: Budget, estimator: Estimator, written: Recipe
) -> dict[str, Any]:
    """Return the suggestion and its estimate, as attributes of `Plan`.

    Args:
        plan: the plan of the unchanged recipe.
        budget: the time or tokens.
        estimator: the estimator to use.
        written: the recipe as written. If it does not set `efficiency.compile` or the learning
            rates, their values are chosen for the suggested run and model.

    The models are first compared using the machine's speed for new models. With the recipe's
    methods, the suggested model may have a very different speed. In this case, the machine's speed
    is scaled accordingly, and the models are compared again.
    """
    recipe, machine = plan.recipe, plan.machine
    if machine.gpu is None and not (machine.is_here and machine.count == 1):
        raise ConfigError(
            "suggesting a model for a given time requires a known GPU: set --gpu NAME instead of "
            "--gpu-memory"
        )
    seq_len, models = recipe.data.seq_len, _models_to_train(recipe)
    text = usual_text(recipe.model.vocab_size, epoch_tokens(recipe))
    epochs = largest_epochs(recipe)
    most_parameters = _most_parameters(recipe, machine)
    speed = new_model_speed(machine)
    compiler, is_busy = speed.compiler, speed.is_busy
    suggested: dict[str, Any] = {}
    fitting, seen = 0, list[ModelConfig]()
    for _ in range(_TRIES):
        # Default arguments store the values of this iteration, because later iterations change the
        # variables.
        def rate(
            model: Suggestion,
            step: float,
            mode: Compiling,
            most: float = most_parameters,
            speed: MachineFacts = speed,
        ) -> float | None:
            if model.parameters > most:
                return None
            return speed.tokens_per_second(model.flops, step, mode)

        found = suggest(
            rate,
            models,
            text,
            seq_len=seq_len,
            seconds=budget.seconds,
            tokens=budget.tokens,
            epochs=epochs,
            modes=lambda model: open_compile_modes(
                written.efficiency,
                written.distributed,
                compiler,
                (model.hidden_size, model.num_hidden_layers),
                is_busy=is_busy,
            ),
        )
        estimator.tell(f"{found.parameters / 1e6:,.0f}M parameters")
        # Each device must process at least one sequence per step.
        found = _for_all_devices(found, seq_len * machine.count)
        suggestion = _suggested_recipe(plan, found, written)
        expected = speed.tokens_per_second(found.flops, found.global_batch_tokens, found.mode)
        estimate = best_estimate(suggestion, machine, estimator)
        of_own = estimate is not None and "optimizer.name" not in estimate.changes
        if estimate is not None and estimate.fits and estimate.tokens_per_second is None:
            # Steps with DeepSpeed or offloaded state are not timed.
            usual = usual_speed(estimate.recipe, expected, machine.hardware)
            estimate = dataclasses.replace(estimate, speed=usual)
        if estimate is None or not of_own or estimate.tokens_per_second is None:
            # The next model to try is a fifth smaller, but not smaller than a model that is known
            # to fit in memory.
            most_parameters = max(0.8 * found.parameters, fitting)
            continue
        fitting = max(fitting, found.parameters)
        one = _in_time(found, estimate, budget, text, epochs=epochs)
        if not suggested or one["suggestion"].bits < suggested["suggestion"].bits:
            suggested = one
        reached = estimate.tokens_per_second.expected
        factor = reached / expected
        is_same = max(factor, 1 / factor) < defaults.OTHER_SPEED or found.config in seen
        # With a token budget, the speed affects only the duration.
        if budget.seconds is None or is_same:
            break
        seen.append(found.config)
        speed = speed.times(factor)
    if not suggested:
        raise ConfigError(
            "none of the candidate models fits this machine: use one with more memory"
        )
    return suggested


def largest_epochs(recipe: Recipe) -> float:
    """Return the maximum number of passes over the text if there is a time budget. It is
    `schedule.epochs` or, if this key is not set, `defaults.MOST_EPOCHS`."""
    return recipe.schedule.epochs or defaults.MOST_EPOCHS


def _most_parameters(recipe: ResolvedRecipe, machine: Machine) -> float:
    """Return the number of parameters for which the weights, gradients and optimizer states alone
    would fill the memory of the devices."""
    sharded = named_engine(recipe.distributed).keeps_shards
    pieces = machine.count // (1 if sharded else copies_of(recipe, machine.count))
    return pieces * machine.usable_bytes / _STATE_BYTES


def _models_to_train(recipe: ResolvedRecipe) -> list[ModelConfig]:
    """Return the candidate models that can be sharded as the recipe specifies, smallest first."""
    cut = recipe.distributed
    ladder = list(model_ladder(recipe.model, cuts=cut.tensor_parallel))
    models = [one for one in ladder if not any(why_not_cut(one, cut))]
    if not models:
        why = "; ".join(why_not_cut(ladder[-1], cut))
        raise ConfigError(
            f"none of the candidate models can be sharded as the recipe specifies; for the "
            f"largest: {why}"
        )
    return models


def _for_all_devices(found: Suggestion, least: int) -> Suggestion:
    """Return the suggestion with a global batch size that can be divided evenly among the devices.

    Args:
        found: the suggestion.
        least: number of tokens in a global batch with one sequence per device.
    """
    batch = -(-found.global_batch_tokens // least) * least
    steps = max(found.tokens // batch, 1)
    return dataclasses.replace(
        found, global_batch_tokens=batch, max_steps=steps, tokens=steps * batch
    )


def _suggested_recipe(plan: Plan, found: Suggestion, written: Recipe) -> ResolvedRecipe:
    """Return the recipe with the model, batch size, number of steps and compilation mode of the
    suggestion, and with learning rates for the width of the suggested model."""
    recipe = plan.recipe
    optimizer = optimizer_of_width(recipe, written, found.config.hidden_size)
    schedule = _kept_schedule(plan)
    if recipe.schedule.initial_learning_rate is not None:
        # The learning rate at the start of the warm-up is scaled by the same factor as the peak
        # learning rate.
        ratio = optimizer.learning_rate / recipe.optimizer.learning_rate
        schedule["initial_learning_rate"] = ratio * recipe.schedule.initial_learning_rate
    efficiency = recipe.efficiency
    if written.efficiency.compile == "auto" and not needs_compiling(written.efficiency):
        keys = {"compile": found.mode.compiles, "compile_regional": found.mode.regional}
        efficiency = efficiency.model_copy(update=keys)
    own = {"model": found.config, "optimizer": optimizer, "efficiency": efficiency}
    return with_changes(
        recipe.model_copy(update=own),
        {
            "batch": {
                "micro_batch_size": 1,
                "divide_micro_batch": True,
                "global_batch_tokens": found.global_batch_tokens,
            },
            "schedule": {**schedule, "max_steps": found.max_steps},
        },
    )


def optimizer_of_width(
    recipe: ResolvedRecipe, written: Recipe, hidden_size: int
) -> OptimizerConfig:
    """Return the recipe's optimizer with learning rates for a model of this width. If the recipe
    sets learning rates, they are converted to this width. Otherwise, the learning rates for new
    models are used."""
    optimizer, given = recipe.optimizer, written.optimizer.model_fields_set
    # Muon's learning rates for new models were measured together with initial weights and betas
    # that only a recipe without an optimizer section gets.
    is_open = not given if optimizer.name == "muon" else "learning_rate" not in given
    if is_open and optimizer.name in NEW_MODEL_RATES:
        rates = new_model_rates(optimizer.name, hidden_size)
        kept = {key: value for key, value in rates.items() if key not in given - {"tuned_width"}}
        return optimizer.model_copy(update=kept)
    if has_width_rule(recipe):
        # If the recipe does not set tuned_width, its learning rates apply to the width of its own
        # model.
        width = optimizer.tuned_width or recipe.model.hidden_size
        optimizer = optimizer.model_copy(update={"tuned_width": width}).for_width(hidden_size)
    return optimizer


def has_width_rule(recipe: Recipe) -> bool:
    """Return True if the learning rates of the recipe's optimizer can be scaled with the model's
    width."""
    return "tuned_width" in OPTIMIZERS[recipe.optimizer.name].options


def _kept_schedule(plan: Plan) -> dict[str, Any]:
    """Return the recipe's schedule keys for a run of a different length. A warm-up or decay that is
    set in steps or tokens is scaled with the length of the run. If the original length of the run
    is unknown, the default fraction of the run is used."""
    config = plan.recipe.schedule
    values = config.model_dump(
        exclude={"epochs", "max_minutes", "decay_steps", "decay_tokens", "min_learning_rate"}
    )
    if config.kind != "constant":
        values["min_lr_ratio"] = config.minimum_scale(plan.recipe.optimizer.learning_rate)
    run = None if plan.run is None else plan.run.schedule

    def share(steps: int) -> float:
        assert run is not None
        # The fraction is rounded down, so that two fractions never add up to more than 1. It is
        # never rounded down to 0, so that a warm-up or decay of one step in a long run still has at
        # least one step.
        return min(max(math.floor(1e5 * steps / run.max_steps), 1) / 1e5, 1.0)

    if config.warmup_steps or config.warmup_tokens:
        values |= {"warmup_steps": None, "warmup_tokens": None}
        values["warmup_ratio"] = share(run.warmup_steps) if run and run.max_steps else None
    if config.cooldown_steps:
        values["cooldown_steps"] = None
        values["decay_fraction"] = share(run.cooldown_steps) if run and run.max_steps else None
    return values


def _in_time(
    found: Suggestion,
    estimate: Estimate,
    budget: Budget,
    text: TextFacts,
    *,
    epochs: float,
) -> dict[str, Any]:
    """Return the suggestion and its estimate, as attributes of `Plan`. If the budget is in seconds,
    the number of steps is set to the number that fits in the budget at the estimated speed."""
    assert estimate.tokens_per_second is not None
    speed = estimate.tokens_per_second.expected
    if budget.seconds is not None:
        tokens = tokens_in_time(speed, found.mode.left_of(budget.seconds), text, epochs)
        steps = max(int(tokens / found.global_batch_tokens), 1)
        found = with_steps(found, steps, text)
        changes = {"schedule.max_steps": steps}
        estimate = dataclasses.replace(estimate, recipe=with_changes(estimate.recipe, changes))
    found = dataclasses.replace(found, seconds=found.tokens / speed + found.mode.seconds)
    return {"suggestion": found, "suggested": estimate}


def cost(seconds: float, budget: Budget, machine: Machine) -> float | None:
    """Return the cost of a run of this duration on all devices, or None if there is no price."""
    if budget.price_per_hour is None:
        return None
    return seconds / 3600 * budget.price_per_hour * machine.count


# Warnings about model sizes that are slow on matrix units
#
# Matrix units read 16 bytes, or eight 16-bit numbers, at a time. Products with a dimension that is
# not a multiple of 8 use slower kernels (NVIDIA, "Matrix Multiplication Background User's Guide").

#: _PACKET is the number of 16-bit values that matrix units read at a time. Vocabularies are padded
#: to a multiple of _VOCABULARY.
_PACKET, _VOCABULARY = PACKET_BYTES // 2, 64

#: Speed-up from aligned matrix products that is reported for GPUs that are not in this machine.
_GAIN_ON_GPUS = 1 / DEFAULT_SHARES.misaligned.expected

#: Approximate number of multiplications in a measured product [tokens, inner] x [inner, size].
_PRODUCT_SIZE = 2e8
#: Minimum and maximum number of tokens in a measured product, and maximum size of its inner
#: dimension.
_LEAST_TOKENS = 16
_MOST_TOKENS = 256
_MOST_INNER = 512
#: Number of measurements per product, not counting the first round.
_ROUNDS = 5

#: Minimum speed-up of a step for which a warning is shown.
_LEAST_GAIN = 1.01


def alignment_warnings(
    recipe: ResolvedRecipe, here: torch.device | None, capability: tuple[int, int] | None = None
) -> Iterator[str]:
    """Yield a warning for each model size that is not aligned. The warning states the fraction of
    the work that is affected and the speed-up from an aligned size.

    Args:
        recipe: recipe that contains the model.
        here: device of this machine on which the speed-up is measured; None to use the upper bound
            for GPUs.
        capability: CUDA compute capability of the GPU; None for other devices.
    """
    note = packet_note(recipe.model, recipe.efficiency, capability, above=_PACKET)
    if note is not None:
        yield note
    dtype = dtype_of(recipe.efficiency.precision)
    if here is None and dtype == torch.float32 and recipe.efficiency.products != "tf32":
        return  # These products are not computed by matrix units.
    shapes = matrix_shapes(recipe.model, recipe.efficiency.vocab_multiple)
    total = sum(rows * columns for rows, columns in shapes)
    for size in sorted({size for shape in shapes for size in shape if size % _PACKET}):
        own = [shape for shape in shapes if size in shape]
        share = sum(rows * columns for rows, columns in own) / total
        key = next((k for k, v in recipe.model if v == size and k.endswith("size")), None)
        if key is None and recipe.model.hidden_size % _PACKET:
            continue  # derived from the hidden size, which has its own warning
        multiple = _PACKET
        if key == "vocab_size":
            multiple = _VOCABULARY
        elif key == "hidden_size":
            # The head dimension must be even.
            multiple = math.lcm(_PACKET, 2 * recipe.model.num_attention_heads)
        aligned = -(-size // multiple) * multiple
        inner = min(
            max([other for shape in own for other in shape if other != size], default=size),
            _MOST_INNER,
        )
        rate = (
            _GAIN_ON_GPUS
            if here is None
            else _measured_gain(here, dtype, inner, size, aligned=aligned)
        )
        gain = 1 / (1 - share * (1 - 1 / rate))
        if gain < _LEAST_GAIN:
            continue
        origin = "up to" if here is None else "measured here, about"
        advice = {
            "vocab_size": f"efficiency.vocab_multiple {multiple} pads it to {aligned:,}",
            None: f"use head sizes that are multiples of {_PACKET}",
        }.get(key, f"set it to {aligned:,}")
        name = f"a width of {size:,} inside the model" if key is None else f"model.{key} {size:,}"
        misaligned = any(other % _PACKET for shape in own for other in shape if other != size)
        together = " if the other sizes are aligned too" if misaligned else ""
        yield (
            f"{name} is not a multiple of {_PACKET}, and {share:.0%} of the matrix products use "
            f"it: {advice} ({origin} {gain:.2f} times the speed of a step{together})"
        )


def _measured_gain(
    device: torch.device, dtype: torch.dtype, inner: int, size: int, *, aligned: int
) -> float:
    """Return the duration of a linear layer's matrix products with size `size`, divided by their
    duration with size `aligned`; see `_product_seconds`. The result is the median of several
    measurements.
    """
    # With a large vocabulary, use fewer tokens to keep planning fast.
    fitting = int(_PRODUCT_SIZE / (inner * aligned)) // _PACKET * _PACKET
    tokens = min(max(fitting, _LEAST_TOKENS), _MOST_TOKENS)
    ratios = []
    for _ in range(_ROUNDS + 1):
        seconds = [
            _product_seconds(device, dtype, tokens, inner, size=one) for one in (size, aligned)
        ]
        ratios.append(seconds[0] / seconds[1])
    # The first round loads the kernels and is not counted.
    return statistics.median(ratios[1:])


def _product_seconds(
    device: torch.device, dtype: torch.dtype, tokens: int, inner: int, size: int
) -> float:
    """Return the time in seconds of a linear layer's three matrix products: the forward product and
    the gradients of the input and the weight. The suffixes in the names of tensors are their
    dimensions: N is `tokens`, I is `inner`, and S is `size`."""
    x_NI = torch.ones(tokens, inner, device=device, dtype=dtype)
    weight_SI = torch.ones(size, inner, device=device, dtype=dtype)
    grad_NS = torch.ones(tokens, size, device=device, dtype=dtype)
    synchronize(device)
    start = time.perf_counter()
    x_NI @ weight_SI.T
    grad_NS @ weight_SI
    grad_NS.T @ x_NI
    synchronize(device)
    return time.perf_counter() - start

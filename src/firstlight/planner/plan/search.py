"""The search for the fastest candidate that fits or, if none does, for settings that would fit."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Container, Iterator
from typing import Any

from firstlight.planner.memory.ranks import copies_of
from firstlight.planner.plan.estimate import (
    Candidate,
    Estimate,
    Estimator,
    other_optimizer,
    sequences_per_step,
    without_average,
)
from firstlight.planner.plan.machine import Machine, with_changes
from firstlight.planner.speed.timed import BUSY_TOKENS
from firstlight.recipe import ResolvedRecipe

#: Changes that are tried to make a step fit or its micro-batches larger; those that cost the least
#: speed come first.
_SAVINGS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("as it stands", {}),
    ("chunked loss", {"efficiency.loss_chunk_tokens": 1024}),
    (
        "selective checkpointing",
        {
            "efficiency.activation_checkpointing": "selective",
            "efficiency.loss_chunk_tokens": 1024,
        },
    ),
    (
        "full checkpointing",
        {"efficiency.activation_checkpointing": "full", "efficiency.loss_chunk_tokens": 1024},
    ),
    (
        "full checkpointing, 8-bit AdamW",
        {
            "efficiency.activation_checkpointing": "full",
            "efficiency.loss_chunk_tokens": 1024,
            "optimizer.name": "adamw8bit",
        },
    ),
)

#: LoRA as it is tried if nothing fits, and the changes that accompany all such settings.
_LORA: dict[str, Any] = {"rank": 16, "alpha": 32.0}
_LEAST: dict[str, Any] = {
    "batch.micro_batch_size": 1,
    "efficiency.activation_checkpointing": "full",
}


def best_estimate(
    recipe: ResolvedRecipe,
    machine: Machine,
    estimator: Estimator | None = None,
    known: Estimate | None = None,
) -> Estimate | None:
    """Return the settings with the most tokens/s among those that fit; None if none fits.

    The recipe's precision and global batch are kept, but not its micro-batch size; AdamW becomes
    8-bit AdamW only if nothing else fits. Methods that save memory are added, the cheapest first,
    only until the micro-batch keeps the device busy.

    If the recipe compiles, candidates are searched without torch.compile, which is quicker and
    usually takes more memory. The selected candidate, and the recipe as it is, are then estimated
    with torch.compile. If neither fits, the search is repeated with it, for all candidates that
    could fit.

    Args:
        recipe: the resolved recipe.
        machine: the machine to run on.
        estimator: the estimator to use; None creates one.
        known: the estimate for the recipe as it is, if it was already made.
    """
    estimator = estimator or Estimator()
    without: dict[str, Estimate] = {}
    found = _fastest(recipe, machine, estimator, without)
    if not recipe.efficiency.compile:
        return found
    estimates: list[Estimate] = []
    # The unchanged recipe comes first, because `max` returns the first of equally fast candidates.
    if found is None or found.changes:
        estimates.append(known or estimator.estimate(Candidate(recipe, machine, "as it stands")))
    if found is not None:
        estimator.tell(f"{found.name}, compiled")
        estimates.append(estimator.estimate(Candidate(recipe, machine, found.name, found.changes)))
    fitting = [estimator.timed(one, machine) for one in estimates if one.fits]
    if not fitting:
        hopeless = {name for name, one in without.items() if not one.may_fit_compiled}
        return _fastest(recipe, machine, estimator, {}, compiles=True, hopeless=hopeless)
    return max(fitting, key=_rate)


def _fastest(
    recipe: ResolvedRecipe,
    machine: Machine,
    estimator: Estimator,
    looked_at: dict[str, Estimate],
    *,
    compiles: bool = False,
    hopeless: Container[str] = (),
) -> Estimate | None:
    """Return the fastest of the candidates of `_SAVINGS` that fits; None if none fits.

    Args:
        recipe: the resolved recipe.
        machine: the machine to run on.
        estimator: the estimator to use.
        looked_at: receives each candidate's estimate by name, with the largest micro-batch that
            fits.
        compiles: see `Candidate`.
        hopeless: names of candidates to skip.
    """
    found: list[Estimate] = []
    tried: list[dict[str, Any]] = []
    for name, changes in _SAVINGS:
        wanted = {key: value for key, value in changes.items() if not _has(recipe, key, value)}
        # Changes that the recipe already has are dropped, which may give an earlier candidate
        # again.
        if wanted in tried:
            continue
        tried.append(wanted)
        if name in hopeless:
            continue
        if "optimizer.name" in wanted and (found or recipe.optimizer.name != "adamw"):
            # Another optimizer changes the result, so it only replaces AdamW if nothing else fits.
            continue
        if "optimizer.name" in wanted:
            wanted |= other_optimizer(recipe, wanted["optimizer.name"])
        estimator.tell(name)
        one = largest_that_fits(
            recipe, machine, name, wanted, estimator=estimator, compiles=compiles
        )
        looked_at[name] = one
        if not one.fits:
            continue
        found.append(estimator.timed(one, machine))
        if _is_busy(one, machine):
            break
    return max(found, key=_rate, default=None)


def largest_that_fits(
    recipe: ResolvedRecipe,
    machine: Machine,
    name: str,
    changes: dict[str, Any],
    estimator: Estimator,
    *,
    compiles: bool,
) -> Estimate:
    """Return the estimate with the largest micro-batch that fits and divides the step evenly, or
    with the smallest micro-batch if none fits.

    Memory is about linear in the size of the micro-batch: the two smallest give the slope, and the
    sizes that should fit according to it are estimated, the largest first.
    """
    sizes = list(micro_batches(recipe, machine))

    def asked(size: int) -> Candidate:
        candidate = _with_micro_batch_size(recipe, machine, name, changes, size=size)
        return dataclasses.replace(candidate, compiles=compiles)

    if compiles:
        # One after the other: tracing a compiled step already keeps both workers busy.
        first = estimator.estimate(asked(sizes[-1]))
        more = [estimator.estimate(asked(size)) for size in sizes[-2:-1] if first.fits]
    else:
        # The two smallest at the same time, in the workers.
        first, *more = estimator.estimate_all([asked(size) for size in sizes[:-3:-1]])
    if not (first.fits and more and more[0].fits):
        return first
    (second,) = more
    slope = (second.needed_bytes - first.needed_bytes) / (sizes[-2] - sizes[-1])
    busy = BUSY_TOKENS[machine.target.kind]
    seq_len = recipe.data.seq_len
    for size in sizes[:-2]:
        expected = first.needed_bytes + slope * (size - sizes[-1])
        # Twice what keeps the device busy gains nothing.
        if expected > machine.usable_bytes or size * seq_len > 2 * busy:
            continue
        one = estimator.estimate(asked(size))
        if one.fits:
            return one
    return second


def open_micro_batch(resolved: ResolvedRecipe) -> ResolvedRecipe:
    """Return the recipe with the same global batch, but an open number of micro-batches.

    Without `global_batch_tokens`, a step is the micro-batch of the recipe, which is not changed.
    """
    if resolved.batch.global_batch_tokens is None:
        return resolved
    return resolved.with_keys("batch", gradient_accumulation_steps=None)


def micro_batches(recipe: ResolvedRecipe, machine: Machine) -> Iterator[int]:
    """Yield micro-batch sizes that divide a device's part of each step evenly, each at most half of
    the previous one."""
    total = sequences_per_step(recipe, machine)
    if recipe.batch.ramp_start_tokens is not None:
        # The first step of a batch-size ramp must also be divided evenly.
        share = recipe.data.seq_len * copies_of(recipe, machine.count)
        total = math.gcd(total, recipe.batch.ramp_start_tokens // share)
    before = 2 * total
    for size in range(total, 0, -1):
        if total % size == 0 and 2 * size <= before:
            # Sizes in between differ too little in speed to justify an estimate each.
            before = size
            yield size


def _with_micro_batch_size(
    recipe: ResolvedRecipe,
    machine: Machine,
    name: str,
    changes: dict[str, Any],
    *,
    size: int,
) -> Candidate:
    total = sequences_per_step(recipe, machine)
    more: dict[str, Any] = dict(changes)
    if size != recipe.batch.micro_batch_size:
        more["batch.micro_batch_size"] = size
        if recipe.batch.global_batch_tokens is None:
            more["batch.gradient_accumulation_steps"] = total // size
    return Candidate(recipe, machine, name, more)


def _has(recipe: ResolvedRecipe, key: str, value: object) -> bool:
    section, _, name = key.partition(".")
    found = getattr(getattr(recipe, section), name)
    # Any nonzero number of tokens means that the loss is computed in chunks.
    return bool(found == value or (name == "loss_chunk_tokens" and found))


def _is_busy(one: Estimate, machine: Machine) -> bool:
    whole = one.recipe.batch.micro_batch_size == sequences_per_step(one.recipe, machine)
    tokens = one.recipe.batch.micro_batch_size * one.recipe.data.seq_len
    return whole or tokens >= BUSY_TOKENS[machine.target.kind]


def _rate(one: Estimate) -> float:
    """Return the expected tokens/s; if the device's rates are unknown, the micro-batch size."""
    if one.tokens_per_second is not None:
        return one.tokens_per_second.expected
    return float(one.recipe.batch.micro_batch_size)


def nearest_estimates(
    recipe: ResolvedRecipe, machine: Machine, estimator: Estimator | None = None
) -> list[Estimate]:
    """Return alternatives that fit, for a recipe of which no candidate fits: LoRA, LoRA on 4-bit
    weights, offloading to the CPU, more devices; each with a micro-batch of one sequence and full
    activation checkpointing.

    Args:
        recipe: the resolved recipe.
        machine: the machine to run on.
        estimator: the estimator to use; None creates one.
    """
    estimator, candidates = estimator or Estimator(), []
    sequences = sequences_per_step(recipe, machine) * copies_of(recipe, machine.count)
    for name, changes, where in _fallbacks(recipe, machine):
        least = dict(_LEAST)
        if recipe.batch.global_batch_tokens is None:
            # The global batch stays the same, even on more devices.
            cut = with_changes(recipe, {k: v for k, v in changes.items() if "distributed" in k})
            copies = copies_of(cut, where.count)
            least["batch.gradient_accumulation_steps"] = max(sequences // copies, 1)
        candidates.append(Candidate(recipe, where, name, {**least, **changes}, compiles=False))
    found = list(estimator.estimate_all(candidates))
    fitting = [
        estimator.timed(one, candidate.machine)
        for candidate, one in zip(candidates, found, strict=True)
        if one.fits
    ]
    if fitting or not recipe.efficiency.compile:
        return fitting
    compiled = [
        dataclasses.replace(candidate, compiles=True)
        for candidate, one in zip(candidates, found, strict=True)
        if one.may_fit_compiled
    ]
    return [one for one in estimator.estimate_all(compiled) if one.fits]


def _fallbacks(
    recipe: ResolvedRecipe, machine: Machine
) -> Iterator[tuple[str, dict[str, Any], Machine]]:
    if recipe.lora is None:
        alone = without_average(recipe)
        if machine.count == 1:
            alone["distributed.engine"] = "auto"
        yield "LoRA, rank 16", {"lora": _LORA, **alone}, machine
        yield (
            "LoRA, rank 16, base in 4 bits",
            {"lora": {**_LORA, "quantize": "nf4"}, **alone},
            machine,
        )
    if machine.target.kind == "cuda" and recipe.lora is None:
        offload: dict[str, Any] = {
            "distributed.engine": "deepspeed",
            "distributed.offload": "cpu",
            # DeepSpeed does not support compilation.
            "efficiency.compile": False,
        }
        yield "offloading moments to the CPU (DeepSpeed)", offload, machine
        several = dataclasses.replace(machine, count=max(machine.count, 2))
        yield (
            f"{several.count} devices with fsdp, offloading to the CPU",
            {"distributed": {"engine": "fsdp", "offload": "cpu"}},
            several,
        )
        for count in (2, 4, 8, 16, 32, 64):
            if count > machine.count:
                more = dataclasses.replace(machine, count=count)
                yield f"{count} devices with fsdp", {"distributed": {"engine": "fsdp"}}, more

"""The fastest way to train that fits; and where none does, the nearest that would."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Iterator
from typing import Any

from firstlight.planner.memory.ranks import copies_of
from firstlight.planner.plan.estimate import Candidate, Estimate, Estimator
from firstlight.planner.plan.machine import Machine, with_changes
from firstlight.recipe import ResolvedRecipe

#: What is tried to make a step fit, or its micro-batches larger: the cheap ones first.
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

#: Tokens of a micro-batch from which on a device is busy: more gain little.
BUSY_TOKENS = {"cpu": 1024, "cuda": 16384}

#: Where all weights don't fit.
_LORA: dict[str, Any] = {"rank": 16, "alpha": 32.0}
_LEAST: dict[str, Any] = {
    "batch.micro_batch_size": 1,
    "efficiency.activation_checkpointing": "full",
}


def best_estimate(
    recipe: ResolvedRecipe,
    machine: Machine,
    estimator: Estimator | None = None,
    tell: Callable[[str], None] = lambda _: None,
    known: Estimate | None = None,
) -> Estimate | None:
    """The settings with the most tokens a second among those that fit; None if none does.

    What a recipe says of precision, optimizer and batch is kept, but for the cut of the batch into
    micro-batches; memory is bought with the methods that cost the least, and no more than it takes
    to keep the device busy. What compiles is looked for without torch.compile, which is quicker and
    mostly takes more memory; what was found, and the recipe as it stands, are looked at with it;
    where neither fits, everything is that could.

    Args:
        recipe: the resolved recipe.
        machine: the machine to run on.
        estimator: makes the estimates; None makes a new one.
        tell: called with what is being tried.
        known: the estimate for the recipe as it stands, if it was made before.
    """
    estimator = estimator or Estimator()
    without: dict[str, Estimate] = {}
    found = _fastest(recipe, machine, estimator, tell, without)
    if not recipe.efficiency.compile:
        return found
    ways: list[Estimate] = []
    # First, so that of equal ones it is the one that changes nothing.
    if found is None or found.changes:
        ways.append(known or estimator.estimate(Candidate(recipe, machine, "as it stands")))
    if found is not None:
        tell(f"{found.name}, compiled")
        ways.append(estimator.estimate(Candidate(recipe, machine, found.name, found.changes)))
    fitting = [one for one in ways if one.fits]
    if not fitting:
        hopeless = {name for name, one in without.items() if not one.may_fit_compiled}
        return _fastest(recipe, machine, estimator, tell, {}, compiles=True, hopeless=hopeless)
    return max(fitting, key=_rate)


def _fastest(
    recipe: ResolvedRecipe,
    machine: Machine,
    estimator: Estimator,
    tell: Callable[[str], None],
    looked_at: dict[str, Estimate],
    *,
    compiles: bool = False,
    hopeless: Container[str] = (),
) -> Estimate | None:
    """
    Args:
        looked_at: gets each way, as large as it fits.
        hopeless: ways that are not to be tried.
    """
    found: list[Estimate] = []
    tried: list[dict[str, Any]] = []
    for name, changes in _SAVINGS:
        wanted = {key: value for key, value in changes.items() if not _has(recipe, key, value)}
        # What the recipe has already is no other way.
        if wanted in tried:
            continue
        tried.append(wanted)
        if name in hopeless:
            continue
        if "optimizer.name" in wanted and (found or recipe.optimizer.name != "adamw"):
            # Another optimizer learns otherwise: only for AdamW, and where nothing else fits.
            continue
        tell(name)
        one = largest_that_fits(recipe, machine, name, wanted, estimator, compiles=compiles)
        looked_at[name] = one
        if not one.fits:
            continue
        found.append(one)
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
    """With the largest micro-batch that fits and cuts the step evenly; the smallest if none does.

    Memory grows with the rows: that of one and of two tells about where to look, and what is found
    there is looked at itself.
    """
    cuts = list(micro_batches(recipe, machine))

    def asked(rows: int) -> Candidate:
        candidate = _with_rows(recipe, machine, name, changes, rows)
        return dataclasses.replace(candidate, compiles=compiles)

    if compiles:
        # Each keeps all workers busy.
        first = estimator.estimate(asked(cuts[-1]))
        more = [estimator.estimate(asked(rows)) for rows in cuts[-2:-1] if first.fits]
    else:
        first, *more = estimator.estimate_all([asked(rows) for rows in cuts[:-3:-1]])
    if not (first.fits and more and more[0].fits):
        return first
    (second,) = more
    slope = (second.needed_bytes - first.needed_bytes) / (cuts[-2] - cuts[-1])
    busy = BUSY_TOKENS[machine.target.kind]
    seq_len = recipe.data.seq_len
    for rows in cuts[:-2]:
        expected = first.needed_bytes + slope * (rows - cuts[-1])
        # Twice what keeps the device busy gains nothing.
        if expected > machine.usable_bytes or rows * seq_len > 2 * busy:
            continue
        one = estimator.estimate(asked(rows))
        if one.fits:
            return one
    return second


def open_micro_batch(settled: ResolvedRecipe) -> ResolvedRecipe:
    """With the batch of a step kept, and its cut into micro-batches open.

    A step of which nothing is said is the micro-batch of the recipe.
    """
    if settled.batch.global_batch_tokens is None:
        return settled
    batch = settled.batch.model_copy(update={"gradient_accumulation_steps": None})
    return settled.model_copy(update={"batch": batch})


def micro_batches(recipe: ResolvedRecipe, machine: Machine) -> Iterator[int]:
    """Rows of a micro-batch that cut a device's part of the step evenly, each at most half of the
    one before."""
    total = rows_a_step(recipe, machine)
    before = 2 * total
    for rows in range(total, 0, -1):
        if total % rows == 0 and 2 * rows <= before:
            before = rows
            yield rows


def rows_a_step(recipe: ResolvedRecipe, machine: Machine) -> int:
    """Of each device, or group of devices that compute the same rows."""
    tokens = recipe.batch.global_batch_tokens
    if tokens is not None:
        return max(tokens // recipe.data.seq_len // copies_of(recipe, machine.count), 1)
    return recipe.batch.rows * (recipe.batch.gradient_accumulation_steps or 1)


def _with_rows(
    recipe: ResolvedRecipe, machine: Machine, name: str, changes: dict[str, Any], rows: int
) -> Candidate:
    total = rows_a_step(recipe, machine)
    more: dict[str, Any] = dict(changes)
    if rows != recipe.batch.rows:
        more["batch.micro_batch_size"] = rows
        if recipe.batch.global_batch_tokens is None:
            more["batch.gradient_accumulation_steps"] = total // rows
    return Candidate(recipe, machine, name, more)


def _has(recipe: ResolvedRecipe, key: str, value: object) -> bool:
    section, _, name = key.partition(".")
    found = getattr(getattr(recipe, section), name)
    # A loss that is cut up already is cut up.
    return bool(found == value or (name == "loss_chunk_tokens" and found))


def _is_busy(one: Estimate, machine: Machine) -> bool:
    assert one.recipe is not None
    whole = one.recipe.batch.rows == rows_a_step(one.recipe, machine)
    tokens = one.recipe.batch.rows * one.recipe.data.seq_len
    return whole or tokens >= BUSY_TOKENS[machine.target.kind]


def _rate(one: Estimate) -> float:
    """Without rates, the larger micro-batch, and of equal ones the earlier."""
    if one.tokens_per_second is not None:
        return one.tokens_per_second.expected
    assert one.recipe is not None
    return float(one.recipe.batch.rows)


def nearest_estimates(
    recipe: ResolvedRecipe,
    machine: Machine,
    estimator: Estimator | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> list[Estimate]:
    """Where nothing fits as it is meant: what would, each with the largest saving of its kind.

    LoRA, the same in four bits, offloading to the CPU, more devices.

    Args:
        recipe: the resolved recipe.
        machine: the machine to run on.
        estimator: makes the estimates; None makes a new one.
        tell: called with what has been tried.
    """
    estimator, candidates = estimator or Estimator(), []
    rows = rows_a_step(recipe, machine) * copies_of(recipe, machine.count)
    for name, changes, where in _fallbacks(recipe, machine):
        least = dict(_LEAST)
        if recipe.batch.global_batch_tokens is None:
            # More devices share the same step.
            cut = with_changes(recipe, {k: v for k, v in changes.items() if "distributed" in k})
            copies = copies_of(cut, where.count)
            least["batch.gradient_accumulation_steps"] = max(rows // copies, 1)
        candidates.append(Candidate(recipe, where, name, {**least, **changes}, compiles=False))
    found = _told(estimator.estimate_all(candidates), tell)
    fitting = [one for one in found if one.fits]
    if fitting or not recipe.efficiency.compile:
        return fitting
    compiled = [
        dataclasses.replace(candidate, compiles=True)
        for candidate, one in zip(candidates, found, strict=True)
        if one.may_fit_compiled
    ]
    return [one for one in _told(estimator.estimate_all(compiled), tell) if one.fits]


def _told(outcomes: Iterator[Estimate], tell: Callable[[str], None]) -> list[Estimate]:
    found = []
    for one in outcomes:
        tell(one.name)
        found.append(one)
    return found


def _fallbacks(
    recipe: ResolvedRecipe, machine: Machine
) -> Iterator[tuple[str, dict[str, Any], Machine]]:
    if recipe.lora is None:
        alone = {"distributed.engine": "auto"} if machine.count == 1 else {}
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
            # What it doesn't go with.
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

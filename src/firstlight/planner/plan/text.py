"""Format a plan as lines and tables for the user."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from firstlight.console import counted, gib
from firstlight.planner.memory.prediction import PARTS
from firstlight.planner.plan.estimate import Estimate
from firstlight.planner.plan.machine import PlannedRun
from firstlight.planner.plan.plan import Plan, cost, has_width_rule, largest_epochs
from firstlight.planner.speed.gpu import Range
from firstlight.recipe import ResolvedRecipe

#: A table as a list of rows of cells. The first row is the header.
Table = list[Sequence[str]]


def blocks(plan: Plan) -> Iterator[str | Table]:
    """Yield the lines and tables of a plan in the order in which they are shown."""
    machine, recipe = plan.machine, plan.recipe
    count = f"{machine.count} x " if machine.count > 1 else ""
    yield (
        f"{recipe.model.model_type}, {plan.parameters:,} parameters, a vocabulary of "
        f"{recipe.model.vocab_size:,}; {precision_text(recipe)}, sequences of "
        f"{recipe.data.seq_len:,} tokens, {recipe.batch.micro_batch_size} per micro-batch; "
        f"{count}{machine.name}, {gib(machine.usable_bytes)} usable"
    )
    yield f"as it stands: {in_words(plan.as_it_stands)}"
    yield memory_table(plan.as_it_stands)
    if plan.as_it_stands.speed is not None:
        yield f"speed of {machine.name}: {plan.as_it_stands.speed.source}"
    found = plan.as_it_stands.training
    for note in (*machine.notes, *plan.notes, *(found.notes if found else ())):
        yield f"note: {note}"
    for warning in plan.warnings:
        yield f"warning: {warning}"
    if plan.methods:
        yield "effect of each method alone:"
        yield method_rows(plan)
        if any(one.is_bound for one in plan.methods):
            yield "  <: without torch.compile, compared with a step without it"
        if plan.as_it_stands.speed and any(one.fits and not one.speed for one in plan.methods):
            yield "  methods without a speed were not timed, to keep planning short"
    yield from _advice(plan)
    if plan.run is not None:
        yield _run(plan, plan.run)
    if plan.suggestion is not None and plan.suggested is not None:
        yield from _suggestion(plan)


def _advice(plan: Plan) -> Iterator[str | Table]:
    """Yield lines about the best estimate. If no candidate fits in memory, yield lines about
    alternatives that would fit."""
    if plan.best is not None:
        yield f"best: {in_words(plan.best)}"
        yield from _settings(plan.best, plan.reasons)
    elif plan.nearest:
        yield "nothing fits unchanged; these changes would fit:"
        for one in plan.nearest:
            yield f"  {one.name}: {in_words(one)}"
            yield from _settings(one, {})
    elif plan.methods:
        yield (
            "nothing fits (tried checkpointing, chunked loss, 8-bit AdamW, LoRA, offloading and "
            "more devices, as far as the recipe allows): use a smaller model"
        )


def _run(plan: Plan, run: PlannedRun) -> str:
    if not run.schedule.max_steps:
        return "the recipe's run: no steps, the model is evaluated and saved unchanged"
    read = "" if run.epochs is None else f" ({counted(run.epochs, 'epoch', '.3g')})"
    # A run with a time budget has fewer steps than predicted, because evaluations and saves also
    # take time.
    about = "at the predicted speed about " if run.schedule.is_open else ""
    steps, tokens = counted(run.schedule.max_steps, "step"), count_text(run.tokens)
    text = (
        f"the recipe's run: {about}{steps} of {run.batch.in_words} sequences, {tokens} "
        f"tokens{read}, {counted(run.schedule.warmup_steps, 'warm-up step')}"
    )
    if plan.run_seconds is None:
        return text
    which = "with the best settings" if plan.best is not None else "as it stands"
    return f"{text}: {hours(plan.run_seconds)} {which}{_price(plan, plan.run_seconds)}"


_PRECISIONS = {
    "bf16": "bf16 with fp32 weights",
    "fp16": "fp16 with fp32 weights",
    "bf16_params": "bf16 weights with fp32 masters",
}


def precision_text(recipe: ResolvedRecipe) -> str:
    """Describe the precision of a resolved recipe. Append ", compiled" if the recipe enables
    torch.compile."""
    name = recipe.efficiency.precision
    return f"{_PRECISIONS.get(name, name)}{', compiled' if recipe.efficiency.compile else ''}"


def in_words(one: Estimate) -> str:
    """Describe the memory use of an estimate. If the estimate fits in memory and its speed is
    known, also describe the speed."""
    if one.problem:
        return one.problem
    fits = "fits" if one.fits else "may not fit" if one.may_fit_compiled else "DOES NOT FIT"
    phase = ""
    if one.training is not None:
        is_training = one.training.total_bytes == one.needed_bytes
        where = one.training.phase if is_training else _between_steps(one)
        phase = f", at its peak in {'an' if where == 'evaluation' else 'the'} {where}"
    most = "at most " if one.is_bound else ""
    text = f"{most}{gib(one.needed_bytes)} of {gib(one.usable_bytes)}: {fits}{phase}"
    if one.speed is None or not one.fits:
        return text
    return f"{text}; {speed(one.speed.tokens_per_second)}, MFU {one.speed.mfu.expected:.0%}"


def _between_steps(one: Estimate) -> str:
    """Return the phase between steps that takes the most memory: "save", "averaging" or
    "evaluation"."""
    phase = "" if one.evaluation is None else one.evaluation.phase
    return phase if phase in ("save", "averaging") else "evaluation"


def memory_table(one: Estimate) -> Table:
    """Return a table of the memory use by part, such as weights and activations. It has a column
    for training and a column for the phase between steps that takes the most memory."""
    columns = [
        (name, p)
        for name, p in (("training", one.training), (_between_steps(one), one.evaluation))
        if p is not None
    ]
    most = max((p.total_bytes for _, p in columns), default=0)
    rows: Table = [("memory", *(name for name, _ in columns))]
    for part in PARTS:
        values = [p.parts.get(part, 0) for _, p in columns]
        if any(values):
            rows.append((part.replace("_", " "), *(gib(size, most) for size in values)))
    unused = [p.reserved_bytes - p.peak_bytes for _, p in columns]
    if any(unused):
        rows.append(("allocator: rounding and gaps", *(gib(size, most) for size in unused)))
    if any(p.overhead_bytes for _, p in columns):
        rows.append(("outside the allocator", *(gib(p.overhead_bytes, most) for _, p in columns)))
    rows.append(("total", *(gib(p.total_bytes, most) for _, p in columns)))
    if any(p.host_bytes for _, p in columns):
        rows.append(("in addition, CPU memory", *(gib(p.host_bytes, most) for _, p in columns)))
    return rows


def method_rows(plan: Plan) -> Table:
    """Return a table that compares the memory use and speed with each method to those of the
    unchanged recipe. If the memory use with a method is only known without torch.compile, it is
    compared to the recipe's memory use without torch.compile."""
    rows: Table = [("method", "memory", "saves", "tokens/s", "speed")]
    first = plan.as_it_stands
    assert first.training is not None
    base, rate = first.training.total_bytes, first.tokens_per_second
    rows.append(("as it stands", gib(base), "", _rate(first), ""))
    plain = next((one for one in plan.methods if "efficiency.compile" in one.changes), first)
    plain_base = None if plain.training is None else plain.training.total_bytes
    for one in plan.methods:
        if one.training is None:
            continue
        needed, own = one.training.total_bytes, one.tokens_per_second
        both_fit = first.fits and one.fits
        ratio = f"{own.expected / rate.expected:.2f}x" if own and rate and both_fit else ""
        beside = plain_base if one.is_bound else base
        saves = "" if beside is None else f"{1 - needed / beside:.0%}"
        rows.append(
            (
                one.name,
                f"{'< ' if one.is_bound else ''}{gib(needed, base)}",
                saves,
                _rate(one),
                ratio,
            )
        )
    return rows


def changed_options(one: Estimate) -> dict[str, str]:
    """Return the changes that an estimate makes to the recipe. The result maps options of `train`,
    which have the form `section.key`, to values."""
    found: dict[str, str] = {}
    for key in one.changes:
        value = _value(one, key)
        parts = (
            {f"{key}.{name}": part for name, part in value.items()}
            if isinstance(value, dict)
            else {key: value}
        )
        # JSON is valid YAML.
        found |= {k: v if isinstance(v, str) else json.dumps(v) for k, v in parts.items()}
    return found


def _settings(one: Estimate, reasons: dict[str, str]) -> Iterator[str]:
    keys = list(dict.fromkeys((*reasons, *one.changes)))
    options = [(key, _option(key, _value(one, key))) for key in keys]
    width = max((len(text) for _, text in options), default=0)
    for key, text in options:
        yield f"    {text:<{width}}  {reasons.get(key, '')}".rstrip()


def _value(one: Estimate, key: str) -> Any:
    section, _, name = key.partition(".")
    found = getattr(one.recipe, section)
    return getattr(found, name) if name else one.changes[key]


def _option(key: str, value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"--{key}.{name} {part}" for name, part in value.items())
    return f"--{key} {str(value).lower() if isinstance(value, bool) else value}"


def _suggestion(plan: Plan) -> Iterator[str]:
    found, estimate = plan.suggestion, plan.suggested
    assert found is not None
    assert estimate is not None
    config = found.config
    active, kind = "", "parameter"
    if found.active_parameters < found.parameters:
        active, kind = f"{found.active_parameters / 1e6:,.0f}M active, ", "active parameter"
    yield (
        f"to train with this budget: {config.model_type}, {found.parameters / 1e6:,.0f}M "
        f"parameters ({active}hidden_size {config.hidden_size}, {config.num_hidden_layers} "
        f"layers), {count_text(found.tokens)} tokens, "
        f"{found.tokens / found.active_parameters:.2g} per {kind}"
    )
    yield (
        f"    {counted(found.max_steps, 'step')} of {found.global_batch_tokens:,} tokens, "
        f"micro-batches of {counted(estimate.recipe.batch.micro_batch_size, 'sequence')}"
    )
    yield f"    {in_words(estimate)}"
    yield f"    {hours(found.seconds)}{_price(plan, found.seconds)}"
    low, high = found.bits_per_byte
    if high >= 8:
        yield "    expected bits per byte unknown: the run is too short for the scaling law"
    else:
        yield (
            f"    expected {low:.2f} to {high:.2f} bits per byte of held-out text that is as hard "
            "to predict as English prose or source code"
        )
    if found.epochs is not None:
        epochs = counted(found.epochs, "epoch", ".2g")
        yield f"    {epochs} of the prepared text{_limit(plan, found.epochs)}"
    if plan.replacements:
        yield "    changed values of the recipe:"
    width = max(map(len, plan.replacements), default=0)
    for key, (old, new) in plan.replacements.items():
        before = "not set" if old is None else _written(old)
        yield f"      {key:<{width}}  {before} -> {_written(new)}"
    if not has_width_rule(plan.recipe):
        yield (
            f"    note: there is no known rule to scale the learning rates of "
            f"{plan.recipe.optimizer.name} with hidden_size"
        )


def _limit(plan: Plan, epochs: float) -> str:
    """Return the end of a sentence that explains why the run does not make more passes over the
    text. Return "" if the budget is the only reason."""
    # The comparison allows a small difference, because a run has a whole number of steps.
    if plan.budget.seconds is None or epochs < 0.9 * largest_epochs(plan.recipe):
        return ""
    if plan.recipe.schedule.epochs:
        return ", the limit of schedule.epochs"
    return ": more epochs would help little or cause overfitting; more text would help a lot"


def _written(value: Any) -> str:
    """Format a value of the recipe as in YAML, and floats with four significant digits."""
    return f"{value:.4g}" if isinstance(value, float) else json.dumps(value).strip('"')


def _price(plan: Plan, seconds: float) -> str:
    price = cost(seconds, plan.budget, plan.machine)
    return "" if price is None else f", costs {price:,.2f}"


def count_text(count: float) -> str:
    """Format a number as "15.5M" or "1.36B"."""
    return f"{count / 1e6:,.3g}M" if count < 1e9 else f"{count / 1e9:,.4g}B"


def speed(rate: Range) -> str:
    """Format a speed in tokens/s with its range."""
    return f"{rate.expected:,.0f} tokens/s ({rate.slow:,.0f} to {rate.fast:,.0f})"


def _rate(one: Estimate) -> str:
    if not one.fits:
        # This is the memory use without torch.compile, which is usually higher than with
        # torch.compile.
        return "may not fit" if one.may_fit_compiled else "does not fit"
    rate = one.tokens_per_second
    return "" if rate is None else f"{rate.expected:,.0f}"


def hours(seconds: float) -> str:
    """Format a duration as "45 s", "90 min", "5.2 h" or "3.1 days"."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 2 * 86400 else f"{seconds / 86400:.1f} days"

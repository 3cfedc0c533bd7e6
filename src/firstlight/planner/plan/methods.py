"""What each method alone would save and cost, and why a plan takes which setting."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from firstlight.planner.memory.program import without_compile
from firstlight.planner.plan.estimate import Candidate, Estimate, Estimator
from firstlight.planner.plan.machine import Machine, facts_of
from firstlight.planner.plan.search import sequences_per_step
from firstlight.recipe import Recipe, ResolvedRecipe
from firstlight.recipe.resolve import attention_backend

_GIB = 2**30


def method_table(
    recipe: ResolvedRecipe,
    machine: Machine,
    estimator: Estimator | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> list[Estimate]:
    """Each method that the recipe does not have, alone beside it. Of those that compile, memory is
    that without torch.compile, unless it is the method.

    Args:
        recipe: the resolved recipe.
        machine: the machine to run on.
        estimator: makes the estimates; None makes a new one.
        tell: called with what has been tried.
    """
    candidates = [
        Candidate(
            recipe,
            machine,
            name,
            changes,
            evaluates=False,
            compiles="efficiency.compile" in changes,
        )
        for name, changes in methods(recipe, machine)
    ]
    found = []
    for one in (estimator or Estimator()).estimate_all(candidates):
        tell(one.name)
        found.append(one)
    return found


def methods(recipe: ResolvedRecipe, machine: Machine) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, keys of the recipe) of each method that would change something."""
    config, micro_batch_size = recipe.efficiency, recipe.batch.micro_batch_size
    if micro_batch_size > 1:
        changes: dict[str, Any] = {"batch.micro_batch_size": 1}
        if recipe.batch.global_batch_tokens is None:
            changes["batch.gradient_accumulation_steps"] = sequences_per_step(recipe, machine)
        yield f"gradient accumulation, 1 x {sequences_per_step(recipe, machine)}", changes
    for kind in ("selective", "full"):
        if config.activation_checkpointing != kind:
            yield (
                f"activation checkpointing, {kind}",
                {"efficiency.activation_checkpointing": kind},
            )
    if not config.loss_chunk_tokens:
        yield "chunked loss", {"efficiency.loss_chunk_tokens": 1024}
    if config.precision != machine.precision:
        yield f"precision {machine.precision}", _with_precision(recipe, machine, machine.precision)
    if config.precision != "fp32":
        yield "precision fp32", _with_precision(recipe, machine, "fp32")
    if config.precision == "bf16":
        yield "bf16 weights, fp32 masters", {"efficiency.precision": "bf16_params"}
    if not config.compile:
        yield "torch.compile", {"efficiency.compile": True}
    else:
        plain = without_compile(config)
        yield "no torch.compile", {f"efficiency.{key}": value for key, value in plain.items()}
    if config.attention != "plain":
        yield "attention without a fused kernel", {"efficiency.attention": "plain"}
    for name, title in (("adamw8bit", "8-bit AdamW"), ("adafactor", "Adafactor"), ("muon", "Muon")):
        if recipe.optimizer.name != name:
            changes = {"optimizer.name": name}
            # The option belongs to 8-bit states and is refused with other optimizers.
            if recipe.optimizer.embeddings_in_32_bits and name != "adamw8bit":
                changes["optimizer.embeddings_in_32_bits"] = False
            yield title, changes
    if machine.target.kind == "cuda" and not config.activation_offload:
        yield "activations in the CPU's memory", {"efficiency.activation_offload": True}
    if recipe.lora is None:
        yield "LoRA, rank 16", {"lora": {"rank": 16, "alpha": 32.0}}


def _with_precision(recipe: ResolvedRecipe, machine: Machine, precision: str) -> dict[str, Any]:
    """With it goes the attention that depends on it."""
    config, seq_len, facts = recipe.efficiency, recipe.data.seq_len, facts_of(recipe, machine)
    changes: dict[str, Any] = {"efficiency.precision": precision}
    if config.attention == attention_backend(recipe, seq_len, facts, config.precision):
        attention = attention_backend(recipe, seq_len, facts, precision)
        if attention != config.attention:
            changes["efficiency.attention"] = attention
    return changes


def reasons_for(
    recipe: Recipe, best: Estimate, first: Estimate, machine: Machine
) -> dict[str, str]:
    """For each key that the recipe left open, or that the best candidate sets otherwise, why.

    Args:
        recipe: the recipe as written.
        best: the chosen estimate.
        first: the recipe as it stands.
        machine: the machine that was planned for.
    """
    reasons: dict[str, str] = {}
    config, written = best.recipe.efficiency, recipe.efficiency
    if written.precision == "auto":
        reasons["efficiency.precision"] = _precision(config.precision, machine)
    if written.attention == "auto":
        reasons["efficiency.attention"] = _ATTENTION[config.attention]
    if written.compile == "auto":
        reasons["efficiency.compile"] = (
            "fewer passes over memory, and less of it, for a minute at the start"
            if config.compile
            else "does not pay here"
        )
    needed, usable = best.needed_bytes / _GIB, best.usable_bytes / _GIB
    micro_batch_size = best.recipe.batch.micro_batch_size
    if micro_batch_size == sequences_per_step(best.recipe, machine):
        why = "the whole step at once"
    else:
        more = "more may not fit" if config.compile else "more do not fit"
        why = "more gain nothing" if needed < 0.6 * usable else more
    reasons["batch.micro_batch_size"] = f"{needed:.1f} of {usable:.1f} GiB; {why}"
    saves = "" if first.fits else " (as it stands, the recipe does not fit)"
    if "efficiency.activation_checkpointing" in best.changes:
        reasons["efficiency.activation_checkpointing"] = (
            f"activations would take most of the memory{saves}: computed again instead"
        )
    if "efficiency.loss_chunk_tokens" in best.changes:
        reasons["efficiency.loss_chunk_tokens"] = (
            f"a micro-batch's logits would take {_logits_bytes(best.recipe) / _GIB:.1f} GiB in fp32"
            f"{saves}: computed in chunks instead"
        )
    if "optimizer.name" in best.changes:
        reasons["optimizer.name"] = f"moments in 8 bits take a quarter of the memory{saves}"
    return reasons


_ATTENTION = {
    "sdpa": "torch's fused kernels hold no scores",
    "blockwise": "holds no scores, and is faster than the fused kernel here",
    "flex": "masks of documents cost no memory",
}


def _logits_bytes(recipe: ResolvedRecipe) -> int:
    """Not from a trace: of a compiled step that doesn't say which bytes are logits."""
    return 4 * recipe.batch.micro_batch_size * recipe.data.seq_len * recipe.model.vocab_size


def _precision(precision: str, machine: Machine) -> str:
    gpu = machine.gpu
    if precision == "fp32":
        return "nothing narrower is faster here"
    if gpu is None:
        return f"{precision} is multiplied faster here"
    share = gpu.peak_flops(precision) / gpu.fp32
    text = f"{share:.0f} times fp32's rate on this GPU"
    return text if precision != "fp16" else f"{text}, which has no bf16"

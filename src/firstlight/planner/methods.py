"""What each method alone would save and cost: the table that guides print for one GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from firstlight.planner.equivalents import without_compile
from firstlight.planner.machine import Machine
from firstlight.planner.outcome import Oracle, Outcome, Question
from firstlight.planner.search import rows_a_step
from firstlight.planner.settling import facts_of
from firstlight.recipe import ResolvedRecipe
from firstlight.recipe.resolve import attention_backend


def method_table(
    recipe: ResolvedRecipe,
    machine: Machine,
    oracle: Oracle | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> list[Outcome]:
    """Each method that the recipe does not have, alone beside it. Of those that compile, memory is
    that without torch.compile, unless it is the method.

    Args:
        recipe: the resolved recipe.
        machine: to run on.
        oracle: who is asked.
        tell: called with what has been tried.
    """
    questions = [
        Question(
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
    for one in (oracle or Oracle()).answers(questions):
        tell(one.name)
        found.append(one)
    return found


def methods(recipe: ResolvedRecipe, machine: Machine) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, keys of the recipe) of each method that would change something."""
    config, rows = recipe.efficiency, recipe.batch.rows
    if rows > 1:
        changes: dict[str, Any] = {"batch.micro_batch_size": 1}
        if recipe.batch.global_batch_tokens is None:
            changes["batch.gradient_accumulation_steps"] = rows_a_step(recipe, machine)
        yield f"gradient accumulation, 1 x {rows_a_step(recipe, machine)}", changes
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
    if config.compile is not True:
        yield "torch.compile", {"efficiency.compile": True}
    else:
        plain = without_compile(config)
        yield "no torch.compile", {f"efficiency.{key}": value for key, value in plain.items()}
    if config.attention != "plain":
        yield "attention without a fused kernel", {"efficiency.attention": "plain"}
    for name, title in (("adamw8bit", "8-bit AdamW"), ("adafactor", "Adafactor"), ("muon", "Muon")):
        if recipe.optimizer.name != name:
            changes = {"optimizer.name": name}
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

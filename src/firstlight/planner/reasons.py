"""Why a plan takes which setting."""

from __future__ import annotations

from firstlight.planner.machine import Machine
from firstlight.planner.outcome import Outcome
from firstlight.planner.search import rows_a_step
from firstlight.recipe import Recipe, ResolvedRecipe

_GIB = 2**30


def reasons_for(recipe: Recipe, best: Outcome, first: Outcome, machine: Machine) -> dict[str, str]:
    """For each key that the recipe left open, or that the best way sets otherwise, why.

    Args:
        recipe: as it was written.
        best: the way that was chosen.
        first: the recipe as it stands.
        machine: that was planned for.
    """
    assert best.recipe is not None
    reasons: dict[str, str] = {}
    config, written = best.recipe.efficiency, recipe.efficiency
    if written.precision == "auto":
        reasons["efficiency.precision"] = _precision(config.precision, machine)
    if written.attention == "auto":
        reasons["efficiency.attention"] = _ATTENTION[config.attention]
    if written.compile == "auto":
        reasons["efficiency.compile"] = (
            "fewer passes over memory, and less of it, for a minute at the start"
            if config.compile is True
            else "does not pay here"
        )
    needed, usable = best.needed_bytes / _GIB, best.usable_bytes / _GIB
    rows = best.recipe.batch.rows
    if rows == rows_a_step(best.recipe, machine):
        why = "the whole step at once"
    else:
        more = "more may not fit" if config.compile is True else "more do not fit"
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
    return 4 * recipe.batch.rows * recipe.data.seq_len * recipe.model.vocab_size


def _precision(precision: str, machine: Machine) -> str:
    gpu = machine.gpu
    if precision == "fp32":
        return "nothing narrower is faster here"
    if gpu is None:
        return f"{precision} is multiplied faster here"
    share = gpu.peak_flops(precision) / gpu.fp32
    text = f"{share:.0f} times fp32's rate on this GPU"
    return text if precision != "fp16" else f"{text}, which has no bf16"

"""What a recipe leaves to firstlight: decided before the run, and kept when it is resumed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from firstlight.efficiency import resolve_attention, resolve_precision
from firstlight.hardware import Hardware
from firstlight.training.config import Recipe
from firstlight.training.fit import largest_micro_batch


def decide(
    recipe: Recipe, saved: Mapping[str, Any], hardware: Hardware, tell: Callable[[str], None]
) -> Recipe:
    """The recipe with every "auto" replaced by what it comes to here.

    What depends on a measurement could come out otherwise another day, and a resumed run must
    compute as before: the checkpoint's choice stands.

    Args:
        recipe: with its model and row length.
        saved: the checkpoint's recipe, {} for a new run.
        hardware: to run on.
        tell: called with each choice worth knowing.

    Raises:
        ConfigError: the micro-batch size can't be found.
    """
    before = saved.get("efficiency", {})
    config = recipe.efficiency
    chosen: dict[str, Any] = {}
    dtype = resolve_precision(config, hardware)
    if config.precision == "auto":
        chosen["precision"] = before.get("precision", "bf16" if dtype == torch.bfloat16 else "fp32")
    if config.attention == "auto":
        masked = recipe.data.document_masking
        attention = resolve_attention(config, hardware, dtype, masked)
        chosen["attention"] = before.get("attention", attention)
    recipe = recipe.model_copy(update={"efficiency": config.model_copy(update=chosen)})
    if recipe.batch.micro_batch_size == "auto":
        rows = saved.get("batch", {}).get("micro_batch_size")
        if rows is None:
            rows = largest_micro_batch(recipe, hardware, tell)
        batch = recipe.batch.model_copy(update={"micro_batch_size": rows})
        recipe = recipe.model_copy(update={"batch": batch})
    return recipe

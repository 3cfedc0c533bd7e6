"""Resolved recipes for tests, including tests in separate processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from firstlight.recipe import DEFAULT_ROWS, ResolvedRecipe, parse_resolved_recipe

_PLAIN: dict[str, dict[str, Any]] = {
    "batch": {"micro_batch_size": DEFAULT_ROWS},
    "efficiency": {
        "precision": "fp32",
        "attention": "sdpa",
        "compile": False,
        "loss_chunk_tokens": 0,
    },
}


def plain_recipe(values: Mapping[str, Any]) -> ResolvedRecipe:
    """Return a recipe with simple values for the keys that `values` leaves open."""
    sections = {
        name: keys | {k: v for k, v in values.get(name, {}).items() if v not in (None, "auto")}
        for name, keys in _PLAIN.items()
    }
    return parse_resolved_recipe({**values, **sections})

"""The recipes of `bench learning`, by name.

A row is a recipe of its own, or one change of another row. Each has its own learning rate: a
baseline with a rate that suits another model says nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from firstlight.bench.models import changed_recipe
from firstlight.bench.options import require_known
from firstlight.errors import ConfigError
from firstlight.recipe.load import parse_yaml


@dataclass(frozen=True)
class LearningRow:
    """One recipe.

    Attributes:
        changes: values by `section.key` of the recipe.
        of: name of the row that is changed; "" for a recipe of its own.
        about: the recipe or the change in words.
    """

    changes: Mapping[str, Any]
    of: str = ""
    about: str = ""


#: Shapes by name; a Llama-like and a GPT-2-like layout of one shape have as many parameters.
SIZES: dict[str, dict[str, Any]] = {
    # nanoGPT's shape for a CPU.
    "0.8m": {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4},
    # The demo's.
    "2.6m": {"hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 3},
    # nanoGPT's shape for Shakespeare by characters on a GPU.
    "11m": {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6},
    "30m": {"hidden_size": 512, "num_hidden_layers": 9, "num_attention_heads": 8},
}

#: The demo's recipe of before, and the row whose changes are measured alone.
BEFORE = "before"

ROWS: dict[str, LearningRow] = {
    "nanogpt": LearningRow(
        {
            "model.model_type": "gpt2",
            "model.activation_function": "gelu",
            "optimizer.name": "adamw",
            "optimizer.learning_rate": 6e-4,
            "schedule.min_lr_ratio": 0.1,
        },
        about="nanoGPT: GPT-2 layout, AdamW at 6e-4, cosine to a tenth",
    ),
    BEFORE: LearningRow(
        {
            "model.model_type": "llama",
            "model.tie_word_embeddings": True,
            "optimizer.name": "muon",
            "optimizer.muon_learning_rate": 0.005,
            "optimizer.learning_rate": 0.02,
            "optimizer.betas": [0.8, 0.95],
            "schedule.warmup_ratio": 0.07,
            "schedule.min_lr_ratio": 0.05,
        },
        about="firstlight's demo of before: Llama layout, Muon at 0.005, AdamW at 0.02, cosine to "
        "a twentieth",
    ),
}

#: What all rows have in common unless they change it.
_COMMON: dict[str, Any] = {
    "data": {"seq_len": 256},
    "batch": {"micro_batch_size": 8},
    "schedule": {"warmup_ratio": 0.05},
    # The compiler would take a large share of a run of minutes.
    "efficiency": {"compile": False},
    "checkpoint": {"every_steps": 0, "keep_best": 0},
}

#: Sections that rows may change; the others say where and how long a run is.
_VARIABLE = ("data", "model", "batch", "schedule", "optimizer", "efficiency")


def choose_rows(names: Sequence[str], variants: Sequence[str]) -> dict[str, LearningRow]:
    """The rows of these names in their order, all if there are none; and those of the variants.

    Raises:
        ConfigError: see `find_row`.
    """
    require_known("row", names, ROWS)
    return {name: find_row(name) for name in (*(names or ROWS), *variants)}


def find_row(name: str) -> LearningRow:
    """The row of a name, or a variant of one.

    Args:
        name: name in `ROWS`, or "NAME:section.key=value,section.key=value" for a change of NAME.

    Raises:
        ConfigError: the name is unknown, or the variant is not of that form.
    """
    of, colon, text = name.partition(":")
    require_known("row", [of], ROWS)
    if not colon:
        return ROWS[of]
    changes = {}
    # A comma inside a value, as in betas=[0.9,0.95], is not followed by a key.
    for part in re.split(r",(?=\s*\w+\.\w+\s*=)", text):
        key, equals, value = (word.strip() for word in part.partition("="))
        section, dot, _ = key.partition(".")
        if not equals or not dot or section not in _VARIABLE:
            raise ConfigError(
                f"--set {name}: '{part}' is not section.key=value, such as "
                f"{BEFORE}:optimizer.learning_rate=0.01, of one of the sections "
                f"{', '.join(_VARIABLE)}"
            )
        try:
            changes[key] = parse_yaml(value)
        except ValueError as error:
            raise ConfigError(f"--set {name}: {error}") from None
    return LearningRow(changes, of, text)


def recipe_values(row: LearningRow, size: str) -> dict[str, Any]:
    """Values of the recipe of a row at a size, without its data and its length."""
    chain = [row]
    while chain[0].of:
        chain.insert(0, ROWS[chain[0].of])
    values = changed_recipe(_COMMON, {"model": SIZES[size]})
    for one in chain:
        values = changed_recipe(values, one.changes)
    # The context is the row's length: learned positions beyond it would never be trained.
    context = values["data"]["seq_len"]
    return changed_recipe(values, {"model.max_position_embeddings": context})

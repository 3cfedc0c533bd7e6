"""The recipes of `benchmarks learning`, by name.

A row is a complete recipe, or one change of another row. Each complete recipe has its own learning
rate, because a baseline with the rate of another model would be no fair comparison.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from firstlight.bench.options import require_known
from firstlight.errors import ConfigError
from firstlight.optim.new_model import RATE_WIDTH, WARMUP_RATIO
from firstlight.planner.advise.defaults import LAYOUT
from firstlight.recipe.load import changed_recipe, parse_yaml


@dataclass(frozen=True)
class LearningRow:
    """One recipe.

    Attributes:
        changes: values of the recipe by key (`section.key`).
        of: name of the row to which the changes are applied; "" for a complete recipe.
        about: description of the recipe or of the change.
        successor_of: name of the row that a complete recipe replaced as the default, with which it
            is compared where both were measured; "" for all others.
    """

    changes: Mapping[str, Any]
    of: str = ""
    about: str = ""
    successor_of: str = ""


#: Model shapes by name. Layouts like Llama and like GPT-2 have about as many parameters in a shape.
SIZES: dict[str, dict[str, Any]] = {
    # nanoGPT's shape for a CPU.
    "0.8m": {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4},
    # The demo's shape.
    "2.6m": {"hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 3},
    # nanoGPT's shape for Shakespeare by characters on a GPU.
    "11m": {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6},
    "30m": {"hidden_size": 512, "num_hidden_layers": 9, "num_attention_heads": 8},
    # The shape of GPT-2 124M, with a smaller vocabulary.
    "88m": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12},
}

#: The demo's earlier recipe: the row to which each single change is applied.
BEFORE = "before"

#: The settings of new models, which are also those of the demo.
NEW = "new"

#: Name for `--rows` that means all single changes.
CHANGES = "changes"

_NANOGPT: dict[str, Any] = {
    "model.model_type": "gpt2",
    "model.activation_function": "gelu",
    "optimizer.name": "adamw",
    "optimizer.learning_rate": 6e-4,
    "schedule.min_lr_ratio": 0.1,
}

# nanochat's settings in Qwen3's layout, without its squared ReLU, softcap and value embeddings.
_NANOCHAT: dict[str, Any] = {
    "model.model_type": "qwen3",
    "model.tie_word_embeddings": False,
    "init.residual_projections": "zero",
    "init.embedding_std": 0.8,
    "init.head_std": 0.001,
    "optimizer.name": "muon",
    # nanochat's 0.02, converted to firstlight's scale of Muon's updates at a width of 192.
    "optimizer.muon_learning_rate": 0.007,
    "optimizer.muon_coefficients": "polar_express",
    "optimizer.muon_beta2": 0.95,
    "optimizer.muon_momentum_warmup_steps": 150,
    "optimizer.cautious_weight_decay": True,
    "optimizer.embedding_weight_decay": 0.0,
    "optimizer.head_weight_decay": 0.0,
    "optimizer.learning_rate": 0.3,
    "optimizer.head_lr_multiple": 0.0133,
    "optimizer.vector_lr_multiple": 0.0133,
    "optimizer.betas": [0.8, 0.95],
    "optimizer.max_grad_norm": 0.0,
    "schedule.warmup_ratio": 0.02,
    "schedule.kind": "wsd",
    "schedule.decay_fraction": 0.65,
    "schedule.min_lr_ratio": 0.05,
}

_ZERO: dict[str, Any] = {"schedule.kind": "linear", "schedule.min_lr_ratio": 0.0}

ROWS: dict[str, LearningRow] = {
    # Recipes of their own.
    "nanogpt": LearningRow(
        _NANOGPT, about="nanoGPT: GPT-2 layout, AdamW at 6e-4, cosine to a tenth"
    ),
    "nanogpt-tuned": LearningRow(
        {**_NANOGPT, "optimizer.learning_rate": 2e-3},
        about="nanoGPT at 2e-3, a learning rate for small models",
    ),
    "nanogpt-cpu": LearningRow(
        {
            **_NANOGPT,
            "optimizer.learning_rate": 1e-3,
            "optimizer.betas": [0.9, 0.99],
            "data.seq_len": 64,
            "batch.micro_batch_size": 12,
        },
        about="nanoGPT's commands for Shakespeare by characters on a CPU: 12 rows of 64, AdamW at "
        "1e-3, second beta 0.99",
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
        about="firstlight's earlier demo: Llama layout, Muon at 0.005, AdamW at 0.02, cosine to a "
        "twentieth",
    ),
    "nanochat": LearningRow(
        _NANOCHAT,
        about="nanochat's settings that work in the Qwen3 layout: zero-initialised projections, "
        "NorMuon, AdamW at 0.3 on the embedding and 0.004 on the head, linear decay over the last "
        "65 %",
    ),
    NEW: LearningRow(
        {
            **LAYOUT,
            "optimizer.tuned_width": RATE_WIDTH,
            "schedule.warmup_ratio": WARMUP_RATIO,
        },
        about="the settings of new models: nanochat's, but Muon at 0.012 at a width of 192, and "
        "down to zero",
        successor_of=BEFORE,
    ),
    # Single changes.
    "linear-to-zero": LearningRow(_ZERO, BEFORE, "linear decay to zero after the warm-up"),
    "stable-then-zero": LearningRow(
        {**_ZERO, "schedule.kind": "wsd", "schedule.decay_fraction": 0.6},
        BEFORE,
        "the peak rate, then linear decay to zero over the last 60 %",
    ),
    "qk-norm": LearningRow({"model.model_type": "qwen3"}, BEFORE, "Qwen3 layout: norms on q and k"),
    "untied-head": LearningRow(
        {"model.tie_word_embeddings": False, "optimizer.head_lr_multiple": 0.2},
        BEFORE,
        "a head of its own, at a fifth of the embedding's rate",
    ),
    "half-batch": LearningRow({"batch.micro_batch_size": 4}, BEFORE, "4 rows a step, not 8"),
    "half-rows": LearningRow(
        {"batch.micro_batch_size": 16, "data.seq_len": 128}, BEFORE, "16 rows of 128 tokens"
    ),
    "zero-init": LearningRow(
        {"init.residual_projections": "zero"}, BEFORE, "each layer begins as the identity"
    ),
    "low-adamw": LearningRow({"optimizer.learning_rate": 0.01}, BEFORE, "AdamW at 0.01"),
    "high-muon": LearningRow({"optimizer.muon_learning_rate": 0.01}, BEFORE, "Muon at 0.01"),
    "no-embedding-decay": LearningRow(
        {"optimizer.embedding_weight_decay": 0.0}, BEFORE, "no weight decay on the embedding"
    ),
    "cautious-decay": LearningRow(
        {"optimizer.cautious_weight_decay": True}, BEFORE, "cautious weight decay"
    ),
    "polar-express": LearningRow(
        {"optimizer.muon_coefficients": "polar_express"}, BEFORE, "Muon by the Polar Express"
    ),
    "normuon": LearningRow({"optimizer.muon_beta2": 0.95}, BEFORE, "NorMuon"),
}

#: Values of the recipe in all rows that don't change them.
_COMMON: dict[str, Any] = {
    "data": {"seq_len": 256},
    "batch": {"micro_batch_size": 8},
    "schedule": {"warmup_ratio": 0.05},
    # Compiling would take a large part of a run of a few minutes.
    "efficiency": {"compile": False},
    "checkpoint": {"every_steps": 0, "keep_best": 0},
}

#: Sections that rows may change; the benchmark sets the other ones.
_VARIABLE = ("data", "model", "init", "batch", "schedule", "optimizer", "loss", "efficiency")


def choose_rows(names: Sequence[str], variants: Sequence[str]) -> dict[str, LearningRow]:
    """The named rows in their order, then the variants; by name.

    Args:
        names: names of `ROWS`, or `CHANGES` for all single changes and the row that they change;
            without names all complete recipes.
        variants: see `find_row`.

    Raises:
        ConfigError: a name is unknown, or a variant is invalid.
    """
    require_known("row", names, [*ROWS, CHANGES])
    changes = [BEFORE, *(name for name, row in ROWS.items() if row.of == BEFORE)]
    chosen = [one for name in names for one in (changes if name == CHANGES else [name])]
    chosen = chosen or [name for name, row in ROWS.items() if not row.of]
    return {name: find_row(name) for name in (*chosen, *variants)}


def find_row(name: str) -> LearningRow:
    """The row of a name, or a variant of a row.

    Args:
        name: name in `ROWS`, or "NAME:section.key=value,section.key=value" for a variant of NAME.

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
    """Values of the recipe of a row at a size, without the corpus and the number of steps."""
    chain = [row]
    while chain[0].of:
        chain.insert(0, ROWS[chain[0].of])
    values = changed_recipe(_COMMON, {"model": SIZES[size]})
    for one in chain:
        values = changed_recipe(values, one.changes)
    # The context is the sequence length: learned positions beyond it would never be trained.
    context = values["data"]["seq_len"]
    return changed_recipe(values, {"model.max_position_embeddings": context})

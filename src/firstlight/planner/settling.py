"""A recipe's open questions, answered for the machine that is planned for."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from firstlight.checkpoint.checkpoint import resolve_model_folder
from firstlight.data.examples import kind_of, open_split
from firstlight.data.shards import MANIFEST_NAME, Kind
from firstlight.errors import ConfigError, FirstlightError
from firstlight.optim.schedule import Schedule, resolve_schedule
from firstlight.planner.machine import Machine
from firstlight.planner.parts import copies_of
from firstlight.recipe import (
    PreferenceConfig,
    Recipe,
    ResolvedRecipe,
    parse_resolved_recipe,
)
from firstlight.recipe.deepspeed_recipe import with_deepspeed_file
from firstlight.recipe.resolve import Facts, facts_here, resolve
from firstlight.weights.huggingface import read_config


def with_changes(recipe: ResolvedRecipe, changes: Mapping[str, Any]) -> ResolvedRecipe:
    """The recipe with some keys (`section.key`) set; a section's name alone stands for all of it.

    Raises:
        ConfigError: a value can't be.
    """
    if not changes:
        return recipe
    values = recipe.model_dump(mode="json")
    for name, value in changes.items():
        section, _, key = name.partition(".")
        if not key:
            values[section] = value
        else:
            values[section] = {**(values[section] or {}), key: value}
    return parse_resolved_recipe(values)


def settle(recipe: Recipe, machine: Machine, init_from: str | None = None) -> ResolvedRecipe:
    """The recipe as a run on the machine would resolve it; see `resolve`.

    Args:
        init_from: folder of a model to start from.

    Raises:
        ConfigError: there is no model, its vocabulary isn't known, or see `resolve`.
        ModelError: `init_from` is no model's folder.
    """
    recipe = _with_model(with_deepspeed_file(recipe, machine.count), init_from)
    kind = recipe.data.kind or _prepared_kind(recipe)
    if kind == "preference" and recipe.preference is None:
        recipe = recipe.model_copy(update={"preference": PreferenceConfig()})
    if kind in ("chat", "preference") and not recipe.data.document_masking:
        # As in a run: examples never see each other.
        data = recipe.data.model_copy(update={"document_masking": True})
        recipe = recipe.model_copy(update={"data": data})
    return resolve(recipe, facts_of(recipe, machine))


def facts_of(recipe: Recipe, machine: Machine) -> Facts:
    """Facts that the recipe is resolved with on the machine.

    Raises:
        ConfigError: the machine's devices don't make whole groups.
    """
    processes, tokens = copies_of(recipe, machine.count), _epoch_tokens(recipe)
    if machine.is_here or machine.target.kind == "cpu":
        return facts_here(machine.hardware, processes=processes, epoch_tokens=tokens)
    gpu = machine.gpu
    rates = {} if gpu is None else {torch.bfloat16: gpu.bf16, torch.float16: gpu.fp16}
    return Facts(
        machine.target.kind,
        # fp16 is for those who ask for it.
        "bf16" if machine.precision == "bf16" else "fp32",
        # On a GPU that is elsewhere triton is taken for granted: it comes with torch.
        machine.compiles,
        lambda dtype: rates.get(dtype, 0 if gpu is None else gpu.fp32) or None,
        processes,
        tokens,
    )


def _epoch_tokens(recipe: Recipe) -> int | None:
    """Tokens of the training split; None where the data are not on this machine."""
    found = [prepared_vocabulary(folder) for folder in _folders(recipe)]
    return None if None in found else sum(one[1] for one in found if one)


def _folders(recipe: Recipe) -> list[str]:
    """The prepared folders of a recipe."""
    return [corpus.dir for corpus in recipe.data.mix or ()] or [str(recipe.data.dir)]


def _prepared_kind(recipe: Recipe) -> Kind:
    """Kind of the prepared data; "text" where they are not on this machine."""
    for folder in _folders(recipe):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, FirstlightError):
            kind = kind_of(json.loads((Path(folder) / MANIFEST_NAME).read_text(encoding="utf-8")))
            if kind != "text":
                return kind
    return "text"


def _with_model(recipe: Recipe, init_from: str | None) -> Recipe:
    if init_from is not None:
        source = resolve_model_folder(init_from)
        return recipe.model_copy(update={"model": read_config(source)})
    model = recipe.model or recipe.planning.model
    if model is None:
        raise ConfigError(
            "the recipe has no model: add a `model:` section, or give the folder of the weights "
            "to start from with --init-from"
        )
    if not model.vocab_size:
        folder = recipe.data.mix[0].dir if recipe.data.mix else str(recipe.data.dir)
        prepared = prepared_vocabulary(folder)
        tokens = recipe.planning.vocab_size if prepared is None else prepared[0]
        if tokens is None:
            raise ConfigError(
                f"the model's vocabulary is that of the data's tokenizer, and {folder} is not "
                "prepared here: prepare it, or say --planning.vocab_size 50257"
            )
        model = model.model_copy(update={"vocab_size": tokens})
    return recipe.model_copy(update={"model": model})


def prepared_vocabulary(folder: str) -> tuple[int, int] | None:
    """(size of the vocabulary, tokens of the training split) of a prepared folder; None if it is
    not one, or not here."""
    try:
        manifest = json.loads((Path(folder) / MANIFEST_NAME).read_text(encoding="utf-8"))
        return int(manifest["vocab_size"]), int(manifest["splits"]["train"]["tokens"])
    except (OSError, ValueError, KeyError, TypeError, FirstlightError):
        return None


@dataclass(frozen=True)
class PlannedRun:
    """How long a run is.

    Attributes:
        schedule: its steps, as `train` works them out.
        rows_a_step: rows of an optimizer step, all devices together.
        tokens: of all its rows.
        epochs: passes over the training split; None where the data are not here.
    """

    schedule: Schedule
    rows_a_step: int
    tokens: int
    epochs: float | None


def planned_run(recipe: ResolvedRecipe, machine: Machine) -> PlannedRun | None:
    """How long a resolved recipe's run is; None where that depends on data that are not here.

    Raises:
        ConfigError: the schedule can't be; see `resolve_schedule`.
    """
    seq_len, copies = recipe.data.seq_len, copies_of(recipe, machine.count)
    rows_a_step = recipe.batch.rows * recipe.batch.accumulation(seq_len, copies) * copies
    rows = _rows_per_epoch(recipe, seq_len)
    if rows is None and recipe.schedule.max_steps is None:
        return None
    peak = recipe.optimizer.learning_rate
    schedule = resolve_schedule(recipe.schedule, peak, rows or 0, rows_a_step, seq_len)
    seen = schedule.max_steps * rows_a_step
    return PlannedRun(schedule, rows_a_step, seen * seq_len, None if not rows else seen / rows)


def _rows_per_epoch(recipe: Recipe, seq_len: int) -> int | None:
    """Rows of the training split; None where it is not prepared here."""
    folders = _folders(recipe)
    try:
        splits = [
            open_split(folder, "train", verify=False, long=recipe.data.long) for folder in folders
        ]
        return sum(split.num_rows(seq_len) for split in splits)
    except FirstlightError:
        return None

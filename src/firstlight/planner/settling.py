"""A recipe's open questions, answered for the machine that is planned for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from firstlight.checkpoint import resolve_model_folder
from firstlight.data.examples import open_split
from firstlight.data.shards import MANIFEST_NAME
from firstlight.efficiency import can_compile
from firstlight.efficiency.attention import takes_blockwise
from firstlight.errors import ConfigError, FirstlightError
from firstlight.huggingface import read_config
from firstlight.models import GPT2Config
from firstlight.optim.schedule import Schedule, resolve_schedule
from firstlight.planner.machine import Machine
from firstlight.planner.parts import copies_of
from firstlight.training.automatic import usual_rows
from firstlight.training.config import Recipe, parse_recipe
from firstlight.training.deepspeed_recipe import with_deepspeed_file
from firstlight.training.preference import PreferenceConfig

#: A vocabulary from which the logits are worth cutting up.
_LARGE_VOCABULARY = 16384


def with_changes(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
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
    return parse_recipe(values)


def settle(recipe: Recipe, machine: Machine, init_from: str | None = None) -> Recipe:
    """The recipe with model, row length, precision, attention, compiling, chunks of the loss and
    micro-batch decided: what stands in it stays; what it leaves open is what a run would take.

    Args:
        init_from: the folder of a model to start from.

    Raises:
        ConfigError: there is no model, or its vocabulary isn't known.
        ModelError: `init_from` is no model's folder.
    """
    recipe = _with_model(with_deepspeed_file(recipe, machine.count), init_from)
    if recipe.data.kind == "preference" and recipe.preference is None:
        recipe = recipe.model_copy(update={"preference": PreferenceConfig()})
    assert recipe.model is not None
    limit = recipe.model.max_position_embeddings
    seq_len = recipe.data.seq_len or limit
    if seq_len > limit:
        raise ConfigError(
            f"data.seq_len {seq_len} is more than model.max_position_embeddings {limit}: "
            "lower the one or raise the other"
        )
    config = recipe.efficiency
    on_cpu = machine.target.kind == "cpu"
    changes: dict[str, Any] = {"data.seq_len": seq_len}
    # As a run decides: fp16 is for who asks for it.
    usual = "bf16" if machine.precision == "bf16" else "fp32"
    precision = config.precision if config.precision != "auto" else usual
    changes["efficiency.precision"] = precision
    if config.compile == "auto":
        # On a GPU that is elsewhere triton is taken for granted: it comes with torch.
        wanted = (not on_cpu and machine.compiles) or (
            on_cpu and machine.precision == "bf16" and can_compile(torch.device("cpu"))
        )
        group = recipe.distributed.tensor_parallel * recipe.distributed.pipeline
        changes["efficiency.compile"] = (
            wanted and group == 1 and recipe.distributed.engine != "deepspeed"
        )
    if config.attention == "auto":
        changes["efficiency.attention"] = usual_attention(recipe, machine, precision)
    if config.loss_chunk_tokens is None:
        # Where a run takes them: see `training.automatic`.
        large = recipe.model.vocab_size >= _LARGE_VOCABULARY and recipe.lora is None
        large = large and recipe.preference is None
        large = large and recipe.distributed.tensor_parallel * recipe.distributed.pipeline == 1
        changes["efficiency.loss_chunk_tokens"] = (
            512 if on_cpu and precision == "fp32" and large else 0
        )
    if recipe.batch.micro_batch_size in (None, "auto"):
        long = with_changes(recipe, {"data.seq_len": seq_len})
        copies = copies_of(recipe, machine.count)
        changes["batch.micro_batch_size"] = usual_rows(long, machine.target.kind, copies)
    return with_changes(recipe, changes)


def usual_attention(recipe: Recipe, machine: Machine, precision: str) -> str:
    """What a run with a precision takes for attention where it is free to."""
    model = recipe.model
    assert model is not None
    if machine.target.kind == "cpu":
        dtype = torch.bfloat16 if precision.startswith("bf16") else torch.float32
        seq_len = recipe.data.seq_len or model.max_position_embeddings
        return "blockwise" if takes_blockwise(model, dtype, seq_len) else "sdpa"
    dropout = model.attn_pdrop if isinstance(model, GPT2Config) else 0.0
    return "flex" if recipe.data.document_masking and not dropout else "sdpa"


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


def planned_run(recipe: Recipe, machine: Machine) -> PlannedRun | None:
    """How long the run of a settled recipe is; None where that depends on data that are not here.

    Raises:
        ConfigError: the schedule can't be; see `resolve_schedule`.
    """
    seq_len, copies = recipe.data.seq_len, copies_of(recipe, machine.count)
    assert seq_len is not None
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
    folders = [corpus.dir for corpus in recipe.data.mix or ()] or [str(recipe.data.dir)]
    try:
        splits = [
            open_split(folder, "train", verify=False, long=recipe.data.long) for folder in folders
        ]
        return sum(split.num_rows(seq_len) for split in splits)
    except FirstlightError:
        return None

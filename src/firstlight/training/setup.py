"""Setting up a run: checks of recipe, data, model and disk, and building or loading what the run
needs.

Invalid runs are refused here, before they take time or write a file.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from firstlight.checkpoint.checkpoint import checkpoint_bytes
from firstlight.checkpoint.manifest import CHECKPOINTS, reading_checkpoint
from firstlight.checkpoint.run_folder import held
from firstlight.checkpoint.selection import resolve_model_folder
from firstlight.console import say
from firstlight.data.corpus import Corpus
from firstlight.efficiency.precision import packet_note
from firstlight.errors import ConfigError, DataError, StorageError
from firstlight.files.atomic import require_writable
from firstlight.hardware.device import Hardware
from firstlight.lora.files import peft_notes
from firstlight.models import ModelConfig
from firstlight.parallel.engine import Engine
from firstlight.recipe import (
    DEFAULT_ROWS,
    NO_MASKING,
    Recipe,
    ResolvedRecipe,
    parse_resolved_recipe,
)
from firstlight.recipe.conflicts import ineffective
from firstlight.recipe.resolve import facts_here, for_new_model, resolve, sequence_length
from firstlight.tokenizer import Tokenizer
from firstlight.training.datasets import open_splits
from firstlight.training.micro_batch import largest_micro_batch
from firstlight.training.minutes import budget_of
from firstlight.training.preference import for_pairs, give_references
from firstlight.training.processes import on_main
from firstlight.training.program import TrainingProgram
from firstlight.training.resuming import (
    continue_schedule,
    decided_before,
    shared_newest,
    take_up,
)
from firstlight.training.run import Run
from firstlight.training.starting_model import attach, first_model
from firstlight.training.trackers import require_trackers
from firstlight.training.validation import tasks_of
from firstlight.weights.hub import is_hub_id
from firstlight.weights.huggingface import export_notes


@contextlib.contextmanager
def set_up(
    recipe: Recipe,
    resume: bool,
    init_from: str | Path | None,
    new_rows: str,
    branch_from: str | Path | None,
    hardware: Hardware,
    engine: Engine,
    shown: bool,
) -> Iterator[Run]:
    """Context in which the run folder is locked; yields the run of a recipe, ready for its next
    step.

    Args:
        recipe, resume, init_from, new_rows, branch_from: see `train`.
        hardware: the hardware of this process.
        engine: the engine by which the processes of the run share the model.
        shown: show messages to the user, from the main process.

    Raises:
        ConfigError, DataError, ModelError, CheckpointError, StorageError: recipe, data, model,
            checkpoint or disk do not fit the run; nothing has been written.
    """
    if new_rows != "mean" and not new_rows.startswith("copy:"):
        raise ConfigError(
            f"new rows '{new_rows}': give mean, or copy:TOKEN with a token of the old tokenizer"
        )
    if new_rows != "mean" and init_from is None and not resume:
        raise ConfigError("new rows need --init-from: name the model to start from")
    if branch_from is not None and init_from is not None:
        raise ConfigError("branch_from and init_from both give weights: leave out init_from")
    # YAML does not expand ~: without this, ~/runs would be in a folder named ~.
    folder = Path(recipe.run.dir or "runs/run").expanduser()
    recipe = recipe.with_keys("run", dir=str(folder))
    tell = say if shown and engine.is_main else lambda _: None
    # Lock the folder before looking for a checkpoint: two processes that resume at the same time
    # would otherwise both continue from it.
    with held(folder) if engine.is_main else contextlib.nullcontext() as held_folder:
        branch = None if branch_from is None else Path(branch_from)
        newest = shared_newest(engine, folder, resume, branch, tell)
        # A trunk that is still running may delete the checkpoint that this run branches off.
        trunk = branch if newest == branch else None
        with contextlib.nullcontext() if trunk is None else reading_checkpoint(trunk):
            goes_on = resume or newest is not None
            earlier = decided_before(recipe, newest, folder) if goes_on else {}
            if init_from is None and (earlier or newest is None):
                recipe = for_new_model(recipe, earlier, tell)
            run = _assembled(
                recipe, folder, newest, earlier, init_from, new_rows, hardware, engine, tell
            )
        run.held = held_folder
        yield run


def _assembled(
    recipe: Recipe,
    folder: Path,
    newest: Path | None,
    earlier: Mapping[str, Any],
    init_from: str | Path | None,
    new_rows: str,
    hardware: Hardware,
    engine: Engine,
    tell: Callable[[str], None],
) -> Run:
    """The run in `folder`, resumed from its newest checkpoint if there is one.

    Args:
        newest: checkpoint that the run is resumed from or branches off; None for a new run.
        earlier: the resolved recipe of a resumed run; {} for a new run.
        tell: called with each message for people.
    """
    require_trackers(recipe.run.trackers)
    dataset, validation, tokenizer = _open_data(recipe, newest or init_from, engine, tell)
    recipe = for_pairs(_masked(recipe, dataset), dataset, newest or init_from)
    _seed(recipe)
    model, start = first_model(recipe, tokenizer, newest, init_from, new_rows, engine, tell)
    recipe = _with_model(recipe, model.config, dataset, validation, tell)
    _require_fitting_prompts(recipe, model.config, tokenizer, answered=dataset.has_examples)
    tasks = tasks_of(recipe, model, tokenizer)
    for note in export_notes({"model_type": model.config.model_type}, tokenizer):
        tell(f"warning: {note}")
    resolved = _resolved(recipe, hardware, dataset, engine, earlier, tell)
    # Before adapters are added, since references are of the starting model.
    give_references(resolved, (dataset, validation), model, newest, start, hardware, tell)
    attach(model, resolved, hardware)
    for note in peft_notes(model):
        tell(f"warning: {note}")
    if init_from is None and newest is None:
        widths = packet_note(model.config, resolved.efficiency, hardware.capability)
        if widths is not None:
            tell(f"note: {widths}")
    program = TrainingProgram(resolved, model, hardware, engine)
    # From here on, random numbers are for dropout, which has to differ between ranks.
    torch.manual_seed(resolved.run.seed + engine.rank)
    origin = None if init_from is None else str(init_from)
    if origin is not None and not is_hub_id(origin):
        # In another current folder, a relative path could be taken for a hub id.
        origin = os.path.abspath(Path(origin).expanduser())
    # An earlier attempt that left no checkpoint has used time of the budget too.
    resumed = newest is not None or bool(earlier)
    rows = dataset.num_rows(resolved.data.seq_len)
    budget = budget_of(resolved, program, folder, newest, rows, resumed=resumed)
    run = Run(
        *(resolved, program, folder, tokenizer, dataset, validation, origin),
        *(None if resolved.lora is None else start, tasks, tell),
        budget=budget,
    )
    if newest is not None:
        take_up(run, newest)
    elif resolved.schedule.resume:
        continue_schedule(run, init_from)
    rows_of_run = run.batch.before(run.max_steps)
    for line in dataset.describe_run(rows_of_run, run.seq_len):
        tell(line)
    if engine.is_main:
        _require_disk(run)
    return run


def _open_data(
    recipe: Recipe, start: str | Path | None, engine: Engine, tell: Callable[[str], None]
) -> tuple[Corpus, Corpus | None, Tokenizer]:
    """(training split, validation split or None, their tokenizer).

    Args:
        start: the model or checkpoint that the run starts from; None for a new model.

    Raises:
        DataError: see `open_splits`; or the tokenizer is not that of the shards.
    """
    # One process of each machine verifies the data, for all processes there.
    verify = recipe.data.verify and engine.world.local_rank == 0
    dataset, validation = open_splits(
        recipe.data.model_copy(update={"verify": verify}),
        tell,
        tokenizer=None if start is None else lambda: resolve_model_folder(start),
        progress=tell is say,
    )
    tokenizer = Tokenizer.from_pretrained(dataset.folder)
    # Shards hold token ids, which would be another text with another tokenizer.
    if (tokenizer.fingerprint, tokenizer.vocab_size) != (
        dataset.manifest["tokenizer_sha256"],
        dataset.vocab_size,
    ):
        raise DataError(
            f"{dataset.folder}: tokenizer.json is not the one the shards were made with"
        )
    return dataset, validation, tokenizer


def _seed(recipe: Recipe) -> None:
    # Also Python's and numpy's generators, from which `on_step` may draw.
    torch.manual_seed(recipe.run.seed)
    random.seed(recipe.run.seed)
    np.random.seed(recipe.run.seed % 2**32)


def _resolved(
    recipe: Recipe,
    hardware: Hardware,
    dataset: Corpus,
    engine: Engine,
    earlier: Mapping[str, Any],
    tell: Callable[[str], None],
) -> ResolvedRecipe:
    """The recipe with every open key resolved. The main process does it for all, since it may have
    to measure.

    Args:
        earlier: the resolved recipe of the run that is resumed; {} for a new run.
    """

    def decide() -> ResolvedRecipe:
        facts = facts_here(
            hardware,
            processes=engine.size,
            epoch_tokens=dataset.num_tokens,
            earlier=earlier,
            largest_micro_batch=lambda open_recipe: largest_micro_batch(
                open_recipe, hardware, tell, engine.size
            ),
        )
        return resolve(recipe, facts, tell)

    # Measurements may differ between processes, but their recipes must not.
    if engine.world.size == 1:
        resolved = decide()
    else:
        values = on_main(engine, lambda: decide().model_dump(mode="json"))
        resolved = parse_resolved_recipe(values)
    for note in ineffective(resolved, hardware):
        tell(f"note: {note}")
    return resolved


def _masked(recipe: Recipe, dataset: Corpus) -> Recipe:
    """The recipe, with document masking if the data are conversations or pairs.

    Raises:
        ConfigError: the recipe disables document masking.
    """
    if not dataset.has_examples or recipe.data.document_masking:
        return recipe
    if "document_masking" in recipe.data.model_fields_set:
        raise ConfigError(f"data.{NO_MASKING}")
    return recipe.with_keys("data", document_masking=True)


def _with_model(
    recipe: Recipe,
    config: ModelConfig,
    dataset: Corpus,
    validation: Corpus | None,
    tell: Callable[[str], None],
) -> Recipe:
    """The recipe with the config of the model that is trained, and with `data.seq_len` resolved.

    Raises:
        ConfigError: a micro-batch is larger than the memory of the machine.
        DataError: a split has too few tokens for a row, or a conversation that is too long for one.
    """
    seq_len = sequence_length(recipe, config)
    splits = [split for split in (dataset, validation) if split is not None]
    for split in splits:
        if split is dataset or split.has_examples:
            split.require_row(seq_len)
    rows, memory = recipe.batch.micro_batch_size or DEFAULT_ROWS, psutil.virtual_memory().total
    # By input ids and labels alone, 8 bytes each: reading a batch that can't fit would take long.
    if rows != "auto" and 16 * rows * seq_len > memory:
        raise ConfigError(
            f"batch.micro_batch_size {rows} rows of {seq_len} tokens don't fit into the "
            f"{memory / 1e9:.0f} GB of this machine: lower it"
        )
    for split in splits:
        for line in split.describe(seq_len):
            tell(line)
    return recipe.with_keys("data", seq_len=seq_len).model_copy(update={"model": config})


def _require_fitting_prompts(
    recipe: Recipe, model: ModelConfig, tokenizer: Tokenizer, *, answered: bool
) -> None:
    """Refuse sample prompts that are too long, which would end the run at its first evaluation.

    Args:
        answered: True if the model answers prompts as messages of a conversation.

    Raises:
        ConfigError: a prompt is too long for the model's context.
    """
    context = model.max_position_embeddings
    for prompt in recipe.evaluation.sample_prompts:
        count, limit = len(tokenizer.encode_prompt(prompt)), context
        if answered and prompt.strip():
            message = {"role": "user", "content": prompt}
            count = len(tokenizer.encode_chat([message], add_generation_prompt=True))
            # Tokens that a conversation reserves for the answer: see `ChatSession.answer_room`.
            limit -= min(recipe.evaluation.sample_tokens, max(context // 4, 1)) - 1
        if count >= limit:
            raise ConfigError(
                f"evaluation.sample_prompts: {prompt[:20]!r}... has {count} tokens, and the "
                f"model's context is {context}: shorten it"
            )


def _require_disk(run: Run) -> None:
    """Refuse a run whose checkpoints can't be written, or will not fit on the disk.

    Raises:
        StorageError: the folder of checkpoints is not writable, or the disk has too little free
            space.
    """
    # The folder itself, since the run folder above it may be writable all the same.
    if os.path.lexists(run.folder / CHECKPOINTS):
        require_writable(run.folder / CHECKPOINTS)
    every, config = run.recipe.checkpoint.every_steps, run.recipe.checkpoint
    # A run in minutes may have more steps than predicted: at least one is left.
    left = max(run.max_steps - run.state.step, 1 if run.schedule.is_open else 0)
    saves = math.ceil(left / every) if every else 1
    # The trunk's checkpoint is copied into the run folder first.
    saves += run.branch_from is not None
    kept = config.keep_last
    if run.validation is not None and config.keep_best and every:
        kept += config.keep_best
        saves += left // (run.recipe.evaluation.every_steps or max(run.max_steps, 1))
        # The best checkpoints may lie between regular ones. Regular ones to be averaged are kept
        # in addition.
        kept += config.average_last
    if config.keep_every:
        kept += left // config.keep_every
    one = checkpoint_bytes(run.program.optimizer.num_parameters, run.program.optimizer.state_bytes)
    # A new checkpoint is written before the oldest is deleted.
    needed = one * min(saves, kept + 1)
    if config.average_last:
        needed += checkpoint_bytes(run.program.optimizer.num_parameters, 0)
    folder = next(f for f in (run.folder, *run.folder.resolve().parents) if f.is_dir())
    free = shutil.disk_usage(folder).free
    if run.has_steps_left and needed > free:
        raise StorageError(
            f"the disk of {folder} has {free / 1e6:,.0f} MB free, and the run's checkpoints need "
            f"about {needed / 1e6:,.0f} MB: free some space, choose another run.dir, "
            "or lower checkpoint.keep_last"
        )

"""Before the first step: check all that can be checked, build or load all that is needed.

Whatever is refused is refused here, before a run has cost anything or written anything.
"""

from __future__ import annotations

import contextlib
import math
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from firstlight.checkpoint.checkpoint import (
    checkpoint_bytes,
    is_in_shards,
    list_checkpoints,
    load_trainer_state,
    newest_checkpoint,
    resolve_model_folder,
    saved_vocab_multiple,
)
from firstlight.checkpoint.history import MANIFEST_NAME, step_folders
from firstlight.checkpoint.sharded import fitting_model
from firstlight.console import say
from firstlight.data.corpus import Corpus
from firstlight.errors import CheckpointError, ConfigError, DataError, ModelError, StorageError
from firstlight.hardware.device import Hardware
from firstlight.models import Model, ModelConfig, padded_vocab_size
from firstlight.models.accounting import meta_model
from firstlight.parallel.engine import Engine
from firstlight.recipe import (
    DEFAULT_ROWS,
    NO_MASKING,
    Recipe,
    ResolvedRecipe,
    load_recipe,
    parse_resolved_recipe,
)
from firstlight.recipe.conflicts import ineffective
from firstlight.recipe.resolve import Facts, facts_here, resolve, sequence_length
from firstlight.tokenizer import Tokenizer
from firstlight.training.adapters import AdapterBase, attach, resumed_base, starting_base
from firstlight.training.datasets import (
    open_splits,
)
from firstlight.training.fit import largest_micro_batch
from firstlight.training.job import RECIPE_NAME, Job
from firstlight.training.lock import held
from firstlight.training.processes import on_main
from firstlight.training.program import TrainingProgram
from firstlight.training.references import for_pairs, give_references
from firstlight.training.resuming import changed_keys, continue_schedule, take_up
from firstlight.training.starts import describe_start
from firstlight.training.tensorboard_log import require_tensorboard
from firstlight.training.validation import tasks_of
from firstlight.weights.huggingface import (
    LoadedModel,
    export_notes,
    load_model,
    read_config,
    training_notes,
    unloaded_model,
)
from firstlight.weights.loading import fitting_tensors, grow_vocabulary


@contextlib.contextmanager
def set_up(
    recipe: Recipe,
    resume: bool,
    init_from: str | Path | None,
    new_rows: str,
    tell: Callable[[str], None],
    hardware: Hardware,
    engine: Engine,
) -> Iterator[Job]:
    """The run that a recipe describes, ready for its next step. Its folder is held inside.

    Args:
        recipe, resume, init_from, new_rows: see `train`.
        tell: called with each message for people.
        hardware: of this process.
        engine: what the processes of the run share the model by.

    Raises:
        ConfigError, DataError, ModelError, CheckpointError, StorageError: something does not
            fit; nothing has been written.
    """
    if new_rows != "mean" and not new_rows.startswith("copy:"):
        raise ConfigError(
            f"new rows '{new_rows}': give mean, or copy:TOKEN with a token of the old tokenizer"
        )
    if new_rows != "mean" and init_from is None and not resume:
        raise ConfigError("new rows are for --init-from: name the model to start from")
    # YAML knows no home folder: without this, ~/runs would be a folder named ~.
    run_folder = Path(recipe.run.dir or "runs/run").expanduser()
    recipe = _with(recipe, "run", dir=str(run_folder))
    # Before the checkpoint is looked at: two that resume at the same moment would both go on
    # from it.
    with held(run_folder) if engine.is_main else contextlib.nullcontext() as require_folder:
        newest = _shared_newest(engine, run_folder, resume, tell)
        decided = _decided_before(recipe, newest, run_folder) if resume else {}
        job = _job(recipe, newest, decided, init_from, new_rows, tell, hardware, engine)
        if require_folder is not None:
            job.require_folder = require_folder
        yield job


def _shared_newest(
    engine: Engine, run_folder: Path, resume: bool, tell: Callable[[str], None]
) -> Path | None:
    """The checkpoint that all processes go on from."""

    def find() -> str | None:
        newest = _newest_checkpoint(run_folder, resume, tell)
        return None if newest is None else str(newest)

    found = on_main(engine, find)
    if found is not None and not Path(found).is_dir():
        raise CheckpointError(
            f"rank {engine.world.rank} does not see {found}: run.dir has to be in a file system "
            "that all machines of the run share"
        )
    return None if found is None else Path(found)


def _job(
    recipe: Recipe,
    newest: Path | None,
    decided: Mapping[str, Any],
    init_from: str | Path | None,
    new_rows: str,
    tell: Callable[[str], None],
    hardware: Hardware,
    engine: Engine,
) -> Job:
    """The run, going on from its newest checkpoint if there is one."""
    if recipe.run.tensorboard:
        require_tensorboard()
    # One process of a machine reads all of it, for all of them.
    verify = recipe.data.verify and engine.world.local_rank == 0
    data = recipe.data.model_copy(update={"verify": verify})
    found = newest if newest is not None else init_from
    dataset, validation = open_splits(
        data,
        tell,
        tokenizer=None if found is None else lambda: resolve_model_folder(found),
        progress=tell is say,
    )
    recipe = for_pairs(_masked(recipe, dataset), dataset, found)
    tokenizer = Tokenizer.from_pretrained(dataset.folder)
    if (tokenizer.fingerprint, tokenizer.vocab_size) != (
        dataset.manifest["tokenizer_sha256"],
        dataset.vocab_size,
    ):
        raise DataError(
            f"{dataset.folder}: tokenizer.json is not the one the shards were made with"
        )
    torch.manual_seed(recipe.run.seed)
    random.seed(recipe.run.seed)
    np.random.seed(recipe.run.seed % 2**32)
    multiple = recipe.efficiency.vocab_multiple
    if engine.config.pipeline > 1 and (init_from is not None or recipe.lora is not None):
        raise ConfigError(
            "distributed.pipeline starts from new weights or goes on with a run (--resume): "
            f"leave out {'--init-from' if recipe.lora is None else 'lora'}, or use "
            "distributed.engine fsdp"
        )
    base: AdapterBase | None = None
    if recipe.lora is not None and newest is None:
        base = starting_base(init_from)
    if recipe.lora is not None and newest is not None:
        model, base = resumed_base(recipe, newest)
    elif newest is not None:
        model = engine.new_model(_resumed_config(recipe, newest, tell), multiple)
    elif init_from is not None:
        model = _starting_model(recipe, tokenizer, init_from, new_rows, tell)
    else:
        generator = torch.Generator().manual_seed(recipe.run.seed)
        model = engine.new_model(_new_config(recipe, tokenizer, engine), multiple, generator)
    recipe = _filled_in(recipe, model.config, dataset, validation)
    for split in (dataset, validation):
        for line in split.describe(_seq_len(recipe)) if split is not None else ():
            tell(line)
    _require_fitting_prompts(recipe, tokenizer, answered=dataset.has_examples)
    tasks = tasks_of(recipe, model, tokenizer)
    for note in export_notes({"model_type": model.config.model_type}, tokenizer):
        tell(f"warning: {note}")
    recipe = _decided_together(
        engine, lambda: resolve(recipe, _facts(hardware, dataset, engine, decided, tell), tell)
    )
    for note in ineffective(recipe, hardware):
        tell(f"note: {note}")
    origin = str(init_from) if init_from is not None else None
    give_references(recipe, (dataset, validation), model, newest, init_from, hardware, tell)
    if recipe.lora is not None:
        attach(model, recipe, hardware)
    program = TrainingProgram(recipe, model, hardware, engine)
    # From here on random numbers are for dropout, which differs from row to row.
    torch.manual_seed(recipe.run.seed + engine.rank)
    job = Job(program, tokenizer, dataset, validation, origin, base, tasks)
    if newest is not None:
        take_up(job, newest, tell)
    elif recipe.schedule.resume:
        continue_schedule(job, init_from, tell)
    job.tell_mix(tell)
    for line in describe_start(job) if job.goes_on else ():
        tell(line)
    if engine.is_main:
        _require_disk(job)
    return job


def _facts(
    hardware: Hardware,
    dataset: Corpus,
    engine: Engine,
    earlier: Mapping[str, Any],
    tell: Callable[[str], None],
) -> Facts:
    return facts_here(
        hardware,
        processes=engine.size,
        epoch_tokens=dataset.num_tokens,
        earlier=earlier,
        largest_micro_batch=lambda recipe: largest_micro_batch(recipe, hardware, tell, engine.size),
    )


def _decided_together(engine: Engine, decide: Callable[[], ResolvedRecipe]) -> ResolvedRecipe:
    """What the main process decides, which may be by measuring, for all."""
    if engine.world.size == 1:
        return decide()
    return parse_resolved_recipe(on_main(engine, lambda: decide().model_dump(mode="json")))


def _decided_before(recipe: Recipe, newest: Path | None, run_folder: Path) -> dict[str, Any]:
    """The resolved recipe of a run that is gone on with: what "auto" came to there stands.

    A run that was killed before its first checkpoint has left it as a file.
    """
    if newest is not None:
        found: dict[str, Any] = load_trainer_state(newest).get("recipe", {})
        return found
    try:
        before = load_recipe(run_folder / RECIPE_NAME)
    except ConfigError:
        return {}
    same = (before.data.seq_len, before.batch.global_batch_tokens) == (
        recipe.data.seq_len or before.data.seq_len,
        recipe.batch.global_batch_tokens,
    )
    # Another batch is cut anew.
    return before.model_dump(exclude=None if same else {"batch"})


def _newest_checkpoint(run_folder: Path, resume: bool, tell: Callable[[str], None]) -> Path | None:
    """The checkpoint to go on from, if that is asked for and there is one."""
    if not resume:
        if list_checkpoints(run_folder):
            raise CheckpointError(
                f"run folder {run_folder} has checkpoints already: continue it with --resume, "
                "or choose another run.dir"
            )
        return None
    newest, problems = newest_checkpoint(run_folder)
    for folder in step_folders(run_folder):
        if not (folder / MANIFEST_NAME).is_file():
            tell(
                f"warning: {folder} has no {MANIFEST_NAME}: it is no checkpoint, and not looked at"
            )
    for problem in problems:
        tell(f"warning: {problem}: an older checkpoint is taken")
    if newest is None:
        tell(f"{run_folder} has no checkpoint yet: starting at the beginning")
    return newest


def _with(recipe: Recipe, section: str, **values: Any) -> Recipe:
    """The recipe with some keys of a section set."""
    changed = getattr(recipe, section).model_copy(update=values)
    return recipe.model_copy(update={section: changed})


def _new_config(recipe: Recipe, tokenizer: Tokenizer, engine: Engine) -> ModelConfig:
    """The recipe's model with the tokenizer's vocabulary."""
    if recipe.model is None:
        raise ConfigError("the recipe has no model: add a `model:` section, or use --init-from")
    wanted = recipe.model.vocab_size
    if wanted not in (0, tokenizer.vocab_size):
        relation = "larger" if wanted > tokenizer.vocab_size else "smaller"
        raise DataError(
            f"model.vocab_size {wanted} is {relation} than the vocabulary of the data's tokenizer, "
            f"{tokenizer.vocab_size}: leave model.vocab_size out to take the tokenizer's"
        )
    config = recipe.model.model_copy(update={"vocab_size": tokenizer.vocab_size})
    stages = engine.config.pipeline
    _require_memory(config, min(engine.world.local_size, stages) / stages)
    return config


def _require_memory(config: ModelConfig, share: float) -> None:
    """Refuse a model of which the machine can't even hold its share, before it is made.

    Raises:
        ConfigError: its weights are larger than the memory, or than torch can count.
    """
    memory = psutil.virtual_memory().total
    try:
        needed = 4 * sum(parameter.numel() for parameter in meta_model(config).parameters())
    except (RuntimeError, TypeError, OverflowError) as error:
        raise ConfigError(f"model: nothing has such sizes: {error}") from error
    needed = int(needed * share)
    if needed > memory:
        raise ConfigError(
            f"model: its weights alone take {needed / 1e9:,.0f} GB, and this machine has "
            f"{memory / 1e9:.0f} GB: lower model.hidden_size or model.num_hidden_layers"
        )


def _resumed_config(recipe: Recipe, newest: Path, tell: Callable[[str], None]) -> ModelConfig:
    """The checkpoint's model, which the recipe must not contradict."""
    state = load_trainer_state(newest)
    if state.get("lora_base") is not None:
        raise CheckpointError(
            f"{newest} is of a run with lora: put the recipe's lora section back, or start a new "
            f"run in another run.dir with --init-from {newest}"
        )
    config = read_config(newest)
    multiple = saved_vocab_multiple(newest, state)
    try:
        # Its files are what they were when they were saved; that they belong together is not said.
        if is_in_shards(newest):
            fitting_model(config, newest, multiple)
        else:
            fitting_tensors(unloaded_model(config, newest), newest)
    except ModelError as error:
        raise CheckpointError(str(error)) from error
    started_from = state.get("init_from")
    if padded_vocab_size(config.vocab_size, multiple) != padded_vocab_size(
        config.vocab_size, recipe.efficiency.vocab_multiple
    ):
        raise CheckpointError(
            f"{newest} was made with efficiency.vocab_multiple {multiple}, and its optimizer state "
            f"does not fit {recipe.efficiency.vocab_multiple}: set it back"
        )
    names = _contradictions(recipe, config)
    if names and started_from is None:
        raise CheckpointError(
            f"{newest} can't be resumed with another model: {', '.join(names)} changed "
            "(choose another run.dir for a new run)"
        )
    if names:
        tell(f"warning: the model is that of {started_from}; not used: {', '.join(names)}")
    return config


def _starting_model(
    recipe: Recipe,
    tokenizer: Tokenizer,
    init_from: str | Path,
    new_rows: str,
    tell: Callable[[str], None],
) -> Model:
    """The model of --init-from, which brings its own config, with room for the tokens that the
    data's tokenizer has beyond its own."""
    multiple = recipe.efficiency.vocab_multiple
    folder = resolve_model_folder(init_from)
    loaded = load_model(folder, dtype=torch.float32, way="sequential", vocab_multiple=multiple)
    for note in training_notes(folder):
        tell(f"warning: {note}")
    old = loaded.tokenizer
    if old is not None and old.fingerprint != tokenizer.fingerprint and tokenizer.extends(old):
        now = tokenizer.vocab_size
        if recipe.preference is not None:
            raise ConfigError(
                f"{init_from} has never seen the {now - old.vocab_size} tokens that the data's "
                "tokenizer has beyond its own: teach it to answer with them first (data.kind chat)"
            )
        if recipe.lora is not None:
            raise ConfigError(
                f"lora freezes the embedding, so the {now - old.vocab_size} tokens that the "
                f"data's tokenizer has beyond that of {init_from} could not be learned: train all "
                "weights (without the lora section) first"
            )
        # A tokenizer may have tokens that its model never had rows for.
        before = min(old.vocab_size, loaded.model.config.vocab_size)
        copied_from = _copied_token(new_rows, old)
        if copied_from is not None and copied_from >= before:
            raise ConfigError(
                f"new rows '{new_rows}': {init_from} has no row for that token to copy"
            )
        grow_vocabulary(loaded.model, before, now, copied_from=copied_from, vocab_multiple=multiple)
        rows = "the mean of the old rows" if copied_from is None else f"the rows of {new_rows[5:]}"
        tell(f"{now - before} new tokens start from {rows} in the embedding and the head")
    else:
        _require_fitting_start(loaded, tokenizer, init_from)
    names = _contradictions(recipe, loaded.model.config)
    if names:
        tell(f"warning: the model is that of {init_from}; not used: {', '.join(names)}")
    return loaded.model


def _copied_token(new_rows: str, tokenizer: Tokenizer) -> int | None:
    """The id that `new_rows` ("mean" or "copy:TOKEN") names; None for the mean.

    Raises:
        ConfigError: it is neither, or there is no such token.
    """
    if new_rows == "mean":
        return None
    kind, _, token = new_rows.partition(":")
    token_id = tokenizer.backend.token_to_id(token) if kind == "copy" else None
    if token_id is None:
        raise ConfigError(
            f"new rows '{new_rows}': give mean, or copy:TOKEN with a token of the old tokenizer"
        )
    return token_id


def _contradictions(recipe: Recipe, config: ModelConfig) -> list[str]:
    """The `model.` keys that the recipe sets to something else than `config` has."""
    if recipe.model is None:
        return []
    found = changed_keys(recipe.model.model_dump(), config.model_dump())
    given = recipe.model.model_fields_set - (
        {"vocab_size"} if not recipe.model.vocab_size else set()
    )
    return [f"model.{name}" for name in found if name in given or name == "model_type"]


def _masked(recipe: Recipe, dataset: Corpus) -> Recipe:
    """The recipe with document masking where there are conversations.

    Raises:
        ConfigError: it says otherwise.
    """
    if not dataset.has_examples or recipe.data.document_masking:
        return recipe
    if "document_masking" in recipe.data.model_fields_set:
        raise ConfigError(f"data.{NO_MASKING}")
    return _with(recipe, "data", document_masking=True)


def _seq_len(recipe: Recipe) -> int:
    assert recipe.data.seq_len is not None
    return recipe.data.seq_len


def _filled_in(
    recipe: Recipe, config: ModelConfig, dataset: Corpus, validation: Corpus | None
) -> Recipe:
    """The recipe with the model that is trained and the row length worked out."""
    seq_len = sequence_length(recipe, config)
    for split in (dataset, validation):
        if split is dataset or (split is not None and split.has_examples):
            split.require_row(seq_len)
    rows, memory = recipe.batch.micro_batch_size or DEFAULT_ROWS, psutil.virtual_memory().total
    # Ids and labels alone, 8 bytes each: what can't even be read would only be found out slowly.
    if rows != "auto" and 16 * rows * seq_len > memory:
        raise ConfigError(
            f"batch.micro_batch_size {rows} rows of {seq_len} tokens don't fit into the "
            f"{memory / 1e9:.0f} GB of this machine: lower it"
        )
    return _with(recipe.model_copy(update={"model": config}), "data", seq_len=seq_len)


def _require_fitting_prompts(recipe: Recipe, tokenizer: Tokenizer, *, answered: bool) -> None:
    """Refuse sample prompts that would end the run at its first evaluation."""
    assert recipe.model is not None
    context = recipe.model.max_position_embeddings
    for prompt in recipe.evaluation.sample_prompts:
        count, limit = len(tokenizer.encode_prompt(prompt)), context
        if answered and prompt.strip():
            message = {"role": "user", "content": prompt}
            count = len(tokenizer.encode_chat([message], add_generation_prompt=True))
            # What a conversation leaves free for the answer: see `ChatSession.answer_room`.
            limit -= min(recipe.evaluation.sample_tokens, max(context // 4, 1)) - 1
        if count >= limit:
            raise ConfigError(
                f"evaluation.sample_prompts: {prompt[:20]!r}... has {count} tokens, and the "
                f"model's context is {context}: shorten it"
            )


def _require_fitting_start(
    loaded: LoadedModel, tokenizer: Tokenizer, init_from: str | Path
) -> None:
    if loaded.tokenizer is not None and loaded.tokenizer.fingerprint != tokenizer.fingerprint:
        raise DataError(
            f"the data was prepared with another tokenizer than that of {init_from}: "
            f"prepare it with --tokenizer {loaded.folder}, or with one that "
            "`firstlight tokenizer extend` made of it"
        )
    if tokenizer.vocab_size > loaded.model.config.vocab_size:
        raise DataError(
            f"the data's tokenizer has {tokenizer.vocab_size} tokens, more than the "
            f"{loaded.model.config.vocab_size} of {init_from}"
        )


def _require_disk(job: Job) -> None:
    """Refuse a run whose checkpoints can't fit, before it has cost anything."""
    every, config = job.recipe.checkpoint.every_steps, job.recipe.checkpoint
    left = job.max_steps - job.state.step
    saves = math.ceil(left / every) if every else 1
    kept = config.keep_last
    if job.validation is not None and config.keep_best and every:
        kept += config.keep_best
        saves += left // (job.recipe.evaluation.every_steps or job.max_steps)
    if config.keep_every:
        kept += left // config.keep_every
    one = checkpoint_bytes(job.optimizer.num_parameters, job.optimizer.state_bytes)
    needed = one * min(saves, kept + 1)
    folder = next(f for f in (job.run_folder, *job.run_folder.resolve().parents) if f.is_dir())
    free = shutil.disk_usage(folder).free
    if job.state.step < job.max_steps and needed > free:
        raise StorageError(
            f"the disk of {folder} has {free / 1e6:,.0f} MB free, and the run's checkpoints need "
            f"about {needed / 1e6:,.0f} MB: free some space, choose another run.dir, "
            "or lower checkpoint.keep_last"
        )

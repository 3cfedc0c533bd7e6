"""Set up a run. Check the recipe, data, model and disk, build or load the parts of the run, prepare
its folder, predict its memory and length, and record the start.

Invalid runs are rejected here, before they spend any time on training or write any files.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import os
import platform
import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
import torch
from torch import Tensor, nn

from firstlight.checkpoint.checkpoint import checkpoint_bytes, copy_checkpoint
from firstlight.checkpoint.manifest import CHECKPOINTS, reading_checkpoint
from firstlight.checkpoint.run_folder import held
from firstlight.checkpoint.selection import resolve_model_folder
from firstlight.console import counted, gib, own_version, say, time_text
from firstlight.data.corpus import Corpus
from firstlight.data.loader import TokenLoader
from firstlight.errors import ConfigError, DataError, FirstlightError, StorageError
from firstlight.files.atomic import (
    remove_file,
    remove_leftovers,
    require_writable,
    set_aside,
    write_file,
)
from firstlight.hardware.device import Hardware
from firstlight.lora.files import peft_notes
from firstlight.methods.precision import dtype_of, packet_note
from firstlight.models import Model, ModelConfig
from firstlight.models.accounting import count_parameters, meta_model
from firstlight.models.moe import kept_code_bytes
from firstlight.optim.config import Kind, decay_counts, describe_groups, parameter_kinds
from firstlight.optim.eight_bit import compiles_update
from firstlight.parallel.engine import Engine
from firstlight.recipe import (
    DEFAULT_ROWS,
    Recipe,
    ResolvedRecipe,
    load_recipe,
    parse_resolved_recipe,
)
from firstlight.recipe.conflicts import ineffective
from firstlight.recipe.load import yaml_text
from firstlight.recipe.resolve import (
    Facts,
    facts_here,
    require_fitting_data,
    resolve,
    sequence_length,
)
from firstlight.run_log.names import LENGTH_NAME, RECIPE_NAME, STARTS_NAME
from firstlight.run_log.reader import sound_json_lines
from firstlight.run_log.writer import RunLogs, SilentLogs, clear_file_names, json_line
from firstlight.tokenizer import Tokenizer
from firstlight.training.datasets import open_splits, with_kept_text
from firstlight.training.device_check import require_checked_device
from firstlight.training.forecast import ForecastComparison, Forecaster
from firstlight.training.micro_batch_trials import largest_micro_batch
from firstlight.training.preference import give_references
from firstlight.training.processes import on_main, wait_for_main
from firstlight.training.program import TrainingProgram
from firstlight.training.progress import RunProgress, TrainingProgress
from firstlight.training.resuming import (
    continue_schedule,
    decided_before,
    shared_newest,
    take_up,
)
from firstlight.training.run import Run
from firstlight.training.starting_model import FirstModel, attach, first_model, new_model
from firstlight.training.state import TrainState
from firstlight.training.time_budget import budget_of
from firstlight.training.trackers import Trackers, require_trackers
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
    is_announced: bool = False,
) -> Iterator[Run]:
    """Lock the run folder, and yield the run of a recipe, ready for its next step.

    Args:
        recipe, resume, init_from, new_rows, branch_from: see `train`.
        hardware: the hardware of this process.
        engine: the engine that connects the processes of the run.
        shown: True to show messages to the user from the main process.
        is_announced: True if a description of the data has already been shown to the user.

    Raises:
        ConfigError, DataError, ModelError, CheckpointError, StorageError: the recipe, data, model,
            checkpoint or disk is unsuitable for the run. Nothing has been written.
    """
    if new_rows != "mean" and not new_rows.startswith("copy:"):
        raise ConfigError(
            f"new rows '{new_rows}' is invalid: use mean, or copy:TOKEN with a token of the old "
            "tokenizer"
        )
    if new_rows != "mean" and init_from is None and not resume:
        raise ConfigError("--new-rows requires --init-from with the model to start from")
    if branch_from is not None and init_from is not None:
        raise ConfigError("branch_from and init_from both set the weights: remove init_from")
    # YAML does not expand ~, so without `expanduser` a run in ~/runs would be written to a folder
    # named ~.
    folder = Path(recipe.run.dir or "runs/run").expanduser()
    tell = say if shown and engine.is_main else lambda _: None
    # Lock the folder before looking for a checkpoint. Otherwise, two processes that resume at the
    # same time could both continue from the same checkpoint.
    with held(folder) if engine.is_main else contextlib.nullcontext() as held_folder:
        branch = None if branch_from is None else Path(branch_from)
        newest = shared_newest(engine, folder, resume, branch, tell=tell)
        # If the other run is still active, it may delete the checkpoint from which this run
        # branches off.
        trunk = branch if newest == branch else None
        with contextlib.nullcontext() if trunk is None else reading_checkpoint(trunk):
            goes_on = resume or newest is not None
            earlier = decided_before(recipe, newest, folder) if goes_on else {}
            run = _assembled(
                recipe,
                folder,
                newest,
                earlier,
                init_from=init_from,
                new_rows=new_rows,
                hardware=hardware,
                engine=engine,
                tell=tell,
                is_announced=is_announced,
            )
        run.held = held_folder
        yield run


def _assembled(
    recipe: Recipe,
    folder: Path,
    newest: Path | None,
    earlier: Mapping[str, Any],
    *,
    init_from: str | Path | None,
    new_rows: str,
    hardware: Hardware,
    engine: Engine,
    tell: Callable[[str], None],
    is_announced: bool,
) -> Run:
    """Assemble the run in `folder`, and restore it from its newest checkpoint if there is one.

    Args:
        newest: checkpoint from which the run is resumed or branches off; None for a new run.
        earlier: the resolved recipe of a resumed run; an empty mapping for a new run.
        tell: called with each message to the user.
        is_announced: True to omit the description of the data.
    """
    require_trackers(recipe.run.trackers)
    start = newest or init_from
    dataset, validation, kept, tokenizer = _open_data(recipe, start, engine, tell)
    splits = [one for one in (dataset, validation, kept) if one is not None]
    kind = "chat" if dataset.kind == "mix" and dataset.has_examples else dataset.kind
    require_fitting_data(recipe, kind, from_weights=start is not None)
    _seed(recipe)
    first = first_model(
        recipe,
        tokenizer,
        newest,
        init_from,
        new_rows=new_rows,
        pairs=kind == "preference",
        engine=engine,
        tell=tell,
    )
    recipe = first.recipe(recipe)
    if recipe.evaluation.patience and validation is None:
        raise ConfigError(
            "evaluation.patience compares validation losses, but the data has no validation "
            "split: prepare it with one, or set patience to 0"
        )
    if first.carried is not None and recipe.checkpoint.sharded:
        raise ConfigError(
            f"checkpoint.sharded does not support models with {', '.join(first.carried.parts)}: "
            "set it to false"
        )
    _require_rows(recipe, first.config, splits, (lambda _: None) if is_announced else tell)
    _require_fitting_prompts(recipe, first.config, tokenizer, answered=dataset.has_examples)

    facts = facts_here(
        hardware,
        processes=engine.size,
        epoch_tokens=dataset.num_tokens,
        kind=kind,
        model=first.config,
        new_model=start is None,
        run_folder=folder,
        earlier=earlier,
        largest_micro_batch=lambda open_recipe: largest_micro_batch(
            open_recipe, hardware, tell, engine.size
        ),
    )
    resolved = _resolved(recipe, facts, engine, tell)
    require_checked_device(resolved, hardware, tell)
    for note in ineffective(resolved, hardware):
        tell(f"note: {note}")
    model = first.model or new_model(resolved, engine, has_weights=start is not None)
    tasks = tasks_of(resolved, model, tokenizer)
    for note in export_notes({"model_type": model.config.model_type}, tokenizer):
        tell(f"warning: {note}")
    _add_adapters(first, model, resolved, splits, newest, hardware=hardware, tell=tell)
    if start is None:
        widths = packet_note(model.config, resolved.efficiency, hardware.capability)
        if widths is not None:
            tell(f"note: {widths}")
    program = TrainingProgram(resolved, model, hardware, engine)
    # From here on, random numbers are used only for dropout, which must differ between ranks.
    torch.manual_seed(resolved.run.seed + engine.rank)
    origin = None if init_from is None else str(init_from)
    if origin is not None and not is_hub_id(origin):
        # Store an absolute path, because a relative path could be mistaken for a hub id in another
        # working directory.
        origin = os.path.abspath(Path(origin).expanduser())
    # An earlier attempt has used part of the time budget even if it left no checkpoint.
    resumed = newest is not None or bool(earlier)
    rows = dataset.num_rows(resolved.data.seq_len)
    budget = budget_of(resolved, program, folder, newest, rows_per_epoch=rows, resumed=resumed)
    run = Run(
        resolved,
        program,
        folder,
        tokenizer,
        dataset=dataset,
        validation=validation,
        kept=kept,
        init_from=origin,
        base=None if resolved.lora is None else first.base,
        tasks=tasks,
        tell=tell,
        budget=budget,
        generation=first.generation,
        state=TrainState(initial_tokens=first.tokens),
        carried=first.carried,
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
) -> tuple[Corpus, Corpus | None, Corpus | None, Tokenizer]:
    """Open the data. Return the training split, the validation split or None, the validation split
    of the kept text or None, and the tokenizer of the splits.

    Args:
        start: the model or checkpoint from which the run starts; None for a new model.

    Raises:
        DataError: see `open_splits`. Also raised if the shards were prepared with a different
            tokenizer.
    """
    # On each machine, a single process verifies the data for all processes of that machine.
    verify = recipe.data.verify and engine.world.local_rank == 0
    data = recipe.data.model_copy(update={"verify": verify})
    dataset, validation = open_splits(
        data,
        tell,
        tokenizer=None if start is None else lambda: resolve_model_folder(start),
        progress=tell is say,
    )
    dataset, kept = with_kept_text(data, dataset, progress=tell is say)
    if kept is not None and validation is None:
        tell("only the kept text is measured, so no checkpoint is the best: hold out new text")
    tokenizer = Tokenizer.from_pretrained(dataset.folder)
    # Shards contain token ids, which a different tokenizer would decode to different text.
    if (tokenizer.fingerprint, tokenizer.vocab_size) != (
        dataset.manifest["tokenizer_sha256"],
        dataset.vocab_size,
    ):
        raise DataError(
            f"{dataset.folder}: the shards were not prepared with the tokenizer in "
            "tokenizer.json: prepare the data again"
        )
    return dataset, validation, kept, tokenizer


def _seed(recipe: Recipe) -> None:
    # Seed the generators of Python and numpy in addition to torch's, because `on_step` may use
    # them.
    torch.manual_seed(recipe.run.seed)
    random.seed(recipe.run.seed)
    np.random.seed(recipe.run.seed % 2**32)


def _resolved(
    recipe: Recipe, facts: Facts, engine: Engine, tell: Callable[[str], None]
) -> ResolvedRecipe:
    """Return the recipe with all open keys resolved. The main process resolves them for all
    processes, because some keys require measurements, which may differ between processes.
    """
    if engine.world.size == 1:
        return resolve(recipe, facts, tell)
    values = on_main(engine, lambda: resolve(recipe, facts, tell).model_dump(mode="json"))
    return parse_resolved_recipe(values)


def _require_rows(
    recipe: Recipe, model: ModelConfig, splits: Sequence[Corpus], tell: Callable[[str], None]
) -> None:
    """Raise an error if a split has too few tokens for a single row, or if a micro-batch does not
    fit in memory. Otherwise, show a description of the splits. The first split is the training
    split.

    Raises:
        ConfigError: a micro-batch needs more memory than the machine has.
        DataError: a split has fewer tokens than a row, or a conversation is too long for a row.
    """
    seq_len = sequence_length(recipe, model)
    for split in splits:
        if split is splits[0] or split.has_examples:
            split.require_row(seq_len)
    rows, memory = recipe.batch.micro_batch_size or DEFAULT_ROWS, psutil.virtual_memory().total
    # Count only input ids and labels, 8 bytes each. Check this early, because reading a batch that
    # does not fit takes a long time.
    if rows != "auto" and 16 * rows * seq_len > memory:
        raise ConfigError(
            f"batch.micro_batch_size {rows} with {seq_len} tokens per sequence does not fit into "
            f"this machine's {gib(memory)} of memory: lower it"
        )
    for split in splits:
        for line in split.describe(seq_len):
            tell(line)


def _require_fitting_prompts(
    recipe: Recipe, model: ModelConfig, tokenizer: Tokenizer, *, answered: bool
) -> None:
    """Raise an error if a sample prompt is too long. Otherwise, the run would fail at its first
    evaluation.

    Args:
        answered: True if prompts are formatted as messages in a conversation, which the model
            answers.

    Raises:
        ConfigError: a prompt is too long for the model's context.
    """
    context = model.max_position_embeddings
    for prompt in recipe.evaluation.sample_prompts:
        count, limit = len(tokenizer.encode_prompt(prompt)), context
        if answered and prompt.strip():
            message = {"role": "user", "content": prompt}
            count = len(tokenizer.encode_chat([message], add_generation_prompt=True))
            # In a conversation, this number of tokens is reserved for the answer; see
            # `ChatSession.answer_room`.
            limit -= min(recipe.evaluation.sample_tokens, max(context // 4, 1)) - 1
        if count >= limit:
            raise ConfigError(
                f"evaluation.sample_prompts: {prompt[:20]!r}... has {count} tokens, but the "
                f"model's context is {context}: shorten it"
            )


def _require_disk(run: Run) -> None:
    """Raise an error if the run's checkpoints can't be written or do not fit on the disk.

    Raises:
        StorageError: the folder of checkpoints is not writable, or the disk has too little free
            space.
    """
    # Check the folder itself, because it may be read-only inside a writable run folder.
    if os.path.lexists(run.folder / CHECKPOINTS):
        require_writable(run.folder / CHECKPOINTS)
    every, config = run.recipe.checkpoint.every_steps, run.recipe.checkpoint
    # A run with a time budget may have more steps than predicted, so assume at least one is left.
    left = max(run.max_steps - run.state.step, 1 if run.schedule.is_open else 0)
    saves = math.ceil(left / every) if every else 1
    # The checkpoint from which the run branches off is also copied into the run folder.
    saves += run.branch_from is not None
    kept = config.keep_last
    if run.validation is not None and config.keep_best and every:
        kept += config.keep_best
        saves += left // (run.recipe.evaluation.every_steps or max(run.max_steps, 1))
        # The best checkpoint may be saved between regular ones. The regular checkpoints to be
        # averaged are kept in addition to it.
        kept += config.average_last
    if config.keep_every:
        kept += left // config.keep_every
    one = checkpoint_bytes(run.program.optimizer.num_parameters, run.program.optimizer.state_bytes)
    # A new checkpoint is written before the oldest one is deleted. A run with a time budget also
    # saves checkpoints at steps that are not counted above.
    needed = one * (min(saves, kept + 1) if run.save_interval is None else kept + 1)
    if config.average_last:
        needed += checkpoint_bytes(run.program.optimizer.num_parameters, 0)
    folder = next(f for f in (run.folder, *run.folder.resolve().parents) if f.is_dir())
    free = shutil.disk_usage(folder).free
    if run.has_steps_left and needed > free:
        raise StorageError(
            f"the disk of {folder} has {free / 1e6:,.0f} MB free, but the run's checkpoints need "
            f"about {needed / 1e6:,.0f} MB: free some space, choose another run.dir, "
            "or lower checkpoint.keep_last"
        )


T = TypeVar("T")


@contextlib.contextmanager
def open_run(run: Run, *, shown: bool) -> Iterator[None]:
    """Open the data loader, logs, trackers and progress view of a run, and close them on exit.
    Prepare the run folder and delete temporary files left there by a killed run.

    Args:
        run: the run.
        shown: True to show the progress to the user from the main process.
    """
    wait_for_main(run.engine, lambda: _make_folder_ready(run))
    data = run.recipe.data
    on_gpu = run.program.hardware.device.type == "cuda"
    with (
        TokenLoader(
            run.dataset,
            run.seq_len,
            run.recipe.batch.rows,
            run.recipe.run.seed,
            rows_seen=run.state.rows_seen,
            document_masking=data.document_masking,
            rank=run.engine.rank,
            world_size=run.engine.size,
            workers=data.workers,
            # Prefetch at least the batches of one step, because they are all read at the start of
            # the step.
            prefetch=max(data.prefetch, run.micro_batches_of(run.max_steps)),
            pin_memory=on_gpu if data.pin_memory is None else data.pin_memory,
        ) as run.loader,
        _open_logs(run) as run.logs,
        _trackers(run) as run.trackers,
        TrainingProgress(_make_progress(run), shown=shown and run.engine.is_main) as run.bar,
    ):
        yield


def _make_progress(run: Run) -> RunProgress:
    # Until its length is decided, a run may continue beyond its predicted number of steps.
    def steps() -> int:
        return max(run.max_steps, run.state.step + run.schedule.is_open)

    def step_limit() -> int | None:
        if run.budget is None or not run.schedule.is_open:
            return run.max_steps
        return run.budget.most_steps

    def is_settled() -> bool:
        return run.budget is None or run.budget.is_settled

    minutes = run.recipe.schedule.max_minutes or run.recipe.run.max_minutes
    return RunProgress(steps, run.state.step, minutes, step_limit=step_limit, is_settled=is_settled)


def _make_folder_ready(run: Run) -> None:
    """Prepare the run folder. The function claims the folder for the run, deletes temporary files
    left by a killed run, copies the checkpoint from which the run branches off, and writes the
    recipe and the run's length.
    """
    run_id = None
    if run.held is not None:
        run.held.require()
        for warning in clear_file_names(run.folder):
            run.tell(warning)
        run.held.claim()
        run_id = run.held.run_id
    # Delete temporary files left by a killed process. No other process uses them, because this
    # process holds the lock.
    for folder in (run.folder, run.folder / CHECKPOINTS):
        remove_leftovers(folder)
    # Copy the checkpoint before writing the recipe. If only the recipe existed, a resumed run would
    # start from scratch.
    if run.branch_from is not None:
        with reading_checkpoint(run.branch_from):
            copy_checkpoint(run.branch_from, run.folder, run_id)
    # Write the resolved recipe here in case the run is killed before its first checkpoint. A file
    # with the same values is left unchanged to preserve its comments.
    if not _says(run.folder / RECIPE_NAME, run.recipe):
        text = yaml_text(run.recipe.model_dump())
        write_file(run.folder / RECIPE_NAME, text)
    # Write the length and the used time before the logs drop the lines after the checkpoint's step.
    # The time of the dropped steps still counts as used, and can't be computed once their lines are
    # gone.
    if run.budget is None:
        remove_file(run.folder / LENGTH_NAME)
    else:
        run.budget.write(run.folder)


def _open_logs(run: Run) -> RunLogs | SilentLogs:
    if not run.engine.is_main:
        return SilentLogs()
    return RunLogs(
        run.folder,
        run.logged_step,
        run.state.events,
        is_branch=run.branch_from is not None,
        tell=run.tell,
    )


def _trackers(run: Run) -> Trackers:
    config = run.recipe.run
    return Trackers(
        config.trackers if run.engine.is_main else [],
        run.folder,
        run.recipe.model_dump(mode="json"),
        run.tell,
        is_new=run.logged_step < 0,
        with_checkpoint=config.tracker_checkpoints,
    )


def _says(path: Path, recipe: ResolvedRecipe) -> bool:
    """Return True if the file exists and contains the values of the recipe."""
    try:
        return path.is_file() and load_recipe(path).model_dump() == recipe.model_dump()
    except ConfigError:
        return False


def begin_run(
    run: Run,
    forecaster: Forecaster | None,
    comparison: ForecastComparison,
    *,
    is_announced: bool = False,
) -> None:
    """Predict the memory, speed and length of a run, and record that it has started. If the run is
    complete, do nothing.

    Args:
        run: the run, inside `open_run`.
        forecaster: object that predicts memory and speed; None to skip the prediction.
        comparison: object that receives the forecast and compares it with the measurements.
        is_announced: True to omit the messages about memory, speed and schedule.
    """
    run.await_first_evaluation()
    if not run.goes_on:
        return
    # Predict only in the main process, because a prediction takes several seconds.
    if forecaster is not None and run.has_steps_left:
        wait_for_main(run.engine, lambda: _predict(run, forecaster, comparison))
    forecast = comparison.forecast
    rates = None if forecast is None else forecast.tokens_per_second
    run.predict_length(None if rates is None else rates[1])
    wait_for_main(run.engine, lambda: _record_start(run))
    if is_announced:
        return
    if forecast is not None:
        run.tell(f"planned: {forecast.in_words}")
    for line in _describe_start(run):
        run.tell(line)


def _expert_code_bytes(recipe: ResolvedRecipe, hardware: Hardware) -> int:
    """Return the size in bytes of the code that oneDNN compiles on a CPU for the matrix products of
    experts. Return 0 for models without experts, other precisions and other devices.
    """
    model = recipe.model
    if hardware.device.type != "cpu" or not model.expert_count:
        return 0
    if dtype_of(recipe.efficiency.precision) != torch.bfloat16:
        return 0
    rows = recipe.batch.rows * recipe.data.seq_len * model.visited_experts
    return kept_code_bytes(rows, model.expert_count)


def _predict(run: Run, forecaster: Forecaster, comparison: ForecastComparison) -> None:
    """Forecast the memory and speed of a run, show the forecast, and set `run.advise`."""
    hardware, size = run.program.hardware, run.engine.world.size
    comparison.label_share = run.dataset.label_share(run.seq_len)
    comparison.seq_len = run.seq_len
    comparison.forecast = _asked(lambda: forecaster.forecast(run.recipe, hardware, size), run.tell)
    compiles = run.recipe.efficiency.compile or compiles_update(run.recipe.optimizer)
    comparison.predict_process(
        run.held_bytes, compiles=compiles, code_bytes=_expert_code_bytes(run.recipe, hardware)
    )
    if comparison.forecast is not None:
        run.bar.predict_memory(comparison.forecast.process_bytes or comparison.forecast.peak_bytes)
    run.advise = lambda: _asked(lambda: forecaster.advise(run.recipe_now, hardware, size), run.tell)


def _asked(question: Callable[[], T], tell: Callable[[str], None]) -> T | None:
    """Call the forecaster and return its result. If it raises an error, show a message and return
    None, because a failed forecast must not end a run.
    """
    try:
        return question()
    except Exception as error:  # noqa: BLE001
        kind = "" if isinstance(error, FirstlightError) else f"{type(error).__name__}: "
        tell(f"memory and speed can't be predicted: {kind}{error}")
        return None


def _record_start(run: Run) -> None:
    """Append a line that describes this start of the run to starts.jsonl. If the run does not have
    a checkpoint, begin a new file.
    """
    path = Path(run.folder) / STARTS_NAME
    lines, problem = sound_json_lines(path) if run.saved_step > 0 else ([], None)
    if problem is not None:
        run.tell(
            f"warning: {problem}; the old file is now {set_aside(path)}, and the run continues "
            "without the damaged lines"
        )
    held_out = run.validation
    splits = [split for split in (run.dataset, held_out) if split is not None]
    conversations = [record for split in splits for record in split.records(run.seq_len)]
    lines.append(
        {
            "step": run.state.step,
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            **({} if run.schedule.is_open else {"max_steps": run.max_steps}),
            "warmup_steps": run.schedule.warmup_steps,
            "init_from": run.init_from,
            **({"branched_from": str(run.branch_from)} if run.branch_from else {}),
            "parameters": count_parameters(meta_model(run.program.model.config)).total,
            "weight_decay": decay_counts(*_trained(run), run.recipe.optimizer),
            "tokenizer_sha256": run.tokenizer.fingerprint,
            "gzip_bits_per_byte": held_out.gzip_bits_per_byte if held_out else None,
            **({"conversations": conversations} if conversations else {}),
            "machine": _machine(run.program.hardware),
        }
    )
    write_file(path, "".join(map(json_line, lines)))


def _add_adapters(
    first: FirstModel,
    model: Model,
    resolved: ResolvedRecipe,
    splits: Sequence[Corpus],
    newest: Path | None,
    *,
    hardware: Hardware,
    tell: Callable[[str], None],
) -> None:
    """Add the adapters of the `lora` section, if there is one, and set the references of preference
    pairs. The references are computed with the starting model, which includes adapters that are
    trained further, but not new ones.
    """
    if first.adapter:
        attach(model, resolved, hardware, first.adapter)
    give_references(
        resolved,
        splits,
        model,
        newest,
        started_from=first.identity,
        hardware=hardware,
        tell=tell,
    )
    if not first.adapter:
        attach(model, resolved, hardware)
    for note in peft_notes(model):
        tell(f"warning: {note}")


def _trained(run: Run) -> tuple[dict[str, Tensor], dict[str, Kind]]:
    """Return the trained parameters in their full shapes, and the kind of each parameter, both
    keyed by name. Without LoRA, the parameters are on the meta device, because an engine may store
    only shards of them.
    """
    model: nn.Module = run.program.model
    if run.recipe.lora is None:
        model = meta_model(run.program.model.config)
    return {n: p for n, p in model.named_parameters() if p.requires_grad}, parameter_kinds(model)


def _describe_start(run: Run) -> Iterator[str]:
    """Yield lines that describe the length of the run, and the learning rate and weight decay of
    each kind of parameter.
    """
    schedule = run.schedule
    optimizer = run.recipe.optimizer
    batch = run.batch
    if not run.has_steps_left and not run.state.step:
        yield (
            "schedule: no steps (schedule.max_steps 0), the model is evaluated and saved unchanged"
        )
        return
    passes = batch.before(schedule.max_steps) / run.dataset.num_rows(run.seq_len)
    epochs, warmup = counted(passes, "epoch", ".4g"), counted(schedule.warmup_steps, "step")
    peak, count = optimizer.learning_rate, counted(schedule.max_steps, "step")
    initial = run.recipe.schedule.initial_learning_rate
    rise = f"to {peak:g}" if initial is None else f"from {initial:g} to {peak:g}"
    if schedule.is_open:
        minutes = run.recipe.schedule.max_minutes
        assert minutes is not None
        count = f"about {count} within {time_text(60 * minutes)}"
    yield (
        f"schedule: {count} of {batch.in_words} x {run.seq_len} tokens "
        f"({epochs}), warm-up of {warmup} {rise}, {schedule.in_words(peak)}"
    )
    yield from describe_groups(*_trained(run), optimizer)


def _machine(hardware: Hardware) -> dict[str, Any]:
    """Return the hardware and software versions as JSON values."""
    # Do not use platform.platform(), because it starts a subprocess.
    system = os.uname()
    return {
        "device": str(hardware.device),
        "name": hardware.name,
        "memory_bytes": hardware.memory_bytes,
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "firstlight": own_version(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": f"{system.sysname} {system.release} {system.machine}",
    }

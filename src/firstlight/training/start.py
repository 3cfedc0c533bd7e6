"""The start of a run: preparing its folder, predicting its memory and length, and recording it."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
import yaml
from torch import Tensor, nn

from firstlight.checkpoint.checkpoint import copy_checkpoint
from firstlight.checkpoint.manifest import CHECKPOINTS, reading_checkpoint
from firstlight.console import own_version
from firstlight.data.loader import TokenLoader
from firstlight.efficiency.precision import dtype_of
from firstlight.errors import ConfigError, FirstlightError
from firstlight.files.atomic import remove_file, remove_leftovers, set_aside, write_file
from firstlight.hardware.device import Hardware
from firstlight.models.accounting import count_parameters, meta_model
from firstlight.models.moe import kept_code_bytes
from firstlight.optim.eight_bit import compiles_update
from firstlight.optim.groups import Kind, decay_counts, describe_groups, parameter_kinds
from firstlight.recipe import ResolvedRecipe, load_recipe
from firstlight.report.records import LENGTH_NAME, RECIPE_NAME, STARTS_NAME, sound_json_lines
from firstlight.training.course import Course
from firstlight.training.forecast import ForecastComparison, Forecaster
from firstlight.training.metrics import RunLogs, SilentLogs, clear_file_names, json_line
from firstlight.training.minutes import predict_length
from firstlight.training.processes import wait_for_main
from firstlight.training.progress import TrainingProgress
from firstlight.training.run import Run
from firstlight.training.trackers import Trackers

T = TypeVar("T")


@contextlib.contextmanager
def open_run(run: Run, *, shown: bool) -> Iterator[None]:
    """Context in which data loader, logs, trackers and progress view of a run are open. Prepares
    the run folder, from which it deletes temporary files of a killed run.

    Args:
        run: the run.
        shown: show the progress to the user, from the main process.
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
            # At least those of one step, which reads all its micro-batches at its beginning.
            prefetch=max(data.prefetch, run.micro_batches_of(run.max_steps)),
            pin_memory=on_gpu if data.pin_memory is None else data.pin_memory,
        ) as run.loader,
        _open_logs(run) as run.logs,
        _trackers(run) as run.trackers,
        TrainingProgress(_course(run), shown=shown and run.engine.is_main) as run.bar,
    ):
        yield


def _course(run: Run) -> Course:
    # A run whose length is not decided goes on beyond its predicted number of steps.
    def steps() -> int:
        return max(run.max_steps, run.state.step + run.schedule.is_open)

    def step_limit() -> int | None:
        if run.budget is None or not run.schedule.is_open:
            return run.max_steps
        return run.budget.most_steps

    minutes = run.recipe.schedule.max_minutes or run.recipe.run.max_minutes
    return Course(steps, run.state.step, minutes, step_limit=step_limit)


def _make_folder_ready(run: Run) -> None:
    """Prepare the run folder: claim it, delete temporary files of a killed run, copy the checkpoint
    that the run branches off, and write the recipe and the run's length."""
    run_id = None
    if run.held is not None:
        run.held.require()
        for warning in clear_file_names(run.folder):
            run.tell(warning)
        run.held.claim()
        run_id = run.held.run_id
    # Temporary files of a killed process: no other process uses them, since this one has the lock.
    for folder in (run.folder, run.folder / CHECKPOINTS):
        remove_leftovers(folder)
    # Before the recipe is written: with the recipe alone, resuming would start at the beginning.
    if run.branch_from is not None:
        with reading_checkpoint(run.branch_from):
            copy_checkpoint(run.branch_from, run.folder, run_id)
    # The resolved recipe is written now, for a run that is killed before its first checkpoint. A
    # file with the same values is left as it is, with its comments.
    if not _says(run.folder / RECIPE_NAME, run.recipe):
        text = yaml.safe_dump(run.recipe.model_dump(), sort_keys=False, allow_unicode=True)
        write_file(run.folder / RECIPE_NAME, text)
    # Before the logs drop lines of steps after the checkpoint, whose time counts as used.
    if run.budget is None:
        remove_file(run.folder / LENGTH_NAME)
    else:
        run.budget.write(run.folder)


def _open_logs(run: Run) -> RunLogs | SilentLogs:
    if not run.engine.is_main:
        return SilentLogs()
    return RunLogs(
        *(run.folder, run.logged_step, run.state.events),
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
    """True if a file exists and has the values of a recipe."""
    try:
        return path.is_file() and load_recipe(path).model_dump() == recipe.model_dump()
    except ConfigError:
        return False


def begin_run(run: Run, forecaster: Forecaster | None, comparison: ForecastComparison) -> None:
    """Predict memory, speed and length of a run, and record its start. Does nothing if the run is
    complete.

    Args:
        run: the run, inside `open_run`.
        forecaster: predicts memory and speed; None for no prediction.
        comparison: gets the forecast.
    """
    run.await_first_evaluation()
    if not run.goes_on:
        return
    # Only in the main process, since a prediction takes seconds.
    if forecaster is not None and run.has_steps_left:
        wait_for_main(run.engine, lambda: _predict(run, forecaster, comparison))
    forecast = comparison.forecast
    rates = None if forecast is None else forecast.tokens_per_second
    predict_length(run, None if rates is None else rates[1])
    wait_for_main(run.engine, lambda: _record_start(run))
    for line in _describe_start(run):
        run.tell(line)


def _code_of_experts(recipe: ResolvedRecipe, hardware: Hardware) -> int:
    """Bytes of the code that oneDNN compiles on a CPU for the matrix products of experts; 0 for
    other models and precisions."""
    model = recipe.model
    if hardware.device.type != "cpu" or not model.expert_count:
        return 0
    if dtype_of(recipe.efficiency.precision) != torch.bfloat16:
        return 0
    rows = recipe.batch.rows * recipe.data.seq_len * model.visited_experts
    return kept_code_bytes(rows, model.expert_count)


def _predict(run: Run, forecaster: Forecaster, comparison: ForecastComparison) -> None:
    """Forecast memory and speed of a run, show the forecast, and set `run.advise`."""
    hardware, size = run.program.hardware, run.engine.world.size
    comparison.label_share = run.dataset.label_share(run.seq_len)
    comparison.seq_len = run.seq_len
    comparison.forecast = _asked(lambda: forecaster.forecast(run.recipe, hardware, size), run.tell)
    compiles = run.recipe.efficiency.compile or compiles_update(run.recipe.optimizer)
    comparison.predict_process(
        run.held_bytes, compiles=compiles, code_bytes=_code_of_experts(run.recipe, hardware)
    )
    if comparison.forecast is not None:
        run.tell(f"predicted: {comparison.forecast.in_words}")
        run.bar.predict_memory(comparison.forecast.process_bytes or comparison.forecast.peak_bytes)
    run.advise = lambda: _asked(lambda: forecaster.advise(run.recipe_now, hardware, size), run.tell)


def _asked(question: Callable[[], T], tell: Callable[[str], None]) -> T | None:
    """The result of a call of the forecaster. An error becomes a message and None, because a failed
    forecast must not end a run."""
    try:
        return question()
    except Exception as error:  # noqa: BLE001
        kind = "" if isinstance(error, FirstlightError) else f"{type(error).__name__}: "
        tell(f"memory and speed can't be predicted: {kind}{error}")
        return None


def _record_start(run: Run) -> None:
    """Add a line for this start to starts.jsonl; a run without a checkpoint begins a new file."""
    path = Path(run.folder) / STARTS_NAME
    lines, problem = sound_json_lines(path) if run.saved_step > 0 else ([], None)
    if problem is not None:
        run.tell(
            f"warning: {problem}; the old file is now {set_aside(path)}; the run continues "
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


def _trained(run: Run) -> tuple[dict[str, Tensor], dict[str, Kind]]:
    """The trained parameters and their kinds, by name, in their full shapes: without LoRA on the
    meta device, since an engine may hold only shards."""
    model: nn.Module = run.program.model
    if run.recipe.lora is None:
        model = meta_model(run.program.model.config)
    return {n: p for n, p in model.named_parameters() if p.requires_grad}, parameter_kinds(model)


def _describe_start(run: Run) -> Iterator[str]:
    """Lines with the length of the run, and the learning rate and weight decay of each role of
    parameters."""
    schedule, optimizer, batch = run.schedule, run.recipe.optimizer, run.batch
    if not run.has_steps_left and not run.state.step:
        yield (
            "schedule: no steps (schedule.max_steps 0): the model is evaluated and saved unchanged"
        )
        return
    epochs = batch.before(schedule.max_steps) / run.dataset.num_rows(run.seq_len)
    peak, count = optimizer.learning_rate, f"{schedule.max_steps:,} steps"
    initial = run.recipe.schedule.initial_learning_rate
    rise = f"to {peak:g}" if initial is None else f"from {initial:g} to {peak:g}"
    if schedule.is_open:
        count = f"about {count} (decided later) in {run.recipe.schedule.max_minutes:g} min"
    yield (
        f"schedule: {count} of {batch.in_words} x {run.seq_len} tokens "
        f"({epochs:.4g} epochs), warm-up of {schedule.warmup_steps:,} steps {rise}, "
        f"{schedule.in_words(peak)}"
    )
    yield from describe_groups(*_trained(run), optimizer)


def _machine(hardware: Hardware) -> dict[str, Any]:
    """Hardware and versions of software, as JSON values."""
    # Not platform.platform(), which starts another program.
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

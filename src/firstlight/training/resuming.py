"""Resume a run from a checkpoint, and check for changed settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from firstlight.checkpoint.checkpoint import (
    OPTIMIZER_NAME,
    is_sharded_checkpoint,
    load_checkpoint,
    load_trainer_state,
)
from firstlight.checkpoint.manifest import (
    MANIFEST_NAME,
    foreign_checkpoints,
    require_kept,
    step_folders,
)
from firstlight.checkpoint.selection import list_checkpoints, newest_checkpoint
from firstlight.console import counted, time_text
from firstlight.errors import CheckpointError, ConfigError
from firstlight.optim.config import OPTIMIZERS
from firstlight.optim.schedule import ScheduleConfig, resolve_schedule
from firstlight.parallel.engine import Engine
from firstlight.recipe import Recipe, load_recipe
from firstlight.run_log.names import RECIPE_NAME
from firstlight.training.processes import on_main
from firstlight.training.run import Run
from firstlight.training.starting_model import changed_keys, read_start
from firstlight.training.state import TrainState, restore
from firstlight.training.time_budget import length_of

#: Keys of the `optimizer` section that determine which tensors the optimizer state contains.
_STATE_KEYS: Sequence[str] = ("name", "eight_bit_library", "embeddings_in_32_bits")

#: Values that are assumed for keys that a checkpoint of an older version does not contain.
_BEFORE_THE_KEY = {"embeddings_in_32_bits": False, "adafactor_variant": "torch"}

#: Entries in the identity of the data that must not change when a run is resumed. Each entry is
#: mapped to the value that is assumed if it is absent.
_KEPT_OF_DATA = {
    **dict.fromkeys(("seq_len", "mix", "long", "manifest_sha256", "tokenizer_sha256")),
    "row_alignment": "stream",
}


#: Largest difference between the learning rates of two schedules for which no warning is shown, as
#: a fraction of the higher rate.
_SAME_RATE = 0.01


def take_up(run: Run, folder: Path) -> None:
    """Restore the state of a run from a checkpoint.

    Args:
        run: the run.
        folder: a checkpoint of this run, or of the run from which this run branches off.

    Raises:
        CheckpointError: the data, the order of the data or the optimizer differs from the
            checkpoint.
    """
    checkpoint = load_checkpoint(folder, verify=False)  # verified by `newest_checkpoint`
    saved, identity = checkpoint.trainer_state, run.data_identity
    for key, default in _KEPT_OF_DATA.items():
        before, is_now = saved.get("data", {}).get(key, default), identity.get(key, default)
        if before != is_now:
            raise CheckpointError(
                f"{folder} can't be resumed, because the data's {key} was {before} and is now "
                f"{is_now}: restore the data (--init-from starts a new run from the weights)"
            )
    before, now = _as_written_now(saved.get("recipe", {})), run.recipe.model_dump()
    _require_same_optimizer(folder, before, run)
    _require_same_seed(folder, before, run)
    run.take_up(checkpoint)
    run.init_from = saved.get("init_from")
    # If the user has changed the micro-batch size, try the new size, even if memory ran out with
    # the old size and firstlight reduced it.
    if before.get("batch", {}).get("micro_batch_size") != run.recipe.batch.micro_batch_size:
        run.state.micro_batch_rows = 0
    if run.recipe.batch.rows % run.micro_batch_size:
        raise CheckpointError(
            f"{folder}: trainer_state.json is damaged: micro_batch_rows is "
            f"{run.state.micro_batch_rows}, but a micro-batch has {run.recipe.batch.rows} rows"
        )
    is_branch = folder.parent.parent.resolve() != run.folder.resolve()
    if is_branch:
        run.branch_from = folder
        run.state.worse_evaluations = 0
    verb, left = ("branching off", "") if is_branch else ("resuming from", _left(run))
    run.tell(f"{verb} {folder} (step {run.state.step}){left}")
    # Show a warning rather than raise an error, because the checkpoint is compatible and the change
    # may be intended.
    changed = [
        f"{section}.{key}"
        for section, values in now.items()
        if isinstance(values, dict) and isinstance(before.get(section), dict)
        for key in changed_keys(before[section], values)
        # Do not report keys that are missing from a checkpoint of an older version.
        if key != "dir" and key in before[section] and not (is_branch and section == "schedule")
    ]
    if changed:
        run.tell(f"warning: changed since the checkpoint: {', '.join(changed)}")
    if not is_branch and run.has_steps_left and (jump := _rate_jump(run, before, saved)):
        run.tell(f"warning: {jump}")
    threads, now_threads = saved.get("threads"), torch.get_num_threads()
    if run.program.hardware.device.type == "cpu" and threads not in (None, now_threads):
        run.tell(
            f"warning: the checkpoint was saved by a run with {threads} threads, but this run has "
            f"{now_threads}: sums are rounded differently, so the run will not be bitwise "
            f"identical to an uninterrupted run (set OMP_NUM_THREADS={threads} to avoid this)"
        )
    if not run.goes_on:
        why = f"step {run.state.step} of {run.max_steps}"
        if run.is_out_of_patience:
            why += "; to continue, raise evaluation.patience"
        run.tell(f"the run is complete: {why}")


def _left(run: Run) -> str:
    """Describe the remainder of a run with a time budget. Until the number of steps is decided,
    this is the remaining time; afterwards, it is the number of remaining steps. Return "" for other
    runs.
    """
    if run.budget is None or not run.goes_on:
        return ""
    if not run.schedule.is_open:
        return f": {counted(run.max_steps - run.state.step, 'step')} left"
    seconds = max(run.budget.seconds - run.budget.seconds_used, 0.0)
    total = time_text(run.budget.seconds)
    return f": {time_text(seconds)} of {total} of training time left"


def _rate_jump(run: Run, before: Mapping[str, Any], saved: Mapping[str, Any]) -> str | None:
    """Compare the learning rates of the next step in the checkpoint's schedule and in the run's
    schedule. Return a message if they differ, for example because a run with a cosine schedule is
    extended, or None if they are nearly equal.

    Args:
        run: the run, restored from the checkpoint.
        before: the recipe in the checkpoint.
        saved: the trainer state of the checkpoint.
    """
    if before.get("schedule") == run.recipe.schedule.model_dump():
        return None
    step = run.state.step
    seq_len = run.seq_len
    rows, length = run.dataset.num_rows(seq_len), saved.get("length")
    try:
        config = ScheduleConfig.model_validate(before["schedule"])
        peak = float(before["optimizer"]["learning_rate"])
        rounded_up = config.warmup_tokens is not None and "decay_tokens" not in before["schedule"]
        if rounded_up:
            # Earlier versions rounded a warm-up given in tokens up to a whole number of steps.
            steps = run.batch.steps_for(Fraction(config.warmup_tokens or 0, seq_len))
            config = config.model_copy(update={"warmup_tokens": None, "warmup_steps": steps})
        if config.max_minutes is not None and length is None:
            return None  # The checkpoint was written by an older version.
        known = None if length is None else length_of(length)
        old = resolve_schedule(config, peak, rows, run.batch, seq_len=seq_len, length=known)
    except (KeyError, TypeError, ValidationError, ConfigError):
        return None  # The checkpoint is from an older version or has a different batch size.
    was = peak * old.lr_scale(step)
    now = run.recipe.optimizer.learning_rate * run.schedule.lr_scale(step)
    if abs(now - was) <= _SAME_RATE * max(now, was):
        return None
    keeps = ""
    # With a minimum learning rate of 0, additional steps of the old schedule would not learn
    # anything.
    falls = old.kind in ("cosine", "linear") and old.min_lr_ratio > 0
    # A warm-up that is given as a fraction of the run would become longer or shorter with the new
    # number of steps.
    falls = falls and config.warmup_ratio is None
    if rounded_up:
        keeps = f" (set schedule.warmup_steps {old.warmup_steps} and no warmup_tokens to keep it)"
    elif falls and run.recipe.schedule.max_minutes is None:
        keeps = f" (set schedule.decay_steps {old.decay_steps} to keep the old schedule)"
    return (
        f"the learning-rate schedule has changed: the learning rate at step {step + 1} was "
        f"{was:.4g} in the checkpoint's schedule, and is now {now:.4g}{keeps}"
    )


def continue_schedule(run: Run, init_from: str | Path | None) -> None:
    """Initialise a new run that continues the schedule of another run (`schedule.resume`). The
    weights, moments, random states and the position in the schedule are read from that run's
    checkpoint. The data is read from its first row.

    Args:
        run: the new run.
        init_from: run or checkpoint to start from; see `train`.

    Raises:
        ConfigError: `init_from` is None, the recipe has a `lora` section, or no step is left.
        CheckpointError: `init_from` is not a checkpoint, or it belongs to another model or
            optimizer.
    """
    if init_from is None:
        raise ConfigError(
            "schedule.resume continues another run's schedule: pass that run with --init-from"
        )
    if run.recipe.lora is not None:
        raise ConfigError(
            "schedule.resume trains all weights of a model: remove it, or remove the lora section"
        )

    def restored(folder: Path) -> tuple[Path, TrainState]:
        if not (folder / OPTIMIZER_NAME).is_file() and not is_sharded_checkpoint(folder):
            raise CheckpointError(
                f"{init_from} does not contain optimizer state, which schedule.resume needs: pass "
                "a run or one of its checkpoints, or remove schedule.resume"
            )
        # The checkpoint was already verified when it was selected.
        checkpoint = load_checkpoint(folder, verify=False)
        keys = _STATE_KEYS
        if run.recipe.optimizer.name == "adafactor":
            keys = (*keys, "adafactor_variant")
        saved = _as_written_now(checkpoint.trainer_state.get("recipe", {}))
        for key, before, now in _changed_optimizer_keys(saved, run, keys):
            raise CheckpointError(
                f"schedule.resume continues from the optimizer state in {folder}, which was saved "
                f"with optimizer.{key} {before}, not {now}: restore that value, or remove "
                "schedule.resume"
            )
        # Restore the full state. Parts that belong only to the run that saved the checkpoint are
        # dropped below.
        return folder, restore(checkpoint, run.program)

    folder, found = read_start(init_from, run.engine, restored)
    # max_steps counts from the start of the schedule, which began in the run that saved the
    # checkpoint.
    if found.step >= run.max_steps:
        raise ConfigError(
            f"schedule.resume continues at step {found.step} of {init_from}, but "
            f"schedule.max_steps is {run.max_steps}, counted from the start of that run: raise it"
        )
    # Drop the data position, events and best loss of the run that saved the checkpoint.
    run.state = TrainState(
        step=found.step,
        tokens_seen=found.tokens_seen,
        initial_tokens=found.initial_tokens,
        skipped_steps=found.skipped_steps,
    )
    run.tell(f"continuing the schedule of {folder} (step {found.step} of {run.max_steps})")


def _as_written_now(saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the recipe stored in a checkpoint, converted to the form that the current version
    writes. For optimizers that are not 8-bit, older versions wrote false for
    `optimizer.embeddings_in_32_bits`, and the current version writes null.
    """
    optimizer = saved.get("optimizer", {})
    spec = OPTIMIZERS.get(optimizer.get("name"))
    if spec is None or "embeddings_in_32_bits" in spec.options:
        return saved
    return {**saved, "optimizer": {**optimizer, "embeddings_in_32_bits": None}}


def _require_same_optimizer(folder: Path, saved: Mapping[str, Any], run: Run) -> None:
    for key, before, now in _changed_optimizer_keys(saved, run, _STATE_KEYS):
        raise CheckpointError(
            f"{folder} can't be resumed: its optimizer state belongs to optimizer.{key} {before}, "
            f"not {now}: restore the old value, or start a new run in another "
            f"run.dir with --init-from {folder}"
        )


def _changed_optimizer_keys(
    saved: Mapping[str, Any], run: Run, keys: Sequence[str]
) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name, the value in the checkpoint's recipe and the current value of each key whose
    values differ.
    """
    before, now = _BEFORE_THE_KEY | saved.get("optimizer", {}), run.recipe.optimizer.model_dump()
    return ((key, before[key], now[key]) for key in keys if before.get(key, now[key]) != now[key])


def _require_same_seed(folder: Path, saved: Mapping[str, Any], run: Run) -> None:
    before, now = saved.get("run", {}).get("seed"), run.recipe.run.seed
    if before not in (None, now):
        raise CheckpointError(
            f"{folder} can't be resumed with another seed, which would change the order of the "
            f"data: set run.seed to {before} instead of {now}, or start a new run in another "
            f"run.dir with --init-from {folder}"
        )


def shared_newest(
    engine: Engine,
    run_folder: Path,
    resume: bool,
    branch_from: Path | None,
    tell: Callable[[str], None],
) -> Path | None:
    """Return the checkpoint from which all processes continue. It is the run's newest checkpoint
    or, if there is none, the checkpoint from which the run branches off. Return None for a new run.

    Args:
        engine: the engine of the run.
        run_folder: the run folder.
        resume: True to continue from the run's newest checkpoint.
        branch_from: checkpoint of another run, used if this run does not have a checkpoint yet.
        tell: called with each message to the user.

    Raises:
        CheckpointError: the run folder contains checkpoints but `resume` is False, a checkpoint
            belongs to another run or was deleted, or a process can't access it.
    """

    def find() -> str | None:
        newest = _newest_checkpoint(run_folder, resume, branch_from, tell)
        if newest is None:
            return None
        # The run that saved the checkpoint may still be active and may have deleted the checkpoint.
        require_kept(newest)
        return str(newest)

    found = on_main(engine, find)
    # Without a shared file system, each machine would write its shards of the checkpoints to its
    # own disk.
    if found is not None and not Path(found).is_dir():
        raise CheckpointError(
            f"rank {engine.world.rank} can't access {found}: set run.dir to a folder in a file "
            "system shared by all machines of the run"
        )
    return None if found is None else Path(found)


def decided_before(recipe: Recipe, newest: Path | None, run_folder: Path) -> dict[str, Any]:
    """Return the resolved recipe of the run being resumed, or {} if there is none. The resumed run
    keeps this recipe's values for "auto" keys.

    If the run was killed before its first checkpoint, the recipe is read from the run folder.
    """
    if newest is not None:
        found: dict[str, Any] = load_trainer_state(newest).get("recipe", {})
        return found
    try:
        before = load_recipe(run_folder / RECIPE_NAME)
    except ConfigError:
        return {}
    was, now = before.batch, recipe.batch
    same = (before.data.seq_len, was.global_batch_tokens, was.ramp_start_tokens) == (
        recipe.data.seq_len or before.data.seq_len,
        now.global_batch_tokens,
        now.ramp_start_tokens,
    )
    # A different global batch may require a different micro-batch size, so the batch section is not
    # kept.
    return before.model_dump(exclude=None if same else {"batch"})


def _newest_checkpoint(
    run_folder: Path, resume: bool, branch_from: Path | None, tell: Callable[[str], None]
) -> Path | None:
    """Return the checkpoint from which the run continues, or None to start a new run. See
    `shared_newest`.
    """
    for problem in foreign_checkpoints(run_folder):
        raise CheckpointError(
            f"{problem}: move it out of the folder (--init-from starts a new run from its weights)"
        )
    if not resume:
        if list_checkpoints(run_folder):
            raise CheckpointError(
                f"run folder {run_folder} already contains checkpoints: continue the run with "
                "--resume, or choose another run.dir"
            )
        return branch_from
    newest, problems = newest_checkpoint(run_folder)
    for folder in step_folders(run_folder):
        if not (folder / MANIFEST_NAME).is_file():
            tell(
                f"warning: {folder} does not contain {MANIFEST_NAME}, so it is not a checkpoint "
                "and is ignored"
            )
    for problem in problems:
        # If a checkpoint is damaged, use the previous one. Only the steps between them are lost.
        tell(f"warning: {problem}: an older checkpoint is used")
    if newest is None and branch_from is not None:
        return branch_from
    if newest is None:
        tell(f"{run_folder} does not contain a checkpoint yet: starting from the beginning")
    return newest

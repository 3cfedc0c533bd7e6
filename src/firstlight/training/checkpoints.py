"""Save a run's checkpoints, roll back to them, and average the last weights."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from firstlight.checkpoint.checkpoint import Checkpoint, load_checkpoint, verify_checkpoint
from firstlight.checkpoint.manifest import Saved, own_past, saved_checkpoints
from firstlight.checkpoint.retention import averaged_checkpoints
from firstlight.checkpoint.saver import CheckpointSaver, Saver, ShardedSaver
from firstlight.checkpoint.selection import checkpoint_before
from firstlight.errors import CheckpointError, FirstlightError, ModelError
from firstlight.files.atomic import new_folder, remove_file, write_json
from firstlight.lora.files import adapter_files
from firstlight.lora.layers import adapter_tensors
from firstlight.parallel import barrier
from firstlight.training.guard import DivergedError
from firstlight.training.processes import SAVE_NOW_NAME, on_main, wait_for_main
from firstlight.training.run import Run
from firstlight.training.state import (
    python_random_states,
    set_weights,
    states_of_ranks,
    states_to_write,
)
from firstlight.training.time_budget import save_interval
from firstlight.training.validation import evaluate_dataset
from firstlight.weights.composite import text_tensors
from firstlight.weights.huggingface import CONFIG_NAME, model_files
from firstlight.weights.loading import file_tensors
from firstlight.weights.stored import WEIGHTS_NAME, StoredTensor, read_header, save_tensors


class RunCheckpoints:
    """Saves the checkpoints of a run and rolls the run back to them. Used as a context manager, it
    waits on exit until all checkpoints are on disk.

    Args:
        run: the run, which must be opened by `open_run`.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        config, engine = run.recipe.checkpoint, run.engine
        self.saver: Saver
        if config.sharded:
            self.saver = ShardedSaver(run.folder, config, engine, run.is_last, held=run.held)
        elif engine.is_main:
            self.saver = CheckpointSaver(run.folder, config, run.held)
        else:
            self.saver = Saver()
        self.saver.saved_step = run.saved_step
        #: Value of `run.times.elapsed` at the end of the last save.
        self._saved_at = 0.0

    def __enter__(self) -> RunCheckpoints:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        # Report only the first error, even if the background writer has also failed.
        ignored = (
            contextlib.nullcontext() if error is None else contextlib.suppress(FirstlightError)
        )
        with ignored:
            self.saver.close()

    def require_written(self) -> None:
        """Raise the error with which the background writer failed, if there is one, and record how
        long the last write took. Each error is raised only once.

        Raises:
            CheckpointError, StorageError: the checkpoint could not be written.
        """
        self.saver.require_written()
        self.run.times.write_seconds = self.saver.write_seconds

    @property
    def are_due(self) -> bool:
        """True if a checkpoint must be saved now, either because it is due or because a `save-now`
        file in the run folder requests it.

        A checkpoint is due every `checkpoint.every_steps` steps, but not before the first step. In
        a run with a time budget, a checkpoint is also due `Run.save_interval` seconds after the
        last one. If the best checkpoint is kept, a new lowest validation loss also makes a
        checkpoint due. While steps are being skipped, no checkpoint is due, because a new one would
        replace a checkpoint from before the divergence.
        """
        run, asked = self.run, self.is_asked
        config, state = run.recipe.checkpoint, run.state
        is_best = state.val_loss is not None and state.val_loss == state.best_val_loss
        is_kept = is_best and bool(config.keep_best and config.every_steps)
        is_calm = not run.guard.skipped_in_a_row
        return (is_calm and (self.is_regular or is_kept)) or asked

    @property
    def is_regular(self) -> bool:
        """True if the interval between two saves has elapsed at the current step. The interval is
        given in steps and, for a run with a time budget, also in seconds.
        """
        run = self.run
        return run.state.step > 0 and (
            run.is_due(run.recipe.checkpoint.every_steps) or self._is_late
        )

    @property
    def _is_late(self) -> bool:
        run = self.run
        if run.budget is None or not run.recipe.checkpoint.every_steps:
            return False
        # Only the main process reads the clock. If every process read its own clock, the processes
        # could disagree on the step at which the checkpoint is saved.
        waited = on_main(run.engine, lambda: run.times.elapsed - self._saved_at)
        # Compare the elapsed time with the shortest possible interval first. Computing the actual
        # interval requires the size of a checkpoint, which takes time to add up.
        if waited < save_interval(run.budget.seconds, 0.0):
            return False
        return on_main(run.engine, lambda: waited >= (run.save_interval or math.inf))

    @property
    def is_asked(self) -> bool:
        """True if a `save-now` file in the run folder requests a checkpoint."""
        # Only the main process checks for the file, because other processes might see it one step
        # earlier or later.
        return on_main(self.run.engine, (self.run.folder / SAVE_NOW_NAME).is_file)

    def save(self) -> None:
        """Save a checkpoint of the current state. The saver then deletes older checkpoints that the
        recipe does not require to be kept.

        Raises:
            CheckpointError, StorageError: this checkpoint or the previous one could not be written.
        """
        with self.run.times.part("save"):
            self._save()
        self._saved_at = self.run.times.elapsed

    def _save(self) -> None:
        run, asked = self.run, self.is_asked
        # Write the logs to disk first. A run can only be resumed if the logs contain all lines up
        # to the checkpoint's step.
        run.logs.sync()
        run.save_stall_seconds = self.saver.save(run.state.step, lambda: captured(run))
        run.saved_step, run.unsaved = run.state.step, False
        if asked:
            # Delete the request only after the checkpoint is written, because the user may kill the
            # run once the file is gone.
            self.saver.wait()
            wait_for_main(run.engine, lambda: remove_file(run.folder / SAVE_NOW_NAME))

    def finish(self) -> None:
        """Save a checkpoint if there are unsaved steps, wait until it is on disk, and close the
        saver to free its memory.

        Raises:
            CheckpointError, StorageError: the checkpoint could not be written.
        """
        if self.run.unsaved:
            self.save()
        self.saver.wait()
        self.saver.close()
        # Wait for all processes, because none of them may exit while another one is still writing.
        barrier()

    def go_back(self, error: DivergedError) -> None:
        """Roll the run back to the weights, moments, random states and step of an earlier
        checkpoint. Training continues from that step with data that has not been read yet, so the
        data of the dropped steps is not repeated.

        Args:
            error: the error that reports the divergence.

        Raises:
            DivergedError: `guard.on_divergence` is "stop", `max_rollbacks` is reached, or there is
                no checkpoint.
        """
        run, failed = self.run, self.run.state
        problem = f"step {failed.step}: {error}"
        try:
            folder = self._checkpoint_before(problem)
        except DivergedError:
            run.add_event("diverged", failed.step, reason=str(error))
            raise
        run.require_folder()
        run.take_up(load_checkpoint(folder, verify=False))
        self.saver.saved_step = run.saved_step
        # Reset the number of consecutive skipped steps. If the number from the checkpoint were
        # kept, the next attempt could fail at its first bad step.
        run.guard.skipped_in_a_row = 0
        # Keep the current data position, the micro-batch size that fits in memory, the share of
        # kept text and the events.
        run.state.rows_seen = run.rows_read
        run.state.micro_batch_rows, run.state.events = failed.micro_batch_rows, failed.events
        run.state.replay = failed.replay
        # Discard the sample texts and statistics of the dropped steps.
        run.samples = []
        run.program.forget_statistics()
        run.logs.drop_after(run.logged_step)
        run.add_event("rollback", failed.step, to_step=run.state.step, reason=str(error))
        run.bar.message(f"{problem}; back to step {run.state.step}")

    def _checkpoint_before(self, problem: str) -> Path:
        """Return the folder of the checkpoint to roll back to.

        Raises:
            DivergedError: the run can't be rolled back; see `go_back`. The message begins with
                `problem`.
        """
        run = self.run
        targets = [e["to_step"] for e in run.state.events if e["event"] == "rollback"]
        before, every = run.state.step, run.recipe.checkpoint.every_steps
        if targets and before - targets[-1] == run.guard.skipped_in_a_row:
            # No step has succeeded since the previous rollback, so try an earlier checkpoint.
            before = targets[-1]
        if run.recipe.guard.on_divergence == "stop":
            raise DivergedError(problem)
        if len(targets) >= run.recipe.guard.max_rollbacks:
            raise DivergedError(f"{problem} (after {len(targets)} rollbacks)")
        # The run may have to roll back to the checkpoint that is still being written.
        self.saver.wait()

        def find() -> str | None:
            folder = checkpoint_before(run.folder, before, run.saved_step, every)
            return None if folder is None else str(folder)

        found = on_main(run.engine, find)
        if found is None:
            raise DivergedError(f"{problem} (no checkpoint to roll back to exists yet)")
        return Path(found)


def captured(run: Run) -> Checkpoint:
    """Return a checkpoint of the run's current state. With `checkpoint.sharded`, it contains only
    this process's shards. This is a collective operation.
    """
    program, recipe = run.program, run.recipe
    model, engine = program.model, run.engine
    engine.reshard()
    words, rest = python_random_states()
    if recipe.checkpoint.sharded:
        found = engine.own_tensors(model, program.optimizer)
        randoms = states_to_write(engine, words)
    else:
        tensors_of = file_tensors if run.base is None else adapter_tensors
        found = engine.state_tensors(model, program.optimizer, tensors_of)
        randoms = {**states_of_ranks(engine), **words}
    files = model_files(model.config, run.tokenizer, run.generation, run.state.tokens_read)
    if run.carried is not None:
        files = run.carried.with_texts(files, model.config)
    if run.base is not None:
        assert recipe.lora is not None
        files |= adapter_files(model, recipe.lora, run.base.name)
        # Omit config.json from the folder of an adapter. If it were present, transformers would
        # look for the weights of a full model.
        del files[CONFIG_NAME]
    # Do not use the data loader's count, because it includes batches that were read but have not
    # been used for training.
    rows_seen = run.state.rows_seen
    return Checkpoint(
        files=files,
        model=found.weights,
        optimizer={**found.moments, **randoms},
        trainer_state={
            **{k: v for k, v in dataclasses.asdict(run.state).items() if k != "rows_seen"},
            "loader": {
                "rows_seen": rows_seen,
                "epoch": rows_seen // run.loader.rows_per_epoch,
                "seed": recipe.run.seed,
                "rows_per_epoch": run.loader.rows_per_epoch,
            },
            "random": rest,
            "loss_scale": None if program.scaler is None else program.scaler.state_dict(),
            "lora_base": None if run.base is None else dataclasses.asdict(run.base),
            "init_from": run.init_from,
            "recipe": recipe.model_dump(),
            "data": run.data_identity,
            "threads": torch.get_num_threads(),
            "guard": run.guard.state_dict(),
            "schedule": dataclasses.asdict(run.schedule),
            **({} if run.budget is None else {"length": run.budget.record}),
        },
        is_copy=found.is_copy,
        carried=run.carried,
    )


#: Name of the subfolder of a run folder in which the averaged weights are stored as a Hugging Face
#: model.
AVERAGED_NAME = "averaged"
_EVALUATION_NAME = "averaged.json"


def write_average(run: Run) -> None:
    """Average the weights of a finished run's last checkpoints (Izmailov et al. 2018, arXiv
    1803.05407; applied to checkpoints: Kaddour 2022, arXiv 2209.14981). The model is left with the
    averaged weights, which are evaluated and written to the run folder.

    The average is computed from the checkpoints on disk after the last step, so it does not take
    any memory during training. Only checkpoints that were saved at regular intervals are averaged.
    Checkpoints saved because the run was stopped or the user requested one are ignored, so that a
    resumed run has the same average as an uninterrupted one.

    Raises:
        CheckpointError: a checkpoint is damaged.
        StorageError: the averaged weights can't be written.
    """
    config = run.recipe.checkpoint
    if not config.average_last or run.goes_on:
        return
    # All processes can read the checkpoints, because a run with several processes requires a
    # run.dir that all of them can access.
    past = own_past(saved_checkpoints(run.folder))
    found = averaged_checkpoints(past, config)
    average = mean_weights(found)
    set_weights(run.program, average)
    steps = [saved.step for saved in found]
    text = f"averaged weights of steps {', '.join(map(str, steps))}"
    if len(steps) < config.average_last:
        text += f" (average_last is {config.average_last}, but there are no more checkpoints)"
    losses: dict[str, float] = {}
    if run.validation is not None:
        run.program.model.eval()
        evaluation, _ = evaluate_dataset(
            run.program,
            run.validation,
            run.seq_len,
            lambda: None,
            key="val/loss",
            max_rows=run.recipe.evaluation.max_rows,
        )
        losses["val/loss"] = evaluation.loss
        last = "" if run.evaluation is None else f" (last weights: {run.evaluation.loss:.4f})"
        text += f": val/loss {evaluation.loss:.4f}{last}"
    run.tell(text)
    wait_for_main(run.engine, lambda: _write(run, average, {"steps": steps, **losses}))


def mean_weights(checkpoints: Sequence[Saved]) -> dict[str, Tensor]:
    """Return the mean of each tensor over several checkpoints. The means have the shapes of the
    tensors and are fp32, but the sums are computed in fp64. Tensors are read in parts, so only the
    means are held in memory.

    Raises:
        CheckpointError: a checkpoint is damaged.
    """
    for saved in checkpoints:
        verify_checkpoint(saved.folder)
    try:
        stored = [
            text_tensors(read_header(one.folder / WEIGHTS_NAME), one.folder) for one in checkpoints
        ]
        return {name: StoredTensor.mean([one[name] for one in stored]) for name in stored[0]}
    except ModelError as error:
        raise CheckpointError(f"weights can't be averaged: {error}") from error


def _write(run: Run, average: dict[str, Tensor], record: dict[str, object]) -> None:
    run.require_folder()
    with new_folder(run.folder / AVERAGED_NAME, replace=True) as folder:
        config, tensors = run.program.model.config, average
        files = model_files(config, run.tokenizer, run.generation, run.state.tokens_read)
        if run.carried is not None:
            files = run.carried.with_texts(files, config)
            tensors = run.carried.with_tensors(average)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
        save_tensors(tensors, folder / WEIGHTS_NAME)
        write_json(folder / _EVALUATION_NAME, record)

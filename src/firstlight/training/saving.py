"""The checkpoints that a run saves and goes back to."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

import torch

from firstlight.checkpoint.checkpoint import Checkpoint, load_checkpoint
from firstlight.checkpoint.saver import CheckpointSaver, Saver, ShardedSaver
from firstlight.checkpoint.selection import checkpoint_before
from firstlight.errors import FirstlightError
from firstlight.files.atomic import remove_file
from firstlight.parallel import barrier
from firstlight.training.guard import DivergedError
from firstlight.training.processes import SAVE_NOW_NAME, on_main, wait_for_main
from firstlight.training.run import Run
from firstlight.training.state import capture


class RunCheckpoints:
    """The checkpoints that a run saves and goes back to. A context manager: at its end, all
    checkpoints that were begun are on the disk.

    Args:
        run: the run, inside `open_run`.
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

    def __enter__(self) -> RunCheckpoints:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        # The first error is the one to report, even if the background writer failed as well.
        ignored = (
            contextlib.nullcontext() if error is None else contextlib.suppress(FirstlightError)
        )
        with ignored:
            self.saver.close()

    def require_written(self) -> None:
        """Raise an error of the background writer, once, and take over the time of its last write.

        Raises:
            CheckpointError, StorageError: the checkpoint could not be written.
        """
        self.saver.require_written()
        self.run.times.write_seconds = self.saver.write_seconds

    @property
    def are_due(self) -> bool:
        """True if a checkpoint is due, or requested by a file `save-now` in the run folder.

        A checkpoint is due every `checkpoint.every_steps` steps, but not before the first step. If
        the best checkpoint is kept, one is also due when the validation loss is the lowest so far.
        None is due while steps are being skipped, since it would replace a checkpoint from before
        the divergence.
        """
        run, asked = self.run, self._is_asked
        config, state = run.recipe.checkpoint, run.state
        is_best = state.val_loss is not None and state.val_loss == state.best_val_loss
        is_kept = is_best and bool(config.keep_best and config.every_steps)
        is_calm = not run.guard.skipped_in_a_row
        is_regular = state.step > 0 and run.is_due(config.every_steps)
        return (is_calm and (is_regular or is_kept)) or asked

    @property
    def _is_asked(self) -> bool:
        # Only the main process looks for the file: others might see it a step earlier or later.
        return on_main(self.run.engine, (self.run.folder / SAVE_NOW_NAME).is_file)

    def save(self) -> None:
        """Save a checkpoint of the current state. The saver deletes checkpoints that are not kept.

        Raises:
            CheckpointError, StorageError: this checkpoint or the one before could not be written.
        """
        with self.run.times.part("save"):
            self._save()

    def _save(self) -> None:
        run, asked = self.run, self._is_asked
        # Before the checkpoint, since resuming needs the lines up to its step.
        run.logs.sync()
        run.save_stall_seconds = self.saver.save(run.state.step, lambda: captured(run))
        run.saved_step, run.unsaved = run.state.step, False
        if asked:
            # Delete the request only when the checkpoint is written: the user may then kill the
            # run.
            self.saver.wait()
            wait_for_main(run.engine, lambda: remove_file(run.folder / SAVE_NOW_NAME))

    def finish(self) -> None:
        """Save unsaved steps, wait until they are on the disk, and close the saver, which frees its
        memory.

        Raises:
            CheckpointError, StorageError: the checkpoint could not be written.
        """
        if self.run.unsaved:
            self.save()
        self.saver.wait()
        self.saver.close()
        # So that no process ends while another one is still writing.
        barrier()

    def go_back(self, error: DivergedError) -> None:
        """Set the run to an earlier checkpoint's weights, moments, random states and step. Training
        continues from there with the data that follow, without those of the dropped steps.

        Args:
            error: the divergence.

        Raises:
            DivergedError: the recipe says to stop, `max_rollbacks` is reached, or there is no
                checkpoint.
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
        # With the checkpoint's count, the next attempt could end at its first bad step.
        run.guard.skipped_in_a_row = 0
        # Keep the position in the data, the micro-batch size that fits, and the events.
        run.state.rows_seen = run.loader.state_dict()["rows_seen"]
        run.state.micro_batch_rows, run.state.events = failed.micro_batch_rows, failed.events
        # Drop texts and statistics of the steps that do not count.
        run.samples = []
        run.program.forget_statistics()
        run.logs.drop_after(run.logged_step)
        run.add_event("rollback", failed.step, to_step=run.state.step, reason=str(error))
        run.bar.message(f"{problem}; back to step {run.state.step}")

    def _checkpoint_before(self, problem: str) -> Path:
        """The folder of the checkpoint to go back to.

        Raises:
            DivergedError: see `go_back`; its message begins with `problem`.
        """
        run = self.run
        targets = [e["to_step"] for e in run.state.events if e["event"] == "rollback"]
        before, every = run.state.step, run.recipe.checkpoint.every_steps
        if targets and before - targets[-1] == run.guard.skipped_in_a_row:
            before = targets[-1]  # not a step could be made from there
        if run.recipe.guard.on_divergence == "stop":
            raise DivergedError(problem)
        if len(targets) >= run.recipe.guard.max_rollbacks:
            raise DivergedError(f"{problem} (after {len(targets)} rollbacks)")
        # The checkpoint that is being written may be the one to go back to.
        self.saver.wait()

        def find() -> str | None:
            folder = checkpoint_before(run.folder, before, run.saved_step, every)
            return None if folder is None else str(folder)

        found = on_main(run.engine, find)
        if found is None:
            raise DivergedError(f"{problem} (no checkpoint to roll back to exists yet)")
        return Path(found)


def captured(run: Run) -> Checkpoint:
    """The checkpoint of a run in its current state."""
    # Not the loader's count, which includes batches that were read but not used.
    rows_seen = run.state.rows_seen
    return capture(
        run.state,
        run.program,
        run.tokenizer,
        run.base,
        origin={
            "init_from": run.init_from,
            "recipe": run.recipe.model_dump(),
            "data": run.data_identity,
            "threads": torch.get_num_threads(),
            "loader": {
                "rows_seen": rows_seen,
                "epoch": rows_seen // run.loader.rows_per_epoch,
                "seed": run.recipe.run.seed,
                "rows_per_epoch": run.loader.rows_per_epoch,
            },
            "guard": run.guard.state_dict(),
            "schedule": dataclasses.asdict(run.schedule),
            **({} if run.budget is None else {"length": run.budget.record}),
        },
    )

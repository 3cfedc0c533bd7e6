"""Saving checkpoints while training goes on, and finding the one that a rollback goes to."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from firstlight.checkpoint.checkpoint import (
    Checkpoint,
    load_trainer_state,
    save_checkpoint,
    verify_checkpoint,
)
from firstlight.checkpoint.config import CheckpointConfig
from firstlight.checkpoint.history import own_past, saved_checkpoints
from firstlight.checkpoint.retention import prune_checkpoints
from firstlight.checkpoint.snapshot import Snapshot
from firstlight.errors import CheckpointError
from firstlight.hardware.device import free_memory_bytes

#: Of the memory that is free at the first save, the copy may take this share.
_SHARE = 0.5


class CheckpointSaver:
    """Writes a run's checkpoints, verifies each, and deletes those that are too many.

    Asynchronously, the tensors are copied into memory that is kept from save to save, and one
    thread does the rest while training goes on. A process that ends waits for that thread.

    Args:
        run_folder: the run's.
        config: the recipe's `checkpoint` section.
        require_folder: called before anything is written or deleted; raises an error if the run
            folder is no longer this run's.

    Attributes:
        saved_step: the step of the run's newest checkpoint that is complete on the disk; -1:
            none. A run that goes on from another checkpoint (a resume, a rollback) sets it to
            that one's step, when nothing is being written (see `wait`): what was saved after
            that one is of a dead branch then.
    """

    def __init__(
        self,
        run_folder: Path,
        config: CheckpointConfig,
        require_folder: Callable[[], None] = lambda: None,
    ) -> None:
        self.saved_step, self._require_folder = -1, require_folder
        self._run_folder, self._config = run_folder, config
        self._asynchronous = config.asynchronous
        self._copies = Snapshot()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    def save(self, step: int, capture: Callable[[], Checkpoint]) -> float:
        """Save a checkpoint of this moment; return the seconds that training stood still.

        Waits first for what is still being written.

        Args:
            capture: gives the state. Its tensors may be on any device and in any layout, share
                memory, and change after this call. Tensors on a GPU are best left there: they
                are copied into page-locked memory.

        Raises:
            CheckpointError, StorageError: this one could not be written (asynchronously: from a
                later call), or the one before.
        """
        start = time.perf_counter()
        self.wait()
        checkpoint = capture()
        if self._is_asynchronous(checkpoint):
            snapshot = self._snapshot(checkpoint)
            self._writing = self._executor.submit(self._write, step, snapshot)
        else:
            self._write(step, checkpoint)
        return time.perf_counter() - start

    def require_written(self) -> None:
        """Raise what the thread ran into since the last call, once. Does not wait.

        Raises:
            CheckpointError, StorageError: the checkpoint could not be written.
        """
        if self._writing is not None and self._writing.done():
            self.wait()

    def wait(self) -> None:
        """Wait until what is being written is on the disk.

        Raises:
            CheckpointError, StorageError: it could not be written.
        """
        if self._writing is None:
            return
        try:
            self._writing.result()
        finally:
            if self._writing.done():  # not where the waiting was interrupted
                self._writing = None

    def close(self) -> None:
        """`wait`, and give the thread and the memory back."""
        try:
            self.wait()
        finally:
            self._executor.shutdown()
            self._copies.clear()

    def _is_asynchronous(self, checkpoint: Checkpoint) -> bool:
        if self._asynchronous is None:
            if checkpoint.is_copy:
                return True
            needed = sum(tensor.nbytes for _, tensor in _tensors(checkpoint))
            self._asynchronous = needed <= _SHARE * free_memory_bytes(torch.device("cpu"))
        return self._asynchronous

    def _snapshot(self, checkpoint: Checkpoint) -> Checkpoint:
        """A checkpoint that does not change with the run."""
        model, optimizer = checkpoint.model, checkpoint.optimizer
        if not checkpoint.is_copy:
            copies = self._copies.take(dict(_tensors(checkpoint)))
            model = {name: copies[f"model {name}"] for name in model}
            optimizer = {name: copies[f"optimizer {name}"] for name in optimizer}
        state = copy.deepcopy(checkpoint.trainer_state)
        return Checkpoint(dict(checkpoint.files), model, optimizer, state)

    def _write(self, step: int, checkpoint: Checkpoint) -> None:
        after = self.saved_step if self.saved_step >= 0 else None
        self._require_folder()
        folder = save_checkpoint(self._run_folder, step, checkpoint, after)
        verify_checkpoint(folder, from_disk=True)
        self.saved_step = step
        self._require_folder()
        prune_checkpoints(
            self._run_folder,
            folder,
            keep_last=self._config.keep_last,
            keep_every=self._config.keep_every,
            keep_best=self._config.keep_best,
        )


def _tensors(checkpoint: Checkpoint) -> Iterable[tuple[str, Tensor]]:
    """All tensors of a checkpoint, each with a key of its own."""
    parts: dict[str, Mapping[str, Tensor]] = {
        "model": checkpoint.model,
        "optimizer": checkpoint.optimizer,
    }
    return ((f"{part} {name}", parts[part][name]) for part in parts for name in parts[part])


class PassiveSaver:
    """Has the methods of `CheckpointSaver`; gives its part of a checkpoint, and writes nothing.

    Attributes:
        saved_step: as the main process has it.
    """

    def __init__(self) -> None:
        self.saved_step = -1

    def save(self, step: int, capture: Callable[[], Checkpoint]) -> float:
        """Take part in gathering the state, for which the main process waits."""
        capture()
        self.saved_step = step
        return 0.0

    def require_written(self) -> None:
        """Nothing."""

    def wait(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


def checkpoint_before(
    run_folder: Path, step: int, saved_step: int, every_steps: int
) -> Path | None:
    """The folder of the newest checkpoint of an earlier step that verifies, or None.

    Those that stand where they were due, from before the trouble began, come first, so that a
    run that was stopped and resumed in between (which leaves a checkpoint more) goes back to
    where it would have gone without.

    Args:
        run_folder: of the run.
        step: the one that failed, or that the last rollback was to, in vain.
        saved_step: of the last checkpoint of what the run has done; later ones are of a dead
            branch.
        every_steps: `checkpoint.every_steps`.
    """
    found = []
    for one in own_past(saved_checkpoints(run_folder)):
        if one.step < step and one.step <= saved_step:
            with contextlib.suppress(CheckpointError):
                state = load_trainer_state(one.folder)
                # One without any update is what the run began with.
                if state.get("skipped_steps", 0) < one.step:
                    found.append((*_merits(state, one.step, every_steps), one.sequence, one.folder))
    for *_, folder in sorted(found, reverse=True):
        with contextlib.suppress(CheckpointError):
            verify_checkpoint(folder)
            return folder
    return None


def _merits(state: Mapping[str, Any], step: int, every_steps: int) -> tuple[bool, bool]:
    """(whether the last step was not skipped, whether it was due)."""
    is_calm = not state.get("skipped")
    was_due = every_steps > 0 and step % every_steps == 0 and state.get("pending") is None
    return is_calm, was_due

"""Save checkpoints, either synchronously or in the background while training continues.

By default, the main process writes the entire checkpoint with a `CheckpointSaver`. With
`checkpoint.sharded`, each process writes its own shards with a `ShardedSaver`.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from firstlight.checkpoint.checkpoint import (
    Checkpoint,
    checkpoint_texts,
    require_finite,
    save_checkpoint,
    saved_vocab_multiple,
    verify_checkpoint,
)
from firstlight.checkpoint.manifest import (
    checkpoint_folder,
    file_marks,
    new_checkpoint,
    write_manifest,
    write_texts,
)
from firstlight.checkpoint.retention import CheckpointConfig, prune_checkpoints
from firstlight.checkpoint.run_folder import HeldFolder
from firstlight.checkpoint.sharded import (
    MOMENTS,
    WEIGHTS,
    TensorShard,
    own_shards,
    shard_name,
    sharded_model,
    write_shards,
)
from firstlight.errors import CheckpointError, FirstlightError, StorageError
from firstlight.files.atomic import forget_cached, sha256_of, storage_errors
from firstlight.files.disk import HashedFile
from firstlight.files.tensor_file import write_tensors
from firstlight.hardware.device import free_memory_bytes, single_threaded_pool
from firstlight.parallel import agree, broadcast_object, gather_objects
from firstlight.parallel.engine import Engine
from firstlight.weights.loading import weights_to_save
from firstlight.weights.stored import WEIGHTS_NAME

#: Maximum fraction of a machine's free memory that the copies of tensors can use, counting all
#: processes on the machine. The free memory is measured at the first save.
_COPY_SHARE = 0.5


class Saver:
    """Interface for saving checkpoints. All processes except the main process use this base class,
    which participates in gathering the state but does not write anything.

    Attributes:
        saved_step: step of the newest complete checkpoint of the run, or -1 if there is none. A run
            that continues from an older checkpoint, after being resumed or rolled back, sets it to
            the step of that checkpoint. All later checkpoints then belong to a dead branch. It must
            not be set while a checkpoint is being written (see `wait`).
        write_seconds: seconds that the background thread took to write the newest checkpoint; 0 if
            the thread has not written any checkpoint.
    """

    saved_step = -1
    write_seconds = 0.0

    def save(self, step: int, capture: Callable[[], Checkpoint]) -> float:
        """Save a checkpoint of the current state. Return the time in seconds for which training had
        to wait.

        If the previous checkpoint is still being written, this method waits for it first.

        Args:
            step: number of completed optimizer steps.
            capture: function that returns this process's part of the state. Its tensors may be on
                any device and in any layout, may share memory, and may change after this call.
                Tensors on a GPU should remain there; they are copied to page-locked memory.

        Raises:
            CheckpointError, StorageError: this or the previous checkpoint could not be written.
                With asynchronous saving, an error in writing this checkpoint is raised by a later
                call.
        """
        capture()
        self.saved_step = step
        return 0.0

    def require_written(self) -> None:
        """If the background thread has failed since the last call, raise its error. This method
        does not wait for the thread.

        Raises:
            CheckpointError, StorageError: the checkpoint could not be written.
        """

    def wait(self) -> None:
        """Wait until any checkpoint that is being written is complete.

        Raises:
            CheckpointError, StorageError: the checkpoint could not be written.
        """

    def close(self) -> None:
        """Stop threads and free memory."""


class BackgroundSaver(Saver):
    """Base class for savers that copy the state and write the copy while training continues. It
    owns the writer thread and the memory for the copies, which is reused for each save.

    Args:
        run_folder: the run's folder.
        config: the recipe's `checkpoint` section.
        held: the locked run folder, which is checked before each write and deletion; None in
            processes other than the main process.
    """

    def __init__(
        self, run_folder: Path, config: CheckpointConfig, held: HeldFolder | None = None
    ) -> None:
        self._run_folder = run_folder
        self._config = config
        self._held = held
        self._asynchronous = config.asynchronous
        self._copies = Snapshot()
        self._executor = single_threaded_pool(1, "checkpoint")

    @property
    def _parent(self) -> int | None:
        """Step of the checkpoint that precedes the next one in the history of the run, or None if
        there is none.
        """
        return self.saved_step if self.saved_step >= 0 else None

    @property
    def _run_id(self) -> str | None:
        return None if self._held is None else self._held.run_id

    def _require_folder(self) -> None:
        """Raise a CheckpointError if the run folder no longer belongs to this run."""
        if self._held is not None:
            self._held.require()

    @contextlib.contextmanager
    def _in_own_folder(self) -> Iterator[None]:
        """If an error occurs in the `with` block, check the run folder. If it no longer belongs to
        this run, raise an error that explains this, because the original error may only mention
        missing files.
        """
        try:
            yield
        except FirstlightError:
            self._require_folder()
            raise

    def _have_room(self, tensors: Iterable[Tensor], processes: int = 1) -> bool:
        """Return True if this machine has enough free memory for each of `processes` processes to
        copy tensors of this size.
        """
        free = free_memory_bytes(torch.device("cpu")) / processes
        return sum(tensor.nbytes for tensor in tensors) <= _COPY_SHARE * free

    def _prune(self, newest: Path) -> None:
        """Delete checkpoints that are no longer needed now that `newest` is complete."""
        prune_checkpoints(self._run_folder, newest, self._config, self._require_folder)

    def _release(self) -> None:
        """Stop the thread and free the memory."""
        self._executor.shutdown()
        self._copies.clear()


class CheckpointSaver(BackgroundSaver):
    """Saver for the main process. It writes and verifies the checkpoints of a run, and deletes
    checkpoints that are no longer needed.

    With asynchronous saving, `save` only copies the tensors. A thread writes and verifies the
    checkpoint while training continues, and the process does not exit before the thread has
    finished.

    Args:
        run_folder, config, held: see `BackgroundSaver`.
    """

    def __init__(
        self, run_folder: Path, config: CheckpointConfig, held: HeldFolder | None = None
    ) -> None:
        super().__init__(run_folder, config, held)
        self._writing: Future[None] | None = None

    def save(self, step: int, capture: Callable[[], Checkpoint]) -> float:
        """Save a checkpoint; see `Saver.save`."""
        start = time.perf_counter()
        self.wait()
        checkpoint = capture()
        if self._is_asynchronous(checkpoint):
            snapshot = self._snapshot(checkpoint)
            self._writing = self._executor.submit(self._write_beside, step, snapshot)
        else:
            self._write(step, checkpoint)
        return time.perf_counter() - start

    def require_written(self) -> None:
        """See `Saver.require_written`."""
        if self._writing is not None and self._writing.done():
            self.wait()

    def wait(self) -> None:
        """See `Saver.wait`."""
        if self._writing is None:
            return
        try:
            self._writing.result()
        finally:
            # If a signal interrupted the wait, the checkpoint is not complete yet. In this case,
            # keep it as pending, so that a later call waits again.
            if self._writing.done():
                self._writing = None

    def close(self) -> None:
        """Wait for the pending checkpoint, then stop the thread and free the memory."""
        try:
            self.wait()
        finally:
            self._release()

    def _is_asynchronous(self, checkpoint: Checkpoint) -> bool:
        if self._asynchronous is None:
            if checkpoint.is_copy:
                return True
            self._asynchronous = self._have_room(tensor for _, tensor in _tensors(checkpoint))
        return self._asynchronous

    def _snapshot(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return a copy of a checkpoint whose tensors are not changed by later training steps."""
        model, optimizer = checkpoint.model, checkpoint.optimizer
        if not checkpoint.is_copy:
            copies = self._copies.take(dict(_tensors(checkpoint)))
            model = {name: copies[f"model {name}"] for name in model}
            optimizer = {name: copies[f"optimizer {name}"] for name in optimizer}
        state = copy.deepcopy(checkpoint.trainer_state)
        carried = checkpoint.carried
        return Checkpoint(dict(checkpoint.files), model, optimizer, state, carried=carried)

    def _write_beside(self, step: int, checkpoint: Checkpoint) -> None:
        start = time.perf_counter()
        self._write(step, checkpoint)
        self.write_seconds = time.perf_counter() - start

    def _write(self, step: int, checkpoint: Checkpoint) -> None:
        after = self._parent
        self._require_folder()
        with self._in_own_folder():
            folder = save_checkpoint(self._run_folder, step, checkpoint, after, held=self._held)
            verify_checkpoint(folder, from_disk=True)
            self.saved_step = step
            self._prune(folder)


def _tensors(checkpoint: Checkpoint) -> Iterable[tuple[str, Tensor]]:
    """Yield all tensors of a checkpoint under unique names: "model NAME" or "optimizer NAME"."""
    parts: dict[str, Mapping[str, Tensor]] = {
        "model": checkpoint.model,
        "optimizer": checkpoint.optimizer,
    }
    return ((f"{part} {name}", parts[part][name]) for part in parts for name in parts[part])


class Snapshot:
    """Copies tensors to the CPU, reusing the same memory for each copy."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy tensors to the CPU. Return the copies, keyed by name. They are valid until the next
        call.

        Args:
            tensors: tensors on any device and in any layout, which may share memory. Tensors on a
                GPU are copied to page-locked memory.
        """
        for name, tensor in tensors.items():
            buffer = self._buffers.get(name)
            if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
                buffer = torch.empty(
                    tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda
                )
                self._buffers[name] = buffer
            buffer.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
        # Wait for the asynchronous copies from each GPU. Without an argument, `synchronize` would
        # wait for the current device, which may be a different GPU.
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            torch.cuda.synchronize(device)
        return {name: self._buffers[name] for name in tensors}

    def clear(self) -> None:
        """Free the memory."""
        self._buffers.clear()


# Sharded checkpoints

#: Shards of this process. The outer key is `WEIGHTS` or `MOMENTS`, and the inner key is the name of
#: the tensor.
_Shards = dict[str, dict[str, TensorShard]]


class _DiscardedError(Exception):
    """Raised to abandon a checkpoint that is being written."""


class ShardedSaver(BackgroundSaver):
    """Saver for sharded checkpoints. Each process writes its own shards to the checkpoint. All
    processes must call each method at the same points of the run.

    Each process writes and verifies its own files without communicating with other processes. If
    saving is asynchronous, it does this in a thread. Once all files are written, the processes
    exchange the sizes and hashes of their files between two steps. The main process then writes the
    manifest and renames the folder.

    Args:
        run_folder: the run's folder, on a file system shared by all processes.
        config: the recipe's `checkpoint` section.
        is_last: function that returns True for the last step of the run, whose checkpoint also
            contains the weights in a single file.
        held: see `BackgroundSaver`.
    """

    def __init__(
        self,
        run_folder: Path,
        config: CheckpointConfig,
        engine: Engine,
        is_last: Callable[[int], bool],
        held: HeldFolder | None = None,
    ) -> None:
        super().__init__(run_folder, config, held)
        self._world, self._is_main = engine.world, engine.is_main
        self._is_last = is_last
        self._folder = contextlib.ExitStack()
        self._writing: Future[dict[str, Any]] | None = None
        self._finish: Callable[[list[dict[str, Any]]], None]
        self._deleting: Future[None] | None = None

    def save(self, step: int, capture: Callable[[], Checkpoint]) -> float:
        """Save a checkpoint; see `Saver.save`.

        Args:
            step: number of completed optimizer steps.
            capture: function that returns this process's part of the state. It consists of sharded
                tensors (DTensors) and tensors that are not sharded.

        Raises:
            CheckpointError, StorageError: a process could not write its part of this or the
                previous checkpoint. With asynchronous saving, an error in writing this checkpoint
                is raised by a later call.
        """
        start = time.perf_counter()
        self.wait()
        checkpoint = capture()
        shards = {
            MOMENTS: own_shards(checkpoint.optimizer),
            WEIGHTS: own_shards(checkpoint.model),
        }
        asynchronous = self._is_asynchronous(shards)
        if asynchronous:
            shards = self._snapshot(shards)
        state = copy.deepcopy(checkpoint.trainer_state)
        part = Checkpoint(dict(checkpoint.files), {}, {}, state)
        folder = self._new_folder(step)
        self._finish = lambda outcomes: self._publish(step, folder, state, outcomes)
        self._writing = self._executor.submit(self._write, step, folder, shards, part)
        if not asynchronous:
            self.wait()
        return time.perf_counter() - start

    def require_written(self) -> None:
        """If all processes have written their parts of the pending checkpoint, finish it.
        Otherwise, return without waiting.

        Raises:
            CheckpointError, StorageError: a process could not write its part, or old checkpoints
                could not be deleted.
        """
        if self._writing is not None and not agree(not self._writing.done()):
            self.wait()
        if self._deleting is not None and self._deleting.done():
            self._wait_for_deleting()

    def wait(self) -> None:
        """Wait until any checkpoint that is being written is complete.

        Raises:
            CheckpointError, StorageError: a process could not write its part, or old checkpoints
                could not be deleted.
        """
        if self._writing is not None:
            outcomes = gather_objects(self._writing.result())
            self._writing = None
            self._finish(outcomes)
        self._wait_for_deleting()

    def close(self) -> None:
        """Stop the saver's threads and free its memory. An incomplete checkpoint is abandoned,
        because finishing it requires all processes, and some of them may have ended.
        """
        try:
            if self._writing is not None:
                self._writing.result()
                self._writing = None
                with contextlib.suppress(_DiscardedError), self._folder.pop_all():
                    raise _DiscardedError
            self._wait_for_deleting()
        finally:
            self._release()

    def _wait_for_deleting(self) -> None:
        deleting, self._deleting = self._deleting, None
        if deleting is not None:
            deleting.result()

    def _is_asynchronous(self, shards: _Shards) -> bool:
        """Return True if every process has enough memory for its copies. The processes decide this
        together at the first save.
        """
        if self._asynchronous is None:
            tensors = (p.tensor for part in shards.values() for p in part.values())
            self._asynchronous = not agree(not self._have_room(tensors, self._world.local_size))
        return self._asynchronous

    def _snapshot(self, shards: _Shards) -> _Shards:
        """Return copies of the shards' tensors, which later training steps do not change."""
        copies = self._copies.take(
            {f"{kind} {n}": p.tensor for kind, part in shards.items() for n, p in part.items()}
        )
        return {
            kind: {n: TensorShard(copies[f"{kind} {n}"], p.offsets) for n, p in part.items()}
            for kind, part in shards.items()
        }

    def _new_folder(self, step: int) -> Path:
        """Return the temporary folder to which all processes write. It is created by the main
        process.
        """
        name = None
        if self._is_main:
            self._require_folder()
            name = str(self._folder.enter_context(new_checkpoint(self._run_folder, step)))
        return Path(broadcast_object(name))

    def _write(self, step: int, folder: Path, shards: _Shards, part: Checkpoint) -> dict[str, Any]:
        """Write this process's files.

        Returns:
            {"marks": result of `file_marks` for the files} or, after an error, {"error": message,
            "of_disk": True for a StorageError}. An error is returned instead of raised, because all
            processes must raise it together.
        """
        rank, size = self._world.rank, self._world.size
        try:
            for own in shards.values():
                require_finite(step, {name: shard.tensor for name, shard in own.items()})
            with storage_errors(folder):
                written = [
                    write_shards(folder / shard_name(kind, rank, size), own)
                    for kind, own in shards.items()
                ]
                if self._is_main:
                    written += write_texts(folder, checkpoint_texts(step, part))
                _require_on_disk(written)
        except FirstlightError as error:
            return {"error": str(error), "of_disk": isinstance(error, StorageError)}
        return {"marks": file_marks(written)}

    def _publish(
        self,
        step: int,
        folder: Path,
        state: Mapping[str, Any],
        outcomes: list[dict[str, Any]],
    ) -> None:
        """Finish the checkpoint by writing the manifest and renaming the folder. If a process could
        not write its part, remove the folder and raise the error.

        Args:
            step: number of completed optimizer steps.
            folder: the temporary folder.
            state: the checkpoint's `trainer_state`.
            outcomes: results of `_write` from all processes, in rank order.
        """
        with self._in_own_folder(), self._folder.pop_all():
            for rank, outcome in enumerate(outcomes):
                if "error" in outcome:
                    kind = StorageError if outcome["of_disk"] else CheckpointError
                    raise kind(f"rank {rank}: {outcome['error']}")
            if self._is_main:
                marks = {name: m for one in outcomes for name, m in one["marks"].items()}
                with storage_errors(folder):
                    if self._is_last(step):
                        marks |= _write_whole(folder, state)
                    self._require_folder()
                    write_manifest(
                        folder,
                        self._run_folder,
                        step,
                        marks,
                        val_loss=state.get("val_loss"),
                        after=self._parent,
                        run_id=self._run_id,
                    )
        self.saved_step = step
        if self._is_main:
            self._deleting = self._executor.submit(
                self._prune, checkpoint_folder(self._run_folder, step)
            )


def _write_whole(folder: Path, state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Write the weights to a single file in addition to the shards, so that `folder` is also a
    Hugging Face model folder. Return the result of `file_marks` for the new file.
    """
    model = sharded_model(folder, saved_vocab_multiple(folder, state))
    with HashedFile(folder / WEIGHTS_NAME) as file:
        write_tensors(file, weights_to_save(model), {"format": "pt"})
    _require_on_disk([file])
    return file_marks([file])


def _require_on_disk(files: list[HashedFile]) -> None:
    """Read files back from the disk, and compare their SHA-256 hashes with the hashes of the data
    that was written.

    Raises:
        CheckpointError: a file on the disk has different content.
    """
    for file in files:
        forget_cached(file.path)
        if sha256_of(file.path) != file.sha256:
            raise CheckpointError(f"{file.path} differs from what was written: check the disk")

"""The run folder that one process holds: its lock, the id of its run, and the check before a write.

A lock follows the folder's inode, and files are written by path. If a person moves a run folder,
removes it or deletes its lock during the run, the run would write into, and delete checkpoints of,
another run that has taken the path. `HeldFolder.require` notices that: it compares the folder at
the path with the held one, and run.json with what this start has written into it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

from firstlight.checkpoint.manifest import RUN_NAME, run_id_of
from firstlight.errors import CheckpointError, ConfigError, StorageError
from firstlight.files.atomic import make_folder, storage_errors, write_file

_LOCK_NAME = ".lock"
_IN_USE = "is in use by another process: wait until that ends, or choose another folder"

#: Times that a lock is tried for which others take away.
_TRIES = 1000


class HeldFolder:
    """A run folder that this process holds.

    Args:
        path: the folder.
        opened: descriptor of the folder, open as long as it is held, so that its inode number is
            not given to a folder that takes its place.

    Attributes:
        run_id: the id of the run, which its checkpoints' manifests name; None before `claim`.
    """

    def __init__(self, path: Path, opened: int) -> None:
        self.run_id: str | None = None
        self._path, self._opened = path, opened
        self._claim: bytes | None = None

    def claim(self) -> None:
        """Write run.json: the id of the run, a new one for a new run, and that of this start.

        Raises:
            CheckpointError: the folder was moved or removed.
            StorageError: the disk refuses.
        """
        self.require()
        self.run_id = run_id_of(self._path) or secrets.token_hex(8)
        text = json.dumps({"run_id": self.run_id, "start_id": secrets.token_hex(8)}) + "\n"
        write_file(self._path / RUN_NAME, text)
        self._claim = text.encode()

    def require(self) -> None:
        """Raise an error if the folder is no longer this process's.

        Raises:
            CheckpointError: the folder was moved, removed or replaced, or another process has
                started a run in it, which can happen after the lock is deleted or if a file system
                does not obey locks.
            StorageError: the disk refuses to tell.
        """
        found: bytes | None = None
        is_same = False
        with (
            storage_errors(self._path),
            contextlib.suppress(FileNotFoundError, NotADirectoryError),
        ):
            is_same = os.path.samestat(os.fstat(self._opened), os.stat(self._path))
            if self._claim is not None:
                found = (self._path / RUN_NAME).read_bytes()
        if not is_same or (found is None and self._claim is not None):
            raise CheckpointError(
                f"run folder {self._path} was moved or removed while the run wrote into it: move "
                "it back, or set run.dir to its new path, and continue with --resume"
            )
        if found != self._claim:
            raise CheckpointError(
                f"run folder {self._path} was taken over while the run wrote into it: its "
                f"{RUN_NAME} is no longer that of this start; end other runs in the folder, then "
                "continue with --resume"
            )


@contextlib.contextmanager
def held(folder: Path, lock_name: str = _LOCK_NAME) -> Iterator[HeldFolder]:
    """Hold the run folder, which is made if need be: two processes writing to one run would ruin
    it. The lock goes with the process, however it ends.

    A folder, or a lock in it, that was made for this is taken away again if nothing was written.

    Args:
        folder: the run folder.
        lock_name: the lock's file in it.

    Yields:
        the held folder, whose `require` is called before anything is written into it.

    Raises:
        ConfigError: the path is a file.
        CheckpointError: another process holds it.
        StorageError: the folder can't be made.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"run.dir {folder} is a file: choose another run.dir")
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    is_new = not (folder / lock_name).exists()
    with storage_errors(folder):
        file = _locked(folder, lock_name)
    before = set(os.listdir(folder))
    # Held open, so that its inode number is not given to a folder that takes its place.
    opened = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    with file:
        try:
            yield HeldFolder(folder, opened)
        finally:
            os.close(opened)
            with contextlib.suppress(OSError):
                if is_new and set(os.listdir(folder)) == before:
                    (folder / lock_name).unlink()
                    for path in made:
                        path.rmdir()


def is_held(folder: Path) -> bool:
    """True if a process holds the run folder: a run is active there."""
    try:
        opened = os.open(folder / _LOCK_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        # Free for a moment it is this process's, and a run that starts just then would be refused;
        # so whoever asks does it once more only if the answer was yes.
        fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(opened)
    return False


def _locked(folder: Path, lock_name: str) -> FileIO:
    """The lock's file, open and locked."""
    # Whoever held it may take it away again at any moment until it is ours, but a folder that can
    # never be made is missing each time.
    for left in range(_TRIES, 0, -1):
        try:
            # Its name is synced, because a run's files would be lost with it.
            make_folder(folder)
        except StorageError as error:
            if left == 1 or not isinstance(error.__cause__, FileNotFoundError):
                raise
            continue
        try:
            # Not through a link, which would make a file elsewhere, and without waiting for
            # whoever reads a pipe.
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            file = open(os.open(folder / lock_name, flags, 0o666), "rb", buffering=0)  # noqa: SIM115
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise CheckpointError(f"run folder {folder} {_IN_USE}") from None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), os.stat(folder / lock_name)):
                return file
        file.close()
    raise CheckpointError(f"run folder {folder} {_IN_USE}")

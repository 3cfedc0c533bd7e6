"""Lock a run folder, identify the run in it, and check the folder before each write.

A lock belongs to the inode of the lock file, but files are written by path. If the user moves or
removes a run folder or deletes its lock file during a run, another run can start in a folder at the
same path. The first run would then write to the folder of the second run and delete its
checkpoints. To prevent this, `HeldFolder.require` checks that the folder at the path is still the
locked folder, and that run.json still has the content that was written when this run started.
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
_IN_USE = "is in use by another process: wait until that process ends, or choose another folder"

#: Number of attempts to lock the lock file in case other processes keep deleting it.
_TRIES = 1000


class HeldFolder:
    """A run folder locked by this process.

    Args:
        path: the folder.
        opened: file descriptor of the folder. The descriptor remains open while the folder is
            locked, so that the inode number of the folder can't be reused for a new folder at the
            same path.

    Attributes:
        run_id: id of the run, which is also stored in the manifests of its checkpoints; None before
            `claim`.
    """

    def __init__(self, path: Path, opened: int) -> None:
        self.run_id: str | None = None
        self._path, self._opened = path, opened
        self._claim: bytes | None = None

    def claim(self) -> None:
        """Write run.json with the id of the run and a new id for this start. If there is no id for
        the run yet, create one.

        Raises:
            CheckpointError: the folder was moved or removed.
            StorageError: a file system error.
        """
        self.require()
        self.run_id = run_id_of(self._path) or secrets.token_hex(8)
        text = json.dumps({"run_id": self.run_id, "start_id": secrets.token_hex(8)}) + "\n"
        write_file(self._path / RUN_NAME, text)
        self._claim = text.encode()

    def require(self) -> None:
        """Check that the folder still belongs to this process, and raise an error if it does not.

        Raises:
            CheckpointError: the folder was moved, removed or replaced, or another process has
                started a run in it. Another process can only start a run in the folder if the lock
                file was deleted, or if locks do not work on the file system.
            StorageError: a file system error during the check.
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
                f"run folder {self._path} was moved or removed during the run: move it back or "
                "set run.dir to its new path, then continue with --resume"
            )
        if found != self._claim:
            raise CheckpointError(
                f"run folder {self._path} was taken over by another process, which replaced its "
                f"{RUN_NAME}: stop other runs in the folder, then continue with --resume"
            )


@contextlib.contextmanager
def held(folder: Path, lock_name: str = _LOCK_NAME) -> Iterator[HeldFolder]:
    """Lock a run folder for the duration of the `with` block, because two processes that write to
    the same folder would destroy the run. If the folder does not exist, it is created.

    If the process ends for any reason, the operating system releases the lock. If nothing was
    written to the folder, the lock file and all folders created by this function are deleted on
    exit.

    Args:
        folder: the run folder.
        lock_name: name of the lock file in the run folder.

    Yields:
        The locked folder. Call its `require` method before each write.

    Raises:
        ConfigError: the path is a file.
        CheckpointError: another process has locked the folder.
        StorageError: the folder or the lock file can't be created.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"run.dir {folder} is a file: choose another run.dir")
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    is_new = not (folder / lock_name).exists()
    with storage_errors(folder):
        file = _locked(folder, lock_name)
    before = set(os.listdir(folder))
    # Keep the folder open while it is locked, so that its inode number can't be reused for a new
    # folder at the same path.
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


def is_held(folder: Path, lock_name: str = _LOCK_NAME) -> bool:
    """Return True if a run folder is locked by a process, which means that a run is active.

    Args:
        folder: the run folder.
        lock_name: name of the lock file in the run folder.
    """
    try:
        opened = os.open(folder / lock_name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        # If the lock is free, this check acquires it for a moment, and a run that starts at that
        # moment fails. Callers should therefore stop polling after the first False.
        fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(opened)
    return False


def _locked(folder: Path, lock_name: str) -> FileIO:
    """Create and lock the lock file. Return the open file.

    Raises:
        CheckpointError: another process holds the lock.
        StorageError: the folder can't be created.
    """
    # Try several times, because a process that is exiting may delete the lock file and the folder
    # between any two of these statements. If the folder can't be created at all, every attempt
    # fails.
    for left in range(_TRIES, 0, -1):
        try:
            # `make_folder` also syncs the folder's entry in its parent folder to the disk. Without
            # this, a crash could lose all files.
            make_folder(folder)
        except StorageError as error:
            if left == 1 or not isinstance(error.__cause__, FileNotFoundError):
                raise
            continue
        try:
            # O_NOFOLLOW prevents a symbolic link from creating the file elsewhere. O_NONBLOCK
            # prevents waiting for the other end of a named pipe.
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

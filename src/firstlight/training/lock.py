"""One process at a time in a run folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path

from firstlight.errors import CheckpointError, ConfigError
from firstlight.files.atomic import storage_errors

_LOCK_NAME = ".lock"


@contextlib.contextmanager
def held(folder: Path) -> Iterator[Callable[[], None]]:
    """Hold the run folder, which is made if need be: two processes writing to one run would ruin
    it. The lock goes with the process, however it ends.

    A folder, or a lock in it, that was made for this is taken away again if nothing was written.

    Yields:
        a function to call before anything is written into the folder: it raises a CheckpointError
        if the folder was moved, removed or replaced by another, which the lock does not prevent.

    Raises:
        ConfigError: it is a file.
        CheckpointError: another process holds it.
        StorageError: it can't be made.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"run.dir {folder} is a file: choose another run.dir")
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    is_new = not (folder / _LOCK_NAME).exists()
    with storage_errors(folder):
        file = _locked(folder)
    before = set(os.listdir(folder))
    # Held open, so that its inode number is not given to a folder that takes its place.
    opened = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    with file:
        try:
            yield lambda: _require_same(folder, opened)
        finally:
            os.close(opened)
            with contextlib.suppress(OSError):
                if is_new and set(os.listdir(folder)) == before:
                    (folder / _LOCK_NAME).unlink()
                    for path in made:
                        path.rmdir()


def _require_same(folder: Path, opened: int) -> None:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if os.path.samestat(os.fstat(opened), os.stat(folder)):
            return
    raise CheckpointError(
        f"run folder {folder} was moved or removed while the run wrote into it: put it back under "
        "this name, or name its new place as run.dir, and go on with --resume"
    )


def _locked(folder: Path) -> FileIO:
    """The lock's file, open and locked."""
    while True:
        # Whoever held it may take it away again at any moment until it is ours.
        folder.mkdir(parents=True, exist_ok=True)
        try:
            # Not through a link, which would make a file elsewhere, and without waiting for
            # whoever reads a pipe.
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            file = open(os.open(folder / _LOCK_NAME, flags, 0o666), "rb", buffering=0)  # noqa: SIM115
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise CheckpointError(f"run folder {folder} is in use by another process") from None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), os.stat(folder / _LOCK_NAME)):
                return file
        file.close()

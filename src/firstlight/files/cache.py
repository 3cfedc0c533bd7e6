"""Find the cache folder on this machine, and lock files in it if several processes share it.

The cache is $FIRSTLIGHT_CACHE if set, otherwise $XDG_CACHE_HOME/firstlight if set, otherwise
~/.cache/firstlight. It contains corpora downloaded from URLs (`data/remote.py`) and compiled
kernels. Models from the Hugging Face hub are stored in the cache of huggingface_hub instead
(`weights/hub.py`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from firstlight.console import say
from firstlight.errors import StorageError, describe_os_error
from firstlight.files.atomic import storage_errors


def cache_folder() -> Path:
    """Return the path of the cache folder."""
    if own := os.environ.get("FIRSTLIGHT_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "firstlight"


@contextlib.contextmanager
def held(path: Path, work: str, progress: bool) -> Iterator[None]:
    """Hold a lock in the cache during the `with` block. If another process holds the lock, wait for
    it.

    The lock (`flock`) is released at the end of the block, or by the kernel if the process ends.

    Args:
        path: the lock file, which is created if necessary and never deleted.
        work: description of the work that requires the lock. It completes the message "waiting for
            another process, which is ...".
        progress: True to print this message before waiting.

    Raises:
        StorageError: the lock file can't be created or locked.
    """
    with storage_errors(path):
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        file = open(os.open(path, flags, 0o666), "rb", buffering=0)  # noqa: SIM115
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if progress:
                say(f"waiting for another process, which is {work}")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            raise StorageError(f"{path} can't be locked: {describe_os_error(error)}") from error
        yield

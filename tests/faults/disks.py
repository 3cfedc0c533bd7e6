"""Disks that go wrong: put one in the place of the real one, and everything goes through it.

    with installed(FailingDisk(at=7)):
        save_checkpoint(...)

A `WatchedDisk` counts the calls that change the disk and keeps their names; what it does before
each is `before`, which its subclasses say. Calls of other threads count as well.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import threading
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import TypeVar

from firstlight.files import disk as seam
from firstlight.files.disk import Disk

#: The operations that take space, which a full disk refuses.
GROWING = frozenset({"create", "append", "write", "sync", "link", "make_folder", "sync_folder"})

_Some = TypeVar("_Some", bound=Disk)

_LIMITED = """
import resource, sys
limit = int(sys.argv.pop(1))
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
from firstlight.cli.main import main
sys.exit(main())
"""


def limited_command(limit: int, *arguments: str | Path) -> list[str]:
    """A process of the command line that can write no file larger than `limit` bytes."""
    return [sys.executable, "-c", _LIMITED, str(limit), *map(str, arguments)]


@contextlib.contextmanager
def installed(disk: _Some) -> Iterator[_Some]:
    """Everything that is written inside goes through `disk`."""
    before = seam.disk
    seam.disk = disk
    try:
        yield disk
    finally:
        seam.disk = before


class WatchedDisk(Disk):
    """The real disk, with its calls counted.

    Attributes:
        calls: the name of each call so far, and the name of the file or folder it is about.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self._lock = threading.Lock()

    @property
    def operations(self) -> list[str]:
        """The name of each call so far."""
        return [operation for operation, _ in self.calls]

    def before(self, operation: str, name: str, number: int) -> None:
        """Called before each call.

        Args:
            name: of the file or folder that it is about.
            number: of the call, counted from 1.
        """

    def _count(self, operation: str, name: str | Path) -> None:
        name = Path(name).name
        with self._lock:
            self.calls.append((operation, name))
            number = len(self.calls)
        self.before(operation, name, number)

    def create(self, path: Path) -> FileIO:
        self._count("create", path)
        return super().create(path)

    def append(self, path: Path) -> FileIO:
        self._count("append", path)
        return super().append(path)

    def write(self, file: FileIO, data: bytes | bytearray | memoryview) -> int:
        self._count("write", str(file.name))
        return super().write(file, data)

    def sync(self, file: FileIO) -> None:
        self._count("sync", str(file.name))
        super().sync(file)

    def truncate(self, file: FileIO, size: int) -> None:
        self._count("truncate", str(file.name))
        super().truncate(file, size)

    def rename(self, source: Path, target: Path) -> None:
        self._count("rename", source)
        super().rename(source, target)

    def link(self, source: Path, target: Path) -> None:
        self._count("link", source)
        super().link(source, target)

    def unlink(self, path: Path) -> None:
        self._count("unlink", path)
        super().unlink(path)

    def make_folder(self, path: Path) -> None:
        self._count("make_folder", path)
        super().make_folder(path)

    def remove_folder(self, path: Path) -> None:
        self._count("remove_folder", path)
        super().remove_folder(path)

    def sync_folder(self, path: Path) -> None:
        self._count("sync_folder", path)
        super().sync_folder(path)


class FailingDisk(WatchedDisk):
    """Refuses the call with the number `at`, or all growing ones from it on.

    Args:
        at: counted from 1; 0 refuses none.
        number: of the error, such as ENOSPC or EIO.
        lasting: from `at` on no call that takes space is let through, as on a disk that is full
            until somebody frees some; deleting and renaming go on.
        only: the operations that count; all if empty.

    Attributes:
        refused: how many calls were.
    """

    def __init__(
        self,
        at: int,
        number: int = errno.ENOSPC,
        *,
        lasting: bool = False,
        only: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__()
        self.refused = 0
        self._at, self._number, self._lasting, self._only = at, number, lasting, only
        self._counted = 0

    def before(self, operation: str, name: str, number: int) -> None:
        if self._only and operation not in self._only:
            return
        self._counted += 1
        later = self._lasting and 0 < self._at < self._counted and operation in GROWING
        if self._counted == self._at or later:
            self.refused += 1
            raise OSError(self._number, os.strerror(self._number))


class CrashError(BaseException):
    """Ends whatever is going on, as far as can be done within one process."""


class CrashingDisk(WatchedDisk):
    """From the call with the number `at` on, nothing reaches the disk any more: each raises
    `CrashError`, those that would clean up as well. What is there then is what a process that is
    killed before that call leaves."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self._at = at

    def before(self, operation: str, name: str, number: int) -> None:
        if number >= self._at:
            raise CrashError(f"call {number}: {operation} {name}")


class KillingDisk(WatchedDisk):
    """Ends this process with SIGKILL before a call.

    Args:
        at: the number of that call, counted from 1 among those that count; 0 never.
        only: the operations that count; all if empty.
        about: those count whose file's or folder's name has this in it.
        half: the call is a write, and takes half of its bytes first.

    Attributes:
        armed: while False, no call counts.
    """

    def __init__(
        self, at: int, only: frozenset[str] = frozenset(), about: str = "", *, half: bool = False
    ) -> None:
        super().__init__()
        self.armed = True
        self._at, self._half, self._about = at, half, about
        self._only = frozenset({"write"}) if half else only
        self._counted = 0

    def before(self, operation: str, name: str, number: int) -> None:
        if not self._half and self._is_due(operation, name):
            os.kill(os.getpid(), signal.SIGKILL)

    def write(self, file: FileIO, data: bytes | bytearray | memoryview) -> int:
        if self._half and self._is_due("write", Path(str(file.name)).name):
            Disk.write(self, file, memoryview(data)[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return super().write(file, data)

    def _is_due(self, operation: str, name: str) -> bool:
        counts = not self._only or operation in self._only
        if not (self.armed and counts and self._about in name):
            return False
        with self._lock:
            self._counted += 1
            return self._counted == self._at


class ShortDisk(WatchedDisk):
    """Takes at most `most` bytes at a time; once it has taken `room` of them, it is full.

    Args:
        room: None: it is never full.
    """

    def __init__(self, most: int, room: int | None = None) -> None:
        super().__init__()
        self._most, self._room = most, room

    def write(self, file: FileIO, data: bytes | bytearray | memoryview) -> int:
        count = min(self._most, len(data))
        if self._room is not None:
            count = min(count, self._room)
            if not count:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._room -= count
        return super().write(file, memoryview(data)[:count])


class Unsynced(WatchedDisk):
    """The calls that sync count, but nothing waits for a real disk."""

    def sync(self, file: FileIO) -> None:
        self._count("sync", str(file.name))

    def sync_folder(self, path: Path) -> None:
        self._count("sync_folder", path)


class UnsyncedCrashing(Unsynced, CrashingDisk):
    """A `CrashingDisk` that nothing waits for."""


class UnsyncedFailing(Unsynced, FailingDisk):
    """A `FailingDisk` that nothing waits for."""

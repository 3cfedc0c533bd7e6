"""The seam: everything that firstlight does to the disk goes through the one object `disk`."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Self

#: Smaller writes are gathered up to this number of bytes.
_GATHERED_BYTES = 1 << 20


class Disk:
    """Firstlight's operations on the disk: one method for each system call.

    Tests put another object in the place of `disk`, which counts the calls, refuses one, writes
    only a part, or ends the process. All may raise OSError.
    """

    def create(self, path: Path) -> FileIO:
        """Open a file for writing that is not there yet."""
        return open(path, "xb", buffering=0)

    def append(self, path: Path) -> FileIO:
        """Open a file for writing at its end; make it if it is missing."""
        return open(path, "ab", buffering=0)

    def write(self, file: FileIO, data: bytes | bytearray | memoryview) -> int:
        """Write bytes; return the number of written bytes, which may be smaller."""
        return file.write(data)

    def sync(self, file: FileIO) -> None:
        """Force a file's bytes to the disk."""
        os.fsync(file.fileno())

    def truncate(self, file: FileIO, size: int) -> None:
        """Cut a file to `size` bytes."""
        os.ftruncate(file.fileno(), size)

    def rename(self, source: Path, target: Path) -> None:
        """Give a file or folder another name; a file or an empty folder there is replaced."""
        os.replace(source, target)

    def link(self, source: Path, target: Path) -> None:
        """Give a file another name, which must be free."""
        os.link(source, target, follow_symlinks=False)

    def unlink(self, path: Path) -> None:
        """Delete a file."""
        os.unlink(path)

    def make_folder(self, path: Path) -> None:
        """Make one folder."""
        path.mkdir()

    def remove_folder(self, path: Path) -> None:
        """Delete an empty folder."""
        os.rmdir(path)

    def sync_folder(self, path: Path) -> None:
        """Force a folder's entries (new names, renames) to the disk."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


#: The one that is used.
disk = Disk()


class OutputFile:
    """A new file, written from front to back: on the disk when the `with` block ends well.

    When the block raises, the file stays as it is; the caller removes it.

    Attributes:
        path: the file's path.
        size: number of bytes written.

    Raises:
        OSError: raised by every method: the disk refuses, or the file is there already.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.size = path, 0
        self._file = disk.create(path)
        self._gathered = bytearray()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        with self._file:
            if error is None:
                self._write_gathered()
                # By the descriptor that wrote: others may not be told what failed meanwhile.
                disk.sync(self._file)

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        self.size += len(data)
        if len(self._gathered) + len(data) < _GATHERED_BYTES:
            self._gathered += data
            return
        self._write_gathered()
        _write_all(self._file, data)

    def write_over_start(self, data: bytes) -> None:
        """Replace the first bytes, as a header that counts what follows. Nothing may be written
        afterwards."""
        self._write_gathered()
        self._file.seek(0)
        _write_all(self._file, data)

    def _write_gathered(self) -> None:
        data, self._gathered = self._gathered, bytearray()
        _write_all(self._file, data)


class HashedFile(OutputFile):
    """An `OutputFile` with the SHA-256 of the bytes that were passed to it, not of those on the
    disk."""

    def __init__(self, path: Path) -> None:
        self._hash = hashlib.sha256()
        super().__init__(path)

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        self._hash.update(data)
        super().write(data)

    @property
    def sha256(self) -> str:
        """The sha256 of all bytes so far, in hexadecimal."""
        return self._hash.hexdigest()


class AppendedFile:
    """A file that grows by whole pieces: one that the disk takes only in part is taken back.

    Raises:
        OSError: raised by every method: the disk refuses.
    """

    def __init__(self, path: Path) -> None:
        is_new = not path.exists()
        self._file = disk.append(path)
        if is_new:
            with contextlib.ExitStack() as stack:
                stack.push(self._file)
                disk.sync_folder(path.parent)
                stack.pop_all()

    def append(self, data: bytes) -> None:
        """Append all of the bytes, or none."""
        size = os.fstat(self._file.fileno()).st_size
        try:
            _write_all(self._file, data)
        except BaseException:
            with contextlib.suppress(OSError):
                disk.truncate(self._file, size)
            raise

    def sync(self) -> None:
        """Write the appended bytes through to the disk."""
        disk.sync(self._file)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _write_all(file: FileIO, data: bytes | bytearray | memoryview) -> None:
    """Write all bytes, however few the disk takes at a time (an almost full one takes a part)."""
    rest = memoryview(data)
    while rest:
        taken = disk.write(file, rest)
        if not taken:
            raise OSError(errno.EIO, "the disk takes nothing", file.name)
        rest = rest[taken:]

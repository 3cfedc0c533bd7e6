"""Define the operations that write to the file system. All files are written through the `disk`
object, which tests replace to simulate errors.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Self

#: Size in bytes of the buffer that collects small writes.
_GATHERED_BYTES = 1 << 20


class Disk:
    """Operations that write to the file system, with one method per system call.

    Tests replace `disk` with an object that counts calls, makes a call fail, writes only some of
    the bytes, or ends the process. All methods may raise OSError.
    """

    def create(self, path: Path) -> FileIO:
        """Create a new file for writing; it must not exist yet."""
        return open(path, "xb", buffering=0)

    def append(self, path: Path) -> FileIO:
        """Open a file for appending; create it if it does not exist."""
        return open(path, "ab", buffering=0)

    def write(self, file: FileIO, data: bytes | bytearray | memoryview) -> int:
        """Write bytes to a file. Return the number of bytes written, which may be less than the
        length of `data`.
        """
        return file.write(data)

    def sync(self, file: FileIO) -> None:
        """Sync a file's bytes to the disk."""
        os.fsync(file.fileno())

    def truncate(self, file: FileIO, size: int) -> None:
        """Truncate a file to `size` bytes."""
        os.ftruncate(file.fileno(), size)

    def rename(self, source: Path, target: Path) -> None:
        """Rename a file or folder. Replace any file or empty folder at `target`."""
        os.replace(source, target)

    def link(self, source: Path, target: Path) -> None:
        """Create a hard link to a file; `target` must not exist yet."""
        os.link(source, target, follow_symlinks=False)

    def unlink(self, path: Path) -> None:
        """Delete a file."""
        os.unlink(path)

    def make_folder(self, path: Path) -> None:
        """Create a folder. Its parent folder must exist."""
        path.mkdir()

    def remove_folder(self, path: Path) -> None:
        """Delete an empty folder."""
        os.rmdir(path)

    def sync_folder(self, path: Path) -> None:
        """Sync the entries of a folder to the disk, so that new and renamed files are not lost."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


#: The `Disk` instance that all modules use.
disk = Disk()


class OutputFile:
    """A new file that is written sequentially and synced to the disk when the `with` block ends
    without an error.

    If the block raises an error, the incomplete file remains, and the caller must remove it.

    Attributes:
        path: path of the file.
        size: number of bytes written.

    Raises:
        OSError: a file system error in any method, or the file already exists.
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
                # Sync through the descriptor used for writing, because Linux may report errors in
                # writing back cached data only to descriptors that were open when the error
                # occurred.
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
        """Overwrite the beginning of the file, for example a header that contains the length of the
        data. No data can be written to the file after this call.
        """
        self._write_gathered()
        self._file.seek(0)
        _write_all(self._file, data)

    def _write_gathered(self) -> None:
        data, self._gathered = self._gathered, bytearray()
        _write_all(self._file, data)


class HashedFile(OutputFile):
    """An `OutputFile` that computes the SHA-256 of all bytes written to it. The file on the disk
    can be verified against this hash.
    """

    def __init__(self, path: Path) -> None:
        self._hash = hashlib.sha256()
        super().__init__(path)

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        self._hash.update(data)
        super().write(data)

    @property
    def sha256(self) -> str:
        """Hexadecimal SHA-256 of all bytes written so far."""
        return self._hash.hexdigest()


class AppendedFile:
    """A file to which records are appended. If only a part of a record could be written, this part
    is removed.

    Raises:
        OSError: a file system error in any method.
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
        """Append either all of the bytes or none of them."""
        size = os.fstat(self._file.fileno()).st_size
        try:
            _write_all(self._file, data)
        except BaseException:
            with contextlib.suppress(OSError):
                disk.truncate(self._file, size)
            raise

    def sync(self) -> None:
        """Sync the appended bytes to the disk."""
        disk.sync(self._file)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _write_all(file: FileIO, data: bytes | bytearray | memoryview) -> None:
    """Write all bytes. The system may write only some of them in a call, for example because the
    disk is almost full, so repeat the call until all are written.
    """
    rest = memoryview(data)
    while rest:
        taken = disk.write(file, rest)
        if not taken:
            raise OSError(errno.EIO, "the disk is not accepting any more data", file.name)
        rest = rest[taken:]

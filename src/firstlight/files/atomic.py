"""Write files and folders atomically, and read complete files and JSON.

A file or folder is written under a temporary name in its final parent folder, synced and then
renamed, so readers never see an incomplete file under the final name. Temporary files are removed
after a failure. All writes go through the `disk` object in disk.py.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import re
import secrets
import stat
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from firstlight.errors import FirstlightError, InputError, StorageError, describe_os_error
from firstlight.files import disk as seam
from firstlight.files.disk import HashedFile, OutputFile

_TEMPORARY_PREFIX = ".tmp-"

#: Block size for copying, in bytes.
_COPIED_BYTES = 1 << 20

#: Maximum size of a JSON file in bytes. The largest known files are tensor indexes of 10 MB.
MAX_JSON_BYTES = 1 << 24
#: Maximum number of lists and objects in a JSON file. A list or object takes about 25 times as many
#: bytes in memory as in the file. The largest tokenizers store merges as lists and contain 600,000
#: of them.
_MAX_JSON_VALUES = 1_000_000


@contextlib.contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Convert an `OSError` that is raised in the `with` block to a `StorageError` with a readable
    message.

    Args:
        path: path that is being written. The message names this path if the error does not include
            one, for example when the disk is full.
    """
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise StorageError(describe_os_error(error)) from error


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[OutputFile]:
    """Open a temporary file that replaces `path` atomically if the `with` block ends without an
    error.

    Raises:
        StorageError: a file system error occurred, or `path` exists and is not a regular file. In
            both cases, `path` is unchanged.
    """
    with storage_errors(path):
        # Never replace a device such as /dev/null, because this would break other programs.
        if path.exists() and not path.is_file():
            raise StorageError(
                f"{path} is not a regular file and can't be replaced: choose another name"
            )
        temporary = _temporary_name(path)
        try:
            with OutputFile(temporary) as file:
                yield file
            seam.disk.rename(temporary, path)
        except BaseException:
            _remove(temporary)
            raise
        seam.disk.sync_folder(path.parent)


def write_file(path: Path, content: bytes | str) -> None:
    """Write `content` to `path` atomically, with text encoded as UTF-8. Missing parent folders are
    created.

    Raises:
        StorageError: a file system error occurred; the old file is unchanged.
    """
    make_folder(path.parent)
    with replacing(path) as file:
        file.write(content.encode("utf-8") if isinstance(content, str) else content)


def json_text(value: Any) -> str:
    """Return `value` as indented JSON with a final newline.

    Raises:
        ValueError: `value` contains a NaN or an infinity.
    """
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically. Raise a ValueError for NaN and infinity."""
    write_file(path, json_text(value))


@contextlib.contextmanager
def new_folder(
    path: Path, *, replace: bool = False, aside: Path | None = None, synced: bool = False
) -> Iterator[Path]:
    """Create an empty temporary folder that becomes `path` if the `with` block ends without an
    error.

    Every file in the temporary folder is synced before the folder is renamed. If the block raises
    an error, the temporary folder is removed and `path` is not created. Leftovers of a killed
    process are removed by the next call for the same `path`.

    Args:
        path: the folder's final path, which must not exist or must be an empty folder.
        replace: True to allow `path` to be a non-empty folder. The old folder is kept until the new
            one is complete.
        aside: path to which an existing folder at `path` is renamed; None to delete that folder.
        synced: True if the caller syncs all files itself, as `OutputFile` does.

    Raises:
        StorageError: a file system error occurred, or `path` is not empty, is a mount point, or is
            the current folder.
    """
    with storage_errors(path):
        # If `path` is a symbolic link to a folder, keep the link and replace its target.
        path = Path(os.path.realpath(path))
        # A mount point can't be replaced. The current folder must not be replaced either, because
        # the user's shell would remain in the old folder.
        if os.path.ismount(path):
            raise StorageError(f"{path} is a mount point: choose a folder inside it")
        if path.is_dir() and os.path.samefile(path, os.curdir):
            raise StorageError(f"{path} is the current folder: choose a folder inside it")
        made_parents = _missing(path.parent)
        _remove_abandoned(path)
        temporary = _temporary_name(path)
        try:
            make_folder(temporary)
            with _locked(temporary):
                yield temporary
                _sync_tree(temporary, files=not synced)
                if replace and path.is_dir():
                    _swap(temporary, path, aside)
                else:
                    seam.disk.rename(temporary, path)
        except BaseException:
            _remove(temporary)
            for folder in made_parents:
                with contextlib.suppress(OSError):
                    seam.disk.remove_folder(folder)
            raise
        seam.disk.sync_folder(path.parent)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Hold a lock on a folder during the `with` block. Yield False if the lock is not available.

    The lock is released when the process ends. On a file system that does not support locks, the
    lock is never available, so no folder is considered abandoned.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


def _remove_abandoned(path: Path) -> None:
    """Delete temporary folders for `path` that killed processes left behind."""
    name = re.compile(rf"{re.escape(_TEMPORARY_PREFIX + path.name)}-[0-9a-f]{{8}}")
    for folder in path.parent.glob(f"{_TEMPORARY_PREFIX}*"):
        with contextlib.suppress(OSError):
            if name.fullmatch(folder.name) is None:
                continue  # This temporary folder is for a different path, such as NAME-2.
            # Keep an empty folder, because another process may have just created it and not locked
            # it yet.
            if any(folder.iterdir()):
                with _locked(folder) as abandoned:
                    if abandoned:
                        _remove(folder)


def _sync_tree(folder: Path, *, files: bool) -> None:
    """Sync a folder and its subfolders to the disk. If `files` is True, also sync the files in
    them.
    """
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir():
            seam.disk.sync_folder(path)
        elif files and path.is_file():
            with open(path, "rb", buffering=0) as file:
                seam.disk.sync(file)
    seam.disk.sync_folder(folder)


def _swap(new: Path, path: Path, aside: Path | None) -> None:
    """Replace the folder `path` with the folder `new`. Rename the old folder to `aside`, or delete
    it if `aside` is None.
    """
    # Use a name that `_remove_abandoned` does not match, because this is the only complete folder
    # if the process is killed between the two renames.
    old = _temporary_name(path.with_name(f"{path.name}-aside")) if aside is None else aside
    seam.disk.rename(path, old)
    try:
        seam.disk.rename(new, path)
    except BaseException:
        seam.disk.rename(old, path)
        raise
    if aside is None:
        # Sync the renames before deleting the old folder. Otherwise, a power failure could undo the
        # renames but not the deletion.
        seam.disk.sync_folder(path.parent)
        _remove(old)


def make_folder(path: Path) -> None:
    """Create a folder and its parents if they do not exist, and sync the new folder entries to the
    disk.

    Raises:
        StorageError: a file system error.
    """
    with storage_errors(path):
        for folder in reversed(_missing(path)):
            try:
                seam.disk.make_folder(folder)
            except FileExistsError:
                if not folder.is_dir():
                    raise
            seam.disk.sync_folder(folder.parent)


def remove_folder(path: Path) -> None:
    """Delete a folder atomically, even if the power fails. The folder is first renamed to a
    temporary name, and then its files are deleted.

    Raises:
        StorageError: a file system error.
    """
    aside = _temporary_name(path)
    with storage_errors(path):
        seam.disk.rename(path, aside)
        seam.disk.sync_folder(path.parent)
    _remove(aside)


def remove_file(path: Path) -> None:
    """Delete a file, if it exists.

    Raises:
        StorageError: a file system error.
    """
    with storage_errors(path), contextlib.suppress(FileNotFoundError):
        seam.disk.unlink(path)


def link_files(source: Path, target: Path) -> None:
    """Hard-link the files of a folder, including subfolders, into another folder. A file that can't
    be linked, for example because it is on another disk, is copied.

    Raises:
        StorageError: a file system error.
    """
    with storage_errors(target):
        for path in sorted(source.iterdir()):
            other = target / path.name
            if path.is_dir():
                make_folder(other)
                link_files(path, other)
                continue
            try:
                seam.disk.link(path, other)
            except OSError:
                with open(path, "rb") as original, OutputFile(other) as copy:
                    while block := original.read(_COPIED_BYTES):
                        copy.write(block)


def set_aside(path: Path) -> Path:
    """Preserve a damaged file as NAME.damaged (or NAME.damaged-2 and so on if that name is taken)
    before it is replaced. Return the new path.

    The new path is a hard link, so the file also remains at the old path until it is replaced. The
    readable part of the file is therefore not lost if the process is killed before the file is
    replaced. If a hard link can't be created (`path` is not a file, or the file system does not
    support links), the file is renamed.

    Raises:
        StorageError: a file system error.
    """
    endings = itertools.chain((".damaged",), (f".damaged-{n}" for n in itertools.count(2)))
    names = (path.with_name(path.name + ending) for ending in endings)
    aside = next(name for name in names if not os.path.lexists(name))
    with storage_errors(path):
        linked = False
        if path.is_file():
            with contextlib.suppress(OSError):
                seam.disk.link(path, aside)
                linked = True
        if not linked:
            seam.disk.rename(path, aside)
        seam.disk.sync_folder(path.parent)
    return aside


def remove_leftovers(folder: Path) -> None:
    """Delete the temporary files and folders that killed processes left behind in `folder`.
    Subfolders are not searched.
    """
    for path in sorted(folder.glob(f"{_TEMPORARY_PREFIX}*")):
        _remove(path)


def _remove(path: Path) -> None:
    """Delete a file, or a folder with its contents. Errors are ignored, because anything that
    remains has a temporary name and will be deleted by the next call to `remove_leftovers`.
    """
    with contextlib.suppress(OSError):
        if path.is_symlink() or not path.is_dir():
            seam.disk.unlink(path)
            return
        for entry in sorted(path.iterdir()):
            _remove(entry)
        seam.disk.remove_folder(path)


def require_writable(folder: Path) -> None:
    """Raise an error if files can't be created in an existing folder.

    Raises:
        StorageError: a file could not be created; the message names `folder`.
    """
    probe = _temporary_name(folder / "probe")
    try:
        seam.disk.create(probe).close()
    except OSError as error:
        error.filename = str(folder)
        raise StorageError(describe_os_error(error)) from error
    finally:
        _remove(probe)


def write_probe(folder: Path, size: int) -> None:
    """Write a file, read it back from the disk, and delete it. This takes as long as saving a
    checkpoint of the same size, so callers can use it to predict how long a save takes.

    Args:
        folder: folder in which the file is written.
        size: size in bytes, a multiple of 16 MiB.

    Raises:
        StorageError: a file system error; the message names `folder`.
    """
    probe, block = _temporary_name(folder / "probe"), os.urandom(1 << 24)
    try:
        with storage_errors(folder):
            with HashedFile(probe) as file:
                for _ in range(size // len(block)):
                    file.write(block)
            forget_cached(probe)
            sha256_of(probe)
    finally:
        _remove(probe)


def require_free(path: Path, advice: str) -> None:
    """Raise an error if a folder can't be written to `path` without overwriting existing files.

    Raises:
        InputError: `path` exists and is not an empty folder; the message ends with `advice`.
    """
    if path.is_dir() and not any(path.iterdir()):
        return
    if path.exists() or path.is_symlink():
        raise InputError(f"folder {path} already exists and is not overwritten: {advice}")


def sha256_of(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def forget_cached(path: Path) -> None:
    """Drop the operating system's cached copy of a synced file, so that the next read comes from
    the disk. Do nothing on systems without `posix_fadvise`.
    """
    if hasattr(os, "posix_fadvise"):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_file(path: Path, max_bytes: int) -> bytes:
    """Return the content of a file.

    Args:
        max_bytes: maximum size in bytes. A larger file is rejected without being read.

    Raises:
        InputError: the file is missing, unreadable or too long, or the path is a folder, pipe or
            device.
    """
    try:
        # Without O_NONBLOCK, opening a named pipe would block until a process writes to it.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                kind = "a folder" if stat.S_ISDIR(found.st_mode) else "a pipe or device"
                raise InputError(f"{path} can't be read: it is {kind}")
            if found.st_size > max_bytes:
                raise InputError(f"{path} is longer than the limit of {max_bytes:,} bytes")
            with open(descriptor, "rb", closefd=False) as file:
                return file.read()
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        raise InputError(f"{path} does not exist") from None
    except OSError as error:
        raise InputError(f"{path} can't be read: {describe_os_error(error)}") from error


def plain_lines(text: str) -> str:
    """Replace "\\r\\n" and "\\r" with "\\n", as Python does when it reads text files."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_json(path: Path, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Read a JSON file. A file with more than `max_bytes` bytes is rejected without being read.

    Raises:
        InputError: the file is missing, unreadable, too large, not UTF-8 or not JSON; or it
            contains too many lists and objects, duplicate keys, or NaN or Infinity, which JSON does
            not allow.
    """
    return parse_json(path, read_file(path, max_bytes))


def read_json_object(
    path: Path, kind: type[FirstlightError], fault: str = "is not a JSON object"
) -> dict[str, Any]:
    """Read a JSON file that contains one object.

    Raises:
        kind: the file can't be read (see `read_json`), or its value is not an object. If the value
            is not an object, the message is `fault`.
    """
    try:
        value = read_json(path)
    except InputError as error:
        raise kind(str(error)) from error
    if not isinstance(value, dict):
        raise kind(f"{path} {fault}")
    return value


def parse_json(path: Path, content: bytes) -> Any:
    """Parse the content of a JSON file. Error messages name `path`.

    Raises:
        InputError: see `read_json`.
    """
    require_few_values(path, content)
    try:
        return json.loads(
            content.decode("utf-8"), object_pairs_hook=unique_keys, parse_constant=_refuse_constant
        )
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not valid JSON: {error}") from error


def require_few_values(path: Path, content: bytes) -> None:
    """Reject JSON that would take far more memory after parsing than the file takes on disk.

    Raises:
        InputError: the content contains too many lists and objects.
    """
    count = content.count(b"[") + content.count(b"{")
    if count > _MAX_JSON_VALUES:
        raise InputError(
            f"{path} contains {count:,} lists and objects, more than the limit of "
            f"{_MAX_JSON_VALUES:,}"
        )


def _refuse_constant(name: str) -> None:
    raise ValueError(f"JSON does not allow the number {name}")


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Reject duplicate keys in a JSON object, because JSON parsers disagree on which of the values
    to use. Pass this function as `object_pairs_hook` to `json.loads`.

    Raises:
        ValueError: a key occurs twice.
    """
    value = dict(pairs)
    if len(value) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"key {twice!r} occurs twice")
    return value


def _missing(path: Path) -> list[Path]:
    """Return those of `path` and its parent folders that do not exist yet. `path` comes first."""
    return [folder for folder in (path, *path.parents) if not folder.exists()]


def _temporary_name(path: Path) -> Path:
    """Return a random temporary name in the folder of `path`."""
    return path.with_name(f"{_TEMPORARY_PREFIX}{path.name}-{secrets.token_hex(4)}")

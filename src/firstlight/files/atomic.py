"""Atomic writing of files and folders, and reading of whole files and JSON.

A file or folder is written under a temporary name beside its final path, synced, and renamed, so
that a reader never sees an incomplete one under the final name. After a failure the temporary files
are removed. All writing goes through the object `disk` of disk.py.
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

#: Bytes that are copied at a time.
_COPIED_BYTES = 1 << 20

#: Largest accepted size of a JSON file; the largest known files, indexes of a model's tensors, have
#: 10 MB.
MAX_JSON_BYTES = 1 << 24
#: Largest accepted number of lists and objects in a JSON file, because each takes about 25 times
#: its bytes in memory. The largest tokenizers, whose merges are lists, have 600,000.
_MAX_JSON_VALUES = 1_000_000


@contextlib.contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """A context that turns an `OSError` into a `StorageError` with a readable message.

    Args:
        path: the path that is being written. The message names it if the error itself has no path,
            as when the disk is full.
    """
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise StorageError(describe_os_error(error)) from error


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[OutputFile]:
    """Yield a file that replaces `path` atomically if the block ends without an error.

    Raises:
        StorageError: a file system error, or `path` exists and is no regular file. `path` is
            unchanged.
    """
    with storage_errors(path):
        # Replacing a device such as /dev/null would break all programs.
        if path.exists() and not path.is_file():
            raise StorageError(f"{path} is no file that could be replaced: choose another name")
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
    """Write `content` (a text as UTF-8) to `path` atomically; missing folders are created.

    Raises:
        StorageError: a file system error; the old file is unchanged.
    """
    make_folder(path.parent)
    with replacing(path) as file:
        file.write(content.encode("utf-8") if isinstance(content, str) else content)


def json_text(value: Any) -> str:
    """`value` as indented JSON with a final newline.

    Raises:
        ValueError: `value` contains a NaN or an infinity.
    """
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically. NaN and infinity are refused."""
    write_file(path, json_text(value))


@contextlib.contextmanager
def new_folder(
    path: Path, *, replace: bool = False, aside: Path | None = None, synced: bool = False
) -> Iterator[Path]:
    """Yield an empty temporary folder that becomes `path` if the block ends without an error.

    Every file in it is synced before the rename. If the block raises, the temporary folder is
    removed and `path` does not appear. What a killed process left is removed by the next call for
    the same `path`.

    Args:
        path: the folder's final path; it must not exist, or be an empty folder.
        replace: True allows any folder at `path`, which stays until the new one is complete.
        aside: new name of an old folder at `path`; None deletes the old folder.
        synced: True if the caller syncs all files, as `OutputFile` does.

    Raises:
        StorageError: a file system error, or `path` is not empty, a mount point, or the current
            folder.
    """
    with storage_errors(path):
        # If `path` is a link to a folder, the link stays, and its target is replaced.
        path = Path(os.path.realpath(path))
        # A mount point can't be replaced; a user's shell would stay in the replaced folder.
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
    """Hold a folder's lock, which ends with the process; yield False if it could not be taken.

    On a file system without locks no process gets one, so that no folder counts as abandoned.
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
    """Delete the temporary folders for `path` of processes that were killed."""
    name = re.compile(rf"{re.escape(_TEMPORARY_PREFIX + path.name)}-[0-9a-f]{{8}}")
    for folder in path.parent.glob(f"{_TEMPORARY_PREFIX}*"):
        with contextlib.suppress(OSError):
            if name.fullmatch(folder.name) is None:
                continue  # of another folder, such as NAME-2
            # An empty folder may be one that another process has made and not locked yet.
            if any(folder.iterdir()):
                with _locked(folder) as abandoned:
                    if abandoned:
                        _remove(folder)


def _sync_tree(folder: Path, *, files: bool) -> None:
    """Sync a folder and the folders in it to the disk, and with `files` also their files."""
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir():
            seam.disk.sync_folder(path)
        elif files and path.is_file():
            with open(path, "rb", buffering=0) as file:
                seam.disk.sync(file)
    seam.disk.sync_folder(folder)


def _swap(new: Path, path: Path, aside: Path | None) -> None:
    """Rename the folder `new` to `path`; rename the old folder to `aside`, or delete it if None."""
    # Under a name that `_remove_abandoned` does not know: after a kill between the two renames, it
    # is the only complete folder.
    old = _temporary_name(path.with_name(f"{path.name}-aside")) if aside is None else aside
    seam.disk.rename(path, old)
    try:
        seam.disk.rename(new, path)
    except BaseException:
        seam.disk.rename(old, path)
        raise
    if aside is None:
        # Sync before deleting: a power failure could keep the deletions and lose the renames.
        seam.disk.sync_folder(path.parent)
        _remove(old)


def make_folder(path: Path) -> None:
    """Create a folder and its parents, unless they exist, and sync their entries to the disk.

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
    """Delete a folder atomically, also if the power fails: rename it to a temporary name, then
    delete its files.

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
    """Give the files of a folder a second name (a hard link) in another folder; a file that cannot
    be linked, as on another disk, is copied. Subfolders are included.

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
    """Keep a damaged file as NAME.damaged (NAME.damaged-2 and so on if that exists) before it is
    replaced; return the new path.

    The file gets a second name (a hard link), so that if the process is killed before the
    replacement, its readable part is still at the old path. If there can be no hard link (`path` is
    no file, or the file system has none), it is renamed.

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
    """Delete temporary files and folders of killed processes directly inside `folder`."""
    for path in sorted(folder.glob(f"{_TEMPORARY_PREFIX}*")):
        _remove(path)


def _remove(path: Path) -> None:
    """Delete a file, or a folder with its contents. Errors are ignored: remaining files have a
    temporary name, and the next `remove_leftovers` deletes them."""
    with contextlib.suppress(OSError):
        if path.is_symlink() or not path.is_dir():
            seam.disk.unlink(path)
            return
        for entry in sorted(path.iterdir()):
            _remove(entry)
        seam.disk.remove_folder(path)


def require_writable(folder: Path) -> None:
    """Refuse an existing folder in which no file can be created.

    Raises:
        StorageError: creating a file failed; the message names `folder`.
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
    """Write a file, read it back from the disk, and delete it, which takes as long as a checkpoint
    of this size.

    Args:
        folder: where the file is written.
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
    """Refuse to overwrite something: `path` must not exist or be an empty folder.

    Raises:
        InputError: `path` exists; the message ends with `advice`.
    """
    if path.is_dir() and not any(path.iterdir()):
        return
    if path.exists() or path.is_symlink():
        raise InputError(f"folder {path} exists already and is not overwritten: {advice}")


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def forget_cached(path: Path) -> None:
    """Drop the operating system's cached copy of a synced file, so that the next reading comes from
    the disk. Does nothing on a system without `posix_fadvise`."""
    if hasattr(os, "posix_fadvise"):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_file(path: Path, max_bytes: int) -> bytes:
    """The content of a file.

    Args:
        max_bytes: largest accepted size in bytes; a longer file is not read.

    Raises:
        InputError: the file is missing, unreadable, too long, or a folder, pipe or device.
    """
    try:
        # Without O_NONBLOCK, opening a named pipe would wait for a process that writes into it.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                kind = "a folder" if stat.S_ISDIR(found.st_mode) else "a pipe or device"
                raise InputError(f"{path} can't be read: it is {kind}")
            if found.st_size > max_bytes:
                raise InputError(f"{path} is longer than the {max_bytes:,} bytes it may have")
            with open(descriptor, "rb", closefd=False) as file:
                return file.read()
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        raise InputError(f"{path} does not exist") from None
    except OSError as error:
        raise InputError(f"{path} can't be read: {describe_os_error(error)}") from error


def plain_lines(text: str) -> str:
    """A text with "\\r\\n" and "\\r" replaced by "\\n", as Python does in text files."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_json(path: Path, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Read a JSON file; a file of more than `max_bytes` bytes is refused unread.

    Raises:
        InputError: the file is missing, unreadable, too long, not UTF-8 or not JSON, has too many
            lists and objects or a key twice, or has NaN or Infinity, which JSON does not allow.
    """
    return parse_json(path, read_file(path, max_bytes))


def read_json_object(
    path: Path, kind: type[FirstlightError], fault: str = "is not a JSON object"
) -> dict[str, Any]:
    """Read a JSON file that holds one object.

    Raises:
        kind: the file can't be read (see `read_json`), or has no object (message: `fault`).
    """
    try:
        value = read_json(path)
    except InputError as error:
        raise kind(str(error)) from error
    if not isinstance(value, dict):
        raise kind(f"{path} {fault}")
    return value


def parse_json(path: Path, content: bytes) -> Any:
    """The value of a JSON file from its bytes; error messages name `path`.

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
    """Refuse JSON that would take far more memory than the size of its file.

    Raises:
        InputError: the content has too many lists and objects.
    """
    count = content.count(b"[") + content.count(b"{")
    if count > _MAX_JSON_VALUES:
        raise InputError(
            f"{path} holds {count:,} lists and objects, more than the {_MAX_JSON_VALUES:,} that "
            "are read"
        )


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A hook of `json.loads` that refuses duplicate keys: programs differ in which value they use.

    Raises:
        ValueError: a key is given twice.
    """
    value = dict(pairs)
    if len(value) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"key {twice!r} is given twice")
    return value


def _missing(path: Path) -> list[Path]:
    """`path` and the folders above it that do not exist yet, innermost first."""
    return [folder for folder in (path, *path.parents) if not folder.exists()]


def _temporary_name(path: Path) -> Path:
    """A random temporary name in the folder of `path`."""
    return path.with_name(f"{_TEMPORARY_PREFIX}{path.name}-{secrets.token_hex(4)}")

"""Files and folders that are whole, or not there.

A file or folder appears under its final name only when it is complete and on the disk:
it is written under a temporary name beside it, synced, and renamed. After a failure the temporary
files are removed, so that a reader never sees an incomplete file.

All of it goes through the seam of disk.py.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import secrets
import stat
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from firstlight.errors import FirstlightError, InputError, StorageError, describe_os_error
from firstlight.files import disk as seam
from firstlight.files.disk import OutputFile

_TEMPORARY_PREFIX = ".tmp-"

#: Greatest size of a JSON file: the largest known ones, lists of a model's tensors, have 10 MB.
MAX_JSON_BYTES = 1 << 24
#: Lists and objects in a JSON file, each of which takes some 25 times its bytes in memory. The
#: largest tokenizers, whose merges are lists, have 600,000.
_MAX_JSON_VALUES = 1_000_000


@contextlib.contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn an `OSError` of the operating system into a `StorageError` for people.

    Args:
        path: the path that is being written; named if the error itself names none, as when a
            disk fills up.
    """
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise StorageError(describe_os_error(error)) from error


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[OutputFile]:
    """Yield a file that becomes `path` when the block ends well, atomically: a reader sees the
    old file or the new one.

    Raises:
        StorageError: the disk is full, read-only or not permitted, or the path is not a file; it
            stays as it is.
    """
    with storage_errors(path):
        # A device such as /dev/null would be replaced for all programs.
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
    """Replace `path` by `content`, atomically; missing folders are made.

    Raises:
        StorageError: the disk is full, read-only or not permitted; the old file stands.
    """
    make_folder(path.parent)
    with replacing(path) as file:
        file.write(content.encode("utf-8") if isinstance(content, str) else content)


def json_text(value: Any) -> str:
    """`value` as indented JSON.

    Raises:
        ValueError: the value has a NaN or an infinity.
    """
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically. NaN and infinity are refused."""
    write_file(path, json_text(value))


@contextlib.contextmanager
def new_folder(
    path: Path, *, replace: bool = False, aside: Path | None = None, synced: bool = False
) -> Iterator[Path]:
    """Yield an empty temporary folder that becomes `path` when the block ends well.

    Every file in it is synced before the rename. When the block raises, the temporary
    folder is removed and `path` does not appear. `path` may exist only as an empty folder;
    with `replace` it may hold anything, which stays until the new folder is complete.

    Args:
        aside: the new name of an old folder at `path`; None deletes the old folder.
        synced: all files are written by `OutputFile`, which syncs them.

    Raises:
        StorageError: the disk is full, read-only or not permitted, or `path` is not empty.
    """
    with storage_errors(path):
        # A link to a folder stays a link, and files are written to the disk that it leads to.
        path = Path(os.path.realpath(path))
        # Neither can be renamed over: the one not at all, the other not under a shell's feet.
        if os.path.ismount(path):
            raise StorageError(f"{path} is a mount point: choose a folder inside it")
        if path.is_dir() and os.path.samefile(path, os.curdir):
            raise StorageError(f"{path} is the current folder: choose a folder inside it")
        made_parents = _missing(path.parent)
        temporary = _temporary_name(path)
        try:
            make_folder(temporary)
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


def _sync_tree(folder: Path, *, files: bool) -> None:
    """Force a folder and the folders in it to the disk, and their files."""
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir():
            seam.disk.sync_folder(path)
        elif files and path.is_file():
            with open(path, "rb", buffering=0) as file:
                seam.disk.sync(file)
    seam.disk.sync_folder(folder)


def _swap(new: Path, path: Path, aside: Path | None) -> None:
    """Put the folder `new` where the folder `path` is, and that aside, or away."""
    old = _temporary_name(path) if aside is None else aside
    seam.disk.rename(path, old)
    try:
        seam.disk.rename(new, path)
    except BaseException:
        seam.disk.rename(old, path)
        raise
    if aside is None:
        # First, because a power cut may keep deletions and lose the renames.
        seam.disk.sync_folder(path.parent)
        _remove(old)


def make_folder(path: Path) -> None:
    """Make a folder, and the folders above it, where they are missing.

    Raises:
        StorageError: the disk refuses.
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
    """Delete a folder so that it vanishes at once: renamed aside first, then emptied. That holds
    for a power cut as well.

    Raises:
        StorageError: the disk refuses.
    """
    aside = _temporary_name(path)
    with storage_errors(path):
        seam.disk.rename(path, aside)
        seam.disk.sync_folder(path.parent)
    _remove(aside)


def remove_file(path: Path) -> None:
    """Delete a file, if it is there.

    Raises:
        StorageError: the disk refuses.
    """
    with storage_errors(path), contextlib.suppress(FileNotFoundError):
        seam.disk.unlink(path)


def set_aside(path: Path) -> Path:
    """Keep a damaged file as NAME.damaged, or NAME.damaged-2 and so on if that exists, before it is
    replaced; return the new name.

    It has both names until then, so that a process that is killed in between leaves its readable
    part under the old name. A path that is not a file, and could not be replaced, is renamed; so is
    a file if the file system has no hard links.

    Raises:
        StorageError: the disk refuses.
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
    """Delete files that a killed process left half-written directly inside `folder`."""
    for path in sorted(folder.glob(f"{_TEMPORARY_PREFIX}*")):
        _remove(path)


def _remove(path: Path) -> None:
    """Delete a file, or a folder with all that is in it, as far as the disk lets it be done.

    Remaining files have a temporary name, and the next `remove_leftovers` deletes them.
    """
    with contextlib.suppress(OSError):
        if path.is_symlink() or not path.is_dir():
            seam.disk.unlink(path)
            return
        for entry in sorted(path.iterdir()):
            _remove(entry)
        seam.disk.remove_folder(path)


def require_free(path: Path, advice: str) -> None:
    """Refuse to write over something: `path` must be missing or an empty folder.

    Raises:
        InputError: `path` exists and holds something.
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
    """Have the next reading of a synced file come from the disk, not from memory, where the
    operating system can be asked for that."""
    if hasattr(os, "posix_fadvise"):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_file(path: Path, max_bytes: int) -> bytes:
    """The bytes of a file that is read whole.

    Args:
        max_bytes: a longer one is refused unread.

    Raises:
        InputError: the file is missing, unreadable, too long, or a folder, pipe or device.
    """
    try:
        # Opening a pipe waits until somebody writes into it.
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
    """A text with every kind of line end as "\\n", as Python reads text files."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_json(path: Path, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Read a JSON file; one of more than `max_bytes` is refused unread.

    Raises:
        InputError: the file is missing, unreadable, too long, not UTF-8, not JSON, gives a key
            twice, or has a NaN or an infinity, which JSON does not allow.
    """
    return parse_json(path, read_file(path, max_bytes))


def read_json_object(
    path: Path, kind: type[FirstlightError], fault: str = "is not a JSON object"
) -> dict[str, Any]:
    """Read a JSON file that holds one object.

    Raises:
        kind: the file can't be read, see `read_json`, or holds anything else, which `fault` says.
    """
    try:
        value = read_json(path)
    except InputError as error:
        raise kind(str(error)) from error
    if not isinstance(value, dict):
        raise kind(f"{path} {fault}")
    return value


def parse_json(path: Path, content: bytes) -> Any:
    """The value of a JSON file from its bytes; `path` is for messages.

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
    """Refuse JSON that would take far more memory than its file is long.

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
    raise ValueError(f"{name} is no number of JSON")


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The JSON object of these keys and values; programs differ in which of two values they take.

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
    """A name beside `path` that nobody else uses."""
    return path.with_name(f"{_TEMPORARY_PREFIX}{path.name}-{secrets.token_hex(4)}")

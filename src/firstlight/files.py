"""The one seam through which firstlight writes files.

A file or folder appears under its final name only when it is complete and on the disk:
it is written under a temporary name beside it, synced, and renamed. Whatever fails in
between is removed again, so that a reader never meets half of anything.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from firstlight.errors import InputError, StorageError, describe_os_error

_TEMPORARY_PREFIX = ".tmp-"


@contextlib.contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn an `OSError` of the operating system into a `StorageError` for people.

    Args:
        path: what is being written; named where the error itself names nothing, as when a
            disk fills up.
    """
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise StorageError(describe_os_error(error)) from error


def sync_file(path: Path) -> None:
    """Force a file's bytes to the disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Force a folder's entries (new names, renames) to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: Path, content: bytes | str) -> None:
    """Replace `path` by `content`, atomically: a reader sees the old file or the new one.

    Raises:
        StorageError: the disk is full, read-only or not permitted; the old file stands.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = _temporary_name(path)
        try:
            with open(temporary, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically. NaN and infinity are refused."""
    write_file(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


@contextlib.contextmanager
def new_folder(path: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield an empty temporary folder that becomes `path` when the block ends well.

    Every file in it is synced before the rename. When the block raises, the temporary
    folder is removed and `path` does not appear. `path` may exist only as an empty folder;
    with `replace` it may hold anything, which stays until the new folder is complete.

    Raises:
        StorageError: the disk is full, read-only or not permitted, or `path` is not empty.
    """
    with storage_errors(path):
        # A link to a folder stays a link, and what is written is on the disk it leads to.
        path = Path(os.path.realpath(path))
        # Neither can be renamed over: the one not at all, the other not under a shell's feet.
        if os.path.ismount(path):
            raise StorageError(f"{path} is a mount point: choose a folder inside it")
        if path.is_dir() and os.path.samefile(path, os.curdir):
            raise StorageError(f"{path} is the current folder: choose a folder inside it")
        made_parents = _missing_parents(path)
        temporary = _temporary_name(path)
        try:
            temporary.mkdir(parents=True)
            yield temporary
            for file in sorted(temporary.rglob("*")):
                if file.is_file():
                    sync_file(file)
            sync_folder(temporary)
            if replace and path.is_dir():
                _swap(temporary, path)
            else:
                os.rename(temporary, path)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            for folder in made_parents:
                with contextlib.suppress(OSError):
                    folder.rmdir()
            raise
        sync_folder(path.parent)


def _swap(new: Path, path: Path) -> None:
    """Put the folder `new` where the folder `path` is, and delete that."""
    aside = _temporary_name(path)
    os.rename(path, aside)
    try:
        os.rename(new, path)
    except BaseException:
        os.rename(aside, path)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def remove_folder(path: Path) -> None:
    """Delete a folder so that it vanishes at once: renamed aside first, then emptied."""
    aside = _temporary_name(path)
    with storage_errors(path):
        os.rename(path, aside)
        shutil.rmtree(aside, ignore_errors=True)


def remove_leftovers(folder: Path) -> None:
    """Delete what a killed process left half-written directly inside `folder`."""
    for path in folder.glob(f"{_TEMPORARY_PREFIX}*"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink()


def require_free(path: Path, what: str, advice: str) -> None:
    """Refuse to write over something: `path` must be missing or an empty folder.

    Raises:
        InputError: `path` exists and holds something.
    """
    if path.is_dir() and not any(path.iterdir()):
        return
    if path.exists() or path.is_symlink():
        raise InputError(f"{what} {path} exists already and is not overwritten: {advice}")


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        InputError: it is missing, unreadable, not UTF-8 or not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path} does not exist") from None
    except OSError as error:
        raise InputError(f"{path} can't be read: {describe_os_error(error)}") from error
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"{path} is not valid JSON: {error}") from error


def _missing_parents(path: Path) -> list[Path]:
    """The parents of `path` that do not exist yet, innermost first."""
    return [parent for parent in path.parents if not parent.exists()]


def _temporary_name(path: Path) -> Path:
    """A name beside `path` that nobody else uses."""
    return path.with_name(f"{_TEMPORARY_PREFIX}{path.name}-{secrets.token_hex(4)}")

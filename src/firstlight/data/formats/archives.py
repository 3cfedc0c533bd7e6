"""ZIP and tar archives of files that firstlight reads.

Each member is copied to a temporary folder, and is read like any other file, so that readers find
the files beside it. Links, devices, members whose names point out of the archive, and archives
inside the archive are left out. Of a damaged archive, the members before the damage are read.
"""

from __future__ import annotations

import importlib
import lzma
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple, cast

from firstlight.data.formats import UnreadableDocument
from firstlight.data.formats.registry import format_of
from firstlight.data.kinds import HEAD_BYTES, binary_file, kind_by_bytes, kind_of
from firstlight.data.opening import require_unpacked_size
from firstlight.data.records import read_documents
from firstlight.data.sources import by_ending, find_sources, unread_files
from firstlight.errors import FirstlightError, first_line

_SUFFIXES = tuple(".zip .tar .tgz .tbz2 .txz .tar.gz .tar.bz2 .tar.xz .tar.zst .7z .rar".split())
#: Files beside the chats in the exports of Slack, ChatGPT and Claude, which are not texts. Such an
#: export contains one of the first two files.
_CHATS = ("conversations.json", "channels.json")
_BESIDE_CHATS = (
    "channels.json users.json dms.json groups.json mpims.json canvases.json integration_logs.json "
    "user.json message_feedback.json model_comparisons.json shared_conversations.json "
    "projects.json memories.json chat.html".split()
)
#: Bytes that are unpacked at a time, and bytes that a member without content counts for, because
#: each member takes time to process.
_BLOCK_BYTES, _MEMBER_BYTES = 1 << 16, 1 << 10
_DAMAGE = (tarfile.TarError, zipfile.BadZipFile, EOFError, zlib.error, lzma.LZMAError)


class _Member(NamedTuple):
    """A file in an archive: its name, the reason why it is left out or "", and a function that
    opens it."""

    name: str
    problem: str
    open: Callable[[], IO[bytes] | None]


def read(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the place and the text of each document in an archive. The place begins with the name
    of the member. Pairs without text name the members that were left out.

    Raises:
        UnreadableDocument: the archive is damaged, unpacks to an implausible size for text, or is a
            document of another format.
    """
    damage = ""
    with tempfile.TemporaryDirectory(prefix="firstlight-") as folder:
        files: list[tuple[str, Path]] = []
        try:
            yield from _unpack(path, Path(folder), files)
        except _DAMAGE as error:
            damage = f"the archive is damaged: {error}"
        except (OSError, RuntimeError) as error:
            raise UnreadableDocument(f"it can't be unpacked: {error}") from error
        yield from _read(Path(folder), files)
    if damage:
        raise UnreadableDocument(damage)


def _unpack(path: Path, folder: Path, files: list[tuple[str, Path]]) -> Iterator[tuple[str, str]]:
    """Copy the members of an archive to a folder, and add their names and files to `files`. Yield
    the names of those that are left out, each with the reason and an empty text.

    Raises:
        OSError: see `require_unpacked_size`.
    """
    total = 0
    for name, problem, opened in _members(path):
        total += _MEMBER_BYTES
        require_unpacked_size(path, total)
        parts = PurePosixPath(name.replace("\\", "/")).parts
        if not problem and (
            not parts or parts[0][0] == "/" or parts[0][1:2] == ":" or ".." in parts
        ):
            problem = "its name points out of the archive"
        elif not problem and name.lower().endswith(_SUFFIXES):
            problem = "an archive inside an archive: unpack it"
        # macOS and Word add hidden files, which a person never sees.
        is_hidden = any(part.startswith((".", "~$", "__MACOSX")) for part in parts)
        if problem or is_hidden:
            yield from [(f"{name}: {problem}", "")] if problem else []
            continue
        try:
            file = _new_file(folder, parts, len(files))
            with cast("IO[bytes]", opened()) as content, file.open("wb") as out:
                while block := content.read(_BLOCK_BYTES):
                    total += len(block)
                    require_unpacked_size(path, total)
                    out.write(block)
            files.append((name, file))
        except (*_DAMAGE, NotImplementedError) as error:
            yield f"{name}: it is damaged ({error})", ""


def _new_file(folder: Path, parts: tuple[str, ...], number: int) -> Path:
    """Create a file for a member of an archive, if possible under its own name."""
    file = folder.joinpath("named", *parts)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(exist_ok=False)
    except OSError:  # The name is too long, or another member has this name or is below it.
        file = folder / "numbered" / str(number) / parts[-1][-50:]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    return file


def _members(path: Path) -> Iterator[_Member]:
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            if {"[Content_Types].xml", "mimetype"} & set(archive.namelist()):
                with path.open("rb") as file:
                    kind = kind_by_bytes(file.read(HEAD_BYTES))
                if kind is not None and ".zip" not in kind.endings:
                    raise UnreadableDocument(binary_file(path, kind))
            for entry in archive.infolist():
                if not entry.is_dir():
                    # The upper 16 bits are the Unix mode. 0o12 is the type of a link.
                    problem = "a link" if entry.external_attr >> 28 == 0o12 else ""
                    problem = "encrypted: unpack it" if entry.flag_bits & 1 else problem
                    yield _Member(entry.filename, problem, partial(archive.open, entry))
        return
    names = set()
    with tarfile.open(path) as tar:
        for member in tar:
            # Offsets of files in the archive are kept only while their contents are read.
            cast(Any, tar).members.clear()
            # What a hard link points to is read under its first name.
            if member.isdir() or (member.islnk() and member.linkname in names):
                continue
            names.add(member.name)
            problem = "" if member.isfile() else "a link" if member.islnk() else "a device"
            problem = "a link" if member.issym() else problem
            yield _Member(member.name, problem, partial(tar.extractfile, member))


def _read(folder: Path, files: list[tuple[str, Path]]) -> Iterator[tuple[str, str]]:
    """Yield the place and the text of each document in the members of an archive, and at the end
    the files that are left out.

    Args:
        folder: the folder that contains the members.
        files: name and file of each member.
    """
    unread = set(unread_files([folder]))
    is_export = any(file.name in _CHATS for _, file in files)
    left_out: dict[str, list[str]] = {}
    seen: set[int] = set()
    for name, file in sorted(files, key=lambda member: _order(member[1])):
        if is_export and file.name in _BESIDE_CHATS:
            continue
        if file in unread and format_of(file) is None:
            kind = kind_of(file, next(iter(by_ending([file]))))
            left_out.setdefault(kind.name, []).append(name)
            continue
        for place, text in _documents(file, seen):
            yield ", ".join(part for part in (name, place) if part), text
    for what, (name, *others) in left_out.items():
        more = f" and {len(others):,} more, each" if others else ":"
        yield f"{name}{more} {what}", ""


def _order(file: Path) -> float:
    found = format_of(file)
    return found.order(file) if found is not None and found.order is not None else 0.0


def _documents(file: Path, seen: set[int]) -> Iterator[tuple[str, str]]:
    """Yield the place and the text of each document in a member, or its problem.

    Args:
        file: the member.
        seen: hashes of the text that was read before (see `registry.Format`).
    """
    # The reader is called directly, because this process already has limits.
    try:
        if (found := format_of(file)) is not None:
            if not found.is_installed:
                yield f"a {found.name}: pip install 'firstlight[documents]' to read it", ""
                return
            reader = importlib.import_module(found.module)
            yield from reader.read(file, seen) if found.order else reader.read(file)
            return
        for record in read_documents(find_sources([file])):
            place = f"{record.line:,}" if record.line > 1 else ""
            if record.error is None:
                yield place, record.value
            else:
                problem = _without_folder(record.error, file)
                yield ": ".join(part for part in (place, problem) if part), ""
    except MemoryError:
        raise
    except FirstlightError as error:
        yield _without_folder(error, file), ""
    # Libraries raise many kinds of errors for damaged files.
    except Exception as error:  # noqa: BLE001
        yield f"it is damaged ({first_line(error)})", ""


def _without_folder(error: Exception, file: Path) -> str:
    """Return an error message that neither names the temporary folder nor lists what firstlight
    reads."""
    return str(error).replace(f"{file.parent}/", "").partition(" (firstlight reads")[0]

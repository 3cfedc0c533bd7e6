"""ZIP and tar archives of files that firstlight reads.

Each member is copied to a temporary folder, and is read like any other file, so that readers find
the files beside it. Links, devices, members whose names point out of the archive, and archives
inside the archive are left out.
"""

from __future__ import annotations

import importlib
import lzma
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple, cast

from firstlight.data.formats import UnreadableDocument
from firstlight.data.opening import require_unpacked_size
from firstlight.errors import FirstlightError

_SUFFIXES = tuple(".zip .tar .tgz .tbz2 .txz .tar.gz .tar.bz2 .tar.xz .tar.zst .7z .rar".split())
#: Bytes that are unpacked at a time, and bytes that a member without content counts for, because
#: each member takes time to process.
_BLOCK_BYTES, _MEMBER_BYTES = 1 << 16, 1 << 10


class _Member(NamedTuple):
    """A file in an archive: its name, the reason why it is left out or "", and its content."""

    name: str
    problem: str
    content: IO[bytes] | None


def read(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the place and the text of each document in an archive. The place begins with the name
    of the member. Pairs without text name the members that were left out.

    Raises:
        UnreadableDocument: the archive is damaged, or unpacks to an implausible size for text.
    """
    with tempfile.TemporaryDirectory(prefix="firstlight-") as folder:
        files: dict[str, Path] = {}
        try:
            yield from _unpack(path, Path(folder), files)
        except (OSError, EOFError, ValueError, RuntimeError, zlib.error, lzma.LZMAError) as error:
            raise UnreadableDocument(f"it can't be unpacked: {error}") from error
        except (tarfile.TarError, zipfile.BadZipFile) as error:
            raise UnreadableDocument(f"the archive is damaged: {error}") from error
        for name, file in files.items():
            for place, text in _documents(file):
                yield ", ".join(part for part in (name, place) if part), text


def _unpack(path: Path, folder: Path, files: dict[str, Path]) -> Iterator[tuple[str, str]]:
    """Copy the members of an archive to a folder, and add them to `files`. Yield the names of those
    that are left out, each with the reason and an empty text.

    Raises:
        OSError: see `require_unpacked_size`.
    """
    total = 0
    for name, problem, content in _members(path):
        total += _MEMBER_BYTES
        require_unpacked_size(path, total)
        parts = PurePosixPath(name.replace("\\", "/")).parts
        if not problem and (
            not parts or parts[0][0] == "/" or parts[0][1:2] == ":" or ".." in parts
        ):
            problem = "its name points out of the archive"
        elif not problem and name.lower().endswith(_SUFFIXES):
            problem = "an archive inside an archive: unpack it"
        # macOS adds hidden files, which a person never sees.
        is_hidden = any(part.startswith((".", "__MACOSX")) for part in parts)
        if problem or content is None or is_hidden:
            yield from [(f"{name}: {problem}", "")] if problem else []
            continue
        files[name] = folder.joinpath(*parts)
        files[name].parent.mkdir(parents=True, exist_ok=True)
        with content, files[name].open("wb") as file:
            while block := content.read(_BLOCK_BYTES):
                total += len(block)
                require_unpacked_size(path, total)
                file.write(block)


def _members(path: Path) -> Iterator[_Member]:
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                if entry.is_dir():
                    continue
                # The upper 16 bits are the Unix mode. 0o12 is the type of a link.
                problem = "a link" if entry.external_attr >> 28 == 0o12 else ""
                problem = "encrypted: unpack it" if entry.flag_bits & 1 else problem
                yield _Member(entry.filename, problem, None if problem else archive.open(entry))
        return
    with tarfile.open(path) as tar:
        for member in tar:
            # Names of files in the archive are kept only while their contents are read.
            cast(Any, tar).members.clear()
            if not member.isdir():
                problem = "" if member.isfile() else "a link" if member.islnk() else "a device"
                problem = "a link" if member.issym() else problem
                content = tar.extractfile(member) if not problem else None
                yield _Member(member.name, problem, content)


def _documents(file: Path) -> Iterator[tuple[str, str]]:
    """Yield the place and the text of each document in a member, or its problem."""
    from firstlight.data.formats.registry import format_of
    from firstlight.data.records import read_documents
    from firstlight.data.sources import find_sources

    # The reader is called directly, because this process already has limits.
    try:
        if (found := format_of(file)) is not None:
            if not found.is_installed:
                yield f"a {found.name}: pip install 'firstlight[documents]' to read it", ""
                return
            yield from importlib.import_module(found.module).read(file)
            return
        for record in read_documents(find_sources([file])):
            place = f"{record.line:,}" if record.line > 1 else ""
            if record.error is None:
                yield place, record.value
            else:
                yield ": ".join(part for part in (place, str(record.error)) if part), ""
    except FirstlightError as error:
        # The advice neither names the temporary folder nor lists what firstlight reads.
        yield str(error).replace(f"{file.parent}/", "").partition(" (firstlight reads")[0], ""

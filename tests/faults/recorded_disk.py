"""A disk that records all changes below a folder; see lost_writes.py.

It stands in the place of `files.disk.disk`. Changes that go past it are found before the next call
by looking at the folder, and count as not synced; at the end the record has to give what is in the
folder.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from disks import installed

from firstlight.files.disk import Disk

#: A folder's or a file's number; the recorded folder is `ROOT`.
ROOT = 0
#: Files by relative path; None is a folder.
Tree = dict[str, bytes | None]


@dataclass(frozen=True)
class EntryChange:
    """A change of a folder's entries.

    Attributes:
        folder: number of the folder.
        name: the name that is given, or taken away.
        node: number of the file or folder that has, or had, the name.
        given: False for a deletion.
        old_name: the name before a rename.
    """

    folder: int
    name: str
    node: int
    given: bool = True
    old_name: str | None = None

    def apply(self, entries: dict[int, dict[str, int]]) -> None:
        """Make the change, as far as it means anything where others are lost."""
        own = entries.setdefault(self.folder, {})
        for name in (self.old_name, None if self.given else self.name):
            if name is not None and own.get(name) == self.node:
                del own[name]
        if self.given:
            own[self.name] = self.node


@dataclass(frozen=True)
class Write:
    """Bytes written into a file at an offset."""

    node: int
    offset: int
    data: bytes


@dataclass(frozen=True)
class Cut:
    """A file's length set."""

    node: int
    size: int


@dataclass(frozen=True)
class Sync:
    """A file or folder forced to the disk."""

    node: int


@dataclass(frozen=True)
class Mark:
    """A promise that holds from here on."""

    value: Any


Change = EntryChange | Write | Cut | Sync | Mark


class RecordingDisk(Disk):
    """The real disk without its waiting, with all changes below one folder recorded.

    Attributes:
        before: the content of the folder at the beginning, which counts as synced.
        changes: all changes since.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.changes: list[Change] = []
        self._nodes = itertools.count(1)
        self._entries: dict[int, dict[str, int]] = {ROOT: {}}
        self._contents: dict[int, bytearray] = {}
        self._open: dict[int, tuple[FileIO, int]] = {}
        self._lock = threading.RLock()
        self._discover()
        self.before = tuple(self.changes)
        self.changes.clear()

    @property
    def files(self) -> set[int]:
        """The numbers of all files that there ever were."""
        return set(self._contents)

    @property
    def folders(self) -> set[int]:
        """The numbers of all folders that there ever were."""
        return set(self._entries)

    def mark(self, value: Any) -> None:
        """Note a promise."""
        with self._looking():
            self.changes.append(Mark(value))

    def finish(self) -> None:
        """Require that the record gives what is in the folder."""
        self._discover()
        assert tree_of(self._entries, self._contents) == read_tree(self.folder)

    # What Disk does

    def create(self, path: Path) -> FileIO:
        with self._looking():
            file = super().create(path)
            self._new(path, is_folder=False)
            self._open[id(file)] = (file, self._node(path))
            return file

    def append(self, path: Path) -> FileIO:
        with self._looking():
            file = super().append(path)
            if self._find(path) is None:
                self._new(path, is_folder=False)
            self._open[id(file)] = (file, self._node(path))
            return file

    def write(self, file: FileIO, data: bytes | bytearray | memoryview) -> int:
        with self._looking():
            at = os.fstat(file.fileno()).st_size if "a" in file.mode else file.tell()
            taken = super().write(file, data)
            self._do(Write(self._node_of(file), at, bytes(data[:taken])))
            return taken

    def sync(self, file: FileIO) -> None:
        with self._looking():
            self._do(Sync(self._node_of(file)))

    def truncate(self, file: FileIO, size: int) -> None:
        with self._looking():
            super().truncate(file, size)
            self._do(Cut(self._node_of(file), size))

    def rename(self, source: Path, target: Path) -> None:
        with self._looking():
            folder, node = self._node(source.parent), self._node(source)
            assert self._node(target.parent) == folder
            super().rename(source, target)
            self._do(EntryChange(folder, target.name, node, old_name=source.name))

    def link(self, source: Path, target: Path) -> None:
        with self._looking():
            super().link(source, target)
            self._do(EntryChange(self._node(target.parent), target.name, self._node(source)))

    def unlink(self, path: Path) -> None:
        with self._looking():
            super().unlink(path)
            self._gone(path)

    def make_folder(self, path: Path) -> None:
        with self._looking():
            super().make_folder(path)
            self._new(path, is_folder=True)

    def remove_folder(self, path: Path) -> None:
        with self._looking():
            super().remove_folder(path)
            self._gone(path)

    def sync_folder(self, path: Path) -> None:
        with self._looking():
            # One above the recorded folder, which counts as there.
            if path.resolve().is_relative_to(self.folder.resolve()):
                self._do(Sync(self._node(path)))

    # The record

    @contextlib.contextmanager
    def _looking(self) -> Iterator[None]:
        """Alone, and after what has changed without a call."""
        with self._lock:
            self._discover()
            yield

    def _do(self, change: Change) -> None:
        self.changes.append(change)
        match change:
            case EntryChange():
                change.apply(self._entries)
            case Write(node, offset, data):
                write_into(self._contents[node], offset, data)
            case Cut(node, size):
                cut(self._contents[node], size)

    def _find(self, path: Path) -> int | None:
        node: int | None = ROOT
        for name in path.resolve().relative_to(self.folder.resolve()).parts:
            node = None if node is None else self._entries.get(node, {}).get(name)
        return node

    def _node(self, path: Path) -> int:
        node = self._find(path)
        assert node is not None, f"{path} is not recorded"
        return node

    def _node_of(self, file: FileIO) -> int:
        if id(file) in self._open:
            return self._open[id(file)][1]
        return self._node(Path(str(file.name)))

    def _new(self, path: Path, *, is_folder: bool) -> None:
        node = next(self._nodes)
        if is_folder:
            self._entries[node] = {}
        else:
            self._contents[node] = bytearray()
        self._do(EntryChange(self._node(path.parent), path.name, node))

    def _gone(self, path: Path) -> None:
        node = self._node(path)
        self._do(EntryChange(self._node(path.parent), path.name, node, given=False))

    def _discover(self) -> None:
        """Record what has changed without a call."""
        known = tree_of(self._entries, self._contents)
        found = read_tree(self.folder)
        for name in sorted(known, reverse=True):
            if name not in found or (known[name] is None) != (found[name] is None):
                self._gone(self.folder / name)
        for name, content in sorted(found.items()):
            path = self.folder / name
            if self._find(path) is None:
                self._new(path, is_folder=content is None)
            if content is None or bytes(self._contents[self._node(path)]) == content:
                continue
            if self._contents[self._node(path)]:
                self._do(Cut(self._node(path), 0))
            self._do(Write(self._node(path), 0, content))


@contextlib.contextmanager
def recording(folder: Path) -> Iterator[RecordingDisk]:
    """Record all changes below a folder. What happens inside may be ended by an error."""
    with installed(RecordingDisk(folder)) as record:
        yield record
    record.finish()


def write_into(content: bytearray, offset: int, data: bytes) -> None:
    """Write bytes at an offset; what is between the end and it becomes zeros."""
    content.extend(bytes(max(0, offset - len(content))))
    content[offset : offset + len(data)] = data


def cut(content: bytearray, size: int) -> None:
    """Set the length."""
    content.extend(bytes(max(0, size - len(content))))
    del content[size:]


def read_tree(folder: Path) -> Tree:
    """All that is in a folder."""
    found: Tree = {}
    for parent, folders, files in os.walk(folder):
        base = Path(parent).relative_to(folder)
        found |= {str(base / name): None for name in folders}
        # What another thread deletes meanwhile is gone with the next look.
        for name in files:
            with contextlib.suppress(FileNotFoundError):
                found[str(base / name)] = (Path(parent) / name).read_bytes()
    return found


def tree_of(
    entries: Mapping[int, Mapping[str, int]], contents: Mapping[int, bytes | bytearray]
) -> Tree:
    """All that can be come to from the recorded folder."""
    found: Tree = {}
    left = [("", ROOT)]
    while left:
        path, folder = left.pop()
        for name, node in entries.get(folder, {}).items():
            if node in contents:
                found[path + name] = bytes(contents[node])
            else:
                found[path + name] = None
                left.append((f"{path}{name}/", node))
    return found

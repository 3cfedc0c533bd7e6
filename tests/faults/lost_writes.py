"""What a power cut may leave on a disk: the states that are legal after each recorded change.

    with recording(folder) as record:
        work()
        record.mark(4)  # a promise that holds from here on
    tried(record, check, ...)

The model is that of POSIX, not of one file system:

- A file's bytes, and its length, are on the disk once its descriptor is synced. Until then each
  write may be missing, cut short, or be as long as it should and hold zeros (delayed allocation),
  whatever became of the others.
- An entry of a folder (a new name, a rename, a deletion) is on the disk once the folder is synced.
  Until then it may be there or not, whatever became of the others, also of earlier ones of the
  same folder. Syncing a file does not sync its name.
- A rename happens wholly or not at all: no file system that journals does otherwise.
"""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from disks import Unsynced, installed
from recorded_disk import (
    ROOT,
    Change,
    Cut,
    EntryChange,
    Mark,
    RecordingDisk,
    Sync,
    Tree,
    Write,
    cut,
    tree_of,
    write_into,
)


@dataclass(frozen=True)
class State:
    """What a power cut may leave.

    Attributes:
        tree: all files and folders.
        promise: the last mark before the power cut; None before the first.
        began: number of changes before it.
        lost: what became of the changes that were not synced, for the message of a failure.
        is_out_of_order: True if only the last change of entries is on the disk, and an earlier one
            of another folder is not.
    """

    tree: Tree
    promise: Any
    began: int
    lost: str
    is_out_of_order: bool

    def write(self, folder: Path) -> None:
        """Make a folder hold this and nothing else."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for name, content in sorted(self.tree.items()):
            if content is None:
                (folder / name).mkdir()
            else:
                (folder / name).write_bytes(content)


#: What may become of the writes to one file that were not synced; "mixed" draws for each of them.
_FATES = ("missing", "zeros", "half", "whole", "mixed")
#: Subsets of up to so many entry changes are all tried.
_ALL_SUBSETS = 4


@dataclass
class _Moment:
    """The disk after some changes: what is synced, and what is not."""

    entries: dict[int, dict[str, int]] = field(default_factory=lambda: {ROOT: {}})
    contents: dict[int, bytes] = field(default_factory=dict)
    changes: list[EntryChange] = field(default_factory=list)
    writes: dict[int, list[Write | Cut]] = field(default_factory=dict)
    promise: Any = None
    held: dict[bytes, bytes] = field(default_factory=dict)

    def take(self, change: Change) -> None:
        """Go on by one change."""
        match change:
            case Mark(value):
                self.promise = value
            case EntryChange():
                self.changes.append(change)
            case Write(node) | Cut(node):
                self.writes.setdefault(node, []).append(change)
            case Sync(node):
                self.sync(node)

    def sync(self, node: int) -> None:
        """Put all of a file's bytes, or of a folder's entries, onto the disk."""
        writes = self.writes.pop(node, [])
        if writes:
            content = bytearray(self.contents.get(node, b""))
            for write in writes:
                _suffer(content, write, "whole")
            self.contents[node] = bytes(content)
        for change in self.changes:
            if change.folder == node:
                change.apply(self.entries)
        self.changes = [change for change in self.changes if change.folder != node]

    def after(
        self, files: set[int], kept: Sequence[int], fate: str, generator: random.Random
    ) -> Tree:
        """The disk if of the entry changes those with the numbers `kept` are on it, and the writes
        have a fate.

        Args:
            files: the numbers that are files.
        """
        entries = {folder: dict(own) for folder, own in self.entries.items()}
        for number in kept:
            self.changes[number].apply(entries)
        contents = dict.fromkeys(files, b"") | self.contents
        for node, writes in self.writes.items():
            content = bytearray(contents[node])
            for number, write in enumerate(writes):
                which = generator.choice(_FATES[:-1]) if fate == "mixed" else fate
                # A prefix of all of them: the last one is cut short.
                if which == "half" and fate != "mixed":
                    which = "half" if number == len(writes) - 1 else "whole"
                _suffer(content, write, which)
            # Of equal ones a single one is held, whose hash is known.
            contents[node] = self.held.setdefault(bytes(content), bytes(content))
        return tree_of(entries, contents)

    def is_out_of_order(self, kept: Sequence[int]) -> bool:
        """Whether of the entry changes only the last is on the disk, and an earlier one of another
        folder is not."""
        is_last = list(kept) == [len(self.changes) - 1]
        return is_last and any(one.folder != self.changes[-1].folder for one in self.changes)


def _suffer(content: bytearray, change: Write | Cut, fate: str) -> None:
    """Make a change of a file's bytes as far as its fate lets it."""
    if fate == "missing":
        return
    if isinstance(change, Write) and fate != "whole":
        size = len(change.data)
        data = change.data[: size // 2] if fate == "half" else bytes(size)
        change = Write(change.node, change.offset, data)
    if isinstance(change, Cut):
        cut(content, change.size)
    else:
        write_into(content, change.offset, change.data)


def _subsets(count: int, generator: random.Random, draws: int) -> Iterator[tuple[int, ...]]:
    """Sets of the entry changes that are kept: all sets of a few, else the extremes, those of one
    and of all but one, the first so many, and some that are drawn."""
    every = tuple(range(count))
    if count <= _ALL_SUBSETS:
        for size in range(count + 1):
            yield from itertools.combinations(every, size)
        return
    for number in every:
        yield every[:number]
        yield (number,)
        yield every[:number] + every[number + 1 :]
    yield every
    for _ in range(draws):
        yield tuple(number for number in every if generator.random() < 0.5)


def states(record: RecordingDisk, seed: int = 0, draws: int = 8) -> list[State]:
    """Each state that a power cut may leave after any of the changes, once for each promise.

    Args:
        draws: sets of entry changes that are drawn where there are too many to try all.
    """
    generator, files = random.Random(seed), record.files
    moment, found = _Moment(), dict[tuple[str, frozenset[Any]], State]()
    for earlier in record.before:
        moment.take(earlier)
    for node in (*files, *record.folders):
        moment.sync(node)
    for number, change in enumerate([None, *record.changes]):
        if change is not None:
            moment.take(change)
        fates = _FATES if moment.writes else ("whole",)
        for kept in _subsets(len(moment.changes), generator, draws):
            for fate in fates:
                tree = moment.after(files, kept, fate, generator)
                lost = f"after {number} changes, of {moment.changes} {kept}, unsynced bytes {fate}"
                key = repr(moment.promise), frozenset(tree.items())
                state = State(tree, moment.promise, number, lost, moment.is_out_of_order(kept))
                found.setdefault(key, state)
    return list(found.values())


#: More states than there are.
ALL = 1 << 20


def chosen(found: list[State], sample: int) -> list[State]:
    """So many states, up to half of them out of order, where a missing sync between two folders
    shows, and the others of all moments; and those in which everything is lost that was not synced
    when a promise was made."""
    if len(found) <= sample:
        return found
    generator = random.Random(1)
    first = [place for place, state in enumerate(found) if state.is_out_of_order]
    drawn = set(generator.sample(first, min(len(first), sample // 2)))
    others = [place for place in range(len(found)) if place not in drawn]
    drawn.update(generator.sample(others, sample - len(drawn)))
    promises = [repr(state.promise) for state in found]
    return [found[place] for place in sorted(drawn | {promises.index(one) for one in promises})]


def tried(
    record: RecordingDisk,
    check: Callable[[State], None],
    sample: int,
    what: str,
    record_property: Callable[[str, object], None],
) -> None:
    """Check the states that a power cut may leave in the recorded folder, which holds each of them
    in turn, and count them.

    Args:
        sample: number of states that are tried; all if there are fewer.
        what: what is written, for the count.
    """
    found = chosen(states(record), sample)
    record_property("cases", (f"states after a power cut: {what}", len(found)))
    for state in found:
        state.write(record.folder)
        try:
            with installed(Unsynced()):
                check(state)
        except BaseException as error:
            error.add_note(f"{state.lost}, with {sorted(state.tree)}")
            raise

"""Retention, whatever a run goes through: saves, crashes at any call that changes the disk, full
disks, damaged files, rollbacks and resumes, against a model that is a plain list."""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import json
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from disks import (
    CrashError,
    CrashingDisk,
    FailingDisk,
    Unsynced,
    UnsyncedCrashing,
    UnsyncedFailing,
    WatchedDisk,
    installed,
)
from scale import cases
from small_checkpoints import content, holds, litter, sound_steps

from firstlight.checkpoint.checkpoint import (
    Checkpoint,
    load_checkpoint,
    load_trainer_state,
    save_checkpoint,
    verify_checkpoint,
)
from firstlight.checkpoint.manifest import (
    Saved,
    checkpoint_folder,
    own_past,
    saved_checkpoints,
    step_of,
)
from firstlight.checkpoint.retention import kept_checkpoints, prune_checkpoints
from firstlight.checkpoint.saver import CheckpointSaver
from firstlight.checkpoint.selection import list_checkpoints, newest_checkpoint
from firstlight.errors import CheckpointError, StorageError
from firstlight.files.atomic import remove_leftovers
from firstlight.recipe import CheckpointConfig

_SEED = 6


@dataclass(frozen=True)
class Entry:
    """A checkpoint as the model knows it: `number` is its own, whatever its step."""

    step: int
    number: int
    val_loss: float | None


@dataclass
class Run:
    """A run and the model of what must be there of it.

    Attributes:
        line: the checkpoints of the run's own past that are kept, oldest first.
        damaged: the numbers of those that must not be taken.
        base: the number of the checkpoint after which the run went on.
        done: what was done, for the message of a failure.
    """

    folder: Path
    draw: random.Random
    config: CheckpointConfig
    line: list[Entry] = field(default_factory=list)
    damaged: set[int] = field(default_factory=set)
    done: list[str] = field(default_factory=list)
    step: int = 0
    number: int = 0
    base: int = 0

    def __post_init__(self) -> None:
        self.saver = CheckpointSaver(self.folder, self.config)
        self.fresh = False

    def __str__(self) -> str:
        return f"{self.config}: {'; '.join(self.done)}"

    # --- what happens ------------------------------------------------------------------------

    def save(self, disk: WatchedDisk) -> None:
        """Train a little and save; the disk may crash or refuse."""
        # A run that is ended right after it was taken up saves the same step again.
        self.step += self.draw.randint(0 if self.fresh else 1, 4)
        self.number += 1
        new = Entry(self.step, self.number, self.draw.choice((None, 0.5, 1.5, self.draw.random())))
        self.done.append(f"save {new}")
        self.fresh = False
        try:
            with installed(disk):
                self.saver.save(self.step, lambda: self.content(new))
                self.saver.wait()
        except CrashError as error:
            self.done.append(f"crash at {error}")
            self.note_published(new)
            self.resume()
        except StorageError as error:
            self.done.append(f"refused: {error}")
            self.note_published(new)
        else:
            self.line, self.base = [*self.before(new), new], new.number
            self.line = self.kept()
            if not isinstance(disk, FailingDisk) or not disk.refused:
                assert self.on_disk() == {e.number for e in self.line}, str(self)
                assert litter(self.folder) == [], str(self)

    def content(self, entry: Entry) -> Checkpoint:
        return Checkpoint(
            {"config.json": "{}"},
            {"w": torch.tensor(float(entry.number))},
            {"w.step": torch.tensor(entry.step)},
            {"step": entry.step, "number": entry.number, "val_loss": entry.val_loss},
        )

    def before(self, new: Entry) -> list[Entry]:
        """The new one's past: up to the checkpoint after which the run went on, if it knows."""
        return [
            e for e in self.line if e.step < new.step and (not self.base or e.number <= self.base)
        ]

    def note_published(self, new: Entry) -> None:
        """After a save that came to nothing or was not finished: what is there, if it is sound."""
        there = self.on_disk()
        if new.number in there:
            self.line = [*self.before(new), new]
            if self.saver.saved_step == new.step:
                self.base = new.number
        self.line = [entry for entry in self.line if entry.number in there]

    def resume(self) -> None:
        """Start the process anew."""
        self.saver = CheckpointSaver(self.folder, self.config)
        remove_leftovers(self.folder / "checkpoints")
        self.go_back("resume")

    def rollback(self) -> None:
        """Go back within the process."""
        self.go_back("rollback")

    def go_back(self, how: str) -> None:
        found, _ = newest_checkpoint(self.folder)
        if found is None:
            assert self.line == [], str(self)
            self.step, self.base, self.fresh = 0, 0, False
            return
        entry = self.entry(found)
        self.done.append(f"{how} at {entry}")
        self.line = self.line[: self.line.index(entry) + 1]
        step = step_of(found)
        assert step == entry.step, str(self)
        self.step, self.base = step, entry.number
        self.saver.saved_step = step
        self.fresh = True

    def damage(self) -> None:
        """Change a byte of one of the checkpoints, while another one stays sound."""
        sound = [entry for entry in self.line if entry.number not in self.damaged]
        if len(sound) < 2:
            return
        entry = self.draw.choice(sound)
        folder = next(f for f in list_checkpoints(self.folder) if self.number_in(f) == entry.number)
        name = self.draw.choice(["model.safetensors", "optimizer.safetensors", "manifest.json"])
        data = bytearray((folder / name).read_bytes())
        data[self.draw.randrange(len(data))] ^= 1
        (folder / name).write_bytes(data)
        self.done.append(f"damage {name} of {entry}")
        self.damaged.add(entry.number)
        if name == "manifest.json":
            self.line.remove(entry)

    # --- what must be true -------------------------------------------------------------------

    def kept(self) -> list[Entry]:
        """What retention keeps of the line."""
        last = self.line[-self.config.keep_last :]
        every = [
            e for e in self.line if self.config.keep_every and not e.step % self.config.keep_every
        ]
        losses = sorted(
            (e for e in self.line if e.val_loss is not None), key=lambda e: (e.val_loss, -e.number)
        )
        return [e for e in self.line if e in last + every + losses[: self.config.keep_best]]

    def number_in(self, folder: Path) -> int:
        number: int = json.loads((folder / "trainer_state.json").read_text())["number"]
        return number

    def on_disk(self) -> set[int]:
        return {self.number_in(folder) for folder in list_checkpoints(self.folder)}

    def entry(self, folder: Path) -> Entry:
        """The model's entry for a checkpoint, which must be the newest sound one of the line."""
        state = load_trainer_state(folder)
        found = Entry(state["step"], state["number"], state["val_loss"])
        sound = [entry for entry in self.line if entry.number not in self.damaged]
        assert sound, f"{self}: none should be sound, but {found} is"
        assert found == sound[-1], f"{self}: {found} was taken of {self.line}"
        return found

    def check(self) -> None:
        """Once there was a checkpoint there always is one, and it is the right one."""
        found, _ = newest_checkpoint(self.folder)
        assert (found is None) == (self.line == []), str(self)
        if found is not None:
            entry = self.entry(found)
            model = load_checkpoint(found, verify=False).model
            assert model["w"].item() == entry.number, str(self)


def one_sequence(folder: Path, draw: random.Random) -> Run:
    """Let a run go through six to ten things."""
    config = CheckpointConfig(
        keep_last=draw.choice((1, 1, 2, 3)),
        keep_every=draw.choice((0, 0, 3, 5)),
        keep_best=draw.choice((0, 0, 1, 2)),
        asynchronous=draw.random() < 0.3,
    )
    run = Run(folder, draw, config)
    had_one = False
    for _ in range(draw.randint(6, 10)):
        what = draw.choices(
            ("save", "crash", "refuse", "damage", "rollback", "resume"), (5, 5, 2, 2, 2, 1)
        )[0]
        if what == "save":
            run.save(Unsynced())
        elif what == "crash":
            run.save(UnsyncedCrashing(draw.randint(1, 50)))
        elif what == "refuse":
            disk = UnsyncedFailing(
                draw.randint(1, 40), draw.choice((errno.ENOSPC, errno.EIO)), lasting=True
            )
            run.save(disk)
        elif what == "damage":
            run.damage()
        elif what == "rollback":
            run.rollback()
        else:
            run.done.append("stop")
            run.resume()
        run.check()
        assert not had_one or run.line, str(run)
        had_one = had_one or bool(run.line)
    run.saver.close()
    return run


@pytest.fixture
def in_memory(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory, where there is such a file system: it waits for no disk."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as folder:
        yield Path(folder)


def test_retention_run_always_has_sound_checkpoint_after_first(
    in_memory: Path, record_property: Callable[[str, object], None]
) -> None:
    count, saves = cases(60, 5000), 0
    for number in range(count):
        seed = f"{_SEED}/{number}"
        try:
            saves += one_sequence(in_memory / "run", random.Random(seed)).number
        except (AssertionError, CheckpointError) as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        shutil.rmtree(in_memory / "run", ignore_errors=True)
    assert saves > 3 * count
    record_property("cases", ("sequences of saves, crashes, damages and rollbacks", count))


@pytest.mark.parametrize("keep_last", [1, 2])
@pytest.mark.parametrize("again", [False, True])
def test_retention_every_call_of_a_save_leaves_sound_checkpoint(
    tmp_path: Path, keep_last: int, again: bool
) -> None:
    """Looked at before each call; `again`: the same step is saved anew, as after a resume that is
    ended at once."""
    sound: list[list[int]] = []

    class Looking(Unsynced):
        def before(self, operation: str, name: str, number: int) -> None:
            sound.append(sound_steps(tmp_path))

    with closing(
        CheckpointSaver(tmp_path, CheckpointConfig(keep_last=keep_last, asynchronous=False))
    ) as saver:
        saver.save(4, lambda: content(4, branch=0))
        with installed(Looking()):
            for step in (8, 12, 16):
                at = 4 if again else step
                saver.save(at, functools.partial(content, at, branch=1))
    assert len(sound) > 60
    assert min(map(len, sound)) >= 1
    assert load_checkpoint(newest_checkpoint(tmp_path)[0] or tmp_path).trainer_state["branch"] == 1


def test_retention_save_killed_between_renames_of_same_step_keeps_old_one(
    tmp_path: Path,
) -> None:
    save_checkpoint(tmp_path, 4, content(4, branch=0))
    with (
        installed(CrashingDisk(_calls_before_second_rename(tmp_path))),
        pytest.raises(CrashError),
    ):
        save_checkpoint(tmp_path, 4, content(4, branch=1))
    assert not checkpoint_folder(tmp_path, 4).exists()
    found, problems = newest_checkpoint(tmp_path)
    assert found is not None
    assert found.name.startswith("step-00000004-replaced-")
    assert holds(found, content(4, branch=0))
    assert problems == []
    # The run goes on from it, and it goes when it is one too many.
    newest = save_checkpoint(tmp_path, 8, content(8), after=4)
    verify_checkpoint(newest)
    prune_checkpoints(tmp_path, newest, CheckpointConfig(keep_last=1, keep_best=0))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000008"]


def _calls_before_second_rename(run: Path) -> int:
    """The number of the second rename in a save that replaces one of the same step."""
    copy = run / "rehearsal"
    shutil.copytree(run / "checkpoints", copy / "checkpoints")
    with installed(WatchedDisk()) as disk:
        save_checkpoint(copy, 4, content(4, branch=1))
    numbers = [i for i, operation in enumerate(disk.operations, 1) if operation == "rename"]
    assert len(numbers) == 2
    return numbers[1]


# --- the rules one by one --------------------------------------------------------------------


def saved(*steps: int) -> list[Saved]:
    return [Saved(Path(f"{step}"), step, n, n - 1) for n, step in enumerate(steps, 1)]


def kept_steps(past: list[Saved], *rules: int) -> list[int]:
    kept = kept_checkpoints(past, *rules)
    return [one.step for one in past if one in kept]


def test_kept_steps_combines_all_rules() -> None:
    past = saved(5, 10, 15, 20, 25, 30)
    assert kept_steps(past, 1, 0, 0) == [30]
    assert kept_steps(past, 2, 0, 0) == [25, 30]
    assert kept_steps(past, 9, 0, 0) == [5, 10, 15, 20, 25, 30]
    assert kept_steps(past, 1, 10, 0) == [10, 20, 30]
    assert kept_steps(past, 1, 0, 3) == [30]  # nothing was measured
    losses = [2.0, 1.0, None, 1.0, 3.0, None]
    past = [
        Saved(one.folder, one.step, one.sequence, one.parent, loss)
        for one, loss in zip(past, losses, strict=True)
    ]
    assert kept_steps(past, 1, 0, 1) == [20, 30]  # the later of two equals
    assert kept_steps(past, 1, 0, 2) == [10, 20, 30]
    assert kept_steps(past, 2, 15, 3) == [5, 10, 15, 20, 25, 30]


def test_own_past_excludes_steps_saved_since_parent() -> None:
    line = saved(4, 8, 12)
    # After a rollback to 8, by way of an earlier, the same and a later step than 12.
    for step in (10, 12, 16):
        branched = [*line, Saved(Path("new"), step, 4, 2)]
        assert [one.step for one in own_past(branched)] == [4, 8, step]
    # Where nobody said after which one it went on, steps that it has not reached are none of its.
    assert [one.step for one in own_past([*line, Saved(Path("new"), 10, 4, 3)])] == [4, 8, 10]
    # A branch of a branch.
    twice = [*line, Saved(Path("a"), 10, 4, 2), Saved(Path("b"), 6, 5, 1)]
    assert [one.step for one in own_past(twice)] == [4, 6]
    # Gone on from the first branch after all, because the second was damaged.
    again = [*line, Saved(Path("a"), 10, 4, 2), Saved(Path("c"), 16, 5, 3)]
    assert [one.step for one in own_past(again)] == [4, 8, 12, 16]


def test_own_past_dead_branch_stays_dead_when_marker_is_replaced() -> None:
    line = [*saved(4, 8, 10), Saved(Path("a"), 12, 4, 2), Saved(Path("b"), 12, 5, 4)]
    assert [one.folder for one in own_past(line)] == [Path("4"), Path("8"), Path("b")]


def test_dead_branch_stays_dead_during_its_deletion(tmp_path: Path) -> None:
    """What tells that it is dead may be one too many itself, and is deleted after it."""
    for at in itertools.count(1):
        run = tmp_path / str(at)
        for step, after in ((4, None), (8, 4), (12, 8), (6, 4), (16, 6)):
            newest = save_checkpoint(run, step, content(step), after)
        disk = CrashingDisk(at)
        with installed(disk), contextlib.suppress(CrashError):
            prune_checkpoints(run, newest, CheckpointConfig(keep_last=1, keep_best=0))
        steps = [one.step for one in own_past(saved_checkpoints(run))]
        assert steps == [step for step in (4, 6, 16) if step in steps], disk.calls
        assert newest_checkpoint(run) == (newest, [])
        if len(disk.calls) < at:
            assert steps == [16]
            break
    assert at > 20


def test_newest_checkpoint_prefers_own_past_to_dead_branch(tmp_path: Path) -> None:
    for step in (4, 8, 12):
        save_checkpoint(tmp_path, step, content(step))
    # A rollback to 4; killed before the dead ones were deleted.
    save_checkpoint(tmp_path, 6, content(6, branch=1), after=4)
    assert newest_checkpoint(tmp_path) == (checkpoint_folder(tmp_path, 6), [])
    (checkpoint_folder(tmp_path, 6) / "model.safetensors").write_bytes(b"")
    found, problems = newest_checkpoint(tmp_path)
    assert found == checkpoint_folder(tmp_path, 4)
    assert len(problems) == 1
    # With nothing else left, it is better than nothing.
    (checkpoint_folder(tmp_path, 4) / "model.safetensors").write_bytes(b"")
    found, problems = newest_checkpoint(tmp_path)
    assert found == checkpoint_folder(tmp_path, 12)
    assert len(problems) == 2


def test_prune_ignores_and_cleans_incomplete_folders(tmp_path: Path) -> None:
    for step in (4, 8):
        save_checkpoint(tmp_path, step, content(step))
    (checkpoint_folder(tmp_path, 8) / "manifest.json").unlink()
    checkpoint_folder(tmp_path, 99).mkdir()
    (tmp_path / "checkpoints" / ".tmp-step-00000012-abcdef01").mkdir()
    (tmp_path / "checkpoints" / "notes.txt").write_text("mine")
    (tmp_path / "checkpoints" / "step-best").mkdir()
    assert newest_checkpoint(tmp_path) == (checkpoint_folder(tmp_path, 4), [])
    newest = save_checkpoint(tmp_path, 12, content(12), after=4)
    prune_checkpoints(tmp_path, newest, CheckpointConfig(keep_last=2, keep_best=0))
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "notes.txt",
        "step-00000004",
        "step-00000012",
        "step-best",
    ]

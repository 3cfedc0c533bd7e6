"""A disk that refuses a call, is full from one on, or takes only parts: one clear error, nothing
half-written, and what was there before is there still."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from disks import FailingDisk, ShortDisk, Unsynced, UnsyncedFailing, WatchedDisk, installed
from scale import FULL, cases
from small_checkpoints import content, holds, is_sound, litter, sound_steps

from firstlight.checkpoint.manifest import checkpoint_folder
from firstlight.checkpoint.saver import CheckpointSaver
from firstlight.checkpoint.selection import newest_checkpoint
from firstlight.data.corpus import TokenDataset
from firstlight.data.prepare import prepare
from firstlight.errors import FirstlightError, StorageError
from firstlight.recipe import CheckpointConfig
from firstlight.run_log.reader import read_json_lines
from firstlight.run_log.writer import JsonLines
from firstlight.tokenizer import Tokenizer

Record = Callable[[str, object], None]

#: The error, and whether the disk refuses everything from then on; in a sample each of both once.
_REFUSALS = [(errno.ENOSPC, True), (errno.EIO, False)]
if FULL:
    _REFUSALS += [(errno.ENOSPC, False), (errno.EIO, True)]
_DELETING = ("unlink", "remove_folder")
_WORDS = {errno.ENOSPC: "the disk is full", errno.EIO: re.escape(os.strerror(errno.EIO))}


def failing_disks(number: int, lasting: bool) -> Iterator[FailingDisk]:
    """Disks that refuse the first call, the second, ...: up to the first that refuses none."""
    for at in itertools.count(1):
        disk = UnsyncedFailing(at, number, lasting=lasting)
        yield disk
        if not disk.refused:
            return


def refusal(work: Callable[[], object]) -> str:
    """What the one error said; "" if there was none."""
    try:
        work()
    except StorageError as error:
        message = str(error)
        assert "\n" not in message
        return message
    return ""


def two_saves(run: Path, asynchronous: bool) -> None:
    """A run with the checkpoints 4 and 8, of which two are kept."""
    config = CheckpointConfig(keep_last=2, asynchronous=asynchronous)
    with closing(CheckpointSaver(run, config)) as saver:
        for step in (4, 8):
            saver.save(step, lambda step=step: content(step))  # type: ignore[misc]


def save_and_wait(saver: CheckpointSaver) -> None:
    """Save step 12."""
    saver.save(12, lambda: content(12))
    saver.wait()


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("number, lasting", _REFUSALS)
def test_save_with_any_disk_error_loses_no_checkpoint(
    tmp_path: Path, number: int, lasting: bool, asynchronous: bool, record_property: Record
) -> None:
    for disk in failing_disks(number, lasting):
        run = tmp_path / str(disk._at)
        with installed(Unsynced()):
            two_saves(run, asynchronous)
        config = CheckpointConfig(keep_last=2, asynchronous=asynchronous)
        saver = CheckpointSaver(run, config)
        saver.saved_step = 8
        with installed(disk):
            problem = refusal(lambda saver=saver: save_and_wait(saver))  # type: ignore[misc]
        what = f"{disk.calls[disk._at - 1] if disk.refused else None} of {disk.calls}"
        deleting = disk.operations[min(disk._at, len(disk.calls)) - 1] in _DELETING
        # Deleting is tried again by the next save; all else is an error at once.
        assert bool(problem) == bool(disk.refused and not deleting), what
        if problem:
            assert re.search(_WORDS[number], problem), what
            assert str(run) in problem, what
            saver.require_written()  # said once
        sound = sound_steps(run)
        assert sound[-1] == (12 if saver.saved_step == 12 else sound[-1]), what
        assert {4, 8} <= set(sound) or sound == [8, 12], what
        found, problems = newest_checkpoint(run)
        assert found is not None, what
        assert holds(found, content(sound[-1])), what
        assert problems == [], what
        if saver.saved_step == 8:
            assert litter(run) == [], what
        # With room again, it goes on as if nothing had been.
        with installed(Unsynced()):
            saver.save(16, lambda: content(16))
            saver.close()
        assert sound_steps(run)[-1] == 16, what
        assert len(sound_steps(run)) == 2, what
        assert litter(run) == [], what
    refused = disk._at - 1
    assert refused > 25
    record_property("cases", ("refused disk calls of a save", refused))


def test_save_completes_short_writes(tmp_path: Path) -> None:
    for most in (1, 7, 100):
        with installed(ShortDisk(most)) as disk:
            two_saves(tmp_path / str(most), asynchronous=False)
        assert disk.operations.count("write") > 500 // most
        assert sound_steps(tmp_path / str(most)) == [4, 8]


def test_save_on_disk_filling_at_any_byte_keeps_older_checkpoint(
    tmp_path: Path, record_property: Record
) -> None:
    """Full after any number of bytes, in the middle of any file."""
    rooms = range(0, 4000, cases(101, 1))
    run = tmp_path / "run"
    two_saves(run, asynchronous=False)
    refused = 0
    for room in rooms:
        with (
            installed(ShortDisk(333, room)),
            closing(CheckpointSaver(run, CheckpointConfig(asynchronous=False))) as saver,
        ):
            problem = refusal(lambda saver=saver: save_and_wait(saver))  # type: ignore[misc]
        if not problem:
            break
        refused += 1
        assert "the disk is full" in problem
        assert sound_steps(run) == [4, 8], room
        assert litter(run) == []
    assert refused > 1000 // rooms.step
    record_property("cases", ("disks that fill up in the middle of a save", refused))


def test_save_that_reads_back_damaged_keeps_older_checkpoint(tmp_path: Path) -> None:
    class Forgetful(WatchedDisk):
        """Takes every byte of a model's weights, and loses one."""

        def sync(self, file: object) -> None:
            super().sync(file)  # type: ignore[arg-type]
            path = Path(str(file.name))  # type: ignore[attr-defined]
            if path.name == "model.safetensors":
                data = bytearray(path.read_bytes())
                data[-1] ^= 1
                path.write_bytes(data)

    run = tmp_path / "run"
    two_saves(run, asynchronous=False)
    saver = CheckpointSaver(run, CheckpointConfig(keep_last=1, asynchronous=False))
    saver.saved_step = 8
    with installed(Forgetful()), pytest.raises(FirstlightError, match=r"step-00000012.* damaged"):
        saver.save(12, lambda: content(12))
    assert saver.saved_step == 8
    assert sound_steps(run) == [4, 8]
    found, problems = newest_checkpoint(run)
    assert found == checkpoint_folder(run, 8)
    assert len(problems) == 1
    # The damaged one counts for nothing when the next is saved.
    saver.save(16, lambda: content(16))
    saver.close()
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000016"]


def write_lines(path: Path, written: list[int]) -> None:
    """Write five lines; note the steps of those that were taken."""
    with closing(JsonLines(path)) as lines:
        for step in range(1, 6):
            lines.write({"step": step, "text": "ä" * step})
            written.append(step)
        lines.sync()


@pytest.mark.parametrize("number, lasting", _REFUSALS)
def test_metrics_lines_rejected_by_disk_are_undone(
    tmp_path: Path, number: int, lasting: bool, record_property: Record
) -> None:
    for disk in failing_disks(number, lasting):
        path = tmp_path / f"{disk._at}.jsonl"
        written: list[int] = []
        with installed(disk):
            problem = refusal(lambda path=path, written=written: write_lines(path, written))  # type: ignore[misc]
        assert bool(problem) == bool(disk.refused)
        if problem:
            assert re.search(_WORDS[number], problem)
            assert str(path) in problem
        data = path.read_bytes() if path.exists() else b""
        assert data == b"" or data.endswith(b"\n")
        steps = [json.loads(line)["step"] for line in data.splitlines()]
        assert steps == written
    assert disk._at > 7
    record_property("cases", ("refused disk calls of the metrics", disk._at - 1))


def test_metrics_short_writes_are_completed_or_undone(
    tmp_path: Path, record_property: Record
) -> None:
    record = {"step": 2, "text": "ä" * 20}
    size = len(json.dumps(record, ensure_ascii=False).encode()) + 1
    for room in range(size + 1):
        path = tmp_path / f"{room}.jsonl"
        with closing(JsonLines(path)) as lines:
            lines.write({"step": 1})
        before = path.read_bytes()
        with installed(ShortDisk(5, room)), closing(JsonLines(path)) as lines:
            if room < size:
                with pytest.raises(StorageError, match="the disk is full"):
                    lines.write(record)
                assert path.read_bytes() == before
            else:
                lines.write(record)
        if room == size:
            assert read_json_lines(path) == [{"step": 1}, record]
    record_property("cases", ("disks that fill up in the middle of a line of metrics", size))


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("number, lasting", _REFUSALS)
def test_prepare_with_any_disk_error_keeps_existing_files(
    tmp_path: Path,
    tokenizer: Tokenizer,
    number: int,
    lasting: bool,
    overwrite: bool,
    record_property: Record,
) -> None:
    source = tmp_path / "in.jsonl"
    lines = ['{"text": "stone and river"}', '{"text": "light and dawn"}', "{broken"]
    source.write_text("\n".join(lines * 20), encoding="utf-8")
    refused = 0
    for disk in failing_disks(number, lasting):
        out = tmp_path / str(disk._at) / "data"
        if overwrite:
            with installed(Unsynced()):
                prepare([source], tokenizer, out)
            before = sorted((path.name, path.read_bytes()) for path in out.iterdir())
        with installed(disk):
            problem = refusal(
                lambda out=out: prepare(  # type: ignore[misc]
                    [source], tokenizer, out, overwrite=overwrite, shard_tokens=100
                )
            )
        if problem:
            refused += 1
            assert re.search(_WORDS[number], problem), disk.calls
        else:
            # A refused deletion of the old corpus is no harm to the new one.
            assert not disk.refused or disk.operations[disk._at - 1] in _DELETING
        complete = out.is_dir() and len(list(out.glob("train-*.bin"))) > 1
        if complete:
            # All was done but for the last sync of the folder's name, or for the deletion.
            TokenDataset(out, "train")
        elif overwrite:
            assert sorted((p.name, p.read_bytes()) for p in out.iterdir()) == before, disk.calls
        else:
            assert not out.parent.exists(), disk.calls
        assert litter(tmp_path) == [] or complete, disk.calls
    assert refused > 20
    record_property("cases", ("refused disk calls of a prepare", refused))


def test_prepare_completes_short_writes(tmp_path: Path, tokenizer: Tokenizer) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "stone and river"}\n{broken\n' * 50, encoding="utf-8")
    prepare([source], tokenizer, tmp_path / "whole")
    with installed(ShortDisk(11)):
        prepare([source], tokenizer, tmp_path / "parts")
    for path in sorted((tmp_path / "whole").iterdir()):
        assert (tmp_path / "parts" / path.name).read_bytes() == path.read_bytes(), path.name


def test_save_uses_only_the_checked_file_functions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file is created, written and synced there, and nothing is published before."""
    with installed(WatchedDisk()) as disk:
        two_saves(tmp_path / "run", asynchronous=False)
    first_save = disk.calls[: disk.operations.index("rename") + 2]
    files = sorted(path.name for path in checkpoint_folder(tmp_path / "run", 4).iterdir())
    for operation in ("create", "write", "sync"):
        names = [name for called, name in first_save if called == operation]
        assert sorted(names) == files, operation
    created = [name for called, name in first_save if called == "create"]
    assert created[-1] == "manifest.json"
    operations = [called for called, _ in first_save]
    last = max(i for i, called in enumerate(operations) if called == "sync")
    assert operations[last + 1 :] == ["sync_folder", "rename", "sync_folder"]
    assert is_sound(checkpoint_folder(tmp_path / "run", 4))

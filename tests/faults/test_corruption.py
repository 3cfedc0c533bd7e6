"""Damaged bytes in any file of a checkpoint: noticed before anything of it is used."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from scale import cases
from small_checkpoints import content, holds

from firstlight.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from firstlight.checkpoint.selection import list_checkpoints, newest_checkpoint
from firstlight.errors import CheckpointError

_SEED = 4


def flip(data: bytearray, draw: random.Random) -> None:
    """One bit."""
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)


def truncate(data: bytearray, draw: random.Random) -> None:
    """Any number of bytes of the end."""
    del data[draw.randrange(len(data)) :]


def zero(data: bytearray, draw: random.Random) -> None:
    """A block, as a file system leaves one that was never written."""
    while True:
        start = draw.randrange(len(data))
        length = min(draw.choice((1, 16, 512, 4096)), len(data) - start)
        if any(data[start : start + length]):
            data[start : start + length] = bytes(length)
            return


def exchange(data: bytearray, draw: random.Random) -> None:
    """Two different bytes, which no sum notices."""
    while True:
        i, j = draw.randrange(len(data)), draw.randrange(len(data))
        if data[i] != data[j]:
            data[i], data[j] = data[j], data[i]
            return


def append(data: bytearray, draw: random.Random) -> None:
    """More than was written."""
    data += draw.randbytes(draw.randrange(1, 9))


_DAMAGES = (flip, truncate, zero, exchange, append)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three checkpoints."""
    folder = tmp_path_factory.mktemp("corruption")
    for step in (4, 8, 12):
        save_checkpoint(folder, step, content(step))
    return folder


def test_damaged_file_is_detected_and_older_checkpoint_used(
    run: Path, record_property: Callable[[str, object], None]
) -> None:
    draw = random.Random(_SEED)
    _, middle, newest = list_checkpoints(run)
    files = sorted(newest.iterdir())
    assert [path.name for path in files] == [
        "config.json",
        "manifest.json",
        "model.safetensors",
        "optimizer.safetensors",
        "trainer_state.json",
    ]
    count = cases(100, 1000)
    for number in range(count):
        path, damage = files[number % len(files)], _DAMAGES[number // len(files) % len(_DAMAGES)]
        original = path.read_bytes()
        data = bytearray(original)
        damage(data, draw)
        path.write_bytes(data)
        what = f"seed {_SEED}, case {number}: {damage.__name__} in {path.name}"
        with pytest.raises(CheckpointError) as caught:
            load_checkpoint(newest)
        assert str(newest) in str(caught.value), what
        found, problems = newest_checkpoint(run)
        assert found == middle, what
        assert len(problems) == 1, what
        assert str(path.name if path.name != "manifest.json" else newest) in problems[0], what
        path.write_bytes(original)
    assert holds(newest, content(12))
    assert holds(middle, content(8))
    record_property("cases", ("damaged files of a checkpoint, noticed before use", count))


def test_manifest_with_any_flipped_bit_raises_checkpoint_error(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "step-00000012"
    shutil.copytree(list_checkpoints(run)[-1], folder)
    path = folder / "manifest.json"
    original = path.read_bytes()
    for position in range(len(original)):
        for bit in range(8) if cases(0, 1) else (0, 5):
            data = bytearray(original)
            data[position] ^= 1 << bit
            path.write_bytes(data)
            with pytest.raises(CheckpointError):
                load_checkpoint(folder)
    path.write_bytes(original)
    assert holds(folder, content(12))


def test_several_damaged_checkpoints_fall_back_to_newest_sound_one(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    draw = random.Random(_SEED)
    count = cases(15, 200)
    for number in range(count):
        run = tmp_path / str(number)
        steps = list(range(4, 4 + 4 * draw.randint(1, 5), 4))
        for step in steps:
            save_checkpoint(run, step, content(step))
        damaged = draw.sample(steps, draw.randint(0, len(steps)))
        for folder in list_checkpoints(run):
            if int(folder.name[-8:]) in damaged:
                path = draw.choice(sorted(folder.iterdir()))
                data = bytearray(path.read_bytes())
                draw.choice(_DAMAGES)(data, draw)
                path.write_bytes(data)
        sound = [step for step in steps if step not in damaged]
        what = f"seed {_SEED}, case {number}: {damaged} of {steps} damaged"
        if not sound:
            with pytest.raises(CheckpointError, match="no checkpoint of"):
                newest_checkpoint(run)
            continue
        found, problems = newest_checkpoint(run)
        assert found is not None, what
        assert holds(found, content(sound[-1])), what
        newer = [step for step in damaged if step > sound[-1]]
        assert all(any(f"step-{s:08d}" in problem for problem in problems) for s in newer), what
        shutil.rmtree(run)
    record_property("cases", ("runs with damaged checkpoints, the newest sound one taken", count))

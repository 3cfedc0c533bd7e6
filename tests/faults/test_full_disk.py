"""A disk that takes no more: one line of error, nothing half-written, nothing lost."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from disks import limited_command

from firstlight.checkpoint.checkpoint import verify_checkpoint
from firstlight.checkpoint.selection import list_checkpoints
from firstlight.run_log.reader import read_json_lines
from firstlight.tokenizer import Tokenizer
from firstlight.training.loop import train

pytestmark = pytest.mark.usefixtures("forked_processes")

_COMMAND = [sys.executable, "-m", "firstlight"]


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def litter(folder: Path) -> list[Path]:
    return sorted(folder.rglob(".tmp-*"))


def one_error(done: subprocess.CompletedProcess[str]) -> str:
    """The one line that a command failed with, and that it is about the disk."""
    assert done.returncode == 1, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("firstlight: error: ")]
    assert done.stderr.endswith(line + "\n")
    words = ("disk is full", "file size limit", "No space left", "File too large")
    assert any(part in line for part in words), line
    return line


def run_with_largest_file(limit: int, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command that can write no file larger than `limit` bytes."""
    return subprocess.run(
        limited_command(limit, *arguments),
        capture_output=True,
        text=True,
    )


def write_recipe(recipe: dict[str, Any], path: Path) -> Path:
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return path


def assert_good_run_stopped(run: Path, checkpoints: dict[str, bytes]) -> None:
    """The checkpoints are as before, the log is whole lines, and nothing lies about."""
    assert contents(run / "checkpoints") == checkpoints
    for folder in list_checkpoints(run):
        verify_checkpoint(folder)
    assert litter(run) == []
    metrics = (run / "metrics.jsonl").read_bytes()
    assert metrics == b"" or metrics.endswith(b"\n")
    steps = [record["step"] for record in read_json_lines(run / "metrics.jsonl")]
    assert steps == list(range(1, len(steps) + 1))


class StoppedError(Exception):
    """Ends a run from within."""


def train_to_step_five(recipe: dict[str, Any]) -> dict[str, bytes]:
    """Leave the run with the checkpoint of step 4; return what is in it."""

    def on_step(record: Mapping[str, Any]) -> None:
        if record["step"] == 5:
            raise StoppedError

    with pytest.raises(StoppedError):
        train(recipe, on_step=on_step)
    before = contents(Path(recipe["run"]["dir"]) / "checkpoints")
    assert "step-00000004/manifest.json" in before
    return before


def losses(run: Path) -> list[tuple[int, float]]:
    return [(r["step"], r["train/loss"]) for r in read_json_lines(run / "metrics.jsonl")]


# --- files that may not grow -----------------------------------------------------------------


def test_tokenizer_train_with_file_size_limit_leaves_nothing(tmp_path: Path, corpus: Path) -> None:
    out = tmp_path / "new" / "tokenizer"
    done = run_with_largest_file(
        5000, "tokenizer", "train", corpus, "--vocab-size", "300", "--out", out
    )
    assert "file size limit" in one_error(done)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("limit", [1000, 10_000])
def test_prepare_with_file_size_limit_leaves_nothing(
    tmp_path: Path, corpus: Path, tokenizer: Tokenizer, limit: int
) -> None:
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    before = contents(tmp_path)
    done = run_with_largest_file(
        limit,
        "prepare",
        corpus,
        "--tokenizer",
        tmp_path / "tokenizer",
        "--out",
        tmp_path / "new" / "data",
    )
    one_error(done)
    assert contents(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer"]


def test_prepare_overwrite_with_file_size_limit_keeps_old_corpus(
    tmp_path: Path, corpus: Path, data: Path
) -> None:
    shutil.copytree(data, tmp_path / "data")
    before = contents(tmp_path)
    arguments = ("--tokenizer", data, "--out", tmp_path / "data", "--overwrite")
    one_error(run_with_largest_file(10_000, "prepare", corpus, *arguments))
    assert contents(tmp_path) == before
    assert litter(tmp_path) == []


@pytest.mark.parametrize("asynchronous", [False, True])
def test_train_without_room_for_first_checkpoint_leaves_no_checkpoint(
    tmp_path: Path, recipe: dict[str, Any], asynchronous: bool
) -> None:
    recipe["checkpoint"]["asynchronous"] = asynchronous
    path = write_recipe(recipe, tmp_path / "recipe.yaml")
    one_error(run_with_largest_file(30_000, "train", path))
    run = tmp_path / "run"
    assert_good_run_stopped(run, {})
    # The run was fine until then, and can be begun again in the same folder.
    steps = len(read_json_lines(run / "metrics.jsonl"))
    # The next save, at the latest, says what became of the one before.
    assert 4 <= steps <= (8 if asynchronous else 4)
    assert "report.png" not in os.listdir(run)


@pytest.mark.parametrize("limit", [100, 30_000, 250_000])
def test_train_with_file_size_limit_keeps_earlier_checkpoints(
    tmp_path: Path, recipe: dict[str, Any], limit: int
) -> None:
    """The limits hit the log, the weights and the moments."""
    before = train_to_step_five(recipe)
    path = write_recipe(recipe, tmp_path / "recipe.yaml")
    one_error(run_with_largest_file(limit, "train", path, "--resume"))
    assert_good_run_stopped(tmp_path / "run", before)


# --- a disk that is really full --------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MB of its own; skips where mounting is not permitted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "firstlight-test", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no permission to mount a small disk")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk: Path, room: int) -> Path:
    """Fill a disk but for `room` bytes."""
    filler = disk / "filler"
    filler.write_bytes(bytes(max(shutil.disk_usage(disk).free - room, 0)))
    return filler


def run_command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*_COMMAND, *map(str, arguments)], capture_output=True, text=True)


# Fills the disk up to some room in the moment before the second checkpoint is written: before
# the run, it would be refused for want of room.
_FILLING = """
import shutil, sys
from pathlib import Path
from firstlight.cli.main import main
from firstlight.training.checkpoints import RunCheckpoints

disk, room = Path(sys.argv[1]), int(sys.argv[2])
save = RunCheckpoints.save

def fill_and_save(checkpoints):
    if checkpoints.run.state.step == 8:
        checkpoints.saver.wait()
        (disk / "filler").write_bytes(bytes(shutil.disk_usage(disk).free - room))
    save(checkpoints)

RunCheckpoints.save = fill_and_save
sys.exit(main(sys.argv[3:]))
"""


@pytest.mark.parametrize("room", [4096, 400_000])
def test_train_on_full_disk_stops_and_resumes_once_freed(
    tmp_path: Path, recipe: dict[str, Any], small_disk: Path, room: int
) -> None:
    recipe["checkpoint"] |= {"keep_best": 0}  # the disk has room for one checkpoint less
    # On a busy machine, two processes may measure differently whether bf16 is faster.
    recipe["efficiency"] = {"precision": "fp32"}
    train(recipe)
    expected = losses(tmp_path / "run")
    run = small_disk / "run"
    recipe["run"]["dir"] = str(run)
    path = write_recipe(recipe, tmp_path / "recipe.yaml")
    done = subprocess.run(
        [sys.executable, "-c", _FILLING, str(small_disk), str(room), "train", str(path)],
        capture_output=True,
        text=True,
    )
    one_error(done)
    (kept,) = list_checkpoints(run)
    assert kept.name == "step-00000004"
    assert_good_run_stopped(run, contents(run / "checkpoints"))
    (small_disk / "filler").unlink()
    train(path, resume=True)
    assert losses(run) == expected


@pytest.mark.parametrize("room", [0, 4096, 12_288])
def test_prepare_on_full_disk_leaves_nothing(
    tmp_path: Path, corpus: Path, tokenizer: Tokenizer, small_disk: Path, room: int
) -> None:
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    fill(small_disk, room)
    out = small_disk / "out"
    one_error(run_command("prepare", corpus, "--tokenizer", tmp_path / "tokenizer", "--out", out))
    assert [path.name for path in small_disk.iterdir()] == ["filler"]
    arguments = ("tokenizer", "train", corpus, "--vocab-size", "400", "--out", out)
    one_error(run_command(*arguments))
    assert [path.name for path in small_disk.iterdir()] == ["filler"]
    (small_disk / "filler").unlink()
    assert run_command(*arguments).returncode == 0

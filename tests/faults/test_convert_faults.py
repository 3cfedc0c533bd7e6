"""A disk that fills up, and a conversion that is ended: one line of error, and nothing left."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from disks import limited_command
from scale import cases

from firstlight.training.loop import train

pytestmark = pytest.mark.usefixtures("forked_processes")

_COMMAND = [sys.executable, "-m", "firstlight", "convert"]


@pytest.fixture
def source(recipe: dict[str, Any]) -> Path:
    """A run; its weights are about 145 kB."""
    recipe["schedule"]["max_steps"] = 4
    train(recipe)
    return Path(recipe["run"]["dir"])


def one_error(done: subprocess.CompletedProcess[str]) -> str:
    """The one line that a command failed with, and that it is about the disk."""
    assert done.returncode == 1, done.stderr
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("firstlight: error: ")
    words = ("disk is full", "file size limit", "No space left", "File too large")
    assert any(part in line for part in words), line
    return line


@pytest.mark.parametrize(
    "options, limit",
    [
        (["--to", "hf"], 100),
        (["--to", "hf", "--dtype", "bf16"], 50_000),
        (["--to", "gguf"], 100),
        (["--to", "gguf"], 50_000),
    ],
)
def test_convert_with_file_size_limit_leaves_nothing(
    options: list[str], limit: int, source: Path, tmp_path: Path
) -> None:
    """The limits hit config.json and the weights; a GGUF file's header and its data."""
    if "gguf" in options:
        pytest.importorskip("gguf")
    before = sorted(tmp_path.rglob("*"))
    done = subprocess.run(
        limited_command(limit, "convert", source, "--out", tmp_path / "new" / "out", *options),
        capture_output=True,
        text=True,
    )
    one_error(done)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB of its own; skips where mounting is not permitted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "firstlight-test", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no permission to mount a small disk")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.parametrize(
    "to, room",
    [("hf", 12_288), ("hf", 102_400), ("gguf", 12_288), ("gguf", 102_400)][:: cases(3, 1)],
)
def test_convert_on_full_disk_leaves_nothing_and_succeeds_once_freed(
    to: str, room: int, source: Path, small_disk: Path
) -> None:
    if to == "gguf":
        pytest.importorskip("gguf")
    filler = small_disk / "filler"
    filler.write_bytes(bytes(shutil.disk_usage(small_disk).free - room))
    command = [*_COMMAND, str(source), "--out", str(small_disk / "out"), "--to", to]
    one_error(subprocess.run(command, capture_output=True, text=True))
    assert [path.name for path in small_disk.iterdir()] == ["filler"]
    filler.unlink()
    assert subprocess.run(command, capture_output=True).returncode == 0
    assert [path.name for path in small_disk.iterdir()] == ["out"]


# Ends itself as another process would, when the weights are written and about to be compared.
_TERMINATED = """
import os, signal, sys
from firstlight.cli.main import main
from firstlight.conversion import convert

def terminate(*_):
    os.kill(os.getpid(), signal.Signals(int(sys.argv[1])))

convert.require_same_tensors = terminate
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize(
    "number, exit_code", [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)]
)
def test_convert_terminated_leaves_nothing(
    number: signal.Signals, exit_code: int, source: Path, tmp_path: Path
) -> None:
    before = sorted(tmp_path.rglob("*"))
    command = [sys.executable, "-c", _TERMINATED, str(int(number)), "convert", str(source)]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "out")], capture_output=True, text=True
    )
    assert done.returncode == exit_code, done.stderr
    word = "interrupted" if number == signal.SIGINT else "terminated"
    assert done.stderr.strip() == f"firstlight: error: {word}"
    assert sorted(tmp_path.rglob("*")) == before

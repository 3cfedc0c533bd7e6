from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from firstlight.checkpoint.run_folder import held
from firstlight.errors import CheckpointError, ConfigError, StorageError
from firstlight.training import resuming
from firstlight.training.loop import train


def test_hold_folder_in_use_raises_and_is_free_after_release(tmp_path: Path) -> None:
    for _ in range(2):
        with held(tmp_path):
            for _ in range(2):
                with (
                    pytest.raises(CheckpointError, match="in use by another process"),
                    held(tmp_path),
                ):
                    pass


def test_hold_folder_impossible_path_raises_storage_error() -> None:
    with pytest.raises(StorageError, match="/proc"), held(Path("/proc/none/run")):
        pass


def test_hold_folder_unused_removes_created_folders(tmp_path: Path) -> None:
    with held(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b").is_dir()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "c").mkdir()
    with pytest.raises(ZeroDivisionError), held(tmp_path / "c" / "d"):
        raise ZeroDivisionError
    assert [path.name for path in tmp_path.rglob("*")] == ["c"]
    with held(tmp_path / "c"):
        pass
    assert [path.name for path in tmp_path.rglob("*")] == ["c"]


def test_hold_folder_with_new_files_or_older_lock_keeps_them(tmp_path: Path) -> None:
    with held(tmp_path / "a"):
        (tmp_path / "a" / "file").touch()
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [".lock", "file"]
    (tmp_path / "a" / "file").unlink()
    with held(tmp_path / "a"):
        pass
    assert [path.name for path in (tmp_path / "a").iterdir()] == [".lock"]


def test_hold_folder_lock_removed_while_waiting_is_recreated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise two processes would hold the folder: one with the new lock file, one with the
    deleted one.
    """
    lock, flock = tmp_path / "run" / ".lock", fcntl.flock
    taken_away: list[bool] = []

    def late(file: Any, operation: int) -> None:
        if not taken_away:
            taken_away.append(True)
            lock.unlink()
            lock.parent.rmdir()
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with held(lock.parent):
        assert lock.exists()
        monkeypatch.setattr(fcntl, "flock", flock)
        with pytest.raises(CheckpointError, match="in use"), held(lock.parent):
            pass


def test_hold_folder_path_is_file_raises_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is a file: choose another"), held(tmp_path / "file"):
        pass


def test_hold_folder_killed_process_releases_lock(tmp_path: Path) -> None:
    code = (
        "import os, sys, pathlib\n"
        "from firstlight.checkpoint.run_folder import held\n"
        "with held(pathlib.Path(sys.argv[1])):\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], check=False)
    assert done.returncode == -9
    assert os.listdir(tmp_path / "run") == [".lock"]
    with held(tmp_path / "run"):
        pass


def test_run_locks_folder_before_reading_checkpoints(
    recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise two processes that resume at the same time would both continue from the newest
    checkpoint.
    """
    looked = []

    def newest(run_folder: Path, *_: Any) -> None:
        looked.append(run_folder)
        with pytest.raises(CheckpointError, match="in use"), held(run_folder):
            pass
        raise ZeroDivisionError

    monkeypatch.setattr(resuming, "_newest_checkpoint", newest)
    with pytest.raises(ZeroDivisionError):
        train(recipe, resume=True)
    assert looked == [Path(recipe["run"]["dir"])]

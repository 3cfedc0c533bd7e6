"""A cooldown that is killed at any call that changes the disk goes on by the same command."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from disks import CrashError, CrashingDisk, WatchedDisk, installed
from driven import MEASURED, newest, one_thread, write_recipe
from scale import cases

from firstlight.checkpoint.manifest import checkpoint_folder
from firstlight.recipe import load_recipe
from firstlight.run_log.reader import read_json_lines
from firstlight.training.cooldown import cooldown_recipe
from firstlight.training.loop import train


@pytest.fixture(scope="module")
def trunk(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """The checkpoint of a trunk to branch off."""
    sections: dict[str, Any] = {
        "schedule": {"kind": "constant", "max_steps": 4, "warmup_steps": 1},
        "checkpoint": {"every_steps": 2, "asynchronous": False},
    }
    recipe = write_recipe(tmp_path_factory.mktemp("trunk"), "trunk", data, **sections)
    with one_thread():
        train(load_recipe(recipe))
    return checkpoint_folder(recipe.with_suffix(""), 2)


def outcome(run: Path) -> tuple[Any, ...]:
    last = newest(run)
    names = ("model.safetensors", "optimizer.safetensors")
    lines = read_json_lines(run / "metrics.jsonl")
    metrics = [{key: line[key] for key in line if key not in MEASURED} for line in lines]
    return last.name, metrics, *((last / name).read_bytes() for name in names)


# What is open where a process is killed stays open here.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_cooldown_killed_at_any_disk_call_resumes(
    trunk: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    def cool(name: str) -> Path:
        recipe, checkpoint = cooldown_recipe(trunk, 3, [("run.dir", str(tmp_path / name))])
        return train(recipe, branch_from=checkpoint, resume=True).run_folder

    with one_thread():
        with installed(WatchedDisk()) as watched:
            expected = outcome(cool("whole"))
        calls = len(watched.operations)
        assert calls > 30
        tried = cases(8, calls)
        for number, at in enumerate(range(0, calls, max(calls // tried, 1))):
            name = f"broken-{number}"
            with installed(CrashingDisk(at)), pytest.raises(CrashError):
                cool(name)
            assert outcome(cool(name)) == expected, at
            assert sorted((tmp_path / name).rglob(".tmp-*")) == []
    record_property("cases", ("killed cooldowns", number + 1))

"""A run whose model is chosen again, killed at any call that deletes its first steps."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from disks import CrashError, CrashingDisk, WatchedDisk, installed
from driven import newest, one_thread, write_recipe

from firstlight.checkpoint.checkpoint import load_trainer_state
from firstlight.from_texts.new_model import _forget_first_steps
from firstlight.recipe import load_recipe
from firstlight.run_log.reader import read_json_lines, read_length
from firstlight.training.loop import train


class _StopError(Exception):
    pass


def after_three_steps(record: Mapping[str, Any]) -> None:
    if record["step"] == 3:
        raise _StopError


def test_run_killed_while_restarting_with_new_model_resumes_with_recipe_model(
    data: Path, tmp_path: Path
) -> None:
    sections: dict[str, Any] = {
        # More time than the steps take.
        "schedule": {"max_steps": 4, "max_minutes": 60.0, "warmup_steps": 1},
        "checkpoint": {"every_steps": 2, "asynchronous": False},
        "evaluation": {"every_steps": 0, "max_rows": 2, "sample_tokens": 1},
    }
    # Each is copied into the folder of which the recipe says that it is the run's.
    recipe = write_recipe(tmp_path, "run", data, **sections)
    run, first = tmp_path / "run", tmp_path / "first"
    with one_thread():
        with pytest.raises(_StopError):
            train(load_recipe(recipe), on_step=after_three_steps)
        shutil.copytree(run, first)
        with installed(WatchedDisk()) as watched:
            _forget_first_steps(run)
        calls = len(watched.calls)
        assert calls > 4
        # Around the rename of the checkpoints, around the last files, and never.
        for at in (1, 2, 3, calls - 1, calls, calls + 1):
            shutil.rmtree(run)
            shutil.copytree(first, run)
            if at <= calls:
                with installed(CrashingDisk(at)), pytest.raises(CrashError):
                    _forget_first_steps(run)
            else:
                _forget_first_steps(run)
                assert not read_length(run)  # whose seconds would count as used
                other = {**sections, "model": {"hidden_size": 32}}
                recipe = write_recipe(tmp_path, "run", data, **other)
            assert train(load_recipe(recipe), resume=True).step == 4
            model = load_recipe(recipe).model
            assert model is not None
            saved = load_trainer_state(newest(run))["recipe"]["model"]
            assert saved["hidden_size"] == model.hidden_size
            steps = [line["step"] for line in read_json_lines(run / "metrics.jsonl")]
            assert steps == [1, 2, 3, 4]
            assert sorted(run.rglob(".tmp-*")) == []

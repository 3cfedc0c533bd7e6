"""A run in minutes that is killed at any call that changes the disk, around its decision too."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from disks import CrashError, CrashingDisk, WatchedDisk, installed
from driven import MEASURED, newest, one_thread, write_recipe
from scale import cases

from firstlight.optim.schedule import DecidedLength
from firstlight.recipe import load_recipe
from firstlight.run_log.reader import read_json_lines, read_length
from firstlight.training import loop, time_budget
from firstlight.training.loop import train
from firstlight.training.step import train_step
from firstlight.training.time_budget import LoopTimes, TimeBudget

#: Seconds that a step takes on the test's clock, of 180.
_STEP_SECONDS = 10.0


def outcome(run: Path) -> tuple[Any, ...]:
    last = newest(run)
    names = ("model.safetensors", "optimizer.safetensors")
    lines = read_json_lines(run / "metrics.jsonl")
    measured = {*MEASURED, "elapsed_seconds"}
    metrics = [{key: line[key] for key in line if key not in measured} for line in lines]
    return last.name, metrics, *((last / name).read_bytes() for name in names)


def decided_as(length: Mapping[str, Any]) -> Callable[..., int | None]:
    def decided(_: TimeBudget, step: int, *others: Any) -> int | None:
        return int(length["max_steps"]) if step >= length["decided_at"] else None

    return decided


def kept(budget: TimeBudget, *_: Any) -> int:
    """A machine of steady speed needs no correction."""
    assert isinstance(budget.length, DecidedLength)
    return budget.length.max_steps


# What is open where a process is killed stays open here.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_timed_run_killed_at_any_disk_call_resumes(
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    now = [0.0]

    @functools.wraps(train_step)
    def slow_step(*args: Any, **options: Any) -> Any:
        now[0] += _STEP_SECONDS
        return train_step(*args, **options)

    monkeypatch.setattr(loop, "train_step", slow_step)
    monkeypatch.setattr(time_budget, "LoopTimes", lambda: LoopTimes(lambda: now[0]))
    monkeypatch.setattr(time_budget, "_usual_tokens_per_second", lambda *_: 51.2)
    sections: dict[str, Any] = {
        "schedule": {"kind": "wsd", "max_steps": None, "max_minutes": 3.0, "warmup_steps": 2},
        "checkpoint": {"every_steps": 6, "asynchronous": False},
        "evaluation": {"every_steps": 0, "max_rows": 2, "sample_tokens": 1},
    }

    def run(name: str) -> Path:
        recipe = write_recipe(tmp_path, name, data, **sections)
        return train(load_recipe(recipe), resume=True).run_folder

    expected: dict[tuple[int, int], tuple[Any, ...]] = {}
    with one_thread():
        with installed(WatchedDisk()) as watched:
            whole = run("whole")
        length = read_length(whole)
        assert (length["max_steps"], length["decided_at"]) == (17, 13)
        calls = len(watched.calls)
        found = enumerate(watched.calls, start=1)
        renames = [n for n, (call, name) in found if call == "rename" and "length.json" in name]
        _, renamed, _ = renames  # at the start, the decision, at the end
        tried = {*range(0, calls, max(calls // cases(4, calls), 1))}
        # Right before the decision is on the disk, and right after.
        tried |= {renamed, renamed + 1}
        for at in sorted(tried):
            name = f"broken-{at}"
            with installed(CrashingDisk(at)), pytest.raises(CrashError):
                run(name)
            broken = run(name)
            decision = read_length(broken)
            assert "replaced" not in decision
            key = (decision["max_steps"], decision["decided_at"])
            if key not in expected:
                with monkeypatch.context() as patch:
                    patch.setattr(TimeBudget, "decided_steps", decided_as(decision))
                    patch.setattr(TimeBudget, "corrected_steps", kept)
                    expected[key] = outcome(run(f"whole-{key}"))
            assert outcome(broken) == expected[key], at
            assert sorted(broken.rglob(".tmp-*")) == []
    record_property("cases", ("killed runs in minutes", len(tried)))

"""A run that is stopped by a signal at any step, or several times, is the run that was not."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
from driven import Chain, differences, drive, run_of, write_recipe
from scale import FULL, cases

from firstlight.run_log.reader import read_json_lines

pytestmark = pytest.mark.usefixtures("forked_processes")

_STEPS = cases(20, 40)
_SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1")
_SETTINGS: dict[str, dict[str, Any]] = {
    # fp16's gradients overflow now and then: the scale doubles every few steps.
    "fp16": {"efficiency": {"precision": "fp16"}},
    "muon": {"optimizer": {"name": "muon"}, "checkpoint": {"asynchronous": True}},
    # It adds nothing to what a checkpoint holds.
    **({"bf16": {"efficiency": {"precision": "bf16"}}} if FULL else {}),
}


def stop(generator: random.Random, step: int, before: int = 0) -> dict[str, Any]:
    """A signal somewhere in a step, maybe in its evaluation, of a run that has done `before`."""
    place, count = generator.choice((("update", 1), ("record", 1)))
    if step % 5 == 0:
        # An evaluation checks for signals at its start, after both losses, and after each piece of
        # its sample text, which has at least one.
        place, count = generator.choice((("check", generator.randint(1, 4)), (place, count)))
    if step == before + 1 and place == "update":
        place = "record"  # until its first step is done, a signal ends a run at once
    return {"signal": [generator.choice(_SIGNALS), place, step, count], "growth": 4}


def plan_of(name: str, folder: Path, data: Path) -> list[Chain]:
    """A whole run, runs that are stopped at a step each, and some that are stopped three times."""
    generator = random.Random(f"stops {name}")
    # An epoch ends before the steps do.
    sizes = {"schedule": {"max_steps": _STEPS}, "batch": {"micro_batch_size": 16}}
    settings = {**_SETTINGS[name], **sizes}
    options = {"growth": 4}
    plan: list[Chain] = [[(write_recipe(folder, f"{name}-whole", data, **settings), options)]]
    for step in sorted(generator.sample(range(1, _STEPS + 1), cases(2, _STEPS))):
        recipe = write_recipe(folder, f"{name}-{step}", data, **settings)
        plan.append([(recipe, stop(generator, step)), (recipe, options)])
    for number in range(cases(1, 10)):
        recipe = write_recipe(folder, f"{name}-three-{number}", data, **settings)
        places = [0, *sorted(generator.sample(range(1, _STEPS), 3))]
        stops = [
            (recipe, stop(generator, step, before)) for before, step in itertools.pairwise(places)
        ]
        plan.append([*stops, (recipe, options)])
    return plan


def test_run_stopped_at_any_step_ends_like_uninterrupted_run(
    tmp_path: Path, data: Path, record_property: Any
) -> None:
    plans = {name: plan_of(name, tmp_path, data) for name in _SETTINGS}
    results = iter(drive([chain for plan in plans.values() for chain in plan]))
    count = 0
    for name, plan in plans.items():
        ((whole, _),) = plan[0]
        for chain in plan:
            done = next(results)
            said = f"{chain}: {done}"
            *stopped, (recipe, _) = chain
            codes = [result["code"] for result in done]
            # One that is stopped in its last step is complete, unless it was to be evaluated.
            ends = {0, 75} if stopped and stopped[-1][1]["signal"][2] == _STEPS else {75}
            assert codes[-1] == 0, said
            assert set(codes[:-1]) <= ends, said
            assert differences(run_of(recipe), run_of(whole)) == [], said
            count += len(stopped)
        records = read_json_lines(run_of(whole) / "metrics.jsonl")
        assert [record["step"] for record in records] == list(range(1, _STEPS + 1))
        assert {int(record["epoch"]) for record in records} >= {0, 1}
        if name == "fp16":
            assert 0 < records[-1]["skipped_steps"] < _STEPS
    record_property("cases", ("stops at a step, and resumed", count))


def test_run_stopped_loses_no_finished_step(tmp_path: Path, data: Path) -> None:
    """The step at hand is the last, and a stop in an evaluation leaves that for later: even when
    what goes on from there is killed before the next checkpoint, it is in the logs once."""
    recipe, broken, whole = (
        write_recipe(tmp_path, name, data, schedule={"max_steps": 10})
        for name in ("run", "broken", "whole")
    )
    places = [("update", 3), ("check", 5), ("record", 6), ("save", 8)]
    stops: Chain = [(recipe, {"signal": ["SIGTERM", *place, 1]}) for place in places]
    stopped = {"signal": ["SIGTERM", "check", 5, 3]}
    killed = {"signal": ["SIGTERM", "update", 7, 1], "again": "SIGTERM"}
    plan: list[Chain] = [stops, [(broken, stopped), (broken, killed), (broken, {})], [(whole, {})]]
    results, others, _ = drive(plan)
    assert [result["code"] for result in results] == [75] * 4
    assert [result["saved"] for result in results] == [3, 5, 6, 8]
    assert [result["pending"] for result in results] == [False, True, False, False]
    assert [result["lines"][-1] for result in results] == [3, 4, 6, 8]
    assert all("stopped by SIGTERM and saved" in result["error"] for result in results)
    assert [result["code"] for result in others] == [75, 143, 0]
    assert [result["lines"][-1] for result in others] == [4, 6, 10]
    assert differences(run_of(broken), run_of(whole)) == ["drawn again"]  # two steps

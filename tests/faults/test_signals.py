"""A run that is asked to end, at whatever moment, has all it did on the disk within a step."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from driven import Chain, differences, drive, run_of, write_recipe
from scale import cases

pytestmark = pytest.mark.usefixtures("forked_processes")
_STEPS = 12
_SECTIONS: dict[str, dict[str, Any]] = {
    "schedule": {"max_steps": _STEPS},
    "evaluation": {"every_steps": 3, "on_start": False},
    "checkpoint": {"every_steps": 4},
}
_ALL = list(range(1, _STEPS + 1))


def assert_durable(before: int, result: dict[str, Any], said: str) -> int:
    """A run that got SIGTERM, and had done `before` steps when it began; its steps now."""
    done, saved, lines = before + result["done"], result["saved"], result["lines"]
    if result["code"] == 75:
        # The step at hand was finished and is saved, and so are the metrics of all that are.
        assert saved - done in (0, 1), said
        assert "stopped by SIGTERM and saved: to continue, " in result["error"], said
        assert lines == _ALL[: saved - result["pending"]], said
    elif result["code"] == 0:
        # The signal came when nothing was left to be stopped.
        assert saved == done == _STEPS, said
    else:
        # At once: before a step of this process was done, or when the last was saved.
        assert result["code"] in (143, -signal.SIGTERM), said
        assert done in (before, _STEPS), said
        assert saved == done, said
    return int(saved)


def test_sigterm_in_any_phase_of_a_run_loses_nothing(
    tmp_path: Path, data: Path, record_property: Any
) -> None:
    generator = random.Random("phases")
    whole = write_recipe(tmp_path, "whole", data, **_SECTIONS)
    ((first,),) = drive([[(whole, {"events": -1})]])  # how many phases there are
    count = cases(3, 55)
    chains: list[Chain] = []
    for number in range(count):
        recipe = write_recipe(tmp_path, f"run-{number}", data, **_SECTIONS)
        # In the steps; in equal parts of a run, so that none is left out; then somewhere in what
        # goes on.
        place = int((number + generator.random()) / count * first["events"])
        if number == 0:
            place = (first["first_record"] + first["last_record"]) // 2
        again = generator.randint(1, max(first["events"] - place, 1))
        chains.append([(recipe, {"events": place}), (recipe, {"events": again}), (recipe, {})])
    # In an evaluation, and then before the next process has saved that it is done.
    recipe = write_recipe(tmp_path, "evaluated", data, **_SECTIONS)
    evaluated = [{"signal": ["SIGTERM", *place, 1]} for place in (("check", 3), ("save", 3))]
    chains.append([*((recipe, faults) for faults in evaluated), (recipe, {})])
    codes = []
    for chain, results in zip(chains, drive(chains), strict=True):
        said, before = f"{chain}: {results}", 0
        for result in results[:2]:
            if "done" in result:  # else it came to its end before that phase
                before = assert_durable(before, result, said)
                codes.append(result["code"])
        assert results[2]["code"] == 0, said
        # What was done when a process ended at once is done again.
        ended = {result["code"] for result in results} & {143, -signal.SIGTERM}
        may_differ = {"drawn again"} if ended else set()
        assert set(differences(run_of(chain[0][0]), run_of(whole))) <= may_differ, said
    assert 75 in codes
    assert len(codes) > 1.5 * count
    record_property("cases", ("SIGTERM in a phase of a run", len(codes)))


def test_second_signal_ends_run_at_once_and_request_file_saves_checkpoint(
    tmp_path: Path, data: Path
) -> None:
    whole, asked = write_recipe(tmp_path, "whole", data, **_SECTIONS), tmp_path / "asked.yaml"
    write_recipe(tmp_path, "asked", data, **{**_SECTIONS, "checkpoint": {"every_steps": 0}})
    update = {"signal": ["SIGTERM", "update", 6, 1]}
    codes = {"SIGTERM": 143, "SIGINT": 130, "SIGUSR1": 138, "SIGHUP": 129}
    plan: list[Chain] = [[(whole, {})], [(asked, {**update, "again": "SIGTERM", "save_now": 3})]]
    for again in codes:
        recipe = write_recipe(tmp_path, again, data, **_SECTIONS)
        plan.append([(recipe, {**update, "again": again}), (recipe, {})])
    (_, (found,), *results) = drive(plan)
    assert (found["code"], found["saved"], found["lines"]) == (143, 3, _ALL[:5])
    assert not (run_of(asked) / "save-now").exists()
    for again, (ended, resumed) in zip(codes, results, strict=True):
        # What was saved before is there.
        assert (ended["code"], ended["saved"], ended["lines"]) == (codes[again], 4, _ALL[:5])
        assert resumed["code"] == 0
        # The fifth step was done twice.
        assert differences(run_of(tmp_path / f"{again}.yaml"), run_of(whole)) == ["drawn again"]


def test_run_limited_to_one_minute_at_a_time_makes_progress(tmp_path: Path, data: Path) -> None:
    """The time is over when the first step is done, each time."""
    sections = {**_SECTIONS, "schedule": {"max_steps": 5}}
    recipe = write_recipe(tmp_path, "run", data, **sections, run={"max_minutes": 1e-9})
    whole = write_recipe(tmp_path, "whole", data, **sections)
    (_, results) = drive([[(whole, {})], [(recipe, {})] * 6])
    # An evaluation that the time did not suffice for is made first the next time.
    assert [result["saved"] for result in results] == [1, 2, 3, 4, 5, 5]
    assert [result["pending"] for result in results] == [False] * 2 + [True, False, True, False]
    assert [result["code"] for result in results] == [75] * 5 + [0]
    assert "stopped by max_minutes and saved" in results[0]["error"]
    assert differences(run_of(recipe), run_of(whole)) == ["state"]  # the recipe says so


_STARTING = """
import os, signal, sys, threading
number = signal.Signals(int(sys.argv[1]))

class Finder:
    def find_spec(self, name, *_):
        if name == sys.argv[2]:
            os.kill(os.getpid(), number)

sys.meta_path.insert(0, Finder())
import pytest
from firstlight.cli.main import main
sys.exit(main(["train", sys.argv[3]]))
"""


_CODES = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGUSR1: 138}
_STARTS = [
    (module, number) for module in ("torch", "firstlight.training.start") for number in _CODES
]


@pytest.mark.usefixtures("real_processes")  # imports
def test_signal_during_run_start_ends_it_at_once_and_leaves_nothing(
    tmp_path: Path, data: Path, record_property: Any
) -> None:
    recipe = write_recipe(tmp_path, "run", data)
    starts = random.Random("starts").sample(_STARTS, cases(2, len(_STARTS)))
    for module, number in starts:
        done = subprocess.run(
            [sys.executable, "-c", _STARTING, str(int(number)), module, str(recipe)],
            capture_output=True,
            text=True,
        )
        assert done.returncode == _CODES[number], done.stderr
        word = "interrupted" if number == signal.SIGINT else "terminated"
        # What comes in the middle of an import is heard right after it.
        last = done.stderr.splitlines()[-1]
        words = last.removesuffix(": run the same command again")
        assert words.removesuffix(" before the first step") == f"firstlight: error: {word}", module
        assert "Traceback" not in done.stderr
        assert not run_of(recipe).exists()
    record_property("cases", ("signals while a run starts", len(starts)))

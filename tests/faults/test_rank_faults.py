"""A rank that fails, is killed or stops ends the others, with an error that names it."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
from rank_scenarios import run_ranks, two_ranks
from scale import cases

from builders import slow_but

pytestmark = pytest.mark.usefixtures("forked_processes")

#: Longer than a rank that has to wait for a core is silent.
_TIMEOUT_SECONDS = 10.0


def scenario(**more: Any) -> dict[str, Any]:
    plan = {"steps": 4, "timeout": _TIMEOUT_SECONDS} | more.pop("plan", {})
    return {"plan": plan, "ranks": two_ranks(), **more}


def fault(kind: str, rank: int, step: int) -> dict[str, Any]:
    return scenario(plan={"faults": [{"kind": kind, "rank": rank, "step": step}]})


def error_of(result: dict[str, Any]) -> str:
    """The one error that a rank gave."""
    errors = [line for line in result["said"].splitlines() if line.startswith("firstlight: error")]
    assert len(errors) == 1, result
    return str(errors[0].removeprefix("firstlight: error: "))


def assert_names(result: dict[str, Any], rank: int, pid: int, kind: str, said: str) -> None:
    """A rank that was left behind."""
    assert result["code"] == 1, said
    error = error_of(result)
    assert error.startswith(f"rank {rank} on "), said
    if kind in ("raise", "SIGUSR1"):
        assert error.endswith(" failed: row 7 of shard 3 is damaged"), said
    else:
        assert re.search(rf"\(pid {pid}\) (has|is gone)", error), said


@pytest.mark.parametrize("kind", slow_but(["kill"], ["kill", "stop", "raise"]))
def test_lost_rank_is_named_by_remaining_rank(kind: str) -> None:
    ranks = (0, 1)
    results = run_ranks([fault(kind, rank, 2) for rank in ranks])
    for rank, result in zip(ranks, results, strict=True):
        gone, left = result[rank], result[1 - rank]
        assert_names(left, rank, gone["pid"], kind, f"{rank}: {result}")
        assert gone["code"] == {"kill": -9, "stop": None, "raise": 1}[kind]
        if kind == "raise":
            assert error_of(gone) == "row 7 of shard 3 is damaged"
            # Long before the timeout of an exchange is over.
            assert "has not answered" not in left["said"]


@pytest.mark.slow
def test_lost_rank_is_reported_to_busy_rank() -> None:
    """Not in an exchange: what is heard there is not heard by the main thread."""
    faults = [{"kind": "sleep", "rank": 0, "step": 2}, {"kind": "raise", "rank": 1, "step": 2}]
    busy = scenario(plan={"faults": faults})
    # Longer than the timeout: a rank that computes is not gone.
    computing = scenario(plan={"pause": 2 * _TIMEOUT_SECONDS})
    result, whole = run_ranks([busy, computing])
    assert_names(result[0], 1, result[1]["pid"], "raise", str(result))
    assert [rank["code"] for rank in whole] == [0, 0], whole


@pytest.mark.slow
def test_lost_rank_is_handled_at_any_moment(record_property: Any) -> None:
    generator = random.Random("ranks")
    scenarios: list[dict[str, Any]] = []
    for number in range(cases(12, 60)):
        name = ("SIGKILL", "SIGSTOP", "SIGUSR1")[number % 3]
        sent = {"name": name, "rank": number // 3 % 2, "after": 2 * generator.random()}
        scenarios.append(scenario(plan={"endless": True}, signal=sent))
    for tried, result in zip(scenarios, run_ranks(scenarios, at_once=4), strict=True):
        kind, rank = tried["signal"]["name"], tried["signal"]["rank"]
        said = f"{tried['signal']}: {result}"
        assert_names(result[1 - rank], rank, result[rank]["pid"], kind, said)
    record_property("cases", ("a rank fails, is killed or stopped", len(scenarios)))


@pytest.mark.slow
@pytest.mark.parametrize("step", [-1, 0, 1, 4])
def test_lost_rank_before_first_or_after_last_step_is_handled(step: int) -> None:
    kinds = [(kind, rank) for kind in ("kill", "stop", "raise") for rank in (0, 1)]
    results = run_ranks([fault(kind, rank, step) for kind, rank in kinds])
    for (kind, rank), result in zip(kinds, results, strict=True):
        left, said = result[1 - rank], f"{kind} {rank}: {result}"
        assert left["code"] == 1, said
        if step >= 0:
            assert_names(left, rank, result[rank]["pid"], kind, said)
        elif rank == 1:
            assert error_of(left).startswith("rank 1 did not connect within 10 s"), said
        else:
            assert " could not reach the rendezvous at " in error_of(left), said
            assert " within 10 s " in error_of(left), said

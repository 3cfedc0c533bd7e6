"""Ranks that don't belong together find out before they begin."""

from __future__ import annotations

from typing import Any

import pytest
from rank_scenarios import run_ranks, two_ranks

pytestmark = pytest.mark.usefixtures("forked_processes")


def codes(result: list[dict[str, Any]]) -> list[int | None]:
    return [rank["code"] for rank in result]


def four_ranks() -> list[dict[str, str]]:
    return [{"RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_RANK": str(rank)} for rank in range(4)]


@pytest.mark.slow
def test_ranks_of_one_run_end_together_and_foreign_ranks_report_reason() -> None:
    plan: dict[str, Any] = {"steps": 3, "timeout": 60.0}
    both = two_ranks()
    other_size = [both[0], both[1] | {"WORLD_SIZE": "4"}]
    same_rank = [both[0], both[1], both[1]]
    four = four_ranks()
    well, fourfold, recipes, sizes, twice = run_ranks(
        [
            {"plan": plan, "ranks": both},
            {"plan": plan, "ranks": four},
            {"plan": plan | {"fingerprints": {"1": "other"}}, "ranks": both},
            {"plan": plan, "ranks": other_size},
            # The second may come when the others are long at work.
            {"plan": plan | {"endless": True}, "ranks": same_rank},
        ]
    )
    assert codes(well) == [0, 0], well
    assert codes(fourfold) == [0, 0, 0, 0], fourfold
    for rank in recipes:
        assert rank["code"] == 2, recipes
        assert "error: rank 1 on " in rank["said"]
        assert " has a different recipe than rank 0 on " in rank["said"]
    for rank in sizes:
        assert rank["code"] in (1, 2), sizes
        assert " was started as one of 4 processes, but rank 0 on " in rank["said"]
    assert 2 in codes(twice), twice
    assert any("another process also has rank 1" in rank["said"] for rank in twice)


@pytest.mark.slow
def test_ranks_without_peers_name_missing_ones() -> None:
    # Those who come may come some seconds after one another.
    plan: dict[str, Any] = {"steps": 3, "timeout": 15.0}
    four = four_ranks()
    # The fewer start at a time, the sooner one after the other they come.
    missing, alone = run_ranks(
        [
            {"plan": plan, "ranks": [four[0], four[2]]},
            {"plan": plan, "ranks": [two_ranks()[1]]},
        ]
    )
    for rank in missing:
        assert rank["code"] == 1, missing
        assert "error: ranks 1, 3 did not connect within 15 s" in rank["said"]
    assert codes(alone) == [1], alone
    assert "could not reach the rendezvous at 127.0.0.1:" in alone[0]["said"]

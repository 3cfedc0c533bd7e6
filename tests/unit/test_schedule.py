from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from firstlight.optim.schedule import ScheduleConfig, warmup_cosine


def test_every_value_of_a_short_schedule() -> None:
    values = [warmup_cosine(step, 8, 4, 0.1) for step in range(10)]
    expected = [
        0.25,
        0.5,
        0.75,
        1.0,
        0.1 + 0.45 * (1 + math.cos(math.pi * 1 / 4)),
        0.1 + 0.45 * (1 + math.cos(math.pi * 2 / 4)),
        0.1 + 0.45 * (1 + math.cos(math.pi * 3 / 4)),
        0.1,
        0.1,
        0.1,
    ]
    assert values == pytest.approx(expected, abs=1e-15)


def test_warm_up_ends_at_exactly_one_and_the_next_step_is_below() -> None:
    assert warmup_cosine(98, 1000, 100, 0.1) == 0.99
    assert warmup_cosine(99, 1000, 100, 0.1) == 1.0
    assert 0.99 < warmup_cosine(100, 1000, 100, 0.1) < 1.0


def test_the_last_step_has_exactly_the_minimum_and_the_one_before_more() -> None:
    assert warmup_cosine(999, 1000, 100, 0.1) == 0.1
    assert warmup_cosine(998, 1000, 100, 0.1) > 0.1
    assert warmup_cosine(999, 1000, 100, 0.0) == 0.0


def test_half_way_down_is_the_mean_of_peak_and_minimum() -> None:
    # 100 steps of decay, the 50th of them
    assert warmup_cosine(10 + 49, 110, 10, 0.2) == pytest.approx(0.6, abs=1e-12)


def test_the_first_update_already_learns() -> None:
    assert warmup_cosine(0, 100, 10, 0.1) == 0.1
    assert warmup_cosine(0, 100, 1, 0.1) == 1.0


def test_without_warm_up_the_cosine_begins_at_once() -> None:
    expected = 0.5 * (1 + math.cos(math.pi / 10))
    assert warmup_cosine(0, 10, 0, 0.0) == pytest.approx(expected, abs=1e-15)


def test_a_schedule_that_is_all_warm_up_ends_at_the_peak() -> None:
    assert [warmup_cosine(step, 4, 4, 0.1) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]


def test_min_lr_ratio_one_is_a_constant_rate_after_warm_up() -> None:
    assert {warmup_cosine(step, 50, 5, 1.0) for step in range(4, 60)} == {1.0}


@given(
    max_steps=st.integers(1, 500),
    warmup_share=st.floats(0, 1),
    ratio=st.floats(0, 1),
)
def test_rises_to_the_peak_then_falls_to_the_minimum_within_bounds(
    max_steps: int, warmup_share: float, ratio: float
) -> None:
    warmup = int(max_steps * warmup_share)
    values = [warmup_cosine(step, max_steps, warmup, ratio) for step in range(max_steps + 3)]
    assert all(0 <= value <= 1 for value in values)
    assert values[:warmup] == sorted(values[:warmup])
    assert values[warmup:] == sorted(values[warmup:], reverse=True)
    assert all(value >= ratio - 1e-12 for value in values[warmup:])
    if warmup < max_steps:
        assert values[max_steps - 1] == pytest.approx(ratio, abs=1e-12)
    if warmup:
        assert values[warmup - 1] == 1.0
        assert values[0] == 1 / warmup


@given(step=st.integers(0, 10**9))
def test_far_beyond_the_last_step_the_minimum_stays(step: int) -> None:
    assert warmup_cosine(100 + step, 100, 10, 0.25) == pytest.approx(0.25, abs=1e-15)


@pytest.mark.parametrize(
    "values",
    [
        {"max_steps": 0},
        {"warmup_steps": -1},
        {"min_lr_ratio": 1.5},
        {"min_lr_ratio": -0.1},
        {"min_lr_ratio": float("nan")},
        {"max_steps": 2.5},
        {"decay_steps": 3},
    ],
)
def test_impossible_schedules_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        ScheduleConfig.model_validate(values)

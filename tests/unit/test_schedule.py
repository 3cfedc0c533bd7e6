from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from firstlight.errors import ConfigError
from firstlight.optim.schedule import Schedule, ScheduleConfig, resolve_schedule, warmup_cosine


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


def resolved(
    rows: int = 1000, a_step: int = 10, seq_len: int = 8, peak: float = 1e-3, **values: Any
) -> Schedule:
    return resolve_schedule(ScheduleConfig.model_validate(values), peak, rows, a_step, seq_len)


def test_nothing_given_is_one_epoch_with_a_twentieth_of_warm_up_down_to_a_tenth() -> None:
    assert resolved(rows=991) == Schedule(100, 5, 100, 0.1)
    assert resolved(max_steps=61) == Schedule(61, 3, 61, 0.1)


@pytest.mark.parametrize(
    "epochs, rows, steps",
    # 1.1 x 100 is more than 110 as a float.
    [
        (1, 1000, 100),
        (3, 1000, 300),
        (1.1, 100, 11),
        (0.25, 1000, 25),
        (2, 991, 199),
        (1, 991, 100),
    ],
)
def test_epochs_are_passes_over_the_rows(epochs: float, rows: int, steps: int) -> None:
    assert resolved(rows, epochs=epochs).max_steps == steps


@given(epochs=st.integers(1, 50), rows=st.integers(1, 10**6), a_step=st.integers(1, 512))
def test_epochs_end_with_the_first_step_that_completes_them(
    epochs: int, rows: int, a_step: int
) -> None:
    steps = resolved(rows, a_step, epochs=epochs).max_steps
    assert (steps - 1) * a_step < epochs * rows <= steps * a_step


@pytest.mark.parametrize(
    "values, steps",
    [
        ({"warmup_steps": 0}, 0),
        ({"warmup_tokens": 0}, 0),
        ({"warmup_tokens": 800}, 10),  # 10 rows of 8 tokens a step
        ({"warmup_tokens": 801}, 11),
        ({"warmup_ratio": 0.07}, 7),  # 7.000000000000001 as a float
        ({"warmup_ratio": 0.071}, 8),
        ({"warmup_ratio": 1}, 100),
        ({"warmup_ratio": 0.1, "max_steps": 1000}, 100),
        ({"decay_steps": 40}, 2),
        ({"decay_steps": 40, "warmup_ratio": 0.1}, 10),
    ],
)
def test_the_warm_up_in_steps_tokens_or_as_a_share(values: dict[str, Any], steps: int) -> None:
    assert resolved(**values).warmup_steps == steps


def test_after_decay_steps_the_rate_stays_at_the_minimum() -> None:
    schedule = resolved(max_steps=12, decay_steps=8, warmup_steps=4)
    found = [schedule.lr_scale(step) for step in range(12)]
    assert found == [*(warmup_cosine(step, 8, 4, 0.1) for step in range(8)), 0.1, 0.1, 0.1, 0.1]
    assert found[6] > found[7] == 0.1


def test_the_minimum_is_a_share_or_a_value() -> None:
    assert resolved(min_lr_ratio=0.25).min_lr_ratio == 0.25
    assert resolved(peak=6e-4, min_learning_rate=6e-5).min_lr_ratio == pytest.approx(0.1)
    assert resolved(min_learning_rate=0).lr_scale(99) == 0.0
    assert resolved(peak=1e-3, min_learning_rate=1e-3).lr_scale(99) == 1.0


def test_a_resolved_section_is_read_as_it_was() -> None:
    for values in ({}, {"min_learning_rate": 1e-4, "epochs": 2}, {"min_lr_ratio": None}):
        config = ScheduleConfig.model_validate(values)
        assert ScheduleConfig.model_validate(config.model_dump()) == config
    assert ScheduleConfig().min_lr_ratio == 0.1


def test_a_decay_that_ends_in_the_warm_up_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"decay_steps 10 is not after the warm-up of 10 steps"):
        resolved(decay_steps=10, warmup_ratio=0.1)


@pytest.mark.parametrize(
    "values, says",
    [
        ({"max_steps": 5, "epochs": 1}, "max_steps and epochs both say how long the run is"),
        ({"warmup_steps": 0, "warmup_ratio": 0.1}, "warmup_steps and warmup_ratio both say"),
        ({"warmup_tokens": 5, "warmup_ratio": 0.1}, "warmup_tokens and warmup_ratio both say"),
        ({"min_lr_ratio": 0.1, "min_learning_rate": 1e-5}, "min_lr_ratio and min_learning_rate"),
    ],
)
def test_two_answers_to_one_question_are_refused(values: dict[str, float], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        ScheduleConfig.model_validate(values)


@pytest.mark.parametrize(
    "values",
    [
        {"max_steps": 0},
        {"warmup_steps": -1},
        {"min_lr_ratio": 1.5},
        {"min_lr_ratio": -0.1},
        {"min_lr_ratio": float("nan")},
        {"max_steps": 2.5},
        {"decay_steps": 0},
        {"epochs": 0},
        {"warmup_ratio": 1.1},
        {"warmup_tokens": -1},
        {"min_learning_rate": -1e-5},
        {"cooldown": 3},
    ],
)
def test_impossible_schedules_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        ScheduleConfig.model_validate(values)

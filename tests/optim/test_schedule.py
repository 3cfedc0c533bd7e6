from __future__ import annotations

import itertools
import math
import typing
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from firstlight.errors import ConfigError
from firstlight.optim.schedule import (
    BatchSchedule,
    Schedule,
    ScheduleConfig,
    ScheduleKind,
    resolve_schedule,
)

KINDS = typing.get_args(ScheduleKind)


def warmup_cosine(step: int, decay_steps: int, warmup_steps: int, min_lr_ratio: float) -> float:
    return Schedule(decay_steps, warmup_steps, decay_steps, min_lr_ratio).lr_scale(step)


def test_short_schedule_matches_every_expected_value() -> None:
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


def test_warmup_ends_at_exactly_one_and_next_step_is_lower() -> None:
    assert warmup_cosine(98, 1000, 100, 0.1) == 0.99
    assert warmup_cosine(99, 1000, 100, 0.1) == 1.0
    assert 0.99 < warmup_cosine(100, 1000, 100, 0.1) < 1.0


def test_cosine_schedule_reaches_minimum_exactly_at_last_step() -> None:
    assert warmup_cosine(999, 1000, 100, 0.1) == 0.1
    assert warmup_cosine(998, 1000, 100, 0.1) > 0.1
    assert warmup_cosine(999, 1000, 100, 0.0) == 0.0


def test_cosine_schedule_midpoint_is_mean_of_peak_and_minimum() -> None:
    # the 50th of 100 decay steps
    assert warmup_cosine(10 + 49, 110, 10, 0.2) == pytest.approx(0.6, abs=1e-12)


def test_warmup_first_step_is_above_zero() -> None:
    assert warmup_cosine(0, 100, 10, 0.1) == 0.1
    assert warmup_cosine(0, 100, 1, 0.1) == 1.0


def test_cosine_schedule_without_warmup_decays_from_first_step() -> None:
    expected = 0.5 * (1 + math.cos(math.pi / 10))
    assert warmup_cosine(0, 10, 0, 0.0) == pytest.approx(expected, abs=1e-15)


def test_schedule_of_only_warmup_ends_at_peak() -> None:
    assert [warmup_cosine(step, 4, 4, 0.1) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]


def test_cosine_schedule_min_lr_ratio_one_is_constant_after_warmup() -> None:
    assert {warmup_cosine(step, 50, 5, 1.0) for step in range(4, 60)} == {1.0}


@given(
    max_steps=st.integers(1, 500),
    warmup_share=st.floats(0, 1),
    ratio=st.floats(0, 1),
)
def test_cosine_schedule_rises_to_peak_then_falls_to_minimum_within_bounds(
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
def test_cosine_schedule_far_beyond_last_step_stays_at_minimum(step: int) -> None:
    assert warmup_cosine(100 + step, 100, 10, 0.25) == pytest.approx(0.25, abs=1e-15)


def resolved(
    rows: int = 1000, a_step: int = 10, seq_len: int = 8, peak: float = 1e-3, **values: Any
) -> Schedule:
    batch = BatchSchedule(a_step, a_step)
    return resolve_schedule(ScheduleConfig.model_validate(values), peak, rows, batch, seq_len)


def test_schedule_default_is_one_epoch_with_5_percent_warmup_to_a_tenth() -> None:
    assert resolved(rows=991) == Schedule(100, 5, 100, 0.1)
    assert resolved(max_steps=61) == Schedule(61, 3, 61, 0.1)


def scales(schedule: Schedule) -> list[float]:
    return [schedule.lr_scale(step) for step in range(schedule.max_steps)]


@pytest.mark.parametrize("begin", ["nanoGPT", "transformers", "study notes"])
def test_schedule_with_initial_learning_rate_matches_other_programs(begin: str) -> None:
    """Peak 0.01 after 10 of 50 steps, and 1e-5 at the end, calculated with each program's code."""
    peak, lowest, warm, steps = 0.01, 1e-5, 10, 50
    initial = {"nanoGPT": peak / (warm + 1), "transformers": 0.0, "study notes": 3e-5}[begin]

    def rate(step: int) -> float:
        if step < warm and begin == "nanoGPT":
            return peak * (step + 1) / (warm + 1)
        if step < warm and begin == "transformers":
            return peak * step / warm
        if step < warm:
            return initial + step * ((peak - initial) / warm)
        progress = (step - warm) / (steps - warm)
        return lowest + (peak - lowest) * 0.5 * (1 + math.cos(math.pi * progress))

    values: dict[str, Any] = {"min_learning_rate": lowest, "initial_learning_rate": initial}
    found = resolved(peak=peak, max_steps=steps, warmup_steps=warm, **values)
    rates = [peak * scale for scale in scales(found)]
    assert rates == pytest.approx([rate(step) for step in range(steps)], rel=1e-14, abs=0)
    assert (scales(found)[0] * peak, scales(found)[warm]) == (initial, 1.0)
    assert peak * found.lr_scale(steps) == pytest.approx(lowest, rel=1e-14)


def test_schedule_with_initial_learning_rate_is_shifted_by_one_step() -> None:
    values: dict[str, Any] = {"max_steps": 20, "warmup_steps": 4, "initial_learning_rate": 1e-4}
    for kind in KINDS:
        plain = resolved(kind=kind, max_steps=20, warmup_steps=4)
        late = resolved(kind=kind, **values)
        assert scales(late)[:4] == pytest.approx([0.1, 0.325, 0.55, 0.775])
        assert scales(late)[4:] == scales(plain)[3:19]
        if kind not in ("constant", "inverse_sqrt"):
            assert late.lr_scale(20) == plain.lr_scale(19)


def test_schedule_initial_learning_rate_without_warmup_raises_config_error() -> None:
    with pytest.raises(ConfigError, match=r"this run's warm-up has 0 steps: set schedule\.warmup"):
        resolved(max_steps=10, initial_learning_rate=1e-5)
    assert resolved(max_steps=0, initial_learning_rate=1e-5).max_steps == 0


def fractions(text: str) -> list[float]:
    return [float(Fraction(one)) for one in text.split()]


def test_linear_schedule_decays_to_minimum_in_equal_steps() -> None:
    found = scales(resolved(kind="linear", max_steps=8, warmup_steps=4, min_lr_ratio=0))
    assert found == fractions("1/4 1/2 3/4 1 3/4 1/2 1/4 0")
    found = scales(resolved(kind="linear", max_steps=8, warmup_steps=4, min_lr_ratio=0.5))
    assert found == fractions("1/4 1/2 3/4 1 7/8 3/4 5/8 1/2")
    assert resolved(kind="linear").min_lr_ratio == 0.1


def test_wsd_schedule_stays_at_peak_and_decays_at_end() -> None:
    values: dict[str, Any] = {"kind": "wsd", "max_steps": 10, "warmup_steps": 2}
    found = resolved(**values, decay_fraction=0.4)
    assert scales(found) == fractions("1/2 1 1 1 1 1 3/4 1/2 1/4 0")
    assert found.decay_begin == 6
    assert found == resolved(**values, cooldown_steps=4)
    assert scales(resolved(**values))[-3:] == [1, 0.5, 0]  # a fifth
    kept = resolved(**values, cooldown_steps=4, decay_steps=8, min_lr_ratio=0.5)
    assert scales(kept) == fractions("1/2 1 1 1 7/8 3/4 5/8 1/2 1/2 1/2")


def test_wsd_schedule_one_minus_sqrt_decay_falls_faster_at_first() -> None:
    found = scales(
        resolved(kind="wsd", max_steps=18, warmup_steps=2, cooldown_steps=16, decay_shape="1-sqrt")
    )
    assert [found[1 + i] for i in (0, 1, 4, 9, 16)] == fractions("1 3/4 1/2 1/4 0")
    assert found[2 + 7] == 1 - math.sqrt(8 / 16)


def test_constant_schedule_stays_at_peak() -> None:
    found = resolved(kind="constant", max_steps=6, warmup_steps=2)
    assert scales(found) == [0.5, 1, 1, 1, 1, 1]
    assert (found.min_lr_ratio, found.decay_begin) == (1.0, 6)


def test_inverse_sqrt_schedule_follows_inverse_square_root_of_step() -> None:
    found = resolved(kind="inverse_sqrt", max_steps=64, warmup_steps=4)
    assert [found.lr_scale(n - 1) for n in (1, 2, 4, 16, 64)] == fractions("1/4 1/2 1 1/2 1/4")
    assert found.lr_scale(5) == math.sqrt(4 / 6)
    # It does not depend on the number of steps.
    assert scales(found) == scales(resolved(kind="inverse_sqrt", max_steps=99, warmup_steps=4))[:64]
    least = resolved(kind="inverse_sqrt", max_steps=64, warmup_steps=4, min_lr_ratio=0.5)
    assert [least.lr_scale(n - 1) for n in (9, 16, 64)] == [math.sqrt(4 / 9), 0.5, 0.5]
    assert scales(resolved(kind="inverse_sqrt", max_steps=4, warmup_steps=0))[::3] == [1, 0.5]


@given(data=st.data(), kind=st.sampled_from(KINDS), ratio=st.floats(0, 1))
def test_schedule_of_every_kind_has_no_jump(data: st.DataObject, kind: str, ratio: float) -> None:
    steps = data.draw(st.integers(2, 300))
    warmup = data.draw(st.integers(0, steps - 1))
    values: dict[str, Any] = {"kind": kind, "max_steps": steps, "warmup_steps": warmup}
    if kind == "wsd":
        values["cooldown_steps"] = data.draw(st.integers(1, steps - warmup))
        values["decay_shape"] = data.draw(st.sampled_from(["linear", "1-sqrt", None]))
    if kind != "constant":
        values["min_lr_ratio"] = ratio
    schedule = resolved(**values)
    found = scales(schedule)
    assert all(0 <= value <= 1 for value in found)
    assert found[:warmup] == [(step + 1) / warmup for step in range(warmup)]
    assert set(found[warmup : schedule.decay_begin]) <= {1.0}
    falling = found[max(warmup - 1, 0) :]
    assert falling == sorted(falling, reverse=True)
    if kind in ("cosine", "linear", "wsd"):
        assert found[-1] == pytest.approx(ratio, abs=1e-12)
        decay = steps - schedule.decay_begin
        # The square-root curve has the largest fall in one step, its first; the cosine's steepest
        # slope is pi/2.
        steepest = math.sqrt(1 / decay) if schedule.decay_shape == "1-sqrt" else 1.6 / decay
        leaps = [one - next_one for one, next_one in itertools.pairwise(found[warmup:])]
        assert max(leaps, default=0) <= (1 - ratio) * steepest + 1e-12
    if kind == "constant":
        assert set(falling) <= {1.0}


@given(steps=st.integers(1, 2000), share=st.integers(1, 99))
def test_schedule_decay_fraction_is_computed_exactly(steps: int, share: int) -> None:
    values: dict[str, Any] = {
        "kind": "wsd",
        "max_steps": steps,
        "decay_fraction": share / 100,
        "warmup_steps": 0,
    }
    assert resolved(**values).cooldown_steps == -(-steps * share // 100)


@pytest.mark.parametrize(
    "values, says",
    [
        (
            {"kind": "linear", "decay_fraction": 0.2},
            "decay_fraction applies only to kind wsd, not linear",
        ),
        ({"decay_shape": "1-sqrt"}, "decay_shape applies only to kind wsd, not cosine"),
        ({"cooldown_steps": 5}, "cooldown_steps applies only to kind wsd, not cosine"),
        (
            {"kind": "constant", "decay_steps": 5},
            "decay_steps applies only to kind cosine or linear or wsd",
        ),
        ({"kind": "inverse_sqrt", "decay_steps": 5}, "decay_steps applies only to kind"),
        (
            {"kind": "constant", "decay_starts_at_peak": True},
            "decay_starts_at_peak applies only to kind",
        ),
        ({"decay_tokens": 9, "max_minutes": 1}, "decay_tokens requires a known number of steps"),
        (
            {"kind": "constant", "min_lr_ratio": 0.1},
            "min_lr_ratio applies only to kind .*, not constant",
        ),
        ({"kind": "constant", "min_learning_rate": 0.1}, "min_learning_rate applies only to kind"),
        (
            {"kind": "wsd", "decay_fraction": 0.2, "cooldown_steps": 5},
            "both set the length of the decay",
        ),
    ],
)
def test_schedule_keys_of_other_kinds_raise_validation_error(
    values: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValidationError, match=says):
        ScheduleConfig.model_validate(values)


def test_schedule_overlapping_warmup_and_decay_raise_config_error() -> None:
    with pytest.raises(ConfigError, match="a warm-up of 90 steps and a decay of 20 are more than"):
        resolved(kind="wsd", max_steps=100, warmup_steps=90)
    with pytest.raises(ConfigError, match="a warm-up of 50 steps and a decay of 60 are more than"):
        resolved(kind="wsd", max_steps=100, warmup_ratio=0.5, decay_fraction=0.6)
    with pytest.raises(ConfigError, match="a decay of 65 are more than 50 steps"):
        resolved(kind="wsd", max_steps=100, warmup_ratio=0.1, decay_fraction=0.65, decay_steps=50)
    assert resolved(kind="wsd", max_steps=100, warmup_steps=80).decay_begin == 80


@pytest.mark.parametrize("steps, warm_up, decay", [(1, 1, 0), (2, 1, 1), (3, 1, 2), (100, 2, 65)])
def test_schedule_of_few_steps_divides_them_between_warmup_and_decay(
    steps: int, warm_up: int, decay: int
) -> None:
    """Both parts are rounded up, and the decay gets the steps that the warm-up leaves."""
    found = resolved(
        kind="wsd", max_steps=steps, warmup_ratio=0.02, decay_fraction=0.65, min_lr_ratio=0.1
    )
    assert (found.warmup_steps, found.cooldown_steps) == (warm_up, decay)
    scales = [found.lr_scale(step) for step in range(steps)]
    assert (max(scales), scales[-1]) == (1.0, 1.0 if decay == 0 else 0.1)


@pytest.mark.parametrize(
    "epochs, rows, steps",
    # In floating point, 1.1 x 100 is more than 110.
    [
        (1, 1000, 100),
        (3, 1000, 300),
        (1.1, 100, 11),
        (0.25, 1000, 25),
        (2, 991, 199),
        (1, 991, 100),
    ],
)
def test_schedule_epochs_become_steps_over_rows(epochs: float, rows: int, steps: int) -> None:
    assert resolved(rows, epochs=epochs).max_steps == steps


@given(epochs=st.integers(1, 50), rows=st.integers(1, 10**6), a_step=st.integers(1, 512))
def test_schedule_epochs_end_at_first_step_that_completes_them(
    epochs: int, rows: int, a_step: int
) -> None:
    steps = resolved(rows, a_step, epochs=epochs).max_steps
    assert (steps - 1) * a_step < epochs * rows <= steps * a_step


@pytest.mark.parametrize(
    "values, steps",
    [
        ({"warmup_steps": 0}, 0),
        ({"warmup_tokens": 0}, 0),
        ({"warmup_tokens": 800}, 10),  # 10 rows of 8 tokens per step
        ({"warmup_tokens": 879}, 10),
        ({"warmup_tokens": 79}, 0),
        ({"warmup_ratio": 0.07}, 7),  # 7.000000000000001 in floating point
        ({"warmup_ratio": 0.071}, 8),
        ({"warmup_ratio": 1}, 100),
        ({"warmup_ratio": 0.1, "max_steps": 1000}, 100),
        ({"decay_steps": 40}, 2),
        ({"decay_steps": 40, "warmup_ratio": 0.1}, 10),
    ],
)
def test_schedule_warmup_accepts_steps_tokens_or_fraction(
    values: dict[str, Any], steps: int
) -> None:
    assert resolved(**values).warmup_steps == steps


def test_schedule_after_decay_steps_stays_at_minimum() -> None:
    schedule = resolved(max_steps=12, decay_steps=8, warmup_steps=4)
    found = [schedule.lr_scale(step) for step in range(12)]
    assert found == [*(warmup_cosine(step, 8, 4, 0.1) for step in range(8)), 0.1, 0.1, 0.1, 0.1]
    assert found[6] > found[7] == 0.1


def test_schedule_gpt3_token_lengths_match_steps_of_build_nanogpt() -> None:
    """Its `warmup_steps = 715` and `max_steps = 19073`, in steps of 2**19 tokens."""
    found = resolved(
        10**6, 512, seq_len=1024, warmup_tokens=375_000_000, decay_tokens=10_000_000_000
    )
    assert (found.warmup_steps, found.decay_steps) == (715, 19073)


def test_schedule_decay_from_peak_matches_build_nanogpt_at_every_step() -> None:
    def get_lr(it: int) -> float:
        if it < 715:
            return 6e-4 * (it + 1) / 715
        if it > 19073:
            return 6e-5
        return 6e-5 + 0.5 * (1 + math.cos(math.pi * (it - 715) / (19073 - 715))) * (6e-4 - 6e-5)

    values: dict[str, Any] = {"max_steps": 19073, "warmup_steps": 715, "min_lr_ratio": 0.1}
    found = resolved(**values, decay_starts_at_peak=True)
    assert [6e-4 * found.lr_scale(step) for step in range(19080)] == pytest.approx(
        [get_lr(step) for step in range(19080)], rel=1e-12
    )
    # Without the key, the decay is one step ahead of the reference.
    plain = resolved(**values)
    assert [plain.lr_scale(step) for step in range(715, 19073)] == [
        found.lr_scale(step + 1) for step in range(715, 19073)
    ]
    assert found.in_words(6e-4) == "then down to 6e-05 after the last step"


def test_schedule_minimum_accepts_ratio_or_value() -> None:
    assert resolved(min_lr_ratio=0.25).min_lr_ratio == 0.25
    assert resolved(peak=6e-4, min_learning_rate=6e-5).min_lr_ratio == pytest.approx(0.1)
    assert resolved(min_learning_rate=0).lr_scale(99) == 0.0
    assert resolved(peak=1e-3, min_learning_rate=1e-3).lr_scale(99) == 1.0


def test_schedule_config_resolved_round_trips() -> None:
    several: list[dict[str, Any]] = [{"kind": kind} for kind in KINDS]
    several += [{"min_learning_rate": 1e-4, "epochs": 2}, {"min_lr_ratio": None}]
    for values in several:
        config = ScheduleConfig.model_validate(values)
        assert ScheduleConfig.model_validate(config.model_dump()) == config
    assert ScheduleConfig().min_lr_ratio == 0.1


def test_schedule_decay_ending_within_warmup_raises_config_error() -> None:
    with pytest.raises(ConfigError, match=r"decay_steps 10 is not after the warm-up of 10 steps"):
        resolved(decay_steps=10, warmup_ratio=0.1)
    with pytest.raises(ConfigError, match=r"decay_tokens 99, step 1 is not after the warm-up of 9"):
        resolved(decay_tokens=99, warmup_steps=9)


@pytest.mark.parametrize(
    "values, says",
    [
        ({"max_steps": 5, "epochs": 1}, "max_steps and epochs both set the length of the run"),
        ({"warmup_steps": 0, "warmup_ratio": 0.1}, "warmup_steps and warmup_ratio both set"),
        ({"warmup_tokens": 5, "warmup_ratio": 0.1}, "warmup_tokens and warmup_ratio both set"),
        ({"decay_steps": 5, "decay_tokens": 9}, "decay_steps and decay_tokens both set the end"),
        ({"min_lr_ratio": 0.1, "min_learning_rate": 1e-5}, "min_lr_ratio and min_learning_rate"),
    ],
)
def test_schedule_conflicting_keys_raise_validation_error(
    values: dict[str, float], says: str
) -> None:
    with pytest.raises(ValidationError, match=says):
        ScheduleConfig.model_validate(values)


@pytest.mark.parametrize(
    "values",
    [
        {"max_steps": -1},
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
        {"initial_learning_rate": -1e-5},
        {"cooldown": 3},
    ],
)
def test_schedule_impossible_values_raise_validation_error(values: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        ScheduleConfig.model_validate(values)


# Batch size


def test_batch_ramp_increases_rows_in_equal_stages() -> None:
    batch = BatchSchedule(8, 2, 6)
    assert [batch.at(step) for step in range(9)] == [2, 2, 4, 4, 6, 6, 8, 8, 8]
    assert [batch.before(step) for step in range(9)] == [0, 2, 4, 8, 12, 18, 24, 32, 40]
    # Twice the rows at once, and a ramp that does not divide evenly.
    assert [BatchSchedule(8, 4, 3).at(step) for step in range(5)] == [4, 4, 4, 8, 8]
    assert [BatchSchedule(8, 2, 4).at(step) for step in range(6)] == [2, 2, 4, 6, 8, 8]
    assert [BatchSchedule(8, 1, 2).at(step) for step in range(4)] == [1, 4, 8, 8]
    assert (batch.in_words, BatchSchedule(8, 8).in_words) == ("2 to 8 (reached at step 7)", "8")


def test_constant_schedule_below_peak_warns_about_peak_not_decay() -> None:
    def told(kind: ScheduleKind, warmup_steps: int) -> str:
        return Schedule(10, warmup_steps, 10, 0.1, kind).in_words(1e-3)

    assert told("constant", 10) == "then constant"
    assert Schedule(10, 10, 10, 1.0, "constant").lr_scale(9) == 1
    assert told("constant", 11) == (
        "a warm-up so long that the learning rate never reaches its peak: lower "
        "schedule.warmup_steps"
    )
    assert "never falls" in told("cosine", 10)


def test_schedule_with_initial_learning_rate_warns_with_shifted_steps() -> None:
    def told(kind: ScheduleKind, warmup_steps: int) -> str:
        schedule = Schedule(10, warmup_steps, 10, 0.1, kind, initial_scale=0.5)
        return schedule.in_words(1e-3)

    assert told("constant", 9) == "then constant"
    assert "never reaches its peak" in told("constant", 10)
    assert told("linear", 8) == "then linearly down to 0.0001 after the last step"
    assert "never falls" in told("linear", 9)
    assert Schedule(1, 0, 1, 0.0, decay_starts_at_peak=True).in_words(1e-3) == (
        "too few steps for the learning rate to fall"
    )


@given(start=st.integers(1, 9), parts=st.integers(1, 40), ramp=st.integers(0, 60), step=st.data())
def test_batch_ramp_position_is_sum_of_earlier_steps(
    start: int, parts: int, ramp: int, step: st.DataObject
) -> None:
    batch = BatchSchedule(start * parts, start, ramp if parts > 1 else 0)
    sizes = [batch.at(number) for number in range(90)]
    assert sizes == sorted(sizes)
    assert set(sizes) <= {start * part for part in range(1, parts + 1)}
    assert sizes[batch.ramp_steps :] == [start * parts] * (90 - batch.ramp_steps)
    for number in range(90):
        assert batch.before(number) == sum(sizes[:number])
    rows = step.draw(st.fractions(0, batch.before(89)))
    steps = batch.steps_for(rows)
    assert batch.before(steps) >= rows
    assert steps == 0 or batch.before(steps - 1) < rows
    assert (
        batch.before(batch.steps_within(rows)) <= rows < batch.before(batch.steps_within(rows) + 1)
    )


def test_schedule_epochs_and_warmup_tokens_count_rows_of_batch_ramp() -> None:
    batch = BatchSchedule(8, 2, 6)  # 24 rows in each of the first 6 steps
    config = ScheduleConfig.model_validate({"epochs": 1, "warmup_tokens": 80})
    found = resolve_schedule(config, 1e-3, 40, batch, 10)
    assert (found.max_steps, found.warmup_steps) == (8, 3)
    config = ScheduleConfig.model_validate({"epochs": 1.025})
    assert resolve_schedule(config, 1e-3, 40, batch, 10).max_steps == 9

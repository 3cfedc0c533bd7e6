from __future__ import annotations

import json
import math
import statistics
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firstlight.errors import CheckpointError, ConfigError
from firstlight.recipe import GuardConfig, parse_recipe
from firstlight.training.guard import DivergedError, Guard, z_score

_NUMBERS = st.floats(-1e6, 1e6)


def after(guard: Guard, values: list[float]) -> Guard:
    """Return the guard after it has accepted these losses, with a gradient norm of 1."""
    for value in values:
        assert guard.accepts(value, 1.0)
    return guard


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_guard_rejects_non_finite_values_with_and_without_z_score(bad: float) -> None:
    for config in (GuardConfig(), GuardConfig(spike_z_score=3.0)):
        guard = Guard(config)
        assert guard.accepts(2.0, 1.0)
        assert not guard.accepts(bad, 1.0)
        assert not guard.accepts(2.0, bad)
        assert not guard.accepts(math.inf, -math.inf)
        assert guard.skipped_in_a_row == 3
        assert guard.state_dict()["losses"] == [2.0]
        assert "not finite" in guard.reason
        assert guard.accepts(2.0, 1.0)
        assert guard.skipped_in_a_row == 0


def test_guard_without_z_score_accepts_every_finite_value() -> None:
    guard = after(Guard(GuardConfig()), [1.0] * 200)
    assert guard.accepts(1e30, 1e30)


def test_guard_too_many_skipped_steps_raise_diverged_error() -> None:
    guard = Guard(GuardConfig(max_skipped_steps=3))
    for _ in range(2):
        assert not guard.accepts(math.nan, 1.0)
        guard.require_fit()
    assert guard.accepts(1.0, 1.0)
    for _ in range(2):
        guard.accepts(math.nan, 1.0)
        guard.require_fit()
    guard.accepts(math.nan, 1.0)
    with pytest.raises(DivergedError, match=r"3 steps in a row were skipped \(loss nan, .*lower"):
        guard.require_fit()


def test_guard_rejects_spike_from_sixteenth_value() -> None:
    quiet = [3.0 + 0.1 * (-1) ** n for n in range(15)]
    assert after(Guard(GuardConfig(spike_z_score=6.0)), quiet).accepts(100.0, 1.0)
    guard = after(Guard(GuardConfig(spike_z_score=6.0)), [*quiet, 3.1])
    assert not guard.accepts(100.0, 1.0)
    assert not guard.accepts(3.0, 1e4)
    assert "gradient norm 1e+04 is " in guard.reason
    assert guard.accepts(3.5, 1.0)  # five deviations
    # A drop is accepted.
    assert guard.accepts(0.5, 0.0)


def test_guard_rejected_value_does_not_affect_later_decisions() -> None:
    guard = after(Guard(GuardConfig(spike_z_score=6.0)), [3.0 + 0.01 * (n % 7) for n in range(50)])
    before = guard.state_dict()["losses"]
    assert not any(guard.accepts(30.0, 1.0) for _ in range(300))
    assert guard.state_dict()["losses"] == before


def test_guard_considers_only_its_window() -> None:
    config = GuardConfig(spike_z_score=6.0, spike_window=16)
    guard = after(Guard(config), [9.0 - 0.01 * n for n in range(40)])
    assert len(guard.state_dict()["losses"]) == 16
    assert guard.state_dict()["losses"][-1] == 9.0 - 0.39


@given(st.lists(_NUMBERS, min_size=16, max_size=60), _NUMBERS)
def test_z_score_matches_statistics_module(before: list[float], value: float) -> None:
    mean = statistics.fmean(before)
    deviation = max(statistics.pstdev(before), 0.01 * abs(mean))
    found = z_score(value, deque(before))
    if deviation > 1e-6:
        assert found == pytest.approx((value - mean) / deviation, rel=1e-6, abs=1e-6)
    assert z_score(value, deque(before[:15])) == 0


def test_z_score_of_small_change_among_equal_values_is_small() -> None:
    assert z_score(2.01, deque([2.0] * 20)) == pytest.approx(0.5)
    assert z_score(1e-9, deque([0.0] * 20)) == math.inf
    assert z_score(0.0, deque([0.0] * 20)) == 0


@given(
    st.lists(st.tuples(_NUMBERS | st.just(math.nan), st.floats(0, 1e9)), max_size=80),
    st.integers(0, 80),
)
def test_guard_resumes_exactly_from_json_state(values: list[tuple[float, float]], cut: int) -> None:
    config = GuardConfig(spike_z_score=2.0, spike_window=16)
    whole, first, second = Guard(config), Guard(config), Guard(config)
    decisions = [whole.accepts(*value) for value in values]
    before = [first.accepts(*value) for value in values[:cut]]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert before + [second.accepts(*value) for value in values[cut:]] == decisions
    assert second.state_dict() == whole.state_dict()


def test_guard_empty_state_is_new_and_damaged_state_raises() -> None:
    guard = after(Guard(GuardConfig()), [1.0] * 20)
    guard.load_state_dict({})
    assert guard.state_dict() == Guard(GuardConfig()).state_dict()
    for state in ({"losses": 3}, {"losses": ["x"]}, {"skipped_in_a_row": None}):
        with pytest.raises(CheckpointError, match="guard is damaged"):
            guard.load_state_dict(state)


@pytest.mark.parametrize(
    "values, said",
    [
        ({"max_skipped_steps": 0}, "guard.max_skipped_steps"),
        ({"on_divergence": "pray"}, "guard.on_divergence"),
        ({"max_rollbacks": -1}, "guard.max_rollbacks"),
        ({"spike_z_score": 0.0}, "guard.spike_z_score"),
        ({"spike_window": 15}, "guard.spike_window"),
        ({"spike_zscore": 6.0}, "did you mean 'spike_z_score'"),
    ],
)
def test_guard_invalid_settings_raise_config_error(values: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_recipe({"data": {"dir": "x"}, "guard": values})

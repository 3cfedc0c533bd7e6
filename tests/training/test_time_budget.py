"""Runs whose length is given in minutes, with a clock controlled by the test."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from firstlight.checkpoint.checkpoint import load_trainer_state
from firstlight.checkpoint.manifest import saved_checkpoints
from firstlight.checkpoint.selection import list_checkpoints
from firstlight.console import time_text
from firstlight.data.prepare import prepare
from firstlight.errors import CheckpointError, ConfigError
from firstlight.generation.engine import GenerationStream
from firstlight.optim.schedule import (
    BatchSchedule,
    DecidedLength,
    PredictedLength,
    Schedule,
    ScheduleConfig,
    resolve_schedule,
)
from firstlight.planner.plan.machine import find_machine, planned_run, resolve_for
from firstlight.recipe import parse_recipe
from firstlight.report.report import run_page
from firstlight.run_log.reader import read_json_lines, read_length, read_run
from firstlight.tokenizer import Tokenizer
from firstlight.training import checkpoints, loop, start, time_budget, validation
from firstlight.training import run as training_run
from firstlight.training.cooldown import cooldown_recipe
from firstlight.training.guard import DivergedError
from firstlight.training.loop import TrainResult, train
from firstlight.training.progress import RunProgress, TrainingProgress
from firstlight.training.step import train_step
from firstlight.training.time_budget import (
    LoopTimes,
    Periodic,
    TimeBudget,
    mean_sequence_seconds,
    recorded_length,
    steps_in_time,
)

KINDS = ("wsd", "cosine", "linear", "constant", "inverse_sqrt")
MEASURED = ("second", "mfu", "memory_bytes")
MINUTES = 3.0


class StoppedError(Exception):
    """Ends a run from within."""


class Machine:
    """A clock, and the seconds by which training, evaluations and checkpoints advance it."""

    def __init__(self, step: float = 2.0) -> None:
        self.now, self.step, self.save = 1000.0, step, 0.5

    @property
    def evaluation(self) -> float:
        """Seconds for 12 rows; a step has 4."""
        return 0.9 * self.step

    def takes(self, function: Callable[..., Any], what: str) -> Callable[..., Any]:
        """Wrap a function so that it takes this many seconds."""

        @functools.wraps(function)
        def timed(*args: Any, **options: Any) -> Any:
            self.now += getattr(self, what)
            return function(*args, **options)

        return timed


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Return a machine whose steps are expected to take 2 s."""
    found = Machine()
    monkeypatch.setattr(time_budget, "LoopTimes", lambda: LoopTimes(lambda: found.now))
    monkeypatch.setattr(time_budget, "_usual_tokens_per_second", lambda *_: 64.0)
    monkeypatch.setattr(loop, "train_step", found.takes(train_step, "step"))
    evaluate = found.takes(validation.evaluate_dataset, "evaluation")
    monkeypatch.setattr(validation, "evaluate_dataset", evaluate)
    monkeypatch.setattr(checkpoints, "captured", found.takes(checkpoints.captured, "save"))
    return found


@pytest.fixture
def recipe(recipe: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe of 3 minutes with 128 tokens per step and dropout."""
    recipe["model"] = {
        "model_type": "gpt2",
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 32,
        "embd_pdrop": 0.2,
    }
    recipe["schedule"] = {"kind": "wsd", "max_minutes": MINUTES}
    recipe["evaluation"] = {
        "every_steps": 20,
        "max_rows": 12,
        "sample_tokens": 1,
        "on_start": False,
    }
    recipe["checkpoint"] = {"every_steps": 10, "keep_last": 99, "asynchronous": False}
    recipe["efficiency"] = {"precision": "fp32", "compile": False, "loss_chunk_tokens": 0}
    return recipe


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def changed(recipe: dict[str, Any], name: str, **sections: dict[str, Any]) -> dict[str, Any]:
    """Return the recipe of a run with another name and some keys changed."""
    result = copy.deepcopy(recipe)
    result["run"]["dir"] = str(Path(recipe["run"]["dir"]).with_name(name))
    for section, values in sections.items():
        result[section] = {**result.get(section, {}), **values}
    return result


def folder_of(recipe: dict[str, Any]) -> Path:
    return Path(recipe["run"]["dir"])


def stop_after(recipe: dict[str, Any], step: int, **options: Any) -> None:
    """Train until the run is killed after a step."""

    def on_step(record: Mapping[str, Any]) -> None:
        if record["step"] == step:
            raise StoppedError

    with pytest.raises(StoppedError):
        train(recipe, on_step=on_step, **options)


def metrics(recipe: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {k: v for k, v in line.items() if not any(part in k for part in MEASURED)}
        for line in read_json_lines(folder_of(recipe) / "metrics.jsonl")
    ]


def end(recipe: dict[str, Any]) -> dict[str, Any]:
    folder = list_checkpoints(folder_of(recipe))[-1]
    state = load_trainer_state(folder)
    del state["recipe"]["run"]["dir"]
    names = ("model.safetensors", "optimizer.safetensors")
    return {"state": state, **{name: (folder / name).read_bytes() for name in names}}


# The number of steps


def spent(
    step: int, steps: int, second: float, batch: BatchSchedule, periodic: list[Periodic]
) -> float:
    """Return the seconds of the steps after `step`, added one by one."""
    total = 0.0
    for done in range(step, step + steps):
        total += second * batch.at(done)
        is_last = done + 1 == step + steps
        for one in periodic:
            if is_last:
                total += one.last_seconds
            elif one.every_steps and (done + 1) % one.every_steps == 0:
                total += one.seconds
    return total


@given(
    seconds=st.integers(-5, 400),
    step=st.integers(0, 50),
    second=st.integers(1, 5),
    ramp=st.integers(0, 60),
    periodic=st.lists(
        st.builds(Periodic, st.integers(0, 30), st.integers(0, 30), st.integers(0, 40)), max_size=3
    ),
)
def test_time_budget_takes_most_steps_that_fit(
    seconds: int, step: int, second: int, ramp: int, periodic: list[Periodic]
) -> None:
    batch = BatchSchedule(4, 1 if ramp else 4, ramp)
    steps = steps_in_time(seconds, step, second, batch, periodic)
    assert steps >= 1
    assert steps == 1 or spent(step, steps, second, batch, periodic) <= seconds
    assert spent(step, steps + 1, second, batch, periodic) > seconds


def test_mean_sequence_seconds_uses_last_steps_without_pauses() -> None:
    steady = [(4, 2.0)] * 50
    assert mean_sequence_seconds(steady, 20.0) == 0.5
    # A machine that has become slower: the steps considered go back half as far as the prediction
    # looks ahead.
    slower = [*steady, *[(4, 4.0)] * 10]
    assert mean_sequence_seconds(slower, 80.0) == 1.0
    assert mean_sequence_seconds(slower, 160.0) == pytest.approx((10 * 4.0 + 15 * 2.0) / (4 * 25))
    # The first half of the steps is ignored.
    assert mean_sequence_seconds([*[(4, 1.0)] * 20, *[(4, 2.0)] * 20], 999.0) == 0.5
    # A pause of 60 s counts as twice the median.
    assert mean_sequence_seconds([*steady, (4, 60.0)], 1.0) == pytest.approx((7 * 2 + 4) / 32)
    # Steps of a batch-size ramp are weighted by their sequences.
    assert mean_sequence_seconds([(1, 0.5), (2, 1.0), (4, 2.0)], 99.0) == 0.5


def test_step_times_separate_parts_of_a_step() -> None:
    machine = Machine()
    times = LoopTimes(lambda: machine.now)
    for _ in range(4):
        times.begin_step()
        machine.now += 3
        times.count(8)
        with times.part("evaluation"):
            machine.now += 5
        with times.part("save"):
            machine.now += 2
        machine.now += 1
    times.begin_step()
    machine.now += 7  # a step without an update
    times.begin_step()
    assert list(times.slow_steps) == [(8, 4.0)] * 2
    assert list(times.steps) == [(8, 4.0)] * 2
    assert times.seconds == {"evaluation": 5.0, "save": 2.0}
    assert (times.settled_steps, times.settled_seconds, times.elapsed) == (2, 8.0, 51.0)
    assert times.compile_seconds == 0.0
    times.slow_steps[0] = (4, 62.0)
    assert times.compile_seconds == 60.0


def test_step_times_interrupted_evaluation_counts_as_neither() -> None:
    machine = Machine()
    times = LoopTimes(lambda: machine.now)
    times.begin_step()
    with times.part("evaluation"):
        machine.now += 60
    with contextlib.suppress(DivergedError), times.part("evaluation"):
        machine.now += 2
        raise DivergedError("a token's probability is nan")
    machine.now += 4
    times.count(8)
    times.begin_step()
    assert list(times.slow_steps) == [(8, 4.0)]
    assert times.seconds == {"evaluation": 60.0}


# The schedule


def schedule_of(config: ScheduleConfig, length: PredictedLength) -> Schedule:
    return resolve_schedule(config, 1e-3, 1000, BatchSchedule(4, 4), 32, length)


@given(
    kind=st.sampled_from(KINDS),
    decided_at=st.integers(0, 100),
    steps=st.lists(st.integers(2, 100), min_size=2, max_size=4),
    ratio=st.sampled_from([None, 0.0, 0.1, 0.5]),
    shape=st.sampled_from([None, "1-sqrt"]),
)
def test_corrected_schedule_leaves_earlier_steps_unchanged(
    kind: Any, decided_at: int, steps: list[int], ratio: float | None, shape: Any
) -> None:
    shape = shape if kind == "wsd" else None
    config = ScheduleConfig(kind=kind, max_minutes=1.0, warmup_ratio=ratio, decay_shape=shape)
    replaced: list[tuple[int, int]] = []
    before, at = schedule_of(config, DecidedLength(80, decided_at + steps[0], decided_at)), 0
    for more in steps[1:]:
        at = (max(decided_at, at) + before.max_steps) // 2
        replaced.append((before.max_steps, at))
        corrected = DecidedLength(80, at + more, decided_at, replaced)
        after = schedule_of(config, corrected)
        assert after.max_steps == at + more
        for step in range(at):
            assert after.lr_scale(step) == before.lr_scale(step)
        falls = kind in ("wsd", "cosine", "linear") and after.warmup_steps < after.max_steps
        if falls and after.warmup_steps <= at:
            rates = [after.lr_scale(step) for step in range(at - 1, after.max_steps)]
            assert rates == sorted(rates, reverse=True)
            assert rates[-1] == pytest.approx(after.min_lr_ratio)
        before = after


def test_corrected_decay_continues_from_reached_rate() -> None:
    config = ScheduleConfig(kind="wsd", max_minutes=1.0, warmup_steps=10)
    slower = schedule_of(config, DecidedLength(100, 150, 100, [(200, 120)]))
    assert [slower.lr_scale(step) for step in (99, 109, 119)] == pytest.approx([1.0, 0.9, 0.8])
    assert [slower.lr_scale(step) for step in (134, 149)] == pytest.approx([0.4, 0.0])
    again = schedule_of(config, DecidedLength(100, 175, 100, [(200, 120), (150, 135)]))
    assert [again.lr_scale(step) for step in (134, 154, 174)] == pytest.approx([0.4, 0.2, 0.0])
    cosine = ScheduleConfig(kind="cosine", max_minutes=1.0, warmup_steps=10, min_lr_ratio=0.0)
    faster = schedule_of(cosine, DecidedLength(100, 400, 10, [(110, 60)]))
    half, quarter = faster.lr_scale(59), faster.lr_scale(229)
    assert (half, quarter) == pytest.approx((0.5, 0.5 - 0.5 * math.sqrt(0.5)))


@given(
    kind=st.sampled_from(KINDS),
    predicted=st.integers(1, 300),
    decided_at=st.integers(0, 300),
    more=st.integers(1, 200),
    ratio=st.sampled_from([None, 0.0, 0.1, 0.5]),
)
def test_decided_schedule_leaves_earlier_steps_unchanged(
    kind: Any, predicted: int, decided_at: int, more: int, ratio: float | None
) -> None:
    config = ScheduleConfig(kind=kind, max_minutes=1.0, warmup_ratio=ratio)
    opened = schedule_of(config, PredictedLength(predicted))
    decided = schedule_of(config, DecidedLength(predicted, decided_at + more, decided_at))
    assert opened.is_open
    assert not decided.is_open
    assert decided.max_steps == decided_at + more
    assert opened.warmup_steps == decided.warmup_steps
    for step in range(decided_at):
        assert opened.lr_scale(step) == decided.lr_scale(step)
    if kind in ("wsd", "cosine", "linear") and decided.warmup_steps < decided.max_steps:
        assert decided.decay_begin == max(decided_at, decided.warmup_steps)
        assert decided.lr_scale(decided.max_steps - 1) == pytest.approx(decided.min_lr_ratio)


def test_timed_schedule_warmup_is_fraction_of_predicted_steps() -> None:
    config = ScheduleConfig(max_minutes=5.0)
    assert schedule_of(config, PredictedLength(100)).warmup_steps == 5
    assert schedule_of(config, DecidedLength(100, 400, 30)) == Schedule(
        400, 5, 400, 0.1, cooldown_steps=370
    )
    assert schedule_of(config, DecidedLength(100, 400, 30)).in_words(1e-3) == (
        "stable to step 30, then down to 0.0001 at step 400"
    )


def test_length_decision_is_due_when_decay_must_begin() -> None:
    def due(left: int, **keys: Any) -> bool:
        config = ScheduleConfig.model_validate({"max_minutes": 1.0, **keys})
        return config.decides_length(80, 10, left)

    assert not due(22, kind="wsd")
    assert due(21, kind="wsd")
    assert due(80, kind="wsd", decay_fraction=0.5)
    assert not due(82, kind="wsd", decay_fraction=0.5)
    assert not due(6, kind="wsd", cooldown_steps=5)
    assert due(5, kind="wsd", cooldown_steps=5)
    assert due(900, kind="cosine")
    assert not due(3, kind="constant")
    assert due(2, kind="constant")


@pytest.mark.parametrize(
    "keys, says",
    [
        ({"max_steps": 9, "epochs": 1.0}, "max_steps and epochs both set the length of the run"),
        ({"decay_steps": 9}, "decay_steps requires a known number of steps"),
        ({"resume": True}, "set max_steps, and max_minutes to null"),
        ({"warmup_ratio": 0.7, "decay_fraction": 0.5}, "together are 1.2 of the run"),
        ({"max_minutes": 0.0}, "schedule.max_minutes: .*greater than 0"),
    ],
)
def test_timed_run_impossible_lengths_raise_config_error(
    recipe: dict[str, Any], keys: dict[str, Any], says: str
) -> None:
    recipe["schedule"] |= keys
    with pytest.raises(ConfigError, match=says) as error:
        parse_recipe(recipe)
    assert "\n" not in str(error.value)


# Runs


def _slow(*rows: tuple[str, float]) -> list[Any]:
    """Mark rows that only `make test-slow` runs."""
    return [pytest.param(*row, marks=pytest.mark.slow) for row in rows]


def last_rate(rates: list[float], kind: str) -> float:
    """Return the learning rate that the last step should have: the minimum, or for wsd, whose
    minimum is 0, the rate one step before it."""
    return rates[-2] / 2 if kind == "wsd" else 0.1 * max(rates)


@pytest.mark.parametrize(
    "kind, step_seconds",
    [
        *[("wsd", 2.6), ("cosine", 1.4), ("inverse_sqrt", 2.6)],
        *_slow(("cosine", 2.6), ("linear", 2.6), ("constant", 2.6), ("wsd", 1.4)),
    ],
)
def test_timed_run_ends_in_time_at_any_speed(
    recipe: dict[str, Any], machine: Machine, kind: str, step_seconds: float
) -> None:
    machine.step = step_seconds
    recipe["schedule"]["kind"] = kind
    result = train(recipe)
    record = read_length(folder_of(recipe))
    assert record["predicted_steps"] == 90
    assert record["max_steps"] == result.step
    assert 0.95 * 180 < record["seconds_used"] <= 1.001 * 180
    assert record["seconds_used"] == pytest.approx(machine.now - 1000.0)
    rates = [line["learning_rate"] for line in metrics(recipe)]
    assert rates[3] == max(rates)
    if kind == "wsd":
        # The decay takes a fifth of the steps.
        assert result.step - record["decided_at"] == pytest.approx(0.2 * result.step, abs=1.5)
        assert rates[-1] == pytest.approx(last_rate(rates, kind))
        assert rates[record["decided_at"]] == max(rates)
        assert rates[record["decided_at"] + 1] < max(rates)
    if kind in ("cosine", "linear"):
        assert record["decided_at"] == 10
        assert rates[-1] == pytest.approx(0.1 * max(rates))


@pytest.mark.parametrize("kind", ["wsd", "cosine"])
@pytest.mark.parametrize("is_busy", [False, True])
def test_timed_run_includes_and_remembers_compile_time(
    recipe: dict[str, Any],
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    is_busy: bool,
) -> None:
    found: list[float] = []

    def first_step_compiles(*args: Any, **options: Any) -> Any:
        machine.now += 60.0 if machine.now < 1002.0 else 0.0
        return machine.takes(train_step, "step")(*args, **options)

    monkeypatch.setattr(loop, "train_step", first_step_compiles)
    monkeypatch.setattr(loop, "cores_are_busy", lambda: is_busy)
    monkeypatch.setattr(loop, "compile_time_recorder", lambda *_: found.append)
    recipe["schedule"]["kind"] = kind
    result = train(recipe)
    record = read_length(folder_of(recipe))
    assert 0.95 * 180 < record["seconds_used"] <= 1.001 * 180
    # Of 180 s, 120 s remain for steps of 2 s; evaluations and saves take the rest.
    assert 40 < result.step < 60
    assert found == ([] if is_busy else [pytest.approx(60.0)])


@pytest.mark.parametrize(
    "kind, step_seconds",
    # The time limit ends the run as without a number of steps.
    [
        *[("wsd", 0.001), ("linear", 0.001), ("wsd", 2.6)],
        *_slow(("cosine", 0.001), ("constant", 0.001), ("inverse_sqrt", 0.001), ("cosine", 2.6)),
    ],
)
def test_timed_run_ends_at_first_of_two_limits(
    recipe: dict[str, Any], machine: Machine, kind: str, step_seconds: float
) -> None:
    machine.step = step_seconds
    recipe["schedule"] |= {"kind": kind, "max_steps": 60}
    result = train(recipe)
    record = read_length(folder_of(recipe))
    assert record["max_steps"] == result.step
    assert record["most_steps"] == 60
    assert result.step == 60 or 0.95 * 180 < record["seconds_used"] <= 1.001 * 180
    rates = [line["learning_rate"] for line in metrics(recipe)]
    if kind == "wsd":
        assert result.step - record["decided_at"] == pytest.approx(0.2 * result.step, abs=1.5)
    if kind in ("wsd", "cosine", "linear"):
        assert rates[-1] == pytest.approx(last_rate(rates, kind))
    if step_seconds < 1:
        assert result.step == 60
        # A resumed run may take more steps if its recipe allows them.
        recipe["schedule"]["max_steps"] = 70
        assert train(recipe, resume=True).step == 70


def test_timed_run_time_left_ends_with_epochs(
    recipe: dict[str, Any], machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1.5 epochs take only a few seconds of the 3 minutes."""
    lefts: list[float | None] = []
    shares: list[float] = []

    class Watched(RunProgress):
        def step(self, record: Mapping[str, Any]) -> None:
            super().step(record)
            lefts.append(self.seconds_left)
            shares.append(self.share)

    def made(steps: Callable[[], int], first: int, minutes: float, **options: Any) -> RunProgress:
        return Watched(steps, first, minutes, lambda: machine.now, **options)

    monkeypatch.setattr(start, "RunProgress", made)
    machine.step = 0.05
    recipe["schedule"]["epochs"] = 1.5
    recipe["evaluation"]["every_steps"] = recipe["checkpoint"]["every_steps"] = 0
    steps = train(recipe).step
    decided = read_length(folder_of(recipe))["decided_at"]
    assert 10 < decided < steps
    assert shares == pytest.approx([(step + 1) / steps for step in range(steps)])
    for step in range(5, steps):
        assert lefts[step - 1] == pytest.approx((steps - step) * 0.05)


@pytest.mark.parametrize("kind", ["wsd", "cosine"])
def test_timed_run_progress_never_falls(
    recipe: dict[str, Any], machine: Machine, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A machine that becomes faster during the decay takes more steps than decided."""
    recipe["schedule"] = {"kind": "wsd", "max_minutes": MINUTES, "decay_fraction": 0.65}
    if kind == "cosine":
        recipe["schedule"] = {"kind": kind, "max_minutes": MINUTES}
    shares: list[float] = []

    class Watched(RunProgress):
        def step(self, record: Mapping[str, Any]) -> None:
            super().step(record)
            shares.append(self.share)
            if record["step"] == 40:
                machine.step = 0.4

    def made(steps: Callable[[], int], first: int, minutes: float, **options: Any) -> RunProgress:
        return Watched(steps, first, minutes, lambda: machine.now, **options)

    monkeypatch.setattr(start, "RunProgress", made)
    train(recipe)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert read_length(folder_of(recipe))["replaced"]


def test_timed_run_is_limited_by_epochs(recipe: dict[str, Any], machine: Machine) -> None:
    machine.step = 0.01
    recipe["schedule"]["epochs"] = 1.5
    step = train(recipe).step
    recipe["schedule"] = {"kind": "wsd", "epochs": 1.5}
    recipe["run"]["dir"] += "-steps"
    assert train(recipe).step == step


def test_timed_run_slowdown_before_decay_ends_in_time(
    recipe: dict[str, Any], machine: Machine
) -> None:
    def on_step(record: Mapping[str, Any]) -> None:
        if record["step"] == 35:
            machine.step = 4.0

    train(recipe, on_step=on_step)
    assert 0.95 * 180 < read_length(folder_of(recipe))["seconds_used"] <= 1.001 * 180


@pytest.mark.parametrize(
    "kind, second",
    [
        *(("wsd", 0.7), ("cosine", 4.0)),
        *(
            pytest.param(kind, second, marks=pytest.mark.slow)
            for kind, second in (
                *(("wsd", 1.4), ("wsd", 2.6), ("wsd", 4.0)),
                *(("cosine", 0.7), ("cosine", 1.4), ("cosine", 2.6)),
            )
        ),
    ],
)
def test_timed_run_speed_change_in_decay_ends_in_time(
    recipe: dict[str, Any],
    machine: Machine,
    kind: str,
    second: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    messages: list[str] = []
    monkeypatch.setattr(TrainingProgress, "message", lambda _, text: messages.append(text))
    recipe["schedule"] |= {"kind": kind}
    if kind == "wsd":
        recipe["schedule"]["decay_fraction"] = 0.65

    def on_step(record: Mapping[str, Any]) -> None:
        if record["step"] == 40:
            machine.step = second

    result = train(recipe, on_step=on_step)
    record = read_length(folder_of(recipe))
    assert 0.95 * 180 < record["seconds_used"] <= 1.05 * 180
    assert record["max_steps"] == result.step
    first, at = record["replaced"][0]
    assert record["decided_at"] < 40 < at < first
    rates = [line["learning_rate"] for line in metrics(recipe)]
    falling = rates[record["decided_at"] - 1 :]
    assert falling == sorted(falling, reverse=True)
    assert rates[-1] == pytest.approx(last_rate(rates, kind))
    numbers = [number for number, _ in record["replaced"]] + [result.step]
    steps = [record["decided_at"], *(at for _, at in record["replaced"])]
    run = read_run(folder_of(recipe))
    events = [event for event in run.what_happened if event["event"] in ("length", "correction")]
    assert [event["step"] for event in events] == steps
    assert [event["max_steps"] for event in events] == numbers
    page = run_page(run)
    assert f">{numbers[0]:,} steps fit into 3.0 minutes<" in page
    for before, number in itertools.pairwise(numbers):
        assert f">{number:,} steps instead of {before:,}, because the speed changed<" in page
    # A message for the decision and each correction.
    told = [text for text in messages if "the run will have" in text]
    why = "to use the time" if second < 2 else "to end in time"
    assert told[0].startswith(f"step {steps[0]}: the run will have {first} steps: ")
    assert told[1:] == [
        f"step {step}: the run will have {number} steps instead of {before}, {why}"
        for step, (before, number) in zip(steps[1:], itertools.pairwise(numbers), strict=True)
    ]


def test_timed_run_steady_speed_keeps_step_count(recipe: dict[str, Any], machine: Machine) -> None:
    recipe["schedule"]["decay_fraction"] = 0.65

    def on_step(record: Mapping[str, Any]) -> None:
        machine.step = 2.03 if record["step"] % 2 else 1.97

    train(recipe, on_step=on_step)
    assert "replaced" not in read_length(folder_of(recipe))


def test_timed_run_correction_does_not_raise_step_limit(
    recipe: dict[str, Any], machine: Machine
) -> None:
    recipe["schedule"] |= {"decay_fraction": 0.65, "max_steps": 80}

    def on_step(record: Mapping[str, Any]) -> None:
        if record["step"] == 40:
            machine.step = 1.0

    assert train(recipe, on_step=on_step).step == 80
    assert "replaced" not in read_length(folder_of(recipe))


def test_timed_run_pause_does_not_end_decay_immediately(
    recipe: dict[str, Any], machine: Machine
) -> None:
    recipe["schedule"]["decay_fraction"] = 0.65

    def on_step(record: Mapping[str, Any]) -> None:
        if record["step"] == 50:
            machine.now += 500.0

    result = train(recipe, on_step=on_step)
    record = read_length(folder_of(recipe))
    assert record["replaced"]
    left = [number - at for number, at in record["replaced"]]
    after = [number for number, _ in record["replaced"][1:]] + [result.step]
    for before, number, (_, at) in zip(left, after, record["replaced"], strict=True):
        assert number - at == (before + 1) // 2


def test_timed_run_with_samples_only_at_end_ends_in_time(
    recipe: dict[str, Any], machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sample text takes 45 s, 5 s of which copy the weights, and the only save takes 30 s. The
    evaluation before the first step includes neither.
    """

    def generate(*args: Any) -> GenerationStream:
        machine.now += 5 + 2.5 * args[2].max_new_tokens
        return GenerationStream(*args)

    def write_probe(folder: Path, size: int) -> None:
        machine.now += 30 * size / 1000

    machine.save = 30.0
    monkeypatch.setattr(validation, "GenerationStream", generate)
    monkeypatch.setattr(validation, "PROBE_BYTES", 16)
    monkeypatch.setattr(training_run, "PROBE_BYTES", 16)
    monkeypatch.setattr(training_run, "checkpoint_bytes", lambda *_: 1000)
    monkeypatch.setattr(validation, "write_probe", write_probe)
    recipe["checkpoint"]["every_steps"] = 0
    recipe["evaluation"] |= {"every_steps": 1000, "on_start": True}
    recipe["evaluation"] |= {"sample_prompts": ["a"], "sample_tokens": 16}
    train(recipe)
    assert 0.95 * 180 < read_length(folder_of(recipe))["seconds_used"] <= 1.001 * 180


def test_timed_run_resumed_process_start_keeps_decided_step_count(
    recipe: dict[str, Any], machine: Machine
) -> None:
    recipe["schedule"]["decay_fraction"] = 0.65
    stop_after(recipe, 50)
    decided = read_length(folder_of(recipe))["max_steps"]
    train(recipe, resume=True, began=time.time() - 25)
    length = read_length(folder_of(recipe))
    assert (length["max_steps"], "replaced" in length) == (decided, False)
    assert length["seconds_used"] > 180 + 20  # the time of the start counts


def test_timed_run_resumed_says_how_much_is_left(
    recipe: dict[str, Any], machine: Machine, capfd: pytest.CaptureFixture[str]
) -> None:
    stop_after(recipe, 31)
    lines = read_json_lines(folder_of(recipe) / "metrics.jsonl")
    left = time_text(180 - max(line["elapsed_seconds"] for line in lines))
    stop_after(recipe, 71, resume=True, progress=True)
    said = capfd.readouterr().err
    assert f"(step 30): {left} of 3 min of training time left\n" in said
    steps = read_length(folder_of(recipe))["max_steps"]
    train(recipe, resume=True, progress=True)
    assert f"(step 70): {steps - 70} steps left\n" in capfd.readouterr().err


def test_timed_run_reserves_time_for_averaged_checkpoint(
    recipe: dict[str, Any], machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.step = 9.2
    evaluate = machine.takes(validation.evaluate_dataset.__wrapped__, "evaluation")  # type: ignore[attr-defined]
    monkeypatch.setattr(checkpoints, "evaluate_dataset", evaluate)
    recipe["checkpoint"]["average_last"] = 2
    train(recipe)
    assert 0.95 * 180 < machine.now - 1000.0 <= 1.001 * 180


def test_timed_run_seconds_before_first_step_of_each_process_count(
    recipe: dict[str, Any], machine: Machine
) -> None:
    stop_after(recipe, 11, began=time.time() - 20)
    train(recipe, resume=True, began=time.time() - 40)
    used = read_length(folder_of(recipe))["seconds_used"]
    assert 0.95 * 180 < used <= 1.001 * 180
    assert used - (machine.now - 1000.0) > 59.9


def test_timed_run_slow_first_generation_is_not_extrapolated(
    recipe: dict[str, Any], machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU loads kernels at the first generation of each process; its text is not kept."""
    generated = [1]

    def generate(*args: Any) -> GenerationStream:
        machine.now += 0.0 if generated[-1] else 30.0
        generated[-1] += 1
        return GenerationStream(*args)

    monkeypatch.setattr(validation, "GenerationStream", generate)
    recipe["evaluation"] |= {"sample_prompts": ["a"], "on_start": True}
    generated.append(0)
    stop_after(recipe, 11)
    generated.append(0)
    result = train(recipe, resume=True)
    assert 0.95 * 180 < read_length(folder_of(recipe))["seconds_used"] <= 1.001 * 180
    texts = read_json_lines(folder_of(recipe) / "samples.jsonl")
    assert [text["step"] for text in texts] == [*range(20, result.step, 20), result.step]
    assert generated == [1, 3, 1 + len(texts)]


def test_timed_run_samples_at_epoch_are_within_budget(
    recipe: dict[str, Any],
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    corpus: Path,
    tokenizer: Tokenizer,
    tmp_path: Path,
) -> None:
    def generate(*args: Any) -> GenerationStream:
        machine.now += 8.0
        return GenerationStream(*args)

    monkeypatch.setattr(validation, "GenerationStream", generate)
    prepare(sorted(corpus.iterdir())[:20], tokenizer, tmp_path / "few", val_fraction=0.2)
    recipe["data"]["dir"] = str(tmp_path / "few")
    recipe["evaluation"] |= {"sample_prompts": ["a"], "samples_at": "epoch"}
    train(recipe)
    texts = read_json_lines(folder_of(recipe) / "samples.jsonl")
    assert len(texts) >= 3
    assert 0.9 * 180 < read_length(folder_of(recipe))["seconds_used"] <= 1.02 * 180


def test_timed_run_few_slow_steps_suffice_for_decision(
    recipe: dict[str, Any], machine: Machine
) -> None:
    machine.step = 25.0
    for name, kind in (("a", "wsd"), ("b", "cosine")):
        one = changed(recipe, name, schedule={"kind": kind})
        assert train(one).step in (6, 7)
        assert read_length(folder_of(one))["decided_at"] >= 3


def decide_as(found: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the same decisions as in another run."""

    numbers = [number for number, _ in found.get("replaced", [])] + [found["max_steps"]]
    after = {at: numbers[n + 1] for n, (_, at) in enumerate(found.get("replaced", []))}

    def decided(_: TimeBudget, step: int, *others: Any) -> int | None:
        return int(numbers[0]) if step >= found["decided_at"] else None

    def corrected(budget: TimeBudget, step: int, *others: Any) -> int:
        assert isinstance(budget.length, DecidedLength)
        return int(after.get(step, budget.length.max_steps))

    monkeypatch.setattr(TimeBudget, "decided_steps", decided)
    monkeypatch.setattr(TimeBudget, "corrected_steps", corrected)


@pytest.mark.parametrize(
    "kind, killed_after",
    [
        *(("wsd", [24, 38, 57]), ("cosine", [7, 40])),
        *(pytest.param("wsd", [step], marks=pytest.mark.slow) for step in (3, 72)),
    ],
)
def test_timed_run_killed_and_resumed_keeps_decision(
    recipe: dict[str, Any],
    machine: Machine,
    kind: str,
    killed_after: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe = changed(recipe, "broken", schedule={"kind": kind})
    for number, step in enumerate(killed_after):
        stop_after(recipe, step, resume=number > 0)
    before = read_length(folder_of(recipe))
    train(recipe, resume=True)
    decision = read_length(folder_of(recipe))
    if "max_steps" in before:
        assert {**before, "seconds_used": 0} == {**decision, "seconds_used": 0}
    whole = changed(recipe, "whole")
    with monkeypatch.context() as patch:
        decide_as(decision, patch)
        train(whole)
    assert metrics(recipe) == metrics(whole)
    assert end(recipe) == end(whole)
    # Killed again after its end: nothing is left to do.
    assert train(recipe, resume=True).step == decision["max_steps"]
    assert end(recipe) == end(whole)


def test_timed_run_resumed_keeps_corrected_step_count(
    recipe: dict[str, Any], machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe["schedule"]["decay_fraction"] = 0.65
    recipe["checkpoint"]["every_steps"] = 2
    broken, whole = changed(recipe, "broken"), changed(recipe, "whole")

    def on_step(record: Mapping[str, Any]) -> None:
        if record["step"] == 40:
            machine.step = 3.0
        if record["step"] == 59:
            raise StoppedError

    with pytest.raises(StoppedError):
        train(broken, on_step=on_step)
    before = read_length(folder_of(broken))
    assert before["replaced"]
    # Slower again, and without length.json: the newest checkpoint also stores the number.
    machine.step = 9.0
    (folder_of(broken) / "length.json").unlink()
    assert train(broken, resume=True).step == before["max_steps"]
    assert {**read_length(folder_of(broken)), "seconds_used": 0} == {**before, "seconds_used": 0}
    with monkeypatch.context() as patch:
        decide_as(before, patch)
        train(whole)
    assert metrics(broken) == metrics(whole)
    assert end(broken) == end(whole)


def test_timed_run_time_used_before_kill_counts(recipe: dict[str, Any], machine: Machine) -> None:
    whole = train(changed(recipe, "whole")).step
    recipe = changed(recipe, "broken")
    # Steps 31 to 39 are repeated, but their first execution also took time.
    stop_after(recipe, 39)
    used = machine.now
    machine.now += 10_000  # the run is paused
    train(recipe, resume=True)
    record = read_length(folder_of(recipe))
    assert 0.95 * 180 < record["seconds_used"] <= 1.001 * 180
    assert record["max_steps"] == pytest.approx(whole - 9, abs=2)
    assert used + 10_000 < machine.now
    # The same before its first checkpoint.
    early = changed(recipe, "early")
    stop_after(early, 9)
    train(early, resume=True)
    assert read_length(folder_of(early))["max_steps"] == pytest.approx(whole - 9, abs=2)


def test_timed_run_used_up_budget_ends_after_one_more_step(
    recipe: dict[str, Any], machine: Machine
) -> None:
    stop_after(recipe, 35)
    path = folder_of(recipe) / "length.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"seconds_used": 500.0}))
    result = train(recipe, resume=True)
    assert result.step == 31
    assert result.stopped_by is None


def test_timed_run_resumed_with_more_minutes_runs_longer(
    recipe: dict[str, Any], machine: Machine
) -> None:
    first = train(recipe).step
    recipe["schedule"]["max_minutes"] = 2 * MINUTES
    assert train(recipe, resume=True).step == pytest.approx(2 * first, rel=0.05)
    assert 0.95 * 360 < read_length(folder_of(recipe))["seconds_used"] <= 1.001 * 360
    # With a length in steps, the earlier decision is discarded.
    recipe["schedule"] = {"kind": "wsd", "max_steps": 200}
    assert train(recipe, resume=True).step == 200
    assert read_length(folder_of(recipe)) == {}


def test_timed_run_new_run_in_folder_starts_over(recipe: dict[str, Any], machine: Machine) -> None:
    recipe["checkpoint"]["every_steps"] = recipe["evaluation"]["every_steps"] = 0
    stop_after(recipe, 50)
    train(recipe)
    assert read_length(folder_of(recipe))["max_steps"] > 80


def test_timed_run_can_branch_into_cooldown(recipe: dict[str, Any], machine: Machine) -> None:
    stop_after(recipe, 30)
    cooled, checkpoint = cooldown_recipe(folder_of(recipe), 5)
    assert cooled.schedule.max_minutes is None
    result = train(cooled, branch_from=checkpoint)
    assert result.step == 25
    assert read_length(result.run_folder) == {}


def test_timed_run_decision_is_restored_from_checkpoint(
    recipe: dict[str, Any], machine: Machine
) -> None:
    recipe["checkpoint"]["every_steps"] = 2
    stop_after(recipe, 74)
    decision = read_length(folder_of(recipe))
    (folder_of(recipe) / "length.json").unlink()
    assert train(recipe, resume=True).step == decision["max_steps"]


@pytest.mark.slow
def test_timed_run_report_shows_decision(recipe: dict[str, Any], machine: Machine) -> None:
    stop_after(recipe, 30)
    run = read_run(folder_of(recipe))
    assert run.max_steps is None
    assert "of 3 minutes" in run_page(run)
    result = train(recipe, resume=True)
    run = read_run(folder_of(recipe))
    assert run.max_steps == result.step
    page = run_page(run)
    assert f"{result.step:,} steps fit into 3.0 minutes" in page
    assert f"complete: {result.step} steps" in page


@pytest.mark.parametrize(("save", "seconds"), [(0.5, 30.0), (3.0, 60.0)])
def test_timed_run_saves_by_time_if_steps_are_slower_than_planned(
    recipe: dict[str, Any], machine: Machine, save: float, seconds: float
) -> None:
    recipe["checkpoint"]["every_steps"] = 90  # all steps, at the predicted 2 s
    recipe["evaluation"]["every_steps"] = 0
    machine.step, machine.save = 5.0, save
    train(recipe)
    *saved, last = (one.step for one in saved_checkpoints(folder_of(recipe)))
    # A sixth of three minutes, or more if saves would take more than a twentieth of the time.
    gaps = [5 * (later - earlier) for earlier, later in itertools.pairwise(saved)]
    assert gaps
    assert set(gaps) <= {seconds - 5, seconds, seconds + 5}
    assert 0.95 * 180 < machine.now - 1000.0 <= 1.02 * 180
    assert last == read_length(folder_of(recipe))["max_steps"]


@pytest.mark.parametrize(
    "content, says",
    [
        ("[]", "not an object"),
        ('{"max_steps": 9}', "only one of max_steps and decided_at"),
        ('{"max_minutes": 3.0, "seconds_used": "x"}', "seconds_used is 'x'"),
        ('{"max_minutes": 3.0, "predicted_steps": true}', "predicted_steps is True"),
        ('{"max_minutes": 3.0}', "lacks 'predicted_steps'"),
        ('{"max_steps": 9, "decided_at": 1, "replaced": [[9]]}', "replaced is \\[\\[9\\]\\]"),
        ('{"max_steps": 9, "decided_at": 5, "replaced": [[9, 5]]}', "replaced is"),
        ('{"max_steps": 9, "decided_at": 1, "replaced": [[9, 9]]}', "replaced is"),
        ('{"max_steps": 9, "decided_at": 1, "replaced": 3}', "replaced is 3"),
    ],
)
def test_timed_run_damaged_record_is_named(
    recipe: dict[str, Any], machine: Machine, content: str, says: str
) -> None:
    stop_after(recipe, 30)
    (folder_of(recipe) / "length.json").write_text(content)
    with pytest.raises(CheckpointError, match=says) as error:
        train(recipe, resume=True)
    assert "length.json" in str(error.value)


def test_planned_run_predicts_steps_of_minutes(recipe: dict[str, Any]) -> None:
    here = find_machine()
    resolved = resolve_for(parse_recipe(recipe), here)
    assert planned_run(resolved, here) is None
    run = planned_run(resolved, here, 1280.0)
    assert run is not None
    assert (run.schedule.max_steps, run.schedule.warmup_steps, run.schedule.is_open) == (
        1800,
        90,
        True,
    )
    assert run.tokens == 1800 * 128


def test_timed_run_result_has_regular_fields(recipe: dict[str, Any], machine: Machine) -> None:
    result: TrainResult = train(recipe)
    assert math.isfinite(result.train_loss or math.nan)
    starts = read_json_lines(folder_of(recipe) / "starts.jsonl")
    assert "max_steps" not in starts[0]
    assert starts[0]["warmup_steps"] == 4


def test_recorded_length_ignores_non_numeric_seconds(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"seconds": 2.5},
        {"seconds": "x"},
        {"seconds": [1]},
        {"seconds": True},
    ]
    lines += [{"seconds": 10**400, "elapsed_seconds": "y"}, {"seconds": math.nan}, {"seconds": 1}]
    text = "".join(json.dumps({"step": n} | line) + "\n" for n, line in enumerate(lines))
    (tmp_path / "metrics.jsonl").write_text(text)
    assert recorded_length(tmp_path, {}) == {"seconds_used": 3.5}

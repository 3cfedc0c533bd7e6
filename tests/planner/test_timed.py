"""The speed of training on this machine, from timed steps."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from firstlight.hardware.device import Hardware
from firstlight.models.accounting import meta_model, train_flops_per_token
from firstlight.planner.memory.prediction import MemoryPrediction
from firstlight.planner.plan import estimate as estimates
from firstlight.planner.plan.estimate import Candidate, Estimate, Estimator, method_table
from firstlight.planner.plan.machine import find_machine, with_changes
from firstlight.planner.speed import throughput
from firstlight.planner.speed.throughput import StepTime, time_step, timed_speed
from firstlight.recipe import ResolvedRecipe
from planner_recipes import GPT2, LLAMA, recipe

CPU = Hardware(torch.device("cpu"), "CPU", 2**40, bf16=True)
DEEP = {**LLAMA, "num_hidden_layers": 12}


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The (sequences, layers) that are timed, on a machine with exact times."""
    found: list[tuple[int, int]] = []

    def step(recipe: ResolvedRecipe, _: Hardware, rows: int, _s: float) -> tuple[float, float]:
        layers = recipe.model.num_hidden_layers
        found.append((rows, layers))
        return rows * (3 + 0.5 * layers), 2 + 0.25 * layers

    monkeypatch.setattr(throughput, "_timed", step)
    monkeypatch.setattr(throughput, "_peak_flops", lambda *_: 1e9)
    return found


@pytest.mark.parametrize(
    ("seconds", "expected_sizes", "said"),
    [
        (1e9, [(16, 12)], ""),
        (40.0, [(8, 12)], "8 of 16 sequences"),
        (0.0, [(8, 2), (8, 3)], "8 of 16 sequences, 2 and 3 of 12 layers"),
    ],
)
def test_time_step_with_less_time_measures_smaller_step_and_extrapolates(
    sizes: list[tuple[int, int]],
    seconds: float,
    expected_sizes: list[tuple[int, int]],
    said: str,
) -> None:
    long = recipe(DEEP, batch={"micro_batch_size": 16})
    found = time_step(long, CPU, seconds)
    assert sizes == expected_sizes
    assert (found.passes, found.update) == pytest.approx((16 * 9, 5))
    assert (found.peak_flops, found.timed) == (1e9, said)
    assert found.seconds(3) == pytest.approx(3 * 16 * 9 + 5)


def test_time_step_with_different_layers_measures_all_of_them(sizes: list[tuple[int, int]]) -> None:
    model = {**DEEP, "model_type": "qwen2", "sliding_window": 64, "max_window_layers": 6}
    time_step(recipe(model), CPU, 0.0)
    assert sizes == [(2, 12)]


@pytest.mark.parametrize(("seconds", "passes_seconds"), [(1e9, 4.0), (3.0, 5.0), (0.5, 1.0)])
def test_time_step_counts_fastest_step_after_the_first(
    monkeypatch: pytest.MonkeyPatch, seconds: float, passes_seconds: float
) -> None:
    now, passes = [0.0], iter((1.0, 5.0, 4.0))
    optimizer = SimpleNamespace(clip_gradients=lambda: now.append(now[-1] + 0.25))

    def step(*_: Any, lr_scale: float) -> None:
        assert lr_scale == 0
        now.append(now[-1] + next(passes))
        optimizer.clip_gradients()

    program = SimpleNamespace(step=step, optimizer=optimizer)
    monkeypatch.setattr(throughput, "trial_program", lambda *_: (program, None))
    monkeypatch.setattr(throughput, "_peak_flops", lambda *_: 1e15)
    monkeypatch.setattr(time, "perf_counter", lambda: now[-1])
    assert time_step(recipe(), CPU, seconds) == StepTime(passes_seconds, 0.25, 1e15)


@pytest.mark.parametrize(
    "sections",
    [
        {"batch": {"gradient_accumulation_steps": 3}, "data": {"document_masking": True}},
        {"preference": {}, "data": {"document_masking": True}},
        {"lora": {"rank": 4, "alpha": 8.0}},
        {"efficiency": {"optimizer_in_backward": True}, "optimizer": {"max_grad_norm": 0.0}},
    ],
    ids=lambda sections: "-".join(sections),
)
def test_time_step_supports_every_kind_of_recipe(sections: dict[str, Any]) -> None:
    found = time_step(recipe(GPT2, **sections), CPU)
    assert found.passes > 0
    assert found.update > 0
    assert found.timed == ""


def test_timed_speed_is_tokens_per_second_and_relative_to_peak() -> None:
    one = recipe(GPT2, batch={"micro_batch_size": 2, "gradient_accumulation_steps": 4})
    found = timed_speed(one, StepTime(passes=0.2, update=0.2, peak_flops=1e9))
    tokens = 4 * 2 * 128
    assert found.tokens_per_second.expected == pytest.approx(tokens / 1.0)
    assert found.tokens_per_second.slow == pytest.approx(tokens / 1.15)
    assert sum(found.phases.values()) == pytest.approx(found.step_seconds.expected)
    flops = train_flops_per_token(meta_model(one.model), 128)
    assert found.mfu.expected == pytest.approx(tokens * flops / 1e9)
    assert found.source == "steps timed here"
    compiled = one.with_keys("efficiency", compile=True)
    twice = timed_speed(compiled, StepTime(0.2, 0.2, 1e9, "1 of 2 sequences"), gain=2.0)
    assert twice.tokens_per_second.expected == pytest.approx(2 * tokens)
    assert twice.tokens_per_second.slow == pytest.approx(2 * tokens / 1.2)
    assert (
        "(1 of 2 sequences), without torch.compile; with it usually 2.00 times as fast"
        in twice.source
    )


def _estimate(one: ResolvedRecipe, needed: int = 1, **more: Any) -> Estimate:
    memory = MemoryPrediction(needed, "backward", {}, {}, needed, 0, 0, ())
    return Estimate("x", {}, one, memory, usable_bytes=2, **more)


def test_estimator_times_recipe_once_if_it_fits_on_one_local_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Hardware] = []

    def step(_: ResolvedRecipe, hardware: Hardware) -> StepTime:
        asked.append(hardware)
        return StepTime(1.0, 1.0, 1e9)

    monkeypatch.setattr(estimates, "time_step", step)
    here, estimator, one = find_machine(device="cpu"), Estimator(), _estimate(recipe())
    for _ in range(2):
        found = estimator.timed(one, here)
        assert found.speed is not None
        assert found.speed.source == "steps timed here"
    assert len(asked) == 1
    offloaded = recipe().with_keys("distributed", engine="fsdp", offload="cpu")
    for other, machine in (
        (_estimate(recipe(LLAMA), needed=3), here),
        (_estimate(recipe(LLAMA)), find_machine("H100")),
        (_estimate(recipe(LLAMA)), replace(here, count=2)),
        (_estimate(offloaded), here),
    ):
        assert estimator.timed(other, machine) is other
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("error", "raised"),
    [(MemoryError("x"), False), (RuntimeError("CUDA error: an illegal memory access"), True)],
)
def test_estimator_without_memory_for_steps_keeps_estimate(
    monkeypatch: pytest.MonkeyPatch, error: Exception, raised: bool
) -> None:
    def step(*_: object) -> StepTime:
        raise error

    monkeypatch.setattr(estimates, "time_step", step)
    one, here = _estimate(recipe()), find_machine(device="cpu")
    if not raised:
        assert Estimator().timed(one, here) is one
        return
    with pytest.raises(RuntimeError, match="illegal"):
        Estimator().timed(one, here)


def test_method_table_times_uncompiled_methods_within_time_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]

    def estimate_all(_: Estimator, candidates: list[Candidate]) -> list[Estimate]:
        return [
            replace(_estimate(with_changes(recipe(), one.changes)), name=one.name)
            for one in candidates
        ]

    def step(*_: object) -> StepTime:
        now[0] += 10.0
        return StepTime(1.0, 1.0, 1e9)

    monkeypatch.setattr(Estimator, "estimate_all", estimate_all)
    monkeypatch.setattr(estimates, "time_step", step)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    estimator, here = Estimator(), find_machine(device="cpu")
    found = method_table(recipe(), here, estimator)
    names = [one.name for one in found if one.speed is not None]
    assert names == [one.name for one in found if one.name != "torch.compile"][:4]
    assert len(found) > 8
    # Other candidates have more time, but not without end.
    others = [replace(one, usable_bytes=2) for one in found if one.speed is None]
    assert [estimator.timed(one, here).speed is not None for one in others[:4]] == 3 * [True] + [
        False
    ]

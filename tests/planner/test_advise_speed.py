"""The speed used to choose a new model: measured on this machine, or predicted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from firstlight.errors import ConfigError
from firstlight.from_texts import machine as machine_module
from firstlight.from_texts.choices import choose
from firstlight.from_texts.machine import facts_for_model, fitted_recipe
from firstlight.from_texts.plan import length_lines
from firstlight.from_texts.request import Request
from firstlight.hardware.device import Hardware
from firstlight.planner.advise import speed as speed_module
from firstlight.planner.advise.law import Hardness, Length, MachineFacts, ModelSize, TextFacts
from firstlight.planner.advise.speed import _speed_recipe, new_model_speed
from firstlight.planner.memory import recipe as recipes
from firstlight.planner.plan.machine import Machine, find_machine, resolve_for
from firstlight.planner.speed.throughput import StepTime
from firstlight.recipe import Recipe, ResolvedRecipe, parse_recipe
from firstlight.training.forecast import Forecast

H100 = find_machine("H100")
GIB = 1 << 30


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Replace the measurement of a step by 1 ms per thousand tokens, at least 5 ms, and list the
    measured numbers of tokens.
    """
    numbers: list[int] = []

    def step(recipe: ResolvedRecipe, hardware: Hardware) -> StepTime:
        tokens = recipe.batch.rows * recipe.data.seq_len
        numbers.append(tokens)
        return StepTime(max(1e-6 * tokens, 0.005), 0.0, 1e12)

    monkeypatch.setattr(speed_module, "time_step", step)
    return numbers


def has_gpu(monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> Machine:
    """Return this machine with an H100 that has some free memory."""
    # An earlier test may have asked for other shapes.
    speed_module._predicted_speeds.cache_clear()
    monkeypatch.setattr(speed_module, "free_memory_bytes", lambda _: free_bytes)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)

    def elsewhere(recipe: Recipe, machine: Machine) -> ResolvedRecipe:
        # Resolving for this machine requires triton, which may be missing on a machine without a
        # GPU.
        return resolve_for(recipe, replace(machine, is_here=False))

    monkeypatch.setattr(speed_module, "resolve_for", elsewhere)
    return replace(H100, is_here=True)


@pytest.mark.parametrize(
    ("free", "tokens"), [(70 * GIB, 32_768), (22 * GIB, 8192), (7 * GIB, 2048)]
)
def test_new_model_speed_on_local_gpu_is_measured(
    monkeypatch: pytest.MonkeyPatch, timed: list[int], free: int, tokens: int
) -> None:
    speed = new_model_speed(has_gpu(monkeypatch, free))
    assert (speed.kind, speed.origin) == ("cuda", "measured here")
    assert timed == [tokens, 512] * 2
    assert [rate for _, rate in speed.rates] == [tokens / max(1e-6 * tokens, 0.005)] * 2
    assert [seconds for _, seconds in speed.steps] == pytest.approx([0.005] * 2)


@pytest.mark.slow
def test_new_model_speed_without_free_memory_is_predicted(
    monkeypatch: pytest.MonkeyPatch, timed: list[int]
) -> None:
    # The usual models have up to 16 layers.
    monkeypatch.setattr(speed_module, "_PREDICTED_SHAPES", ((192, 1), (512, 2)))
    speed = new_model_speed(has_gpu(monkeypatch, 2 * GIB))
    assert speed.origin == "predicted by the planner"
    assert not timed
    assert len(speed.rates) == len(speed.steps) == 2
    # A larger model trains more slowly, and a step of 512 tokens takes less time than one of
    # 32,768.
    assert speed.rates[0][1] > speed.rates[1][1]
    assert 0 < speed.steps[0][1] < speed.steps[1][1]


@pytest.mark.slow
def test_new_model_speed_out_of_memory_falls_back_to_prediction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_memory(*_: Any) -> StepTime:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    here = has_gpu(monkeypatch, 70 * GIB)
    monkeypatch.setattr(speed_module, "time_step", no_memory)
    speed = new_model_speed(here)
    assert speed.origin == "predicted by the planner"
    assert speed.rates == new_model_speed(H100).rates
    with pytest.raises(ConfigError, match=r"^H100 has too little free memory to measure"):
        new_model_speed(replace(here, gpu=None))

    def fails(*_: Any) -> StepTime:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(speed_module, "time_step", fails)
    with pytest.raises(RuntimeError, match="illegal"):
        new_model_speed(here)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gpu", "kind", "origin"),
    [("A100 80GB", "cuda", "predicted by the planner"), (None, "cpu", "measured here")],
)
def test_new_model_speed_gpu_not_used_by_run_is_not_measured(
    monkeypatch: pytest.MonkeyPatch,
    timed: list[int],
    gpu: str | None,
    kind: str,
    origin: str,
) -> None:
    has_gpu(monkeypatch, 70 * GIB)
    speed = new_model_speed(find_machine(gpu, device="auto" if gpu else "cpu"))
    assert (speed.kind, speed.origin) == (kind, origin)
    assert all(tokens == 2048 for tokens in timed)
    assert len(timed) == (2 if kind == "cpu" else 0)


@pytest.mark.parametrize("busy", [False, True])
def test_plan_on_busy_machine_reports_it(
    monkeypatch: pytest.MonkeyPatch, timed: list[int], busy: bool
) -> None:
    monkeypatch.setattr(speed_module, "cores_are_busy", lambda: busy)
    speed = new_model_speed(find_machine(device="cpu"))
    choices = choose(TextFacts(512, 1e6, 2.0, Hardness(1.72, 2.24, 1.0), 1e5), speed, Length(60.0))
    said = "this machine is busy: training will be slower unless other programs are stopped"
    assert (said in length_lines(choices, speed, "the text")) is busy
    assert not new_model_speed(has_gpu(monkeypatch, 70 * GIB)).is_busy  # its GPU may be idle


def test_new_model_speed_missing_device_is_named() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ConfigError, match="device 'cuda' is not present on this machine"):
        find_machine(device="cuda")


@pytest.mark.parametrize(("seconds", "gain"), [(15.0, 1.0), (60.0, 1.8), (1800.0, 2.07)])
def test_forecast_uses_speed_that_run_was_planned_with(
    monkeypatch: pytest.MonkeyPatch, seconds: float, gain: float
) -> None:
    planned = Forecast(GIB, "backward", {}, (150e3, 200e3, 250e3))
    monkeypatch.setattr(machine_module, "forecast_run", lambda *_: planned)
    speed = MachineFacts("H100", "cuda", [(1e3, 300e3), (1e13, 300e3)], 70 * GIB, "measured here")
    speed = replace(speed, compiler=H100.compiler)
    choices = choose(
        TextFacts(8192, 3.4e8, 3.3, Hardness(1.72, 2.24, 1.0), 3e5), speed, Length(seconds)
    )
    assert choices["efficiency.compile"] is (gain > 1)
    assert choices["efficiency.compile_regional"] is (gain == 1.8)
    values = choices.values
    values["data"] |= {"dir": "unused"}
    plan = Mock(request=Request(("texts",)), choices=choices, machine=H100, speed=speed)
    found = fitted_recipe(plan, values, lambda: Length(seconds))
    assert found.forecast is not None
    assert found.forecast.tokens_per_second is not None
    assert found.forecast.tokens_per_second[1] == pytest.approx(gain * 300e3)
    efficiency = found.resolved.efficiency
    assert (efficiency.compile, efficiency.compile_regional) == (gain > 1, gain == 1.8)


@pytest.mark.parametrize(
    ("gpu", "implementation", "stacks"),
    [("H100", "auto", 3), ("H100", "for-loop", 14), (None, "auto", 14)],
)
def test_predicted_step_counts_products_of_muon(
    gpu: str | None, implementation: str, stacks: int
) -> None:
    """Muon computes 15 matrix products per matrix, or per stack of matrices of the same size."""
    machine = find_machine(gpu)
    model: dict[str, Any] = {"model_type": "llama", "vocab_size": 256, "hidden_size": 64}
    values = {
        "data": {"dir": "unused", "seq_len": 64},
        "model": model | {"num_hidden_layers": 2, "num_attention_heads": 1},
        "optimizer": {"name": "muon", "implementation": implementation, "learning_rate": 0.1},
        "schedule": {"max_steps": 10},
    }
    recipe = resolve_for(parse_recipe(values, "a recipe"), machine)
    traced = recipes.trace_memory(recipe, machine.target)
    products = sum(
        entry.count
        for entry in traced.operators
        if entry.operator.phase == "optimizer"
        and entry.operator.base_name in ("mm", "addmm", "bmm", "baddbmm")
    )
    # Seven matrices per layer: four of 64 x 64, two of 64 x F, and one of F x 64.
    assert products == 15 * stacks


def test_new_model_speed_ignores_compile_setting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The compile mode, whose gain multiplies the speed, is chosen afterwards."""
    asked: list[Any] = []

    def rate(recipe: ResolvedRecipe, _: Machine) -> float:
        asked.append(recipe.efficiency.compile)
        return 1e3

    monkeypatch.setattr(machine_module, "predicted_rate", rate)
    size = ModelSize(192, 4, 4096, 512)
    recipe = resolve_for(_speed_recipe(size, 512), H100).with_keys("efficiency", compile=True)
    facts_for_model(recipe, H100)
    assert asked == [False, False]

"""Kinds of GPUs that were measured: what a plan says of them, and the fit of their constants."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from firstlight.cli.plan import plan_command
from firstlight.hardware.gpus import find_gpu
from firstlight.planner.memory.kernels import Layout, Operator, OperatorCount, bytes_of
from firstlight.planner.memory.prediction import MemoryPrediction
from firstlight.planner.plan.machine import find_machine
from firstlight.planner.speed.gpu import (
    BOUNDS,
    DEFAULT_SHARES,
    MeasuredGpu,
    measured_gpu,
    read_measured,
    save_measured,
    shares_for,
    shares_of,
)
from firstlight.planner.speed.recipe import TimedStep, fit_constants, relative_errors
from firstlight.planner.speed.throughput import Workload, predict_speed

H200 = find_gpu("H200")
CONSTANTS = {
    "products": 0.72,
    "attention": 0.44,
    "bandwidth": 0.88,
    "launch_seconds": 5e-6,
    "fused_traffic": 2.2,
}
MEASURED = MeasuredGpu(CONSTANTS, 0.08, 11, 20, "2.11.0", 640 * 2**20)

_RECIPE = """
data: {dir: /nowhere, seq_len: 64}
model: {model_type: gpt2, vocab_size: 500, hidden_size: 32, num_hidden_layers: 2,
        num_attention_heads: 2}
batch: {micro_batch_size: 2}
efficiency: {compile: false}
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of this machine's measured GPUs, in a cache of the test's own."""
    monkeypatch.setenv("FIRSTLIGHT_CACHE", str(tmp_path))
    return tmp_path / "calibration" / "gpus.json"


def _plan(folder: Path, gpu: str) -> tuple[str, dict[str, Any]]:
    path = folder / "recipe.yaml"
    path.write_text(_RECIPE)
    found = CliRunner().invoke(plan_command, [str(path), "--gpu", gpu, "--no-search", "--json"])
    assert found.exit_code == 0, found.output
    return found.stderr, json.loads(found.stdout)


def test_a_plan_says_whether_a_kind_of_gpu_was_measured(cache: Path, tmp_path: Path) -> None:
    said, before = _plan(tmp_path, "H200")
    assert "speed of H200: from the data sheet" in said
    assert before["as_it_stands"]["speed"]["source"] == "from the data sheet"
    save_measured(cache, "H200", MEASURED)
    said, after = _plan(tmp_path, "H200")
    assert (
        "speed of H200: measured on this GPU type: 11 configurations fitted, 20 others within 8% "
        "(torch 2.11.0)" in said
    )
    training = after["as_it_stands"]["training"]
    assert training["overhead_bytes"] == 640 * 2**20
    step = after["as_it_stands"]["speed"]["step_seconds"]
    assert step["high"] / step["expected"] == pytest.approx(1.08, abs=0.01)
    said, other = _plan(tmp_path, "A100 40GB")
    assert "speed of A100 40GB: from the data sheet" in said
    assert other["as_it_stands"]["training"]["overhead_bytes"] == 500 * 2**20


def test_several_kinds_stand_in_one_file(cache: Path) -> None:
    save_measured(cache, "H200", MEASURED)
    save_measured(cache, "RTX 4090", MeasuredGpu({**CONSTANTS, "products": 0.6}, 0.0, 1, 1, "2.13"))
    assert read_measured(cache).keys() == {"H200", "RTX 4090"}
    assert measured_gpu(H200) == MEASURED
    assert shares_for(find_gpu("RTX 4090")).products.expected == 0.6
    assert find_machine("H200").target.context_bytes == 640 * 2**20


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"format": 99, "gpus": {}}',
        '{"format": 1, "gpus": {"H200": {}}}',
        '{"format": 1, "gpus": {"H200": {"constants": {"products": 7}, "error": 0.1}}}',
    ],
)
def test_a_damaged_file_counts_as_none(cache: Path, content: str) -> None:
    cache.parent.mkdir()
    cache.write_text(content)
    assert read_measured(cache) == {}
    assert shares_for(H200) is DEFAULT_SHARES
    save_measured(cache, "H200", MEASURED)
    assert measured_gpu(H200) == MEASURED


def test_constants_out_of_their_bounds_are_refused(cache: Path) -> None:
    save_measured(cache, "H200", MeasuredGpu({**CONSTANTS, "products": 1.5}, 0.1, 1, 1, "2.13"))
    assert read_measured(cache) == {}


def _mm(m: int, k: int, n: int, phase: str = "forward") -> Operator:
    half = torch.bfloat16
    inputs: tuple[Layout, ...] = (((m, k), half), ((k, n), half))
    moved = sum(map(bytes_of, inputs)) + 2 * m * n
    return Operator("aten.mm.default", phase, inputs, (((m, n), half),), 2 * m * n * k, moved)


def _add(size: int) -> Operator:
    layout: Layout = ((size,), torch.float32)
    return Operator("aten.add.Tensor", "forward", (layout, layout), (layout,), 0, 12 * size)


def _attention(tokens: int) -> Operator:
    one: Layout = ((8, 16, tokens, 64), torch.bfloat16)
    name = "aten._scaled_dot_product_flash_attention.default"
    moved = 4 * bytes_of(one)
    return Operator(name, "forward", (one, one, one), (one,), 4, moved)


def _steps() -> list[tuple[MemoryPrediction, Workload]]:
    """Steps of which each depends most on another constant."""
    eager, compiled = Workload(1, 1.0), Workload(1, 1.0, compiled=True)
    counts = [
        ([(_mm(8192, 8192, 8192), 10)], eager),
        ([(_add(2**28), 10)], eager),
        ([(_attention(8192), 20)], eager),
        ([(_add(64), 3000)], eager),
        ([(_mm(2**17, 128, 128), 20), (_add(2**20), 50)], compiled),
        ([(_mm(4096, 4096, 4096), 10), (_add(2**26), 10), (_attention(2048), 5)], eager),
    ]
    return [
        (MemoryPrediction(0, "", {}, {}, 0, 0, 0, tuple(OperatorCount(*e) for e in entries)), work)
        for entries, work in counts
    ]


def test_the_constants_of_made_up_measurements_are_found_again() -> None:
    shares = shares_of(CONSTANTS)
    steps = [
        TimedStep(counted, work, predict_speed(counted, work, H200, shares).step_seconds.expected)
        for counted, work in _steps()
    ]
    found = fit_constants(steps, H200)
    assert found == pytest.approx(CONSTANTS, rel=0.05)
    assert max(map(abs, relative_errors(steps, H200, found))) < 0.03
    assert max(map(abs, relative_errors(steps, H200, None))) > 0.1


def test_a_constant_that_no_step_depends_on_stays_as_it_is() -> None:
    counted, work = _steps()[0]
    found = fit_constants([TimedStep(counted, work, 0.05)], H200)
    for name in BOUNDS:
        expected = getattr(DEFAULT_SHARES, name).expected
        assert (found[name] == expected) == (name != "products"), name

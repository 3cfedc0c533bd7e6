"""Fitting the constants of the GPU speed model."""

from __future__ import annotations

import pytest
import torch

from benchmarks.planner_constants import TimedStep, fit_constants, relative_errors
from firstlight.planner.memory.kernels import Layout, Operator, OperatorCount, bytes_of
from firstlight.planner.memory.prediction import MemoryPrediction
from firstlight.planner.speed.gpu import BOUNDS, DEFAULT_SHARES, shares_of
from firstlight.planner.speed.throughput import Workload, predict_speed
from planner_recipes import CONSTANTS, H200


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
    """Return steps that each depend mostly on a different constant."""
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


def test_planner_constants_are_recovered_from_synthetic_measurements() -> None:
    shares = shares_of(CONSTANTS)
    steps = [
        TimedStep(counted, work, predict_speed(counted, work, H200, shares).step_seconds.expected)
        for counted, work in _steps()
    ]
    found = fit_constants(steps, H200)
    assert found == pytest.approx(CONSTANTS, rel=0.05)
    assert max(map(abs, relative_errors(steps, H200, found))) < 0.03
    assert max(map(abs, relative_errors(steps, H200, None))) > 0.1


def test_planner_constant_without_dependent_steps_is_unchanged() -> None:
    counted, work = _steps()[0]
    found = fit_constants([TimedStep(counted, work, 0.05)], H200)
    for name in BOUNDS:
        expected = getattr(DEFAULT_SHARES, name).expected
        assert (found[name] == expected) == (name != "products"), name

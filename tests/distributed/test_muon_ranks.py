"""Muon in several processes takes the same steps as in one."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from spawned import run_ranks

pytestmark = pytest.mark.usefixtures("forked_processes")

_DRIVER = Path(__file__).with_name("muon_driver.py")

#: More than the steps of the momentum warm-up, and as many as in the slow tests.
_FEW, _MANY = 12, 50

_PLAIN: dict[str, Any] = {}
_EVERYTHING: dict[str, Any] = {
    "muon_beta2": 0.95,
    "muon_coefficients": "polar_express",
    "muon_momentum_warmup_steps": 10,
    "cautious_weight_decay": True,
    "embedding_lr_multiple": 2.0,
    "embedding_weight_decay": 0.0,
}
_FSDP, _TENSOR, _PIPELINE = {"engine": "fsdp"}, {"tensor_parallel": 2}, {"pipeline": 2}


def _cases(*cases: tuple[dict[str, Any], str, dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"distributed": engine, "family": family, "optimizer": optimizer}
        for engine, family, optimizer in cases
    ]


def _require_equal(cases: list[dict[str, Any]], size: int, steps: int) -> None:
    main, *others = run_ranks(_DRIVER, [json.dumps(cases), str(steps)], size, timeout=400)
    for one in (*others, main):
        assert one.returncode == 0, (one.returncode, one.stderr)
    lines = [json.loads(line) for line in main.stdout.splitlines() if line[:1] == "{"]
    assert len(lines) == len(cases)
    for case, line in zip(cases, lines, strict=True):
        assert line["weights"] < 1e-6, (case, line)
        assert line["state"] < 1e-6, (case, line)
        assert line["moved"] > 1e-3, (case, line)
        if case["distributed"] in ({"engine": "ddp"}, _FSDP, _TENSOR):
            # Each matrix is computed by one process; the first process takes one of the remaining
            # ones.
            own, alone = (count / steps for count in line["orthogonalised"])
            assert own == math.ceil(alone / size)


#: Cases for two processes.
_CASES = _cases(
    ({"engine": "ddp"}, "llama", _PLAIN),
    ({"engine": "ddp"}, "moe", _EVERYTHING),
    # Sharded rows: inputs for GPT-2, outputs for Llama. 3 key-value heads of 8 rows and the experts
    # are sharded unevenly or not at all.
    (_FSDP, "llama", _PLAIN),
    (_FSDP, "llama", _EVERYTHING),
    (_FSDP, "gpt2", _EVERYTHING),
    (_FSDP, "moe", _EVERYTHING),
    (_TENSOR, "grouped", _PLAIN),
    (_TENSOR, "grouped", _EVERYTHING),
    (_PIPELINE, "grouped", _EVERYTHING),
)


@pytest.mark.slow
def test_muon_steps_of_two_processes_equal_those_of_one() -> None:
    _require_equal(_CASES, 2, _FEW)


@pytest.mark.slow
def test_muon_fifty_steps_of_two_processes_equal_those_of_one() -> None:
    _require_equal(_CASES, 2, _MANY)


@pytest.mark.slow
def test_muon_three_processes_with_fewer_matrices_equal_one() -> None:
    # Llama has 14 matrices: the third process computes none of the last two, and its shards are
    # shorter.
    _require_equal(
        _cases((_FSDP, "llama", _PLAIN), (_FSDP, "llama", _EVERYTHING), (_FSDP, "gpt2", _PLAIN)),
        3,
        _MANY,
    )


@pytest.mark.slow
def test_muon_four_processes_in_two_dimensions_equal_one() -> None:
    _require_equal(
        _cases(
            ({"engine": "fsdp", "tensor_parallel": 2}, "grouped", _EVERYTHING),
            ({"engine": "fsdp", "shard": 2}, "llama", _EVERYTHING),
        ),
        4,
        _MANY,
    )

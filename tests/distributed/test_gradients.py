"""The gradient of a global batch does not depend on how it is split over processes and
micro-batches.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from spawned import run_ranks

pytestmark = pytest.mark.usefixtures("forked_processes")

_DRIVER = Path(__file__).with_name("gradient_driver.py")

_ENGINES: dict[str, dict[str, Any]] = {
    "ddp": {"engine": "ddp"},
    "fsdp": {"engine": "fsdp"},
    "fsdp-offload": {"engine": "fsdp", "offload": "cpu"},
    "fsdp-kept": {"engine": "fsdp", "reshard_after_forward": False},
    "hybrid": {"engine": "fsdp", "shard": 2},
}


def _cases(engines: list[str], families: list[str]) -> list[dict[str, Any]]:
    """Return each engine with each split and mask, with alternating families and dtypes."""
    cuts = [(1, 1), (1, 3), (2, 2), (3, 1)]
    return [
        {
            "distributed": _ENGINES[engine],
            "micro": micro,
            "accumulation": accumulation,
            "masks": masks,
            "family": families[number % len(families)],
            "dtype": "float32" if number % 5 == 4 else "float64",
        }
        for number, (engine, (micro, accumulation), masks) in enumerate(
            itertools.product(engines, cuts, ("unequal", "partial"))
        )
    ]


def _require_equal(cases: list[dict[str, Any]], size: int) -> None:
    for result in run_ranks(_DRIVER, [json.dumps(cases)], size, timeout=400):
        assert result.returncode == 0, result.stderr
        lines = [json.loads(line) for line in result.stdout.splitlines() if line[:1] == "{"]
        assert len(lines) == len(cases)
        for line in lines:
            bound = 1e-12 if line["dtype"] == "float64" else 1e-5
            assert line["difference"] < bound, line
            # Tolerances for sums of fp64 losses and norms, and of fp32 ones.
            assert line["loss"] < bound, line
            assert line["norm"] < bound, line


def _methods(count: int) -> list[dict[str, Any]]:
    compiled = {"compile": True, "compile_backend": "aot_eager"}
    methods: list[dict[str, Any]] = [
        {"activation_checkpointing": "full", "vocab_multiple": 64},
        {"activation_checkpointing": "selective", "loss_chunk_tokens": 8},
        {**compiled, "compile_regional": True},
        compiled,
    ]
    return [
        {
            "distributed": _ENGINES[engine],
            "micro": 2,
            "accumulation": 2,
            "masks": "unequal",
            "family": "llama",
            "dtype": "float32",
            "efficiency": efficiency,
        }
        for engine in ("ddp", "fsdp")
        for efficiency in methods[:count]
    ]


def test_gradient_of_two_processes_equals_that_of_one() -> None:
    families = ["llama", "gpt2", "tied"]
    cases = _cases(["ddp", "fsdp"], families)
    # They differ from fsdp only in the location of parameters, not in how a batch is split.
    cases += _cases(["fsdp-offload", "fsdp-kept"], families)[2::3]
    assert {case["distributed"].get("offload") for case in cases} == {None, "cpu"}
    # In one world, because starting one takes longer than all the steps.
    _require_equal([*cases, *_cases(["fsdp"], ["moe"])[:1], *_methods(2)], 2)


@pytest.mark.slow
def test_gradient_of_two_processes_with_experts_and_methods_equals_that_of_one() -> None:
    experts = [*_cases(["ddp"], ["moe"])[:2], *_cases(["fsdp"], ["moe"])[:2]]
    _require_equal([*experts, *_methods(4)], 2)


@pytest.mark.slow
def test_gradient_is_sent_only_in_last_pass_of_step() -> None:
    base = {"micro": 1, "masks": "unequal", "family": "llama", "dtype": "float64", "count": True}
    cases = [
        {**base, "distributed": _ENGINES[engine], "accumulation": accumulation}
        for engine in ("ddp", "fsdp")
        for accumulation in (1, 4)
    ]
    lines = run_ranks(_DRIVER, [json.dumps(cases)], 2)[0].stdout.splitlines()
    sent = [json.loads(line)["sent"] for line in lines if line[:1] == "{"]
    # Three of them are the sums of tokens, loss and (fsdp) the gradient norm.
    assert sent[0] == sent[1] > 2
    assert sent[2] == sent[3] > 3


@pytest.mark.slow
def test_gradient_of_four_processes_equals_that_of_one() -> None:
    _require_equal(_cases(list(_ENGINES), ["llama", "gpt2", "tied"]), 4)

"""The memory calculations of docs/scaling.md, compared with the memory of real processes."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import pytest
from spawned import run_ranks

from firstlight.models import LlamaConfig
from firstlight.models.accounting import meta_model
from firstlight.planner.memory.ranks import engine_of, of_one_rank, own_part
from firstlight.planner.memory.recipe import trace_memory
from firstlight.recipe import parse_resolved_recipe
from scaling_table import rank_memory

# Only torch's allocations are counted, not all memory of the processes.
pytestmark = pytest.mark.usefixtures("forked_processes")

_DRIVER = Path(__file__).with_name("memory_driver.py")
_STEPS_DRIVER = Path(__file__).with_name("step_memory_driver.py")

#: Nothing is divisible by 2, so the sizes of shards have to be rounded up.
_MODEL: dict[str, Any] = {
    "vocab_size": 37,
    "hidden_size": 18,
    "intermediate_size": 31,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "head_dim": 6,
}


def test_rank_0_of_two_memory_matches_arithmetic() -> None:
    models = [{**_MODEL, "tie_word_embeddings": tied} for tied in (False, True)]
    engines: tuple[Literal["ddp", "fsdp"], ...] = ("ddp", "fsdp")
    cases = [(engine, model) for model in models for engine in engines]
    results = run_ranks(_DRIVER, [json.dumps(cases)], 2)
    for result in results:
        assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in results[0].stdout.splitlines() if line[:1] == "{"]
    for (engine, model), found in zip(cases, lines, strict=True):
        expected = asdict(rank_memory(LlamaConfig(**model), 8, engine, 2))
        assert found == {name: expected[name] for name in found}, (engine, model)
        assert found.keys() == {"weights", "gradients", "moments", "accumulating"}
    assert lines[0]["weights"] > 1.9 * lines[1]["weights"]


_WAYS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": {"engine": "fsdp"},
    "fsdp-kept": {"engine": "fsdp", "reshard_after_forward": False},
    "tensor": {"tensor_parallel": 2},
    "pipeline": {"pipeline": 2},
}
#: Micro-batches per step. With tensor parallelism, memory freed by gloo's threads hides the effect
#: of several.
_MICRO_BATCHES = {
    "ddp": (1, 3),
    "fsdp": (1, 3),
    "fsdp-kept": (1,),
    "tensor": (1,),
    "pipeline": (4,),
}

#: Dominated by the vocabulary, and by the layers.
_WIDE = {"vocab_size": 4001, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 3}
_DEEP = {"vocab_size": 300, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 6}

#: Dominated by weights, gradients and moments, with 64 tokens per process.
_LARGE = {"vocab_size": 1000, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4}


def steps(
    way: str, model: dict[str, Any], accumulation: int = 1, tied: bool = False, **efficiency: Any
) -> dict[str, Any]:
    """Return a recipe with rows of 128 tokens."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    return {
        "model": {"model_type": "llama", **model, **heads, "tie_word_embeddings": tied},
        "data": {"dir": "-", "seq_len": 128},
        "batch": {"micro_batch_size": 4, "gradient_accumulation_steps": accumulation},
        "efficiency": {
            "precision": "fp32",
            "compile": False,
            "attention": "sdpa",
            "loss_chunk_tokens": 0,
            **efficiency,
        },
        "distributed": _WAYS[way],
    }


def require_planned(cases: list[dict[str, Any]], above: float, below: float, size: int = 2) -> None:
    """Check that the plan for the process with the highest peak matches the memory of its steps."""
    results = run_ranks(_STEPS_DRIVER, [json.dumps(cases)], size, timeout=1700)
    for result in results:
        assert result.returncode == 0, result.stderr
    found = [
        [json.loads(line)["peaks"] for line in result.stdout.splitlines() if line[:1] == "{"]
        for result in results
    ]
    for number, case in enumerate(cases):
        recipe = parse_resolved_recipe(case)
        part = trace_memory(own_part(recipe, size))
        planned = of_one_rank(part, recipe, size, on_cpu=True).peak_bytes
        # Memory freed by gloo's threads is not counted, so use the minimum over some steps.
        taken = max(min(ranks[number]) for ranks in found)
        if engine_of(recipe, size).keeps_buckets:
            # The buckets, which are as large as the model, were allocated before the measurement.
            taken += 4 * parameters_of(recipe.model)
        # `pytest -s` prints the figures of docs/planning.md.
        sys.stdout.write(f"{case['distributed']}: planned {planned:,}, measured {taken:,}\n")
        assert -below < planned / taken - 1 < above, (case, planned, taken)


def parameters_of(config: Any) -> int:
    return sum(p.numel() for p in meta_model(config).parameters())


def test_plan_of_two_processes_matches_measured_steps() -> None:
    require_planned(
        [
            steps("tensor", {**_WIDE, "num_hidden_layers": 2}, tied=True),
            {
                **steps("fsdp", {**_WIDE, "num_hidden_layers": 2}),
                "optimizer": {"name": "muon", "muon_beta2": 0.95},
            },
        ],
        above=0.03,
        below=0.01,
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("way", _WAYS)
def test_plans_of_all_engines_match_measured_steps(way: str) -> None:
    more: list[dict[str, Any]] = [
        {},
        {"activation_checkpointing": "full"},
        {"precision": "bf16"},
    ]
    cases = [
        steps(way, model, accumulation, tied, **efficiency)
        for model in (_WIDE, _DEEP)
        for accumulation in _MICRO_BATCHES[way]
        for tied in ((False,) if way == "pipeline" else (False, True))
        for efficiency in more
    ]
    require_planned(cases, above=0.12, below=0.06)


def zero(
    stage: int, offload: str, model: dict[str, Any], *more: Any, **keys: Any
) -> dict[str, Any]:
    """Return a recipe of `steps` for DeepSpeed ZeRO. Stage 0, which can't be combined with a
    DeepSpeed file, is plain training: ddp with several processes.
    """
    case = steps("ddp", model, *more, **keys)
    if model is _LARGE:
        case["data"] = {"dir": "-", "seq_len": 32}
        case["batch"]["micro_batch_size"] = 2
    if stage:
        case["distributed"] = {"engine": "deepspeed", "zero_stage": stage, "offload": offload}
    return case


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not importlib.util.find_spec("deepspeed"), reason="no deepspeed")
def test_plan_of_deepspeed_one_process_matches_measured_steps() -> None:
    cases = [
        zero(2, "cpu", _WIDE),
        zero(1, "none", _WIDE, 3, precision="bf16"),
        zero(2, "none", _LARGE),
        zero(3, "none", _LARGE),
    ]
    require_planned(cases, above=0.05, below=0.05, size=1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not importlib.util.find_spec("deepspeed"), reason="no deepspeed")
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("model", [_WIDE, _DEEP, _LARGE], ids=["wide", "deep", "large"])
def test_plans_of_all_zero_stages_match_measured_steps(
    size: int, precision: str, model: dict[str, Any]
) -> None:
    cases = [
        zero(stage, offload, model, accumulation, precision=precision)
        for accumulation in (1, 3)
        for stage in (0, 1, 2, 3)
        for offload in (("none", "cpu") if stage else ("none",))
    ]
    # ZeRO stage 3 in bf16 takes up to 6.6% less than planned for many narrow layers.
    require_planned(cases, above=0.07, below=0.05, size=size)

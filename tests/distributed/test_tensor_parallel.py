"""Tensor parallelism: processes that compute each layer of a Llama together give the same
gradients, losses, texts and checkpoints as one process.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_recipe import plain_recipe
from spawned import run_ranks

from firstlight.errors import ConfigError
from firstlight.hardware.device import find_hardware
from firstlight.parallel import World
from firstlight.parallel.engine import DistributedConfig, Engine
from firstlight.parallel.engine_choice import make_engine
from firstlight.recipe.conflicts import require_combination

pytestmark = pytest.mark.usefixtures("forked_processes")

_DRIVER = Path(__file__).with_name("gradient_driver.py")

_FAMILIES = ["grouped", "grouped-tied", "biases", "qwen2", "qwen3", "mistral", "granite"]
_FAMILIES += ["smollm3", "arcee", "gemma3_text", "stablelm", "stablelm-parallel", "gpt_neox"]
_FAMILIES += ["nanochat", "ministral3"]


def _case(family: str, distributed: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "distributed": {"tensor_parallel": 2, **distributed},
        "micro": 2,
        "accumulation": 1,
        "masks": "unequal",
        "family": family,
        "dtype": "float64",
        **more,
    }


def _require_equal(cases: list[dict[str, Any]], size: int) -> None:
    for result in run_ranks(_DRIVER, [json.dumps(cases)], size, timeout=400):
        assert result.returncode == 0, result.stderr
        lines = [json.loads(line) for line in result.stdout.splitlines() if line[:1] == "{"]
        assert len(lines) == len(cases)
        for line in lines:
            bound = 1e-12 if line["dtype"] == "float64" else 1e-5
            for name in ("difference", "loss", "norm"):
                assert line[name] < bound, line


def test_tensor_parallel_two_processes_match_gradient_of_one() -> None:
    cases = [_case(family, {}) for family in _FAMILIES]
    cases[0] |= {"micro": 1, "accumulation": 3, "masks": "partial"}
    cases[1] |= {"efficiency": {"vocab_multiple": 64}}
    cases[2] |= {"dtype": "float32", "efficiency": {"activation_checkpointing": "selective"}}
    # Tolerance of bf16 with larger heads on CPUs.
    cases[3] |= {"efficiency": {"attention": "blockwise"}}
    cases.append(_case("gemma2", {}, efficiency={"attention": "plain"}))
    _require_equal(cases, 2)


@pytest.mark.slow
def test_tensor_parallel_any_batch_split_matches_gradient_of_one_process() -> None:
    cases = [
        _case(family, {}, micro=micro, accumulation=steps, masks=masks, dtype=dtype)
        for family in _FAMILIES
        for micro, steps, masks, dtype in (
            (1, 3, "partial", "float64"),
            (2, 2, "unequal", "float32"),
        )
    ]
    methods: list[dict[str, Any]] = [
        {"activation_checkpointing": "full"},
        {"activation_checkpointing": "selective"},
        {"vocab_multiple": 64},
    ]
    cases += [_case("qwen3", {}, dtype="float32", efficiency=method) for method in methods]
    _require_equal(cases, 2)


@pytest.mark.slow
def test_tensor_parallel_groups_of_two_match_gradient_of_one_process() -> None:
    ways: list[dict[str, Any]] = [
        {"engine": "fsdp"},
        {"engine": "fsdp", "reshard_after_forward": False},
        {"engine": "fsdp", "offload": "cpu"},
        {"engine": "auto"},
    ]
    cases = [
        _case(family, ways[number % len(ways)], micro=micro, accumulation=steps, masks=masks)
        for number, (family, (micro, steps), masks) in enumerate(
            (family, cut, masks)
            for family in _FAMILIES
            for cut in ((1, 3), (2, 1))
            for masks in ("unequal", "partial")
        )
    ]
    cases += [
        _case("qwen3", {"engine": "fsdp"}, dtype="float32", efficiency=method)
        for method in ({"activation_checkpointing": "selective"}, {"vocab_multiple": 64})
    ]
    _require_equal(cases, 4)


@pytest.mark.slow
def test_tensor_parallel_four_processes_compute_each_layer_together() -> None:
    _require_equal([_case("llama-4", {"tensor_parallel": 4})], 4)


@pytest.mark.slow
def test_tensor_parallel_groups_hold_copies_of_model() -> None:
    ways = {"engine": "fsdp", "shard": 2}
    _require_equal([_case(family, ways, accumulation=2) for family in _FAMILIES], 8)


def _engine(processes: int, **config: Any) -> Engine:
    world = World(processes - 1, processes, processes - 1, processes)
    return make_engine(DistributedConfig(**config), world, torch.device("cpu"))


def test_tensor_parallel_group_members_read_same_rows() -> None:
    engine = _engine(6, tensor_parallel=2)
    assert (engine.name, engine.rank, engine.size, engine.group_rank) == ("fsdp", 2, 3, 1)
    assert _engine(2, tensor_parallel=2).name == "none"


@pytest.mark.parametrize(
    ("processes", "config", "said"),
    [
        (3, {"tensor_parallel": 2}, "tensor_parallel is 2, but this run has 3 processes"),
        (1, {"tensor_parallel": 2}, "start it with --nproc 2"),
        (4, {"tensor_parallel": 2, "engine": "ddp"}, "set distributed.engine to fsdp"),
        (4, {"tensor_parallel": 2, "engine": "none"}, "there are 2.*set it to fsdp"),
        (
            2,
            {"tensor_parallel": 2, "engine": "fsdp"},
            "form only one group: .* --nproc 4 or another multiple",
        ),
        (6, {"tensor_parallel": 2, "shard": 2}, "does not divide the 3 groups evenly"),
    ],
)
def test_tensor_parallel_impossible_groups_raise_config_error(
    processes: int, config: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        _engine(processes, **config)


@pytest.mark.parametrize(
    ("section", "values", "said"),
    [
        (
            "model",
            {"model_type": "gpt2"},
            "arcee, gemma2, gemma3_text, stablelm, gpt_neox and nanochat, but the model is gpt2",
        ),
        ("model", {"model_type": "mixtral"}, "the model is mixtral: .* distributed.engine to fsdp"),
        (
            "model",
            {"model_type": "deepseek_v3", "num_key_value_heads": 0},
            "the model is deepseek_v3: .* distributed.engine to fsdp",
        ),
        ("model", {"model_type": "gpt_oss"}, "the model is gpt_oss: .* distributed.engine to fsdp"),
        (
            "model",
            {"model_type": "qwen3_next"},
            "model is qwen3_next: .* distributed.engine to fsdp",
        ),
        ("model", {"model_type": "phi3"}, "support phi3 models, where one matrix holds queries"),
        (
            "model",
            {"model_type": "stablelm", "qk_layernorm": True},
            "not support stablelm models, where each head of queries and keys has a separate",
        ),
        ("model", {"model_type": "olmo2"}, "support olmo2 models, where queries and keys are"),
        ("model", {"num_key_value_heads": 2}, "num_key_value_heads 2 .*: set tensor_parallel to 2"),
        ("model", {"intermediate_size": 54}, "intermediate_size 54 .*: set tensor_parallel to 3"),
        ("efficiency", {"precision": "bf16_params"}, "precision bf16_params: use bf16"),
        (
            "efficiency",
            {"loss_chunk_tokens": 8},
            "support efficiency.loss_chunk_tokens: set it to 0",
        ),
        ("efficiency", {"optimizer_in_backward": True}, "optimizer_in_backward: set it to false"),
        ("efficiency", {"compile": True}, "support efficiency.compile: set it to false"),
        (
            "efficiency",
            {"activation_offload": True},
            "use efficiency.activation_checkpointing full",
        ),
        (
            "optimizer",
            {"name": "adafactor"},
            "optimizer.name adafactor: use adamw, lion, muon or sgd",
        ),
        ("lora", {}, "distributed.tensor_parallel does not support lora: remove one"),
    ],
)
def test_tensor_parallel_unsupported_layers_raise_config_error(
    section: str, values: dict[str, Any], said: str
) -> None:
    recipe: dict[str, Any] = {
        "data": {"dir": "none", "seq_len": 8},
        "batch": {"micro_batch_size": 1},
        "optimizer": {"max_grad_norm": 0.0},
        "efficiency": {"precision": "fp32", "compile": False, "loss_chunk_tokens": 0},
        "model": {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64},
    }
    recipe[section] = {**recipe.get(section, {}), **values}
    if values.get("model_type") == "gpt2":
        recipe["model"] = values
    with pytest.raises(ConfigError, match=said):
        require_combination(plain_recipe(recipe), find_hardware("cpu"), tensor_parallel=4)

"""With pipeline parallelism, processes with some of a Llama's layers each compute the gradients of
one process, and store only their part.
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
from firstlight.models import (
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MoEConfig,
    Qwen3NextConfig,
    empty_model,
)
from firstlight.parallel import World
from firstlight.parallel.engine import DistributedConfig, Engine
from firstlight.parallel.engine_choice import make_engine
from firstlight.recipe.conflicts import require_combination

pytestmark = pytest.mark.usefixtures("forked_processes")

_DRIVER = Path(__file__).with_name("gradient_driver.py")


def _case(family: str, stages: int, **more: Any) -> dict[str, Any]:
    return {
        "distributed": {"pipeline": stages},
        "micro": 2,
        "accumulation": 3,
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


def test_pipeline_two_stages_match_gradient_of_one_process() -> None:
    methods = {"activation_checkpointing": "selective", "vocab_multiple": 64}
    cases = [
        _case("grouped", 2),
        _case("qwen3", 2, micro=1, accumulation=4, masks="partial"),
        # Fewer micro-batches than stages, which requires another schedule.
        _case("mistral", 2, accumulation=1),
        _case("biases", 2, dtype="float32", efficiency=methods),
        *(_case(family, 2) for family in ("smollm3", "phi3", "olmo3", "arcee", "glm4")),
        _case("gemma3_text", 2),
        *(_case(family, 2) for family in ("stablelm", "gpt_neox", "nanochat", "ministral3")),
        _case("gemma2", 2, efficiency={"attention": "blockwise"}),
    ]
    _require_equal(cases, 2)


@pytest.mark.slow
def test_pipeline_four_stages_match_gradient_of_one_process() -> None:
    cases = [
        _case("deep", 4, micro=micro, accumulation=steps, masks=masks)
        for micro, steps in ((2, 1), (1, 3), (2, 4), (1, 7))
        for masks in ("unequal", "partial")
    ]
    _require_equal(cases, 4)


def _engine(rank: int, processes: int, **config: Any) -> Engine:
    world = World(rank, processes, rank, processes)
    return make_engine(DistributedConfig(**config), world, torch.device("cpu"))


_SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 5,
}


def test_pipeline_stages_start_with_values_of_whole_model() -> None:
    config = LlamaConfig(**_SIZES, intermediate_size=32)
    whole = empty_model(config, 64)
    whole.init_weights(torch.Generator().manual_seed(3))
    expected = whole.state_dict()
    found: dict[str, torch.Tensor] = {}
    for rank in range(3):
        engine = _engine(rank, 3, pipeline=3)
        model = engine.new_model(config, 64, generator=torch.Generator().manual_seed(3))
        state = model.state_dict()
        assert engine.absent_parameters(model) == expected.keys() - state.keys()
        assert not found.keys() & state.keys()
        # No stage has more than two layers, and no tensor shares memory with parameters of other
        # stages.
        assert len({name.split(".")[2] for name in state if ".layers." in name}) in (1, 2)
        for tensor in state.values():
            assert tensor.untyped_storage().nbytes() == tensor.nbytes
        found |= state
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize(
    ("processes", "config", "said"),
    [
        (4, {"pipeline": 2}, "pipeline is 2, but this run has 4 processes: start .* --nproc 2"),
        (1, {"pipeline": 2}, "start it with --nproc 2"),
        (2, {"pipeline": 2, "engine": "fsdp"}, "be combined with distributed.engine fsdp"),
        (4, {"pipeline": 2, "tensor_parallel": 2}, "with distributed.tensor_parallel 2"),
        (2, {"pipeline": 2, "shard": 2}, "distributed.shard 2 requires .* remove shard"),
        (
            2,
            {"pipeline": 2, "offload": "cpu"},
            "distributed.offload cpu requires .* remove offload",
        ),
    ],
)
def test_pipeline_impossible_stages_raise_config_error(
    processes: int, config: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        _engine(0, processes, **config)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            GPT2Config(**_SIZES),
            "supports llama, .*stablelm, gpt_neox and nanochat, but the model is gpt2",
        ),
        (MoEConfig(**_SIZES, model_type="mixtral"), "the model is mixtral"),
        (GptOssConfig(**_SIZES), "the model is gpt_oss: .* distributed.engine to fsdp"),
        (
            Qwen3NextConfig(**_SIZES, head_dim=8),
            "the model is qwen3_next: .* distributed.engine to fsdp",
        ),
        (
            LlamaConfig(**{**_SIZES, "num_hidden_layers": 1}),
            "is greater than model.num_hidden_layers",
        ),
        (LlamaConfig(**_SIZES, tie_word_embeddings=True), "tie_word_embeddings to false"),
    ],
)
def test_pipeline_unsupported_models_raise_config_error(config: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        _engine(0, 2, pipeline=2).new_model(config, 1)


@pytest.mark.parametrize(
    ("section", "values", "said"),
    [
        ("efficiency", {"precision": "bf16_params"}, "precision bf16_params: use bf16"),
        (
            "efficiency",
            {"loss_chunk_tokens": 8},
            "support efficiency.loss_chunk_tokens: set it to 0",
        ),
        (
            "efficiency",
            {"precision": "bf16", "bf16_residual": True},
            "pipeline does not support efficiency.bf16_residual: set it to false",
        ),
        ("efficiency", {"optimizer_in_backward": True}, "optimizer_in_backward: set it to false"),
        ("efficiency", {"compile": True}, "support efficiency.compile: set it to false"),
        (
            "optimizer",
            {"name": "adafactor"},
            "optimizer.name adafactor: use adamw, lion, muon or sgd",
        ),
        ("lora", {}, "distributed.pipeline does not support lora: remove one"),
        ("checkpoint", {"sharded": True}, "checkpoint.sharded .* disable it"),
    ],
)
def test_pipeline_unsupported_features_raise_config_error(
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
    with pytest.raises(ConfigError, match=said):
        require_combination(plain_recipe(recipe), find_hardware("cpu"), pipeline=2)

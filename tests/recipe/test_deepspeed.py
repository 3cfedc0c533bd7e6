"""A user's DeepSpeed configuration file used with a recipe."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from firstlight.errors import ConfigError
from firstlight.parallel.deepspeed_file import read_deepspeed_file
from firstlight.recipe import Recipe, parse_recipe
from firstlight.recipe.load import with_deepspeed_file

_FILE: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 0.7,
    "optimizer": {
        "type": "Adam",
        "params": {"lr": 3e-4, "betas": [0.9, 0.99], "weight_decay": 0, "torch_adam": True},
    },
    "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16},
    "bf16": {"enabled": False},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": False},
        "offload_param": {"device": "cpu"},
        "reduce_bucket_size": 5000,
        "overlap_comm": "auto",
    },
    "steps_per_print": 10,
}


def _taken(folder: Path, values: Any, processes: int = 2, **sections: Any) -> Recipe:
    path = folder / "zero.json"
    path.write_text(json.dumps(values), encoding="utf-8")
    distributed = {"deepspeed_config": str(path), **sections.pop("distributed", {})}
    recipe = {"data": {"dir": "-", "seq_len": 8}, "distributed": distributed, **sections}
    return with_deepspeed_file(parse_recipe(recipe), processes)


def test_deepspeed_file_fills_keys_left_open_by_recipe(tmp_path: Path) -> None:
    recipe = _taken(tmp_path, _FILE, optimizer={"eps": 1e-6})
    assert (recipe.batch.micro_batch_size, recipe.batch.gradient_accumulation_steps) == (2, 4)
    optimizer = recipe.optimizer
    assert (optimizer.name, optimizer.learning_rate, optimizer.betas) == (
        "adamw",
        3e-4,
        [0.9, 0.99],
    )
    assert (optimizer.weight_decay, optimizer.max_grad_norm, optimizer.eps) == (0, 0.7, 1e-6)
    assert recipe.efficiency.precision == "fp16"
    sharing = recipe.distributed
    assert (sharing.engine, sharing.zero_stage, sharing.offload) == ("deepspeed", 3, "cpu")
    handed_on = read_deepspeed_file(tmp_path / "zero.json").handed_on
    assert handed_on == {
        "zero_optimization": {
            "reduce_bucket_size": 5000,
            "offload_optimizer": {"pin_memory": False},
        }
    }
    # As in a resumed run, whose recipe contains every key.
    resumed = parse_recipe(recipe.model_dump(mode="json"))
    assert with_deepspeed_file(resumed, 2) == resumed


@pytest.mark.parametrize(
    ("batch", "processes", "expected"),
    [
        ({"micro_batch_size": 2}, 2, (2, 3, None)),
        ({"micro_batch_size": 2, "gradient_accumulation_steps": 6}, 1, (2, 6, None)),
        ({}, 2, (None, None, 96)),
        ({"global_batch_tokens": 96}, 2, (None, None, 96)),
    ],
)
def test_deepspeed_file_global_batch_determines_accumulation(
    tmp_path: Path, batch: dict[str, Any], processes: int, expected: tuple[int | None, ...]
) -> None:
    found = _taken(tmp_path, {"train_batch_size": 12}, processes, batch=batch).batch
    assert expected == (
        found.micro_batch_size,
        found.gradient_accumulation_steps,
        found.global_batch_tokens,
    )


@pytest.mark.parametrize(
    ("values", "sections", "problem"),
    [
        (
            {"zero_optimization": {"stage": 3}},
            {"distributed": {"zero_stage": 2}},
            "stage 3 and dist",
        ),
        ({"gradient_clipping": 1.5}, {"optimizer": {"max_grad_norm": 1.0}}, "max_grad_norm 1.0"),
        ({"bf16": {"enabled": True}}, {"efficiency": {"precision": "fp16"}}, "bf16.enabled bf16"),
        ({}, {"distributed": {"engine": "fsdp"}}, "the engine is fsdp"),
        (
            {"gradient_accumulation_steps": 2},
            {"batch": {"global_batch_tokens": 64}},
            "gradient_accumulation_steps and batch.global_batch_tokens",
        ),
        ({"train_batch_size": 12}, {"batch": {"micro_batch_size": 5}}, "is not 5 rows per micro"),
        (
            {"train_batch_size": 12},
            {"batch": {"global_batch_tokens": 64}},
            "contradicts batch.glob",
        ),
        ({"train_batch_size": 0}, {}, "train_batch_size is 0"),
        ({"gradient_clipping": -1}, {}, "optimizer.max_grad_norm"),
        ({"optimizer": {"type": "Lamb"}}, {}, "optimizer.type is Lamb"),
        ({"scheduler": {"type": "WarmupLR"}}, {}, "scheduler.type is not supported: remove it"),
        ({"zero_optimisation": {"stage": 1}}, {}, "(did you mean 'zero_optimization.stage'?)"),
        ({"zero_optimization": {"stage": 0}}, {}, "which corresponds to distributed.engine ddp"),
        ({"zero_optimization": {"offload_param": {"device": "cpu"}}}, {}, "which needs"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, {}, "are both true"),
        ({"fp16": {"enabled": True, "loss_scale": 128}}, {}, "fp16.loss_scale is 128"),
        ([1], {}, "is not a JSON object"),
    ],
)
def test_deepspeed_file_contradictions_and_unsupported_keys_are_named(
    tmp_path: Path, values: Any, sections: dict[str, dict[str, Any]], problem: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)) as caught:
        _taken(tmp_path, values, 2, **sections)
    assert "zero.json" in str(caught.value)


def test_deepspeed_file_missing_is_named(tmp_path: Path) -> None:
    recipe = {
        "data": {"dir": "-"},
        "distributed": {"deepspeed_config": str(tmp_path / "none.json")},
    }
    with pytest.raises(ConfigError, match=r"none\.json does not exist"):
        with_deepspeed_file(parse_recipe(recipe), 1)

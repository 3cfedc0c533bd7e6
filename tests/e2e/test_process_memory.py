"""The memory of a run's process on a CPU, predicted at its start, beside what it took."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from firstlight.run_log.names import FORECAST_NAME

pytestmark = pytest.mark.slow


def _llama(hidden: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": 2048,
        **more,
    }


def _gpt2(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    return _llama(hidden, layers, heads) | {"model_type": "gpt2", "max_position_embeddings": 512}


#: (model, tokens a sequence, sequences a micro-batch, precision, what else a recipe says).
_CONFIGURATIONS: dict[str, tuple[dict[str, Any], int, int, str, dict[str, Any]]] = {
    "llama 64, 2 x 64": (_llama(64, 2, 2), 64, 2, "fp32", {}),
    "llama 64, 2 x 64, bf16": (_llama(64, 2, 2), 64, 2, "bf16", {}),
    "llama 256, 8 x 256": (_llama(256, 4, 4), 256, 8, "fp32", {}),
    "llama 256, 8 x 256, bf16": (_llama(256, 4, 4), 256, 8, "bf16", {}),
    "gpt2 384, 4 x 256": (_gpt2(384, 6, 6), 256, 4, "fp32", {}),
    "gpt2 384, 16 x 256, bf16": (_gpt2(384, 6, 6), 256, 16, "bf16", {}),
    "llama 512, 4 x 512, bf16, checkpointing": (
        _llama(512, 8, 8),
        512,
        4,
        "bf16",
        {"efficiency": {"activation_checkpointing": "full"}},
    ),
    "llama 512, 4 x 512": (_llama(512, 6, 8), 512, 4, "fp32", {}),
    "mistral 256, 2 x 2,000": (
        _llama(256, 4, 4, num_key_value_heads=2) | {"model_type": "mistral"},
        2000,
        2,
        "fp32",
        {},
    ),
    "llama 256, 16 x 256, Muon, chunked loss": (
        _llama(256, 4, 4),
        256,
        16,
        "fp32",
        {"efficiency": {"loss_chunk_tokens": 512}, "optimizer": {"name": "muon"}},
    ),
    "llama 640, 1 x 256, bf16, saves": (
        _llama(640, 10, 10),
        256,
        1,
        "bf16",
        {"checkpoint": {"every_steps": 2}},
    ),
    "gpt2 512, 2 x 4 x 256, bf16 weights, 8 bits": (
        _gpt2(512, 6, 8),
        256,
        4,
        "bf16_params",
        {"optimizer": {"name": "adamw8bit"}, "batch": {"gradient_accumulation_steps": 2}},
    ),
}


@pytest.mark.parametrize("name", _CONFIGURATIONS)
def test_process_memory_is_predicted_within_15_percent(
    name: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, seq_len, rows, precision, more = _CONFIGURATIONS[name]
    recipe: dict[str, Any] = {
        "run": {"dir": str(tmp_path / "run"), "device": "cpu"},
        "data": {"dir": str(data), "seq_len": seq_len},
        "model": model,
        "batch": {"micro_batch_size": rows},
        "schedule": {"max_steps": 3, "warmup_steps": 1},
        "evaluation": {"every_steps": 2, "max_rows": rows, "sample_tokens": 8, "on_start": False},
        "efficiency": {"precision": precision, "attention": "sdpa", "compile": False},
        "checkpoint": {"every_steps": 0},
    }
    for section, values in more.items():
        recipe[section] = recipe.get(section, {}) | values
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "firstlight", "train", str(path)], capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "run" / FORECAST_NAME).read_text(encoding="utf-8"))
    predicted, measured = (found[key]["process_bytes"] for key in ("predicted", "measured"))
    with capsys.disabled():
        tensors = found["predicted"]["peak_bytes"] / 2**20
        allocated = (found["measured"]["allocated_bytes"] or 0) / 2**20
        sys.stdout.write(
            f"\n| {name} | {tensors:,.0f} | {allocated:,.0f} | {predicted / 2**20:,.0f} "
            f"| {measured / 2**20:,.0f} | {predicted / measured - 1:+.1%} |\n"
        )
    assert predicted == pytest.approx(measured, rel=0.15)

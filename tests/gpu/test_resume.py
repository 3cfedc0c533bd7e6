"""A killed and resumed run is bit-identical to an uninterrupted run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from firstlight.checkpoint.checkpoint import verify_checkpoint
from firstlight.checkpoint.selection import list_checkpoints
from firstlight.run_log.reader import read_json_lines

_DRIVER = Path(__file__).parents[1] / "distributed" / "train_driver.py"
_STEPS = 12
#: Metrics that do not depend on the computation alone.
_OUTCOMES = ("step", "train/loss", "grad_norm", "val/loss", "tokens_seen", "loss_scale", "skipped")

_GPT2 = {
    "model_type": "gpt2",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "embd_pdrop": 0.1,
    "attn_pdrop": 0.1,
    "resid_pdrop": 0.1,
}
_LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
_EXPERTS = {**_LLAMA, "model_type": "mixtral", "num_experts": 4, "intermediate_size": 96}
_ON_GPU = pytest.mark.cuda_only("compiling takes a minute on a CPU")
_WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dropout": (_GPT2, {"precision": "bf16", "loss_chunk_tokens": 64}),
    "fp16": (_LLAMA, {"precision": "fp16"}),
    "experts": (_EXPERTS, {"precision": "bf16_params", "activation_checkpointing": "full"}),
    "compiled": (_LLAMA, {"precision": "bf16", "compile": True}),
    "graphs": (_GPT2, {"precision": "bf16", "compile": True, "compile_mode": "reduce-overhead"}),
}


def recipe_of(way: str, run: Path, data: Path, device: str) -> dict[str, Any]:
    model, efficiency = _WAYS[way]
    return {
        "run": {"dir": str(run), "device": device, "deterministic": True},
        "model": model,
        "data": {"dir": str(data), "seq_len": 64, "verify": False},
        "batch": {"micro_batch_size": 4, "gradient_accumulation_steps": 2},
        "schedule": {"max_steps": _STEPS, "warmup_steps": 2},
        "optimizer": {"learning_rate": 1e-2},
        "evaluation": {"every_steps": 5, "max_rows": 4, "sample_tokens": 4, "on_start": False},
        "checkpoint": {"every_steps": 3, "keep_last": 2, "asynchronous": True},
        "efficiency": {"compile": False, "loss_chunk_tokens": 0, **efficiency},
    }


def start(request: dict[str, Any]) -> subprocess.Popen[str]:
    """Train in a separate process, which shares nothing with the test on the GPU."""
    return subprocess.Popen(
        [sys.executable, str(_DRIVER), json.dumps(request)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def outcome(run: Path) -> dict[str, Any]:
    last = list_checkpoints(run)[-1]
    verify_checkpoint(last)
    files = ("model.safetensors", "optimizer.safetensors")
    return {
        "step": last.name,
        "metrics": [
            {name: record.get(name) for name in _OUTCOMES}
            for record in read_json_lines(run / "metrics.jsonl")
        ],
        "samples": (run / "samples.jsonl").read_bytes(),
        **{name: (last / name).read_bytes() for name in files},
    }


@pytest.mark.parametrize(
    "way, step",
    [
        ("dropout", 8),  # between two checkpoints
        ("experts", 7),  # right after one, which may still be incomplete
        pytest.param("fp16", 7, marks=pytest.mark.cuda_only("a CPU takes long for fp16")),
        pytest.param("compiled", 8, marks=_ON_GPU),
        pytest.param("graphs", 8, marks=_ON_GPU),
    ],
)
def test_run_killed_and_resumed_on_device_is_bitwise_equal(
    way: str, step: int, tmp_path: Path, data: Path, device: Any
) -> None:
    """Weights, moments, random states, metrics and samples; each run in a separate process."""
    name = "cpu" if device.type == "cpu" else "cuda"
    recipes = {run: recipe_of(way, tmp_path / run, data, name) for run in ("whole", "broken")}
    dies = {"rank": 0, "step": step, "how": "SIGKILL"}
    whole = start({"recipe": recipes["whole"]})
    killed = start({"recipe": recipes["broken"], "dies": dies})
    _, said = killed.communicate(timeout=300)
    assert killed.returncode == -signal.SIGKILL, said
    before = [r["step"] for r in read_json_lines(tmp_path / "broken" / "metrics.jsonl")]
    assert before == list(range(1, step))
    # Each save waits until the previous one is complete.
    assert list_checkpoints(tmp_path / "broken")
    resumed = start({"recipe": recipes["broken"], "resume": True})
    for process in (whole, resumed):
        _, said = process.communicate(timeout=300)
        assert process.returncode == 0, said
    expected, found = outcome(tmp_path / "whole"), outcome(tmp_path / "broken")
    assert len(expected["metrics"]) == _STEPS
    assert [key for key in expected if found[key] != expected[key]] == []


@pytest.mark.cuda_only("a CPU has no cuBLAS")
def test_deterministic_run_with_conflicting_environment_fails(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    process = start({"recipe": recipe_of("dropout", tmp_path / "run", data, "cuda")})
    _, said = process.communicate(timeout=300)
    assert process.returncode != 0
    assert "run.deterministic needs CUBLAS_WORKSPACE_CONFIG to be :4096:8 or :16:8" in said

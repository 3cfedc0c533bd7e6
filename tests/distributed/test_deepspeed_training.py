"""Runs with distributed.engine deepspeed: the same losses and checkpoints as with other engines,
and each resumes from the other's checkpoints.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from spawned import free_port, run_ranks

from firstlight.data.prepare import prepare
from firstlight.tokenizer import Tokenizer

# The processes started by the tests import it.
pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("deepspeed"), reason="no deepspeed"),
    pytest.mark.usefixtures("forked_processes"),
]

_DRIVER = Path(__file__).with_name("trains_driver.py")


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    text = "the cat sees a dog and runs home under old trees . " * 300
    (folder / "text.txt").write_text(text, encoding="utf-8")
    prepare([folder / "text.txt"], tokenizer, folder / "out", workers=1)
    return folder / "out"


def _recipe(shards: Path, run: Path, **distributed: Any) -> dict[str, Any]:
    return {
        "run": {"dir": str(run), "device": "cpu"},
        "model": {
            "model_type": "llama",
            "hidden_size": 16,
            "intermediate_size": 36,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "max_position_embeddings": 16,
        },
        "data": {"dir": str(shards), "seq_len": 16},
        "batch": {"micro_batch_size": 1, "global_batch_tokens": 128},
        "schedule": {"max_steps": 6},
        "evaluation": {"every_steps": 3, "max_rows": 7, "sample_tokens": 4, "on_start": False},
        "checkpoint": {"every_steps": 3, "keep_last": 10},
        "efficiency": {"precision": "fp32"},
        "distributed": distributed,
    }


def _train(requests: list[dict[str, Any]], size: int) -> list[list[dict[str, Any]]]:
    """Run trainings and return the metrics of each."""
    requests = [{**request, "port": free_port()} for request in requests]
    results = run_ranks(_DRIVER, [json.dumps(requests)], size)
    for rank, result in enumerate(results):
        assert result.returncode == 0, f"rank {rank}: {result.stderr}"
    runs: list[list[dict[str, Any]]] = [[]]
    for line in results[0].stdout.splitlines():
        record = json.loads(line)  # nothing else is printed to stdout
        if "end" in record:
            runs.append([])
        else:
            runs[-1].append(record)
    return runs[:-1]


def _first_half(run: Path, copy: Path) -> Path:
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "checkpoints" / "step-00000006")
    return copy


def _whole(folder: Path) -> dict[str, torch.Tensor]:
    names = ("model.safetensors", "optimizer.safetensors")
    return {
        f"{name} {key}": tensor
        for name in names
        for key, tensor in safetensors.torch.load_file(folder / name).items()
        # They are new for a rank that did not exist before.
        if not key.startswith("rng.rank")
    }


def _require_loaded(run: Path, captured: Path) -> None:
    expected, found = _whole(run / "checkpoints" / "step-00000003"), _whole(captured)
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def _require_close(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> None:
    assert [line["step"] for line in one] == [line["step"] for line in other]
    for expected, found in zip(one, other, strict=True):
        for name in ("train/loss", "grad_norm", "val/loss"):
            assert (name in expected) == (name in found)
            if name in expected:
                assert found[name] == pytest.approx(expected[name], rel=1e-5), name
        assert found["tokens_seen"] == expected["tokens_seen"]


_ZERO: dict[str, Any] = {"engine": "deepspeed", "zero_stage": 3}

#: How the runs start and, after "-", how each is resumed.
_STARTS: dict[str, dict[str, Any]] = {
    "ddp": {"engine": "ddp"},
    "three": _ZERO,
    "one": {"engine": "deepspeed", "zero_stage": 1},
}
_WAYS: dict[str, dict[str, Any]] = {
    "three-ddp": {"engine": "ddp"},
    "ddp-three": {**_ZERO, "offload": "cpu"},
    "one-two": {"engine": "deepspeed", "offload": "cpu"},
    "three-three": _ZERO,
    "three-none": {},
    "three-alone": {"engine": "deepspeed", "offload": "cpu"},
}


def _require_elastic(tmp_path: Path, shards: Path, starts: list[str], ways: list[str]) -> None:
    """Check that each run resumes with exactly the saved state and has the losses of an
    uninterrupted run.
    """
    requests: list[dict[str, Any]] = [
        {"recipe": _recipe(shards, tmp_path / name, **_STARTS[name])} for name in starts
    ]
    runs = dict(zip(starts, _train(requests, 2), strict=True))
    expected = runs[starts[0]]
    for lines in runs.values():
        _require_close(expected, lines)
    requests = []
    for name in ways:
        run = _first_half(tmp_path / name.split("-")[0], tmp_path / name)
        captured = str(tmp_path / f"captured-{name}")
        recipe = _recipe(shards, run, **_WAYS[name])
        requests.append({"recipe": recipe, "resume": True, "captured": captured})
    together = [n for n, way in enumerate(ways) if not way.endswith(("none", "alone"))]
    found = dict(zip(together, _train([requests[n] for n in together], 2), strict=True))
    for number, name in enumerate(ways):
        if number not in found:
            (found[number],) = _train([requests[number]], 1)
        _require_loaded(tmp_path / name, tmp_path / f"captured-{name}")
        _require_close(expected[3:], found[number])
        if name == "three-three":
            losses = [[x["train/loss"] for x in run] for run in (found[number], runs["three"][3:])]
            assert losses[0] == losses[1]


@pytest.mark.slow
def test_deepspeed_and_ddp_runs_resume_from_each_other(tmp_path: Path, shards: Path) -> None:
    _require_elastic(tmp_path, shards, ["ddp", "three"], ["three-ddp", "ddp-three"])


@pytest.mark.slow
def test_deepspeed_runs_resume_across_all_engines(tmp_path: Path, shards: Path) -> None:
    _require_elastic(tmp_path, shards, list(_STARTS), list(_WAYS))

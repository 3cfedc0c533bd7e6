"""The processes of a run on conversations prepare the data once, and train the same model as a
single process.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from spawned import run_ranks

from firstlight.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("forked_processes")

_DRIVER = Path(__file__).with_name("train_driver.py")
_TEMPLATE = (
    "{%- for m in messages -%}{{- m.role ~ ': ' ~ m.content ~ eos_token -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- 'assistant: ' -}}{%- endif -%}"
)


def train(recipe: dict[str, Any], processes: int, **options: Any) -> list[dict[str, Any]]:
    """Return the metrics of all steps."""
    results = run_ranks(_DRIVER, [json.dumps({"recipe": recipe, **options})], processes)
    for rank, result in enumerate(results):
        assert result.returncode == 0, f"rank {rank}: {result.stderr}"
    lines = [json.loads(line) for line in results[0].stdout.splitlines() if line[:1] == "{"]
    return lines[:-1]


def write_lines(path: Path, records: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture
def conversations(tmp_path: Path, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return a recipe."""
    tokenizer.extended([], _TEMPLATE).save_pretrained(tmp_path / "tok")
    records = [
        {"instruction": f"the light {n}", "output": " ".join(["dawn", "star"] * (n % 5 + 1))}
        for n in range(60)
    ]
    write_lines(tmp_path / "a.jsonl", records)
    return {
        "model": {
            "model_type": "llama",
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "max_position_embeddings": 64,
        },
        "data": {
            "kind": "chat",
            "files": str(tmp_path / "a.jsonl"),
            "tokenizer": str(tmp_path / "tok"),
        },
        "batch": {"micro_batch_size": 1, "global_batch_tokens": 256},
        "schedule": {"max_steps": 8},
        "evaluation": {"every_steps": 4, "on_start": False, "sample_prompts": ["the light 3"]},
        "efficiency": {"precision": "fp32", "compile": False},
    }


@pytest.mark.slow
def test_conversation_losses_of_two_processes_equal_those_of_one(
    tmp_path: Path, conversations: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for name, processes in (("none", 1), ("ddp", 2), ("fsdp", 2)):
        # Every run prepares the conversations, with all of its processes starting at the same time.
        monkeypatch.setenv("FIRSTLIGHT_CACHE", str(tmp_path / f"cache-{name}"))
        found.append(train({**conversations, **way(tmp_path, name)}, processes))
        assert len([p for p in (tmp_path / f"cache-{name}" / "chat").iterdir() if p.is_dir()]) == 1
    require_same(found)


@pytest.mark.slow
def test_preference_losses_of_two_processes_equal_those_of_one(
    tmp_path: Path, conversations: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FIRSTLIGHT_CACHE", str(tmp_path / "cache"))
    train({**conversations, **way(tmp_path, "base")}, 1)
    records = [
        {
            "prompt": f"the light {n}",
            "chosen": " ".join(["dawn"] * (n % 4 + 1)),
            "rejected": " ".join(["star"] * (n % 3 + 1)),
        }
        for n in range(50)
    ]
    data = {"kind": "preference", "files": str(write_lines(tmp_path / "pairs.jsonl", records))}
    recipe = {**conversations, "data": data}
    del recipe["model"]
    found = []
    for name, processes in (("none", 1), ("ddp", 2), ("fsdp", 2)):
        # This includes the reference's log-probabilities.
        monkeypatch.setenv("FIRSTLIGHT_CACHE", str(tmp_path / f"cache-{name}"))
        run = {**recipe, **way(tmp_path, name)}
        found.append(train(run, processes, init_from=str(tmp_path / "base")))
    assert found[0][0]["train/loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert found[0][-1]["train/loss"] < 0.69
    require_same(found)
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            for key in (key for key in one if "/reward" in key):
                assert two[key] == pytest.approx(one[key], abs=1e-5), key


def way(folder: Path, name: str) -> dict[str, Any]:
    """Return the recipe sections of a run with an engine."""
    run = {"run": {"dir": str(folder / name), "device": "cpu"}}
    return {**run, "distributed": {"engine": name}} if name in ("ddp", "fsdp") else run


def require_same(found: list[list[dict[str, Any]]]) -> None:
    """Check that all runs have the losses of the first one."""
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            assert one["tokens_seen"] == two["tokens_seen"]
            assert two["train/loss"] == pytest.approx(one["train/loss"], rel=1e-6)
            if "val/loss" in one:
                assert two["val/loss"] == pytest.approx(one["val/loss"], rel=1e-6)

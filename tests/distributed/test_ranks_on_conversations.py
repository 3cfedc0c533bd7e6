"""Processes that share a run on conversations prepare them once, and learn what one learns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from spawned import run_ranks

from firstlight.tokenizer import Tokenizer

_DRIVER = Path(__file__).with_name("train_driver.py")
_TEMPLATE = (
    "{%- for m in messages -%}{{- m.role ~ ': ' ~ m.content ~ eos_token -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- 'assistant: ' -}}{%- endif -%}"
)


def train(recipe: dict[str, Any], processes: int) -> list[dict[str, Any]]:
    """The metrics of all steps."""
    results = run_ranks(_DRIVER, [json.dumps({"recipe": recipe})], processes)
    for rank, result in enumerate(results):
        assert result.returncode == 0, f"rank {rank}: {result.stderr}"
    lines = [json.loads(line) for line in results[0].stdout.splitlines() if line[:1] == "{"]
    return lines[:-1]


@pytest.mark.slow
def test_losses_on_conversations_are_those_of_one_process(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer.extended([], _TEMPLATE).save_pretrained(tmp_path / "tok")
    records = [
        {"instruction": f"the light {n}", "output": " ".join(["dawn", "star"] * (n % 5 + 1))}
        for n in range(60)
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    recipe: dict[str, Any] = {
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
        "evaluation": {"every_steps": 4, "sample_prompts": ["the light 3"]},
        "efficiency": {"precision": "fp32", "compile": False},
    }
    found = []
    for name, processes in (("none", 1), ("ddp", 2), ("fsdp", 2)):
        # Each has to prepare them, all of its processes at the same moment.
        monkeypatch.setenv("FIRSTLIGHT_CACHE", str(tmp_path / f"cache-{name}"))
        run = {"run": {"dir": str(tmp_path / name), "device": "cpu"}}
        engine = {} if name == "none" else {"distributed": {"engine": name}}
        found.append(train({**recipe, **run, **engine}, processes))
        assert len([p for p in (tmp_path / f"cache-{name}" / "chat").iterdir() if p.is_dir()]) == 1
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            assert one["tokens_seen"] == two["tokens_seen"]
            assert two["train/loss"] == pytest.approx(one["train/loss"], rel=1e-6)
            if "val/loss" in one:
                assert two["val/loss"] == pytest.approx(one["val/loss"], rel=1e-6)

"""Tests of `benchmarks keeping`, with a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import keeping
from benchmarks.__main__ import main
from builders import make_texts
from firstlight.tokenizer import Tokenizer
from firstlight.training.loop import train


def test_keeping_bench_measures_each_row_once(
    tmp_path: Path, data: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    model = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    recipe = {
        "run": {"dir": str(tmp_path / "model")},
        "model": {**model, "max_position_embeddings": 64},
        "data": {"dir": str(data), "seq_len": 32},
        "schedule": {"max_steps": 1, "warmup_steps": 0},
    }
    train(recipe)
    text = tmp_path / "new.txt"
    text.write_text("\n".join(make_texts(200)), encoding="utf-8")
    out = tmp_path / "out"
    words = ["keeping", str(tmp_path / "model"), str(text), "--out", str(out), "--steps", "4"]
    words += ["--batch-tokens", "128", "--rows", "2", "--seeds", "2", "--evaluations", "2"]
    words += ["--rate", "0.5", "--kilobytes", "40"]
    assert main([*words, "--replay", "0.25", "--replay", "auto"]) == 0
    runs = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert [(run["replay"], run["seed"]) for run in runs] == [
        ("0.25", 0), ("auto", 0), ("0.25", 1), ("auto", 1),
    ]  # fmt: skip
    # All runs start from the same model, and read the same held-out and kept text.
    assert len({(run["new"][0], run["kept"][0]) for run in runs}) == 1
    assert [run["steps"] for run in runs] == [[0, 2, 4], [0, 1, 2, 4]] * 2
    assert (out / "new-40" / "new.txt").stat().st_size <= 40_000
    assert (out / "keeping.png").is_file()
    lines = capsys.readouterr().out.splitlines()
    row = next(line for line in lines if line.startswith("0.25 "))
    mean = sum(run["new"][-1] + run["kept"][-1] for run in runs[::2]) / 2
    assert f"{mean:.4f} (" in row
    # A second call measures only what is missing.
    monkeypatch.setattr(keeping, "train_texts", lambda *_, **__: pytest.fail("measured again"))
    assert main([*words, "--replay", "auto"]) == 0

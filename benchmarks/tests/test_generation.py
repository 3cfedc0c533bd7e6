"""`python -m benchmarks generation`: the measurements and their evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.__main__ import show_generation
from benchmarks.generation import (
    REFERENCE,
    ROWS,
    bench_generation,
    bytes_per_token,
    decided,
    draw,
    summarize,
)
from benchmarks.generation import measure as generation_once
from benchmarks.options import GenerationBench
from benchmarks.rows import has_package
from firstlight.bench.rows import RowOutcome
from firstlight.errors import ConfigError, ModelError
from firstlight.files.atomic import write_json
from firstlight.generation.config import SamplingConfig
from firstlight.generation.engine import load
from firstlight.models import GPT2Config, LlamaConfig, MoEConfig, empty_model
from firstlight.models.gpt2 import GPT2
from firstlight.weights.loading import weights_to_save
from firstlight.weights.stored import save_weights
from generated import generate_ids

pytestmark = pytest.mark.usefixtures("forked_processes")

TINY = GPT2Config(
    vocab_size=101, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
    max_position_embeddings=48,
)  # fmt: skip


def test_bytes_per_token_counts_multiplied_weights() -> None:
    linear, vectors = 2 * (32 * 96 + 32 * 32 + 2 * 32 * 128), 2 * (96 + 32 + 128 + 32 + 4 * 32) + 64
    head = 101 * 32
    assert bytes_per_token(TINY, "float32") == 4 * (linear + vectors + head)
    assert bytes_per_token(TINY, "bfloat16") == 2 * (linear + vectors + head)
    assert bytes_per_token(TINY, "int8") == linear + head + 2 * vectors
    untied = LlamaConfig(
        vocab_size=10, hidden_size=8, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=16,
        tie_word_embeddings=False,
    )  # fmt: skip
    all_bytes = sum(p.nbytes for p in empty_model(untied).parameters())
    assert bytes_per_token(untied, "float32") == all_bytes - 4 * 10 * 8
    assert bytes_per_token(MoEConfig(model_type="mixtral", vocab_size=10), "float32") is None


def test_generation_bench_reports_medians_and_ratios_of_same_turn() -> None:
    def reply(*rates: float) -> dict[str, Any]:
        batch = {
            "batch_size": 2,
            "warm_up_seconds": 9.0,
            "first_token_seconds": [0.5, 0.25],
            "tokens_per_second": list(rates),
            "token_ids": [1],
        }
        return {"load_seconds": 1.0, "peak_bytes": 7, "batches": [batch]}

    rows = [row for row in ROWS if row.name in (REFERENCE, "fp32", "bf16")]
    outcomes = {
        REFERENCE: RowOutcome(runs=[reply(10, 12, 11), reply(20, 20, 20)]),
        "fp32": RowOutcome(runs=[reply(22, 22, 80), reply(30, 30, 30)]),
        "bf16": RowOutcome(problem="no memory"),
    }
    base, fp32, bf16 = summarize(rows, outcomes, 1e6, TINY)
    assert base["batches"][0]["speed_ratio"] == 1
    batch = fp32["batches"][0]
    assert batch["tokens_per_second"] == 26
    assert (batch["tokens_per_second_min"], batch["tokens_per_second_max"]) == (22, 30)
    assert batch["speed_ratio"] == (22 / 11 + 30 / 20) / 2
    assert batch["first_token_seconds"] == 0.375
    weight_bytes = bytes_per_token(TINY, "float32")
    assert weight_bytes is not None
    assert batch["share_of_limit"] == pytest.approx(26 / 2 * weight_bytes / 1e6)
    assert bf16["batches"] == []
    assert bf16["reason"] == "no memory"


def test_generation_bench_without_cache_recomputes_whole_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    write_model(folder)
    request = {
        "program": "firstlight", "folder": str(folder), "dtype": "float32", "device": "cpu",
        "compile": False, "cache": False, "batch_sizes": [2], "prompt_tokens": 5,
        "new_tokens": 4, "times": 1, "threads": torch.get_num_threads(), "vocab_size": 101,
    }  # fmt: skip
    shapes: list[tuple[int, ...]] = []
    real = GPT2.forward

    def forward(self: GPT2, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        shapes.append(tuple(input_ids.shape))
        assert kwargs.get("cache") is None
        return real(self, input_ids, *args, **kwargs)

    monkeypatch.setattr(GPT2, "forward", forward)
    generation_once(request)
    # Once to warm up, and once timed.
    assert shapes == [(2, 5), (2, 6), (2, 7), (2, 8)] * 2


def test_generation_bench_different_tokens_without_cache_are_an_error() -> None:
    def run(*token_ids: int) -> dict[str, Any]:
        batch = {"batch_size": 1, "warm_up_seconds": 1.0, "first_token_seconds": [1.0]}
        batch |= {"tokens_per_second": [6.0 / len(set(token_ids))], "token_ids": list(token_ids)}
        return {"load_seconds": 1.0, "peak_bytes": 7, "batches": [batch]}

    rows = [row for row in ROWS if row.name in ("fp32", "fp32-no-cache")]
    outcomes = {row.name: RowOutcome(runs=[run(1, 1), run(2, 3)]) for row in rows}
    found = summarize(rows, outcomes, 1e6, TINY)
    assert [row["batches"][0]["cache_speedup"] for row in found] == [None, 1.0]
    outcomes["fp32"].runs[1] = run(2, 4)
    with pytest.raises(ModelError, match=r"cache the model chose \[2, 4\], without it \[2, 3\]"):
        summarize(rows, outcomes, 1e6, TINY)
    del outcomes["fp32"]
    (row,) = summarize(rows[1:], outcomes, 1e6, TINY)
    assert row["batches"][0]["cache_speedup"] is None


def write_model(folder: Path) -> None:
    """Write a model whose tokens have very different logits."""
    model = empty_model(TINY)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.4, generator=torch.Generator().manual_seed(5))
    folder.mkdir()
    write_json(folder / "config.json", {**TINY.to_hf(), "dtype": "float32"})
    save_weights(weights_to_save(model), folder, max_shard_bytes=2**30)


def test_generation_bench_measures_model_folder_with_stated_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    write_model(folder)
    bench = GenerationBench(
        str(folder), batch_sizes=[2], prompt_tokens=5, new_tokens=9, repeats=1,
        rows=["transformers-fp32", "fp32", "fp32-no-cache", "llama.cpp-fp32"],
    )  # fmt: skip
    seen: list[bool] = []
    result = bench_generation(bench, lambda so_far: seen.append(so_far["complete"]))
    theirs, ours, no_cache, *llama_cpp = result["rows"]
    assert len(llama_cpp) == has_package("llama_cpp")
    assert seen == [False, False, False, *([False] * len(llama_cpp)), True]
    assert {row["reason"] for row in result["rows"]} == {""}
    prompts = torch.randint(101, (2, 5), generator=torch.Generator().manual_seed(2)).tolist()
    config = SamplingConfig(max_new_tokens=9, temperature=0)
    expected = list(generate_ids(load(folder).model, prompts[0], config))
    assert ours["batches"][0]["token_ids"] == theirs["batches"][0]["token_ids"] == expected
    assert ours["batches"][0]["tokens_per_second"] > 0
    assert [row["batches"][0]["token_ids"] for row in (no_cache, *llama_cpp)] == [expected] * (
        1 + len(llama_cpp)
    )
    rates = [row["batches"][0]["tokens_per_second"] for row in (ours, no_cache)]
    assert no_cache["batches"][0]["cache_speedup"] == pytest.approx(rates[0] / rates[1])
    show_generation(result)
    assert f"{rates[0] / rates[1]:.2f}x" in capsys.readouterr().out
    assert result["machine"]["copy_bytes_per_second"] > 1e6
    assert draw(result)[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    "values, words",
    [
        ({"rows": ["bf17"]}, "did you mean 'bf16'"),
        ({"new_tokens": 1}, "new_tokens is 1, but must be at least 2"),
        ({"batch_sizes": [0]}, "at least 1"),
        ({"repeats": 0}, "repeats is 0"),
    ],
)
def test_generation_bench_invalid_options_raise_config_error(
    values: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        decided(GenerationBench(**values))


def test_generation_bench_tokens_exceeding_context_raise_config_error() -> None:
    with pytest.raises(ConfigError, match=r"context of \d+"):
        bench_generation(GenerationBench("small", prompt_tokens=10**6), lambda _: None)


def test_generation_bench_quick_compiles_only_named_rows() -> None:
    assert not any("compiled" in name for name in decided(GenerationBench(quick=True)).rows)
    named = decided(GenerationBench(quick=True, rows=["int8-compiled"]))
    assert named.rows == ["int8-compiled"]

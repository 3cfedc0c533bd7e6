"""`python -m benchmarks scaling`: the rows, their evaluation, and one real run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.options import ScalingBench
from benchmarks.scaling import ENGINES, bench_scaling, draw, scaling_rows, summarize
from firstlight.bench.rows import RowOutcome
from firstlight.errors import ConfigError

pytestmark = pytest.mark.usefixtures("forked_processes")


def test_scaling_bench_rows_are_powers_of_two_and_maximum() -> None:
    assert scaling_rows(ScalingBench(nproc=1)) == [("none", 1)]
    two = ScalingBench(nproc=2, engines=["ddp", "hybrid"])
    assert scaling_rows(two) == [("none", 1), ("ddp", 2)]
    six = ScalingBench(nproc=6, engines=["ddp", "hybrid"])
    assert scaling_rows(six) == [
        ("none", 1),
        ("ddp", 2),
        ("ddp", 4),
        ("hybrid", 4),
        ("ddp", 6),
        ("hybrid", 6),
    ]


def test_scaling_bench_invalid_values_raise_config_error() -> None:
    with pytest.raises(ConfigError, match=r"engine .dpd. is unknown .did you mean .ddp."):
        scaling_rows(ScalingBench(engines=["dpd"]))
    with pytest.raises(ConfigError, match="processes is 0, but must be at least 1"):
        scaling_rows(ScalingBench(nproc=0))


def _outcomes() -> dict[tuple[str, int], RowOutcome]:
    one = {"step_seconds": 0.5, "alone_seconds": None, "peak_bytes": [100]}
    two = {"step_seconds": 0.8, "alone_seconds": 0.6, "peak_bytes": [90, 80]}
    slow = {"step_seconds": 1.0, "alone_seconds": 0.5, "peak_bytes": [70, 95]}
    return {
        ("none", 1): RowOutcome(runs=[one, one]),
        ("ddp", 2): RowOutcome(runs=[two, slow]),
        ("fsdp", 2): RowOutcome(problem="out of memory"),
    }


def test_scaling_bench_figures_are_medians_over_turns() -> None:
    bench = ScalingBench(seq_len=10, micro_batch_size=4, accumulation=2)
    none, ddp, fsdp = summarize(bench, _outcomes())
    assert none["tokens_per_second"] == 160
    assert none["speedup"] == 1
    assert none["sharing_share"] is None
    assert ddp["tokens_per_second"] == (200 + 160) / 2
    assert ddp["speedup"] == pytest.approx((1.25 + 1.0) / 2)
    assert ddp["sharing_share"] == pytest.approx((0.25 + 0.5) / 2)
    assert ddp["peak_bytes"] == [90, 95]
    assert fsdp["reason"] == "out of memory"
    assert "tokens_per_second" not in fsdp
    result = {"rows": [none, ddp, fsdp], "model": "x", "machine": {"name": "m", "cores": 2}}
    assert draw(result).startswith(b"\x89PNG")


def test_scaling_bench_model_parallel_processes_count_tokens_once() -> None:
    bench = ScalingBench(seq_len=10, micro_batch_size=4)
    one: dict[str, Any] = {"step_seconds": 0.5, "alone_seconds": None, "peak_bytes": [100]}
    two: dict[str, Any] = {"step_seconds": 0.4, "alone_seconds": 0.6, "peak_bytes": [90, 80]}
    outcomes = {
        row: RowOutcome(runs=[run])
        for row, run in ((("none", 1), one), (("tensor", 2), two), (("zero-2", 2), two))
    }
    _, tensor, zero = summarize(bench, outcomes)
    assert [row["tokens_per_second"] for row in (tensor, zero)] == [100, 200]
    assert [row["speedup"] for row in (tensor, zero)] == [1.25, 2.5]
    assert [row["sharing_share"] for row in (tensor, zero)] == pytest.approx([0.25, -0.5])


def test_scaling_bench_measures_only_engines_supported_by_model() -> None:
    def engines(model: str) -> set[str]:
        return {name for name, _ in scaling_rows(ScalingBench(model=model))}

    assert engines("llama-110m") - engines("gpt2-124m") == {"tensor", "pipeline"}


@pytest.mark.parametrize(
    "engines",
    [["fsdp"], pytest.param(list(ENGINES), marks=pytest.mark.slow)],
)
def test_scaling_bench_measures_two_processes(tmp_path: Path, engines: list[str]) -> None:
    recipe = tmp_path / "recipe.yaml"
    model = {
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 16,
    }
    recipe.write_text(json.dumps({"data": {"dir": "-"}, "model": model}), encoding="utf-8")
    bench = ScalingBench(
        nproc=2,
        model=str(recipe),
        engines=engines,
        seq_len=16,
        steps=1,
        repeats=1,
        device="cpu",
    )
    kept: list[dict[str, Any]] = []
    result = bench_scaling(bench, kept.append)
    assert [row["reason"] for row in result["rows"]] == [""] * len(result["rows"])
    first, *others = result["rows"]
    assert len(first["peak_bytes"]) == 1
    # With two processes, groups of two are the same as fsdp.
    assert [row["engine"] for row in others] == [name for name in engines if name != "hybrid"]
    for row in others:
        assert len(row["peak_bytes"]) == 2
        assert row["tokens_per_second"] > 0
        assert row["sharing_share"] < 1
    assert [one["complete"] for one in kept] == [*[False] * len(result["rows"]), True]

"""`benchmarks planner`: the grid of memory, its evaluation, and real configurations."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from benchmarks import planner_memory, planner_speed
from benchmarks.__main__ import planner_command
from benchmarks.memory import measured_memory
from benchmarks.models import PlannerCase
from benchmarks.planner_memory import (
    bench_memory,
    draw_memory,
    memory_grid,
    predict_generation,
    summary,
)
from benchmarks.planner_speed import percentile
from firstlight.errors import ConfigError
from firstlight.generation import few_rows
from firstlight.generation.batch import BatchDecoder
from firstlight.models import GPT2Config, LlamaConfig, ModelConfig, build_model
from firstlight.planner.memory.kernels import Target
from firstlight.recipe import parse_recipe
from planner_recipes import GPT2, LLAMA

pytestmark = pytest.mark.usefixtures("forked_processes")


def test_planner_bench_grid_covers_promised_cases() -> None:
    cases = memory_grid()
    assert len(cases) >= 60
    assert len({case.name for case in cases}) == len(cases)
    assert {case.kind for case in cases} == {"training", "evaluation", "generation"}
    recipes = [parse_recipe(case.recipe()) for case in cases]
    assert {r.data.seq_len for r in recipes} >= {256, 512, 1024, 2048, 4096, 8192}
    assert {r.batch.rows for r in recipes} >= {1, 2, 4, 8, 32}
    assert {r.efficiency.precision for r in recipes} == {"fp32", "bf16", "bf16_params", "fp16"}
    assert {r.efficiency.activation_checkpointing for r in recipes} == {"none", "full", "selective"}
    assert {r.optimizer.name for r in recipes} >= {"adamw", "adamw8bit", "adafactor", "muon", "sgd"}
    assert {r.efficiency.compile for r in recipes} == {True, False}
    assert any(r.lora for r in recipes)
    assert len(memory_grid(quick=True)) < len(cases) / 7


@pytest.mark.parametrize("values, share, found", [([3.0, 1.0, 2.0], 0.5, 2.0), ([5.0], 0.95, 5.0)])
def test_planner_bench_percentiles_are_existing_values(
    values: list[float], share: float, found: float
) -> None:
    assert percentile(sorted(values), share) == found
    assert percentile([float(n) for n in range(1, 101)], 0.95) == 95


def result(error: float, **more: Any) -> dict[str, Any]:
    peak = 1_000_000
    return {
        "name": "x",
        "reason": "",
        "error": error,
        "peak_bytes": peak,
        "predicted_bytes": int(peak * (1 + error)),
        "seconds": 1.0,
        **more,
    }


def test_planner_bench_summary_has_largest_errors_and_shortage() -> None:
    results = [result(0.04), result(-0.01), result(0.0), {"name": "y", "reason": "it broke"}]
    found = summary(results)
    assert found["count"] == 3
    assert found["failed"] == 1
    assert found["error_95"] == 0.04
    assert found["worst_shortage"] == 0.01
    assert draw_memory(results).startswith(b"\x89PNG")
    assert summary([{"name": "y", "reason": "it broke"}]) == {"count": 0, "failed": 1}


def test_planner_bench_predictions_match_real_steps() -> None:
    """In separate processes; exact except for memory allocated inside kernels."""
    short = {"prompt_tokens": 256, "max_new_tokens": 32, "sequences": 1, "dtype": "int8"}
    cases = [
        PlannerCase("llama small", 1, 256, {"batch.gradient_accumulation_steps": 3}),
        PlannerCase("gpt2 small", 2, 256, kind="evaluation"),
        PlannerCase("llama small", 1, 256, kind="generation", generation=short),
        # Its weights are copied into another layout for the kernel for few rows.
        PlannerCase(
            "gpt2 small", 1, 256, kind="generation", generation=short | {"dtype": "float32"}
        ),
    ]
    kept: list[dict[str, Any]] = []
    result = bench_memory(cases, kept.append)
    assert [len(one["rows"]) for one in kept] == [1, 2, 3, 4, 4]
    assert kept[-1] == result
    for one in result["rows"]:
        assert not one["reason"], one
        assert -0.02 < one["error"] < 0.05, one


def test_planner_bench_failure_is_recorded_as_result() -> None:
    wrong = PlannerCase("gpt2 small", 1, 256, {"efficiency": {"optimizer_in_backward": True}})
    (found,) = bench_memory([wrong], lambda _: None)["rows"]
    assert found["reason"].startswith("recipe: efficiency.")


def test_planner_bench_results_are_printed_and_written_immediately(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "planner.json"

    def memory(_: object, on_run: Callable[..., None]) -> None:
        rows = [result(0.0123)]
        on_run({"rows": rows, "summary": summary(rows), "complete": False})
        assert json.loads(kept.read_text())["memory_summary"]["count"] == 1
        rows.append({"name": "y", "reason": "it broke"})
        on_run({"rows": rows, "summary": summary(rows), "complete": False})
        assert json.loads(kept.read_text())["memory_summary"]["failed"] == 1

    def speed(_: object, on_row: Callable[..., None], **__: object) -> None:
        on_row({"rows": [{"name": "z", "problem": "too slow"}], "complete": False})
        found = json.loads(kept.read_text())
        assert len(found["memory"]) == 2
        assert found["speed"]["rows"][0]["name"] == "z"
        raise KeyboardInterrupt

    monkeypatch.setattr(planner_memory, "bench_memory", memory)
    monkeypatch.setattr(planner_speed, "bench_speed", speed)
    monkeypatch.setattr(planner_speed, "draw_speed", lambda _: b"")
    found = CliRunner().invoke(planner_command, ["--out", str(tmp_path)])
    # This is not implied by the assertions above.
    assert isinstance(found.exception, SystemExit)
    assert "1/83  x  1 MiB  1 MiB  +1.23%" in found.stderr
    assert "2/83  y  failed: it broke" in found.stderr
    assert "1/10  z  failed: too slow" in found.stderr
    assert f"{tmp_path / 'planner-memory.png'}" in found.stdout


# Memory of generation

_CONFIGS: dict[str, ModelConfig] = {
    "gpt2": GPT2Config.model_validate(GPT2),
    "llama": LlamaConfig.model_validate(LLAMA),
}


def real_generation(config: ModelConfig, dtype: torch.dtype, sequences: int) -> None:
    """Run what `predict_generation` traces on real tensors, with prompts of 40 tokens and 20 new
    tokens.
    """
    with torch.device("meta"):
        model = build_model(config)
    model.to(dtype).to_empty(device="cpu")
    model.finish_loading()
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    model.eval()
    few_rows.use_few_rows(model)
    decoder = BatchDecoder(model, sequences, 60)
    decoder.add_many([[0] * 40] * sequences)
    decoder.lengths = [59] * sequences
    decoder.step([0] * sequences)


@pytest.mark.parametrize("family", _CONFIGS)
@pytest.mark.parametrize("sequences", [1, 4])
def test_planner_bench_generation_prediction_matches_real_run(family: str, sequences: int) -> None:
    config = _CONFIGS[family]
    found = predict_generation(
        config, prompt_tokens=40, max_new_tokens=20, sequences=sequences, target=Target(threads=2)
    )
    with measured_memory() as measured:
        real_generation(config, torch.float32, sequences)
    assert found.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.02)
    head = config.num_key_value_heads * config.head_dim
    cache = 2 * 4 * config.num_hidden_layers * head * 60 * sequences
    assert found.parts["activations"] == pytest.approx(cache, rel=0.1)


def test_planner_bench_8_bit_weights_take_less_than_half() -> None:
    config = _CONFIGS["llama"]
    settings: dict[str, Any] = {"prompt_tokens": 4, "max_new_tokens": 4}
    wide = predict_generation(config, **settings).parts["weights"]
    narrow = predict_generation(config, dtype="int8", **settings).parts["weights"]
    assert narrow < wide / 2


def test_planner_bench_dtype_auto_raises_config_error() -> None:
    with pytest.raises(ConfigError, match="'auto' can't be planned"):
        predict_generation(_CONFIGS["gpt2"], prompt_tokens=4, max_new_tokens=4, dtype="auto")

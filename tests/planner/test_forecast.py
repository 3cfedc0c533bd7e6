"""A run's predicted memory and speed compared with the measurement, advice, and `--plan auto`."""

from __future__ import annotations

import gc
import json
import mmap
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import firstlight
from benchmarks.memory import measured_memory
from firstlight.checkpoint.saver import Snapshot
from firstlight.errors import ConfigError, TrainingError
from firstlight.hardware.device import Hardware, find_hardware
from firstlight.hardware.fresh_process import error_of
from firstlight.hardware.process_memory import (
    AllocatedPeak,
    allocated_bytes,
    peak_resident_bytes,
    resident_bytes,
)
from firstlight.models.moe import kept_code_bytes
from firstlight.planner.plan import automatic
from firstlight.planner.plan import processes as forecasting
from firstlight.planner.plan.automatic import (
    _ADVICE,
    advice,
    forecast_run,
    planned_elsewhere,
    planned_recipe,
)
from firstlight.planner.plan.estimate import Candidate, Estimator, methods
from firstlight.planner.plan.machine import _CPU_SHARE, find_machine, resolve_for
from firstlight.planner.plan.processes import RunForecaster
from firstlight.recipe import Recipe, ResolvedRecipe, parse_recipe, parse_resolved_recipe
from firstlight.run_log.names import FORECAST_NAME
from firstlight.training.checkpoints import write_average
from firstlight.training.forecast import Forecast, ForecastComparison
from firstlight.training.micro_batch_trials import Trial
from firstlight.training.run import Run

pytestmark = pytest.mark.usefixtures("forked_processes")

_CPU = find_hardware("cpu")
_MODEL: dict[str, Any] = {
    "model_type": "gpt2",
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "resid_pdrop": 0.1,
}
#: In bytes.
_WEIGHTS = 4 * (300 * 32 + 64 * 32 + 2 * 32 + 2 * (12 * 32 * 32 + 13 * 32))


def settled(**sections: Any) -> ResolvedRecipe:
    values: dict[str, Any] = {
        "data": {"dir": "/nowhere"},
        "model": _MODEL,
        "batch": {"global_batch_tokens": 512},
        "efficiency": {"compile": False, "precision": "fp32"},
        **sections,
    }
    return resolve_for(parse_recipe(values), find_machine())


@pytest.fixture(autouse=True)
def _own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


class Prophet:
    """A forecaster that always returns the same prediction."""

    def forecast(self, recipe: Recipe, hardware: Hardware, processes: int) -> Forecast | None:
        assert recipe.model is not None
        assert (hardware.device.type, processes) == ("cpu", 1)
        return Forecast(3 * 2**30, "loss", {"weights": 2**30, "logits_and_loss": 2**31}, (1, 2, 3))

    def advise(self, recipe: Recipe, hardware: Hardware, processes: int) -> str | None:
        return None


def test_forecast_is_compared_with_measured_run(
    recipe: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    result = firstlight.train(recipe, forecaster=Prophet(), progress=True)
    said = capfd.readouterr().err
    words = "tensors 3.00 GiB, most in the loss (logits and loss 2.00 GiB, weights 1.00 GiB)"
    assert f"planned: {words}; process " in said
    assert "iB; 2 tokens/s (1 to 3)\n" in said
    # Each figure at the start is compared with its own measurement.
    measured = (
        r"\ntraining took \d+ s for [\d,]+ tokens, including evaluations and saves\n"
        r"median step: [\d,]+ tokens/s \(planned 2\); memory: tensors 0\.\d+ GiB \(planned "
    )
    assert re.search(
        measured + r"3\.00 GiB\), process [\d.]+ [MG]iB \(planned [\d.]+ [MG]iB\)\n", said
    )
    found = json.loads((result.run_folder / FORECAST_NAME).read_text(encoding="utf-8"))
    assert found["predicted"]["peak_bytes"] == 3 * 2**30
    # Resident memory and predicted tensors; the process keeps 30 % more than their bytes.
    assert found["predicted"]["process_bytes"] > 1.3 * 3 * 2**30
    assert found["measured"]["peak_bytes"] is None
    assert 0 < found["measured"]["allocated_bytes"] < found["measured"]["process_bytes"]
    assert found["measured"]["process_bytes"] > 2**26
    assert found["measured"]["tokens_per_second"] > 0


def test_forecast_includes_code_compiled_by_cpu_for_bf16_experts(
    recipe: dict[str, Any], tmp_path: Path
) -> None:
    model = {"model_type": "mixtral", "num_experts": 4, "num_experts_per_tok": 2}
    shape = {key: recipe["model"][key] for key in ("hidden_size", "num_hidden_layers")}
    predicted = {}
    for precision in ("fp32", "bf16"):
        changes = {
            "run": recipe["run"] | {"dir": str(tmp_path / precision)},
            "model": {**shape, **model, "num_attention_heads": 2},
            "efficiency": {"precision": precision, "compile": False},
            "schedule": {"max_steps": 1},
        }
        run = firstlight.train(recipe | changes, forecaster=Prophet())
        found = json.loads((run.run_folder / FORECAST_NAME).read_text(encoding="utf-8"))
        predicted[precision] = found["predicted"]["process_bytes"]
    code = kept_code_bytes(recipe["batch"]["micro_batch_size"] * recipe["data"]["seq_len"] * 2, 4)
    assert code > 2**26
    assert predicted["bf16"] - predicted["fp32"] > code / 2


def test_kept_code_bytes_of_many_expert_rows_are_bounded() -> None:
    assert kept_code_bytes(384, 4) == kept_code_bytes(10**3, 8) == 1024 * kept_code_bytes(1, 4) // 6
    assert kept_code_bytes(128 * 4, 4) == kept_code_bytes(10**6, 4) == 32 * kept_code_bytes(1, 4)


def test_process_memory_freed_before_run_is_not_counted(recipe: dict[str, Any]) -> None:
    before = 2**29
    with mmap.mmap(-1, before) as memory:
        memory.write(bytes(before))
    level = resident_bytes()
    assert peak_resident_bytes() >= level + before // 2
    result = firstlight.train(recipe, forecaster=Prophet())
    found = json.loads((result.run_folder / FORECAST_NAME).read_text(encoding="utf-8"))
    assert found["measured"]["process_bytes"] < level + before // 2


@pytest.mark.skipif(allocated_bytes() is None, reason="this C library counts nothing")
def test_memory_watch_counts_allocated_not_freed_bytes() -> None:
    gc.collect()  # otherwise memory that earlier tests left is freed meanwhile
    before = allocated_bytes()
    # Two sizes: larger and smaller than the allocator's threshold for a separate mapping.
    tensors = [torch.ones(16 << 20), *(torch.ones(10_000) for _ in range(1000))]
    after, own = allocated_bytes(), sum(tensor.nbytes for tensor in tensors)
    tensors.clear()
    again = allocated_bytes()
    assert before is not None
    assert after is not None
    assert after - before == pytest.approx(own, rel=0.02)
    assert again == pytest.approx(before, abs=0.02 * own)


def test_memory_watch_peak_is_relative_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    # Samples: 100 at the start, of which 40 counted; three; 200 at the second level, of which 30
    # counted; two.
    seen = [100, 300, 250, 200, 180, 400, 390]
    watch = AllocatedPeak()
    monkeypatch.setattr("firstlight.hardware.process_memory.allocated_bytes", lambda: seen.pop(0))
    monkeypatch.setattr(AllocatedPeak, "_look", lambda _: None)
    with watch:
        watch.start(40)
        for _ in range(3):
            watch.look()
        assert watch.peak_bytes == 300 - 60
        watch.find_level(30)
        # Earlier samples are compared with the higher level.
        assert watch.peak_bytes == 300 - 150
        for _ in range(2):
            watch.look()
    assert watch.peak_bytes == 400 - 150


def test_memory_watch_without_counter_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("firstlight.hardware.process_memory.allocated_bytes", lambda: None)
    with AllocatedPeak() as watch:
        watch.start(0)
        watch.look_less()
    assert watch.peak_bytes is None


def test_tensor_bytes_count_frozen_tensors_and_exclude_freed_ones() -> None:
    comparison = ForecastComparison(find_hardware("cpu"))
    tensors = [torch.ones(1 << 18), torch.nn.Parameter(torch.ones(1 << 18))]
    gc.collect()
    before = comparison.tensor_bytes()
    gc.freeze()  # like a run after its first step
    assert comparison.tensor_bytes() == before
    tensors.pop()
    assert comparison.tensor_bytes() == before - (1 << 20)


class Broken:
    """A forecaster that fails with an unhelpful error."""

    def forecast(self, *_: object) -> Forecast | None:
        raise KeyError("float16")

    def advise(self, *_: object) -> str | None:
        raise KeyError("float16")


def test_forecast_failure_does_not_end_run(
    recipe: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    result = firstlight.train(recipe, forecaster=Broken(), progress=True)
    assert "memory and speed can't be predicted: KeyError: 'float16'" in capfd.readouterr().err
    assert not (result.run_folder / FORECAST_NAME).exists()


_FAILURES = {
    "crash": ("import os; os.kill(os.getpid(), 11)", "killed by signal 11"),
    "error": ("raise SystemExit(3)", "exit code 3"),
    "hang": ("import signal; signal.pause()", "took more than 1 s"),
}


@pytest.mark.parametrize("failure", _FAILURES)
def test_forecast_process_cannot_end_run(
    recipe: dict[str, Any],
    failure: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    code, said = _FAILURES[failure]
    (tmp_path / "predicts.py").write_text(code, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(forecasting, "_PREDICTING", "predicts")
    monkeypatch.setattr(forecasting, "_MOST_SECONDS", 1.0 if failure == "hang" else 60.0)
    with RunForecaster() as forecaster:
        forecaster.start()
        (started,) = forecaster._processes
        result = firstlight.train(recipe, forecaster=forecaster, progress=True)
    assert started.poll() is not None
    assert (
        f"memory and speed can't be predicted: the prediction process failed: {said}\n"
        in capfd.readouterr().err
    )
    assert result.step == 12


def test_forecast_process_started_in_vain_is_ended() -> None:
    with RunForecaster() as forecaster:
        forecaster.start()
        (started,) = forecaster._processes
    assert started.poll() is not None


@pytest.mark.slow
def test_forecast_process_predicts_update_compiled_by_torchao(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel would crash on tensors without memory."""
    pytest.importorskip("torchao")
    # A run does not wait this long for its forecast, but on busy cores the process takes longer.
    monkeypatch.setattr(forecasting, "_MOST_SECONDS", 300.0)
    optimizer = {"name": "adamw8bit", "eight_bit_library": "torchao"}
    recipe = settled(optimizer=optimizer, batch={"micro_batch_size": 1})
    with RunForecaster() as forecaster:
        found = forecaster.forecast(recipe, _CPU, 1)
    assert found is not None
    assert found.parts["weights"] == 4 * (
        300 * 32 + 64 * 32 + 2 * 32 + 2 * (12 * 32 * 32 + 13 * 32)
    )


@pytest.mark.parametrize("precision", ["fp16", "bf16", "bf16_params"])
def test_forecast_exists_for_every_precision(precision: str) -> None:
    found = forecast_run(settled(efficiency={"precision": precision, "compile": False}), _CPU, 1)
    assert found is not None
    assert found.peak_bytes > 0


def test_forecast_comparison_excludes_first_steps_from_median(tmp_path: Path) -> None:
    comparison = ForecastComparison(_CPU)
    assert comparison.write(tmp_path) is None
    assert not (tmp_path / FORECAST_NAME).exists()
    for rate in (1.0, 2.0, 50.0, None, 70.0, 60.0):
        comparison.add({"tokens_per_second": rate, "learned_tokens_per_second": rate})
    assert comparison.measured()["tokens_per_second"] == 60
    # Metrics of an older release.
    assert comparison.measured()["samples_per_second"] is None


def test_forecast_comparison_matches_each_rate_with_its_own(tmp_path: Path) -> None:
    comparison = ForecastComparison(_CPU)
    comparison.forecast = Forecast(2**30, "loss", {}, (80.0, 100.0, 120.0))
    comparison.label_share, comparison.seq_len = 0.25, 50
    for _ in range(3):
        comparison.add(
            {
                "tokens_per_second": 96.0,
                "learned_tokens_per_second": 24.0,
                "samples_per_second": 1.92,
            }
        )
    text = comparison.write(tmp_path)
    assert text is not None
    assert text == "median step: 96 tokens/s (planned 100), 24 learned tokens/s (planned 25)"
    found = json.loads((tmp_path / FORECAST_NAME).read_text(encoding="utf-8"))
    assert found["predicted"]["learned_tokens_per_second"] == [20, 25, 30]
    assert found["predicted"]["samples_per_second"] == [1.6, 2, 2.4]
    assert found["measured"]["learned_tokens_per_second"] == 24
    assert found["measured"]["samples_per_second"] == 1.92


def test_forecast_equals_that_of_planner() -> None:
    found = forecast_run(settled(), _CPU, 1)
    assert found is not None
    assert found.parts["weights"] == _WEIGHTS
    assert found.parts["optimizer_states"] >= 2 * _WEIGHTS
    # The run's first steps give its speed here.
    assert found.tokens_per_second is None
    assert found.peak_bytes == max(found.phases.values()) == found.phases[found.phase]
    assert {"forward", "backward", "evaluation", "samples", "save"} <= found.phases.keys()
    batch = {"global_batch_tokens": 512, "micro_batch_size": 4}
    shared = forecast_run(settled(batch=batch), _CPU, 2)
    assert shared is not None
    # Its gradients are in DDP's buckets, and each process has half of the rows.
    assert shared.phases["save"] == found.phases["save"] + _WEIGHTS


@pytest.mark.slow
def test_memory_advice_names_cause_and_remedies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe = settled(batch={"micro_batch_size": 64})
    machine = find_machine()
    known = dict(methods(recipe, machine))
    ways = [Candidate(recipe, machine, changes=known[name], evaluates=False) for name in _ADVICE]
    needed = [one.needed_bytes for one in Estimator().estimate_all(ways)]
    assert len(needed) == 3
    found = advice(recipe, _CPU, 1)
    assert found is not None
    assert found.startswith("in the ")
    assert "logits and loss" in found
    # According to the prediction the run fits, so the advice is the change that saves the most
    # memory.
    assert _named(found) == ways[needed.index(min(needed))].changes
    # If several changes fit, the advice is the first one, which costs the least speed.
    slightly_more = int(1.01 * max(needed) / _CPU_SHARE)
    monkeypatch.setattr(
        "firstlight.planner.plan.machine.free_memory_bytes", lambda _: slightly_more
    )
    found = advice(recipe, _CPU, 1)
    assert found is not None
    assert _named(found) == {"efficiency.loss_chunk_tokens": 1024}


def _named(advice: str) -> dict[str, Any]:
    """Return the change suggested by an advice."""
    key, value = advice.split("; with ")[1].split(" it would be")[0].split()
    return {key: int(value) if value.isdigit() else value}


def trying(monkeypatch: pytest.MonkeyPatch, fits: int, peak_bytes: int = 10**6) -> list[int]:
    """Replace the trial so that `fits` rows fit, and list the rows that were tried."""
    tried: list[int] = []

    def try_rows(recipe: Recipe, hardware: Hardware, rows: int) -> Trial | None:
        assert recipe.batch.rows == rows
        tried.append(rows)
        return Trial(peak_bytes, 8 / rows) if rows <= fits else None

    monkeypatch.setattr(automatic, "try_rows", try_rows)
    return tried


@pytest.mark.parametrize("fits, tried, chosen", [(8, [8], 8), (3, [8, 4, 2], 2)])
def test_plan_auto_tries_planned_settings_first(
    monkeypatch: pytest.MonkeyPatch, fits: int, tried: list[int], chosen: int
) -> None:
    asked, told = trying(monkeypatch, fits), list[str]()
    found = planned_recipe(settled(), _CPU, told.append)
    assert asked == tried
    assert found.batch.rows == chosen
    assert found.batch.accumulation(64) == 8 // chosen
    assert sum("does not fit, contrary to the plan" in line for line in told) == len(tried) - 1
    assert told[-1].startswith(f"plan: as it stands, micro-batch of {chosen} rows; peak memory")


@pytest.mark.slow
def test_plan_auto_without_fitting_candidate_raises_config_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = trying(monkeypatch, 0)
    with pytest.raises(ConfigError, match="not even a micro-batch of one row fits"):
        planned_recipe(settled(), _CPU, lambda _: None)
    assert asked == [8, 4, 2, 1]
    monkeypatch.setattr("firstlight.planner.plan.machine.free_memory_bytes", lambda _: 2**10)
    # The recipe already saves memory, so there is little left to try.
    saving = {"activation_checkpointing": "full", "loss_chunk_tokens": 64}
    least = settled(efficiency={"compile": False, "precision": "fp32", **saving})
    with pytest.raises(ConfigError, match="none of the plan's candidates fits"):
        planned_recipe(least, _CPU, lambda _: None)


def test_plan_auto_invalid_combination_raises_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    trying(monkeypatch, 8)
    wrong = settled(
        efficiency={"compile": False, "precision": "fp32", "optimizer_in_backward": True}
    )
    with pytest.raises(ConfigError, match="optimizer_in_backward"):
        planned_recipe(wrong, _CPU, lambda _: None)


def test_plan_auto_in_process_returns_recipe_messages_and_errors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: dict[str, Any] = {}

    def answer(value: dict[str, Any]) -> None:
        monkeypatch.setattr(automatic, "ask", lambda _, given, __: (said.update(given), value)[1])

    told: list[str] = []
    planned = settled(batch={"micro_batch_size": 2})
    written = parse_recipe({"data": {"dir": "/nowhere"}, "model": _MODEL})
    answer({"told": ["one", "two"], "recipe": planned.model_dump(mode="json")})
    found = planned_elsewhere(written, _CPU, told.append, "weights")
    assert found.model_dump() == planned.model_dump()
    assert told == ["one", "two"]
    assert set(said["recipe"]) == {"data", "model"}  # keys that the recipe does not set are open
    assert (said["what"], said["device"], said["init_from"]) == ("plan", "cpu", "weights")
    answer({"told": [], "problem": "nothing fits"})
    with pytest.raises(ConfigError, match="nothing fits"):
        planned_elsewhere(written, _CPU, told.append)
    answer(error_of("Failed", "ValueError: oh"))
    with pytest.raises(TrainingError, match="--plan auto failed: ValueError: oh"):
        planned_elsewhere(written, _CPU, told.append)


class Keeps:
    """Stores the recipe passed to it."""

    recipe: Recipe

    def forecast(self, recipe: Recipe, hardware: Hardware, processes: int) -> None:
        self.recipe = recipe

    def advise(self, *_: object) -> None:
        return None


@pytest.mark.parametrize(
    "seq_len, sample_tokens, efficiency, optimizer, checkpoint, phase",
    [
        pytest.param(
            *(2000, 10, {"precision": "fp32"}, "adamw", {"every_steps": 0}, "backward of loss"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            2000,
            10,
            {"precision": "bf16", "activation_checkpointing": "full", "loss_chunk_tokens": 128},
            "adamw",
            {"every_steps": 1},
            "backward",
            marks=pytest.mark.slow,
        ),
        (16, 10, {"precision": "fp32"}, "sgd", {"every_steps": 0}, "save"),
        pytest.param(
            *(16, 1400, {"precision": "fp32"}, "sgd", {"asynchronous": False}, "samples"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_forecast_covers_evaluation_samples_and_saves(
    recipe: dict[str, Any],
    seq_len: int,
    sample_tokens: int,
    efficiency: dict[str, Any],
    optimizer: str,
    checkpoint: dict[str, Any],
    phase: str,
) -> None:
    """Compared with everything that torch's allocator provides during a run, from setup to the last
    save.
    """
    model = {"model_type": "mistral", "hidden_size": 64, "max_position_embeddings": 2000}
    recipe["data"]["seq_len"] = seq_len
    recipe |= {
        "model": recipe["model"] | model,
        "batch": {"micro_batch_size": 1},
        "schedule": {"max_steps": 2, "warmup_steps": 1},
        "evaluation": {
            "every_steps": 1,
            "max_rows": 1,
            "sample_prompts": ["a" * 100],
            "sample_tokens": sample_tokens,
        },
        "efficiency": {"compile": False, "attention": "sdpa", **efficiency},
        "optimizer": {"name": optimizer},
        "checkpoint": checkpoint,
    }
    keeps = Keeps()
    with measured_memory() as found:
        firstlight.train(recipe, forecaster=keeps)
    predicted = forecast_run(parse_resolved_recipe(keeps.recipe.model_dump()), _CPU, 1)
    assert predicted is not None
    assert predicted.phase == phase
    assert predicted.peak_bytes == pytest.approx(found.peak_bytes, rel=0.03)


@pytest.mark.slow
def test_forecast_covers_average_of_last_weights(
    recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The means are stored in fp32 without sums, and the copies for the checkpoints have been
    freed.
    """
    cleared, peaks, keeps, clear = [], [], Keeps(), Snapshot.clear

    def watched(snapshot: Snapshot) -> None:
        cleared.append(snapshot)
        clear(snapshot)

    def measured(run: Run) -> None:
        assert cleared
        with measured_memory() as found:
            write_average(run)
        peaks.append(found.peak_bytes)

    monkeypatch.setattr(Snapshot, "clear", watched)
    monkeypatch.setattr("firstlight.training.loop.write_average", measured)
    recipe |= {
        "model": recipe["model"] | {"hidden_size": 256},
        "schedule": {"max_steps": 2, "warmup_steps": 1},
        "efficiency": {"compile": False, "precision": "fp32"},
        "checkpoint": {"every_steps": 1, "average_last": 2, "asynchronous": True},
    }
    firstlight.train(recipe, forecaster=keeps)
    predicted = forecast_run(parse_resolved_recipe(keeps.recipe.model_dump()), _CPU, 1)
    assert predicted is not None
    state = predicted.parts["weights"] + predicted.parts["optimizer_states"]
    assert peaks[0] > 4e6
    assert predicted.phases["averaging"] - state == pytest.approx(peaks[0], rel=0.03)

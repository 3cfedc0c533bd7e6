"""A run of several processes equals one of a single process: losses, samples, checkpoints, and
resuming with another number of processes and another engine.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from spawned import run_ranks

from firstlight.data.prepare import prepare
from firstlight.optim.schedule import BatchSchedule, ScheduleConfig, resolve_schedule
from firstlight.run_log.reader import read_length
from firstlight.tokenizer import Tokenizer
from firstlight.training.time_budget import length_of

pytestmark = pytest.mark.usefixtures("forked_processes")

_DRIVER = Path(__file__).with_name("train_driver.py")
_LAUNCHER = Path(__file__).parents[1] / "faults" / "launch_driver.py"


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    words = "the a cat dog sees runs home and then sleeps under old trees".split()
    draw = random.Random(0)
    text = " ".join(draw.choice(words) for _ in range(6000))
    (folder / "text.txt").write_text(text, encoding="utf-8")
    prepare([folder / "text.txt"], tokenizer, folder / "out", workers=1)
    return folder / "out"


def _recipe(shards: Path, run: Path, processes: int, **sections: Mapping[str, Any]) -> Any:
    recipe: dict[str, Any] = {
        "run": {"dir": str(run), "device": "cpu"},
        "model": {
            "model_type": "llama",
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "max_position_embeddings": 16,
        },
        "data": {"dir": str(shards), "seq_len": 16},
        # Eight rows per step, for any number of processes.
        "batch": {"micro_batch_size": 1, "global_batch_tokens": 128},
        "schedule": {"max_steps": 12},
        "evaluation": {"every_steps": 5, "max_rows": 7, "train_rows": 5, "sample_tokens": 8},
        "checkpoint": {"every_steps": 4, "keep_last": 20},
        "efficiency": {"precision": "fp32", "compile": False},
    }
    for name, values in sections.items():
        recipe[name] = {**recipe.get(name, {}), **values}
    return recipe


def _train(recipe: Any, processes: int, **options: Any) -> list[dict[str, Any]]:
    """Return the metrics of all steps, and check how every rank ended."""
    request = json.dumps({"recipe": recipe, **options})
    results = run_ranks(_DRIVER, [request], processes)
    for rank, result in enumerate(results):
        assert result.returncode == 0, f"rank {rank}: {result.stderr}"
        assert '"end"' in result.stdout
    lines = [json.loads(line) for line in results[0].stdout.splitlines() if line[:1] == "{"]
    return lines[:-1]


def _files(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    names = ("model.safetensors", "optimizer.safetensors")
    return {name: safetensors.torch.load_file(folder / name) for name in names}


def _checkpoint(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


_WAYS: dict[str, dict[str, Any]] = {
    "none": {},
    "ddp": {"engine": "ddp"},
    "fsdp": {"engine": "fsdp"},
    "hybrid": {"engine": "fsdp", "shard": 2},
    "tensor": {"tensor_parallel": 2},
    "tensor-fsdp": {"engine": "fsdp", "tensor_parallel": 2},
    "pipeline": {"pipeline": 2},
}
#: Two rows per step at first, and eight from step 8 on.
_RAMP = {"batch": {"ramp_start_tokens": 32, "ramp_steps": 7}}


def test_run_losses_and_validation_of_two_processes_equal_those_of_one(
    tmp_path: Path, shards: Path
) -> None:
    _require_same_losses(tmp_path, shards, [("ddp", 2), ("fsdp", 2)], 12)


def test_patience_ends_all_processes_at_same_step(tmp_path: Path, shards: Path) -> None:
    """The rate leaves every weight as it is, so the loss of step 2 stays the lowest."""
    more: dict[str, Any] = {
        "optimizer": {"learning_rate": 1e-30},
        "evaluation": {"every_steps": 2, "patience": 2},
    }
    recipe = _recipe(shards, tmp_path / "both", 2, distributed=_WAYS["fsdp"], **more)
    results = run_ranks(_DRIVER, [json.dumps({"recipe": recipe})], 2)
    assert [result.returncode for result in results] == [0, 0], results
    ends = [json.loads(result.stdout.splitlines()[-1]) for result in results]
    assert ends == [{"end": 6, "stopped": None}] * 2


def test_timed_run_processes_make_steps_decided_by_main_one(tmp_path: Path, shards: Path) -> None:
    minutes: dict[str, Any] = {
        "schedule": {"kind": "wsd", "max_steps": None, "max_minutes": 0.04, "warmup_steps": 2},
        "evaluation": {"every_steps": 0, "max_rows": 1, "train_rows": 0, "sample_tokens": 1},
        "checkpoint": {"every_steps": 0},
    }
    recipe = _recipe(shards, tmp_path / "both", 2, distributed=_WAYS["ddp"], **minutes)
    results = run_ranks(_DRIVER, [json.dumps({"recipe": recipe})], 2)
    assert [result.returncode for result in results] == [0, 0], results
    length = read_length(tmp_path / "both")
    ends = [json.loads(result.stdout.splitlines()[-1]) for result in results]
    assert ends == [{"end": length["max_steps"], "stopped": None}] * 2
    # As if the recipe had contained the number of steps, which may have been corrected.
    late = {**minutes["schedule"], "decay_starts_at_peak": True}  # the default of a decay to 0
    config = ScheduleConfig.model_validate(late)
    schedule = resolve_schedule(config, 1e-3, 100, BatchSchedule(4, 4), 32, length_of(length))
    found = [json.loads(line) for line in results[0].stdout.splitlines()[:-1]]
    rates = [1e-3 * schedule.lr_scale(step) for step in range(length["max_steps"])]
    assert [one["learning_rate"] for one in found] == pytest.approx(rates)
    stable = min(length["decided_at"], 10)
    known = {**minutes, "schedule": {"kind": "constant", "max_steps": stable, "warmup_steps": 2}}
    expected = _train(_recipe(shards, tmp_path / "one", 1, **known), 1)
    for one, other in zip(found[:stable], expected, strict=True):
        assert one["train/loss"] == pytest.approx(other["train/loss"], rel=1e-4)


@pytest.mark.slow
def test_run_fifty_losses_of_every_engine_equal_those_of_one_process(
    tmp_path: Path, shards: Path
) -> None:
    ways = [("tensor", 2), ("tensor-fsdp", 4), ("pipeline", 2), ("ddp", 2), ("fsdp", 2)]
    _require_same_losses(tmp_path, shards, ways, 50)


@pytest.mark.slow
def test_run_with_model_parallelism_supports_bf16_and_document_masking(
    tmp_path: Path, shards: Path
) -> None:
    more: dict[str, Any] = {
        "efficiency": {"precision": "bf16"},
        "data": {"document_masking": True},
        "schedule": {"max_steps": 6},
    }
    expected = _train(_recipe(shards, tmp_path / "none", 1, **more), 1)
    for name, processes in (("tensor", 2), ("pipeline", 2), ("tensor-fsdp", 4)):
        recipe = _recipe(shards, tmp_path / name, processes, distributed=_WAYS[name], **more)
        for one, other in zip(expected, _train(recipe, processes), strict=True):
            assert other["tokens_seen"] == one["tokens_seen"]
            assert other["train/loss"] == pytest.approx(one["train/loss"], rel=2e-3)
            if "val/loss" in one:
                assert other["val/loss"] == pytest.approx(one["val/loss"], rel=2e-3)
        found = _files(_checkpoint(tmp_path / name, 6))["optimizer.safetensors"]
        # Processes that compute the same rows use the same random numbers.
        ranks = {key for key in found if key.startswith("rng.rank")}
        assert ranks == ({"rng.rank1.cpu"} if name == "tensor-fsdp" else set())


def _require_same_losses(
    tmp_path: Path, shards: Path, ways: list[tuple[str, int]], steps: int
) -> None:
    schedule = {"max_steps": steps}
    expected = _train(_recipe(shards, tmp_path / "none", 1, schedule=schedule), 1)
    assert len(expected) == steps
    for engine, processes in ways:
        run = tmp_path / engine
        recipe = _recipe(shards, run, processes, schedule=schedule, distributed=_WAYS[engine])
        found = _train(recipe, processes)
        for one, two in zip(expected, found, strict=True):
            assert one["tokens_seen"] == two["tokens_seen"]
            for name in ("train/loss", "grad_norm"):
                assert two[name] == pytest.approx(one[name], rel=1e-5 if "norm" in name else 1e-6)
            assert ("val/loss" in one) == ("val/loss" in two)
            for name in ("val/loss", "train_eval/loss"):
                if name in one:
                    assert two[name] == pytest.approx(one[name], rel=1e-6)
        for name in ("metrics.jsonl", "samples.jsonl", "recipe.yaml"):
            assert (run / name).is_file(), name
        assert (run / "drawn-by").read_text(encoding="utf-8") == "0"


def test_run_resumes_with_other_process_count_and_engine(tmp_path: Path, shards: Path) -> None:
    _require_elastic(tmp_path, shards, [(1, "none"), (2, "fsdp"), (2, "ddp"), (1, "none")])


@pytest.mark.slow
def test_run_resumes_with_up_to_four_processes(tmp_path: Path, shards: Path) -> None:
    ways = [(1, "none"), (2, "ddp"), (4, "fsdp"), (4, "hybrid"), (2, "fsdp"), (1, "none")]
    _require_elastic(tmp_path, shards, ways)


@pytest.mark.slow
def test_run_resumes_with_and_without_tensor_parallelism(tmp_path: Path, shards: Path) -> None:
    ways = [(4, "tensor-fsdp"), (1, "none"), (2, "tensor"), (2, "fsdp"), (4, "tensor-fsdp")]
    _require_elastic(tmp_path, shards, [*ways, (2, "pipeline"), (2, "tensor")])


def test_batch_ramp_resumes_with_other_process_count(tmp_path: Path, shards: Path) -> None:
    _require_elastic(tmp_path, shards, [(2, "ddp"), (1, "none")], **_RAMP)


@pytest.mark.slow
def test_batch_ramp_resumes_in_pipeline(tmp_path: Path, shards: Path) -> None:
    _require_elastic(tmp_path, shards, [(2, "fsdp"), (2, "pipeline"), (2, "tensor")], **_RAMP)


def _require_elastic(
    tmp_path: Path, shards: Path, ways: list[tuple[int, str]], **more: Mapping[str, Any]
) -> None:
    """Check that four steps with different engines and numbers of processes equal those of one
    process, and that each resumes with exactly the state that the previous one saved.
    """
    more = {"schedule": {"max_steps": 4 * len(ways)}, **more}
    whole = _train(_recipe(shards, tmp_path / "whole", 1, **more), 1)
    run, parts = tmp_path / "run", []
    for number, (processes, engine) in enumerate(ways):
        recipe = _recipe(shards, run, processes, distributed=_WAYS[engine], **more)
        captured = tmp_path / f"captured-{number}"
        before = _checkpoint(run, 4 * number)
        copy = tmp_path / f"before-{number}"
        if number:
            shutil.copytree(before, copy)
        parts += _train_until(recipe, processes, 4 * number + 4, captured=str(captured))
        if number:
            expected, found = _files(copy), _files(captured)
            for name in expected:
                # Ranks that did not exist before get new random states.
                for key in (key for key in expected[name] if not key.startswith("rng.")):
                    assert torch.equal(found[name][key], expected[name][key]), (number, key)
            state = json.loads((copy / "trainer_state.json").read_text(encoding="utf-8"))
            loader = json.loads((captured / "loader.json").read_text(encoding="utf-8"))
            assert loader == state["loader"]
    assert [line["step"] for line in parts] == list(range(1, 4 * len(ways) + 1))
    for one, other in zip(whole, parts, strict=True):
        assert other["train/loss"] == pytest.approx(one["train/loss"], rel=1e-5)
        assert other["tokens_seen"] == one["tokens_seen"]


def _train_until(recipe: Any, processes: int, stop: int, **options: Any) -> list[dict[str, Any]]:
    """Continue from the newest checkpoint, and stop the run after a step."""
    lines = _train(recipe, processes, resume=True, until=stop, **options)
    assert lines[-1]["step"] == stop
    return lines


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_resumed_run_of_two_processes_equals_uninterrupted_run(
    tmp_path: Path, shards: Path, engine: str
) -> None:
    dropout = {"model_type": "gpt2", "resid_pdrop": 0.2, "embd_pdrop": 0.2}
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = {**sizes, **dropout, "max_position_embeddings": 16}
    options: dict[str, Any] = {"distributed": _WAYS[engine]}
    runs = []
    for name in ("whole", "parts"):
        recipe = _recipe(shards, tmp_path / name, 2, **options)
        recipe["model"] = model
        runs.append(recipe)
    whole = _train(runs[0], 2)
    first = _train_until(runs[1], 2, 8)
    rest = _train(runs[1], 2, resume=True)
    assert [line["train/loss"] for line in first + rest] == [line["train/loss"] for line in whole]
    one, other = (_files(_checkpoint(tmp_path / name, 12)) for name in ("whole", "parts"))
    assert any(key.startswith("rng.rank1.") for key in one["optimizer.safetensors"])
    for name in one:
        for key, tensor in one[name].items():
            assert torch.equal(other[name][key], tensor), key


def _deaths(steps: range) -> list[Any]:
    hows = ["SIGKILL", "error", "SIGSTOP"]
    return [(step % 2, step, hows[number % 3]) for number, step in enumerate(steps)]


def _require_restart(
    tmp_path: Path, shards: Path, deaths: list[tuple[int, int, str]], engine: str
) -> None:
    """Check that torch elastic restarts a run whose rank ends at any step, and that the final
    weights are bitwise equal to those of an undisturbed run.
    """
    distributed = {**_WAYS[engine], "timeout_seconds": 6}
    _train(_recipe(shards, tmp_path / "whole", 2, distributed=distributed), 2)
    expected = _files(_checkpoint(tmp_path / "whole", 12))
    for rank, step, how in deaths:
        run = tmp_path / f"{rank}-{step}-{how}"
        request = {
            "recipe": _recipe(shards, run, 2, distributed=distributed),
            "dies": {"rank": rank, "step": step, "how": how},
        }
        command = [sys.executable, str(_DRIVER), json.dumps(request)]
        options = json.dumps({"nproc": 2, "max_restarts": 1})
        launched = subprocess.run(
            [sys.executable, str(_LAUNCHER), options, json.dumps(command)],
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert launched.returncode == 0, launched.stderr
        told = "the ceiling fell down" if how == "error" else f"rank {rank}"
        assert told in launched.stderr
        assert "starting all ranks again (1 of 1)" in launched.stderr
        found = _files(_checkpoint(run, 12))
        for name in expected:
            assert found[name].keys() == expected[name].keys()
            for key, tensor in expected[name].items():
                assert torch.equal(found[name][key], tensor), (rank, step, how, key)


@pytest.mark.slow
def test_run_losing_a_rank_restarts_by_itself(tmp_path: Path, shards: Path) -> None:
    _require_restart(tmp_path, shards, [(1, 7, "SIGKILL")], "ddp")


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_run_may_lose_any_rank_at_any_step(tmp_path: Path, shards: Path, engine: str) -> None:
    _require_restart(tmp_path, shards, _deaths(range(1, 13)), engine)

"""Cooldowns: the state that a run shares with the run from which it branches."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from firstlight.checkpoint.checkpoint import load_trainer_state, verify_checkpoint
from firstlight.checkpoint.manifest import checkpoint_folder
from firstlight.checkpoint.selection import list_checkpoints
from firstlight.cli.main import main
from firstlight.errors import CheckpointError, ConfigError, FirstlightError, StorageError
from firstlight.planner.plan.processes import RunForecaster
from firstlight.recipe import load_recipe
from firstlight.report.report import draw_report
from firstlight.report.summary import findings_of
from firstlight.run_log.reader import Metrics, read_json_lines, read_run
from firstlight.training.cooldown import cooldown_recipe
from firstlight.training.loop import TrainResult, train

MEASURED = ("second", "mfu", "memory_bytes")


class StoppedError(Exception):
    """Ends a run from within."""


def stop_after(recipe: Any, step: int, **options: Any) -> None:
    def on_step(record: Mapping[str, Any]) -> None:
        if record["step"] == step:
            raise StoppedError

    with pytest.raises(StoppedError):
        train(recipe, on_step=on_step, **options)


def metrics(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the metrics by step, without those measured with a clock."""
    return {
        line["step"]: {k: v for k, v in line.items() if not any(m in k for m in MEASURED)}
        for line in read_json_lines(folder / "metrics.jsonl")
    }


def state_of(checkpoint: Path) -> dict[str, Any]:
    """Return everything that a checkpoint stores of a run's state except for its recipe."""
    verify_checkpoint(checkpoint)
    state = load_trainer_state(checkpoint)
    del state["recipe"], state["schedule"]
    names = ("model.safetensors", "optimizer.safetensors")
    return {"state": state, **{name: (checkpoint / name).read_bytes() for name in names}}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def cool(trunk: Path, steps: int, *overrides: tuple[str, str], **options: Any) -> TrainResult:
    recipe, branch_from = cooldown_recipe(trunk, steps, overrides)
    return train(recipe, branch_from=branch_from, **options)


@pytest.fixture(scope="module")
def trunk(tmp_path_factory: pytest.TempPathFactory, data: Path) -> dict[str, Any]:
    """Train a trunk of 12 steps at a constant learning rate, with dropout, and return its
    recipe.
    """
    recipe: dict[str, Any] = {
        "run": {"dir": str(tmp_path_factory.mktemp("trunk") / "trunk"), "device": "cpu"},
        "model": {
            "model_type": "gpt2",
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "max_position_embeddings": 32,
            "embd_pdrop": 0.2,
        },
        "data": {"dir": str(data), "seq_len": 32},
        "batch": {"micro_batch_size": 4, "gradient_accumulation_steps": 2},
        "schedule": {"kind": "constant", "max_steps": 12, "warmup_steps": 3},
        "evaluation": {"every_steps": 5, "max_rows": 4, "sample_tokens": 4},
        "checkpoint": {"every_steps": 2, "keep_last": 20},
        "efficiency": {"precision": "fp32", "compile": False, "loss_chunk_tokens": 0},
    }
    train(recipe)
    return recipe


def folder_of(recipe: Mapping[str, Any]) -> Path:
    return Path(recipe["run"]["dir"])


def copied(trunk: dict[str, Any], tmp_path: Path) -> Path:
    """Copy the trunk's folder."""
    return shutil.copytree(folder_of(trunk), tmp_path / "trunk")


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("shape", ["linear", "1-sqrt"])
def test_cooldown_is_bitwise_equal_to_end_of_wsd_run(
    trunk: dict[str, Any], tmp_path: Path, steps: int, shape: str
) -> None:
    place = copied(trunk, tmp_path)
    before = contents(place)
    found = cool(checkpoint_folder(place, 8), steps, ("schedule.decay_shape", shape)).run_folder
    assert found == tmp_path / "trunk-cooldown-8"
    assert contents(place) == before
    whole = {
        **trunk,
        "run": {**trunk["run"], "dir": str(tmp_path / "whole")},
        "schedule": {
            "kind": "wsd",
            "max_steps": 8 + steps,
            "warmup_steps": 3,
            "cooldown_steps": steps,
            "decay_shape": shape,
        },
    }
    train(whole)
    expected = metrics(tmp_path / "whole")
    assert metrics(found) == {step: expected[step] for step in range(9, 9 + steps)}
    assert metrics(found)[8 + steps]["learning_rate"] > 0
    last = list_checkpoints(found)[-1]
    assert state_of(last) == state_of(list_checkpoints(tmp_path / "whole")[-1])


def test_cooldown_without_disk_space_for_trunk_copy_raises(
    trunk: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = checkpoint_folder(copied(trunk, tmp_path), 8)
    # There is room for one checkpoint, but two exist: the copy and the one saved at the end.
    tensors = sum(f.stat().st_size for f in checkpoint.glob("*.safetensors"))
    usage, free = type(shutil.disk_usage("/")), tensors * 3 // 2
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9 - free, free))
    with pytest.raises(StorageError, match="the run's checkpoints need about"):
        cool(checkpoint, 1, ("checkpoint.every_steps", "0"))


@pytest.mark.parametrize("stopped_after", [9, 10, 11, 12])
def test_cooldown_stopped_resumes_bit_for_bit(
    trunk: dict[str, Any], tmp_path: Path, stopped_after: int
) -> None:
    place = copied(trunk, tmp_path)
    whole = cool(checkpoint_folder(place, 8), 5, ("run.dir", str(tmp_path / "whole"))).run_folder
    recipe, branch_from = cooldown_recipe(checkpoint_folder(place, 8), 5)
    stop_after(recipe, stopped_after, branch_from=branch_from)
    # The trunk is no longer needed.
    shutil.rmtree(place)
    broken = tmp_path / "trunk-cooldown-8"
    train(load_recipe(broken / "recipe.yaml"), resume=True)
    assert metrics(broken) == metrics(whole)
    assert list(metrics(broken)) == [9, 10, 11, 12, 13]
    assert state_of(list_checkpoints(broken)[-1]) == state_of(list_checkpoints(whole)[-1])
    assert (broken / "samples.jsonl").read_bytes() == (whole / "samples.jsonl").read_bytes()


def test_cooldown_killed_before_start_begins_with_same_command(
    trunk: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = checkpoint_folder(copied(trunk, tmp_path), 8)
    with monkeypatch.context() as patch:
        patch.setattr("firstlight.training.start.copy_checkpoint", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            cool(place, 2)
    first = cool(place, 2, resume=True).run_folder
    second = cool(place, 2, ("run.dir", str(tmp_path / "again"))).run_folder
    assert metrics(first) == metrics(second)
    # With --resume, an existing cooldown continues.
    assert cool(place, 2, resume=True).step == 10
    assert metrics(first) == metrics(second)


def test_cooldown_branches_do_not_change_continued_trunk(
    trunk: dict[str, Any], tmp_path: Path
) -> None:
    place = copied(trunk, tmp_path)
    ends = [cool(checkpoint_folder(place, step), 2) for step in (4, 8)]
    assert cool(place, 2).run_folder.name == "trunk-cooldown-12"
    longer = {
        **trunk,
        "run": {**trunk["run"], "dir": str(place)},
        "schedule": {**trunk["schedule"], "max_steps": 14},
    }
    train(longer, resume=True)
    assert {line["learning_rate"] for step, line in metrics(place).items() if step > 3} == {1e-3}
    tokens = [end.tokens_seen for end in ends]
    assert tokens == [metrics(end.run_folder)[end.step]["tokens_seen"] for end in ends]
    assert tokens[0] * 10 == tokens[1] * 6
    # A cooldown may also start from another cooldown's stable checkpoint, the one with which that
    # cooldown started.
    again = cool(checkpoint_folder(tmp_path / "trunk-cooldown-8", 8), 3)
    assert (again.run_folder.name, again.step) == ("trunk-cooldown-8-cooldown-8", 11)


def test_cooldown_of_wsd_run_keeps_its_shape_and_minimum(
    trunk: dict[str, Any], tmp_path: Path
) -> None:
    schedule = {
        "kind": "wsd",
        "epochs": 0.2,
        "warmup_ratio": 0.1,
        "decay_fraction": 0.25,
        "decay_shape": "1-sqrt",
        "min_learning_rate": 3e-5,
        "initial_learning_rate": 2e-5,
    }
    place = tmp_path / "wsd"
    train({**trunk, "run": {**trunk["run"], "dir": str(place)}, "schedule": schedule})
    ends = list_checkpoints(place)
    recipe, _ = cooldown_recipe(ends[1], 6)
    found = recipe.schedule
    assert (found.kind, found.max_steps, found.cooldown_steps) == ("wsd", 10, 6)
    assert (found.decay_shape, found.min_learning_rate) == ("1-sqrt", 3e-5)
    assert found.initial_learning_rate == 2e-5
    assert (found.epochs, found.warmup_ratio, found.min_lr_ratio) == (None, None, None)
    with pytest.raises(ConfigError, match="is in the decay, which begins after step"):
        cooldown_recipe(place, 6)


def test_cooldown_with_constant_loss_is_not_diverged(trunk: dict[str, Any]) -> None:
    """The model was already trained, so a loss that does not fall is not reported."""
    run = read_run(folder_of(trunk))
    losses = (np.arange(40), np.full(40, 3.0))
    flat = Metrics(np.arange(1.0, 41.0), {"train/loss": losses})
    still = dataclasses.replace(run, metrics=flat)
    assert [one.kind for one in findings_of(still)] == ["diverged"]
    start = {**run.start, "branched_from": "trunk/checkpoints/step-00000008"}
    branched = dataclasses.replace(still, starts=[start, run.start])
    assert findings_of(branched) == []


def refused(place: Path, kind: type[FirstlightError], says: str, *more: tuple[str, str]) -> None:
    with pytest.raises(kind, match=says) as error:
        cool(place, 2, *more)
    assert "\n" not in str(error.value)


def test_cooldown_impossible_request_prints_one_line(trunk: dict[str, Any], tmp_path: Path) -> None:
    place = copied(trunk, tmp_path)
    early = checkpoint_folder(place, 2)
    refused(early, ConfigError, "step 2 of .* is in the warm-up, which ends at step 3")
    ready = checkpoint_folder(place, 8)
    refused(ready, ConfigError, "sets schedule.max_steps to 10", ("schedule.max_steps", "20"))
    refused(ready, ConfigError, "unknown key schedule.shape", ("schedule.shape", "linear"))
    refused(ready, CheckpointError, "data's seq_len was 32", ("data.seq_len", "16"))
    assert not (tmp_path / "trunk-cooldown-8").exists()
    cool(ready, 2)
    refused(ready, CheckpointError, "already contains checkpoints")
    (ready / "trainer_state.json").write_text("{}")
    refused(ready, CheckpointError, "is damaged")
    (place / "checkpoints" / "bare").mkdir()
    shutil.copy(early / "config.json", place / "checkpoints" / "bare")
    shutil.copy(early / "model.safetensors", place / "checkpoints" / "bare")
    refused(
        place / "checkpoints" / "bare",
        CheckpointError,
        "does not contain optimizer state, which a cooldown",
    )
    cosine = {**trunk, "run": {**trunk["run"], "dir": str(tmp_path / "cosine")}}
    train({**cosine, "schedule": {"max_steps": 2}})
    refused(tmp_path / "cosine", ConfigError, "schedule.kind cosine, whose learning")


def test_cooldown_command_accepts_run_or_checkpoint(
    trunk: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # A forecast takes seconds in a separate process.
    for name in ("start", "forecast"):
        monkeypatch.setattr(RunForecaster, name, lambda *_: None)
    place = copied(trunk, tmp_path)
    assert main(["train", str(place), "--cooldown", "2", "--json"]) == 0
    folder = tmp_path / "trunk-cooldown-12"
    found = json.loads(capsys.readouterr().out)
    assert (found["step"], found["run_folder"]) == (14, str(folder))
    (branched,) = read_run(folder).what_happened
    assert branched["event"] == "branched"
    draw_report(folder)
    assert "step-00000012" in (folder / "report.html").read_text(encoding="utf-8")
    for arguments, says in (
        ((str(place), "--cooldown", "0"), "0 is not in the range"),
        ((str(place), "--cooldown", "2", "--best"), "omit --init-from, --best and --plan"),
        ((str(place), "--cooldown", "2", "--resume"), "give the path of a checkpoint, such as"),
        ((str(place),), "is a run folder, but train needs a recipe"),
        ((str(tmp_path / "none"), "--cooldown", "2"), "none"),
        ((str(place / "recipe.yaml"), "--cooldown", "2"), "is a file: pass the run folder"),
    ):
        assert main(["train", *arguments]) != 0
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert says in line

"""The evaluation before the first step, and runs without steps."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from firstlight.checkpoint.selection import list_checkpoints
from firstlight.cli.main import main
from firstlight.errors import DataError
from firstlight.lora.loading import load_model
from firstlight.report.report import draw_report
from firstlight.run_log.reader import read_json_lines, read_run
from firstlight.training.loop import train
from firstlight.weights.stored import WEIGHTS_NAME


def with_start(recipe: dict[str, Any], folder: Path, **evaluation: Any) -> dict[str, Any]:
    """Return the recipe with another folder and an evaluation before its first step."""
    return {
        **recipe,
        "run": {**recipe["run"], "dir": str(folder)},
        "model": {**recipe["model"]},
        "evaluation": {**recipe["evaluation"], "on_start": True, **evaluation},
    }


def lines(folder: str | Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return read_json_lines(Path(folder) / name)


def test_first_evaluation_is_step_0_and_leaves_training_unchanged(
    recipe: dict[str, Any], tmp_path: Path
) -> None:
    """The model has dropout, whose random numbers must not change."""
    recipe["model"] |= {"model_type": "gpt2", "embd_pdrop": 0.1, "resid_pdrop": 0.1}
    del recipe["model"]["num_key_value_heads"]
    recipe["efficiency"] = {"precision": "fp32"}
    recipe["evaluation"] |= {"train_rows": 2, "max_rows": 0}
    without, seen = train(recipe), []
    values = with_start(recipe, tmp_path / "with")
    with_it = train(values, on_step=lambda record: seen.append(record["step"]))
    start, *steps = lines(with_it.run_folder)
    assert start["step"] == start["tokens_seen"] == 0
    assert math.log(320) - 0.3 < start["val/loss"] < math.log(320) + 0.5
    assert start["train_eval/loss"] == pytest.approx(start["val/loss"], abs=0.2)
    assert "train/loss" not in start
    assert seen == [record["step"] for record in steps] == list(range(1, 13))
    before = lines(without.run_folder)
    assert [r["train/loss"] for r in steps] == [r["train/loss"] for r in before]
    assert [p.name for p in list_checkpoints(with_it.run_folder)] == [
        p.name for p in list_checkpoints(without.run_folder)
    ]
    for name in (WEIGHTS_NAME, "optimizer.safetensors"):
        own, other = (folder / name for folder in (with_it.checkpoint, without.checkpoint))
        assert own.read_bytes() == other.read_bytes()
    # An untrained model generates no sample texts and is not kept among the best checkpoints.
    assert {one["step"] for one in lines(with_it.run_folder, "samples.jsonl")} == {6, 12}


def test_first_evaluation_is_skipped_if_evaluated_only_at_end(
    recipe: dict[str, Any], tmp_path: Path
) -> None:
    values = with_start(recipe, tmp_path / "end", every_steps=0)
    values["schedule"] = {"max_steps": 2}
    assert [line["step"] for line in lines(train(values).run_folder)] == [1, 2]


def test_run_of_zero_steps_evaluates_saves_and_can_be_extended(
    recipe: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("firstlight.training.loop.draw_report", draw_report)
    # Schedule settings of the run that follows.
    recipe["schedule"] = {"max_steps": 6, "warmup_steps": 2, "decay_steps": 5}
    recipe["checkpoint"] |= {"keep_best": 1}
    recipe["evaluation"] |= {"every_steps": 3}
    straight = train(with_start(recipe, tmp_path / "straight"))
    values = with_start(recipe, tmp_path / "none")
    file = tmp_path / "recipe.yaml"
    file.write_text(json.dumps(values), encoding="utf-8")
    command = ["train", str(file), "--json"]
    assert main([*command, "--schedule.max_steps", "0"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["step"], found["tokens_seen"], found["stopped_by"]) == (0, 0, None)
    assert found["findings"] == []
    assert found["evaluation"]["loss"] == lines(straight.run_folder)[0]["val/loss"]
    assert [p.name for p in list_checkpoints(tmp_path / "none")] == ["step-00000000"]
    assert load_model(found["checkpoint"]).model.config.vocab_size == 320
    assert "complete: 0 steps" in (tmp_path / "none" / "report.html").read_text(encoding="utf-8")
    run = read_run(tmp_path / "none")
    assert (run.last_step, run.max_steps, len(run.samples)) == (0, 0, 1)
    before = (tmp_path / "none" / "metrics.jsonl").read_bytes()
    # Nothing is left to do, and nothing is lost.
    assert main([*command, "--schedule.max_steps", "0", "--resume"]) == 0
    assert "the run is complete: step 0 of 0" in " ".join(capsys.readouterr().err.split())
    assert (tmp_path / "none" / "metrics.jsonl").read_bytes() == before
    # Further steps equal those of a run that had this length from the start.
    result = train(values, resume=True)
    assert (result.checkpoint / WEIGHTS_NAME).read_bytes() == (
        straight.checkpoint / WEIGHTS_NAME
    ).read_bytes()
    for own, other in zip(lines(result.run_folder), lines(straight.run_folder), strict=True):
        same = ("step", "train/loss", "val/loss", "learning_rate")
        assert [own.get(key) for key in same] == [other.get(key) for key in same]


def test_run_of_zero_steps_saves_starting_model_unchanged(
    recipe: dict[str, Any], tmp_path: Path
) -> None:
    recipe["schedule"] = {"max_steps": 3}
    first = train(recipe)
    assert first.evaluation is not None
    values = with_start(recipe, tmp_path / "from", every_steps=2)
    second = train(values, init_from=first.checkpoint)
    assert lines(second.run_folder)[0]["val/loss"] == first.evaluation.loss
    values = with_start(recipe, tmp_path / "as-it-is")
    values["schedule"] = {"max_steps": 0}
    third = train(values, init_from=first.checkpoint)
    ours, theirs = (load_model(one.checkpoint).model.state_dict() for one in (third, first))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_run_ended_during_first_evaluation_repeats_it_on_resume(
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = with_start(recipe, tmp_path / "run")
    values["schedule"] = {"max_steps": 3}
    straight = train(with_start(values, tmp_path / "straight"))

    def cut_short(*_: object) -> None:
        raise DataError("shard 0 was cut short")

    with monkeypatch.context() as patch:
        patch.setattr("firstlight.training.loop.evaluate", cut_short)
        with pytest.raises(DataError, match=r"cut short \(saved at step 0\)"):
            train(values)
    assert lines(tmp_path / "run") == []
    result = train(values, resume=True)
    for own, other in zip(lines(result.run_folder), lines(straight.run_folder), strict=True):
        same = ("step", "train/loss", "val/loss")
        assert [own.get(key) for key in same] == [other.get(key) for key in same]


def test_plan_of_zero_steps_reports_no_steps(
    recipe: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe["schedule"] = {"max_steps": 0}
    file = tmp_path / "recipe.yaml"
    file.write_text(json.dumps(recipe), encoding="utf-8")
    assert main(["plan", str(file), "--no-search"]) == 0
    assert "the recipe's run: no steps" in capsys.readouterr().out


def test_train_summary_reports_total_time_and_median_rates(
    recipe: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    recipe["schedule"] = {"max_steps": 3}
    result = train(recipe, progress=True)
    steps = lines(result.run_folder)
    middle = {key: sorted(line[key] for line in steps)[1] for key in steps[0] if key != "step"}
    summary = result.summary
    assert summary.seconds > sum(line["seconds"] for line in steps)
    assert summary.step_seconds == middle["seconds"]
    assert summary.samples_per_second == middle["samples_per_second"]
    assert summary.tokens_per_second == middle["tokens_per_second"]
    assert str(summary) in " ".join(capsys.readouterr().err.split())

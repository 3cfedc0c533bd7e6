"""Runs that `evaluation.patience` ends after evaluations without a lower validation loss."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from firstlight.checkpoint.checkpoint import load_trainer_state
from firstlight.checkpoint.manifest import checkpoint_folder, saved_checkpoints
from firstlight.cli.main import main
from firstlight.data.prepare import prepare
from firstlight.errors import ConfigError
from firstlight.report.report import draw_report
from firstlight.run_log.reader import read_json_lines, read_run
from firstlight.tokenizer import Tokenizer
from firstlight.training.loop import train
from firstlight.training.processes import StopRequestedError
from firstlight.training.run import Run
from firstlight.training.validation import evaluate_dataset
from firstlight.weights.stored import WEIGHTS_NAME

#: Validation loss by step.
_LOSSES = {3: 5.0, 6: 4.0, 9: 4.5, 12: 4.0, 15: 4.6, 18: 3.0}
#: A rate that leaves every weight as it is, so that all validation losses are equal.
_NO_RATE = {"learning_rate": 1e-30}


@pytest.fixture
def losses(recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return a recipe of 18 steps whose validation losses are `_LOSSES`."""
    real, began, step = evaluate_dataset, Run.begin_step, [0]

    def evaluated(*arguments: Any, key: str, **more: Any) -> Any:
        found, parts = real(*arguments, key=key, **more)
        return (dataclasses.replace(found, loss=_LOSSES[step[0]]), parts)

    def counted(run: Run) -> float:
        step[0] = run.state.step + 1
        return began(run)

    monkeypatch.setattr(Run, "begin_step", counted)
    monkeypatch.setattr("firstlight.training.validation.evaluate_dataset", evaluated)
    recipe["evaluation"] |= {"every_steps": 3, "max_rows": 1, "samples_at": "epoch"}
    recipe["checkpoint"] = {"every_steps": 5, "keep_last": 1}
    recipe["schedule"]["max_steps"] = 18
    recipe["efficiency"] = {"precision": "fp32"}
    return recipe


def run_in(recipe: dict[str, Any], folder: Path, **evaluation: Any) -> dict[str, Any]:
    """Return the recipe with another run folder and other evaluation keys."""
    return {
        **recipe,
        "run": {**recipe["run"], "dir": str(folder)},
        "evaluation": {**recipe["evaluation"], **evaluation},
    }


def events(folder: Path) -> list[dict[str, Any]]:
    return read_json_lines(folder / "events.jsonl")


def stop_in_training_rows(key: str, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the evaluation of the training rows after `step` end the run like a signal."""
    from firstlight.training import validation

    real = validation.evaluate_dataset

    def stopped(program: Any, dataset: Any, **more: Any) -> Any:
        if more["key"] == key and stopped_at[0] == step:
            raise StopRequestedError
        return real(program, dataset, **more)

    stopped_at, began = [0], Run.begin_step

    def counted(run: Run) -> float:
        stopped_at[0] = run.state.step + 1
        return began(run)

    monkeypatch.setattr(Run, "begin_step", counted)
    monkeypatch.setattr(validation, "evaluate_dataset", stopped)


@pytest.mark.parametrize(("patience", "step"), [(1, 9), (2, 12), (3, 15), (4, 18), (0, 18)])
def test_run_ends_after_evaluations_without_lower_loss(
    losses: dict[str, Any], patience: int, step: int
) -> None:
    losses["evaluation"]["patience"] = patience
    result = train(losses)
    assert (result.step, result.stopped_by) == (step, None)
    assert [line["step"] for line in read_json_lines(result.run_folder / "metrics.jsonl")] == [
        *range(1, step + 1)
    ]
    if step < 18:
        # A loss that is equal to the lowest one is not lower, but its checkpoint is as good.
        best = 6 if step < 12 else 12
        assert result.best_checkpoint == checkpoint_folder(result.run_folder, best)
        assert [one.step for one in saved_checkpoints(result.run_folder)] == sorted({best, step})
        found = {"step": step, "event": "early stop", "evaluations": patience}
        assert events(result.run_folder) == [found]
    else:
        assert events(result.run_folder) == []
    # Sample texts are generated once, after the last step, although no epoch ended there.
    samples = read_json_lines(result.run_folder / "samples.jsonl")
    assert samples[-1]["step"] == step


def test_run_ended_by_patience_is_complete_in_report_and_messages(
    losses: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("firstlight.training.loop.draw_report", draw_report)
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(losses), encoding="utf-8")
    assert main(["train", str(file), "--json", "--patience", "1"]) == 0
    told = capsys.readouterr()
    found = json.loads(told.out)
    assert (found["step"], found["stopped_by"]) == (9, None)
    words = " ".join(told.err.split())
    assert "no new lowest validation loss in 1 evaluation, so the run ends" in words
    assert f"best checkpoint: {found['best_checkpoint']}" in words
    assert found["best_checkpoint"].endswith("step-00000006")
    folder = Path(found["run_folder"])
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "complete: 9 steps" in page
    assert "no new lowest validation loss in 1 evaluations" in page
    assert read_run(folder).max_steps == 9
    before = (folder / "metrics.jsonl").read_bytes()
    assert main(["train", str(file), "--json", "--patience", "1", "--resume"]) == 0
    told = capsys.readouterr()
    assert "the run is complete: step 9 of 18; to continue, raise evaluation.patience" in " ".join(
        told.err.split()
    )
    assert (folder / "metrics.jsonl").read_bytes() == before
    # With more patience, the run continues where it ended.
    assert main(["train", str(file), "--json", "--patience", "4", "--resume"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 18
    assert read_run(folder).max_steps == 18


def test_resumed_run_ends_at_same_step_with_same_weights(
    losses: dict[str, Any], tmp_path: Path
) -> None:
    straight = train(run_in(losses, tmp_path / "straight", patience=3))

    def stop(record: Any) -> None:
        if record["step"] == 11:
            raise InterruptedError

    values = run_in(losses, tmp_path / "resumed", patience=3)
    with pytest.raises(InterruptedError):
        train(values, on_step=stop)
    resumed = train(values, resume=True)
    assert (resumed.step, straight.step) == (15, 15)
    for name in (WEIGHTS_NAME, "optimizer.safetensors", "trainer_state.json"):
        own, other = ((one.checkpoint / name).read_bytes() for one in (resumed, straight))
        if name.endswith(".json"):
            own = own.replace(b"/resumed", b"/straight")
        assert own == other
    assert events(resumed.run_folder) == events(straight.run_folder)


def test_repeated_evaluation_counts_once(
    losses: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is stopped during an evaluation repeats it, and the loss is not counted again."""
    losses["evaluation"] |= {"patience": 2, "train_rows": 1}
    with monkeypatch.context() as patch:
        stop_in_training_rows("train_eval/loss", 9, patch)
        assert train(losses).step == 9
    state = load_trainer_state(checkpoint_folder(Path(losses["run"]["dir"]), 9))
    assert (state["worse_evaluations"], state["pending"]["step"]) == (1, 9)
    assert train(losses, resume=True).step == 12


def test_timed_run_ends_by_patience_before_its_time(recipe: dict[str, Any]) -> None:
    recipe["schedule"] = {"kind": "wsd", "max_minutes": 30, "warmup_steps": 2}
    recipe["efficiency"] = {"precision": "fp32", "compile": False}
    recipe["optimizer"] = _NO_RATE
    recipe["evaluation"] |= {"every_steps": 2, "patience": 2}
    result = train(recipe)
    assert (result.step, result.stopped_by) == (6, None)
    assert train(recipe, resume=True).step == 6


def test_branch_of_run_ended_by_patience_trains_its_own_steps(
    losses: dict[str, Any], tmp_path: Path
) -> None:
    trunk = train(run_in(losses, tmp_path / "trunk", patience=1))
    values = run_in(losses, tmp_path / "branch", patience=1)
    result = train(values, branch_from=trunk.checkpoint)
    # The trunk's lowest loss, 4.0, still applies: step 12 only equals it.
    assert result.step == 12


@pytest.mark.parametrize(
    ("section", "key"),
    [("checkpoint", "keep_best"), ("checkpoint", "every_steps"), ("evaluation", "every_steps")],
)
def test_patience_without_kept_best_checkpoint_is_refused(
    recipe: dict[str, Any], section: str, key: str
) -> None:
    recipe["evaluation"]["patience"] = 2
    recipe[section][key] = 0
    with pytest.raises(ConfigError, match=f"which needs {section}.{key} above 0"):
        train(recipe)


def test_patience_without_validation_split_is_refused(
    recipe: dict[str, Any], tmp_path: Path, corpus: Path, tokenizer: Tokenizer
) -> None:
    prepare([corpus], tokenizer, tmp_path / "data", val_fraction=0)
    recipe["data"]["dir"] = str(tmp_path / "data")
    recipe["evaluation"]["patience"] = 2
    with pytest.raises(ConfigError, match="the data has no validation split"):
        train(recipe)

"""Findings reported for runs that went wrong, and for runs that did not."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from firstlight.checkpoint.checkpoint import load_trainer_state
from firstlight.checkpoint.manifest import checkpoint_folder, saved_checkpoints
from firstlight.checkpoint.selection import resolve_model_folder
from firstlight.cli.main import main
from firstlight.data.prepare import prepare
from firstlight.errors import CheckpointError, ConfigError
from firstlight.evaluation.perplexity import load_for_evaluation
from firstlight.report.compare import compare, warnings_of
from firstlight.report.report import comparison_page, run_page
from firstlight.report.summary import findings_of
from firstlight.run_log.reader import read_run
from firstlight.tokenizer import Tokenizer
from firstlight.training.loop import train
from firstlight.training.run import Run
from firstlight.training.step import StepResult
from firstlight.training.validation import evaluate_dataset
from report_runs import Page, record, validation, write_run

_UNIFORM = math.log(1000)


def run_of(
    folder: Path,
    losses: Sequence[float],
    *,
    val: dict[int, float] | None = None,
    start: dict[str, Any] | None = None,
    epoch: float = 3.0,
    **recipe: Any,
) -> Path:
    """Return a run with a vocabulary of 1,000 and 5 warm-up steps, unless `start` differs."""
    records = [
        record(
            step,
            **{"train/loss": loss, "epoch": epoch * step / len(losses)},
            **(validation(val[step]) if val and step in val else {}),
        )
        for step, loss in enumerate(losses, 1)
    ]
    first = {"step": 0, "max_steps": len(losses), "warmup_steps": 5, "init_from": None}
    model = {"model_type": "llama", "vocab_size": 1000}
    starts = [{**first, **(start or {})}]
    return write_run(folder, records, starts=starts, recipe={"model": model, **recipe})


def found_in(folder: Path) -> list[tuple[str, int]]:
    return [(one.kind, one.since_step) for one in findings_of(read_run(folder))]


def falling(count: int, first: float = 7.0, last: float = 3.0) -> list[float]:
    return [first + (last - first) * n / max(count - 1, 1) for n in range(count)]


@pytest.mark.parametrize(
    ("val", "since"),
    [
        ({20: 5.0, 40: 4.0, 60: 4.2}, 40),
        ({20: 4.0, 40: 4.3, 60: 4.1}, 20),
        ({20: 5.0, 40: 4.0, 60: 4.039}, None),  # noise
        ({20: 0.5, 40: 0.4, 60: 0.409}, None),  # less than a hundredth of a nat
        ({20: 5.0, 40: 4.5, 60: 4.0}, None),
        ({60: 4.0}, None),
        ({}, None),
    ],
)
def test_findings_rising_validation_loss_is_overfitting(
    tmp_path: Path, val: dict[int, float], since: int | None
) -> None:
    folder = run_of(tmp_path / "run", falling(60), val=val)
    assert found_in(folder) == ([] if since is None else [("overfitting", since)])


def test_findings_rising_training_loss_is_not_overfitting(tmp_path: Path) -> None:
    losses = [*falling(40), *([6.0] * 20)]
    assert found_in(run_of(tmp_path / "run", losses, val={40: 4.0, 60: 6.0})) == []


def test_findings_overfitting_gives_advice(tmp_path: Path) -> None:
    folder = run_of(tmp_path / "run", falling(60), val={40: 4.0, 60: 4.25}, epoch=4.7)
    (found,) = findings_of(read_run(folder))
    assert found.text == "validation loss rose since step 40 (from 4.0000 to 4.2500): overfitting"
    assert "(the run took 4.7 epochs)" in found.advice
    assert "end the run at step 40 (schedule.max_steps), or use a smaller model" in found.advice
    assert "no checkpoint with a validation loss was kept" in found.advice
    assert found.as_json()["best_val/loss"] == 4.0
    tuned = run_of(
        tmp_path / "tuned", falling(60), val={40: 4.0, 60: 4.25}, start={"init_from": "model"}
    )
    assert "or lower the learning rate" in findings_of(read_run(tuned))[0].advice


_RISING = [_UNIFORM, *([7.1] * 59)]


@pytest.mark.parametrize(
    ("losses", "options", "expected"),
    [
        (falling(60), {}, None),
        # Worse than guessing: the untrained model's loss is about ln 1000 = 6.91.
        ([6.9, 7.5, *([700_000.0] * 40)], {}, 2),
        ([*falling(30, 7.0, 4.0), *([7.2] * 30)], {}, 31),
        # A single outlier at the end is not a divergence.
        ([*falling(59), 900.0], {}, None),
        # Weights from a very different text that adapt.
        (falling(30, 15.0, 9.0), {"start": {"init_from": "model"}}, None),
        # A good model that was ruined.
        ([3.0, *([12.0] * 30)], {"start": {"init_from": "model"}}, 2),
        # A good model that continues on similar text.
        ([3.0] * 60, {"start": {"init_from": "model"}}, None),
        ([3.0] * 60, {"lora": {"rank": 8}}, None),
        # The loss never fell.
        ([6.95] * 60, {}, 1),
        (falling(60, 6.95, 6.94), {}, 1),
        (falling(60, 6.95, 6.8), {}, None),
        # Too few steps for a finding, or still in the warm-up.
        ([6.95] * 12, {}, None),
        ([6.95] * 60, {"start": {"warmup_steps": 50}}, None),
        ([6.95, 7.2] * 10, {"start": {"warmup_steps": 20}}, None),
        ([6.9, *([5000.0] * 12)], {"start": {"warmup_steps": 100}}, 2),
        ([6.9, 5000.0], {}, None),
        # For pairs, guessing gives ln 2, and slightly higher losses are common.
        ([0.693] * 60, {"preference": {"beta": 0.1}}, None),
        ([0.693, *([0.9] * 59)], {"preference": {"beta": 0.1}}, None),
        ([0.693, *([40.0] * 59)], {"preference": {"beta": 0.1}}, 2),
        # Without the vocabulary size, divergence can't be detected.
        (_RISING, {"model": {}}, None),
        (_RISING, {}, 2),
        ([], {}, None),
    ],
)
def test_findings_loss_above_guessing_or_never_falling_is_diverged(
    tmp_path: Path, losses: list[float], options: dict[str, Any], expected: int | None
) -> None:
    folder = run_of(tmp_path / "run", losses, **options)
    assert found_in(folder) == ([] if expected is None else [("diverged", expected)])


def test_findings_diverged_run_is_not_overfitting(tmp_path: Path) -> None:
    losses = [*falling(30), *([5000.0] * 30)]
    assert found_in(run_of(tmp_path / "run", losses, val={30: 4.0, 60: 900.0})) == [
        ("diverged", 31)
    ]


def test_findings_run_without_warmup_lines_uses_recipe(tmp_path: Path) -> None:
    losses = [6.95] * 60
    known = {"starts": [{"step": 0, "max_steps": 60}]}
    records = [record(step, **{"train/loss": loss}) for step, loss in enumerate(losses, 1)]
    for warmup, expected in ((None, [("diverged", 1)]), (50, [])):
        recipe = {"model": {"vocab_size": 1000}, "schedule": {"warmup_steps": warmup}}
        folder = write_run(tmp_path / f"run{warmup}", records, **known, recipe=recipe)  # type: ignore[arg-type]
        assert found_in(folder) == expected


@pytest.mark.slow
def test_findings_are_shown_in_reports(tmp_path: Path) -> None:
    over = run_of(tmp_path / "over", falling(60), val={40: 4.0, 60: 4.25})
    lost = run_of(tmp_path / "lost", [6.9, *([5000.0] * 59)])
    good = run_of(tmp_path / "good", falling(60), val={40: 4.0, 60: 3.9})
    pages = [Page(run_page(read_run(run))).harmless() for run in (over, lost, good)]
    texts = [" ".join(page.texts("main")) for page in pages]
    assert "complete: 60 steps, overfitting" in texts[0]
    assert "validation loss rose since step 40 (from 4.0000 to 4.2500): overfitting" in texts[0]
    assert "diverged: 60 steps" in texts[1]
    assert "is above that of guessing tokens at random (6.9078)" in texts[1]
    assert "What helps" not in texts[2]
    states = [a["class"].split() for page in pages for _, a in page.elements if "class" in a]
    assert [one for one in states if one[0] == "state"] == [
        ["state"],
        ["state", "diverged"],
        ["state", "complete"],
    ]
    found = compare([read_run(run) for run in (over, lost, good)])
    assert [text.split(":")[0] for text in warnings_of(found)] == ["over", "lost"]
    assert all(
        text in " ".join(Page(comparison_page(found)).texts("main")) for text in warnings_of(found)
    )


# --- real runs -------------------------------------------------------------------------------


@pytest.fixture
def scripted(recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return a recipe whose validation loss is 5, 4, 4.5, 4.6 after steps 3, 6, 9 and 12."""
    real = evaluate_dataset

    def evaluated(*arguments: Any, **more: Any) -> Any:
        found, _ = real(*arguments, **more)
        step = int(monkeyed["step"])
        return dataclasses.replace(found, loss={3: 5.0, 6: 4.0, 9: 4.5, 12: 4.6}[step]), {}

    monkeyed = {"step": 0}
    whole = Run.begin_step

    def counted(run: Run) -> float:
        lr_scale = whole(run)
        monkeyed["step"] = run.state.step
        return lr_scale

    monkeypatch.setattr(Run, "begin_step", counted)
    monkeypatch.setattr("firstlight.training.validation.evaluate_dataset", evaluated)
    recipe["evaluation"] = {
        "every_steps": 3,
        "max_rows": 1,
        "sample_prompts": [],
        "on_start": False,
    }
    recipe["checkpoint"] = {"every_steps": 5, "keep_last": 1}
    return recipe


def kept(recipe: dict[str, Any]) -> list[int]:
    return [one.step for one in saved_checkpoints(Path(recipe["run"]["dir"]))]


def test_best_checkpoint_is_kept_and_found(scripted: dict[str, Any]) -> None:
    result = train(scripted)
    folder = Path(scripted["run"]["dir"])
    assert kept(scripted) == [6, 12]
    assert result.best_checkpoint == checkpoint_folder(folder, 6)
    assert [(one.kind, one.since_step) for one in result.findings] == [("overfitting", 6)]
    assert not result.diverged
    assert "--best uses the checkpoint of that step" in result.findings[0].advice
    assert resolve_model_folder(folder) == checkpoint_folder(folder, 12)
    assert resolve_model_folder(folder, best=True) == checkpoint_folder(folder, 6)
    assert load_for_evaluation(folder, best=True).folder == checkpoint_folder(folder, 6)
    # If the best checkpoint is damaged, the second best is used.
    (checkpoint_folder(folder, 6) / "config.json").write_text("{}")
    assert resolve_model_folder(folder, best=True) == checkpoint_folder(folder, 12)
    with pytest.raises(ConfigError, match="--best requires a run folder"):
        resolve_model_folder(checkpoint_folder(folder, 12), best=True)
    with pytest.raises(ConfigError, match="did you mean 'run'"):
        resolve_model_folder(folder.parent / "rum", best=True)


@pytest.mark.parametrize(
    ("config", "steps"),
    [
        ({"keep_best": 0}, [12]),
        ({"keep_best": 2}, [6, 9, 12]),
        # With checkpoints at the end only, no other checkpoint is kept.
        ({"every_steps": 0}, [12]),
    ],
)
def test_best_checkpoints_are_kept_up_to_requested_number(
    scripted: dict[str, Any], config: dict[str, int], steps: list[int]
) -> None:
    scripted["checkpoint"] |= config
    result = train(scripted)
    # No checkpoint has a lower loss than the best: the second one was due anyway.
    assert kept(scripted) == ([6, 12] if steps == [6, 9, 12] else steps)
    assert result.best_checkpoint == checkpoint_folder(result.run_folder, kept(scripted)[0])


def test_best_checkpoint_is_known_after_resume(scripted: dict[str, Any]) -> None:
    def stop(record: Any) -> None:
        if record["step"] == 11:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        train(scripted, on_step=stop)
    assert kept(scripted) == [6, 10]
    assert train(scripted, resume=True).best_checkpoint is not None
    assert kept(scripted) == [6, 12]
    state = load_trainer_state(checkpoint_folder(Path(scripted["run"]["dir"]), 12))
    assert state["best_val_loss"] == 4.0


def test_best_checkpoint_without_validation_is_none(
    recipe: dict[str, Any], tmp_path: Path, corpus: Path, tokenizer: Tokenizer
) -> None:
    prepare([corpus], tokenizer, tmp_path / "data", val_fraction=0)
    recipe["data"]["dir"] = str(tmp_path / "data")
    result = train(recipe)
    assert result.best_checkpoint is None
    assert kept(recipe) == [8, 12]
    with pytest.raises(CheckpointError, match="validation loss"):
        resolve_model_folder(recipe["run"]["dir"], best=True)


def run_main(recipe: dict[str, Any], *options: str) -> int:
    path = Path(recipe["run"]["dir"]).parent / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe), "utf-8")
    return main(["train", str(path), "--json", *options])


def test_train_overfitting_is_reported_with_exit_code_0(
    scripted: dict[str, Any], capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert run_main(scripted) == 0
    out, err = capfdbinary.readouterr()
    found = json.loads(out)
    assert (found["diverged"], found["findings"][0]["since_step"]) == (False, 6)
    assert found["best_checkpoint"].endswith("step-00000006")
    assert b"warning: validation loss rose since step 6 (from 4.0000 to 4.6000): overfitting" in err
    assert b"advice: use more text" in err


def test_train_diverged_run_exits_with_76(
    recipe: dict[str, Any],
    capfdbinary: pytest.CaptureFixture[bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = Run.end_step

    def lost(run: Run, result: StepResult, lr_scale: float) -> None:
        loss = result.loss if run.state.step < 3 else 5000.0
        real(run, dataclasses.replace(result, loss=loss), lr_scale)

    monkeypatch.setattr(Run, "end_step", lost)
    assert run_main(recipe) == 76
    out, err = capfdbinary.readouterr()
    assert json.loads(out)["diverged"] is True
    assert b"is above that of guessing tokens at random (5.7683)" in err
    assert kept(recipe)[-1] == 12
    # Resuming the completed run gives the same exit code.
    assert run_main(recipe, "--resume") == 76


def test_train_run_ended_by_guard_exits_with_76(
    recipe: dict[str, Any],
    capfdbinary: pytest.CaptureFixture[bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = Run.end_step

    def broken(run: Run, result: StepResult, lr_scale: float) -> None:
        for _ in range(run.guard.config.max_skipped_steps):
            run.guard.accepts(math.nan, math.nan)
        real(run, dataclasses.replace(result, loss=math.nan, skipped=True), lr_scale)

    monkeypatch.setattr(Run, "end_step", broken)
    assert run_main(recipe) == 76
    out, _ = capfdbinary.readouterr()
    assert json.loads(out)["error"]["type"] == "DivergedError"
    (found,) = findings_of(read_run(Path(recipe["run"]["dir"])))
    assert (found.kind, found.since_step) == ("diverged", 1)
    assert "steps in a row were skipped" in found.text or "this step was skipped" in found.text

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
import re
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import yaml

from firstlight.checkpoint.checkpoint import verify_checkpoint
from firstlight.checkpoint.manifest import sealed
from firstlight.checkpoint.selection import list_checkpoints, newest_checkpoint
from firstlight.cli.main import main
from firstlight.data.corpus import TokenDataset
from firstlight.data.prepare import prepare
from firstlight.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    FirstlightError,
    InputError,
    ModelError,
    StorageError,
    TrainingError,
)
from firstlight.evaluation.perplexity import evaluate
from firstlight.lora.loading import load_model
from firstlight.models import GPT2Config, LlamaConfig, empty_model
from firstlight.optim.config import OptimizerConfig
from firstlight.optim.schedule import Schedule
from firstlight.recipe import load_recipe, parse_recipe
from firstlight.report.report import draw_report
from firstlight.run_log.reader import last_start, read_json_lines, read_run
from firstlight.tokenizer import Tokenizer, train_tokenizer
from firstlight.training.loop import RunAhead, TrainResult, train
from firstlight.training.resuming import _as_written_now
from firstlight.training.run import Run
from firstlight.training.step import Passes, run_passes
from firstlight.weights.loading import embedding_name
from firstlight.weights.stored import WEIGHTS_NAME

_KEYS = {
    "step",
    "train/loss",
    "learning_rate",
    "grad_norm",
    "tokens_seen",
    "epoch",
    "tokens_per_second",
    "learned_tokens_per_second",
    "samples_per_second",
    "mfu",
    "memory_bytes",
    "seconds",
    "data_wait_seconds",
    "save_stall_seconds",
    "skipped_steps",
}
_EVALUATION_KEYS = {"val/loss", "perplexity", "bits_per_byte"}


class StoppedError(Exception):
    """Ends a run from within, like Ctrl-C."""


def changed(recipe: dict[str, Any], **sections: dict[str, Any]) -> dict[str, Any]:
    """Return the recipe with some keys of some sections changed."""
    result = copy.deepcopy(recipe)
    for section, values in sections.items():
        result[section] = {**result.get(section, {}), **values}
    return result


def run_folder(recipe: dict[str, Any]) -> Path:
    return Path(recipe["run"]["dir"])


def metrics(recipe: dict[str, Any]) -> list[dict[str, Any]]:
    return read_json_lines(run_folder(recipe) / "metrics.jsonl")


def losses(recipe: dict[str, Any]) -> list[tuple[int, float]]:
    return [(record["step"], record["train/loss"]) for record in metrics(recipe)]


def weights(folder: Path) -> bytes:
    return (folder / WEIGHTS_NAME).read_bytes()


def stop_after(recipe: dict[str, Any], step: int, **options: Any) -> None:
    """Train until this many steps are done, then stop."""

    def on_step(record: Mapping[str, Any]) -> None:
        if record["step"] == step:
            raise StoppedError

    with pytest.raises(StoppedError):
        train(recipe, on_step=on_step, **options)


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def refused(recipe: dict[str, Any], kind: type[FirstlightError], said: str, **options: Any) -> None:
    """Check that a run raises an error before its first step and writes nothing."""
    folder = run_folder(recipe)
    before = contents(folder) if folder.exists() else None
    steps: list[Any] = []
    with pytest.raises(kind, match=said):
        train(recipe, on_step=steps.append, **options)
    assert steps == []
    assert (contents(folder) if folder.exists() else None) == before


# --- a run and its files --------------------------------------------------------------------


def test_train_lowers_loss(recipe: dict[str, Any]) -> None:
    recipe = changed(
        recipe,
        schedule={"max_steps": 60},
        optimizer={"learning_rate": 1e-2},
        checkpoint={"every_steps": 0},
    )
    result = train(recipe)
    found = losses(recipe)
    assert 5 < found[0][1] < 6.5  # ln 320 = 5.8
    assert result.train_loss == found[-1][1] < 4.2
    assert result.evaluation is not None
    assert result.evaluation.loss < 4.2


def test_train_logs_one_complete_line_per_step(recipe: dict[str, Any]) -> None:
    result = train(recipe)
    records = metrics(recipe)
    assert [record["step"] for record in records] == list(range(1, 13))
    for record in records:
        evaluated = record["step"] in (6, 12)
        assert set(record) == _KEYS | (_EVALUATION_KEYS if evaluated else set())
        assert all(isinstance(value, int | float) for value in record.values())
        assert record["learning_rate"] == 1e-3 * Schedule(12, 2, 12, 0.1).lr_scale(
            record["step"] - 1
        )
        assert record["seconds"] >= record["data_wait_seconds"] >= 0
        assert record["tokens_per_second"] * record["seconds"] == pytest.approx(4 * 32)
        assert record["samples_per_second"] * record["seconds"] == pytest.approx(4)
        assert record["memory_bytes"] > 2**20
        assert 0 < record["mfu"] < 1
    # 4 rows of 32 tokens per step; only the epoch's last, shorter row has fewer.
    tokens = [record["tokens_seen"] for record in records]
    assert tokens == [128 * step for step in range(1, 13)]
    epochs = [record["epoch"] for record in records]
    assert epochs[-1] == pytest.approx(12 * epochs[0])
    assert result == TrainResult(
        run_folder(recipe),
        run_folder(recipe) / "checkpoints" / "step-00000012",
        12,
        tokens[-1],
        records[-1]["train/loss"],
        result.evaluation,
        best_checkpoint=run_folder(recipe) / "checkpoints" / "step-00000012",
    )
    assert result.evaluation is not None
    assert result.evaluation.loss == records[-1]["val/loss"]


def test_train_samples_at_epoch_are_written_with_last_step_of_epoch(
    recipe: dict[str, Any], corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    prepare(sorted(corpus.iterdir())[:9], tokenizer, tmp_path / "few", val_fraction=0.2)
    rows = TokenDataset(tmp_path / "few", "train").num_rows(32)
    steps = [-(-rows * epoch // 4) for epoch in (1, 2)]
    assert rows % 4
    assert 2 < steps[0] < 15
    recipe = changed(
        recipe,
        data={"dir": str(tmp_path / "few")},
        schedule={"max_steps": steps[1] + 1},
        evaluation={"samples_at": "epoch", "every_steps": 1000, "sample_tokens": 2},
    )
    stop_after(recipe, steps[0] + 1)
    train(recipe, resume=True)
    written = [sample["step"] for sample in read_json_lines(run_folder(recipe) / "samples.jsonl")]
    assert written == [*steps, steps[1] + 1]
    assert [r["step"] for r in metrics(recipe) if "val/loss" in r] == [steps[1] + 1]


def test_train_on_step_receives_logged_values_immediately(recipe: dict[str, Any]) -> None:
    seen: list[dict[str, Any]] = []

    def on_step(record: Mapping[str, Any]) -> None:
        seen.append(dict(record))
        assert metrics(recipe) == seen

    train(recipe, on_step=on_step)
    assert len(seen) == 12


@pytest.mark.parametrize("frozen_before", [0, 5])
def test_train_excludes_first_step_objects_from_garbage_collection(
    recipe: dict[str, Any], frozen_before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []

    class Collector:
        def get_freeze_count(self) -> int:
            return frozen_before

        def __getattr__(self, name: str) -> Any:
            return lambda: called.append(name)

    monkeypatch.setattr("firstlight.training.loop.gc", Collector())
    recipe = changed(recipe, schedule={"max_steps": 2})
    train(recipe, on_step=lambda record: called.append(f"step {record['step']}"))
    frozen, ended = (["collect", "freeze"], ["unfreeze"]) if not frozen_before else ([], [])
    assert called == ["step 1", *frozen, "step 2", *ended]


def test_train_run_folder_contents_match_documentation(
    recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("firstlight.training.loop.draw_report", draw_report)
    recipe["evaluation"]["sample_prompts"] = ["the light", ""]
    train(recipe)
    folder = run_folder(recipe)
    assert sorted(path.name for path in folder.iterdir()) == [
        ".lock",
        "checkpoints",
        "metrics.jsonl",
        "recipe.yaml",
        "report.html",
        "report.png",
        "run.json",
        "samples.jsonl",
        "starts.jsonl",
    ]
    assert [path.name for path in list_checkpoints(folder)] == ["step-00000008", "step-00000012"]
    samples = read_json_lines(folder / "samples.jsonl")
    assert [(s["step"], s["prompt"]) for s in samples] == [
        (6, "the light"),
        (6, ""),
        (12, "the light"),
        (12, ""),
    ]


def test_train_resolved_recipe_repeats_run(recipe: dict[str, Any], tmp_path: Path) -> None:
    recipe["data"].pop("seq_len")
    first = train(recipe)
    saved = run_folder(recipe) / "recipe.yaml"
    resolved = load_recipe(saved)
    assert resolved.data.seq_len == 64
    assert resolved.model is not None
    assert resolved.model.vocab_size == 320
    state = json.loads((first.checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    assert parse_recipe(state["recipe"]) == resolved
    values = yaml.safe_load(saved.read_text(encoding="utf-8"))
    again = train(changed(values, run={"dir": str(tmp_path / "again")}))
    assert weights(again.checkpoint) == weights(first.checkpoint)


def test_train_accepts_recipe_as_values_file_or_object(
    recipe: dict[str, Any], tmp_path: Path
) -> None:
    recipe["schedule"] = {"max_steps": 2, "warmup_steps": 0}
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    found = set()
    for given in (recipe, path, str(path), parse_recipe(recipe)):
        found.add(train(given).train_loss)
        shutil.rmtree(run_folder(recipe))
    assert len(found) == 1


def test_train_same_seed_repeats_run(recipe: dict[str, Any], tmp_path: Path) -> None:
    found = []
    for number, seed in enumerate((1, 1, 2)):
        values = changed(
            recipe,
            run={"dir": str(tmp_path / f"run-{number}"), "seed": seed},
            schedule={"max_steps": 3},
        )
        train(values)
        found.append(losses(values))
    assert found[0] == found[1]
    assert all(a != b for a, b in zip(found[0], found[2], strict=True))


def test_train_accumulation_equals_large_batch(recipe: dict[str, Any], tmp_path: Path) -> None:
    found = []
    for number, batch in enumerate(
        (
            {"micro_batch_size": 4},
            {"micro_batch_size": 2, "gradient_accumulation_steps": 2},
            {"micro_batch_size": 1, "global_batch_tokens": 128},
        )
    ):
        values = changed(
            recipe,
            run={"dir": str(tmp_path / f"run-{number}")},
            efficiency={"precision": "fp32"},
        )
        values["batch"] = batch
        train(values)
        found.append(metrics(values))
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert b["train/loss"] == pytest.approx(a["train/loss"], rel=1e-5)
            assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-3)
            assert (b["tokens_seen"], b["epoch"]) == (a["tokens_seen"], a["epoch"])


def test_train_evaluates_same_training_rows_besides_validation(
    recipe: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model has dropout, and evaluating must not change its random state."""
    recipe["model"] = {
        **recipe["model"],
        "model_type": "gpt2",
        "embd_pdrop": 0.1,
        "resid_pdrop": 0.1,
    }
    del recipe["model"]["num_key_value_heads"]
    recipe["efficiency"] = {"precision": "fp32"}
    train(recipe)
    held = changed(recipe, run={"dir": str(tmp_path / "held")}, evaluation={"train_rows": 10**6})
    stop_after(held, 5)
    result = train(held, resume=True, progress=True)
    found = [record.pop("train_eval/loss", None) for record in metrics(held)]
    assert [step for step, loss in enumerate(found, 1) if loss is not None] == [6, 12]
    assert losses(held) == losses(recipe)
    whole = evaluate(result.checkpoint, split="train")
    assert found[-1] == pytest.approx(whole.loss, rel=1e-6)
    said = f"train_eval/loss {found[-1]:.4f} ({whole.rows} of {whole.rows} rows)"
    assert said in " ".join(capsys.readouterr().err.split())
    # Fewer rows are the same ones each time, so an unchanged model gets the same loss.
    still = changed(
        held,
        run={"dir": str(tmp_path / "still")},
        evaluation={"train_rows": 3},
        optimizer={"learning_rate": 1e-30},
    )
    train(still)
    first, second = (r["train_eval/loss"] for r in metrics(still) if "train_eval/loss" in r)
    assert first == second


def test_train_without_max_steps_runs_one_epoch(recipe: dict[str, Any]) -> None:
    values = changed(recipe, batch={"micro_batch_size": 32}, evaluation={"every_steps": 0})
    values["schedule"] = {}
    train(values)
    *before, last = metrics(values)
    assert last["epoch"] >= 1 > before[-1]["epoch"]
    assert len(before) >= 3


def test_train_for_epochs_uses_absolute_rates_and_resumes(
    recipe: dict[str, Any], data: Path
) -> None:
    values = changed(
        recipe,
        batch={"micro_batch_size": 32},
        evaluation={"every_steps": 0},
        optimizer={"learning_rate": 8e-4},
    )
    values["schedule"] = {
        "epochs": 1.5,
        "warmup_tokens": 3 * 32 * 32,
        "decay_steps": 9,
        "min_learning_rate": 2e-4,
    }
    stop_after(values, 5)
    train(values, resume=True)
    rows = TokenDataset(data, "train").num_rows(32)
    rates = [record["learning_rate"] for record in metrics(values)]
    assert len(rates) == math.ceil(1.5 * rows / 32)
    assert rates == [8e-4 * Schedule(9, 3, 9, 0.25).lr_scale(step) for step in range(len(rates))]
    assert rates[2] == 8e-4
    assert set(rates[8:]) == {2e-4}


def test_train_prints_schedule_and_parameter_groups(
    recipe: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """For adapters, only the trained parameters are counted."""
    base = train(changed(recipe, schedule={"max_steps": 2, "warmup_steps": 1}), progress=True)
    told = " ".join(capsys.readouterr().err.split())
    schedule = r"schedule: 2 steps of 4 x 32 tokens \(0\.0\d+ epochs\), warm-up of 1 step to 0\.001"
    assert re.search(schedule + r", then down to 0\.0001 at step 2 ", told)
    longer = changed(
        recipe, schedule={"max_steps": 1, "warmup_steps": 2}, run={"dir": str(tmp_path / "l")}
    )
    train(longer, progress=True)
    told = " ".join(capsys.readouterr().err.split())
    assert (
        "warm-up of 2 steps to 0.001, a warm-up so long that the learning rate never falls" in told
    )
    # Embedding, head, and 7 matrices in each of 2 layers; 5 norms.
    assert "optimizer adamw tensors parameters rate decay embeddings 1 " in told
    assert re.search(r"matrices 14 [\d,]+ 0\.001 0\.1 norms and biases 5 160 0\.001 0 ", told)
    adapted = changed(
        recipe,
        run={"dir": str(tmp_path / "adapted")},
        lora={"rank": 2, "targets": ["q_proj"]},
        schedule={"max_steps": 2, "warmup_steps": 0},
    )
    result = train(adapted, init_from=base.checkpoint, progress=True)
    told = " ".join(capsys.readouterr().err.split())
    assert "tensors parameters rate decay matrices 4 256 0.001 0.1 " in told
    assert "norms" not in told
    assert last_start(result.run_folder)["weight_decay"]["decayed_parameters"] == 256


def test_train_applies_init_section_and_z_loss(recipe: dict[str, Any], tmp_path: Path) -> None:
    """The first step's loss is the logarithm of the vocabulary size, plus z-loss coefficient times
    its square.
    """
    values = changed(
        recipe,
        run={"dir": str(tmp_path / "flat")},
        init={"residual_projections": "zero", "head_std": 1e-8},
        loss={"z_loss_coef": 0.5},
        schedule={"max_steps": 1, "warmup_steps": 1},
    )
    result = train(values)
    tokenizer = Tokenizer.from_pretrained(result.checkpoint)
    z = math.log(tokenizer.vocab_size)
    assert metrics(values)[0]["train/loss"] == pytest.approx(z + 0.5 * z * z, rel=1e-5)
    with pytest.raises(ConfigError, match="the init section applies to random weights"):
        train(changed(values, run={"dir": str(tmp_path / "x")}), init_from=result.checkpoint)
    with pytest.raises(ConfigError, match="head_std applies to an untied head"):
        train(changed(values, model={"tie_word_embeddings": True}))


def test_train_average_of_last_checkpoints_is_saved_and_evaluated(
    recipe: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """This also holds for a resumed run that has no steps left."""
    values = changed(
        recipe,
        run={"dir": str(tmp_path / "averaged")},
        schedule={"max_steps": 6, "warmup_steps": 1},
        checkpoint={"every_steps": 2, "keep_last": 2, "keep_best": 0, "average_last": 2},
        evaluation={"max_rows": 0},
        efficiency={"precision": "fp32"},
    )
    result = train(values, progress=True)
    folder = result.run_folder / "averaged"
    four, six = (
        safetensors.torch.load_file(result.run_folder / f"checkpoints/step-{n:08}/{WEIGHTS_NAME}")
        for n in (4, 6)
    )
    found = safetensors.torch.load_file(folder / WEIGHTS_NAME)
    assert found.keys() == six.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, (four[name] + six[name]) / 2, rtol=1e-6, atol=0)
    told = json.loads((folder / "averaged.json").read_text(encoding="utf-8"))
    assert told["steps"] == [4, 6]
    assert result.evaluation is not None
    # `evaluate` also predicts the first token of the split.
    own, last = (
        evaluate(f, values["data"]["dir"], seq_len=32).loss for f in (folder, result.checkpoint)
    )
    assert told["val/loss"] - result.evaluation.loss == pytest.approx(own - last, abs=1e-5)
    assert "averaged weights of steps 4, 6: val/loss" in capsys.readouterr().err
    (folder / "averaged.json").unlink()
    train(values, resume=True)
    assert json.loads((folder / "averaged.json").read_text(encoding="utf-8")) == told


@pytest.mark.parametrize("validates", [True, False])
def test_train_prints_averaged_steps(
    recipe: dict[str, Any],
    tmp_path: Path,
    corpus: Path,
    tokenizer: Tokenizer,
    capsys: pytest.CaptureFixture[str],
    validates: bool,
) -> None:
    values = changed(
        recipe,
        schedule={"max_steps": 3, "warmup_steps": 1},
        checkpoint={"every_steps": 2, "keep_last": 4, "average_last": 4},
    )
    if not validates:
        prepare([corpus], tokenizer, tmp_path / "data", val_fraction=0.0)
        values["data"]["dir"] = str(tmp_path / "data")
    train(values, progress=True)
    said = "averaged weights of steps 2, 3 (average_last is 4, but there are no more checkpoints)"
    said += ": val/loss" if validates else "\n"
    assert said in capsys.readouterr().err


def test_train_average_excludes_checkpoints_saved_on_stop(
    recipe: dict[str, Any], tmp_path: Path
) -> None:
    """Regular checkpoints are kept as long as an average may need them."""
    values = changed(
        recipe,
        schedule={"max_steps": 7, "warmup_steps": 1},
        checkpoint={"every_steps": 2, "keep_last": 3, "keep_best": 0, "average_last": 3},
        efficiency={"precision": "fp32"},
    )

    def asks(record: Mapping[str, Any]) -> None:
        if record["step"] in (3, 5):
            (tmp_path / "asked" / "save-now").touch()

    found = []
    for name, on_step in (("plain", None), ("asked", asks)):
        run = {"dir": str(tmp_path / name)}
        train(changed(values, run=run), on_step=on_step)
        found.append((tmp_path / name / "averaged" / WEIGHTS_NAME).read_bytes())
        text = (tmp_path / name / "averaged" / "averaged.json").read_text(encoding="utf-8")
        assert json.loads(text)["steps"] == [4, 6, 7]
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "checkpoint, says",
    [
        ({"average_last": 3}, "set keep_last to 3"),
        ({"average_last": 1}, "must be 0, or at least 2 and at most keep_last"),
        ({"average_last": 2, "every_steps": 0}, "set every_steps, or set average_last to 0"),
        ({"average_last": 2, "sharded": True}, "average_last reads full checkpoints"),
    ],
)
def test_train_impossible_average_raises_config_error(
    recipe: dict[str, Any], checkpoint: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        train(changed(recipe, checkpoint=checkpoint))


@pytest.mark.parametrize("key", ["min_learning_rate", "initial_learning_rate"])
def test_train_initial_rate_above_peak_fails(recipe: dict[str, Any], key: str) -> None:
    values = changed(recipe, schedule={key: 1e-2})
    refused(values, ConfigError, f"{key} 0.01 is above optimizer.learning_rate 0.001")


def test_train_clipping_after_warmup_without_norm_fails(recipe: dict[str, Any]) -> None:
    values = changed(recipe, optimizer={"max_grad_norm": 0.0, "clip_after_warmup": True})
    refused(values, ConfigError, "clip_after_warmup requires a max_grad_norm above 0")


def test_train_without_validation_split_logs_no_validation_loss(
    recipe: dict[str, Any],
    tmp_path: Path,
    corpus: Path,
    tokenizer: Tokenizer,
    capsys: pytest.CaptureFixture[str],
) -> None:
    prepare([corpus], tokenizer, tmp_path / "train-only", val_fraction=0)
    recipe["data"]["dir"] = str(tmp_path / "train-only")
    result = train(recipe, progress=True)
    assert result.evaluation is None
    assert all(set(record) == _KEYS for record in metrics(recipe))
    assert "has no validation split, so the run does not report val/loss" in capsys.readouterr().err


def test_train_without_progress_prints_nothing(
    recipe: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    train(recipe)
    assert capsys.readouterr() == ("", "")
    shutil.rmtree(run_folder(recipe))
    train(recipe, progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "step 6: val/loss" in err
    assert "step 12/12" in err


def test_train_keeps_only_requested_number_of_checkpoints(recipe: dict[str, Any]) -> None:
    recipe["checkpoint"] = {"every_steps": 1, "keep_last": 1}
    result = train(recipe)
    assert list_checkpoints(run_folder(recipe)) == [result.checkpoint]
    verify_checkpoint(result.checkpoint)


# --- starting from weights -------------------------------------------------------------------


def test_train_init_from_loads_weights_and_config(
    recipe: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = train(recipe)
    # A different hidden size, which the loaded model overrides, and steps too small to change a
    # weight.
    start = changed(
        recipe,
        run={"dir": str(tmp_path / "second")},
        model={"hidden_size": 64},
        optimizer={"learning_rate": 1e-30},
    )
    second = train(start, init_from=run_folder(recipe), progress=True)
    said = f"warning: the model comes from {run_folder(recipe)}; ignored: "
    err = capsys.readouterr().err
    assert said in err
    assert "model.hidden_size" in err
    assert weights(second.checkpoint) == weights(first.checkpoint)
    assert load_model(second.checkpoint).model.config == load_model(first.checkpoint).model.config
    # It is a new run: steps, rows and schedule start from the beginning.
    assert [record["step"] for record in metrics(start)] == list(range(1, 13))
    assert metrics(start)[0]["tokens_seen"] == metrics(recipe)[0]["tokens_seen"]
    state = json.loads((second.checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    assert state["init_from"] == str(run_folder(recipe))


def test_train_starting_weights_with_nan_are_named_by_train_and_info(
    recipe: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = train(recipe)
    file = first.checkpoint / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    name = sorted(tensors)[-1]
    tensors[name].view(-1)[-1] = math.nan
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for path in first.checkpoint.glob("*.json"):
        if path.name not in ("manifest.json", "trainer_state.json"):
            shutil.copy(path, damaged)
    safetensors.torch.save_file(tensors, damaged / "model.safetensors", metadata={"format": "pt"})
    start = changed(recipe, run={"dir": str(tmp_path / "second")})
    refused(start, ModelError, f"its tensor {name} contains non-finite values", init_from=damaged)
    assert main(["info", str(damaged)]) == 0
    assert f"UNUSABLE, {name} has values" in capsys.readouterr().out
    assert main(["info", str(first.checkpoint)]) == 0
    assert "UNUSABLE" not in capsys.readouterr().out


def test_train_init_from_needs_no_model_in_recipe(recipe: dict[str, Any], tmp_path: Path) -> None:
    first = train(recipe)
    start = changed(recipe, run={"dir": str(tmp_path / "second")})
    del start["model"]
    assert train(start, init_from=first.checkpoint).step == 12
    refused(
        changed(start, run={"dir": str(tmp_path / "x")}), ConfigError, "the recipe has no model"
    )


# GPT-NeoX checkpoints use another name for the head than its model does.
@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_train_run_started_from_weights_resumes_exactly(
    family: str, recipe: dict[str, Any], tmp_path: Path
) -> None:
    heads = recipe["model"]["num_attention_heads"]
    shape = {"model_type": family, "num_key_value_heads": heads, "tie_word_embeddings": False}
    recipe["model"] = {**recipe["model"], **shape}
    train(recipe)
    whole = changed(recipe, run={"dir": str(tmp_path / "whole"), "seed": 5})
    del whole["model"]
    expected = train(whole, init_from=run_folder(recipe))
    broken = changed(whole, run={"dir": str(tmp_path / "broken")})
    stop_after(broken, 7, init_from=run_folder(recipe))
    # The starting model is no longer needed.
    shutil.rmtree(run_folder(recipe))
    found = train(broken, resume=True)
    assert losses(broken) == losses(whole)
    assert weights(found.checkpoint) == weights(expected.checkpoint)


def test_train_init_from_other_tokenizer_or_missing_folder_fails(
    recipe: dict[str, Any], tmp_path: Path, texts: list[str], corpus: Path
) -> None:
    first = train(recipe)
    other = train_tokenizer(texts, 300)
    prepare([corpus], other, tmp_path / "other-data")
    start = changed(
        recipe, run={"dir": str(tmp_path / "x")}, data={"dir": str(tmp_path / "other-data")}
    )
    refused(start, DataError, "prepared with a different tokenizer", init_from=first.checkpoint)
    missing = tmp_path / "no" / "where"
    refused(start, ModelError, "does not exist", init_from=missing)


# --- resuming -------------------------------------------------------------------------------


def gpt2_with_dropout(recipe: dict[str, Any]) -> dict[str, Any]:
    model = {
        "model_type": "gpt2",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "embd_pdrop": 0.1,
        "attn_pdrop": 0.1,
        "resid_pdrop": 0.1,
    }
    return {**recipe, "model": model}


def test_train_dropout_changes_losses(recipe: dict[str, Any], tmp_path: Path) -> None:
    recipe = changed(recipe, schedule={"max_steps": 1, "warmup_steps": 0})
    train(gpt2_with_dropout(recipe))
    plain = changed(
        gpt2_with_dropout(recipe),
        run={"dir": str(tmp_path / "plain")},
        model={"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0},
    )
    train(plain)
    assert losses(plain) != losses(recipe)


@pytest.mark.parametrize(
    "name, stop",
    [
        # Before the first checkpoint, and between two.
        *(("adamw", 3), ("adamw", 7), ("muon", 7)),
        *(pytest.param("adamw", stop, marks=pytest.mark.slow) for stop in (4, 11)),
    ],
)
def test_train_with_dropout_resumes_bit_for_bit(
    recipe: dict[str, Any], tmp_path: Path, name: str, stop: int
) -> None:
    whole = changed(
        gpt2_with_dropout(recipe),
        optimizer={"name": name},
        batch={"micro_batch_size": 2, "gradient_accumulation_steps": 2},
    )
    expected = train(whole)
    broken = changed(whole, run={"dir": str(tmp_path / "broken")})
    stop_after(broken, stop)
    found = train(broken, resume=True)
    assert losses(broken) == losses(whole)
    assert weights(found.checkpoint) == weights(expected.checkpoint)
    assert (
        contents(found.checkpoint)["optimizer.safetensors"]
        == (contents(expected.checkpoint)["optimizer.safetensors"])
    )
    samples = [read_json_lines(run_folder(r) / "samples.jsonl") for r in (whole, broken)]
    assert samples[0] == samples[1]


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_train_passes_run_ahead_change_no_bit(
    name: str, recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, the next step's passes begin before the host reads the current loss."""
    monkeypatch.setattr("firstlight.optim.optimizer._runs_ahead", lambda _: True)
    whole = changed(
        recipe,
        optimizer={"name": name},
        batch={"micro_batch_size": 2, "gradient_accumulation_steps": 2},
    )
    ahead: list[int] = []
    begin = RunAhead.begin

    def noted(self: RunAhead) -> bool:
        is_ahead = begin(self)
        if is_ahead:
            ahead.append(self._run.state.step)
        return is_ahead

    monkeypatch.setattr(RunAhead, "begin", noted)
    found = train(whole)
    # Not where an evaluation (6, 12) or a checkpoint (4, 8, 12) follows.
    assert ahead == [1, 2, 3, 5, 7, 9, 10, 11]
    broken = changed(whole, run={"dir": str(tmp_path / "broken")})
    stop_after(broken, 7)
    resumed = train(broken, resume=True)
    plain = changed(whole, run={"dir": str(tmp_path / "plain")})
    monkeypatch.setattr(RunAhead, "begin", lambda _: False)
    expected = train(plain)
    for one, result in ((whole, found), (broken, resumed)):
        assert losses(one) == losses(plain)
        epochs = [[record["epoch"] for record in metrics(each)] for each in (one, plain)]
        assert epochs[0] == epochs[1]
        files = [contents(each.checkpoint) for each in (result, expected)]
        for file in (WEIGHTS_NAME, "optimizer.safetensors"):
            assert files[0][file] == files[1][file], file


def test_train_passes_run_ahead_are_dropped_on_stop(
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("firstlight.optim.optimizer._runs_ahead", lambda _: True)
    expected = train(recipe)
    broken = changed(recipe, run={"dir": str(tmp_path / "broken")})

    def on_step(record: Mapping[str, Any]) -> None:
        if record["step"] == 9:
            os.kill(os.getpid(), signal.SIGTERM)

    stopped = train(broken, on_step=on_step)
    assert (stopped.stopped_by, stopped.step) == ("SIGTERM", 9)
    found = train(broken, resume=True)
    assert losses(broken) == losses(recipe)
    assert weights(found.checkpoint) == weights(expected.checkpoint)


@pytest.mark.parametrize("key", ["embd_pdrop", "attn_pdrop", "lora", ""])
def test_train_with_dropout_runs_nothing_ahead(
    key: str, recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its random numbers would be drawn before those of `on_step`, and before a save."""
    none = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0)
    given = {key: 0.1} if key in none else {}
    values = changed(gpt2_with_dropout(recipe), model={**none, **given})
    if key == "lora":
        base = changed(values, run={"dir": str(tmp_path / "base")}, schedule={"max_steps": 1})
        base["schedule"]["warmup_steps"] = 0
        train(base)
        values = changed(values, lora={"rank": 2, "dropout": 0.1})
        del values["model"]
    monkeypatch.setattr("firstlight.optim.optimizer._runs_ahead", lambda _: True)
    ahead: list[bool] = []
    begin = RunAhead.begin

    def noted(self: RunAhead) -> bool:
        ahead.append(begin(self))
        return ahead[-1]

    monkeypatch.setattr(RunAhead, "begin", noted)
    init_from = tmp_path / "base" if key == "lora" else None
    train(values, init_from=init_from)
    assert len(ahead) == 12
    assert any(ahead) is (key == "")


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_train_failure_of_passes_run_ahead_changes_no_bit(
    name: str, recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What fails for good fails again in its own step."""
    monkeypatch.setattr("firstlight.optim.optimizer._runs_ahead", lambda _: True)
    whole = changed(recipe, optimizer={"name": name})
    failing = changed(whole, run={"dir": str(tmp_path / "failing")})
    passes, calls = run_passes, list[int]()

    def run_ahead(*arguments: Any) -> Passes:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("a compiler's error")
        return passes(*arguments)

    train(whole)
    monkeypatch.setattr("firstlight.training.loop.run_passes", run_ahead)
    train(failing)
    assert len(calls) > 3
    assert losses(failing) == losses(whole)
    checkpoints = [newest_checkpoint(run_folder(each))[0] for each in (whole, failing)]
    files = [contents(each or tmp_path) for each in checkpoints]
    for file in (WEIGHTS_NAME, "optimizer.safetensors"):
        assert files[0][file] == files[1][file]


def test_train_second_resume_is_as_exact_as_first(recipe: dict[str, Any], tmp_path: Path) -> None:
    expected = train(recipe)
    broken = changed(recipe, run={"dir": str(tmp_path / "broken")})
    stop_after(broken, 5)
    stop_after(broken, 9, resume=True)
    stop_after(broken, 10, resume=True)
    found = train(broken, resume=True)
    assert losses(broken) == losses(recipe)
    assert weights(found.checkpoint) == weights(expected.checkpoint)


#: The metrics of a step that the progress display needs.
_RECORD = {"step": 8, "learning_rate": 0.1, "tokens_per_second": 9.0, "memory_bytes": 9}
_LOGS = ("metrics.jsonl", "samples.jsonl", "starts.jsonl")


def test_train_damaged_logs_never_prevent_resume(
    recipe: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = train(recipe)
    broken = changed(recipe, run={"dir": str(tmp_path / "broken")})
    stop_after(broken, 9)
    folder = run_folder(broken)
    lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    lines[2] = b'{"st\n'
    del lines[5:7]
    (folder / "metrics.jsonl").write_bytes(b"".join([*lines, b"\xff\n", lines[-1]]))
    (folder / "starts.jsonl").write_bytes(b"\n" + (folder / "starts.jsonl").read_bytes())
    (folder / "samples.jsonl").write_bytes(b'[]\n{"step": 1}\n')
    damaged = {name: (folder / name).read_bytes() for name in _LOGS}
    capsys.readouterr()
    found = train(broken, resume=True, progress=True)
    said = capsys.readouterr().err
    for name, content in damaged.items():
        line = 3 if name == "metrics.jsonl" else 1
        assert f"{folder}/{name}:{line} is damaged" in said
        assert f"the old file is now {folder}/{name}.damaged" in said
        assert (folder / f"{name}.damaged").read_bytes() == content
    assert f"{folder}/metrics.jsonl has no lines for steps 3, 6 to 7: weights" in said
    assert [line["step"] for line in metrics(broken)] == [1, 2, 4, 5, *range(8, 13)]
    assert weights(found.checkpoint) == weights(expected.checkpoint)


def test_train_log_damaged_during_run_does_not_end_it(
    recipe: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("firstlight.training.loop.draw_report", read_run)
    expected = train(recipe)
    other = changed(recipe, run={"dir": str(tmp_path / "other")})
    path = run_folder(other) / "metrics.jsonl"

    def on_step(record: Mapping[str, Any]) -> None:
        if record["step"] == 5:
            path.write_bytes(b"spoiled\n" + path.read_bytes())

    found = train(other, on_step=on_step, progress=True)
    assert weights(found.checkpoint) == weights(expected.checkpoint)
    said = capsys.readouterr().err
    assert f"warning: {path}:1 is damaged: " in said
    assert found.summary.tokens == found.tokens_seen
    assert f" s for {found.tokens_seen:,} tokens, including evaluations and saves\n" in said
    assert found.summary.step_seconds is None
    other["schedule"]["max_steps"] += 1
    resumed = train(other, resume=True, progress=True)
    tokens = resumed.tokens_seen - found.tokens_seen
    assert 0 < tokens == resumed.summary.tokens
    assert resumed.summary.step_seconds is not None
    said = capsys.readouterr().err
    assert re.search(
        rf"\ntraining in this session took \d+ s for {tokens:,} tokens, including evaluations and "
        r"saves\nmedian step: [\d,]+ tokens/s\n",
        said,
    )


def test_train_report_out_of_memory_does_not_fail_finished_run(
    recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: Path) -> None:
        raise ImportError("libjpeg.so.62: failed to map segment from shared object")

    monkeypatch.setattr("firstlight.training.loop.draw_report", fail)
    result = train(recipe, progress=True)
    assert result.checkpoint.is_dir()
    said = "warning: out of memory (libjpeg.so.62: failed to map segment from shared object), so"
    assert said in capsys.readouterr().err


@pytest.fixture
def stopped(recipe: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run stopped after 9 steps, trained once for all tests."""
    folder = tmp_path_factory.getbasetemp() / "stopped after 9 steps"
    if not folder.exists():
        stop_after(changed(recipe, run={"dir": str(folder)}), 9)
    return folder


@pytest.mark.parametrize(
    "spoiled, message",
    [
        ({"pending": {"step": 8}}, "pending does not contain metrics of step 8"),
        ({"pending": {"step": "8"}}, "pending does not contain metrics of step 8"),
        (
            {"pending": {**_RECORD, "train/loss": 10**400}},
            "pending does not contain metrics of step 8",
        ),
        ({"micro_batch_rows": 99}, "micro_batch_rows is 99, but a micro-batch has 4 rows"),
        ({"micro_batch_rows": 3}, "micro_batch_rows is 3, but a micro-batch has 4 rows"),
        ({"loader": {"rows_seen": 10**30}}, "rows_seen is 1000"),
        ({"skipped_steps": 9}, "9 of 8 steps were skipped"),
        ({"events": [{"step": 3, "event": None}]}, "an event has no name or no step"),
        ({"random": {}}, "random-number states are damaged: only a part of python's state"),
        (
            {"random": {"python": {"version": 3, "next_gauss": "1"}, "numpy": {}}},
            "random-number states are damaged: Python's next_gauss is '1'",
        ),
        (
            {"random": {"python": {"version": 3, "next_gauss": None}, "numpy": {"position": 625}}},
            "random-number states are damaged: numpy's position is 625",
        ),
        ({"rng.cpu": torch.zeros(3, dtype=torch.uint8)}, "random-number states are damaged"),
        ({"rng.cpu": torch.zeros(5056)}, "random-number states are damaged"),
        ({"rng.python": torch.full((625,), -1)}, "random-number states are damaged"),
        ({"rng.python": torch.zeros(625, dtype=torch.int64)}, "Python's words are all zeros"),
        ({"rng.numpy": torch.ones(10_000, dtype=torch.int64)}, "not 624 words of 32 bits"),
        ({"rng.numpy": torch.zeros(624, dtype=torch.int64)}, "not 624 words of 32 bits"),
        ({"rng.numpy": torch.full((624,), -1)}, "not 624 words of 32 bits"),
    ],
)
def test_train_checkpoint_with_invalid_values_raises_one_line_error(
    recipe: dict[str, Any], stopped: Path, spoiled: dict[str, Any], message: str
) -> None:
    shutil.copytree(stopped, run_folder(recipe))
    folder = list_checkpoints(run_folder(recipe))[-1]
    state_path, tensors_path = folder / "trainer_state.json", folder / "optimizer.safetensors"
    state, tensors = (
        json.loads(state_path.read_text("utf-8")),
        safetensors.torch.load_file(tensors_path),
    )
    for name, value in spoiled.items():
        (tensors if name in tensors else state)[name] = value
    state_path.write_text(json.dumps(state), "utf-8")
    safetensors.torch.save_file(tensors, tensors_path)
    manifest = json.loads((folder / "manifest.json").read_text("utf-8"))
    del manifest["sha256"]
    for path in (state_path, tensors_path):
        content = path.read_bytes()
        mark = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        manifest["files"][path.name] = mark
    (folder / "manifest.json").write_text(sealed(manifest), "utf-8")
    with pytest.raises(CheckpointError, match=message) as error:
        train(recipe, resume=True)
    assert "\n" not in str(error.value)


def test_train_resumed_with_other_thread_count_warns(
    recipe: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_after(recipe, 5)
    count = torch.get_num_threads()
    monkeypatch.setattr("firstlight.training.resuming.torch.get_num_threads", lambda: 77)
    train(recipe, resume=True, progress=True)
    said = capsys.readouterr().err
    assert f"saved by a run with {count} threads, but this run has 77: sums" in said
    assert f"(set OMP_NUM_THREADS={count} to avoid this)" in said


def test_train_resume_of_complete_run_does_nothing(
    recipe: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    first = train(recipe)
    before = contents(run_folder(recipe))
    steps: list[Any] = []
    again = train(recipe, resume=True, on_step=steps.append, progress=True)
    assert steps == []
    assert (again.checkpoint, again.step, again.tokens_seen) == (
        first.checkpoint,
        first.step,
        first.tokens_seen,
    )
    assert again.train_loss is None
    assert again.evaluation is None
    assert "the run is complete: step 12 of 12" in capsys.readouterr().err
    # Only the id of this start differs.
    after = contents(run_folder(recipe))
    assert {name for name in after if after[name] != before[name]} == {"run.json"}
    assert after.keys() == before.keys()


def test_train_run_can_be_extended(recipe: dict[str, Any]) -> None:
    train(recipe)
    before = metrics(recipe)
    result = train(changed(recipe, schedule={"max_steps": 15}), resume=True)
    assert result.step == 15
    assert metrics(recipe)[:12] == before
    assert [record["step"] for record in metrics(recipe)] == list(range(1, 16))


def test_train_continues_schedule_of_other_run_on_other_data(
    recipe: dict[str, Any],
    tmp_path: Path,
    corpus: Path,
    tokenizer: Tokenizer,
    capsys: pytest.CaptureFixture[str],
) -> None:
    train(recipe)
    before = metrics(recipe)
    base = run_folder(recipe) / "checkpoints" / "step-00000008"
    prepare([corpus], tokenizer, tmp_path / "other", val_fraction=0.3)
    further = changed(
        recipe,
        run={"dir": str(tmp_path / "further")},
        data={"dir": str(tmp_path / "other")},
        schedule={"resume": True},
    )
    result = train(further, init_from=base, progress=True)
    assert "continuing the schedule of" in capsys.readouterr().err
    found = metrics(further)
    for key in ("step", "learning_rate", "tokens_seen"):
        assert [one[key] for one in found] == [one[key] for one in before[8:]], key
    assert found[0]["train/loss"] != before[8]["train/loss"]
    state = safetensors.torch.load_file(result.checkpoint / "optimizer.safetensors")
    counts = {float(value) for name, value in state.items() if name.endswith(".step")}
    assert counts == {12.0}
    # From now on, the run's own checkpoints are used.
    again = changed(further, run={"dir": str(tmp_path / "again")}, checkpoint={"every_steps": 2})
    stop_after(again, 11, init_from=base)
    assert weights(train(again, resume=True).checkpoint) == weights(result.checkpoint)
    assert losses(again) == losses(further)


def test_optimizer_settings_of_older_checkpoints_are_read_alike() -> None:
    """Older checkpoints contain false, or no value, for embeddings_in_32_bits of an optimizer that
    is not 8-bit.
    """
    now = {"optimizer": {"name": "adamw", "embeddings_in_32_bits": None}, "run": {"seed": 1}}
    older = {**now, "optimizer": {"name": "adamw", "embeddings_in_32_bits": False}}
    oldest = {**now, "optimizer": {"name": "adamw"}}
    assert _as_written_now(older) == _as_written_now(oldest) == _as_written_now(now) == now
    eight_bits = {"optimizer": {"name": "adamw8bit", "embeddings_in_32_bits": False}}
    assert _as_written_now(eight_bits) == eight_bits
    assert _as_written_now({}) == {}


def test_train_impossible_schedule_continuation_fails(
    recipe: dict[str, Any], tmp_path: Path
) -> None:
    base = train(recipe).checkpoint
    other = changed(
        recipe, run={"dir": str(tmp_path / "other")}, schedule={"resume": True, "max_steps": 12}
    )
    refused(other, ConfigError, "pass that run with --init-from")
    refused(other, ConfigError, "at step 12 .* but schedule.max_steps is 12", init_from=base)
    longer = changed(other, schedule={"max_steps": 20})
    refused(changed(longer, optimizer={"name": "muon"}), CheckpointError, "muon", init_from=base)
    eight_bits = changed(longer, optimizer={"name": "adamw8bit"})
    short = {"resume": False, "max_steps": 1}
    in_8_bits = train(changed(eight_bits, run={"dir": str(tmp_path / "8")}, schedule=short))
    mixed = changed(eight_bits, optimizer={"embeddings_in_32_bits": False})
    message = "saved with optimizer.embeddings_in_32_bits True, not"
    refused(mixed, CheckpointError, message, init_from=in_8_bits.checkpoint)
    plain = tmp_path / "plain"
    shutil.copytree(base, plain)
    for name in ("optimizer.safetensors", "manifest.json", "trainer_state.json"):
        (plain / name).unlink()
    refused(longer, CheckpointError, "does not contain optimizer state", init_from=plain)


def test_train_resume_without_checkpoint_starts_from_beginning(
    recipe: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(recipe, resume=True, progress=True)
    assert (
        "does not contain a checkpoint yet: starting from the beginning" in capsys.readouterr().err
    )
    other = changed(recipe, run={"dir": str(tmp_path / "other")})
    train(other)
    assert losses(recipe) == losses(other)


@pytest.mark.parametrize("resume", [False, True])
def test_train_lines_before_first_checkpoint_of_killed_run_are_discarded(
    recipe: dict[str, Any], resume: bool
) -> None:
    stop_after(recipe, 3)
    assert len(metrics(recipe)) == 3
    train(recipe, resume=resume)
    assert [record["step"] for record in metrics(recipe)] == list(range(1, 13))


@pytest.mark.parametrize("keep_last", [1, 3])
def test_train_damaged_newest_checkpoint_repeats_only_its_steps(
    recipe: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], keep_last: int
) -> None:
    expected = train(recipe)
    broken = changed(recipe, run={"dir": str(tmp_path / "broken")}, checkpoint={"keep_last": 3})
    stop_after(broken, 10)
    damaged = list_checkpoints(run_folder(broken))[-1]
    assert damaged.name == "step-00000008"
    with open(damaged / "optimizer.safetensors", "r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x55")
    found = train(changed(broken, checkpoint={"keep_last": keep_last}), resume=True, progress=True)
    err = capsys.readouterr().err
    assert f"warning: {damaged / 'optimizer.safetensors'} is damaged" in err
    # The checkpoint with the lowest validation loss so far is still there.
    assert "step-00000006 (step 6)" in err
    assert losses(broken) == losses(recipe)
    assert weights(found.checkpoint) == weights(expected.checkpoint)
    kept = list_checkpoints(run_folder(broken))
    assert len(kept) == keep_last
    for folder in kept:
        verify_checkpoint(folder)


def test_train_new_model_defaults_apply_only_to_new_models(
    recipe: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def optimizer_of(one: dict[str, Any]) -> str:
        return load_recipe(run_folder(one) / "recipe.yaml").optimizer.name

    recipe["model"]["model_type"] = "qwen3"
    recipe["schedule"] = {"max_steps": 6}
    train(recipe)
    assert optimizer_of(recipe) == "muon"
    # The loaded model has already been trained.
    tuned = changed(recipe, run={"dir": str(tmp_path / "tuned")})
    train(tuned, init_from=run_folder(recipe))
    assert optimizer_of(tuned) == "adamw"
    # A run from before settings for new models existed, whose recipe did not set them.
    before = changed(
        recipe,
        run={"dir": str(tmp_path / "before")},
        optimizer={"name": "adamw"},
        init={"residual_projections": "scaled"},
    )
    train(before)
    resumed = changed(before, run={"dir": str(tmp_path / "resumed")})
    stop_after(resumed, 5)
    capsys.readouterr()
    train({**resumed, "optimizer": {}, "init": {}}, resume=True, progress=True)
    assert "warning" not in capsys.readouterr().err
    assert losses(resumed) == losses(before)


def test_train_resumed_with_changed_setting_warns(
    recipe: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    stop_after(recipe, 5)
    train(
        changed(recipe, optimizer={"learning_rate": 2e-3}, evaluation={"every_steps": 3}),
        resume=True,
        progress=True,
    )
    said = "changed since the checkpoint: optimizer.learning_rate, evaluation.every_steps\n"
    assert f"warning: {said}" in capsys.readouterr().err
    # The new learning rate applies, with the old schedule.
    assert metrics(recipe)[5]["learning_rate"] == 2e-3 * Schedule(12, 2, 12, 0.1).lr_scale(5)


@pytest.mark.parametrize(
    "changes, warns", [({"max_steps": 20}, True), ({"max_steps": 20, "decay_steps": 12}, False)]
)
def test_train_longer_schedule_raising_the_rate_warns_with_both_rates(
    recipe: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    warns: bool,
) -> None:
    stop_after(recipe, 5)  # and has a checkpoint from step 4
    train(changed(recipe, schedule=changes), resume=True, progress=True)
    err, peak = capsys.readouterr().err, OptimizerConfig().learning_rate
    was, longer = (peak * Schedule(steps, 2, steps, 0.1).lr_scale(4) for steps in (12, 20))
    said = (
        f"the learning rate at step 5 was {was:.4g} in the checkpoint's schedule, and is now "
        f"{longer:.4g} (set schedule.decay_steps 12 to keep the old schedule)\n"
    )
    assert (said in err) == warns
    assert ("the learning-rate schedule has changed" in err) == warns
    # With the suggested key, the learning rate is unchanged.
    assert metrics(recipe)[4]["learning_rate"] == pytest.approx(longer if warns else was)


def test_train_resumed_with_same_recipe_does_not_warn(
    recipe: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    stop_after(recipe, 5)
    train(recipe, resume=True, progress=True)
    assert "warning" not in capsys.readouterr().err


def test_train_resume_with_other_model_data_or_row_length_fails(
    recipe: dict[str, Any], tmp_path: Path, corpus: Path, tokenizer: Tokenizer
) -> None:
    stop_after(recipe, 5)
    prepare([corpus], tokenizer, tmp_path / "other", val_fraction=0.3)
    for values, said in (
        (
            changed(recipe, model={"hidden_size": 64}),
            r"another model: .*model\.hidden_size.* changed",
        ),
        (gpt2_with_dropout(recipe), "another model: .*model_type"),
        (changed(recipe, data={"seq_len": 16}), "the data's seq_len was 32 and is now 16"),
        (changed(recipe, data={"dir": str(tmp_path / "other")}), "the data's manifest_sha256"),
        (changed(recipe, optimizer={"name": "muon"}), "optimizer"),
        (changed(recipe, run={"seed": 1}), r"set run\.seed to 1337 instead of 1, or start"),
    ):
        refused(values, CheckpointError, said, resume=True)
    # The existing run can still be resumed.
    assert train(recipe, resume=True).step == 12


def test_train_run_moved_with_its_data_resumes(
    recipe: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = train(recipe)
    stopped = changed(recipe, run={"dir": str(tmp_path / "stopped")})
    stop_after(stopped, 5)
    shutil.copytree(recipe["data"]["dir"], tmp_path / "moved-data")
    (tmp_path / "stopped").rename(tmp_path / "moved")
    moved = changed(
        recipe, run={"dir": str(tmp_path / "moved")}, data={"dir": str(tmp_path / "moved-data")}
    )
    assert weights(train(moved, resume=True, progress=True).checkpoint) == (
        weights(expected.checkpoint)
    )
    assert "warning" not in capsys.readouterr().err


# --- errors before the first step -----------------------------------------------------------


def test_train_does_not_overwrite_checkpoints(recipe: dict[str, Any]) -> None:
    train(recipe)
    refused(recipe, CheckpointError, "already contains checkpoints: continue the run with --resume")


def test_train_second_run_in_same_folder_raises_checkpoint_error(recipe: dict[str, Any]) -> None:
    recipe["schedule"]["max_steps"] = 3
    refusals = []

    def on_step(record: Mapping[str, Any]) -> None:
        for resume in (False, True):
            with pytest.raises(CheckpointError, match="in use by another process") as caught:
                train(recipe, resume=resume)
            refusals.append(str(caught.value))

    train(recipe, on_step=on_step)
    assert len(refusals) == 6
    assert [record["step"] for record in metrics(recipe)] == [1, 2, 3]
    assert len(list_checkpoints(run_folder(recipe))) == 1


def test_train_failed_run_releases_its_folder(recipe: dict[str, Any]) -> None:
    stop_after(recipe, 1)
    assert train(recipe).step == 12


@pytest.mark.parametrize(
    "vocab_size, relation", [(321, "larger"), (100_000, "larger"), (319, "smaller"), (1, "smaller")]
)
def test_train_vocabulary_other_than_tokenizer_fails(
    recipe: dict[str, Any], vocab_size: int, relation: str
) -> None:
    said = (
        rf"model.vocab_size {vocab_size} is {relation} than .* the data's tokenizer, which has 320"
    )
    refused(changed(recipe, model={"vocab_size": vocab_size}), DataError, said)


def test_train_accepts_explicit_vocabulary_of_tokenizer(recipe: dict[str, Any]) -> None:
    result = train(changed(recipe, model={"vocab_size": 320}, schedule={"max_steps": 2}))
    assert load_model(result.checkpoint).model.config.vocab_size == 320


def test_train_invalid_recipe_values_raise(recipe: dict[str, Any], tmp_path: Path) -> None:
    for values, kind, said in (
        ({"data": {"seq_len": 65}}, ConfigError, r"seq_len 65 is more than .* 64"),
        (
            {"data": {"seq_len": 60_000}, "model": {"max_position_embeddings": 60_000}},
            DataError,
            r"has \d+ tokens, fewer than one row of data\.seq_len 60000 needs \(60001\)",
        ),
        ({"data": {"dir": str(tmp_path / "no")}}, DataError, "does not exist"),
        ({"data": {"dir": str(tmp_path)}}, DataError, "is not a prepared corpus"),
        ({"run": {"device": "abacus"}}, ConfigError, "'abacus' is unknown"),
        ({"batch": {"global_batch_tokens": 100}}, ConfigError, "not a multiple"),
        ({"evaluation": {"sample_prompts": ["light " * 64]}}, ConfigError, "shorten it"),
        ({"evaluation": {"sample_prompts": ["\ud800"]}}, InputError, "not valid Unicode"),
        ({"optimizer": {"max_grad_norm": float("inf")}}, ConfigError, "max_grad_norm"),
        ({"evaluation": {"temperature": float("inf")}}, ConfigError, "temperature"),
    ):
        refused(changed(recipe, **values), kind, said)


def test_train_run_folder_is_file_raises_config_error(
    recipe: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="is a file"):
        train(changed(recipe, run={"dir": str(tmp_path / "file")}))
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("verify", [True, False])
def test_train_damaged_shards_fail(
    recipe: dict[str, Any], tmp_path: Path, data: Path, verify: bool
) -> None:
    shutil.copytree(data, tmp_path / "data")
    values = changed(recipe, data={"dir": str(tmp_path / "data"), "verify": verify})
    shard = tmp_path / "data" / "train-00000.bin"
    content = shard.read_bytes()
    shard.write_bytes(content[:200] + bytes([content[200] ^ 1]) + content[201:])
    if verify:
        refused(values, DataError, r"train-00000\.bin is damaged")
    shard.write_bytes(content[:-8])
    refused(values, DataError, r"train-00000\.bin has the wrong size")
    shard.unlink()
    refused(values, DataError, r"train-00000\.bin is missing")


def test_train_tokenizer_not_matching_shards_fails(
    recipe: dict[str, Any], tmp_path: Path, data: Path, texts: list[str]
) -> None:
    shutil.copytree(data, tmp_path / "data")
    train_tokenizer(texts, 300).save_pretrained(tmp_path / "data")
    values = changed(recipe, data={"dir": str(tmp_path / "data")})
    refused(values, DataError, "the shards were not prepared with the tokenizer")


def test_train_without_disk_space_for_checkpoints_fails(
    recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type(shutil.disk_usage("/"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9 - 1000, 1000))
    refused(recipe, StorageError, r"0 MB free, but the run's checkpoints need about \d MB")


def test_train_without_disk_space_for_averaged_weights_fails(
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = {"every_steps": 1, "keep_last": 2, "keep_best": 0}
    values = changed(recipe, schedule={"max_steps": 3, "warmup_steps": 1}, checkpoint=kept)
    checkpoint = train(values).checkpoint
    sizes = {file.name: file.stat().st_size for file in checkpoint.glob("*.safetensors")}
    # The third checkpoint is written before the first is deleted; the average comes after them.
    free = 3 * sum(sizes.values()) + sizes[WEIGHTS_NAME] // 2
    usage = type(shutil.disk_usage("/"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9 - free, free))
    values = changed(values, run={"dir": str(tmp_path / "averaged")})
    refused(changed(values, checkpoint={"average_last": 2}), StorageError, "checkpoints need about")
    assert train(values).step == 3


def test_train_checkpoint_folder_not_writable_fails_before_first_step(
    recipe: dict[str, Any],
) -> None:
    folder = run_folder(recipe)
    folder.mkdir(parents=True)
    # A dangling link replaces a folder without permissions, which root could still write.
    (folder / "checkpoints").symlink_to(folder / "missing")
    refused(recipe, StorageError, rf"at {folder}/checkpoints")
    assert not (folder / "recipe.yaml").exists()


# --- runs that go wrong ----------------------------------------------------------------------


def test_train_diverged_run_stops_and_keeps_good_checkpoint(recipe: dict[str, Any]) -> None:
    recipe["evaluation"]["every_steps"] = 0
    stop_after(recipe, 5)
    (good,) = list_checkpoints(run_folder(recipe))
    before = contents(good)
    values = changed(recipe, optimizer={"learning_rate": 1e36, "max_grad_norm": 0.0})
    with pytest.raises(TrainingError, match=r"step \d+: .*lower optimizer\.learning_rate"):
        train(values, resume=True)
    assert newest_checkpoint(run_folder(recipe)) == (good, [])
    assert contents(good) == before
    # The log contains only finite numbers.
    text = (run_folder(recipe) / "metrics.jsonl").read_text(encoding="utf-8")
    assert "NaN" not in text
    assert "Infinity" not in text
    assert train(recipe, resume=True).step == 12


@pytest.mark.parametrize("prompts", [[""], []])
def test_train_weights_ruined_by_update_are_detected_at_evaluation(
    recipe: dict[str, Any], prompts: list[str]
) -> None:
    values = changed(
        recipe,
        optimizer={"learning_rate": 1e38, "max_grad_norm": 0.0},
        schedule={"warmup_steps": 0},
        evaluation={"every_steps": 1, "sample_prompts": prompts},
    )
    with pytest.raises(TrainingError, match=r"step 1: .*lower optimizer\.learning_rate"):
        train(values)
    assert list_checkpoints(run_folder(values)) == []


def test_train_ruined_weights_are_not_saved_as_last_checkpoint(
    recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last update can ruin the weights without any further loss to reveal it."""
    recipe = changed(
        recipe, schedule={"max_steps": 4}, checkpoint={"every_steps": 2, "keep_last": 1}
    )

    def ruin(run: Run, *_: Any) -> None:
        if run.state.step == 4:
            next(run.program.model.parameters()).data[0, 0] = float("nan")

    monkeypatch.setattr("firstlight.training.loop.evaluate", ruin)
    with pytest.raises(CheckpointError, match=r"step 4: tensor .* is not finite"):
        train(recipe)
    newest, problems = newest_checkpoint(run_folder(recipe))
    assert newest is not None
    assert (newest.name, problems) == ("step-00000002", [])
    tensors = safetensors.torch.load_file(newest / WEIGHTS_NAME)
    assert all(tensor.isfinite().all() for tensor in tensors.values())


def test_train_expands_home_folder(
    recipe: dict[str, Any], tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus").symlink_to(data)
    recipe["data"]["dir"] = "~/corpus"
    recipe["run"]["dir"] = "~/runs/one"
    recipe["schedule"]["max_steps"] = 1
    recipe["schedule"]["warmup_steps"] = 0
    assert train(recipe).run_folder == tmp_path / "runs" / "one"
    assert not (tmp_path / "~").exists()


# --- a padded vocabulary ---------------------------------------------------------------------


def test_train_padded_vocabulary_gives_same_model_and_is_not_saved(
    recipe: dict[str, Any], tmp_path: Path
) -> None:
    recipe["efficiency"] = {"precision": "fp32"}
    plain = train(recipe)
    padded = train(
        changed(
            recipe,
            run={"dir": str(tmp_path / "padded")},
            efficiency={"precision": "fp32", "vocab_multiple": 128},
        )
    )
    assert padded.train_loss == pytest.approx(plain.train_loss, rel=1e-4)
    own = safetensors.torch.load_file(padded.checkpoint / WEIGHTS_NAME)
    other = safetensors.torch.load_file(plain.checkpoint / WEIGHTS_NAME)
    assert {n: t.shape for n, t in own.items()} == {n: t.shape for n, t in other.items()}
    moments = safetensors.torch.load_file(padded.checkpoint / "optimizer.safetensors")
    average = moments["model.embed_tokens.weight.exp_avg"]
    assert average.shape[0] == 384
    assert average[320:].count_nonzero() == 0


def test_train_padded_vocabulary_resumes_bit_for_bit(
    recipe: dict[str, Any], tmp_path: Path
) -> None:
    recipe["efficiency"] = {"vocab_multiple": 128}
    whole = train(recipe)
    broken = changed(recipe, run={"dir": str(tmp_path / "broken")})
    stop_after(broken, 9)
    found = train(broken, resume=True)
    assert weights(found.checkpoint) == weights(whole.checkpoint)


def test_padded_vocabulary_rows_are_zero_before_loading(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Uninitialized memory may contain anything, and 0 * NaN would spread to the gradients."""
    real = torch.empty_like

    def filled(*args: Any, **kwargs: Any) -> torch.Tensor:
        return real(*args, **kwargs).fill_(float("nan"))

    monkeypatch.setattr(torch, "empty_like", filled)
    for kind in (GPT2Config, LlamaConfig):
        config = kind(vocab_size=10, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
        model = empty_model(config, 64)
        head = model.lm_head.weight
        assert head[:10].isnan().all()
        assert head.shape[0] == 64
        assert head[10:].count_nonzero() == 0
        assert model.state_dict()[embedding_name(model)][10:].count_nonzero() == 0


def test_train_checkpoint_without_manifest_is_named_and_ignored(
    recipe: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    *_, older, last = list_checkpoints(train(recipe).run_folder)
    before = (last / WEIGHTS_NAME).read_bytes()
    (last / "manifest.json").unlink()
    result = train(recipe, resume=True, progress=True)
    said = capsys.readouterr().err
    assert f"warning: {last} does not contain manifest.json, so it is not a checkpoint and" in said
    assert f"resuming from {older}" in said
    assert (result.checkpoint / WEIGHTS_NAME).read_bytes() == before


@pytest.mark.parametrize("resumes", [True, False])
def test_train_run_killed_before_first_checkpoint_keeps_auto_choices(
    recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch, resumes: bool
) -> None:
    """Measured choices could differ in the middle of a run if they were made again."""
    recipe["efficiency"] = {"precision": "auto"}

    def die(_: Mapping[str, Any]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("firstlight.recipe.resolve.resolve_precision", lambda *_: torch.bfloat16)
    with pytest.raises(KeyboardInterrupt):
        train(recipe, on_step=die)
    assert list_checkpoints(Path(recipe["run"]["dir"])) == []
    monkeypatch.setattr("firstlight.recipe.resolve.resolve_precision", lambda *_: torch.float32)
    result = train(recipe, resume=resumes)
    found = load_recipe(result.run_folder / "recipe.yaml").efficiency.precision
    assert found == ("bf16" if resumes else "fp32")


def test_train_qwen2_model_with_other_split_warns(
    recipe: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers would read its tokenizer differently."""
    recipe["model"]["model_type"] = "qwen2"
    recipe["schedule"] = {"max_steps": 1}
    train(recipe, progress=True)
    assert (
        "warning: transformers 5 reads every tokenizer of a qwen2 model" in capsys.readouterr().err
    )

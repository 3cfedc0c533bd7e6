"""Bugs of other trainers in checkpoints: saving, choosing, deleting, and going on from one."""

from __future__ import annotations

import json
import math
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from small import LLAMA, new_model

from firstlight.checkpoint import saver as saving
from firstlight.checkpoint.checkpoint import (
    Checkpoint,
    load_checkpoint,
    save_checkpoint,
    verify_checkpoint,
)
from firstlight.checkpoint.manifest import checkpoint_folder
from firstlight.checkpoint.saver import CheckpointSaver
from firstlight.checkpoint.selection import list_checkpoints, newest_checkpoint
from firstlight.errors import CheckpointError, FirstlightError, ModelError, StorageError
from firstlight.generation.engine import load
from firstlight.recipe import CheckpointConfig
from firstlight.run_log.reader import read_json_lines
from firstlight.training.loop import train
from firstlight.weights.loading import weights_to_save
from firstlight.weights.stored import save_weights
from waiting import wait_until


def content(step: int, val_loss: float | None = None) -> Checkpoint:
    """A small checkpoint whose numbers say of which step it is."""
    return Checkpoint(
        files={"config.json": json.dumps({"model_type": "llama"})},
        model={"w": torch.full((4, 3), float(step))},
        optimizer={"w.exp_avg": torch.full((4, 3), step / 2)},
        trainer_state={"step": step, "val_loss": val_loss},
    )


def saver(run: Path, *, asynchronous: bool = False, **config: Any) -> CheckpointSaver:
    return CheckpointSaver(run, CheckpointConfig(asynchronous=asynchronous, **config))


def saved_steps(run: Path) -> list[int]:
    """What the checkpoints' files, not their names, say."""
    for folder in list_checkpoints(run):
        verify_checkpoint(folder)
    return [load_checkpoint(f).trainer_state["step"] for f in list_checkpoints(run)]


def newest_step(run: Path) -> int:
    folder, _ = newest_checkpoint(run)
    assert folder is not None
    return int(load_checkpoint(folder).model["w"][0, 0])


# Choosing


def test_newest_checkpoint_ignores_partial_folder(tmp_path: Path) -> None:
    """speculators #739: the newest folder won, complete or not."""
    save_checkpoint(tmp_path, 1, content(1))
    partial = checkpoint_folder(tmp_path, 2)
    shutil.copytree(checkpoint_folder(tmp_path, 1), partial)
    (partial / "manifest.json").unlink()
    assert newest_step(tmp_path) == 1
    assert list_checkpoints(tmp_path) == [checkpoint_folder(tmp_path, 1)]


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "config.json"])
def test_resume_skips_damaged_checkpoint(tmp_path: Path, name: str) -> None:
    for step in (1, 2):
        save_checkpoint(tmp_path, step, content(step))
    path = checkpoint_folder(tmp_path, 2) / name
    damaged = bytearray(path.read_bytes())
    damaged[-3] ^= 1
    path.write_bytes(damaged)
    folder, problems = newest_checkpoint(tmp_path)
    assert folder == checkpoint_folder(tmp_path, 1)
    assert len(problems) == 1
    assert str(path) in problems[0]


# Deleting


def test_prune_with_limit_of_one_keeps_only_checkpoint(tmp_path: Path) -> None:
    """transformers #25136."""
    keeper = saver(tmp_path, keep_last=1)
    for step in (1, 2, 3):
        keeper.save(step, lambda step=step: content(step))  # type: ignore[misc]
        assert saved_steps(tmp_path) == [step]
    keeper.close()


def test_save_keeps_old_checkpoint_until_new_one_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """accelerate: a save that fails then leaves none."""
    keeper = saver(tmp_path, keep_last=1)
    keeper.save(1, lambda: content(1))

    def fail(*_: Any, **__: Any) -> Any:
        assert saved_steps(tmp_path) == [1]
        raise StorageError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(saving, "save_checkpoint", fail)
        with pytest.raises(StorageError):
            keeper.save(2, lambda: content(2))
    assert saved_steps(tmp_path) == [1]
    # The same where it is written, but can't be read again.
    monkeypatch.setattr(saving, "verify_checkpoint", fail_to_verify)
    with pytest.raises(CheckpointError):
        keeper.save(2, lambda: content(2))
    assert 1 in saved_steps(tmp_path)


def fail_to_verify(*_: Any, **__: Any) -> None:
    raise CheckpointError("the disk forgot it")


@pytest.mark.parametrize("first", [25, 30, 40])
def test_prune_after_rollback_keeps_newest_save(tmp_path: Path, first: int) -> None:
    """Retention sorted by step: the checkpoints of the branch that was given up won."""
    keeper = saver(tmp_path, keep_last=2)
    for step in (10, 20, 30):
        keeper.save(step, lambda step=step: content(step))  # type: ignore[misc]
    keeper.saved_step = 20
    keeper.save(first, lambda: content(first))
    assert saved_steps(tmp_path) == [20, first]
    assert newest_step(tmp_path) == first
    keeper.close()


def test_prune_damaged_newest_checkpoint_does_not_displace_good_one(tmp_path: Path) -> None:
    """Going on from step 10 because 20 and 30 are damaged, only damaged ones were kept."""
    for step in (10, 20, 30):
        save_checkpoint(tmp_path, step, content(step))
    for step in (20, 30):
        (checkpoint_folder(tmp_path, step) / "model.safetensors").write_bytes(b"damage")
    keeper = saver(tmp_path, keep_last=2)
    keeper.saved_step = 10
    keeper.save(15, lambda: content(15))
    assert saved_steps(tmp_path) == [10, 15]
    keeper.close()


def test_prune_keeps_old_best_checkpoint(tmp_path: Path) -> None:
    keeper = saver(tmp_path, keep_last=1, keep_best=1)
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, 2.5), (5, math.pi)):
        keeper.save(step, lambda step=step, loss=loss: content(step, loss))  # type: ignore[misc]
    assert saved_steps(tmp_path) == [2, 5]
    keeper.close()


# Saving


@pytest.mark.parametrize("part", ["model", "optimizer"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_prune_nan_checkpoints_do_not_displace_good_ones(
    tmp_path: Path, part: str, value: float
) -> None:
    """pocket-tts #262."""
    keeper = saver(tmp_path, keep_last=1)
    keeper.save(1, lambda: content(1))
    bad = content(2)
    next(iter(getattr(bad, part).values()))[3, 2] = value
    for step in (2, 3, 4):
        with pytest.raises(CheckpointError, match="is not finite; no checkpoint was written"):
            keeper.save(step, lambda: bad)
    assert saved_steps(tmp_path) == [1]
    keeper.close()


def test_asynchronous_save_holds_values_at_time_of_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pytorch #144657, lightning #21079: training went on in the very tensors that were written."""
    started, trained = threading.Event(), threading.Event()
    write = save_checkpoint

    def late(*arguments: Any, **options: Any) -> Any:
        started.set()
        wait_until("the end of the training", trained.is_set)
        return write(*arguments, **options)

    monkeypatch.setattr(saving, "save_checkpoint", late)
    keeper, state = saver(tmp_path, asynchronous=True), content(1)
    state.trainer_state["events"] = []  # type: ignore[index]
    keeper.save(1, lambda: state)
    wait_until("the beginning of the save", started.is_set)
    for tensor in (*state.model.values(), *state.optimizer.values()):
        tensor.mul_(1000)
    state.trainer_state["events"].append("later")
    trained.set()
    keeper.close()
    saved = load_checkpoint(checkpoint_folder(tmp_path, 1))
    assert torch.equal(saved.model["w"], torch.full((4, 3), 1.0))
    assert torch.equal(saved.optimizer["w.exp_avg"], torch.full((4, 3), 0.5))
    assert saved.trainer_state["events"] == []


def test_asynchronous_save_failure_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise StorageError("the disk is full")

    monkeypatch.setattr(saving, "save_checkpoint", fail)
    keeper = saver(tmp_path, asynchronous=True)
    keeper.save(1, lambda: content(1))
    with pytest.raises(StorageError, match="the disk is full"):
        keeper.wait()
    assert keeper.saved_step == -1
    keeper.close()


def short(recipe: dict[str, Any], **sections: Any) -> dict[str, Any]:
    """A run of 6 steps, saved every 2."""
    return {
        **recipe,
        "schedule": {"max_steps": 6, "warmup_steps": 1},
        "evaluation": {"every_steps": 0, "max_rows": 1, "sample_tokens": 1},
        "checkpoint": {"every_steps": 2, "keep_last": 9},
        **sections,
    }


def stop_after(recipe: dict[str, Any], step: int, *, resume: bool = False) -> None:
    def stop(record: Any) -> None:
        if record["step"] == step:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(recipe, on_step=stop, resume=resume)


def test_save_records_correct_step(recipe: dict[str, Any]) -> None:
    """Megatron-Bridge #3267: a resumed run did a step twice, or left one out."""
    recipe = short(recipe)
    train(recipe)
    run = Path(recipe["run"]["dir"])
    rows = [load_checkpoint(f).trainer_state["loader"]["rows_seen"] for f in list_checkpoints(run)]
    assert [folder.name for folder in list_checkpoints(run)] == [
        f"step-{step:08d}" for step in (2, 4, 6)
    ]
    assert saved_steps(run) == [2, 4, 6]
    assert rows == [8, 16, 24]
    for folder, step in zip(list_checkpoints(run), (2, 4, 6), strict=True):
        moments = load_checkpoint(folder).optimizer
        counters = {float(t) for name, t in moments.items() if name.endswith(".step")}
        assert counters == {float(step)}


_DROPOUT = {
    "model_type": "gpt2",
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "embd_pdrop": 0.2,
    "resid_pdrop": 0.2,
}


def test_resume_restores_random_numbers_at_right_moment(recipe: dict[str, Any]) -> None:
    """transformers #46628: dropout differed from that of the run that was never stopped."""
    whole = short(recipe, model=_DROPOUT)
    train(whole)
    stopped = {**whole, "run": {**whole["run"], "dir": whole["run"]["dir"] + "-stopped"}}
    stop_after(stopped, 3)
    stop_after(stopped, 5, resume=True)
    train(stopped, resume=True)
    one, two = (list_checkpoints(Path(r["run"]["dir"]))[-1] for r in (whole, stopped))
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (one / name).read_bytes() == (two / name).read_bytes(), name
    losses = [
        [
            (r["step"], r["train/loss"])
            for r in read_json_lines(Path(r["run"]["dir"]) / "metrics.jsonl")
        ]
        for r in (whole, stopped)
    ]
    assert losses[0] == losses[1]


def test_saved_run_can_be_loaded_and_resumed(recipe: dict[str, Any]) -> None:
    """accelerate #3971, torchtitan #811."""
    recipe = short(recipe)
    recipe["model"] = {**recipe["model"], "tie_word_embeddings": True}
    result = train(recipe)
    loaded = load(result.checkpoint)
    assert loaded.tokenizer is not None
    assert loaded.model.lm_head.weight is loaded.model.get_parameter("model.embed_tokens.weight")
    assert train(recipe, resume=True).step == 6


def test_random_states_are_not_stored_as_pickles(recipe: dict[str, Any]) -> None:
    """CVE-2026-1839: whoever resumed a run from somebody else ran their code."""
    result = train(short(recipe))
    files = sorted(result.checkpoint.iterdir())
    assert "optimizer.safetensors" in {file.name for file in files}
    for file in files:
        if file.suffix == ".safetensors":
            tensors = safetensors.torch.load_file(file)
            assert file.name != "optimizer.safetensors" or "rng.cpu" in tensors
        else:
            assert file.suffix == ".json"
            json.loads(file.read_text(encoding="utf-8"))


# Weights


def written(folder: Path, change: Any) -> Path:
    """A small model's folder, its tensors changed."""
    folder.mkdir(exist_ok=True)
    model = new_model(LLAMA)
    (folder / "config.json").write_text(json.dumps(model.config.to_hf()))
    tensors = dict(weights_to_save(model))
    change(tensors)
    save_weights(tensors, folder)
    return folder


def test_load_model_with_missing_weights_raises(tmp_path: Path) -> None:
    """transformers #46620: with a warning that nobody read."""
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(ModelError, match=f"lacks tensors: {name}"):
        load(written(tmp_path / "a", lambda tensors: tensors.pop(name)))


def test_load_untied_head_with_tied_config_raises(tmp_path: Path) -> None:
    """transformers #38870: the config said tied, the file held another head."""
    folder = written(tmp_path / "a", lambda tensors: None)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    with pytest.raises(FirstlightError, match="but their values differ"):
        load(folder)


def test_metrics_lines_are_not_duplicated_after_resume(recipe: dict[str, Any]) -> None:
    recipe = short(recipe)
    stop_after(recipe, 5)
    train(recipe, resume=True)
    records = read_json_lines(Path(recipe["run"]["dir"]) / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]

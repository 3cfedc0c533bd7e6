"""Data that change under a run, and run folders that are moved or wanted twice."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from driven import MEASURED, newest, one_thread
from recorded_disk import Tree, read_tree
from small import make_split

from firstlight.checkpoint import checkpoint
from firstlight.checkpoint.checkpoint import load_trainer_state, verify_checkpoint
from firstlight.checkpoint.manifest import read_manifest, write_manifest
from firstlight.checkpoint.retention import CheckpointConfig, prune_checkpoints
from firstlight.checkpoint.run_folder import held
from firstlight.checkpoint.selection import list_checkpoints, newest_checkpoint
from firstlight.data.corpus import TokenDataset
from firstlight.data.shards import BLOCK_BYTES
from firstlight.errors import CheckpointError, DataError
from firstlight.files.atomic import read_json, remove_folder
from firstlight.run_log.reader import read_json_lines
from firstlight.training.loop import train
from waiting import wait_until


def zero(path: Path) -> None:
    """Overwrite the last quarter of a file with zeros."""
    size = path.stat().st_size
    with open(path, "r+b") as file:
        file.seek(size * 3 // 4)
        file.write(bytes(size - size * 3 // 4))


def truncate(path: Path) -> None:
    """Cut the last quarter of a file off."""
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size * 3 // 4)


def end_of(run: Path) -> list[object]:
    """Weights, moments and metrics at the end of a run."""
    tensors = [
        (newest(run) / f"{name}.safetensors").read_bytes() for name in ("model", "optimizer")
    ]
    records = [
        {key: value for key, value in record.items() if key not in MEASURED}
        for record in read_json_lines(run / "metrics.jsonl")
    ]
    return [*tensors, *records]


_DAMAGES = pytest.mark.parametrize(
    "damage, message", [(zero, "was changed"), (truncate, "was truncated")]
)


@_DAMAGES
@pytest.mark.parametrize("verify", [True, False])
def test_shard_modified_while_open_is_never_read_as_other_data(
    tmp_path: Path, damage: Callable[[Path], None], message: str, verify: bool
) -> None:
    tokens = np.random.default_rng(0).integers(1, 290, 4 * BLOCK_BYTES).tolist()
    folder = make_split(tmp_path, [tokens], shard_tokens=10**6, vocab_size=300)
    dataset = TokenDataset(folder, "train", verify=verify)
    end = len(tokens)
    # Without verification a block is known from when it was first read.
    assert dataset[0:end].tolist() == tokens
    damage(folder / "train-00000.bin")
    # The undamaged part is still good.
    assert dataset[0 : end // 2].tolist() == tokens[: end // 2]
    with pytest.raises(DataError, match=rf"train-00000\.bin {message} .*while it was in use"):
        dataset[end - 9 : end]
    with pytest.raises(DataError, match=message):
        dataset.document_starts(slice(0, end))


@_DAMAGES
@pytest.mark.parametrize("split, step", [("train", 5), ("val", 6)])
def test_run_with_modified_data_saves_checkpoint_and_resumes_exactly(
    recipe: dict[str, Any],
    tmp_path: Path,
    damage: Callable[[Path], None],
    message: str,
    split: str,
    step: int,
) -> None:
    good, data = Path(recipe["data"]["dir"]), tmp_path / "data"
    shutil.copytree(good, data)
    recipe["data"] |= {"dir": str(data), "workers": 0}
    name = f"{split}-00000.bin"

    def on_step(record: Mapping[str, Any]) -> None:
        if record["step"] == 5:
            damage(data / name)

    with one_thread():
        with pytest.raises(DataError, match=rf"{name} {message} .*\(saved at step {step}\)"):
            train(recipe, on_step=on_step)
        run = Path(recipe["run"]["dir"])
        assert newest(run).name == f"step-{step:08d}"
        # The validation split is read after the step: its metrics wait for the loss.
        assert (load_trainer_state(newest(run))["pending"] is not None) is (split == "val")
        shutil.copy(good / name, data / name)
        train(recipe, resume=True)
        whole = {**recipe, "run": {**recipe["run"], "dir": str(tmp_path / "whole")}}
        train(whole)
    assert end_of(run) == end_of(tmp_path / "whole")


@pytest.mark.parametrize("removed", [True, False])
def test_run_with_removed_folder_writes_nothing_in_its_place(
    recipe: dict[str, Any], tmp_path: Path, removed: bool
) -> None:
    recipe["checkpoint"] |= {"asynchronous": False}  # else step 4's may not be there yet
    run, elsewhere = Path(recipe["run"]["dir"]), tmp_path / "elsewhere"

    def on_step(record: Mapping[str, Any]) -> None:
        if record["step"] == 5 and removed:
            remove_folder(run)
        elif record["step"] == 5:
            run.rename(elsewhere)

    with pytest.raises(CheckpointError, match=r"run folder .* was moved or removed during the run"):
        train(recipe, on_step=on_step)
    assert not run.exists()
    if not removed:
        assert [folder.name for folder in list_checkpoints(elsewhere)] == ["step-00000004"]
        recipe["run"]["dir"] = str(elsewhere)
        assert train(recipe, resume=True).step == 12


def test_run_with_replaced_folder_leaves_new_folder_unchanged(
    recipe: dict[str, Any], tmp_path: Path
) -> None:
    recipe["checkpoint"] |= {"asynchronous": False}
    run, elsewhere = Path(recipe["run"]["dir"]), tmp_path / "elsewhere"
    copied: Tree = {}

    def on_step(record: Mapping[str, Any]) -> None:
        if record["step"] == 5:
            run.rename(elsewhere)
            shutil.copytree(elsewhere, run)  # with the same run.json: only the inode differs
            copied.update(read_tree(run))

    with pytest.raises(CheckpointError, match="was moved or removed"):
        train(recipe, on_step=on_step)
    assert read_tree(run) == copied
    assert [folder.name for folder in list_checkpoints(run)] == ["step-00000004"]


def test_run_with_deleted_lock_ends_when_another_starts_in_its_folder(
    recipe: dict[str, Any],
) -> None:
    run = Path(recipe["run"]["dir"])

    def on_step(record: Mapping[str, Any]) -> None:
        if record["step"] == 5:
            (run / ".lock").unlink()
            with held(run) as other:
                other.claim()

    recipe["checkpoint"] |= {"asynchronous": False}
    with pytest.raises(CheckpointError, match=r"run folder .* was taken over by another process"):
        train(recipe, on_step=on_step)
    assert [folder.name for folder in list_checkpoints(run)] == ["step-00000004"]
    assert train(recipe, resume=True).step == 12


def test_run_folder_taken_over_during_save_publishes_nothing(
    recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Path(recipe["run"]["dir"])

    def taken_over(*arguments: Any, **options: Any) -> None:
        if arguments[2] == 8:
            (run / ".lock").unlink()
            with held(run) as other:
                other.claim()
        write_manifest(*arguments, **options)

    monkeypatch.setattr(checkpoint, "write_manifest", taken_over)
    with pytest.raises(CheckpointError, match=r"run folder .* was taken over by another process"):
        train(recipe)
    assert newest(run).name == "step-00000006"


@pytest.mark.parametrize("removed", [None, "run.json", "checkpoints"])
def test_run_folder_removed_while_checkpoint_is_read_back_raises(
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removed: str | None
) -> None:
    run = Path(recipe["run"]["dir"])

    def gone(folder: Path, **options: Any) -> None:
        if removed is None:
            run.rename(tmp_path / "elsewhere")
        else:  # as far as a removal has come
            (run / "run.json").unlink()
            if removed == "checkpoints":
                shutil.rmtree(run / "checkpoints")
        verify_checkpoint(folder, **options)

    monkeypatch.setattr("firstlight.checkpoint.saver.verify_checkpoint", gone)
    with pytest.raises(CheckpointError, match=r"run folder .* was moved or removed during the run"):
        train(recipe)


def test_run_folder_removed_after_last_save_raises(
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Path(recipe["run"]["dir"])
    monkeypatch.setattr(
        "firstlight.training.loop.write_average", lambda _: run.rename(tmp_path / "elsewhere")
    )
    with pytest.raises(CheckpointError, match=r"run folder .* was moved or removed"):
        train(recipe)
    assert not run.exists()


def test_checkpoint_of_other_run_raises_by_name_and_is_never_deleted(
    recipe: dict[str, Any], tmp_path: Path
) -> None:
    run, other = Path(recipe["run"]["dir"]), tmp_path / "other"
    train({**recipe, "run": {**recipe["run"], "dir": str(other)}})
    train({**recipe, "schedule": {"max_steps": 6}})
    theirs = run / "checkpoints" / "step-00000008"
    shutil.copytree(other / "checkpoints" / "step-00000008", theirs)
    with pytest.raises(CheckpointError, match=r"step-00000008 is a checkpoint of another run \("):
        train(recipe, resume=True)
    # Those who read the run say which one they leave out.
    newest_own, problems = newest_checkpoint(run)
    assert newest_own == run / "checkpoints" / "step-00000006"
    assert [problem.partition(" (")[0] for problem in problems] == [
        f"{theirs} is a checkpoint of another run"
    ]
    config = CheckpointConfig(keep_last=1, keep_best=0)
    prune_checkpoints(run, newest_own, config)
    verify_checkpoint(theirs)
    manifest = theirs / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"step": 8', b'"step": 9'))
    damaged = run / "checkpoints" / "step-00000002"
    shutil.copytree(newest_own, damaged)
    assert list_checkpoints(run) == [damaged, newest_own, theirs]
    prune_checkpoints(run, newest_own, config)
    assert list_checkpoints(run) == [newest_own, theirs]
    theirs.rename(tmp_path / theirs.name)
    assert train(recipe, resume=True).step == 12


def test_obstacles_in_place_of_run_files_are_renamed_and_run_resumes_exactly(
    recipe: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(recipe["run"]["dir"])
    train(recipe)
    whole = end_of(run)[:2]
    shutil.rmtree(newest(run))
    logs = ("metrics.jsonl", "samples.jsonl", "starts.jsonl", "events.jsonl")
    others = ("recipe.yaml", "run.json", "report.png", "length.json")
    for name in (*logs, *others):
        (run / name).unlink(missing_ok=True)
    for name in logs:
        os.mkfifo(run / name)
    for name in others:
        (run / name).mkdir()
    assert train(recipe, resume=True, progress=True).step == 12
    assert end_of(run)[:2] == whole
    said = capsys.readouterr().err
    for name in (*logs, *others):
        assert (run / f"{name}.damaged").exists()
        there = run / name
        assert f"warning: {there} was not a file, and was renamed to {there}.damaged" in said
    assert [line["step"] for line in read_json_lines(run / "metrics.jsonl")] == [9, 10, 11, 12]
    assert f"{run / 'metrics.jsonl'} has no lines for steps 1 to 8: " in said


def test_run_id_is_recovered_after_its_file_was_lost(recipe: dict[str, Any]) -> None:
    run = Path(recipe["run"]["dir"])
    train({**recipe, "schedule": {"max_steps": 6}})
    before = read_json(run / "run.json")
    (run / "run.json").write_text("{", encoding="utf-8")
    assert train(recipe, resume=True).step == 12
    after = read_json(run / "run.json")
    assert after["run_id"] == before["run_id"] == read_manifest(newest(run))["run_id"]
    assert after["start_id"] != before["start_id"]


def test_simultaneous_resumes_let_one_run_and_other_report_in_use(
    recipe: dict[str, Any],
) -> None:
    train({**recipe, "schedule": {"max_steps": 4}})
    start, refused, steps = threading.Barrier(2), [], []
    done = threading.Event()

    def wait_for_other(record: Mapping[str, Any]) -> None:
        wait_until("a refusal of one of the two", done.is_set)

    def resume() -> None:
        start.wait()
        try:
            # Whoever holds the folder keeps it until the other has been refused.
            result = train(
                {**recipe, "schedule": {"max_steps": 6}}, resume=True, on_step=wait_for_other
            )
            steps.append(result.step)
        except CheckpointError as error:
            refused.append(str(error))
            done.set()

    threads = [threading.Thread(target=resume) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert steps == [6]
    (problem,) = refused
    assert problem.startswith(f"run folder {recipe['run']['dir']} is in use by another process: ")

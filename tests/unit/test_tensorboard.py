"""RUN/tensorboard/, read back by TensorBoard's own reader."""

from __future__ import annotations

import builtins
import copy
import errno
import json
import os
import warnings
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from firstlight.cli.main import main
from firstlight.errors import MissingDependencyError
from firstlight.files import disk as seam
from firstlight.files.disk import Disk
from firstlight.report.records import read_json_lines
from firstlight.training.loop import train
from firstlight.training.metrics import RunLogs
from firstlight.training.tensorboard_log import TENSORBOARD_NAME, TensorBoardLog

pytest.importorskip("tensorboard")


class StoppedError(Exception):
    """Ends a run from within, as a kill would."""


def accumulated(folder: Path) -> Any:
    """What TensorBoard finds in a folder, with nothing left out."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        found = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
        found.Reload()
    return found


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    found = accumulated(folder)
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def expected_scalars(run: Path) -> dict[str, list[tuple[int, float]]]:
    """What metrics.jsonl says, as fp32."""
    result: dict[str, list[tuple[int, float]]] = {}
    for record in read_json_lines(run / "metrics.jsonl"):
        for key, value in record.items():
            if key != "step" and value is not None:
                result.setdefault(key, []).append((record["step"], float(np.float32(value))))
    return result


def texts(folder: Path) -> dict[str, list[tuple[int, str]]]:
    found = accumulated(folder)
    return {
        tag: [
            (event.step, event.tensor_proto.string_val[0].decode()) for event in found.Tensors(tag)
        ]
        for tag in found.Tags()["tensors"]
    }


def with_tensorboard(recipe: dict[str, Any], **run: Any) -> dict[str, Any]:
    result = copy.deepcopy(recipe)
    result["run"] |= {"trackers": ["tensorboard"], **run}
    return result


def stop_after(recipe: dict[str, Any], step: int, **options: Any) -> None:
    def on_step(record: Mapping[str, Any]) -> None:
        if record["step"] == step:
            raise StoppedError

    with pytest.raises(StoppedError):
        train(recipe, on_step=on_step, **options)


def written(run: Path) -> Path:
    """The one event file of a run that holds anything; the one before it, if any, is empty."""
    *empty, path = sorted((run / TENSORBOARD_NAME).iterdir())
    assert [found.stat().st_size for found in empty] in ([], [0])
    return path


def test_every_number_of_every_step_is_there_exactly(recipe: dict[str, Any]) -> None:
    recipe = with_tensorboard(recipe)
    recipe["evaluation"]["sample_prompts"] = ["the light", "``` a\n"]
    run = train(recipe).run_folder
    found = scalars(run / TENSORBOARD_NAME)
    assert found == expected_scalars(run)
    assert {"train/loss", "val/loss", "learning_rate", "grad_norm", "mfu"} <= found.keys()
    assert {"tokens_per_second", "memory_bytes", "bits_per_byte"} <= found.keys()
    assert [step for step, _ in found["train/loss"]] == list(range(1, 13))
    samples = read_json_lines(run / "samples.jsonl")
    both = texts(run / TENSORBOARD_NAME)
    assert both.keys() == {"recipe", "samples/0", "samples/1"}
    recipe_text = (run / "recipe.yaml").read_text(encoding="utf-8")
    assert both["recipe"] == [(0, f"````\n{recipe_text}\n````")]
    for number, fence in ((0, "```"), (1, "````")):
        assert both[f"samples/{number}"] == [
            (s["step"], f"{fence}\n{s['prompt']}{s['text']}\n{fence}") for s in samples[number::2]
        ]


def test_it_changes_nothing_of_the_run(recipe: dict[str, Any], tmp_path: Path) -> None:
    plain = train(recipe)
    other = train(with_tensorboard(recipe, dir=str(tmp_path / "other")))
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (plain.checkpoint / name).read_bytes() == (other.checkpoint / name).read_bytes()
    steps = [
        [(r["step"], r["train/loss"], r["grad_norm"]) for r in read_json_lines(folder)]
        for folder in (plain.run_folder / "metrics.jsonl", other.run_folder / "metrics.jsonl")
    ]
    assert steps[0] == steps[1]
    assert not (plain.run_folder / TENSORBOARD_NAME).exists()


def test_steps_that_are_done_again_are_there_once(recipe: dict[str, Any]) -> None:
    recipe = with_tensorboard(recipe)
    run = Path(recipe["run"]["dir"])
    stop_after(recipe, 7)
    before = written(run).name
    assert len(scalars(run / TENSORBOARD_NAME)["train/loss"]) == 7
    train(recipe, resume=True)
    found = scalars(run / TENSORBOARD_NAME)
    assert found == expected_scalars(run)
    assert [step for step, _ in found["train/loss"]] == list(range(1, 13))
    # Under a later name, by which a TensorBoard that is open sees another file.
    assert written(run).name > before


def test_a_tensorboard_that_is_open_forgets_the_steps_that_are_done_again(tmp_path: Path) -> None:
    with RunLogs(tmp_path, 0, tensorboard=True) as logs:
        for step in range(1, 9):
            logs.write_step({"step": step, "train/loss": 1.0})
        found = accumulated(tmp_path / TENSORBOARD_NAME)
        assert len(found.Scalars("train/loss")) == 8
        logs.drop_after(3)
        logs.write_step({"step": 4, "train/loss": 2.0})
        found.Reload()
        values = [(event.step, event.value) for event in found.Scalars("train/loss")]
        assert values == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0)]
        logs.drop_after(1)
        found.Reload()
        assert [event.step for event in found.Scalars("train/loss")] == [1]
        assert scalars(tmp_path / TENSORBOARD_NAME) == {"train/loss": [(1, 1.0)]}


def test_it_can_be_switched_on_later(recipe: dict[str, Any]) -> None:
    stop_after(recipe, 6)
    recipe = with_tensorboard(recipe)
    train(recipe, resume=True)
    run = Path(recipe["run"]["dir"])
    assert scalars(run / TENSORBOARD_NAME) == expected_scalars(run)


def test_a_file_that_a_kill_cut_short_is_made_again(recipe: dict[str, Any]) -> None:
    recipe = with_tensorboard(recipe)
    run = Path(recipe["run"]["dir"])
    stop_after(recipe, 6)
    path = written(run)
    path.write_bytes(path.read_bytes()[:-3])
    (run / TENSORBOARD_NAME / ".tmp-events-12345678").write_bytes(b"half")
    train(recipe, resume=True)
    assert scalars(run / TENSORBOARD_NAME) == expected_scalars(run)
    assert written(run).name.startswith("events.out.tfevents.")


def test_times_are_the_runs_own_and_other_files_stay(tmp_path: Path) -> None:
    folder = tmp_path / TENSORBOARD_NAME
    log = TensorBoardLog(folder)
    lines: list[dict[str, Any]] = [
        {"step": 1, "seconds": 2.0, "save_stall_seconds": 0.5},
        {"step": 2, "seconds": 1.0, "save_stall_seconds": None},
    ]
    log.begin(lines[:1], [])
    log.write(lines[1], [])
    log.close()
    began = int(written(tmp_path).name.split(".")[3])
    (folder / "events.out.tfevents.1.mine").write_bytes(b"")
    later = TensorBoardLog(folder)
    later.begin(lines, [])
    later.close()
    assert [path.name.split(".", 4)[4] for path in sorted(folder.iterdir())[1:]] == [
        "000001.firstlight",
        "000002.firstlight",
    ]
    times = [event.wall_time for event in accumulated(folder).Scalars("seconds")]
    assert times == [began + 2.5, began + 3.5]


def test_what_is_no_number_is_left_out(tmp_path: Path) -> None:
    log = TensorBoardLog(tmp_path)
    record = {"step": 1, "a": None, "b": True, "c": "text", "d": float("nan"), "e": 7, "f": 1e300}
    log.begin([record], [{"step": 1, "prompt": "\ud800", "text": "x"}])
    log.close()
    assert scalars(tmp_path) == {"e": [(1, 7.0)], "f": [(1, float("inf"))]}
    assert texts(tmp_path) == {"samples/0": [(1, "```\n?x\n```")]}


def test_a_link_in_the_place_of_a_file_is_not_followed(tmp_path: Path) -> None:
    folder = tmp_path / TENSORBOARD_NAME
    folder.mkdir()
    (tmp_path / "mine").write_text("mine", encoding="utf-8")
    link = folder / "events.out.tfevents.1700000000.000007.firstlight"
    link.symlink_to(tmp_path / "mine")
    log = TensorBoardLog(folder)
    log.begin([{"step": 1, "a": 1.0}], [])
    log.close()
    assert (tmp_path / "mine").read_text(encoding="utf-8") == "mine"
    assert [path.name for path in folder.iterdir()] == [link.name.replace("7.", "8.")]


class NoTensorBoard(Disk):
    """Refuses what goes into tensorboard/ once so many of its records are written."""

    def __init__(self, after: int) -> None:
        self.left = after

    def write(self, file: FileIO, data: bytes | bytearray | memoryview) -> int:
        if TENSORBOARD_NAME in str(file.name):
            self.left -= 1
            if self.left < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(file, data)


@pytest.mark.parametrize("after", [0, 5])
def test_a_disk_that_refuses_it_ends_only_it(
    recipe: dict[str, Any],
    after: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe = with_tensorboard(recipe)
    run = Path(recipe["run"]["dir"])
    monkeypatch.setattr(seam, "disk", NoTensorBoard(after))
    assert train(recipe).step == 12
    said = capsys.readouterr().err
    assert said.count("is not written any more: the disk is full") == 1
    assert len(read_json_lines(run / "metrics.jsonl")) == 12
    monkeypatch.setattr(seam, "disk", Disk())
    if after:
        # One write for the beginning, one for each step.
        assert [step for step, _ in scalars(run / TENSORBOARD_NAME)["mfu"]] == [1, 2, 3, 4]
    train(recipe, resume=True)
    assert scalars(run / TENSORBOARD_NAME) == expected_scalars(run)


def test_without_the_package_a_run_is_refused_before_anything_is_written(
    recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def missing(name: str, *arguments: Any, **options: Any) -> Any:
        if name.split(".")[0] == "tensorboard":
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", missing)
    recipe = with_tensorboard(recipe)
    with pytest.raises(MissingDependencyError, match=r"pip install 'firstlight\[dash\]'"):
        train(recipe)
    assert not Path(recipe["run"]["dir"]).exists()


def test_the_command_line_has_the_switch(
    recipe: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "recipe.yaml"
    recipe["schedule"] = {"max_steps": 2, "warmup_steps": 0}
    path.write_text(json.dumps(recipe), encoding="utf-8")
    assert main(["train", str(path), "--run.tensorboard", "true"]) == 0
    run = Path(recipe["run"]["dir"])
    assert scalars(run / TENSORBOARD_NAME) == expected_scalars(run)

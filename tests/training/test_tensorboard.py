"""RUN/tensorboard/, read with TensorBoard's own reader."""

from __future__ import annotations

import copy
import importlib.util
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from firstlight.cli.main import main
from firstlight.errors import MissingDependencyError
from firstlight.run_log.reader import read_json_lines
from firstlight.training.loop import train
from firstlight.training.trackers import TENSORBOARD_NAME, TensorboardTracker, Trackers

pytest.importorskip("tensorboard")


class StoppedError(Exception):
    """Ends a run from within, like a kill."""


def accumulated(folder: Path) -> Any:
    """Return everything that TensorBoard reads from a folder."""
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
    """Return the values of metrics.jsonl as fp32."""
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
    """Return the only event file of a run that is not empty; an older one must be empty."""
    *empty, path = sorted((run / TENSORBOARD_NAME).iterdir())
    assert [found.stat().st_size for found in empty] in ([], [0])
    return path


def test_tensorboard_contains_every_value_of_every_step_exactly(recipe: dict[str, Any]) -> None:
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
    ((step, recipe_text),) = both["recipe"]
    assert step == 0
    stored = yaml.safe_load((run / "recipe.yaml").read_text(encoding="utf-8"))
    assert yaml.safe_load(recipe_text.strip("`")) == stored
    for number, fence in ((0, "```"), (1, "````")):
        assert both[f"samples/{number}"] == [
            (s["step"], f"{fence}\n{s['prompt']}{s['text']}\n{fence}") for s in samples[number::2]
        ]


def test_tensorboard_does_not_change_the_run(recipe: dict[str, Any], tmp_path: Path) -> None:
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


def test_tensorboard_repeated_steps_appear_once(recipe: dict[str, Any]) -> None:
    recipe = with_tensorboard(recipe)
    run = Path(recipe["run"]["dir"])
    stop_after(recipe, 7)
    before = written(run).name
    assert len(scalars(run / TENSORBOARD_NAME)["train/loss"]) == 7
    train(recipe, resume=True)
    found = scalars(run / TENSORBOARD_NAME)
    assert found == expected_scalars(run)
    assert [step for step, _ in found["train/loss"]] == list(range(1, 13))
    # Its name sorts later, so an open TensorBoard reads it as a new file.
    assert written(run).name > before


def test_tensorboard_resumed_run_replaces_repeated_steps(tmp_path: Path) -> None:
    tracker = TensorboardTracker()
    tracker.open(None, tmp_path, {})
    tracker.write([({"step": step, "train/loss": 1.0}, []) for step in range(1, 9)])
    found = accumulated(tmp_path / TENSORBOARD_NAME)
    assert len(found.Scalars("train/loss")) == 8
    # After the run went back to step 3.
    tracker.open(None, tmp_path, {})
    tracker.write([({"step": step, "train/loss": 1.0}, []) for step in range(1, 4)])
    tracker.write([({"step": 4, "train/loss": 2.0}, [])])
    found.Reload()
    values = [(event.step, event.value) for event in found.Scalars("train/loss")]
    assert values == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0)]
    tracker.close([], None, failed=False)
    assert scalars(tmp_path / TENSORBOARD_NAME) == {"train/loss": values}


def test_tensorboard_can_be_enabled_later(recipe: dict[str, Any]) -> None:
    stop_after(recipe, 6)
    recipe = with_tensorboard(recipe)
    train(recipe, resume=True)
    run = Path(recipe["run"]["dir"])
    assert scalars(run / TENSORBOARD_NAME) == expected_scalars(run)


def test_tensorboard_file_truncated_by_kill_is_rewritten(recipe: dict[str, Any]) -> None:
    recipe = with_tensorboard(recipe)
    run = Path(recipe["run"]["dir"])
    stop_after(recipe, 6)
    path = written(run)
    path.write_bytes(path.read_bytes()[:-3])
    train(recipe, resume=True)
    assert scalars(run / TENSORBOARD_NAME) == expected_scalars(run)
    assert written(run).name.startswith("events.out.tfevents.")


def mirrored(run: Path, records: list[dict[str, Any]], *samples: dict[str, Any]) -> Path:
    """Start a run with these logs, and return its TensorBoard folder."""
    run.mkdir(exist_ok=True)
    for name, lines in (("metrics.jsonl", records), ("samples.jsonl", samples)):
        (run / name).write_text("".join(json.dumps(one) + "\n" for one in lines), "utf-8")
    with Trackers(["tensorboard"], run, {}, lambda _: None, is_new=False, with_checkpoint=False):
        pass
    return run / TENSORBOARD_NAME


def test_tensorboard_event_times_after_resume_are_those_of_training(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"step": 1, "seconds": 2.0, "save_stall_seconds": 0.5},
        {"step": 2, "seconds": 1.0, "save_stall_seconds": None},
    ]
    folder = mirrored(tmp_path / "run", lines[:1])
    began = int(written(tmp_path / "run").name.split(".")[3])
    (folder / "events.out.tfevents.1.mine").write_bytes(b"")
    mirrored(tmp_path / "run", lines)
    assert [path.name.split(".", 4)[4] for path in sorted(folder.iterdir())[1:]] == [
        "000001.firstlight",
        "000002.firstlight",
    ]
    times = [event.wall_time for event in accumulated(folder).Scalars("seconds")]
    assert times == [began + 2.5, began + 3.5]


def test_tensorboard_non_numeric_values_are_omitted(tmp_path: Path) -> None:
    record = {"step": 1, "a": None, "b": True, "c": "text", "d": float("nan"), "e": 7, "f": 1e300}
    folder = mirrored(tmp_path / "run", [record], {"step": 1, "prompt": "\ud800", "text": "x"})
    assert scalars(folder) == {"e": [(1, 7.0)], "f": [(1, float("inf"))]}
    assert texts(folder)["samples/0"] == [(1, "```\n?x\n```")]


def test_tensorboard_link_in_place_of_event_file_is_not_followed(tmp_path: Path) -> None:
    folder = tmp_path / "run" / TENSORBOARD_NAME
    folder.mkdir(parents=True)
    (tmp_path / "mine").write_text("mine", encoding="utf-8")
    link = folder / "events.out.tfevents.1700000000.000007.firstlight"
    link.symlink_to(tmp_path / "mine")
    mirrored(tmp_path / "run", [{"step": 1, "a": 1.0}])
    assert (tmp_path / "mine").read_text(encoding="utf-8") == "mine"
    assert (folder / link.name.replace("7.", "8.")).is_file()


def test_tensorboard_event_file_not_writable_does_not_stop_training(
    recipe: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = with_tensorboard(recipe)
    run = Path(recipe["run"]["dir"])
    run.mkdir()
    (run / TENSORBOARD_NAME).write_text("not a folder", encoding="utf-8")
    assert train(recipe, progress=True).step == 12
    assert capsys.readouterr().err.count("warning: tensorboard has failed: FileExistsError") == 1
    assert len(read_json_lines(run / "metrics.jsonl")) == 12
    (run / TENSORBOARD_NAME).unlink()
    train(recipe, resume=True)
    assert scalars(run / TENSORBOARD_NAME) == expected_scalars(run)


def test_tensorboard_missing_package_raises_before_writing(
    recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    recipe = with_tensorboard(recipe)
    with pytest.raises(MissingDependencyError, match=r"pip install 'firstlight\[dash\]'"):
        train(recipe)
    assert not Path(recipe["run"]["dir"]).exists()


def test_tensorboard_is_enabled_from_command_line(
    recipe: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "recipe.yaml"
    recipe["schedule"] = {"max_steps": 2, "warmup_steps": 0}
    path.write_text(json.dumps(recipe), encoding="utf-8")
    assert main(["train", str(path), "--run.tensorboard", "true"]) == 0
    run = Path(recipe["run"]["dir"])
    assert scalars(run / TENSORBOARD_NAME) == expected_scalars(run)

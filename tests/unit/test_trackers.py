"""Trackers: the process of each, what it hands over, and what a run does not notice of it."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from firstlight.errors import ConfigError, MissingDependencyError
from firstlight.recipe import parse_recipe
from firstlight.report.records import read_json_lines
from firstlight.training import trackers
from firstlight.training.loop import train
from firstlight.training.tracker_libraries import Step
from firstlight.training.tracker_process import (
    Ending,
    Order,
    TrackerProgress,
    pass_on,
    read_progress,
)
from firstlight.training.trackers import Trackers

_TIMES = ("seconds", "per_second", "mfu", "memory_bytes")


def write_lines(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Replace a log, as a resumed run does."""
    other = path.with_name("new")
    other.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    os.replace(other, path)


def line(step: int) -> dict[str, Any]:
    """A step's metrics: no float of them is exact in decimal."""
    found: dict[str, Any] = {"step": step, "train/loss": 5 / (step + 2), "epoch/a b": step / 7}
    if step % 3 == 0:
        found |= {"val/loss": None, "skipped": True, "grad_norm": float("nan")}
    return found


def sample(step: int, text: str = "text") -> dict[str, Any]:
    return {"step": step, "prompt": "a ``` b\n", "text": text}


class Recorder:
    """A tracker in memory, which several starts share."""

    def __init__(self, fails_at: int = -1) -> None:
        self.fails_at = fails_at
        self.opened: list[str | None] = []
        self.steps: list[Step] = []
        self.closed: list[tuple[list[Path], Path | None, bool]] = []

    def open(self, run_id: str | None, folder: Path, config: Mapping[str, Any]) -> str:
        self.opened.append(run_id)
        return run_id or "id-1"

    def write(self, steps: Sequence[Step]) -> None:
        self.steps += steps
        if any(record["step"] == self.fails_at for record, _ in steps):
            raise ConnectionError("the server is gone")

    def close(self, files: Sequence[Path], checkpoint: Path | None, *, failed: bool) -> None:
        self.closed.append((list(files), checkpoint, failed))

    @property
    def numbers(self) -> list[int]:
        return [record["step"] for record, _ in self.steps]


def order_of(folder: Path) -> Order:
    state, metrics, samples = (str(folder / f"{n}.jsonl") for n in ("state", "metrics", "samples"))
    return Order("wandb", str(folder), state, metrics, samples, {"a": {"b": 1}})


def test_steps_are_handed_over_as_they_come(tmp_path: Path) -> None:
    order, tracker, asked = order_of(tmp_path), Recorder(), iter(range(3))
    (tmp_path / "report.html").write_text("x", encoding="utf-8")

    def ending() -> Ending | None:
        turn = next(asked)
        write_lines(tmp_path / "samples.jsonl", [sample(2)] if turn else [])
        write_lines(tmp_path / "metrics.jsonl", [line(n) for n in range(1, 2 + 2 * turn)])
        files = [str(tmp_path / name) for name in ("report.html", "report.png")]
        return Ending(files=files, checkpoint="c") if turn == 2 else None

    pass_on(order, tracker, ending)
    assert tracker.numbers == [1, 2, 3, 4, 5]
    assert [texts for _, texts in tracker.steps] == [[], [sample(2)], [], [], []]
    assert tracker.closed == [([tmp_path / "report.html"], Path("c"), False)]
    assert read_progress(Path(order.state)) == TrackerProgress("id-1", 5, 5)


def test_a_resumed_run_goes_on_in_the_same_run_without_doubled_steps(tmp_path: Path) -> None:
    order, tracker, metrics = order_of(tmp_path), Recorder(), tmp_path / "metrics.jsonl"
    write_lines(metrics, [line(n) for n in range(8)])
    pass_on(order, tracker, lambda: Ending(failed=True))
    # The checkpoint is that of step 4: steps 5 to 7 are made again.
    write_lines(metrics, [line(n) for n in range(10)])
    pass_on(order, tracker, Ending)
    assert tracker.opened == [None, "id-1"]
    assert tracker.numbers == list(range(10))
    assert [failed for _, _, failed in tracker.closed] == [True, False]


def test_a_run_that_goes_back_has_no_step_twice_in_a_tracker(tmp_path: Path) -> None:
    order, tracker, asked = order_of(tmp_path), Recorder(), iter((7, 4, 9))

    def ending() -> Ending | None:
        last = next(asked)
        write_lines(tmp_path / "metrics.jsonl", [line(n) for n in range(1, last + 1)])
        return Ending() if last == 9 else None

    pass_on(order, tracker, ending)
    assert tracker.numbers == list(range(1, 10))


def test_steps_that_a_failure_cut_off_are_not_handed_over_again(tmp_path: Path) -> None:
    order, tracker = order_of(tmp_path), Recorder(fails_at=60)
    write_lines(tmp_path / "metrics.jsonl", [line(n) for n in range(1, 131)])
    with pytest.raises(ConnectionError):
        pass_on(order, tracker, Ending)
    # 50 at a time: how many of the second 50 have arrived is not known.
    assert read_progress(Path(order.state)) == TrackerProgress("id-1", 100, 50)
    pass_on(order, tracker, Ending)
    assert tracker.numbers == list(range(1, 131))


def with_trackers(recipe: dict[str, Any], *names: str, **run: Any) -> dict[str, Any]:
    result = copy.deepcopy(recipe)
    result["run"] |= {"trackers": list(names), **run}
    return result


def figures(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what measures time and memory."""
    records = read_json_lines(run / "metrics.jsonl")
    return [{k: v for k, v in r.items() if not k.endswith(_TIMES)} for r in records]


@pytest.fixture
def plain_run(recipe: dict[str, Any], tmp_path: Path) -> Path:
    recipe["schedule"]["max_steps"] = 6
    recipe = copy.deepcopy(recipe)
    recipe["run"]["dir"] = str(tmp_path / "plain")
    return train(recipe).run_folder


#: A tracker that says something and ends in an error, and one that reads nothing and never ends.
_FAILS = [sys.executable, "-S", "-c", "raise SystemExit('the server is gone')"]
_HANGS = [sys.executable, "-S", "-c", "import signal; signal.pause()"]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (_FAILS, "warning: wandb has failed: the server is gone (it has no step; --resume"),
        (
            _HANGS,
            "warning: wandb has not ended after 0 s and is given up (it has no step; --resume",
        ),
        (["/nonexistent"], "warning: wandb gets nothing of this run: "),
    ],
    ids=["fails", "hangs", "missing"],
)
def test_a_run_does_not_notice_a_tracker_that_fails_or_hangs(
    recipe: dict[str, Any],
    plain_run: Path,
    command: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(trackers, "_COMMAND", command)
    monkeypatch.setattr(trackers, "_SECONDS_UNSAID", 0.0 if command is _HANGS else 60.0)
    monkeypatch.setattr(trackers, "_SECONDS", 0.0 if command is _HANGS else 60.0)
    monkeypatch.setattr(trackers, "require_trackers", lambda _: None)
    monkeypatch.setattr("firstlight.training.setup.require_trackers", lambda _: None)
    started = []

    class Started(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Started)
    result = train(with_trackers(recipe, "wandb"), progress=True)
    assert figures(result.run_folder) == figures(plain_run)
    for name in ("model.safetensors", "optimizer.safetensors"):
        other = plain_run / "checkpoints" / result.checkpoint.name / name
        assert (result.checkpoint / name).read_bytes() == other.read_bytes()
    # Said once, and no process stays.
    error = capsys.readouterr().err
    assert error.count("warning: wandb") == 1
    assert said in error
    assert all(process.poll() is not None for process in started)


def test_of_several_processes_the_main_one_alone_starts_trackers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "_COMMAND", ["/nonexistent"])
    with Trackers([], tmp_path, {}, pytest.fail, is_new=True, with_checkpoint=False):
        assert list(tmp_path.iterdir()) == []


def test_a_missing_package_is_refused_before_anything_is_written(
    recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'firstlight\[trackio\]'"):
        train(with_trackers(recipe, "trackio"))
    assert not Path(recipe["run"]["dir"]).exists()


def test_the_key_takes_the_one_of_earlier_recipes() -> None:
    def of(**run: Any) -> Sequence[str]:
        return parse_recipe({"data": {"dir": "d"}, "run": run}).run.trackers

    assert of() == of(tensorboard=False) == []
    assert of(tensorboard=True) == ["tensorboard"]
    assert of(tensorboard=True, trackers=["mlflow"]) == ["mlflow", "tensorboard"]
    assert of(tensorboard=False, trackers=["mlflow"]) == ["mlflow"]
    for wrong, said in (
        ({"trackers": ["wandb", "wandb"]}, "trackers names one twice: wandb, wandb"),
        ({"trackers": ["neptune"]}, "run.trackers"),
        ({"tensorboard": "yes"}, "run.tensorboard"),
    ):
        with pytest.raises(ConfigError, match=said):
            of(**wrong)


# The libraries themselves, in their offline modes

#: Put beside the libraries: it writes down every address that Python code connects to.
_SITE = """
import os, sys
def hook(event, arguments):
    place = arguments[1] if event == "socket.connect" else None
    if event == "socket.getaddrinfo" or isinstance(place, tuple):
        with open(os.environ["CONNECTIONS"], "a") as file:
            file.write(repr(place or arguments) + "\\n")
sys.addaudithook(hook)
"""


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for all that a library writes, and its list of connections in `connections`."""
    (tmp_path / "sitecustomize.py").write_text(_SITE, encoding="utf-8")
    for name in [*os.environ]:
        if name.startswith(("WANDB_", "MLFLOW_", "TRACKIO_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("CONNECTIONS", str(tmp_path / "connections"))
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    # A folder of files, which opens in a tenth of the time of MLflow's default.
    monkeypatch.setenv("MLFLOW_TRACKING_URI", str(tmp_path / "mlruns"))
    return tmp_path


def tracked_run(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that is killed at step 7, and resumed from its checkpoint of step 4."""
    pytest.importorskip(name)
    for limit in ("_SECONDS", "_SECONDS_UNSAID"):
        monkeypatch.setattr(trackers, limit, 500.0)
    run, checkpoint = folder / "run", folder / "run" / "checkpoints" / "step-9"
    checkpoint.mkdir(parents=True)
    (checkpoint / "model.safetensors").write_bytes(b"weights")
    (run / "report.html").write_text("<p>report</p>", encoding="utf-8")
    said: list[str] = []

    def start(last: int, *, is_new: bool) -> None:
        write_lines(run / "samples.jsonl", [sample(n) for n in (3, 6) if n <= last])
        write_lines(run / "metrics.jsonl", [line(n) for n in range(last + 1)])
        config = {"run": {"seed": 1}, "data": {"dir": "d" * 7000}}
        with Trackers(
            [name], run, config, said.append, is_new=is_new, with_checkpoint=True
        ) as tracked:
            if last == 7:
                raise KeyboardInterrupt
            tracked.give_checkpoint(checkpoint)

    with pytest.raises(KeyboardInterrupt):
        start(7, is_new=True)
    start(9, is_new=False)
    log = (run / "trackers" / f"{name}.log").read_text(encoding="utf-8")
    assert [text.split(":")[0] for text in said] == [name, name], log
    asked = folder / "connections"
    sent = asked.read_text(encoding="utf-8").splitlines() if asked.exists() else []
    assert [one for one in sent if "127.0.0.1" not in one and "localhost" not in one] == []
    return run


def expected() -> dict[str, list[tuple[int, float]]]:
    """The numbers of metrics.jsonl, as Python floats."""
    return {
        "train/loss": [(n, line(n)["train/loss"]) for n in range(10)],
        "epoch/a b": [(n, line(n)["epoch/a b"]) for n in range(10)],
    }


def test_mlflow_has_each_number_of_a_resumed_run_once(
    offline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tracked_run("mlflow", offline, monkeypatch)
    run_id = read_progress(run / "trackers" / "mlflow.jsonl").run_id
    (found,) = (path for path in (offline / "mlruns").glob(f"*/{run_id}") if path.is_dir())
    metrics = {
        str(path.relative_to(found / "metrics")): [
            (int(step), float(value))
            for _, value, step in map(str.split, path.read_text(encoding="utf-8").splitlines())
        ]
        for path in (found / "metrics").rglob("*")
        if path.is_file()
    }
    assert metrics == expected()
    assert (found / "params" / "run.seed").read_text(encoding="utf-8") == "1"
    stored = {path.name for path in (found / "artifacts").rglob("*") if path.is_file()}
    texts = {"step-00000003.txt", "step-00000006.txt"}
    assert stored == {"report.html", "model.safetensors", *texts}


def test_trackio_has_each_number_of_a_resumed_run_once(
    offline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tracked_run("trackio", offline, monkeypatch)
    name = read_progress(run / "trackers" / "trackio.jsonl").run_id
    with sqlite3.connect(offline / "trackio" / "firstlight.db") as store:
        query = "SELECT step, metrics FROM metrics WHERE run_name = ? ORDER BY step"
        rows = [(step, json.loads(text)) for step, text in store.execute(query, (name,))]
        files = {one for (one,) in store.execute("SELECT name FROM artifacts")}
        runs = {one for (one,) in store.execute("SELECT run_id FROM metrics")}
    store.close()
    keys = expected()
    assert {key: [(n, row[key]) for n, row in rows] for key in keys} == keys
    assert len(runs) == 1
    assert [n for n, row in rows if "samples/0" in row] == [3, 6]
    assert rows[3][1]["samples/0"]["_value"] == "````\na ``` b\ntext\n````"
    assert files == {f"{name}-report.html", f"{name}-checkpoint"}


def wandb_records(path: Path) -> list[Any]:
    """The records of wandb's file: protobuf in LevelDB's log format, behind 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, place, record, found = path.read_bytes(), 7, b"", []
    while place + 7 <= len(content):
        if (room := 32768 - place % 32768) < 7:
            place += room
            continue
        _, size, kind = struct.unpack_from("<IHB", content, place)
        record += content[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            found.append(Record.FromString(record))
            record = b""
    return found


def test_wandb_has_each_number_of_a_resumed_run_once(
    offline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tracked_run("wandb", offline, monkeypatch)
    run_id = read_progress(run / "trackers" / "wandb.jsonl").run_id
    folders = sorted((run / "wandb").glob(f"offline-run-*-{run_id}"))
    assert len(folders) == 2
    records = [r for folder in folders for r in wandb_records(folder / f"run-{run_id}.wandb")]
    rows = [
        {
            item.key or "/".join(item.nested_key): json.loads(item.value_json)
            for item in r.history.item
        }
        for r in records
        if r.WhichOneof("record_type") == "history"
    ]
    keys = expected()
    assert {key: [(row["_step"], row[key]) for row in rows] for key in keys} == keys
    assert [row["_step"] for row in rows if "samples/nrows" in row] == [3, 6]
    assert (folders[1] / "files" / "report.html").read_text(encoding="utf-8") == "<p>report</p>"
    stored = [r.artifact.name for r in records if r.WhichOneof("record_type") == "artifact"]
    assert f"checkpoint-{run_id}" in stored

"""Trackers: each one's thread, the data it sends, and failures that do not affect the run."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import json
import os
import sqlite3
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from firstlight.errors import ConfigError, MissingDependencyError
from firstlight.recipe import parse_recipe
from firstlight.run_log.reader import read_json_lines
from firstlight.training import trackers
from firstlight.training.loop import train
from firstlight.training.trackers import LIBRARIES, Step, TrackerProgress, Trackers, read_progress

_TIMES = ("seconds", "per_second", "mfu", "memory_bytes")


def write_lines(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Replace a log, like a resumed run."""
    other = path.with_name("new")
    other.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    os.replace(other, path)


def line(step: int) -> dict[str, Any]:
    """Return a step's metrics, whose floats are not exact in decimal."""
    found: dict[str, Any] = {"step": step, "train/loss": 5 / (step + 2), "epoch/a b": step / 7}
    if step % 3 == 0:
        found |= {"val/loss": None, "skipped": True, "grad_norm": float("nan")}
    return found


def sample(step: int, text: str = "text") -> dict[str, Any]:
    return {"step": step, "prompt": "a ``` b\n", "text": text}


class Recorder:
    """A tracker in memory, shared by several starts."""

    def __init__(self, *, fails_at: int = -1, is_mirror: bool = False) -> None:
        self.fails_at, self.is_mirror = fails_at, is_mirror
        self.opened: list[str | None] = []
        self.steps: list[Step] = []
        self.closed: list[tuple[list[Path], Path | None, bool]] = []

    def open(self, run_id: str | None, folder: Path, config: Mapping[str, Any]) -> str:
        self.opened.append(run_id)
        return run_id or "id-1"

    def write(self, steps: Sequence[Step]) -> None:
        self.steps += steps
        if any(record["step"] == self.fails_at for record, _ in steps):
            raise ConnectionError("the server is\ngone")

    def close(self, files: Sequence[Path], checkpoint: Path | None, *, failed: bool) -> None:
        self.closed.append((list(files), checkpoint, failed))

    @property
    def numbers(self) -> list[int]:
        return [record["step"] for record, _ in self.steps]


class Turns(threading.Event):
    """The end of a run, after some turns of the reader, each of which first changes the logs."""

    def __init__(self, *turns: Callable[[], None]) -> None:
        super().__init__()
        self._turns = list(turns)

    def wait(self, timeout: float | None = None) -> bool:
        if self._turns:
            self._turns.pop(0)()
        return not self._turns


def follow(
    folder: Path,
    tracker: Recorder,
    *turns: Callable[[], None],
    is_new: bool = False,
    failed: bool = False,
) -> str | None:
    """Send a run to a tracker in this thread, and return the tracker's error."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(LIBRARIES, "wandb", lambda: tracker)
        thread = trackers._TrackerThread("wandb", folder, {"a": {"b": 1}}, is_new=is_new)
        thread.checkpoint, thread.has_failed_run = Path("c"), failed
        thread.run_is_over = Turns(*turns)
        thread.run()
    return thread.error


def state(folder: Path) -> TrackerProgress:
    return read_progress(folder / "trackers" / "wandb.jsonl")


def test_tracker_receives_steps_with_samples_during_run(tmp_path: Path) -> None:
    tracker = Recorder()
    (tmp_path / "report.html").write_text("x", encoding="utf-8")

    def turn(last: int, samples: list[dict[str, Any]]) -> None:
        write_lines(tmp_path / "samples.jsonl", samples)
        write_lines(tmp_path / "metrics.jsonl", [line(n) for n in range(1, last + 1)])

    turns = [lambda: turn(1, []), lambda: turn(3, [sample(2)]), lambda: turn(5, [sample(2)])]
    assert follow(tmp_path, tracker, *turns) is None
    assert tracker.numbers == [1, 2, 3, 4, 5]
    assert [texts for _, texts in tracker.steps] == [[], [sample(2)], [], [], []]
    assert tracker.closed == [([tmp_path / "report.html"], Path("c"), False)]
    assert state(tmp_path) == TrackerProgress("id-1", 5, 5)


def test_tracker_of_resumed_run_continues_same_run_without_duplicate_steps(
    tmp_path: Path,
) -> None:
    tracker, metrics = Recorder(), tmp_path / "metrics.jsonl"
    write_lines(metrics, [line(n) for n in range(8)])
    follow(tmp_path, tracker, is_new=True, failed=True)
    # The checkpoint is from step 4, so steps 5 to 7 are repeated.
    write_lines(metrics, [line(n) for n in range(10)])
    follow(tmp_path, tracker)
    assert tracker.opened == [None, "id-1"]
    assert tracker.numbers == list(range(10))
    assert [failed for _, _, failed in tracker.closed] == [True, False]
    follow(tmp_path, tracker, is_new=True)
    assert tracker.opened[2:] == [None]


@pytest.mark.parametrize("is_mirror", [False, True])
def test_tracker_of_rolled_back_run_receives_steps_once_or_again(
    tmp_path: Path, is_mirror: bool
) -> None:
    tracker = Recorder(is_mirror=is_mirror)
    turns = [
        lambda last=last: write_lines(
            tmp_path / "metrics.jsonl", [line(n) for n in range(1, last + 1)]
        )
        for last in (7, 4, 9)
    ]
    assert follow(tmp_path, tracker, *turns) is None
    again = [*range(1, 8), *range(1, 5), *range(1, 10)]
    assert tracker.numbers == (again if is_mirror else list(range(1, 10)))
    assert len(tracker.opened) == (3 if is_mirror else 1)


def test_tracker_failure_does_not_resend_steps_of_that_call(tmp_path: Path) -> None:
    tracker = Recorder(fails_at=60)
    write_lines(tmp_path / "metrics.jsonl", [line(n) for n in range(1, 131)])
    assert follow(tmp_path, tracker) == "ConnectionError: the server is gone"
    # 50 at a time: it is unknown how many of the second 50 have arrived.
    assert state(tmp_path) == TrackerProgress("id-1", 100, 50)
    assert follow(tmp_path, tracker) is None
    assert tracker.numbers == list(range(1, 131))


def with_trackers(recipe: dict[str, Any], *names: str, **run: Any) -> dict[str, Any]:
    result = copy.deepcopy(recipe)
    result["run"] |= {"trackers": list(names), **run}
    return result


def figures(run: Path) -> list[dict[str, Any]]:
    """Return metrics.jsonl without the values that measure time and memory."""
    records = read_json_lines(run / "metrics.jsonl")
    return [{k: v for k, v in r.items() if not k.endswith(_TIMES)} for r in records]


@pytest.fixture
def plain_run(recipe: dict[str, Any], tmp_path: Path) -> Path:
    recipe["schedule"]["max_steps"] = 6
    recipe = copy.deepcopy(recipe)
    recipe["run"]["dir"] = str(tmp_path / "plain")
    return train(recipe).run_folder


class Hanging(Recorder):
    """A tracker whose first call never returns."""

    def open(self, run_id: str | None, folder: Path, config: Mapping[str, Any]) -> str:
        threading.Event().wait()
        raise AssertionError("unreachable")


class Failing(Recorder):
    """A tracker whose server fails."""

    def open(self, run_id: str | None, folder: Path, config: Mapping[str, Any]) -> str:
        raise ConnectionError("the server is gone")


@pytest.mark.parametrize(
    ("library", "said"),
    [
        (Failing, "warning: wandb has failed: ConnectionError: the server is gone (it has no step"),
        (
            Hanging,
            "warning: wandb has not finished after 0 s and is abandoned (it has no step; --res",
        ),
    ],
)
def test_tracker_failing_or_hanging_does_not_change_training(
    recipe: dict[str, Any],
    plain_run: Path,
    library: type[Recorder],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(LIBRARIES, "wandb", library)
    for limit in ("_SECONDS", "_SECONDS_UNSAID"):
        monkeypatch.setattr(trackers, limit, 0.0 if library is Hanging else 60.0)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: True)
    monkeypatch.setattr(trackers, "GIVEN_UP", set())
    result = train(with_trackers(recipe, "wandb"), progress=True)
    assert figures(result.run_folder) == figures(plain_run)
    for name in ("model.safetensors", "optimizer.safetensors"):
        other = plain_run / "checkpoints" / result.checkpoint.name / name
        assert (result.checkpoint / name).read_bytes() == other.read_bytes()
    error = capsys.readouterr().err
    assert error.count("warning: wandb") == 1
    assert said in error


def test_trackers_hanging_are_waited_for_simultaneously(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, clock, said = ["mlflow", "trackio", "wandb"], [100.0], list[str]()

    def join(_: threading.Thread, timeout: float) -> None:
        clock[0] += timeout

    for name in names:
        monkeypatch.setitem(LIBRARIES, name, Hanging)
    monkeypatch.setattr(trackers._TrackerThread, "join", join)
    monkeypatch.setattr(trackers, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(trackers, "GIVEN_UP", set())
    with Trackers(names, tmp_path, {}, said.append, is_new=True, with_checkpoint=False):
        said.clear()
    assert clock == [160.0]
    assert said[0] == "waiting for mlflow, trackio, wandb, at most 60 s"
    given_up = [text.split(" has not finished after 60 s ")[0] for text in said[1:]]
    assert given_up == [f"warning: {name}" for name in names]


#: A command with a hanging tracker, for whose thread Python's shutdown would wait for a minute.
_COMMAND_WITH_HANGING_TRACKER = """
import sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from firstlight.cli import main
from firstlight.training import trackers

class Hanging:
    def open(self, *_):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(time.sleep, 60)

def work(*_, **__):
    tell = lambda text: print(text, file=sys.stderr)
    with trackers.Trackers(["wandb"], Path("."), {}, tell, is_new=True, with_checkpoint=False):
        sys.stdout.write("unflushed")
    return 76

trackers.LIBRARIES["wandb"] = Hanging
trackers._SECONDS = 0.5  # the thread has come to `open`
main.firstlight.main = work
sys.exit(main.main())
"""


def test_tracker_hanging_at_exit_does_not_block_command(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _COMMAND_WITH_HANGING_TRACKER],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert (done.returncode, done.stdout) == (76, "unflushed")
    assert "wandb has not finished" in done.stderr


class Printing(Recorder):
    """A tracker whose library prints messages."""

    def close(self, files: Sequence[Path], checkpoint: Path | None, *, failed: bool) -> None:
        print("stored")  # noqa: T201


def print_nothing(_: str) -> None:
    """Ignore a message."""


def test_tracker_library_output_goes_to_stderr(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(LIBRARIES, "wandb", Printing)
    before = sys.stdout
    with Trackers(["wandb"], tmp_path, {}, print_nothing, is_new=True, with_checkpoint=False):
        print("result")  # noqa: T201
    assert sys.stdout is before
    out, err = capsys.readouterr()
    assert (out, err) == ("result\n", "stored\n")


def test_trackers_without_names_start_nothing(tmp_path: Path) -> None:
    with Trackers([], tmp_path, {}, pytest.fail, is_new=True, with_checkpoint=False):
        assert list(tmp_path.iterdir()) == []


def test_tracker_missing_package_raises_before_writing(
    recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'firstlight\[trackio\]'"):
        train(with_trackers(recipe, "trackio"))
    assert not Path(recipe["run"]["dir"]).exists()


def test_trackers_key_replaces_tensorboard_key_of_earlier_recipes() -> None:
    def of(**run: Any) -> Sequence[str]:
        return parse_recipe({"data": {"dir": "d"}, "run": run}).run.trackers

    assert of() == of(tensorboard=False) == []
    assert of(tensorboard=True) == ["tensorboard"]
    assert of(tensorboard=True, trackers=["mlflow"]) == ["mlflow", "tensorboard"]
    assert of(tensorboard=False, trackers=["mlflow"]) == ["mlflow"]
    for wrong, said in (
        ({"trackers": ["wandb", "wandb"]}, "trackers has a duplicate: wandb, wandb"),
        ({"trackers": ["neptune"]}, "run.trackers"),
        ({"tensorboard": "yes"}, "run.tensorboard"),
    ):
        with pytest.raises(ConfigError, match=said):
            of(**wrong)


# The real libraries in their offline modes

_connections: list[Any] | None = None


def _note_connections(event: str, arguments: tuple[Any, ...]) -> None:
    """Audit hook that records each address to which Python code connects. Audit hooks can't be
    removed.
    """
    place = arguments[1] if event == "socket.connect" else None
    if _connections is not None and (event == "socket.getaddrinfo" or isinstance(place, tuple)):
        _connections.append(place or arguments)


@contextlib.contextmanager
def connections() -> Iterator[list[Any]]:
    """Return the addresses to which Python code in this process connects."""
    global _connections
    sys.addaudithook(_note_connections)
    _connections = []
    try:
        yield _connections
    finally:
        _connections = None


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder for all files that a library writes."""
    for name in [*os.environ]:
        if name.startswith(("WANDB_", "MLFLOW_", "TRACKIO_")):
            monkeypatch.delenv(name)
    # With a token, trackio would request the user's name from the hub.
    monkeypatch.setenv("HF_TOKEN", "hf_none")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    # A folder of files opens in a tenth of the time of MLflow's default.
    monkeypatch.setenv("MLFLOW_TRACKING_URI", str(tmp_path / "mlruns"))
    return tmp_path


def tracked_run(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run a training that is killed at step 7 and resumed from its checkpoint of step 4."""
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

    # wandb stores the address of its process in a variable.
    environment = {k: v for k, v in os.environ.items() if k != "WANDB_SERVICE"}
    with connections() as sent:
        with pytest.raises(KeyboardInterrupt):
            start(7, is_new=True)
        start(9, is_new=False)
    assert {k: v for k, v in os.environ.items() if k != "WANDB_SERVICE"} == environment
    assert [text.split(":")[0] for text in said] == [name, name], said
    away = [one for one in map(str, sent) if "127.0.0.1" not in one and "localhost" not in one]
    assert away == []
    return run


def expected() -> dict[str, list[tuple[int, float]]]:
    """Return the numbers of metrics.jsonl as Python floats."""
    return {
        "train/loss": [(n, line(n)["train/loss"]) for n in range(10)],
        "epoch/a b": [(n, line(n)["epoch/a b"]) for n in range(10)],
    }


def test_mlflow_has_each_value_of_resumed_run_once(
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


def test_trackio_has_each_value_of_resumed_run_once(
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
    """Yield the records of wandb's file: protobuf in LevelDB's log format, after a header of 7
    bytes.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    content, place, record, found = path.read_bytes(), 7, b"", []
    while place + 7 <= len(content):
        if (room := 32768 - place % 32768) < 7:
            place += room
            continue
        _, size, kind = struct.unpack_from("<IHB", content, place)
        record += content[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # complete, or the last part
            found.append(Record.FromString(record))
            record = b""
    return found


def test_wandb_has_each_value_of_resumed_run_once(
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


def test_wandb_leaves_run_of_caller_open(offline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    with wandb.init(mode="offline", dir=str(offline)) as own:
        tracked_run("wandb", offline, monkeypatch)
        assert wandb.run is own
        own.log({"loss": 1.0})  # raises an error if the run was finished

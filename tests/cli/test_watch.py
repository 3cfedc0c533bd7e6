"""Tests of `firstlight watch`, which displays a run that another process writes."""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from firstlight.checkpoint.run_folder import held, is_held
from firstlight.cli import watch
from firstlight.cli.main import main
from firstlight.from_texts.run_folder import LOCK_NAME
from firstlight.training.progress import RunProgress


def line(step: int) -> dict[str, Any]:
    return {
        "step": step,
        "train/loss": 5.0 - step / 10,
        "learning_rate": 0.001,
        "tokens_per_second": 1000.0,
        "memory_bytes": 2**20,
        "seconds": 2.0,
    }


def write(run: Path, *steps: int, mode: str = "a") -> None:
    with (run / "metrics.jsonl").open(mode, encoding="utf-8") as file:
        file.writelines(json.dumps(line(step)) + "\n" for step in steps)


def both(*actions: Callable[[], object]) -> Callable[[], object]:
    def act() -> None:
        for action in actions:
            action()

    return act


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "recipe.yaml").write_text("schedule: {max_steps: 4}\n", encoding="utf-8")
    (folder / "metrics.jsonl").write_text('{"step": 0, "val/loss": 5.0}\n', encoding="utf-8")
    return folder


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], object]]:
    """Replace each pause between two readings of the folder by one of the actions; then raise
    Ctrl-C.
    """
    actions: list[Callable[[], object]] = []

    def pause() -> None:
        if not actions:
            raise KeyboardInterrupt
        actions.pop(0)()

    monkeypatch.setattr(watch, "_pause", pause)
    return actions


def test_watch_follows_run_to_its_end(
    run: Path, pauses: list[Callable[[], object]], capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.ExitStack() as process:
        process.enter_context(held(run))
        assert is_held(run)
        sample = json.dumps({"step": 3, "prompt": "a", "text": "b"}) + "\n"
        pauses += [
            lambda: write(run, 1, 2),
            both(lambda: (run / "samples.jsonl").write_text(sample), lambda: write(run, 3)),
            # The last line is written when the process ends.
            both(lambda: write(run, 4), process.close),
        ]
        assert main(["watch", str(run)]) == 0
    assert not is_held(run)
    assert capsys.readouterr().err.splitlines() == [
        "step 3: 'a' -> 'b'",
        "step 4/4  loss 4.600  1,000 tokens/s  process 1.0 MiB",
        "the run is complete: step 4/4",
    ]


def test_watch_run_rolled_back_redraws_from_start(
    run: Path, pauses: list[Callable[[], object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[list[float]] = []
    real = RunProgress.step

    def step(self: RunProgress, record: dict[str, Any]) -> None:
        real(self, record)
        shown.append(self.curve.means)

    monkeypatch.setattr(RunProgress, "step", step)
    with held(run):
        pauses += [
            lambda: write(run, 1, 2, 3),
            both((run / "metrics.jsonl").unlink, lambda: write(run, 1, 2)),
            lambda: write(run, 3),
        ]
        assert main(["watch", str(run)]) == 0
    assert shown[2:] == [[4.9, 4.8, 4.7], [4.9], [4.9, 4.8], [4.9, 4.8, 4.7]]


@pytest.mark.usefixtures("pauses")
def test_watch_timed_run_progress_follows_step_limit(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares: list[float] = []
    real = RunProgress.step

    def step(self: RunProgress, record: dict[str, Any]) -> None:
        real(self, record)
        shares.append(self.share)
        # The number of steps may still change.
        assert self.line.startswith(f"step {record['step']}  loss ")

    monkeypatch.setattr(RunProgress, "step", step)
    (run / "recipe.yaml").write_text("schedule: {max_minutes: 30}\n", encoding="utf-8")
    length = {"max_minutes": 30.0, "predicted_steps": 900, "seconds_used": 0.0, "most_steps": 4}
    (run / "length.json").write_text(json.dumps(length), encoding="utf-8")
    lines = [json.dumps(line(step) | {"elapsed_seconds": 2.0 * step}) for step in (1, 2, 3)]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    with held(run):
        assert main(["watch", str(run)]) == 0
    assert shares == [0.25, 0.5, 0.75]


def test_watch_ctrl_c_ends_only_the_view(
    run: Path, pauses: list[Callable[[], object]], capsys: pytest.CaptureFixture[str]
) -> None:
    with held(run):
        pauses.append(lambda: write(run, 1))
        assert main(["watch", str(run)]) == 0
        assert is_held(run)
    assert capsys.readouterr().err == ""


def test_watch_stopped_run_is_reported_as_ended_not_complete(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(run, 1, 2)
    assert main(["watch", str(run)]) == 0
    assert capsys.readouterr().err == "the run has ended: step 2/4\n"


def test_watch_missing_folder_waits_for_it(
    tmp_path: Path,
    run: Path,
    pauses: list[Callable[[], object]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    write(run, 1, 2, 3, 4)
    later = tmp_path / "ran"
    pauses += [lambda: None, later.mkdir, both(later.rmdir, lambda: run.rename(later))]
    assert main(["watch", str(later)]) == 0
    said = capsys.readouterr().err.splitlines()
    assert said[0] == f"waiting for a run in {later} (did you mean 'run'?)"
    assert said[1:] == [
        "step 4/4  loss 4.600  1,000 tokens/s  process 1.0 MiB",
        "the run is complete: step 4/4",
    ]


def test_watch_waits_while_texts_are_prepared(
    tmp_path: Path,
    run: Path,
    pauses: list[Callable[[], object]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    write(run, 1, 2, 3, 4)
    preparing = tmp_path / "preparing"
    preparing.mkdir()
    (preparing / "pipeline.json").write_text("{}", encoding="utf-8")
    lock = (preparing / LOCK_NAME).open("w", encoding="utf-8")
    fcntl.flock(lock, fcntl.LOCK_EX)

    def begin() -> None:
        for path in run.iterdir():
            path.rename(preparing / path.name)
        lock.close()

    pauses += [lambda: None, begin]
    assert main(["watch", str(preparing)]) == 0
    assert capsys.readouterr().err.splitlines()[-1] == "the run is complete: step 4/4"


def test_watch_folder_without_run_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    for path, said in ((tmp_path, "is not a run folder"), (tmp_path / "file", "is a file")):
        assert main(["watch", str(path)]) == 1
        assert said in capsys.readouterr().err


def test_removed_dashboard_command_names_its_successors(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["dashboard", "runs", "--port", "1"]) == 2
    said = capsys.readouterr().err
    assert "tensorboard --logdir RUNS" in said
    assert "trackio show" in said
    assert said.count("\n") == 1

"""A power cut that loses what was not synced: checkpoints, runs and logs are what was promised
before it, in every state that a disk may be left in."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from lost_writes import ALL, State, states, tried
from recorded_disk import RecordingDisk, recording
from scale import cases
from small_checkpoints import content, holds, is_sound, litter, sound_steps

from firstlight.checkpoint.checkpoint import load_trainer_state, verify_checkpoint
from firstlight.checkpoint.retention import CheckpointConfig
from firstlight.checkpoint.run_folder import held
from firstlight.checkpoint.saver import BackgroundSaver, CheckpointSaver, ShardedSaver
from firstlight.checkpoint.selection import best_checkpoint, list_checkpoints, newest_checkpoint
from firstlight.parallel.engine import Engine
from firstlight.run_log.names import METRICS_NAME, SAMPLES_NAME
from firstlight.run_log.reader import read_json_lines
from firstlight.run_log.writer import RunLogs
from firstlight.training.loop import train

Record = Callable[[str, object], None]


# The recorder itself


def contents(record: RecordingDisk) -> set[tuple[tuple[str, bytes | None], ...]]:
    return {tuple(sorted(state.tree.items())) for state in states(record)}


def test_lost_writes_model_enumerates_states_after_power_cut(tmp_path: Path) -> None:
    """A new file, synced without its name; then another name, synced with the folder."""
    with recording(tmp_path) as record:
        with record.create(tmp_path / "a") as file:
            record.write(file, b"abcd")
            record.sync(file)
        record.rename(tmp_path / "a", tmp_path / "b")
        record.sync_folder(tmp_path)
    before = {(), *((("a", data),) for data in (b"", b"\0\0\0\0", b"ab", b"abcd"))}
    # The rename without the new name before it; both; and nothing else once all is synced.
    assert contents(record) == {*before, (("b", b"abcd"),)}
    last = [state for state in states(record) if state.began == len(record.changes)]
    assert all(state.tree == {"b": b"abcd"} for state in last)


def test_lost_writes_model_finds_unsynced_changes(tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(b"1")
    with recording(tmp_path) as record:
        (tmp_path / "old").write_bytes(b"2")
        (tmp_path / "new").mkdir()
        (tmp_path / "new" / "file").write_bytes(b"3")
        record.mark("all")
    promised = [state.tree for state in states(record) if state.promise == "all"]
    assert {"old": b"1"} in promised
    assert {"old": b"2", "new": None, "new/file": b"3"} in promised
    assert {"old": b"\0", "new": None, "new/file": b"\0"} in promised


# Checkpoints

#: (step, validation loss, step that the run went back to before): of the saves of a run. Step 8 is
#: the best, and step 12 of a dead branch.
_SAVES = [(4, 3.0, None), (8, 2.0, None), (12, 2.5, None), (10, 2.6, 8), (14, 2.7, None)]


def saved(saver: BackgroundSaver, number: int) -> None:
    """Make one of the saves; it is promised when this returns."""
    step, val_loss, back_to = _SAVES[number]
    if back_to is not None:
        saver.saved_step = back_to
    saver.save(step, lambda: content(step, val_loss))
    saver.wait()


def new_saver(run: Path, kind: str, keep_last: int) -> CheckpointSaver | ShardedSaver:
    config = CheckpointConfig(keep_last=keep_last, asynchronous=kind != "in turn")
    if kind != "sharded":
        return CheckpointSaver(run, config)
    world = SimpleNamespace(rank=0, size=1, local_size=1)
    engine = cast(Engine, SimpleNamespace(world=world, is_main=True))
    return ShardedSaver(run, config, engine, lambda _: False)


@pytest.mark.parametrize(
    "kind, keep_last", [("in turn", 1), ("in turn", 2), ("asynchronous", 1), ("sharded", 2)]
)
def test_power_cut_loses_no_saved_checkpoint(
    tmp_path: Path, kind: str, keep_last: int, record_property: Record
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    run = place / "run"
    with recording(place) as record, held(run), closing(new_saver(run, kind, keep_last)) as saver:
        for number in range(len(_SAVES)):
            saved(saver, number)
            record.mark(number)

    def check(state: State) -> None:
        done = -1 if state.promise is None else state.promise
        folder, problems = newest_checkpoint(run)
        assert problems == []
        # The one that was being saved is there or not.
        expected = [None if n < 0 else n for n in (done, done + 1) if n < len(_SAVES)]
        numbers = {step: number for number, (step, _, _) in enumerate(_SAVES)}
        newest = None if folder is None else numbers[load_trainer_state(folder)["step"]]
        assert newest in expected
        if folder is not None and newest is not None:
            step, val_loss, _ = _SAVES[newest]
            verify_checkpoint(folder)
            if kind != "sharded":
                assert holds(folder, content(step, val_loss))
            best, damaged = best_checkpoint(run)
            assert best is not None
            assert damaged == []
            loss = load_trainer_state(best)["val_loss"]
            assert loss == min(loss for _, loss, _ in _SAVES[: newest + 1])
        assert all(map(is_sound, list_checkpoints(run)))
        # It goes on as a run that nothing happened to.
        with closing(new_saver(run, kind, keep_last)) as saver:
            saver.saved_step = -1 if newest is None else _SAVES[newest][0]
            for number in range(0 if newest is None else newest + 1, len(_SAVES)):
                saved(saver, number)
            # Also of a last save that was not tidied up after.
            saver.save(16, lambda: content(16, 2.8))
            saver.wait()
        assert sound_steps(run) == ([8, 16] if keep_last == 1 else [8, 14, 16])
        assert litter(run) == []

    tried(record, check, cases(12, ALL), "checkpoints", record_property)


# Runs


def test_run_with_lost_unsynced_writes_resumes_bit_for_bit(
    tmp_path: Path,
    recipe: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    record_property: Record,
) -> None:
    # Measuring it takes longer than these runs.
    monkeypatch.setattr("firstlight.training.run.peak_flops", lambda *_: 1e12)
    recipe |= {
        "schedule": {"max_steps": 4},
        "evaluation": {"every_steps": 2, "sample_tokens": 1, "max_rows": 1, "on_start": False},
        "checkpoint": {"every_steps": 2, "keep_last": 1, "asynchronous": False},
        "efficiency": {"precision": "fp32", "compile": False, "loss_chunk_tokens": 0},
    }
    recipe["model"] |= {"num_hidden_layers": 1}
    place = tmp_path / "place"
    place.mkdir()
    run = place / "run"
    recipe["run"]["dir"] = str(run)

    def outcome() -> dict[str, Any]:
        (folder,) = list_checkpoints(run)[-1:]
        verify_checkpoint(folder)
        steps = [(line["step"], line["train/loss"]) for line in read_json_lines(run / METRICS_NAME)]
        names = ("model.safetensors", "optimizer.safetensors")
        tensors = [(folder / name).read_bytes() for name in names]
        return {
            "step": folder.name,
            "steps": steps,
            "tensors": tensors,
            "samples": (run / SAMPLES_NAME).read_bytes(),
        }

    with recording(place) as record:
        train(recipe, on_step=lambda line: mark_saved(record, run, line["step"]))
        record.mark(4)
    whole = outcome()

    def check(state: State) -> None:
        folder, problems = newest_checkpoint(run)
        assert problems == []
        if state.promise is not None:
            assert folder is not None
            assert load_trainer_state(folder)["step"] >= state.promise
        train(recipe, resume=True)
        found = outcome()
        assert [name for name in whole if found[name] != whole[name]] == []
        assert litter(run) == []

    tried(record, check, cases(2, ALL), "runs", record_property)


def mark_saved(record: RecordingDisk, run: Path, step: int) -> None:
    """Promise the newest checkpoint that is in place at the end of a step."""
    folder, _ = newest_checkpoint(run)
    if folder is not None:
        record.mark(load_trainer_state(folder)["step"])


# Logs


def line(step: int) -> dict[str, Any]:
    return {"step": step, "train/loss": 1 / (step + 2)}


def sample(step: int) -> dict[str, Any]:
    return {"step": step, "prompt": "", "text": f"text {step} é"}


def logged(logs: RunLogs, first: int, last: int, synced: Iterable[int] = ()) -> Iterable[int]:
    """Write the lines of steps; yield those after which the logs were synced."""
    for step in range(first, last + 1):
        logs.write_step(line(step), [sample(step)] * 2)
        if step in synced:
            logs.sync()
            yield step


def require_whole_logs(run: Path, resumed_from: int) -> None:
    """Resume the logs from a step, complete them up to step 8, and require every line once."""
    told: list[str] = []
    with RunLogs(run, resumed_from, tell=told.append) as logs:
        list(logged(logs, resumed_from + 1, 8))
    assert read_json_lines(run / METRICS_NAME) == [line(step) for step in range(1, 9)]
    texts = read_json_lines(run / SAMPLES_NAME)
    assert texts == [sample(step) for step in range(1, 9) for _ in range(2)]
    for message in told:
        assert "\n" not in message
        # No line that was synced is missed.
        assert "no lines for steps" not in message


def test_synced_log_lines_survive_power_cut(tmp_path: Path, record_property: Record) -> None:
    run = tmp_path / "run"
    run.mkdir()
    with recording(run) as record:
        with RunLogs(run, 0) as logs:
            for step in logged(logs, 1, 7, synced=(2, 4)):
                record.mark(step)
        with RunLogs(run, 4) as logs:
            # A rollback: the checkpoint of step 4 is given up.
            record.mark(2)
            logs.drop_after(2)
            for step in logged(logs, 3, 6, synced=(6,)):
                record.mark(step)

    def check(state: State) -> None:
        require_whole_logs(run, state.promise or 0)

    tried(record, check, cases(40, ALL), "logs", record_property)


def test_second_power_cut_during_log_repair_loses_no_line(
    tmp_path: Path, record_property: Record
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    with RunLogs(run, 0) as logs:
        list(logged(logs, 1, 6, synced=(4,)))
    # The first one left zeros in the place of a line that was not synced.
    for name in (METRICS_NAME, SAMPLES_NAME):
        lines = (run / name).read_bytes().splitlines(keepends=True)
        lines[-2] = bytes(len(lines[-2]) - 1) + b"\n"
        (run / name).write_bytes(b"".join(lines))
    with recording(run) as record, RunLogs(run, 4, tell=lambda _: None):
        pass

    def check(state: State) -> None:
        require_whole_logs(run, 4)

    tried(record, check, cases(20, ALL), "damaged logs", record_property)

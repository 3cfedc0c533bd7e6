"""A run that diverges goes back to a checkpoint and on with other data, the same way every time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from driven import MEASURED, one_thread
from torch import Tensor

from firstlight.checkpoint.checkpoint import load_trainer_state
from firstlight.checkpoint.selection import list_checkpoints, newest_checkpoint
from firstlight.errors import TrainingError
from firstlight.methods import loss_function
from firstlight.run_log.reader import read_json_lines
from firstlight.training.loop import RunAhead, train
from firstlight.training.run import Run
from firstlight.training.validation import evaluate
from firstlight.weights.stored import WEIGHTS_NAME

_STEPS, _ROWS = 20, 4


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    with one_thread():
        yield


class StoppedError(Exception):
    """Ends a run from within."""


class BadData:
    """Rows, by their count in the run's order, whose loss is multiplied by something."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.first, self.last, self.factor = 0, -1, float("nan")
        self._run: Run | None = None
        begin_step = Run.begin_step

        def watched(run: Run) -> float:
            self._run = run
            return begin_step(run)

        monkeypatch.setattr(Run, "begin_step", watched)
        monkeypatch.setattr("firstlight.training.program.loss_function", self._spoilt)

    def _spoilt(self, *arguments: Any, **options: Any) -> Callable[..., Tensor]:
        loss_sum = loss_function(*arguments, **options)

        def spoilt(*batch: Any) -> Tensor:
            loss: Tensor = loss_sum(*batch)
            assert self._run is not None
            # The rows of the batch that was read last, counted from 1.
            is_bad = self.first <= self._run.loader.rows_seen <= self.last
            return loss * self.factor if is_bad else loss

        return spoilt

    def steps(self, first: int, last: int, factor: float = float("nan")) -> None:
        """The rows of these steps of a run without a rollback."""
        self.first, self.last, self.factor = (first - 1) * _ROWS + 1, last * _ROWS, factor


@pytest.fixture
def bad_data(monkeypatch: pytest.MonkeyPatch) -> BadData:
    monkeypatch.setattr("firstlight.training.run.peak_flops", lambda *_: 1e12)
    return BadData(monkeypatch)


def guarded(recipe: dict[str, Any], folder: Path, **guard: Any) -> dict[str, Any]:
    values = copy.deepcopy(recipe)
    values["run"]["dir"] = str(folder)
    values["batch"] = {"micro_batch_size": _ROWS}
    values["schedule"]["max_steps"] = _STEPS
    values["efficiency"] = {"precision": "fp32", "compile": False, "loss_chunk_tokens": 0}
    values["evaluation"] |= {"every_steps": 6}
    values["guard"] = {"max_skipped_steps": 3, **guard}
    return values


def records_of(run: Path) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in record.items() if key not in MEASURED}
        for record in read_json_lines(run / "metrics.jsonl")
    ]


def final(run: Path) -> Any:
    last = list_checkpoints(run)[-1]
    state = load_trainer_state(last)
    del state["recipe"]
    files = [(last / name).read_bytes() for name in (WEIGHTS_NAME, "optimizer.safetensors")]
    samples = (run / "samples.jsonl").read_bytes()
    return records_of(run), state, files, samples, read_json_lines(run / "events.jsonl")


def test_guard_few_bad_steps_are_skipped_and_reported(
    recipe: dict[str, Any], tmp_path: Path, bad_data: BadData
) -> None:
    bad_data.steps(6, 7)
    result = train(guarded(recipe, tmp_path / "run"))
    records = records_of(tmp_path / "run")
    assert [record["step"] for record in records] == list(range(1, _STEPS + 1))
    skipped = [record["step"] for record in records if record.get("skipped")]
    assert skipped == [6, 7]
    assert [record["skipped_steps"] for record in records] == [0] * 5 + [1] + [2] * 14
    assert records[5]["train/loss"] is records[5]["grad_norm"] is None
    # Schedule and data went on.
    rates = [record["learning_rate"] for record in records]
    assert rates[4] > rates[5] > rates[6] > rates[7]
    assert records[7]["epoch"] == pytest.approx(8 * records[0]["epoch"])
    assert not (tmp_path / "run" / "events.jsonl").exists()
    assert load_trainer_state(result.checkpoint)["skipped_steps"] == 2


def test_rollback_after_too_many_bad_steps_skips_their_data(
    recipe: dict[str, Any], tmp_path: Path, bad_data: BadData
) -> None:
    bad_data.steps(9, 12)
    train(guarded(recipe, tmp_path / "run"))
    records = records_of(tmp_path / "run")
    # Step 11 is the third; back to the checkpoint of step 8, and the bad rows of a twelfth step
    # are the ninth's now.
    (event,) = read_json_lines(tmp_path / "run" / "events.jsonl")
    assert (event["step"], event["event"], event["to_step"]) == (11, "rollback", 8)
    assert "3 steps in a row were skipped (loss nan" in event["reason"]
    assert [record["step"] for record in records] == list(range(1, _STEPS + 1))
    assert [record["step"] for record in records if record.get("skipped")] == [9]
    an_epoch = records[0]["epoch"]
    assert records[7]["epoch"] == pytest.approx(8 * an_epoch)
    assert records[8]["epoch"] == pytest.approx(12 * an_epoch)
    state = load_trainer_state(newest_checkpoint(tmp_path / "run")[0] or tmp_path)
    assert state["events"] == [event]
    assert state["loader"]["rows_seen"] == (_STEPS + 3) * _ROWS
    samples = read_json_lines(tmp_path / "run" / "samples.jsonl")
    assert [sample["step"] for sample in samples] == [6, 12, 18, 20]


@pytest.mark.parametrize("ramp_steps", [0, 10])
def test_rollback_of_passes_run_ahead_changes_no_bit(
    ramp_steps: int,
    recipe: dict[str, Any],
    tmp_path: Path,
    bad_data: BadData,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The passes of the step after the last bad one have begun when its loss is read."""
    monkeypatch.setattr("firstlight.optim.optimizer._runs_ahead", lambda _: True)
    bad_data.steps(29, 37)
    found = []
    for is_ahead in (True, False):
        values = guarded(recipe, tmp_path / str(is_ahead), max_skipped_steps=2)
        tokens = _ROWS * values["data"]["seq_len"]
        values["batch"]["global_batch_tokens"] = 4 * tokens
        if ramp_steps:
            values["batch"] |= {"ramp_start_tokens": tokens, "ramp_steps": ramp_steps}
        if not is_ahead:
            monkeypatch.setattr(RunAhead, "begin", lambda _: False)
        train(values)
        found.append(final(tmp_path / str(is_ahead)))
    assert found[0] == found[1]
    assert found[0][-1][0]["event"] == "rollback"


def test_rollback_restores_weights_of_checkpoint(
    recipe: dict[str, Any], tmp_path: Path, bad_data: BadData
) -> None:
    """As in a run that is stopped at the checkpoint and resumed with the later data by hand."""
    bad_data.steps(9, 11)
    seen: list[Any] = []

    def on_step(record: Mapping[str, Any]) -> None:
        seen.append(record)
        if record["step"] == 9 and len(seen) > 9:
            raise StoppedError

    with pytest.raises(StoppedError):
        train(guarded(recipe, tmp_path / "run"), on_step=on_step)
    bad_data.steps(0, -1)

    def stop(record: Mapping[str, Any]) -> None:
        if record["step"] == 9:
            raise StoppedError

    other = guarded(recipe, tmp_path / "other")
    with pytest.raises(StoppedError):
        train(other, on_step=stop)
    rows: list[Any] = []

    def moved(run: Run, read: Callable[[Run], Any] = Run.read_batches) -> Any:
        if run.state.step == 8 and not rows:
            rows.extend(run.loader.next_batch() for _ in range(3))
        return read(run)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "read_batches", moved)
        with pytest.raises(StoppedError):
            train(other, resume=True, on_step=stop)
    assert len(rows) == 3
    assert records_of(tmp_path / "other")[8] == records_of(tmp_path / "run")[8]


@pytest.mark.parametrize("stop", [9, 11, 13])
def test_rollback_interrupted_by_kill_is_repeated_identically(
    stop: int, recipe: dict[str, Any], tmp_path: Path, bad_data: BadData
) -> None:
    bad_data.steps(9, 11)
    train(guarded(recipe, tmp_path / "whole"))
    broken, count = guarded(recipe, tmp_path / "broken"), 0

    def on_step(record: Mapping[str, Any]) -> None:
        nonlocal count
        count += 1
        if count == stop:
            raise StoppedError

    with pytest.raises(StoppedError):
        train(broken, on_step=on_step)
    train(broken, resume=True)
    assert final(tmp_path / "broken") == final(tmp_path / "whole")


def saving_at(step: int, run: Path) -> Callable[[Mapping[str, Any]], None]:
    """An `on_step` that asks for a checkpoint, once."""
    asked: list[int] = []

    def on_step(record: Mapping[str, Any]) -> None:
        if record["step"] == step and not asked:
            asked.append(step)
            (run / "save-now").touch()

    return on_step


def test_rollback_ignores_unscheduled_checkpoint(
    recipe: dict[str, Any], tmp_path: Path, bad_data: BadData
) -> None:
    run = tmp_path / "run"
    bad_data.steps(11, 11)
    values = guarded(recipe, run, max_skipped_steps=1)
    values["schedule"]["max_steps"] = 12
    train(values, on_step=saving_at(10, run))
    events = read_json_lines(run / "events.jsonl")
    assert [(event["step"], event["to_step"]) for event in events] == [(11, 8)]
    # The tenth step was made anew: the checkpoint of the one before does not count as kept.
    assert [folder.name for folder in list_checkpoints(run)] == ["step-00000008", "step-00000012"]


def test_rollback_uses_checkpoint_amid_skipped_steps_as_last_resort(
    recipe: dict[str, Any], tmp_path: Path, bad_data: BadData
) -> None:
    run = tmp_path / "run"
    bad_data.steps(9, 12)
    values = guarded(recipe, run)
    values["checkpoint"] = {"every_steps": 0}
    train(values, on_step=saving_at(10, run))
    # The count of skipped steps begins anew: the one that is left is no reason to go back again.
    events = read_json_lines(run / "events.jsonl")
    assert [(event["step"], event["to_step"]) for event in events] == [(11, 10)]
    assert records_of(run)[-1]["skipped_steps"] == 3


@pytest.mark.parametrize("ahead", [False, True])
def test_guard_skips_loss_spike_only_when_enabled(
    recipe: dict[str, Any],
    tmp_path: Path,
    bad_data: BadData,
    ahead: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # On a GPU, updates begin before the host knows whether a step is finite.
    monkeypatch.setattr("firstlight.optim.optimizer._runs_ahead", lambda _: ahead)
    bad_data.steps(18, 18, 1e4)
    train(guarded(recipe, tmp_path / "run", spike_z_score=10.0))
    records = records_of(tmp_path / "run")
    assert [record["step"] for record in records if record.get("skipped")] == [18]
    assert records[17]["grad_norm"] > 1e3 * records[16]["grad_norm"]
    train(guarded(recipe, tmp_path / "unguarded"))
    assert not any(record.get("skipped") for record in records_of(tmp_path / "unguarded"))


@pytest.mark.parametrize(
    "steps, guard, said",
    [
        ((1, 9), {}, r"step 3: 3 steps in a row were skipped .*no checkpoint to roll back to"),
        ((9, 11), {"on_divergence": "stop"}, r"step 11: 3 steps in a row were skipped"),
        ((9, 11), {"max_rollbacks": 0}, r"step 11: .*\(after 0 rollbacks\)"),
        # To step 8, and since not a step could be made from there, to step 6, which was saved for
        # its validation loss.
        ((9, 90), {}, r"step 9: .*\(after 2 rollbacks\)"),
        ((6, 6), {"max_skipped_steps": 1, "on_divergence": "stop"}, "step 6: this step was skip"),
    ],
)
def test_rollback_without_checkpoint_raises_training_error_with_advice(
    steps: tuple[int, int],
    guard: dict[str, Any],
    said: str,
    recipe: dict[str, Any],
    tmp_path: Path,
    bad_data: BadData,
) -> None:
    bad_data.steps(*steps)
    with pytest.raises(TrainingError, match=said) as caught:
        train(guarded(recipe, tmp_path / "run", **guard))
    assert "lower optimizer.learning_rate" in str(caught.value)
    for folder in list_checkpoints(tmp_path / "run"):
        assert load_trainer_state(folder)["guard"]["skipped_in_a_row"] == 0


def test_rollback_with_optimizer_in_backward_is_immediate(
    recipe: dict[str, Any], tmp_path: Path, bad_data: BadData
) -> None:
    bad_data.steps(10, 10)
    values = guarded(recipe, tmp_path / "run")
    values["optimizer"] = {"max_grad_norm": 0.0}
    values["efficiency"]["optimizer_in_backward"] = True
    train(values)
    (event,) = read_json_lines(tmp_path / "run" / "events.jsonl")
    assert (event["step"], event["to_step"]) == (10, 8)
    records = records_of(tmp_path / "run")
    assert all(record["train/loss"] for record in records)
    assert records[-1]["skipped_steps"] == 0


def test_rollback_follows_exhausted_loss_scale(
    recipe: dict[str, Any], tmp_path: Path, bad_data: BadData
) -> None:
    """fp16's own skipped steps are no reason before that."""
    bad_data.steps(9, 13)
    values = guarded(recipe, tmp_path / "run")
    values["efficiency"]["precision"] = "fp16"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("firstlight.training.guard._SMALLEST", 2.0**12)
        train(values)
    (event,) = read_json_lines(tmp_path / "run" / "events.jsonl")
    assert event["to_step"] == 8
    assert event["step"] - 8 > 3
    assert "not finite at any loss scale" in event["reason"]


def test_rollback_follows_weights_ruined_by_update(
    recipe: dict[str, Any], tmp_path: Path, bad_data: BadData
) -> None:
    """The loss before the update was fine: the evaluation is the first to notice."""
    ruined: list[Any] = []

    def ruin(run: Run, check: Callable[[], None]) -> None:
        if run.state.step == 12 and not ruined:
            ruined.append(next(run.program.model.parameters()).data.fill_(float("nan")))
        evaluate(run, check)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("firstlight.training.loop.evaluate", ruin)
        train(guarded(recipe, tmp_path / "run"))
    (event,) = read_json_lines(tmp_path / "run" / "events.jsonl")
    assert (event["step"], event["to_step"]) == (12, 8)
    samples = read_json_lines(tmp_path / "run" / "samples.jsonl")
    assert [sample["step"] for sample in samples] == [6, 12, 18, 20]

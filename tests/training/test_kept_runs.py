"""Fine-tuning with a text that the model should not forget: both figures from step 0 on, the share
of kept text that a run chooses, the best checkpoint, and resumed runs.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from builders import make_texts, write_lines
from firstlight.checkpoint.checkpoint import load_trainer_state
from firstlight.checkpoint.manifest import own_past, saved_checkpoints
from firstlight.data.corpus import FIRST_REPLAY_SHARE, TokenDataset
from firstlight.data.prepare import prepare
from firstlight.errors import ConfigError, DataError
from firstlight.evaluation.perplexity import evaluate
from firstlight.recipe import parse_recipe
from firstlight.report.report import _kept_figures, further_charts
from firstlight.report.summary import kept_result
from firstlight.run_log.reader import read_json_lines, read_run
from firstlight.tokenizer import Tokenizer, train_tokenizer
from firstlight.training import time_budget
from firstlight.training.guard import DivergedError
from firstlight.training.loop import RunAhead, train
from firstlight.training.step import train_step
from firstlight.training.time_budget import LoopTimes
from firstlight.training.validation import evaluate_dataset, replay_share


class StoppedError(Exception):
    """Ends a run in the middle."""


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """Prepare the kept text."""
    folder = tmp_path_factory.mktemp("old")
    write_lines(folder / "old.jsonl", [{"text": text} for text in make_texts(60, seed=11)])
    prepare([folder / "old.jsonl"], tokenizer, folder / "data")
    return folder / "data"


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory, data: Path, tokenizer: Tokenizer) -> Path:
    """Train the model that is fine-tuned."""
    folder = tmp_path_factory.mktemp("start") / "run"
    recipe = {
        "run": {"dir": str(folder)},
        "model": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
                  "max_position_embeddings": 64},
        "data": {"dir": str(data), "seq_len": 32},
        "batch": {"micro_batch_size": 4},
        "schedule": {"max_steps": 4, "warmup_steps": 0},
        "evaluation": {"every_steps": 0},
    }  # fmt: skip
    train(recipe)
    return folder


@pytest.fixture
def kept(tmp_path: Path, data: Path, old: Path) -> dict[str, Any]:
    """Return a run of 30 steps that keeps a text; it chooses its share after step 4."""
    return {
        "run": {"dir": str(tmp_path / "kept")},
        "data": {"dir": str(data), "seq_len": 32, "keep": str(old), "prefetch": 8},
        "batch": {"micro_batch_size": 2, "gradient_accumulation_steps": 2},
        "schedule": {"max_steps": 30, "warmup_steps": 3},
        "optimizer": {"learning_rate": 0.01},
        "evaluation": {"every_steps": 10, "max_rows": 8, "sample_tokens": 4},
        "checkpoint": {"every_steps": 5, "keep_last": 20},
        # A machine with faster bf16 would select it, depending on its load.
        "efficiency": {"precision": "fp32"},
    }


def folder_of(recipe: Mapping[str, Any]) -> Path:
    return Path(recipe["run"]["dir"])


def lines(recipe: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the metrics without those that depend on the clock."""
    timed = ("second", "mfu", "memory_bytes")
    return [
        {k: v for k, v in line.items() if not any(name in k for name in timed)}
        for line in read_json_lines(folder_of(recipe) / "metrics.jsonl")
    ]


def rows_in(folder: Path) -> int:
    return TokenDataset(folder, "train").num_rows(32)


def stop_after(recipe: dict[str, Any], step: int, start: Path) -> None:
    def on_step(record: Mapping[str, Any]) -> None:
        if record["step"] == step:
            raise StoppedError

    with pytest.raises(StoppedError):
        train(recipe, init_from=start, on_step=on_step)


def test_kept_text_is_evaluated_from_step_0(
    kept: dict[str, Any], start: Path, old: Path, data: Path
) -> None:
    kept["evaluation"] |= {"max_rows": 0}
    train(kept, init_from=start)
    found = [line for line in lines(kept) if "kept/bits_per_byte" in line]
    assert [line["step"] for line in found] == [0, 4, 10, 20, 30]
    for folder, key in ((old, "kept/bits_per_byte"), (data, "bits_per_byte")):
        # The first token of a split is not predicted in training.
        whole = evaluate(start, folder, seq_len=32)
        assert found[0][key] == pytest.approx(whole.bits_per_byte, rel=0.01)
    assert found[-1]["bits_per_byte"] < found[0]["bits_per_byte"]
    chart = further_charts(read_run(folder_of(kept)).metrics)["kept"]
    assert [line.name for line in chart.lines] == ["new text", "kept text"]
    assert all(len(line.series) == 5 for line in chart.lines)


def test_best_checkpoint_has_lowest_sum_of_both_texts(kept: dict[str, Any], start: Path) -> None:
    train(kept, init_from=start)
    found = {line["step"]: line for line in lines(kept) if "kept/bits_per_byte" in line}
    sums = {step: one["bits_per_byte"] + one["kept/bits_per_byte"] for step, one in found.items()}
    stored = {one.step: one.val_loss for one in own_past(saved_checkpoints(folder_of(kept)))}
    assert {step: stored[step] for step in (10, 20, 30)} == {n: sums[n] for n in (10, 20, 30)}
    result = kept_result(folder_of(kept))
    assert result is not None
    assert result.step == min((4, 10, 20, 30), key=sums.__getitem__)
    assert result.new == (found[0]["bits_per_byte"], found[result.step]["bits_per_byte"])
    change = 100 * (result.new[1] / result.new[0] - 1)
    assert f"new text: {abs(change):.0f}% fewer bits; kept text: " in str(result)


def test_patience_counts_sum_of_both_texts(
    kept: dict[str, Any], start: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new text's loss falls to the end, but the kept text's rises faster after step 4."""
    seen: Counter[str] = Counter()

    def scripted(program: Any, dataset: Any, *, key: str, **more: Any) -> Any:
        found, parts = evaluate_dataset(program, dataset, key=key, **more)
        seen[key] += 1
        bits = 5.0 - 0.1 * seen[key] if key == "val/loss" else 2.0 + 0.3 * seen[key]
        return dataclasses.replace(found, loss=bits, bits_per_byte=bits), parts

    monkeypatch.setattr("firstlight.training.validation.evaluate_dataset", scripted)
    kept["evaluation"]["patience"] = 2
    result = train(kept, init_from=start)
    assert (result.step, result.stopped_by) == (20, None)
    assert result.best_checkpoint == folder_of(kept) / "checkpoints" / "step-00000004"


@pytest.mark.parametrize(
    "rise, passes, share",
    [
        (0.05, 1, 0.25),
        (0.0, 16, 0.25),
        (0.0, 16.1, 0.1),  # 0.25 would read the kept text more than four times
        (0.0, 41, 0.05),
        (0.0, 81, 0.0),
        (-0.009, 1, 0.25),
        (-0.01, 1, 0.1),
        (-0.01, 50, 0.05),
    ],
)
def test_replay_share_depends_on_rise_and_size_of_kept_text(
    rise: float, passes: float, share: float
) -> None:
    assert replay_share(rise, passes) == share


# Before the choice, at it, with the first rows of the chosen share, and after them.
@pytest.mark.parametrize("stop", [2, 4, 5, 7])
def test_run_with_chosen_share_resumes_bit_for_bit(
    kept: dict[str, Any], start: Path, tmp_path: Path, stop: int
) -> None:
    whole = train(kept, init_from=start)
    chosen = read_json_lines(folder_of(kept) / "events.jsonl")
    assert [(one["event"], one["step"]) for one in chosen] == [("replay", 4)]
    again = copy.deepcopy(kept)
    again["run"]["dir"] = str(tmp_path / "again")
    again["checkpoint"]["every_steps"] = kept["checkpoint"]["every_steps"] = 1
    stop_after(again, stop, start)
    resumed = train(again, resume=True, init_from=start)
    assert lines(again) == lines(kept)
    weights = [run.checkpoint / "model.safetensors" for run in (whole, resumed)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    rows = [folder_of(one) / "events.jsonl" for one in (kept, again)]
    assert rows[0].read_bytes() == rows[1].read_bytes()


# Before the choice, and after it. Later, the number of steps is decided.
@pytest.mark.parametrize("stop", [2, 4])
def test_timed_run_chooses_share_after_a_tenth_of_predicted_steps(
    kept: dict[str, Any],
    start: Path,
    tmp_path: Path,
    stop: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Each reading of the clock is 1 s later, and 60 s are expected to suffice for 30 steps of 128
    # tokens.
    monkeypatch.setattr(time_budget, "_usual_tokens_per_second", lambda *_: 64.0)
    monkeypatch.setattr(
        time_budget, "LoopTimes", lambda: LoopTimes(map(float, itertools.count()).__next__)
    )
    kept["schedule"] = {"kind": "wsd", "max_minutes": 1.0, "warmup_steps": 2}
    train(kept, init_from=start)
    assert [one["step"] for one in read_json_lines(folder_of(kept) / "events.jsonl")] == [3]
    again = copy.deepcopy(kept)
    again["run"]["dir"] = str(tmp_path / "again")
    again["checkpoint"]["every_steps"] = 1
    stop_after(again, stop, start)
    train(again, resume=True, init_from=start)
    events = [(folder_of(one) / "events.jsonl").read_bytes() for one in (kept, again)]
    assert events[0] == events[1]


def test_run_with_chosen_share_is_the_same_with_passes_run_ahead(
    kept: dict[str, Any], start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("firstlight.optim.optimizer._runs_ahead", lambda _: True)
    train(kept, init_from=start)
    again = copy.deepcopy(kept)
    again["run"]["dir"] = str(tmp_path / "again")
    monkeypatch.setattr(RunAhead, "begin", lambda _: False)
    train(again, init_from=start)
    assert lines(again) == lines(kept)


def test_chosen_share_survives_rollback_to_earlier_step(
    kept: dict[str, Any], start: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept["checkpoint"]["every_steps"] = 3
    steps: list[int] = []

    def failing(*arguments: Any, **options: Any) -> Any:
        steps.append(1)
        if len(steps) == 6:  # step 6, after the choice at step 4
            raise DivergedError("the loss is inf")
        return train_step(*arguments, **options)

    monkeypatch.setattr("firstlight.training.loop.train_step", failing)
    train(kept, init_from=start)
    events = read_json_lines(folder_of(kept) / "events.jsonl")
    assert [one["event"] for one in events] == ["replay", "rollback"]
    assert events[1]["to_step"] == 3
    # A run that is resumed after the rollback does not choose again.
    last = own_past(saved_checkpoints(folder_of(kept)))[-1]
    assert load_trainer_state(last.folder)["replay"] == [16, events[0]["share"]]
    end = lines(kept)[-1]
    # 33 steps read 4 rows each; the steps that were dropped count, too.
    share = events[0]["share"]
    rows = 16 * FIRST_REPLAY_SHARE + (4 * 32 - 16) * share
    assert end["epoch/kept"] * rows_in(Path(kept["data"]["keep"])) == pytest.approx(rows, abs=2)


def test_kept_text_is_compared_with_start_without_other_evaluations(
    kept: dict[str, Any], start: Path, data: Path, tmp_path: Path, tokenizer: Tokenizer,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Neither a validation split nor regular evaluations are needed."""
    write_lines(tmp_path / "new.jsonl", [{"text": text} for text in make_texts(60)])
    prepare([tmp_path / "new.jsonl"], tokenizer, tmp_path / "new", val_fraction=0.0)
    for folder, steps in ((tmp_path / "new", [0, 4, 10, 20, 30]), (data, [0, 4, 30])):
        run = copy.deepcopy(kept)
        run["run"]["dir"] = str(tmp_path / f"run-{folder.name}")
        run["data"]["dir"] = str(folder)
        run["evaluation"] |= {"on_start": False, "every_steps": 10 if len(steps) == 5 else 0}
        train(run, init_from=start, progress=True)
        assert [line["step"] for line in lines(run) if "kept/loss" in line] == steps
        events = read_json_lines(folder_of(run) / "events.jsonl")
        assert [(one["event"], one["step"]) for one in events] == [("replay", 4)]
        result, line = kept_result(folder_of(run)), lines(run)
        assert result is not None
        figures = [one["kept/bits_per_byte"] for one in line if "kept/loss" in one]
        assert result.kept[0] == figures[0]
        if folder.name == "new":
            assert (result.new, result.kept[1], result.step) == (None, figures[-1], 30)
            assert str(result).endswith("(step 30; the new text has no validation split)")
            assert next(_kept_figures(read_run(folder_of(run)))).note == str(result)
            alone = (
                "only the kept text is measured, so no checkpoint is the best: hold out new text"
            )
            assert alone in capsys.readouterr().err


@pytest.mark.parametrize("steps", [1, 2])
def test_share_of_following_rows_is_told_only_if_rows_follow(
    kept: dict[str, Any], start: Path, steps: int, capsys: pytest.CaptureFixture[str]
) -> None:
    kept["schedule"] = {"max_steps": steps, "warmup_steps": 0}
    train(kept, init_from=start, progress=True)
    told = [one for one in capsys.readouterr().err.splitlines() if "bits for the kept text" in one]
    assert len(told) == 1
    assert told[0].startswith("step 1: ")
    assert told[0].endswith("for the kept text") is (steps == 1)
    assert ("of the following rows" in told[0]) is (steps == 2)


def test_given_share_is_exact(kept: dict[str, Any], start: Path, old: Path) -> None:
    kept["data"]["replay"] = 0.25
    train(kept, init_from=start)
    last = lines(kept)[-1]
    assert last["epoch/kept"] * rows_in(old) == pytest.approx(30)  # 30 steps of 4 rows
    assert not (folder_of(kept) / "events.jsonl").exists()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"keep": None, "replay": 0.1}, "replay needs keep"),
        ({"replay": 1.0}, "less than 1"),
        ({"replay": -0.1}, "greater than or equal to 0"),
        ({"dir": None, "mix": [{"dir": "a", "weight": 1}]}, "keep supports a single corpus"),
        ({"kind": "preference", "replay": 0.1}, "replay does not support preference pairs"),
    ],
)
def test_recipe_with_wrong_kept_text_is_refused(
    kept: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    kept["data"] = {**kept["data"], **changes}
    with pytest.raises(ConfigError, match=message):
        parse_recipe(kept)


@pytest.mark.parametrize("replay", [0, 0.1, None])
def test_kept_text_with_other_tokenizer_is_refused(
    kept: dict[str, Any], start: Path, tmp_path: Path, texts: list[str], corpus: Path,
    replay: float | None,
) -> None:  # fmt: skip
    prepare([corpus], train_tokenizer(texts, 300), tmp_path / "other")
    kept["data"] |= {"keep": str(tmp_path / "other"), "replay": replay}
    with pytest.raises(DataError, match="prepared with different tokenizers"):
        train(kept, init_from=start)
    assert not folder_of(kept).exists()

"""Tests of `train_texts` on small texts: from a folder to a model, and the effect of a second
call."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import gzip
import inspect
import json
import os
import random
import re
import shlex
import shutil
import signal
import time
import typing
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import click
import pytest
import yaml
from rich.progress import Progress, ProgressColumn

from builders import ENGLISH, write_texts
from firstlight.cli import train as train_command
from firstlight.cli.main import main
from firstlight.cli.train import takes_texts
from firstlight.console import progress_bar, rounded, time_text
from firstlight.data import prepare as prepare_module
from firstlight.data.sources import find_sources
from firstlight.errors import CheckpointError, ConfigError, InputError, TokenizerError
from firstlight.from_texts import machine as machine_module
from firstlight.from_texts import new_model, preparation
from firstlight.from_texts import scan as scan_module
from firstlight.from_texts.choices import choose
from firstlight.from_texts.new_model import TextPlan, counted_text
from firstlight.from_texts.plan import Choices
from firstlight.from_texts.request import Request, request_of
from firstlight.from_texts.result import TextRun, first_words, result_lines
from firstlight.from_texts.run import train_texts, work_of
from firstlight.from_texts.run_folder import RunCall, command_of, run_name
from firstlight.from_texts.scan import scan_corpus, scan_texts
from firstlight.hardware.compiling import Compiler
from firstlight.models.accounting import count_parameters, meta_model
from firstlight.planner.advise import defaults
from firstlight.planner.advise import speed as speed_module
from firstlight.planner.advise.law import Hardness, Length, MachineFacts, TextFacts
from firstlight.planner.plan import machine as planned_machine
from firstlight.planner.plan.estimate import Estimate, estimate
from firstlight.planner.plan.machine import Machine, find_machine, resolve_for
from firstlight.recipe import load_recipe
from firstlight.run_log.names import FORECAST_NAME
from firstlight.run_log.reader import read_json_lines, read_length
from firstlight.training.loop import train

pytestmark = pytest.mark.usefixtures("forked_processes")

TINY = {
    "evaluation.sample_tokens": 4,
    "model.hidden_size": 64,
    "model.num_hidden_layers": 1,
    "data.seq_len": 32,
}


@pytest.fixture(autouse=True)
def _known_speed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)

    def facts(machine: Machine) -> MachineFacts:
        return MachineFacts(machine.name, "cpu", [(9e6, 2e4), (5e7, 5e3)], 8 << 30)

    monkeypatch.setattr(speed_module, "new_model_speed", facts)
    # Predicting a run's memory takes twice as long as these runs.
    monkeypatch.setattr(machine_module, "estimate", lambda recipe, _: Estimate("", {}, recipe))


@pytest.fixture
def _predicted_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_module, "estimate", estimate)


def trained(folder: Path, **changes: Any) -> TextRun:
    options: dict[str, Any] = {"steps": 3, "overrides": TINY, "progress": False} | changes
    return train_texts(folder, **options)


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        (["\n  A short line.\nSecond"], "A short line"),
        (["a line with more words than thirty-two letters hold"], "a line with more words than"),
        (["日" * 50], "日" * 32),
        (["春眠不覺曉，處處聞啼鳥"], "春眠不覺曉"),
        (["यह एक परीक्षा है।"], "यह एक परीक्षा है"),
        (["hello there " + "b" * 50], "hello there"),
        (["time for tea\x1b]0;title\x07"], "time for"),
        (["“Don’t,” said he.\n“Well then,” said she"], "Well then"),
        (['\'"" t', "x = f(y)\nsys.path", "12 of 13"], ""),
        (['\'"" t', "import numpy as np"], "import numpy as np"),
        (["see /usr/share"], ""),
        ([" \n "], ""),
        ([], ""),
    ],
)
def test_first_words_are_letters_and_spaces_of_line_of_language(
    prompts: list[str], words: str
) -> None:
    assert first_words(prompts) == words


def test_train_texts_folder_makes_model_and_second_call_reuses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = write_texts(tmp_path / "my texts")
    steps: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(machine_module, "estimate", estimate)
        run = trained(texts, on_step=lambda record: steps.append(record["step"]))
    assert steps == [1, 2, 3]
    model = load_recipe(run.run_folder / "recipe.yaml").model
    assert model is not None
    found = json.loads((run.run_folder / FORECAST_NAME).read_text())["predicted"]
    assert found["peak_bytes"] > 3 * 4 * count_parameters(meta_model(model)).total
    assert run.run_folder == Path("runs/my-texts")
    assert run.training is not None
    assert run.training.step == 3
    assert run.bits_per_byte is not None
    assert 0 < run.bits_per_byte < 9
    assert run.gzip_bits_per_byte is not None
    assert run.xz_bits_per_byte is not None
    assert len(run.samples) == 3
    recipe = (run.run_folder / "recipe.yaml").read_text()
    values = yaml.safe_load(recipe)
    assert values["schedule"]["max_steps"] == 3
    assert values["model"]["hidden_size"] == 64
    assert "  # given\n  hidden_size: 64" in recipe
    assert (
        "  # new models learned best with this value: docs/learning.md\n  muon_beta2: 0.95"
        in recipe
    )
    own = "--steps 3 " + " ".join(f"--{key} {value}" for key, value in TINY.items())
    assert recipe.startswith(f"# Chosen by `firstlight train '{texts}' {own}`. Each comment")
    lines = list(result_lines(run))
    bits = f"result: {run.bits_per_byte:.3f} bits per byte of held-out text"
    assert lines[0].startswith(bits)
    assert re.search(r"\(gzip -9: .*, xz: .*, expected: \d\.\d\d to \d\.\d\d\)$", lines[0])
    commands = {words[1]: words[1:] for words in (shlex.split(c) for c, _ in run.next_commands)}
    assert list(commands) == ["generate", "chat", "train", "serve", "convert"]
    # The prompt is the beginning of a held-out text, so it is in the language of the texts.
    prompt = commands["generate"][3]
    assert 0 < len(prompt) <= 32
    assert run.samples[0][0].lstrip().startswith(prompt)
    assert main([*commands["generate"], "--max-new-tokens", "4"]) == 0
    assert main(commands["convert"]) == 0

    assert " --budget 3m " in lines[-1]
    assert "; total time: " in "\n".join(lines)
    again = trained(texts)
    assert again.training is None
    assert again.bits_per_byte == run.bits_per_byte
    assert "; total time: " not in "\n".join(result_lines(again))

    length = {"max_minutes": 1.0, "predicted_steps": 3, "most_steps": 3, "seconds_used": 1.0}
    text = json.dumps({**length, "max_steps": 3, "decided_at": 1})
    (run.run_folder / "length.json").write_text(text)
    assert "firstlight train" not in "\n".join(result_lines(trained(texts)))

    with open(run.run_folder / "metrics.jsonl", "a") as log:
        log.write('{"step": 4, "bits_per_byte": 99.0}\n')
    worse = trained(texts)
    assert worse.best
    assert (worse.bits_per_byte, worse.samples) == (run.bits_per_byte, run.samples)
    assert worse.next_commands[1][0] == "firstlight chat runs/my-texts --best"
    assert "--best uses the checkpoint before them" in "\n".join(result_lines(worse))

    # The checkpoint of the best evaluation is not kept.
    with open(run.run_folder / "metrics.jsonl", "a") as log:
        log.write('{"step": 5, "bits_per_byte": 0.1}\n{"step": 6, "bits_per_byte": 99.0}\n')
    unkept = trained(texts)
    assert (unkept.best, unkept.bits_per_byte) == (False, 99.0)
    assert unkept.next_commands[1][0] == "firstlight chat runs/my-texts"

    manifest = (run.run_folder / "data/manifest.json").stat().st_mtime_ns
    longer = trained(texts, steps=4)
    assert longer.run_folder == Path("runs/my-texts-2")
    shard = "data/train-00000.bin"
    assert (longer.run_folder / shard).samefile(run.run_folder / shard)
    assert (run.run_folder / "data/manifest.json").stat().st_mtime_ns == manifest


def test_run_prints_at_most_25_lines_before_training_and_12_after_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    texts = write_texts(tmp_path / "texts", count=12)
    (texts / "copy.txt").write_text((texts / "00.txt").read_text())
    (texts / "crlf.txt").write_bytes(b"a line\r\nanother one\r\n")
    (texts / "empty.txt").write_text(" \n")
    (texts / "latin.txt").write_bytes("Früh übt sich".encode("latin-1"))
    (texts / "talk.ppt").write_bytes(bytes(range(32)))
    command = ["train", str(texts), "--steps", "3"]
    command += [word for key, value in TINY.items() for word in (f"--{key}", str(value))]
    assert main(command) == 0
    shown = capfd.readouterr()
    lines = shown.err.splitlines()
    before = next(number for number, line in enumerate(lines) if line.startswith("step "))
    assert before <= 25
    last = next(number for number, line in enumerate(lines) if line.startswith("step 3/3 "))
    after = [*lines[last + 1 :], *shown.out.splitlines()]
    assert len(after) <= 12
    assert "left out: 1 duplicate" in lines
    assert f"left out: 1 document, empty or only whitespace; first: {texts}/empty.txt:1" in lines
    assert any(line.startswith("left out: 1 document, not valid UTF-8; first: ") for line in lines)
    assert any(line.startswith("skipped 1 file of other kinds: 1 .ppt") for line in lines)
    unread, rejected = Path("runs/texts/unread.txt"), Path("runs/texts/data/rejected.jsonl")
    assert f"full lists of the skipped inputs: {unread}, {rejected}" in lines
    assert unread.read_text().startswith(f"{texts}/talk.ppt\ta presentation: save it as PDF")
    for name in ("copy.txt", "empty.txt", "latin.txt"):
        assert f"/{name}" in rejected.read_text()
    # The expectation and the result are compared with gzip's size of the same text.
    (gzip,) = re.findall(r"^expected: .* \(gzip -9 of the held-out text: (\S+)\)", shown.err, re.M)
    assert f"{float(re.findall(r'gzip -9: ([^,]+),', shown.out)[0]):.2f}" == gzip
    plan = [line.split(":")[0] for line in lines[:before]]
    assert [plan.count(name) for name in ("model", "length", "expected")] == [1, 1, 1]
    assert "optimizer.learning_rate" not in shown.err
    units = re.findall(r"bits[ -]\w+[ -]byte|[kMG]i?B\b", shown.err + shown.out)
    # Amounts of memory are below or above 1 GiB.
    assert {*units, "MiB", "GiB"} == {"bits per byte", "GiB", "MiB", "kB", "MB"}
    assert main([*command, "--run.seed", "1", "--explain"]) == 0
    assert "\noptimizer.learning_rate " in capfd.readouterr().err


def test_train_texts_stopped_run_is_resumed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    texts = write_texts(tmp_path / "texts")
    first = trained(texts, overrides=TINY | {"run.max_minutes": 1e-9})
    assert first.training is not None
    assert first.training.stopped_by == "max_minutes"
    assert first.expected_bits_per_byte is None
    again, purpose = first.next_commands[0]
    assert purpose == "continue this run"
    assert shlex.split(again)[:5] == ["firstlight", "train", str(texts), "--steps", "3"]
    recipe = first.run_folder / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("max_minutes: 1.0e-09", "max_minutes: null"))
    steps: list[int] = []
    second = trained(
        texts,
        overrides=TINY | {"run.max_minutes": 1e-9},
        on_step=lambda record: steps.append(record["step"]),
        progress=True,
    )
    # The plan, which the first call has shown, is not shown again.
    said = [line.split()[0] for line in capfd.readouterr().err.splitlines() if line.strip()]
    assert "resuming" in said
    assert {"planned:", "schedule:", "optimizer", "matrices"}.isdisjoint(said)
    assert second.run_folder == first.run_folder
    assert second.training is not None
    assert second.training.step == steps[-1] == 3
    assert second.expected_bits_per_byte is not None
    third = trained(texts, steps=None, overrides={}, resume=True)
    assert (third.run_folder, third.training) == (first.run_folder, None)


def test_train_texts_resumed_run_is_not_charged_for_start_of_command(tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "texts")
    options = {"steps": None, "budget": 120, "overrides": TINY | {"run.max_minutes": 1e-9}}
    first = trained(texts, **options)
    assert first.training is not None
    before = read_length(first.run_folder)["seconds_used"]
    second = trained(texts, began=time.time() - 90, **options)
    assert second.training is not None
    assert (first.training.step, second.training.step) == (1, 2)
    assert before < read_length(second.run_folder)["seconds_used"] < before + 30


def test_train_texts_compressed_files_have_complete_progress_bar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = write_texts(tmp_path / "texts")
    for path in texts.iterdir():
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    bars: list[Progress] = []

    def kept(*columns: ProgressColumn, shown: bool) -> Progress:
        bars.append(progress_bar(*columns, shown=shown))
        return bars[-1]

    monkeypatch.setattr(prepare_module, "progress_bar", kept)
    trained(texts)
    assert [task.percentage for bar in bars for task in bar.tasks] == [100.0]


def test_train_texts_deleted_shards_end_run_and_prevent_resume(tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "texts")

    def delete_shards(record: Mapping[str, Any]) -> None:
        shutil.rmtree(tmp_path / "runs/texts/data", ignore_errors=True)

    run = trained(texts, on_step=delete_shards)
    assert run.training is not None
    assert (run.training.step, run.gzip_bits_per_byte) == (3, None)
    assert run.bits_per_byte is not None
    state = json.loads((run.run_folder / "pipeline.json").read_text())
    (run.run_folder / "pipeline.json").write_text(json.dumps(state | {"complete": False}))
    with pytest.raises(ConfigError, match=r"its shards in runs/texts/data were deleted"):
        trained(texts)
    assert trained(texts, run_dir="runs/again").training is not None


def test_train_texts_resume_continues_newest_unfinished_run_without_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = write_texts(tmp_path / "texts")
    with pytest.raises(ConfigError, match="runs has no run with these inputs"):
        trained(texts, steps=None, overrides={}, resume=True)
    trained(texts, steps=1)
    stopped = TINY | {"run.max_minutes": 1e-9}
    trained(texts, steps=5, overrides=stopped)
    first = trained(texts, overrides=stopped, progress=True)
    said = f"runs/texts holds a run with other texts or options: this run is in {first.run_folder}"
    shown = capsys.readouterr().err
    assert said in shown
    assert "note: the text has too few different pairs for 512 tokens" in shown
    assert first.run_folder == Path("runs/texts-3")
    with pytest.raises(ConfigError, match="set --optimizer"):
        trained(texts, overrides={"optimizer.name": "sgd"}, progress=True)
    assert "this run is in" not in capsys.readouterr().err
    recipe = first.run_folder / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("max_minutes: 1.0e-09", "max_minutes: null"))
    with pytest.raises(ConfigError, match="has no run with these inputs and options"):
        trained(texts, steps=7, overrides=stopped, resume=True)
    (texts / "more.txt").write_text("one more text that nobody has seen before it was here\n")
    with pytest.raises(ConfigError) as raised:
        trained(texts, steps=None, overrides={}, resume=True)
    assert str(raised.value) == (
        "runs has no run with these inputs: the texts have changed since the run in runs/texts-2 "
        f"(new: {texts}/more.txt); firstlight train runs/texts-2/recipe.yaml --resume continues "
        "that run with the old texts; omit --resume to start one"
    )
    # The suggested command finds its data, and stops again after one step.
    assert main(["train", "runs/texts-2/recipe.yaml", "--resume"]) == 75
    (texts / "more.txt").unlink()
    second = trained(texts, steps=None, overrides={}, resume=True)
    assert second.run_folder == first.run_folder
    assert second.training is not None
    assert second.training.step == 3
    third = trained(texts, steps=None, overrides={}, resume=True)
    assert third.run_folder == Path("runs/texts-2")


def test_train_texts_changed_texts_start_another_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = write_texts(tmp_path / "texts", count=12)
    trained(texts, steps=1)
    first, second, *_ = sorted(texts.iterdir())
    first.write_text("one more text that nobody has seen before it was here\n")
    second.unlink()
    assert trained(texts, steps=1, progress=True).run_folder == Path("runs/texts-2")
    changed = f"(changed: {first}; missing: {second})\n"
    assert f"have changed since the run in runs/texts {changed}" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="holds a run with other texts or options"):
        trained(texts, steps=2, run_dir="runs/texts")


def test_train_texts_resume_reports_changed_validation_texts_and_old_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts, val = write_texts(tmp_path / "texts", count=12), tmp_path / "val.txt"
    val.write_text("a text that nobody has seen\n")
    trained(texts, overrides=TINY | {"run.max_minutes": 1e-9}, val_inputs=val)
    val.write_text("another text that nobody has seen\n")
    go_on = "firstlight train runs/texts/recipe.yaml --resume continues that run with the old texts"
    changed = f"the texts have changed since the run in runs/texts (changed: {val}); {go_on}"
    with pytest.raises(ConfigError, match=re.escape(changed)):
        trained(texts, steps=None, overrides={}, val_inputs=val, resume=True)
    state = json.loads(Path("runs/texts/pipeline.json").read_text())
    del state["files"]
    Path("runs/texts/pipeline.json").write_text(json.dumps(state))
    changed = f"have changed, or are read differently, since the run in runs/texts; {go_on}"
    with pytest.raises(ConfigError, match=re.escape(changed)):
        trained(texts, steps=None, overrides={}, val_inputs=val, resume=True)
    assert trained(texts, steps=1, val_inputs=val, progress=True).run_folder.name == "texts-2"
    assert changed in capsys.readouterr().err


def test_train_texts_all_near_validation_texts_raise_input_error(tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "texts", count=1, words=1000)
    val = tmp_path / "val.txt"
    val.write_text((texts / "00.txt").read_text() + "mat and bird\n")
    with pytest.raises(InputError, match=r"have only 0 bytes of text that are not in --val-input"):
        trained(texts, val_inputs=val)


def test_train_texts_concurrent_call_raises_and_other_options_reuse_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = write_texts(tmp_path / "texts", count=12)
    prepare, calls = preparation.prepare_corpus, []

    def prepare_meanwhile(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        with pytest.raises(CheckpointError, match=r"runs/texts is in use by another process"):
            trained(texts, steps=1)
        # Another run would wait until the texts are prepared.
        with open("runs/texts/.data.lock") as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return prepare(*arguments, **options)

    monkeypatch.setattr(preparation, "prepare_corpus", prepare_meanwhile)
    first = trained(texts, steps=1)
    second = trained(texts, steps=2)
    assert len(calls) == 1
    # The second run still works after the first run, whose shards it uses, is deleted.
    shutil.rmtree(first.run_folder)
    (second.run_folder / "pipeline.json").unlink()
    recipe = load_recipe(second.run_folder / "recipe.yaml").with_keys("schedule", max_steps=3)
    assert train(recipe, resume=True, progress=False).step == 3


def test_train_texts_shards_of_other_texts_are_not_used_after_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_killed = False

    def prepare(texts: Any, call: RunCall) -> Path:
        with open(call.folder / ".data.lock") as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if is_killed:
            raise KeyboardInterrupt
        (call.folder / "data").mkdir(exist_ok=True)
        (call.folder / "data/manifest.json").write_text(texts.key)
        return call.folder / "data"

    def prepared(key: str, name: str) -> Path:
        (tmp_path / name).mkdir(exist_ok=True)
        call = RunCall(tmp_path / name, 0.0, lambda line: None, progress=False)
        texts: Any = SimpleNamespace(key=key)
        return preparation.prepared_texts(texts, call)

    monkeypatch.setattr(preparation, "prepare_corpus", prepare)
    assert prepared("old", "one") == tmp_path / "one/data"
    is_killed = True
    with pytest.raises(KeyboardInterrupt):
        prepared("new", "one")
    is_killed = False
    assert prepared("new", "two") == tmp_path / "two/data"
    assert (tmp_path / "two/data/manifest.json").read_text() == "new"
    assert prepared("new", "one") == tmp_path / "one/data"
    assert (tmp_path / "one/data/manifest.json").samefile(tmp_path / "two/data/manifest.json")
    assert prepared("old", "one") == tmp_path / "one/data"


#: Settings of a run whose speed is checked after its first step, and that ends after one step.
FIRST = {
    "evaluation.sample_tokens": 1,
    "evaluation.every_steps": 0,
    "evaluation.max_rows": 4,
    "run.max_minutes": 1e-9,
}


@pytest.fixture
def after_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(new_model, "_FIRST_SECONDS", 0.0)
    monkeypatch.setattr(new_model, "_SLOW_STEPS", 0)


class TwentyTimesAsFast(new_model._FirstSteps):
    """First steps of a machine that is 20 times as fast as measured."""

    def __call__(self, record: Mapping[str, Any]) -> None:
        rate = 20 * self._plan.choices.tokens_per_second
        super().__call__({**record, "tokens_per_second": rate})


def believed(monkeypatch: pytest.MonkeyPatch, rate: float) -> None:
    """Set a fixed speed of this machine instead of measuring it, for a model with 9 million FLOPs
    per token.
    """

    def facts(machine: Machine) -> MachineFacts:
        return MachineFacts(machine.name, "cpu", [(9e6, rate)], 8 << 30, "measured here")

    monkeypatch.setattr(speed_module, "new_model_speed", facts)


@pytest.mark.usefixtures("after_one_step")
def test_train_texts_wrong_speed_chooses_model_again_once_and_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = write_texts(tmp_path / "texts", count=60, words=500)
    believed(monkeypatch, 20.0)
    monkeypatch.setattr(new_model, "_FirstSteps", TwentyTimesAsFast)
    steps: list[int] = []
    run = trained(
        texts,
        steps=None,
        budget="10m",
        overrides=FIRST,
        progress=True,
        on_step=lambda record: steps.append(record["step"]),
    )
    shown = capsys.readouterr().err
    (line,) = re.findall(
        r"^([\d,]+) tokens/s instead of ([\d,]+): training restarts with (\S+) parameters "
        r"instead of (\S+), for the remaining 9 min \d+ s$",
        shown,
        re.M,
    )
    assert line[2] != line[3]
    # The restarted run shows its plan as the first one did, without the lines of a recipe's run.
    said = [text.split(":")[0] for text in shown.splitlines()]
    assert [said.count(name) for name in ("model", "length", "expected")] == [2, 2, 2]
    assert {"planned", "schedule"}.isdisjoint(said)
    assert steps == [1, 1]
    assert run.training is not None
    assert run.training.step == 1
    metrics = read_json_lines(run.run_folder / "metrics.jsonl")
    assert [one["step"] for one in metrics] == [1]
    # The time spent on the first model does not count as time of the new run.
    recipe = load_recipe(run.run_folder / "recipe.yaml")
    assert recipe.model is not None
    assert recipe.schedule.max_minutes is not None
    assert recipe.schedule.max_minutes < 9.94
    assert run.choices is not None
    assert run.choices["model.hidden_size"] == recipe.model.hidden_size
    assert rounded(run.choices.parameters) != line[3]
    state = json.loads((run.run_folder / "pipeline.json").read_text())
    assert tuple(state["expected"]) == run.choices.bits_per_byte
    saved = json.loads((run.training.checkpoint / "config.json").read_text())
    assert saved["hidden_size"] == recipe.model.hidden_size
    # A resumed run keeps its model.
    believed(monkeypatch, 2000.0)
    again = trained(texts, steps=None, budget="10m", overrides=FIRST, progress=True)
    assert again.training is not None
    assert again.training.step == 2
    assert "instead of" not in capsys.readouterr().err


@pytest.mark.usefixtures("after_one_step")
def test_train_texts_signal_saves_instead_of_choosing_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = write_texts(tmp_path / "texts", count=60, words=500)
    believed(monkeypatch, 20.0)
    monkeypatch.setattr(new_model, "_FirstSteps", TwentyTimesAsFast)
    steps: list[int] = []

    def ask_to_stop(record: Mapping[str, Any]) -> None:
        steps.append(record["step"])
        signal.raise_signal(signal.SIGTERM)

    run = trained(
        texts,
        steps=None,
        budget="10m",
        overrides={key: value for key, value in FIRST.items() if key != "run.max_minutes"},
        on_step=ask_to_stop,
    )
    assert steps == [1]
    assert run.training is not None
    assert (run.training.step, run.training.stopped_by) == (1, "SIGTERM")
    assert run.training.checkpoint.is_dir()


def plan_of(request: Request, speed: MachineFacts, text: TextFacts, choices: Choices) -> Any:
    return TextPlan(
        request=request,
        scan=Mock(),
        machine=Mock(),
        speed=speed,
        text=text,
        vocabulary="",
        choices=choices,
    )


@pytest.mark.usefixtures("after_one_step")
@pytest.mark.parametrize(
    ("factor", "other", "told"),
    [
        (1.4, {}, []),
        (1 / 1.4, {}, []),
        (1.6, {}, ["13,951 tokens/s instead of 8,719: the chosen model is still the best one"]),
        (1.6, {"steps": 3, "seconds": None}, []),
        (1.6, {"size": "tiny"}, []),
    ],
)
def test_train_texts_measured_speed_is_reported_if_different_and_model_open(
    tmp_path: Path, factor: float, other: Mapping[str, Any], told: Sequence[str]
) -> None:
    lines: list[str] = []
    text = TextFacts(512, 1e6, 1.9, Hardness(1.72, 2.24, 1.0), 1e5)
    request = replace(Request(("texts",), 60.0), **other)
    speed = MachineFacts("two cores", "cpu", [(9e6, 1000.0)], 8 << 30)
    choices = choose(text, speed, Length(45.0))
    plan = plan_of(request, speed, text, choices)
    call = RunCall(tmp_path, time.time(), lines.append, progress=False)
    watch = new_model._FirstSteps(plan, call)
    rate = choices.tokens_per_second
    assert round(rate) == 8719
    speed_of_step = {"tokens_per_second": factor * rate, "seconds": 10.0, "elapsed_seconds": 20.0}
    watch(speed_of_step)
    watch(speed_of_step | {"tokens_per_second": 9 * rate})  # Later speeds are ignored.
    assert [line.removesuffix(" for the remaining time") for line in lines] == told


def test_train_texts_speed_of_compiled_run_excludes_compiling(tmp_path: Path) -> None:
    lines: list[str] = []
    text = TextFacts(512, 1e6, 1.9, Hardness(1.72, 2.24, 1.0), 1e5)
    compiler = Compiler("cpu", device="", cores=2)
    speed = MachineFacts("two cores", "cpu", [(9e6, 1000.0)], 8 << 30, compiler=compiler)
    choices = choose(text, speed, Length(600.0))
    assert choices["efficiency.compile"]
    plan = plan_of(Request(("texts",), 620.0), speed, text, choices)
    watch = new_model._FirstSteps(
        plan, RunCall(tmp_path, time.time(), lines.append, progress=False)
    )
    step = {"tokens_per_second": choices.tokens_per_second, "seconds": 4.0, "elapsed_seconds": 60.0}
    for _ in range(2):
        watch(step | {"tokens_per_second": 1.0, "seconds": 30.0})
    for _ in range(3):
        watch(step)
    assert not lines
    # The time for compiling counts neither as time nor as speed of the steps.
    watch = new_model._FirstSteps(
        plan, RunCall(tmp_path, time.time(), lines.append, progress=False)
    )
    for seconds in (30.0, 1.0, 5.0):
        watch(step | {"tokens_per_second": 3 * choices.tokens_per_second, "seconds": seconds})
    assert not lines
    with contextlib.suppress(new_model._OtherModelError):
        watch(step | {"tokens_per_second": 3 * choices.tokens_per_second, "seconds": 5.0})
        assert lines


def test_train_texts_used_up_budget_raises_config_error(tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "texts", count=12)
    with pytest.raises(ConfigError, match="the budget of 5 s is too short"):
        trained(texts, steps=None, budget="5s")


@pytest.mark.parametrize("preparing, is_advised", [(0.0, False), (10.0, False), (20.0, True)])
def test_train_texts_second_call_is_suggested_only_if_time_suffices(
    tmp_path: Path, preparing: float, is_advised: bool
) -> None:
    call = RunCall(tmp_path, time.time() - 50, lambda line: None, progress=False)
    call.preparing_seconds = preparing
    with pytest.raises(ConfigError, match=r"50 s, .* report; use --budget 7[67789]s") as raised:
        call.length(Request(("texts",), 60.0))
    assert ("or run the command again" in str(raised.value)) == is_advised


@pytest.mark.parametrize("data", [None, "data", "another/data"])
def test_train_texts_unstarted_run_is_forgotten_without_its_own_data(
    tmp_path: Path, data: str | None
) -> None:
    call = RunCall(tmp_path, time.time(), lambda line: None, progress=False)
    call.remember(data=data)
    if data == "data":
        (tmp_path / data).mkdir()
    call.forget()
    assert (tmp_path / "pipeline.json").exists() == (data == "data")


def test_train_texts_started_run_is_not_forgotten(tmp_path: Path) -> None:
    call = RunCall(tmp_path, time.time(), lambda line: None, progress=False)
    call.remember(data="another/data", begun=True)
    call.forget()
    assert (tmp_path / "pipeline.json").exists()


def test_train_texts_failed_plan_leaves_nothing(tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "texts", count=12)
    with pytest.raises(ConfigError, match=r"^--size 1T: "):
        trained(texts, size="1T")
    assert not Path("runs").exists()
    assert trained(texts, steps=1).run_folder == Path("runs/texts")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"optimizer.learning_rat": 1}, "unknown key optimizer.learning_rat"),
        ({"batch.global_batch_tokens": 1000}, "set it to 1024"),
        ({"model.hidden_size": 96}, "hidden_size 96 is not a multiple"),
        ({"model.vocab_size": 200}, "vocab_size 200 is too small"),
        ({"optimizer.name": "sgd"}, "there is no default learning rate"),
    ],
)
def test_train_texts_invalid_overrides_raise_before_reading_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(scan_module, "scan_corpus", Mock(side_effect=AssertionError("read")))
    with pytest.raises((ConfigError, TokenizerError), match=message):
        trained(write_texts(tmp_path / "texts", count=12), overrides=overrides)
    assert not Path("runs").exists()


def test_train_texts_failed_start_leaves_no_folder_of_linked_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = write_texts(tmp_path / "texts")
    first = trained(texts)
    monkeypatch.setattr(machine_module, "fitted_recipe", Mock(side_effect=ConfigError("too short")))
    with pytest.raises(ConfigError, match="too short"):
        trained(texts, steps=5)
    assert [path.name for path in Path("runs").iterdir()] == ["texts"]
    assert (first.run_folder / "data" / "manifest.json").is_file()


def test_train_texts_other_length_takes_over_a_folder_that_was_only_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = write_texts(tmp_path / "texts")
    with monkeypatch.context() as patch:
        patch.setattr(machine_module, "fitted_recipe", Mock(side_effect=ConfigError("too short")))
        with pytest.raises(ConfigError, match="too short"):
            trained(texts, steps=None, budget="60s")
    assert [path.name for path in Path("runs").iterdir()] == ["texts"]
    prepared = (Path("runs/texts/data") / "manifest.json").stat().st_ino
    assert trained(texts, steps=2).run_folder == Path("runs/texts")
    assert (Path("runs/texts/data") / "manifest.json").stat().st_ino == prepared
    # A run that was trained keeps its folder, and so does one with other options.
    assert trained(texts, steps=3).run_folder == Path("runs/texts-2")


def test_train_texts_run_with_incomplete_shards_keeps_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = write_texts(tmp_path / "texts", count=12)

    def interrupted(texts: Any, call: RunCall) -> Path:
        (call.folder / "data").mkdir()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(preparation, "prepare_corpus", interrupted)
        with pytest.raises(KeyboardInterrupt):
            trained(texts, steps=1)
    assert trained(texts, steps=1).run_folder == Path("runs/texts")


def test_train_texts_run_is_kept_when_later_call_fails(tmp_path: Path) -> None:
    run = trained(write_texts(tmp_path / "texts"), steps=2)
    state = json.loads((run.run_folder / "pipeline.json").read_text())
    for key in ("complete", "data"):  # A stopped run; then a run without its own shards.
        del state[key]
        (run.run_folder / "pipeline.json").write_text(json.dumps(state))
        recipe = (run.run_folder / "recipe.yaml").read_text()
        (run.run_folder / "recipe.yaml").write_text(recipe.replace("hidden_size", "hidden_sise"))
        with pytest.raises(ConfigError, match="hidden_sise"):
            trained(tmp_path / "texts", steps=2)
        assert json.loads((run.run_folder / "pipeline.json").read_text()) == state
        (run.run_folder / "recipe.yaml").write_text(recipe)


def test_train_texts_proposes_longer_run_from_measured_time(tmp_path: Path) -> None:
    run = trained(write_texts(tmp_path / "texts"))
    path = run.run_folder / "metrics.jsonl"
    lines = [json.loads(line) | {"seconds": 600.0} for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    longer = trained(tmp_path / "texts").next_commands[2][0]
    minutes = 4 * 10 * len(lines)
    assert f" --budget {minutes}m " in longer
    # A run of this length already exists.
    state = json.loads((run.run_folder / "pipeline.json").read_text())
    state["request"] |= {"seconds": 60.0 * minutes, "steps": None}
    Path("runs/texts-2").mkdir()
    Path("runs/texts-2/pipeline.json").write_text(json.dumps(state))
    longer = trained(tmp_path / "texts").next_commands[2][0]
    assert f" --budget {4 * minutes}m " in longer


def test_result_worse_than_gzip_says_what_helps(tmp_path: Path) -> None:
    run = trained(write_texts(tmp_path / "texts"))
    run = dataclasses.replace(run, bits_per_byte=2.0, gzip_bits_per_byte=1.9)

    def said(**changes: Any) -> list[str]:
        lines = result_lines(dataclasses.replace(run, **changes))
        return [line for line in lines if line.startswith("the result is worse than gzip -9: ")]

    assert said(gzip_bits_per_byte=2.1) == said(gzip_bits_per_byte=None) == []
    (line,) = said()
    assert line.endswith(": train longer (the command below starts a new run from the beginning)")
    (line,) = said(next_commands=[("firstlight train texts", "continue this run")])
    assert line.endswith(": train longer (the command below continues this run)")
    no_longer = [one for one in run.next_commands if not one[1].startswith("train longer")]
    for changes in ({"best": True}, {"next_commands": no_longer}):
        (line,) = said(**changes)
        assert line.endswith(": add texts, because more steps on the same texts would not help")


def test_train_texts_bits_of_partial_held_out_text_are_marked(tmp_path: Path) -> None:
    run = trained(write_texts(tmp_path / "texts"), overrides=TINY | {"evaluation.max_rows": 1})
    recipe = yaml.safe_load((run.run_folder / "recipe.yaml").read_text())
    manifest = json.loads((run.run_folder / "data/manifest.json").read_text())
    tokens = manifest["splits"]["val"]["tokens"]
    assert run.held_out_share == recipe["data"]["seq_len"] / tokens < 0.9
    line = f"held-out text, measured on {100 * run.held_out_share:.0f}% of it (gzip"
    assert line in "\n".join(result_lines(run))
    assert trained(tmp_path / "texts", run_dir="all").held_out_share == 1


def test_train_texts_one_file_of_one_line_trains(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(" ".join(map(str, range(500))))
    overrides = {"model.hidden_size": 64, "evaluation.sample_tokens": 4}
    run = trained(tmp_path / "a.txt", steps=1, overrides=overrides)
    assert run.bits_per_byte is not None


def test_train_texts_tokenizer_does_not_see_held_out_tail(tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "texts", count=1, words=4500)
    with open(texts / "00.txt", "a") as file:
        file.write("Quetzalcoatl\n" * 100)
    request = request_of(texts, None, None, 1, None, (), "text")
    scan = scan_texts(request, lambda line: None, progress=False)
    tokenizer = preparation.train_tokenizer_on(scan, "text", 512, lambda line: None)
    assert len(tokenizer.encode(ENGLISH[1])) == 1
    assert len(tokenizer.encode("Quetzalcoatl")) > 5


def test_train_texts_empty_texts_raise_input_error(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n \n")
    with pytest.raises(InputError, match="the corpus is empty"):
        trained(tmp_path / "a.txt", steps=1)
    (tmp_path / "a.txt").write_text("one line\n")
    with pytest.raises(InputError, match=r"have only 9 bytes of text, too little.*at least 1,000"):
        trained(tmp_path / "a.txt", steps=1)


def test_train_texts_keys_determined_by_texts_raise_before_training(tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "texts", count=12)
    with pytest.raises(ConfigError, match="use --budget, --tokens or --steps"):
        trained(texts, overrides={"schedule.max_steps": 2})
    with pytest.raises(ConfigError, match="it only limits the passes within a --budget"):
        trained(texts, overrides={"schedule.epochs": 2})
    with pytest.raises(ConfigError, match="it only limits the passes"):
        trained(texts, steps=None, budget="10m", overrides={"schedule.epochs": None})
    with pytest.raises(ConfigError, match=r"unknown key model\.hidden_sise"):
        trained(texts, overrides={"model.hidden_sise": 2})
    with pytest.raises(ConfigError, match="--budget and --steps both set the length"):
        trained(texts, budget=60)
    assert not Path("runs").exists()
    # The error is raised before the texts are read, which would raise a different error.
    (tmp_path / "empty.txt").write_text("\n \n")
    with pytest.raises(ConfigError, match=r"unknown key model\.hidden_sise"):
        trained(tmp_path / "empty.txt", overrides={"model.hidden_sise": 2})


@pytest.mark.usefixtures("_predicted_memory")
def test_plan_only_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_texts(tmp_path / "texts", count=12)
    assert main(["train", "texts", "--plan-only", "--budget", "3m"]) == 0
    shown = capsys.readouterr()
    assert shown.err.startswith("reading texts: 12 files")
    assert "model.hidden_size" in shown.out
    rows = {line.split()[0]: line.split()[1] for line in shown.out.splitlines() if line}
    assert int(rows["steps"].replace(",", "")) > 1
    assert float(rows["epochs"]) == pytest.approx(4, rel=0.1)
    assert "the epoch limit, which ends the run before the time is used up" in shown.out
    ends = r"^the run ends after 4 epochs, before its 2 min \d+ s are used up: "
    assert re.search(ends, shown.out, re.MULTILINE)
    assert 2.4 < float(rows["schedule.max_minutes"]) < 2.9
    assert rows["precision"] == find_machine(None).precision
    assert re.search(r"^expected: .*; [\d.]+ MiB for tensors, of \d", shown.out, re.MULTILINE)
    end = "nothing was trained; to train: firstlight train texts --budget 3m"
    assert shown.out.splitlines()[-1] == end
    assert "no --budget" not in shown.err
    assert main(["train", "texts", "--plan-only"]) == 0
    assert "no --budget given: planning for 10 min" in capsys.readouterr().err
    assert not Path("runs").exists()


@pytest.mark.usefixtures("_predicted_memory")
def test_plan_only_memory_matches_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = write_texts(tmp_path / "texts", count=12)
    # So few different words do not fill a larger vocabulary.
    given = TINY | {"model.vocab_size": 280}
    overrides = [word for key, value in given.items() for word in (f"--{key}", str(value))]
    assert main(["train", "texts", "--plan-only", "--steps", "3", "--json", *overrides]) == 0
    expected = json.loads(capsys.readouterr().out)["memory_bytes"]
    run = trained(texts, overrides=given)
    machine, recipe = find_machine(), load_recipe(run.run_folder / "recipe.yaml")
    needed = estimate(resolve_for(recipe, machine), machine).needed_bytes
    assert expected == needed


def test_plan_only_table_shows_given_keys_and_model_parameters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = write_texts(tmp_path / "texts", count=12)
    given = TINY | {"model.model_type": "gpt2", "efficiency.precision": "fp32", "run.seed": 7}
    given |= {"model.tie_word_embeddings": True, "model.vocab_size": 280, "run.dir": "there"}
    words = [word for key, value in given.items() for word in (f"--{key}", str(value))]
    words += ["--evaluation.sample_prompts", f"[long{' long' * 9}]"]
    assert main(["train", "texts", "--plan-only", "--steps", "3", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line.split(None, 2)[1:] for line in lines if line.split()[2:]}
    assert rows["run.seed"] == ["7", "given"]
    assert rows["evaluation.sample_prompts"] == ["[long", "long long long lo…  given"]
    assert rows["model.model_type"] == ["gpt2", "given"]
    assert rows["precision"][0] == "fp32"
    assert not {"run.dir", "efficiency.precision"} & rows.keys()
    run = trained(texts, overrides=given)
    model = load_recipe(run.run_folder / "recipe.yaml").model
    assert run.choices is not None
    assert model is not None
    assert run.choices.parameters == count_parameters(meta_model(model)).total
    assert any(f"{rounded(run.choices.parameters)} parameters" in line for line in lines)


def test_plan_only_uses_device_and_optimizer_of_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_texts(tmp_path / "texts", count=12)
    find = Mock(side_effect=find_machine)
    monkeypatch.setattr(planned_machine, "find_machine", find)
    command = ["train", "texts", "--plan-only", "--steps", "3"]
    assert main([*command, "--run.device", "cpu", "--optimizer.name", "lion"]) == 0
    find.assert_called_once_with(None, device="cpu")
    assert (
        "expected: bits per byte unknown for this optimizer (gzip -9 of all text: "
        in capsys.readouterr().out
    )


@pytest.mark.parametrize("unusual", [False, True])
def test_plan_only_reports_unusual_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], unusual: bool
) -> None:
    numbers = random.Random(0).choices(range(10**6), k=10_000)
    table = "".join(f"{row:06};{number:06};N;\n" for row, number in enumerate(numbers))
    (tmp_path / "text.txt").write_text(table if unusual else inspect.getsource(typing))
    assert main(["train", "text.txt", "--plan-only", "--steps", "3"]) == 0
    told = "of held-out text, a wide range because this text is hard to predict (gzip"
    assert (told in capsys.readouterr().out) is unusual


def test_prepared_text_has_hardness_of_scan_and_xz_of_all_held_out_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = write_texts(tmp_path / "texts", count=12)
    facts = scan_corpus(find_sources([str(texts)])).facts
    assert facts.hardness.ngram_bits_per_character != defaults.NGRAM_BITS
    # The sample of a large text may lack repetitions that the full text contains.
    monkeypatch.setattr(preparation, "_xz_bits", lambda data, tokenizer: 0.1)
    run = trained(texts)
    found = counted_text(run.run_folder / "data", facts, 0.1).hardness
    assert found == dataclasses.replace(facts.hardness, held_out_xz_bits_per_byte=0.1)
    assert run.expected_bits_per_byte is not None
    assert run.expected_bits_per_byte[0] == 0.1


@pytest.mark.usefixtures("_predicted_memory")
def test_plan_only_uses_micro_batch_that_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_texts(tmp_path / "texts", count=12)
    command = ["train", "texts", "--plan-only", "--steps", "3", "--json"]
    command += ["--model.num_hidden_layers", "1", "--optimizer.name", "adamw"]

    def planned(*options: str) -> tuple[int, int]:
        assert main([*command, *options]) == 0
        found = json.loads(capsys.readouterr().out)
        rows = {one["key"]: one["value"] for one in found["choices"]}["batch.micro_batch_size"]
        return rows, found["memory_bytes"]

    rows, needed = planned()
    assert rows > 1

    def smaller(*options: Any, **more: Any) -> Machine:
        return replace(find_machine(*options, **more), usable_bytes=needed - 1)

    monkeypatch.setattr(planned_machine, "find_machine", smaller)
    fewer, less = planned()
    assert fewer == rows // 2
    assert less < needed
    assert planned("--batch.micro_batch_size", str(rows)) == (rows, needed)


def test_takes_texts_distinguishes_texts_from_recipes(tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "texts", count=1)
    run = tmp_path / "run"
    run.mkdir()
    (run / "recipe.yaml").write_text("run:\n  dir: run\ndata:\n  dir: data\n")
    cases = {str(texts): True, str(texts / "00.txt"): True, "stdlib": True, "hf:some": True}
    cases |= {"*.txt": True, "a.yaml": False, str(run): False, "nothing": False}
    assert {path: takes_texts([path]) for path in cases} == cases
    assert takes_texts(["a.txt", "b.txt"])
    # A user's files may have the same names as files of a run, a model or a prepared corpus.
    for name, other, own in (
        ("recipe.yaml", "flour: 200 g\n", "data:\n  dir: d\n"),
        ("config.json", '{"theme": "dark"}', '{"model_type": "llama"}'),
        ("manifest.json", '{"start_url": "/"}', '{"tokenizer_sha256": "0"}'),
    ):
        (texts / name).write_text(other)
        assert takes_texts([str(texts)])
        (texts / name).write_text(own)
        assert not takes_texts([str(texts)])
        (texts / name).unlink()
    assert not takes_texts([])
    assert not takes_texts(["a.yaml", "b.yaml"])


def test_train_texts_prompt_for_time_shows_expectations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    work = work_of(
        request_of(write_texts(tmp_path / "texts"), None, None, None, None, (), "text"),
        lambda line: None,
        progress=False,
    )
    answers = iter(["soon", "0m", "3m"])
    monkeypatch.setattr(click, "prompt", lambda *_, **__: next(answers))
    plan = work.plan(Request((str(tmp_path / "texts"),)))
    assert train_command._ask(plan) == 180
    lines = capsys.readouterr().err.splitlines()
    offered = [line for line in lines if re.search(r"expected \d\.\d\d to \d\.\d\d bits", line)]
    assert [line.split("  ")[1].strip() for line in offered] == ["3 min", "10 min", "1 h"]
    assert "'soon' is not a duration" in lines[-2]
    assert lines[-1] == "the time must be more than 0"


@pytest.mark.slow
def test_plan_only_for_gpu_needs_no_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_texts(tmp_path / "texts")
    monkeypatch.undo()  # At the known speed.
    monkeypatch.chdir(tmp_path)
    assert main(["train", "texts", "--budget", "3m", "--gpu", "H100"]) == 2
    assert "--gpu needs --plan-only" in capsys.readouterr().err
    assert main(["train", "texts", "--plan-only", "--resume"]) == 2
    assert "--plan-only plans a new run" in capsys.readouterr().err
    assert main(["train", "texts", "--budget", "3m", "--gpu", "H100", "--plan-only"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^length: .* [\d,]+ tokens/s \(H100.*, predicted by the planner", shown, re.M)
    assert re.search(r"^expected: .* [MG]iB for tensors, of [67]\d\.\d\d GiB$", shown, re.M)
    assert re.search(r"^precision +bf16 ", shown, re.M)


def test_train_texts_options_with_recipe_fail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "a.yaml", "--budget", "3m"]) == 2
    assert "--budget is only for texts: omit it with a.yaml" in capsys.readouterr().err
    os.mkfifo(pipe := tmp_path / "pipe")
    assert main(["train", str(pipe), "--steps", "3"]) == 2
    assert f"{pipe} is a pipe, neither a file nor a folder" in capsys.readouterr().err


def test_train_missing_input_is_not_taken_for_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_texts").mkdir()
    for name in ("my_txts/", "my_txts"):
        assert main(["train", name, "--budget", "3m"]) == 2
        message = capsys.readouterr().err
        assert f"{name} does not exist (did you mean 'my_texts'?): specify files, " in message


def test_train_texts_in_several_processes_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train", "stdlib", "--budget", "3m"]) == 2
    assert "texts are prepared by one process" in capsys.readouterr().err


def test_run_name_and_lengths_are_parsed() -> None:
    assert run_name(["hf:roneneldan/TinyStories:x"]) == "TinyStories"
    assert run_name(["/nowhere/my texts.tar.gz"]) == "my-texts"
    assert [time_text(s) for s in (5, 90, 600, 3600, 5400)] == [
        *("5 s", "1 min 30 s", "10 min", "1 h", "1 h 30 min")
    ]
    assert request_of("a", "3m", None, None, None, {}, "text") == Request(("a",), 180.0)
    request = request_of("a", None, None, 1, None, {}, "text", None, "v.txt", as_is=True)
    command = "firstlight train a --steps 1 --val-input v.txt --as-is"
    assert command_of(request, ["--steps", "1"]) == command
    with pytest.raises(
        ConfigError, match=r"^--budget: 'soon' is not a duration: use a value such as 90s"
    ):
        request_of("a", "soon", None, None, None, {}, "text")
    with pytest.raises(ConfigError, match=r"^--tokens: 'many' is not a number of tokens"):
        request_of("a", None, "many", None, None, {}, "text")

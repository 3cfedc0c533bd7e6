"""Tests of `train_texts` with an existing model: conversations, texts, settings and errors."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch
import yaml

from benchmarks.memory import measured_memory
from builders import draw_records, say, write_lines, write_model, write_texts
from firstlight.checkpoint.checkpoint import STATE_NAME, tokens_read
from firstlight.cli.main import main
from firstlight.conversion.convert import convert
from firstlight.data.records import find_records
from firstlight.errors import ConfigError, FirstlightError, InputError
from firstlight.finetuning.choices import (
    Method,
    StartingModel,
    TuningData,
    TuningFacts,
    choose_tuning,
    row_of,
    starting_model,
)
from firstlight.finetuning.run import FineTuning
from firstlight.from_texts import machine as machine_module
from firstlight.from_texts.plan import Choice, Choices
from firstlight.from_texts.request import Request
from firstlight.from_texts.result import TextRun, result_lines
from firstlight.from_texts.run import train_texts
from firstlight.from_texts.scan import conversations_in, other_files, require_texts
from firstlight.lora.files import ADAPTER_WEIGHTS_NAME, adapter_files
from firstlight.lora.layers import LoraConfig, adapter_tensors, add_lora
from firstlight.lora.loading import load_model
from firstlight.optim.schedule import ScheduleConfig
from firstlight.planner.advise import defaults
from firstlight.planner.advise.law import Length, MachineFacts
from firstlight.planner.plan import machine as planned_machine
from firstlight.planner.plan.estimate import Candidate, Estimate, Estimator, estimate
from firstlight.planner.plan.machine import find_machine, resolve_for
from firstlight.recipe import load_recipe, parse_recipe
from firstlight.run_log.names import FORECAST_NAME
from firstlight.tokenizer import Tokenizer
from firstlight.tokenizer.chat_template import required_tokens
from firstlight.training.loop import train
from firstlight.weights.hub import find_model_folder
from firstlight.weights.huggingface import TOKENS_KEY, read_config
from firstlight.weights.stored import save_tensors

pytestmark = pytest.mark.usefixtures("forked_processes")

MACHINE = MachineFacts("two cores", "cpu", [(9e6, 20_000.0)], 8 << 30)
MODEL = StartingModel(260_000, 64, 2, 512)
FULL = Method()
CHATS = TuningData("chat", 1000, longest=200, usual=150)


@pytest.fixture(autouse=True)
def _known_speed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FIRSTLIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(machine_module, "timed_rate", lambda *_: 20_000.0)
    # Predicting a run's memory takes twice as long as these runs.
    monkeypatch.setattr(machine_module, "estimate", lambda recipe, _: Estimate("", {}, recipe))


@pytest.fixture
def model(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    """Write the folder of a tiny model."""
    return write_model(tmp_path / "model", tokenizer)


def tuned(inputs: Any, model: Path, **changes: Any) -> TextRun:
    options: dict[str, Any] = {"steps": 2, "overrides": {"evaluation.sample_tokens": 4}}
    return train_texts(inputs, **{"init_from": model, "progress": False, **options, **changes})


#: A conversation that is longer than the row chosen for the others.
LONG = {"messages": say("a short question", "one two three four " * 200)}


def chosen(
    length: Length,
    method: Method = FULL,
    fixed: Mapping[str, Any] | None = None,
    model: StartingModel = MODEL,
    **changes: Any,
) -> Any:
    data = dataclasses.replace(CHATS, **changes)
    row = row_of(data, model, {})
    facts = TuningFacts(data, model, method, MACHINE, 100_000.0, 10_000.0, row)
    return choose_tuning(facts, length, fixed or {})


def test_fine_tuning_teaches_model_to_answer(
    tmp_path: Path, model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    chats = write_lines(tmp_path / "chats.jsonl", [*draw_records(60), {"messages": []}, LONG])
    steps: list[int] = []
    run = tuned(chats, model, on_step=lambda record: steps.append(record["step"]), progress=True)
    told = capfd.readouterr().err.splitlines()
    before = next(number for number, line in enumerate(told) if line.startswith("step "))
    assert before <= 25
    assert any(line.startswith("method: all weights (fits into ") for line in told[:before])
    lost = [line for line in told[:before] if line.startswith(("left out: ", "1 of 62 records"))]
    assert len(lost) == 2
    lists = "runs/chats/rejected.jsonl, runs/chats/too-long.txt"
    assert f"full lists of the skipped inputs: {lists}" in told[:before]
    places = Path("runs/chats/too-long.txt").read_text()
    assert re.fullmatch(rf"{chats}:62: [\d,]+ tokens\n", places)
    assert Path("runs/chats/rejected.jsonl").read_text().count(f'"file": "{chats}"') == 1
    last = next(number for number, line in enumerate(told) if line.startswith("step 2/2 "))
    assert len(told[last + 1 :]) + len(list(result_lines(run))) <= 12
    assert steps == [1, 2]
    assert run.run_folder == Path("runs/chats")
    assert run.training is not None
    assert run.training.step == 2
    assert run.bits_per_byte is not None
    # Answers to questions from held-out conversations.
    assert len(run.samples) == 3
    assert all(prompt for prompt, _ in run.samples)
    text = (run.run_folder / "recipe.yaml").read_text()
    recipe = yaml.safe_load(text)
    assert recipe["data"]["files"] == [str(chats)]
    assert (recipe["data"]["template"], recipe["data"]["on_bad"]) == ("alpaca", "skip")
    assert (recipe["lora"], recipe["model"]["hidden_size"]) == (None, 32)
    unknown = "how many tokens the model has read is unknown: rate of models that read much"
    assert unknown in " ".join(text.replace("#", "").split())
    assert "\n  learning_rate: 0.0011" in text
    assert f"--init-from {model}" in text.splitlines()[0]
    lines = "\n".join(result_lines(run))
    assert "bits per byte of held-out answers" in lines
    assert f"train {chats} --budget 3m" in lines
    assert "--run.dir" not in lines
    assert f"--init-from {model}" in lines
    # Training with the recipe alone gives the same result.
    assert load_recipe(run.run_folder / "recipe.yaml").schedule.max_steps == 2

    again = tuned(chats, model)
    assert (again.training, again.bits_per_byte) == (None, run.bits_per_byte)


def test_fine_tuning_samples_answer_given_held_out_questions(tmp_path: Path, model: Path) -> None:
    chats = write_lines(tmp_path / "chats.jsonl", draw_records(60))
    turns = [{"role": "user", "content": "Who asks?"}, {"role": "assistant", "content": "I do."}]
    held = write_lines(tmp_path / "held.jsonl", [{"messages": turns}])
    options = {"evaluation.sample_tokens": 4, "data.val_files": [str(held)]}
    with pytest.raises(ConfigError, match="--as-is is only for texts: omit it"):
        tuned(chats, model, as_is=True)
    run = tuned(chats, model, overrides=options, steps=1)
    assert [prompt for prompt, _ in run.samples] == ["Who asks?"]


def test_fine_tuning_run_of_version_that_prepared_data_differently_can_be_continued(
    tmp_path: Path, model: Path
) -> None:
    chats = write_lines(tmp_path / "chats.jsonl", draw_records(40))
    tuned(chats, model, overrides={"run.max_minutes": 1e-9})
    path = Path("runs/chats/pipeline.json")
    state = json.loads(path.read_text())
    path.write_text(json.dumps(state | {"content_key": "older"}))
    command = f"firstlight train runs/chats/recipe.yaml --resume --init-from {model}"
    with pytest.raises(ConfigError, match=re.escape(f"{command} continues that run; ")):
        tuned(chats, model, steps=None, overrides={}, resume=True)


# The same model under a different path, and no model.
@pytest.mark.parametrize("again", ["model", None])
def test_fine_tuning_stopped_run_is_resumed(tmp_path: Path, model: Path, again: str | None) -> None:
    chats = write_lines(tmp_path / "chats.jsonl", draw_records(60))
    stop = {"run.max_minutes": 1e-9, "evaluation.sample_tokens": 4}
    first = tuned(chats, model, overrides=stop)
    assert first.training is not None
    assert first.training.stopped_by == "max_minutes"
    recipe = first.run_folder / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("max_minutes: 1.0e-09", "max_minutes: null"))
    second = tuned(chats, model, steps=None, overrides={}, resume=True, init_from=again)
    assert second.training is not None
    assert (second.run_folder, second.training.step) == (first.run_folder, 2)


def test_fine_tuning_plan_uses_device_of_run(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chats = write_lines(tmp_path / "chats.jsonl", draw_records(60))
    find = Mock(side_effect=planned_machine.find_machine)
    monkeypatch.setattr(planned_machine, "find_machine", find)
    tuned(chats, model, overrides={"run.device": "cpu", "evaluation.sample_tokens": 4})
    assert find.call_args_list[0] == call(None, device="cpu")


def test_fine_tuning_uses_adapters_if_all_weights_do_not_fit(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chats = write_lines(tmp_path / "chats.jsonl", draw_records(60))
    real, weights = planned_machine.find_machine, 320 * 32 * 2 + 4 * 32 * 32

    # Less than 16 bytes per parameter, so that training all weights does not fit.
    def small(*given: Any, **options: Any) -> planned_machine.Machine:
        return dataclasses.replace(real(*given, **options), usable_bytes=15 * weights)

    monkeypatch.setattr(planned_machine, "find_machine", small)
    with pytest.raises(ConfigError, match=r"does not fit in .* start from a smaller model"):
        tuned(chats, model)
    monkeypatch.setattr(planned_machine, "find_machine", real)
    run = tuned(chats, model, overrides={"lora.rank": 2, "evaluation.sample_tokens": 4})
    assert yaml.safe_load((run.run_folder / "recipe.yaml").read_text())["lora"]["rank"] == 2
    assert run.choices is not None
    assert run.choices["lora.rank"] == 2
    assert run.choices["optimizer.learning_rate"] == pytest.approx(0.013, rel=0.1)


def test_conversations_for_adapter_without_tokenizer_use_base_tokenizer(
    tmp_path: Path, model: Path
) -> None:
    config, adapted = LoraConfig(rank=2), load_model(model, mode="sequential").model
    add_lora(adapted, config, torch.Generator().manual_seed(1))
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    for name, text in adapter_files(adapted, config, str(model)).items():
        (adapter / name).write_text(text, encoding="utf-8")
    save_tensors(adapter_tensors(adapted), adapter / ADAPTER_WEIGHTS_NAME)
    chats = write_lines(tmp_path / "chats.jsonl", draw_records(20))
    request = Request([str(chats)], steps=1, init_from=str(adapter))
    (method,) = (
        line
        for line in FineTuning(request, lambda _: None, progress=False).plan(request).lines()
        if line.startswith("method: ")
    )
    assert method.endswith(
        "; the adapter of the starting model is merged first (--lora.rank N trains the adapter "
        "itself))"
    )


@pytest.mark.parametrize("tools", [True, False])
def test_fine_tuning_template_for_chatml_tokens_follows_tools_of_conversations(
    tmp_path: Path, tokenizer: Tokenizer, tools: bool
) -> None:
    extended = tokenizer.extended(required_tokens("chatml"))
    start = write_model(tmp_path / "model", extended)
    records = draw_records(20)
    if tools:
        records = [one | {"tools": [{"name": "look", "description": "Looks."}]} for one in records]
    # A record may be a bare list of messages.
    chats = write_lines(tmp_path / "chats.jsonl", [say("a", "b"), *records])
    request = Request([str(chats)], steps=1, init_from=str(start))
    work = FineTuning(request, lambda _: None, progress=False)
    assert work._chats is not None
    assert work._chats.section["template"] == ("hermes" if tools else "chatml")


def test_fine_tuning_kind_of_conversations_follows_text_key(tmp_path: Path) -> None:
    chats = write_lines(tmp_path / "a.jsonl", [{"messages": say("a", "b")}])
    others = write_lines(tmp_path / "b.jsonl", [{"prompt": "a", "completion": "b", "text": "c"}])
    request = Request([str(chats), str(others)], init_from=str(tmp_path / "none"), text_key="body")
    with pytest.raises(FirstlightError, match="none"):
        FineTuning(request, lambda _: None, progress=False)


def test_fine_tuning_without_held_out_conversations_reports_it_once(
    tmp_path: Path, model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    chats = write_lines(tmp_path / "chats.jsonl", draw_records(20))
    own = {"data.val_fraction": 0, "evaluation.sample_prompts": []}
    tuned(chats, model, steps=1, overrides=own, progress=True)
    told = capfd.readouterr().err
    assert told.count("no validation split") == 1
    assert "length: 1 step of " in told


def test_train_texts_from_model_continues_pretraining(
    tmp_path: Path, model: Path, tokenizer: Tokenizer
) -> None:
    texts = write_texts(tmp_path / "texts")
    run = tuned(texts, model)
    recipe = yaml.safe_load((run.run_folder / "recipe.yaml").read_text())
    assert Tokenizer.from_pretrained(recipe["data"]["dir"]).fingerprint == tokenizer.fingerprint
    assert run.gzip_bits_per_byte is not None
    assert len(run.samples) == 3
    with pytest.raises(
        ConfigError, match=r"--model.hidden_size applies to new models only: .*model"
    ):
        tuned(texts, model, overrides={"model.hidden_size": 64})
    with pytest.raises(ConfigError, match="--size applies to new models only"):
        tuned(texts, model, size="small")
    with pytest.raises(
        ConfigError, match=r"--lora.rank applies to fine-tuning only: add --init-from"
    ):
        train_texts(texts, steps=1, overrides={"lora.rank": 8}, progress=False)


def test_conversations_in_detects_conversations_by_content(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "mixed"
    folder.mkdir()
    chats = write_lines(folder / "a.jsonl", draw_records(3))
    write_lines(folder / "b.jsonl", [{"text": "a text"}])
    (folder / "c.json").write_text(json.dumps(draw_records(1)))
    (folder / "d.json").write_text("{}")
    (folder / "e.txt").write_text("a text\n")
    assert [one.name for one in conversations_in([str(folder)])] == [
        *(str(chats), str(folder / "c.json"))
    ]
    with pytest.raises(InputError, match=r"a.jsonl contains conv.*, pass only the texts, such as "):
        require_texts([str(folder)])
    (folder / "e.txt").write_text("a text\n" * 10_000)
    require_texts([str(folder)])
    require_texts(["stdlib"])
    with pytest.raises(InputError, match=r"a.jsonl contains conversations: .* --init-from MODEL"):
        require_texts([str(chats), str(folder / "c.json")])
    assert main(["train", str(chats), "--budget", "3m"]) == 1
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert f"firstlight train {chats} --init-from MODEL" in message
    pairs = write_lines(folder / "pairs.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c"}])
    with pytest.raises(InputError, match=r"pairs.jsonl contains preference pairs and .*/c.json "):
        train_texts(folder, init_from="nowhere", progress=False)
    with pytest.raises(InputError, match=rf"from a model that answers: .* {pairs} --init-from MO"):
        require_texts([str(pairs)])
    assert len(find_records([folder])) == 5
    texts, chats = str(folder / "*.txt"), folder / "a.jsonl"
    unread = other_files([texts, str(chats)], conversations_in([str(chats)]))
    assert unread == [str(folder / "e.txt")]


def test_fine_tuning_on_preference_pairs_trains_with_dpo(
    tmp_path: Path, model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    records = [
        {"question": f"What is {i}?", "chosen": f"It is {i}.", "rejected": "no"} for i in range(20)
    ]
    pairs = write_lines(tmp_path / "pairs.jsonl", [*records, {"chosen": "a", "rejected": "a"}])
    run = tuned(pairs, model, progress=True)
    told = capfd.readouterr().err
    assert "18 preference pairs to train on, 2 held out; " in told
    assert "1 of 21 records rejected: " in told
    recipe = load_recipe(run.run_folder / "recipe.yaml")
    assert recipe.data.kind == "preference"
    assert recipe.optimizer.learning_rate == pytest.approx(
        defaults.PAIR_MULTIPLE * defaults.TUNING_RATE * defaults.TUNING_WIDTH / 32, rel=0.05
    )
    assert run.training is not None
    assert run.training.evaluation is not None
    assert run.training.evaluation.loss == pytest.approx(math.log(2), abs=0.02)
    assert run.samples[0][0].endswith("?")
    assert run.answers


def test_fine_tuning_on_preference_pairs_leaves_time_for_references() -> None:
    length = Length(seconds=10.0)
    chats, pairs = (chosen(length, kind=kind) for kind in ("chat", "preference"))
    # A forward pass over 110,000 tokens at 20,000 tokens/s takes about two seconds.
    assert 1.0 < pairs.least_seconds - chats.least_seconds < 3.0
    assert pairs.tokens < chats.tokens


def test_fine_tuning_reads_written_conversations_with_data_kind_chat(
    tmp_path: Path, model: Path
) -> None:
    texts = [f"User: What is {i}, and why is it {i}?\nAssistant: It is {i}." for i in range(40)]
    written = write_lines(tmp_path / "chats.jsonl", [{"text": text} for text in texts])
    (tmp_path / "chats.txt").write_text("\n<|endoftext|>\n".join(texts))

    def told(name: str, **changes: Any) -> str:
        lines: list[str] = []
        request = Request((str(tmp_path / name),), init_from=str(model), **changes)
        FineTuning(request, lines.append, progress=False)
        return "\n".join(lines)

    hint = "40 documents with turns of User: and Assistant:, treated as plain text; "
    assert hint in told("chats.jsonl")
    assert hint in told("chats.txt")
    for name in ("chats.jsonl", "chats.txt"):
        lines = told(name, overrides=(("data.kind", "chat"),))
        assert "36 conversations to train on, 4 held out; " in lines
    with pytest.raises(ConfigError, match="kind chat applies to fine-tuning only"):
        train_texts(written, steps=1, overrides={"data.kind": "chat"}, progress=False)


def test_conversations_in_treats_columns_as_conversation_unless_named_as_texts(
    tmp_path: Path,
) -> None:
    table = tmp_path / "a.csv"
    table.write_text("question,answer\na,b\n")
    beside = write_lines(tmp_path / "b.jsonl", [{"text": "t", "question": "a", "answer": "b"}])
    assert [one.name for one in conversations_in([str(table), str(beside)])] == [str(table)]
    assert conversations_in([str(table)], "answer") == []
    chats = [{"text": f"<s>[INST] {i} [/INST] b"} for i in range(6)]
    mostly = write_lines(tmp_path / "c.jsonl", [{"text": "t"}] * 4 + chats)
    assert [one.name for one in conversations_in([str(mostly)])] == [str(mostly)]


@pytest.mark.parametrize(
    "content, message",
    [
        ('[{"messages":\n', r"a\.json:2: not JSON: Expecting value"),
        ('[{"q": "a", "a": "b"}]', r"a\.json record 1: not a text, .*\(fields: q, a\)$"),
    ],
)
def test_fine_tuning_unusable_records_raise_without_suggesting_same_command(
    tmp_path: Path, content: str, message: str
) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(InputError, match=message) as caught:
        train_texts(tmp_path / "a.json", init_from="nowhere", progress=False)
    assert "--init-from" not in str(caught.value)


def test_fine_tuning_unsupported_options_fail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("a text\n")
    for option, reason in (
        (["--new-rows", "copy:a"], "--new-rows is only for recipes"),
        (["--plan", "auto"], "--plan is only for recipes"),
        (["--best"], "--best needs --init-from"),
    ):
        assert main(["train", "a.txt", *option]) == 2
        message = capsys.readouterr().err
        assert reason in message
        assert message.count("\n") == 1


def test_fine_tuning_plan_shows_settings_and_writes_nothing(
    tmp_path: Path,
    model: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine_module, "estimate", estimate)
    folder = tmp_path / "mixed"
    folder.mkdir()
    (tmp_path / "splits").mkdir()
    write_lines(folder / "a.jsonl", draw_records(60))
    (folder / "readme.md").write_text("a text\n")
    splits = write_lines(tmp_path / "splits" / "valid.jsonl", draw_records(3, seed=1)).parent
    write_lines(splits / "train.jsonl", draw_records(60))
    write_lines(splits / "test.jsonl", draw_records(3, seed=2))
    own = ["--init-from", str(model), "--plan-only", "--data.template", "alpaca"]
    assert main(["train", str(splits), *own]) == 0
    told = capsys.readouterr().err
    assert f"{splits / 'valid.jsonl'} validated on; {splits / 'test.jsonl'} excluded as" in told
    assert "60 conversations to train on, 3 held out" in told
    notes = tmp_path / "notes.txt"
    notes.write_text("User: a\nAssistant: b\n")
    assert main(["train", str(splits / "train.jsonl"), str(notes), *own]) == 0
    named = capsys.readouterr().err
    assert f"skipped 1 file without conversations: {notes}" in named
    arguments = ["train", str(folder), "--init-from", str(model), "--budget", "20m"]
    assert main([*arguments, "--plan-only", "--data.template", "alpaca"]) == 0
    shown = capsys.readouterr()
    rows = [line.split()[0] for line in shown.out.splitlines() if line.strip()]
    assert "template" in rows
    assert "data.template" not in rows
    assert "skipped 1 file without conversations" in shown.err
    assert "54 conversations to train on, 6 held out" in shown.err
    assert "all weights" in shown.out
    assert "10 epochs of the conversations" in shown.out
    assert len(re.findall(r"^expected: .* MiB for tensors, of .* GiB$", shown.out, re.M)) == 1
    needed = []
    for rows in (["--batch.micro_batch_size", "1"], []):
        assert main([*arguments, "--plan-only", "--json", *rows]) == 0
        needed.append(json.loads(capsys.readouterr().out)["memory_bytes"])
    assert needed[0] < needed[1]
    assert not Path("runs").exists()


@pytest.mark.parametrize("asynchronous", [pytest.param(False, marks=pytest.mark.slow), True])
def test_fine_tuning_plan_and_run_predict_measured_memory(
    tmp_path: Path,
    tokenizer: Tokenizer,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    asynchronous: bool,
) -> None:
    monkeypatch.setattr(machine_module, "estimate", estimate)
    large = write_model(
        tmp_path / "model",
        tokenizer,
        hidden_size=256,
        num_hidden_layers=2,
        tie_word_embeddings=True,
    )
    chats = write_lines(tmp_path / "chats.jsonl", draw_records(60))
    own = {
        "checkpoint.asynchronous": asynchronous,
        "checkpoint.every_steps": 1,
        "evaluation.max_rows": 1,
        "evaluation.sample_prompts": [],
        "batch.micro_batch_size": 1,
        "batch.global_batch_tokens": 640,
        "efficiency.precision": "fp32",
    }
    options = [word for key, value in own.items() for word in (f"--{key}", str(value).lower())]
    arguments = ["train", str(chats), "--init-from", str(large), "--steps", "2", *options]
    assert main([*arguments, "--plan-only", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)["memory_bytes"]
    with measured_memory() as measured:
        run = tuned(chats, large, overrides=own)
    found = json.loads((run.run_folder / FORECAST_NAME).read_text())["predicted"]
    assert found["peak_bytes"] == planned
    assert ("checkpoint_copy" in found["parts"]) is asynchronous
    resolved = resolve_for(load_recipe(run.run_folder / "recipe.yaml"), machine := find_machine())
    assert Estimator().estimate(Candidate(resolved, machine)).needed_bytes == planned
    assert planned == pytest.approx(measured.peak_bytes, rel=0.02)


def test_fine_tuning_input_named_twice_is_read_and_listed_once(tmp_path: Path, model: Path) -> None:
    folder = tmp_path / "chats"
    folder.mkdir()
    write_lines(folder / "a.jsonl", draw_records(40))
    (folder / "b.pdf").write_bytes(b"%PDF-1.4")
    lines: list[str] = []
    again = ["chats", str(folder), "./chats/a.jsonl"]
    request = Request(again, steps=2, init_from=str(model))
    work = FineTuning(request, lines.append, progress=False)
    assert lines[0].startswith(f"reading chats {folder} ./chats/a.jsonl: 1 file, ")
    assert lines[1] == "inputs that repeat an earlier one, read once: 1 of 3"
    assert lines[2] == "skipped 1 file without conversations: chats/b.pdf"
    assert work.plan(request).data["files"] == ["chats", "./chats/a.jsonl"]


def test_fine_tuning_on_pairs_ends_with_share_in_right_order(tmp_path: Path, model: Path) -> None:
    answers = {"chosen": "It is four.", "rejected": "No idea."}
    pairs = [{"prompt": f"What is {number}?", **answers} for number in range(40)]
    run = tuned(write_lines(tmp_path / "pairs.jsonl", pairs), model)
    assert run.reward_accuracy is not None
    first, *others = result_lines(run)
    assert first == (
        f"result: {run.reward_accuracy:.1%} of held-out preference pairs in the right order "
        "(relative to the starting model)"
    )
    assert any(line.startswith("model: runs/pairs; report: ") for line in others)


@pytest.mark.parametrize("kind", ["conversations", "texts"])
def test_fine_tuning_budget_too_short_fails_and_suggested_budget_works(
    tmp_path: Path,
    model: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    monkeypatch.setattr(machine_module, "timed_rate", lambda *_: 10.0)
    if kind == "texts":
        inputs = write_texts(tmp_path / "texts")
    else:
        inputs = write_lines(tmp_path / "chats.jsonl", draw_records(60))
    arguments = ["train", str(inputs), "--init-from", str(model), "--budget"]
    for more in ([], ["--plan-only"]):
        assert main([*arguments, "3m", *more]) == 2
        message = capsys.readouterr().err.splitlines()[-1]
        assert "the budget of 3 min is too short" in message
    assert not Path("runs").exists()
    named = re.search(r"use --budget (\d+m)$", message)
    assert named is not None
    assert main([*arguments, named[1], "--plan-only"]) == 0
    shown = capsys.readouterr().out
    assert "only before the first and after the last step" in shown
    assert "1 sample text per evaluation, " in shown


def test_fine_tuning_plan_counts_conversations_longer_than_context(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model's context is 320 tokens, and each of the long conversations has 2,739 tokens."""
    words = "one two three four " * 200
    long = [{"messages": say(f"question {number}", words)} for number in range(20)]
    mixed = write_lines(tmp_path / "mixed.jsonl", [*draw_records(80), *long])
    plan = ["train", str(mixed), "--init-from", str(model), "--budget", "20m", "--plan-only"]

    def planned(*options: str) -> str:
        assert main([*plan, *options]) == 0
        return capsys.readouterr().out

    lost = (
        r"^left out: (\d+) of (\d+) (training|held-out) conversations, longer than 320 tokens "
        r"\(--data\.long cut would keep their beginnings\)$"
    )
    found = re.findall(lost, planned(), re.M)
    assert [kind for *_, kind in found] == ["training", "held-out"]
    assert [sum(int(counts[place]) for counts in found) for place in (0, 1)] == [20, 100]
    count, total, _ = found[0]
    cut = f"\ncut: {count} of {total} training conversations, longer than 320 tokens\n"
    assert cut in f"\n{planned('--data.long', 'cut')}"
    assert re.search(r"^data\.seq_len +319  given$", planned("--data.seq_len", "319"), re.M)
    only = write_lines(tmp_path / "long.jsonl", long)
    assert main(["train", str(only), "--init-from", str(model), "--plan-only"]) == 1
    assert (
        "fits into data.seq_len 320: raise it (up to the model's context) or start from a model "
        "with a longer context, or set data.long to cut (train on their beginnings)"
    ) in capsys.readouterr().err


def test_row_of_fits_longest_conversation_or_nearly_all() -> None:
    assert row_of(CHATS, MODEL, {}).value == 256
    assert row_of(CHATS, MODEL, {"data.seq_len": 100}).value == 100
    long = dataclasses.replace(CHATS, longest=9000)
    assert row_of(long, MODEL, {}).value == 512
    assert row_of(long, MODEL, {}).reason == "99% of the conversations have at most 150 tokens"
    usual = dataclasses.replace(long, usual=900)
    assert row_of(usual, MODEL, {}) == Choice("data.seq_len", 512, "the model's context")
    wide = dataclasses.replace(MODEL, context=131_072)
    assert row_of(long, wide, {}).value == 2048
    assert row_of(dataclasses.replace(long, usual=3000), wide, {}).value == 4096
    assert row_of(TuningData("text", 5), wide, {}).value == 1024


def test_fine_tuning_few_conversations_use_more_epochs() -> None:
    assert chosen(Length(3600.0)).epochs == pytest.approx(3.0, rel=0.05)
    assert chosen(Length(3600.0))["schedule.epochs"] == 3.0
    assert chosen(Length(3600.0), count=250)["schedule.epochs"] == 6.0
    assert chosen(Length(3600.0), count=20)["schedule.epochs"] == 10.0
    given = chosen(Length(3600.0), fixed={"schedule.epochs": 1.0})
    assert (given.epochs, given["schedule.epochs"]) == (pytest.approx(1.0, rel=0.05), 1.0)
    short = chosen(Length(5.0))
    assert short["schedule.max_minutes"] == pytest.approx(5 / 60, abs=1e-3)
    assert chosen(Length(3600.0))["schedule.max_minutes"] == pytest.approx(60.0)
    assert short.epochs < 1.1
    assert chosen(Length(steps=7))["schedule.max_steps"] == 7


def test_fine_tuning_on_gpu_with_slow_kernel_launches_fills_budget() -> None:
    """A step takes half a second regardless of its size: 57 steps with the usual batch fit in 30
    seconds.
    """
    slow = dataclasses.replace(MACHINE, kind="cuda", rates=[(9e6, 1e6)], steps=[(9e6, 0.5)])
    row = row_of(CHATS, MODEL, {})

    def run(machine: MachineFacts) -> Choices:
        texts = dataclasses.replace(CHATS, count=1_000_000)
        facts = TuningFacts(texts, MODEL, FULL, machine, 1e9, 10_000.0, row)
        return choose_tuning(facts, Length(30.0), {})

    fast, found = run(dataclasses.replace(slow, steps=[])), run(slow)
    assert found["batch.global_batch_tokens"] == fast["batch.global_batch_tokens"]
    assert 50 < found.steps < 60 < fast.steps
    assert found.seconds == pytest.approx(30.0, rel=0.05)


@pytest.mark.parametrize(
    ("width", "rate"), [(64, 2.4e-3), (320, 2.4e-3), (640, 1.2e-3), (1280, 6e-4)]
)
def test_fine_tuning_learning_rate_of_young_models_on_text(width: int, rate: float) -> None:
    def found(**options: Any) -> float:
        return defaults.finetuning_rate("adamw", width, **{"given": {}, "text": True, **options})

    assert found(adapters=False, young=True) == rate
    assert found(adapters=True, young=True) == pytest.approx(3 * found(adapters=True), rel=0.05)
    assert found(adapters=True, young=True, text=False) == found(adapters=True)
    assert found(given={"learning_rate": 0.1}, adapters=False, young=True) == 0.1


def test_fine_tuning_only_models_of_few_tokens_are_young(
    tmp_path: Path, data: Path, model: Path
) -> None:
    recipe: dict[str, Any] = {
        "run": {"dir": str(tmp_path / "run")},
        "data": {"dir": str(data), "seq_len": 32},
        "batch": {"micro_batch_size": 4},
        "schedule": {"max_steps": 4, "warmup_steps": 0},
        "evaluation": {"every_steps": 0},
    }
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    result = train(recipe | {"model": small})

    def start(folder: Path) -> StartingModel:
        return starting_model(folder, read_config(folder))

    found = start(result.checkpoint)
    assert found.tokens == result.tokens_seen == 4 * 4 * 32
    assert found.is_young
    assert not dataclasses.replace(found, tokens=20 * found.parameters).is_young
    assert start(model).tokens is None
    assert not start(model).is_young
    # How many tokens the model was trained on before is unknown.
    tuned_run = train(recipe | {"run": {"dir": str(tmp_path / "tuned")}}, init_from=model)
    assert start(tuned_run.checkpoint).tokens is None
    # A checkpoint of an earlier version.
    state = json.loads((tuned_run.checkpoint / STATE_NAME).read_text())
    del state["initial_tokens"]
    (tuned_run.checkpoint / STATE_NAME).write_text(json.dumps(state))
    assert tokens_read(tuned_run.checkpoint) is None
    for kind, tokens, rate in (("text", None, 5.3e-4), ("text", 1, 2.4e-3), ("chat", 1, 1.6e-3)):
        model_facts = dataclasses.replace(MODEL, tokens=tokens)
        found_rate = chosen(Length(60.0), model=model_facts, kind=kind)["optimizer.learning_rate"]
        assert found_rate == rate


def test_number_of_tokens_read_travels_with_exports_and_fine_tuned_models(
    tmp_path: Path, data: Path
) -> None:
    def trained(name: str, start: Path | None = None, **changes: Any) -> Path:
        recipe = {
            "run": {"dir": str(tmp_path / name)},
            "data": {"dir": str(data), "seq_len": 32},
            "batch": {"micro_batch_size": 4},
            "schedule": {"max_steps": 4, "warmup_steps": 0},
            "evaluation": {"every_steps": 0},
        }
        return train(recipe | changes, init_from=start).checkpoint

    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
             "max_position_embeddings": 64}  # fmt: skip
    average = {"average_last": 2, "every_steps": 2}
    first, own = trained("first", model=shape, checkpoint=average), 4 * 4 * 32
    assert tokens_read(first) == tokens_read(tmp_path / "first" / "averaged") == own
    # Someone copies the files that transformers reads.
    shutil.copytree(first, tmp_path / "copy", ignore=shutil.ignore_patterns("trainer_state.json"))
    assert tokens_read(tmp_path / "copy") == own
    exported = convert(first, tmp_path / "hf").out
    assert tokens_read(exported) == own
    file = convert(exported, tmp_path / "gguf", to="gguf").file
    assert file is not None
    assert tokens_read(find_model_folder(file)) == own
    second = trained("second", exported)
    assert tokens_read(second) == 2 * own
    adapter = trained("adapter", second, lora={"rank": 2})
    assert tokens_read(adapter) == 3 * own
    assert tokens_read(convert(adapter, tmp_path / "merged").out) == 3 * own
    # A copy of the adapter without its state counts what its base has read.
    (adapter / STATE_NAME).unlink()
    assert tokens_read(adapter) == 2 * own
    schedule = {"max_steps": 6, "warmup_steps": 0, "resume": True}
    assert tokens_read(trained("longer", second, schedule=schedule)) == 2 * own + 2 * 4 * 32


@pytest.mark.parametrize("count", [True, -1, "5", 1.5])
def test_damaged_number_of_tokens_read_is_unknown(model: Path, count: Any) -> None:
    content = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(content | {TOKENS_KEY: count}))
    assert tokens_read(model) is None


def test_fine_tuning_learning_rate_follows_width_and_method() -> None:
    full = chosen(Length(60.0))["optimizer.learning_rate"]
    assert full == pytest.approx(1.7e-5 * 2000 / 64, rel=0.05)
    adapters = chosen(Length(60.0), Method(adapters=True))
    assert adapters["optimizer.learning_rate"] == pytest.approx(
        5e-4 * (2000 / 64) ** 0.781, rel=0.05
    )
    assert adapters["lora.rank"] == defaults.ADAPTER_RANK
    lion = chosen(Length(60.0), fixed={"optimizer.name": "lion"})
    assert lion["optimizer.learning_rate"] == pytest.approx(full / 5, rel=0.05)
    with pytest.raises(ConfigError, match=r"no default learning rate .* sgd: set --optimizer"):
        chosen(Length(60.0), fixed={"optimizer.name": "sgd"})
    own = {"optimizer.name": "sgd", "optimizer.learning_rate": 0.1}
    assert chosen(Length(60.0), fixed=own)["optimizer.learning_rate"] == 0.1
    values = adapters.values | {"data": {"kind": "chat", "files": ["a"], "seq_len": 256}}
    parse_recipe(values)


@pytest.mark.parametrize("kind", ["constant", "cosine", "inverse_sqrt"])
def test_fine_tuning_other_schedule_kind_gets_only_keys_that_apply_to_it(kind: str) -> None:
    values = chosen(Length(steps=100), fixed={"schedule.kind": kind}).values["schedule"]
    assert ScheduleConfig(**values).kind == kind
    assert ("min_lr_ratio" in values) is (kind != "constant")

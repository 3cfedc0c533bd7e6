"""Tests of `train_texts` with a text that the model should not forget: the control set, --keep and
the last line.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from tokenizers import Tokenizer as HFTokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from builders import draw_records, make_texts, write_lines, write_model, write_texts
from firstlight.data.corpus import TokenDataset
from firstlight.data.prepare import prepare
from firstlight.errors import ConfigError, FirstlightError, InputError, ModelError
from firstlight.finetuning.kept import own_texts
from firstlight.from_texts import machine as machine_module
from firstlight.from_texts.result import TextRun, result_lines
from firstlight.from_texts.run import train_texts
from firstlight.from_texts.run_folder import RunCall
from firstlight.planner.plan.estimate import Estimate
from firstlight.run_log.reader import read_json_lines
from firstlight.tokenizer import Tokenizer, train_tokenizer

pytestmark = pytest.mark.usefixtures("forked_processes")


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
    options: dict[str, Any] = {"steps": 20, "overrides": {"evaluation.sample_tokens": 4}}
    return train_texts(inputs, **{"init_from": model, "progress": False, **options, **changes})


def evaluated(run: TextRun) -> list[int]:
    metrics = read_json_lines(run.run_folder / "metrics.jsonl")
    return [line["step"] for line in metrics if "kept/bits_per_byte" in line]


def test_control_set_has_prose_code_and_texts_of_the_model(tmp_path: Path, model: Path) -> None:
    run = tuned(write_texts(tmp_path / "new"), model)
    control = run.run_folder / "control.jsonl"
    texts = [json.loads(line)["text"] for line in control.read_text().splitlines()]
    assert any(text.startswith('The "') for text in texts)
    assert any("\nimport " in text and "\ndef " in text for text in texts)
    own = list(own_texts(model))
    assert len(set(own)) == len(own) > 16
    assert texts[-len(own) :] == own
    splits = json.loads((run.run_folder / "kept" / "manifest.json").read_text())["splits"]
    size = sum(split["text_bytes"] for split in splits.values())
    assert size == sum(len(text.encode()) for text in set(texts))
    assert 0.05 < splits["val"]["text_bytes"] / size < 0.3
    held = TokenDataset(run.run_folder / "kept", "val")
    assert held.num_documents > len(own) / 4
    # The evaluation after a tenth of the run chooses the share.
    assert evaluated(run)[:2] == [0, 3]
    recipe = yaml.safe_load((run.run_folder / "recipe.yaml").read_text())
    assert recipe["data"]["replay"] is None
    *_, blank, last = result_lines(run)
    assert blank == ""
    assert run.kept is not None
    assert last == str(run.kept)
    assert last.startswith("new text: ")


def test_control_set_has_no_code_of_the_new_text(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("firstlight.finetuning.kept._code", lambda: pytest.fail("is the new text"))
    run = tuned("stdlib", model, steps=2, overrides={"data.seq_len": 64})
    assert evaluated(run)[0] == 0


def test_kept_text_is_read_like_the_new_text(tmp_path: Path, model: Path) -> None:
    for name, seed in (("new", 1), ("old", 2)):
        texts = make_texts(60, seed)
        write_lines(tmp_path / f"{name}.jsonl", [{"body": text} for text in texts])
    run = tuned(tmp_path / "new.jsonl", model, keep=tmp_path / "old.jsonl", text_key="body")
    assert evaluated(run)[0] == 0


@pytest.mark.parametrize("kind", ["same", "copy", "prepared", "short"])
def test_unsuitable_kept_text_is_refused_and_corrected_command_works(
    tmp_path: Path, model: Path, tokenizer: Tokenizer, kind: str
) -> None:
    new, old = write_texts(tmp_path / "new"), write_texts(tmp_path / "old", words=140)
    shutil.copytree(new, tmp_path / "copy")
    (tmp_path / "short").write_text("a few words that are kept\n")
    prepare([new], tokenizer, tmp_path / "prepared")
    keep = new if kind == "same" else tmp_path / kind
    message = rf"--keep {keep} is the new text: keep text that the model already knows, or omit"
    if kind == "short":
        message = "add text to --keep"
    with pytest.raises(FirstlightError, match=message):
        tuned(new, model, keep=keep, run_dir="run")
    assert Path("run").exists() is (kind == "prepared")
    run = tuned(new, model, keep=old, run_dir="run")
    assert run.run_folder == Path("run")
    assert evaluated(run)[0] == 0


# The files have changed, or the run has no checkpoint, or another model is named.
@pytest.mark.parametrize("change", [None, "text", "checkpoint", "other"])
def test_stopped_run_is_resumed_without_its_initial_model(
    tmp_path: Path, model: Path, change: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    new, old = write_texts(tmp_path / "new"), write_texts(tmp_path / "old", words=140)
    stop = {"run.max_minutes": 1e-9, "evaluation.sample_tokens": 4}
    first = tuned(new, model, keep=old, overrides=stop)
    recipe = first.run_folder / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("max_minutes: 1.0e-09", "max_minutes: null"))
    shutil.move(model, tmp_path / "away")
    options: dict[str, Any] = {"resume": True, "steps": None, "overrides": {}, "progress": True}
    if change is None:
        again = tuned(new, model, **options, init_from=None)
        assert again.training is not None
        assert (again.run_folder, again.training.step) == (first.run_folder, 20)
        said = f"{model} can't be read: the run continues from its own checkpoint\n"
        assert said in capsys.readouterr().err
        # The run is complete.
        assert tuned(new, model, **options).training is None
        return
    if change == "text":
        next(new.iterdir()).write_text("other words\n" * 100)
    if change == "checkpoint":
        shutil.rmtree(first.run_folder / "checkpoints")
    start = tmp_path / "typo" if change == "other" else model
    with pytest.raises(ModelError, match=f"{start} does not exist"):
        tuned(new, start, **options)
    assert "continues from" not in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["files", "corpus", "run"])
def test_keep_takes_files_a_corpus_and_a_run(
    tmp_path: Path, model: Path, tokenizer: Tokenizer, kind: str
) -> None:
    old = write_lines(tmp_path / "old.jsonl", [{"text": text} for text in make_texts(60, 3)])
    prepare([old], tokenizer, tmp_path / "before" / "data")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text(f"data: {{dir: {tmp_path / 'before' / 'data'}}}")
    place = {"files": old, "corpus": tmp_path / "before" / "data", "run": tmp_path / "run"}[kind]
    run = tuned(write_texts(tmp_path / "new"), model, keep=place, replay=0.25)
    recipe = yaml.safe_load((run.run_folder / "recipe.yaml").read_text())
    found = Path(recipe["data"]["keep"])
    assert found == (run.run_folder / "kept" if kind == "files" else tmp_path / "before" / "data")
    manifests = [json.loads((one / "manifest.json").read_text()) for one in
                 (found, tmp_path / "before" / "data")]  # fmt: skip
    assert manifests[0]["splits"] == manifests[1]["splits"]
    assert not (run.run_folder / "control.jsonl").exists()
    last = read_json_lines(run.run_folder / "metrics.jsonl")[-1]
    assert last["epoch/kept"] > 0
    longer = next(command for command, purpose in run.next_commands if "longer" in purpose)
    assert f"--replay 0.25 --init-from {model} --keep {place}" in longer
    # A second call finds the same run; other kept text starts another one.
    bare: dict[str, Any] = {"resume": True, "steps": None, "overrides": {}}
    for options in ({"keep": place, "replay": 0.25}, bare, bare | {"init_from": None}):
        again = tuned(tmp_path / "new", model, **options)
        assert (again.run_folder, again.training) == (run.run_folder, None)
        assert again.kept == run.kept
    assert tuned(tmp_path / "new", model, replay=0.25).run_folder != run.run_folder


def test_conversations_are_mixed_with_kept_text_only_if_asked(tmp_path: Path, model: Path) -> None:
    chats = write_lines(tmp_path / "chats.jsonl", draw_records(60))
    old = write_texts(tmp_path / "old")
    shares = []
    for changes in ({}, {"keep": old}, {"keep": old, "replay": 0.05}, {"replay": 0.1}):
        run = tuned(chats, model, **changes)
        assert evaluated(run)[0] == 0
        shares.append(
            yaml.safe_load((run.run_folder / "recipe.yaml").read_text())["data"]["replay"]
        )
    assert shares == [0.0, None, 0.05, 0.1]


def test_resumed_call_keeps_control_set(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class StoppedError(Exception):
        pass

    def stop(record: Any) -> None:
        if record["step"] == 9:
            raise StoppedError

    new = write_texts(tmp_path / "new")
    whole = tuned(new, model)
    shutil.move(whole.run_folder, tmp_path / "whole")
    with pytest.raises(StoppedError):
        tuned(new, model, on_step=stop)
    text = (whole.run_folder / "control.jsonl").read_bytes()
    monkeypatch.setattr("firstlight.finetuning.kept.own_texts", lambda *_: pytest.fail("again"))
    again = tuned(new, model)
    assert again.run_folder == whole.run_folder
    assert (whole.run_folder / "control.jsonl").read_bytes() == text
    shutil.move(again.run_folder / "kept", tmp_path / "away")
    monkeypatch.setattr(RunCall, "remember", lambda *_, **__: None)
    state = json.loads((again.run_folder / "pipeline.json").read_text()) | {"complete": False}
    (again.run_folder / "pipeline.json").write_text(json.dumps(state))
    with pytest.raises(ConfigError, match="its shards in runs/new/kept were deleted; restore"):
        tuned(new, model)
    weights = [
        next(folder.glob("checkpoints/step-00000020/model.safetensors")).read_bytes()
        for folder in (tmp_path / "whole", again.run_folder)
    ]
    assert weights[0] == weights[1]


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"keep": "nowhere"}, InputError, "--keep nowhere: nowhere does not exist"),
        ({"keep": "other"}, ConfigError, "--keep other was prepared with a different tokenizer"),
        ({"keep": ["good", "texts"]}, ConfigError, "good is a prepared corpus: use it as the only"),
        ({"keep": "chats"}, ConfigError, "chats is a run whose data is not a prepared corpus"),
        ({"keep": "empty"}, InputError, "--keep empty: folder empty contains no text files"),
        (
            {"keep": "one"},
            InputError,
            "only 0 tokens of the kept text can be held",
        ),
        ({"keep": "few"}, InputError, r"only \d+ tokens of the kept text can be held out"),
        ({"keep": "short.txt"}, InputError, r"only \d tokens of the kept text can be held out"),
        ({"keep": "none.txt"}, InputError, r"--keep none\.txt: the corpus is empty"),
        ({"replay": 10}, ConfigError, r"--replay is a share such as 0\.1 for 10%, not 10"),
        ({"overrides": {"data.keep": "good"}}, ConfigError, "omit --data.keep .*: use --keep"),
    ],
)
def test_wrong_kept_text_is_refused_before_the_run(
    tmp_path: Path, model: Path, tokenizer: Tokenizer, texts: list[str], changes: dict[str, Any],
    error: type[FirstlightError], message: str,
) -> None:  # fmt: skip
    new = write_texts(tmp_path / "new")
    write_texts(tmp_path / "texts")
    (tmp_path / "empty").mkdir()
    # A manifest of another program does not make a folder a prepared corpus.
    (tmp_path / "empty" / "manifest.json").write_text('{"name": "an app"}')
    (tmp_path / "chats").mkdir()
    (tmp_path / "chats" / "recipe.yaml").write_text("data: {files: [chats.jsonl]}")
    prepare([tmp_path / "texts"], train_tokenizer(texts, 300), tmp_path / "other")
    prepare([tmp_path / "texts"], tokenizer, tmp_path / "good")
    prepare([tmp_path / "texts"], tokenizer, tmp_path / "one", val_fraction=0.0)
    write_lines(tmp_path / "few.jsonl", [{"text": f"word {number}"} for number in range(20)])
    prepare([tmp_path / "few.jsonl"], tokenizer, tmp_path / "few", val_fraction=0.1)
    (tmp_path / "none.txt").write_text("")
    (tmp_path / "short.txt").write_text("a few words that are kept\n")
    with pytest.raises(error, match=message) as raised:
        tuned(new, model, **changes)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "runs" / "new" / "recipe.yaml").exists()


def test_kept_text_that_the_tokenizer_cannot_encode_is_refused(tmp_path: Path) -> None:
    """A tokenizer of words without an unknown token, as some models have."""
    backend = HFTokenizer(WordLevel({"a": 0, "b": 1, "<|endoftext|>": 2}, unk_token=None))
    backend.pre_tokenizer = Whitespace()
    backend.save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    folder = write_model(tmp_path / "model", Tokenizer.from_pretrained(tmp_path))
    (tmp_path / "new.txt").write_text("a b b a " * 4000)
    (tmp_path / "old.txt").write_text("a b c " * 4000)
    with pytest.raises(
        FirstlightError, match=r"--keep .*old\.txt: the tokenizer can't encode"
    ) as raised:
        tuned(tmp_path / "new.txt", folder, keep=tmp_path / "old.txt")
    assert "\n" not in str(raised.value)
    # The control set leaves out what the tokenizer can't encode.
    run = tuned(tmp_path / "new.txt", folder)
    control = (run.run_folder / "control.jsonl").read_text()
    assert "import" not in control
    assert evaluated(run)[0] == 0


def test_keep_without_model_is_refused(tmp_path: Path) -> None:
    new = write_texts(tmp_path / "new")
    for changes in ({"keep": "old"}, {"replay": 0.1}):
        with pytest.raises(ConfigError, match="--keep and --replay apply to fine-tuning only"):
            train_texts(new, steps=1, progress=False, **changes)

"""The command line as people and programs use it."""

from __future__ import annotations

import atexit
import gc
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from firstlight.cli.main import main
from firstlight.data.prepare import prepare
from firstlight.planner.plan.processes import RunForecaster
from firstlight.recipe import known_keys
from firstlight.tokenizer import Tokenizer, train_tokenizer
from firstlight.training.run import Run as TrainingRun
from forked import can_fork, different_variables

pytestmark = pytest.mark.usefixtures("forked_processes")


def firstlight(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[bytes]:
    """`python -m firstlight ARGUMENTS...` in a process of its own."""
    command = [sys.executable, "-m", "firstlight", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, **options)


@dataclass(frozen=True)
class Answer:
    """What a command left behind."""

    exit_code: int
    out: str
    err: str


Run = Callable[..., Answer]


@pytest.fixture
def run(capfdbinary: pytest.CaptureFixture[bytes]) -> Run:
    """Run a command in this process, which spares the import of torch."""

    def run_here(*arguments: str | Path) -> Answer:
        capfdbinary.readouterr()
        exit_code = main([*map(str, arguments)])
        out, err = capfdbinary.readouterr()
        return Answer(exit_code, out.decode("utf-8"), err.decode("utf-8"))

    return run_here


def one_object(out: str) -> dict[str, Any]:
    """The one JSON object, on one line, that is all there is on stdout."""
    assert out.endswith("\n")
    assert out.count("\n") == 1
    result = json.loads(out)
    assert isinstance(result, dict)
    return result


_MODEL = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def write_recipe(path: Path, **sections: dict[str, Any]) -> Path:
    recipe: dict[str, Any] = {
        "run": {"dir": str(path.with_suffix("")), "device": "cpu"},
        "model": _MODEL,
        "data": {"dir": "data", "seq_len": 32},
        "batch": {"micro_batch_size": 4},
        "schedule": {"max_steps": 6, "warmup_steps": 2},
        "evaluation": {"every_steps": 3, "max_rows": 4, "sample_tokens": 4},
        "checkpoint": {"every_steps": 3},
    }
    for section, values in sections.items():
        recipe[section] = {**recipe.get(section, {}), **values}
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """A folder in which the whole pipeline ran, each verb in a process of its own.

    The terminal of `generate` says that it knows ASCII only: what goes to stdout is UTF-8 all the
    same.
    """
    folder = tmp_path_factory.mktemp("pipeline")
    write_recipe(folder / "run.yaml", run={"dir": "run"})

    def verb(*arguments: str | Path, **variables: str) -> str:
        done = firstlight(*arguments, cwd=folder, env={**os.environ, **variables})
        assert done.returncode == 0, done.stderr
        assert b"Traceback" not in done.stderr
        assert b"Warning" not in done.stderr
        (folder / f"{arguments[0]}.err").write_bytes(done.stderr)
        (folder / f"{arguments[0]}.out").write_bytes(done.stdout)
        return done.stdout.decode("utf-8")

    assert verb("tokenizer", "train", corpus, "--vocab-size", "320", "--out", "tok")
    assert verb("prepare", corpus, "--tokenizer", "tok", "--out", "data")
    assert verb("train", "run.yaml", "--optimizer.learning_rate", "3e-3")
    assert verb("eval", "run")
    assert verb("info", "run")
    verb("generate", "run", "--prompt", "日本 🙂 the", "--seed", "7", PYTHONIOENCODING="ascii")
    return folder


# --- the pipeline, for people ----------------------------------------------------------------


def test_cli_every_pipeline_command_reports_its_output(trained: Path) -> None:
    said = {path.stem: path.read_text(encoding="utf-8") for path in trained.glob("*.out")}
    beside = {path.stem: path.read_text(encoding="utf-8") for path in trained.glob("*.err")}
    assert said["tokenizer"].startswith("tok: 320 tokens from 120 documents, ")
    assert "data: train: " in said["prepare"]
    assert "data: val: " in said["prepare"]
    assert "step 6/6  loss " in beside["train"]
    # Progress is no result, and a result that goes into a file is plain text.
    assert "step 6/6" not in said["train"]
    assert {beside[verb] for verb in ("tokenizer", "prepare", "info", "eval")} == {""}
    assert not [verb for verb, text in said.items() if "\x1b" in text]
    assert "checkpoint     run/checkpoints/step-00000006\n" in said["train"]
    assert "val/loss       " in said["train"]
    assert re.search(r"^bits per byte  \d\.\d{4} of held-out text", said["train"], re.M)
    commands = [line.split()[:3] for line in said["train"].splitlines()[-3:]]
    assert commands == [["firstlight", verb, "run"] for verb in ("generate", "chat", "serve")]
    assert "bits per byte  " in said["eval"]
    assert "gzip -9        " in said["eval"]
    assert "parameters " in said["info"]
    assert sorted(path.name for path in (trained / "run" / "checkpoints").iterdir()) == [
        "step-00000003",
        "step-00000006",
    ]
    assert not list(trained.rglob(".tmp-*"))


def test_cli_generate_prints_only_prompt_and_continuation(trained: Path, run: Run) -> None:
    written = (trained / "generate.out").read_text(encoding="utf-8")
    answer = run("generate", trained / "run", "--prompt", "日本 🙂 the", "--seed", "7", "--json")
    result = one_object(answer.out)
    assert written == result["prompt"] + result["text"]
    assert written.startswith("日本 🙂 the")


# --- the pipeline, for programs --------------------------------------------------------------


def test_cli_every_command_prints_one_json_object(
    trained: Path, corpus: Path, tmp_path: Path, run: Run
) -> None:
    tok, data = tmp_path / "tok", tmp_path / "data"
    answer = run("tokenizer", "train", corpus, "--vocab-size", "320", "--out", tok, "--json")
    result = one_object(answer.out)
    assert result["vocab_size"] == 320
    assert result["documents"] == 120
    fingerprint = Tokenizer.from_pretrained(tok).fingerprint
    assert result["tokenizer_sha256"] == fingerprint

    answer = run("prepare", corpus, "--tokenizer", tok, "--out", data, "--json")
    result = one_object(answer.out)
    assert result == {"out": str(data), **json.loads((data / "manifest.json").read_text("utf-8"))}
    assert result["documents"] == {"read": 120, "written": 120, "rejected": {}}

    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"text": "a good line"}\n' + '{"no": 1}\n' * 7, encoding="utf-8")
    answer = run("prepare", lines, "--tokenizer", tok, "--out", tmp_path / "few", "--json")
    assert one_object(answer.out)["documents"]["rejected"] == {"no_text": 7}
    assert answer.err.count("lines.jsonl:") == 5
    assert "for all of them" in answer.err

    recipe = write_recipe(tmp_path / "run.yaml", data={"dir": str(data)})
    answer = run("train", recipe, "--json")
    result = one_object(answer.out)
    assert result["step"] == 6
    assert result["tokens_seen"] == 6 * 4 * 32
    assert result["evaluation"]["rows"] == 4
    checkpoint = result["checkpoint"]
    assert checkpoint == str(tmp_path / "run" / "checkpoints" / "step-00000006")

    answer = run("eval", tmp_path / "run", "--json")
    evaluated = one_object(answer.out)
    assert evaluated["split"] == "val"
    assert evaluated["rows"] == evaluated["total_rows"]
    assert 4 < evaluated["loss"] < 6.5
    assert evaluated["gzip_bits_per_byte"] > 1

    answer = run("generate", tmp_path / "run", "--prompt", "the", "--seed", "3", "--json")
    result = one_object(answer.out)
    assert result["seed"] == 3
    assert result["prompt"] == "the"
    at_limit = len(result["token_ids"]) == 64 - result["prompt_tokens"]
    assert result["finish_reason"] == ("length" if at_limit else "stop")

    answer = run("info", tmp_path / "run", "--json")
    result = one_object(answer.out)
    assert result["folder"] == checkpoint
    assert result["tokenizer"]["sha256"] == fingerprint
    assert result["config"]["vocab_size"] == 320
    assert result["trained_on"]["dir"] == str(data.resolve())

    result = one_object(run("info", "--json").out)
    assert result["cpus"] == os.cpu_count()


def test_cli_accepts_run_checkpoint_and_model_folder_alike(
    trained: Path, tmp_path: Path, run: Run
) -> None:
    checkpoint = trained / "run" / "checkpoints" / "step-00000006"
    plain = tmp_path / "model"
    plain.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(checkpoint / name, plain)
    found = set()
    for folder in (trained / "run", checkpoint, plain):
        answer = run("eval", folder, "--data", trained / "data", "--seq-len", "32", "--json")
        found.add(one_object(answer.out)["loss"])
    assert len(found) == 1


def test_cli_extend_accepts_tokenizer_of_run(trained: Path, tmp_path: Path, run: Run) -> None:
    answer = run(
        "tokenizer", "extend", trained / "run", "--add", "<|new|>", "--out", tmp_path / "t"
    )
    assert answer.exit_code == 0, answer.err
    assert f"firstlight train --init-from {trained / 'run'}" in answer.err
    before = Tokenizer.from_pretrained(trained / "tok")
    assert Tokenizer.from_pretrained(tmp_path / "t").special_tokens["<|new|>"] == before.vocab_size


def test_cli_train_resumes_and_starts_from_weights(trained: Path, tmp_path: Path, run: Run) -> None:
    shutil.copytree(trained / "run", tmp_path / "run")
    recipe = write_recipe(
        tmp_path / "run.yaml", data={"dir": str(trained / "data")}, schedule={"max_steps": 8}
    )
    answer = run("train", recipe, "--resume", "--json")
    assert one_object(answer.out)["step"] == 8
    assert "(step 6)" in answer.err
    other = ("--run.dir", tmp_path / "other", "--init-from", trained / "run")
    assert one_object(run("train", recipe, *other, "--json").out)["step"] == 8


def test_cli_run_is_planned_tried_and_compared_with_forecast(
    trained: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("firstlight.planner.plan.processes.RunForecaster", RunForecaster)
    recipe = write_recipe(
        tmp_path / "run.yaml",
        data={"dir": str(trained / "data")},
        model={"hidden_size": 512},
        schedule={"max_steps": 2},
        evaluation={"max_rows": 1, "sample_tokens": 1},
        efficiency={"precision": "fp32", "compile": False},
    )
    answer = run("train", recipe, "--plan", "auto")
    assert answer.exit_code == 0, answer.err
    assert "plan: as it stands, micro-batch of 4 rows; peak memory predicted" in answer.err
    found = json.loads((tmp_path / "run" / "forecast.json").read_text())
    parts = found["predicted"]["parts"]
    assert parts["optimizer_states"] > 2**25
    assert found["measured"]["process_bytes"] > parts["weights"] + parts["optimizer_states"]


# --- generate --------------------------------------------------------------------------------


def test_cli_generate_temperature_zero_repeats_text(trained: Path, run: Run) -> None:
    found = {
        run("generate", trained / "run", "--prompt", "the", "--temperature", "0", *seed).out
        for seed in ((), ("--seed", "1"), ("--seed", "2"))
    }
    assert len(found) == 1


def test_cli_generate_same_seed_repeats_text(trained: Path, run: Run) -> None:
    def text(*options: str) -> str:
        return run(
            "generate", trained / "run", "--prompt", "the", "--temperature", "1", *options
        ).out

    assert text("--seed", "1") == text("--seed", "1")
    assert text("--seed", "1") != text("--seed", "2")
    assert text() != text()
    drawn = one_object(text("--json"))
    assert text("--seed", str(drawn["seed"])) == drawn["prompt"] + drawn["text"]


def test_cli_eval_document_masking_option_changes_loss(trained: Path, run: Run) -> None:
    def loss(*options: str) -> float:
        place = ("--data", trained / "data", "--seq-len", "64", "--json")
        value = one_object(run("eval", trained / "run", *place, *options).out)["loss"]
        assert isinstance(value, float)
        return value

    assert loss() == loss("--no-document-masking")
    assert loss() != loss("--document-masking")


def test_cli_generate_adds_newline_only_in_terminal(
    trained: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("generate", trained / "run", "--prompt", "the", "--temperature", "0")
    plain = run(*arguments).out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert run(*arguments).out == plain + "\n"


def without_an_end(trained: Path, folder: Path) -> Path:
    """The trained model with an end token that there is not: only limits end a text."""
    checkpoint = trained / "run" / "checkpoints" / "step-00000006"
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(checkpoint / name, folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": 5000}')
    return folder


def test_cli_generate_empty_prompt_starts_from_nothing(
    trained: Path, tmp_path: Path, run: Run
) -> None:
    model = without_an_end(trained, tmp_path)
    result = one_object(
        run("generate", model, "--prompt", "", "--max-new-tokens", "5", "--json").out
    )
    assert (result["prompt"], result["prompt_tokens"]) == ("", 1)
    assert len(result["token_ids"]) == 5


def test_cli_generate_stop_texts_end_text_and_logprobs_are_reported(
    trained: Path, tmp_path: Path, run: Run
) -> None:
    model = without_an_end(trained, tmp_path)
    options = ("--prompt", "the", "--temperature", "0", "--max-new-tokens", "20", "--json")
    whole = one_object(run("generate", model, *options, "--logprobs", "2").out)
    assert whole["finish_reason"] == "length"
    assert [one["token_id"] for one in whole["logprobs"]] == whole["token_ids"]
    assert all(one["logprob"] == one["top"][0][1] for one in whole["logprobs"])
    end = whole["text"][3:5]
    ended = one_object(run("generate", model, *options, "--stop", "no", "--stop", end).out)
    assert ended["finish_reason"] == "stop"
    assert ended["text"] == whole["text"][: whole["text"].find(end)]
    assert ended["logprobs"] is None
    refused = run("generate", model, "--prompt", "the", "--logprobs", "2")
    assert refused.exit_code == 2
    assert "--logprobs needs --json: add it" in refused.err
    other = ("--repetition-penalty", "5", "--min-p", "0.5")
    assert one_object(run("generate", model, *options, *other).out)["text"] != whole["text"]
    biased = one_object(run("generate", model, *options, "--logit-bias", "7=100").out)
    assert set(biased["token_ids"]) == {7}
    varied = ("--frequency-penalty", "2", "--presence-penalty", "2")
    found = one_object(run("generate", model, *options, "--logit-bias", "7=3", *varied).out)
    assert found["token_ids"] != whole["token_ids"]


def test_cli_generate_full_context_is_reported(trained: Path, tmp_path: Path, run: Run) -> None:
    arguments = ("generate", without_an_end(trained, tmp_path), "--prompt", "the")
    full = "the model's context of 64 tokens is full: add --slide to continue beyond it\n"
    assert run(*arguments).err == full
    assert run(*arguments, "--beams", "2").err == full.replace(
        "add --slide to continue beyond it", "beam search ends there"
    )
    assert run(*arguments, "--max-new-tokens", "3").err == ""


def test_cli_closed_stdout_reader_prints_no_error(trained: Path) -> None:
    command = [sys.executable, "-m", "firstlight", "generate", str(trained / "run")]
    process = subprocess.Popen(
        [*command, "--prompt", "the"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    with process.stderr:
        assert process.stderr.read() == b""
    assert process.wait() == 1


def test_cli_closed_stdout_reader_does_not_stop_work(trained: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "firstlight", "report", str(trained / "run")]
    read, write = os.pipe()
    os.close(read)
    page = tmp_path / "page.html"
    done = subprocess.run([*command, "--out", page], stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")
    assert page.is_file()


# --- errors ----------------------------------------------------------------------------------


def listing(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def failure(run: Run, folder: Path, *arguments: str | Path) -> str:
    """A command fails with one line, as itself and with --json, and leaves nothing behind."""
    before = listing(folder)
    messages = []
    for json_option in ((), ("--json",)):
        answer = run(*arguments, *json_option)
        assert answer.exit_code not in (0, None)
        assert "Traceback" not in answer.err
        errors = [line for line in answer.err.splitlines() if line.startswith("firstlight: error:")]
        assert len(errors) == 1, answer.err
        assert answer.err.endswith(errors[0] + "\n")
        messages.append(errors[0].removeprefix("firstlight: error: "))
        if json_option:
            error = one_object(answer.out)
            assert set(error) == {"error"}
            assert error["error"]["message"] == messages[-1]
            assert error["error"]["type"]
        else:
            assert answer.out == ""
        assert listing(folder) == before
    assert messages[0] == messages[1]
    return messages[0]


@pytest.fixture
def place(tmp_path: Path, trained: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with what commands need: tok, data, text.txt, r.yaml, run."""
    for name in ("tok", "data", "run"):
        (tmp_path / name).symlink_to(trained / name)
    (tmp_path / "text.txt").write_text("some words " * 100)
    (tmp_path / "empty.txt").write_text("  \n\n")
    (tmp_path / "empty").mkdir()
    write_recipe(tmp_path / "r.yaml")
    monkeypatch.chdir(tmp_path)
    return tmp_path


_ERRORS = {
    "tokenizer train nowhere.txt --vocab-size 300 --out o": "nowhere.txt does not exist",
    "tokenizer train txt.text --vocab-size 300 --out o": "(did you mean 'text.txt'?)",
    "tokenizer train empty.txt --vocab-size 300 --out o": "the corpus is empty",
    "tokenizer train empty --vocab-size 300 --out o": "folder empty contains no text files",
    "tokenizer train text.txt --vocab-size 256 --out o": "vocab_size 256 is too small",
    "tokenizer train text.txt --vocab-size many --out o": "'many' is not a valid integer",
    "tokenizer train text.txt --vocab-size 300 --out tok": "already exists and is not overwritten",
    "tokenizer train text.txt --vocab-size 300 --out text.txt/o": "Not a directory at ",
    "tokenizer train text.txt --vocab-size 300": "Missing option '--out'",
    "tokenizer train --vocab-size 300 --out o": "Missing argument 'INPUT...'",
    "tokenizer trian text.txt": "No such command 'trian'",
    "prepare nowhere --tokenizer tok --out o": "nowhere does not exist",
    "prepare no*.txt --tokenizer tok --out o": "no*.txt matches no text files",
    "prepare text.txt --tokenizer nowhere --out o": "tokenizer nowhere does not exist",
    "prepare text.txt --tokenizer empty --out o": "no tokenizer in empty",
    "prepare text.txt --tokenizer text.txt --out o": "text.txt",
    "prepare text.txt --tokenizer tok --out data": "already exists and is not overwritten",
    "prepare text.txt --tokenizer tok --out run --overwrite": "not a prepared corpus",
    "prepare text.txt --tokenizer tok --out r.yaml": "already exists",
    "prepare empty.txt --tokenizer tok --out o": "the corpus is empty",
    "prepare text.txt --tokenizer tok --out o --val-fraction 1": "val_fraction must be",
    "prepare text.txt --tokenizer tok --out o --workers 0": "workers must be at least 1",
    "prepare text.txt --tokenizer tok --out o --verbose": "No such option",
    "train nowhere.yaml": "recipe nowhere.yaml does not exist",
    "train r.yml": "recipe r.yml does not exist (did you mean 'r.yaml'?)",
    "train": "no input given: use firstlight train my_texts/ --budget 10m",
    "train empty": "folder empty contains no text files",
    "train data": "data is a prepared corpus, but train needs a recipe: firstlight train",
    "train run": "run is a run folder, but train needs a recipe: firstlight train run/recipe.yaml",
    "plan": "no recipe given; use: firstlight plan RECIPE.yaml",
    "train r.yaml r.yaml": "more than one recipe",
    "train r.yaml --learning_rate 1": "(did you mean '--optimizer.learning_rate'?)",
    "train r.yaml --resumee": "unknown option --resumee (did you mean '--resume'?)",
    "train r.yaml -x": "unknown option -x",
    "train r.yaml --optimizer.learning_rat 1": "(did you mean 'learning_rate'?)",
    "train r.yaml --optimizer.lr 1": "(did you mean 'learning_rate'?)",
    "train r.yaml --model.vocab_size 321": "model.vocab_size 321 is larger than",
    "train r.yaml --data.dir nowhere": "data folder nowhere does not exist",
    "train r.yaml --data.dir tok": "tok is not a prepared corpus",
    "train r.yaml --data.seq_len 65": "seq_len 65 is more than model.max_position_embeddings 64",
    "train r.yaml --run.dir run": "run folder run already contains checkpoints",
    "train r.yaml --run.dir text.txt": "run.dir text.txt is a file",
    "train r.yaml --run.dir text.txt/x": "text.txt/x",
    "train r.yaml --lr 3": "unknown option --lr (did you mean '--optimizer.learning_rate'?)",
    "train r.yaml --model gpt2": "--model is a section: set one of its keys with --model.KEY VALUE",
    "train r.yaml --run.dir=": "run.dir: string should have at least 1 character",
    "train r.yaml --batch.micro_batch_size 100000000000000": "does not fit into this machine's",
    "train r.yaml --run.device gpu": "device 'gpu' is unknown",
    "train r.yaml --init-from nowhere": "model folder nowhere does not exist",
    "train r.yaml --init-from text.txt": "text.txt is a file, not a folder",
    "train r.yaml --init-from empty": "empty is not a model folder",
    "train r.yaml --run.dir run --resume --model.hidden_size 64": "another model",
    "train r.yaml --model.hidden_size 4000000": "the weights alone take ",
    "eval nowhere": "model folder nowhere does not exist",
    "eval rum": "(did you mean 'run'?)",
    "eval empty": "empty is not a model folder",
    "eval run --data nowhere": "data folder nowhere does not exist",
    "eval run --seq-len 65": (
        "seq_len 65 exceeds the model's context of 64: choose a smaller seq_len"
    ),
    "eval run --split test": "'test' is not one of",
    "eval run --device abacus": "'abacus' is unknown",
    "generate nowhere --prompt x": "model folder nowhere does not exist",
    "generate run": "Missing option '--prompt': see firstlight generate --help",
    "generate run --prompt x --temperature -1": "temperature must be 0 or above, not -1",
    "generate run --prompt x --temperature nan": "temperature must be",
    "generate run --prompt x --top-p 0": "top_p must be above 0",
    "generate run --prompt x --min-p 2": "min_p must be between 0 (off) and 1",
    "generate run --prompt x --repetition-penalty 0": "repetition_penalty must be above 0",
    "generate run --prompt x --frequency-penalty 2.1": "frequency_penalty must be between -2 and",
    "generate run --prompt x --presence-penalty nan": "presence_penalty must be between -2 and 2",
    "generate run --prompt x --logit-bias 5": "--logit-bias 5 is not of the form ID=BIAS",
    "generate run --prompt x --logit-bias 5=101": "to numbers from -100 to 100, not",
    "generate run --prompt x --logit-bias 5=1 --logit-bias 5=2": "given twice for token 5",
    "generate run --prompt x --logit-bias 99999=1": "logit_bias contains token id 99999, but",
    "generate run --prompt x --top-k -1": "top_k must be",
    "generate run --prompt x --max-new-tokens 0": "max_new_tokens must be at least 1",
    "generate run --prompt x --seed -1": "seed must be",
    f"generate run --prompt {'x' * 400}": "room in the model's context of 64 tokens",
    "info nowhere": "model folder nowhere does not exist",
    "info text.txt": "text.txt is a file, not a folder",
    "info empty": "empty is not a model folder",
    "inof": "No such command 'inof'",
}


@pytest.mark.parametrize("command", _ERRORS)
def test_cli_impossible_command_fails_with_one_line(place: Path, run: Run, command: str) -> None:
    assert _ERRORS[command] in failure(run, place, *command.split())


def test_cli_unknown_recipe_key_names_nearest(place: Path, run: Run) -> None:
    write_recipe(place / "bad.yaml", optimizer={"learning_rat": 1.0}, model={"n_layer": 3})
    message = failure(run, place, "train", "bad.yaml")
    assert "unknown key optimizer.learning_rat (did you mean 'learning_rate'?)" in message
    assert "unknown key model.n_layer (did you mean 'num_hidden_layers'?)" in message


def test_cli_corpus_shorter_than_one_row_fails(place: Path, run: Run) -> None:
    (place / "short.txt").write_text("few words")
    prepare(["short.txt"], "tok", "short", val_fraction=0)
    message = failure(run, place, "train", "r.yaml", "--data.dir", "short")
    assert "fewer than one row of data.seq_len 32 needs (33)" in message
    assert "lower data.seq_len or prepare more text" in message


def test_cli_data_of_other_tokenizer_fails(place: Path, run: Run, texts: list[str]) -> None:
    prepare(["text.txt"], train_tokenizer(texts, 300), "other", val_fraction=0.5)
    assert "a different tokenizer" in failure(run, place, "eval", "run", "--data", "other")
    message = failure(run, place, "train", "r.yaml", "--data.dir", "other", "--init-from", "run")
    assert "a different tokenizer" in message


def test_cli_missing_split_fails(place: Path, run: Run) -> None:
    prepare(["text.txt"], "tok", "all", val_fraction=0)
    assert "has no 'val' split" in failure(run, place, "eval", "run", "--data", "all")


def test_cli_prompt_with_invalid_unicode_fails(place: Path, run: Run) -> None:
    # What Python makes of an argument that is not UTF-8.
    assert "not valid Unicode" in failure(run, place, "generate", "run", "--prompt", "a\udcffb")


def test_cli_option_accepts_equals_sign_or_switch(place: Path, run: Run) -> None:
    options = ("--run.dir=here", "--schedule.max_steps=1", "--model.tie_word_embeddings")
    answer = run("train", "r.yaml", *options, "--optimizer.weight_decay", "0.0", "--json")
    checkpoint = Path(one_object(answer.out)["checkpoint"])
    assert checkpoint.parts[0] == "here"
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    assert config["tie_word_embeddings"] is True


def test_cli_ctrl_c_saves_and_explains_how_to_resume(
    place: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_step = TrainingRun.begin_step

    def interrupted(run: TrainingRun) -> float:
        if run.state.step == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return begin_step(run)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingRun, "begin_step", interrupted)
        answer = run("train", "r.yaml", "--json")
    assert answer.exit_code == 75
    assert one_object(answer.out)["stopped_by"] == "SIGINT"
    assert one_object(answer.out)["step"] == 4
    said = "stopped by SIGINT and saved: to continue, add --resume to the same command"
    assert answer.err.splitlines()[-1] == said
    answer = run("train", "r.yaml", "--resume", "--json")
    assert answer.exit_code == 0
    assert one_object(answer.out)["stopped_by"] is None
    assert "(step 4)" in answer.err


def test_cli_interruption_prints_one_line_and_run_can_resume(
    place: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_step = TrainingRun.begin_step

    def interrupted(run: TrainingRun) -> float:
        if run.state.step == 4:
            raise KeyboardInterrupt
        return begin_step(run)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingRun, "begin_step", interrupted)
        answer = run("train", "r.yaml")
    assert answer.exit_code == 130
    said = "firstlight: error: interrupted: to continue, add --resume to the same command"
    assert answer.err.splitlines()[-1] == said
    answer = run("train", "r.yaml", "--resume")
    assert answer.exit_code == 0
    assert "(step 3)" in answer.err


def test_cli_interruption_before_first_checkpoint_suggests_same_command(
    place: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_step = TrainingRun.begin_step

    def interrupted(run: TrainingRun) -> float:
        if run.state.step == steps:
            raise KeyboardInterrupt
        return begin_step(run)

    monkeypatch.setattr(TrainingRun, "begin_step", interrupted)
    (place / "texts").mkdir()
    (place / "texts/a.txt").write_text("The cat sat on the mat, and the dog ate it.\n" * 99)
    texts = ("texts", "--steps", "3", "--model.hidden_size", "64", "--data.seq_len", "32")
    unsaved = ("r.yaml", "--run.dir", "unsaved", "--checkpoint.every_steps", "0")
    for command in (texts, unsaved):
        for steps in (0, 2):
            words = "" if steps else " before the first step"
            answer = run("train", *command)
            assert answer.exit_code == 130
            beginning, _, advice = answer.err.splitlines()[-1].rpartition(": ")
            assert beginning.startswith(f"firstlight: error: interrupted{words}")
            assert advice.removeprefix("to continue, ") == "run the same command again"


def test_cli_errors_in_shell_equal_those_in_process(place: Path) -> None:
    done = firstlight("generate", "nowhere", "--prompt", "x", "--json", cwd=place)
    assert done.returncode == 1
    line = b"firstlight: error: model folder nowhere does not exist; a model on the hub has"
    assert done.stderr.startswith(line)
    assert done.stderr.count(b"\n") == 1
    assert one_object(done.stdout.decode())["error"]["type"] == "ModelError"
    done = firstlight("train", "r.yaml", "--optimizer.lr", "1", cwd=place)
    assert done.returncode == 2
    assert done.stdout == b""
    assert done.stderr.startswith(b"firstlight: error: r.yaml: unknown key optimizer.lr")
    assert done.stderr.count(b"\n") == 1


def test_cli_variables_set_in_process_allow_later_forks(run: Run) -> None:
    for verb in ("train", "eval", "generate"):
        assert run(verb, "nowhere").exit_code
    assert os.environ["GOMP_SPINCOUNT"]
    # As Ray sets it.
    here = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONBREAKPOINT": "ray.util.rpdb.set_trace"}
    assert different_variables(here) == []
    assert can_fork([sys.executable, "-m", "firstlight"], here)


def test_cli_train_help_has_short_form(run: Run) -> None:
    short, whole = run("train", "--help"), run("train", "--help-all")
    assert (short.exit_code, whole.exit_code) == (0, 0)
    assert short.out.count("\n") <= 75
    assert short.out.rstrip().endswith("firstlight train --help-all")
    keys = known_keys()
    assert [key for key in keys if f"--{key} " not in whole.out.replace("\n", " ")] == []
    assert "--optimizer.learning_rate" in short.out
    assert f"All {len(keys)} keys" in " ".join(short.out.split())


@pytest.fixture
def same_interrupt() -> Iterator[None]:
    """The main function of a process that ends leaves Ctrl-C to the system: this one goes on."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


def test_cli_exit_skips_garbage_collection_of_torch(
    same_interrupt: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    registered: list[object] = []
    monkeypatch.setattr(atexit, "register", registered.append)
    # Called by others, who go on.
    assert main(["--version"]) == 0
    assert registered == []
    monkeypatch.setattr(sys, "argv", ["firstlight", "--version"])
    assert main() == 0
    assert registered == [gc.freeze]

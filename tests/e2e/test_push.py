"""Models and corpora that are pushed to a hub, and taken from there again.

The hub is that of hub_server.py; the client is huggingface_hub as it is, in this process.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import yaml
from hub_client import Client
from hub_server import Hub
from huggingface_hub import constants

import firstlight
from firstlight.cli.main import main
from firstlight.recipe import load_recipe
from firstlight.sharing.card import record_evaluation

#: huggingface_hub's own.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<:DeprecationWarning")

TOKEN = "hf_of_ada"

#: Prints the folder of a corpus, in a process of its own as of `Client`: huggingface_hub keeps the
#: address of files from its import on.
FETCH = """
import sys
from firstlight.data.remote import local_folder
print(local_folder(sys.argv[1]))
"""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that knows the person ada, who is logged in here."""
    with Hub(writers={TOKEN: "ada"}) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        # Its handler may have the stream of an earlier test.
        monkeypatch.setattr(logging.getLogger("huggingface_hub"), "handlers", [])
        # Between two attempts.
        monkeypatch.setattr("time.sleep", lambda _: None)
        yield hub


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """A run of 4 of its 6 steps, with a result of `eval` for its newest checkpoint."""
    folder = tmp_path_factory.mktemp("push") / "run"
    recipe: dict[str, Any] = {
        "run": {"dir": str(folder), "device": "cpu"},
        "model": {
            "model_type": "llama",
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "max_position_embeddings": 32,
        },
        "data": {"dir": str(data), "seq_len": 32},
        "batch": {"micro_batch_size": 2},
        "schedule": {"max_steps": 6},
        "evaluation": {"every_steps": 2, "max_rows": 4, "sample_prompts": ["/say"]},
        "checkpoint": {"every_steps": 2, "keep_last": 3},
    }
    path = folder.parent / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    firstlight.train(path)
    # As if it had been killed at step 4.
    shutil.rmtree(folder / "checkpoints" / "step-00000006")
    assert main(["eval", str(folder), "--sample", "6", "--device", "cpu"]) == 0
    return folder


def files_of(hub: Hub, repository: str) -> dict[str, bytes]:
    found = hub.repositories[repository]
    return {name: file.content for name, file in found.commits[found.names["main"]].items()}


def refusal(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    capfd.readouterr()
    assert main(list(arguments)) in (1, 2)
    lines = capfd.readouterr().err.splitlines()
    assert "Traceback" not in "".join(lines)
    return lines[-1]


def test_pushed_run_loads_from_hub_and_names_no_local_paths(
    hub: Hub, run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = ["push", str(run), "ada/tiny", "--private", "--license", "mit", "--gguf", "q8_0"]
    assert main([*command, "--json"]) == 0
    said = capfd.readouterr()
    assert json.loads(said.out)["url"] == f"{hub.url}/ada/tiny"
    assert "the run is not finished: the checkpoint is from step 4 of 6" in said.err
    files = files_of(hub, "ada/tiny")
    assert set(files) == {
        *("README.md", "config.json", "generation_config.json", "loss.png", "model.safetensors"),
        *("recipe.yaml", "tiny-q8_0.gguf", "tokenizer.json", "tokenizer_config.json"),
    }
    assert hub.repositories["ada/tiny"].access == "private"
    for content in files.values():
        assert str(tmp_path.parent).encode() not in content
        assert str(run.parent).encode() not in content
        assert TOKEN.encode() not in content
    (tmp_path / "recipe.yaml").write_bytes(files["recipe.yaml"])
    recipe = load_recipe(tmp_path / "recipe.yaml")
    assert recipe.run.dir == "run"
    assert recipe.evaluation.sample_prompts == ["/say"]
    folder = Client(hub, tmp_path / "home").find("ada/tiny", HF_TOKEN=TOKEN)
    there = firstlight.load(folder).model.state_dict()
    here = firstlight.load(run).model.state_dict()
    assert all(torch.equal(there[name], here[name]) for name in here)


def test_card_has_results_of_pushed_checkpoint(run: Path, tmp_path: Path, data: Path) -> None:
    assert main(["card", str(run), "ada/tiny", "--out", str(tmp_path / "card.md")]) == 0
    card = huggingface_hub.ModelCard.load(tmp_path / "card.md")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    at_four = next(line for line in map(json.loads, lines) if line["step"] == 4)
    evaluated = json.loads((run / "evaluations.jsonl").read_text())
    assert evaluated["step"] == 4
    assert (card.data.library_name, card.data.pipeline_tag) == ("transformers", "text-generation")
    assert card.data.license is None
    assert "No licence was specified." in card.text
    results = {one.metric_type: one for one in card.data.eval_results}
    assert results["loss"].metric_value == evaluated["loss"]
    assert results["loss"].metric_args == {"stderr": evaluated["loss_stderr"]}
    assert f"{at_four['val/loss']:.4f} nats per token" in card.text
    assert f"| tokens seen | {at_four['tokens_seen']:,} " in card.text
    assert "step 4 of 6: the run and its" in card.text
    tokens = json.loads((data / "manifest.json").read_text())["splits"]["train"]["tokens"]
    assert f"training split: {tokens:,} tokens" in card.text
    sources = json.loads((data / "sources.json").read_text())
    (source,) = sources["inputs"]
    assert f"firstlight prepare {source} --tokenizer tiny --out tiny-data\n" in card.text
    # A result of other weights is none of this checkpoint.
    assert (
        main(["card", str(run / "checkpoints" / "step-00000002"), "--out", str(tmp_path / "2.md")])
        == 0
    )
    other = huggingface_hub.ModelCard.load(tmp_path / "2.md")
    assert all(one.metric_args is None for one in other.data.eval_results)


def test_card_local_starting_model_is_not_linked_to_hub(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(run / "checkpoints" / "step-00000004", "ada/start")
    values = yaml.safe_load((run / "recipe.yaml").read_text(encoding="utf-8"))
    values["run"]["dir"] = "onward"
    values["schedule"]["max_steps"] = 0
    (tmp_path / "onward.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    firstlight.train("onward.yaml", init_from="ada/start")
    shutil.rmtree("ada")
    assert main(["card", "onward", "ada/tiny", "--out", "card.md"]) == 0
    card = huggingface_hub.ModelCard.load(tmp_path / "card.md")
    assert card.data.base_model is None
    assert "fine-tuned from `start`" in card.text
    assert "huggingface.co/ada/start" not in card.text


def test_card_of_run_on_texts_has_command_without_local_folders(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    overrides = [
        ["data.val_files", '["/home/ada/acme/val.jsonl"]'],
        ["batch.micro_batch_size", "2"],
    ]
    request = {"seconds": 180.0, "tokens": None, "steps": None, "size": None}
    state = {"request": {**request, "overrides": overrides}, "inputs": ["/home/ada/acme/notes.txt"]}
    (folder / "pipeline.json").write_text(json.dumps(state), encoding="utf-8")
    assert main(["card", str(folder), "ada/tiny", "--out", str(tmp_path / "card.md")]) == 0
    card = (tmp_path / "card.md").read_text(encoding="utf-8")
    assert (
        "firstlight train notes.txt --budget 180s --data.val_files '[\"val.jsonl\"]' "
        "--batch.micro_batch_size 2\n" in card
    )
    assert "/home/ada" not in card
    # What that call prepares for itself no other command makes.
    assert "--data.dir" not in card


def test_card_of_conversations_names_validation_data(
    tmp_path: Path, tokenizer: firstlight.Tokenizer
) -> None:
    for name in ("chats", "held"):
        said = [{"role": "user", "content": name}, {"role": "assistant", "content": "b"}]
        line = json.dumps({"messages": said}) + "\n"
        (tmp_path / f"{name}.jsonl").write_text(line, encoding="utf-8")
    firstlight.prepare_chat(
        [tmp_path / "chats.jsonl"],
        tokenizer,
        tmp_path / "data",
        val_inputs=[tmp_path / "held.jsonl"],
        template="alpaca",
        options=firstlight.ChatOptions(form="messages"),
    )
    out = tmp_path / "pushed"
    assert (
        main(["push-data", str(tmp_path / "data"), "ada/chats", "--dry-run", "--out", str(out)])
        == 0
    )
    assert (
        "firstlight prepare chats.jsonl --tokenizer chats --out chats-again --kind chat "
        "--val-input held.jsonl --format messages\n"
        in (out / "README.md").read_text(encoding="utf-8")
    )


def test_card_of_corpus_from_earlier_version_has_command_for_its_texts(
    data: Path, tmp_path: Path
) -> None:
    corpus = Path(shutil.copytree(data, tmp_path / "data"))
    sources = json.loads((corpus / "sources.json").read_text())
    manifest = json.loads((corpus / "manifest.json").read_text())

    def told(name: str) -> str:
        command = ["push-data", str(corpus), "ada/a", "--dry-run", "--out", str(tmp_path / name)]
        assert main(command) == 0
        card = (tmp_path / name / "README.md").read_text(encoding="utf-8")
        return card.partition("the same inputs, ")[2]

    now = told("now")
    assert now.startswith("the same shards")
    assert "--as-is" not in now
    del sources["cleaned"]
    (corpus / "sources.json").write_text(json.dumps(sources))
    before = told("before")
    assert before.startswith("the same shards")
    assert "--out a-again --as-is\n" in before
    (corpus / "manifest.json").write_text(json.dumps(manifest | {"gutenberg_stripped": 1}))
    stripped = told("stripped")
    assert stripped.startswith("similar shards")
    assert "only Project Gutenberg's licence was left out:" in stripped
    assert "--as-is" not in stripped


def test_push_interrupted_upload_resumes_with_same_command(
    hub: Hub, run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # Named as the folder that the GGUF file is made in could be.
    command = ["push", str(run), "ada/gguf", "--gguf", "f32"]
    hub.uploads_left = 1
    assert "run the same command again to upload" in refusal(capfd, *command)
    assert (len(hub.objects), files_of(hub, "ada/gguf")) == (1, {})
    hub.uploads_left, begun = None, len(hub.requests)
    assert main(command) == 0
    assert len(files_of(hub, "ada/gguf")) == 9
    sent = [one for one in hub.requests[begun:] if one.method == "PUT"]
    assert len(sent) == len(hub.objects) - 1 == 2
    commits, begun = len(hub.repositories["ada/gguf"].commits), len(hub.requests)
    assert main(command) == 0
    assert not [one for one in hub.requests[begun:] if one.method == "PUT"]
    assert len(hub.repositories["ada/gguf"].commits) == commits


def test_push_removes_weights_of_earlier_upload(hub: Hub, run: Path, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    for name in ("model-00001-of-00002.safetensors", "model.safetensors.index.json", "mine.txt"):
        (tmp_path / "old" / name).write_text("{}")
    hub.add("ada/tiny", tmp_path / "old")
    assert main(["push", str(run), "ada/tiny"]) == 0
    names = set(files_of(hub, "ada/tiny"))
    assert {name for name in names if "model" in name} == {"model.safetensors"}
    assert "mine.txt" in names


def test_push_disallowed_by_hub_or_model_prints_one_line(
    hub: Hub,
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    hub.add("bob/tiny", run / "checkpoints" / "step-00000002")
    hub.add("ada/public", run / "checkpoints" / "step-00000002")
    said = refusal(capfd, "push", str(run), "tiny")
    assert "'tiny' does not have an owner: use USER/tiny" in said
    for taken in ("bob/tiny", "bob/new"):
        said = refusal(capfd, "push", str(run), taken)
        assert f"{taken} can't be uploaded: the token has no write permission there" in said
    said = refusal(capfd, "push", str(run), "ada/public", "--private")
    assert "ada/public already exists and is public" in said
    said = refusal(capfd, "push", str(run), "ada/tiny", "--license", "none at all")
    assert "the hub rejected the model card: " in said
    assert '"license" must be one of [apache-2.0, ' in said
    (tmp_path / "empty").mkdir()
    assert "empty" in refusal(capfd, "push", str(tmp_path / "empty"), "ada/empty")
    assert "ada/empty" not in hub.repositories
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "the hub refused the token" in refusal(capfd, "push", str(run), "ada/tiny")
    monkeypatch.delenv("HF_TOKEN")
    assert "there is no hub token" in refusal(capfd, "push", str(run), "ada/tiny")


def test_push_dry_run_without_run_writes_model_folder(run: Path, tmp_path: Path) -> None:
    plain, out = tmp_path / "plain", tmp_path / "out"
    firstlight.convert(run, plain)
    config = json.loads((plain / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps({**config, "_name_or_path": str(run)}))
    card = tmp_path / "card.md"
    card.write_text("# Mine\n")
    command = ["push", str(plain), "ada/tiny", "--dry-run", "--out", str(out), "--card", str(card)]
    assert main(command) == 0
    assert (out / "README.md").read_text() == "# Mine\n"
    assert json.loads((out / "config.json").read_text()) == config
    assert not (out / "recipe.yaml").exists()


def test_card_records_every_simultaneous_evaluation(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    checkpoint = copy / "checkpoints" / "step-00000004"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: record_evaluation(checkpoint, {"number": n}), range(24)))
    lines = (copy / "evaluations.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["number"] for line in lines[1:]) == [*range(24)]


def test_pushed_corpus_is_fetched_from_hub(
    hub: Hub, data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    corpus = tmp_path / "corpus"
    shutil.copytree(data, corpus)
    (corpus / "rejected.jsonl").write_text(f'{{"file": "{tmp_path}/secret.txt"}}\n')
    assert main(["push-data", str(corpus), "ada/words", "--license", "cc0-1.0"]) == 0
    files = files_of(hub, "datasets/ada/words")
    assert set(files) == {path.name for path in data.iterdir()} - {"sources.json"} | {"README.md"}
    card = files["README.md"].decode()
    assert "license: cc0-1.0" in card
    assert "--data.dir hf://datasets/ada/words" in card
    settings = {"FIRSTLIGHT_CACHE": str(tmp_path / "cache")}
    client = Client(hub, tmp_path / "home")
    done = client.run("-c", FETCH, "hf://datasets/ada/words", settings=settings)
    assert done.returncode == 0, done.stderr
    fetched = Path(done.stdout.removesuffix("\n"))
    for shard in data.glob("*.bin"):
        assert (fetched / shard.name).read_bytes() == shard.read_bytes()
    shard = next(corpus.glob("train-*.bin"))
    shard.write_bytes(shard.read_bytes()[:-8] + bytes(8))
    assert "is missing or damaged" in refusal(capfd, "push-data", str(corpus), "ada/words")

"""Training on conversations: from a base model, resumed, evaluated, and refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from builders import draw_records, say, slow_but, with_template, write_lines
from firstlight.checkpoint.checkpoint import load_trainer_state
from firstlight.cli.main import main
from firstlight.data.chat import prepare_chat
from firstlight.data.packing import ExampleDataset
from firstlight.errors import CheckpointError, ConfigError, DataError, TokenizerError
from firstlight.evaluation.perplexity import evaluate
from firstlight.generation.chat import ChatSession
from firstlight.generation.config import SamplingConfig
from firstlight.generation.engine import load
from firstlight.lora.loading import load_model
from firstlight.recipe import parse_recipe
from firstlight.run_log.reader import read_json_lines
from firstlight.tokenizer import Tokenizer
from firstlight.training.loop import train


class StoppedError(Exception):
    """Ends a run in the middle."""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use an empty cache, and one thread, which is fastest for small models."""
    monkeypatch.setenv("FIRSTLIGHT_CACHE", str(tmp_path / "cache"))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def chat(recipe: dict[str, Any], tmp_path: Path, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the tiny run, on 60 conversations."""
    with_template(tokenizer, "chatml").save_pretrained(tmp_path / "tok")
    path = write_lines(tmp_path / "chats.jsonl", draw_records(60))
    recipe["data"] = {
        "kind": "chat",
        "files": [str(path)],
        "tokenizer": str(tmp_path / "tok"),
        "seq_len": 320,
    }
    recipe["model"]["max_position_embeddings"] = 320
    return recipe


def folder_of(recipe: Mapping[str, Any]) -> Path:
    return Path(recipe["run"]["dir"])


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(load_model(folder, dtype=torch.float32).model.state_dict())


def records(recipe: Mapping[str, Any]) -> list[dict[str, Any]]:
    timed = ("second", "mfu", "memory_bytes")
    return [
        {k: v for k, v in line.items() if not any(name in k for name in timed)}
        for line in read_json_lines(folder_of(recipe) / "metrics.jsonl")
    ]


def test_chat_run_learns_and_reports_its_data(
    chat: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    result = train(chat, progress=True)
    told = " ".join(capsys.readouterr().err.split())
    assert "data: train: 54 conversations in" in told
    lines = records(chat)
    assert lines[-1]["train/loss"] < lines[0]["train/loss"] - 0.3
    folder = Path(load_trainer_state(result.checkpoint)["data"]["dir"])
    train_split, val = (ExampleDataset(folder, name) for name in ("train", "val"))
    # Learned tokens are counted separately from all tokens of a row.
    for line in read_json_lines(folder_of(chat) / "metrics.jsonl"):
        # The model computes all positions, but learns only those of the assistant.
        assert line["tokens_per_second"] * line["seconds"] == pytest.approx(4 * 320)
        assert line["samples_per_second"] * line["seconds"] == pytest.approx(4)
        learned = line["learned_tokens_per_second"] * line["seconds"]
        assert 0 < learned < 0.9 * 4 * 320
    assert " learned) " in told
    rows = 4 * len(lines)
    in_epoch = len(train_split.packing(320))
    assert rows % in_epoch or lines[-1]["tokens_seen"] == rows // in_epoch * train_split.num_labels
    [start] = read_json_lines(folder_of(chat) / "starts.jsonl")
    found = {entry["split"]: entry for entry in start["conversations"]}
    assert found["train"]["examples"] == 54
    assert found["train"]["learned_tokens"] == train_split.num_labels
    assert found["val"]["learned_tokens"] == val.num_labels
    assert start["conversations"][0]["records"]["written"] == 60


def test_chat_run_validation_loss_covers_assistant_tokens(chat: dict[str, Any]) -> None:
    chat["evaluation"] |= {"max_rows": 0, "train_rows": 10**6}
    result = train(chat)
    beside = read_json_lines(folder_of(chat) / "metrics.jsonl")[-1]["train_eval/loss"]
    assert beside == pytest.approx(evaluate(folder_of(chat), split="train").loss, rel=1e-4)
    state = load_trainer_state(result.checkpoint)
    dataset = ExampleDataset(state["data"]["dir"], "val")
    model = load_model(result.checkpoint, dtype=torch.float32).model
    total = tokens = 0.0
    with torch.no_grad():
        for index in range(dataset.num_documents):
            ids, learned = dataset.example(index)
            losses = -torch.log_softmax(model(torch.from_numpy(ids[None, :-1]))[0], -1)
            own = losses[torch.arange(len(ids) - 1), torch.from_numpy(ids[1:])]
            total += float(own[torch.from_numpy(learned[1:])].sum())
            tokens += int(learned[1:].sum())
    assert result.evaluation is not None
    assert result.evaluation.tokens == tokens == dataset.num_labels
    assert result.evaluation.loss == pytest.approx(total / tokens, rel=1e-5)
    again = evaluate(folder_of(chat))
    assert again.tokens == tokens
    assert again.loss == pytest.approx(total / tokens, rel=1e-5)
    assert again.document_masking
    bits = again.loss / 0.6931471805599453 * dataset.num_labels / dataset.text_bytes
    assert again.bits_per_byte == pytest.approx(bits, rel=1e-12)


def test_chat_run_checkpoint_uses_training_template(
    chat: dict[str, Any], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    tokenizer.save_pretrained(tmp_path / "plain")
    chat["data"] |= {"tokenizer": str(tmp_path / "plain"), "template": "alpaca"}
    chat["schedule"]["max_steps"] = 2
    result = train(chat)
    saved = Tokenizer.from_pretrained(result.checkpoint)
    ours = with_template(tokenizer, "alpaca")
    assert saved.chat_template == ours.chat_template
    dataset = ExampleDataset(load_trainer_state(result.checkpoint)["data"]["dir"], "train")
    record = draw_records(1)[0]
    messages = say(record["instruction"], record["output"])
    assert dataset.example(0)[0].tolist() == saved.encode_chat(messages)


def test_chat_run_sample_prompts_are_answered_as_messages(chat: dict[str, Any]) -> None:
    chat["evaluation"] |= {"sample_prompts": ["the light", ""], "sample_tokens": 6}
    chat["evaluation"]["temperature"] = 0
    result = train(chat)
    samples = read_json_lines(folder_of(chat) / "samples.jsonl")
    session = ChatSession(load(result.checkpoint), settings=SamplingConfig(6, 0))
    assert samples[-2]["text"] == "".join(session.answer("the light"))
    assert [sample["prompt"] for sample in samples[-2:]] == ["the light", ""]
    chat["evaluation"]["sample_prompts"] = ["the light " * 60]
    with pytest.raises(ConfigError, match=r"sample_prompts: .* tokens, but the model's context"):
        train(chat, resume=True)


# Starting from a base model


@pytest.fixture
def base(recipe: dict[str, Any], data: Path, tmp_path: Path) -> Path:
    """Pretrain a tiny Llama with tied embeddings for a few steps."""
    model = {**recipe["model"], "tie_word_embeddings": True, "max_position_embeddings": 320}
    run = {"dir": str(tmp_path / "base"), "device": "cpu"}
    text = {"dir": str(data), "seq_len": 32}
    return train({**recipe, "model": model, "data": text, "run": run}).checkpoint


def test_chat_run_template_tokens_are_added_to_tied_embedding_and_learned(
    chat: dict[str, Any], base: Path, tokenizer: Tokenizer
) -> None:
    del chat["model"]
    chat["schedule"]["max_steps"] = 1
    chat["optimizer"] = {"name": "adamw", "learning_rate": 1e-3, "weight_decay": 0.0}
    before = weights(base)["model.embed_tokens.weight"]
    result = train(chat, init_from=base)
    loaded = load_model(result.checkpoint, dtype=torch.float32)
    assert loaded.model.config.vocab_size == tokenizer.vocab_size + 2
    after = loaded.model.state_dict()["model.embed_tokens.weight"]
    assert loaded.model.config.tie_word_embeddings
    assert after.shape[0] == before.shape[0] + 2
    mean = before.mean(0)
    # Both rows started at the mean of the old rows and were moved by one Adam step.
    change = (after[-2:] - mean).abs()
    assert (change > 0).all(1).all()
    assert float(change.max()) < 2e-3
    assert loaded.eos_token_ids == (tokenizer.eos_token_id, tokenizer.vocab_size + 1)


def test_chat_run_template_with_missing_tokens_raises_before_start(
    chat: dict[str, Any], base: Path
) -> None:
    del chat["data"]["tokenizer"]
    del chat["model"]
    with pytest.raises(
        TokenizerError,
        match=r"does not have a chat template: set data.template",
    ):
        train(chat, init_from=base)
    chat["data"]["template"] = "chatml"
    with pytest.raises(TokenizerError) as caught:
        train(chat, init_from=base)
    assert "writes <|im_start|> <|im_end|>" in str(caught.value)
    assert f"firstlight tokenizer extend {base} --chat-template chatml" in str(caught.value)
    assert not folder_of(chat).exists() or not list(folder_of(chat).glob("checkpoints/*"))


def test_chat_run_makes_held_out_answers_likelier(
    chat: dict[str, Any], base: Path, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    del chat["data"]["tokenizer"]
    chat["data"]["template"] = "alpaca"
    del chat["model"]
    chat |= {"optimizer": {"learning_rate": 3e-3}}
    chat["schedule"] = {"max_steps": 30}
    chat["evaluation"]["max_rows"] = 0
    result = train(chat, init_from=base)
    assert result.evaluation is not None
    folder = load_trainer_state(result.checkpoint)["data"]["dir"]
    before = evaluate(base, folder, seq_len=320)
    assert before.tokens == result.evaluation.tokens
    assert result.evaluation.loss < before.loss - 0.2


def test_chat_run_with_lora_learns_and_resumes(chat: dict[str, Any], base: Path) -> None:
    del chat["data"]["tokenizer"]
    chat["data"]["template"] = "alpaca"
    del chat["model"]
    chat |= {"lora": {"rank": 2}, "optimizer": {"learning_rate": 1e-2}}
    train(chat, init_from=base)
    lines = records(chat)
    assert lines[-1]["train/loss"] < lines[0]["train/loss"]
    chat["schedule"]["max_steps"] = 14
    assert train(chat, resume=True).step == 14


# Resuming


@pytest.mark.parametrize("stop", slow_but([9], [3, 5, 9]))
def test_chat_run_resumed_equals_uninterrupted_run(
    chat: dict[str, Any], tmp_path: Path, stop: int
) -> None:
    whole = {**chat, "run": {**chat["run"], "dir": str(tmp_path / "whole")}}
    expected = train(whole)

    def on_step(record: Mapping[str, Any]) -> None:
        if record["step"] == stop:
            raise StoppedError

    with pytest.raises(StoppedError):
        train(chat, on_step=on_step)
    found = train(chat, resume=True)
    assert records(chat) == records(whole)
    for name, tensor in weights(expected.checkpoint).items():
        assert torch.equal(tensor, weights(found.checkpoint)[name])


@pytest.mark.parametrize(
    "change, message",
    [
        ({"long": "cut"}, "the data's long was refuse and is now cut"),
        ({"train_on": "all"}, "the data's manifest_sha256 was"),
        ({"val_fraction": 0.2}, "the data's manifest_sha256 was"),
    ],
)
def test_chat_run_resumed_with_other_examples_raises(
    chat: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    chat["schedule"]["max_steps"] = 2
    train(chat)
    chat["data"] |= change
    with pytest.raises(CheckpointError, match=message):
        train(chat, resume=True)


def test_chat_run_resumes_without_tokenizer_folder(chat: dict[str, Any], tmp_path: Path) -> None:
    chat["schedule"]["max_steps"] = 2
    train(chat)
    del chat["data"]["tokenizer"]
    chat["schedule"]["max_steps"] = 3
    assert train(chat, resume=True).step == 3


# Prepared folders and mixes


@pytest.fixture
def prepared(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    """Prepare 40 conversations in Alpaca's template, with the tokenizer of `data`."""
    path = write_lines(tmp_path / "more.jsonl", draw_records(40, seed=2))
    prepare_chat([path], tokenizer, tmp_path / "prepared", template="alpaca")
    return tmp_path / "prepared"


def test_chat_run_on_prepared_folder_equals_run_on_files(
    chat: dict[str, Any], prepared: Path, tmp_path: Path
) -> None:
    for kind in (None, "chat"):
        name = str(tmp_path / f"run-{kind}")
        data = {"dir": str(prepared), "seq_len": 320, "kind": kind}
        result = train({**chat, "data": data, "run": {"dir": name, "device": "cpu"}})
        assert load_trainer_state(result.checkpoint)["recipe"]["data"]["document_masking"] is True


def test_chat_run_may_mix_conversations_with_text(
    chat: dict[str, Any], prepared: Path, data: Path, tokenizer: Tokenizer
) -> None:
    mix = [
        {"dir": str(data), "weight": 1, "name": "text"},
        {"dir": str(prepared), "weight": 3, "name": "chats"},
    ]
    chat["data"] = {"mix": mix, "seq_len": 320}
    chat["evaluation"]["max_rows"] = 0
    result = train(chat)
    saved = Tokenizer.from_pretrained(result.checkpoint)
    assert saved.chat_template == with_template(tokenizer, "alpaca").chat_template
    last = records(chat)[-1]
    losses = [last[f"val/loss/{name}"] for name in ("text", "chats")]
    assert last["val/loss"] == pytest.approx((losses[0] + 3 * losses[1]) / 4)
    chat["schedule"]["max_steps"] = 14
    assert train(chat, resume=True).step == 14


def test_chat_run_long_conversations_raise_or_are_dropped_by_setting(
    chat: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    chat["data"]["seq_len"] = 60
    chat["schedule"]["max_steps"] = 2
    with pytest.raises(DataError, match=r"longer than a row of data.seq_len 60.*chats.jsonl:\d+:"):
        train(chat)
    chat["data"]["long"] = "drop"
    train(chat, progress=True)
    told = " ".join(capsys.readouterr().err.split())
    assert "of 54 conversations are too long and left out" in told
    [start] = read_json_lines(folder_of(chat) / "starts.jsonl")
    entry = start["conversations"][0]
    assert entry["dropped"] == 54 - entry["examples"] > 0


# Recipes


@pytest.mark.parametrize(
    "data, message",
    [
        ({"files": "a.json"}, "files must contain conversations: set kind to chat"),
        ({"kind": "chat"}, "data.dir is missing"),
        ({"kind": "chat", "files": "a", "dir": "b"}, "set exactly one of dir"),
        ({"kind": "chat", "files": []}, "at least 1 item"),
        ({"dir": "a", "template": "chatml"}, "not to prepared folders, must be omitted: template"),
        (
            {"kind": "chat", "files": "a", "document_masking": False},
            ("can't be disabled for conversations, because"),
        ),
        (
            {"kind": "chat", "files": "a", "val_files": "b", "val_fraction": 0.2},
            "val_files and val_fraction",
        ),
        ({"kind": "chat", "files": "a", "train_on_inputs": False}, "did you mean 'train_on: all'"),
        ({"kind": "chat", "files": "a", "long": "truncate"}, "'refuse', 'drop' or 'cut'"),
    ],
)
def test_chat_run_invalid_keys_raise_config_error(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_recipe({"data": data})


def test_chat_run_resolved_recipe_parses_again() -> None:
    data = {"kind": "chat", "files": "a.json", "val_files": ["b.json"], "template": "chatml"}
    recipe = parse_recipe({"data": data})
    assert recipe.data.files == ["a.json"]
    assert recipe.data.document_masking
    assert parse_recipe(recipe.model_dump()) == recipe


def test_chat_run_data_kind_contradicting_folder_raises(
    chat: dict[str, Any], data: Path, prepared: Path
) -> None:
    chat["data"] = {"dir": str(data), "kind": "chat"}
    with pytest.raises(DataError, match=r"data.kind is chat, but .* contains text: prepare it"):
        train(chat)
    chat["data"] = {"dir": str(prepared), "kind": "text"}
    with pytest.raises(DataError, match=r"data.kind is text, but .* contains chat"):
        train(chat)
    chat["data"] = {"dir": str(prepared), "document_masking": False}
    with pytest.raises(
        ConfigError, match=("document_masking can't be disabled for conversations, because")
    ):
        train(chat)


def test_chat_run_without_tokenizer_raises_config_error(chat: dict[str, Any]) -> None:
    del chat["data"]["tokenizer"]
    with pytest.raises(ConfigError, match="conversations need a tokenizer"):
        train(chat)


def test_chat_run_malformed_file_ends_command_with_one_line(
    chat: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write_lines(
        tmp_path / "bad.jsonl", [{"messages": say("a", "b")}, {"messages": say("a")}]
    )
    chat["data"]["files"] = str(path)
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(chat))
    assert main(["train", str(tmp_path / "r.yaml")]) == 1
    error = capfd.readouterr().err
    assert f"firstlight: error: {path}:2: there is no assistant message" in error
    assert "Traceback" not in error

"""From text to a model that was taught to answer, through the commands: base model, added tokens,
fine-tuning, evaluation, chat, and transformers on the same folder."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from firstlight.checkpoint.checkpoint import load_trainer_state
from firstlight.cli.main import main
from firstlight.data.packing import ExampleDataset
from firstlight.generation.chat import ChatSession
from firstlight.generation.config import SamplingConfig
from firstlight.generation.engine import load
from firstlight.tokenizer import Tokenizer
from firstlight.tokenizer.chat_template import CHAT_TEMPLATES
from waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.usefixtures("forked_processes")

_MODEL = {
    "model_type": "llama",
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
_COMMON: dict[str, Any] = {
    "batch": {"micro_batch_size": 4},
    "optimizer": {"learning_rate": 5e-3},
    "evaluation": {"every_steps": 0, "max_rows": 0, "sample_prompts": []},
}


def questions(count: int) -> list[dict[str, str]]:
    """What comes before and after a word in a fixed order."""
    generator = random.Random(0)
    words = "dawn morning noon evening night".split()
    records = []
    for _ in range(count):
        place = generator.randrange(4)
        records.append(
            {
                "instruction": f"What comes after {words[place]}?",
                "input": generator.choice(("", "Answer in one word.", "Think first.")),
                "output": f"After {words[place]} comes {words[place + 1]}.",
            }
        )
    return records


def run(*arguments: object) -> None:
    assert main([str(argument) for argument in arguments]) == 0, arguments


def write_yaml(path: Path, recipe: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs/base and runs/sft."""
    folder = tmp_path_factory.mktemp("finetuning")
    text = Path(json.__file__).parent
    patch = pytest.MonkeyPatch()
    patch.chdir(folder)
    patch.setenv("FIRSTLIGHT_CACHE", str(folder / "cache"))
    run("tokenizer", "train", text, "--vocab-size", 400, "--out", "tok")
    run("prepare", text, "--tokenizer", "tok", "--out", "data")
    base = {"model": _MODEL, "data": {"dir": "data"}, "schedule": {"max_steps": 20}, **_COMMON}
    base["run"] = {"dir": "runs/base", "device": "cpu"}
    run("train", write_yaml(folder / "base.yaml", base))
    run("tokenizer", "extend", "tok", "--chat-template", "chatml", "--out", "tok-chat")
    Path("chats.json").write_text(json.dumps(questions(48)))
    data = {"kind": "chat", "files": "chats.json", "tokenizer": "tok-chat"}
    sft = {"data": data, "schedule": {"max_steps": 80}, **_COMMON}
    sft["run"] = {"dir": "runs/sft", "device": "cpu"}
    run("train", write_yaml(folder / "sft.yaml", sft), "--init-from", "runs/base")
    patch.undo()
    return folder


def checkpoint_of(folder: Path) -> Path:
    [found] = (folder / "runs" / "sft" / "checkpoints").iterdir()
    return found


def test_finetuned_model_prefers_held_out_answers(
    tuned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = checkpoint_of(tuned)
    data = load_trainer_state(checkpoint)["data"]["dir"]
    run("eval", checkpoint, "--json")
    after = json.loads(capsys.readouterr().out)
    # The base model with untrained rows for the two tokens: a run of no more than a step.
    sft = yaml.safe_load((tuned / "sft.yaml").read_text())
    sft["run"]["dir"] = str(tuned / "runs" / "start")
    sft |= {"schedule": {"max_steps": 1}, "optimizer": {"learning_rate": 1e-12}}
    sft["data"] = {"dir": data}
    recipe = write_yaml(tuned / "start.yaml", sft)
    run("train", recipe, "--init-from", tuned / "runs" / "base")
    run("eval", tuned / "runs" / "start", "--json")
    before = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert after["tokens"] == before["tokens"] == ExampleDataset(data, "val").num_labels
    assert after["loss"] < 0.5 * before["loss"]


def test_finetuned_model_answers_and_ends_its_turn(tuned: Path) -> None:
    loaded = load(checkpoint_of(tuned), device="cpu")
    session = ChatSession(loaded, settings=SamplingConfig(max_new_tokens=40, temperature=0))
    answer = "".join(session.answer("What comes after noon?"))
    assert answer.startswith("After ")
    assert session.stats is not None
    assert session.stats.finish_reason == "stop"


def test_finetuned_model_in_transformers_uses_same_template(tuned: Path) -> None:
    transformers = pytest.importorskip("transformers")
    checkpoint = checkpoint_of(tuned)
    ours = Tokenizer.from_pretrained(checkpoint)
    theirs = transformers.AutoTokenizer.from_pretrained(str(checkpoint))
    assert ours.chat_template == theirs.chat_template == CHAT_TEMPLATES["chatml"]
    record = questions(1)[0]
    question = "\n\n".join(filter(None, (record["instruction"], record["input"])))
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": record["output"]},
    ]
    ids = theirs.apply_chat_template(messages, tokenize=True, return_dict=False)
    dataset = ExampleDataset(load_trainer_state(checkpoint)["data"]["dir"], "train")
    assert dataset.example(0)[0].tolist() == ids == ours.encode_chat(messages)
    model = transformers.AutoModelForCausalLM.from_pretrained(str(checkpoint))
    end = ours.special_tokens["<|im_end|>"]
    assert model.generation_config.eos_token_id == [ours.eos_token_id, end]
    prompt = ours.encode_chat(messages[:1], add_generation_prompt=True)
    found = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=40,
        do_sample=False,
        pad_token_id=end,
    )
    assert found[0, -1] == end
    session = ChatSession(
        load(checkpoint, device="cpu"), settings=SamplingConfig(max_new_tokens=40, temperature=0)
    )
    own = "".join(session.answer(question))
    assert theirs.decode(found[0, len(prompt) :], skip_special_tokens=True) == own


def own_answer(checkpoint: Path, question: str) -> str:
    settings = SamplingConfig(max_new_tokens=40, temperature=0)
    return "".join(ChatSession(load(checkpoint, device="cpu"), settings=settings).answer(question))


def test_finetuned_server_answer_equals_chat_answer(tuned: Path) -> None:
    checkpoint, question = checkpoint_of(tuned), "What comes after dawn?"
    command = [sys.executable, "-m", "firstlight", "serve", str(checkpoint), "--port=0", "--json"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tuned, text=True
    )
    try:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        asked = {
            "messages": [{"role": "user", "content": question}],
            "max_tokens": 40,
            "temperature": 0,
        }
        request = urllib.request.Request(
            f"{url}/v1/chat/completions",
            json.dumps(asked).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as reply:
            (choice,) = json.load(reply)["choices"]
    finally:
        process.kill()
        process.communicate()
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == own_answer(checkpoint, question)


@pytest.mark.slow
def test_finetuned_model_in_llama_cpp_uses_same_template(tuned: Path) -> None:
    pytest.importorskip("gguf", reason="the package gguf is not installed")
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    checkpoint, question = checkpoint_of(tuned), "What comes after morning?"
    run("convert", checkpoint, "--to", "gguf", "--dtype", "f32", "--out", tuned / "gguf")
    (file,) = (tuned / "gguf").glob("*.gguf")
    model = llama_cpp.Llama(str(file), n_ctx=128, n_threads=2, verbose=False)
    try:
        assert model.metadata["tokenizer.chat_template"] == CHAT_TEMPLATES["chatml"]
        reply = model.create_chat_completion(
            [{"role": "user", "content": question}], max_tokens=40, temperature=0
        )
    finally:
        model.close()
    (choice,) = reply["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == own_answer(checkpoint, question)

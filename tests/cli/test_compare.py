"""Tests of `firstlight compare` from the command line to the page."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from firstlight.cli.main import main
from firstlight.models import LlamaConfig, empty_model
from firstlight.tokenizer import Tokenizer, train_tokenizer
from firstlight.weights.huggingface import model_files
from firstlight.weights.loading import weights_to_save
from firstlight.weights.stored import save_weights

_ITEM = {"ctx": "the bird", "endings": ["sings", "falls", "<b>runs</b>"], "label": 0}


def write_model(folder: Path, tokenizer: Tokenizer, seed: int) -> str:
    config = LlamaConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
    )
    model = empty_model(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.4, generator=generator)
    folder.mkdir()
    for name, content in model_files(config, tokenizer).items():
        (folder / name).write_text(content, encoding="utf-8")
    save_weights(weights_to_save(model), folder)
    return str(folder)


@pytest.fixture
def models(tmp_path: Path, tokenizer: Tokenizer, texts: list[str]) -> list[str]:
    """Two models with different tokenizers."""
    other = train_tokenizer(texts, 280)
    return [write_model(tmp_path / "one", tokenizer, 0), write_model(tmp_path / "two", other, 1)]


@pytest.fixture
def text(tmp_path: Path, texts: list[str]) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(texts[:3]) + "<script>alert(1)</script> 🙂\n", encoding="utf-8")
    return path


def test_compare_prints_writes_page_and_json(
    models: list[str], text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    items, prompts, page = (tmp_path / name for name in ("i.jsonl", "prompts.txt", "page.html"))
    items.write_text(2 * (json.dumps(_ITEM) + "\n"), encoding="utf-8")
    prompts.write_text("a star\n\nthe <i>stone</i>\n", encoding="utf-8")
    command = ["compare", *models, "--text", str(text), "--text", str(text.parent / "*.txt")]
    command += ["--tasks", f"hellaswag,{items}", "--prompt", "old", "--prompts", str(prompts)]
    command += ["--max-new-tokens", "5", "--passages", "2", "--page", str(page)]
    assert main([*command, "--json"]) == 0
    shown = capsys.readouterr()
    result = json.loads(shown.out)
    assert [result["before"], result["after"]] == models
    assert result["same_tokenizer"] is False
    size = text.stat().st_size
    assert [one["bytes"] for one in result["texts"]] == [size, size + prompts.stat().st_size]
    for one in result["texts"]:
        difference = one["after"]["value"] - one["before"]["value"]
        assert one["difference"]["value"] == pytest.approx(difference)
        assert one["difference"]["stderr"] > 0
        assert f"({one['bytes']:,} bytes)" in shown.err
    assert [one["name"] for one in result["tasks"]] == ["hellaswag acc", "hellaswag acc_norm"]
    assert result["tasks"][0]["difference"]["stderr"] is not None
    assert [one["prompt"] for one in result["answers"]] == ["old", "a star", "the <i>stone</i>"]
    assert len(result["worse"]) == 2
    worst = result["worse"][0]
    difference = sum(one["after"] - one["before"] for one in worst["segments"])
    assert worst["difference"] == pytest.approx(difference)
    marked = [one["text"] for one in worst["segments"] if one["marked"]]
    assert marked
    assert f"worse by {worst['difference']:.1f} bits" in shown.err
    assert "«" in shown.err
    assert result["page"] == str(page)
    last = shown.err.splitlines()[-2]
    assert last.startswith(f"with {models[1]}: ")
    assert last.partition(";")[0] == f"with {models[1]}: 29% more bits for {text}"

    html = page.read_text(encoding="utf-8")
    assert f"{last[len('with ') + len(models[1]) :]}.</p>" in html.replace("</bdi>", "")
    assert "<script>alert" not in html
    assert "<i>stone" not in html
    assert "the &lt;i&gt;stone" in html
    assert not re.search(r"(src|href)=|url\(", html)
    assert len(re.findall(r'class="(?:rise|fall) s\d carries"', html)) == sum(
        one["marked"]
        for passage in (*result["worse"], *result["better"])
        for one in passage["segments"]
    )
    # A page of this command may be replaced.
    command = ["compare", *reversed(models), "--text", str(text), "--page", str(page)]
    assert main(command) == 0
    assert "better by" in capsys.readouterr().out
    assert "Passages that got better" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "add data to compare the models on with --text FILE"),
        (["--text", "missing.txt"], "missing.txt"),
        (["--prompts", "BINARY"], "binary.txt"),
        (["--prompt", "a", "--page", "page.txt"], "--page page.txt must end in .html"),
        (["--prompt", "a", "--page", "TEXT.html"], "is not a report: choose another --page"),
    ],
)
def test_compare_bad_input_is_one_line(
    options: list[str],
    said: str,
    models: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    files = {"BINARY": tmp_path / "binary.txt", "TEXT.html": tmp_path / "text.html"}
    for path in files.values():
        path.write_bytes(b"\xff\n")
    given = [str(files.get(option, option)) for option in options]
    assert main(["compare", *models, *given]) in (1, 2)
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_compare_missing_model_is_named(
    models: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = str(tmp_path / "missing")
    assert main(["compare", models[0], missing, "--prompt", "a"]) == 1
    error = capsys.readouterr().err
    assert missing in error
    assert error.count("\n") == 1


def test_compare_replaces_beside_of_eval(
    models: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", models[0], "--by-position", "--beside", models[1]]) == 2
    error = capsys.readouterr().err
    assert "--beside was removed: run firstlight compare BEFORE AFTER" in error
    assert error.count("\n") == 1

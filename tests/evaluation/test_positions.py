"""Tests of longer contexts: positions changed by a recipe with --init-from, and the loss by
position.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from firstlight import train
from firstlight.cli.main import main
from firstlight.data.corpus import TokenDataset
from firstlight.errors import ConfigError
from firstlight.evaluation.perplexity import evaluate, evaluate_by_position
from firstlight.lora.loading import load_model
from firstlight.models import GPT2Config, LlamaConfig, ModelConfig, empty_model
from firstlight.planner.plan.machine import find_machine, resolve_for
from firstlight.recipe import parse_recipe
from firstlight.tokenizer import Tokenizer
from firstlight.weights.huggingface import model_files, read_config
from firstlight.weights.loading import weights_to_save
from firstlight.weights.stored import save_weights

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
_SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}


def write_model(folder: Path, config: ModelConfig, tokenizer: Tokenizer) -> Path:
    model = empty_model(config)
    model.init_weights(torch.Generator().manual_seed(0))
    folder.mkdir()
    for name, content in model_files(config, tokenizer).items():
        (folder / name).write_text(content, encoding="utf-8")
    save_weights(weights_to_save(model), folder)
    return folder


@pytest.fixture
def llama(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    return write_model(tmp_path / "llama", LlamaConfig(**_SIZES), tokenizer)


# The loss by position


def test_positions_loss_of_each_range_covers_its_positions(llama: Path, data: Path) -> None:
    found = evaluate_by_position(llama, data, seq_len=96, batch_size=3)
    assert [(one.first, one.last) for one in found.stretches] == [
        (6 * i, 6 * i + 5) for i in range(16)
    ]
    model, dataset = load_model(llama).model, TokenDataset(data, "val")
    sums, counts = [0.0] * 96, [0] * 96
    for row in range(dataset.num_rows(96)):
        ids = torch.tensor(dataset[row * 96 : row * 96 + 97].astype("int64"))
        losses = F.cross_entropy(model(ids[None, :-1])[0], ids[1:], reduction="none")
        for position, loss in enumerate(losses.tolist()):
            sums[position] += loss
            counts[position] += 1
    for one in found.stretches:
        places = slice(one.first, one.last + 1)
        assert one.tokens == sum(counts[places]) > 0
        assert one.loss == pytest.approx(sum(sums[places]) / one.tokens, rel=1e-5)
        assert one.perplexity == pytest.approx(math.exp(one.loss))


def test_positions_with_document_masking_count_within_document(llama: Path, data: Path) -> None:
    found = evaluate_by_position(llama, data, seq_len=32, document_masking=True)
    tokens = [one.tokens for one in found.stretches]
    # Positions restart at 0 in each document, so no position range has more tokens than the range
    # before it.
    assert tokens == sorted(tokens, reverse=True)
    assert tokens[0] > tokens[-1]
    # `evaluate` predicts the very first token of the split, too.
    whole = evaluate(llama, data, seq_len=32, document_masking=True)
    assert whole.tokens - sum(tokens) in (0, 1)


def test_positions_sample_uses_same_rows_for_every_model(llama: Path, data: Path) -> None:
    few = evaluate_by_position(llama, data, seq_len=32, sample=2, seed=1)
    assert sum(one.tokens for one in few.stretches) == 64


def test_learned_positions_beyond_context_raise_config_error(
    data: Path, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    folder = write_model(tmp_path / "gpt2", GPT2Config(**_SIZES), tokenizer)
    assert len(evaluate_by_position(folder, data, seq_len=32).stretches) == 16
    with pytest.raises(ConfigError, match="33 exceeds the context of 32, and gpt2"):
        evaluate_by_position(folder, data, seq_len=33)


def test_positions_are_printed_and_plotted(
    llama: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["eval", str(llama), "--data", str(data), "--seq-len", "48", "--by-position"]
    picture = tmp_path / "positions.png"
    assert main([*command, "--picture", str(picture), "--json"]) == 0
    shown = capsys.readouterr()
    result = json.loads(shown.out)
    assert (result["context"], result["by_position"]["seq_len"]) == (32, 48)
    stretches = result["by_position"]["stretches"]
    assert len(stretches) == 16
    assert f"{math.exp(stretches[0]['loss']):,.2f}" in shown.err
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--picture", "p.png"], "--picture needs --by-position"),
        (["--by-position", "--tasks", "hellaswag"], "--by-position reports the loss"),
    ],
)
def test_positions_unused_options_fail(
    options: list[str], said: str, llama: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["eval", str(llama), "--data", str(data)]
    assert main([*command, *options]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


# Positions of --init-from


def longer(recipe: dict[str, Any], **schedule: int) -> dict[str, Any]:
    """Return a recipe whose model section sets only the positions."""
    return recipe | {
        "model": {"max_position_embeddings": 128, "rope_scaling": YARN},
        "data": recipe["data"] | {"seq_len": 128},
        "batch": {"micro_batch_size": 2},
        "schedule": {"max_steps": 3, "warmup_steps": 0} | schedule,
    }


def test_positions_section_changes_only_positions(llama: Path, recipe: dict[str, Any]) -> None:
    as_it_is = train(longer(recipe, max_steps=0), init_from=llama)
    config = read_config(as_it_is.checkpoint)
    expected = LlamaConfig(**_SIZES | {"max_position_embeddings": 128, "rope_scaling": YARN})
    assert config == expected
    before, now = (load_model(one).model for one in (llama, as_it_is.checkpoint))
    assert all(
        torch.equal(a, b) for a, b in zip(before.parameters(), now.parameters(), strict=True)
    )
    ids = torch.arange(100)[None]
    assert not torch.equal(before(ids), now(ids))


def test_positions_plan_uses_changed_positions(llama: Path, recipe: dict[str, Any]) -> None:
    planned = resolve_for(parse_recipe(longer(recipe)), find_machine(), str(llama))
    assert planned.model == LlamaConfig(
        **_SIZES | {"max_position_embeddings": 128, "rope_scaling": YARN}
    )


def test_positions_training_beyond_old_context_lowers_loss_and_resumes(
    llama: Path, recipe: dict[str, Any]
) -> None:
    values = longer(recipe, max_steps=8)
    values["optimizer"] = {"learning_rate": 0.01}
    before = evaluate_by_position(llama, values["data"]["dir"], seq_len=128)
    result = train(values, init_from=llama)
    after = evaluate_by_position(result.checkpoint, values["data"]["dir"])
    assert after.seq_len == 128
    for one, other in zip(before.stretches, after.stretches, strict=True):
        assert other.loss < one.loss - 0.1, one.first
    values["schedule"]["max_steps"] = 9
    again = train(values, resume=True)
    assert read_config(again.checkpoint).max_position_embeddings == 128


def test_positions_complete_model_section_is_not_merged(
    llama: Path, recipe: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    values = recipe | {"schedule": {"max_steps": 0}}
    assert values["model"]["max_position_embeddings"] == 64
    found = read_config(train(values, init_from=llama).checkpoint)
    assert found.max_position_embeddings == 32


def test_positions_unsupported_by_model_raise_config_error(
    llama: Path, recipe: dict[str, Any], tmp_path: Path, tokenizer: Tokenizer
) -> None:
    gpt2 = write_model(tmp_path / "gpt2", GPT2Config(**_SIZES), tokenizer)
    with pytest.raises(ConfigError, match="is a gpt2 model, whose positions are learned"):
        train(longer(recipe), init_from=gpt2)
    with pytest.raises(ConfigError, match=r"LoRA checkpoints refer to .* remove the lora"):
        train(parse_recipe(longer(recipe) | {"lora": {"rank": 2}}), init_from=llama)
    values = longer(recipe)
    values["model"]["rope_scaling"] = {"rope_type": "linear", "factor": 4.0}
    phi3 = LlamaConfig(**_SIZES, model_type="phi3")
    folder = write_model(tmp_path / "phi3", phi3, tokenizer)
    with pytest.raises(ConfigError, match=r"can't have these positions: .* does not support rope"):
        train(values, init_from=folder)

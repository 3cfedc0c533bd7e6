"""Rows for new tokens: old tokens keep their rows and logits, and tied weights stay tied."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from firstlight.data.prepare import prepare
from firstlight.errors import CheckpointError, ConfigError, DataError
from firstlight.generation.engine import load
from firstlight.models import GPT2Config, LlamaConfig, Model, ModelConfig, empty_model
from firstlight.tokenizer import Tokenizer
from firstlight.training.loop import train
from firstlight.training.run import Run
from firstlight.weights.huggingface import model_files
from firstlight.weights.loading import (
    embedding_name,
    file_tensors,
    grow_vocabulary,
    weights_to_save,
)
from firstlight.weights.stored import save_weights

_LLAMA: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
CONFIGS: dict[str, ModelConfig] = {
    "gpt2": GPT2Config(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4),
    "untied": LlamaConfig(**_LLAMA),
    "tied": LlamaConfig(**_LLAMA, tie_word_embeddings=True),
}


def some_model(name: str) -> Model:
    model = empty_model(CONFIGS[name])
    model.init_weights(torch.Generator().manual_seed(3))
    return model.eval()


def logits(model: Model) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(torch.arange(24).view(2, 12) % 50)
    return found


def rows(model: Model) -> list[Tensor]:
    """Return the embedding's weight, and the head's if it is untied."""
    names = (embedding_name(model), "lm_head.weight")
    return [t for name, t in file_tensors(model).items() if name in names]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("copied_from", [None, 7])
@pytest.mark.parametrize("multiple", [1, 64])
def test_new_rows_are_mean_or_copy_and_old_logits_are_kept(
    name: str, copied_from: int | None, multiple: int
) -> None:
    model = some_model(name)
    before, old_rows = logits(model), [tensor.clone() for tensor in rows(model)]
    grow_vocabulary(model, 50, 53, copied_from=copied_from, vocab_multiple=multiple)
    assert model.config.vocab_size == 53
    assert torch.equal(logits(model)[..., :50], before)
    for old, grown in zip(old_rows, rows(model), strict=True):
        assert torch.equal(grown[:50], old)
        expected = old.double().mean(0).float() if copied_from is None else old[copied_from]
        assert torch.equal(grown[50:], expected.expand(3, -1))
    assert model.lm_head.weight.shape[0] == (53 if multiple == 1 else 64)
    is_tied = model.lm_head.weight is model.get_parameter(embedding_name(model))
    assert is_tied == model.config.tie_word_embeddings
    assert all(p.requires_grad for p in model.parameters())


def test_new_token_is_initially_as_likely_as_average_old_one() -> None:
    model = some_model("untied")
    grow_vocabulary(model, 50, 51)
    found = logits(model)
    torch.testing.assert_close(found[..., 50], found[..., :50].mean(-1))


def test_new_rows_replace_padding_rows_of_old_vocabulary() -> None:
    """Some models have more rows than their tokenizer has tokens."""
    model = some_model("tied")
    old = rows(model)[0].clone()
    grow_vocabulary(model, 45, 48)
    assert model.config.vocab_size == 50
    (grown,) = rows(model)
    assert torch.equal(grown[45:48], old[:45].double().mean(0).float().expand(3, -1))
    assert torch.equal(grown[48:], old[48:])
    assert torch.equal(grown[:45], old[:45])


@pytest.fixture
def extended(tmp_path: Path, corpus: Path, tokenizer: Tokenizer) -> tuple[Tokenizer, Path]:
    """Return the tokenizer with two more tokens, and the corpus prepared with it."""
    longer = tokenizer.extended(["<|user|>", "<|end|>"])
    prepare([corpus], longer, tmp_path / "extended")
    return longer, tmp_path / "extended"


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("new_rows", ["mean", "copy:<|endoftext|>"])
def test_train_from_model_adds_tokens_of_extended_tokenizer(
    tied: bool,
    new_rows: str,
    recipe: dict[str, Any],
    extended: tuple[Tokenizer, Path],
    tmp_path: Path,
) -> None:
    recipe["model"]["tie_word_embeddings"] = tied
    recipe["schedule"] = {"max_steps": 2}
    base = train(recipe).checkpoint
    longer, data = extended
    recipe["run"]["dir"] = str(tmp_path / "second")
    recipe["data"]["dir"] = str(data)
    # With an almost zero learning rate, the run saves its initial weights.
    recipe["optimizer"] = {"learning_rate": 1e-30}
    result = train(recipe, init_from=base, new_rows=new_rows)
    old, new = load(base), load(result.checkpoint)
    assert new.model.config.vocab_size == longer.vocab_size == 322
    assert new.model.config.tie_word_embeddings == tied
    assert torch.equal(logits(new.model)[..., :320], logits(old.model))
    for before, after in zip(rows(old.model), rows(new.model), strict=True):
        expected = before.double().mean(0).float() if new_rows == "mean" else before[0]
        assert torch.equal(after[320:], expected.expand(2, -1))
    assert new.tokenizer is not None
    assert new.tokenizer.encode("<|user|>", special_tokens=True) == [320]


def test_train_resumed_run_keeps_new_tokens(
    recipe: dict[str, Any], extended: tuple[Tokenizer, Path], tmp_path: Path
) -> None:
    recipe["schedule"] = {"max_steps": 2}
    base = train(recipe).checkpoint
    recipe["run"]["dir"], recipe["data"]["dir"] = str(tmp_path / "second"), str(extended[1])
    train(recipe, init_from=base)
    recipe["schedule"] = {"max_steps": 4}
    assert load(train(recipe, resume=True).checkpoint).model.config.vocab_size == 322


def test_train_extended_vocabulary_is_padded_and_resumes(
    recipe: dict[str, Any],
    extended: tuple[Tokenizer, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe["schedule"] = {"max_steps": 2}
    base = train(recipe).checkpoint
    recipe["run"]["dir"], recipe["data"]["dir"] = str(tmp_path / "second"), str(extended[1])
    recipe["efficiency"] = {"vocab_multiple": 64}
    seen: list[int] = []
    real = Run.begin_step

    def begin_step(run: Run) -> float:
        seen.append(run.program.model.lm_head.weight.shape[0])
        return real(run)

    monkeypatch.setattr(Run, "begin_step", begin_step)
    train(recipe, init_from=base)
    recipe["schedule"] = {"max_steps": 4}
    result = train(recipe, resume=True)
    assert seen == [384] * 4
    assert load(result.checkpoint).model.lm_head.weight.shape[0] == 322
    recipe["efficiency"] = {"vocab_multiple": 100}
    recipe["schedule"] = {"max_steps": 6}
    with pytest.raises(CheckpointError, match=r"was saved with efficiency\.vocab_multiple 64"):
        train(recipe, resume=True)


def test_train_tokens_without_rows_in_old_model_are_initialized_as_new(
    recipe: dict[str, Any], extended: tuple[Tokenizer, Path], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """The tokenizer was extended without its model."""
    small = empty_model(LlamaConfig(**{**_LLAMA, "vocab_size": 318, "max_position_embeddings": 64}))
    small.init_weights(torch.Generator().manual_seed(0))
    base = tmp_path / "base"
    base.mkdir()
    for name, content in model_files(small.config, tokenizer).items():
        (base / name).write_text(content, encoding="utf-8")
    save_weights(weights_to_save(small), base)
    del recipe["model"]
    recipe["data"]["dir"], recipe["schedule"] = str(extended[1]), {"max_steps": 1}
    recipe["optimizer"] = {"learning_rate": 1e-30}
    last = tokenizer.backend.id_to_token(319)
    with pytest.raises(ConfigError, match="does not have a row for this token"):
        train(recipe, init_from=base, new_rows=f"copy:{last}")
    grown = load(train(recipe, init_from=base).checkpoint).model
    for before, after in zip(rows(small), rows(grown), strict=True):
        assert torch.equal(after[318:], before.double().mean(0).float().expand(4, -1))


@pytest.mark.parametrize("vocab_size, hidden_size", [(257, 64), (512, 64), (2003, 96)])
def test_new_rows_keep_old_logits_up_to_rounding(vocab_size: int, hidden_size: int) -> None:
    config = LlamaConfig(**{**_LLAMA, "vocab_size": vocab_size, "hidden_size": hidden_size})
    model = empty_model(config)
    model.init_weights(torch.Generator().manual_seed(3))
    before = logits(model.eval())
    grow_vocabulary(model, vocab_size, vocab_size + 1)
    torch.testing.assert_close(logits(model)[..., :vocab_size], before, atol=1e-7, rtol=0)


@pytest.mark.parametrize("new_rows", ["median", "copy", "copy:", "copy:<|no such|>"])
def test_train_invalid_new_row_setting_raises_config_error(
    new_rows: str, recipe: dict[str, Any], extended: tuple[Tokenizer, Path], tmp_path: Path
) -> None:
    recipe["schedule"] = {"max_steps": 1}
    base = train(recipe).checkpoint
    recipe["run"]["dir"], recipe["data"]["dir"] = str(tmp_path / "second"), str(extended[1])
    with pytest.raises(ConfigError, match="use mean, or copy:TOKEN"):
        train(recipe, init_from=base, new_rows=new_rows)
    assert not (tmp_path / "second").exists()


def test_train_new_rows_without_starting_model_raise_config_error(recipe: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="with the model to start from"):
        train(recipe, new_rows="copy:the")
    assert not Path(recipe["run"]["dir"]).exists()


def test_train_tokenizer_that_is_no_extension_raises_data_error(
    recipe: dict[str, Any], extended: tuple[Tokenizer, Path], data: Path, tmp_path: Path
) -> None:
    """The reverse case: data of the shorter tokenizer for the model of the longer one."""
    recipe["schedule"] = {"max_steps": 1}
    recipe["data"]["dir"] = str(extended[1])
    base = train(recipe).checkpoint
    recipe["run"]["dir"], recipe["data"]["dir"] = str(tmp_path / "second"), str(data)
    with pytest.raises(DataError, match="firstlight tokenizer extend"):
        train(recipe, init_from=base)

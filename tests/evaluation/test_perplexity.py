from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from builders import draw_weights
from firstlight.checkpoint.checkpoint import Checkpoint, save_checkpoint
from firstlight.data.corpus import TokenDataset, num_rows
from firstlight.data.prepare import prepare
from firstlight.errors import ConfigError, DataError, ModelError
from firstlight.evaluation.perplexity import (
    Evaluation,
    evaluate,
    evaluate_split,
    evaluation_rows,
)
from firstlight.lora.loading import LoadedModel
from firstlight.models import LlamaConfig, Model, empty_model
from firstlight.tokenizer import Tokenizer, train_tokenizer
from firstlight.weights.huggingface import model_files
from firstlight.weights.loading import weights_to_save

SEQ_LEN = 24
CPU = torch.device("cpu")
CONFIG = LlamaConfig(
    vocab_size=320,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    max_position_embeddings=64,
)


@pytest.fixture(scope="module")
def model() -> Model:
    model = empty_model(CONFIG).eval()
    draw_weights(model, 0, 0.4)
    return model


@pytest.fixture(scope="module")
def dataset(data: Path) -> TokenDataset:
    return TokenDataset(data, "val")


@pytest.fixture
def loaded(model: Model, tokenizer: Tokenizer, tmp_path: Path) -> LoadedModel:
    return LoadedModel(model, tokenizer, (), tmp_path)


@torch.no_grad()
def slow_losses(
    model: Model, dataset: TokenDataset, first_id: int | None, rows: list[int] | None = None
) -> list[float]:
    """Compute each token's loss in a separate forward pass over the preceding tokens of its row."""
    tokens = dataset[0 : dataset.num_tokens].tolist()
    losses = []

    def loss_of(context: list[int], token: int) -> float:
        logits = model(torch.tensor([context]))[0, -1].double()
        return -float(logits.log_softmax(-1)[token])

    if first_id is not None and (rows is None or 0 in rows):
        losses.append(loss_of([first_id], tokens[0]))
    for position in range(1, len(tokens)):
        row = (position - 1) // SEQ_LEN
        if rows is None or row in rows:
            losses.append(loss_of(tokens[row * SEQ_LEN : position], tokens[position]))
    return losses


def run(loss_sum: Callable[..., Tensor], dataset: TokenDataset, **values: Any) -> Evaluation:
    values = {"seq_len": SEQ_LEN, "batch_size": 8, "device": CPU, **values}
    return evaluate_split(loss_sum, dataset, **values)


def test_evaluate_loss_matches_slow_loop_over_every_token(
    model: Model, dataset: TokenDataset
) -> None:
    losses = slow_losses(model, dataset, first_id=0)
    result = run(model, dataset, first_id=0)
    assert len(losses) == dataset.num_tokens > 300
    assert dataset.num_tokens % SEQ_LEN != 1, "the last row must be a short one"
    assert result.tokens == len(losses)
    assert result.loss == pytest.approx(sum(losses) / len(losses), rel=1e-6)
    assert result.perplexity == pytest.approx(math.exp(result.loss))
    assert result.rows == result.total_rows == num_rows(dataset.num_tokens, SEQ_LEN)


@pytest.mark.parametrize("batch_size", [1, 2, 7, 1000])
def test_evaluate_result_does_not_depend_on_batch_size(
    model: Model, dataset: TokenDataset, batch_size: int
) -> None:
    expected, found = run(model, dataset), run(model, dataset, batch_size=batch_size)
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)
    assert found.bits_per_byte == pytest.approx(expected.bits_per_byte, rel=1e-6)
    assert found.tokens == expected.tokens


def test_bits_per_byte_is_total_bits_over_text_bytes(
    model: Model, dataset: TokenDataset, tokenizer: Tokenizer
) -> None:
    text = tokenizer.decode(dataset[0 : dataset.num_tokens].tolist())
    assert dataset.text_bytes == len(text.encode())
    bits = sum(slow_losses(model, dataset, first_id=0)) / math.log(2)
    result = run(model, dataset, first_id=0)
    assert result.bits_per_byte == pytest.approx(bits / len(text.encode()), rel=1e-6)


def test_evaluate_uniform_model_needs_log2_of_vocabulary_per_token(dataset: TokenDataset) -> None:
    def uniform(input_ids: Tensor, labels: Tensor, document_ids: Tensor | None = None) -> Tensor:
        return (labels != -100).sum() * math.log(320)

    result = run(uniform, dataset, first_id=0)
    assert result.loss == pytest.approx(math.log(320), rel=1e-6)
    assert result.perplexity == pytest.approx(320, rel=1e-5)
    expected = math.log2(320) * dataset.num_tokens / dataset.text_bytes
    assert result.bits_per_byte == pytest.approx(expected, rel=1e-6)


def test_evaluate_with_first_id_includes_loss_of_first_token(
    model: Model, dataset: TokenDataset
) -> None:
    with_first, without = run(model, dataset, first_id=0), run(model, dataset)
    assert with_first.tokens == without.tokens + 1 == dataset.num_tokens
    first = int(dataset[0:1][0])
    with torch.no_grad():
        loss = -float(model(torch.tensor([[0]]))[0, 0].log_softmax(-1)[first])
    total = with_first.loss * with_first.tokens
    assert total == pytest.approx(without.loss * without.tokens + loss, rel=1e-6)


def test_evaluate_leading_bos_is_not_counted_as_text(
    corpus: Path, texts: list[str], model: Model, tmp_path: Path
) -> None:
    backend = train_tokenizer(texts, 320, special_tokens=("</s>", "<s>")).backend
    tokenizer = Tokenizer(backend, bos_token="<s>", eos_token="</s>", add_bos=True)
    prepare([corpus], tokenizer, tmp_path / "data")
    dataset = TokenDataset(tmp_path / "data", "val")
    assert int(dataset[0:1][0]) == tokenizer.separator_id == 1
    result = run(model, dataset, first_id=1)
    losses = slow_losses(model, dataset, first_id=None)
    assert result.tokens == len(losses) == dataset.num_tokens - 1
    assert result.loss == pytest.approx(sum(losses) / len(losses), rel=1e-6)
    bits = sum(losses) / math.log(2)
    assert result.bits_per_byte == pytest.approx(bits / dataset.text_bytes, rel=1e-6)


def test_evaluate_some_rows_gives_mean_over_their_tokens(
    model: Model, dataset: TokenDataset
) -> None:
    last = num_rows(dataset.num_tokens, SEQ_LEN) - 1
    for rows in ([0], [2, 5, 11], [0, last], [last]):
        losses = slow_losses(model, dataset, first_id=0, rows=rows)
        result = run(model, dataset, first_id=0, rows=rows)
        assert (result.rows, result.total_rows, result.tokens) == (
            len(rows),
            last + 1,
            len(losses),
        )
        assert result.loss == pytest.approx(sum(losses) / len(losses), rel=1e-6)


def test_bits_per_byte_of_some_rows_represents_whole_text(dataset: TokenDataset) -> None:
    def constant(input_ids: Tensor, labels: Tensor, document_ids: Tensor | None = None) -> Tensor:
        return (labels != -100).sum() * 2.0

    some, whole = (
        run(constant, dataset, first_id=0, rows=[1, 3]),
        run(constant, dataset, first_id=0),
    )
    assert some.bits_per_byte == pytest.approx(whole.bits_per_byte, rel=1e-6)


def test_evaluate_huge_loss_gives_finite_perplexity(dataset: TokenDataset) -> None:
    """An infinite perplexity is not valid JSON."""

    def hopeless(input_ids: Tensor, labels: Tensor, document_ids: Tensor | None = None) -> Tensor:
        return (labels != -100).sum() * 1e6

    result = run(hopeless, dataset)
    assert result.loss == pytest.approx(1e6)
    assert math.isfinite(result.perplexity)


def test_evaluate_progress_counts_every_row_once(model: Model, dataset: TokenDataset) -> None:
    seen: list[tuple[int, int]] = []
    result = run(model, dataset, on_rows=lambda done, total: seen.append((done, total)))
    total = result.total_rows
    assert seen == [(min(done, total), total) for done in range(8, total + 8, 8)]


def test_evaluate_leaves_no_graph_and_no_gradient(model: Model, dataset: TokenDataset) -> None:
    run(model, dataset)
    assert all(p.grad is None for p in model.parameters())


# Selection of rows


def test_evaluation_rows_are_evenly_spread_over_split() -> None:
    assert evaluation_rows(10, 4) == [0, 2, 5, 7]
    assert evaluation_rows(10, 1) == [0]
    assert evaluation_rows(3, 0) == evaluation_rows(3, 3) == evaluation_rows(3, 99) == [0, 1, 2]
    assert evaluation_rows(0, 4) == []


@given(total=st.integers(1, 500), limit=st.integers(1, 500))
def test_evaluation_rows_are_distinct_ordered_and_as_many_as_requested(
    total: int, limit: int
) -> None:
    rows = evaluation_rows(total, limit)
    assert len(rows) == min(total, limit)
    assert rows[0] == 0
    assert all(0 <= row < total for row in rows)
    gaps = [b - a for a, b in zip(rows, [*rows[1:], total], strict=True)]
    assert min(gaps) >= 1
    assert max(gaps) - min(gaps) <= 1


# Evaluation of a checkpoint


def test_evaluate_covers_split_from_first_token(
    loaded: LoadedModel, data: Path, dataset: TokenDataset, model: Model
) -> None:
    result = evaluate(loaded, data, seq_len=SEQ_LEN, batch_size=5, device="cpu")
    expected = run(model, dataset, first_id=0)
    assert result.loss == pytest.approx(expected.loss, rel=1e-6)
    assert result.tokens == dataset.num_tokens


def test_evaluate_accepts_training_split(loaded: LoadedModel, data: Path) -> None:
    result = evaluate(loaded, data, split="train", device="cpu")
    assert result.tokens == TokenDataset(data, "train").num_tokens


def test_evaluate_default_row_length_is_context(
    loaded: LoadedModel, data: Path, dataset: TokenDataset
) -> None:
    assert evaluate(loaded, data, device="cpu").rows == num_rows(dataset.num_tokens, 64)


def test_evaluate_checkpoint_uses_training_data_and_row_length(
    tmp_path: Path, model: Model, tokenizer: Tokenizer, data: Path, dataset: TokenDataset
) -> None:
    state = {"data": {"dir": str(data), "seq_len": SEQ_LEN}}
    content = Checkpoint(model_files(CONFIG, tokenizer), weights_to_save(model), {}, state)
    save_checkpoint(tmp_path / "run", 3, content)
    found = evaluate(tmp_path / "run", device="cpu")
    assert found.loss == pytest.approx(run(model, dataset, first_id=0).loss, rel=1e-6)
    assert found.rows == num_rows(dataset.num_tokens, SEQ_LEN)
    assert evaluate(tmp_path / "run", data, seq_len=9, device="cpu").rows == num_rows(
        dataset.num_tokens, 9
    )


def test_evaluate_reports_gzip_bits_per_byte(
    loaded: LoadedModel, data: Path, dataset: TokenDataset
) -> None:
    result = evaluate(loaded, data, device="cpu")
    assert dataset.gzip_bytes is not None
    expected = 8 * dataset.gzip_bytes / dataset.text_bytes
    assert 0 < expected < 8
    assert result.gzip_bits_per_byte == pytest.approx(expected)


def test_evaluate_loaded_model_stays_on_its_device(
    loaded: LoadedModel, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ "auto" would send the batches to a GPU while the model is on the CPU."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert math.isfinite(evaluate(loaded, data).loss)


def test_evaluate_tokenizer_differing_from_data_raises_data_error(
    loaded: LoadedModel, data: Path, texts: list[str]
) -> None:
    other = replace(loaded, tokenizer=train_tokenizer(texts[:60], 320))
    with pytest.raises(DataError, match=f"{data} was prepared with a different tokenizer"):
        evaluate(other, data)


def test_evaluate_model_without_tokenizer_raises_model_error(
    loaded: LoadedModel, data: Path
) -> None:
    with pytest.raises(ModelError, match="has no tokenizer"):
        evaluate(replace(loaded, tokenizer=None), data)


def test_evaluate_vocabulary_smaller_than_data_raises_data_error(
    loaded: LoadedModel, data: Path
) -> None:
    small = empty_model(CONFIG.model_copy(update={"vocab_size": 319})).eval()
    with pytest.raises(DataError, match=r"ids up to 319, but .* of only 319 tokens"):
        evaluate(replace(loaded, model=small), data)


def test_evaluate_rows_longer_than_context_raise_data_error(
    loaded: LoadedModel, data: Path
) -> None:
    with pytest.raises(
        DataError, match=("seq_len 65 exceeds the model's context of 64: choose a smaller seq_len")
    ):
        evaluate(loaded, data, seq_len=65)


@pytest.mark.parametrize("name", ["seq_len", "batch_size"])
@pytest.mark.parametrize("value", [0, -3])
def test_evaluate_sizes_below_one_raise_config_error(
    loaded: LoadedModel, data: Path, name: str, value: int
) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be at least 1, not {value}"):
        evaluate(loaded, data, **{name: value})  # type: ignore[arg-type]


def test_evaluate_model_without_recorded_data_requires_data(loaded: LoadedModel) -> None:
    with pytest.raises(DataError, match=r"the training data of .*--data"):
        evaluate(loaded)


def test_evaluate_folder_without_corpus_raises_data_error(
    loaded: LoadedModel, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match="is not a prepared corpus"):
        evaluate(loaded, tmp_path)
    with pytest.raises(DataError, match="does not exist"):
        evaluate(loaded, tmp_path / "nowhere")


def test_evaluate_missing_split_is_named(loaded: LoadedModel, data: Path) -> None:
    with pytest.raises(DataError, match=r"has no 'test' split \(it has: train, val\)"):
        evaluate(loaded, data, split="test")


def test_evaluate_model_with_nan_weights_raises_model_error(
    loaded: LoadedModel, data: Path, model: Model
) -> None:
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken.lm_head.weight[3, 3] = float("nan")
    with pytest.raises(ModelError, match="the weights are damaged, or the training has diverged"):
        evaluate(replace(loaded, model=broken), data, seq_len=SEQ_LEN)

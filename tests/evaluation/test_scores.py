"""Tests of estimates from a sample of rows, and of their standard errors."""

from __future__ import annotations

import itertools
import json
import math
import random
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from builders import draw_weights
from firstlight.checkpoint.checkpoint import Checkpoint, save_checkpoint
from firstlight.cli.main import main
from firstlight.data.corpus import TokenDataset, num_rows
from firstlight.errors import ConfigError
from firstlight.evaluation.perplexity import (
    Evaluation,
    evaluate,
    evaluate_split,
    losses_of_rows,
)
from firstlight.evaluation.scores import (
    RowLoss,
    mean_and_error,
    mean_loss,
    row_losses,
    sampled_rows,
    standard_error,
    with_error,
)
from firstlight.lora.loading import LoadedModel
from firstlight.models import LlamaConfig, Model, empty_model
from firstlight.tokenizer import Tokenizer
from firstlight.weights.huggingface import model_files
from firstlight.weights.loading import weights_to_save

SEQ_LEN = 8
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model() -> Model:
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=32,
    )
    model = empty_model(config).eval()
    draw_weights(model, 0, 0.4)
    return model


@pytest.fixture(scope="module")
def dataset(data: Path) -> TokenDataset:
    return TokenDataset(data, "val")


@pytest.fixture
def loaded(model: Model, tokenizer: Tokenizer, tmp_path: Path) -> LoadedModel:
    return LoadedModel(model, tokenizer, (), tmp_path)


def rows_of(losses: list[float], tokens: list[int]) -> list[RowLoss]:
    return [RowLoss(row, *pair) for row, pair in enumerate(zip(losses, tokens, strict=True))]


def run(model: Model, dataset: TokenDataset, **values: Any) -> Evaluation:
    values = {"seq_len": SEQ_LEN, "batch_size": 8, "device": CPU, **values}
    return evaluate_split(row_losses(model), dataset, **values)


# Pure functions


def test_mean_loss_weighs_rows_by_tokens() -> None:
    assert mean_loss(rows_of([8.0, 1.0], [4, 1])) == 9 / 5


def test_standard_error_of_equal_rows_matches_textbook() -> None:
    losses = [3.0, 5.0, 4.0, 8.0]
    expected = math.sqrt((1 - 4 / 10) * statistics.variance(losses) / 4) / 2
    assert standard_error(rows_of(losses, [2] * 4), 10) == pytest.approx(expected, rel=1e-15)


def test_standard_error_squared_averages_to_variance_of_means() -> None:
    """This holds exactly if all rows have the same length: the estimate is unbiased, but only with
    the finite-population correction.
    """
    generator = random.Random(0)
    whole = rows_of([generator.gauss(20, 5) for _ in range(9)], [8] * 9)
    samples = list(itertools.combinations(whole, 4))
    means = [mean_loss(sample) for sample in samples]
    squares = [standard_error(sample, 9) ** 2 for sample in samples]
    assert statistics.fmean(squares) == pytest.approx(statistics.pvariance(means), rel=1e-12)
    assert statistics.fmean(means) == pytest.approx(mean_loss(whole), rel=1e-12)


def test_standard_error_of_unequal_rows_uses_ratio_estimator() -> None:
    """Long rows have large losses only because they are long, which does not make the mean
    uncertain.
    """
    generator = random.Random(1)
    tokens = [generator.choice((10, 200)) for _ in range(400)]
    whole = rows_of([3 * n + generator.gauss(0, 4) for n in tokens], tokens)
    draws = [generator.sample(whole, 60) for _ in range(1500)]
    actual = statistics.pstdev(mean_loss(draw) for draw in draws)
    told = math.sqrt(statistics.fmean(standard_error(draw, 400) ** 2 for draw in draws))
    assert told == pytest.approx(actual, rel=0.06)
    naive = statistics.stdev(row.loss for row in draws[0]) / math.sqrt(60) / 105
    assert naive > 20 * told


def test_standard_error_of_whole_population_is_zero() -> None:
    assert standard_error(rows_of([3.0, 5.0, 9.0], [2, 3, 4]), 3) == 0


@given(
    losses=st.lists(st.floats(0, 1e9), min_size=2, max_size=40),
    seed=st.integers(0, 2**32),
    parts=st.integers(1, 7),
)
def test_standard_error_any_split_over_ranks_gives_same_bits(
    losses: list[float], seed: int, parts: int
) -> None:
    generator = random.Random(seed)
    whole = rows_of(losses, [generator.randint(1, 9) for _ in losses])
    shares: list[list[RowLoss]] = [[] for _ in range(parts)]
    for row in generator.sample(whole, len(whole)):
        generator.choice(shares).append(row)
    joined = sorted((row for share in shares for row in share), key=lambda row: row.row)
    assert joined == whole
    assert mean_loss(joined) == mean_loss(whole)
    assert mean_loss(generator.sample(whole, len(whole))) == mean_loss(whole)
    total = len(whole) + 5
    assert standard_error(joined, total) == standard_error(whole, total)


@given(total=st.integers(1, 300), count=st.integers(1, 300), seed=st.integers(0, 2**40))
def test_sampled_rows_are_distinct_and_ascending(total: int, count: int, seed: int) -> None:
    rows = sampled_rows(total, count, seed)
    assert rows == sorted(set(rows))
    assert len(rows) == min(count, total)
    assert set(rows) <= set(range(total))
    assert set(sampled_rows(total, count // 2, seed)) <= set(rows)


def test_sampled_rows_are_drawn_with_equal_probability() -> None:
    counts = [0] * 20
    for seed in range(2000):
        for row in sampled_rows(20, 5, seed):
            counts[row] += 1
    # Each row is expected 500 times, with a standard deviation of 19.4.
    assert all(abs(count - 500) < 5 * 19.4 for count in counts)
    assert sampled_rows(20, 5, 1) != sampled_rows(20, 5, 2)


def test_mean_and_error_of_answers_match_proportion() -> None:
    mean, error = mean_and_error([1.0, 0.0, 0.0, 1.0, 0.0])
    assert mean == 0.4
    assert error == pytest.approx(math.sqrt(0.4 * 0.6 / 4))
    assert mean_and_error([1.0]) == (1.0, None)


@pytest.mark.parametrize(
    "value, error, shown",
    [
        (3.2141, 0.0123, "3.214 ± 0.012"),
        (3.2141, 0.00996, "3.2141 ± 0.0100"),
        (24.87, 0.296, "24.87 ± 0.30"),
        (812.4, 31.0, "812 ± 31"),
        (1.5, 2e-12, "1.500000000 ± 0.000000000"),
        (1.23456, 0.0, "1.2346 ± 0"),
        (1.23456, None, "1.2346"),
    ],
)
def test_with_error_shows_significant_digits_only(
    value: float, error: float | None, shown: str
) -> None:
    assert with_error(value, error) == shown


# Estimates for a model


def test_row_losses_match_sums_over_batches(model: Model, dataset: TokenDataset) -> None:
    for masked in (False, True):
        options: Any = {"seq_len": SEQ_LEN, "device": CPU, "document_masking": masked}
        rows = list(range(num_rows(dataset.num_tokens, SEQ_LEN)))
        by_row = losses_of_rows(row_losses(model), dataset, rows, batch_size=7, **options)
        alone = losses_of_rows(model, dataset, rows, batch_size=1, **options)
        assert [row.row for row in by_row] == rows
        assert [row.tokens for row in by_row] == [row.tokens for row in alone]
        assert [r.loss for r in by_row] == pytest.approx([r.loss for r in alone], rel=1e-6)
        assert len({row.tokens for row in by_row}) > 1


def test_mean_loss_of_rows_split_over_ranks_equals_mean_of_all_rows(
    model: Model, dataset: TokenDataset
) -> None:
    total = num_rows(dataset.num_tokens, SEQ_LEN)
    parts = [
        losses_of_rows(
            row_losses(model),
            dataset,
            range(rank, total, 3),
            seq_len=SEQ_LEN,
            batch_size=5,
            device=CPU,
            first_id=0,
        )
        for rank in range(3)
    ]
    whole = run(model, dataset, first_id=0)
    assert mean_loss([row for part in parts for row in part]) == pytest.approx(whole.loss, rel=1e-6)
    assert sum(row.tokens for part in parts for row in part) == whole.tokens


@pytest.mark.parametrize("batch_size", [1, 3, 1000])
def test_sampled_estimate_does_not_depend_on_batch_size(
    loaded: LoadedModel, data: Path, batch_size: int
) -> None:
    expected = evaluate(loaded, data, sample=20, seq_len=SEQ_LEN)
    found = evaluate(loaded, data, sample=20, seq_len=SEQ_LEN, batch_size=batch_size)
    assert found.tokens == expected.tokens
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)
    assert found.loss_stderr == pytest.approx(expected.loss_stderr, rel=1e-5)


def test_sampled_evaluation_is_mean_over_rows_with_three_errors(
    loaded: LoadedModel, data: Path, dataset: TokenDataset, model: Model
) -> None:
    total = num_rows(dataset.num_tokens, SEQ_LEN)
    rows = sampled_rows(total, 20, 3)
    found = evaluate(loaded, data, sample=20, seed=3, seq_len=SEQ_LEN)
    assert found.loss == pytest.approx(run(model, dataset, first_id=0, rows=rows).loss, rel=1e-6)
    assert (found.rows, found.total_rows) == (20, total)
    losses = losses_of_rows(
        row_losses(model),
        dataset,
        rows,
        seq_len=SEQ_LEN,
        batch_size=8,
        device=CPU,
        first_id=0,
    )
    error = standard_error(losses, total)
    assert found.loss_stderr == pytest.approx(error, rel=1e-5)
    # Delta method: the effect of a small change of the loss.
    assert found.perplexity_stderr == pytest.approx(found.perplexity * error, rel=1e-5)
    per_nat = dataset.num_tokens / math.log(2) / dataset.text_bytes
    assert found.bits_per_byte_stderr == pytest.approx(per_nat * error, rel=1e-5)


def test_sampled_interval_of_two_errors_covers_split_loss_in_19_of_20(
    model: Model, dataset: TokenDataset
) -> None:
    total = num_rows(dataset.num_tokens, SEQ_LEN)
    whole = losses_of_rows(
        row_losses(model),
        dataset,
        range(total),
        seq_len=SEQ_LEN,
        batch_size=64,
        device=CPU,
        document_masking=True,
    )
    expected, hits = mean_loss(whole), 0
    for seed in range(400):
        sample = [whole[row] for row in sampled_rows(total, 40, seed)]
        hits += abs(mean_loss(sample) - expected) < 2 * standard_error(sample, total)
    assert 0.92 < hits / 400 < 0.98


def test_sampled_evaluation_same_seed_ignores_global_generators(
    loaded: LoadedModel, data: Path
) -> None:
    before = torch.get_rng_state()
    first = evaluate(loaded, data, sample=20, seq_len=SEQ_LEN)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    random.seed(99)
    assert evaluate(loaded, data, sample=20, seq_len=SEQ_LEN) == first
    assert evaluate(loaded, data, sample=20, seed=1, seq_len=SEQ_LEN).loss != first.loss


@pytest.mark.parametrize("sample", [None, 10_000])
def test_whole_split_evaluation_has_no_errors(
    loaded: LoadedModel, data: Path, dataset: TokenDataset, sample: int | None
) -> None:
    found = evaluate(loaded, data, sample=sample)
    assert found.rows == found.total_rows
    assert found.tokens == dataset.num_tokens
    assert (found.loss_stderr, found.perplexity_stderr, found.bits_per_byte_stderr) == (None,) * 3


@pytest.mark.parametrize("name, value", [("sample", 1), ("sample", 0), ("seed", -1)])
def test_sample_too_small_for_an_error_raises_config_error(
    loaded: LoadedModel, data: Path, name: str, value: int
) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be at least"):
        evaluate(loaded, data, **{name: value})  # type: ignore[arg-type]


def test_row_losses_accept_logits_of_any_dtype(model: Model) -> None:
    def low(input_ids: Tensor, *, document_ids: Tensor | None) -> Tensor:
        return torch.zeros(*input_ids.shape, 320, dtype=torch.bfloat16)

    labels = torch.tensor([[1, 2, -100], [-100, -100, -100]])
    found = row_losses(low)(torch.zeros(2, 3, dtype=torch.long), labels)  # type: ignore[arg-type]
    assert found.tolist() == pytest.approx([2 * math.log(320), 0.0], rel=1e-6)
    assert found.dtype == torch.float64


# The command


@pytest.fixture
def folder(model: Model, tokenizer: Tokenizer, tmp_path: Path) -> Path:
    for name, content in model_files(model.config, tokenizer).items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    save_file(weights_to_save(model), tmp_path / "model.safetensors", {"format": "pt"})
    return tmp_path


def test_eval_command_reports_sample_and_errors(
    folder: Path, data: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = ["--data", str(data), "--seq-len", "8", "--sample", "20", "--device", "cpu"]
    assert main(["eval", str(folder), *options, "--json"]) == 0
    answer = capfd.readouterr()
    found = json.loads(answer.out)
    shown = with_error(found["loss"], found["loss_stderr"])
    assert " ± " in shown
    total = found["total_rows"]
    assert f"loss           {shown} (standard error, 20 of {total:,} rows)\n" in answer.err
    shown = with_error(found["perplexity"], found["perplexity_stderr"])
    assert f"perplexity     {shown}\n" in answer.err
    shown = with_error(found["bits_per_byte"], found["bits_per_byte_stderr"])
    assert f"bits per byte  {shown}\n" in answer.err
    assert "bits per byte on the full text of the split\n" in answer.err
    told = {name: found[name] for name in ("folder", "split", "seq_len", "document_masking")}
    assert told == {
        "folder": str(folder),
        "split": "val",
        "seq_len": 8,
        "document_masking": False,
    }


def test_eval_command_on_run_names_checkpoint_used(
    model: Model,
    tokenizer: Tokenizer,
    data: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    state = {"data": {"dir": str(data), "seq_len": 8, "document_masking": True}}
    content = Checkpoint(model_files(model.config, tokenizer), weights_to_save(model), {}, state)
    for step in (3, 12):
        save_checkpoint(tmp_path / "run", step, content)
    assert main(["eval", str(tmp_path / "run"), "--split", "train", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    names = ("checkpoint", "folder", "split", "seq_len", "document_masking")
    assert {name: found[name] for name in names} == {
        "checkpoint": str(tmp_path / "run"),
        "folder": str(tmp_path / "run" / "checkpoints" / "step-00000012"),
        "split": "train",
        "seq_len": 8,
        "document_masking": True,
    }
    assert found["loss_stderr"] is None


@pytest.mark.parametrize(
    "options, said",
    [
        (["--tasks", "hellaswag,x", "--split", "val"], "--split applies to the loss"),
        (["--tasks", "hellaswag,x", "--seq-len", "8"], "--seq-len applies to the loss"),
        (
            ["--tasks", "hellaswag,x", "--no-document-masking"],
            "--document-masking applies to the loss",
        ),
        (["--items", "5"], "--items applies to tasks"),
        (["--task-folder", "x"], "--task-folder applies to tasks"),
        (["--sample", "1"], "1 is not in the range x>=2"),
    ],
)
def test_eval_command_unused_options_fail(
    folder: Path, options: list[str], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", str(folder), *options]) == 2
    assert said in capfd.readouterr().err

"""Splitting a step's rows into micro-batches in any way gives the gradient of one large batch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from runs import one_thread
from switches import CPU, Combination, recipe_of
from torch import Tensor

from firstlight.data.corpus import TokenDataset, num_rows
from firstlight.data.loader import IGNORE_INDEX, Batch, rows_to_batch
from firstlight.methods import apply_methods
from firstlight.models import empty_model
from firstlight.optim.config import OptimizerConfig
from firstlight.optim.optimizer import Optimizer
from firstlight.recipe import ResolvedRecipe
from firstlight.training.step import StepResult, train_step

_SEQ_LEN = 32


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    with one_thread():
        yield


def _rows(data: Path, masked: bool) -> Batch:
    """Return seven rows of text, including the split's short last row. With document masking, each
    has a different number of labels.
    """
    dataset = TokenDataset(data, "train", verify=False)
    last = num_rows(dataset.num_tokens, _SEQ_LEN) - 1
    rows = [3, last, 0, 11, 7, 5, 2]
    batch = rows_to_batch(dataset, rows, _SEQ_LEN, 0, document_masking=masked)
    counts = (batch.labels != IGNORE_INDEX).sum(1)
    assert 0 < counts[1] < _SEQ_LEN
    assert batch.num_valid == int(counts.sum())
    return batch


def _cut(batch: Batch, sizes: list[int]) -> list[Batch]:
    ids, labels = torch.split(batch.input_ids, sizes), torch.split(batch.labels, sizes)
    documents: list[Tensor | None] = [None] * len(sizes)
    if batch.document_ids is not None:
        documents = list(torch.split(batch.document_ids, sizes))
    return [
        Batch(i, one, int((one != IGNORE_INDEX).sum()), d)
        for i, one, d in zip(ids, labels, documents, strict=True)
    ]


def _step(recipe: ResolvedRecipe, batches: list[Batch]) -> tuple[StepResult, dict[str, Tensor]]:
    """Run one step in fp64 and return its gradients."""
    model = empty_model(
        recipe.model.model_copy(update={"vocab_size": 320}), recipe.efficiency.vocab_multiple
    )
    model.init_weights(torch.Generator().manual_seed(1))
    model.double().train()
    apply_methods(model, recipe.efficiency, CPU, documents=recipe.data.document_masking)
    result = train_step(model, Optimizer(model, OptimizerConfig(max_grad_norm=0.0)), batches)
    return result, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("sizes", [[1] * 7, [2, 2, 2, 1], [1, 6], [4, 3]], ids=str)
@pytest.mark.parametrize("masked", [False, True], ids=["mixed", "masked"])
@pytest.mark.parametrize(
    "methods",
    [
        {("model", "llama")},
        {("model", "gpt2")},
        {("model", "llama"), ("loss", "chunks"), ("checkpointing", "full")},
        {("model", "gpt2"), ("attention", "plain"), ("vocabulary", "padded")},
    ],
    ids=["llama", "gpt2", "llama-chunks-full", "gpt2-plain-padded"],
)
def test_accumulation_any_split_of_rows_matches_gradient_of_one_batch(
    data: Path, methods: set[tuple[str, str]], masked: bool, sizes: list[int]
) -> None:
    combination: Combination = frozenset({*methods, ("documents", "masked" if masked else "mixed")})
    recipe, batch = recipe_of(combination), _rows(data, masked)
    whole, expected = _step(recipe, [batch])
    cut, found = _step(recipe, _cut(batch, sizes))
    assert found.keys() == expected.keys()
    assert max(float((found[n] - expected[n]).abs().max()) for n in expected) < 1e-12
    assert max(float(gradient.abs().max()) for gradient in expected.values()) > 1e-3
    assert cut.loss == pytest.approx(whole.loss, rel=1e-13)
    assert cut.tokens == whole.tokens == batch.num_valid

"""Loss by the position of a token in its row, which shows whether a model uses long contexts, also
beyond the length of its training."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from firstlight.data.loader import IGNORE_INDEX, rows_to_batch
from firstlight.errors import ConfigError, DataError, ModelError
from firstlight.evaluation.inputs import (
    loaded_for_evaluation,
    open_evaluated_split,
    options_of_training,
)
from firstlight.evaluation.scores import perplexity_of, sampled_rows, token_losses
from firstlight.lora.loading import LoadedModel
from firstlight.models import Model
from firstlight.models.ops import document_positions

#: Number of ranges of positions, each with a loss of its own.
_STRETCHES = 16


@dataclass(frozen=True)
class PositionLoss:
    """Loss of the tokens in one range of positions.

    Attributes:
        first, last: first and last position of the range. The position of a prediction is that of
            the input token at which it is made, counted from 0 in the row, or with document masking
            in the document.
        tokens: number of predicted tokens.
        loss: mean cross-entropy in nats per token.
        perplexity: exp(loss).
    """

    first: int
    last: int
    tokens: int
    loss: float
    perplexity: float


@dataclass(frozen=True)
class ByPosition:
    """A model's loss by position.

    Attributes:
        seq_len: tokens of a row.
        document_masking: True if tokens attended only to their own document.
        stretches: losses of the ranges of positions, in ascending order.
    """

    seq_len: int
    document_masking: bool
    stretches: list[PositionLoss]


def evaluate_by_position(
    checkpoint: str | Path | LoadedModel,
    data: str | Path | None = None,
    *,
    split: str = "val",
    sample: int | None = None,
    seed: int = 0,
    seq_len: int | None = None,
    batch_size: int = 8,
    document_masking: bool | None = None,
    device: str = "auto",
    on_rows: Callable[[int, int], None] | None = None,
) -> ByPosition:
    """The loss in each of 16 equal ranges of positions; ranges without tokens are left out.

    The arguments are those of `evaluate`, except that for a model with rotary position embeddings
    `seq_len` may be longer than its context.

    Raises:
        ConfigError, DataError, ModelError, CheckpointError: see `evaluate`.
    """
    loaded = loaded_for_evaluation(checkpoint, device)
    model = loaded.model
    dataset = open_evaluated_split(loaded, data, split)
    options = options_of_training(loaded, dataset, seq_len, document_masking)
    length, limit = options["seq_len"], model.config.max_position_embeddings
    if length > limit and not model.config.has_rotary:
        raise ConfigError(
            f"seq_len {length} is more than the context of {limit}, and {model.config.model_type} "
            "models have no positions beyond it"
        )
    total = dataset.num_rows(length)
    rows = list(range(total)) if sample is None else sampled_rows(total, sample, seed)
    sums, counts = torch.zeros(length, dtype=torch.float64), torch.zeros(length, dtype=torch.int64)
    for start in range(0, len(rows), batch_size):
        part = rows[start : start + batch_size]
        masking = options.get("document_masking", False)
        batch = rows_to_batch(dataset, part, length, 0, document_masking=masking)
        found = _sums_by_position(model, *batch.to(options["device"]).inputs)
        sums, counts = sums + found[0], counts + found[1]
        if on_rows is not None:
            on_rows(start + len(part), len(rows))
    if not counts.any():
        raise DataError(f"the evaluated rows of {dataset.folder} hold no token to predict")
    if not sums.isfinite().all():
        raise ModelError(
            f"the loss of {loaded.folder} is no number: its weights are not all finite numbers"
        )
    return ByPosition(length, options.get("document_masking", False), _stretches(sums, counts))


@torch.no_grad()
def _sums_by_position(
    model: Model, input_ids: Tensor, labels: Tensor, document_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The summed loss, fp64 [T], and the number of predicted tokens, int64 [T], at each position,
    on the CPU.

    Args:
        model: the model.
        input_ids, labels, document_ids: int64 [B, T]; see `LanguageModel.forward`.
    """
    losses = token_losses(model, input_ids, labels, document_ids).flatten()
    T = labels.shape[1]
    positions_BT = torch.arange(T, device=labels.device).expand_as(labels)
    if document_ids is not None:
        positions_BT = document_positions(document_ids)
    valid = labels.flatten() != IGNORE_INDEX
    places, losses = positions_BT.flatten()[valid].cpu(), losses[valid].double().cpu()
    counts = torch.bincount(places, minlength=T)
    return torch.bincount(places, weights=losses, minlength=T), counts


def _stretches(sums: Tensor, counts: Tensor) -> list[PositionLoss]:
    """The losses of ranges of positions of nearly equal length, from the results [T] of
    `_sums_by_position`."""
    number = min(_STRETCHES, len(sums))
    edges = [len(sums) * i // number for i in range(number + 1)]
    found = []
    for first, end in itertools.pairwise(edges):
        tokens = int(counts[first:end].sum())
        if tokens:
            loss = float(sums[first:end].sum()) / tokens
            found.append(PositionLoss(first, end - 1, tokens, loss, perplexity=perplexity_of(loss)))
    return found

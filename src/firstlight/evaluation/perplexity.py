"""Loss, perplexity and bits per byte over a split of a prepared corpus, or a sample of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from firstlight.checkpoint.selection import resolve_model_folder, trained_on
from firstlight.data.corpus import TokenDataset
from firstlight.data.examples import open_split
from firstlight.data.loader import IGNORE_INDEX, rows_to_batch
from firstlight.data.remote import local_folder
from firstlight.efficiency import LossFunction
from firstlight.errors import ConfigError, DataError, ModelError
from firstlight.evaluation.results import RowLoss, mean_loss, sampled_rows, standard_error
from firstlight.hardware.device import find_hardware
from firstlight.models import Model
from firstlight.parallel import gather_objects
from firstlight.weights.huggingface import LoadedModel, load_model


@dataclass(frozen=True)
class Evaluation:
    """Results over the evaluated tokens.

    Attributes:
        loss: mean cross-entropy, nats a token; of preference pairs, their mean loss.
        perplexity: exp(loss); NaN of preference pairs.
        bits_per_byte: of the split's UTF-8 text; comparable across tokenizers; NaN of pairs.
        gzip_bits_per_byte: bits per byte of gzip -9 on all text of the split, also where
            a sample of its rows is evaluated; None where not recorded.
        tokens: predicted tokens.
        rows: evaluated rows, of `total_rows`.
        total_rows: rows of the whole split.
        split: "val" or "train".
        seq_len: tokens a row.
        document_masking: whether tokens saw only their own document.
        loss_stderr, perplexity_stderr, bits_per_byte_stderr: standard errors of a random sample of
            rows as an estimate of the whole split, see `results.standard_error`; that of the
            perplexity by the delta method. None where all rows were evaluated, or rows that were
            not drawn.
    """

    loss: float
    perplexity: float
    bits_per_byte: float
    gzip_bits_per_byte: float | None
    tokens: int
    rows: int
    total_rows: int
    split: str
    seq_len: int
    document_masking: bool
    loss_stderr: float | None = None
    perplexity_stderr: float | None = None
    bits_per_byte_stderr: float | None = None


def evaluation_rows(total: int, limit: int) -> list[int]:
    """Which rows are evaluated: all, or `limit` of them spread evenly over the split."""
    if limit == 0 or limit >= total:
        return list(range(total))
    return [i * total // limit for i in range(limit)]


def row_losses(model: Model) -> LossFunction:
    """The function that gives the summed loss of each row, fp64 [B], instead of that of all.

    The logits of all rows of a batch are in memory at once.
    """

    def losses(input_ids: Tensor, labels: Tensor, document_ids: Tensor | None = None) -> Tensor:
        logits_BTV = model(input_ids, document_ids=document_ids)
        wide = torch.promote_types(logits_BTV.dtype, torch.float32)
        losses_BT = F.cross_entropy(
            logits_BTV.to(wide).flatten(0, 1),
            labels.flatten(),
            ignore_index=IGNORE_INDEX,
            reduction="none",
        ).view_as(labels)
        return losses_BT.double().sum(1)

    return losses


@torch.inference_mode()
def losses_of_rows(
    loss_sum: LossFunction,
    dataset: TokenDataset,
    rows: Sequence[int],
    *,
    seq_len: int,
    batch_size: int,
    device: torch.device,
    document_masking: bool = False,
    first_id: int | None = None,
    on_rows: Callable[[int, int], None] | None = None,
) -> list[RowLoss]:
    """What each row comes to, or each batch of them: see `evaluate_split`."""
    losses: list[RowLoss] = []
    for start in range(0, len(rows), batch_size):
        part = list(rows[start : start + batch_size])
        batch = rows_to_batch(dataset, part, seq_len, 0, document_masking=document_masking)
        moved = batch.to(device)
        loss = loss_sum(*moved.inputs)
        if loss.dim() == 0:
            losses.append(RowLoss(part[0], float(loss), batch.num_terms))
        else:
            tokens = (batch.labels != IGNORE_INDEX).sum(1)
            losses += map(RowLoss, part, loss.tolist(), tokens.tolist())
        if on_rows is not None:
            on_rows(start + len(part), len(rows))
    if rows and rows[0] == 0 and dataset.predicts_first(first_id):
        input_ids = torch.tensor([[first_id]], device=device)
        labels = torch.from_numpy(dataset[0:1])[None].to(device)
        more = float(loss_sum(input_ids, labels))
        losses[0] = RowLoss(0, losses[0].loss + more, losses[0].tokens + 1)
    return losses


def evaluate_split(
    loss_sum: LossFunction,
    dataset: TokenDataset,
    *,
    seq_len: int,
    batch_size: int,
    device: torch.device,
    document_masking: bool = False,
    first_id: int | None = None,
    rows: Sequence[int] | None = None,
    drawn: bool = False,
    on_rows: Callable[[int, int], None] | None = None,
    rank: int = 0,
    processes: int = 1,
) -> Evaluation:
    """Evaluate non-overlapping rows: every token is predicted once, from what stands before it
    in its row, or, with document masking, in its row and document.

    Bits per byte charge tokens that were not predicted the mean of those that were.

    What the batches, or rows, come to is added without rounding. What a row comes to depends on
    its batch by the last digits of fp32, since matrix products are rounded otherwise in other
    shapes: batch sizes agree to a relative 1e-6.

    Args:
        loss_sum: (input_ids, labels) -> summed loss in nats, of the batch [] or of each row [B];
            called with `document_ids` too where documents are masked.
        dataset: the split.
        seq_len: tokens a row.
        batch_size: rows at a time; changes the speed only.
        device: where the model is.
        document_masking: evaluate as training with `data.document_masking` trains.
        first_id: predict the split's very first token too, from this id, so that every bit of
            the text counts.
        rows: which rows, ascending; None is all.
        drawn: the rows were drawn at random, and the loss function gives each row's: the result
            has standard errors.
        on_rows: called after each batch with the rows done and to do.
        rank, processes: this process of so many that share the batches; all get the result, the
            same as that of one.

    Raises:
        DataError: no token is predicted: with document masking, documents of one token.
    """
    total = dataset.num_rows(seq_len)
    chosen = list(rows) if rows is not None else list(range(total))
    own, extra = _own_batches(chosen, batch_size, rank, processes)
    losses = losses_of_rows(
        loss_sum,
        dataset,
        own,
        seq_len=seq_len,
        batch_size=batch_size,
        device=device,
        document_masking=document_masking,
        first_id=first_id,
        on_rows=on_rows,
    )
    if extra:
        batch = rows_to_batch(dataset, extra, seq_len, 0, document_masking=document_masking)
        with torch.inference_mode():
            loss_sum(*batch.uncounted().to(device).inputs)
    if processes > 1:
        losses = _all_losses(losses)
    if not any(row.tokens for row in losses):
        raise DataError(
            f"the evaluated rows of {dataset.folder} hold no token to predict: "
            "its documents are of one token each; evaluate without document masking"
        )
    has_error = drawn and 2 <= len(chosen) < total
    return Evaluation(
        **_figures(
            mean_loss(losses),
            standard_error(losses, total) if has_error else None,
            dataset.bits_a_nat(document_masking=document_masking, first_id=first_id),
        ),
        gzip_bits_per_byte=dataset.gzip_bits_per_byte,
        tokens=sum(row.tokens for row in losses),
        rows=len(chosen),
        total_rows=total,
        split=dataset.split,
        seq_len=seq_len,
        document_masking=document_masking,
    )


def _own_batches(
    rows: list[int], batch_size: int, rank: int, processes: int
) -> tuple[list[int], list[int]]:
    """The rows of every so manieth batch; and those of one more, not to be counted, where others
    have one more: in sharded models all compute each layer together."""
    batches = [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]
    own = batches[rank::processes]
    most = -(-len(batches) // processes)
    extra = batches[-1] if len(own) < most else []
    return [row for batch in own for row in batch], list(extra)


def _all_losses(own: list[RowLoss]) -> list[RowLoss]:
    """What all processes have found, ordered by row; processes that compute the same rows
    (tensor parallel) have found the same."""
    gathered = gather_objects([[loss.row, loss.loss, loss.tokens] for loss in own])
    found = {entry[0]: RowLoss(*entry) for part in gathered for entry in part}
    return [found[row] for row in sorted(found)]


def _figures(loss: float, error: float | None, bits_a_nat: float) -> dict[str, Any]:
    """Loss, perplexity and bits per byte, and what an error of the loss makes of each: the
    derivative times as much."""
    perplexity = math.exp(min(loss, 700.0))
    return {
        "loss": loss,
        "perplexity": perplexity,
        "bits_per_byte": loss * bits_a_nat,
        "loss_stderr": error,
        "perplexity_stderr": None if error is None else perplexity * error,
        "bits_per_byte_stderr": None if error is None else error * bits_a_nat,
    }


def load_for_evaluation(
    checkpoint: str | Path, device: str = "auto", *, best: bool = False
) -> LoadedModel:
    """A model as `evaluate` takes it: in fp32.

    Args:
        checkpoint: a folder or hub id as for `firstlight.load`.
        device: "auto", "cpu", "cuda", ...
        best: take a run folder's checkpoint with the lowest validation loss, not the newest.

    Raises:
        ConfigError: there is no such device, or `best` is not of a run folder.
        ModelError, CheckpointError: the model can't be used.
    """
    hardware = find_hardware(device)
    folder = resolve_model_folder(checkpoint, best=best)
    return load_model(folder, hardware.device, dtype=torch.float32)


def evaluate(
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
) -> Evaluation:
    """Loss, perplexity and bits per byte of a model over a split, or estimates with their standard
    errors from a random sample of its rows.

    Args:
        checkpoint: a folder or hub id as for `firstlight.load`, or what that returned.
        data: a prepared folder or its URL; None is the one that the checkpoint was trained on.
        split: "val" or "train".
        sample: only so many rows, drawn without replacement; None, or as many as there are, is
            the whole split.
        seed: decides which rows.
        seq_len: tokens a row; None is what it was trained with, else its context limit
            (at most 1,024).
        batch_size: rows at a time.
        document_masking: tokens see only their own document; None is as it was trained.
            Examples of conversations never see each other.
        device: "auto", "cpu", "cuda", ...; a model that is already loaded stays where it is.
        on_rows: called after each batch with the rows done and to do.

    Raises:
        ConfigError: sample, seed, seq_len, batch_size or device is invalid.
        DataError: the data is missing, damaged, or of another tokenizer.
        ModelError, CheckpointError: the model can't be used.
    """
    limits = (("seq_len", seq_len, 1), ("batch_size", batch_size, 1), ("sample", sample, 2))
    for name, value, least in (*limits, ("seed", seed, 0)):
        if value is not None and value < least:
            raise ConfigError(f"{name} must be at least {least}, not {value}")
    loaded = checkpoint
    if not isinstance(loaded, LoadedModel):
        loaded = load_for_evaluation(loaded, device)
    loaded.require_unchanged()
    training_data = trained_on(loaded.folder)
    dataset = open_split(
        evaluated_folder(loaded, data, split), split, long=training_data.get("long") or "cut"
    )
    if dataset.kind == "preference":
        raise DataError(
            f"{dataset.folder} holds preference pairs, whose loss is about two models: name text "
            "or conversations with --data"
        )
    limit = loaded.model.config.max_position_embeddings
    seq_len = seq_len or training_data.get("seq_len") or min(limit, 1024)
    if document_masking is None:
        document_masking = bool(training_data.get("document_masking"))
    document_masking = document_masking or dataset.has_examples
    if seq_len > limit:
        raise DataError(f"seq_len {seq_len} is more than the model's context of {limit}")
    require_same_tokenizer(loaded, dataset)
    assert loaded.tokenizer is not None
    total = dataset.num_rows(seq_len)
    result = evaluate_split(
        row_losses(loaded.model),
        dataset,
        seq_len=seq_len,
        batch_size=batch_size,
        device=next(loaded.model.parameters()).device,
        document_masking=document_masking,
        first_id=loaded.tokenizer.separator_id,
        rows=None if sample is None else sampled_rows(total, sample, seed),
        drawn=sample is not None,
        on_rows=on_rows,
    )
    if not math.isfinite(result.loss):
        raise ModelError(
            f"the loss of {loaded.folder} is {result.loss}: its weights are not all finite numbers"
        )
    return result


def evaluated_folder(
    loaded: LoadedModel, data: str | Path | None, split: str, *, progress: bool = False
) -> Path:
    """The folder of the data, once it is on this machine.

    Args:
        loaded: the model.
        data: a prepared folder or its URL; None is the one that the model was trained on.
        split: the one that is needed.
        progress: show a progress bar while it is fetched.

    Raises:
        DataError: the model does not tell, or was trained on several; or the data can't be had.
        MissingDependencyError, StorageError: see `remote.local_folder`.
    """
    trained = trained_on(loaded.folder)
    location = data if data is not None else trained.get("dir")
    corpora = trained.get("corpora")
    if location is None and isinstance(corpora, dict):
        raise DataError(
            f"{loaded.folder} was trained on a mix of {', '.join(map(str, corpora.values()))}: "
            "name one of them with --data"
        )
    if location is None:
        raise DataError(
            f"{loaded.folder} does not say what it was trained on: name the data with --data"
        )
    return local_folder(location, (split,), progress=progress)


def require_same_tokenizer(loaded: LoadedModel, dataset: TokenDataset) -> None:
    """Refuse shards that were made with another tokenizer than the model's.

    Raises:
        ModelError: the model has no tokenizer.
        DataError: the tokenizers differ, or ids go beyond the model's vocabulary.
    """
    if loaded.tokenizer is None:
        raise ModelError(f"{loaded.folder} has no tokenizer: add tokenizer.json to it")
    if loaded.tokenizer.fingerprint != dataset.manifest["tokenizer_sha256"]:
        raise DataError(
            f"{dataset.folder} was prepared with another tokenizer than that of {loaded.folder}: "
            f"prepare it again with --tokenizer {loaded.folder}"
        )
    if dataset.manifest["vocab_size"] > loaded.model.config.vocab_size:
        raise DataError(
            f"{dataset.folder} has ids up to {dataset.manifest['vocab_size'] - 1}, beyond the "
            f"vocabulary of {loaded.model.config.vocab_size} of {loaded.folder}"
        )

"""Loss, perplexity and bits per byte over a split of a prepared corpus."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from firstlight.checkpoint import resolve_model_folder, trained_on
from firstlight.data.loader import rows_to_batch
from firstlight.data.packing import num_rows
from firstlight.data.shards import TokenDataset
from firstlight.efficiency import EfficiencyConfig, LossFunction, loss_function
from firstlight.errors import ConfigError, DataError, ModelError
from firstlight.hardware import find_hardware
from firstlight.huggingface import LoadedModel, load_model


@dataclass(frozen=True)
class Evaluation:
    """Results over the evaluated tokens.

    Attributes:
        loss: mean cross-entropy, nats a token.
        perplexity: exp(loss).
        bits_per_byte: of the split's UTF-8 text; comparable across tokenizers.
        gzip_bits_per_byte: what gzip -9 needs for the same text; None where not recorded.
        tokens: predicted tokens.
        rows: evaluated rows, of `total_rows`.
        total_rows: rows of the whole split.
    """

    loss: float
    perplexity: float
    bits_per_byte: float
    gzip_bits_per_byte: float | None
    tokens: int
    rows: int
    total_rows: int


def evaluation_rows(total: int, limit: int) -> list[int]:
    """Which rows are evaluated: all, or `limit` of them spread evenly over the split."""
    if limit == 0 or limit >= total:
        return list(range(total))
    return [i * total // limit for i in range(limit)]


@torch.inference_mode()
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
    on_rows: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Evaluate non-overlapping rows: every token is predicted once, from what stands before it
    in its row, or, with document masking, in its row and document.

    Bits per byte charge tokens that were not predicted the mean of those that were.

    Args:
        loss_sum: (input_ids, labels) -> summed loss in nats; called with `document_ids` too
            where documents are masked.
        dataset: the split.
        seq_len: tokens a row.
        batch_size: rows at a time; changes the speed only.
        device: where the model is.
        document_masking: evaluate as training with `data.document_masking` trains.
        first_id: predict the split's very first token too, from this id, so that every bit of
            the text counts.
        rows: which rows; None is all.
        on_rows: called after each batch with the rows done and to do.

    Raises:
        DataError: no token is predicted: with document masking, documents of one token.
    """
    total = num_rows(dataset.num_tokens, seq_len)
    chosen = list(rows) if rows is not None else list(range(total))
    loss, tokens = 0.0, 0
    for start in range(0, len(chosen), batch_size):
        part = chosen[start : start + batch_size]
        batch = rows_to_batch(dataset, part, seq_len, 0, document_masking=document_masking)
        moved = batch.to(device)
        loss += float(loss_sum(moved.input_ids, moved.labels, moved.document_ids))
        tokens += batch.num_valid
        if on_rows is not None:
            on_rows(start + len(part), len(chosen))
    first_token = int(dataset[0:1][0])
    # A leading bos stands for no text, and there is nothing to predict it from.
    predictable = dataset.num_tokens - (first_id is None or first_token == first_id)
    if document_masking and dataset.documents_begin_with_bos:
        predictable = dataset.num_tokens - dataset.num_documents
    if first_id is not None and first_token != first_id and chosen[:1] == [0]:
        input_ids = torch.tensor([[first_id]], device=device)
        loss += float(loss_sum(input_ids, torch.tensor([[first_token]], device=device)))
        tokens += 1
    if tokens == 0:
        raise DataError(
            f"the evaluated rows of {dataset.folder} hold no token to predict: "
            "its documents are of one token each; evaluate without document masking"
        )
    mean = loss / tokens
    gzip = dataset.gzip_bytes
    return Evaluation(
        loss=mean,
        perplexity=math.exp(min(mean, 700.0)),
        bits_per_byte=mean / math.log(2) * predictable / dataset.text_bytes,
        gzip_bits_per_byte=8 * gzip / dataset.text_bytes if gzip else None,
        tokens=tokens,
        rows=len(chosen),
        total_rows=total,
    )


def evaluate(
    checkpoint: str | Path | LoadedModel,
    data: str | Path | None = None,
    *,
    split: str = "val",
    seq_len: int | None = None,
    batch_size: int = 8,
    document_masking: bool | None = None,
    device: str = "auto",
    on_rows: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Loss, perplexity and bits per byte of a model over a whole split.

    Args:
        checkpoint: a folder or hub id as for `firstlight.load`, or what that returned.
        data: a prepared folder; None is the one that the checkpoint was trained on.
        split: "val" or "train".
        seq_len: tokens a row; None is what it was trained with, else its context limit
            (at most 1,024).
        batch_size: rows at a time.
        document_masking: tokens see only their own document; None is as it was trained.
        device: "auto", "cpu", "cuda", ...; a model that is already loaded stays where it is.
        on_rows: called after each batch with the rows done and to do.

    Raises:
        ConfigError: seq_len, batch_size or device can't be meant.
        DataError: the data is missing, damaged, or of another tokenizer.
        ModelError, CheckpointError: the model can't be used.
    """
    for name, value in (("seq_len", seq_len), ("batch_size", batch_size)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, not {value}")
    if isinstance(checkpoint, LoadedModel):
        loaded = checkpoint
        hardware = find_hardware(str(next(loaded.model.parameters()).device))
    else:
        hardware = find_hardware(device)
        model_folder = resolve_model_folder(checkpoint)
        loaded = load_model(model_folder, hardware.device, dtype=torch.float32)
    loaded.require_unchanged()
    training_data = trained_on(loaded.folder)
    folder = data if data is not None else training_data.get("dir")
    if folder is None:
        raise DataError(
            f"{loaded.folder} does not say what it was trained on: name the data with --data"
        )
    dataset = TokenDataset(folder, split)
    limit = loaded.model.config.max_position_embeddings
    seq_len = seq_len or training_data.get("seq_len") or min(limit, 1024)
    if document_masking is None:
        document_masking = bool(training_data.get("document_masking"))
    if seq_len > limit:
        raise DataError(f"seq_len {seq_len} is more than the model's context of {limit}")
    require_same_tokenizer(loaded, dataset)
    assert loaded.tokenizer is not None
    loss_sum = loss_function(loaded.model, EfficiencyConfig(precision="fp32"), hardware)
    result = evaluate_split(
        loss_sum,
        dataset,
        seq_len=seq_len,
        batch_size=batch_size,
        device=hardware.device,
        document_masking=document_masking,
        first_id=loaded.tokenizer.separator_id,
        on_rows=on_rows,
    )
    if not math.isfinite(result.loss):
        raise ModelError(
            f"the loss of {loaded.folder} is {result.loss}: its weights are not all finite numbers"
        )
    return result


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

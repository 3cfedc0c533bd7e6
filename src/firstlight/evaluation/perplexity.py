"""Evaluate the loss, perplexity and bits per byte of a model on a split of prepared data, or on a
sample of its rows. The loss can also be evaluated by token position. By default, a model is
evaluated with the data and options with which it was trained.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Required, TypedDict, Unpack

import torch
from torch import Tensor

from firstlight.checkpoint.manifest import require_kept
from firstlight.checkpoint.selection import read_model_folder, trained_on
from firstlight.data.corpus import TokenDataset
from firstlight.data.loader import IGNORE_INDEX, rows_to_batch
from firstlight.data.packing import open_split
from firstlight.data.remote import local_folder
from firstlight.errors import CheckpointError, ConfigError, DataError, ModelError
from firstlight.evaluation.scores import (
    RowLoss,
    mean_loss,
    perplexity_of,
    row_losses,
    sampled_rows,
    standard_error,
    token_losses,
)
from firstlight.generation.engine import tokenizer_of
from firstlight.hardware.device import find_hardware
from firstlight.hardware.environment import sharing_cores
from firstlight.lora.loading import LoadedModel, load_model
from firstlight.methods import LossFunction
from firstlight.methods.attention import varying_lengths
from firstlight.models import Model
from firstlight.models.ops import document_positions
from firstlight.parallel import gather_objects


class RowOptions(TypedDict, total=False):
    """Options of `losses_of_rows` and `evaluate_split`.

    Attributes:
        seq_len: number of tokens per row.
        batch_size: number of rows per forward pass, which affects only the speed.
        device: device of the model.
        document_masking: True to let tokens attend only to their own document, as in training with
            `data.document_masking`.
        first_id: token id that is inserted before the first token of the split. The first token is
            then also predicted, and all bytes of the text are counted. With None, the first token
            is not predicted.
        on_rows: function that is called after each batch with the number of completed rows and the
            total number of rows.
    """

    seq_len: Required[int]
    batch_size: Required[int]
    device: Required[torch.device]
    document_masking: bool
    first_id: int | None
    on_rows: Callable[[int, int], None] | None


def load_for_evaluation(
    checkpoint: str | Path, device: str = "auto", *, best: bool = False
) -> LoadedModel:
    """Load a model for evaluation, in fp32.

    Args:
        checkpoint: a folder or hub id, as for `firstlight.load`.
        device: "auto", "cpu", "cuda", ...
        best: True to load the checkpoint with the lowest validation loss in a run folder instead of
            the newest one.

    Raises:
        ConfigError: the device does not exist, or `best` is True and `checkpoint` is not a run
            folder.
        ModelError, CheckpointError: the model is unusable.
    """
    hardware = find_hardware(device)

    def read(folder: Path) -> LoadedModel:
        loaded = load_model(folder, hardware.device, dtype=torch.float32)
        # Read the state now, because an active run may delete the checkpoint later.
        try:
            return dataclasses.replace(loaded, trained_on=trained_on(folder))
        except CheckpointError:
            require_kept(folder)
            # The state is damaged. If it is needed later, `training_data` raises the error.
            return loaded

    return read_model_folder(checkpoint, read, best=best)


def loaded_for_evaluation(checkpoint: str | Path | LoadedModel, device: str) -> LoadedModel:
    """Return `checkpoint` if it is a loaded model. Otherwise, load it with `load_for_evaluation`.

    Raises:
        ModelError: the loaded model's files have changed; see `LoadedModel.require_unchanged`.
        ConfigError, CheckpointError: see `load_for_evaluation`.
    """
    if not isinstance(checkpoint, LoadedModel):
        checkpoint = load_for_evaluation(checkpoint, device)
    checkpoint.require_unchanged()
    return checkpoint


def open_evaluated_split(loaded: LoadedModel, data: str | Path | None, split: str) -> TokenDataset:
    """Open the split to evaluate.

    Args:
        loaded, data, split: see `evaluated_folder`.

    Raises:
        DataError: the data consists of preference pairs. Also raised for the reasons listed in
            `evaluated_folder`.
    """
    folder = evaluated_folder(loaded, data, split)
    dataset = open_split(folder, split, long=training_data(loaded).get("long") or "cut")
    if dataset.kind == "preference":
        raise DataError(
            f"{dataset.folder} contains preference pairs, whose loss compares two models: choose a "
            "folder of texts or conversations with --data"
        )
    return dataset


def training_data(loaded: LoadedModel) -> Mapping[str, Any]:
    """Return the result of `trained_on`, which describes the data that the model was trained on.

    Raises:
        CheckpointError: the checkpoint of the model was deleted or is damaged.
    """
    return trained_on(loaded.folder) if loaded.trained_on is None else loaded.trained_on


def options_of_training(
    loaded: LoadedModel, dataset: TokenDataset, seq_len: int | None, document_masking: bool | None
) -> RowOptions:
    """Return the options of an evaluation. Arguments that are None default to the values used in
    training.

    Args:
        loaded: the model.
        dataset: the split to evaluate.
        seq_len: number of tokens per row. None uses the value from training or, if that is unknown,
            the context length of the model up to a maximum of 1,024.
        document_masking: see `RowOptions`.

    Raises:
        ModelError, DataError: see `require_same_tokenizer`.
    """
    if document_masking is None:
        document_masking = bool(training_data(loaded).get("document_masking"))
    require_same_tokenizer(loaded, dataset)
    return {
        "seq_len": row_length(loaded, seq_len),
        "batch_size": 1,
        "device": next(loaded.model.parameters()).device,
        "document_masking": document_masking or dataset.has_examples,
        "first_id": tokenizer_of(loaded).separator_id,
    }


def row_length(loaded: LoadedModel, seq_len: int | None) -> int:
    """Return the number of tokens per row. `seq_len` is the argument of `options_of_training`."""
    limit = loaded.model.config.max_position_embeddings
    return seq_len or training_data(loaded).get("seq_len") or min(limit, 1024)


def require_context(loaded: LoadedModel, seq_len: int) -> None:
    """Raise an error if rows are longer than the model's context.

    Raises:
        DataError: `seq_len` exceeds the context.
    """
    limit = loaded.model.config.max_position_embeddings
    if seq_len > limit:
        raise DataError(
            f"seq_len {seq_len} exceeds the model's context of {limit}: choose a smaller seq_len"
        )


def require_finite(loaded: LoadedModel, *, finite: bool) -> None:
    """Raise an error if the losses of the model are not finite.

    Raises:
        ModelError: `finite` is False.
    """
    if not finite:
        raise ModelError(
            f"the loss of {loaded.folder} is not finite: the weights are damaged, or the training "
            "has diverged; use another checkpoint"
        )


def evaluated_folder(
    loaded: LoadedModel, data: str | Path | None, split: str, *, progress: bool = False
) -> Path:
    """Return the local folder of the data to evaluate. If the data is at a URL, download it first.

    Args:
        loaded: the model.
        data: a prepared folder, or the URL of one; None uses the data that the model was trained
            on.
        split: name of the split to download.
        progress: True to show a progress bar during the download.

    Raises:
        DataError: the data can't be downloaded; or `data` is None, and the model's training data is
            unknown or a mix of several corpora.
        MissingDependencyError, StorageError: see `remote.local_folder`.
    """
    trained = training_data(loaded)
    location = data if data is not None else trained.get("dir")
    corpora = trained.get("corpora")
    if location is None and isinstance(corpora, dict):
        raise DataError(
            f"{loaded.folder} was trained on a mix of {', '.join(map(str, corpora.values()))}: "
            "choose one of them with --data"
        )
    if location is None:
        raise DataError(
            f"the training data of {loaded.folder} is unknown: choose the data with --data"
        )
    return local_folder(location, (split,), progress=progress)


def require_same_tokenizer(loaded: LoadedModel, dataset: TokenDataset) -> None:
    """Raise an error if the data was not prepared with the tokenizer of the model.

    Raises:
        ModelError: the model has no tokenizer.
        DataError: the tokenizers differ, or the data contains token ids beyond the model's
            vocabulary.
    """
    if tokenizer_of(loaded).fingerprint != dataset.manifest["tokenizer_sha256"]:
        raise DataError(
            f"{dataset.folder} was prepared with a different tokenizer than {loaded.folder}: "
            f"prepare it again with --tokenizer {loaded.folder}"
        )
    if dataset.manifest["vocab_size"] > loaded.model.config.vocab_size:
        raise DataError(
            f"{dataset.folder} has token ids up to {dataset.manifest['vocab_size'] - 1}, but "
            f"{loaded.folder} has a vocabulary of only {loaded.model.config.vocab_size} tokens"
        )


@dataclass(frozen=True)
class Evaluation:
    """Results of an evaluation.

    Attributes:
        loss: mean cross-entropy in nats per token; for preference pairs, the mean loss per pair.
        perplexity: exp(loss); NaN for preference pairs.
        bits_per_byte: bits per byte of UTF-8 text, which can be compared between models with
            different tokenizers; NaN for preference pairs.
        gzip_bits_per_byte: bits per byte that gzip -9 achieves on the text of the entire split,
            even if only a sample of rows is evaluated; None if this was not recorded.
        tokens: number of predicted tokens.
        rows: number of evaluated rows.
        total_rows: number of rows in the split.
        split: "val" or "train".
        seq_len: number of tokens per row.
        document_masking: True if tokens attended only to their own document.
        loss_stderr: standard error of the loss if it was estimated from a random sample of rows
            (see `scores.standard_error`). All standard errors are None if all rows were evaluated,
            or if the rows were not drawn at random.
        perplexity_stderr: standard error of the perplexity, computed with the delta method.
        bits_per_byte_stderr: standard error of the bits per byte.
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
    """Return the indices of the rows to evaluate.

    Args:
        total: number of rows in the split.
        limit: maximum number of rows. The rows are spread evenly over the split. 0 means all rows.
    """
    if limit == 0 or limit >= total:
        return list(range(total))
    return [i * total // limit for i in range(limit)]


# Don't use torch.inference_mode. FSDP2 allocates tensors in its first forward pass, which may be
# this one, and training uses the same tensors afterwards.
@torch.no_grad()
@varying_lengths()
def losses_of_rows(
    loss_sum: LossFunction,
    dataset: TokenDataset,
    rows: Sequence[int],
    **options: Unpack[RowOptions],
) -> list[RowLoss]:
    """Compute the losses of rows, using only this process.

    Args:
        loss_sum: see `evaluate_split`.
        dataset: the split.
        rows: indices of the rows in ascending order.
        options: see `RowOptions`.

    Returns:
        The loss of each row. If `loss_sum` returns one sum per batch, the loss of each batch.
    """
    seq_len = options["seq_len"]
    batch_size = options["batch_size"]
    device = options["device"]
    masking, first_id = options.get("document_masking", False), options.get("first_id")
    on_rows = options.get("on_rows")
    losses: list[RowLoss] = []
    for start in range(0, len(rows), batch_size):
        part = list(rows[start : start + batch_size])
        batch = rows_to_batch(dataset, part, seq_len, 0, document_masking=masking)
        moved = batch.to(device)
        loss = loss_sum(*moved.inputs)
        if loss.dim() == 0:
            losses.append(RowLoss(part[0], float(loss), batch.num_terms))
        else:
            tokens = (batch.labels != IGNORE_INDEX).sum(1)
            losses += map(RowLoss, part, loss.tolist(), tokens.tolist())
        if on_rows is not None:
            on_rows(start + len(part), len(rows))
    # Row 0 does not predict the first token of the split. Predict it separately, from `first_id`.
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
    rows: Sequence[int] | None = None,
    drawn: bool = False,
    rank: int = 0,
    processes: int = 1,
    **options: Unpack[RowOptions],
) -> Evaluation:
    """Evaluate the non-overlapping rows of a split. Each token is predicted once, from the
    preceding tokens in its row. With document masking, only preceding tokens of the same document
    are used.

    For bits per byte, tokens that are not predicted are assumed to have the mean loss. The losses
    of the rows are summed without rounding errors. The last fp32 digits of a row's loss can depend
    on the other rows in its batch, so results for different batch sizes can have a relative
    difference of up to 1e-6.

    Args:
        loss_sum: function that returns the summed loss in nats, either as a scalar for the batch,
            [], or for each row, [B]. Its arguments are input_ids, labels and, with document
            masking, document_ids, all int64 [B, T].
        dataset: the split.
        rows: indices of the rows to evaluate in ascending order; None for all rows.
        drawn: True if the rows were drawn at random. In this case, the result includes standard
            errors, and `loss_sum` must return the loss of each row.
        rank, processes: rank of this process, and number of processes among which the batches are
            divided. All processes return the same result, which is equal to the result of an
            evaluation with a single process.
        options: see `RowOptions`.

    Raises:
        DataError: there is no token to predict. With document masking, this is the case if all
            documents consist of a single token.
    """
    seq_len, masking = options["seq_len"], options.get("document_masking", False)
    total = dataset.num_rows(seq_len)
    chosen = list(rows) if rows is not None else list(range(total))
    losses = _shared_losses(loss_sum, dataset, chosen, rank, processes=processes, options=options)
    if not any(row.tokens for row in losses):
        raise DataError(
            f"the evaluated rows of {dataset.folder} contain no token to predict, because each "
            "document has only one token: evaluate without document masking"
        )
    error = standard_error(losses, total) if drawn and 2 <= len(chosen) < total else None
    bits_a_nat = dataset.bits_a_nat(document_masking=masking, first_id=options.get("first_id"))
    loss = mean_loss(losses)
    perplexity = perplexity_of(loss)
    return Evaluation(
        loss,
        perplexity,
        loss * bits_a_nat,
        gzip_bits_per_byte=dataset.gzip_bits_per_byte,
        tokens=sum(row.tokens for row in losses),
        rows=len(chosen),
        total_rows=total,
        split=dataset.split,
        seq_len=seq_len,
        document_masking=masking,
        # With the delta method, the standard error of a function of the loss is the standard error
        # of the loss times the derivative of the function.
        loss_stderr=error,
        perplexity_stderr=None if error is None else perplexity * error,
        bits_per_byte_stderr=None if error is None else error * bits_a_nat,
    )


def _shared_losses(
    loss_sum: LossFunction,
    dataset: TokenDataset,
    rows: list[int],
    rank: int,
    *,
    processes: int,
    options: RowOptions,
) -> list[RowLoss]:
    """Divide the rows among the processes and evaluate them. In every process, return the losses of
    all rows."""
    own, extra = _own_batches(rows, options["batch_size"], rank, processes)
    losses = losses_of_rows(loss_sum, dataset, own, **options)
    if extra:
        masking = options.get("document_masking", False)
        batch = rows_to_batch(dataset, extra, options["seq_len"], 0, document_masking=masking)
        with torch.no_grad():
            loss_sum(*batch.uncounted().to(options["device"]).inputs)
    return losses if processes == 1 else _all_losses(losses)


def _own_batches(
    rows: list[int], batch_size: int, rank: int, processes: int
) -> tuple[list[int], list[int]]:
    """Return the rows that this rank evaluates, and the rows of an additional batch whose losses
    are not counted. All ranks must run the same number of forward passes, because they gather the
    layers of a sharded model together. The additional batch is [] unless other ranks have one more
    batch than this rank.
    """
    batches = [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]
    own = batches[rank::processes]
    most = -(-len(batches) // processes)
    extra = batches[-1] if len(own) < most else []
    return [row for batch in own for row in batch], list(extra)


def _all_losses(own: list[RowLoss]) -> list[RowLoss]:
    """Return the losses from all processes, sorted by row. Each row is included only once, even
    though all processes of a tensor-parallel group evaluate the same rows.
    """
    gathered = gather_objects([[loss.row, loss.loss, loss.tokens] for loss in own])
    found = {entry[0]: RowLoss(*entry) for part in gathered for entry in part}
    return [found[row] for row in sorted(found)]


@sharing_cores()
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
    """Evaluate the loss, perplexity and bits per byte of a model on a split, or estimate them with
    standard errors from a random sample of rows.

    Args:
        checkpoint: a folder or hub id, as for `firstlight.load`, or a model returned by that
            function.
        data: a prepared folder, or the URL of one; None uses the data that the model was trained
            on.
        split: "val" or "train".
        sample: number of rows to draw at random without replacement. If this is None, or not less
            than the number of rows in the split, the entire split is evaluated.
        seed: random seed for drawing the sample.
        seq_len: number of tokens per row. None uses the value from training or, if that is unknown,
            the context length of the model up to a maximum of 1,024.
        batch_size: number of rows per forward pass.
        document_masking: True to let tokens attend only to their own document; None uses the
            setting from training. In conversation data, documents never attend to each other.
        device: "auto", "cpu", "cuda", ...; a model that is already loaded stays on its device.
        on_rows: function that is called after each batch with the number of completed rows and the
            total number of rows.

    Raises:
        ConfigError: sample, seed, seq_len, batch_size or device is invalid.
        DataError: the data is missing or damaged, or was prepared with a different tokenizer.
        ModelError, CheckpointError: the model is unusable.
    """
    given = {"seq_len": seq_len, "batch_size": batch_size, "sample": sample, "seed": seed}
    for (name, value), minimum in zip(given.items(), (1, 1, 2, 0), strict=True):
        if value is not None and value < minimum:
            raise ConfigError(f"{name} must be at least {minimum}, not {value}")
    loaded = loaded_for_evaluation(checkpoint, device)
    dataset = open_evaluated_split(loaded, data, split)
    options = options_of_training(loaded, dataset, seq_len, document_masking)
    require_context(loaded, options["seq_len"])
    options |= {"batch_size": batch_size, "on_rows": on_rows}
    total = dataset.num_rows(options["seq_len"])
    rows = None if sample is None else sampled_rows(total, sample, seed)
    losses = row_losses(loaded.model)
    result = evaluate_split(losses, dataset, rows=rows, drawn=rows is not None, **options)
    require_finite(loaded, finite=math.isfinite(result.loss))
    return result


#: Number of ranges into which the positions are divided.
_STRETCHES = 16


@dataclass(frozen=True)
class PositionLoss:
    """The mean loss of the tokens in a range of positions.

    Attributes:
        first, last: first and last position of the range. The position of a prediction is the
            zero-based position of its input token in the row. With document masking, it is the
            position in the document.
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
        seq_len: number of tokens per row.
        document_masking: True if tokens attended only to their own document.
        stretches: losses of the position ranges, in order of position.
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
    """Evaluate the loss by position, in 16 ranges of nearly equal length. Ranges without tokens are
    omitted.

    The arguments are the same as for `evaluate`. For a model with rotary position embeddings,
    `seq_len` may exceed the model's context length.

    Raises:
        ConfigError, DataError, ModelError, CheckpointError: see `evaluate`.
    """
    loaded = loaded_for_evaluation(checkpoint, device)
    dataset = open_evaluated_split(loaded, data, split)
    options = options_of_training(loaded, dataset, seq_len, document_masking)
    model, masking = loaded.model, options["document_masking"]
    length, limit = options["seq_len"], model.config.max_position_embeddings
    if length > limit and not model.config.has_rotary:
        raise ConfigError(
            f"seq_len {length} exceeds the context of {limit}, and {model.config.model_type} "
            "models have no positions beyond it: choose a smaller seq_len"
        )
    total = dataset.num_rows(length)
    rows = list(range(total)) if sample is None else sampled_rows(total, sample, seed)
    sums, counts = torch.zeros(length, dtype=torch.float64), torch.zeros(length, dtype=torch.int64)
    for start in range(0, len(rows), batch_size):
        part = rows[start : start + batch_size]
        batch = rows_to_batch(dataset, part, length, 0, document_masking=masking)
        found = _sums_by_position(model, *batch.to(options["device"]).inputs)
        sums, counts = sums + found[0], counts + found[1]
        if on_rows is not None:
            on_rows(start + len(part), len(rows))
    if not counts.any():
        raise DataError(f"the evaluated rows of {dataset.folder} contain no token to predict")
    require_finite(loaded, finite=bool(sums.isfinite().all()))
    return ByPosition(length, masking, _stretches(sums, counts))


@torch.no_grad()
@varying_lengths()
def _sums_by_position(
    model: Model, input_ids: Tensor, labels: Tensor, document_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return two tensors on the CPU with one value per position: the summed loss, fp64 [T], and the
    number of predicted tokens, int64 [T].

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
    """Divide the positions into ranges of nearly equal length, and return the loss of each range.
    The sums are the results of `_sums_by_position`, each [T].
    """
    number = min(_STRETCHES, len(sums))
    edges = [len(sums) * i // number for i in range(number + 1)]
    found = []
    for first, end in itertools.pairwise(edges):
        tokens = int(counts[first:end].sum())
        if tokens:
            loss = float(sums[first:end].sum()) / tokens
            found.append(PositionLoss(first, end - 1, tokens, loss, perplexity=perplexity_of(loss)))
    return found

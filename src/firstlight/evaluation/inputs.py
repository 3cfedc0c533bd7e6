"""Loads the model and the data of an evaluation, and derives its options from training."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Required, TypedDict

import torch

from firstlight.checkpoint.manifest import require_kept
from firstlight.checkpoint.selection import read_model_folder, trained_on
from firstlight.data.corpus import TokenDataset
from firstlight.data.packing import open_split
from firstlight.data.remote import local_folder
from firstlight.errors import CheckpointError, DataError
from firstlight.generation.engine import tokenizer_of
from firstlight.hardware.device import find_hardware
from firstlight.lora.loading import LoadedModel, load_model


class RowOptions(TypedDict, total=False):
    """Options of `losses_of_rows` and `evaluate_split`.

    Attributes:
        seq_len: tokens of a row.
        batch_size: number of rows that are computed at a time; affects the speed only.
        device: device of the model.
        document_masking: True lets tokens attend only to their own document, as in training with
            `data.document_masking`.
        first_id: token id that is put before the split's very first token in order to predict that
            token, too, so that all bytes of the text count; None leaves that token out.
        on_rows: function that is called after each batch with the numbers of completed and of all
            rows.
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
    """Load a model in fp32 for an evaluation.

    Args:
        checkpoint: a folder or hub id as for `firstlight.load`.
        device: "auto", "cpu", "cuda", ...
        best: True takes a run folder's checkpoint with the lowest validation loss instead of the
            newest.

    Raises:
        ConfigError: the device does not exist, or `best` is True and `checkpoint` is no run folder.
        ModelError, CheckpointError: the model can't be used.
    """
    hardware = find_hardware(device)

    def read(folder: Path) -> LoadedModel:
        loaded = load_model(folder, hardware.device, dtype=torch.float32)
        # Read now, because an active run may delete the checkpoint later.
        try:
            return dataclasses.replace(loaded, trained_on=trained_on(folder))
        except CheckpointError:
            require_kept(folder)
            # The state is damaged: `_training_data` raises the error if it is needed.
            return loaded

    return read_model_folder(checkpoint, read, best=best)


def loaded_for_evaluation(checkpoint: str | Path | LoadedModel, device: str) -> LoadedModel:
    """The model itself if `checkpoint` is a loaded model, else the result of `load_for_evaluation`.

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
        DataError: the data consists of preference pairs; or see `evaluated_folder`.
    """
    folder = evaluated_folder(loaded, data, split)
    dataset = open_split(folder, split, long=_training_data(loaded).get("long") or "cut")
    if dataset.kind == "preference":
        raise DataError(
            f"{dataset.folder} holds preference pairs, whose loss is about two models: name text "
            "or conversations with --data"
        )
    return dataset


def _training_data(loaded: LoadedModel) -> Mapping[str, Any]:
    """The description of the data that the model was trained on; see `trained_on`.

    Raises:
        CheckpointError: the model's checkpoint is deleted or damaged.
    """
    return trained_on(loaded.folder) if loaded.trained_on is None else loaded.trained_on


def options_of_training(
    loaded: LoadedModel, dataset: TokenDataset, seq_len: int | None, document_masking: bool | None
) -> RowOptions:
    """The options of an evaluation; arguments that are None get the values of training.

    Args:
        loaded: the model.
        dataset: the split to evaluate.
        seq_len: tokens of a row; None is that of training, or else the context, 1,024 at most.
        document_masking: see `RowOptions`.

    Raises:
        ModelError, DataError: see `require_same_tokenizer`.
    """
    training_data = _training_data(loaded)
    limit = loaded.model.config.max_position_embeddings
    seq_len = seq_len or training_data.get("seq_len") or min(limit, 1024)
    if document_masking is None:
        document_masking = bool(training_data.get("document_masking"))
    require_same_tokenizer(loaded, dataset)
    return {
        "seq_len": seq_len,
        "batch_size": 1,
        "device": next(loaded.model.parameters()).device,
        "document_masking": document_masking or dataset.has_examples,
        "first_id": tokenizer_of(loaded).separator_id,
    }


def evaluated_folder(
    loaded: LoadedModel, data: str | Path | None, split: str, *, progress: bool = False
) -> Path:
    """The local folder of the data; data at a URL is downloaded.

    Args:
        loaded: the model.
        data: a prepared folder or its URL; None is the data that the model was trained on.
        split: name of the split that is needed.
        progress: show a progress bar of the download.

    Raises:
        DataError: `data` is None, and the model's training data is unknown or a mix of several; or
            the data can't be downloaded.
        MissingDependencyError, StorageError: see `remote.local_folder`.
    """
    trained = _training_data(loaded)
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
    """Refuse data that was prepared with another tokenizer than the model's.

    Raises:
        ModelError: the model has no tokenizer.
        DataError: the tokenizers differ, or the data has token ids beyond the model's vocabulary.
    """
    if tokenizer_of(loaded).fingerprint != dataset.manifest["tokenizer_sha256"]:
        raise DataError(
            f"{dataset.folder} was prepared with another tokenizer than that of {loaded.folder}: "
            f"prepare it again with --tokenizer {loaded.folder}"
        )
    if dataset.manifest["vocab_size"] > loaded.model.config.vocab_size:
        raise DataError(
            f"{dataset.folder} has ids up to {dataset.manifest['vocab_size'] - 1}, beyond the "
            f"vocabulary of {loaded.model.config.vocab_size} of {loaded.folder}"
        )

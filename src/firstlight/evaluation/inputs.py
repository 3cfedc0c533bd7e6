"""Model, data and options of an evaluation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Required, TypedDict

import torch

from firstlight.checkpoint.manifest import require_kept
from firstlight.checkpoint.selection import read_model_folder, trained_on
from firstlight.data.corpus import TokenDataset
from firstlight.data.examples import open_split
from firstlight.data.remote import local_folder
from firstlight.errors import CheckpointError, DataError
from firstlight.generation.engine import tokenizer_of
from firstlight.hardware.device import find_hardware
from firstlight.weights.huggingface import LoadedModel, load_model


class RowOptions(TypedDict, total=False):
    """Options of `losses_of_rows` and `evaluate_split`.

    Attributes:
        seq_len: tokens a row.
        batch_size: rows at a time; changes the speed only.
        device: device of the model.
        document_masking: True evaluates as training with `data.document_masking` trains.
        first_id: id from which the split's very first token is predicted too, so that every bit
            of the text counts; None leaves that token out.
        on_rows: called after each batch with the rows done and to do.
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
    """A model in fp32, as `evaluate` takes it.

    Args:
        checkpoint: a folder or hub id as for `firstlight.load`.
        device: "auto", "cpu", "cuda", ...
        best: True takes a run folder's checkpoint with the lowest validation loss, not the newest.

    Raises:
        ConfigError: there is no such device, or `best` is given without a run folder.
        ModelError, CheckpointError: the model can't be used.
    """
    hardware = find_hardware(device)

    def read(folder: Path) -> LoadedModel:
        loaded = load_model(folder, hardware.device, dtype=torch.float32)
        # Now: once a run has deleted the checkpoint it can't be told.
        try:
            return dataclasses.replace(loaded, trained_on=trained_on(folder))
        except CheckpointError:
            require_kept(folder)
            return loaded  # damaged: an error where it is needed

    return read_model_folder(checkpoint, read, best=best)


def loaded_for_evaluation(checkpoint: str | Path | LoadedModel, device: str) -> LoadedModel:
    """A model that is loaded already, once its files are seen to be unchanged; else as
    `load_for_evaluation`."""
    if not isinstance(checkpoint, LoadedModel):
        checkpoint = load_for_evaluation(checkpoint, device)
    checkpoint.require_unchanged()
    return checkpoint


def open_evaluated_split(loaded: LoadedModel, data: str | Path | None, split: str) -> TokenDataset:
    """The split to evaluate, which holds no preference pairs."""
    folder = evaluated_folder(loaded, data, split)
    dataset = open_split(folder, split, long=_training_data(loaded).get("long") or "cut")
    if dataset.kind == "preference":
        raise DataError(
            f"{dataset.folder} holds preference pairs, whose loss is about two models: name text "
            "or conversations with --data"
        )
    return dataset


def _training_data(loaded: LoadedModel) -> Mapping[str, Any]:
    """See `trained_on`.

    Raises:
        CheckpointError: the model's checkpoint has been deleted or damaged meanwhile.
    """
    return trained_on(loaded.folder) if loaded.trained_on is None else loaded.trained_on


def options_of_training(
    loaded: LoadedModel, dataset: TokenDataset, seq_len: int | None, document_masking: bool | None
) -> RowOptions:
    """Options with those of training where none are given."""
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
    """Refuse shards that were made with another tokenizer than the model's.

    Raises:
        ModelError: the model has no tokenizer.
        DataError: the tokenizers differ, or ids go beyond the model's vocabulary.
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

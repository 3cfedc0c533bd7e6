"""What a model made of preference pairs before it was trained on them: computed once, and kept.

    FIRSTLIGHT_CACHE (or XDG_CACHE_HOME/firstlight, or ~/.cache/firstlight) / references / KEY.json

KEY is of the pairs and their rows, the model's weights, and the precision it computes in. So a run
that goes on, or another one with the same start, reads them, and no second model is in memory
while one trains.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from firstlight.checkpoint.checkpoint import load_trainer_state
from firstlight.checkpoint.selection import resolve_model_folder
from firstlight.data.corpus import Corpus
from firstlight.data.examples import PreferenceDataset
from firstlight.data.loader import rows_to_batch
from firstlight.data.remote import cache_folder, held
from firstlight.efficiency import autocast, matmul_precision, resolve_precision
from firstlight.efficiency.attention import choose_attention
from firstlight.errors import CheckpointError, ConfigError, InputError, ModelError
from firstlight.files.atomic import make_folder, read_json, write_json
from firstlight.hardware.device import Hardware
from firstlight.lora.files import base_name
from firstlight.models import Model
from firstlight.recipe import PreferenceConfig, Recipe
from firstlight.training.preference import answer_log_probs
from firstlight.weights.huggingface import base_identity, load_model

#: Raise it when the same key is to stand for something else.
_VERSION = 1
_MAX_BYTES = 1 << 32


def for_pairs(recipe: Recipe, dataset: Corpus, start: str | Path | None) -> Recipe:
    """The recipe with what follows from data of preference pairs, or from other data.

    Args:
        start: the model or checkpoint that the run starts from.

    Raises:
        ConfigError: it has a `preference` section for other data, or starts from nothing.
    """
    if dataset.kind != "preference":
        if recipe.preference is not None:
            raise ConfigError(
                "the preference section is for pairs of answers: set data.kind preference, or "
                "leave it out"
            )
        return recipe
    if start is None:
        raise ConfigError(
            "preference pairs change a model that answers: name it with --init-from, after "
            "fine-tuning it on conversations (data.kind chat)"
        )
    data = recipe.data.model_copy(update={"kind": "preference"})
    section = recipe.preference or PreferenceConfig()
    return recipe.model_copy(update={"data": data, "preference": section})


def give_references(
    recipe: Recipe,
    splits: Sequence[Corpus | None],
    model: Model,
    newest: Path | None,
    init_from: str | Path | None,
    hardware: Hardware,
    tell: Callable[[str], None],
) -> None:
    """Give splits of preference pairs what the run's starting model makes of them.

    Args:
        recipe: see `take_references`.
        splits: of other data are left alone.
        model: that is about to be trained.
        newest: the checkpoint that the run goes on from; it names the starting model, which is
            loaded only if the cache has lost what it made.
        init_from: the model that a run begins with.

    Raises:
        CheckpointError: the starting model is needed, and gone or another by now.
        ModelError, StorageError: see `take_references`.
    """
    pairs = [split for split in splits if isinstance(split, PreferenceDataset)]
    if not pairs:
        return

    def starting_model() -> Model:
        return model if newest is None else _loaded_again(newest, start)

    if newest is None:
        assert init_from is not None
        folder = resolve_model_folder(init_from)
        start = {"name": base_name(init_from, folder), "sha256": base_identity(folder)}
    else:
        start = load_trainer_state(newest).get("data", {}).get("reference") or {}
    for split in pairs:
        take_references(split, recipe, start.get("sha256", ""), starting_model, hardware, tell)
        split.reference_model = start


def _loaded_again(newest: Path, start: Mapping[str, str]) -> Model:
    """The model that a run started from."""
    name = start.get("name", "")
    advice = "which is needed again, since the cache has no reference of it"
    try:
        folder = resolve_model_folder(name)
        same = base_identity(folder) == start.get("sha256")
        loaded = load_model(folder, dtype=torch.float32, way="sequential").model
    except (ModelError, CheckpointError) as error:
        raise CheckpointError(f"{newest} started from {name}, {advice}: {error}") from error
    if not same:
        raise CheckpointError(
            f"{newest} started from {name}, {advice}: it is not the model that it was; put the "
            "old one back"
        )
    return loaded


def take_references(
    dataset: PreferenceDataset,
    recipe: Recipe,
    identity: str,
    model: Callable[[], Model],
    hardware: Hardware,
    tell: Callable[[str], None],
) -> None:
    """Give a split the log-probabilities of its answers, from the cache or the model.

    Any number of processes may ask at once: one of them computes.

    Args:
        dataset: gets its `references`.
        recipe: with its row length, precision and attention decided.
        identity: of the model, by its weights.
        model: gives it, in fp32, where it has to compute.
        hardware: to compute on.
        tell: called with each message for people.

    Raises:
        ModelError: they are not all finite.
        StorageError: the cache can't be written.
    """
    path = _place(dataset, recipe, identity, hardware)
    found = _read(path, dataset)
    if found is None:
        make_folder(path.parent)
        with held(path.with_suffix(".lock"), "computing the same references", False):
            found = _read(path, dataset)
            if found is None:
                tell(f"{dataset.split}: what the starting model makes of the pairs, once")
                found = reference_log_probs(dataset, recipe, model(), hardware)
                write_json(path, {"sha256": _digest(found), "log_probs": _as_list(found)})
    dataset.references = found


def _place(dataset: PreferenceDataset, recipe: Recipe, identity: str, hardware: Hardware) -> Path:
    manifest = json.dumps(dataset.manifest, sort_keys=True).encode()
    content = {
        "version": _VERSION,
        "pairs": [hashlib.sha256(manifest).hexdigest(), dataset.split],
        "rows": [recipe.data.seq_len, dataset.long],
        "model": identity,
        "computed": [recipe.efficiency.precision, hardware.device.type],
    }
    key = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]
    return cache_folder() / "references" / f"{key}.json"


def _read(path: Path, dataset: PreferenceDataset) -> npt.NDArray[np.float64] | None:
    """What a file of the cache holds; None where it is missing or damaged."""
    try:
        content = read_json(path, _MAX_BYTES)
        values = [np.nan if value is None else value for value in content["log_probs"]]
        result = np.array(values, dtype=np.float64)
        whole = _digest(result) == content["sha256"]
    except (InputError, KeyError, TypeError, ValueError):
        return None
    return result if whole and len(result) == len(dataset.lengths) else None


def _as_list(values: npt.NDArray[np.float64]) -> list[float | None]:
    return [None if np.isnan(value) else value for value in values.tolist()]


def _digest(values: npt.NDArray[np.float64]) -> str:
    return hashlib.sha256(values.astype("<f8").tobytes()).hexdigest()


@torch.no_grad()
def reference_log_probs(
    dataset: PreferenceDataset, recipe: Recipe, model: Model, hardware: Hardware
) -> npt.NDArray[np.float64]:
    """The log-probability of each example's answer [examples]; NaN of those that are left out.

    Raises:
        ModelError: one is not finite.
    """
    seq_len, config = recipe.data.seq_len, recipe.efficiency
    assert seq_len is not None
    result = np.full(len(dataset.lengths), np.nan)
    model.to(hardware.device).eval()
    if config.attention != "auto":
        choose_attention(model, config.attention)
    rows, at_once = len(dataset.packing(seq_len)), recipe.batch.rows
    with (
        autocast(hardware.device, resolve_precision(config, hardware)),
        matmul_precision(config),
    ):
        for first in range(0, rows, at_once):
            part = list(range(first, min(first + at_once, rows)))
            batch = rows_to_batch(dataset, part, seq_len, 0, document_masking=True)
            batch = batch.to(hardware.device)
            assert batch.document_ids is not None
            assert batch.references is not None
            logits = model(batch.input_ids, document_ids=batch.document_ids)
            width = batch.references.shape[1]
            found = answer_log_probs(logits, batch.labels, batch.document_ids, width)
            for row, values in zip(part, found.double().cpu().numpy(), strict=True):
                examples = dataset.examples_of_row(row, seq_len)
                result[examples] = values[: len(examples)]
    learned = np.isin(np.arange(len(result)) // 2, dataset.packing(seq_len).examples)
    if not np.isfinite(result[learned]).all():
        raise ModelError(
            "the model that the run starts from makes no finite numbers of the pairs: its weights "
            "are not all finite"
        )
    return result

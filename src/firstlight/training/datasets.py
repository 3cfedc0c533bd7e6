"""The data of a run: one prepared corpus or a mix of several, here or behind a URL."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from firstlight.data.mixing import Corpus, MixedDataset, rows_per_epoch, whole_weights
from firstlight.data.remote import is_url, local_folder
from firstlight.data.shards import TokenDataset
from firstlight.evaluation.mixed import mixed_evaluation
from firstlight.evaluation.perplexity import Evaluation, bits_a_nat
from firstlight.training.config import DataConfig
from firstlight.training.program import TrainingProgram
from firstlight.training.validation import validation_loss

Dataset = TokenDataset | MixedDataset


def open_splits(
    data: DataConfig, tell: Callable[[str], None], *, progress: bool = False
) -> tuple[Dataset, Dataset | None]:
    """(training split, validation split) of a recipe's `data` section; without any validation
    split, None.

    Args:
        tell: called with each message for people.
        progress: show a progress bar while something is fetched.

    Raises:
        DataError: a corpus is missing or damaged, or does not fit the others.
        MissingDependencyError, StorageError: see `remote.local_folder`.
    """
    names, folders = [], []
    for name, location in _locations(data):
        if is_url(location):
            tell(f"data from {location}: fetching what is not in the cache")
        names.append(name)
        folders.append(
            local_folder(location, ("train", "val"), verify=data.verify, progress=progress)
        )
    train = [TokenDataset(folder, "train", verify=data.verify) for folder in folders]
    held_out = [
        TokenDataset(one.folder, "val", verify=data.verify)
        if "val" in one.manifest["splits"]
        else None
        for one in train
    ]
    without = [str(one.folder) for one, val in zip(train, held_out, strict=True) if val is None]
    if len(without) == len(train):
        have = "has" if len(without) == 1 else "have"
        tell(f"{', '.join(without)} {have} no validation split: there will be no val/loss")
    elif without:
        tell(f"without a validation split, and not part of val/loss: {', '.join(without)}")
    if data.mix is None:
        return train[0], held_out[0]
    parts = whole_weights([entry.weight for entry in data.mix])
    mixed = [Corpus(*corpus) for corpus in zip(names, train, parts, strict=True)]
    evaluated = [
        Corpus(name, split, part)
        for name, split, part in zip(names, held_out, parts, strict=True)
        if split is not None
    ]
    return MixedDataset(mixed), MixedDataset(evaluated) if evaluated else None


def _locations(data: DataConfig) -> Iterator[tuple[str, str]]:
    """(name, folder or URL) of each corpus."""
    for entry in data.mix or ():
        yield entry.label, entry.dir
    if data.dir is not None:
        yield "", data.dir


def origin(data: DataConfig, dataset: Dataset) -> dict[str, Any]:
    """What a run's data identity has beside `state.data_identity`: of a mix the weights and the
    folders, of a URL the URL."""
    if isinstance(dataset, MixedDataset):
        corpora = {
            name: location if is_url(location) else str(Path(location).expanduser().resolve())
            for name, location in _locations(data)
        }
        return {"dir": None, "mix": dataset.ratio, "corpora": corpora}
    return {"dir": data.dir} if data.dir is not None and is_url(data.dir) else {}


def describe_mix(dataset: MixedDataset, seq_len: int, rows: int) -> str:
    """What `rows` rows of a mix are, for people."""
    counts, epochs = dataset.rows_by_corpus(rows), dataset.epochs_by_corpus(rows, seq_len)
    shares = ", ".join(
        f"{corpus.name} {corpus.part / dataset.turns.period:.1%} ({counts[corpus.name]:,} rows, "
        f"{epochs[corpus.name]:.3g} of its epochs)"
        for corpus in dataset.corpora
    )
    total = rows_per_epoch(dataset, seq_len)
    return f"{rows:,} rows of a mix of {total:,}: {shares}"


def evaluate_validation(
    program: TrainingProgram, dataset: Dataset, seq_len: int, check: Callable[[], None]
) -> tuple[Evaluation, dict[str, Evaluation]]:
    """(the loss on the validation split, that on each corpus of a mix by its name).

    Of a mix, `evaluation.max_rows` is for each corpus, and the loss is their mean by weight:
    see `mixed_evaluation`.

    Args:
        program, seq_len, check: see `validation_loss`.

    Raises:
        DivergedError: a loss is not finite.
    """
    if isinstance(dataset, TokenDataset):
        return validation_loss(program, dataset, seq_len, check), {}
    found = {
        corpus.name: validation_loss(program, corpus.dataset, seq_len, check)
        for corpus in dataset.corpora
    }
    masking = program.recipe.data.document_masking
    together = mixed_evaluation(
        [corpus.part for corpus in dataset.corpora],
        list(found.values()),
        [bits_a_nat(one, document_masking=masking) for one in dataset.datasets],
    )
    return together, found

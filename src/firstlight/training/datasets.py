"""Open the data of a run. The data can be a prepared corpus in a folder or at a URL, a mix of
several corpora, or files of conversations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from firstlight.data.chat import ChatOptions, cached_chat
from firstlight.data.corpus import (
    Corpus,
    CorpusPart,
    MixedDataset,
    ReplayedDataset,
    TokenDataset,
    require_same_tokenizer,
    whole_weights,
)
from firstlight.data.packing import open_split, open_training_split
from firstlight.data.remote import is_url, local_folder
from firstlight.data.shards import manifest_digest
from firstlight.errors import ConfigError, DataError
from firstlight.recipe import DataConfig, ResolvedRecipe
from firstlight.tokenizer import Tokenizer


def open_splits(
    data: DataConfig,
    tell: Callable[[str], None],
    *,
    tokenizer: Callable[[], Path] | None = None,
    progress: bool = False,
    reports_missing: bool = True,
) -> tuple[Corpus, Corpus | None]:
    """Open the splits of a recipe's `data` section. Return the training split and the validation
    split. The validation split is None if there is none.

    Args:
        data: the recipe's `data` section.
        tell: called with each message to the user.
        tokenizer: function that returns the folder of the tokenizer for the conversations in
            `data.files`. It is called if the section does not name a tokenizer. None if the run
            does not start from a model with a tokenizer.
        progress: True to show a progress bar while data is downloaded or prepared.
        reports_missing: True to tell the user which corpora do not have a validation split.

    Raises:
        DataError: a corpus is missing or damaged, or does not match the other corpora.
        ConfigError: `files` is set, but there is no tokenizer.
        InputError, TokenizerError: see `prepare_chat`.
        MissingDependencyError, StorageError: see `remote.local_folder`.
    """
    names, folders = [], []
    if data.files is not None:
        names.append("")
        folders.append(_prepared(data, tell, tokenizer, progress=progress))
    for name, location in _locations(data):
        if is_url(location):
            tell(f"data from {location}: downloading the files that are not in the cache")
        folder = local_folder(location, ("train", "val"), verify=data.verify, progress=progress)
        names.append(name)
        folders.append(folder)
    train = [
        open_training_split(
            folder, verify=data.verify, long=data.long, row_alignment=data.row_alignment
        )
        for folder in folders
    ]
    if data.kind is not None:
        _require_kind(data.kind, train)
    elif data.mix is not None and any(one.kind == "preference" for one in train):
        raise DataError("preference pairs can't be mixed: set data.dir to the folder of one corpus")
    held_out = [
        open_split(one.folder, "val", verify=data.verify, long=data.long)
        if "val" in one.manifest["splits"]
        else None
        for one in train
    ]
    # Show a message rather than raise an error, because a corpus may contain only training data.
    if reports_missing:
        _report_missing(train, held_out, tell)
    if data.mix is None:
        return train[0], held_out[0]
    parts = whole_weights([entry.weight for entry in data.mix])
    mixed = [CorpusPart(*part) for part in zip(names, train, parts, strict=True)]
    evaluated = [
        CorpusPart(name, split, part)
        for name, split, part in zip(names, held_out, parts, strict=True)
        if split is not None
    ]
    return MixedDataset(mixed), MixedDataset(evaluated) if evaluated else None


def with_kept_text(
    data: DataConfig, train: Corpus, *, progress: bool = False
) -> tuple[Corpus, Corpus | None]:
    """Open the text in `data.keep`. Return the training split with the rows of kept text that
    `data.replay` adds to it, and the validation split of the kept text, or None without `keep`.

    Args:
        data: the recipe's `data` section.
        train: training split of the new data.
        progress: True to show a progress bar while data is downloaded.

    Raises:
        DataError: the kept data is missing or damaged, does not consist of text, lacks a split, or
            was prepared with a different tokenizer than `train`.
    """
    if data.keep is None:
        return train, None
    folder = local_folder(data.keep, ("train", "val"), verify=data.verify, progress=progress)
    kept = TokenDataset(folder, "val", verify=data.verify)
    new = train.parts[0].dataset
    if train.kind == "preference" or data.replay == 0:
        require_same_tokenizer(new, kept)
        return train, kept
    replayed = open_training_split(
        folder, verify=data.verify, long=data.long, row_alignment=data.row_alignment
    )
    if replayed.manifest == new.manifest:
        raise DataError(f"the kept text in {folder} is the new text: keep another text")
    return ReplayedDataset(new, replayed, data.replay), kept


def _report_missing(
    train: Sequence[TokenDataset],
    held_out: Sequence[TokenDataset | None],
    tell: Callable[[str], None],
) -> None:
    """Tell the user which corpora do not have a validation split."""
    without = [str(one.folder) for one, val in zip(train, held_out, strict=True) if val is None]
    if len(without) == len(train):
        have = "has" if len(without) == 1 else "have"
        tell(
            f"{', '.join(without)} {have} no validation split, so the run does not report val/loss"
        )
    elif without:
        tell(f"not included in val/loss, without a validation split: {', '.join(without)}")


def _prepared(
    data: DataConfig,
    tell: Callable[[str], None],
    tokenizer: Callable[[], Path] | None,
    *,
    progress: bool,
) -> Path:
    """Return the cache folder that contains the prepared conversations of `data.files`."""
    if data.tokenizer:
        place = Path(data.tokenizer).expanduser()
    elif tokenizer is not None:
        place = tokenizer()
    else:
        raise ConfigError(
            "conversations need a tokenizer: start from a model with --init-from, or set "
            "data.tokenizer to a tokenizer's folder"
        )
    return cached_chat(
        data.files or (),
        data.val_files or (),
        Tokenizer.from_pretrained(place),
        data.template,
        options=ChatOptions(
            "preference" if data.kind == "preference" else "chat",
            data.format,
            data.train_on,
            data.on_bad,
            val_fraction=0.0 if data.val_files else data.val_fraction,
        ),
        tell=tell,
        where=str(place),
        verify=data.verify,
        progress=progress,
    )


def _require_kind(kind: str, splits: Sequence[TokenDataset]) -> None:
    for one in splits:
        if one.kind != kind:
            advice = f"set data.kind to {one.kind}, or omit it"
            if one.kind == "text":
                advice = f"prepare it with --kind {kind}, or list conversations in data.files"
            raise DataError(f"data.kind is {kind}, but {one.folder} contains {one.kind}: {advice}")


def _locations(data: DataConfig) -> Iterator[tuple[str, str]]:
    """Yield the name and the folder or URL of each corpus."""
    for entry in data.mix or ():
        yield entry.label, entry.dir
    if data.dir is not None:
        yield "", data.dir


def data_identity(recipe: ResolvedRecipe, dataset: Corpus, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return JSON values that identify a run's data. A run can't be resumed on different data.

    For a mix, the identity includes the weights and folders of its corpora. For a remote corpus, it
    includes the URL. It also includes the way in which overlong conversations are handled and, for
    preference pairs, the reference model.

    Args:
        recipe: recipe of the run.
        dataset: training split.
        tokenizer: tokenizer of the data.
    """
    data = recipe.data
    identity: dict[str, Any] = {
        "dir": str(dataset.folder.resolve()),
        "seq_len": data.seq_len,
        "document_masking": data.document_masking,
        "manifest_sha256": manifest_digest(dataset.manifest),
        "tokenizer_sha256": tokenizer.fingerprint,
    }
    if data.mix is not None:
        identity["dir"] = None
        identity["corpora"] = {
            name: location if is_url(location) else str(Path(location).expanduser().resolve())
            for name, location in _locations(data)
        }
    elif data.dir is not None and is_url(data.dir):
        # Identify the data by its URL, because the path of the cache folder differs between
        # machines.
        identity["dir"] = data.dir
    if data.keep is not None:
        keep = data.keep
        identity["keep"] = keep if is_url(keep) else str(Path(keep).expanduser().resolve())
    return identity | dataset.identity()

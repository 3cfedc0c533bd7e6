"""The data of a run: one prepared corpus or a mix of several, here or behind a URL; or files of
conversations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from firstlight.data.chat import ChatOptions
from firstlight.data.chat_cache import cached_chat
from firstlight.data.conversations import REASONS
from firstlight.data.examples import ExampleDataset, PreferenceDataset, open_split
from firstlight.data.mixing import (
    Corpus,
    MixedDataset,
    datasets_in,
    rows_per_epoch,
    whole_weights,
)
from firstlight.data.prepare import REJECTED_NAME
from firstlight.data.remote import is_url, local_folder
from firstlight.data.shards import TokenDataset
from firstlight.errors import ConfigError, DataError
from firstlight.evaluation.mixed import mixed_evaluation
from firstlight.evaluation.perplexity import Evaluation, bits_a_nat
from firstlight.tokenizer import Tokenizer
from firstlight.training.config import DataConfig
from firstlight.training.program import TrainingProgram
from firstlight.training.validation import split_loss

Dataset = TokenDataset | MixedDataset


def open_splits(
    data: DataConfig,
    tell: Callable[[str], None],
    *,
    tokenizer: Callable[[], Path] | None = None,
    progress: bool = False,
) -> tuple[Dataset, Dataset | None]:
    """(training split, validation split) of a recipe's `data` section; without any validation
    split, None.

    Args:
        tell: called with each message for people.
        tokenizer: gives the folder of the one for `files` where the section names none.
        progress: show a progress bar while something is fetched or prepared.

    Raises:
        DataError: a corpus is missing or damaged, or does not fit the others.
        ConfigError: `files` without a tokenizer.
        InputError, TokenizerError: see `prepare_chat`.
        MissingDependencyError, StorageError: see `remote.local_folder`.
    """
    names, folders = [], []
    if data.files is not None:
        names.append("")
        folders.append(_prepared(data, tell, tokenizer, progress=progress))
    for name, location in _locations(data):
        if is_url(location):
            tell(f"data from {location}: fetching what is not in the cache")
        names.append(name)
        folders.append(
            local_folder(location, ("train", "val"), verify=data.verify, progress=progress)
        )
    train = [open_split(folder, "train", verify=data.verify, long=data.long) for folder in folders]
    if data.kind is not None:
        _require_kind(data.kind, train)
    elif data.mix is not None and any(isinstance(one, PreferenceDataset) for one in train):
        raise DataError("preference pairs can't be mixed: name their folder as data.dir")
    held_out = [
        open_split(one.folder, "val", verify=data.verify, long=data.long)
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


def _prepared(
    data: DataConfig,
    tell: Callable[[str], None],
    tokenizer: Callable[[], Path] | None,
    *,
    progress: bool,
) -> Path:
    """The folder of the cache with the conversations of `files`."""
    if data.tokenizer is None and tokenizer is None:
        raise ConfigError(
            "conversations need a tokenizer: start from a model with --init-from, or name the "
            "folder of one as data.tokenizer"
        )
    place = Path(data.tokenizer).expanduser() if data.tokenizer else None
    if place is None:
        assert tokenizer is not None
        place = tokenizer()
    return cached_chat(
        data.files or (),
        data.val_files or (),
        Tokenizer.from_pretrained(place),
        data.template,
        ChatOptions(
            "preference" if data.kind == "preference" else "chat",
            data.format,
            data.train_on,
            data.on_bad,
            0.0 if data.val_files else data.val_fraction,
        ),
        tell,
        where=str(place),
        verify=data.verify,
        progress=progress,
    )


def _require_kind(kind: str, datasets: Sequence[TokenDataset]) -> None:
    for one in datasets:
        found = "text"
        if isinstance(one, ExampleDataset):
            found = "preference" if isinstance(one, PreferenceDataset) else "chat"
        if found != kind:
            advice = f"set data.kind {found}, or leave it out"
            if found == "text":
                advice = f"prepare it with --kind {kind}, or name conversations as data.files"
            raise DataError(f"data.kind is {kind}, and {one.folder} holds {found}: {advice}")


def has_examples(dataset: Dataset) -> bool:
    """Whether there are conversations in it."""
    return any(isinstance(one, ExampleDataset) for one in datasets_in(dataset))


def describe_examples(dataset: Dataset, validation: Dataset | None, seq_len: int) -> Iterator[str]:
    """What a run sees of conversations, and what of them it does not, for people."""
    for split in (dataset, validation):
        for one in datasets_in(split) if split is not None else ():
            if isinstance(one, ExampleDataset):
                yield from _describe_examples(one, seq_len)


def _describe_examples(dataset: ExampleDataset, seq_len: int) -> Iterator[str]:
    packing, name = dataset.packing(seq_len), f"data: {dataset.split}"
    what = "preference pairs" if isinstance(dataset, PreferenceDataset) else "conversations"
    yield (
        f"{name}: {len(packing.examples):,} {what} in {len(packing):,} rows of {seq_len}, "
        f"{packing.filled:.1%} filled; {packing.num_learned:,} tokens to learn"
    )
    total = dataset.num_documents // dataset.together
    if packing.dropped:
        yield f"{name}: {packing.dropped:,} of {total:,} {what} are too long and left out"
    if packing.cut:
        yield f"{name}: {packing.cut:,} of {total:,} {what} are too long and cut"
    if dataset.split != "train":
        return
    documents, chat = dataset.manifest["documents"], dataset.manifest["chat"]
    for reason, count in documents["rejected"].items():
        yield (
            f"{name}: {count:,} of {documents['read']:,} records left out: {REASONS[reason]}; "
            f"listed in {dataset.folder / REJECTED_NAME}"
        )
    if chat["torn_answers"]:
        yield (
            f"{name}: {chat['torn_answers']:,} answers begin inside a token that begins in the "
            "prompt; that token is not learned"
        )
    if chat.get("warning"):
        yield f"warning: {chat['warning']}"


def learned_share(dataset: Dataset, seq_len: int) -> float:
    """Of the tokens of a run's sequences, the share that is learned: of text all, of conversations
    what the assistant says beside prompts and padding."""
    if isinstance(dataset, MixedDataset):
        return sum(
            corpus.part / dataset.turns.period * learned_share(corpus.dataset, seq_len)
            for corpus in dataset.corpora
        )
    if not isinstance(dataset, ExampleDataset):
        return 1.0
    packing = dataset.packing(seq_len)
    return packing.num_learned / (len(packing) * seq_len)


def record_of_examples(
    dataset: Dataset, validation: Dataset | None, seq_len: int
) -> list[dict[str, Any]]:
    """What a run's record has of its conversations: see `Packing.record`."""
    return [
        {
            "dir": str(one.folder),
            "split": one.split,
            "long": one.long,
            **one.packing(seq_len).record(),
            **({"records": one.manifest["documents"]} if one.split == "train" else {}),
            **one.manifest["chat"],
        }
        for split in (dataset, validation)
        if split is not None
        for one in datasets_in(split)
        if isinstance(one, ExampleDataset)
    ]


def _locations(data: DataConfig) -> Iterator[tuple[str, str]]:
    """(name, folder or URL) of each corpus."""
    for entry in data.mix or ():
        yield entry.label, entry.dir
    if data.dir is not None:
        yield "", data.dir


def origin(data: DataConfig, dataset: Dataset) -> dict[str, Any]:
    """What a run's data identity has beside `state.data_identity`: of a mix the weights and the
    folders, of a URL the URL, of conversations what happens to long ones, of preference pairs the
    model that they refer to."""
    long: dict[str, Any] = {"long": data.long} if has_examples(dataset) else {}
    if isinstance(dataset, PreferenceDataset):
        long["reference"] = dataset.reference_model
    if isinstance(dataset, MixedDataset):
        corpora = {
            name: location if is_url(location) else str(Path(location).expanduser().resolve())
            for name, location in _locations(data)
        }
        return {"dir": None, "mix": dataset.ratio, "corpora": corpora, **long}
    url = {"dir": data.dir} if data.dir is not None and is_url(data.dir) else {}
    return url | long


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


def evaluate_dataset(
    program: TrainingProgram,
    dataset: Dataset,
    seq_len: int,
    check: Callable[[], None],
    *,
    key: str,
    max_rows: int,
) -> tuple[Evaluation, dict[str, Evaluation]]:
    """(the loss on a split, that on each corpus of a mix by its name).

    Of a mix, `max_rows` is for each corpus, and the loss is their mean by weight: see
    `mixed_evaluation`.

    Args:
        program, seq_len, check, key, max_rows: see `split_loss`.

    Raises:
        DivergedError: a loss is not finite.
    """

    def loss_of(one: TokenDataset) -> Evaluation:
        return split_loss(program, one, seq_len, check, key=key, max_rows=max_rows)

    if isinstance(dataset, TokenDataset):
        return loss_of(dataset), {}
    found = {corpus.name: loss_of(corpus.dataset) for corpus in dataset.corpora}
    masking = program.recipe.data.document_masking
    together = mixed_evaluation(
        [corpus.part for corpus in dataset.corpora],
        list(found.values()),
        [bits_a_nat(one, document_masking=masking) for one in dataset.datasets],
    )
    return together, found

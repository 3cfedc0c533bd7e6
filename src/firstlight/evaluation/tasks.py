"""Loads tasks by name (`hellaswag`, `hellaswag,FILE.jsonl`, `lm-eval:NAME,...`), and implements
HellaSwag (Zellers et al. 2019): its items, and a model's choice among the endings of each item."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from firstlight.errors import ConfigError, InputError, MissingDependencyError, nearest
from firstlight.evaluation.inputs import loaded_for_evaluation
from firstlight.evaluation.scores import (
    Metric,
    Progress,
    Task,
    TaskResult,
    TokenPair,
    encode_choices,
    likelihoods,
    mean_and_error,
)
from firstlight.files.atomic import read_file
from firstlight.generation.engine import tokenizer_of
from firstlight.hardware.environment import sharing_cores
from firstlight.lora.loading import LoadedModel
from firstlight.models import Model
from firstlight.tokenizer import Tokenizer

HELLASWAG = "hellaswag"
HARNESS = "lm-eval:"


@dataclass(frozen=True)
class HellaSwag:
    """HellaSwag's items, with the result of `encode_items` for a model; see `scores.Task`."""

    items: Sequence[Item]
    pairs: Sequence[TokenPair]

    def evaluate(
        self, loaded: LoadedModel, *, batch_size: int, on_texts: Progress | None = None
    ) -> list[TaskResult]:
        """The metrics `acc` and `acc_norm`; see `scores.Task.evaluate`."""
        answers = answer_items(
            loaded.model, self.items, self.pairs, batch_size=batch_size, on_pairs=on_texts
        )
        return [TaskResult(HELLASWAG, accuracies(answers), len(answers))]


def ready_tasks(
    tasks: Sequence[str],
    loaded: LoadedModel,
    *,
    items: int | None = None,
    task_folder: str | Path | None = None,
) -> list[Task]:
    """Load tasks by name and check them, so that they only have to be scored.

    Args:
        tasks: each `hellaswag`, `hellaswag,FILE.jsonl` or `lm-eval:NAME,...`. `hellaswag` without a
            file loads its data from the Hugging Face hub.
        loaded: a model with the context length and the tokenizer of the models that will be scored.
        items: number of items of each task, the first ones; None is all.
        task_folder: folder with further tasks for lm-evaluation-harness.

    Raises:
        ConfigError: a name is unknown or given twice, or `items` is less than 1.
        InputError: a file is missing, a line of it is not an item (the message names it), or data
            can't be read.
        MissingDependencyError: lm-evaluation-harness is not installed.
        ModelError: the model has no tokenizer.
    """
    if items is not None and items < 1:
        raise ConfigError(f"items must be at least 1, not {items}")
    names = [_names(text) for text in tasks]
    flat = [name for _, several in names for name in several]
    for name in flat:
        if flat.count(name) > 1:
            raise ConfigError(
                f"tasks: two are called {name}, whatever their files are: evaluate them one after "
                "the other"
            )
    found: list[Task] = []
    for text, (kind, several) in zip(tasks, names, strict=True):
        if kind == HELLASWAG:
            file = text.partition(",")[2]
            found.append(_hellaswag(Path(file).expanduser() if file else None, loaded, items))
        else:
            from firstlight.evaluation.harness import ready_harness

            found.append(ready_harness(several, items=items, task_folder=task_folder))
    return found


def _names(text: str) -> tuple[str, list[str]]:
    """The kind of a task (`HELLASWAG` or `HARNESS`), and the names of its results."""
    if text.startswith(HARNESS):
        names = [name.strip() for name in text.removeprefix(HARNESS).split(",")]
        if not all(names):
            raise ConfigError(f"task '{text}' names none: give lm-eval:NAME or lm-eval:NAME,NAME")
        return HARNESS, names
    name, comma, file = text.partition(",")
    if name != HELLASWAG:
        raise ConfigError(
            f"task '{text}' is unknown{nearest(name, [HELLASWAG])} (known: hellaswag, "
            "hellaswag,FILE.jsonl, and lm-eval:NAME for those of lm-evaluation-harness)"
        )
    if comma and not file:
        raise ConfigError(f"task '{text}' names no file: give hellaswag,FILE.jsonl or hellaswag")
    return HELLASWAG, [HELLASWAG]


def _hellaswag(path: Path | None, loaded: LoadedModel, limit: int | None) -> HellaSwag:
    items = hub_hellaswag(limit) if path is None else read_hellaswag(path, limit)
    context = loaded.model.config.max_position_embeddings
    where = HUB_ID if path is None else str(path)
    return HellaSwag(items, encode_items(items, tokenizer_of(loaded), context, where))


@sharing_cores()
def evaluate_tasks(
    checkpoint: str | Path | LoadedModel,
    tasks: str | Sequence[str],
    *,
    items: int | None = None,
    task_folder: str | Path | None = None,
    batch_size: int = 32,
    device: str = "auto",
    on_texts: Progress | None = None,
) -> list[TaskResult]:
    """Score a model in tasks, in fp32.

    Args:
        checkpoint: a folder or hub id as for `firstlight.load`, or the model that it returned.
        tasks: see `ready_tasks`; a single string is one task.
        items: number of items of each task, the first ones; see `ready_tasks`.
        task_folder: folder with further tasks; see `ready_tasks`.
        batch_size: number of texts that are computed at a time; affects the speed only.
        device: "auto", "cpu", "cuda", ...; a model that is already loaded stays on its device.
        on_texts: function that is called after each batch with the numbers of scored and of all
            texts of the current task.

    Returns:
        The results in the order of the tasks.

    Raises:
        ConfigError, InputError, MissingDependencyError: see `ready_tasks`.
        ModelError, CheckpointError: the model can't be used.
    """
    if batch_size < 1:
        raise ConfigError(f"batch_size must be at least 1, not {batch_size}")
    loaded = loaded_for_evaluation(checkpoint, device)
    names = [tasks] if isinstance(tasks, str) else list(tasks)
    ready = ready_tasks(names, loaded, items=items, task_folder=task_folder)
    return [
        result
        for task in ready
        for result in task.evaluate(loaded, batch_size=batch_size, on_texts=on_texts)
    ]


#: Id of the data set on the Hugging Face hub, as in lm-evaluation-harness.
HUB_ID = "Rowan/hellaswag"
#: Largest accepted size of a file in bytes; the largest of HellaSwag, the training split, has
#: 48 MB.
_MAX_BYTES = 1 << 30
#: Limits of an item: bytes of its line, and endings. HellaSwag's have up to 3 KB, and 4 endings.
_MAX_LINE_BYTES, _MAX_ENDINGS = 1 << 16, 100


def read_hellaswag(path: Path, limit: int | None = None) -> list[Item]:
    """The items of a JSON-lines file.

    A line is an object with `endings`, `label`, the context as `ctx` or as the original data set's
    `ctx_a` and `ctx_b`, and optionally `activity_label`.

    Args:
        path: the file; empty lines are skipped.
        limit: number of items that are read, the first ones; None is all.

    Raises:
        InputError: the file can't be read or has no items, or a line is no such object (the message
            names it).
    """
    items: list[Item] = []
    for number, line in enumerate(io.BytesIO(read_file(path, _MAX_BYTES)), start=1):
        if limit is not None and len(items) == limit:
            break
        if not line.strip():
            continue
        try:
            if len(line) > _MAX_LINE_BYTES:
                raise ValueError(f"it has {len(line):,} bytes, more than {_MAX_LINE_BYTES:,}")
            items.append(item_of(json.loads(line.decode("utf-8"))))
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}:{number} is no HellaSwag item: {error}") from error
    if not items:
        raise InputError(f"{path} holds no items")
    return items


def hub_hellaswag(limit: int | None = None) -> list[Item]:
    """The items of the validation split, from the Hugging Face hub or the cache of `datasets`.

    Args:
        limit: number of items, the first ones; None is all.

    Raises:
        MissingDependencyError: `datasets` is not installed.
        InputError: the data can't be loaded, or has other fields.
    """
    try:
        import datasets
    except ImportError as error:
        raise MissingDependencyError(
            "datasets", "data", "hellaswag without a file (hellaswag,FILE.jsonl)"
        ) from error
    try:
        rows: Iterable[Mapping[str, Any]] = datasets.load_dataset(HUB_ID, split="validation")
        if limit is not None:
            rows = rows.select(range(min(limit, len(rows))))  # type: ignore[attr-defined, arg-type]
        return [item_of(row) for row in rows]
    except Exception as error:
        # `datasets` raises errors of its own, of its HTTP library and of the file system.
        raise InputError(
            f"{HUB_ID} can't be had from the hub ({type(error).__name__}: {str(error)[:200]}): "
            "give a file: --tasks hellaswag,FILE.jsonl"
        ) from error


def item_of(row: Any) -> Item:
    """Format an item in the same way as lm-evaluation-harness (`tasks/hellaswag/utils.py`).

    The context is `activity_label: ctx_a Ctx_b`, where the second part is capitalized. For a row
    with only `ctx` it is `activity_label: ctx`, or `ctx` without an `activity_label`.

    Raises:
        ValueError: a field is missing or has another type; the message names it.
    """
    if not isinstance(row, Mapping):
        raise ValueError("it is no JSON object")
    if "ctx_a" in row or "ctx_b" in row:
        context = _text(row, "ctx_a") + " " + _text(row, "ctx_b").capitalize()
    else:
        context = _text(row, "ctx")
    if "activity_label" in row or "ctx_a" in row:
        context = _text(row, "activity_label") + ": " + context
    endings = row.get("endings")
    if not isinstance(endings, list) or not 2 <= len(endings) <= _MAX_ENDINGS:
        raise ValueError(f"endings must be a list of 2 to {_MAX_ENDINGS} texts")
    if not all(isinstance(ending, str) and _is_unicode(ending) for ending in endings):
        raise ValueError("endings must be texts")
    choices = tuple(cleaned(ending) for ending in endings)
    if not all(choices) or not cleaned(context):
        raise ValueError("the context or an ending is empty")
    return Item(cleaned(context), choices, _label(row.get("label"), len(choices)))


def cleaned(text: str) -> str:
    """A text without the markup in brackets that WikiHow's articles left in the data; the same as
    lm-evaluation-harness' `preprocess`."""
    text = text.strip().replace(" [title]", ". ")
    # Only up to the last "]" of a line: after it, the search from each "[" would run to the end of
    # the line in vain, which takes quadratic time.
    parts = (line.rpartition("]") for line in text.split("\n"))
    lines = (re.sub(r"\[.*?\]", "", head + end) + tail for head, end, tail in parts)
    return "\n".join(lines).replace("  ", " ")


def _text(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str) or not _is_unicode(value):
        raise ValueError(f"{name} must be a text" if name in row else f"{name} is missing")
    return value


def _is_unicode(text: str) -> bool:
    """True if the text has no single surrogate, which JSON can contain as an escape sequence."""
    return not any("\ud800" <= c <= "\udfff" for c in text)


def _label(value: Any, count: int) -> int:
    """The index of the correct ending; in the data set it is a string."""
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    if type(value) is not int or not 0 <= value < count:
        raise ValueError(f"label must be a number from 0 to {count - 1}, not {value!r:.40}")
    return value


@dataclass(frozen=True)
class Item:
    """An item: a context with several endings, of which one is correct.

    Attributes:
        context: the text to continue; not empty.
        choices: the endings, without the space before them; none of them is empty.
        gold: index of the correct ending.
    """

    context: str
    choices: tuple[str, ...]
    gold: int


@dataclass(frozen=True)
class Answer:
    """A model's answer to an item.

    Attributes:
        logprobs: log-probability of each ending after the context, in nats.
        acc: True if the correct ending has the highest log-probability.
        acc_norm: True if the correct ending has the highest log-probability per character.
    """

    logprobs: tuple[float, ...]
    acc: bool
    acc_norm: bool


def encode_items(
    items: Sequence[Item], tokenizer: Tokenizer, context_tokens: int, where: str
) -> list[TokenPair]:
    """Encode all endings of all items with their contexts, in order.

    Args:
        items: the items.
        tokenizer: the model's tokenizer.
        context_tokens: the model's context length in tokens.
        where: name of the items' source in messages.

    Raises:
        InputError: an ending is longer than the model's context, or adds no token to the item's
            context.
    """
    pairs: list[TokenPair] = []
    for number, item in enumerate(items, start=1):
        # One call for all endings, so that they share one tuple of the context's ids.
        encoded = encode_choices(tokenizer, item.context, [f" {c}" for c in item.choices])
        for pair in encoded:
            count = len(pair.continuation)
            if not 0 < count <= context_tokens:
                raise InputError(
                    f"{where}: an ending of item {number} has {count} tokens, and the model's "
                    f"context has room for 1 to {context_tokens}: leave the item out"
                )
        pairs += encoded
    return pairs


def answer_items(
    model: Model,
    items: Sequence[Item],
    pairs: Sequence[TokenPair],
    *,
    batch_size: int,
    on_pairs: Callable[[int, int], None] | None = None,
) -> list[Answer]:
    """A model's answer to each item.

    Args:
        model: a model in evaluation mode.
        items: the items.
        pairs: the result of `encode_items`.
        batch_size, on_pairs: see `likelihoods`.

    Raises:
        ModelError: the model's outputs are NaN or infinite.
    """
    scored = likelihoods(model, pairs, batch_size=batch_size, on_pairs=on_pairs)
    logprobs = iter([likelihood.logprob for likelihood in scored])
    return [_answer(item, tuple(next(logprobs) for _ in item.choices)) for item in items]


def _answer(item: Item, logprobs: tuple[float, ...]) -> Answer:
    """Compare the model's choice with the correct ending. The choice is the ending with the highest
    log-probability, the first one among equals, like numpy's argmax. As in lm-evaluation-harness,
    acc_norm divides log-probabilities by the number of characters."""
    per_character = [p / len(c) for p, c in zip(logprobs, item.choices, strict=True)]
    return Answer(
        logprobs,
        logprobs.index(max(logprobs)) == item.gold,
        per_character.index(max(per_character)) == item.gold,
    )


def accuracies(answers: Sequence[Answer]) -> dict[str, Metric]:
    """The metrics `acc` and `acc_norm`: the fractions of items that are answered correctly."""
    return {
        "acc": Metric(*mean_and_error([float(answer.acc) for answer in answers])),
        "acc_norm": Metric(*mean_and_error([float(answer.acc_norm) for answer in answers])),
    }

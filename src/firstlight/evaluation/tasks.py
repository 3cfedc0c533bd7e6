"""Load evaluation tasks by name (`hellaswag`, `hellaswag,FILE.jsonl`, `lm-eval:NAME,...`), and
score a model on them.

HellaSwag (Zellers et al. 2019) is implemented in this module, which reads the items and determines
which ending of each item a model chooses. All other tasks are part of lm-evaluation-harness (Gao et
al. 2024). The harness reads the items, formats the prompts and computes the metrics. For these
tasks, this module implements the harness's interface for models, which computes log-likelihoods and
generates continuations. Text is encoded in the same way as in the harness's transformers backend
(`HFLM`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
import os
import random
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from firstlight.console import say
from firstlight.errors import ConfigError, InputError, MissingDependencyError, nearest
from firstlight.evaluation.perplexity import loaded_for_evaluation
from firstlight.evaluation.scores import (
    Likelihood,
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
from firstlight.generation.batch import BatchDecoder
from firstlight.generation.config import SamplingConfig
from firstlight.generation.continuation import Continuation
from firstlight.generation.engine import continuation, pieces_of_many, tokenizer_of
from firstlight.hardware.environment import sharing_cores
from firstlight.lora.loading import LoadedModel
from firstlight.models import Model
from firstlight.tokenizer import Tokenizer

HELLASWAG = "hellaswag"
HARNESS = "lm-eval:"


@dataclass(frozen=True)
class HellaSwag:
    """The HellaSwag task, which implements `scores.Task`. `encode_items` encodes its items for a
    model.
    """

    items: Sequence[Item]
    pairs: Sequence[TokenPair]

    def evaluate(
        self, loaded: LoadedModel, *, batch_size: int, on_texts: Progress | None = None
    ) -> list[TaskResult]:
        """Score a model, like `scores.Task.evaluate`. The metrics are `acc` and `acc_norm`."""
        answers = answer_items(
            loaded.model, self.items, self.pairs, batch_size=batch_size, on_pairs=on_texts
        )
        scores = item_scores(answers)
        return [TaskResult(HELLASWAG, accuracies(answers), len(answers), item_scores=scores)]


def ready_tasks(
    tasks: Sequence[str],
    loaded: LoadedModel,
    *,
    items: int | None = None,
    task_folder: str | Path | None = None,
    chat_template: bool | None = None,
) -> list[Task]:
    """Load tasks by name and check that they are ready to be scored.

    Args:
        tasks: names of the form `hellaswag`, `hellaswag,FILE.jsonl` or `lm-eval:NAME,...`. For
            `hellaswag` without a file, the data is loaded from the Hugging Face hub.
        loaded: a model with the same context length and tokenizer as all models that will be
            scored.
        items: number of items per task, taken from the beginning; None means all items.
        task_folder: folder with additional tasks for lm-evaluation-harness.
        chat_template: True to render the items with the model's chat template; None to use the
            template only if `apply_chat_template` is set in the metadata of the task.

    Raises:
        ConfigError: a name is unknown or repeated, `items` is less than 1, or `chat_template` is
            True although the model or a task does not support chat templates.
        InputError: a file is missing, a line of a file is not an item (the message names the line),
            or data can't be read.
        MissingDependencyError: lm-evaluation-harness is not installed.
        ModelError: the model has no tokenizer.
    """
    if items is not None and items < 1:
        raise ConfigError(f"items must be at least 1, not {items}")
    if chat_template and tokenizer_of(loaded).chat_template is None:
        raise ConfigError(f"{loaded.folder} has no chat template: omit --apply-chat-template")
    names = [_names(text) for text in tasks]
    flat = [name for _, several in names for name in several]
    for name in flat:
        if flat.count(name) > 1:
            raise ConfigError(f"two tasks are called {name}: evaluate them in separate calls")
    found: list[Task] = []
    for text, (kind, several) in zip(tasks, names, strict=True):
        if kind == HELLASWAG:
            if chat_template:
                raise ConfigError(
                    "the built-in hellaswag does not support chat templates: use "
                    "lm-eval:hellaswag instead, or omit --apply-chat-template"
                )
            file = text.partition(",")[2]
            found.append(_hellaswag(Path(file).expanduser() if file else None, loaded, items))
        else:
            harness = ready_harness(several, items=items, task_folder=task_folder)
            if loaded.tokenizer is not None and loaded.tokenizer.chat_template is not None:
                harness = _with_chat_template(harness, chat_template)
            found.append(harness)
    return found


def _names(text: str) -> tuple[str, list[str]]:
    """Return the kind of a task (`HELLASWAG` or `HARNESS`) and the names under which its results
    are reported."""
    if text.startswith(HARNESS):
        names = [name.strip() for name in text.removeprefix(HARNESS).split(",")]
        if not all(names):
            raise ConfigError(
                f"task '{text}' has no task name: use lm-eval:NAME or lm-eval:NAME,NAME"
            )
        return HARNESS, names
    name, comma, file = text.partition(",")
    if name != HELLASWAG:
        raise ConfigError(
            f"task '{text}' is unknown{nearest(name, [HELLASWAG])} (known: hellaswag, "
            "hellaswag,FILE.jsonl, and lm-eval:NAME for a task of lm-evaluation-harness)"
        )
    if comma and not file:
        raise ConfigError(f"task '{text}' has no file name: use hellaswag,FILE.jsonl or hellaswag")
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
    chat_template: bool | None = None,
    on_texts: Progress | None = None,
) -> list[TaskResult]:
    """Score a model on tasks, in fp32.

    Args:
        checkpoint: a folder or hub id, as for `firstlight.load`, or a model returned by that
            function.
        tasks: names of the tasks (see `ready_tasks`); a single string is also accepted.
        items: number of items per task; see `ready_tasks`.
        task_folder: folder with additional tasks; see `ready_tasks`.
        batch_size: number of sequences per forward pass, which affects only the speed.
        device: "auto", "cpu", "cuda", ...; a model that is already loaded stays on its device.
        chat_template: see `ready_tasks`.
        on_texts: function that is called after each batch with the number of scored sequences and
            the total number of sequences in the current task.

    Returns:
        The results, in the order of the tasks.

    Raises:
        ConfigError, InputError, MissingDependencyError: see `ready_tasks`.
        ModelError, CheckpointError: the model is unusable.
    """
    if batch_size < 1:
        raise ConfigError(f"batch_size must be at least 1, not {batch_size}")
    loaded = loaded_for_evaluation(checkpoint, device)
    names = [tasks] if isinstance(tasks, str) else list(tasks)
    ready = ready_tasks(
        names, loaded, items=items, task_folder=task_folder, chat_template=chat_template
    )
    return [
        result
        for task in ready
        for result in task.evaluate(loaded, batch_size=batch_size, on_texts=on_texts)
    ]


#: Dataset id on the Hugging Face hub, as in lm-evaluation-harness.
HUB_ID = "Rowan/hellaswag"
#: Maximum size of a file in bytes. The largest HellaSwag file, the training split, is 48 MB.
_MAX_BYTES = 1 << 30
#: Maximum size of a line in bytes, and maximum number of endings per item. HellaSwag items have up
#: to 3 KB of text and 4 endings.
_MAX_LINE_BYTES, _MAX_ENDINGS = 1 << 16, 100


def read_hellaswag(path: Path, limit: int | None = None) -> list[Item]:
    """Read the items of a JSON Lines file.

    As in the original dataset, each line is an object with the keys `endings` and `label`. The
    context is stored either as `ctx`, or as `ctx_a` and `ctx_b`. `activity_label` is optional.

    Args:
        path: the file. Empty lines are skipped.
        limit: number of items to read from the beginning of the file; None for all items.

    Raises:
        InputError: the file can't be read or contains no items, or a line is not such an object.
            The message names the line.
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
            raise InputError(f"{path}:{number} is not a HellaSwag item: {error}") from error
    if not items:
        raise InputError(f"{path} contains no items")
    return items


def hub_hellaswag(limit: int | None = None) -> list[Item]:
    """Load the items of the validation split from the Hugging Face hub or the cache of `datasets`.

    Args:
        limit: number of items to load from the beginning of the split; None for all items.

    Raises:
        MissingDependencyError: `datasets` is not installed.
        InputError: the data can't be loaded or has unexpected fields.
    """
    try:
        import datasets
    except ImportError as error:
        raise MissingDependencyError(
            "datasets", "data", "hellaswag without a file (use hellaswag,FILE.jsonl)"
        ) from error
    try:
        rows: Iterable[Mapping[str, Any]] = datasets.load_dataset(HUB_ID, split="validation")
        if limit is not None:
            rows = rows.select(range(min(limit, len(rows))))  # type: ignore[attr-defined, arg-type]
        return [item_of(row) for row in rows]
    except Exception as error:
        # `datasets` raises its own exceptions, exceptions of its HTTP library and exceptions of the
        # file system.
        raise InputError(
            f"{HUB_ID} could not be loaded from the hub ({type(error).__name__}: "
            f"{str(error)[:200]}): use a local file with --tasks hellaswag,FILE.jsonl"
        ) from error


def item_of(row: Any) -> Item:
    """Format an item in the same way as lm-evaluation-harness (`tasks/hellaswag/utils.py`).

    The context is `activity_label: ctx_a Ctx_b`, with the first letter of `ctx_b` capitalized. If
    an item has only `ctx`, the context is `activity_label: ctx`. If it has no `activity_label`, the
    context is just `ctx`.

    Raises:
        ValueError: a field is missing or has the wrong type. The message names the field.
    """
    if not isinstance(row, Mapping):
        raise ValueError("it is not a JSON object")
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
    """Remove the bracketed markup of WikiHow articles from a string, in the same way as
    `preprocess` in lm-evaluation-harness.
    """
    text = text.strip().replace(" [title]", ". ")
    # Search only up to the last "]" of each line. Any "[" after that would start a search to the
    # end of the line, and all of these searches together would take quadratic time.
    parts = (line.rpartition("]") for line in text.split("\n"))
    lines = (re.sub(r"\[.*?\]", "", head + end) + tail for head, end, tail in parts)
    return "\n".join(lines).replace("  ", " ")


def _text(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str) or not _is_unicode(value):
        raise ValueError(f"{name} must be a string" if name in row else f"{name} is missing")
    return value


def _is_unicode(text: str) -> bool:
    """Return True if a string does not contain lone surrogates. In JSON, they can occur as escape
    sequences.
    """
    return not any("\ud800" <= c <= "\udfff" for c in text)


def _label(value: Any, count: int) -> int:
    """Return the index of the correct ending, which the dataset stores as a string."""
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    if type(value) is not int or not 0 <= value < count:
        raise ValueError(f"label must be a number from 0 to {count - 1}, not {value!r:.40}")
    return value


@dataclass(frozen=True)
class Item:
    """A context with several possible endings, one of which is correct.

    Attributes:
        context: the text before the ending; not an empty string.
        choices: the endings, without a leading space. No ending is an empty string.
        gold: index of the correct ending.
    """

    context: str
    choices: tuple[str, ...]
    gold: int


@dataclass(frozen=True)
class Answer:
    """A model's answer to an item.

    Attributes:
        logprobs: log-probability of each ending given the context, in nats.
        acc: True if the correct ending has the highest log-probability.
        acc_norm: True if the correct ending has the highest log-probability per character.
    """

    logprobs: tuple[float, ...]
    acc: bool
    acc_norm: bool


def encode_items(
    items: Sequence[Item], tokenizer: Tokenizer, context_tokens: int, where: str
) -> list[TokenPair]:
    """Encode the endings of all items together with their contexts. The pairs are returned in the
    order of the items, and for each item in the order of its endings.

    Args:
        items: the items.
        tokenizer: the model's tokenizer.
        context_tokens: context length of the model in tokens.
        where: name of the file or dataset with the items, for error messages.

    Raises:
        InputError: an ending is longer than the model's context length, or does not add any tokens
            to the context of its item.
    """
    pairs: list[TokenPair] = []
    for number, item in enumerate(items, start=1):
        # Encode all endings of an item in a single call, so that they share one tuple of context
        # ids.
        encoded = encode_choices(tokenizer, item.context, [f" {c}" for c in item.choices])
        for pair in encoded:
            count = len(pair.continuation)
            if not 0 < count <= context_tokens:
                raise InputError(
                    f"{where}: an ending of item {number} has {count} tokens, but must have 1 to "
                    f"{context_tokens} to fit the model's context: remove the item"
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
    """Compute a model's answer to each item.

    Args:
        model: a model in evaluation mode.
        items: the items.
        pairs: result of `encode_items`.
        batch_size, on_pairs: see `likelihoods`.

    Raises:
        ModelError: the model's outputs contain NaN or infinity.
    """
    scored = likelihoods(model, pairs, batch_size=batch_size, on_pairs=on_pairs)
    logprobs = iter([likelihood.logprob for likelihood in scored])
    return [_answer(item, tuple(next(logprobs) for _ in item.choices)) for item in items]


def _answer(item: Item, logprobs: tuple[float, ...]) -> Answer:
    """Compare the model's choice with the correct ending. The choice is the ending with the highest
    log-probability. If several endings have the same log-probability, the first of them is chosen,
    as in numpy's argmax. For acc_norm, log-probabilities are first divided by the number of
    characters in the ending, as in lm-evaluation-harness.
    """
    per_character = [p / len(c) for p, c in zip(logprobs, item.choices, strict=True)]
    return Answer(
        logprobs,
        logprobs.index(max(logprobs)) == item.gold,
        per_character.index(max(per_character)) == item.gold,
    )


def item_scores(answers: Sequence[Answer]) -> dict[str, list[float]]:
    """Return `acc` and `acc_norm` for each answer. A value is 1 if the answer is correct, and 0
    otherwise."""
    return {
        "acc": [float(answer.acc) for answer in answers],
        "acc_norm": [float(answer.acc_norm) for answer in answers],
    }


def accuracies(answers: Sequence[Answer]) -> dict[str, Metric]:
    """Return the metrics `acc` and `acc_norm`. Each is the fraction of items that were answered
    correctly.
    """
    return {name: Metric(*mean_and_error(scores)) for name, scores in item_scores(answers).items()}


# The tasks of lm-evaluation-harness

#: Default seeds of `lm_eval.simple_evaluate`. The first is used for Python's `random` module, and
#: the second for numpy, torch and few-shot examples.
_RANDOM_SEED, _OTHER_SEED = 0, 1234
#: Number of bootstrap samples for standard errors that can't be computed with a formula. The
#: harness's default of 100,000 takes several minutes.
_BOOTSTRAP_ITERATIONS = 1_000


@dataclass(frozen=True)
class HarnessTasks:
    """Tasks that lm-evaluation-harness has loaded. This class implements `scores.Task`.

    Attributes:
        loaded_tasks: result of the harness's `TaskManager.load`.
        items: number of items per task, taken from the beginning; None means all items.
        chat_tasks: names of the tasks whose items are rendered with the model's chat template.
    """

    loaded_tasks: Mapping[str, Any]
    items: int | None
    chat_tasks: frozenset[str] = frozenset()

    def evaluate(
        self, loaded: LoadedModel, *, batch_size: int, on_texts: Progress | None = None
    ) -> list[TaskResult]:
        """Score a model, like `scores.Task.evaluate`. Return all metrics of all tasks and groups
        under the names used by the harness. Metrics computed with a filter other than "none" are
        named `METRIC,FILTER`.
        """
        import lm_eval

        with _by_itself():
            # Do not use simple_evaluate, because it also collects information about the machine,
            # which takes several seconds.
            found = lm_eval.evaluate(
                harness_model(loaded, batch_size, on_texts, chats=bool(self.chat_tasks)),
                self.loaded_tasks,
                limit=self.items,
                bootstrap_iters=_BOOTSTRAP_ITERATIONS,
                log_samples=True,  # for the scores of the items
                apply_chat_template=bool(self.chat_tasks),
                # The harness's command line also sets this option when a chat template is applied.
                fewshot_as_multiturn=bool(self.chat_tasks),
            )
        assert found is not None
        counts = {name: count["effective"] for name, count in found["n-samples"].items()}
        return [
            TaskResult(
                name,
                _metrics(figures),
                counts.get(name),
                name in self.chat_tasks,
                item_scores=_item_scores(found["samples"].get(name, [])),
            )
            for name, figures in found["results"].items()
        ]


def _with_chat_template(harness: HarnessTasks, wanted: bool | None) -> HarnessTasks:
    """Decide which tasks use the chat template (see `ready_tasks`), and show messages that list the
    tasks with and without the template. Return a copy of `harness` in which the template is enabled
    for the tasks that use it.
    """
    applied = set()
    for name, task in harness.loaded_tasks["tasks"].items():
        asked = (task.get_config("metadata") or {}).get("apply_chat_template")
        if asked if wanted is None else wanted:
            applied.add(name)
        else:
            # The harness supports only one setting for all tasks.
            task.build_all_requests = partial(_build_plainly, task.build_all_requests)
    others = sorted(set(harness.loaded_tasks["tasks"]) - applied)
    if applied:
        say(f"the model's chat template is applied to {', '.join(sorted(applied))}")
    if others:
        hint = "" if wanted is False else " (add --apply-chat-template to apply it)"
        say(f"note: the model's chat template is not applied to {', '.join(others)}{hint}")
    return dataclasses.replace(harness, chat_tasks=frozenset(applied))


@cache
def _say_once(message: str) -> None:
    say(message)


def _build_plainly(build: Callable[..., None], **options: Any) -> None:
    plain = {"apply_chat_template": False, "chat_template": None, "fewshot_as_multiturn": False}
    build(**{**options, **plain})


def ready_harness(
    names: Sequence[str], *, items: int | None, task_folder: str | Path | None
) -> HarnessTasks:
    """Load tasks, groups or tags of the harness, including their data.

    Args:
        names: names of tasks, groups or tags.
        items: number of items per task, taken from the beginning; None means all items.
        task_folder: folder with additional tasks in the harness's YAML format. If the folder
            contains all tasks in `names`, the harness's own tasks are not indexed, which saves
            several seconds. The harness runs any Python code in the folder.

    Raises:
        MissingDependencyError: the harness is not installed.
        ConfigError: a name is unknown, or `task_folder` does not exist.
        InputError: a task or its data can't be loaded, or a task is not supported because it is
            multimodal or runs generated code.
    """
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise MissingDependencyError("lm_eval", "eval", "a task lm-eval:NAME") from error
    if task_folder is not None and not Path(task_folder).expanduser().is_dir():
        raise ConfigError(f"task folder {task_folder} does not exist")
    folder = None if task_folder is None else str(Path(task_folder).expanduser())
    with _by_itself():
        manager = TaskManager(include_path=folder, include_defaults=folder is None)
        if folder is not None and not set(names) <= set(manager.all_tasks):
            manager = TaskManager(include_path=folder)
        for name in names:
            if name not in manager.all_tasks:
                raise ConfigError(
                    f"task lm-eval:{name} is unknown{nearest(name, manager.all_tasks)}: run "
                    "`lm-eval ls tasks` to list the tasks of the harness, or add your own with "
                    "--task-folder"
                )
        try:
            found = manager.load(list(names))
        except Exception as error:
            # The files of a task and the library that loads its data can raise any exception.
            raise InputError(
                f"lm-eval:{','.join(names)} can't be loaded: {type(error).__name__}: "
                f"{str(error)[:300]}"
            ) from error
    for name, task in found["tasks"].items():
        if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
            raise InputError(
                f"task lm-eval:{name} runs generated code or is multimodal, which is not "
                "supported: remove it from the tasks"
            )
        # simple_evaluate would set these defaults, but it is not called.
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=_OTHER_SEED)
    return HarnessTasks(found, items)


def _metrics(figures: Mapping[str, Any]) -> dict[str, Metric]:
    """Convert results of the harness, such as `{"acc,none": ..., "acc_stderr,none": ...}`, to
    metrics keyed by name. Non-finite values are omitted.
    """
    found: dict[str, Metric] = {}
    for key, value in figures.items():
        name, comma, kind = key.partition(",")
        if not comma or name.endswith("_stderr") or not _is_finite(value):
            continue
        error = figures.get(f"{name}_stderr,{kind}", math.nan)
        shown = name if kind == "none" else key
        found[shown] = Metric(float(value), float(error) if _is_finite(error) else None)
    return found


def _item_scores(samples: Iterable[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Return the scores of the individual items, in order, keyed by the same metric names as in
    `_metrics`. Values that are not numbers, such as the pairs from which a perplexity is computed,
    are omitted.
    """
    found: dict[str, list[float]] = {}
    for sample in sorted(samples, key=lambda sample: sample["doc_id"]):
        kind = sample["filter"]
        for name in sample["metrics"]:
            if _is_finite(sample[name]):
                shown = name if kind == "none" else f"{name},{kind}"
                found.setdefault(shown, []).append(float(sample[name]))
    return found


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and math.isfinite(value)


@contextlib.contextmanager
def _by_itself() -> Iterator[None]:
    """Isolate lm-evaluation-harness during the `with` block. Seed the random generators with the
    default seeds of the harness, redirect its output to stderr, and prevent it from starting
    processes. On exit, restore the random states of Python, numpy and torch.
    """
    states = random.getstate(), np.random.get_state()
    before = os.environ.get("DISABLE_MULTIPROC")
    # The harness's bootstrap would fork this process, which is unsafe for a process with several
    # threads.
    os.environ["DISABLE_MULTIPROC"] = "1"
    try:
        with torch.random.fork_rng(), contextlib.redirect_stdout(sys.stderr):
            random.seed(_RANDOM_SEED)
            np.random.seed(_OTHER_SEED)
            torch.manual_seed(_OTHER_SEED)
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        if before is None:
            del os.environ["DISABLE_MULTIPROC"]
        else:
            os.environ["DISABLE_MULTIPROC"] = before


#: The harness's default limit on the number of new tokens, for tasks that do not set a limit.
_MAX_NEW_TOKENS = 256
_TOKEN_LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_SAMPLING = {"top_k", "top_p", "min_p", "repetition_penalty"}


class _HarnessMethods:
    """Implementation of the harness's interface `lm_eval.api.model.LM`. The methods are documented
    in that class.
    """

    def __init__(self, loaded: LoadedModel, batch_size: int, on_texts: Progress | None) -> None:
        super().__init__()
        self._loaded = loaded
        self._texts_at_a_time = batch_size
        self._on_texts = on_texts
        self._tokenizer = tokenizer_of(loaded)
        self._limit = loaded.model.config.max_position_embeddings

    @property
    def eot_token_id(self) -> int:
        eos = self._tokenizer.eos_token_id
        return self._tokenizer.separator_id if eos is None else eos

    @property
    def prefix_token_id(self) -> int:
        return self._tokenizer.separator_id

    @property
    def tokenizer_name(self) -> str:
        return self._tokenizer.fingerprint

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Return the token ids of a string. A BOS token is prepended if the model expects one and
        the string does not begin with it. As in the harness, the names of special tokens in the
        string are encoded as special tokens.
        """
        tokenizer = self._tokenizer
        ids = tokenizer.encode(string, special_tokens=True)
        begins = tokenizer.bos_token is not None and string.startswith(tokenizer.bos_token)
        wanted = not begins if add_special_tokens is None else add_special_tokens
        return [tokenizer.separator_id, *ids] if tokenizer.add_bos and wanted else ids

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        render = partial(self._tokenizer.apply_chat_template, add_generation_prompt=True)
        begun = ""
        if not add_generation_prompt:  # the last message is the beginning of the response
            *chat_history, last = chat_history
            begun = last["content"]
        try:
            return render(chat_history) + begun
        except InputError:
            # Some templates reject system messages. As in the harness, omit them in that case.
            _say_once(
                "note: the chat template rejects system messages, so the task's system message is "
                "omitted"
            )
            return render([one for one in chat_history if one["role"] != "system"]) + begun

    def loglikelihood(
        self, requests: list[Any], disable_tqdm: bool = True
    ) -> list[tuple[float, bool]]:
        # The harness's progress bar would overwrite firstlight's.
        found: list[tuple[float, bool]] = super().loglikelihood(  # type: ignore[misc]
            requests, disable_tqdm=True
        )
        return found

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        pairs = [TokenPair(tuple(c), tuple(more)) for _, c, more in requests]
        for pair in pairs:
            if not 0 < len(pair.continuation) <= self._limit:
                raise InputError(
                    f"a task has a text of {len(pair.continuation)} tokens to score, but it "
                    f"must have 1 to {self._limit} tokens to fit the model's context"
                )
        return [(one.logprob, one.is_greedy) for one in self._scored(pairs)]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
        windows = [self._windows(self.tok_encode(request.args[0])) for request in requests]
        scored = iter(self._scored([pair for several in windows for pair in several]))
        return [math.fsum(next(scored).logprob for _ in several) for several in windows]

    def _scored(self, pairs: list[TokenPair]) -> list[Likelihood]:
        return likelihoods(
            self._loaded.model, pairs, batch_size=self._texts_at_a_time, on_pairs=self._on_texts
        )

    def _windows(self, ids: list[int]) -> list[TokenPair]:
        """Split a sequence of tokens into windows of at most the model's context length, so that
        each token is predicted exactly once.
        """
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        windows = get_rolling_token_windows(
            token_list=ids,
            prefix_token=self.prefix_token_id,
            max_seq_len=self._limit,
            context_len=1,
        )
        return [TokenPair(*map(tuple, make_disjoint_window(window))) for window in windows]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
        texts = [
            self._text_of(*request.args, number=number) for number, request in enumerate(requests)
        ]
        longest = max((len(t.prompt_ids) + t.config.max_new_tokens for t in texts), default=1)
        size = max(min(self._texts_at_a_time, len(texts)), 1)
        done = 0
        for index, _ in pieces_of_many(texts, BatchDecoder(self._loaded.model, size, longest)):
            if texts[index].finish_reason is not None:
                done += 1
                if self._on_texts is not None:
                    self._on_texts(done, len(texts))
        # As in the harness, decode the new tokens without the prompt, which drops the space before
        # the first word.
        return [
            before_stops(self._tokenizer.decode(text.token_ids), text.config.stop) for text in texts
        ]

    def _text_of(self, context: str, options: Mapping[str, Any], *, number: int) -> Continuation:
        """Return the prompt and the sampling settings of a request. If the prompt and the new
        tokens do not fit into the model's context, the prompt is truncated from the left.
        """
        config = sampling_of(options, number)
        room = self._limit - config.max_new_tokens
        if room < 1:
            raise InputError(
                f"a task requests {config.max_new_tokens} new tokens, but the model's context "
                f"has room for only {self._limit}: lower its max_gen_toks"
            )
        ids = self.tok_encode(context)[-room:] or [self._tokenizer.separator_id]
        return continuation(self._loaded, ids, config)


def harness_model(
    loaded: LoadedModel, batch_size: int, on_texts: Progress | None, *, chats: bool = False
) -> Any:
    """Wrap a model as an `lm_eval.api.model.LM`.

    Args:
        loaded: a model with a tokenizer.
        batch_size: number of sequences per forward pass.
        on_texts: function that is called after each batch with the number of completed sequences
            and the total number of sequences.
        chats: True to also end generation at the token that ends a turn in the chat template.

    Raises:
        ModelError: the model has no tokenizer.
    """
    if chats:
        loaded = dataclasses.replace(loaded, eos_token_ids=loaded.chat_end_ids)
    from lm_eval.api.model import TemplateLM

    class FirstlightLM(_HarnessMethods, TemplateLM):  # type: ignore[misc]
        """A model for the harness. Its methods are inherited from `_HarnessMethods`. The class is
        defined inside the function because its other base class belongs to an optional package.
        """

    return FirstlightLM(loaded, batch_size, on_texts)


def sampling_of(options: Mapping[str, Any], number: int) -> SamplingConfig:
    """Return the sampling settings of a task's `generation_kwargs`.

    Args:
        options: options of the request.
        number: index of the request, which is used as the seed for sampling.

    Raises:
        ConfigError: an option is unknown or out of range.
    """
    known = {"until", "do_sample", "temperature", *_TOKEN_LIMITS, *_SAMPLING}
    unknown = sorted(set(options) - known)
    if unknown:
        raise ConfigError(
            f"a task's generation_kwargs contain {', '.join(unknown)}, which is not supported "
            f"(supported: {', '.join(sorted(known))})"
        )
    until = options.get("until") or []
    limits = [options[name] for name in _TOKEN_LIMITS if options.get(name) is not None]
    temperature = float(options.get("temperature") or 0.0)
    return SamplingConfig(
        max_new_tokens=int(limits[0]) if limits else _MAX_NEW_TOKENS,
        temperature=temperature if options.get("do_sample", temperature > 0) else 0.0,
        stop=tuple(stop for stop in ([until] if isinstance(until, str) else until) if stop),
        seed=number,
        **{name: options[name] for name in _SAMPLING & set(options)},
    )


def before_stops(text: str, stops: Sequence[str]) -> str:
    """Truncate a string before the first occurrence of a stop string."""
    for stop in stops:
        text = text.partition(stop)[0]
    return text

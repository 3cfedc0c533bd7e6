"""Tasks by name: `hellaswag`, `hellaswag,FILE.jsonl`, `lm-eval:NAME,...`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from firstlight.errors import ConfigError, nearest
from firstlight.evaluation.hellaswag import (
    HUB_ID,
    Item,
    accuracies,
    answer_items,
    encode_items,
    hub_hellaswag,
    read_hellaswag,
)
from firstlight.evaluation.likelihood import TokenPair
from firstlight.evaluation.perplexity import loaded_for_evaluation
from firstlight.evaluation.results import Progress, Task, TaskResult
from firstlight.generation.engine import tokenizer_of
from firstlight.weights.huggingface import LoadedModel

HELLASWAG = "hellaswag"
HARNESS = "lm-eval:"


@dataclass(frozen=True)
class HellaSwag:
    """HellaSwag's items, encoded for a model. See `results.Task`."""

    items: Sequence[Item]
    pairs: Sequence[TokenPair]

    def evaluate(
        self, loaded: LoadedModel, *, batch_size: int, on_texts: Progress | None = None
    ) -> list[TaskResult]:
        """`acc` and `acc_norm`."""
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
    """Read and check the tasks of some names, so that they only have to be scored.

    Args:
        tasks: each `hellaswag`, `hellaswag,FILE.jsonl` or `lm-eval:NAME,...`; without a file the
            data come from the hub.
        loaded: a model with the context and the tokenizer of those that will be scored.
        items: only the first so many of each task; None is all.
        task_folder: folder of further tasks for lm-evaluation-harness.

    Raises:
        ConfigError: a name is unknown, or given twice.
        InputError: a file is missing, or a line of it (named) is no item; data can't be had.
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
    """Who scores a task, and the names that its results will have."""
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
        checkpoint: a folder or hub id as for `firstlight.load`, or what that returned.
        tasks: see `ready_tasks`; one text is one task.
        items, task_folder: see `ready_tasks`.
        batch_size: texts at a time; changes the speed only.
        device: "auto", "cpu", "cuda", ...; a model that is already loaded stays where it is.
        on_texts: called after each batch with the texts scored and to be scored, for each task
            anew.

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

"""`firstlight eval`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from firstlight.cli.options import best_option, count_option, device_option, task_options
from firstlight.cli.output import show_rows, show_table, with_bar, with_json
from firstlight.console import say
from firstlight.errors import CheckpointError, ConfigError, StorageError

if TYPE_CHECKING:
    from firstlight.evaluation.perplexity import Evaluation
    from firstlight.evaluation.scores import TaskResult
    from firstlight.lora.loading import LoadedModel

#: Default batch sizes: number of rows for the loss, and number of sequences for tasks.
_ROWS, _TEXTS = 8, 32


def _no_beside(_: click.Context, __: click.Parameter, value: tuple[str, ...]) -> None:
    """Click callback that raises an error if a removed option is used. The message names the
    replacement.
    """
    if value:
        raise ConfigError("--beside was removed: run firstlight compare BEFORE AFTER")


@click.command("eval")
@click.argument("checkpoint")
@best_option
@click.option("--data", help="Prepared folder or its URL.  [default: the training data]")
@click.option("--split", type=click.Choice(["val", "train"]), help="[default: val]")
@count_option(
    "--sample",
    least=2,
    help="Evaluate N random rows of the split only; results are estimates with standard errors.",
)
@click.option("--seed", type=click.IntRange(min=0), help="Seed of the sample.  [default: 0]")
@click.option(
    "--seq-len", type=click.IntRange(min=1), help="Tokens per row.  [default: as in training]"
)
@click.option(
    "--document-masking/--no-document-masking",
    default=None,
    help="Attend only within a document, or across the whole row.  [default: as in training]",
)
@click.option(
    "--tasks",
    multiple=True,
    metavar="TASK",
    help="Task to score: hellaswag,FILE.jsonl; hellaswag (data from the hub); or tasks of "
    "lm-evaluation-harness, lm-eval:NAME,NAME,... Can be repeated. With --tasks, the loss is "
    "computed only if --data or --sample is given.",
)
@task_options
@click.option(
    "--by-position",
    is_flag=True,
    help="Report the loss by position in the row; --seq-len may exceed the model's context.",
)
@click.option("--beside", multiple=True, hidden=True, expose_value=False, callback=_no_beside)
@click.option(
    "--picture",
    type=click.Path(path_type=Path, dir_okay=False),
    help="With --by-position: write a chart of perplexity by position to this PNG file.",
)
@click.option(
    "--batch-size",
    type=click.IntRange(min=1),
    help="Batch size: rows for the loss, texts for "
    f"a task.  [default: {_ROWS} rows, {_TEXTS} texts]",
)
@device_option
@with_json
def eval_command(
    checkpoint: str,
    best: bool,
    data: str | None,
    sample: int | None,
    tasks: tuple[str, ...],
    items: int | None,
    task_folder: str | None,
    chat_template: bool | None,
    by_position: bool,
    picture: Path | None,
    batch_size: int | None,
    device: str,
    as_json: bool,
    **of_the_loss: Any,
) -> dict[str, Any]:
    """Compute loss, perplexity and bits per byte on held-out data, or the scores of tasks.

    CHECKPOINT is a run, a checkpoint, a Hugging Face model folder, a GGUF file or a hub id.
    """
    with_loss = not tasks or data is not None or sample is not None
    for_tasks = {"--items": items, "--task-folder": task_folder}
    for_tasks["--apply-chat-template"] = chat_template
    _require_used(with_loss, bool(tasks), of_the_loss, for_tasks)
    given = {name: value for name, value in of_the_loss.items() if value is not None}
    if by_position:
        if tasks:
            raise ConfigError("--by-position reports the loss: omit --tasks")
        options = {"sample": sample, "batch_size": batch_size or _ROWS, "device": device, **given}
        return _by_position(checkpoint, data, best, picture, options=options)
    if picture is not None:
        raise ConfigError("--picture needs --by-position")
    from firstlight.evaluation.perplexity import evaluate, evaluated_folder, load_for_evaluation

    loaded = load_for_evaluation(checkpoint, device, best=best)
    result: dict[str, Any] = {"checkpoint": checkpoint, "folder": loaded.folder}
    # Run the tasks first. Errors in them are reported immediately, while computing the loss can
    # take a long time.
    if tasks:
        options = {"items": items, "task_folder": task_folder, "chat_template": chat_template}
        result |= _scored(loaded, tasks, batch_size=batch_size or _TEXTS, **options)
    if with_loss:
        folder = evaluated_folder(loaded, data, given.get("split", "val"), progress=True)
        found = with_bar(
            "evaluating",
            lambda show: evaluate(
                loaded, folder, sample=sample, batch_size=batch_size or _ROWS, on_rows=show, **given
            ),
        )
        _show_loss(found)
        result |= dataclasses.asdict(found)
    _record(loaded.folder, result, data)
    return result


def _scored(loaded: LoadedModel, tasks: tuple[str, ...], **options: Any) -> dict[str, Any]:
    """Evaluate a model on tasks, and print the scores.

    Args:
        loaded: the model.
        tasks: names of the tasks.
        options: see `evaluate_tasks`.

    Returns:
        A dict. The key "tasks" contains the results, keyed by task. The key "chat_template" lists
        the tasks to which the chat template was applied, and is omitted if there are none.
    """
    from firstlight.evaluation.tasks import evaluate_tasks

    scores = with_bar(
        "scoring", lambda show: evaluate_tasks(loaded, tasks, **options, on_texts=show)
    )
    _show_scores(scores)
    found: dict[str, Any] = {
        "tasks": {one.task: {"items": one.items, **one.figures()} for one in scores}
    }
    if chats := [one.task for one in scores if one.chat_template]:
        found["chat_template"] = chats
    return found


def _by_position(
    checkpoint: str,
    data: str | None,
    best: bool,
    picture: Path | None,
    *,
    options: dict[str, Any],
) -> dict[str, Any]:
    """Print and return the loss at each position in a row."""
    from firstlight.evaluation.perplexity import (
        evaluate_by_position,
        evaluated_folder,
        load_for_evaluation,
    )

    loaded = load_for_evaluation(checkpoint, options["device"], best=best)
    folder = evaluated_folder(loaded, data, options.get("split", "val"))
    found = with_bar(
        "evaluating", lambda show: evaluate_by_position(loaded, folder, on_rows=show, **options)
    )
    context = loaded.model.config.max_position_embeddings
    show_table(
        [
            ["positions", "tokens", "perplexity"],
            *(
                [f"{one.first:,}-{one.last:,}", f"{one.tokens:,}", f"{one.perplexity:,.2f}"]
                for one in found.stretches
            ),
        ]
    )
    if picture is not None:
        from firstlight.files.atomic import write_file
        from firstlight.report.charts import position_picture

        write_file(picture, position_picture(checkpoint, found, context))
        say(f"picture: {picture}")
    return {"data": str(folder), "context": context, "by_position": dataclasses.asdict(found)}


def _record(folder: Path, result: dict[str, Any], data: str | None) -> None:
    """Save a result in the folder of the model, from which it is added to the model card. If saving
    fails, print a note.
    """
    from firstlight.data.sources import neutral_name
    from firstlight.sharing.card import record_evaluation

    kept = {name: value for name, value in result.items() if name not in ("checkpoint", "folder")}
    place = {} if data is None else {"data": neutral_name(data)}
    try:
        record_evaluation(folder, {**place, **kept})
    except (StorageError, CheckpointError) as error:
        say(f"note: the result could not be saved for the model card: {error}")


def _require_used(
    with_loss: bool,
    with_tasks: bool,
    of_the_loss: dict[str, Any],
    for_tasks: dict[str, Any],
) -> None:
    """Check that all options given by the user apply to the requested evaluation.

    Raises:
        ConfigError: an option applies only to the loss, but the loss is not computed; or it applies
            only to tasks, but no tasks are evaluated.
    """
    for name, given in of_the_loss.items():
        if not with_loss and given is not None:
            option = name.replace("_", "-")
            raise ConfigError(
                f"--{option} applies to the loss, which --tasks does not compute: add --data"
            )
    for option, value in for_tasks.items():
        if not with_tasks and value is not None:
            raise ConfigError(f"{option} applies to tasks: add --tasks")


def _show_loss(found: Evaluation) -> None:
    from firstlight.evaluation.scores import with_error

    if found.loss_stderr is None:
        loss, perplexity = f"{found.loss:.4f} nats per token", f"{found.perplexity:.3f}"
    else:
        rows = f"{found.rows:,} of {found.total_rows:,} rows"
        loss = f"{with_error(found.loss, found.loss_stderr)} (standard error, {rows})"
        perplexity = with_error(found.perplexity, found.perplexity_stderr)
    shown: list[tuple[str, object]] = [
        ("loss", loss),
        ("perplexity", perplexity),
        ("bits per byte", with_error(found.bits_per_byte, found.bits_per_byte_stderr)),
    ]
    if found.gzip_bits_per_byte is not None:
        text = "the same text" if found.rows == found.total_rows else "the full text of the split"
        shown.append(("gzip -9", f"{found.gzip_bits_per_byte:.4f} bits per byte on {text}"))
    shown.append(("tokens", f"{found.tokens:,}"))
    show_rows(shown)


def _show_scores(scores: list[TaskResult]) -> None:
    from firstlight.evaluation.scores import with_error

    rows = []
    for one in scores:
        items = "" if one.items is None else f", {one.items:,} items"
        for name, metric in one.metrics.items():
            note = "" if metric.stderr is None else f" (standard error{items})"
            rows.append((f"{one.task} {name}", with_error(metric.value, metric.stderr) + note))
    if rows:
        show_rows(rows)

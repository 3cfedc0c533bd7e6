"""`firstlight compare`."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from firstlight.cli.options import count_option, device_option, path_option, task_options
from firstlight.cli.output import show, show_rows, show_table, with_bar, with_json
from firstlight.errors import ConfigError

if TYPE_CHECKING:
    from firstlight.evaluation.comparison import ComparedMetric, ModelComparison, Passage


@click.command("compare")
@click.argument("before")
@click.argument("after")
@click.option(
    "--text",
    "texts",
    multiple=True,
    metavar="TEXT",
    help="Text to compare on: a file, folder, glob, hf:NAME or prepared folder. Can be repeated. "
    " [default: validation text of the runs]",
)
@count_option("--sample", help="Use N random rows of each text only.")
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Seed of the sample.")
@click.option(
    "--seq-len", type=click.IntRange(min=1), help="Tokens per row.  [default: as in training]"
)
@click.option(
    "--passages",
    type=click.IntRange(min=0),
    default=3,
    show_default=True,
    help="Number of passages to show that got worse, and better.",
)
@click.option(
    "--tasks", multiple=True, metavar="TASK", help="Task to score, as in eval. Can be repeated."
)
@task_options
@click.option("--prompt", multiple=True, metavar="TEXT", help="Prompt to answer. Can be repeated.")
@path_option("--prompts", metavar="FILE", help="File with one prompt per line.")
@count_option(
    "--max-new-tokens", default=128, show_default=True, help="Maximum number of tokens per answer."
)
@path_option("--page", metavar="FILE.html", help="Also write the comparison to this HTML page.")
@count_option("--batch-size", help="Batch size.  [default: 4 rows, 32 texts of a task]")
@device_option
@with_json
def compare_command(
    before: str,
    after: str,
    prompt: tuple[str, ...],
    prompts: Path | None,
    page: Path | None,
    as_json: bool,
    **options: Any,
) -> dict[str, Any]:
    """Compare two models on the same texts, tasks and prompts.

    BEFORE and AFTER are runs, checkpoints, Hugging Face model folders, GGUF files or hub ids. Their
    tokenizers may differ: texts are compared in bits per byte. ± is the standard error; that of a
    difference is paired.
    """
    from firstlight.evaluation.comparison import compare
    from firstlight.report.model_comparison import require_page_path, write_page

    if page is not None:
        require_page_path(page)
    asked = [*prompt, *(_prompts_in(prompts) if prompts is not None else ())]
    found = with_bar(
        "comparing",
        lambda bar: compare(before, after, prompts=asked, on_progress=bar, **options),
    )
    _show(found)
    result = dataclasses.asdict(found)
    if page is not None:
        write_page(found, page)
        show(f"page: {page}")
        result["page"] = str(page)
    return result


def _prompts_in(path: Path) -> list[str]:
    """Return the lines of a file of prompts, without blank lines.

    Raises:
        InputError: the file can't be read.
        ConfigError: the file is not UTF-8 text or contains no prompt.
    """
    from firstlight.files.atomic import read_file

    try:
        lines = read_file(path, 1 << 26).decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ConfigError(f"--prompts {path} is not UTF-8 text: {error.reason}") from None
    if not (found := [line for line in lines if line.strip()]):
        raise ConfigError(f"--prompts {path} contains no prompt: write one per line")
    return found


def _show(found: ModelComparison) -> None:
    show_rows([("before", found.before), ("after", found.after)])
    if found.total is not None:
        texts = [*found.texts, *([found.total] if len(found.texts) > 1 else [])]
        rows = [
            [one.text, f"{one.bytes:,}", *_cells(one.bits_per_byte), f"{one.units:,} {one.unit}"]
            for one in texts
        ]
        show()
        show_table(
            [["bits per byte", "bytes", "before", "after", "difference", "paired over"], *rows]
        )
    if found.tasks:
        show()
        scores = [[f"{one.task} {one.metric}", *_cells(one.score)] for one in found.tasks]
        show_table([["score", "before", "after", "difference"], *scores])
    for title, passages in (("worse", found.worse), ("better", found.better)):
        for passage in passages:
            _show_passage(title, passage)
    for answer in found.answers:
        show()
        show_rows([("prompt", answer.prompt), ("before", answer.before), ("after", answer.after)])


def _cells(metric: ComparedMetric) -> list[str]:
    from firstlight.evaluation.scores import with_error

    before, after, difference = metric.before, metric.after, metric.difference
    return [
        with_error(before.value, before.stderr),
        with_error(after.value, after.stderr),
        f"{'+' if difference.value > 0 else ''}{with_error(difference.value, difference.stderr)}",
    ]


def _show_passage(title: str, passage: Passage) -> None:
    """Print a passage. The segments that carry the difference stand between « and »."""
    show()
    where = f"{passage.text}, document {passage.document}"
    show(f"{title} by {abs(passage.difference):.1f} bits: {where}")
    text = ""
    for marked, run in itertools.groupby(passage.segments, key=lambda one: one.marked):
        own = "".join(one.text for one in run)
        text += f"«{own}»" if marked else own
    for line in text.strip("\n").splitlines():
        show(f"  {line}")

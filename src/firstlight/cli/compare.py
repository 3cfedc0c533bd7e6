"""`firstlight compare`."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from firstlight.cli.options import count_option, device_option, path_option, task_options
from firstlight.cli.output import show, show_rows, show_table, with_bar, with_json

if TYPE_CHECKING:
    from firstlight.evaluation.comparison import ModelComparison, Passage


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
@click.option("--prompts", metavar="FILE", help="File with one prompt per line.")
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
    prompts: str | None,
    page: Path | None,
    as_json: bool,
    **options: Any,
) -> dict[str, Any]:
    """Compare two models on the same documents, tasks and prompts.

    BEFORE and AFTER are runs, checkpoints, Hugging Face model folders, GGUF files or hub ids. Their
    tokenizers can differ, because documents are compared in bits per byte. The number after ± is
    the standard error. For a difference, it is computed from paired values.
    """
    from firstlight.evaluation.comparison import compare, documents_of
    from firstlight.report.report import require_replaceable, write_model_comparison

    if page is not None:
        require_replaceable(page, option="--page")
    lines = [] if prompts is None else "\n".join(documents_of(prompts)).splitlines()
    asked = [*prompt, *(line for line in lines if line.strip())]
    found = with_bar(
        "comparing",
        lambda bar: compare(before, after, prompts=asked, on_progress=bar, **options),
    )
    _show(found)
    result = dataclasses.asdict(found)
    if page is not None:
        write_model_comparison(found, page)
        show(f"page: {page}")
        result["page"] = str(page)
    return result


def _show(found: ModelComparison) -> None:
    show_rows([("before", found.before), ("after", found.after)])
    for title, values in (("bits per byte", found.texts), ("score", found.tasks)):
        if values:
            show()
            head = [title, "before", "after", "difference", "paired over"]
            show_table([head, *(value.cells() for value in values)])
    for title, passages in (("worse", found.worse), ("better", found.better)):
        for passage in passages:
            _show_passage(title, passage)
    for answer in found.answers:
        show()
        texts = {"prompt": answer.prompt, "before": answer.before, "after": answer.after}
        # Align all further lines of the text with the first line.
        show_rows(
            (name, text.strip().replace("\n", "\n" + 8 * " ")) for name, text in texts.items()
        )
    if found.texts:
        show(f"\nwith {found.after}: {'; '.join(one.in_words for one in found.texts)}")


def _show_passage(title: str, passage: Passage) -> None:
    """Print a passage. The segments in which the two models differ most are enclosed in « and »."""
    show()
    where = f"{passage.text}, document {passage.document}"
    show(f"{title} by {abs(passage.difference):.1f} bits: {where}")
    text = ""
    for marked, run in itertools.groupby(passage.segments, key=lambda one: one.marked):
        own = "".join(one.text for one in run)
        word = own.lstrip(" ") or own
        text += f"{own.removesuffix(word)}«{word}»" if marked else own
    for line in text.strip("\n").splitlines():
        show(f"  {line}")

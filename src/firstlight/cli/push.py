"""The commands `firstlight push`, `firstlight push-data` and `firstlight card`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from firstlight.cli.options import best_option, grouped, path_option
from firstlight.cli.output import show, show_rows, with_json, write_out
from firstlight.console import human_bytes, say

if TYPE_CHECKING:
    from firstlight.sharing.push import Pushed

_licence_option = click.option(
    "--license",
    "licence",
    metavar="ID",
    help="Licence for the card, as a licence id of the hub such as apache-2.0.  [default: none]",
)


#: Options of `push` and `push-data`.
_upload_options = grouped(
    click.option(
        "--private",
        is_flag=True,
        help="Create a private repository.  [default: as set in your hub account]",
    ),
    _licence_option,
    click.option("--dry-run", is_flag=True, help="Write the folder without uploading it."),
    path_option(
        "--out",
        help="Folder to write and keep.  [default: a temporary folder; with --dry-run, NAME in the "
        "current folder]",
    ),
)


@click.command("push")
@click.argument("source", metavar="RUN_OR_MODEL")
@click.argument("repository", metavar="USER/NAME")
@_upload_options
@click.option(
    "--gguf",
    metavar="DTYPE",
    help="Add a file for llama.cpp and Ollama: f16, bf16, q8_0, or formats such as q4_k_m "
    "(pip install 'firstlight[llama-cpp]').",
)
@path_option("--card", help="Card to upload, such as an edited file of `firstlight card`.")
@best_option
@with_json
def push_command(
    source: str, repository: str, dry_run: bool, as_json: bool, **options: Any
) -> dict[str, Any]:
    """Upload a model to the Hugging Face hub, with a model card.

    RUN_OR_MODEL is a run, a checkpoint, a Hugging Face model folder or a hub id. The upload
    contains the weights in the format that `firstlight convert` writes, the tokenizer, the recipe,
    the loss curve and a card. It does not contain the optimizer state or any paths on this machine.
    Files that are already on the hub are not uploaded again. To continue an interrupted upload,
    repeat the command.
    """
    from firstlight.sharing.push import push

    pushed = push(source, repository, upload=not dry_run, **options)
    if pushed.unfinished_of is not None:
        say(
            f"note: the run is not finished: the checkpoint is from step {pushed.step:,} of "
            f"{pushed.unfinished_of:,}, as stated in the card"
        )
    return _shown(pushed)


@click.command("push-data")
@click.argument("folder", metavar="DATA", type=click.Path(path_type=Path))
@click.argument("repository", metavar="USER/NAME")
@_upload_options
@with_json
def push_data_command(
    folder: Path, repository: str, dry_run: bool, as_json: bool, **options: Any
) -> dict[str, Any]:
    """Upload a prepared corpus to the Hugging Face hub, with a dataset card.

    DATA is a folder written by `firstlight prepare`. Any machine can then train on the uploaded
    corpus with --data.dir hf://datasets/USER/NAME.
    """
    from firstlight.sharing.push import push_data

    return _shown(push_data(folder, repository, upload=not dry_run, **options))


@click.command("card")
@click.argument("source", metavar="RUN_OR_MODEL")
@click.argument("repository", metavar="[USER/NAME]", required=False)
@_licence_option
@path_option("--out", help="File to write.  [default: standard output]")
@best_option
@with_json
def card_command(
    source: str,
    repository: str | None,
    licence: str | None,
    out: Path | None,
    best: bool,
    as_json: bool,
) -> dict[str, Any]:
    """Write a model card.

    The card describes the model, its data, its recipe, its results and how to use it.

    RUN_OR_MODEL is a run, a checkpoint, a Hugging Face model folder or a hub id. USER/NAME is used
    in the example commands on the card. The card can be edited and then passed to `firstlight push
    --card`.
    """
    from firstlight.files.atomic import write_file
    from firstlight.sharing.card import model_card, read_facts

    text = model_card(read_facts(source, best=best), repository, licence=licence)
    if out is not None:
        write_file(out, text)
        show(f"card: {out}")
    elif not as_json:
        write_out(text)
    return {"card": text, "out": out}


def _shown(pushed: Pushed) -> dict[str, Any]:
    for note in pushed.notes:
        say(f"note: {note}")
    rows = [(name, human_bytes(size)) for name, size in pushed.files.items()]
    if pushed.folder is not None:
        rows.append(("folder", str(pushed.folder)))
    rows.append(("uploaded", pushed.url or "nothing (--dry-run)"))
    show_rows(rows)
    return dataclasses.asdict(pushed)

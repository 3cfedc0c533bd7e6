"""`firstlight prepare`."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any, Literal

import click

from firstlight.cli.output import counted, human_bytes, with_json
from firstlight.console import say


@click.command("prepare")
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@click.option("--tokenizer", required=True, help="Folder or file of a tokenizer.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder to write.")
@click.option(
    "--val-fraction",
    type=float,
    default=0.1,
    show_default=True,
    help="Share of the text held out for validation, in whole documents; 0 for none.",
)
@click.option("--workers", type=int, help="Processes; chosen by the corpus' size if left out.")
@click.option(
    "--engine",
    type=click.Choice(["local", "ray"]),
    default="local",
    show_default=True,
    help="Who encodes: processes of this machine, or a Ray cluster. The shards are the same.",
)
@click.option(
    "--ray-address",
    metavar="auto|local|HOST:PORT",
    help="The cluster: auto is one that runs here, local one for this run. Left out: either.",
)
@click.option("--text-key", default="text", show_default=True, help="Field of JSONL, Parquet.")
@click.option("--overwrite", is_flag=True, help="Replace --out if it is a prepared corpus.")
@with_json
def prepare_command(
    inputs: tuple[str, ...],
    tokenizer: str,
    out: Path,
    val_fraction: float,
    workers: int | None,
    engine: Literal["local", "ray"],
    ray_address: str | None,
    text_key: str,
    overwrite: bool,
    as_json: bool,
) -> dict[str, Any]:
    """Turn a corpus into token shards in --out.

    INPUT is a file, folder or glob of .txt, .md, .py, .jsonl[.gz|.zst] or .parquet, the word
    `stdlib`, or hf:NAME[:CONFIG]. A text file is one document, as is each line of a JSONL file
    and each row of a table. Documents that can't be read are listed in OUT/rejected.jsonl.
    """
    from firstlight.data.prepare import prepare

    manifest = prepare(
        inputs,
        tokenizer,
        out,
        val_fraction=val_fraction,
        workers=workers,
        engine=engine,
        ray_address=ray_address,
        text_key=text_key,
        overwrite=overwrite,
        progress=True,
    )
    _say_summary(out, manifest)
    return {"out": str(out), **manifest}


def _say_summary(out: Path, manifest: dict[str, Any]) -> None:
    from firstlight.data.prepare import REJECTED_NAME
    from firstlight.data.sources import REASONS

    documents = manifest["documents"]
    for split, entry in manifest["splits"].items():
        part = "document" if manifest["split_by"] != "tail" else "cut document"
        say(
            f"{out}: {split}: {counted(entry['documents'], part)}, {entry['tokens']:,} tokens, "
            f"{human_bytes(entry['text_bytes'])} of text, {counted(len(entry['shards']), 'shard')}"
        )
    for reason, count in documents["rejected"].items():
        say(f"{count:,} of {documents['read']:,} documents rejected: {REASONS[reason]}")
    if documents["rejected"]:
        with open(out / REJECTED_NAME, encoding="utf-8") as rejected:
            for entry in map(json.loads, itertools.islice(rejected, 5)):
                say(f"  {entry['file']}:{entry['line']}: {entry['detail']}")
        if sum(documents["rejected"].values()) > 5:
            say(f"  ... all of them in {out / REJECTED_NAME}")

"""`firstlight tokenizer train`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from firstlight.cli.output import human_bytes, with_json
from firstlight.console import say

if TYPE_CHECKING:
    from firstlight.data.sources import Document, Rejected


@click.group("tokenizer")
def tokenizer_group() -> None:
    """Train a tokenizer."""


@tokenizer_group.command("train")
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@click.option("--vocab-size", type=int, required=True, help="Number of tokens, 257 at least.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder to write.")
@click.option("--text-key", default="text", show_default=True, help="Field of JSONL, Parquet.")
@with_json
def train_command(
    inputs: tuple[str, ...], vocab_size: int, out: Path, text_key: str, as_json: bool
) -> dict[str, Any]:
    """Train a byte-level BPE tokenizer on a corpus and write tokenizer.json into --out.

    INPUT is a file, folder or glob of .txt, .md, .py, .jsonl[.gz|.zst] or .parquet, the word
    `stdlib`, or hf:NAME[:CONFIG].
    """
    from firstlight.data.sources import find_sources, read_documents
    from firstlight.files import new_folder, require_free
    from firstlight.tokenizer import train_tokenizer

    sources = find_sources(inputs)
    require_free(out, "folder", "choose another --out")
    counts = {"documents": 0, "rejected": 0, "text_bytes": 0}
    texts = _count_texts(read_documents(sources, text_key), counts)
    with new_folder(out) as folder:
        tokenizer = train_tokenizer(texts, vocab_size)
        tokenizer.save_pretrained(folder)
    if counts["rejected"]:
        say(f"{counts['rejected']} documents were not used (firstlight prepare lists them)")
    if tokenizer.vocab_size < vocab_size:
        say(f"the corpus gave only {tokenizer.vocab_size} of {vocab_size} tokens")
    say(
        f"{out}: {tokenizer.vocab_size} tokens from {counts['documents']:,} documents, "
        f"{human_bytes(counts['text_bytes'])}"
    )
    return {
        "out": str(out),
        "vocab_size": tokenizer.vocab_size,
        "tokenizer_sha256": tokenizer.fingerprint,
        **counts,
    }


def _count_texts(entries: Iterable[Document | Rejected], counts: dict[str, int]) -> Iterator[str]:
    from firstlight.data.sources import Document

    for entry in entries:
        if isinstance(entry, Document):
            counts["documents"] += 1
            counts["text_bytes"] += len(entry.text.encode("utf-8"))
            yield entry.text
        else:
            counts["rejected"] += 1

"""`firstlight eval`."""

from __future__ import annotations

import dataclasses
from typing import Any

import click

from firstlight.cli.output import say_rows, with_json


@click.command("eval")
@click.argument("checkpoint")
@click.option("--data", help="Prepared folder; left out: the one it was trained on.")
@click.option("--split", type=click.Choice(["val", "train"]), default="val", show_default=True)
@click.option("--seq-len", type=click.IntRange(min=1), help="Tokens a row; left out: as trained.")
@click.option(
    "--document-masking/--no-document-masking",
    default=None,
    help="Whether tokens see only their own document; left out: as trained.",
)
@click.option("--batch-size", type=click.IntRange(min=1), default=8, show_default=True)
@click.option("--device", default="auto", show_default=True)
@with_json
def eval_command(
    checkpoint: str,
    data: str | None,
    split: str,
    seq_len: int | None,
    document_masking: bool | None,
    batch_size: int,
    device: str,
    as_json: bool,
) -> dict[str, Any]:
    """Loss, perplexity and bits per byte over a whole split.

    CHECKPOINT is a run folder, a checkpoint folder, a Hugging Face model folder or a hub id.
    """
    from firstlight.console import progress_bar
    from firstlight.evaluation.perplexity import evaluate

    with progress_bar() as bar:
        task = bar.add_task("evaluating", total=None)

        def show(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        result = evaluate(
            checkpoint,
            data,
            split=split,
            seq_len=seq_len,
            document_masking=document_masking,
            batch_size=batch_size,
            device=device,
            on_rows=show,
        )
    rows: list[tuple[str, object]] = [
        ("loss", f"{result.loss:.4f} nats a token"),
        ("perplexity", f"{result.perplexity:.3f}"),
        ("bits per byte", f"{result.bits_per_byte:.4f}"),
    ]
    if result.gzip_bits_per_byte is not None:
        rows.append(("gzip -9", f"{result.gzip_bits_per_byte:.4f} bits per byte on the same text"))
    rows.append(("tokens", f"{result.tokens:,}"))
    say_rows(rows)
    return {"checkpoint": checkpoint, "split": split, **dataclasses.asdict(result)}

"""`firstlight convert`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click

from firstlight.cli.options import best_option, out_option
from firstlight.cli.output import show_rows, with_json
from firstlight.console import say


@click.command("convert")
@click.argument("source", metavar="SRC")
@click.option("--to", type=click.Choice(["hf", "gguf"]), default="hf", show_default=True)
@out_option
@click.option(
    "--dtype",
    default="auto",
    show_default=True,
    help="auto keeps the source's; f32, f16, bf16, and for GGUF q8_0.",
)
@click.option("--tokenizer", help="A tokenizer's folder or file, in place of the source's.")
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    help="JSON with what another program's files don't say, as in a Hugging Face config.json.",
)
@click.option(
    "--tolerance",
    type=float,
    help="Greatest difference of two logits that passes, as a share of the largest.",
)
@best_option
@with_json
def convert_command(
    source: str,
    to: str,
    out: Path,
    dtype: str,
    tokenizer: str | None,
    config: Path | None,
    tolerance: float | None,
    best: bool,
    as_json: bool,
) -> dict[str, Any]:
    """Convert a model and check that the result computes what the source does.

    SRC is a run, a checkpoint, a Hugging Face model folder or a hub id; or another program's
    checkpoint: a file of nanoGPT, LLMs-from-scratch or torchtune, a folder of OpenAI's GPT-2
    (TensorFlow), Meta's Llama or litgpt. What is written is read back and compared first: its
    tensors, its logits on a fixed prompt, its chat template on a fixed conversation. Where they
    are not the source's, nothing is written.
    """
    from firstlight.conversion.convert import convert

    result = convert(
        source,
        out,
        to=to,  # type: ignore[arg-type]
        dtype=dtype,
        tokenizer=tokenizer,
        config=config,
        tolerance=tolerance,
        best=best,
    )
    for note in result.notes:
        say(f"note: {note}")
    difference, largest = result.largest_difference, result.largest_logit
    show_rows(
        [
            ("source", f"{result.program}, {result.model_type}"),
            ("written", result.file or result.out),
            ("parameters", f"{result.parameters:,} in {result.dtype}"),
            ("logits", f"differ by up to {difference:.3g} (the largest is {largest:.3g})"),
            ("chat template", "the same in both" if result.has_chat_template else "none"),
        ]
    )
    values = dataclasses.asdict(result)
    return {**values, "out": str(result.out), "file": str(result.file) if result.file else None}

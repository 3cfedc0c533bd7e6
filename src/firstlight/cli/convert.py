"""`firstlight convert`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click

from firstlight.cli.options import best_option, out_option, path_option
from firstlight.cli.output import show_rows, with_json
from firstlight.console import say


@click.command("convert")
@click.argument("source", metavar="SRC")
@click.option("--to", type=click.Choice(["hf", "gguf", "ollama"]), default="hf", show_default=True)
@out_option
@click.option(
    "--dtype",
    default="auto",
    show_default=True,
    help="Type of the weights: auto (as in the source), f32, f16 or bf16; for GGUF also q8_0 and "
    "llama.cpp's formats such as q4_k_m, q6_k, iq3_s (pip install 'firstlight[llama-cpp]').",
)
@click.option("--tokenizer", help="Tokenizer folder or file to use instead of the source's.")
@path_option(
    "--config",
    help="JSON file with settings that are missing from "
    "another program's files, in the format of config.json.",
)
@click.option(
    "--tolerance",
    type=float,
    help="Largest accepted difference between the logits, "
    "relative to the largest logit; for llama.cpp's "
    "formats, the largest accepted relative increase of the perplexity.",
)
@path_option(
    "--calibration",
    help="Text file for llama.cpp's importance matrix, which weights the quantization errors.",
)
@best_option
@with_json
def convert_command(source: str, out: Path, as_json: bool, **options: Any) -> dict[str, Any]:
    """Convert a model, and verify that the result matches the source.

    SRC is a run, a checkpoint, a Hugging Face model folder, a GGUF file, a hub id or another
    program's checkpoint. Supported are checkpoint files from nanoGPT, LLMs-from-scratch and
    torchtune, and checkpoint folders from OpenAI's GPT-2 (TensorFlow), Meta's Llama, litgpt and
    nanochat. The
    result is read back and compared with the source. The comparison includes all tensors, the
    logits on a fixed prompt, and a fixed conversation rendered with the chat template. If there is
    a difference, --out is not written.
    """
    from firstlight.conversion.convert import convert

    result = convert(source, out, **options)
    for note in result.notes:
        say(f"note: {note}")
    difference, largest = result.largest_difference, result.largest_logit
    same = "the same in both" if not difference else f"differ by up to {difference:.3g}"
    cost = []
    if result.perplexity is not None:
        before, after, bits = result.perplexity
        cost = [("perplexity", f"source {before:.4g}, result {after:.4g}")]
        cost += [("bits per weight", f"{bits:.2f}")]
    show_rows(
        [
            ("source", f"{result.program}, {result.model_type}"),
            ("written", result.file or result.out),
            ("parameters", f"{result.parameters:,} in {result.dtype}"),
            ("logits", f"{same} (largest logit: {largest:.3g})"),
            *cost,
            ("chat template", "the same in both" if result.has_chat_template else "none"),
        ]
    )
    return dataclasses.asdict(result)

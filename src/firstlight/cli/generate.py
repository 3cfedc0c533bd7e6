"""`firstlight generate`."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import click

from firstlight.cli.output import with_json, write_out
from firstlight.console import say
from firstlight.errors import ConfigError


@click.command("generate")
@click.argument("checkpoint")
@click.option("--prompt", required=True, help="Text to continue; '' starts from nothing.")
@click.option("--max-new-tokens", type=int, default=128, show_default=True)
@click.option("--temperature", type=float, default=0.8, show_default=True, help="0 is greedy.")
@click.option("--top-k", type=int, default=0, show_default=True, help="0 is off.")
@click.option("--top-p", type=float, default=1.0, show_default=True, help="1 is off.")
@click.option("--min-p", type=float, default=0.0, show_default=True, help="0 is off.")
@click.option("--repetition-penalty", type=float, default=1.0, show_default=True, help="1 is off.")
@click.option("--stop", multiple=True, metavar="TEXT", help="End before it; several are allowed.")
@click.option(
    "--logprobs",
    type=int,
    metavar="N",
    help="With --json: each token's log-probability, and those of the N likeliest.",
)
@click.option("--seed", type=int, help="The same seed gives the same text.")
@click.option("--device", default="auto", show_default=True)
@click.option(
    "--dtype",
    default="auto",
    show_default=True,
    help="Of the weights: auto is the file's; float32, bfloat16, float16, int8.",
)
@click.option(
    "--compile/--no-compile",
    "compiled",
    default=False,
    show_default=True,
    help="Decode through torch.compile: a minute or so of compiling, then faster.",
)
@click.option(
    "--loading",
    default="auto",
    show_default=True,
    help="mmap: the file itself, which must not change meanwhile; sequential; straight.",
)
@with_json
def generate_command(
    checkpoint: str,
    prompt: str,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    repetition_penalty: float,
    stop: tuple[str, ...],
    logprobs: int | None,
    seed: int | None,
    device: str,
    dtype: str,
    compiled: bool,
    loading: str,
    as_json: bool,
) -> dict[str, Any]:
    """Continue a text. The prompt and its continuation go to stdout, as they are made.

    CHECKPOINT is a run folder, a checkpoint folder, a Hugging Face model folder or a hub id.
    """
    from firstlight.generation.engine import GenerationStream, load
    from firstlight.generation.sampling import SamplingConfig
    from firstlight.hardware import find_hardware

    if logprobs is not None and not as_json:
        raise ConfigError("--logprobs is for programs: it needs --json, too")
    config = SamplingConfig(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        stop=stop,
        logprobs=logprobs,
    )
    loaded = load(
        checkpoint,
        find_hardware(device).device,
        dtype=dtype,
        way=loading,  # type: ignore[arg-type]
    )
    stream = GenerationStream(loaded, prompt, config, compile=compiled)
    pieces = iter(stream)
    if not as_json:
        first = next(pieces, "")
        write_out(prompt + first)
    for piece in pieces:
        if not as_json:
            write_out(piece)
    result = stream.result
    assert result is not None
    if not as_json and sys.stdout.isatty():
        write_out("\n")
    limit = loaded.model.config.max_position_embeddings
    if result.prompt_tokens + len(result.token_ids) == limit:
        say(f"the model's context of {limit} tokens is full")
    return dataclasses.asdict(result)

"""`firstlight generate`."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import click

from firstlight.cli.options import (
    SAMPLING,
    best_option,
    compile_option,
    config_options,
    device_option,
    dtype_option,
    loading_option,
)
from firstlight.cli.output import with_json, write_out
from firstlight.console import say
from firstlight.errors import ConfigError
from firstlight.generation.config import SamplingConfig


@click.command("generate")
@click.argument("checkpoint")
@best_option
@click.option("--prompt", required=True, help="Text to continue; '' starts from nothing.")
@config_options(SamplingConfig, "max_new_tokens", *SAMPLING, "seed")
@click.option(
    "--logit-bias",
    multiple=True,
    metavar="ID=BIAS",
    help="Add -100 to 100 to a token's logit; several are allowed.",
)
@click.option("--stop", multiple=True, metavar="TEXT", help="End before it; several are allowed.")
@click.option(
    "--logprobs",
    type=int,
    metavar="N",
    help="With --json: each token's log-probability, and those of the N likeliest.",
)
@device_option
@dtype_option
@compile_option
@loading_option
@with_json
def generate_command(
    checkpoint: str,
    best: bool,
    prompt: str,
    logit_bias: tuple[str, ...],
    device: str,
    dtype: str,
    compiled: bool,
    loading: str,
    as_json: bool,
    **settings: Any,
) -> dict[str, Any]:
    """Continue a text. The prompt and its continuation go to stdout, as they are made.

    CHECKPOINT is a run folder, a checkpoint folder, a Hugging Face model folder or a hub id.
    """
    from firstlight.generation.engine import GenerationStream, load
    from firstlight.hardware.device import find_hardware

    if settings["logprobs"] is not None and not as_json:
        raise ConfigError("--logprobs is for programs: it needs --json, too")
    config = SamplingConfig(**settings, logit_bias=_biases(logit_bias))
    loaded = load(
        checkpoint,
        find_hardware(device).device,
        dtype=dtype,
        way=loading,  # type: ignore[arg-type]
        best=best,
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


def _biases(given: tuple[str, ...]) -> dict[int, float]:
    """The biases of --logit-bias by token id.

    Raises:
        ConfigError: a bias is not of the form ID=BIAS, or a token has two biases.
    """
    found: dict[int, float] = {}
    for text in given:
        token, _, bias = text.partition("=")
        try:
            token_id, value = int(token), float(bias)
        except ValueError:
            raise ConfigError(
                f"--logit-bias {text} is not of the form ID=BIAS, such as 50256=-100"
            ) from None
        if token_id in found:
            raise ConfigError(f"--logit-bias is given twice for the token {token_id}")
        found[token_id] = value
    return found

"""`firstlight generate`."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import click

from firstlight.cli.output import best_option, with_json, write_out
from firstlight.console import say
from firstlight.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])

#: How tokens are chosen: of generate and chat.
_SAMPLING = (
    click.option("--temperature", type=float, default=0.8, show_default=True, help="0 is greedy."),
    click.option("--top-k", type=int, default=0, show_default=True, help="0 is off."),
    click.option("--top-p", type=float, default=1.0, show_default=True, help="1 is off."),
    click.option("--min-p", type=float, default=0.0, show_default=True, help="0 is off."),
    click.option(
        "--repetition-penalty", type=float, default=1.0, show_default=True, help="1 is off."
    ),
    click.option(
        "--frequency-penalty",
        type=float,
        default=0.0,
        show_default=True,
        help="-2 to 2, for each time that a token was chosen; 0 is off.",
    ),
    click.option(
        "--presence-penalty",
        type=float,
        default=0.0,
        show_default=True,
        help="-2 to 2, for a token that was chosen before; 0 is off.",
    ),
)


def sampling_options(verb: F) -> F:
    """Add the options that say how tokens are chosen to a verb."""
    for option in reversed(_SAMPLING):
        verb = option(verb)
    return verb


@click.command("generate")
@click.argument("checkpoint")
@best_option
@click.option("--prompt", required=True, help="Text to continue; '' starts from nothing.")
@click.option("--max-new-tokens", type=int, default=128, show_default=True)
@sampling_options
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
    from firstlight.generation.config import SamplingConfig
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
        ConfigError: one is not of the form ID=BIAS, or a token has two.
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

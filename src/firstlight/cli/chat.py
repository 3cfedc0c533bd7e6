"""`firstlight chat`: a conversation in the terminal, or on a web page of this machine."""

from __future__ import annotations

import sys
from typing import Any

import click

from firstlight.cli.chat_terminal import Terminal, shown
from firstlight.cli.options import (
    SAMPLING,
    best_option,
    compile_option,
    config_options,
    device_option,
    dtype_option,
)
from firstlight.console import say
from firstlight.errors import ConfigError
from firstlight.generation.config import SamplingConfig


@click.command("chat")
@click.argument("checkpoint")
@best_option
@click.option("--system", metavar="TEXT", help="The system message; stays when old turns go.")
@click.option(
    "--max-new-tokens",
    type=int,
    default=512,
    show_default=True,
    help="Greatest number of tokens of an answer.",
)
@config_options(SamplingConfig, *SAMPLING, "seed")
@device_option
@dtype_option
@compile_option
@click.option("--web", is_flag=True, help="A page in the browser instead of the terminal.")
@click.option("--host", help="With --web: this machine's address; default 127.0.0.1.")
@click.option("--port", type=int, help="With --web; default 8000, 0 is any that is free.")
def chat_command(
    checkpoint: str,
    best: bool,
    system: str | None,
    device: str,
    dtype: str,
    compiled: bool,
    web: bool,
    host: str | None,
    port: int | None,
    **sampling: Any,
) -> None:
    """Talk with a model, through its chat template. A model without one continues what you write.

    CHECKPOINT is a run folder, a checkpoint folder, a Hugging Face model folder or a hub id.
    Messages can be piped in, one a line; then nothing but the answers goes to stdout.
    """
    if not web and (host is not None or port is not None):
        raise ConfigError("--host and --port are of the web page: add --web")
    from firstlight.generation.chat import ChatSession, ConversationDecoder
    from firstlight.generation.engine import load
    from firstlight.hardware.device import find_hardware

    settings = SamplingConfig(**sampling)
    if web:
        from firstlight.serving.chat_page import require_web, serve_chat

        address = require_web("127.0.0.1" if host is None else host, 8000 if port is None else port)
    loaded = load(checkpoint, find_hardware(device).device, dtype=dtype, best=best)
    if web:
        serve_chat(loaded, address, system=system, settings=settings, compile=compiled)
        return
    decoder = ConversationDecoder(loaded.model, compile=compiled)
    session = ChatSession(loaded, system=system, settings=settings, decoder=decoder)
    if compiled:
        say("compiling")
        decoder.with_room(1)
    terminal = Terminal(session, interactive=sys.stdin.isatty())
    if sys.stdin.isatty():
        kind = "" if session.has_template else "; no chat template: it continues what you write"
        say(f"{shown(loaded.folder.name)}, {session.context:,} tokens of context{kind}")
        say("/help lists the commands, Ctrl-D leaves")
    terminal.run()

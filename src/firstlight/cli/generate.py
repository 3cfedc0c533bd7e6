"""The commands `firstlight generate`, `firstlight chat` and `firstlight serve`, which generate
text.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from firstlight.cli.chat_terminal import Terminal
from firstlight.cli.options import (
    SAMPLING,
    best_option,
    compile_option,
    config_options,
    count_option,
    device_option,
    dtype_option,
    field_option,
    loading_option,
    path_option,
    template_option,
)
from firstlight.cli.output import show_table, with_json, write_out
from firstlight.console import gib, say, visible
from firstlight.errors import ConfigError, MissingDependencyError
from firstlight.generation.config import SamplingConfig
from firstlight.serving.config import (
    KEY_VARIABLE,
    Limits,
    ServerOptions,
    checked_key,
    key_from_file,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from firstlight.generation.continuation import TokenChoice
    from firstlight.lora.loading import LoadedModel
    from firstlight.serving.service import Service


def _load(
    checkpoint: str, device: str, dtype: str, best: bool, loading: Any = "auto"
) -> LoadedModel:
    from firstlight.generation.engine import load
    from firstlight.hardware.device import find_hardware

    return load(checkpoint, find_hardware(device).device, dtype=dtype, way=loading, best=best)


def _with_model_settings(config: SamplingConfig, loaded: LoadedModel) -> SamplingConfig:
    """Return a copy of the config with the settings in the model's generation_config.json. Settings
    that are given on the command line are kept.
    """
    from firstlight.generation.engine import with_model_settings

    source = click.get_current_context().get_parameter_source
    named = [name for name in SAMPLING if source(name) is not ParameterSource.DEFAULT]
    if config.beams == 1:
        _say_model_settings(loaded, named)
    return with_model_settings(config, loaded, named)


def _say_model_settings(loaded: LoadedModel, named: Sequence[str] = ()) -> None:
    own = [f"{name} {value:g}" for name, value in loaded.sampling.items() if name not in named]
    if own:
        say(f"the model's own settings (generation_config.json): {', '.join(own)}")


@click.command("generate")
@click.argument("checkpoint")
@best_option
@click.option("--prompt", required=True, help="Text to continue; '' is an empty prompt.")
@config_options(
    SamplingConfig, "max_new_tokens", *SAMPLING, "seed", "slide", "slide_tokens", "beams"
)
@count_option(
    "--show-probabilities",
    "choices",
    help="Show the N most likely tokens at each step, with their probabilities before and after "
    "penalties, biases, temperature, top-k, top-p and min-p.",
)
@click.option(
    "--logit-bias",
    multiple=True,
    metavar="ID=BIAS",
    help="Add a bias from -100 to 100 to a token's logit. Can be repeated.",
)
@click.option("--stop", multiple=True, metavar="TEXT", help="Stop before TEXT. Can be repeated.")
@click.option(
    "--logprobs",
    type=int,
    metavar="N",
    help="With --json: add each token's log-probability and the N most likely tokens.",
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
    """Continue a prompt. The prompt and its continuation are written to stdout during generation.

    CHECKPOINT is a run, a checkpoint, a Hugging Face model folder, a GGUF file or a hub id.
    """
    from firstlight.generation.engine import GenerationStream

    if settings["logprobs"] is not None and not as_json:
        raise ConfigError("--logprobs needs --json: add it")
    config = SamplingConfig(**settings, logit_bias=_biases(logit_bias))
    loaded = _load(checkpoint, device, dtype, best, loading=loading)
    config = _with_model_settings(config, loaded)
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
    if not as_json and (sys.stdout.isatty() or result.choices is not None):
        write_out("\n")
    if not as_json and result.choices is not None:
        show_table(_choice_rows(loaded, result.choices))
    limit = loaded.model.config.max_position_embeddings
    if result.prompt_tokens + len(result.token_ids) == limit and not config.slide:
        advice = (
            "add --slide to continue beyond it" if config.beams == 1 else "beam search ends there"
        )
        say(f"the model's context of {limit} tokens is full: {advice}")
    return dataclasses.asdict(result)


#: Length in characters of the bar that represents a probability of 1.
_BAR = 20


def _choice_rows(
    loaded: LoadedModel, choices: Sequence[Sequence[TokenChoice]]
) -> list[Sequence[str]]:
    """Return the rows of a table that shows the most likely tokens at each step. An arrow marks the
    token that was chosen.
    """
    from firstlight.generation.engine import tokenizer_of

    tokenizer = tokenizer_of(loaded)
    rows: list[Sequence[str]] = [("", "token", "model", "sampled", "")]
    for number, own in enumerate(choices, start=1):
        for rank, one in enumerate(own):
            text = tokenizer.decode([one.token_id])
            # Show the names of special tokens, because they are decoded to the empty string.
            text = repr(text) if text else str(tokenizer.backend.id_to_token(one.token_id))
            place = str(number) if rank == 0 else ""
            bar = "#" * round(_BAR * one.sampled) + (" <-" if one.is_chosen else "")
            bar = f"{bar:<{_BAR + 3}}"
            rows.append((place, visible(text), f"{one.model:.1%}", f"{one.sampled:.1%}", bar))
    return rows


def _biases(given: tuple[str, ...]) -> dict[int, float]:
    """Return the logit biases that --logit-bias specifies, keyed by token id.

    Raises:
        ConfigError: a value does not have the form ID=BIAS, or there are two biases for the same
            token.
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
            raise ConfigError(f"--logit-bias is given twice for token {token_id}")
        found[token_id] = value
    return found


@click.command("chat")
@click.argument("checkpoint")
@best_option
@click.option("--system", metavar="TEXT", help="System message; kept when old turns are dropped.")
@click.option(
    "--max-new-tokens",
    type=int,
    default=512,
    show_default=True,
    help="Maximum number of tokens per answer.",
)
@config_options(SamplingConfig, *SAMPLING, "seed")
@template_option
@device_option
@dtype_option
@compile_option
@click.option("--web", is_flag=True, help="Chat in the browser instead of the terminal.")
@click.option("--host", help="With --web: address to listen on.  [default: 127.0.0.1]")
@click.option("--port", type=int, help="Port for --web; 0 picks a free port.  [default: 8000]")
def chat_command(
    checkpoint: str,
    best: bool,
    system: str | None,
    template_options: dict[str, Any],
    device: str,
    dtype: str,
    compiled: bool,
    web: bool,
    host: str | None,
    port: int | None,
    **sampling: Any,
) -> None:
    """Chat with a model in the format of its chat template. A model without a chat template
    continues your text.

    CHECKPOINT is a run, a checkpoint, a Hugging Face model folder, a GGUF file or a hub id.
    Messages can also be piped in, one per line. Only the answers are then written to stdout.
    """
    if not web and (host is not None or port is not None):
        raise ConfigError("--host and --port are for the web page: add --web")
    from firstlight.generation.chat import ChatSession, ConversationDecoder

    settings = SamplingConfig(**sampling)
    if web:
        from firstlight.serving.chat_page import require_web, serve_chat

        address = require_web("127.0.0.1" if host is None else host, 8000 if port is None else port)
    loaded = _load(checkpoint, device, dtype, best)
    settings = _with_model_settings(settings, loaded)
    options: dict[str, Any] = {
        "system": system,
        "settings": settings,
        "template_options": template_options,
    }
    if web:
        serve_chat(loaded, address, compile=compiled, **options)
        return
    decoder = ConversationDecoder(loaded.model, compile=compiled)
    session = ChatSession(loaded, decoder=decoder, **options)
    if compiled:
        say("compiling")
        decoder.with_room(1)
    terminal = Terminal(session, interactive=sys.stdin.isatty())
    if sys.stdin.isatty():
        kind = "" if session.has_template else "; no chat template: it continues your text"
        say(f"{loaded.folder.name}, {session.context:,} tokens of context{kind}")
        say("/help lists the commands, Ctrl-D leaves the chat")
    terminal.run()


@click.command("serve")
@click.argument("checkpoint")
@best_option
@config_options(ServerOptions, "host", "port")
@click.option(
    "--model-name", help="Name of the model in the API.  [default: name of the checkpoint]"
)
@path_option(
    "--api-key-file",
    metavar="FILE",
    help="File with the API key that clients must send, or set FIRSTLIGHT_API_KEY.",
)
@field_option(ServerOptions, "allowed_hosts", "--allowed-host", "NAME")
@field_option(ServerOptions, "allowed_origins", "--allowed-origin", "URL")
@template_option
@config_options(
    ServerOptions, "max_batch_size", "max_queue", "max_context_tokens", "shutdown_timeout"
)
@config_options(Limits)
@device_option
@dtype_option
@loading_option
@config_options(ServerOptions, "compile")
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print one JSON object to stdout when the server is ready: url, model, ...",
)
def serve_command(
    checkpoint: str,
    best: bool,
    model_name: str | None,
    api_key_file: Path | None,
    device: str,
    dtype: str,
    loading: str,
    as_json: bool,
    **options: Any,
) -> None:
    """Serve a model with an OpenAI-compatible HTTP API and a chat page. Ctrl-C stops the server.

    CHECKPOINT is a run, a checkpoint, a Hugging Face model folder, a GGUF file or a hub id.
    """
    require_packages()
    from firstlight.serving.server import serve

    limits = {one.name: options.pop(one.name) for one in dataclasses.fields(Limits)}
    server = ServerOptions(
        model_name=model_name or _name_of(checkpoint),
        api_key=_api_key(api_key_file),
        limits=Limits(**limits),
        **options,
    )
    loaded = _load(checkpoint, device, dtype, best, loading=loading)
    _say_model_settings(loaded)
    serve(loaded, server, on_ready=lambda url, run: _say_ready(url, run, server, as_json))


def _name_of(checkpoint: str) -> str:
    """Return the name under which the API lists the model. It is the hub id of the model or, for a
    local model, the name of its folder.
    """
    path = Path(checkpoint)
    return path.resolve().name or "model" if path.exists() else checkpoint


def _api_key(file: Path | None) -> bytes | None:
    """Return the API key, or None if no key is specified.

    The key is read from the file or, if no file is given, from the environment variable.

    The key can't be passed as an option, because other users of the machine can read the command
    line.

    Raises:
        ConfigError: the key is invalid.
        InputError: the file can't be read.
    """
    if file is not None:
        return key_from_file(file)
    key = os.environ.get(KEY_VARIABLE)
    return None if key is None else checked_key(os.fsencode(key), KEY_VARIABLE)


def _say_ready(url: str, service: Service, options: ServerOptions, as_json: bool) -> None:
    scheduler = service.scheduler
    # Browsers do not send the API key, so they can't open the page.
    page = f", chat page: {url}/" if options.api_key is None else ""
    say(f"serving {options.model_name}; API: {url}/v1{page} (Ctrl-C stops the server)")
    say(
        f"at most {options.max_batch_size} concurrent texts of {scheduler.max_tokens:,} tokens, KV "
        f"cache of {gib(service.cache_bytes)}; up to {options.max_queue} more can wait"
    )
    if options.api_key is not None:
        say("clients must send the API key")
    if as_json:
        content = {
            "url": url,
            "model": options.model_name,
            "max_batch_size": options.max_batch_size,
            "max_context_tokens": scheduler.max_tokens,
            "cache_bytes": service.cache_bytes,
            "needs_key": options.api_key is not None,
        }
        write_out(json.dumps(content, ensure_ascii=False) + "\n")


def require_packages() -> None:
    """Check that the optional packages required by `firstlight.serving` are installed.

    Raises:
        MissingDependencyError: a package is missing.
    """
    for name in ("fastapi", "uvicorn", "prometheus_client"):
        if importlib.util.find_spec(name) is None:
            raise MissingDependencyError(name, "serve", "the server")

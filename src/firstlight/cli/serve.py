"""`firstlight serve`."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from firstlight.cli.options import (
    best_option,
    config_options,
    device_option,
    dtype_option,
    loading_option,
)
from firstlight.cli.output import human_bytes, write_out
from firstlight.console import say
from firstlight.errors import MissingDependencyError
from firstlight.serving.config import (
    KEY_VARIABLE,
    Limits,
    ServerOptions,
    checked_key,
    key_from_file,
)

if TYPE_CHECKING:
    from firstlight.serving.service import Service


@click.command("serve")
@click.argument("checkpoint")
@best_option
@config_options(ServerOptions, "host", "port")
@click.option("--model-name", help="For clients; the checkpoint's name, if not given.")
@click.option(
    "--api-key-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Its one line must be sent by clients; or set FIRSTLIGHT_API_KEY.",
)
@click.option(
    "--allowed-host",
    multiple=True,
    metavar="NAME",
    help="Another name that requests may be sent to (the header Host); several are allowed.",
)
@click.option(
    "--allowed-origin",
    multiple=True,
    metavar="URL",
    help="A page elsewhere that may ask (the header Origin); several are allowed.",
)
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
    help="Print one JSON object on stdout when ready: url, model, ...",
)
def serve_command(
    checkpoint: str,
    best: bool,
    model_name: str | None,
    api_key_file: Path | None,
    allowed_host: tuple[str, ...],
    allowed_origin: tuple[str, ...],
    device: str,
    dtype: str,
    loading: str,
    as_json: bool,
    **bounds: Any,
) -> None:
    """Answer OpenAI's clients over HTTP, until Ctrl-C.

    CHECKPOINT is a run folder, a checkpoint folder, a Hugging Face model folder or a hub id.
    """
    require_packages()
    from firstlight.generation.engine import load
    from firstlight.hardware.device import find_hardware
    from firstlight.serving.server import serve

    limits = {one.name: bounds.pop(one.name) for one in dataclasses.fields(Limits)}
    options = ServerOptions(
        model_name=model_name or _name_of(checkpoint),
        api_key=_api_key(api_key_file),
        allowed_hosts=allowed_host,
        allowed_origins=allowed_origin,
        limits=Limits(**limits),
        **bounds,
    )
    loaded = load(
        checkpoint,
        find_hardware(device).device,
        dtype=dtype,
        way=loading,  # type: ignore[arg-type]
        best=best,
    )

    def ready(url: str, service: Service) -> None:
        _say_ready(url, service, options, as_json)

    serve(loaded, options, on_ready=ready)


def _name_of(checkpoint: str) -> str:
    """Name of a model for clients: a hub id, or a folder's name without the path to it."""
    path = Path(checkpoint)
    return path.resolve().name or "model" if path.exists() else checkpoint


def _api_key(file: Path | None) -> bytes | None:
    """The API key of the file, or else of the environment.

    There is no option for the key itself: other users of the machine can read a command line.

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
    say(f"serving {service.name} at {url}/v1 (Ctrl-C ends it)")
    say(
        f"at most {options.max_batch_size} texts of {scheduler.max_tokens:,} tokens at a time, "
        f"keys and values: {human_bytes(service.cache_bytes)}; {options.max_queue} more may wait"
    )
    if options.api_key is not None:
        say("clients need the API key")
    if as_json:
        content = {
            "url": url,
            "model": service.name,
            "max_batch_size": options.max_batch_size,
            "max_context_tokens": scheduler.max_tokens,
            "cache_bytes": service.cache_bytes,
            "needs_key": options.api_key is not None,
        }
        write_out(json.dumps(content, ensure_ascii=False) + "\n")


def require_packages() -> None:
    """Check that the server's packages are installed, before `serving` is imported.

    Raises:
        MissingDependencyError: a package is missing.
    """
    for name in ("fastapi", "uvicorn", "prometheus_client"):
        if importlib.util.find_spec(name) is None:
            raise MissingDependencyError(name, "serve", "the server")

"""`firstlight train INPUT...`: the verb with texts in place of a recipe."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import psutil

from firstlight.cli.output import show
from firstlight.console import parse_time, say
from firstlight.errors import ConfigError

if TYPE_CHECKING:
    from firstlight.pipeline.plan import TextPlan
    from firstlight.training.loop import TrainResult

F = TypeVar("F", bound=Callable[..., Any])

#: Files of folders that are no texts: of a run, a model, a prepared corpus. The modules that define
#: these names import torch, which the first line of output is not to wait for.
_OTHER_FOLDERS = ("recipe.yaml", "config.json", "manifest.json")

#: Options that only texts take, by parameter.
TEXT_OPTIONS = ("budget", "tokens", "steps", "size", "plan_only", "gpu", "text_key")


def text_options(verb: F) -> F:
    """Add the options for texts to the verb."""
    for option in reversed(
        (
            click.option("--budget", metavar="TIME", help="Texts: time of the whole command: 30m."),
            click.option("--tokens", metavar="N", help="Texts: tokens to train on, such as 10M."),
            click.option("--steps", type=int, metavar="N", help="Texts: steps to train."),
            click.option(
                "--size",
                metavar="SIZE",
                help="Texts: tiny, small, medium, large, xl, or parameters such as 10M.",
            ),
            click.option(
                "--plan-only", is_flag=True, help="Texts: show what would be trained, and end."
            ),
            click.option("--gpu", metavar="NAME", help="With --plan-only: a GPU somewhere else."),
            click.option("--text-key", metavar="KEY", help="Texts: field of JSONL, CSV, Parquet."),
        )
    ):
        verb = option(verb)
    return verb


def takes_texts(paths: Sequence[str]) -> bool:
    """Whether the arguments of the verb are texts, not a recipe, run, model or prepared corpus."""
    places = [Path(path).expanduser() for path in paths]
    if any(place.suffix.lower() in (".yaml", ".yml") for place in places):
        return False
    if len(paths) != 1:
        return len(paths) > 1
    (path,), (place,) = paths, places
    if place.is_dir():
        return not any((place / name).is_file() for name in _OTHER_FOLDERS)
    is_glob = any(character in path for character in "*?[")
    return place.is_file() or path == "stdlib" or path.startswith("hf:") or is_glob


def train_texts_command(
    paths: Sequence[str], overrides: Sequence[tuple[str, str]], options: dict[str, Any]
) -> tuple[dict[str, Any], TrainResult | None]:
    """Train on texts, or with --plan-only show what would be trained.

    Returns:
        (result as JSON values, result of the training if there was any).

    Raises:
        ConfigError: options that don't go together, or several processes were started.
    """
    from firstlight.pipeline.run import train_texts

    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError(
            "texts are prepared by one process: leave out --nproc and stop the run once it trains, "
            "then firstlight train RUN_FOLDER/recipe.yaml --resume --nproc N"
        )
    text_key = options["text_key"] or "text"
    length = {name: options[name] for name in ("budget", "tokens", "steps")}
    if options["plan_only"]:
        from firstlight.pipeline.plan import plan_texts, request_of, scan_texts

        request = request_of(
            paths, **length, size=options["size"], overrides=overrides, text_key=text_key
        )
        scan = scan_texts(request, say, progress=True)
        return _show_plan(plan_texts(request, scan, options["gpu"])), None
    if options["gpu"] is not None:
        raise ConfigError("--gpu is for --plan-only: add that, or call this on that machine")
    run = train_texts(
        paths,
        **length,
        size=options["size"],
        overrides=overrides,
        text_key=text_key,
        ask=_ask if sys.stdin.isatty() and sys.stderr.isatty() else None,
        began=psutil.Process().create_time(),
    )
    from firstlight.pipeline.result import result_lines

    for line in result_lines(run):
        show(line)
    found = dataclasses.asdict(dataclasses.replace(run, training=None))
    stopped_by = None if run.training is None else run.training.stopped_by
    found |= {"run_folder": str(run.run_folder), "stopped_by": stopped_by}
    return found, run.training


def _show_plan(plan: TextPlan) -> dict[str, Any]:
    from firstlight.pipeline.plan import plan_lines

    for line in plan_lines(plan):
        show(line)
    return {
        "machine": plan.speed.name,
        "corpus": dataclasses.asdict(plan.scan.facts),
        **dataclasses.asdict(plan.choices),
    }


def _ask(plan: TextPlan) -> float:
    """Ask a person how long the run is to take."""
    from firstlight.pipeline.plan import offers, time_text

    say("How long may it take?")
    for seconds, choices in offers(plan):
        low, high = choices.bits_per_byte
        say(
            f"  {time_text(seconds):<8}  {choices.parameters / 1e6:,.1f}M parameters, expected "
            f"{low:.2f} to {high:.2f} bits for a byte"
        )
    while True:
        answer = click.prompt("time, such as 10m", default="10m", err=True)
        try:
            return parse_time(answer)
        except ConfigError as error:
            say(str(error))

"""`firstlight train INPUT...`: the command with texts instead of a recipe."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import psutil

from firstlight.cli.options import as_is_option, grouped
from firstlight.cli.output import show
from firstlight.console import console, parse_time, say, time_text
from firstlight.errors import ConfigError

if TYPE_CHECKING:
    from firstlight.from_texts.plan import RunPlan
    from firstlight.training.loop import TrainResult

#: Files that show that a folder is a run, a model or a prepared corpus rather than texts, and a
#: pattern in each, since users' files may have the same names. The names are written here, because
#: the modules that define them import torch, which would delay the first line of output.
_OTHER_FOLDERS = {
    "recipe.yaml": r"^data:",
    "config.json": r'"(model_type|architectures)"\s*:',
    "manifest.json": r'"tokenizer_sha256"\s*:',
}
#: Characters of such a file in which the pattern is searched.
_HEAD_BYTES = 1 << 20

#: Parameters of the options that are only for texts.
TEXT_OPTIONS = (
    "budget",
    "tokens",
    "steps",
    "size",
    "plan_only",
    "gpu",
    "text_key",
    "val_inputs",
    "as_is",
)


#: The options that are only for texts.
text_options = grouped(
    click.option("--budget", metavar="TIME", help="Texts: time of the whole command: 30m."),
    click.option("--tokens", metavar="N", help="Texts: tokens to train on, such as 10M."),
    click.option("--steps", type=int, metavar="N", help="Texts: steps to train."),
    click.option(
        "--size",
        metavar="SIZE",
        help="Texts: tiny, small, medium, large, xl, or parameters such as 10M.",
    ),
    click.option("--plan-only", is_flag=True, help="Texts: show what would be trained, and end."),
    click.option("--gpu", metavar="NAME", help="With --plan-only: GPU to plan for."),
    click.option("--text-key", metavar="KEY", help="Texts: field of JSONL, CSV, Parquet."),
    click.option(
        "--val-input",
        "val_inputs",
        multiple=True,
        metavar="INPUT",
        help="Texts: texts to validate on; nothing of the others is held out then.",
    ),
    as_is_option,
)


def takes_texts(paths: Sequence[str]) -> bool:
    """True if the paths are texts rather than a recipe, run, model or prepared corpus."""
    places = [Path(path).expanduser() for path in paths]
    if any(place.suffix.lower() in (".yaml", ".yml") for place in places):
        return False
    if len(paths) != 1:
        return len(paths) > 1
    (path,), (place,) = paths, places
    if place.is_dir():
        return not any(_holds(place / name, sign) for name, sign in _OTHER_FOLDERS.items())
    is_glob = any(character in path for character in "*?[")
    return place.is_file() or path == "stdlib" or path.startswith("hf:") or is_glob


def _holds(path: Path, sign: str) -> bool:
    """True if the file exists and contains the pattern `sign`.

    True also if the file can't be read, so that the error is about reading it.
    """
    if not path.is_file():
        return False
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return re.search(sign, file.read(_HEAD_BYTES), re.MULTILINE) is not None
    except OSError:
        return True


def train_texts_command(
    paths: Sequence[str], overrides: Sequence[tuple[str, str]], options: dict[str, Any]
) -> tuple[dict[str, Any], TrainResult | None]:
    """Train on texts or conversations, or with --plan-only show what would be trained.

    Args:
        paths: the inputs.
        overrides: (`section.key`, value) pairs.
        options: values of the command's options by parameter.

    Returns:
        The result as a JSON object; and the result of the training, None if nothing was trained.

    Raises:
        ConfigError: options contradict each other, or several processes were started.
    """
    from firstlight.from_texts.run import train_texts, work_of

    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError(
            "texts are prepared by one process: leave out --nproc and stop the run once it trains, "
            "then firstlight train RUN_FOLDER/recipe.yaml --resume --nproc N"
        )
    names = ("budget", "tokens", "steps", "size", "init_from", "val_inputs", "as_is")
    asked = {name: options[name] for name in names}
    asked |= {"overrides": overrides, "text_key": options["text_key"] or "text"}
    if options["plan_only"]:
        if options["resume"]:
            raise ConfigError("--plan-only shows a new run: leave out --resume, or --plan-only")
        from firstlight.from_texts.request import DEFAULT_SECONDS, request_of

        request = request_of(paths, **asked)
        if not request.has_length:
            say(f"no --budget is given: planned for {time_text(DEFAULT_SECONDS)}")
        plan = work_of(request, say, progress=True).plan(request, options["gpu"])
        plan = plan.with_memory()
        for line in plan.lines():
            show(line)
        return plan.record(), None
    if options["gpu"] is not None:
        raise ConfigError("--gpu is for --plan-only: add that, or call this on that machine")
    run = train_texts(
        paths,
        **asked,
        resume=options["resume"],
        ask=_ask if sys.stdin.isatty() and sys.stderr.isatty() else None,
        began=psutil.Process().create_time(),
    )
    from firstlight.from_texts.result import result_lines

    # On a terminal, the live view with its curve stays on the screen.
    for line in result_lines(run, with_curve=run.training is None or not console().is_interactive):
        show(line)
    found = dataclasses.asdict(dataclasses.replace(run, training=None))
    stopped_by = None if run.training is None else run.training.stopped_by
    return {**found, "stopped_by": stopped_by}, run.training


def _ask(plan: RunPlan) -> float:
    """Ask the user for the duration of the run; returns seconds."""
    from firstlight.from_texts.plan import offers

    say("How long may it take?")
    for seconds, choices in offers(plan):
        expected = f"{choices.epochs:.2g} passes over the data"
        if choices.bits_per_byte is not None:
            low, high = choices.bits_per_byte
            expected = f"expected {low:.2f} to {high:.2f} bits for a byte"
        size = f"{choices.parameters / 1e6:,.1f}M parameters"
        say(f"  {time_text(seconds):<8}  {size}, {expected}")
    while True:
        answer = click.prompt("time, such as 10m", default="10m", err=True)
        try:
            if (seconds := parse_time(answer)) > 0:
                return seconds
            say("the time has to be more than 0")
        except ConfigError as error:
            say(str(error))

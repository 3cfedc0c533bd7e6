"""Reads the examples for other programs: shell scripts, and container files."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from firstlight.cli.main import firstlight
from firstlight.cli.options import split_arguments
from firstlight.parallel.elastic import Launch
from firstlight.recipe import Recipe, load_recipe

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"

#: Of a Dockerfile: https://docs.docker.com/reference/dockerfile
_INSTRUCTIONS = (
    "ADD ARG CMD COPY ENTRYPOINT ENV EXPOSE FROM HEALTHCHECK LABEL ONBUILD RUN SHELL STOPSIGNAL "
    "USER VOLUME WORKDIR"
).split()


def commands_of(script: str) -> list[list[str]]:
    """A shell script's commands as words, with continued lines joined; quotes are taken off,
    variables left as they are."""
    joined = re.sub(r"\\\n\s*", " ", script)
    return [
        shlex.split(line, comments=True)
        for line in joined.splitlines()
        if line.strip() and not line.lstrip().startswith("#")
    ]


def train_arguments(words: list[str], values: dict[str, str]) -> list[str]:
    """What follows `train` in a command, with variables filled in.

    Args:
        words: of a command that has `train` among them.
        values: by `$NAME`, `${NAME}` or `$(NAME)`, as the word is without its dashes and option;
            what is not there stays.
    """
    arguments = words[words.index("train") + 1 :]
    arguments = arguments[: arguments.index("&")] if "&" in arguments else arguments
    filled = []
    for word in arguments:
        for name, value in values.items():
            word = word.replace(name, value)
        filled.append(word)
    return filled


def parsed_train(arguments: list[str]) -> tuple[click.Context, Recipe]:
    """`firstlight train ARGUMENTS` as its own parser reads it, and the recipe that it names, with
    what is set on the command line."""
    command = firstlight.commands["train"]
    context = command.make_context("train", list(arguments))
    path, overrides = split_arguments(context.params["arguments"], "train")
    return context, load_recipe(ROOT / path, overrides)


def instructions_of(path: Path) -> Iterator[tuple[str, str]]:
    """A Dockerfile's (instruction, rest), continued lines joined.

    Raises:
        ValueError: a line is no instruction.
    """
    kept = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    for line in re.sub(r"\\\n\s*", " ", "\n".join(kept)).splitlines():
        if line.strip():
            name, _, rest = line.partition(" ")
            if name not in _INSTRUCTIONS:
                raise ValueError(f"{path}: '{name}' is no instruction")
            yield name, rest.strip()


def require_launch(options: dict[str, Any], machines: int) -> None:
    """Options of `firstlight train` that a launch of so many machines takes."""
    rank = int(options["node_rank"])
    launch = Launch(
        int(options["nproc"]),
        int(options["nnodes"]),
        rank,
        options["rdzv_endpoint"],
        options["max_restarts"],
    )
    assert launch.nnodes == machines
    assert re.fullmatch(r"[\w.-]+:\d+", launch.endpoint)
    assert options["resume"] is True

"""Options that verbs share: those of a config class's fields, and those of several verbs.

The config classes are imported with the command line, so their modules import neither torch nor
pydantic.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from collections.abc import Callable
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True)
class ConfigField:
    """A field of a config dataclass, as an option needs it.

    Attributes:
        kind: type of the value, without None.
        default: default value.
        text: documentation of the field in the docstring of its class.
    """

    kind: type
    default: Any
    text: str


def config_fields(config: type) -> dict[str, ConfigField]:
    """The documented fields of a config dataclass by name."""
    # Base classes first: a class may say more of a field than its base.
    docs = "\n".join(inspect.cleandoc(one.__doc__ or "") for one in reversed(config.__mro__[:-1]))
    documented = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", docs, re.M)
    texts = {name: " ".join(text.split()) for name, text in documented}
    hints = typing.get_type_hints(config)
    found = {}
    for field in dataclasses.fields(config):
        kinds = [one for one in typing.get_args(hints[field.name]) if one is not NoneType]
        kind = kinds[0] if kinds else hints[field.name]
        found[field.name] = ConfigField(kind, field.default, texts.get(field.name, ""))
    return found


def config_options(config: type, *names: str) -> Callable[[F], F]:
    """A decorator that gives a verb an option for each named field of a config dataclass.

    Option, type, default and help text are those of the field.

    Args:
        config: the dataclass.
        names: names of the fields in the order of --help; without any, all fields.
    """
    fields = config_fields(config)

    def add(verb: F) -> F:
        for name in reversed(names or tuple(fields)):
            field, option = fields[name], name.replace("_", "-")
            verb = click.option(
                f"--{option}/--no-{option}" if field.kind is bool else f"--{option}",
                type=field.kind,
                default=field.default,
                show_default=field.default is not None,
                help=field.text[:1].upper() + field.text[1:],
            )(verb)
        return verb

    return add


best_option = click.option(
    "--best",
    is_flag=True,
    help="Of a run folder: the checkpoint with the lowest validation loss, not the newest.",
)
out_option = click.option(
    "--out", type=click.Path(path_type=Path), required=True, help="Folder to write."
)
text_key_option = click.option(
    "--text-key", default="text", show_default=True, help="Field of JSONL, CSV, Parquet."
)
device_option = click.option(
    "--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:1, mps."
)
dtype_option = click.option(
    "--dtype",
    default="auto",
    show_default=True,
    help="Type of the weights: auto is the file's; float32, bfloat16, float16, int8.",
)
loading_option = click.option(
    "--loading",
    default="auto",
    show_default=True,
    help="mmap: the file itself, which must not change meanwhile; sequential; straight.",
)
compile_option = click.option(
    "--compile/--no-compile",
    "compiled",
    default=False,
    show_default=True,
    help="Decode through torch.compile: a minute or so of compiling, then faster.",
)
#: Options that say how tokens are chosen.
SAMPLING = (
    *("temperature", "top_k", "top_p", "min_p"),
    *("repetition_penalty", "frequency_penalty", "presence_penalty"),
)

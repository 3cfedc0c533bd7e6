"""Options of commands.

This module defines the options that several commands have in common, and it creates options from
the fields of config dataclasses. It also parses the recipe argument and its overrides.

Config dataclasses are imported by every command, so their modules must not import torch or
pydantic.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import shlex
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar

import click

from firstlight.errors import ConfigError, nearest

F = TypeVar("F", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True)
class ConfigField:
    """Properties of a field in a config dataclass, from which an option is created.

    Attributes:
        kind: type of the value. For an optional field, the type without None.
        default: default value.
        text: description of the field in the docstring of its class.
    """

    kind: type
    default: Any
    text: str

    @property
    def help(self) -> str:
        """Help text of the option: `text`, beginning with a capital letter."""
        return self.text[:1].upper() + self.text[1:]


def config_fields(config: type) -> dict[str, ConfigField]:
    """Return the fields of a config dataclass, keyed by name. The description of each field is read
    from the docstring of the class.
    """
    # Visit base classes first, so that a description in a derived class replaces that in the base
    # class.
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


def _split(_: click.Context, __: click.Parameter, value: str | None) -> list[str] | None:
    """Click callback that splits a string at commas: "a,b" becomes ["a", "b"]."""
    return None if value is None else [part.strip() for part in value.split(",") if part.strip()]


def config_options(
    config: type, *names: str, only_on: bool = False, **metavars: str
) -> Callable[[F], F]:
    """Return a decorator that adds options to a command, one for each of the given fields of a
    config dataclass.

    The name, type, default value and help text of an option are those of the field.

    Args:
        config: the dataclass.
        names: names of the fields, in the order in which --help lists them. If no names are given,
            options are added for all fields.
        only_on: True to omit the --no-NAME variant of boolean options.
        metavars: placeholders for the values in --help, keyed by field name.
    """
    fields = config_fields(config)

    def add(verb: F) -> F:
        for name in reversed(names or tuple(fields)):
            field, option = fields[name], name.replace("_", "-")
            settings: dict[str, Any] = {"type": field.kind, "default": field.default}
            settings |= {"show_default": True, "metavar": metavars.get(name)}
            if field.kind is bool and only_on:
                settings = {"is_flag": True}
            elif field.kind is bool:
                option += f"/--no-{option}"
            elif field.default == () or field.kind not in (int, float, str):
                settings = {"metavar": "NAME,...", "callback": _split}
                settings["default"] = None if field.default is None else ""
            verb = click.option(f"--{option}", help=field.help, **settings)(verb)
        return verb

    return add


def field_option(
    config: type, name: str, option: str, metavar: str | None = None
) -> Callable[[F], F]:
    """Return a decorator that adds an option for a single field of a config dataclass to a command.
    The option can have a different name than the field.

    The option can be given several times, unless the type of the field is a path.

    Args:
        config: the dataclass, from which the default value and the help text of the option are
            read.
        name: name of the field.
        option: name of the option.
        metavar: placeholder for the value in --help.
    """
    field = config_fields(config)[name]
    settings: dict[str, Any] = {"default": field.default, "help": field.help, "metavar": metavar}
    if field.kind is Path:
        return path_option(option, name, **settings)
    return click.option(option, name, multiple=True, show_default=True, **settings)


def count_option(
    *names: str, least: int = 1, metavar: str = "N", **settings: Any
) -> Callable[[F], F]:
    """Return a decorator that adds an option to a command. The value of the option is an integer of
    at least `least`. All other arguments are those of `click.option`.
    """
    return click.option(*names, type=click.IntRange(min=least), metavar=metavar, **settings)


def path_option(*names: str, **settings: Any) -> Callable[[F], F]:
    """Return a decorator that adds an option to a command. The value of the option is the path of a
    file or folder. The arguments are those of `click.option`.
    """
    return click.option(*names, type=click.Path(path_type=Path), **settings)


def grouped(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Return a decorator that adds several options to a command. --help lists them in the given
    order.
    """

    def add(verb: F) -> F:
        for option in reversed(options):
            verb = option(verb)
        return verb

    return add


#: Argument for the recipe and its overrides. Commands that use it must set `ignore_unknown_options`
#: in their `context_settings`.
recipe_argument = click.argument(
    "arguments", nargs=-1, type=click.UNPROCESSED, metavar="RECIPE.yaml [--section.key VALUE]..."
)
best_option = click.option(
    "--best",
    is_flag=True,
    help="For a run, use its best checkpoint instead of its newest.",
)
out_option = path_option("--out", required=True, help="Folder to write.")
text_key_option = click.option(
    "--text-key",
    default="text",
    show_default=True,
    help="Name of the text field in JSONL, CSV or Parquet files.",
)
as_is_option = click.option(
    "--as-is",
    is_flag=True,
    help="Read texts unchanged: keep <|endoftext|>, CRLF and Project Gutenberg's licence.",
)
device_option = click.option(
    "--device", default="auto", show_default=True, help="Device: auto, cpu, cuda, cuda:1 or mps."
)
dtype_option = click.option(
    "--dtype",
    default="auto",
    show_default=True,
    help="Type of the weights: auto (as stored), float32, bfloat16, float16; int8 on a CPU.",
)
loading_option = click.option(
    "--loading",
    default="auto",
    show_default=True,
    help="How to read the weights: mmap (the file must not change), sequential or straight.",
)
task_options = grouped(
    count_option("--items", help="Use only the first N items of each task."),
    click.option(
        "--task-folder",
        metavar="DIR",
        help="Folder with additional tasks for lm-evaluation-harness.",
    ),
    click.option(
        "--apply-chat-template/--no-apply-chat-template",
        "chat_template",
        default=None,
        help="Apply the model's chat template to items of lm-eval tasks. "
        " [default: as specified in the task's metadata, otherwise off]",
    ),
)
compile_option = click.option(
    "--compile/--no-compile",
    "compiled",
    default=False,
    show_default=True,
    help="Decode with torch.compile: faster after about a minute of compiling.",
)


def _template_options(
    _: click.Context, __: click.Parameter, value: tuple[str, ...]
) -> dict[str, Any]:
    """Click callback that converts strings of the form "NAME=VALUE" to a dict. Values are parsed as
    JSON if possible.
    """
    found: dict[str, Any] = {}
    for text in value:
        name, equals, given = text.partition("=")
        if not name.isidentifier() or not equals:
            raise ConfigError(
                f"--template-option {text} is not of the form NAME=VALUE, such as "
                "enable_thinking=false"
            )
        try:
            # Users may write these values as they are written in Jinja or Python.
            found[name] = json.loads(given.lower() if given in ("True", "False") else given)
        except ValueError:
            found[name] = given
    return found


template_option = click.option(
    "--template-option",
    "template_options",
    multiple=True,
    metavar="NAME=VALUE",
    callback=_template_options,
    help="Variable of the chat template, such as enable_thinking=false. Can be repeated.",
)
#: Fields of SamplingConfig that are options of `generate` and `chat`.
SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
)

#: Suffixes of other text files that users may pass instead of a recipe. `prepare` can't read these
#: files.
_OTHER_TEXT = (".pdf", ".docx", ".odt", ".epub", ".html", ".xlsx", ".rtf", ".json", ".zip")
_EXAMPLES = {
    "train": "firstlight train recipes/demo.yaml --data.dir mine/data",
    "plan": 'firstlight plan recipes/gpt2-124m.yaml --gpu "RTX 4090"',
    "tune": "firstlight tune recipes/demo.yaml --budget 1h",
}


def split_arguments(
    arguments: Sequence[str], verb: str, *, is_run: bool = False
) -> tuple[str, list[tuple[str, str]]]:
    """Parse the arguments of a command. Return the path of the recipe, and the overrides as pairs
    of `section.key` and value.

    An override has the form `--section.key VALUE` or `--section.key=VALUE`. An override without a
    value sets the key to true.

    Args:
        arguments: arguments of the command.
        verb: name of the command: "train", "plan" or "tune".
        is_run: True if the path is a run or checkpoint instead of a recipe.

    Raises:
        ConfigError: there is not exactly one path, the path is not a recipe, or an option is
            unknown.
    """
    paths, overrides = split_paths(arguments)
    if len(paths) != 1:
        problem = f"more than one recipe: {' '.join(paths)}" if paths else "no recipe given"
        usage = f"firstlight {verb} RECIPE.yaml [--section.key VALUE]..."
        raise ConfigError(f"{problem}; use: {usage} (for example {_EXAMPLES[verb]})")
    if not is_run:
        _require_recipe(paths[0], verb)
    return paths[0], overrides


def split_paths(arguments: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the arguments that are not options, and the overrides as pairs of `section.key` and
    value.

    Raises:
        ConfigError: an option is unknown.
    """
    paths: list[str] = []
    overrides: list[tuple[str, str]] = []
    waiting = list(arguments)
    while waiting:
        argument = waiting.pop(0)
        if not argument.startswith("-") or argument == "-":
            paths.append(argument)
            continue
        name, equals, value = argument.removeprefix("--").partition("=")
        if not argument.startswith("--") or "." not in name:
            raise ConfigError(_unknown_option(argument, name))
        if not equals:
            has_value = bool(waiting) and not waiting[0].startswith("--")
            value = waiting.pop(0) if has_value else "true"
        overrides.append((name, value))
    return paths, overrides


def _require_recipe(path: str, verb: str) -> None:
    """Raise an error if a path can't refer to a recipe.

    Raises:
        ConfigError: `path` is a folder, a text file or a corpus. The message shows a command that
            accepts it.
    """
    from firstlight.data.shards import MANIFEST_NAME
    from firstlight.data.sources import SUFFIXES
    from firstlight.run_log.names import RECIPE_NAME
    from firstlight.weights.huggingface import CONFIG_NAME

    place, quoted = Path(path).expanduser(), shlex.quote(path)
    use = f"firstlight {verb} recipes/demo.yaml"
    is_corpus = not place.exists() and (path == "stdlib" or path.startswith("hf:"))
    is_text = place.is_file() and path.lower().endswith((*SUFFIXES, *_OTHER_TEXT))
    if not place.is_dir() and not is_text and not is_corpus:
        return
    if (place / RECIPE_NAME).is_file():
        resume = " --resume" if verb == "train" else ""
        recipe = shlex.quote(str(place / RECIPE_NAME))
        what, then = "a run folder", f"firstlight {verb} {recipe}{resume}"
    elif (place / CONFIG_NAME).is_file():
        what, then = "a model folder", f"{use} --init-from {quoted}"
    elif (place / MANIFEST_NAME).is_file():
        what, then = "a prepared corpus", f"{use} --data.dir {quoted}"
    else:
        what = "a folder" if place.is_dir() else "text"
        then = f"firstlight train {quoted} --plan-only"
    if what in ("a folder", "text") and verb != "plan":
        then = (
            f"first prepare the text: firstlight tokenizer train {quoted} --vocab-size 4096 --out "
            f"mine/tokenizer, then firstlight prepare {quoted} --tokenizer mine/tokenizer --out "
            f"mine/data, then {use} --data.dir mine/data"
        )
    raise ConfigError(f"{path} is {what}, but {verb} needs a recipe: {then}")


def _unknown_option(argument: str, name: str) -> str:
    from firstlight.recipe import hint_for_other_name, known_keys

    if any(key.startswith(f"{name}.") for key in known_keys()):
        return f"{argument} is a section: set one of its keys with --{name}.KEY VALUE"
    if hint := hint_for_other_name(name.replace("-", "_"), as_option=True):
        return f"unknown option {argument}{hint}"
    context = click.get_current_context(silent=True)
    known = context.command.params if context else []
    own = [name for one in known if isinstance(one, click.Option) for name in one.opts]
    options = [*own, *(f"--{key}" for key in known_keys())]
    return f"unknown option {argument}{nearest(argument, options)}"

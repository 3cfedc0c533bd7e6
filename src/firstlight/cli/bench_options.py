"""Options that the commands of `firstlight bench ...` share, and the files of their results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from firstlight.cli.output import show
from firstlight.files.atomic import write_file, write_json

Result = dict[str, Any]

C = TypeVar("C", bound=Callable[..., Any])

#: Function that keeps the result so far.
Keep = Callable[[Result], None]


def names_option(
    option: str, help_text: str, name: str = "", default: str | None = ""
) -> Callable[[C], C]:
    """An option of comma-separated names; with the default None it is None unless given."""

    def split(_: click.Context, __: click.Parameter, value: str | None) -> list[str] | None:
        if value is None:
            return None
        return [part.strip() for part in value.split(",") if part.strip()]

    declarations = [option, name] if name else [option]
    return click.option(
        *declarations, metavar="NAME,...", default=default, callback=split, help=help_text
    )


def number_option(option: str, help_text: str, default: int | None = None) -> Callable[[C], C]:
    """An option of an integer."""
    return click.option(
        option, type=int, default=default, show_default=default is not None, help=help_text
    )


def out_option(name: str, default: str | None = None) -> Callable[[C], C]:
    """The option of the folder of the results; the default None writes none."""
    return click.option(
        "--out",
        type=click.Path(path_type=Path),
        default=default,
        show_default=default is not None,
        help=f"Write {name}.json and {name}.png into this folder.",
    )


def device_option(choices: str = "auto, cpu, cuda or cuda:1.") -> Callable[[C], C]:
    """The option of the device."""
    return click.option("--device", default="auto", show_default=True, help=choices)


def steps_options(command: C) -> C:
    """Add the options that `bench methods` and `bench training` share, but for the model."""
    options = (
        ("--seq-len", "Tokens a row. [1024, 256 with --quick; at most the context]"),
        ("--micro-batch-size", "Rows a step of the plain run. [4 on a CPU, 16 on a GPU]"),
        ("--steps", "Timed steps a run. [4 on a CPU, 20 on a GPU]"),
        ("--repeats", "Turns of all rows. [3; 1 with --quick]"),
    )
    for name, help_text in reversed(options):
        command = number_option(name, help_text)(command)
    return command


def publish(
    name: str,
    out: Path | None,
    measure: Callable[[Keep], object],
    show_result: Callable[[Result], None],
    pictures: Callable[[Result], dict[str, bytes]],
) -> Result:
    """Measure, show the tables, and write the files, also where it was interrupted.

    Args:
        name: name of the JSON file in `out`, which is written anew after every measurement.
        out: folder of the files; None writes none.
        measure: function that measures, and calls its argument with the result so far.
        show_result: function that shows the tables of a result.
        pictures: function that draws a result: PNG files by name.

    Returns:
        The last result.
    """
    result: Result = {}

    def keep(so_far: Result) -> None:
        result.update(so_far)
        if out is not None:
            write_json(out / f"{name}.json", so_far)

    try:
        measure(keep)
    finally:
        if result:
            show_result(result)
        if result and out is not None:
            drawn = pictures(result)
            for file, content in drawn.items():
                write_file(out / file, content)
            show(f"written: {', '.join(str(out / file) for file in (f'{name}.json', *drawn))}")
    return result

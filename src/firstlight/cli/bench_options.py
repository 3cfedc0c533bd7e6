"""Options that the commands of `firstlight bench ...` share; writing of their results' files."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from firstlight.bench.options import Keep, Result
from firstlight.cli.options import config_options, path_option
from firstlight.cli.output import show
from firstlight.files.atomic import write_file, write_json

C = TypeVar("C", bound=Callable[..., Any])


#: Options from a class of `firstlight.bench.options`; see `config_options`.
bench_options = functools.partial(config_options, only_on=True)

#: Options of the benchmarks that train for some steps, before their own.
STEPS_OPTIONS = ("model", "seq_len", "micro_batch_size", "steps", "repeats")


def out_option(name: str, default: str | None = None) -> Callable[[C], C]:
    """The option --out, the folder of the results.

    Args:
        name: name of the files, without suffix.
        default: default folder; None writes no files.
    """
    return path_option(
        "--out",
        default=default,
        show_default=True,
        help=f"Write {name}.json and {name}.png into this folder.",
    )


def publish(
    name: str,
    out: Path | None,
    measure: Callable[[Keep], object],
    show_result: Callable[[Result], None],
    draw: Callable[[Result], bytes | dict[str, bytes]],
) -> Result:
    """Measure, print the tables, and write the files. If `measure` is interrupted, the result so
    far is printed and written.

    Args:
        name: name of the files in `out`, without suffix; the JSON file is written again after every
            measurement.
        out: folder of the files; None writes none.
        measure: function that measures, and calls its argument with the result so far.
        show_result: function that prints the tables of a result.
        draw: function from a result to a PNG file, or to several by their names.

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
            picture = draw(result)
            drawn = {f"{name}.png": picture} if isinstance(picture, bytes) else picture
            for file, content in drawn.items():
                write_file(out / file, content)
            show(f"written: {', '.join(str(out / file) for file in (f'{name}.json', *drawn))}")
    return result

"""Progress, warnings and hints for people, always on stderr.

stdout belongs to results: generated text, a verb's tables, or the one JSON object of `--json`
(`cli/output.py`).
"""

from __future__ import annotations

import contextlib
import os
import sys

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn


def console() -> Console:
    """A console on stderr as it is now (tests and notebooks replace it)."""
    return Console(stderr=True, soft_wrap=True, highlight=False)


def say(message: str) -> None:
    """Print one line for people. `message` is plain text: nothing in it is markup.

    Where nobody reads any more (a pipe that is closed, a terminal that has gone) the work goes on.
    """
    try:
        print(message, file=sys.stderr, flush=True)  # noqa: T201
    except OSError:
        silence()


def silence() -> None:
    """Have whatever is written to stderr from now on go nowhere."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: a stream without a descriptor
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stderr.fileno())
        os.close(nowhere)


def progress_bar(*columns: ProgressColumn, shown: bool = True) -> Progress:
    """A progress bar on stderr: description, bar, per cent, `columns`, time left.

    It shows itself on terminals only; in logs its place is taken by what the caller says.
    """
    target = console()
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        *columns,
        TimeRemainingColumn(),
        console=target,
        disable=not shown or not target.is_terminal,
        transient=False,
    )

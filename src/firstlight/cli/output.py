"""Print the output of commands. Results are printed to stdout as text or, with --json, as one JSON
object.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import click

from firstlight.console import progress_bar, say, visible

if TYPE_CHECKING:
    from firstlight.report.summary import Finding

P = ParamSpec("P")
T = TypeVar("T")
_EXIT_CODE = "firstlight.exit_code"


def with_json(verb: Callable[P, dict[str, Any]]) -> Callable[P, None]:
    """Decorator that adds the option --json to a command.

    With --json, the return value of the function is printed to stdout as one JSON object. Text that
    the function prints with `show` is then written to stderr instead of stdout. The function
    receives the value of the option as its argument `as_json`.
    """

    @click.option("--json", "as_json", is_flag=True, help="Print one JSON object to stdout.")
    @functools.wraps(verb)
    def command(*args: P.args, **kwargs: P.kwargs) -> None:
        result = verb(*args, **kwargs)
        if kwargs["as_json"]:
            # `os.fspath` converts paths to strings.
            write_out(json.dumps(result, ensure_ascii=False, default=os.fspath) + "\n")
        context = click.get_current_context()
        if _EXIT_CODE in context.meta:
            context.exit(context.meta[_EXIT_CODE])

    return command


def end_with(code: int) -> None:
    """Set the exit code that a command returns once its function has finished. The command must be
    decorated with `with_json`.
    """
    click.get_current_context().meta[_EXIT_CODE] = code


def write_out(text: str) -> None:
    """Write text to stdout in UTF-8, regardless of the terminal's encoding.

    If stdout is a terminal, control characters are replaced by `visible`. If stdout is a file or a
    pipe, the text is written unchanged.
    """
    if sys.stdout.isatty():
        text = visible(text)
    sys.stdout.buffer.write(text.encode("utf-8", errors="replace"))
    sys.stdout.buffer.flush()


def show(line: str = "") -> None:
    """Print one line of a command's result to stdout or, with --json, to stderr.

    If the program that reads stdout has closed the pipe, as `head` does, the command continues,
    because it may still have to write files.
    """
    context = click.get_current_context(silent=True)
    if context is not None and context.params.get("as_json"):
        say(line)
        return
    try:
        write_out(line + "\n")
    except BrokenPipeError:
        discard_stdout()


def discard_stdout() -> None:
    """Discard all further output to stdout."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def show_rows(rows: Iterable[tuple[str, object]], line: Callable[[str], None] = show) -> None:
    """Print pairs of names and values as aligned lines. Each line is printed by calling `line`."""
    rows = list(rows)
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        line(f"{name:<{width}}  {value}")


def say_findings(findings: Iterable[Finding], run: str = "") -> None:
    """Print findings about a run on stderr, each with advice.

    Args:
        findings: findings to print.
        run: name of the run, which is printed if several runs are compared.
    """
    for finding in findings:
        say(f"warning: {f'{run}: ' if run else ''}{finding.text}")
        say(f"advice: {finding.advice}")


def show_table(rows: Sequence[Sequence[str]]) -> None:
    """Print a table. The first column is left-aligned, and all others are right-aligned."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        cells = (f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True))
        show("  ".join((f"{first:<{widths[0]}}", *cells)).rstrip())


def with_bar(what: str, work: Callable[[Callable[[int, int], None]], T]) -> T:
    """Call `work` while a progress bar is displayed, and return the result.

    The argument of `work` is a function that updates the progress bar. It is called with the number
    of finished items and the total number of items.
    """
    with progress_bar() as bar:
        task = bar.add_task(what, total=None)

        def show_progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        return work(show_progress)

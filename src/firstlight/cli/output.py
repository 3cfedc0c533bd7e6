"""The output of all commands: results on stdout as text, or as one JSON object with --json."""

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
    """Return a command that also has a --json option.

    With --json, the return value of the function is printed as one JSON object on stdout, and the
    text that it prints with `show` goes to stderr. The function gets the option as `as_json`.
    """

    @click.option("--json", "as_json", is_flag=True, help="Print one JSON object to stdout.")
    @functools.wraps(verb)
    def command(*args: P.args, **kwargs: P.kwargs) -> None:
        result = verb(*args, **kwargs)
        if kwargs["as_json"]:
            # Paths become text.
            write_out(json.dumps(result, ensure_ascii=False, default=os.fspath) + "\n")
        context = click.get_current_context()
        if _EXIT_CODE in context.meta:
            context.exit(context.meta[_EXIT_CODE])

    return command


def end_with(code: int) -> None:
    """Set the exit code of a `with_json` command, used when the command returns."""
    click.get_current_context().meta[_EXIT_CODE] = code


def write_out(text: str) -> None:
    """Write text to stdout in UTF-8, regardless of the terminal's encoding.

    A file or another program receives the text unchanged; for a terminal, control characters are
    removed (see `visible`).
    """
    if sys.stdout.isatty():
        text = visible(text)
    sys.stdout.buffer.write(text.encode("utf-8", errors="replace"))
    sys.stdout.buffer.flush()


def show(line: str = "") -> None:
    """Print one line of a command's result without markup: to stdout, or with --json to stderr.

    If the reader of stdout has closed the pipe (`| head`), the command continues, because it may
    still write files.
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
    """Discard everything that is written to stdout from now on."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def show_rows(rows: Iterable[tuple[str, object]], line: Callable[[str], None] = show) -> None:
    """Print (name, value) pairs as aligned lines; `line` prints one line."""
    rows = list(rows)
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        line(f"{name:<{width}}  {value}")


def say_findings(findings: Iterable[Finding], run: str = "") -> None:
    """Print the findings about a run on stderr, each with its advice.

    Args:
        findings: findings to print.
        run: name of the run, if several runs are compared.
    """
    for finding in findings:
        say(f"warning: {f'{run}: ' if run else ''}{finding.text}")
        say(f"advice: {finding.advice}")


def show_table(rows: Sequence[Sequence[str]]) -> None:
    """Print rows of cells; the first column is left-aligned, the others right-aligned."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        cells = (f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True))
        show("  ".join((f"{first:<{widths[0]}}", *cells)).rstrip())


def with_bar(what: str, work: Callable[[Callable[[int, int], None]], T]) -> T:
    """Return the result of `work`, which is called with a function that reports (done, total) to a
    progress bar."""
    with progress_bar() as bar:
        task = bar.add_task(what, total=None)

        def show_progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        return work(show_progress)

"""Rows of benchmarks that compare programs: selection by name and by installed packages."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from firstlight.bench.rows import Found, Keep, Result, RowOutcome, require_known, take_turns
from firstlight.console import say
from firstlight.errors import ConfigError


class _Named(Protocol):
    @property
    def name(self) -> str: ...


@dataclass(frozen=True)
class ProgramRow:
    """A row of a benchmark that measures one of several programs.

    Attributes:
        name: name in tables and for the option that chooses rows.
        program: "firstlight", "transformers", or the name of another program.
    """

    name: str
    program: str


N = TypeVar("N", bound=_Named)
R = TypeVar("R", bound=ProgramRow)


def chosen_rows(kind: str, rows: Sequence[N], names: Sequence[str]) -> list[N]:
    """Return the rows with these names, in the order of `rows`; all rows without names.

    Args:
        kind: noun for the names in error messages, such as "way".
        rows: all rows.
        names: the names.

    Raises:
        ConfigError: a name is unknown.
    """
    require_known(kind, names, [row.name for row in rows])
    return [row for row in rows if not names or row.name in names]


def variant_changes(
    option: str, text: str, sections: Collection[str], example: str
) -> Iterator[tuple[str, str]]:
    """Yield the keys of a recipe and their values, as text, that a variant of a row changes.

    Args:
        option: the value of --set, for error messages.
        text: "section.key=value,section.key=value".
        sections: sections that a variant may change.
        example: a value of --set, for error messages.

    Raises:
        ConfigError: the text has another form, or names another section.
    """
    # A comma inside a value, as in betas=[0.9,0.95], is not followed by a key.
    for part in re.split(r",(?=\s*\w+\.\w+\s*=)", text):
        key, equals, value = (word.strip() for word in part.partition("="))
        section, dot, _ = key.partition(".")
        if not equals or not dot or section not in sections:
            raise ConfigError(
                f"--set {option}: '{part}' is not section.key=value, such as {example}, of one of "
                f"the sections {', '.join(sections)}"
            )
        yield key, value


def has_package(name: str) -> bool:
    """Return True if a package is installed."""
    return importlib.util.find_spec(name) is not None


def installed_rows(rows: Sequence[R]) -> list[R]:
    """Return the rows that can run with the installed packages. The rows of a program that is not
    installed are left out, and a message is printed."""
    needed = {"transformers": "transformers", "llama.cpp": "llama_cpp"}
    missing = {one for one, package in needed.items() if not has_package(package)}
    for program in sorted(missing & {row.program for row in rows}):
        say(f"{program} is not installed: its rows are skipped")
    return [row for row in rows if row.program not in missing]


def run_bench(
    title: str,
    names: Sequence[str],
    turns: int,
    measure: Callable[[str], Found],
    summarize: Callable[[Mapping[str, RowOutcome]], Result],
    on_run: Keep,
    before_turn: Callable[[], None] = lambda: None,
    outcomes: Mapping[str, RowOutcome] | None = None,
) -> Result:
    """Measure all rows of a benchmark; see `take_turns`.

    Args:
        title, names, turns, measure, before_turn: see `take_turns`.
        summarize: function from the outcomes so far to the result.
        on_run: function that is called with the result so far after every measurement.
        outcomes: outcomes of an earlier call by name; None begins with an empty outcome per row.

    Returns:
        The result of `summarize`, with "complete".
    """
    found = {name: RowOutcome() for name in names} if outcomes is None else outcomes

    def result(complete: bool) -> Result:
        return {**summarize(found), "complete": complete}

    def keep() -> None:
        on_run(result(False))

    take_turns(
        title,
        names,
        turns,
        found.__getitem__,
        measure=measure,
        on_turn=keep,
        before_turn=before_turn,
    )
    done = result(True)
    on_run(done)
    return done

"""Rows of benchmarks that compare programs: which are chosen, and which can run here."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from firstlight.bench.options import require_known
from firstlight.console import say


class _Named(Protocol):
    @property
    def name(self) -> str: ...


@dataclass(frozen=True)
class ProgramRow:
    """A row that one of several programs measures.

    Attributes:
        name: name in tables and for the option that chooses rows.
        program: "firstlight", "transformers", or another one that the benchmark names.
    """

    name: str
    program: str


N = TypeVar("N", bound=_Named)
R = TypeVar("R", bound=ProgramRow)


def chosen_rows(kind: str, rows: Sequence[N], names: Sequence[str]) -> list[N]:
    """The rows with these names, in their own order; all where no name is given.

    Raises:
        ConfigError: a name is unknown.
    """
    require_known(kind, names, [row.name for row in rows])
    return [row for row in rows if not names or row.name in names]


def has_package(name: str) -> bool:
    """True if a package is installed."""
    return importlib.util.find_spec(name) is not None


def installed_rows(rows: Sequence[R]) -> list[R]:
    """The rows without transformers' where it is not installed, which a message says."""
    found = [row for row in rows if row.program != "transformers" or has_package("transformers")]
    if len(found) < len(rows):
        say("transformers is not installed: its rows are left out")
    return found

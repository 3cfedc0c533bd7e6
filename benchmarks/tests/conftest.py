"""Fixtures of the package's tests, shared with the benchmarks' tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import forked
from conftest import (
    corpus,
    data,
    forked_processes,
    no_flush,
    no_forecast,
    no_report,
    own_compile_times,
    shared,
    texts,
    tokenizer,
)

__all__ = [
    "corpus",
    "data",
    "forked_processes",
    "no_flush",
    "no_forecast",
    "no_report",
    "own_compile_times",
    "shared",
    "texts",
    "tokenizer",
]


@pytest.fixture(scope="module", autouse=True)
def benchmarks_in_processes() -> Iterator[None]:
    """Let measuring processes import the package `benchmarks`, as in `python -m benchmarks`. Forks
    can import it anyway.
    """
    with pytest.MonkeyPatch.context() as patch:
        root = str(Path(__file__).resolve().parents[2])
        patch.setenv("PYTHONPATH", root, prepend=os.pathsep)
        patch.setitem(forked._ENVIRONMENT, "PYTHONPATH", os.environ["PYTHONPATH"])
        yield

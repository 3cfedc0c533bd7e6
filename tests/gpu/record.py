"""Tests of this folder that have passed with the current source, so that a short call runs only the
others.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import torch

_ROOT = Path(__file__).resolve().parents[2]
_FOLDER = Path(__file__).resolve().parent

T = TypeVar("T")


class Record:
    """A JSON file: device and id of each passed test -> digest of `src/firstlight`, the test's
    file, the helpers of this folder, and torch.

    Args:
        path: file of the record; missing for an empty one.
        device: device of the tests.
    """

    def __init__(self, path: Path, device: str) -> None:
        self._path, self._device = path, device
        self._passed: dict[str, str] = json.loads(path.read_text()) if path.is_file() else {}
        self._digests: dict[str, str] = {}

    @cached_property
    def _shared(self) -> bytes:
        helpers = [path for path in _FOLDER.glob("*.py") if not path.name.startswith("test_")]
        files = sorted([*(_ROOT / "src" / "firstlight").rglob("*.py"), *helpers])
        found = hashlib.sha256(torch.__version__.encode())
        for path in files:
            found.update(path.read_bytes())
        return found.digest()

    def _digest(self, test: str) -> str:
        file = test.partition("::")[0]
        if file not in self._digests:
            content = self._shared + (_ROOT / file).read_bytes()
            self._digests[file] = hashlib.sha256(content).hexdigest()[:16]
        return self._digests[file]

    def has_passed(self, test: str) -> bool:
        """Return True if a test has passed with the current source."""
        return self._passed.get(f"{self._device} {test}") == self._digest(test)

    def has_failed(self, test: str) -> bool:
        """Return True if a test failed when it last ran, or has never run."""
        return f"{self._device} {test}" not in self._passed

    def note(self, test: str, *, passed: bool) -> None:
        """Record a test's outcome."""
        key = f"{self._device} {test}"
        if passed:
            self._passed[key] = self._digest(test)
        else:
            self._passed.pop(key, None)
        text = json.dumps(self._passed, indent=0, sort_keys=True)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(text, encoding="utf-8")


def first_things_first(tests: Sequence[T], urgent: Sequence[bool], workers: int) -> list[T]:
    """Order tests so that each worker starts with urgent ones, assuming that each worker gets the
    next part of the result and all parts have about the same size. Files stay together as far as
    possible.

    Args:
        tests: the tests.
        urgent: True for the tests that come first, for each of `tests`.
        workers: number of processes that share the tests.
    """
    pairs = list(zip(tests, urgent, strict=True))
    first = [test for test, is_urgent in pairs if is_urgent]
    rest = [test for test, is_urgent in pairs if not is_urgent]
    bounds = [len(rest) * number // workers for number in range(workers + 1)]
    return [
        test
        for number in range(workers)
        for test in (*first[number::workers], *rest[bounds[number] : bounds[number + 1]])
    ]

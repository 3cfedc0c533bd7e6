"""Logs and checkpoints of a process that leaves writing them to the main one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from firstlight.checkpoint import Checkpoint


class SilentLogs:
    """Has the methods of `RunLogs`, and writes nothing."""

    def __enter__(self) -> SilentLogs:
        return self

    def __exit__(self, *_: object) -> None: ...

    def write_step(
        self, record: Mapping[str, Any], samples: Iterable[Mapping[str, Any]] = ()
    ) -> None:
        """Nothing."""

    def write_events(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Nothing."""

    def drop_after(self, step: int) -> None:
        """Nothing."""

    def sync(self) -> None:
        """Nothing."""


class PassiveSaver:
    """Has the methods of `CheckpointSaver`; gives its part of a checkpoint, and writes nothing.

    Attributes:
        saved_step: as the main process has it.
    """

    def __init__(self) -> None:
        self.saved_step = -1

    def save(self, step: int, capture: Callable[[], Checkpoint]) -> float:
        """Take part in gathering the state, for which the main process waits."""
        capture()
        self.saved_step = step
        return 0.0

    def require_written(self) -> None:
        """Nothing."""

    def wait(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""

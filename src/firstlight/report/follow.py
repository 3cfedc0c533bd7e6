"""Follows a log of JSON lines while another process writes it.

This module does not import torch, because the processes that pass a run's metrics to trackers
import it at their start.
"""

from __future__ import annotations

import json
import os
from io import FileIO
from pathlib import Path
from typing import Any


class LineFollower:
    """Reads the lines of a growing file of JSON objects, each line once, when it is complete.

    A file that does not exist yet has no lines. If another file replaces it, as when a resumed run
    rewrites its logs, the new file is read from its beginning.

    Args:
        path: path of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        # Stays open, so that a file that replaces it can't get the same inode number.
        self._file: FileIO | None = None
        self._rest = b""

    def new(self) -> tuple[list[dict[str, Any]], bool]:
        """The objects that were written since the last call; and True if the file was replaced, so
        that they begin with the first line of the new file. A line that is no JSON object is left
        out."""
        is_other = self._reopen()
        if self._file is None:
            return [], is_other
        *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        return [found for line in lines if (found := _object(line)) is not None], is_other

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _reopen(self) -> bool:
        """Open the file that is at the path now; True if it replaced the open file."""
        try:
            now = os.stat(self._path)
        except OSError:
            now = None
        if self._file is not None:
            held = os.fstat(self._file.fileno())
            same = now is not None and os.path.samestat(now, held)
            if same and held.st_size >= self._file.tell():
                return False
        was_open = self._file is not None
        self.close()
        self._rest = b""
        if now is not None:
            try:
                self._file = FileIO(self._path, "rb")
            except OSError:
                self._file = None
        return was_open


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


class StepFollower:
    """Reads the steps of metrics.jsonl while they are written, each with its samples.

    Args:
        metrics, samples: paths of metrics.jsonl and samples.jsonl.
    """

    def __init__(self, metrics: Path, samples: Path) -> None:
        self._metrics, self._samples = LineFollower(metrics), LineFollower(samples)
        self._waiting: list[dict[str, Any]] = []

    def new(self) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
        """Metrics and samples of each step that was written since the last call. Steps that a run
        repeats after a rollback or a resumption occur again."""
        records, _ = self._metrics.new()
        # The samples of a step are written before its metrics, so they are there by now.
        samples, is_other = self._samples.new()
        self._waiting = samples if is_other else self._waiting + samples
        steps = []
        for record in records:
            step = record.get("step")
            if type(step) is int:
                steps.append((record, [one for one in self._waiting if one.get("step") == step]))
        if steps:
            last = steps[-1][0]["step"]
            self._waiting = [one for one in self._waiting if one.get("step", 0) > last]
        return steps

    def close(self) -> None:
        """Close the files."""
        self._metrics.close()
        self._samples.close()

"""Follow a log of JSON lines while another process writes it. Imports no torch: the processes that
pass a run's metrics on start with it."""

from __future__ import annotations

import json
import os
from io import FileIO
from pathlib import Path
from typing import Any


class LineFollower:
    """The lines of a growing file of JSON objects, each returned once, when it is whole.

    A file that does not exist yet has no lines. A file that another one replaced, as a resumed run
    replaces its logs, is read from its beginning.

    Args:
        path: path of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        # Held open, so that its inode number is not given to the file that replaces it.
        self._file: FileIO | None = None
        self._rest = b""

    def new(self) -> tuple[list[dict[str, Any]], bool]:
        """(the objects written since the last call, True if they are those of another file than
        before and start with its first line). A line that is no JSON object is left out."""
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
        """Open the file that has the name now; True if another one had it."""
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
    """The steps of metrics.jsonl with the sample texts that were written after each.

    Args:
        metrics, samples: paths of the two files.
    """

    def __init__(self, metrics: Path, samples: Path) -> None:
        self._metrics, self._samples = LineFollower(metrics), LineFollower(samples)
        self._waiting: list[dict[str, Any]] = []

    def new(self) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
        """(metrics, sample texts) of each step written since the last call. The steps that a run
        goes back on come again."""
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

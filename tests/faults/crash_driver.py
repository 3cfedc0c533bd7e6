"""Trains in forked children that end themselves with SIGKILL at a moment of one's choice.

    python crash_driver.py < PLAN.json > RESULTS.json

A plan is a list of [recipe, crash], done one after the other, each with resume=True. A crash is
null, or [moment, step, count]: kill at the count-th `moment` from step `step` on, where a
moment is the call of a function ("os.fsync"), "step" (a step is done and logged), "torn line"
(half a line of metrics is written) or "half a file" (of tensors). The result of each is
whether the child was killed. Forking spares the many imports of torch.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch

import firstlight.training.loop
from firstlight.files import write_file
from firstlight.training.loop import train
from firstlight.training.metrics import JsonLines

_CALLS = {
    "os.fsync": (os, "fsync"),
    "os.rename": (os, "rename"),
    "os.replace": (os, "replace"),
    "shutil.rmtree": (shutil, "rmtree"),
}


class Crash:
    """Counts moments once the step is reached, and kills this process at the right one."""

    def __init__(self, moment: str, step: int, count: int) -> None:
        self.moment, self.step, self.count = moment, step, count
        self.reached = step == 0

    def arm(self) -> None:
        """Watch for the moment; "any call" is one of all the calls."""
        names = list(_CALLS) if self.moment == "any call" else [self.moment]
        for owner, name in (_CALLS[n] for n in names if n in _CALLS):
            setattr(owner, name, self._before(getattr(owner, name)))
        if self.moment == "torn line":
            self._tear_lines()
        if self.moment == "half a file":
            self._halve_files()

    def on_step(self, record: Mapping[str, Any]) -> None:
        self.reached = self.reached or record["step"] >= self.step
        if self.moment == "step":
            self._now()

    def _now(self) -> None:
        if self.reached:
            self.count -= 1
            if self.count == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def _before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any, **options: Any) -> Any:
            self._now()
            return function(*arguments, **options)

        return watched

    def _tear_lines(self) -> None:
        write = JsonLines.write

        def torn(lines: JsonLines, record: Mapping[str, Any]) -> None:
            if self.reached and self.count == 1:
                lines._file.write(json.dumps(record).encode()[:40])
            self._now()
            write(lines, record)

        JsonLines.write = torn  # type: ignore[method-assign, assignment]

    def _halve_files(self) -> None:
        save_file = safetensors.torch.save_file

        def halved(tensors: Any, path: Path, **options: Any) -> None:
            save_file(tensors, path, **options)
            if self.reached and self.count == 1:
                os.truncate(path, path.stat().st_size // 2)
            self._now()

        safetensors.torch.save_file = halved  # type: ignore[assignment]


def child(recipe: str, crash: list[Any] | None) -> bool:
    """Train in a child; whether it was killed."""
    process = os.fork()
    if process == 0:
        on_step = None
        if crash is not None:
            watch = Crash(*crash)
            watch.arm()
            on_step = watch.on_step
        try:
            train(recipe, resume=True, on_step=on_step)
        finally:
            # What went wrong is on stderr by now; the parent's own work is not done again here.
            if sys.exc_info()[0] is not None:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
    _, status = os.waitpid(process, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL, f"{recipe} {crash}: signal {status}"
        return True
    if os.WEXITSTATUS(status) != 0:
        sys.exit(f"{recipe} {crash}: the run failed")
    return False


def draw_nothing(run: Path) -> None:
    """Write a report as the real one does; drawing takes longer than these runs."""
    write_file(run / "report.png", b"no picture")


if __name__ == "__main__":
    setattr(firstlight.training.loop, "draw_report", draw_nothing)  # noqa: B010 - mypy
    importlib.import_module("torch._dynamo")  # else each child's first optimizer does it
    json.dump([child(*entry) for entry in json.load(sys.stdin)], sys.stdout)

"""Trains in forked children that end themselves with SIGKILL at a moment of one's choice.

    python crash_driver.py < PLAN.json > RESULTS.json

A plan is a list of [recipe, crash], done one after the other, each with resume=True. A crash is
null, or [moment, step, count]: kill at the count-th `moment` from step `step` on, where a
moment is "step" (a step is done and logged), "call" (any call that changes the disk), or a call of
disk.py and a part of the name of the file or folder that it is about: "sync optimizer" (before
that), "half metrics.jsonl" (in the middle of a write). A result is {"killed": whether the child
was, "calls": how many calls changed the disk, if not}. Forking spares the many imports of torch.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from disks import KillingDisk, WatchedDisk, installed

import firstlight.training.loop
import firstlight.training.run
from firstlight.files.atomic import write_file
from firstlight.training.loop import train


class Crash:
    """Waits for the step, and has this process killed at the right moment from then on."""

    def __init__(self, moment: str, step: int, count: int) -> None:
        self.moment, self.step, self.count = moment, step, count
        operation, _, about = moment.partition(" ")
        only = frozenset() if moment == "call" else frozenset({operation})
        self.disk = KillingDisk(count, only, about, half=operation == "half")
        self.disk.armed = step == 0

    def on_step(self, record: Mapping[str, Any]) -> None:
        self.disk.armed = self.disk.armed or record["step"] >= self.step
        if self.moment == "step" and self.disk.armed:
            self.count -= 1
            if self.count == 0:
                os.kill(os.getpid(), signal.SIGKILL)


def trained(recipe: str, crash: list[Any] | None) -> int:
    """Train; return how many calls changed the disk, unless this process is killed before."""
    if crash is None:
        with installed(WatchedDisk()) as disk:
            train(recipe, resume=True)
        return len(disk.calls)
    watch = Crash(*crash)
    with installed(watch.disk):
        train(recipe, resume=True, on_step=watch.on_step)
    return len(watch.disk.calls)


def child(recipe: str, crash: list[Any] | None) -> dict[str, Any]:
    """Train in a child; what came of it."""
    answer, mine = os.pipe()
    process = os.fork()
    if process == 0:
        code = 1
        try:
            os.write(mine, str(trained(recipe, crash)).encode())
            code = 0
        finally:
            # What went wrong is on stderr by now; the parent's own work is not done again here.
            if code:
                traceback.print_exc()
            os._exit(code)
    os.close(mine)
    with open(answer, "rb") as file:
        calls = file.read()
    _, status = os.waitpid(process, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL, f"{recipe} {crash}: signal {status}"
        return {"killed": True}
    if os.WEXITSTATUS(status) != 0:
        sys.exit(f"{recipe} {crash}: the run failed")
    return {"killed": False, "calls": int(calls)}


def draw_nothing(run: Path) -> None:
    """Write a report as the real one does; drawing takes longer than these runs."""
    write_file(run / "report.png", b"no picture")


if __name__ == "__main__":
    setattr(firstlight.training.loop, "draw_report", draw_nothing)  # noqa: B010 - mypy
    # Measuring it takes longer than these runs, too.
    setattr(firstlight.training.run, "peak_flops", lambda *_: 1e12)  # noqa: B010
    importlib.import_module("torch._dynamo")  # else each child's first optimizer does it
    json.dump([child(*entry) for entry in json.load(sys.stdin)], sys.stdout)

"""Trains in forked children, through the command line, each with something done to it.

    python run_driver.py < PLAN.json > RESULTS.json

A plan is a list of chains, and a chain a list of [recipe, faults] that are done one after the
other, each with --resume. Faults are a dictionary:

    signal       [name, place, step, count]: sent at the count-th time that the place of this step
                 is come by. Places: "update" (a step is being computed), "record" (its metrics are
                 written), "check" (between two batches or pieces of text of an evaluation),
                 "save" (a checkpoint is about to be saved)
    again        the name of a second signal, sent right after the first
    events       SIGTERM at so many of Python's profiling events (calls and returns)
    save_now     ask for a checkpoint during the update of this step
    growth       steps between two growths of the loss scale
    options      more arguments of the command

`on_step` draws from all global generators, and writes what it drew to draws.txt in the run
folder. A result is {"code": exit code, negative for a signal, "error": stderr, "done": steps this
process had done when the signal came, "events": how many there were, "first_record" and
"last_record": how many by the first and the last step, "lines": the steps in
metrics.jsonl, "saved": the step of the newest checkpoint, which verifies (0: none), "pending":
whether its evaluation was still to be done}. Forking spares the many imports of torch.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

import firstlight.training.guard
import firstlight.training.loop
import firstlight.training.run
from firstlight.checkpoint.checkpoint import load_trainer_state
from firstlight.checkpoint.selection import newest_checkpoint
from firstlight.cli.main import main
from firstlight.planner.plan.processes import RunForecaster
from firstlight.run_log.reader import read_json_lines
from firstlight.training.checkpoints import RunCheckpoints
from firstlight.training.loop import train
from firstlight.training.processes import SAVE_NOW_NAME
from firstlight.training.run import Run
from firstlight.training.validation import evaluate

_AT_ONCE = 2


class Child:
    """What is done to one run, and what came of it."""

    def __init__(self, recipe: str, faults: Mapping[str, Any]) -> None:
        self.recipe, self.faults = recipe, faults
        self.done = 0
        self.result: dict[str, Any] = {}
        self._left = faults["signal"][3] if "signal" in faults else 0
        self._events = 0

    def run(self) -> int:
        """Train; return the exit code."""
        if "growth" in self.faults:
            name = "_STEPS_BETWEEN_GROWTHS"
            setattr(firstlight.training.guard, name, self.faults["growth"])
        self._watch_places()
        setattr(firstlight.training.loop, "train", self._train)  # noqa: B010 - mypy
        if "events" in self.faults:
            sys.setprofile(self._count)
        try:
            return main(["train", self.recipe, "--resume", *self.faults.get("options", [])])
        finally:
            sys.setprofile(None)
            self.result["events"] = self._events

    def _train(self, *arguments: Any, on_step: Callable[..., None], **options: Any) -> Any:
        def on_both(record: Mapping[str, Any]) -> None:
            on_step(record)
            self._on_step(record)

        # A forecast would be most of these runs.
        options |= {"progress": False, "forecaster": None}
        return train(*arguments, **options, on_step=on_both)

    def _on_step(self, record: Mapping[str, Any]) -> None:
        run = Path(self.recipe).with_suffix("")
        drawn = (record["step"], random.gauss(0, 1), np.random.normal(), torch.rand(1).item())
        with open(run / "draws.txt", "a", encoding="utf-8") as file:
            print(*drawn, file=file)
        self._come_by("record", record["step"])

    def _come_by(self, place: str, step: int) -> None:
        if place == "record":
            self.result.setdefault("first_record", self._events)
            self.result["last_record"] = self._events
        name, where, when, _ = self.faults.get("signal", ["", "", -1, 0])
        if (place, step) == (where, when):
            self._left -= 1
            if self._left == 0:
                self._send(signal.Signals[name])

    def _send(self, number: signal.Signals) -> None:
        self.result["done"] = self.done
        os.kill(os.getpid(), number)
        if "again" in self.faults:
            os.kill(os.getpid(), signal.Signals[self.faults["again"]])

    def _count(self, frame: Any, event: str, argument: Any) -> None:
        self._events += 1
        if self._events == self.faults["events"]:
            sys.setprofile(None)
            self._send(signal.SIGTERM)

    def _watch_places(self) -> None:
        begin_step, end_step, save = Run.begin_step, Run.end_step, RunCheckpoints.save

        def watched_begin(run: Run) -> float:
            lr_scale = begin_step(run)
            self._come_by("update", run.state.step)
            if self.faults.get("save_now") == run.state.step:
                (run.folder / SAVE_NOW_NAME).touch()
            return lr_scale

        def watched_end(run: Run, *arguments: Any) -> None:
            end_step(run, *arguments)
            self.done += 1

        def watched_evaluate(run: Run, check: Callable[[], None]) -> None:
            def watched_check() -> None:
                self._come_by("check", run.state.step)
                check()

            evaluate(run, watched_check)

        def watched_save(checkpoints: RunCheckpoints) -> None:
            self._come_by("save", checkpoints.run.state.step)
            save(checkpoints)

        for place, name, watched in (
            (Run, "begin_step", watched_begin),
            (Run, "end_step", watched_end),
            (firstlight.training.loop, "evaluate", watched_evaluate),
            (RunCheckpoints, "save", watched_save),
        ):
            setattr(place, name, watched)


def child(recipe: str, faults: Mapping[str, Any]) -> dict[str, Any]:
    """Train in a child."""
    with tempfile.TemporaryDirectory() as folder:
        error, answer = Path(folder) / "stderr", Path(folder) / "result"
        process = os.fork()
        if process == 0:
            code = 99
            task = Child(recipe, faults)
            try:
                # The driver's own stdout is for the results of all children.
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                os.dup2(os.open(error, os.O_WRONLY | os.O_CREAT), 2)
                code = task.run()
            finally:
                if sys.exc_info()[0] is not None:
                    traceback.print_exc()
                answer.write_text(json.dumps(task.result), encoding="utf-8")
                # The parent's own work is not done again here.
                os._exit(code)
        _, status = os.waitpid(process, 0)
        result = {"code": os.waitstatus_to_exitcode(status), "error": error.read_text("utf-8")}
        with contextlib.suppress(FileNotFoundError):
            result |= json.loads(answer.read_text(encoding="utf-8"))
    return result | left_behind(Path(recipe).with_suffix(""))


def left_behind(run: Path) -> dict[str, Any]:
    """What is on the disk."""
    lines = [record["step"] for record in read_json_lines(run / "metrics.jsonl")]
    folder, problems = newest_checkpoint(run)
    assert not problems, problems
    state = {} if folder is None else load_trainer_state(folder)
    pending = state.get("pending") is not None
    return {"lines": lines, "saved": state.get("step", 0), "pending": pending}


def chains(plan: list[list[list[Any]]]) -> list[list[dict[str, Any]]]:
    """The results of all chains, some of which are done at the same time."""
    with tempfile.TemporaryDirectory() as folder:
        workers = []
        for number in range(_AT_ONCE):
            worker = os.fork()
            if worker == 0:
                code = 1
                try:
                    for index in range(number, len(plan), _AT_ONCE):
                        results = [child(*entry) for entry in plan[index]]
                        (Path(folder) / str(index)).write_text(json.dumps(results))
                    code = 0
                finally:
                    if code:
                        traceback.print_exc()
                    os._exit(code)
            workers.append(worker)
        codes = [os.waitpid(worker, 0)[1] for worker in workers]
        if any(codes):
            sys.exit("a worker failed")
        return [json.loads((Path(folder) / str(i)).read_text()) for i in range(len(plan))]


def draw_nothing(run: Path) -> None:
    """Drawing takes longer than these runs."""


if __name__ == "__main__":
    setattr(firstlight.training.loop, "draw_report", draw_nothing)  # noqa: B010 - mypy
    setattr(firstlight.training.run, "peak_flops", lambda *_: 1e12)  # noqa: B010
    for name in ("start", "forecast"):  # a process that takes longer than these runs
        setattr(RunForecaster, name, lambda *_: None)
    importlib.import_module("torch._dynamo")  # else each child's first optimizer does it
    torch.set_num_threads(1)
    json.dump(chains(json.load(sys.stdin)), sys.stdout)

"""Trains in forked children that are killed from outside at random times.

    python kill_driver.py < REQUEST.json > RESULTS.json

A request is {"recipes": files, "kills": how many, "seed": of the times}. The recipes' runs are
done in turn, each with resume=True until it is complete; a recipe whose run is complete is done
anew in another folder (its own name and a number). The result has a list for each run: its
folder, and of each of its kills the seconds it came after, the last step in metrics.jsonl and the
step of the newest checkpoint (0: none). Forking spares the many imports of torch.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import yaml

import firstlight.training.loop
import firstlight.training.run
from firstlight.checkpoint.checkpoint import load_trainer_state
from firstlight.checkpoint.selection import newest_checkpoint
from firstlight.run_log.reader import read_json_lines
from firstlight.training.loop import train


def survives(recipe: dict[str, Any], seconds: float) -> bool:
    """Train in a child; whether it came to its end within the time, else it is killed."""
    while signal.sigtimedwait([signal.SIGCHLD], 0) is not None:
        pass  # of the one before, which may have ended by itself while it was being killed
    process = os.fork()
    if process == 0:
        code = 1
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
            train(recipe, resume=True)
            code = 0
        finally:
            if code:
                traceback.print_exc()
            # The parent's own work is not done again here.
            os._exit(code)
    if signal.sigtimedwait([signal.SIGCHLD], seconds) is None:
        os.kill(process, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    if code not in (0, -signal.SIGKILL):
        sys.exit(f"{recipe['run']['dir']}: the run failed")
    return code == 0


def kill_often(request: dict[str, Any]) -> list[dict[str, Any]]:
    """All runs, and all their kills."""
    generator = random.Random(request["seed"])
    recipes = [yaml.safe_load(Path(path).read_text("utf-8")) for path in request["recipes"]]
    longest = [0.0] * len(recipes)
    runs: list[dict[str, Any]] = []
    kills = 0
    while kills < request["kills"]:
        index = len(runs) % len(recipes)
        run = Path(f"{recipes[index]['run']['dir']}-{len(runs)}")
        recipe = {**recipes[index], "run": {**recipes[index]["run"], "dir": str(run)}}
        found: list[Any] = []
        runs.append({"recipe": index, "folder": str(run), "kills": found})
        # The first of each is not killed: it says how long one takes.
        limit = generator.uniform(0, longest[index]) if longest[index] else 600.0
        start = time.monotonic()
        while not survives(recipe, limit):
            kills += 1
            found.append([limit, *_left_behind(run)])
            if limit > 0.9 * longest[index]:
                longest[index] *= 1.25  # the machine has become slower
            limit = generator.uniform(0, longest[index])
            start = time.monotonic()
        if not found:
            longest[index] = max(longest[index], time.monotonic() - start)
    return runs


def _left_behind(run: Path) -> tuple[int, int]:
    lines = read_json_lines(run / "metrics.jsonl")
    folder, problems = newest_checkpoint(run)
    if problems:
        sys.exit(f"{run}: {problems}")
    saved = 0 if folder is None else load_trainer_state(folder)["step"]
    return lines[-1]["step"] if lines else 0, saved


if __name__ == "__main__":
    setattr(firstlight.training.loop, "draw_report", lambda _: None)  # noqa: B010 - mypy
    setattr(firstlight.training.run, "peak_flops", lambda *_: 1e12)  # noqa: B010
    importlib.import_module("torch._dynamo")  # else each child's first optimizer does it
    torch.set_num_threads(1)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    json.dump(kill_often(json.load(sys.stdin)), sys.stdout)

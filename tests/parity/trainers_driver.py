"""Run the examples for other trainers, each in a fork of a process that has imported their
libraries.

    python trainers_driver.py < JOBS.json > PRINTED.json

A job is a list: an example's file and its arguments. The result is the output of each, and a last
line "checkpoints N optimizers NAMES": the layers' forward passes under activation checkpointing,
and the classes of the optimizers that took steps.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import accelerate  # noqa: F401
import bitsandbytes  # noqa: F401
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import Trainer  # noqa: F401

import firstlight.methods.memory
import firstlight.training.loop


def run(job: list[str]) -> None:
    """Run an example in this process, and print the last line."""
    names: set[str] = set()
    count, checkpoint = 0, getattr(firstlight.methods.memory, "checkpoint")  # noqa: B009 - mypy

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        return checkpoint(*arguments, **options)

    def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        names.add(type(optimizer).__name__)

    setattr(firstlight.methods.memory, "checkpoint", counted)  # noqa: B010 - mypy
    register_optimizer_step_post_hook(note)
    sys.argv[:] = job
    sys.path.insert(0, str(Path(job[0]).parent))
    runpy.run_path(job[0], run_name="__main__")
    sys.stdout.write(f"checkpoints {count} optimizers {' '.join(sorted(names))}\n")


def printed(job: list[str]) -> str:
    """Return the output of an example.

    Raises:
        SystemExit: it failed; its error is on stderr.
    """
    with tempfile.TemporaryFile("w+", encoding="utf-8") as out:
        process = os.fork()
        if process == 0:
            code = 1
            try:
                os.dup2(out.fileno(), 1)
                run(job)
                code = 0
            finally:
                if code:
                    traceback.print_exc()
                sys.stdout.flush()
                os._exit(code)
        if os.waitpid(process, 0)[1]:
            sys.exit(f"{job} failed")
        out.seek(0)
        return out.read()


if __name__ == "__main__":
    json.dump([printed(job) for job in json.load(sys.stdin)], sys.stdout)

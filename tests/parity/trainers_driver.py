"""The examples for other trainers, each in a fork of a process that has imported their libraries.

    python trainers_driver.py < JOBS.json > PRINTED.json

A job is a list: an example's file and its arguments. The result is what each has printed.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import tempfile
import traceback
from pathlib import Path

import accelerate  # noqa: F401
import bitsandbytes  # noqa: F401
from transformers import Trainer  # noqa: F401

import firstlight.training.loop  # noqa: F401


def printed(job: list[str]) -> str:
    """What an example prints.

    Raises:
        SystemExit: it failed; its error is on stderr.
    """
    with tempfile.TemporaryFile("w+", encoding="utf-8") as out:
        process = os.fork()
        if process == 0:
            code = 1
            try:
                os.dup2(out.fileno(), 1)
                sys.argv[:] = job
                sys.path.insert(0, str(Path(job[0]).parent))
                runpy.run_path(job[0], run_name="__main__")
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

"""One measurement in a process of its own: nothing of another one is in its memory or caches."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from firstlight.bench.forked import end_group
from firstlight.errors import FirstlightError
from firstlight.hardware.environment import TRAINING


def training_environment() -> dict[str, str]:
    """This process's, as `firstlight train` would have it: what the person has set stands."""
    return TRAINING | os.environ


def plain_environment() -> dict[str, str]:
    """This process's, without what firstlight has added to it."""
    return {k: v for k, v in os.environ.items() if TRAINING.get(k) != v}


def ask(
    module: str,
    request: Mapping[str, Any],
    environment: Mapping[str, str],
    seconds: float | None = None,
) -> dict[str, Any]:
    """Run `python -m MODULE REQUEST`, and return the JSON object of its last line on stdout.

    Whatever interrupts this ends the process, and those that it started.

    Args:
        module: one that ends in `answer`.
        request: is passed as JSON.
        environment: of the process.
        seconds: after which the process is ended; None is never.

    Returns:
        What it said; {"error": {"type", "message"}} where firstlight refused, with the type
        "Failed" where the process did not come to its end, and "TimeoutError" where it was ended.
    """
    process = subprocess.Popen(
        # -P: what lies in the current folder is not imported.
        [sys.executable, "-P", "-m", module, json.dumps(request)],
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        # A group of its own, torch.compile's helpers among them.
        start_new_session=True,
    )
    with process:
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            message = f"took more than {seconds:.0f} s"
            return {"error": {"type": "TimeoutError", "message": message}}
        finally:
            # No helper outlives its run: it would slow the next one.
            end_group(process.pid)
            process.wait()
    if process.returncode:
        return {"error": {"type": "Failed", "message": last_words(process.returncode, err)}}
    try:
        result: dict[str, Any] = json.loads(out.splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        return {"error": {"type": "Failed", "message": "the process ended without a result"}}
    return result


def last_words(code: int, err: str) -> str:
    """Why a process failed, in one line."""
    if code == -signal.SIGKILL:
        return "killed by signal 9: most likely out of memory"
    if code < 0:
        return f"killed by signal {-code}"
    lines = [line.strip() for line in err.splitlines() if line.strip()]
    return lines[-1] if lines else f"exit code {code}"


def answer(measure: Callable[[dict[str, Any]], dict[str, Any]], request: str) -> None:
    """In the process: do what a request asks for, and write the one line of the result.

    Args:
        measure: takes the request and returns the result; a FirstlightError is a result too.
        request: as JSON.
    """
    # Where memory runs out, Linux ends this process and not the one that reports it.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    try:
        result = measure(json.loads(request))
    except FirstlightError as error:
        result = {"error": {"type": type(error).__name__, "message": str(error)}}
    # Past what a library may have printed; what it printed and holds back goes nowhere.
    os.write(1, (json.dumps(result) + "\n").encode())
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

"""Runs of several ranks without a launcher's help, many at a time: `run_ranks`.

The ranks are forks of one process that has imported torch, so that a scenario costs a second of
waiting and little else.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

#: Until a scenario is given up.
_PATIENCE_SECONDS = 200.0


def run_ranks(scenarios: list[dict[str, Any]], at_once: int = 6) -> list[list[dict[str, Any]]]:
    """What became of the ranks of each scenario.

    Args:
        scenarios: for each `plan` (see rank_driver; the folder is made here), `ranks`: the
            environment of each, with RANK; and `signal`: its name, to which rank (by its place
            in the list), and after how many seconds of the run.
        at_once: how many run beside each other.

    Returns:
        For each rank: `code` (negative for a signal, None for one that was still there and is
        ended here), `said`, and `pid`.
    """
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, __file__, folder, str(at_once)],
            input=json.dumps(scenarios),
            capture_output=True,
            text=True,
            timeout=_PATIENCE_SECONDS * (1 + len(scenarios) / at_once),
            env=os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
        )
    assert done.returncode == 0, done.stderr
    results: list[list[dict[str, Any]]] = json.loads(done.stdout)
    return results


def two_ranks() -> list[dict[str, str]]:
    """The variables of a world of two."""
    return [{"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)} for rank in range(2)]


class _Scenario:
    """One run: its processes, from the start to the end."""

    def __init__(self, scenario: dict[str, Any], folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self._scenario = scenario
        self._signalled_at: float | None = None
        self._ready_at: float | None = None
        self._started = time.monotonic()
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        plan = scenario["plan"] | {"folder": str(folder)}
        self._pids = [
            _fork(plan, meeting | variables, folder / f"said-{place}")
            for place, variables in enumerate(scenario["ranks"])
        ]
        self._ended: dict[int, int | None] = {}

    def look(self) -> bool:
        """Do what is due; return whether all is over."""
        now = time.monotonic()
        self._send_signal(now)
        for place, pid in enumerate(self._pids):
            if place not in self._ended:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    self._ended[place] = os.waitstatus_to_exitcode(status)
        waiting = [place for place in range(len(self._pids)) if place not in self._ended]
        if self._is_over(waiting, now):
            for place in waiting:
                os.kill(self._pids[place], signal.SIGKILL)
                os.waitpid(self._pids[place], 0)
                self._ended[place] = None
            return True
        return False

    def _is_over(self, waiting: list[int], now: float) -> bool:
        """Whether there is nobody left to wait for: a stopped process never ends."""
        stopped = [
            place
            for place in waiting
            if Path(f"/proc/{self._pids[place]}/stat").read_text().rsplit(")")[-1].split()[0] == "T"
        ]
        return waiting == stopped or now - self._started > _PATIENCE_SECONDS

    def _send_signal(self, now: float) -> None:
        asked = self._scenario.get("signal")
        if asked is None or self._signalled_at is not None:
            return
        if self._ready_at is None:
            ready = [self._folder / f"ready-{place}" for place in range(len(self._pids))]
            if all(path.exists() for path in ready):
                self._ready_at = now
        elif now - self._ready_at >= asked["after"]:
            os.kill(self._pids[asked["rank"]], signal.Signals[asked["name"]])
            self._signalled_at = now

    def results(self) -> list[dict[str, Any]]:
        """See `run_ranks`."""
        return [
            {
                "code": self._ended[place],
                "said": (self._folder / f"said-{place}").read_text(),
                "pid": self._pids[place],
            }
            for place in range(len(self._pids))
        ]


def free_port() -> int:
    """One that the system does not hand out itself before it is taken."""
    while True:
        port = random.randrange(10_000, 32_000)
        with socket.socket() as found, contextlib.suppress(OSError):
            found.bind(("127.0.0.1", port))
            return port


def _fork(plan: dict[str, Any], variables: dict[str, str], said: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        os.environ.update(variables)
        target = os.open(said, os.O_WRONLY | os.O_CREAT)
        os.dup2(target, 1)
        os.dup2(target, 2)
        from rank_driver import main

        code = main(plan)
    finally:
        if sys.exc_info()[0] is not None:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(code)


def _serve(folder: Path, at_once: int) -> None:
    import rank_driver  # noqa: F401  (so that each fork has it)

    waiting = list(enumerate(json.load(sys.stdin)))
    results: list[Any] = [None] * len(waiting)
    running: dict[int, _Scenario] = {}
    while waiting or running:
        while waiting and len(running) < at_once:
            number, scenario = waiting.pop(0)
            running[number] = _Scenario(scenario, folder / str(number))
        for number in list(running):
            if running[number].look():
                results[number] = running.pop(number).results()
        time.sleep(0.01)
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), int(sys.argv[2]))

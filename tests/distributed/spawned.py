"""Start the processes of one world from a test."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any


def free_port() -> int:
    """Return a free port that the system does not give to other connections until a process listens
    on it.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as server, contextlib.suppress(OSError):
            server.bind(("127.0.0.1", port))
            return port


def world_environment(rank: int, size: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun would set, plus one that makes a crashing process print a
    traceback.
    """
    return {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",
    }


def run_ranks(
    driver: Path, arguments: list[str], size: int, timeout: float = 300
) -> list[subprocess.CompletedProcess[str]]:
    """Run a Python file as this many ranks, and return the results in the order of ranks."""
    port = free_port()
    processes: list[subprocess.Popen[str]] = []
    try:
        for rank in range(size):
            processes.append(
                subprocess.Popen(
                    [sys.executable, str(driver), *arguments],
                    env=world_environment(rank, size, port),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        results = []
        for process in processes:
            out, err = process.communicate(timeout=timeout)
            results.append(
                subprocess.CompletedProcess[Any](process.args, process.returncode, out, err)
            )
        return results
    finally:
        for process in processes:
            process.kill()
            process.wait()

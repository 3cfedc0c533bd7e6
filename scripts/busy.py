"""Keep cores busy while tests run: python scripts/busy.py [PROCESSES] [SECONDS]

By default, four processes compute for 1800 s, or until this process ends for any reason.
"""

from __future__ import annotations

import os
import sys
import time


def compute(parent: int, seconds: float) -> None:
    """Compute until the time is over or the parent process has changed."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and os.getppid() == parent:
        sum(number * number for number in range(200_000))


def main(processes: int = 4, seconds: float = 1800.0) -> None:
    """Start the processes, and wait for them."""
    here = os.getpid()
    children = []
    for _ in range(processes):
        child = os.fork()
        if child == 0:
            compute(here, seconds)
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    try:
        main(*(kind(word) for kind, word in zip((int, float), sys.argv[1:], strict=False)))
    except KeyboardInterrupt:
        sys.exit(130)

"""Environment variables for torch's thread library and allocator, and the number of usable
processors.

The thread library and the allocator read the variables when they are loaded, so the command line
sets them before it imports torch. Variables that the user has set stay as they are.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

#: Number of times that a waiting thread of GNU's OpenMP looks for work before it sleeps. With the
#: library's default, a second program on the same cores makes every parallel region wait for a time
#: slice: steps 70 times slower were seen. With a much smaller number, threads of a virtual machine
#: sleep between any two operators, and its host takes long to wake them: with 1000, steps on free
#: cores were up to 2 times slower.
SHORT_SPIN = {"GOMP_SPINCOUNT": "5000"}

#: The same for generation. A token is some hundred parallel regions of a few microseconds, and
#: threads that sleep between them take as long to wake: 27 ms a token were seen, not 14 to 20.
_LONG_SPIN = {"GOMP_SPINCOUNT": "30000"}

#: The same if other programs keep the cores busy. A spinning thread then uses up its time slice,
#: and the other threads of its parallel region wait for its next slice. On two cores with a load of
#: 12, steps took 2.8 s with 5000, 0.35 s with 1000 and 0.21 s with 100 (0.14 s on free cores).
_NO_SPIN = {"GOMP_SPINCOUNT": "100"}

#: torch's huge pages (THP_MEM_ALLOC_ENABLE) stay off: memory that is kept between steps
#: (efficiency/memory.py) has few page faults left. And with alignment to pages, glibc can't reuse
#: the memory of a freed tensor for the next tensor of its size, so the heap grew from step to step.
#: TORCH_CPP_LOG_LEVEL: without it, torch reports a broken connection with a page of addresses.
TRAINING = SHORT_SPIN | {"TORCH_CPP_LOG_LEVEL": "ERROR"}


def for_training() -> dict[str, str]:
    """The variables for training and evaluating."""
    return TRAINING | (_NO_SPIN if _cores_are_busy() else SHORT_SPIN)


def for_generation() -> dict[str, str]:
    """The variables for generating text."""
    return _NO_SPIN if _cores_are_busy() else _LONG_SPIN


def _cores_are_busy() -> bool:
    """True if other programs use more than a quarter of the cores right now; false if unknown."""
    try:
        return 4 * sorted(_running() for _ in range(5))[2] > (os.cpu_count() or 1)
    except (OSError, ValueError, IndexError):
        return False


def usable_cpus() -> int:
    """Number of processors for this process: a container may allow fewer than there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _running() -> int:
    """Number of other threads that run or wait for a core, on Linux. The load average would count
    threads that ended a minute ago."""
    time.sleep(0.004)
    fields = Path("/proc/loadavg").read_text(encoding="ascii").split()
    return int(fields[3].partition("/")[0]) - 1

"""Set environment variables for torch's thread library and allocator, and count the processors that
this process can use.

The thread library and the allocator read these variables when they are loaded. The command line and
`import firstlight` therefore set them before torch is imported. Variables that the user has set are
not changed.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

#: Number of times that a waiting thread of GNU OpenMP checks for work before it sleeps. With the
#: library's default, every parallel region waits for a time slice if a second program uses the same
#: cores. This made steps up to 70 times slower. With a much smaller number, threads go to sleep
#: between operators, and waking them takes a long time on a virtual machine. With 1000 checks,
#: steps on idle cores took up to twice as long.
SHORT_SPIN = {"GOMP_SPINCOUNT": "5000"}

#: Number of times that a waiting thread checks for work during generation. Generating a token
#: involves several hundred parallel regions of a few microseconds each, and waking a sleeping
#: thread takes as long as one of these regions. With `SHORT_SPIN`, a token took 27 ms instead of 14
#: to 20 ms.
_LONG_SPIN = {"GOMP_SPINCOUNT": "30000"}

#: Number of times that a waiting thread checks for work while other programs keep the cores busy. A
#: spinning thread would then use up its time slice, and the other threads of the parallel region
#: would have to wait for the next one. On two cores with a load of 12, steps took 2.8 s with 5000,
#: 0.35 s with 1000 and 0.21 s with 100. On idle cores, they took 0.14 s.
_NO_SPIN = {"GOMP_SPINCOUNT": "100"}

#: Variables for training. Without TORCH_CPP_LOG_LEVEL, torch would print dozens of lines of
#: addresses when a connection breaks.
#:
#: torch's huge pages (THP_MEM_ALLOC_ENABLE) are not enabled. They would save little, because
#: `methods/memory.py` keeps memory between steps, so there are few page faults. Huge pages also
#: make tensors page-aligned, and glibc then can't reuse the memory of a freed tensor for the next
#: tensor of the same size. As a result, the heap grew in each step.
TRAINING = SHORT_SPIN | {"TORCH_CPP_LOG_LEVEL": "ERROR"}

#: Environment variable that contains the value of GOMP_SPINCOUNT set by `import firstlight`, or ""
#: if torch had already been imported. Commands set GOMP_SPINCOUNT to a different value without
#: setting this variable.
_BY_IMPORT = "FIRSTLIGHT_SPINCOUNT"

#: Names of the environment variable that contains options for torch's GPU allocator. The second
#: name is the older one.
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")

#: Option that lets tensors of any size reuse freed GPU memory. `takes_expandable_segments` returns
#: whether the machine supports it.
EXPANDABLE_SEGMENTS = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}

#: Lock that is held by the outermost `sharing_cores` context if several are nested.
_SHARING = threading.Lock()


def require_fork() -> None:
    """Reject an operating system without `os.fork`. Such a system also lacks other required
    modules.

    Raises:
        ImportError: the operating system is Windows.
    """
    if not hasattr(os, "fork"):
        raise ImportError(
            "firstlight needs Linux or macOS: on Windows, install it in WSL2, where NVIDIA GPUs "
            "work too (https://learn.microsoft.com/windows/wsl/install)"
        )


def set_at_import() -> None:
    """Set the environment variables that must be in place when firstlight is imported, unless torch
    has already been imported.
    """
    is_set = any(name in os.environ for name in _ALLOCATOR)
    if not is_set and "torch" not in sys.modules and takes_expandable_segments():
        os.environ.update(EXPANDABLE_SEGMENTS)
    if "GOMP_SPINCOUNT" in os.environ:
        return
    if "torch" in sys.modules:
        os.environ[_BY_IMPORT] = ""
    else:
        _set_spin(SHORT_SPIN)


def takes_expandable_segments(root: Path = Path("/")) -> bool:
    """Return True if torch's allocator can use expandable segments, which let a tensor reuse freed
    GPU memory of a different size.

    Expandable segments require the virtual memory functions of NVIDIA's driver for Linux. On WSL2,
    which has a different driver, they failed at the first tensor (pytorch issue 192330). The same
    happened on Jetson boards (unsloth-zoo pull request 1235) and on virtual GPUs such as "NVIDIA
    A40-48C" (xgboost issue 12217). On MIG partitions, they failed when memory ran out (vllm pull
    request 42467).

    Args:
        root: the folder that contains /dev and /proc.
    """
    is_jetson = (root / "dev/nvmap").exists() or (root / "etc/nv_tegra_release").exists()
    is_part = any((root / "proc/driver/nvidia/capabilities").glob("gpu*/mig/gi*"))
    models = ""
    for information in (root / "proc/driver/nvidia/gpus").glob("*/information"):
        with contextlib.suppress(OSError):
            models += information.read_text(errors="replace")
    is_virtual = re.search(r"Model:.*(GRID|-\d+[ABCQ]\b)", models) is not None
    is_whole = not (is_jetson or is_part or is_virtual)
    return (root / "dev/nvidiactl").exists() and is_whole


def set_for_command(variables: Mapping[str, str]) -> None:
    """Set the environment variables for a command. They override the values that were set when
    firstlight was imported, either in this process or in its parent.
    """
    if _is_from_import():
        os.environ.pop("GOMP_SPINCOUNT", None)
    os.environ.pop(_BY_IMPORT, None)
    for name, value in variables.items():
        os.environ.setdefault(name, value)


@contextlib.contextmanager
def sharing_cores() -> Iterator[None]:
    """Make torch's threads sleep after a short wait if other programs keep the cores busy, as
    firstlight's commands do. The load is checked when the context is entered. This function can be
    used as a context manager or as a decorator.

    This is necessary because torch reads `GOMP_SPINCOUNT` only when it is imported, and the cores
    may have been idle then. In a command, or if the user has set `GOMP_SPINCOUNT`, this function
    does nothing.
    """
    if not _is_from_import() or not _SHARING.acquire(blocking=False):
        yield
        return
    try:
        if not cores_are_busy():
            yield
        elif "torch" not in sys.modules:
            _set_spin(_NO_SPIN)
            yield
        else:
            # Imported here, because this import takes as long as all of `import firstlight`.
            from concurrent.futures import ThreadPoolExecutor

            with ThreadPoolExecutor(1) as thread:
                thread.submit(_exceed_cores).result()
                yield
    finally:
        _SHARING.release()


def _set_spin(spin: Mapping[str, str]) -> None:
    os.environ.update(spin)
    os.environ[_BY_IMPORT] = spin["GOMP_SPINCOUNT"]


def _is_from_import() -> bool:
    """Return True if GOMP_SPINCOUNT still has the value set by `import firstlight`."""
    return os.environ.get(_BY_IMPORT) == os.environ.get("GOMP_SPINCOUNT", "")


def _exceed_cores() -> None:
    """Start GNU OpenMP threads until there is one more thread than there are cores. These threads
    sleep, and exit when the calling thread exits.

    As long as these threads exist, all waiting OpenMP threads check for work only 100 times, as
    with `_NO_SPIN`. This works even if torch has already been imported. See
    https://gcc.gnu.org/onlinedocs/libgomp/GOMP_005fSPINCOUNT.html
    """
    import ctypes

    import torch

    openmp = ctypes.CDLL(torch._C.__file__)  # or a library linked with it
    if hasattr(openmp, "GOMP_parallel"):
        count = max(usable_cpus() - torch.get_num_threads() + 2, 2)
        openmp.GOMP_parallel(openmp.omp_get_thread_num, None, count, 0)


def for_training() -> dict[str, str]:
    """Return the environment variables for training and evaluation."""
    return TRAINING | (_NO_SPIN if cores_are_busy() else SHORT_SPIN)


def for_generation() -> dict[str, str]:
    """Return the environment variables for text generation."""
    return _NO_SPIN if cores_are_busy() else _LONG_SPIN


def cores_are_busy() -> bool:
    """Return True if other programs are using more than a quarter of the cores. Return False if
    they are using fewer cores, or if the load is unknown.
    """
    try:
        return 4 * sorted(_running() for _ in range(5))[2] > (os.cpu_count() or 1)
    except (OSError, ValueError, IndexError):
        return False


def usable_cpus() -> int:
    """Return the number of processors available to this process. A container can limit this
    number.
    """
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _running() -> int:
    """Return the number of other threads on this machine that are running or waiting for a core.
    This is supported on Linux only. The load average is not used, because it includes threads that
    ended up to a minute ago.
    """
    time.sleep(0.004)
    fields = Path("/proc/loadavg").read_text(encoding="ascii").split()
    return int(fields[3].partition("/")[0]) - 1

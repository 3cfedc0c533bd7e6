"""Environment variables for torch's thread library and allocator, and the number of usable
processors.

The thread library and the allocator read the variables when they are loaded, so the command line
and `import firstlight` set them before torch is imported. Variables that the user has set are not
changed.
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
#: cores, which made steps up to 70 times slower. With a much smaller number, the threads of a
#: virtual machine sleep between any two operators, and the host takes long to wake them: with 1000,
#: steps on free cores were up to 2 times slower.
SHORT_SPIN = {"GOMP_SPINCOUNT": "5000"}

#: The same for generation. A token consists of several hundred parallel regions of a few
#: microseconds each, and waking a sleeping thread takes as long as a region: 27 ms per token
#: instead of 14 to 20.
_LONG_SPIN = {"GOMP_SPINCOUNT": "30000"}

#: The same if other programs keep the cores busy. A spinning thread then uses up its time slice,
#: and the other threads of the parallel region wait for its next one. On two cores with a load of
#: 12, steps took 2.8 s with 5000, 0.35 s with 1000 and 0.21 s with 100 (0.14 s on free cores).
_NO_SPIN = {"GOMP_SPINCOUNT": "100"}

#: torch's huge pages (THP_MEM_ALLOC_ENABLE) stay off: memory kept between steps (methods/memory.py)
#: causes few page faults. Furthermore, with page-aligned tensors, glibc can't reuse the memory of a
#: freed tensor for the next tensor of the same size, so the heap grew in each step.
#: TORCH_CPP_LOG_LEVEL: otherwise torch reports a broken connection with a page of addresses.
TRAINING = SHORT_SPIN | {"TORCH_CPP_LOG_LEVEL": "ERROR"}

#: Environment variable with the value of GOMP_SPINCOUNT set by `import firstlight`, or "" if torch
#: had been imported before. Commands set their own value and do not set this variable.
_BY_IMPORT = "FIRSTLIGHT_SPINCOUNT"

#: Environment variables with options of torch's GPU allocator; the second is the older name.
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")

#: Lets freed GPU memory hold tensors of any size; see `takes_expandable_segments`.
EXPANDABLE_SEGMENTS = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}

#: Held by the outermost of nested `sharing_cores`.
_SHARING = threading.Lock()


def require_fork() -> None:
    """Reject a system without `os.fork`, which also lacks other required modules.

    Raises:
        ImportError: this is Windows.
    """
    if not hasattr(os, "fork"):
        raise ImportError(
            "firstlight needs Linux or macOS: on Windows, install it in WSL2, where NVIDIA GPUs "
            "work too (https://learn.microsoft.com/windows/wsl/install)"
        )


def set_at_import() -> None:
    """Set the variables of `import firstlight`, unless torch has been imported."""
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

    They use virtual memory of NVIDIA's driver for Linux. WSL2, which has another driver, failed at
    the first tensor (pytorch issue 192330), as did Jetson boards (unsloth-zoo pull request 1235);
    MIG partitions failed when memory ran out (vllm pull request 42467), and virtual GPUs such as
    "NVIDIA A40-48C" at the first tensor (xgboost issue 12217).

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
    """Set the variables for a command. They replace those set by `import firstlight`, in this
    process or in the process that started the command."""
    if _is_from_import():
        os.environ.pop("GOMP_SPINCOUNT", None)
    os.environ.pop(_BY_IMPORT, None)
    for name, value in variables.items():
        os.environ.setdefault(name, value)


@contextlib.contextmanager
def sharing_cores() -> Iterator[None]:
    """Context manager or decorator: torch's threads wait as in a command if other programs keep the
    cores busy at its start.

    torch reads `GOMP_SPINCOUNT` when it is imported, and the cores may have been free then. Does
    nothing in a command, or if the user has set that variable.
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
            # Imported here, because it takes as long as all of `import firstlight`.
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
    """Return True if GOMP_SPINCOUNT still has the value that `import firstlight` set."""
    return os.environ.get(_BY_IMPORT) == os.environ.get("GOMP_SPINCOUNT", "")


def _exceed_cores() -> None:
    """Start enough GNU OpenMP threads to have one more than the number of cores. They sleep, and
    end with the calling thread.

    Until then, waiting OpenMP threads check for work only 100 times (_NO_SPIN), even if torch was
    imported long ago: https://gcc.gnu.org/onlinedocs/libgomp/GOMP_005fSPINCOUNT.html
    """
    import ctypes

    import torch

    openmp = ctypes.CDLL(torch._C.__file__)  # or a library linked with it
    if hasattr(openmp, "GOMP_parallel"):
        count = max(usable_cpus() - torch.get_num_threads() + 2, 2)
        openmp.GOMP_parallel(openmp.omp_get_thread_num, None, count, 0)


def for_training() -> dict[str, str]:
    """Return the variables for training and evaluating."""
    return TRAINING | (_NO_SPIN if cores_are_busy() else SHORT_SPIN)


def for_generation() -> dict[str, str]:
    """Return the variables for generating text."""
    return _NO_SPIN if cores_are_busy() else _LONG_SPIN


def cores_are_busy() -> bool:
    """Return True if other programs use more than a quarter of the cores now; False if unknown."""
    try:
        return 4 * sorted(_running() for _ in range(5))[2] > (os.cpu_count() or 1)
    except (OSError, ValueError, IndexError):
        return False


def usable_cpus() -> int:
    """Return the number of processors available to this process, which a container may limit."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _running() -> int:
    """Return the number of other threads that run or wait for a core, on Linux. The load average
    would include threads that ended up to a minute ago."""
    time.sleep(0.004)
    fields = Path("/proc/loadavg").read_text(encoding="ascii").split()
    return int(fields[3].partition("/")[0]) - 1

"""Measure the memory use of this process, either as resident memory or as allocated bytes.

Resident memory is counted by the kernel and includes the pages of memory-mapped files that have
been accessed. It is read from /proc/self/status, because `ru_maxrss` starts at the parent's peak on
Linux. Without /proc, `ru_maxrss` is used. If /proc/self/clear_refs is not writable, the peak can't
be reset, and the peak since the start of the process is returned.

Allocated bytes are counted by the C library, which must be glibc 2.33 or later. `AllocatedPeak`
reads them. They include tensors and library buffers, but neither code nor freed memory that the
allocator keeps.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import resource
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_STATUS = Path("/proc/self/status")


def reset_peak() -> None:
    """Reset the peak of resident memory (VmHWM) to its current size. This requires Linux 4.0 or
    later; see clear_refs in proc(5).
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def resident_bytes() -> int:
    """Return the current resident memory in bytes. Without /proc, return the peak since the start
    of the process.
    """
    return _status_bytes("VmRSS")


def peak_resident_bytes() -> int:
    """Return the peak resident memory in bytes since `reset_peak`. Without /proc, return the peak
    since the start of the process.
    """
    return _status_bytes("VmHWM")


def _status_bytes(field: str) -> int:
    if not _STATUS.exists():
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    lines = dict(line.split(":", 1) for line in _STATUS.read_text(encoding="utf-8").splitlines())
    return int(lines[field].split()[0]) * 1024


def begin_peak() -> int:
    """Reset the peak of resident memory. Return the current resident memory in bytes, which must be
    passed to `peaks` as `level`.
    """
    gc.collect()
    reset_peak()
    return resident_bytes()


def peaks(device: torch.device, level: int) -> tuple[int, int]:
    """Return two peaks since `begin_peak` was called, in bytes: the peak of the process's resident
    memory above `level`, and the total peak of resident memory. On a GPU, both values are the peak
    of torch's allocator.
    """
    import torch

    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        return peak, peak
    # The kernel updates its counters in batches, so the peak can be reported as lower than the
    # level.
    peak = max(peak_resident_bytes(), level)
    return peak - level, peak


#: Time in seconds between two readings of the allocator's counters. The first constant applies to
#: the first steps, and the second to later steps. In later steps, the counters are read less often,
#: because the speed of these steps is measured. One reading took 0.4 ms with the demo's recipe on 2
#: cores of an AMD EPYC.
_DENSE_SECONDS, _SPARSE_SECONDS = 0.005, 0.1


class _Mallinfo2(ctypes.Structure):
    """`struct mallinfo2` of malloc.h."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
        )
    )


#: Maximum fraction of the time that can be spent reading the counters.
_MOST_SHARE = 0.05


@functools.cache
def _mallinfo2() -> Callable[[], _Mallinfo2] | None:
    try:
        function = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError, TypeError):  # not glibc, or CDLL(None) failed on Windows
        return None
    function.restype = _Mallinfo2
    found: Callable[[], _Mallinfo2] = function
    return found


def allocated_bytes() -> int | None:
    """Return the number of bytes that are currently allocated in the heap and as separate mappings.
    Return None if the C library does not count them.
    """
    function = _mallinfo2()
    if function is None:
        return None
    info = function()
    return int(info.uordblks) + int(info.hblkhd)


class AllocatedPeak:
    """Measures the peak of the allocated bytes above a baseline, which is called the level. The
    allocated bytes are sampled by a thread. Use this class as a context manager, so that the thread
    is stopped on exit.

    The level is the number of allocated bytes that the caller does not count, such as the buffers
    and compiled kernels of libraries. It rises during a run. Call `find_level` to measure it again
    whenever the number of bytes counted by the caller is known.
    """

    def __init__(self) -> None:
        self._most = 0
        self._peak = 0
        self._level = 0
        self._seconds = _DENSE_SECONDS
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> AllocatedPeak:
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join()

    @property
    def is_running(self) -> bool:
        """True while the thread is sampling."""
        return self._thread is not None and not self._end.is_set()

    def start(self, counted_bytes: int) -> None:
        """Set the level to the currently allocated bytes minus `counted_bytes`, and start the
        thread. Do nothing if the C library does not count allocated bytes, or if the thread has
        already been started.
        """
        level = allocated_bytes()
        if level is None or self._thread is not None:
            return
        self._level = level - counted_bytes
        self._thread = threading.Thread(target=self._look, name="allocated peak", daemon=True)
        self._thread.start()

    def find_level(self, counted_bytes: int) -> None:
        """Set the level to the currently allocated bytes minus `counted_bytes`."""
        level = (allocated_bytes() or 0) - counted_bytes
        # Since the last call, the level may have risen before or after the peak occurred. Subtract
        # the higher of the two levels, so that the peak is not overestimated.
        self._most = max(self._most, self._peak - max(level, self._level))
        self._peak, self._level = 0, level

    def look_less(self) -> None:
        """Sample less often from this call on, so that training steps are not slowed down."""
        self._seconds = _SPARSE_SECONDS

    @property
    def peak_bytes(self) -> int | None:
        """Peak of the allocated bytes above the level. None before `start` is called, or if the C
        library does not count allocated bytes.
        """
        if self._thread is None:
            return None
        return max(self._most, self._peak - self._level, 0)

    def _look(self) -> None:
        while not self._end.is_set():
            began = time.perf_counter()
            self.look()
            # While counting, glibc locks the heap and visits every free block. In a process that
            # has loaded long documents or large vocabularies, a sample takes tens of milliseconds.
            taken = time.perf_counter() - began
            self._end.wait(max(self._seconds, taken / _MOST_SHARE))

    def look(self) -> None:
        """Take one sample."""
        self._peak = max(self._peak, allocated_bytes() or 0)

"""Resident memory of this process, as the kernel counts it.

Pages of a memory-mapped file count once they are touched. The numbers are read from
/proc/self/status, because `ru_maxrss` starts from the parent's peak on Linux. If the peak can't be
reset (/proc/self/clear_refs is not writable), it is the peak since the start of the process.
Without /proc it comes from `ru_maxrss`.
"""

from __future__ import annotations

import contextlib
import gc
import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_STATUS = Path("/proc/self/status")


def reset_peak() -> None:
    """Set the peak of resident memory (VmHWM) to the present size (proc(5), clear_refs, Linux
    4.0)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def resident_bytes() -> int:
    """Resident bytes now; without /proc, the process's peak so far."""
    return _status_bytes("VmRSS")


def peak_resident_bytes() -> int:
    """Peak of the resident bytes since `reset_peak`."""
    return _status_bytes("VmHWM")


def _status_bytes(field: str) -> int:
    if not _STATUS.exists():
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    lines = dict(line.split(":", 1) for line in _STATUS.read_text(encoding="utf-8").splitlines())
    return int(lines[field].split()[0]) * 1024


def begin_peak() -> int:
    """Reset the peak of resident memory; returns the resident bytes, the level for `peaks`."""
    gc.collect()
    reset_peak()
    return resident_bytes()


def peaks(device: torch.device, level: int) -> tuple[int, int]:
    """(peak above `level`, whole peak) of the process's resident memory since `begin_peak`, in
    bytes; on a GPU both are the peak of torch's allocator."""
    import torch

    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        return peak, peak
    # The kernel counts in batches, so the peak may be lower than the resident memory before.
    peak = max(peak_resident_bytes(), level)
    return peak - level, peak

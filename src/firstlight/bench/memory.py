"""Memory of this process: resident as the kernel counts it, of torch's allocator, of the GPU.

Pages of a memory-mapped file count as resident from when they are touched. Resident memory is read
from /proc/self/status, since `ru_maxrss` starts from the parent's peak on Linux. Where the peak
can't be set back (/proc/self/clear_refs is not writable) it is that of the whole process; without
/proc it comes from `ru_maxrss`.

torch is imported inside the functions: `load_once` times its import.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch.profiler import profile

_STATUS = Path("/proc/self/status")


def reset_peak() -> None:
    """Set the peak (VmHWM) back to what is resident now (proc(5), clear_refs, Linux 4.0)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def resident_bytes() -> int:
    """Resident bytes now; without /proc, the process's peak so far."""
    return _status_bytes("VmRSS")


def peak_resident_bytes() -> int:
    """The most bytes that were resident since `reset_peak`."""
    return _status_bytes("VmHWM")


def _status_bytes(field: str) -> int:
    if not _STATUS.exists():
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    lines = dict(line.split(":", 1) for line in _STATUS.read_text(encoding="utf-8").splitlines())
    return int(lines[field].split()[0]) * 1024


def driver_used_bytes() -> int | None:
    """Bytes of the GPU's memory in use by all processes, contexts included; None if unknown.

    NVML says it without a CUDA context of this process, so that what there was before one can be
    read too. Without nvidia-ml-py it comes from CUDA, once this process has a context.
    """
    import torch

    try:
        pynvml: Any = importlib.import_module("pynvml")

        pynvml.nvmlInit()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
        if visible and not visible.isdigit():
            handle = pynvml.nvmlDeviceGetHandleByUUID(visible)
        else:
            handle = pynvml.nvmlDeviceGetHandleByIndex(int(visible or 0))
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
    except Exception:  # noqa: BLE001  (no library, no driver, no right to ask: the same to us)
        is_used: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if not is_used:
            return None
        free, total = torch.cuda.mem_get_info()
        return total - free


@dataclass
class MeasuredMemory:
    """Memory of a block beyond what was there before it.

    Attributes:
        peak_bytes: peak of torch's allocator; on a CPU of all allocations that its profiler sees,
            which are those of every tensor and of every kernel that asks torch for memory.
        resident_bytes: growth of the process's resident memory: with what libraries take past
            torch's allocator, and less what was never written to.
    """

    peak_bytes: int = 0
    resident_bytes: int = 0


@contextlib.contextmanager
def measured_memory(device: torch.device | str = "cpu") -> Iterator[MeasuredMemory]:
    """Measure what runs inside. The result is filled in at the end.

    Tensors that are there before don't count; what frees them inside lowers the peak.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    result = MeasuredMemory()
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield result
        result.peak_bytes = torch.cuda.max_memory_allocated(device) - before
        result.resident_bytes = result.peak_bytes
        return
    reset_peak()
    level = resident_bytes()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield result
    result.resident_bytes = max(peak_resident_bytes() - level, 0)
    result.peak_bytes = _peak_of_events(profiler)


def _peak_of_events(profiler: profile) -> int:
    """The highest running sum of the profiler's allocations and releases."""
    inner = profiler.profiler
    assert inner is not None
    assert inner.kineto_results is not None
    found: list[Any] = inner.kineto_results.events()
    events = [event for event in found if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    current = peak = 0
    for event in events:
        current += event.nbytes()
        peak = max(peak, current)
    return peak


def begin_peak() -> int:
    """Set the peak of resident memory back; the level from which `peaks` counts, in bytes."""
    gc.collect()
    reset_peak()
    return resident_bytes()


def peaks(device: torch.device, level: int) -> tuple[int, int]:
    """The peak above the level of `begin_peak` and the whole process's, in bytes; on a GPU both
    are the peak of torch's allocator."""
    import torch

    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        return peak, peak
    # The kernel counts in batches, so that the peak may read lower than what was there.
    peak = max(peak_resident_bytes(), level)
    return peak - level, peak

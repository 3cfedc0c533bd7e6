"""Peak memory of a process: resident memory as the kernel counts it (`hardware.resident`), and on a
GPU that of torch's allocator."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from firstlight.hardware.resident import peak_resident_bytes, reset_peak, resident_bytes

if TYPE_CHECKING:
    import torch


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

"""What a training step really takes: the peak of the allocator, and of resident memory."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from firstlight.bench.memory import peak_resident_bytes, reset_peak, resident_bytes


@dataclass
class MeasuredMemory:
    """Memory that something took beyond what was there before.

    Attributes:
        peak_bytes: of torch's allocator: on a CPU of all allocations that its profiler sees,
            which are those of every tensor and of every kernel that asks torch for memory.
        resident_bytes: growth of the process' resident memory: with what libraries take past
            torch's allocator, and less what was never written to.
    """

    peak_bytes: int = 0
    resident_bytes: int = 0


@contextlib.contextmanager
def measured_memory(device: torch.device | str = "cpu") -> Iterator[MeasuredMemory]:
    """Measure what runs inside. The result is filled in at the end.

    Tensors that are there before don't count; what frees them inside lowers the peak.
    """
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

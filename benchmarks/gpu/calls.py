"""Time, memory and kernels of a call on a device, and calls recorded as CUDA graphs.

On a CPU, everything works in the same way, except that a recorded call is the call itself, memory
is not measured, and operators take the place of kernels.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import re
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from firstlight.hardware.device import synchronize

Call = Callable[[], object]

#: Number of kernels to keep in a profile, those with the most time.
_MOST_KERNELS = 15

#: Names of attention kernels: FlashAttention's, cuDNN's, the memory-efficient ones, flex's.
_ATTENTION = re.compile(r"flash|sdpa|fmha|attention|flex", re.IGNORECASE)


def milliseconds(call: Call, device: torch.device, *, rounds: int = 5, calls: int = 5) -> float:
    """Measure a call in milliseconds, as the median over rounds.

    The device is synchronised only before and after each round, so that a call that does not wait
    for the device is measured without waiting.

    Args:
        call: the call, whose first run may be slower.
        device: device of the computation.
        rounds: number of timed rounds, after one that is not timed.
        calls: number of calls per round.
    """
    found = []
    for number in range(rounds + 1):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(calls if number else 1):
            call()
        synchronize(device)
        if number:
            found.append(1000 * (time.perf_counter() - start) / calls)
    return statistics.median(found)


def kernels(call: Call, device: torch.device) -> dict[str, Any]:
    """Profile the kernels of one call.

    Returns:
        - "kernels_ms": time in which at least one kernel ran
        - "launches": number of kernels
        - "attention": names of the attention kernels, joined by ", "
        - "kernels": [name, milliseconds, calls] of the kernels with the most time
    """
    on_gpu = device.type == "cuda"
    # On a GPU, CPU activity is not recorded, because recording operators would slow down the host.
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    synchronize(device)
    with profile(activities=[activity], acc_events=True) as profiler:
        call()
        synchronize(device)
    inner = profiler.profiler
    assert inner is not None
    assert inner.kineto_results is not None
    found: list[Any] = inner.kineto_results.events()
    return _summary(
        [
            (event.name(), event.start_ns() / 1e6, event.duration_ns() / 1e6)
            for event in found
            if _is_kernel(event, "CUDA" if on_gpu else "CPU")
        ]
    )


def _is_kernel(event: Any, device: str) -> bool:
    # The GPU's timeline also contains ranges that torch marks by name, such as "Optimizer.step".
    is_marked = event.is_user_annotation() if hasattr(event, "is_user_annotation") else False
    is_here = event.device_type().name == device
    return is_here and not is_marked and (device == "CUDA" or event.name().startswith("aten::"))


def _summary(spans: list[tuple[str, float, float]]) -> dict[str, Any]:
    """See `kernels`; `spans` are name, start and duration of each kernel in milliseconds."""
    busy = end = 0.0
    for _, start, duration in sorted(spans, key=lambda span: span[1]):
        busy += max(0.0, start + duration - max(start, end))
        end = max(end, start + duration)
    by_name: dict[str, list[float]] = collections.defaultdict(list)
    for name, _, duration in spans:
        by_name[name].append(duration)
    ordered = sorted(by_name.items(), key=lambda entry: -sum(entry[1]))
    attention = [name[:80] for name, _ in ordered if _ATTENTION.search(name)]
    return {
        "kernels_ms": round(busy, 4),
        "launches": len(spans),
        "attention": ", ".join(attention),
        "kernels": [
            [name[:120], round(sum(times), 4), len(times)]
            for name, times in ordered[:_MOST_KERNELS]
        ],
    }


def recorded(call: Call, device: torch.device) -> Call:
    """Return a function that replays a call as a CUDA graph; on a CPU, the call itself.

    Args:
        call: a call that reads nothing on the host. Its tensors must keep their addresses.
        device: device of the computation.
    """
    if device.type != "cuda":
        return call
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):  # Load kernels and create workspaces, which can't be recorded.
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    gc.collect()
    # Collecting garbage that holds another graph during the recording would make it invalid.
    gc.disable()
    try:
        with torch.cuda.graph(graph):
            call()
    finally:
        gc.enable()
    return graph.replay


@contextlib.contextmanager
def peak_memory(device: torch.device) -> Iterator[dict[str, float]]:
    """Context manager that records peak memory in the yielded dict: "allocated_gib" and
    "reserved_gib" of torch's allocator, including earlier allocations; {} on a CPU."""
    found: dict[str, float] = {}
    if device.type != "cuda":
        yield found
        return
    free_memory(device)
    torch.cuda.reset_peak_memory_stats(device)
    yield found
    torch.cuda.synchronize(device)
    found["allocated_gib"] = round(torch.cuda.max_memory_allocated(device) / 2**30, 3)
    found["reserved_gib"] = round(torch.cuda.max_memory_reserved(device) / 2**30, 3)


def free_memory(device: torch.device) -> None:
    """Return unused memory to the GPU."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()

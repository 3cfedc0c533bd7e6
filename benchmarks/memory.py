"""Memory of a process: resident memory as the kernel counts it (`hardware.process_memory`), memory
of torch's allocator, memory of the GPU.

`measure` loads one model once, in a separate process, and reports memory and time:

    python -m firstlight.hardware.fresh_process benchmarks.memory REQUEST

REQUEST is a JSON object:

    program  "firstlight" or "transformers"
    folder   the model folder
    way      mode of firstlight's `load`; null is its default
    dtype    "float32" or "bfloat16"; null is that of the file
    device   "cpu" or "cuda"
    threads  threads of torch

The measurement consists of these steps:

1. `import_seconds`: the time of importing everything that loading needs, without modules that the
   program itself imports later.
2. On a GPU, its context is made. The resident memory of the process is noted as the level, and the
   peaks of resident memory and of the GPU's allocator are reset.
3. `load_seconds`: from the call to the model in evaluation mode. `load_peak_bytes` is the peak of
   resident memory until then, above the level.
4. `first_logits_seconds`: from the start of step 3 to the logits that follow a prompt of 16
   tokens. `total_peak_bytes` is the peak of the process's resident memory since step 2, and
   `peak_bytes` is that above the level. `device_peak_bytes` is the peak of torch's allocator
   (`torch.cuda.max_memory_allocated`); null on a CPU, where all memory is the host's.

`load_cpu_seconds` and `first_logits_cpu_seconds` are the processor time, user and system, of all
threads, which other work on the machine affects less than wall-clock time.

The process prints one line on stdout: a JSON object of these numbers and `model_bytes`, the bytes
of the model's parameters.

torch is imported inside the functions, because `measure` times its import.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from firstlight.hardware.process_memory import (
    begin_peak,
    peak_resident_bytes,
    reset_peak,
    resident_bytes,
)

if TYPE_CHECKING:
    import torch
    from torch.profiler import profile


def driver_used_bytes() -> int | None:
    """Return the bytes of the GPU's memory in use by all processes, contexts included; None if
    unknown.

    NVML reports it even before this process has a CUDA context. Without NVML (nvidia-ml-py), CUDA
    reports it, but only once this process has a context.
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
    """Peak memory of a block of code relative to the memory before it.

    Attributes:
        peak_bytes: peak of torch's allocator; on a CPU the peak of all allocations that torch's
            profiler records: those of tensors, and of kernels that allocate memory with torch.
        resident_bytes: growth of the process's resident memory to its peak. It includes the memory
            of libraries outside torch's allocator, but no memory that was never written to. On a
            GPU, it equals `peak_bytes`.
    """

    peak_bytes: int = 0
    resident_bytes: int = 0


@contextlib.contextmanager
def measured_memory(device: torch.device | str = "cpu") -> Iterator[MeasuredMemory]:
    """Measure the memory of the block; the yielded result is filled in at its end.

    Tensors that exist before the block don't count; freeing them inside lowers the peak.
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
    # acc_events: without it, torch 2.11 warns that events are cleared after each profiling cycle.
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiler:
        yield result
    result.resident_bytes = max(peak_resident_bytes() - level, 0)
    result.peak_bytes = _peak_of_events(profiler)


def _peak_of_events(profiler: profile) -> int:
    """Return the highest running sum of the profiler's allocations and releases."""
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


_PROMPT_TOKENS = 16

#: (a function that loads the model, a function from the model and ids [1, T] to logits)
_Program = tuple[Callable[[], Any], Callable[[Any, Any], Any]]


def measure(request: dict[str, Any]) -> dict[str, float | None]:
    """Load a model and measure; the module's docstring describes the request and the result.

    Raises:
        FirstlightError: firstlight can't load the model.
    """
    start = time.perf_counter()
    import torch

    from firstlight.hardware.device import synchronize

    program = _firstlight(request) if request["program"] == "firstlight" else _transformers(request)
    load, logits_of = program
    torch.set_num_threads(request["threads"])
    device = torch.device(request["device"])
    result: dict[str, float | None] = {"import_seconds": time.perf_counter() - start}

    input_ids = torch.arange(_PROMPT_TOKENS, device=device)[None]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    level = begin_peak()
    clock, cpu = time.perf_counter(), time.process_time()
    model = load()
    synchronize(device)
    result["load_seconds"] = time.perf_counter() - clock
    result["load_cpu_seconds"] = time.process_time() - cpu
    result["load_peak_bytes"] = peak_resident_bytes() - level
    with torch.inference_mode():
        logits = logits_of(model, input_ids)
    synchronize(device)
    result["first_logits_seconds"] = time.perf_counter() - clock
    result["first_logits_cpu_seconds"] = time.process_time() - cpu
    peak = peak_resident_bytes()
    result |= {"total_peak_bytes": peak, "peak_bytes": peak - level, "device_peak_bytes": None}
    if device.type == "cuda":
        result["device_peak_bytes"] = torch.cuda.max_memory_allocated(device)
    assert bool(torch.isfinite(logits).all())
    result["model_bytes"] = sum(parameter.nbytes for parameter in model.parameters())
    return result


def _firstlight(request: dict[str, Any]) -> _Program:
    from firstlight.generation.engine import load

    options: dict[str, Any] = {"dtype": request["dtype"] or "auto"}
    if request["way"] is not None:
        options["way"] = request["way"]
    return (
        lambda: load(request["folder"], request["device"], **options).model,
        lambda model, input_ids: model(input_ids, logits_to_keep=1),
    )


def _transformers(request: dict[str, Any]) -> _Program:
    import transformers

    # Otherwise from_pretrained would import the module, and its time would count as loading.
    importlib.import_module("transformers.models.qwen2.modeling_qwen2")
    transformers.utils.logging.disable_progress_bar()
    return (
        lambda: (
            transformers.AutoModelForCausalLM.from_pretrained(
                request["folder"], dtype=request["dtype"] or "auto", local_files_only=True
            )
            .to(request["device"])
            .eval()
        ),
        lambda model, input_ids: model(input_ids, logits_to_keep=1, use_cache=False).logits,
    )


_COPY_BYTES = 256 * 2**20


def copy_rate(device: torch.device) -> float:
    """Return the bytes per second, read plus written, of copying a tensor of 256 MiB on the
    device."""
    import torch

    source = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source).copy_(source)
    return 2 * _COPY_BYTES / copy_seconds(target, source, device)


def copy_seconds(target: torch.Tensor, source: torch.Tensor, device: torch.device) -> float:
    """Return the seconds of copying `source` into `target`, the minimum of six measurements."""
    from firstlight.hardware.device import synchronize

    best = math.inf
    for _ in range(6):
        synchronize(device)
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best

"""Detect the device of this machine and its supported dtypes, peak rates and memory. A GPU that the
installed version of torch does not support is rejected.

Peak rates are never guessed. They are measured on CPUs and on GPUs that are not in the GPU table.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import platform
import re
import resource
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from firstlight.errors import ConfigError, lacks_memory
from firstlight.hardware.gpus import find_gpu
from firstlight.hardware.process_memory import peak_resident_bytes


@dataclass(frozen=True)
class Hardware:
    """One device and its properties.

    Attributes:
        device: the torch device.
        name: the manufacturer's name for the device.
        memory_bytes: memory of the device; for a CPU, memory of the machine.
        bf16: True if bf16 matrix products run in hardware.
        capability: CUDA compute capability; None without CUDA.
    """

    device: torch.device
    name: str
    memory_bytes: int
    bf16: bool
    capability: tuple[int, int] | None = None


def find_hardware(device: str = "auto") -> Hardware:
    """Detect the device to run on. For "auto", this is a CUDA GPU if there is one, and otherwise
    the CPU.

    Args:
        device: name of the device, such as "cpu", "cuda", "cuda:1" or "mps", or "auto".

    Raises:
        ConfigError: the device is unknown or not present, or the installed torch does not support
            it.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise ConfigError(f"device '{device}' is unknown: use auto, cpu, cuda or mps") from None
    if chosen.type == "cuda":
        if not torch.cuda.is_available() or (chosen.index or 0) >= torch.cuda.device_count():
            raise ConfigError(f"device '{device}' is not present on this machine")
        with warnings.catch_warnings():
            # Hide torch's warning about an unsupported GPU, which is two paragraphs long.
            warnings.filterwarnings("ignore", r"\s*Found GPU.* capability", UserWarning)
            properties = torch.cuda.get_device_properties(chosen)
        _require_code(properties)
        bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        # ROCm's version numbers are not CUDA's compute capabilities.
        capability = None if torch.version.hip else (properties.major, properties.minor)
        return Hardware(
            chosen, properties.name, properties.total_memory, bf16, capability=capability
        )
    memory = psutil.virtual_memory().total
    if chosen.type == "mps":
        if not torch.backends.mps.is_available():
            raise ConfigError("device 'mps' is not present on this machine")
        return Hardware(chosen, "Apple GPU", memory, bf16=False)
    if chosen.type != "cpu":
        raise ConfigError(f"device '{device}' is not supported: use auto, cpu, cuda or mps")
    return Hardware(chosen, _cpu_name(), memory, bf16=bool(_cpu_flags() & _BF16_CPU_FLAGS))


def _require_code(properties: Any) -> None:
    """Reject a CUDA GPU that the installed torch does not support. Without this check, the first
    operator would fail with "no kernel image is available".

    Raises:
        ConfigError: the GPU is not supported. The message names a package index with a suitable
            version of torch.
    """
    capability, built_for = (properties.major, properties.minor), []
    for arch in torch.cuda.get_arch_list():
        # Examples of names: sm_80 (machine code, which also runs on later minor versions), sm_90a
        # (machine code for this version only) and compute_90 (PTX, which the driver can compile for
        # all later GPUs). ROCm's names look like gfx942.
        if found := re.fullmatch(r"(sm|compute)_(\d+)(\d)([a-z]?)", arch):
            code = int(found[2]), int(found[3])
            built_for.append(code)
            runs = capability == code if found[4] == "a" else capability >= code
            if runs and (found[1] == "compute" or capability[0] == code[0]):
                return
    if built_for:
        index = "cu126" if capability < min(built_for) else "cu130"
        raise ConfigError(
            f"torch {torch.__version__} was not built for {properties.name} (compute capability "
            f"{capability[0]}.{capability[1]}): pip install --force-reinstall torch --index-url "
            f"https://download.pytorch.org/whl/{index}, or set the device to cpu"
        )


def machine_facts(hardware: Hardware) -> dict[str, Any]:
    """Return the facts about this machine that are recorded with every result."""
    return {
        "name": hardware.name,
        "device": str(hardware.device),
        "memory_bytes": hardware.memory_bytes,
        "threads": torch.get_num_threads(),
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "torch": str(torch.__version__),
    }


_BF16_CPU_FLAGS = {"amx_bf16", "avx512_bf16", "bf16"}

#: Minimum speed of bf16 relative to fp32. Below this speed, bf16 is not worth its rounding errors.
_WORTHWHILE = 1.2


@functools.cache
def bf16_is_faster(device: torch.device) -> bool:
    """Return True if matrix products on a device are faster in bf16 than in fp32.

    On CPUs, the rates of both dtypes are measured, because bf16 is not always faster on CPUs that
    support it in hardware. A CPU with avx512_bf16 but without AMX ran bf16 at half the rate of
    fp32.
    """
    if device.type != "cpu":
        return True
    rates = {torch.float32: 0.0, torch.bfloat16: 0.0}
    for _ in range(2):
        for dtype, best in rates.items():
            rates[dtype] = max(best, measured_matmul_flops(device, dtype))
    return rates[torch.bfloat16] >= _WORTHWHILE * rates[torch.float32]


@functools.cache
def _cpu_info() -> str:
    path = Path("/proc/cpuinfo")
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _cpu_field(*names: str) -> str:
    for line in _cpu_info().splitlines():
        key, _, value = line.partition(":")
        if key.strip() in names:
            return value.strip()
    return ""


def _cpu_flags() -> set[str]:
    return set(_cpu_field("flags", "Features").split())


def _cpu_name() -> str:
    return _cpu_field("model name") or platform.processor() or platform.machine()


@functools.cache
def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the peak FLOP/s of matrix products in `dtype` on `device`. This rate is the reference
    for MFU.

    For bf16 on a GPU in the GPU table, this is the data sheet's figure. In all other cases, the
    best rate of several large products is measured, which takes a fraction of a second.
    """
    if device.type == "cuda" and dtype == torch.bfloat16:
        properties = torch.cuda.get_device_properties(device)
        with contextlib.suppress(ConfigError):
            gpu = find_gpu(properties.name, properties.total_memory)
            if gpu.bf16:
                return gpu.bf16
    return measured_matmul_flops(device, dtype)


#: Time in seconds after which no further measurement is started.
_MEASURING_SECONDS = 1.0


def measured_matmul_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the best rate, in FLOP/s, of several square matrix products."""
    size = 1024 if device.type == "cpu" else 8192
    a = torch.full((size, size), 0.5, device=device, dtype=dtype)
    best, begun = 0.0, time.perf_counter()
    for attempt in range(6):
        # A CPU without fp16 instructions takes several seconds per product.
        if best and time.perf_counter() - begun > _MEASURING_SECONDS:
            break
        synchronize(device)
        start = time.perf_counter()
        a @ a
        synchronize(device)
        if (
            attempt
        ):  # The first product is not timed, because it includes the time to create kernels.
            best = max(best, 2 * size**3 / (time.perf_counter() - start))
    return best


def single_threaded_pool(workers: int, name: str) -> ThreadPoolExecutor:
    """Create a thread pool in which each thread runs torch's operators on a single core.

    Without this limit, each thread that runs an operator in parallel would create its own OpenMP
    threads and keep them. Once a process has more OpenMP threads than cores, GNU OpenMP makes all
    waiting threads sleep immediately. For example, after a thread without this limit had written
    the first checkpoint, the training steps of small models took 1.7 times as long.

    Args:
        workers: number of threads.
        name: prefix of the threads' names.
    """

    def use_one_core(threads: int) -> None:
        # The first call in a new thread initialises the thread's number of torch threads from the
        # process-wide setting. Make this call first, because it would otherwise override the number
        # that is set in the next line.
        torch.get_num_threads()
        torch.set_num_threads(1)
        # The line above also sets the number for threads that start later. Restore that number from
        # a different thread, so that only the current thread is limited to one core.
        restoring = threading.Thread(target=torch.set_num_threads, args=(threads,))
        restoring.start()
        restoring.join()

    return ThreadPoolExecutor(workers, name, use_one_core, (torch.get_num_threads(),))


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def upload(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Copy a list of numbers or a tensor from host memory to `device`.

    Copies to a CUDA GPU use page-locked memory, so the host does not wait for them.
    """
    tensor = torch.as_tensor(values, dtype=dtype, device="cpu")
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def download(numbers: Tensor) -> Callable[[], list[float]]:
    """Start copying a tensor of shape [N] to host memory. Return a function that waits for the copy
    and then returns the values as a list.

    Work that is queued on a CUDA GPU after this call does not delay the copy.
    """
    if not numbers.is_cuda:
        return numbers.tolist
    there = torch.empty_like(numbers, device="cpu", pin_memory=True)
    there.copy_(numbers, non_blocking=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record()

    def read() -> list[float]:
        copied.synchronize()
        return there.tolist()

    return read


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an error was caused by insufficient memory, on any device."""
    return isinstance(error, torch.OutOfMemoryError) or lacks_memory(error)


def free_memory_bytes(device: torch.device) -> int:
    """Return the number of bytes that this process can still allocate. On a CPU, it is the minimum
    of the machine's available memory, the memory left in the control group and the memory left
    within the process's limit (`ulimit -v`).
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free: int = psutil.virtual_memory().available
    group = Path("/sys/fs/cgroup")
    limit, used, stat = (group / f"memory.{name}" for name in ("max", "current", "stat"))
    if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
        # Inactive file pages are not counted as used, because the kernel frees them when memory is
        # needed.
        cached = re.search(r"^inactive_file (\d+)$", stat.read_text(), re.MULTILINE)
        taken = int(used.read_text()) - (int(cached[1]) if cached else 0)
        free = min(free, max(int(text) - taken, 0))
    addresses, _ = resource.getrlimit(resource.RLIMIT_AS)
    if addresses != resource.RLIM_INFINITY:
        free = min(free, max(addresses - psutil.Process().memory_info().vms, 0))
    return free


#: Time in seconds over which the driver averages a GPU's utilization. Reading the utilization more
#: often does not give new values.
_UTILIZATION_SECONDS = 0.2


class GpuMonitor:
    """Reads the utilization and memory use of a GPU for the metrics of a run. The memory use also
    includes memory that is not allocated by torch.

    Args:
        device: the device of the run. Values are available only for CUDA GPUs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._driver: dict[str, float] = {}
        self._read_at = -math.inf

    def read(self) -> dict[str, float]:
        """Return the current values without waiting for the GPU, or {} if the device is not a CUDA
        GPU.

        Returns:
            - "reserved_bytes": peak memory reserved by torch's allocator.
            - "device_used_bytes": GPU memory used by all processes, including CUDA contexts.
            - "gpu_utilization": fraction of the driver's last sample period during which a kernel
              was running.

            The last two values are read from NVML. They are omitted if NVML is not available.
        """
        if self._device.type != "cuda":
            return {}
        now = time.monotonic()
        if now - self._read_at >= _UTILIZATION_SECONDS:
            self._driver, self._read_at = self._read_driver(), now
        return {"reserved_bytes": torch.cuda.max_memory_reserved(self._device), **self._driver}

    def _read_driver(self) -> dict[str, float]:
        try:
            return {
                "device_used_bytes": torch.cuda.device_memory_used(self._device),
                "gpu_utilization": torch.cuda.utilization(self._device) / 100,
            }
        except Exception:  # noqa: BLE001  (no nvidia-ml-py, no permission, or a MIG partition)
            return {}


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory use since `reset_peak`, in bytes. On a GPU, this is the peak of
    allocated tensors. On a CPU, it is the peak of the process's resident memory.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return peak_resident_bytes()

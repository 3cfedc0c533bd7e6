"""What is planned for: this machine, or GPUs that are somewhere else."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass

import torch

from firstlight.efficiency.compilation import TRITON_CAPABILITY
from firstlight.errors import ConfigError
from firstlight.hardware.device import Hardware, bf16_is_faster, find_hardware, free_memory_bytes
from firstlight.hardware.gpus import GPU, find_gpu
from firstlight.planner.kernels import Target, cuda_target, this_cpu
from firstlight.planner.measured_gpus import measured_gpu

#: Of the memory of a GPU that is not in the table.
_GPU_SHARE = 0.98

#: Of a CPU's free memory: its programs share it.
_CPU_SHARE = 0.9

_UNITS = {"b": 1, "": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


@dataclass(frozen=True)
class Machine:
    """One or several equal devices.

    Attributes:
        name: of the device.
        count: how many.
        memory_bytes: of each.
        usable_bytes: of that, what a run may take.
        target: whose kernels memory is predicted for.
        gpu: its rates; None for a CPU, and for a GPU of which only the memory is known.
        precision: what "auto" takes there: "bf16", "fp16" or "fp32".
        is_here: whether it is the machine that this runs on.
    """

    name: str
    count: int
    memory_bytes: int
    usable_bytes: int
    target: Target
    gpu: GPU | None
    precision: str
    is_here: bool

    @property
    def compiles(self) -> bool:
        """Whether torch.compile's inductor has code for a GPU: triton begins with capability 7.0,
        and firstlight doesn't compile for Apple's."""
        if self.gpu is None:
            return True
        return not self.gpu.is_apple and not (0, 0) < self.gpu.capability < TRITON_CAPABILITY

    @property
    def notes(self) -> list[str]:
        """What a plan for this GPU takes for granted or leaves out."""
        if self.gpu is None:
            return []
        if self.gpu.is_apple:
            return ["memory and speed are those of CUDA's kernels: not measured on Apple's GPUs"]
        if (0, 0) < self.gpu.capability < (5, 0):
            return [
                f"{self.name} has compute capability {self.gpu.capability[0]}."
                f"{self.gpu.capability[1]}, which builds of torch for CUDA 12 have no kernels for"
            ]
        return []

    @property
    def hardware(self) -> Hardware:
        """As the rest of firstlight describes a device."""
        device = torch.device(self.target.kind)
        # Of a GPU of which only the memory is known, nothing is refused.
        of_table = self.gpu is not None and self.gpu.capability != (0, 0)
        known = self.target.kind == "cuda" and (self.is_here or of_table)
        capability = self.target.capability if known else None
        return Hardware(device, self.name, self.memory_bytes, self.precision == "bf16", capability)


def find_machine(
    gpu: str | None = None, memory_bytes: int | None = None, count: int = 1
) -> Machine:
    """The machine that is meant.

    Args:
        gpu: a GPU's name; None is this machine's GPU or, without one, its CPU.
        memory_bytes: of each GPU, in place of what the table says; without `gpu`, of some GPU whose
            rates are not known.
        count: how many GPUs.

    Raises:
        ConfigError: there is no such GPU (names the nearest), or the numbers make no sense.
    """
    if count < 1:
        raise ConfigError(f"--gpus is {count}: at least 1 is needed")
    if memory_bytes is not None and memory_bytes < 2**20:
        raise ConfigError(f"--gpu-memory is {memory_bytes} bytes: say for instance 24GiB")
    if gpu is not None:
        return _known(find_gpu(gpu, memory_bytes), memory_bytes, count)
    if memory_bytes is not None:
        target = cuda_target("a GPU", (8, 0))
        name = f"a GPU with {memory_bytes / 2**30:.3g} GiB"
        return _gpu_machine(name, count, memory_bytes, target, None, "bf16")
    found = find_hardware()
    if found.device.type == "cuda":
        return _this_gpu(found, count)
    if count > 1:
        raise ConfigError(f"--gpus {count} of which kind? Add --gpu NAME, such as 'RTX 4090'")
    usable = int(_CPU_SHARE * free_memory_bytes(found.device))
    precision = "bf16" if found.bf16 and bf16_is_faster(found.device) else "fp32"
    return Machine(
        found.name, 1, found.memory_bytes, usable, this_cpu(), None, precision, is_here=True
    )


def parse_bytes(text: str) -> int:
    """ "24GiB", "24 GB", "24000 MiB" -> bytes.

    Raises:
        ConfigError: it is no size.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", text)
    unit = match[2].lower() if match else None
    if match is None or unit not in _UNITS:
        raise ConfigError(f"'{text}' is no size of memory: write for instance 24GiB or 24GB")
    return int(float(match[1]) * _UNITS[unit])


def _known(gpu: GPU, memory_bytes: int | None, count: int) -> Machine:
    capability = (8, 0) if gpu.capability == (0, 0) else gpu.capability
    target = cuda_target(gpu.name, capability, _context_bytes(gpu))
    precision = "bf16" if gpu.bf16 else "fp16" if gpu.fp16 > 2 * gpu.fp32 else "fp32"
    memory = memory_bytes or gpu.memory_bytes
    return _gpu_machine(gpu.name, count, memory, target, gpu, precision)


def _context_bytes(gpu: GPU) -> int | None:
    """Memory of a process beside torch's allocator, where that was measured on this kind of GPU."""
    found = measured_gpu(gpu)
    return None if found is None else found.context_bytes


def _this_gpu(found: Hardware, count: int) -> Machine:
    gpu: GPU | None = None
    with contextlib.suppress(ConfigError):
        gpu = find_gpu(found.name, found.memory_bytes)
    capability = torch.cuda.get_device_capability(found.device)
    target = cuda_target(found.name, capability, None if gpu is None else _context_bytes(gpu))
    precision = "bf16" if found.bf16 else "fp16" if capability >= (7, 0) else "fp32"
    machine = _gpu_machine(found.name, count, found.memory_bytes, target, gpu, precision)
    return Machine(**{**vars(machine), "is_here": True})


def _gpu_machine(
    name: str, count: int, memory: int, target: Target, gpu: GPU | None, precision: str
) -> Machine:
    usable = int((_GPU_SHARE if gpu is None else gpu.usable_share) * memory)
    return Machine(name, count, memory, usable, target, gpu, precision, is_here=False)

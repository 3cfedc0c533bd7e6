"""The machine that `firstlight bench gpu` measures: facts that decide the rows and stand on pages.

    python -m firstlight.bench.gpu_machine REQUEST

REQUEST is {"dry": whether the CPU is to be described}. A process of its own looks at the GPU: one
that has done so holds some of its memory until it ends.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import psutil
import torch

from firstlight.bench.process import answer
from firstlight.errors import ConfigError
from firstlight.hardware.device import find_hardware
from firstlight.hardware.gpus import GPU, find_gpu

#: Packages whose versions matter for figures.
_PACKAGES = (
    *("triton", "transformers", "accelerate", "peft", "bitsandbytes", "torchao"),
    *("tokenizers", "safetensors", "nvidia-ml-py"),
)


@dataclass(frozen=True)
class BenchMachine:
    """Facts of a machine, as JSON values.

    Attributes:
        device: "cuda", or "cpu" of a dry run.
        dry: tiny models on the CPU: figures without meaning.
        name: the GPU's, by its driver; the CPU's of a dry run.
        memory_bytes: memory of the device.
        bf16: True if the device multiplies bf16 in hardware.
        capability: CUDA's compute capability; (0, 0) of a CPU.
        multiprocessors: number of the GPU's multiprocessors; 0 of a CPU.
        driver: the GPU driver's version; "" where it is not known.
        cuda: version of CUDA that torch was built with; "" without.
        torch: its version.
        python: its version.
        packages: versions of installed packages by name; what is absent is not installed.
        cpu: the CPU's name.
        cpus: cores that this process may use.
        cpu_memory_bytes: memory of the machine.
    """

    device: str
    dry: bool
    name: str
    memory_bytes: int
    bf16: bool
    capability: tuple[int, int] = (0, 0)
    multiprocessors: int = 0
    driver: str = ""
    cuda: str = ""
    torch: str = ""
    python: str = ""
    packages: Mapping[str, str] = field(default_factory=dict)
    cpu: str = ""
    cpus: int = 1
    cpu_memory_bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        """The facts as JSON values."""
        return asdict(self) | {"capability": list(self.capability)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> BenchMachine:
        """The inverse of `to_json`."""
        first, second = values["capability"]
        return cls(**{**values, "capability": (first, second)})

    @property
    def gpu(self) -> GPU | None:
        """The GPU's data sheet; None where the table doesn't have it, and of a CPU."""
        if self.device != "cuda":
            return None
        with contextlib.suppress(ConfigError):
            return find_gpu(self.name, self.memory_bytes)
        return None

    def lacks(self, *packages: str) -> str:
        """A reason to skip a row that needs packages: those that are missing; "" if none is."""
        missing = [name for name in packages if name not in self.packages]
        return f"{' and '.join(missing)} not installed" if missing else ""


def find_machine(request: Mapping[str, Any]) -> dict[str, Any]:
    """Look at the machine.

    Returns:
        `BenchMachine.to_json`.

    Raises:
        ConfigError: there is no CUDA GPU, and the run is not dry.
    """
    dry = bool(request["dry"])
    if not dry and not torch.cuda.is_available():
        raise ConfigError(
            "bench gpu measures a CUDA GPU, and torch sees none on this machine: --dry runs every "
            "part on tiny models on the CPU"
        )
    hardware, cpu = find_hardware("cpu" if dry else "cuda"), find_hardware("cpu")
    on_gpu = hardware.device.type == "cuda"
    properties = torch.cuda.get_device_properties(0) if on_gpu else None
    return BenchMachine(
        device=hardware.device.type,
        dry=dry,
        name=hardware.name,
        memory_bytes=hardware.memory_bytes,
        bf16=hardware.bf16,
        capability=hardware.capability or (0, 0),
        multiprocessors=properties.multi_processor_count if properties else 0,
        driver=_driver_version() if on_gpu else "",
        cuda=torch.version.cuda or "",
        torch=str(torch.__version__),
        python=platform.python_version(),
        packages=_packages(),
        cpu=cpu.name,
        cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1,
        cpu_memory_bytes=psutil.virtual_memory().total,
    ).to_json()


def _packages() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _driver_version() -> str:
    """By NVML, or by nvidia-smi where nvidia-ml-py is not installed."""
    try:
        pynvml: Any = importlib.import_module("pynvml")
        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetDriverVersion()
        return version.decode() if isinstance(version, bytes) else str(version)
    except Exception:  # noqa: BLE001  (a version that is not known stops nothing)
        pass
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        said = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
        return said.stdout.splitlines()[0].strip() if said.stdout.strip() else ""
    return ""


if __name__ == "__main__":
    answer(lambda request: find_machine(request), sys.argv[1])

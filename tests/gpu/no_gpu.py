"""torch's answers for a simulated CUDA GPU, and a library that autograd accepts as one."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from firstlight.generation.few_rows import _cache_folder
from firstlight.hardware.device import Hardware


def _no_gpu() -> ctypes.CDLL | None:
    """Return the library of `no_gpu.cpp`, or None if these tests do not run."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if os.environ.get("FIRSTLIGHT_TEST_DEVICE") != "cpu" or compiler is None:
        return None
    if torch.version.cuda is not None:
        return None
    source = Path(__file__).with_name("no_gpu.cpp")
    found = hashlib.sha256(f"{torch.__version__} {torch.__file__}".encode() + source.read_bytes())
    library = _cache_folder() / f"no-gpu-{found.hexdigest()[:16]}.so"
    if not library.exists():
        torch_folder = Path(torch.__file__).parent
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            built = Path(folder) / library.name
            command = [compiler, "-std=c++20", "-shared", "-fPIC", f"-I{torch_folder}/include"]
            command += [str(source), "-o", str(built), f"-L{torch_folder}/lib", "-lc10"]
            subprocess.run([*command, "-ltorch_cpu"], check=True)
            built.replace(library)
    return ctypes.CDLL(str(library))


# Autograd counts the devices once, before the first backward pass of the process.
LIBRARY = _no_gpu()

needs_no_gpu = pytest.mark.skipif(
    LIBRARY is None,
    reason="fake CUDA tensors: with DEVICE=cpu, torch's build for CPUs and a C++ compiler",
)

#: An H100 as described by torch.
H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    total_memory=80 * 2**30,
    multi_processor_count=132,
    warp_size=32,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    gcnArchName="",
    uuid="GPU-0",
)


def hardware(index: int = 0) -> Hardware:
    """Return the fake GPU with an index."""
    device = torch.device("cuda", index)
    return Hardware(device, H100.name, H100.total_memory, bf16=True, capability=(9, 0))


@dataclass
class Asked:
    """Calls of `torch.cuda`.

    Attributes:
        calls: (function, arguments) in their order.
        current: index of the current device.
        states: random state of each device.
    """

    calls: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    current: int = 0
    states: list[Tensor] = field(default_factory=list)

    def names(self) -> list[str]:
        """Return the functions, in the order of their calls."""
        return [name for name, _ in self.calls]


@contextlib.contextmanager
def torch_cuda(devices: int = 1, capability: tuple[int, int] = (9, 0)) -> Iterator[Asked]:
    """Context manager in which `torch.cuda` simulates this many H100s that do nothing, with another
    compute capability if one is given.
    """
    gpu = SimpleNamespace(**{**vars(H100), "major": capability[0], "minor": capability[1]})
    asked = Asked(states=[torch.full((16,), i, dtype=torch.uint8) for i in range(devices)])

    def note(name: str, result: Any = None) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            asked.calls.append((name, (*args, *kwargs.values())))
            return result

        return called

    def index_of(device: Any = None) -> int:
        if device is None or device == "cuda":
            return asked.current
        if isinstance(device, int):
            return asked.current if device < 0 else device
        index = torch.device(device).index
        return asked.current if index is None else index

    def set_device(device: Any) -> None:
        asked.calls.append(("set_device", (device,)))
        asked.current = index_of(device)

    def exchange(index: int) -> int:
        before = asked.current
        if index >= 0:
            asked.current = index
        return before

    def set_state(state: Tensor, device: Any = "cuda") -> None:
        asked.calls.append(("set_rng_state", (state, device)))
        asked.states[index_of(device)] = state.clone()

    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "device_count": lambda: devices,
        "current_device": lambda: asked.current,
        "set_device": set_device,
        "_exchange_device": exchange,
        # A different function, because torch's compiler has a rule for each of the two.
        "_maybe_exchange_device": lambda index: exchange(index),
        "get_device_capability": lambda device=None: capability,
        "get_device_properties": lambda device=None: gpu,
        "get_device_name": lambda device=None: H100.name,
        "is_bf16_supported": lambda including_emulation=True: (
            including_emulation or capability >= (8, 0)
        ),
        "synchronize": note("synchronize"),
        "empty_cache": note("empty_cache"),
        "reset_peak_memory_stats": note("reset_peak_memory_stats"),
        "memory_allocated": note("memory_allocated", 1000),
        "max_memory_allocated": note("max_memory_allocated", 5000),
        "mem_get_info": note("mem_get_info", (70 * 2**30, 80 * 2**30)),
        "get_rng_state": lambda device="cuda": asked.states[index_of(device)].clone(),
        "get_rng_state_all": lambda: [state.clone() for state in asked.states],
        "set_rng_state": set_state,
    }
    with pytest.MonkeyPatch.context() as patch:
        # Otherwise torch would take the device for a usable one.
        patch.setattr(
            FakeTensorMode, "avoid_device_init", property(lambda _: True, lambda *_: None)
        )
        for name, answer in answers.items():
            patch.setattr(torch.cuda, name, answer)
        patch.setattr(torch.version, "cuda", "13.0")
        yield asked

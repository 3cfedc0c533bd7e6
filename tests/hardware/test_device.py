from __future__ import annotations

import subprocess
import sys
import warnings
from types import SimpleNamespace

import psutil
import pytest
import torch

from firstlight.errors import ConfigError
from firstlight.hardware.device import (
    GpuMonitor,
    find_hardware,
    measured_matmul_flops,
    peak_flops,
    peak_memory_bytes,
    synchronize,
)

CUDA = torch.device("cuda")


def test_gpu_monitor_reads_allocator_always_and_driver_rarely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[torch.device] = []

    def used(device: torch.device) -> int:
        asked.append(device)
        return 3 << 30

    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 2 << 30)
    monkeypatch.setattr(torch.cuda, "device_memory_used", used)
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 97)
    monitor = GpuMonitor(CUDA)
    expected = {
        "reserved_bytes": 2 << 30,
        "device_used_bytes": 3 << 30,
        "gpu_utilization": 0.97,
    }
    assert [monitor.read() for _ in range(3)] == [expected] * 3
    assert asked == [CUDA]


def test_gpu_monitor_without_nvml_reads_only_allocator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(device: torch.device) -> int:
        raise ModuleNotFoundError("pynvml")

    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 5)
    monkeypatch.setattr(torch.cuda, "device_memory_used", missing)
    assert GpuMonitor(CUDA).read() == {"reserved_bytes": 5}
    assert GpuMonitor(torch.device("cpu")).read() == {}


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with one CUDA GPU, as torch describes it."""
    properties = SimpleNamespace(name="NVIDIA Test", total_memory=80 << 30, major=8, minor=6)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: properties)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation: True)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: False)


def test_find_hardware_describes_cpu() -> None:
    cpu = find_hardware("cpu")
    assert cpu.device == torch.device("cpu")
    assert cpu.memory_bytes == psutil.virtual_memory().total
    assert cpu.name


@pytest.mark.parametrize(
    "flags, bf16",
    [
        ("flags\t\t: fpu sse avx512_bf16 amx_tile", True),
        ("flags\t\t: fpu amx_bf16", True),
        ("Features\t: fp asimd bf16", True),
        ("flags\t\t: fpu avx512f avx2", False),
        ("", False),
    ],
)
def test_find_hardware_reads_bf16_support_from_cpu_flags(
    flags: str, bf16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"processor\t: 0\nmodel name\t: Some CPU @ 3 GHz\n{flags}\n"
    monkeypatch.setattr("firstlight.hardware.device._cpu_info", lambda: text)
    cpu = find_hardware("cpu")
    assert (cpu.name, cpu.bf16) == ("Some CPU @ 3 GHz", bf16)


@pytest.mark.usefixtures("no_gpu")
def test_find_hardware_auto_without_gpu_is_cpu() -> None:
    assert find_hardware().device.type == "cpu"


@pytest.mark.usefixtures("one_gpu")
def test_find_hardware_auto_with_gpu_is_gpu() -> None:
    found = find_hardware()
    assert found.device == CUDA
    assert (found.name, found.memory_bytes, found.bf16) == ("NVIDIA Test", 80 << 30, True)
    assert found.capability == (8, 6)
    assert find_hardware("cuda:0").device == torch.device("cuda:0")


@pytest.mark.parametrize(
    ("capability", "arch_list", "index"),
    [
        ((8, 6), "sm_75 sm_80 sm_90", None),  # a later minor version
        ((9, 0), "sm_80 sm_90a", None),
        ((12, 0), "sm_80 compute_90", None),  # PTX
        ((7, 5), "sm_70", None),
        ((9, 4), "gfx942", None),  # ROCm
        ((9, 0), "", None),
        ((6, 1), "sm_75 sm_80 sm_90 sm_100 compute_120", "cu126"),
        ((7, 0), "sm_75 sm_80", "cu126"),
        ((7, 0), "sm_72 sm_80", "cu126"),  # an earlier minor version
        ((12, 0), "sm_80 sm_90", "cu130"),
        ((9, 1), "sm_80 sm_90a", "cu130"),
        ((12, 0), "sm_80 compute_90a", "cu130"),
    ],
)
@pytest.mark.usefixtures("one_gpu")
def test_find_hardware_gpu_without_torch_kernels_raises(
    capability: tuple[int, int],
    arch_list: str,
    index: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = SimpleNamespace(name="Test", total_memory=1, major=capability[0], minor=capability[1])

    def properties(_: torch.device) -> SimpleNamespace:
        # up to torch 2.12, and since torch 2.13
        for kind in ("cuda capability", "compute capability (CC)"):
            name = f"Found GPU0 Test which is of {kind} 6.1."
            warnings.warn(f"\n    {name}\n    Minimum", stacklevel=1)
        return gpu

    monkeypatch.setattr("torch.cuda.get_device_properties", properties)
    monkeypatch.setattr("torch.cuda.get_arch_list", arch_list.split)
    if index is None:
        assert find_hardware().capability == capability
        return
    with pytest.raises(ConfigError, match=f"not built for Test .*whl/{index}, or set") as raised:
        find_hardware()
    assert "\n" not in str(raised.value)


@pytest.mark.usefixtures("one_gpu")
def test_find_hardware_gpu_index_beyond_last_raises() -> None:
    with pytest.raises(ConfigError, match=r"device 'cuda:1' is not present on this machine"):
        find_hardware("cuda:1")


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("device", ["cuda", "cuda:0", "mps"])
def test_find_hardware_missing_device_raises(device: str) -> None:
    with pytest.raises(ConfigError, match=f"'{device}' is not present on this machine"):
        find_hardware(device)


@pytest.mark.parametrize("device", ["", "gpu", "CPU", "cuda:x", "cuda:-1", "cpu cuda"])
def test_find_hardware_unknown_device_raises_and_lists_known(device: str) -> None:
    with pytest.raises(ConfigError, match=f"'{device}' is unknown: use auto, cpu, cuda or mps"):
        find_hardware(device)


@pytest.mark.parametrize("device", ["meta", "xpu", "xla"])
def test_find_hardware_device_unsupported_by_firstlight_raises(device: str) -> None:
    with pytest.raises(ConfigError, match=f"'{device}' is not supported: use auto"):
        find_hardware(device)


def pretend(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Make torch report a GPU with this name."""
    found = SimpleNamespace(name=name, total_memory=85_000_000_000)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: found)


@pytest.mark.parametrize(
    "name, tera_flops",
    [
        ("NVIDIA A100-PCIE-40GB", 312),
        ("NVIDIA A10G", 70),
        ("NVIDIA L40", 181),
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("NVIDIA A10", 125),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 3090", 71),
    ],
)
def test_peak_flops_known_gpu_matches_data_sheet(
    name: str, tera_flops: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, name)
    assert peak_flops.__wrapped__(CUDA, torch.bfloat16) == tera_flops * 1e12


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA RTX A1000",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 3080 Ti Laptop GPU",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
        "Tesla T4",
    ],
)
def test_peak_flops_similar_gpu_name_is_measured(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, name)
    monkeypatch.setattr(
        "firstlight.hardware.device.measured_matmul_flops", lambda device, dtype: 7.0
    )
    assert peak_flops.__wrapped__(CUDA, torch.bfloat16) == 7.0


def test_peak_flops_other_dtypes_than_bf16_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "NVIDIA H200")
    monkeypatch.setattr(
        "firstlight.hardware.device.measured_matmul_flops", lambda device, dtype: 7.0
    )
    assert peak_flops.__wrapped__(CUDA, torch.float32) == 7.0


def test_measured_matmul_flops_cpu_is_plausible() -> None:
    # At least a million per second on anything that runs Python, and less than a thousand GPUs.
    assert 1e6 < measured_matmul_flops(torch.device("cpu"), torch.float32) < 1e18


def test_peak_memory_is_in_bytes_and_never_decreases() -> None:
    cpu = torch.device("cpu")
    before = peak_memory_bytes(cpu)
    block = bytearray(32 << 20)
    block[:: 1 << 12] = bytes(len(block) >> 12)
    after = peak_memory_bytes(cpu)
    assert after >= before
    assert sys.getsizeof(block) < after < psutil.virtual_memory().total * 2


def test_synchronize_on_cpu_does_nothing() -> None:
    synchronize(torch.device("cpu"))


def test_free_memory_bytes_respects_address_space_limit() -> None:
    """Batch systems and `ulimit -v` set such a limit."""
    script = """
import resource, torch, psutil
from firstlight.hardware.device import free_memory_bytes
free = free_memory_bytes(torch.device("cpu"))
used = psutil.Process().memory_info().vms
resource.setrlimit(resource.RLIMIT_AS, (used + 2**28,) * 2)
print(free, free_memory_bytes(torch.device("cpu")))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    before, limited = map(int, done.stdout.split())
    assert before > 2**28
    assert 2**27 < limited <= 2**28

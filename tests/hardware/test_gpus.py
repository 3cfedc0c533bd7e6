"""The table of GPUs and the names that select an entry."""

from __future__ import annotations

import pytest

from firstlight.errors import ConfigError
from firstlight.hardware.gpus import GPUS, find_gpu
from firstlight.planner.plan.machine import find_machine


@pytest.mark.parametrize("name", GPUS)
def test_find_gpu_finds_each_by_name(name: str) -> None:
    assert find_gpu(name).name == name
    assert find_gpu(f"nvidia {name.lower()}").name == name


@pytest.mark.parametrize(
    "written, name",
    [
        ("4090", "RTX 4090"),
        ("rtx4090", "RTX 4090"),
        ("RTX 4090 24GB", "RTX 4090"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "RTX 4070 Ti SUPER"),
        ("RTX 4070Ti", "RTX 4070 Ti"),
        ("RTX 3060", "RTX 3060 12GB"),
        ("a100-80gb", "A100 80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA A100-PCIE-40GB", "A100 40GB PCIe"),
        ("Tesla V100-SXM2-16GB", "V100 16GB"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("AMD Instinct MI300X", "MI300X"),
        ("Tesla K80", "K80"),
        ("Tesla P100-PCIE-16GB", "P100 16GB PCIe"),
        ("Tesla P100-SXM2-16GB", "P100 16GB"),
        ("Tesla T4", "T4"),
        ("Apple M2 Max 96GB", "M2 Max 96GB"),
        ("m1max 64gb", "M1 Max 64GB"),
        ("Apple M1 Pro 16 GB", "M1 Pro 16GB"),
    ],
)
def test_find_gpu_accepts_driver_and_common_names(written: str, name: str) -> None:
    assert find_gpu(written).name == name


def test_find_gpu_with_several_memory_sizes_asks_for_one() -> None:
    with pytest.raises(ConfigError, match="several memory sizes: use 'A100 40GB' or 'A100 80GB"):
        find_gpu("A100")
    assert find_gpu("A100", 42_300_000_000).name == "A100 40GB"
    assert find_gpu("A100", 85_000_000_000).name == "A100 80GB"


@pytest.mark.parametrize(
    "written, nearest",
    [
        ("RTX 4095", "'RTX 4090'"),
        ("H10", "'H100'"),
        ("RTX 4090 Laptop GPU", "'RTX 4090'"),
        ("RTX 4080 48GB", "'RTX 4080'"),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", "'H100'"),
    ],
)
def test_find_gpu_misspelt_name_lists_nearest(written: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match="is not in the table: the nearest are ") as error:
        find_gpu(written)
    assert nearest in str(error.value)
    assert "--gpu-memory" in str(error.value)


def test_find_gpu_unknown_name_lists_all() -> None:
    with pytest.raises(ConfigError, match=r"use one of K80, P100 12GB PCIe, .*MI300X"):
        find_gpu("xyzzy")


def test_gpu_table_rates_are_physically_possible() -> None:
    for gpu in GPUS.values():
        # Kepler does not have fp16 units; Apple GPUs compute fp16 at the fp32 rate.
        assert gpu.fp32 < gpu.fp16 or gpu.name == "K80" or gpu.is_apple
        assert gpu.bf16 in (0, gpu.fp16)
        assert (gpu.bf16 > 0) == (gpu.capability >= (8, 0) or gpu.name == "MI300X")
        # Operations per byte of memory bandwidth: at least 10, at most 1,000.
        assert 10 < gpu.peak_flops("fp16") / gpu.bandwidth < 1000
        assert gpu.peak_flops("bf16") == (gpu.bf16 or gpu.fp32)
        assert gpu.peak_flops("tf32") >= gpu.peak_flops("fp32") == gpu.fp32


def test_find_gpu_knows_apple_m1_to_m4_with_their_memory_sizes() -> None:
    names = [gpu.name for gpu in GPUS.values() if gpu.is_apple]
    chips = {name.rpartition(" ")[0] for name in names}
    kinds = ("", " Pro", " Max", " Ultra")
    # There is no M4 Ultra.
    assert chips == {f"M{n}{k}" for n in (1, 2, 3, 4) for k in kinds} - {"M4 Ultra"}
    assert {name for name in names if name.startswith("M4 ")} == {
        *("M4 16GB", "M4 24GB", "M4 32GB", "M4 Pro 24GB", "M4 Pro 48GB", "M4 Pro 64GB"),
        *("M4 Max 36GB", "M4 Max 48GB", "M4 Max 64GB", "M4 Max 128GB"),
    }
    with pytest.raises(ConfigError, match="use 'M2 8GB' or 'M2 16GB' or 'M2 24GB'"):
        find_gpu("Apple M2")
    assert find_gpu("Apple M2", 16 * 2**30).name == "M2 16GB"
    assert find_gpu("M3 Max 36GB").bandwidth == 300e9
    assert find_gpu("M3 Max 128GB").bandwidth == 400e9


@pytest.mark.parametrize(
    ("name", "precision", "compiles", "note"),
    [
        ("K80", "fp32", False, "compute capability 3.7, and torch's builds for CUDA 12"),
        ("P100 16GB", "fp32", False, ""),
        ("T4", "fp16", True, ""),
        ("M1 Max 32GB", "fp32", False, "not compared with measurements on Apple GPUs"),
        ("RTX 4090", "bf16", True, ""),
    ],
)
def test_find_machine_gpu_without_features_gets_fallbacks_and_note(
    name: str, precision: str, compiles: bool, note: str
) -> None:
    machine = find_machine(name)
    assert (machine.precision, machine.compiler is not None) == (precision, compiles)
    assert note in "".join(machine.notes)
    assert bool(machine.notes) == bool(note)


def test_find_machine_apple_gpu_uses_part_of_memory() -> None:
    assert find_machine("M1 8GB").usable_bytes == int(0.66 * 8 * 2**30)
    assert find_machine("M2 Ultra 192GB").usable_bytes == 144 * 2**30

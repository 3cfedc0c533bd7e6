"""The table of GPUs, and the names by which they are found."""

from __future__ import annotations

import pytest

from firstlight.errors import ConfigError
from firstlight.gpus import GPUS, find_gpu


@pytest.mark.parametrize("name", GPUS)
def test_each_is_found_by_its_own_name(name: str) -> None:
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
    ],
)
def test_names_may_be_written_as_drivers_and_people_do(written: str, name: str) -> None:
    assert find_gpu(written).name == name


def test_what_is_sold_with_several_memories_is_asked_about() -> None:
    with pytest.raises(ConfigError, match="several sizes of memory: say 'A100 40GB' or 'A100 80GB"):
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
def test_a_wrong_name_lists_the_nearest(written: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match="is not in the table: nearest are ") as error:
        find_gpu(written)
    assert nearest in str(error.value)
    assert "--gpu-memory" in str(error.value)


def test_a_name_like_none_lists_all() -> None:
    with pytest.raises(ConfigError, match=r"use one of P100 16GB, .*MI300X"):
        find_gpu("xyzzy")


def test_rates_are_physically_possible() -> None:
    for gpu in GPUS.values():
        assert gpu.fp32 < gpu.fp16
        assert gpu.bf16 in (0, gpu.fp16)
        # Products of data from memory: at least 10 and at most 1,000 for each byte.
        assert 10 < gpu.fp16 / gpu.bandwidth < 1000
        assert gpu.peak_flops("bf16") == (gpu.bf16 or gpu.fp32)
        assert gpu.peak_flops("tf32") >= gpu.peak_flops("fp32") == gpu.fp32

"""The device check on a device that computes correctly."""

from __future__ import annotations

from pathlib import Path

import pytest

from firstlight.generation import few_rows
from firstlight.hardware.device import Hardware
from firstlight.training import device_check
from firstlight.training.device_check import CheckedKeys, check_device

from .fake_cuda import fake_cuda
from .no_gpu import hardware as fake_hardware
from .no_gpu import needs_no_gpu


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_device_check_passes_without_naming_an_operation(
    hardware: Hardware, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_rows.has_kernels()  # compiled kernels are in the user's cache
    monkeypatch.setenv("FIRSTLIGHT_CACHE", str(tmp_path))
    keys = CheckedKeys(precision)
    assert check_device(hardware, keys)["problem"] is None
    assert device_check._wrong_operation(hardware, keys).startswith("not in a single operation")


@needs_no_gpu
@pytest.mark.parametrize("attention", ["sdpa", "blockwise", "plain"])
def test_device_check_runs_on_gpu(attention: str) -> None:
    for number in range(2):
        device_check._train_exactly(number)
    with fake_cuda() as (cuda, _):
        for watching in (None, device_check._Comparison(0.1)):
            device_check._error(fake_hardware(), CheckedKeys("bf16", attention), watching)
        assert cuda.named("_fused_adamw_")

"""The switches of `run.deterministic`, tested without a GPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from plain_recipe import plain_recipe

from firstlight.errors import ConfigError
from firstlight.hardware.device import Hardware, find_hardware
from firstlight.methods import EfficiencyConfig, require_same_bits, same_bits
from firstlight.recipe.conflicts import require_combination

CPU = find_hardware("cpu")
GPU = Hardware(torch.device("cuda"), "a GPU", 2**36, bf16=True, capability=(9, 0))


def test_determinism_on_gpu_enables_deterministic_algorithms_if_requested() -> None:
    config = EfficiencyConfig(compile=False)
    for deterministic in (True, False):
        with same_bits(config, GPU, deterministic=deterministic):
            assert torch.are_deterministic_algorithms_enabled() == deterministic
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert not torch.are_deterministic_algorithms_enabled()
    with same_bits(EfficiencyConfig(compile=True), GPU):
        assert not torch.are_deterministic_algorithms_enabled()


@pytest.fixture
def product(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], None]:
    """Stand in for the trial matrix product on the GPU."""

    class Ones:
        def __init__(self, compute: Callable[[], None]) -> None:
            self._compute = compute

        def __matmul__(self, other: object) -> None:
            assert torch.are_deterministic_algorithms_enabled()
            self._compute()

    def replace(compute: Callable[[], None]) -> None:
        monkeypatch.setattr(
            "firstlight.methods.compilation.torch.ones", lambda *_, **__: Ones(compute)
        )

    return replace


def test_determinism_sets_cublas_workspace_or_raises_on_conflict(
    monkeypatch: pytest.MonkeyPatch, product: Callable[[Callable[[], None]], None]
) -> None:
    monkeypatch.setattr(os, "environ", {})
    seen: list[str | None] = []
    product(lambda: seen.append(os.environ.get("CUBLAS_WORKSPACE_CONFIG")))
    require_same_bits(CPU)
    assert os.environ == {}
    require_same_bits(GPU)
    assert seen == [":4096:8"]
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
    require_same_bits(GPU)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":0:0"
    with pytest.raises(ConfigError, match="it is ':0:0': unset it"):
        require_same_bits(GPU)


def test_determinism_after_first_computation_raises_with_advice(
    monkeypatch: pytest.MonkeyPatch, product: Callable[[Callable[[], None]], None]
) -> None:
    monkeypatch.setattr(os, "environ", {})

    def refuse() -> None:
        raise RuntimeError("not deterministic ... set CUBLAS_WORKSPACE_CONFIG=:4096:8 ...")

    product(refuse)
    with pytest.raises(ConfigError, match="set CUBLAS_WORKSPACE_CONFIG=:4096:8 in its environment"):
        require_same_bits(GPU)
    assert not torch.are_deterministic_algorithms_enabled()


def test_determinism_with_cudnn_attention_raises_config_error() -> None:
    values: dict[str, Any] = {
        "run": {"deterministic": True},
        "model": {"model_type": "llama", "vocab_size": 8},
        "data": {"dir": "none", "seq_len": 8},
        "efficiency": {"attention": "cudnn", "precision": "bf16"},
    }
    with pytest.raises(ConfigError, match=r"cudnn is not deterministic: set it to flash"):
        require_combination(plain_recipe(values), GPU)
    require_combination(plain_recipe(values | {"run": {}}), GPU)
    require_combination(
        plain_recipe(values | {"efficiency": {"attention": "flash", "precision": "bf16"}}), GPU
    )

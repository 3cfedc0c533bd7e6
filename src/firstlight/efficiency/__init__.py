"""Methods that change how a step is computed, not what: each one switch, applied to a plain
model from outside."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable

import torch
from torch import Tensor, nn

from firstlight.efficiency.config import EfficiencyConfig
from firstlight.errors import ConfigError
from firstlight.hardware import Hardware

__all__ = [
    "EfficiencyConfig",
    "LossFunction",
    "autocast",
    "compiled",
    "loss_function",
    "resolve_precision",
]

LossFunction = Callable[[Tensor, Tensor], Tensor]


def resolve_precision(config: EfficiencyConfig, hardware: Hardware) -> torch.dtype:
    """The dtype of matrix products."""
    if config.precision == "auto":
        return torch.bfloat16 if hardware.bf16 else torch.float32
    return torch.bfloat16 if config.precision == "bf16" else torch.float32


def autocast(device: torch.device, dtype: torch.dtype) -> contextlib.AbstractContextManager[object]:
    """A context in which matrix products run in `dtype`; does nothing for fp32."""
    if dtype == torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=dtype)


def loss_function(model: nn.Module, config: EfficiencyConfig, hardware: Hardware) -> LossFunction:
    """The function (input_ids, labels) -> summed loss that training calls.

    Raises:
        ConfigError: compilation is asked for and can't work here.
    """
    dtype = resolve_precision(config, hardware)
    forward = compiled(model, hardware) if config.compile else model

    def loss_sum(input_ids: Tensor, labels: Tensor) -> Tensor:
        with autocast(hardware.device, dtype):
            return forward(input_ids, labels)

    return loss_sum


def compiled(model: nn.Module, hardware: Hardware) -> Callable[..., Tensor]:
    """The model's forward pass through torch.compile; the model itself stays as it is.

    Raises:
        ConfigError: there is no C++ compiler, which a CPU needs.
    """
    if hardware.device.type == "cpu" and not any(map(shutil.which, ("c++", "g++", "clang++"))):
        raise ConfigError(
            "efficiency.compile needs a C++ compiler on a CPU: install g++ or clang, "
            "or set efficiency.compile to false"
        )
    return torch.compile(model, dynamic=False)

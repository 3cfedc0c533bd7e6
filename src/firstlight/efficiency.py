"""Methods that change how a step is computed, not what: each one switch, applied to a plain
model from outside."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from firstlight.errors import ConfigError
from firstlight.hardware import Hardware

LossFunction = Callable[[Tensor, Tensor], Tensor]


class EfficiencyConfig(BaseModel):
    """The `efficiency` section of a recipe.

    precision: "auto" takes bf16 where the hardware multiplies it, else fp32. "bf16" is
        autocast: parameters, moments and the loss stay in fp32, matrix products run in bf16.
    vocab_multiple: the embedding and the head get rows up to a multiple of this (64 suits matrix
        units); 1 adds none. The rows beyond the vocabulary have no logits and are not exported.
    compile: torch.compile the training step's forward and backward pass. Costs seconds to a
        minute at the start; needs a C++ compiler on CPUs. Its code may sum in another order each
        time, so a resumed run equals the uninterrupted one to rounding, not to the last bit.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    precision: Literal["auto", "fp32", "bf16"] = "auto"
    vocab_multiple: int = Field(1, ge=1)
    compile: bool = False


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

"""Methods that change how a step is computed, not what: each one switch, applied to a plain
model from outside."""

from __future__ import annotations

from firstlight.efficiency.apply import LossFunction, apply_methods, loss_function, plain_loss
from firstlight.efficiency.attention import resolve_attention
from firstlight.efficiency.compilation import can_compile, require_same_bits, same_bits
from firstlight.efficiency.config import EfficiencyConfig
from firstlight.efficiency.memory import give_back_unused, keep_memory
from firstlight.efficiency.precision import (
    autocast,
    matmul_precision,
    resolve_precision,
)

__all__ = [
    "EfficiencyConfig",
    "LossFunction",
    "apply_methods",
    "autocast",
    "can_compile",
    "give_back_unused",
    "keep_memory",
    "loss_function",
    "matmul_precision",
    "plain_loss",
    "require_same_bits",
    "resolve_attention",
    "resolve_precision",
    "same_bits",
]

"""A torch optimizer together with the form of its state in a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

#: Shape and dtype of each tensor that a rule keeps of a parameter, by the tensor's name.
Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class Rule:
    """A torch optimizer, and how its state is written and read as plain tensors.

    Attributes:
        optimizer: updates its parameters.
        layout: what it keeps of a parameter once it has made a step.
        flatten: one parameter's state as plain tensors; they may share its memory.
        rebuild: one parameter's state from such tensors, which it copies.
    """

    optimizer: torch.optim.Optimizer
    layout: Callable[[Tensor], Layout]
    flatten: Callable[[Mapping[str, Any]], dict[str, Tensor]]
    rebuild: Callable[[nn.Parameter, Mapping[str, Tensor]], dict[str, Any]]

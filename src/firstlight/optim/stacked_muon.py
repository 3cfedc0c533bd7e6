"""Muon for stacks of matrices, such as the experts of a layer."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

#: Coefficients and steps of the Newton-Schulz iteration (Jordan et al. 2024), torch.optim.Muon's.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_STEPS = 5
_EPS = 1e-7


class StackedMuon(torch.optim.Optimizer):
    """torch.optim.Muon with `match_rms_adamw` for parameters [E, F, C], matrix by matrix.

    Args:
        parameters: each with three dimensions.
        learning_rate, momentum, weight_decay: Muon's.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        learning_rate: float,
        momentum: float,
        weight_decay: float,
    ) -> None:
        defaults = {"lr": learning_rate, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(parameters, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters that have a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        average = state["momentum_buffer"]
        average.lerp_(gradient, 1 - group["momentum"])
        direction = orthogonalised(gradient.lerp(average, group["momentum"]))
        scale = 0.2 * math.sqrt(max(parameter.shape[1:]))
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(direction, alpha=-group["lr"] * scale)


def orthogonalised(matrices_EFC: Tensor) -> Tensor:
    """Each matrix with its singular values brought near one, [E, F, C] in bf16.

    The quintic Newton-Schulz iteration of Jordan et al. 2024, all matrices at a time.
    """
    tall = matrices_EFC.shape[1] > matrices_EFC.shape[2]
    x = matrices_EFC.bfloat16()
    if tall:
        x = x.mT
    x = x / x.flatten(1).norm(dim=1).clamp(min=_EPS)[:, None, None]
    for _ in range(_STEPS):
        gram = x @ x.mT
        update = torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C)
        x = torch.baddbmm(x, update, x, beta=_A)
    return x.mT if tall else x

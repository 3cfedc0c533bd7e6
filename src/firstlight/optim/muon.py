"""Muon: torch's for matrices, and one for stacks of matrices, such as the experts of a layer.

Shape letters: E matrices of a stack, F rows, C columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from firstlight.optim.spec import ForeachOptimizer, OptimizerSpec, Parameters, momentum_layout

#: Coefficients and steps of the Newton-Schulz iteration (Jordan et al. 2024), torch.optim.Muon's.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_STEPS = 5
_EPS = 1e-7


class StackedMuon(ForeachOptimizer):
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
        defaults = {
            "lr": learning_rate,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "foreach": False,
        }
        super().__init__(parameters, defaults)

    def update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """See `ForeachOptimizer.update`."""
        for parameter in parameters:
            assert parameter.grad is not None
            self._update(parameter, parameter.grad, group)

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        average = state["momentum_buffer"]
        average.lerp_(gradient, 1 - group["momentum"])
        direction = orthogonalised(gradient.lerp(average, group["momentum"]))
        # AdamW's typical update has this root mean square, so one learning rate serves both (Liu et
        # al. 2025).
        scale = 0.2 * math.sqrt(max(parameter.shape[1:]))
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(direction, alpha=-group["lr"] * scale)


def orthogonalised(matrices_EFC: Tensor) -> Tensor:
    """Each matrix with its singular values brought near one, [E, F, C] in bf16.

    The quintic Newton-Schulz iteration of Jordan et al. 2024, all matrices at a time.
    """
    # The product of a matrix and its transpose is smallest with the short side first.
    tall = matrices_EFC.shape[1] > matrices_EFC.shape[2]
    x = matrices_EFC.bfloat16()
    if tall:
        x = x.mT
    # The iteration needs singular values of at most one, and the Frobenius norm bounds them.
    x = x / x.flatten(1).norm(dim=1).clamp(min=_EPS)[:, None, None]
    for _ in range(_STEPS):
        gram = x @ x.mT
        update = torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C)
        x = torch.baddbmm(x, update, x, beta=_A)
    return x.mT if tall else x


def _muon(parameters: Parameters, config: Any) -> list[torch.optim.Optimizer]:
    # torch's Muon knows matrices only, not stacks of them.
    matrices = [p for p in parameters.values() if p.dim() == 2]
    stacks = [p for p in parameters.values() if p.dim() == 3]
    rate = config.muon_learning_rate or config.learning_rate
    found: list[torch.optim.Optimizer] = []
    if matrices:
        found.append(
            torch.optim.Muon(
                matrices,
                lr=rate,
                momentum=config.muon_momentum,
                weight_decay=config.weight_decay,
                adjust_lr_fn="match_rms_adamw",
            )
        )
    if stacks:
        found.append(StackedMuon(stacks, rate, config.muon_momentum, config.weight_decay))
    return found


def _is_matrix_of_a_layer(name: str, parameter: Tensor) -> bool:
    """Whether a parameter is a matrix, or a stack of them, of a numbered layer
    (`model.layers.3...`, `h.3...`)."""
    return parameter.dim() in (2, 3) and any(part.isdigit() for part in name.split("."))


MUON = OptimizerSpec(_muon, momentum_layout, elementwise=False, takes=_is_matrix_of_a_layer)

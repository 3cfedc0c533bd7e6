"""Cautious weight decay (Chen et al. 2025, arXiv 2510.12402)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from firstlight.optim.dtensors import own_shard


def decay_cautiously(parameter: Tensor, direction: Tensor, amount: float) -> None:
    """Decay the numbers that the step moves towards zero as well, or not at all.

        x = x - amount x   where direction x >= 0

    Args:
        parameter: values before the step, changed in place.
        direction: tensor of the same shape with the signs of the update that the step subtracts.
        amount: learning rate times weight decay.
    """
    if amount:
        parameter.mul_(1 - amount * (direction * parameter >= 0))


def make_cautious(optimizer: torch.optim.AdamW) -> None:
    """Have torch's AdamW, of any implementation, decay by `decay_cautiously`.

    The decay comes before the step, as torch's own does, and needs the sign of the update only: the
    sign of the next first moment.
    """
    for group in optimizer.param_groups:
        group["cautious_weight_decay"], group["weight_decay"] = group["weight_decay"], 0.0
    # A hook, not a subclass: what watches steps then sees one step of AdamW.
    optimizer.register_step_pre_hook(_decay)


@torch.no_grad()
def _decay(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            direction = own_shard(parameter.grad, parameter)
            state = optimizer.state.get(parameter, {})
            # Before the first step the moment is zero, and the gradient's sign is the update's.
            if "exp_avg" in state:
                average = own_shard(state["exp_avg"], parameter)
                direction = average.lerp(direction, 1 - group["betas"][0])
            amount = group["lr"] * group["cautious_weight_decay"]
            decay_cautiously(own_shard(parameter, parameter), direction, amount)

"""Cautious weight decay (Chen et al. 2025, arXiv 2510.12402)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from firstlight.optim.dtensors import own_shard


def decay_cautiously(parameter: Tensor, direction: Tensor, amount: float) -> None:
    """Apply weight decay to the numbers that the update moves towards zero too, and to no others.

        x = x - amount x   where direction x >= 0

    Args:
        parameter: values before the step, changed in place.
        direction: tensor of the parameter's shape; its signs are those of the update, which the
            step subtracts from the parameter.
        amount: learning rate times weight decay.
    """
    if amount:
        parameter.mul_(1 - amount * (direction * parameter >= 0))


def make_cautious(optimizer: torch.optim.AdamW) -> None:
    """Replace the weight decay of torch's AdamW, of any implementation, by `decay_cautiously`.

    The decay is applied before the step, as torch's own is. It needs only the sign of the update,
    which is the sign of the first moment after this step's gradient.
    """
    for group in optimizer.param_groups:
        group["cautious_weight_decay"], group["weight_decay"] = group["weight_decay"], 0.0
    # A hook, not a subclass: code that observes steps then sees one step of torch's AdamW.
    optimizer.register_step_pre_hook(_decay)


@torch.no_grad()
def _decay(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            direction = own_shard(parameter.grad, parameter)
            state = optimizer.state.get(parameter, {})
            # Without a moment, in the first step, the update has the sign of the gradient.
            if "exp_avg" in state:
                average = own_shard(state["exp_avg"], parameter)
                direction = average.lerp(direction, 1 - group["betas"][0])
            amount = group["lr"] * group["cautious_weight_decay"]
            decay_cautiously(own_shard(parameter, parameter), direction, amount)

"""The Lion optimizer, which has one moment per parameter. It uses only the sign of the update, so
every value moves by the learning rate."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from firstlight.optim.dtensors import own_shard
from firstlight.optim.spec import (
    ForeachOptimizer,
    Groups,
    Layout,
    OptimizerSpec,
    decay_cautiously,
    factor_unless,
)


class Lion(ForeachOptimizer):
    """Lion (Chen et al. 2023, arXiv 2302.06675, algorithm 2).

        c = beta1 m + (1 - beta1) g
        x = x - lr (sign(c) + weight_decay x)
        m = beta2 m + (1 - beta2) g

    Args:
        groups: torch's parameter groups.
        lr: distance by which a step moves every value that has a gradient, not counting weight
            decay.
        betas: beta1, the weight of the moment in the update, and beta2, the decay rate of the
            moment.
        foreach: True to run each operation for all parameters of a group at once, which needs a
            temporary copy as large as the parameters. With False, small parameters on a GPU are
            updated several at a time, and all other parameters one by one.
        cautious: True to apply weight decay with `decay_cautiously`.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        lr: float,
        betas: Sequence[float],
        *,
        foreach: bool,
        cautious: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "weight_decay": 0.0,
            "cautious": cautious,
            "foreach": foreach,
        }
        super().__init__(groups, defaults)

    def update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """See `ForeachOptimizer.update`."""
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["exp_avg"] = torch.zeros_like(parameter)
        own = [own_shard(p, p) for p in parameters]
        moments = [own_shard(self.state[p]["exp_avg"], p) for p in parameters]
        gradients = [own_shard(p.grad, p) for p in parameters if p.grad is not None]
        skips = self.skips
        beta1, beta2 = group["betas"]
        directions = torch._foreach_lerp(moments, gradients, 1 - beta1)
        torch._foreach_sign_(directions)
        if group["cautious"]:
            for parameter, direction in zip(own, directions, strict=True):
                decay_cautiously(parameter, direction, group["lr"] * group["weight_decay"], skips)
        elif group["weight_decay"]:
            torch._foreach_mul_(own, factor_unless(skips, 1 - group["lr"] * group["weight_decay"]))
        if skips is not None:
            for direction in directions:
                direction.masked_fill_(skips, 0)
        torch._foreach_add_(own, directions, alpha=-group["lr"])
        # The moments are updated last, because the direction depends on the moment without the
        # gradient of this step.
        if skips is None:
            torch._foreach_lerp_(moments, gradients, 1 - beta2)
        else:
            for moment, gradient in zip(moments, gradients, strict=True):
                # The result overwrites the gradient, which is not needed afterwards, to avoid an
                # additional copy.
                torch.lerp(moment, gradient, 1 - beta2, out=gradient)
                torch.where(skips, moment, gradient, out=moment)


def _lion(groups: Groups, config: Any) -> Lion:
    # "auto" does not use foreach, because the temporary copy would use up the memory that Lion
    # saves.
    foreach = config.implementation == "foreach"
    return Lion(
        groups,
        config.learning_rate,
        config.betas,
        foreach=foreach,
        cautious=config.cautious_weight_decay,
    )


def _lion_layout(parameter: Tensor, *_: Any) -> Layout:
    return {"exp_avg": (tuple(parameter.shape), parameter.dtype)}


LION = OptimizerSpec(
    _lion,
    _lion_layout,
    elementwise=True,
    implementations=("foreach", "for-loop", "auto"),
    options=("betas", "cautious_weight_decay", "tuned_width"),
)

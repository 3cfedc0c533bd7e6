"""The Adafactor optimizer, as described in its paper and implemented in transformers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from firstlight.optim.spec import (
    ForeachOptimizer,
    Groups,
    Layout,
    OptimizerKeys,
    OptimizerSpec,
    lerp_unless,
)

AdafactorVariant = Literal["auto", "paper", "torch"]

#: Term added to squared gradients, so that the inverse square root is finite for rows whose
#: gradient is zero.
_EPS_OF_SQUARES = 1e-30
#: Lower bound on the root mean square by which a parameter's steps are scaled. Without this bound,
#: parameters initialised to zero would never change.
_EPS_OF_SCALE = 1e-3


class Adafactor(ForeachOptimizer):
    """Adafactor (Shazeer and Stern 2018, arXiv 1804.04235) without momentum and without a built-in
    schedule. Steps are relative to the size of the parameter. The optimizer is equivalent to
    `transformers.Adafactor` with `relative_step=False` and `scale_parameter=True`.

    The step and the weight decay are multiplied by `lr` and by the root mean square of the
    parameter. torch.optim.Adafactor has the same state but differs from this class in three ways.
    Its weight decay is `lr` times `weight_decay`, regardless of the size of the parameter. Its
    learning rate is at most 1/sqrt(step). It clamps the mean of the squared gradients to at least
    1.2e-7, even though the mean is smaller than that in large models.

    Args:
        groups: torch's parameter groups. Within a group, either all parameters must have at least
            two dimensions, or all must have fewer.
        lr: size of a step as a multiple of the root mean square of the parameter.
        beta2_decay: exponent in the decay rate of the second moment, 1 - step ** beta2_decay; at
            most 0.
        threshold: upper bound of the root mean square of an update, before `lr` is applied.
        foreach: True to run each operation for all parameters of a group at once, which needs
            temporary copies as large as the parameters. With False, small parameters on a GPU are
            updated several at a time, and all other parameters one by one.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        lr: float,
        beta2_decay: float,
        threshold: float,
        *,
        foreach: bool,
    ) -> None:
        defaults = {
            "lr": lr,
            "beta2_decay": beta2_decay,
            "d": threshold,
            "weight_decay": 0.0,
            "foreach": foreach,
        }
        super().__init__(groups, defaults)

    def update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """See `ForeachOptimizer.update`."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        states, skips = [self._state_for(p) for p in parameters], self.skips
        fresh = [float(state["step"]) ** group["beta2_decay"] for state in states]
        # These lists contain scalar tensors instead of Python numbers, because the host would have
        # to wait for the GPU to convert a tensor to a Python number.
        rates = torch._foreach_clamp_min(_root_mean_squares(parameters), _EPS_OF_SCALE)
        torch._foreach_mul_(rates, group["lr"])
        updates = _directions(gradients, states, fresh, skips)
        scales = _root_mean_squares(updates)
        torch._foreach_div_(scales, group["d"])
        torch._foreach_clamp_min_(scales, 1.0)
        torch._foreach_div_(updates, scales)
        torch._foreach_mul_(updates, rates)
        if skips is not None:
            for change in (*rates, *updates):
                change.masked_fill_(skips, 0)
        if group["weight_decay"]:
            torch._foreach_mul_(parameters, [1 - group["weight_decay"] * rate for rate in rates])
        torch._foreach_sub_(parameters, updates)

    def _state_for(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the state of a parameter, after increasing its step counter. The state is created
        if it does not exist."""
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            # The counter is on the CPU, because Python code reads it (see `spec.rebuild_tensors`).
            state["step"] = torch.tensor(0.0, dtype=torch.float32)
            if parameter.dim() < 2:
                state["variance"] = torch.zeros_like(parameter)
            else:
                state["row_var"] = torch.zeros_like(parameter[..., :1])
                state["col_var"] = torch.zeros_like(parameter[..., :1, :])
        state["step"] += 1
        return state


def _root_mean_squares(tensors: list[Tensor]) -> list[Tensor]:
    """Return the root mean square of each tensor, as a list of scalar tensors."""
    norms = list(torch._foreach_norm(tensors))
    torch._foreach_div_(norms, [math.sqrt(tensor.numel()) for tensor in tensors])
    return norms


def _directions(
    gradients: list[Tensor],
    states: list[dict[str, Tensor]],
    fresh: list[float],
    skips: Tensor | None,
) -> list[Tensor]:
    """Update the second moments in `states` with the gradients. Return the gradients divided by the
    square roots of their second moments.

    Args:
        gradients: gradients of any shapes.
        states: state of the corresponding parameter for each gradient.
        fresh: weight of this step's squared gradient in the moving average, for each parameter.
        skips: bool [], true to leave the second moments unchanged (see `lerp_unless`).
    """
    inverse_roots = []
    for gradient, state, share in zip(gradients, states, fresh, strict=True):
        if "variance" in state:
            lerp_unless(skips, state["variance"], gradient.square() + _EPS_OF_SQUARES, share)
            inverse_roots.append(state["variance"].rsqrt())
            continue
        for key, dim in (("row_var", -1), ("col_var", -2)):
            # The mean of the squares is computed from the norm, which does not need a temporary
            # copy of the squares.
            norm = torch.linalg.vector_norm(gradient, dim=dim, keepdim=True)
            mean = norm.square_().div_(gradient.shape[dim]).add_(_EPS_OF_SQUARES)
            lerp_unless(skips, state[key], mean, share)
        row = state["row_var"]
        inverse_roots.append(
            (row / row.mean(dim=-2, keepdim=True)).rsqrt() * state["col_var"].rsqrt()
        )
    torch._foreach_mul_(inverse_roots, gradients)
    return inverse_roots


class AdafactorConfig(OptimizerKeys):
    """Keys of Adafactor."""

    adafactor_threshold: float = Field(1.0, ge=1)
    """maximum root mean square of an Adafactor update before the learning rate is applied (d in the
    paper). Larger updates are scaled down to it."""
    adafactor_beta2_decay: float = Field(-0.8, le=0)
    """exponent in the decay rate of Adafactor's second moment, 1 - step ** exponent; at most 0."""
    adafactor_variant: AdafactorVariant = "auto"
    """variant of Adafactor. With "paper", steps and weight decay are relative to the root mean
    square of the parameter, and the learning rate follows the schedule (as in transformers'
    Adafactor with relative_step=False). "torch" uses torch.optim.Adafactor. Its weight decay is
    learning_rate times weight_decay for every parameter (1e-3 per step with 1e-2 and 0.1), and its
    learning rate is at most 1/sqrt(step). "auto" is "paper", except for resumed runs that were
    started with an older version, which use "torch"."""


def _adafactor(groups: Groups, config: Any) -> torch.optim.Optimizer:
    rate, decay = config.learning_rate, config.adafactor_beta2_decay
    threshold, foreach = config.adafactor_threshold, config.implementation == "foreach"
    if config.adafactor_variant == "torch":
        return torch.optim.Adafactor(groups, rate, beta2_decay=decay, d=threshold, foreach=foreach)
    return Adafactor(groups, rate, decay, threshold, foreach=foreach)


def _adafactor_layout(parameter: Tensor, *_: Any) -> Layout:
    shape, dtype = tuple(parameter.shape), parameter.dtype
    if len(shape) < 2:
        return {"step": ((), torch.float32), "variance": (shape, dtype)}
    return {
        "step": ((), torch.float32),
        "row_var": ((*shape[:-1], 1), dtype),
        "col_var": ((*shape[:-2], 1, shape[-1]), dtype),
    }


#: torch does not have a fused kernel for Adafactor. "auto" selects for-loop, because the temporary
#: copies of foreach would use up the memory that Adafactor saves.
ADAFACTOR = OptimizerSpec(
    _adafactor,
    _adafactor_layout,
    elementwise=False,
    implementations=("foreach", "for-loop", "auto"),
)

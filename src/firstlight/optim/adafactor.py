"""Adafactor as in its paper and in transformers."""

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

#: Added to squared gradients, so that the inverse root of a row without a gradient is finite.
_EPS_OF_SQUARES = 1e-30
#: Lower bound of a parameter's root mean square, which scales its steps. Without it, parameters
#: initialised to zero would never move.
_EPS_OF_SCALE = 1e-3


class Adafactor(ForeachOptimizer):
    """Adafactor (Shazeer and Stern 2018, arXiv 1804.04235) with relative parameter scale, without
    momentum and without its own schedule: `transformers.Adafactor` with `relative_step=False` and
    `scale_parameter=True`.

    A step and the weight decay are both `lr` times the parameter's root mean square.
    torch.optim.Adafactor has the same state but differs in three ways: its weight decay is `lr`
    times `weight_decay`, regardless of the parameter's size; its learning rate is at most
    1/sqrt(step); and it clamps the mean of the squared gradients to at least 1.2e-7, more than that
    mean in large models.

    Args:
        groups: torch's parameter groups; the parameters of a group all have two or more dimensions,
            or all have fewer.
        lr: size of a step relative to the parameter's root mean square.
        beta2_decay: exponent of the second moment's decay rate, which is 1 - step ** beta2_decay;
            at most 0.
        threshold: upper bound of the root mean square of an update, before `lr` is applied.
        foreach: True runs each operation over all parameters of a group at once, with temporary
            copies as large as the parameters; False updates lists of small parameters on a GPU, and
            other parameters one by one.
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
        # Lists of tensors [] instead of Python numbers, for which the host would wait for the GPU.
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
        """Return the parameter's state, created if missing, with the step counter increased."""
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            # On the CPU, because Python reads the counter: see `spec.rebuild_tensors`.
            state["step"] = torch.tensor(0.0, dtype=torch.float32)
            if parameter.dim() < 2:
                state["variance"] = torch.zeros_like(parameter)
            else:
                state["row_var"] = torch.zeros_like(parameter[..., :1])
                state["col_var"] = torch.zeros_like(parameter[..., :1, :])
        state["step"] += 1
        return state


def _root_mean_squares(tensors: list[Tensor]) -> list[Tensor]:
    """Return the root mean square of each tensor, []."""
    norms = list(torch._foreach_norm(tensors))
    torch._foreach_div_(norms, [math.sqrt(tensor.numel()) for tensor in tensors])
    return norms


def _directions(
    gradients: list[Tensor],
    states: list[dict[str, Tensor]],
    fresh: list[float],
    skips: Tensor | None,
) -> list[Tensor]:
    """Divide the gradients by the roots of their second moments, after updating the second moments
    in `states` with these gradients. The results have the gradients' shapes.

    Args:
        gradients: gradients of any shapes.
        states: state of each gradient's parameter.
        fresh: weight of this step's squared gradient in the second moment, per parameter.
        skips: see `lerp_unless`.
    """
    inverse_roots = []
    for gradient, state, share in zip(gradients, states, fresh, strict=True):
        if "variance" in state:
            lerp_unless(skips, state["variance"], gradient.square() + _EPS_OF_SQUARES, share)
            inverse_roots.append(state["variance"].rsqrt())
            continue
        for key, dim in (("row_var", -1), ("col_var", -2)):
            # The norm gives the mean of the squares without a temporary copy of the squares.
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
    """maximum root mean square of an Adafactor update before the learning rate is applied, to which
    larger updates are scaled down (d in the paper)."""
    adafactor_beta2_decay: float = Field(-0.8, le=0)
    """exponent of the decay rate of Adafactor's second moment, which is 1 - step ** exponent; at
    most 0."""
    adafactor_variant: AdafactorVariant = "auto"
    """variant of Adafactor. "paper": weight decay is relative to the parameter's root mean square,
    as steps are, and the learning rate is the schedule's (as in transformers' Adafactor with
    relative_step=False). "torch": torch.optim.Adafactor, whose weight decay is learning_rate times
    weight_decay for each parameter (1e-3 per step at 1e-2 and 0.1), and whose learning rate is at
    most 1/sqrt(step). "auto" is paper; a run started with an older version continues with torch."""


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


#: torch does not have a fused kernel for Adafactor. "auto" selects for-loop, because the copies
#: that foreach makes cost the memory that Adafactor saves.
ADAFACTOR = OptimizerSpec(
    _adafactor,
    _adafactor_layout,
    elementwise=False,
    implementations=("foreach", "for-loop", "auto"),
)

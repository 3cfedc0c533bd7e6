"""Optimizers: which parameter gets which rule, and their state by parameter name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn

from firstlight.errors import CheckpointError


class OptimizerConfig(BaseModel):
    """The `optimizer` section of a recipe.

    name: "adamw" for all parameters (Loshchilov and Hutter 2019, torch's fused kernel), or
        "muon": Muon for the matrices inside the layers, AdamW for embeddings, head and norms
        (Jordan et al. 2024; torch.optim.Muon).
    learning_rate: AdamW's peak.
    muon_learning_rate: Muon's peak; null takes `learning_rate`. Its updates are scaled by
        0.2 sqrt(larger side) to AdamW's size (Liu et al. 2025), so one rate can serve both.
    betas, eps: AdamW's.
    muon_momentum: Muon's.
    weight_decay: decoupled; applied to matrices only, never to norms and biases.
    max_grad_norm: gradients are scaled down to this global L2 norm; 0 switches it off.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    name: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = Field(1e-3, gt=0)
    muon_learning_rate: float | None = Field(None, gt=0)
    betas: list[float] = Field([0.9, 0.95], min_length=2, max_length=2)
    eps: float = Field(1e-8, gt=0)
    muon_momentum: float = Field(0.95, ge=0, lt=1)
    weight_decay: float = Field(0.1, ge=0)
    max_grad_norm: float = Field(1.0, ge=0)

    @model_validator(mode="after")
    def _check(self) -> OptimizerConfig:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas {self.betas} must each be at least 0 and below 1")
        return self


class Optimizer:
    """One or two torch optimizers that together update all parameters of a model.

    Args:
        model: its parameters' names become the names of the state.
        config: see `OptimizerConfig`.
    """

    def __init__(self, model: nn.Module, config: OptimizerConfig) -> None:
        self.config = config
        self.parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
        self._torch_optimizers = OPTIMIZERS[config.name](self.parameters, config)
        self._peaks = [
            [group["lr"] for group in optimizer.param_groups]
            for optimizer in self._torch_optimizers
        ]

    def set_learning_rate(self, share_of_peak: float) -> float:
        """Set every group's rate to its share of the peak; return AdamW's."""
        for optimizer, peaks in zip(self._torch_optimizers, self._peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * share_of_peak
        return self.config.learning_rate * share_of_peak

    def clip_gradients(self) -> Tensor:
        """Scale the gradients down to `max_grad_norm`; return their L2 norm before that."""
        limit = self.config.max_grad_norm or float("inf")
        return nn.utils.clip_grad_norm_(self.parameters.values(), limit)

    def step(self) -> None:
        """Update the parameters from their gradients."""
        for optimizer in self._torch_optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for optimizer in self._torch_optimizers:
            optimizer.zero_grad(set_to_none=True)

    def state_tensors(self) -> dict[str, Tensor]:
        """All moments and counters, on the CPU, as `<parameter's name>.<state's name>`."""
        return {
            f"{name}.{key}": value.detach().cpu().contiguous()
            for name, state in self._states()
            for key, value in state.items()
        }

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Put back what `state_tensors` gave. Learning rates are not part of it: the schedule
        sets them at every step.

        Raises:
            CheckpointError: a tensor is missing, extra or of another shape (named).
        """
        places = {
            f"{name}.{key}": (optimizer, parameter, key)
            for optimizer in self._torch_optimizers
            for name, parameter in self.parameters.items()
            if _owns(optimizer, parameter)
            for key in _STATE_NAMES[type(optimizer)]
        }
        if odd := sorted(places.keys() ^ tensors.keys()):
            raise CheckpointError(
                f"the saved optimizer state is not that of this model and optimizer: "
                f"'{odd[0]}' is in only one of them"
            )
        for name, (_, parameter, key) in places.items():
            shape = [] if key == "step" else list(parameter.shape)
            if list(tensors[name].shape) != shape:
                raise CheckpointError(
                    f"the optimizer's state '{name}' is {list(tensors[name].shape)}, "
                    f"expected {shape}"
                )
        for name, (optimizer, parameter, key) in places.items():
            # A fused step counter lives where its parameter does.
            optimizer.state[parameter][key] = tensors[name].to(parameter.device, copy=True)

    def _states(self) -> list[tuple[str, dict[str, Tensor]]]:
        return [
            (name, dict(optimizer.state[parameter]))
            for optimizer in self._torch_optimizers
            for name, parameter in self.parameters.items()
            if parameter in optimizer.state
        ]


def _owns(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> bool:
    return any(p is parameter for group in optimizer.param_groups for p in group["params"])


Parameters = Mapping[str, nn.Parameter]


def _adamw(parameters: Parameters, config: OptimizerConfig) -> list[torch.optim.Optimizer]:
    if not parameters:
        return []
    matrices = [p for p in parameters.values() if p.dim() >= 2]
    vectors = [p for p in parameters.values() if p.dim() < 2]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    fused = next(iter(parameters.values())).device.type in ("cpu", "cuda", "mps")
    return [
        torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.learning_rate,
            betas=(config.betas[0], config.betas[1]),
            eps=config.eps,
            fused=fused,
        )
    ]


def _muon(parameters: Parameters, config: OptimizerConfig) -> list[torch.optim.Optimizer]:
    matrices = {n: p for n, p in parameters.items() if p.dim() == 2 and _inside_a_layer(n)}
    others = {n: p for n, p in parameters.items() if n not in matrices}
    muon = torch.optim.Muon(
        list(matrices.values()),
        lr=config.muon_learning_rate or config.learning_rate,
        momentum=config.muon_momentum,
        weight_decay=config.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    return [muon, *_adamw(others, config)]


def _inside_a_layer(name: str) -> bool:
    """Whether a parameter belongs to a numbered layer (`model.layers.3...`, `h.3...`)."""
    return any(part.isdigit() for part in name.split("."))


#: What each torch optimizer keeps for a parameter once it has made a step.
_STATE_NAMES: dict[type[torch.optim.Optimizer], tuple[str, ...]] = {
    torch.optim.AdamW: ("step", "exp_avg", "exp_avg_sq"),
    torch.optim.Muon: ("momentum_buffer",),
}

OPTIMIZERS: dict[str, Callable[[Parameters, OptimizerConfig], list[torch.optim.Optimizer]]] = {
    "adamw": _adamw,
    "muon": _muon,
}

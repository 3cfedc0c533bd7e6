"""Muon for matrices and for stacks of matrices, such as the experts of a layer.

Shape letters: E matrices of a stack, F rows, C columns; `...` is E or nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from firstlight.optim.cautious import decay_cautiously
from firstlight.optim.dtensors import gather, is_sharded, own_shard, shard_like
from firstlight.optim.spec import (
    ForeachOptimizer,
    Groups,
    Layout,
    OptimizerSpec,
    is_sharded_like,
    momentum_layout,
)

_EPS = 1e-7

#: `optimizer.muon_coefficients` -> divisor of the matrix' norm before the first step, and a, b, c
#: of each step x = a x + b (x x^T) x + c (x x^T)^2 x. Jordan's are those of torch.optim.Muon. Those
#: of the Polar Express are the best odd polynomials, one after the other, for singular values from
#: 0.001 to 1 (arXiv 2505.16932, algorithm 1 with a cushion of 0.02, and a safety factor of 1.02
#: against bf16's rounding), which bring them nearer to one.
COEFFICIENTS: dict[str, tuple[float, tuple[tuple[float, float, float], ...]]] = {
    "jordan": (1.0, 5 * ((3.4445, -4.7750, 2.0315),)),
    "polar_express": (
        1.02,
        (
            (8.156554524902461, -22.48329292557795, 15.878769915207462),
            (4.042929935166739, -2.808917465908714, 0.5000178451051316),
            (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
            (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
            (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
        ),
    ),
}


class Muon(ForeachOptimizer):
    """Muon (Jordan et al. 2024) with decoupled weight decay and updates of AdamW's size (Liu et al.
    2025, arXiv 2502.16982): torch.optim.Muon with `match_rms_adamw`, to the bit for matrices.

        m = momentum m + (1 - momentum) g
        o = orthogonalised((1 - momentum) g + momentum m)
        x = x - lr (0.2 sqrt(max(F, C)) o + weight_decay x)

    With `beta2`, NorMuon (arXiv 2510.05491): the rows of o, one for each neuron, are divided by the
    root of their averaged mean squares v [..., F, 1], and o is scaled to a root mean square of 0.2.

    Matrices may be sharded (FSDP2, tensor parallelism): moments and weights stay shards, and each
    matrix is gathered in bf16 when its turn comes. Where processes have the same whole gradients
    (DDP), each orthogonalises its share of the matrices and sends them to the others in bf16, which
    changes no bit: see `process`.

    Args:
        groups: torch's parameter groups, of parameters [..., F, C]; `transposed` ones have their
            neurons in the columns.
        lr: learning rate.
        momentum: momentum after its warm-up.
        first_momentum: momentum of the first step with a warm-up.
        warmup_steps: steps in which momentum rises linearly; 0 for none.
        beta2: decay rate of NorMuon's second moment; None is plain Muon.
        coefficients: a name of `COEFFICIENTS`.
        cautious: see `decay_cautiously`.

    Attributes:
        process: number of this process, and of all that have the same gradients and parameters and
            share the orthogonalisation; (0, 1) for one that computes it alone.
    """

    def __init__(
        self,
        groups: Groups,
        lr: float,
        momentum: float,
        *,
        first_momentum: float = 0.85,
        warmup_steps: int = 0,
        beta2: float | None = None,
        coefficients: str = "jordan",
        cautious: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "first_momentum": first_momentum,
            "warmup_steps": warmup_steps,
            "beta2": beta2,
            "coefficients": coefficients,
            "cautious": cautious,
            "weight_decay": 0.0,
            "transposed": False,
            # A list's matrices are updated one by one: they would all be in memory as bf16.
            "foreach": False,
        }
        super().__init__(groups, defaults)
        self.process = (0, 1)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters that have a gradient."""
        rank, processes = self.process
        if processes == 1:
            super().step()
            return
        found = [(p, g) for g in self.param_groups for p in g["params"] if p.grad is not None]
        # Matrices of one size at a time take all processes as long, and few are in memory.
        found.sort(key=lambda pair: pair[0].numel())
        for start in range(0, len(found), processes):
            part, received = found[start : start + processes], []
            for owner, (parameter, group) in enumerate(part):
                direction = self._direction(parameter, group)
                if owner == rank:
                    direction = orthogonalised(direction, group["coefficients"]).contiguous()
                else:
                    direction = torch.empty_like(parameter, dtype=torch.bfloat16)
                received.append(direction)
            for owner, (parameter, group) in enumerate(part):
                # Sent after all have computed: products of the processes run at the same time.
                torch.distributed.broadcast(received[owner], owner)
                self._apply(received[owner], parameter, group)

    def update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """See `ForeachOptimizer.update`."""
        for parameter in parameters:
            direction = self._direction(parameter, group)
            if is_sharded(parameter):
                # Every process computes each matrix whole, from bf16, which is half to send.
                direction = gather(direction.bfloat16(), parameter)
            self._apply(orthogonalised(direction, group["coefficients"]), parameter, group)

    def _direction(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """The parameter's averaged gradient, or this process' shard of it; counts the step."""
        assert parameter.grad is not None
        state, gradient = self._state_of(parameter, group), own_shard(parameter.grad, parameter)
        average, momentum = own_shard(state["momentum_buffer"], parameter), _momentum(state, group)
        average.lerp_(gradient, 1 - momentum)
        # Nesterov momentum: this step's gradient counts once more.
        return gradient.lerp(average, momentum)

    def _apply(self, direction: Tensor, parameter: Tensor, group: dict[str, Any]) -> None:
        """Move the parameter, or this process' shard of it, along an orthogonalised direction
        [..., F, C]."""
        state, own = self.state[parameter], own_shard(parameter, parameter)
        # AdamW's typical update has this root mean square, so one learning rate serves both.
        scale = 0.2 * math.sqrt(max(parameter.shape[-2:]))
        if group["beta2"] is not None:
            # Its root mean square is one already, whatever the shape.
            direction = normalised(direction, state["second_moment"], group)
            scale = 0.2
        direction = own_shard(shard_like(direction, parameter), parameter)
        decay = group["lr"] * group["weight_decay"]
        if group["cautious"]:
            decay_cautiously(own, direction, decay)
        else:
            own.mul_(1 - decay)
        own.add_(direction, alpha=-group["lr"] * scale)

    def _state_of(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """The parameter's state, with this step counted where steps are."""
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            for key, (shape, dtype) in _muon_layout(parameter, None, group).items():
                if is_sharded_like(parameter, key, shape):
                    state[key] = torch.zeros_like(parameter)
                    continue
                # Python reads the counter: see `spec.rebuild_tensors`.
                device = torch.device("cpu") if key == "step" else parameter.device
                state[key] = torch.zeros(shape, dtype=dtype, device=device)
        if "step" in state:
            state["step"] += 1
        return state


def _momentum(state: Mapping[str, Tensor], group: Mapping[str, Any]) -> float:
    """The momentum of this step."""
    if not group["warmup_steps"]:
        return float(group["momentum"])
    done = min((float(state["step"]) - 1) / group["warmup_steps"], 1.0)
    return float(group["first_momentum"] * (1 - done) + group["momentum"] * done)


def orthogonalised(matrices: Tensor, coefficients: str = "jordan") -> Tensor:
    """Each matrix [..., F, C] with its singular values brought near one, [..., F, C] in bf16.

    The quintic Newton-Schulz iteration of Jordan et al. 2024, all matrices of a stack at a time.

    Args:
        matrices: [F, C] or [E, F, C].
        coefficients: a name of `COEFFICIENTS`.
    """
    divisor, steps = COEFFICIENTS[coefficients]
    is_stack = matrices.dim() == 3
    # The product of a matrix and its transpose is smallest with the short side first.
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.to(torch.bfloat16, copy=True)
    if is_tall:
        x = x.mT
    # The iteration needs singular values of at most one, and the Frobenius norm bounds them.
    norm = x.flatten(1).norm(dim=1)[:, None, None] if is_stack else x.norm()
    x.div_((norm * divisor if divisor != 1 else norm).clamp(min=_EPS))
    add_product = torch.baddbmm if is_stack else torch.addmm
    for a, b, c in steps:
        gram = x @ x.mT
        update = add_product(gram, gram, gram, beta=b, alpha=c)
        x = add_product(x, update, x, beta=a)
    return x.mT if is_tall else x


def normalised(matrices: Tensor, second_moment: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Orthogonalised matrices [..., F, C] with neurons of like size, and a root mean square of one.

    Args:
        matrices: orthogonalised matrices of any dtype.
        second_moment: averaged mean squares of the neurons, [..., F, 1], or [..., 1, C] of
            transposed matrices; takes in the new ones.
        group: torch's parameter group, with `beta2` and `transposed`.

    Returns:
        [..., F, C] in the dtype of `second_moment`.
    """
    # In fp32: bf16 has three digits, and a slow average would not move.
    squares = matrices.to(second_moment.dtype).square()
    squares = squares.mean(-2 if group["transposed"] else -1, keepdim=True)
    second_moment.lerp_(squares, 1 - group["beta2"])
    inverse = 1 / (second_moment.sqrt() + _EPS)
    # Mean squares of the rescaled neurons: no second pass over the matrix is needed.
    mean = (squares * inverse.square()).mean((-2, -1), keepdim=True)
    return matrices * (inverse / (mean.sqrt() + _EPS))


def _muon(groups: Groups, config: Any) -> Muon:
    rate = config.peak_rate("matrix")
    return Muon(
        # Matrices only are here, and have Muon's own rate.
        [{**group, "lr": rate} for group in groups],
        rate,
        config.muon_momentum,
        first_momentum=config.muon_first_momentum,
        warmup_steps=config.muon_momentum_warmup_steps,
        beta2=config.muon_beta2,
        coefficients=config.muon_coefficients,
        cautious=config.cautious_weight_decay,
    )


def _muon_layout(parameter: Tensor, _: Any, group: Mapping[str, Any]) -> Layout:
    layout = momentum_layout(parameter)
    if group["beta2"] is not None:
        *stack, rows, columns = parameter.shape
        neurons = (1, columns) if group["transposed"] else (rows, 1)
        layout["second_moment"] = ((*stack, *neurons), torch.float32)
    # Only with a warm-up: a plain run's state stays that of torch.optim.Muon.
    if group["warmup_steps"]:
        layout["step"] = ((), torch.float32)
    return layout


def _is_matrix_of_a_layer(name: str, parameter: Tensor) -> bool:
    """Whether a parameter is a matrix, or a stack of them, of a numbered layer
    (`model.layers.3...`, `h.3...`)."""
    # Experts' biases are stacked, and a convolution has a few weights of each channel alone: they
    # are no matrices, though they have two and three dimensions.
    is_matrix = parameter.dim() in (2, 3) and not name.endswith(("bias", "conv1d.weight"))
    return is_matrix and any(part.isdigit() for part in name.split("."))


MUON = OptimizerSpec(
    _muon,
    _muon_layout,
    elementwise=False,
    gathers=True,
    # Betas are those of AdamW, which updates what Muon does not take.
    options=("betas", "cautious_weight_decay", "tuned_width"),
    takes=_is_matrix_of_a_layer,
)

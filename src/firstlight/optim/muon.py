"""Muon for matrices and for stacks of matrices, such as the experts of a layer.

Shape letters: E matrices of a stack, F rows, C columns; `...` is E or nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from firstlight.optim.cautious import decay_cautiously
from firstlight.optim.dtensors import (
    gather,
    gather_each,
    is_sharded,
    own_part,
    own_shard,
    scatter_each,
    shard_group,
    shard_like,
)
from firstlight.optim.spec import (
    Groups,
    Layout,
    OptimizerSpec,
    is_sharded_like,
    momentum_layout,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

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


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024) with decoupled weight decay and updates of AdamW's size (Liu et al.
    2025, arXiv 2502.16982): torch.optim.Muon with `match_rms_adamw`, to the bit for matrices.

        m = momentum m + (1 - momentum) g
        o = orthogonalised((1 - momentum) g + momentum m)
        x = x - lr (0.2 sqrt(max(F, C)) o + weight_decay x)

    With `beta2`, NorMuon (arXiv 2510.05491): the rows of o, one for each neuron, are divided by the
    root of their averaged mean squares v [..., F, 1], and o is scaled to a root mean square of 0.2.

    Several processes orthogonalise a share of the matrices each, which changes no bit. Where they
    have the same whole gradients (DDP, see `process`), each sends its matrices to the others in
    bf16. Where matrices are sharded (FSDP2, tensor parallelism), moments and weights stay shards:
    each process gets the shards of its matrices in bf16, and sends back shards of the results.

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
        }
        super().__init__(groups, defaults)
        self.process = (0, 1)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters that have a gradient."""
        found: dict[Any, list[tuple[Tensor, dict[str, Any]]]] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    found.setdefault(shard_group(parameter), []).append((parameter, group))
        for team, pairs in found.items():
            # Matrices of one size at a time take all processes as long, and few are in memory.
            pairs.sort(key=lambda pair: pair[0].numel())
            processes = self.process[1] if team is None else team.size()
            for start in range(0, len(pairs), processes):
                part = pairs[start : start + processes]
                if team is not None:
                    self._update_shards(part, team)
                elif processes > 1:
                    self._update_copies(part)
                else:
                    self._update_alone(*part[0])

    def _update_alone(self, parameter: Tensor, group: dict[str, Any]) -> None:
        """Update a parameter, or a shard of one that is cut along two dimensions of its mesh: every
        process computes that matrix whole, from bf16, which is half to send."""
        direction = self._direction(parameter, group)
        if is_sharded(parameter):
            direction = gather(direction.bfloat16(), parameter)
        direction = orthogonalised(direction, group["coefficients"])
        factors = self._factors(direction, parameter, group)
        direction = direction if factors is None else direction * factors
        self._apply(own_shard(shard_like(direction, parameter), parameter), parameter, group)

    def _update_copies(self, part: list[tuple[Tensor, dict[str, Any]]]) -> None:
        """Update as many parameters as there are processes with the same gradients: each computes
        one matrix, and the others receive it."""
        received = []
        for owner, (parameter, group) in enumerate(part):
            direction = self._direction(parameter, group)
            if owner == self.process[0]:
                direction = orthogonalised(direction, group["coefficients"]).contiguous()
            else:
                direction = torch.empty_like(parameter, dtype=torch.bfloat16)
            received.append(direction)
        for owner, (parameter, group) in enumerate(part):
            # Sent after all have computed: products of the processes run at the same time.
            torch.distributed.broadcast(received[owner], owner)
            factors = self._factors(received[owner], parameter, group)
            direction = received[owner] if factors is None else received[owner] * factors
            self._apply(direction, parameter, group)

    def _update_shards(self, part: list[tuple[Tensor, dict[str, Any]]], team: ProcessGroup) -> None:
        """Update this process' shards of as many parameters as there are processes: each gets the
        shards of one matrix, computes it, and sends each process its shard."""
        parameters = [parameter for parameter, _ in part]
        shards = [self._direction(parameter, group).bfloat16() for parameter, group in part]
        full = gather_each(shards, parameters)
        if full is not None:
            full = orthogonalised(full, part[team.rank()][1]["coefficients"])
        directions = scatter_each(full, parameters, torch.bfloat16)
        for owner, (parameter, group) in enumerate(part):
            own = full if owner == team.rank() else None
            factors = self._factors(own, parameter, group, team, owner)
            if factors is not None:
                directions[owner] = directions[owner] * own_part(factors, parameter)
            self._apply(directions[owner], parameter, group)

    def _direction(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """The parameter's averaged gradient, or this process' shard of it; counts the step."""
        assert parameter.grad is not None
        state, gradient = self._state_of(parameter, group), own_shard(parameter.grad, parameter)
        average, momentum = own_shard(state["momentum_buffer"], parameter), _momentum(state, group)
        average.lerp_(gradient, 1 - momentum)
        # Nesterov momentum: this step's gradient counts once more.
        return gradient.lerp(average, momentum)

    def _factors(
        self,
        direction: Tensor | None,
        parameter: Tensor,
        group: dict[str, Any],
        team: ProcessGroup | None = None,
        owner: int = 0,
    ) -> Tensor | None:
        """NorMuon's `neuron_factors` of an orthogonalised direction [..., F, C], which only `owner`
        of a team has; None for plain Muon."""
        if group["beta2"] is None:
            return None
        second_moment = self.state[parameter]["second_moment"]
        if direction is None:
            squares = torch.empty_like(second_moment)
        else:
            squares = neuron_squares(direction, group["transposed"])
        if team is not None:
            # Few numbers, and every process keeps all: the mean over the neurons needs them.
            torch.distributed.broadcast(squares, group=team, group_src=owner)
        return neuron_factors(squares, second_moment, group["beta2"])

    def _apply(self, direction: Tensor, parameter: Tensor, group: dict[str, Any]) -> None:
        """Move the parameter along its orthogonalised direction [..., F, C], times its factors, or
        this process' shard along the shard of that."""
        own = own_shard(parameter, parameter)
        # AdamW's typical update has this root mean square, so one learning rate serves both.
        scale = 0.2
        if group["beta2"] is None:
            # NorMuon's factors give it a root mean square of one for every shape.
            scale *= math.sqrt(max(parameter.shape[-2:]))
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


def neuron_squares(matrices: Tensor, transposed: bool) -> Tensor:
    """Mean squares of the neurons of orthogonalised matrices [..., F, C], in fp32: [..., F, 1],
    or [..., 1, C] of `transposed` matrices, which have their neurons in the columns."""
    # In fp32: bf16 has three digits, and a slow average would not move.
    squares = matrices.float().square()
    return squares.mean(-2 if transposed else -1, keepdim=True)


def neuron_factors(squares: Tensor, second_moment: Tensor, beta2: float) -> Tensor:
    """Factors of the neurons of orthogonalised matrices, which give them like size, and the
    matrices a root mean square of one.

    Args:
        squares: mean squares of the neurons, [..., F, 1] or [..., 1, C].
        second_moment: their average, which takes in the new ones.
        beta2: decay rate of that average.

    Returns:
        The shape and dtype of `second_moment`.
    """
    second_moment.lerp_(squares, 1 - beta2)
    inverse = 1 / (second_moment.sqrt() + _EPS)
    # Mean squares of the rescaled neurons: no second pass over the matrix is needed.
    mean = (squares * inverse.square()).mean((-2, -1), keepdim=True)
    return inverse / (mean.sqrt() + _EPS)


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
    """True if a parameter is a matrix, or a stack of them, of a numbered layer
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

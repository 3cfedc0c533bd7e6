"""The Muon optimizer for matrices and stacks of matrices, such as the experts of a layer.

Shape letters: E is the number of matrices in a stack, F the number of rows of a matrix, and C its
number of columns. For a stack, `...` is E. For a single matrix, it is empty.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

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
    LIST_VALUES,
    Groups,
    Layout,
    OptimizerKeys,
    OptimizerSpec,
    decay_cautiously,
    factor_unless,
    is_sharded_like,
    lerp_unless,
    momentum_layout,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

MuonCoefficients = Literal["jordan", "polar_express"]

_EPS = 1e-7

#: Coefficients of the Newton-Schulz iteration, keyed by `optimizer.muon_coefficients`. Each value
#: contains a factor, and the coefficients a, b, c of each step x = a x + b (x x^T) x + c (x x^T)^2
#: x. Before the first step, the matrix is divided by its norm times the factor. "jordan" is the
#: same as in torch.optim.Muon. "polar_express" brings singular values closer to one. It is designed
#: for initial singular values between 0.001 and 1. In each step, it uses the odd polynomial that is
#: optimal for the singular values after the previous step. It is algorithm 1 of arXiv 2505.16932
#: with a cushion of 0.02 and a safety factor of 1.02 against bf16 rounding.
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


def orthogonalised(matrices: Tensor, coefficients: str = "jordan") -> Tensor:
    """Orthogonalise matrices of shape [..., F, C], so that their singular values are close to one.
    Return a bf16 tensor of the same shape.

    The quintic Newton-Schulz iteration of Jordan et al. 2024 is applied to all matrices of a stack
    at once. The products are computed in bf16, or in fp16 on GPUs that would emulate bf16 (V100,
    T4).

    Args:
        matrices: matrix [F, C] or stack of matrices [E, F, C].
        coefficients: name in `COEFFICIENTS`.
    """
    divisor, steps = COEFFICIENTS[coefficients]
    is_stack = matrices.dim() == 3
    # x x^T is smaller than x^T x if x has fewer rows than columns, so tall matrices are transposed.
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    dtype = _product_dtype(matrices.device)
    # Gradients are too small for fp16 until they are divided by their norm.
    x = matrices.to(torch.bfloat16 if dtype == torch.bfloat16 else torch.float32, copy=True)
    if is_tall:
        x = x.mT
    # The iteration requires singular values of at most one. The Frobenius norm is an upper bound of
    # the singular values.
    norm = x.flatten(1).norm(dim=1)[:, None, None] if is_stack else x.norm()
    x = x.div_((norm * divisor if divisor != 1 else norm).clamp(min=_EPS)).to(dtype)
    add_product = torch.baddbmm if is_stack else torch.addmm
    for a, b, c in steps:
        gram = x @ x.mT
        update = add_product(gram, gram, gram, beta=b, alpha=c)
        x = add_product(x, update, x, beta=a)
    x = x.bfloat16()
    return x.mT if is_tall else x


def _product_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of the matrix products in `orthogonalised` on a device."""
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.float16
    return torch.bfloat16


def neuron_squares(matrices: Tensor, transposed: bool) -> Tensor:
    """Return the mean square of the values of each neuron, in fp32. The orthogonalised matrices
    have shape [..., F, C].

    The result has the shape [..., F, 1], because each row is a neuron. For `transposed` matrices,
    in which each column is a neuron, the shape is [..., 1, C].
    """
    # The squares are computed in fp32. bf16 has about three significant digits, so a slow moving
    # average would stop changing.
    squares = matrices.float().square()
    return squares.mean(-2 if transposed else -1, keepdim=True)


def neuron_factors(
    squares: Tensor, second_moment: Tensor, beta2: float, skips: Tensor | None = None
) -> Tensor:
    """Return the factors by which NorMuon (arXiv 2510.05491) multiplies the neurons of
    orthogonalised matrices. Afterwards, all neurons of a matrix have about the same size, and the
    root mean square of each matrix is one.

    Args:
        squares: mean square of each neuron, [..., F, 1] or [..., 1, C].
        second_moment: moving average of `squares`, updated in place.
        beta2: decay rate of the moving average.
        skips: bool [], true to leave the moving average unchanged (see `lerp_unless`).

    Returns:
        The factors, in the shape and dtype of `second_moment`.
    """
    lerp_unless(skips, second_moment, squares, 1 - beta2)
    inverse = 1 / (second_moment.sqrt() + _EPS)
    # The mean square of the rescaled matrix is computed from the mean squares of its neurons, which
    # avoids a second pass over the matrix.
    mean = (squares * inverse.square()).mean((-2, -1), keepdim=True)
    return inverse / (mean.sqrt() + _EPS)


#: A pair (parameter, parameter group).
_Pair = tuple[Tensor, dict[str, Any]]


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024) with decoupled weight decay and updates of the same size as AdamW's
    (Liu et al. 2025, arXiv 2502.16982). For matrices, results are bit-identical to torch.optim.Muon
    with `match_rms_adamw`.

        m = momentum m + (1 - momentum) g
        o = orthogonalised((1 - momentum) g + momentum m)
        x = x - lr (0.2 sqrt(max(F, C)) o + weight_decay x)

    With `beta2`, this optimizer is NorMuon (arXiv 2510.05491). Each row of o belongs to one neuron.
    The row is divided by the square root of v [..., F, 1], a moving average of the mean square of
    the row. The update is then scaled to a root mean square of 0.2 lr.

    With several processes, each process orthogonalises some of the matrices. The results are
    bit-identical to those of a single process. If all processes have the full gradients (DDP; see
    `process`), each process sends its results to the other processes in bf16. If matrices are
    sharded (FSDP2, tensor parallelism), moments and weights stay sharded. Each process then
    receives, in bf16, the shards of the matrices that it orthogonalises, and sends back shards of
    the results.

    With `stacked` and a single process, small matrices in the same group that have the same size
    are updated as one stack. On a GPU, launching the kernels for a small matrix takes longer than
    running them, and a stack requires as many kernels as a single matrix. The results differ from
    those of individual updates only by bf16 rounding.

    Args:
        groups: torch's parameter groups, with parameters [..., F, C]. In a group with `transposed`,
            the neurons (outputs) are the columns of the matrices.
        lr: learning rate.
        momentum: momentum after the warm-up.
        first_momentum: momentum in the first step of the warm-up.
        warmup_steps: number of steps over which the momentum rises linearly; 0 for no warm-up.
        beta2: decay rate of NorMuon's second moment; None for plain Muon.
        coefficients: name in `COEFFICIENTS`.
        cautious: True to apply weight decay with `decay_cautiously`.
        stacked: True to update small matrices in stacks.

    Attributes:
        process: (rank, number of processes) in a group of processes that have the same full
            gradients and parameters and divide the orthogonalisation among themselves; (0, 1) if
            there is no such group.
        found_inf: fp32 [], 1 to skip updates; None to always update (see `ForeachOptimizer.skips`).
    """

    found_inf: Tensor | None = None

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
        stacked: bool = False,
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
        self._stacked = stacked
        self._skips: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters that have a gradient."""
        self._skips = None if self.found_inf is None else self.found_inf > 0
        found: dict[Any, list[_Pair]] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    found.setdefault(shard_group(parameter), []).append((parameter, group))
        for team, pairs in found.items():
            # The parameters are sorted by size, so that matrices of the same size are distributed
            # together. All processes then take about the same time, and at most one full matrix per
            # process is in memory at a time.
            pairs.sort(key=lambda pair: pair[0].numel())
            processes = self.process[1] if team is None else team.size()
            if team is None and processes == 1:
                for stack in self._stacks(pairs):
                    if len(stack) > 1:
                        self._update_stack(stack)
                    else:
                        self._update_alone(*stack[0])
                continue
            for start in range(0, len(pairs), processes):
                part = pairs[start : start + processes]
                if team is not None:
                    self._update_shards(part, team)
                else:
                    self._update_copies(part)

    def _stacks(self, pairs: Sequence[_Pair]) -> Iterator[list[_Pair]]:
        """Yield lists of (parameter, group) pairs. The parameters of a list are updated
        together."""
        found: dict[Any, list[_Pair]] = {}
        for parameter, group in pairs:
            key: Any = parameter
            if self._stacked and parameter.dim() == 2 and not is_sharded(parameter):
                done = float(self.state[parameter].get("step", 0.0))
                key = (id(group), parameter.shape, parameter.dtype, done)
            found.setdefault(key, []).append((parameter, group))
        for stack in found.values():
            # The temporary copies of a stack take at most 0.5 GiB.
            most = max(LIST_VALUES // stack[0][0].numel(), 1)
            for start in range(0, len(stack), most):
                yield stack[start : start + most]

    def _update_stack(self, pairs: Sequence[_Pair]) -> None:
        """Update parameters of shape [F, C] as one stack [E, F, C]. They must have the same size,
        group and step count."""
        parameters, group = [parameter for parameter, _ in pairs], pairs[0][1]
        states = [self._state_for(parameter, group) for parameter in parameters]
        keys = [key for key in states[0] if key != "step"]
        stack = torch.stack(parameters)
        stack.grad = torch.stack([p.grad for p in parameters if p.grad is not None])
        state = {key: torch.stack([one[key] for one in states]) for key in keys}
        self.state[stack] = state
        if "step" in states[0]:
            state["step"] = states[0]["step"] - 1
        self._update_alone(stack, group)
        del self.state[stack]
        torch._foreach_copy_(parameters, stack.unbind())
        for key in keys:
            torch._foreach_copy_([one[key] for one in states], state[key].unbind())

    def _update_alone(self, parameter: Tensor, group: dict[str, Any]) -> None:
        """Update a single parameter without dividing the work among processes. If the parameter is
        sharded along two mesh dimensions, every process orthogonalises the full matrix, which is
        gathered in bf16 to halve the amount of data."""
        direction = self._direction(parameter, group)
        if is_sharded(parameter):
            direction = gather(direction.bfloat16(), parameter)
        direction = orthogonalised(direction, group["coefficients"])
        factors = self._factors(direction, parameter, group)
        direction = direction if factors is None else direction * factors
        self._apply(own_shard(shard_like(direction, parameter), parameter), parameter, group)

    def _update_copies(self, part: Sequence[_Pair]) -> None:
        """Update at most one parameter per process. All processes must have the same gradients.
        Process i orthogonalises the matrix of `part[i]`, and sends the result to the other
        processes."""
        received = []
        for owner, (parameter, group) in enumerate(part):
            direction = self._direction(parameter, group)
            if owner == self.process[0]:
                direction = orthogonalised(direction, group["coefficients"]).contiguous()
            else:
                direction = torch.empty_like(parameter, dtype=torch.bfloat16)
            received.append(direction)
        for owner, (parameter, group) in enumerate(part):
            # The results are sent in a separate loop. If they were sent in the first loop, each
            # process would wait for the results of lower ranks before computing its own, and the
            # processes would not compute in parallel.
            torch.distributed.broadcast(received[owner], owner)
            factors = self._factors(received[owner], parameter, group)
            direction = received[owner] if factors is None else received[owner] * factors
            self._apply(direction, parameter, group)

    def _update_shards(self, part: Sequence[_Pair], team: ProcessGroup) -> None:
        """Update this process's shards of at most one parameter per process. Process i receives all
        shards of `part[i]`, orthogonalises the matrix, and sends each process its shard of the
        result."""
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
        """Increase the step counter and update the momentum buffer. Return the parameter's gradient
        with Nesterov momentum or, if the parameter is sharded, this process's shard of it."""
        assert parameter.grad is not None
        state, gradient = self._state_for(parameter, group), own_shard(parameter.grad, parameter)
        average, momentum = own_shard(state["momentum_buffer"], parameter), _momentum(state, group)
        lerp_unless(self._skips, average, gradient, 1 - momentum)
        # With Nesterov momentum, the gradient of this step is added a second time.
        return gradient.lerp(average, momentum)

    def _factors(
        self,
        direction: Tensor | None,
        parameter: Tensor,
        group: dict[str, Any],
        team: ProcessGroup | None = None,
        owner: int = 0,
    ) -> Tensor | None:
        """Return the factors of NorMuon as computed by `neuron_factors`, [..., F, 1] or [..., 1, C]
        in fp32. Return None for plain Muon.

        Args:
            direction: orthogonalised direction [..., F, C]; None in processes of `team` that did
                not compute it.
            parameter: parameter whose second moment is updated.
            group: group of the parameter.
            team: process group that shares the work; None if this process computed the direction
                alone.
            owner: rank of the process in the team that computed the direction.
        """
        if group["beta2"] is None:
            return None
        second_moment = self.state[parameter]["second_moment"]
        if direction is None:
            squares = torch.empty_like(second_moment)
        else:
            squares = neuron_squares(direction, group["transposed"])
        if team is not None:
            # Every process stores the mean squares of all neurons, which are only a few values,
            # because the factors depend on their mean.
            torch.distributed.broadcast(squares, group=team, group_src=owner)
        return neuron_factors(squares, second_moment, group["beta2"], self._skips)

    def _apply(self, direction: Tensor, parameter: Tensor, group: dict[str, Any]) -> None:
        """Apply weight decay and the update to the parameter, or to this process's shard of it.

        Args:
            direction: orthogonalised direction [..., F, C], or this process's shard of it. With
                NorMuon, it has already been multiplied by NorMuon's factors.
            parameter: parameter to update.
            group: group of the parameter.
        """
        own = own_shard(parameter, parameter)
        # AdamW's updates typically have a root mean square of 0.2 times the learning rate (arXiv
        # 2502.16982). Muon's updates are scaled to the same size, so that both optimizers can use
        # the same learning rate.
        scale = 0.2
        if group["beta2"] is None:
            # An orthogonalised matrix has a root mean square of 1 / sqrt(max(F, C)). With NorMuon's
            # factors, the root mean square is already 1.
            scale *= math.sqrt(max(parameter.shape[-2:]))
        decay = group["lr"] * group["weight_decay"]
        if group["cautious"]:
            decay_cautiously(own, direction, decay, self._skips)
        else:
            own.mul_(factor_unless(self._skips, 1 - decay))
        if self._skips is not None:
            direction.masked_fill_(self._skips, 0)
        own.add_(direction, alpha=-group["lr"] * scale)

    def _state_for(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """Return the state of a parameter. The state is created if it does not exist. If the state
        has a step counter, the counter is increased."""
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            for key, (shape, dtype) in _muon_layout(parameter, None, group).items():
                if is_sharded_like(parameter, key, shape):
                    state[key] = torch.zeros_like(parameter)
                    continue
                # The counter is on the CPU, because Python code reads it (see
                # `spec.rebuild_tensors`).
                device = torch.device("cpu") if key == "step" else parameter.device
                state[key] = torch.zeros(shape, dtype=dtype, device=device)
        if "step" in state:
            state["step"] += 1
        return state


def _momentum(state: Mapping[str, Tensor], group: Mapping[str, Any]) -> float:
    """Return the momentum of this step. The step counter in `state` already includes this step."""
    if not group["warmup_steps"]:
        return float(group["momentum"])
    done = min((float(state["step"]) - 1) / group["warmup_steps"], 1.0)
    return float(group["first_momentum"] * (1 - done) + group["momentum"] * done)


class MuonConfig(OptimizerKeys):
    """Keys of Muon."""

    muon_learning_rate: float | None = Field(None, gt=0)
    """peak learning rate of Muon; null uses `learning_rate`. Muon's updates are scaled by 0.2
    sqrt(larger side) to the size of AdamW's updates (Liu et al. 2025), so Muon and AdamW can use
    the same learning rate."""
    muon_momentum: float = Field(0.95, ge=0, lt=1)
    """momentum of Muon."""
    muon_momentum_warmup_steps: int = Field(0, ge=0)
    """number of steps over which Muon's momentum increases linearly from `muon_first_momentum` to
    `muon_momentum`, because early gradients change quickly. 0 disables this warm-up; a common value
    is 300."""
    muon_first_momentum: float = Field(0.85, ge=0, lt=1)
    """Muon's momentum in the first step of a momentum warm-up."""
    muon_coefficients: MuonCoefficients = "jordan"
    """coefficients of Muon's five Newton-Schulz steps. "jordan" (Jordan et al. 2024) results in
    singular values between 0.7 and 1.2. "polar_express" (Amsel et al. 2025, arXiv 2505.16932)
    results in singular values closer to 1, at the same cost."""
    muon_beta2: float | None = Field(None, ge=0, lt=1)
    """decay rate of NorMuon's second moment (Li et al. 2025, arXiv 2510.05491). Each row of Muon's
    update is divided by the square root of a moving average of its mean square, so that all neurons
    move by similar amounts. The second moment takes 4 bytes of state per row. null uses plain Muon;
    the paper uses 0.95."""


def _muon(groups: Groups, config: Any) -> Muon:
    rate = config.peak_rate("matrix")
    # Stacks are not used on a CPU, where launching an operation is cheap and copying is expensive.
    wanted = config.implementation
    on_gpu = groups[0]["params"][0].device.type == "cuda"
    stacked = on_gpu if wanted == "auto" else wanted != "for-loop"
    return Muon(
        # All groups contain matrices, so Muon's separate learning rate applies to them.
        [{**group, "lr": rate} for group in groups],
        rate,
        config.muon_momentum,
        first_momentum=config.muon_first_momentum,
        warmup_steps=config.muon_momentum_warmup_steps,
        beta2=config.muon_beta2,
        coefficients=config.muon_coefficients,
        cautious=config.cautious_weight_decay,
        stacked=stacked,
    )


def _muon_layout(parameter: Tensor, _: Any, group: Mapping[str, Any]) -> Layout:
    layout = momentum_layout(parameter)
    if group["beta2"] is not None:
        *stack, rows, columns = parameter.shape
        neurons = (1, columns) if group["transposed"] else (rows, 1)
        layout["second_moment"] = ((*stack, *neurons), torch.float32)
    # The counter exists only with a momentum warm-up. Without a warm-up, the state is the same as
    # in torch.optim.Muon.
    if group["warmup_steps"]:
        layout["step"] = ((), torch.float32)
    return layout


def _is_matrix_of_a_layer(name: str, parameter: Tensor) -> bool:
    """Return True if a parameter is a matrix, or a stack of matrices, in a numbered layer
    (`model.layers.3...`, `h.3...`)."""
    # The biases of experts are stacked as [E, F], and a depthwise convolution has only a few
    # weights per channel. Neither is a matrix, although they have two and three dimensions.
    is_matrix = parameter.dim() in (2, 3) and not name.endswith(("bias", "conv1d.weight"))
    return is_matrix and any(part.isdigit() for part in name.split("."))


MUON = OptimizerSpec(
    _muon,
    _muon_layout,
    elementwise=False,
    gathers=True,
    # "betas" apply to AdamW, which updates the parameters that Muon does not update.
    options=("betas", "cautious_weight_decay", "tuned_width"),
    takes=_is_matrix_of_a_layer,
)

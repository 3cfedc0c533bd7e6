"""Code shared by all optimizers: the class that specifies an optimizer, base classes, and cautious
weight decay.

The table of all optimizers is in `config.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from pydantic import Field
from torch import Tensor, nn

from firstlight.section import Section

_P = TypeVar("_P", bound=Tensor)

Implementation = Literal["auto", "for-loop", "foreach", "fused"]

#: Shape and dtype of each tensor in the state of a parameter, keyed by tensor name.
Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]


#: torch's parameter groups, as created by `config.parameter_groups`.
Groups = list[dict[str, Any]]


class OptimizerKeys(Section):
    """Keys of the `optimizer` section that apply to every optimizer. The classes with the keys of
    individual optimizers derive from this class."""

    name: str = "adamw"
    implementation: Implementation = "auto"
    """implementation of torch's AdamW (including the AdamW that is used with Muon) and SGD: "fused"
    is a single kernel that reads and writes each value once (an update is limited by memory
    bandwidth, not by arithmetic). "foreach" is one kernel per operation for all parameters, with
    temporary copies as large as the parameters. "for-loop" updates one parameter at a time; without
    fused kernels, it needs the least memory, but it is the slowest on GPUs. "auto" is fused if the
    device supports it, otherwise foreach. Adafactor and Lion do not have a fused kernel. For these
    two, "auto" is for-loop, because foreach would need as much memory as they save. On a GPU, small
    parameters with up to 8 million values in total are still updated together. With "foreach",
    "fused", and "auto" on a GPU, Muon updates small matrices of the same size together. All
    implementations give the same results up to rounding."""
    learning_rate: float = Field(1e-3, gt=0)
    """peak learning rate of all parameters that Muon does not update. `embedding_lr_multiple`,
    `head_lr_multiple` and `vector_lr_multiple` set multiples of this rate for some of these
    parameters."""


def momentum_layout(parameter: Tensor, *_: Any) -> Layout:
    """Return the state layout of SGD and plain Muon: one moment with the shape and dtype of the
    parameter."""
    return {"momentum_buffer": (tuple(parameter.shape), parameter.dtype)}


def is_sharded_like(parameter: Tensor, key: str, shape: Sequence[int]) -> bool:
    """Return True if a tensor in the state of a parameter is sharded in the same way as the
    parameter.

    Args:
        parameter: parameter to which the state belongs.
        key: name of the tensor in the layout of the state.
        shape: shape of the full tensor.
    """
    # The second moment of NorMuon is never sharded. It can't be recognised by its shape: for a
    # matrix [F, 1], such as LoRA's B with rank 1, the second moment has the same shape as the
    # parameter.
    return key != "second_moment" and tuple(shape) == tuple(parameter.shape)


def lerp_unless(skips: Tensor | None, average: Tensor, value: Tensor, weight: float) -> None:
    """Run `average.lerp_(value, weight)` unless `skips`, bool [], is true. In that case, `average`
    keeps its value bit for bit, even if `value` is not finite. If `skips` is None, `average` is
    always updated."""
    if skips is None:
        average.lerp_(value, weight)
    else:
        torch.where(skips, average, average.lerp(value, weight), out=average)


def factor_unless(skips: Tensor | None, factor: float) -> float | Tensor:
    """Return the factor by which a tensor is multiplied in an update that can be skipped. If
    `skips`, bool [], is None, this is `factor`. Otherwise, it is an fp32 tensor [] that is 1 if
    `skips` is true, and `factor` if `skips` is false."""
    return factor if skips is None else torch.where(skips, 1.0, factor)


def decay_cautiously(
    parameter: Tensor, direction: Tensor, amount: float, skips: Tensor | None = None
) -> None:
    """Apply weight decay only to values that the update itself moves towards zero (cautious weight
    decay, Chen et al. 2025, arXiv 2510.12402).

        x = x - amount x   where direction x >= 0

    Args:
        parameter: values before the step, which are modified in place.
        direction: tensor with the shape of the parameter and the sign of the update. The step
            subtracts the update from the parameter.
        amount: learning rate times weight decay.
        skips: bool [], true to skip the decay; None to apply it.
    """
    if amount:
        decays = direction * parameter >= 0
        if skips is not None:
            decays.masked_fill_(skips, False)
        parameter.mul_(1 - amount * decays)


#: Maximum number of parameter values updated together on a GPU. Their temporary copies take at most
#: 32 MiB. Larger parameters are updated one at a time, because a single such update keeps a GPU
#: busy.
LIST_VALUES = 1 << 23


def list_values(parameter: Tensor) -> int:
    """Return the `most_values` to pass to `in_lists` for a device. On a GPU, small parameters are
    updated together, because launching the update of a small parameter takes longer than computing
    it. On all other devices, parameters are updated one by one."""
    return LIST_VALUES if parameter.is_cuda else 0


def in_lists(parameters: Iterable[_P], most_values: float) -> Iterator[list[_P]]:
    """Divide parameters, in order, into lists with a total of at most `most_values` elements each.
    A parameter with more elements than that is placed in a separate list."""
    found: list[_P] = []
    values = 0
    for parameter in parameters:
        values += parameter.numel()
        if found and values > most_values:
            yield found
            found, values = [], parameter.numel()
        found.append(parameter)
    if found:
        yield found


class ForeachOptimizer(torch.optim.Optimizer):
    """Base class of optimizers that implement their update for lists of parameters.

    A group with `foreach` is updated as a single list. This requires few kernel launches, but needs
    temporary copies as large as all parameters of the group. Other groups are divided into lists by
    `in_lists`.

    Attributes:
        found_inf: fp32 [], 1 to skip updates; None to always update (see `skips`).
    """

    found_inf: Tensor | None = None

    @property
    def skips(self) -> Tensor | None:
        """True if `found_inf` is 1, as bool [] on the device of the parameters. In that case, the
        update does not change any parameters or moments, but it still increases the step counters
        on the host. None if parameters are always updated."""
        return None if self.found_inf is None else self.found_inf > 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters that have a gradient."""
        for group in self.param_groups:
            found = [p for p in group["params"] if p.grad is not None]
            most = math.inf if group["foreach"] or not found else list_values(found[0])
            for part in in_lists(found, most):
                self.update(part, group)

    def update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """Update one or more parameters of a group. The parameters can have any shapes, and all of
        them have gradients."""
        raise NotImplementedError


def takes_all(name: str, parameter: Tensor) -> bool:
    """Return True for every parameter. This function is the default of `OptimizerSpec.takes`."""
    return True


def rebuild_tensors(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, tensors: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Copy the state of a parameter to the devices on which torch's optimizers store it. This
    function is the default of `OptimizerSpec.rebuild`."""
    fused = bool(optimizer.defaults.get("fused"))
    # A fused kernel reads the step counter on the device of the parameter. All other optimizers
    # read it in Python. Their counter is stored on the CPU, because Python would otherwise have to
    # wait for the GPU.
    return {
        key: tensor.to("cpu" if key == "step" and not fused else parameter.device, copy=True)
        for key, tensor in tensors.items()
    }


@dataclass(frozen=True)
class OptimizerSpec:
    """Specification of an optimizer: how it is created, the layout of its state, and its
    limitations.

    The functions receive the recipe's `optimizer` section, an `OptimizerConfig`, which is annotated
    as `Any` because this module can't import the class.

    Attributes:
        make: function that creates the torch optimizer from the parameter groups (at least one) and
            the section.
        layout: function that returns the layout of a parameter's state after the first step. Its
            arguments are the parameter, the section and the parameter's torch group. Because the
            state itself is not needed, memory and disk space can be computed before the first step.
        elementwise: True if the update of each value depends only on the gradient and state of that
            value. A process can then update its shard of a parameter without the other shards.
        gathers: True if the optimizer can update DTensors by gathering the required data from other
            processes.
        implementations: supported values of `optimizer.implementation`.
        options: keys of the section that this optimizer supports but some other optimizers do not.
        takes: function that receives the name of a parameter and the parameter. It returns True if
            this optimizer updates the parameter. AdamW updates all other parameters.
        flatten: function that returns the state of a parameter as plain tensors, which can share
            memory with the state.
        rebuild: function that creates the state of a parameter from copies of the tensors that
            `flatten` returned.
    """

    make: Callable[[Groups, Any], torch.optim.Optimizer]
    layout: Callable[[Tensor, Any, Mapping[str, Any]], Layout]
    elementwise: bool
    gathers: bool = False
    implementations: tuple[str, ...] = ("auto", "for-loop", "foreach", "fused")
    options: tuple[str, ...] = ()
    takes: Callable[[str, Tensor], bool] = takes_all
    flatten: Callable[[Mapping[str, Any]], dict[str, Tensor]] = dict
    rebuild: Callable[
        [torch.optim.Optimizer, nn.Parameter, Mapping[str, Tensor]], dict[str, Any]
    ] = rebuild_tensors

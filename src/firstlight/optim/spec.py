"""Code shared by the optimizers: the description of an optimizer, base classes, and cautious weight
decay.

`config.py` has the table of all optimizers.
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

#: Shape and dtype of each tensor in a parameter's state, by tensor name.
Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]


#: torch's parameter groups, as `config.parameter_groups` creates them.
Groups = list[dict[str, Any]]


class OptimizerKeys(Section):
    """Keys of the `optimizer` section that every optimizer reads. Base of the classes with the keys
    of a single optimizer."""

    name: str = "adamw"
    implementation: Implementation = "auto"
    """implementation of AdamW (including Muon's AdamW) and SGD in torch: "fused", one kernel that
    reads and writes each value once (an update is limited by memory bandwidth, not arithmetic);
    "foreach", one kernel per operation over all parameters, with temporary copies as large as the
    parameters; "for-loop", one parameter at a time, which needs the least memory without fused
    kernels but is the slowest on GPUs. "auto" is fused if the device supports it, otherwise
    foreach. For Adafactor and Lion, which do not have a fused kernel, "auto" is for-loop, because
    foreach uses as much memory as they save; on a GPU, small parameters of up to 8 million values
    together are still updated at once. Muon itself updates small matrices of one size together with
    "foreach" and "fused", and with "auto" on a GPU. All implementations give the same results up to
    rounding."""
    learning_rate: float = Field(1e-3, gt=0)
    """peak learning rate of all parameters that Muon does not update; `embedding_lr_multiple`,
    `head_lr_multiple` and `vector_lr_multiple` set multiples of it for some of them."""


def momentum_layout(parameter: Tensor, *_: Any) -> Layout:
    """Return the layout of SGD and plain Muon: one moment with the parameter's shape and dtype."""
    return {"momentum_buffer": (tuple(parameter.shape), parameter.dtype)}


def is_sharded_like(parameter: Tensor, key: str, shape: Sequence[int]) -> bool:
    """Return True if a tensor of a parameter's state is sharded in the same way as the parameter.

    Args:
        parameter: the parameter.
        key: name of the tensor in the state's layout.
        shape: shape of the full tensor.
    """
    # Every process holds the complete second moment of NorMuon. The shape alone does not show this:
    # for a matrix [F, 1], such as LoRA's B of rank 1, the second moment has the parameter's shape.
    return key != "second_moment" and tuple(shape) == tuple(parameter.shape)


def lerp_unless(skips: Tensor | None, average: Tensor, value: Tensor, weight: float) -> None:
    """Run `average.lerp_(value, weight)`, but leave `average` bit-identical if `skips`, bool [], is
    true, even if `value` is not finite. With `skips` None, always update."""
    if skips is None:
        average.lerp_(value, weight)
    else:
        torch.where(skips, average, average.lerp(value, weight), out=average)


def factor_unless(skips: Tensor | None, factor: float) -> float | Tensor:
    """Return `factor`, or with `skips`, bool [], an fp32 tensor [] that is 1 where `skips` is
    true."""
    return factor if skips is None else torch.where(skips, 1.0, factor)


def decay_cautiously(
    parameter: Tensor, direction: Tensor, amount: float, skips: Tensor | None = None
) -> None:
    """Apply weight decay only to values that the update also moves towards zero (cautious weight
    decay; Chen et al. 2025, arXiv 2510.12402).

        x = x - amount x   where direction x >= 0

    Args:
        parameter: values before the step, changed in place.
        direction: tensor of the parameter's shape with the signs of the update, which the step
            subtracts from the parameter.
        amount: learning rate times weight decay.
        skips: bool [], true to change nothing; None to apply the decay.
    """
    if amount:
        decays = direction * parameter >= 0
        if skips is not None:
            decays.masked_fill_(skips, False)
        parameter.mul_(1 - amount * decays)


#: Maximum number of parameter values that are updated together on a GPU, with temporary copies of
#: up to 32 MiB. The update of a larger parameter keeps a GPU busy by itself.
LIST_VALUES = 1 << 23


def list_values(parameter: Tensor) -> int:
    """Return `most_values` for `in_lists`. On a GPU, launching the update of a small parameter
    takes longer than computing it; on other devices, parameters are updated one by one."""
    return LIST_VALUES if parameter.is_cuda else 0


def in_lists(parameters: Iterable[_P], most_values: float) -> Iterator[list[_P]]:
    """Group parameters into consecutive lists of at most `most_values` elements in total. A larger
    parameter gets its own list."""
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
    """Base class of optimizers whose update is written for lists of parameters.

    A group with `foreach` is updated in a single list, which takes few kernels but temporary copies
    as large as the group's parameters. Other groups are divided by `in_lists`.

    Attributes:
        found_inf: see `skips`.
    """

    found_inf: Tensor | None = None

    @property
    def skips(self) -> Tensor | None:
        """Bool [] on the parameters' device, true if `found_inf` is 1: the update then leaves all
        parameters and moments unchanged, but increases counters on the host. None means always
        update."""
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
        """Update one or more parameters of a group, of any shapes, all of which have gradients."""
        raise NotImplementedError


def takes_all(name: str, parameter: Tensor) -> bool:
    """Return True for every parameter. Default of `OptimizerSpec.takes`."""
    return True


def rebuild_tensors(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, tensors: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Copy a parameter's state to the devices where torch's optimizers keep it (default of
    `OptimizerSpec.rebuild`)."""
    fused = bool(optimizer.defaults.get("fused"))
    # A fused kernel reads the step counter on the parameter's device. Other optimizers read it in
    # Python, which would have to wait for a GPU.
    return {
        key: tensor.to("cpu" if key == "step" and not fused else parameter.device, copy=True)
        for key, tensor in tensors.items()
    }


@dataclass(frozen=True)
class OptimizerSpec:
    """One optimizer: how to create it, the layout of its state, and its limits.

    Functions receive the recipe's section, an `OptimizerConfig`, which this module can't import.

    Attributes:
        make: function that creates the torch optimizer from parameter groups (at least one) and the
            section.
        layout: function that returns the layout of a parameter's state after a step, from the
            parameter, the section and the parameter's torch group. No state is needed, so that
            memory and disk space are known before the first step.
        elementwise: True if each value is updated only from its own gradient and state; a process
            can then update its shard of a parameter without the other shards.
        gathers: True if the optimizer updates DTensors and gathers the data of other processes that
            the update needs.
        implementations: supported values of `optimizer.implementation`.
        options: keys of the section that this optimizer supports and some others do not.
        takes: function that returns, from a parameter's name and shape, whether this optimizer
            updates it; AdamW updates the rest.
        flatten: function that returns a parameter's state as plain tensors, which may share memory
            with the state.
        rebuild: function that creates a parameter's state from such tensors, which are copied.
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

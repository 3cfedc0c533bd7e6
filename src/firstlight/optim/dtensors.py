"""Sharded parameters: torch's DTensors, of which each process holds a shard."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: Tensor | None) -> TypeGuard[DTensor]:
    """Whether the tensor is a DTensor, of which this process holds its shard only."""
    # Importing the module takes most of a second; no DTensor can exist before it is imported.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def full_tensor(tensor: Tensor) -> Tensor:
    """The full tensor of a DTensor, on every rank; any other tensor unchanged.

    A collective: every rank has to call it.
    """
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def own_shard(tensor: Tensor, parameter: Tensor) -> Tensor:
    """This process' shard of a tensor that has a parameter's shape and belongs to it, as a plain
    tensor: elementwise updates need no operators on DTensors. The tensor itself where there are no
    shards."""
    if not is_sharded(tensor) or not is_sharded(parameter):
        return tensor
    # Tensor parallelism gives the gradient of a shard's table whole.
    return tensor.redistribute(placements=parameter.placements).to_local()


def gather(shard: Tensor, parameter: Tensor) -> Tensor:
    """The full tensor of which every process has the shard that it has of a parameter.

    A collective where the parameter is sharded: every rank has to call it. `shard` may have another
    dtype than the parameter; where nothing is sharded, it is the full tensor itself.
    """
    if not is_sharded(parameter):
        return shard
    from torch.distributed.tensor import DTensor

    # Shape and stride are given: rows need not come out even.
    return DTensor.from_local(
        shard,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    ).full_tensor()


def shard_like(tensor: Tensor, example: Tensor) -> Tensor:
    """A full tensor that every rank has, sharded like `example`; the tensor itself where `example`
    is not sharded, or has another shape.

    Args:
        tensor: the full tensor, the same values on every rank.
        example: a tensor whose mesh and placements are copied.
    """
    if not is_sharded(example) or tensor.shape != example.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    tensor = tensor.to(example.to_local().device)
    # Every rank has the same values: nothing is sent.
    return distribute_tensor(tensor, example.device_mesh, example.placements, src_data_rank=None)


@contextlib.contextmanager
def full_parameters(
    model: nn.Module, *, changed: bool = False, keep: bool = True
) -> Iterator[None]:
    """A context in which sharded parameters are full tensors on the CPU of every rank, for reading
    and writing, not for computing. A collective: every rank has to enter it.

    Args:
        model: the model, whose modules get the full parameters for the duration.
        changed: True writes the values set inside back into the shards.
        keep: False only takes part in the gathering, one parameter after the other: this rank's
            parameters stay sharded.
    """
    assert keep or not changed
    owners = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if is_sharded(parameter)
    ]
    # A tied weight is one parameter of two modules, and has to stay one.
    full: dict[int, nn.Parameter | None] = {}
    try:
        for module, name, parameter in owners:
            if id(parameter) not in full:
                gathered = full_tensor(parameter.detach())
                full[id(parameter)] = (
                    nn.Parameter(gathered.cpu(), parameter.requires_grad) if keep else None
                )
            if keep:
                module._parameters[name] = full[id(parameter)]
        yield
    finally:
        for module, name, parameter in owners:
            module._parameters[name] = parameter  # type: ignore[assignment]
    if changed:
        with torch.no_grad():
            for _, _, parameter in owners:
                written = full[id(parameter)]
                assert written is not None
                shard = shard_like(written.detach(), parameter)
                assert is_sharded(shard)
                parameter.to_local().copy_(shard.to_local())

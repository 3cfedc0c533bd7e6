"""Functions for working with parameters sharded over processes as torch DTensors."""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: Tensor | None) -> TypeGuard[DTensor]:
    """Return True if the tensor is a DTensor, which means that this process has one shard of it."""
    # DTensor is not imported here, because the import takes most of a second. If the module has not
    # been imported, there are no DTensors.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor of a DTensor of any shape, on every rank. Return any other tensor
    unchanged.

    This is a collective operation, which every rank must call.
    """
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def own_shard(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Return this process's shard of a tensor that has the same shape as a parameter. The shard is
    a plain tensor. If the tensor or the parameter is not sharded, return the tensor itself.

    The tensor can be the parameter itself, its gradient or a moment. Elementwise updates use plain
    shards to avoid the overhead of DTensor operators.
    """
    if not is_sharded(tensor) or not is_sharded(parameter):
        return tensor
    # With tensor parallelism, the gradient of a sharded embedding is replicated on all processes.
    return tensor.redistribute(placements=parameter.placements).to_local()


def gather(shard: Tensor, parameter: Tensor) -> Tensor:
    """Gather a full tensor from its shards. The tensor has the same shape as a parameter and is
    sharded in the same way.

    If the parameter is sharded, this is a collective operation, which every rank must call.

    Args:
        shard: this process's shard of the tensor, in any dtype. If the parameter is not sharded, it
            is the full tensor.
        parameter: parameter that has the mesh, the placements and the shape of the full tensor.
    """
    if not is_sharded(parameter):
        return shard
    from torch.distributed.tensor import DTensor

    # torch can't infer the shape and the strides from a single shard, because the last shards can
    # be shorter.
    return DTensor.from_local(
        shard,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    ).full_tensor()


def shard_like(tensor: Tensor, example: Tensor) -> Tensor:
    """Shard a full tensor in the same way as `example`. Every rank has the full tensor. Return the
    tensor itself if `example` is not sharded or has a different shape.

    Args:
        tensor: full tensor with the same values on every rank.
        example: tensor with the mesh and the placements to use.
    """
    if not is_sharded(example) or tensor.shape != example.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    tensor = tensor.to(example.to_local().device)
    # Every rank has the same values, so no data is sent.
    return distribute_tensor(tensor, example.device_mesh, example.placements, src_data_rank=None)


def shard_group(parameter: Tensor) -> ProcessGroup | None:
    """Return the process group over which a parameter is sharded. Return None if the parameter is
    not sharded, or if it is sharded along two dimensions of its mesh (FSDP2 over tensor-parallel
    shards)."""
    if not is_sharded(parameter):
        return None
    cut = [n for n, placed in enumerate(parameter.placements) if not placed.is_replicate()]
    return parameter.device_mesh.get_group(cut[0]) if len(cut) == 1 else None


def gather_each(shards: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor | None:
    """Gather one full tensor per process. Process i of the `shard_group` receives the full tensor
    for `parameters[i]`, and a process without a parameter receives None.

    This is a collective operation. All n processes together receive as much data as a single
    process would receive in n calls to `gather`.

    Args:
        shards: for each parameter, this process's shard of a tensor that has the shape of the
            parameter. All shards have the same dtype.
        parameters: parameters with the same `shard_group`, at most one for each process of the
            group.
    """
    group = shard_group(parameters[0])
    assert group is not None
    rank, processes = group.rank(), group.size()
    axes = [_axis(parameter) for parameter in parameters]
    # The sharded axis is moved to the front, so that concatenating the received shards of a tensor
    # restores the tensor.
    rows = [shard.movedim(axis, 0).flatten() for shard, axis in zip(shards, axes, strict=True)]
    counts = [len(row) for row in rows] + [0] * (processes - len(rows))
    if rank >= len(parameters):
        _all_to_all(torch.cat(rows), counts, [0] * processes, group)
        return None
    parameter, axis = parameters[rank], axes[rank]
    lengths = _lengths(parameter.shape[axis], processes)
    rest = parameter.shape[:axis] + parameter.shape[axis + 1 :]
    width = math.prod(rest)
    received = _all_to_all(torch.cat(rows), counts, [n * width for n in lengths], group)
    return received.view(-1, *rest).movedim(0, axis)


def scatter_each(
    full: Tensor | None, parameters: Sequence[Tensor], dtype: torch.dtype
) -> list[Tensor]:
    """Scatter one full tensor per process. This is the inverse of `gather_each` and is also a
    collective operation.

    Process i of the `shard_group` has the full tensor for `parameters[i]`. The result contains this
    process's shard of the tensor for each parameter.

    Args:
        full: full tensor for this process's parameter, with the shape of the parameter; None for a
            process without a parameter.
        parameters: one parameter per process (see `gather_each`).
        dtype: dtype of the full tensors. It is an argument because a process without a full tensor
            can't infer it.
    """
    group = shard_group(parameters[0])
    assert group is not None
    rank, processes = group.rank(), group.size()
    axes, given = [_axis(parameter) for parameter in parameters], [0] * processes
    sent = torch.empty(0, dtype=dtype, device=own_shard(parameters[0], parameters[0]).device)
    if full is not None:
        axis = axes[rank]
        width = full.numel() // full.shape[axis]
        given = [n * width for n in _lengths(full.shape[axis], processes)]
        sent = full.movedim(axis, 0).flatten()
    shapes = []
    for parameter, axis in zip(parameters, axes, strict=True):
        own = own_shard(parameter, parameter).shape
        shapes.append((own[axis], *own[:axis], *own[axis + 1 :]))
    counts = [math.prod(shape) for shape in shapes]
    received = _all_to_all(sent, given, counts + [0] * (processes - len(counts)), group)
    starts = itertools.accumulate(counts, initial=0)
    return [
        received.narrow(0, start, count).view(shape).movedim(0, axis)
        for start, count, shape, axis in zip(starts, counts, shapes, axes, strict=False)
    ]


def own_part(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Return the part of a full tensor that belongs to this process's shard of a parameter. If the
    parameter is not sharded, or if the tensor has length 1 along the sharded axis, return the
    tensor itself.

    Args:
        tensor: tensor with the same values on every process. Along each axis, it is either as long
            as the parameter or has length 1.
        parameter: parameter that has a `shard_group`, or that is not sharded.
    """
    if not is_sharded(parameter) or tensor.shape[_axis(parameter)] == 1:
        return tensor
    group, axis = shard_group(parameter), _axis(parameter)
    assert group is not None
    lengths = _lengths(parameter.shape[axis], group.size())
    return tensor.narrow(axis, sum(lengths[: group.rank()]), lengths[group.rank()])


def _axis(parameter: Tensor) -> int:
    """Return the axis along which a parameter with a `shard_group` is sharded."""
    from torch.distributed.tensor import Shard

    assert is_sharded(parameter)
    axes = [placed.dim for placed in parameter.placements if isinstance(placed, Shard)]
    return axes[0]


def _lengths(length: int, processes: int) -> list[int]:
    """Return the lengths of the shards into which torch's `Shard` divides an axis. The last shards
    can be shorter or empty."""
    most = -(-length // processes)
    return [min(most, max(length - rank * most, 0)) for rank in range(processes)]


def _all_to_all(sent: Tensor, given: list[int], taken: list[int], group: ProcessGroup) -> Tensor:
    """Exchange values with the other processes in a group.

    `sent` has the shape [sum(given)], and `given[i]` of its values are sent to process i. The
    result has the shape [sum(taken)], and `taken[i]` of its values are received from process i. In
    both tensors, the values are ordered by rank.
    """
    received = sent.new_empty(sum(taken))
    torch.distributed.all_to_all_single(received, sent, taken, given, group=group)
    return received


@contextlib.contextmanager
def full_parameters(
    model: nn.Module, *, changed: bool = False, keep: bool = True
) -> Iterator[None]:
    """Replace sharded parameters with full tensors on the CPU of every rank within the context. The
    full tensors can be read and written, but not used for computing. This is a collective
    operation, which every rank must enter.

    Args:
        model: model whose modules contain the full parameters within the context.
        changed: True to write the values back to the shards when the context exits.
        keep: False for a rank that only participates in the collective operations. The parameters
            of this rank stay sharded, which saves the memory of the full model.
    """
    assert keep or not changed
    owners = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if is_sharded(parameter)
    ]
    # A tied weight is a single parameter that two modules share. It must remain a single parameter.
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

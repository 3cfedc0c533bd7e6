"""Exchanges between processes. In a world of one, each function returns its argument.

All ranks have to call each function, in the same order. Objects are sent as JSON, not as pickles,
which could run code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def _is_alone() -> bool:
    return not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1


def all_reduce_sum(tensor: Tensor) -> Tensor:
    """Add a tensor up over all ranks, in place, and return it.

    Args:
        tensor: a tensor with the same shape, dtype and kind of device on all ranks.
    """
    if not _is_alone():
        dist.all_reduce(tensor)
    return tensor


def agree(flag: bool) -> bool:
    """Whether the flag is set on any rank; the same answer on all."""
    if _is_alone():
        return flag
    flags = torch.tensor([int(flag)], dtype=torch.uint8)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    return bool(flags.item())


def barrier() -> None:
    """Return when all ranks have called it."""
    # On the CPU, also where tensors are on GPUs: no rank waits for its kernels.
    agree(False)


def broadcast_object(value: Any) -> Any:
    """Rank 0's value, on all ranks.

    Args:
        value: a JSON value; tuples become lists. The values of other ranks are ignored.
    """
    if _is_alone():
        return value
    data = _encoded(value) if dist.get_rank() == 0 else torch.empty(0, dtype=torch.uint8)
    count = torch.tensor([data.numel()])
    dist.broadcast(count, 0)
    if dist.get_rank() != 0:
        data = torch.empty(int(count.item()), dtype=torch.uint8)
    dist.broadcast(data, 0)
    return _decoded(data)


def gather_objects(value: Any) -> list[Any]:
    """Every rank's value, in the order of ranks, on all ranks.

    Args:
        value: a JSON value; tuples become lists.
    """
    if _is_alone():
        return [value]
    data = _encoded(value)
    # all_gather needs one size on all ranks: lengths are exchanged first, and rows padded.
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, torch.tensor([data.numel()]))
    largest = max(int(count.item()) for count in counts)
    padded = torch.zeros(largest, dtype=torch.uint8)
    padded[: data.numel()] = data
    rows = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(rows, padded)
    return [_decoded(row[: int(count.item())]) for row, count in zip(rows, counts, strict=True)]


def _encoded(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decoded(data: Tensor) -> Any:
    return json.loads(data.numpy().tobytes())


def gather_to_main(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of all ranks in rank 0; in others their own.

    Args:
        tensors: tensors on the CPU by name; each name is on one rank only.
    """
    own = [
        (name, list(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in tensors.items()
    ]
    described = gather_objects(own)
    found = dict(tensors)
    # Sends and receives pair up by their order, which the descriptions have told.
    if dist.get_rank() != 0:
        for tensor in tensors.values():
            dist.send(tensor.contiguous(), 0)
        return found
    for rank, theirs in enumerate(described[1:], start=1):
        for name, shape, dtype in theirs:
            assert name not in found
            found[name] = torch.empty(shape, dtype=getattr(torch, dtype))
            dist.recv(found[name], rank)
    return found

"""Tensors of which each process holds a piece (torch's DTensor), and their whole."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_in_pieces(tensor: Tensor | None) -> TypeGuard[DTensor]:
    """Whether each process holds a piece of the tensor only."""
    # Importing it takes most of a second: where it was not, there are none.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor that is in pieces, on every rank; any other tensor as it is.

    All ranks have to call it.
    """
    return tensor.full_tensor() if is_in_pieces(tensor) else tensor


def piece_like(tensor: Tensor, example: Tensor) -> Tensor:
    """This rank's piece of a whole tensor that is on every rank, cut as `example` is; the tensor
    itself where that is not in pieces, or of another shape.

    Args:
        tensor: the whole.
        example: of the same shape, in pieces.
    """
    if not is_in_pieces(example) or tensor.shape != example.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    tensor = tensor.to(example.to_local().device)
    # Every rank has the same values: nothing is sent.
    return distribute_tensor(tensor, example.device_mesh, example.placements, src_data_rank=None)


@contextlib.contextmanager
def whole_parameters(
    model: nn.Module, *, changed: bool = False, keep: bool = True
) -> Iterator[None]:
    """Inside, parameters that are in pieces are whole, on the CPU of every rank, for reading and
    for writing, not for computing.

    All ranks have to call it.

    Args:
        changed: what was written inside is cut and put back.
        keep: False only takes part in gathering, one parameter after the other: this rank's
            parameters stay in pieces.
    """
    assert keep or not changed
    places = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if is_in_pieces(parameter)
    ]
    # A tied weight is one parameter in two places, and has to stay one.
    wholes: dict[int, nn.Parameter | None] = {}
    try:
        for module, name, parameter in places:
            if id(parameter) not in wholes:
                gathered = whole(parameter.detach())
                wholes[id(parameter)] = (
                    nn.Parameter(gathered.cpu(), parameter.requires_grad) if keep else None
                )
            if keep:
                module._parameters[name] = wholes[id(parameter)]
        yield
    finally:
        for module, name, parameter in places:
            module._parameters[name] = parameter  # type: ignore[assignment]
    if changed:
        with torch.no_grad():
            for _, _, parameter in places:
                written = wholes[id(parameter)]
                assert written is not None
                piece = piece_like(written.detach(), parameter)
                assert is_in_pieces(piece)
                parameter.to_local().copy_(piece.to_local())

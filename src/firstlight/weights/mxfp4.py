"""Experts that are stored in MXFP4 (Open Compute Project 2023, "OCP Microscaling Formats (MX)
Specification"), read as bf16: numbers of 4 bits (E2M1), of which 32 share a scale (E8M0).

gpt-oss' files have in place of a stack of matrices, `NAME`, two tensors of bytes: `NAME_blocks`
[E, out, in / 32, 16], two numbers a byte, the first in its lower half, and `NAME_scales`
[E, out, in / 32]. The model has the stack as [E, in, out].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from firstlight.errors import ModelError
from firstlight.weights.stored import StoredTensor, open_mapped

_BLOCKS, _SCALES = "_blocks", "_scales"

#: A block's numbers, two a byte.
_BLOCK_BYTES = 16

#: E2M1: a sign, two bits of exponent, one of mantissa.
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class PackedTensor:
    """A stack of matrices that a file has in MXFP4; see `StoredTensor`.

    Attributes:
        blocks: numbers, uint8 [E, out, in / 32, 16].
        scales: exponents of the blocks' scales, plus 127, uint8 [E, out, in / 32].
    """

    blocks: StoredTensor
    scales: StoredTensor

    @property
    def kind(self) -> str:
        """The number format after unpacking."""
        return "BF16"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype after unpacking."""
        return torch.bfloat16

    @property
    def shape(self) -> tuple[int, ...]:
        """Its sizes in the model, [E, in, out]."""
        experts, rows, blocks, count = self.blocks.shape
        return experts, blocks * 2 * count, rows

    def has_values_of(self, other: object) -> bool:
        """No head is packed."""
        return False

    def read_into(self, target: Tensor) -> None:
        """Copy its values into a tensor [E, in, out] of any dtype, on any device.

        Raises:
            ModelError: a file can't be read, is shorter than its header says, or was replaced.
        """
        # An expert at a time: the bytes and the numbers of all would double the model's memory.
        for number, place in enumerate(target.detach()):
            parts = (_matrix_of(tensor, number) for tensor in (self.blocks, self.scales))
            place.copy_(unpack_mxfp4(*parts).T)

    def read(self) -> Tensor:
        """Its values, bf16 [E, in, out], on the CPU.

        Raises:
            ModelError: as `read_into`.
        """
        result = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        self.read_into(result)
        return result


AnyStored = StoredTensor | PackedTensor


def _matrix_of(stored: StoredTensor, expert: int) -> Tensor:
    size = torch.Size(stored.shape[1:]).numel()
    own = dataclasses.replace(stored, shape=stored.shape[1:], offset=stored.offset + expert * size)
    result = torch.empty(own.shape, dtype=torch.uint8, device="cpu")
    own.read_into(result)
    return result


def unpack_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """The values of MXFP4 blocks (OCP Microscaling Formats 1.0) in bf16, [..., in].

    Args:
        blocks: two E2M1 values a byte, the low four bits first, uint8 [..., in / 32, 16].
        scales: exponents of the blocks' scales, plus 127, uint8 [..., in / 32].
    """
    values = torch.tensor(_VALUES, dtype=torch.bfloat16)
    values = torch.cat((values, -values))
    every = torch.arange(256)
    # One look-up gives both bf16 values of a byte, as one int32.
    pairs = torch.stack((values[every & 15], values[every >> 4]), dim=1).view(torch.int32).flatten()
    numbers = pairs.index_select(0, blocks.flatten().int()).view(torch.bfloat16)
    numbers = numbers.view(*scales.shape, -1)
    # Not a product with the scale: 2^128 is beyond bf16, though a value times it may not be.
    return torch.ldexp(numbers, scales.int()[..., None] - 127, out=numbers).flatten(-2)


def with_packed(stored: Mapping[str, StoredTensor]) -> dict[str, AnyStored]:
    """The tensors of a folder, in which each pair of blocks and scales is one tensor.

    Raises:
        ModelError: a pair's sizes or formats don't fit (named).
    """
    found: dict[str, AnyStored] = {}
    for name, tensor in stored.items():
        own = name.removesuffix(_BLOCKS).removesuffix(_SCALES)
        blocks, scales = stored.get(own + _BLOCKS), stored.get(own + _SCALES)
        if own == name or blocks is None or scales is None:
            found[name] = tensor
            continue
        is_stack = len(blocks.shape) == 4 and blocks.shape[-1] == _BLOCK_BYTES
        if not is_stack or scales.shape != blocks.shape[:-1]:
            raise ModelError(
                f"{blocks.path}: {own}{_BLOCKS} is {list(blocks.shape)} and {own}{_SCALES} "
                f"{list(scales.shape)}: MXFP4 has [E, out, in / 32, {_BLOCK_BYTES}] and "
                "[E, out, in / 32]"
            )
        if (blocks.kind, scales.kind) != ("U8", "U8"):
            raise ModelError(f"{blocks.path}: {own}{_BLOCKS} and {own}{_SCALES} are not uint8")
        found[own] = PackedTensor(blocks, scales)
    return found


def open_tensors(stored: Mapping[str, AnyStored]) -> dict[str, Tensor]:
    """The tensors by the names given: the files, mapped into memory, but packed ones in memory.

    Raises:
        ModelError: a file can't be read, or is not the one whose header was read.
    """
    mapped = open_mapped({n: t for n, t in stored.items() if isinstance(t, StoredTensor)})
    packed = {n: t.read() for n, t in stored.items() if isinstance(t, PackedTensor)}
    return {name: packed[name] if name in packed else mapped[name] for name in stored}

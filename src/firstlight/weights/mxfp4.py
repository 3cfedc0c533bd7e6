"""Reading experts that are stored in MXFP4, as bf16.

MXFP4 has numbers of 4 bits (E2M1), of which 32 share a scale of 8 bits (E8M0). Source: Open Compute
Project 2023, "OCP Microscaling Formats (MX) Specification", version 1.0.

gpt-oss' files store a stack of the experts' matrices, `NAME`, [E, in, out] in the model, as two
uint8 tensors:

    NAME_blocks   [E, out, in / 32, 16]: two numbers per byte, the first in the low four bits
    NAME_scales   [E, out, in / 32]: exponents of the scales, plus 127

MXFP4 is never written: training needs numbers that a small update can change.
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

#: Bytes of a block: 32 numbers of 4 bits.
_BLOCK_BYTES = 16

#: The non-negative E2M1 numbers in the order of their codes 0 to 7; bit 3 of a code is the sign.
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class PackedTensor:
    """A stack of matrices that a file stores in MXFP4, with the methods of `StoredTensor`.

    Attributes:
        blocks: the packed numbers, uint8 [E, out, in / 32, 16].
        scales: exponents of the blocks' scales, plus 127, uint8 [E, out, in / 32].
    """

    blocks: StoredTensor
    scales: StoredTensor

    @property
    def kind(self) -> str:
        """The number format after unpacking, as safetensors names it."""
        return "BF16"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype after unpacking."""
        return torch.bfloat16

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in the model, [E, in, out]."""
        experts, rows, blocks, count = self.blocks.shape
        return experts, blocks * 2 * count, rows

    def has_values_of(self, other: object) -> bool:
        """Always False. `require_fit` compares only head and embedding, which are never packed."""
        return False

    def read_into(self, target: Tensor) -> None:
        """Copy the unpacked values into a tensor [E, in, out] of any dtype, on any device.

        Raises:
            ModelError: a file can't be read, is shorter than its header says, or was replaced.
        """
        # One expert at a time: unpacking all at once would need as much memory as the model again.
        for number, place in enumerate(target.detach()):
            parts = (_matrix_of(tensor, number) for tensor in (self.blocks, self.scales))
            place.copy_(unpack_mxfp4(*parts).T)

    def read(self) -> Tensor:
        """The unpacked values, bf16 [E, in, out], on the CPU.

        Raises:
            ModelError: as in `read_into`.
        """
        result = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        self.read_into(result)
        return result


AnyStored = StoredTensor | PackedTensor


def _matrix_of(stored: StoredTensor, expert: int) -> Tensor:
    """The bytes of one expert of a stack [E, ...], uint8 [...]."""
    size = torch.Size(stored.shape[1:]).numel()
    own = dataclasses.replace(stored, shape=stored.shape[1:], offset=stored.offset + expert * size)
    result = torch.empty(own.shape, dtype=torch.uint8, device="cpu")
    own.read_into(result)
    return result


def unpack_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """The values of MXFP4 blocks, bf16 [..., in].

    Args:
        blocks: two E2M1 numbers per byte, the low four bits first, uint8 [..., in / 32, 16].
        scales: exponents of the blocks' scales, plus 127, uint8 [..., in / 32].
    """
    values = torch.tensor(_VALUES, dtype=torch.bfloat16)
    values = torch.cat((values, -values))
    every = torch.arange(256)
    # Both bf16 values of a byte are one int32 in this table, so that one look-up gives both.
    pairs = torch.stack((values[every & 15], values[every >> 4]), dim=1).view(torch.int32).flatten()
    numbers = pairs.index_select(0, blocks.flatten().int()).view(torch.bfloat16)
    numbers = numbers.view(*scales.shape, -1)
    # ldexp, not a product with the scale: the largest scale, 2^128, overflows bf16, although its
    # product with a small number may not.
    return torch.ldexp(numbers, scales.int()[..., None] - 127, out=numbers).flatten(-2)


def with_packed(stored: Mapping[str, StoredTensor]) -> dict[str, AnyStored]:
    """The tensors of a folder, with each pair `NAME_blocks`, `NAME_scales` as one `PackedTensor`
    NAME.

    Raises:
        ModelError: the shapes or dtypes of a pair don't fit; the message names them.
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
    """The tensors by the names in `stored`: memory-mapped, except packed ones, which are unpacked
    into memory.

    Raises:
        ModelError: a file can't be read, or was replaced after its header was read.
    """
    mapped = open_mapped({n: t for n, t in stored.items() if isinstance(t, StoredTensor)})
    packed = {n: t.read() for n, t in stored.items() if isinstance(t, PackedTensor)}
    return {name: packed[name] if name in packed else mapped[name] for name in stored}

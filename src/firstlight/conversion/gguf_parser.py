"""The bytes of a GGUF file, and nothing of what they mean.

Every length is checked against what the file holds, so that a damaged file is an error and
never a hang or a demand for all of the memory. Format: ggml-org/ggml `docs/gguf.md`.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from firstlight.conversion.gguf_file import import_gguf
from firstlight.errors import ModelError

_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
#: GGUF's number types -> struct's letters
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: `shape` outermost first, `kind` a ggml type, `offset` from the
    beginning of the data."""

    shape: tuple[int, ...]
    kind: int
    offset: int


class GGUFParser:
    """Reads a little-endian GGUF file of `size` bytes, open for reading at its beginning."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self._size = size

    def parse(self) -> tuple[dict[str, Any], dict[str, StoredTensor], int]:
        """Metadata, tensors by name, and where the tensors' data begins."""
        if self._size < 4 or self._take(4) != b"GGUF":
            raise ModelError("this is no GGUF file")
        version = self._number("I")
        if version not in _VERSIONS:
            raise ModelError(f"GGUF version {version} is not supported: 2 and 3 are")
        tensor_count, entry_count = self._number("Q"), self._number("Q")
        metadata: dict[str, Any] = {}
        for _ in range(entry_count):
            key = self._string()
            metadata[key] = self._value(self._number("I"))
        stored: dict[str, StoredTensor] = {}
        for _ in range(tensor_count):
            name = self._string()
            dimensions = self._number("I")
            if name in stored or not 0 < dimensions <= 4:
                raise ModelError(f"the file is damaged at tensor '{name}'")
            sizes = [self._number("Q") for _ in range(dimensions)]
            stored[name] = StoredTensor(tuple(sizes[::-1]), self._number("I"), self._number("Q"))
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ModelError(f"the file is damaged: general.alignment is {alignment!r}")
        return metadata, stored, -(-self._file.tell() // alignment) * alignment

    def tensor(self, name: str, stored: StoredTensor, data_start: int) -> Tensor:
        """A tensor's numbers as fp32."""
        gguf = import_gguf()
        try:
            kind = gguf.GGMLQuantizationType(stored.kind)
        except ValueError:
            raise ModelError(f"tensor {name} is of the unknown type {stored.kind}") from None
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if stored.shape[-1] % block:
            raise ModelError(f"the file is damaged: tensor {name} is {list(stored.shape)}")
        row_bytes = stored.shape[-1] // block * block_bytes
        self._file.seek(min(data_start + stored.offset, self._size))
        data = np.frombuffer(self._take(math.prod(stored.shape[:-1]) * row_bytes), dtype=np.uint8)
        try:
            values = gguf.quants.dequantize(data.reshape(*stored.shape[:-1], row_bytes), kind)
        except NotImplementedError:
            raise ModelError(f"tensor {name} is {kind.name}, which can't be read") from None
        return torch.from_numpy(values.astype(np.float32)).reshape(stored.shape)

    def _take(self, count: int) -> bytes:
        # Before reading: a damaged length must not ask for all of the memory.
        if count > self._size - self._file.tell():
            raise ModelError("the file is damaged or cut short")
        return self._file.read(count)

    def _number(self, letter: str) -> Any:
        return struct.unpack(f"<{letter}", self._take(struct.calcsize(f"<{letter}")))[0]

    def _string(self) -> str:
        return self._take(self._number("Q")).decode("utf-8")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind != _ARRAY:
            raise ModelError(f"the file is damaged: a value of the unknown type {kind}")
        kind, count = self._number("I"), self._number("Q")
        if kind == _STRING:
            return [self._string() for _ in range(count)]
        if kind not in _SCALARS:
            raise ModelError(f"the file is damaged: an array of the unknown type {kind}")
        size = struct.calcsize(f"<{_SCALARS[kind]}")
        return list(struct.unpack(f"<{count}{_SCALARS[kind]}", self._take(count * size)))

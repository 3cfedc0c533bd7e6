"""Write safetensors files one tensor at a time.

The safetensors library only writes to files that it opens itself. This module instead writes to an
`OutputFile` (see disk.py), which can hash the bytes. It copies only one tensor at a time to the
CPU. The bytes are identical to the library's output (huggingface/safetensors, `serialize` in
tensor.rs):

- the header's length in bytes, as a little-endian integer of 8 bytes;
- the header as compact JSON, padded with spaces to a multiple of 8 bytes;
- the tensors, sorted by dtype (see `_NAMES`) and then by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from firstlight.errors import StorageError
from firstlight.files.disk import OutputFile

#: Names of dtypes in the safetensors library, in the order in which the library declares them. In a
#: file, tensors are sorted by dtype in the reverse of this order.
_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
}
_RANKS = {dtype: rank for rank, dtype in enumerate(_NAMES)}
_METADATA = "__metadata__"

#: Number of bytes that are hashed and written at a time. They fit into the processor's cache.
_CHUNK_BYTES = 1 << 20


def write_tensors(
    file: OutputFile, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file.

    Args:
        file: an open file.
        tensors: dense tensors, keyed by name. They can be on any device, have any shape and
            strides, and share memory. A tensor that is not contiguous or not on the CPU is copied
            when it is written.
        metadata: entries of the header's `__metadata__`; None omits it.

    Raises:
        StorageError: a tensor has a dtype, layout or name that the safetensors format does not
            support.
        OSError: a file system error.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES or tensor.layout != torch.strided or name == _METADATA:
            raise StorageError(
                f"{file.path.name} can't be written: the safetensors format does not support "
                f"tensor '{name}' of {tensor.dtype}, {tensor.layout}"
            )
    names = sorted(tensors, key=lambda name: (-_RANKS[tensors[name].dtype], name))
    header = _header({name: tensors[name] for name in names}, metadata)
    file.write(len(header).to_bytes(8, "little"))
    file.write(header)
    for name in names:
        for chunk in _chunks(tensors[name]):
            file.write(chunk)


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None) -> bytes:
    """Return the JSON header with the dtype, shape and offsets of each tensor, in the order of
    `tensors`.
    """
    entries: dict[str, Any] = {} if metadata is None else {_METADATA: dict(metadata)}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.numel() * tensor.itemsize
        entries[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def _chunks(tensor: Tensor) -> Iterator[memoryview]:
    """Yield a tensor's bytes in row-major order, in chunks of `_CHUNK_BYTES`."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    for start in range(0, len(flat), _CHUNK_BYTES):
        yield flat[start : start + _CHUNK_BYTES].numpy().data

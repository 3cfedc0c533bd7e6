"""Safetensors files, written tensor after tensor.

The library opens and writes files by itself; here the bytes go through the seam of all writing
(disk.py), are hashed on the way, and no tensor is copied before its turn. They are the same bytes
as the library's (huggingface/safetensors, `serialize` in tensor.rs): the header's length in 8
bytes, the header as compact JSON with spaces up to a multiple of 8, then the tensors, those of the
strictest alignment first and by name among equals.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from firstlight.errors import StorageError
from firstlight.files.disk import OutputFile

#: The library's names of the formats, in the order in which it declares them: the last are first
#: in a file.
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

#: Bytes that are hashed and written while they are in the processor's cache.
_CHUNK_BYTES = 1 << 20


def write_tensors(
    file: OutputFile, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file.

    Args:
        file: an open file.
        tensors: tensors by name, on any device, in any layout, of any shape; they may share
            memory. A tensor that is not contiguous or not on the CPU is copied when it is written.
        metadata: None writes none.

    Raises:
        StorageError: a tensor is of a format, or has a name, that such a file can't hold.
        OSError: the disk refuses.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES or tensor.layout != torch.strided or name == _METADATA:
            raise StorageError(
                f"{file.path.name} can't be written: a safetensors file can't hold "
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
    """A tensor's bytes in order of its elements, some at a time."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    for start in range(0, len(flat), _CHUNK_BYTES):
        yield flat[start : start + _CHUNK_BYTES].numpy().data

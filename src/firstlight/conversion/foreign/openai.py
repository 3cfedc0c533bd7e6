"""Read OpenAI's GPT-2 from TensorFlow checkpoints.

A model is a folder with `model.ckpt.*` and `hparams.json`. Source: openai/gpt-2 `src/model.py`.

The checkpoint is read without TensorFlow, because installing TensorFlow takes 600 MB. The format of
the checkpoint is called a tensor bundle. It consists of two files:

    NAME.index                  a table in LevelDB's format, from sorted tensor names to protocol
                                buffers with dtype, shape, position and checksum
    NAME.data-00000-of-00001    the values of the tensors

Sources: tensorflow/tensorflow `core/util/tensor_bundle`, `core/protobuf/tensor_bundle.proto`,
`core/lib/io/table_format.txt`. The sizes and checksums of all content are verified before it is
used.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from firstlight.conversion.foreign.layout import (
    GPT2_MODULES,
    GPT2_SHAPES,
    Layout,
    Opened,
    Settings,
)
from firstlight.errors import ModelError, describe_os_error
from firstlight.files.atomic import read_file, read_json
from firstlight.weights.loading import first_names

CONFIG = "hparams.json"

#: Maximum size of an index in bytes. Each tensor takes less than 100 bytes.
_MAX_INDEX_BYTES = 16_000_000
_MAX_DIMENSIONS = 16
#: Maximum number of tensors in an index, and maximum length of a name in bytes. Names are stored
#: without the prefix that they have in common with the previous name. Without these limits, a small
#: file could therefore expand to any size.
_MAX_ENTRIES = 100_000
_MAX_NAME_BYTES = 1_000
#: Size in bytes of the footer at the end of a table. It contains two block handles, padded to 40
#: bytes, and the magic number, which takes 8 bytes.
_FOOTER = 48
_MAGIC = struct.pack("<Q", 0xDB4775248B80FB57)
#: Size in bytes of the trailer after a block. The compression type takes 1 byte, and the masked
#: checksum takes 4 bytes.
_TRAILER = 5

#: TensorFlow's ids of floating-point dtypes (`core/framework/types.proto`).
_DTYPES = {1: torch.float32, 2: torch.float64, 14: torch.bfloat16, 19: torch.float16}
#: TensorFlow's ids of integer dtypes. Tensors such as a step counter have these dtypes.
_OTHER_DTYPES = {3: torch.int32, 9: torch.int64}

#: Polynomial of CRC-32C (Castagnoli) in bit-reversed order.
_POLYNOMIAL = 0x82F63B78
#: Number of 4-byte words in a row. `crc32c` processes one row at a time with numpy.
_LANES = 4096


def _names() -> dict[str, tuple[str, ...]]:
    """Return the tensor names in OpenAI's checkpoints, keyed by Hugging Face name.

    The module `transformer.h.{}.ln_1`, for example, is named `model/h{}/ln_1`. The suffixes are "g"
    for the gain of a norm, "w" for the weight of a linear layer, and "b" for biases. The names of
    embeddings have no suffix.
    """
    names: dict[str, tuple[str, ...]] = {}
    for module, (_, bias) in GPT2_MODULES.items():
        theirs = module.replace("h.{}", "h{}").replace(".", "/").replace("transformer", "model")
        if not bias:
            names[f"{module}.weight"] = (theirs,)
            continue
        names[f"{module}.weight"] = (theirs + ("/g" if "ln_" in module else "/w"),)
        names[f"{module}.bias"] = (f"{theirs}/b",)
    # The output head is always tied to the embedding.
    return names | {"lm_head.weight": names["transformer.wte.weight"]}


LAYOUT = Layout(
    program="OpenAI's GPT-2 (TensorFlow)",
    kind="gpt2",
    mark="/attn/c_attn/w",
    names=_names(),
    shapes=GPT2_SHAPES,
    is_transposed=False,
)


def open_folder(folder: Path) -> Opened:
    """Open the folder of a GPT-2 model from OpenAI, which contains `model.ckpt.*` and
    `hparams.json`.
    """
    bundles = bundles_in(folder)
    if len(bundles) > 1:
        names = [path.name for path in bundles]
        raise ModelError(f"{folder} has several checkpoints: {first_names(names)}; keep one")
    prefix = bundles[0].with_suffix("")
    weights: dict[str, Any] = {}
    for name, tensor in read_bundle(prefix).items():
        # OpenAI's linear layers are convolutions of width 1, with weights of shape [1, in, out].
        is_convolution = name.endswith("/w") and tensor.dim() == 3
        if is_convolution and len(tensor) != 1:
            raise ModelError(
                f"{prefix}: {name} is {list(tensor.shape)}, expected [1, inputs, outputs]: it is "
                "not OpenAI's GPT-2"
            )
        weights[name] = tensor[0] if is_convolution else tensor
    if not any(name.endswith(LAYOUT.mark) for name in weights):
        raise ModelError(
            f"{prefix}.index names no tensor such as 'model/h0{LAYOUT.mark}': it is not OpenAI's "
            "GPT-2"
        )
    settings = _settings(folder / CONFIG, read_json(folder / CONFIG))
    return Opened(LAYOUT, weights, settings)


def bundles_in(folder: Path) -> list[Path]:
    """Return the index files of the TensorFlow checkpoints in a folder."""
    return sorted(folder.glob("*.ckpt*.index"))


def _settings(path: Path, hparams: Any) -> Settings:
    """Return the settings of OpenAI's GPT-2, read from hparams.json.

    Raises:
        ModelError: hparams.json lacks the number of heads.
    """
    if not isinstance(hparams, Mapping) or "n_head" not in hparams:
        raise ModelError(f"{path} has no n_head: it does not belong to a GPT-2 model")
    names = {"n_vocab": "vocab_size", "n_ctx": "block_size"}
    args = {names.get(str(key), str(key)): value for key, value in hparams.items()}
    found = {"layer_norm_epsilon": 1e-5, "activation_function": "gelu_new"}
    return Settings(found=found, model_args=args, where=path.name)


class _BundleError(Exception):
    """Raised for a damaged or unsupported file. The file name is prepended to the message later."""


@dataclass(frozen=True)
class _Entry:
    """Entry of a tensor in the index. `offset` and `size` are the position and the length of the
    tensor's values in the data file, in bytes.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    size: int
    checksum: int


def read_bundle(prefix: Path) -> dict[str, Tensor]:
    """Memory-map the tensors of a TensorFlow checkpoint, and return them keyed by name.

    Args:
        prefix: path of the checkpoint without `.index`.

    Raises:
        InputError: the index is missing or too large.
        ModelError: the data file is missing, a file is damaged, or the format differs from the one
            that TensorFlow writes for variables saved by a single process.
    """
    index = prefix.with_name(prefix.name + ".index")
    data = prefix.with_name(prefix.name + ".data-00000-of-00001")
    path = index
    try:
        entries = dict(_entries(read_file(index, _MAX_INDEX_BYTES)))
        path = data
        if not data.is_file():
            raise _BundleError("is not a file")
        size = data.stat().st_size
        for name, entry in entries.items():
            if entry.offset + entry.size > size:
                raise _BundleError(f"has {size} bytes, and {name} ends beyond them")
        # Reject overlapping tensors, because a small file could otherwise use an unlimited amount
        # of memory.
        if sum(entry.size for entry in entries.values()) > size:
            raise _BundleError(f"has {size} bytes, fewer than its tensors in total")
        content = torch.from_file(str(data), shared=False, size=size, dtype=torch.uint8)
        return {name: _tensor(content, name, entry) for name, entry in entries.items()}
    except OSError as error:
        raise ModelError(f"can't read the checkpoint: {describe_os_error(error)}") from error
    except _BundleError as error:
        raise ModelError(
            f"{path} {error}: it is damaged, truncated or not a TensorFlow checkpoint; copy it "
            "again"
        ) from error


def _tensor(content: Tensor, name: str, entry: _Entry) -> Tensor:
    """Return the tensor that an entry describes. The result is a view of `content`, a uint8 tensor
    of shape [N] with the bytes of the data file.
    """
    part = content[entry.offset : entry.offset + entry.size]
    if _masked(crc32c(part.numpy())) != entry.checksum:
        raise _BundleError(f"has values of {name} that don't match their checksum")
    if entry.offset % entry.dtype.itemsize:
        # Torch can create a view with a different dtype only at an aligned offset.
        part = part.clone()
    return part.view(entry.dtype).view(entry.shape)


def _entries(table: bytes) -> Iterator[tuple[str, _Entry]]:
    """Yield the name and entry of each tensor in an index."""
    if len(table) < _FOOTER or not table.endswith(_MAGIC):
        raise _BundleError("does not end with the footer of an index")
    _, position = _handle(table, len(table) - _FOOTER)
    (offset, size), _ = _handle(table, position)
    header = None
    total = 0
    count = 0
    for _, handle in _block(table, offset, size):
        place, _ = _handle(handle, 0)
        total += place[1] + _TRAILER
        if total > len(table):
            raise _BundleError("has overlapping blocks")
        for key, value in _block(table, *place):
            count += 1
            if count > _MAX_ENTRIES:
                raise _BundleError(f"lists more than {_MAX_ENTRIES} tensors")
            if header is None:
                header = _header(key, value)
            else:
                yield key.decode("utf-8", "replace"), _entry(key, value)
    if header is None:
        raise _BundleError("has no entries")


def _header(key: bytes, value: bytes) -> dict[int, Any]:
    """Check the first entry of the index, which has an empty name and describes the checkpoint.
    Return the fields of the entry. Field 1 is the number of data files, and field 2 is the byte
    order.
    """
    header = dict(_fields(value))
    if key:
        raise _BundleError("does not begin with a header")
    if header.get(1, 1) != 1:
        raise _BundleError(f"refers to {header[1]!r} data files, but only one is supported")
    if header.get(2, 0) != 0:
        raise _BundleError("was written with the opposite byte order")
    return header


def _entry(key: bytes, value: bytes) -> _Entry:
    """Parse a BundleEntryProto. The field numbers are defined in tensor_bundle.proto."""
    name = key.decode("utf-8", "replace")
    fields: dict[int, Any] = {3: 0, 4: 0, 5: 0, 6: None, 2: b""}
    for number, content in _fields(value):
        if number == 7:
            raise _BundleError(f"stores {name} in slices, which are not supported")
        fields[number] = content
    dtype = {**_DTYPES, **_OTHER_DTYPES}.get(fields.get(1, 0))
    if dtype is None:
        raise _BundleError(f"has {name} with an unknown dtype ({fields.get(1, 0)} in TensorFlow)")
    if not isinstance(fields[2], bytes) or any(type(fields[i]) is not int for i in (3, 4, 5, 6)):
        raise _BundleError(f"has a damaged entry for {name}")
    shape = tuple(_dimensions(name, fields[2]))
    if fields[3] != 0 or fields[5] != math.prod(shape) * dtype.itemsize:
        raise _BundleError(f"has a size for {name} that does not match its shape {list(shape)}")
    # PyTorch stores strides as 64-bit integers, even if a dimension of the tensor has size 0.
    if math.prod(size for size in shape if size) >= 2**63:
        raise _BundleError(f"has an invalid shape for {name}")
    return _Entry(dtype, shape, fields[4], fields[5], checksum=fields[6])


def _dimensions(name: str, shape: bytes) -> Iterator[int]:
    """Yield the dimension sizes in a TensorShapeProto, with the outermost dimension first."""
    for count, (number, content) in enumerate(_fields(shape)):
        if number != 2 or not isinstance(content, bytes) or count == _MAX_DIMENSIONS:
            raise _BundleError(f"has an invalid shape for {name}")
        size = dict(_fields(content)).get(1, 0)
        if not isinstance(size, int) or size >= 2**63:
            raise _BundleError(f"has an invalid shape for {name}")
        yield size


def _block(table: bytes, offset: int, size: int) -> Iterator[tuple[bytes, bytes]]:
    """Yield the keys and values in a block of the table. Each key is stored without the prefix that
    it has in common with the previous key.
    """
    end = offset + size
    if end + _TRAILER > len(table) or size < 4:
        raise _BundleError("has a block beyond its end")
    if table[end] != 0:
        raise _BundleError("has compressed blocks, which TensorFlow does not write")
    (checksum,) = struct.unpack_from("<I", table, end + 1)
    if _masked(crc32c(np.frombuffer(table, np.uint8, size + 1, offset))) != checksum:
        raise _BundleError("has a block that does not match its checksum")
    # Some keys in a block, called restarts, are stored in full. The block ends with the positions
    # of the restarts, followed by the number of restarts.
    (restarts,) = struct.unpack_from("<I", table, end - 4)
    position = offset
    stop = end - 4 - 4 * restarts
    key = b""
    while position < stop:
        shared, position = _varint(table, position)
        rest, position = _varint(table, position)
        length, position = _varint(table, position)
        if shared > len(key) or position + rest + length > stop:
            raise _BundleError("has an entry beyond its block")
        if shared + rest > _MAX_NAME_BYTES:
            raise _BundleError("has a name that is too long")
        key = key[:shared] + table[position : position + rest]
        position += rest
        yield key, table[position : position + length]
        position += length


def _handle(content: bytes, position: int) -> tuple[tuple[int, int], int]:
    """Read a block handle. Return the block's offset and size in bytes, and the position after the
    handle.
    """
    offset, position = _varint(content, position)
    size, position = _varint(content, position)
    return (offset, size), position


def _varint(content: bytes, position: int) -> tuple[int, int]:
    """Read a varint, which is an integer in base 128 with the least significant digit first. Return
    the integer, and the position after the varint.
    """
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(content):
            break
        byte = content[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
    raise _BundleError("has an unterminated number")


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the number and the content of each field in a protocol buffer. The content is a bytes
    object for wire type 2, and an integer for all other wire types.
    """
    position = 0
    while position < len(message):
        tag, position = _varint(message, position)
        if tag & 7 == 0:
            value, position = _varint(message, position)
            yield tag >> 3, value
            continue
        if tag & 7 == 2:
            length, position = _varint(message, position)
        else:
            length = {1: 8, 5: 4}.get(tag & 7, len(message) + 1)
        if position + length > len(message):
            raise _BundleError("has a field beyond its end")
        content = message[position : position + length]
        position += length
        yield tag >> 3, content if tag & 7 == 2 else int.from_bytes(content, "little")


def _masked(checksum: int) -> int:
    """Return the "masked" form of a checksum, which is the form in which LevelDB stores checksums.
    Masking avoids problems if the checksummed data itself contains checksums.
    """
    return ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF


def crc32c(content: np.ndarray[Any, np.dtype[np.uint8]]) -> int:
    """Return the CRC-32C (RFC 3720, appendix B.4) of `content`, a uint8 array of shape [N].

    The content is divided into rows of `_LANES` words. The checksum is linear over GF(2), so each
    row can be advanced past the rows that follow it, and all rows can then be combined with XOR.
    The checksum of the combined row equals that of the entire content. This takes N / 16384 steps
    in numpy instead of N steps in Python.
    """
    rest = len(content) % 4
    body, tail = content[: len(content) - rest], content[len(content) - rest :].tobytes()
    state = 0xFFFFFFFF
    if len(body) > 4 * _LANES:
        # The first row is padded with leading zeros. They do not change the checksum, because the
        # initial value is combined by XOR with the first word after the zeros.
        missing = -len(body) % (4 * _LANES)
        first = np.zeros(4 * _LANES, np.uint8)
        first[missing:] = body[: 4 * _LANES - missing]
        lanes = first.view("<u4").astype(np.uint32)
        lanes[missing // 4] ^= np.uint32(state)
        low, high = _moved_by_a_row()
        rows = body[4 * _LANES - missing :].reshape(-1, 4 * _LANES)
        for row in rows:
            lanes = low[lanes & 0xFFFF] ^ high[lanes >> 16]
            # Copy the row, because its offset in the data file may not be divisible by 4.
            lanes ^= np.frombuffer(row.tobytes(), "<u4")
        body, state = lanes.astype("<u4").view(np.uint8), 0
    table = _byte_table()
    for byte in body.tobytes() + tail:
        state = table[(state ^ byte) & 255] ^ state >> 8
    return state ^ 0xFFFFFFFF


@functools.cache
def _byte_table() -> Sequence[int]:
    """Return the CRC lookup table. For each of the 256 byte values, it contains the value that is
    combined with the shifted checksum by XOR.
    """
    table = list(range(256))
    for _ in range(8):
        table = [value >> 1 ^ (_POLYNOMIAL if value & 1 else 0) for value in table]
    return table


@functools.cache
def _moved_by_a_row() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return two uint32 lookup tables of shape [65536] that advance a word past one row of zeros.
    The first table is indexed by the low 16 bits of the word, and the second table by its high 16
    bits. The XOR of the two entries is the advanced word.
    """
    table = np.array(_byte_table(), np.uint32)
    bits = np.uint32(1) << np.arange(32, dtype=np.uint32)
    for _ in range(4 * _LANES):
        bits = table[bits & 255] ^ bits >> 8
    halves = []
    for half in (bits[:16], bits[16:]):
        moved = np.zeros(1, np.uint32)
        for bit in half:
            moved = np.concatenate((moved, moved ^ bit))
        halves.append(moved)
    return halves[0], halves[1]

"""Read and write safetensors files.

Tensors can be read directly into the parameters of a model. Experts that are stored in MXFP4 are
unpacked to bf16.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from firstlight.errors import ModelError, describe_os_error
from firstlight.files.atomic import (
    MAX_JSON_BYTES,
    read_json_object,
    replacing,
    unique_keys,
    write_file,
)
from firstlight.files.tensor_file import write_tensors

_AnyTensor = TypeVar("_AnyTensor")

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
#: File names of pickled weights and of their index. Only `conversion/pickled.py` reads these files.
PICKLED_NAME = "pytorch_model.bin"
PICKLED_INDEX_NAME = "pytorch_model.bin.index.json"

#: Dtypes of unquantised weights, keyed by the names that safetensors uses for them.
FLOAT_FORMATS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}

#: Maximum number of tensors in a file. Each tensor takes 1.5 KB of memory while the header is read.
#: The largest models have 100,000 tensors in all of their files together.
_MOST_TENSORS = 100_000
#: Number of bytes that are read and converted at a time. Chunks of this size fit in the CPU's
#: cache, even with several threads.
_CHUNK_BYTES = 1 << 20
#: Number of bytes that are read and converted at a time for a GPU. The chunk is larger than on the
#: CPU, because the host waits for each copy. It is not much larger, because each thread keeps two
#: copies of its chunk on the GPU during the conversion.
_GPU_CHUNK_BYTES = 1 << 21


@dataclass(frozen=True)
class FileState:
    """Identity and state of a file when it was last checked.

    Attributes:
        path: path of the file.
        identity: device and inode of the file. They change if another file is moved to `path`.
        state: size of the file in bytes, and time of its last modification in nanoseconds.
    """

    path: Path
    identity: tuple[int, int]
    state: tuple[int, int]

    @classmethod
    def of(cls, path: Path, file: io.FileIO | None = None) -> FileState:
        """Return the current state of the open file `file` or, if it is None, of the file at
        `path`.
        """
        found = os.stat(path) if file is None else os.fstat(file.fileno())
        return cls(path, (found.st_dev, found.st_ino), (found.st_size, found.st_mtime_ns))

    def require_unchanged(self) -> None:
        """Raise an error if another program has modified a mapped file.

        Raises:
            ModelError: the file was overwritten or truncated in place.
        """
        try:
            now = FileState.of(self.path)
        except OSError:
            return  # The content of a deleted file remains available while it is mapped.
        if now.identity == self.identity and now.state != self.state:
            raise ModelError(
                f"{self.path} was modified in place while the model was in use: load it again "
                "(way='sequential' or --loading sequential keeps a copy)"
            )


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file.

    Attributes:
        file: state of the file when its header was read.
        name: name of the tensor in the file.
        kind: name that safetensors uses for the dtype of the tensor, such as F32 or BF16.
        shape: shape of the tensor.
        offset: position of the tensor's first byte in the file.
    """

    file: FileState
    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int

    @property
    def path(self) -> Path:
        """Path of the file that contains the tensor."""
        return self.file.path

    @property
    def dtype(self) -> torch.dtype:
        """The torch dtype of the tensor, which is uint8 or one of the dtypes in `FLOAT_FORMATS`."""
        return torch.uint8 if self.kind == "U8" else FLOAT_FORMATS[self.kind]

    def read_into(self, target: Tensor) -> None:
        """Copy the values into a contiguous tensor of the same shape, with any dtype and on any
        device.

        Raises:
            ModelError: the file can't be read, is shorter than its header specifies, or was
                replaced.
        """
        flat = target.detach().view(-1)
        if flat.device.type == "cpu" and flat.dtype == self.dtype:
            with self._open() as file:
                self._fill(flat, file)
            return
        start = 0
        for part in self._parts(_CHUNK_BYTES if flat.device.type == "cpu" else _GPU_CHUNK_BYTES):
            place = flat[start : start + len(part)]
            # Convert the dtype on the target's device, which is faster on a GPU.
            place.copy_(part if part.dtype == place.dtype else part.to(flat.device))
            start += len(part)

    def read(self) -> Tensor:
        """Return the values on the CPU, in the file's dtype.

        Raises:
            ModelError: as in `read_into`.
        """
        result = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        self.read_into(result)
        return result

    def has_values_of(self, other: StoredTensor) -> bool:
        """Return True if all values of this tensor are equal to those of `other`, which must have
        the same shape but can have any dtype. NaN is considered equal to NaN.
        """
        # Use chunks with the same number of elements for the two tensors, even if their dtypes
        # differ.
        count = _CHUNK_BYTES // 8
        pairs = zip(
            self._parts(count * self.dtype.itemsize),
            other._parts(count * other.dtype.itemsize),
            strict=True,
        )
        return all(
            torch.equal(one.double().nan_to_num(nan=1e300), two.double().nan_to_num(nan=1e300))
            for one, two in pairs
        )

    @classmethod
    def mean(cls, tensors: Sequence[StoredTensor]) -> Tensor:
        """Return the elementwise mean of several tensors of the same shape, as an fp32 tensor on
        the CPU. The sum is accumulated in fp64.

        Raises:
            ModelError: a file can't be read, is shorter than its header specifies, or was replaced.
        """
        result = torch.empty(tensors[0].shape, dtype=torch.float32, device="cpu")
        flat, start = result.view(-1), 0
        # Use chunks with the same number of elements for all tensors. The chunks must be small
        # enough that one chunk of every tensor fits in the CPU's cache at the same time.
        count = _CHUNK_BYTES // 32
        for parts in zip(*(one._parts(count * one.dtype.itemsize) for one in tensors), strict=True):
            total = parts[0].double()
            for part in parts[1:]:
                total += part
            flat[start : start + len(total)] = total.div_(len(parts))
            start += len(total)
        return result

    @contextlib.contextmanager
    def _open(self) -> Iterator[io.FileIO]:
        """Open the file and seek to the tensor's first byte.

        Raises:
            ModelError: the file can't be read, or was replaced after its header was read.
        """
        try:
            with open(self.path, "rb", buffering=0) as file:
                if FileState.of(self.path, file) != self.file:
                    raise ModelError(f"{self.path} was changed while it was being read: try again")
                file.seek(self.offset)
                yield file
        except OSError as error:
            raise ModelError(f"{self.path} can't be read: {describe_os_error(error)}") from error

    def _parts(self, chunk_bytes: int) -> Iterator[Tensor]:
        """Yield the values in order, in 1-D chunks of up to `chunk_bytes` bytes. All chunks share
        one buffer, so a chunk is valid only until the next chunk is yielded.
        """
        count = torch.Size(self.shape).numel()
        size = max(1, min(count, chunk_bytes // self.dtype.itemsize))
        buffer = torch.empty(size, dtype=self.dtype, device="cpu")
        with self._open() as file:
            for start in range(0, count, size):
                part = buffer[: min(size, count - start)]
                self._fill(part, file)
                yield part

    def _fill(self, flat: Tensor, file: io.FileIO) -> None:
        """Read the next values in the file into a 1-D CPU tensor, which must have the dtype of the
        file.
        """
        if not len(flat):
            return
        memory = flat.view(torch.uint8).numpy().data
        while memory:
            count = file.readinto(memory)
            if not count:
                raise ModelError(f"{self.path} is damaged or truncated")
            memory = memory[count:]


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return all tensors of a model folder, keyed by name. They are stored in `model.safetensors`
    or in the files listed in its index.

    Raises:
        ModelError: the folder contains no weights, a file is missing or damaged, or the index does
            not match the files. The message names the file.
    """
    if (folder / WEIGHTS_NAME).is_file():
        return read_header(folder / WEIGHTS_NAME)
    if not (folder / INDEX_NAME).is_file():
        raise _no_weights(folder)
    return indexed_tensors(folder, INDEX_NAME, read_header)


def indexed_tensors(
    folder: Path, index_name: str, read: Callable[[Path], Mapping[str, _AnyTensor]]
) -> dict[str, _AnyTensor]:
    """Return the tensors of all files in an index, keyed by name.

    Args:
        folder: folder that contains the index and its files.
        index_name: file name of the index.
        read: function that returns the tensors of a file, keyed by name.

    Raises:
        ModelError: a file is missing or damaged, or the index does not match the files.
    """
    weight_map = _read_index(folder, index_name)
    tensors: dict[str, _AnyTensor] = {}
    for file_name in sorted(set(weight_map.values())):
        path = folder / file_name
        if not path.is_file():
            raise ModelError(
                f"{path} is missing, although {index_name} lists it: download it again"
            )
        for name, tensor in read(path).items():
            if weight_map.get(name) != file_name:
                listed = weight_map.get(name)
                where = "does not list" if listed is None else f"places in {listed}"
                raise ModelError(f"{path} contains tensor {name}, which {index_name} {where}")
            tensors[name] = tensor
    if lost := sorted(weight_map.keys() - tensors.keys()):
        raise ModelError(
            f"{folder / weight_map[lost[0]]} lacks tensor {lost[0]}, which {index_name} lists"
        )
    return tensors


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file, keyed by name. Only the header is read.

    Raises:
        ModelError: the file is missing or damaged.
    """
    try:
        with open(path, "rb", buffering=0) as file:
            state = FileState.of(path, file)
            length = int.from_bytes(file.read(8), "little")
            if MAX_JSON_BYTES < length <= state.state[0]:
                raise ModelError(
                    f"{path} has a header of {length:,} bytes, more than the limit of "
                    f"{MAX_JSON_BYTES:,}"
                )
            # Check the header's length here, because safetensors maps the entire file before it
            # checks the header.
            if not 0 < length <= state.state[0] - 8:
                raise ModelError(
                    f"{path} is damaged or truncated (it declares a header of {length:,} bytes): "
                    "copy it again"
                )
            content = file.read(length)
            if (count := content.count(b"{")) > _MOST_TENSORS:
                raise ModelError(f"{path} has {count:,} tensors: the limit is {_MOST_TENSORS:,}")
            # safetensors checks the header and the length of the file, but it does not expose the
            # offsets of the tensors.
            with safetensors.safe_open(path, framework="pt"):
                header = json.loads(content, object_pairs_hook=unique_keys)
    except FileNotFoundError:
        raise ModelError(f"{path} is missing") from None
    except safetensors.SafetensorError as error:
        raise ModelError(f"{path} is damaged or truncated, copy it again: {error}") from error
    except OSError as error:
        raise ModelError(f"{path} can't be read: {describe_os_error(error)}") from error
    except ModelError:
        raise
    except ValueError as error:
        raise ModelError(f"{path} is damaged: {error}") from error
    return {
        name: StoredTensor(
            state,
            name,
            entry["dtype"],
            tuple(entry["shape"]),
            8 + length + entry["data_offsets"][0],
        )
        for name, entry in header.items()
        if name != "__metadata__"
    }


def has_pickled_weights(folder: Path) -> bool:
    """Return True if a model folder contains pickled weights but no safetensors files."""
    return any(
        (folder / name).is_file() for name in (PICKLED_NAME, PICKLED_INDEX_NAME)
    ) and not any((folder / name).is_file() for name in (WEIGHTS_NAME, INDEX_NAME))


def _repository_of(folder: Path) -> str | None:
    """Return the hub id OWNER/NAME of a model in huggingface_hub's cache, given the folder of its
    snapshot. Return None for any other folder.
    """
    found = re.fullmatch(r"models--(.+?)--(.+)", folder.parent.parent.name)
    return f"{found[1]}/{found[2]}" if found and folder.parent.name == "snapshots" else None


def _no_weights(folder: Path) -> ModelError:
    if any(folder.glob("model.shard-*-of-*.safetensors")):
        return ModelError(
            f"the weights in {folder} are shards written by several processes: convert them to a "
            f"model folder with `firstlight convert {folder} --out DIR`, and use that"
        )
    repository = _repository_of(folder)
    if has_pickled_weights(folder) or repository:
        return ModelError(
            f"{folder} does not contain {WEIGHTS_NAME}; {PICKLED_NAME} is a pickle, which could "
            "run code when opened: convert it to safetensors with `firstlight convert "
            f"{repository or folder} --out DIR`, and use that folder"
        )
    return ModelError(
        f"{folder} does not contain {WEIGHTS_NAME}: only safetensors weights are supported "
        "(pickled .bin and .pt files can run code when opened)"
    )


def _read_index(folder: Path, index_name: str) -> dict[str, str]:
    """Read the index of a model with several weight files. Return the name of each tensor's file,
    keyed by tensor name.

    Raises:
        ModelError: the index is damaged, or names a file outside its folder.
    """
    path, fault = folder / index_name, "does not have a weight_map from tensors to files"
    weight_map = read_json_object(path, ModelError, fault).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(name, str) for name in weight_map.values()
    ):
        raise ModelError(f"{path} {fault}")
    outside = {name for name in weight_map.values() if os.path.basename(name) != name}
    if outside:
        raise ModelError(f"{path} names a file outside its folder: {min(outside)}")
    return weight_map


def open_mapped(stored: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
    """Memory-map tensors, and return them with the same keys as `stored`. The files must not change
    while the tensors are in use.

    Raises:
        ModelError: a file was replaced or changed after its header was read.
    """
    files: dict[Path, dict[str, Tensor]] = {}
    for state in {tensor.file for tensor in stored.values()}:
        try:
            files[state.path] = safetensors.torch.load_file(state.path)
            changed = FileState.of(state.path) != state
        except (OSError, safetensors.SafetensorError):
            changed = True
        if changed:
            raise ModelError(f"{state.path} was changed while it was being read: try again")
    return {name: files[tensor.path][tensor.name] for name, tensor in stored.items()}


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a safetensors file atomically. An existing file is kept until the new one is complete.

    Raises:
        StorageError: the file can't be written, or safetensors does not support a tensor's dtype.
    """
    with replacing(path) as file:
        write_tensors(file, tensors, {"format": "pt"})


def save_weights(
    tensors: Mapping[str, Tensor], folder: Path, max_shard_bytes: int = 5 * 10**9
) -> None:
    """Write the weights of a model to a folder. If the tensors take more than `max_shard_bytes`
    bytes, they are split into several files, and an index is written.

    Raises:
        StorageError: a file can't be written.
    """
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    if len(shards) == 1:
        save_tensors(shards[0], folder / WEIGHTS_NAME)
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_tensors(shard, folder / file_name)
        weight_map |= dict.fromkeys(shard, file_name)
    index: dict[str, Any] = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
        "weight_map": weight_map,
    }
    write_file(folder / INDEX_NAME, json.dumps(index, indent=2) + "\n")


# Experts in MXFP4

#: Name suffixes of the two tensors in which a stack is stored: its packed numbers and its scales.
_BLOCKS, _SCALES = "_blocks", "_scales"
#: Size in bytes of a block, which contains 32 numbers of 4 bits each.
_BLOCK_BYTES = 16

#: The non-negative E2M1 numbers, in order of their codes 0 to 7. Bit 3 of a code is the sign.
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class PackedTensor:
    """A stack of matrices stored in MXFP4, with the methods of `StoredTensor`.

    In MXFP4, each block of 32 numbers shares a scale. The numbers have 4 bits (E2M1) and the scale
    has 8 bits (E8M0). Source: Open Compute Project 2023, "OCP Microscaling Formats (MX)
    Specification", version 1.0.

    In the model, the matrices of all E experts form a stack `NAME` of shape [E, in, out]. The files
    of gpt-oss store this stack as two uint8 tensors:

        NAME_blocks   [E, out, in / 32, 16]: two numbers per byte, the first in the low four bits
        NAME_scales   [E, out, in / 32]: exponents of the scales, plus 127

    Weights are never saved in MXFP4, because the format is too coarse for the small weight updates
    of training.

    Attributes:
        blocks: the packed numbers, a uint8 tensor of shape [E, out, in / 32, 16].
        scales: the exponents of the scales, plus 127, a uint8 tensor of shape [E, out, in / 32].
    """

    blocks: StoredTensor
    scales: StoredTensor

    @property
    def kind(self) -> str:
        """Name that safetensors uses for the dtype of the unpacked tensor."""
        return "BF16"

    @property
    def dtype(self) -> torch.dtype:
        """Dtype after unpacking."""
        return torch.bfloat16

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the stack in the model, [E, in, out]."""
        experts, rows, blocks, count = self.blocks.shape
        return experts, blocks * 2 * count, rows

    def has_values_of(self, other: object) -> bool:
        """Always return False, because this method is only called to compare the output head and
        the embedding, which are never stored in MXFP4.
        """
        return False

    def read_into(self, target: Tensor) -> None:
        """Unpack the values and copy them into a tensor of shape [E, in, out], with any dtype and
        on any device.

        Raises:
            ModelError: a file can't be read, is shorter than its header specifies, or was replaced.
        """
        # Unpack one expert at a time, because unpacking all at once would need as much memory as
        # the model.
        for number, place in enumerate(target.detach()):
            parts = (_matrix_of(tensor, number) for tensor in (self.blocks, self.scales))
            place.copy_(unpack_mxfp4(*parts).T)

    def read(self) -> Tensor:
        """Return the unpacked values as a bf16 tensor of shape [E, in, out] on the CPU.

        Raises:
            ModelError: as in `read_into`.
        """
        result = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        self.read_into(result)
        return result


AnyStored = StoredTensor | PackedTensor


def _matrix_of(stored: StoredTensor, expert: int) -> Tensor:
    """Read the bytes of a single expert in a stack of shape [E, ...]. Return them as a uint8 tensor
    of shape [...].
    """
    shape = stored.shape[1:]
    place = stored.offset + expert * math.prod(shape)
    return dataclasses.replace(stored, shape=shape, offset=place).read()


def unpack_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Unpack MXFP4 blocks to a bf16 tensor of shape [..., in].

    Args:
        blocks: the packed numbers, a uint8 tensor of shape [..., in / 32, 16]. Each byte contains
            two E2M1 numbers, the first of them in the low four bits.
        scales: the exponents of the scales, plus 127, a uint8 tensor of shape [..., in / 32].
    """
    values = torch.tensor(_VALUES, dtype=torch.bfloat16)
    values = torch.cat((values, -values))
    every = torch.arange(256)
    # Each entry of this table contains the two bf16 values of a byte as one int32, so a single
    # lookup returns both values.
    pairs = torch.stack((values[every & 15], values[every >> 4]), dim=1).view(torch.int32).flatten()
    numbers = pairs.index_select(0, blocks.flatten().int()).view(torch.bfloat16)
    numbers = numbers.view(*scales.shape, -1)
    # Use `ldexp` instead of multiplying by the scale. The largest scale, 2^128, overflows in bf16,
    # but its product with a small number may be representable.
    return torch.ldexp(numbers, scales.int()[..., None] - 127, out=numbers).flatten(-2)


def with_packed(stored: Mapping[str, StoredTensor]) -> dict[str, AnyStored]:
    """Combine each pair of tensors `NAME_blocks` and `NAME_scales` into a `PackedTensor` with the
    name NAME. Return all tensors of the folder, keyed by name.

    Raises:
        ModelError: the shapes or dtypes of a pair do not match. The message names the pair.
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
    """Open tensors, and return them with the same keys as `stored`. MXFP4 tensors are unpacked into
    memory, and all other tensors are memory-mapped.

    Raises:
        ModelError: a file can't be read, or was replaced after its header was read.
    """
    mapped = open_mapped({n: t for n, t in stored.items() if isinstance(t, StoredTensor)})
    packed = {n: t.read() for n, t in stored.items() if isinstance(t, PackedTensor)}
    return {name: packed[name] if name in packed else mapped[name] for name in stored}

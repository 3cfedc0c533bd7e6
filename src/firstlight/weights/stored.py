"""Safetensors files on the disk: headers, and tensors read straight into their places."""

from __future__ import annotations

import contextlib
import io
import json
import os
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
from firstlight.weights.hub import repository_of

_AnyTensor = TypeVar("_AnyTensor")

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
#: The names of pickled weights and their index, which `conversion/pickled.py` reads.
PICKLED_NAME = "pytorch_model.bin"
PICKLED_INDEX_NAME = "pytorch_model.bin.index.json"

#: The formats of weights, by safetensors' names; all others are of quantised models.
FLOAT_FORMATS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}

#: Tensors of a file, 1.5 KB each while it is read: models have up to 100,000 in all files.
_MOST_TENSORS = 100_000
#: Bytes read at a time to be converted: few enough for a core's cache, and for several threads.
_CHUNK_BYTES = 1 << 20
#: The same for a GPU, each time with a wait; what is converted there lies there twice a thread.
_GPU_CHUNK_BYTES = 1 << 21


@dataclass(frozen=True)
class FileState:
    """A file's identity and state at one moment.

    Attributes:
        path: the file's path at that moment.
        identity: device and inode, which a rename over its name does not change.
        state: size in bytes, time of the last change in nanoseconds.
    """

    path: Path
    identity: tuple[int, int]
    state: tuple[int, int]

    @classmethod
    def of(cls, path: Path, file: io.FileIO | None = None) -> FileState:
        """The file at `path`, or an open one, as it is now."""
        found = os.stat(path) if file is None else os.fstat(file.fileno())
        return cls(path, (found.st_dev, found.st_ino), (found.st_size, found.st_mtime_ns))

    def require_unchanged(self) -> None:
        """Refuse a mapped file that another program has written into.

        Raises:
            ModelError: the file was overwritten or cut short in place.
        """
        try:
            now = FileState.of(self.path)
        except OSError:
            return  # a deleted file lives on as long as it is mapped
        if now.identity == self.identity and now.state != self.state:
            raise ModelError(
                f"{self.path} was changed in place while the model was in use: load it again "
                "(way='sequential', --loading sequential, keeps a copy)"
            )


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file.

    Attributes:
        file: the file when its header was read.
        name: the tensor's name in the file.
        kind: the number format, as safetensors names it (F32, BF16).
        shape: the tensor's sizes.
        offset: position of its first byte in the file.
    """

    file: FileState
    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int

    @property
    def path(self) -> Path:
        """The file's path."""
        return self.file.path

    @property
    def dtype(self) -> torch.dtype:
        """Its number format, one of `FLOAT_FORMATS`, or bytes."""
        return torch.uint8 if self.kind == "U8" else FLOAT_FORMATS[self.kind]

    def read_into(self, target: Tensor) -> None:
        """Copy its values into a contiguous tensor of the same shape, any dtype and any device.

        Raises:
            ModelError: the file can't be read, is shorter than its header says, or was replaced.
        """
        flat = target.detach().view(-1)
        if flat.device.type == "cpu" and flat.dtype == self.dtype:
            with self._open() as file:
                self._fill(flat, file)
            return
        start = 0
        for part in self._parts(_CHUNK_BYTES if flat.device.type == "cpu" else _GPU_CHUNK_BYTES):
            place = flat[start : start + len(part)]
            # A GPU converts faster; a part of the same dtype goes straight into its place.
            place.copy_(part if part.dtype == place.dtype else part.to(flat.device))
            start += len(part)

    def has_values_of(self, other: StoredTensor) -> bool:
        """True if its numbers are those of another tensor of the same shape."""
        # Parts of the same number of elements, whatever their sizes in bytes.
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
        """The mean of tensors of one shape, added up in fp64, in fp32 on the CPU.

        Raises:
            ModelError: a file can't be read, is shorter than its header says, or was replaced.
        """
        result = torch.empty(tensors[0].shape, dtype=torch.float32, device="cpu")
        flat, start = result.view(-1), 0
        # Parts of the same number of elements, few enough for all of them to stay in the cache.
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
        """The file at the tensor's first byte.

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
        """Its values in order, some at a time, in a buffer that is used again."""
        count = torch.Size(self.shape).numel()
        size = max(1, min(count, chunk_bytes // self.dtype.itemsize))
        buffer = torch.empty(size, dtype=self.dtype, device="cpu")
        with self._open() as file:
            for start in range(0, count, size):
                part = buffer[: min(size, count - start)]
                self._fill(part, file)
                yield part

    def _fill(self, flat: Tensor, file: io.FileIO) -> None:
        if not len(flat):
            return
        memory = flat.view(torch.uint8).numpy().data
        while memory:
            count = file.readinto(memory)
            if not count:
                raise ModelError(f"{self.path} is damaged or cut short")
            memory = memory[count:]


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of a model folder: of its one file of weights, or of all that its index names.

    Raises:
        ModelError: the folder has no weights, a file is missing or damaged, or the index does not
            fit the files (named).
    """
    if (folder / WEIGHTS_NAME).is_file():
        return read_header(folder / WEIGHTS_NAME)
    if not (folder / INDEX_NAME).is_file():
        raise _no_weights(folder)
    return indexed_tensors(folder, INDEX_NAME, read_header)


def indexed_tensors(
    folder: Path, index_name: str, read: Callable[[Path], Mapping[str, _AnyTensor]]
) -> dict[str, _AnyTensor]:
    """The tensors of all files that an index names.

    Args:
        folder: the folder of the index and the files.
        index_name: the index's file name.
        read: the reader of a file's tensors.

    Raises:
        ModelError: a file is missing or damaged, or the index is not that of the files.
    """
    weight_map = _read_index(folder, index_name)
    tensors: dict[str, _AnyTensor] = {}
    for file_name in sorted(set(weight_map.values())):
        path = folder / file_name
        if not path.is_file():
            raise ModelError(f"{path} is missing, but {index_name} names it: download it again")
        for name, tensor in read(path).items():
            if weight_map.get(name) != file_name:
                where = weight_map.get(name, "nowhere")
                raise ModelError(f"{path} has tensor {name}, which {index_name} puts {where}")
            tensors[name] = tensor
    if lost := sorted(weight_map.keys() - tensors.keys()):
        raise ModelError(f"{folder / weight_map[lost[0]]} lacks tensor {lost[0]} of {index_name}")
    return tensors


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file by name, from its header alone.

    Raises:
        ModelError: the file is missing or damaged.
    """
    try:
        with open(path, "rb", buffering=0) as file:
            state = FileState.of(path, file)
            length = int.from_bytes(file.read(8), "little")
            if MAX_JSON_BYTES < length <= state.state[0]:
                raise ModelError(
                    f"{path} has a header of {length:,} bytes, more than the {MAX_JSON_BYTES:,} "
                    "that are read"
                )
            content = file.read(length) if length <= MAX_JSON_BYTES else b""
            if (count := content.count(b"{")) > _MOST_TENSORS:
                raise ModelError(f"{path} has {count:,} tensors: the limit is {_MOST_TENSORS:,}")
            # The library checks the header against the file's length, but does not give offsets.
            with safetensors.safe_open(path, framework="pt"):
                header = json.loads(content, object_pairs_hook=unique_keys)
    except FileNotFoundError:
        raise ModelError(f"{path} is missing") from None
    except safetensors.SafetensorError as error:
        raise ModelError(f"{path} is damaged or cut short, copy it again: {error}") from error
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
    """True if a model folder has pickled weights only."""
    return any(
        (folder / name).is_file() for name in (PICKLED_NAME, PICKLED_INDEX_NAME)
    ) and not any((folder / name).is_file() for name in (WEIGHTS_NAME, INDEX_NAME))


def _no_weights(folder: Path) -> ModelError:
    if any(folder.glob("model.shard-*-of-*.safetensors")):
        return ModelError(
            f"{folder} holds its weights in shards, each written by one process: make a model "
            f"folder of them with `firstlight convert {folder} --out DIR`, and use that"
        )
    repository = repository_of(folder)
    if has_pickled_weights(folder) or repository:
        return ModelError(
            f"{folder} has no {WEIGHTS_NAME}; a {PICKLED_NAME} is a pickle, which could run code "
            "when it is opened: make a model folder with safetensors of it with "
            f"`firstlight convert {repository or folder} --out DIR`, and use that"
        )
    return ModelError(
        f"{folder} has no {WEIGHTS_NAME}: only safetensors weights are read "
        "(pickled .bin and .pt files can run code when they are opened)"
    )


def _read_index(folder: Path, index_name: str) -> dict[str, str]:
    """The file name of each tensor, by an index.

    Raises:
        ModelError: the index is damaged, or names a file elsewhere.
    """
    path, fault = folder / index_name, "has no weight_map of tensors to files"
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
    """The tensors by the names given: the files, mapped into memory, which must not change
    while they are used.

    Raises:
        ModelError: a file is not the one whose header was read.
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
    """Write a safetensors file, atomically: an old one stands until the new one is complete.

    Raises:
        StorageError: the disk refuses, or the format has no name for a tensor's dtype.
    """
    with replacing(path) as file:
        write_tensors(file, tensors, {"format": "pt"})


def save_weights(
    tensors: Mapping[str, Tensor], folder: Path, max_shard_bytes: int = 5 * 10**9
) -> None:
    """Write the weights of a model folder: one file, or several with an index where they are
    larger than `max_shard_bytes`.

    Raises:
        StorageError: the disk refuses.
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

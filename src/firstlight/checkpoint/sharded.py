"""Write and read files of sharded tensors. Each process writes its own shards, and any number of
processes can read them.

    optimizer.shard-00001-of-00004.safetensors
    model.shard-00001-of-00004.safetensors

The format is that of torch's `HuggingFaceStorageWriter(save_distributed=True)`: safetensors files
whose metadata contains the offsets of each shard within its tensor. torch.distributed.checkpoint
and its consolidation functions can read these files. torch's default format is not used because its
index is a pickle.

Weights have the names and shapes of the model's parameters. Unlike in a Hugging Face model folder,
the weights of all experts are stacked in one tensor, and the vocabulary includes padding rows.
"""

from __future__ import annotations

import json
import math
import re
import warnings
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from firstlight.errors import CheckpointError, ModelError
from firstlight.files.disk import HashedFile
from firstlight.files.tensor_file import write_tensors
from firstlight.models import Model, ModelConfig, allocate
from firstlight.optim.dtensors import is_sharded
from firstlight.optim.optimizer import Optimizer
from firstlight.weights.huggingface import read_config, unloaded_model
from firstlight.weights.stored import read_header

#: The two kinds of tensors in a checkpoint. The values are the prefixes of the names of their
#: files.
WEIGHTS, MOMENTS = "model", "optimizer"

_FILE_NAME = re.compile(r"(model|optimizer)\.shard-(\d{5,})-of-(\d{5,})\.safetensors", re.ASCII)

# Keys that torch uses in the metadata of the files.
_PLACES_KEY = "DCP_SHARDING_INFO"
_OFFSETS_KEY = "saved_offsets"
_VERSION_KEY = "DCP_VERSION"

#: Supported dtypes of sharded tensors, keyed by their names in safetensors.
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
}


@dataclass(frozen=True)
class TensorShard:
    """A rectangular part of a tensor that is stored by one process.

    Attributes:
        tensor: elements of the shard, as a tensor with as many dimensions as the full tensor.
        offsets: first index of the shard in each dimension of the full tensor.
    """

    tensor: Tensor
    offsets: tuple[int, ...]


@dataclass(frozen=True)
class StoredShape:
    """Shape and dtype of a tensor that is stored as shards.

    Attributes:
        shape: shape of the full tensor.
        dtype: dtype of all shards.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype


def shard_name(kind: str, rank: int, size: int) -> str:
    """Return the name of the file that contains a rank's shards.

    Args:
        kind: `WEIGHTS` or `MOMENTS`.
        rank: rank of the process that writes the file.
        size: number of processes, each of which writes one file.
    """
    return f"{kind}.shard-{rank + 1:05d}-of-{size:05d}.safetensors"


def shard_names(names: Iterable[str]) -> list[str]:
    """Return the names of all shard files that a checkpoint must contain, derived from the names of
    its existing files. Return [] if the checkpoint is not sharded.
    """
    counts = {int(m[3]) for name in names if (m := _FILE_NAME.fullmatch(name))}
    return [
        shard_name(kind, rank, size)
        for size in sorted(counts)
        for kind in (MOMENTS, WEIGHTS)
        for rank in range(size)
    ]


def own_shards(tensors: Mapping[str, Tensor]) -> dict[str, TensorShard]:
    """Return the shards that this process must write, so that each element is written by exactly
    one process.

    If several processes have a copy of a shard (hybrid sharding), the name of the tensor determines
    which of them writes it. Tensors that are not sharded must be passed by a single process.

    Returns:
        The shards. Their tensors share memory with `tensors` and are on the same device.
    """
    # Imported here, because the import takes almost a second.
    from torch.distributed.checkpoint.default_planner import create_default_local_save_plan

    cut = {name: t for name, t in tensors.items() if is_sharded(t) and _is_owner(name, t)}
    shards = {
        name: TensorShard(tensor.detach(), (0,) * tensor.dim())
        for name, tensor in tensors.items()
        if not is_sharded(tensor)
    }
    for item in create_default_local_save_plan(cut, is_coordinator=True).items:
        name, place = item.index.fqn, item.tensor_data
        assert place is not None
        tensor = cut[name].detach()
        assert is_sharded(tensor)
        # If there are more processes than rows, some shards are empty.
        if math.prod(place.chunk.sizes):
            shards[name] = TensorShard(tensor.to_local(), tuple(place.chunk.offsets))
    return shards


def _is_owner(name: str, tensor: Tensor) -> bool:
    """Return True if this process must write its shard of a tensor. Other processes may have copies
    of the same shard.
    """
    assert is_sharded(tensor)
    mesh = tensor.device_mesh
    place = mesh.get_coordinate()
    if place is None:
        return False
    turn = zlib.crc32(name.encode())
    return all(
        place[dimension] == turn % mesh.size(dimension)
        for dimension, placement in enumerate(tensor.placements)
        if placement.is_replicate()
    )


def write_shards(path: Path, shards: Mapping[str, TensorShard]) -> HashedFile:
    """Write a file with the shards of this process. Return the written file, including its size and
    SHA-256.

    Raises:
        OSError: a file system error.
        StorageError: a tensor has a dtype or layout that the safetensors format does not support.
    """
    places = {name: {_OFFSETS_KEY: list(shard.offsets)} for name, shard in shards.items()}
    metadata = {_PLACES_KEY: json.dumps(places), _VERSION_KEY: "1.0", "format": "pt"}
    with HashedFile(path) as file:
        write_tensors(file, {name: shard.tensor for name, shard in shards.items()}, metadata)
    return file


def stored_shapes(folder: Path, kind: str) -> dict[str, StoredShape]:
    """Return the shapes and dtypes of the tensors that are stored as shards in a folder, after
    checking that the shards are complete.

    Args:
        kind: `WEIGHTS` or `MOMENTS`.

    Raises:
        CheckpointError: a file is missing or damaged, or shards are missing or overlap.
    """
    boxes: dict[str, list[_Box]] = {}
    dtypes: dict[str, torch.dtype] = {}
    for path in _files(folder, kind):
        for name, box, dtype in _shards_of(path):
            boxes.setdefault(name, []).append(box)
            if dtypes.setdefault(name, dtype) != dtype:
                other = dtypes[name]
                raise CheckpointError(
                    f"{path} is damaged: '{name}' is {dtype} here, but {other} in another file"
                )
    wholes = {}
    for name, parts in boxes.items():
        shape = _union(parts)
        if shape is None:
            raise CheckpointError(f"{folder} is damaged: the shards of '{name}' are incomplete")
        wholes[name] = StoredShape(shape, dtypes[name])
    return wholes


def read_shards(folder: Path, kind: str, targets: Mapping[str, Tensor]) -> None:
    """Fill tensors in place from the shards in a folder. Each process reads only the data of its
    own tensors, without communication.

    Args:
        kind: `WEIGHTS` or `MOMENTS`.
        targets: full tensors, or DTensors with any sharding, keyed by name. They can be on any
            device, and must have the same shapes and dtypes as in the files.

    Raises:
        CheckpointError: a tensor is missing or has a different shape or dtype, or a file is
            damaged.
    """
    stored = stored_shapes(folder, kind)
    for name, target in targets.items():
        found = stored.get(name)
        if found is None:
            raise CheckpointError(f"{folder} lacks tensor '{name}' in its shards")
        if (found.shape, found.dtype) != (tuple(target.shape), target.dtype):
            raise CheckpointError(
                f"{folder}: tensor '{name}' is {list(found.shape)} {found.dtype}, "
                f"expected {list(target.shape)} {target.dtype}"
            )
    if not targets:
        return
    from torch.distributed.checkpoint.filesystem import FileSystem
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    files = [str(path) for path in _files(folder, kind)]

    class Shards(FileSystem):
        """View of the file system in which a folder contains only shard files of one kind."""

        def ls(self, path: Any) -> list[str]:
            return files

    reader = HuggingFaceStorageReader(str(folder))
    reader.fs = Shards()
    try:
        with warnings.catch_warnings():
            # Hide torch's warning that each process reads without communication (no_dist), which is
            # intended here.
            warnings.simplefilter("ignore", UserWarning)
            load(
                {name: target.detach() for name, target in targets.items()},
                storage_reader=reader,
                no_dist=True,
            )
    except (safetensors.SafetensorError, OSError) as error:
        raise CheckpointError(f"checkpoint {folder} can't be read: {error}") from error


def read_full_tensors(
    folder: Path, kind: str, names: Iterable[str] | None = None
) -> dict[str, Tensor]:
    """Read full tensors from the shards in a folder into CPU memory.

    Args:
        kind: `WEIGHTS` or `MOMENTS`.
        names: names of the tensors to read; None for all tensors.

    Raises:
        CheckpointError: a tensor is missing, or a file is damaged.
    """
    stored = stored_shapes(folder, kind)
    wanted = stored.keys() if names is None else list(names)
    if lost := sorted(set(wanted) - stored.keys()):
        raise CheckpointError(f"{folder} lacks tensor '{lost[0]}' in its shards")
    tensors = {name: torch.empty(stored[name].shape, dtype=stored[name].dtype) for name in wanted}
    read_shards(folder, kind, tensors)
    return tensors


def sharded_model(folder: Path, vocab_multiple: int) -> Model:
    """Load the full model from a sharded checkpoint into CPU memory.

    Args:
        folder: the checkpoint's folder.
        vocab_multiple: the vocabulary in the checkpoint is padded to a multiple of this number.

    Raises:
        ModelError: config.json is damaged.
        CheckpointError: the shards are damaged, or do not match the model in config.json.
    """
    model = fitting_model(read_config(folder), folder, vocab_multiple)
    allocate(model, torch.device("cpu"))
    read_shards(folder, WEIGHTS, dict(model.named_parameters()))
    return model


def fitting_model(config: ModelConfig, folder: Path, vocab_multiple: int) -> Model:
    """Build a model from its config on the meta device, and check that it matches the shards in a
    folder.

    Raises:
        ModelError: the model and the shards have very different numbers of tensors.
        CheckpointError: a tensor is missing, unexpected or has a different shape.
    """
    stored = stored_shapes(folder, WEIGHTS)
    model = unloaded_model(config, folder, vocab_multiple, tensors=len(stored))
    expected = {name: tuple(p.shape) for name, p in model.named_parameters()}
    for name in sorted(expected.keys() ^ stored.keys()):
        raise CheckpointError(
            f"the weights in {folder} don't match the model: '{name}' is in only one of them"
        )
    for name, shape in expected.items():
        if stored[name].shape != shape:
            raise CheckpointError(
                f"{folder}: tensor '{name}' has shape {list(stored[name].shape)}, but the model "
                f"expects {list(shape)}"
            )
    return model


def restore_shards(
    folder: Path,
    model: Model,
    optimizer: Optimizer,
    vocab_multiple: int,
    *,
    other_prefix: str,
    has_moments: bool,
) -> dict[str, Tensor]:
    """Load the weights and moments from a sharded checkpoint into a model and its optimizer. Each
    process only reads its own shards.

    Args:
        folder: a sharded checkpoint.
        model: the model, which is modified in place. Its parameters can be sharded in any way.
        optimizer: the optimizer of the model, which is modified in place.
        vocab_multiple: the vocabulary of the model is padded to a multiple of this number.
        other_prefix: prefix of the names of those tensors in the optimizer files that are not
            moments.
        has_moments: True to raise an error if the checkpoint does not contain moments.

    Returns:
        The tensors that are not moments (random states), keyed by name, on the CPU.

    Raises:
        CheckpointError: the checkpoint is damaged, or belongs to a different model or optimizer.
    """
    fitting_model(model.config, folder, vocab_multiple)
    with optimizer.master_weights(changed=True):
        read_shards(folder, WEIGHTS, dict(model.named_parameters()))
    names = stored_shapes(folder, MOMENTS).keys()
    others = {name for name in names if name.startswith(other_prefix)}
    if moments := names - others:
        for name in sorted(moments ^ optimizer.state_names):
            raise CheckpointError(
                "the saved optimizer state does not fit this model and optimizer: "
                f"'{name}' is in only one of them"
            )
        optimizer.fill_state(lambda tensors: read_shards(folder, MOMENTS, tensors))
    elif has_moments and optimizer.state_names:
        raise CheckpointError(f"{folder} has no optimizer state")
    return read_full_tensors(folder, MOMENTS, others)


def _files(folder: Path, kind: str) -> list[Path]:
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return [folder / name for name in shard_names(names) if name.startswith(f"{kind}.")]


#: Bounds of a shard within the full tensor: (start indices, exclusive end indices), each with one
#: entry per dimension.
_Box = tuple[tuple[int, ...], tuple[int, ...]]


def _shards_of(path: Path) -> list[tuple[str, _Box, torch.dtype]]:
    """Return the tensor name, the bounds (see `_Box`) and the dtype of each shard in a file."""
    try:
        header = read_header(path)
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
        places = json.loads(metadata[_PLACES_KEY])
        found = []
        for name, tensor in header.items():
            offsets = tuple(places[name][_OFFSETS_KEY])
            if len(offsets) != len(tensor.shape) or any(type(o) is not int for o in offsets):
                raise ValueError(f"'{name}' has invalid offsets")
            if any(offset < 0 for offset in offsets) or 0 in tensor.shape:
                raise ValueError(f"'{name}' has invalid offsets or is empty")
            ends = tuple(o + size for o, size in zip(offsets, tensor.shape, strict=True))
            found.append((name, (offsets, ends), _DTYPES[tensor.kind]))
    except ModelError as error:
        raise CheckpointError(str(error)) from error
    except (KeyError, TypeError, ValueError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    return found


def _union(boxes: list[_Box]) -> tuple[int, ...] | None:
    """Return the shape of the full tensor if the boxes of its shards fill it without gaps or
    overlaps. Otherwise, return None.
    """
    if len({len(begins) for begins, _ in boxes}) != 1:
        return None
    shape = tuple(max(sizes) for sizes in zip(*(ends for _, ends in boxes), strict=True))
    volume = sum(math.prod(e - b for b, e in zip(*box, strict=True)) for box in boxes)
    if volume != math.prod(shape):
        return None
    # Together, the boxes have as many elements as the full tensor, so they fill it unless two of
    # them overlap.
    open_boxes: list[_Box] = []
    for box in sorted(boxes):
        open_boxes = [one for one in open_boxes if not shape or one[1][0] > box[0][0]]
        if any(_meet(one, box) for one in open_boxes):
            return None
        open_boxes.append(box)
    return shape


def _meet(one: _Box, other: _Box) -> bool:
    return all(
        begin < other_end and other_begin < end
        for begin, end, other_begin, other_end in zip(*one, *other, strict=True)
    )

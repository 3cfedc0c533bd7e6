"""Weights between a model and its safetensors files, without holding them twice.

Three ways lead from a model folder into a model, all by way of a model on the meta device:

    sequential  memory for the model is taken once, and each tensor is read from its file straight
                into its place, on any device and in any dtype
    mmap        the parameters *are* the file, mapped into memory: nothing is read until it is
                used, and processes share it. The file must not change while the model lives
    straight    all tensors are read, then copied into the model: twice the memory, as most
                programs load; here to be compared with

The default, `auto`, maps what can be mapped whole, which is what makes a model on the CPU answer at
once, and reads the rest sequentially: other devices, other dtypes, stacked experts, padded
vocabularies. Training, which writes all of its weights, reads sequentially.

What a tensor is called in the file and where it lies in the model is one table, `file_tensors`,
read for loading and for saving.
"""

from __future__ import annotations

import concurrent.futures
import io
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from firstlight.errors import InputError, ModelError, StorageError, describe_os_error
from firstlight.files import read_json
from firstlight.models import Model, MoEConfig, allocate

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"

LoadingWay = Literal["auto", "sequential", "mmap", "straight"]

#: Buffers that old checkpoints carry beside the weights; they are computed, not learned.
_BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}

#: Bytes read at a time where they have to be converted: few enough to stay in a core's cache, and
#: to be little memory for several threads.
_CHUNK_BYTES = 1 << 20
#: The same where they are moved to a GPU, each time with a wait.
_GPU_CHUNK_BYTES = 1 << 24

#: Where an expert's gate, up and down weights and the router's stand in a family's files.
_EXPERT_NAMES = {
    "mixtral": (
        "block_sparse_moe.experts.{}.w1.weight",
        "block_sparse_moe.experts.{}.w3.weight",
        "block_sparse_moe.experts.{}.w2.weight",
        "block_sparse_moe.gate.weight",
    ),
    "qwen3_moe": (
        "mlp.experts.{}.gate_proj.weight",
        "mlp.experts.{}.up_proj.weight",
        "mlp.experts.{}.down_proj.weight",
        "mlp.gate.weight",
    ),
}


def file_tensors(model: Model) -> dict[str, Tensor]:
    """The tensors of a model's file by name, as views of its parameters.

    Left out are a tied head and the rows that pad the vocabulary; stacked experts appear one by
    one, as in their family's files.
    """
    config = model.config
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if name == "lm_head.weight" or name == embedding_name(model):
            tensor = tensor[: config.vocab_size]
        if isinstance(config, MoEConfig) and ".mlp." in name:
            tensors |= _expert_tensors(name, tensor, config)
        else:
            tensors[name] = tensor
    return tensors


def embedding_name(model: Model) -> str:
    """The name of the token embedding's weight."""
    names = (name for name, _ in model.named_parameters())
    return next(name for name in names if name.endswith(("embed_tokens.weight", "wte.weight")))


def _expert_tensors(name: str, tensor: Tensor, config: MoEConfig) -> dict[str, Tensor]:
    layer, inner = name.split("mlp.", 1)
    gate, up, down, router = (layer + part for part in _EXPERT_NAMES[config.model_type])
    size = config.moe_intermediate_size
    if inner == "experts.gate_up_proj":
        return {
            file_name.format(expert): half
            for expert, matrix in enumerate(tensor)
            for file_name, half in ((gate, matrix[:size]), (up, matrix[size:]))
        }
    if inner == "experts.down_proj":
        return {down.format(expert): matrix for expert, matrix in enumerate(tensor)}
    return {router if inner == "gate.weight" else name: tensor}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file.

    Attributes:
        path: the file.
        kind: its number format, as safetensors names it (F32, BF16).
        shape: its sizes.
        offset: where its bytes begin in the file.
    """

    path: Path
    kind: str
    shape: tuple[int, ...]
    offset: int

    @property
    def dtype(self) -> torch.dtype:
        """Its number format. Only floating-point formats are known here."""
        return _DTYPES[self.kind]

    def read_into(self, target: Tensor) -> None:
        """Copy it into a contiguous tensor of the same shape, of any dtype and on any device.

        Raises:
            ModelError: the file is shorter than it says.
        """
        flat = target.detach().view(-1)
        if flat.device.type == "cpu" and flat.dtype == self.dtype:
            with open(self.path, "rb", buffering=0) as file:
                file.seek(self.offset)
                self._fill(flat, file)
            return
        start = 0
        for part in self._parts(_CHUNK_BYTES if flat.device.type == "cpu" else _GPU_CHUNK_BYTES):
            flat[start : start + len(part)] = part.to(flat.device)
            start += len(part)

    def equals(self, other: Tensor) -> bool:
        """Whether its values are those of a CPU tensor of the same shape."""
        flat, start = other.detach().view(-1), 0
        for part in self._parts():
            if not torch.equal(part.to(flat.dtype), flat[start : start + len(part)]):
                return False
            start += len(part)
        return True

    def _parts(self, chunk_bytes: int = _CHUNK_BYTES) -> Iterator[Tensor]:
        """Its values in order, so many bytes at a time, in a buffer that is used again."""
        count = torch.Size(self.shape).numel()
        size = max(1, min(count, chunk_bytes // self.dtype.itemsize))
        buffer = torch.empty(size, dtype=self.dtype)
        with open(self.path, "rb", buffering=0) as file:
            file.seek(self.offset)
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


@dataclass(frozen=True)
class MappedFile:
    """A file that a model's parameters are, as it was when it was mapped.

    Attributes:
        path: where it was.
        identity: the file itself (device, inode), which a rename over its name does not change.
        state: size in bytes, time of the last change in nanoseconds.
    """

    path: Path
    identity: tuple[int, int]
    state: tuple[int, int]

    @classmethod
    def of(cls, path: Path) -> MappedFile:
        """The file as it is now."""
        found = os.stat(path)
        return cls(path, (found.st_dev, found.st_ino), (found.st_size, found.st_mtime_ns))

    def require_unchanged(self) -> None:
        """Refuse to go on with weights that somebody has written into.

        Raises:
            ModelError: the file was overwritten or cut short in place.
        """
        try:
            now = MappedFile.of(self.path)
        except OSError:
            return  # deleted: it lives on as long as it is mapped
        if now.identity == self.identity and now.state != self.state:
            raise ModelError(
                f"{self.path} was changed in place while the model was in use: load it again "
                "(way='sequential', --loading sequential, keeps a copy)"
            )


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of a model folder: of its one file of weights, or of all that its index names.

    Raises:
        ModelError: there are none, or a file is missing or damaged.
    """
    tensors: dict[str, StoredTensor] = {}
    for name in weight_files(folder):
        tensors |= read_header(folder / name)
    return tensors


def read_header(path: Path) -> dict[str, StoredTensor]:
    """What a safetensors file holds, without reading it.

    Raises:
        ModelError: it is missing or damaged.
    """
    try:
        # The library checks all of the header against the file's length; only offsets are not
        # to be had from it.
        with safetensors.safe_open(path, framework="pt"), open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    except FileNotFoundError:
        raise ModelError(f"{path} is missing, though the index names it") from None
    except safetensors.SafetensorError as error:
        raise ModelError(f"{path} is damaged or cut short: {error}") from error
    except OSError as error:
        raise ModelError(f"{path} can't be read: {describe_os_error(error)}") from error
    return {
        name: StoredTensor(
            path, entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0]
        )
        for name, entry in header.items()
        if name != "__metadata__"
    }


def weight_files(folder: Path) -> list[str]:
    """The one file of weights, or the shards of an index.

    Raises:
        ModelError: there are none, or the index is damaged.
    """
    if (folder / WEIGHTS_NAME).is_file():
        return [WEIGHTS_NAME]
    if not (folder / INDEX_NAME).is_file():
        raise ModelError(
            f"{folder} has no {WEIGHTS_NAME}: only safetensors weights are read "
            "(pickled .bin and .pt files can run code when they are opened)"
        )
    try:
        index = read_json(folder / INDEX_NAME)
    except InputError as error:
        raise ModelError(str(error)) from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(
        isinstance(name, str) for name in weight_map.values()
    ):
        raise ModelError(f"{folder / INDEX_NAME} has no weight_map of tensors to files")
    names = sorted(set(weight_map.values()))
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise ModelError(f"{folder / INDEX_NAME} names a file outside its folder: {outside[0]}")
    return names


def weight_dtypes(folder: Path) -> list[str]:
    """The number formats of a folder's weights, as safetensors names them (F32, BF16)."""
    return sorted({tensor.kind for tensor in stored_tensors(folder).values()})


def load_weights(
    model: Model,
    folder: Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    way: LoadingWay = "auto",
) -> tuple[MappedFile, ...]:
    """Give a model on the meta device the weights of a model folder; return the files that it
    goes on using.

    Args:
        model: its parameters get memory on `device`.
        folder: one safetensors file, or several with an index.
        device: where the parameters go.
        dtype: of the parameters; None is that of the embedding in the file.
        way: see the head of this module.

    Raises:
        ModelError: a file is missing or damaged, or a tensor is missing, extra, of the wrong
            shape, not floating-point, or a tied head of its own (all named).
    """
    stored, tied_head = _fitting(model, folder)
    embedding = embedding_name(model)
    dtype = dtype or stored[embedding].dtype
    model.to(dtype)
    mapped = _WAYS[way](model, stored, torch.device(device))
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    if tied_head is not None and not tied_head.equals(file_tensors(model)[embedding].cpu()):
        raise _not_tied(folder, embedding)
    return mapped


def fitting_tensors(model: Model, folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a model folder by the names of `file_tensors`.

    Args:
        model: of that folder's config; on the meta device will do.
        folder: one safetensors file, or several with an index.

    Raises:
        ModelError: as `load_weights`.
    """
    stored, head = _fitting(model, folder)
    embedding = embedding_name(model)
    if head is not None and not head.equals(open_mapped(stored)[embedding]):
        raise _not_tied(folder, embedding)
    return stored


def _not_tied(folder: Path, embedding: str) -> ModelError:
    return ModelError(
        f"{folder}: config.json ties lm_head.weight to {embedding}, but the two differ"
    )


def _fitting(model: Model, folder: Path) -> tuple[dict[str, StoredTensor], StoredTensor | None]:
    """The stored tensors by the model's names, and a tied head that was stored all the same.

    Raises:
        ModelError: they are not the model's, by name.
    """
    expected, stored = file_tensors(model), stored_tensors(folder)
    if "transformer.wte.weight" in expected and "wte.weight" in stored:
        stored = {
            name if name.startswith("lm_head.") else f"transformer.{name}": tensor
            for name, tensor in stored.items()
        }
    stored = {n: t for n, t in stored.items() if n in expected or not n.endswith(_BUFFERS)}
    head = stored.pop("lm_head.weight", None) if model.config.tie_word_embeddings else None
    wrong = [
        f"{name} is {list(stored[name].shape)}, expected {list(tensor.shape)}"
        for name, tensor in expected.items()
        if name in stored and stored[name].shape != tensor.shape
    ]
    if head is not None and head.shape != (shape := expected[embedding_name(model)].shape):
        wrong.append(f"lm_head.weight is {list(head.shape)}, expected {list(shape)}")
    for problem, names in (
        ("lacks", sorted(expected.keys() - stored.keys())),
        ("has unknown", sorted(stored.keys() - expected.keys())),
        ("has misshapen", wrong),
        # Quantised weights mean nothing without their scales.
        ("has integer", sorted(n for n, t in stored.items() if t.kind not in _DTYPES)),
    ):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ModelError(f"{folder} {problem} tensors: {', '.join(names[:3])}{more}")
    return stored, head


def _load_sequentially(
    model: Model, stored: Mapping[str, StoredTensor], device: torch.device
) -> tuple[MappedFile, ...]:
    allocate(model, device)
    places = file_tensors(model)
    # Several at a time: reading releases Python's lock, and one core doesn't fill the memory bus.
    with concurrent.futures.ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        list(pool.map(lambda name: stored[name].read_into(places[name]), stored))
    return ()


def _load_mapped(
    model: Model, stored: Mapping[str, StoredTensor], device: torch.device
) -> tuple[MappedFile, ...]:
    files = tuple(MappedFile.of(path) for path in {tensor.path for tensor in stored.values()})
    mapped = open_mapped(stored)
    parameters = dict(model.named_parameters())
    whole = {
        name: tensor
        for name, tensor in mapped.items()
        if name in parameters
        and parameters[name].shape == tensor.shape
        and parameters[name].dtype == tensor.dtype
        and device.type == "cpu"
    }
    # Stacked experts, padded vocabularies, other dtypes and devices need memory of their own.
    for name, parameter in parameters.items():
        if name not in whole:
            whole[name] = torch.zeros_like(parameter, device=device)
    model.load_state_dict(whole, strict=False, assign=True)
    model.finish_loading()
    for name, place in file_tensors(model).items():
        if place.data_ptr() != mapped[name].data_ptr():
            place.copy_(mapped[name])
    return files


def _load_straight(
    model: Model, stored: Mapping[str, StoredTensor], device: torch.device
) -> tuple[MappedFile, ...]:
    # Copies, so that all of them are in memory at once and not only mapped there.
    read = {name: tensor.clone() for name, tensor in open_mapped(stored).items()}
    allocate(model, device)
    for name, place in file_tensors(model).items():
        place.copy_(read[name])
    return ()


def _load_automatically(
    model: Model, stored: Mapping[str, StoredTensor], device: torch.device
) -> tuple[MappedFile, ...]:
    mappable = device.type == "cpu" and all(
        name in stored and stored[name].shape == p.shape and stored[name].dtype == p.dtype
        for name, p in model.named_parameters()
    )
    return (_load_mapped if mappable else _load_sequentially)(model, stored, device)


_WAYS: dict[
    LoadingWay, Callable[[Model, Mapping[str, StoredTensor], torch.device], tuple[MappedFile, ...]]
] = {
    "auto": _load_automatically,
    "sequential": _load_sequentially,
    "mmap": _load_mapped,
    "straight": _load_straight,
}
LOADING_WAYS = tuple(_WAYS)


def fill(model: Model, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Give a model on the meta device memory on the CPU and copies of tensors.

    Args:
        model: changed in place.
        tensors: by the names of `file_tensors`.
        dtype: of the parameters.
    """
    model.to(dtype)
    allocate(model, torch.device("cpu"))
    for name, place in file_tensors(model).items():
        place.copy_(tensors[name])


def open_mapped(stored: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
    """The tensors by the names given: the files, mapped into memory, which must not change
    while they are used."""
    by_place: dict[tuple[Path, int], Tensor] = {}
    for path in sorted({tensor.path for tensor in stored.values()}):
        header = read_header(path)
        for name, tensor in safetensors.torch.load_file(path).items():
            by_place[path, header[name].offset] = tensor
    return {name: by_place[tensor.path, tensor.offset] for name, tensor in stored.items()}


def weights_to_save(model: Model) -> dict[str, Tensor]:
    """The tensors of `model.safetensors`: on the CPU and contiguous."""
    return {
        name: tensor.detach().cpu().contiguous() for name, tensor in file_tensors(model).items()
    }


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a safetensors file.

    Raises:
        OSError, StorageError: the disk refuses.
    """
    # Made first for its permissions: the library's files can be read by their owner alone.
    path.touch()
    mode = path.stat().st_mode
    try:
        safetensors.torch.save_file(dict(tensors), path, metadata={"format": "pt"})
    except safetensors.SafetensorError as error:
        # The library wraps the operating system's refusal in an error of its own.
        if number := re.search(r"os error (\d+)", str(error)):
            code = int(number[1])
            raise OSError(code, os.strerror(code), str(path)) from error
        raise StorageError(f"{path.name} can't be written: {error}") from error
    path.chmod(mode)


def save_weights(
    tensors: Mapping[str, Tensor], folder: Path, max_shard_bytes: int = 5 * 10**9
) -> None:
    """Write the weights of a model folder: one file, or several with an index where they are
    larger than `max_shard_bytes`.

    Raises:
        OSError, StorageError: the disk refuses.
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
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

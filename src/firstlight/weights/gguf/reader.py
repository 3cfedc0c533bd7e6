"""Read GGUF files, and convert their content to a Hugging Face config and tensors.

All quantised formats that the gguf package can dequantise are supported. Every length in a file is
compared with the size of the file before it is used. A damaged file therefore causes an error,
instead of making the reader hang or run out of memory. The format is described in ggml-org/ggml
`docs/gguf.md`.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from firstlight.console import say
from firstlight.errors import ModelError, TokenizerError, describe_os_error
from firstlight.files.atomic import make_folder, new_folder, remove_folder, storage_errors
from firstlight.files.cache import cache_folder, held
from firstlight.tokenizer import Tokenizer
from firstlight.weights.gguf.metadata import (
    ROPE_FACTORS,
    ROPE_FACTORS_LONG,
    ROPE_FACTORS_SHORT,
    config_of,
    generation_of,
    supported_model,
)
from firstlight.weights.gguf.tensors import tensor_rules
from firstlight.weights.gguf.tokenizer import read_tokenizer
from firstlight.weights.gguf.writer import import_gguf
from firstlight.weights.huggingface import CONFIG_NAME, GENERATION_CONFIG_NAME, generation_config
from firstlight.weights.loading import require_tensors
from firstlight.weights.stored import save_weights

_VERSIONS = (2, 3)
_FACTORS = (ROPE_FACTORS, ROPE_FACTORS_LONG, ROPE_FACTORS_SHORT)
#: GGUF type ids of the value types "string" and "array".
_STRING, _ARRAY = 8, 9
#: Format characters for the `struct` module, keyed by the ids of GGUF's scalar value types.
_SCALARS = {**dict(enumerate("BbHhIif?")), 10: "Q", 11: "q", 12: "d"}
#: Maximum number of values in a file's metadata. Each value takes about 100 bytes of memory. A
#: vocabulary of 262,144 tokens with its merges has 1.3 million values.
_MOST_VALUES = 2_000_000
#: Maximum number of tensors in a file. Models have at most 3,000 tensors, because all experts of a
#: layer are stacked.
_MOST_TENSORS = 20_000
#: Maximum position in bytes at which metadata can be stored in a file. A vocabulary of 262,144
#: tokens with its merges takes 10 MB. The file size is not a sufficient limit, because a sparse
#: file can have any size without taking disk space.
_MOST_METADATA_BYTES = 1 << 28
#: Maximum number of factors for the rotary frequencies. A model has one factor for every two
#: elements of a head.
_MOST_FACTORS = 1 << 16


@dataclass(frozen=True)
class GGUFModel:
    """Content of a GGUF file.

    Attributes:
        config: content of Hugging Face's config.json.
        tensors: fp32 tensors, keyed by Hugging Face name. A tied output head is omitted.
        metadata: all other entries of the file.
        path: path of the file, for messages.
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    metadata: dict[str, Any]
    path: Path

    @property
    def generation(self) -> dict[str, Any]:
        """Content of generation_config.json."""
        return generation_of(self.metadata)

    def tokenizer(self) -> Tokenizer | None:
        """Build the tokenizer stored in the file, or return None if there is none.

        Raises:
            TokenizerError: the vocabulary is damaged, or its kind is not supported.
        """
        try:
            return read_tokenizer(self.metadata)
        except TokenizerError as error:
            raise TokenizerError(f"{self.path}: {error}") from error


def read_gguf(path: Path) -> GGUFModel:
    """Read a model from a GGUF file.

    Raises:
        ModelError: the file can't be opened, is damaged or truncated, or the model's family or
            settings are not supported.
        MissingDependencyError: the gguf package is not installed.
    """
    import_gguf()
    try:
        with open(path, "rb") as file:
            parser = GGUFParser(file, path.stat().st_size)
            metadata, stored, data_start = parser.parse()
            parser.require_apart(stored)
            factors = {
                name: parser.tensor(name, stored.pop(name), data_start)
                for name in _FACTORS
                if name in stored
            }
            shapes = {name: tensor.shape for name, tensor in stored.items()}
            config = config_of(metadata, shapes, factors)
            rules = list(tensor_rules(supported_model(config)))
            expected = {rule.gguf: rule.gguf_shape for rule in rules}
            require_tensors("the file", expected, shapes)
            tensors: dict[str, Tensor] = {}
            for rule in rules:
                values = parser.tensor(rule.gguf, stored[rule.gguf], data_start)
                parts = values.unbind() if rule.stacked else (values,)
                for source, part in zip(rule.sources, parts, strict=True):
                    rule.put_into(tensors, source, part)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    except OSError as error:
        raise ModelError(f"{path} can't be read: {describe_os_error(error)}") from error
    except UnicodeDecodeError as error:
        raise ModelError(f"{path}: the file is damaged: a string is not UTF-8") from error
    return GGUFModel(config, tensors, metadata, path)


def gguf_folder(path: Path) -> Path:
    """Return a Hugging Face folder with the model of a GGUF file.

    The folder is stored in the cache on this machine, with the weights in fp32. It is written the
    first time the file is opened, and again whenever the file has changed.

    Raises:
        ModelError, TokenizerError, MissingDependencyError: see `read_gguf` and
            `GGUFModel.tokenizer`.
        StorageError: the cache can't be written.
    """
    stat, parent = path.stat(), cache_folder() / "gguf"
    # The size and the modification time are not sufficient, because unpacking a different file from
    # an archive can leave both unchanged.
    state = stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns
    place, version = (
        hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]
        for text in (str(path.resolve()), str(state))
    )
    folder = parent / f"{place}-{version}"
    if (folder / CONFIG_NAME).is_file():
        return folder
    with storage_errors(parent):
        make_folder(parent)
    with held(parent / f"{place}.lock", f"reading {path}", progress=True):
        if (folder / CONFIG_NAME).is_file():
            return folder
        model = read_gguf(path)
        tokenizer = model.tokenizer()
        say(f"{path} is opened for the first time: storing its weights in fp32 in {folder}")
        # Remove the folders created for earlier versions of the file. Some of them may be
        # incomplete, because the process that was writing them was killed.
        for old in parent.glob(f"*{place}-*"):
            remove_folder(old)
        config = {**model.config, "dtype": "float32", "torch_dtype": "float32"}
        files = {CONFIG_NAME: json.dumps(config, indent=2) + "\n"}
        if tokenizer is not None:
            generation = generation_config(tokenizer, model.generation)
            files[GENERATION_CONFIG_NAME] = json.dumps(generation, indent=2) + "\n"
            files |= tokenizer.files()
        with new_folder(folder) as partial:
            for name, text in files.items():
                (partial / name).write_text(text, encoding="utf-8")
            save_weights(model.tensors, partial)
    return folder


@dataclass(frozen=True)
class GGUFTensor:
    """Description of a tensor in a GGUF file.

    Attributes:
        shape: sizes of the dimensions, with the outermost dimension first. This is the reverse of
            the order in the file.
        kind: id of the ggml type.
        offset: position of the tensor's first byte, relative to the start of the data section.
    """

    shape: tuple[int, ...]
    kind: int
    offset: int


class GGUFParser:
    """Parser for a little-endian GGUF file.

    Args:
        file: the file, opened for reading and positioned at its beginning.
        size: size of the file in bytes.

    Raises:
        ModelError: raised by every method if the file is damaged, truncated or not supported.
        UnicodeDecodeError: raised by `parse` if a string is not valid UTF-8.
    """

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size = file, size
        self._position = self._values = 0

    def parse(self) -> tuple[dict[str, Any], dict[str, GGUFTensor], int]:
        """Parse the header.

        Returns:
            A tuple of the metadata, the descriptions of all tensors keyed by name, and the position
            of the data section.
        """
        if self._size < 4 or self._take(4) != b"GGUF":
            raise ModelError("this is not a GGUF file")
        version = self._number("I")
        if version not in _VERSIONS:
            raise ModelError(f"GGUF version {version} is not supported (supported: 2 and 3)")
        tensor_count, entry_count = self._number("Q"), self._number("Q")
        if tensor_count > _MOST_TENSORS:
            raise ModelError(f"{tensor_count:,} tensors, more than the limit of {_MOST_TENSORS:,}")
        self._count(entry_count)
        metadata: dict[str, Any] = {}
        for _ in range(entry_count):
            key = self._string()
            metadata[key] = self._value(self._number("I"))
        stored: dict[str, GGUFTensor] = {}
        for _ in range(tensor_count):
            name = self._string()
            dimensions = self._number("I")
            if name in stored or not 0 < dimensions <= 4:
                raise ModelError(f"the file is damaged at tensor '{name}'")
            sizes = [self._number("Q") for _ in range(dimensions)]
            stored[name] = GGUFTensor(tuple(sizes[::-1]), self._number("I"), self._number("Q"))
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ModelError(f"the file is damaged: general.alignment is {alignment!r}")
        # The data section begins at the next multiple of the alignment.
        return metadata, stored, -(-self._position // alignment) * alignment

    def require_apart(self, stored: Mapping[str, GGUFTensor]) -> None:
        """Raise an error if tensors in the file overlap. If this were allowed, a small file could
        use an unlimited amount of memory.

        Raises:
            ModelError: the total size of the tensors exceeds the size of the file.
        """
        total = sum(
            math.prod(one.shape[:-1]) * self._kind_of(name, one)[1] for name, one in stored.items()
        )
        if total > self._size:
            raise ModelError(
                f"the file is damaged or truncated: it has {self._size:,} bytes, but its tensors "
                f"need {total:,}"
            )

    @staticmethod
    def _kind_of(name: str, stored: GGUFTensor) -> tuple[Any, int]:
        """Return a tensor's ggml type and the size of one row in bytes."""
        gguf = import_gguf()
        try:
            kind = gguf.GGMLQuantizationType(stored.kind)
        except ValueError:
            raise ModelError(f"tensor {name} has the unknown type {stored.kind}") from None
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if stored.shape[-1] % block:
            raise ModelError(f"the file is damaged: tensor {name} has shape {list(stored.shape)}")
        return kind, stored.shape[-1] // block * block_bytes

    def tensor(self, name: str, stored: GGUFTensor, data_start: int) -> Tensor:
        """Read a tensor, and dequantise it to an fp32 tensor of shape `stored.shape`.

        Args:
            name: name of the tensor, for messages.
            stored: description of the tensor.
            data_start: position of the data section, as returned by `parse`.
        """
        gguf = import_gguf()
        # Limit the number of factors for the rotary frequencies here, because they are read before
        # their shape can be compared with the config.
        if name in _FACTORS and math.prod(stored.shape) > _MOST_FACTORS:
            raise ModelError(f"the file is damaged: tensor {name} has shape {list(stored.shape)}")
        kind, row_bytes = self._kind_of(name, stored)
        self._position = self._file.seek(min(data_start + stored.offset, self._size))
        data = np.frombuffer(self._take(math.prod(stored.shape[:-1]) * row_bytes), dtype=np.uint8)
        try:
            values = gguf.quants.dequantize(data.reshape(*stored.shape[:-1], row_bytes), kind)
        except NotImplementedError:
            raise ModelError(
                f"tensor {name} has the type {kind.name}, which is not supported"
            ) from None
        return torch.from_numpy(values.astype(np.float32)).reshape(stored.shape)

    def _take(self, count: int) -> bytes:
        # Check the length before reading, because `read` would allocate memory for any length in a
        # damaged file.
        if count > self._size - self._position:
            raise ModelError("the file is damaged or truncated")
        self._position += count
        return self._file.read(count)

    def _count(self, values: int) -> None:
        """Add `values` to the number of metadata values read so far, and raise an error if the
        total is too large. This method must be called before the values are read.
        """
        self._values += values
        if self._values > _MOST_VALUES:
            raise ModelError(
                f"the metadata has {self._values:,} values, more than the limit of {_MOST_VALUES:,}"
            )

    def _number(self, letter: str) -> Any:
        return struct.unpack(f"<{letter}", self._take(struct.calcsize(f"<{letter}")))[0]

    def _string(self) -> str:
        length = self._number("Q")
        if self._position + length > _MOST_METADATA_BYTES:
            raise ModelError(
                f"the file is damaged: it has a string of {length:,} bytes, but metadata is "
                f"limited to {_MOST_METADATA_BYTES:,} bytes"
            )
        return self._take(length).decode("utf-8")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind != _ARRAY:
            raise ModelError(f"the file is damaged: it has a value of the unknown type {kind}")
        kind, count = self._number("I"), self._number("Q")
        self._count(count)
        if kind == _STRING:
            return [self._string() for _ in range(count)]
        if kind not in _SCALARS:
            raise ModelError(f"the file is damaged: it has an array of the unknown type {kind}")
        size = struct.calcsize(f"<{_SCALARS[kind]}")
        return list(struct.unpack(f"<{count}{_SCALARS[kind]}", self._take(count * size)))

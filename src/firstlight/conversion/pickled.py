"""Read pickled weights, both from files that were written by `torch.save` and from model folders
with `pytorch_model.bin`.

This is the only module that reads pickles. It first checks that the opcodes of a pickle create only
tensors, numbers, strings and containers. It then calls `torch.load` with `weights_only=True`.
`weights_only` alone is not sufficient protection against malicious files. It allows functions that
can allocate an unlimited amount of memory, such as `bytearray` and `torch.FloatTensor`. It would
also practically never finish on nested tuples that contain the same tuple many times.
"""

from __future__ import annotations

import pickletools
import re
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from firstlight.errors import ModelError, describe_os_error
from firstlight.weights.huggingface import read_config, unloaded_model
from firstlight.weights.loading import count_tensors, one_by_one, require_fit
from firstlight.weights.stored import (
    FLOAT_FORMATS,
    PICKLED_INDEX_NAME,
    PICKLED_NAME,
    indexed_tensors,
)

#: First bytes of a file written by `torch.save`. Since PyTorch 1.6, they are the signature of a zip
#: archive. Before, they were a pickled magic number.
_ZIP = b"PK\x03\x04"
_BEFORE_1_6 = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."

#: Maximum size in bytes of the pickle in a zip archive. The pickle takes 100 to 200 bytes per
#: tensor, because the values of the tensors are stored in separate entries of the archive. Checking
#: one megabyte of opcodes takes about a second.
_MAX_PICKLE_BYTES = 1_500_000
#: Number of consecutive pickles at the beginning of a file from a PyTorch version before 1.6. They
#: are followed by the values of the tensors.
_PICKLES_BEFORE_1_6 = 5
#: Maximum number of elements in a tuple, including those of nested tuples. The elements of a tuple
#: that occurs several times are counted each time, because computing the hash of the outer tuple
#: visits every occurrence.
_MOST_TUPLE_PARTS = 10_000
#: Maximum number of elements in all containers of a file. The elements of a container that occurs
#: several times are counted each time, because comparing two objects visits every occurrence.
_MOST_PARTS = 1_000_000
#: Python objects that a pickle is allowed to refer to, in the form "module name".
_PLAIN = re.compile(
    r"collections OrderedDict|torch._utils _rebuild_(tensor(_v[23])?|parameter)"
    r"|torch\.storage UntypedStorage|torch (\w+Storage|Size|device|[a-z]+\d+\w*|bool)"
)

#: Prefixes that torch.compile and DistributedDataParallel add to all names of a state_dict.
_WRAPPERS = ("_orig_mod.", "module.")

_KINDS = {dtype: kind for kind, dtype in FLOAT_FORMATS.items()}


class _DamagedError(Exception):
    """Raised for a damaged file. `read_pickle` converts this error to a ModelError."""


def read_pickle(path: Path) -> Any:
    """Read a file that was written by `torch.save`. The tensors are memory-mapped, except in files
    from PyTorch versions before 1.6.

    Raises:
        ModelError: the file can't be read, or contains objects other than weights.
    """
    if path.is_dir():
        raise ModelError(f"{path} is a folder: use the checkpoint file in it")
    try:
        with open(path, "rb") as file:
            start = file.read(len(_BEFORE_1_6))
    except OSError as error:
        raise ModelError(f"can't read the checkpoint: {_os_error(path, error)}") from error
    is_zip = start.startswith(_ZIP)
    if not is_zip and start != _BEFORE_1_6:
        found = "it is empty" if not start else "it was not written by torch.save"
        raise ModelError(
            f"{path} is not a PyTorch checkpoint: {found} (supported: nanoGPT's ckpt.pt, "
            f"LLMs-from-scratch's model.pth and the {PICKLED_NAME} of a model folder)"
        )
    try:
        other = next((name for name in _named_in(path, is_zip) if not _PLAIN.fullmatch(name)), None)
        if other is not None:
            raise ModelError(
                f"{path} contains more than weights ({other.replace(' ', '.'):.80}), and "
                "unpickling that could run code: save only the state_dict with the program that "
                "created it (torch.save(model.state_dict(), 'model.pth'))"
            )
        # Files from PyTorch versions before 1.6 can't be memory-mapped.
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
        _require_few_parts(content)
        return content
    except OSError as error:
        raise ModelError(f"can't read the checkpoint: {_os_error(path, error)}") from error
    except ModelError:
        raise
    except (
        Exception
    ) as error:  # torch raises about ten classes of errors, including Exception itself.
        raise ModelError(
            f"{path} is damaged, truncated or not a checkpoint with only weights: copy it again, "
            "or save the model's state_dict with the program that created it"
        ) from error


def _named_in(path: Path, is_zip: bool) -> Iterator[str]:
    """Yield the names of the Python objects that the pickles in a file written by `torch.save`
    refer to, in the form "module name".
    """
    if not is_zip:
        with open(path, "rb") as file:
            for _ in range(_PICKLES_BEFORE_1_6):
                yield from _names_of(file)
                if file.tell() > _MAX_PICKLE_BYTES:
                    raise _DamagedError("it is not a list of weights")
        return
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        pickles = [entry for entry in entries if entry.filename.lower().endswith("data.pkl")]
        # `torch.save` does not compress entries. A small compressed entry could expand to an
        # unlimited amount of memory.
        if len(pickles) != 1 or any(entry.compress_type for entry in entries):
            raise zipfile.BadZipFile("it was not written by torch.save")
        if pickles[0].file_size > _MAX_PICKLE_BYTES:
            raise zipfile.BadZipFile("it is not a list of weights")
        with archive.open(pickles[0]) as file:
            yield from _names_of(file)


def _names_of(file: IO[bytes]) -> Iterator[str]:
    """Yield the names of the Python objects that a single pickle refers to, in the form "module
    name".

    Raises:
        _DamagedError: the pickle is too long or contains tuples with too many elements.
    """
    # Simulate the stack and the memo of the unpickler. The memo is stored in `known`. A tuple is
    # represented by its size, which is 1 plus the sizes of its elements. A mark is represented by
    # None, and all other values are represented by 1.
    stack: list[int | None] = []
    known: dict[Any, int | None] = {}
    for opcode, argument, place in pickletools.genops(file):
        if (place or 0) > _MAX_PICKLE_BYTES:
            raise _DamagedError("it is not a list of weights")
        name = opcode.name
        if name in ("GLOBAL", "INST"):
            yield str(argument)
        if name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            known[len(known) if name == "MEMOIZE" else argument] = stack[-1]
            continue
        taken = _take(opcode, stack)
        if name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(known[argument])
        elif name.startswith("TUPLE"):
            stack.append(1 + sum(taken))
            if 1 + sum(taken) > _MOST_TUPLE_PARTS:
                raise _DamagedError("its tuples contain other tuples too many times")
        elif name == "DUP":
            stack += 2 * taken
        else:
            after = opcode.stack_after
            stack += [None if kind is pickletools.markobject else 1 for kind in after]


def _take(opcode: pickletools.OpcodeInfo, stack: list[int | None]) -> list[int]:
    """Remove the operands of an opcode from the simulated stack, and return their sizes."""
    taken: list[int] = []
    for kind in reversed(opcode.stack_before):
        if kind is pickletools.stackslice:
            while (part := stack.pop()) is not None:
                taken.append(part)
        elif kind is not pickletools.markobject or opcode.name == "POP_MARK":
            taken.append(stack.pop() or 0)
    return taken


def _require_few_parts(content: Any) -> None:
    """Raise an error if containers are nested and repeated so many times that comparing or printing
    them would take practically forever.

    Raises:
        _DamagedError: the containers have more than `_MOST_PARTS` elements.
    """
    rest, count = [content], 0
    while rest:
        value = rest.pop()
        if isinstance(value, Mapping):
            parts = [*value.values(), *value]
        elif isinstance(value, list | tuple | set):
            parts = list(value)
        else:
            continue
        count += 1 + len(parts)
        if count > _MOST_PARTS:
            raise _DamagedError("its containers contain other containers too many times")
        rest += parts


def _os_error(path: Path, error: OSError) -> str:
    error.filename = error.filename or str(path)
    return describe_os_error(error)


def named_weights(path: Path, content: Any) -> dict[str, Any]:
    """Return the state_dict in a checkpoint. Name prefixes added by torch.compile and
    DistributedDataParallel are removed.

    Args:
        path: path of the file, for messages.
        content: content of the file. It is either the state_dict or a mapping that contains the
            state_dict under the key "model" or "model_state_dict".

    Raises:
        ModelError: no state_dict was found.
    """
    if not isinstance(content, Mapping):
        raise ModelError(
            f"{path} contains a {type(content).__name__}, not a state_dict: save "
            "model.state_dict() with the program that created it"
        )
    inner = (content.get(key) for key in ("model", "model_state_dict"))
    weights = next((value for value in inner if isinstance(value, Mapping)), content)
    if not weights or not all(isinstance(name, str) for name in weights):
        raise ModelError(f"{path} contains no named tensors: it is not a model's state_dict")
    names = list(weights)
    while wrapper := next((w for w in _WRAPPERS if all(n.startswith(w) for n in names)), ""):
        names = [name.removeprefix(wrapper) for name in names]
    return dict(zip(names, weights.values(), strict=True))


@dataclass(frozen=True)
class _PickledTensor:
    """A tensor from a pickle. Implements the parts of `StoredTensor` that `require_fit` uses."""

    value: Tensor

    @property
    def kind(self) -> str:
        return _KINDS.get(self.value.dtype, str(self.value.dtype).removeprefix("torch."))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape)

    def has_values_of(self, other: _PickledTensor, /) -> bool:
        return torch.equal(self.value, other.value.to(self.value.dtype))


def pickled_tensors(folder: Path) -> dict[str, Tensor]:
    """Read the weights of a model folder that contains `pytorch_model.bin`, or several weight files
    with an index.

    The returned tensors are keyed by the names that they would have in model.safetensors. Stacked
    experts are split into one view per expert.

    Raises:
        ModelError: a file is missing, damaged or contains objects other than weights; the index
            does not match the files; or the tensors do not match config.json. In the last case, the
            message names the tensors.
    """
    stored = {n: _PickledTensor(t) for n, t in _all_tensors(folder).items()}
    config = read_config(folder)
    model = unloaded_model(config, folder, tensors=count_tensors(stored))
    fitting = require_fit(model, folder, stored)
    tensors = {name: tensor.value.detach().contiguous() for name, tensor in fitting.items()}
    return one_by_one(tensors, config)


def _all_tensors(folder: Path) -> dict[str, Tensor]:
    if (folder / PICKLED_NAME).is_file():
        return _tensors_of(folder / PICKLED_NAME)
    return indexed_tensors(folder, PICKLED_INDEX_NAME, _tensors_of)


def _tensors_of(path: Path) -> dict[str, Tensor]:
    """Read the state_dict in a `pytorch_model.bin` file, and check that all tensors are complete.

    Raises:
        ModelError: the file can't be read, or is not a state_dict.
    """
    content = read_pickle(path)
    if not isinstance(content, Mapping) or not content:
        raise ModelError(f"{path} contains a {type(content).__name__}, not a model's state_dict")
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, Tensor) or not is_whole(value):
            raise ModelError(
                f"{path}: {name!r:.80} is not a plain named tensor, so this is not a state_dict"
            )
    return dict(content)


def is_whole(tensor: Tensor) -> bool:
    """Return True if a tensor is dense and its storage is as large as its shape requires.

    A tensor with strides of 0 is not complete. It can have any shape, even if its storage has only
    a few bytes.
    """
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        return False
    return tensor.nbytes <= tensor.untyped_storage().nbytes()

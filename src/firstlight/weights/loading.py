"""Load and save the weights of a model in safetensors files without keeping a second copy of them
in memory.

Weights are loaded into a model on the meta device in one of the following modes:

    sequential  The memory of the model is allocated once, and each tensor is read from its file
                directly into its parameter. Supports all devices and dtypes.
    mmap        The parameters are views of the memory-mapped file. Weights are read when they are
                first used, and several processes share the memory. The file must not change while
                the model exists.
    straight    All tensors are read and then copied into the model, as in most programs. This takes
                twice as much memory. It is only used as a baseline in benchmarks.

The default, `auto`, selects `mmap` if all parameters can be memory-mapped, because the model is
then ready immediately. Otherwise, it selects `sequential`. Parameters can be mapped only on the CPU
and in the dtype of the file. Models with stacked experts, experts in MXFP4 or a padded vocabulary
can't be mapped. Training overwrites all weights, so it always uses `sequential`.

`file_tensors` maps the tensor names in the file to the parameters of the model. It is used both for
loading and for saving.
"""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol, Self, TypeVar

import torch
from torch import Tensor, nn

from firstlight.errors import ModelError
from firstlight.models import Model, ModelConfig, allocate, padded_vocab_size
from firstlight.models.family import ExpertNames
from firstlight.weights.composite import text_tensors
from firstlight.weights.stored import (
    FLOAT_FORMATS,
    AnyStored,
    FileState,
    StoredTensor,
    open_tensors,
    stored_tensors,
    with_packed,
)

LoadingMode = Literal["auto", "sequential", "mmap", "straight"]

#: Suffixes of buffer names in old checkpoints. These buffers are ignored, because they are computed
#: rather than learned.
COMPUTED_BUFFERS = (
    ".attn.bias",
    ".attn.masked_bias",
    ".rotary_emb.inv_freq",
    # Name suffixes of the attention masks in Pythia's checkpoints.
    ".attention.bias",
    ".attention.masked_bias",
)


class _Described(Protocol):
    """Interface of a tensor that has not been read from its file yet, such as a `StoredTensor`."""

    @property
    def kind(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    def has_values_of(self, other: Self, /) -> bool: ...


_AnyTensor = TypeVar("_AnyTensor", bound=_Described)


#: Name of the weight of the output head in firstlight's models.
HEAD_WEIGHT = "lm_head.weight"

#: Name suffix of a tensor that exists only in files with stacked experts.
_STACKED = ".mlp.experts.gate_up_proj"


def has_stacked_experts(names: Iterable[str]) -> bool:
    """Return True if the tensor names are from files that store all experts of a layer in a single
    tensor, as firstlight's models do.

    transformers 5 writes such files if `save_pretrained` is called with
    `save_original_format=False`.
    """
    return any(name.endswith(_STACKED) for name in names)


def count_tensors(stored: Mapping[str, _Described]) -> int:
    """Return the number of tensors in the files of a model. Each expert in a stack of experts
    counts as a separate tensor.
    """
    # Ignore empty tensors. In a damaged file, they could have any number of experts.
    return sum(
        t.shape[0] if ".experts." in n and len(t.shape) == 3 else 1
        for n, t in stored.items()
        if 0 not in t.shape
    )


def file_tensors(model: Model, *, stacked: bool = False) -> dict[str, Tensor]:
    """Return the tensors that are stored in the file of a model, keyed by their names in the file.

    The tensors are views of the model's parameters. A tied output head is omitted, and so are rows
    that pad the vocabulary.

    Args:
        model: the model.
        stacked: True to return all experts of a layer as one tensor of shape [E, ...], where E is
            the number of experts. False to return a separate view of each expert's matrices, under
            the name that it has in the original files of the model family.
    """
    config = model.config
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name == HEAD_WEIGHT and config.tie_word_embeddings:
            continue
        if name in (HEAD_WEIGHT, embedding_name(model)):
            tensor = tensor[: config.vocab_size]
        tensors[file_name(model, name)] = tensor
    return tensors if stacked else one_by_one(tensors, config)


def one_by_one(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Split stacked experts into views of each expert's matrices.

    A stack of gate and up matrices has the shape [E, 2F, C], and a stack of down matrices has the
    shape [E, C, F]. E is the number of experts, F is the MLP size, and C is the hidden size.

    Returns:
        All tensors, keyed by the names that they have in the original files of the model family.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if config.family.experts is not None and ".mlp." in name:
            found |= _expert_tensors(name, tensor, config.family.experts)
        else:
            found[name] = tensor
    return found


def file_name(model: Model, name: str) -> str:
    """Return the name under which the parameter `name` is stored in the file of a model. The
    parameter must not belong to an expert.
    """
    return model.head_file_name if name == HEAD_WEIGHT else name


def embedding_name(model: Model) -> str:
    """Return the name of the token embedding's weight."""
    return f"{model.embedding_name}.weight"


def _expert_tensors(name: str, tensor: Tensor, names: ExpertNames) -> dict[str, Tensor]:
    layer, inner = name.split("mlp.", 1)
    if inner == "experts.gate_up_proj":
        return {
            layer + names.matrix(word, expert): half
            for expert, matrix in enumerate(tensor)
            for word, half in zip(("gate", "up"), matrix.chunk(2), strict=True)
        }
    if inner == "experts.down_proj":
        return {
            layer + names.matrix("down", expert): matrix for expert, matrix in enumerate(tensor)
        }
    return {layer + names.router if inner == "gate.weight" else name: tensor}


def load_weights(
    model: Model,
    folder: Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    mode: LoadingMode = "auto",
) -> tuple[FileState, ...]:
    """Load the weights of a model folder into a model on the meta device.

    Args:
        model: the model. Its parameters are allocated on `device`.
        folder: a folder with one safetensors file, or several with an index.
        device: device on which to allocate the parameters.
        dtype: dtype of the parameters. None to use the dtype of the embedding in the file.
        mode: loading mode, as described in the docstring of this module.

    Returns:
        The files that remain memory-mapped as parameters, or () if all weights were copied.

    Raises:
        ModelError: a file is missing or damaged; a tensor is missing, unexpected, not floating
            point or has the wrong shape; or the weight of a tied output head differs from the
            embedding. The message names the file or tensor.
    """
    stored = fitting_tensors(model, folder)
    dtype = dtype or stored[embedding_name(model)].dtype
    model.to(dtype)
    mapped = _MODES[mode](model, stored, torch.device(device))
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    return mapped


def fitting_tensors(model: Model, folder: Path) -> dict[str, AnyStored]:
    """Return the tensors of a model folder, keyed by the names that `file_tensors` uses. Experts
    that are stacked in the files are returned as stacks.

    Args:
        model: a model built from that folder's config, on any device.
        folder: a folder with one safetensors file, or several with an index.

    Raises:
        ModelError: the tensors do not match the model; see `load_weights`.
    """
    found = text_tensors(stored_tensors(folder), folder)
    stored: dict[str, AnyStored] = {**found}
    if model.config.family.has_mxfp4:
        stored = with_packed(found)
    return require_fit(model, folder, stored)


def require_fit(
    model: Model, folder: Path, stored: Mapping[str, _AnyTensor]
) -> dict[str, _AnyTensor]:
    """Check that the tensors of a folder match a model, and return the tensors that belong to the
    model.

    Args:
        model: the model, on any device.
        folder: the folder, for messages.
        stored: all tensors in the files of the folder, keyed by name.

    Raises:
        ModelError: the tensors do not match the model; see `load_weights`.
    """
    expected = file_tensors(model, stacked=has_stacked_experts(stored))
    prefix, _, short = embedding_name(model).partition(".")
    head_name = model.head_file_name
    heads = (HEAD_WEIGHT, head_name)
    # If a model was saved without its output head, its tensor names do not have the prefix.
    if short in stored:
        stored = {n if n in heads else f"{prefix}.{n}": tensor for n, tensor in stored.items()}
    if HEAD_WEIGHT in stored:  # Transformers 5 uses this name for all families.
        stored = {head_name if n == HEAD_WEIGHT else n: tensor for n, tensor in stored.items()}
    stored = {n: t for n, t in stored.items() if n in expected or not n.endswith(COMPUTED_BUFFERS)}
    left_out = model.config.family.left_out
    stored = {n: t for n, t in stored.items() if not n.startswith(left_out)}
    quantised = sorted(
        f"{name} ({tensor.kind})"
        for name, tensor in stored.items()
        if tensor.kind not in FLOAT_FORMATS
    )
    embedding = embedding_name(model)
    shapes = {name: tuple(tensor.shape) for name, tensor in expected.items()}
    if model.config.tie_word_embeddings and head_name in stored:
        shapes[head_name] = shapes[embedding]
    require_tensors(str(folder), shapes, {name: t.shape for name, t in stored.items()})
    if quantised:
        # Reject quantised weights, because they can't be used without their scales.
        raise ModelError(
            f"{folder} has quantised tensors ({first_names(quantised)}): use the unquantised model"
        )
    head = stored.pop(head_name, None) if model.config.tie_word_embeddings else None
    if head is not None and not head.has_values_of(stored[embedding]):
        raise ModelError(
            f"{folder}: config.json ties {head_name} to {embedding}, but their values differ: "
            "set tie_word_embeddings to false in config.json"
        )
    return stored


def first_names(names: Sequence[str]) -> str:
    """Format names for a message. The result contains the first three names and the number of
    remaining names.
    """
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"


def require_tensors(
    where: str, expected: Mapping[str, Sequence[int]], given: Mapping[str, Sequence[int]]
) -> None:
    """Raise an error for tensors that are missing, unexpected or have the wrong shape.

    Args:
        where: name of the model or file, for use in the message.
        expected, given: shapes, keyed by tensor name.

    Raises:
        ModelError: a tensor is missing, unexpected or has the wrong shape. The message names up to
            three such tensors.
    """
    wrong = [
        f"{name} is {list(given[name])}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in given and tuple(given[name]) != tuple(shape)
    ]
    for problem, names in (
        ("lacks", sorted(expected.keys() - given.keys())),
        ("has unknown", sorted(given.keys() - expected.keys())),
        ("has misshapen", wrong),
    ):
        if names:
            raise ModelError(f"{where} {problem} tensors: {first_names(names)}")


def _load_sequentially(
    model: Model, stored: Mapping[str, AnyStored], device: torch.device
) -> tuple[FileState, ...]:
    allocate(model, device)
    places = file_tensors(model, stacked=has_stacked_experts(stored))
    inference = torch.is_inference_mode_enabled()

    def read(tensor: AnyStored, place: Tensor) -> None:
        # torch's inference mode is a per-thread setting.
        with torch.inference_mode(inference):
            tensor.read_into(place)

    # Use several threads, because reading releases the GIL and a single core can't use the full
    # memory bandwidth.
    with concurrent.futures.ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        list(pool.map(lambda name: read(stored[name], places[name]), stored))
    return ()


def _saved_buffers(model: Model) -> list[tuple[str, Tensor]]:
    """Return the names and values of the buffers that are saved in the files of a model."""
    saved = model.state_dict().keys()
    return [(name, buffer) for name, buffer in model.named_buffers() if name in saved]


def _load_mapped(
    model: Model, stored: Mapping[str, AnyStored], device: torch.device
) -> tuple[FileState, ...]:
    # MXFP4 tensors are unpacked into memory, so later changes to the file do not affect them.
    plain = [tensor for tensor in stored.values() if isinstance(tensor, StoredTensor)]
    files = tuple({tensor.file for tensor in plain})
    mapped = open_tensors(stored)
    whole = {}
    for name, parameter in (*model.named_parameters(), *_saved_buffers(model)):
        tensor = mapped.get(file_name(model, name))
        if (
            tensor is not None
            and parameter.shape == tensor.shape
            and parameter.dtype == tensor.dtype
            and device.type == "cpu"
        ):
            whole[name] = tensor
        else:
            # Memory-mapped parameters can't be used if experts must be stacked, if the vocabulary
            # is padded, or if the dtype or device differs.
            whole[name] = torch.zeros_like(parameter, device=device)
    model.load_state_dict(whole, strict=False, assign=True)
    model.finish_loading()
    for name, place in file_tensors(model, stacked=has_stacked_experts(stored)).items():
        if place.data_ptr() != mapped[name].data_ptr():
            place.copy_(mapped[name])
    return files


def _load_straight(
    model: Model, stored: Mapping[str, AnyStored], device: torch.device
) -> tuple[FileState, ...]:
    # `open_tensors` only maps the tensors. Clone them to read them into memory.
    read = {name: tensor.clone() for name, tensor in open_tensors(stored).items()}
    allocate(model, device)
    for name, place in file_tensors(model, stacked=has_stacked_experts(stored)).items():
        place.copy_(read[name])
    return ()


def _load_automatically(
    model: Model, stored: Mapping[str, AnyStored], device: torch.device
) -> tuple[FileState, ...]:
    every = (*model.named_parameters(), *_saved_buffers(model))
    named = {file_name(model, name): p for name, p in every}
    mappable = device.type == "cpu" and all(
        isinstance(one := stored.get(name), StoredTensor)
        and (one.shape, one.dtype) == (p.shape, p.dtype)
        for name, p in named.items()
    )
    return (_load_mapped if mappable else _load_sequentially)(model, stored, device)


_MODES: dict[
    LoadingMode, Callable[[Model, Mapping[str, AnyStored], torch.device], tuple[FileState, ...]]
] = {
    "auto": _load_automatically,
    "sequential": _load_sequentially,
    "mmap": _load_mapped,
    "straight": _load_straight,
}
LOADING_MODES = tuple(_MODES)


def fill(model: Model, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Allocate CPU memory for a model that is on the meta device, and copy tensors into its
    parameters.

    Args:
        model: the model, modified in place.
        tensors: tensors, keyed by the names that `file_tensors` uses.
        dtype: dtype of the parameters.
    """
    model.to(dtype)
    allocate(model, torch.device("cpu"))
    for name, place in file_tensors(model).items():
        place.copy_(tensors[name])


def weights_to_save(model: Model) -> dict[str, Tensor]:
    """Return the tensors to save in `model.safetensors`. They are contiguous and on the CPU."""
    return {
        name: tensor.detach().cpu().contiguous() for name, tensor in file_tensors(model).items()
    }


@torch.no_grad()
def nonfinite_tensor(tensors: Iterable[tuple[str, Tensor]]) -> str | None:
    """Return the name of the first tensor that contains NaN or infinity, or None."""
    return next((name for name, tensor in tensors if not is_finite(tensor)), None)


def is_finite(tensor: Tensor) -> bool:
    """Return True if all elements of a tensor of any shape are finite."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    if tensor.itemsize == 1:  # torch does not support `aminmax` for fp8.
        tensor = tensor.float()
    # The minimum and maximum are NaN if any element is NaN. Unlike `isfinite`, they can be computed
    # without allocating a second tensor of the same size.
    return bool(torch.stack(tensor.aminmax()).isfinite().all())


def stored_values(stored: Mapping[str, AnyStored]) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and values of the tensors from `fitting_tensors`. Only one tensor is in
    memory at a time.
    """
    for name, tensor in stored.items():
        yield name, tensor.read()


# Changing the vocabulary size of an existing model


@torch.no_grad()
def grow_vocabulary(
    model: Model,
    tokens_before: int,
    tokens_now: int,
    *,
    copied_from: int | None = None,
    vocab_multiple: int = 1,
) -> None:
    """Resize the embedding and the output head for new tokens, whose ids are `tokens_before` to
    `tokens_now` - 1.

    The rows of a new token are the mean of the old tokens' rows, or a copy of one old token's rows.
    With the mean (Hewitt 2021), the model considers a new token about as likely as the average
    token, so the new tokens take little probability from the others.

    The rows of the old tokens do not change. Because the matrix product has a different size, the
    logits of the old tokens can differ by rounding errors. For most sizes, they do not differ at
    all. The largest observed difference is 2e-8. A tied output head stays tied.

    Args:
        model: the model. It is modified in place, as is its `config`. If its embedding already has
            rows for the ids of the new tokens, as with a padded vocabulary, these rows are
            overwritten.
        tokens_before: number of token ids in the old tokenizer.
        tokens_now: number of token ids in the new tokenizer.
        copied_from: id of the old token whose rows are copied. None to use the mean of the old
            tokens' rows.
        vocab_multiple: the number of rows of the embedding is padded to a multiple of this number.
    """
    assert tokens_before <= model.config.vocab_size
    assert copied_from is None or copied_from < tokens_before
    vocab_size = max(tokens_now, model.config.vocab_size)
    rows = padded_vocab_size(vocab_size, vocab_multiple)
    tied = model.config.tie_word_embeddings
    for name in (embedding_name(model), *(() if tied else (HEAD_WEIGHT,))):
        module = model.get_submodule(name.removesuffix(".weight"))
        old = module.weight
        assert isinstance(old, Tensor)
        grown = old.new_zeros(rows, old.shape[1])
        grown[: len(old)] = old[:rows]
        known = old[:tokens_before]
        source = known.double().mean(0) if copied_from is None else old[copied_from]
        grown[tokens_before:tokens_now] = source.to(old.dtype)
        module.weight = nn.Parameter(grown)
    model.config = model.config.model_copy(update={"vocab_size": vocab_size})
    model.finish_loading()


@torch.no_grad()
def cut_vocabulary(model: Model, tokens: int, *, vocab_multiple: int = 1) -> None:
    """Shrink the embedding and the output head to the first `tokens` token ids.

    Args:
        model: the model. It is modified in place, as is its `config`.
        tokens: number of tokens to keep.
        vocab_multiple: the number of rows of the embedding is padded to a multiple of this number.
    """
    for name in (embedding_name(model), HEAD_WEIGHT):
        module = model.get_submodule(name.removesuffix(".weight"))
        old = module.weight
        assert isinstance(old, Tensor)
        kept = old.new_zeros(padded_vocab_size(tokens, vocab_multiple), old.shape[1])
        kept[:tokens] = old[:tokens]
        module.weight = nn.Parameter(kept)
    model.config = model.config.model_copy(update={"vocab_size": tokens})
    model.finish_loading()

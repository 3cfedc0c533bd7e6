"""Checkpoints of other programs: nanoGPT, nanochat, LLMs-from-scratch, OpenAI's GPT-2, Meta's
Llama, litgpt, torchtune.

The tensors get Hugging Face's names and layout. Settings that the files lack are given by the
caller, or assumed to have the program's defaults, with a note. Each program has one file, which
knows its names, files and settings.

Names and shapes of tensors do not show everything about a model: a GPT of LLMs-from-scratch with
sliding windows (`ch04/06_swa`) has the same tensors as a GPT without them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from firstlight.conversion.check import first_names
from firstlight.conversion.foreign import book, litgpt, meta, nanochat, nanogpt, openai, torchtune
from firstlight.conversion.foreign.config import given_config, gpt2_config, llama_config
from firstlight.conversion.foreign.layout import (
    SIZES,
    TRANSPOSED,
    Layout,
    Opened,
    Shape,
    optimizer_states,
)
from firstlight.conversion.pickled import is_whole, named_weights, read_pickle
from firstlight.errors import ModelError
from firstlight.weights.huggingface import CONFIG_NAME
from firstlight.weights.stored import INDEX_NAME, WEIGHTS_NAME

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

#: Layouts of single files, tried in this order. A `GPTModelFast` of the book also has the mark of
#: its `GPTModel`, and therefore comes first.
LAYOUTS = (
    nanogpt.LAYOUT,
    book.GPT_FAST,
    book.GPT,
    book.LLAMA,
    torchtune.LAYOUT,
    nanochat.LAYOUT,
)


@dataclass(frozen=True)
class ForeignModel:
    """A model of another program, in Hugging Face's terms.

    Attributes:
        config: a config.json object, of a GPT-2, a nanochat or a Llama-like model.
        tensors: tensors by their names in model.safetensors, without a tied head. A tensor that
            needed no rearranging is memory-mapped, and changes when the file does.
        program: name of the program.
        notes: settings that were assumed, one sentence each.
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    program: str
    notes: tuple[str, ...]


def read_foreign(path: Path, *, config: Mapping[str, Any] | None = None) -> ForeignModel:
    """Read a checkpoint of another program.

    Args:
        path: a file of nanoGPT, LLMs-from-scratch or torchtune; or of OpenAI's GPT-2, Meta's
            Llama, litgpt or nanochat, the folder or its file of weights.
        config: settings that the file lacks, as keys of a Hugging Face config.json. A GPT of
            LLMs-from-scratch needs `n_head` if its heads are not of size 64. Llamas of
            LLMs-from-scratch and torchtune need `num_attention_heads`,
            `max_position_embeddings` and `rope_parameters`.

    Raises:
        InputError: a file of settings can't be read.
        ModelError: the file can't be read, holds objects other than weights, or is of an unknown
            program; a tensor is missing, unknown, misshapen or not floating point; or `config`
            lacks a needed key or contradicts the file.
    """
    opened = _open(path)
    layout, weights = opened.layout, opened.weights
    layers, sources = _sources(path, weights, layout)
    _check_dtypes(path, weights)
    sizes = {**_sizes(path, weights, layout), "D": opened.settings.found.get("head_dim", 0)}
    _check_shapes(path, weights, sources, layout, sizes=sizes)
    # The embedding is the first tensor of every layout.
    (embedding,), (head,) = next(iter(sources.values())), sources["lm_head.weight"]
    a, b = weights[embedding], weights[head]
    tied = a.dtype == b.dtype and torch.equal(a, b)
    qkv_bias = layout.optional != book.QKV_BIAS or "transformer.h.0.attn.c_attn.bias" in sources
    shape = Shape(sizes, layers, tied, qkv_bias)
    full_config, notes = _config(path, opened, shape, config or {})
    tensors, filled = _convert(weights, sources, layout, sizes, tied=tied)
    if layout.rotates_pairs:
        _turn_halves(tensors, full_config["head_dim"])
    if opened.left_out:
        notes.append(
            f"The optimizer's state in it ({', '.join(opened.left_out)}) is left out: training "
            "that starts from the result (firstlight train --init-from) begins with new moments."
        )
    if filled:
        notes.append(f"It has no biases for {', '.join(filled)}: zeros stand in for them.")
    if not qkv_bias:
        notes.append(
            "Its queries, keys and values have no biases, and neither have those of the result "
            "(qkv_bias: false in config.json): transformers takes zeros for them; for other "
            "programs convert the result once more, which writes the zeros out."
        )
    return ForeignModel(full_config, tensors, layout.program, tuple(notes))


def foreign_folder(path: Path) -> Path | None:
    """The folder of another program's model that consists of several files.

    Args:
        path: the folder, or for litgpt, Meta and OpenAI its file of weights.

    Returns:
        The folder; None for any other file, and for folders of Hugging Face or unknown programs.
    """
    folder = path if path.is_dir() else path.parent
    is_named = path.name == litgpt.FILE or ".ckpt" in path.name
    is_meant = is_named or path.is_dir() or meta.FILE.fullmatch(path.name) is not None
    if not is_meant or not folder.is_dir():
        return None
    if path.is_dir() and any((folder / name).is_file() for name in (WEIGHTS_NAME, INDEX_NAME)):
        return None  # a litgpt folder can also hold the Hugging Face model that it was made from
    if (folder / litgpt.FILE).is_file() and (folder / litgpt.CONFIG).is_file():
        return folder
    if (folder / meta.CONFIG).is_file() and meta.files_in(folder):
        return folder
    # A folder without meta_STEP.json is accepted here, so that the error names the missing file.
    if path.is_dir() and nanochat.files_in(folder) and not (folder / CONFIG_NAME).is_file():
        return folder
    return folder if (folder / openai.CONFIG).is_file() and openai.bundles_in(folder) else None


def _open(path: Path) -> Opened:
    """Open another program's model.

    Raises:
        InputError: a file of settings can't be read.
        ModelError: a file can't be read, holds objects other than weights, or is of an unknown
            program.
    """
    folder = foreign_folder(path)
    if folder is None:
        return _open_file(path)
    if (folder / litgpt.FILE).is_file():
        return litgpt.open_folder(folder)
    if meta.files_in(folder):
        return meta.open_folder(folder)
    steps = nanochat.files_in(folder)
    return _open_file(steps[-1]) if steps else openai.open_folder(folder)


def _open_file(path: Path) -> Opened:
    """Open a checkpoint file of nanoGPT, LLMs-from-scratch, torchtune or nanochat."""
    content = read_pickle(path)
    weights = named_weights(path, content)
    layout = _layout_of(path, weights)
    if layout is nanochat.LAYOUT:
        opened = nanochat.open_file(path, weights)
    elif layout is nanogpt.LAYOUT:
        opened = nanogpt.open_weights(content, weights)
    elif layout is torchtune.LAYOUT:
        opened = torchtune.open_weights(weights)
    elif layout is book.LLAMA:
        opened = book.open_llama(path, weights)
    else:
        opened = book.open_gpt(weights, layout)
    return replace(opened, left_out=optimizer_states(content))


def _layout_of(path: Path, weights: Mapping[str, Any]) -> Layout:
    for layout in LAYOUTS:
        if any(name.endswith(layout.mark) for name in weights):
            return layout
    if any(name.startswith("transformer.h.0.attn.qkv.") for name in weights):
        raise ModelError(
            f"{path} is of litgpt: name the folder that has it as {litgpt.FILE} "
            f"beside its {litgpt.CONFIG}"
        )
    if any(name.endswith(meta.LAYOUT.mark) for name in weights):
        raise ModelError(
            f"{path} is of Meta: name the folder that has its consolidated.00.pth beside its "
            f"{meta.CONFIG}"
        )
    raise ModelError(
        f"{path} is of an unknown layout, it begins with '{next(iter(weights))}': GPTs of "
        "nanoGPT, GPTs and Llamas of LLMs-from-scratch and Llamas of torchtune are read, and "
        "folders of OpenAI's GPT-2, Meta's Llama, litgpt and nanochat"
    )


def _config(
    path: Path, opened: Opened, shape: Shape, config: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """The model's config.json, and notes on the settings that were assumed."""
    layout, settings = opened.layout, opened.settings
    given = given_config(path, config, layout.kind)
    if layout.kind != "gpt2":
        return llama_config(path, shape, given, settings, program=layout.program)
    full_config, notes = gpt2_config(path, shape, given, settings)
    return full_config, notes + (nanogpt.shape_notes(shape) if layout is nanogpt.LAYOUT else [])


def _turn_halves(tensors: dict[str, Tensor], head_dim: int) -> None:
    """Reorder the rows of the query and key projections, in place: from rotary pairs (2i, 2i + 1)
    of a head to Hugging Face's pairs (i, i + D/2)."""
    for name, tensor in tensors.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            pairs = tensor.reshape(-1, head_dim // 2, 2, tensor.shape[1])
            tensors[name] = pairs.transpose(1, 2).flatten(0, 2).contiguous()


def _sources(
    path: Path, weights: Mapping[str, Any], layout: Layout
) -> tuple[int, dict[str, tuple[str, ...]]]:
    """The number of layers, and the names of the program's tensors that each Hugging Face tensor is
    made of.

    nanoGPT's optional biases, if the file lacks them all, are made of no tensor: () stands for
    zeros. LLMs-from-scratch's optional biases of queries, keys and values are left out instead.
    """
    # Layers are counted by the numbers in their tensors' names ("h0/" in OpenAI's).
    first = next(theirs for names in layout.names.values() for theirs in names if "{}" in theirs)
    number = re.compile(re.escape(first.partition("{}")[0]) + r"(\d+)[./]")
    layers = len({match[1] for name in weights if (match := number.match(name))})
    sources = {
        name.format(i): tuple(theirs.format(i) for theirs in layout.names[name])
        for name in layout.shapes
        for i in range(layers if "{}" in name else 1)
    }
    optional = {n.format(i) for n in layout.optional for i in range(layers)}
    if not any(theirs in weights for name in optional for theirs in sources[name]):
        sources.update(dict.fromkeys(optional, ()))
        if layout.optional == book.QKV_BIAS:
            sources = {name: parts for name, parts in sources.items() if name not in optional}
    expected = dict.fromkeys(theirs for names in sources.values() for theirs in names)
    unknown = [name for name in weights if name not in expected]
    _refuse(path, f"has tensors that {layout.program}'s model doesn't have", unknown)
    _refuse(path, "lacks tensors", [name for name in expected if name not in weights])
    return layers, sources


def _check_dtypes(path: Path, weights: Mapping[str, Any]) -> None:
    """Refuse weights that are not plain floating point, such as quantised ones, which need their
    scales, and tensors whose storage is smaller than their shape says (see `is_whole`)."""
    others = [
        f"{name} is {str(value.dtype).removeprefix('torch.') if is_tensor else 'no tensor'}"
        for name, value in weights.items()
        if not (is_tensor := isinstance(value, Tensor)) or value.dtype not in _DTYPES
    ]
    _refuse(path, "has weights that are not plain floating point", others)
    repeated = [name for name, value in weights.items() if not is_whole(value)]
    _refuse(path, "has weights of fewer numbers than their shape says", repeated)


def _sizes(path: Path, weights: Mapping[str, Tensor], layout: Layout) -> dict[str, int]:
    """The size of each letter in the layout's shapes, read from the tensors of `SIZES`."""
    sizes = {}
    for letter, (ours, dimension) in SIZES[layout.kind].items():
        name = layout.names[ours][0].format(0)
        shape = list(weights[name].shape)
        if len(shape) != 2 or 0 in shape:
            raise ModelError(f"{path}: {name} is {shape}, expected a matrix")
        sizes[letter] = shape[dimension]
    return sizes


def _shape_of(spec: str, sizes: Mapping[str, int]) -> list[int]:
    """The shape that `spec` describes: "C 3C" is [64, 192] if the size of C is 64."""
    return [int(part[:-1] or 1) * sizes[part[-1]] for part in spec.split()]


def _template(name: str) -> str:
    """A tensor's name in the tables: `transformer.h.3.ln_1.weight` becomes
    `transformer.h.{}.ln_1.weight`."""
    return re.sub(r"\.\d+\.", ".{}.", name)


def _check_shapes(
    path: Path,
    weights: Mapping[str, Tensor],
    sources: Mapping[str, tuple[str, ...]],
    layout: Layout,
    *,
    sizes: Mapping[str, int],
) -> None:
    """Refuse tensors whose shapes are not those of the layout."""
    wrong = []
    for name, parts in sources.items():
        shape = _shape_of(layout.shapes[_template(name)], sizes)
        # To the program's order, in which parts are stacked along the first dimension.
        if layout.is_transposed and _template(name) in TRANSPOSED:
            shape.reverse()
        for part in parts:
            expected = [shape[0] // len(parts), *shape[1:]]
            if list(weights[part].shape) != expected:
                wrong.append(f"{part} is {list(weights[part].shape)}, expected {expected}")
    _refuse(path, "has misshapen tensors", wrong)


def _refuse(path: Path, problem: str, names: list[str]) -> None:
    """Raise a ModelError about the tensors in `names`, unless there are none."""
    if names:
        raise ModelError(f"{path} {problem}: {first_names(names)}")


def _convert(
    weights: Mapping[str, Tensor],
    sources: Mapping[str, tuple[str, ...]],
    layout: Layout,
    sizes: Mapping[str, int],
    *,
    tied: bool,
) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors by Hugging Face name, and the names of the modules whose missing biases became
    zeros."""
    tensors, filled = {}, []
    for name, parts in sources.items():
        template = _template(name)
        if tied and name == "lm_head.weight":
            continue
        if not parts:
            dtype = weights[next(iter(weights))].dtype
            tensors[name] = torch.zeros(_shape_of(layout.shapes[template], sizes), dtype=dtype)
            filled.append(template.removesuffix(".bias").rsplit("}.", 1)[-1])
            continue
        stacked = [weights[part].detach() for part in parts]
        tensor = torch.cat(stacked) if len(stacked) > 1 else stacked[0]
        is_transposed = layout.is_transposed and template in TRANSPOSED
        tensors[name] = (tensor.t() if is_transposed else tensor).contiguous()
    return tensors, list(dict.fromkeys(filled))

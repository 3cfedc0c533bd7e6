"""Pickled checkpoints of other programs: nanoGPT's `ckpt.pt`, LLMs-from-scratch's `model.pth`.

The tensors get Hugging Face's names and layout; what the files don't say about the model is
given by the caller, or filled in and noted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from firstlight.conversion.foreign_config import Shape, given_config, gpt2_config, llama_config
from firstlight.conversion.foreign_forward import (
    book_gpt_logits,
    book_llama_logits,
    nanogpt_logits,
)
from firstlight.conversion.foreign_names import (
    LAYOUTS,
    NANOGPT,
    QKV_BIAS,
    TRANSPOSED,
    Layout,
)
from firstlight.conversion.pickled import is_whole, read_pickle
from firstlight.errors import ModelError

#: Prefixes that torch.compile and DistributedDataParallel put before all names.
_WRAPPERS = ("_orig_mod.", "module.")

_QKV_BIAS_OF_FIRST = "transformer.h.0.attn.c_attn.bias"

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class ForeignModel:
    """A model of another program, in Hugging Face's terms.

    Attributes:
        config: a config.json object, model_type "gpt2" or "llama".
        tensors: by the names in model.safetensors; a tied head is left out. Those that needed
            no rearranging are the file itself, memory-mapped, and change when it does.
        program: "nanoGPT" or "LLMs-from-scratch".
        notes: what was filled in, one sentence each.
        logits: of token ids, int64 [B, T], the logits [B, T, V] in fp32 that the program itself
            computes. They are made of the file's own tensors, as they are named and laid out
            there, with nothing but heads, rotary positions and nanoGPT's kind of GELU taken
            from `config`: what a conversion is checked by. T is at most the context.
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    program: str
    notes: tuple[str, ...]
    logits: Callable[[Tensor], Tensor]


def read_foreign(path: Path, *, config: Mapping[str, Any] | None = None) -> ForeignModel:
    """Read a checkpoint that nanoGPT or LLMs-from-scratch saved.

    Args:
        path: the file.
        config: what the file doesn't say, as keys of a Hugging Face config.json: for a GPT of
            LLMs-from-scratch `n_head`, where heads are not of size 64; for its Llamas
            `num_attention_heads`, `max_position_embeddings` and `rope_parameters`.

    Raises:
        ModelError: it can't be read, holds objects beside weights, is of another program, has
            tensors that are missing, unknown, misshapen or not floating point, or `config` lacks
            what is needed or contradicts the file.
    """
    content = read_pickle(path)
    everything = _weights(path, content)
    layout = _layout_of(path, everything)
    weights = {n: t for n, t in everything.items() if not n.endswith(layout.buffers)}
    layers, sources = _sources(path, weights, layout)
    _check_dtypes(path, weights)
    sizes = _sizes(path, weights, layout)
    _check_shapes(path, weights, sources, layout, sizes)
    (embedding,), (head,) = next(iter(sources.values())), sources["lm_head.weight"]
    tied = _same(weights[embedding], weights[head])
    qkv_bias = layout.optional != QKV_BIAS or _QKV_BIAS_OF_FIRST in sources
    shape = Shape(sizes, layers, tied, qkv_bias)
    given = given_config(path, config or {}, layout.model_type)
    if layout.model_type == "llama":
        sines = everything.get("trf_blocks.0.att.sin")
        sines = sines if isinstance(sines, Tensor) else None
        full_config, notes = llama_config(path, shape, given, sines)
    elif layout is NANOGPT:
        model_args = content.get("model_args")
        model_args = model_args if isinstance(model_args, Mapping) else None
        full_config, notes = gpt2_config(path, shape, given, model_args, "gelu")
        notes += _nanogpt_notes(shape, given)
    else:
        full_config, notes = gpt2_config(path, shape, given, None, "gelu_new")
    tensors, filled = _convert(weights, sources, layout, sizes, tied)
    if filled:
        notes.append(f"It has no biases for {', '.join(filled)}: zeros stand in for them.")
    if not qkv_bias:
        notes.append(
            "Its queries, keys and values have no biases, and neither have those of the result "
            "(qkv_bias: false in config.json): transformers takes zeros for them; for other "
            "programs convert the result once more, which writes the zeros out."
        )
    logits = _logits(everything, layout, full_config)
    return ForeignModel(full_config, tensors, layout.program, tuple(notes), logits)


def _logits(
    everything: Mapping[str, Any], layout: Layout, config: Mapping[str, Any]
) -> Callable[[Tensor], Tensor]:
    weights = {name: value for name, value in everything.items() if isinstance(value, Tensor)}
    if layout.model_type == "llama":
        heads, rope = config["num_attention_heads"], config["rope_parameters"]
        return lambda ids: book_llama_logits(weights, heads, ids, rope)
    heads = config["n_head"]
    if layout is NANOGPT:
        tanh = config["activation_function"] != "gelu"
        return lambda ids: nanogpt_logits(weights, heads, ids, tanh_gelu=tanh)
    return lambda ids: book_gpt_logits(weights, heads, ids)


def _nanogpt_notes(shape: Shape, given: Mapping[str, Any]) -> list[str]:
    notes = []
    if "activation_function" not in given:
        notes.append(
            "The activation is taken to be the exact GELU, nanoGPT's since May 2023 (give "
            '"activation_function": "gelu_new" for a file of an older one).'
        )
    if shape.sizes["V"] == 50304:
        notes.append(
            "The vocabulary is 50304, GPT-2's 50257 rounded up for speed: the last 47 ids "
            "stand for no token."
        )
    if not shape.tied:
        notes.append("Its head and embedding differ, though nanoGPT ties them: both are kept.")
    return notes


def _weights(path: Path, content: Any) -> dict[str, Any]:
    """The state_dict, its names without wrappers' prefixes."""
    if not isinstance(content, Mapping):
        raise ModelError(
            f"{path} holds a {type(content).__name__}, not a state_dict: save "
            "model.state_dict() where it was made"
        )
    inner = (content.get(key) for key in ("model", "model_state_dict"))
    weights = next((value for value in inner if isinstance(value, Mapping)), content)
    if not weights or not all(isinstance(name, str) for name in weights):
        raise ModelError(f"{path} holds no tensors by name: it is not a model's state_dict")
    names = list(weights)
    while wrapper := next((w for w in _WRAPPERS if all(n.startswith(w) for n in names)), ""):
        names = [name.removeprefix(wrapper) for name in names]
    return dict(zip(names, weights.values(), strict=True))


def _layout_of(path: Path, weights: Mapping[str, Any]) -> Layout:
    for layout in LAYOUTS:
        if any(name.endswith(layout.mark) for name in weights):
            return layout
    raise ModelError(
        f"{path} is of an unknown layout, it begins with '{next(iter(weights))}': GPTs of "
        "nanoGPT and GPTs and Llamas of LLMs-from-scratch are read"
    )


def _sources(
    path: Path, weights: Mapping[str, Any], layout: Layout
) -> tuple[int, dict[str, tuple[str, ...]]]:
    """How many layers there are, and the tensors that each Hugging Face tensor is made of.

    Those that are made of none are biases that the model does without, but GPT-2 has; those of
    queries, keys and values alone are left out.
    """
    number = re.compile(re.escape(layout.blocks) + r"(\d+)\.")
    layers = len({match[1] for name in weights if (match := number.match(name))})
    sources = {
        name.format(i): tuple(theirs.format(i) for theirs in layout.names[name])
        for name in layout.shapes
        for i in range(layers if "{}" in name else 1)
    }
    optional = {n.format(i) for n in layout.optional for i in range(layers)}
    if not any(theirs in weights for name in optional for theirs in sources[name]):
        sources.update(dict.fromkeys(optional, ()))
        if layout.optional == QKV_BIAS:
            sources = {name: parts for name, parts in sources.items() if name not in optional}
    expected = dict.fromkeys(theirs for names in sources.values() for theirs in names)
    unknown = [name for name in weights if name not in expected]
    _refuse(path, f"has tensors that {layout.program}'s model doesn't have", unknown)
    _refuse(path, "lacks tensors", [name for name in expected if name not in weights])
    return layers, sources


def _check_dtypes(path: Path, weights: Mapping[str, Any]) -> None:
    """Refuse what isn't plain floating point: quantised weights mean nothing without scales."""
    others = [
        f"{name} is {str(value.dtype).removeprefix('torch.') if is_tensor else 'no tensor'}"
        for name, value in weights.items()
        if not (is_tensor := isinstance(value, Tensor)) or value.dtype not in _DTYPES
    ]
    _refuse(path, "has weights that are not plain floating point", others)
    repeated = [name for name, value in weights.items() if not is_whole(value)]
    _refuse(path, "has weights of fewer numbers than their shape says", repeated)


def _sizes(path: Path, weights: Mapping[str, Tensor], layout: Layout) -> dict[str, int]:
    """The size of each letter in the layout's shapes."""
    sizes = {}
    for letter, (name, dimension) in layout.sizes.items():
        shape = list(weights[name].shape)
        if len(shape) != 2 or 0 in shape:
            raise ModelError(f"{path}: {name} is {shape}, expected a matrix")
        sizes[letter] = shape[dimension]
    return sizes


def _shape_of(spec: str, sizes: Mapping[str, int]) -> list[int]:
    """[64, 192] of "C 3C" for a C of 64."""
    return [int(part[:-1] or 1) * sizes[part[-1]] for part in spec.split()]


def _template(name: str) -> str:
    """`transformer.h.{}.ln_1.weight` of `transformer.h.3.ln_1.weight`."""
    return re.sub(r"\.\d+\.", ".{}.", name)


def _check_shapes(
    path: Path,
    weights: Mapping[str, Tensor],
    sources: Mapping[str, tuple[str, ...]],
    layout: Layout,
    sizes: Mapping[str, int],
) -> None:
    wrong = []
    for name, parts in sources.items():
        shape = _shape_of(layout.shapes[_template(name)], sizes)
        if _template(name) in TRANSPOSED:
            shape.reverse()
        for part in parts:
            expected = [shape[0] // len(parts), *shape[1:]]
            if list(weights[part].shape) != expected:
                wrong.append(f"{part} is {list(weights[part].shape)}, expected {expected}")
    _refuse(path, "has misshapen tensors", wrong)


def _refuse(path: Path, problem: str, names: list[str]) -> None:
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise ModelError(f"{path} {problem}: {', '.join(names[:3])}{more}")


def _same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


def _convert(
    weights: Mapping[str, Tensor],
    sources: Mapping[str, tuple[str, ...]],
    layout: Layout,
    sizes: Mapping[str, int],
    tied: bool,
) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors by Hugging Face name, and the kinds of bias that zeros stand in for."""
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
        tensors[name] = (tensor.t() if template in TRANSPOSED else tensor).contiguous()
    return tensors, list(dict.fromkeys(filled))

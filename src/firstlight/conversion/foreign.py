"""Pickled checkpoints of other programs: nanoGPT's `ckpt.pt`, LLMs-from-scratch's `model.pth`.

The tensors get Hugging Face's names and layout; settings that the files lack are given by the
caller, or filled in and noted.

One table a layout, from a Hugging Face name to the names it is made of ("{}" is the layer's
number). Sources: karpathy/nanoGPT `model.py`; rasbt/LLMs-from-scratch
`pkg/llms_from_scratch/ch04.py` and `llama3.py`, and `ch05/07_gpt_to_llama`.

Names and shapes do not tell everything about a model's code: a GPT of LLMs-from-scratch with
sliding windows (`ch04/06_swa`) looks like one without.

Shapes are Hugging Face's, as letters:
    V  vocabulary    P  positions    C  hidden size    F  MLP size    K  kv heads x head size
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from firstlight.conversion.check import first_names
from firstlight.conversion.foreign_config import (
    Shape,
    given_config,
    gpt2_config,
    llama_config,
    nanogpt_notes,
)
from firstlight.conversion.foreign_forward import (
    book_gpt_logits,
    book_llama_logits,
    nanogpt_logits,
)
from firstlight.conversion.pickled import is_whole, named_weights, read_pickle
from firstlight.errors import ModelError

#: Hugging Face's module of a GPT-2, the shapes of its weight and bias, and LLMs-from-scratch's
#: modules, of which several are stacked along the outputs.
_GPT2 = (
    ("transformer.wte", "V C", "", "tok_emb"),
    ("transformer.wpe", "P C", "", "pos_emb"),
    ("transformer.h.{}.ln_1", "C", "C", "trf_blocks.{}.norm1"),
    (
        *("transformer.h.{}.attn.c_attn", "C 3C", "3C"),
        "trf_blocks.{}.att.W_query trf_blocks.{}.att.W_key trf_blocks.{}.att.W_value",
    ),
    ("transformer.h.{}.attn.c_proj", "C C", "C", "trf_blocks.{}.att.out_proj"),
    ("transformer.h.{}.ln_2", "C", "C", "trf_blocks.{}.norm2"),
    ("transformer.h.{}.mlp.c_fc", "C 4C", "4C", "trf_blocks.{}.ff.layers.0"),
    ("transformer.h.{}.mlp.c_proj", "4C C", "C", "trf_blocks.{}.ff.layers.2"),
    ("transformer.ln_f", "C", "C", "final_norm"),
    ("lm_head", "V C", "", "out_head"),
)
#: Hugging Face's module of a Llama, the shape of its weight, and LLMs-from-scratch's module.
_LLAMA = (
    ("model.embed_tokens", "V C", "tok_emb"),
    ("model.layers.{}.input_layernorm", "C", "trf_blocks.{}.norm1"),
    ("model.layers.{}.self_attn.q_proj", "C C", "trf_blocks.{}.att.W_query"),
    ("model.layers.{}.self_attn.k_proj", "K C", "trf_blocks.{}.att.W_key"),
    ("model.layers.{}.self_attn.v_proj", "K C", "trf_blocks.{}.att.W_value"),
    ("model.layers.{}.self_attn.o_proj", "C C", "trf_blocks.{}.att.out_proj"),
    ("model.layers.{}.post_attention_layernorm", "C", "trf_blocks.{}.norm2"),
    ("model.layers.{}.mlp.gate_proj", "F C", "trf_blocks.{}.ff.fc1"),
    ("model.layers.{}.mlp.up_proj", "F C", "trf_blocks.{}.ff.fc2"),
    ("model.layers.{}.mlp.down_proj", "C F", "trf_blocks.{}.ff.fc3"),
    ("model.norm", "C", "final_norm"),
    ("lm_head", "V C", "out_head"),
)
#: Shapes by model_type and Hugging Face name.
_SHAPES = {
    "gpt2": {
        f"{module}.{kind}": shape
        for module, weight, bias, _ in _GPT2
        for kind, shape in (("weight", weight), ("bias", bias))
        if shape
    },
    "llama": {f"{module}.weight": shape for module, shape, _ in _LLAMA},
}
#: Hugging Face tensor and dimension that give the size of each letter.
_SIZES = {
    "gpt2": {
        "V": ("transformer.wte.weight", 0),
        "C": ("transformer.wte.weight", 1),
        "P": ("transformer.wpe.weight", 0),
    },
    "llama": {
        "V": ("model.embed_tokens.weight", 0),
        "C": ("model.embed_tokens.weight", 1),
        "F": ("model.layers.{}.mlp.gate_proj.weight", 0),
        "K": ("model.layers.{}.self_attn.k_proj.weight", 0),
    },
}
#: Hugging Face's GPT-2 keeps these [in, out]; `nn.Linear`, which the others use, [out, in].
TRANSPOSED = frozenset(
    f"transformer.h.{{}}.{name}.weight"
    for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
)
#: Biases that LLMs-from-scratch's GPT lacks by default (`qkv_bias`).
_QKV_BIAS = frozenset({"transformer.h.{}.attn.c_attn.bias"})

#: Ends of names that hold no weights: masks and rotary tables.
_BUFFERS = (".attn.bias", ".att.mask", ".att.cos", ".att.sin")

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Layout:
    """The tensors of one program's model.

    Attributes:
        program: name of the program.
        model_type: Hugging Face's family, "gpt2" or "llama".
        mark: end of a tensor's name that identifies the layout.
        names: the program's tensors that each Hugging Face tensor is made of; several are stacked
            along the outputs.
        optional: biases, by Hugging Face name, that a file may lack, all or none of them.
    """

    program: str
    model_type: str
    mark: str
    names: Mapping[str, tuple[str, ...]]
    optional: frozenset[str]

    @property
    def shapes(self) -> Mapping[str, str]:
        """Shapes of the Hugging Face tensors, in letters."""
        return _SHAPES[self.model_type]


def _book_names(norm: Mapping[str, str], **changed: str) -> dict[str, tuple[str, ...]]:
    """Names of a GPT of LLMs-from-scratch, given those of a norm's two tensors; `changed`: modules
    that are called otherwise, by the end of Hugging Face's name."""
    names = {}
    for module, _, bias, theirs in _GPT2:
        modules = changed.get(module.rsplit(".", 1)[-1] if ".attn." in module else "", theirs)
        for kind in ("weight", "bias") if bias else ("weight",):
            name = norm[kind] if "ln_" in module else kind
            names[f"{module}.{kind}"] = tuple(f"{one}.{name}" for one in modules.split())
    return names


NANOGPT = Layout(
    program="nanoGPT",
    model_type="gpt2",
    mark=".attn.c_attn.weight",
    names={name: (name,) for name in _SHAPES["gpt2"]},
    optional=frozenset(name for name in _SHAPES["gpt2"] if name.endswith(".bias")),
)
#: `GPTModelFast`: queries, keys and values in one, torch's own norms.
BOOK_GPT_FAST = Layout(
    program="LLMs-from-scratch",
    model_type="gpt2",
    mark=".att.qkv.weight",
    names=_book_names(
        {"weight": "weight", "bias": "bias"},
        c_attn="trf_blocks.{}.att.qkv",
        c_proj="trf_blocks.{}.att.proj",
    ),
    optional=_QKV_BIAS,
)
#: `GPTModel`.
BOOK_GPT = Layout(
    program="LLMs-from-scratch",
    model_type="gpt2",
    mark=".ff.layers.0.weight",
    names=_book_names({"weight": "scale", "bias": "shift"}),
    optional=_QKV_BIAS,
)
#: `Llama2Model`, `Llama3Model` and `Llama3ModelFast`: rotary pairs (i, i + D/2), as Hugging Face.
BOOK_LLAMA = Layout(
    program="LLMs-from-scratch",
    model_type="llama",
    mark=".ff.fc1.weight",
    names={f"{module}.weight": (f"{theirs}.weight",) for module, _, theirs in _LLAMA},
    optional=frozenset(),
)
#: The first layout whose mark a file has applies: the fast GPT has the plain one's mark as well.
LAYOUTS = (NANOGPT, BOOK_GPT_FAST, BOOK_GPT, BOOK_LLAMA)


@dataclass(frozen=True)
class ForeignModel:
    """A model of another program, in Hugging Face's terms.

    Attributes:
        config: a config.json object, model_type "gpt2" or "llama".
        tensors: tensors by their names in model.safetensors, without a tied head. Tensors that
            needed no rearranging are the file itself, memory-mapped, and change when it does.
        program: "nanoGPT" or "LLMs-from-scratch".
        notes: settings that were filled in, one sentence each.
        logits: function from token ids, int64 [B, T], to the program's own logits [B, T, V],
            fp32, which a conversion is checked by. It uses the file's own tensors, by their names
            and layout there; only heads, rotary positions and nanoGPT's kind of GELU come from
            `config`. T is at most the context.
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
        config: settings that the file lacks, as keys of a Hugging Face config.json: for a GPT of
            LLMs-from-scratch `n_head`, if heads are not of size 64; for its Llamas
            `num_attention_heads`, `max_position_embeddings` and `rope_parameters`.

    Raises:
        ModelError: the file can't be read, holds objects beside weights, is of another program,
            has tensors that are missing, unknown, misshapen or not floating point, or `config`
            lacks a needed key or contradicts the file.
    """
    content = read_pickle(path)
    everything = named_weights(path, content)
    layout = _layout_of(path, everything)
    weights = {n: t for n, t in everything.items() if not n.endswith(_BUFFERS)}
    layers, sources = _sources(path, weights, layout)
    _check_dtypes(path, weights)
    sizes = _sizes(path, weights, layout)
    _check_shapes(path, weights, sources, layout, sizes)
    (embedding,), (head,) = next(iter(sources.values())), sources["lm_head.weight"]
    a, b = weights[embedding], weights[head]
    tied = a.dtype == b.dtype and torch.equal(a, b)
    qkv_bias = layout.optional != _QKV_BIAS or "transformer.h.0.attn.c_attn.bias" in sources
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
        notes += nanogpt_notes(shape, given)
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
    """The number of layers, and the program's tensors that each Hugging Face tensor is made of.

    GPT-2's biases that the model lacks are made of none; missing biases of queries, keys and
    values alone are left out.
    """
    number = re.compile(r"(?:transformer\.h|trf_blocks)\.(\d+)\.")
    layers = len({match[1] for name in weights if (match := number.match(name))})
    sources = {
        name.format(i): tuple(theirs.format(i) for theirs in layout.names[name])
        for name in layout.shapes
        for i in range(layers if "{}" in name else 1)
    }
    optional = {n.format(i) for n in layout.optional for i in range(layers)}
    if not any(theirs in weights for name in optional for theirs in sources[name]):
        sources.update(dict.fromkeys(optional, ()))
        if layout.optional == _QKV_BIAS:
            sources = {name: parts for name, parts in sources.items() if name not in optional}
    expected = dict.fromkeys(theirs for names in sources.values() for theirs in names)
    unknown = [name for name in weights if name not in expected]
    _refuse(path, f"has tensors that {layout.program}'s model doesn't have", unknown)
    _refuse(path, "lacks tensors", [name for name in expected if name not in weights])
    return layers, sources


def _check_dtypes(path: Path, weights: Mapping[str, Any]) -> None:
    """Refuse weights that are not plain floating point: quantised ones need their scales."""
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
    for letter, (ours, dimension) in _SIZES[layout.model_type].items():
        name = layout.names[ours][0].format(0)
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
        raise ModelError(f"{path} {problem}: {first_names(names)}")


def _convert(
    weights: Mapping[str, Tensor],
    sources: Mapping[str, tuple[str, ...]],
    layout: Layout,
    sizes: Mapping[str, int],
    tied: bool,
) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors by Hugging Face name, and the modules whose missing biases became zeros."""
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

"""Describe the tensor names, tensor shapes and settings of other programs' models. All readers in
this package share this code.

A layout maps the name of each Hugging Face tensor to the names of the program's tensors from which
it is built. In these names, "{}" stands for the layer number. The shapes of the Hugging Face
tensors are written with these letters:

    V  vocabulary    P  positions    C  hidden size    F  MLP size    D  head dimension
    Q  query heads x head dimension    K  kv heads x head dimension
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from firstlight.errors import ModelError

#: Shape of the weight, and shape of the bias or "" if there is none, for each module of Hugging
#: Face's GPT-2.
GPT2_MODULES = {
    "transformer.wte": ("V C", ""),
    "transformer.wpe": ("P C", ""),
    "transformer.h.{}.ln_1": ("C", "C"),
    "transformer.h.{}.attn.c_attn": ("C 3C", "3C"),
    "transformer.h.{}.attn.c_proj": ("C C", "C"),
    "transformer.h.{}.ln_2": ("C", "C"),
    "transformer.h.{}.mlp.c_fc": ("C 4C", "4C"),
    "transformer.h.{}.mlp.c_proj": ("4C C", "C"),
    "transformer.ln_f": ("C", "C"),
    "lm_head": ("V C", ""),
}
#: Shape of the weight for each module of Hugging Face's Llama.
LLAMA_MODULES = {
    "model.embed_tokens": "V C",
    "model.layers.{}.input_layernorm": "C",
    "model.layers.{}.self_attn.q_proj": "Q C",
    "model.layers.{}.self_attn.k_proj": "K C",
    "model.layers.{}.self_attn.v_proj": "K C",
    "model.layers.{}.self_attn.o_proj": "C Q",
    "model.layers.{}.post_attention_layernorm": "C",
    "model.layers.{}.mlp.gate_proj": "F C",
    "model.layers.{}.mlp.up_proj": "F C",
    "model.layers.{}.mlp.down_proj": "C F",
    "model.norm": "C",
    "lm_head": "V C",
}
GPT2_SHAPES = {
    f"{module}.{kind}": shape
    for module, shapes in GPT2_MODULES.items()
    for kind, shape in zip(("weight", "bias"), shapes, strict=True)
    if shape
}
_LLAMA_SHAPES = {f"{module}.weight": shape for module, shape in LLAMA_MODULES.items()}
#: For each family, the Hugging Face tensor and dimension from which the size of each letter is
#: read.
SIZES = {
    "gpt2": {
        "V": ("transformer.wte.weight", 0),
        "C": ("transformer.wte.weight", 1),
        "P": ("transformer.wpe.weight", 0),
    },
    "llama": {
        "V": ("model.embed_tokens.weight", 0),
        "C": ("model.embed_tokens.weight", 1),
        "F": ("model.layers.{}.mlp.gate_proj.weight", 0),
        "Q": ("model.layers.{}.self_attn.q_proj.weight", 0),
        "K": ("model.layers.{}.self_attn.k_proj.weight", 0),
    },
}
SIZES["nanochat"] = SIZES["llama"] | {"F": ("model.layers.{}.mlp.fc1.weight", 0)}
#: Weights that Hugging Face's and OpenAI's GPT-2 store as [in, out]. Other programs' GPTs use
#: `nn.Linear`, which stores [out, in].
TRANSPOSED = frozenset(
    f"transformer.h.{{}}.{name}.weight"
    for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
)


@dataclass(frozen=True)
class Layout:
    """Names and shapes of the tensors in a program's model.

    Attributes:
        program: name of the program.
        kind: Hugging Face family whose tensor names are used: "gpt2", "nanochat" or "llama" (also
            for Mistral, Qwen2 and Qwen3, which use Llama's names).
        mark: suffix of a tensor name by which the layout is recognised.
        names: for each Hugging Face tensor, the program's tensors from which it is built. If there
            are several, they are stacked along the output dimension.
        shapes: shapes of the Hugging Face tensors, written with the letters listed in the module's
            docstring.
        optional: Hugging Face names of optional biases. A file contains either all or none of them.
        rotates_pairs: True if the rotary embedding rotates rows (2i, 2i + 1) of a head as a pair,
            False if it rotates rows (i, i + D/2), as in Hugging Face.
        is_transposed: True if the weights in `TRANSPOSED` are stored as [out, in], unlike in
            Hugging Face.
    """

    program: str
    kind: str
    mark: str
    names: Mapping[str, tuple[str, ...]]
    shapes: Mapping[str, str]
    optional: frozenset[str] = frozenset()
    rotates_pairs: bool = False
    is_transposed: bool = True


def llama_layout(
    program: str,
    mark: str,
    names: Mapping[str, str],
    *,
    norm: str = "weight",
    rotates_pairs: bool = False,
) -> Layout:
    """Return the layout of a program's Llama.

    Args:
        program, mark, rotates_pairs: see `Layout`.
        names: the program's module for each of `LLAMA_MODULES`.
        norm: the program's name for the weight of a norm.
    """
    return Layout(
        program=program,
        kind="llama",
        mark=mark,
        names={
            f"{module}.weight": (f"{names[module]}.{norm if shape == 'C' else 'weight'}",)
            for module, shape in LLAMA_MODULES.items()
        },
        shapes=_LLAMA_SHAPES,
        rotates_pairs=rotates_pairs,
    )


@dataclass(frozen=True)
class Shape:
    """Shape of a model, determined from its tensors.

    Attributes:
        sizes: dimension sizes, keyed by shape letter.
        layers: number of layers.
        tied: True if the output head shares its weight with the embedding.
        qkv_bias: True if a GPT model's query, key and value projections have biases.
    """

    sizes: Mapping[str, int]
    layers: int
    tied: bool
    qkv_bias: bool = True


@dataclass(frozen=True)
class Settings:
    """Settings of another program's model.

    Attributes:
        found: settings that are read from the files or fixed in the program's code. The keys are
            those of a Hugging Face config.json.
        assumed: default values from the program's code, with the same keys. The caller can override
            them.
        notes: messages to the user about assumed settings, keyed by setting.
        choices: the values that the program's code supports for a setting, keyed by setting.
        model_args: settings, keyed by the program's own names. For a GPT, they are checked against
            the tensors.
        where: source of `model_args`, for messages.
        sines: table of sines of shape [positions, head dimension], which older Llama checkpoints of
            LLMs-from-scratch contain; None if there is no table.
    """

    found: Mapping[str, Any] = field(default_factory=dict)
    assumed: Mapping[str, Any] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)
    choices: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    model_args: Mapping[str, Any] | None = None
    where: str = "its model_args"
    sines: Tensor | None = None


@dataclass(frozen=True)
class Opened:
    """A model of another program, as it is stored in that program's files.

    Attributes:
        layout: names and shapes of the program's tensors.
        weights: tensors, keyed by the program's names. A tied head is included under both names.
        settings: settings from the files, and settings fixed or assumed by the program's code.
        left_out: keys of the file's optimizer states, which are not converted.
    """

    layout: Layout
    weights: dict[str, Any]
    settings: Settings = Settings()
    left_out: Sequence[str] = ()


def without_buffers(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Remove attention masks and rotary tables, which are not weights."""
    buffers = (".attn.bias", ".att.mask", ".att.cos", ".att.sin", "rope.freqs")
    return {name: value for name, value in weights.items() if not name.endswith(buffers)}


def tie(weights: dict[str, Any]) -> None:
    """Use the embedding as the output head if a model of Meta or torchtune has no separate head."""
    if "tok_embeddings.weight" in weights:
        weights.setdefault("output.weight", weights["tok_embeddings.weight"])


def optimizer_states(content: Mapping[str, Any]) -> list[str]:
    """Return the keys of a checkpoint's optimizer states. A bare state_dict does not contain any,
    because its values are tensors.
    """
    return [
        key for key, value in content.items() if "optim" in str(key) and isinstance(value, Mapping)
    ]


def is_number(value: Any) -> bool:
    """Return True for integers, floats and booleans. Booleans are included because they are numbers
    in Python and some keys have boolean values.
    """
    return isinstance(value, (int, float))


def require_range(path: Path, values: Mapping[Any, Any]) -> None:
    """Reject NaN, infinity and numbers of 2^63 or more. They are never valid settings, and very
    large integers can't be converted to floats or printed.
    """
    for key, value in values.items():
        if isinstance(key, str) and is_number(value) and not abs(value) < 2**63:
            raise ModelError(f"{path}: {key} is not finite or is 2^63 or more: copy the file again")

"""Classes that describe the tensor names, tensor shapes and settings of models from other programs.
They are used by all readers in this package.

A layout maps the name of each Hugging Face tensor to the names of the tensors in the program's
checkpoint from which it is built. In all names, "{}" stands for the layer number. The shapes of the
Hugging Face tensors are written with these letters:

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

#: Shapes of the weight and the bias of each module of Hugging Face's GPT-2. The shape of the bias
#: is "" if the module has no bias.
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
#: For each model family and each letter used in shapes, the Hugging Face tensor and the dimension
#: of this tensor from which the size is read.
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
#: Weights that Hugging Face's and OpenAI's GPT-2 store as [in, out]. The GPT models of all other
#: programs use `nn.Linear`, whose weights have the shape [out, in].
TRANSPOSED = frozenset(
    f"transformer.h.{{}}.{name}.weight"
    for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
)


@dataclass(frozen=True)
class Layout:
    """Names and shapes of the tensors in a checkpoint of another program.

    Attributes:
        program: name of the program.
        kind: Hugging Face model family that defines the names of the converted tensors: "gpt2",
            "nanochat" or "llama". Mistral, Qwen2 and Qwen3 use the names of Llama.
        mark: suffix of a tensor name that occurs only in checkpoints with this layout.
        names: names of the checkpoint's tensors from which each Hugging Face tensor is built, keyed
            by Hugging Face name. If there are several, they are stacked along the output dimension.
        shapes: shapes of the Hugging Face tensors, written with the letters listed in the module's
            docstring.
        optional: Hugging Face names of optional biases. A checkpoint contains either all of them or
            none of them.
        rotates_pairs: True if RoPE rotates rows (2i, 2i + 1) of a head as a pair. False if it
            rotates rows (i, i + D/2) as a pair, as Hugging Face does.
        is_transposed: True if the weights listed in `TRANSPOSED` have the shape [out, in] in the
            checkpoint. In Hugging Face's GPT-2, they have the shape [in, out].
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
    """Return the layout of a Llama model in the checkpoints of a program.

    Args:
        program, mark, rotates_pairs: see `Layout`.
        names: the program's module names, keyed by the names in `LLAMA_MODULES`.
        norm: name that the program uses for the weight of a norm.
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
        sizes: sizes of the dimensions, keyed by the letters listed in the module's docstring.
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
    """Settings of a model from another program.

    Attributes:
        found: settings that are specified in the files or hard-coded in the program, under the keys
            of a Hugging Face config.json.
        assumed: default values that the program uses for settings missing from the files, under the
            same keys. The caller can override them.
        notes: messages to the user about the settings in `assumed`, keyed by setting.
        choices: values that the program supports, keyed by setting.
        model_args: settings under the names that the program uses. For a GPT, they are compared
            with the shapes of the tensors.
        where: description of the source from which `model_args` was read, for messages.
        sines: table of RoPE sines of shape [positions, head dimension], which older Llama
            checkpoints of LLMs-from-scratch contain. None if there is no table.
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
    """Content of a checkpoint of another program.

    Attributes:
        layout: names and shapes of the tensors.
        weights: tensors, keyed by the names that the program uses. A tied weight is included under
            both the name of the embedding and the name of the output head.
        settings: settings of the model.
        left_out: keys of the optimizer states in the checkpoint. They are not converted.
    """

    layout: Layout
    weights: dict[str, Any]
    settings: Settings = Settings()
    left_out: Sequence[str] = ()


def without_buffers(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Remove attention masks and RoPE tables, which are not weights."""
    buffers = (".attn.bias", ".att.mask", ".att.cos", ".att.sin", "rope.freqs")
    return {name: value for name, value in weights.items() if not name.endswith(buffers)}


def tie(weights: dict[str, Any]) -> None:
    """Add the embedding under the name of the output head if a checkpoint of Meta or torchtune has
    no separate output head.
    """
    if "tok_embeddings.weight" in weights:
        weights.setdefault("output.weight", weights["tok_embeddings.weight"])


def optimizer_states(content: Mapping[str, Any]) -> list[str]:
    """Return the keys of the optimizer states in a checkpoint. A bare state_dict has no optimizer
    states, because all of its values are tensors.
    """
    return [
        key for key, value in content.items() if "optim" in str(key) and isinstance(value, Mapping)
    ]


def is_number(value: Any) -> bool:
    """Return True if a value is an integer, a float or a boolean. Booleans are accepted because
    some settings are boolean.
    """
    return isinstance(value, (int, float))


def require_range(path: Path, values: Mapping[Any, Any]) -> None:
    """Reject NaN, infinity and numbers of at least 2^63. Such numbers are never valid settings, and
    Python can't convert very large integers to floats or print them.
    """
    for key, value in values.items():
        if isinstance(key, str) and is_number(value) and not abs(value) < 2**63:
            raise ModelError(f"{path}: {key} is not finite or is 2^63 or more: copy the file again")

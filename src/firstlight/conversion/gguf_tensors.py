"""The tensors of a GGUF file, and the Hugging Face tensors that each is made of.

One table a family serves both ways: `gguf_writer` applies it, `gguf_reader` undoes it. Names and
layouts are those that llama.cpp loads (ggml-org/llama.cpp `convert_hf_to_gguf.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from firstlight.conversion.gguf_layout import ModelShape
from firstlight.models import FAMILIES
from firstlight.models.family import ExpertNames

Change = Literal["none", "transposed", "rotary", "interleaved", "one_plus"]


@dataclass(frozen=True)
class TensorRule:
    """One tensor of a GGUF file, and the Hugging Face tensors that it is made of.

    Attributes:
        gguf: name in the file.
        sources: Hugging Face name; for experts, the names of all, stacked in this order.
        shape: shape of each source.
        change: "none"; "transposed"; "rotary", a reordering of rows, since llama.cpp's Llama
            rotates neighbouring pairs where Hugging Face rotates halves; "interleaved", one from
            the rows of each head's query, key and value to all queries, all keys and all values; or
            "one_plus", a norm's weight to which Hugging Face's class adds 1.
        heads: number of attention heads in the rows of a "rotary" or "interleaved" tensor.
        stacked: True if the file's tensor has a first dimension for the sources.
    """

    gguf: str
    sources: tuple[str, ...]
    shape: tuple[int, ...]
    change: Change = "none"
    heads: int = 0
    stacked: bool = False

    @property
    def gguf_shape(self) -> tuple[int, ...]:
        """The shape in the file, outermost dimension first."""
        shape = self.shape[::-1] if self.change == "transposed" else self.shape
        return (len(self.sources), *shape) if self.stacked else shape

    @property
    def small(self) -> bool:
        """Whether llama.cpp needs the tensor in fp32 in every format: vectors, routers, learned
        positions and the norms of heads."""
        small_tables = ("position_embd.weight", "ffn_gate_inp.weight", "_norm.weight")
        return len(self.gguf_shape) == 1 or self.gguf.endswith(small_tables)

    def to_gguf(self, source: Tensor) -> Tensor:
        """A source tensor in the file's layout."""
        if self.change == "transposed":
            return source.T.contiguous()
        if self.change == "rotary":
            halves = source.reshape(self.heads, 2, -1, *self.shape[1:])
            return halves.transpose(1, 2).reshape(self.shape)
        if self.change == "interleaved":
            return source.reshape(self.heads, 3, -1).transpose(0, 1).reshape(self.shape)
        if self.change == "one_plus":
            return source.float() + 1
        return source.contiguous()

    def from_gguf(self, stored: Tensor) -> Tensor:
        """The inverse of `to_gguf`."""
        if self.change == "transposed":
            return stored.T.contiguous()
        if self.change == "rotary":
            pairs = stored.reshape(self.heads, -1, 2, *self.shape[1:])
            return pairs.transpose(1, 2).reshape(self.shape)
        if self.change == "interleaved":
            return stored.reshape(3, self.heads, -1).transpose(0, 1).reshape(self.shape)
        return stored - 1 if self.change == "one_plus" else stored


def tensor_rules(shape: ModelShape) -> Iterator[TensorRule]:
    """All tensors of a model but its rotary factors, in the order of the file."""
    model, spec = FAMILIES[shape.model_type].model, shape.family
    table = (shape.vocab_size, shape.hidden_size)
    yield TensorRule("token_embd.weight", (f"{model.embedding_name}.weight",), table)
    if not shape.rotary:
        table = (shape.max_positions, shape.hidden_size)
        yield TensorRule("position_embd.weight", ("transformer.wpe.weight",), table)
    for i in range(shape.num_layers):
        theirs, ours = f"blk.{i}.", f"{model.layers_name}.{i}."
        yield from (_named_rules if spec.gguf.block else _block_rules)(shape, theirs, ours)
    yield from _norm_rules(shape, "output_norm", model.final_modules[0])
    head = (shape.vocab_size, shape.hidden_size)
    if not shape.tied:
        yield TensorRule("output.weight", (model.head_file_name,), head)
    elif spec.gguf.head == "written":
        yield TensorRule("output.weight", (f"{model.embedding_name}.weight",), head)


def _norm_rules(shape: ModelShape, theirs: str, ours: str, size: int = 0) -> Iterator[TensorRule]:
    """A norm of so many numbers; 0 is hidden_size."""
    kind: Change = "one_plus" if shape.family.norm_kind == "one_plus" else "none"
    sizes = (size or shape.hidden_size,)
    yield TensorRule(f"{theirs}.weight", (f"{ours}.weight",), sizes, kind)
    if shape.family.norm_kind == "layer" or not shape.rotary:
        yield TensorRule(f"{theirs}.bias", (f"{ours}.bias",), sizes)


def _named_rules(shape: ModelShape, theirs: str, ours: str) -> Iterator[TensorRule]:
    """A layer with biases everywhere, whose parts the family names."""
    C, F, config = shape.hidden_size, shape.intermediate_size, FAMILIES[shape.model_type].config
    sizes = {"attn_qkv": (3 * C, C), "attn_output": (C, C), "ffn_up": (F, C), "ffn_down": (C, F)}
    for word, name in shape.family.gguf.block.items():
        if word not in sizes:
            yield from _norm_rules(shape, theirs + word, ours + name)
            continue
        change: Change = "transposed" if config.stores_transposed else "none"
        if word == "attn_qkv" and shape.rotary:
            change = "interleaved"
        rows = sizes[word][0]
        matrix = sizes[word][::-1] if change == "transposed" else sizes[word]
        source = (f"{ours}{name}.weight",)
        yield TensorRule(f"{theirs}{word}.weight", source, matrix, change, heads=shape.num_heads)
        change = "interleaved" if change == "interleaved" else "none"
        source = (f"{ours}{name}.bias",)
        yield TensorRule(f"{theirs}{word}.bias", source, (rows,), change, heads=shape.num_heads)


def _block_rules(shape: ModelShape, theirs: str, ours: str) -> Iterator[TensorRule]:
    """A layer of the Llama-like families."""
    spec = shape.family
    norms = spec.norms
    for word, name in (
        ("attn_norm", norms.before_attention),
        ("post_attention_norm", norms.after_attention),
        ("ffn_norm", None if shape.parallel else norms.before_mlp),
        ("post_ffw_norm", norms.after_mlp),
    ):
        if name is not None:
            yield from _norm_rules(shape, theirs + word, ours + name)
    yield from _attention_rules(shape, theirs, f"{ours}self_attn.")
    if spec.experts is not None:
        yield from _expert_rules(shape, spec.experts, theirs, ours)
    else:
        yield from _mlp_rules(shape, theirs, f"{ours}mlp.")


def _attention_rules(shape: ModelShape, theirs: str, ours: str) -> Iterator[TensorRule]:
    C, D, spec = shape.hidden_size, shape.head_dim, shape.family
    counts = {"q": shape.num_heads, "k": shape.num_kv_heads, "v": shape.num_kv_heads}
    if spec.fused is True:
        rows = sum(counts.values()) * D
        yield TensorRule(f"{theirs}attn_qkv.weight", (f"{ours}qkv_proj.weight",), (rows, C))
        counts = {}
    for letter, heads in counts.items():
        change: Change = "rotary" if spec.gguf.rotates_pairs and letter != "v" else "none"
        for kind, rest in (("weight", (C,)), ("bias", ()))[: 2 if shape.qkv_bias else 1]:
            name, sizes = f"{ours}{letter}_proj.{kind}", (heads * D, *rest)
            yield TensorRule(f"{theirs}attn_{letter}.{kind}", (name,), sizes, change, heads=heads)
        if letter != "v":
            yield from _head_norm_rules(shape, f"{theirs}attn_{letter}_norm", ours, letter, heads)
    columns = shape.num_heads * D
    yield TensorRule(f"{theirs}attn_output.weight", (f"{ours}o_proj.weight",), (C, columns))
    if shape.attention_bias and spec.output_bias:
        yield TensorRule(f"{theirs}attn_output.bias", (f"{ours}o_proj.bias",), (C,))


def _head_norm_rules(
    shape: ModelShape, theirs: str, ours: str, letter: str, heads: int
) -> Iterator[TensorRule]:
    """The norm of queries or keys."""
    D = shape.head_dim
    if shape.qk_norm == "own":
        names = tuple(f"{ours}{letter}_layernorm.norms.{head}.weight" for head in range(heads))
        yield TensorRule(f"{theirs}.weight", names, (D,), stacked=True)
    elif shape.qk_norm is not None:
        size = D if shape.qk_norm == "head" else heads * D
        yield from _norm_rules(shape, theirs, f"{ours}{letter}_norm", size)


def _mlp_rules(shape: ModelShape, theirs: str, ours: str) -> Iterator[TensorRule]:
    C, F, spec = shape.hidden_size, shape.intermediate_size, shape.family
    parts = [("up", "up_proj", F, C), ("down", "down_proj", C, F)]
    if spec.fused:
        parts[0] = ("up", "gate_up_proj", 2 * F, C)
    elif spec.gated:
        parts = [("gate", "gate_proj", F, C), *parts]
    for word, name, outputs, inputs in parts:
        yield TensorRule(f"{theirs}ffn_{word}.weight", (f"{ours}{name}.weight",), (outputs, inputs))
        if shape.mlp_bias:
            yield TensorRule(f"{theirs}ffn_{word}.bias", (f"{ours}{name}.bias",), (outputs,))


def _expert_rules(
    shape: ModelShape, names: ExpertNames, theirs: str, ours: str
) -> Iterator[TensorRule]:
    C, F, E = shape.hidden_size, shape.expert_size, shape.num_experts
    yield TensorRule(f"{theirs}ffn_gate_inp.weight", (f"{ours}{names.router}",), (E, C))
    for word, name, outputs, inputs in (
        ("gate", names.gate, F, C),
        ("up", names.up, F, C),
        ("down", names.down, C, F),
    ):
        sources = tuple(ours + name.format(expert) for expert in range(E))
        yield TensorRule(
            f"{theirs}ffn_{word}_exps.weight", sources, (outputs, inputs), stacked=True
        )

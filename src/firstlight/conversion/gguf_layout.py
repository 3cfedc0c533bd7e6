"""The layout of a model in a GGUF file: its shape, and the Hugging Face tensors of each tensor.

One table a family serves both ways: `gguf_writer` applies it, `gguf_reader` undoes it. Names and
layouts are those that llama.cpp loads (ggml-org/llama.cpp `convert_hf_to_gguf.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from firstlight.errors import ModelError
from firstlight.models import FAMILIES
from firstlight.models.family import ExpertNames, FamilySpec

#: model_type of Hugging Face's config.json -> general.architecture
ARCHITECTURES = {
    name: family.spec.gguf.architecture
    for name, family in FAMILIES.items()
    if family.spec.gguf.architecture
}

#: The tensor of `Rope.factors`.
ROPE_FACTORS = "rope_freqs.weight"

_LLAMA3_KEYS = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")

#: Settings that llama.cpp fixes for all rotary families; see `GGUFSpec.fixed`.
_FIXED_ROTARY = (
    ("hidden_act", ("silu",), "silu"),
    ("partial_rotary_factor", (1, None), None),
)


@dataclass(frozen=True)
class Rope:
    """Rotary positions.

    Attributes:
        theta: base of the frequencies.
        kind: "default", "linear" or "llama3".
        scaling: settings of the kind: `factor` and, for llama3, the two frequency factors and
            `original_max_position_embeddings`.
    """

    theta: float
    kind: str
    scaling: Mapping[str, float]

    def factors(self, head_dim: int) -> Tensor | None:
        """The divisors of the frequencies in llama.cpp, fp32 [head_dim / 2]; None unless llama3.

        Source: the rescaling of Llama 3.1 (meta-llama/llama-models `apply_scaling`).
        """
        if self.kind != "llama3":
            return None
        factor, original = self.scaling["factor"], self.scaling[_LLAMA3_KEYS[2]]
        low, high = self.scaling[_LLAMA3_KEYS[0]], self.scaling[_LLAMA3_KEYS[1]]
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
        wavelengths = 2 * math.pi * self.theta**exponents
        blend = ((original / wavelengths - low) / (high - low)).clamp(0, 1)
        return (1 / ((1 - blend) / factor + blend)).float()


@dataclass(frozen=True)
class ModelShape:
    """The sizes that decide which tensors a model has, and their shapes.

    `family` is the entry of `model_type`; `rotary` positions are rotated, not learned.
    `expert_size` is the width inside an expert; 0 for dense models, as `num_experts`.
    A `tied` head is the embedding, and has no tensor of its own.
    """

    model_type: str
    family: FamilySpec
    rotary: bool
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    num_experts: int
    num_experts_per_tok: int
    expert_size: int
    attention_bias: bool
    mlp_bias: bool
    tied: bool

    @property
    def architecture(self) -> str:
        """The value of general.architecture."""
        return self.family.gguf.architecture


def require_known(config: Mapping[str, Any]) -> str:
    """The `model_type` of a config.json.

    Raises:
        ModelError: the family can't be put into GGUF.
    """
    model_type = str(config.get("model_type"))
    if model_type not in ARCHITECTURES:
        raise ModelError(
            f"model_type '{model_type}' can't be put into GGUF (can: {', '.join(ARCHITECTURES)})"
        )
    return model_type


def shape_of(config: Mapping[str, Any], *, tied: bool) -> ModelShape:
    """The shape of a Hugging Face config.json's model.

    Raises:
        ModelError: llama.cpp does not support the family or one of its settings, or a number is
            missing or invalid.
    """
    model_type = require_known(config)
    family, config_class = FAMILIES[model_type].spec, FAMILIES[model_type].config
    rotary = config_class.has_rotary
    for key, values, default in family.gguf.fixed + (_FIXED_ROTARY if rotary else ()):
        value = config.get(key, default)
        if value not in values:
            raise ModelError(
                f"llama.cpp has no {model_type} with {key} {value!r}: only {values[0]!r} can be "
                "put into GGUF"
            )

    def size(ours: str, default: Any = None) -> int:
        return _positive(config, config_class.hf_names.get(ours, ours), default)

    hidden, heads = size("hidden_size"), size("num_attention_heads")
    head_dim = family.hf_defaults.get("head_dim") if "head_dim" not in config else None
    experts = expert_size = 0
    if family.experts is not None:
        # transformers 5 writes num_local_experts for all.
        experts = _positive(config, "num_local_experts", config.get("num_experts"))
        expert_size = _positive(config, family.experts.size)
    width = (expert_size or None) if rotary else 4 * hidden
    shape = ModelShape(
        model_type=model_type,
        family=family,
        rotary=rotary,
        vocab_size=size("vocab_size"),
        hidden_size=hidden,
        intermediate_size=size("intermediate_size", width),
        num_layers=size("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=size("num_key_value_heads", heads) if rotary else heads,
        head_dim=size("head_dim", head_dim or hidden // heads) if rotary else hidden // heads,
        max_positions=size("max_position_embeddings"),
        num_experts=experts,
        num_experts_per_tok=size("num_experts_per_tok") if experts else 0,
        expert_size=expert_size,
        attention_bias=_has_own(family, config, "attention_bias"),
        mlp_bias=_has_own(family, config, "mlp_bias"),
        tied=tied,
    )
    _check(shape)
    return shape


def _has_own(family: FamilySpec, config: Mapping[str, Any], key: str) -> bool:
    return key in family.own_keys and config.get(key) is True


def _check(shape: ModelShape) -> None:
    """Refuse invalid combinations of sizes, and those that llama.cpp refuses."""
    if shape.num_heads % shape.num_kv_heads:
        raise ModelError(
            f"config.json: num_attention_heads {shape.num_heads} is not a multiple of "
            f"num_key_value_heads {shape.num_kv_heads}"
        )
    if not shape.rotary and shape.hidden_size % shape.num_heads:
        raise ModelError(
            f"config.json: n_embd {shape.hidden_size} is not a multiple of n_head {shape.num_heads}"
        )
    if shape.rotary and shape.head_dim % 2:
        raise ModelError(f"config.json: head_dim {shape.head_dim} is odd: rotary positions pair")
    if shape.num_experts_per_tok > shape.num_experts:
        raise ModelError(
            f"config.json: num_experts_per_tok {shape.num_experts_per_tok} is more than the "
            f"{shape.num_experts} experts there are"
        )


def rope_of(config: Mapping[str, Any]) -> Rope:
    """The rotary settings of a config.json, in the spelling of transformers 5 or 4.

    Raises:
        ModelError: the kind is not default, linear or llama3, or llama.cpp lacks it for the
            family; or a number is missing.
    """
    # The order of transformers, if a file has both spellings.
    settings = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(settings, Mapping):
        raise ModelError(f"config.json: the rotary settings are {settings!r}, not an object")
    model_type = str(config.get("model_type"))
    # The first Llamas' config.json leaves it out; the other families' always have it.
    usual = 10_000.0 if model_type == "llama" else None
    theta = _number(settings, "rope_theta", config.get("rope_theta") or usual)
    kind = str(settings.get("rope_type") or settings.get("type") or "default")
    keys: dict[str, tuple[str, ...]] = {
        "default": (),
        "linear": ("factor",),
        "llama3": ("factor", *_LLAMA3_KEYS),
    }
    family = FAMILIES.get(model_type)
    if kind not in (() if family is None else family.spec.gguf.rope_kinds):
        named = [n for n in ARCHITECTURES if "llama3" in FAMILIES[n].spec.gguf.rope_kinds]
        raise ModelError(
            f"rope type '{kind}' can't be put into GGUF for {model_type}: default and linear can, "
            f"and llama3 for {', '.join(named)}"
        )
    scaling = {key: _number(settings, key) for key in keys[kind]}
    if kind == "llama3" and not scaling["low_freq_factor"] < scaling["high_freq_factor"]:
        raise ModelError("config.json: low_freq_factor must be less than high_freq_factor")
    return Rope(theta, kind, scaling)


def _positive(config: Mapping[str, Any], key: str, default: Any = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise ModelError(f"config.json lacks {key}")
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**31:
        raise ModelError(f"config.json: {key} is {value!r}, not a positive whole number")
    return value


def _number(settings: Mapping[str, Any], key: str, default: Any = None) -> float:
    value = settings.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise ModelError(f"config.json: the rotary settings' {key} is {value!r}, no number above 0")
    return value


@dataclass(frozen=True)
class TensorRule:
    """One tensor of a GGUF file, and the Hugging Face tensors that it is made of.

    Attributes:
        gguf: name in the file.
        sources: Hugging Face name; for experts, the names of all, stacked in this order.
        shape: shape of each source.
        change: "none"; "transposed"; or "rotary", a reordering of rows, since llama.cpp's Llama
            rotates neighbouring pairs where Hugging Face rotates halves.
        heads: number of attention heads in the rows of a "rotary" tensor.
        stacked: True if the file's tensor has a first dimension for the sources.
    """

    gguf: str
    sources: tuple[str, ...]
    shape: tuple[int, ...]
    change: Literal["none", "transposed", "rotary"] = "none"
    heads: int = 0
    stacked: bool = False

    @property
    def gguf_shape(self) -> tuple[int, ...]:
        """The shape in the file, outermost dimension first."""
        shape = self.shape[::-1] if self.change == "transposed" else self.shape
        return (len(self.sources), *shape) if self.stacked else shape

    @property
    def small(self) -> bool:
        """Whether llama.cpp needs the tensor in fp32 in every format: vectors, routers and learned
        positions."""
        small_tables = ("position_embd.weight", "ffn_gate_inp.weight")
        return len(self.gguf_shape) == 1 or self.gguf.endswith(small_tables)

    def to_gguf(self, source: Tensor) -> Tensor:
        """A source tensor in the file's layout."""
        if self.change == "transposed":
            return source.T.contiguous()
        if self.change == "rotary":
            halves = source.reshape(self.heads, 2, -1, *self.shape[1:])
            return halves.transpose(1, 2).reshape(self.shape)
        return source.contiguous()

    def from_gguf(self, stored: Tensor) -> Tensor:
        """The inverse of `to_gguf`."""
        if self.change == "transposed":
            return stored.T.contiguous()
        if self.change == "rotary":
            pairs = stored.reshape(self.heads, -1, 2, *self.shape[1:])
            return pairs.transpose(1, 2).reshape(self.shape)
        return stored


def tensor_rules(shape: ModelShape) -> Iterator[TensorRule]:
    """All tensors of a model but `rope_freqs.weight`, in the order of the file."""
    yield from _llama_rules(shape) if shape.rotary else _gpt2_rules(shape)


def _gpt2_rules(shape: ModelShape) -> Iterator[TensorRule]:
    C, F = shape.hidden_size, shape.intermediate_size
    V, P = shape.vocab_size, shape.max_positions
    yield TensorRule("token_embd.weight", ("transformer.wte.weight",), (V, C))
    yield TensorRule("position_embd.weight", ("transformer.wpe.weight",), (P, C))
    for i in range(shape.num_layers):
        for theirs, name, outputs, inputs in (
            ("attn_norm", "ln_1", C, 0),
            ("attn_qkv", "attn.c_attn", 3 * C, C),
            ("attn_output", "attn.c_proj", C, C),
            ("ffn_norm", "ln_2", C, 0),
            ("ffn_up", "mlp.c_fc", F, C),
            ("ffn_down", "mlp.c_proj", C, F),
        ):
            ours = f"transformer.h.{i}.{name}"
            weight, bias = (f"{ours}.weight",), (f"{ours}.bias",)
            if inputs:
                # Hugging Face keeps these as [in, out].
                shapes = (inputs, outputs)
                yield TensorRule(f"blk.{i}.{theirs}.weight", weight, shapes, "transposed")
            else:
                yield TensorRule(f"blk.{i}.{theirs}.weight", weight, (outputs,))
            yield TensorRule(f"blk.{i}.{theirs}.bias", bias, (outputs,))
    for kind in ("weight", "bias"):
        yield TensorRule(f"output_norm.{kind}", (f"transformer.ln_f.{kind}",), (C,))
    if not shape.tied:
        yield TensorRule("output.weight", ("lm_head.weight",), (V, C))


def _llama_rules(shape: ModelShape) -> Iterator[TensorRule]:
    C, V = shape.hidden_size, shape.vocab_size
    yield TensorRule("token_embd.weight", ("model.embed_tokens.weight",), (V, C))
    for i in range(shape.num_layers):
        theirs, ours = f"blk.{i}.", f"model.layers.{i}."
        yield TensorRule(f"{theirs}attn_norm.weight", (f"{ours}input_layernorm.weight",), (C,))
        yield from _attention_rules(shape, theirs, f"{ours}self_attn.")
        norm = f"{ours}post_attention_layernorm.weight"
        yield TensorRule(f"{theirs}ffn_norm.weight", (norm,), (C,))
        if shape.family.experts is not None:
            yield from _expert_rules(shape, shape.family.experts, theirs, ours)
        else:
            yield from _mlp_rules(shape, theirs, f"{ours}mlp.")
    yield TensorRule("output_norm.weight", ("model.norm.weight",), (C,))
    if not shape.tied:
        yield TensorRule("output.weight", ("lm_head.weight",), (V, C))


def _attention_rules(shape: ModelShape, theirs: str, ours: str) -> Iterator[TensorRule]:
    C, D = shape.hidden_size, shape.head_dim
    qkv_bias = shape.attention_bias or shape.family.qkv_bias
    rotary: Literal["none", "rotary"] = "rotary" if shape.family.gguf.rotates_pairs else "none"
    for letter, heads in (("q", shape.num_heads), ("k", shape.num_kv_heads)):
        for kind, rest in (("weight", (C,)), ("bias", ()))[: 2 if qkv_bias else 1]:
            name = f"{ours}{letter}_proj.{kind}"
            rows = heads * D
            yield TensorRule(
                f"{theirs}attn_{letter}.{kind}", (name,), (rows, *rest), rotary, heads=heads
            )
        if shape.family.qk_norm:
            name = f"{ours}{letter}_norm.weight"
            yield TensorRule(f"{theirs}attn_{letter}_norm.weight", (name,), (D,))
    rows = shape.num_kv_heads * D
    yield TensorRule(f"{theirs}attn_v.weight", (f"{ours}v_proj.weight",), (rows, C))
    if qkv_bias:
        yield TensorRule(f"{theirs}attn_v.bias", (f"{ours}v_proj.bias",), (rows,))
    columns = shape.num_heads * D
    yield TensorRule(f"{theirs}attn_output.weight", (f"{ours}o_proj.weight",), (C, columns))
    if shape.attention_bias:
        yield TensorRule(f"{theirs}attn_output.bias", (f"{ours}o_proj.bias",), (C,))


def _mlp_rules(shape: ModelShape, theirs: str, ours: str) -> Iterator[TensorRule]:
    C, F = shape.hidden_size, shape.intermediate_size
    for word, outputs, inputs in (("gate", F, C), ("up", F, C), ("down", C, F)):
        name, source = f"{theirs}ffn_{word}", f"{ours}{word}_proj"
        yield TensorRule(f"{name}.weight", (f"{source}.weight",), (outputs, inputs))
        if shape.mlp_bias:
            yield TensorRule(f"{name}.bias", (f"{source}.bias",), (outputs,))


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

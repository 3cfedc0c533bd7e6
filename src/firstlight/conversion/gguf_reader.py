"""Read a GGUF file back into a Hugging Face config and tensors.

All of llama.cpp's quantised formats can be read, though only four are written: the package gguf
dequantises them. Every length is checked against the file's size, so that a damaged file is an
error, never a hang or a demand for all of the memory. Format: ggml-org/ggml `docs/gguf.md`.
"""

from __future__ import annotations

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

from firstlight.conversion.check import require_tensors
from firstlight.conversion.gguf_layout import (
    ARCHITECTURES,
    ROPE_FACTORS,
    rope_of,
    shape_of,
    tensor_rules,
)
from firstlight.conversion.gguf_writer import KEPT, KEPT_KEYS, import_gguf
from firstlight.errors import ModelError, describe_os_error
from firstlight.models import FAMILIES
from firstlight.models.family import ExpertNames

_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
#: GGUF's number types -> struct's letters
_SCALARS = {**dict(enumerate("BbHhIif?")), 10: "Q", 11: "q", 12: "d"}

#: The frequency factors of all published Llama 3.1, 3.2 and 3.3 models.
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@dataclass(frozen=True)
class GGUFModel:
    """The content of a GGUF file.

    Attributes:
        config: Hugging Face's config.json as an object.
        tensors: fp32 tensors by their Hugging Face names, without a tied head.
        tokens: every token's text by id; None if the file has no vocabulary.
        chat_template: the Jinja template of a conversation, if there is one.
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    tokens: list[str] | None
    chat_template: str | None


def read_gguf(path: Path) -> GGUFModel:
    """Read a model from a GGUF file.

    Raises:
        ModelError: the file can't be opened, is damaged or cut short, or its model's family or
            settings are not supported.
        MissingDependencyError: the package gguf is not installed.
    """
    import_gguf()
    try:
        with open(path, "rb") as file:
            parser = GGUFParser(file, path.stat().st_size)
            metadata, stored, data_start = parser.parse()
            factors = None
            if ROPE_FACTORS in stored:
                factors = parser.tensor(ROPE_FACTORS, stored[ROPE_FACTORS], data_start)
            config = _config_of(metadata, stored, factors)
            shape = shape_of(config, tied=config["tie_word_embeddings"])
            rules = list(tensor_rules(shape))
            expected = {rule.gguf: rule.gguf_shape for rule in rules}
            shapes = {name: t.shape for name, t in stored.items() if name != ROPE_FACTORS}
            require_tensors("the file", expected, shapes)
            tensors = {}
            for rule in rules:
                values = parser.tensor(rule.gguf, stored[rule.gguf], data_start)
                parts = values.unbind() if rule.stacked else (values,)
                for source, part in zip(rule.sources, parts, strict=True):
                    tensors[source] = rule.from_gguf(part).clone()
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    except OSError as error:
        raise ModelError(f"{path} can't be read: {describe_os_error(error)}") from error
    except UnicodeDecodeError as error:
        raise ModelError(f"{path}: the file is damaged: a text is not UTF-8") from error
    tokens = metadata.get("tokenizer.ggml.tokens")
    template = metadata.get("tokenizer.chat_template")
    return GGUFModel(
        config=config,
        tensors=tensors,
        tokens=tokens if isinstance(tokens, list) else None,
        chat_template=template if isinstance(template, str) else None,
    )


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor's place: shape with the outermost dimension first, ggml type, offset in the data."""

    shape: tuple[int, ...]
    kind: int
    offset: int


class GGUFParser:
    """Reads a little-endian GGUF file of `size` bytes, open for reading at its beginning."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size = file, size

    def parse(self) -> tuple[dict[str, Any], dict[str, GGUFTensor], int]:
        """Metadata, tensors by name, and the position of the tensors' data."""
        if self._size < 4 or self._take(4) != b"GGUF":
            raise ModelError("this is no GGUF file")
        version = self._number("I")
        if version not in _VERSIONS:
            raise ModelError(f"GGUF version {version} is not supported: 2 and 3 are")
        tensor_count, entry_count = self._number("Q"), self._number("Q")
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
        return metadata, stored, -(-self._file.tell() // alignment) * alignment

    def tensor(self, name: str, stored: GGUFTensor, data_start: int) -> Tensor:
        """A tensor's numbers as fp32."""
        gguf = import_gguf()
        try:
            kind = gguf.GGMLQuantizationType(stored.kind)
        except ValueError:
            raise ModelError(f"tensor {name} is of the unknown type {stored.kind}") from None
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if stored.shape[-1] % block:
            raise ModelError(f"the file is damaged: tensor {name} is {list(stored.shape)}")
        row_bytes = stored.shape[-1] // block * block_bytes
        self._file.seek(min(data_start + stored.offset, self._size))
        data = np.frombuffer(self._take(math.prod(stored.shape[:-1]) * row_bytes), dtype=np.uint8)
        try:
            values = gguf.quants.dequantize(data.reshape(*stored.shape[:-1], row_bytes), kind)
        except NotImplementedError:
            raise ModelError(f"tensor {name} is {kind.name}, which can't be read") from None
        return torch.from_numpy(values.astype(np.float32)).reshape(stored.shape)

    def _take(self, count: int) -> bytes:
        # Checked before reading: a damaged length must not demand all of the memory.
        if count > self._size - self._file.tell():
            raise ModelError("the file is damaged or cut short")
        return self._file.read(count)

    def _number(self, letter: str) -> Any:
        return struct.unpack(f"<{letter}", self._take(struct.calcsize(f"<{letter}")))[0]

    def _string(self) -> str:
        return self._take(self._number("Q")).decode("utf-8")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind != _ARRAY:
            raise ModelError(f"the file is damaged: a value of the unknown type {kind}")
        kind, count = self._number("I"), self._number("Q")
        if kind == _STRING:
            return [self._string() for _ in range(count)]
        if kind not in _SCALARS:
            raise ModelError(f"the file is damaged: an array of the unknown type {kind}")
        size = struct.calcsize(f"<{_SCALARS[kind]}")
        return list(struct.unpack(f"<{count}{_SCALARS[kind]}", self._take(count * size)))


class _Values:
    """The metadata of one architecture, checked when it is read."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str) -> None:
        self._metadata = metadata
        self.architecture = architecture

    def whole(self, key: str, default: int | None = None) -> int:
        """A count; a list with one count a layer is not supported."""
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ModelError(f"{self.architecture}.{key} is {value!r}, not a whole number")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """A number, with the digits that fp32 keeps."""
        value = self.get(key, default)
        if not isinstance(value, float) or not math.isfinite(value):
            raise ModelError(f"{self.architecture}.{key} is {value!r}, not a number")
        return float(str(np.float32(value)))

    def get(self, key: str, default: Any = None) -> Any:
        """The unchecked value."""
        return self._metadata.get(f"{self.architecture}.{key}", default)


def _config_of(
    metadata: Mapping[str, Any], stored: Mapping[str, GGUFTensor], factors: Tensor | None
) -> dict[str, Any]:
    """Hugging Face's config.json for the metadata, and for Llama 3's rotary factors, if any."""
    architecture = str(metadata.get("general.architecture"))
    if architecture not in ARCHITECTURES.values():
        raise ModelError(
            f"models of the architecture '{architecture}' are not supported "
            f"(supported: {', '.join(dict.fromkeys(ARCHITECTURES.values()))})"
        )
    values = _Values(metadata, architecture)
    rotary = FAMILIES[_families_of(architecture)[0]].config.has_rotary
    kept = _kept(metadata, architecture)
    layers, embedding = values.whole("block_count"), stored.get("token_embd.weight")
    # Checked before the table of all tensors is made, which a damaged count would make endless.
    if embedding is None or layers > len(stored):
        raise ModelError(f"the file holds {len(stored)} tensors, too few for {layers} layers")
    config: dict[str, Any] = {
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in stored,
        **(_llama_config(values, stored) if rotary else _gpt2_config(values)),
    }
    config |= {key: kept[key] for key in KEPT_KEYS if key in kept}
    for name in ("bos_token_id", "eos_token_id"):
        if isinstance(token_id := metadata.get(f"tokenizer.ggml.{name}"), int):
            config[name] = token_id
    if rotary:
        config |= _rope_config(values, kept, factors, config["head_dim"])
        rope_of(config)
    return {"architectures": [FAMILIES[config["model_type"]].spec.architecture], **config}


def _kept(metadata: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """The entries of firstlight.config; empty in files of other programs."""
    try:
        kept = json.loads(metadata.get(KEPT, "{}"))
    except (TypeError, ValueError) as error:
        raise ModelError(f"the file is damaged: {KEPT} is not JSON") from error
    if not isinstance(kept, dict) or (
        "model_type" in kept and ARCHITECTURES.get(str(kept["model_type"])) != architecture
    ):
        raise ModelError(f"the file is damaged: {KEPT} does not fit the architecture")
    return kept


def _gpt2_config(values: _Values) -> dict[str, Any]:
    positions = values.whole("context_length")
    return {
        "model_type": "gpt2",
        "n_layer": values.whole("block_count"),
        "n_embd": values.whole("embedding_length"),
        "n_inner": values.whole("feed_forward_length"),
        "n_head": values.whole("attention.head_count"),
        "n_positions": positions,
        "n_ctx": positions,
        "layer_norm_epsilon": values.real("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
        **dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0),
        "scale_attn_weights": True,
    }


def _llama_config(values: _Values, stored: Mapping[str, GGUFTensor]) -> dict[str, Any]:
    """The config of a rotary family, without its rotary settings."""
    hidden, heads = values.whole("embedding_length"), values.whole("attention.head_count")
    head_dim = values.whole("attention.key_length", hidden // max(heads, 1))
    if {values.whole("attention.value_length", head_dim), head_dim} != {
        values.whole("rope.dimension_count", head_dim)
    }:
        raise ModelError("heads whose keys, values and rotary part differ in size: not supported")
    window, experts = values.whole("attention.sliding_window", 0), values.whole("expert_count", 0)
    model_type = _family_of(values.architecture, experts, window)
    family = FAMILIES[model_type].spec
    config: dict[str, Any] = {
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": values.whole("feed_forward_length"),
        "num_hidden_layers": values.whole("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": values.whole("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": values.whole("context_length"),
        "rms_norm_eps": values.real("attention.layer_norm_rms_epsilon"),
        # Written even as None: Mistral's default is a window.
        "sliding_window": window or None,
    }
    if "mlp_bias" in family.own_keys:
        config["attention_bias"] = "blk.0.attn_q.bias" in stored
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in stored
    if experts:
        config |= _expert_config(values, stored, family.experts, experts)
    return config | {key: values.real(name) for key, name in family.gguf.numbers.items()}


def _families_of(architecture: str) -> list[str]:
    return [name for name in ARCHITECTURES if ARCHITECTURES[name] == architecture]


def _family_of(architecture: str, experts: int, window: int) -> str:
    """The first family of an architecture with the file's experts and window."""
    named = _families_of(architecture)
    for name in named:
        family = FAMILIES[name].spec
        has_window = not window or "sliding_window" in family.own_keys
        if has_window and (family.experts is not None) == (experts > 0):
            return name
    return named[0]


def _expert_config(
    values: _Values, stored: Mapping[str, GGUFTensor], names: ExpertNames | None, experts: int
) -> dict[str, Any]:
    """The config entries of a mixture of experts."""
    router = stored.get("blk.0.ffn_gate_inp.weight")
    # Checked before the table of all tensors is made, as the number of layers is.
    if router is None or router.shape[0] != experts:
        raise ModelError(f"the file is damaged: its routers do not know {experts} experts")
    used = {"num_experts_per_tok": values.whole("expert_used_count")}
    if names is not None and names.size == "intermediate_size":
        return {"num_local_experts": experts, **used}
    size = values.whole("expert_feed_forward_length", values.whole("feed_forward_length"))
    return {
        "num_experts": experts,
        **used,
        "moe_intermediate_size": size,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _rope_config(
    values: _Values, kept: Mapping[str, Any], factors: Tensor | None, head_dim: int
) -> dict[str, Any]:
    """The rotary settings, in the spellings of transformers 5 and 4."""
    theta = values.real("rope.freq_base", 10_000.0)
    kind = values.get("rope.scaling.type", "none")
    scaling: dict[str, Any] | None = None
    if factors is not None:
        scaling = _llama3_scaling(kept.get("rope_scaling"), theta, factors, head_dim)
    elif kind == "linear":
        scaling = {"rope_type": "linear", "factor": values.real("rope.scaling.factor")}
    elif kind != "none":
        raise ModelError(f"rope scaling {kind!r} is not supported: linear and Llama 3's are")
    return {
        "rope_parameters": {"rope_theta": theta, **(scaling or {"rope_type": "default"})},
        "rope_theta": theta,
        "rope_scaling": scaling,
    }


def _llama3_scaling(known: Any, theta: float, factors: Tensor, head_dim: int) -> dict[str, Any]:
    """The settings of the factors: firstlight's own note, or else the published ones."""
    scaling = known if isinstance(known, dict) else {"factor": factors.max().item(), **_LLAMA3}
    scaling = {**scaling, "rope_type": "llama3"}
    config = {"model_type": "llama", "rope_theta": theta, "rope_scaling": scaling}
    expected = rope_of(config).factors(head_dim)
    if expected is None or expected.shape != factors.shape:
        raise ModelError(f"the file is damaged: tensor {ROPE_FACTORS} does not fit the heads")
    if not torch.allclose(expected, factors, rtol=1e-4):
        raise ModelError(f"tensor {ROPE_FACTORS} holds no rotary factors of Llama 3")
    return scaling

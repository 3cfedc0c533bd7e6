"""Write a model as a GGUF file, the format of llama.cpp and the programs around it.

header      magic, version, counts
metadata    general.*, <architecture>.*, tokenizer.*; firstlight.config, a JSON object of the
            config.json entries without a GGUF key (KEPT_KEYS, rope_scaling of Llama 3)
tensors     names, shapes, types; then the data, one tensor after the other
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from firstlight.conversion.check import first_names, is_finite, require_tensors
from firstlight.conversion.gguf_layout import (
    ROPE_FACTORS,
    ModelShape,
    Rope,
    TensorRule,
    require_known,
    rope_of,
    shape_of,
    tensor_rules,
)
from firstlight.conversion.gguf_tokenizer import GGUFTokenizer, describe_tokenizer
from firstlight.errors import MissingDependencyError, ModelError
from firstlight.files.atomic import replacing
from firstlight.models import FAMILIES
from firstlight.tokenizer import Tokenizer
from firstlight.weights.loading import COMPUTED_BUFFERS

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, GGUFWriter

GGUFDtype = Literal["f32", "f16", "bf16", "q8_0"]

#: Keys of config.json that GGUF has no key for; firstlight.config has them unchanged.
KEPT_KEYS = (
    "model_type",
    "activation_function",
    "attn_pdrop",
    "embd_pdrop",
    "initializer_range",
    "layer_types",
    "max_window_layers",
    "resid_pdrop",
    "router_aux_loss_coef",
    "use_sliding_window",
)
KEPT = "firstlight.config"

#: general.file_type of each format (llama.cpp's `llama_ftype`).
_FILE_TYPES: dict[GGUFDtype, int] = {"f32": 0, "f16": 1, "q8_0": 7, "bf16": 32}

#: Numbers that share a scale in q8_0.
_BLOCK = 32


def write_gguf(
    path: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    tokenizer: Tokenizer | None,
    *,
    dtype: GGUFDtype,
    name: str = "",
) -> None:
    """Write a model as one GGUF file, with about twice its largest tensor of memory.

    Args:
        path: the file, which is replaced once the new one is complete.
        config: Hugging Face's config.json as an object.
        tensors: tensors by their Hugging Face names; a tied head may be absent. Each is read
            twice and released, so that the mapping may read it from a file each time.
        tokenizer: the tokenizer; None writes a file without a vocabulary.
        dtype: format of matrices. Vectors, routers and GPT-2's positions are always f32, and in
            q8_0 a matrix whose rows are not a multiple of 32 is f16.
        name: name of the model for other programs.

    Raises:
        ModelError: llama.cpp does not support the model (see `gguf_notes` for small differences),
            a tensor is missing, extra, misshapen or not finite, or the format can't hold its
            numbers.
        TokenizerError: llama.cpp would give other ids than the tokenizer.
        MissingDependencyError: the package gguf is not installed.
        StorageError: the operating system refuses, as when the disk is full.
    """
    gguf = import_gguf()
    require_known(config)
    tied = _is_tied(config, tensors)
    shape = shape_of(config, tied=tied)
    rope = rope_of(config) if shape.rotary else None
    rules = list(tensor_rules(shape))
    _check_tensors(rules, tensors, tied)
    described = None if tokenizer is None else describe_tokenizer(tokenizer, shape.vocab_size)
    factors = None if rope is None else rope.factors(shape.head_dim)
    writer = gguf.GGUFWriter(None, shape.architecture)
    _add_model(writer, config, shape, rope)
    writer.add_name(name)
    writer.add_file_type(_FILE_TYPES[dtype])
    if dtype == "q8_0":
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _add_tokenizer(writer, described, shape)
    if factors is not None:
        _add_tensor_info(writer, ROPE_FACTORS, tuple(factors.shape), _stored_type("f32"))
    for rule in rules:
        _add_tensor_info(writer, rule.gguf, rule.gguf_shape, _type_of(rule, dtype))
    with replacing(path) as file:
        file.write(_header(writer))
        file.write(bytes(-file.size % writer.data_alignment))
        if factors is not None:
            file.write(factors.numpy().tobytes())
            file.write(bytes(-file.size % writer.data_alignment))
        for rule in rules:
            for part in _encoded(rule, tensors, _type_of(rule, dtype)):
                file.write(part.reshape(-1).view(np.uint8).data)
            file.write(bytes(-file.size % writer.data_alignment))


def _header(writer: Any) -> bytes:
    """Everything before the tensors' data, in memory: the package gguf writes files only."""
    import gguf

    memory = io.BytesIO()
    writer.fout, writer.state = [memory], gguf.gguf_writer.WriterState.EMPTY
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    return memory.getvalue()


def gguf_notes(config: Mapping[str, Any], tokenizer: Tokenizer | None = None) -> list[str]:
    """Differences between llama.cpp and the model, one line each, for people.

    Raises:
        ModelError: the model can't be put into GGUF at all.
        TokenizerError: the tokenizer can't.
    """
    shape = shape_of(config, tied=True)
    notes = []
    if config.get("activation_function") == "gelu":
        notes.append(
            "llama.cpp computes GPT-2's GELU by its tanh form, the model by the exact one: "
            "logits differ slightly"
        )
    window = _window(config)
    if window is not None and window < shape.max_positions:
        notes.append(
            f"llama.cpp ignores {shape.model_type}'s sliding window of {window} tokens: longer "
            "texts get other logits"
        )
    if tokenizer is not None:
        notes += describe_tokenizer(tokenizer, shape.vocab_size).notes
    return notes


def import_gguf() -> Any:
    """The package gguf.

    Raises:
        MissingDependencyError: the package is not installed.
    """
    try:
        import gguf
    except ImportError:
        raise MissingDependencyError("gguf", "interop", "writing and reading GGUF") from None
    return gguf


def _window(config: Mapping[str, Any]) -> int | None:
    """The sliding window of attention, if the model has one and uses it."""
    window = config.get("sliding_window")
    family = FAMILIES[config["model_type"]].spec
    always = "sliding_window" in family.own_keys and not family.has_window_switch
    uses = config.get("use_sliding_window", always)
    return window if uses and isinstance(window, int) and window > 0 else None


def _is_tied(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bool:
    """Whether the head is the embedding.

    Raises:
        ModelError: config.json and the tensors contradict each other.
    """
    family = FAMILIES[config["model_type"]]
    # Old files lack keys at their default in transformers: GPT-2's head is tied.
    usual = family.config.model_fields["tie_word_embeddings"].default
    tied = config.get("tie_word_embeddings", usual)
    embedding = f"{family.model.embedding_name}.weight"
    if "lm_head.weight" not in tensors:
        if not tied:
            raise ModelError(
                "the model lacks lm_head.weight, and config.json does not tie it to the embedding"
            )
        return True
    if tied and embedding in tensors:
        if not torch.equal(tensors["lm_head.weight"], tensors[embedding]):
            raise ModelError(f"config.json ties lm_head.weight to {embedding}, but the two differ")
        return True
    return False


def _check_tensors(rules: list[TensorRule], tensors: Mapping[str, Tensor], tied: bool) -> None:
    """Refuse, by name, tensors that are missing, extra, misshapen, or not finite."""
    shapes, broken = {}, []
    for name in tensors:
        if name.endswith(COMPUTED_BUFFERS) or (tied and name == "lm_head.weight"):
            continue
        tensor = tensors[name]
        shapes[name] = tensor.shape
        if not tensor.is_floating_point() or not is_finite(tensor):
            broken.append(name)
    expected = {source: rule.shape for rule in rules for source in rule.sources}
    require_tensors("the model", expected, shapes)
    if broken:
        raise ModelError(f"the model has integer or not finite tensors: {first_names(broken)}")


def _add_model(
    writer: GGUFWriter, config: Mapping[str, Any], shape: ModelShape, rope: Rope | None
) -> None:
    writer.add_type("model")
    writer.add_vocab_size(shape.vocab_size)
    writer.add_context_length(shape.max_positions)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_block_count(shape.num_layers)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(shape.num_heads)
    kept = {key: config[key] for key in KEPT_KEYS if config.get(key) is not None}
    if rope is None:
        writer.add_layer_norm_eps(_epsilon(config, "layer_norm_epsilon"))
    else:
        writer.add_layer_norm_rms_eps(_epsilon(config, "rms_norm_eps"))
        writer.add_head_count_kv(shape.num_kv_heads)
        writer.add_key_length(shape.head_dim)
        writer.add_value_length(shape.head_dim)
        writer.add_rope_dimension_count(shape.head_dim)
        writer.add_rope_freq_base(rope.theta)
        if rope.kind == "linear":
            import gguf

            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(rope.scaling["factor"])
        if rope.kind == "llama3":
            # They can't be computed from the tensor of the factors.
            kept["rope_scaling"] = {"rope_type": rope.kind, **rope.scaling}
    if shape.num_experts:
        writer.add_expert_count(shape.num_experts)
        writer.add_expert_used_count(shape.num_experts_per_tok)
        writer.add_expert_feed_forward_length(shape.expert_size)
    window = _window(config)
    if window is not None:
        writer.add_sliding_window(window)
    for key, name in shape.family.gguf.numbers.items():
        writer.add_float32(f"{shape.architecture}.{name}", _multiplier(config, key))
    writer.add_string(KEPT, json.dumps(kept))


def _multiplier(config: Mapping[str, Any], key: str) -> float:
    value = config.get(key, 1.0)
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise ModelError(f"config.json: {key} is {value!r}, no number above 0")
    return value


def _epsilon(config: Mapping[str, Any], key: str) -> float:
    value = config.get(key)
    if not isinstance(value, float) or not 0 < value < 1:
        raise ModelError(f"config.json: {key} is {value!r}, not a small number above 0")
    return value


def _add_tokenizer(writer: GGUFWriter, tokenizer: GGUFTokenizer | None, shape: ModelShape) -> None:
    if tokenizer is None:
        writer.add_tokenizer_model("none")
        return
    writer.add_tokenizer_model(tokenizer.model)
    writer.add_tokenizer_pre(tokenizer.pre)
    writer.add_token_list(tokenizer.tokens)
    writer.add_token_types(tokenizer.types)
    if tokenizer.scores is not None:
        writer.add_token_scores(tokenizer.scores)
        writer.add_add_space_prefix(tokenizer.add_space_prefix)
    if tokenizer.merges is not None:
        writer.add_token_merges(tokenizer.merges)
    writer.add_bos_token_id(tokenizer.bos_id)
    writer.add_eos_token_id(tokenizer.eos_id)
    if tokenizer.unknown_id is not None:
        writer.add_unk_token_id(tokenizer.unknown_id)
    writer.add_add_bos_token(tokenizer.add_bos)
    writer.add_add_eos_token(False)
    if tokenizer.chat_template is not None:
        writer.add_chat_template(tokenizer.chat_template)


def _stored_type(dtype: GGUFDtype) -> GGMLQuantizationType:
    import gguf

    return gguf.GGMLQuantizationType[dtype.upper()]


def _type_of(rule: TensorRule, dtype: GGUFDtype) -> GGMLQuantizationType:
    if rule.small:
        return _stored_type("f32")
    if dtype == "q8_0" and rule.gguf_shape[-1] % _BLOCK:
        return _stored_type("f16")
    return _stored_type(dtype)


def _add_tensor_info(
    writer: GGUFWriter, name: str, shape: tuple[int, ...], kind: GGMLQuantizationType
) -> None:
    import gguf

    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    size = int(np.prod(shape)) // block * block_bytes
    writer.add_tensor_info(name, shape, np.dtype(np.float32), size, raw_dtype=kind)


def _encoded(
    rule: TensorRule, tensors: Mapping[str, Tensor], kind: GGMLQuantizationType
) -> Iterator[NDArray[Any]]:
    """The data of a tensor, source by source.

    Raises:
        ModelError: a number is too large for the format.
    """
    import gguf

    formats = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    for source in rule.sources:
        tensor = rule.to_gguf(tensors[source].detach().cpu())
        # q8_0 is int8 times one f16 scale a block.
        packed = kind.name == "Q8_0"
        largest = tensor.abs().max() / 127 if packed else tensor.abs().max()
        if largest.to(torch.float16 if packed else formats[kind.name]).isinf():
            raise ModelError(
                f"{source} holds a number too large for {kind.name.lower()}: choose bf16 or f32"
            )
        if packed:
            yield np.ascontiguousarray(gguf.quants.quantize(tensor.float().numpy(), kind))
        else:
            yield tensor.to(formats[kind.name]).view(torch.uint8).numpy()

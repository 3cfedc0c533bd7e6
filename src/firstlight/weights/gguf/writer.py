"""Write models to GGUF files. GGUF is the file format of llama.cpp and of programs that are based
on it.

A file consists of these parts:

    header      magic number, version and counts
    metadata    entries general.*, <architecture>.* and tokenizer.*, and firstlight.config, a JSON
                object with the config.json entries that have no GGUF key (see `metadata`)
    tensors     names, shapes and types, followed by the data of each tensor in the same order
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from firstlight.errors import MissingDependencyError, ModelError
from firstlight.files.atomic import replacing
from firstlight.models import FAMILIES
from firstlight.tokenizer import Tokenizer
from firstlight.weights.gguf.metadata import add_model, add_sampling, rope_factors, supported_model
from firstlight.weights.gguf.tensors import TensorRule, tensor_rules
from firstlight.weights.gguf.tokenizer import GGUFTokenizer, describe_tokenizer
from firstlight.weights.huggingface import end_ids, generation_config
from firstlight.weights.loading import COMPUTED_BUFFERS, first_names, is_finite, require_tensors

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, GGUFWriter

GGUFDtype = Literal["f32", "f16", "bf16", "q8_0"]

#: Value of general.file_type for each format, as defined in llama.cpp's `llama_ftype`.
_FILE_TYPES: dict[GGUFDtype, int] = {"f32": 0, "f16": 1, "q8_0": 7, "bf16": 32}

#: Number of weights that share a scale in q8_0.
_BLOCK = 32


def write_gguf(
    path: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    tokenizer: Tokenizer | None,
    *,
    dtype: GGUFDtype,
    name: str = "",
    generation: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Write a model to a single GGUF file.

    Writing takes about twice as much memory as the largest tensor of the model.

    Args:
        path: path of the file. An existing file is replaced once the new file is complete.
        config: content of Hugging Face's config.json.
        tensors: tensors, keyed by Hugging Face name. A tied output head can be omitted. Each tensor
            is looked up twice and is not kept in memory in between, so the mapping can read tensors
            from a file on demand.
        tokenizer: tokenizer of the model. None to write a file without a vocabulary.
        dtype: format in which matrices are stored. Vectors, routers, convolutions and learned
            position embeddings are always stored in f32. With "q8_0", matrices whose row length is
            not a multiple of 32 are stored in f16.
        name: name of the model, which is stored as general.name and shown by other programs.
        generation: content of generation_config.json. Its sampling settings and the ids of its
            end-of-text tokens are written to the file.

    Raises:
        ModelError: llama.cpp does not support the model; a tensor is missing, unexpected, not
            finite or has the wrong shape; or a number is too large for the format. Small
            differences between llama.cpp's computation and the model's are not errors. They are
            reported by `gguf_notes`.
        TokenizerError: llama.cpp would produce ids that differ from those of the tokenizer.
        MissingDependencyError: the gguf package is not installed.
        StorageError: the file can't be written, for example because the disk is full.
    """
    gguf = import_gguf()
    model = supported_model(config)
    rules = list(tensor_rules(model))
    _check_head(model, tensors)
    _check_tensors(model, rules, tensors)
    described = None
    if tokenizer is not None:
        ends = end_ids(generation_config(tokenizer, generation))
        described = describe_tokenizer(tokenizer, model.vocab_size, ends)
    factors = rope_factors(model)
    writer = gguf.GGUFWriter(None, model.family.gguf.architecture)
    add_model(writer, config, model)
    add_sampling(writer, generation)
    writer.add_name(_loadable_name(name, described))
    writer.add_file_type(_FILE_TYPES[dtype])
    if dtype == "q8_0":
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _add_tokenizer(writer, described)
    for factors_name, values in factors.items():
        _add_tensor_info(writer, factors_name, tuple(values.shape), _stored_type("f32"))
    for rule in rules:
        _add_tensor_info(writer, rule.gguf, rule.gguf_shape, _type_of(rule, dtype))
    with replacing(path) as file:
        file.write(_header(writer))
        # Pad the header, and later each tensor, with zeros to the next multiple of the alignment.
        file.write(bytes(-file.size % writer.data_alignment))
        for values in factors.values():
            file.write(values.numpy().tobytes())
            file.write(bytes(-file.size % writer.data_alignment))
        for rule in rules:
            for part in _encoded(rule, tensors, _type_of(rule, dtype)):
                file.write(part.reshape(-1).view(np.uint8).data)
            file.write(bytes(-file.size % writer.data_alignment))


def _loadable_name(name: str, tokenizer: GGUFTokenizer | None) -> str:
    """Return the model's name, changed if necessary so that llama.cpp can load the file.

    If the name contains "phi3" or "phi-3", llama.cpp requires the special tokens of Phi-3's
    tokenizer. With any other tokenizer, the name is changed to "phi 3".
    """
    phi3 = {"</s>", "<s>", "<unk>", "<|endoftext|>"}
    if tokenizer is None or phi3 <= set(tokenizer.tokens):
        return name
    return re.sub("(?i)phi-?3", lambda found: f"{found[0][:3]} 3", name)


def _header(writer: Any) -> bytes:
    """Return the beginning of the file, before the data of the tensors. It consists of the header,
    the metadata, and the names and shapes of the tensors.
    """
    # The gguf package can write only to files that it opens itself, so replace its file with a
    # buffer.
    import gguf

    memory = io.BytesIO()
    writer.fout, writer.state = [memory], gguf.gguf_writer.WriterState.EMPTY
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    return memory.getvalue()


def gguf_notes(
    config: Mapping[str, Any],
    tokenizer: Tokenizer | None = None,
    generation: Mapping[str, Any] = MappingProxyType({}),
) -> list[str]:
    """Return notes for the user about small differences between the results of the model in
    llama.cpp and its results in firstlight.

    Raises:
        ModelError: the model can't be converted to GGUF at all.
        TokenizerError: the tokenizer can't be converted to GGUF.
    """
    model = supported_model(config)
    notes = []
    if "gelu" in (config.get("activation_function"), config.get("hidden_act")):
        notes.append(
            f"llama.cpp uses the tanh approximation of GELU for {model.model_type}, but the "
            "model uses the exact function: logits differ slightly"
        )
    window, spec = getattr(model, "sliding_window", None), model.family.gguf
    if window is not None and window < model.max_position_embeddings and not spec.has_windows:
        notes.append(
            f"llama.cpp ignores {model.model_type}'s sliding window of {window} tokens: logits "
            "differ for longer texts"
        )
    scaling = getattr(model, "rope_scaling", None)
    if scaling is not None and scaling.rope_type == "yarn" and not scaling.truncate:
        notes.append(
            "llama.cpp rounds the bounds between which YaRN blends frequencies, but the model "
            "does not (truncate false): logits differ slightly"
        )
    eps = getattr(model, "rms_norm_eps", None)
    if spec.inner_eps is not None and eps != spec.inner_eps:
        notes.append(
            f"llama.cpp uses rms_norm_eps {eps} for the norms within attention, but the model "
            f"uses {spec.inner_eps}: logits differ slightly"
        )
    if scaling is not None and scaling.rope_type == "longrope":
        notes.append(
            "llama.cpp chooses LongRoPE's long or short factors by the context size that it is "
            "started with, but the model chooses them by the text's length"
        )
    if tokenizer is not None:
        notes += describe_tokenizer(tokenizer, model.vocab_size).notes
        if left := end_ids(generation_config(tokenizer, generation))[3:]:
            notes.append(
                "a GGUF file can list at most three end tokens: llama.cpp does not stop at "
                f"{', '.join(str(tokenizer.backend.id_to_token(token_id)) for token_id in left)}"
            )
    return notes


def import_gguf() -> Any:
    """Import and return the gguf package.

    Raises:
        MissingDependencyError: the package is not installed.
    """
    try:
        import gguf
    except ImportError:
        raise MissingDependencyError("gguf", "interop", "writing and reading GGUF") from None
    return gguf


def _check_head(model: Any, tensors: Mapping[str, Tensor]) -> None:
    """Check that the tensors match the `tie_word_embeddings` setting of the config.

    Raises:
        ModelError: the weight of an untied output head is missing, or that of a tied output head
            differs from the embedding.
    """
    family, tied = FAMILIES[model.model_type].model, model.tie_word_embeddings
    embedding, head = f"{family.embedding_name}.weight", family.head_file_name
    if head not in tensors and not tied:
        raise ModelError(
            f"the model has no {head}, but config.json does not tie it to the embedding"
        )
    has_both = {head, embedding} <= tensors.keys()
    if tied and has_both and not torch.equal(tensors[head], tensors[embedding]):
        raise ModelError(f"config.json ties {head} to {embedding}, but their values differ")


def _check_tensors(model: Any, rules: list[TensorRule], tensors: Mapping[str, Tensor]) -> None:
    """Check that all tensors exist, have the right shapes and contain only finite floats.

    Args:
        model: the model's config.
        rules: rules for the tensors of the file.
        tensors: tensors of the model, keyed by Hugging Face name.

    Raises:
        ModelError: a tensor is missing, unexpected, not finite, not floating point or has the wrong
            shape. The message names the tensor.
    """
    family = FAMILIES[model.model_type].model
    unused = family.head_file_name if model.tie_word_embeddings else None
    shapes, broken = {}, []
    for name in tensors:
        if name.endswith(COMPUTED_BUFFERS) or name == unused:
            continue
        tensor = tensors[name]
        shapes[name] = tensor.shape
        if not tensor.is_floating_point() or not is_finite(tensor):
            broken.append(name)
    expected = {source: rule.shape for rule in rules for source in rule.sources}
    require_tensors("the model", expected, shapes)
    if broken:
        raise ModelError(f"the model has integer or non-finite tensors: {first_names(broken)}")


def _add_tokenizer(writer: GGUFWriter, tokenizer: GGUFTokenizer | None) -> None:
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
    for name, token_id in tokenizer.special_ids.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token_id)
    writer.add_add_bos_token(tokenizer.add_bos)
    writer.add_add_eos_token(False)
    if tokenizer.chat_template is not None:
        writer.add_chat_template(tokenizer.chat_template)


def _stored_type(dtype: GGUFDtype) -> GGMLQuantizationType:
    import gguf

    return gguf.GGMLQuantizationType[dtype.upper()]


def _type_of(rule: TensorRule, dtype: GGUFDtype) -> GGMLQuantizationType:
    """Return the ggml type in which a tensor is stored if the format of the file is `dtype`. Some
    tensors are always stored in a different format, as described in `write_gguf`.
    """
    if rule.small:
        return _stored_type("f32")
    if dtype == "q8_0" and rule.gguf_shape[-1] % _BLOCK:
        return _stored_type("f16")
    return _stored_type(dtype)


def _add_tensor_info(
    writer: GGUFWriter, name: str, shape: tuple[int, ...], kind: GGMLQuantizationType
) -> None:
    import gguf

    # Pass fp32 as the dtype. With uint8, the gguf package would interpret the last dimension of
    # `shape` as a number of bytes.
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    size = int(np.prod(shape)) // block * block_bytes
    writer.add_tensor_info(name, shape, np.dtype(np.float32), size, raw_dtype=kind)


def _encoded(
    rule: TensorRule, tensors: Mapping[str, Tensor], kind: GGMLQuantizationType
) -> Iterator[NDArray[Any]]:
    """Yield the bytes of a tensor in the file, as one numpy array per source tensor.

    Args:
        rule: rule for the tensor.
        tensors: tensors of the model, keyed by Hugging Face name.
        kind: format of the tensor in the file.

    Raises:
        ModelError: a number is too large for the format.
    """
    import gguf

    formats = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    for source in rule.sources:
        tensor = rule.to_gguf(tensors[source].detach().cpu())
        # A q8_0 block consists of int8 numbers with absolute values up to 127, and one f16 scale.
        packed = kind.name == "Q8_0"
        largest = tensor.abs().max() / 127 if packed else tensor.abs().max()
        if largest.to(torch.float16 if packed else formats[kind.name]).isinf():
            raise ModelError(
                f"{source} contains a number too large for {kind.name.lower()}: choose bf16 or f32"
            )
        if packed:
            yield np.ascontiguousarray(gguf.quants.quantize(tensor.float().numpy(), kind))
        else:
            yield tensor.to(formats[kind.name]).view(torch.uint8).numpy()

"""Write a model as a GGUF file, the format of llama.cpp and of programs that use it.

Parts of the file, in order:

    header      magic, version, counts
    metadata    general.*, <architecture>.*, tokenizer.*; firstlight.config, a JSON object of the
                config.json entries without a GGUF key (see `metadata`)
    tensors     names, shapes, types; then the data of each tensor in the same order
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from firstlight.conversion.gguf.architectures import supported_model
from firstlight.conversion.gguf.metadata import add_model, rope_factors
from firstlight.conversion.gguf.tensors import TensorRule, tensor_rules
from firstlight.errors import MissingDependencyError, ModelError
from firstlight.files.atomic import replacing
from firstlight.models import FAMILIES
from firstlight.tokenizer import Tokenizer
from firstlight.weights.loading import COMPUTED_BUFFERS, first_names, is_finite, require_tensors

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, GGUFWriter
import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import models

from firstlight.errors import TokenizerError
from firstlight.tokenizer import GPT2_PATTERN, LLAMA3_PATTERN, QWEN2_PATTERN

GGUFDtype = Literal["f32", "f16", "bf16", "q8_0"]

#: general.file_type of each format (llama.cpp's `llama_ftype`).
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
) -> None:
    """Write a model as one GGUF file. The memory needed is about twice that of its largest tensor.

    Args:
        path: the file; an old one is replaced once the new one is complete.
        config: Hugging Face's config.json as an object.
        tensors: tensors by their Hugging Face names; a tied head may be absent. Each is looked up
            twice and not kept, so that the mapping may read it from a file each time.
        tokenizer: the tokenizer; None writes a file without a vocabulary.
        dtype: format of matrices. Vectors, routers, convolutions and learned positions are always
            f32. With q8_0, matrices whose row length is not a multiple of 32 are f16.
        name: name of the model for other programs (general.name).

    Raises:
        ModelError: llama.cpp does not support the model (small differences are no error, see
            `gguf_notes`); a tensor is missing, extra, misshapen or not finite; or a number is too
            large for the format.
        TokenizerError: llama.cpp would give other ids than the tokenizer.
        MissingDependencyError: the package gguf is not installed.
        StorageError: the file system refuses a write, for instance because the disk is full.
    """
    gguf = import_gguf()
    model = supported_model(config)
    rules = list(tensor_rules(model))
    _check_head(model, tensors)
    _check_tensors(model, rules, tensors)
    described = None if tokenizer is None else describe_tokenizer(tokenizer, model.vocab_size)
    factors = rope_factors(model)
    writer = gguf.GGUFWriter(None, model.family.gguf.architecture)
    add_model(writer, config, model)
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
        # Zeros up to the next multiple of the alignment, here and after each tensor.
        file.write(bytes(-file.size % writer.data_alignment))
        for values in factors.values():
            file.write(values.numpy().tobytes())
            file.write(bytes(-file.size % writer.data_alignment))
        for rule in rules:
            for part in _encoded(rule, tensors, _type_of(rule, dtype)):
                file.write(part.reshape(-1).view(np.uint8).data)
            file.write(bytes(-file.size % writer.data_alignment))


def _loadable_name(name: str, tokenizer: GGUFTokenizer | None) -> str:
    """The model's name, with which llama.cpp loads the file.

    If the name contains "phi3" or "phi-3", llama.cpp requires the special tokens of Phi-3's
    tokenizer. With another tokenizer, they become "phi 3".
    """
    phi3 = {"</s>", "<s>", "<unk>", "<|endoftext|>"}
    if tokenizer is None or phi3 <= set(tokenizer.tokens):
        return name
    return re.sub("(?i)phi-?3", lambda found: f"{found[0][:3]} 3", name)


def _header(writer: Any) -> bytes:
    """The file up to the tensors' data: header, metadata, names and shapes of the tensors."""
    # The package gguf only writes to files that it opens: its writer gets a buffer instead.
    import gguf

    memory = io.BytesIO()
    writer.fout, writer.state = [memory], gguf.gguf_writer.WriterState.EMPTY
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    return memory.getvalue()


def gguf_notes(config: Mapping[str, Any], tokenizer: Tokenizer | None = None) -> list[str]:
    """Small differences between llama.cpp's computation and the model's, as notes for the user.

    Raises:
        ModelError: the model can't be put into GGUF at all.
        TokenizerError: the tokenizer can't be put into GGUF.
    """
    model = supported_model(config)
    notes = []
    if "gelu" in (config.get("activation_function"), config.get("hidden_act")):
        notes.append(
            f"llama.cpp computes {model.model_type}'s GELU by its tanh form, the model by the "
            "exact one: logits differ slightly"
        )
    window, spec = getattr(model, "sliding_window", None), model.family.gguf
    if window is not None and window < model.max_position_embeddings and not spec.has_windows:
        notes.append(
            f"llama.cpp ignores {model.model_type}'s sliding window of {window} tokens: longer "
            "texts get other logits"
        )
    scaling = getattr(model, "rope_scaling", None)
    if scaling is not None and scaling.rope_type == "yarn" and not scaling.truncate:
        notes.append(
            "llama.cpp rounds the bounds between which YaRN blends frequencies, the model does not "
            "(truncate false): logits differ slightly"
        )
    eps = getattr(model, "rms_norm_eps", None)
    if spec.inner_eps is not None and eps != spec.inner_eps:
        notes.append(
            f"llama.cpp takes rms_norm_eps {eps} for the norms within attention, too, where "
            f"the model has {spec.inner_eps}: logits differ slightly"
        )
    if scaling is not None and scaling.rope_type == "longrope":
        notes.append(
            "llama.cpp takes LongRoPE's long or short factors by the context it is opened with, "
            "the model by the text's length"
        )
    if tokenizer is not None:
        notes += describe_tokenizer(tokenizer, model.vocab_size).notes
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


def _check_head(model: Any, tensors: Mapping[str, Tensor]) -> None:
    """Refuse tensors that contradict the config in whether the head is the embedding.

    Raises:
        ModelError: there are such tensors.
    """
    family, tied = FAMILIES[model.model_type].model, model.tie_word_embeddings
    embedding, head = f"{family.embedding_name}.weight", family.head_file_name
    if head not in tensors and not tied:
        raise ModelError(
            f"the model lacks {head}, and config.json does not tie it to the embedding"
        )
    has_both = {head, embedding} <= tensors.keys()
    if tied and has_both and not torch.equal(tensors[head], tensors[embedding]):
        raise ModelError(f"config.json ties {head} to {embedding}, but the two differ")


def _check_tensors(model: Any, rules: list[TensorRule], tensors: Mapping[str, Tensor]) -> None:
    """Refuse tensors that are missing, extra, misshapen or not finite, and name them.

    Args:
        model: the model's config.
        rules: the tensors of the file.
        tensors: the model's tensors by Hugging Face name.

    Raises:
        ModelError: there are such tensors.
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
        raise ModelError(f"the model has integer or not finite tensors: {first_names(broken)}")


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
    """The ggml type of a tensor in a file of format `dtype`; exceptions as in `write_gguf`."""
    if rule.small:
        return _stored_type("f32")
    if dtype == "q8_0" and rule.gguf_shape[-1] % _BLOCK:
        return _stored_type("f16")
    return _stored_type(dtype)


def _add_tensor_info(
    writer: GGUFWriter, name: str, shape: tuple[int, ...], kind: GGMLQuantizationType
) -> None:
    import gguf

    # A dtype other than uint8 tells gguf that `shape` counts numbers, not bytes.
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    size = int(np.prod(shape)) // block * block_bytes
    writer.add_tensor_info(name, shape, np.dtype(np.float32), size, raw_dtype=kind)


def _encoded(
    rule: TensorRule, tensors: Mapping[str, Tensor], kind: GGMLQuantizationType
) -> Iterator[NDArray[Any]]:
    """The bytes of a tensor, as one numpy array for each of its sources.

    Args:
        rule: the tensor.
        tensors: the model's tensors by Hugging Face name.
        kind: format of the tensor in the file.

    Raises:
        ModelError: a number is too large for the format.
    """
    import gguf

    formats = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    for source in rule.sources:
        tensor = rule.to_gguf(tensors[source].detach().cpu())
        # A block of q8_0 is int8 numbers up to 127 and one f16 scale.
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


# The tokenizer

#: Pattern that splits texts -> (its name in tokenizer.ggml.pre, True if llama.cpp takes a piece
#: that is a token as it is, without merging: `ignore_merges` of Hugging Face's BPE).
_SPLITS = {
    GPT2_PATTERN: ("gpt-2", False),
    LLAMA3_PATTERN: ("llama-bpe", True),
    QWEN2_PATTERN: ("qwen2", False),
}

# Values of tokenizer.ggml.token_type.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
#: Character that stands for a space in Llama 2's tokens, and the normalizer's steps that write it.
_SPACE = "▁"
_PREPEND = {"type": "Prepend", "prepend": _SPACE}
_REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}


@dataclass(frozen=True, kw_only=True)
class GGUFTokenizer:
    """The tokenizer's part of a GGUF file's metadata.

    Attributes:
        model: tokenizer.ggml.model, "gpt2" or "llama".
        pre: tokenizer.ggml.pre.
        tokens: every token, by id.
        types: tokenizer.ggml.token_type of every token, by id.
        scores: score of every token, by id; None for "gpt2". llama.cpp merges the two neighbours
            whose joint token has the highest score first.
        merges: merges in order, each "left right"; None for "llama".
        special_ids: ids of "bos" and "eos", the tokens that begin and end a document, and of
            "unknown", the unknown token, if there is one.
        add_bos: True if a prompt begins with "bos".
        add_space_prefix: True if a space is put before a text.
        chat_template: the Jinja chat template; None if there is none.
        notes: cases in which llama.cpp's ids differ, for the user.
    """

    model: str
    pre: str = "default"
    tokens: tuple[str, ...]
    types: tuple[int, ...]
    scores: tuple[float, ...] | None = None
    merges: tuple[str, ...] | None = None
    special_ids: Mapping[str, int]
    add_bos: bool
    add_space_prefix: bool = False
    chat_template: str | None
    notes: tuple[str, ...]


def describe_tokenizer(tokenizer: Tokenizer, vocab_size: int) -> GGUFTokenizer:
    """Describe a tokenizer for a model with `vocab_size` embedding rows, of one of the two kinds to
    which llama.cpp gives the same ids.

    - Byte-level BPE (GPT-2, Llama 3, Qwen2) becomes llama.cpp's kind "gpt2": tokens, merges, and
      the name of the pattern that splits texts into pieces.
    - BPE with byte fallback (Llama 2) becomes the kind "llama": tokens and scores.

    Ids without a token, within the vocabulary or after its end, become unused tokens `[PAD<id>]`.

    Raises:
        TokenizerError: llama.cpp would give other ids, or the tokenizer doesn't fit the model.
    """
    if tokenizer.vocab_size > vocab_size:
        raise TokenizerError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model's embedding only "
            f"{vocab_size} rows: give the tokenizer that belongs to the model"
        )
    state = json.loads(tokenizer.backend.to_str())
    model = state["model"]
    if model.get("type") != "BPE":
        raise _refused(f"its model is {model.get('type')}, not BPE")
    for key in ("continuing_subword_prefix", "end_of_word_suffix", "dropout"):
        if model.get(key):
            raise _refused(f"its BPE has {key} {model[key]!r}")
    if not model["merges"]:
        raise _refused("it has no merges")
    added = {token["content"]: token for token in state["added_tokens"]}
    for content, token in added.items():
        if not token["special"] and (token["lstrip"] or token["rstrip"] or token["single_word"]):
            raise _refused(f"its token '{content}' takes in white space or needs word borders")
    tokens = _tokens(tokenizer, vocab_size)
    types = _types(tokens, added, model)
    # llama.cpp would take an ordinary token for a missing bos or eos.
    bos = tokenizer.separator_id
    eos = bos if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    name = model.get("unk_token")
    unknown = None if name is None else tokenizer.backend.token_to_id(name)
    described = functools.partial(
        GGUFTokenizer,
        tokens=tokens,
        types=types,
        special_ids={"bos": bos, "eos": eos} | ({} if unknown is None else {"unknown": unknown}),
        add_bos=tokenizer.add_bos,
        chat_template=tokenizer.chat_template,
    )
    if model.get("byte_fallback"):
        prefix, notes = _space_prefix(state)
        scores = _scores(tokens, types, model)
        return described(model="llama", scores=scores, add_space_prefix=prefix, notes=notes)
    pre, notes = _split_name(state, added)
    merges = tuple(" ".join(pair) for pair in _pairs(model))
    return described(model="gpt2", pre=pre, merges=merges, notes=notes)


def _refused(reason: str) -> TokenizerError:
    return TokenizerError(
        f"the tokenizer can't be put into GGUF, since llama.cpp differs: {reason}"
    )


def _tokens(tokenizer: Tokenizer, vocab_size: int) -> tuple[str, ...]:
    """Texts of all tokens, by id; `[PAD<id>]` for ids without a token."""
    vocabulary = tokenizer.backend.get_vocab(with_added_tokens=True)
    by_id = {index: token for token, index in vocabulary.items()}
    tokens = tuple(by_id.get(index, f"[PAD{index}]") for index in range(vocab_size))
    if len(set(tokens)) != vocab_size or "" in by_id.values():
        # llama.cpp aborts the whole process if two tokens have the same text.
        raise _refused("a token is empty, or is called [PAD..] as unused tokens are")
    return tokens


def _types(
    tokens: Sequence[str], added: Mapping[str, Mapping[str, Any]], model: Mapping[str, Any]
) -> tuple[int, ...]:
    """tokenizer.ggml.token_type of every token, by id."""

    def kind(token: str) -> int:
        if token == model.get("unk_token"):
            return UNKNOWN
        if token in added:
            return CONTROL if added[token]["special"] else USER_DEFINED
        if token not in model["vocab"]:
            return UNUSED
        if model.get("byte_fallback") and _BYTE_TOKEN.fullmatch(token):
            return BYTE
        return NORMAL

    return tuple(kind(token) for token in tokens)


def _pairs(model: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The merges as pairs (left, right); older tokenizer.json files have "left right"."""
    pairs = [pair.split(" ", 1) if isinstance(pair, str) else pair for pair in model["merges"]]
    return [(left, right) for left, right in pairs]


def _split_name(state: Mapping[str, Any], added: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    """tokenizer.ggml.pre of a byte-level BPE tokenizer, and notes for the user.

    Args:
        state: content of tokenizer.json.
        added: added tokens by text.

    Raises:
        TokenizerError: llama.cpp would split texts differently, or merge them into other tokens.
    """
    normalizer = state.get("normalizer")
    if normalizer not in (None, {"type": "NFC"}):
        raise _refused(f"its normalizer is {json.dumps(normalizer, ensure_ascii=False)}")
    stage = state.get("pre_tokenizer") or {}
    *splits, last = stage.get("pretokenizers") or [stage]
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        raise _refused("it is neither byte-level BPE without a leading space nor has byte fallback")
    patterns = [GPT2_PATTERN] if last.get("use_regex", True) else []
    for step in splits:
        plain = step.get("type") == "Split" and step["behavior"] == "Isolated"
        if not plain or step["invert"]:
            raise _refused(f"it splits texts by {json.dumps(step, ensure_ascii=False)}")
        patterns.append(str(next(iter(step["pattern"].values()))))
    if len(patterns) != 1 or patterns[0] not in _SPLITS:
        raise _refused(
            f"it splits texts by the pattern {' and '.join(patterns) or '(none)'}; known are those "
            "of GPT-2, Llama 3 and Qwen2"
        )
    name, whole_pieces = _SPLITS[patterns[0]]
    if whole_pieces != bool(state["model"].get("ignore_merges")):
        _require_reachable(state["model"], added)
    note = "llama.cpp does not normalise texts to NFC as the tokenizer does"
    return name, () if normalizer is None else (note,)


def _require_reachable(model: Mapping[str, Any], added: Mapping[str, Any]) -> None:
    """Refuse a vocabulary with a token that its own text does not merge into: its id would depend
    on `ignore_merges`, in which this tokenizer and llama.cpp differ."""
    bpe = models.BPE(vocab=model["vocab"], merges=_pairs(model), ignore_merges=False)
    for token in model["vocab"]:
        if token not in added and len(bpe.tokenize(token)) != 1:
            raise _refused(f"its merges do not lead to its token '{token}'")


def _space_prefix(state: Mapping[str, Any]) -> tuple[bool, tuple[str, ...]]:
    """(True if a tokenizer with byte fallback puts a space before a text, notes for the user).

    Raises:
        TokenizerError: the tokenizer treats spaces in another way than Llama 2's.
    """
    normalizer, splitter = state.get("normalizer"), state.get("pre_tokenizer")
    steps = (normalizer or {}).get("normalizers", [normalizer] if normalizer else [])
    if splitter is None and steps == [_PREPEND, _REPLACE]:
        return True, ()
    if splitter is None and steps == [_REPLACE]:
        return False, ()
    scheme = (splitter or {}).get("prepend_scheme")
    expected = {"type": "Metaspace", "replacement": _SPACE, "split": False}
    if not steps and scheme is not None and splitter == {**expected, "prepend_scheme": scheme}:
        note = "a text that begins with a space gets one more from llama.cpp"
        return (False, ()) if scheme == "never" else (True, (note,))
    raise _refused("it has byte fallback, but does not turn spaces into ▁ as Llama 2's does")


def _scores(
    tokens: Sequence[str], types: Sequence[int], model: Mapping[str, Any]
) -> tuple[float, ...]:
    """Score of every token, by id, with which llama.cpp merges in the order of the BPE's merges.

    llama.cpp joins any two neighbours whose joint text is a token: the highest score first, and
    the leftmost pair among equals. This gives the same ids as the BPE under two conditions:

    - every pair of tokens whose joint text is a token is a merge of the BPE;
    - all merges into one token follow each other in the list of merges.

    The score of a token is then minus the rank of its first merge. Tokens of spaces alone are
    exempt from the second condition (Llama 2's merges of spaces are mixed): those whose merges
    overlap share a score.

    Raises:
        TokenizerError: a condition is not met, or a byte token is missing.
    """
    if sum(kind == BYTE for kind in types) != 256:
        raise _refused("it has byte fallback without all 256 byte tokens")
    pairs = _pairs(model)
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for rank, (left, right) in enumerate(pairs):
        first.setdefault(left + right, rank)
        last[left + right] = rank
    scores: dict[str, float] = {}
    end, previous = -1, ""
    for token in first:
        if first[token] > end:
            scores[token] = float(-first[token])
        elif set(token) == set(previous) == {_SPACE}:
            scores[token] = scores[previous]
        else:
            raise _refused(f"its merges into '{token}' and '{previous}' come mixed")
        end, previous = max(end, last[token]), token
    known, listed = set(tokens), set(pairs)
    for token in tokens:
        for cut in range(1, len(token)):
            pair = (token[:cut], token[cut:])
            if pair[0] in known and pair[1] in known and pair not in listed:
                raise _refused(f"'{pair[0]}' and '{pair[1]}' make a token, but are not a merge")
    return tuple(scores.get(token, float(-len(pairs))) for token in tokens)

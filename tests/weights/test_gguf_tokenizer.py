"""Tokenizers in GGUF files: the entries for llama.cpp, and unsupported tokenizers."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import tokenizers
from hypothesis import given

from firstlight.errors import TokenizerError
from firstlight.tokenizer import (
    END_OF_TEXT,
    GPT2_PATTERN,
    LLAMA3_PATTERN,
    QWEN2_PATTERN,
    Tokenizer,
    train_tokenizer,
)
from firstlight.weights.gguf.tokenizer import (
    BYTE,
    CONTROL,
    NORMAL,
    PRE_TOKENIZERS,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    GGUFTokenizer,
    describe_tokenizer,
    read_tokenizer,
)
from firstlight.weights.gguf.writer import _add_tokenizer
from tokenizer_files import KINDS, TEXTS, tiny

_PREPEND = {"type": "Prepend", "prepend": "▁"}
_REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}


def changed(tokenizer: Tokenizer, change: Callable[[dict[str, Any]], object]) -> Tokenizer:
    """Return the tokenizer with a modified tokenizer.json."""
    state = json.loads(tokenizer.backend.to_str())
    change(state)
    return Tokenizer(
        tokenizers.Tokenizer.from_str(json.dumps(state)),
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        add_bos=tokenizer.add_bos,
    )


def described(tokenizer: Tokenizer) -> GGUFTokenizer:
    return describe_tokenizer(tokenizer, tokenizer.vocab_size)


@pytest.mark.parametrize("kind", KINDS)
def test_gguf_tokenizer_every_token_has_id_and_type(kind: str) -> None:
    tokenizer = tiny(kind)
    found = describe_tokenizer(tokenizer, tokenizer.vocab_size + 3)
    vocabulary = tokenizer.backend.get_vocab(with_added_tokens=True)
    for token, index in vocabulary.items():
        assert found.tokens[index] == token
    assert found.tokens[-3:] == tuple(f"[PAD{tokenizer.vocab_size + i}]" for i in range(3))
    assert found.types[-3:] == (UNUSED,) * 3
    special = {i for i, kind in enumerate(found.types) if kind in (CONTROL, UNKNOWN)}
    assert special == tokenizer.special_token_ids
    assert found.special_ids["bos"] == tokenizer.separator_id
    assert found.special_ids["eos"] == tokenizer.eos_token_id
    assert found.add_bos == tokenizer.add_bos
    assert found.notes == ()


def test_gguf_byte_level_tokenizer_is_identified_by_merges_and_split() -> None:
    found = described(tiny("tokenizer.json"))
    merges = json.loads(tiny("tokenizer.json").backend.to_str())["model"]["merges"]
    assert (found.model, found.pre, found.scores) == ("gpt2", "gpt-2", None)
    assert found.merges == tuple(f"{left} {right}" for left, right in merges)
    assert ("unknown" in found.special_ids, found.add_space_prefix) == (False, False)
    assert set(found.types) == {NORMAL, CONTROL}
    assert (described(tiny("ranks")).model, described(tiny("ranks")).pre) == ("gpt2", "llama-bpe")


@pytest.mark.parametrize(
    ("pattern", "name"),
    [(GPT2_PATTERN, "gpt-2"), (LLAMA3_PATTERN, "dbrx"), (QWEN2_PATTERN, "qwen2")],
)
def test_gguf_trained_tokenizer_is_named_after_its_split(
    pattern: str, name: str, texts: list[str]
) -> None:
    assert described(train_tokenizer(texts, 400, pattern=pattern)).pre == name


def spm_ids(described: GGUFTokenizer, text: str) -> list[int]:
    """Encode like llama.cpp's "llama" tokenizer: merge the neighbours with the best score, leftmost
    first, until no merge gives a token; then split what is not a token into bytes.
    """
    ids = {token: index for index, token in enumerate(described.tokens)}
    assert described.scores is not None
    prefix = " " if described.add_space_prefix and text else ""
    symbols = list((prefix + text).replace(" ", "▁"))
    while True:
        joints = [
            (-described.scores[ids[left + right]], position)
            for position, (left, right) in enumerate(itertools.pairwise(symbols))
            if left + right in ids
        ]
        if not joints:
            break
        position = min(joints)[1]
        symbols[position : position + 2] = [symbols[position] + symbols[position + 1]]
    found: list[int] = []
    for symbol in symbols:
        as_bytes = [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
        found += [ids[symbol]] if symbol in ids else as_bytes
    return found


@given(TEXTS)
def test_gguf_scores_give_same_ids_in_llama_cpp(text: str) -> None:
    tokenizer = tiny("pieces")
    found = described(tokenizer)
    assert (found.model, found.pre, found.merges) == ("llama", "default", None)
    assert spm_ids(found, text) == tokenizer.encode(text)


def test_gguf_sentencepiece_tokens_have_types_of_their_kind() -> None:
    found = described(tiny("pieces"))
    assert found.types[:4] == (UNKNOWN, CONTROL, CONTROL, BYTE)
    assert found.types.count(BYTE) == 256
    assert found.types[-1] == NORMAL
    assert found.special_ids["unknown"] == 0
    assert found.add_space_prefix


@pytest.mark.parametrize(
    ("normalizers", "scheme", "prefix", "notes"),
    [
        ([_PREPEND, _REPLACE], None, True, 0),
        ([_REPLACE], None, False, 0),
        ([], "always", True, 1),
        ([], "first", True, 1),
        ([], "never", False, 0),
    ],
)
def test_gguf_tokenizer_space_prefix_is_recorded(
    normalizers: Sequence[Any], scheme: str | None, prefix: bool, notes: int
) -> None:
    def change(state: dict[str, Any]) -> None:
        state["normalizer"] = (
            {"type": "Sequence", "normalizers": normalizers} if normalizers else None
        )
        metaspace = {"type": "Metaspace", "replacement": "▁", "split": False}
        state["pre_tokenizer"] = {**metaspace, "prepend_scheme": scheme} if scheme else None

    tokenizer = changed(tiny("pieces"), change)
    found = described(tokenizer)
    assert (found.add_space_prefix, len(found.notes)) == (prefix, notes)
    for text in ("a bed", "ab  ab", "\n a"):
        assert spm_ids(found, text) == tokenizer.encode(text)


def test_gguf_unicode_normalisation_is_noted() -> None:
    tokenizer = changed(tiny("tokenizer.json"), lambda s: s.update(normalizer={"type": "NFC"}))
    [note] = described(tokenizer).notes
    assert "NFC" in note


def test_gguf_ordinary_added_tokens_are_user_defined() -> None:
    tokenizer = changed(tiny("tokenizer.json"), lambda s: s["added_tokens"].append(_added("xyz")))
    found = described(tokenizer)
    assert found.types[found.tokens.index("xyz")] == USER_DEFINED


def _added(content: str, **changes: bool) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return {"id": 900, "content": content, **flags, **changes}


def _split(state: dict[str, Any], **changes: Any) -> None:
    state["pre_tokenizer"]["pretokenizers"][0].update(changes)


def _model(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda state: state["model"].update(changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: _split(s, pattern={"Regex": r"\w+"}), r"by the pattern .*; supported are"),
        (lambda s: _split(s, behavior="Removed"), "it splits texts by .*Removed"),
        (lambda s: _split(s, invert=True), "it splits texts by"),
        (lambda s: s.update(pre_tokenizer=None), "neither byte-level BPE without a leading space"),
        (
            lambda s: s["pre_tokenizer"]["pretokenizers"][1].update(add_prefix_space=True),
            "neither byte-level BPE without a leading space",
        ),
        (
            lambda s: s["pre_tokenizer"]["pretokenizers"][1].update(use_regex=True),
            "by the pattern .* and ",
        ),
        (lambda s: s.update(normalizer={"type": "Lowercase"}), 'its normalizer is {"type": "Low'),
        (_model(dropout=0.5), "its BPE has dropout 0.5"),
        (_model(merges=[]), "it has no merges"),
        (lambda s: s["added_tokens"].append(_added("x", lstrip=True)), "'x' strips white space"),
        (
            lambda s: s["added_tokens"].append(_added("[PAD700]", special=True)),
            r"called \[PAD\.\.\] like",
        ),
    ],
)
def test_gguf_byte_level_tokenizer_unsupported_by_llama_cpp_raises(
    change: Callable[[dict[str, Any]], object], message: str
) -> None:
    with pytest.raises(TokenizerError, match=f"can't be converted to GGUF.*{message}"):
        describe_tokenizer(changed(tiny("tokenizer.json"), change), 1000)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda s: s["model"]["merges"].pop(),
            ("'.*' and '.*' form a token, but are not a merge"),
        ),
        (
            lambda s: s["model"]["merges"].append(s["model"]["merges"].pop(2)),
            "merges into '.*' and '.*' are interleaved",
        ),
        (lambda s: s.update(pre_tokenizer={"type": "Whitespace"}), "does not convert spaces to ▁"),
        (lambda s: s["normalizer"]["normalizers"].reverse(), "does not convert spaces to ▁"),
        (
            lambda s: s["model"]["vocab"].update({"<0xZZ>": s["model"]["vocab"].pop("<0x41>")}),
            "without all 256 byte tokens",
        ),
    ],
)
def test_gguf_sentencepiece_tokenizer_unsupported_by_llama_cpp_raises(
    change: Callable[[dict[str, Any]], object], message: str
) -> None:
    with pytest.raises(TokenizerError, match=f"can't be converted to GGUF.*{message}"):
        described(changed(tiny("pieces"), change))


def test_gguf_token_not_reached_by_merges_raises() -> None:
    def unreachable(state: dict[str, Any]) -> None:
        state["model"]["ignore_merges"] = True
        state["model"]["vocab"]["zq"] = len(state["model"]["vocab"])

    with pytest.raises(TokenizerError, match="merges do not produce its token 'zq'"):
        described(changed(tiny("tokenizer.json"), unreachable))


def test_gguf_tokenizer_model_other_than_bpe_raises() -> None:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({END_OF_TEXT: 0, "a": 1}, END_OF_TEXT))
    with pytest.raises(TokenizerError, match="its model is WordLevel, not BPE"):
        described(Tokenizer(words, eos_token=END_OF_TEXT))


def test_gguf_tokenizer_without_document_separator_raises() -> None:
    with pytest.raises(TokenizerError, match="neither bos_token nor eos_token"):
        described(Tokenizer(tiny("tokenizer.json").backend))


def metadata(described: GGUFTokenizer) -> dict[str, Any]:
    """Return the entries of a GGUF file with this tokenizer."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(None, "llama")
    _add_tokenizer(writer, described)
    entries = {key: entry.value for key, entry in writer.kv_data[0].items()}
    return {key: [*v] if isinstance(v, tuple) else v for key, v in entries.items()}


def gemma_like() -> Tokenizer:
    """Return a tokenizer like Gemma's: no space before a text, and runs of spaces and newlines
    split off first.
    """

    def change(state: dict[str, Any]) -> None:
        state["normalizer"] = _REPLACE
        state["decoder"]["decoders"].pop()  # which removes the space before a text
        split = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious"}
        state["pre_tokenizer"] = {**split, "invert": False}
        vocabulary, merges = state["model"]["vocab"], state["model"]["merges"]
        for token in ("\n\n", "<table>"):
            vocabulary[token] = len(vocabulary)
        merges.sort(key=lambda pair: set("".join(pair)) != {"▁"})
        for token in ("▁▁", "▁▁▁▁", "\n\n", "<table>"):
            state["added_tokens"].append({**_added(token), "id": vocabulary[token]})

    return changed(tiny("pieces"), change)


@pytest.mark.parametrize("kind", [*KINDS, "gemma"])
@given(text=TEXTS)
def test_gguf_tokenizer_read_back_gives_same_ids(kind: str, text: str) -> None:
    tokenizer = _tokenizers()[kind]
    found = _read_back()[kind]
    # The character that represents a space in tokens is not a space in the text.
    text = text.replace("▁", "") if kind == "gemma" else text
    for sample in (text, text.replace("a", "  "), f"{text}\n\n<table>     {text}"):
        assert found.encode(sample) == tokenizer.encode(sample)
        assert found.decode(found.encode(sample)) == tokenizer.decode(tokenizer.encode(sample))


@functools.cache
def _tokenizers() -> dict[str, Tokenizer]:
    return {"gemma": gemma_like()} | {kind: tiny(kind) for kind in KINDS}


@functools.cache
def _read_back() -> dict[str, Tokenizer]:
    found = {kind: read_tokenizer(metadata(described(own))) for kind, own in _tokenizers().items()}
    return {kind: own for kind, own in found.items() if own is not None}


@pytest.mark.parametrize("kind", [*KINDS, "gemma"])
def test_gguf_tokenizer_read_back_has_same_special_tokens(kind: str) -> None:
    own, found = _tokenizers()[kind], _read_back()[kind]
    assert found.special_tokens == own.special_tokens
    assert found.bos_token_id == own.separator_id
    assert (found.eos_token, found.add_bos) == (own.eos_token, own.add_bos)
    assert found.vocab_size == own.vocab_size
    assert found.backend.encode("a").ids == found.encode_prompt("a")


def test_gguf_tokenizer_read_back_has_template_and_padding() -> None:
    entries = metadata(described(tiny("pieces")))
    template = "{{ messages }}"
    entries |= {"tokenizer.chat_template": template, "tokenizer.ggml.padding_token_id": 2}
    found = read_tokenizer(entries)
    assert found is not None
    assert found.chat_template == template
    assert found.named_tokens == {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "pad_token": "</s>",
    }


def test_gguf_padding_token_is_written_and_ordinary_one_stays_ordinary() -> None:
    own = tiny("tokenizer.json")
    token = own.backend.id_to_token(own.encode("a")[0])
    own.config["pad_token"] = token
    found = read_tokenizer(metadata(described(own)))
    assert found is not None
    assert found.named_tokens["pad_token"] == token
    assert token not in found.special_tokens
    assert found.encode("the light and a day") == own.encode("the light and a day")


def test_gguf_ids_without_token_stay_without_token() -> None:
    own = tiny("tokenizer.json")
    found = read_tokenizer(metadata(describe_tokenizer(own, own.vocab_size + 5)))
    assert found is not None
    assert found.vocab_size == own.vocab_size


def test_gguf_file_without_vocabulary_has_no_tokenizer() -> None:
    assert read_tokenizer({"tokenizer.ggml.model": "none"}) is None
    assert read_tokenizer({}) is None


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("pieces", {"model": "bert"}, "of the kind 'bert' are not supported"),
        ("pieces", {"tokens": None}, "token types do not match its tokens"),
        ("pieces", {"token_type": [1, 2]}, "token types do not match its tokens"),
        ("pieces", {"scores": [0.0]}, "scores do not match its tokens"),
        ("pieces", {"scores": ["x"] * 276}, "scores do not match its tokens"),
        ("tokenizer.json", {"pre": "kimi-k2"}, "by 'kimi-k2', which is not supported"),
        ("tokenizer.json", {"merges": ["zq"]}, "its merges are invalid"),
        ("tokenizer.json", {"merges": ["Zz Qq"]}, "its merges are invalid"),
        ("tokenizer.json", {"tokens": [7], "token_type": [1]}, "token 0 is not a string"),
    ],
)
def test_gguf_damaged_vocabulary_raises_tokenizer_error(
    kind: str, changes: dict[str, Any], message: str
) -> None:
    entries = metadata(described(tiny(kind)))
    entries |= {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    with pytest.raises(TokenizerError, match=message):
        read_tokenizer(entries)


def test_gguf_pre_tokenizer_names_are_unique() -> None:
    names = [name for one in PRE_TOKENIZERS for name in one.names.split()]
    assert len(set(names)) == len(names)


_O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
_DIGITS = {"type": "Digits", "individual_digits": True}


def _isolated(pattern: str, **changes: Any) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    return {**split, "invert": False, **changes}


#: Pre-tokenizers of published tokenizers (SmolLM2, gpt-oss, tokenizers made from tiktoken's files,
#: DeepSeek-V3, DeepSeek-Coder, Granite 4, BLOOM) -> their name in llama.cpp.
_PUBLISHED = {
    "smollm": [_DIGITS, {**_BYTES, "use_regex": True}],
    "gpt-4o": [_isolated(_O200K), _BYTES],
    "gpt-4o, removed": [_isolated(_O200K, behavior="Removed", invert=True), _BYTES],
    "deepseek-v3": [
        _isolated(r"\p{N}{1,3}"),
        _isolated("[一-龥\u3040-ゟ゠-ヿ]+"),
        _isolated(
            "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|"
            "[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|"
            "\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
        ),
        _BYTES,
    ],
    "deepseek-coder": [
        _isolated("[\r\n]"),
        _isolated(r"\s?\p{L}+"),
        _isolated(r"\s?\p{P}+"),
        _isolated("[一-龥ࠀ-一가-\ud7ff]+"),
        _DIGITS,
        _BYTES,
    ],
    "dbrx": [
        _isolated(
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}|"
            r" ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
        ),
        _BYTES,
    ],
    "bloom": [_isolated(r" ?[^(\s|[.,!?…。，、।۔،])]+"), _BYTES],
}


@pytest.mark.parametrize("name", _PUBLISHED)
def test_gguf_published_pre_tokenizer_has_its_name(name: str) -> None:
    steps = {"type": "Sequence", "pretokenizers": _PUBLISHED[name]}
    found = described(changed(tiny("tokenizer.json"), lambda s: s.update(pre_tokenizer=steps)))
    assert found.pre == name.partition(",")[0]
    assert ("combining marks" in " ".join(found.notes)) == (found.pre == "gpt-4o")


def test_gguf_late_merged_space_runs_raise_tokenizer_error() -> None:
    late = changed(gemma_like(), lambda s: s["model"]["merges"].reverse())
    with pytest.raises(TokenizerError, match="runs of spaces do not come before all others"):
        described(late)

"""Tokenizers in GGUF's terms: what llama.cpp is told, and what it can't be told."""

from __future__ import annotations

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
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    GGUFTokenizer,
    describe_tokenizer,
)
from tokenizer_files import KINDS, TEXTS, tiny

_PREPEND = {"type": "Prepend", "prepend": "▁"}
_REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}


def changed(tokenizer: Tokenizer, change: Callable[[dict[str, Any]], object]) -> Tokenizer:
    """The tokenizer with its tokenizer.json changed."""
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
def test_every_token_has_its_id_and_its_type(kind: str) -> None:
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


def test_byte_level_tokenizers_are_told_by_their_merges_and_split() -> None:
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
def test_trained_tokenizers_have_the_name_of_their_split(
    pattern: str, name: str, texts: list[str]
) -> None:
    assert described(train_tokenizer(texts, 400, pattern=pattern)).pre == name


def spm_ids(described: GGUFTokenizer, text: str) -> list[int]:
    """llama.cpp's "llama" tokenizer, written down: join the best-scored neighbours, leftmost
    first, until none makes a token; what then is no token becomes its bytes."""
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
def test_scores_lead_llama_cpp_to_the_same_ids(text: str) -> None:
    tokenizer = tiny("pieces")
    found = described(tokenizer)
    assert (found.model, found.pre, found.merges) == ("llama", "default", None)
    assert spm_ids(found, text) == tokenizer.encode(text)


def test_pieces_have_the_types_of_their_kind() -> None:
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
def test_the_space_before_a_text_is_told(
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


def test_unicode_normalisation_is_noted() -> None:
    tokenizer = changed(tiny("tokenizer.json"), lambda s: s.update(normalizer={"type": "NFC"}))
    [note] = described(tokenizer).notes
    assert "NFC" in note


def test_ordinary_added_tokens_are_found_in_texts() -> None:
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
        (lambda s: _split(s, pattern={"Regex": r"\w+"}), r"by the pattern \\w\+; known are those"),
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
        (lambda s: s["added_tokens"].append(_added("x", lstrip=True)), "'x' takes in white space"),
        (
            lambda s: s["added_tokens"].append(_added("[PAD700]", special=True)),
            r"called \[PAD\.\.\] as",
        ),
    ],
)
def test_byte_level_tokenizers_that_llama_cpp_can_not_follow_are_refused(
    change: Callable[[dict[str, Any]], object], message: str
) -> None:
    with pytest.raises(TokenizerError, match=f"can't be put into GGUF.*{message}"):
        describe_tokenizer(changed(tiny("tokenizer.json"), change), 1000)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s["model"]["merges"].pop(), "'.*' and '.*' make a token, but are not a merge"),
        (
            lambda s: s["model"]["merges"].append(s["model"]["merges"].pop(2)),
            "merges into '.*' and '.*' come mixed",
        ),
        (lambda s: s.update(pre_tokenizer={"type": "Whitespace"}), "does not turn spaces into ▁"),
        (lambda s: s["normalizer"]["normalizers"].reverse(), "does not turn spaces into ▁"),
        (
            lambda s: s["model"]["vocab"].update({"<0xZZ>": s["model"]["vocab"].pop("<0x41>")}),
            "without all 256 byte tokens",
        ),
    ],
)
def test_pieces_that_llama_cpp_can_not_follow_are_refused(
    change: Callable[[dict[str, Any]], object], message: str
) -> None:
    with pytest.raises(TokenizerError, match=f"can't be put into GGUF.*{message}"):
        described(changed(tiny("pieces"), change))


def test_a_token_that_its_own_merges_miss_is_refused_where_llama_cpp_looks_it_up() -> None:
    def unreachable(state: dict[str, Any]) -> None:
        state["model"]["ignore_merges"] = True
        state["model"]["vocab"]["zq"] = len(state["model"]["vocab"])

    with pytest.raises(TokenizerError, match="merges do not lead to its token 'zq'"):
        described(changed(tiny("tokenizer.json"), unreachable))


def test_other_models_than_bpe_are_refused() -> None:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({END_OF_TEXT: 0, "a": 1}, END_OF_TEXT))
    with pytest.raises(TokenizerError, match="its model is WordLevel, not BPE"):
        described(Tokenizer(words, eos_token=END_OF_TEXT))


def test_a_tokenizer_that_ends_no_document_is_refused() -> None:
    with pytest.raises(TokenizerError, match="neither bos_token nor eos_token"):
        described(Tokenizer(tiny("tokenizer.json").backend))

"""Tokenizers: their kind is detected from the content, and text is always plain text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors

from firstlight.errors import InputError, TokenizerError
from firstlight.tokenizer import (
    END_OF_TEXT,
    GPT2_PATTERN,
    LLAMA3_PATTERN,
    Tokenizer,
    train_tokenizer,
)
from tokenizer_files import (
    KINDS,
    MERGED,
    RANKED,
    TEXTS,
    TRICKY,
    change_json,
    load_bytes,
    piece_file,
    rank_file,
    tiny,
    write_gpt2_files,
)

# Loading, with the kind detected from the content


@pytest.mark.parametrize("name", ["", "vocab.json", "merges.txt"])
def test_tokenizer_vocab_and_merges_match_hand_computed_ids(tmp_path: Path, name: str) -> None:
    write_gpt2_files(tmp_path)
    loaded = Tokenizer.from_pretrained(tmp_path / name)
    # " abc": a and b merge first, then ab and c; the space has no merge with abc.
    assert loaded.encode("ab ab abc c") == [4, 6, 3, 5, 3, 2]
    assert loaded.decode([4, 6, 3, 5, 3, 2]) == "ab ab abc c"
    assert (loaded.bos_token_id, loaded.eos_token_id, loaded.add_bos) == (7, 7, False)
    assert loaded.vocab_size == 8


def test_tokenizer_merges_with_windows_line_endings_are_equivalent(tmp_path: Path) -> None:
    write_gpt2_files(tmp_path)
    expected = Tokenizer.from_pretrained(tmp_path).fingerprint
    write_gpt2_files(tmp_path, "#version: 0.2\r\na b\r\nab c\r\nĠ ab\r\n".encode())
    assert Tokenizer.from_pretrained(tmp_path).fingerprint == expected


def test_tokenizer_ranks_match_hand_computed_ids() -> None:
    ranks = tiny("ranks")
    # " ab" is merged from the space and "ab"; "the" can't be merged from two tokens, but is a
    # token.
    assert ranks.encode(" ab ab") == [257, 257]
    assert ranks.encode("the") == [258]
    assert ranks.encode("thee") == list(b"thee")
    assert ranks.vocab_size == 256 + len(RANKED) + 256
    assert ranks.bos_token_id == 256 + len(RANKED)
    assert ranks.eos_token_id == ranks.bos_token_id + 1
    assert ranks.add_bos


def test_tokenizer_pieces_match_hand_computed_ids() -> None:
    pieces = tiny("pieces")
    first = 3 + 256
    ids = {text: first + i for i, text in enumerate([*MERGED, *"▁abcdet"])}
    # The best score wins: "▁a" before "ab", "te" before "dte".
    assert pieces.encode("aba") == [ids["▁ab"], ids["a"]]
    assert pieces.encode("aab") == [ids["▁a"], ids["ab"]]
    assert pieces.encode("dte") == [ids["▁"], ids["dte"]]
    assert pieces.encode("é") == [ids["▁"], 3 + 0xC3, 3 + 0xA9]
    assert (pieces.bos_token_id, pieces.eos_token_id, pieces.add_bos) == (1, 2, True)
    assert pieces.vocab_size == first + len(ids)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["tokenizer.model", "any-name.bin"])
def test_tokenizer_file_name_does_not_matter(tmp_path: Path, kind: str, name: str) -> None:
    contents = {
        "tokenizer.json": tiny(kind).backend.to_str().encode(),
        "ranks": rank_file(RANKED),
        "pieces": piece_file(MERGED),
    }
    loaded = load_bytes(tmp_path, contents[kind], name)
    assert loaded.fingerprint == tiny(kind).fingerprint
    if name == "tokenizer.model":
        assert Tokenizer.from_pretrained(str(tmp_path)).fingerprint == tiny(kind).fingerprint


def test_tokenizer_folder_with_several_kinds_uses_tokenizer_json(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    write_gpt2_files(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(rank_file(RANKED))
    assert Tokenizer.from_pretrained(tmp_path).encode("abc") == [5]
    tokenizer.save_pretrained(tmp_path)
    assert Tokenizer.from_pretrained(tmp_path).fingerprint == tokenizer.fingerprint


@pytest.mark.parametrize("kind", KINDS)
def test_tokenizer_saved_and_loaded_is_unchanged(tmp_path: Path, kind: str) -> None:
    before = tiny(kind)
    before.save_pretrained(tmp_path / "saved")
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == [
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    after = Tokenizer.from_pretrained(tmp_path / "saved")
    assert after.fingerprint == before.fingerprint
    assert after.files() == before.files()
    for name in ("bos_token", "eos_token", "bos_token_id", "eos_token_id", "add_bos", "vocab_size"):
        assert getattr(after, name) == getattr(before, name)
    text = "".join(TRICKY)
    assert after.encode(text) == before.encode(text)
    assert after.encode_prompt(text) == before.encode_prompt(text)


def test_tokenizer_additional_config_entries_are_kept(tmp_path: Path, tokenizer: Tokenizer) -> None:
    tokenizer.save_pretrained(tmp_path)
    entries = {"chat_template": "{{ messages }}", "model_max_length": 77, "x": None}
    change_json(tmp_path / "tokenizer_config.json", lambda config: config.update(entries))
    loaded = Tokenizer.from_pretrained(tmp_path)
    loaded.save_pretrained(tmp_path / "again")
    saved = json.loads((tmp_path / "again" / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert saved["chat_template"] == "{{ messages }}"
    assert saved["model_max_length"] == 77
    assert saved["eos_token"] == END_OF_TEXT


@pytest.mark.parametrize(
    "config, bos, eos, add_bos",
    [
        ({}, "<s>", "</s>", True),
        ({"bos_token": "<s>", "eos_token": "<unk>"}, "<s>", "<unk>", True),
        ({"bos_token": {"content": "<s>", "lstrip": False}}, "<s>", "</s>", True),
        ({"bos_token": "<unk>"}, "<unk>", "</s>", False),
        ({"add_bos_token": False}, "<s>", "</s>", False),
        ({"bos_token": None, "eos_token": None}, "<s>", "</s>", True),
    ],
)
def test_tokenizer_config_overrides_post_processor(
    tmp_path: Path,
    config: dict[str, Any],
    bos: str,
    eos: str,
    add_bos: bool,
) -> None:
    (tmp_path / "tokenizer.json").write_text(tiny("pieces").backend.to_str(), encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    loaded = Tokenizer.from_pretrained(tmp_path)
    assert (loaded.bos_token, loaded.eos_token, loaded.add_bos) == (bos, eos, add_bos)


def _with(
    tokenizer: Tokenizer, change: Callable[[tokenizers.Tokenizer], object]
) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    change(backend)
    return backend


def _end_with_end_of_text(backend: tokenizers.Tokenizer) -> None:
    backend.post_processor = processors.TemplateProcessing(
        single=f"$A {END_OF_TEXT}", special_tokens=[(END_OF_TEXT, 0)]
    )


@pytest.mark.parametrize(
    "change",
    [
        _end_with_end_of_text,
        lambda backend: backend.enable_padding(length=4, pad_token=END_OF_TEXT, pad_id=0),
        lambda backend: backend.enable_padding(
            length=4, direction="left", pad_token=END_OF_TEXT, pad_id=0
        ),
    ],
)
def test_tokenizer_end_or_pad_token_is_not_taken_for_bos(
    tmp_path: Path, tokenizer: Tokenizer, change: Callable[[tokenizers.Tokenizer], None]
) -> None:
    loaded = load_bytes(tmp_path, _with(tokenizer, change).to_str().encode(), "tokenizer.json")
    assert (loaded.bos_token, loaded.eos_token, loaded.add_bos) == (None, END_OF_TEXT, False)


def test_tokenizer_end_token_is_not_bos_where_no_letter_is_known(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(models.BPE(vocab={END_OF_TEXT: 0, "日": 1}, merges=[]))
    backend.add_special_tokens([AddedToken(END_OF_TEXT, special=True)])
    _end_with_end_of_text(backend)
    loaded = load_bytes(tmp_path, backend.to_str().encode(), "tokenizer.json")
    assert (loaded.bos_token, loaded.eos_token, loaded.add_bos) == (None, END_OF_TEXT, False)
    assert loaded.encode_prompt("日") == [1]


def test_tokenizer_json_truncation_and_padding_are_ignored(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    def limit(backend: tokenizers.Tokenizer) -> None:
        backend.enable_truncation(max_length=3)
        backend.enable_padding(length=4096, pad_token=END_OF_TEXT, pad_id=0)

    content = _with(tokenizer, limit).to_str()
    assert json.loads(content)["truncation"]["max_length"] == 3
    loaded = load_bytes(tmp_path, content.encode(), "tokenizer.json")
    text = "the light falls over a stone " * 50
    assert loaded.encode(text) == tokenizer.encode(text)
    assert loaded.encode_batch([text, "a"]) == [tokenizer.encode(text), tokenizer.encode("a")]
    assert json.loads(loaded.files()["tokenizer.json"])["truncation"] is None
    assert Tokenizer(tokenizers.Tokenizer.from_str(content)).encode(text) == tokenizer.encode(text)


def test_vocab_size_reaches_highest_id(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "b": 41}, merges=[]))
    assert Tokenizer(backend).vocab_size == 42
    backend.add_special_tokens([AddedToken("<x>", special=True)])
    assert Tokenizer(backend).vocab_size == 42


# Text is plain text and survives a round trip


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS)
def test_tokenizer_decodes_encoded_text_unchanged(kind: str, text: str) -> None:
    if kind == "pieces":
        text = text.replace("▁", " ")  # sentencepiece's symbol for a space
    ids = tiny(kind).encode(text)
    assert tiny(kind).decode(ids) == text
    assert tiny(kind).encode_batch([text, "a", text]) == [ids, tiny(kind).encode("a"), ids]
    assert not tiny(kind).special_token_ids & set(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_encode_special_tokens_written_in_text_stay_text(tmp_path: Path, kind: str) -> None:
    tiny(kind).save_pretrained(tmp_path)
    for tokenizer in (tiny(kind), Tokenizer.from_pretrained(tmp_path)):
        special = [tokenizer.backend.id_to_token(i) for i in tokenizer.special_token_ids]
        assert special
        for token in special:
            text = f"a{token} b"
            ids = tokenizer.encode(text)
            assert not set(ids) & tokenizer.special_token_ids
            assert tokenizer.decode(ids) == text
            assert tokenizer.encode_batch([text]) == [ids]


@pytest.mark.parametrize("kind", KINDS)
def test_decode_omits_control_tokens(kind: str) -> None:
    tokenizer = tiny(kind)
    assert tokenizer.eos_token_id is not None
    ids = tokenizer.encode("the ab")
    assert tokenizer.decode([tokenizer.separator_id, *ids, tokenizer.eos_token_id]) == "the ab"


@pytest.mark.parametrize("text, place", [("\ud800", 0), ("ab\udcff", 2)])
def test_encode_non_unicode_text_raises_input_error(
    tokenizer: Tokenizer, text: str, place: int
) -> None:
    message = f"the text is not valid Unicode at character {place}: "
    with pytest.raises(InputError, match=message):
        tokenizer.encode(text)
    with pytest.raises(InputError, match=message):
        tokenizer.encode_batch(["fine", text])
    with pytest.raises(InputError, match=message):
        train_tokenizer([text], 300)


def test_encode_prompt_begins_like_a_document() -> None:
    byte_level, ranks = tiny("tokenizer.json"), tiny("ranks")
    assert byte_level.encode_prompt("the") == byte_level.encode("the")
    assert byte_level.encode_prompt("") == [byte_level.eos_token_id]
    assert ranks.encode_prompt("the") == [ranks.bos_token_id, *ranks.encode("the")]
    assert ranks.encode_prompt("") == [ranks.bos_token_id]


def test_encode_prompt_empty_without_bos_and_eos_raises_with_advice() -> None:
    bare = Tokenizer(tokenizers.Tokenizer(models.BPE(vocab={"a": 0}, merges=[])))
    assert bare.encode_prompt("a") == [0]
    with pytest.raises(TokenizerError, match=r"neither bos_token nor eos_token: set one"):
        bare.encode_prompt("")


# The fingerprint


def test_fingerprint_depends_on_everything_that_decides_ids() -> None:
    tokenizer = tiny("tokenizer.json")
    assert len({tiny(kind).fingerprint for kind in KINDS}) == len(KINDS)
    state = json.loads(tokenizer.backend.to_str())

    def fingerprint(**changes: Any) -> str:
        backend = tokenizers.Tokenizer.from_str(json.dumps(state | changes))
        return Tokenizer(backend).fingerprint

    assert fingerprint() == tokenizer.fingerprint
    assert fingerprint(decoder=None) == tokenizer.fingerprint
    vocabulary = state["model"]["vocab"]
    swapped = vocabulary | {"a": vocabulary["b"], "b": vocabulary["a"]}
    assert fingerprint(normalizer={"type": "Lowercase"}) != tokenizer.fingerprint
    assert fingerprint(pre_tokenizer=None) != tokenizer.fingerprint
    assert fingerprint(model=state["model"] | {"vocab": swapped}) != tokenizer.fingerprint


# Positions where long documents may be split


def _byte_level(*steps: Any, normalizer: Any = None) -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(list(steps))
    if normalizer is not None:
        backend.normalizer = normalizer
    return Tokenizer(backend)


def _split(pattern: str, behavior: str = "isolated", *, invert: bool = False) -> Any:
    return pre_tokenizers.Split(Regex(pattern), behavior=behavior, invert=invert)


def _bytes_only(**arguments: Any) -> Any:
    return pre_tokenizers.ByteLevel(**{"add_prefix_space": False, "use_regex": False} | arguments)


@pytest.mark.parametrize(
    "steps, allowed",
    [
        ([_split(GPT2_PATTERN), _bytes_only()], True),
        ([_split(LLAMA3_PATTERN), _bytes_only()], True),
        ([_bytes_only(use_regex=True)], True),
        ([_split(LLAMA3_PATTERN), _bytes_only(use_regex=True)], True),
        ([_bytes_only()], False),
        ([_bytes_only(use_regex=True, add_prefix_space=True)], False),
        ([_split(r"\s+"), _bytes_only()], False),
        ([_split(GPT2_PATTERN), _split(r"\w+"), _bytes_only()], False),
        ([_split(GPT2_PATTERN, "merged_with_next"), _bytes_only()], False),
        ([_split(GPT2_PATTERN, invert=True), _bytes_only()], False),
        ([_bytes_only(), _split(GPT2_PATTERN)], False),
        ([_split(GPT2_PATTERN)], False),
        ([pre_tokenizers.Digits(), _split(GPT2_PATTERN), _bytes_only()], False),
        ([pre_tokenizers.Whitespace()], False),
    ],
)
def test_encodes_in_pieces_only_with_known_splits(steps: list[Any], allowed: bool) -> None:
    assert _byte_level(*steps).encodes_in_pieces is allowed
    changed = _byte_level(*steps, normalizer=normalizers.NFC())
    assert not changed.encodes_in_pieces


def test_encodes_in_pieces_is_false_for_other_models_and_added_words() -> None:
    assert tiny("tokenizer.json").encodes_in_pieces
    assert tiny("ranks").encodes_in_pieces
    assert not tiny("pieces").encodes_in_pieces
    added = _with(tiny("ranks"), lambda backend: backend.add_tokens([AddedToken("a\nb")]))
    assert not Tokenizer(added).encodes_in_pieces
    assert not Tokenizer(tokenizers.Tokenizer(models.BPE())).encodes_in_pieces


def test_encode_long_text_equals_tokens_of_its_parts() -> None:
    """Another function of the library encodes it."""
    text = "the light falls\n" * 1100
    assert len(text) > 2**14
    tokenizer = tiny("tokenizer.json")
    assert tokenizer.encode(text) == tokenizer.encoding(text).ids

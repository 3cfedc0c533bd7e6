"""Streamed text never contains incomplete characters and is complete at the end."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import tokenizers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from firstlight.tokenizer import (
    TextStream,
    Tokenizer,
)
from tokenizer_files import (
    KINDS,
    TEXTS,
    tiny,
)


def stream(tokenizer: Tokenizer, ids: Sequence[int], prompt_ids: Sequence[int] = ()) -> list[str]:
    text_stream = TextStream(tokenizer, prompt_ids)
    return [*(text_stream.push(token_id) for token_id in ids), text_stream.finish()]


def _word_piece() -> Tokenizer:
    vocabulary = {token: i for i, token in enumerate(["[UNK]", "a", "##b", "c", "##c", "."])}
    backend = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece(cleanup=False)
    return Tokenizer(backend)


def _end_of_word() -> Tokenizer:
    vocabulary = {token: i for i, token in enumerate(["a", "b", "a</w>", "b</w>", "ab</w>"])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.decoder = decoders.BPEDecoder(suffix="</w>")
    return Tokenizer(backend)


def _draw_ids(data: st.DataObject, tokenizer: Tokenizer) -> list[int]:
    """Draw ids that a model could generate: texts, incomplete characters, and random ids."""
    any_id = st.integers(0, tokenizer.vocab_size - 1)
    of_bytes = st.sampled_from(sorted(tokenizer.byte_token_ids) or [0])
    of_text = TEXTS.map(tokenizer.encode).filter(len)
    half = st.tuples(of_text, st.integers(0, 9)).map(lambda pair: pair[0][pair[1] :])
    parts = st.lists(any_id.map(lambda i: [i]) | of_bytes.map(lambda i: [i]) | half, max_size=8)
    return [token_id for part in data.draw(parts) for token_id in part]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=50)
@given(data=st.data())
def test_text_stream_pieces_join_to_whole_text(kind: str, data: st.DataObject) -> None:
    tokenizer = tiny(kind)
    ids = _draw_ids(data, tokenizer)
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("tokenizer", [_word_piece(), _end_of_word()], ids=["##", "</w>"])
@given(data=st.data())
def test_text_stream_supports_decoders_that_join_words(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=12))
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=50)
@given(data=st.data())
def test_text_stream_continues_any_prompt(kind: str, data: st.DataObject) -> None:
    tokenizer = tiny(kind)
    prompt, ids = _draw_ids(data, tokenizer), _draw_ids(data, tokenizer)
    before, whole = tokenizer.decode(prompt), tokenizer.decode([*prompt, *ids])
    assume(whole.startswith(before))  # unless the prompt ends inside a character
    assert before + "".join(stream(tokenizer, ids, prompt)) == whole


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40)
@given(prompt=TEXTS, text=TEXTS)
def test_text_stream_continuation_equals_text_after_prompt(
    kind: str, prompt: str, text: str
) -> None:
    tokenizer = tiny(kind)
    whole = tokenizer.encode(prompt + text)
    for cut in range(len(whole)):
        before = tokenizer.decode(whole[:cut])
        if not (prompt + text).replace("▁", " ").startswith(before):
            continue  # the split is inside a character
        pieces = stream(tokenizer, whole[cut:], [tokenizer.separator_id, *whole[:cut]])
        assert before + "".join(pieces) == tokenizer.decode(whole)


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS.filter(lambda text: "\ufffd" not in text))
def test_text_stream_piece_never_holds_half_a_character(kind: str, text: str) -> None:
    tokenizer = tiny(kind)
    assert "\ufffd" not in "".join(stream(tokenizer, tokenizer.encode(text)))


@pytest.mark.parametrize("kind", KINDS)
def test_text_stream_does_not_hold_back_whole_words(kind: str) -> None:
    tokenizer = tiny(kind)
    *pieces, rest = stream(tokenizer, tokenizer.encode(" ab ab cc\n\nab"))
    if kind == "pieces":  # the newlines are bytes, which wait for the next token
        assert pieces[:3] == ["", " ab", " ab"]
    else:
        assert all(pieces)
    assert rest == ""


def test_text_stream_shows_emoji_with_its_last_byte() -> None:
    ranks = tiny("ranks")
    assert ranks.encode("🙂a") == [263, 0x99, 0x82, 0x61]
    assert stream(ranks, [263, 0x99, 0x82, 0x61]) == ["", "", "🙂", "a", ""]
    assert stream(ranks, [263, 264]) == ["", "🙂a", ""]
    assert stream(ranks, [263]) == ["", "\ufffd"]
    assert stream(ranks, [263, 0x61]) == ["", "\ufffda", ""]


def test_text_stream_special_token_keeps_following_space() -> None:
    tokenizer = tiny("pieces")
    ab = tokenizer.encode("ab")
    assert tokenizer.decode([*ab, 2, 1, *ab]) == "ab ab"
    assert stream(tokenizer, ab, [*ab, 2, 1]) == [" ab", ""]
    assert stream(tokenizer, [2, 1, *ab], ab) == ["", "", " ab", ""]
    assert stream(tokenizer, ab, [1]) == ["ab", ""]


def test_text_stream_omits_special_tokens() -> None:
    tokenizer = tiny("tokenizer.json")
    the = tokenizer.encode("the")
    assert "".join(stream(tokenizer, [0, *the, 0, *the, 0])) == "thethe"


def test_text_stream_keeps_few_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tiny("tokenizer.json")
    ids = tokenizer.encode("the light falls\n" * 100)
    longest = 0
    decode = tokenizer.decode

    def measured(ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(ids)

    text_stream = TextStream(tokenizer, ids)
    monkeypatch.setattr(tokenizer, "decode", measured)
    for token_id in ids:
        text_stream.push(token_id)
    assert longest <= 8

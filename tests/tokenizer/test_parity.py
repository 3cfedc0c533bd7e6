"""The same ids as the libraries for which the tokenizer files were written."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tiktoken
from hypothesis import given
from hypothesis import strategies as st

from firstlight.tokenizer import (
    LLAMA3_PATTERN,
    Tokenizer,
)
from tokenizer_files import (
    KINDS,
    TEXTS,
    load_bytes,
    piece_file,
    rank_file,
    tiny,
)

_SMALL_VOCABULARIES = st.lists(
    st.text("abc ", min_size=2, max_size=5), min_size=1, max_size=12, unique=True
)


@given(
    vocabulary=_SMALL_VOCABULARIES,
    texts=st.lists(st.text("aabbc \né", max_size=30), min_size=1, max_size=5),
)
def test_ranks_give_same_ids_as_tiktoken(
    tmp_path_factory: pytest.TempPathFactory, vocabulary: list[str], texts: list[str]
) -> None:
    tokens = [token.encode() for token in vocabulary]
    ours = load_bytes(tmp_path_factory.getbasetemp(), rank_file(tokens), "any.ranks")
    ranks = {bytes([byte]): byte for byte in range(256)}
    ranks |= {token: 256 + i for i, token in enumerate(tokens)}
    theirs = tiktoken.Encoding(
        "tiny", pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens={}
    )
    for text in texts:
        assert ours.encode(text) == theirs.encode_ordinary(text)


@given(
    vocabulary=_SMALL_VOCABULARIES,
    texts=st.lists(st.text("aabbc \né▁\x00", max_size=30), min_size=1, max_size=5),
)
def test_pieces_give_same_ids_and_text_as_sentencepiece(
    tmp_path_factory: pytest.TempPathFactory, vocabulary: list[str], texts: list[str]
) -> None:
    pieces = [token.replace(" ", "▁") for token in vocabulary]
    content = piece_file(pieces, alphabet="▁abc")
    ours = load_bytes(tmp_path_factory.getbasetemp(), content, "any.pieces")
    theirs = sentencepiece.SentencePieceProcessor(model_proto=content)
    for text in texts:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids)


@pytest.fixture(scope="module")
def real_llama3(shared: Path) -> tuple[Tokenizer, tiktoken.Encoding]:
    path = shared / "models" / "llama3-tokenizer" / "tokenizer.model"
    lines = path.read_bytes().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, lines)}
    encoding = tiktoken.Encoding(
        "llama3", pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens={}
    )
    return Tokenizer.from_pretrained(path), encoding


@pytest.fixture(scope="module")
def real_llama2(shared: Path) -> tuple[Tokenizer, sentencepiece.SentencePieceProcessor]:
    path = shared / "models" / "llama2-tokenizer" / "tokenizer.model"
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(path))
    return Tokenizer.from_pretrained(path), theirs


@pytest.fixture(scope="module")
def real_gpt2(shared: Path) -> tuple[Tokenizer, Any]:
    folder = shared / "models" / "gpt2-tokenizer"
    from transformers import GPT2Tokenizer

    theirs = GPT2Tokenizer.from_pretrained(str(folder))
    return Tokenizer.from_pretrained(folder), theirs


@given(text=TEXTS)
def test_llama3_tokenizer_gives_same_ids_as_tiktoken(
    real_llama3: tuple[Tokenizer, tiktoken.Encoding], text: str
) -> None:
    ours, theirs = real_llama3
    ids = theirs.encode_ordinary(text)
    assert ours.encode(text) == ids
    assert ours.decode(ids) == text


def test_gpt2_special_tokens_in_text_give_same_ids_as_tiktoken(
    real_gpt2: tuple[Tokenizer, Any],
) -> None:
    """The ids that tiktoken gives for this text with `allowed_special={"<|endoftext|>"}`."""
    text = "Hello, do you like tea? <|endoftext|> In the sunlit terraces of someunknownPlace."
    ids = [15496, 11, 466, 345, 588, 8887, 30, 220, 50256, 554, 262, 4252, 18250, 8812, 2114]
    ids += [286, 617, 34680, 27271, 13]
    tokenizer = real_gpt2[0]
    assert tokenizer.encode(text, special_tokens=True) == ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.decode(ids) == text.replace("<|endoftext|>", "")


@given(text=TEXTS)
def test_llama2_tokenizer_gives_same_ids_as_sentencepiece(
    real_llama2: tuple[Tokenizer, sentencepiece.SentencePieceProcessor], text: str
) -> None:
    ours, theirs = real_llama2
    ids = theirs.encode(text)
    assert ours.encode(text) == ids
    assert ours.decode(ids) == theirs.decode(ids)


@given(text=TEXTS)
def test_gpt2_tokenizer_gives_same_ids_as_transformers(
    real_gpt2: tuple[Tokenizer, Any], text: str
) -> None:
    ours, theirs = real_gpt2
    ids = theirs(text, split_special_tokens=True)["input_ids"]
    assert ours.encode(text) == ids
    assert ours.decode(ids) == text


def test_published_tokenizers_have_published_special_token_ids(
    real_llama3: tuple[Tokenizer, tiktoken.Encoding],
    real_llama2: tuple[Tokenizer, sentencepiece.SentencePieceProcessor],
    real_gpt2: tuple[Tokenizer, Any],
) -> None:
    llama3, llama2, gpt2 = real_llama3[0], real_llama2[0], real_gpt2[0]
    assert (llama3.vocab_size, llama3.bos_token_id, llama3.eos_token_id) == (128256, 128000, 128001)
    assert llama3.backend.token_to_id("<|eot_id|>") == 128009
    assert llama3.backend.token_to_id("<|reserved_special_token_246|>") is not None
    assert (llama2.vocab_size, llama2.bos_token_id, llama2.eos_token_id) == (32000, 1, 2)
    assert (gpt2.vocab_size, gpt2.bos_token_id, gpt2.eos_token_id) == (50257, 50256, 50256)
    assert gpt2.encode("Hello world") == [15496, 995]


@pytest.mark.parametrize("kind", KINDS)
def test_saved_tokenizer_is_read_by_transformers(tmp_path: Path, kind: str) -> None:
    from transformers import AutoTokenizer

    ours = tiny(kind)
    ours.save_pretrained(tmp_path)
    theirs = AutoTokenizer.from_pretrained(str(tmp_path))
    text = "the light\n\n  falls, ab abc <|eot_id|>é 日本 🙂 dte"
    ids = ours.encode(text)
    assert theirs(text, add_special_tokens=False, split_special_tokens=True)["input_ids"] == ids
    assert theirs.decode(ids, skip_special_tokens=True) == ours.decode(ids)
    assert theirs.eos_token_id == ours.eos_token_id
    assert theirs.bos_token_id == ours.bos_token_id
    assert theirs("ab")["input_ids"] == ours.encode_prompt("ab")

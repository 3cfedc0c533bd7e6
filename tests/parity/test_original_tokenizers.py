"""The same ids as the original libraries: texts, random Unicode, and every special token."""

from __future__ import annotations

import base64
import json
import random
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
import sentencepiece
import tiktoken

from builders import slow_but
from firstlight.tokenizer import (
    END_OF_TEXT,
    GPT2_PATTERN,
    LLAMA3_PATTERN,
    Tokenizer,
    train_tokenizer,
)

KINDS = ("llama3", "llama2", "gpt2", "gpt2 ranks")

Encode = Callable[[str], list[int]]


def byte_of_letter() -> dict[str, int]:
    """Invert GPT-2's `bytes_to_unicode`, in which printable bytes represent themselves."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(256 + number): byte for number, byte in enumerate(others)}


def gpt2_ranks(folder: Path) -> dict[bytes, int]:
    vocabulary = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    del vocabulary[END_OF_TEXT]
    byte = byte_of_letter()
    return {bytes(byte[letter] for letter in token): i for token, i in vocabulary.items()}


def llama3_ranks(path: Path) -> dict[bytes, int]:
    lines = path.read_bytes().splitlines()
    return {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, lines)}


def tiktoken_encoding(ranks: dict[bytes, int], pattern: str) -> Encode:
    encoding = tiktoken.Encoding("x", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    encode: Encode = encoding.encode_ordinary
    return encode


def pair(models: Path, kind: str, folder: Path) -> tuple[Tokenizer, Encode]:
    """Return our tokenizer, and the encoder of the original library for the same file."""
    if kind == "llama3":
        path = models / "llama3-tokenizer" / "tokenizer.model"
        return Tokenizer.from_pretrained(path), tiktoken_encoding(
            llama3_ranks(path), LLAMA3_PATTERN
        )
    if kind == "llama2":
        path = models / "llama2-tokenizer" / "tokenizer.model"
        processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
        return Tokenizer.from_pretrained(path), processor.encode
    ranks = gpt2_ranks(models / "gpt2-tokenizer")
    theirs = tiktoken_encoding(ranks, GPT2_PATTERN)
    if kind == "gpt2":
        return Tokenizer.from_pretrained(models / "gpt2-tokenizer"), theirs
    # In the format of openaipublic's r50k_base.tiktoken.
    lines = [b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in ranks.items()]
    (folder / "r50k_base.tiktoken").write_bytes(b"".join(lines))
    return Tokenizer.from_pretrained(folder), theirs


@pytest.fixture(scope="module", params=KINDS)
def both(
    request: pytest.FixtureRequest, shared: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, Encode]:
    return pair(shared / "models", request.param, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("characters", slow_but([200_000], [200_000, 1_000_000]))
def test_tokenizer_whole_texts_match_original_ids(
    characters: int, both: tuple[Tokenizer, Encode], shared: Path
) -> None:
    ours, theirs = both
    text = (shared / "data" / "wikitext2-valid.txt").read_text(encoding="utf-8")[:characters]
    assert len(text) == characters
    ids = theirs(text)
    assert ours.encode(text) == ids
    assert ours.decode(ids) == text


def random_strings(count: int, seed: int) -> list[str]:
    """Return strings from every plane, of neighbouring characters, and of characters that
    tokenizers treat specially.
    """
    generator = random.Random(seed)
    tricky = (
        " \t\n\r\u00a0\u2028\u3000'’\"sStTdDmMlLrRvVeE0123456789.,-_=()<>|/▁Ġ\u0301\u200d\ufeff"
    )

    def character() -> str:
        kind = generator.random()
        if kind < 0.4:
            return generator.choice(tricky)
        if kind < 0.6:
            return chr(generator.randrange(0x20, 0x250))
        top = 0x3000 if kind < 0.8 else 0x110000
        return chr(generator.randrange(top))

    strings = []
    for _ in range(count):
        text = "".join(character() for _ in range(generator.randrange(40)))
        strings.append("".join(c for c in text if unicodedata.category(c) != "Cs"))
    return strings


def test_tokenizer_ten_thousand_random_strings_match_original_ids(
    both: tuple[Tokenizer, Encode],
) -> None:
    ours, theirs = both
    strings = random_strings(10_000, seed=20_000)
    got = ours.encode_batch(strings)
    different = [text for text, ids in zip(strings, got, strict=True) if ids != theirs(text)]
    assert different == []


@pytest.mark.slow
def test_tokenizer_every_character_matches_original_ids(both: tuple[Tokenizer, Encode]) -> None:
    """The libraries were built with Unicode tables of different years."""
    ours, theirs = both
    characters = (chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000)
    texts = [f"a{c}b {c}{c}1 '{c}" for c in characters]
    for start in range(0, len(texts), 50_000):
        part = texts[start : start + 50_000]
        assert ours.encode_batch(part) == [theirs(text) for text in part]


def test_tokenizer_special_token_is_plain_text_by_default(
    both: tuple[Tokenizer, Encode],
) -> None:
    ours, theirs = both
    assert len(ours.special_tokens) in (256, 3, 1)
    for token, token_id in ours.special_tokens.items():
        assert ours.encode(token) == theirs(token)
        assert ours.encode(f"a{token} b") == theirs(f"a{token} b")
        assert ours.encode(token, special_tokens=True) == [token_id]
        assert ours.decode([token_id]) == ""


@pytest.mark.parametrize(
    "tokens, pad",
    [
        (["<|endoftext|>"], None),  # it ends texts, and is learned
        (["<|endoftext|>", "<|pad|>"], "<|pad|>"),
        (["<|endoftext|>", "<|im_end|>"], "<|endoftext|>"),
    ],
)
def test_transformers_pads_with_pad_token_of_vocabulary(
    tokens: list[str], pad: str | None, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer, DataCollatorForLanguageModeling

    made = train_tokenizer(["a b c d"] * 3, 256 + len(tokens), special_tokens=tokens)
    tokenizer = Tokenizer(made.backend, eos_token=tokens[-1] if pad == tokens[0] else tokens[0])
    tokenizer.save_pretrained(tmp_path)
    again = Tokenizer.from_pretrained(tmp_path)
    assert again.fingerprint == tokenizer.fingerprint
    assert again.encode("a b") == tokenizer.encode("a b")
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.pad_token == pad
    if pad is not None:
        batch = DataCollatorForLanguageModeling(theirs, mlm=False)([theirs("abc"), theirs("a")])
        assert batch["input_ids"][1, 1:].tolist() == [tokenizer.special_tokens[pad]] * 2
        assert batch["labels"][1, 1:].tolist() == [-100, -100]


def test_llama_pad_token_never_occurs_in_text(shared: Path, tmp_path: Path) -> None:
    for kind, pad in (("llama2", "<unk>"), ("llama3", "<|finetune_right_pad_id|>")):
        tokenizer = Tokenizer.from_pretrained(shared / "models" / f"{kind}-tokenizer")
        config = json.loads(tokenizer.files()["tokenizer_config.json"])
        assert config["pad_token"] == pad
        assert "pad_token" not in tokenizer.config

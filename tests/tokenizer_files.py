"""Tiny tokenizer files of every kind, written by hand, and texts that tell tokenizers apart."""

from __future__ import annotations

import base64
import functools
import json
import struct
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from firstlight.tokenizer import END_OF_TEXT, Tokenizer, train_tokenizer

KINDS = ("tokenizer.json", "ranks", "pieces")

#: Pieces on which tokenizers disagree when they are not quite the same.
TRICKY = (
    *(" ", "  ", "    ", "\n", "\n\n", "\r\n", "\t", "\x00", "\x1c", "\x85", "\u2028", "\u3000"),
    *("a", "b", "ab", "the", " the", "The", "'s", "'LL", "’s", "'ſ", "don't", "x_1", "()", "--"),
    *(
        "0",
        "12",
        "345",
        "6789",
        "½",
        "²",
        "Ⅷ",
        "٣",
        "é",
        "e\u0301",
        "ß",
        "ﬁ",
        "ａ",
        "ǅ",
        "日本",
        "語",
    ),
    *(
        "🙂",
        "👨‍👩‍👧",
        "🇩🇪",
        "\u200d",
        "\u200b",
        "\ufeff",
        "\ufffd",
        "\U0010ffff",
        "\ue000",
        "▁",
        "Ġ",
    ),
    *("<s>", "</s>", "<unk>", "<0x41>", END_OF_TEXT, "<|begin_of_text|>", "<|eot_id|>"),
    *("=" * 20, "-" * 9, "a" * 7),
)
TEXTS = st.lists(st.sampled_from(TRICKY) | st.text(max_size=4), max_size=16).map("".join)


def rank_file(tokens: Sequence[bytes]) -> bytes:
    """tiktoken ranks: every byte first, then `tokens`."""
    every = [*(bytes([byte]) for byte in range(256)), *tokens]
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(every))


def _varint(value: int) -> bytes:
    low, rest = value & 0x7F, value >> 7
    return bytes([low | 0x80]) + _varint(rest) if rest else bytes([low])


def number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def block(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def piece(text: str, score: float, kind: int) -> bytes:
    score_field = _varint(2 << 3 | 5) + struct.pack("<f", score)
    return block(1, block(1, text.encode()) + score_field + number(3, kind))


TRAINER = number(3, 2) + number(35, 1)
NORMALIZER = block(1, b"identity") + number(4, 0)


def piece_file(
    merged: Sequence[str],
    *,
    alphabet: str = "▁abcdet",
    trainer: bytes = TRAINER,
    normalizer: bytes = NORMALIZER,
    num_bytes: int = 256,
    extra: bytes = b"",
) -> bytes:
    """A sentencepiece BPE model with byte fallback, in protobuf's wire format by hand."""
    control = piece("<unk>", 0, 2) + piece("<s>", 0, 3) + piece("</s>", 0, 3)
    every_byte = b"".join(piece(f"<0x{byte:02X}>", 0, 6) for byte in range(num_bytes))
    normal = b"".join(piece(text, -i, 1) for i, text in enumerate([*merged, *alphabet]))
    return control + every_byte + normal + extra + block(2, trainer) + block(3, normalizer)


RANKED = (b"ab", b" ab", b"the", b"\n\n", b"  ", b"aa", b"\xc3\xa9", b"\xf0\x9f", b"\x99\x82a")
MERGED = ("▁a", "ab", "▁ab", "te", "dte", "▁▁", "▁▁▁▁", "cc", "ccc", "aa")


def load_bytes(folder: Path, content: bytes, name: str = "tokenizer.model") -> Tokenizer:
    (folder / name).write_bytes(content)
    return Tokenizer.from_pretrained(folder / name)


@functools.cache
def tiny(kind: str) -> Tokenizer:
    """A tokenizer of a few hundred tokens, from a file of this kind."""
    if kind == "tokenizer.json":
        texts = ["the the light falls, ab ab  aa cc\n\n" * 3, "é é 日本 日本 🙂🙂 🙂"]
        return train_tokenizer(texts, 300)
    content = rank_file(RANKED) if kind == "ranks" else piece_file(MERGED)
    with tempfile.TemporaryDirectory() as name:
        return load_bytes(Path(name), content)


def write_gpt2_files(
    folder: Path, merges: bytes = "#version: 0.2\na b\nab c\nĠ ab\n".encode()
) -> None:
    """`ab`, `abc` and ` ab` as merges over single letters; Ġ stands for the space."""
    vocabulary = {"a": 0, "b": 1, "c": 2, "Ġ": 3, "ab": 4, "abc": 5, "Ġab": 6, END_OF_TEXT: 7}
    (folder / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    (folder / "merges.txt").write_bytes(merges)


def change_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    state = json.loads(path.read_text(encoding="utf-8"))
    change(state)
    path.write_text(json.dumps(state), encoding="utf-8")

"""What a tokenizer's files may ask for: no more memory and time than any real one needs."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from firstlight.errors import InputError, TokenizerError
from firstlight.files import read_file

__all__ = ["LARGEST_FILE_BYTES", "read_tokenizer", "require_short", "require_sound_maps"]

LARGEST_FILE_BYTES = 100_000_000
#: Bytes that are looked at when every token is cut into two in every way: Llama 3's have 10^7.
_MOST_CUT_BYTES = 200_000_000


def read_tokenizer(path: Path) -> bytes:
    """The bytes of one of a tokenizer's files.

    Raises:
        TokenizerError: it can't be read, is no file, or is larger than any tokenizer's.
    """
    try:
        return read_file(path, LARGEST_FILE_BYTES)
    except InputError as error:
        raise TokenizerError(f"tokenizer {error}") from error


def require_sound_maps(path: Path, normalizer: Any) -> None:
    """Refuse a sentencepiece map of characters that says it is longer than it is: the library
    takes memory for as much as it says.

    Raises:
        TokenizerError: there is one.
    """
    if not isinstance(normalizer, dict):
        return
    inner = normalizer.get("normalizers")
    for part in inner if isinstance(inner, list) else ():
        require_sound_maps(path, part)
    text = normalizer.get("precompiled_charsmap")
    if not isinstance(text, str):
        return
    try:
        content = base64.b64decode(text)
    except ValueError:
        return  # the library says so
    if int.from_bytes(content[:4], "little") > len(content):
        raise TokenizerError(f"tokenizer {path} is damaged: its map of characters is cut short")


def require_short(path: Path, tokens: Iterable[bytes | str]) -> None:
    """Refuse tokens that are too long to be looked at in all their parts.

    Raises:
        TokenizerError: there are such.
    """
    if sum(len(token) ** 2 for token in tokens) > _MOST_CUT_BYTES:
        raise TokenizerError(f"tokenizer {path} holds tokens that are longer than any text's words")

"""What a tokenizer's library does on texts: tried when it is loaded, and reported when it fails.

The library is written in Rust. Where its code meets what it does not expect it panics, which is no
Exception in Python, and writes a page to stderr.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import tokenizers

from firstlight.errors import FirstlightError, TokenizerError
from firstlight.tokenizer.limits import steps_of

__all__ = ["library_errors", "may_panic", "require_swift"]

#: Processor time that trying a tokenizer's patterns may take.
_MOST_SECONDS = 0.3
#: Steps whose code in the library can't panic, whatever the text.
_SOUND_STEPS = frozenset(
    "BPEDecoder BertNormalizer BertPreTokenizer ByteFallback ByteLevel CharDelimiterSplit Digits "
    "Fuse Lowercase Metaspace NFC NFD NFKC NFKD Nmt Prepend Punctuation Replace Sequence Split "
    "Strip StripAccents UnicodeScripts Whitespace WhitespaceSplit WordPiece".split()
)
#: Repetitions of a quantifier such as + that names no end.
_NO_END = 1 << 30


# Patterns


def _is_simple(pattern: str) -> bool:
    """Whether a pattern takes few tries at each place of any text: no group is repeated, and what
    is repeated stands at most twice in an alternative. All published splits are of this kind."""
    depth = repeats = place = 0
    while place < len(pattern):
        character, is_group = pattern[place], pattern[place] == ")"
        place += 1
        if character == "\\":
            if pattern[place : place + 1] in "123456789kg":
                return False
            place = _end(r"[pPxo]\{[^}]*\}|.", pattern, place)
        elif character == "[":
            end = _end_of_class(pattern, place)
            if end is None:
                return False
            place = end
        elif character == "(":
            if pattern[place : place + 1] == "?":
                end = _end(r"\?(?:[a-z-]*[:)]|[=!>]|<[=!])", pattern, place)
                if end == place:
                    return False
                depth += pattern[end - 1] != ")"
                place = end
            else:
                depth += 1
            continue
        elif character == "|" and not depth:
            repeats = 0
        depth -= is_group
        quantifier = _QUANTIFIER.match(pattern, place)
        if quantifier is not None and (most := _most(quantifier)) > 1:
            repeats += most > 10
            if is_group or repeats > 2:
                return False
        place = place if quantifier is None else quantifier.end()
    return True


#: With what makes it lazy or possessive.
_QUANTIFIER = re.compile(r"(?:([*+?])|\{(\d*)(,?)(\d*)\})[+?]?")


def _most(quantifier: re.Match[str]) -> int:
    """How often at most it repeats something."""
    sign, least, comma, most = quantifier.groups()
    if sign:
        return 1 if sign == "?" else _NO_END
    return int((most or _NO_END) if comma else (least or 1))


def _end(expected: str, pattern: str, place: int) -> int:
    match = re.compile(expected, re.DOTALL).match(pattern, place)
    return place if match is None else match.end()


def _end_of_class(pattern: str, place: int) -> int | None:
    """The place after a [...] that begins before `place`; classes may stand in classes."""
    depth = 1
    while place < len(pattern):
        if pattern[place] == "\\":
            place += 1
        else:
            depth += {"[": 1, "]": -1}.get(pattern[place], 0)
        place += 1
        if not depth:
            return place
    return None


def may_panic(backend: tokenizers.Tokenizer) -> bool:
    """Whether there are texts on which the library may panic, for all that its steps show."""
    parts = (backend.normalizer, backend.pre_tokenizer, backend.decoder)
    for part in parts:
        for step in steps_of(None if part is None else json.loads(part.__getstate__())):
            pattern = step.get("pattern")
            regex = pattern.get("Regex") if isinstance(pattern, dict) else None
            if step.get("type") not in _SOUND_STEPS or (regex and not _is_simple(regex)):
                return True
            if step.get("type") == "Strip" and step.get("stop"):  # of a decoder
                return True
    return False


def require_swift(path: Path, backend: tokenizers.Tokenizer) -> None:
    """Refuse a tokenizer whose patterns fail, or take long, on one of some short texts.

    The library gives up after ten million tries at one place of a text, which takes a tenth of a
    second, so texts of growing length show what a pattern costs before it costs much.

    Raises:
        TokenizerError: it does.
    """
    if not may_panic(backend):
        return
    began = time.thread_time()
    for text in _trial_texts():
        with library_errors(f"tokenizer {path} fails on {text[:8]!r}...", muted=True):
            backend.decode(backend.encode(text, add_special_tokens=False).ids)
        if time.thread_time() - began > _MOST_SECONDS:
            raise TokenizerError(
                f"tokenizer {path} has a pattern that takes for ever on texts such as "
                f"{text[:8]!r}...: no real tokenizer does"
            )


def _trial_texts() -> Iterator[str]:
    for length in (*range(8, 42, 2), 300, 2000):
        for run in ("a", "A", "1", " ", "\n", "!", "ab", "a ", "1a", "é"):
            text = run * (length // len(run))
            yield from (text, text + "\0!")


# Errors of the library


@contextlib.contextmanager
def library_errors(problem: str, *, muted: bool) -> Iterator[None]:
    """Turn an error of the library into a `TokenizerError` of one line.

    Args:
        problem: the beginning of the line.
        muted: leave out what the library writes to stderr, too.
    """
    try:
        with _muted_library() if muted else contextlib.nullcontext():
            yield
    except BaseException as error:
        # Ctrl-C is no Exception either.
        is_of_library = isinstance(error, Exception) or type(error).__name__ == "PanicException"
        if not is_of_library or isinstance(error, FirstlightError | MemoryError):
            raise
        reason = " ".join(str(error).split())[:300]
        raise TokenizerError(f"{problem}: {reason} ({_remedy(reason)})") from error


def _remedy(reason: str) -> str:
    """What helps against an error of the library."""
    if re.search(r"[Mm]issing .* token from the vocabulary", reason):
        return "add the token that its unk_token names to the vocabulary in tokenizer.json"
    return "mend its tokenizer.json, or take another tokenizer"


_MUTED = threading.Lock()


@contextlib.contextmanager
def _muted_library() -> Iterator[None]:
    """Leave out what the library writes to stderr when it panics, which is a page of Rust.

    It writes past Python, to the process's stderr. What other threads write there meanwhile comes
    afterwards.
    """
    with _MUTED, contextlib.ExitStack() as stack:
        try:
            stderr = os.dup(2)
            stack.callback(os.close, stderr)
            held = stack.enter_context(_unnamed_file())
            os.dup2(held.fileno(), 2)
        except OSError:  # no stderr, or no room for what is written
            yield
            return
        stack.callback(os.dup2, stderr, 2)
        try:
            yield
        except BaseException as error:
            if type(error).__name__ != "PanicException":
                _pass_on(held, stderr)
            raise
        _pass_on(held, stderr)


def _unnamed_file() -> IO[bytes]:
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("stderr"), "w+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)


def _pass_on(held: IO[bytes], stderr: int) -> None:
    held.seek(0)
    with contextlib.suppress(OSError):
        os.write(stderr, held.read())

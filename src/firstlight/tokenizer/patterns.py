"""Patterns and steps of tokenizer.json on which the library may panic.

A pattern that repeats repeated groups can make the library's regular expressions give up in the
middle of a text. Files with such steps are tried on short texts: see
`formats.require_fast_patterns`.
"""

from __future__ import annotations

import json
import re

import tokenizers

from firstlight.tokenizer.limits import steps_of

#: Steps whose code in the library can't panic on any text.
_SOUND_STEPS = frozenset(
    "BPEDecoder BertNormalizer BertPreTokenizer ByteFallback ByteLevel CharDelimiterSplit Digits "
    "Fuse Lowercase Metaspace NFC NFD NFKC NFKD Nmt Prepend Punctuation Replace Sequence Split "
    "Strip StripAccents UnicodeScripts Whitespace WhitespaceSplit WordPiece".split()
)
#: Repetitions of a quantifier such as + that names no end.
_NO_END = 1 << 30


def _is_simple(pattern: str) -> bool:
    """True for a pattern of few tries at each position: no group is repeated, and at most two parts
    of an alternative are repeated. All published splits are of this kind."""
    depth = repeats = position = 0
    while position < len(pattern):
        character, is_group = pattern[position], pattern[position] == ")"
        position += 1
        if character == "\\":
            if pattern[position : position + 1] in "123456789kg":
                return False
            position = _end(r"[pPxo]\{[^}]*\}|.", pattern, position)
        elif character == "[":
            end = _end_of_class(pattern, position)
            if end is None:
                return False
            position = end
        elif character == "(":
            if pattern[position : position + 1] == "?":
                end = _end(r"\?(?:[a-z-]*[:)]|[=!>]|<[=!])", pattern, position)
                if end == position:
                    return False
                depth += pattern[end - 1] != ")"
                position = end
            else:
                depth += 1
            continue
        elif character == "|" and not depth:
            repeats = 0
        depth -= is_group
        quantifier = _QUANTIFIER.match(pattern, position)
        if quantifier is not None and (most := _most(quantifier)) > 1:
            repeats += most > 10
            if is_group or repeats > 2:
                return False
        position = position if quantifier is None else quantifier.end()
    return True


#: A quantifier with the mark that makes it lazy or possessive.
_QUANTIFIER = re.compile(r"(?:([*+?])|\{(\d*)(,?)(\d*)\})[+?]?")


def _most(quantifier: re.Match[str]) -> int:
    """Greatest number of repetitions of a quantifier."""
    sign, least, comma, most = quantifier.groups()
    if sign:
        return 1 if sign == "?" else _NO_END
    return int((most or _NO_END) if comma else (least or 1))


def _end(expected: str, pattern: str, position: int) -> int:
    match = re.compile(expected, re.DOTALL).match(pattern, position)
    return position if match is None else match.end()


def _end_of_class(pattern: str, position: int) -> int | None:
    """The position after a [...] that begins before `position`; classes may be nested."""
    depth = 1
    while position < len(pattern):
        if pattern[position] == "\\":
            position += 1
        else:
            depth += {"[": 1, "]": -1}.get(pattern[position], 0)
        position += 1
        if not depth:
            return position
    return None


def may_panic(backend: tokenizers.Tokenizer) -> bool:
    """True if the tokenizer's steps don't rule out that the library panics on some texts."""
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

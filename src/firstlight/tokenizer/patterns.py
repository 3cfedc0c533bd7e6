"""Detection of regular expressions and steps in tokenizer.json on which the library may panic.

With nested repetitions, such as `(a+)+`, the library's regular expressions can exceed their limit
of tries in the middle of a text, and the library panics. A tokenizer with such steps is tried on
short texts: see `formats.require_fast_patterns`.
"""

from __future__ import annotations

import json
import re

import tokenizers

from firstlight.tokenizer.limits import steps_of

#: Types of steps whose code in the library can't panic on any text.
_SOUND_STEPS = frozenset(
    "BPEDecoder BertNormalizer BertPreTokenizer ByteFallback ByteLevel CharDelimiterSplit Digits "
    "Fuse Lowercase Metaspace NFC NFD NFKC NFKD Nmt Prepend Punctuation Replace Sequence Split "
    "Strip StripAccents UnicodeScripts Whitespace WhitespaceSplit WordPiece".split()
)
#: Largest number of repetitions of a quantifier without an upper bound, such as +.
_NO_END = 1 << 30


def _is_simple(pattern: str) -> bool:
    """True for a pattern that needs few tries at each position of a text: no group is repeated, and
    each alternative has at most two repeated parts. All published split patterns are simple."""
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


#: A quantifier, with the ? or + that makes it lazy or possessive.
_QUANTIFIER = re.compile(r"(?:([*+?])|\{(\d*)(,?)(\d*)\})[+?]?")


def _most(quantifier: re.Match[str]) -> int:
    """Largest number of repetitions of a quantifier."""
    sign, least, comma, most = quantifier.groups()
    if sign:
        return 1 if sign == "?" else _NO_END
    return int((most or _NO_END) if comma else (least or 1))


def _end(expected: str, pattern: str, position: int) -> int:
    """The position after `expected` (a regular expression) at `position`; `position` if it is not
    there."""
    match = re.compile(expected, re.DOTALL).match(pattern, position)
    return position if match is None else match.end()


def _end_of_class(pattern: str, position: int) -> int | None:
    """The position after the end of the character class [...] whose "[" is before `position`; None
    if the class does not end. Classes may be nested."""
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
    """True unless the tokenizer's steps are known to be safe: the library may then panic on some
    texts."""
    parts = (backend.normalizer, backend.pre_tokenizer, backend.decoder)
    for part in parts:
        for step in steps_of(None if part is None else json.loads(part.__getstate__())):
            pattern = step.get("pattern")
            regex = pattern.get("Regex") if isinstance(pattern, dict) else None
            if step.get("type") not in _SOUND_STEPS or (regex and not _is_simple(regex)):
                return True
            if step.get("type") == "Strip" and step.get("stop"):  # the decoder of this name
                return True
    return False

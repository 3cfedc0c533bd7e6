"""Limits on a tokenizer's files: no more memory and time than any real tokenizer needs.

tokenizer.json is a small program: steps that rewrite a text, patterns that cut it, templates that
put tokens around it. The library runs whatever it says, so its steps, and how much longer they
make a text, are counted here before the library sees the file. Patterns that no count judges are
tried on short texts: see `formats.require_swift`.
"""

from __future__ import annotations

import base64
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from firstlight.errors import InputError, TokenizerError
from firstlight.files.atomic import read_file, require_few_values

LARGEST_FILE_BYTES = 100_000_000
#: Bytes that are looked at when every token is cut into two in every way: Llama 3's have 10^7.
_MOST_CUT_BYTES = 200_000_000
#: Steps of a normalizer, pre-tokenizer or decoder; real ones have up to twenty.
_MOST_STEPS = 100
#: Steps that put tokens around a text, and tokens that one of them puts there.
_MOST_FRAMES, _MOST_FRAME_TOKENS = 10, 256
#: Characters that one may become. Real ones write a line end as "<|newline|>".
_MOST_GROWTH = 16.0
#: Characters put before a text.
_MOST_PREPENDED = 1000
#: Characters of a pattern, or of any other text of a step.
_MOST_STEP_CHARS = 10_000
#: Times that bytes are written as characters, which makes most of them two.
_MOST_BYTE_LEVELS = 3
_MOST_BERT_NORMALIZERS = 3
_MOST_ADDED_CHARS = 4_000_000
_MOST_ADDED_TOKEN_CHARS = 10_000
#: Nodes of the tree that a Unigram model makes of its tokens, some 300 bytes each: XLM-R's and
#: mT5's 250,000 tokens make fewer than this.
_MOST_UNIGRAM_NODES = 1_500_000
#: A WordPiece model looks at every part of a word: BERT's take words of 100 characters.
_LONGEST_WORD = 1000
#: No vocabulary has as many tokens.
_HIGHEST_ID = 1 << 26

_SECTIONS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")


def read_tokenizer(path: Path) -> bytes:
    """The bytes of one of a tokenizer's files.

    Raises:
        TokenizerError: it can't be read, is no file, or is larger than any tokenizer's.
    """
    try:
        content = read_file(path, LARGEST_FILE_BYTES)
        require_few_values(path, content)
    except InputError as error:
        raise TokenizerError(f"tokenizer {error}") from error
    return content


def require_short(path: Path, tokens: Iterable[bytes | str]) -> None:
    """Refuse tokens that are too long to be looked at in all their parts.

    Raises:
        TokenizerError: there are such.
    """
    if sum(len(token) ** 2 for token in tokens) > _MOST_CUT_BYTES:
        raise TokenizerError(f"tokenizer {path} holds tokens that are longer than any text's words")


# Limits on tokenizer.json, counted before the library reads it


def require_bounded(path: Path, state: Mapping[str, Any]) -> None:
    """Refuse a tokenizer.json whose steps would take memory or time without end.

    Fields of a wrong type are left to the library, which names them.

    Raises:
        TokenizerError: it has more steps, makes texts longer, or holds longer tokens than any
            real tokenizer.
    """
    try:
        for section in _SECTIONS:
            _require_bounded_section(section, list(steps_of(state.get(section))))
        _require_bounded_tokens(state.get("added_tokens"), state["model"])
    except TokenizerError as error:
        raise TokenizerError(f"tokenizer {path} {error}: no real tokenizer does") from None
    if dropout := state["model"].get("dropout"):
        raise TokenizerError(
            f"tokenizer {path} has a BPE dropout of {dropout!r:.100}, which gives the same text "
            "other tokens each time: set model.dropout to null in the file"
        )


def steps_of(section: Any) -> Iterator[Mapping[str, Any]]:
    """A section's steps, in their order, those of sequences in sequences too."""
    rest = [section]
    while rest:
        step = rest.pop()
        if not isinstance(step, dict):
            continue
        inner = [step.get(name) for name in ("normalizers", "pretokenizers", "processors")]
        inner.append(step.get("decoders"))
        parts = [part for parts in inner if isinstance(parts, list) for part in parts]
        if not parts:
            yield step
        rest.extend(reversed(parts))


def _require_bounded_section(section: str, steps: list[Mapping[str, Any]]) -> None:
    most = _MOST_FRAMES if section == "post_processor" else _MOST_STEPS
    if len(steps) > most:
        raise TokenizerError(f"has {len(steps):,} steps in its {section}, more than {most}")
    kinds = [step.get("type") for step in steps]
    for kind, most in (
        ("ByteLevel", _MOST_BYTE_LEVELS),
        ("BertNormalizer", _MOST_BERT_NORMALIZERS),
    ):
        if kinds.count(kind) > most:
            raise TokenizerError(f"has {kinds.count(kind)} steps {kind} in its {section}")
    for step in steps:
        if section == "post_processor":
            _require_few_frames(step)
        else:
            _require_short_texts(section, step)
    grown, prepended = _growth(steps)
    if grown > _MOST_GROWTH or prepended > _MOST_PREPENDED:
        raise TokenizerError(
            f"has a {section} that makes a text of {max(grown, prepended):,.0f} characters of one"
        )


def _require_few_frames(step: Mapping[str, Any]) -> None:
    """Limit the tokens that are put around a text."""
    pieces = [step.get(name) for name in ("single", "pair")]
    count = sum(len(piece) for piece in pieces if isinstance(piece, list))
    tokens = step.get("special_tokens")
    for token in tokens.values() if isinstance(tokens, dict) else ():
        ids = token.get("ids") if isinstance(token, dict) else None
        count += len(ids) if isinstance(ids, list) else 0
    if count > 2 * _MOST_FRAME_TOKENS:
        raise TokenizerError(f"puts {count:,} tokens around a text in its post_processor")


def _require_short_texts(section: str, step: Mapping[str, Any]) -> None:
    for name, text in step.items():
        parts = [text, *text.values()] if isinstance(text, dict) else [text]
        for part in parts:
            if name == "precompiled_charsmap" and isinstance(part, str):
                _require_sound_map(part)
            elif isinstance(part, str) and len(part) > _MOST_STEP_CHARS:
                raise TokenizerError(f"has a {name} of {len(part):,} characters in its {section}")


def _require_sound_map(text: str) -> None:
    """Require of sentencepiece's map of characters a true length, for which the library takes
    memory, and short texts for each character."""
    try:
        content = base64.b64decode(text)
    except ValueError:
        return  # the library says so
    size = int.from_bytes(content[:4], "little")
    if size > len(content):
        raise TokenizerError("is damaged, its map of characters is cut short")
    longest = max(map(len, content[4 + size :].split(b"\0")))
    if longest > 256:
        raise TokenizerError(f"has a map of characters with a text of {longest:,} bytes for one")


def _growth(steps: list[Mapping[str, Any]]) -> tuple[float, float]:
    """(the most characters that the steps make of one, characters that they put before a text)."""
    # From the last step to the first: the number of characters that each character becomes in the
    # steps from there on. The characters of a pattern share the length of its replacement.
    weights: defaultdict[str, float] = defaultdict(lambda: 1.0)
    every = 1.0  # of characters that no step names
    prepended = 0.0

    def weight(text: Any) -> float:
        if not isinstance(text, str):
            return 0.0
        return sum(max(weights.get(character, every), 0.0) for character in text)

    for step in reversed(steps):
        kind = step.get("type")
        if kind == "Prepend":
            prepended += weight(step.get("prepend"))
        elif kind == "ByteLevel":
            every = 2 * max(every, *weights.values(), 1.0)
            weights.clear()
        elif kind == "Replace":
            pattern, made = step.get("pattern"), weight(step.get("content"))
            found = pattern.get("String") if isinstance(pattern, dict) else None
            if isinstance(found, str) and found:
                for character in set(found):
                    now = weights.get(character, every)
                    share = made / len(found)
                    weights[character] = share if len(found) == 1 else max(now, share)
            else:
                # A pattern can match any character, and nothing at all beside each.
                every = max(every, *weights.values(), made) + (made if made > 1 else 0)
                weights.clear()
        if max(every, *weights.values(), prepended, 0.0) > 1e12:
            break
    return max(every, *weights.values(), 0.0), prepended


def _require_bounded_tokens(added: Any, model: Mapping[str, Any]) -> None:
    total = highest = 0
    for token in added if isinstance(added, list) else ():
        text, token_id = (
            (token.get("content"), token.get("id")) if isinstance(token, dict) else (0, 0)
        )
        total += len(text) if isinstance(text, str) else 0
        if isinstance(text, str) and len(text) > _MOST_ADDED_TOKEN_CHARS:
            raise TokenizerError(f"has an added token of {len(text):,} characters")
        highest = max(highest, token_id) if isinstance(token_id, int) else highest
    if total > _MOST_ADDED_CHARS:
        raise TokenizerError(f"has added tokens of {total:,} characters together")
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        ids = [token_id for token_id in vocabulary.values() if isinstance(token_id, int)]
        highest = max(highest, max(ids, default=0))
    elif isinstance(vocabulary, list):
        _require_small_tree(vocabulary)
    if highest > _HIGHEST_ID:
        raise TokenizerError(f"gives a token the id {highest:,}")
    longest = model.get("max_input_chars_per_word")
    if isinstance(longest, int) and longest > _LONGEST_WORD:
        raise TokenizerError(f"takes words of {longest:,} characters for one token")


def _require_small_tree(vocabulary: list[Any]) -> None:
    """Limit the tree of a Unigram model's tokens."""
    entries = (entry for entry in vocabulary if isinstance(entry, list) and entry)
    tokens = [entry[0] for entry in entries if isinstance(entry[0], str)]
    if sum(map(len, tokens)) <= _MOST_UNIGRAM_NODES:
        return
    nodes, before = 0, ""
    for token in sorted(tokens):
        pairs = enumerate(zip(before, token, strict=False))
        shared = next((place for place, (a, b) in pairs if a != b), len(before))
        nodes += len(token) - min(shared, len(token))
        before = token
    if nodes > _MOST_UNIGRAM_NODES:
        raise TokenizerError(f"has tokens that share no beginnings, {nodes:,} characters of them")


# What the library may fail on

#: Steps whose code in the library can't panic, whatever the text.
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


#: With what makes it lazy or possessive.
_QUANTIFIER = re.compile(r"(?:([*+?])|\{(\d*)(,?)(\d*)\})[+?]?")


def _most(quantifier: re.Match[str]) -> int:
    """How often at most it repeats something."""
    sign, least, comma, most = quantifier.groups()
    if sign:
        return 1 if sign == "?" else _NO_END
    return int((most or _NO_END) if comma else (least or 1))


def _end(expected: str, pattern: str, position: int) -> int:
    match = re.compile(expected, re.DOTALL).match(pattern, position)
    return position if match is None else match.end()


def _end_of_class(pattern: str, position: int) -> int | None:
    """The position after a [...] that begins before `position`; classes may stand in classes."""
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

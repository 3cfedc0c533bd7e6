"""Limits on a tokenizer's files: no more memory and time than any real tokenizer needs.

tokenizer.json is a small program: steps that rewrite a text, patterns that cut it, templates that
put tokens around it. The library runs every tokenizer.json, so its steps, and the factor by which
they lengthen a text, are counted here before the library reads the file. Patterns that no count
judges are tried on short texts: see `formats.require_fast_patterns`.
"""

from __future__ import annotations

import base64
import json
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
#: Highest id that is accepted; no vocabulary reaches it.
_HIGHEST_ID = 1 << 26
#: Tokens of a vocabulary, some 600 bytes each in the library: the largest models have 262,144.
_MOST_TOKENS = 500_000
#: Colons in a file, of which each entry of an object has one, and lines of a file that is no JSON:
#: each takes 100 bytes or more once it is read. The largest merges have 580,000 lines.
_MOST_ENTRIES = 1_000_000

_SECTIONS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")


def read_tokenizer(path: Path) -> bytes:
    """The bytes of one of a tokenizer's files.

    Raises:
        TokenizerError: the path can't be read, is not a file, or is larger than any tokenizer's
            file.
    """
    try:
        content = read_file(path, LARGEST_FILE_BYTES)
        require_few_values(path, content)
    except InputError as error:
        raise TokenizerError(f"tokenizer {error}") from error
    is_json = content.lstrip()[:1] == b"{"
    entries = content.count(b":") if is_json else content.count(b"\n")
    if entries > _MOST_ENTRIES:
        what = "entries" if is_json else "lines"
        raise TokenizerError(
            f"tokenizer {path} has {entries:,} {what}, and {_MOST_ENTRIES:,} are read at most"
        )
    return content


def require_few_tokens(path: Path, count: int) -> None:
    """Refuse a vocabulary of more tokens than any model has.

    Raises:
        TokenizerError: the vocabulary has more than 500,000 tokens.
    """
    if count > _MOST_TOKENS:
        raise TokenizerError(
            f"tokenizer {path} has {count:,} tokens, more than the {_MOST_TOKENS:,} that are read"
        )


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
        TokenizerError: the tokenizer has more steps, makes texts longer, or has more or longer
            tokens than any real tokenizer.
    """
    vocabulary = state["model"].get("vocab")
    require_few_tokens(path, len(vocabulary) if isinstance(vocabulary, dict | list) else 0)
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


# The bytes of a text that one token can stand for

#: Steps that leave out no part of a text, with the bytes of the text that one byte of their result
#: can come from. A character becomes at least one (4 bytes become 1); NFC and NFKC join up to four
#: characters into one of at least two bytes.
_KEEPING = {
    **dict.fromkeys(("ByteLevel", "Digits", "Metaspace", "Prepend", "Punctuation", "Split"), 1),
    **dict.fromkeys(("Lowercase", "NFD", "NFKD"), 4),
    **dict.fromkeys(("NFC", "NFKC"), 8),
}


def most_bytes_per_token(backend: tokenizers.Tokenizer) -> int | None:
    """The most bytes of a text that become one token: a text of n bytes has at least n divided by
    this number of tokens. None if there may be no bound, because a step can leave out characters
    (spaces, accents), or because one or many unknown characters can become no token or one."""
    state = json.loads(backend.to_str())
    model, added = state["model"], state["added_tokens"]
    most, kinds = 1, set()
    for step in (*steps_of(state["normalizer"]), *steps_of(state["pre_tokenizer"])):
        kinds.add(kind := step.get("type"))
        if kind == "Replace":
            found = step["pattern"].get("String")
            if not found or len(step["content"].encode()) < len(found.encode()):
                return None
        elif kind not in _KEEPING or step.get("behavior") == "Removed":
            return None
        else:
            most *= _KEEPING[kind]
    if model["type"] != "BPE" or model["continuing_subword_prefix"] or model["end_of_word_suffix"]:
        return None
    if any((one["lstrip"] or one["rstrip"]) and not one["special"] for one in added):
        return None  # such a token takes in the spaces beside it
    characters = set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    is_byte_level = "ByteLevel" in kinds and characters <= model["vocab"].keys()
    bytes_known = all(f"<0x{byte:02X}>" in model["vocab"] for byte in range(256))
    if not is_byte_level and not (model["byte_fallback"] and bytes_known):
        return None

    def size(name: str) -> int:
        is_of_bytes = is_byte_level and characters.issuperset(name)
        return len(name) if is_of_bytes else len(name.encode())

    return most * max(size(name) for name in (*model["vocab"], *(one["content"] for one in added)))

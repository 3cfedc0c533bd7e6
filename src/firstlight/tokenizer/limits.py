"""Limits on a tokenizer's files: no more memory and time than any published tokenizer needs.

tokenizer.json is a small program: steps that rewrite a text, patterns that split it, templates that
put tokens around it. The `tokenizers` library runs every tokenizer.json without limits. So the
steps, and the factor by which they lengthen a text, are computed here before the library reads the
file. The time of patterns can't be computed; they are tried on short texts (see
`formats.require_fast_patterns`).
"""

from __future__ import annotations

import base64
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from firstlight.errors import InputError, TokenizerError
from firstlight.files.atomic import read_file, require_few_values

#: Largest file of a tokenizer that is read.
LARGEST_FILE_BYTES = 100_000_000
#: Most bytes to process when every token is cut in two in every possible way, which is the sum of
#: the squared token lengths; 10^7 for Llama 3.
_MOST_CUT_BYTES = 200_000_000
#: Most steps of a normalizer, pre-tokenizer or decoder; published ones have up to twenty.
_MOST_STEPS = 100
#: Most steps of a post-processor, and most tokens that one step puts around a text.
_MOST_FRAMES, _MOST_FRAME_TOKENS = 10, 256
#: Most characters that one character may become: some tokenizers write "\n" as "<|newline|>".
_MOST_GROWTH = 16.0
#: Most characters that steps put before a text.
_MOST_PREPENDED = 1000
#: Most characters of a pattern, or of any other string in a step.
_MOST_STEP_CHARS = 10_000
#: Most ByteLevel steps. Each writes every byte as a character, most of which have two bytes.
_MOST_BYTE_LEVELS = 3
_MOST_BERT_NORMALIZERS = 3
#: Most characters of all added tokens together, and of one added token.
_MOST_ADDED_CHARS = 4_000_000
_MOST_ADDED_TOKEN_CHARS = 10_000
#: Most nodes of the prefix tree that a Unigram model builds of its tokens, about 300 bytes each.
#: XLM-R and mT5 have fewer for 250,000 tokens.
_MOST_UNIGRAM_NODES = 1_500_000
#: Largest `max_input_chars_per_word` of a WordPiece model, which tries every part of a word; it is
#: 100 for BERT.
_LONGEST_WORD = 1000
#: Highest id that is accepted; no vocabulary reaches it.
_HIGHEST_ID = 1 << 26
#: Most tokens of a vocabulary, about 600 bytes each in the library; the largest has 262,144.
_MOST_TOKENS = 500_000
#: Most colons in a JSON file (one for each entry of an object), or lines of another file. Each
#: takes 100 bytes of memory or more once parsed. The largest published merges have 580,000 lines.
_MOST_ENTRIES = 1_000_000

_SECTIONS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")


def read_tokenizer(path: Path) -> bytes:
    """The bytes of a tokenizer's file.

    Raises:
        TokenizerError: the path can't be read, is not a file, or has more bytes, values or lines
            than a tokenizer's file may have.
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
    """Refuse a vocabulary with more tokens than any model has.

    Args:
        path: the tokenizer's file, for the message.
        count: number of tokens.

    Raises:
        TokenizerError: the vocabulary has more than 500,000 tokens.
    """
    if count > _MOST_TOKENS:
        raise TokenizerError(
            f"tokenizer {path} has {count:,} tokens, more than the {_MOST_TOKENS:,} that are read"
        )


def require_short(path: Path, tokens: Iterable[bytes | str]) -> None:
    """Refuse tokens so long that cutting each in two in every way would take too much time.

    Args:
        path: the tokenizer's file, for the message.
        tokens: the vocabulary's tokens.

    Raises:
        TokenizerError: the tokens are too long.
    """
    if sum(len(token) ** 2 for token in tokens) > _MOST_CUT_BYTES:
        raise TokenizerError(f"tokenizer {path} holds tokens that are longer than any text's words")


# Limits on tokenizer.json, counted before the library reads it


def require_bounded(path: Path, state: Mapping[str, Any]) -> None:
    """Refuse a tokenizer.json whose steps or tokens could take unbounded memory or time.

    Fields of a wrong type are not reported here: the library's own error names them.

    Args:
        path: the file, for messages.
        state: the content of tokenizer.json; "model" is an object.

    Raises:
        TokenizerError: the tokenizer has more steps, lengthens texts more, or has more or longer
            tokens than any published tokenizer; or its BPE model has a dropout.
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
    """The steps of a section of tokenizer.json in their order; nested sequences are flattened."""
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
    """Limit the number of steps of a section, their strings, and how much they lengthen a text."""
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
    """Refuse a post-processor's step that puts too many tokens around a text."""
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
    """Check a `precompiled_charsmap`, sentencepiece's map of characters, in base64.

    Its first four bytes are the length of its trie, for which the library allocates memory, so the
    length must be true. The replacement of one character may have at most 256 bytes.
    """
    try:
        content = base64.b64decode(text)
    except ValueError:
        return  # the library reports invalid base64 itself
    size = int.from_bytes(content[:4], "little")
    if size > len(content):
        raise TokenizerError("is damaged, its map of characters is cut short")
    longest = max(map(len, content[4 + size :].split(b"\0")))
    if longest > 256:
        raise TokenizerError(f"has a map of characters with a text of {longest:,} bytes for one")


def _growth(steps: list[Mapping[str, Any]]) -> tuple[float, float]:
    """(most characters that the steps make of one character, characters put before a text)."""
    # Steps are processed from the last to the first. `weights` has the number of characters that
    # each named character becomes in the steps processed so far, `every` that of all other
    # characters. The characters of a replaced string share the length of its replacement.
    weights: defaultdict[str, float] = defaultdict(lambda: 1.0)
    every = 1.0
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
                # A regular expression can match any character, and the empty string beside each.
                every = max(every, *weights.values(), made) + (made if made > 1 else 0)
                weights.clear()
        if max(every, *weights.values(), prepended, 0.0) > 1e12:
            break
    return max(every, *weights.values(), 0.0), prepended


def _require_bounded_tokens(added: Any, model: Mapping[str, Any]) -> None:
    """Limit the lengths and ids of added tokens and of the model's vocabulary."""
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
    """Limit the prefix tree of a Unigram model's tokens, given as [token, score] entries. Its nodes
    are counted in sorted order: each token adds the characters that its predecessor does not share.
    """
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

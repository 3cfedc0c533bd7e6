"""GGUF's description of a tokenizer, for the two kinds to which llama.cpp gives the same ids.

- Byte-level BPE (GPT-2, Llama 3, Qwen2) becomes llama.cpp's kind "gpt2": tokens, merges, and the
  name of the pattern that splits texts into pieces.
- BPE with byte fallback (Llama 2) becomes the kind "llama": tokens and scores.

Any other tokenizer, or one that llama.cpp would treat differently, is refused.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import models

from firstlight.errors import TokenizerError
from firstlight.tokenizer import GPT2_PATTERN, LLAMA3_PATTERN, QWEN2_PATTERN, Tokenizer

#: Pattern that splits texts -> (its name in tokenizer.ggml.pre, True if llama.cpp takes a piece
#: that is a token as it is, without merging: `ignore_merges` of Hugging Face's BPE).
_SPLITS = {
    GPT2_PATTERN: ("gpt-2", False),
    LLAMA3_PATTERN: ("llama-bpe", True),
    QWEN2_PATTERN: ("qwen2", False),
}

# Values of tokenizer.ggml.token_type.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
#: Character that stands for a space in Llama 2's tokens, and the normalizer's steps that write it.
_SPACE = "▁"
_PREPEND = {"type": "Prepend", "prepend": _SPACE}
_REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}


@dataclass(frozen=True, kw_only=True)
class GGUFTokenizer:
    """The tokenizer's part of a GGUF file's metadata.

    Attributes:
        model: tokenizer.ggml.model, "gpt2" or "llama".
        pre: tokenizer.ggml.pre.
        tokens: every token, by id.
        types: tokenizer.ggml.token_type of every token, by id.
        scores: score of every token, by id; None for "gpt2". llama.cpp merges the two neighbours
            whose joint token has the highest score first.
        merges: merges in order, each "left right"; None for "llama".
        special_ids: ids of "bos" and "eos", the tokens that begin and end a document, and of
            "unknown", the unknown token, if there is one.
        add_bos: True if a prompt begins with "bos".
        add_space_prefix: True if a space is put before a text.
        chat_template: the Jinja chat template; None if there is none.
        notes: cases in which llama.cpp's ids differ, for the user.
    """

    model: str
    pre: str = "default"
    tokens: tuple[str, ...]
    types: tuple[int, ...]
    scores: tuple[float, ...] | None = None
    merges: tuple[str, ...] | None = None
    special_ids: Mapping[str, int]
    add_bos: bool
    add_space_prefix: bool = False
    chat_template: str | None
    notes: tuple[str, ...]


def describe_tokenizer(tokenizer: Tokenizer, vocab_size: int) -> GGUFTokenizer:
    """Describe a tokenizer for a model with `vocab_size` embedding rows.

    Ids without a token, within the vocabulary or after its end, become unused tokens `[PAD<id>]`.

    Raises:
        TokenizerError: llama.cpp would give other ids, or the tokenizer doesn't fit the model.
    """
    if tokenizer.vocab_size > vocab_size:
        raise TokenizerError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model's embedding only "
            f"{vocab_size} rows: give the tokenizer that belongs to the model"
        )
    state = json.loads(tokenizer.backend.to_str())
    model = state["model"]
    if model.get("type") != "BPE":
        raise _refused(f"its model is {model.get('type')}, not BPE")
    for key in ("continuing_subword_prefix", "end_of_word_suffix", "dropout"):
        if model.get(key):
            raise _refused(f"its BPE has {key} {model[key]!r}")
    if not model["merges"]:
        raise _refused("it has no merges")
    added = {token["content"]: token for token in state["added_tokens"]}
    for content, token in added.items():
        if not token["special"] and (token["lstrip"] or token["rstrip"] or token["single_word"]):
            raise _refused(f"its token '{content}' takes in white space or needs word borders")
    tokens = _tokens(tokenizer, vocab_size)
    types = _types(tokens, added, model)
    # llama.cpp would take an ordinary token for a missing bos or eos.
    bos = tokenizer.separator_id
    eos = bos if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    name = model.get("unk_token")
    unknown = None if name is None else tokenizer.backend.token_to_id(name)
    described = functools.partial(
        GGUFTokenizer,
        tokens=tokens,
        types=types,
        special_ids={"bos": bos, "eos": eos} | ({} if unknown is None else {"unknown": unknown}),
        add_bos=tokenizer.add_bos,
        chat_template=tokenizer.chat_template,
    )
    if model.get("byte_fallback"):
        prefix, notes = _space_prefix(state)
        scores = _scores(tokens, types, model)
        return described(model="llama", scores=scores, add_space_prefix=prefix, notes=notes)
    pre, notes = _split_name(state, added)
    merges = tuple(" ".join(pair) for pair in _pairs(model))
    return described(model="gpt2", pre=pre, merges=merges, notes=notes)


def _refused(reason: str) -> TokenizerError:
    return TokenizerError(
        f"the tokenizer can't be put into GGUF, since llama.cpp differs: {reason}"
    )


def _tokens(tokenizer: Tokenizer, vocab_size: int) -> tuple[str, ...]:
    """Texts of all tokens, by id; `[PAD<id>]` for ids without a token."""
    vocabulary = tokenizer.backend.get_vocab(with_added_tokens=True)
    by_id = {index: token for token, index in vocabulary.items()}
    tokens = tuple(by_id.get(index, f"[PAD{index}]") for index in range(vocab_size))
    if len(set(tokens)) != vocab_size or "" in by_id.values():
        # llama.cpp aborts the whole process if two tokens have the same text.
        raise _refused("a token is empty, or is called [PAD..] as unused tokens are")
    return tokens


def _types(
    tokens: Sequence[str], added: Mapping[str, Mapping[str, Any]], model: Mapping[str, Any]
) -> tuple[int, ...]:
    """tokenizer.ggml.token_type of every token, by id."""

    def kind(token: str) -> int:
        if token == model.get("unk_token"):
            return UNKNOWN
        if token in added:
            return CONTROL if added[token]["special"] else USER_DEFINED
        if token not in model["vocab"]:
            return UNUSED
        if model.get("byte_fallback") and _BYTE_TOKEN.fullmatch(token):
            return BYTE
        return NORMAL

    return tuple(kind(token) for token in tokens)


def _pairs(model: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The merges as pairs (left, right); older tokenizer.json files have "left right"."""
    pairs = [pair.split(" ", 1) if isinstance(pair, str) else pair for pair in model["merges"]]
    return [(left, right) for left, right in pairs]


def _split_name(state: Mapping[str, Any], added: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    """tokenizer.ggml.pre of a byte-level BPE tokenizer, and notes for the user.

    Args:
        state: content of tokenizer.json.
        added: added tokens by text.

    Raises:
        TokenizerError: llama.cpp would split texts differently, or merge them into other tokens.
    """
    normalizer = state.get("normalizer")
    if normalizer not in (None, {"type": "NFC"}):
        raise _refused(f"its normalizer is {json.dumps(normalizer, ensure_ascii=False)}")
    stage = state.get("pre_tokenizer") or {}
    *splits, last = stage.get("pretokenizers") or [stage]
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        raise _refused("it is neither byte-level BPE without a leading space nor has byte fallback")
    patterns = [GPT2_PATTERN] if last.get("use_regex", True) else []
    for step in splits:
        plain = step.get("type") == "Split" and step["behavior"] == "Isolated"
        if not plain or step["invert"]:
            raise _refused(f"it splits texts by {json.dumps(step, ensure_ascii=False)}")
        patterns.append(str(next(iter(step["pattern"].values()))))
    if len(patterns) != 1 or patterns[0] not in _SPLITS:
        raise _refused(
            f"it splits texts by the pattern {' and '.join(patterns) or '(none)'}; known are those "
            "of GPT-2, Llama 3 and Qwen2"
        )
    name, whole_pieces = _SPLITS[patterns[0]]
    if whole_pieces != bool(state["model"].get("ignore_merges")):
        _require_reachable(state["model"], added)
    note = "llama.cpp does not normalise texts to NFC as the tokenizer does"
    return name, () if normalizer is None else (note,)


def _require_reachable(model: Mapping[str, Any], added: Mapping[str, Any]) -> None:
    """Refuse a vocabulary with a token that its own text does not merge into: its id would depend
    on `ignore_merges`, in which this tokenizer and llama.cpp differ."""
    bpe = models.BPE(vocab=model["vocab"], merges=_pairs(model), ignore_merges=False)
    for token in model["vocab"]:
        if token not in added and len(bpe.tokenize(token)) != 1:
            raise _refused(f"its merges do not lead to its token '{token}'")


def _space_prefix(state: Mapping[str, Any]) -> tuple[bool, tuple[str, ...]]:
    """(True if a tokenizer with byte fallback puts a space before a text, notes for the user).

    Raises:
        TokenizerError: the tokenizer treats spaces in another way than Llama 2's.
    """
    normalizer, splitter = state.get("normalizer"), state.get("pre_tokenizer")
    steps = (normalizer or {}).get("normalizers", [normalizer] if normalizer else [])
    if splitter is None and steps == [_PREPEND, _REPLACE]:
        return True, ()
    if splitter is None and steps == [_REPLACE]:
        return False, ()
    scheme = (splitter or {}).get("prepend_scheme")
    expected = {"type": "Metaspace", "replacement": _SPACE, "split": False}
    if not steps and scheme is not None and splitter == {**expected, "prepend_scheme": scheme}:
        note = "a text that begins with a space gets one more from llama.cpp"
        return (False, ()) if scheme == "never" else (True, (note,))
    raise _refused("it has byte fallback, but does not turn spaces into ▁ as Llama 2's does")


def _scores(
    tokens: Sequence[str], types: Sequence[int], model: Mapping[str, Any]
) -> tuple[float, ...]:
    """Score of every token, by id, with which llama.cpp merges in the order of the BPE's merges.

    llama.cpp joins any two neighbours whose joint text is a token: the highest score first, and
    the leftmost pair among equals. This gives the same ids as the BPE under two conditions:

    - every pair of tokens whose joint text is a token is a merge of the BPE;
    - all merges into one token follow each other in the list of merges.

    The score of a token is then minus the rank of its first merge. Tokens of spaces alone are
    exempt from the second condition (Llama 2's merges of spaces are mixed): those whose merges
    overlap share a score.

    Raises:
        TokenizerError: a condition is not met, or a byte token is missing.
    """
    if sum(kind == BYTE for kind in types) != 256:
        raise _refused("it has byte fallback without all 256 byte tokens")
    pairs = _pairs(model)
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for rank, (left, right) in enumerate(pairs):
        first.setdefault(left + right, rank)
        last[left + right] = rank
    scores: dict[str, float] = {}
    end, previous = -1, ""
    for token in first:
        if first[token] > end:
            scores[token] = float(-first[token])
        elif set(token) == set(previous) == {_SPACE}:
            scores[token] = scores[previous]
        else:
            raise _refused(f"its merges into '{token}' and '{previous}' come mixed")
        end, previous = max(end, last[token]), token
    known, listed = set(tokens), set(pairs)
    for token in tokens:
        for cut in range(1, len(token)):
            pair = (token[:cut], token[cut:])
            if pair[0] in known and pair[1] in known and pair not in listed:
                raise _refused(f"'{pair[0]}' and '{pair[1]}' make a token, but are no merge")
    return tuple(scores.get(token, float(-len(pairs))) for token in tokens)

"""Read and write tokenizers in GGUF files.

`describe_tokenizer` converts a tokenizer to the GGUF metadata that llama.cpp reads.
`read_tokenizer` builds a tokenizer from such metadata.

A GGUF file does not contain the regular expressions with which a byte-level tokenizer splits text,
but only a name for them. llama.cpp supports a fixed list of names, which are collected in
`PRE_TOKENIZERS`. A tokenizer with any other regular expressions can't be stored in a GGUF file.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from firstlight.errors import TokenizerError
from firstlight.tokenizer import (
    GPT2_PATTERN,
    LLAMA3_PATTERN,
    QWEN2_PATTERN,
    QWEN35_PATTERN,
    Tokenizer,
)
from firstlight.tokenizer.formats import sentencepiece_backend
from firstlight.tokenizer.parts import byte_level_split, prepend_bos, require_short


@dataclass(frozen=True)
class PreTokenizer:
    """Regular expressions with which llama.cpp splits text before BPE merges the tokens of each
    piece.

    Attributes:
        names: values of tokenizer.ggml.pre that select these patterns, separated by spaces. The
            first name is the one that is written to GGUF files.
        patterns: the regular expressions, in the form returned by `_canonical`. Each pattern splits
            the pieces that the previous pattern produced. Both the matches and the text between
            them become pieces.
        whole_pieces: True if a piece that is in the vocabulary becomes a single token without any
            merging, as with `ignore_merges` in Hugging Face's BPE.
        adds_bos: True if llama.cpp adds a "bos" token at the beginning of text by default. GGUF
            files can override this default.
        note: note for the user if llama.cpp's version of the patterns produces different ids for
            some text, otherwise None.
    """

    names: str
    patterns: tuple[str, ...]
    whole_pieces: bool = False
    adds_bos: bool = False
    note: str | None = None


_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_NOT_WORDS = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
#: Word patterns of tekken and o200k, in which a capital letter after a lower-case letter begins a
#: new word. `_SMALL` matches words that end with lower-case letters, and `_CAPITAL` matches all
#: other words.
_SMALL = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_CAPITAL = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
_OTHER_WORDS = (
    "llama.cpp splits words with combining marks (Hindi, Thai, decomposed accents) and with "
    "capital letters outside ASCII differently: such texts get different ids"
)
_OTHER_SPACES = (
    "llama.cpp splits white space outside ASCII (such as the ideographic space) differently: "
    "texts with it get different ids"
)
#: Letters of scripts that distinguish between upper and lower case. DeepSeek's first tokenizer uses
#: this set.
_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-"
    "\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-"
    "\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-"
    "\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc"
    "\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-"
    "\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-"
    "\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-"
    "\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-"
    "\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-"
    "\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-"
    "\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK3_WORDS = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|"""
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BLOOM_WORDS = r" ?[^(\s|[.,!?" + "\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+"

#: Pre-tokenizers of llama.cpp, except for those that can't be expressed as regular expressions.
#: Source: `src/llama-vocab.cpp`, November 2026.
PRE_TOKENIZERS = (
    PreTokenizer(
        "gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de gigachat a.x-4.0 mellum modern-bert "
        "mpt olmo jais trillion granite-docling exaone4 jina-v1-en jina-v2-code roberta-bpe",
        (GPT2_PATTERN,),
    ),
    PreTokenizer(
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        (LLAMA3_PATTERN,),
        whole_pieces=True,
        adds_bos=True,
    ),
    PreTokenizer("dbrx smaug-bpe chatglm-bpe", (LLAMA3_PATTERN,)),
    PreTokenizer("glm4 glm5", (LLAMA3_PATTERN,), whole_pieces=True),
    PreTokenizer(
        "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2 "
        "bailingmoe bailingmoe2 llada-moe",
        (QWEN2_PATTERN,),
    ),
    PreTokenizer("qwen35", (QWEN35_PATTERN,)),
    PreTokenizer(
        "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
        (r"\p{N}", GPT2_PATTERN),
    ),
    PreTokenizer(
        "tekken",
        (rf"{_SMALL}|{_CAPITAL}|\p{{N}}{_NOT_WORDS}",),
        whole_pieces=True,
        adds_bos=True,
        note=_OTHER_WORDS,
    ),
    PreTokenizer(
        "gpt-4o llama4 kanana2 talkie minimax-m2",
        (rf"{_SMALL}{_ENDINGS}?|{_CAPITAL}{_ENDINGS}?|\p{{N}}{{1,3}}{_NOT_WORDS}",),
        note=_OTHER_WORDS,
    ),
    PreTokenizer(
        "deepseek-llm",
        (
            r"[\r\n]",
            rf"\s?[{_DEEPSEEK_LETTERS}]+",
            r"\s?[!-/:-~" + "\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            _DEEPSEEK_CJK,
            # llama.cpp uses the pattern \p{N}+ here, which is equivalent if no token contains two
            # digits.
            r"\p{N}",
        ),
        note=_OTHER_SPACES,
    ),
    PreTokenizer(
        "deepseek-coder",
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}"),
        note=_OTHER_SPACES,
    ),
    PreTokenizer(
        "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
        (r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK3_WORDS),
    ),
    PreTokenizer(
        "seed-coder",
        (
            rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|"
            r" ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",
        ),
    ),
    PreTokenizer(
        "minicpm5",
        (r"\p{N}{1,3}", LLAMA3_PATTERN.replace("{1,3}", "+")),
        whole_pieces=True,
    ),
    PreTokenizer("ufakzeka", (QWEN2_PATTERN.removeprefix(f"{_ENDINGS}|"),)),
    PreTokenizer("bloom poro-chat gpt3-finnish", (_BLOOM_WORDS,)),
    PreTokenizer("viking", (_BLOOM_WORDS, r"\p{N}")),
    PreTokenizer("falcon", (r"[\p{P}\$\+<=>\^~\|`]+", GPT2_PATTERN, "[0-9][0-9][0-9]")),
    PreTokenizer("default", (r"[\p{P}\$\+<=>\^~\|]+", GPT2_PATTERN, r"\p{N}+", "[0-9][0-9][0-9]")),
)
#: Parts of regular expressions that can be written in several ways. Each alternative is mapped to
#: the form used in `PRE_TOKENIZERS`.
_SPELLINGS = {
    "\r": r"\r",
    "\n": r"\n",
    "]?+": "]?",
    "]++": "]+",
    "]*+": "]*",
    r"\p{N}{1}|": r"\p{N}|",
    "'(?i:[sdmt]|ll|ve|re)": _ENDINGS,
    r"\s*[\r\n]|": r"\s*[\r\n]+|",
    "'s|'t|'re|'ve|'m|'ll|'d| ?": "'(?:[sdmt]|ll|ve|re)| ?",
}

# Values of tokenizer.ggml.token_type.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
#: Character that represents a space in the tokens of Llama 2, and the normalizer steps that insert
#: it.
_SPACE = "\u2581"
_PREPEND = {"type": "Prepend", "prepend": _SPACE}
_REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
#: Gemma's pre-tokenizer, which splits text at spaces. It has no effect, because Gemma's normalizer
#: has already replaced all spaces.
_NO_SPLIT = {
    "type": "Split",
    "pattern": {"String": " "},
    "behavior": "MergedWithPrevious",
    "invert": False,
}


@dataclass(frozen=True, kw_only=True)
class GGUFTokenizer:
    """Metadata of a GGUF file that describes a tokenizer.

    Attributes:
        model: value of tokenizer.ggml.model, "gpt2" or "llama".
        pre: value of tokenizer.ggml.pre.
        tokens: all tokens, in id order.
        types: values of tokenizer.ggml.token_type for all tokens, in id order.
        scores: scores of all tokens, in id order, or None for "gpt2". llama.cpp first merges the
            two adjacent tokens whose combined token has the highest score.
        merges: BPE merges in order of priority, each in the form "left right", or None for "llama".
        special_ids: ids of the special tokens, keyed by role. "bos" and "eos" begin and end a
            document. "unknown", "padding", "eot" and "eom" are optional. Generation also ends at
            "eot" and "eom".
        add_bos: True if a prompt begins with the "bos" token.
        add_space_prefix: True if a space is added at the beginning of text.
        chat_template: the Jinja chat template, or None.
        notes: messages to the user about text for which llama.cpp produces different ids.
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


def describe_tokenizer(
    tokenizer: Tokenizer, vocab_size: int, ends: Sequence[int] = ()
) -> GGUFTokenizer:
    """Convert a tokenizer to GGUF metadata with which llama.cpp produces the same token ids.

    Two kinds of tokenizers are supported:

    - Byte-level BPE (GPT-2, Llama 3, Qwen2) becomes llama.cpp's "gpt2" kind, which consists of
      tokens, merges and the name of the pattern that splits text into pieces.
    - BPE with byte fallback (Llama 2) becomes the "llama" kind, which consists of tokens and
      scores.

    If an id below `vocab_size` has no token, a placeholder token `[PAD<id>]` is added for it.

    Args:
        tokenizer: the tokenizer.
        vocab_size: number of rows of the model's embedding.
        ends: ids of the tokens at which generation ends. GGUF can store two of them in addition to
            the end-of-text token.

    Raises:
        TokenizerError: llama.cpp would produce different ids, or the tokenizer has more tokens than
            the model.
    """
    if tokenizer.vocab_size > vocab_size:
        raise TokenizerError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, but the model's embedding has "
            f"only {vocab_size} rows: use the tokenizer that belongs to the model"
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
            raise _refused(f"its token '{content}' strips white space or requires word boundaries")
    tokens = _tokens(tokenizer, vocab_size)
    types = _types(tokens, added, model)
    # Always specify "bos" and "eos". If they were missing, llama.cpp would use ordinary tokens in
    # their place.
    bos = tokenizer.separator_id
    eos = bos if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    unknown = model.get("unk_token") or tokenizer.config.get("unk_token")
    names = {"unknown": unknown, "padding": tokenizer.config.get("pad_token")}
    ids = {name: tokenizer.backend.token_to_id(str(token)) for name, token in names.items()}
    special = {"bos": bos, "eos": eos}
    special |= {name: token_id for name, token_id in ids.items() if token_id is not None}
    special |= zip(("eot", "eom"), (end for end in ends if end != eos), strict=False)
    described = functools.partial(
        GGUFTokenizer,
        tokens=tokens,
        types=types,
        special_ids=special,
        add_bos=tokenizer.add_bos,
        chat_template=tokenizer.chat_template,
    )
    if model.get("byte_fallback"):
        prefix, notes = _space_prefix(state)
        scores = _scores(tokens, types, model)
        # llama.cpp looks for user-defined tokens, such as Gemma's runs of spaces, in the original
        # text. User-defined tokens must therefore be stored with plain spaces.
        found = tuple(
            token.replace(_SPACE, " ") if kind == USER_DEFINED else token
            for token, kind in zip(tokens, types, strict=True)
        )
        return described(
            model="llama", tokens=found, scores=scores, add_space_prefix=prefix, notes=notes
        )
    pre, notes = _split_name(state, added)
    merges = tuple(" ".join(pair) for pair in _pairs(model))
    return described(model="gpt2", pre=pre, merges=merges, notes=notes)


def _refused(reason: str) -> TokenizerError:
    return TokenizerError(
        "the tokenizer can't be converted to GGUF because llama.cpp would give different ids: "
        f"{reason}"
    )


def _tokens(tokenizer: Tokenizer, vocab_size: int) -> tuple[str, ...]:
    """Return the text of all tokens, in id order. Ids without a token have the text `[PAD<id>]`."""
    vocabulary = tokenizer.backend.get_vocab(with_added_tokens=True)
    by_id = {index: token for token, index in vocabulary.items()}
    tokens = tuple(by_id.get(index, f"[PAD{index}]") for index in range(vocab_size))
    if len(set(tokens)) != vocab_size or "" in by_id.values():
        # llama.cpp aborts the process if two tokens have the same text.
        raise _refused("a token is empty, or is called [PAD..] like unused tokens")
    return tokens


def _types(
    tokens: Sequence[str], added: Mapping[str, Mapping[str, Any]], model: Mapping[str, Any]
) -> tuple[int, ...]:
    """Return the values of tokenizer.ggml.token_type for all tokens, in id order."""

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
    """Return the merges as pairs (left, right). In older tokenizer.json files, each merge is a
    string of the form "left right".
    """
    pairs = [pair.split(" ", 1) if isinstance(pair, str) else pair for pair in model["merges"]]
    return [(left, right) for left, right in pairs]


def _split_name(state: Mapping[str, Any], added: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    """Return the value of tokenizer.ggml.pre for a byte-level BPE tokenizer, and notes for the
    user.

    Args:
        state: content of tokenizer.json.
        added: added tokens, keyed by text.

    Raises:
        TokenizerError: llama.cpp would split or merge text differently.
    """
    normalizer = state.get("normalizer")
    if normalizer not in (None, {"type": "NFC"}):
        raise _refused(f"its normalizer is {json.dumps(normalizer, ensure_ascii=False)}")
    patterns = _patterns(state.get("pre_tokenizer") or {})
    whole_pieces = bool(state["model"].get("ignore_merges"))
    splits = [one for one in PRE_TOKENIZERS if one.patterns == patterns]
    if not splits:
        raise _refused(
            f"it splits texts by the pattern {' and '.join(patterns) or '(none)'}; supported are "
            f"those of {', '.join(one.names.split()[0] for one in PRE_TOKENIZERS)}"
        )
    split = next((one for one in splits if one.whole_pieces == whole_pieces), splits[0])
    if split.whole_pieces != whole_pieces:
        _require_reachable(state["model"], added)
    notes = [split.note] if split.note else []
    if normalizer is not None:
        notes.append("llama.cpp does not normalise texts to NFC, unlike the tokenizer")
    return split.names.split()[0], tuple(notes)


def _patterns(stage: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the patterns of a byte-level pre-tokenizer in tokenizer.json, in `_canonical` form.

    Raises:
        TokenizerError: the pre-tokenizer is not byte-level, or has a step that is not a pattern.
    """
    *splits, last = stage.get("pretokenizers") or [stage]
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        raise _refused(
            "it is neither byte-level BPE without a leading space nor BPE with byte fallback"
        )
    patterns = []
    for step in splits:
        pattern = _canonical(str(step.get("pattern", {}).get("Regex", "")))
        # Tokenizers converted from tiktoken discard the text between matches. Patterns with this
        # ending match all of the text, so nothing is discarded.
        mode = step.get("behavior"), step.get("invert")
        kept = mode == ("Isolated", False) or (
            mode == ("Removed", True) and pattern.endswith(r"|\s+(?!\S)|\s+")
        )
        if step.get("type") == "Digits":
            patterns.append(r"\p{N}" if step.get("individual_digits") else r"\p{N}+")
        elif step.get("type") == "Split" and pattern and kept:
            patterns.append(pattern)
        else:
            raise _refused(f"it splits texts by {json.dumps(step, ensure_ascii=False)}")
    return (*patterns, GPT2_PATTERN) if last.get("use_regex", True) else tuple(patterns)


def _canonical(pattern: str) -> str:
    """Convert a pattern to the form used in `PRE_TOKENIZERS`."""
    for other, ours in _SPELLINGS.items():
        pattern = pattern.replace(other, ours)
    return pattern


def _require_reachable(model: Mapping[str, Any], added: Mapping[str, Any]) -> None:
    """Reject a tokenizer if its vocabulary contains a token that BPE can't produce from the token's
    own text. This function is called only if llama.cpp's setting of `ignore_merges` differs from
    that of the tokenizer. The text of such a token would then be encoded differently.
    """
    bpe = models.BPE(vocab=model["vocab"], merges=_pairs(model), ignore_merges=False)
    for token in model["vocab"]:
        if token not in added and len(bpe.tokenize(token)) != 1:
            raise _refused(f"its merges do not produce its token '{token}'")


def _space_prefix(state: Mapping[str, Any]) -> tuple[bool, tuple[str, ...]]:
    """Check whether a tokenizer with byte fallback adds a space at the beginning of text.

    Returns:
        A bool that is True if the tokenizer adds a space, and notes for the user.

    Raises:
        TokenizerError: the tokenizer handles spaces differently from Llama 2's tokenizer.
    """
    normalizer, splitter = state.get("normalizer"), state.get("pre_tokenizer")
    steps = (normalizer or {}).get("normalizers", [normalizer] if normalizer else [])
    if splitter == _NO_SPLIT and steps == [_REPLACE]:
        splitter = None
    if splitter is None and steps == [_PREPEND, _REPLACE]:
        return True, ()
    if splitter is None and steps == [_REPLACE]:
        return False, ()
    scheme = (splitter or {}).get("prepend_scheme")
    expected = {"type": "Metaspace", "replacement": _SPACE, "split": False}
    if not steps and scheme is not None and splitter == {**expected, "prepend_scheme": scheme}:
        note = "llama.cpp adds another space to a text that begins with a space"
        return (False, ()) if scheme == "never" else (True, (note,))
    raise _refused(
        "it has byte fallback, but does not convert spaces to ▁ like Llama 2's tokenizer"
    )


def _scores(
    tokens: Sequence[str], types: Sequence[int], model: Mapping[str, Any]
) -> tuple[float, ...]:
    """Return a score for each token, in id order. With these scores, llama.cpp applies merges in
    the same order as BPE.

    llama.cpp merges any two adjacent tokens whose combined text is a token. It starts with the
    highest score and, among equal scores, with the leftmost pair. The resulting ids are the same as
    those of BPE under two conditions:

    - Whenever the combined text of two tokens is a token, the list of BPE merges contains this
      pair.
    - All merges that produce the same token are adjacent in the list of merges.

    The score of a token is then the negative of the rank of its first merge. The second condition
    does not apply to tokens that consist only of spaces, because Llama 2's list alternates between
    merges that produce different numbers of spaces. Tokens whose merges overlap in this way get the
    same score.

    Before they merge tokens, both llama.cpp and the tokenizer extract user-defined tokens from the
    text. Runs of spaces are an exception, because the tokenizer produces them by merging. The
    merges that produce them must therefore come first in the list.

    Raises:
        TokenizerError: a condition is not met, or a byte token is missing.
    """
    if sum(kind == BYTE for kind in types) != 256:
        raise _refused("it has byte fallback without all 256 byte tokens")
    whole = {t for t, kind in zip(tokens, types, strict=True) if kind == USER_DEFINED}
    merges = _pairs(model)
    pairs = [pair for pair in merges if "".join(pair) not in whole]
    runs = {token for token in whole if set(token) == {_SPACE}}
    after = itertools.dropwhile(lambda pair: "".join(pair) in whole, merges)
    if any("".join(pair) in runs for pair in after):
        raise _refused("its merges into runs of spaces do not come before all others")
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
            raise _refused(f"its merges into '{token}' and '{previous}' are interleaved")
        end, previous = max(end, last[token]), token
    known, listed = set(tokens), set(pairs)
    for token in known - whole:
        for cut in range(1, len(token)):
            pair = (token[:cut], token[cut:])
            if pair[0] in known and pair[1] in known and pair not in listed:
                raise _refused(f"'{pair[0]}' and '{pair[1]}' form a token, but are not a merge")
    return tuple(scores.get(token, float(-len(pairs))) for token in tokens)


# Reading

#: Regular expression for `[PAD<id>]`, the placeholder for an id without a token.
_UNUSED_TOKEN = re.compile(r"\[PAD(\d+)\]")
#: Ids that llama.cpp uses for the special tokens of a "llama" tokenizer if the file does not
#: specify them.
_LLAMA_IDS = {"bos": 1, "eos": 2, "unknown": 0}


def read_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer | None:
    """Build the tokenizer described by the metadata of a GGUF file, or return None if the file does
    not contain a tokenizer. The tokenizer produces the same ids as llama.cpp.

    Raises:
        TokenizerError: the vocabulary is damaged, or its kind is not supported.
    """
    values = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in metadata.items()
        if key.startswith("tokenizer.ggml.")
    }
    kind: Any = values.get("model")
    tokens: Any = values.get("tokens")
    if kind in (None, "none"):
        return None
    if kind not in ("gpt2", "llama"):
        raise TokenizerError(
            f"tokenizers of the kind '{kind}' are not supported (supported: gpt2, llama)"
        )
    count = len(tokens) if isinstance(tokens, list) else 0
    types = values.get("token_type", [NORMAL] * count)
    if not count or not isinstance(types, list) or len(types) != count:
        raise TokenizerError("the file is damaged: its token types do not match its tokens")
    named = {}
    for name in ("bos", "eos", "unknown", "padding"):
        token_id = values.get(f"{name}_token_id", _LLAMA_IDS.get(name) if kind == "llama" else None)
        if isinstance(token_id, int) and 0 <= token_id < count:
            named[name] = tokens[token_id]
    vocabulary = {token: index for index, token in enumerate(tokens) if _is_used(token, index)}
    if kind == "gpt2":
        backend, adds_bos = _byte_level(values, vocabulary)
    else:
        backend, adds_bos = _pieces(values, types, vocabulary, named), True
    special, ordinary = [], []
    for token, index in vocabulary.items():
        # In some tokenizers, the padding token is an ordinary token such as "!".
        is_named = token in (named.get(name) for name in ("bos", "eos", "unknown"))
        if is_named or types[index] in (CONTROL, UNKNOWN):
            special.append(AddedToken(token, special=True, normalized=False))
        elif types[index] == USER_DEFINED:
            ordinary.append(AddedToken(token, normalized=False))
    backend.add_special_tokens(special)
    backend.add_tokens(ordinary)
    add_bos = values.get("add_bos_token", adds_bos) is True and "bos" in named
    if add_bos:
        prepend_bos(backend, named["bos"])
    config = {
        "chat_template": metadata.get("tokenizer.chat_template"),
        "pad_token": named.get("padding"),
        "unk_token": named.get("unknown"),
    }
    return Tokenizer(
        backend,
        bos_token=named.get("bos"),
        eos_token=named.get("eos"),
        add_bos=add_bos,
        config={key: value for key, value in config.items() if isinstance(value, str)},
    )


def _is_used(token: Any, index: int) -> bool:
    """Return False if the token is a placeholder for an id without a token, and True otherwise.

    Raises:
        TokenizerError: the token is not a string.
    """
    if not isinstance(token, str):
        raise TokenizerError(f"the file is damaged: token {index} is not a string")
    unused = _UNUSED_TOKEN.fullmatch(token)
    return token != "" and (unused is None or int(unused[1]) != index)


def _byte_level(
    values: Mapping[str, Any], vocabulary: dict[str, int]
) -> tuple[tokenizers.Tokenizer, bool]:
    """Build byte-level BPE for the "gpt2" kind.

    Args:
        values: entries of the metadata, without the prefix tokenizer.ggml.
        vocabulary: ids, keyed by token.

    Returns:
        The tokenizer, and a bool that is True if a "bos" token is added at the beginning of text by
        default.
    """
    pre, merges = values.get("pre", "default"), values.get("merges")
    split = next((one for one in PRE_TOKENIZERS if pre in one.names.split()), None)
    if split is None:
        raise TokenizerError(
            f"the tokenizer splits texts by '{pre}', which is not supported (supported: "
            f"{', '.join(one.names.split()[0] for one in PRE_TOKENIZERS)})"
        )
    try:
        # Search from the second character, because a token may begin with a space.
        cuts = [(merge, merge.index(" ", 1)) for merge in merges or ()]
        bpe = models.BPE(
            vocab=vocabulary,
            merges=[(merge[:cut], merge[cut + 1 :]) for merge, cut in cuts],
            ignore_merges=split.whole_pieces,
        )
    except Exception as error:
        raise TokenizerError(f"the file is damaged: its merges are invalid: {error}") from error
    backend = tokenizers.Tokenizer(bpe)
    backend.pre_tokenizer = (
        pre_tokenizers.ByteLevel(add_prefix_space=False)
        if split.patterns == (GPT2_PATTERN,)
        else byte_level_split(*split.patterns)
    )
    backend.decoder = decoders.ByteLevel()
    return backend, split.adds_bos


def _pieces(
    values: Mapping[str, Any],
    types: Sequence[int],
    vocabulary: dict[str, int],
    named: Mapping[str, str],
) -> tokenizers.Tokenizer:
    """Build BPE with byte fallback for the "llama" kind.

    Args:
        values: entries of the metadata, without the prefix tokenizer.ggml.
        types: values of tokenizer.ggml.token_type for all tokens, in id order.
        vocabulary: ids, keyed by token.
        named: text of the special tokens, keyed by their roles: "bos", "eos", "unknown" and
            "padding". Roles without a token are omitted.
    """
    scores: Any = values.get("scores")
    is_complete = isinstance(scores, list) and len(scores) == len(types)
    if not is_complete or not all(isinstance(score, int | float) for score in scores):
        raise TokenizerError("the file is damaged: its scores do not match its tokens")
    require_short(Path("in the file"), vocabulary)
    pieces = [(token, scores[index], types[index]) for token, index in vocabulary.items()]
    return sentencepiece_backend(
        pieces,
        vocabulary,
        unknown=named.get("unknown"),
        space_prefix=values.get("add_space_prefix", True) is True,
        leftmost=True,
    )

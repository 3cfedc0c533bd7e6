"""Tokenizers: load any of the usual files, train one's own, stream ids back to text.

Whatever the file, what comes out is one `Tokenizer` around the `tokenizers` library, and
what is saved is always `tokenizer.json` + `tokenizer_config.json`, the layout that
transformers reads.

Text is always plain text: a document that happens to hold `<|endoftext|>` becomes the
ordinary tokens of those characters, never the control token.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers

from firstlight.errors import InputError, TokenizerError
from firstlight.files import write_file
from firstlight.tokenizer_formats import (
    END_OF_TEXT,
    GPT2_PATTERN,
    LLAMA3_PATTERN,
    read_tokenizer_file,
)

__all__ = [
    "END_OF_TEXT",
    "GPT2_PATTERN",
    "LLAMA3_PATTERN",
    "TextStream",
    "Tokenizer",
    "train_tokenizer",
]


_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Tokenizer:
    """Text to token ids and back, with the special tokens that a model folder names.

    Args:
        backend: the `tokenizers.Tokenizer` that does the work.
        bos_token: the token that begins every text, if the model expects one.
        eos_token: the token that ends a document, if there is one.
        add_bos: whether documents and prompts begin with `bos_token`.
        config: further entries of `tokenizer_config.json` (chat template and the like),
            kept as they are.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        add_bos: bool = False,
        config: dict[str, Any] | None = None,
    ) -> None:
        # A tokenizer.json may carry truncation to some length: it would cut documents silently.
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True
        self.backend = backend
        self.bos_token = bos_token
        self.eos_token = eos_token
        self.config = dict(config or {})
        self.bos_token_id = self._id_of(bos_token, "bos_token")
        self.eos_token_id = self._id_of(eos_token, "eos_token")
        self.add_bos = add_bos and self.bos_token_id is not None

    def _id_of(self, token: str | None, name: str) -> int | None:
        if token is None:
            return None
        token_id = self.backend.token_to_id(token)
        if token_id is None:
            raise TokenizerError(f"{name} '{token}' is not in the tokenizer's vocabulary")
        return token_id

    @classmethod
    def from_pretrained(cls, path: str | Path) -> Tokenizer:
        """Load a tokenizer from a folder or a file; its kind is told by its content.

        Accepted: `tokenizer.json`, a folder with one, GPT-2's `vocab.json` + `merges.txt`,
        a tiktoken rank file (Llama 3's `tokenizer.model`), a sentencepiece BPE model
        (Llama 2's `tokenizer.model`).

        Raises:
            TokenizerError: nothing readable is there, or what is there is damaged.
        """
        path = Path(path)
        if not path.exists():
            raise TokenizerError(f"tokenizer {path} does not exist")
        if path.is_file():
            return cls(**vars(read_tokenizer_file(path)))
        for name in ("tokenizer.json", "vocab.json", "tokenizer.model"):
            if (path / name).is_file():
                return cls(**vars(read_tokenizer_file(path / name)))
        raise TokenizerError(
            f"no tokenizer in {path}: expected tokenizer.json, vocab.json + merges.txt, "
            "or tokenizer.model (train one with `firstlight tokenizer train`)"
        )

    @property
    def vocab_size(self) -> int:
        """The highest token id plus one: what a model's embedding must hold."""
        return self._max_token_id + 1

    @functools.cached_property
    def _max_token_id(self) -> int:
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1)

    @functools.cached_property
    def special_token_ids(self) -> frozenset[int]:
        """Ids of the control tokens, which decoding leaves out."""
        added = self.backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    @property
    def separator_id(self) -> int:
        """The token that stands before the first token of a text: bos, or else eos.

        Raises:
            TokenizerError: the tokenizer has neither.
        """
        token_id = self.bos_token_id if self.bos_token_id is not None else self.eos_token_id
        if token_id is None:
            raise TokenizerError(
                "the tokenizer names neither bos_token nor eos_token: "
                "set one of them in tokenizer_config.json"
            )
        return token_id

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 over all that decides which ids a text gets; equal for equal tokenizers."""
        state = json.loads(self.backend.to_str())
        deciding = ("added_tokens", "normalizer", "pre_tokenizer", "model")
        canonical = json.dumps([state.get(key) for key in deciding], sort_keys=True)
        return hashlib.sha256(canonical.encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """The ids of plain text, without any special token.

        Raises:
            InputError: the text holds half of a surrogate pair, which is no character.
        """
        _require_unicode(text)
        return self.backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` for many texts at once."""
        for text in texts:
            _require_unicode(text)
        encoded = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encoded]

    def encode_prompt(self, text: str) -> list[int]:
        """The ids a model continues from: bos where the model expects it, then the text.

        An empty text without bos gives the document separator, which is what a model
        trained on separated documents has seen before the beginning of each.
        """
        ids = self.encode(text)
        if self.add_bos or not ids:
            return [self.separator_id, *ids]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens left out."""
        return self.backend.decode(list(ids), skip_special_tokens=True)

    @functools.cached_property
    def splits_at_newline_after_letter(self) -> bool:
        """Whether `a + b` always encodes to `a`'s ids and then `b`'s, where `a` ends with a
        letter and `b` begins with a newline.

        True of byte-level BPE with the GPT-2 or Llama 3 split: no piece of either joins a
        letter to a following newline, and nothing in them looks back. It lets a long document
        be encoded in parts, several times faster and with bounded memory.
        """
        state = json.loads(self.backend.to_str())
        if state.get("normalizer") is not None or state["model"].get("type") != "BPE":
            return False
        # Added tokens that are not special are looked for in the text, across any newline.
        if any(not token["special"] for token in state["added_tokens"]):
            return False
        stage = state.get("pre_tokenizer") or {}
        *splits, last = stage.get("pretokenizers") or [stage]
        if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
            return False
        if any(
            step.get("type") != "Split" or step["behavior"] != "Isolated" or step["invert"]
            for step in splits
        ):
            return False
        patterns = {step["pattern"].get("Regex") for step in splits}
        if last.get("use_regex", True):
            patterns.add(GPT2_PATTERN)
        return bool(patterns) and patterns <= {GPT2_PATTERN, LLAMA3_PATTERN}

    @functools.cached_property
    def byte_token_ids(self) -> frozenset[int]:
        """Ids of the `<0xNN>` tokens of tokenizers with byte fallback; empty for others."""
        if not getattr(self.backend.model, "byte_fallback", False):
            return frozenset()
        vocabulary = self.backend.get_vocab(with_added_tokens=True)
        return frozenset(i for token, i in vocabulary.items() if _BYTE_TOKEN.fullmatch(token))

    def files(self) -> dict[str, str]:
        """The contents of `tokenizer.json` and `tokenizer_config.json`, by file name."""
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **self.config,
            "bos_token": self.bos_token,
            "eos_token": self.eos_token,
            "add_bos_token": self.add_bos,
        }
        config = {key: value for key, value in config.items() if value is not None}
        return {
            "tokenizer.json": self.backend.to_str(pretty=True),
            "tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False) + "\n",
        }

    def save_pretrained(self, folder: str | Path) -> None:
        """Write `tokenizer.json` and `tokenizer_config.json` into `folder`."""
        for name, content in self.files().items():
            write_file(Path(folder) / name, content)


class TextStream:
    """Turn token ids into text one at a time, never emitting half a character.

    The pieces that `push` returns, and at the end `finish`, concatenate to exactly the text
    that decoding everything at once would have added after `prompt_ids`.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = [i for i in prompt_ids if i not in tokenizer.special_token_ids]
        text = tokenizer.decode(self._ids)
        self._emitted = len(text)
        # A prompt that ends inside a character is kept whole until the character is.
        if not text.endswith("\ufffd"):
            self._shrink()

    def push(self, token_id: int) -> str:
        """Add one id; return the text that is now certain (often a word, sometimes nothing)."""
        if token_id in self._tokenizer.special_token_ids:
            return ""
        self._ids.append(token_id)
        # With byte fallback a whole run of byte tokens decodes together: all good or all bad.
        if token_id in self._tokenizer.byte_token_ids:
            return ""
        text = self._tokenizer.decode(self._ids)
        if text.endswith("\ufffd"):
            return ""
        piece = text[self._emitted :]
        self._shrink()
        return piece

    def finish(self) -> str:
        """Return what was held back. Bytes that never became a character show as U+FFFD."""
        piece = self._tokenizer.decode(self._ids)[self._emitted :]
        self._shrink()
        return piece

    def _shrink(self) -> None:
        """Keep only the ids that still matter: the last token that is no byte token, so that
        a decoder which strips the first space of a text does not strip later ones."""
        start = max(len(self._ids) - 1, 0)
        while start > 0 and self._ids[start] in self._tokenizer.byte_token_ids:
            start -= 1
        self._ids = self._ids[start:]
        self._emitted = len(self._tokenizer.decode(self._ids))


def train_tokenizer(
    texts: Iterable[str],
    vocab_size: int,
    *,
    pattern: str = GPT2_PATTERN,
    special_tokens: Sequence[str] = (END_OF_TEXT,),
) -> Tokenizer:
    """Train a byte-level BPE tokenizer, as GPT-2's (Sennrich et al. 2016, Radford et al. 2019).

    Args:
        texts: the corpus, in pieces of any length.
        vocab_size: number of tokens, special ones and the 256 bytes included. A small corpus
            can run out of pairs to merge; the tokenizer is then smaller.
        pattern: the regular expression whose matches are never merged across.
        special_tokens: control tokens, ids 0, 1, ...; the first one, if any, ends documents.

    Raises:
        TokenizerError: `vocab_size` is too small, or the texts are empty.
        InputError: a text holds half of a surrogate pair.
    """
    smallest = 256 + len(special_tokens)
    if vocab_size < smallest:
        raise TokenizerError(
            f"vocab_size {vocab_size} is too small: byte-level BPE needs at least {smallest} "
            f"(256 bytes and {len(special_tokens)} special)"
        )
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True) for token in special_tokens],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    seen = 0

    def count(pieces: Iterable[str]) -> Iterator[str]:
        nonlocal seen
        for piece in pieces:
            seen += len(piece)
            _require_unicode(piece)
            yield piece

    backend.train_from_iterator(count(texts), trainer)
    if seen == 0:
        raise TokenizerError("the corpus is empty: there is nothing to train a tokenizer on")
    return Tokenizer(backend, eos_token=special_tokens[0] if special_tokens else None)


def _require_unicode(text: str) -> None:
    """Refuse what Python makes of bytes that are not UTF-8 in file names and arguments."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(
            f"the text is not valid Unicode at character {error.start}: "
            f"{text[max(error.start - 10, 0) : error.start + 1]!a}"
        ) from None

"""The `Tokenizer`: text to ids and back, and chat; `TextStream`: text token by token."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import tokenizers

from firstlight.errors import TokenizerError, nearest
from firstlight.files.atomic import write_file
from firstlight.tokenizer.formats import (
    find_tokenizer_file,
    read_tokenizer_file,
    splits_at_newline_after_letter,
)
from firstlight.tokenizer.parts import (
    chat_template_of,
    extended_backend,
    library_errors,
    named_tokens,
    natural_pad_token,
    require_unicode,
)
from firstlight.tokenizer.patterns import may_panic

#: Sections of tokenizer.json that decide the ids, besides the added tokens.
_DECIDING = ("normalizer", "pre_tokenizer", "model")

_CANT_ENCODE = "the tokenizer can't encode this text"

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Tokenizer:
    """Text to token ids and back, with the special tokens that a model folder names.

    Args:
        backend: the `tokenizers.Tokenizer` that does the work.
        bos_token: the token that begins every text, if the model expects one.
        eos_token: the token that ends a document, if there is one.
        add_bos: documents and prompts begin with `bos_token`.
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
        self._may_panic = may_panic(backend)
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
        """Load a tokenizer from a folder or a file; its kind follows from its content.

        Accepted: `tokenizer.json`; GPT-2's `vocab.json` + `merges.txt` (also called
        `encoder.json` + `vocab.bpe`); tiktoken's rank files of Llama 3 (`tokenizer.model`) and
        GPT-2; a sentencepiece BPE model (Llama 2's `tokenizer.model`). In a folder these names
        come first; without them, the one file that is a tokenizer by its content. The chat
        template is read from the files beside it.

        Raises:
            TokenizerError: there is no readable tokenizer, or it is damaged.
        """
        path = Path(path)
        if not path.exists():
            siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
            raise TokenizerError(f"tokenizer {path} does not exist{nearest(path.name, siblings)}")
        if path.is_dir():
            path = find_tokenizer_file(path)
        return cls(**vars(read_tokenizer_file(path)))

    @functools.cached_property
    def vocab_size(self) -> int:
        """The highest token id plus one: the rows that a model's embedding needs."""
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @functools.cached_property
    def special_tokens(self) -> dict[str, int]:
        """The control tokens and their ids."""
        added = self.backend.get_added_tokens_decoder()
        return {token.content: token_id for token_id, token in added.items() if token.special}

    @functools.cached_property
    def special_token_ids(self) -> frozenset[int]:
        """Ids of the control tokens, which decoding leaves out."""
        return frozenset(self.special_tokens.values())

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
        """SHA-256 over all that decides a text's ids; equal for equal tokenizers."""
        state = self._state()
        deciding = [state.get(key) for key in ("added_tokens", *_DECIDING)]
        return hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()

    def _state(self) -> dict[str, Any]:
        return cast(dict[str, Any], json.loads(self.backend.to_str()))

    def extends(self, other: Tokenizer) -> bool:
        """True if every text gets the same ids as from `other`, and all additional tokens are
        special tokens with ids from `other.vocab_size` on."""
        state, before = self._state(), other._state()
        if any(state.get(key) != before.get(key) for key in _DECIDING):
            return False
        old = {token["id"]: token for token in before["added_tokens"]}
        now = {token["id"]: token for token in state["added_tokens"]}
        new = [token for token_id, token in now.items() if token_id not in old]
        return all(now.get(token_id) == token for token_id, token in old.items()) and all(
            token["special"] and token["id"] >= other.vocab_size for token in new
        )

    def extended(self, tokens: Sequence[str], chat_template: str | None = None) -> Tokenizer:
        """This tokenizer with further special tokens, which get the ids from `vocab_size` on.

        Args:
            tokens: the new tokens, in the order of their ids.
            chat_template: replaces the tokenizer's own, if given.

        Raises:
            TokenizerError: a token is empty, given twice or in the vocabulary already, or the
                template doesn't compile.
        """
        backend = extended_backend(self.backend, tokens, self.vocab_size)
        config = dict(self.config)
        if chat_template is not None:
            from firstlight.tokenizer.chat_sandbox import check_template

            check_template(chat_template)
            config["chat_template"] = chat_template
        return Tokenizer(
            backend,
            bos_token=self.bos_token,
            eos_token=self.eos_token,
            add_bos=self.add_bos,
            config=config,
        )

    def encode(self, text: str, *, special_tokens: bool = False) -> list[int]:
        """The ids of a text, nothing put before or after it.

        Args:
            text: any Unicode.
            special_tokens: names of special tokens in the text become these tokens; otherwise they
                are plain text.

        Raises:
            InputError: the text has half of a surrogate pair, which is not a character.
            TokenizerError: the tokenizer's files have no token for a part of the text, or a
                pattern that fails on it.
        """
        if len(text) < 2**14:
            return self.encoding(text, special_tokens=special_tokens).ids
        # Outside of batches, the library holds Python's lock: three seconds for a megabyte.
        return self.encode_batch([text], special_tokens=special_tokens)[0]

    def encoding(self, text: str, *, special_tokens: bool = False) -> tokenizers.Encoding:
        """The ids of `encode` with each token's offsets in the text.

        Raises:
            InputError, TokenizerError: see `encode`.
        """
        require_unicode(text)
        backend = self._parsing_backend if special_tokens else self.backend
        with library_errors(_CANT_ENCODE, muted=self._may_panic):
            return backend.encode(text, add_special_tokens=False)

    def encode_batch(
        self, texts: Sequence[str], *, special_tokens: bool = False
    ) -> list[list[int]]:
        """`encode` for many texts at once."""
        for text in texts:
            require_unicode(text)
        backend = self._parsing_backend if special_tokens else self.backend
        with library_errors(_CANT_ENCODE, muted=self._may_panic):
            encoded = backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encoded]

    @functools.cached_property
    def _parsing_backend(self) -> tokenizers.Tokenizer:
        """A second backend, since switching the one would change what other threads get."""
        return tokenizers.Tokenizer.from_str(self.backend.to_str())

    def encode_prompt(self, text: str) -> list[int]:
        """The ids a model continues from: bos where the model expects it, then the text.

        An empty text without bos gives the document separator, which a model trained on separated
        documents has seen before the beginning of each document.
        """
        ids = self.encode(text)
        if self.add_bos or not ids:
            return [self.separator_id, *ids]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens left out.

        Raises:
            TokenizerError: the tokenizer's decoder fails on them.
        """
        with library_errors("the tokenizer can't decode its tokens", muted=self._may_panic):
            return self.backend.decode(list(ids), skip_special_tokens=True)

    @functools.cached_property
    def splits_at_newline_after_letter(self) -> bool:
        """See `formats.splits_at_newline_after_letter`."""
        return splits_at_newline_after_letter(self._state())

    @functools.cached_property
    def byte_token_ids(self) -> frozenset[int]:
        """Ids of the `<0xNN>` tokens of tokenizers with byte fallback; empty for others."""
        if not getattr(self.backend.model, "byte_fallback", False):
            return frozenset()
        vocabulary = self.backend.get_vocab(with_added_tokens=True)
        return frozenset(i for token, i in vocabulary.items() if _BYTE_TOKEN.fullmatch(token))

    @property
    def chat_template(self) -> str | None:
        """The Jinja template of conversations, if there is one.

        If `tokenizer_config.json` lists several by name, it is the one called "default".
        """
        return chat_template_of(self.config)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = False
    ) -> str:
        """A conversation as one text, as transformers' method of this name makes it.

        Args:
            messages: objects with `role` and `content`, both texts.
            add_generation_prompt: end with the beginning of the assistant's next turn.

        Raises:
            InputError: the messages are something else, or the template refuses them.
            TokenizerError: there is no template, or it can't be rendered.
        """
        from firstlight.tokenizer.chat_template import render_chat

        template, names = self._required_template(), self.named_tokens
        return render_chat(template, messages, names, add_generation_prompt=add_generation_prompt)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = False,
        check: Callable[[Sequence[str]], None] = lambda pieces: None,
    ) -> list[int]:
        """The ids of `apply_chat_template`'s text; only text of the template itself becomes special
        tokens; the messages' text is plain text. `check` is called with the text's pieces, which
        share no tokens, before they are encoded; what it raises is passed on.

        Raises:
            InputError, TokenizerError: as `apply_chat_template`.
        """
        from firstlight.tokenizer.chat_template import chat_pieces

        found = chat_pieces(
            self._required_template(),
            messages,
            self.named_tokens,
            list(self.special_tokens),
            add_generation_prompt=add_generation_prompt,
        )
        pieces = list(found)
        check([piece for piece, _ in pieces])
        special = self.special_tokens
        ids = (([special[piece]] if known else self.encode(piece)) for piece, known in pieces)
        return [token_id for some in ids for token_id in some]

    def _required_template(self) -> str:
        if self.chat_template is None:
            raise TokenizerError(
                "the tokenizer has no chat template: add one with "
                "`firstlight tokenizer extend DIR --chat-template chatml --out DIR`"
            )
        return self.chat_template

    @property
    def named_tokens(self) -> dict[str, str]:
        """`bos_token`, `eos_token` and all other tokens that the config names, by name."""
        return named_tokens(self.config, self.bos_token, self.eos_token)

    def files(self) -> dict[str, str]:
        """The contents of `tokenizer.json` and `tokenizer_config.json`, by file name."""
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "pad_token": natural_pad_token(
                self.special_tokens,
                (self.bos_token, self.eos_token),
                byte_fallback=bool(self.byte_token_ids),
            ),
            **{key: value for key, value in self.config.items() if value is not None},
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
        """Return the text held back. Bytes that never became a character show as U+FFFD."""
        piece = self._tokenizer.decode(self._ids)[self._emitted :]
        self._shrink()
        return piece

    def _shrink(self) -> None:
        """Keep only the ids that still matter: the last token that is not a byte token, so that a
        decoder which strips the first space of a text does not strip later ones."""
        start = max(len(self._ids) - 1, 0)
        while start > 0 and self._ids[start] in self._tokenizer.byte_token_ids:
            start -= 1
        self._ids = self._ids[start:]
        self._emitted = len(self._tokenizer.decode(self._ids))

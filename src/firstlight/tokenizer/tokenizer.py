"""Convert text and conversations to token ids and back (`Tokenizer`), and decode token ids one at a
time (`TextStream`).
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import tokenizers

from firstlight.errors import TokenizerError, nearest
from firstlight.files.atomic import write_file
from firstlight.tokenizer.formats import (
    encodes_in_pieces,
    find_tokenizer_file,
    may_panic,
    read_tokenizer_file,
)
from firstlight.tokenizer.parts import (
    chat_template_of,
    extended_backend,
    in_thread,
    library_errors,
    named_tokens,
    natural_pad_token,
    require_unicode,
)

#: Sections of tokenizer.json that, together with the added tokens, determine how text is encoded.
_DECIDING = ("normalizer", "pre_tokenizer", "model")

_CANT_ENCODE = "the tokenizer can't encode this text"

#: Minimum length in characters of a string that is encoded with `encode_batch` in another thread.
#: The library's `encode` takes three seconds per megabyte, during which it holds Python's global
#: interpreter lock.
_LONG = 1 << 14

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Tokenizer:
    """Converts text to token ids and back, with the special tokens and chat template of a model.

    Args:
        backend: the `tokenizers.Tokenizer`. It is modified in place: truncation and padding are
            disabled, and special tokens in text are encoded as plain text.
        bos_token: beginning-of-text token, or None.
        eos_token: end-of-document token, or None.
        add_bos: True to start documents and prompts with `bos_token`.
        config: other entries of `tokenizer_config.json`, such as the chat template, which are kept
            unchanged.
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
        # Disable truncation, which a tokenizer.json may enable and which would silently shorten
        # documents.
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
        """Load a tokenizer from a folder or a file. The format is detected from the content.

        Supported formats: `tokenizer.json`; GPT-2's `vocab.json` + `merges.txt` (or `encoder.json`
        + `vocab.bpe`); tiktoken rank files of Llama 3 (`tokenizer.model`) and GPT-2; sentencepiece
        BPE models (Llama 2's `tokenizer.model`). In a folder, the file with one of these names is
        read or, if there is none, the only file that ends in .tiktoken or .model. The chat template
        is read from the same folder.

        Raises:
            TokenizerError: no readable tokenizer is found, or the tokenizer is damaged.
        """
        name, path = str(path), Path(path)
        if not path.exists():
            siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
            raise TokenizerError(f"tokenizer {name} does not exist{nearest(path.name, siblings)}")
        if path.is_dir():
            path = find_tokenizer_file(path)
        return cls(**vars(read_tokenizer_file(path)))

    @functools.cached_property
    def vocab_size(self) -> int:
        """Highest token id plus one, which is the number of rows in the embedding of a model."""
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @functools.cached_property
    def special_tokens(self) -> dict[str, int]:
        """Ids of the special tokens, keyed by text."""
        added = self.backend.get_added_tokens_decoder()
        return {token.content: token_id for token_id, token in added.items() if token.special}

    @functools.cached_property
    def special_token_ids(self) -> frozenset[int]:
        """Ids of the special tokens, which are omitted when decoding."""
        return frozenset(self.special_tokens.values())

    @property
    def separator_id(self) -> int:
        """Id of the token that separates documents and precedes their text. This is the bos token
        or, if there is none, the eos token.

        Raises:
            TokenizerError: the tokenizer has neither a bos nor an eos token.
        """
        token_id = self.bos_token_id if self.bos_token_id is not None else self.eos_token_id
        if token_id is None:
            raise TokenizerError(
                "the tokenizer has neither bos_token nor eos_token: set one of them in "
                "tokenizer_config.json"
            )
        return token_id

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 of everything that determines how text is encoded. Equivalent tokenizers have the
        same fingerprint.
        """
        state = self._state()
        deciding = [state.get(key) for key in ("added_tokens", *_DECIDING)]
        return hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()

    def _state(self) -> dict[str, Any]:
        return cast(dict[str, Any], json.loads(self.backend.to_str()))

    def extends(self, other: Tokenizer) -> bool:
        """Return True if this tokenizer equals `other` except for additional special tokens, whose
        ids begin at `other.vocab_size`. In this case, both tokenizers encode any text to the same
        ids.
        """
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
        """Return a copy of this tokenizer with additional special tokens, whose ids begin at
        `vocab_size`.

        Args:
            tokens: the new tokens, in the order of their ids.
            chat_template: chat template of the copy; None keeps this tokenizer's template.

        Raises:
            TokenizerError: a token is empty, repeated or already in the vocabulary, or the template
                doesn't compile.
        """
        backend = extended_backend(self.backend, tokens, self.vocab_size)
        config = dict(self.config)
        if chat_template is not None:
            from firstlight.tokenizer.chat_template import check_template

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
        """Encode text as token ids, without bos and eos.

        Args:
            text: any Unicode text.
            special_tokens: True to encode the names of special tokens in the text as special
                tokens; False to encode them as plain text.

        Raises:
            InputError: the text contains a lone surrogate, which is not a character.
            TokenizerError: the tokenizer has no token for part of the text, or one of its patterns
                fails.
        """
        if len(text) < _LONG:
            return self.encoding(text, special_tokens=special_tokens).ids
        return self.encode_batch([text], special_tokens=special_tokens)[0]

    def encoding(self, text: str, *, special_tokens: bool = False) -> tokenizers.Encoding:
        """Encode text like `encode`, and also return the offsets of each token in the text.

        Raises:
            InputError, TokenizerError: see `encode`.
        """
        require_unicode(text)
        backend = self._parsing_backend if special_tokens else self.backend
        with library_errors(_CANT_ENCODE, muted=self._may_panic):
            if len(text) < _LONG:
                return backend.encode(text, add_special_tokens=False)
            batch = in_thread(lambda: backend.encode_batch([text], add_special_tokens=False))
            return batch.result()[0]

    def encode_batch(
        self, texts: Sequence[str], *, special_tokens: bool = False
    ) -> list[list[int]]:
        """Encode several strings, each like `encode`."""
        for text in texts:
            require_unicode(text)
        backend = self._parsing_backend if special_tokens else self.backend
        with library_errors(_CANT_ENCODE, muted=self._may_panic):
            encode = backend.encode_batch_fast
            call = functools.partial(encode, list(texts), add_special_tokens=False)
            is_long = sum(map(len, texts)) >= _LONG
            encoded = in_thread(call).result() if is_long else call()
        return [encoding.ids for encoding in encoded]

    @functools.cached_property
    def _may_panic(self) -> bool:
        """True if the library may panic on some strings; see `formats.may_panic`."""
        return may_panic(self.backend)

    @functools.cached_property
    def _parsing_backend(self) -> tokenizers.Tokenizer:
        """A second backend, which recognises special tokens in text. It is a separate object,
        because a change to the mode of `backend` would affect other threads.
        """
        return tokenizers.Tokenizer.from_str(self.backend.to_str())

    def encode_prompt(self, text: str) -> list[int]:
        """Encode a prompt for a model to continue. The result contains the bos token if `add_bos`
        is set, followed by the ids of the text.

        For an empty string, the result is `separator_id`, because this token preceded each document
        in training.
        """
        ids = self.encode(text)
        if self.add_bos or not ids:
            return [self.separator_id, *ids]
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Decode ids to text.

        Args:
            ids: token ids. Ids beyond the vocabulary are decoded to an empty string.
            skip_special_tokens: True to omit special tokens from the text. False to include their
                names. `encode` with `special_tokens` converts the names back to the same ids.

        Raises:
            TokenizerError: the tokenizer's decoder fails on the ids.
        """
        with library_errors("the tokenizer can't decode its tokens", muted=self._may_panic):
            return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    @functools.cached_property
    def encodes_in_pieces(self) -> bool:
        """True if long text can be encoded in pieces; see `formats.encodes_in_pieces`."""
        return encodes_in_pieces(self._state())

    @functools.cached_property
    def byte_token_ids(self) -> frozenset[int]:
        """Ids of the `<0xNN>` tokens; empty for a tokenizer without byte fallback."""
        if not getattr(self.backend.model, "byte_fallback", False):
            return frozenset()
        vocabulary = self.backend.get_vocab(with_added_tokens=True)
        return frozenset(i for token, i in vocabulary.items() if _BYTE_TOKEN.fullmatch(token))

    @property
    def chat_template(self) -> str | None:
        """Jinja template for conversations, or None.

        If `tokenizer_config.json` lists several templates, this is the one named "default".
        """
        return chat_template_of(self.config)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = False
    ) -> str:
        """Render a conversation as a string, like the transformers method of the same name.

        Args:
            messages: objects whose `role` and `content` are strings.
            add_generation_prompt: True to end the text with the beginning of the assistant's next
                turn.

        Raises:
            InputError: the messages are not such objects, or the template rejects them.
            TokenizerError: the tokenizer has no template, or the template can't be rendered.
        """
        from firstlight.tokenizer.chat_template import render_chat

        template, names = self._required_template(), self.named_tokens
        return render_chat(template, messages, names, add_generation_prompt=add_generation_prompt)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> list[int]:
        """Encode the result of `apply_chat_template`. Only text written by the template itself can
        be encoded as special tokens; text from messages and options is always encoded as plain
        text.

        Args:
            messages: see `apply_chat_template`.
            add_generation_prompt: see `apply_chat_template`.
            continue_final_message: True to end with the content of the last message, without the
                end of its turn, so that the model continues this content.
            options: additional variables for the template, such as `tools` and `enable_thinking`,
                as plain JSON.

        Raises:
            InputError, TokenizerError: see `apply_chat_template`.
        """
        from firstlight.tokenizer.chat_template import chat_pieces

        pieces = chat_pieces(
            self._required_template(),
            messages,
            self.named_tokens,
            list(self.special_tokens),
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            options=options,
        )
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
        """Special tokens, keyed by their name in the config: `bos_token`, `eos_token`, `pad_token`,
        ...
        """
        return named_tokens(self.config, self.bos_token, self.eos_token)

    def files(self) -> dict[str, str]:
        """Return the contents of `tokenizer.json` and `tokenizer_config.json`, keyed by file
        name.
        """
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
    """Decodes token ids one at a time and never returns an incomplete character.

    If the results of all calls to `push` and of a final call to `finish` are concatenated, the
    result is exactly the text that would follow the text of `prompt_ids` if all ids were decoded at
    once.

    Args:
        tokenizer: the tokenizer.
        prompt_ids: token ids that precede the first pushed id.
        shown: special tokens whose names are included in the text. All other special tokens are
            omitted.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        shown: Collection[str] = (),
    ) -> None:
        self._tokenizer = tokenizer
        special = tokenizer.special_tokens
        self._shown = {special[name]: name for name in shown if name in special}
        self._ids = [i for i in prompt_ids if i not in tokenizer.special_token_ids]
        text = tokenizer.decode(self._ids)
        self._emitted = len(text)
        # If the prompt ends in the middle of a character, keep all ids of the prompt until the
        # character is complete.
        if not text.endswith("\ufffd"):
            self._shrink()

    def push(self, token_id: int) -> str:
        """Add one id. Return the new text that can't be changed by later ids, which is often a word
        or an empty string.
        """
        if token_id in self._shown:
            return self.finish() + self._shown[token_id]
        if token_id in self._tokenizer.special_token_ids:
            return ""
        self._ids.append(token_id)
        # Adjacent byte tokens are decoded together, and a single invalid byte turns all of them
        # into U+FFFD.
        if token_id in self._tokenizer.byte_token_ids:
            return ""
        text = self._tokenizer.decode(self._ids)
        if text.endswith("\ufffd"):
            return ""
        piece = text[self._emitted :]
        self._shrink()
        return piece

    def finish(self) -> str:
        """Return all remaining text. An incomplete character is replaced with U+FFFD."""
        piece = self._tokenizer.decode(self._ids)[self._emitted :]
        self._shrink()
        return piece

    def _shrink(self) -> None:
        """Drop all ids before the last token that is not a byte token. This token is kept because
        some decoders strip the first space of the decoded text. Without it, they would strip a
        space in the middle of the text.
        """
        start = max(len(self._ids) - 1, 0)
        while start > 0 and self._ids[start] in self._tokenizer.byte_token_ids:
            start -= 1
        self._ids = self._ids[start:]
        self._emitted = len(self._tokenizer.decode(self._ids))

"""Text as it is generated, token by token."""

from __future__ import annotations

from collections.abc import Sequence

from firstlight.tokenizer.tokenizer import Tokenizer


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

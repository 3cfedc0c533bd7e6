"""What single tokens are as text: for log-probabilities, which are told token by token."""

from __future__ import annotations

import codecs
import functools
import json
from collections.abc import Iterable, Sequence
from typing import Any

from firstlight.generation.sampling import TokenLogprob
from firstlight.generation.structured import SchemaError, Vocabulary
from firstlight.tokenizer import Tokenizer

#: JSON has no infinity; OpenAI says this of a token that can't come.
_LEAST_LOGPROB = -9999.0


class TokenTexts:
    """The bytes of each token of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        decoder = str(json.loads(tokenizer.backend.to_str()).get("decoder"))
        self._byte_level = "ByteLevel" in decoder
        self._spaces = "▁" in decoder or "Metaspace" in decoder
        self.bytes_of = functools.lru_cache(maxsize=65536)(self._bytes_of)

    def _bytes_of(self, token_id: int) -> bytes:
        """A token's bytes; of control tokens, those of their names."""
        name = self._tokenizer.backend.id_to_token(token_id)
        if name is None:  # the model's vocabulary may be larger than the tokenizer's
            return b""
        if token_id in self._tokenizer.special_token_ids:
            return name.encode()
        if token_id in self._tokenizer.byte_token_ids:  # <0x0A>
            return bytes([int(name[3:5], 16)])
        if self._byte_level and all(char in _BYTE_OF for char in name):
            return bytes(_BYTE_OF[char] for char in name)
        return (name.replace("▁", " ") if self._spaces else name).encode()

    def vocabulary(self, vocab_size: int, ends: Sequence[int]) -> Vocabulary:
        """All tokens of a model of `vocab_size` tokens, as grammars read them.

        Raises:
            SchemaError: the tokenizer's texts are not its tokens' one after the other.
        """
        if not (self._byte_level or self._spaces):
            raise SchemaError("this model's tokenizer can't keep to a schema")
        special = sorted(self._tokenizer.special_token_ids)
        count = 1 + max(vocab_size - 1, *special, *ends)
        return Vocabulary([self.bytes_of(i) for i in range(count)], special, list(ends))

    def adds_text(self, token_id: int) -> bool:
        """Whether it is part of the text; control tokens aren't."""
        return token_id not in self._tokenizer.special_token_ids

    def chat_logprobs(self, entries: Iterable[TokenLogprob]) -> dict[str, Any]:
        """`logprobs` of a chat's choice."""
        content = [
            {
                **self._chat_token(entry.token_id, entry.logprob),
                "top_logprobs": [self._chat_token(*one) for one in entry.top],
            }
            for entry in entries
        ]
        return {"content": content, "refusal": None}

    def _chat_token(self, token_id: int, logprob: float) -> dict[str, Any]:
        content = self.bytes_of(token_id)
        text = content.decode(errors="replace")
        return {"token": text, "logprob": _finite(logprob), "bytes": list(content)}

    def name(self, token_id: int) -> str:
        """A token as `/v1/completions` names it: part of a character is `bytes:\\xe2`."""
        content = self.bytes_of(token_id)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


class CompletionLogprobs:
    """`logprobs` of one choice of a completion, in one piece or in many.

    Args:
        texts: of the tokens.
        prompt_ids: of a prompt that the choice's text begins with.
        prompt: its text.
    """

    def __init__(self, texts: TokenTexts, prompt_ids: Sequence[int] = (), prompt: str = "") -> None:
        self._texts = texts
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0
        if prompt_ids:
            content = b"".join(texts.bytes_of(i) for i in prompt_ids if texts.adds_text(i))
            # Decoders of Llama's kind drop the first space of a text.
            self._offset = -(content.decode(errors="replace") == f" {prompt}")

    def of(self, entries: Iterable[TokenLogprob], first: int | None = None) -> dict[str, Any]:
        """Of the tokens that come next; `text_offset` counts characters of the choice's text.

        Args:
            first: a token before them that nothing predicts: its log-probabilities are null.
        """
        found: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        if first is not None:
            found["tokens"].append(self._texts.name(first))
            found["token_logprobs"].append(None)
            found["top_logprobs"].append(None)
            found["text_offset"].append(self._place(first))
        for entry in entries:
            found["tokens"].append(self._texts.name(entry.token_id))
            found["token_logprobs"].append(_finite(entry.logprob))
            found["top_logprobs"].append(self._top(entry))
            found["text_offset"].append(self._place(entry.token_id))
        return found

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """The likeliest tokens by name, and the chosen one. Of several tokens of one name, the
        likeliest is told: clients see by the highest whether the chosen one was it."""
        found: dict[str, float] = {}
        for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
            name = self._texts.name(token_id)
            found[name] = max(found.get(name, _LEAST_LOGPROB), _finite(logprob))
        return found

    def _place(self, token_id: int) -> int:
        """Where a token that comes next begins in the text."""
        content = b""
        if self._texts.adds_text(token_id):
            content = self._texts.bytes_of(token_id)
        if not 0x80 <= (content or b"\x80")[0] < 0xC0:
            # A character that was begun is not continued: it is one that can't be read.
            self._offset += len(self._characters.decode(b"", final=True))
        place = max(self._offset, 0)
        self._offset += len(self._characters.decode(content))
        return place


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)


def _byte_characters() -> dict[str, int]:
    """GPT-2's table: bytes that are visible in Latin-1 stand for themselves, the others for the
    characters from 256 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(visible)]
    return {chr(byte): byte for byte in visible} | {
        chr(256 + place): byte for place, byte in enumerate(others)
    }


_BYTE_OF = _byte_characters()

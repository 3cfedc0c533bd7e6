"""The JSON of responses, whole and in chunks, with the log-probabilities of their tokens.

Responses are plain dicts, which are faster than pydantic's models: a chunk is made for every token.
"""

from __future__ import annotations

import codecs
import functools
import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from firstlight.generation.continuation import Continuation, TokenLogprob
from firstlight.generation.structured import SchemaError, Vocabulary
from firstlight.serving.scheduler import Update
from firstlight.tokenizer import Tokenizer

#: Least log-probability in responses, as in OpenAI's, because JSON has no infinity.
_MIN_LOGPROB = -9999.0


@dataclass
class GeneratedChoice:
    """The part of one choice that has been generated so far.

    Attributes:
        pieces: pieces of the text.
        tokens: number of generated tokens, without end tokens.
        logprobs: log-probabilities of the tokens, if the request asks for them.
        finish_reason: "stop" or "length"; None while the text is being generated.
    """

    pieces: list[str] = field(default_factory=list)
    tokens: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, update: Update) -> None:
        """Add the result of one step."""
        self.pieces.append(update.piece)
        self.tokens += update.tokens
        self.logprobs.extend(update.logprobs)
        self.finish_reason = update.finish_reason


class ResponseFormat(ABC):
    """Base of the formats of responses, for one response of a completion or a chat.

    Args:
        model: the model's name.
        fingerprint: `system_fingerprint`, which changes with the weights and the software.
        texts: bytes of the tokens; None if the request does not ask for log-probabilities.
        includes_usage: True if every chunk has the field `usage`, null except in the last chunk.

    Attributes:
        prefix: beginning of the response's id.
        whole_object, chunk_object: field `object` of a whole response and of a chunk.
    """

    prefix = ""
    whole_object = ""
    chunk_object = ""

    def __init__(
        self, model: str, fingerprint: str, texts: TokenTexts | None, *, includes_usage: bool
    ) -> None:
        self._texts = texts
        self._head = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self._tail: dict[str, Any] = {"usage": None} if includes_usage else {}

    def whole(self, choices: Sequence[GeneratedChoice], usage: dict[str, int]) -> dict[str, Any]:
        """The whole response as one object."""
        found = [self._whole_choice(index, choice) for index, choice in enumerate(choices)]
        return {**self._head, "object": self.whole_object, "choices": found, "usage": usage}

    def usage(self, usage: dict[str, int]) -> dict[str, Any]:
        """The chunk with the numbers of tokens."""
        return {**self._head, "object": self.chunk_object, "choices": [], "usage": usage}

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        return {**self._head, "object": self.chunk_object, "choices": [choice], **self._tail}

    @abstractmethod
    def _whole_choice(self, index: int, choice: GeneratedChoice) -> dict[str, Any]: ...

    @abstractmethod
    def opening(self, index: int) -> dict[str, Any] | None:
        """The chunk before the first piece of a choice; None if the format has none."""

    @abstractmethod
    def piece(self, index: int, text: str, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        """The chunk of a piece of a choice."""

    @abstractmethod
    def ending(
        self, index: int, text: str, logprobs: Sequence[TokenLogprob], reason: str
    ) -> list[dict[str, Any]]:
        """The last chunks of a choice."""


@dataclass(frozen=True)
class Echo:
    """The prompt of a choice, for a completion with `echo`.

    Attributes:
        prompt: text of the prompt.
        text: continuation of the prompt, which has its tokens and their log-probabilities.
    """

    prompt: str
    text: Continuation


class CompletionFormat(ResponseFormat):
    """The format `text_completion`, of whole responses and of chunks.

    Args:
        model, fingerprint, texts, includes_usage: see `ResponseFormat`.
        echoes: prompt of each choice; empty without `echo`.
    """

    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(
        self,
        model: str,
        fingerprint: str,
        texts: TokenTexts | None,
        *,
        includes_usage: bool,
        echoes: Sequence[Echo] = (),
    ) -> None:
        super().__init__(model, fingerprint, texts, includes_usage=includes_usage)
        self._echoes = echoes
        self._logprobs: dict[int, CompletionLogprobs] = {}

    def _choice(
        self, index: int, text: str, entries: Sequence[TokenLogprob], reason: str | None
    ) -> dict[str, Any]:
        logprobs = None
        if self._texts is not None:
            state = self._logprobs.get(index)
            first = None
            if state is None:
                if self._echoes:
                    echo = self._echoes[index]
                    ids = echo.text.prompt_ids
                    state = CompletionLogprobs(self._texts, ids, echo.prompt)
                    first, entries = ids[0], [*(echo.text.prompt_logprobs or ()), *entries]
                else:
                    state = CompletionLogprobs(self._texts)
                self._logprobs[index] = state
            logprobs = state.of(entries, first)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _whole_choice(self, index: int, choice: GeneratedChoice) -> dict[str, Any]:
        echoed = self._echoes[index].prompt if self._echoes else ""
        text = echoed + "".join(choice.pieces)
        return self._choice(index, text, choice.logprobs, choice.finish_reason)

    def opening(self, index: int) -> dict[str, Any] | None:
        """The chunk with the prompt; None without `echo`."""
        if not self._echoes:
            return None
        return self._chunk(self._choice(index, self._echoes[index].prompt, (), None))

    def piece(self, index: int, text: str, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        """The chunk of a piece of a choice."""
        return self._chunk(self._choice(index, text, logprobs, None))

    def ending(
        self, index: int, text: str, logprobs: Sequence[TokenLogprob], reason: str
    ) -> list[dict[str, Any]]:
        """The last chunk of a choice."""
        return [self._chunk(self._choice(index, text, logprobs, reason))]


class ChatFormat(ResponseFormat):
    """The formats `chat.completion` and `chat.completion.chunk`."""

    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        return None if self._texts is None else self._texts.chat_logprobs(entries)

    def _whole_choice(self, index: int, choice: GeneratedChoice) -> dict[str, Any]:
        content = "".join(choice.pieces)
        return {
            "index": index,
            "message": {"role": "assistant", "content": content, "refusal": None},
            "logprobs": self._logprobs(choice.logprobs),
            "finish_reason": choice.finish_reason,
        }

    def _delta(
        self, index: int, delta: dict[str, Any], logprobs: Any, reason: str | None
    ) -> dict[str, Any]:
        return self._chunk(
            {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        )

    def opening(self, index: int) -> dict[str, Any]:
        """The chunk with the role."""
        return self._delta(index, {"role": "assistant", "content": ""}, None, None)

    def piece(self, index: int, text: str, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        """The chunk of a piece of a choice."""
        return self._delta(index, {"content": text}, self._logprobs(logprobs), None)

    def ending(
        self, index: int, text: str, logprobs: Sequence[TokenLogprob], reason: str
    ) -> list[dict[str, Any]]:
        """The chunk of the last piece, if there is one, and the chunk with the finish reason."""
        last = [self.piece(index, text, logprobs)] if text or logprobs else []
        return [*last, self._delta(index, {}, None, reason)]


def usage_of(prompt_tokens: int, choices: Sequence[GeneratedChoice]) -> dict[str, int]:
    """OpenAI's `usage`. A prompt counts once for all its choices."""
    completion_tokens = sum(choice.tokens for choice in choices)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


class TokenTexts:
    """The bytes of each token of a tokenizer; `bytes_of` returns those of a token id."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        decoder = str(json.loads(tokenizer.backend.to_str()).get("decoder"))
        self._byte_level = "ByteLevel" in decoder
        self._spaces = "▁" in decoder or "Metaspace" in decoder
        self.bytes_of = functools.lru_cache(maxsize=65536)(self._bytes_of)

    def _bytes_of(self, token_id: int) -> bytes:
        """Bytes of a token; for a control token, its name in UTF-8."""
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
        """The vocabulary of a model for `Grammars`.

        Args:
            vocab_size: number of tokens of the model.
            ends: ids that end a text.

        Raises:
            SchemaError: the tokenizer's text is not the concatenation of its tokens' bytes.
        """
        if not (self._byte_level or self._spaces):
            raise SchemaError(
                "answers by a JSON schema are not supported with this model's tokenizer: leave "
                "response_format out"
            )
        special = sorted(self._tokenizer.special_token_ids)
        count = 1 + max(vocab_size - 1, *special, *ends)
        return Vocabulary([self.bytes_of(i) for i in range(count)], special, list(ends))

    def adds_text(self, token_id: int) -> bool:
        """True if a token is part of the decoded text; False for control tokens."""
        return token_id not in self._tokenizer.special_token_ids

    def chat_logprobs(self, entries: Iterable[TokenLogprob]) -> dict[str, Any]:
        """The field `logprobs` of a chat's choice."""
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
        return {"token": text, "logprob": max(logprob, _MIN_LOGPROB), "bytes": list(content)}

    def name(self, token_id: int) -> str:
        """Name of a token in `/v1/completions`: its text, or such as `bytes:\\xe2` if its bytes are
        only a part of a character."""
        content = self.bytes_of(token_id)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


class CompletionLogprobs:
    """Creates the field `logprobs` of one choice of a completion, for the whole choice or chunk by
    chunk.

    Args:
        texts: bytes of the tokens.
        prompt_ids: tokens of the prompt, if the choice begins with it (`echo`).
        prompt: text of the prompt.
    """

    def __init__(self, texts: TokenTexts, prompt_ids: Sequence[int] = (), prompt: str = "") -> None:
        self._texts = texts
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0
        if prompt_ids:
            content = b"".join(texts.bytes_of(i) for i in prompt_ids if texts.adds_text(i))
            # Llama's decoders drop the first space of a text: offsets begin at -1 then.
            self._offset = -(content.decode(errors="replace") == f" {prompt}")

    def of(self, entries: Iterable[TokenLogprob], first: int | None = None) -> dict[str, Any]:
        """The field `logprobs` for the next tokens; `text_offset` counts characters of the choice's
        text.

        Args:
            entries: log-probabilities of the tokens.
            first: the first token of a prompt, before `entries`; its log-probabilities are null,
                because no token predicts it. None if there is no such token.
        """
        rows: list[tuple[int, float | None, dict[str, float] | None]] = []
        if first is not None:
            rows.append((first, None, None))
        rows += [(e.token_id, max(e.logprob, _MIN_LOGPROB), self._top(e)) for e in entries]
        return {
            "tokens": [self._texts.name(token_id) for token_id, _, _ in rows],
            "token_logprobs": [logprob for _, logprob, _ in rows],
            "top_logprobs": [top for _, _, top in rows],
            "text_offset": [self._next_offset(token_id) for token_id, _, _ in rows],
        }

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """Name -> log-probability of the likeliest tokens and of the chosen token. If several
        tokens have the same name, the greatest log-probability is returned."""
        found: dict[str, float] = {}
        for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
            name = self._texts.name(token_id)
            found[name] = max(found.get(name, _MIN_LOGPROB), logprob)
        return found

    def _next_offset(self, token_id: int) -> int:
        """Offset of the character at which the next token begins; moves on to its end."""
        content = b""
        if self._texts.adds_text(token_id):
            content = self._texts.bytes_of(token_id)
        if not 0x80 <= (content or b"\x80")[0] < 0xC0:
            # The token does not begin with a continuation byte of UTF-8. If the last character is
            # incomplete, it counts as one replacement character.
            self._offset += len(self._characters.decode(b"", final=True))
        offset = max(self._offset, 0)
        self._offset += len(self._characters.decode(content))
        return offset


def _byte_characters() -> dict[str, int]:
    """GPT-2's table: character -> byte. Bytes that are visible in Latin-1 have their own character;
    the others have the characters from 256 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(visible)]
    return {chr(byte): byte for byte in visible} | {
        chr(256 + index): byte for index, byte in enumerate(others)
    }


_BYTE_OF = _byte_characters()

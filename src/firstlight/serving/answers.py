"""The JSON of answers: whole, and chunk by chunk. Plain dicts: a chunk is made for every token."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from firstlight.generation.continuation import Continuation
from firstlight.generation.sampling import TokenLogprob
from firstlight.serving.token_text import CompletionLogprobs, TokenTexts


@dataclass
class Choice:
    """One answer, as far as it has come.

    Attributes:
        pieces: of its text.
        tokens: how many were generated, end tokens not counted.
        logprobs: of them, where they were asked for.
        finish_reason: None while it goes on.
    """

    pieces: list[str] = field(default_factory=list)
    tokens: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None


class AnswerFormat(Protocol):
    """How an answer is told: of a completion, or of a chat."""

    def whole(self, choices: Sequence[Choice], usage: dict[str, int]) -> dict[str, Any]:
        """The answer in one object."""

    def opening(self, index: int) -> dict[str, Any] | None:
        """The chunk before the first piece of a choice, if there is one."""

    def piece(self, index: int, text: str, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        """The chunk of a piece of a choice."""

    def ending(
        self, index: int, text: str, logprobs: Sequence[TokenLogprob], reason: str
    ) -> list[dict[str, Any]]:
        """The last chunks of a choice."""

    def usage(self, usage: dict[str, int]) -> dict[str, Any]:
        """The chunk with the numbers of tokens."""


class _Format:
    """What both kinds have in common.

    Args:
        model: its name.
        fingerprint: `system_fingerprint`, which changes with the weights and the software.
        texts: of its tokens; None where no log-probabilities are asked for.
        tells_usage: whether every chunk has the field `usage`, null but for the last.
    """

    prefix = ""
    whole_object = ""
    chunk_object = ""

    def __init__(
        self, model: str, fingerprint: str, texts: TokenTexts | None, *, tells_usage: bool
    ) -> None:
        self._texts = texts
        self._head = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self._tail: dict[str, Any] = {"usage": None} if tells_usage else {}

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        return {**self._head, "object": self.chunk_object, "choices": [choice], **self._tail}

    def usage(self, usage: dict[str, int]) -> dict[str, Any]:
        """The chunk with the numbers of tokens."""
        return {**self._head, "object": self.chunk_object, "choices": [], "usage": usage}

    def _whole(self, choices: list[dict[str, Any]], usage: dict[str, int]) -> dict[str, Any]:
        return {**self._head, "object": self.whole_object, "choices": choices, "usage": usage}


@dataclass(frozen=True)
class Echo:
    """A prompt that a choice of a completion begins with.

    Attributes:
        prompt: its text.
        text: its continuation, which has the prompt's tokens and their log-probabilities.
    """

    prompt: str
    text: Continuation


class CompletionFormat(_Format):
    """`text_completion`, which its chunks are called, too.

    Args:
        echoes: the prompts that the choices begin with, one for each, or none.
    """

    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(
        self,
        model: str,
        fingerprint: str,
        texts: TokenTexts | None,
        *,
        tells_usage: bool,
        echoes: Sequence[Echo] = (),
    ) -> None:
        super().__init__(model, fingerprint, texts, tells_usage=tells_usage)
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

    def whole(self, choices: Sequence[Choice], usage: dict[str, int]) -> dict[str, Any]:
        """The answer in one object."""
        found = []
        for index, one in enumerate(choices):
            echoed = self._echoes[index].prompt if self._echoes else ""
            text = echoed + "".join(one.pieces)
            found.append(self._choice(index, text, one.logprobs, one.finish_reason))
        return self._whole(found, usage)

    def opening(self, index: int) -> dict[str, Any] | None:
        """The chunk of the prompt, where it is asked for."""
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


class ChatFormat(_Format):
    """`chat.completion` and `chat.completion.chunk`."""

    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def _told(self, entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        return None if self._texts is None else self._texts.chat_logprobs(entries)

    def whole(self, choices: Sequence[Choice], usage: dict[str, int]) -> dict[str, Any]:
        """The answer in one object."""
        found = [
            {
                "index": index,
                "message": {
                    "role": "assistant",
                    "content": "".join(one.pieces),
                    "refusal": None,
                },
                "logprobs": self._told(one.logprobs),
                "finish_reason": one.finish_reason,
            }
            for index, one in enumerate(choices)
        ]
        return self._whole(found, usage)

    def _delta(
        self, index: int, delta: dict[str, Any], logprobs: Any, reason: str | None
    ) -> dict[str, Any]:
        return self._chunk(
            {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        )

    def opening(self, index: int) -> dict[str, Any]:
        """Says whose turn it is."""
        return self._delta(index, {"role": "assistant", "content": ""}, None, None)

    def piece(self, index: int, text: str, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        """The chunk of a piece of a choice."""
        return self._delta(index, {"content": text}, self._told(logprobs), None)

    def ending(
        self, index: int, text: str, logprobs: Sequence[TokenLogprob], reason: str
    ) -> list[dict[str, Any]]:
        """The last piece, if there is one, and the chunk that says why there are no more."""
        last = [self.piece(index, text, logprobs)] if text or logprobs else []
        return [*last, self._delta(index, {}, None, reason)]


def usage_of(prompt_tokens: int, choices: Sequence[Choice]) -> dict[str, int]:
    """The numbers of tokens, as OpenAI tells them. A prompt counts once, however many choices."""
    completion_tokens = sum(choice.tokens for choice in choices)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }

"""Response models and response formats. FastAPI generates the OpenAPI document from the models. The
response formats serialise results, with log-probabilities if requested, as a single body or as
server-sent events.
"""

from __future__ import annotations

import codecs
import functools
import itertools
import json
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import pydantic_core
from pydantic import BaseModel, Field

from firstlight.generation.answers import AnswerFormat, AnswerParser, AnswerPart, ToolCall
from firstlight.generation.continuation import Continuation, TokenLogprob
from firstlight.generation.structured import SchemaError, Vocabulary
from firstlight.serving.scheduler import Update
from firstlight.tokenizer import Tokenizer
from firstlight.tokenizer.formats import byte_characters

#: Minimum log-probability in responses, as in OpenAI's API. JSON can't represent infinity.
_MIN_LOGPROB = -9999.0
_BYTES = {char: byte for byte, char in enumerate(byte_characters())}

_Count = Annotated[int, Field(ge=0)]
_FinishReason = Literal["stop", "length"]
_ChatFinishReason = Literal["stop", "length", "tool_calls"]


# The docstrings of the classes below appear as descriptions in the OpenAPI document.


class Usage(BaseModel):
    """Token counts. A prompt is counted only once, regardless of its number of choices."""

    prompt_tokens: _Count
    completion_tokens: _Count
    total_tokens: _Count


class CompletionLogprobs(BaseModel):
    """Log-probabilities of a completion's tokens. `text_offset` is the position of each token in
    the choice's text, in characters. The first token of a prompt has no log-probability, because no
    earlier token predicts it.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """One continuation of a prompt."""

    index: _Count
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: _FinishReason


class ChatToken(BaseModel):
    """A token, its log-probability and its bytes."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenChatToken(ChatToken):
    """A token of an answer, together with the most likely tokens at its position."""

    top_logprobs: list[ChatToken]


class ChatLogprobs(BaseModel):
    """Log-probabilities of the tokens of an answer."""

    content: list[ChosenChatToken]
    refusal: None = None


class ChatFunctionCall(BaseModel):
    """The function of a tool call; `arguments` is a JSON object, encoded as a string."""

    name: str
    arguments: str


class ChatToolCall(BaseModel):
    """A tool call."""

    id: str
    type: Literal["function"] = "function"
    function: ChatFunctionCall


class AssistantMessage(BaseModel):
    """The assistant's message. `content` is null if the message consists only of tool calls."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: str | None
    tool_calls: list[ChatToolCall] | None
    refusal: None = None


class ChatChoice(BaseModel):
    """One choice of a chat completion."""

    index: _Count
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: _ChatFinishReason


class _Generated(BaseModel):
    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage


class Completion(_Generated):
    """The response of `/v1/completions`."""

    object: Literal["text_completion"] = "text_completion"
    choices: Annotated[list[CompletionChoice], Field(min_length=1)]


class ChatCompletion(_Generated):
    """The response of `/v1/chat/completions`."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: Annotated[list[ChatChoice], Field(min_length=1)]


def event(content: bytes) -> bytes:
    """Return a server-sent event whose data is JSON."""
    return b"data: " + content + b"\n\n"


class Part(NamedTuple):
    """Part of a choice. In an event, this is the text since the previous event. In a complete
    response, it is the whole choice.

    Attributes:
        number: index of the choice.
        text: text of this part.
        logprobs: log-probabilities of this part's tokens, if the request asks for them.
        finish_reason: "stop" or "length" if the choice ends here.
    """

    number: int
    text: str = ""
    logprobs: Sequence[TokenLogprob] = ()
    finish_reason: Any = None


class ResponseFormat:
    """Base class for response formats. An instance writes the response to one request.

    Args:
        model: name of the model.
        fingerprint: `system_fingerprint`, which changes with the weights and the software.
        texts: bytes of each token; None if the request does not ask for log-probabilities.
        prompt_tokens: total number of tokens in all prompts.
        choices: number of choices.
        includes_usage: True to include the token counts in the last event. The `usage` field of all
            other events is then null.

    Attributes:
        prefix: beginning of the response's id.
        kind: pydantic model for the complete response.
        event_object: `object` field of an event.
    """

    prefix: str
    kind: type[Completion | ChatCompletion]
    event_object: str

    def __init__(
        self,
        model: str,
        fingerprint: str,
        texts: TokenTexts | None,
        *,
        prompt_tokens: int,
        choices: int,
        includes_usage: bool,
    ) -> None:
        self._texts, self.prompt_tokens = texts, prompt_tokens
        self._completion_tokens = 0
        #: For each choice, the updates that have not been written yet, or None before the first
        #: event of the choice.
        self._updates: list[list[Update] | None] = [None] * choices
        self._tail = {"usage": None} if includes_usage else {}
        self._head: dict[str, Any] = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }

    def add(self, index: int, update: Update) -> None:
        """Add the result of one decoding step to a choice."""
        updates = self._updates[index] = self._updates[index] or []
        updates.append(update)
        self._completion_tokens += update.tokens

    def _take(self, index: int) -> Part:
        """Return the updates of a choice that have not been written yet, and remove them."""
        updates = self._updates[index] or []
        self._updates[index] = []
        return Part(
            index,
            "".join(update.piece for update in updates),
            [entry for update in updates for entry in update.logprobs],
            updates[-1].finish_reason,
        )

    def whole(self) -> bytes:
        """Return the complete response as JSON."""
        choices: list[Any] = [
            self._choice(self._take(index)) for index in range(len(self._updates))
        ]
        content = self.kind(**self._head, choices=choices, usage=self._usage())
        return content.model_dump_json().encode()

    def events(self, updates: Iterable[tuple[int, Update]]) -> bytes:
        """Add the results of decoding steps. Return the server-sent events for these results."""
        found: list[Any] = []
        for index, update in updates:
            if self._updates[index] is None:
                found += self._opening(index)
            self.add(index, update)
            if update.piece or update.finish_reason is not None:
                found += self._pieces(self._take(index))
        return b"".join(self._event(choices=[piece], **self._tail) for piece in found)

    def last_event(self) -> bytes:
        """Return the event that contains the token counts. Return b"" if the request does not ask
        for it.
        """
        return self._event(choices=[], usage=self._usage()) if self._tail else b""

    def _event(self, **fields: Any) -> bytes:
        content = {**self._head, "object": self.event_object, **fields}
        return event(pydantic_core.to_json(content))

    def _usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self._completion_tokens,
            total_tokens=self.prompt_tokens + self._completion_tokens,
        )

    def _choice(self, part: Part) -> dict[str, Any]:
        """Return a choice of the complete response."""
        raise NotImplementedError

    def _opening(self, index: int) -> Sequence[Any]:
        """Return the choices to send before the first text of a choice. Each of them is sent in a
        separate event.
        """
        raise NotImplementedError

    def _pieces(self, part: Part) -> Sequence[Any]:
        """Return the choices to send for a part. Each of them is sent in a separate event."""
        raise NotImplementedError


@dataclass(frozen=True)
class Echo:
    """Prompt of a choice in a completion request with `echo`.

    Attributes:
        prompt: text of the prompt.
        text: the continuation of the prompt. It also contains the tokens of the prompt and their
            log-probabilities.
    """

    prompt: str
    text: Continuation


class CompletionFormat(ResponseFormat):
    """The `text_completion` format, for complete responses and events.

    Args:
        echoes: prompt of each choice; empty without `echo`.
        arguments: see `ResponseFormat`.
    """

    prefix, event_object = "cmpl", "text_completion"
    kind = Completion

    def __init__(self, *, echoes: Sequence[Echo], **arguments: Any) -> None:
        super().__init__(**arguments)
        self._echoes = dict(enumerate(echoes))
        self._writers: dict[int, LogprobsWriter] = {}

    def _choice(self, part: Part) -> dict[str, Any]:
        echo = self._echoes.pop(part.number, None)  # Only the first part begins with the prompt.
        logprobs = None
        if self._texts is not None:
            writer = self._writers.setdefault(part.number, LogprobsWriter(self._texts, echo))
            logprobs = writer.write(part.logprobs)
        return {
            "index": part.number,
            "text": part.text if echo is None else echo.prompt + part.text,
            "logprobs": logprobs,
            "finish_reason": part.finish_reason,
        }

    def _opening(self, index: int) -> Sequence[Any]:
        return [self._choice(Part(index))] if index in self._echoes else []

    def _pieces(self, part: Part) -> Sequence[Any]:
        return [self._choice(part)]


class ChatFormat(ResponseFormat):
    """The `chat.completion` format for complete responses, and the `chat.completion.chunk` format
    for events.

    Args:
        answers: format in which the model writes the parts of its answers.
        arguments: see `ResponseFormat`.
    """

    prefix, event_object = "chatcmpl", "chat.completion.chunk"
    kind = ChatCompletion

    def __init__(self, *, answers: AnswerFormat, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._parsers = [AnswerParser(answers) for _ in self._updates]
        self._calls = [0] * len(self._parsers)

    def _answer(self, part: Part) -> tuple[list[AnswerPart], _ChatFinishReason | None]:
        """Return the parts of the answer that `part` completes, and the finish reason of the
        choice.
        """
        ended = part.finish_reason is not None
        found = self._parsers[part.number].push(part.text, ended=ended)
        self._calls[part.number] += sum(len(one.calls) for one in found)
        is_call = part.finish_reason == "stop" and self._calls[part.number]
        return found, "tool_calls" if is_call else part.finish_reason

    def _choice(self, part: Part) -> dict[str, Any]:
        found, finish_reason = self._answer(part)
        calls = [_called(call) for one in found for call in one.calls]
        content = "".join(one.content for one in found)
        message = AssistantMessage(
            content=content if content or not calls else None,
            reasoning_content="".join(one.reasoning for one in found) or None,
            tool_calls=calls or None,
        )
        return {
            "index": part.number,
            "message": message,
            "logprobs": self._logprobs(part),
            "finish_reason": finish_reason,
        }

    def _opening(self, index: int) -> Sequence[Any]:
        return [_delta(index, {"role": "assistant", "content": ""})]

    def _pieces(self, part: Part) -> Sequence[Any]:
        numbers = itertools.count(self._calls[part.number])
        found, finish_reason = self._answer(part)
        deltas: list[dict[str, Any]] = []
        for one in found:
            for call in one.calls:
                called = {"index": next(numbers), **_called(call).model_dump()}
                deltas.append({"tool_calls": [called]})
            if one.reasoning:
                deltas.append({"reasoning_content": one.reasoning})
            if one.content:
                deltas.append({"content": one.content})
        if part.logprobs and not deltas:
            deltas = [{"content": ""}]
        pieces = [_delta(part.number, delta) for delta in deltas]
        if pieces:
            pieces[0]["logprobs"] = self._logprobs(part)
        if finish_reason is not None:
            pieces.append({**_delta(part.number, {}), "finish_reason": finish_reason})
        return pieces

    def _logprobs(self, part: Part) -> ChatLogprobs | None:
        return None if self._texts is None else self._texts.chat_logprobs(part.logprobs)


def _called(call: ToolCall) -> ChatToolCall:
    # Mistral's templates require ids of 9 letters and digits when the client sends this message
    # back.
    function = ChatFunctionCall(name=call.name, arguments=call.arguments)
    return ChatToolCall(id=secrets.token_hex(5)[:9], function=function)


def _delta(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


class TokenTexts:
    """The bytes of each token in a tokenizer's vocabulary. `bytes_of` returns the bytes for a token
    id.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        decoder = str(json.loads(tokenizer.backend.to_str()).get("decoder"))
        self._byte_level = "ByteLevel" in decoder
        self._spaces = "▁" in decoder or "Metaspace" in decoder
        self.bytes_of = functools.lru_cache(maxsize=65536)(self._bytes_of)

    def _bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of a token. For a control token, return its name encoded as UTF-8."""
        name = self._tokenizer.backend.id_to_token(token_id)
        if name is None:  # The model's vocabulary may be larger than the tokenizer's.
            return b""
        if token_id in self._tokenizer.special_token_ids:
            return name.encode()
        if token_id in self._tokenizer.byte_token_ids:  # Such as <0x0A>.
            return bytes([int(name[3:5], 16)])
        if self._byte_level and all(char in _BYTES for char in name):
            return bytes(_BYTES[char] for char in name)
        return (name.replace("▁", " ") if self._spaces else name).encode()

    def vocabulary(self, vocab_size: int, ends: Sequence[int]) -> Vocabulary:
        """Return a model's vocabulary for `Grammars`.

        Args:
            vocab_size: number of tokens in the model's vocabulary.
            ends: ids of the end-of-text tokens.

        Raises:
            SchemaError: the tokenizer does not decode text by concatenating the bytes of its
                tokens.
        """
        if not (self._byte_level or self._spaces):
            raise SchemaError(
                "JSON schemas are not supported with this model's tokenizer: omit response_format"
            )
        special = sorted(self._tokenizer.special_token_ids)
        count = 1 + max(vocab_size - 1, *special, *ends)
        return Vocabulary([self.bytes_of(i) for i in range(count)], special, list(ends))

    def adds_text(self, token_id: int) -> bool:
        """Return True if a token adds text to the decoded output. Control tokens do not."""
        return token_id not in self._tokenizer.special_token_ids

    def chat_logprobs(self, entries: Iterable[TokenLogprob]) -> ChatLogprobs:
        """Return the `logprobs` field of a chat choice."""
        content = [
            ChosenChatToken.model_construct(
                **self._chat_token(entry.token_id, entry.logprob),
                top_logprobs=[
                    ChatToken.model_construct(**self._chat_token(*token)) for token in entry.top
                ],
            )
            for entry in entries
        ]
        return ChatLogprobs.model_construct(content=content)

    def _chat_token(self, token_id: int, logprob: float) -> dict[str, Any]:
        content = self.bytes_of(token_id)
        text = content.decode(errors="replace")
        return {"token": text, "logprob": max(logprob, _MIN_LOGPROB), "bytes": list(content)}

    def name(self, token_id: int) -> str:
        """Return the name that `/v1/completions` uses for a token. It is the token's text, or a
        name such as `bytes:\\xe2` if the bytes are only part of a character.
        """
        content = self.bytes_of(token_id)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


class LogprobsWriter:
    """Writes the `logprobs` field of one choice of a completion, either all at once or event by
    event.

    Args:
        texts: bytes of each token.
        echo: the prompt, if the choice begins with the prompt. In this case, the log-probabilities
            of the prompt are written first.
    """

    def __init__(self, texts: TokenTexts, echo: Echo | None) -> None:
        self._texts, self._echo = texts, echo
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0
        if echo is not None:
            ids = echo.text.prompt_ids
            content = b"".join(texts.bytes_of(i) for i in ids if texts.adds_text(i))
            # Llama's tokenizers drop the first space of the decoded text, so the offsets begin at
            # -1.
            self._offset = -(content.decode(errors="replace") == f" {echo.prompt}")

    def write(self, entries: Iterable[TokenLogprob]) -> CompletionLogprobs:
        """Return the `logprobs` field for the next tokens."""
        rows: list[tuple[int, float | None, dict[str, float] | None]] = []
        if self._echo is not None:
            text = self._echo.text
            rows.append((text.prompt_ids[0], None, None))
            entries = [*(text.prompt_logprobs or ()), *entries]
            self._echo = None
        rows += [(e.token_id, max(e.logprob, _MIN_LOGPROB), self._top(e)) for e in entries]
        # Skip validation, which would be slow for thousands of tokens.
        return CompletionLogprobs.model_construct(
            tokens=[self._texts.name(token_id) for token_id, _, _ in rows],
            token_logprobs=[logprob for _, logprob, _ in rows],
            top_logprobs=[top for _, _, top in rows],
            text_offset=[self._next_offset(token_id) for token_id, _, _ in rows],
        )

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """Return a mapping from name to log-probability for the most likely tokens and the chosen
        token. If several tokens share a name, the highest log-probability is used.
        """
        found: dict[str, float] = {}
        for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
            name = self._texts.name(token_id)
            found[name] = max(found.get(name, _MIN_LOGPROB), logprob)
        return found

    def _next_offset(self, token_id: int) -> int:
        """Return the character offset at which the next token begins, and advance past the
        token."""
        content = b""
        if self._texts.adds_text(token_id):
            content = self._texts.bytes_of(token_id)
        if not 0x80 <= (content or b"\x80")[0] < 0xC0:
            # The token does not begin with a UTF-8 continuation byte, so no character spans the
            # previous token and this token. If the bytes so far end in an incomplete character, it
            # counts as one replacement character.
            self._offset += len(self._characters.decode(b"", final=True))
        offset = max(self._offset, 0)
        self._offset += len(self._characters.decode(content))
        return offset

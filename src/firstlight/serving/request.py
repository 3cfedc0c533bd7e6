"""Request models with OpenAI's fields and a few additional ones, and the encoder that converts
requests to token sequences. The limits on requests are defined in `config.py`.

Each OpenAI field that would change the response is either implemented, or rejected with an error
that names the field. Fields added by other vendors have no effect, as in vLLM and llama.cpp. The
log shows how many requests contain such fields.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any, Literal

import pydantic_core
import torch
from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from starlette.requests import ClientDisconnect

from firstlight.console import counted, own_version, say, visible
from firstlight.errors import (
    ConfigError,
    InputError,
    MissingDependencyError,
    TokenizerError,
    nearest,
)
from firstlight.files.atomic import unique_keys
from firstlight.generation.answers import AnswerFormat, call_end_ids
from firstlight.generation.chat import require_template_options, template_words
from firstlight.generation.config import SamplingConfig
from firstlight.generation.continuation import Continuation
from firstlight.generation.engine import tokenizer_of, with_model_settings
from firstlight.generation.sampling import require_biased_tokens
from firstlight.generation.structured import Constraint, Grammars, SchemaError
from firstlight.lora.loading import LoadedModel
from firstlight.models import Model
from firstlight.serving.access import ClientGoneError, RequestError, header
from firstlight.serving.config import (
    COMPLETION_TOKENS,
    MAX_BIASES,
    MAX_CHAT_LOGPROBS,
    MAX_CHOICES,
    MAX_LOGPROBS,
    MAX_MESSAGES,
    MAX_NAMES,
    MAX_PARTS,
    MAX_PROMPT_IDS,
    MAX_PROMPTS,
    MAX_STOP_CHARS,
    MAX_STOPS,
    MAX_TOOLS,
    Limits,
)
from firstlight.serving.response import (
    ChatFormat,
    CompletionFormat,
    Echo,
    ResponseFormat,
    TokenTexts,
)
from firstlight.tokenizer.messages import fit_messages, normalize_message

_Text = Annotated[str, Field(max_length=256)]
_TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True, min_length=1)]
_Penalty = Annotated[float, Field(ge=-2, le=2)]
_TokenId = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,8})$")]
_Bias = Annotated[float, Field(ge=-100, le=100)]
_Nothing = Annotated[list[Any], Field(max_length=0)] | None


def _needs(name: str, switch: str) -> dict[str, Any]:
    """Return a JSON Schema rule that allows a value for the field `name` only if the field `switch`
    is true.
    """
    switched = {"properties": {switch: {"const": True}}, "required": [switch]}
    return {"anyOf": [{"properties": {name: {"type": "null"}}}, switched]}


#: JSON Schema rules for messages. A message must satisfy at least one of the two rules: either it
#: is from the assistant, or it has content.
_BY_ASSISTANT: dict[str, Any] = {"properties": {"role": {"const": "assistant"}}}
_WITH_CONTENT: dict[str, Any] = {
    "properties": {"content": {"not": {"type": "null"}}},
    "required": ["content"],
}
#: JSON Schema of a tool call, excluding its properties.
_CALL_SCHEMA = {
    "type": "object",
    "required": ["name", "arguments"],
    "additionalProperties": False,
}

# The docstrings of the classes below appear as descriptions in the OpenAPI document.


class _Body(BaseModel):
    model_config = ConfigDict(
        extra="allow", strict=True, allow_inf_nan=False, protected_namespaces=()
    )

    def ignored(self) -> Iterator[str]:
        """Yield the names of fields that were set but have no effect."""
        yield from (name for name, value in (self.model_extra or {}).items() if value)
        for name in self.model_fields_set:
            value = getattr(self, name)
            for one in value if isinstance(value, list) else [value]:
                if isinstance(one, _Body):
                    yield from (f"{name}.{inner}" for inner in one.ignored())


class StreamOptions(_Body):
    """The value of `stream_options`.

    Attributes:
        include_usage: send an additional chunk with the token counts at the end.
        include_obfuscation: no effect; chunks are not padded.
    """

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class _Format(_Body):
    # Unknown keys are rejected, because they might be requirements that the server does not
    # enforce.
    model_config = ConfigDict(extra="forbid")


class PlainFormat(_Format):
    """A `response_format` without a schema.

    Attributes:
        type: "text" for any text, "json_object" for any JSON object.
    """

    type: Literal["text", "json_object"]


class NamedSchema(_Format):
    """The schema of a `response_format`.

    Attributes:
        name, description: no effect.
        schema_: JSON Schema; None allows any object.
        strict: no effect; the schema is always enforced.
    """

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class SchemaFormat(_Format):
    """A `response_format` with a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


class UnsupportedFields(_Body):
    """OpenAI fields that are not supported. Only values that would not change the response are
    accepted.
    """

    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None
    functions: _Nothing = None
    function_call: Literal["none", "auto"] | None = None
    modalities: Annotated[list[Literal["text"]], Field(min_length=1, max_length=1)] | None = None
    audio: None = None
    web_search_options: None = None
    moderation: None = None


class GenerationRequest(UnsupportedFields):
    """Fields that completion requests and chat requests have in common.

    Attributes:
        model: optional name of the model, as returned by `/v1/models`.
        stream: send chunks as server-sent events while the answer is generated.
        stream_options: options of a stream.
        max_tokens: maximum number of new tokens per choice; also limited by the context.
        n: number of choices per prompt, with the seeds `seed`, `seed + 1`, ...
        temperature: divisor of the logits; 0 always chooses the most likely token.
        top_p: see `SamplingConfig`.
        top_k, min_p, repetition_penalty: see `SamplingConfig`; OpenAI does not have these fields.
        stop: strings that end an answer; the answer does not include them.
        seed: random seed; the same seed gives the same answer.
        frequency_penalty, presence_penalty: see `SamplingConfig`.
        logit_bias: mapping from token id to a number that is added to the token's logit.
        response_format: request for JSON, with or without a schema.
        user ... prompt_cache_retention: OpenAI's fields that do not change the answer; they are
            accepted but have no effect.
    """

    model: _Text | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    stop: (
        Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
        | Annotated[
            list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]],
            Field(max_length=MAX_STOPS),
        ]
        | None
    ) = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    frequency_penalty: _Penalty | None = None
    presence_penalty: _Penalty | None = None
    logit_bias: Annotated[dict[_TokenId, _Bias], Field(max_length=MAX_BIASES)] | None = None
    response_format: Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")] | None = (
        None
    )
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def schema_asked(self) -> dict[str, Any] | None:
        """JSON Schema that the answer must satisfy, or None if any text is allowed."""
        if isinstance(self.response_format, SchemaFormat):
            return self.response_format.json_schema.schema_ or {"type": "object"}
        plain = self.response_format
        return None if plain is None or plain.type == "text" else {"type": "object"}


class CompletionRequest(GenerationRequest):
    """The body of `/v1/completions`.

    Attributes:
        prompt: a string, a list of strings, a list of token ids (control tokens are allowed), or a
            list of lists of token ids.
        max_tokens: see `GenerationRequest`; 0 generates no tokens and is useful with `echo`.
        logprobs: number of most likely tokens to return with their log-probabilities at each
            position, in addition to the log-probability of the chosen token.
        echo: whether each choice begins with the prompt. If `logprobs` is also set, the
            log-probabilities of the prompt's tokens are returned as well.
    """

    model_config = ConfigDict(json_schema_extra={"allOf": [_needs("stream_options", "stream")]})

    max_tokens: Annotated[int, Field(ge=0)] | None = None
    echo: bool | None = None
    prompt: (
        str
        | Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[_TokenIds, Field(max_length=MAX_PROMPT_IDS)]
        | Annotated[list[_TokenIds], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)]
    )
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """The prompts as a list. A single prompt is converted to a list with one element."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        # A list of token ids is a single prompt.
        return [self.prompt] if isinstance(self.prompt[0], int) else self.prompt


class TextPart(_Body):
    """A part of a message's content; only text is supported."""

    type: Literal["text"]
    text: str


class CalledFunction(_Body):
    """The function of a tool call; `arguments` is an object or its JSON text."""

    name: _Text
    arguments: str | dict[str, Any] | None = None


class CalledTool(_Body):
    """A tool call in a message of the assistant."""

    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction


class Message(_Body):
    """One message of a conversation.

    Attributes:
        role: role of the message's author; "developer" is OpenAI's newer name for "system".
        content: a string, or a list of parts whose texts are concatenated; null is allowed only for
            the assistant.
        name: name of the message's author, or of the tool that returned it.
        tool_calls: the assistant's tool calls.
        tool_call_id: id of the call that a tool message answers.
        reasoning_content, reasoning: the assistant's reasoning; clients use both field names.
        id: no effect.
        audio, function_call: empty fields of responses, accepted because clients send them back.
    """

    model_config = ConfigDict(json_schema_extra={"anyOf": [_BY_ASSISTANT, _WITH_CONTENT]})

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        str
        | Annotated[list[TextPart], Field(fail_fast=True, min_length=1, max_length=MAX_PARTS)]
        | None,
        Field(validate_default=True),
    ] = None
    name: str | None = None
    tool_calls: Annotated[list[CalledTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    id: str | None = None
    audio: None = None
    function_call: None = None

    @field_validator("content")
    @classmethod
    def _require_content(cls, content: Any, info: ValidationInfo) -> Any:
        if content is None and info.data.get("role") != "assistant":
            raise ValueError("missing")
        return content

    def plain(self) -> dict[str, Any]:
        """Return the message as a dict with `role` and `content`, in the format expected by
        `tokenizer.messages`.
        """
        content = self.content or ""
        plain = {
            "role": "system" if self.role == "developer" else self.role,
            "content": content if isinstance(content, str) else "".join(p.text for p in content),
            "name": self.name,
            "tool_calls": [call.model_dump() for call in self.tool_calls or ()],
            "tool_call_id": self.tool_call_id,
            "reasoning_content": self.reasoning_content or self.reasoning,
        }
        return normalize_message(plain, writes_calls=False)


class Function(_Body):
    """A tool's function; `parameters` is a JSON Schema of an object."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Body):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function


class ChatRequest(GenerationRequest):
    """The body of `/v1/chat/completions`.

    Attributes:
        messages: the conversation so far.
        max_completion_tokens: OpenAI's newer name for `max_tokens`.
        logprobs: return the log-probabilities of the chosen tokens.
        top_logprobs: number of most likely tokens to return with their log-probabilities at each
            position.
        tools: tools that the model may call, if its chat template supports tools.
        tool_choice: "auto" lets the model decide; "none" hides the tools from the model. With
            "required" or a specific tool, a grammar forces the answer to be a tool call.
        parallel_tool_calls: no effect; a forced answer is a single call.
        reasoning_effort: variable of the chat template; "none" sets `enable_thinking` to false.
        chat_template_kwargs: additional variables of the chat template, such as `enable_thinking`.
        add_generation_prompt: whether to end the prompt with the opening of an assistant message.
            The default is true, unless the last message is continued.
        continue_final_message: true continues the last message, as vLLM does.
    """

    model_config = ConfigDict(
        json_schema_extra={
            "allOf": [
                _needs("stream_options", "stream"),
                _needs("top_logprobs", "logprobs"),
                {
                    "anyOf": [
                        {"properties": {name: {"type": "null"}}}
                        for name in ("max_tokens", "max_completion_tokens")
                    ]
                },
            ]
        }
    )

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_CHAT_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | Tool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Annotated[str, Field(max_length=32)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """The tools to pass to the model, exactly as the client sent them."""
        tools = [] if self.tool_choice == "none" else self.tools or []
        return [tool.model_dump(exclude_unset=True) for tool in tools]

    @property
    def forced_schema(self) -> dict[str, Any] | None:
        """JSON Schema of the tool call that `tool_choice` requires, or None if a call is not
        required.
        """
        if self.tool_choice in (None, "none", "auto"):
            return None
        wanted = self.tool_choice.function.name if isinstance(self.tool_choice, Tool) else None
        functions = [tool.function for tool in self.tools or ()]
        functions = [one for one in functions if wanted in (None, one.name)]
        if not functions:
            named = f" named '{wanted}'" if wanted else ""
            raise _invalid("tool_choice", f"tool_choice needs a tool{named}: add it to tools")
        calls = []
        for number, one in enumerate(functions):
            # References in the schema are relative to its root, but the schema is nested below a
            # new root here. The text that is replaced contains unescaped quotes, so it can't occur
            # inside a JSON string.
            root = f'"$ref": "#/anyOf/{number}/properties/arguments'
            parameters = json.loads(json.dumps(one.parameters or {}).replace('"$ref": "#', root))
            arguments = {"type": "object", **parameters}
            properties = {"name": {"const": one.name}, "arguments": arguments}
            calls.append({**_CALL_SCHEMA, "properties": properties})
        return {"anyOf": calls}


#: An unknown field is rejected as a typo if the similarity between its name and that of a known
#: field is at least this number.
_LIKENESS = 0.9
#: Maximum number of distinct ignored fields that are counted by name.
_MAX_IGNORED = 100
#: Error messages for fields whose pydantic message would be unclear.
_MESSAGES = {
    "prompt": "must be a string, a list of strings, a list of token ids or a list of such lists; "
    f"none may be empty, and at most {MAX_PROMPTS} strings or lists of {MAX_PROMPT_IDS:,} ids are "
    "allowed",
    "stop": f"must be a string or a list of up to {MAX_STOPS} strings of 1 to {MAX_STOP_CHARS} "
    "characters each",
    "content": "must be a string, or a list of parts such as {'type': 'text', 'text': ...}",
    "logit_bias": f"must be an object that maps up to {MAX_BIASES:,} token ids to numbers from "
    "-100 to 100, such as {'50256': -100}",
    "tool_choice": "must be 'none', 'auto', 'required' or a tool, such as "
    "{'type': 'function', 'function': {'name': ...}}",
}


class LimitedRequest(Request):
    """Request with limits on its body. The body is read within the limits of `app.state.service`,
    and then parsed in one of the service's threads.
    """

    async def body(self) -> bytes:
        """Read the body of a JSON request.

        Raises:
            RequestError: with status 408 if the body arrives too slowly, 413 if it is too large, or
                415 if it is not declared as JSON or is compressed.
            ClientGoneError: the client closed the connection.
        """
        if not hasattr(self, "_body"):
            kind = (header(self.scope, b"content-type") or "").partition(";")[0].strip().lower()
            if kind != "application/json":
                message = "the body must be JSON: send Content-Type: application/json"
                raise RequestError(415, message)
            if header(self.scope, b"content-encoding") not in (None, "identity"):
                message = "the body must not be compressed: send it without Content-Encoding"
                raise RequestError(415, message)
            self._body = await self._read(self.app.state.service.options.limits)
        return self._body

    async def _read(self, limits: Limits) -> bytes:
        declared = header(self.scope, b"content-length") or "0"
        _require_size(int(declared) if declared.isdecimal() else 0, limits)
        body = bytearray()
        try:
            async with asyncio.timeout(limits.body_timeout):
                async for piece in self.stream():
                    body += piece
                    _require_size(len(body), limits)
        except ClientDisconnect:
            raise ClientGoneError from None
        except TimeoutError:
            seconds = f"{limits.body_timeout:g} seconds"
            message = f"the body did not arrive within {seconds}: send it again"
            raise RequestError(408, message, code="timeout") from None
        return bytes(body)

    async def json(self) -> Any:
        """Parse and validate the body. Return a model instance, which FastAPI then uses unchanged.

        Raises:
            RequestError: with status 400 if the body is not a valid request, or 413 if it has too
                many keys.
            ClientGoneError: the client closed the connection.
        """
        is_chat = self.url.path == "/v1/chat/completions"
        kind = ChatRequest if is_chat else CompletionRequest
        body = await self.body()
        return await self.app.state.service.in_thread(self, partial(_parse, kind, body))


def _parse(kind: type[GenerationRequest], body: bytes) -> GenerationRequest:
    try:
        # Both parsers are needed. `json` reports duplicate keys and keeps all digits of large
        # integers. It runs first, because its hook limits the number of keys while parsing.
        value = json.loads(body, object_pairs_hook=_object_maker(), parse_float=_number)
        # pydantic's parser limits the nesting depth and rejects NaN and lone surrogates.
        pydantic_core.from_json(body, allow_inf_nan=False, cache_strings="none")
    except (ValueError, RecursionError) as error:
        message = f"the body is not valid JSON: {str(error)[:200]}"
        raise RequestError(400, message, code="invalid_json") from None
    if not isinstance(value, dict):
        raise not_an_object()
    try:
        request = kind.model_validate(value)
    except ValidationError as error:
        raise _invalid_request(error) from None
    for name in request.model_extra or ():
        supported = set(kind.model_fields) - set(UnsupportedFields.model_fields)
        if hint := nearest(name, supported, likeness=_LIKENESS):
            shown = _shortened(name)
            raise _invalid(shown, f"unknown field '{shown}'{hint}", "unknown_parameter")
    return request


def _require_size(size: int, limits: Limits) -> None:
    if size > limits.max_body_bytes:
        message = f"the body is larger than {limits.max_body_bytes:,} bytes: send a smaller request"
        raise RequestError(413, message, code="body_too_large")


def not_an_object() -> RequestError:
    """Return the error for a request body that is empty or not a JSON object."""
    return RequestError(400, "the body must be a JSON object", code="invalid_json")


def _invalid(param: str, message: str, code: str | None = None) -> RequestError:
    return RequestError(400, message, param=param, code=code)


def _number(text: str) -> float:
    """Parse a JSON number. Floats without a fractional part, such as 2.0, become integers, as in
    JSON Schema.
    """
    value = float(text)
    return int(value) if value.is_integer() else value


def _object_maker() -> Callable[[list[tuple[str, Any]]], dict[str, Any]]:
    """Return a hook for `json.loads` that creates the objects of one request body. The hook raises
    a `RequestError` with status 413 if the body has too many keys, and a `ValueError` if an object
    has duplicate keys.
    """
    count = 0

    def make(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal count
        count += 1 + len(pairs)
        if count > MAX_NAMES:
            message = f"the body has more than {MAX_NAMES:,} names and objects: send fewer"
            raise RequestError(413, message, code="body_too_large")
        return unique_keys(pairs)

    return make


def _invalid_request(error: ValidationError) -> RequestError:
    """Return the error to send for the first problem that was found in an invalid request body."""
    first = error.errors(include_url=False)[0]
    parts = list(first["loc"])
    if parts[0] == "response_format":
        del parts[1:2]  # Drop the name of the pydantic model that `type` selects.
    where = ""
    for part in parts:
        if isinstance(part, int):
            where += f"[{part}]"
        else:
            where += f".{part}" if where else part
        if part in UnsupportedFields.model_fields:
            return _unsupported(where)
        if part in _MESSAGES:
            # The rest of the location lists only the types that pydantic tried.
            return _invalid(where, f"{where} {_MESSAGES[str(part)]}")
    if first["type"] == "extra_forbidden":
        return _unsupported(_shortened(where))
    return _invalid(where, f"{where}: {first['msg']}")


def _unsupported(param: str) -> RequestError:
    message = f"{param} is not supported by this server: omit it"
    return _invalid(param, message, "unsupported_parameter")


def _shortened(name: str) -> str:
    return name if len(name) <= 80 else f"{name[:80]}..."


@dataclass(frozen=True)
class EncodedRequest:
    """A validated and encoded request.

    Attributes:
        texts: the continuations to generate. All choices for the first prompt come first, then all
            choices for the second prompt, and so on.
        response: object that writes the response.
    """

    texts: list[Continuation]
    response: ResponseFormat


class RequestEncoder:
    """Validates and encodes requests. `encode` can take several seconds, so call it in a separate
    thread.

    Args:
        loaded: a model with a tokenizer.
        name: name of the model, as shown to clients.
        context: maximum number of tokens in a sequence, including prompt and answer.
        capacity: maximum number of sequences that one request can generate.
        template_options: default values for variables of the chat template, which requests can
            override.

    Raises:
        ConfigError: see `require_template_options` and `with_model_settings`.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        name: str,
        *,
        context: int,
        capacity: int,
        template_options: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._loaded, self._template_options = loaded, template_options
        self.name = name
        self.context = context
        self._tokenizer = tokenizer_of(loaded)
        # Check the settings here, so that an invalid value is reported before the first request.
        with_model_settings(SamplingConfig(), loaded, ())
        self._texts = TokenTexts(self._tokenizer)
        self._grammars: Grammars | None = None
        self._making_grammars = threading.Lock()
        self._fingerprint = fingerprint_of(loaded.model)
        self.capacity, self.vocab_size = capacity, loaded.model.config.vocab_size
        self.has_chat = self._tokenizer.chat_template is not None
        self.has_tools = re.search(r"tools\b", self._tokenizer.chat_template or "") is not None
        require_template_options(self._tokenizer, template_options)
        self._ends = loaded.eos_token_ids
        self._chat_ends = (*loaded.chat_end_ids, *call_end_ids(self._tokenizer))
        self._ignored: Counter[str] = Counter()
        self._noting = threading.Lock()

    def encode(self, request: CompletionRequest | ChatRequest) -> EncodedRequest:
        """Encode a request.

        Raises:
            RequestError: the request is invalid.
            ModelError: the weights file has been changed.
        """
        self._loaded.require_unchanged()
        if request.model not in (None, self.name):
            raise RequestError(
                404,
                f"the model '{request.model}' does not exist: this server has '{self.name}'",
                param="model",
                code="model_not_found",
            )
        if request.stream_options is not None and not request.stream:
            raise _invalid("stream_options", "stream_options requires stream: true")
        self._note_ignored(request.ignored())
        param = "messages" if isinstance(request, ChatRequest) else "prompt"
        try:
            if isinstance(request, ChatRequest):
                return self._chat(request)
            return self._completion(request)
        except (InputError, TokenizerError) as error:
            raise _invalid(param, f"{param}: {error}") from None

    def _note_ignored(self, names: Iterable[str]) -> None:
        """Count the ignored fields of a request. For each such field, log the first, tenth,
        hundredth, ... request that contains it.
        """
        with self._noting:
            for name in set(names):
                shown = _shortened(" ".join(visible(name).split()))
                if shown not in self._ignored and len(self._ignored) >= _MAX_IGNORED:
                    shown = "others"
                self._ignored[shown] += 1
                if re.fullmatch("10*", str(self._ignored[shown])):
                    count = counted(self._ignored[shown], "request")
                    say(f"ignored field {shown}: {count} so far")

    def _completion(self, request: CompletionRequest) -> EncodedRequest:
        most = COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
        scored = request.logprobs if request.echo else None
        if most == 0 and scored is None:
            scored = 0
        prompts = request.prompts
        self._require_few(len(prompts), request.n or 1, "prompt")
        for prompt in prompts:
            if not isinstance(prompt, str) and max(prompt) >= self.vocab_size:
                raise _invalid(
                    "prompt",
                    f"prompt contains token id {max(prompt)}, but the model has {self.vocab_size} "
                    f"tokens: send ids from 0 to {self.vocab_size - 1}",
                )
        encode = self._tokenizer.encode_prompt
        texts = self._continuations(
            request,
            [encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts],
            {"max_new_tokens": most, "logprobs": request.logprobs, "prompt_logprobs": scored},
            self._ends,
        )
        echoes = []
        for index, text in enumerate(texts if request.echo else ()):
            prompt = prompts[index // (request.n or 1)]
            shown = prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt)
            echoes.append(Echo(shown, text))
        has_logprobs = request.logprobs is not None
        response = CompletionFormat(**self._format(request, texts, has_logprobs), echoes=echoes)
        return EncodedRequest(texts, response)

    def _chat(self, request: ChatRequest) -> EncodedRequest:
        if not self.has_chat:
            raise _invalid(
                "messages",
                "this model has no chat template and does not support messages: send the text "
                "as prompt to /v1/completions",
                "no_chat_template",
            )
        if request.top_logprobs is not None and not request.logprobs:
            raise _invalid("top_logprobs", "top_logprobs requires logprobs: true")
        most = request.max_completion_tokens
        if None not in (most, request.max_tokens) and most != request.max_tokens:
            message = "max_tokens and max_completion_tokens differ: send only one of them"
            raise _invalid("max_tokens", message)
        self._require_few(1, request.n or 1, "messages")
        messages = [message.plain() for message in request.messages]
        if not self.has_tools and any(message.get("tool_calls") for message in messages):
            message = "this model's chat template does not support tool calls: omit them"
            raise _invalid("messages", message, "unsupported_parameter")
        if request.continue_final_message and request.add_generation_prompt:
            message = "continue_final_message continues the last message: omit this field"
            raise _invalid("add_generation_prompt", message)
        options, tools = self._variables(request), request.offered_tools
        unused = options.keys() - template_words(self._tokenizer)
        self._note_ignored(f"chat_template_kwargs.{name}" for name in unused)
        try:
            prompt_ids = self._prompt_ids(request, messages, options)
        except TokenizerError:
            if not any("tool_calls" in message for message in messages):
                raise
            # Some templates, such as DeepSeek's, expect the arguments of a tool call as a string
            # and output it unchanged.
            prompt_ids = self._prompt_ids(request, messages, options, text_arguments=True)
        functions = [tool["function"] for tool in tools]
        schemas = {one["name"]: one.get("parameters") or {} for one in functions}
        forced = None if request.schema_asked is None else "content"
        if request.forced_schema is not None:
            forced = "call"
        answers = AnswerFormat(self._tokenizer, prompt_ids, schemas, forced=forced)
        wanted = {
            "max_new_tokens": most or request.max_tokens or self.context,
            "logprobs": (request.top_logprobs or 0) if request.logprobs else None,
        }
        texts = self._continuations(
            request, [prompt_ids], wanted, self._chat_ends, shown=answers.shown
        )
        has_logprobs = bool(request.logprobs)
        response = ChatFormat(**self._format(request, texts, has_logprobs), answers=answers)
        return EncodedRequest(texts, response)

    def _prompt_ids(
        self,
        request: ChatRequest,
        messages: list[dict[str, Any]],
        options: dict[str, Any],
        *,
        text_arguments: bool = False,
    ) -> list[int]:
        template = self._tokenizer.chat_template or ""
        fitted = fit_messages(messages, template, text_arguments=text_arguments)
        continues = bool(request.continue_final_message)
        prompts = request.add_generation_prompt
        return self._tokenizer.encode_chat(
            fitted,
            add_generation_prompt=not continues if prompts is None else prompts,
            continue_final_message=continues,
            options=options,
        )

    def _variables(self, request: ChatRequest) -> dict[str, Any]:
        """Return the variables for the chat template, except for the messages.

        Raises:
            RequestError: the request contains tools, but the template does not support tools.
        """
        found = {**self._template_options}
        if request.reasoning_effort == "none":
            found["enable_thinking"] = False
        elif request.reasoning_effort is not None:
            found["reasoning_effort"] = request.reasoning_effort
        found |= request.chat_template_kwargs or {}
        if tools := request.offered_tools:
            if not self.has_tools:
                message = "this model's chat template does not support tools: omit tools"
                raise _invalid("tools", message, "unsupported_parameter")
            found["tools"] = tools
            if "xml_tools" in (self._tokenizer.chat_template or ""):  # SmolLM3's variable for tools
                found["xml_tools"] = tools
        return found

    def _format(
        self, request: GenerationRequest, texts: Sequence[Continuation], has_logprobs: bool
    ) -> dict[str, Any]:
        """Return the arguments for creating the request's `ResponseFormat`."""
        options = request.stream_options
        return {
            "model": self.name,
            "fingerprint": self._fingerprint,
            "texts": self._texts if has_logprobs else None,
            "prompt_tokens": sum(len(text.prompt_ids) for text in texts[:: request.n or 1]),
            "choices": len(texts),
            "includes_usage": options is not None and bool(options.include_usage),
        }

    def _continuations(
        self,
        request: GenerationRequest,
        prompts: list[list[int]],
        wanted: dict[str, int | None],
        end_ids: tuple[int, ...],
        shown: Collection[str] = (),
    ) -> list[Continuation]:
        """Create the continuations of all choices, in the order of `EncodedRequest.texts`.

        Args:
            request: the request.
            prompts: token ids of each prompt.
            wanted: values for the fields in `SamplingConfig` that completion and chat requests
                specify in different ways.
            end_ids: ids of the end-of-text tokens.
            shown: see `Continuation`.

        Raises:
            RequestError: a prompt is empty or too long, a bias is set for an id beyond the
                vocabulary, or a schema is not supported.
            TokenizerError: the ids of a prompt can't be decoded.
        """
        param = "messages" if isinstance(request, ChatRequest) else "prompt"
        choices = request.n or 1
        self._require_room(prompts, bool(wanted["max_new_tokens"]), param)
        schema, source = request.schema_asked, "response_format"
        if isinstance(request, ChatRequest) and request.forced_schema is not None:
            schema, source = request.forced_schema, "tools"
        make_constraint = self._constraints(schema, source)
        if schema is not None:
            end_ids = self._chat_ends  # The grammar allows these end tokens.
        settings = {"temperature": 1.0, **self._loaded.sampling, **wanted}
        samplings = [_sampling(request, n, settings) for n in range(choices)]
        try:
            require_biased_tokens(samplings[0], self.vocab_size)
        except ConfigError as error:
            raise _invalid("logit_bias", str(error)) from None
        return [
            Continuation(
                prompt_ids,
                sampling,
                context=self.context,
                eos_token_ids=end_ids,
                tokenizer=self._tokenizer,
                constraint=make_constraint(),
                shown=shown,
            )
            for prompt_ids in prompts
            for sampling in samplings
        ]

    def _require_few(self, prompts: int, choices: int, param: str) -> None:
        """Reject a request that asks for more than `capacity` sequences."""
        if prompts * choices > self.capacity:
            raise _invalid(
                "n" if prompts == 1 else param,
                f"the request needs {prompts * choices} completions, but this server computes at "
                f"most {self.capacity} at a time: request fewer",
            )

    def _require_room(self, prompts: list[list[int]], is_generating: bool, param: str) -> None:
        for prompt_ids in prompts:
            if not prompt_ids:
                raise _invalid(param, f"{param} does not contain any tokens: send a text")
            if len(prompt_ids) + is_generating > self.context:
                raise _invalid(
                    param,
                    f"{param} has {len(prompt_ids)} tokens, but the context for prompt and "
                    f"completion together is {self.context}: shorten it",
                    "context_length_exceeded",
                )

    def _constraints(
        self, schema: dict[str, Any] | None, source: str
    ) -> Callable[[], Constraint | None]:
        """Return a function that creates the constraint for each choice. Without a schema, the
        returned function always returns None.

        Raises:
            RequestError: the schema is not supported, or llguidance is not installed.
        """
        if schema is None:
            return lambda: None
        try:
            with self._making_grammars:
                if self._grammars is None:
                    vocabulary = self._texts.vocabulary(self.vocab_size, self._chat_ends)
                    self._grammars = Grammars(vocabulary)
            grammars = self._grammars
            grammars.constraint(schema)
        except MissingDependencyError as error:
            raise _invalid(source, str(error), "unsupported_parameter") from None
        except SchemaError as error:
            raise schema_error(error, source) from None
        return lambda: grammars.constraint(schema)

    def close(self) -> None:
        """Stop the worker processes that enforce schemas."""
        if self._grammars is not None:
            self._grammars.close()


def fingerprint_of(model: Model) -> str:
    """Return the `system_fingerprint` of a model. It is a short hash of the model's config, the
    versions of firstlight and torch, and a few elements at the start and end of every tensor.

    A few elements of each tensor are sufficient, because training changes all elements. Reading all
    the weights would take as long as loading them.
    """
    found = hashlib.sha256(f"{own_version()} {torch.__version__} {model.config}".encode())
    for name, tensor in model.state_dict().items():
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        for end in (0, -1) if tensor.numel() else ():
            row = tensor
            while row.ndim > 1:
                row = row[end]
            # Convert on the CPU, because Apple's GPUs do not support fp64.
            found.update(row.reshape(-1)[:16].cpu().double().numpy().tobytes())
    return f"fp_{found.hexdigest()[:12]}"


def _sampling(request: GenerationRequest, choice: int, settings: dict[str, Any]) -> SamplingConfig:
    """Return the sampling settings for one choice. Settings that the request does not contain are
    taken from `settings`.
    """
    fields = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    penalties = ("frequency_penalty", "presence_penalty")
    values = {name: getattr(request, name) for name in (*fields, *penalties)}
    chosen = settings | {name: value for name, value in values.items() if value is not None}
    try:
        return SamplingConfig(
            stop=request.stop_texts,
            logit_bias={int(i): bias for i, bias in (request.logit_bias or {}).items()},
            # Take the remainder modulo a power of two, because OpenAI allows negative seeds.
            seed=None if request.seed is None else (request.seed + choice) % 2**63,
            **chosen,
        )
    except ConfigError as error:
        raise RequestError(400, str(error)) from None


def schema_error(error: SchemaError, param: str = "response_format") -> RequestError:
    """Return the error for an unsupported JSON Schema."""
    return _invalid(param, str(error), "unsupported_schema")

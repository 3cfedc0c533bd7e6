"""Request bodies: OpenAI's fields and additional fields, each with its bounds.

A field is implemented, or refused by name. Only fields that do not change an answer are accepted
without effect. `access.py` checks the sizes of headers and body, `processor.py` the length of
prompts and the number of answers, `service.py` the queue and the time.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeVar

import pydantic_core
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from firstlight.errors import nearest
from firstlight.serving.access import RequestError

#: Greatest number of choices of a prompt, prompts of a request, messages of a conversation, parts
#: of a message, stop texts, characters of a stop text, `logprobs` of a completion, `top_logprobs`
#: of a chat, and entries of `logit_bias`.
MAX_CHOICES, MAX_PROMPTS = 8, 64
MAX_MESSAGES, MAX_PARTS = 512, 64
MAX_STOPS, MAX_STOP_CHARS = 4, 256
MAX_LOGPROBS, MAX_CHAT_LOGPROBS = 5, 20
MAX_BIASES = 1024
#: Greatest number of names and objects in the JSON of a body. Validating a body of a million bytes
#: that is nothing but names would hold up the answers of other clients.
MAX_NAMES = 20_000
#: Greatest number of token ids of one prompt in the JSON; `processor.py` has the model's limit.
_MAX_PROMPT_IDS = 200_000


def _whole(value: Any) -> Any:
    """Convert floats without a fraction, such as 2.0, to integers, as JSON Schema does."""
    return int(value) if type(value) is float and value.is_integer() else value


_WHOLE = BeforeValidator(_whole)
_Text = Annotated[str, Field(max_length=256)]
_TokenIds = Annotated[
    list[Annotated[int, Field(ge=0), _WHOLE]], Field(fail_fast=True, min_length=1)
]
_Penalty = Annotated[float, Field(ge=-2, le=2)]
_TokenId = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,8})$")]
_Bias = Annotated[float, Field(ge=-100, le=100)]
_Nothing = Annotated[list[Any], Field(max_length=0)] | None


# The docstrings of these classes are descriptions in the OpenAPI document.


class _Strict(BaseModel):
    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=()
    )


class StreamOptions(_Strict):
    """`stream_options`.

    Attributes:
        include_usage: send one more chunk at the end, with the numbers of tokens.
        include_obfuscation: no effect; chunks are not padded.
    """

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class PlainFormat(_Strict):
    """A `response_format` without a schema.

    Attributes:
        type: "text" is any text, "json_object" any JSON object.
    """

    type: Literal["text", "json_object"]


class NamedSchema(_Strict):
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


class SchemaFormat(_Strict):
    """A `response_format` with a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


class GenerationRequest(_Strict):
    """The fields that completions and chats have in common.

    Attributes:
        model: name of the model, as in the response of `/v1/models`; may be missing.
        stream: send chunks while the answer is generated, as server-sent events.
        stream_options: options of a stream.
        max_tokens: greatest number of new tokens of each choice; also limited by the context.
        n: number of choices of each prompt, whose seeds are `seed`, `seed + 1`, ...
        temperature: divisor of the logits; 0 always chooses the likeliest token.
        top_p: see `SamplingConfig`.
        top_k, min_p, repetition_penalty: see `SamplingConfig`; OpenAI does not have these fields.
        stop: texts that end an answer; they are not part of it.
        seed: random seed; the same seed gives the same answer.
        frequency_penalty, presence_penalty: see `SamplingConfig`.
        logit_bias: token id -> number that is added to its logit.
        response_format: request for JSON, with or without a schema.
        user ... prompt_cache_retention: OpenAI's fields that do not change the answer; they are
            accepted without effect.
    """

    model: _Text | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1), _WHOLE] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES), _WHOLE] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31), _WHOLE] | None = None
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
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63), _WHOLE] | None = None
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
    def includes_usage(self) -> bool:
        """True if a stream ends with the numbers of tokens."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def schema_asked(self) -> dict[str, Any] | None:
        """JSON Schema that the answer must follow; None if any text is allowed."""
        if isinstance(self.response_format, SchemaFormat):
            return self.response_format.json_schema.schema_ or {"type": "object"}
        plain = self.response_format
        return None if plain is None or plain.type == "text" else {"type": "object"}


class CompletionRequest(GenerationRequest):
    """The body of `/v1/completions`.

    Attributes:
        prompt: a text, several texts, a list of token ids (control tokens are allowed), or several
            such lists.
        max_tokens: see `GenerationRequest`; 0 generates no tokens and is for `echo`.
        logprobs: number of likeliest tokens whose log-probabilities are returned for each token,
            besides its own.
        echo: begin each choice with the prompt and, with `logprobs`, its log-probabilities.
    """

    max_tokens: Annotated[int, Field(ge=0), _WHOLE] | None = None
    echo: bool | None = None
    prompt: (
        str
        | Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[_TokenIds, Field(max_length=_MAX_PROMPT_IDS)]
        | Annotated[list[_TokenIds], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)]
    )
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), _WHOLE] | None = None


class TextPart(_Strict):
    """A part of a message's content; only text is supported."""

    type: Literal["text"]
    text: str


class Message(_Strict):
    """One message of a conversation.

    Attributes:
        role: role of the author; "developer" is OpenAI's newer name for "system".
        content: a text, or parts whose texts are concatenated.
        refusal ... tool_calls: empty fields of responses, which clients send back.
    """

    role: Literal["system", "developer", "user", "assistant"]
    content: (
        str | Annotated[list[TextPart], Field(fail_fast=True, min_length=1, max_length=MAX_PARTS)]
    )
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: _Nothing = None
    tool_calls: _Nothing = None

    def plain(self) -> dict[str, str]:
        """The message as a dict with `role` and `content`, as chat templates read it."""
        content = self.content
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatRequest(GenerationRequest):
    """The body of `/v1/chat/completions`.

    Attributes:
        messages: the conversation so far.
        max_completion_tokens: OpenAI's newer name of `max_tokens`.
        logprobs: return the log-probabilities of the chosen tokens.
        top_logprobs: number of likeliest tokens whose log-probabilities are returned, too.
        parallel_tool_calls: no effect, because tools are not supported.
    """

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[int, Field(ge=1), _WHOLE] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_CHAT_LOGPROBS), _WHOLE] | None = None
    parallel_tool_calls: bool | None = None


#: OpenAI's fields that are not supported -> their values without effect, besides null. Other values
#: are refused.
REFUSED: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": (),
    "web_search_options": (),
    "moderation": (),
}


Request = TypeVar("Request", bound=GenerationRequest)

#: Field -> error message, for fields of which pydantic's messages are unclear.
_MESSAGES = {
    "prompt": "must be a text, a list of texts, a list of token ids or a list of such lists, "
    f"none of them empty, at most {MAX_PROMPTS} texts or lists and {_MAX_PROMPT_IDS:,} ids in each",
    "stop": "must be a text or a list of up to 4 texts, of 1 to 256 characters",
    "content": "must be a text, or a list of parts such as {'type': 'text', 'text': ...}",
    "logit_bias": "must be an object of up to 1,024 numbers from -100 to 100 by token id, such as "
    "{'50256': -100}",
    "tool_calls": "is not supported by this server: leave it out",
    "annotations": "is not supported by this server: leave it out",
}


def read_request(kind: type[Request], body: bytes) -> Request:
    """Parse and validate a request's body.

    Raises:
        RequestError: status 400 if the body is not a JSON object, or a field is invalid.
    """
    fields = _json_object(body)
    for name in list(fields):
        if name not in kind.model_fields:
            _require_no_effect(name, fields.pop(name), kind)
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _described(error) from None


def _json_object(body: bytes) -> dict[str, Any]:
    try:
        # Both parsers are needed. json's reports repeated names, and keeps all digits of large
        # integers. It is the first, because it counts names before the others are read.
        value = json.loads(body, object_pairs_hook=_Objects())
        # pydantic's limits the depth, and refuses NaN and lone surrogates.
        pydantic_core.from_json(body, allow_inf_nan=False, cache_strings="none")
    except (ValueError, RecursionError) as error:
        raise RequestError(
            400, f"the body is not valid JSON: {str(error)[:200]}", code="invalid_json"
        ) from None
    if not isinstance(value, dict):
        raise RequestError(400, "the body must be a JSON object", code="invalid_json")
    return value


class _Objects:
    """A hook of `json.loads` that makes the objects of one body.

    Raises:
        RequestError: status 413 if the body has more than `MAX_NAMES` names and objects.
        ValueError: an object has a name twice.
    """

    def __init__(self) -> None:
        self._count = 0

    def __call__(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        self._count += 1 + len(pairs)
        if self._count > MAX_NAMES:
            raise RequestError(
                413,
                f"the body has more than {MAX_NAMES:,} names and objects: send fewer",
                code="body_too_large",
            )
        found = dict(pairs)
        if len(found) != len(pairs):
            seen: set[str] = set()
            for name, _ in pairs:
                if name in seen:
                    raise ValueError(f"{_shortened(name)} is given twice")
                seen.add(name)
        return found


def _require_no_effect(name: str, value: Any, kind: type[GenerationRequest]) -> None:
    """Refuse an unsupported or unknown field, unless its value has no effect (see `REFUSED`)."""
    if name in REFUSED:
        neutral = REFUSED[name]
        if value is None or any(value == one and type(value) is type(one) for one in neutral):
            return
        raise _unsupported(name)
    name = _shortened(name)
    message = f"unknown field '{name}'{nearest(name, kind.model_fields)}"
    raise RequestError(400, message, param=name, code="unknown_parameter")


def _described(error: ValidationError) -> RequestError:
    """The request error for the first problem of a validation error."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ""
    parts = list(first["loc"])
    if parts[0] == "response_format":
        del parts[1:2]  # the model that `type` selects
    for part in parts:
        if isinstance(part, int):
            where += f"[{part}]"
        else:
            where += f".{part}" if where else part
        if part in _MESSAGES:
            # The rest of the location names the types that pydantic tried.
            return RequestError(400, f"{where} {_MESSAGES[str(part)]}", param=where)
    if first["type"] == "extra_forbidden":
        return _unsupported(_shortened(where))
    return RequestError(400, f"{where}: {first['msg']}", param=where)


def _unsupported(param: str) -> RequestError:
    message = f"{param} is not supported by this server: leave it out"
    return RequestError(400, message, param=param, code="unsupported_parameter")


def _shortened(name: str) -> str:
    return name if len(name) <= 80 else f"{name[:80]}..."

"""The OpenAPI document: schemas of requests and responses, for client generators and tests."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field
from pydantic.json_schema import models_json_schema

from firstlight.generation.structured import can_structure
from firstlight.serving.processor import RequestProcessor
from firstlight.serving.request import MAX_CHOICES, MAX_PROMPTS, ChatRequest, CompletionRequest

_REF = "#/components/schemas/{model}"
_STATUSES = {
    400: "The request is invalid, or doesn't fit the context.",
    401: "The API key is missing or wrong.",
    403: "The header Host or Origin is not allowed.",
    404: "There is no such model.",
    408: "The body took too long to arrive.",
    413: "The body is too large.",
    415: "The body is not said to be JSON.",
    429: "The queue is full; see the header Retry-After.",
    500: "The model failed.",
    503: "The server is stopping.",
    504: "The answer took too long.",
}


# Schemas of the responses, for the document only: the server writes plain dicts, which is faster.


class ErrorDetails(BaseModel):
    """The problem of a request."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    """A refused or failed request."""

    error: ErrorDetails


class Health(BaseModel):
    """The server's state."""

    status: Literal["ok"]


class ModelCard(BaseModel):
    """A model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class Models(BaseModel):
    """The list of models."""

    object: Literal["list"]
    data: list[ModelCard]


_Count = Annotated[int, Field(ge=0)]


class Usage(BaseModel):
    """Numbers of tokens."""

    prompt_tokens: _Count
    completion_tokens: _Count
    total_tokens: _Count


class _Choice(BaseModel):
    index: _Count
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"]


class CompletionChoice(_Choice):
    """One continuation of a prompt."""

    text: str


class AssistantMessage(BaseModel):
    """The answer to a conversation."""

    role: Literal["assistant"]
    content: str


class ChatChoice(_Choice):
    """One choice of an answer to a conversation."""

    message: AssistantMessage


class _Generated(BaseModel):
    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage


class Completion(_Generated):
    """The response of `/v1/completions`."""

    object: Literal["text_completion"]
    choices: Annotated[list[CompletionChoice], Field(min_length=1)]


class ChatCompletion(_Generated):
    """The response of `/v1/chat/completions`."""

    object: Literal["chat.completion"]
    choices: Annotated[list[ChatChoice], Field(min_length=1)]


def request_body(kind: type[BaseModel]) -> dict[str, Any]:
    """The entry `requestBody` of a route. FastAPI can't derive it, because the route reads the body
    itself."""
    schema = {"$ref": _REF.format(model=kind.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def responses(
    kind: type[BaseModel] | None, *errors: int, streamed: bool = False
) -> dict[int | str, dict[str, Any]]:
    """The entry `responses` of a route.

    Args:
        kind: schema of a successful response; None is plain text.
        errors: statuses of errors.
        streamed: True if the response can also be server-sent events.
    """
    text = {"type": "string"}
    ok: dict[str, Any] = {"description": "OK"}
    if kind is None:
        ok["content"] = {"text/plain": {"schema": text}}
    else:
        ok["model"] = kind
    if streamed:
        # The data of an event is a chunk as JSON; that of the last event is "[DONE]".
        event = {"type": "object", "required": ["data"], "properties": {"data": text}}
        ok["content"] = {"text/event-stream": {"schema": event}}
    found: dict[int | str, dict[str, Any]] = {200: ok}
    return found | {s: {"description": _STATUSES[s], "model": Error} for s in errors}


def with_schemas(document: dict[str, Any], processor: RequestProcessor) -> dict[str, Any]:
    """Add to FastAPI's document the schemas of the requests, with the model's bounds, and the
    security scheme of the API key; returns the document."""
    kinds: list[Any] = [(CompletionRequest, "validation"), (ChatRequest, "validation")]
    _, schemas = models_json_schema(kinds, ref_template=_REF)
    definitions = schemas["$defs"]
    for name in ("CompletionRequest", "ChatRequest"):
        _state_bounds(definitions[name], processor)
    if not processor.has_chat:
        del document["paths"]["/v1/chat/completions"]
    for methods in document["paths"].values():
        for route in methods.values():
            route["responses"].pop("422", None)  # FastAPI's status; this server responds with 400
    components = document["components"]
    for name in ("HTTPValidationError", "ValidationError"):
        components["schemas"].pop(name, None)
    components["schemas"] |= definitions
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{"key": []}, {}]
    return document


def _state_bounds(schema: dict[str, Any], processor: RequestProcessor) -> None:
    """Add to a request's schema the bounds that depend on the model, and rules between fields."""
    fields = schema["properties"]
    fields["model"] = {"enum": [processor.name, None]}
    if not can_structure():
        text = {"type": "object", "properties": {"type": {"const": "text"}}, "required": ["type"]}
        fields["response_format"] = {
            "anyOf": [{**text, "additionalProperties": False}, {"type": "null"}]
        }
    for one in fields["response_format"]["anyOf"]:
        # Without the discriminator: two of its values have the same schema, which client generators
        # reject.
        one.pop("discriminator", None)
    (bias,) = (one for one in fields["logit_bias"]["anyOf"] if one["type"] == "object")
    bias["propertyNames"] = {"pattern": up_to_pattern(processor.vocab_size - 1)}
    rules = [_either("stream_options", {"stream": {"const": True}})]
    if "messages" in fields:
        rules.append(_either("top_logprobs", {"logprobs": {"const": True}}))
        rules.append(_either("max_tokens", {"max_completion_tokens": {"type": "null"}}, ()))
        fields["n"]["anyOf"][0]["maximum"] = min(MAX_CHOICES, processor.capacity)
    else:
        _bound_ids(fields["prompt"], processor)
        rules.append({"anyOf": _choices(processor.capacity)})
    schema["allOf"] = rules


def _either(
    name: str, others: dict[str, Any], required: tuple[str, ...] | None = None
) -> dict[str, Any]:
    """A rule: the field `name` is null or missing, or the other fields match their schemas.

    Args:
        name: the field.
        others: schemas of the other fields.
        required: other fields that must be present; None is all.
    """
    needed = list(others if required is None else required)
    absent = {"properties": {name: {"type": "null"}}}
    return {"anyOf": [absent, {"properties": others, "required": needed}]}


def _bound_ids(prompt: dict[str, Any], processor: RequestProcessor) -> None:
    """Bound the token ids of a prompt by the vocabulary, and their number by the context."""
    lists = [one for one in prompt["anyOf"] if one["type"] == "array"]
    lists += [one["items"] for one in lists if one["items"].get("type") == "array"]
    for one in lists:
        if one["items"].get("type") == "integer":
            one["maxItems"] = max(processor.context - 1, 1)
            one["items"]["maximum"] = processor.vocab_size - 1


def _choices(capacity: int) -> list[dict[str, Any]]:
    """Schemas of which `n` and `prompt` must match one, so that prompts times choices are within
    the capacity."""
    found: list[dict[str, Any]] = []
    for count in range(1, min(MAX_CHOICES, capacity) + 1):
        prompts = min(capacity // count, MAX_PROMPTS)
        several = {"type": "array", "items": {"type": ["string", "array"]}, "maxItems": prompts}
        single = {"type": "array", "items": {"type": "integer"}}
        fewer = {"anyOf": [{"type": "string"}, several, single]}
        choices = {"anyOf": [{"type": "integer", "maximum": count}, {"type": "null"}]}
        if found and found[-1]["properties"]["prompt"] == fewer:
            found.pop()
        found.append({"properties": {"n": choices, "prompt": fewer}})
    return found


def up_to_pattern(highest: int) -> str:
    """A regular expression for the decimal integers from 0 to `highest`."""
    digits = str(highest)
    found = ["0"]
    if len(digits) > 1:
        found.append(f"[1-9][0-9]{{0,{len(digits) - 2}}}")
    for index, digit in enumerate(digits):
        least = 1 if index == 0 else 0
        if int(digit) > least:
            rest = len(digits) - index - 1
            found.append(f"{digits[:index]}[{least}-{int(digit) - 1}][0-9]{{{rest}}}")
    return f"^({'|'.join([*found, digits])})$"

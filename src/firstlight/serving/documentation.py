"""The OpenAPI document: what the routes take and give, for programs that make clients and tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from firstlight.serving.schemas import MOST_CHOICES, MOST_PROMPTS, ChatRequest, CompletionRequest

_REF = "#/components/schemas/{model}"
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_STATUSES = {
    "400": "The request can't be meant, or doesn't fit the context.",
    "401": "The API key is missing or wrong.",
    "403": "The header Host or Origin is not allowed.",
    "404": "There is no such model.",
    "408": "The body took too long to arrive.",
    "413": "The body is too large.",
    "415": "The body is not said to be JSON.",
    "429": "The queue is full; see the header Retry-After.",
    "500": "The model failed.",
    "503": "The server is stopping.",
    "504": "The answer took too long.",
}


_TEXT = {"type": "string"}
_USAGE = {
    "type": "object",
    "required": ["prompt_tokens", "completion_tokens", "total_tokens"],
    "properties": {
        name: {"type": "integer", "minimum": 0}
        for name in ("prompt_tokens", "completion_tokens", "total_tokens")
    },
}
_MODEL = {
    "type": "object",
    "required": ["id", "object", "created", "owned_by"],
    "properties": {
        "id": {"type": "string"},
        "object": {"const": "model"},
        "created": {"type": "integer"},
        "owned_by": {"type": "string"},
    },
}


def _answer(kind: str, part: str, content: dict[str, Any]) -> dict[str, Any]:
    """The schema of an answer whose choices have `part`."""
    choice = {
        "type": "object",
        "required": ["index", part, "logprobs", "finish_reason"],
        "properties": {
            "index": {"type": "integer", "minimum": 0},
            part: content,
            "logprobs": {"type": ["object", "null"]},
            "finish_reason": {"enum": ["stop", "length"]},
        },
    }
    return {
        "type": "object",
        "required": ["id", "object", "created", "model", "system_fingerprint", "choices", "usage"],
        "properties": {
            "id": {"type": "string"},
            "object": {"const": kind},
            "created": {"type": "integer"},
            "model": {"type": "string"},
            "system_fingerprint": {"type": "string"},
            "choices": {"type": "array", "minItems": 1, "items": choice},
            "usage": _USAGE,
        },
    }


_MESSAGE = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {"role": {"const": "assistant"}, "content": {"type": "string"}},
}
_ANSWERS = {
    "Error": _ERROR,
    "Health": {"type": "object", "properties": {"status": {"const": "ok"}}},
    "Model": _MODEL,
    "Models": {
        "type": "object",
        "required": ["object", "data"],
        "properties": {"data": {"type": "array", "items": _MODEL}},
    },
    "Completion": _answer("text_completion", "text", {"type": "string"}),
    "ChatCompletion": _answer("chat.completion", "message", _MESSAGE),
}


@dataclass(frozen=True)
class Bounds:
    """What requests to one server keep to.

    Attributes:
        model: its name.
        vocab_size: of the model.
        context: tokens of a text, prompt and answer together.
        capacity: texts at a time.
        chats: whether the model has a chat template.
        structured: whether answers can keep to a JSON Schema.
    """

    model: str
    vocab_size: int
    context: int
    capacity: int
    chats: bool
    structured: bool


def request_body(kind: type[BaseModel]) -> dict[str, Any]:
    """The part of a route's entry that says what its body is."""
    schema = {"$ref": _REF.format(model=kind.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The part of a route's entry that says which refusals there are."""
    content = {"application/json": {"schema": {"$ref": _REF.format(model="Error")}}}
    return {
        status: {"description": _STATUSES[str(status)], "content": content} for status in statuses
    }


def answers(name: str, *, streamed: bool = False) -> dict[int | str, dict[str, Any]]:
    """The part of a route's entry that says what a 200 holds.

    Args:
        name: of its schema; "" is a text.
        streamed: whether it may come as server-sent events.
    """
    content: dict[str, Any] = {"text/plain": {"schema": _TEXT}}
    if name:
        content = {"application/json": {"schema": {"$ref": _REF.format(model=name)}}}
    if streamed:
        # Of one event; its data is a chunk in JSON, and at last "[DONE]".
        event = {"type": "object", "required": ["data"], "properties": {"data": _TEXT}}
        content["text/event-stream"] = {"schema": event}
    return {200: {"description": "OK", "content": content}}


def with_schemas(document: dict[str, Any], bounds: Bounds) -> dict[str, Any]:
    """A document with the schemas that its routes refer to, and how the key is sent."""
    kinds: list[Any] = [(CompletionRequest, "validation"), (ChatRequest, "validation")]
    _, schemas = models_json_schema(kinds, ref_template=_REF)
    definitions = schemas["$defs"]
    for name in ("CompletionRequest", "ChatRequest"):
        _state_bounds(definitions[name], bounds)
    if not bounds.chats:
        del document["paths"]["/v1/chat/completions"]
    for methods in document["paths"].values():
        for route in methods.values():
            route["responses"].pop("422", None)  # FastAPI's own; ours is 400
    components = document.setdefault("components", {})
    components["schemas"] = {**definitions, **_ANSWERS}
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{"key": []}, {}]
    return document


def _state_bounds(schema: dict[str, Any], bounds: Bounds) -> None:
    """Say in a request's schema what depends on the model, and what depends on another field."""
    fields = schema["properties"]
    fields["model"] = {"enum": [bounds.model, None]}
    if not bounds.structured:
        text = {"type": "object", "properties": {"type": {"const": "text"}}, "required": ["type"]}
        fields["response_format"] = {
            "anyOf": [{**text, "additionalProperties": False}, {"type": "null"}]
        }
    for one in fields["response_format"]["anyOf"]:
        # Two types have one schema, which programs that read the document take for an error.
        one.pop("discriminator", None)
    (bias,) = (one for one in fields["logit_bias"]["anyOf"] if one["type"] == "object")
    bias["propertyNames"] = {"pattern": up_to_pattern(bounds.vocab_size - 1)}
    rules = [_either("stream_options", {"stream": {"const": True}})]
    if "messages" in fields:
        rules.append(_either("top_logprobs", {"logprobs": {"const": True}}))
        rules.append(_either("max_tokens", {"max_completion_tokens": {"type": "null"}}, ()))
        fields["n"]["anyOf"][0]["maximum"] = min(MOST_CHOICES, bounds.capacity)
    else:
        _bound_ids(fields["prompt"], bounds)
        rules.append({"anyOf": _choices(bounds.capacity)})
    schema["allOf"] = rules


def _either(
    name: str, others: dict[str, Any], required: tuple[str, ...] | None = None
) -> dict[str, Any]:
    """A field is null or missing, or else the others are so."""
    needed = list(others if required is None else required)
    absent = {"properties": {name: {"type": "null"}}}
    return {"anyOf": [absent, {"properties": others, "required": needed}]}


def _bound_ids(prompt: dict[str, Any], bounds: Bounds) -> None:
    """Token ids are those of the model, and leave room for an answer."""
    lists = [one for one in prompt["anyOf"] if one["type"] == "array"]
    lists += [one["items"] for one in lists if one["items"].get("type") == "array"]
    for one in lists:
        if one["items"].get("type") == "integer":
            one["maxItems"] = max(bounds.context - 1, 1)
            one["items"]["maximum"] = bounds.vocab_size - 1


def _choices(capacity: int) -> list[dict[str, Any]]:
    """As many choices of each prompt as there is room for: with more choices, fewer prompts."""
    found: list[dict[str, Any]] = []
    for count in range(1, min(MOST_CHOICES, capacity) + 1):
        prompts = min(capacity // count, MOST_PROMPTS)
        several = {"type": "array", "items": {"type": ["string", "array"]}, "maxItems": prompts}
        single = {"type": "array", "items": {"type": "integer"}}
        fewer = {"anyOf": [{"type": "string"}, several, single]}
        choices = {"anyOf": [{"type": "integer", "maximum": count}, {"type": "null"}]}
        if found and found[-1]["properties"]["prompt"] == fewer:
            found.pop()
        found.append({"properties": {"n": choices, "prompt": fewer}})
    return found


def up_to_pattern(highest: int) -> str:
    """A regular expression of the decimal numbers from 0 to `highest`."""
    digits = str(highest)
    found = ["0"]
    if len(digits) > 1:
        found.append(f"[1-9][0-9]{{0,{len(digits) - 2}}}")
    for place, digit in enumerate(digits):
        least = 1 if place == 0 else 0
        if int(digit) > least:
            rest = len(digits) - place - 1
            found.append(f"{digits[:place]}[{least}-{int(digit) - 1}][0-9]{{{rest}}}")
    return f"^({'|'.join([*found, digits])})$"

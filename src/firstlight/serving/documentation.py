"""The OpenAPI document: what the routes take and give, for programs that make clients and tests."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from firstlight.serving.schemas import ChatRequest, CompletionRequest

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


def with_schemas(document: dict[str, Any]) -> dict[str, Any]:
    """A document with the schemas that its routes refer to, and how the key is sent."""
    kinds: list[Any] = [(CompletionRequest, "validation"), (ChatRequest, "validation")]
    _, schemas = models_json_schema(kinds, ref_template=_REF)
    for methods in document["paths"].values():
        for route in methods.values():
            route["responses"].pop("422", None)  # FastAPI's own; ours is 400
    components = document.setdefault("components", {})
    components["schemas"] = {**schemas["$defs"], "Error": _ERROR}
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{"key": []}, {}]
    return document

"""From the bytes of a request to what it asks for: JSON that is bounded, and says a thing once."""

from __future__ import annotations

import json
from typing import Any, NoReturn, TypeVar

import pydantic_core
from pydantic import ValidationError

from firstlight.errors import nearest
from firstlight.serving.problems import RequestError, not_supported
from firstlight.serving.schemas import REFUSED, GenerationRequest

Request = TypeVar("Request", bound=GenerationRequest)

#: Fields that may be of several kinds: what they may be, where they are none of it.
_KINDS = {
    "prompt": "must be a text, a list of texts, a list of token ids or a list of such lists, "
    "none of them empty and not more than there may be",
    "stop": "must be a text or a list of up to 4 texts, of 1 to 256 characters",
    "content": "must be a text, or a list of parts such as {'type': 'text', 'text': ...}",
    "logit_bias": "must be an object of up to 1,024 numbers from -100 to 100 by token id, such as "
    "{'50256': -100}",
    "tool_calls": "is not supported by this server: leave it out",
    "annotations": "is not supported by this server: leave it out",
}


def read_request(kind: type[Request], body: bytes) -> Request:
    """The request that a body is.

    Raises:
        RequestError: 400; it is not JSON, or not what a request may say.
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
        # First by a parser that has a limit of depth, and takes no half of a surrogate pair.
        pydantic_core.from_json(body, allow_inf_nan=False, cache_strings="none")
        # Then by one that can be asked about names that come twice, and huge numbers.
        value = json.loads(body, object_pairs_hook=_object, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise RequestError(
            400, f"the body is not valid JSON: {str(error)[:200]}", code="invalid_json"
        ) from None
    if not isinstance(value, dict):
        raise RequestError(400, "the body must be a JSON object", code="invalid_json")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"{_shortened(name)} is given twice")
            seen.add(name)
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _require_no_effect(name: str, value: Any, kind: type[GenerationRequest]) -> None:
    """Refuse a field that isn't read, unless its value asks for nothing."""
    if name in REFUSED:
        neutral = REFUSED[name]
        if value is None or any(value == one and type(value) is type(one) for one in neutral):
            return
        raise not_supported(name)
    name = _shortened(name)
    raise RequestError(
        400,
        f"unknown field '{name}'{nearest(name, kind.model_fields)}",
        param=name,
        code="unknown_parameter",
    )


def _described(error: ValidationError) -> RequestError:
    """The first thing that is wrong."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = ""
    parts = list(first["loc"])
    if parts[0] == "response_format":
        del parts[1:2]  # the kind that `type` names
    for part in parts:
        if isinstance(part, int):
            place += f"[{part}]"
        else:
            place += f".{part}" if place else part
        if part in _KINDS:
            # What follows is the kind that was tried.
            return RequestError(400, f"{place} {_KINDS[str(part)]}", param=place)
    if first["type"] == "extra_forbidden":
        return not_supported(_shortened(place))
    return RequestError(400, f"{place}: {first['msg']}", param=place)


def _shortened(name: str) -> str:
    return name if len(name) <= 80 else f"{name[:80]}..."

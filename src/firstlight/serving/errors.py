"""Errors of requests in OpenAI's format."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

#: `type` of an error by its status; others are "invalid_request_error" below 500.
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}

#: Message of an internal failure; its cause goes to the log alone.
FAILED = "the server failed to answer this; its log says why"


class RequestError(Exception):
    """A request that is refused, or that failed.

    Args:
        status: HTTP status.
        message: problem and remedy, for the client.
        param: the request field that the error is about.
        code: error code for programs.
        headers: additional headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = error_body(status, message, param=param, code=code)
        self.response = json_response(self.body, status, headers)


class ClientGoneError(Exception):
    """The client closed the connection, or stopped reading."""


def error_body(
    status: int, message: str, *, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """The JSON of an error in OpenAI's format."""
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def json_response(
    content: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """A response of plain data as JSON."""
    body = json.dumps(content, ensure_ascii=False).encode()
    return Response(body, status, headers, "application/json")


def new_request_id() -> str:
    """The id of a request, for the header x-request-id and the log."""
    return f"req_{secrets.token_hex(16)}"


def unsupported_schema(message: str) -> RequestError:
    """The error of a JSON Schema that can't be followed."""
    return RequestError(400, message, param="response_format", code="unsupported_schema")

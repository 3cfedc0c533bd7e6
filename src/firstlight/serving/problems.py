"""What can be wrong with a request, in the shape of OpenAI's errors."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

#: `type` of an error by its status; others are "invalid_request_error" below 500.
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}

#: What is said of a failure whose cause is not the client's business.
FAILED = "the server failed to answer this; its log says why"


class RequestError(Exception):
    """A request that is refused, or that failed.

    Args:
        status: HTTP's.
        message: what is wrong and what to do, for the client to see.
        param: the field it is about.
        code: one word for programs.
        headers: of the response.
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
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The JSON that tells of it."""
        return error_body(self.status, self.message, param=self.param, code=self.code)


class ClientGoneError(Exception):
    """Nobody waits for the answer any more."""


def error_body(
    status: int, message: str, *, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """OpenAI's shape of an error."""
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def new_request_id() -> str:
    """The id of a request, for the header x-request-id and the log."""
    return f"req_{secrets.token_hex(16)}"


def too_long(tokens: int, limit: int, param: str) -> RequestError:
    """Of a prompt that leaves no room for an answer."""
    return RequestError(
        400,
        f"{param} has {tokens} tokens, and there is room for {limit}, prompt and answer together: "
        "shorten it",
        param=param,
        code="context_length_exceeded",
    )


def schema_problem(message: str) -> RequestError:
    """Of a JSON Schema that can't be followed."""
    return RequestError(400, message, param="response_format", code="unsupported_schema")


def not_supported(param: str, hint: str = "") -> RequestError:
    """Of a field that would change the answer, and that nothing here does."""
    return RequestError(
        400,
        f"{param} is not supported by this server{hint}: leave it out",
        param=param,
        code="unsupported_parameter",
    )

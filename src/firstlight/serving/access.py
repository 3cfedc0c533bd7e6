"""Checks of a request before it is answered (host, origin, API key, sizes of headers and body), and
the errors of refused requests in OpenAI's format.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from firstlight.serving.config import Limits
from firstlight.serving.loopback import is_loopback

_HOST = re.compile(r"(?P<name>\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::(?P<port>\d{1,5}))?")
_HEADER_NAMES = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~, -]{1,2000}")
#: Names of the local machine in the header Host.
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")

#: Status in the metrics for a request whose client disconnected, as in nginx.
CLIENT_GONE = 499

#: HTTP status -> `type` of the error. For other statuses it is "invalid_request_error" below 500,
#: "server_error" from 500 on.
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}

#: Message to the client for an internal failure, whose cause is only logged.
FAILED = "the server failed to answer this; its log says why"
OUT_OF_MEMORY = "the server has too little memory for this text: ask for fewer max_tokens"


class RequestError(Exception):
    """A request that is refused, or that failed.

    Args:
        status: HTTP status.
        message: problem and remedy, for the client.
        param: field of the request with the problem.
        code: error code for programs.
        headers: additional headers of the response.

    Attributes:
        status: HTTP status.
        body: JSON of the error.
        response: the whole HTTP response.
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
    """The client closed the connection or stopped reading."""


def error_body(
    status: int, message: str, *, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """The JSON of an error in OpenAI's format; arguments as in `RequestError`."""
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def json_response(
    content: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """An HTTP response with `content` as JSON."""
    body = json.dumps(content, ensure_ascii=False).encode()
    return Response(body, status, headers, "application/json")


def new_request_id() -> str:
    """A random id for a request, for the header X-Request-Id and the log."""
    return f"req_{secrets.token_hex(16)}"


def unsupported_schema(message: str) -> RequestError:
    """The error for a JSON Schema that is not supported."""
    return RequestError(400, message, param="response_format", code="unsupported_schema")


def header_values(scope: Scope, name: bytes) -> list[bytes]:
    """All values of a header, which can occur several times; `name` is in lower case."""
    return [value for key, value in scope["headers"] if key == name]


def require_head_size(scope: Scope, limits: Limits) -> None:
    """Refuse a request whose path, query and headers are too long together. uvicorn's own limit has
    an effect only if they arrive in several pieces.

    Raises:
        RequestError: status 431.
    """
    size = len(scope["raw_path"]) + len(scope["query_string"])
    if size + sum(len(k) + len(v) for k, v in scope["headers"]) > limits.max_header_bytes:
        raise RequestError(
            431,
            f"the head of the request is longer than {limits.max_header_bytes:,} bytes: send "
            "shorter headers",
        )


def require_body_size(scope: Scope, limits: Limits) -> None:
    """Refuse a body by its declared size, before any of it is read.

    Raises:
        RequestError: status 413 if the body is too large, 400 if the size is not a number.
    """
    for value in header_values(scope, b"content-length"):
        if not re.fullmatch(rb"\d{1,20}", value):
            raise RequestError(
                400, "the header Content-Length is not a number: send the bytes of the body"
            )
        _require_size(int(value), limits)


def _require_size(size: int, limits: Limits) -> None:
    if size > limits.max_body_bytes:
        raise RequestError(
            413,
            f"the body is larger than {limits.max_body_bytes:,} bytes: send a smaller one",
            code="body_too_large",
        )


async def read_body(scope: Scope, receive: Receive, limits: Limits) -> bytes:
    """Read the body of a JSON request.

    Raises:
        RequestError: status 408 if the body arrives too slowly, 413 if it is too large, 415 if it
            is not declared as JSON or is compressed.
        ClientGoneError: the client closed the connection.
    """
    kinds = header_values(scope, b"content-type")
    kind = kinds[0].partition(b";")[0].strip().lower() if len(kinds) == 1 else b""
    if kind != b"application/json" or header_values(scope, b"content-encoding"):
        raise RequestError(
            415, "the body must be JSON, not compressed: send Content-Type: application/json"
        )
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_timeout):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGoneError
                body += message.get("body", b"")
                _require_size(len(body), limits)
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        raise RequestError(
            408,
            f"the body did not arrive within {limits.body_timeout:g} seconds: send it again",
            code="timeout",
        ) from None


@dataclass(frozen=True)
class Access:
    """The allowed hosts and origins, and the API key, of a server.

    Attributes:
        key_digest: SHA-256 of the API key; None if no key is required.
        hosts: allowed names in the header Host, without a port; None allows any.
        origins: origins (values of the header Origin) of other web pages that may send requests.
    """

    key_digest: bytes | None
    hosts: frozenset[str] | None
    origins: frozenset[str]

    @classmethod
    def of(
        cls,
        host: str,
        key: bytes | None,
        hosts: Iterable[str] = (),
        origins: Iterable[str] = (),
    ) -> Access:
        """Create the access of a server.

        A server at a loopback address is answered only under the names of the local machine, and
        those in `hosts`: an attacker can let the name of a web page resolve to this machine (DNS
        rebinding). Servers at other addresses have an API key.

        Args:
            host: name or address at which the server listens.
            key: API key; None requires none.
            hosts: further allowed names in the header Host. Without any, a server at an address
                other than loopback allows all names.
            origins: allowed origins of other web pages.
        """
        digest = None if key is None else hashlib.sha256(key).digest()
        given = {name.lower() for name in hosts}
        names = {*given, *_LOOPBACK} if given or is_loopback(host) else None
        if names is not None and is_loopback(host) and ":" not in host:
            names.add(host)
        return cls(
            digest,
            None if names is None else frozenset(names),
            frozenset(origin.lower() for origin in origins),
        )

    def require(self, scope: Scope) -> None:
        """Refuse a request without access. /health and CORS preflights need no API key.

        Raises:
            RequestError: status 401 for a missing or wrong key, 403 for host or origin.
        """
        host = self._require_host(header_values(scope, b"host"))
        self._require_origin(header_values(scope, b"origin"), f"{scope['scheme']}://{host}")
        if self.key_digest is not None and scope["path"] != "/health" and not is_preflight(scope):
            self._require_key(header_values(scope, b"authorization"), self.key_digest)

    def _require_host(self, found: list[bytes]) -> str:
        host = found[0].decode("latin-1").lower() if len(found) == 1 else ""
        match = _HOST.fullmatch(host)
        if match is None or (self.hosts is not None and match["name"] not in self.hosts):
            raise RequestError(
                403,
                "this server does not answer to the name in the header Host: use localhost, or "
                "start the server with --allowed-host",
                code="host_not_allowed",
            )
        return host

    def _require_origin(self, found: list[bytes], own: str) -> None:
        if not found:
            return
        origin = found[0].decode("latin-1").lower() if len(found) == 1 else ""
        if origin != own and origin not in self.origins:
            raise RequestError(
                403,
                "web pages of this Origin may not call this server: start it with --allowed-origin",
                code="origin_not_allowed",
            )

    def _require_key(self, found: list[bytes], expected: bytes) -> None:
        scheme, _, key = found[0].partition(b" ") if len(found) == 1 else (b"", b"", b"")
        # Digests have equal lengths, so that the time of the comparison says nothing about the key.
        is_right = hmac.compare_digest(hashlib.sha256(key).digest(), expected)
        if scheme.lower() != b"bearer" or not is_right:
            raise RequestError(
                401,
                "the API key is missing or wrong: send it as Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def foreign_origin(self, scope: Scope) -> bytes | None:
        """The origin of a request, if it is one of `origins`, else None."""
        found = header_values(scope, b"origin")
        is_allowed = len(found) == 1 and found[0].decode("latin-1").lower() in self.origins
        return found[0] if is_allowed else None


def is_preflight(scope: Scope) -> bool:
    """True if a request is a browser's CORS preflight."""
    return scope["method"] == "OPTIONS" and bool(
        header_values(scope, b"access-control-request-method")
    )


class RequestGuard:
    """The outermost ASGI layer of the server: refuses requests that have no access or are too
    large, adds security and CORS headers, and counts requests.

    Args:
        app: application that gets the accepted requests.
        access: allowed hosts and origins, and the API key.
        limits: limits, of which those of headers and of the declared size of the body are used.
        count: callback with path and status of each request.
    """

    def __init__(
        self, app: ASGIApp, access: Access, limits: Limits, count: Callable[[str, int], None]
    ) -> None:
        self.app, self._access, self._count = app, access, count
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        status = CLIENT_GONE
        origin = self._access.foreign_origin(scope)
        request_id = new_request_id()
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *_headers(origin, request_id)]
            await send(message)

        try:
            await self._respond_to(scope)(scope, receive, send_with_headers)
        finally:
            self._count(scope["path"], status)

    def _respond_to(self, scope: Scope) -> ASGIApp:
        """The application that responds: an error, the response to a preflight, or `app`."""
        try:
            require_head_size(scope, self._limits)
            self._access.require(scope)
            require_body_size(scope, self._limits)
        except RequestError as error:
            return error.response
        if is_preflight(scope) and self._access.foreign_origin(scope) is not None:
            return Response(status_code=204, headers=_preflight_headers(scope))
        return self.app


def _headers(origin: bytes | None, request_id: str) -> list[tuple[bytes, bytes]]:
    """Headers that are added to every response; `origin` is that of `Access.foreign_origin`."""
    headers = [(b"x-content-type-options", b"nosniff"), (b"x-request-id", request_id.encode())]
    if origin is not None:
        headers += [
            (b"access-control-allow-origin", origin),
            (b"access-control-expose-headers", b"x-request-id"),
            (b"vary", b"Origin"),
        ]
    return headers


def _preflight_headers(scope: Scope) -> dict[str, str]:
    wanted = header_values(scope, b"access-control-request-headers")
    names = wanted[0] if len(wanted) == 1 and _HEADER_NAMES.fullmatch(wanted[0]) else b""
    return {
        "access-control-allow-methods": "GET, POST",
        "access-control-allow-headers": names.decode() or "authorization, content-type",
        "access-control-max-age": "600",
    }

"""Who may ask, and how much at once: what is looked at before a request is read."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from firstlight.serving.loopback import is_loopback
from firstlight.serving.problems import ClientGoneError, RequestError, new_request_id
from firstlight.serving.replies import error_response
from firstlight.serving.service import Limits

_HOST = re.compile(r"(?P<name>\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::(?P<port>\d{1,5}))?")
_HEADER_NAMES = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~, -]{1,2000}")
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")

#: Of an answer that nobody waited for, in metrics; nginx's number.
CLIENT_GONE = 499


@dataclass(frozen=True)
class Access:
    """Who may ask.

    Attributes:
        key_digest: SHA-256 of the API key; None asks for none.
        hosts: names that requests may be sent to, as in the header Host, without a port; None is
            any.
        origins: of pages elsewhere that may ask, as in the header Origin.
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
        """For a server that listens at `host`.

        A page of a foreign name can have that name lead to this machine (DNS rebinding), so at an
        address of this machine's own only its names are taken; elsewhere there is a key.
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
        """Refuse a request that may not ask.

        Raises:
            RequestError: 401 or 403.
        """
        host = self._require_host(_values(scope, b"host"))
        self._require_origin(_values(scope, b"origin"), host)
        if self.key_digest is not None and scope["path"] != "/health" and not is_preflight(scope):
            self._require_key(_values(scope, b"authorization"))

    def _require_host(self, found: list[bytes]) -> str:
        host = found[0].decode("latin-1").lower() if len(found) == 1 else ""
        match = _HOST.fullmatch(host)
        if match is None or (self.hosts is not None and match["name"] not in self.hosts):
            raise RequestError(
                403,
                "this server is not to be asked under the name in the header Host: use localhost, "
                "or start it with --allowed-host",
                code="host_not_allowed",
            )
        return host

    def _require_origin(self, found: list[bytes], host: str) -> None:
        if not found:
            return
        origin = found[0].decode("latin-1").lower() if len(found) == 1 else ""
        own = origin.partition("://")[2] == host
        if not own and origin not in self.origins:
            raise RequestError(
                403,
                "pages of this Origin may not ask this server: start it with --allowed-origin",
                code="origin_not_allowed",
            )

    def _require_key(self, found: list[bytes]) -> None:
        assert self.key_digest is not None
        scheme, _, key = found[0].partition(b" ") if len(found) == 1 else (b"", b"", b"")
        # Digests are of one length: how long they are compared says nothing about the key.
        right = hmac.compare_digest(hashlib.sha256(key).digest(), self.key_digest)
        if scheme.lower() != b"bearer" or not right:
            raise RequestError(
                401,
                "the API key is missing or wrong: send it as Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def foreign_origin(self, scope: Scope) -> bytes | None:
        """The allowed origin elsewhere that a request comes from, if it does."""
        found = _values(scope, b"origin")
        allowed = len(found) == 1 and found[0].decode("latin-1").lower() in self.origins
        return found[0] if allowed else None


def is_preflight(scope: Scope) -> bool:
    """Whether a browser asks if a page may ask."""
    return scope["method"] == "OPTIONS" and bool(_values(scope, b"access-control-request-method"))


class Guard:
    """The outermost layer of the server: refuses who may not ask and what is too large, adds what
    browsers want to know, and counts.

    Args:
        app: what answers.
        access: who may ask.
        limits: of a request's head, and of a body that says how large it is; of others, see
            `read_body`.
        count: called with path and status of each request.
    """

    def __init__(
        self,
        app: ASGIApp,
        access: Access,
        limits: Limits,
        count: Callable[[str, int], None],
    ) -> None:
        self.app, self._access, self._count = app, access, count
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI has it."""
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

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *_headers(origin, request_id)]
            await send(message)

        try:
            await self._answer(scope, receive, sending)
        finally:
            self._count(scope["path"], status)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            require_short_head(scope, self._limits.max_header_bytes)
            self._access.require(scope)
            require_length(scope, self._limits.max_body_bytes)
        except RequestError as error:
            await error_response(error)(scope, receive, send)
            return
        if is_preflight(scope) and self._access.foreign_origin(scope) is not None:
            headers = _preflight_headers(scope)
            await send({"type": "http.response.start", "status": 204, "headers": headers})
            await send({"type": "http.response.body", "body": b""})
            return
        await self.app(scope, receive, send)


def require_short_head(scope: Scope, most: int) -> None:
    """Refuse a head that is too long; the protocol does so only where it comes in several pieces.

    Raises:
        RequestError: 431.
    """
    size = len(scope["raw_path"]) + len(scope["query_string"])
    if size + sum(len(name) + len(value) for name, value in scope["headers"]) > most:
        raise RequestError(431, f"the head of the request is longer than {most:,} bytes")


def require_length(scope: Scope, most: int) -> None:
    """Refuse a body by the size that it says it has, before any of it is read.

    Raises:
        RequestError: 413, or 400 where it is no number.
    """
    for value in _values(scope, b"content-length"):
        if not re.fullmatch(rb"\d{1,20}", value):
            raise RequestError(400, "the header Content-Length is no number")
        if int(value) > most:
            raise _too_large(most)


async def read_body(scope: Scope, receive: Receive, most: int) -> bytes:
    """The body of a request that says it is JSON.

    Raises:
        RequestError: 413, larger than may be; 415, it doesn't say that it is JSON.
        ClientGoneError: the client went away.
    """
    kinds = _values(scope, b"content-type")
    kind = kinds[0].partition(b";")[0].strip().lower() if len(kinds) == 1 else b""
    if kind != b"application/json" or _values(scope, b"content-encoding"):
        raise RequestError(
            415, "the body must be JSON, not compressed: send Content-Type: application/json"
        )
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        body += message.get("body", b"")
        if len(body) > most:
            raise _too_large(most)
        if not message.get("more_body", False):
            return bytes(body)


def _too_large(most: int) -> RequestError:
    return RequestError(
        413, f"the body is larger than {most:,} bytes: send less", code="body_too_large"
    )


def _values(scope: Scope, name: bytes) -> list[bytes]:
    return [value for key, value in scope["headers"] if key == name]


def _headers(origin: bytes | None, request_id: str) -> list[tuple[bytes, bytes]]:
    """What every response has; `origin`: the allowed one elsewhere that asks, if it does."""
    headers = [(b"x-content-type-options", b"nosniff"), (b"x-request-id", request_id.encode())]
    if origin is not None:
        headers += [
            (b"access-control-allow-origin", origin),
            (b"access-control-expose-headers", b"x-request-id"),
            (b"vary", b"Origin"),
        ]
    return headers


def _preflight_headers(scope: Scope) -> list[tuple[bytes, bytes]]:
    wanted: list[Any] = _values(scope, b"access-control-request-headers")
    names = wanted[0] if len(wanted) == 1 and _HEADER_NAMES.fullmatch(wanted[0]) else b""
    return [
        (b"access-control-allow-methods", b"GET, POST"),
        (b"access-control-allow-headers", names or b"authorization, content-type"),
        (b"access-control-max-age", b"600"),
    ]

"""Limits of requests and connections: sizes, times and numbers, and where each is checked.

`Limits` (`config.py`) are options of the server. A request's head and body are checked here; the
bounds of its fields stand in `request.py`, its tokens are counted by `processor.py`.
`LimitedProtocol` is uvicorn's HTTP connection with the time limits that uvicorn lacks: uvicorn
waits for ever for the head of a request, for a client to read, and for the rest of a body that
nobody wants.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import ClassVar, cast

import h11
from starlette.types import Receive, Scope
from uvicorn.protocols.http.h11_impl import H11Protocol

from firstlight.serving.config import Limits
from firstlight.serving.errors import ClientGoneError, RequestError, error_body, new_request_id

#: The rest of a refused request's body that is read and thrown away: a client that still sends
#: would not see the response if the connection were closed.
_MAX_IGNORED_BYTES = 4 * 2**20
_LINGER_SECONDS = 5.0

_INCOMPLETE_REQUEST = (h11.IDLE, h11.SEND_BODY, h11.ERROR)


def header_values(scope: Scope, name: bytes) -> list[bytes]:
    """All values of a header, which a client may send several times."""
    return [value for key, value in scope["headers"] if key == name]


def require_head_size(scope: Scope, limits: Limits) -> None:
    """Refuse a head that is too long; uvicorn does so only if it arrives in several pieces.

    Raises:
        RequestError: 431.
    """
    size = len(scope["raw_path"]) + len(scope["query_string"])
    if size + sum(len(k) + len(v) for k, v in scope["headers"]) > limits.max_header_bytes:
        raise RequestError(
            431, f"the head of the request is longer than {limits.max_header_bytes:,} bytes"
        )


def require_body_size(scope: Scope, limits: Limits) -> None:
    """Refuse a body by its declared size, before any of it is read.

    Raises:
        RequestError: 413, it is too large; 400, the size is no number.
    """
    for value in header_values(scope, b"content-length"):
        if not re.fullmatch(rb"\d{1,20}", value):
            raise RequestError(400, "the header Content-Length is no number")
        _require_size(int(value), limits)


def _require_size(size: int, limits: Limits) -> None:
    if size > limits.max_body_bytes:
        raise RequestError(
            413,
            f"the body is larger than {limits.max_body_bytes:,} bytes: send less",
            code="body_too_large",
        )


async def read_body(scope: Scope, receive: Receive, limits: Limits) -> bytes:
    """The body of a JSON request.

    Raises:
        RequestError: 408, the body arrives too slowly; 413, it is too large; 415, it is not
            declared as JSON.
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
            408, f"the body did not arrive within {limits.body_timeout:g} seconds", code="timeout"
        ) from None


class LimitedProtocol(H11Protocol):
    """An HTTP connection with time limits. Errors have OpenAI's shape here, too.

    Attributes:
        limits: limits of all connections of a server; see `protocol_with`.
        waits_since: event loop time since which a complete request is awaited; None while a
            request is answered.
    """

    limits: ClassVar[Limits]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """asyncio calls this when a client has connected."""
        self._deadline: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._phase = ""
        self._ignored_bytes = 0
        self._refused = False
        self.waits_since: float | None = self.loop.time()
        super().connection_made(transport)
        # The application closes a connection that its client does not read from.
        self.app_state = {**self.app_state, "abort": transport.abort}
        if len(self.connections) > self.limits.max_connections and not self._replace_another():
            self._refused = True
            self._write_error(503, "there are too many connections: try again later")
            return
        self._watch()

    def _replace_another(self) -> bool:
        """Close the connection that has waited longest for a request, if there is one."""
        others = [
            (other.waits_since, number, other)
            for number, other in enumerate(cast("set[LimitedProtocol]", self.connections))
            if other is not self and other.waits_since is not None
        ]
        if not others:
            return False
        other = min(others)[2]
        # asyncio reports the closed connection only in its next round, and it must not count
        # until then.
        self.connections.discard(other)
        other.waits_since = None
        other.transport.abort()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio calls this when the connection is closed."""
        self._set_deadline(None)
        self._stop_waiting_for_reader()
        self.waits_since = None
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def data_received(self, data: bytes) -> None:
        """asyncio calls this when bytes have arrived."""
        if self._refused or self.transport.is_closing():
            return
        if self._is_answering():
            # A second request before the first is answered. uvicorn would stop reading and not
            # notice a disconnect, so the connection is closed after the response instead.
            self.cycle.keep_alive = False
            return
        super().data_received(data)
        if self._is_answering():
            if self.conn.trailing_data[0]:
                self.cycle.keep_alive = False
            self.flow.resume_reading()
        if self._phase == "ignored":
            self._ignored_bytes += len(data)
            if self._ignored_bytes > _MAX_IGNORED_BYTES:
                self.transport.abort()
        self._watch()

    def _is_answering(self) -> bool:
        """Whether a complete request has arrived and its response is incomplete."""
        return (
            self.cycle is not None
            and not self.cycle.response_complete
            and self.conn.their_state not in _INCOMPLETE_REQUEST
        )

    def on_response_complete(self) -> None:
        """uvicorn calls this after the last byte of a response."""
        super().on_response_complete()
        if not self.transport.is_closing():
            self._watch()
        else:
            # The client loses what it has not read by then.
            self._set_deadline(self.limits.write_timeout)

    def _watch(self) -> None:
        """Set the deadline of what the connection waits for."""
        seconds = None  # the application has its own time limits for a body and a response
        if self.conn.their_state is h11.IDLE:
            phase, seconds = "head", self.limits.header_timeout
        elif self.conn.their_state is not h11.SEND_BODY:
            phase = "response"
        elif self.conn.our_state is h11.DONE:
            phase, seconds = "ignored", _LINGER_SECONDS
        else:
            phase = "body"
        if phase == self._phase:
            return
        self._phase, self._ignored_bytes = phase, 0
        if phase == "response":
            self.waits_since = None
        elif self.waits_since is None:
            self.waits_since = self.loop.time()
        self._set_deadline(seconds)

    def _set_deadline(self, seconds: float | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = (
            None if seconds is None else self.loop.call_later(seconds, self.transport.abort)
        )

    def shutdown(self) -> None:
        """End: an incomplete request gets no response."""
        if self.waits_since is not None:
            self.transport.abort()
        else:
            super().shutdown()

    def pause_writing(self) -> None:
        """asyncio calls this when the client does not read: the write timeout begins."""
        super().pause_writing()
        self._stop_waiting_for_reader()
        self._unread = self.loop.call_later(self.limits.write_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        """asyncio calls this when the client reads again."""
        super().resume_writing()
        self._stop_waiting_for_reader()

    def _stop_waiting_for_reader(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are no HTTP, or a head that is too long."""
        if self.cycle is not None and self.cycle.response_started:
            self.transport.abort()
            return
        self._write_error(400, "this is not a valid HTTP request, or its head is too long")

    def _write_error(self, status: int, message: str) -> None:
        """Send an error to a client without a complete request, and close the connection."""
        body = json.dumps(error_body(status, message)).encode()
        phrase = {400: "Bad Request", 503: "Service Unavailable"}[status]
        head = (
            f"HTTP/1.1 {status} {phrase}\r\nContent-Type: application/json\r\n"
            f"X-Request-Id: {new_request_id()}\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
        self._set_deadline(_LINGER_SECONDS)


def protocol_with(limits: Limits) -> type[LimitedProtocol]:
    """The connection class of a server with these limits."""
    return type("ServerProtocol", (LimitedProtocol,), {"limits": limits})

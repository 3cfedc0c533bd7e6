"""The HTTP connection: uvicorn's, with limits of time that it doesn't have.

uvicorn waits for ever for the head of a request, for a client to read, and for the rest of a body
that nobody wants; here each of these has its time. Errors have OpenAI's shape here, too.
"""

from __future__ import annotations

import asyncio
import json
from typing import ClassVar, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from firstlight.serving.problems import error_body, new_request_id
from firstlight.serving.service import Limits

#: Of a body that is read and thrown away, since its request was refused before it had come: a
#: client that still sends would not see the answer if the connection were closed.
_MOST_IGNORED_BYTES = 4 * 2**20
_LINGER_SECONDS = 5.0

_REQUEST_IS_NOT_WHOLE = (h11.IDLE, h11.SEND_BODY, h11.ERROR)


class GuardedProtocol(H11Protocol):
    """One connection.

    Attributes:
        limits: of all connections of a server; see `protocol_with`.
        waits_since: the event loop's time since when a request is awaited that has not come as a
            whole; None while one is answered.
    """

    limits: ClassVar[Limits]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """As asyncio has it."""
        self._deadline: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._phase = ""
        self._ignored_bytes = 0
        self._refused = False
        self.waits_since: float | None = self.loop.time()
        super().connection_made(transport)
        # So that the application can close a connection that is not read from.
        self.app_state = {**self.app_state, "abort": transport.abort}
        if len(self.connections) > self.limits.max_connections and not self._replace_another():
            self._refused = True
            self._write_error(503, "there are too many connections: try again later")
            return
        self._watch()

    def _replace_another(self) -> bool:
        """Close the connection that has waited longest for a request, if one does."""
        others = [
            (other.waits_since, number, other)
            for number, other in enumerate(cast("set[GuardedProtocol]", self.connections))
            if other is not self and other.waits_since is not None
        ]
        if not others:
            return False
        other = min(others)[2]
        # It counts no more, though asyncio tells it only in its next round.
        self.connections.discard(other)
        other.waits_since = None
        other.transport.abort()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        """As asyncio has it."""
        self._set_deadline(None)
        self._stop_waiting_for_reader()
        self.waits_since = None
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def data_received(self, data: bytes) -> None:
        """As asyncio has it."""
        if self._refused or self.transport.is_closing():
            return
        if self._is_answering():
            # A second request before the first is answered. uvicorn would stop reading, and not
            # see the client go away: the connection is closed after the answer instead.
            self.cycle.keep_alive = False
            return
        super().data_received(data)
        if self._is_answering():
            if self.conn.trailing_data[0]:
                self.cycle.keep_alive = False
            self.flow.resume_reading()
        if self._phase == "ignored":
            self._ignored_bytes += len(data)
            if self._ignored_bytes > _MOST_IGNORED_BYTES:
                self.transport.abort()
        self._watch()

    def _is_answering(self) -> bool:
        """Whether a request has come as a whole and has no whole answer yet."""
        return (
            self.cycle is not None
            and not self.cycle.response_complete
            and self.conn.their_state not in _REQUEST_IS_NOT_WHOLE
        )

    def on_response_complete(self) -> None:
        """As uvicorn has it."""
        super().on_response_complete()
        if not self.transport.is_closing():
            self._watch()
        else:
            # What the client has not read by then, it doesn't get.
            self._set_deadline(self.limits.write_timeout)

    def _watch(self) -> None:
        """Give what the connection waits for its time."""
        seconds = None  # the application has times for a body and for its answer
        if self.conn.their_state is h11.IDLE:
            phase, seconds = "head", self.limits.header_timeout
        elif self.conn.their_state is not h11.SEND_BODY:
            phase = "answer"
        elif self.conn.our_state is h11.DONE:
            phase, seconds = "ignored", _LINGER_SECONDS
        else:
            phase = "body"
        if phase == self._phase:
            return
        self._phase, self._ignored_bytes = phase, 0
        if phase == "answer":
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
        """The server ends: what has not been asked as a whole is not answered."""
        if self.waits_since is not None:
            self.transport.abort()
        else:
            super().shutdown()

    def pause_writing(self) -> None:
        """The client doesn't read: it has its time."""
        super().pause_writing()
        self._stop_waiting_for_reader()
        self._unread = self.loop.call_later(self.limits.write_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        """The client reads."""
        super().resume_writing()
        self._stop_waiting_for_reader()

    def _stop_waiting_for_reader(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def send_400_response(self, msg: str) -> None:
        """Of what is no HTTP, or has too long a head."""
        if self.cycle is not None and self.cycle.response_started:
            self.transport.abort()
            return
        self._write_error(400, "this is not a valid HTTP request, or its head is too long")

    def _write_error(self, status: int, message: str) -> None:
        """An answer without a request."""
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


def protocol_with(limits: Limits) -> type[GuardedProtocol]:
    """The kind of connection that has these limits."""
    return type("LimitedProtocol", (GuardedProtocol,), {"limits": limits})

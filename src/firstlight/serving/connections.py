"""HTTP connections of clients, with limits of their number and of the time that they may wait for
headers and for a client to read."""

from __future__ import annotations

import asyncio
import json
from http import HTTPStatus
from typing import ClassVar, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from firstlight.serving.access import error_body, new_request_id
from firstlight.serving.config import Limits

#: Limits, in bytes and seconds, of reading and discarding the rest of a refused request's body. If
#: the connection were closed at once, a client that is still sending would not see the response.
_MAX_IGNORED_BYTES = 4 * 2**20
_LINGER_SECONDS = 5.0

#: Seconds until the second probe of a client that has closed its sending side.
_PROBE_SECONDS = 0.05


class LimitedProtocol(H11Protocol):
    """uvicorn's HTTP connection with additional time limits: uvicorn waits without limit for the
    head of a request (its first line and headers), for a client to read, and for the rest of a
    refused request's body. Errors are in OpenAI's format.

    Attributes:
        limits: limits of a server's connections.
        waits_since: event loop time since which the connection waits for a complete request, in
            seconds; None while a request is answered.
    """

    limits: ClassVar[Limits]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Called by asyncio when a client has connected."""
        self._deadline: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._phase = ""
        self._ignored_bytes = 0
        self._refused = False
        self.waits_since: float | None = self.loop.time()
        super().connection_made(transport)
        # With `abort`, the application closes the connection of a client that does not read.
        self.app_state = {**self.app_state, "abort": transport.abort}
        if len(self.connections) > self.limits.max_connections and not self._replace_another():
            self._refused = True
            self._write_error(503, "there are too many connections: try again later")
            return
        self._watch()

    def _replace_another(self) -> bool:
        """Close the connection that has waited longest for a request; return False if none
        waits."""
        others = [
            (other.waits_since, number, other)
            for number, other in enumerate(cast("set[LimitedProtocol]", self.connections))
            if other is not self and other.waits_since is not None
        ]
        if not others:
            return False
        other = min(others)[2]
        # asyncio calls `connection_lost` only in its next iteration; until then, the connection
        # must not count.
        self.connections.discard(other)
        other.waits_since = None
        other.transport.abort()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio when the connection is closed."""
        self._set_deadline(None)
        self._stop_waiting_for_reader()
        self.waits_since = None
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def data_received(self, data: bytes) -> None:
        """Called by asyncio when bytes have arrived."""
        if self._refused or self.transport.is_closing():
            return
        if self._is_answering():
            # A second request before the first is answered (pipelining). uvicorn would stop reading
            # and not notice a disconnect. Here, the connection is closed after the response.
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

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Called by asyncio when the client will send nothing more.

        A client that has only closed its sending side (`nc -N`, some HTTP clients) still gets the
        response to a complete request. One that is gone looks the same, until the operating system
        reports that it cannot be written to: see `_probe`.
        """
        super().eof_received()
        if not self._is_answering():
            return None  # asyncio closes the connection
        self.cycle.keep_alive = False
        self._probe()
        return True

    def _probe(self, delay: float = _PROBE_SECONDS) -> None:
        """Write something without meaning now and then, until the response is complete: writing to
        a client that is gone closes the connection, which ends its texts.

        Args:
            delay: seconds until the next time, which double each time.
        """
        if self.transport.is_closing() or not self._is_answering():
            return
        if self.cycle.response_started:
            # Only server-sent events take time once they have begun; this is a comment there.
            self.transport.write(self.conn.send(h11.Data(data=b":\n\n")) or b"")
        elif self.conn.their_http_version != b"1.0":
            # Interim responses came with HTTP/1.1 (RFC 9110, 15.2).
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self.loop.call_later(delay, self._probe, 2 * delay)

    def _is_answering(self) -> bool:
        """True if a complete request has arrived and its response is not complete."""
        return (
            self.cycle is not None
            and not self.cycle.response_complete
            and self.conn.their_state not in (h11.IDLE, h11.SEND_BODY, h11.ERROR)
        )

    def on_response_complete(self) -> None:
        """Called by uvicorn after the last byte of a response."""
        super().on_response_complete()
        if not self.transport.is_closing():
            self._watch()
        else:
            # The client loses what it has not read within the write timeout.
            self._set_deadline(self.limits.write_timeout)

    def _watch(self) -> None:
        """Set the deadline for what the connection waits for now: a head, a body, the response, or
        the rest of a body to discard."""
        seconds = None  # `read_body` and `Service` limit the time of a body and a response
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
        """Called by uvicorn when the server ends. An incomplete request gets no response."""
        if self.waits_since is not None:
            self.transport.abort()
        else:
            super().shutdown()

    def pause_writing(self) -> None:
        """Called by asyncio when the client does not read; the write timeout begins."""
        super().pause_writing()
        self._stop_waiting_for_reader()
        self._unread = self.loop.call_later(self.limits.write_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        """Called by asyncio when the client reads again."""
        super().resume_writing()
        self._stop_waiting_for_reader()

    def _stop_waiting_for_reader(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn if a request is not valid HTTP, or its head is too long."""
        if self.cycle is not None and self.cycle.response_started:
            self.transport.abort()
            return
        self._write_error(400, "this is not a valid HTTP request, or its head is too long")

    def _write_error(self, status: int, message: str) -> None:
        """Send an error to a client without a complete request, and close the connection."""
        body = json.dumps(error_body(status, message)).encode()
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n"
            f"X-Request-Id: {new_request_id()}\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
        self._set_deadline(_LINGER_SECONDS)

"""Connections that are slow, too many, too large, or not HTTP, on real sockets."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import h11
import pytest
from live import KEY, Live, live
from test_disconnects import content_for, raw_request
from tiny import PATIENCE, WatchedDecoder

from firstlight.serving.config import Limits
from firstlight.serving.scheduler import ScheduledSequence

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def read_answer(connection: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """Read the status, headers and body of one response with a content length."""
    received = b""
    while b"\r\n\r\n" not in received:
        piece = connection.recv(4096)
        assert piece, received
        received += piece
    head, _, body = received.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    while len(body) < int(headers["content-length"]):
        body += connection.recv(4096)
    assert len(body) == int(headers["content-length"])  # nothing follows the response
    return int(status.split()[1]), headers, body


def require_error(connection: socket.socket, status: int) -> None:
    """Read an error in OpenAI's format."""
    found, headers, body = read_answer(connection)
    assert found == status
    assert headers["content-type"] == "application/json"
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


def is_closed(connection: socket.socket) -> bool:
    """Wait until the server has closed the connection."""
    try:
        while connection.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    """Run a server with short timeouts."""
    limits = Limits(header_timeout=0.3, body_timeout=0.3, max_body_bytes=1000)
    with live(limits=limits) as running:
        yield running


def drip(connection: socket.socket, content: bytes) -> bool:
    """Send byte by byte, too slowly for the server's timeout. Return True if the server closed the
    connection.
    """
    connection.settimeout(0.05)
    for place in range(10_000):
        try:
            connection.send(content[place % len(content) :][:1])
            if connection.recv(4096) == b"":
                return True
        except TimeoutError:
            continue
        except (ConnectionResetError, BrokenPipeError):
            return True
    return False


@pytest.mark.parametrize(
    "beginning", [b"", b"GET ", HEALTH[:-2], HEALTH[:-1], b"X", HEALTH + b"GET /h"]
)
def test_connection_without_head_is_closed(server: Live, beginning: bytes) -> None:
    with server.connect() as connection:
        connection.sendall(beginning)
        assert is_closed(connection)


def test_connection_with_slow_head_is_closed(server: Live) -> None:
    with server.connect() as connection:
        connection.sendall(HEALTH[:-2])
        assert drip(connection, b"x: 1\r\n")


@pytest.mark.parametrize(
    "head", [b"Content-Length: 500\r\n\r\n{", b"Transfer-Encoding: chunked\r\n\r\n5\r\n{"]
)
def test_connection_with_missing_body_returns_408(server: Live, head: bytes) -> None:
    with server.connect() as connection:
        connection.sendall(POST + head)
        require_error(connection, 408)


def test_connection_with_slow_unneeded_body_is_answered_and_closed(
    server: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("firstlight.serving.server._LINGER_SECONDS", 0.2)
    with server.connect() as connection:
        connection.sendall(HEALTH[:-2] + b"Content-Length: 900\r\n\r\n")
        assert read_answer(connection)[0] == 200
        assert drip(connection, b"x")


@pytest.mark.parametrize("chunked", [False, True])
def test_connection_oversized_body_is_rejected_and_not_read(
    server: Live, monkeypatch: pytest.MonkeyPatch, chunked: bool
) -> None:
    monkeypatch.setattr("firstlight.serving.server._LINGER_SECONDS", 0.2)
    with server.connect() as connection:
        size = 2**40
        if chunked:
            piece = b"10000\r\n" + b" " * 2**16 + b"\r\n"
            connection.sendall(POST + b"Transfer-Encoding: chunked\r\n\r\n" + piece)
        else:
            piece = b" " * 2**16
            connection.sendall(POST + f"Content-Length: {size}\r\n\r\n".encode())
        require_error(connection, 413)
        with suppress(ConnectionResetError, BrokenPipeError):
            while True:  # until the server closes the connection
                connection.sendall(piece)


def test_connection_rejected_large_body_is_not_read_to_end(
    server: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("firstlight.serving.server._LINGER_SECONDS", PATIENCE)
    monkeypatch.setattr("firstlight.serving.server._LINGER_BYTES", 2**17)
    with server.connect() as connection:
        connection.sendall(POST + b"Content-Length: 65000000\r\n\r\n")
        require_error(connection, 413)
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            connection.sendall(b" " * 65_000_000)


def test_connection_expect_continue_is_answered_before_body(server: Live) -> None:
    with server.connect() as connection:
        expecting = b"Expect: 100-continue\r\n\r\n"
        connection.sendall(POST + b"Content-Length: 5000\r\n" + expecting)
        require_error(connection, 413)
    body = json.dumps(content_for("/v1/completions", max_tokens=1)).encode()
    with server.connect() as connection:
        connection.sendall(POST + f"Content-Length: {len(body)}\r\n".encode() + expecting)
        assert connection.recv(13) == b"HTTP/1.1 100 "
        while connection.recv(1) != b"\n" or connection.recv(2) != b"\r\n":
            pass
        connection.sendall(body)
        assert read_answer(connection)[0] == 200


@pytest.mark.parametrize(
    "content",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"hello\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",  # no Host
        HEALTH[:-2] + b"Host: localhost\r\n\r\n",
        HEALTH[:-2] + b"x: " + b"y" * 70_000 + b"\r\n\r\n",
        HEALTH[:-2] + b"x: y\r\n" * 20_000 + b"\r\n",
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n",
        HEALTH[:-2] + b"bad header\r\n\r\n",
        HEALTH[:-2] + b"Content-Length: -1\r\n\r\n",
        HEALTH[:-2] + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n",
        POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        POST + b"Transfer-Encoding: gzip\r\n\r\n",
    ],
    ids=lambda content: content[:40],
)
def test_connection_invalid_http_or_long_head_is_rejected(server: Live, content: bytes) -> None:
    with server.connect() as connection:
        with suppress(ConnectionResetError, BrokenPipeError):
            connection.sendall(content)
        try:
            received = connection.recv(4096)
        except ConnectionResetError:
            return  # the test sent more than the server reads
        assert received.split()[1] in (b"400", b"403", b"431")
        assert is_closed(connection)


def test_connection_serves_several_requests(server: Live) -> None:
    with server.connect() as connection:
        for _ in range(3):
            connection.sendall(HEALTH)
            assert read_answer(connection)[0] == 200
            content = content_for("/v1/completions", max_tokens=2)
            connection.sendall(raw_request("/v1/completions", content))
            assert read_answer(connection)[0] == 200
            connection.sendall(POST + b"Content-Length: 5000\r\n\r\n" + b" " * 5000)
            require_error(connection, 413)


def test_connection_pipelined_request_is_not_answered(server: Live) -> None:
    with server.connect() as connection:
        request = raw_request("/v1/completions", content_for("/v1/completions", max_tokens=3))
        connection.sendall(request + HEALTH)
        assert read_answer(connection)[0] == 200
        assert connection.recv(4096) == b""


def test_connection_bytes_after_request_are_discarded(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = 0
    plain = h11.Connection.receive_data

    def receive_data(self: h11.Connection, data: bytes) -> None:
        nonlocal kept
        kept += len(data)
        plain(self, data)

    monkeypatch.setattr(h11.Connection, "receive_data", receive_data)
    decoder = WatchedDecoder(held=True)
    with live(decoder) as server, server.connect() as connection:
        content = content_for("/v1/completions", stream=True, max_tokens=9)
        connection.sendall(raw_request("/v1/completions", content))
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        connection.sendall(HEALTH * 100_000)  # more than the system's buffers can hold
        assert kept < 10_000
        decoder.release()
        assert is_closed(connection)


def test_connection_limit_reached_is_reported_to_new_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder = WatchedDecoder(2, held=True)
    with live(decoder, limits=Limits(max_connections=2)) as server, ExitStack() as stack:
        submitted = threading.Semaphore(0)
        plain = server.service.scheduler.submit

        def submit(sequences: Sequence[ScheduledSequence]) -> None:
            plain(sequences)
            submitted.release()

        monkeypatch.setattr(server.service.scheduler, "submit", submit)
        busy = [stack.enter_context(server.connect()) for _ in range(2)]
        for connection in busy:
            connection.sendall(raw_request("/v1/completions", content_for("/v1/completions")))
        for number in range(2):
            assert submitted.acquire(timeout=PATIENCE), (
                f"waited {PATIENCE:g} s for two requests to be submitted; seen last: {number}"
            )
        with server.connect() as other:
            other.sendall(HEALTH)
            assert other.recv(4096).startswith(b"HTTP/1.1 503")
        decoder.release()
        for connection in busy:
            assert read_answer(connection)[0] == 200


def test_connection_limit_closes_longest_idle_connections() -> None:
    with live(limits=Limits(max_connections=3)) as server, ExitStack() as stack:
        used = stack.enter_context(server.connect())
        used.sendall(HEALTH)
        assert read_answer(used)[0] == 200
        waiting = []
        for _ in range(9):
            waiting.append(stack.enter_context(server.connect()))
            waiting[-1].sendall(b"G")
        with server.connect() as other:
            other.sendall(HEALTH)
            assert read_answer(other)[0] == 200
            assert is_closed(used)
            assert all(is_closed(connection) for connection in waiting[:-2])
            for connection in waiting[-2:]:
                connection.sendall(HEALTH[1:])
                assert read_answer(connection)[0] == 200


def test_connection_without_key_body_is_not_read() -> None:
    with live(api_key=KEY) as server, server.connect() as connection:
        connection.sendall(POST + b"Content-Length: 900\r\n\r\n")
        require_error(connection, 401)


@pytest.mark.parametrize("whole", [True, False])
def test_server_shutdown_completes_or_ends_answers_in_bounded_time(whole: bool) -> None:
    decoder = WatchedDecoder(2, held=True)
    options: dict[str, Any] = {"shutdown_timeout": 60 if whole else 0}
    with ExitStack() as stack:
        connection = stack.enter_context(socket.socket())
        with live(decoder, **options) as server:
            connection.settimeout(PATIENCE)
            connection.connect(server.address)
            idle = stack.enter_context(server.connect())
            idle.sendall(HEALTH[:20])
            content = content_for("/v1/completions", stream=True, max_tokens=9, stop=["never"])
            connection.sendall(raw_request("/v1/completions", content))
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
            decoder.allow(1)
            if not whole:
                decoder.before_step = lambda token_ids: wait_for_end(server)
        received = b""
        while piece := connection.recv(4096):
            received += piece
        assert b"data: [DONE]" in received
        assert (b'"finish_reason":"length"' in received) == whole
        assert (b"the server is stopping" in received) != whole
        assert is_closed(idle)


def wait_for_end(server: Live) -> None:
    """Wait until the scheduler has been told to stop."""
    scheduler = server.service.scheduler
    with scheduler._changed:
        assert scheduler._changed.wait_for(lambda: scheduler._stopping, PATIENCE)

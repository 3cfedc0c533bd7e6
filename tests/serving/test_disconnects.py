"""Clients that disconnect or do not read: their requests end, and no resources are leaked."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import random
import re
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest
from live import Direct, Live, Request, live, new_direct, request_for, sample
from tiny import PATIENCE, WatchedDecoder

from firstlight.serving.config import Limits
from firstlight.serving.scheduler import ScheduledSequence
from firstlight.serving.server import LimitedProtocol

PATHS = ("/v1/completions", "/v1/chat/completions")


def content_for(path: str, **fields: Any) -> dict[str, Any]:
    plain: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
    needed = {"prompt": "x"} if path == PATHS[0] else plain
    # Greedy: the token that ends a turn is not sampled by chance.
    return {**needed, "max_tokens": 60, "temperature": 0, **fields}


@contextmanager
def held(sequences: int = 2) -> Iterator[Direct]:
    """Create an application whose decoder waits for the test."""
    app = new_direct(WatchedDecoder(sequences, held=True))
    try:
        yield app
    finally:
        app.close()


async def begun(app: Direct, request: Request, steps: int) -> asyncio.Task[Any]:
    """Start a request, and return it after this many steps."""
    task = asyncio.create_task(app.answer(request))
    app.decoder.allow(steps)
    await asyncio.to_thread(app.decoder.wait_for, lambda: app.decoder.steps == steps)
    return task


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_disconnected_client_costs_at_most_two_more_steps(path: str, stream: bool, n: int) -> None:
    with held() as app:
        request = request_for(path, content_for(path, stream=stream, n=n))

        async def leave() -> None:
            task = await begun(app, request, 5)
            request.gone.set()
            await task

        app.run(leave())
        assert sample(app.service, "firstlight_client_disconnects_total") == 1
        status = "200" if stream else "499"
        assert sample(app.service, "firstlight_requests_total", route=path, status=status) == 1
        app.decoder.release()
        # The decoder is free to run. Once another text is complete, nothing else is left.
        other = app.ask(PATHS[0], content_for(PATHS[0], max_tokens=4))
        assert other.status == 200
        assert app.decoder.steps <= 5 + 2 + 3
        assert app.service.scheduler.running == 0


def test_disconnected_client_leaves_queue() -> None:
    with held(1) as app:
        first, second = (request_for(PATHS[0], content_for(PATHS[0], max_tokens=4)) for _ in "ab")

        async def leave() -> None:
            task = await begun(app, first, 1)
            waiting = asyncio.create_task(app.answer(second))
            while app.service.scheduler.waiting == 0:
                await asyncio.sleep(0)
            second.gone.set()
            await waiting
            assert app.service.scheduler.waiting == 0
            app.decoder.release()
            await task

        app.run(leave())
        assert first.answer.status == 200
        assert len(app.decoder.prompts) == 1


def test_disconnected_client_before_complete_body_starts_nothing() -> None:
    with held() as app:
        request = request_for(PATHS[0], body=[b'{"prompt"'])
        request.body.append(b"")
        plain = request.receive

        async def receive() -> dict[str, Any]:
            message = await plain()
            return {**message, "more_body": True} if message["type"] == "http.request" else message

        request.receive = receive  # type: ignore[method-assign]
        request.gone.set()
        app.run(app.answer(request))
        assert app.decoder.prompts == []
        route = {"route": PATHS[0], "status": "499"}
        assert sample(app.service, "firstlight_requests_total", **route) == 1


def test_disconnect_during_write_ends_texts() -> None:
    with held() as app:
        content = content_for(PATHS[0], stream=True, max_tokens=90)
        request = request_for(PATHS[0], content)

        def fail(body: bytes) -> None:
            raise OSError("broken pipe")

        request.on_body = fail
        with pytest.raises(OSError, match="broken pipe"):
            app.run(app.answer(request))
        app.decoder.release()
        assert app.ask(PATHS[0], content_for(PATHS[0], max_tokens=4)).status == 200
        assert app.decoder.steps <= 2 + 3
        assert app.service.scheduler.running == 0


# On sockets


def raw_request(path: str, content: Any) -> bytes:
    """Return the bytes of a request as a client sends them."""
    body = json.dumps(content).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


@contextmanager
def counting_answers(server: Live, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield a function that waits until this many requests have ended."""
    changed, over = threading.Condition(), 0
    plain = server.service.metrics.requests.labels

    def count(route: str, status: str) -> Any:
        nonlocal over
        with changed:
            over += 1
            changed.notify_all()
        return plain(route, status)

    def wait(requests: int) -> None:
        with changed:
            assert changed.wait_for(lambda: over >= requests, PATIENCE)

    monkeypatch.setattr(server.service.metrics.requests, "labels", count)
    yield wait


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["plain", "pipelining", "pipelining later", "upgrading"])
def test_disconnect_is_detected_while_decoder_works(
    monkeypatch: pytest.MonkeyPatch, stream: bool, kind: str
) -> None:
    decoder = WatchedDecoder(2, held=True)
    with live(decoder) as server, counting_answers(server, monkeypatch) as wait_for_answers:
        connection = server.connect()
        sent = raw_request(PATHS[0], content_for(PATHS[0], stream=stream))
        if kind == "upgrading":
            upgrade = b"\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13"
            sent = sent.replace(b"\r\nContent-Type", upgrade + b"\r\nContent-Type")
        connection.sendall(sent + (sent * 3 if kind == "pipelining" else b""))
        decoder.allow(3)
        decoder.wait_for(lambda: decoder.steps == 3)
        if kind == "pipelining later":
            connection.sendall(sent)
        connection.close()
        wait_for_answers(1)  # with the decoder at work
        decoder.release()
        with server.connect() as other:
            other.sendall(raw_request(PATHS[0], content_for(PATHS[0], max_tokens=4)))
            assert other.recv(100).startswith(b"HTTP/1.1 200")
        assert decoder.steps <= 3 + 2 + 3
        assert len(decoder.prompts) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_half_closed_client_receives_its_answer(stream: bool) -> None:
    decoder = WatchedDecoder(2, held=True)
    with live(decoder) as server, server.connect() as connection:
        content = content_for(PATHS[0], stream=stream, max_tokens=4)
        connection.sendall(raw_request(PATHS[0], content))
        decoder.allow(2)
        decoder.wait_for(lambda: decoder.steps == 2)
        connection.shutdown(socket.SHUT_WR)
        decoder.release()
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    # Bytes that the server wrote to detect a disconnect have no meaning for the client.
    *interim, head, body = answer.replace(b":\n\n", b"").split(
        b"\r\n\r\n", answer.count(b" 100 ") + 1
    )
    assert set(interim) <= {b"HTTP/1.1 100 Continue"}
    assert head.startswith(b"HTTP/1.1 200")
    assert (b"data: [DONE]" in body) if stream else json.loads(body)["choices"]


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give servers small buffers for unread bytes."""
    plain = socket.create_server

    def small(*args: Any, **values: Any) -> socket.socket:
        made = plain(*args, **values)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return made

    monkeypatch.setattr(socket, "create_server", small)


@pytest.mark.usefixtures("small_buffers")
def test_server_shutdown_closes_unread_stream_without_log_errors(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    paused = threading.Event()
    plain = LimitedProtocol.pause_writing

    def pause_writing(self: LimitedProtocol) -> None:
        plain(self)
        paused.set()

    monkeypatch.setattr(LimitedProtocol, "pause_writing", pause_writing)
    with socket.socket() as connection, live(WatchedDecoder(8)) as server:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(server.address)
        content = content_for(PATHS[1], n=8, logprobs=True, top_logprobs=20, stream=True)
        connection.sendall(raw_request(PATHS[1], content))
        assert paused.wait(PATIENCE), f"waited {PATIENCE:g} s for full buffers"
    assert caplog.text == ""


@pytest.mark.usefixtures("small_buffers")
def test_client_with_full_buffers_is_given_time_then_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder = WatchedDecoder(8)
    lost = threading.Event()
    plain_lost = LimitedProtocol.connection_lost

    def connection_lost(self: LimitedProtocol, error: Exception | None) -> None:
        plain_lost(self, error)
        lost.set()

    monkeypatch.setattr(LimitedProtocol, "connection_lost", connection_lost)
    with (
        live(decoder, limits=Limits(write_timeout=0.2)) as server,
        counting_answers(server, monkeypatch) as wait_for_answers,
        socket.socket() as connection,
    ):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(server.address)
        content = content_for(PATHS[1], n=8, logprobs=True, top_logprobs=20)
        # without streaming: half a megabyte at once
        connection.sendall(raw_request(PATHS[1], content))
        wait_for_answers(1)
        assert lost.wait(PATIENCE), f"waited {PATIENCE:g} s for the end of the connection"
        connection.settimeout(PATIENCE)
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := connection.recv(2**16):
                received += piece
        head, _, body = received.partition(b"\r\n\r\n")
        (length,) = re.findall(rb"content-length: (\d+)", head)
        assert len(body) < int(length) // 2


def drop(server: Live, generator: random.Random) -> int:
    """Send requests, read little or nothing, and disconnect. Return the number of requests."""
    path = generator.choice(PATHS)
    content = content_for(path, stream=generator.random() < 0.6, n=generator.randint(1, 3))
    sent = raw_request(path, {**content, "max_tokens": generator.randint(20, 90)})
    connection = server.connect()
    if generator.random() < 0.2:  # before the request is complete
        connection.sendall(sent[: generator.randrange(len(sent))])
        connection.close()
        return 0
    connection.sendall(sent)
    if b'"stream": true' in sent:
        for _ in range(generator.choice((0, 0, 1, 1, 3))):
            connection.recv(400)
    if generator.random() < 0.5:  # with a reset
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
    return 1


def dropped(server: Live, count: int, seed: int) -> None:
    """Disconnect this many clients, four at a time, then check that no resources are left."""

    def some(part: int) -> None:
        generator = random.Random(seed * 100 + part)
        for _ in range(count // 4):
            drop(server, generator)

    threads = [threading.Thread(target=some, args=(part,)) for part in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Disconnected clients come before this one, whatever their state is.
    with server.connect() as last:
        last.sendall(raw_request(PATHS[0], content_for(PATHS[0], max_tokens=3)))
        assert last.recv(2000).startswith(b"HTTP/1.1 200")


def wait_for_nothing(server: Live) -> None:
    """Send requests until the server has no other texts."""
    for _ in range(10_000):
        with server.connect() as connection:
            connection.sendall(raw_request(PATHS[0], content_for(PATHS[0], max_tokens=2)))
            assert connection.recv(2000).startswith(b"HTTP/1.1 ")
        scheduler = server.service.scheduler
        if (scheduler.running, scheduler.waiting) == (0, 0):
            return
    raise AssertionError("texts of clients that went away are still made")


def jobs_left() -> int:
    """Return the number of sequences still referenced in this process."""
    gc.collect()
    return sum(type(one) is ScheduledSequence for one in gc.get_objects())


def test_fifty_dropped_connections_leave_nothing() -> None:
    before = jobs_left()
    with live(WatchedDecoder(4), max_queue=200) as server:
        dropped(server, 50, seed=1)
        wait_for_nothing(server)
        assert len(server.decoder) == 0
        assert server.sample("firstlight_client_disconnects_total") > 5
        assert jobs_left() <= before + 1  # the loop variable


@pytest.mark.slow
def test_thousand_dropped_connections_leave_nothing() -> None:
    before = jobs_left()
    with live(WatchedDecoder(4), max_queue=200) as server:
        dropped(server, 200, seed=2)
        wait_for_nothing(server)
        gc.collect()
        process = psutil.Process()
        memory = process.memory_info().rss
        files = process.num_fds()
        dropped(server, 1000, seed=3)
        wait_for_nothing(server)
        assert len(server.decoder) == 0
        assert server.sample("firstlight_client_disconnects_total") > 100
        assert jobs_left() <= before + 1
        assert process.memory_info().rss - memory < 30e6
        assert process.num_fds() <= files + 8


def test_failed_stream_delivers_unread_text_to_slow_client() -> None:
    def pieces(app: Direct, request: Request) -> list[dict[str, Any]]:
        answer = app.run(asyncio.wait_for(app.answer(request), PATIENCE))
        assert answer.status == 200
        lines = answer.body.decode().split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]

    content = content_for(PATHS[0], stream=True, max_tokens=30, logprobs=0)
    with held() as app:
        app.decoder.release()
        whole = pieces(app, request_for(PATHS[0], content))
        before = app.decoder.steps

        failed = asyncio.Event()

        def fail(token_ids: list[int]) -> None:
            if app.decoder.steps == before + 5:
                app.service.loop.call_soon_threadsafe(failed.set)
                raise RuntimeError("broken")

        app.decoder.before_step = fail
        request = request_for(PATHS[0], content)
        plain_send = request.send

        async def send(message: Any) -> None:
            await failed.wait()  # the first piece is not sent before
            await plain_send(message)

        request.send = send  # type: ignore[method-assign]
        *found, error = pieces(app, request)
    assert error["error"]["type"] == "server_error"
    assert sum(len(piece["choices"][0]["logprobs"]["tokens"]) for piece in found) == 1 + 5
    text = "".join(piece["choices"][0]["text"] for piece in found)
    assert text
    assert "".join(piece["choices"][0]["text"] for piece in whole).startswith(text)

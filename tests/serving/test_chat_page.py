"""The chat page without a browser: access, content security policy, settings, and one answer at a
time.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
from starlette.types import Message, Receive, Scope, Send

from firstlight.errors import ConfigError, MissingDependencyError, ModelError
from firstlight.generation.chat import ChatSession
from firstlight.generation.config import SamplingConfig
from firstlight.serving.access import LoopbackGuard, content_security_policy
from firstlight.serving.chat_page import Address, Answers, changed_settings, require_web

# Access


@pytest.mark.parametrize(
    "headers, fine",
    [
        ({"host": "127.0.0.1:8000"}, True),
        ({"host": "localhost:8000"}, True),
        ({"host": "localhost"}, True),
        ({"host": "127.1.2.3:9"}, True),
        ({"host": "[::1]:8000"}, True),
        ({"host": "localhost:9000", "origin": "http://localhost:9000"}, True),  # a tunnel
        ({"host": "LOCALHOST:8000", "origin": "http://localhost:8000"}, True),
        ({}, False),
        ({"host": ""}, False),
        ({"host": "example.com"}, False),
        ({"host": "example.com:8000"}, False),
        ({"host": "localhost.example.com:8000"}, False),
        ({"host": "127.0.0.1.example.com"}, False),
        ({"host": "127.0.0.1@example.com"}, False),
        ({"host": "192.168.1.7:8000"}, False),
        ({"host": "0.0.0.0:8000"}, False),
        ({"host": "[::1"}, False),
        ({"host": "localhost:8000", "origin": "http://example.com"}, False),
        ({"host": "localhost:8000", "origin": "http://localhost:3000"}, False),
        ({"host": "localhost:8000", "origin": "https://localhost:8000"}, False),
        ({"host": "localhost:8000", "origin": "null"}, False),
        ({"host": "localhost:8000", "origin": ""}, False),
    ],
)
@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_chat_page_answers_only_its_own_page(
    headers: dict[str, str], fine: bool, kind: str
) -> None:
    started = asked(LoopbackGuard(answering("text/plain")), scope_of(kind, **headers))[0]
    assert (started.get("status") != 403) is fine


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "example.com", ""])
def test_chat_page_public_address_raises_config_error(host: str) -> None:
    with pytest.raises(
        ConfigError,
        match=(
            r"has no password protection.*tunnel from other "
            r"machines: ssh -L"
        ),
    ):
        require_web(host, 8000)


def test_chat_page_accepts_loopback_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert require_web("localhost", 0) == Address("127.0.0.1", 0)
    assert require_web("127.0.0.2", 80) == Address("127.0.0.2", 80)
    assert require_web("[::1]", 80) == Address("::1", 80)
    with pytest.raises(ConfigError, match="--port must be between 0 and 65535, not 65536"):
        require_web("localhost", 65536)


def test_chat_page_without_chainlit_names_install_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'firstlight\[chat\]'"):
        require_web("127.0.0.1", 8000)


# Content security policy


def rules_of(policy: str) -> dict[str, list[str]]:
    return {name: values for name, *values in (rule.split() for rule in policy.split("; "))}


def test_chat_page_policy_allows_only_page_and_its_scripts() -> None:
    html = "<script>let a</script><SCRIPT>\nlet b\n</SCRIPT><script src='/x.js'></script>"
    rules = rules_of(content_security_policy("localhost:8000", html))
    assert rules["default-src"] == ["'none'"]
    assert rules["script-src"] == [
        "'self'",
        # printf 'let a' | openssl dgst -sha256 -binary | base64
        "'sha256-IfEXP/8HLuXoAiy0hZVrCAcjcLsZqYFpLOHDGj8enqE='",
        "'sha256-0sbn1EjKBw5DpaRv5zGA4F50hoM4NvD0lMc3IJSQXes='",
    ]
    assert rules["connect-src"] == ["'self'", "ws://localhost:8000"]
    assert rules["img-src"] == ["'self'", "data:", "blob:"]
    assert rules["frame-ancestors"] == ["'none'"]


def test_chat_page_tags_with_external_hosts_are_removed() -> None:
    page = (
        '<link rel="preconnect" href="https://fonts.googleapis.com" />'
        '<link\n  href="https://fonts.googleapis.com/css2?family=Inter"\n  rel="stylesheet"\n/>'
        "<meta property='og:image' content='https://cloud/x.png'><LINK href='//cdn/x.css'>"
        '<link rel="icon" href="/favicon" /><meta name="viewport" content="width=device-width">'
    )
    app = LoopbackGuard(answering("text/html", page.encode()))
    sent = asked(app, scope_of("http", host="localhost:1"))
    assert b"".join(event.get("body", b"") for event in sent).decode() == (
        '<link rel="icon" href="/favicon" /><meta name="viewport" content="width=device-width">'
    )


def asked(app: Any, scope: Scope) -> list[Message]:
    """Return the messages that an ASGI application sends."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError("nothing is received")

    asyncio.run(app(scope, receive, send))
    return sent


def scope_of(kind: str, **headers: str) -> Scope:
    encoded = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scheme = "ws" if kind == "websocket" else "http"
    return {"type": kind, "scheme": scheme, "method": "GET", "path": "/", "headers": encoded}


def answering(content_type: str, *parts: bytes) -> Callable[..., Any]:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.accept"})
            return
        assert "accept-encoding" not in dict(scope["headers"])
        headers = [(b"Content-Type", content_type.encode()), (b"content-length", b"7")]
        headers = [(name.lower(), value) for name, value in headers]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for part in parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    return app


def test_chat_page_is_sent_with_policy_and_length() -> None:
    app = LoopbackGuard(
        answering(
            "text/html; charset=utf-8", b"<link href='//x'><sc", b"ript>a</s", b"cript>\xc3\xa9"
        )
    )
    start, body, *_ = asked(app, scope_of("http", host="localhost:1", accept_encoding="gzip"))
    html = "<script>a</script>é"
    assert body["body"] == html.encode()
    headers = dict(start["headers"])
    assert len(headers) == len(start["headers"])
    assert headers[b"content-length"] == str(len(html.encode())).encode()
    assert headers[b"content-security-policy"].decode() == content_security_policy(
        "localhost:1", html
    )
    assert headers[b"x-content-type-options"] == b"nosniff"


def test_chat_page_other_responses_are_streamed_with_policy() -> None:
    app = LoopbackGuard(answering("application/json", b"<link href='//x'>", b"2"))
    start, *parts = asked(app, scope_of("http", host="localhost:1"))
    assert [part["body"] for part in parts][:2] == [b"<link href='//x'>", b"2"]
    headers = dict(start["headers"])
    assert headers[b"content-length"] == b"7"
    assert b"default-src 'none'" in headers[b"content-security-policy"]


def test_chat_page_foreign_requests_are_rejected_before_page() -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("the page was asked")

    app = LoopbackGuard(never)
    start, body = asked(app, scope_of("http", host="evil.example"))
    assert start["status"] == 403
    assert b"Host" in body["body"]
    scope = scope_of("websocket", host="localhost:1", origin="http://evil.example")
    start, _ = asked(app, scope)
    assert (start["type"], start["status"]) == ("websocket.http.response.start", 403)


# Settings


def test_chat_page_settings_change_only_given_values() -> None:
    before = SamplingConfig(seed=3, min_p=0.1)
    values = {"temperature": 0, "top_k": 7.0, "top_p": "0.5", "max_new_tokens": "9", "seed": 5}
    assert changed_settings(before, values) == SamplingConfig(
        temperature=0.0, top_k=7, top_p=0.5, max_new_tokens=9, seed=3, min_p=0.1
    )
    assert changed_settings(before, {"top_k": None, "top_p": ""}) == before


@pytest.mark.parametrize(
    "values, message",
    [
        ({"temperature": -1}, "temperature must be 0 or above"),
        ({"temperature": float("nan")}, "temperature must be a number, not nan"),
        ({"temperature": "hot"}, "temperature must be a number, not 'hot'"),
        ({"temperature": [1]}, r"temperature must be a number, not \[1\]"),
        ({"top_k": 1.5}, "top_k must be a whole number, not 1.5"),
        ({"top_k": float("inf")}, "top_k must be a whole number, not inf"),
        ({"max_new_tokens": 10**400}, "max_new_tokens must be a whole number, not 10000"),
        ({"top_k": float("nan")}, "top_k must be a whole number, not nan"),
        ({"top_p": 0}, "top_p must be above 0"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
    ],
)
def test_chat_page_invalid_settings_raise_config_error(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        changed_settings(SamplingConfig(), values)


# One answer at a time


class Slow:
    """A session that generates a token whenever the test allows it."""

    def __init__(self, running: list[int]) -> None:
        self.permits = threading.Semaphore(0)
        self.stopped = threading.Event()
        self.asked, self.prepared = threading.Event(), threading.Event()
        self.given = self.tried = 0
        self._running = running

    def answer(self, text: str) -> Iterator[str]:
        if text == "fail at once":
            raise ConfigError("too long")
        if text == "prepare":
            self.asked.set()
            self.prepared.wait()
        self.stopped.clear()
        return self._pieces(text)

    def _pieces(self, text: str) -> Iterator[str]:
        self._running.append(1)
        assert len(self._running) == 1, "two answers at a time"
        try:
            for number in range(1000):
                self.tried += 1
                self.permits.acquire()
                if self.stopped.is_set():
                    return
                if text == "fail":
                    raise ModelError("broken")
                self.given += 1
                yield f"{text}{number}"
        finally:
            self._running.pop()

    def stop(self) -> None:
        self.stopped.set()


def talk(steps: Callable[[Answers, list[Slow]], Any]) -> None:
    """Run a test with two sessions of one model."""

    async def main() -> None:
        running: list[int] = []
        await asyncio.wait_for(steps(Answers(), [Slow(running), Slow(running)]), 60)
        assert running == []

    asyncio.run(main())


def pieces_of(answers: Answers, session: Slow, text: str) -> Any:
    return answers.pieces(cast(ChatSession, session), text)


async def close(pieces: Any, session: Slow) -> None:
    """Close an answer. The token for which its thread waits comes after the request to stop."""
    closing = asyncio.ensure_future(pieces.aclose())
    while not session.stopped.is_set():
        await asyncio.sleep(0)
    session.permits.release()
    await closing


def test_chat_page_streams_pieces_without_blocking_event_loop() -> None:
    async def steps(answers: Answers, sessions: list[Slow]) -> None:
        session = sessions[0]
        pieces = pieces_of(answers, session, "a")
        for number in range(3):
            coming = asyncio.ensure_future(anext(pieces))
            await asyncio.sleep(0)  # other tasks run while the model computes
            assert not coming.done()
            session.permits.release()
            assert await coming == f"a{number}"
            assert answers.busy
        await close(pieces, session)
        assert session.given == 3
        assert not answers.busy

    talk(steps)


def test_chat_page_second_answer_waits_for_first() -> None:
    async def steps(answers: Answers, sessions: list[Slow]) -> None:
        one, other = sessions
        first, second = pieces_of(answers, one, "a"), pieces_of(answers, other, "b")
        one.permits.release()
        assert await anext(first) == "a0"
        other.permits.release()
        coming = asyncio.ensure_future(anext(second))
        one.permits.release()
        assert await anext(first) == "a1"
        assert not coming.done()
        await close(first, one)
        assert await coming == "b0"
        await close(second, other)

    talk(steps)


def reading(answers: Answers, session: Slow, text: str) -> asyncio.Task[None]:
    """Read all pieces of an answer."""

    async def read() -> None:
        async with contextlib.aclosing(pieces_of(answers, session, text)) as pieces:
            async for _ in pieces:
                pass

    return asyncio.create_task(read())


@pytest.mark.parametrize("times", [1, 3])
def test_chat_page_cancelled_answer_releases_model_after_it_stops(times: int) -> None:
    async def steps(answers: Answers, sessions: list[Slow]) -> None:
        one, other = sessions
        one.permits.release()
        task = reading(answers, one, "a")
        while one.tried < 2:  # the answer waits for its second token
            await asyncio.sleep(0)
        for _ in range(times):
            task.cancel()
            for _ in range(20):
                await asyncio.sleep(0)
            assert not task.done()
            assert answers.busy
        assert one.stopped.is_set()
        one.permits.release()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        other.permits.release()
        pieces = pieces_of(answers, other, "b")
        assert await anext(pieces) == "b0"
        await close(pieces, other)

    talk(steps)


def test_chat_page_answer_cancelled_during_preparation_is_not_started() -> None:
    async def steps(answers: Answers, sessions: list[Slow]) -> None:
        session = sessions[0]
        session.permits.release(2000)
        task = reading(answers, session, "prepare")
        while not session.asked.is_set():
            await asyncio.sleep(0)
        task.cancel()
        for _ in range(20):
            await asyncio.sleep(0)
        session.prepared.set()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert session.given == 0

    talk(steps)


@pytest.mark.parametrize("text", ["fail", "fail at once"])
def test_chat_page_failure_is_shown_and_next_answer_succeeds(text: str) -> None:
    async def steps(answers: Answers, sessions: list[Slow]) -> None:
        session, other = sessions
        session.permits.release()
        with pytest.raises((ModelError, ConfigError), match=r"broken|too long"):
            await anext(pieces_of(answers, session, text))
        other.permits.release()
        pieces = pieces_of(answers, other, "a")
        assert await anext(pieces) == "a0"
        await close(pieces, other)

    talk(steps)

"""The server with a tiny model: on its own port in a thread, or without sockets."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlsplit

from starlette.types import ASGIApp
from tiny import PATIENCE, WatchedDecoder, tiny_loaded

from firstlight.lora.loading import LoadedModel
from firstlight.serving.access import Access
from firstlight.serving.config import Limits, ServerOptions, listening_socket, url_for
from firstlight.serving.server import create_app, new_server
from firstlight.serving.service import Service

T = TypeVar("T")
KEY = b"Secret-Key-1"


@dataclass
class Live:
    """A running server.

    Attributes:
        url: the base URL of the server.
        service: the service that handles requests.
        decoder: the decoder that the service uses.
    """

    url: str
    service: Service
    decoder: WatchedDecoder

    @property
    def address(self) -> tuple[str, int]:
        """The address for sockets."""
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        assert parts.port is not None
        return parts.hostname, parts.port

    def connect(self) -> socket.socket:
        """Open a connection with a timeout."""
        return socket.create_connection(self.address, timeout=PATIENCE)

    def sample(self, name: str, **labels: str) -> float:
        """Return the value of a metric in /metrics."""
        return sample(self.service, name, **labels)


def sample(service: Service, name: str, **labels: str) -> float:
    """Return the value of one of a service's metrics, or 0 if it has not been counted yet."""
    return service.metrics.registry.get_sample_value(name, labels) or 0.0


@contextmanager
def live(
    decoder: WatchedDecoder | None = None,
    *,
    loaded: LoadedModel | None = None,
    **options: Any,
) -> Iterator[Live]:
    """Run a server on a free port of this machine, in a thread."""
    decoder = WatchedDecoder() if decoder is None else decoder
    chosen = ServerOptions(**{"port": 0, "model_name": "tiny", "shutdown_timeout": 0, **options})
    service = Service(loaded or tiny_loaded(), chosen, lambda: decoder)
    with listening_socket(chosen.host, chosen.port) as listening:
        service.start()
        ready = threading.Event()
        server = new_server(service, ready.set)
        thread = threading.Thread(target=server.run, args=([listening],))
        url = url_for(listening)
        thread.start()
        try:
            assert ready.wait(PATIENCE), f"waited {PATIENCE:g} s for {url} to be served"
            yield Live(url, service, decoder)
        finally:
            decoder.release()
            server.should_exit = True
            thread.join(PATIENCE)
            service.stop()
            assert not thread.is_alive(), f"waited {PATIENCE:g} s for the end of {url}"


@dataclass
class Answer:
    """A response.

    Attributes:
        status: the HTTP status, or 0 before the response has started.
        headers: the last value for each name.
        body: the part of the body received so far.
        complete: True if the body has ended.
    """

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    complete: bool = False

    @property
    def json(self) -> Any:
        """Parse the body as JSON."""
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """Return the error, which must have OpenAI's format."""
        (error,) = self.json.values()
        assert set(self.json) == {"error"}
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str)
        assert isinstance(error["type"], str)
        for name in ("param", "code"):
            assert error[name] is None or isinstance(error[name], str)
        assert "Traceback" not in error["message"]
        assert "/a/folder" not in error["message"]
        return error  # type: ignore[no-any-return]


@dataclass
class Request:
    """A request sent without sockets.

    Attributes:
        gone: event that the test sets when the client disconnects.
    """

    method: str
    path: str
    headers: list[tuple[bytes, bytes]]
    body: list[bytes]
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    answer: Answer = field(default_factory=Answer)
    on_body: Callable[[bytes], None] = lambda content: None
    state: dict[str, Any] = field(default_factory=dict)

    async def receive(self) -> dict[str, Any]:
        """Receive an ASGI message."""
        if self.body:
            content = self.body.pop(0)
            return {"type": "http.request", "body": content, "more_body": bool(self.body)}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        """Send an ASGI message."""
        if message["type"] == "http.response.start":
            assert self.answer.status == 0
            self.answer.status = message["status"]
            self.answer.headers = {
                name.decode().lower(): value.decode() for name, value in message["headers"]
            }
            return
        assert not self.answer.complete
        self.answer.body += message["body"]
        self.answer.complete = not message.get("more_body", False)
        self.on_body(message["body"])


class Direct:
    """An application called without sockets.

    Attributes:
        service: the service that handles requests.
        decoder: the decoder that the service uses.
    """

    def __init__(self, app: ASGIApp, service: Service, decoder: WatchedDecoder) -> None:
        self._app, self.service, self.decoder = app, service, decoder
        self._runner = asyncio.Runner()
        self.run(self._attach())

    async def _attach(self) -> None:
        self.service.loop = asyncio.get_running_loop()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the application's event loop."""
        return self._runner.run(coroutine)

    def close(self) -> None:
        """Stop the application."""
        self.decoder.release()
        self.service.stop()
        self._runner.close()

    async def answer(self, request: Request) -> Answer:
        """Send a request within the event loop and return the response."""
        path, _, query = request.path.partition("?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": request.method,
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "scheme": "http",
            "query_string": query.encode(),
            "headers": request.headers,
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 8000),
            "state": request.state,
        }
        await self._app(scope, request.receive, request.send)
        return request.answer

    def ask(
        self,
        path: str,
        content: Any = None,
        *,
        method: str | None = None,
        headers: list[tuple[bytes, bytes]] | None = None,
        body: list[bytes] | None = None,
    ) -> Answer:
        """Send a request and wait for the response. `content` is sent as JSON, `body` unchanged."""
        request = request_for(path, content, method=method, headers=headers, body=body)
        return self.run(self.answer(request))


def request_for(
    path: str,
    content: Any = None,
    *,
    method: str | None = None,
    headers: list[tuple[bytes, bytes]] | None = None,
    body: list[bytes] | None = None,
) -> Request:
    """Create a request with JSON, or with other headers and another body."""
    if body is None:
        body = [b"" if content is None else json.dumps(content).encode()]
    if headers is None:
        headers = [(b"host", b"localhost:8000"), (b"content-type", b"application/json")]
    method = method or ("GET" if content is None and body == [b""] else "POST")
    return Request(method, path, headers, body)


def new_direct(
    decoder: WatchedDecoder | None = None,
    *,
    loaded: LoadedModel | None = None,
    access: Access | None = None,
    max_queue: int = 64,
    limits: Limits | None = None,
) -> Direct:
    """Create an application with a tiny model."""
    decoder = WatchedDecoder() if decoder is None else decoder
    options = ServerOptions(model_name="tiny", max_queue=max_queue, limits=limits or Limits())
    service = Service(loaded or tiny_loaded(), options, lambda: decoder)
    service.start()
    app = create_app(service, access or Access("127.0.0.1"), lambda: None)
    return Direct(app, service, decoder)


def events(body: bytes) -> list[Any]:
    """Return the server-sent events of a stream, which must end like OpenAI's streams."""
    parts = body.decode().split("\n\n")
    assert parts.pop() == ""
    assert all(part.startswith("data: ") for part in parts)
    assert parts.pop() == "data: [DONE]"
    return [json.loads(part.removeprefix("data: ")) for part in parts]

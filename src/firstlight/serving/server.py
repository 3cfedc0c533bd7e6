"""HTTP server with OpenAI's routes, time limits for connections and graceful shutdown."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, Literal

import h11
import uvicorn
from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from firstlight.console import say
from firstlight.errors import ConfigError, FirstlightError
from firstlight.generation.batch import BatchDecoder
from firstlight.lora.loading import LoadedModel
from firstlight.serving.access import (
    FAILED,
    Access,
    ClientGoneError,
    Error,
    RequestError,
    RequestGuard,
)
from firstlight.serving.config import (
    BACKLOG,
    MAX_CHOICES,
    Limits,
    ServerOptions,
    listening_socket,
    url_for,
)
from firstlight.serving.request import (
    ChatRequest,
    CompletionRequest,
    EncodedRequest,
    LimitedRequest,
    RequestEncoder,
    not_an_object,
)
from firstlight.serving.response import ChatCompletion, Completion, event
from firstlight.serving.service import Service, stopping

#: The page served at the server's root.
_PAGE = Path(__file__).parent / "page" / "index.html"
_PAGE_HEADERS = {
    # The page loads no external resources and sends requests only to this server.
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
}
_ERRORS = (HTTPException, RequestValidationError, FirstlightError, Exception)
_LAST_EVENT = event(b"[DONE]")

#: Time limit in seconds for reading and discarding the rest of a rejected request's body. If the
#: connection were closed immediately, a client that is still sending would not see the response.
_LINGER_SECONDS = 5.0
#: Maximum number of bytes to discard from a rejected request's body before the connection is
#: closed.
_LINGER_BYTES = 4 * 2**20
#: Time in seconds between the first two probes that check whether a client that has closed its
#: sending side is still connected.
_PROBE_SECONDS = 0.05
#: Delay in seconds during shutdown. The connections of clients that do not read are closed first,
#: and the remaining requests are cancelled after this delay.
_CANCEL_SECONDS = 0.05
#: Number of file descriptors reserved for purposes other than connections.
_OTHER_FILES = 128


# The application


class Health(BaseModel):
    """Health status of the server."""

    status: Literal["ok"] = "ok"


class ModelCard(BaseModel):
    """Description of a model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "firstlight"


class Models(BaseModel):
    """List of models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class _LimitedRoute(APIRoute):
    """Route whose handlers read request bodies within the server's limits."""

    def get_route_handler(self) -> Callable[[Request], Any]:
        handle = super().get_route_handler()

        async def handle_limited(request: Request) -> Response:
            response: Response = await handle(LimitedRequest(request.scope, request.receive))
            return response

        return handle_limited


def create_app(service: Service, access: Access, on_ready: Callable[[], None]) -> ASGIApp:
    """Create the server's ASGI application.

    Args:
        service: the service, already started; it is stopped when the application shuts down.
        access: allowed hosts and origins, and the API key.
        on_ready: callback that is called before the first connection is accepted.
    """

    ending = ThreadPoolExecutor(1)
    ending.submit(int)  # Start the thread now, while there is still enough memory.

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        loop = service.loop = asyncio.get_running_loop()
        on_ready()
        yield
        # Stop the service in a separate thread, because this event loop still has to handle the
        # scheduler's last updates.
        await loop.run_in_executor(ending, service.stop)

    app = FastAPI(
        title="firstlight",
        description="A language model with an OpenAI-compatible API.",
        lifespan=lifespan,
        # FastAPI's documentation pages would load scripts from other hosts.
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        dependencies=[Depends(HTTPBearer(auto_error=False))] if access.needs_key else [],
        responses={"4XX": {"model": Error}, "5XX": {"model": Error}},
        exception_handlers=dict.fromkeys(_ERRORS, _respond_to_error),
    )
    app.state.service = service
    app.router.route_class = _LimitedRoute
    _add_information(app, service)
    _add_generation(app, service)
    paths = {getattr(route, "path", "") for route in app.routes}

    def count(path: str, status: int) -> None:
        # Requests to unknown paths are counted under "other", so that clients can't create an
        # unlimited number of metrics.
        known = path if path in paths else "other"
        route = "/v1/models/{model}" if path.startswith("/v1/models/") else known
        service.metrics.requests.labels(route, str(status)).inc()

    return RequestGuard(app, access, service.options.limits.max_header_bytes, count)


async def _respond_to_error(request: Request, error: Exception) -> Response:
    """Respond to an exception with an error in OpenAI's format."""
    if isinstance(error, RequestError):
        return error.response
    if isinstance(error, RequestValidationError):
        return not_an_object().response  # This occurs only for an empty body.
    if isinstance(error, HTTPException):
        words = {404: "there is no such path", 405: "this path does not support the HTTP method"}
        message = words.get(error.status_code, str(error.detail))
        return RequestError(error.status_code, message, headers=error.headers).response
    if isinstance(error, FirstlightError):
        # Log a `FirstlightError` as a single line, and any other exception with its traceback. The
        # cause is not sent to the client.
        say(f"firstlight: {request.state.request_id}: {error}")
    return RequestError(500, FAILED).response


def _add_information(app: FastAPI, service: Service) -> None:
    card = ModelCard(id=service.options.model_name, created=service.created)

    page = _PAGE.read_bytes()

    # HEAD is also supported, because browsers and monitoring tools use it to check a page.
    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def start() -> Response:
        """Return a page for people who open the server's address in a browser."""
        return Response(page, headers=_PAGE_HEADERS, media_type="text/html")

    @app.get("/v1/models")
    async def models() -> Models:
        """List the server's only model."""
        return Models(data=[card])

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> ModelCard:
        """Describe a model."""
        if model != service.options.model_name:
            raise RequestError(
                404,
                f"this server has no such model: use '{service.options.model_name}'",
                param="model",
                code="model_not_found",
            )
        return card

    @app.get("/health")
    async def health() -> Health:
        """Check that the server can answer requests. An API key is not required."""
        service.require_able()
        return Health()

    text = {"content": {"text/plain": {"schema": {"type": "string"}}}}

    @app.get("/metrics", response_class=Response, responses={200: text})
    async def metrics() -> Response:
        """Return metrics in Prometheus's text format."""
        page = generate_latest(service.metrics.registry)
        return Response(page, headers={"content-type": CONTENT_TYPE_LATEST})


def _add_generation(app: FastAPI, service: Service) -> None:
    # Each event contains a chunk as JSON, except for the last event, which contains "[DONE]".
    data = {"type": "object", "required": ["data"], "properties": {"data": {"type": "string"}}}
    streamed: dict[int | str, Any] = {200: {"content": {"text/event-stream": {"schema": data}}}}

    @app.post("/v1/completions", response_model=Completion, responses=streamed)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Complete one or more prompts."""
        return await _respond(service, body, request)

    @app.post(
        "/v1/chat/completions",
        response_model=ChatCompletion,
        responses=streamed,
        include_in_schema=service.encoder.has_chat,
    )
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer the last message of a conversation."""
        return await _respond(service, body, request)

    make_document = app.openapi

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            schemas = make_document()["components"]["schemas"]
            for kind in (CompletionRequest, ChatRequest):
                if kind.__name__ in schemas:
                    _add_bounds(schemas[kind.__name__]["properties"], service.encoder)
        return make_document()

    app.openapi = document  # type: ignore[method-assign]


def _add_bounds(fields: dict[str, Any], encoder: RequestEncoder) -> None:
    """Add model-dependent limits to the JSON schemas of request fields."""
    fields["model"] = {"enum": [encoder.name, None]}
    fields["n"]["anyOf"][0]["maximum"] = min(MAX_CHOICES, encoder.capacity)
    if "tools" in fields and not encoder.has_tools:
        fields["tools"]["anyOf"][0]["maxItems"] = 0
        fields["tool_choice"] = {"enum": ["none", "auto", None]}
    # Without `additionalProperties`, the schema would accept names that are not token ids.
    fields["logit_bias"]["anyOf"][0]["additionalProperties"] = False
    kinds = fields["prompt"]["anyOf"] if "prompt" in fields else []
    for kind in (*kinds, *(kind.get("items", {}) for kind in kinds)):
        if kind.get("items", {}).get("type") == "integer":
            kind["maxItems"] = max(encoder.context - 1, 1)
            kind["items"]["maximum"] = encoder.vocab_size - 1


async def _respond(
    service: Service, body: CompletionRequest | ChatRequest, request: Request
) -> Response:
    """Encode a request, generate its sequences and respond.

    Raises:
        RequestError, ClientGoneError, ModelError: see `RequestEncoder`, `Service.in_thread` and
            `Service.generate`.
    """
    try:
        encoded = await service.in_thread(request, partial(service.encoder.encode, body))
        updates = service.generate(encoded, request)
        if body.stream:
            # Wait for the first token before starting the response, so that an earlier failure can
            # still be reported with an error status.
            first = encoded.response.events(await anext(updates))
            return EventStream(_events(encoded, first, updates))
        async with aclosing(updates):
            async for items in updates:
                for item in items:
                    encoded.response.add(*item)
    except asyncio.CancelledError:  # See `Server`.
        raise stopping() from None
    return Response(encoded.response.whole(), media_type="application/json")


async def _events(
    encoded: EncodedRequest, first: bytes, updates: AsyncGenerator[Any, None]
) -> AsyncGenerator[bytes, None]:
    """Yield the server-sent events of a response. A failure is sent as the last event."""
    try:
        async with aclosing(updates):
            yield first
            async for items in updates:
                yield encoded.response.events(items)
        yield encoded.response.last_event()
    except ClientGoneError:
        return  # The client has stopped reading.
    except RequestError as error:
        yield event(error.content)
    except asyncio.CancelledError:  # See `Server`.
        yield event(stopping().content)
    yield _LAST_EVENT


class EventStream(Response):
    """Response that consists of server-sent events. It replaces Starlette's class, which would
    cancel the events instead of sending the error when the server shuts down.

    Args:
        events: encoded server-sent events.
    """

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        headers = {
            "cache-control": "no-cache",
            "x-accel-buffering": "no",  # Otherwise nginx would buffer the events.
        }
        super().__init__(headers=headers, media_type="text/event-stream")
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response (ASGI)."""
        start = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **start})
        async with aclosing(self._events) as events:
            async for content in events:
                if content:
                    await send({"type": "http.response.body", "body": content, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


# Connections


class LimitedProtocol(H11Protocol):
    """HTTP connection of uvicorn with additional time limits. By itself, uvicorn waits indefinitely
    for the head of a request (its first line and headers), for a client to read, and for the rest
    of a rejected request's body. The connection limit also covers connections without a request.

    Attributes:
        limits: limits for the server's connections.
    """

    limits: ClassVar[Limits]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Called by asyncio when a client has connected."""
        self._deadline: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._phase = ""
        self._phase_start = 0.0
        self._discarded = 0
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            self._make_room()
        self._watch()

    def _make_room(self) -> None:
        """Close the connection that has waited longest for the head of a request. If all other
        connections have already received a request, none of them is closed, and uvicorn rejects the
        request of the new connection with status 503.
        """
        waiting = [
            connection
            for connection in self.connections
            if isinstance(connection, LimitedProtocol) and connection._phase == "head"
        ]
        if waiting:
            longest = min(waiting, key=lambda connection: connection._phase_start)
            self.connections.discard(longest)  # Make room for a new connection.
            longest.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio when the connection is closed."""
        self._set_deadline(None)
        self._stop_waiting_for_reader()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def data_received(self, data: bytes) -> None:
        """Called by asyncio when bytes have arrived."""
        if self._is_answering():
            # A second request arrived before the response to the first was complete (pipelining).
            # uvicorn would then stop reading and would not notice a disconnect, so the connection
            # is closed after the response.
            self.cycle.keep_alive = False
            return
        if self._phase == "discarded":
            self._discarded += len(data)
            if self._discarded > _LINGER_BYTES:
                self.transport.abort()
                return
        super().data_received(data)
        if self._is_answering():
            if self.conn.trailing_data[0]:
                self.cycle.keep_alive = False
            self.flow.resume_reading()
        self._watch()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Called by asyncio when the client has closed its sending side.

        A client that has closed only its sending side, like `nc -N` and some HTTP clients, still
        gets the response to a complete request. A client that has disconnected looks the same until
        a write to it fails, so `_probe` writes to it periodically.
        """
        super().eof_received()
        if not self._is_answering():
            return None  # asyncio then closes the connection.
        self.cycle.keep_alive = False
        self._probe()
        return True

    def _probe(self, delay: float = _PROBE_SECONDS) -> None:
        """Until the response is complete, periodically write bytes that clients ignore. Writing to
        a client that has disconnected closes the connection, which ends the generation for this
        client.

        Args:
            delay: time until the next write in seconds; it doubles each time.
        """
        if self.transport.is_closing() or not self._is_answering():
            return
        if self.cycle.response_started:
            # Once a response has started, only a stream of server-sent events can take long to
            # finish. In such a stream, these bytes are a comment.
            self.transport.write(self.conn.send(h11.Data(data=b":\n\n")) or b"")
        elif self.conn.their_http_version != b"1.0":
            # Interim responses require HTTP/1.1 (RFC 9110, 15.2).
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self.loop.call_later(delay, self._probe, 2 * delay)

    def _is_answering(self) -> bool:
        """Return True if a complete request has arrived and its response is not complete yet."""
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
            # Close the connection after the write timeout, even if the client has not read all
            # data.
            self._set_deadline(self.limits.write_timeout)

    def _watch(self) -> None:
        """Set a deadline if the connection is waiting for the head of a request, or for the rest of
        a body that will be discarded. `LimitedRequest` limits the time for other bodies, and
        `Service` limits the time for responses.
        """
        if self.conn.their_state is h11.IDLE:
            phase, seconds = "head", self.limits.header_timeout
        elif self.conn.their_state is h11.SEND_BODY and self.conn.our_state is h11.DONE:
            phase, seconds = "discarded", _LINGER_SECONDS
        else:
            phase, seconds = "request", None
        if phase != self._phase:
            self._phase, self._phase_start = phase, self.loop.time()
            self._discarded = 0
            self._set_deadline(seconds)

    def _set_deadline(self, seconds: float | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = (
            None if seconds is None else self.loop.call_later(seconds, self.transport.abort)
        )

    def shutdown(self) -> None:
        """Called by uvicorn when the server shuts down. A request that has not arrived completely
        does not get a response.
        """
        if self._is_answering():
            super().shutdown()
        else:
            self.transport.abort()

    def pause_writing(self) -> None:
        """Called by asyncio when the client stops reading; starts the write timeout."""
        super().pause_writing()
        self._stop_waiting_for_reader()
        self._unread = self.loop.call_later(self.limits.write_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        """Called by asyncio when the client resumes reading."""
        super().resume_writing()
        self._stop_waiting_for_reader()

    def _stop_waiting_for_reader(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn if a request is not valid HTTP or its head is too long."""
        if self.cycle is not None and self.cycle.response_started:
            self.transport.abort()  # The response has already started.
        else:
            super().send_400_response(msg)


# The process


class Server(uvicorn.Server):
    """uvicorn server that exits with code 0 after a signal. When the shutdown timeout expires or a
    second SIGINT arrives, unfinished requests are cancelled and answered with an error. uvicorn's
    own timeout would log tracebacks and respond with "Internal Server Error".

    Args:
        config: the uvicorn configuration.
        shutdown_timeout: time in seconds that running answers have to finish.
    """

    def __init__(self, config: uvicorn.Config, shutdown_timeout: float) -> None:
        super().__init__(config)
        self._shutdown_timeout = shutdown_timeout
        self._end_requests_soon: Callable[[], object] = lambda: None
        self._is_hurried = False  # True after a second SIGINT.

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting connections and wait for running answers."""
        loop = asyncio.get_running_loop()
        # Use the thread-safe method, because it wakes the event loop even when called from a signal
        # handler.
        self._end_requests_soon = lambda: loop.call_soon_threadsafe(self._end_requests)
        # A second SIGINT may have arrived before this method was called.
        seconds = 0 if self._is_hurried else self._shutdown_timeout
        timer = loop.call_later(seconds, self._end_requests)
        await super().shutdown(sockets)
        timer.cancel()

    def _end_requests(self) -> None:
        for connection in list(self.server_state.connections):
            if isinstance(connection, LimitedProtocol) and connection.flow.write_paused:
                connection.transport.abort()  # The client is not reading.
        # Wait briefly until the requests of the aborted connections have ended without a response.
        # Then cancel the remaining requests.
        asyncio.get_running_loop().call_later(_CANCEL_SECONDS, self._cancel_requests)

    def _cancel_requests(self) -> None:
        for task in list(self.server_state.tasks):
            task.cancel()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Inside the `with` block, end the server on SIGINT, SIGTERM and SIGHUP (sent when a
        terminal is closed). Unlike uvicorn's method, this method leaves ignored signals alone, such
        as those ignored by `nohup` or by `serve ... &` in a script.
        """
        before = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) != signal.SIG_IGN:
                    before[number] = signal.signal(number, self.handle_exit)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal. uvicorn's method is not called, because it would record the signal, and
        uvicorn would raise the signal again after the shutdown.
        """
        if self.should_exit and sig == signal.SIGINT:
            self._is_hurried = True
            self._end_requests_soon()
        self.should_exit = True


def new_server(service: Service, on_ready: Callable[[], None]) -> Server:
    """Create the server for a service that has been started. The caller runs the server by calling
    `run(sockets=[...])` with a socket from `listening_socket`.

    Args:
        service: the service, already started.
        on_ready: callback that is called before the first connection is accepted.
    """
    options = service.options
    access = Access(options.host, options.api_key, options.allowed_hosts, options.allowed_origins)
    # Log tracebacks of internal errors, but not uvicorn's warnings about clients.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    config = uvicorn.Config(
        create_app(service, access, on_ready),
        http=type("ServerProtocol", (LimitedProtocol,), {"limits": options.limits}),
        ws="none",
        loop="asyncio",
        lifespan="on",
        interface="asgi3",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        h11_max_incomplete_event_size=options.limits.max_header_bytes,
        # uvicorn rejects requests once this many connections are open.
        limit_concurrency=options.limits.max_connections + 1,
    )
    return Server(config, options.shutdown_timeout)


def allow_connections(count: int) -> None:
    """Raise this process's limit on open files (RLIMIT_NOFILE) to allow `count` connections.

    Raises:
        ConfigError: the system's hard limit is too low.
    """
    import resource  # `resource` is not available on Windows.

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + _OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise ConfigError(
            f"the system allows {hard} open files per process, too few for {count} connections: "
            "lower --max-connections or raise ulimit -n"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def serve(
    loaded: LoadedModel,
    options: ServerOptions,
    *,
    on_ready: Callable[[str, Service], None],
    make_decoder: Callable[[], BatchDecoder] | None = None,
) -> None:
    """Serve a model until SIGINT, SIGTERM or SIGHUP.

    Args:
        loaded: a model with a tokenizer.
        options: options of the server.
        on_ready: callback that receives the URL and the service once connections are accepted.
        make_decoder: see `Service`.

    Raises:
        ConfigError, StorageError: the server can't listen on the address, or the limit on open
            files is too low.
        ModelError: the model has no tokenizer.
    """
    allow_connections(options.limits.max_connections)
    service = Service(loaded, options, make_decoder)
    with listening_socket(options.host, options.port) as listening:
        try:
            service.start()
            url = url_for(listening)
            new_server(service, lambda: on_ready(url, service)).run([listening])
        finally:
            service.stop()

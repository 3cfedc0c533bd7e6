"""The server's process: connections with time limits, socket, signals, shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from http import HTTPStatus
from types import FrameType
from typing import ClassVar, cast

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from firstlight.errors import ConfigError, StorageError
from firstlight.generation.batch import BatchDecoder
from firstlight.serving.access import Access, error_body, new_request_id
from firstlight.serving.api import create_app
from firstlight.serving.config import Limits, ServerOptions
from firstlight.serving.service import Service
from firstlight.weights.huggingface import LoadedModel

#: Connections that the system queues until they are accepted.
_BACKLOG = 1024
#: Open files of the process besides connections.
_OTHER_FILES = 128
#: Seconds after the graceful shutdown for writing the last bytes.
_LAST_WRITES = 2.0
#: The rest of a refused request's body that is read and thrown away: a client that still sends
#: would not see the response if the connection were closed.
_MAX_IGNORED_BYTES = 4 * 2**20
_LINGER_SECONDS = 5.0


class LimitedProtocol(H11Protocol):
    """uvicorn's HTTP connection with the time limits that uvicorn lacks: it waits for ever for the
    head of a request, for a client to read, and for the rest of a body that nobody wants. Errors
    have OpenAI's shape here, too.

    Attributes:
        limits: limits of all connections of a server.
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
            and self.conn.their_state not in (h11.IDLE, h11.SEND_BODY, h11.ERROR)
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
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n"
            f"X-Request-Id: {new_request_id()}\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
        self._set_deadline(_LINGER_SECONDS)


class Server(uvicorn.Server):
    """uvicorn's server with a bounded graceful shutdown and exit code 0.

    Args:
        config: uvicorn's configuration.
        service: the service of the model.
        shutdown_timeout: seconds that answers have to end.
        on_ready: callback once connections are accepted.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        service: Service,
        shutdown_timeout: float,
        on_ready: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._service, self._shutdown_timeout = service, shutdown_timeout
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections."""
        await super().startup(sockets)
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more connections, wait for answers, and end the late ones."""
        stop = threading.Thread(target=self._service.scheduler.stop)
        ending = asyncio.get_running_loop().call_later(self._shutdown_timeout, stop.start)
        await super().shutdown(sockets)
        ending.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """End the server on SIGINT, SIGTERM and SIGHUP. uvicorn would raise them again at the end,
        and does not handle SIGHUP. A signal that is ignored (nohup) stays ignored."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {
            number: signal.signal(number, self.handle_exit)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            if signal.getsignal(number) is not signal.SIG_IGN
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End gracefully on the first signal, at once on a second SIGINT."""
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.should_exit = True


def new_service(
    loaded: LoadedModel,
    options: ServerOptions,
    make_decoder: Callable[[], BatchDecoder] | None = None,
) -> Service:
    """The service of a model, not started.

    Args:
        loaded: a model with a tokenizer.
        options: options of the server.
        make_decoder: factory, called in the thread that uses the decoder; None makes one by
            `options`.
    """
    context = loaded.model.config.max_position_embeddings
    most = min(options.max_context_tokens or context, context)

    def usual_decoder() -> BatchDecoder:
        decoder = BatchDecoder(loaded.model, options.max_batch_size, most, compile=options.compile)
        decoder.warm_up()
        return decoder

    return Service(
        loaded,
        options.model_name,
        make_decoder or usual_decoder,
        max_queue=options.max_queue,
        limits=options.limits,
    )


def new_server(service: Service, options: ServerOptions, on_ready: Callable[[], None]) -> Server:
    """The server of a started service; `run(sockets=[listening_socket(options)])`.

    Args:
        service: the started service.
        options: options of the server.
        on_ready: callback once connections are accepted.
    """
    access = Access.of(
        options.host, options.api_key, options.allowed_hosts, options.allowed_origins
    )
    # Clients' errors are not logged; tracebacks of our own are.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    config = uvicorn.Config(
        create_app(service, access),
        http=type("ServerProtocol", (LimitedProtocol,), {"limits": options.limits}),
        ws="none",
        loop="asyncio",
        lifespan="on",
        interface="asgi3",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=_BACKLOG,
        h11_max_incomplete_event_size=options.limits.max_header_bytes,
        timeout_graceful_shutdown=round(options.shutdown_timeout + _LAST_WRITES),
    )
    return Server(config, service, options.shutdown_timeout, on_ready)


def listening_socket(options: ServerOptions) -> socket.socket:
    """The socket that clients connect to.

    Raises:
        ConfigError: there is no such address.
        StorageError: the address is in use, or not permitted.
    """
    try:
        found = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"there is no address {options.host} to listen at: {error}") from error
    family, _, _, _, address = found[0]
    try:
        return socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        # The error's own text repeats the address.
        reason = os.strerror(error.errno) if error.errno else str(error)
        where = f"{options.host} port {options.port}"
        raise StorageError(f"can't listen at {where}: {reason}; choose another --port") from error


def allow_connections(count: int) -> None:
    """Raise the process's limit of open files to `count` connections.

    Raises:
        ConfigError: the system does not permit it.
    """
    import resource  # not on Windows

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + _OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise ConfigError(
            f"the system lets a process open {hard} files, too few for {count} connections: "
            "lower --max-connections or raise ulimit -n"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def url_of(listening: socket.socket) -> str:
    """The URL of a socket."""
    host, port = listening.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(
    loaded: LoadedModel,
    options: ServerOptions,
    *,
    on_ready: Callable[[str, Service], None],
    make_decoder: Callable[[], BatchDecoder] | None = None,
) -> None:
    """Serve a model until a signal comes.

    Args:
        loaded: a model with a tokenizer.
        options: options of the server.
        on_ready: callback with the URL and the service, once connections are accepted.
        make_decoder: see `new_service`.

    Raises:
        ConfigError, StorageError: the server can't listen at the address.
        ModelError: the model has no tokenizer.
    """
    allow_connections(options.limits.max_connections)
    service = new_service(loaded, options, make_decoder)
    with listening_socket(options) as listening:
        try:
            service.start()
            url = url_of(listening)
            new_server(service, options, lambda: on_ready(url, service)).run([listening])
        finally:
            service.stop()

"""The server's process: listening socket, signals and graceful shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn

from firstlight.errors import ConfigError, StorageError
from firstlight.generation.batch import BatchDecoder
from firstlight.serving.access import Access
from firstlight.serving.api import create_app
from firstlight.serving.config import ServerOptions
from firstlight.serving.connections import LimitedProtocol
from firstlight.serving.service import Service
from firstlight.weights.huggingface import LoadedModel

#: Connections that the operating system queues until they are accepted.
_BACKLOG = 1024
#: Open files of the process besides connections.
_OTHER_FILES = 128
#: Seconds to write the last bytes after the shutdown timeout.
_LAST_WRITES = 2.0


class Server(uvicorn.Server):
    """uvicorn's server with a graceful shutdown of limited time, after which it exits with code 0.

    Args:
        config: uvicorn's configuration.
        service: the service of the model.
        shutdown_timeout: seconds for running answers to end.
        on_ready: callback that is called once connections are accepted.
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
        self._is_urgent = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections."""
        await super().startup(sockets)
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting connections, wait for running answers, and end those that take longer
        than the shutdown timeout."""
        ending = asyncio.create_task(self._end_late_answers())
        await super().shutdown(sockets)
        ending.cancel()

    async def _end_late_answers(self) -> None:
        """End all requests with an error after the shutdown timeout, or on a second SIGINT.

        uvicorn's own `force_exit` would respond with "Internal Server Error" and print tracebacks.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._shutdown_timeout
        while not self._is_urgent and (left := deadline - loop.time()) > 0:
            await asyncio.sleep(min(left, 0.1))
        threading.Thread(target=self._service.scheduler.stop).start()
        self._service.end_requests()
        await asyncio.sleep(_LAST_WRITES / 2)
        for connection in list(self.server_state.connections):
            connection.transport.abort()  # its client doesn't read

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """A context in which SIGINT, SIGTERM and SIGHUP end the server; ignored signals (nohup)
        stay ignored.

        uvicorn's own method raises the signals again at the end, so that the exit code would not be
        0, and does not handle SIGHUP.
        """
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
        """Shut down gracefully on the first signal; end running answers on a second SIGINT."""
        if self.should_exit and sig == signal.SIGINT:
            self._is_urgent = True
        self.should_exit = True


def new_service(
    loaded: LoadedModel,
    options: ServerOptions,
    make_decoder: Callable[[], BatchDecoder] | None = None,
) -> Service:
    """Create the service of a model, not started.

    Args:
        loaded: a model with a tokenizer.
        options: options of the server.
        make_decoder: factory of the decoder, which is called in the thread that uses the decoder;
            None creates a `BatchDecoder` by `options`.
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
    """Create the server of a started service. The caller runs it by
    `run(sockets=[listening_socket(options)])`.

    Args:
        service: the started service.
        options: options of the server.
        on_ready: callback that is called once connections are accepted.
    """
    access = Access.of(
        options.host, options.api_key, options.allowed_hosts, options.allowed_origins
    )
    # uvicorn's warnings about clients are not logged; tracebacks of internal errors are.
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
    """Open the socket to which clients connect.

    Raises:
        ConfigError: the host is not an address of this machine.
        StorageError: the address is in use or not permitted.
    """
    try:
        found = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"can't listen at {options.host}: {error}; give --host an address of this machine"
        ) from error
    family, _, _, _, address = found[0]
    try:
        return socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        # Not the error's own text, which repeats the address.
        reason = os.strerror(error.errno) if error.errno else str(error)
        where = f"{options.host} port {options.port}"
        raise StorageError(f"can't listen at {where}: {reason}; choose another --port") from error


def allow_connections(count: int) -> None:
    """Raise this process' limit of open files (RLIMIT_NOFILE), so that it can have `count`
    connections.

    Raises:
        ConfigError: the system's hard limit is too low.
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
    """The URL of a listening socket; a wildcard address becomes the loopback address."""
    host, port = listening.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(
    loaded: LoadedModel,
    options: ServerOptions,
    *,
    on_ready: Callable[[str, Service], None],
) -> None:
    """Serve a model until SIGINT, SIGTERM or SIGHUP.

    Args:
        loaded: a model with a tokenizer.
        options: options of the server.
        on_ready: callback that gets the URL and the service once connections are accepted.

    Raises:
        ConfigError, StorageError: the server can't listen at the address, or the limit of open
            files is too low.
        ModelError: the model has no tokenizer.
    """
    allow_connections(options.limits.max_connections)
    service = new_service(loaded, options)
    with listening_socket(options) as listening:
        try:
            service.start()
            url = url_of(listening)
            new_server(service, options, lambda: on_ready(url, service)).run([listening])
        finally:
            service.stop()

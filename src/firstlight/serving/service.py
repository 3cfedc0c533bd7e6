"""The service of one model: connects the HTTP server's event loop with the scheduler's thread."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from starlette.types import Receive, Scope

from firstlight.console import say
from firstlight.errors import ModelError
from firstlight.generation.batch import BatchDecoder
from firstlight.generation.structured import SchemaError
from firstlight.hardware.device import is_out_of_memory
from firstlight.models.accounting import cache_bytes_per_token, state_bytes
from firstlight.serving.access import (
    FAILED,
    OUT_OF_MEMORY,
    ClientGoneError,
    RequestError,
    unsupported_schema,
)
from firstlight.serving.config import Limits
from firstlight.serving.processor import PreparedRequest, RequestProcessor
from firstlight.serving.scheduler import (
    QueueFullError,
    ScheduledSequence,
    Scheduler,
    StoppedError,
    Update,
)
from firstlight.serving.workers import Workers
from firstlight.weights.huggingface import LoadedModel

#: Greatest number of updates of one request that are kept for a client that does not read.
_MAX_UNREAD = 2048

#: Upper bounds of the histograms' buckets.
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class ServerMetrics:
    """Prometheus metrics of one server, in a registry of its own.

    Args:
        running, waiting: callbacks that return the number of texts in the batch and in the queue.
    """

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, running: Callable[[], int], waiting: Callable[[], int]) -> None:
        registry = self._registry = CollectorRegistry()
        self._requests = Counter(
            "firstlight_requests",
            "Requests answered, by route and status; 499: the client had gone.",
            ["route", "status"],
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "firstlight_prompt_tokens", "Tokens of prompts taken in.", registry=registry
        )
        self.generated_tokens = Counter(
            "firstlight_generated_tokens", "Tokens generated.", registry=registry
        )
        self.refusals = Counter(
            "firstlight_queue_refusals", "Requests refused: the queue was full.", registry=registry
        )
        self.disconnects = Counter(
            "firstlight_client_disconnects",
            "Requests whose client went away or didn't read, before the answer was complete.",
            registry=registry,
        )
        self.first_token = Histogram(
            "firstlight_time_to_first_token_seconds",
            "From a text's submission to its first token, the queue included.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.inter_token = Histogram(
            "firstlight_inter_token_seconds",
            "Between two tokens of a text.",
            buckets=_SECONDS,
            registry=registry,
        )
        for name, what, count in (
            ("firstlight_running_sequences", "Texts in the batch.", running),
            ("firstlight_waiting_sequences", "Texts that wait for a place in it.", waiting),
        ):
            Gauge(name, what, registry=registry).set_function(count)

    def count_request(self, route: str, status: int) -> None:
        """Count a response by route and status."""
        self._requests.labels(route, str(status)).inc()

    def page(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class Service:
    """Answers requests with one model.

    Args:
        loaded: a model with a tokenizer.
        name: the model's name for clients.
        make_decoder: see `Scheduler`.
        max_queue: greatest number of waiting texts.
        limits: limits of each request.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        name: str,
        make_decoder: Callable[[], BatchDecoder],
        *,
        max_queue: int,
        limits: Limits,
    ) -> None:
        self.name, self.limits = name, limits
        # For the start page, which anyone may read: no path of this machine.
        self.folder = Path(os.path.relpath(loaded.folder))
        if self.folder.parts[:1] == ("..",):
            self.folder = Path(loaded.folder.name)
        self.created = int(time.time())
        self._loaded = loaded
        self.scheduler = Scheduler(make_decoder, max_queue=max_queue, deliver=self._deliver)
        self.metrics = ServerMetrics(lambda: self.scheduler.running, lambda: self.scheduler.waiting)
        self._workers = Workers()
        #: Requests that are being prepared or generated, for `end_requests`.
        self._preparing: set[asyncio.Future[PreparedRequest]] = set()
        self._generating: set[Progress] = set()
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Create the decoder and start to accept texts.

        Raises:
            ModelError: the model has no tokenizer.
            Exception: any exception of `make_decoder`.
        """
        self.scheduler.start()
        self.processor = RequestProcessor(
            self._loaded,
            self.name,
            context=self.scheduler.max_tokens,
            capacity=self.scheduler.capacity,
        )

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Set the event loop of the requests."""
        self._loop = loop

    def stop(self) -> None:
        """End the service; the remaining requests fail with status 503."""
        self.scheduler.stop()
        if hasattr(self, "processor"):  # `start` was called
            self.processor.close()
        self._workers.stop()

    def end_requests(self) -> None:
        """End all requests with status 503 (in the event loop); texts end with the current step."""
        for future in self._preparing:
            future.cancel()
        for progress in list(self._generating):
            progress.end(_stopping())

    def require_able(self) -> None:
        """Check that requests can be answered. If the last step failed, another step is tried in
        the scheduler's thread, whose result the next call reports.

        Raises:
            RequestError: status 503, with the reason.
        """
        if not self.scheduler.alive:
            raise RequestError(503, "the server is stopping, or has failed", code="stopping")
        try:
            self._loaded.require_unchanged()
        except ModelError:
            # Clients do not get the error's own message, because it has a path.
            message = "the file of the weights was changed in place: start the server again"
            raise RequestError(503, message, code="weights_changed") from None
        if self.scheduler.failure is not None:
            self.scheduler.try_again()
            message = "the model's last step failed: the server's log says why"
            raise RequestError(503, message, code="engine_failed")

    @property
    def cache_bytes(self) -> int:
        """Bytes of the cache for a full batch: keys and values in the dtype of the weights, and
        states."""
        model = self._loaded.model
        token = cache_bytes_per_token(model.config, next(model.parameters()).dtype)
        sequence = token * self.scheduler.max_tokens + state_bytes(model.config)
        return sequence * self.scheduler.max_sequences

    async def prepare(
        self,
        prepare: Callable[[bytes], PreparedRequest],
        body: bytes,
        scope: Scope,
        receive: Receive,
    ) -> PreparedRequest:
        """Check and encode a request in a thread, so that the event loop does not wait.

        Args:
            prepare: a method of `RequestProcessor`.
            body: the request's body.
            scope: the request's ASGI scope.
            receive: the request's ASGI channel, which reports a disconnect.

        Raises:
            RequestError, ModelError: see `RequestProcessor`; status 503 if the server is stopping.
            ClientGoneError: the client closed the connection.
        """
        job = self._workers.submit(_client_of(scope), len(body), partial(prepare, body))
        future = asyncio.wrap_future(job)
        watcher = asyncio.create_task(_until_gone(receive))
        self._preparing.add(future)
        try:
            await asyncio.wait((future, watcher), return_when=asyncio.FIRST_COMPLETED)
            if not future.done():
                self.metrics.disconnects.inc()
                raise ClientGoneError
            if future.cancelled():
                raise _stopping()
            return future.result()
        finally:
            self._preparing.discard(future)
            future.cancel()
            watcher.cancel()

    def _deliver(self, updates: list[Update]) -> None:
        """Pass the updates of a step from the scheduler's thread to the event loop, in one call."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._hand_out, updates)

    def _hand_out(self, updates: list[Update]) -> None:
        self.metrics.generated_tokens.inc(sum(update.tokens for update in updates))
        for update in updates:
            update.sequence.receive(update)

    @contextlib.asynccontextmanager
    async def running(
        self, prepared: PreparedRequest, scope: Scope, receive: Receive
    ) -> AsyncIterator[Progress]:
        """A context in which a request's texts are generated; its end cancels unfinished texts.

        Args:
            prepared: the request.
            scope: the request's ASGI scope, whose state has the request's id and the connection's
                `abort`.
            receive: the request's ASGI channel, which reports a disconnect.

        Raises:
            RequestError: status 429 if the queue is full, 503 if the server is stopping.
        """
        progress = Progress(prepared, self, scope["state"], _client_of(scope))
        try:
            self.scheduler.submit(progress.sequences)
        except QueueFullError as error:
            self.metrics.refusals.inc()
            raise RequestError(
                429, str(error), code="queue_full", headers={"Retry-After": "1"}
            ) from None
        except StoppedError as error:
            raise _stopping() from error
        self._generating.add(progress)
        self.metrics.prompt_tokens.inc(prepared.prompt_tokens)
        watcher = asyncio.create_task(_watch(receive, progress))
        timeout = asyncio.get_running_loop().call_later(
            self.limits.request_timeout, progress.expire
        )
        try:
            yield progress
        finally:
            watcher.cancel()
            timeout.cancel()
            self._generating.discard(progress)
            self.scheduler.cancel(progress.sequences)


def _client_of(scope: Scope) -> str:
    """The client's IP address, which identifies a client: it may have many connections, and all
    clients have the same API key."""
    client = scope.get("client")
    return str(client[0]) if client else ""


def _stopping() -> RequestError:
    return RequestError(503, "the server is stopping", code="stopping")


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _watch(receive: Receive, progress: Progress) -> None:
    await _until_gone(receive)
    progress.end(ClientGoneError())


class Progress:
    """An asynchronous iterator over the updates of one request's texts. Each item is a list of
    (index of the choice, update); the iteration ends after the last update of all texts.
    """

    def __init__(
        self, prepared: PreparedRequest, service: Service, state: Any, client: str = ""
    ) -> None:
        self.sequences = [ScheduledSequence(text, self._receive, client) for text in prepared.texts]
        self._index = {sequence: index for index, sequence in enumerate(self.sequences)}
        self._service, self._state = service, state
        self._left = len(self.sequences)
        self._submitted = time.monotonic()
        self._last: dict[ScheduledSequence, float] = {}
        self._unread: deque[tuple[int, Update]] = deque()
        self._changed = asyncio.Event()
        self._error: Exception | None = None

    def _receive(self, update: Update) -> None:
        """Add an update; called in the event loop."""
        if self._error is not None:
            return
        if update.error is not None:
            self.end(_failure(update.error, self._state["request_id"]))
            return
        self._measure(update)
        self._left -= update.ended
        self._unread.append((self._index[update.sequence], update))
        self._changed.set()
        if len(self._unread) > _MAX_UNREAD:
            self.end(ClientGoneError())
            # Only connections of `LimitedProtocol` have `abort`.
            self._state.get("abort", lambda: None)()

    def _measure(self, update: Update) -> None:
        now, metrics = time.monotonic(), self._service.metrics
        before = self._last.get(update.sequence)
        if before is None:
            metrics.first_token.observe(now - self._submitted)
        else:
            metrics.inter_token.observe(now - before)
        self._last[update.sequence] = now

    def end(self, error: Exception) -> None:
        """Cancel the texts. The iteration raises `error` after the updates that came before; at
        once if the client is gone."""
        if self._error is None:
            self._error = error
            self._service.scheduler.cancel(self.sequences)
            if isinstance(error, ClientGoneError):
                self._unread.clear()
                self._service.metrics.disconnects.inc()
            self._changed.set()

    def expire(self) -> None:
        """End with status 504, because the request has taken too long."""
        seconds = self._service.limits.request_timeout
        self.end(
            RequestError(
                504,
                f"the answer was not complete after {seconds:g} seconds: ask for fewer tokens",
                code="timeout",
            )
        )

    def __aiter__(self) -> Progress:
        return self

    async def __anext__(self) -> Sequence[tuple[int, Update]]:
        """The updates since the last call.

        Raises:
            RequestError: a text failed, or the request took too long.
            ClientGoneError: the client disconnected or does not read.
        """
        while not self._unread:
            if self._error is not None:
                raise self._error
            if not self._left:
                raise StopAsyncIteration
            await self._changed.wait()
            self._changed.clear()
        updates = list(self._unread)
        self._unread.clear()
        return updates


def _failure(error: Exception, request_id: str) -> RequestError:
    """The error for the client when a text has failed; an unexpected `error` is logged."""
    if isinstance(error, StoppedError):
        return _stopping()
    if isinstance(error, SchemaError):
        return unsupported_schema(str(error))
    say(f"firstlight: {request_id}: a text failed: {type(error).__name__}: {error}")
    if is_out_of_memory(error):
        say("what helps: lower --max-context-tokens or --max-batch-size, or use --dtype int8")
        return RequestError(500, OUT_OF_MEMORY)
    return RequestError(500, FAILED)

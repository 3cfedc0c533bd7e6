"""One model that answers requests: between the event loop, where clients are, and the scheduler's
thread, where texts are made."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from firstlight.console import say
from firstlight.generation.batch import BatchDecoder
from firstlight.generation.structured import SchemaError, can_structure
from firstlight.models.accounting import cache_bytes_per_token
from firstlight.serving.documentation import Bounds
from firstlight.serving.metrics import Metrics
from firstlight.serving.problems import FAILED, ClientGoneError, RequestError, schema_problem
from firstlight.serving.scheduler import Job, QueueFullError, Scheduler, StoppedError, Update
from firstlight.serving.work import Work, Workshop
from firstlight.weights.huggingface import LoadedModel

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

#: Updates of one request that are kept for a client that doesn't read.
_MOST_UNREAD = 2048

#: Requests that are read and encoded at a time; the others wait.
_WORKERS = 2


@dataclass(frozen=True)
class Limits:
    """How long and how large things may be. Times are in seconds.

    Attributes:
        request_timeout: from a request's arrival in the queue to its end.
        header_timeout: for the head of a request to arrive.
        body_timeout: for its body.
        write_timeout: that a client may let what it is sent lie.
        max_body_bytes: of a request.
        max_header_bytes: of its head.
        max_connections: at a time; when there are more, those without a request are closed,
            the oldest first.
    """

    request_timeout: float = 600.0
    header_timeout: float = 10.0
    body_timeout: float = 30.0
    write_timeout: float = 30.0
    max_body_bytes: int = 2**20
    max_header_bytes: int = 16 * 2**10
    max_connections: int = 512


class Service:
    """Answers requests with one model.

    Args:
        loaded: with a tokenizer.
        name: of the model, for clients.
        make_decoder: see `Scheduler`.
        max_queue: how many texts may wait.
        limits: of each request.
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
        self.created = int(time.time())
        self._loaded = loaded
        self.scheduler = Scheduler(make_decoder, max_queue=max_queue, deliver=self._deliver)
        self.metrics = Metrics(lambda: self.scheduler.running, lambda: self.scheduler.waiting)
        self._workers = ThreadPoolExecutor(_WORKERS, thread_name_prefix="firstlight-work")
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Make the decoder; texts are taken from now on.

        Raises:
            ModelError: the model has no tokenizer.
            whatever the decoder's factory raises.
        """
        self.scheduler.start()
        self.workshop = Workshop(
            self._loaded,
            self.name,
            context=self.scheduler.max_tokens,
            capacity=self.scheduler.capacity,
        )

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Say in which event loop the requests are."""
        self._loop = loop

    def stop(self) -> None:
        """End; requests that are left fail with 503."""
        self.scheduler.stop()
        if hasattr(self, "workshop"):  # it was started
            self.workshop.close()
        self._workers.shutdown(wait=False, cancel_futures=True)

    @property
    def cache_bytes(self) -> int:
        """What the keys and values of a full batch take, in the dtype of the weights."""
        model = self._loaded.model
        token = cache_bytes_per_token(model.config, next(model.parameters()).dtype)
        return token * self.scheduler.max_tokens * self.scheduler.max_sequences

    @property
    def bounds(self) -> Bounds:
        """What requests must keep to, for the document."""
        loaded = self._loaded
        return Bounds(
            model=self.name,
            vocab_size=loaded.model.config.vocab_size,
            context=self.scheduler.max_tokens,
            capacity=self.scheduler.capacity,
            chats=loaded.tokenizer is not None and loaded.tokenizer.chat_template is not None,
            structured=can_structure(),
        )

    async def prepared(self, make: Callable[[bytes], Work], body: bytes) -> Work:
        """What a body asks for, read in a thread, so that the others don't wait.

        Raises:
            RequestError, ModelError: see `Workshop`.
        """
        return await asyncio.get_running_loop().run_in_executor(self._workers, make, body)

    def _deliver(self, updates: list[Update]) -> None:
        """Hand the updates of a step to the event loop, in one call."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._hand_out, updates)

    def _hand_out(self, updates: list[Update]) -> None:
        self.metrics.generated_tokens.inc(sum(update.tokens for update in updates))
        for update in updates:
            update.job.receive(update)

    @contextlib.asynccontextmanager
    async def running(
        self, work: Work, receive: Receive, abort: Callable[[], None], request_id: str
    ) -> AsyncIterator[Progress]:
        """Have work done; when the block is left, whatever is left of it is forgotten.

        Args:
            receive: tells when the client goes away.
            abort: closes its connection, whatever has not been sent.
            request_id: the request's name in the log.

        Raises:
            RequestError: 429, the queue is full; 503, the server is stopping.
        """
        progress = Progress(work, self, abort, request_id)
        try:
            self.scheduler.submit(progress.jobs)
        except QueueFullError as error:
            self.metrics.refusals.inc()
            raise RequestError(
                429, str(error), code="queue_full", headers={"Retry-After": "1"}
            ) from None
        except StoppedError as error:
            raise RequestError(503, str(error), code="stopping") from None
        self.metrics.prompt_tokens.inc(work.prompt_tokens)
        watcher = asyncio.create_task(_watch(receive, progress))
        timeout = asyncio.get_running_loop().call_later(
            self.limits.request_timeout, progress.expire
        )
        try:
            yield progress
        finally:
            watcher.cancel()
            timeout.cancel()
            self.scheduler.cancel(progress.jobs)


async def _watch(receive: Receive, progress: Progress) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    progress.end(ClientGoneError())


class Progress:
    """The updates of one request's texts, as they come: `async for updates in progress` gives
    lists of (index of the choice, update), and ends after the last update of all of them.
    """

    def __init__(
        self, work: Work, service: Service, abort: Callable[[], None], request_id: str
    ) -> None:
        self.jobs = [Job(text, self._receive) for text in work.texts]
        self._index = {job: index for index, job in enumerate(self.jobs)}
        self._service, self._abort, self._request_id = service, abort, request_id
        self._left = len(self.jobs)
        self._submitted = time.monotonic()
        self._last: dict[Job, float] = {}
        self._unread: deque[tuple[int, Update]] = deque()
        self._changed = asyncio.Event()
        self._error: Exception | None = None

    def _receive(self, update: Update) -> None:
        """In the event loop."""
        if self._error is not None:
            return
        if update.error is not None:
            self.end(_failure(update.error, self._request_id))
            return
        self._measure(update)
        self._left -= update.ended
        self._unread.append((self._index[update.job], update))
        self._changed.set()
        if len(self._unread) > _MOST_UNREAD:
            self.end(ClientGoneError())
            self._abort()

    def _measure(self, update: Update) -> None:
        now, metrics = time.monotonic(), self._service.metrics
        before = self._last.get(update.job)
        if before is None:
            metrics.first_token.observe(now - self._submitted)
        else:
            metrics.inter_token.observe(now - before)
        self._last[update.job] = now

    def end(self, error: Exception) -> None:
        """Have nothing more computed; whoever iterates gets the error, after what came before it
        if there is somebody to read that."""
        if self._error is None:
            self._error = error
            self._service.scheduler.cancel(self.jobs)
            if isinstance(error, ClientGoneError):
                self._unread.clear()
                self._service.metrics.disconnects.inc()
            self._changed.set()

    def expire(self) -> None:
        """The time of the request is over."""
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
        """What has come since the last time.

        Raises:
            RequestError: a text failed, or it took too long.
            ClientGoneError: nobody reads it.
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
    if isinstance(error, StoppedError):
        return RequestError(503, str(error), code="stopping")
    if isinstance(error, SchemaError):
        return schema_problem(str(error))
    say(f"firstlight: {request_id}: a text failed: {type(error).__name__}: {error}")
    return RequestError(500, FAILED)

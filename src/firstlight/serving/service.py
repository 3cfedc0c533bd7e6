"""Serve requests with one model. The service connects the HTTP server's event loop with the threads
that encode requests and generate text.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from fastapi import Request
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.types import Receive

from firstlight.console import say
from firstlight.errors import ModelError
from firstlight.generation.batch import BatchDecoder
from firstlight.generation.structured import SchemaError
from firstlight.hardware.device import is_out_of_memory
from firstlight.lora.loading import LoadedModel
from firstlight.models.accounting import cache_bytes_per_token, state_bytes
from firstlight.serving.access import FAILED, OUT_OF_MEMORY, ClientGoneError, RequestError
from firstlight.serving.config import ServerOptions
from firstlight.serving.request import (
    EncodedRequest,
    RequestEncoder,
    schema_error,
)
from firstlight.serving.scheduler import (
    QueueFullError,
    ScheduledSequence,
    Scheduler,
    StoppedError,
    Update,
)

T = TypeVar("T")

#: Maximum size of a small request body in bytes. Encoding a small body takes a few milliseconds.
_SMALL_BODY_BYTES = 32 * 2**10
#: Upper bounds of the histogram buckets in seconds.
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class ServerMetrics:
    """Prometheus metrics of one server, stored in `registry`.

    Args:
        scheduler: the scheduler, whose running and waiting sequences are counted.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        registry = self.registry = CollectorRegistry()
        count = partial(Counter, registry=registry)
        measure = partial(Histogram, registry=registry, buckets=_SECONDS)
        about = (
            "Requests answered, by route and status; 499 means that the client had disconnected."
        )
        self.requests = count("firstlight_requests", about, ["route", "status"])
        self.prompt_tokens = count("firstlight_prompt_tokens", "Tokens of accepted prompts.")
        self.generated_tokens = count("firstlight_generated_tokens", "Tokens generated.")
        about = "Requests refused because the queue was full."
        self.refusals = count("firstlight_queue_refusals", about)
        about = "Requests whose client disconnected before the response was complete."
        self.disconnects = count("firstlight_client_disconnects", about)
        about = "Time from a text's submission to its first token, including time in the queue."
        self.first_token = measure("firstlight_time_to_first_token_seconds", about)
        self.inter_token = measure(
            "firstlight_inter_token_seconds", "Time between two consecutive tokens."
        )
        gauge = Gauge("firstlight_running_sequences", "Texts in the batch.", registry=registry)
        gauge.set_function(lambda: scheduler.running)
        gauge = Gauge("firstlight_waiting_sequences", "Texts in the queue.", registry=registry)
        gauge.set_function(lambda: scheduler.waiting)


class Service:
    """Serves requests with one model.

    Args:
        loaded: a model with a tokenizer.
        options: options of the server.
        make_decoder: function that creates the decoder, called in the thread that uses the decoder.
            None creates a `BatchDecoder` with the settings in `options`.

    Attributes:
        loop: event loop that handles the requests; set by the application when it starts.
        encoder: encoder for requests; set by `start`.
    """

    loop: asyncio.AbstractEventLoop
    encoder: RequestEncoder

    def __init__(
        self,
        loaded: LoadedModel,
        options: ServerOptions,
        make_decoder: Callable[[], BatchDecoder] | None = None,
    ) -> None:
        self._loaded, self.options = loaded, options
        self.created = int(time.time())
        self.scheduler = Scheduler(
            make_decoder or self._make_decoder,
            max_queue=options.max_queue,
            deliver=self._deliver,
        )
        self.metrics = ServerMetrics(self.scheduler)
        # A large body can take several seconds to parse and encode. Small bodies are processed in a
        # different thread, so that they do not have to wait.
        self._large = ThreadPoolExecutor(1, thread_name_prefix="firstlight-large-request")
        self._small = ThreadPoolExecutor(1, thread_name_prefix="firstlight-request")
        for executor in (self._large, self._small):
            # Start the thread now, while there is still enough memory.
            executor.submit(int)

    def _make_decoder(self) -> BatchDecoder:
        options, model = self.options, self._loaded.model
        context = model.config.max_position_embeddings
        most = min(options.max_context_tokens or context, context)
        decoder = BatchDecoder(model, options.max_batch_size, most, compile=options.compile)
        decoder.warm_up()
        return decoder

    def start(self) -> None:
        """Create the decoder and start accepting sequences.

        Raises:
            ModelError: the model has no tokenizer.
            Exception: any exception raised by `make_decoder`.
        """
        self.scheduler.start()
        self.encoder = RequestEncoder(
            self._loaded,
            self.options.model_name,
            context=self.scheduler.max_tokens,
            capacity=self.scheduler.capacity,
            template_options=self.options.template_options,
        )

    def stop(self) -> None:
        """Stop the service. Remaining requests fail with status 503."""
        self.scheduler.stop()
        if hasattr(self, "encoder"):  # `start` has been called.
            self.encoder.close()
        for executor in (self._large, self._small):
            executor.shutdown(wait=False, cancel_futures=True)

    def require_able(self) -> None:
        """Raise an error if requests can't be served. If the last decoding step failed, the
        scheduler's thread tries another step. The next call of this method reports whether that
        step succeeded.

        Raises:
            RequestError: with status 503 and the reason.
        """
        if not self.scheduler.alive:
            raise stopping()
        try:
            self._loaded.require_unchanged()
        except ModelError:
            # The error's message is not sent to clients, because it contains a path.
            message = "the weights file was modified in place: restart the server"
            raise RequestError(503, message, code="weights_changed") from None
        if self.scheduler.failure is not None:
            self.scheduler.try_again()
            message = "the model's last step failed: see the server's log for the reason"
            raise RequestError(503, message, code="engine_failed")

    @property
    def cache_bytes(self) -> int:
        """Size of the key-value cache for a full batch, in bytes. The cache contains keys and
        values in the dtype of the weights, and the recurrent states.
        """
        model = self._loaded.model
        token = cache_bytes_per_token(model.config, next(model.parameters()).dtype)
        sequence = token * self.scheduler.max_tokens + state_bytes(model.config)
        return sequence * self.scheduler.max_sequences

    async def in_thread(self, request: Request, work_on: Callable[[], T]) -> T:
        """In a worker thread, run a function that processes a request. The thread is selected by
        the size of the request's body, so that small requests do not wait for large ones. The event
        loop is never blocked.

        Raises:
            ClientGoneError: the client closed the connection.
            RequestError: with status 503 if the server is stopping.
            Exception: any exception raised by `work_on`.
        """
        is_small = len(await request.body()) <= _SMALL_BODY_BYTES
        executor = self._small if is_small else self._large
        work = asyncio.get_running_loop().run_in_executor(executor, work_on)
        watcher = asyncio.create_task(_until_gone(request.receive))
        try:
            await asyncio.wait((work, watcher), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                self.metrics.disconnects.inc()
                raise ClientGoneError
            return work.result()
        except asyncio.CancelledError:  # See `Server`.
            raise stopping() from None
        finally:
            work.cancel()  # Free the memory that the bodies of waiting requests occupy.
            watcher.cancel()

    def _deliver(self, updates: list[Update]) -> None:
        """Pass all updates of a decoding step from the scheduler's thread to the event loop in a
        single call.
        """
        self.loop.call_soon_threadsafe(self._hand_out, updates)

    def _hand_out(self, updates: list[Update]) -> None:
        self.metrics.generated_tokens.inc(sum(update.tokens for update in updates))
        for update in updates:
            update.sequence.receive(update)

    async def generate(
        self, encoded: EncodedRequest, request: Request
    ) -> AsyncGenerator[list[tuple[int, Update]], None]:
        """Generate the sequences of a request. Each yielded item contains the updates since the
        previous item, together with the index of the choice for each update. Closing the generator
        cancels unfinished sequences.

        Raises:
            RequestError: with status 429 if the queue is full, 503 if the server is stopping, 504
                if the sequences take too long, or 500 if one of them fails.
            ClientGoneError: the client closed the connection.
        """
        submitted = time.monotonic()
        latest: dict[int, float] = {}
        queue: asyncio.Queue[tuple[int, Update] | RequestError] = asyncio.Queue()

        def receive(index: int, update: Update) -> None:
            queue.put_nowait((index, update))
            if update.error is None:
                now = time.monotonic()
                if index in latest:
                    self.metrics.inter_token.observe(now - latest[index])
                else:
                    self.metrics.first_token.observe(now - submitted)
                latest[index] = now

        sequences = [
            ScheduledSequence(text, partial(receive, index))
            for index, text in enumerate(encoded.texts)
        ]
        self._submit(sequences)
        self.metrics.prompt_tokens.inc(encoded.response.prompt_tokens)
        watcher = asyncio.create_task(_until_gone(request.receive))
        watcher.add_done_callback(lambda _: queue.put_nowait(ClientGoneError()))
        seconds = self.options.limits.request_timeout
        late = RequestError(
            504,
            f"the response was not complete after {seconds:g} seconds: request fewer tokens",
            code="timeout",
        )
        timer = self.loop.call_later(seconds, queue.put_nowait, late)
        left = len(sequences)
        try:
            while left:
                items = [await queue.get()]
                while not queue.empty():
                    items.append(queue.get_nowait())
                updates, error = _before_failure(items, request.state.request_id)
                left -= sum(update.ended for _, update in updates)
                if updates:
                    yield updates
                if error is not None and left:
                    raise error
        except ClientGoneError:
            self.metrics.disconnects.inc()
            raise
        finally:
            watcher.cancel()
            timer.cancel()
            self.scheduler.cancel(sequences)

    def _submit(self, sequences: list[ScheduledSequence]) -> None:
        try:
            self.scheduler.submit(sequences)
        except QueueFullError as error:
            self.metrics.refusals.inc()
            raise RequestError(
                429, str(error), code="queue_full", headers={"Retry-After": "1"}
            ) from None
        except StoppedError:
            raise stopping() from None


def stopping() -> RequestError:
    """Return the error sent to clients while the server is stopping."""
    return RequestError(503, "the server is stopping or has failed", code="stopping")


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _before_failure(
    items: list[tuple[int, Update] | RequestError], request_id: str
) -> tuple[list[tuple[int, Update]], RequestError | None]:
    """Return the updates that precede the first failure, and the error to send to the client for
    this failure. The error is None if there was no failure.
    """
    updates: list[tuple[int, Update]] = []
    for item in items:
        if isinstance(item, RequestError):
            return updates, item
        if item[1].error is not None:
            return updates, _failure(item[1].error, request_id)
        updates.append(item)
    return updates, None


def _failure(error: Exception, request_id: str) -> RequestError:
    """Return the error to send to the client for a failed sequence. Log unexpected errors."""
    if isinstance(error, StoppedError):
        return stopping()
    if isinstance(error, SchemaError):
        return schema_error(error)
    say(f"firstlight: {request_id}: a text failed: {type(error).__name__}: {error}")
    if is_out_of_memory(error):
        say("to free memory, lower --max-context-tokens or --max-batch-size, or use --dtype int8")
        return RequestError(500, OUT_OF_MEMORY)
    return RequestError(500, FAILED)

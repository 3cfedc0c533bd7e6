"""Which texts are decoded together: one thread, one decoder, first come, first served.

Texts join and leave the batch between its steps. Nothing here knows of HTTP or of event loops.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from torch import Tensor

from firstlight.console import say
from firstlight.errors import FirstlightError
from firstlight.generation.batch import BatchDecoder
from firstlight.generation.continuation import Continuation
from firstlight.generation.sampling import TokenLogprob

#: Between two steps texts join until they had so many tokens together: those that are running
#: wait meanwhile. One always joins.
_TOKENS_THAT_JOIN = 512

#: What a model or its library may raise over one text, memory that runs out among it. Whatever
#: else there is ends the thread, and with it all texts.
_FAILURES = (
    ArithmeticError,
    AssertionError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)


class QueueFullError(FirstlightError):
    """As many texts wait as may."""


class StoppedError(FirstlightError):
    """The scheduler has ended, or is ending."""


@dataclass(eq=False, slots=True)
class Job:
    """One text to be continued.

    Attributes:
        text: nothing of it has been computed when it is submitted; the scheduler's from then on.
        receive: what takes the job's updates, as far as whoever hands them out calls it.
        cancelled: nobody waits for it any more.
    """

    text: Continuation
    receive: Callable[[Update], None]
    cancelled: bool = False


@dataclass(frozen=True, slots=True)
class Update:
    """What one step did for a job.

    Attributes:
        job: whose it is.
        piece: text that has become certain, often none.
        tokens: how many were chosen, 0 or 1; an end token is none.
        logprobs: of these tokens, where the job's config asks for them.
        finish_reason: "stop" or "length" with the last update.
        error: why the job failed, with the last update.
    """

    job: Job
    piece: str = ""
    tokens: int = 0
    logprobs: Sequence[TokenLogprob] = ()
    finish_reason: str | None = None
    error: Exception | None = None

    @property
    def ended(self) -> bool:
        """Whether it is the job's last."""
        return self.finish_reason is not None or self.error is not None


class Scheduler:
    """Decodes the texts that are submitted, as many at a time as the decoder has room for.

    Args:
        make_decoder: called in the thread that will use it, by `start`.
        max_queue: how many texts may wait beside those that the decoder has room for.
        deliver: called in the scheduler's thread with the updates of a step, all jobs' at once;
            must return soon.
    """

    def __init__(
        self,
        make_decoder: Callable[[], BatchDecoder],
        *,
        max_queue: int,
        deliver: Callable[[list[Update]], None],
    ) -> None:
        assert max_queue >= 0
        self._make_decoder, self._max_queue, self._deliver = make_decoder, max_queue, deliver
        self._changed = threading.Condition()
        self._waiting: deque[Job] = deque()
        #: In the order of the decoder's rows; changed by the thread alone, holding the lock.
        self._running: list[Job] = []
        self._stopping = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="firstlight-scheduler")
        self._loop_ended: Future[None] | None = None

    def start(self) -> None:
        """Make the decoder and begin.

        Raises:
            whatever `make_decoder` raises.
        """
        self._decoder = self._thread.submit(self._make_decoder).result()
        self._loop_ended = self._thread.submit(self._loop)
        self._loop_ended.add_done_callback(_say_failure)

    @property
    def max_tokens(self) -> int:
        """Of each text, prompt and new tokens together."""
        return self._decoder.max_tokens

    @property
    def max_sequences(self) -> int:
        """How many texts are decoded at a time, at most."""
        return self._decoder.max_sequences

    @property
    def capacity(self) -> int:
        """How many texts there may be at a time, running and waiting."""
        return self._decoder.max_sequences + self._max_queue

    @property
    def running(self) -> int:
        """How many texts are in the batch."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """How many texts wait for a place in the batch."""
        return len(self._waiting)

    @property
    def alive(self) -> bool:
        """Whether texts are taken."""
        return self._loop_ended is not None and not self._stopping

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue jobs, all or none, in this order.

        Raises:
            QueueFullError: there is no room for them.
            StoppedError: the scheduler has ended.
        """
        with self._changed:
            if not self.alive:
                raise StoppedError("the server is stopping")
            if len(self._waiting) + len(self._running) + len(jobs) > self.capacity:
                raise QueueFullError(
                    f"{self.waiting} texts wait for an answer already: try again later"
                )
            self._waiting.extend(jobs)
            self._changed.notify_all()

    def cancel(self, jobs: Iterable[Job]) -> None:
        """Forget jobs: those that wait at once, those that run before the next step. None of them
        need be there any more. An update may still come."""
        with self._changed:
            for job in jobs:
                job.cancelled = True
            if any(job.cancelled for job in self._waiting):
                self._waiting = deque(job for job in self._waiting if not job.cancelled)

    def stop(self) -> None:
        """End after the step at hand, if any; all jobs that are left fail with StoppedError."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.shutdown(wait=True)

    # In the thread

    def _loop(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._stopping or self._waiting or self._running)
                    if self._stopping:
                        return
                self._drop_cancelled()
                for work in (self._join, self._step):
                    updates = work()
                    if updates:
                        self._deliver(updates)
        finally:
            self._end()

    def _end(self) -> None:
        with self._changed:
            self._stopping = True
            left = [*self._running, *self._waiting]
            self._running, self._waiting = [], deque()
        if left:
            error = StoppedError("the server is stopping")
            self._deliver([Update(job, error=error) for job in left])

    def _drop_cancelled(self) -> None:
        for row in reversed(range(len(self._running))):
            if self._running[row].cancelled:
                self._remove(row)

    def _join(self) -> list[Update]:
        """Take in whom there is room for; each gets its first token."""
        updates: list[Update] = []
        tokens = 0
        while tokens < _TOKENS_THAT_JOIN:
            with self._changed:
                if not self._waiting or len(self._running) == self._decoder.max_sequences:
                    break
                job = self._waiting.popleft()
                self._running.append(job)
            tokens += len(job.text.prompt_ids)
            updates.append(self._first(job))
            if updates[-1].ended:
                self._remove(len(self._running) - 1)
        return updates

    def _first(self, job: Job) -> Update:
        try:
            logits_V = self._decoder.add(job.text.prompt_ids, job.text.score_prompt)
        except _FAILURES as error:
            return Update(job, error=error)
        return _pushed(job, logits_V)

    def _step(self) -> list[Update]:
        """One token more for all that run."""
        running = self._running
        if not running:
            return []
        try:
            logits_BV = self._decoder.step([job.text.token_ids[-1] for job in running])
        except _FAILURES as error:
            # Nobody can say which of them it was.
            updates = [Update(job, error=error) for job in running]
        else:
            updates = [_pushed(job, logits_BV[row]) for row, job in enumerate(running)]
        for row in reversed(range(len(updates))):
            if updates[row].ended:
                self._remove(row)
        return updates

    def _remove(self, row: int) -> None:
        # One that could not join is in no row of the decoder.
        if row < len(self._decoder):
            self._decoder.remove(row)
        with self._changed:
            self._running[row] = self._running[-1]
            self._running.pop()


def _pushed(job: Job, logits_V: Tensor) -> Update:
    """A job with one token more, or that has failed."""
    text = job.text
    before = len(text.token_ids)
    try:
        piece = text.push(logits_V)
    except _FAILURES as error:
        return Update(job, error=error)
    logprobs = () if text.logprobs is None else tuple(text.logprobs[before:])
    return Update(job, piece, len(text.token_ids) - before, logprobs, text.finish_reason)


def _say_failure(ended: Future[None]) -> None:
    error = ended.exception()
    if error is not None:
        say(f"firstlight: the scheduler failed: {type(error).__name__}: {error}")

"""Scheduler for continuous batching. A single thread decodes all sequences with one `BatchDecoder`.

Sequences join and leave the batch between steps. Waiting sequences join in order of arrival. This
module does not depend on HTTP or event loops.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from firstlight.console import say
from firstlight.errors import FirstlightError
from firstlight.generation.batch import BatchDecoder
from firstlight.generation.continuation import Chosen, Continuation, TokenLogprob
from firstlight.generation.engine import first_tokens, next_tokens


class QueueFullError(FirstlightError):
    """Raised if the scheduler's queue is full."""


class StoppedError(FirstlightError):
    """Raised if the scheduler has stopped or is stopping."""


@dataclass(eq=False, slots=True)
class ScheduledSequence:
    """One sequence to generate.

    Attributes:
        text: continuation to generate. After `Scheduler.submit`, only the scheduler's thread is
            allowed to use it.
        receive: callback that receives the sequence's updates. The scheduler does not call it
            directly, so the scheduler's `deliver` callback must call it.
        cancelled: True if the sequence is no longer needed.
    """

    text: Continuation
    receive: Callable[[Update], None]
    cancelled: bool = False


@dataclass(frozen=True, slots=True)
class Update:
    """The result of one decoding step for one sequence.

    Attributes:
        sequence: the sequence.
        piece: text of the sequence that became final in this step; often empty.
        tokens: number of tokens chosen in this step, 0 or 1, not counting an end token.
        logprobs: log-probabilities of the chosen tokens, if the sampling config asks for them.
        finish_reason: "stop" or "length" in the last update; None in earlier updates.
        error: exception in the last update of a failed sequence; otherwise None.
    """

    sequence: ScheduledSequence
    piece: str = ""
    tokens: int = 0
    logprobs: Sequence[TokenLogprob] = ()
    finish_reason: str | None = None
    error: Exception | None = None

    @property
    def ended(self) -> bool:
        """True if this is the sequence's last update."""
        return self.finish_reason is not None or self.error is not None


class Scheduler:
    """Generates the submitted sequences. At most `BatchDecoder.max_sequences` of them are generated
    at a time.

    Args:
        make_decoder: function that creates the decoder; it is called by `start`, in the thread that
            uses the decoder.
        max_queue: maximum number of waiting sequences, not counting those in the decoder.
        deliver: callback that receives the updates of all sequences after each step. It is called
            in the scheduler's thread and must return quickly.

    Attributes:
        max_tokens: maximum length of a sequence in tokens, including the prompt; set by `start`.
        max_sequences: maximum number of sequences in the batch; set by `start`.
        failure: exception raised by the most recent call to the decoder, or None if that call
            succeeded.
    """

    def __init__(
        self,
        make_decoder: Callable[[], BatchDecoder],
        *,
        max_queue: int,
        deliver: Callable[[list[Update]], None],
    ) -> None:
        assert max_queue >= 0
        self._make_decoder = make_decoder
        self._max_queue = max_queue
        self._deliver = deliver
        self._changed = threading.Condition()
        self._waiting: deque[ScheduledSequence] = deque()
        #: Sequences in the order of the decoder's rows. Only the scheduler's thread modifies this
        #: list, and only while holding the lock.
        self._running: list[ScheduledSequence] = []
        self._stopping = False
        self.failure: Exception | None = None
        self._trying = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="firstlight-scheduler")
        self._loop_ended: Future[None] | None = None

    def start(self) -> None:
        """Create the decoder and start the decoding thread.

        Raises:
            Exception: any exception raised by `make_decoder`.
        """
        self._decoder = self._thread.submit(self._make_decoder).result()
        self.max_tokens = self._decoder.max_tokens
        self.max_sequences = self._decoder.max_sequences
        self._loop_ended = self._thread.submit(self._loop)
        self._loop_ended.add_done_callback(_say_failure)

    @property
    def capacity(self) -> int:
        """Maximum number of running and waiting sequences."""
        return self.max_sequences + self._max_queue

    @property
    def running(self) -> int:
        """Number of sequences in the batch."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Number of sequences in the queue."""
        return len(self._waiting)

    @property
    def alive(self) -> bool:
        """True if new sequences are accepted."""
        return self._loop_ended is not None and not self._stopping

    def submit(self, sequences: Sequence[ScheduledSequence]) -> None:
        """Add sequences to the queue in the given order. If there is not enough room for all of
        them, add none of them.

        Raises:
            QueueFullError: the queue does not have enough room.
            StoppedError: the scheduler has stopped or is stopping.
        """
        with self._changed:
            if not self.alive:
                raise StoppedError("the server is stopping")
            if len(self._waiting) + len(self._running) + len(sequences) > self.capacity:
                raise QueueFullError(
                    f"{self.waiting} texts are already waiting to be completed: try again later"
                )
            self._waiting.extend(sequences)
            self._changed.notify_all()

    def cancel(self, sequences: Iterable[ScheduledSequence]) -> None:
        """Drop sequences. Waiting sequences are dropped immediately, and running sequences before
        the next step. Sequences that have ended are ignored. A dropped sequence may still receive
        an update.
        """
        with self._changed:
            for sequence in sequences:
                sequence.cancelled = True
            if any(sequence.cancelled for sequence in self._waiting):
                self._waiting = deque(one for one in self._waiting if not one.cancelled)

    def try_again(self) -> None:
        """Decode a single token after a failure, if no sequence is running.

        Clients may stop sending requests to a server that reports a failure. Without this method,
        such a server would not notice that the cause of the failure has disappeared.
        """
        with self._changed:
            self._trying = self.failure is not None
            self._changed.notify_all()

    def stop(self) -> None:
        """Stop after the current step. All remaining sequences fail with `StoppedError`."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.shutdown(wait=True)

    # The methods below run in the scheduler's thread.

    def _loop(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(self._has_work)
                    if self._stopping:
                        return
                    is_idle = not (self._waiting or self._running)
                    self._trying = False
                if is_idle:
                    self._compute_one_token()
                self._drop_cancelled()
                for advance in (self._join, self._step):
                    updates = advance()
                    if updates:
                        self._deliver(updates)
        finally:
            self._end()

    def _has_work(self) -> bool:
        return bool(self._stopping or self._waiting or self._running or self._trying)

    def _compute_one_token(self) -> None:
        try:
            self._decoder.add([0])
            self._decoder.remove(len(self._decoder) - 1)
            self.failure = None
        except Exception as error:  # noqa: BLE001 - any error ends the affected sequences
            self.failure = error

    def _end(self) -> None:
        with self._changed:
            self._stopping = True
            left = [*self._running, *self._waiting]
            self._running, self._waiting = [], deque()
        if left:
            error = StoppedError("the server is stopping")
            self._deliver([Update(sequence, error=error) for sequence in left])

    def _drop_cancelled(self) -> None:
        for row in reversed(range(len(self._running))):
            if self._running[row].cancelled:
                self._remove(row)

    def _join(self) -> list[Update]:
        """Move waiting sequences to the batch and choose the first token of each. No more sequences
        join once their prompts have a total length of at least `pass_tokens` tokens, because the
        running sequences have to wait while the prompts are processed. At least one sequence can
        join, regardless of the length of its prompt.
        """
        joining: list[ScheduledSequence] = []
        tokens = 0
        with self._changed:
            room = self._decoder.max_sequences - len(self._running)
            while self._waiting and len(joining) < room and tokens < self._decoder.pass_tokens:
                joining.append(self._waiting.popleft())
                tokens += len(joining[-1].text.prompt_ids)
            self._running += joining
        return self._joined(joining) if joining else []

    def _joined(self, joining: Sequence[ScheduledSequence]) -> list[Update]:
        """Process the prompts of the sequences that have just joined the batch, and return the
        updates for these sequences.
        """
        first = len(self._decoder)
        try:
            chosen = first_tokens([sequence.text for sequence in joining], self._decoder)
        except Exception as error:  # noqa: BLE001 - any error ends the affected sequences
            while len(self._decoder) > first:
                self._decoder.remove(len(self._decoder) - 1)
            with self._changed:
                del self._running[first:]
            if len(joining) == 1:
                self.failure = error
                return [Update(joining[0], error=error)]
            # Process the prompts one at a time, so that an error affects only the sequence that
            # caused it.
            updates: list[Update] = []
            for sequence in joining:
                with self._changed:
                    self._running.append(sequence)
                updates += self._joined([sequence])
            return updates
        self.failure = None
        updates = list(map(_pushed, joining, chosen))
        self._remove_ended(first, updates)
        return updates

    def _step(self) -> list[Update]:
        """Choose the next token of each running sequence."""
        running = self._running
        if not running:
            return []
        try:
            chosen = next_tokens([sequence.text for sequence in running], self._decoder)
        except Exception as error:  # noqa: BLE001 - any error ends the affected sequences
            # All sequences fail, because any of them may have caused the error.
            self.failure = error
            updates = [Update(sequence, error=error) for sequence in running]
        else:
            self.failure = None
            updates = list(map(_pushed, running, chosen))
        self._remove_ended(0, updates)
        return updates

    def _remove_ended(self, first: int, updates: Sequence[Update]) -> None:
        """Remove the sequences that have received their last update, from row `first` onwards."""
        for number in reversed(range(len(updates))):
            if updates[number].ended:
                self._remove(first + number)

    def _remove(self, row: int) -> None:
        self._decoder.remove(row)
        with self._changed:
            self._running[row] = self._running[-1]
            self._running.pop()


def _pushed(sequence: ScheduledSequence, chosen: Chosen | Exception) -> Update:
    """Append the next token to a sequence. Return an update, which contains the error if an error
    occurred.
    """
    text = sequence.text
    before = len(text.token_ids)
    try:
        piece = text.push(chosen)
    except Exception as error:  # noqa: BLE001 - any error ends the affected sequences
        return Update(sequence, error=error)
    logprobs = () if text.logprobs is None else tuple(text.logprobs[before:])
    return Update(
        sequence, piece, len(text.token_ids) - before, logprobs, finish_reason=text.finish_reason
    )


def _say_failure(ended: Future[None]) -> None:
    error = ended.exception()
    if error is not None:
        say(f"firstlight: the scheduler failed: {type(error).__name__}: {error}")

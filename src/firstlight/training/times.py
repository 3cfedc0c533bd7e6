"""Times of the training loop: of its steps, evaluations and saves."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Literal

#: Parts of the training loop's time other than steps: the first generated text of a process,
#: evaluations of the loss, scores of tasks, saves.
Part = Literal["first text", "samples", "evaluation", "tasks", "save"]

#: First steps of a process, which allocate memory and compile, and are slower than the others. The
#: steps after them are the settled steps.
_SLOW_STEPS = 2

#: Number of settled steps whose times are remembered.
_MOST_STEPS = 10_000


class LoopTimes:
    """Times of the training loop in this process: of its steps and of its other parts.

    Args:
        clock: monotonic clock in seconds.

    Attributes:
        steps: (sequences, seconds) of the last settled steps, waits for data and logs included.
        slow_steps: (sequences, seconds) of the first steps, waits for data and logs included.
        settled_steps: number of all settled steps.
        settled_seconds: seconds of all settled steps.
        seconds: seconds of the last occurrence of each part; without parts that did not occur yet.
        write_seconds: seconds that a thread took to write the last checkpoint; 0 if training waits
            for the writing.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._begun: float | None = None
        self._step_began = self._apart = 0.0
        self._sequences = 0
        self.steps: deque[tuple[int, float]] = deque(maxlen=_MOST_STEPS)
        self.slow_steps: list[tuple[int, float]] = []
        self.settled_steps, self.settled_seconds = 0, 0.0
        self.seconds: dict[Part, float] = {}
        self.write_seconds = 0.0

    @property
    def elapsed(self) -> float:
        """Seconds since the first step of this process began."""
        return 0.0 if self._begun is None else self._clock() - self._begun

    def begin_step(self) -> None:
        """End the step before, if there was one, and begin the next one."""
        now = self._clock()
        if self._begun is None:
            self._begun = now
        if self._sequences:
            # From one beginning to the next, so that waits for data and logs count, but without the
            # parts, which have times of their own.
            seconds = now - self._step_began - self._apart
            # The first steps compile, allocate memory and read files that are not cached yet.
            if len(self.slow_steps) < _SLOW_STEPS:
                self.slow_steps.append((self._sequences, seconds))
            else:
                self.steps.append((self._sequences, seconds))
                self.settled_steps += 1
                self.settled_seconds += seconds
        self._step_began, self._apart, self._sequences = now, 0.0, 0

    def count(self, sequences: int) -> None:
        """Note the number of sequences of the current step, which is then one that counts."""
        self._sequences = sequences

    @contextlib.contextmanager
    def part(self, name: Part) -> Iterator[None]:
        """Context for work that is not part of a step, and is measured separately."""
        began = self._clock()
        try:
            yield
        finally:  # an evaluation may end in a rollback, after which the run goes on
            taken = self._clock() - began
            self._apart += taken
        # Not of work that was broken off, which says nothing of the next.
        self.seconds[name] = taken

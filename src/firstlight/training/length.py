"""The length of a run in minutes: the time of its steps, evaluations and saves, and the number of
steps that follows from it, once, on the disk before the learning rate depends on it."""

from __future__ import annotations

import contextlib
import statistics
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from firstlight.errors import CheckpointError
from firstlight.files.atomic import write_json
from firstlight.optim.batch_schedule import BatchSchedule
from firstlight.optim.schedule import DecidedLength, PredictedLength, ScheduleConfig
from firstlight.report.length import LENGTH_NAME, read_length
from firstlight.report.records import METRICS_NAME, sound_json_lines

#: Parts of the loop's time beside the steps themselves.
Part = Literal["evaluation", "tasks", "save"]

#: First steps of a process, which touch memory and compile: no measure of the others.
_SLOW_STEPS = 2

#: Greater ones in a log, a thousand years, are damage.
_MOST_SECONDS = 3e10

#: Settled steps, and seconds of them, that a decision needs (in short runs this share).
_FEWEST_STEPS = 8
_FEWEST_SECONDS = 30.0
_FEWEST_SHARE = 0.02

#: Share of the remaining time after which fewer settled steps are enough, for runs of a few slow
#: steps.
_ENOUGH_SHARE = 0.2

#: Share of a run's greatest number of steps that is enough to measure if the steps are too quick
#: for the shares above; such a run will hardly use its minutes.
_QUICK_SHARE = 0.2

#: Steps that are remembered.
_MOST_STEPS = 10_000

#: Number of times in a run that it is checked if the length has to be decided.
_CHECKS = 500

#: Most steps of a run.
_LONGEST = 2**40


class LoopTimes:
    """Seconds of the training loop since it began in this process, and of its parts.

    Args:
        clock: the clock, in seconds.

    Attributes:
        steps: (sequences, seconds) of the last settled steps, waits for data and logs included.
        slow_steps: (sequences, seconds) of the first steps, waits for data and logs included.
        settled_steps, settled_seconds: number of all settled steps, and their time.
        seconds: seconds of the last evaluation, scores of tasks and save, as far as there was one.
        write_seconds: seconds that a thread took to write the last checkpoint; 0 where training
            waits for that.
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
        """End the step before, if there was one, and begin the next."""
        now = self._clock()
        if self._begun is None:
            self._begun = now
        if self._sequences:
            # Waits for data and logs lie between two beginnings, and count, unlike evaluations and
            # saves.
            seconds = now - self._step_began - self._apart
            # The first steps compile, allocate and read cold files: others are not as slow.
            if len(self.slow_steps) < _SLOW_STEPS:
                self.slow_steps.append((self._sequences, seconds))
            else:
                self.steps.append((self._sequences, seconds))
                self.settled_steps += 1
                self.settled_seconds += seconds
        self._step_began, self._apart, self._sequences = now, 0.0, 0

    def count(self, sequences: int) -> None:
        """Note that the current step has updated the model with this number of sequences."""
        self._sequences = sequences

    @contextlib.contextmanager
    def part(self, name: Part) -> Iterator[None]:
        """A context of work that is not part of a step."""
        began = self._clock()
        yield
        self.seconds[name] = self._clock() - began
        self._apart += self.seconds[name]


@dataclass(frozen=True)
class Periodic:
    """Evaluations or saves of a run.

    Attributes:
        every_steps: steps between two; 0 is at the end only.
        seconds: seconds of each.
        last_seconds: seconds of the one after the last step.
    """

    every_steps: int
    seconds: float
    last_seconds: float

    def total(self, step: int, steps: int) -> float:
        """Seconds of all during and after the `steps` steps that follow `step`."""
        between = 0
        if self.every_steps:
            between = (step + steps - 1) // self.every_steps - step // self.every_steps
        return between * self.seconds + self.last_seconds


def steps_in_time(
    seconds: float,
    step: int,
    sequence_seconds: float,
    batch: BatchSchedule,
    periodic: Sequence[Periodic],
) -> int:
    """The greatest number of steps that end within a time, including the work between them and
    after them; at least 1.

    Args:
        seconds: the time.
        step: steps done before.
        sequence_seconds: seconds of a sequence of a step.
        batch: sequences of each step.
        periodic: evaluations and saves.
    """
    done = batch.before(step)

    def needed(steps: int) -> float:
        training = sequence_seconds * (batch.before(step + steps) - done)
        return training + sum(one.total(step, steps) for one in periodic)

    # The time grows with the steps, so that halving finds the last number that fits.
    return max(bisect_right(range(1, _LONGEST), seconds, key=needed), 1)


def mean_sequence_seconds(steps: Sequence[tuple[int, float]], ahead: float) -> float:
    """Seconds that a sequence takes in a step. It is the mean over the last steps, over half of the
    number of steps to predict and at most half of all steps. So a machine that has become slower
    soon counts as slow, and the first seconds of a run, when processors are cool, don't count.

    A step that took more than twice the median counts as twice the median: a machine that stood
    still for a moment is not expected to do so again.

    Args:
        steps: (sequences, seconds) of each step, at least one.
        ahead: seconds of the steps to come.
    """
    recent: list[tuple[int, float]] = []
    back, most_back = 0.0, min(ahead, sum(seconds for _, seconds in steps)) / 2
    for sequences, seconds in reversed(steps):
        if back >= most_back and len(recent) >= _FEWEST_STEPS:
            break
        recent.append((sequences, seconds))
        back += seconds
    most = 2 * statistics.median(seconds / sequences for sequences, seconds in recent)
    total = sum(min(seconds, most * sequences) for sequences, seconds in recent)
    return total / sum(sequences for sequences, _ in recent)


class TimeBudget:
    """The minutes of a run, the used part of them, and the number of steps that fit.

    Args:
        config: the recipe's `schedule` section.
        length: the number of steps, predicted or decided.
        seconds_used: seconds of the training loop in earlier processes of the run.
        most_steps: most steps of the run, however much time there is; None is no limit.
        is_new: True if this process is the first one.

    Attributes:
        times: the times of this process.
    """

    def __init__(
        self,
        config: ScheduleConfig,
        length: PredictedLength,
        seconds_used: float,
        times: LoopTimes,
        most_steps: int | None = None,
        *,
        is_new: bool,
    ) -> None:
        assert config.max_minutes is not None
        self._most_steps = most_steps
        self._config, self.seconds = config, 60 * config.max_minutes
        self.length, self.is_new, self.times = length, is_new, times
        self._used_before = seconds_used
        self._next_check = 0.0

    @property
    def seconds_used(self) -> float:
        """Seconds of the training loop so far, in all processes of the run one after the other."""
        return self._used_before + self.times.elapsed

    def write(self, run_folder: Path) -> None:
        """Write the length to the disk, where resuming looks for it.

        Raises:
            StorageError: the disk refuses.
        """
        write_json(run_folder / LENGTH_NAME, self.record | {"seconds_used": self.seconds_used})

    @property
    def record(self) -> dict[str, Any]:
        """The length as JSON values."""
        length = self.length
        record: dict[str, Any] = {
            "max_minutes": self._config.max_minutes,
            "predicted_steps": length.predicted_steps,
        }
        if self._most_steps is not None:
            record["most_steps"] = self._most_steps
        if isinstance(length, DecidedLength):
            record |= {"max_steps": length.max_steps, "decided_at": length.decided_at}
        return record

    def decided_steps(
        self,
        step: int,
        warmup_steps: int,
        batch: BatchSchedule,
        periodic: Callable[[float], Sequence[Periodic]],
    ) -> int | None:
        """The number of steps of the run, if it has to be decided now; None if there is time.

        Args:
            step: steps done.
            warmup_steps: steps over which the learning rate rises.
            batch: sequences of each step.
            periodic: gives the evaluations and saves of the run from the seconds of a sequence.
        """
        used, most = self.seconds_used, self._most_steps
        left = self.seconds - used
        # Whatever the time, the decay before the last step has to begin.
        ends = most is not None and (
            step >= _QUICK_SHARE * most
            and self._config.decides_length(step, warmup_steps, most - step)
        )
        is_early = used < self._next_check or not self._is_settled(left)
        if left > 0 and is_early and not ends:
            return None
        # A prediction looks at all recent steps: it is made so many times in a run, and not in
        # each step.
        self._next_check = used + self.seconds / _CHECKS
        steps = self.times.steps or self.times.slow_steps
        most_left = _LONGEST if most is None else max(most - step, 0)
        if not steps:
            return step + (most_left if ends and left > 0 else min(1, most_left))
        seconds = mean_sequence_seconds(steps, left)
        steps_left = steps_in_time(left, step, seconds, batch, periodic(seconds))
        steps_left = min(steps_left, most_left)
        is_due = ends or self._config.decides_length(step, warmup_steps, steps_left)
        return step + steps_left if left <= 0 or is_due else None

    def _is_settled(self, left: float) -> bool:
        """True if the steps that were measured tell how long others take.

        Args:
            left: seconds that are left.
        """
        count, seconds = self.times.settled_steps, self.times.settled_seconds
        enough = min(_FEWEST_SHARE * self.seconds, _FEWEST_SECONDS)
        is_long = count >= _FEWEST_STEPS and seconds >= enough
        return is_long or (count > 0 and seconds >= _ENOUGH_SHARE * left)


def predicted_steps(
    max_minutes: float, tokens_per_second: float, batch: BatchSchedule, seq_len: int
) -> int:
    """Steps that a run in minutes makes at a predicted speed, without evaluations and saves."""
    sequences = 60 * max_minutes * tokens_per_second / seq_len
    none: Sequence[Periodic] = ()
    # With a second for each sequence, their number is the time.
    return steps_in_time(sequences, 0, 1.0, batch, none)


def recorded_length(run_folder: Path, saved: Mapping[str, Any]) -> dict[str, Any]:
    """The length that a run has written down, and the seconds that it has used, as JSON values.

    Args:
        run_folder: the run's; its file counts, which is newer than any checkpoint.
        saved: the trainer state of the checkpoint that is gone on from; {} without one.

    Raises:
        CheckpointError: a file is damaged.
    """
    record = read_length(run_folder) or dict(saved.get("length") or {})
    used = [float(record.pop("seconds_used", 0.0))]
    # Also of a run that began with a length in steps: the time that its steps took.
    steps_took = 0.0
    lines, _ = sound_json_lines(run_folder / METRICS_NAME)  # said when the logs are opened
    for line in lines:
        steps_took += _seconds(line.get("seconds"))
        used.append(_seconds(line.get("elapsed_seconds")))
    return {**record, "seconds_used": max(used) or steps_took}


def _seconds(value: object) -> float:
    """The seconds in a line of a log; 0 for a damaged value."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 0.0
    return float(value) if 0 < value <= _MOST_SECONDS else 0.0


def length_of(record: Mapping[str, Any]) -> PredictedLength:
    """The number of steps in a record.

    Raises:
        CheckpointError: the record lacks a key.
    """
    try:
        if "max_steps" in record:
            return DecidedLength(
                record["predicted_steps"], record["max_steps"], record["decided_at"]
            )
        return PredictedLength(record["predicted_steps"])
    except KeyError as error:
        raise CheckpointError(f"{LENGTH_NAME} is damaged: it lacks {error}") from None

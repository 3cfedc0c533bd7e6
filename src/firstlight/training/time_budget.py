"""Support runs that have a time budget in minutes. The number of steps of such a run is derived
from the durations of its steps, evaluations and saves.

The number of steps is predicted at the start, decided when the learning rate begins to depend on
it, and corrected if the speed changes afterwards. The decided number is written to disk before a
learning rate depends on it, so that a resumed run has the same number of steps.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from firstlight.checkpoint.checkpoint import load_trainer_state
from firstlight.errors import CheckpointError
from firstlight.files.atomic import write_json
from firstlight.hardware.device import peak_flops
from firstlight.models.accounting import meta_model, train_flops_per_token
from firstlight.optim.schedule import (
    BatchSchedule,
    DecidedLength,
    PredictedLength,
    ScheduleConfig,
    most_steps,
)
from firstlight.recipe import ResolvedRecipe
from firstlight.recipe.resolve import USUAL_MFU
from firstlight.run_log.names import LENGTH_NAME, METRICS_NAME
from firstlight.run_log.reader import read_length, sound_json_lines
from firstlight.training.processes import on_main
from firstlight.training.program import TrainingProgram

#: Names of the parts of the training loop, other than steps, whose durations are measured. The
#: first four parts are run only to predict other durations. They generate the first tokens of a
#: process, generate two more sequences of `PROBE_TOKENS` tokens, and write a file of `PROBE_BYTES`
#: bytes. The remaining parts are sample texts, loss evaluations, task evaluations and saves.
Part = Literal[
    "first text", "short text", "long text", "file", "samples", "evaluation", "tasks", "save"
]

#: Estimates used until measurements are available. FORWARD_SHARE is the time that an evaluation
#: takes per sequence, as a fraction of the time that a training step takes per sequence.
#: WRITTEN_PER_SECOND is the speed at which a checkpoint is written and verified, in bytes per
#: second.
FORWARD_SHARE = 0.35
WRITTEN_PER_SECOND = 150e6

#: Lengths in tokens of two sequences that are generated in order to predict the duration of the
#: first sample texts. Two lengths are needed to separate the time per token from the fixed time per
#: sequence, which includes copying the weights.
PROBE_TOKENS = (1, 9)

#: Size in bytes of a file that is written in order to predict how long the first checkpoint takes.
PROBE_BYTES = 1 << 26


def sampled_token_seconds(token_seconds: float) -> float:
    """Estimate how many seconds it takes to generate a token, before any text has been generated.
    Generating a token requires reading all weights.

    Args:
        token_seconds: seconds per token in a training step.
    """
    return max(0.005, 10 * token_seconds)


#: Maximum time between two checkpoints of a run with a time budget, as a fraction of the budget and
#: in seconds. The smaller value applies. This bounds the amount of work that can be lost even if
#: `checkpoint.every_steps` steps take longer than planned. If saves are slow, the interval is
#: increased so that they take at most SAVE_SHARE of the time.
LOST_SHARE, MOST_LOST_SECONDS = 1 / 6, 600.0
SAVE_SHARE = 0.05


def save_interval(seconds: float, save_seconds: float) -> float:
    """Return the maximum seconds between two checkpoints of a run with a time budget.

    Args:
        seconds: the time budget in seconds.
        save_seconds: duration of a save in seconds.
    """
    return max(min(LOST_SHARE * seconds, MOST_LOST_SECONDS), save_seconds / SAVE_SHARE)


#: Number of steps at the start of a process that are slower because they allocate memory and
#: compile. Later steps are called settled steps.
_SLOW_STEPS = 2

#: Maximum number of steps, after the slow first steps of a process, whose times are stored.
_MOST_STEPS = 10_000


class LoopTimes:
    """Durations of the steps and other parts of the training loop, measured in this process. The
    first few steps of a process are slower; all later steps are called settled steps.

    Args:
        clock: monotonic clock in seconds.

    Attributes:
        steps: number of sequences and duration in seconds of each of the latest settled steps. The
            duration includes waits for data and logs.
        slow_steps: number of sequences and duration in seconds of each of the first steps. The
            duration includes waits for data and logs.
        settled_steps: total number of settled steps.
        settled_seconds: total seconds of all settled steps.
        seconds: duration in seconds of the last occurrence of each part; parts that have not
            occurred are absent.
        write_seconds: seconds that a thread took to write the last checkpoint; 0 if training waits
            for the write.
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

    @property
    def compile_seconds(self) -> float:
        """Seconds by which the first steps took longer than the same number of settled steps would
        have taken. For a compiled run, this is the compile time. At least one settled step is
        required.
        """
        each = statistics.median(seconds / sequences for sequences, seconds in self.steps)
        return sum(max(seconds - each * sequences, 0.0) for sequences, seconds in self.slow_steps)

    def begin_step(self) -> None:
        """End the previous step, if any, and begin the next one."""
        now = self._clock()
        if self._begun is None:
            self._begun = now
        if self._sequences:
            # Measure the time from the beginning of one step to the beginning of the next one. It
            # includes waits for data and logs. The time of evaluations, saves and other separately
            # timed parts is excluded.
            seconds = now - self._step_began - self._apart
            # Store the first steps separately. They are slower because they compile, allocate
            # memory and read files that the system has not cached yet.
            if len(self.slow_steps) < _SLOW_STEPS:
                self.slow_steps.append((self._sequences, seconds))
            else:
                self.steps.append((self._sequences, seconds))
                self.settled_steps += 1
                self.settled_seconds += seconds
        self._step_began = now
        self._apart = 0.0
        self._sequences = 0

    def count(self, sequences: int) -> None:
        """Set the number of sequences in the current step. A step for which this method is not
        called is not timed.
        """
        self._sequences = sequences

    @contextlib.contextmanager
    def part(self, name: Part) -> Iterator[None]:
        """Measure the duration of a part of the loop, which is excluded from the step's
        duration.
        """
        began = self._clock()
        try:
            yield
        finally:  # An evaluation may end in a rollback, after which the run continues.
            taken = self._clock() - began
            self._apart += taken
        # If the work was interrupted, do not store its duration, because it does not predict how
        # long complete work takes.
        self.seconds[name] = taken


#: Maximum plausible seconds in a line of a log, about a thousand years. A larger number indicates a
#: damaged line.
_MOST_SECONDS = 3e10

#: Minimum number of steps, after the slow first steps of a process, that must be measured before
#: the number of steps of the run is decided. The second constant is the minimum total duration of
#: these steps in seconds. In short runs, the minimum duration is a fraction of the time budget.
_FEWEST_STEPS = 8
_FEWEST_SECONDS = 30.0
_FEWEST_SHARE = 0.02

#: After this fraction of the remaining time, fewer measured steps are sufficient. This rule is
#: meant for runs that consist of a few long steps.
_ENOUGH_SHARE = 0.2

#: Fraction of the run's step limit (`max_steps`, `epochs`) after which the number of steps may be
#: decided even if the steps were too fast to reach the minimums above. Such a run reaches its step
#: limit long before its time is used up.
_QUICK_SHARE = 0.2

#: Number of times per run that the number of steps is predicted in order to check whether it must
#: be decided.
_CHECKS = 500

#: _CHECK_SHARE is the fraction of the remaining steps after which a decided number of steps is
#: checked again. _TOLERANCE is the largest difference between the predicted end of the run and the
#: time budget that does not cause a correction, as a fraction of the budget. In simulations of
#: machines that became three times slower or faster during the decay, runs missed the budget by 2%.
#: When the check took place after half of the remaining steps, runs missed the budget by 20%. When
#: it took place after an eighth of them, the number of steps was corrected up to twice as often.
_CHECK_SHARE = 0.25
_TOLERANCE = 0.02

#: Maximum number of steps of a run without a step limit.
_LONGEST = 2**40


@dataclass(frozen=True)
class Periodic:
    """Work that is repeated during a run, such as evaluations or saves.

    Attributes:
        every_steps: number of steps between occurrences; 0 if the work is done only at the end.
        seconds: duration in seconds of each occurrence before the end of the run.
        last_seconds: duration in seconds of the occurrence at the end of the run, after the last
            step.
    """

    every_steps: int
    seconds: float
    last_seconds: float

    def total(self, step: int, steps: int) -> float:
        """Return the total seconds of all occurrences during and after the `steps` steps that
        follow `step`.
        """
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
    """Return the largest number of steps that fit into a given time, including the evaluations and
    saves that run between them and after the last one. The result is at least 1.

    Args:
        seconds: available time in seconds.
        step: number of steps already completed.
        sequence_seconds: seconds per sequence in a step.
        batch: number of sequences per step.
        periodic: evaluations and saves of the run.
    """

    def needed(steps: int) -> float:
        return seconds_of_steps(steps, step, sequence_seconds, batch, periodic=periodic)

    # The time increases with the number of steps, so bisection finds the largest number that fits.
    return max(bisect_right(range(1, _LONGEST), seconds, key=needed), 1)


def seconds_of_steps(
    steps: int,
    step: int,
    sequence_seconds: float,
    batch: BatchSchedule,
    periodic: Sequence[Periodic],
) -> float:
    """Return the duration in seconds of the `steps` steps that follow `step`, including the
    evaluations and saves that run between them and after the last one. For the other arguments, see
    `steps_in_time`.
    """
    training = sequence_seconds * (batch.before(step + steps) - batch.before(step))
    return training + sum(one.total(step, steps) for one in periodic)


def mean_sequence_seconds(steps: Sequence[tuple[int, float]], ahead: float) -> float:
    """Return the mean number of seconds per sequence, averaged over the most recent steps.

    These steps span a period that is half as long as the time to be predicted, and at most half of
    the time since the first step. The mean therefore adapts quickly if a machine becomes slower,
    and excludes the start of a run, when processors are still cool and fast.

    The duration of a step is limited to twice the median, because a machine that stalled once is
    not expected to stall again.

    Args:
        steps: number of sequences and duration in seconds of each step. At least one step is
            required.
        ahead: duration of the steps to be predicted, in seconds.
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
    """Time budget of a run, with the time used so far and the number of steps that fit into it.

    Args:
        config: the recipe's `schedule` section.
        length: the predicted or decided number of steps.
        seconds_used: seconds spent in the training loop by earlier processes of the run.
        times: durations measured in this process.
        most_steps: largest number of steps that the recipe allows, even if time remains; None for
            no limit.
        is_new: True if `length` is a first, rough prediction.

    Attributes:
        seconds: the time budget in seconds.
        most_steps: largest number of steps that the recipe allows; None for no limit.
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
        self.most_steps = most_steps
        self._config, self.seconds = config, 60 * config.max_minutes
        self.length = length
        self.is_new = is_new
        self.times = times
        self._used_before = seconds_used
        self._next_prediction = 0.0
        #: Step at which the number of steps is checked again, if this process has decided that
        #: number.
        self._next_check_step: int | None = None

    @property
    def seconds_used(self) -> float:
        """Seconds spent in the training loop so far, in this process and in earlier processes of a
        resumed run.
        """
        return self._used_before + self.times.elapsed

    def add_used(self, seconds: float) -> None:
        """Add the time before this process's first step to the used time. If an earlier process has
        decided the number of steps, that number is kept, so that the run ends as if it had not been
        stopped.
        """
        self._used_before += seconds

    def write(self, run_folder: Path) -> None:
        """Write the length and the used seconds to the run folder, where a resumed run reads them.

        Raises:
            StorageError: the file can't be written.
        """
        write_json(run_folder / LENGTH_NAME, self.record | {"seconds_used": self.seconds_used})

    @property
    def record(self) -> dict[str, Any]:
        """Contents of length.json, as JSON values."""
        length = self.length
        record: dict[str, Any] = {
            "max_minutes": self._config.max_minutes,
            "predicted_steps": length.predicted_steps,
        }
        if self.most_steps is not None:
            record["most_steps"] = self.most_steps
        if isinstance(length, DecidedLength):
            record |= {"max_steps": length.max_steps, "decided_at": length.decided_at}
            if length.replaced:
                record["replaced"] = [list(pair) for pair in length.replaced]
        return record

    def take(self, max_steps: int, step: int) -> None:
        """Set the number of steps of the run, either when it is decided or when it is checked
        again.

        Args:
            max_steps: number of steps of the run, which may be unchanged.
            step: number of steps already completed.
        """
        now = self.length
        if not isinstance(now, DecidedLength):
            self.length = DecidedLength(now.predicted_steps, max_steps, step)
        elif max_steps != now.max_steps:
            replaced = (*now.replaced, (now.max_steps, step))
            self.length = replace(now, max_steps=max_steps, replaced=replaced)
        left = max_steps - step
        self._next_check_step = step + math.ceil(_CHECK_SHARE * left) if left > 1 else None

    @property
    def is_settled(self) -> bool:
        """True if the number of steps is decided and will not be corrected."""
        return isinstance(self.length, DecidedLength) and self._next_check_step is None

    def is_due(self, step: int) -> bool:
        """Return True if the number of steps may have to be decided or corrected at this step. The
        result is the same in all processes of a run.

        If an earlier process of a resumed run decided the number, it is not corrected.
        """
        return not isinstance(self.length, DecidedLength) or step == self._next_check_step

    def decided_steps(
        self,
        step: int,
        warmup_steps: int,
        batch: BatchSchedule,
        periodic: Callable[[float], Sequence[Periodic]],
    ) -> int | None:
        """Return the number of steps of the run if it must be decided at this step, or None if it
        can be decided later.

        Args:
            step: number of steps already completed.
            warmup_steps: steps over which the learning rate rises.
            batch: number of sequences per step.
            periodic: function that maps seconds per sequence to the run's evaluations and saves.
        """
        used, most = self.seconds_used, self.most_steps
        left = self.seconds - used
        # True if the step limit requires a decision at this step, regardless of the remaining time.
        ends = most is not None and (
            step >= _QUICK_SHARE * most
            and self._config.decides_length(step, warmup_steps, most - step)
        )
        is_early = used < self._next_prediction or not self._is_settled(left)
        if left > 0 and is_early and not ends:
            return None
        # Do not predict the number in each step, because a prediction iterates over all stored
        # steps.
        self._next_prediction = used + self.seconds / _CHECKS
        steps = self.times.steps or self.times.slow_steps
        most_left = _LONGEST if most is None else max(most - step, 0)
        if not steps:
            return step + (most_left if ends and left > 0 else min(1, most_left))
        seconds = mean_sequence_seconds(steps, left)
        steps_left = steps_in_time(left, step, seconds, batch, periodic=periodic(seconds))
        steps_left = min(steps_left, most_left)
        is_due = ends or self._config.decides_length(step, warmup_steps, steps_left)
        return step + steps_left if left <= 0 or is_due else None

    def corrected_steps(
        self, step: int, batch: BatchSchedule, periodic: Callable[[float], Sequence[Periodic]]
    ) -> int:
        """Check the decided number of steps again, and return the number of steps of the run. The
        number changes if the run would miss its time budget by more than 2%, because the machine
        has become slower or faster.

        A check never removes more than half of the remaining steps, so that the learning rate does
        not drop abruptly. For the arguments, see `decided_steps`.
        """
        assert isinstance(self.length, DecidedLength)
        max_steps, left = self.length.max_steps, self.seconds - self.seconds_used
        steps = self.times.steps or self.times.slow_steps
        seconds = mean_sequence_seconds(steps, max(left, 0.0))
        parts = periodic(seconds)
        needed = seconds_of_steps(max_steps - step, step, seconds, batch, periodic=parts)
        if abs(needed - left) <= _TOLERANCE * self.seconds:
            return max_steps
        fewest = (max_steps - step + 1) // 2
        corrected = step + max(steps_in_time(left, step, seconds, batch, periodic=parts), fewest)
        return corrected if self.most_steps is None else min(corrected, self.most_steps)

    def _is_settled(self, left: float) -> bool:
        """Return True if enough steps have been measured to predict the duration of further steps.

        Args:
            left: remaining seconds of the run.
        """
        count, seconds = self.times.settled_steps, self.times.settled_seconds
        enough = min(_FEWEST_SHARE * self.seconds, _FEWEST_SECONDS)
        is_long = count >= _FEWEST_STEPS and seconds >= enough
        return is_long or (count > 0 and seconds >= _ENOUGH_SHARE * left)


def predicted_steps(
    max_minutes: float, tokens_per_second: float, batch: BatchSchedule, seq_len: int
) -> int:
    """Return the number of steps of a run with a time budget at a predicted speed, ignoring
    evaluations and saves.
    """
    sequences = 60 * max_minutes * tokens_per_second / seq_len
    none: Sequence[Periodic] = ()
    # At one second per sequence, the time in seconds that is passed below equals the number of
    # sequences.
    return steps_in_time(sequences, 0, 1.0, batch, periodic=none)


def recorded_length(run_folder: Path, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recorded length and used seconds of a run as JSON values.

    Args:
        run_folder: the run folder. Its length file takes precedence over checkpoints because it is
            newer.
        saved: the trainer state of the checkpoint from which the run is resumed; empty without a
            checkpoint.

    Raises:
        CheckpointError: a file is damaged.
    """
    record = read_length(run_folder) or dict(saved.get("length") or {})
    used = [float(record.pop("seconds_used", 0.0))]
    # A run that began without a time budget did not record elapsed_seconds. In this case, use the
    # total duration of its steps.
    steps_took = 0.0
    # Ignore errors in the log here. They are reported when the logs are opened.
    lines, _ = sound_json_lines(run_folder / METRICS_NAME)
    for line in lines:
        steps_took += _seconds(line.get("seconds"))
        used.append(_seconds(line.get("elapsed_seconds")))
    return {**record, "seconds_used": max(used) or steps_took}


def _seconds(value: object) -> float:
    """Return the seconds in a line of a log, or 0 if the value is damaged."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 0.0
    return float(value) if 0 < value <= _MOST_SECONDS else 0.0


def length_of(record: Mapping[str, Any]) -> PredictedLength:
    """Return the number of steps in a record of a run's length; see `TimeBudget.record`.

    Raises:
        CheckpointError: the record lacks a key.
    """
    try:
        if "max_steps" in record:
            return DecidedLength(
                record["predicted_steps"],
                record["max_steps"],
                record["decided_at"],
                [(steps, at) for steps, at in record.get("replaced", [])],
            )
        return PredictedLength(record["predicted_steps"])
    except KeyError as error:
        raise CheckpointError(f"{LENGTH_NAME} is damaged: it lacks {error}") from None


def budget_of(
    recipe: ResolvedRecipe,
    program: TrainingProgram,
    folder: Path,
    newest: Path | None,
    rows_per_epoch: int,
    *,
    resumed: bool,
) -> TimeBudget | None:
    """Return the time budget of a run, or None for runs without a time budget. A resumed run keeps
    its recorded number of steps.

    Args:
        recipe: recipe of the run.
        program: program of the run.
        folder: the run folder.
        newest: checkpoint from which the run is resumed or branches off; None without a checkpoint.
        rows_per_epoch: number of rows (sequences of `seq_len` tokens) in the training split.
        resumed: False for a new run, whose record in the folder is ignored.

    Raises:
        CheckpointError: the run's record of its length is damaged.
    """
    minutes = recipe.schedule.max_minutes
    if minutes is None:
        return None
    engine = program.engine
    batch = recipe.batch.schedule(recipe.data.seq_len, engine.size)
    most = most_steps(recipe.schedule, rows_per_epoch, batch)

    def find() -> dict[str, Any]:
        record: dict[str, Any] = {"seconds_used": 0.0}
        if resumed and (newest is None or newest.parent.parent.resolve() == folder.resolve()):
            record = recorded_length(folder, {} if newest is None else load_trainer_state(newest))
        # A recorded number of steps is valid only if the time budget and the step limit are
        # unchanged.
        if (record.get("max_minutes"), record.get("most_steps")) == (minutes, most):
            return record
        # The run is new, or it is resumed with a different time budget. A resumed run keeps the
        # time that it has already used.
        rate = _usual_tokens_per_second(recipe, program)
        steps = predicted_steps(minutes, rate, batch, recipe.data.seq_len)
        return {"seconds_used": record["seconds_used"], "predicted_steps": steps, "is_new": True}

    record: Mapping[str, Any] = on_main(engine, find)
    return TimeBudget(
        recipe.schedule,
        length_of(record),
        record["seconds_used"],
        LoopTimes(),
        most_steps=most,
        is_new=record.get("is_new", False),
    )


def _usual_tokens_per_second(recipe: ResolvedRecipe, program: TrainingProgram) -> float:
    """Predict the speed of a run without a forecast. The prediction is rough and assumes a typical
    MFU (model FLOPs utilization).
    """
    peak = peak_flops(program.hardware.device, program.dtype) * program.engine.world.size
    model = meta_model(program.model.config)
    flops = train_flops_per_token(model, recipe.data.seq_len, frozen=recipe.lora is not None)
    return USUAL_MFU * peak / flops

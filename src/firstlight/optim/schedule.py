"""Schedules of the learning rate and the batch size. Both are pure functions of the step.

`resolve_schedule` creates the learning-rate schedule from the `schedule` section of a recipe.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from firstlight.errors import ConfigError
from firstlight.section import Section

#: Curves of the learning rate after the warm-up.
ScheduleKind = Literal["cosine", "linear", "wsd", "constant", "inverse_sqrt"]
#: Shapes of the decay of the kind "wsd" (warm-up, stable, decay).
DecayShape = Literal["linear", "1-sqrt"]


@dataclass(frozen=True)
class Schedule:
    """A learning-rate schedule whose lengths are all resolved to numbers of steps.

    Attributes:
        max_steps: number of optimizer steps of the run.
        warmup_steps: number of steps over which the learning rate rises.
        decay_steps: step at which the learning rate reaches its minimum, counted from the run's
            first step.
        min_lr_ratio: minimum learning rate as a fraction of the peak; 1 for a constant rate.
        kind: curve after the warm-up.
        cooldown_steps: number of steps of the decay; 0 if the decay begins directly after the
            warm-up.
        decay_shape: shape of the wsd decay.
        is_open: True for a run with a time budget whose number of steps has not been decided yet.
            Until then, `max_steps` is a prediction, and no learning rate depends on it.
        replaced: earlier values of `max_steps` that were replaced (see `DecidedLength`).
        decay_starts_at_peak: True if the first step after `decay_begin` is still at the peak, so
            that the minimum is reached one step later. It is always True with `initial_scale`.
        initial_scale: learning rate of the first step as a fraction of the peak, or None. If it is
            set, the first step after the warm-up is at the peak. If it is None, the last step of
            the warm-up is at the peak."""

    max_steps: int
    warmup_steps: int
    decay_steps: int
    min_lr_ratio: float
    kind: ScheduleKind = "cosine"
    cooldown_steps: int = 0
    decay_shape: DecayShape = "linear"
    is_open: bool = False
    replaced: Sequence[tuple[int, int]] = ()
    decay_starts_at_peak: bool = False
    initial_scale: float | None = None

    @property
    def decay_begin(self) -> int:
        """Number of steps before the learning rate begins to fall; `max_steps` if it never falls.
        With `initial_scale`, the following step is also at the peak."""
        if self.kind == "constant":
            return self.max_steps
        return self.decay_steps - self.cooldown_steps if self.cooldown_steps else self.warmup_steps

    def in_words(self, peak: float) -> str:
        """Return a description of the learning rate after the warm-up, for use in messages.

        Args:
            peak: peak learning rate.
        """
        late = self._steps_late
        if self.kind == "constant":
            # Unless the curve is delayed by one step, the last step of the warm-up is already at
            # the peak.
            if self.warmup_steps + late <= self.max_steps:
                return "then constant"
            return (
                "a warm-up so long that the learning rate never reaches its peak: lower "
                "schedule.warmup_steps"
            )
        if self.warmup_steps + late >= self.max_steps:
            if self.warmup_steps <= 1:
                return "too few steps for the learning rate to fall"
            return (
                "a warm-up so long that the learning rate never falls: lower schedule.warmup_steps"
            )
        if self.kind == "inverse_sqrt":
            last = f"{peak * self.lr_scale(self.max_steps - 1):.4g}"
            return f"then by the inverse square root of the step to {last} at the end"
        # In an open schedule, these step numbers are computed from the predicted number of steps.
        about = "about " if self.is_open else ""
        end, begin = self.decay_steps + late, self.decay_begin + late
        at_end = f"at {about}step {end:,}"
        if end == self.max_steps + 1:
            at_end = "after the last step"
        lowest = f"down to {peak * self.min_lr_ratio:.4g} {at_end}"
        if self.kind == "wsd":
            return f"stable to {about}step {begin:,}, then {lowest} ({self.decay_shape})"
        stable = f"stable to step {begin:,}, " if self.cooldown_steps else ""
        return f"{stable}then {'linearly ' if self.kind == 'linear' else ''}{lowest}"

    @property
    def _steps_late(self) -> int:
        """Number of steps, 0 or 1, by which the part of the curve after the warm-up is delayed."""
        return int(self.decay_starts_at_peak or self.initial_scale is not None)

    def lr_scale(self, step: int) -> float:
        """Return the fraction of the peak learning rate at `step` (0 is the first update).

        - Warm-up: The fraction rises linearly from 1/warmup_steps at step 0 to 1 at step
          warmup_steps - 1. With initial_scale, it rises linearly from initial_scale at step 0 to 1
          at step warmup_steps. The rest of the curve is then one step later, as in nanoGPT and
          transformers.
        - Stable: The fraction is 1 up to step decay_begin, and as long as the schedule is open.
        - Decay: The fraction falls to min_lr_ratio at step decay_steps - 1, and stays there. The
          curve is half a cosine (Loshchilov and Hutter 2017, without restarts) or linear. For wsd
          (Hu et al. 2024), it is linear or 1-sqrt (Haegele et al. 2024). If the run's number of
          steps is replaced, the remaining part of the curve is stretched or compressed. With
          decay_starts_at_peak, the decay is one step later.

        The kind "constant" has no decay. With the kind "inverse_sqrt", the fraction falls with the
        inverse square root of the step after the warm-up (Vaswani et al. 2017), but not below
        min_lr_ratio.
        """
        if step < self.warmup_steps:
            if self.initial_scale is None:
                return (step + 1) / self.warmup_steps
            return self.initial_scale + (1 - self.initial_scale) * step / self.warmup_steps
        step -= self._steps_late
        if self.kind == "inverse_sqrt":
            return max(math.sqrt(max(self.warmup_steps, 1) / (step + 1)), self.min_lr_ratio)
        begin = self.decay_begin
        if self.kind == "constant" or self.is_open or step < begin:
            return 1.0
        done = 0.0
        for steps, at in self.replaced:
            if step < at:
                break
            if at > begin:
                done += (1 - done) * (at - begin) / (steps - begin)
                begin = at
        else:
            steps = self.decay_steps
        progress = done + (1 - done) * min((step - begin + 1) / max(steps - begin, 1), 1.0)
        if self.kind == "cosine":
            left = 0.5 * (1 + math.cos(math.pi * progress))
        else:
            left = 1 - (math.sqrt(progress) if self.decay_shape == "1-sqrt" else progress)
        return self.min_lr_ratio + (1 - self.min_lr_ratio) * left


@dataclass(frozen=True)
class BatchSchedule:
    """The number of sequences in each optimizer step, summed over all processes.

    During a ramp, the batch size rises from `start` to `size` in increments of `start`. Each batch
    size of the ramp is used for the same number of steps. If `ramp_steps` can't be divided evenly
    among the batch sizes, some of them are used for one more step.

    Attributes:
        size: number of sequences per step after the ramp.
        start: number of sequences in the first step, a divisor of `size`.
        ramp_steps: number of steps of the ramp; 0 without a ramp.
    """

    size: int
    start: int
    ramp_steps: int = 0

    @property
    def in_words(self) -> str:
        """A description of the number of sequences per step, for use in messages."""
        if not self.ramp_steps:
            return f"{self.size:,}"
        return f"{self.start:,} to {self.size:,} (reached at step {self.ramp_steps + 1:,})"

    def at(self, step: int) -> int:
        """Return the number of sequences in a step. Steps are counted from 0."""
        if step >= self.ramp_steps:
            return self.size
        rises = self.size // self.start - 1
        return self.start * (1 + rises * step // self.ramp_steps)

    def before(self, step: int) -> int:
        """Return the total number of sequences in all steps before `step`, which is the position of
        the data loader."""
        ramped, rises = min(step, self.ramp_steps), self.size // self.start - 1
        # First step of each increment. From this step on, each step has `start` more sequences.
        begins = (-(-rise * self.ramp_steps // rises) for rise in range(1, rises))
        risen = sum(max(ramped - begin, 0) for begin in begins)
        return self.start * (ramped + risen) + self.size * (step - ramped)

    def steps_for(self, sequences: Fraction) -> int:
        """Return the smallest number of steps that together contain at least this many
        sequences."""
        whole = math.ceil(sequences)
        return bisect.bisect_left(range(-(-whole // self.start)), whole, key=self.before)

    def steps_within(self, sequences: Fraction) -> int:
        """Return the largest number of steps that together contain at most this many sequences."""
        steps = self.steps_for(sequences)
        return steps - (self.before(steps) > sequences)


#: Groups of keys that are alternatives to each other, and a description of the setting that each
#: group determines. At most one key of a group can be set.
ALTERNATIVES = (
    (("max_steps", "epochs"), "the length of the run"),
    (("warmup_steps", "warmup_tokens", "warmup_ratio"), "the length of the warm-up"),
    (("decay_steps", "decay_tokens"), "the end of the decay"),
    (("decay_fraction", "cooldown_steps"), "the length of the decay"),
    (("min_lr_ratio", "min_learning_rate"), "the last learning rate"),
)

#: Kinds of schedules to which a key applies, for keys that do not apply to all kinds.
KINDS_OF_KEYS: Mapping[str, Sequence[ScheduleKind]] = {
    "decay_steps": ("cosine", "linear", "wsd"),
    "decay_tokens": ("cosine", "linear", "wsd"),
    "decay_starts_at_peak": ("cosine", "linear", "wsd"),
    "decay_fraction": ("wsd",),
    "cooldown_steps": ("wsd",),
    "decay_shape": ("wsd",),
    "min_lr_ratio": ("cosine", "linear", "wsd", "inverse_sqrt"),
    "min_learning_rate": ("cosine", "linear", "wsd", "inverse_sqrt"),
}

#: Default `min_lr_ratio` if no minimum is set, keyed by `kind`. Kinds that are not listed use the
#: default of the field.
_DEFAULT_MINIMUM: Mapping[str, float | None] = {"wsd": 0.0, "inverse_sqrt": 0.0, "constant": None}

#: Default `decay_fraction`, used if the length of the wsd decay is not set.
_DECAY_FRACTION = 0.2

#: Fraction of the steps that are still left when a run with a time budget decides its number of
#: steps. It applies to kinds of schedules whose learning rate does not depend on the number of
#: steps.
_LAST_FRACTION = 0.02


class ScheduleConfig(Section):
    """The `schedule` section of a recipe."""

    kind: ScheduleKind = "cosine"
    """curve of the learning rate after the warm-up: "cosine" and "linear" decay to the minimum;
    "wsd" (warm-up, stable, decay) stays at the peak and decays in the last part of the run;
    "constant" stays at the peak; "inverse_sqrt" falls as 1/sqrt(step) for any length of run."""
    max_steps: int | None = Field(None, ge=0)
    """number of optimizer steps of the run; null trains for one epoch of the training split; 0
    evaluates and saves the unchanged model."""
    epochs: float | None = Field(None, gt=0)
    """number of passes over the training split, instead of max_steps; can be fractional."""
    max_minutes: float | None = Field(None, gt=0)
    """duration of the training loop in minutes, including evaluations and saves. The number of
    steps is decided during the run, based on the measured time per step. With wsd, this happens
    when the decay has to begin; with cosine and linear, it happens after the warm-up. The number is
    corrected if the speed changes later. If max_steps or epochs is also set, it is an upper
    limit."""
    warmup_steps: int | None = Field(None, ge=0)
    """number of steps over which the learning rate rises; null uses 5% of decay_steps."""
    warmup_tokens: int | None = Field(None, ge=0)
    """number of tokens over which the learning rate rises, instead of warmup_steps. It is rounded
    down to full steps. For example, 375,000,000 tokens at 524,288 tokens per step are 715 steps."""
    warmup_ratio: float | None = Field(None, ge=0, le=1)
    """fraction of the run's steps over which the learning rate rises, instead of warmup_steps. With
    max_minutes, it is a fraction of the number of steps that is predicted at the start."""
    initial_learning_rate: float | None = Field(None, ge=0)
    """learning rate of the first step. From this value, the learning rate rises linearly to
    optimizer.learning_rate in the step after the warm-up, and falls to its minimum in the step
    after decay_steps, as in nanoGPT and transformers. Learning rates with other peaks, such as
    muon_learning_rate, start at the same fraction of their peak. With null, the learning rate is
    peak / warmup_steps in the first step, the peak in the last step of the warm-up, and the minimum
    in the last step of the decay."""
    decay_steps: int | None = Field(None, gt=0)
    """step at which the learning rate reaches its minimum, counted from the first step of the run.
    Afterwards, the learning rate stays at the minimum. null uses the last step of the run."""
    decay_tokens: int | None = Field(None, gt=0)
    """number of tokens after which the learning rate reaches its minimum, counted from the first
    token of the run, instead of decay_steps. It is rounded down to full steps."""
    decay_starts_at_peak: bool | None = None
    """true starts the decay at the peak and ends it one step before the minimum, like the cosine
    schedules of nanoGPT, build-nanogpt and transformers; false starts the decay one step below the
    peak and reaches the minimum in its last step. null is true if the minimum is 0 and neither
    decay_steps nor decay_tokens is set, otherwise false."""
    decay_fraction: float | None = Field(None, gt=0, le=1)
    """fraction of the run's steps that the decay of wsd takes; null uses 0.2."""
    cooldown_steps: int | None = Field(None, gt=0)
    """number of steps of the decay of wsd, instead of decay_fraction."""
    decay_shape: DecayShape | None = None
    """curve of the decay of wsd: "linear" or "1-sqrt". With "1-sqrt", the learning rate is
    proportional to 1 - sqrt(progress), which falls faster at first. null uses "linear"."""
    min_lr_ratio: float | None = Field(0.1, ge=0, le=1)
    """minimum of the learning rate as a fraction of the peak. If neither min_lr_ratio nor
    min_learning_rate is set, the fraction is 0 with the kinds wsd and inverse_sqrt, and 0.1
    otherwise."""
    min_learning_rate: float | None = Field(None, ge=0)
    """minimum to which optimizer.learning_rate falls, as an absolute value, instead of
    min_lr_ratio. Learning rates with other peaks, such as muon_learning_rate, fall by the same
    factor."""
    resume: bool = False
    """true continues the schedule of the --init-from checkpoint, on any data, starting at the step
    and with the optimizer state of the checkpoint; false starts a new schedule at step 0."""

    @model_validator(mode="before")
    @classmethod
    def _one_minimum(cls, values: Any) -> Any:
        """Return the values of the section with a default for `min_lr_ratio`. The default is None
        if `min_learning_rate` is set; otherwise, it depends on the kind. A `min_lr_ratio` of null
        is treated as unset."""
        if not isinstance(values, Mapping):
            return values
        if values.get("min_learning_rate") is not None:
            return {"min_lr_ratio": None, **values}
        if values.get("min_lr_ratio") is None:
            given = {key: value for key, value in values.items() if key != "min_lr_ratio"}
            kind = values.get("kind")
            if isinstance(kind, str) and kind in _DEFAULT_MINIMUM:
                given["min_lr_ratio"] = _DEFAULT_MINIMUM[kind]
            return given
        return values

    @model_validator(mode="after")
    def _no_conflict(self) -> Self:
        for keys, question in ALTERNATIVES:
            given = [key for key in keys if getattr(self, key) is not None]
            if len(given) > 1:
                raise ValueError(
                    f"{' and '.join(given)} both set {question}: keep one, and set the other to "
                    "null"
                )
        if self.max_minutes is not None:
            self._require_open_length()
        for key, kinds in KINDS_OF_KEYS.items():
            if getattr(self, key) is not None and self.kind not in kinds:
                raise ValueError(
                    f"{key} applies only to kind {' or '.join(kinds)}, not {self.kind}: set it to "
                    "null, or choose another kind"
                )
        return self

    def _require_open_length(self) -> None:
        if self.max_steps == 0:
            raise ValueError(
                "max_steps 0 runs no steps, so max_minutes has no effect: set max_minutes to null"
            )
        for key in ("decay_steps", "decay_tokens"):
            if getattr(self, key) is not None:
                raise ValueError(
                    f"{key} requires a known number of steps, which max_minutes leaves open: set "
                    f"{key} to null"
                )
        if self.resume:
            raise ValueError(
                "resume requires a schedule whose length is known in steps: set max_steps, and "
                "max_minutes to null"
            )
        shares = (self.warmup_ratio or 0.0) + (self.decay_fraction or 0.0)
        if shares > 1:
            raise ValueError(
                f"warmup_ratio and decay_fraction together are {shares:g} of the run: lower one"
            )

    def decides_length(self, step: int, warmup_steps: int, steps_left: int) -> bool:
        """Return True if a run with a time budget must decide its number of steps now, because the
        next learning rate depends on it or because the run is about to end.

        Args:
            step: number of completed steps.
            warmup_steps: number of steps over which the learning rate rises.
            steps_left: number of additional steps that fit into the time budget.
        """
        if self.kind in ("cosine", "linear"):
            return step >= warmup_steps
        if self.cooldown_steps is not None:
            return steps_left <= self.cooldown_steps
        share = _LAST_FRACTION
        if self.kind == "wsd":
            share = self.decay_fraction or _DECAY_FRACTION
        return steps_left <= math.ceil(Fraction(str(share)) * (step + steps_left))

    def minimum_scale(self, learning_rate: float) -> float:
        """Return the minimum learning rate as a fraction of `learning_rate`, the peak."""
        if self.min_learning_rate is not None:
            return self.min_learning_rate / learning_rate
        return 1.0 if self.min_lr_ratio is None else self.min_lr_ratio

    def initial_scale(self, learning_rate: float) -> float | None:
        """Return the learning rate of the first step as a fraction of `learning_rate`, the peak.
        Return None if `initial_learning_rate` is not set."""
        initial = self.initial_learning_rate
        return None if initial is None else initial / learning_rate


@dataclass(frozen=True)
class PredictedLength:
    """The predicted number of steps of a run with a time budget, before the number is decided.

    Attributes:
        predicted_steps: number of steps that fit into the time budget at the speed predicted at the
            start of the run.
    """

    predicted_steps: int


@dataclass(frozen=True)
class DecidedLength(PredictedLength):
    """The number of steps of a run with a time budget, after it has been decided from the measured
    speed.

    Attributes:
        max_steps: number of steps of the run.
        decided_at: number of completed steps when `max_steps` was decided. The learning rates of
            these steps do not depend on `max_steps`.
        replaced: earlier values of `max_steps` that were replaced after more steps had been
            measured. Each entry is a pair: the earlier value, and the number of completed steps
            when it was replaced. The learning rates of the completed steps do not depend on later
            values.
    """

    max_steps: int
    decided_at: int
    replaced: Sequence[tuple[int, int]] = ()


def most_steps(config: ScheduleConfig, rows_per_epoch: int, batch: BatchSchedule) -> int | None:
    """Return the number of steps set by `max_steps` or `epochs`, or None if neither is set.

    Args:
        config: the recipe's `schedule` section.
        rows_per_epoch: number of rows in the training split.
        batch: number of sequences in each optimizer step.
    """
    if config.epochs is None:
        return config.max_steps
    # The number is parsed as a decimal, so that 1.1 epochs of 100 rows are 110 rows. With a float,
    # they would be 111 rows.
    return batch.steps_for(Fraction(str(config.epochs)) * rows_per_epoch)


def resolve_schedule(
    config: ScheduleConfig,
    learning_rate: float,
    rows_per_epoch: int,
    batch: BatchSchedule,
    seq_len: int,
    length: PredictedLength | None = None,
) -> Schedule:
    """Return the schedule of a run.

    Args:
        config: the recipe's `schedule` section.
        learning_rate: peak learning rate, `optimizer.learning_rate`.
        rows_per_epoch: number of rows in the training split.
        batch: number of sequences in each optimizer step.
        seq_len: sequence length in tokens.
        length: predicted or decided number of steps of a run with a time budget; None for a run
            without a time budget.

    Raises:
        ConfigError: `decay_steps` does not come after the warm-up, warm-up and decay overlap, or
            `initial_learning_rate` is set without a warm-up.
    """
    if config.max_steps == 0:
        # Warm-up and decay are not checked, because the same recipe could be used for a longer run
        # later.
        return Schedule(0, 0, 0, config.minimum_scale(learning_rate), config.kind)
    given_steps = most_steps(config, rows_per_epoch, batch)
    if config.max_minutes is not None:
        assert length is not None
        if given_steps is not None and given_steps < length.predicted_steps:
            length = replace(length, predicted_steps=given_steps)
        return _schedule_in_minutes(config, learning_rate, batch, seq_len, length)
    max_steps = batch.steps_for(Fraction(rows_per_epoch)) if given_steps is None else given_steps
    decay_steps, decay_key = config.decay_steps or max_steps, "decay_steps"
    if config.decay_tokens is not None:
        decay_key = f"decay_tokens {config.decay_tokens}, step"
        decay_steps = batch.steps_within(Fraction(config.decay_tokens, seq_len))
    warmup_steps = _warmup_steps(config, batch, seq_len, max_steps, decay_steps)
    is_given = config.decay_steps is not None or config.decay_tokens is not None
    if is_given and warmup_steps >= decay_steps:
        raise ConfigError(
            f"schedule.{decay_key} {decay_steps} is not after the warm-up of {warmup_steps} steps "
            "(both are counted from the run's first step): raise it, or shorten the warm-up"
        )
    cooldown_steps = _cooldown_steps(config, max_steps, warmup_steps)
    if cooldown_steps and warmup_steps + cooldown_steps > decay_steps:
        raise ConfigError(
            f"schedule: a warm-up of {warmup_steps} steps and a decay of {cooldown_steps} are "
            f"more than {decay_steps} steps: shorten one (schedule.decay_fraction, "
            "cooldown_steps, warmup_steps)"
        )
    return _schedule(
        config,
        learning_rate,
        max_steps=max_steps,
        warmup_steps=warmup_steps,
        decay_steps=decay_steps,
        cooldown_steps=cooldown_steps,
    )


def _schedule(config: ScheduleConfig, learning_rate: float, **lengths: Any) -> Schedule:
    """Return a schedule with the given numbers of steps. The recipe's `schedule` section selects
    the curve."""
    return Schedule(
        min_lr_ratio=config.minimum_scale(learning_rate),
        kind=config.kind,
        decay_shape=config.decay_shape or "linear",
        decay_starts_at_peak=bool(config.decay_starts_at_peak),
        initial_scale=config.initial_scale(learning_rate),
        **lengths,
    )


def _schedule_in_minutes(
    config: ScheduleConfig,
    learning_rate: float,
    batch: BatchSchedule,
    seq_len: int,
    length: PredictedLength,
) -> Schedule:
    """Return the schedule of a run with a time budget."""
    # The predicted number of steps is used even after the number of steps is decided. The length of
    # the warm-up was computed from the prediction and must not change.
    predicted = length.predicted_steps
    warmup_steps = _warmup_steps(config, batch, seq_len, predicted, predicted)
    max_steps, is_open = predicted, True
    replaced: Sequence[tuple[int, int]] = ()
    cooldown_steps = _cooldown_steps(config, predicted, warmup_steps)
    cooldown_steps = min(cooldown_steps, max(predicted - warmup_steps, 0))
    if isinstance(length, DecidedLength):
        max_steps = length.max_steps
        is_open = False
        replaced = tuple(length.replaced)
        if config.kind in ("wsd", "cosine", "linear"):
            cooldown_steps = max(max_steps - max(length.decided_at, warmup_steps), 0)
    return _schedule(
        config,
        learning_rate,
        max_steps=max_steps,
        warmup_steps=warmup_steps,
        decay_steps=max_steps,
        cooldown_steps=cooldown_steps,
        is_open=is_open,
        replaced=replaced,
    )


def _warmup_steps(
    config: ScheduleConfig, batch: BatchSchedule, seq_len: int, max_steps: int, decay_steps: int
) -> int:
    if config.warmup_tokens is not None:
        steps = batch.steps_within(Fraction(config.warmup_tokens, seq_len))
    elif config.warmup_ratio is not None:
        steps = math.ceil(Fraction(str(config.warmup_ratio)) * max_steps)
    else:
        steps = decay_steps // 20 if config.warmup_steps is None else config.warmup_steps
    if config.initial_learning_rate is not None and steps == 0:
        raise ConfigError(
            "schedule.initial_learning_rate begins a warm-up, but this run's warm-up has 0 steps: "
            "set schedule.warmup_steps, or initial_learning_rate to null"
        )
    return steps


def _cooldown_steps(config: ScheduleConfig, max_steps: int, warmup_steps: int) -> int:
    """Return the number of steps of the wsd decay, which follows a warm-up of `warmup_steps`.
    Return 0 for other kinds of schedules."""
    if config.kind != "wsd":
        return 0
    if config.cooldown_steps:
        return config.cooldown_steps
    share = Fraction(str(config.decay_fraction or _DECAY_FRACTION))
    steps = math.ceil(share * max_steps)
    # In a short run, the warm-up and the decay are both rounded up, and their sum can exceed the
    # number of steps.
    fits = share + Fraction(str(config.warmup_ratio or 1)) <= 1
    return min(steps, max_steps - warmup_steps) if fits else steps

"""Schedules of the learning rate and of the batch size: pure functions of the step."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from firstlight.errors import ConfigError
from firstlight.section import Section

#: Curves of the learning rate after its warm-up.
ScheduleKind = Literal["cosine", "linear", "wsd", "constant", "inverse_sqrt"]

#: Curves of wsd's decay.
DecayShape = Literal["linear", "1-sqrt"]

#: Keys of which at most one is given, and the question that they answer.
ALTERNATIVES = (
    (("max_steps", "epochs"), "how long the run is"),
    (("warmup_steps", "warmup_tokens", "warmup_ratio"), "how long the warm-up is"),
    (("decay_fraction", "cooldown_steps"), "how long the decay is"),
    (("min_lr_ratio", "min_learning_rate"), "the last learning rate"),
)

#: Keys that have a meaning for some kinds only.
_KINDS_OF_KEYS: Mapping[str, Sequence[ScheduleKind]] = {
    "decay_steps": ("cosine", "linear", "wsd"),
    "decay_fraction": ("wsd",),
    "cooldown_steps": ("wsd",),
    "decay_shape": ("wsd",),
    "min_lr_ratio": ("cosine", "linear", "wsd", "inverse_sqrt"),
    "min_learning_rate": ("cosine", "linear", "wsd", "inverse_sqrt"),
}

#: `min_lr_ratio` where no minimum is given.
_DEFAULT_MINIMUM: Mapping[str, float | None] = {"wsd": 0.0, "inverse_sqrt": 0.0, "constant": None}

#: `decay_fraction` where the length of wsd's decay is not given.
_DECAY_FRACTION = 0.2


class ScheduleConfig(Section):
    """The `schedule` section of a recipe."""

    kind: ScheduleKind = "cosine"
    """curve of the learning rate after its warm-up: "cosine" and "linear" come down to the minimum;
    "wsd" (warm-up, stable, decay) stays at the peak and comes down in a last part of the run;
    "constant" stays at the peak; "inverse_sqrt" falls as 1/sqrt(step), whatever the run's
    length."""
    max_steps: int | None = Field(None, gt=0)
    """optimizer steps of the run; null is one epoch of the training split."""
    epochs: float | None = Field(None, gt=0)
    """passes over the training split, fractions included, instead of max_steps."""
    warmup_steps: int | None = Field(None, ge=0)
    """steps over which the learning rate rises; null is a twentieth of decay_steps."""
    warmup_tokens: int | None = Field(None, ge=0)
    """tokens over which the learning rate rises, instead of warmup_steps."""
    warmup_ratio: float | None = Field(None, ge=0, le=1)
    """share of the run's steps over which the learning rate rises, instead of warmup_steps."""
    decay_steps: int | None = Field(None, gt=0)
    """step at which the learning rate has come down to its minimum, where it stays, counted from
    the run's first one; null is the last step of the run."""
    decay_fraction: float | None = Field(None, gt=0, le=1)
    """share of the run's steps that wsd's decay takes; null is 0.2."""
    cooldown_steps: int | None = Field(None, gt=0)
    """steps that wsd's decay takes, instead of decay_fraction."""
    decay_shape: DecayShape | None = None
    """curve of wsd's decay: "linear", or "1-sqrt" (1 - sqrt(progress), which falls faster at
    first); null is linear."""
    min_lr_ratio: float | None = Field(0.1, ge=0, le=1)
    """minimum of the learning rate as a share of the peak; where neither it nor min_learning_rate
    is given, 0.1, and 0 with kind wsd or inverse_sqrt."""
    min_learning_rate: float | None = Field(None, ge=0)
    """minimum of optimizer.learning_rate as a value, instead of min_lr_ratio; another peak (Muon's)
    comes down by the same factor."""
    resume: bool = False
    """with --init-from, go on in the schedule at the step that the checkpoint was saved at, with
    its optimizer's state, on whatever data; false is a schedule of its own, from step 0."""

    @model_validator(mode="before")
    @classmethod
    def _one_minimum(cls, values: Any) -> Any:
        """The default of the ratio gives way to a value; without either, null is the default."""
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
                    f"{' and '.join(given)} both say {question}: keep one, and set the other to "
                    "null"
                )
        for key, kinds in _KINDS_OF_KEYS.items():
            if getattr(self, key) is not None and self.kind not in kinds:
                raise ValueError(
                    f"{key} is for kind {' or '.join(kinds)}, not {self.kind}: set it to null, or "
                    "take another kind"
                )
        return self

    def minimum_scale(self, learning_rate: float) -> float:
        """The minimum of the learning rate as a share of the peak `learning_rate`."""
        if self.min_learning_rate is not None:
            return self.min_learning_rate / learning_rate
        return 1.0 if self.min_lr_ratio is None else self.min_lr_ratio


@dataclass(frozen=True)
class Schedule:
    """A schedule whose lengths are known.

    Attributes:
        max_steps: optimizer steps of the run.
        warmup_steps: steps over which the learning rate rises.
        decay_steps: step, counted from the first one, at which it is at its minimum.
        min_lr_ratio: minimum of the learning rate as a share of the peak; 1 for a constant rate.
        kind: curve after the warm-up.
        cooldown_steps: steps that wsd's decay takes.
        decay_shape: curve of wsd's decay.
    """

    max_steps: int
    warmup_steps: int
    decay_steps: int
    min_lr_ratio: float
    kind: ScheduleKind = "cosine"
    cooldown_steps: int = 0
    decay_shape: DecayShape = "linear"

    @property
    def decay_begin(self) -> int:
        """The number of steps before the learning rate begins to fall; `max_steps` if it never
        does."""
        if self.kind == "constant":
            return self.max_steps
        return self.decay_steps - self.cooldown_steps if self.kind == "wsd" else self.warmup_steps

    def in_words(self, peak: float) -> str:
        """The course of the learning rate after its warm-up, for a person.

        Args:
            peak: the learning rate at the peak.
        """
        if self.kind == "constant":
            # The last step of a warm-up is at the peak.
            if self.warmup_steps <= self.max_steps:
                return "then constant"
            return (
                "so long that the learning rate never reaches its peak: set schedule.warmup_steps "
                "lower"
            )
        if self.warmup_steps >= self.max_steps:
            return "so long that the learning rate never falls: set schedule.warmup_steps lower"
        if self.kind == "inverse_sqrt":
            last = f"{peak * self.lr_scale(self.max_steps - 1):.4g}"
            return f"then by the inverse square root of the step to {last} at the end"
        lowest = f"down to {peak * self.min_lr_ratio:.4g} at step {self.decay_steps:,}"
        if self.kind == "wsd":
            return f"stable to step {self.decay_begin:,}, then {lowest} ({self.decay_shape})"
        return f"then {'linearly ' if self.kind == 'linear' else ''}{lowest}"

    def lr_scale(self, step: int) -> float:
        """The share of the peak learning rate at `step` (0 is the first update).

        Linear from 1/warmup_steps at step 0 to 1 at step warmup_steps - 1. Then a curve down to
        min_lr_ratio at step decay_steps - 1, and min_lr_ratio from there on: half a cosine
        (Loshchilov and Hutter 2017, without restarts), a line, or the peak followed by a decay of
        cooldown_steps (Hu et al. 2024; for 1-sqrt Haegele et al. 2024). Or the peak for ever; or
        the inverse square root of the step (Vaswani et al. 2017), never below min_lr_ratio.
        """
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.kind == "inverse_sqrt":
            return max(math.sqrt(max(self.warmup_steps, 1) / (step + 1)), self.min_lr_ratio)
        begin = self.decay_begin
        if self.kind == "constant" or step < begin:
            return 1.0
        progress = min((step + 1 - begin) / max(self.decay_steps - begin, 1), 1.0)
        if self.kind == "cosine":
            left = 0.5 * (1 + math.cos(math.pi * progress))
        else:
            left = 1 - (math.sqrt(progress) if self.decay_shape == "1-sqrt" else progress)
        return self.min_lr_ratio + (1 - self.min_lr_ratio) * left


@dataclass(frozen=True)
class BatchSchedule:
    """Sequences of each optimizer step, all processes together.

    In a ramp they rise from `start` to `size` in equal parts of `start`, each for the same number
    of steps, as far as that comes out even.

    Attributes:
        size: sequences of a step after the ramp.
        start: sequences of the first step, a divisor of `size`.
        ramp_steps: steps of the ramp; 0 if there is none.
    """

    size: int
    start: int
    ramp_steps: int = 0

    @property
    def in_words(self) -> str:
        """The number of sequences of a step, for a person."""
        if not self.ramp_steps:
            return f"{self.size:,}"
        return f"{self.start:,} to {self.size:,} (from step {self.ramp_steps + 1:,} on)"

    def at(self, step: int) -> int:
        """The number of sequences of `step` (0 is the first)."""
        if step >= self.ramp_steps:
            return self.size
        rises = self.size // self.start - 1
        return self.start * (1 + rises * step // self.ramp_steps)

    def before(self, step: int) -> int:
        """The number of sequences of all steps before `step`: the loader's position."""
        ramped, rises = min(step, self.ramp_steps), self.size // self.start - 1
        # Each rise counts from the first step that has it.
        begins = (-(-rise * self.ramp_steps // rises) for rise in range(1, rises))
        risen = sum(max(ramped - begin, 0) for begin in begins)
        return self.start * (ramped + risen) + self.size * (step - ramped)

    def steps_for(self, sequences: Fraction) -> int:
        """The smallest number of steps that have so many sequences."""
        whole = math.ceil(sequences)
        return bisect.bisect_left(range(-(-whole // self.start)), whole, key=self.before)


def resolve_schedule(
    config: ScheduleConfig,
    learning_rate: float,
    rows_per_epoch: int,
    batch: BatchSchedule,
    seq_len: int,
) -> Schedule:
    """The schedule of a run.

    Args:
        config: the recipe's section.
        learning_rate: the peak.
        rows_per_epoch: rows of the training split.
        batch: rows of each optimizer step.
        seq_len: tokens of a row.

    Raises:
        ConfigError: the learning rate would have come down before it has risen, or warm-up and
            decay don't fit into the run.
    """
    # As it is written: a float's 1.1 epochs of 100 rows would be a row more than 110.
    epochs = Fraction(str(config.epochs or 1))
    max_steps = config.max_steps or batch.steps_for(epochs * rows_per_epoch)
    decay_steps = config.decay_steps or max_steps
    if config.warmup_tokens is not None:
        warmup_steps = batch.steps_for(Fraction(config.warmup_tokens, seq_len))
    elif config.warmup_ratio is not None:
        warmup_steps = math.ceil(Fraction(str(config.warmup_ratio)) * max_steps)
    elif config.warmup_steps is not None:
        warmup_steps = config.warmup_steps
    else:
        warmup_steps = decay_steps // 20
    if config.decay_steps is not None and warmup_steps >= decay_steps:
        raise ConfigError(
            f"schedule.decay_steps {decay_steps} is not after the warm-up of {warmup_steps} steps: "
            "it is counted from the run's first step; raise it, or shorten the warm-up"
        )
    cooldown_steps = 0
    if config.kind == "wsd":
        share = Fraction(str(config.decay_fraction or _DECAY_FRACTION))
        cooldown_steps = config.cooldown_steps or math.ceil(share * max_steps)
        if warmup_steps + cooldown_steps > decay_steps:
            raise ConfigError(
                f"schedule: a warm-up of {warmup_steps} steps and a decay of {cooldown_steps} are "
                f"more than {decay_steps} steps: shorten one (schedule.decay_fraction, "
                "cooldown_steps, warmup_steps)"
            )
    return Schedule(
        max_steps,
        warmup_steps,
        decay_steps,
        config.minimum_scale(learning_rate),
        config.kind,
        cooldown_steps,
        config.decay_shape or "linear",
    )

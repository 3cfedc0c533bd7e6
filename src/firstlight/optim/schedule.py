"""Learning-rate schedules: pure functions of the step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Self

from pydantic import Field, model_validator

from firstlight.errors import ConfigError
from firstlight.section import Section

#: Keys of which at most one is given, and the question that they answer.
_ALTERNATIVES = (
    (("max_steps", "epochs"), "how long the run is"),
    (("warmup_steps", "warmup_tokens", "warmup_ratio"), "how long the warm-up is"),
    (("min_lr_ratio", "min_learning_rate"), "the last learning rate"),
)


class ScheduleConfig(Section):
    """The `schedule` section of a recipe."""

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
    min_lr_ratio: float | None = Field(0.1, ge=0, le=1)
    """minimum of the learning rate as a share of the peak; 0.1 where neither it nor
    min_learning_rate is given."""
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
            return {key: value for key, value in values.items() if key != "min_lr_ratio"}
        return values

    @model_validator(mode="after")
    def _no_conflict(self) -> Self:
        for keys, question in _ALTERNATIVES:
            given = [key for key in keys if getattr(self, key) is not None]
            if len(given) > 1:
                raise ValueError(
                    f"{' and '.join(given)} both say {question}: keep one, and set the other to "
                    "null"
                )
        return self

    def minimum_scale(self, learning_rate: float) -> float:
        """The minimum of the learning rate as a share of the peak `learning_rate`."""
        if self.min_learning_rate is not None:
            return self.min_learning_rate / learning_rate
        assert self.min_lr_ratio is not None
        return self.min_lr_ratio


@dataclass(frozen=True)
class Schedule:
    """A schedule whose lengths are known.

    Attributes:
        max_steps: optimizer steps of the run.
        warmup_steps: steps over which the learning rate rises.
        decay_steps: step, counted from the first one, at which it is at its minimum.
        min_lr_ratio: minimum of the learning rate as a share of the peak.
    """

    max_steps: int
    warmup_steps: int
    decay_steps: int
    min_lr_ratio: float

    def lr_scale(self, step: int) -> float:
        """The share of the peak learning rate at `step` (0 is the first update)."""
        return warmup_cosine(step, self.decay_steps, self.warmup_steps, self.min_lr_ratio)


def resolve_schedule(
    config: ScheduleConfig,
    learning_rate: float,
    rows_per_epoch: int,
    rows_a_step: int,
    seq_len: int,
) -> Schedule:
    """The schedule of a run.

    Args:
        config: the recipe's section.
        learning_rate: the peak.
        rows_per_epoch: rows of the training split.
        rows_a_step: rows of an optimizer step, all processes together.
        seq_len: tokens of a row.

    Raises:
        ConfigError: the learning rate would have come down before it has risen.
    """
    # As it is written: a float's 1.1 epochs of 100 rows would be a row more than 110.
    epochs = Fraction(str(config.epochs or 1))
    max_steps = config.max_steps or math.ceil(epochs * rows_per_epoch / rows_a_step)
    decay_steps = config.decay_steps or max_steps
    if config.warmup_tokens is not None:
        warmup_steps = math.ceil(Fraction(config.warmup_tokens, rows_a_step * seq_len))
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
    return Schedule(max_steps, warmup_steps, decay_steps, config.minimum_scale(learning_rate))


def warmup_cosine(step: int, decay_steps: int, warmup_steps: int, min_lr_ratio: float) -> float:
    """The share of the peak learning rate at `step` (0 is the first update).

    Linear from 1/warmup_steps at step 0 to 1 at step warmup_steps - 1, then half a cosine
    down to min_lr_ratio at step decay_steps - 1, and min_lr_ratio from there on (Loshchilov and
    Hutter 2017, without restarts).
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min((step + 1 - warmup_steps) / max(decay_steps - warmup_steps, 1), 1.0)
    return min_lr_ratio + (1 - min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress))

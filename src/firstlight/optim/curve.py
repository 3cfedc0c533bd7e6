"""The learning rate of a run: a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

#: Curves of the learning rate after its warm-up.
ScheduleKind = Literal["cosine", "linear", "wsd", "constant", "inverse_sqrt"]

#: Curves of wsd's decay.
DecayShape = Literal["linear", "1-sqrt"]


@dataclass(frozen=True)
class Schedule:
    """A learning-rate schedule whose lengths are resolved to numbers of steps.

    Attributes:
        max_steps: optimizer steps of the run.
        warmup_steps: steps over which the learning rate rises.
        decay_steps: step at which the learning rate reaches its minimum, counted from the run's
            first step.
        min_lr_ratio: minimum of the learning rate as a share of the peak; 1 for a constant rate.
        kind: curve after the warm-up.
        cooldown_steps: steps that the decay takes; 0 is all steps after the warm-up.
        decay_shape: curve of wsd's decay.
        is_open: True if the number of steps of a run in minutes is not decided yet: `max_steps` is
            then a prediction, on which no learning rate depends.
        replaced: see `DecidedLength`.
        decay_starts_at_peak: True if the first step after `decay_begin` still has the peak, so that
            the minimum is reached one step later. Always so with `initial_scale`.
        initial_scale: learning rate of the first step as a share of the peak. None: a warm-up whose
            last step, not the step after it, is at the peak.
    """

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
        """The number of steps before the learning rate begins to fall; `max_steps` if it never
        does. With `initial_scale`, the step after them is at the peak, too."""
        if self.kind == "constant":
            return self.max_steps
        return self.decay_steps - self.cooldown_steps if self.cooldown_steps else self.warmup_steps

    def in_words(self, peak: float) -> str:
        """The course of the learning rate after its warm-up, as text for messages.

        Args:
            peak: the peak learning rate.
        """
        late = self._steps_late
        if self.kind == "constant":
            # The last step of a warm-up is at the peak already, if it isn't late.
            if self.warmup_steps + late <= self.max_steps:
                return "then constant"
            return (
                "so long that the learning rate never reaches its peak: set schedule.warmup_steps "
                "lower"
            )
        if self.warmup_steps + late >= self.max_steps:
            return "so long that the learning rate never falls: set schedule.warmup_steps lower"
        if self.kind == "inverse_sqrt":
            last = f"{peak * self.lr_scale(self.max_steps - 1):.4g}"
            return f"then by the inverse square root of the step to {last} at the end"
        # In an open schedule these steps follow from the predicted number of steps.
        about = "about " if self.is_open else ""
        end, begin = self.decay_steps + late, self.decay_begin + late
        lowest = f"down to {peak * self.min_lr_ratio:.4g} at {about}step {end:,}"
        if self.kind == "wsd":
            return f"stable to {about}step {begin:,}, then {lowest} ({self.decay_shape})"
        stable = f"stable to step {begin:,}, " if self.cooldown_steps else ""
        return f"{stable}then {'linearly ' if self.kind == 'linear' else ''}{lowest}"

    @property
    def _steps_late(self) -> int:
        """1 if the curve after the warm-up is one step later than by default, else 0."""
        return int(self.decay_starts_at_peak or self.initial_scale is not None)

    def lr_scale(self, step: int) -> float:
        """The share of the peak learning rate at `step` (0 is the first update).

        Warm-up: linear from 1/warmup_steps at step 0 to 1 at step warmup_steps - 1. With
            initial_scale, linear from initial_scale at step 0 to 1 at step warmup_steps, and the
            rest of the curve is a step later, as in nanoGPT and transformers.
        Stable: 1 up to step decay_begin, and as long as `is_open`.
        Decay: a curve to min_lr_ratio at step decay_steps - 1, where it stays. The curve is half a
            cosine (Loshchilov and Hutter 2017, without restarts), or linear, or of wsd (Hu et al.
            2024) linear or 1-sqrt (Haegele et al. 2024). Where another number of steps replaced
            the run's, the rest of the curve is stretched or compressed from there on. With
            decay_starts_at_peak, the whole curve is one step later.

        Kind "constant" has no decay. Kind "inverse_sqrt" falls with the inverse square root of the
        step after its warm-up (Vaswani et al. 2017), but not below min_lr_ratio.
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

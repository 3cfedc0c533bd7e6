"""Schedules of the batch size: pure functions of the step."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class BatchSchedule:
    """Sequences of each optimizer step, all processes together.

    During a ramp the number rises from `start` to `size` by `start` at a time. Each number below
    `size` lasts for the same number of steps, or one more if the ramp does not divide evenly.

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
        """The number of sequences of a step, as text for messages."""
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
        # First step of each rise; every later step of the ramp has `start` sequences more.
        begins = (-(-rise * self.ramp_steps // rises) for rise in range(1, rises))
        risen = sum(max(ramped - begin, 0) for begin in begins)
        return self.start * (ramped + risen) + self.size * (step - ramped)

    def steps_for(self, sequences: Fraction) -> int:
        """The smallest number of steps that have at least this number of sequences."""
        whole = math.ceil(sequences)
        return bisect.bisect_left(range(-(-whole // self.start)), whole, key=self.before)

    def steps_within(self, sequences: Fraction) -> int:
        """The largest number of steps that have at most this number of sequences."""
        steps = self.steps_for(sequences)
        return steps - (self.before(steps) > sequences)

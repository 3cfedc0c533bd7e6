"""Dynamic loss scaling for fp16, whose smallest numbers are larger than many gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from firstlight.errors import CheckpointError
from firstlight.training.guard import DivergedError

_GROWTH, _BACKOFF = 2.0, 0.5
_STEPS_BETWEEN_GROWTHS = 2000
#: 2^-14 is fp16's smallest normal number: below a scale of this, the loss itself is the trouble.
_SMALLEST = 2.0**-14


class LossScaler:
    """The loss is multiplied by `scale` before the backward pass, and the gradients divided by it
    after (Micikevicius et al. 2018).

    A step whose gradients overflow is skipped and the scale halved; after 2,000 good steps in a
    row it is doubled.

    Attributes:
        scale: a power of two, so that scaling changes no digit.
        good_steps: since the scale last changed.
        skipped_steps: since the run began.
    """

    def __init__(self, scale: float = 2.0**16) -> None:
        self.scale, self.good_steps, self.skipped_steps = scale, 0, 0

    def update(self, finite: bool) -> None:
        """Count a step.

        Raises:
            DivergedError: the scale can't be lowered any more: the gradients are not finite
                whatever it is.
        """
        if not finite:
            self.skipped_steps += 1
            self.scale *= _BACKOFF
            self.good_steps = 0
            if self.scale < _SMALLEST:
                raise DivergedError(
                    f"the gradients are not finite at any loss scale ({self.skipped_steps} steps "
                    "skipped): lower optimizer.learning_rate, or set efficiency.precision to bf16"
                )
            return
        self.good_steps += 1
        if self.good_steps == _STEPS_BETWEEN_GROWTHS:
            self.scale *= _GROWTH
            self.good_steps = 0

    def state_dict(self) -> dict[str, Any]:
        """All there is to it, as JSON values."""
        return {
            "scale": self.scale,
            "good_steps": self.good_steps,
            "skipped_steps": self.skipped_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what `state_dict` gave.

        Raises:
            CheckpointError: something is missing or of the wrong kind.
        """
        try:
            scale = float(state["scale"])
            counts = int(state["good_steps"]), int(state["skipped_steps"])
            if not 0 < scale < math.inf:
                raise ValueError(f"{scale} is no scale")
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the checkpoint's loss scale is damaged: {error}") from error
        self.scale, (self.good_steps, self.skipped_steps) = scale, counts

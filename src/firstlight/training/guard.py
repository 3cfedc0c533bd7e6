"""Skip bad steps. A guard rejects steps whose loss or gradient norm is an outlier. In fp16, a
dynamic loss scale keeps gradients from underflowing, and steps whose gradients overflow are
skipped.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

from firstlight.errors import DIVERGED_EXIT_CODE, DIVERGED_REMEDY, CheckpointError, TrainingError
from firstlight.recipe.schema import FEWEST_STEPS, GuardConfig

#: Lower bound of the standard deviation, as a fraction of the mean. Without this bound, a small
#: deviation from nearly equal values would be treated as a spike.
_LEAST_DEVIATION = 0.01


class DivergedError(TrainingError):
    """Raised when a run has diverged. The run then rolls back to an earlier checkpoint or stops."""

    exit_code = DIVERGED_EXIT_CODE


class Guard:
    """Accepts or skips each step, based on its loss and gradient norm.

    Attributes:
        skipped_in_a_row: number of consecutive steps rejected since the last accepted one.
        reason: message that explains why the last rejected step was rejected; "" before the first
            rejection.
    """

    def __init__(self, config: GuardConfig) -> None:
        self.config = config
        self.skipped_in_a_row = 0
        self.reason = ""
        self._losses: deque[float] = deque(maxlen=config.spike_window)
        self._norms: deque[float] = deque(maxlen=config.spike_window)

    def accepts(self, loss: float, grad_norm: float) -> bool:
        """Decide whether to accept a step.

        Args:
            loss: loss of the step.
            grad_norm: L2 norm of the gradients.

        Returns:
            True if the update should be applied. Only the values of accepted steps are stored and
            used to judge later steps.
        """
        reason = self._refusal(loss, grad_norm)
        if reason is not None:
            self.skipped_in_a_row += 1
            self.reason = reason
            return False
        self.skipped_in_a_row = 0
        self._losses.append(loss)
        self._norms.append(grad_norm)
        return True

    @property
    def refuses_only_infinite(self) -> bool:
        """True if every finite step is accepted."""
        return self.config.spike_z_score is None

    def _refusal(self, loss: float, grad_norm: float) -> str | None:
        """Return a message that explains why a step is rejected, or None if the step is
        accepted.
        """
        # The sum of the absolute values is infinite or NaN if either value is not finite, so a
        # single comparison covers all cases.
        if not abs(loss) + abs(grad_norm) < math.inf:
            return f"loss {loss}, gradient norm {grad_norm}: not finite"
        limit = self.config.spike_z_score
        if limit is None:  # see `refuses_only_infinite`
            return None
        for name, value, before in (
            ("loss", loss, self._losses),
            ("gradient norm", grad_norm, self._norms),
        ):
            found = z_score(value, before)
            if found > limit:
                return f"{name} {value:.4g} is {found:.3g} standard deviations above the mean"
        return None

    def require_fit(self) -> None:
        """Raise an error if too many steps in a row were rejected.

        Raises:
            DivergedError: `guard.max_skipped_steps` steps in a row were rejected.
        """
        if self.skipped_in_a_row >= self.config.max_skipped_steps:
            count = self.skipped_in_a_row
            steps = "this step was" if count == 1 else f"{count} steps in a row were"
            raise DivergedError(f"{steps} skipped ({self.reason}); {DIVERGED_REMEDY}")

    def state_dict(self) -> dict[str, Any]:
        """Return the losses and gradient norms of recent accepted steps and the number of rejected
        steps, as JSON values.
        """
        return {
            "skipped_in_a_row": self.skipped_in_a_row,
            "losses": list(self._losses),
            "grad_norms": list(self._norms),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the values returned by `state_dict`. An empty mapping restores the state of a new
        guard.

        Raises:
            CheckpointError: a value has the wrong type.
        """
        try:
            losses = [float(value) for value in state.get("losses", [])]
            norms = [float(value) for value in state.get("grad_norms", [])]
            skipped = int(state.get("skipped_in_a_row", 0))
        except (TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"the checkpoint's guard is damaged: {error}") from error
        self._losses = deque(losses, maxlen=self.config.spike_window)
        self._norms = deque(norms, maxlen=self.config.spike_window)
        # Restore the number of consecutive rejections, so that a resumed run stops at the same step
        # as an uninterrupted one.
        self.skipped_in_a_row = skipped


def z_score(value: float, before: deque[float]) -> float:
    """Return the number of standard deviations by which `value` exceeds the mean of the previous
    values, or 0 if there are fewer than `FEWEST_STEPS` values. If the standard deviation is below
    1% of the mean, 1% of the mean is used instead.
    """
    if len(before) < FEWEST_STEPS:
        return 0.0
    mean = math.fsum(before) / len(before)
    variance = math.fsum((x - mean) ** 2 for x in before) / len(before)
    deviation = max(math.sqrt(variance), _LEAST_DEVIATION * abs(mean))
    if deviation == 0:
        # All previous values are 0. Every larger value is therefore a spike.
        return math.inf if value > mean else 0.0
    return (value - mean) / deviation


#: Factors by which the loss scale is multiplied after `_STEPS_BETWEEN_GROWTHS` good steps in a row
#: and after an overflow, as in torch.amp.GradScaler.
_GROWTH, _BACKOFF = 2.0, 0.5
_STEPS_BETWEEN_GROWTHS = 2000
#: Smallest loss scale, equal to the smallest normal fp16 number. If gradients still overflow at
#: this scale, a lower scale does not help.
_SMALLEST = 2.0**-14


class LossScaler:
    """Dynamic loss scale: the loss is multiplied by `scale` before the backward pass, and the
    gradients are divided by it afterwards (Micikevicius et al. 2018, arXiv 1710.03740).

    A step whose gradients overflow is skipped, and the scale is halved. After 2,000 good steps in a
    row, the scale is doubled.

    Attributes:
        scale: the loss scale, a power of two, so that scaling is exact.
        good_steps: number of good steps since the scale last changed.
        skipped_steps: number of skipped steps since the run began.
    """

    def __init__(self, scale: float = 2.0**16) -> None:
        self.scale = scale
        self.good_steps = 0
        self.skipped_steps = 0

    def update(self, finite: bool) -> None:
        """Adjust the scale after a step.

        Args:
            finite: True if the step's loss and gradients were finite.

        Raises:
            DivergedError: the gradients are not finite even at the smallest scale.
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
        # Increase the scale again at intervals, because small gradients underflow in fp16 if the
        # scale is low.
        if self.good_steps == _STEPS_BETWEEN_GROWTHS:
            self.scale *= _GROWTH
            self.good_steps = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and the step counts as JSON values."""
        return {
            "scale": self.scale,
            "good_steps": self.good_steps,
            "skipped_steps": self.skipped_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the values returned by `state_dict`.

        Raises:
            CheckpointError: a value is missing or has the wrong type.
        """
        try:
            scale = float(state["scale"])
            counts = int(state["good_steps"]), int(state["skipped_steps"])
            if not 0 < scale < math.inf:
                raise ValueError(f"{scale} is not a valid scale")
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the checkpoint's loss scale is damaged: {error}") from error
        self.scale, (self.good_steps, self.skipped_steps) = scale, counts

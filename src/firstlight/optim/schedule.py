"""Learning-rate schedules: pure functions of the step."""

from __future__ import annotations

import math

from pydantic import BaseModel, ConfigDict, Field


class ScheduleConfig(BaseModel):
    """The `schedule` section of a recipe.

    max_steps: optimizer steps of the run; null is one epoch of the training split.
    warmup_steps: steps over which the learning rate rises; null is a twentieth of max_steps.
    min_lr_ratio: the last step's learning rate as a share of the peak.
    resume: with --init-from, go on in the schedule at the step that the checkpoint was saved at,
        with its optimizer's state, on whatever data; false is a schedule of its own, from step 0.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    max_steps: int | None = Field(None, gt=0)
    warmup_steps: int | None = Field(None, ge=0)
    min_lr_ratio: float = Field(0.1, ge=0, le=1)
    resume: bool = False


def warmup_cosine(step: int, max_steps: int, warmup_steps: int, min_lr_ratio: float) -> float:
    """The share of the peak learning rate at `step` (0 is the first update).

    Linear from 1/warmup_steps at step 0 to 1 at step warmup_steps - 1, then half a cosine
    down to min_lr_ratio at step max_steps - 1, and min_lr_ratio from there on (Loshchilov and
    Hutter 2017, without restarts).
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min((step + 1 - warmup_steps) / max(max_steps - warmup_steps, 1), 1.0)
    return min_lr_ratio + (1 - min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress))

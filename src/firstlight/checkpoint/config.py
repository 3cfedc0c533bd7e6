"""The `checkpoint` section of a recipe."""

from __future__ import annotations

from pydantic import Field

from firstlight.section import Section


class CheckpointConfig(Section):
    """The `checkpoint` section. One is always written at the end."""

    every_steps: int = Field(200, ge=0)
    """a checkpoint after every so many steps; 0 is at the end only."""
    keep_last: int = Field(2, ge=1)
    """how many of the newest are kept."""
    keep_every: int = Field(0, ge=0)
    """those of steps that are multiples of it are kept for good; 0 is none."""
    keep_best: int = Field(1, ge=0)
    """how many with the lowest val/loss at their step are kept beside, and each new lowest val/loss
    is saved, unless every_steps is 0; 0 is none. Without validation there are none."""
    asynchronous: bool | None = None
    """copy the state and write the copy while training goes on; null is where memory for the copy
    is free at the first save."""
    sharded: bool = False
    """with distributed.engine fsdp, each process writes the pieces that it holds, and nothing is
    put together: for models that are too large for that. Any engine goes on from it, with any
    number of processes. The last checkpoint of a run is a Hugging Face model folder too;
    `firstlight convert` makes one of an earlier one."""

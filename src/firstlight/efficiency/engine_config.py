"""The `distributed` section of a recipe: how several processes share a run."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class DistributedConfig(BaseModel):
    """The `distributed` section. What a run computes does not depend on it; a checkpoint goes on
    with any other.

    engine: "auto" is "none" for one process and "ddp" for several. "ddp" gives each process the
        whole model, and gradients are added up; "fsdp" (FSDP2) cuts parameters, gradients and
        optimizer state into pieces, one a process, and puts each layer together while it is
        computed.
    shard: with fsdp, how many processes share one copy of the model; null is all. With fewer
        (hybrid sharding, best those of one machine), each group has a copy, and layers are put
        together within a group only.
    offload: with fsdp, "cpu" keeps the pieces in the CPU's memory, and updates them there.
    reshard_after_forward: with fsdp, forget a layer after its forward pass and put it together
        again for the backward pass; false saves that, and keeps all layers until then.
    timeout_seconds: after so long without an answer, a process counts as gone, and the run ends.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    engine: Literal["auto", "none", "ddp", "fsdp"] = "auto"
    shard: int | None = Field(None, gt=1)
    offload: Literal["none", "cpu"] = "none"
    reshard_after_forward: bool = True
    timeout_seconds: float = Field(600, gt=0)

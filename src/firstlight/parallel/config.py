"""The `distributed` section of a recipe: how several processes share a run."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from firstlight.section import Section


class DistributedConfig(Section):
    """The `distributed` section. What a run computes does not depend on it; a checkpoint goes on
    with any other.
    """

    engine: Literal["auto", "none", "ddp", "fsdp", "deepspeed"] = "auto"
    """"auto" is "none" for one process and "ddp" for several. "ddp" gives each process the whole
    model, and gradients are added up; "fsdp" (FSDP2) cuts parameters, gradients and optimizer state
    into shards, one a process, and puts each layer together while it is computed; "deepspeed" is
    ZeRO, of one process too."""
    shard: int | None = Field(None, gt=1)
    """with fsdp, how many processes share one copy of the model; null is all. With fewer (hybrid
    sharding, best those of one machine), each group has a copy, and layers are put together within
    a group only."""
    offload: Literal["none", "cpu", "nvme"] = "none"
    """with fsdp, "cpu" keeps the shards in the CPU's memory, and updates them there. With
    deepspeed, it keeps the optimizer state there, and at stage 3 the parameters; "nvme" keeps
    optimizer state in files instead."""
    zero_stage: Literal[1, 2, 3] | None = None
    """with deepspeed, what is cut into shards: 1 optimizer state, 2 (null) gradients too, 3
    parameters too."""
    nvme_path: str | None = None
    """with offload nvme, a folder on a fast disk, on each machine."""
    deepspeed_config: str | None = None
    """a DeepSpeed configuration file (JSON) of one's own, which makes "auto" the engine deepspeed.
    What it sets and the recipe leaves open is taken; the two must not contradict each other."""
    reshard_after_forward: bool = True
    """with fsdp, forget a layer after its forward pass and put it together again for the backward
    pass; false saves that, and keeps all layers until then."""
    tensor_parallel: int = Field(1, ge=1)
    """so many processes, next to each other and best on one machine, compute each layer of the same
    rows together, each with its heads and its part of the MLP: for a Llama whose layers are too
    large for one GPU. With more processes than that, "auto" is "fsdp" between the groups."""
    pipeline: int = Field(1, ge=1)
    """so many processes, each with so many of a Llama's layers in a row, through which the
    micro-batches of a step pass: for models that are too large for one machine. Best with several
    times as many micro-batches a step (batch.gradient_accumulation_steps)."""
    timeout_seconds: float = Field(600, gt=0)
    """after so long without an answer, a process counts as gone, and the run ends. Has to be more
    than the longest save takes, for which the others wait."""

"""The `distributed` section of a recipe."""

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
    model, and gradients are added up; "fsdp" (FSDP2) shards parameters, gradients and optimizer
    state over the processes, and gathers each layer while it is computed; "deepspeed" is
    ZeRO, of one process too."""
    shard: int | None = Field(None, gt=1)
    """with fsdp, the number of processes that share one copy of the model; null is all. With fewer
    (hybrid sharding, best the processes of one machine), each group has a copy, and layers are
    gathered within a group only."""
    offload: Literal["none", "cpu", "nvme"] = "none"
    """with fsdp, "cpu" keeps the shards in the CPU's memory, and updates them there. With
    deepspeed, it keeps the optimizer state there, and at stage 3 the parameters; "nvme" keeps
    optimizer state in files instead."""
    zero_stage: Literal[1, 2, 3] | None = None
    """with deepspeed, the sharded tensors: 1 optimizer state, 2 (null) gradients too, 3 parameters
    too."""
    nvme_path: str | None = None
    """with offload nvme, a folder on a fast disk, on each machine."""
    deepspeed_config: str | None = None
    """an existing DeepSpeed configuration file (JSON), which makes "auto" the engine deepspeed. Its
    values fill the recipe's open keys; the two must not contradict each other."""
    reshard_after_forward: bool = True
    """with fsdp, free a gathered layer after its forward pass and gather it again for the backward
    pass; false gathers once, and keeps all layers in memory until then."""
    tensor_parallel: int = Field(1, ge=1)
    """the number of neighbouring processes, best on one machine, that compute each layer of
    the same sequences together, each with its heads and its part of the MLP: for a Llama whose
    layers are too large for one GPU. With more processes than that, "auto" is "fsdp" between the
    groups."""
    pipeline: int = Field(1, ge=1)
    """the number of stages, each a process with consecutive layers of a Llama; the micro-batches of
    a step pass through all: for models that are too large for one machine. Best with several times
    as many micro-batches a step (batch.gradient_accumulation_steps)."""
    timeout_seconds: float = Field(600, gt=0)
    """seconds without an answer after which a process counts as gone and the run ends. Must be more
    than the longest save takes, for which the others wait."""

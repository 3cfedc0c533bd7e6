"""Select the engine for a recipe and a number of processes, and reject invalid combinations."""

from __future__ import annotations

import torch

from firstlight.errors import ConfigError
from firstlight.parallel.deepspeed import DeepSpeedEngine
from firstlight.parallel.engine import DDPEngine, DistributedConfig, Engine
from firstlight.parallel.pipeline import PipelineEngine
from firstlight.parallel.sharding import FSDPEngine, TensorParallelEngine
from firstlight.parallel.world import World

ENGINES: dict[str, type[Engine]] = {
    "none": Engine,
    "ddp": DDPEngine,
    "fsdp": FSDPEngine,
    "deepspeed": DeepSpeedEngine,
    "tensor_parallel": TensorParallelEngine,
    "pipeline": PipelineEngine,
}


def make_engine(config: DistributedConfig, world: World, device: torch.device) -> Engine:
    """Return the engine for a run.

    Args:
        config: the recipe's `distributed` section.
        world: this process's position in the run; the process group must be open.
        device: this process's device.

    Raises:
        ConfigError: the engine can't run with this number of processes.
    """
    name = engine_name(config, world.size)
    if config.pipeline > 1:
        name = "pipeline"
    elif config.tensor_parallel > 1 and name == "none":
        name = "tensor_parallel"
    return ENGINES[name](config, world, device)


def named_engine(config: DistributedConfig) -> type[Engine]:
    """Return the engine class that a recipe specifies. If the recipe specifies "auto", return the
    class for a single process.
    """
    return ENGINES.get(config.engine, Engine)


def engine_name(config: DistributedConfig, processes: int) -> str:
    """Return the name of the engine used between processes that compute different sequences:
    "none", "ddp", "fsdp" or "deepspeed".

    Args:
        config: the recipe's `distributed` section.
        processes: total number of processes in the run, including those of tensor and pipeline
            parallelism.

    Raises:
        ConfigError: the section is invalid for this number of processes.
    """
    if config.pipeline > 1:
        return _pipeline_engine_name(config, processes)
    name, group = config.engine, config.tensor_parallel
    size, rest = divmod(processes, group)
    if rest:
        raise ConfigError(
            f"distributed.tensor_parallel is {group}, but this run has {processes} "
            f"process{'' if processes == 1 else 'es'}: "
            f"start it with --nproc {group}, or a multiple of it, or remove the key"
        )
    one = "one process"
    several = "processes"
    others = "ddp or fsdp"
    if group > 1:
        one = f"one group of {group} processes"
        several = "groups"
        others = "fsdp"
        if name == "ddp":
            raise ConfigError(
                "distributed.engine ddp needs full parameters, but distributed.tensor_parallel "
                "shards them: set distributed.engine to fsdp"
            )
    if name == "auto":
        name = "none" if size == 1 else ("fsdp" if group > 1 else "ddp")
    if name == "none" and size > 1:
        raise ConfigError(
            f"distributed.engine none is for {one}, but there are {size}, and each would train a "
            f"separate model: set it to {others}"
        )
    if group > 1 and name == "deepspeed":
        raise ConfigError(
            "distributed.tensor_parallel does not support distributed.engine deepspeed: set "
            "distributed.engine to fsdp, or remove tensor_parallel"
        )
    # DeepSpeed is useful even for one process, because it supports offloading.
    if name not in ("none", "deepspeed") and size == 1:
        if group > 1:
            raise ConfigError(
                f"distributed.engine {name} trains one model with several groups of {group} "
                f"processes (distributed.tensor_parallel {group}), but the {group} processes "
                "of this run form only one group: remove distributed.engine, or start the run with "
                f"--nproc {2 * group} or another multiple of {group}"
            )
        raise ConfigError(
            f"distributed.engine {name} is for several processes, but this run has one: start it "
            "with --nproc 2 or more, or set distributed.engine to none"
        )
    _require_own_keys(config, name)
    if config.shard is not None and size % config.shard:
        raise ConfigError(
            f"distributed.shard {config.shard} does not divide the {size} {several} evenly: "
            f"use one of {', '.join(str(n) for n in range(2, size + 1) if size % n == 0)}"
        )
    return name


def _require_own_keys(config: DistributedConfig, name: str) -> None:
    """Raise an error if a config sets keys that belong to a different engine than `name`."""
    stage, nvme = config.zero_stage, config.offload == "nvme"
    own = {
        "shard": (config.shard is not None, ("fsdp",)),
        "offload": (config.offload != "none", ("deepspeed",) if nvme else ("fsdp", "deepspeed")),
        "zero_stage": (stage is not None, ("deepspeed",)),
        "deepspeed_config": (config.deepspeed_config is not None, ("deepspeed",)),
        "nvme_path": (config.nvme_path is not None, ("deepspeed",)),
    }
    for key, (is_set, engines) in own.items():
        if is_set and name not in engines:
            raise ConfigError(
                f"distributed.{key} {getattr(config, key)} requires distributed.engine "
                f"{' or '.join(engines)}, but the engine is {name}: set it to {engines[0]}, or "
                f"remove {key}"
            )
    if nvme and (stage != 3 or config.nvme_path is None):
        raise ConfigError(
            "distributed.offload nvme needs distributed.zero_stage 3, and a folder on a fast disk "
            "as distributed.nvme_path: set both, or set distributed.offload to cpu"
        )
    if config.nvme_path is not None and not nvme:
        raise ConfigError(
            "distributed.nvme_path requires distributed.offload nvme: set offload to nvme, or "
            "remove nvme_path"
        )


def _pipeline_engine_name(config: DistributedConfig, processes: int) -> str:
    """Return the engine name for a run with pipeline parallelism, which can't be combined with
    other engines.
    """
    others = {
        f"engine {config.engine}": config.engine not in ("auto", "none"),
        f"tensor_parallel {config.tensor_parallel}": config.tensor_parallel > 1,
    }
    for name, is_set in others.items():
        if is_set:
            raise ConfigError(
                f"distributed.pipeline {config.pipeline} has one process per stage and can't be "
                f"combined with distributed.{name}: remove one of them"
            )
    _require_own_keys(config, "none")
    if processes != config.pipeline:
        raise ConfigError(
            f"distributed.pipeline is {config.pipeline}, but this run has {processes} "
            f"process{'' if processes == 1 else 'es'}: "
            f"start it with --nproc {config.pipeline}, or set the key to {processes}"
        )
    return "none"

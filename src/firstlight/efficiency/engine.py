"""How the processes of a run share its model: torch's DDP or FSDP2, put around a plain model."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from firstlight.distributed import World, all_reduce_sum
from firstlight.efficiency.engine_config import DistributedConfig
from firstlight.efficiency.memory import decoder_layers
from firstlight.errors import ConfigError
from firstlight.models import Model

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


class Engine:
    """What the processes of a run do together; in a world of one, nothing.

    A step's gradient is the sum over the processes: each divides its loss by the valid tokens of
    all of them.

    Args:
        config: the recipe's `distributed` section.
        world: this process among the others; its group is open.
        device: of this process.

    Attributes:
        name: "none", "ddp" or "fsdp".
        rank, size: which part of each global batch this process computes, and of how many.
        loss_factor: what a loss is multiplied by before its backward pass; DDP takes the mean of
            the processes' gradients.

    Raises:
        ConfigError: the engine can't be that of so many processes.
    """

    def __init__(self, config: DistributedConfig, world: World, device: torch.device) -> None:
        self.config, self.world, self.device = config, world, device
        self.rank, self.size = world.rank, world.size
        self.name = _engine_name(config, world)
        self.loss_factor = self.size if self.name == "ddp" else 1
        self._cut_modules: list[FSDPModule] = []
        self._ddp: DistributedDataParallel | None = None

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes files and talks to people."""
        return self.world.rank == 0

    def share(self, model: Model, precision: str) -> Callable[..., Tensor]:
        """Let the processes share a model, in place; return what computes its forward pass.

        Args:
            model: on this process' device, the same on all; with activation checkpointing and
                the like in it already.
            precision: the recipe's; with "bf16", fsdp sends parameters in bf16, and adds
                gradients up in fp32.
        """
        if self.name == "ddp":
            # A model is in the same state on all, and has no buffers that change.
            with warnings.catch_warnings():
                # Newer versions of torch have another name for it, which older ones don't know.
                warnings.simplefilter("ignore", FutureWarning)
                self._ddp = DistributedDataParallel(
                    model, broadcast_buffers=False, gradient_as_bucket_view=True
                )
            return self._ddp
        if self.name == "fsdp":
            self._cut(model, precision)
        return model

    def _cut(self, model: Model, precision: str) -> None:
        # Only here: importing them takes most of a second.
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import (
            CPUOffloadPolicy,
            FSDPModule,
            MixedPrecisionPolicy,
            OffloadPolicy,
            fully_shard,
        )

        bf16 = torch.bfloat16 if precision == "bf16" else None
        offload = OffloadPolicy()
        if self.config.offload == "cpu":
            offload = CPUOffloadPolicy(pin_memory=self.device.type == "cuda")
        shard, kind = self.config.shard or self.size, self.device.type
        if shard == self.size:
            mesh = init_device_mesh(kind, (self.size,), mesh_dim_names=("shard",))
        else:
            sizes = (self.size // shard, shard)
            mesh = init_device_mesh(kind, sizes, mesh_dim_names=("replicate", "shard"))
        options: dict[str, Any] = {
            "mesh": mesh,
            "reshard_after_forward": self.config.reshard_after_forward,
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=bf16, reduce_dtype=torch.float32 if bf16 else None
            ),
            "offload_policy": offload,
        }
        for layer in decoder_layers(model):
            fully_shard(layer, **options)
        fully_shard(model, **options)
        self._cut_modules = [part for part in model.modules() if isinstance(part, FSDPModule)]
        for part in self._cut_modules:
            part.set_gradient_divide_factor(1.0)
            # gloo knows no other reduction.
            part.set_force_sum_reduction_for_comms(True)

    @contextlib.contextmanager
    def backward_pass(self, *, last: bool) -> Iterator[None]:
        """A micro-batch's forward and backward pass: gradients are sent in the step's last only.

        Args:
            last: of the step.
        """
        if self._ddp is not None and not last:
            with self._ddp.no_sync():
                yield
            return
        if self.name == "fsdp":
            for part in self._cut_modules:
                part.set_requires_gradient_sync(last, recurse=False)
        yield

    def settle(self) -> None:
        """Have each process hold its piece only, also after a forward pass without a backward
        pass, which leaves what is outside of the layers together."""
        if self.name == "fsdp":
            for part in self._cut_modules:
                part.reshard()

    def sum(self, value: float) -> float:
        """A number added up over the processes, in fp64."""
        if self.size == 1:
            return value
        return float(all_reduce_sum(torch.tensor(value, dtype=torch.float64)))


def _engine_name(config: DistributedConfig, world: World) -> str:
    name, size = config.engine, world.size
    if name == "auto":
        name = "none" if size == 1 else "ddp"
    if name == "none" and size > 1:
        raise ConfigError(
            f"distributed.engine none is for one process, and there are {size}: each would train "
            "a model of its own; set it to ddp or fsdp"
        )
    if name != "none" and size == 1:
        raise ConfigError(
            f"distributed.engine {name} is for several processes, and this run has one: start it "
            "with --nproc, or set distributed.engine to none"
        )
    if name != "fsdp" and (config.shard is not None or config.offload != "none"):
        raise ConfigError(
            "distributed.shard and distributed.offload are for distributed.engine fsdp: set it "
            "to fsdp, or leave them out"
        )
    if config.shard is not None and size % config.shard:
        raise ConfigError(
            f"distributed.shard {config.shard} does not divide the {size} processes evenly: "
            f"take one of {', '.join(str(n) for n in range(2, size + 1) if size % n == 0)}"
        )
    return name

"""How the processes of a run share its model: torch's DDP or FSDP2, tensor parallel or not, put
around a plain model."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from firstlight.errors import ConfigError
from firstlight.models import Model, ModelConfig, build_model, empty_model
from firstlight.parallel import World, all_reduce_sum
from firstlight.parallel.collectives import gather_to_main
from firstlight.parallel.config import DistributedConfig
from firstlight.parallel.pipeline import Pipeline, stage_model, unstageable
from firstlight.parallel.tensor_parallel import cut_tensors

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule

    from firstlight.parallel.deepspeed_engine import ZeroModel


class Engine:
    """What the processes of a run do together; in a world of one, nothing.

    A step's gradient is the sum over the processes: each divides its loss by the valid tokens of
    all of them.

    Args:
        config: the recipe's `distributed` section.
        world: this process among the others; its group is open.
        device: of this process.

    Attributes:
        name: "none", "ddp", "fsdp" or "deepspeed": how those share a model that compute different
            rows.
        rank, size: which part of each global batch this process computes, and of how many. With
            `distributed.tensor_parallel` or `pipeline`, processes next to each other compute one
            part together.
        group_rank: this process among those that compute a part together.
        pipeline: this process' stage, once the model is shared; None without stages.
        zero: the model as DeepSpeed shares it, which is given by its optimizer; else None.
        loss_factor: what a loss is multiplied by before its backward pass; DDP takes the mean of
            the processes' gradients.

    Raises:
        ConfigError: the engine can't be that of so many processes.
    """

    def __init__(self, config: DistributedConfig, world: World, device: torch.device) -> None:
        self.config, self.world, self.device = config, world, device
        self.name = engine_name(config, world.size)
        group = config.tensor_parallel * config.pipeline
        self.rank, self.group_rank = divmod(world.rank, group)
        self.size = world.size // group
        self.loss_factor = self.size if self.name in ("ddp", "deepspeed") else 1
        self.pipeline: Pipeline | None = None
        self.zero: ZeroModel | None = None
        self._cut_modules: list[FSDPModule] = []
        self._ddp: DistributedDataParallel | None = None

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes files and talks to people."""
        return self.world.rank == 0

    def new_model(
        self, config: ModelConfig, vocab_multiple: int, generator: torch.Generator | None = None
    ) -> Model:
        """What this process has of a model, on the CPU.

        Args:
            generator: to initialise from; None leaves values out.

        Raises:
            ConfigError: it has no such stages.
        """
        stages = self.config.pipeline
        if stages > 1:
            if problems := list(unstageable(config, stages)):
                raise ConfigError("; ".join(problems))
            return stage_model(config, vocab_multiple, self.group_rank, stages, generator)
        model = empty_model(config, vocab_multiple)
        if generator is not None:
            model.init_weights(generator)
        return model

    def elsewhere(self, model: Model) -> set[str]:
        """The names of the parameters that only other stages have."""
        if self.config.pipeline == 1:
            return set()
        with torch.device("meta"):
            whole = build_model(model.config)
        own = {name for name, _ in model.named_parameters()}
        return {name for name, _ in whole.named_parameters()} - own

    def gathered(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of all stages, in the main process; in others their own.

        Args:
            tensors: on the CPU.
        """
        return tensors if self.config.pipeline == 1 else gather_to_main(tensors)

    def joined_norm(self, norm: Tensor) -> Tensor:
        """The L2 norm of all parameters' gradients, from that of those that this process has."""
        if self.config.pipeline == 1:
            return norm
        return all_reduce_sum(norm.detach().double().cpu() ** 2).sqrt().to(norm)

    @property
    def cuts(self) -> bool:
        """Whether `share` leaves each process pieces of a model's weights."""
        return self.name == "fsdp" or self.config.tensor_parallel > 1

    def share(self, model: Model, precision: str) -> Callable[..., Tensor]:
        """Let the processes share a model, in place; return what computes its forward pass.

        Args:
            model: the same on all, with activation checkpointing and the like in it already. On
                this process' device; one that is cut may be on the CPU, whence its layers go to the
                device one after the other.
            precision: the recipe's; with "bf16", fsdp sends parameters in bf16, and adds
                gradients up in fp32.
        """
        if self.config.pipeline > 1:
            self.pipeline = Pipeline(model, self.world, self.device)
            return self.pipeline.forward
        mesh = self._mesh() if self.cuts else None
        if self.config.tensor_parallel > 1:
            assert mesh is not None
            # It tells that numbers are added up over two dimensions, one after the other.
            logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
            cut_tensors(model, mesh["tensor"])
            for module in model.modules():
                for name, buffer in list(module.named_buffers(recurse=False)):
                    setattr(module, name, buffer.to(self.device))
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
            assert mesh is not None
            self._cut(model, precision, mesh)
        return model

    def _mesh(self) -> DeviceMesh:
        """The processes by what they share: "replicate", "shard" and "tensor", as far as these are
        more than one."""
        # Only here: importing it takes most of a second.
        from torch.distributed.device_mesh import init_device_mesh

        shard = self.config.shard or self.size
        sizes = {
            "replicate": self.size // shard,
            "shard": shard,
            "tensor": self.config.tensor_parallel,
        }
        sizes = {name: size for name, size in sizes.items() if size > 1}
        return init_device_mesh(
            self.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes)
        )

    def _cut(self, model: Model, precision: str, mesh: DeviceMesh) -> None:
        # Only here: importing them takes most of a second.
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
        # Of processes that compute different rows.
        names = tuple(name for name in mesh.mesh_dim_names or () if name != "tensor")
        options: dict[str, Any] = {
            "mesh": mesh[names],
            "reshard_after_forward": self.config.reshard_after_forward,
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=bf16, reduce_dtype=torch.float32 if bf16 else None
            ),
            "offload_policy": offload,
        }
        for layer in model.layers:
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
        if self.zero is not None:
            self.zero.set_last(last)
        if self._ddp is not None and not last:
            with self._ddp.no_sync():
                yield
            return
        if self.name == "fsdp":
            for part in self._cut_modules:
                part.set_requires_gradient_sync(last, recurse=False)
        yield

    def backward(self, loss: Tensor) -> None:
        """The backward pass from a micro-batch's loss."""
        if self.zero is not None:
            self.zero.backward(loss)
        else:
            loss.backward()  # type: ignore[no-untyped-call]

    def settle(self) -> None:
        """Have each process hold its piece only, also after a forward pass without a backward
        pass, which leaves what is outside of the layers together."""
        if self.name == "fsdp":
            for part in self._cut_modules:
                part.reshard()

    def sum(self, value: float) -> float:
        """A number added up over the parts of a global batch, in fp64; all get the same."""
        if self.world.size == 1:
            return value
        # Processes that compute one part together have the same number.
        own = value if self.group_rank == 0 else 0.0
        return float(all_reduce_sum(torch.tensor(own, dtype=torch.float64)))


def engine_name(config: DistributedConfig, processes: int) -> str:
    """The engine of so many processes, those that compute the same rows included."""
    if config.pipeline > 1:
        return _engine_of_stages(config, processes)
    name, group = config.engine, config.tensor_parallel
    size, rest = divmod(processes, group)
    if rest:
        raise ConfigError(
            f"distributed.tensor_parallel is {group} and this run has {processes} "
            f"process{'' if processes == 1 else 'es'}: "
            f"start it with --nproc {group}, or a multiple of it, or leave the key out"
        )
    one, several, others = "one process", "processes", "ddp or fsdp"
    if group > 1:
        one, several, others = f"one group of {group} processes", "groups", "fsdp"
        if name == "ddp":
            raise ConfigError(
                "distributed.engine ddp needs whole parameters, and distributed.tensor_parallel "
                "cuts them: set distributed.engine to fsdp"
            )
    if name == "auto" and size > 1:
        name = "fsdp" if group > 1 else "ddp"
    elif name == "auto":
        name = "none"
    if name == "none" and size > 1:
        raise ConfigError(
            f"distributed.engine none is for {one}, and there are {size}: each would train "
            f"a model of its own; set it to {others}"
        )
    if group > 1 and name == "deepspeed":
        raise ConfigError(
            "distributed.tensor_parallel is not for distributed.engine deepspeed: set "
            "distributed.engine to fsdp, or leave tensor_parallel out"
        )
    # DeepSpeed offloads for one process, too.
    if name not in ("none", "deepspeed") and size == 1:
        if group > 1:
            raise ConfigError(
                f"distributed.engine {name} shares a model between groups of {group} processes "
                f"(distributed.tensor_parallel {group}), and the {group} processes of this run are "
                f"one group: leave distributed.engine out, or start the run with --nproc "
                f"{2 * group} or another multiple of {group}"
            )
        raise ConfigError(
            f"distributed.engine {name} is for several processes, and this run has one: start it "
            "with --nproc 2 or more, or set distributed.engine to none"
        )
    _require_own_keys(config, name)
    if config.shard is not None and size % config.shard:
        raise ConfigError(
            f"distributed.shard {config.shard} does not divide the {size} {several} evenly: "
            f"take one of {', '.join(str(n) for n in range(2, size + 1) if size % n == 0)}"
        )
    return name


def _require_own_keys(config: DistributedConfig, name: str) -> None:
    """Refuse keys that are another engine's."""
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
                f"distributed.{key} {getattr(config, key)} is for distributed.engine "
                f"{' or '.join(engines)}, and the engine is {name}: set it to {engines[0]}, or "
                f"leave {key} out"
            )
    if nvme and (stage != 3 or config.nvme_path is None):
        raise ConfigError(
            "distributed.offload nvme needs distributed.zero_stage 3, and a folder on a fast disk "
            "as distributed.nvme_path: set both, or set distributed.offload to cpu"
        )
    if config.nvme_path is not None and not nvme:
        raise ConfigError(
            "distributed.nvme_path is for distributed.offload nvme: set that, or leave it out"
        )


def _engine_of_stages(config: DistributedConfig, processes: int) -> str:
    others = {
        f"engine {config.engine}": config.engine not in ("auto", "none"),
        f"tensor_parallel {config.tensor_parallel}": config.tensor_parallel > 1,
    }
    for name, is_set in others.items():
        if is_set:
            raise ConfigError(
                f"distributed.pipeline {config.pipeline} has one process a stage, and none "
                f"for distributed.{name}: leave one of them out"
            )
    _require_own_keys(config, "none")
    if processes != config.pipeline:
        raise ConfigError(
            f"distributed.pipeline is {config.pipeline} and this run has {processes} "
            f"process{'' if processes == 1 else 'es'}: "
            f"start it with --nproc {config.pipeline}, or set the key to {processes}"
        )
    return "none"

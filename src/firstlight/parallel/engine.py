"""Engines, which share a run's model among its processes: their interface, and the engines in which
each process holds the whole model. An engine is applied to a plain model."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from firstlight.models import Model, ModelConfig, empty_model
from firstlight.models.language_model import InitConfig
from firstlight.optim.dtensors import is_sharded
from firstlight.optim.optimizer import Optimizer, OptimizerConfig
from firstlight.parallel.group import all_reduce_sum
from firstlight.parallel.world import World
from firstlight.section import Section

#: Names of a model's tensors in a checkpoint's file, and views of them.
TensorsOf = Callable[[Model], Mapping[str, Tensor]]


class DistributedConfig(Section):
    """The `distributed` section. The results of a run do not depend on the engine; a checkpoint can
    be resumed with any other.
    """

    engine: Literal["auto", "none", "ddp", "fsdp", "deepspeed"] = "auto"
    """"auto" is "none" for one process and "ddp" for several. "ddp" gives each process the whole
    model, and gradients are added up; "fsdp" (FSDP2) shards parameters, gradients and optimizer
    state over the processes, and gathers each layer while it is computed; "deepspeed" is
    ZeRO, of one process too."""
    shard: int | None = Field(None, gt=1)
    """fsdp's number of processes that share one copy of the model; null is all. With fewer
    (hybrid sharding, best the processes of one machine), each group has a copy, and layers are
    gathered within a group only."""
    offload: Literal["none", "cpu", "nvme"] = "none"
    """place of sharded tensors: "cpu" is memory of the CPU, where fsdp keeps and updates its shards
    and deepspeed its optimizer state, and at stage 3 the parameters; "nvme" keeps optimizer state
    in files."""
    zero_stage: Literal[1, 2, 3] | None = None
    """deepspeed's sharded tensors: 1 optimizer state, 2 (null) gradients too, 3 parameters too."""
    nvme_path: str | None = None
    """folder on a fast disk of each machine, for offload nvme."""
    deepspeed_config: str | None = None
    """an existing DeepSpeed configuration file (JSON), which makes "auto" the engine deepspeed. Its
    values fill the recipe's open keys; the two must not contradict each other."""
    reshard_after_forward: bool = True
    """fsdp frees a gathered layer after its forward pass and gathers it again for the backward
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


class StateTensors(NamedTuple):
    """Weights and optimizer state of a run, as an engine hands them to a checkpoint.

    Attributes:
        weights: tensors by name.
        moments: optimizer state by name.
        is_copy: True if the next step changes none of the tensors.
    """

    weights: Mapping[str, Tensor]
    moments: Mapping[str, Tensor]
    is_copy: bool = False


class Engine:
    """The processes of a run around one model; this class is the engine of one process.

    A step's gradient is the sum over the processes: each divides its loss by the valid tokens of
    all of them. Other engines override the methods in which they differ.

    Args:
        config: the recipe's `distributed` section.
        world: this process among the others; its process group is open.
        device: this process' device.

    Attributes:
        name: "none", "ddp", "fsdp" or "deepspeed": the engine between processes that compute
            different sequences.
        keeps_shards: True if `share` leaves each process a shard of every weight.
        shards_state: True if each process keeps a shard of the optimizer's state.
        keeps_buckets: True if all gradients stay in buckets between steps.
        updates_itself: True if a library's engine runs the backward pass and the update, in place
            of `Optimizer`.
        can_repeat_step: True if a step that ran out of memory can be repeated with smaller
            micro-batches; not where other processes wait for this one's gradients.
        rank, size: this process' part of each global batch, and the number of parts. With
            `distributed.tensor_parallel` or `pipeline`, neighbouring processes compute one part
            together.
        group_rank: this process' number among those that compute a part together.
        loss_factor: the factor of a loss before its backward pass; DDP and DeepSpeed take the mean
            of the processes' gradients, where the step needs their sum.
    """

    name = "none"
    keeps_shards = False
    shards_state = False
    keeps_buckets = False
    updates_itself = False
    averages_gradients = False

    def __init__(self, config: DistributedConfig, world: World, device: torch.device) -> None:
        self.config, self.world, self.device = config, world, device
        group = config.tensor_parallel * config.pipeline
        self.rank, self.group_rank = divmod(world.rank, group)
        self.size = world.size // group
        self.loss_factor = self.size if self.averages_gradients else 1

    @property
    def is_main(self) -> bool:
        """True if this is the process that writes files and talks to people."""
        return self.world.is_main

    @property
    def can_repeat_step(self) -> bool:
        """See the class."""
        return self.world.size == 1

    def session(self) -> contextlib.AbstractContextManager[None]:
        """The context of a run; at its end the engine's changes of process-wide settings are
        undone."""
        return contextlib.nullcontext()

    # The model

    def new_model(
        self,
        config: ModelConfig,
        vocab_multiple: int,
        *,
        generator: torch.Generator | None = None,
        init: InitConfig | None = None,
    ) -> Model:
        """This process' part of a model, on the CPU.

        Args:
            generator: the source of the initial values; None leaves values out.
            init: see `LanguageModel.init_weights`.

        Raises:
            ConfigError: the model can't be split into as many stages.
        """
        model = empty_model(config, vocab_multiple)
        if generator is not None:
            model.init_weights(generator, init)
        return model

    def share(self, model: Model, precision: str) -> Callable[..., Tensor]:
        """Let the processes share a model, in place; return the function of its forward pass.

        Args:
            model: the model, equal on all processes, with activation checkpointing and similar
                methods applied. On this process' device; one that will be sharded may be on the
                CPU, whence its layers go to the device one after the other.
            precision: the recipe's; with "bf16", fsdp sends parameters in bf16, and adds
                gradients up in fp32.
        """
        return model

    def set_up(
        self,
        model: Model,
        config: OptimizerConfig,
        precision: str,
        *,
        in_backward: bool,
        initial: Mapping[str, Tensor],
    ) -> tuple[Optimizer, Callable[..., Tensor]]:
        """`share` a model; return its optimizer, and the function of its forward pass.

        Args:
            in_backward: see `Optimizer`.
            initial: fp32 values by parameter name, of parameters that have lost them.
        """
        forward = self.share(model, precision)
        return Optimizer(model, config, in_backward=in_backward, initial=initial), forward

    def absent_parameters(self, model: Model) -> set[str]:
        """The names of the whole model's parameters that only other stages have."""
        return set()

    def reshard(self) -> None:
        """Have each process hold its shard only, also after a forward pass without a backward
        pass, which leaves parameters outside of the layers whole."""

    # A step

    def run_schedule(
        self, loss_sum: Callable[..., Tensor], batches: Sequence[Any], divisor: float
    ) -> Tensor | None:
        """All forward and backward passes of a step, where the engine orders them itself.

        Args:
            loss_sum: this process' loss function.
            batches: the step's micro-batches.
            divisor: each loss is divided by it before its backward pass.

        Returns:
            The summed loss [], fp64; None if the step runs one micro-batch after the other.
        """
        return None

    def backward_pass(self, *, last: bool) -> contextlib.AbstractContextManager[None]:
        """The context of a micro-batch's forward and backward pass; gradients are sent in the
        step's last only."""
        return contextlib.nullcontext()

    def backward(self, loss: Tensor) -> None:
        """The backward pass from a micro-batch's loss, a scalar []."""
        loss.backward()  # type: ignore[no-untyped-call]

    def joined_norm(self, norm: Tensor) -> Tensor:
        """The L2 norm [] of all parameters' gradients, from that of this process' parameters."""
        return norm

    def sum(self, value: float) -> float:
        """A number added up over the parts of a global batch, in fp64; all get the same."""
        if self.world.size == 1:
            return value
        # Processes that compute one part together have the same number.
        own = value if self.group_rank == 0 else 0.0
        return float(all_reduce_sum(torch.tensor(own, dtype=torch.float64)))

    # Checkpoints

    def state_tensors(
        self, model: Model, optimizer: Optimizer, tensors_of: TensorsOf
    ) -> StateTensors:
        """Whole weights and moments in the main process. All processes have to call it.

        They stay on their device: a saver copies them from a GPU into page-locked memory, all at
        once.

        Args:
            tensors_of: the weights to save, of a model whose parameters are whole.
        """
        # Every process has the whole state: nothing is gathered.
        if not self.is_main:
            return StateTensors({}, {})
        with optimizer.master_weights():
            return StateTensors(tensors_of(model), optimizer.state_shards())

    def own_tensors(self, model: Model, optimizer: Optimizer) -> StateTensors:
        """This process' weights and moments as they lie: its shards, and in the main process also
        tensors that are not sharded."""
        weights = {name: p.detach() for name, p in model.named_parameters()}
        weights, moments = (
            {n: t for n, t in tensors.items() if self.is_main or is_sharded(t)}
            for tensors in (weights, optimizer.state_shards())
        )
        return StateTensors(weights, moments)


def one_process(device: torch.device = torch.device("cpu")) -> Engine:  # noqa: B008 - a constant
    """The engine of a process that trains alone."""
    return Engine(DistributedConfig(engine="none"), World(0, 1, 0, 1), device)


class DDPEngine(Engine):
    """torch's DistributedDataParallel: each process has the whole model, gradients are added up."""

    name = "ddp"
    keeps_buckets = True
    averages_gradients = True
    _ddp: DistributedDataParallel

    def share(self, model: Model, precision: str) -> Callable[..., Tensor]:
        """See `Engine.share`."""
        # A model is in the same state on all, and has no buffers that change.
        with warnings.catch_warnings():
            # Newer versions of torch have another name for it, which older ones don't know.
            warnings.simplefilter("ignore", FutureWarning)
            self._ddp = DistributedDataParallel(
                model, broadcast_buffers=False, gradient_as_bucket_view=True
            )
        return self._ddp

    def set_up(
        self, model: Model, config: OptimizerConfig, precision: str, **options: Any
    ) -> tuple[Optimizer, Callable[..., Tensor]]:
        """See `Engine.set_up`."""
        optimizer, forward = super().set_up(model, config, precision, **options)
        optimizer.share_matrices(self.rank, self.size)
        return optimizer, forward

    @contextlib.contextmanager
    def backward_pass(self, *, last: bool) -> Iterator[None]:
        """See `Engine.backward_pass`."""
        with contextlib.nullcontext() if last else self._ddp.no_sync():
            yield


def on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on the CPU, contiguous, without gradients, in their shapes; those that are so
    already are not copied."""
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}

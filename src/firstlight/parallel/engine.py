"""The engine interface, and the engines that keep a full copy of the model in each process.

An engine distributes one plain model over the processes of a run. It wraps or shards the model,
combines gradients, and gathers weights and optimizer state for checkpoints.
"""

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
from firstlight.optim.config import OptimizerConfig
from firstlight.optim.dtensors import is_sharded
from firstlight.optim.optimizer import Optimizer
from firstlight.parallel.group import all_reduce_sum
from firstlight.parallel.world import World
from firstlight.section import Section

#: Function that returns a model's tensors for the weight file of a checkpoint. The tensors are
#: views of parameters and buffers, keyed by their names in that file.
TensorsOf = Callable[[Model], Mapping[str, Tensor]]


class DistributedConfig(Section):
    """The `distributed` section. Apart from rounding, the results of a run do not depend on the
    engine. A checkpoint written with one engine can be resumed with any other.
    """

    engine: Literal["auto", "none", "ddp", "fsdp", "deepspeed"] = "auto"
    """engine of the run. "auto" selects "none" for one process and "ddp" for several processes.
    "ddp" gives each process the whole model and sums gradients. "fsdp" (FSDP2) shards parameters,
    gradients and optimizer state over the processes, and gathers each layer while it is computed.
    "deepspeed" is DeepSpeed ZeRO, which also supports a single process.
    """
    shard: int | None = Field(None, gt=1)
    """number of processes over which fsdp shards one copy of the model; null means all processes. A
    smaller number selects hybrid sharding. Each group of that many processes, ideally on one
    machine, then has a copy of the model, and layers are gathered only within the group."""
    offload: Literal["none", "cpu", "nvme"] = "none"
    """where sharded tensors are stored. With "cpu", fsdp keeps and updates its shards in CPU
    memory. deepspeed keeps the optimizer state in CPU memory and, at stage 3, also the parameters.
    With "nvme", which only deepspeed supports, the optimizer state is kept in files.
    """
    zero_stage: Literal[1, 2, 3] | None = None
    """ZeRO stage of deepspeed. Stage 1 shards the optimizer state, stage 2 also shards the
    gradients, and stage 3 also shards the parameters. null means 2.
    """
    nvme_path: str | None = None
    """folder in which offload "nvme" stores its files. It should be on a fast disk of each
    machine.
    """
    deepspeed_config: str | None = None
    """path of an existing DeepSpeed configuration file (JSON). If it is set, engine "auto" selects
    deepspeed. The file supplies values for keys that the recipe does not set, and must not
    contradict the recipe.
    """
    reshard_after_forward: bool = True
    """true makes fsdp free a gathered layer after its forward pass and gather it again for its
    backward pass. false makes fsdp gather each layer once and keep it in memory until its backward
    pass.
    """
    tensor_parallel: int = Field(1, ge=1)
    """number of neighbouring processes, ideally on one machine, that share the computation of each
    layer for the same sequences. Each process holds some of the attention heads and part of the
    MLP. This is for Llama models whose layers are too large for one GPU. If there are more
    processes, they are divided into groups of this size, and engine "auto" uses "fsdp" across the
    groups."""
    pipeline: int = Field(1, ge=1)
    """number of pipeline stages. Each stage is a process that computes consecutive layers of a
    Llama model. The micro-batches of a step pass through all stages. This is for models that are
    too large for one machine. The number of micro-batches per step
    (batch.gradient_accumulation_steps) should be several times the number of stages."""
    timeout_seconds: float = Field(600, gt=0)
    """time in seconds without a response from a process after which the run ends with an error. It
    must be longer than the slowest save, because other processes wait while one of them saves."""


class StateTensors(NamedTuple):
    """Weights and optimizer state that an engine returns for a checkpoint.

    Attributes:
        weights: weights by name.
        moments: optimizer state by name.
        is_copy: True if the tensors do not share memory with the model and the optimizer. In this
            case, the next step does not change them.
    """

    weights: Mapping[str, Tensor]
    moments: Mapping[str, Tensor]
    is_copy: bool = False


class Engine:
    """Distributes one model over the processes of a run. This base class is the engine for runs
    with a single process, and all other engines are subclasses of it.

    A step's gradient is the sum of the processes' gradients, because each process divides its loss
    by the number of valid tokens of all processes.

    Args:
        config: the recipe's `distributed` section.
        world: this process's position in the run; the process group must be open.
        device: this process's device.

    Attributes:
        name: name of the engine used between processes that compute different sequences: "none",
            "ddp", "fsdp" or "deepspeed".
        keeps_shards: True if `share` shards the weights over the processes.
        shards_state: True if each process keeps only a shard of the optimizer's state.
        keeps_buckets: True if the gradients' memory stays allocated between steps, as with DDP,
            where gradients are views into communication buckets.
        updates_itself: True if an external library (DeepSpeed) runs the backward pass and the
            update in place of `Optimizer`.
        averages_gradients: True if the library averages the processes' gradients instead of
            summing them.
        can_repeat_step: True if a step that ran out of memory can be repeated with smaller
            micro-batches. A step can't be repeated if other processes are waiting for this
            process's gradients.
        rank, size: index of this process's part of each global batch, and the number of parts. With
            `distributed.tensor_parallel` or `distributed.pipeline`, several neighbouring processes
            compute the same part together.
        group_rank: index of this process among the processes that compute the same part of the
            global batch together.
        loss_factor: factor by which a loss is multiplied before its backward pass. If the library
            averages gradients, the factor is `size`, so that the average is equal to the sum.
            Otherwise, it is 1.
    """

    name = "none"
    keeps_shards = False
    shards_state = False
    keeps_buckets = False
    updates_itself = False
    averages_gradients = False

    def __init__(self, config: DistributedConfig, world: World, device: torch.device) -> None:
        self.config = config
        self.world = world
        self.device = device
        group = config.tensor_parallel * config.pipeline
        self.rank, self.group_rank = divmod(world.rank, group)
        self.size = world.size // group
        self.loss_factor = self.size if self.averages_gradients else 1

    @property
    def is_main(self) -> bool:
        """True if this is the process that writes files and messages."""
        return self.world.is_main

    @property
    def can_repeat_step(self) -> bool:
        """True if a step that ran out of memory can be repeated with smaller micro-batches."""
        return self.world.size == 1

    def session(self) -> contextlib.AbstractContextManager[None]:
        """Return the context for a whole run. On exit, it undoes the engine's changes to
        process-wide settings, such as environment variables and the process group.
        """
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
        """Create a new model on the CPU. In a pipeline, create only the stage of this process.

        Args:
            config: the architecture.
            vocab_multiple: the size of the vocabulary is padded to a multiple of this number.
            generator: source of the random initial values; None leaves the values uninitialized.
            init: see `LanguageModel.init_weights`.

        Raises:
            ConfigError: the model can't be split into `distributed.pipeline` stages.
        """
        model = empty_model(config, vocab_multiple)
        if generator is not None:
            model.init_weights(generator, init)
        return model

    def share(self, model: Model, precision: str) -> Callable[..., Tensor]:
        """Distribute a model over the processes, in place. Return its distributed forward function.

        Args:
            model: the model, with the same weights on all processes. Activation checkpointing and
                similar methods must already have been applied. The model must be on this process's
                device. If `keeps_shards` is True, it can also be on the CPU; its layers are then
                moved to the device one by one.
            precision: the recipe's `efficiency.precision`. With "bf16", fsdp gathers parameters in
                bf16 and sums gradients in fp32.

        Returns:
            A function with the same arguments and result as `LanguageModel.forward`.
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
        """Distribute a model with `share` and create its optimizer.

        Args:
            model, precision: see `share`.
            config: the recipe's `optimizer` section.
            in_backward: see `Optimizer`.
            initial: fp32 master weights of 16-bit parameters, by parameter name; empty if the
                parameters are fp32.

        Returns:
            The optimizer, and the forward function that `share` returns.
        """
        forward = self.share(model, precision)
        return Optimizer(model, config, in_backward=in_backward, initial=initial), forward

    def absent_parameters(self, model: Model) -> set[str]:
        """Return the names of the parameters that belong to other pipeline stages and are therefore
        missing on this process.
        """
        return set()

    def reshard(self) -> None:
        """Free gathered parameters, so that each process holds only its shards.

        After a forward pass without a backward pass, as in an evaluation, the parameters outside of
        the layers stay gathered until this method is called.
        """

    # A step

    def run_schedule(
        self, loss_sum: Callable[..., Tensor], batches: Sequence[Any], divisor: float
    ) -> Tensor | None:
        """Run all forward and backward passes of a step, if the engine schedules them itself as a
        pipeline does.

        Args:
            loss_sum: this process's loss function, which maps `input_ids`, `labels` and
                `document_ids`, each of shape [batch, seq_len], to the summed loss, a scalar [].
            batches: the step's micro-batches.
            divisor: number by which each loss is divided before its backward pass.

        Returns:
            The summed loss over all micro-batches, before the division: a scalar [], fp64. None if
            the engine does not schedule the passes; the caller must then run the micro-batches
            itself.
        """
        return None

    def backward_pass(self, *, last: bool) -> contextlib.AbstractContextManager[None]:
        """Return the context for a micro-batch's forward and backward pass.

        Args:
            last: True for the last micro-batch of a step. Processes exchange gradients only in this
                micro-batch; the gradients of earlier micro-batches are accumulated locally.
        """
        return contextlib.nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass from a micro-batch's loss, a scalar []."""
        loss.backward()  # type: ignore[no-untyped-call]

    def joined_norm(self, norm: Tensor) -> Tensor:
        """Return the L2 norm of the whole model's gradients.

        Args:
            norm: the L2 norm of the gradients of this process's parameters, a scalar [].

        Returns:
            A scalar [], with the dtype and device of `norm`; the same on all processes.
        """
        return norm

    def sums(self, *values: float) -> list[float]:
        """Return the sum of each number over the parts of a global batch, computed in fp64. All
        processes must call this method, and all get the same sums.
        """
        if self.world.size == 1:
            return list(values)
        # Processes that compute a part of the global batch together have the same numbers, so only
        # one of these processes contributes to the sums.
        own = values if self.group_rank == 0 else [0.0] * len(values)
        sums: list[float] = all_reduce_sum(torch.tensor(own, dtype=torch.float64)).tolist()
        return sums

    # Checkpoints

    def state_tensors(
        self, model: Model, optimizer: Optimizer, tensors_of: TensorsOf
    ) -> StateTensors:
        """Return the full weights and optimizer state on the main process. All processes must call
        this method; processes other than the main process must ignore its result.

        This base class and the DDP engine return the tensors on their device, because the saver can
        copy all of them from a GPU into page-locked memory at once. Other engines return tensors on
        the CPU.

        Args:
            model: the distributed model.
            optimizer: optimizer of the model.
            tensors_of: see `TensorsOf`; it is called while the parameters are full.
        """
        # Every process already has the full state, so it does not have to be gathered.
        if not self.is_main:
            return StateTensors({}, {})
        with optimizer.master_weights():
            return StateTensors(tensors_of(model), optimizer.state_shards())

    def own_tensors(self, model: Model, optimizer: Optimizer) -> StateTensors:
        """Return this process's weights and optimizer state without gathering or copying them. The
        result contains this process's shards (DTensors). On the main process, it also contains the
        tensors that are not sharded.
        """
        weights = {name: p.detach() for name, p in model.named_parameters()}
        weights, moments = (
            {n: t for n, t in tensors.items() if self.is_main or is_sharded(t)}
            for tensors in (weights, optimizer.state_shards())
        )
        return StateTensors(weights, moments)


def one_process(device: torch.device = torch.device("cpu")) -> Engine:  # noqa: B008 - a constant
    """Return the engine for a run with a single process."""
    return Engine(DistributedConfig(engine="none"), World(0, 1, 0, 1), device)


class DDPEngine(Engine):
    """Uses torch's DistributedDataParallel. Each process has the whole model, and the processes
    average their gradients.
    """

    name = "ddp"
    keeps_buckets = True
    averages_gradients = True
    _ddp: DistributedDataParallel

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """See `Engine.session`. The model wrapped by `share` can't be used after the session."""
        try:
            yield
        finally:
            if hasattr(self, "_ddp"):
                # DDP's reducer (C++) also owns the process group. If it were the last owner, it
                # would destroy the group while holding the GIL. gloo's threads may be waiting for
                # the GIL, so this could deadlock. Once the reducer is gone, Python has the last
                # reference, and Python releases the GIL before it destroys the group.
                del self._ddp.reducer, self._ddp.logger

    def share(self, model: Model, precision: str) -> Callable[..., Tensor]:
        """See `Engine.share`."""
        # Buffers are equal on all processes and never change, so DDP does not have to broadcast
        # them.
        with warnings.catch_warnings():
            # Newer versions of torch have renamed an argument and warn about the old name, which
            # older versions require.
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
    """Return detached, contiguous tensors on the CPU, with unchanged shapes and dtypes. A tensor
    that is already contiguous and on the CPU is not copied.
    """
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}

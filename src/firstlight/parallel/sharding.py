"""Define engines that shard a model's weights over processes. They use tensor parallelism, FSDP2 or
a combination of the two.

With tensor parallelism (Shoeybi et al. 2019, Megatron-LM, arXiv 1909.08053), several processes
compute each layer of a Llama model together. Each process computes some of the attention heads and
a part of the MLP. All processes compute the same sequences, and each has the complete residual
stream, norms, logits and loss. The sharded parameters are DTensors, created by torch's
`parallelize_module`.

With FSDP2 (FSDP: Zhao et al. 2023, arXiv 2304.11277), each process stores a shard of every
parameter, its gradient and its optimizer state. The parameters of a layer are gathered while the
layer is computed. If tensor parallelism and FSDP2 are used together, they share one device mesh.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from firstlight.models import Model, ModelConfig, families_with
from firstlight.models.cache import KVCache
from firstlight.models.llama import RMSNorm
from firstlight.optim.dtensors import full_parameters, is_sharded
from firstlight.optim.optimizer import Optimizer
from firstlight.parallel.engine import Engine, StateTensors, TensorsOf, on_cpu

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ParallelStyle


def unshardable(config: ModelConfig, size: int) -> Iterator[str]:
    """Yield an error message for each reason why tensor parallelism can't shard a model over `size`
    processes.
    """
    if not config.tensor_parallel_sizes:
        able = families_with(
            lambda family: family.config.tensor_parallel_sizes and not family.spec.indivisible
        )
        yield (
            f"distributed.tensor_parallel supports {able}, but the model is {config.model_type}: "
            "set tensor_parallel to 1, and distributed.engine to fsdp"
        )
    elif config.indivisible:
        yield (
            f"distributed.tensor_parallel does not support {config.model_type} models, where "
            f"{config.indivisible}: set tensor_parallel to 1, and distributed.engine to fsdp"
        )
    for name in config.tensor_parallel_sizes:
        count = getattr(config, name)
        if count % size:
            most = max(n for n in range(1, size) if count % n == 0)
            yield (
                f"model.{name} {count} is not divisible by distributed.tensor_parallel {size}: "
                f"set tensor_parallel to {most}"
            )


class TensorParallelEngine(Engine):
    """Tensor parallelism without FSDP2. All processes work on every layer together, for the same
    sequences.
    """

    keeps_shards = True

    def share(self, model: Model, precision: str) -> Callable[..., Tensor]:
        """See `Engine.share`."""
        self._shard_tensors(model, self._mesh())
        return model

    def _shard_tensors(self, model: Model, mesh: DeviceMesh) -> None:
        """Shard the model's matrices along the mesh dimension "tensor", and move the model to the
        device.
        """
        # torch warns that a sum over two mesh dimensions takes two all-reduces. Hide the warning,
        # because two all-reduces are expected here.
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        shard_tensors(model, mesh["tensor"])
        # The conversion to DTensors has moved the parameters to the device, but not the buffers.
        for module in model.modules():
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, buffer.to(self.device))

    def _mesh(self) -> DeviceMesh:
        """Return the device mesh of all processes. Its dimensions are "replicate" (copies of the
        model), "shard" (FSDP2) and "tensor". Dimensions of size 1 are omitted.
        """
        # Imported here, because the import takes almost a second.
        from torch.distributed.device_mesh import init_device_mesh

        # If a copy of the model has fewer shards than there are processes (hybrid sharding), each
        # group of `shard` neighbouring processes has a separate copy. Layers can then be gathered
        # within a machine.
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

    def state_tensors(
        self, model: Model, optimizer: Optimizer, tensors_of: TensorsOf
    ) -> StateTensors:
        """See `Engine.state_tensors`. Tensors are gathered one after the other, so that all
        processes except the main process have only one full tensor in memory at a time.
        """
        moments = optimizer.state_tensors(keep=self.is_main)
        with optimizer.master_weights(), full_parameters(model, keep=self.is_main):
            weights = on_cpu(tensors_of(model)) if self.is_main else {}
        # Gathered tensors are already copies. Only unsharded tensors on the CPU share memory with
        # the model or the optimizer and have to be copied.
        own = {
            (t.to_local() if is_sharded(t) else t).untyped_storage().data_ptr()
            for t in (p.detach() for p in (*model.parameters(), *optimizer.state_shards().values()))
        }
        weights, moments = (
            {n: t.clone() if t.untyped_storage().data_ptr() in own else t for n, t in part.items()}
            for part in (weights, moments)
        )
        return StateTensors(weights, moments, is_copy=True)


class FSDPEngine(TensorParallelEngine):
    """FSDP2 over the processes that compute different sequences. With
    `distributed.tensor_parallel`, each group of tensor-parallel processes computes the same
    sequences, and FSDP2 shards the model over these groups.
    """

    name = "fsdp"
    shards_state = True
    _sharded_modules: list[FSDPModule]

    def share(self, model: Model, precision: str) -> Callable[..., Tensor]:
        """See `Engine.share`."""
        # Imported here, because the import takes almost a second.
        from torch.distributed.fsdp import (
            CPUOffloadPolicy,
            FSDPModule,
            MixedPrecisionPolicy,
            OffloadPolicy,
            fully_shard,
        )

        mesh = self._mesh()
        if self.config.tensor_parallel > 1:
            self._shard_tensors(model, mesh)
        # Gathering parameters in bf16 halves the traffic. Gradients have to be summed in fp32 for
        # precision.
        bf16 = torch.bfloat16 if precision == "bf16" else None
        offload = OffloadPolicy()
        if self.config.offload == "cpu":
            # Use page-locked memory. Otherwise, copies between GPU and CPU would not overlap with
            # computation.
            offload = CPUOffloadPolicy(pin_memory=self.device.type == "cuda")
        # FSDP2 uses all dimensions except "tensor", along which all processes compute the same
        # sequences.
        names = tuple(name for name in mesh.mesh_dim_names or () if name != "tensor")
        options: dict[str, Any] = {
            "mesh": mesh[names],
            # If this is False, layers stay gathered until their backward pass. This requires memory
            # for the whole model, but each layer is gathered only once per micro-batch instead of
            # twice.
            "reshard_after_forward": self.config.reshard_after_forward,
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=bf16, reduce_dtype=torch.float32 if bf16 else None
            ),
            "offload_policy": offload,
        }
        # Each layer is gathered separately. The last call handles the embedding, final norm and
        # head.
        for layer in model.layers:
            fully_shard(layer, **options)
        fully_shard(model, **options)
        self._sharded_modules = [part for part in model.modules() if isinstance(part, FSDPModule)]
        for part in self._sharded_modules:
            # The step divides losses by the valid tokens of all processes, so gradients are summed,
            # not averaged.
            part.set_gradient_divide_factor(1.0)
            # gloo supports only sums as reductions.
            part.set_force_sum_reduction_for_comms(True)
        return model

    @contextlib.contextmanager
    def backward_pass(self, *, last: bool) -> Iterator[None]:
        """See `Engine.backward_pass`."""
        # Until the last micro-batch of a step, gradients are accumulated without being sharded or
        # exchanged.
        for part in self._sharded_modules:
            part.set_requires_gradient_sync(last, recurse=False)
        yield

    def reshard(self) -> None:
        """See `Engine.reshard`."""
        for part in self._sharded_modules:
            part.reshard()


def shard_tensors(model: Model, mesh: DeviceMesh) -> None:
    """Shard a model's matrices over processes, in place, according to the model's
    `tensor_parallel_plan`. Afterwards, all processes must call the model with the same inputs, and
    all get the same outputs.

    Args:
        model: a model for which `unshardable` yields no reasons, with equal weights on all
            processes.
        mesh: a one-dimensional mesh of the processes.
    """
    # Imported here, because the import takes almost a second.
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        parallelize_module,
    )

    whole = Replicate()
    names = {name for name, _ in model.named_modules()}

    def style(name: str, kind: str) -> ParallelStyle:
        if kind == "inputs":
            # The module's first input is converted to a DTensor only once for all of the module's
            # matrices. In the backward pass, the gradients of this input are then added up locally,
            # and a single all-reduce sums them over the processes.
            count = len(
                inspect.signature(model.get_submodule(name.replace("*", "0")).forward).parameters
            )
            layouts = (whole, *(None,) * (count - 1))
            return PrepareModuleInput(input_layouts=layouts, desired_input_layouts=layouts)
        return {
            # Each process looks up the tokens in its part of the vocabulary. The rows of all other
            # tokens are zero, and an all-reduce sums the rows.
            "table": RowwiseParallel(input_layouts=whole),
            # These two styles are used for pairs of matrices, such as the projections of an MLP.
            # Each process computes a part of the first matrix's outputs and multiplies it by its
            # part of the second matrix. A single all-reduce sums the products.
            "columns": ColwiseParallel(),
            "rows": RowwiseParallel(),
            # Each process computes the logits of a part of the vocabulary. The logits are gathered,
            # because the loss requires all of them.
            "head": ColwiseParallel(output_layouts=whole),
        }[kind]

    # The plan may name modules that this model does not have, such as the gate of an MLP.
    plan = {
        name: style(name, kind)
        for name, kind in model.tensor_parallel_plan.items()
        if name.replace("*", "0") in names
    }
    # With `src_data_rank=None`, torch does not send the weights, which every process already has.
    parallelize_module(model, mesh, plan, src_data_rank=None)
    for name, module in model.named_modules():
        if isinstance(module, RMSNorm | nn.LayerNorm):
            _keep_whole(module, mesh, sees_own_heads=name.endswith(("q_norm", "k_norm")))
    # torch creates new parameters for each module of the plan, so a tied weight has become two
    # separate parameters. Tie these parameters again.
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.embedding.weight
    # Each process computes only its own attention heads, so its key-value cache contains only these
    # heads.
    model.make_cache = functools.partial(_cache_for_own_heads, model, mesh.size())  # type: ignore[method-assign]


def _keep_whole(norm: RMSNorm | nn.LayerNorm, mesh: DeviceMesh, *, sees_own_heads: bool) -> None:
    """Keep the full parameters of a norm on all processes.

    The parameters become replicated DTensors, so that the optimizer and the gradient norm only have
    to handle DTensors. The norm itself computes with plain tensors.

    Args:
        norm: the norm, changed in place.
        mesh: a one-dimensional mesh of the processes.
        sees_own_heads: True for the norms of queries and keys. These norms are applied only to the
            attention heads of this process.
    """
    from torch.distributed.tensor import Partial, Replicate, distribute_tensor

    for name, before in list(norm.named_parameters()):
        # With `src_data_rank=None`, torch does not send the values, which are already the same on
        # all processes.
        whole = distribute_tensor(before.detach(), mesh, [Replicate()], src_data_rank=None)
        setattr(norm, name, nn.Parameter(whole, before.requires_grad))
    # Each process applies the weight only to the queries and keys of its own heads, so the weight's
    # gradient must be summed over the processes.
    placement = Partial() if sees_own_heads else Replicate()
    norm.forward = functools.partial(_norm_with_plain_parameters, norm, placement)  # type: ignore[method-assign]


def _norm_with_plain_parameters(norm: RMSNorm | nn.LayerNorm, gradient: Any, x: Tensor) -> Tensor:
    """Run the forward function of a norm whose parameters are replicated DTensors.

    Args:
        norm: the norm.
        gradient: placement of the parameters' gradients, `Partial` or `Replicate`.
        x: a plain tensor, normalised over its last dimension.
    """
    from torch.distributed.tensor import Replicate

    plain = {}
    for name, parameter in norm.named_parameters():
        whole = cast("DTensor", parameter)
        # `redistribute` does nothing in the forward pass. In the backward pass, it sums the partial
        # gradients of the processes. torch 2.11 rejects this call in inference mode.
        if torch.is_grad_enabled():
            whole = whole.redistribute(placements=[Replicate()])
        plain[name] = whole.to_local(grad_placements=[gradient])
    # Call the class's `forward` with an object that has the module's settings but plain parameters.
    return type(norm).forward(cast(Any, SimpleNamespace(**vars(norm), **plain)), x)


def _cache_for_own_heads(
    model: Model, size: int, batch_size: int, max_tokens: int, dtype: torch.dtype
) -> KVCache:
    """Create a key-value cache for the attention heads of a single process, if `size` processes
    share the heads. See `LanguageModel.make_cache`.
    """
    config = model.config
    return KVCache(
        config.num_hidden_layers,
        config.num_key_value_heads // size,
        config.head_dim,
        batch_size=batch_size,
        max_tokens=max_tokens,
        dtype=dtype,
        device=model.embedding.weight.device,
    )

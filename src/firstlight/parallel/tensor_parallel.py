"""Tensor parallelism: several processes compute each layer of a Llama together, each with its own
heads and its own part of the MLP (Shoeybi et al. 2019, Megatron-LM). Put around a plain model,
with torch's plans for modules and DTensors for what is cut.

Every process computes on the same rows. What lies between the cut matrices (the residual stream,
norms, logits, loss) is whole on each.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from firstlight.models import Model, ModelConfig, families_with
from firstlight.models.cache import KVCache
from firstlight.models.llama import RMSNorm

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ParallelStyle


def uncuttable(config: ModelConfig, size: int) -> Iterator[str]:
    """Why a model can't be cut over so many processes, each reason a sentence."""
    if not config.tensor_parallel_sizes:
        yield (
            "distributed.tensor_parallel cuts "
            f"{families_with(lambda family: family.tensor_parallel_sizes)}, and the model is "
            f"{config.model_type}: set it to 1, and distributed.engine to fsdp"
        )
    for name in config.tensor_parallel_sizes:
        count = getattr(config, name)
        if count % size:
            most = max(n for n in range(1, size) if count % n == 0)
            yield (
                f"model.{name} {count} can't be divided by distributed.tensor_parallel {size}: "
                f"set that to {most}"
            )


def cut_tensors(model: Model, mesh: DeviceMesh) -> None:
    """Cut a model over processes, in place; its forward pass is then to be called on all of them
    with the same inputs, and gives the same outputs.

    Args:
        model: one that `uncuttable` has nothing against, with the same weights on all.
        mesh: the processes, in one dimension.
    """
    # Only here: importing them takes most of a second.
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        parallelize_module,
    )

    whole = Replicate()

    def style(name: str, kind: str) -> ParallelStyle:
        if kind == "inputs":
            # The first input becomes a DTensor once for several matrices: their gradients are added
            # up before they are sent.
            count = len(
                inspect.signature(model.get_submodule(name.replace("*", "0")).forward).parameters
            )
            layouts = (whole, *(None,) * (count - 1))
            return PrepareModuleInput(input_layouts=layouts, desired_input_layouts=layouts)
        return {
            "table": RowwiseParallel(input_layouts=whole),
            "columns": ColwiseParallel(),
            "rows": RowwiseParallel(),
            "head": ColwiseParallel(output_layouts=whole),
        }[kind]

    plan = {name: style(name, kind) for name, kind in model.tensor_parallel_plan.items()}
    # Every process has the weights already: nothing is sent.
    parallelize_module(model, mesh, plan, src_data_rank=None)
    for name, module in model.named_modules():
        if isinstance(module, RMSNorm):
            _keep_whole(module, mesh, sees_own_heads=name.endswith(("q_norm", "k_norm")))
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.embedding.weight
    model.make_cache = functools.partial(_cache_of_own_heads, model, mesh.size())  # type: ignore[method-assign]


def _keep_whole(norm: RMSNorm, mesh: DeviceMesh, *, sees_own_heads: bool) -> None:
    """Have the weight of a norm whole on all processes.

    It is a DTensor too, so that optimizer and gradient norm meet one kind of tensor only; it
    computes as a plain one.
    """
    from torch.distributed.tensor import Partial, Replicate, distribute_tensor

    before = norm.weight
    weight = distribute_tensor(before.detach(), mesh, [Replicate()], src_data_rank=None)
    norm.weight = nn.Parameter(weight, before.requires_grad)
    placement = Partial() if sees_own_heads else Replicate()
    norm.forward = functools.partial(_norm_with_plain_weight, norm, placement)  # type: ignore[method-assign]


def _norm_with_plain_weight(norm: RMSNorm, gradient: Any, x: Tensor) -> Tensor:
    from torch.distributed.tensor import Replicate

    weight = cast("DTensor", norm.weight)
    # Nothing is sent here; backwards, gradients of different heads are added up.
    weight = weight.redistribute(placements=[Replicate()])
    plain = SimpleNamespace(weight=weight.to_local(grad_placements=[gradient]), eps=norm.eps)
    return RMSNorm.forward(cast(RMSNorm, plain), x)


def _cache_of_own_heads(
    model: Model, size: int, batch_size: int, max_tokens: int, dtype: torch.dtype
) -> KVCache:
    """The model's `make_cache` for the key-value heads of one of `size` processes."""
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

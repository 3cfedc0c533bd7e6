"""Methods that trade time for the memory of activations."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

# Imported for their operators, which `_KEPT` names; that of MoE is there with the models.
import firstlight.lora.quantized
import firstlight.models.blockwise  # noqa: F401
from firstlight.models import Model

_aten = torch.ops.aten

#: What "selective" keeps: these cost most to compute again (Korthikanti et al. 2022; torchtitan).
_KEPT = [
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_mm.default,
    torch.ops.firstlight.blockwise_attention.default,
    torch.ops.firstlight.grouped_linear.default,
    torch.ops.firstlight.nf4_linear.default,
]

#: Smaller tensors stay where they are: moving them costs more than it frees.
_OFFLOADED_ELEMENTS = 1024


def checkpoint_layers(model: Model, selective: bool) -> None:
    """Let the backward pass compute every layer's activations again (Chen et al. 2016), the
    matrix products' and attention's excepted where `selective`.

    Random numbers are put back for that, so that dropout repeats itself; the result is the same
    to the last bit.
    """
    for layer in model.layers:
        layer.forward = functools.partial(_recomputed, layer, layer.forward, selective)


def _recomputed(
    layer: nn.Module, forward: Callable[..., Any], selective: bool, *arguments: Any
) -> Any:
    if not (layer.training and torch.is_grad_enabled()):
        return forward(*arguments)
    if not selective:
        return checkpoint(forward, *arguments, use_reentrant=False)
    contexts = functools.partial(create_selective_checkpoint_contexts, _KEPT)
    return checkpoint(forward, *arguments, use_reentrant=False, context_fn=contexts)


def offloaded_activations(model: nn.Module) -> contextlib.AbstractContextManager[object]:
    """A context: what the forward pass inside keeps for the backward pass lies in the CPU's
    memory, page-locked beside a GPU, until that needs it. Parameters stay where they are.

    The copies are in the order of the GPU's work, so nothing is read before it is written.
    """
    weights = (*model.parameters(), *model.buffers())
    parameters = {weight.untyped_storage().data_ptr() for weight in weights}

    def pack(tensor: Tensor) -> tuple[torch.device, Tensor]:
        is_parameter = tensor.untyped_storage().data_ptr() in parameters
        if is_parameter or tensor.numel() < _OFFLOADED_ELEMENTS:
            return tensor.device, tensor
        kept = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        return tensor.device, kept.copy_(tensor, non_blocking=tensor.is_cuda)

    def unpack(packed: tuple[torch.device, Tensor]) -> Tensor:
        device, tensor = packed
        return tensor.to(device, non_blocking=True)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

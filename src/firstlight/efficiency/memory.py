"""Memory of a training step: activations that are recomputed or offloaded, and the C library's
heap, kept between steps."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

# Imported for their operators, which `_KEPT` names; that of MoE is there with the models.
import firstlight.lora.quantized
import firstlight.models.blockwise  # noqa: F401
from firstlight.hardware.device import Hardware
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


# The C library's heap

#: From malloc.h; the values are 32-bit integers.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3


#: Largest allocation, in bytes, that is kept when freed: of a plain and of a sharded model.
_LIMIT, _LIMIT_SHARDED = 1 << 30, 4 << 20


def keep_memory(hardware: Hardware, *, sharded: bool = False) -> bool:
    """On a CPU with glibc: let the process keep the memory that it frees, instead of giving it
    back and taking it anew, page by page, in every step.

    A step makes and frees the same large tensors as the one before. glibc maps each from the
    system and unmaps it again, which was a third of the time of a step. For the rest of the
    process; returns whether it was done.

    Args:
        hardware: hardware of the process.
        sharded: True gives larger tensors back, for a model that is sharded over processes. Its
            gathered layers and gradients come in many sizes between the activations: kept, they
            leave holes that fit nothing else (measured: a GiB of holes beside 0.8 GiB in use, so
            that fsdp took more memory than ddp).
    """
    if hardware.device.type != "cpu" or sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library
        return False
    limit = _LIMIT_SHARDED if sharded else _LIMIT
    # An old glibc takes no more than 32 MiB. Set first: the others alone would make it worse.
    if not (mallopt(_MMAP_THRESHOLD, limit) or mallopt(_MMAP_THRESHOLD, 32 << 20)):
        return False
    taken = [bool(mallopt(_TRIM_THRESHOLD, 2**31 - 1)), bool(mallopt(_TOP_PAD, 64 << 20))]
    return all(taken)


def give_back_unused(hardware: Hardware) -> None:
    """On a CPU with glibc: return the pages that hold nothing to the system.

    For the moment when a run has been set up and compiled: what that took is scattered over the
    heap, and would stay resident beside all that the steps need.
    """
    if hardware.device.type != "cpu" or sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)

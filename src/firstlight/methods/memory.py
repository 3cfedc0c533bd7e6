"""Methods that reduce the memory use of a training step. Activations can be recomputed or
offloaded, and the head and the cross-entropy can be computed in chunks of tokens. This module also
configures the heap of the C library.

Shape letters are defined in `models/ops.py`. In addition, N is B x T, and n is the number of tokens
in a chunk.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import inspect
import sys
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

# These imports register operators listed in `_KEPT`. `firstlight.models` registers the operators
# for experts.
import firstlight.lora.quantized
import firstlight.models.blockwise  # noqa: F401
from firstlight.errors import ConfigError
from firstlight.hardware.device import Hardware
from firstlight.models import Model
from firstlight.models.ops import (
    IGNORE_INDEX,
    HeadLoss,
    cross_entropy_sum,
    product_dtype,
    soft_capped,
)

_aten = torch.ops.aten

#: Operators whose results are kept with "selective", because recomputing them would take the most
#: time (Korthikanti et al. 2022; torchtitan).
_KEPT = {
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
}

#: Index of the dropout probability among the arguments of attention on a GPU.
_DROPOUT_AT = {
    _aten._scaled_dot_product_flash_attention.default: 3,
    _aten._scaled_dot_product_efficient_attention.default: 5,
    _aten._scaled_dot_product_cudnn_attention.default: 5,
}

#: Minimum number of elements that a tensor must have to be offloaded. Offloading smaller tensors
#: takes time but saves little memory.
_OFFLOADED_ELEMENTS = 1024


#: Arguments that prevent tensors saved by selective checkpointing from being offloaded. torch added
#: this option in version 2.14. Earlier versions never offload these tensors.
_CHOICE: dict[str, Any] = (
    {"respect_saved_tensors_hooks": False}
    if "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters
    else {}
)


def checkpoint_layers(model: Model, selective: bool) -> None:
    """Change a model so that its backward pass recomputes the activations of every layer instead of
    storing them (Chen et al. 2016, arXiv 1604.06174).

    The random state is restored for the recomputation, so that dropout drops the same values. The
    gradients are bit-identical to the gradients without recomputation.

    Args:
        model: plain model to modify in place.
        selective: True to keep the results of matrix products and attention (see `keeps_result`).
    """
    for layer in model.layers:
        layer.forward = functools.partial(_recomputed, layer, layer.forward, selective)


def _recomputed(
    layer: nn.Module, forward: Callable[..., Any], selective: bool, *arguments: Any
) -> Any:
    # In evaluation and generation, there is no backward pass, so no activations are kept.
    if not (layer.training and torch.is_grad_enabled()):
        return forward(*arguments)
    # Reentrant checkpoints do not compute gradients if none of the inputs requires a gradient, for
    # example after frozen layers.
    if not selective:
        return checkpoint(forward, *arguments, use_reentrant=False)
    contexts = functools.partial(create_selective_checkpoint_contexts, keeps_result)
    return checkpoint(forward, *arguments, use_reentrant=False, context_fn=contexts, **_CHOICE)


def keeps_result(_: object, operator: Any, *arguments: Any, **named: Any) -> CheckpointPolicy:
    """Return True if selective checkpointing keeps the result of an operator.

    Attention with dropout is recomputed. If its result were kept, the recomputation would not draw
    random numbers for attention, and later dropout layers would draw different numbers than in the
    forward pass.
    """
    place = _DROPOUT_AT.get(operator, len(arguments))
    drops = bool(named.get("dropout_p")) or (place < len(arguments) and bool(arguments[place]))
    is_kept = operator in _KEPT and not drops
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def offloaded_activations(model: nn.Module) -> contextlib.AbstractContextManager[object]:
    """Return a context manager that stores the activations of a forward pass in CPU memory until
    the backward pass needs them. If there is a GPU, the CPU memory is page-locked. Parameters and
    buffers are not moved. On a GPU, activations are copied in parallel with the computation (see
    `_Copies`).
    """
    # Parameters are recognised by their storage, because autograd also saves views of parameters,
    # such as a transposed weight.
    weights = (*model.parameters(), *model.buffers())
    parameters = {weight.untyped_storage().data_ptr() for weight in weights}

    def pack(tensor: Tensor) -> tuple[torch.device, Tensor] | _Activation:
        is_parameter = tensor.untyped_storage().data_ptr() in parameters
        if is_parameter or tensor.numel() < _OFFLOADED_ELEMENTS:
            return tensor.device, tensor
        if tensor.is_cuda:
            return _copies(tensor.device).take(tensor)
        return tensor.device, torch.empty_like(tensor, device="cpu").copy_(tensor)

    def unpack(packed: tuple[torch.device, Tensor] | _Activation) -> Tensor:
        if isinstance(packed, _Activation):
            return _copies(packed.device).bring_back(packed)
        device, tensor = packed
        return tensor.to(device, non_blocking=True)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


#: Number of activations copied in parallel with the computation, in each direction. With a single
#: copy, the activation of one checkpointed layer can already be copied while the next layer is
#: computed. With two copies, the planned memory for full fine-tuning of Llama 3.2 3B would be 1.3
#: GiB larger.
COPIES_BESIDE = 1

#: A tensor on the GPU, and the event that marks the end of its copy.
_Copy = tuple[Tensor, torch.cuda.Event]


@dataclass(eq=False)
class _Activation:
    """A GPU activation stored in page-locked host memory.

    Attributes:
        kept: copy of the activation in host memory.
        device: GPU of the activation.
        before: function that returns the activation saved just before this one. The backward pass
            needs that activation next. The function returns None if the activation has been freed.
        back: tensor on the GPU to which the activation is copied back. It is None until this copy
            starts, and again after the backward pass has used the tensor.
        is_back: True if the backward pass has used the tensor on the GPU.
    """

    kept: Tensor
    device: torch.device
    before: Callable[[], _Activation | None]
    back: _Copy | None = None
    is_back: bool = False


class _Copies:
    """Copies of activations from a GPU to page-locked memory and back, on a separate stream.

    All GPU tensors are allocated on the stream of the computation. Before a tensor is freed, the
    computation's stream waits until the tensor has been copied, so that its memory is not reused
    too early. `Tensor.record_stream` is not used, because memory would then be freed only after the
    host has noticed the end of a copy. A host that runs ahead of the GPU would allocate additional
    memory for each layer.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        #: Copies to the host, and copies to the GPU, in the order in which they were started.
        self._leaving: deque[_Copy] = deque()
        self._arriving: deque[_Copy] = deque()
        self._last: Callable[[], _Activation | None] = lambda: None

    def take(self, tensor: Tensor) -> _Activation:
        """Start the copy of an activation to page-locked memory."""
        # The tensor is made contiguous on the GPU first. A non-contiguous tensor, such as a view of
        # a fused product for q, k and v, would be copied through pageable memory, and the host
        # would wait for the copy.
        dense = torch.empty_like(tensor, device="meta").stride() == tensor.stride()
        tensor = tensor.detach() if dense else tensor.detach().contiguous()
        kept = torch.empty_like(tensor, device="cpu", pin_memory=True)
        # The tensor is detached, because a pass that fails would otherwise keep its autograd graph
        # in memory until the next pass.
        self._leaving.append((tensor, self._copy(kept, tensor)))
        self._drop(self._leaving, COPIES_BESIDE)
        activation = _Activation(kept, self._device, self._last)
        self._last = weakref.ref(activation)
        return activation

    def bring_back(self, activation: _Activation) -> Tensor:
        """Return an activation as a tensor on the GPU. Also start copying the activations that the
        backward pass needs next."""
        self._drop(self._leaving, 0)
        activation.is_back = False
        following: _Activation | None = activation
        for _ in range(1 + COPIES_BESIDE):
            if following is None:
                break
            if following.back is None and not following.is_back:
                tensor = torch.empty_like(following.kept, device=self._device)
                following.back = tensor, self._copy(tensor, following.kept)
                self._arriving.append(following.back)
            following = following.before()
        assert activation.back is not None
        tensor, event = activation.back
        activation.back, activation.is_back = None, True
        # All copies are dropped after the last activation of the pass, so that they do not
        # interfere with the next pass.
        beside = COPIES_BESIDE if activation.before() else 0
        torch.cuda.current_stream(self._device).wait_event(event)
        self._drop(self._arriving, beside)
        return tensor

    def _copy(self, target: Tensor, source: Tensor) -> torch.cuda.Event:
        """Start a copy that runs after all work that the computation has queued so far. Return the
        event that marks the end of the copy."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        event: torch.cuda.Event = self._stream.record_event()
        return event

    def _drop(self, copies: deque[_Copy], most: int) -> None:
        """Discard the oldest copies, so that at most `most` copies remain."""
        while len(copies) > most:
            torch.cuda.current_stream(self._device).wait_event(copies[0][1])
            copies.popleft()


#: The copies of each GPU. They are kept after a backward pass, because they can contain a tensor
#: whose copy has started but which no operation has used yet.
_copies = functools.cache(_Copies)


# The C library's heap

#: Parameters of mallopt, as defined in malloc.h. Their values are 32-bit integers.
_TRIM_THRESHOLD = -1
_TOP_PAD = -2
_MMAP_THRESHOLD = -3


#: Maximum size, in bytes, of freed allocations whose memory is kept, for an unsharded and for a
#: sharded model.
_LIMIT, _LIMIT_SHARDED = 1 << 30, 4 << 20


def keep_memory(hardware: Hardware, *, sharded: bool = False) -> bool:
    """Configure glibc to keep freed memory. Otherwise, each step would return it to the system and
    allocate it again page by page. This applies only to processes that compute on a CPU.

    Each step allocates and frees large tensors of the same sizes as the previous step. By default,
    glibc maps and unmaps the memory of each of these tensors. In one measurement, this took a third
    of a step's time. The settings remain in effect for the rest of the process. Return True if they
    were applied.

    Args:
        hardware: hardware of the process.
        sharded: True for a model sharded over processes. In this case, the memory of large tensors
            is still returned to the system. Gathered layers and gradients have many different sizes
            and are placed between the activations. If their memory were kept, it would leave gaps
            into which no other tensor fits. In one measurement, there were 1 GiB of gaps in
            addition to 0.8 GiB in use, so that fsdp took more memory than ddp.
    """
    if hardware.device.type != "cpu" or sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library
        return False
    limit = _LIMIT_SHARDED if sharded else _LIMIT
    # Old versions of glibc accept at most 32 MiB for this parameter. It is set first, because
    # without it, the other settings would make steps slower.
    if not (mallopt(_MMAP_THRESHOLD, limit) or mallopt(_MMAP_THRESHOLD, 32 << 20)):
        return False
    taken = [bool(mallopt(_TRIM_THRESHOLD, 2**31 - 1)), bool(mallopt(_TOP_PAD, 64 << 20))]
    return all(taken)


def give_back_unused(hardware: Hardware) -> None:
    """Return the free pages of glibc's heap to the system. This applies only to processes that
    compute on a CPU.

    Call this after a run has been set up and compiled. Setup and compilation leave free memory
    scattered over the heap. Without this call, the free memory would stay resident in addition to
    the memory of the steps.
    """
    if hardware.device.type != "cpu" or sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


# The loss, computed in chunks of tokens by a custom operator, which torch.compile calls without
# tracing into it.


def chunk_loss(model: Model, chunk_tokens: int, z_loss_coef: float = 0.0) -> None:
    """Change a model so that it computes its loss for `chunk_tokens` tokens at a time. The logits
    of all tokens are then never in memory at the same time.

    The gradients of a chunk are computed directly after its logits, in the forward pass, so that no
    logits are kept and nothing is computed twice. The same idea is used in Cut Cross-Entropy
    (Wijmans et al. 2024, arXiv 2411.09009) and in Liger-Kernel's fused linear cross-entropy.

    Args:
        model: plain model to modify in place.
        chunk_tokens: number of tokens in a chunk.
        z_loss_coef: coefficient of the z-loss (see `head_loss`).

    Raises:
        ConfigError: the head is not a plain linear layer.
    """
    if type(model.lm_head) is not nn.Linear:
        raise ConfigError(
            "efficiency.loss_chunk_tokens needs a plain head, but the lora section adapts the "
            "head: remove lm_head from lora.targets and lora.trainable_token_indices, or "
            "set efficiency.loss_chunk_tokens to 0"
        )
    model.head_loss = chunked_head_loss(chunk_tokens, z_loss_coef)


def chunked_head_loss(chunk_tokens: int, z_loss_coef: float = 0.0) -> HeadLoss:
    """Return a `HeadLoss` that keeps the logits of at most `chunk_tokens` tokens in memory.
    `z_loss_coef` is described in `head_loss`."""
    return functools.partial(_chunked_head_loss, chunk_tokens, z_loss_coef)


def _chunked_head_loss(
    chunk_tokens: int,
    z_loss_coef: float,
    x_BTC: Tensor,
    head: Callable[[Tensor], Tensor],
    vocab_size: int,
    labels_BT: Tensor,
    softcap: float | None = None,
) -> Tensor:
    assert isinstance(head, nn.Linear)
    x_NC, labels_N = x_BTC.flatten(0, 1), labels_BT.flatten()
    if not torch.is_grad_enabled():  # the operator would compute unused gradients
        loss = torch.zeros((), device=x_NC.device)
        for start in range(0, len(x_NC), chunk_tokens):
            part = slice(start, start + chunk_tokens)
            logits_nV = soft_capped(head(x_NC[part])[:, :vocab_size], softcap)
            loss = loss + cross_entropy_sum(logits_nV, labels_N[part])
        return loss
    dtype = product_dtype(x_NC)
    result: tuple[Tensor, Tensor, Tensor] = _linear_cross_entropy(
        x_NC,
        head.weight,
        labels_N,
        vocab_size,
        chunk_tokens,
        dtype,
        head.weight.requires_grad,
        z_loss_coef,
        softcap or 0.0,
    )
    return result[0]


@torch.library.custom_op("firstlight::linear_cross_entropy", mutates_args=())
def _linear_cross_entropy(
    x_NC: Tensor,
    weight_VC: Tensor,
    labels_N: Tensor,
    vocab_size: int,
    chunk_tokens: int,
    dtype: torch.dtype,
    learns: bool,
    z_loss_coef: float,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the summed loss and its gradients, with matrix products in `dtype`.

    Args:
        learns: True if the weight requires a gradient.

    Returns:
        The loss [], the gradient of `x_NC`, [N, C], and the gradient of `weight_VC`, [V, C]. The
        loss and the gradient of the weight are in fp32, or in fp64 if `dtype` is fp64. The gradient
        of the weight is empty unless `learns` is True.
    """
    weight = weight_VC.to(dtype)  # round only once, for all chunks
    grad_x_NC = torch.empty_like(x_NC)
    wide = torch.promote_types(dtype, torch.float32)
    # The sum is computed in fp32, because the gradient of a chunk could be lost if the sum were
    # rounded to bf16.
    grad_weight_VC = weight_VC.new_zeros(weight_VC.shape if learns else 0, dtype=wide)
    loss = torch.zeros((), dtype=wide, device=x_NC.device)
    for start in range(0, len(x_NC), chunk_tokens):
        part = slice(start, start + chunk_tokens)
        x_nC, labels_n = x_NC[part].to(dtype), labels_N[part]
        logits_nV = x_nC @ weight.T
        if softcap:
            logits_nV.div_(softcap).tanh_()
            # This is the derivative of c tanh(z / c) with respect to z.
            slope_nV = 1 - logits_nV.square()
            logits_nV.mul_(softcap)
        # Padding rows of the vocabulary get a probability of 0, and therefore no gradient.
        logits_nV[:, vocab_size:] = float("-inf")
        grad_nV = torch.log_softmax(logits_nV, -1, dtype=loss.dtype)
        valid_n = labels_n != IGNORE_INDEX
        target_n1 = labels_n.where(valid_n, 0)[:, None]
        loss -= grad_nV.gather(1, target_n1)[:, 0].where(valid_n, 0).sum()
        if z_loss_coef:
            # Because log p = logit - z, z can be computed from a single entry of each row, without
            # an fp32 copy of the logits.
            z_n1 = logits_nV.gather(1, target_n1) - grad_nV.gather(1, target_n1)
            loss += z_loss_coef * z_n1[:, 0].square().where(valid_n, 0).sum()
        # The gradient of -log p(label) with respect to the logits is p - 1 at the label, and p
        # elsewhere.
        grad_nV.exp_()
        if z_loss_coef:
            # The gradient of z^2 is 2 z p.
            grad_nV.mul_(1 + 2 * z_loss_coef * z_n1)
        grad_nV.scatter_add_(1, target_n1, -torch.ones_like(target_n1, dtype=loss.dtype))
        if softcap:
            grad_nV.mul_(slope_nV)
        low_nV = grad_nV.to(dtype)
        # Tokens without a label do not get a gradient. Their rows are set to zero after the
        # products, because a pass over the gradient of the logits would take much longer.
        grad_x_NC[part] = (low_nV @ weight).mul_(valid_n[:, None])
        if learns:
            grad_weight_VC += low_nV.T @ (x_nC * valid_n[:, None])
    return loss, grad_x_NC, grad_weight_VC


@_linear_cross_entropy.register_fake
def _(x_NC: Tensor, weight_VC: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    _labels, _vocab_size, _chunk_tokens, dtype, learns, *_ = others
    wide = torch.promote_types(dtype, torch.float32)
    loss = torch.empty((), dtype=wide, device=x_NC.device)
    grad_weight_VC = weight_VC.new_empty(weight_VC.shape if learns else 0, dtype=wide)
    return loss, torch.empty_like(x_NC), grad_weight_VC


def _save_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output[1:])
    ctx.weight_dtype, ctx.learns = inputs[1].dtype, inputs[6]
    # By default, autograd would create a tensor of zeros for the gradient of each unused output, as
    # large as the weight.
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, grad_loss: Tensor, *_: Tensor
) -> tuple[Tensor, Tensor | None, None, None, None, None, None, None, None]:
    grad_x_NC, grad_weight_VC = ctx.saved_tensors
    return (
        # The product is computed in the precision of the loss. If the factor 1/tokens were rounded,
        # all gradients except the gradient of the head would be rescaled.
        (grad_x_NC.to(grad_loss.dtype) * grad_loss).to(grad_x_NC.dtype),
        (grad_weight_VC * grad_loss).to(ctx.weight_dtype) if ctx.learns else None,
        *(None,) * 7,
    )


_linear_cross_entropy.register_autograd(_backward, setup_context=_save_gradients)

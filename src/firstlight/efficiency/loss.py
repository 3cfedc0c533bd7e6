"""Head and cross-entropy in chunks of tokens: all logits are never in memory at once.

For each chunk the gradients are formed right after its logits, in the forward pass, so that
nothing of a chunk is kept and nothing is computed twice (the idea of Cut Cross-Entropy, Wijmans
et al. 2024, and of Liger-Kernel's fused linear cross-entropy). It is an operator of its own:
torch.compile takes it as it is.

Shape letters as in `models/ops.py`; N is B x T, n the tokens of a chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from firstlight.errors import ConfigError
from firstlight.models import Model
from firstlight.models.ops import IGNORE_INDEX, HeadLoss, cross_entropy_sum, product_dtype


def chunk_loss(model: Model, chunk_tokens: int) -> None:
    """Let the model compute its loss for `chunk_tokens` tokens at a time.

    Raises:
        ConfigError: the head is not a plain linear layer.
    """
    if type(model.lm_head) is not nn.Linear:
        raise ConfigError(
            "efficiency.loss_chunk_tokens needs a plain head, and lora.targets changes it: leave "
            "lm_head out of lora.targets, or set efficiency.loss_chunk_tokens to 0"
        )
    model.head_loss = chunked_head_loss(chunk_tokens)


def chunked_head_loss(chunk_tokens: int) -> HeadLoss:
    """A `HeadLoss` that holds `chunk_tokens` tokens' logits at most."""
    return functools.partial(_chunked_head_loss, chunk_tokens)


def _chunked_head_loss(
    chunk_tokens: int,
    x_BTC: Tensor,
    head: Callable[[Tensor], Tensor],
    vocab_size: int,
    labels_BT: Tensor,
) -> Tensor:
    assert isinstance(head, nn.Linear)
    x_NC, labels_N = x_BTC.flatten(0, 1), labels_BT.flatten()
    if not torch.is_grad_enabled():
        loss = torch.zeros((), device=x_NC.device)
        for start in range(0, len(x_NC), chunk_tokens):
            part = slice(start, start + chunk_tokens)
            loss = loss + cross_entropy_sum(head(x_NC[part])[:, :vocab_size], labels_N[part])
        return loss
    dtype = product_dtype(x_NC)
    result: tuple[Tensor, Tensor, Tensor] = _linear_cross_entropy(
        x_NC, head.weight, labels_N, vocab_size, chunk_tokens, dtype, head.weight.requires_grad
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Summed loss (fp32), and its gradients for `x_NC` and, if it `learns`, `weight_VC` (else an
    empty one); products in `dtype`."""
    weight = weight_VC.to(dtype)
    grad_x_NC = torch.empty_like(x_NC)
    wide = torch.promote_types(dtype, torch.float32)
    grad_weight_VC = weight_VC.new_zeros(weight_VC.shape if learns else 0, dtype=wide)
    loss = torch.zeros((), dtype=wide, device=x_NC.device)
    for start in range(0, len(x_NC), chunk_tokens):
        part = slice(start, start + chunk_tokens)
        x_nC, labels_n = x_NC[part].to(dtype), labels_N[part]
        logits_nV = x_nC @ weight.T
        logits_nV[:, vocab_size:] = float("-inf")
        grad_nV = torch.log_softmax(logits_nV, -1, dtype=loss.dtype)
        valid_n = labels_n != IGNORE_INDEX
        target_n1 = labels_n.where(valid_n, 0)[:, None]
        loss -= grad_nV.gather(1, target_n1)[:, 0].where(valid_n, 0).sum()
        # The gradient of -log p(label) for the logits is p - 1 at the label, p elsewhere.
        grad_nV.exp_().scatter_add_(1, target_n1, -torch.ones_like(target_n1, dtype=loss.dtype))
        grad_nV.mul_(valid_n[:, None])
        low_nV = grad_nV.to(dtype)
        grad_x_NC[part] = low_nV @ weight
        if learns:
            grad_weight_VC += low_nV.T @ x_nC
    return loss, grad_x_NC, grad_weight_VC


@_linear_cross_entropy.register_fake
def _(
    x_NC: Tensor,
    weight_VC: Tensor,
    labels_N: Tensor,
    vocab_size: int,
    chunk_tokens: int,
    dtype: torch.dtype,
    learns: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.promote_types(dtype, torch.float32)
    loss = torch.empty((), dtype=wide, device=x_NC.device)
    grad_weight_VC = weight_VC.new_empty(weight_VC.shape if learns else 0, dtype=wide)
    return loss, torch.empty_like(x_NC), grad_weight_VC


def _save_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output[1:])
    ctx.weight_dtype, ctx.learns = inputs[1].dtype, inputs[6]
    # Otherwise zeros as large as the weight would be made for the outputs nobody uses.
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, grad_loss: Tensor, *_: Tensor
) -> tuple[Tensor, Tensor | None, None, None, None, None, None]:
    grad_x_NC, grad_weight_VC = ctx.saved_tensors
    return (
        # In the loss's precision: rounded, 1/tokens would scale all gradients but the head's.
        (grad_x_NC.to(grad_loss.dtype) * grad_loss).to(grad_x_NC.dtype),
        (grad_weight_VC * grad_loss).to(ctx.weight_dtype) if ctx.learns else None,
        None,
        None,
        None,
        None,
        None,
    )


_linear_cross_entropy.register_autograd(_backward, setup_context=_save_gradients)

"""Tensor functions and the embedding module that the model families share.

Shape letters, here and in the modules of the families:

    B   batch size
    T   number of new tokens per sequence
    S   number of tokens, earlier and new, whose keys and values attention reads
    H   number of query heads
    K   number of key-value heads
    D   head dimension
    C   hidden size
    V   vocabulary size
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

#: Label of tokens excluded from the loss, as in `torch.nn.functional.cross_entropy`.
IGNORE_INDEX = -100


def product_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype to which a matrix product should cast `x` [...]: autocast's dtype on the
    device of `x` if autocast is enabled, otherwise the dtype of `x`.

    Custom operators need this function, because autocast does not cast their inputs.
    """
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def at_least_fp32(x: Tensor) -> Tensor:
    """Cast `x` [...] to fp32 for sums that need this precision. fp64 tensors are returned
    unchanged."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def soft_capped(x: Tensor, bound: float | None) -> Tensor:
    """Return c tanh(x / c) for scores or logits `x` [...], where c is `bound`. If `bound` is None,
    return `x` itself."""
    return x if bound is None else bound * torch.tanh(x / bound)


class AttentionOptions(NamedTuple):
    """Arguments of attention other than queries, keys and values.

    Attributes:
        mask: result of the model's `make_mask`, used instead of the causal mask; None for the
            causal mask.
        dropout: probability of dropping an attention weight.
        scale: factor by which the scores are multiplied; None for 1 / sqrt(D).
        softcap: soft cap c of the scores s, which become c tanh(s / c) before masking; None for no
            cap. Kernels that do not support a soft cap require None.
        sinks: attention sinks [H], in fp32 or a narrower dtype; None for no sinks. A sink is an
            additional logit in the softmax of a head. It does not have a value vector. See Xiao et
            al. 2023 (arXiv 2309.17453) and gpt-oss. Kernels that do not support sinks require None.
    """

    mask: Any = None
    dropout: float = 0.0
    scale: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


#: Options for plain causal attention.
CAUSAL = AttentionOptions()


class AttentionFunction(Protocol):
    """Interface of functions that compute causal attention, [B, H, T, D], for T new tokens. With
    the causal mask, new token t (counted from 0) attends to the first S - T + t + 1 of all S
    tokens.

    Args:
        q_BHTD: queries of the new tokens.
        k_BKSD, v_BKSD: keys and values of all tokens. Each of the K heads is shared by H / K
            neighbouring query heads.
        options: mask, dropout, scale, soft cap and sinks.
    """

    def __call__(
        self, q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, options: AttentionOptions, /
    ) -> Tensor: ...


class SelfAttention(nn.Module):
    """Base class of the attention layers of all families.

    Attributes:
        attend: function that computes attention, which efficiency methods replace.
    """

    attend: AttentionFunction


def attention(
    q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, options: AttentionOptions = CAUSAL
) -> Tensor:
    """Compute causal attention [B, H, T, D] with torch's `scaled_dot_product_attention`, which
    selects one of torch's fused kernels.

    See `AttentionFunction` for the arguments. A mask is bool [T, S] or [B, 1, T, S], and it is true
    for the keys that a query attends to. Soft caps and sinks are not supported.
    """
    assert options.softcap is None, "torch's fused kernels do not support a soft cap"
    assert options.sinks is None, "torch's fused kernels do not support sinks"
    new, total = q_BHTD.shape[-2], k_BKSD.shape[-2]
    # With `is_causal`, torch lets the first query attend only to the first key, which is correct
    # only if T equals S.
    if options.mask is None and 1 < new < total:
        options = options._replace(mask=causal_mask(new, total, q_BHTD.device))
    if q_BHTD.is_cuda and q_BHTD.shape[1] != k_BKSD.shape[1]:
        return _grouped_attention(q_BHTD, k_BKSD, v_BKSD, options)
    return _fused_attention(q_BHTD, k_BKSD, v_BKSD, options, is_causal=new > 1)


def _fused_attention(
    q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, options: AttentionOptions, *, is_causal: bool
) -> Tensor:
    return F.scaled_dot_product_attention(
        q_BHTD,
        k_BKSD,
        v_BKSD,
        attn_mask=options.mask,
        dropout_p=options.dropout,
        is_causal=is_causal and options.mask is None,
        scale=options.scale,
        enable_gqa=q_BHTD.shape[1] != k_BKSD.shape[1],
    )


def _grouped_attention(
    q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, options: AttentionOptions
) -> Tensor:
    """Compute `attention` for grouped queries on a GPU with a kernel that does not store all T x S
    scores.

    If none of these kernels supports grouped queries, keys and values are repeated for each query
    head, because torch would otherwise fall back to its "math" kernel.
    """
    if q_BHTD.shape[2] == 1:
        # The G queries of a group attend to the same keys, so they are treated as G queries of one
        # head.
        q_BKGD = q_BHTD.reshape(len(q_BHTD), k_BKSD.shape[1], -1, q_BHTD.shape[3])
        out_BKGD = _fused_attention(q_BKGD, k_BKSD, v_BKSD, options, is_causal=False)
        return out_BKGD.flatten(1, 2).unsqueeze(2)
    if not _takes_groups(q_BHTD, options):
        k_BKSD, v_BKSD = (for_each_query_head(x, q_BHTD.shape[1]) for x in (k_BKSD, v_BKSD))
    return _fused_attention(q_BHTD, k_BKSD, v_BKSD, options, is_causal=True)


#: True if cuDNN's attention has the lowest priority. The environment variable is read only once, as
#: in torch.
_CUDNN_IS_LAST = os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1"


def _takes_groups(q_BHTD: Tensor, options: AttentionOptions) -> bool:
    """Return True if torch selects a kernel that supports grouped queries for these inputs: flash
    attention or, with a mask, cuDNN's attention (see `select_sdp_backend` in torch's
    sdp_utils.cpp). The memory-efficient kernel also supports grouped queries since torch 2.14, but
    this has not been tested on GPUs."""
    gpu, size = torch.cuda.get_device_properties(q_BHTD.device), q_BHTD.shape[-1]
    if product_dtype(q_BHTD) not in (torch.float16, torch.bfloat16) or gpu.major < 8:
        return False
    has_flash, has_cudnn = _enabled_kernels()
    # On GPUs with less shared memory per multiprocessor than the A100 and H100, flash attention
    # does not support the backward pass for large heads.
    has_less = (8, 6) <= (gpu.major, gpu.minor) <= (8, 9) or gpu.major == 12
    no_backward = has_less and (192 < size <= 224 or (size > 224 and options.dropout > 0))
    learns = torch.is_grad_enabled() and q_BHTD.requires_grad
    if options.mask is None and size <= 256 and has_flash and not (learns and no_backward):
        return True
    # cuDNN's kernel requires cuDNN 9.15.1 or later, which torch's wheels for CUDA 13 include. The
    # cuDNN version itself is not checked, because torch.compile can't trace a call that returns it.
    cuda_version = int((torch.version.cuda or "0").partition(".")[0])
    prefers_cudnn = gpu.major in (9, 10) and cuda_version >= 13 and not _CUDNN_IS_LAST
    fits = size <= 128 and size % 8 == 0 and not options.dropout
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    return prefers_cudnn and has_cudnn and fits and not is_deterministic


def _enabled_kernels() -> tuple[bool, bool]:
    """Return whether flash attention and cuDNN's attention are enabled in torch."""
    cuda: Any = torch.backends.cuda
    return cuda.flash_sdp_enabled(), cuda.cudnn_sdp_enabled()


def ready_to_compile() -> None:
    """Make torch.compile treat the result of `_enabled_kernels`, which it can't trace, as a
    constant.

    A decorator is not used, because it would import torch's compiler. The import takes a second,
    and most programs do not use the compiler.
    """
    torch.compiler.assume_constant_result(_enabled_kernels)  # type: ignore[no-untyped-call]


def plain_attention(
    q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, options: AttentionOptions = CAUSAL
) -> Tensor:
    """Compute causal attention [B, H, T, D] with the plain formula (Vaswani et al. 2017, arXiv
    1706.03762). It consists of a matrix product, a softmax in fp32 and a second matrix product. All
    T x S scores are in memory at once.

    See `attention` for the arguments. Soft caps and sinks are supported.
    """
    mask, dropout, scale, softcap, sinks_H = options
    k_BKSD, v_BKSD = (for_each_query_head(x, q_BHTD.shape[1]) for x in (k_BKSD, v_BKSD))
    if mask is None:
        mask = causal_mask(q_BHTD.shape[-2], k_BKSD.shape[-2], q_BHTD.device)
    # The queries are scaled instead of the scores, because they have fewer elements, and because
    # this keeps fp16 scores in range.
    q_BHTD = q_BHTD / math.sqrt(q_BHTD.shape[-1]) if scale is None else q_BHTD * scale
    scores = soft_capped(at_least_fp32(q_BHTD @ k_BKSD.transpose(-2, -1)), softcap)
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks_H is None:
        weights = scores.softmax(-1)
    else:
        # The sinks are an extra column of the softmax. The column is removed here, because a sink
        # has no value vector.
        sinks = sinks_H.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
    # Weights are rounded to the values' dtype after the softmax, as in fused kernels.
    return F.dropout(weights.to(v_BKSD.dtype), dropout) @ v_BKSD


def for_each_query_head(x_BKSD: Tensor, heads: int) -> Tensor:
    """Repeat the keys or values of grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245)
    for each query head. The result has the shape [B, H, S, D], where H is `heads`."""
    groups = heads // x_BKSD.shape[1]
    # Neighbouring query heads share a key-value head, as Hugging Face's weights require.
    return x_BKSD if groups == 1 else x_BKSD.repeat_interleave(groups, 1)


def causal_mask(new: int, total: int, device: torch.device) -> Tensor:
    """Return a causal mask, bool [T, S], that is true for the keys that each of the last `new` of
    `total` tokens attends to."""
    return torch.ones(new, total, dtype=torch.bool, device=device).tril(total - new)


def document_positions(document_ids_BT: Tensor) -> Tensor:
    """Return the position of each token in its document, counted from 0, int64 [B, T]."""
    positions_T = torch.arange(document_ids_BT.shape[1], device=document_ids_BT.device)
    begins_BT = torch.ones_like(document_ids_BT, dtype=torch.bool)
    begins_BT[:, 1:] = document_ids_BT[:, 1:] != document_ids_BT[:, :-1]
    # Start positions increase along a row, so the running maximum is the position at which the
    # token's document begins.
    return positions_T - (positions_T * begins_BT).cummax(1).values


class MaskFunction(Protocol):
    """Interface of functions that make `AttentionOptions.mask`. See `dense_mask` for the
    arguments."""

    def __call__(
        self,
        positions: Tensor,
        total: int,
        window: int | None,
        document_ids_BT: Tensor | None,
    ) -> Any: ...


def dense_mask(
    positions: Tensor, total: int, window: int | None, document_ids_BT: Tensor | None
) -> Tensor | None:
    """Return a mask that is true for the keys that each query attends to. Return None if the mask
    would be equal to the causal mask. The mask is bool [T, S], or [B, 1, T, S] if there are several
    documents or if positions differ between sequences.

    Args:
        positions: positions of the queries in their sequences, int64 [T] or [B, T].
        total: number of keys, S. Their positions are counted from 0.
        window: number of tokens that a query attends to, including its own token; None for all
            earlier tokens.
        document_ids_BT: id of each token's document, or None for a single document. A query attends
            only to keys of its own document. Supported only without a cache, where T equals S.
    """
    if positions.dim() == 2:
        assert document_ids_BT is None
        distance_BTS = positions[..., None] - torch.arange(total, device=positions.device)
        seen_BTS = distance_BTS >= 0
        if window is not None:
            seen_BTS &= distance_BTS < window
        return seen_BTS[:, None]  # for all heads
    mask = sliding_window_mask(positions, total, window)
    if document_ids_BT is None:
        return mask
    # Each document is a contiguous part of its sequence and has a unique id.
    same_BTS = document_ids_BT[:, :, None] == document_ids_BT[:, None, :]
    if mask is None:
        mask = causal_mask(len(positions), total, positions.device)
    return (same_BTS & mask)[:, None]  # [B, 1, T, S]: the same mask for all heads


class Embedding(nn.Embedding):
    """torch's embedding without its default initialisation, which is not needed because weights are
    set by `init_weights` or loaded from a file.

    On the meta device, the default initialisation would also import torch's compiler, which takes
    about a second and 50 MB in every process that loads a model.
    """

    def reset_parameters(self) -> None:
        """Do nothing."""


def sliding_window_mask(positions_T: Tensor, total: int, window: int | None) -> Tensor | None:
    """Return a mask, bool [T, S], that is true for the keys that each query attends to. Return None
    if the window does not hide any keys.

    Args:
        positions_T: positions of the queries, int64.
        total: number of keys, S. Their positions are counted from 0.
        window: number of tokens that a query attends to, including its own token; None for all
            earlier tokens.
    """
    if window is None or total <= window:
        return None
    keys_S = torch.arange(total, device=positions_T.device)
    distance_TS = positions_T[:, None] - keys_S
    return (distance_TS >= 0) & (distance_TS < window)


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum the cross-entropy over the labels that are not -100, in nats, fp32 [].

    The result is a sum, which the caller divides by the number of valid labels in the global batch.
    Gradient accumulation then results in the same gradient as one large batch.

    Args:
        logits: logits of each token, [..., V].
        labels: label of each token, int64 [...].
    """
    return F.cross_entropy(
        at_least_fp32(logits).flatten(0, -2),
        labels.flatten(),
        ignore_index=IGNORE_INDEX,
        reduction="sum",
    )


class HeadLoss(Protocol):
    """Interface of functions that apply the head and compute the summed loss []. See `head_loss`
    for the arguments."""

    def __call__(
        self,
        x_BTC: Tensor,
        head: Callable[[Tensor], Tensor],
        vocab_size: int,
        labels_BT: Tensor,
        softcap: float | None = None,
        /,
    ) -> Tensor: ...


def z_loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Compute the z-loss (Chowdhery et al. 2022, PaLM, arXiv 2204.02311, section 5): the sum of
    logsumexp(logits)^2 over all tokens whose label is not -100, fp32 [].

    The cross-entropy does not change if a constant is added to all logits of a token. The z-loss
    keeps this constant close to zero.

    Args:
        logits: logits of each token, [..., V].
        labels: label of each token, int64 [...].
    """
    return at_least_fp32(logits).logsumexp(-1).square().where(labels != IGNORE_INDEX, 0).sum()


def logits_without_padding(
    x_BTC: Tensor,
    head: Callable[[Tensor], Tensor],
    vocab_size: int,
    softcap: float | None = None,
) -> Tensor:
    """Compute the soft-capped logits, and exclude the padding rows of the head, which would
    otherwise receive some of the probability.

    Args:
        x_BTC: output of the last layer after the final norm.
        head: function that computes the logits [B, T, V or more].
        vocab_size: vocabulary size, V.
        softcap: soft cap of the logits (see `soft_capped`); None for no cap.

    Returns:
        Logits [B, T, V]. In code compiled for a GPU, the shape is [B, T, V or more], and the logits
        of padding rows are -inf.
    """
    # Compiled code keeps the padding, because the kernels that torch.compile generates for GPUs
    # read rows of odd length one element at a time.
    keeps_rows = _is_compiled_for_gpu(x_BTC)
    if keeps_rows and softcap is None and _is_plain(head) and head.out_features > vocab_size:
        # Adding a bias in the matrix product takes no extra time, unlike masking the logits.
        bias_V = head.weight.new_zeros(head.out_features)
        return F.linear(x_BTC, head.weight, _without_padding(bias_V, vocab_size))
    logits = head(x_BTC)
    if not keeps_rows or logits.shape[-1] == vocab_size:
        return soft_capped(logits[..., :vocab_size], softcap)
    return _without_padding(soft_capped(logits, softcap), vocab_size)


def _without_padding(x: Tensor, vocab_size: int) -> Tensor:
    """Set the elements of `x` [..., V or more] whose last index is V or greater to -inf."""
    is_padding_V = torch.arange(x.shape[-1], device=x.device) >= vocab_size
    return x.masked_fill(is_padding_V, float("-inf"))


def _is_plain(head: object) -> TypeGuard[nn.Linear]:
    """Return True if a head is a linear layer without a bias whose call computes only a matrix
    product.

    The result is False with LoRA, which changes the class of the head, and with tensor parallelism,
    which adds hooks to the head.
    """
    if type(head) is not nn.Linear:
        return False
    return not (
        head._parameters["bias"] is not None or head._forward_pre_hooks or head._forward_hooks
    )


def _is_compiled_for_gpu(x: Tensor) -> bool:
    return torch.compiler.is_compiling() and x.is_cuda


def head_loss(
    x_BTC: Tensor,
    head: Callable[[Tensor], Tensor],
    vocab_size: int,
    labels_BT: Tensor,
    softcap: float | None = None,
    *,
    z_loss_coef: float = 0.0,
) -> Tensor:
    """Compute all logits at once, and sum their cross-entropy over the labels that are not -100,
    fp32 [].

    Args:
        x_BTC: output of the last layer after the final norm.
        head: function that computes the logits [B, T, V or more].
        vocab_size: vocabulary size, V. Logits beyond it are padding.
        labels_BT: labels, int64 [B, T].
        softcap: soft cap of the logits (see `soft_capped`); None for no cap.
        z_loss_coef: coefficient of `z_loss_sum`. The z-loss is added only if gradients are enabled,
            so that the loss in evaluation is the cross-entropy alone.
    """
    logits = logits_without_padding(x_BTC, head, vocab_size, softcap)
    loss = cross_entropy_sum(logits, labels_BT)
    if z_loss_coef and torch.is_grad_enabled():
        loss = loss + z_loss_coef * z_loss_sum(logits, labels_BT)
    return loss

"""Tensor functions that the model families share, pure except for the embedding.

Shape letters, here and in the families: B batch, T new tokens, S tokens attended to,
H query heads, K key-value heads, D head size, C hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORE_INDEX = -100


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which a matrix product takes `x` [...]: autocast's on its device, else its own.

    Autocast does not know operators of our own, so they have to ask.
    """
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def at_least_fp32(x: Tensor) -> Tensor:
    """`x` [...] in fp32, for sums that would lose too much in less; fp64 stays."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def soft_capped(x: Tensor, bound: float | None) -> Tensor:
    """c tanh(x / c) of scores or logits [...], for a bound c; `x` itself for None."""
    return x if bound is None else bound * torch.tanh(x / bound)


class AttentionOptions(NamedTuple):
    """What attention depends on beside queries, keys and values.

    Attributes:
        mask: result of the model's `make_mask`, which replaces the causal mask; None is causal.
        dropout: probability with which a weight is dropped.
        scale: factor of the scores; None is 1 / sqrt(D).
        softcap: bound c of the scores s, which become c tanh(s / c) before the mask; None leaves
            them as they are. A kernel without it refuses another value than None.
        sinks: a logit of each head that its softmax has beside the scores, fp32 or less [H]: the
            share of the weights that it takes reaches no value (Xiao et al. 2023; gpt-oss). None
            is none; a kernel without them refuses others.
    """

    mask: Any = None
    dropout: float = 0.0
    scale: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


#: The options of plain causal attention.
CAUSAL = AttentionOptions()


class AttentionFunction(Protocol):
    """Causal attention [B, H, T, D] of T new tokens; token t sees the first S - T + t + 1 of all S
    tokens.

    Args:
        q_BHTD: queries of the new tokens.
        k_BKSD, v_BKSD: keys and values of all tokens; H / K query heads share each head.
        options: mask, scale and the like.
    """

    def __call__(
        self, q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, options: AttentionOptions, /
    ) -> Tensor: ...


class SelfAttention(nn.Module):
    """Base of the families' attention layers.

    Attributes:
        attend: attention backend; efficiency methods replace it.
    """

    attend: AttentionFunction


def attention(
    q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, options: AttentionOptions = CAUSAL
) -> Tensor:
    """Causal attention [B, H, T, D] by torch's fused kernels, which choose among themselves.

    Arguments as in `AttentionFunction`; a mask is bool [T, S] or [B, 1, T, S], true where a query
    may look.
    """
    assert options.softcap is None, "torch's fused kernels have no cap of scores"
    assert options.sinks is None, "torch's fused kernels have no sinks"
    mask = options.mask
    new, total = q_BHTD.shape[-2], k_BKSD.shape[-2]
    # torch's `is_causal` lets the first query see the first key alone: right only if T is S.
    if mask is None and 1 < new < total:
        mask = causal_mask(new, total, q_BHTD.device)
    return F.scaled_dot_product_attention(
        q_BHTD,
        k_BKSD,
        v_BKSD,
        attn_mask=mask,
        dropout_p=options.dropout,
        is_causal=mask is None and new > 1,
        scale=options.scale,
        enable_gqa=q_BHTD.shape[1] != k_BKSD.shape[1],
    )


def plain_attention(
    q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, options: AttentionOptions = CAUSAL
) -> Tensor:
    """Causal attention [B, H, T, D] by the plain formula (Vaswani et al. 2017): two matrix products
    with a softmax between them in fp32. All T x S scores are in memory at once.

    Arguments as in `attention`.
    """
    mask, dropout, scale, softcap, sinks_H = options
    k_BKSD, v_BKSD = (for_each_query_head(x, q_BHTD.shape[1]) for x in (k_BKSD, v_BKSD))
    if mask is None:
        mask = causal_mask(q_BHTD.shape[-2], k_BKSD.shape[-2], q_BHTD.device)
    # The queries and not the scores: there are fewer of them, and fp16 scores stay in range.
    q_BHTD = q_BHTD / math.sqrt(q_BHTD.shape[-1]) if scale is None else q_BHTD * scale
    scores = soft_capped(at_least_fp32(q_BHTD @ k_BKSD.transpose(-2, -1)), softcap)
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks_H is None:
        weights = scores.softmax(-1)
    else:
        # The sinks' column takes its share of the softmax and is cut off: it reaches no value.
        sinks = sinks_H.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
    # Rounded after the softmax only, as in fused kernels.
    return F.dropout(weights.to(v_BKSD.dtype), dropout) @ v_BKSD


def for_each_query_head(x_BKSD: Tensor, heads: int) -> Tensor:
    """Keys or values of grouped queries (Ainslie et al. 2023) repeated to [B, H, S, D]."""
    groups = heads // x_BKSD.shape[1]
    # Neighbouring query heads share a head, as in Hugging Face's weights.
    return x_BKSD if groups == 1 else x_BKSD.repeat_interleave(groups, 1)


def causal_mask(new: int, total: int, device: torch.device) -> Tensor:
    """True where the last `new` of `total` tokens may look, bool [T, S]."""
    return torch.ones(new, total, dtype=torch.bool, device=device).tril(total - new)


def document_positions(document_ids_BT: Tensor) -> Tensor:
    """Each token's position in its document, from 0, int64 [B, T]."""
    positions_T = torch.arange(document_ids_BT.shape[1], device=document_ids_BT.device)
    begins_BT = torch.ones_like(document_ids_BT, dtype=torch.bool)
    begins_BT[:, 1:] = document_ids_BT[:, 1:] != document_ids_BT[:, :-1]
    # The newest beginning up to each token is the largest, as positions grow.
    return positions_T - (positions_T * begins_BT).cummax(1).values


class MaskFunction(Protocol):
    """Function that makes the mask of a model's `AttentionFunction`: see `dense_mask`."""

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
    """True for the keys that a query sees: bool [T, S], or [B, 1, T, S] with documents or with
    positions that differ from row to row; None for the causal mask.

    Args:
        positions: positions of the queries in their row, int64 [T] or [B, T].
        total: tokens there are to look at, from position 0.
        window: a query sees itself and the `window` - 1 tokens before it; None is all.
        document_ids_BT: a query sees its own document only; the row is all there is to look at.
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
    # Equal numbers are one document, since documents are stretches of a row.
    same_BTS = document_ids_BT[:, :, None] == document_ids_BT[:, None, :]
    if mask is None:
        mask = causal_mask(len(positions), total, positions.device)
    return (same_BTS & mask)[:, None]  # [B, 1, T, S]: one for all heads


class Embedding(nn.Embedding):
    """torch's, whose values are not drawn: models here are initialised or loaded as a whole.

    Drawing them on the meta device would also import torch's compiler: a second, and some 50 MB
    in every process that loads a model.
    """

    def reset_parameters(self) -> None:
        """Leaves the values as they are."""


def sliding_window_mask(positions_T: Tensor, total: int, window: int | None) -> Tensor | None:
    """True for the keys that the query at a position sees: itself and the `window` - 1 before it,
    bool [T, S]; None if the window hides nothing.

    Args:
        positions_T: positions of the queries, int64 [T].
        total: tokens there are to look at, from position 0.
    """
    if window is None or total <= window:
        return None
    keys_S = torch.arange(total, device=positions_T.device)
    distance_TS = positions_T[:, None] - keys_S
    return (distance_TS >= 0) & (distance_TS < window)


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum of the cross-entropy (nats, fp32) over the labels that are not -100.

    A sum and not a mean: the caller divides by the valid labels of the whole global batch, so
    that accumulation gives the same gradient as one large batch.

    Args:
        logits: [..., V].
        labels: int64 [...].
    """
    return F.cross_entropy(
        at_least_fp32(logits).flatten(0, -2),
        labels.flatten(),
        ignore_index=IGNORE_INDEX,
        reduction="sum",
    )


class HeadLoss(Protocol):
    """Function that computes head and cross-entropy, summed to a loss []: see `head_loss`."""

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
    """Sum [] of the squared logarithm of the softmax' divisor where the label is not -100, in fp32.

    It keeps logits from drifting, which the cross-entropy leaves free by a constant (Chowdhery et
    al. 2022, PaLM, section 5).

    Args:
        logits: [..., V].
        labels: int64 [...].
    """
    return at_least_fp32(logits).logsumexp(-1).square().where(labels != IGNORE_INDEX, 0).sum()


def head_loss(
    x_BTC: Tensor,
    head: Callable[[Tensor], Tensor],
    vocab_size: int,
    labels_BT: Tensor,
    softcap: float | None = None,
    *,
    z_loss_coef: float = 0.0,
) -> Tensor:
    """All logits at once, then their cross-entropy, summed in fp32 over the labels that are not
    -100, [].

    Args:
        x_BTC: the last layer's output, normalised.
        head: gives logits [B, T, V or more].
        vocab_size: V; logits beyond it are padding.
        labels_BT: see `cross_entropy_sum`.
        softcap: bound of the logits, see `soft_capped`; None is none.
        z_loss_coef: coefficient of `z_loss_sum`, which is added where there are gradients only:
            an evaluation's loss is the cross-entropy.
    """
    # Logits of padded rows would take a share of the probability.
    logits = soft_capped(head(x_BTC)[..., :vocab_size], softcap)
    loss = cross_entropy_sum(logits, labels_BT)
    if z_loss_coef and torch.is_grad_enabled():
        loss = loss + z_loss_coef * z_loss_sum(logits, labels_BT)
    return loss

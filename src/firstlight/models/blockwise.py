"""Causal attention some queries at a time, which keeps no scores for the backward pass.

Attention as in two lines of formulas (Vaswani et al. 2017) is done for a block of queries and the
keys that they may see, so that the scores lie in a core's cache; the backward pass computes them
again, by the formulas of FlashAttention (Dao et al. 2022). Softmax needs no parts, as a block has
all of its keys. On CPUs, in bf16 and up to 1,024 tokens, it is faster than torch's fused kernel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from firstlight.models.ops import (
    CAUSAL,
    AttentionOptions,
    at_least_fp32,
    causal_mask,
    product_dtype,
)

#: Queries of a block, scores that are made at a time, and heads that are in any case (AMD EPYC,
#: bf16, 256 to 8,192 tokens: half or twice as many of any took up to a fifth longer).
QUERIES, SCORES, _LEAST_HEADS = 128, 2**21, 4


def blockwise_attention(
    q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, options: AttentionOptions = CAUSAL
) -> Tensor:
    """Causal attention [B, H, T, D], a block of queries at a time; its dtype is autocast's or the
    values'.

    With dropout, the weights that stay are drawn first, and kept for the backward pass: a byte a
    weight. Arguments as in `ops.AttentionFunction`; the values' heads may be of another size than
    the queries' and keys'.
    """
    mask, dropout, scale, softcap, sinks_H = options
    # Autocast does not know this operator, so the inputs are rounded before it.
    dtype = product_dtype(v_BKSD)
    q_BHTD, k_BKSD, v_BKSD = (x.to(dtype) for x in (q_BHTD, k_BKSD, v_BKSD))
    kept_BHTS = None
    if dropout:
        shape = *q_BHTD.shape[:-1], k_BKSD.shape[-2]
        kept_BHTS = q_BHTD.new_empty(shape, dtype=torch.bool).bernoulli_(1 - dropout)
    # As torch's dropout: the weights that are left grow, so that their mean stays.
    growth, bound = 1 / (1 - dropout), softcap or 0.0
    result: Tensor = _attention(
        q_BHTD, k_BKSD, v_BKSD, mask, kept_BHTS, growth, bound, sinks_H, scale
    )
    return result


#: Arguments of the operator, which its backward pass takes after the result's gradient.
_ARGUMENTS = (
    "Tensor q_BHTD, Tensor k_BKSD, Tensor v_BKSD, Tensor? mask, Tensor? kept_BHTS, float growth, "
    "float softcap=0.0, Tensor? sinks_H=None, float? scale=None"
)
_FORWARD = f"({_ARGUMENTS}) -> Tensor"
_BACKWARD = f"(Tensor grad_BHTD, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor)"


# An operator of its own: what torch.compile makes of the blocks takes it several times as long, and
# keeps most of the scores for the backward pass.
@torch.library.custom_op("firstlight::blockwise_attention", mutates_args=(), schema=_FORWARD)
def _attention(q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, *others: Any) -> Tensor:
    out_BHTD = _like_projected(q_BHTD, v_BKSD.shape[-1])
    # Scores are products of fp32, which autocast would round.
    with torch.autocast(q_BHTD.device.type, enabled=False):
        for own, _, part in _parts(q_BHTD, k_BKSD, v_BKSD, *others):
            part.attend(out_BHTD[own])
            del part  # before the next takes as much
    return out_BHTD


# Strides as those of the real result: compiled code relies on them.
@_attention.register_fake
def _(q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, *_: Any) -> Tensor:
    return _like_projected(q_BHTD, v_BKSD.shape[-1])


def _empty_gradients(
    q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Empty tensors for the results of the backward pass."""
    # torch leaves the last arguments out that have their default.
    sinks_H = others[4] if len(others) > 4 else None
    grad_q, grad_k, grad_v = map(_like_projected, (q_BHTD, k_BKSD, v_BKSD))
    return grad_q, grad_k, grad_v, _sums_like(sinks_H, q_BHTD)


@torch.library.custom_op(
    "firstlight::blockwise_attention_backward", mutates_args=(), schema=_BACKWARD
)
def _attention_backward(
    grad_BHTD: Tensor, q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad_q, grad_k, grad_v, grad_sinks_H = _empty_gradients(q_BHTD, k_BKSD, v_BKSD, *others)
    grad_sinks_H.zero_()
    with torch.autocast(q_BHTD.device.type, enabled=False):
        for own, shared, part in _parts(q_BHTD, k_BKSD, v_BKSD, *others):
            part.backward(grad_BHTD[own], (grad_q[own], grad_k[shared], grad_v[shared]))
            if part.grad_sinks is not None:
                # Added up, since the rows of a batch share the heads' sinks.
                grad_sinks_H[own[1]] += part.grad_sinks
            del part
    return grad_q, grad_k, grad_v, grad_sinks_H


_attention_backward.register_fake(lambda _, *inputs: _empty_gradients(*inputs))


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.growth, ctx.softcap, sinks_H, ctx.scale = inputs
    ctx.save_for_backward(*tensors, sinks_H)


def _backward(ctx: Any, grad_BHTD: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, sinks_H = ctx.saved_tensors
    found = _attention_backward(grad_BHTD, *tensors, ctx.growth, ctx.softcap, sinks_H, ctx.scale)
    *grads, grad_sinks_H = found
    of_sinks = None if sinks_H is None else grad_sinks_H.to(sinks_H.dtype)
    return *grads, None, None, None, None, of_sinks, None


_attention.register_autograd(_backward, setup_context=_save_inputs)


@dataclass(frozen=True)
class _Lost:
    """Scores and weights that mask and dropout take from a part.

    Attributes:
        mask: True where a query may look, bool [T, S] or [B, 1, T, S]; None is causal.
        kept: True where dropout leaves a weight, bool [B, H, T, S]; None is everywhere.
        growth: factor of the weights left, 1 / (1 - dropout).
    """

    mask: Tensor | None
    kept: Tensor | None
    growth: float

    def hide_(self, scores_BHtS: Tensor, start: int, end: int, seen: int) -> None:
        """Mask the scores of keys that the block's queries may not see, in place."""
        if self.mask is None:
            # All but the last are seen by all of its queries.
            near = scores_BHtS[..., seen - (end - start) :]
            near.masked_fill_(~causal_mask(end - start, end - start, near.device), -math.inf)
        else:
            scores_BHtS.masked_fill_(~self.mask[..., start:end, :seen], -math.inf)

    def drop_(self, weights_BHtS: Tensor, start: int, end: int, seen: int) -> None:
        """Apply dropout to a block's weights, or to their gradients, in place."""
        if self.kept is not None:
            weights_BHtS.mul_(self.kept[:, :, start:end, :seen]).mul_(self.growth)


class _Part:
    """Some rows of a batch, or heads of one, with G query heads for each of N key-value heads.

    Scores are fp32, as in fused kernels: rounded to bf16, a score of 10 may be off by 0.03, and its
    weight by as much. torch has no product of bf16 factors with an fp32 result on CPUs.

    Attributes:
        grad_sinks: gradient of the sinks, of the dtype of the scores [H], once `backward` has
            run; None without sinks.
    """

    def __init__(
        self,
        q_BHTD: Tensor,
        k_BKSD: Tensor,
        v_BKSD: Tensor,
        lost: _Lost,
        softcap: float,
        sinks_H: Tensor | None,
        scale: float | None,
    ) -> None:
        rows, heads, new, size = q_BHTD.shape
        self._shape = rows, k_BKSD.shape[1], heads // k_BKSD.shape[1]
        self._scale = size**-0.5 if scale is None else scale
        of_queries, of_keys, self._of_scores = self._scale, 1.0, 1.0
        # In fp32 to the bits of transformers: where the values are of another size in the order of
        # torch's math kernel, with sinks or a cap in that of the family's class.
        if q_BHTD.dtype.itemsize >= 4 and new > 1:
            if v_BKSD.shape[-1] != size:
                of_queries = of_keys = math.sqrt(self._scale)
            elif softcap or sinks_H is not None:
                of_queries, self._of_scores = 1.0, self._scale
        self._rest = self._scale / of_queries
        self._queries = self._grouped(at_least_fp32(q_BHTD) * of_queries)
        # In order, as they are read once for each block.
        self._keys, self._values = (x.flatten(0, 1).contiguous() for x in (k_BKSD, v_BKSD))
        self._wide_keys = at_least_fp32(self._keys)
        if of_keys != 1:
            self._wide_keys = self._wide_keys * of_keys
        self._lost, self._softcap = lost, softcap
        self._sinks = sinks_H
        self.grad_sinks = None if sinks_H is None else _sums_like(sinks_H, q_BHTD).zero_()
        self._blocks = list(blocks_of(new, k_BKSD.shape[-2]))

    def _grouped(self, x_BHTD: Tensor) -> Tensor:
        """[N, G, T, D]."""
        rows, kept, groups = self._shape
        return x_BHTD.reshape(rows * kept, groups, *x_BHTD.shape[-2:]).contiguous()

    def _by_heads(self, x_NXD: Tensor) -> Tensor:
        """Rows of a block's queries, [N, G * t, D], as [B, H, t, D]."""
        rows, kept, groups = self._shape
        return x_NXD.view(rows, kept * groups, -1, x_NXD.shape[-1])

    def _weights(
        self, start: int, end: int, seen: int, slopes: list[Tensor] | None
    ) -> tuple[Tensor, Tensor | None]:
        """Attention weights of a block's queries over the keys that they see, [N, G * t, S], and
        the sinks' weight for each query, [N, G * t, 1]; None without sinks.

        If scores are capped and `slopes` is a list, the slope of each score, 1 - tanh(s / c)^2, is
        appended to it.
        """
        queries = self._queries[:, :, start:end].flatten(1, 2)
        scores = torch.bmm(queries, self._wide_keys[:, :seen].transpose(1, 2))
        if self._of_scores != 1:
            scores.mul_(self._of_scores)
        if self._softcap:
            scores.div_(self._softcap).tanh_()
            if slopes is not None:
                slopes.append(1 - scores.square())
            scores.mul_(self._softcap)
        self._lost.hide_(self._by_heads(scores), start, end, seen)
        if self._sinks is not None:
            scores = self._with_sinks(scores, self._sinks)
        weights = F.softmax(scores, -1)
        # Freed before the rounded copy is made: at its height there are two blocks of scores.
        del scores
        if self._sinks is None:
            return weights.to(self._keys.dtype), None
        # The sinks' column takes its share and is cut off: it reaches no value.
        taken = weights[..., -1:].clone()
        return weights[..., :-1].to(self._keys.dtype), taken

    def _with_sinks(self, scores_NXS: Tensor, sinks_H: Tensor) -> Tensor:
        """The scores with the sinks as their last column, [N, X, S + 1]."""
        rows, kept, groups = self._shape
        sinks = sinks_H.to(scores_NXS.dtype).view(1, kept, groups, 1)
        # A block's rows are its query heads', one head after the other.
        each = (rows, kept, groups, scores_NXS.shape[1] // groups)
        sinks_NX1 = sinks.expand(each).reshape(*scores_NXS.shape[:2], 1)
        return torch.cat((scores_NXS, sinks_NX1), -1)

    def attend(self, out_BHTD: Tensor) -> None:
        """Write the result."""
        for block in self._blocks:
            self._attend(block, out_BHTD)

    def _attend(self, block: tuple[int, int, int], out_BHTD: Tensor) -> None:
        start, end, seen = block
        weights, _ = self._weights(start, end, seen, None)
        self._lost.drop_(self._by_heads(weights), start, end, seen)
        result = torch.bmm(weights, self._values[:, :seen])
        out_BHTD[:, :, start:end] = self._by_heads(result)

    def backward(self, grad_BHTD: Tensor, grads: Sequence[Tensor]) -> None:
        """Write the gradients of queries, keys and values, each of the shape that it came in."""
        grad = self._grouped(grad_BHTD)
        of_queries = grad.new_empty(self._queries.shape)
        found = (of_queries, torch.empty_like(self._keys), torch.empty_like(self._values))
        # The last block sees all keys, so that no gradient has to begin at zero.
        for block in reversed(self._blocks):
            self._add_gradients(block, grad, found)
        for result, one in zip(grads, found, strict=True):
            # Into memory with the strides that compiled code expects, see `_like_projected`.
            result.copy_(one.view(result.shape))

    def _add_gradients(
        self, block: tuple[int, int, int], grads: Tensor, found: tuple[Tensor, ...]
    ) -> None:
        start, end, seen = block
        grad_q, grad_k, grad_v = found
        is_first = block == self._blocks[-1]
        grad = grads[:, :, start:end].flatten(1, 2)
        slopes: list[Tensor] = []
        # Computed again: kept from the forward pass they would be all T x S weights.
        weights, taken = self._weights(start, end, seen, slopes)
        grad_weights = torch.bmm(grad, self._values[:, :seen].transpose(1, 2))
        self._lost.drop_(self._by_heads(grad_weights), start, end, seen)
        if taken is not None:
            assert self.grad_sinks is not None
            # A sink's weight reaches no value: of the softmax's gradient the sum alone is left.
            sums = (grad_weights * weights).sum(-1, keepdim=True, dtype=taken.dtype)
            self.grad_sinks -= self._by_heads(sums.mul_(taken)).sum((0, 2, 3))
        # It also holds for weights that sinks leave a sum below 1.
        grad_scores = torch._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
        del grad_weights
        if slopes:
            grad_scores.mul_(slopes.pop())
        # After the gradient of the softmax, which needs the weights before dropout.
        self._lost.drop_(self._by_heads(weights), start, end, seen)
        _add_product(grad_v[:, :seen], weights, grad, is_first)
        of_queries = torch.bmm(grad_scores, self._keys[:, :seen]).mul_(self._scale)
        grad_q[:, :, start:end] = of_queries.view_as(grad_q[:, :, start:end])
        # The queries and not the gradient of the keys, which is added up over all blocks.
        queries = self._queries[:, :, start:end].flatten(1, 2)
        queries = (queries * self._rest if self._rest != 1 else queries).to(weights.dtype)
        _add_product(grad_k[:, :seen], grad_scores, queries, is_first)


def _add_product(total: Tensor, first: Tensor, second: Tensor, is_first: bool) -> None:
    """`total` += first.T @ second, or = for an empty `total`."""
    if is_first:
        torch.bmm(first.transpose(1, 2), second, out=total)
    else:
        total.baddbmm_(first.transpose(1, 2), second)


def at_a_time(heads: int, kept: int, new: int, total: int) -> tuple[int, int]:
    """Numbers of rows of a batch, and of key-value heads of each row, that are computed at once."""
    groups = heads // kept
    scores = groups * min(QUERIES, new) * total
    count = max(SCORES // max(scores, 1), _LEAST_HEADS // groups, 1)
    return (count // kept, kept) if count >= kept else (1, count)


def _parts(
    q_BHTD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    mask: Tensor | None,
    kept_BHTS: Tensor | None,
    growth: float,
    softcap: float = 0.0,
    sinks_H: Tensor | None = None,
    scale: float | None = None,
) -> Iterator[tuple[tuple[slice, slice], tuple[slice, slice], _Part]]:
    """Rows and query heads, rows and key-value heads, and the part of both, for each part."""
    (batch, heads, new, _), (_, kept, total, _) = q_BHTD.shape, k_BKSD.shape
    groups = heads // kept
    rows, some = at_a_time(heads, kept, new, total)
    for row in range(0, batch, rows):
        for head in range(0, kept, some):
            of_rows, end = slice(row, row + rows), min(head + some, kept)
            own, shared = (of_rows, slice(head * groups, end * groups)), (of_rows, slice(head, end))
            lost = _lost(mask, kept_BHTS, growth, own)
            sinks = None if sinks_H is None else sinks_H[own[1]]
            tensors = q_BHTD[own], k_BKSD[shared], v_BKSD[shared]
            # Not kept here: it ends with the caller's use of it.
            yield own, shared, _Part(*tensors, lost, softcap, sinks, scale)


def blocks_of(new: int, total: int) -> Iterator[tuple[int, int, int]]:
    """(first query, end, number of keys that they see) of each block."""
    for start in range(0, new, QUERIES):
        end = min(start + QUERIES, new)
        yield start, end, total - new + end


def _lost(
    mask: Tensor | None, kept_BHTS: Tensor | None, growth: float, part: tuple[slice, slice]
) -> _Lost:
    # A mask of one row, or without rows, is all rows'.
    if mask is not None and mask.dim() == 4 and len(mask) > 1:
        mask = mask[part[0]]
    return _Lost(mask, None if kept_BHTS is None else kept_BHTS[part], growth)


def _like_projected(x_BHTD: Tensor, size: int | None = None) -> Tensor:
    """An empty one whose heads, of the same size or another, lie side by side, as projections give
    and take them."""
    B, H, T, D = x_BHTD.shape
    return x_BHTD.new_empty(B, T, H, D if size is None else size).transpose(1, 2)


def _sums_like(sinks_H: Tensor | None, q_BHTD: Tensor) -> Tensor:
    """An empty tensor for the gradient of sinks, in fp32 at least, [H]; [0] without sinks."""
    dtype = torch.promote_types(q_BHTD.dtype, torch.float32)
    return q_BHTD.new_empty(0 if sinks_H is None else len(sinks_H), dtype=dtype)

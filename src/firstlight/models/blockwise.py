"""Causal attention, computed in blocks of queries without saving the scores for the backward pass.

Attention (Vaswani et al. 2017, arXiv 1706.03762) is computed for one block of queries at a time,
together with all keys that these queries attend to. The scores of a block fit in a CPU core's
cache. The backward pass recomputes the scores with the formulas of FlashAttention (Dao et al. 2022,
arXiv 2205.14135). Because all keys of a block are processed at once, no running softmax is needed.
On CPUs, in bf16 and with up to 1,024 tokens, this is faster than torch's fused kernel.
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

#: Sizes of the blocks: number of queries per block, number of scores computed at a time, and
#: minimum number of query heads processed at a time. On an AMD EPYC, in bf16 with 256 to 8,192
#: tokens, halving or doubling any of these numbers made attention up to 20% slower.
QUERIES = 128
SCORES = 2**21
_LEAST_HEADS = 4


def blockwise_attention(
    q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, options: AttentionOptions = CAUSAL
) -> Tensor:
    """Compute causal attention in blocks of queries.

    See `ops.AttentionFunction` for the arguments. Value heads can have a different dimension than
    query and key heads. With dropout, a mask for all T x S weights is drawn and saved for the
    backward pass. The mask takes one byte per weight.

    Returns:
        Tensor [B, H, T, value head dim], in the dtype of autocast if it is enabled, otherwise in
        the dtype of the values.
    """
    mask, dropout, scale, softcap, sinks_H = options
    # Autocast does not cast the inputs of custom operators, so they are cast here.
    dtype = product_dtype(v_BKSD)
    q_BHTD, k_BKSD, v_BKSD = (x.to(dtype) for x in (q_BHTD, k_BKSD, v_BKSD))
    kept_BHTS = None
    if dropout:
        shape = *q_BHTD.shape[:-1], k_BKSD.shape[-2]
        kept_BHTS = q_BHTD.new_empty(shape, dtype=torch.bool).bernoulli_(1 - dropout)
    # As in torch's dropout, the remaining weights are multiplied by 1 / (1 - dropout).
    growth, bound = 1 / (1 - dropout), softcap or 0.0
    result: Tensor = _attention(
        q_BHTD, k_BKSD, v_BKSD, mask, kept_BHTS, growth, bound, sinks_H, scale
    )
    return result


#: Arguments of the forward operator. The backward operator takes the gradient of the forward
#: operator's result, followed by the same arguments.
_ARGUMENTS = (
    "Tensor q_BHTD, Tensor k_BKSD, Tensor v_BKSD, Tensor? mask, Tensor? kept_BHTS, float growth, "
    "float softcap=0.0, Tensor? sinks_H=None, float? scale=None"
)
_FORWARD = f"({_ARGUMENTS}) -> Tensor"
_BACKWARD = f"(Tensor grad_BHTD, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor)"


# This is a custom operator, because torch.compile would generate code that is several times slower
# and that saves most of the scores for the backward pass.
@torch.library.custom_op("firstlight::blockwise_attention", mutates_args=(), schema=_FORWARD)
def _attention(q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, *others: Any) -> Tensor:
    out_BHTD = _like_projected(q_BHTD, v_BKSD.shape[-1])
    # Autocast is disabled, because it would round the scores, which are fp32 matrix products.
    with torch.autocast(q_BHTD.device.type, enabled=False):
        for own, _, part in _parts(q_BHTD, k_BKSD, v_BKSD, *others):
            part.attend(out_BHTD[own])
            del part  # free its memory before the next part is created
    return out_BHTD


# The fake result must have the same strides as the real result, because compiled code relies on
# them.
@_attention.register_fake
def _(q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, *_: Any) -> Tensor:
    return _like_projected(q_BHTD, v_BKSD.shape[-1])


def _empty_gradients(
    q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Create uninitialised tensors for the gradients of the queries, keys, values and sinks."""
    # torch omits trailing arguments that have their default value.
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
                # The gradients are summed, because all rows of a batch share the sinks.
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
    """The mask and the dropout for the attention weights of a `_Part`.

    Attributes:
        mask: bool [T, S] or [B, 1, T, S], true for the keys that each query attends to; None for a
            causal mask.
        kept: bool [B, H, T, S], true for the weights that dropout keeps; None if there is no
            dropout.
        growth: factor by which the remaining weights are multiplied, 1 / (1 - dropout).
    """

    mask: Tensor | None
    kept: Tensor | None
    growth: float

    def hide_(self, scores_BHtS: Tensor, start: int, end: int, seen: int) -> None:
        """Mask, in place, the scores of keys that the block's queries must not attend to."""
        if self.mask is None:
            # All queries of a block attend to all keys at positions before the block. A mask is
            # needed only for the keys at the positions of the block itself.
            near = scores_BHtS[..., seen - (end - start) :]
            near.masked_fill_(~causal_mask(end - start, end - start, near.device), -math.inf)
        else:
            scores_BHtS.masked_fill_(~self.mask[..., start:end, :seen], -math.inf)

    def drop_(self, weights_BHtS: Tensor, start: int, end: int, seen: int) -> None:
        """Apply dropout in place to the attention weights of a block, or to their gradients."""
        if self.kept is not None:
            weights_BHtS.mul_(self.kept[:, :, start:end, :seen]).mul_(self.growth)


class _Part:
    """A part of a batch whose attention is computed together. It consists of one or more sequences,
    or of some of the heads of a single sequence.

    The sequences of the part have N key-value heads in total. Each key-value head is shared by G
    query heads.

    Scores are computed in fp32, as in fused kernels. In bf16, a score of 10 would have an error of
    up to 0.03, and the resulting attention weight would have an error of up to 3%. torch does not
    have a CPU matrix product with bf16 inputs and an fp32 result.

    Attributes:
        grad_sinks: gradient of the sinks, [H], in the dtype of the scores, set by `backward`; None
            without sinks.
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
        of_queries = self._scale
        of_keys = 1.0
        self._of_scores = 1.0
        # In fp32, the result must match transformers bit for bit, so the scale must be applied to
        # the same tensors as in transformers. If value heads and key heads differ in size,
        # transformers uses torch's math kernel, which multiplies queries and keys by the square
        # root of the scale. With sinks or a soft cap, the model class in transformers multiplies
        # the scores.
        if q_BHTD.dtype.itemsize >= 4 and new > 1:
            if v_BKSD.shape[-1] != size:
                of_queries = of_keys = math.sqrt(self._scale)
            elif softcap or sinks_H is not None:
                of_queries, self._of_scores = 1.0, self._scale
        self._rest = self._scale / of_queries
        self._queries = self._grouped(at_least_fp32(q_BHTD) * of_queries)
        # Keys and values are made contiguous, because every block reads them.
        self._keys, self._values = (x.flatten(0, 1).contiguous() for x in (k_BKSD, v_BKSD))
        self._wide_keys = at_least_fp32(self._keys)
        if of_keys != 1:
            self._wide_keys = self._wide_keys * of_keys
        self._lost, self._softcap = lost, softcap
        self._sinks = sinks_H
        self.grad_sinks = None if sinks_H is None else _sums_like(sinks_H, q_BHTD).zero_()
        self._blocks = list(blocks_of(new, k_BKSD.shape[-2]))

    def _grouped(self, x_BHTD: Tensor) -> Tensor:
        """Reshape a tensor [B, H, T, D] to a contiguous tensor [N, G, T, D]."""
        rows, kept, groups = self._shape
        return x_BHTD.reshape(rows * kept, groups, *x_BHTD.shape[-2:]).contiguous()

    def _by_heads(self, x_NXD: Tensor) -> Tensor:
        """Return a view [B, H, t, X] of a tensor [N, G * t, X] for a block of t queries."""
        rows, kept, groups = self._shape
        return x_NXD.view(rows, kept * groups, -1, x_NXD.shape[-1])

    def _weights(
        self, start: int, end: int, seen: int, slopes: list[Tensor] | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the attention weights of one block of queries, before dropout, and the weights of
        the sinks. For a block of t queries that attend to the first `seen` keys (see `blocks_of`),
        the attention weights have shape [N, G * t, seen]. The weights of the sinks have shape [N, G
        * t, 1], or are None without sinks.

        If `slopes` is a list and there is a soft cap c, the derivatives of the soft cap are
        appended to the list. The derivative at the score s is 1 - tanh(s / c)^2.
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
        # The scores are freed before the rounded copy is made, so that at most two blocks of this
        # size exist at once.
        del scores
        if self._sinks is None:
            return weights.to(self._keys.dtype), None
        # The sinks are an extra column of the softmax. The column is removed here, because a sink
        # has no value vector.
        taken = weights[..., -1:].clone()
        return weights[..., :-1].to(self._keys.dtype), taken

    def _with_sinks(self, scores_NXS: Tensor, sinks_H: Tensor) -> Tensor:
        """Append the sinks to the scores [N, G * t, S] as an additional column. The result has the
        shape [N, G * t, S + 1]."""
        rows, kept, groups = self._shape
        sinks = sinks_H.to(scores_NXS.dtype).view(1, kept, groups, 1)
        # X = G * t: the rows of each key-value head are ordered by query head, then by query.
        each = (rows, kept, groups, scores_NXS.shape[1] // groups)
        sinks_NX1 = sinks.expand(each).reshape(*scores_NXS.shape[:2], 1)
        return torch.cat((scores_NXS, sinks_NX1), -1)

    def attend(self, out_BHTD: Tensor) -> None:
        """Compute the attention of this part and write the result to `out_BHTD`."""
        for block in self._blocks:
            self._attend(block, out_BHTD)

    def _attend(self, block: tuple[int, int, int], out_BHTD: Tensor) -> None:
        start, end, seen = block
        weights, _ = self._weights(start, end, seen, None)
        self._lost.drop_(self._by_heads(weights), start, end, seen)
        result = torch.bmm(weights, self._values[:, :seen])
        out_BHTD[:, :, start:end] = self._by_heads(result)

    def backward(self, grad_BHTD: Tensor, grads: Sequence[Tensor]) -> None:
        """Compute the gradients of the queries, keys and values, and write them to `grads`."""
        grad = self._grouped(grad_BHTD)
        of_queries = grad.new_empty(self._queries.shape)
        found = (of_queries, torch.empty_like(self._keys), torch.empty_like(self._values))
        # The last block sees all keys. It runs first and overwrites the gradients, so they do not
        # have to be zeroed.
        for block in reversed(self._blocks):
            self._add_gradients(block, grad, found)
        for result, one in zip(grads, found, strict=True):
            # The gradients are copied, because compiled code expects the strides of
            # `_like_projected`.
            result.copy_(one.view(result.shape))

    def _add_gradients(
        self, block: tuple[int, int, int], grads: Tensor, found: tuple[Tensor, ...]
    ) -> None:
        start, end, seen = block
        grad_q, grad_k, grad_v = found
        is_first = block == self._blocks[-1]
        grad = grads[:, :, start:end].flatten(1, 2)
        slopes: list[Tensor] = []
        # The weights are recomputed, because saving them in the forward pass would take memory for
        # all T x S weights.
        weights, taken = self._weights(start, end, seen, slopes)
        grad_weights = torch.bmm(grad, self._values[:, :seen].transpose(1, 2))
        self._lost.drop_(self._by_heads(grad_weights), start, end, seen)
        if taken is not None:
            assert self.grad_sinks is not None
            # The gradient of the softmax with respect to score j is w_j (g_j - sum of g_i w_i). For
            # a sink, g_j is 0, because a sink has no value vector.
            sums = (grad_weights * weights).sum(-1, keepdim=True, dtype=taken.dtype)
            self.grad_sinks -= self._by_heads(sums.mul_(taken)).sum((0, 2, 3))
        # This gradient is also correct for weights that sum to less than 1 because of sinks.
        grad_scores = torch._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
        del grad_weights
        if slopes:
            grad_scores.mul_(slopes.pop())
        # Dropout is applied after the gradient of the softmax, which needs the weights without
        # dropout.
        self._lost.drop_(self._by_heads(weights), start, end, seen)
        _add_product(grad_v[:, :seen], weights, grad, is_first)
        of_queries = torch.bmm(grad_scores, self._keys[:, :seen]).mul_(self._scale)
        grad_q[:, :, start:end] = of_queries.view_as(grad_q[:, :, start:end])
        # The remaining factor of the scale is applied to the queries. It can't be applied to the
        # gradient of the keys, which is a sum over blocks.
        queries = self._queries[:, :, start:end].flatten(1, 2)
        queries = (queries * self._rest if self._rest != 1 else queries).to(weights.dtype)
        _add_product(grad_k[:, :seen], grad_scores, queries, is_first)


def _add_product(total: Tensor, first: Tensor, second: Tensor, is_first: bool) -> None:
    """Add first.T @ second to `total`. If `is_first` is True, `total` is uninitialised and is
    overwritten."""
    if is_first:
        torch.bmm(first.transpose(1, 2), second, out=total)
    else:
        total.baddbmm_(first.transpose(1, 2), second)


def at_a_time(heads: int, kept: int, new: int, total: int) -> tuple[int, int]:
    """Return the number of sequences, and the number of key-value heads per sequence, whose
    attention is computed together. Each sequence has `heads` query heads, `kept` key-value heads,
    `new` queries and `total` keys."""
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
    """Divide a batch into parts. For each part, yield two pairs of slices and the part itself. The
    first pair selects the sequences and query heads of the part from [B, H]. The second pair
    selects its sequences and key-value heads from [B, K]."""
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
            # The generator does not keep a reference, so that the caller can free the part.
            yield own, shared, _Part(*tensors, lost, softcap, sinks, scale)


def blocks_of(new: int, total: int) -> Iterator[tuple[int, int, int]]:
    """Divide the queries into blocks. For each block, yield the index of its first query, the index
    after its last query, and a number of keys n. The queries of the block can attend only to the
    first n keys."""
    for start in range(0, new, QUERIES):
        end = min(start + QUERIES, new)
        yield start, end, total - new + end


def _lost(
    mask: Tensor | None, kept_BHTS: Tensor | None, growth: float, part: tuple[slice, slice]
) -> _Lost:
    # A mask without a batch dimension, or with a batch dimension of size 1, applies to all rows.
    if mask is not None and mask.dim() == 4 and len(mask) > 1:
        mask = mask[part[0]]
    return _Lost(mask, None if kept_BHTS is None else kept_BHTS[part], growth)


def _like_projected(x_BHTD: Tensor, size: int | None = None) -> Tensor:
    """Create an uninitialised tensor of shape [B, H, T, size]. Its memory is ordered as [B, T, H,
    size], like the inputs and outputs of linear projections. `size` defaults to D."""
    B, H, T, D = x_BHTD.shape
    return x_BHTD.new_empty(B, T, H, D if size is None else size).transpose(1, 2)


def _sums_like(sinks_H: Tensor | None, q_BHTD: Tensor) -> Tensor:
    """Create an uninitialised tensor for the gradient of the sinks, in at least fp32. Its shape is
    [H], or [0] if there are no sinks."""
    dtype = torch.promote_types(q_BHTD.dtype, torch.float32)
    return q_BHTD.new_empty(0 if sinks_H is None else len(sinks_H), dtype=dtype)

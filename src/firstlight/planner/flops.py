"""FLOPs of operators, by torch's own formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from firstlight.models.blockwise import blocks_of

_aten: Any = torch.ops.aten
_firstlight: Any = torch.ops.firstlight


def _cpu_attention(query: Tensor, key: Tensor, value: Tensor) -> int:
    counted: Any = sdpa_flop_count
    return int(counted(query.shape, key.shape, value.shape))


def _cpu_attention_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor) -> int:
    counted: Any = sdpa_backward_flop_count
    return int(counted(grad.shape, query.shape, key.shape, value.shape))


def _blockwise(query: Tensor, key: Tensor) -> int:
    """Of one product: the keys of a block end with it."""
    batch, heads, new, size = query.shape
    scores = sum((end - start) * seen for start, end, seen in blocks_of(new, key.shape[2]))
    return 2 * batch * heads * size * scores


def _grouped(x: Tensor, weight: Tensor) -> int:
    """Each row by the weight of its own expert."""
    return 2 * x.shape[0] * weight.shape[1] * weight.shape[2]


#: Of operators that torch's counter leaves out; whole rows where torch counts those on GPUs.
_MORE_FLOPS: dict[Any, Callable[..., int]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_: _cpu_attention(q, k, v),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda g, q, k, v, *_: (
        _cpu_attention_backward(g, q, k, v)
    ),
    _firstlight.grouped_linear: lambda x, weight, *_: _grouped(x, weight),
    _firstlight.grouped_linear_backward: lambda g, _, weight, *__: 2 * _grouped(g, weight),
    _firstlight.blockwise_attention: lambda q, k, *_: 2 * _blockwise(q, k),
    # The scores once more, and the gradients of all that two products had.
    _firstlight.blockwise_attention_backward: lambda g, q, k, *_: 5 * _blockwise(q, k),
}


def flops_of(func: Any, args: tuple[Any, ...], kwargs: Any, result: Any) -> int:
    """Of one call of an operator's matrix products and attention; 0 for others."""
    packet = getattr(func, "_overloadpacket", None)
    if packet in _MORE_FLOPS:
        return _MORE_FLOPS[packet](*args)
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=result))
    return 0

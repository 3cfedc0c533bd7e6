"""The operators that a trace counts: shapes, bytes, FLOPs, and their number in a deeper model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from firstlight.models.blockwise import blocks_of

_aten: Any = torch.ops.aten
_firstlight: Any = torch.ops.firstlight

#: What (shape, dtype) of a tensor is in an operator's key.
Layout = tuple[tuple[int, ...], torch.dtype]

#: Lists, one after the other, of operators on these; each is as long as the others.
LISTS = {"_fused_adamw_": 5, "_foreach_mul_": 1, "_foreach_add_": 1}


@dataclass(frozen=True)
class Operator:
    """One kind of operator call: equal calls are one.

    Attributes:
        name: torch's, such as "aten.mm.default".
        phase: phase of the step.
        inputs, outputs: shape and dtype of each tensor.
        flops: FLOPs of its matrix products; 0 if it has none.
        moved_bytes: read and written, each tensor once; 0 for views.
        options: further properties of the call that its kernel's memory depends on.
    """

    name: str
    phase: str
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    flops: int
    moved_bytes: int
    options: str = ""

    @property
    def base_name(self) -> str:
        """The name without library and overload: "mm" of "aten.mm.default"."""
        parts = self.name.split(".")
        return parts[1] if len(parts) > 1 else parts[0]


@dataclass(frozen=True)
class OperatorCount:
    """Equal calls of an operator: what a model of speed works with.

    Attributes:
        operator: the operator with its shapes and phase.
        count: calls in one optimizer step, evaluation batch or decoding step.
    """

    operator: Operator
    count: int


def bytes_of(layout: Layout) -> int:
    """Of a tensor, packed."""
    size = layout[1].itemsize
    for length in layout[0]:
        size *= length
    return size


def total_bytes(layouts: Iterable[Layout]) -> int:
    """The packed bytes of several tensors together."""
    return sum(map(bytes_of, layouts))


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


def at_depth(
    few: Sequence[OperatorCount], more: Sequence[OperatorCount], steps: int
) -> list[OperatorCount]:
    """The operators of a deep model from those of two shallow ones.

    Args:
        few: counts of the model with fewer layers.
        more: counts of the model with one layer more.
        steps: layers that the deep model has beyond `more`.
    """
    before = {entry.operator: entry.count for entry in few}
    found = []
    for entry in more:
        each = entry.count - before.get(entry.operator, 0)
        # Of lists of all parameters there is one operator, with longer lists.
        is_list = not entry.operator.outputs and entry.operator not in before
        count = entry.count if is_list else entry.count + max(each, 0) * steps
        found.append(OperatorCount(entry.operator, count))
        if is_list:
            found += _longer_lists(entry, few, steps)
    return found


def _longer_lists(
    entry: OperatorCount, few: Sequence[OperatorCount], steps: int
) -> list[OperatorCount]:
    """What a layer more brings to a list, once for each further layer."""
    one = entry.operator
    like = [e.operator for e in few if (e.operator.name, e.operator.phase) == (one.name, one.phase)]
    lists = LISTS.get(one.base_name, 1)
    for other in like:
        pairs = zip(_cut(one.inputs, lists), _cut(other.inputs, lists), strict=True)
        # In each list, in the same order: what belongs together has to stay together.
        added = [tuple((Counter(more) - Counter(less)).elements()) for more, less in pairs]
        inputs = tuple(layout for part in added for layout in part)
        if inputs and len(inputs) == len(one.inputs) - len(other.inputs):
            layer = replace(one, inputs=inputs, moved_bytes=total_bytes(inputs))
            return [OperatorCount(layer, entry.count * steps)]
    return []


def _cut(layouts: Sequence[Layout], lists: int) -> list[Sequence[Layout]]:
    size = len(layouts) // lists
    return [layouts[i * size : (i + 1) * size] for i in range(lists)]

"""Time an operator of a trace by running it again on random tensors of its shapes.

The conditions are those of a step: the inputs are not in a core's caches, and the results go into
memory that other tensors had before. Between two calls there is a pause as long as Python takes in
a step, in which waiting OpenMP threads fall asleep.

The clock is `time.thread_time`, the CPU time of the calling thread. This thread works at least as
long as each other thread of a parallel region, and its clock stands still while another program has
its core. So the times are close to those of an idle machine, even if other programs run.
"""

from __future__ import annotations

import collections
import math
import resource
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS

from firstlight.planner.memory.kernels import Layout, Operator, bytes_of
from firstlight.planner.speed.operators import is_attention

_aten = torch.ops.aten

#: Bytes of kept results, and of copies of the inputs that are used in turns: more than the caches
#: of one core hold.
_COLD_BYTES = 48 * 2**20
#: Most bytes of the inputs and results of an operator that is replayed.
_MOST_BYTES = 3 * 2**27
#: Number of fp32 values that another operator updates between two runs: these 4 MiB fill the caches
#: of one core.
_CACHED_VALUES = 2**20
#: Number of page faults that a counted run may have: Python's own memory causes some.
_FEW_FAULTS = 8
#: Number of runs with more page faults after which, once the time is over, no better run is tried.
_MOST_FAULTY = 3
#: Seconds of Python between two operators of a step.
_GAP_SECONDS = 15e-6

#: A call runs the operator once; a builder makes the call from the operator's input tensors.
Call = Callable[[], object]
Builder = Callable[[Operator, Sequence[Tensor]], Call]


def _like(function: Callable[..., object], *more: object) -> Builder:
    """A builder of calls with the tensors in their order, followed by constants."""
    return lambda _, tensors: lambda: function(*tensors, *more)


def _with_number(function: Callable[..., object]) -> Builder:
    """A builder of calls with two tensors, or with one tensor and a number."""
    return lambda _, t: lambda: function(t[0], t[1] if len(t) > 1 else 1.5)


def _cast(operator: Operator, tensors: Sequence[Tensor]) -> Call:
    dtype = operator.outputs[0][1]
    return lambda: tensors[0].to(dtype)


def _layer_norm(operator: Operator, tensors: Sequence[Tensor]) -> Call:
    x, *weights = tensors
    shape = list(x.shape[-1:])
    padded = [*weights, None, None][:2]
    return lambda: _aten.native_layer_norm(x, shape, *padded, 1e-5)


def _layer_norm_backward(operator: Operator, tensors: Sequence[Tensor]) -> Call:
    grad, x, mean, rstd, *weights = tensors
    shape = list(x.shape[-1:])
    padded = [*weights, None, None][:2]
    mask = [True, True, len(weights) > 1]
    return lambda: _aten.native_layer_norm_backward(grad, x, shape, mean, rstd, *padded, mask)


def _sum(operator: Operator, tensors: Sequence[Tensor]) -> Call:
    """A sum or mean over the dimensions that are 1 in the result; if the result has fewer
    dimensions, over the last one, and if it is a scalar, over all."""
    (shape, _), (result, dtype) = operator.inputs[0], operator.outputs[0]
    kept = len(shape) == len(result)
    if kept:
        dims = [i for i, size in enumerate(shape) if result[i] != size]
    else:
        dims = [] if not result else [len(shape) - 1]
    name = _aten.mean if operator.base_name == "mean" else _aten.sum
    return lambda: name(tensors[0], dims or None, kept, dtype=dtype)


def _attention(operator: Operator, tensors: Sequence[Tensor]) -> Call:
    return lambda: _aten._scaled_dot_product_flash_attention_for_cpu(
        *tensors[:3], 0.0, len(tensors) < 4, attn_mask=tensors[3] if len(tensors) > 3 else None
    )


def _attention_backward(operator: Operator, tensors: Sequence[Tensor]) -> Call:
    grad, q, k, v, out, logsumexp, *mask = tensors
    return lambda: _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, logsumexp, 0.0, not mask, attn_mask=mask[0] if mask else None
    )


def _blockwise(operator: Operator, tensors: Sequence[Tensor]) -> Call:
    # The operator's own function, without torch's wrapper, whose first call imports the compiler.
    function = OPDEFS[f"firstlight::{operator.base_name}"]._init_fn
    count = 4 if operator.base_name.endswith("backward") else 3
    heads = tensors[count - 3].shape[1]
    mask, kept, sinks_H = None, None, None
    for one in tensors[count:]:
        if one.dim() == 1:
            sinks_H = one
            continue
        # Made as zeros, with which no query would see a key.
        one.fill_(True)
        if one.dim() == 4 and one.shape[1] == heads:
            kept = one
        else:
            mask = one
    return lambda: function(*tensors[:count], mask, kept, 1.0, 0.0, sinks_H)


def _experts(operator: Operator, tensors: Sequence[Tensor]) -> Call:
    function = OPDEFS[f"firstlight::{operator.base_name}"]._init_fn
    *factors, ends_E = tensors
    rows, experts = len(factors[0]), len(ends_E)
    # Each expert gets the same number of rows.
    ends_E.copy_(torch.arange(1, experts + 1) * rows // experts)
    return lambda: function(*factors, ends_E)


def _softmax_backward(operator: Operator, tensors: Sequence[Tensor]) -> Call:
    name = getattr(_aten, operator.base_name)
    return lambda: name(tensors[0], tensors[1], -1, tensors[1].dtype)


def _nll_backward(operator: Operator, tensors: Sequence[Tensor]) -> Call:
    grad, x, target, total = tensors
    return lambda: _aten.nll_loss_backward(grad, x, target, None, 2, -100, total)


def _embedding_backward(operator: Operator, tensors: Sequence[Tensor]) -> Call:
    rows = operator.outputs[0][0][0]
    return lambda: _aten.embedding_dense_backward(tensors[0], tensors[1], rows, -1, False)


def _adamw(operator: Operator, tensors: Sequence[Tensor]) -> Call:
    count = len(tensors) // 5
    lists = [list(tensors[i * count : (i + 1) * count]) for i in range(5)]
    # The kernel reads sizes from the parameters alone, and would write past smaller tensors' ends.
    if any(len({one.shape for one in group}) > 1 for group in zip(*lists[:4], strict=True)):
        raise ValueError("lists of tensors that don't belong together")
    rates = {"lr": 0.0, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "eps": 1e-8}
    return lambda: _aten._fused_adamw_(
        *lists[:4], [], lists[4], **rates, amsgrad=False, maximize=False
    )


def _adam8bit(operator: Operator, tensors: Sequence[Tensor]) -> Call:
    # The trace has run this operator, so bitsandbytes is imported and has registered it.
    update = torch.ops.bitsandbytes.optimizer_update_8bit_blockwise
    grad, parameter, first, second, signed, unsigned, *scales = tensors
    # The maps from 8 bits to values have to be sorted: the kernel searches them.
    torch.linspace(-1, 1, len(signed), out=signed)
    torch.linspace(0, 1, len(unsigned), out=unsigned)
    rates = (0.9, 0.95, 0.0, 0.0, 1e-8, 1, 0.0)
    maps_and_scales = (signed, unsigned, *scales)
    return lambda: update(
        "adam", grad, parameter, first, second, *rates, *maps_and_scales, 0.0, 1.0, False
    )


def _joined(operator: Operator, tensors: Sequence[Tensor]) -> Call:
    function = _aten.stack if operator.base_name == "stack" else _aten.cat
    shape = operator.outputs[0][0]
    sizes = operator.inputs[0][0]
    dim = next((i for i, n in enumerate(shape) if i >= len(sizes) or n != sizes[i]), 0)
    return lambda: function(list(tensors), dim)


_BUILDERS: dict[str, Builder] = {
    "mm": _like(_aten.mm),
    "addmm": _like(_aten.addmm),
    "bmm": _like(_aten.bmm),
    "baddbmm": _like(_aten.baddbmm),
    "matmul": _like(_aten.matmul),
    "linear": _like(_aten.linear),
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "bernoulli_": lambda _, t: lambda: t[0].bernoulli_(0.9),
    "blockwise_attention": _blockwise,
    "blockwise_attention_backward": _blockwise,
    "grouped_linear": _experts,
    "grouped_linear_backward": _experts,
    "_to_copy": _cast,
    "clone": _like(_aten.clone),
    "add": _with_number(_aten.add),
    "add_": _with_number(_aten.add_),
    "sub": _with_number(_aten.sub),
    "mul": _with_number(_aten.mul),
    "mul_": _with_number(_aten.mul_),
    "div": _with_number(_aten.div),
    "div_": _with_number(_aten.div_),
    "neg": _like(_aten.neg),
    "exp_": _like(_aten.exp_),
    "pow": _like(_aten.pow, 2),
    "silu": _like(_aten.silu),
    "silu_backward": _like(_aten.silu_backward),
    "gelu": lambda _, t: lambda: _aten.gelu(t[0], approximate="tanh"),
    "gelu_backward": lambda _, t: lambda: _aten.gelu_backward(t[0], t[1], approximate="tanh"),
    "native_layer_norm": _layer_norm,
    "native_layer_norm_backward": _layer_norm_backward,
    "sum": _sum,
    "mean": _sum,
    "_log_softmax": _like(_aten._log_softmax, -1, False),
    "_softmax": _like(_aten._softmax, -1, False),
    "log_softmax": lambda one, t: lambda: _aten.log_softmax(t[0], -1, one.outputs[0][1]),
    "_log_softmax_backward_data": _softmax_backward,
    "_softmax_backward_data": _softmax_backward,
    "nll_loss_forward": lambda _, t: lambda: _aten.nll_loss_forward(t[0], t[1], None, 2, -100),
    "nll_loss_backward": _nll_backward,
    "embedding": _like(_aten.embedding),
    "embedding_dense_backward": _embedding_backward,
    "linalg_vector_norm": _like(_aten.linalg_vector_norm),
    "cat": _joined,
    "stack": _joined,
    "lerp": lambda _, t: lambda: _aten.lerp(t[0], t[1], 0.5),
    "lerp_": lambda _, t: lambda: _aten.lerp_(t[0], t[1], 0.5),
    "_foreach_mul_": lambda _, t: lambda: _aten._foreach_mul_(list(t), 1.0),
    "_fused_adamw_": _adamw,
    "optimizer_update_8bit_blockwise": _adam8bit,
}


def can_replay(operator: Operator) -> bool:
    """True if the operator can be run from its shapes alone, with at most `_MOST_BYTES`."""
    return operator.base_name in _BUILDERS and _size(operator) <= _MOST_BYTES


def _size(operator: Operator) -> int:
    return sum(map(bytes_of, (*operator.inputs, *operator.outputs)))


def time_operator(
    operator: Operator,
    transposed: tuple[bool, bool],
    *,
    most_seconds: float,
    most_runs: int = 9,
) -> float:
    """Seconds of one call: the median of several runs, after one that isn't counted. Runs with page
    faults are left out; if all have them, the last run counts.

    Args:
        operator: an operator that `can_replay` accepts.
        transposed: memory layout of a product's factors, see `transposed_factors`.
        most_seconds: seconds after which no run begins, once one run counts or more than
            `_MOST_FAULTY` runs had page faults.
        most_runs: largest number of counted runs.
    """
    size = sum(bytes_of(layout) for layout in operator.inputs)
    copies = max(1, min(most_runs, math.ceil(_COLD_BYTES / max(size, 1))))
    calls = [
        _BUILDERS[operator.base_name](operator, _tensors(operator, transposed))
        for _ in range(copies)
    ]
    results = _Kept(_COLD_BYTES)
    elsewhere = torch.ones(_CACHED_VALUES)
    end = time.perf_counter() + most_seconds
    settled: list[float] = []
    faulty: list[float] = []
    with torch.no_grad():
        results.keep(calls[0]())
        while len(settled) < most_runs:
            call = calls[(len(settled) + len(faulty) + 1) % copies]
            # Results are kept as long as there is room, so that each run writes to memory that
            # another tensor had before.
            results.make_room()
            # Another operator's values fill the caches, as between two operators of a step.
            elsewhere.mul_(1.0)
            _wait(_GAP_SECONDS)
            faults, start = _page_faults(), time.thread_time()
            result = call()
            seconds = time.thread_time() - start
            # Training takes new memory from the system in its first steps only: runs that do so
            # are not typical.
            (faulty if _page_faults() - faults > _FEW_FAULTS else settled).append(seconds)
            results.keep(result)
            if time.perf_counter() > end and (settled or len(faulty) > _MOST_FAULTY):
                break
    return statistics.median(settled or faulty[-1:])


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


class _Kept:
    """The latest results, kept alive up to a number of bytes."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._kept: collections.deque[tuple[object, int]] = collections.deque()
        self._last = 0

    def keep(self, result: object) -> None:
        parts = result if isinstance(result, tuple | list) else (result,)
        self._last = sum(part.nbytes for part in parts if isinstance(part, Tensor))
        self._kept.append((result, self._last))

    def make_room(self) -> None:
        """Drop the oldest results until there is room for another one as large as the last."""
        while self._kept and sum(size for _, size in self._kept) + self._last > self._most:
            self._kept.popleft()


def _wait(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def _tensors(operator: Operator, transposed: tuple[bool, bool]) -> list[Tensor]:
    """Random inputs; the factors of a product lie in memory as `transposed` says."""
    tensors = [_random(layout) for layout in operator.inputs]
    name = operator.base_name
    if "mm" in name or name in ("matmul", "linear"):
        first = len(tensors) - 2
        for i, turned in enumerate(transposed):
            if turned:
                tensors[first + i] = (
                    tensors[first + i].transpose(-2, -1).contiguous().transpose(-2, -1)
                )
    elif name in ("embedding", "embedding_dense_backward"):
        rows = operator.inputs[0] if name == "embedding" else operator.outputs[0]
        tensors[1] = torch.randint(0, rows[0][0], operator.inputs[1][0])
    elif name.startswith("nll_loss"):
        place = 1 if name == "nll_loss_forward" else 2
        rows = operator.inputs[place - 1]
        tensors[place] = torch.randint(0, rows[0][-1], operator.inputs[place][0])
    elif is_attention(operator):
        tensors = [
            _heads_inside(one) if one.dim() == 4 and one.shape[1] > 1 else one for one in tensors
        ]
    return tensors


def _heads_inside(tensor: Tensor) -> Tensor:
    """The tensor [batch, heads, tokens, head size] as a view of [batch, tokens, heads, head size],
    the layout in which a model's projections give it."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def _random(layout: Layout) -> Tensor:
    shape, dtype = layout
    if not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype)
    # Small, so that no product overflows; neither zero nor denormal, whose speed differs.
    return torch.empty(shape, dtype=torch.float32).uniform_(0.01, 1.0).to(dtype)

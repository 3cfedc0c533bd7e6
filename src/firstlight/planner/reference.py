"""A few operators whose time says how fast the machine is at this moment.

By the calling thread's own clock, see `replay.py`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

#: Rows, columns and inner dimension of the reference products.
_PRODUCT = (512, 768, 768)
#: Values of the reference stream.
_STREAM = 8 * 2**20
_ROUNDS = 7


@dataclass(frozen=True)
class Reference:
    """What the reference operators take now.

    Attributes:
        seconds: by name: "float32", "bfloat16", "float16" (products) and "stream".
        rates: FLOP/s or bytes a second, by the same names.
        call_seconds: of an operator of a model that computes next to nothing.
    """

    seconds: dict[str, float]
    rates: dict[str, float]
    call_seconds: float


def measure_reference() -> Reference:
    """Measure them, in turns: a quarter of a second."""
    m, n, k = _PRODUCT
    calls: dict[str, Callable[[], object]] = {}
    work: dict[str, float] = {}
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        calls[name] = _product(m, n, k, dtype)
        work[name] = 2.0 * m * n * k
    source, other = torch.rand(_STREAM), torch.rand(_STREAM)
    result = torch.empty_like(source)
    calls["stream"] = lambda: torch.add(source, other, out=result)
    work["stream"] = 3.0 * source.nbytes
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(_ROUNDS + 1):
        for name, call in calls.items():
            start = time.thread_time()
            call()
            if number:
                times[name].append(time.thread_time() - start)
    seconds = {name: statistics.quantiles(found, n=4)[0] for name, found in times.items()}
    rates = {name: work[name] / seconds[name] for name in seconds}
    return Reference(seconds, rates, _call_seconds())


def _product(m: int, n: int, k: int, dtype: torch.dtype) -> Callable[[], object]:
    a, b = torch.rand(m, k).to(dtype), torch.rand(k, n).to(dtype)
    result = torch.empty(m, n, dtype=dtype)
    return lambda: torch.mm(a, b, out=result)


def _call_seconds() -> float:
    """Of one of the operators in forward and backward passes over 16 values, a view among two."""
    x = torch.rand(16, requires_grad=True)
    layers = 40
    times = []
    for _ in range(4):
        start = time.thread_time()
        y = x
        for _ in range(layers):
            y = (y.view(4, 4) * 1.01).view(16)
        y.sum().backward()  # type: ignore[no-untyped-call]
        times.append((time.thread_time() - start) / (6 * layers))
    return min(times)

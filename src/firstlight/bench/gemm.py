"""`firstlight bench gemm`: this machine's matrix-product rate by shape and by alignment.

How it is measured: the operands are random, made once for each number format, and the result is
written over the last one, so that no memory is asked for meanwhile. A product that takes less
than a measurement is multiplied once before it and repeated in it with the same operands: what
fits into the caches is in them. Each round measures every product once, and three times the
small ones that are there to be compared; what a row says is the median. What is compared is
measured shortly after each other, and the ratio is the median of such pairs' ratios: what else
the machine does falls on both.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor

from firstlight.bench.gemm_products import (
    COMPARED,
    MODELS,
    STEP_TOKENS,
    GemmPlan,
    GemmProduct,
    Layout,
    all_products,
    plan_for,
)
from firstlight.bench.gemm_report import summarize
from firstlight.bench.options import GemmBench, require_known
from firstlight.bench.runner import machine_facts
from firstlight.console import progress_bar
from firstlight.errors import ConfigError
from firstlight.hardware.device import Hardware, find_hardware, synchronize

#: Number formats by their names in recipes. tf32 is fp32 whose products a GPU rounds to 10 bits.
DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
#: Multiplied by `torch._scaled_mm`, which takes the layout "nt" and multiples of 16 alone, so that
#: shapes are not compared in it.
FP8 = torch.float8_e4m3fn
_LARGE_CPU = ((2048, 2048, 2048), (4096, 4096, 1024), (1024, 3072, 768))
_LARGE_GPU = ((4096, 4096, 4096), (8192, 8192, 8192), (4096, 3072, 768))
#: A measurement repeats its product at most so often.
_MOST_REPEATS = 10_000

Operands = tuple[Tensor, Tensor, Tensor]


def hardware_dtypes(hardware: Hardware) -> list[str]:
    """The names among DTYPES that the device multiplies in hardware; fp32 always."""
    names = ["fp32"]
    if hardware.device.type == "cuda":
        capability = torch.cuda.get_device_capability(hardware.device)
        names += ["tf32"] if capability >= (8, 0) else []
        fp16 = capability >= (7, 0)
    elif hardware.device.type == "cpu":
        found = torch.cpu.get_capabilities()
        fp16 = any(found.get(name) for name in ("avx512_fp16", "amx_fp16", "fp16_arith"))
    else:
        fp16 = True
    return [*names, *(["bf16"] if hardware.bf16 else []), *(["fp16"] if fp16 else [])]


@contextlib.contextmanager
def fp32_products(name: str) -> Iterator[None]:
    """fp32 products in full, or as tf32; torch's setting is global, so it is put back."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def make_operands(
    products: Sequence[GemmProduct], dtype: torch.dtype, device: torch.device
) -> Operands:
    """Memory for A, B and C that is large enough for each of `products`; random A and B."""
    sizes = [
        max(sizes)
        for sizes in zip(*((p.m * p.k, p.k * p.n, p.m * p.n) for p in products), strict=True)
    ]
    # fp8 has no random numbers of its own, and its products are written as bf16.
    drawn = torch.bfloat16 if dtype == FP8 else dtype
    a, b, c = (torch.zeros(size, dtype=drawn, device=device) for size in sizes)
    # Not all zeros or ones: a GPU multiplies those with less power, so at a higher clock.
    return a.uniform_(-1, 1).to(dtype), b.uniform_(-1, 1).to(dtype), c


def make_multiply(product: GemmProduct, operands: Operands) -> Callable[[], object]:
    """A function that multiplies once, in the product's layout, into C; fp8, whose units take
    the layout "nt" alone, into memory of its own."""
    m, n, k = product.m, product.n, product.k
    a, b, c = operands
    left = a[: m * k].view(m, k) if product.layout[0] == "n" else a[: m * k].view(k, m).t()
    right = b[: k * n].view(k, n) if product.layout[1] == "n" else b[: k * n].view(n, k).t()
    if a.dtype == FP8:
        one = torch.ones((), device=a.device)
        return lambda: torch._scaled_mm(
            left, right, one, one, out_dtype=c.dtype, use_fast_accum=True
        )
    out = c[: m * n].view(m, n)
    return lambda: torch.mm(left, right, out=out)


def _seconds(multiply: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Seconds that one product takes, over `repeats`."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        multiply()
    synchronize(device)
    return (time.perf_counter() - start) / repeats


def _warm_up(multiply: Callable[[], object], device: torch.device) -> float:
    """Build kernels and touch memory; the seconds that one product takes, roughly."""
    multiply()
    best = math.inf
    for _ in range(3):
        best = min(best, _seconds(multiply, 1, device))
        if best > 0.1:
            break
    return best


def _repeats(product_seconds: float, measure_seconds: float) -> int:
    return min(_MOST_REPEATS, max(1, math.ceil(measure_seconds / max(product_seconds, 1e-9))))


def measure(product: GemmProduct, operands: Operands, repeats: int, device: torch.device) -> float:
    """Seconds that one product takes, over `repeats`; short ones are multiplied once before."""
    multiply = make_multiply(product, operands)
    if repeats > 1:
        multiply()
    return _seconds(multiply, repeats, device)


def product_rates(
    products: Sequence[GemmProduct],
    dtype: torch.dtype,
    device: torch.device,
    rounds: int,
    measure_seconds: float,
) -> list[list[float]]:
    """The FLOP/s of each product in each of some interleaved rounds."""
    operands = make_operands(products, dtype, device)
    repeats = [
        _repeats(_warm_up(make_multiply(one, operands), device), measure_seconds)
        for one in products
    ]
    rates: list[list[float]] = [[] for _ in products]
    for _ in range(rounds):
        for these, one, times in zip(rates, products, repeats, strict=True):
            these.append(one.flops / measure(one, operands, times, device))
    return rates


def ceiling(device: torch.device, dtype: torch.dtype, *, rounds: int = 5) -> float:
    """FLOP/s that matrix products reach at best on this machine: the base of shares.

    The best single measurement of three large products in two layouts, in interleaved rounds:
    what else runs on the machine only takes away. Takes a few seconds on two CPU cores. fp32
    products on GPUs run as torch.get_float32_matmul_precision() says at the time.
    """
    shapes = _LARGE_GPU if device.type == "cuda" else _LARGE_CPU
    layouts: tuple[Layout, ...] = ("nt", "nn")
    products = [
        GemmProduct("size", "", n, f"{m} x {n} x {k}", m, n, k, layout)
        for m, n, k in shapes
        for layout in layouts
    ]
    return max(max(rates) for rates in product_rates(products, dtype, device, rounds, 0.03))


class GemmRun:
    """A benchmark that runs; what it has measured can be asked for at any time.

    Attributes:
        dtypes: number formats that are measured.
        products: all products.
        seconds: seconds of each round, by number format and product.
        rounds: number of rounds that have begun.
        complete: True once all is measured.

    Raises:
        ConfigError: a name is unknown, or the device can't do what is asked.
    """

    def __init__(self, bench: GemmBench, plan: GemmPlan | None = None) -> None:
        self.bench, self.hardware = bench, find_hardware(bench.device)
        device, able = self.hardware.device, hardware_dtypes(self.hardware)
        require_known("dtype", bench.dtype, DTYPES)
        for name in bench.dtype:
            if name not in able:
                raise ConfigError(
                    f"{name} is not multiplied in hardware by {self.hardware.name}, and emulated "
                    f"rates say nothing: use {', '.join(able)}"
                )
        require_known("model", [bench.model], MODELS)
        self.shape, self.dtypes = MODELS[bench.model], list(dict.fromkeys(bench.dtype)) or able
        count = 0
        if device.type == "cuda":
            count = torch.cuda.get_device_properties(device).multi_processor_count
        self.multiprocessors = count
        self.plan = plan or plan_for(device.type, bench.quick)
        self.products = all_products(self.shape, self.plan, count)
        self.seconds: dict[str, list[list[float]]] = {
            name: [[] for _ in self.products] for name in self.dtypes
        }
        self.rounds = 0
        self.complete = False
        self.load = machine_facts(self.hardware)["load"]

    def measure(self) -> None:
        """Warm everything up, then measure round after round until the plan's time is over."""
        device = self.hardware.device
        start = time.perf_counter()
        with progress_bar() as progress:
            operands, costs = self._warm_up(progress)
            order = [
                key
                for turn in range(self.plan.turns)
                for key in costs
                if turn == 0 or self.products[key[0]].part in COMPARED
            ]
            # Each is multiplied once before it is measured, if it is repeated.
            work = {key: (n + (n > 1)) * once for key, (n, once) in costs.items()}
            round_seconds = sum(work[key] for key in order)
            left = self.plan.budget_seconds - (time.perf_counter() - start)
            affordable = max(self.plan.min_rounds, int(left / round_seconds))
            rounds = min(self.plan.max_rounds, affordable)
            task = progress.add_task("multiplying", total=rounds * round_seconds)
            for self.rounds in range(1, rounds + 1):
                for number, name in order:
                    product = self.products[number]
                    what = f"round {self.rounds} of {rounds}: {product.name}, {name}"
                    progress.update(task, description=what)
                    with fp32_products(name):
                        repeats, _ = costs[number, name]
                        found = measure(product, operands[name], repeats, device)
                    self.seconds[name][number].append(found)
                    progress.advance(task, work[number, name])
        self.complete = True

    def _warm_up(
        self, progress: Progress
    ) -> tuple[dict[str, Operands], dict[tuple[int, str], tuple[int, float]]]:
        """Operands by number format; by product and format, repeats and a product's seconds.

        The formats of one product follow each other: they are compared, too.
        """
        device, names = self.hardware.device, self.dtypes
        flops = sum(product.flops for product in self.products)
        task = progress.add_task("warming up", total=flops * len(names))
        operands = {name: make_operands(self.products, DTYPES[name], device) for name in names}
        costs = {}
        for number, product in enumerate(self.products):
            for name in names:
                with fp32_products(name):
                    once = _warm_up(make_multiply(product, operands[name]), device)
                costs[number, name] = _repeats(once, self.plan.measure_seconds), once
                progress.advance(task, product.flops)
        progress.remove_task(task)
        return operands, costs

    def result(self) -> dict[str, Any]:
        """The result so far.

        Returns:
            "complete": whether it is all that was to be measured; "machine"; and what `summarize`
            returns.
        """
        summary = summarize(self.products, self.seconds, self.shape, self.plan)
        machine = machine_facts(self.hardware)
        return {
            "complete": self.complete,
            "machine": {
                **machine,
                "multiprocessors": self.multiprocessors or None,
                "load_at_start": self.load,
            },
            "model": self.bench.model,
            "quick": self.bench.quick,
            "tokens": self.plan.tokens,
            "step_tokens": STEP_TOKENS,
            "rounds": self.rounds,
            **summary,
        }

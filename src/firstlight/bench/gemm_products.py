"""The matrix products of `firstlight bench gemm`, C [M, N] = A [M, K] @ B [K, N], and their rates.

The layout of a product is two letters as in BLAS, one for A and one for B: "n" lies in memory
row by row as it is written, "t" is stored the other way round. A linear layer with weight W
[out, in], input x [tokens, in] and gradient g [tokens, out] has three products a step:

    forward             x @ W.T   "nt"
    gradient of input   g @ W     "nn"
    gradient of weight  g.T @ x   "tn"

GPT-2's Conv1D stores W as [in, out]: x @ W "nn", g @ W.T "nt", x.T @ g "tn".
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from firstlight.hardware.device import synchronize

Layout = Literal["nn", "nt", "tn"]
Part = Literal["size", "model", "alignment", "tile", "wave"]

#: The parts whose products are there to be compared with each other.
COMPARED = ("alignment", "tile", "wave")
#: The multiples to which sizes are padded.
MULTIPLES = (8, 64, 128)
#: The size of a tile's edge around which products are measured in steps.
TILE_EDGE = 256
#: Tokens of the step whose products are added up: 4 rows of 1024.
STEP_TOKENS = 4096


@dataclass(frozen=True)
class GemmProduct:
    """One matrix product.

    Attributes:
        part: part of the benchmark.
        group: group of products that are compared: the dimension that varies, or how weights are
            stored.
        value: the size that varies within the group.
        name: name in tables.
        m: rows of A and C.
        n: columns of B and C.
        k: columns of A, rows of B.
        layout: layout of A and B in memory.
        count: number of such products in a training step; 0 outside the part "model".
    """

    part: Part
    group: str
    value: int
    name: str
    m: int
    n: int
    k: int
    layout: Layout = "nt"
    count: int = 0

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * self.m * self.n * self.k


@dataclass(frozen=True)
class GPT2Shape:
    """The sizes of a GPT-2 that its matrix products depend on."""

    hidden_size: int
    num_hidden_layers: int
    vocab_size: int = 50257


MODELS = {
    "gpt2-124m": GPT2Shape(768, 12),
    "gpt2-355m": GPT2Shape(1024, 24),
    "gpt2-774m": GPT2Shape(1280, 36),
    "gpt2-1558m": GPT2Shape(1600, 48),
}


@dataclass(frozen=True)
class GemmPlan:
    """Amount of measuring.

    Attributes:
        sizes: sizes of the square products.
        base: the aligned size of the products of the part "alignment" and "tile".
        tokens: rows of the model's products: some of a step's 4096, to save time on CPUs.
        tile_sizes: values of N around TILE_EDGE.
        measure_seconds: approximate duration of a measurement, which repeats its product.
        budget_seconds: approximate duration of all rounds.
        min_rounds: rounds at least.
        max_rounds: rounds at most.
        turns: measurements of the products of COMPARED in a round; they are small, and so are
            their differences.
        pass_bytes: sizes of the arrays that `gemm_loops` reads; none on GPUs.
        blocked_edge: rows and columns of the product that `gemm_loops` cuts into blocks.
    """

    sizes: tuple[int, ...]
    base: int
    tokens: int
    tile_sizes: tuple[int, ...]
    measure_seconds: float
    budget_seconds: float
    min_rounds: int = 3
    max_rounds: int = 9
    turns: int = 3
    pass_bytes: tuple[int, ...] = ()
    blocked_edge: int = 0


_EDGES = (248, 255, 256, 257, 264)
_STEPS = tuple(sorted({*range(128, 401, 16), *_EDGES}))
_QUICK_STEPS = tuple(sorted({*range(192, 321, 32), *_EDGES}))


def plan_for(device_type: str, quick: bool) -> GemmPlan:
    """The plan for "cuda" or for anything slower."""
    if device_type == "cuda":
        sizes = (128, 256, 512, 1024, 2048, 4096, 8192)
        if quick:
            return GemmPlan(sizes, 4096, STEP_TOKENS, _QUICK_STEPS, 0.02, 30)
        return GemmPlan((*sizes, 16384), 4096, STEP_TOKENS, _STEPS, 0.05, 150)
    if quick:
        plan = GemmPlan((128, 256, 512, 1024, 2048), 1024, 128, _QUICK_STEPS, 0.02, 35, 2, turns=2)
        return replace(plan, pass_bytes=tuple(1 << p for p in range(14, 29, 2)), blocked_edge=512)
    plan = GemmPlan((128, 256, 512, 1024, 2048, 4096), 1024, 1024, _STEPS, 0.03, 210)
    return replace(plan, pass_bytes=tuple(1 << p for p in range(14, 29)), blocked_edge=1024)


def paddings(size: int) -> dict[int, int]:
    """`size` padded to each of MULTIPLES; two may lead to the same size."""
    return {multiple: -(-size // multiple) * multiple for multiple in MULTIPLES}


def unaligned(shape: GPT2Shape, base: int) -> dict[str, int]:
    """The sizes whose padding is measured, by group."""
    return {
        "M": base + 1,
        "N": base + 1,
        "K": base + 1,
        "hidden": shape.hidden_size + 1,
        "vocabulary": shape.vocab_size,
    }


def layer_products(
    name: str, tokens: int, inputs: int, outputs: int, *, conv1d: bool = False
) -> list[tuple[str, int, int, int, Layout]]:
    """The three products of a layer in a training step: name, M, N, K, layout."""
    forward: Layout = "nn" if conv1d else "nt"
    gradient: Layout = "nt" if conv1d else "nn"
    rows, columns = (inputs, outputs) if conv1d else (outputs, inputs)
    return [
        (f"{name} forward", tokens, outputs, inputs, forward),
        (f"{name} grad input", tokens, inputs, outputs, gradient),
        (f"{name} grad weight", rows, columns, tokens, "tn"),
    ]


def model_products(shape: GPT2Shape, tokens: int) -> list[GemmProduct]:
    """The products of one training step (attention's own between queries, keys and values are
    left out): the layers as Conv1D and as linear layers, the head for each vocabulary."""
    C = shape.hidden_size
    layers = {
        "qkv": (C, 3 * C),
        "attention out": (C, C),
        "mlp up": (C, 4 * C),
        "mlp down": (4 * C, C),
    }
    products = [
        GemmProduct("model", group, 0, *one, count=shape.num_hidden_layers)
        for group in ("conv1d", "linear")
        for name, (inputs, outputs) in layers.items()
        for one in layer_products(name, tokens, inputs, outputs, conv1d=group == "conv1d")
    ]
    vocabulary = shape.vocab_size
    heads = {
        rows: layer_products(f"head {rows}", tokens, C, rows)
        for rows in sorted({vocabulary, *paddings(vocabulary).values()})
    }
    # Same products of different sizes beside each other: the load of the machine drifts.
    products += [
        GemmProduct("model", "vocabulary", rows, *heads[rows][one], count=1)
        for one in range(3)
        for rows in heads
    ]
    return products


def alignment_products(shape: GPT2Shape, base: int, tokens: int) -> list[GemmProduct]:
    """Sizes on and off multiples: each dimension alone, in the layout "nt", where K is the inner
    dimension of A and B in memory, and N of C; and a model's hidden size in its MLP."""
    off = unaligned(shape, base)
    products = []
    for group in ("M", "N", "K"):
        for size in (base, off[group], *paddings(off[group]).values()):
            m, n, k = (size if group == which else base for which in ("M", "N", "K"))
            products.append(GemmProduct("alignment", group, size, f"{group} = {size}", m, n, k))
    hidden = off["hidden"]
    layers = {
        size: layer_products(f"hidden = {size}: up", tokens, size, 4 * size)
        for size in (hidden - 1, hidden, *paddings(hidden).values())
    }
    products += [
        GemmProduct("alignment", "hidden", size, *layers[size][one])
        for one in range(3)
        for size in layers
    ]
    return products


def tile_products(base: int, sizes: Sequence[int]) -> list[GemmProduct]:
    """N in steps around a tile's edge."""
    return [GemmProduct("tile", "N", n, f"N = {n}", base, n, base) for n in sizes]


def wave_products(multiprocessors: int) -> list[GemmProduct]:
    """Products with as many tiles of 128 x 256 as a GPU has multiprocessors (SMs), one fewer, one
    more, twice as many, and twice as many and one more."""
    one, two = multiprocessors, 2 * multiprocessors
    return [
        GemmProduct("wave", "tiles", count, f"{count} tiles", 128 * count, 256, 4096)
        for count in (one, one - 1, one + 1, two, two + 1)
    ]


def all_products(shape: GPT2Shape, plan: GemmPlan, multiprocessors: int = 0) -> list[GemmProduct]:
    """Everything that a plan measures, in its order."""
    squares = [GemmProduct("size", "", size, str(size), size, size, size) for size in plan.sizes]
    products = [
        *squares,
        *model_products(shape, plan.tokens),
        *alignment_products(shape, plan.base, plan.tokens),
        *tile_products(plan.base, plan.tile_sizes),
    ]
    return products + wave_products(multiprocessors) if multiprocessors else products


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
    """A function that multiplies once, in the product's layout, into C; in fp8, whose units support
    only the layout "nt", into new memory."""
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


def warm_up(multiply: Callable[[], object], device: torch.device) -> float:
    """Build kernels and touch memory; the seconds that one product takes, roughly."""
    multiply()
    best = math.inf
    for _ in range(3):
        best = min(best, _seconds(multiply, 1, device))
        if best > 0.1:
            break
    return best


def repeats_of(product_seconds: float, measure_seconds: float) -> int:
    """Number of products that fill a measurement."""
    return min(_MOST_REPEATS, max(1, math.ceil(measure_seconds / max(product_seconds, 1e-9))))


def measure_product(
    product: GemmProduct, operands: Operands, repeats: int, device: torch.device
) -> float:
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
        repeats_of(warm_up(make_multiply(one, operands), device), measure_seconds)
        for one in products
    ]
    rates: list[list[float]] = [[] for _ in products]
    for _ in range(rounds):
        for these, one, times in zip(rates, products, repeats, strict=True):
            these.append(one.flops / measure_product(one, operands, times, device))
    return rates


def ceiling(device: torch.device, dtype: torch.dtype, *, rounds: int = 5) -> float:
    """FLOP/s that matrix products reach at best on this machine: the base of shares.

    The best single measurement of three large products in two layouts, in interleaved rounds: other
    programs on the machine can only lower a rate. Takes a few seconds on two CPU cores. fp32
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

"""The matrix products of `firstlight bench gemm`, C [M, N] = A [M, K] @ B [K, N], and their rates.

The layout of a product is two letters as in BLAS, one for A and one for B: "n" is stored in memory
row by row, "t" is the transposed view of a matrix that is. A linear layer with weight W [out, in],
input x [tokens, in] and gradient g [tokens, out] has three products per step:

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

#: The parts whose products are compared with each other.
COMPARED = ("alignment", "tile", "wave")
#: The multiples to which sizes are padded.
MULTIPLES = (8, 64, 128)
#: The size of a tile's edge: the products of the part "tile" have values of N around it.
TILE_EDGE = 256
#: Tokens of the training step whose products are added up: 4 sequences of 1024.
STEP_TOKENS = 4096


@dataclass(frozen=True)
class GemmProduct:
    """One matrix product.

    Attributes:
        part: part of the benchmark.
        group: group of products that are compared, named after the dimension that varies or after
            the storage of weights ("conv1d", "linear").
        value: size of the dimension that varies; 0 if none does.
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
        """Number of multiplications and additions."""
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
        base: the aligned size of the products of the parts "alignment" and "tile".
        tokens: tokens of the model's products, on CPUs fewer than STEP_TOKENS to save time.
        tile_sizes: values of N around TILE_EDGE.
        measure_seconds: approximate duration of a measurement, which repeats its product.
        budget_seconds: approximate duration of all rounds.
        min_rounds: minimum number of rounds.
        max_rounds: maximum number of rounds.
        turns: measurements of the products of COMPARED in a round. There are more of them, because
            the products are small and so are the differences between them.
        pass_bytes: sizes in bytes of the arrays that `gemm` reads; () on GPUs.
        blocked_edge: rows and columns of the product that `gemm` cuts into blocks; 0 on GPUs.
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
    """The plan for the device type "cuda", or for any other, which is assumed to be slower."""
    if device_type == "cuda":
        sizes = (128, 256, 512, 1024, 2048, 4096, 8192)
        if quick:
            return GemmPlan(
                sizes, 4096, STEP_TOKENS, _QUICK_STEPS, measure_seconds=0.02, budget_seconds=30
            )
        return GemmPlan(
            (*sizes, 16384), 4096, STEP_TOKENS, _STEPS, measure_seconds=0.05, budget_seconds=150
        )
    if quick:
        plan = GemmPlan(
            (128, 256, 512, 1024, 2048),
            1024,
            128,
            _QUICK_STEPS,
            measure_seconds=0.02,
            budget_seconds=35,
            min_rounds=2,
            turns=2,
        )
        return replace(plan, pass_bytes=tuple(1 << p for p in range(14, 29, 2)), blocked_edge=512)
    plan = GemmPlan(
        (128, 256, 512, 1024, 2048, 4096),
        1024,
        1024,
        _STEPS,
        measure_seconds=0.03,
        budget_seconds=210,
    )
    return replace(plan, pass_bytes=tuple(1 << p for p in range(14, 29)), blocked_edge=1024)


def paddings(size: int) -> dict[int, int]:
    """`size` padded to each of MULTIPLES, by multiple; several may have the same padded size."""
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
    """The three products of a linear layer in a training step: name, M, N, K, layout.

    The weight is stored as [inputs, outputs] if `conv1d`, otherwise as [outputs, inputs].
    """
    forward: Layout = "nn" if conv1d else "nt"
    gradient: Layout = "nt" if conv1d else "nn"
    rows, columns = (inputs, outputs) if conv1d else (outputs, inputs)
    return [
        (f"{name} forward", tokens, outputs, inputs, forward),
        (f"{name} grad input", tokens, inputs, outputs, gradient),
        (f"{name} grad weight", rows, columns, tokens, "tn"),
    ]


def model_products(shape: GPT2Shape, tokens: int) -> list[GemmProduct]:
    """The products of one training step, without those inside attention: the layers as Conv1D and
    as linear layers, the head for each vocabulary size."""
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
    # The sizes of one product follow each other, since the load of the machine drifts.
    products += [
        GemmProduct("model", "vocabulary", rows, *heads[rows][one], count=1)
        for one in range(3)
        for rows in heads
    ]
    return products


def alignment_products(shape: GPT2Shape, base: int, tokens: int) -> list[GemmProduct]:
    """Aligned and unaligned sizes of each dimension alone, and of a model's hidden size in its MLP.

    In the layout "nt", K is the contiguous dimension of A and B in memory, and N that of C.
    """
    off = unaligned(shape, base)
    products = []
    for group in ("M", "N", "K"):
        for size in (base, off[group], *paddings(off[group]).values()):
            m, n, k = (size if group == which else base for which in ("M", "N", "K"))
            products.append(
                GemmProduct("alignment", group, size, f"{group} = {size}", m=m, n=n, k=k)
            )
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
    """Products [base, N, base], with N in steps around a tile's edge."""
    return [GemmProduct("tile", "N", n, f"N = {n}", m=base, n=n, k=base) for n in sizes]


def wave_products(multiprocessors: int) -> list[GemmProduct]:
    """Products of n, n - 1, n + 1, 2 n and 2 n + 1 tiles of 128 x 256, for a GPU with n
    multiprocessors (SMs)."""
    one, two = multiprocessors, 2 * multiprocessors
    return [
        GemmProduct("wave", "tiles", count, f"{count} tiles", m=128 * count, n=256, k=4096)
        for count in (one, one - 1, one + 1, two, two + 1)
    ]


def all_products(shape: GPT2Shape, plan: GemmPlan, multiprocessors: int = 0) -> list[GemmProduct]:
    """All products of a plan, in the order of measurement; waves only with `multiprocessors`."""
    squares = [
        GemmProduct("size", "", size, str(size), m=size, n=size, k=size) for size in plan.sizes
    ]
    products = [
        *squares,
        *model_products(shape, plan.tokens),
        *alignment_products(shape, plan.base, plan.tokens),
        *tile_products(plan.base, plan.tile_sizes),
    ]
    return products + wave_products(multiprocessors) if multiprocessors else products


#: Number formats by their names in recipes. For tf32, a GPU rounds the factors of fp32 products to
#: 10 bits of mantissa.
DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}

#: fp8, multiplied by `torch._scaled_mm`. It supports only the layout "nt" and multiples of 16, so
#: the products of COMPARED are not measured in it.
FP8 = torch.float8_e4m3fn

#: (M, N, K) of products that are large enough to reach the ceiling of a CPU, and of a GPU.
_LARGE_CPU = ((2048, 2048, 2048), (4096, 4096, 1024), (1024, 3072, 768))

_LARGE_GPU = ((4096, 4096, 4096), (8192, 8192, 8192), (4096, 3072, 768))

#: Maximum number of times that a measurement repeats its product.
_MOST_REPEATS = 10_000

#: Flat memory of A, B and C.
Operands = tuple[Tensor, Tensor, Tensor]


@contextlib.contextmanager
def fp32_products(name: str) -> Iterator[None]:
    """Compute fp32 products in full, or as TF32 if `name` is "tf32"; torch's global setting is
    restored at the end."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def make_operands(
    products: Sequence[GemmProduct], dtype: torch.dtype, device: torch.device
) -> Operands:
    """Flat tensors for A, B and C, large enough for each of `products`; A and B are random.

    C has the same dtype, except for fp8: bf16.
    """
    sizes = [
        max(sizes)
        for sizes in zip(*((p.m * p.k, p.k * p.n, p.m * p.n) for p in products), strict=True)
    ]
    # torch draws no random fp8 numbers, and the products of fp8 are written as bf16.
    drawn = torch.bfloat16 if dtype == FP8 else dtype
    a, b, c = (torch.zeros(size, dtype=drawn, device=device) for size in sizes)
    # Random: a GPU multiplies zeros or ones with less power, and therefore at a higher clock rate.
    return a.uniform_(-1, 1).to(dtype), b.uniform_(-1, 1).to(dtype), c


def make_multiply(product: GemmProduct, operands: Operands) -> Callable[[], object]:
    """A function that multiplies once, in the product's layout, into C. In fp8, where only the
    layout "nt" works, it allocates the result."""
    m = product.m
    n = product.n
    k = product.k
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
    """Mean seconds of one product over `repeats` products."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        multiply()
    synchronize(device)
    return (time.perf_counter() - start) / repeats


def warm_up(multiply: Callable[[], object], device: torch.device) -> float:
    """Build kernels and touch memory; returns the approximate seconds of one product."""
    multiply()
    best = math.inf
    for _ in range(3):
        best = min(best, _seconds(multiply, 1, device))
        if best > 0.1:
            break
    return best


def repeats_of(product_seconds: float, measure_seconds: float) -> int:
    """Number of products of `product_seconds` in a measurement of `measure_seconds`."""
    return min(_MOST_REPEATS, max(1, math.ceil(measure_seconds / max(product_seconds, 1e-9))))


def measure_product(
    product: GemmProduct, operands: Operands, repeats: int, device: torch.device
) -> float:
    """Mean seconds of one product over `repeats`; if there are several, one more runs before."""
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
    """The FLOP/s of each product, one value for each of `rounds` rounds over all products."""
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
    """The highest FLOP/s that matrix products reach on this machine, the base of utilization.

    It is the best single measurement of three large products in two layouts, because other programs
    on the machine can only lower a rate. The measurement takes a few seconds on two CPU cores. fp32
    products on GPUs use the current torch.get_float32_matmul_precision().
    """
    shapes = _LARGE_GPU if device.type == "cuda" else _LARGE_CPU
    layouts: tuple[Layout, ...] = ("nt", "nn")
    products = [
        GemmProduct("size", "", n, f"{m} x {n} x {k}", m=m, n=n, k=k, layout=layout)
        for m, n, k in shapes
        for layout in layouts
    ]
    return max(
        max(rates) for rates in product_rates(products, dtype, device, rounds, measure_seconds=0.03)
    )

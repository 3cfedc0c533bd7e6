"""`firstlight bench gemm`: measure this machine's matrix-product rate by shape and alignment.

The operands are random and are created once per number format. Each result overwrites the previous
one, so that no memory is allocated during a measurement. Products that take less time than a
measurement should last are repeated with the same operands. One untimed product runs before the
repetitions, so operands that fit into the caches are already cached. A round measures every product
once, except for products in `COMPARED`, which are measured `GemmPlan.turns` times. Tables show the
median. Products to be compared are measured in quick succession, so that other load on the machine
affects all of them equally. The ratio of the times of two products is the median over pairs of such
measurements.

A product is C [M, N] = A [M, K] @ B [K, N]. As in BLAS, a layout consists of one letter for A and
one for B: "n" is a matrix stored row by row, and "t" is the transposed view of such a matrix. A
linear layer with weight W [out, in], input x [tokens, in] and gradient g [tokens, out] has three
products per step:

    forward             x @ W.T   "nt"
    gradient of input   g @ W     "nn"
    gradient of weight  g.T @ x   "tn"

GPT-2's Conv1D stores W as [in, out], so its products are x @ W "nn", g @ W.T "nt" and x.T @ g "tn".

This module first defines the products and the code that measures a single product, followed by
additional measurements for CPUs. The benchmark run, the summary of its results and the picture come
last.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from rich.progress import Progress
from torch import Tensor

from firstlight.bench.display import new_figure, png_of
from firstlight.bench.models import OLD_NAMES
from firstlight.bench.rows import GemmBench, require_known
from firstlight.console import progress_bar
from firstlight.errors import ConfigError
from firstlight.hardware.device import (
    Hardware,
    find_hardware,
    machine_facts,
    single_threaded_pool,
    synchronize,
)

Layout = Literal["nn", "nt", "tn"]
Part = Literal["size", "model", "alignment", "tile", "wave"]

#: Parts of the benchmark whose products are compared with each other.
COMPARED = ("alignment", "tile", "wave")
#: Sizes are padded to multiples of these numbers.
MULTIPLES = (8, 64, 128)
#: Edge length of a tile. Products in the part "tile" have values of N close to this length.
TILE_EDGE = 256
#: Number of tokens in the training step for which the times of all products are summed: 4 sequences
#: of 1024 tokens.
STEP_TOKENS = 4096


@dataclass(frozen=True)
class GemmProduct:
    """One matrix product.

    Attributes:
        part: part of the benchmark to which the product belongs.
        group: name of the group of products to compare with each other. It names the dimension that
            varies, or the storage of the weights ("conv1d" or "linear").
        value: size of the dimension that varies; 0 if no dimension varies.
        name: name used in tables.
        m: number of rows of A and C.
        n: number of columns of B and C.
        k: number of columns of A and rows of B.
        layout: layout of A and B in memory.
        count: number of times that the product occurs in a training step; 0 outside the part
            "model".
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
        """Number of floating-point operations (multiplications and additions)."""
        return 2 * self.m * self.n * self.k


@dataclass(frozen=True)
class GPT2Shape:
    """Dimensions of a GPT-2 model that determine the shapes of its matrix products."""

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
    """The sizes of the measured products, the durations of the measurements and the number of
    repetitions.

    Attributes:
        sizes: sizes of the square products.
        base: aligned size of the products in the parts "alignment" and "tile".
        tokens: number of tokens in the model's products. On CPUs, it is smaller than STEP_TOKENS to
            save time.
        tile_sizes: values of N around TILE_EDGE.
        measure_seconds: approximate duration of one measurement, in which a product is repeated.
        budget_seconds: approximate duration of all rounds.
        min_rounds: minimum number of rounds.
        max_rounds: maximum number of rounds.
        turns: number of measurements per round for products in COMPARED. Several measurements are
            needed, because these products take little time and differ only slightly.
        pass_bytes: sizes, in bytes, of the arrays whose read rate is measured; empty on GPUs.
        blocked_edge: number of rows and columns of the product that is split into blocks; 0 on
            GPUs.
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
    """Return the plan for a device type. Devices other than "cuda" are assumed to be slower."""
    sizes = tuple(1 << power for power in range(7, 15))
    if device_type == "cuda":
        plan = GemmPlan(sizes, 4096, STEP_TOKENS, _STEPS, measure_seconds=0.05, budget_seconds=150)
        smaller: dict[str, Any] = {"measure_seconds": 0.02, "budget_seconds": 30}
    else:
        plan = GemmPlan(
            sizes[:-2],
            1024,
            1024,
            _STEPS,
            measure_seconds=0.03,
            budget_seconds=210,
            pass_bytes=tuple(1 << power for power in range(14, 29)),
            blocked_edge=1024,
        )
        smaller = {
            "tokens": 128,
            "measure_seconds": 0.02,
            "budget_seconds": 35,
            "min_rounds": 2,
            "turns": 2,
            "pass_bytes": plan.pass_bytes[::2],
            "blocked_edge": 512,
        }
    if not quick:
        return plan
    return replace(plan, sizes=plan.sizes[:-1], tile_sizes=_QUICK_STEPS, **smaller)


def paddings(size: int) -> dict[int, int]:
    """Pad `size` to a multiple of each number in MULTIPLES. Return the padded sizes, keyed by these
    numbers. Some of the padded sizes can be equal.
    """
    return {multiple: -(-size // multiple) * multiple for multiple in MULTIPLES}


def unaligned(shape: GPT2Shape, base: int) -> dict[str, int]:
    """Return the unpadded sizes for which the effect of padding is measured, keyed by group."""
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
    """Return the three products of a linear layer in a training step, as (name, M, N, K, layout).

    The weight is stored as [inputs, outputs] if `conv1d` is True, otherwise as [outputs, inputs].
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
    """Return the products of one training step, except for the products inside attention. Each
    layer is included twice, once as Conv1D and once as a linear layer. The head is included once
    for each vocabulary size."""
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
    # All sizes of a product are measured consecutively, because other load on the machine changes
    # slowly.
    products += [
        GemmProduct("model", "vocabulary", rows, *heads[rows][one], count=1)
        for one in range(3)
        for rows in heads
    ]
    return products


def alignment_products(shape: GPT2Shape, base: int, tokens: int) -> list[GemmProduct]:
    """Return the products that show the effect of alignment: square products in which one dimension
    is changed to aligned and unaligned sizes, and the products of a model's MLP with aligned and
    unaligned hidden sizes.

    The layout is "nt", in which K is the contiguous dimension of A and B, and N is the contiguous
    dimension of C.
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
    """Return products with M = K = `base`, and with values of N close to the edge length of a
    tile."""
    return [GemmProduct("tile", "N", n, f"N = {n}", m=base, n=n, k=base) for n in sizes]


def wave_products(multiprocessors: int) -> list[GemmProduct]:
    """Return products with n, n - 1, n + 1, 2 n and 2 n + 1 tiles of 128 x 256, for a GPU with n
    multiprocessors (SMs).
    """
    one, two = multiprocessors, 2 * multiprocessors
    return [
        GemmProduct("wave", "tiles", count, f"{count} tiles", m=128 * count, n=256, k=4096)
        for count in (one, one - 1, one + 1, two, two + 1)
    ]


def all_products(shape: GPT2Shape, plan: GemmPlan, multiprocessors: int = 0) -> list[GemmProduct]:
    """Return all products of a plan in the order of measurement. The products of `wave_products`
    are included only if `multiprocessors` is not 0.
    """
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


#: Dtypes, keyed by their names in recipes. In tf32, a GPU rounds the operands of fp32 products to
#: 10 mantissa bits.
DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}

#: Dtype of fp8 products, which are computed by `torch._scaled_mm`. It supports only the layout "nt"
#: and sizes that are multiples of 16, so the products in COMPARED are not measured in fp8.
FP8 = torch.float8_e4m3fn

#: Maximum number of repetitions of a product in a measurement.
_MOST_REPEATS = 10_000

#: Flat buffers for A, B and C.
Operands = tuple[Tensor, Tensor, Tensor]


@contextlib.contextmanager
def fp32_products(name: str) -> Iterator[None]:
    """Context manager that selects the precision of fp32 products: TF32 if `name` is "tf32", and
    otherwise full precision. torch's global setting is restored on exit.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def make_operands(
    products: Sequence[GemmProduct], dtype: torch.dtype, device: torch.device
) -> Operands:
    """Create flat tensors for A, B and C that are large enough for each of `products`.

    A and B contain random numbers of the given dtype. C has the same dtype or, for fp8, bf16.
    """
    sizes = [
        max(sizes)
        for sizes in zip(*((p.m * p.k, p.k * p.n, p.m * p.n) for p in products), strict=True)
    ]
    # For fp8, the numbers are drawn in bf16 and converted, because torch can't generate random fp8
    # numbers. The results of fp8 products are in bf16.
    drawn = torch.bfloat16 if dtype == FP8 else dtype
    a, b, c = (torch.zeros(size, dtype=drawn, device=device) for size in sizes)
    # The numbers are random, because multiplying zeros or ones takes less power, which would let a
    # GPU run at a higher clock rate.
    return a.uniform_(-1, 1).to(dtype), b.uniform_(-1, 1).to(dtype), c


def make_multiply(product: GemmProduct, operands: Operands) -> Callable[[], object]:
    """Return a function that computes a product once, in the layout that the product specifies, and
    writes the result to C. With fp8, only the layout "nt" is supported, and each call allocates
    memory for the result.
    """
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
    """Compute a product `repeats` times, and return the mean time per product in seconds."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        multiply()
    synchronize(device)
    return (time.perf_counter() - start) / repeats


def warm_up(multiply: Callable[[], object], device: torch.device) -> float:
    """Compute a product a few times, so that its kernels are built and its memory is mapped. Return
    the approximate time per product in seconds."""
    multiply()
    best = math.inf
    for _ in range(3):
        best = min(best, _seconds(multiply, 1, device))
        if best > 0.1:
            break
    return best


def repeats_of(product_seconds: float, measure_seconds: float) -> int:
    """Return the number of times that a product is repeated in one measurement.

    Args:
        product_seconds: duration of one product.
        measure_seconds: duration of the measurement.
    """
    return min(_MOST_REPEATS, max(1, math.ceil(measure_seconds / max(product_seconds, 1e-9))))


def measure_product(
    product: GemmProduct, operands: Operands, repeats: int, device: torch.device
) -> float:
    """Return the mean time per product, in seconds, over `repeats` products. If `repeats` is
    greater than 1, one untimed product runs first.
    """
    multiply = make_multiply(product, operands)
    if repeats > 1:
        multiply()
    return _seconds(multiply, repeats, device)


#: Folder in which Linux describes the caches of the first core.
CACHE_FOLDER = Path("/sys/devices/system/cpu/cpu0/cache")

#: Minimum number of bytes that one call reads.
_CALL_BYTES = 1 << 22

#: Number of measurements for each row of a table. The table shows the median.
_REPEATS = 5

#: Number of measurements for each number of concurrent products. This can be larger than
#: `_REPEATS`, because each measurement takes only a few milliseconds.
_WAVE_REPEATS = 15


def cache_sizes(folder: Path = CACHE_FOLDER) -> dict[str, int]:
    """Return the size of each data cache in bytes, such as {"L1": 32768}. If the system does not
    list any caches, return an empty dict.
    """
    found = {}
    for index in sorted(folder.glob("index*")):
        try:
            kind, level, size = (
                (index / name).read_text(encoding="ascii").strip()
                for name in ("type", "level", "size")
            )
        except OSError:  # Some ARM machines list caches without their sizes.
            continue
        if kind != "Instruction":
            found[f"L{level}"] = int(size.removesuffix("K")) * 1024
    return found


def sum_passes(data: Tensor) -> tuple[Callable[[], Tensor], int]:
    """Prepare a function that sums the array `data`, [numbers], several times.

    Returns:
        A function that sums the array in several passes and returns the sum of each pass, [passes];
        and the number of passes. All passes of a call read about `_CALL_BYTES` in total. An array
        larger than that is read once.
    """
    passes = max(1, _CALL_BYTES // data.nbytes)
    repeated, sums = data.expand(passes, -1), torch.empty(passes)
    return lambda: torch.sum(repeated, 1, out=sums), passes


def multiply_rows(a: Tensor, b: Tensor, out: Tensor, rows: int) -> None:
    """Write a @ b into `out`, in blocks of `rows` rows. All tensors have shape [edge, edge]."""
    for i in range(0, len(a), rows):
        torch.mm(a[i : i + rows], b, out=out[i : i + rows])


def multiply_squares(a: Tensor, b: Tensor, out: Tensor, block: int) -> None:
    """Write a @ b into `out`, in blocks of `block` rows and columns. All tensors have shape [edge,
    edge]."""
    out.zero_()
    for i in range(0, len(a), block):
        for j in range(0, len(a), block):
            part = out[i : i + block, j : j + block]
            for k in range(0, len(a), block):
                part.addmm_(a[i : i + block, k : k + block], b[k : k + block, j : j + block])


#: Ways to split a product into blocks, each with the function that implements it and the smallest
#: block size. Block sizes are powers of 2. With square blocks smaller than 32, the overhead of the
#: calls would dominate.
_CUTS = {"row blocks": (multiply_rows, 1), "square blocks": (multiply_squares, 32)}


def measure_loops(plan: GemmPlan) -> dict[str, Any]:
    """Measure how fast one thread reads arrays of different sizes and computes a product that is
    split into blocks. Also measure how long several concurrent products take on all threads.

    Args:
        plan: plan that specifies `pass_bytes`, `blocked_edge` (a power of 2) and `measure_seconds`.

    Returns:
        - "caches": sizes of the data caches (see `cache_sizes`)
        - "passes": for each array, "bytes" and "bytes_per_second"
        - "blocks": for each block size, "cut" ("row blocks" or "square blocks"), "block" (number of
          rows of a block) and "flops_per_second"
        - "edge": number of rows and columns of the product that is split into blocks
        - "waves": times of several concurrent products (see `measure_waves`)

        Rates are medians. Each rate is accompanied by its "lowest" and "highest" value.
    """
    edge, measure_seconds = plan.blocked_edge, plan.measure_seconds
    waves = measure_waves(edge // 2, torch.get_num_threads())
    with _one_thread():
        passes = []
        for size in plan.pass_bytes:
            call, count = sum_passes(torch.rand(size // 4))
            rates = _rates(call, count * size, measure_seconds)
            passes.append({"bytes": size, **_median("bytes_per_second", rates)})
        a = torch.rand(edge, edge)
        b = torch.rand(edge, edge)
        out = torch.empty(edge, edge)
        blocks = []
        for cut, (multiply, block) in _CUTS.items():
            while block <= edge:
                rates = _rates(lambda: multiply(a, b, out, block), 2 * edge**3, measure_seconds)  # noqa: B023
                row = {"cut": cut, "block": block, **_median("flops_per_second", rates)}
                blocks.append(row)
                block *= 2
    return {
        "caches": cache_sizes(),
        "passes": passes,
        "blocks": blocks,
        "edge": edge,
        "waves": waves,
    }


def measure_waves(edge: int, threads: int) -> dict[str, Any]:
    """Measure how long several concurrent products take, relative to the time of a single product.

    Args:
        edge: number of rows and columns of each product.
        threads: number of threads. Each thread computes one product at a time.

    Returns:
        A dict with the keys "threads", "edge" and "rows". Each row has "products", the number of
        concurrent products, and "time_ratio", the median ratio of two consecutive measurements,
        with "lowest" and "highest". One wave consists of one product per thread. There is one row
        for a single product, and there are two rows for each number of waves from one to four. The
        first of these has exactly enough products to fill the waves, and the second has one more
        product.
    """
    counts = sorted({n for wave in range(1, 5) for n in (wave * threads, wave * threads + 1)} | {1})
    a = torch.rand(edge, edge)
    b = torch.rand(edge, edge)
    outs = torch.empty(counts[-1], edge, edge)
    with single_threaded_pool(threads, "wave") as pool:

        def seconds(count: int) -> float:
            start = time.perf_counter()
            for _ in pool.map(lambda out: torch.mm(a, b, out=out), outs[:count]):
                pass
            return time.perf_counter() - start

        # The time of the first call is not used, because it includes starting the pool's threads.
        seconds(counts[-1])
        rows = [
            {
                "products": count,
                **_median(
                    "time_ratio", [seconds(count) / seconds(1) for _ in range(_WAVE_REPEATS)]
                ),
            }
            for count in counts
        ]
    return {"threads": threads, "edge": edge, "rows": rows}


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _rates(call: Callable[[], object], work: int, measure_seconds: float) -> list[float]:
    """Measure a function `_REPEATS` times, after an untimed call. Return the work per second of
    each measurement.

    Args:
        call: function to measure.
        work: amount of work that one call does, in bytes or FLOPs.
        measure_seconds: minimum duration of a measurement.
    """
    call()
    found = []
    for _ in range(_REPEATS):
        calls, start = 0, time.perf_counter()
        while not calls or time.perf_counter() - start < measure_seconds:
            call()
            calls += 1
        found.append(calls * work / (time.perf_counter() - start))
    return found


def _median(name: str, rates: Sequence[float]) -> dict[str, float]:
    return {name: statistics.median(rates), "lowest": min(rates), "highest": max(rates)}


def draw_loops(loops: Mapping[str, Any], passes: Any, blocks: Any, waves: Any) -> None:
    """Draw the result of `measure_loops`.

    Args:
        loops: the result of `measure_loops`.
        passes: matplotlib axes for the rates at which arrays are read, and for the sizes of the
            caches.
        blocks: matplotlib axes for the rates of products that are split into blocks.
        waves: matplotlib axes for the times of several concurrent products.
    """
    rows = loops["passes"]
    _draw_medians(passes, rows, "bytes", "bytes_per_second", color="C0", label="passes, fp32")
    for name, size in loops["caches"].items():
        passes.axvline(size, color="black", linestyle="--", linewidth=0.8)
        passes.annotate(name, (size, 0.02), xycoords=("data", "axes fraction"))
    passes.set_xscale("log", base=2)
    passes.set(xlabel="array size in bytes, read by one thread", ylabel="GB/s", ylim=(0, None))
    for number, cut in enumerate(_CUTS):
        these = [row for row in loops["blocks"] if row["cut"] == cut]
        _draw_medians(blocks, these, "block", "flops_per_second", color=f"C{number}", label=cut)
    blocks.set_xscale("log", base=2)
    edge = loops["edge"]
    blocks.set(
        xlabel=f"rows per block ({edge} is the full product), one thread",
        ylabel="GFLOP/s",
        ylim=(0, None),
    )
    blocks.legend()
    found = loops["waves"]
    places = [row["products"] for row in found["rows"]]
    _draw_medians(waves, found["rows"], "products", "time_ratio", color="C0", label="time", unit=1)
    waves.plot(
        places,
        [-(-place // found["threads"]) for place in places],
        color="black",
        linestyle="--",
        linewidth=0.8,
    )
    waves.set(
        xlabel=f"concurrent products, each on one of {found['threads']} threads",
        ylabel="time / time of a single product (dashed: waves)",
        ylim=(0, None),
    )


def _draw_medians(
    axes: Any,
    rows: Sequence[Mapping[str, Any]],
    x: str,
    y: str,
    *,
    color: str,
    label: str,
    unit: float = 1e9,
) -> None:
    places = [row[x] for row in rows]
    axes.plot(places, [row[y] / unit for row in rows], "o-", color=color, label=label)
    low, high = ([row[end] / unit for row in rows] for end in ("lowest", "highest"))
    axes.fill_between(places, low, high, color=color, alpha=0.2)


def hardware_dtypes(hardware: Hardware) -> list[str]:
    """Return the names of the DTYPES for which the device has hardware support. "fp32" is always
    included.
    """
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


class GemmRun:
    """A run of the benchmark. The results measured so far can be read at any time.

    Attributes:
        dtypes: names of the DTYPES to measure.
        products: all products.
        seconds: seconds per product in each measurement, keyed by dtype and by index of the
            product.
        rounds: number of rounds that have started.
        loops: result of `measure_loops`; None until it is measured, and always None on GPUs.
        complete: True once everything has been measured.

    Raises:
        ConfigError: a name is unknown, or the device has no hardware support for a dtype.
    """

    def __init__(self, bench: GemmBench, plan: GemmPlan | None = None) -> None:
        bench = replace(bench, model=OLD_NAMES.get(bench.model, bench.model))
        self.bench, self.hardware = bench, find_hardware(bench.device)
        device, able = self.hardware.device, hardware_dtypes(self.hardware)
        require_known("dtype", bench.dtype, DTYPES)
        for name in bench.dtype:
            if name not in able:
                raise ConfigError(
                    f"{self.hardware.name} has no hardware support for {name} products, and the "
                    f"rates of emulated products are meaningless: use {', '.join(able)}"
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
        self.loops: dict[str, Any] | None = None
        self.complete = False
        self.load = machine_facts(self.hardware)["load"]

    def measure(self) -> None:
        """Run all products once to warm up. Then measure in rounds until the plan's time budget is
        used up."""
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
            # If a product is repeated, an additional, untimed product runs before the measurement.
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
                        found = measure_product(product, operands[name], repeats, device)
                    self.seconds[name][number].append(found)
                    progress.advance(task, work[number, name])
            if self.plan.pass_bytes:
                progress.update(task, description="passes, blocks and waves")
                self.loops = measure_loops(self.plan)
        self.complete = True

    def _warm_up(
        self, progress: Progress
    ) -> tuple[dict[str, Operands], dict[tuple[int, str], tuple[int, float]]]:
        """Run all products once.

        All dtypes of a product are measured consecutively, because they are also compared with each
        other.

        Returns:
            Two dicts. The first contains the operands, keyed by dtype. The second contains pairs
            (number of repetitions, seconds per product), keyed by (index of the product, dtype) in
            the order of measurement.
        """
        device, names = self.hardware.device, self.dtypes
        flops = sum(product.flops for product in self.products)
        task = progress.add_task("warming up", total=flops * len(names))
        operands = {name: make_operands(self.products, DTYPES[name], device) for name in names}
        costs = {}
        for number, product in enumerate(self.products):
            for name in names:
                with fp32_products(name):
                    once = warm_up(make_multiply(product, operands[name]), device)
                costs[number, name] = repeats_of(once, self.plan.measure_seconds), once
                progress.advance(task, product.flops)
        progress.remove_task(task)
        return operands, costs

    def result(self) -> dict[str, Any]:
        """Return the results measured so far.

        Returns:
            A dict with the keys "complete" (False while measurements are missing), "machine",
            "model", "quick", "tokens", "step_tokens", "rounds" and "loops", and the keys of the
            result of `summarize`.
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
            "loops": self.loops,
        }


#: Products with fewer FLOPs are ignored when the ceiling (the highest rate) is determined, because
#: their operands are read from a cache.
_CEILING_FLOPS = 1e9

#: Seconds per product in each measurement for one dtype, keyed by product.
Times = Mapping[GemmProduct, Sequence[float]]


def summarize(
    products: Sequence[GemmProduct],
    seconds: Mapping[str, Sequence[Sequence[float]]],
    shape: GPT2Shape,
    plan: GemmPlan,
) -> dict[str, Any]:
    """Return the rates and ratios of the measured products. Products that were not measured are
    omitted.

    Args:
        products: all products.
        seconds: seconds per product in each measurement, keyed by dtype and index of the product.
        shape: shape of the model.
        plan: plan of the measurements.

    Returns:
        - "ceilings": for each dtype, the highest FLOP/s of a large product, or of any product if
          there are no large products
        - "rows": for each product and dtype, the times in seconds; the median, the lowest and the
          highest FLOP/s; and the median as a fraction of the ceiling
        - "step": the result of `step_times`
        - "padding", "tile" and "wave": comparisons of products of different sizes (see `compare`)
    """
    result: dict[str, Any] = {"ceilings": {}}
    result |= {name: [] for name in ("rows", "step", "padding", "tile", "wave")}
    for dtype, times in seconds.items():
        found = {one: t for one, t in zip(products, times, strict=True) if t}
        if not found:
            continue
        large = [one for one in found if one.flops >= _CEILING_FLOPS] or list(found)
        ceiling = max(one.flops / min(found[one]) for one in large)
        result["ceilings"][dtype] = ceiling
        result["rows"] += [{"dtype": dtype, **_row(one, found[one], ceiling)} for one in found]
        result["step"] += [
            {"dtype": dtype, **one} for one in step_times(products, found, plan.tokens, ceiling)
        ]
        for name, rows in (
            ("padding", _padding(found, unaligned(shape, plan.base))),
            ("tile", _against(found, "tile", TILE_EDGE)),
            ("wave", _against(found, "wave", None)),
        ):
            result[name] += [{"dtype": dtype, **row} for row in rows]
    return result


def _row(product: GemmProduct, times: Sequence[float], ceiling: float) -> dict[str, Any]:
    rate = product.flops / statistics.median(times)
    return {
        **asdict(product),
        "flops_per_second": rate,
        "lowest": product.flops / max(times),
        "highest": product.flops / min(times),
        "share_of_ceiling": rate / ceiling,
        "seconds": list(times),
    }


def step_times(
    products: Sequence[GemmProduct], times: Times, tokens: int, ceiling: float
) -> list[dict[str, Any]]:
    """Return the total time of the matrix products in a training step of STEP_TOKENS.

    The products were measured for `tokens` tokens. Their time is assumed to be proportional to the
    number of tokens.

    Returns:
        One dict for each combination of a weight storage ("conv1d" or "linear") and a vocabulary
        size of the head. The keys are "weights", "vocabulary", "seconds", "flops" and
        "share_of_ceiling". The list is empty until all products of the model have been measured.
    """
    model = [one for one in products if one.part == "model"]
    if not model or any(one not in times for one in model):
        return []
    result = []
    for weights in ("conv1d", "linear"):
        for vocabulary in sorted({one.value for one in model if one.group == "vocabulary"}):
            these = [
                one
                for one in model
                if (one.group, one.value) in ((weights, 0), ("vocabulary", vocabulary))
            ]
            scale = STEP_TOKENS / tokens
            seconds = scale * sum(one.count * statistics.median(times[one]) for one in these)
            flops = scale * sum(one.count * one.flops for one in these)
            result.append(
                {
                    "weights": weights,
                    "vocabulary": vocabulary,
                    "seconds": seconds,
                    "flops": flops,
                    "share_of_ceiling": flops / seconds / ceiling,
                }
            )
    return result


def compare(
    times: Times, size: Iterable[GemmProduct], base: Iterable[GemmProduct]
) -> dict[str, Any]:
    """Compare the total times of two groups of products, `size` and `base`.

    Returns:
        A dict with these keys. "time_ratio" is the median of time(size) / time(base) over the
        measurements, and "lowest" and "highest" are the extreme values of this ratio. "work_ratio"
        is the ratio of FLOPs, and "rate_ratio" is the ratio of FLOP/s.
    """
    size, base = list(size), list(base)
    ratios = [
        sum(above) / sum(below)
        for above, below in zip(
            zip(*(times[one] for one in size), strict=False),
            zip(*(times[one] for one in base), strict=False),
            strict=False,
        )
    ]
    work = sum(one.flops for one in size) / sum(one.flops for one in base)
    time = statistics.median(ratios)
    return {
        "time_ratio": time,
        "lowest": min(ratios),
        "highest": max(ratios),
        "work_ratio": work,
        "rate_ratio": work / time,
    }


def _padding(times: Times, off: Mapping[str, int]) -> list[dict[str, Any]]:
    """For each group, compare the total time of all products at each aligned size with their total
    time at the unaligned size.

    Args:
        times: measured times.
        off: unaligned size for each group.
    """
    result = []
    for group, base in off.items():
        these: dict[int, list[GemmProduct]] = {}
        for one in times:
            if one.part in ("alignment", "model") and one.group == group:
                these.setdefault(one.value, []).append(one)
        if base not in these:
            continue
        for size, products in these.items():
            if size == base or len(products) < len(these[base]):
                continue
            multiples = [multiple for multiple, to in paddings(base).items() if to == size]
            ratios = compare(times, products, these[base])
            result.append(
                {"group": group, "from": base, "to": size, "multiples": multiples, **ratios}
            )
    return result


def _against(times: Times, part: str, value: int | None) -> list[dict[str, Any]]:
    """Compare each product in one part of the benchmark with the product in that part whose size is
    `value`. If `value` is None, compare each product with the first one, which takes one wave.
    """
    these = [one for one in times if one.part == part]
    if value is None:
        value = these[0].value if these else None
    base = [one for one in these if one.value == value]
    if not base:
        return []
    return [{"to": one.value, **compare(times, [one], base)} for one in these]


def draw(result: Mapping[str, Any]) -> bytes:
    """Draw a result as a PNG. The panels show rates by size, the products of the model, and the
    effects of padding and tiles. On a CPU, they also show the results of `measure_loops`."""
    loops = result.get("loops")
    figure = upper = new_figure(14, 16 if loops else 11)
    if loops:
        upper, lower = figure.subfigures(2, height_ratios=(2, 1))
        draw_loops(loops, *lower.subplots(1, 3))
    (size, model), (padding, tile) = upper.subplots(2, 2)
    height = 0.8 / len(result["ceilings"])
    for number, dtype in enumerate(result["ceilings"]):
        rows = [row for row in result["rows"] if row["dtype"] == dtype]
        color = f"C{number}"
        sizes = [row for row in rows if row["part"] == "size"]
        _draw_medians(size, sizes, "m", "flops_per_second", color=color, label=dtype, unit=1e12)
        layers = [row for row in rows if row["part"] == "model"]
        padded = [row for row in result["padding"] if row["dtype"] == dtype]
        for axes, these, length, label in (
            (model, layers, "share_of_ceiling", "{name} {layout}"),
            (padding, padded, "time_ratio", "{group} {from} -> {to}"),
        ):
            places = [place + height * number for place in range(len(these))]
            axes.barh(places, [row[length] for row in these], height=height, color=color)
            if these:
                axes.set_yticks(places, [label.format_map(row) for row in these])
        rows = [row for row in result["tile"] if row["dtype"] == dtype]
        tile.plot(
            [row["to"] for row in rows], [row["time_ratio"] for row in rows], "o-", color=color
        )
    if result["tile"]:
        work = sorted({(row["to"], row["work_ratio"]) for row in result["tile"]})
        tile.plot(*zip(*work, strict=True), color="black", linestyle="--", linewidth=0.8)
    size.set(xlabel="size of a square product", ylabel="TFLOP/s", ylim=(0, None))
    size.set_xscale("log", base=2)
    size.legend()
    model.set(xlabel="share of the ceiling")
    model.tick_params(axis="y", labelsize=7)
    model.invert_yaxis()
    padding.set(xlabel="time of the padded product / time of the unpadded product")
    padding.axvline(1, color="black", linestyle="--", linewidth=0.8)
    padding.invert_yaxis()
    tile.set(xlabel="N", ylabel=f"time / time at N = {TILE_EDGE} (dashed: work)", ylim=(0, None))
    machine = result["machine"]
    figure.suptitle(f"matrix products: {machine['name']}, {machine['threads']} threads")
    return png_of(figure)

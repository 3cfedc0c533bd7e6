"""How long an operator takes on a GPU that is not here: its work over what such a GPU achieves.

The roofline model (Williams et al. 2009): an operator takes the longer of the time of its FLOPs
and of its bytes. What share of the data sheet's rates is achieved is given as a range:

- large matrix products 0.45 to 0.85 of the dense peak, 0.65 expected;
- flash attention, forward 0.35 to 0.70 and backward 0.30 to 0.60: FlashAttention-2 (Dao 2023)
  measured 50-73 % and up to 63 % on A100, FlashAttention-3 (Shah et al. 2024) found the second to
  be at 35-40 % on H100;
- streams 0.70 to 0.92 of the memory's bandwidth: what STREAM-like programs reach on these GPUs;
- a kernel takes 2 to 6 microseconds at least, and starting one from Python 4 to 12, which is
  hidden as long as the GPU is busy.

A matrix product is cut into tiles of 128 x 128 that multiprocessors take in turns; what a tile
has beyond the edge and what the last turn leaves idle is lost (NVIDIA, "Matrix Multiplication
Background User's Guide": tile and wave quantization), and each tile spends the time of some 64
more of the inner dimension on its beginning and end.

The figures of a kind of GPU that was measured take the place of these (`measured_gpus.py`). These
were not checked on a GPU by this project. The range was set wide enough for two
published rates of GPT-2 124M in compiled bf16 on an A100 with 40 GB: 135 ms for 12 x 1024 tokens
(nanoGPT's README) and 115,000 tokens/s with 32 x 1024 (karpathy/llm.c, pull request 323, PCIe).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from firstlight.hardware.gpus import GPU
from firstlight.models.blockwise import blocks_of
from firstlight.planner.speed_kinds import (
    Product,
    is_attention,
    is_free,
    is_masked,
    kind_of,
    product_of,
    streamed_bytes,
)
from firstlight.planner.trace import Operator


@dataclass(frozen=True)
class Range:
    """A figure and what it may as well be, from the slowest to the fastest run.

    Attributes:
        slow, expected, fast: seconds where it is a time (slow is the most), shares where it is a
            share (slow is the least).
    """

    slow: float
    expected: float
    fast: float

    def __add__(self, other: Range) -> Range:
        return Range(self.slow + other.slow, self.expected + other.expected, self.fast + other.fast)

    def __mul__(self, count: float) -> Range:
        return Range(self.slow * count, self.expected * count, self.fast * count)

    @classmethod
    def exact(cls, value: float) -> Range:
        """All three the same."""
        return cls(value, value, value)


def larger(one: Range, other: Range) -> Range:
    """The larger of two times, in each case."""
    return Range(
        max(one.slow, other.slow), max(one.expected, other.expected), max(one.fast, other.fast)
    )


ZERO = Range(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Shares:
    """What of a GPU's figures is achieved; see the module's head.

    Attributes:
        products: of the peak, by a matrix product without waste of tiles.
        attention, attention_backward: of the peak, by the fused kernels.
        bandwidth: of the memory's.
        link: of the link's between GPUs.
        overlap: of communication that runs beside computing.
        kernel_seconds: the shortest kernel.
        launch_seconds: of the host, to start an operator from Python.
        compiled_launch_seconds: of the host, to start a compiled kernel.
        fused_traffic: how often kernels of torch.compile move what stands between products: a norm
            reads its input twice, a residual is read and written beside it, a gradient is summed
            into a bias's.
        source: the origin of these figures, for people.
    """

    products: Range = field(default_factory=lambda: Range(0.45, 0.65, 0.85))
    attention: Range = field(default_factory=lambda: Range(0.35, 0.50, 0.70))
    attention_backward: Range = field(default_factory=lambda: Range(0.30, 0.42, 0.60))
    bandwidth: Range = field(default_factory=lambda: Range(0.70, 0.82, 0.92))
    link: Range = field(default_factory=lambda: Range(0.50, 0.70, 0.85))
    overlap: Range = field(default_factory=lambda: Range(0.40, 0.70, 0.95))
    kernel_seconds: Range = field(default_factory=lambda: Range(6e-6, 3e-6, 2e-6))
    launch_seconds: Range = field(default_factory=lambda: Range(12e-6, 7e-6, 4e-6))
    compiled_launch_seconds: Range = field(default_factory=lambda: Range(5e-6, 3e-6, 1e-6))
    fused_traffic: Range = field(default_factory=lambda: Range(2.6, 1.8, 1.2))
    source: str = "from the data sheet"


DEFAULT_SHARES = Shares()

_TILE = 128
#: Inner dimension that a tile's beginning and end cost the time of.
_TILE_ENDS = 64
#: fp32 FLOP/s of one multiprocessor: 128 lanes, two operations, some 1.8 GHz.
_FLOPS_A_MULTIPROCESSOR = 128 * 2 * 1.8e9
#: Of those whose multiprocessors have 64 lanes of fp32 (V100, A100), or twice the usual rate, the
#: number is not to be had from the rate.
_MULTIPROCESSORS = {
    "V100": 80,
    "T4": 40,
    "A100": 108,
    "A30": 56,
    "P100": 56,
    "H100 PCIe": 114,
    "H100": 132,
    "GH200": 132,
    "H200": 132,
    "B200": 148,
    "MI300X": 304,
}


def multiprocessors(gpu: GPU) -> int:
    """How many a GPU has: of server GPUs by name, of others from their rate in fp32."""
    for name in sorted(_MULTIPROCESSORS, key=len, reverse=True):
        if gpu.name.startswith(name):
            return _MULTIPROCESSORS[name]
    return max(1, round(gpu.fp32 / _FLOPS_A_MULTIPROCESSOR))


def tile_share(product: Product, units: int) -> float:
    """Of the work that a GPU does for a matrix product, the share that is not lost to tiles.

    Args:
        product: which.
        units: multiprocessors.
    """
    rows, columns = -(-product.m // _TILE), -(-product.n // _TILE)
    filled = product.m * product.n / (rows * columns * _TILE**2)
    tiles = product.batch * rows * columns
    turns = math.ceil(tiles / units)
    # A product of few tiles is cut along its inner dimension, too (split-k).
    pieces = max(1, min(units // tiles, product.k // 256)) if tiles < units else 1
    busy = min(1.0, tiles * pieces / units) if turns == 1 else tiles / (turns * units)
    return filled * busy * product.k / (product.k + _TILE_ENDS * pieces)


def dtype_flops(gpu: GPU, dtype: torch.dtype, precision: str) -> float:
    """Peak FLOP/s of products of a dtype; fp32's is TF32's where the recipe asks for that."""
    if dtype == torch.bfloat16:
        return gpu.peak_flops("bf16")
    if dtype == torch.float16:
        return gpu.peak_flops("fp16")
    return gpu.peak_flops("tf32" if precision == "tf32" else "fp32")


def kernel_seconds(
    operator: Operator, gpu: GPU, precision: str, shares: Shares = DEFAULT_SHARES
) -> Range:
    """Of one call on the GPU: the roofline."""
    if is_free(operator):
        return ZERO
    floor = shares.kernel_seconds
    bandwidth = shares.bandwidth * gpu.bandwidth
    memory = _over(streamed_bytes(operator), bandwidth)
    if kind_of(operator) == "matrix_products":
        product = product_of(operator)
        peak = dtype_flops(gpu, product.dtype, precision) * tile_share(
            product, multiprocessors(gpu)
        )
        return larger(floor, larger(memory, _over(product.flops, shares.products * peak)))
    if is_attention(operator):
        backward = "backward" in operator.name
        share = shares.attention_backward if backward else shares.attention
        peak = dtype_flops(gpu, operator.inputs[0][1], precision)
        return larger(floor, larger(memory, _over(attention_flops(operator), share * peak)))
    return larger(floor, memory)


def attention_flops(operator: Operator) -> float:
    """FLOPs that a kernel of attention does: of a causal one half of the whole rows'.

    In training attention is causal; but where a mask is given, torch's kernel leaves nothing out.
    Blocks leave out what lies behind their last query.
    """
    backward = "backward" in operator.name
    shapes = [shape for shape, _ in operator.inputs if len(shape) == 4]
    query, key = shapes[1:3] if backward else shapes[:2]
    batch, heads, new, size = query
    # Two products forward; backward the scores again, and four of their gradients.
    products = 5 if backward else 2
    each = products * 2.0 * batch * heads * size
    if "blockwise" in operator.name:
        return each * sum((end - start) * seen for start, end, seen in blocks_of(new, key[2]))
    whole = each * new * key[2]
    return whole if is_masked(operator) else whole / 2


def _over(work: float, rate: Range) -> Range:
    return Range(work / rate.slow, work / rate.expected, work / rate.fast)

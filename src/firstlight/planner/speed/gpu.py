"""Predict the time of an operator on a GPU in the table, from the operator's work and the GPU's
rates.

According to the roofline model (Williams et al. 2009), the time of an operator is the time for its
FLOPs or the time for its memory traffic, whichever is longer. Kernels reach only a fraction of the
rates in the data sheet. These fractions are given as ranges:

- large matrix products: 0.45 to 0.85 of the dense peak, 0.65 expected;
- flash attention: 0.35 to 0.70 forward, 0.30 to 0.60 backward. FlashAttention-2 (Dao 2023) measured
  50-73% forward and up to 63% backward on A100; FlashAttention-3 (Shah et al. 2024) reports
  35-40% for FlashAttention-2 on H100;
- memory-bound kernels: 0.70 to 0.92 of the memory bandwidth, as in benchmarks such as STREAM;
- every kernel: at least 2 to 6 microseconds, and 4 to 16 microseconds to launch it from Python.
  Launches take no additional time as long as the GPU is busy.

A matrix product is divided into tiles of 128 x 128, which multiprocessors process in waves. Time is
lost if tiles extend beyond the edge of the matrix, and if multiprocessors are idle in the last
wave. NVIDIA's "Matrix Multiplication Background User's Guide" calls this tile and wave
quantization. Starting and finishing a tile takes as long as processing about 64 elements of the
inner dimension.

For GPU types that were measured with `python -m benchmarks gpu`, these fractions are replaced by
fitted constants (`measured_gpus.json`). So far, this is only the H100. All other types use the
H100's constants, scaled by the fraction of the data sheet's rate that each type reaches in large
products (`assumed_shares`). Which of two GPUs is predicted to be faster therefore depends on their
data sheets, and not on which of them was measured. For types that were not measured, the ranges
have the widths given above. These ranges contain two published speeds of GPT-2 124M in compiled
bf16 on an A100 with 40 GB:

- 135 ms for 12 x 1024 tokens (nanoGPT's README);
- 115,000 tokens/s with 32 x 1024 tokens (karpathy/llm.c, pull request 323, PCIe).
"""

from __future__ import annotations

import functools
import math
import operator
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from firstlight.errors import InputError
from firstlight.files.atomic import read_json
from firstlight.files.cache import cache_folder
from firstlight.hardware.gpus import FP8_SPEEDUP, GPU, GPUS
from firstlight.models.blockwise import blocks_of
from firstlight.planner.memory.kernels import (
    Operator,
    total_bytes,
)

Kind = Literal[
    "matrix_products",
    "attention",
    "elementwise",
    "optimizer",
    "communication",
    "launching",
    "data",
]
KINDS: tuple[Kind, ...] = get_args(Kind)

#: Phases in which memory-bound operators are counted under the "optimizer" kind.
_OPTIMIZER_PHASES = ("optimizer", "clipping")

#: Operators that multiply the rows of each expert by the expert's weight, for all experts in one
#: call (`models.moe`).
_GROUPED = ("grouped_linear", "grouped_linear_backward")

_PRODUCTS = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "matmul",
    "linear",
    "addbmm",
    "_scaled_mm",
    "_int_mm",
    *_GROUPED,
)

_ATTENTION = ("scaled_dot_product", "flash_attention", "flex_attention", "blockwise_attention")

#: Number of tensor arguments of each attention kernel if there is no mask.
_INPUTS_WITHOUT_MASK = {
    "_scaled_dot_product_flash_attention_for_cpu": 3,
    "_scaled_dot_product_flash_attention_for_cpu_backward": 6,
    "blockwise_attention": 3,
    "blockwise_attention_backward": 4,
}

#: Operators that do not launch a kernel, because they return a view, an uninitialised tensor, or no
#: tensor.
_FREE = frozenset(
    """view _unsafe_view reshape expand alias detach t transpose permute numpy_T slice select
    split unbind unsqueeze squeeze empty empty_like new_empty empty_strided lift_fresh
    promote_types as_strided to set_ _record_function_enter_new _record_function_exit
    split_with_sizes narrow chunk flatten unflatten view_as is_same_size""".split()
)


def is_free(operator: Operator) -> bool:
    """Return True if the operator does not launch a kernel."""
    name = operator.base_name
    # A cast to the dtype that a tensor already has returns the tensor itself.
    if name == "to":
        return operator.inputs[:1] == operator.outputs[:1]
    return name in _FREE or not (operator.inputs or operator.outputs)


def kind_of(operator: Operator) -> Kind:
    """Return the kind under which this operator's time is counted. Every operator has a kind, even
    if it does not launch a kernel."""
    name = operator.base_name
    if operator.name.startswith(("c10d", "_c10d_functional")):
        return "communication"
    if name in _PRODUCTS:
        return "matrix_products"
    if is_attention(operator):
        return "attention"
    return "optimizer" if operator.phase in _OPTIMIZER_PHASES else "elementwise"


def is_attention(operator: Operator) -> bool:
    """Return True if the operator is a fused attention kernel."""
    name = operator.base_name
    return any(kernel in name for kernel in _ATTENTION)


def is_grouped(operator: Operator) -> bool:
    """Return True if the operator multiplies the rows of all experts in one call."""
    return operator.base_name in _GROUPED


def is_masked(operator: Operator) -> bool:
    """Return True if an attention kernel received a mask. Without a mask, attention in training is
    causal."""
    plain = _INPUTS_WITHOUT_MASK.get(operator.base_name)
    return plain is not None and len(operator.inputs) > plain


@dataclass(frozen=True)
class MatrixProduct:
    """A batch of `batch` matrix products of shapes [m, k] x [k, n].

    Attributes:
        added: True if a bias or another matrix is added.
    """

    batch: int
    m: int
    n: int
    k: int
    dtype: torch.dtype
    added: bool = False

    @property
    def flops(self) -> int:
        """Number of multiplications and additions."""
        return 2 * self.batch * self.m * self.n * self.k


def product_of(operator: Operator) -> MatrixProduct:
    """Return the matrix product of an operator of the "matrix_products" kind. The grouped products
    of all experts are treated as one product of all rows with a single weight. Their backward pass
    is treated as two such products."""
    name = operator.base_name
    if is_grouped(operator):
        count = 2 if name.endswith("backward") else 1
        ((rows, _), dtype), (_, n, k) = operator.inputs[0], operator.inputs[count][0]
        return MatrixProduct(count, rows, n, k, dtype=dtype)
    factors = [layout for layout in operator.inputs if len(layout[0]) >= 2]
    added = name in ("addmm", "baddbmm", "addbmm")
    if added:
        factors = [layout for layout in operator.inputs[1:] if len(layout[0]) >= 2]
    (first, dtype), (second, _) = factors[:2]
    n, k = (second[-2], second[-1]) if name == "linear" else (second[-1], second[-2])
    if len(second) > 2:
        return MatrixProduct(math.prod(first[:-2]), first[-2], n, k, dtype=dtype, added=added)
    return MatrixProduct(1, math.prod(first[:-1]), n, k, dtype=dtype, added=added)


#: Memory traffic of in-place operators on tensor lists, as a multiple of the size of their inputs.
#: Their results are not part of the trace. AdamW reads four tensors and writes all of them except
#: the gradient.
_LIST_TRAFFIC = {
    "_fused_adamw_": 7 / 4,
    "_fused_adam_": 7 / 4,
    "_fused_sgd_": 5 / 3,
    "_foreach_mul_": 2.0,
    "_foreach_add_": 2.0,
    "_foreach_div_": 2.0,
    "_foreach_lerp_": 1.5,
    "_foreach_copy_": 1.0,
    "_foreach_addcmul_": 4 / 3,
    "_foreach_addcdiv_": 4 / 3,
}


def streamed_bytes(operator: Operator) -> float:
    """Return the bytes that an operator actually reads and writes. For example, an embedding lookup
    reads only the rows that it returns, not the entire table."""
    name = operator.base_name
    if is_free(operator):
        return 0.0
    if not operator.outputs and name in _LIST_TRAFFIC:
        return _LIST_TRAFFIC[name] * total_bytes(operator.inputs)
    if name in ("embedding", "gather", "index_select", "index"):
        return 2.0 * total_bytes(operator.outputs) + total_bytes(operator.inputs[1:])
    if name == "nll_loss_forward":
        return float(total_bytes(operator.inputs[1:]))
    if name in ("nll_loss_backward", "embedding_dense_backward"):
        # These operators first set the full gradient to zero. For nll_loss, all other memory
        # traffic is negligible.
        return float(
            total_bytes(operator.outputs) + 2 * total_bytes(operator.inputs[:1])
            if name.startswith("emb")
            else total_bytes(operator.outputs)
        )
    if name in ("scatter_add_", "index_add_", "scatter_"):
        return 3.0 * total_bytes(operator.inputs[2:])
    if not operator.outputs:
        # An in-place operator does not report a result, but its input is both read and written.
        return 2.0 * operator.moved_bytes
    return float(operator.moved_bytes)


@dataclass(frozen=True)
class Range:
    """An expected value and its range, from the slowest to the fastest run.

    Attributes:
        slow, expected, fast: durations in seconds, rates or fractions. `slow` is the longest
            duration, but the lowest rate or fraction.
    """

    slow: float
    expected: float
    fast: float

    def __iter__(self) -> Iterator[float]:
        return iter((self.slow, self.expected, self.fast))

    def __add__(self, other: Range) -> Range:
        return Range(*map(operator.add, self, other))

    def __mul__(self, count: float) -> Range:
        return Range(*(value * count for value in self))

    @classmethod
    def around(cls, seconds: float, error: float) -> Range:
        """Return a range of durations that extends by a relative error on both sides of
        `expected`."""
        return cls(seconds * (1 + error), seconds, seconds * (1 - error))

    @classmethod
    def exact(cls, value: float) -> Range:
        """Return a range whose three values are equal."""
        return cls(value, value, value)


def larger(one: Range, other: Range) -> Range:
    """Return the elementwise maximum of two ranges of durations."""
    return Range(*map(max, one, other))


ZERO = Range(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Shares:
    """Fractions of a GPU's data-sheet rates that kernels reach, and durations that data sheets do
    not specify. For the sources, see the docstring of this module.

    Attributes:
        products: fraction of the peak rate that matrix products reach, not counting the time that
            is lost because of tiles.
        attention, attention_backward: fractions of the peak rate that fused attention kernels reach
            in the forward and in the backward pass.
        bandwidth: fraction of the memory bandwidth that kernels reach.
        link: fraction of the bandwidth between GPUs that communication reaches.
        overlap: fraction of the computation that can overlap with communication.
        kernel_seconds: duration of the shortest kernel.
        launch_seconds: host time to launch an operator from Python.
        compiled_launch_seconds: host time to launch a compiled kernel.
        fused_traffic: bytes that torch.compile's fused kernels move, as a multiple of
            `throughput.fused_bytes`. The multiple is above 1 because a norm reads its input twice,
            residuals are also read and written, and gradients of biases are summed.
        fp32_products: fraction of the peak rate that fp32 matrix products reach. The defaults of
            this attribute and the next three attributes were measured on an H100.
        misaligned: speed of matrix products whose row size is not a multiple of `PACKET_BYTES`, as
            a fraction of the speed of aligned products.
        dispatch_launches: additional host time for each operator that is intercepted by selective
            activation checkpointing, as a multiple of `launch_seconds`.
        update_launches: host time for one step of a torch optimizer, as a multiple of
            `launch_seconds`.
        source: where these figures come from, as shown to the user.
    """

    products: Range = field(default_factory=lambda: Range(0.45, 0.65, 0.85))
    attention: Range = field(default_factory=lambda: Range(0.35, 0.50, 0.70))
    attention_backward: Range = field(default_factory=lambda: Range(0.30, 0.42, 0.60))
    bandwidth: Range = field(default_factory=lambda: Range(0.70, 0.82, 0.92))
    link: Range = field(default_factory=lambda: Range(0.50, 0.70, 0.85))
    overlap: Range = field(default_factory=lambda: Range(0.40, 0.70, 0.95))
    kernel_seconds: Range = field(default_factory=lambda: Range(6e-6, 3e-6, 2e-6))
    launch_seconds: Range = field(default_factory=lambda: Range(16e-6, 7e-6, 4e-6))
    compiled_launch_seconds: Range = field(default_factory=lambda: Range(5e-6, 3e-6, 1e-6))
    fused_traffic: Range = field(default_factory=lambda: Range(2.6, 1.8, 1.2))
    fp32_products: Range = field(default_factory=lambda: Range(0.60, 0.80, 0.95))
    misaligned: Range = field(default_factory=lambda: Range(0.15, 0.25, 0.50))
    dispatch_launches: float = 2.4
    update_launches: float = 30.0
    source: str = "derived from the data sheet and measurements of an H100, not measured"


DEFAULT_SHARES = Shares()

#: Bytes that matrix units read at a time. If the size of a row is not a multiple of this number, a
#: slower kernel is used.
PACKET_BYTES = 16
#: Rows and columns of a tile of a matrix product.
_TILE = 128
#: Starting and finishing a tile takes as long as processing this number of elements along the inner
#: dimension.
_TILE_ENDS = 64
#: Clock rates in Hz for which the data sheets of consumer GPUs state their FLOP/s, by compute
#: capability. For capabilities that are not listed, 1.8 GHz is assumed.
_CLOCKS = {(8, 6): 1.7e9, (8, 9): 2.5e9, (12, 0): 2.4e9}
#: Number of fp32 operations that a multiprocessor executes per cycle. It has 128 lanes with two
#: operations each.
_OPERATIONS_A_CYCLE = 128 * 2
#: Number of multiprocessors by GPU. For these GPUs, it can't be computed from the fp32 rate,
#: because their multiprocessors have 64 fp32 lanes (V100, A100) or twice the usual rate.
_MULTIPROCESSORS = {
    "V100": 80,
    "RTX 2080 Ti": 68,
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
    """Return the number of multiprocessors of a GPU. For server GPUs, the number is looked up by
    name. For all other GPUs, it is computed from the fp32 rate."""
    for name in sorted(_MULTIPROCESSORS, key=len, reverse=True):
        if gpu.name.startswith(name):
            return _MULTIPROCESSORS[name]
    # The multiprocessors of all consumer GPUs execute the same number of operations per cycle, so
    # only their number differs.
    clock = _CLOCKS.get(gpu.capability, 1.8e9)
    return max(1, round(gpu.fp32 / (_OPERATIONS_A_CYCLE * clock)))


#: Fraction of the data sheet's 16-bit rate that torch's large matrix products reach. All values
#: except the one for the T4 were measured with the same program
#: (github.com/zzc0721/torch-performance-test-data, `database.md`, January 2026). Its value for the
#: H100 agrees with firstlight's own measurement. With its power limit of 70 W, the T4 reaches 42
#: TFLOP/s for an instant, but only 24 in continuous products (forums.developer.nvidia.com, topic
#: 264462).
_REACHED = {
    "T4": 24 / 65,
    "L4": 0.58,
    "V100": 0.76,
    "RTX 2080 Ti": 1.0,
    "A100": 0.85,
    "A100 40GB PCIe": 0.77,
    "A100 80GB PCIe": 0.77,
    "H100": 0.81,
    "H100 PCIe": 0.66,
    "H200": 0.81,
    "GH200": 0.81,
    "B200": 0.75,
}


def reached_share(gpu: GPU) -> float:
    """Return the fraction of the data sheet's 16-bit rate that a GPU sustains in large matrix
    products.

    For GPUs without a published measurement, the fraction depends on the matrix units. In GeForce
    cards, these units have half the usual rate. The fraction is then 1, because the board supplies
    enough power for this rate. The fractions of the RTX 3060, 3090 and 4090 are 1.0 to 1.08. In all
    other cases, the fraction is 0.8, which is close to the fractions of the RTX A6000 (0.79) and
    the L40S (0.74).
    """
    for name in sorted(_REACHED, key=len, reverse=True):
        if re.match(rf"{name}\b", gpu.name):
            return _REACHED[name]
    return 1.0 if gpu.fp16 < 3 * gpu.fp32 else 0.8


def tile_share(product: MatrixProduct, units: int) -> float:
    """Return the highest fraction of a GPU's peak rate that a matrix product can reach, given its
    partly filled tiles and idle multiprocessors.

    Args:
        product: the product's sizes and dtype.
        units: number of multiprocessors.
    """
    rows, columns = -(-product.m // _TILE), -(-product.n // _TILE)
    filled = product.m * product.n / (rows * columns * _TILE**2)
    tiles = product.batch * rows * columns
    turns = math.ceil(tiles / units)
    # A product with few tiles is also split along its inner dimension (split-k).
    pieces = max(1, min(units // tiles, product.k // 256)) if tiles < units else 1
    busy = min(1.0, tiles * pieces / units) if turns == 1 else tiles / (turns * units)
    return filled * busy * product.k / (product.k + _TILE_ENDS * pieces)


def dtype_flops(gpu: GPU, dtype: torch.dtype, precision: str) -> float:
    """Return the peak FLOP/s of matrix products in a dtype. For fp32, return the peak of TF32 if
    `precision` is "tf32"."""
    if dtype == torch.bfloat16:
        return gpu.peak_flops("bf16")
    if dtype == torch.float16:
        return gpu.peak_flops("fp16")
    return gpu.peak_flops("tf32" if precision == "tf32" else "fp32")


#: Number of bytes that are read and written to cast the factors of an fp8 product, as a multiple of
#: the size of the factors in bf16. The traffic for finding the maximum absolute values of the
#: factors is not included, because this is part of the compiled kernels that produce the factors.
_FP8_CASTS = 1.5


def runs_in_fp8(operator: Operator, products: Collection[tuple[int, ...]]) -> bool:
    """Return True if the operator is a product that is computed in fp8; see
    `Workload.fp8_products`."""
    if not products or operator.phase not in ("forward", "backward") or is_grouped(operator):
        return False
    if kind_of(operator) != "matrix_products":
        return False
    one = product_of(operator)
    return tuple(sorted((one.m, one.n, one.k))) in products


def kernel_seconds(
    operator: Operator,
    gpu: GPU,
    precision: str,
    shares: Shares = DEFAULT_SHARES,
    *,
    fp8: bool = False,
) -> Range:
    """Return the duration of a call on the GPU in seconds, according to the roofline model. If
    `fp8` is True, the call is an fp8 product that was traced in bf16, and the duration includes the
    time to cast its factors."""
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
        rate = product_share(product, precision, shares) * peak
        if fp8:
            casts = _over(_FP8_CASTS * total_bytes(operator.inputs), bandwidth)
            return larger(floor, _over(product.flops, rate * FP8_SPEEDUP)) + casts
        return larger(floor, larger(memory, _over(product.flops, rate)))
    if is_attention(operator):
        backward = "backward" in operator.name
        share = shares.attention_backward if backward else shares.attention
        peak = dtype_flops(gpu, operator.inputs[0][1], precision)
        return larger(floor, larger(memory, _over(attention_flops(operator), share * peak)))
    return larger(floor, memory)


def product_share(product: MatrixProduct, precision: str, shares: Shares) -> Range:
    """Return the fraction of the peak rate that a matrix product reaches, not counting the time
    that is lost because of tiles. Products with misaligned rows are slower. A misaligned number of
    tokens is treated in the same way."""
    if product.dtype == torch.float32 and precision != "tf32":
        return shares.fp32_products
    packet = PACKET_BYTES // product.dtype.itemsize
    if all(size % packet == 0 for size in (product.m, product.n, product.k)):
        return shares.products
    return Range(*(a * b for a, b in zip(shares.products, shares.misaligned, strict=True)))


def attention_flops(operator: Operator) -> float:
    """Return the FLOPs of an attention kernel's matrix products.

    Attention in training is causal. Without a mask, torch's kernels compute half of all scores.
    With a mask, they compute all scores. For each block of queries, blockwise attention skips the
    keys after the last query of the block.
    """
    backward = "backward" in operator.name
    shapes = [shape for shape, _ in operator.inputs if len(shape) == 4]
    query, key = shapes[1:3] if backward else shapes[:2]
    batch, heads, new, size = query
    # The forward pass has two matrix products. The backward pass has five, for the recomputed
    # scores and for the gradients of four factors.
    products = 5 if backward else 2
    each = products * 2.0 * batch * heads * size
    if "blockwise" in operator.name:
        return each * sum((end - start) * seen for start, end, seen in blocks_of(new, key[2]))
    whole = each * new * key[2]
    return whole if is_masked(operator) else whole / 2


def _over(work: float, rate: Range) -> Range:
    return Range(*(work / value for value in rate))


#: Version of the file format. Files with a different version are ignored.
FORMAT = 1

#: File in the package with the fitted constants of the GPU types that were measured.
PACKAGED = Path(__file__).with_name("measured_gpus.json")

#: Minimum and maximum of each fitted constant, keyed by the name of its attribute in `Shares`. The
#: attributes for the backward pass of attention and for compiled launches are not fitted, but
#: computed from the fitted constants.
BOUNDS: dict[str, tuple[float, float]] = {
    "products": (0.2, 1.0),
    "attention": (0.1, 1.0),
    "bandwidth": (0.3, 1.0),
    "launch_seconds": (1e-6, 60e-6),
    "fused_traffic": (0.6, 4.0),
}

#: Minimum relative width of a range on each side. Repeated runs of the same program differ by this
#: much.
_LEAST_ERROR = 0.03


@dataclass(frozen=True)
class MeasuredGpu:
    """The constants that were fitted to measurements on one type of GPU, and the error of
    predictions with these constants.

    Attributes:
        constants: value for each name in `BOUNDS`.
        error: 95th percentile of the absolute relative error on the held-out configurations.
        fitted: number of configurations to which the constants were fitted.
        held_out: number of configurations on which the error was measured.
        torch: version of torch with which the measurements were made.
        context_bytes: GPU memory in bytes that a process uses outside torch's allocator; None if it
            was not measured.
    """

    constants: Mapping[str, float]
    error: float
    fitted: int
    held_out: int
    torch: str
    context_bytes: int | None = None

    @property
    def source(self) -> str:
        """Description of where predictions with these constants come from, as shown to the user."""
        return (
            f"measured on this GPU type: {self.fitted} configurations fitted, {self.held_out} "
            f"others within {self.error:.0%} (torch {self.torch})"
        )


def shares_of(constants: Mapping[str, float], error: float = 0.0, source: str = "") -> Shares:
    """Return the `Shares` that result from fitted constants.

    Args:
        constants: value for each name in `BOUNDS`.
        error: relative width of the ranges, on each side.
        source: where the constants come from, as shown to the user.
    """

    def share(value: float) -> Range:
        return Range(value / (1 + error), value, value * (1 + error))

    def seconds(value: float) -> Range:
        return Range(value * (1 + error), value, value / (1 + error))

    default = DEFAULT_SHARES
    backward = default.attention_backward.expected / default.attention.expected
    compiled = default.compiled_launch_seconds.expected / default.launch_seconds.expected
    return replace(
        default,
        products=share(constants["products"]),
        attention=share(constants["attention"]),
        attention_backward=share(constants["attention"] * backward),
        bandwidth=share(constants["bandwidth"]),
        fp32_products=share(default.fp32_products.expected),
        kernel_seconds=seconds(default.kernel_seconds.expected),
        launch_seconds=seconds(constants["launch_seconds"]),
        compiled_launch_seconds=seconds(constants["launch_seconds"] * compiled),
        # These constants do not have separate ranges, because they are multiplied by the rates of
        # products or by the bandwidth, which already have ranges.
        misaligned=Range.exact(default.misaligned.expected),
        fused_traffic=Range.exact(constants["fused_traffic"]),
        source=source or default.source,
    )


def measured_gpu(gpu: GPU) -> MeasuredGpu | None:
    """Return the measurements for this type of GPU, or None if it was not measured."""
    return all_measured(cache_folder() / "calibration" / "gpus.json").get(gpu.name)


def assumed_shares(gpu: GPU) -> Shares:
    """Return the shares for a type of GPU that was not measured. They are the H100's shares with
    the wider ranges of `DEFAULT_SHARES`.

    The time to launch a kernel is the time that was measured on the H100's host. Large products
    reach the same fraction of `reached_share` as on the H100. GPUs with the same capability as the
    H100 run the same attention kernels and therefore get the H100's share for fused attention. All
    other GPUs get the share in `DEFAULT_SHARES`.
    """
    anchor = GPUS["H100"]
    measured = measured_gpu(anchor)
    assert measured is not None, f"{PACKAGED} lacks the H100"
    factors = {
        name: measured.constants[name] / getattr(DEFAULT_SHARES, name).expected for name in BOUNDS
    }
    factors["products"] *= reached_share(gpu) / reached_share(anchor)
    if gpu.capability != anchor.capability:
        factors["attention"] = 1.0
    factors["attention_backward"] = factors["attention"]
    factors["compiled_launch_seconds"] = factors["launch_seconds"]
    scaled = {name: getattr(DEFAULT_SHARES, name) * value for name, value in factors.items()}
    return replace(DEFAULT_SHARES, **scaled)


def shares_for(gpu: GPU) -> Shares:
    """Return the fitted shares for this type of GPU, or the result of `assumed_shares` if it was
    not measured."""
    found = measured_gpu(gpu)
    if found is None:
        return assumed_shares(gpu)
    return shares_of(found.constants, max(found.error, _LEAST_ERROR), found.source)


def read_measured(path: Path) -> dict[str, MeasuredGpu]:
    """Return the measurements in a file, keyed by GPU name. Return {} if the file is missing,
    damaged or in a different format."""
    try:
        values = read_json(path)
        if values["format"] != FORMAT:
            return {}
        return {str(name): _parsed(value) for name, value in values["gpus"].items()}
    except (InputError, KeyError, TypeError, ValueError, AttributeError):
        return {}


@functools.cache
def all_measured(own: Path) -> dict[str, MeasuredGpu]:
    """Return the measurements that are included in the package, updated with the measurements that
    were made on this machine."""
    return read_measured(PACKAGED) | read_measured(own)


def _parsed(value: Mapping[str, Any]) -> MeasuredGpu:
    constants = {name: float(value["constants"][name]) for name in BOUNDS}
    error, context = float(value["error"]), value.get("context_bytes")
    in_bounds = all(low <= constants[name] <= high for name, (low, high) in BOUNDS.items())
    if not in_bounds or error < 0:
        raise ValueError("constants out of bounds")
    return MeasuredGpu(
        constants,
        error,
        int(value["fitted"]),
        int(value["held_out"]),
        torch=str(value["torch"]),
        context_bytes=None if context is None else int(context),
    )

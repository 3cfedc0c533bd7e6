"""Describe the operators in a trace, and compute the memory that kernels on the target device
allocate for them.

A trace on fake CPU tensors records the shapes of tensors, but not the memory that a kernel
allocates internally. This memory is computed by `workspace_bytes`, which calls a separate, tested
function for each kernel that allocates memory. With some GPU kernels, autograd also saves different
tensors than on a CPU; these kernels are modelled in `program.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from firstlight.models.blockwise import QUERIES, at_a_time, blocks_of
from firstlight.models.moe import ROWS_OF_BLOCKS

_aten: Any = torch.ops.aten
_firstlight: Any = torch.ops.firstlight

#: The shape and dtype of a tensor, as stored in an `Operator`.
Layout = tuple[tuple[int, ...], torch.dtype]

#: Number of tensor lists that each operator on tensor lists takes. `Operator.inputs` contains the
#: concatenated lists of a call, which all have the same length.
LISTS = {"_fused_adamw_": 5, "_foreach_mul_": 1, "_foreach_add_": 1, "_foreach_copy_": 2}


@dataclass(frozen=True)
class Operator:
    """An operator and the shapes with which it is called. Calls with equal attributes share one
    `Operator`.

    Attributes:
        name: torch's name, such as "aten.mm.default".
        phase: phase of the step.
        inputs, outputs: (shape, dtype) of each tensor.
        flops: FLOPs of the operator's matrix products; 0 if it has none.
        moved_bytes: total bytes of inputs and outputs; 0 for views.
        options: additional properties of the call that affect the kernel's memory.
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
        """The name without its library and overload, such as "mm" for "aten.mm.default"."""
        parts = self.name.split(".")
        return parts[1] if len(parts) > 1 else parts[0]


@dataclass(frozen=True)
class OperatorCount:
    """An operator and the number of identical calls to it. The speed is predicted from these
    counts.

    Attributes:
        operator: the operator with its shapes and phase.
        count: number of calls in one optimizer step, evaluation batch or decoding step.
    """

    operator: Operator
    count: int


def bytes_of(layout: Layout) -> int:
    """Return the size of a contiguous tensor in bytes."""
    return layout[1].itemsize * math.prod(layout[0])


def total_bytes(layouts: Iterable[Layout]) -> int:
    """Return the total size of several contiguous tensors in bytes."""
    return sum(map(bytes_of, layouts))


def _products(query: Tensor, key: Tensor) -> int:
    """Return the FLOPs of the product of queries and keys, both of shape [batch, heads, tokens,
    head_dim], divided by the head dimension."""
    return 2 * query.shape[:3].numel() * key.shape[2]


def _blockwise_flops(query: Tensor, key: Tensor) -> int:
    """Return the FLOPs of one of the two matrix products of blockwise attention. Each block of
    queries attends to the keys up to the position of the block's last query."""
    batch, heads, new, size = query.shape
    scores = sum((end - start) * seen for start, end, seen in blocks_of(new, key.shape[2]))
    return 2 * batch * heads * size * scores


_FUSED = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
#: Functions that return the FLOPs of operators that torch's FLOP counter does not support. The
#: counter omits some operators and, in torch 2.11, rejects others with grouped heads. As in torch's
#: counter, all scores of fused attention are counted, even with a causal mask.
_MORE_FLOPS: dict[Any, Callable[..., int]] = {
    **dict.fromkeys(
        (getattr(_aten, f"_scaled_dot_product_{name}") for name in _FUSED),
        lambda q, k, v, *_: _products(q, k) * (k.shape[3] + v.shape[3]),
    ),
    # The backward pass has five products. One recomputes the scores, and the other four compute the
    # gradients of the factors of the two products in the forward pass.
    **dict.fromkeys(
        (getattr(_aten, f"_scaled_dot_product_{name}_backward") for name in _FUSED),
        lambda _, q, k, v, *__: _products(q, k) * (3 * k.shape[3] + 2 * v.shape[3]),
    ),
    # Each row is multiplied by the weight of its expert. The weights of all experts have the shape
    # [experts, out, in].
    _firstlight.grouped_linear: lambda x, w, *_: 2 * len(x) * w.shape[1] * w.shape[2],
    _firstlight.grouped_linear_backward: lambda g, _, w, *__: 4 * len(g) * w.shape[1] * w.shape[2],
    _firstlight.blockwise_attention: lambda q, k, *_: 2 * _blockwise_flops(q, k),
    _firstlight.blockwise_attention_backward: lambda g, q, k, *_: 5 * _blockwise_flops(q, k),
}


def flops_of(func: Any, args: tuple[Any, ...], kwargs: Any, result: Any) -> int:
    """Return the number of FLOPs of a call. It is 0 for operators other than matrix products and
    attention."""
    packet = getattr(func, "_overloadpacket", None)
    if packet in _MORE_FLOPS:
        return _MORE_FLOPS[packet](*args)
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=result))
    return 0


# Targets


@dataclass(frozen=True)
class Target:
    """The device for which a prediction is made.

    Attributes:
        kind: "cpu" or "cuda".
        name: name of the device.
        context_bytes: bytes that a process uses on the device before it creates a tensor.
        library_bytes: bytes that libraries allocate once through torch's allocator. This is the
            size of the cuBLAS workspace.
        capability: CUDA compute capability.
        threads: number of torch threads on a CPU. Some kernels allocate one buffer per thread.
        tile_dtypes: dtypes for which a CPU has tile instructions (AMX). The kernels that use these
            instructions need more memory.
        torch_version: modelled version of torch, as (major, minor). Older versions are used to
            reproduce published figures.
    """

    kind: Literal["cpu", "cuda"] = "cpu"
    name: str = "CPU"
    context_bytes: int = 0
    library_bytes: int = 0
    capability: tuple[int, int] = (8, 0)
    threads: int = 1
    tile_dtypes: frozenset[torch.dtype] = frozenset()
    torch_version: tuple[int, int] = (2, 13)


def this_cpu() -> Target:
    """Return the target for this machine's CPU."""
    found = {torch.bfloat16: torch.cpu._is_amx_tile_supported()}
    found[torch.float16] = torch.cpu._is_amx_fp16_supported()
    # torch uses AMX tiles only through oneDNN.
    tiles = {dtype for dtype in found if found[dtype] and torch.backends.mkldnn.enabled}
    return Target(threads=torch.get_num_threads(), tile_dtypes=frozenset(tiles))


def cuda_target(
    name: str,
    capability: tuple[int, int],
    context_bytes: int | None = None,
    torch_version: tuple[int, int] = (2, 13),
) -> Target:
    """Return the target for a CUDA GPU.

    Args:
        name, capability, torch_version: attributes of the target; see `Target`.
        context_bytes: bytes that a process uses on the device before it creates a tensor. None for
            500 MiB, which is approximately the size with torch 2 and CUDA 12.
    """
    context = 500 * 2**20 if context_bytes is None else context_bytes
    # Size of the cuBLAS workspace of each handle in torch's CUDABlas.cpp: 32 MiB on Hopper and
    # later GPUs, 8.1 MiB on older GPUs.
    library = 32 * 2**20 if capability >= (9, 0) else 4096 * 2 * 1024 + 16 * 8 * 1024
    return Target(
        "cuda", name, context, library, capability=capability, torch_version=torch_version
    )


def workspace_bytes(operator: Operator, target: Target) -> int:
    """Return the peak number of bytes that the kernel of an operator allocates internally through
    torch's allocator."""
    name = operator.base_name
    if name in ("blockwise_attention", "blockwise_attention_backward"):
        return blockwise_bytes(operator)
    # Assumption: CUDA kernels allocate only the cuBLAS workspace, which is counted in
    # `library_bytes`.
    if target.kind == "cuda":
        return 0
    # Assumption: all other CPU kernels allocate memory only for converted operands.
    kernel = _CPU_KERNELS.get(name)
    if kernel is not None:
        return kernel(operator, target)
    return promoted_operand_bytes(operator) if name in _ELEMENTWISE else 0


def blockwise_bytes(operator: Operator) -> int:
    """Return the number of bytes that `models.blockwise` allocates for the heads that it computes
    at the same time.

    It allocates contiguous copies of the queries, keys and values. In the backward pass, it also
    allocates the gradients of these tensors and of the result.

    Queries are also stored in fp32. Keys are also stored in fp32 if the inputs are in half
    precision or the values have a different head dimension. For each block of queries, the scores
    are stored twice in fp32. In the backward pass, three tensors of the same shape are stored for
    weights and gradients, in the dtype of the inputs. They are not in memory at the same time as
    the two fp32 tensors, so only the larger amount is counted.
    """
    is_backward = operator.base_name.endswith("backward")
    queries, keys, values = operator.inputs[1:4] if is_backward else operator.inputs[:3]
    has_sinks = any(len(shape) == 1 for shape, _ in operator.inputs)
    (batch, heads, new, size), dtype = queries
    kept, total = keys[0][1:3]
    narrow, wide = dtype.itemsize, max(dtype.itemsize, 4)
    rows, some = at_a_time(heads, kept, new, total)
    shared = min(rows, batch) * some
    own = shared * heads // kept
    of_queries, of_keys = size * own * new, size * shared * total
    has_wide_keys = narrow < wide or (values[0][3] != size and new > 1)
    held = wide * of_queries + (2 * narrow + (wide if has_wide_keys else 0)) * of_keys
    if is_backward:
        held += 2 * narrow * (of_queries + of_keys)
    # Attention sinks add a column to the scores.
    columns = ((end - start) * (seen + has_sinks) for start, end, seen in blocks_of(new, total))
    scores = own * max(columns)
    block = min(QUERIES, new)
    # With grouped heads, the queries and their gradients are copied.
    gathered = own * size * block if heads > kept and new > block else 0
    making = 2 * wide * scores + wide * gathered
    if is_backward:
        making = narrow * gathered + max(making, narrow * 3 * scores)
    return held + making


# CPU kernels


def attention_bytes(operator: Operator, target: Target) -> int:
    """Return the bytes that torch's flash attention for CPUs allocates.

    Each thread allocates a block of scores, the sums of these scores and the output for the block,
    all in fp32. In half precision, it also allocates a copy of the scores in that precision. If the
    kernel uses AMX tiles, it packs all keys in pairs of columns and all values in pairs of rows,
    and each thread also allocates a transposed block.
    """
    (batch, heads, length, head), dtype = operator.inputs[0]
    _, kept, total, _ = operator.inputs[1][0]
    queries, keys = _query_block(length), min(total, _KEY_BLOCK)
    size = 4 * queries * (keys + 2 + head)
    if dtype.itemsize == 4:
        return target.threads * size
    # The kernel packs keys and values only if each thread computes enough products to make packing
    # worthwhile.
    shortest, products = (64, 4) if dtype == torch.bfloat16 else (16, 1)
    turns = (batch * heads * -(-length // queries) + target.threads - 1) // target.threads
    is_packed = dtype in target.tile_dtypes and min(length, total) >= shortest
    if not is_packed or turns * queries < products * batch * kept:
        return target.threads * (size + dtype.itemsize * queries * keys)
    padded = queries * (head + 1) if head % 2 else 0
    own = queries * _even(keys) + keys * head + padded
    # Rows or columns are packed in pairs, so odd sizes are rounded up to the next even number.
    packed = batch * kept * (_even(head) * total + head * _even(total))
    return target.threads * (size + dtype.itemsize * own) + dtype.itemsize * packed


def attention_backward_bytes(operator: Operator, target: Target) -> int:
    """Return the bytes that the backward pass of torch's flash attention for CPUs allocates.

    Each thread allocates a block of scores and a block of their gradients. If the incoming gradient
    must be copied into a different layout, the copy is also counted. In half precision, the result
    also includes copies of both blocks in that precision and an approximate size for the copies
    that oneDNN makes.
    """
    (_, dtype), (shape, _), (keys, _) = operator.inputs[:3]
    queries = _query_block(shape[2])
    keys_of_block = min(keys[2], _KEY_BLOCK)
    block = queries * keys_of_block
    size = target.threads * 8 * block + 4 * queries
    if operator.options:
        size += bytes_of(operator.inputs[0])
    if dtype.itemsize < 4:
        size += target.threads * 2 * dtype.itemsize * block
        if dtype in target.tile_dtypes:
            # The sizes of a thread's transposed scores, of its block of keys and of oneDNN's
            # descriptors were fitted to measurements.
            scores = queries * min(4 * keys_of_block, 640) + 128
            size += target.threads * (max(scores, 2 * keys_of_block * shape[3]) + 5124)
        else:
            size += (1 if dtype == torch.bfloat16 else 2) * 1024 * keys_of_block
    return size


#: Number of keys per block in torch's FlashAttentionKernel.cpp. `_query_block` returns the number
#: of queries per block.
_KEY_BLOCK = 512
_MIB = 2**20


def _even(size: int) -> int:
    return size + size % 2


def _query_block(length: int) -> int:
    block = 256 if length >= 768 else 64 if length >= 192 else 32
    return min(block, length)


def product_bytes(operator: Operator, target: Target) -> int:
    """Return an upper bound on the bytes that oneDNN allocates for a matrix product in half
    precision.

    oneDNN copies blocks of the factors into a different layout. In bf16, each thread needs about
    200 KiB for the copies, or about 1 MiB if the first factor is transposed. In fp16, it needs
    about 1.5 MiB.
    """
    # addmm takes a bias before the two factors. `out` variants take the result after the two
    # factors.
    first = 1 if "addmm" in operator.name else 0
    ((*_, rows, inner), dtype), ((*_, columns), _) = operator.inputs[first : first + 2]
    if dtype.itemsize >= 4:
        return 0
    return _laid_out_bytes((rows, inner, columns), dtype, bool(operator.options), target)


def _laid_out_bytes(
    sizes: tuple[int, int, int], dtype: torch.dtype, transposed: bool, target: Target
) -> int:
    if dtype in target.tile_dtypes:
        return _laid_out_in_tiles_bytes(sizes, transposed, target.threads)
    rows, inner, columns = sizes
    factors = dtype.itemsize * min(inner, 1024) * (rows + columns) + target.threads * 64 * 1024
    if dtype == torch.float16:
        return min(factors, target.threads * _MIB) * 3 // 2
    return min(factors, target.threads * (_MIB if transposed else 200 * 1024))


def _laid_out_in_tiles_bytes(sizes: tuple[int, int, int], transposed: bool, threads: int) -> int:
    """Return an upper bound on the bytes that a matrix product with AMX tiles allocates, based on
    measurements with one and two threads.

    Each thread copies its part of the second factor into a different layout. If the first factor is
    transposed, the thread also copies its part of the first factor. If the inner dimension is long
    and therefore split, partial sums are stored in fp32.
    """
    # Sizes below 32 are padded to 32.
    rows, inner, columns = (max(size, 32) for size in sizes)
    if transposed:
        tall = min(-(-rows // 64) * 64, 256)
        own = 2 * inner * (tall + min(max(columns, 64), 192) + 8)
        return threads * (min(own, 1088 * 1024) + 8 * 1024)
    factor = 2 * inner * columns
    size = threads * (min(factor, _LAID_OUT_AT_ONCE) + 8 * 1024)
    if inner > 1280 and factor > _LAID_OUT_AT_ONCE:
        size += 4 * rows * min(columns, threads * 768)
    elif inner > 1280 and threads > 1 and rows * columns <= 2**17:
        # If the result is small, the threads divide the inner dimension among them.
        size += threads * 4 * rows * columns
    return size


#: Maximum bytes of a second factor that a thread copies at a time: 768 x 768 16-bit numbers.
_LAID_OUT_AT_ONCE = 2 * 768 * 768


def experts_bytes(operator: Operator, target: Target) -> int:
    """Return the bytes that the grouped matrix products in `models.moe` allocate on a CPU in bf16.

    The result for the rows of one expert is stored separately and then copied into the full result.
    In the backward pass, this result is a gradient. oneDNN's copies of the factors are also
    counted. The calculation assumes that one expert processes twice the mean number of rows.
    """
    (shape, dtype) = operator.inputs[0]
    if dtype != torch.bfloat16:
        return 0
    is_backward = operator.base_name.endswith("backward")
    experts, width, size = operator.inputs[2 if is_backward else 1][0]
    if shape[0] < ROWS_OF_BLOCKS * experts:
        return 0
    rows = min(shape[0], 2 * -(-shape[0] // experts))
    sizes = (width, rows, size) if is_backward else (rows, size, width)
    held = dtype.itemsize * rows * (max(width, size) if is_backward else width)
    return held + _laid_out_bytes(sizes, dtype, is_backward, target)


def softmax_with_masked_rows_bytes(operator: Operator, _: Target) -> int:
    """Return the number of bytes that `_safe_softmax` allocates to find rows in which all scores
    are masked. It allocates one byte per score."""
    return math.prod(operator.inputs[0][0])


def eight_bit_update_bytes(operator: Operator, _: Target) -> int:
    """Return the number of bytes that the 8-bit update of bitsandbytes allocates on a CPU. It
    allocates five fp32 tensors, of which two are the unpacked moments, one is the scaled gradient
    and two are for the denominator."""
    return 20 * math.prod(operator.inputs[0][0])


def small_update_bytes(operator: Operator, _: Target) -> int:
    """Return the number of bytes that the 32-bit update of bitsandbytes allocates on a CPU for the
    scaled gradient and the denominator."""
    return 12 * math.prod(operator.inputs[0][0])


def counted_booleans_bytes(operator: Operator, _: Target) -> int:
    """Return the bytes that a sum of booleans allocates. torch first converts the booleans to
    int64."""
    shape, dtype = operator.inputs[0]
    return 8 * math.prod(shape) if dtype == torch.bool else 0


def promoted_operand_bytes(operator: Operator) -> int:
    """Return the bytes that a CPU kernel allocates to convert its operands to a common dtype.

    Elementwise CPU kernels require all operands to have the same dtype. Operands of other dtypes,
    except scalars, are therefore first converted to temporary tensors.
    """
    tensors = [layout for layout in operator.inputs if layout[0]]
    if len({dtype for _, dtype in tensors}) < 2:
        return 0
    wide = tensors[0][1]
    for _, dtype in tensors[1:]:
        wide = torch.promote_types(wide, dtype)
    return sum(wide.itemsize * math.prod(shape) for shape, dtype in tensors if dtype != wide)


_ELEMENTWISE = ("add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_", "addcmul", "lerp")

_CPU_KERNELS: dict[str, Callable[[Operator, Target], int]] = {
    "_scaled_dot_product_flash_attention_for_cpu": attention_bytes,
    "_scaled_dot_product_flash_attention_for_cpu_backward": attention_backward_bytes,
    "_safe_softmax": softmax_with_masked_rows_bytes,
    **dict.fromkeys(("mm", "addmm", "bmm"), product_bytes),
    **dict.fromkeys(("grouped_linear", "grouped_linear_backward"), experts_bytes),
    "sum": counted_booleans_bytes,
    "optimizer_update_8bit_blockwise": eight_bit_update_bytes,
    "optimizer_update_32bit": small_update_bytes,
}

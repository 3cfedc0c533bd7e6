"""How a target's kernels and allocator differ from what a trace on fake CPU tensors shows.

Each difference is a function of its own with a test of its own. Two kinds:

- what a kernel allocates inside (`workspace_bytes`), by the operator's name;
- which kernels a GPU takes where a CPU takes others (`cuda_kernels`), so that autograd keeps other
  things for the backward pass.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import torch

from firstlight.models.blockwise import QUERIES, at_a_time, blocks_of
from firstlight.models.moe import ROWS_OF_BLOCKS
from firstlight.planner.memory.operators import Operator, bytes_of


@dataclass(frozen=True)
class Target:
    """What a prediction is for.

    Attributes:
        kind: "cpu" or "cuda".
        name: the device's name.
        context_bytes: bytes that a process takes on the device before its first tensor.
        library_bytes: bytes that libraries allocate once through torch's allocator (cuBLAS'
            workspace).
        capability: CUDA compute capability.
        threads: torch's, on a CPU; some kernels have a buffer for each.
        torch_version: (major, minor) of the torch whose kernels are modelled; older ones serve
            comparisons with published figures.
    """

    kind: Literal["cpu", "cuda"] = "cpu"
    name: str = "CPU"
    context_bytes: int = 0
    library_bytes: int = 0
    capability: tuple[int, int] = (8, 0)
    threads: int = 1
    torch_version: tuple[int, int] = (2, 13)


def this_cpu() -> Target:
    """This machine's CPU."""
    return Target(threads=torch.get_num_threads())


def cuda_target(
    name: str,
    capability: tuple[int, int],
    context_bytes: int | None = None,
    torch_version: tuple[int, int] = (2, 13),
) -> Target:
    """A CUDA GPU.

    Args:
        context_bytes: None is what torch 2's kernels and CUDA 12 were seen to take, about 500 MiB.
        torch_version: see `Target`.
    """
    context = 500 * 2**20 if context_bytes is None else context_bytes
    # torch's CUDABlas: 32 MiB from Hopper on, else 8.1 MiB, for each handle.
    library = 32 * 2**20 if capability >= (9, 0) else 4096 * 2 * 1024 + 16 * 8 * 1024
    return Target("cuda", name, context, library, capability, torch_version=torch_version)


def workspace_bytes(operator: Operator, target: Target) -> int:
    """What an operator's kernel allocates inside, through torch's allocator, at its peak."""
    name = operator.name.split(".")[1] if "." in operator.name else operator.name
    if name in _BLOCKWISE:
        return blockwise_bytes(operator)
    # CUDA's kernels are taken to allocate nothing inside but cuBLAS' workspace, see
    # `library_bytes`.
    if target.kind == "cuda":
        return 0
    kernel = _CPU_KERNELS.get(name)
    if kernel is not None:
        return kernel(operator, target)
    return promoted_operand_bytes(operator) if name in _ELEMENTWISE else 0


def blockwise_bytes(operator: Operator) -> int:
    """`models.blockwise`, of a part at a time: queries, keys and values in order, the first two in
    fp32 too; backward their gradients and that of the result; of a block's scores two tensors in
    fp32, and then of its weights and their gradients three."""
    is_backward = operator.base_name.endswith("backward")
    queries, keys = operator.inputs[1:3] if is_backward else operator.inputs[:2]
    (batch, heads, new, size), dtype = queries
    kept, total = keys[0][1:3]
    narrow, wide = dtype.itemsize, max(dtype.itemsize, 4)
    rows, some = at_a_time(heads, kept, new, total)
    shared = min(rows, batch) * some
    own = shared * heads // kept
    of_queries, of_keys = size * own * new, size * shared * total
    held = wide * of_queries + (2 * narrow + (wide if narrow < wide else 0)) * of_keys
    if is_backward:
        held += 2 * narrow * (of_queries + of_keys)
    scores = own * max((end - start) * seen for start, end, seen in blocks_of(new, total))
    block = min(QUERIES, new)
    # Queries of grouped heads, and their gradients, are brought together.
    gathered = own * size * block if heads > kept and new > block else 0
    making = 2 * wide * scores + wide * gathered
    if not is_backward:
        return held + making
    return held + narrow * gathered + max(making, narrow * 3 * scores)


# CPU kernels


def attention_bytes(operator: Operator, target: Target) -> int:
    """torch's flash attention for CPUs: a block of scores, its sums and its result for each
    thread, in fp32; of the scores in half precision, too."""
    (shape, dtype), (keys, _) = operator.inputs[0], operator.inputs[1]
    queries, head = _query_block(shape[2]), shape[3]
    block = queries * min(keys[2], _KEY_BLOCK)
    size = 4 * (block + 2 * queries + queries * head)
    if dtype.itemsize < 4:
        size += dtype.itemsize * block
    return target.threads * size


def attention_backward_bytes(operator: Operator, target: Target) -> int:
    """Its backward pass: a block of scores and one of their gradients for each thread; the
    gradient that comes in, where it has to be laid out anew; in half precision those blocks
    rounded, too, and what oneDNN lays out (about)."""
    (_, dtype), (shape, _), (keys, _) = operator.inputs[:3]
    queries = _query_block(shape[2])
    block = queries * min(keys[2], _KEY_BLOCK)
    size = target.threads * 8 * block + 4 * queries
    if operator.options:
        size += bytes_of(operator.inputs[0])
    if dtype.itemsize < 4:
        size += target.threads * 2 * dtype.itemsize * block
        size += (1 if dtype == torch.bfloat16 else 2) * 1024 * min(keys[2], _KEY_BLOCK)
    return size


#: Blocks of keys, and of queries by the row's length, in torch's FlashAttentionKernel.cpp.
_KEY_BLOCK = 512


_MIB = 2**20


def _query_block(length: int) -> int:
    block = 256 if length >= 768 else 64 if length >= 192 else 32
    return min(block, length)


def product_bytes(operator: Operator, target: Target) -> int:
    """oneDNN's products in half precision lay blocks of their factors out anew: some 200 KiB for
    each thread (bf16), about a megabyte where the first factor is transposed, and in fp16 one and
    a half. An upper bound."""
    # `out` comes last, as the factors' names do before it.
    first = 1 if "addmm" in operator.name else 0
    ((*_, rows, inner), dtype), ((*_, columns), _) = operator.inputs[first : first + 2]
    if dtype.itemsize >= 4:
        return 0
    return _laid_out_bytes((rows, inner, columns), dtype, bool(operator.options), target)


def _laid_out_bytes(
    sizes: tuple[int, int, int], dtype: torch.dtype, transposed: bool, target: Target
) -> int:
    rows, inner, columns = sizes
    factors = dtype.itemsize * min(inner, 1024) * (rows + columns) + target.threads * 64 * 1024
    if dtype == torch.float16:
        return min(factors, target.threads * _MIB) * 3 // 2
    return min(factors, target.threads * (_MIB if transposed else 200 * 1024))


def experts_bytes(operator: Operator, target: Target) -> int:
    """`models.moe` on a CPU in bf16: what comes of an expert's rows before it is put among the
    others, and backward its rows' gradient; of an expert that twice as many visit as others. And
    what oneDNN lays out."""
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
    """`_safe_softmax` looks for rows of which nothing is seen: a byte a score."""
    return math.prod(operator.inputs[0][0])


def eight_bit_update_bytes(operator: Operator, _: Target) -> int:
    """bitsandbytes' 8-bit update for CPUs: both moments unpacked, the scaled gradient, and the
    denominator in two steps, all in fp32."""
    return 20 * math.prod(operator.inputs[0][0])


def small_update_bytes(operator: Operator, _: Target) -> int:
    """bitsandbytes' 32-bit update for CPUs: scaled gradient and denominator."""
    return 12 * math.prod(operator.inputs[0][0])


def counted_booleans_bytes(operator: Operator, _: Target) -> int:
    """A sum of booleans makes them int64 first."""
    shape, dtype = operator.inputs[0]
    return 8 * math.prod(shape) if dtype == torch.bool else 0


def promoted_operand_bytes(operator: Operator) -> int:
    """Element by element, CPU kernels take operands of one dtype: those of another, unless they are
    single numbers, are converted into temporaries, all at once."""
    tensors = [layout for layout in operator.inputs if layout[0]]
    if len({dtype for _, dtype in tensors}) < 2:
        return 0
    wide = tensors[0][1]
    for _, dtype in tensors[1:]:
        wide = torch.promote_types(wide, dtype)
    return sum(wide.itemsize * math.prod(shape) for shape, dtype in tensors if dtype != wide)


_ELEMENTWISE = ("add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_", "addcmul", "lerp")

_BLOCKWISE = ("blockwise_attention", "blockwise_attention_backward")

_CPU_KERNELS: dict[str, Callable[[Operator, Target], int]] = {
    "_scaled_dot_product_flash_attention_for_cpu": attention_bytes,
    "_scaled_dot_product_flash_attention_for_cpu_backward": attention_backward_bytes,
    "_safe_softmax": softmax_with_masked_rows_bytes,
    "mm": product_bytes,
    "addmm": product_bytes,
    "bmm": product_bytes,
    "grouped_linear": experts_bytes,
    "grouped_linear_backward": experts_bytes,
    "sum": counted_booleans_bytes,
    "optimizer_update_8bit_blockwise": eight_bit_update_bytes,
    "optimizer_update_32bit": small_update_bytes,
}


_ROUND = 512
_SMALL = _MIB
_SMALL_SEGMENT = 2 * _MIB
_MIDDLE = 10 * _MIB
_MIDDLE_SEGMENT = 20 * _MIB
_LARGE_ROUND = 2 * _MIB


def rounded(size: int) -> int:
    """Bytes that the allocator counts for a storage."""
    return max(-(-size // _ROUND) * _ROUND, _ROUND) if size else 0


@dataclass(eq=False)
class _Block:
    """A piece of a segment, in a chain of neighbours."""

    size: int
    address: int
    is_small: bool
    is_free: bool = True
    before: _Block | None = None
    after: _Block | None = None


class CachingAllocator:
    """The allocator's books, without memory.

    Attributes:
        allocated, reserved: bytes now.
        peak_allocated, peak_reserved: the most there were.
    """

    def __init__(self) -> None:
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0
        self._free: dict[bool, list[tuple[int, int, _Block]]] = {True: [], False: []}
        self._next_address = 0

    def allocate(self, size: int) -> _Block:
        """Take a block for so many bytes."""
        size = rounded(size) or _ROUND
        is_small = size <= _SMALL
        block = self._found(size, is_small) or self._segment(size, is_small)
        left = block.size - size
        if left >= _ROUND if is_small else left > _SMALL:
            self._cut(block, size)
        block.is_free = False
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def free(self, block: _Block) -> None:
        """Give a block back."""
        self.allocated -= block.size
        block.is_free = True
        # Free neighbours are joined, or their halves would be too small for the next large storage.
        for other in (block.before, block.after):
            if other is not None and other.is_free:
                self._remove(other)
                block = self._join(*((other, block) if other is block.before else (block, other)))
        self._insert(block)

    def _found(self, size: int, is_small: bool) -> _Block | None:
        free = self._free[is_small]
        place = bisect.bisect_left(free, (size, -1))
        return free.pop(place)[2] if place < len(free) else None

    def _segment(self, size: int, is_small: bool) -> _Block:
        if is_small:
            length = _SMALL_SEGMENT
        elif size < _MIDDLE:
            length = _MIDDLE_SEGMENT
        else:
            length = -(-size // _LARGE_ROUND) * _LARGE_ROUND
        block = _Block(length, self._next_address, is_small)
        # Segments are no neighbours, whatever their addresses.
        self._next_address += length
        self.reserved += length
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return block

    def _cut(self, block: _Block, size: int) -> None:
        rest = _Block(block.size - size, block.address + size, block.is_small)
        rest.before, rest.after = block, block.after
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size
        self._insert(rest)

    @staticmethod
    def _join(first: _Block, second: _Block) -> _Block:
        first.size += second.size
        first.after, first.is_free = second.after, True
        if second.after is not None:
            second.after.before = first
        return first

    def _insert(self, block: _Block) -> None:
        bisect.insort(self._free[block.is_small], (block.size, block.address, block))

    def _remove(self, block: _Block) -> None:
        free = self._free[block.is_small]
        free.pop(bisect.bisect_left(free, (block.size, block.address)))


def reserved_bytes(lifetimes: Iterable[tuple[int, int, int]]) -> int:
    """The most that the allocator reserves.

    Args:
        lifetimes: (size, first tick, last tick) of each storage, in the order of their making.
    """
    allocator = CachingAllocator()
    # What dies at a tick is given up before what is made at the next.
    events: list[tuple[int, int, int]] = []
    sizes = []
    for number, (size, birth, death) in enumerate(lifetimes):
        sizes.append(size)
        if size:
            events += [(birth, 1, number), (death + 1, 0, number)]
    # At one tick, frees (0) sort before allocations (1).
    events.sort()
    blocks: dict[int, _Block] = {}
    for _, makes, number in events:
        if makes:
            blocks[number] = allocator.allocate(sizes[number])
        else:
            allocator.free(blocks.pop(number))
    return allocator.peak_reserved

"""The books of CUDA's caching allocator, which reserves more than it allocates."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass

_MIB = 2**20
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

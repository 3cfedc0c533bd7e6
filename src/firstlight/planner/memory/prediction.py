"""Compute the memory use of a traced program. The results are the memory in use at each tick of the
trace, the peak by part and by phase, and the bytes that CUDA's caching allocator reserves. Traces
are created in `trace.py`, and `recipe.py` predicts the memory use of a recipe."""

from __future__ import annotations

import bisect
import collections
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from firstlight.planner.memory.kernels import OperatorCount, Target, workspace_bytes
from firstlight.planner.memory.trace import ALIVE, Trace

#: Kinds of memory content, called parts, in the order in which tables show them.
PARTS = (
    "weights",
    "gradients",
    "optimizer_states",
    "activations",
    "logits_and_loss",
    "temporaries",
    "communication",
    "framework",
    "checkpoint_copy",
    "averaged_weights",
)

#: Names of the phases for the later sections of a backward pass; see `predict`.
MIDDLE_BACKWARD, LATE_BACKWARD = "middle of backward", "late backward"

#: Phases that come before a backward pass.
_BEFORE_BACKWARD = ("setup", "forward", "loss")

Ticks = npt.NDArray[np.int64]


@dataclass(frozen=True)
class PhasePeak:
    """The memory in use at the peak of a phase.

    Attributes:
        bytes: allocated bytes.
        parts: bytes for each name in `PARTS`.
    """

    bytes: int
    parts: dict[str, int]


@dataclass(frozen=True)
class MemoryPrediction:
    """The predicted memory of a run.

    Attributes:
        peak_bytes: peak of the allocated bytes. On a GPU, this is the value of
            `torch.cuda.max_memory_allocated`. On a CPU, it is the peak of the total size of all
            tensors.
        phase: phase in which the peak occurs, such as "forward", "loss", "backward" or "optimizer".
        parts: bytes at the peak for each name in `PARTS`.
        phases: the peak of each phase.
        reserved_bytes: peak of the bytes that the allocator has reserved, including rounding and
            fragmentation. On a CPU, this is equal to `peak_bytes`.
        overhead_bytes: GPU memory of the CUDA context and of libraries, which the allocator does
            not count.
        host_bytes: size in bytes of the tensors that a GPU run offloads to host memory.
        operators: operators and their numbers of calls in the last optimizer step, evaluation batch
            or decoding step.
        notes: assumptions of the prediction, as shown to the user.
    """

    peak_bytes: int
    phase: str
    parts: dict[str, int]
    phases: dict[str, PhasePeak]
    reserved_bytes: int
    overhead_bytes: int
    host_bytes: int
    operators: tuple[OperatorCount, ...]
    notes: tuple[str, ...] = ()

    @property
    def total_bytes(self) -> int:
        """Bytes that the device's monitoring tool reports, which are the reserved memory and the
        overhead."""
        return self.reserved_bytes + self.overhead_bytes

    def to_json(self) -> dict[str, Any]:
        """Return the prediction as JSON values. The thousands of operators are omitted."""
        values = asdict(self)
        values["total_bytes"] = self.total_bytes
        values["notes"] = list(self.notes)
        del values["operators"]
        return values


def predict(
    trace: Trace,
    target: Target,
    first_counted_tick: int = 0,
    *,
    phases: Sequence[str] | None = None,
    stretches: int = 1,
) -> MemoryPrediction:
    """Predict the memory use of a traced run on a target device.

    Args:
        trace: a finished trace.
        target: device whose kernels and allocator are modelled.
        first_counted_tick: first tick whose operators are counted.
        phases: names of the phases to consider; None for all phases.
        stretches: number of sections into which each backward pass is split. All sections have the
            same number of operators. With 2 sections, the second is a separate phase named
            `LATE_BACKWARD`. With 3 sections, the second is named `MIDDLE_BACKWARD` and the third
            `LATE_BACKWARD`.
    """
    timeline = Timeline(trace, target)
    timeline.split_backward(stretches)
    peaks = timeline.phase_peaks()
    peaks = {name: peaks[name] for name in phases or peaks}
    phase = max(peaks, key=lambda name: peaks[name].bytes)
    # The peak of an evaluation does not include storages that were freed in the training step
    # before it.
    reserved = timeline.reserved_bytes(timeline.first_tick(phases) if phases else 0)
    peak = peaks[phase].bytes
    return MemoryPrediction(
        peak_bytes=peak,
        phase=phase,
        parts=peaks[phase].parts,
        phases=peaks,
        # The peak includes kernel workspaces, which are not part of the allocator model.
        reserved_bytes=max(reserved, peak),
        overhead_bytes=target.context_bytes,
        host_bytes=trace.host_bytes,
        operators=_counted(trace, first_counted_tick),
        notes=tuple(dict.fromkeys(trace.notes)),
    )


def _counted(trace: Trace, first: int) -> tuple[OperatorCount, ...]:
    counts = collections.Counter(trace.calls[first:])
    return tuple(OperatorCount(trace.operators[i], count) for i, count in counts.items())


class Timeline:
    """Memory in use at each tick of a trace, in total and for each name in `PARTS`.

    Args:
        trace: a finished trace.
        target: the device whose kernels and allocator are modelled.

    Attributes:
        parts: number of bytes at each tick, as an int64 array of shape [ticks] for each part.
        total: number of bytes of all parts at each tick, as an int64 array of shape [ticks].
    """

    def __init__(self, trace: Trace, target: Target) -> None:
        self.trace, self.target = trace, target
        self._ticks = max(len(trace.calls), 1)
        settle_parts(trace)
        changes: dict[str, Ticks] = {}
        for storage in trace.storages:
            # CUDA's allocator counts rounded sizes. On a CPU, exact sizes are counted.
            size = storage.size if target.kind == "cpu" else rounded(storage.size)
            change = changes.get(storage.part)
            if change is None:
                change = changes[storage.part] = np.zeros(self._ticks + 1, np.int64)
            change[min(storage.birth, self._ticks)] += size
            change[min(storage.death + 1, self._ticks)] -= size
        # The changes in size are summed once for all ticks, because a loop over storages and ticks
        # would take several seconds.
        self.parts = {part: np.cumsum(change[:-1]) for part, change in changes.items()}
        self._add_workspaces()
        self.total: Ticks = sum(self.parts.values(), np.zeros(self._ticks, np.int64))
        self._phases = np.asarray(trace.phases, np.int64)
        self._names = list(trace.phase_names)

    def _add_workspaces(self) -> None:
        trace = self.trace
        sizes = np.array(
            [workspace_bytes(operator, self.target) for operator in trace.operators] or [0],
            np.int64,
        )
        if trace.calls:
            inside = sizes[np.asarray(trace.calls)]
            self.parts["temporaries"] = self.parts.get("temporaries", 0) + inside
        if self.target.library_bytes:
            self.parts["framework"] = np.full(self._ticks, self.target.library_bytes, np.int64)

    def phase_peaks(self) -> dict[str, PhasePeak]:
        """Return the peak of each phase, in the order in which the phases began."""
        peaks: dict[str, PhasePeak] = {}
        for index, name in enumerate(self._names):
            ticks = np.flatnonzero(self._phases == index)
            if len(ticks):
                peaks[name] = self.at(int(ticks[np.argmax(self.total[ticks])]))
        return peaks or {"setup": PhasePeak(0, {})}

    def split_backward(self, stretches: int) -> None:
        """Assign the later sections of each backward pass to separate phases; see `predict`."""
        if "backward" not in self._names:
            return
        names = (MIDDLE_BACKWARD, LATE_BACKWARD)[3 - stretches :]
        own = self._names.index("backward")
        # A backward pass ends where the next forward pass begins. It can contain other phases, such
        # as the gradients of the loss and parameter updates.
        before = [i for i, name in enumerate(self._names) if name in _BEFORE_BACKWARD]
        ticks = np.flatnonzero(~np.isin(self._phases, before))
        for passed in np.split(ticks, np.flatnonzero(np.diff(ticks) > 1) + 1):
            passed = passed[self._phases[passed] == own]
            for number in range(1, stretches):
                first = len(passed) * number // stretches
                self._phases[passed[first:]] = len(self._names) + number - 1
        self._names += names

    def at(self, tick: int) -> PhasePeak:
        """Return the memory in use at a tick."""
        found = {part: int(self.parts[part][tick]) for part in PARTS if part in self.parts}
        return PhasePeak(sum(found.values()), {k: v for k, v in found.items() if v})

    def first_tick(self, phases: Sequence[str]) -> int:
        """Return the first tick that belongs to any of these phases."""
        wanted = [index for index, name in enumerate(self._names) if name in phases]
        return int(np.argmax(np.isin(self._phases, wanted)))

    def reserved_bytes(self, first: int = 0) -> int:
        """Return the peak of the bytes that the target's allocator reserves.

        Args:
            first: first tick to consider. Storages that were freed earlier are ignored, because the
                allocator can return their memory.
        """
        if self.target.kind == "cpu":
            return int(self.total[first:].max())
        lifetimes = [(self.target.library_bytes, 0, ALIVE)]
        lifetimes += [
            (s.size, max(s.birth - first, 0), s.death - first)
            for s in self.trace.storages
            if s.death >= first
        ]
        return reserved_bytes(lifetimes)


def settle_parts(trace: Trace) -> None:
    """Assign a part to each storage that was not marked in the trace.

    Tensors that a forward pass creates and that outlive it are saved for the backward pass. They
    are activations, except for tensors that are created by the output head or the loss function.
    The same applies to a recomputed forward pass. All other tensors are temporaries.
    """
    kept, again = (_ends(trace, spans) for spans in (trace.segments, trace.recomputations))
    for storage in trace.storages:
        if storage.part:
            continue
        if storage.phase in ("loss", "backward of loss"):
            storage.part = "logits_and_loss"
        elif storage.death > (again if storage.recomputed else kept)[storage.birth]:
            storage.part = "activations"
        else:
            storage.part = "temporaries"


def _ends(trace: Trace, spans: Sequence[tuple[int, int]]) -> Ticks:
    """Return an int64 array of shape [ticks] that contains, for each tick, the last tick of the
    span around it. For ticks outside all spans, the value is `ALIVE`, which no storage outlives."""
    ends = np.full(max(len(trace.calls), 1), ALIVE, np.int64)
    for first, last in spans:
        ends[first : last + 1] = last
    return ends


# CUDA's caching allocator (c10's CUDACachingAllocator.cpp)

# All values are in bytes. The size of each storage is rounded up to a multiple of `_ROUND`.
# Storages of up to `_SMALL` bytes share small segments, and storages of less than `_MIDDLE` bytes
# share medium segments. Each larger storage gets a separate segment, whose size is rounded up to a
# multiple of `_LARGE_ROUND`.
_MIB = 2**20
_ROUND = 512
_SMALL = _MIB
_SMALL_SEGMENT = 2 * _MIB
_MIDDLE = 10 * _MIB
_MIDDLE_SEGMENT = 20 * _MIB
_LARGE_ROUND = 2 * _MIB


def rounded(size: int) -> int:
    """Return the number of bytes that the allocator counts for a storage."""
    return max(-(-size // _ROUND) * _ROUND, _ROUND) if size else 0


@dataclass(eq=False)
class _Block:
    """A block of memory within a segment, linked to the neighbouring blocks `before` and
    `after`."""

    size: int
    address: int
    is_small: bool
    is_free: bool = True
    before: _Block | None = None
    after: _Block | None = None


class CachingAllocator:
    """Simulates the blocks and segments of CUDA's caching allocator, without allocating any memory.

    Attributes:
        reserved: total size of all segments, in bytes. Segments are never returned to CUDA.
    """

    def __init__(self) -> None:
        self.reserved = 0
        self._free: dict[bool, list[tuple[int, int, _Block]]] = {True: [], False: []}

    def allocate(self, size: int) -> _Block:
        """Return a block with at least this number of bytes, and mark it as used."""
        size = rounded(size) or _ROUND
        is_small = size <= _SMALL
        # The smallest free block that is large enough is used (best fit).
        free = self._free[is_small]
        place = bisect.bisect_left(free, (size, -1))
        block = free.pop(place)[2] if place < len(free) else self._segment(size, is_small)
        left = block.size - size
        if left >= _ROUND if is_small else left > _SMALL:
            rest = _Block(left, block.address + size, is_small, before=block, after=block.after)
            if rest.after is not None:
                rest.after.before = rest
            block.after, block.size = rest, size
            self._insert(rest)
        block.is_free = False
        return block

    def free(self, block: _Block) -> None:
        """Free a block."""
        block.is_free = True
        # Neighbouring free blocks are merged, because each of them may be too small for the next
        # large storage.
        for other in (block.before, block.after):
            if other is not None and other.is_free:
                free = self._free[other.is_small]
                free.pop(bisect.bisect_left(free, (other.size, other.address)))
                block, second = (other, block) if other is block.before else (block, other)
                block.size += second.size
                block.after = second.after
                if second.after is not None:
                    second.after.before = block
        self._insert(block)

    def _segment(self, size: int, is_small: bool) -> _Block:
        if is_small:
            length = _SMALL_SEGMENT
        elif size < _MIDDLE:
            length = _MIDDLE_SEGMENT
        else:
            length = -(-size // _LARGE_ROUND) * _LARGE_ROUND
        # Blocks are only linked to blocks in the same segment, because segments are not adjacent in
        # memory.
        block = _Block(length, self.reserved, is_small)
        self.reserved += length
        return block

    def _insert(self, block: _Block) -> None:
        bisect.insort(self._free[block.is_small], (block.size, block.address, block))


def reserved_bytes(lifetimes: Iterable[tuple[int, int, int]]) -> int:
    """Return the peak of the bytes that the allocator reserves.

    Args:
        lifetimes: (bytes, first tick, last tick) of each storage, in the order in which the
            storages were created.
    """
    allocator = CachingAllocator()
    events: list[tuple[int, int, int, int]] = []
    for number, (size, birth, death) in enumerate(lifetimes):
        if size:
            events += [(birth, 1, number, size), (death + 1, 0, number, size)]
    # Because of the second value, storages that are freed at the end of a tick (0) are sorted
    # before storages that are allocated at the next tick (1).
    blocks: dict[int, _Block] = {}
    for _, makes, number, size in sorted(events):
        if makes:
            blocks[number] = allocator.allocate(size)
        else:
            allocator.free(blocks.pop(number))
    return allocator.reserved

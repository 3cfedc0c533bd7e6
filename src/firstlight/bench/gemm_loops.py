"""The part of `firstlight bench gemm` that measures a CPU's caches and cores:

- on one thread, the rates of passes over arrays of growing size and of matrix products in blocks of
  growing size,
- on all threads, the time of a growing number of equal products.

A pass reads an array in fp32 and sums it up. An array that fits into a cache is read from memory
only once, so the rate falls in steps at the sizes of L1, L2 and L3. One call of torch makes as many
passes as read `_CALL_BYTES`, so that small arrays don't measure the cost of a call.

The product C = A @ B of square fp32 matrices is cut into blocks in two ways; each block is a call
of the library:

    row blocks      C[rows] = A[rows] @ B: all of B is read once for each block of rows; with blocks
                    of one row, no element of B is used twice in a call
    square blocks   C[i, j] += A[i, k] @ B[k, j] in three loops: blocks are reused only while three
                    of them fit into a cache; with small blocks the cost of a call dominates

The largest block of both is the whole product, in the blocks that the library itself chooses.

For waves, each of several equal products is computed by one thread. On two threads the third
product waits until a thread is free, so three products take as long as four. A GPU likewise needs a
second wave for one tile more than it has multiprocessors.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from firstlight.bench.gemm_products import GemmPlan
from firstlight.hardware.device import single_threaded_pool

#: Linux's description of the first core's caches.
CACHE_FOLDER = Path("/sys/devices/system/cpu/cpu0/cache")

#: Minimum of bytes that one call reads.
_CALL_BYTES = 1 << 22

#: Number of measurements of each row, of which the row has the median.
_REPEATS = 5

#: Number of measurements of each number of products; more, since each takes a few milliseconds.
_WAVE_REPEATS = 15


def cache_sizes(folder: Path = CACHE_FOLDER) -> dict[str, int]:
    """The bytes of each data cache, such as {"L1": 32768}; empty if the system lists no cache."""
    found = {}
    for index in sorted(folder.glob("index*")):
        try:
            kind, level, size = (
                (index / name).read_text(encoding="ascii").strip()
                for name in ("type", "level", "size")
            )
        except OSError:  # some ARM machines list a cache without its size
            continue
        if kind != "Instruction":
            found[f"L{level}"] = int(size.removesuffix("K")) * 1024
    return found


def sum_passes(data: Tensor) -> tuple[Callable[[], Tensor], int]:
    """A function that sums up the array `data` [numbers] in several passes and returns the sum of
    each pass [passes]; and the number of passes, which together read about `_CALL_BYTES`."""
    passes = max(1, _CALL_BYTES // data.nbytes)
    repeated, sums = data.expand(passes, -1), torch.empty(passes)
    return lambda: torch.sum(repeated, 1, out=sums), passes


def multiply_rows(a: Tensor, b: Tensor, out: Tensor, rows: int) -> None:
    """Write a @ b into `out`, all [edge, edge], in blocks of `rows` rows."""
    for i in range(0, len(a), rows):
        torch.mm(a[i : i + rows], b, out=out[i : i + rows])


def multiply_squares(a: Tensor, b: Tensor, out: Tensor, block: int) -> None:
    """Write a @ b into `out`, all [edge, edge], in blocks of `block` rows and columns."""
    out.zero_()
    for i in range(0, len(a), block):
        for j in range(0, len(a), block):
            part = out[i : i + block, j : j + block]
            for k in range(0, len(a), block):
                part.addmm_(a[i : i + block, k : k + block], b[k : k + block, j : j + block])


#: Function and smallest block of each cut; blocks grow by powers of 2. Square blocks below 32 would
#: mostly measure the cost of calls.
_CUTS = {"row blocks": (multiply_rows, 1), "square blocks": (multiply_squares, 32)}


def measure_loops(plan: GemmPlan) -> dict[str, Any]:
    """Measure passes over arrays and products in blocks on one thread, and waves on all threads.

    Args:
        plan: its `pass_bytes`, `blocked_edge` (a power of 2) and `measure_seconds` are read.

    Returns:
        - "caches": see `cache_sizes`
        - "passes": "bytes" and "bytes_per_second" of each array
        - "blocks": "cut" ("row blocks", "square blocks"), "block" (rows of a block) and
          "flops_per_second"
        - "edge": rows and columns of the product that is cut into blocks
        - "waves": see `measure_waves`

        Rates are medians, with "lowest" and "highest".
    """
    edge, measure_seconds = plan.blocked_edge, plan.measure_seconds
    waves = measure_waves(edge // 2, torch.get_num_threads())
    with _one_thread():
        passes = []
        for size in plan.pass_bytes:
            call, count = sum_passes(torch.rand(size // 4))
            rates = _rates(call, count * size, measure_seconds)
            passes.append({"bytes": size, **_median("bytes_per_second", rates)})
        a, b, out = torch.rand(edge, edge), torch.rand(edge, edge), torch.empty(edge, edge)
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
    """Measure the time of several products at once relative to that of a single product.

    Args:
        edge: rows and columns of each product.
        threads: number of threads; each multiplies one product at a time.

    Returns:
        "threads", "edge" and "rows". Each row has "products", their number, and "time_ratio" with
        "lowest" and "highest": the median of ratios of two measurements, made one after the other.
        The numbers of products are 1, and for one to four waves the full waves and one more.
    """
    counts = sorted({n for wave in range(1, 5) for n in (wave * threads, wave * threads + 1)} | {1})
    a, b, outs = torch.rand(edge, edge), torch.rand(edge, edge), torch.empty(counts[-1], edge, edge)
    with single_threaded_pool(threads, "wave") as pool:

        def seconds(count: int) -> float:
            start = time.perf_counter()
            for _ in pool.map(lambda out: torch.mm(a, b, out=out), outs[:count]):
                pass
            return time.perf_counter() - start

        seconds(counts[-1])  # not measured: the pool starts its threads
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


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _rates(call: Callable[[], object], work: int, measure_seconds: float) -> list[float]:
    """Work per second in each of `_REPEATS` measurements, after one uncounted call.

    Args:
        call: function to measure.
        work: work of one call, in bytes or FLOPs.
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
        loops: the result.
        passes: matplotlib axes for the rates of passes, with the sizes of the caches.
        blocks: axes for the rates of products in blocks.
        waves: axes for the times of several products at once.
    """
    rows = loops["passes"]
    _draw_medians(passes, rows, "bytes", "bytes_per_second", "C0", "passes, fp32")
    for name, size in loops["caches"].items():
        passes.axvline(size, color="black", linestyle="--", linewidth=0.8)
        passes.annotate(name, (size, 0.02), xycoords=("data", "axes fraction"))
    passes.set_xscale("log", base=2)
    passes.set(xlabel="bytes of the array, read by one thread", ylabel="GB/s", ylim=(0, None))
    for number, cut in enumerate(_CUTS):
        these = [row for row in loops["blocks"] if row["cut"] == cut]
        _draw_medians(blocks, these, "block", "flops_per_second", f"C{number}", cut)
    blocks.set_xscale("log", base=2)
    edge = loops["edge"]
    blocks.set(
        xlabel=f"rows of a block; at {edge} the whole product, one thread",
        ylabel="GFLOP/s",
        ylim=(0, None),
    )
    blocks.legend()
    found = loops["waves"]
    places = [row["products"] for row in found["rows"]]
    _draw_medians(waves, found["rows"], "products", "time_ratio", "C0", "time", unit=1)
    waves.plot(
        places,
        [-(-place // found["threads"]) for place in places],
        color="black",
        linestyle="--",
        linewidth=0.8,
    )
    waves.set(
        xlabel=f"products at once, each of one of {found['threads']} threads",
        ylabel="time / time of one (dashed: waves)",
        ylim=(0, None),
    )


def _draw_medians(
    axes: Any,
    rows: Sequence[Mapping[str, Any]],
    x: str,
    y: str,
    color: str,
    label: str,
    unit: float = 1e9,
) -> None:
    places = [row[x] for row in rows]
    axes.plot(places, [row[y] / unit for row in rows], "o-", color=color, label=label)
    low, high = ([row[end] / unit for row in rows] for end in ("lowest", "highest"))
    axes.fill_between(places, low, high, color=color, alpha=0.2)

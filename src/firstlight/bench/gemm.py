"""`firstlight bench gemm`: this machine's matrix-product rate by shape and by alignment.

The operands are random and made once for each number format. Each result overwrites the last one,
so that no memory is allocated during the measurement. A product that takes less than a measurement
is repeated in it with the same operands, after one product that is not timed: operands that fit
into the caches are in them. Each round measures every product once, but the products of `COMPARED`
`GemmPlan.turns` times; a row shows the median. Compared products are measured shortly after each
other, so that other work of the machine affects both, and their ratio is the median over the pairs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor

from firstlight.bench.gemm_products import (
    COMPARED,
    DTYPES,
    MODELS,
    STEP_TOKENS,
    TILE_EDGE,
    GemmPlan,
    GemmProduct,
    GPT2Shape,
    Operands,
    all_products,
    fp32_products,
    make_multiply,
    make_operands,
    measure_product,
    paddings,
    plan_for,
    repeats_of,
    unaligned,
    warm_up,
)
from firstlight.bench.models import OLD_NAMES
from firstlight.bench.options import GemmBench, require_known
from firstlight.bench.pictures import new_figure, png_of
from firstlight.console import progress_bar
from firstlight.errors import ConfigError
from firstlight.hardware.device import Hardware, find_hardware, machine_facts, single_threaded_pool

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
    a = torch.rand(edge, edge)
    b = torch.rand(edge, edge)
    outs = torch.empty(counts[-1], edge, edge)
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
    _draw_medians(passes, rows, "bytes", "bytes_per_second", color="C0", label="passes, fp32")
    for name, size in loops["caches"].items():
        passes.axvline(size, color="black", linestyle="--", linewidth=0.8)
        passes.annotate(name, (size, 0.02), xycoords=("data", "axes fraction"))
    passes.set_xscale("log", base=2)
    passes.set(xlabel="bytes of the array, read by one thread", ylabel="GB/s", ylim=(0, None))
    for number, cut in enumerate(_CUTS):
        these = [row for row in loops["blocks"] if row["cut"] == cut]
        _draw_medians(blocks, these, "block", "flops_per_second", color=f"C{number}", label=cut)
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
    _draw_medians(waves, found["rows"], "products", "time_ratio", color="C0", label="time", unit=1)
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
    """The names of DTYPES that the device multiplies in hardware; "fp32" is always among them."""
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
    """A running benchmark, whose measurements so far can be read at any time.

    Attributes:
        dtypes: names of DTYPES that are measured.
        products: all products.
        seconds: seconds of a product in each measurement, by number format and product's index.
        rounds: number of rounds that have begun.
        loops: result of `measure_loops`; None before it is measured, and on GPUs.
        complete: True once everything is measured.

    Raises:
        ConfigError: a name is unknown, or the device has no hardware for a number format.
    """

    def __init__(self, bench: GemmBench, plan: GemmPlan | None = None) -> None:
        bench = replace(bench, model=OLD_NAMES.get(bench.model, bench.model))
        self.bench, self.hardware = bench, find_hardware(bench.device)
        device, able = self.hardware.device, hardware_dtypes(self.hardware)
        require_known("dtype", bench.dtype, DTYPES)
        for name in bench.dtype:
            if name not in able:
                raise ConfigError(
                    f"{name} is not multiplied in hardware by {self.hardware.name}, and emulated "
                    f"rates say nothing: use {', '.join(able)}"
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
        """Warm everything up, then measure round after round until the plan's time is over."""
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
            # A product that is repeated is multiplied once more, before the measurement.
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
        """Operands by number format; repeats and seconds by (product's index, format).

        The formats of one product follow each other, since they are compared, too.
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
        """The result so far.

        Returns:
            "complete" (False while measurements are missing), "machine", "model", "quick",
            "tokens", "step_tokens", "rounds", "loops", and the values of `summarize`.
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


#: Products of fewer FLOPs don't set a ceiling: their operands are read from a cache.
_CEILING_FLOPS = 1e9

#: Seconds of each measurement, by product, in one number format.
Times = Mapping[GemmProduct, Sequence[float]]


def summarize(
    products: Sequence[GemmProduct],
    seconds: Mapping[str, Sequence[Sequence[float]]],
    shape: GPT2Shape,
    plan: GemmPlan,
) -> dict[str, Any]:
    """Rates and ratios of the measured products; products without a measurement are left out.

    Args:
        products: all products.
        seconds: seconds of a product in each measurement, by number format and product.
        shape: the model's shape.
        plan: amount of measuring.

    Returns:
        - "ceilings": best single FLOP/s of a large product by format (of any, if none is large)
        - "rows": each product in each format, its times (seconds), its median, lowest and highest
          FLOP/s, and the median as a fraction of the ceiling
        - "step": `step_times`; "padding", "tile", "wave": ratios of `compare` to another size
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
    """The time of all matrix products of a training step of STEP_TOKENS.

    Products were measured with `tokens` rows; their time is assumed proportional to the rows.

    Returns:
        For each storage of weights ("conv1d", "linear") and each vocabulary of the head: "weights",
        "vocabulary", "seconds", "flops", "share_of_ceiling". Empty while a product has no time.
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
    """Compare the products `size` with the products `base`; the times of each side are added up.

    Returns:
        "time_ratio", the median over measurements of time(size) / time(base), with "lowest" and
        "highest"; "work_ratio", the same of FLOPs; "rate_ratio", the same of FLOP/s.
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
    """Compare each aligned size with the unaligned size of its group `off`, over all products."""
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
    """Compare each product of a part with that of size `value`; None: with the first (one wave)."""
    these = [one for one in times if one.part == part]
    if value is None:
        value = these[0].value if these else None
    base = [one for one in these if one.value == value]
    if not base:
        return []
    return [{"to": one.value, **compare(times, [one], base)} for one in these]


def draw(result: Mapping[str, Any]) -> bytes:
    """A PNG of a result: rates by size, the model's products, padding, tiles, caches and waves."""
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
        _draw_sizes(size, [row for row in rows if row["part"] == "size"], dtype, color)
        these = [row for row in rows if row["part"] == "model"]
        places = [place + height * number for place in range(len(these))]
        model.barh(places, [row["share_of_ceiling"] for row in these], height=height, color=color)
        if these:
            model.set_yticks(places, [f"{row['name']} {row['layout']}" for row in these])
        rows = [row for row in result["padding"] if row["dtype"] == dtype]
        places = [place + height * number for place in range(len(rows))]
        padding.barh(places, [row["time_ratio"] for row in rows], height=height, color=color)
        if rows:
            names = [f"{row['group']} {row['from']} -> {row['to']}" for row in rows]
            padding.set_yticks(places, names)
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
    padding.set(xlabel="time of the padded product / time of the one that is not")
    padding.axvline(1, color="black", linestyle="--", linewidth=0.8)
    padding.invert_yaxis()
    tile.set(xlabel="N", ylabel=f"time / time at N = {TILE_EDGE} (dashed: work)", ylim=(0, None))
    machine = result["machine"]
    figure.suptitle(f"matrix products: {machine['name']}, {machine['threads']} threads")
    return png_of(figure)


def _draw_sizes(axes: Any, rows: Sequence[Mapping[str, Any]], dtype: str, color: str) -> None:
    x = [row["m"] for row in rows]
    axes.plot(x, [row["flops_per_second"] / 1e12 for row in rows], "o-", color=color, label=dtype)
    low, high = ([row[end] / 1e12 for row in rows] for end in ("lowest", "highest"))
    axes.fill_between(x, low, high, color=color, alpha=0.2)

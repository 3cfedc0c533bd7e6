"""Part "ceilings" of `firstlight bench gpu`: the rates that bound every other figure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from firstlight.bench.gpu_machine import Machine
from firstlight.bench.gpu_pages import Findings, Page, Part, markdown_table, png_of
from firstlight.bench.runner import Row
from firstlight.hardware.gpus import GPU

NAME = "ceilings"
_MODULE = "firstlight.bench.gpu_ceilings_once"


def _rows(machine: Machine) -> list[Row]:
    dry, device = machine.dry, machine.device
    products = {
        "measure": "products",
        "device": device,
        "squares": [64, 128, 256] if dry else [512, 1024, 2048, 4096, 8192, 16384],
        "models": {"tiny": 64} if dry else {"gpt2-124m": 16384, "llama-1b": 8192},
        "rounds": 2 if dry else 5,
        "seconds": 0.001 if dry else 0.03,
        "sustained_seconds": 0.01 if dry else 3.0,
    }
    dtypes = {"bf16": 1, "tf32": 3, "fp16": 3, "fp8": 3, "fp32": 5}
    rows = [
        Row(
            dtype,
            _MODULE,
            {**products, "dtype": dtype},
            seconds=8 if dry else 35 if dtype in ("fp32", "tf32") else 25,
            value=value,
            skip=_why_not(dtype, machine),
        )
        for dtype, value in dtypes.items()
    ]
    copies = {"measure": "copies", "device": device, "bytes": 2**22 if dry else 2**30}
    rows.insert(1, Row("copies", _MODULE, copies, seconds=8 if dry else 25, value=1))
    start = {
        "measure": "start",
        "device": device,
        "model": "small" if dry else "gpt2-124m",
        "seq_len": 64 if dry else 1024,
        "rows": 1 if dry else 16,
    }
    # The second of the two finds what the first has compiled.
    rows.append(
        Row("start", _MODULE, {**start, "compile": False}, seconds=8 if dry else 25, value=3)
    )
    rows.append(
        Row(
            "start, compiled",
            _MODULE,
            {**start, "compile": not dry},
            seconds=8 if dry else 80,
            value=3,
            turns=2,
        )
    )
    return rows


def _why_not(dtype: str, machine: Machine) -> str:
    """Why the machine's units don't multiply a number format; "" where they do."""
    if machine.device == "cpu":
        return "" if dtype in ("fp32", "bf16") else f"CPUs of a dry run multiply no {dtype}"
    least = {"tf32": (8, 0), "bf16": (8, 0), "fp16": (7, 0), "fp8": (8, 9)}
    if machine.capability < least.get(dtype, (0, 0)):
        return f"no units for {dtype} in compute capability {machine.capability}"
    return ""


def measured_ceiling(found: Findings, dtype: str = "bf16") -> float | None:
    """FLOP/s that matrix products reached at best; None where they were not measured."""
    values = found.outcome(NAME, dtype).values("ceiling")
    return max(values) if values else None


_RATES = """\
## Matrix products

TFLOP/s. Best is the best single measurement of a large product, the ceiling of all shares on
these pages; sustained is the same product for some seconds, as far as the GPU's power allows. The
last columns are all products of a model's linear layers in a training step together.

"""

_COPIES = """\
## Copies

Of {size:,.0f} MiB; within the device, bytes read and written.{sheet}

"""

_STARTS = """\
## From the start of a process to its first step

Seconds since the start of the process at which each was done; the model is GPT-2 124M in bf16.

"""


def _page(found: Findings) -> Page:
    dtypes = [row.name for row in found.measured(NAME) if row.request["measure"] == "products"]
    runs = {dtype: found.outcome(NAME, dtype).runs[-1] for dtype in dtypes}
    parts, summary, pictures = [], [], {}
    gpu = found.machine.gpu
    if runs:
        picture = "![rates by size](../images/gpu-ceilings.png)\n"
        parts += [_RATES + _rates_tables(runs, gpu), picture]
        pictures["gpu-ceilings.png"] = _draw(runs)
        for dtype in ("bf16", "fp8"):
            if dtype in runs:
                summary.append(_rate_line(dtype, runs[dtype]["ceiling"], gpu))
    for run in found.outcome(NAME, "copies").runs[-1:]:
        rates = run["rates"]
        sheet = f" The data sheet says {gpu.bandwidth / 1e9:,.0f} for its memory." if gpu else ""
        cells = [(name, f"{rate / 1e9:,.1f}") for name, rate in rates.items()]
        text = _COPIES.format(size=run["bytes"] / 2**20, sheet=sheet)
        parts.append(text + markdown_table(("copy", "GB/s"), cells))
        said = ", ".join(f"{name} {rate / 1e9:,.0f}" for name, rate in rates.items())
        summary.append(f"- Copies, GB/s: {said}.")
    if starts := _starts(found):
        phases = list(starts[0][1])
        rows = [(name, *(f"{times[phase]:.1f}" for phase in phases)) for name, times in starts]
        parts.append(_STARTS + markdown_table(("process", *phases), rows))
        said = ", ".join(f"{name} {times['first step']:.0f} s" for name, times in starts)
        summary.append(f"- From the start of a process to the end of its first step: {said}.")
    return Page("\n".join(summary), "\n".join(parts), pictures)


def _rate_line(dtype: str, rate: float, gpu: GPU | None) -> str:
    sheet = _sheet_rate(gpu, dtype)
    share = f", {rate / sheet:.0%} of the data sheet's {sheet / 1e12:,.0f}" if sheet else ""
    return f"- {dtype} matrix products: {rate / 1e12:,.0f} TFLOP/s at best{share}."


def _sheet_rate(gpu: GPU | None, dtype: str) -> float:
    """FLOP/s by the data sheet; 0 where it is not known."""
    return 0.0 if gpu is None or dtype == "fp8" else gpu.peak_flops(dtype)


def _rates_tables(runs: Mapping[str, Mapping[str, Any]], gpu: GPU | None) -> str:
    rows = []
    for dtype, run in runs.items():
        sheet = _sheet_rate(gpu, dtype)
        rows.append(
            (
                dtype,
                f"{run['ceiling'] / 1e12:,.1f}",
                " x ".join(map(str, run["best"])),
                f"{run['sustained'] / 1e12:,.1f}",
                f"{sheet / 1e12:,.1f}" if sheet else "",
                f"{run['ceiling'] / sheet:.0%}" if sheet else "",
                *(f"{rate / 1e12:,.1f}" for rate in run["models"].values()),
            )
        )
    models = [f"products of {name}" for name in next(iter(runs.values()))["models"]]
    header = ("format", "best", "M x N x K", "sustained", "data sheet", "of it", *models)
    text = markdown_table(header, rows)
    first = next(iter(runs.values()))
    names = [(one["name"], one["shape"], one["layout"]) for one in first["products"]]
    rows = [
        (
            f"{name} {' x '.join(map(str, shape))} {layout}",
            *(f"{run['products'][i]['flops'] / 1e12:,.1f}" for run in runs.values()),
        )
        for i, (name, shape, layout) in enumerate(names)
    ]
    table = markdown_table(("product", *runs), rows)
    return text + f"\nThe products of the layers (fp8 all in the layout nt), TFLOP/s:\n\n{table}"


def _starts(found: Findings) -> list[tuple[str, dict[str, float]]]:
    """(process, seconds of each phase) of the rows that were measured."""
    result = [("not compiled", run["times"]) for run in found.outcome(NAME, "start").runs[-1:]]
    compiled = found.outcome(NAME, "start, compiled").runs
    for name, cached in (("compiled", False), ("compiled, with its cache", True)):
        result += [(name, run["times"]) for run in compiled if run["cached"] is cached][-1:]
    return result


def _draw(runs: Mapping[str, Mapping[str, Any]]) -> bytes:
    """Rates of square products by size, a line for each number format."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for dtype, run in runs.items():
        sizes = [one["shape"][0] for one in run["squares"]]
        axes.plot(sizes, [one["flops"] / 1e12 for one in run["squares"]], "o-", label=dtype)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="size of a square product", ylabel="TFLOP/s", ylim=(0, None))
    axes.legend()
    return png_of(figure)


CEILINGS = Part(
    NAME,
    "Ceilings: matrix products, copies, the start of a process",
    "The rates that bound every other figure: matrix products by shape and number format, copies "
    "within the GPU and to and from the host, and the time from the start of a process to its "
    "first training step.",
    _rows,
    _page,
)

"""Part "ceilings" of `python -m benchmarks gpu`: the rates that bound every other figure.

    python -m firstlight.hardware.fresh_process benchmarks.gpu.ceilings REQUEST

REQUEST is a JSON object with "device" and "measure", which is one of these, with its own keys:

- "products": "dtype", "squares" (sizes of square products), "models" (number of tokens by model),
  "rounds", "seconds" of each measurement, "sustained_seconds"
- "copies": "bytes" of a copy
- "start": "model", "seq_len", "rows" (sequences of a step)
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import psutil
import torch

from benchmarks.gpu.parts import BenchMachine, Findings, Page, Part, Row
from benchmarks.memory import copy_seconds
from benchmarks.models import PlannerCase
from benchmarks.pages import markdown_table
from benchmarks.planner_memory import random_batch
from firstlight.bench.display import new_figure, png_of
from firstlight.bench.gemm import (
    DTYPES,
    FP8,
    GemmProduct,
    Layout,
    fp32_products,
    layer_products,
    make_multiply,
    make_operands,
    measure_product,
    repeats_of,
    warm_up,
)
from firstlight.hardware.device import find_hardware, synchronize
from firstlight.hardware.gpus import GPU
from firstlight.models import empty_model
from firstlight.recipe import parse_resolved_recipe
from firstlight.training.program import TrainingProgram

NAME = "ceilings"
_MODULE = "benchmarks.gpu.ceilings"


def _rows(machine: BenchMachine) -> list[Row]:
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
    rows.append(Row("start", _MODULE, start, seconds=8 if dry else 25, value=3))
    return rows


def _why_not(dtype: str, machine: BenchMachine) -> str:
    """The reason why the machine can't multiply a number format in hardware; "" if it can."""
    if machine.device == "cpu":
        return "" if dtype in ("fp32", "bf16") else f"CPUs of a dry run multiply no {dtype}"
    least = {"tf32": (8, 0), "bf16": (8, 0), "fp16": (7, 0), "fp8": (8, 9)}
    if machine.capability < least.get(dtype, (0, 0)):
        return f"no units for {dtype} in compute capability {machine.capability}"
    return ""


def measured_ceiling(found: Findings, dtype: str = "bf16") -> float | None:
    """The highest FLOP/s that matrix products reached; None if they were not measured."""
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
    parts: list[str] = []
    summary: list[str] = []
    pictures: dict[str, bytes] = {}
    gpu = found.machine.gpu
    if runs:
        picture = "![rates by size](../images/gpu-ceilings.png)\n"
        parts += [_RATES + _rates_tables(runs, gpu), picture]
        pictures["gpu-ceilings.png"] = _draw(runs)
        for dtype in ("bf16", "fp8"):
            if dtype in runs:
                rate, sheet = runs[dtype]["ceiling"], _sheet_rate(gpu, dtype)
                line = f"- {dtype} matrix products: {rate / 1e12:,.0f} TFLOP/s at best"
                if sheet:
                    line += f", {rate / sheet:.0%} of the data sheet's {sheet / 1e12:,.0f}"
                summary.append(f"{line}.")
    for run in found.outcome(NAME, "copies").runs[-1:]:
        rates = run["rates"]
        said = f" The data sheet says {gpu.bandwidth / 1e9:,.0f} for its memory." if gpu else ""
        cells = [(name, f"{rate / 1e9:,.1f}") for name, rate in rates.items()]
        text = _COPIES.format(size=run["bytes"] / 2**20, sheet=said)
        parts.append(text + markdown_table(("copy", "GB/s"), cells))
        said = ", ".join(f"{name} {rate / 1e9:,.0f}" for name, rate in rates.items())
        summary.append(f"- Copies, GB/s: {said}.")
    for run in found.outcome(NAME, "start").runs[-1:]:
        times = run["times"]
        seconds = [f"{one:.1f}" for one in times.values()]
        parts.append(_STARTS + markdown_table(("process", *times), [("not compiled", *seconds)]))
        summary.append(
            "- From the start of a process to the end of its first step: not compiled "
            f"{times['first step']:.0f} s."
        )
    return Page("\n".join(summary), "\n".join(parts), pictures)


def _sheet_rate(gpu: GPU | None, dtype: str) -> float:
    """FLOP/s by the data sheet; 0 if unknown."""
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


def _draw(runs: Mapping[str, Mapping[str, Any]]) -> bytes:
    """Rates of square products by size, a line for each number format."""
    figure = new_figure(8, 4.5)
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
    page=_page,
)


#: Products of fewer FLOPs are limited by the start of kernels rather than by the matrix units.
_LARGE_FLOPS = 1e10

#: Model -> number of blocks, (inputs, outputs) of the head, and of each linear layer of a block.
_LAYERS: dict[str, tuple[int, tuple[int, int], dict[str, tuple[int, int]]]] = {
    "gpt2-124m": (
        12,
        (768, 50304),
        {
            "qkv": (768, 2304),
            "attention out": (768, 768),
            "mlp up": (768, 3072),
            "mlp down": (3072, 768),
        },
    ),
    "llama-1b": (
        16,
        (2048, 128256),
        {
            "q": (2048, 2048),
            "kv": (2048, 1024),
            "attention out": (2048, 2048),
            "mlp gate, up": (2048, 16384),
            "mlp down": (8192, 2048),
        },
    ),
    # For dry runs.
    "tiny": (2, (64, 512), {"mlp up": (64, 256)}),
}


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Measure what `request["measure"]` names; the module's docstring describes the request."""
    kinds = {"products": _products, "copies": _copies, "start": _start}
    return kinds[request["measure"]](request)


def model_layers(model: str, tokens: int) -> list[GemmProduct]:
    """The matrix products of the linear layers in a training step, forward and backward."""
    blocks, head, layers = _LAYERS[model]
    return [
        GemmProduct("model", model, 0, *one, count=1 if name == "head" else blocks)
        for name, (inputs, outputs) in {**layers, "head": head}.items()
        for one in layer_products(name, tokens, inputs, outputs)
    ]


def _products(request: dict[str, Any]) -> dict[str, Any]:
    """Rates of matrix products in one number format.

    Returns:
        FLOP/s: "ceiling", the best single measurement of a large product ("best", its M, N, K);
        "sustained", the same product over "sustained_seconds"; "models", all products of a step by
        model; "squares" and "products": "name", "shape", "layout", "flops" (the median) of each.
    """
    device, dtype = torch.device(request["device"]), request["dtype"]
    kind = FP8 if dtype == "fp8" else DTYPES[dtype]
    squares = [GemmProduct("size", "", n, str(n), m=n, n=n, k=n) for n in request["squares"]]
    layers = [one for name, n in request["models"].items() for one in model_layers(name, n)]
    products = [*squares, *layers]
    if kind == FP8:
        # fp8 units support one layout only; training transposes operands into it before.
        layout: Layout = "nt"
        products = [replace(one, layout=layout) for one in products]
    with fp32_products(dtype):
        rates = product_rates(
            products, kind, device, request["rounds"], measure_seconds=request["seconds"]
        )
        medians = [statistics.median(found) for found in rates]
        large = [i for i, one in enumerate(products) if one.flops >= _LARGE_FLOPS]
        best = max(large or range(len(products)), key=lambda i: max(rates[i]))
        repeats = max(1, round(request["sustained_seconds"] * medians[best] / products[best].flops))
        seconds = measure_product(
            products[best], make_operands([products[best]], kind, device), repeats, device
        )
    found = [
        {"name": one.name, "shape": [one.m, one.n, one.k], "layout": one.layout, "flops": rate}
        for one, rate in zip(products, medians, strict=True)
    ]
    ceiling, sustained = max(rates[best]), products[best].flops / seconds
    return {
        "ceiling": ceiling,
        "sustained": sustained,
        "best": found[best]["shape"],
        "squares": found[: len(squares)],
        "products": found[len(squares) :],
        "models": {name: _step_rate(name, products, medians) for name in request["models"]},
        "line": f"{ceiling / 1e12:.1f} TFLOP/s, {sustained / 1e12:.1f} over some seconds",
    }


def _step_rate(model: str, products: Sequence[GemmProduct], rates: Sequence[float]) -> float:
    """FLOP/s over all products of a model's training step, from the FLOP/s of each product."""
    these = [(one, rate) for one, rate in zip(products, rates, strict=True) if one.group == model]
    flops = sum(one.count * one.flops for one, _ in these)
    return flops / sum(one.count * one.flops / rate for one, rate in these)


def _copies(request: dict[str, Any]) -> dict[str, Any]:
    """Bytes per second of copies within the device (read and written), and from and to the host."""
    device, size = torch.device(request["device"]), request["bytes"]
    there = torch.zeros(size, dtype=torch.uint8, device=device)
    # Written to, because the system gives allocated memory its pages only when it is written.
    host = torch.ones(size, dtype=torch.uint8)
    pairs = {"within the device": (torch.empty_like(there), there, 2)}
    if device.type == "cuda":
        pinned = host.pin_memory()
        pairs |= {
            "host to device, pinned": (there, pinned, 1),
            "host to device, pageable": (there, host, 1),
            "device to host, pinned": (pinned, there, 1),
            "device to host, pageable": (host, there, 1),
        }
    rates = {
        name: factor * size / copy_seconds(target, source, device)
        for name, (target, source, factor) in pairs.items()
    }
    said = ", ".join(f"{name} {rate / 1e9:,.0f} GB/s" for name, rate in rates.items())
    return {"bytes": size, "rates": rates, "line": said}


def _start(request: dict[str, Any]) -> dict[str, Any]:
    """The "times" in seconds since the start of this process at the end of each phase, from imports
    to the second step."""
    began = psutil.Process().create_time()
    times = {"imports": time.time() - began}
    hardware = find_hardware(request["device"])
    torch.zeros(1, device=hardware.device)
    synchronize(hardware.device)
    times["device"] = time.time() - began
    changes = {"efficiency.precision": "bf16", "efficiency.vocab_multiple": 64}
    case = PlannerCase(request["model"], request["rows"], request["seq_len"], changes)
    recipe = parse_resolved_recipe(case.recipe(request["device"]))
    model = empty_model(recipe.model, 64)
    model.init_weights(torch.Generator().manual_seed(0))
    program = TrainingProgram(recipe, model, hardware)
    batch = random_batch(recipe).to(hardware.device)
    synchronize(hardware.device)
    times["model"] = time.time() - began
    for name in ("first step", "second step"):
        program.step([batch], lr_scale=1.0)
        synchronize(hardware.device)
        times[name] = time.time() - began
    return {"times": times, "line": f"first step after {times['first step']:.1f} s"}


def product_rates(
    products: Sequence[GemmProduct],
    dtype: torch.dtype,
    device: torch.device,
    rounds: int,
    measure_seconds: float,
) -> list[list[float]]:
    """The FLOP/s of each product, one value for each of `rounds` rounds over all products."""
    operands = make_operands(products, dtype, device)
    repeats = [
        repeats_of(warm_up(make_multiply(one, operands), device), measure_seconds)
        for one in products
    ]
    rates: list[list[float]] = [[] for _ in products]
    for _ in range(rounds):
        for these, one, times in zip(rates, products, repeats, strict=True):
            these.append(one.flops / measure_product(one, operands, times, device))
    return rates

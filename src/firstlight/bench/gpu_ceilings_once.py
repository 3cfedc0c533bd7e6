"""A measurement of part "ceilings" of `firstlight bench gpu`, in a process of its own.

    python -m firstlight.bench.gpu_ceilings_once REQUEST

REQUEST is a JSON object with "measure" and "device", and for

- "products": "dtype", "squares" (sizes), "models" (name -> tokens), "rounds", "seconds" of each
  measurement, "sustained_seconds";
- "copies": "bytes";
- "start": "model", "seq_len", "rows", "compile", "work", the folder of the compiler's cache.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch

from firstlight.bench.fresh_process import answer
from firstlight.bench.gemm import (
    DTYPES,
    FP8,
    fp32_products,
    make_operands,
    measure,
    product_rates,
)
from firstlight.bench.gemm_products import Layout, Product, layer_products
from firstlight.bench.methods_rows import find_model
from firstlight.data.loader import Batch
from firstlight.hardware.device import find_hardware, synchronize
from firstlight.models import empty_model
from firstlight.recipe import parse_recipe
from firstlight.training.program import TrainingProgram

#: Products of fewer FLOPs say more about the start of a kernel than about the units.
_LARGE_FLOPS = 1e10

#: The linear layers of a model: inputs, outputs, how often a step has them.
_LAYERS: dict[str, dict[str, tuple[int, int, int]]] = {
    "gpt2-124m": {
        "qkv": (768, 2304, 12),
        "attention out": (768, 768, 12),
        "mlp up": (768, 3072, 12),
        "mlp down": (3072, 768, 12),
        "head": (768, 50304, 1),
    },
    "llama-1b": {
        "q": (2048, 2048, 16),
        "kv": (2048, 1024, 16),
        "attention out": (2048, 2048, 16),
        "mlp gate, up": (2048, 16384, 16),
        "mlp down": (8192, 2048, 16),
        "head": (2048, 128256, 1),
    },
    # Of dry runs.
    "tiny": {"mlp up": (64, 256, 2), "head": (64, 512, 1)},
}


def _measure(request: dict[str, Any]) -> dict[str, Any]:
    kinds = {"products": _products, "copies": _copies, "start": _start}
    return kinds[request["measure"]](request)


def model_layers(model: str, tokens: int) -> list[Product]:
    """The matrix products of the linear layers in a training step, forward and backward.

    Args:
        model: a name in `_LAYERS`.
        tokens: of a micro-batch.
    """
    return [
        Product("model", model, 0, *one, count=count)
        for name, (inputs, outputs, count) in _LAYERS[model].items()
        for one in layer_products(name, tokens, inputs, outputs)
    ]


def _products(request: dict[str, Any]) -> dict[str, Any]:
    """Rates of matrix products in one number format.

    Returns:
        "ceiling", the best measurement of a large one, FLOP/s; "sustained", the rate of the
        fastest over some seconds; "squares" and "products", each with its median rate "flops";
        "models": the rate of all products of a step together.
    """
    device, dtype = torch.device(request["device"]), request["dtype"]
    kind = FP8 if dtype == "fp8" else DTYPES[dtype]
    squares = [Product("size", "", n, str(n), n, n, n) for n in request["squares"]]
    layers = [one for name, n in request["models"].items() for one in model_layers(name, n)]
    products = [*squares, *layers]
    if kind == FP8:
        # Its units take one layout: training brings operands into it first.
        layout: Layout = "nt"
        products = [replace(one, layout=layout) for one in products]
    with fp32_products(dtype):
        rates = product_rates(products, kind, device, request["rounds"], request["seconds"])
        medians = [statistics.median(found) for found in rates]
        large = [i for i, one in enumerate(products) if one.flops >= _LARGE_FLOPS]
        best = max(large or range(len(products)), key=lambda i: max(rates[i]))
        repeats = max(1, round(request["sustained_seconds"] * medians[best] / products[best].flops))
        seconds = measure(
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


def _step_rate(model: str, products: Sequence[Product], rates: Sequence[float]) -> float:
    """FLOP/s of all of a model's products, each as often as a step has it."""
    these = [(one, rate) for one, rate in zip(products, rates, strict=True) if one.group == model]
    flops = sum(one.count * one.flops for one, _ in these)
    return flops / sum(one.count * one.flops / rate for one, rate in these)


def _copies(request: dict[str, Any]) -> dict[str, Any]:
    """Bytes a second of copies: within the device (read and written), and from and to the host."""
    device, size = torch.device(request["device"]), request["bytes"]
    there = torch.zeros(size, dtype=torch.uint8, device=device)
    # Written to: memory that was only asked for has no pages yet.
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
        name: factor * size / _copy_seconds(target, source, device)
        for name, (target, source, factor) in pairs.items()
    }
    said = ", ".join(f"{name} {rate / 1e9:,.0f} GB/s" for name, rate in rates.items())
    return {"bytes": size, "rates": rates, "line": said}


def _copy_seconds(target: torch.Tensor, source: torch.Tensor, device: torch.device) -> float:
    """The least of some measurements of a copy."""
    best = math.inf
    for _ in range(6):
        synchronize(device)
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best


def _start(request: dict[str, Any]) -> dict[str, Any]:
    """Seconds since the start of this process at which the imports, the device, the model and the
    first two steps were done; "cached": whether the compiler found its own work of before."""
    began = psutil.Process().create_time()
    times = {"imports": time.time() - began}
    cache = Path(request["work"]) / "cache-of-start"
    cached = cache.is_dir()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    os.environ["TRITON_CACHE_DIR"] = str(cache / "triton")
    hardware = find_hardware(request["device"])
    torch.zeros(1, device=hardware.device)
    synchronize(hardware.device)
    times["device"] = time.time() - began
    step = _training_step(request)
    synchronize(hardware.device)
    times["model"] = time.time() - began
    for name in ("first step", "second step"):
        step()
        synchronize(hardware.device)
        times[name] = time.time() - began
    return {
        "times": times,
        "cached": cached and request["compile"],
        "line": f"first step after {times['first step']:.1f} s",
    }


def _training_step(request: Mapping[str, Any]) -> Callable[[], object]:
    """What trains a step of a model with random weights on random tokens."""
    model, seq_len, rows = find_model(request["model"]), request["seq_len"], request["rows"]
    recipe = parse_recipe(
        {
            "run": {"device": request["device"]},
            "data": {"dir": "-", "seq_len": seq_len},
            "model": model.model_dump(),
            "batch": {"micro_batch_size": rows, "gradient_accumulation_steps": 1},
            "efficiency": {
                "precision": "bf16",
                "attention": "sdpa",
                "compile": request["compile"],
                "loss_chunk_tokens": 0,
                "vocab_multiple": 64,
            },
        }
    )
    hardware = find_hardware(request["device"])
    empty = empty_model(model, 64)
    empty.init_weights(torch.Generator().manual_seed(0))
    program = TrainingProgram(recipe, empty, hardware)
    ids = torch.randint(model.vocab_size, (rows, seq_len + 1))
    batch = Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), rows * seq_len)
    return lambda: program.step([batch.to(hardware.device)], lr_scale=1.0)


if __name__ == "__main__":
    answer(_measure, sys.argv[1])

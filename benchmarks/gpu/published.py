"""Further items of `quick`, whose figures docs/gpu.md publishes: the hardware's maximum rates,
firstlight compared with other programs, a real run, and the ladders of methods. See `items`."""

from __future__ import annotations

import functools
import json
import math
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.generation import (
    Continue,
    bytes_per_token,
    continue_with_generate,
    continue_with_sampling,
    timed_batch,
)
from benchmarks.gpu.calls import Call
from benchmarks.gpu.items import (
    Bench,
    Item,
    Row,
    attempt,
    case_row,
    make_item,
    planner,
    random_bf16_model,
    steps_request,
    training_row,
)
from benchmarks.memory import copy_seconds
from benchmarks.models import PlannerCase, model_values
from benchmarks.planner_steps import measure as measure_steps
from benchmarks.programs import autocast_loop
from firstlight.bench.gemm import (
    DTYPES,
    FP8,
    GemmProduct,
    layer_products,
    make_multiply,
    make_operands,
)
from firstlight.bench.models import config_of
from firstlight.errors import TrainingError
from firstlight.files.atomic import read_json, write_json
from firstlight.generation.batch import BatchDecoder
from firstlight.hardware.fresh_process import last_words
from firstlight.methods.attention import varying_lengths
from firstlight.models import GPT2Config, Model
from firstlight.models.accounting import (
    cache_bytes_per_token,
    meta_model,
    train_flops_per_token,
)
from firstlight.run_log.reader import read_json_lines

# N: ceilings


def ceilings(bench: Bench) -> Iterator[Row]:
    """Measure the rates of matrix products (square, and those of GPT-2 124M's head) and of
    copies."""
    sizes = bench.pick((2048, 4096, 8192, 16384), (16,))
    squares = [GemmProduct("size", "", n, f"{n} x {n} x {n}", m=n, n=n, k=n) for n in sizes]
    head = layer_products("head", *bench.pick((16384, 768, 50304), (16, 16, 64)))
    products = squares + [GemmProduct("model", "", 0, *one) for one in head]
    for dtype in bench.pick(("bf16", "fp16", "fp8"), ("bf16",)):
        kind = FP8 if dtype == "fp8" else DTYPES[dtype]
        operands = make_operands(products, kind, bench.device)
        for product in products:
            # fp8 units support only one layout; training transposes operands into it first.
            product = replace(product, layout="nt") if kind == FP8 else product
            call = make_multiply(product, operands)
            rate = functools.partial(_product_rate, bench, call, product.flops)
            yield attempt(f"{dtype}: {product.name}", rate)
    yield from _copies(bench)


def _product_rate(bench: Bench, multiply: Call, flops: int) -> Row:
    calls = min(1000, math.ceil(30 / bench.ms(multiply, rounds=1, calls=1)))
    times = [bench.ms(multiply, rounds=1, calls=calls) for _ in range(5)]
    rates = [flops / ms / 1e9 for ms in times]
    return {
        "tflops": round(statistics.median(rates), 1),
        "best_tflops": round(max(rates), 1),
        # Limited by the GPU's power.
        "sustained_tflops": round(flops / bench.ms(multiply, rounds=1, calls=20 * calls) / 1e9, 1),
    }


def _copies(bench: Bench) -> Iterator[Row]:
    size = bench.pick(2**30, 2**16)
    there = torch.zeros(size, dtype=torch.uint8, device=bench.device)
    # The memory is written, because the system assigns pages only then.
    host = torch.ones(size, dtype=torch.uint8)
    # Within the device, bytes are read and written.
    pairs = {"within the device": (torch.empty_like(there), there, 2)}
    if bench.device.type == "cuda":
        pinned = host.pin_memory()
        pairs |= {
            "host to device, pinned": (there, pinned, 1),
            "host to device, pageable": (there, host, 1),
            "device to host, pinned": (pinned, there, 1),
            "device to host, pageable": (host, there, 1),
        }
    for name, (target, source, factor) in pairs.items():
        rate = factor * size / copy_seconds(target, source, bench.device)
        yield {"row": f"copy {name}", "gb_per_s": round(rate / 1e9, 1)}


# O and P: other programs


def bare_loop(bench: Bench) -> Iterator[Row]:
    """Measure steps of the program "reference" in `programs` with the batch of item E."""
    rows, tokens = bench.pick((32, 1024), (1, 16))
    config = config_of(model_values(bench.pick("gpt2-124m", "tiny-gpt2")))
    assert isinstance(config, GPT2Config)
    loop = autocast_loop(config, bench.device, bf16=True, compile_model=not bench.dry)
    ids_BT = torch.randint(config.vocab_size, (rows, tokens), device=bench.device)
    flops = train_flops_per_token(meta_model(config), tokens) * ids_BT.numel()
    step = functools.partial(loop, ids_BT, ids_BT, 6e-4)
    yield attempt("as it is", lambda: training_row(bench, step, ids_BT.numel(), flops))


def generation(bench: Bench, name: str) -> Iterator[Row]:
    """Measure greedy continuations by `generate`'s decoder, and by transformers' `generate` with a
    model of the same shape."""
    model, texts = random_bf16_model(bench, name), bench.pick((1, 8, 64), (1, 2))
    request = {
        "prompt_tokens": bench.pick(128, 4),
        "new_tokens": bench.pick(64, 4),
        "times": bench.pick(2, 1),
        "vocab_size": model.config.vocab_size,
    }
    longest = request["prompt_tokens"] + request["new_tokens"]
    weights = bytes_per_token(model.config, "bfloat16") or 0
    cached = cache_bytes_per_token(model.config, torch.bfloat16)
    programs: dict[str, Callable[[], Continue]] = {
        # `varying_lengths` as in `generate`.
        "firstlight": lambda: varying_lengths()(
            continue_with_sampling(BatchDecoder(model, max(texts), longest), request)
        ),
        "transformers": lambda: _transformers(bench, model, request),
    }
    for program, make in programs.items():
        made = functools.cache(make)
        for count in texts:
            # The weights are read once, and the keys and values of all texts at their mean length.
            step_bytes = weights + count * (longest - request["new_tokens"] / 2) * cached
            row = functools.partial(_continuation, request, count, made, step_bytes)
            yield attempt(f"{count} texts: {program}", row)


def _continuation(
    request: dict[str, Any], texts: int, made: Callable[[], Continue], step_bytes: float
) -> Row:
    found = timed_batch(request, texts, made())
    rate = statistics.median(found["tokens_per_second"])
    first = statistics.median(found["first_token_seconds"])
    later = texts * (request["new_tokens"] - 1)
    return {
        "tokens_per_s": round(rate, 1),
        # The bytes that steps must read, from which the limit by memory bandwidth follows.
        "gb_per_s": round(step_bytes * rate / texts / 1e9, 1),
        "first_ms": round(1000 * first, 2),
        # Includes the time until the first tokens.
        "whole_tokens_per_s": round((later + texts) / (first + later / rate), 1),
        "warm_up_s": round(found["warm_up_seconds"], 2),
    }


def _transformers(bench: Bench, model: Model, request: Mapping[str, Any]) -> Continue:
    import transformers

    transformers.logging.set_verbosity_error()
    values = model.config.to_hf()
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    with bench.device:
        theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return continue_with_generate(theirs.eval(), bench.device, request)


# Q: a real run

#: Files of the run folder that are copied to the results folder.
_KEPT = ("metrics.jsonl", "forecast.json", "report.png", "report.html")


def real_run(bench: Bench) -> Iterator[Row]:
    """Measure `firstlight train stdlib --budget 3m` in a separate process, from text to report."""
    dry = [str(Path(__file__).parent), "--steps", "2"]
    arguments = bench.pick(["stdlib", "--budget", "3m"], dry)
    yield attempt("as it is", functools.partial(_run_row, bench, arguments))


def _run_row(bench: Bench, arguments: Sequence[str]) -> Row:
    with tempfile.TemporaryDirectory(prefix="firstlight-bench-") as folder:
        command = ["train", *arguments, "--run.device", bench.device.type, "--json"]
        result, seconds = train(command, Path(folder))
        run = Path(folder, result["run_folder"])
        if bench.out is not None:
            write_json(bench.out / "run" / "result.json", result)
            for name in _KEPT:
                if (run / name).is_file():
                    shutil.copyfile(run / name, bench.out / "run" / name)
        steps = [line for line in read_json_lines(run / "metrics.jsonl") if line["step"]]
        peaks = read_json(run / "forecast.json")
    row: Row = {
        "wall_s": round(seconds, 1),
        "bits_per_byte": result["bits_per_byte"],
        "gzip": result["gzip_bits_per_byte"],
        "xz": result["xz_bits_per_byte"],
        "parameters": result["choices"]["parameters"],
        "steps": steps[-1]["step"],
        "tokens": steps[-1]["tokens_seen"],
        "tokens_per_s": round(statistics.median(line["tokens_per_second"] for line in steps)),
    }
    for kind in ("measured", "predicted"):
        if peaks[kind]["peak_bytes"]:
            row[f"{kind}_peak_gib"] = round(peaks[kind]["peak_bytes"] / 2**30, 2)
    if result["expected_bits_per_byte"]:
        row["expected_bits_per_byte"] = "{:.2f} to {:.2f}".format(*result["expected_bits_per_byte"])
    return row


def train(command: Sequence[str], folder: Path) -> tuple[dict[str, Any], float]:
    """Call firstlight with --json in a folder; return its result and duration in seconds.

    Raises:
        TrainingError: the command failed.
    """
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-P", "-m", "firstlight", *command],
        cwd=folder,
        capture_output=True,
        text=True,
        errors="replace",
    )
    if done.returncode:
        raise TrainingError(f"firstlight train: {last_words(done.returncode, done.stderr)}")
    return json.loads(done.stdout), time.perf_counter() - start


# R: ladders, in which each rung adds a method to the previous ones

#: Name of a rung, and the values of the recipe by key that it adds.
_Rung = tuple[str, Mapping[str, Any]]

_SPEED: Sequence[_Rung] = (
    (
        "fp32, attention as two products, AdamW one parameter at a time",
        {
            "efficiency.attention": "plain",
            "optimizer.implementation": "for-loop",
            "optimizer.max_grad_norm": 0.0,
        },
    ),
    ("+ bf16", {"efficiency.precision": "bf16"}),
    ("+ fused attention (SDPA)", {"efficiency.attention": "sdpa"}),
    ("+ fused AdamW", {"optimizer.implementation": "fused"}),
    ("+ torch.compile", {"efficiency.compile": True}),
    ("+ padded vocabulary", {"efficiency.vocab_multiple": 64}),
    ("+ twice the micro-batch", {"batch.micro_batch_size": 32}),
    ("+ CUDA graphs", {"efficiency.compile_mode": "reduce-overhead"}),
)

_MEMORY: Sequence[_Rung] = (
    (
        "bf16, fp32 weights, fused AdamW",
        {"efficiency.precision": "bf16", "optimizer.implementation": "fused"},
    ),
    ("+ loss in chunks", {"efficiency.loss_chunk_tokens": 1024}),
    ("+ activation checkpointing", {"efficiency.activation_checkpointing": "full"}),
    (
        "+ optimizer in the backward pass",
        {"efficiency.optimizer_in_backward": True, "optimizer.max_grad_norm": 0.0},
    ),
    ("+ activations offloaded", {"efficiency.activation_offload": True}),
    (
        "+ 8-bit AdamW",
        {"optimizer.name": "adamw8bit", "optimizer.implementation": "auto"},
    ),
    (
        "+ Adafactor instead of AdamW",
        {"optimizer.name": "adafactor", "optimizer.learning_rate": 0.01},
    ),
)


def _cases(model: str, rows: int, tokens: int, rungs: Sequence[_Rung]) -> list[PlannerCase]:
    """Return the configurations of a ladder."""
    found, changes = list[PlannerCase](), dict[str, Any]()
    for name, added in rungs:
        changes = {**changes, **added}
        found.append(PlannerCase(model, rows, tokens, changes, title=name))
    return found


#: Speed of GPT-2 124M; memory of full fine-tuning of Llama 3.2 3B, for comparison with torchtune's
#: README.
SPEED_CASES = _cases("gpt2-124m", 16, 1024, _SPEED)
MEMORY_CASES = _cases("llama-3b", 2, 4096, _MEMORY)


def ladder(bench: Bench, cases: Sequence[PlannerCase]) -> Iterator[Row]:
    """Measure time and memory of a step on each rung."""
    tiny = "tiny-gpt2" if cases[0].model.startswith("gpt2") else "tiny-llama"
    dry = [replace(case, model=tiny, rows=1, tokens=32) for case in cases[:1]]
    for case in bench.pick(cases, dry):
        (found,) = measure_steps(steps_request(bench, [case]))["cases"]
        yield case_row(found)


ITEMS: tuple[Item, ...] = (
    Item("N", "Ceilings: matrix products and copies", 25, ceilings, of_machine=True),
    make_item("O", "GPT-2 124M by a bare loop, 32 x 1,024, compiled", 35, bare_loop),
    make_item("P-124m", "Generation, and transformers, GPT-2 124M", 30, generation, "gpt2-124m"),
    make_item("P-1b", "Generation, and transformers, Llama 1B", 30, generation, "llama-1b"),
    make_item("Q", "firstlight train stdlib --budget 3m", 200, real_run),
    make_item(
        "R-memory", "The ladder of memory: Llama 3.2 3B, 2 x 4,096", 50, ladder, MEMORY_CASES
    ),
    make_item("L-4", "The planner's configurations 22 to 28", 24, planner, 21),
    make_item("L-5", "The planner's configurations 29 to 35", 24, planner, 28),
    make_item("L-6", "The planner's configurations 36 to 38", 12, planner, 35),
    make_item("L-compiled", "The planner's compiled configurations", 200, planner, 0, rest=True),
    make_item("L-quantized", "The planner's quantized configurations", 12, planner, 7, rest=True),
    make_item("R-speed", "The ladder of speed: GPT-2 124M, 16 x 1,024", 120, ladder, SPEED_CASES),
)

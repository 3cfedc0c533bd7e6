"""The operators that fill a calibration store well: what most models' steps consist of."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from firstlight.console import progress_bar
from firstlight.efficiency.allocator import keep_memory
from firstlight.efficiency.attention import BLOCKWISE_HEAD_SIZE
from firstlight.hardware.device import find_hardware
from firstlight.planner.calibration import Calibration, features_of
from firstlight.planner.calibration_store import load_calibration, save_calibration
from firstlight.planner.replay import can_replay, time_operator
from firstlight.planner.trace import Layout, Operator, bytes_of

#: Tokens of a micro-batch, hidden sizes, and how much wider an MLP or a head is.
_TOKENS = (256, 1024, 4096)
_WIDTHS = (128, 384, 768, 1536)
_RATIOS = (1, 4, 64)
_ROWS = (128, 512, 2048)
_VALUES = (2**14, 2**18, 2**21, 2**24)
_STREAMS = (
    "add",
    "mul",
    "_to_copy",
    "gelu",
    "gelu_backward",
    "silu",
    "silu_backward",
    "_log_softmax",
    "_log_softmax_backward_data",
)
#: Products of more FLOPs are left out: they run at the rate of smaller ones.
_MOST_FLOPS = 4e10


def standard_operators() -> list[tuple[Operator, tuple[bool, bool]]]:
    """What `calibrate` times, with how the factors of products lie: first what is quickly
    timed."""
    dtypes = (torch.float32, torch.bfloat16)
    found: list[tuple[Operator, tuple[bool, bool]]] = []
    for dtype in dtypes:
        found += [(one, (False, False)) for one in (*_attention(dtype), *_streams(dtype))]
    return found + [pair for both in zip(*map(_products, dtypes), strict=True) for pair in both]


def _operator(
    name: str, inputs: list[Layout], outputs: list[Layout], library: str = "aten"
) -> Operator:
    moved = sum(map(bytes_of, (*inputs, *outputs)))
    return Operator(f"{library}.{name}.default", "forward", tuple(inputs), tuple(outputs), 0, moved)


def _products(dtype: torch.dtype) -> Iterator[tuple[Operator, tuple[bool, bool]]]:
    for tokens, width, ratio in itertools.product(_TOKENS, _WIDTHS, _RATIOS):
        wide = ratio * width
        if 2.0 * tokens * width * wide > _MOST_FLOPS:
            continue
        # Forward; the gradient of the input; that of the weight.
        for (m, k, n), turned in (
            ((tokens, width, wide), (False, True)),
            ((tokens, wide, width), (False, False)),
            ((wide, tokens, width), (True, False)),
        ):
            yield (
                _operator("mm", [((m, k), dtype), ((k, n), dtype)], [((m, n), dtype)]),
                turned,
            )


def _attention(dtype: torch.dtype) -> Iterator[Operator]:
    for rows, size in itertools.product(_ROWS, (64, 32, 128)):
        x: Layout = ((1, 8, rows, size), dtype)
        sums: Layout = ((1, 8, rows), torch.float32)
        name = "_scaled_dot_product_flash_attention_for_cpu"
        yield _operator(name, [x, x, x], [x, sums])
        yield _operator(f"{name}_backward", [x, x, x, x, x, sums], [x, x, x])
        # Where it is what "auto" comes to.
        if dtype == torch.bfloat16 and size >= BLOCKWISE_HEAD_SIZE:
            name = "blockwise_attention"
            yield _operator(name, [x, x, x], [x], "firstlight")
            yield _operator(f"{name}_backward", [x, x, x, x], [x, x, x], "firstlight")


def _streams(dtype: torch.dtype) -> Iterator[Operator]:
    for values, name in itertools.product(_VALUES, _STREAMS):
        x: Layout = ((values // 1024, 1024), dtype)
        other = torch.bfloat16 if dtype == torch.float32 else torch.float32
        result = ((x[0], other)) if name == "_to_copy" else x
        pair = name in ("add", "mul") or "backward" in name
        yield _operator(name, [x, x] if pair else [x], [result])


def calibrate(seconds: float = 60.0, folder: Path | None = None) -> Calibration:
    """Time the standard operators, and keep the times.

    Args:
        seconds: no operator is begun after it; they take about a minute and a half.
        folder: of the store; None is calibration/ in the cache.

    Raises:
        StorageError: the disk refuses.
    """
    keep_memory(find_hardware("cpu"))
    calibration = load_calibration(folder)
    operators = [pair for pair in standard_operators() if can_replay(pair[0])]
    end = time.perf_counter() + seconds
    with progress_bar() as progress:
        task = progress.add_task("timing operators", total=len(operators))
        for one, turned in operators:
            left = end - time.perf_counter()
            if left <= 0:
                break
            found = time_operator(one, turned, most_seconds=min(0.15, left), most_runs=5)
            calibration.add(features_of(one, turned), found)
            progress.advance(task)
    save_calibration(calibration, folder)
    return calibration

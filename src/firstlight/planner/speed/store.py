"""Read and write the calibration store, and fill it by timing operators."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from firstlight.console import progress_bar
from firstlight.efficiency.attention import BLOCKWISE_HEAD_SIZE
from firstlight.efficiency.memory import keep_memory
from firstlight.errors import InputError
from firstlight.files.atomic import read_json, write_json
from firstlight.hardware.device import find_hardware
from firstlight.planner.memory.kernels import Layout, Operator, OperatorCount, bytes_of
from firstlight.planner.speed.calibration import (
    FORMAT,
    Calibration,
    Entry,
    Reference,
    features_of,
    machine_fingerprint,
    store_path,
)
from firstlight.planner.speed.operators import is_free, smaller, transposed_factors
from firstlight.planner.speed.replay import can_replay, time_operator

#: Seconds for timing one operator.
_OPERATOR_SECONDS = 0.25
#: Seconds of the longest call that is timed; of a longer operator, a smaller one is timed.
_LONGEST_CALL = 0.1
#: Factor of the priority of operators whose time is only guessed.
_GUESSED_WEIGHT = 5.0
#: Fraction of a step's time; operators that take less are not timed but interpolated.
_LEAST_SHARE = 0.002


def load_calibration(
    folder: Path | None = None,
    reference: Reference | None = None,
    fingerprint: Mapping[str, Any] | None = None,
) -> Calibration:
    """Read this machine's store. It is empty if there is no file, or if the file is not usable; in
    the second case the store's notes have the reason.

    Args:
        folder: folder of the stores; None is calibration/ in the cache.
        reference: present durations of the reference operators; None measures them.
        fingerprint: see `machine_fingerprint`; None is this machine's.
    """
    found = dict(fingerprint or machine_fingerprint())
    path = store_path(found, folder)
    reference = reference or measure_reference()
    if not path.exists():
        return Calibration(found, reference)
    try:
        entries = parse_store(read_json(path), found)
    except InputError as error:
        return Calibration(found, reference, notes=[f"calibration {path} is ignored: {error}"])
    return Calibration(found, reference, entries)


def parse_store(values: Any, fingerprint: Mapping[str, Any]) -> dict[str, Entry]:
    """The entries of a store.

    Raises:
        InputError: the store is of another machine or format, or damaged.
    """
    try:
        if values["format"] != FORMAT:
            raise InputError(f"its format is {values['format']}, not {FORMAT}")
        if values["fingerprint"] != dict(fingerprint):
            raise InputError("it was measured on another machine or with other settings")
        return {key: _entry(value) for key, value in values["entries"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"it is damaged ({type(error).__name__}: {error})") from error


def _entry(value: Mapping[str, Any]) -> Entry:
    entry = Entry(
        str(value["group"]),
        tuple(float(size) for size in value["sizes"]),
        float(value["work"]),
        str(value["reference"]),
        [float(ratio) for ratio in value["ratios"]],
    )
    if entry.reference not in ("float32", "bfloat16", "stream") or not entry.ratios:
        raise ValueError("an entry without times")
    # Interpolation takes the logarithms of times.
    if min(entry.ratios) <= 0 or entry.work < 0:
        raise ValueError("a time that is not positive")
    return entry


def save_calibration(calibration: Calibration, folder: Path | None = None) -> Path:
    """Write the store; returns its path.

    Raises:
        StorageError: a file system error prevents writing.
    """
    path = store_path(calibration.fingerprint, folder)
    write_json(path, calibration.to_json())
    return path


def measure_operators(
    calibration: Calibration,
    counts: Iterable[OperatorCount],
    seconds: float = 4.0,
) -> None:
    """Time operators of a step: first those that are not in the store, then the others once more,
    and among each the costliest first.

    Args:
        calibration: store that receives the measurements.
        counts: operators of a step.
        seconds: seconds after which no further operator is timed.
    """
    counts = list(counts)
    transposed = transposed_factors(counts)
    keep_memory(find_hardware("cpu"))
    costs: dict[Operator, float] = {}
    seen: dict[Operator, float] = {}
    for entry in counts:
        one = entry.operator
        if not is_free(one):
            turned = transposed.get(one, (False, False))
            estimate = calibration.seconds(one, turned)
            costs[one] = entry.count * estimate.seconds
            # An operator whose time is only guessed may take far longer.
            seen[one] = costs[one] * (_GUESSED_WEIGHT if estimate.source == "guessed" else 1.0)
    least = _LEAST_SHARE * sum(costs.values())
    parts = {one: _part(one, transposed.get(one, (False, False)), calibration) for one in costs}
    wanted = [one for one in costs if seen[one] >= least and can_replay(parts[one])]

    def order(one: Operator) -> tuple[bool, float]:
        features = features_of(parts[one], transposed.get(one, (False, False)))
        return features.key in calibration.entries, -seen[one]

    end = time.perf_counter() + seconds
    for one in sorted(wanted, key=order):
        left = end - time.perf_counter()
        if left <= 0:
            break
        turned = transposed.get(one, (False, False))
        found = time_operator(parts[one], turned, most_seconds=min(_OPERATOR_SECONDS, left))
        calibration.add(features_of(parts[one], turned), found)


def _part(operator: Operator, transposed: tuple[bool, bool], calibration: Calibration) -> Operator:
    """The operator, or the largest of its `smaller` ones that can be timed."""
    part = operator
    while calibration.seconds(part, transposed).seconds > _LONGEST_CALL or not can_replay(part):
        less = smaller(part)
        if less is None:
            break
        part = less
    return part


#: Sizes of the standard operators. Products: tokens of a micro-batch, hidden sizes, and widths of
#: an MLP or head as multiples of these. Attention: sequence lengths. Streams: numbers of values.
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
#: Products of more FLOPs are left out, because they run at the rate of smaller ones.
_MOST_FLOPS = 4e10


def standard_operators() -> list[tuple[Operator, tuple[bool, bool]]]:
    """Operators that `calibrate` times, quick ones first, each with the memory layout of a
    product's factors (see `transposed_factors`)."""
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
        # Only for the dtype and head sizes for which `attention: auto` chooses blockwise.
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
    """Time the standard operators, and store the times.

    Args:
        seconds: seconds after which no further operator is begun; all take about 90 s.
        folder: the store's folder; None is calibration/ in the cache.

    Returns:
        The calibration, including the times of earlier calls.

    Raises:
        StorageError: a file system error prevents writing.
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


#: Rows, columns and inner dimension of the reference products.
_PRODUCT = (512, 768, 768)
#: Number of values of each tensor of the reference stream.
_STREAM = 8 * 2**20
#: Counted measurements of each reference.
_ROUNDS = 7


def measure_reference() -> Reference:
    """Measure the reference products and the reference stream in turns, which takes 0.25 s."""
    m, n, k = _PRODUCT
    calls: dict[str, Callable[[], object]] = {}
    work: dict[str, float] = {}
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        calls[name] = _product(m, n, k, dtype)
        work[name] = 2.0 * m * n * k
    source, other = torch.rand(_STREAM), torch.rand(_STREAM)
    result = torch.empty_like(source)
    calls["stream"] = lambda: torch.add(source, other, out=result)
    work["stream"] = 3.0 * source.nbytes
    times: dict[str, list[float]] = {name: [] for name in calls}
    # In turns, so that a slow moment of the machine hits all references alike.
    for number in range(_ROUNDS + 1):
        for name, call in calls.items():
            start = time.thread_time()
            call()
            # The first round warms up caches and threads, and is not counted.
            if number:
                times[name].append(time.thread_time() - start)
    seconds = {name: statistics.quantiles(found, n=4)[0] for name, found in times.items()}
    rates = {name: work[name] / seconds[name] for name in seconds}
    return Reference(seconds, rates, _call_seconds())


def _product(m: int, n: int, k: int, dtype: torch.dtype) -> Callable[[], object]:
    a, b = torch.rand(m, k).to(dtype), torch.rand(k, n).to(dtype)
    result = torch.empty(m, n, dtype=dtype)
    return lambda: torch.mm(a, b, out=result)


def _call_seconds() -> float:
    """Seconds of one operator call, as the mean over a forward and backward pass on 16 values;
    three operators (two views) a layer in each pass."""
    x = torch.rand(16, requires_grad=True)
    layers = 40
    times = []
    for _ in range(4):
        start = time.thread_time()
        y = x
        for _ in range(layers):
            y = (y.view(4, 4) * 1.01).view(16)
        y.sum().backward()  # type: ignore[no-untyped-call]
        times.append((time.thread_time() - start) / (6 * layers))
    return min(times)

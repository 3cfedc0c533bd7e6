"""The memory half of `firstlight bench planner`: predictions beside real training steps.

Each configuration is predicted and then run, in a process of its own, on this machine's CPU: what
torch's allocator hands out there is known to the byte, compiled code included.
"""

from __future__ import annotations

import os
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from firstlight.bench.models import PlannerCase
from firstlight.bench.pictures import draw_peaks, draw_shares, new_figure, png_of
from firstlight.bench.planner_speed import percentile
from firstlight.bench.process import ForkServer
from firstlight.bench.runner import RowOutcome, run_bench

#: Goals of predictions: the error of 95 of 100, and the greatest shortage.
ALLOWED_ERROR, ALLOWED_SHORTAGE = 0.05, 0.02

_SECONDS = 300.0

#: (row length, rows): from 256 to 8,192 tokens, from 1 to 32 rows.
_SHAPES = ((256, 1), (256, 8), (256, 32), (512, 4), (1024, 2), (1024, 8), (2048, 2), (4096, 1))
_LONGEST = (8192, 1)

#: Keys of a recipe, one method each.
_METHODS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"efficiency.precision": "bf16"},
    "bf16 weights": {"efficiency.precision": "bf16_params"},
    "fp16": {"efficiency.precision": "fp16"},
    "checkpointing": {"efficiency.activation_checkpointing": "full"},
    "selective": {"efficiency.activation_checkpointing": "selective"},
    "chunked loss": {"efficiency.loss_chunk_tokens": 256},
    "plain attention": {"efficiency.attention": "plain"},
    "adamw8bit": {"optimizer.name": "adamw8bit"},
    "adafactor": {"optimizer.name": "adafactor"},
    "muon": {"optimizer.name": "muon"},
    "sgd": {"optimizer.name": "sgd"},
    "accumulation": {"batch.gradient_accumulation_steps": 3},
    "in backward": {
        "efficiency.optimizer_in_backward": True,
        "optimizer.max_grad_norm": 0.0,
    },
    "documents": {"data.document_masking": True},
    "pairs": {"data.kind": "preference", "preference": {"beta": 0.1}},
    "lora": {"lora": {"rank": 8}},
    "compile": {"efficiency.compile": True},
    "compile bf16": {"efficiency.compile": True, "efficiency.precision": "bf16"},
    "compile checkpointing": {
        "efficiency.compile": True,
        "efficiency.activation_checkpointing": "full",
    },
}

#: The attention that "auto" takes on CPUs where heads are large: model, shape, and methods.
_BLOCKWISE: tuple[tuple[str, tuple[int, int], dict[str, dict[str, Any]]], ...] = (
    ("llama large", (512, 4), {"bf16": {}}),
    ("gpt2 large", (1024, 2), {"compile bf16": {}}),
    ("gpt2 medium", (256, 8), {"dropout": {"model.attn_pdrop": 0.1}}),
    ("llama medium", (1024, 2), {"bf16": {}, "documents": {}, "checkpointing": {}}),
)

#: Methods that are drawn at random to stand together, one of each line.
_TOGETHER = (
    ("plain", "bf16", "bf16 weights", "fp16"),
    ("plain", "checkpointing", "selective"),
    ("plain", "chunked loss"),
    ("plain", "adamw8bit", "adafactor", "muon"),
    ("plain", "accumulation"),
)


def memory_grid(*, quick: bool = False) -> list[PlannerCase]:
    """The configurations: each method alone with both families, rows of each length, methods drawn
    together, compiled steps of several lengths, evaluations and generations.
    """
    cases = list(_cases())
    return cases[::8] if quick else cases


def _cases() -> Iterator[PlannerCase]:
    for number, (name, changes) in enumerate(_METHODS.items()):
        # Without a method there are rows of each length below.
        for family in ("gpt2", "llama") if changes else ():
            size = ("small", "medium")[number % 2]
            yield _case(f"{family} {size}", _SHAPES[number % 6], [name], changes)
    for family in ("gpt2", "llama"):
        for shape in (*_SHAPES, _LONGEST):
            yield _case(f"{family} small", shape, ["plain"], {})
        yield _case(f"{family} large", (512, 4), ["plain"], {})
    generator = random.Random("planner")
    for number in range(12):
        names = [generator.choice(names) for names in _TOGETHER]
        changes = {key: value for name in names for key, value in _METHODS[name].items()}
        family, shape = ("gpt2", "llama")[number % 2], _SHAPES[generator.randrange(7)]
        model = f"{family} {('small', 'medium', 'large')[number % 3]}"
        yield _case(model, shape, [n for n in names if n != "plain"] or ["plain"], changes)
    for shape in ((256, 8), (2048, 2), (4096, 1)):
        yield _case("llama small", shape, ["compile"], _METHODS["compile"])
    for model, shape, more in _BLOCKWISE:
        changes = {"efficiency.attention": "blockwise"}
        for name, keys in more.items():
            changes |= _METHODS.get(name, {}) | keys
        yield _case(model, shape, ["blockwise attention", *more], changes)
    for family, shape in (("gpt2", (1024, 8)), ("llama", (256, 32)), ("llama", (4096, 1))):
        yield _case(f"{family} medium", shape, ["evaluation"], {}, kind="evaluation")
    for family, dtype, count in (
        ("gpt2", "float32", 1),
        ("llama", "bfloat16", 8),
        ("llama", "int8", 1),
    ):
        options = {"prompt_tokens": 256, "max_new_tokens": 256, "sequences": count, "dtype": dtype}
        title = f"{family} medium, generation, {dtype}, {count} texts"
        model = f"{family} medium"
        yield PlannerCase(model, 1, 1024, kind="generation", generation=options, title=title)


def _case(
    model: str,
    shape: tuple[int, int],
    names: list[str],
    changes: Mapping[str, Any],
    kind: str = "training",
) -> PlannerCase:
    tokens, rows = shape
    title = f"{model}, {rows} x {tokens}, {', '.join(names)}"
    return PlannerCase(model, rows, tokens, changes, kind, title=title)


def bench_memory(
    cases: Sequence[PlannerCase], on_run: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Predict and run every case.

    Args:
        cases: the configurations.
        on_run: see `run_bench`.

    Returns:
        "summary", see `summary`, and "rows": "name", "kind", "predicted_bytes", "peak_bytes",
        "resident_bytes", "phase", "seconds" of the prediction, "error" as a share of the peak
        (negative: too little was predicted), and "reason" where it failed.
    """
    by_name = {case.name: case for case in cases}
    # The profiler's library says when it begins and ends, at the highest level that it has, 5.
    environment = {"KINETO_LOG_LEVEL": "6"} | os.environ

    def result(outcomes: Mapping[str, RowOutcome]) -> dict[str, Any]:
        rows = [_row(by_name[name], one) for name, one in outcomes.items() if one.is_done]
        return {"rows": rows, "summary": summary(rows)}

    # A process for each: what one leaves in memory would be another's.
    with ForkServer(environment, "firstlight.bench.planner_steps", "memory_once") as server:
        return run_bench(
            "memory",
            list(by_name),
            1,
            lambda name: server.ask(by_name[name].request(), _SECONDS),
            result,
            on_run,
        )


def _row(case: PlannerCase, outcome: RowOutcome) -> dict[str, Any]:
    row = {"name": case.name, "kind": case.kind, "reason": outcome.problem}
    for found in outcome.runs:
        row |= found | {"error": found["predicted_bytes"] / found["peak_bytes"] - 1}
    return row


def summary(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The errors of all results together.

    Returns:
        "count"; "error_95", the error that 95 of 100 are within; "worst_shortage", by how much too
        little was predicted at the most; "median_error"; "prediction_seconds_95"; "failed".
    """
    good = [one for one in results if not one["reason"]]
    if not good:
        return {"count": 0, "failed": len(results)}
    return {
        "count": len(good),
        "failed": len(results) - len(good),
        "error_95": percentile(sorted(abs(one["error"]) for one in good), 0.95),
        "median_error": statistics.median(abs(one["error"]) for one in good),
        "worst_shortage": max(0.0, *(-one["error"] for one in good)),
        "prediction_seconds_95": percentile(sorted(one["seconds"] for one in good), 0.95),
    }


def draw_memory(results: Sequence[Mapping[str, Any]]) -> bytes:
    """Predicted against measured peaks, and how the errors are spread, as a PNG."""
    good = [one for one in results if not one["reason"]]
    figure = new_figure(11, 4.6)
    draw_peaks(figure.add_subplot(1, 2, 1), good)
    right: Any = figure.add_subplot(1, 2, 2)
    draw_shares(right, [100 * one["error"] for one in good], "tab:blue", "")
    right.axvspan(-100 * ALLOWED_SHORTAGE, 100 * ALLOWED_ERROR, color="tab:green", alpha=0.12)
    right.set(xlabel="error, % of the measured peak", ylabel="share of configurations")
    figure.suptitle(f"memory: {len(good)} configurations; green is what is allowed")
    return png_of(figure)

"""`firstlight bench methods`: measure the speed and memory of each efficiency method on this
machine.

The result consists of two tables:

- "alone" compares each method on its own with the plain run. The plain run uses fp32, computes
  attention as two matrix products, updates parameters one by one with AdamW, does not use
  compilation, and has one micro-batch per step.
- "ladder" contains the methods of Raschka's "PyTorch Performance Tips for Faster LLM Training" in
  the same order. Each row adds one method to the rows before it. For a GPT-2 model, the first row
  uses a mask, LayerNorm and GELU implemented with elementary operations (`steps.write_out`).

The recipe of each row is trained for a few steps in a fresh process (`steps` describes the
measurements). With `quick` on a CPU, this process is forked from a process that has already
imported all libraries. All rows are measured one after the other, and this is repeated for each
turn (A B C, A B C). All rows use the same number of threads, the same data and the same initial
weights. Rates are medians over the timed steps of all turns. A row that can't run on this machine
is skipped, and the reason is shown. A row that fails is shown with its error, and the ladder
continues without it.

In all rows, MFU is relative to the machine's rate of bf16 matrix products
(`hardware.device.peak_flops`). On a CPU that computes fp32 products faster, the rate of fp32
products is used instead. The rate is measured at the start and at the end, and the higher value is
used. Operations that are computed a second time, as with activation checkpointing, are counted only
once.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from firstlight.bench.display import Panel, draw_panels
from firstlight.bench.rows import (
    Found,
    Keep,
    MethodsBench,
    Result,
    RowOutcome,
    require_known,
    take_turns,
)
from firstlight.bench.steps import StepsPlan, plan_steps, steps_title, write_tokens
from firstlight.errors import ConfigError
from firstlight.hardware.device import Hardware, peak_flops
from firstlight.hardware.fresh_process import (
    ForkServer,
    ask,
    ask_ranks,
    error_of,
    training_environment,
)
from firstlight.models import GPT2Config, ModelConfig
from firstlight.recipe import parse_resolved_recipe
from firstlight.recipe.load import changed_recipe

#: Names of the tables in the result.
ALONE, LADDER = "alone", "ladder"

_TITLES = {ALONE: "each method alone", LADDER: "each method added to those above it"}


@dataclass(frozen=True)
class MethodRow:
    """One method, shown as a row in a table.

    Attributes:
        name: name in tables and for `--rows`.
        changes: values of the recipe keys (`section.key`) that the method sets. For a row of the
            ladder, these are only the changes that the row adds to the rows before it.
        needs_gpu: reason why the row is skipped on CPUs; "" if it is not.
        not_here: reason why the row is skipped regardless of the device; "" if it is not.
        in_quick: False to exclude the row from `--quick`, because it starts slowly or is similar to
            another row.
        huge_pages: True to let torch use huge pages for large tensors. `firstlight train` does not
            use huge pages.
    """

    name: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    needs_gpu: str = ""
    not_here: str = ""
    in_quick: bool = True
    huge_pages: bool = False


@dataclass
class MethodOutcome(RowOutcome):
    """Results of one recipe. A recipe can appear as a row in both tables.

    Attributes:
        changes: values of the keys (`section.key`) that differ from the plain recipe.
    """

    changes: Mapping[str, Any] = field(default_factory=dict)


PLAIN = MethodRow("plain")

#: Key in `MethodRow.changes` for the parts of the model to implement with elementary operations. It
#: is not a recipe key; its value is a list of names in `steps.WRITTEN_OUT_PARTS`.
WRITTEN_OUT = "bench.written_out"

#: Key in `MethodRow.changes` for the number of processes, which share the threads of a CPU or use
#: one GPU each. It is not a recipe key.
PROCESSES = "bench.processes"


def plain_recipe(
    model: ModelConfig, device: str, seq_len: int, micro_batch_size: int
) -> dict[str, Any]:
    """Return the values of the plain recipe, to which each row adds its changes.

    Gradients are not clipped, because all rows must compute the same update. An optimizer that
    updates parameters during the backward pass can't clip gradients, because it never has all
    gradients at the same time.
    """
    return {
        "run": {"device": device},
        "model": model.model_dump(),
        "data": {"dir": "-", "seq_len": seq_len},
        "batch": {"micro_batch_size": micro_batch_size, "gradient_accumulation_steps": 1},
        "optimizer": {
            "name": "adamw",
            "implementation": "for-loop",
            "learning_rate": 6e-4,
            "max_grad_norm": 0.0,
        },
        "efficiency": {
            "precision": "fp32",
            "attention": "plain",
            "compile": False,
            "loss_chunk_tokens": 0,
        },
    }


def accumulation(micro_batch_size: int) -> dict[str, Any]:
    """Return the recipe keys that split a step of `micro_batch_size` sequences into four
    micro-batches. If `micro_batch_size` is not divisible by four, each micro-batch has one
    sequence.
    """
    micro = micro_batch_size // 4 if micro_batch_size % 4 == 0 else 1
    return {
        "batch.micro_batch_size": micro,
        "batch.gradient_accumulation_steps": micro_batch_size // micro,
    }


def larger_batch(micro_batch_size: int) -> dict[str, Any]:
    """Return the recipe keys for steps of a single micro-batch with twice as many sequences as in
    the plain run."""
    return {"batch.micro_batch_size": 2 * micro_batch_size, "batch.gradient_accumulation_steps": 1}


def _chunk_tokens(micro_batch_size: int, seq_len: int) -> int:
    """Return the number of tokens per chunk of the loss: half of the smallest micro-batch of any
    row, so that each micro-batch has at least two chunks.
    """
    smallest: int = accumulation(micro_batch_size)["batch.micro_batch_size"]
    return max(1, smallest * seq_len // 2)


_IS_CPU = "needs a GPU: "


def alone_rows(micro_batch_size: int, seq_len: int, hardware: Hardware) -> list[MethodRow]:
    """Return the rows that measure each method on its own, starting with the plain run."""
    compiled = {"efficiency.compile": True}
    return [
        PLAIN,
        MethodRow("huge-pages", huge_pages=True),
        MethodRow("accumulation", accumulation(micro_batch_size)),
        MethodRow("checkpointing-full", {"efficiency.activation_checkpointing": "full"}),
        MethodRow("checkpointing-selective", {"efficiency.activation_checkpointing": "selective"}),
        MethodRow(
            "offload",
            {"efficiency.activation_offload": True},
            _IS_CPU + "activations on a CPU are already in host memory",
        ),
        MethodRow("tf32", {"efficiency.precision": "tf32"}, _IS_CPU + "CPUs have no TF32"),
        MethodRow("bf16", {"efficiency.precision": "bf16"}),
        MethodRow(
            "bf16-residual", {"efficiency.precision": "bf16", "efficiency.bf16_residual": True}
        ),
        MethodRow("bf16-params", {"efficiency.precision": "bf16_params"}),
        MethodRow("fp16", {"efficiency.precision": "fp16"}),
        MethodRow(
            "fp8",
            {**compiled, "efficiency.precision": "fp8"},
            _IS_CPU + "CPUs have no fp8 matrix units",
        ),
        *_optimizer_rows(),
        *_attention_rows(hardware),
        MethodRow(
            "chunked-loss",
            {"efficiency.loss_chunk_tokens": _chunk_tokens(micro_batch_size, seq_len)},
        ),
        MethodRow("vocab-64", {"efficiency.vocab_multiple": 64}),
        MethodRow("larger-batch", larger_batch(micro_batch_size)),
        MethodRow("document-masking", {"data.document_masking": True}),
        MethodRow("lora", {"lora.rank": 8}),
        MethodRow("qlora", {"lora.rank": 8, "lora.quantize": "nf4"}, in_quick=False),
        MethodRow("compile", compiled),
        MethodRow(
            "compile-regional", {**compiled, "efficiency.compile_regional": True}, in_quick=False
        ),
        MethodRow(
            "compile-budget",
            {**compiled, "efficiency.activation_checkpointing": "budget"},
            in_quick=False,
        ),
        MethodRow(
            "compile-cudagraphs",
            {**compiled, "efficiency.compile_mode": "reduce-overhead"},
            _IS_CPU + "CUDA graphs require CUDA",
        ),
    ]


def _optimizer_rows() -> list[MethodRow]:
    def other(name: str, **keys: Any) -> dict[str, Any]:
        # The plain recipe sets this key to "for-loop". This row restores the default value, "auto".
        chosen = {"name": name, "implementation": "auto", **keys}
        return {f"optimizer.{key}": value for key, value in chosen.items()}

    return [
        MethodRow("foreach", {"optimizer.implementation": "foreach"}, in_quick=False),
        MethodRow("fused", {"optimizer.implementation": "fused"}),
        MethodRow("adamw8bit", other("adamw8bit", eight_bit_library="bitsandbytes")),
        MethodRow(
            "adamw8bit-torchao", other("adamw8bit", eight_bit_library="torchao"), in_quick=False
        ),
        MethodRow(
            "paged-adamw8bit",
            other("paged_adamw8bit"),
            _IS_CPU + "the optimizer moves pages between GPU and CPU memory",
        ),
        MethodRow("adafactor", other("adafactor", learning_rate=1e-2)),
        MethodRow("muon", other("muon")),
        MethodRow("sgd", other("sgd", learning_rate=0.1)),
        MethodRow("optimizer-in-backward", {"efficiency.optimizer_in_backward": True}),
    ]


def _attention_rows(hardware: Hardware) -> list[MethodRow]:
    no_kernel = _IS_CPU + "CPUs have no such kernel"
    # On GPUs, the flash and cudnn kernels support only 16-bit number formats.
    half = {"efficiency.precision": "bf16"} if hardware.device.type == "cuda" else {}
    prefix = "bf16+" if half else ""
    return [
        MethodRow("sdpa", {"efficiency.attention": "sdpa"}),
        MethodRow(prefix + "flash", {"efficiency.attention": "flash", **half}, in_quick=False),
        MethodRow("math", {"efficiency.attention": "math"}, in_quick=False),
        MethodRow("blockwise", {"efficiency.attention": "blockwise"}, in_quick=False),
        MethodRow("efficient", {"efficiency.attention": "efficient"}, no_kernel),
        MethodRow(prefix + "cudnn", {"efficiency.attention": "cudnn", **half}, no_kernel),
        MethodRow("flex", {"efficiency.attention": "flex"}, no_kernel),
    ]


def ladder_rows(
    micro_batch_size: int, hardware: Hardware, *, is_gpt2: bool = True, processes: int = 1
) -> list[MethodRow]:
    """Return the rows of the ladder. Each row adds one method to the methods of the rows before it,
    in the order of Raschka's guide.

    Mixed precision is bf16, or fp16 on GPUs that do not support bf16. The rows that replace the
    elementary mask and layers are skipped for models other than GPT-2.

    Args:
        micro_batch_size: number of sequences per step of the plain run.
        hardware: this machine's device.
        is_gpt2: True if the model is a GPT-2 model.
        processes: number of processes in the `+ddp` row. With 1, the row is skipped.
    """
    low = "fp16" if hardware.device.type == "cuda" and not hardware.bf16 else "bf16"
    both, layers = (("mask", "layers"), ("layers",)) if is_gpt2 else ((), ())
    other = (
        ""
        if is_gpt2
        else ("applies only to the written-out layers of GPT-2, which this model does not have")
    )
    shared = (
        "two threads, but torch uses only one" if hardware.device.type == "cpu" else "a second GPU"
    )
    return [
        MethodRow("baseline", {WRITTEN_OUT: both, "data.pin_memory": False}),
        MethodRow("+mask-on-the-fly", {WRITTEN_OUT: layers}, not_here=other),
        MethodRow("+tf32", {"efficiency.precision": "tf32"}, _IS_CPU + "CPUs have no TF32"),
        MethodRow("+fused-adamw", {"optimizer.implementation": "fused"}),
        MethodRow(
            "+pinned-memory",
            {"data.pin_memory": True},
            _IS_CPU + "batches are not copied on a CPU",
        ),
        MethodRow(f"+{low}", {"efficiency.precision": low}),
        MethodRow("+torch-classes", {WRITTEN_OUT: ()}, not_here=other),
        MethodRow("+flash-attention", {"efficiency.attention": "sdpa"}),
        MethodRow("+compile", {"efficiency.compile": True}),
        MethodRow("+padded-vocabulary", {"efficiency.vocab_multiple": 64}),
        MethodRow("+larger-batch", larger_batch(micro_batch_size)),
        MethodRow(
            "+ddp",
            # Each process uses the GPU with its rank.
            {"run.device": hardware.device.type, "distributed.engine": "ddp", PROCESSES: processes},
            not_here="" if processes > 1 else f"needs {shared} here",
        ),
    ]


def changes_up_to(
    ladder: Sequence[MethodRow], rung: int, left_out: Collection[str]
) -> dict[str, Any]:
    """Return the combined changes of the ladder row at index `rung` and all rows before it. Rows in
    `left_out` are omitted."""
    changes: dict[str, Any] = {}
    for row in ladder[: rung + 1]:
        if row.name not in left_out or row is ladder[rung]:
            changes |= row.changes
    return changes


def why_skipped(row: MethodRow, hardware: Hardware, micro_batch_size: int, quick: bool) -> str:
    """Return the reason why a row is skipped on this machine. Return "" if the row is measured."""
    if row.not_here:
        return row.not_here
    if row.needs_gpu and hardware.device.type != "cuda":
        return row.needs_gpu
    # On NVIDIA GPUs, both bf16 and TF32 require compute capability 8.0.
    if row.name == "+tf32" and not hardware.bf16:
        return "needs a GPU with compute capability 8.0: this one has no TF32"
    if row.huge_pages and hardware.device.type != "cpu":
        return "applies only to CPU memory"
    if row.name.endswith("accumulation") and micro_batch_size == 1:
        return "a single sequence can't be split: use a larger --micro-batch-size"
    if row.changes.get("efficiency.precision") == "fp16" and hardware.device.type == "cpu":
        operations: Any = torch.ops.mkldnn
        if not operations._is_mkldnn_fp16_supported():
            return "this CPU has no hardware support for fp16: a step would take minutes"
    if quick and not row.in_quick:
        return "skipped by --quick"
    return ""


def summarize(
    rows: Sequence[tuple[MethodRow, MethodOutcome | None]], head: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return the median results of each row of a table, along with their ratios to the results of
    the first row.

    Args:
        rows: rows with their outcomes. The outcome is None for a row that has not been measured
            yet.
        head: dict with the values of "seq_len", "micro_batch_size", "flops_per_token" and "machine"
            from the benchmark's result.

    Returns:
        A dict for each row. It contains "name", "huge_pages", "keys" (the changes of the row),
        "status" ("measured", "skipped", "failed" or "waiting") and the "reason" for the status. The
        dict of a measured row also contains:

        - "processes": number of processes; "micro_batch_size" and "gradient_accumulation_steps" are
          values per process
        - "samples_per_second": total number of sequences per second in all processes, as the median
          over all timed steps; "samples_per_second_min" and "samples_per_second_max" are the lowest
          and highest values. "tokens_per_second" is the corresponding number of tokens
        - "mfu": FLOP/s per device as a fraction of the machine's "matmul_flops"
        - "peak_bytes": peak memory of the process that uses the most memory, as the median over the
          turns
        - "speed_ratio" and "memory_ratio": speed and memory relative to the first row.
          "ratio_to_previous" is the speed relative to the previous measured row. All three are None
          if the first row is not measured
        - "final_loss": final loss, as the median over the turns
        - "first_step_seconds": duration of the first step in the first turn
        - "runs": results of all turns
    """
    result = [_summary(row, outcome, head) for row, outcome in rows]
    if not result or result[0]["status"] != "measured":
        return result
    first = result[0]
    before = first["samples_per_second"]
    for row in result:
        if row["status"] == "measured":
            row["speed_ratio"] = row["samples_per_second"] / first["samples_per_second"]
            row["memory_ratio"] = row["peak_bytes"] / first["peak_bytes"]
            row["ratio_to_previous"] = row["samples_per_second"] / before
            before = row["samples_per_second"]
    return result


def _summary(
    row: MethodRow, outcome: MethodOutcome | None, head: Mapping[str, Any]
) -> dict[str, Any]:
    changes = dict(row.changes if outcome is None else outcome.changes)
    entry: dict[str, Any] = {"name": row.name, "keys": changes, "huge_pages": row.huge_pages}
    if outcome is None or not outcome.is_done:
        return {**entry, "status": "waiting", "reason": "not measured yet"}
    if not outcome.runs:
        status = "skipped" if outcome.refused else "failed"
        return {**entry, "status": status, "reason": outcome.problem}
    micro = changes.get("batch.micro_batch_size", head["micro_batch_size"])
    passes, processes = (
        changes.get(key, 1) for key in ("batch.gradient_accumulation_steps", PROCESSES)
    )
    rates = [processes * micro * passes / seconds for seconds in outcome.values("step_seconds")]
    # On GPUs, "matmul_flops" is the rate of one GPU. On a CPU, it is the rate of all threads.
    devices = 1 if head["machine"]["device"] == "cpu" else processes
    tokens_per_second = statistics.median(rates) * head["seq_len"]
    return {
        **entry,
        "status": "measured",
        "reason": outcome.problem,
        "micro_batch_size": micro,
        "gradient_accumulation_steps": passes,
        "processes": processes,
        "samples_per_second": statistics.median(rates),
        "samples_per_second_min": min(rates),
        "samples_per_second_max": max(rates),
        "tokens_per_second": tokens_per_second,
        "mfu": tokens_per_second
        * head["flops_per_token"]
        / (devices * head["machine"]["matmul_flops"]),
        "peak_bytes": outcome.median("peak_bytes"),
        "speed_ratio": None,
        "memory_ratio": None,
        "ratio_to_previous": None,
        "final_loss": statistics.median(run["losses"][-1] for run in outcome.runs),
        "first_step_seconds": outcome.runs[0]["first_step_seconds"],
        "runs": outcome.runs,
    }


def draw(result: Mapping[str, Any]) -> bytes:
    """Draw the result of `bench_methods` as a PNG.

    Each table is drawn as two panels, for tokens/s and peak memory. Failed rows are listed without
    a bar, and skipped rows are omitted.
    """
    grid = [
        _panels(_TITLES[table], rows)
        for table in (ALONE, LADDER)
        if (rows := [row for row in result[table] if row["status"] in ("measured", "failed")])
    ]
    return draw_panels(steps_title(result), grid)


def _panels(title: str, rows: Sequence[Mapping[str, Any]]) -> list[Panel]:
    """Return one panel for speed and one for memory. The bars of the first row have a different
    colour."""
    names = [row["name"] for row in rows]
    colors = ["tab:orange", *["tab:blue"] * (len(rows) - 1)]
    rates = [row.get("tokens_per_second", 0.0) for row in rows]
    spread = [
        (rate, rate)
        if not rate
        else tuple(
            rate * row[f"samples_per_second_{end}"] / row["samples_per_second"]
            for end in ("min", "max")
        )
        for rate, row in zip(rates, rows, strict=True)
    ]

    def labels(key: str) -> list[str]:
        return [
            "failed" if row["status"] == "failed" else f"{row[key]:.2f}x" if row[key] else ""
            for row in rows
        ]

    speed_label = "tokens/s (median; line: slowest to fastest step)"
    peaks = [row.get("peak_bytes", 0) / 1e9 for row in rows]
    return [
        Panel(
            speed_label,
            names,
            rates,
            labels("speed_ratio"),
            colors=colors,
            spread=spread,
            title=title,
        ),
        Panel("peak memory (GB)", names, peaks, labels("memory_ratio"), colors=colors),
    ]


_MODULE = "firstlight.bench.steps"

TIME_IS_UP = "the time limit of --quick was reached"

#: Time in seconds after which `--quick` does not start another measurement, so that the benchmark
#: ends within five minutes.
QUICK_SECONDS = 275.0

#: Number of untimed steps, without and with `--quick`. On a CPU, the heap still grows in the fourth
#: step.
WARMUP_STEPS, QUICK_WARMUP_STEPS = 5, 2

Tables = Mapping[str, Sequence[MethodRow]]


def recipe_keys(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the changes of a row without the entries that are not recipe keys."""
    return {key: value for key, value in changes.items() if key not in (WRITTEN_OUT, PROCESSES)}


def processes_here(hardware: Hardware) -> int:
    """Return the number of processes in the `+ddp` row: one per GPU, two on a CPU with several
    threads, and one in all other cases.
    """
    if hardware.device.type == "cuda":
        return torch.cuda.device_count()
    return 2 if hardware.device.type == "cpu" and torch.get_num_threads() > 1 else 1


def tables_of(bench: MethodsBench, plan: StepsPlan) -> dict[str, list[MethodRow]]:
    """Return the rows of both tables that the options select (see `choose_rows`)."""
    size = (plan.micro_batch_size, plan.seq_len, plan.hardware)
    is_gpt2 = isinstance(plan.model, GPT2Config)
    processes = processes_here(plan.hardware)
    ladder = ladder_rows(plan.micro_batch_size, plan.hardware, is_gpt2=is_gpt2, processes=processes)
    return choose_rows({ALONE: alone_rows(*size), LADDER: ladder}, bench.rows)


def choose_rows(
    tables: dict[str, list[MethodRow]], names: Sequence[str]
) -> dict[str, list[MethodRow]]:
    """Return the rows selected by their own name or by the name of their table. If there are no
    names, return all rows.

    Selecting a row of the table "alone" also selects the plain run, which is the baseline.
    Selecting a row of the ladder also selects the rows before it, because it includes their
    methods.

    Args:
        tables: all rows, keyed by table.
        names: names of rows and tables.

    Raises:
        ConfigError: a name is unknown.
    """
    rows = dict.fromkeys(row.name for rows in tables.values() for row in rows)
    require_known("row", names, [*tables, *rows])
    if not names:
        return tables
    alone = [row for row in tables[ALONE] if ALONE in names or row.name in {PLAIN.name, *names}]
    ladder = tables[LADDER]
    if LADDER not in names:
        named = [i for i, row in enumerate(ladder) if row is not PLAIN and row.name in names]
        ladder = ladder[: named[-1] + 1] if named else []
    if ladder and alone == [PLAIN] and PLAIN.name not in names:
        alone = []
    return {ALONE: alone, LADDER: ladder}


def bench_methods(bench: MethodsBench, on_run: Keep) -> Result:
    """Measure all rows.

    Args:
        bench: options of the benchmark.
        on_run: function called after each run with the results measured so far.

    Returns:
        A dict with the values of `StepsPlan.head` and the keys "quick", "complete", "alone" and
        "ladder". "alone" and "ladder" contain the rows of the tables, as returned by `summarize`.
        The value of "machine" also contains "matmul_flops", the reference rate for MFU, and
        "matmul_dtype", the dtype of the products for which the rate was measured.

    Raises:
        ConfigError: an option is invalid.
        InputError: this Python installation does not include the source code of its standard
            library, which is the training data.
        StorageError: a file could not be read or written.
    """
    deadline = time.monotonic() + QUICK_SECONDS if bench.quick else None
    plan = plan_steps(bench, "bench methods")
    tables = tables_of(bench, plan)
    warmup_steps = QUICK_WARMUP_STEPS if bench.quick else WARMUP_STEPS
    head = {**plan.head(warmup_steps), "quick": bench.quick}
    machine = head["machine"]
    machine |= _ceiling(plan.hardware)
    runs = MethodRuns(tables)
    for label, (_, row) in runs.rows.items():
        reason = why_skipped(row, plan.hardware, plan.micro_batch_size, bench.quick)
        if reason:
            runs.outcomes[label] = MethodOutcome(problem=reason, refused=True, changes=row.changes)

    def result(complete: bool) -> Result:
        return {**head, "complete": complete, **runs.summaries(head)}

    with contextlib.ExitStack() as stack:
        temporary = tempfile.TemporaryDirectory(
            prefix="firstlight-bench-", ignore_cleanup_errors=True
        )
        folder = Path(stack.enter_context(temporary))
        server = None
        if bench.quick and plan.hardware.device.type == "cpu":
            environment = child_environment(False, folder / "caches")
            server = stack.enter_context(ForkServer(environment, _MODULE))
        rows_a_step = larger_batch(plan.micro_batch_size)["batch.micro_batch_size"]
        rows_a_step *= processes_here(plan.hardware)
        count = (warmup_steps + plan.steps) * rows_a_step * plan.seq_len + 1
        data = folder / "tokens.safetensors"
        write_tokens(data, count, plan.model.vocab_size)
        device = str(plan.hardware.device)
        plain = plain_recipe(plan.model, device, plan.seq_len, plan.micro_batch_size)
        request = {"data": str(data), "warmup_steps": warmup_steps, "steps": plan.steps}
        work = MethodsWork(plain, request, folder / "caches", deadline, server=server)
        runs.measure_all(work, plan.repeats, lambda: on_run(result(False)))
    # The rate is measured again, and the higher value is kept. If the machine was slower at the
    # start, the first value alone would make MFU too high.
    machine |= max(machine, _ceiling(plan.hardware), key=lambda found: found["matmul_flops"])
    done = result(True)
    on_run(done)
    return done


def _ceiling(hardware: Hardware) -> dict[str, Any]:
    """Measure the reference rate for MFU, and return a dict with "matmul_flops", the FLOP/s of
    matrix products, and "matmul_dtype", the dtype of these products.
    """
    dtypes = [torch.bfloat16] if hardware.bf16 else []
    tries = 1
    if hardware.device.type == "cpu":
        # fp32 is also measured, because some CPUs convert bf16 and multiply it at half the rate of
        # fp32. The measurement is repeated and the highest rate is kept, because other load on the
        # machine can only lower the rate.
        dtypes, tries = [*dtypes, torch.float32], 9
    rates = {
        dtype: max(peak_flops(hardware.device, dtype) for _ in range(tries))
        for dtype in dtypes or [torch.float32]
    }
    fastest = max(rates, key=lambda dtype: rates[dtype])
    return {"matmul_flops": rates[fastest], "matmul_dtype": str(fastest).removeprefix("torch.")}


@dataclass(frozen=True)
class MethodsWork:
    """Settings that are the same for all runs of the benchmark.

    Attributes:
        plain: values of the plain recipe, which the rows change.
        request: values of "data", "warmup_steps" and "steps" in all requests to `steps`.
        caches: cache folder for torch.compile. The folder is empty at the start, so code is
            compiled in the first turn.
        deadline: value of `time.monotonic` after which no measurement is started; None for no
            limit.
        server: process from which the processes of rows are forked, except for rows that need
            special environment variables. None to start a new Python process for every row.
    """

    plain: Mapping[str, Any]
    request: Mapping[str, Any]
    caches: Path
    deadline: float | None = None
    server: ForkServer | None = None

    def measure(self, changes: Mapping[str, Any], *, huge_pages: bool) -> Found:
        """Run one measurement: train the plain recipe with some keys changed.

        Args:
            changes: values of the changed keys (see `MethodRow.changes`).
            huge_pages: True to let torch use huge pages (see `MethodRow.huge_pages`).

        Returns:
            The result of `steps`, or {"error": {"type", "message"}} if the measurement failed.
        """
        values = changed_recipe(self.plain, recipe_keys(changes))
        try:
            recipe = parse_resolved_recipe(values, "this method")
        except ConfigError as error:
            return error_of("ConfigError", str(error))
        request = {
            "recipe": recipe.model_dump(),
            "resolved": True,
            **self.request,
            "threads": torch.get_num_threads(),
            "written_out": list(changes.get(WRITTEN_OUT, ())),
        }
        seconds = None if self.deadline is None else self.deadline - time.monotonic()
        if seconds is not None and seconds <= 0:
            return error_of("TimeoutError", TIME_IS_UP)
        environment = child_environment(huge_pages, self.caches)
        if (processes := changes.get(PROCESSES, 1)) > 1:
            found = ask_ranks(_MODULE, request, environment, processes, seconds=seconds)
        elif self.server is not None and not huge_pages:
            found = self.server.ask(request, seconds)
        else:
            found = ask(_MODULE, request, environment, seconds)
        if found.get("error", {}).get("type") == "TimeoutError":
            return error_of("TimeoutError", TIME_IS_UP)
        return found


def child_environment(huge_pages: bool, caches: Path) -> dict[str, str]:
    """Return the environment variables that `firstlight train` uses, and additional variables that
    set the cache folder of the compiler and the use of huge pages.

    Args:
        huge_pages: True to let torch use huge pages for large tensors.
        caches: cache folder of torch.compile.
    """
    environment = training_environment() | {"TORCHINDUCTOR_CACHE_DIR": str(caches)}
    return environment | ({"THP_MEM_ALLOC_ENABLE": "1"} if huge_pages else {})


class MethodRuns:
    """The rows of both tables and their outcomes.

    Attributes:
        rows: pairs (table, row), keyed by a label of the form "table: name".
        outcomes: outcomes of the rows, keyed by label.
    """

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self.rows = {
            f"{table}: {row.name}": (table, row) for table, rows in tables.items() for row in rows
        }
        self.outcomes: dict[str, MethodOutcome] = {}
        self._by_recipe: dict[tuple[str, bool], MethodOutcome] = {}

    def measure_all(self, work: MethodsWork, repeats: int, on_run: Callable[[], None]) -> None:
        """Measure all rows in `repeats` turns. Call `on_run` after every run."""

        def measure(label: str) -> Found:
            changes = self._outcome(label).changes
            return work.measure(changes, huge_pages=self.rows[label][1].huge_pages)

        take_turns(
            "methods", self._order(), repeats, self._outcome, measure=measure, on_turn=on_run
        )

    def _order(self) -> list[str]:
        """Return the labels in the order of measurement.

        Rows without compilation are measured before rows with compilation. Within each of these two
        groups, the rows of the ladder come first. If the time runs out, the remaining rows are not
        measured.
        """
        ladder = [label for label, (table, _) in self.rows.items() if table == LADDER]
        alone = [label for label in self.rows if label not in ladder]
        compiling = [label for label in self.rows if "efficiency.compile" in self._changes(label)]
        first = next((i for i, label in enumerate(ladder) if label in compiling), len(ladder))
        return [
            *ladder[:first],
            *(label for label in alone if label not in compiling),
            *ladder[first:],
            *(label for label in alone if label in compiling),
        ]

    def _changes(self, label: str) -> Mapping[str, Any]:
        return self.rows[label][1].changes

    def _outcome(self, label: str) -> MethodOutcome:
        """Return the outcome of a row, which contains the results measured so far.

        The changes of a row of the ladder are determined when the row is first measured. They do
        not include the changes of earlier rows that failed.
        """
        if label in self.outcomes:
            return self.outcomes[label]
        table, row = self.rows[label]
        changes = dict(row.changes)
        if table == LADDER:
            ladder = self.tables[LADDER]
            left_out = {
                self.rows[other][1].name
                for other, outcome in self.outcomes.items()
                if self.rows[other][0] == LADDER and outcome.problem
            }
            changes = changes_up_to(ladder, list(ladder).index(row), left_out)
        recipe = (json.dumps(changes, sort_keys=True), row.huge_pages)
        # A recipe that is in both tables is measured only once.
        outcome = self._by_recipe.setdefault(recipe, MethodOutcome(changes=changes))
        self.outcomes[label] = outcome
        return outcome

    def summaries(self, head: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
        """Return the rows of each table, as returned by `summarize`."""
        return {
            table: summarize(
                [(row, self.outcomes.get(f"{table}: {row.name}")) for row in rows], head
            )
            for table, rows in self.tables.items()
        }

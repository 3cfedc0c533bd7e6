"""`firstlight bench scaling`: tokens per second, what sharing costs, and memory, by engine and
number of processes.

Each row is a run of its own processes on this machine, every one with the same micro-batch, so a
step of n processes sees n times the tokens ("weak scaling"). On a CPU, n processes share its
cores evenly; on GPUs each has its own. Those that compute the same rows together (tensor, pipeline)
see the tokens of one process. The rows take turns; numbers are medians over the turns.
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
import socket
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from firstlight.bench.fresh_process import last_words, training_environment
from firstlight.bench.methods_rows import SMALL, find_model
from firstlight.console import progress_bar
from firstlight.errors import ConfigError, nearest
from firstlight.hardware.device import Hardware, find_hardware
from firstlight.models.accounting import meta_model

_MODULE = "firstlight.bench.scaling_once"

#: The `distributed` section of each engine, for a number of processes.
ENGINES: dict[str, Callable[[int], dict[str, Any]]] = {
    "ddp": lambda _: {"engine": "ddp"},
    "fsdp": lambda _: {"engine": "fsdp"},
    "fsdp-kept": lambda _: {"engine": "fsdp", "reshard_after_forward": False},
    "fsdp-offload": lambda _: {"engine": "fsdp", "offload": "cpu"},
    "hybrid": lambda _: {"engine": "fsdp", "shard": 2},
    "tensor": lambda count: {"tensor_parallel": count},
    "pipeline": lambda count: {"pipeline": count},
    "zero-1": lambda _: {"engine": "deepspeed", "zero_stage": 1},
    "zero-2": lambda _: {"engine": "deepspeed", "zero_stage": 2},
    "zero-3": lambda _: {"engine": "deepspeed", "zero_stage": 3},
}

#: Those whose processes compute the same rows together.
_TOGETHER = ("tensor", "pipeline")


@dataclass(frozen=True)
class ScalingBench:
    """What is to be measured.

    Attributes:
        processes: the most; 1, 2, 4, ... and this one are measured.
        model: a name as for `bench methods`, or a recipe file.
        engines: names of `ENGINES`; empty is all that such a model, so many processes and what is
            installed can use.
        seq_len, micro_batch_size, accumulation: of each process.
        steps: timed in each turn.
        repeats: turns of all rows.
        precision: see the `efficiency` section.
        device: "auto", "cpu", "cuda".

    Raises:
        ConfigError: a value is out of range, or a name unknown.
    """

    processes: int = 2
    model: str = SMALL
    engines: Sequence[str] = ()
    seq_len: int = 256
    micro_batch_size: int = 2
    accumulation: int = 1
    steps: int = 5
    repeats: int = 3
    precision: str = "fp32"
    device: str = "auto"

    def __post_init__(self) -> None:
        for name in ("processes", "seq_len", "micro_batch_size", "accumulation", "steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}: at least 1 is needed")
        if self.repeats < 1:
            raise ConfigError(f"repeats is {self.repeats}: at least 1 is needed")
        for name in self.engines:
            if name not in ENGINES:
                hint = nearest(name, ENGINES) or f": use {', '.join(ENGINES)}"
                raise ConfigError(f"engine '{name}' is unknown{hint}")

    def rows(self) -> list[tuple[str, int]]:
        """(engine, processes) of each row; the first is one process without an engine."""
        counts = sorted({2**power for power in range(1, 20) if 2**power < self.processes})
        if self.processes > 1:
            counts.append(self.processes)
        rows = [("none", 1)]
        for count in counts:
            for name in self.engines or self._usual():
                # Groups of two of two processes are fsdp itself.
                if name != "hybrid" or (count > 2 and count % 2 == 0):
                    rows.append((name, count))
        return rows

    def _usual(self) -> list[str]:
        left_out: set[str] = set()
        model = find_model(self.model)
        if not model.tensor_parallel_sizes:
            left_out.add("tensor")
        if not model.has_pipeline:
            left_out.add("pipeline")
        if importlib.util.find_spec("deepspeed") is None:
            left_out |= {"zero-1", "zero-2", "zero-3"}
        return [name for name in ENGINES if name not in left_out]

    def tokens(self, engine: str, count: int) -> int:
        """Of one step of all processes together."""
        rows = self.micro_batch_size * (1 if engine in _TOGETHER else count)
        return self.seq_len * rows * self.accumulation


def bench_scaling(bench: ScalingBench, on_run: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Measure all rows.

    Args:
        bench: what.
        on_run: called with the result so far after every turn of a row.

    Returns:
        "model", "parameters", "seq_len", "micro_batch_size", "accumulation", "precision",
        "repeats", "machine", "complete", and "rows": see `summarize`.

    Raises:
        ConfigError: there are fewer GPUs than processes.
    """
    hardware = find_hardware(bench.device)
    if hardware.device.type == "cuda" and bench.processes > torch.cuda.device_count():
        raise ConfigError(
            f"{bench.processes} processes need as many GPUs, and this machine has "
            f"{torch.cuda.device_count()}"
        )
    config = find_model(bench.model)
    head = {
        "model": bench.model,
        "parameters": sum(p.numel() for p in meta_model(config).parameters()),
        "seq_len": bench.seq_len,
        "micro_batch_size": bench.micro_batch_size,
        "accumulation": bench.accumulation,
        "precision": bench.precision,
        "repeats": bench.repeats,
        "complete": False,
        "machine": {
            "name": hardware.name,
            "device": hardware.device.type,
            "cores": os.cpu_count(),
            "torch": str(torch.__version__),
        },
    }
    rows = bench.rows()
    replies: dict[tuple[str, int], list[dict[str, Any]]] = {row: [] for row in rows}
    with progress_bar() as bar:
        task = bar.add_task("scaling", total=bench.repeats * len(rows))
        for _ in range(bench.repeats):
            for row in rows:
                bar.update(task, description=f"scaling: {row[0]}, {row[1]}")
                # What failed once fails again.
                if not any("error" in reply for reply in replies[row]):
                    replies[row].append(_measure(bench, *row, hardware))
                    on_run(head | {"rows": summarize(bench, replies)})
                bar.advance(task)
    done = head | {"complete": True, "rows": summarize(bench, replies)}
    on_run(done)
    return done


def _measure(bench: ScalingBench, engine: str, count: int, hardware: Hardware) -> dict[str, Any]:
    """Run one row's processes; what rank 0 said."""
    recipe = {
        "run": {"device": hardware.device.type},
        "data": {"dir": "-", "seq_len": bench.seq_len},
        "model": find_model(bench.model).model_dump(),
        "batch": {
            "micro_batch_size": bench.micro_batch_size,
            "gradient_accumulation_steps": bench.accumulation,
        },
        "efficiency": {"precision": bench.precision, "compile": False},
        "distributed": {} if engine == "none" else ENGINES[engine](count),
    }
    cores = os.cpu_count() or 1
    threads = max(1, cores // count) if hardware.device.type == "cpu" else torch.get_num_threads()
    request = json.dumps({"recipe": recipe, "steps": bench.steps, "threads": threads})
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    ranks: list[subprocess.Popen[str]] = []
    try:
        for rank in range(count):
            place = {
                "RANK": str(rank),
                "WORLD_SIZE": str(count),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(count),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            ranks.append(
                subprocess.Popen(
                    [sys.executable, "-P", "-m", _MODULE, request],
                    env=training_environment() | place,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    encoding="utf-8",
                    errors="replace",
                )
            )
        ends = [(process.communicate(), process.returncode) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    for (_, err), code in ends:
        if code:
            return {"error": last_words(code, err)}
    reply: dict[str, Any] = json.loads(ends[0][0][0].splitlines()[-1])
    return {"error": reply["error"]["message"]} if "error" in reply else reply


def summarize(
    bench: ScalingBench, replies: Mapping[tuple[str, int], Sequence[Mapping[str, Any]]]
) -> list[dict[str, Any]]:
    """The medians of each row.

    Returns:
        For each row its "engine", "processes", "reason" where it failed, and where it was measured
        "tokens_per_second" of all processes together, "speedup" over one process, "sharing_share":
        the part of a step that is not computing (None for one process), "peak_bytes" of each rank.
    """
    alone = [reply for reply in replies[("none", 1)] if "error" not in reply]
    result = []
    for (engine, count), runs in replies.items():
        good = [run for run in runs if "error" not in run]
        entry: dict[str, Any] = {
            "engine": engine,
            "processes": count,
            "reason": next((run["error"] for run in runs if "error" in run), ""),
        }
        if good:
            tokens = bench.tokens(engine, count)
            rates = [tokens / run["step_seconds"] for run in good]
            work = tokens / bench.tokens("none", 1)
            ratios = [
                work * one["step_seconds"] / run["step_seconds"]
                for one, run in zip(alone, good, strict=False)
            ]
            shares = [
                1 - work / count * run["alone_seconds"] / run["step_seconds"]
                for run in good
                if run["alone_seconds"] is not None
            ]
            entry |= {
                "tokens_per_second": statistics.median(rates),
                "speedup": statistics.median(ratios) if ratios else None,
                "sharing_share": statistics.median(shares) if shares else None,
                "peak_bytes": [
                    max(run["peak_bytes"][rank] for run in good) for rank in range(count)
                ],
            }
        result.append(entry)
    return result


def draw(result: Mapping[str, Any]) -> bytes:
    """Tokens per second and each rank's memory by row, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [row for row in result["rows"] if "tokens_per_second" in row]
    names = [f"{row['engine']}, {row['processes']}" for row in rows]
    figure = Figure(figsize=(11, 1.4 + 0.45 * len(rows)), layout="constrained")
    figures = (
        ("tokens/s of all processes", [row["tokens_per_second"] for row in rows]),
        ("peak memory of a process, MB", [max(row["peak_bytes"]) / 1e6 for row in rows]),
    )
    for column, (title, values) in enumerate(figures):
        axes: Any = figure.add_subplot(1, 2, column + 1)
        bars = axes.barh(names, values, color="tab:blue" if column == 0 else "tab:orange")
        axes.bar_label(bars, fmt="%.0f", padding=3)
        axes.invert_yaxis()
        axes.set(xlabel=title, xlim=(0, 1.15 * max(values, default=1)))
    machine = result["machine"]
    figure.suptitle(f"{result['model']} · {machine['name']}, {machine['cores']} cores")
    picture = io.BytesIO()
    FigureCanvasAgg(figure).print_png(picture)
    return picture.getvalue()

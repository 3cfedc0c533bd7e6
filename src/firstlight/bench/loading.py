"""`firstlight bench loading`: memory and time that each way to load a model takes.

A checkpoint with random weights is made, of the shape of Qwen2.5-0.5B (or wider or narrower), and
loaded each way in a process of its own, beside transformers' `from_pretrained`. What is measured
and how is said at the head of `load_once.py`. The file lies in the page cache, the number of
threads is the same for all, the ways take turns (A B C, A B C), and each number is the median over
the turns.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from firstlight.bench.checkpoint import LARGEST, SHARDED, SINGLE, SMALLEST, make_checkpoints
from firstlight.console import progress_bar, say
from firstlight.errors import ConfigError, ModelError, nearest
from firstlight.generation.engine import load
from firstlight.hardware.device import find_hardware
from firstlight.weights.loading import LOADING_WAYS

#: The way that `firstlight.load` takes where nobody says which.
DEFAULT_WAY: str = inspect.signature(load).parameters["way"].default

#: Whether torch takes huge pages for large tensors; off unless the person sets it.
HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"


@dataclass(frozen=True)
class Row:
    """One way to load.

    Attributes:
        name: for people and for `--ways`.
        program: "firstlight" or "transformers".
        way: firstlight's way; None is its default.
        sharded: from several files with an index.
        cast: into the other number format of float32 and bfloat16 than the file's.
        huge_pages: None is as the person has set it.
    """

    name: str
    program: str
    way: str | None = None
    sharded: bool = False
    cast: bool = False
    huge_pages: bool | None = None


ROWS = (
    *(Row(way, "firstlight", way=way) for way in LOADING_WAYS),
    Row("sharded", "firstlight", sharded=True),
    Row("cast", "firstlight", cast=True),
    Row("transformers", "transformers", huge_pages=False),
    Row("transformers-huge-pages", "transformers", huge_pages=True),
    Row("transformers-cast", "transformers", cast=True, huge_pages=False),
)


@dataclass(frozen=True)
class LoadingBench:
    """What is to be measured.

    Attributes:
        parameters: of the model, about.
        dtype: of the file: "bfloat16" or "float32".
        repeats: turns of all rows.
        ways: names of the rows; empty is all.
        transformers: whether its rows are among them.
        folder: where the checkpoint is made, kept and used again; None is a temporary folder.
    """

    parameters: int = 500_000_000
    dtype: str = "bfloat16"
    repeats: int = 3
    ways: Sequence[str] = ()
    transformers: bool = True
    folder: Path | None = None
    rows: tuple[Row, ...] = field(init=False)

    def __post_init__(self) -> None:
        """Raises ConfigError: a value is out of range, or a name unknown."""
        if not SMALLEST <= self.parameters <= LARGEST:
            raise ConfigError(
                f"{self.parameters:,} parameters are outside what this benchmark makes: "
                f"between {SMALLEST:,} and {LARGEST:,}"
            )
        if self.repeats < 1:
            raise ConfigError(f"repeats is {self.repeats}: at least 1 is needed")
        if self.dtype not in ("bfloat16", "float32"):
            raise ConfigError(f"dtype '{self.dtype}' is not one of bfloat16, float32")
        names = [row.name for row in ROWS]
        for name in self.ways:
            if name not in names:
                hint = nearest(name, names) or f": use {', '.join(names)}"
                raise ConfigError(f"way '{name}' is unknown{hint}")
        rows = [row for row in ROWS if not self.ways or row.name in self.ways]
        if not self.transformers:
            rows = [row for row in rows if row.program != "transformers"]
        if not rows:
            raise ConfigError("no way is left to measure")
        object.__setattr__(self, "rows", tuple(rows))


def bench_loading(bench: LoadingBench) -> dict[str, Any]:
    """Make the checkpoint, load it each way, and return the measurements.

    Returns:
        "checkpoint": its parameters, bytes and dtype; "machine"; "rows": for each way the median
        of what `load_once` measures, its ratios, and all its "runs".

    Raises:
        ConfigError, InputError, StorageError: the checkpoint can't be made.
        ModelError: a way failed.
    """
    rows = [row for row in bench.rows if row.program == "firstlight" or _has_transformers()]
    if len(rows) < len(bench.rows):
        say("transformers is not installed: its rows are left out")
    if not rows:
        raise ConfigError("no way is left to measure: transformers is not installed")
    with tempfile.TemporaryDirectory(prefix="firstlight-bench-") as temporary:
        folder = bench.folder or Path(temporary)
        checkpoint = make_checkpoints(
            bench.parameters, bench.dtype, folder, any(row.sharded for row in rows)
        )
        for path in sorted(folder.glob("*/*.safetensors")):
            _read_once(path)
        runs: dict[str, list[dict[str, float]]] = {row.name: [] for row in rows}
        with progress_bar() as progress:
            task = progress.add_task("loading", total=bench.repeats * len(rows))
            for _ in range(bench.repeats):
                for row in rows:
                    progress.update(task, description=f"loading: {row.name}")
                    runs[row.name].append(measure(row, folder, bench.dtype))
                    progress.advance(task)
    return {
        "checkpoint": checkpoint,
        "machine": _machine(),
        "default_way": DEFAULT_WAY,
        "repeats": bench.repeats,
        "rows": compare(rows, runs, checkpoint["file_bytes"]),
    }


def _has_transformers() -> bool:
    return importlib.util.find_spec("transformers") is not None


def _read_once(path: Path) -> None:
    """Bring a file into the page cache."""
    buffer = bytearray(1 << 24)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def measure(row: Row, folder: Path, dtype: str) -> dict[str, float]:
    """Load one way in a new process; what `load_once` says.

    Args:
        row: the way.
        folder: with the checkpoints.
        dtype: of the files.

    Raises:
        ModelError: it failed; with the last line that the process said.
    """
    other = {"bfloat16": "float32", "float32": "bfloat16"}[dtype]
    request = {
        "program": row.program,
        "folder": str((folder / (SHARDED if row.sharded else SINGLE)).resolve()),
        "way": row.way,
        "dtype": other if row.cast else None,
        "threads": torch.get_num_threads(),
    }
    pages = os.environ.get(HUGE_PAGES, "0") if row.huge_pages is None else str(int(row.huge_pages))
    done = subprocess.run(
        # -P: what lies in the current folder is not imported.
        [sys.executable, "-P", "-m", "firstlight.bench.load_once", json.dumps(request)],
        env=os.environ | {HUGE_PAGES: pages, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        end = (
            f"it was killed by signal {-done.returncode}; is there enough memory?"
            if done.returncode < 0
            else lines[-1]
            if lines
            else f"exit code {done.returncode}"
        )
        raise ModelError(f"loading by way of '{row.name}' failed: {end}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def compare(
    rows: Sequence[Row], runs: Mapping[str, Sequence[Mapping[str, float]]], file_bytes: int
) -> list[dict[str, Any]]:
    """The medians of each way and its ratios.

    Args:
        rows: the ways.
        runs: by their names, what `load_once` measured.
        file_bytes: the files' size.

    Returns:
        For each way, beside the medians: `peak_to_file` and `peak_to_model`, the peak above the
        level after the imports to the files' bytes and to the parameters'; and
        `time_to_transformers`, the time to the first logits to that of the fastest row of
        transformers that casts or doesn't as this way does (None without one).
    """
    medians = {
        name: {key: statistics.median(run[key] for run in these) for key in these[0]}
        for name, these in runs.items()
    }
    result = []
    for row in rows:
        found = medians[row.name]
        theirs = [
            medians[other.name]["first_logits_seconds"]
            for other in rows
            if other.program == "transformers" and other.cast == row.cast
        ]
        seconds = found["first_logits_seconds"]
        result.append(
            {
                **asdict(row),
                "default": row.way == DEFAULT_WAY,
                **found,
                "peak_to_file": found["peak_bytes"] / file_bytes,
                "peak_to_model": found["peak_bytes"] / found["model_bytes"],
                "time_to_transformers": seconds / min(theirs) if theirs else None,
                "runs": [dict(run) for run in runs[row.name]],
            }
        )
    return result


def _machine() -> dict[str, Any]:
    hardware = find_hardware("cpu")
    versions: dict[str, str | None] = {"torch": str(torch.__version__), "transformers": None}
    if _has_transformers():
        versions["transformers"] = importlib.metadata.version("transformers")
    return {
        "name": hardware.name,
        "memory_bytes": hardware.memory_bytes,
        "threads": torch.get_num_threads(),
        "huge_pages": os.environ.get(HUGE_PAGES, "0") == "1",
        **versions,
    }


def draw(result: Mapping[str, Any]) -> bytes:
    """A PNG of `bench_loading`'s result: time to first logits and peak memory of each way."""
    # Drawn without pyplot: no window system is looked for, no global state is left behind.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = result["rows"]
    names = [row["name"] + (" (default)" if row["default"] else "") for row in rows]
    colors = ["tab:blue" if row["program"] == "firstlight" else "tab:orange" for row in rows]
    figure = Figure(figsize=(11, 0.45 * len(rows) + 1.6), layout="constrained")
    time, memory = figure.subplots(1, 2, sharey=True)
    time.barh(names, [row["first_logits_seconds"] for row in rows], color=colors)
    time.barh(names, [row["load_seconds"] for row in rows], color="black", height=0.15)
    time.set(xlabel="seconds to first logits (black: to the loaded model)")
    memory.barh(names, [row["peak_to_model"] for row in rows], color=colors)
    memory.axvline(1.1, color="black", linestyle="--", linewidth=0.8)
    memory.set(xlabel="peak memory / the model's bytes (dashed: 1.1)")
    time.invert_yaxis()
    checkpoint = result["checkpoint"]
    figure.suptitle(f"loading {checkpoint['parameters'] / 1e6:,.0f}M parameters on the CPU")
    picture = io.BytesIO()
    FigureCanvasAgg(figure).print_png(picture)
    return picture.getvalue()

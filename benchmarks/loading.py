"""`python -m benchmarks loading`: measures memory and time of each loading mode, and of
transformers.

The benchmark creates a checkpoint with random weights in the shape of Qwen2.5-0.5B (or wider or
narrower). Each row loads it in a separate process: firstlight in one of its modes, or transformers'
`from_pretrained`. The docstring of `memory.py` describes the measurements. The file is in the page
cache, the number of threads is the same for all rows, the rows take turns (A B C, A B C), and each
number is the median over the turns.
"""

from __future__ import annotations

import inspect
import os
import re
import shutil
import statistics
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.options import LoadingBench
from benchmarks.rows import ProgramRow, chosen_rows, has_package, installed_rows, run_bench
from firstlight.bench.display import Panel, draw_panels
from firstlight.bench.rows import Found, Keep, Result, RowOutcome, require_positive
from firstlight.console import say
from firstlight.errors import ConfigError, InputError, ModelError, StorageError
from firstlight.files.atomic import new_folder, read_json, storage_errors, write_json
from firstlight.generation.engine import DTYPES, load
from firstlight.hardware.device import find_hardware, machine_facts
from firstlight.hardware.fresh_process import ask
from firstlight.models import LlamaConfig, build_model
from firstlight.weights.huggingface import CONFIG_NAME
from firstlight.weights.loading import LOADING_MODES, weights_to_save
from firstlight.weights.stored import save_weights

#: Minimum and maximum of `LoadingBench.parameters`: the range that `model_config` reaches.
SMALLEST, LARGEST = 1_500_000, 30_000_000_000

#: Names of the model folders: one file of weights, `_SHARDS` files or more, one file per tensor.
SINGLE, SHARDED, PER_TENSOR = LAYOUTS = ("single", "sharded", "per-tensor")
_SHARDS = 4

#: Default loading mode of `firstlight.load`.
DEFAULT_WAY: str = inspect.signature(load).parameters["way"].default

#: Environment variable that lets torch take huge pages for large tensors; off unless it is set.
HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"


@dataclass(frozen=True)
class LoadingRow(ProgramRow):
    """One program with its settings for loading.

    Attributes:
        way: firstlight's loading mode; None is the default.
        layout: model folder that is loaded, one of `LAYOUTS`; "sharded" and "per-tensor" have an
            index file.
        cast: True converts the weights: from bfloat16 to float32, or from float32 to bfloat16.
        huge_pages: True lets torch use huge pages, False does not; None keeps the user's setting.
    """

    way: str | None = None
    layout: str = SINGLE
    cast: bool = False
    huge_pages: bool | None = None


ROWS = (
    *(LoadingRow(way, "firstlight", way=way) for way in LOADING_MODES),
    *(LoadingRow(layout, "firstlight", layout=layout) for layout in (SHARDED, PER_TENSOR)),
    LoadingRow("per-tensor-sequential", "firstlight", way="sequential", layout=PER_TENSOR),
    LoadingRow("cast", "firstlight", cast=True),
    LoadingRow("transformers", "transformers", huge_pages=False),
    LoadingRow("transformers-huge-pages", "transformers", huge_pages=True),
    LoadingRow("transformers-cast", "transformers", cast=True, huge_pages=False),
)


def loading_rows(bench: LoadingBench) -> list[LoadingRow]:
    """Return the rows that the options choose.

    Raises:
        ConfigError: a value is out of range, a name is unknown, or no row is left.
    """
    if not SMALLEST <= bench.parameters <= LARGEST:
        raise ConfigError(
            f"{bench.parameters:,} parameters are outside the supported range of {SMALLEST:,} to "
            f"{LARGEST:,}"
        )
    require_positive(repeats=bench.repeats)
    if bench.dtype not in ("bfloat16", "float32"):
        raise ConfigError(f"dtype '{bench.dtype}' is not one of bfloat16, float32")
    chosen = chosen_rows("way", ROWS, bench.ways)
    rows = [row for row in chosen if not (bench.no_transformers and row.program != "firstlight")]
    if not rows:
        raise ConfigError("no loading mode is left to measure")
    return rows


def bench_loading(bench: LoadingBench, on_run: Keep = lambda _: None) -> Result:
    """Make the checkpoint, load it with each row, and return the measurements.

    Returns:
        "checkpoint" (see `make_checkpoints`), "machine", "default_way", "repeats", and "rows" (see
        `compare`).

    Raises:
        ConfigError: an option is invalid, or no row is left.
        InputError: the folder has another checkpoint.
        StorageError: the checkpoint can't be written.
        ModelError: loading failed.
    """
    rows = installed_rows(loading_rows(bench))
    if not rows:
        raise ConfigError("no loading mode is left to measure: transformers is not installed")
    hardware = find_hardware(bench.device)
    if hardware.device.type not in ("cpu", "cuda"):
        raise ConfigError(f"benchmarks loading runs on cpu and cuda, not on {hardware.device.type}")
    machine = {
        **machine_facts(hardware),
        "huge_pages": os.environ.get(HUGE_PAGES, "0") == "1",
        "transformers": version("transformers") if has_package("transformers") else None,
    }
    with tempfile.TemporaryDirectory(prefix="firstlight-bench-") as temporary:
        folder = bench.folder or Path(temporary)
        checkpoint = make_checkpoints(
            bench.parameters, bench.dtype, folder, {SINGLE, *(row.layout for row in rows)}
        )
        for path in sorted(folder.glob("*/*.safetensors")):
            _read_once(path)
        by_name = {row.name: row for row in rows}

        def result(outcomes: Mapping[str, RowOutcome]) -> Result:
            runs = {name: outcome.runs for name, outcome in outcomes.items() if outcome.runs}
            return {
                "checkpoint": checkpoint,
                "machine": machine,
                "default_way": DEFAULT_WAY,
                "repeats": bench.repeats,
                "rows": compare(
                    [row for row in rows if row.name in runs], runs, checkpoint["file_bytes"]
                ),
            }

        return run_bench(
            "loading",
            list(by_name),
            bench.repeats,
            lambda name: measure(by_name[name], folder, bench.dtype, machine["device"]),
            summarize=result,
            on_run=on_run,
        )


def _read_once(path: Path) -> None:
    """Read a file, so that it is in the page cache."""
    buffer = bytearray(1 << 24)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def measure(row: LoadingRow, folder: Path, dtype: str, device: str = "cpu") -> Found:
    """Load the checkpoint in a new process; returns the result of `memory.measure`.

    Args:
        row: the row.
        folder: parent of the model folders.
        dtype: number format of the files.
        device: device to load to.

    Raises:
        ModelError: loading failed.
    """
    other = {"bfloat16": "float32", "float32": "bfloat16"}[dtype]
    request = {
        "program": row.program,
        "folder": str((folder / row.layout).resolve()),
        "way": row.way,
        "device": device,
        "dtype": other if row.cast else None,
        "threads": torch.get_num_threads(),
    }
    pages = os.environ.get(HUGE_PAGES, "0") if row.huge_pages is None else str(int(row.huge_pages))
    environment = os.environ | {HUGE_PAGES: pages, "HF_HUB_OFFLINE": "1"}
    found = ask("benchmarks.memory", request, environment)
    if "error" in found:
        raise ModelError(f"loading with '{row.name}' failed: {found['error']['message']}")
    return found


def compare(
    rows: Sequence[LoadingRow],
    runs: Mapping[str, Sequence[Mapping[str, float | None]]],
    file_bytes: int,
) -> list[dict[str, Any]]:
    """Return the medians of each row and its ratios.

    Args:
        rows: the rows.
        runs: results of `memory.measure` by name of the row.
        file_bytes: bytes of the checkpoint's weights.

    Returns:
        For each row its fields, the medians of the values of `memory.measure`, and:

        - "default": True if the row has the default loading mode
        - "peak_to_file", "peak_to_model": "peak_bytes" divided by `file_bytes`, and by the bytes of
          the parameters
        - "time_to_transformers": seconds to the first logits, divided by those of the fastest row
          of transformers with the same `cast`; None without such a row
        - "runs": the results of all turns
    """
    medians = {
        name: {key: _median([run[key] for run in these]) for key in these[0]}
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


def _median(values: Sequence[float | None]) -> Any:
    """Return the median of the numbers; None without numbers, such as for GPU memory on a CPU."""
    numbers = [value for value in values if value is not None]
    return statistics.median(numbers) if numbers else None


def draw(result: Mapping[str, Any]) -> bytes:
    """Return a PNG of the result of `bench_loading`: time to the first logits and peak host memory
    of each row, and peak GPU memory if it was measured."""
    rows = result["rows"]
    names = [row["name"] + (" (default)" if row["default"] else "") for row in rows]
    colors = ["tab:blue" if row["program"] == "firstlight" else "tab:orange" for row in rows]
    time = Panel(
        "seconds to first logits (black: to the loaded model)",
        names,
        [row["first_logits_seconds"] for row in rows],
        colors=colors,
        inner=[row["load_seconds"] for row in rows],
    )
    panels = [time]
    for key, place in (("peak_bytes", "host"), ("device_peak_bytes", "GPU")):
        if all(row[key] is not None for row in rows):
            ratios = [row[key] / row["model_bytes"] for row in rows]
            title = f"peak {place} memory / the model's bytes"
            panels.append(Panel(title, names, ratios, colors=colors, line=("1.1", 1.1)))
    size = f"{result['checkpoint']['parameters'] / 1e6:,.0f}M"
    return draw_panels(f"loading {size} parameters on {result['machine']['name']}", [panels])


def parse_count(text: str) -> int:
    """Return the number in a text such as '0.5B' (500000000); K, M and B are 10^3, 10^6 and 10^9.

    Raises:
        ConfigError: the text has another form.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMB]?)", text.strip(), re.IGNORECASE | re.ASCII)
    if match is None:
        raise ConfigError(f"'{text}' is not a number of parameters: use for instance 0.5B or 2M")
    factor = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}[match[2].upper()]
    return round(float(match[1]) * factor)


def model_config(parameters: int) -> LlamaConfig:
    """Return the config of a Qwen2 model with about this number of parameters.

    For half a billion, the hidden size is 896, that of Qwen2.5-0.5B. Hidden sizes are multiples of
    128, two heads of 64; the vocabulary size is adjusted to reach the number of parameters.
    """
    width = min(range(128, 8193, 128), key=lambda C: abs(_size(C) - parameters))
    layers, intermediate, vocabulary = _proportions(width)
    rest = parameters - (_size(width) - vocabulary * width)
    return LlamaConfig(
        model_type="qwen2",
        vocab_size=max(1024, round(rest / width)),
        hidden_size=width,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=2,
        max_position_embeddings=32768,
        rope_theta=1e6,
        tie_word_embeddings=True,
    )


def _proportions(width: int) -> tuple[int, int, int]:
    """Return (layers, intermediate size, vocabulary size) for a hidden size, in proportion to
    Qwen2.5-0.5B, which has 24, 4864 and 151936 with a hidden size of 896."""
    intermediate = round(width / 896 * 4864 / 64) * 64
    return min(28, round(width / 896 * 24)), intermediate, min(151_936, 170 * width)


def _size(width: int) -> int:
    """Return the number of parameters of a model with the sizes of `_proportions`."""
    layers, intermediate, vocabulary = _proportions(width)
    attention = 2 * width * width + width + 2 * (128 * width + 128)
    return layers * (attention + 3 * width * intermediate + 2 * width) + (1 + vocabulary) * width


def make_checkpoints(
    parameters: int, dtype: str, folder: Path, layouts: Collection[str]
) -> dict[str, Any]:
    """Write the checkpoint in each layout, unless it already exists.

    Args:
        parameters: approximate number of the model's parameters.
        dtype: "bfloat16" or "float32".
        folder: parent of the model folders.
        layouts: names of `LAYOUTS`: the model folders to make.

    Returns:
        "parameters" (their number), "file_bytes" of the weights, "dtype", and "shape", the values
        of the model's config.

    Raises:
        InputError: a folder of such a name has something else.
        StorageError: the disk has too little space.
    """
    config = model_config(parameters)
    content = {**config.to_hf(), "dtype": dtype, "torch_dtype": dtype}
    with torch.device("meta"):
        model = build_model(config).to(DTYPES[dtype])
    size = sum(parameter.nbytes for parameter in model.parameters())
    paths = [folder / name for name in LAYOUTS if name in layouts]
    missing = [path for path in paths if not _is_there(path, content)]
    if missing:
        _require_space(folder, len(missing) * size)
        say(f"creating a checkpoint of {size / 1e9:.3g} GB in {folder}")
        model.to_empty(device="cpu")
        model.finish_loading()
        model.init_weights(torch.Generator().manual_seed(0))
    for path in missing:
        # With a maximum of 1 byte, each tensor exceeds it and gets a separate file.
        shard_bytes = {SINGLE: size, SHARDED: size // _SHARDS, PER_TENSOR: 1}[path.name]
        with new_folder(path) as place:
            write_json(place / CONFIG_NAME, content)
            save_weights(weights_to_save(model), place, max_shard_bytes=shard_bytes)
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "file_bytes": sum(path.stat().st_size for path in paths[0].glob("*.safetensors")),
        "dtype": dtype,
        "shape": config.model_dump(mode="json"),
    }


def _is_there(path: Path, content: Mapping[str, Any]) -> bool:
    """Return True if the folder has the checkpoint whose config.json is `content`.

    Raises:
        InputError: the folder exists, but has something else.
    """
    if not path.exists():
        return False
    if (path / CONFIG_NAME).is_file() and read_json(path / CONFIG_NAME) == content:
        return True
    raise InputError(
        f"{path} contains something other than this benchmark's checkpoint: choose another --dir "
        "or the same --parameters and --dtype"
    )


def _require_space(folder: Path, needed: int) -> None:
    """Check the free space of the folder's disk.

    Raises:
        StorageError: less than 1.05 times `needed` bytes are free.
    """
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
    if free < needed * 1.05:
        raise StorageError(
            f"the checkpoint needs {needed / 1e9:.3g} GB, but {folder} has only {free / 1e9:.3g} "
            "GB free: choose another folder with --dir or fewer --parameters"
        )

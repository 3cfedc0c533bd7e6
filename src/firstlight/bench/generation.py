"""`firstlight bench generation`: tokens per second, and how near that is to what memory allows.

A token takes at least as long as its weights take to be read. The bandwidth for that is measured in
the same run, as that of copying a large tensor (bytes read and written). Each row runs in a process
of its own, the rows take turns, and each number is the median over the turns; see
`generation_once.py` for what is timed.
"""

from __future__ import annotations

import importlib.util
import io
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from firstlight.bench.fresh_process import ask, plain_environment
from firstlight.bench.methods_rows import SMALL, find_model
from firstlight.checkpoint.checkpoint import resolve_model_folder
from firstlight.console import progress_bar, say
from firstlight.errors import ConfigError, nearest
from firstlight.files.atomic import new_folder, write_json
from firstlight.hardware.device import Hardware, find_hardware, synchronize
from firstlight.hardware.environment import for_generation
from firstlight.models import ModelConfig, empty_model
from firstlight.models.accounting import meta_model
from firstlight.weights.huggingface import CONFIG_NAME, read_config
from firstlight.weights.loading import embedding_name, weights_to_save
from firstlight.weights.stored import save_weights

#: To its tokens per second all others are compared.
REFERENCE = "transformers-bf16"

_COPY_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Row:
    """One program with its settings.

    Attributes:
        name: for people and for `--rows`.
        program: "firstlight" or "transformers".
        dtype: of the weights.
        compile: see `firstlight.generation.compiled`.
    """

    name: str
    program: str
    dtype: str
    compile: bool = False


ROWS = (
    Row("transformers-fp32", "transformers", "float32"),
    Row(REFERENCE, "transformers", "bfloat16"),
    Row("fp32", "firstlight", "float32"),
    Row("bf16", "firstlight", "bfloat16"),
    Row("int8", "firstlight", "int8"),
    Row("fp32-compiled", "firstlight", "float32", compile=True),
    Row("bf16-compiled", "firstlight", "bfloat16", compile=True),
    Row("int8-compiled", "firstlight", "int8", compile=True),
)


@dataclass(frozen=True)
class GenerationBench:
    """What is to be measured.

    Attributes:
        model: a name as for `bench methods`, which gets random weights, or a model folder.
        batch_sizes: texts at a time.
        prompt_tokens, new_tokens: of each text.
        repeats: turns of all rows.
        rows: names; empty is all.
        device: "auto", "cpu", "cuda", ...
        quick: few tokens, one turn, and nothing is compiled unless named.
    """

    model: str | None = None
    batch_sizes: Sequence[int] = (1, 8)
    prompt_tokens: int | None = None
    new_tokens: int | None = None
    repeats: int | None = None
    rows: Sequence[str] = ()
    device: str = "auto"
    quick: bool = False
    chosen: tuple[Row, ...] = field(init=False)

    def __post_init__(self) -> None:
        """Raises ConfigError: a value is out of range, or a name unknown."""
        defaults = (
            ("model", SMALL if self.quick else "gpt2-124m"),
            ("prompt_tokens", 32 if self.quick else 128),
            ("new_tokens", 16 if self.quick else 64),
            ("repeats", 1 if self.quick else 3),
        )
        for name, value in defaults:
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        for name, least in (("prompt_tokens", 1), ("new_tokens", 2), ("repeats", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}: at least {least} is needed")
        if not self.batch_sizes or min(self.batch_sizes) < 1:
            raise ConfigError("batch sizes must be at least 1")
        names = [row.name for row in ROWS]
        for name in self.rows:
            if name not in names:
                hint = nearest(name, names) or f": use {', '.join(names)}"
                raise ConfigError(f"row '{name}' is unknown{hint}")
        rows = [row for row in ROWS if row.name in (self.rows or names)]
        if self.quick and not self.rows:
            rows = [row for row in rows if not row.compile]
        object.__setattr__(self, "chosen", tuple(rows))


def bench_generation(
    bench: GenerationBench, on_run: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Measure all rows.

    Args:
        bench: what.
        on_run: called with the result so far after every turn of a row, so that an interruption
            leaves it.

    Returns:
        "model", "parameters", "prompt_tokens", "new_tokens", "repeats", "machine" with its
        "copy_bytes_per_second", "complete", and "rows": see `summarize`.

    Raises:
        ConfigError: the prompt and the new tokens don't fit the model's context.
        ModelError, InputError, StorageError: there is no model, or the disk refused.
    """
    hardware, own = find_hardware(bench.device), for_generation()
    rows = [row for row in bench.chosen if row.program == "firstlight" or _has_transformers()]
    if len(rows) < len(bench.chosen):
        say("transformers is not installed: its rows are left out")
    with (
        tempfile.TemporaryDirectory(prefix="firstlight-bench-") as temporary,
        progress_bar() as bar,
    ):
        folder, config = _model_folder(bench, Path(temporary))
        head = _head(bench, hardware, config)
        head["machine"]["environment"] = own
        replies: dict[str, list[dict[str, Any]]] = {row.name: [] for row in rows}
        task = bar.add_task("generation", total=(bench.repeats or 1) * len(rows))
        for _ in range(bench.repeats or 1):
            for row in rows:
                bar.update(task, description=f"generation: {row.name}")
                found = copy_rate(hardware.device)
                rate = max(head["machine"]["copy_bytes_per_second"], found)
                head["machine"]["copy_bytes_per_second"] = rate
                # What failed once fails again.
                if not any("error" in reply for reply in replies[row.name]):
                    request = _request(bench, row, folder, hardware, config)
                    replies[row.name].append(_measure(row, request, Path(temporary), own))
                    on_run(head | {"rows": summarize(rows, replies, head, config)})
                bar.advance(task)
    done = head | {"complete": True, "rows": summarize(rows, replies, head, config)}
    on_run(done)
    return done


def _has_transformers() -> bool:
    return importlib.util.find_spec("transformers") is not None


def _model_folder(bench: GenerationBench, temporary: Path) -> tuple[Path, ModelConfig]:
    """Where the model lies, and its config; one with random weights is made for a name."""
    assert bench.model is not None
    if Path(bench.model).exists():
        folder = resolve_model_folder(bench.model)
        config = read_config(folder)
    else:
        config = find_model(bench.model)
        folder = temporary / "model"
        model = empty_model(config)
        model.init_weights(torch.Generator().manual_seed(0))
        with new_folder(folder) as place:
            write_json(place / CONFIG_NAME, {**config.to_hf(), "dtype": "float32"})
            save_weights(weights_to_save(model), place, max_shard_bytes=2**34)
    needed = (bench.prompt_tokens or 0) + (bench.new_tokens or 0)
    if needed > config.max_position_embeddings:
        raise ConfigError(
            f"{bench.prompt_tokens} tokens of prompt and {bench.new_tokens} new ones don't fit the "
            f"model's context of {config.max_position_embeddings}"
        )
    return folder, config


def _head(bench: GenerationBench, hardware: Hardware, config: ModelConfig) -> dict[str, Any]:
    return {
        "model": bench.model,
        "parameters": sum(p.numel() for p in meta_model(config).parameters()),
        "prompt_tokens": bench.prompt_tokens,
        "new_tokens": bench.new_tokens,
        "repeats": bench.repeats,
        "complete": False,
        "machine": {
            "name": hardware.name,
            "device": str(hardware.device),
            "threads": torch.get_num_threads(),
            "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
            "torch": str(torch.__version__),
            "copy_bytes_per_second": 0.0,
        },
    }


def copy_rate(device: torch.device) -> float:
    """Bytes read and written a second in copying a tensor larger than the caches; best of five."""
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source).copy_(source)
    best = 0.0
    for _ in range(5):
        synchronize(device)
        start = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        best = max(best, 2 * _COPY_BYTES / (time.perf_counter() - start))
    return best


def _request(
    bench: GenerationBench, row: Row, folder: Path, hardware: Hardware, config: ModelConfig
) -> dict[str, Any]:
    return {
        "program": row.program,
        "folder": str(folder),
        "dtype": row.dtype,
        "compile": row.compile,
        "device": str(hardware.device),
        "batch_sizes": list(bench.batch_sizes),
        "prompt_tokens": bench.prompt_tokens,
        "new_tokens": bench.new_tokens,
        "times": 1 if bench.quick else 3,
        "threads": torch.get_num_threads(),
        "vocab_size": config.vocab_size,
    }


def _measure(
    row: Row, request: Mapping[str, Any], temporary: Path, own: Mapping[str, str]
) -> dict[str, Any]:
    """Run a row once; `own` is what `firstlight generate` would have in its environment."""
    environment = plain_environment()
    if row.program == "firstlight":
        environment = dict(own) | environment
    # The first turn compiles, whatever was compiled before.
    environment |= {"TORCHINDUCTOR_CACHE_DIR": str(temporary / "caches"), "HF_HUB_OFFLINE": "1"}
    return ask("firstlight.bench.generation_once", request, environment)


def bytes_per_token(config: ModelConfig, dtype: str) -> int | None:
    """Bytes of weights that are read for one step of decoding: all but the tables in which
    tokens and positions are looked up. None where only some experts are visited."""
    if config.expert_count:
        return None
    model = meta_model(config)
    looked_up = {"transformer.wpe.weight"}
    if not config.tie_word_embeddings:
        looked_up.add(embedding_name(model))
    total = 0
    for name, parameter in model.named_parameters():
        rounded = dtype == "int8" and parameter.dim() == 2
        kept = torch.bfloat16 if dtype == "int8" else getattr(torch, dtype)
        if name not in looked_up:
            total += parameter.numel() * (1 if rounded else kept.itemsize)
    return total


def summarize(
    rows: Sequence[Row],
    replies: Mapping[str, Sequence[Mapping[str, Any]]],
    head: Mapping[str, Any],
    config: ModelConfig,
) -> list[dict[str, Any]]:
    """The medians of each row.

    Returns:
        For each row its "name", "program", "dtype", "compile", "reason" where it failed, and
        where it was measured "load_seconds", "peak_bytes", "weight_bytes" and "batches": for each
        batch size "tokens_per_second" with "_min" and "_max" over the turns' medians,
        "first_token_seconds", "warm_up_seconds" of the first turn, "speed_ratio" to transformers
        in bf16 in the same turns, "share_of_limit", and the "token_ids" of the first text.
    """
    base = [reply for reply in replies.get(REFERENCE, ()) if "error" not in reply]
    result = []
    for row in rows:
        runs = [reply for reply in replies[row.name] if "error" not in reply]
        problem = next((r["error"]["message"] for r in replies[row.name] if "error" in r), "")
        entry: dict[str, Any] = {
            "name": row.name,
            "program": row.program,
            "dtype": row.dtype,
            "compile": row.compile,
            "reason": problem,
            "weight_bytes": bytes_per_token(config, row.dtype),
            "batches": [],
        }
        if runs:
            entry["load_seconds"] = statistics.median(run["load_seconds"] for run in runs)
            entry["peak_bytes"] = max(run["peak_bytes"] for run in runs)
            entry["batches"] = [
                _batch_summary(number, runs, base, entry["weight_bytes"], head)
                for number in range(len(runs[0]["batches"]))
            ]
        result.append(entry)
    return result


def _batch_summary(
    number: int,
    runs: Sequence[Mapping[str, Any]],
    base: Sequence[Mapping[str, Any]],
    weight_bytes: int | None,
    head: Mapping[str, Any],
) -> dict[str, Any]:
    def rates(replies: Sequence[Mapping[str, Any]]) -> list[float]:
        return [statistics.median(r["batches"][number]["tokens_per_second"]) for r in replies]

    own, size = rates(runs), runs[0]["batches"][number]["batch_size"]
    pairs = list(zip(own, rates(base), strict=False))
    rate = statistics.median(own)
    limit = head["machine"]["copy_bytes_per_second"]
    return {
        "batch_size": size,
        "tokens_per_second": rate,
        "tokens_per_second_min": min(own),
        "tokens_per_second_max": max(own),
        "first_token_seconds": statistics.median(
            s for run in runs for s in run["batches"][number]["first_token_seconds"]
        ),
        "warm_up_seconds": runs[0]["batches"][number]["warm_up_seconds"],
        "speed_ratio": statistics.median(a / b for a, b in pairs) if pairs else None,
        "share_of_limit": None if weight_bytes is None else rate / size * weight_bytes / limit,
        "token_ids": runs[0]["batches"][number]["token_ids"],
    }


def draw(result: Mapping[str, Any]) -> bytes:
    """Tokens per second of each row by batch size, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [row for row in result["rows"] if row["batches"]]
    sizes = [batch["batch_size"] for batch in rows[0]["batches"]] if rows else []
    figure = Figure(figsize=(11, 1.2 + 0.5 * len(rows)), layout="constrained")
    for column, size in enumerate(sizes):
        axes: Any = figure.add_subplot(1, len(sizes), column + 1)
        values = [row["batches"][column]["tokens_per_second"] for row in rows]
        colors = ["tab:gray" if r["program"] == "transformers" else "tab:blue" for r in rows]
        bars = axes.barh([row["name"] for row in rows], values, color=colors)
        axes.bar_label(bars, fmt="%.0f", padding=3)
        axes.invert_yaxis()
        axes.set(xlabel="tokens/s", xlim=(0, 1.15 * max(values)))
        axes.set_title(f"{size} text{'s' * (size > 1)} at a time", fontsize="medium")
    machine = result["machine"]
    figure.suptitle(f"{result['model']} · {machine['name']}, {machine['threads']} threads")
    picture = io.BytesIO()
    FigureCanvasAgg(figure).print_png(picture)
    return picture.getvalue()

"""Speed predicted beside speed measured, on this machine: a part of `firstlight bench planner`.

Each configuration has a process of its own, which predicts and trains in turns
(`planner_speed_once`), so that how fast the machine is in one minute and in the next falls on both.
What is compared are the medians of the predictions and of the steps.

Three errors are given for each. One is against the steps' time on the clock, which is what a person
waits for. The other is against what the thread that starts the operators worked: on a machine that
other programs use too, the first says more about those than about the prediction. The third is the
first prediction's alone, against the clock: what a plan is right by that is made once.
"""

from __future__ import annotations

import io
import math
import os
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from firstlight.bench.fresh_process import ask, training_environment
from firstlight.bench.methods_data import write_tokens
from firstlight.bench.methods_rows import find_model
from firstlight.console import progress_bar
from firstlight.errors import ConfigError, TrainingError
from firstlight.hardware.device import find_hardware
from firstlight.models import ModelConfig
from firstlight.recipe import parse_recipe

#: Predictions are to be within this at the 95th percentile.
GOAL = 0.15
WARMUP_STEPS = 3
_MODULE = "firstlight.bench.planner_speed_once"


@dataclass(frozen=True)
class SpeedCase:
    """One configuration.

    Attributes:
        model: a name of `methods_rows.MODELS`, or of `_MODELS` here.
        seq_len, rows: of a micro-batch.
        efficiency, optimizer, batch: further keys of those sections of the recipe.
    """

    model: str
    seq_len: int
    rows: int
    efficiency: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    batch: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """For people; no two of a grid have the same."""
        keys = {**self.efficiency, **self.optimizer, **self.batch}
        said = " ".join(f"{key}={value}" for key, value in keys.items())
        return f"{self.model} {self.rows}x{self.seq_len} {said}".strip()

    @property
    def passes(self) -> int:
        """Micro-batches of a step."""
        found: int = self.batch.get("gradient_accumulation_steps", 1)
        return found

    def recipe(self) -> dict[str, Any]:
        """Its values."""
        return {
            "run": {"device": "cpu"},
            "model": self.config().model_dump(),
            "data": {"dir": "-", "seq_len": self.seq_len},
            "batch": {"micro_batch_size": self.rows, **self.batch},
            "optimizer": dict(self.optimizer),
            "efficiency": {"precision": "fp32", "compile": False, **self.efficiency},
        }

    def config(self) -> ModelConfig:
        """The model's."""
        if self.model not in _MODELS:
            return find_model(self.model)
        values = {"data": {"dir": "-"}, "model": _MODELS[self.model]}
        found = parse_recipe(values, f"model {self.model}").model
        assert found is not None
        return found


#: Widths that `methods_rows.MODELS` lacks.
_MODELS: dict[str, dict[str, Any]] = {
    "gpt2-384": {
        "model_type": "gpt2",
        "vocab_size": 8192,
        "hidden_size": 384,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "max_position_embeddings": 2048,
    },
    "llama-384": {
        "model_type": "llama",
        "vocab_size": 8192,
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    },
    "llama-512": {
        "model_type": "llama",
        "vocab_size": 32000,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    },
}


def speed_grid() -> tuple[SpeedCase, ...]:
    """The configurations: widths, lengths, batches, number formats, and methods."""
    bf16 = {"precision": "bf16"}
    full = {"activation_checkpointing": "full"}
    return (
        SpeedCase("small", 256, 4),
        SpeedCase("small", 128, 8, bf16),
        SpeedCase("small", 1024, 1, full),
        SpeedCase("small", 512, 2, {"loss_chunk_tokens": 256}),
        SpeedCase("small", 256, 4, optimizer={"name": "adamw8bit"}),
        SpeedCase("small", 256, 2, batch={"gradient_accumulation_steps": 4}),
        SpeedCase("gpt2-384", 2048, 1),
        SpeedCase("gpt2-384", 512, 4, bf16),
        SpeedCase("gpt2-384", 1024, 2, full),
        SpeedCase("gpt2-384", 256, 2, optimizer={"name": "muon"}),
        SpeedCase("llama-384", 128, 1),
        SpeedCase("llama-384", 2048, 1, full),
        SpeedCase("llama-384", 512, 4),
        SpeedCase("llama-384", 1024, 1, bf16),
        SpeedCase("llama-512", 256, 2),
        SpeedCase("llama-512", 512, 1, {"precision": "bf16_params"}),
        SpeedCase("llama-110m", 256, 1),
        SpeedCase("gpt2-124m", 256, 1),
        SpeedCase("small", 256, 4, {"compile": True}),
        SpeedCase("llama-384", 512, 2, {"compile": True}),
    )


def bench_speed(
    cases: Sequence[SpeedCase] | None = None,
    *,
    steps: int = 4,
    turns: int = 3,
    seconds: float = 4.0,
    calibrate_seconds: float = 60.0,
    folder: Path | None = None,
    on_row: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Predict and measure each configuration.

    Args:
        cases: None is `speed_grid()`.
        steps: timed steps of each turn.
        turns: of predicting and training.
        seconds: of measuring operators before each prediction.
        calibrate_seconds: before all; 0 leaves it out.
        folder: of the calibration; None is a temporary one, as on a machine that has none.
        on_row: called with the result so far after each configuration.

    Returns:
        What `summarize_speed` gives, and "machine" and "complete".

    Raises:
        InputError: there is nothing to train on.
        StorageError: the disk refused.
        TrainingError: the calibration failed.
    """
    cases = speed_grid() if cases is None else cases
    environment = training_environment()
    rows: list[dict[str, Any]] = []
    machine = _machine()
    with (
        tempfile.TemporaryDirectory(prefix="firstlight-bench-") as temporary,
        progress_bar() as bar,
    ):
        shared = {
            "calibration": str(folder or Path(temporary) / "calibration"),
            "threads": torch.get_num_threads(),
        }
        task = bar.add_task("calibrating", total=len(cases))
        if calibrate_seconds:
            filled = ask(_MODULE, {**shared, "calibrate": calibrate_seconds}, environment)
            if "error" in filled:
                raise TrainingError(f"calibrating failed: {filled['error']['message']}")
        for number, case in enumerate(cases):
            bar.update(task, description=case.name)
            request = {**shared, **_request(case, Path(temporary), steps, turns, seconds)}
            rows.append(row_of(case, ask(_MODULE, request, environment)))
            bar.advance(task)
            complete = number == len(cases) - 1
            result = {**summarize_speed(rows), "machine": machine, "complete": complete}
            if on_row is not None:
                on_row(result)
    return {**summarize_speed(rows), "machine": machine, "complete": True}


def _machine() -> dict[str, Any]:
    hardware = find_hardware("cpu")
    return {
        "name": hardware.name,
        "threads": torch.get_num_threads(),
        "cpus": os.cpu_count(),
        "torch": str(torch.__version__),
    }


def _request(
    case: SpeedCase, folder: Path, steps: int, turns: int, seconds: float
) -> dict[str, Any]:
    values = case.recipe()
    count = (WARMUP_STEPS + (steps + 1) * turns) * case.passes * case.rows * case.seq_len + 1
    write_tokens(folder / "tokens.safetensors", count, case.config().vocab_size)
    return {
        "recipe": values,
        "data": str(folder / "tokens.safetensors"),
        "warmup_steps": WARMUP_STEPS,
        "steps": steps,
        "turns": turns,
        "seconds": seconds,
    }


def row_of(case: SpeedCase, found: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the result.

    Args:
        found: what `planner_speed_once` said.

    Returns:
        "name"; "problem" where it went wrong; else seconds of a step: "measured" (the median),
        "worked" (of this thread, the median), "predicted" (the median) and "first" of that; "error"
        of the prediction against what was measured, "error_worked" against what was worked,
        "error_first" of the first prediction against what was measured (positive is too slow);
        "in_range", whether what was worked lies in a predicted range; and what was found.
    """
    if "error" in found:
        return {"name": case.name, "problem": found["error"]["message"]}
    measured = statistics.median(found["step_seconds"])
    worked = statistics.median(found["thread_seconds"])
    ranges = [one["step_seconds"] for one in found["predictions"]]
    predicted = statistics.median(one["expected"] for one in ranges)
    first = ranges[0]["expected"]
    return {
        "name": case.name,
        "problem": "",
        "tokens_a_step": case.rows
        * case.seq_len
        * case.batch.get("gradient_accumulation_steps", 1),
        "measured": measured,
        "worked": worked,
        "predicted": predicted,
        "first": first,
        "error": predicted / measured - 1,
        "error_worked": predicted / worked - 1,
        "error_first": first / measured - 1,
        "in_range": any(one["low"] <= worked <= one["high"] for one in ranges),
        **found,
    }


def summarize_speed(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The errors of all rows together.

    Returns:
        "rows"; "goal"; for each of "error", "error_worked" and "error_first" under "p95" the 95th
        percentile of its size and under "median" the median; "worst", the names of the three rows
        that are furthest off; "waited", the median share of the clock that the steps did not work;
        "failed", how many rows have a problem.
    """
    good = [row for row in rows if not row["problem"]]
    names = ("error", "error_worked", "error_first")
    sizes = {name: sorted(abs(row[name]) for row in good) for name in names}
    ranked = sorted(good, key=lambda row: -abs(row["error"]))
    return {
        "rows": list(rows),
        "goal": GOAL,
        "p95": {name: percentile(found, 0.95) for name, found in sizes.items() if found},
        "median": {name: statistics.median(found) for name, found in sizes.items() if found},
        "worst": [row["name"] for row in ranked[:3]],
        "waited": statistics.median(1 - row["worked"] / row["measured"] for row in good)
        if good
        else 0.0,
        "failed": len(rows) - len(good),
    }


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that so large a share of the values does not exceed.

    Raises:
        ConfigError: there are no values.
    """
    if not ordered:
        raise ConfigError("a percentile of no values: nothing was measured")
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def draw_speed(result: Mapping[str, Any]) -> bytes:
    """A PNG of `bench_speed`'s result: tokens/s predicted against measured, with the predicted
    range, and the band of the goal."""
    # Drawn without pyplot: no window system is looked for, no global state is left behind.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [row for row in result["rows"] if not row["problem"]]
    figure = Figure(figsize=(7, 6.5), layout="constrained")
    axes: Any = figure.subplots()
    for key, color, label in (
        ("worked", "tab:blue", "of the thread's own time"),
        ("measured", "tab:orange", "of the time on the clock"),
    ):
        x = [row["tokens_a_step"] / row[key] for row in rows]
        y = [row["tokens_a_step"] / row["predicted"] for row in rows]
        axes.scatter(x, y, s=18, color=color, label=label)
    _draw_band(axes, rows, result["goal"])
    axes.set(xscale="log", yscale="log", xlabel="measured, tokens/s", ylabel="predicted, tokens/s")
    axes.legend(loc="upper left", fontsize="small")
    axes.set_title(result["machine"]["name"], fontsize="medium", parse_math=False)
    picture = io.BytesIO()
    FigureCanvasAgg(figure).print_png(picture)
    return picture.getvalue()


def _draw_band(axes: Any, rows: Sequence[Mapping[str, Any]], goal: float) -> None:
    rates = [row["tokens_a_step"] / row[key] for row in rows for key in ("measured", "predicted")]
    ends = [min(rates, default=1.0) / 1.3, max(rates, default=10.0) * 1.3]
    axes.plot(ends, ends, color="black", linewidth=0.8)
    low, high = ([end / (1 + sign * goal) for end in ends] for sign in (1, -1))
    axes.fill_between(ends, low, high, color="tab:green", alpha=0.15, label=f"within {goal:.0%}")

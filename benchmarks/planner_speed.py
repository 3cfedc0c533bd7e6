"""Predicted and measured speed of training on this machine: a part of `benchmarks planner`.

Each configuration has a separate process that alternately predicts and trains, so that changes in
the machine's speed affect both. The medians of the predictions and of the steps are compared.

Each configuration has three errors:

- `error`: the median prediction against the wall-clock time of the steps.
- `error_worked`: the median prediction against the processor time of the thread that starts the
  operators. On a machine shared with other programs, `error` depends more on those programs than on
  the prediction.
- `error_first`: the first prediction alone against the wall-clock time, which is the error of a
  single plan.
"""

from __future__ import annotations

import importlib
import itertools
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.models import PlannerCase
from benchmarks.rows import run_bench
from firstlight.bench.display import new_figure, png_of
from firstlight.bench.models import config_of
from firstlight.bench.rows import Found, Keep, RowOutcome
from firstlight.bench.steps import Tokens, write_tokens
from firstlight.errors import ConfigError
from firstlight.hardware.device import find_hardware, machine_facts
from firstlight.hardware.fresh_process import ask, training_environment
from firstlight.models import empty_model
from firstlight.planner.speed.throughput import SpeedPrediction, time_step, timed_speed
from firstlight.recipe import ResolvedRecipe, parse_resolved_recipe
from firstlight.training.program import TrainingProgram

#: Goal for the 95th percentile of the predictions' relative errors.
GOAL = 0.15
#: Untimed steps at the start of each turn.
WARMUP_STEPS = 1
_MODULE = "benchmarks.planner_speed"


def speed_case(model: str, seq_len: int, rows: int, **changes: Any) -> PlannerCase:
    """Return a configuration of the benchmark.

    Args:
        model: name of a model, see `model_values`.
        seq_len: tokens of a sequence.
        rows: sequences of a micro-batch.
        changes: values of the recipe, with each key `section.key` written as `section__key`.
    """
    keys = {name.replace("__", "."): value for name, value in changes.items()}
    said = " ".join(f"{name.partition('.')[2]}={value}" for name, value in keys.items())
    return PlannerCase(model, rows, seq_len, keys, title=f"{model} {rows}x{seq_len} {said}".strip())


def speed_grid() -> tuple[PlannerCase, ...]:
    """Return the configurations: widths, lengths, batches, number formats, and methods. The last
    four take so long that less than one step is timed."""
    bf16 = {"efficiency__precision": "bf16"}
    return (
        speed_case("small", 256, 4),
        speed_case("small", 128, 8, **bf16),
        speed_case("small", 512, 2, efficiency__loss_chunk_tokens=256),
        speed_case("gpt2-384", 256, 2, optimizer__name="muon"),
        speed_case("llama-384", 1024, 1, efficiency__activation_checkpointing="full"),
        speed_case("llama-512", 512, 1, efficiency__precision="bf16_params"),
        speed_case("small", 256, 2, batch__gradient_accumulation_steps=4),
        speed_case("llama-110m", 256, 4),
        speed_case("gpt2-124m", 512, 2, **bf16),
        speed_case("gpt2-124m", 256, 2),
    )


def bench_speed(
    cases: Sequence[PlannerCase], on_row: Keep, *, steps: int = 2, turns: int = 3
) -> dict[str, Any]:
    """Predict and measure each configuration.

    Args:
        cases: the configurations.
        on_row: called with the result so far after each configuration.
        steps: timed steps of each turn.
        turns: number of predictions of each configuration, each with its own steps.

    Returns:
        The result of `summarize_speed`, and "machine" and "complete".

    Raises:
        InputError: this Python has no source of its standard library to train on.
        StorageError: a file system error.
    """
    environment, machine = training_environment(), machine_facts(find_hardware("cpu"))
    by_name = {case.name: case for case in cases}
    with tempfile.TemporaryDirectory(prefix="firstlight-bench-") as temporary:
        tokens = Path(temporary) / "tokens.safetensors"
        shared: dict[str, Any] = {"data": str(tokens), "threads": torch.get_num_threads()}
        shared |= {"steps": steps, "turns": turns}

        def measure(name: str) -> Found:
            case, recipe = by_name[name], by_name[name].recipe()
            count = (WARMUP_STEPS + steps) * turns * case.accumulation * case.rows * case.tokens
            write_tokens(tokens, count + 1, config_of(recipe["model"]).vocab_size)
            return ask(_MODULE, {**shared, "recipe": recipe}, environment)

        def result(outcomes: Mapping[str, RowOutcome]) -> dict[str, Any]:
            rows = [row_of(by_name[name], one) for name, one in outcomes.items() if one.is_done]
            return {**summarize_speed(rows), "machine": machine}

        return run_bench("speed", list(by_name), 1, measure, summarize=result, on_run=on_row)


def row_of(case: PlannerCase, outcome: RowOutcome) -> dict[str, Any]:
    """Return a configuration's row of the result.

    Returns:
        "name" and "problem" (the error message; "" if it was measured). Without a problem also:

        - "tokens_a_step": tokens of an optimizer step
        - "measured": median wall-clock seconds of a step
        - "worked": median processor seconds of a step, of the thread that starts the operators
        - "predicted": median of the predicted seconds of a step; "first": the first prediction
        - "error" = predicted / measured - 1, "error_worked" = predicted / worked - 1, "error_first"
          = first / measured - 1: positive if the prediction is too slow
        - "in_range": True if "worked" is in the range of at least one prediction
        - the values that `measure` returns
    """
    if outcome.problem:
        return {"name": case.name, "problem": outcome.problem}
    found = outcome.runs[0]
    measured = statistics.median(found["step_seconds"])
    worked = statistics.median(found["thread_seconds"])
    ranges = [one["step_seconds"] for one in found["predictions"]]
    predicted = statistics.median(one["expected"] for one in ranges)
    first = ranges[0]["expected"]
    return {
        "name": case.name,
        "problem": "",
        "tokens_a_step": case.rows * case.tokens * case.accumulation,
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
    """Return the errors of all rows together.

    Returns:
        - "rows": the rows of `row_of`; "goal": `GOAL`
        - "p95", "median": percentile and median of the absolute values of each error, by its name
          ("error", "error_worked", "error_first")
        - "worst": the names of the three rows with the largest absolute "error"
        - "waited": the median fraction of a step's wall-clock time in which its thread did not work
        - "failed": number of rows with a problem
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
    """Return the smallest value that at least the fraction `share` of the values does not exceed.

    Args:
        ordered: values in ascending order.
        share: fraction of the values, 0 to 1: 0.95 for the 95th percentile.

    Raises:
        ConfigError: there are no values.
    """
    if not ordered:
        raise ConfigError("there are no values for a percentile: nothing was measured")
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def draw_speed(result: Mapping[str, Any]) -> bytes:
    """Return a PNG of the result of `bench_speed`: predicted against measured tokens/s, and the
    band within the goal."""
    rows = [row for row in result["rows"] if not row["problem"]]
    figure = new_figure(7, 6.5)
    axes: Any = figure.subplots()
    for key, color, label in (
        ("worked", "tab:blue", "of the thread's processor time"),
        ("measured", "tab:orange", "of the wall-clock time"),
    ):
        x = [row["tokens_a_step"] / row[key] for row in rows]
        y = [row["tokens_a_step"] / row["predicted"] for row in rows]
        axes.scatter(x, y, s=18, color=color, label=label)
    _draw_band(axes, rows, result["goal"])
    axes.set(xscale="log", yscale="log", xlabel="measured, tokens/s", ylabel="predicted, tokens/s")
    axes.legend(loc="upper left", fontsize="small")
    axes.set_title(result["machine"]["name"], fontsize="medium", parse_math=False)
    return png_of(figure)


def _draw_band(axes: Any, rows: Sequence[Mapping[str, Any]], goal: float) -> None:
    rates = [row["tokens_a_step"] / row[key] for row in rows for key in ("measured", "predicted")]
    ends = [min(rates, default=1.0) / 1.3, max(rates, default=10.0) * 1.3]
    axes.plot(ends, ends, color="black", linewidth=0.8)
    low, high = ([end / (1 + sign * goal) for end in ends] for sign in (1, -1))
    axes.fill_between(ends, low, high, color="tab:green", alpha=0.15, label=f"within {goal:.0%}")


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Predict the seconds of one recipe's step and train for some steps, in turns.

    Args:
        request: JSON object with these keys:

            - "recipe": values of a recipe without open keys
            - "data": file of `firstlight.bench.steps.write_tokens`
            - "steps": timed steps of each turn, which begins with untimed ones
            - "turns", "threads": number of turns, and threads of torch

    Returns:
        - "plan_seconds": time of the first prediction
        - "predictions": `SpeedPrediction.to_json` of each turn
        - "step_seconds": wall-clock seconds of each timed step
        - "thread_seconds": processor seconds of the thread that starts the operators, for each
          timed step; during the rest of the step it waited, or other programs ran

    Raises:
        FirstlightError: the recipe is invalid.
    """
    torch.set_num_threads(request["threads"])
    recipe, hardware = parse_resolved_recipe(request["recipe"]), find_hardware("cpu")
    importlib.import_module("torch._dynamo")  # torch's optimizers import it in their first step
    step = _steps(recipe, request)
    predictions: list[SpeedPrediction] = []
    plans: list[float] = []
    walls: list[float] = []
    threads: list[float] = []
    for _ in range(request["turns"]):
        start = time.perf_counter()
        predictions.append(timed_speed(recipe, time_step(recipe, hardware)))
        plans.append(time.perf_counter() - start)
        # The prediction has filled the processor's caches and the allocator's memory.
        for number in range(WARMUP_STEPS + request["steps"]):
            wall, thread = step()
            if number >= WARMUP_STEPS:
                walls.append(wall)
                threads.append(thread)
    return {
        "plan_seconds": plans[0],
        "predictions": [one.to_json() for one in predictions],
        "step_seconds": walls,
        "thread_seconds": threads,
    }


def _steps(recipe: ResolvedRecipe, request: dict[str, Any]) -> Callable[[], tuple[float, float]]:
    """Return a function that trains one step and returns its wall-clock seconds, and the processor
    seconds of this thread."""
    tokens = Tokens(Path(request["data"]), recipe.data.seq_len)
    torch.manual_seed(recipe.run.seed)
    model = empty_model(recipe.model, recipe.efficiency.vocab_multiple)
    model.init_weights(torch.Generator().manual_seed(recipe.run.seed))
    program = TrainingProgram(recipe, model, find_hardware("cpu"))
    rows = recipe.batch.rows
    passes = recipe.batch.accumulation(recipe.data.seq_len)
    numbers = itertools.count()

    def step() -> tuple[float, float]:
        first = next(numbers) * passes
        batches = [tokens.batch((first + i) * rows, rows, False) for i in range(passes)]
        wall, thread = time.perf_counter(), time.thread_time()
        program.step(batches, lr_scale=1.0)
        return time.perf_counter() - wall, time.thread_time() - thread

    return step

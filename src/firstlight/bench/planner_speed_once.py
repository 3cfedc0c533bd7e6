"""Predict the speed of one recipe's step and train it for some, in turns, in a process of its own.

    python -m firstlight.bench.planner_speed_once REQUEST

REQUEST is a JSON object:

    recipe        a recipe's values, with its model and data.seq_len
    data          a file of `methods_data.write_tokens`
    calibration   a folder for what was measured of operators
    warmup_steps  steps that are not timed
    steps         steps that are, in each turn
    turns         of predicting and training
    threads       for torch
    seconds       of measuring operators, before the first prediction; half of it before the others

or, to fill the calibration: calibrate (seconds), calibration, threads.

The one line on stdout is a JSON object:

    plan_seconds     tracing, measuring and predicting before the first step
    predictions      `SpeedPrediction.to_json` of each turn
    step_seconds     of each timed step
    thread_seconds   of those, what the thread that starts the operators worked: what is missing
                     went to other programs, or was waited for
    or {"error": {"type", "message"}} where firstlight refuses the recipe
"""

from __future__ import annotations

import importlib
import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from firstlight.bench.fresh_process import answer
from firstlight.bench.methods_data import Tokens
from firstlight.hardware.device import find_hardware
from firstlight.models import empty_model
from firstlight.planner.memory.prediction import MemoryPrediction
from firstlight.planner.speed.recipe import count_operators, predict_recipe_speed
from firstlight.planner.speed.store import (
    calibrate,
    load_calibration,
    measure_operators,
    save_calibration,
)
from firstlight.planner.speed.throughput import SpeedPrediction
from firstlight.recipe import ResolvedRecipe, parse_resolved_recipe
from firstlight.training.program import TrainingProgram


def planner_speed_once(request: dict[str, Any]) -> dict[str, Any]:
    """Predict, train and predict as the module's head says.

    Args:
        request: see there.

    Raises:
        FirstlightError: the recipe is refused.
    """
    torch.set_num_threads(request["threads"])
    if "calibrate" in request:
        calibrate(request["calibrate"], Path(request["calibration"]))
        return {}
    recipe = parse_resolved_recipe(request["recipe"])
    folder, seconds = Path(request["calibration"]), request["seconds"]
    importlib.import_module("torch._dynamo")  # which torch's optimizers import at their first step
    start = time.perf_counter()
    counted = count_operators(recipe)
    predictions = [_predict(recipe, counted, folder, seconds)]
    plan_seconds = time.perf_counter() - start
    step = _steps(recipe, request)
    walls: list[float] = []
    threads: list[float] = []
    for turn in range(request["turns"]):
        if turn:
            predictions.append(_predict(recipe, counted, folder, seconds / 2))
        # What was measured has had the caches since.
        for number in range(request["steps"] + (1 if turn else request["warmup_steps"])):
            wall, thread = step()
            if number >= (1 if turn else request["warmup_steps"]):
                walls.append(wall)
                threads.append(thread)
    return {
        "plan_seconds": plan_seconds,
        "predictions": [one.to_json() for one in predictions],
        "step_seconds": walls,
        "thread_seconds": threads,
    }


def _predict(
    recipe: ResolvedRecipe, prediction: MemoryPrediction, folder: Path, seconds: float
) -> SpeedPrediction:
    calibration = load_calibration(folder)
    measure_operators(calibration, prediction.operators, seconds)
    save_calibration(calibration, folder)
    return predict_recipe_speed(recipe, calibration, prediction)


def _steps(recipe: ResolvedRecipe, request: dict[str, Any]) -> Callable[[], tuple[float, float]]:
    """What trains a step and returns its seconds, and those of them that this thread worked."""
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


if __name__ == "__main__":
    answer(planner_speed_once, sys.argv[1])

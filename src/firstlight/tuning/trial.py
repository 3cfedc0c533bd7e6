"""The process of a trial of `firstlight tune`: a shortened run of the recipe, not saved."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from firstlight.errors import ConfigError
from firstlight.files.atomic import make_folder, remove_folder
from firstlight.hardware.fresh_process import ForkServer, ask, training_environment
from firstlight.recipe import Recipe, load_recipe, parse_recipe
from firstlight.recipe.load import changed_recipe
from firstlight.run_log.names import RECIPE_NAME
from firstlight.run_log.reader import last_start
from firstlight.training.loop import train
from firstlight.tuning.study import pruning_trial

#: Steps of the run that measures the time of steps and evaluations ("pace").
_PACE_STEPS = 12
#: Steps between the evaluations of this run.
PACE_EVERY = 3
#: Seconds after which this run ends, though not before its first evaluation.
_PACE_SECONDS = 20.0


#: Function from a request and a time limit in seconds to the result of a trial; see `process.ask`.
Asker = Callable[[Mapping[str, Any], float | None], dict[str, Any]]


@contextlib.contextmanager
def trial_processes(device: torch.device) -> Iterator[Asker]:
    """A context with the function that runs trials, each in a process of its own.

    On a CPU, the processes are forks of a process that has imported everything, because the imports
    take as long as a small trial.
    """
    module, environment = "firstlight.tuning.trial", training_environment()
    if device.type == "cpu":
        with ForkServer(environment, module) as server:
            yield server.ask
    else:
        yield lambda request, seconds: ask(module, request, environment, seconds)


def ask_trial(
    asker: Asker,
    place: Path,
    values: Mapping[str, Any],
    init_from: str | None,
    ends: float,
    *,
    pace: bool = False,
    curves: Sequence[Any] = (),
) -> dict[str, Any]:
    """Run a trial; returns the result of `measure`, or {"error": {"type", "message"}}.

    Args:
        asker: function of `trial_processes`.
        place: folder of the trial's run.
        values: values of the trial's recipe.
        init_from: initial weights; see `tune`.
        ends: time by `time.monotonic` at which the trial is stopped.
        pace: True only measures the time of steps and evaluations.
        curves: curves of complete trials.
    """
    if place.exists():
        # The folder of a killed call, whose process may still run: it ends without the folder.
        remove_folder(place)
    make_folder(place.parent)
    request = {
        "recipe": changed_recipe(values, {"run.dir": str(place)}),
        "init_from": init_from,
        "threads": torch.get_num_threads(),
        "parent": os.getpid(),
        "pace": pace,
        "curves": curves,
    }
    seconds = max(ends - time.monotonic(), 1.0)
    return asker(request, seconds)


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Run a trial, or only the first steps of the recipe, in this process, without checkpoints.

    Args:
        request: "recipe", values of the recipe; "init_from"; "threads" of torch; "parent", process
            id of the caller; "pace", True to time only the first steps; "curves" of complete
            trials.

    Returns:
        Of a trial:

        - "curve": [number of the evaluation from 1, step, tokens, loss] of each evaluation
        - "pruned": True if the trial was ended early; "seconds": duration of its steps

        With "pace":

        - "step_seconds", "evaluation_seconds", "start_seconds": time of a step, of an evaluation,
          and from the start of the process to the end of the first step
        - "objective": name of the loss, "bits_per_byte" or "val/loss"
        - "max_steps", "warmup_steps", "seq_len": of the recipe's whole run

    Raises:
        FirstlightError: the run fails (see `train`), or its data has no held-out text.
    """
    torch.set_num_threads(request["threads"])
    recipe = parse_recipe(request["recipe"])
    watch = _Pace(recipe) if request["pace"] else _Trial(recipe, request["curves"])

    def on_step(record: Mapping[str, Any]) -> None:
        # Without the calling process, nothing would read the result.
        if watch.is_done_with(record) or not psutil.pid_exists(request["parent"]):
            raise _Done

    with contextlib.suppress(_Done):
        train(recipe, init_from=request["init_from"], on_step=on_step)
    return watch.result()


class _Done(Exception):  # noqa: N818 - no error
    """Raised to end a run early, without writing a checkpoint and a report."""


class _Trial:
    """Records the evaluations of a trial, and decides whether it is pruned.

    Args:
        recipe: the trial's recipe.
        curves: curves of complete trials.
    """

    def __init__(self, recipe: Recipe, curves: Sequence[Sequence[Sequence[float]]]) -> None:
        self.recipe = recipe
        self.curve: list[list[float]] = []
        self.seconds, self.pruned = 0.0, False
        self.trial = pruning_trial(curves)

    def is_done_with(self, record: Mapping[str, Any]) -> bool:
        """Take a step's metrics; True if it is the last step, or the trial is pruned."""
        self.seconds += record["seconds"]
        step, is_last = record["step"], record["step"] == self.recipe.schedule.max_steps
        if "val/loss" in record:
            point = -(-step // self.recipe.evaluation.every_steps)
            loss = record.get("bits_per_byte", record["val/loss"])
            self.curve.append([point, step, record["tokens_seen"], loss])
            self.trial.report(loss, point)
            self.pruned = not is_last and bool(self.trial.should_prune())
        return is_last or self.pruned

    def result(self) -> dict[str, Any]:
        """See `measure`."""
        return {"curve": self.curve, "pruned": self.pruned, "seconds": round(self.seconds, 3)}


class _Pace:
    """Measures the time of the recipe's steps and evaluations.

    Args:
        recipe: the recipe.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.times: list[tuple[float, bool]] = []
        self.objective = ""

    def is_done_with(self, record: Mapping[str, Any]) -> bool:
        """Take a step's metrics; True once enough steps are timed.

        Raises:
            ConfigError: there is no held-out text.
        """
        is_evaluated = "val/loss" in record
        self.times.append((time.perf_counter(), is_evaluated))
        if is_evaluated:
            self.objective = "bits_per_byte" if "bits_per_byte" in record else "val/loss"
        if record["step"] < PACE_EVERY:
            return False
        if not self.objective:
            raise ConfigError(
                "there is no held-out text to judge a trial by: prepare it with --val-fraction "
                "above 0"
            )
        return len(self.times) >= _PACE_STEPS or self._loop_seconds() > _PACE_SECONDS

    def _loop_seconds(self) -> float:
        return self.times[-1][0] - self.times[0][0]

    def result(self) -> dict[str, Any]:
        """See `measure`."""
        gaps = [
            (after[0] - before[0], after[1])
            for before, after in zip(self.times, self.times[1:], strict=False)
        ]
        if self.times and len(self.times) < PACE_EVERY:
            raise ConfigError(f"a run of fewer than {PACE_EVERY} steps leaves nothing to search")
        step = statistics.median([gap for gap, is_evaluated in gaps if not is_evaluated])
        evaluated = [gap for gap, is_evaluated in gaps if is_evaluated]
        folder = Path(self.recipe.run.dir or "")
        start = last_start(folder)
        resolved = load_recipe(folder / RECIPE_NAME)
        return {
            "step_seconds": step,
            "evaluation_seconds": max(evaluated[-1] - step, 0.0),
            "start_seconds": time.time() - psutil.Process().create_time() - self._loop_seconds(),
            "objective": self.objective,
            "max_steps": start["max_steps"],
            "warmup_steps": start["warmup_steps"],
            "seq_len": resolved.data.seq_len,
        }

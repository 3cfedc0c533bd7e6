"""The process of a trial of `firstlight tune`: a short run of the recipe, without a checkpoint."""

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

from firstlight.bench.models import changed_recipe
from firstlight.bench.process import ForkServer, ask, training_environment
from firstlight.bench.tuning_study import pruning_trial
from firstlight.errors import ConfigError
from firstlight.files.atomic import make_folder, remove_folder
from firstlight.recipe import Recipe, load_recipe, parse_recipe
from firstlight.report.records import RECIPE_NAME, last_start
from firstlight.training.loop import train

#: Steps of the run that measures the pace.
_PACE_STEPS = 12
#: Steps between its evaluations.
PACE_EVERY = 3
#: Seconds after which it ends with its first evaluation.
_PACE_SECONDS = 20.0


#: Function from a request and a number of seconds to the result of a trial; see `ask`.
Asker = Callable[[Mapping[str, Any], float | None], dict[str, Any]]


@contextlib.contextmanager
def trial_processes(device: torch.device) -> Iterator[Asker]:
    """A context with the function that runs trials, each in a process of its own. On a CPU they are
    forks of one that has imported everything: that takes as long as a small trial."""
    module, environment = "firstlight.bench.tuning_once", training_environment()
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
    """The result of a trial, which is ended with the budget; see `measure`."""
    if place.exists():
        # A killed call's: its process may still be in it, and stops when the folder is gone.
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
    """Run a trial, or the first steps of the recipe, in this process. No checkpoint is written.

    Args:
        request: "recipe", its values; "init_from"; "threads" of torch; "parent", process id of
            the caller; "pace", True to time the first steps alone; "curves" of complete trials.

    Returns:
        "curve": [its number from 1, step, tokens, loss] of each evaluation; "pruned"; "seconds" of
        the steps.
        With "pace": "step_seconds", "evaluation_seconds", "start_seconds", "objective", and the
        whole run's "max_steps", "warmup_steps" and "seq_len".

    Raises:
        FirstlightError: the run fails (see `train`), or its data has no held-out text.
    """
    torch.set_num_threads(request["threads"])
    recipe = parse_recipe(request["recipe"])
    watch = _Pace(recipe) if request["pace"] else _Trial(recipe, request["curves"])

    def on_step(record: Mapping[str, Any]) -> None:
        # Nobody reads the result once the calling process is gone.
        if watch.is_done_with(record) or not psutil.pid_exists(request["parent"]):
            raise _Done

    with contextlib.suppress(_Done):
        train(recipe, init_from=request["init_from"], on_step=on_step)
    return watch.result()


class _Done(Exception):  # noqa: N818 - no error
    """Ends a run without a checkpoint and a report, which nobody needs."""


class _Trial:
    """The evaluations of a trial, which is ended early if it is hopeless.

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
        """True at the last step, or where the trial is hopeless."""
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
    """The time of steps and evaluations.

    Args:
        recipe: the recipe.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.times: list[tuple[float, bool]] = []
        self.objective = ""

    def is_done_with(self, record: Mapping[str, Any]) -> bool:
        """True when enough is known."""
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

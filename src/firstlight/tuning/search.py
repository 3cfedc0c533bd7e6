"""Implement `firstlight tune`, which searches for the best values of recipe keys with short
training runs.

Each trial is a shortened run of the recipe (see `space`) in a separate process. All trials have the
same seed and number of tokens. The objective is the loss on held-out text. Optuna proposes the
values and prunes the worst trials.

A study is stored in a folder: study.json contains the settings (`Study`), and trials.jsonl contains
one line for each finished trial. A later call can continue the study from these two files, because
the values of a trial depend only on the seed and on the results of earlier trials. If the process
is killed, only the current trial is lost.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from firstlight.checkpoint.run_folder import held
from firstlight.console import counted, say
from firstlight.errors import ConfigError, InputError, TrainingError
from firstlight.files.atomic import make_folder, remove_folder, write_file, write_json
from firstlight.hardware.device import find_hardware, machine_facts
from firstlight.hardware.fresh_process import ForkServer, ask, training_environment
from firstlight.recipe import Recipe, load_recipe, parse_recipe
from firstlight.recipe.load import changed_recipe, yaml_text
from firstlight.recipe.resolve import for_new_model
from firstlight.run_log.names import RECIPE_NAME
from firstlight.run_log.reader import last_start
from firstlight.training.loop import train
from firstlight.tuning.space import (
    POINTS,
    SearchKey,
    Value,
    default_search,
    describe,
    parse_search,
    require_keys,
    trial_recipe,
    with_values,
)
from firstlight.tuning.study import (
    TRIALS_NAME,
    Study,
    draw,
    importance,
    propose,
    pruning_trial,
    read_study,
    read_trials,
    require_optuna,
    trial_in_words,
)

STUDY_NAME = "study.json"
BEST_NAME = "best.yaml"
PICTURE_NAME = "tuning.png"

#: Number of steps in the pace run, which is a short run that measures the duration of steps and
#: evaluations.
_PACE_STEPS = 12
#: Number of steps between evaluations in the pace run.
PACE_EVERY = 3
#: Time limit of the pace run in seconds. Even if it is exceeded, the run continues until the end of
#: its first evaluation.
_PACE_SECONDS = 20.0

#: Minimum number of steps in a trial if its length is derived from the budget. It allows two steps
#: per evaluation.
_FEWEST_STEPS = 2 * POINTS

#: Safety factor for expected durations, because other programs can slow down the machine.
_RESERVE = 1.1


@dataclass(frozen=True)
class TuneResult:
    """Result of `tune`: the trials that a study has run so far, and the files of the best trial.

    Attributes:
        folder: folder of the study, with study.json and trials.jsonl.
        study: searched keys, objective and length of a trial.
        trials: lines of trials.jsonl, each with "trial" (number), "values", "state" ("complete",
            "pruned" or "failed"), "objective" (the last loss, or None for a failed trial), "step"
            (the last evaluated step), "steps" (the number of steps in the trial), "curve" (see
            `measure`), "seconds" and "message".
        best: line of the best complete trial; None if no trial is complete.
        best_recipe: recipe file with the best values; None if no trial is complete.
        importance: importance of each key for the loss, as a fraction. The most important key comes
            first. Empty if there are too few trials.
        picture: path of a PNG that shows the loss as a function of each key; None if no trial is
            complete.
    """

    folder: Path
    study: Study
    trials: Sequence[Mapping[str, Any]]
    best: Mapping[str, Any] | None
    best_recipe: Path | None
    importance: Mapping[str, float]
    picture: Path | None


def tune(
    recipe: Recipe | Mapping[str, Any] | str | Path,
    folder: str | Path | None = None,
    *,
    search: Sequence[str] = (),
    trials: int = 24,
    budget_minutes: float = 60.0,
    trial_steps: int | None = None,
    trial_minutes: float | None = None,
    init_from: str | None = None,
    on_trial: Callable[[Mapping[str, Any]], None] = lambda _: None,
) -> TuneResult:
    """Search for the values of recipe keys that give the lowest held-out loss. A later call with
    the same folder continues the study.

    Args:
        recipe: a recipe, its values, or its file.
        folder: folder of the study; None to use the recipe's run.dir with "-tune" appended.
        search: keys with their values, such as "optimizer.learning_rate=1e-4..1e-2:log" or
            "batch.micro_batch_size=4,8,16". If empty, learning rates, warm-up and weight decay are
            searched around the recipe's own values.
        trials: total number of trials in the study, including trials of earlier calls.
        budget_minutes: time limit of this call. A trial that would not finish in time is not
            started.
        trial_steps: length of a trial in steps. If neither `trial_steps` nor `trial_minutes` is
            set, each trial gets an equal part of the budget. Later calls keep the length of the
            first call.
        trial_minutes: length of a trial in minutes, instead of `trial_steps`.
        init_from: model folder, run or hub id with the initial weights of each trial.
        on_trial: function that is called after each trial with its line for trials.jsonl.

    Raises:
        MissingDependencyError: optuna is not installed.
        ConfigError: the recipe, the search or an option is invalid, the folder has another study,
            the recipe has no held-out text, or the budget is too short.
        CheckpointError: another process is using the folder, or its files are damaged.
        TrainingError, DataError, ModelError: the recipe can't be trained even with its original
            values.
        StorageError: a file system error.
    """
    require_optuna()
    begun = time.monotonic()
    if not isinstance(recipe, Recipe):
        recipe = parse_recipe(recipe) if isinstance(recipe, Mapping) else load_recipe(recipe)
    if init_from is None:
        # The settings of new models apply only to recipes that do not set any of the affected keys.
        # Because the recipe of a trial sets the searched keys, these settings are applied here in
        # advance.
        recipe = for_new_model(recipe, {})
    _require_options(recipe, trials, budget_minutes, trial_steps, trial_minutes=trial_minutes)
    if folder is None and recipe.run.dir is None:
        raise ConfigError("the recipe has no run.dir: specify the folder of the study")
    place = Path(f"{recipe.run.dir}-tune" if folder is None else folder).expanduser()
    keys = tuple(map(parse_search, search)) or tuple(default_search(recipe))
    require_keys(keys, recipe)
    ends, hardware = begun + 60 * budget_minutes, find_hardware(recipe.run.device)
    with held(place), trial_processes(hardware.device) as asker:
        question = _Question(recipe, keys, init_from, trial_steps, trial_minutes=trial_minutes)
        study = _open_study(place, question, trials, ends, asker=asker)
        lines = read_trials(place, study)
        try:
            _run_trials(place, study, lines, trials, ends=ends, asker=asker, on_trial=on_trial)
        finally:
            result = _result(place, study, lines)
    return result


@dataclass(frozen=True)
class _Question:
    """The arguments of `tune` that must be the same in all calls that continue a study."""

    recipe: Recipe
    keys: tuple[SearchKey, ...]
    init_from: str | None
    trial_steps: int | None
    trial_minutes: float | None


def _require_options(
    recipe: Recipe,
    trials: int,
    budget_minutes: float,
    trial_steps: int | None,
    *,
    trial_minutes: float | None,
) -> None:
    given = {"trials": trials, "budget": budget_minutes, "trial-steps": trial_steps}
    for name, value in {**given, "trial-minutes": trial_minutes}.items():
        if value is not None and not value > 0:
            raise ConfigError(f"--{name} is {value:g}: it must be greater than 0")
    if trial_steps is not None and trial_minutes is not None:
        raise ConfigError(
            "--trial-steps and --trial-minutes both set the length of a trial: use only one of them"
        )
    if recipe.schedule.resume:
        raise ConfigError(
            "schedule.resume continues another run's schedule, but tune sets its own: remove it"
        )
    if recipe.schedule.max_minutes is not None:
        raise ConfigError(
            "schedule.max_minutes does not set the number of steps, from which the length of "
            "trials is derived: set it to null, and schedule.max_steps to the number of steps of "
            "the full run"
        )


# The study's files


def _open_study(
    folder: Path, question: _Question, trials: int, ends: float, *, asker: Asker
) -> Study:
    """Open the study in the folder. If there is no study, create one (see `_begin_study`)."""
    path = folder / STUDY_NAME
    recipe = question.recipe.model_dump(mode="json", exclude_unset=True)
    if not path.exists():
        study = _begin_study(folder, question, recipe, trials, ends=ends, asker=asker)
        write_json(path, asdict(study))
        return study
    study = read_study(path)
    steps = question.trial_steps or study.trial_steps
    asked = (
        ("recipe", study.recipe, recipe),
        ("search", study.search, question.keys),
        ("--init-from", study.init_from, question.init_from),
        ("--trial-steps", study.trial_steps, min(steps, study.full_steps)),
    )
    for name, before, now in asked:
        if before != now:
            raise ConfigError(
                f"{folder} has a study with a different {name}: choose another folder, or use "
                "the original value"
            )
    return study


def _begin_study(
    folder: Path,
    question: _Question,
    recipe: dict[str, Any],
    trials: int,
    *,
    ends: float,
    asker: Asker,
) -> Study:
    """Create a study. Measure the duration of the recipe's steps, and choose the length of a trial.

    Raises:
        ConfigError: there is no held-out text, or the budget is too short.
    """
    say("tune: measuring the speed of the recipe")
    rows = question.recipe.evaluation.max_rows
    evaluation = {"every_steps": PACE_EVERY, "max_rows": rows, "sample_prompts": []}
    values = changed_recipe(recipe, {"evaluation": evaluation})
    try:
        found = ask_trial(asker, folder / "pace", values, question.init_from, ends=ends, pace=True)
    finally:
        if (folder / "pace").exists():
            remove_folder(folder / "pace")
    if "error" in found:
        _refuse(found["error"])
    left = ends - time.monotonic()
    beside = found["start_seconds"] + POINTS * found["evaluation_seconds"]
    if question.trial_steps is not None:
        steps = question.trial_steps
    else:
        minutes = question.trial_minutes
        share = left / trials if minutes is None else 60 * minutes
        steps = int((share / _RESERVE - beside) / found["step_seconds"])
        if steps < _FEWEST_STEPS:
            least = _RESERVE * (beside + _FEWEST_STEPS * found["step_seconds"])
            raise ConfigError(
                f"{share:.0f} s per trial is too short: {_FEWEST_STEPS} steps and {POINTS} "
                f"evaluations take {least:.0f} s on this machine: raise --budget or "
                "--trial-minutes, lower --trials, or lower evaluation.max_rows"
            )
    # A trial is never longer than the recipe's full run.
    steps = min(steps, found["max_steps"])
    return Study(
        recipe=recipe,
        search=question.keys,
        init_from=question.init_from,
        objective=found["objective"],
        seq_len=found["seq_len"],
        full_steps=found["max_steps"],
        warmup_ratio=found["warmup_steps"] / found["max_steps"],
        trial_steps=steps,
        seconds=_RESERVE * (beside + steps * found["step_seconds"]),
        machine=machine_facts(find_hardware(question.recipe.run.device)),
    )


def _refuse(error: Mapping[str, Any]) -> None:
    """Raise the error with which the pace run failed."""
    if error["type"] == "TimeoutError":
        raise ConfigError("the budget is too short for a few steps of the recipe: raise --budget")
    kinds = {"ConfigError": ConfigError, "InputError": InputError}
    kind = kinds.get(error["type"], TrainingError)
    raise kind(f"the recipe can't be tuned because training fails: {error['message']}")


# Trials


def _run_trials(
    folder: Path,
    study: Study,
    lines: list[dict[str, Any]],
    trials: int,
    *,
    ends: float,
    asker: Asker,
    on_trial: Callable[[Mapping[str, Any]], None],
) -> None:
    """Run trials and append their results to `lines`, until there are `trials` results or the time
    `ends` is reached."""
    say(
        f"tune: each trial has {study.trial_steps:,} of the recipe's {study.full_steps:,} steps "
        f"and takes about {_expected(study, lines):.0f} s; {len(lines)} of {trials} trials are "
        "done"
    )
    while len(lines) < trials:
        if time.monotonic() + _expected(study, lines) > ends:
            say(
                "tune: the next trial would not finish within the budget; run the same command "
                "to continue"
            )
            return
        values = propose(study, lines)
        if values is None:
            say("tune: all combinations have been tried")
            return
        line = _run_trial(folder, study, lines, values, ends=ends, asker=asker)
        if line is None:
            say(
                "tune: the budget is used up; run the same command to repeat the current trial "
                "and continue"
            )
            return
        lines.append(line)
        write_file(folder / TRIALS_NAME, "".join(json.dumps(one) + "\n" for one in lines))
        say(trial_in_words(line, study))
        on_trial(line)
        if line["state"] == "failed" and len(lines) == 1:
            raise TrainingError(f"training fails with the recipe's own values: {line['message']}")


def _expected(study: Study, lines: Sequence[Mapping[str, Any]]) -> float:
    """Return the expected duration of the next trial in seconds."""
    walls = [line["wall_seconds"] for line in lines if line["state"] == "complete"]
    return _RESERVE * max(walls) if walls else study.seconds


def _run_trial(
    folder: Path,
    study: Study,
    lines: Sequence[Mapping[str, Any]],
    values: Mapping[str, Value],
    *,
    ends: float,
    asker: Asker,
) -> dict[str, Any] | None:
    """Run a trial. Return the trial's line for trials.jsonl. Return None if the trial was stopped
    because the budget was used up."""
    number, begun = len(lines) + 1, time.monotonic()
    curves = [line["curve"] for line in lines if line["state"] == "complete"]
    found: dict[str, Any]
    steps = study.trial_steps
    try:
        own = values if lines else {}
        content, steps = trial_recipe(
            study.parsed, own, study.trial_steps, study.full_steps, seq_len=study.seq_len
        )
    except ConfigError as error:
        # The combination of values is invalid, although each value is valid on its own (see
        # `require_keys`).
        found = {"error": {"type": "ConfigError", "message": str(error)}}
    else:
        place = folder / f"trial-{number:03d}"
        found = ask_trial(asker, place, content, study.init_from, ends=ends, curves=curves)
    failure = found.get("error")
    if failure and failure["type"] == "TimeoutError":
        return None
    curve = found.get("curve", [])
    state = "failed" if failure else "pruned" if found["pruned"] else "complete"
    return {
        "trial": number,
        "values": dict(values),
        "state": state,
        "objective": None if failure else curve[-1][3],
        "step": curve[-1][1] if curve else 0,
        "steps": steps,
        "curve": curve,
        "seconds": found.get("seconds", 0.0),
        "wall_seconds": round(time.monotonic() - begun, 2),
        "message": failure["message"] if failure else "",
    }


# The result


def _result(folder: Path, study: Study, lines: Sequence[Mapping[str, Any]]) -> TuneResult:
    """Write best.yaml and the picture. Return the result of `tune`."""
    complete = [line for line in lines if line["state"] == "complete"]
    best = min(complete, key=lambda line: line["objective"], default=None)
    best_recipe = picture = None
    if best is not None:
        best_recipe, picture = folder / BEST_NAME, folder / PICTURE_NAME
        write_file(best_recipe, _best_recipe(folder, study, best, len(lines)))
        write_file(picture, draw(study.search, study.objective, lines))
    weights = importance(study, lines)
    return TuneResult(
        folder, study, lines, best, best_recipe=best_recipe, importance=weights, picture=picture
    )


def _best_recipe(folder: Path, study: Study, best: Mapping[str, Any], count: int) -> str:
    """Return the recipe of the full run with the best values, as YAML text.

    Its run.dir is a folder inside the study's folder, because the original run.dir may already
    contain a run.
    """
    # The first trial used the unchanged recipe. Keys that the recipe does not set must therefore
    # remain unset.
    values = {} if best["trial"] == 1 else best["values"]
    found = with_values(study.parsed, values, study.seq_len)
    content = found.model_dump(mode="json", exclude_unset=True)
    content = changed_recipe({"run": {}, **content}, {"run.dir": str(folder / "best")})
    head = (
        f"# The best of {count} trials of firstlight tune: {describe(values)}.\n# "
        f"{study.objective} {best['objective']:.4f} after {counted(best['steps'], 'step')}; the "
        "schedule below is for the full run.\n"
    )
    return head + yaml_text(content)


#: Function that runs a trial. Its arguments are a request and a time limit in seconds; see
#: `fresh_process.ask`.
Asker = Callable[[Mapping[str, Any], float | None], dict[str, Any]]


@contextlib.contextmanager
def trial_processes(device: torch.device) -> Iterator[Asker]:
    """Context manager that yields a function for running trials in separate processes.

    On a CPU, the processes are forked from a server process that has already imported all modules,
    because the imports take as long as a small trial.
    """
    module, environment = "firstlight.tuning.search", training_environment()
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
    """Run a trial. Return the result of `measure`, or {"error": {"type", "message"}}.

    Args:
        asker: function that runs a trial, as yielded by `trial_processes`.
        place: run folder of the trial.
        values: values of the trial's recipe.
        init_from: initial weights; see `tune`.
        ends: value of `time.monotonic` at which the trial is stopped.
        pace: True to measure only the duration of steps and evaluations.
        curves: curves of complete trials.
    """
    if place.exists():
        # This folder was left behind by a call that was killed. If the trial's process is still
        # running, it fails once the folder is removed.
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
    """Run a trial, or only the first steps of the recipe, in this process. Checkpoints are not
    saved.

    Args:
        request: a dict with "recipe" (the values of the recipe), "init_from", "threads" (the number
            of torch threads), "parent" (the process id of the caller), "pace" (True to time only
            the first steps) and "curves" (the curves of complete trials).

    Returns:
        For a trial:

        - "curve": a list [number of the evaluation, step, tokens, loss] for each evaluation, where
          the first evaluation has the number 1
        - "pruned": True if the trial was ended early
        - "seconds": total duration of the steps

        With "pace":

        - "step_seconds": duration of a step
        - "evaluation_seconds": duration of an evaluation
        - "start_seconds": time from the start of the process to the end of the first step
        - "objective": name of the loss, "bits_per_byte" or "val/loss"
        - "max_steps", "warmup_steps" and "seq_len": values of the recipe's full run

    Raises:
        FirstlightError: the run fails (see `train`), or its data has no held-out text.
    """
    torch.set_num_threads(request["threads"])
    recipe = parse_recipe(request["recipe"])
    watch = _Pace(recipe) if request["pace"] else _Trial(recipe, request["curves"])

    def on_step(record: Mapping[str, Any]) -> None:
        # Also stop if the calling process has ended, because the result would not be read.
        if watch.is_done_with(record) or not psutil.pid_exists(request["parent"]):
            raise _Done

    with contextlib.suppress(_Done):
        train(recipe, init_from=request["init_from"], on_step=on_step)
    return watch.result()


class _Done(Exception):  # noqa: N818 - not an error
    """Raised to end a run early, without writing a checkpoint or a report."""


class _Trial:
    """Records the evaluations of a trial and decides whether to prune the trial.

    Args:
        recipe: recipe of the trial.
        curves: curves of complete trials.
    """

    def __init__(self, recipe: Recipe, curves: Sequence[Sequence[Sequence[float]]]) -> None:
        self.recipe = recipe
        self.curve: list[list[float]] = []
        self.seconds, self.pruned = 0.0, False
        self.trial = pruning_trial(curves)

    def is_done_with(self, record: Mapping[str, Any]) -> bool:
        """Process the metrics of a step. Return True after the last step or if the trial is
        pruned."""
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
        """Return the result of `measure`."""
        return {"curve": self.curve, "pruned": self.pruned, "seconds": round(self.seconds, 3)}


class _Pace:
    """Measures how long the recipe's steps and evaluations take.

    Args:
        recipe: the recipe.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.times: list[tuple[float, bool]] = []
        self.objective = ""

    def is_done_with(self, record: Mapping[str, Any]) -> bool:
        """Process the metrics of a step. Return True once enough steps have been timed.

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
                "there is no held-out text to evaluate a trial on: prepare the data with "
                "--val-fraction above 0"
            )
        return len(self.times) >= _PACE_STEPS or self._loop_seconds() > _PACE_SECONDS

    def _loop_seconds(self) -> float:
        return self.times[-1][0] - self.times[0][0]

    def result(self) -> dict[str, Any]:
        """Return the result of `measure`."""
        gaps = [
            (after[0] - before[0], after[1])
            for before, after in zip(self.times, self.times[1:], strict=False)
        ]
        if self.times and len(self.times) < PACE_EVERY:
            raise ConfigError(
                f"the recipe's run has fewer than {PACE_EVERY} steps, too few for a search"
            )
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

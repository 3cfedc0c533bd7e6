"""Store the settings of a `firstlight tune` study, and show its results as a table and a picture.
This module also contains all code that uses Optuna, which proposes the values of trials, prunes
trials and estimates the importance of keys.

Optuna does not store any files. An Optuna study is recreated in memory from trials.jsonl each time
it is used.
"""

from __future__ import annotations

import contextlib
import io
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from firstlight.console import compact, counted
from firstlight.errors import CheckpointError, InputError, MissingDependencyError
from firstlight.files.atomic import read_json
from firstlight.recipe import Recipe, parse_recipe
from firstlight.run_log.reader import read_json_lines
from firstlight.tuning.space import SearchKey, Value, describe, own_values, show_value

TRIALS_NAME = "trials.jsonl"

#: Number of trials with random values before the TPE sampler starts to use the results.
_RANDOM_TRIALS = 8

#: Minimum number of complete trials for estimating the importance of keys.
_TRIALS_TO_WEIGH = 8

#: A trial is pruned if its lowest loss so far is above this percentile of the losses that complete
#: trials had at the same evaluation.
_KEPT_PERCENT = 75.0

#: Minimum number of complete trials before any trial is pruned.
_UNPRUNED_TRIALS = 5

#: Minimum number of evaluations before a trial is pruned. It is a third of the evaluations in a
#: trial.
_UNPRUNED_POINTS = 2

#: Number of attempts to propose a new combination of values. If all attempts fail, all combinations
#: are assumed to have been tried.
_ATTEMPTS = 50


@dataclass(frozen=True)
class Study:
    """The content of study.json, which consists of the settings of a study and the measurements
    made by its first call.

    Attributes:
        recipe: values of the recipe.
        search: the searched keys with their values.
        init_from: initial weights of each trial; see `tune`.
        objective: metric to minimise, "bits_per_byte" or "val/loss".
        seq_len: number of tokens per sequence.
        full_steps: number of steps in the recipe's full run.
        warmup_ratio: number of warm-up steps as a fraction of `full_steps`.
        trial_steps: number of steps in a trial.
        seconds: expected duration of a trial in seconds, including process startup.
        machine: facts about the machine on which the study was created.
    """

    recipe: dict[str, Any]
    search: tuple[SearchKey, ...]
    init_from: str | None
    objective: str
    seq_len: int
    full_steps: int
    warmup_ratio: float
    trial_steps: int
    seconds: float
    machine: dict[str, Any]

    @property
    def parsed(self) -> Recipe:
        """The recipe of the study as a `Recipe` object."""
        return parse_recipe(self.recipe, "the study's recipe")


def require_optuna() -> None:
    """Check that Optuna is installed.

    Raises:
        MissingDependencyError: Optuna is not installed.
    """
    try:
        import optuna
    except ImportError as error:
        raise MissingDependencyError("optuna", "tune", "a search of a recipe's keys") from error
    del optuna


def read_study(path: Path) -> Study:
    """Read a study from study.json.

    Raises:
        CheckpointError: the file is damaged.
    """
    try:
        content = read_json(path)
        keys = (SearchKey(**{**one, "choices": tuple(one["choices"])}) for one in content["search"])
        return Study(**{**content, "search": tuple(keys)})
    except (InputError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: choose another folder ({error})") from error


def read_trials(folder: Path, study: Study) -> list[dict[str, Any]]:
    """Read the lines of trials.jsonl.

    Raises:
        CheckpointError: a line is damaged or belongs to a different study.
    """
    path, names = folder / TRIALS_NAME, {one.key for one in study.search}
    lines = read_json_lines(path)
    for number, line in enumerate(lines, start=1):
        values, is_own = line.get("values"), number == 1
        if not isinstance(values, dict) or (set(values) != names and not is_own):
            raise CheckpointError(
                f"{path}:{number} is not a trial of this study: remove the folder"
            )
    return lines


def propose(study: Study, lines: Sequence[Mapping[str, Any]]) -> dict[str, Value] | None:
    """Propose the values of the next trial, keyed by `section.key`. Return None if all combinations
    have been tried.

    The first trial uses the values in the recipe, if they are inside the search space.
    """
    if not lines:
        return own_values(study.search, study.parsed, study.warmup_ratio)
    tried = [line["values"] for line in lines]
    # The sampler can propose values that have already been tried. Trying them again would result in
    # the same loss.
    for attempt in range(_ATTEMPTS):
        values = _sample(study, lines, attempt)
        if values not in tried:
            return values
    return None


def _sample(study: Study, lines: Sequence[Mapping[str, Any]], attempt: int) -> dict[str, Value]:
    """Sample the values of the next trial with Optuna's TPE sampler (Bergstra et al. 2011). The
    values depend only on the seed, the results of earlier trials in `lines`, and the number of the
    attempt."""
    import optuna

    # Create a new sampler for each trial. If one sampler were used for several trials, its state
    # would be lost when a study is resumed.
    seed = (study.parsed.run.seed * 1_000_003 + len(lines) * _ATTEMPTS + attempt) % 2**32
    sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=_RANDOM_TRIALS)
    with _quiet():
        trial = _replayed(study, lines, sampler).ask(_distributions(study))
    return {one.key: one.rounded(trial.params[one.key]) for one in study.search}


def _distributions(study: Study) -> dict[str, Any]:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    def of(one: SearchKey) -> Any:
        if one.choices:
            return CategoricalDistribution(one.choices)
        if one.whole:
            return IntDistribution(int(one.low), int(one.high), log=one.log)
        return FloatDistribution(one.low, one.high, log=one.log)

    return {one.key: of(one) for one in study.search}


def _replayed(study: Study, lines: Sequence[Mapping[str, Any]], sampler: Any = None) -> Any:
    """Return an Optuna study that contains the trials in `lines`.

    Raises:
        CheckpointError: a line does not match the search space.
    """
    import optuna
    from optuna.trial import TrialState, create_trial

    found = optuna.create_study(sampler=sampler)
    distributions = _distributions(study)
    for line in lines:
        if set(line["values"]) != set(distributions):
            continue  # the recipe's own values can be outside the search space
        is_complete = line["state"] == "complete"
        try:
            trial = create_trial(
                params=line["values"],
                distributions=distributions,
                # Failed trials are also marked as pruned, because the sampler ranks pruned trials
                # without intermediate values below all other trials.
                state=TrialState.COMPLETE if is_complete else TrialState.PRUNED,
                value=line["objective"] if is_complete else None,
                intermediate_values={point: value for point, _, _, value in line["curve"]},
            )
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"trial {line.get('trial')} is damaged: {error}") from error
        found.add_trial(trial)
    return found


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Context manager that suppresses Optuna's messages about new studies."""
    import optuna

    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)


def pruning_trial(curves: Sequence[Sequence[Sequence[float]]]) -> Any:
    """Return an Optuna trial whose `should_prune` method compares its losses with the curves of
    complete trials.

    Args:
        curves: for each complete trial, a list [number of the evaluation, step, tokens, loss] for
            each evaluation.
    """
    import optuna
    from optuna.trial import create_trial

    pruner = optuna.pruners.PercentilePruner(
        _KEPT_PERCENT, n_startup_trials=_UNPRUNED_TRIALS, n_warmup_steps=_UNPRUNED_POINTS
    )
    with _quiet():
        study = optuna.create_study(pruner=pruner)
    for curve in curves:
        values = {int(point): loss for point, _, _, loss in curve}
        study.add_trial(create_trial(value=curve[-1][3], intermediate_values=values))
    return study.ask()


def importance(study: Study, lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Estimate the importance of each key for the loss with PED-ANOVA (Watanabe et al. 2023, arXiv
    2304.10255). Return fractions, keyed by `section.key`, or {} if too few trials are complete."""
    import optuna

    if sum(line["state"] == "complete" for line in lines) < _TRIALS_TO_WEIGH:
        return {}
    with _quiet():
        found = optuna.importance.get_param_importances(
            _replayed(study, lines), evaluator=optuna.importance.PedAnovaImportanceEvaluator()
        )
    return {key: round(share, 3) for key, share in found.items()}


def trial_in_words(line: Mapping[str, Any], study: Study) -> str:
    """Describe the result of a trial in one line."""
    head = f"trial {line['trial']}: {describe(line['values'])}"
    if line["state"] == "failed":
        return f"{head}: failed: {line['message']}"
    early = f", ended after {counted(line['step'], 'step')}" if line["state"] == "pruned" else ""
    return f"{head}: {study.objective} {line['objective']:.4f}{early}"


# Showing the results as a table and as plots of the loss as a function of each key

#: Number of panels per row in the picture.
_COLUMNS = 3

#: Maximum number of ticks on the x axis of a panel.
_TICKS = 5

#: The y axis extends above the best loss by the difference between the median loss and the best
#: loss, multiplied by this factor. Higher losses are drawn at the upper edge.
_SPAN = 2.5

Line = Mapping[str, Any]


def in_order(lines: Sequence[Line]) -> list[Line]:
    """Sort trials from best to worst. Complete trials come first, sorted by loss. They are followed
    by pruned trials, sorted by the fraction of completed steps, and finally by failed trials."""
    ranks = {"complete": 0, "pruned": 1, "failed": 2}

    def place(line: Line) -> tuple[Any, ...]:
        share = line["step"] / line["steps"] if line["state"] == "pruned" else 0.0
        return (ranks[line["state"]], -share, line["objective"] or 0.0, line["trial"])

    return sorted(lines, key=place)


def table(keys: Sequence[SearchKey], objective: str, lines: Sequence[Line]) -> list[list[str]]:
    """Return the table of trials, sorted from best to worst, as rows of cells. The first row is the
    header."""
    names = [one.key.partition(".")[2] for one in keys]
    rows = [["trial", objective, *names, "steps", ""]]
    for line in in_order(lines):
        values = [
            show_value(line["values"][one.key]) if one.key in line["values"] else "" for one in keys
        ]
        loss = "" if line["objective"] is None else f"{line['objective']:.4f}"
        notes = [line["state"]] if line["state"] != "complete" else []
        if line["trial"] == 1:
            notes.insert(0, "the recipe's own values")
        rows.append([str(line["trial"]), loss, *values, f"{line['step']:,}", ", ".join(notes)])
    return rows


def draw(keys: Sequence[SearchKey], objective: str, lines: Sequence[Line]) -> bytes:
    """Draw the loss as a function of each key and the loss curves of all trials, and return the
    picture as a PNG.

    Args:
        keys: the searched keys.
        objective: name of the loss.
        lines: lines of the trials; at least one trial must be complete.
    """
    from matplotlib.figure import Figure

    lines = [line for line in lines if line["objective"] is not None]
    best = in_order(lines)[0]
    ends = [line["objective"] for line in lines if line["state"] == "complete"]
    lowest = best["objective"]
    top = lowest + max(_SPAN * (statistics.median(ends) - lowest), 0.01 * lowest)
    columns = min(len(keys) + 1, _COLUMNS)
    rows = -(-(len(keys) + 1) // columns)
    # pyplot is not used, because it looks for a window system and keeps global state.
    figure = Figure(figsize=(4.4 * columns, 3.4 * rows + 0.4), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for place, key in zip(axes, keys, strict=False):
        _draw_key(place, key, lines, best, top=top)
    _draw_curves(axes[len(keys)], lines, best)
    for place in axes[len(keys) + 1 :]:
        place.set_axis_off()
    figure.supylabel(objective, fontsize="medium")
    figure.suptitle(
        "star: best trial; dotted: the recipe's own value; cross: ended early; triangle: above the "
        "edge; pale: an early trial",
        fontsize="small",
    )
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()


def _draw_key(place: Any, key: SearchKey, lines: Sequence[Line], best: Line, *, top: float) -> None:
    numbers = {text: number for number, text in enumerate(key.choices)}
    if key.choices:
        place.set_xticks(range(len(key.choices)), key.choices, parse_math=False)
        place.set_xlim(-0.5, len(key.choices) - 0.5)
    elif key.log:
        place.set_xscale("log")
        ticks = [n * 10.0**power for power in range(-12, 7) for n in (1, 2, 5)]
        ticks = [tick for tick in ticks if key.low <= tick <= key.high]
        # Matplotlib's default tick labels overlap on a logarithmic axis that spans one or two
        # decades.
        place.set_xticks(ticks[:: -(-len(ticks) // _TICKS) or 1])
        place.minorticks_off()
        place.xaxis.set_major_formatter(lambda tick, _: compact(tick))
    for line in lines:
        if key.key not in line["values"]:
            continue
        value, loss = line["values"][key.key], line["objective"]
        x = numbers[value] if key.choices else value
        if line["trial"] == 1:
            place.axvline(x, color="black", linestyle=":", linewidth=0.9)
        if line is best:
            place.scatter(x, loss, marker="*", color="tab:red", s=160, zorder=3)
        elif line["state"] == "pruned":
            place.scatter(x, min(loss, top), marker="x", color="tab:gray", s=28)
        else:
            # Later trials are drawn darker to show where the sampler narrowed the search.
            shade = 0.35 + 0.65 * line["trial"] / max(one["trial"] for one in lines)
            marker = "^" if loss > top else "o"
            place.scatter(x, min(loss, top), marker=marker, color="tab:blue", s=28, alpha=shade)
    place.set_title(key.key, loc="left", fontsize="medium", parse_math=False)
    place.margins(y=0.08)


def _draw_curves(place: Any, lines: Sequence[Line], best: Line) -> None:
    for line in sorted(lines, key=lambda line: line is best):
        x = [100 * step / line["steps"] for _, step, _, _ in line["curve"]]
        is_best = line is best
        color = "tab:gray" if line["state"] == "pruned" else "tab:blue"
        place.plot(
            x,
            [loss for *_, loss in line["curve"]],
            color="tab:red" if is_best else color,
            alpha=1.0 if is_best else 0.45,
            linewidth=1.2,
        )
    # Choose the upper limit of the y axis based on the second point of each curve, because the
    # first losses are so high that they would flatten the rest of the curves.
    second = [line["curve"][1][3] for line in lines if len(line["curve"]) > 1]
    if second:
        lowest, highest = best["objective"], statistics.median(second)
        margin = 0.05 * abs(highest - lowest)
        place.set_ylim(lowest - margin, max(highest, lowest) + 3 * margin)
    place.set_title("by progress of the trial, in percent", loc="left", fontsize="medium")

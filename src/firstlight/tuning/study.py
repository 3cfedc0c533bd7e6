"""A study of `firstlight tune`: its settings, and what Optuna decides: the values of trials, the
pruning of trials, and the importance of keys.

Optuna stores nothing: its study is created anew in memory each time, from the lines of
trials.jsonl.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from firstlight.errors import CheckpointError, InputError, MissingDependencyError
from firstlight.files.atomic import read_json
from firstlight.recipe import Recipe, parse_recipe
from firstlight.run_log.reader import read_json_lines
from firstlight.tuning.space import SearchKey, Value, describe, own_values

TRIALS_NAME = "trials.jsonl"

#: Number of trials with random values before the TPE sampler uses the results.
_RANDOM_TRIALS = 8

#: Minimum of complete trials for an estimate of the keys' importance.
_TRIALS_TO_WEIGH = 8

#: A trial is pruned if its lowest loss so far is above this percentile of the complete trials'
#: losses at the same evaluation.
_KEPT_PERCENT = 75.0

#: Number of complete trials below which no trial is pruned.
_UNPRUNED_TRIALS = 5

#: Number of evaluations, a third of a trial, before which no trial is pruned.
_UNPRUNED_POINTS = 2

#: Number of proposals for a trial after which all combinations count as tried.
_ATTEMPTS = 50


@dataclass(frozen=True)
class Study:
    """The settings of a study, and the measurements of its first call; the content of study.json.

    Attributes:
        recipe: values of the recipe.
        search: the searched keys with their values.
        init_from: initial weights of each trial, see `tune`.
        objective: metric to minimise, "bits_per_byte" or "val/loss".
        seq_len: tokens of a sequence.
        full_steps: steps of the recipe's whole run.
        warmup_ratio: warm-up steps as a fraction of `full_steps`.
        trial_steps: steps of a trial.
        seconds: expected duration of a trial in seconds, with the start of its process.
        machine: facts of the machine.
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
        """The recipe as `Recipe`."""
        return parse_recipe(self.recipe, "the study's recipe")


def require_optuna() -> None:
    """Raise a MissingDependencyError if Optuna is not installed."""
    try:
        import optuna
    except ImportError as error:
        raise MissingDependencyError("optuna", "tune", "a search of a recipe's keys") from error
    del optuna


def read_study(path: Path) -> Study:
    """The study in a file study.json.

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
    """The lines of trials.jsonl.

    Raises:
        CheckpointError: a line is damaged, or belongs to another study.
    """
    path, names = folder / TRIALS_NAME, {one.key for one in study.search}
    lines = read_json_lines(path)
    for number, line in enumerate(lines, start=1):
        values, is_own = line.get("values"), number == 1
        if not isinstance(values, dict) or (set(values) != names and not is_own):
            raise CheckpointError(f"{path}:{number} is no trial of this study: remove the folder")
    return lines


def propose(study: Study, lines: Sequence[Mapping[str, Any]]) -> dict[str, Value] | None:
    """Values of the next trial by key; None if all combinations have been tried.

    The first trial has the recipe's own values, as far as they are inside the search space.
    """
    if not lines:
        return own_values(study.search, study.parsed, study.warmup_ratio)
    tried = [line["values"] for line in lines]
    # The sampler may propose tried values again, and a trial with them would have the same loss.
    for attempt in range(_ATTEMPTS):
        values = _sample(study, lines, attempt)
        if values not in tried:
            return values
    return None


def _sample(study: Study, lines: Sequence[Mapping[str, Any]], attempt: int) -> dict[str, Value]:
    """Values of the next trial from Optuna's TPE sampler (Bergstra et al. 2011), a function of the
    seed, the lines and the attempt."""
    import optuna

    # A new sampler for each trial: its state would be missing when a study is continued.
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
    """An Optuna study with the trials of `lines`.

    Raises:
        CheckpointError: a line does not fit the search.
    """
    import optuna
    from optuna.trial import TrialState, create_trial

    found = optuna.create_study(sampler=sampler)
    distributions = _distributions(study)
    for line in lines:
        if set(line["values"]) != set(distributions):
            continue  # the recipe's own values, outside of the search
        is_complete = line["state"] == "complete"
        try:
            trial = create_trial(
                params=line["values"],
                distributions=distributions,
                # Failed trials, too: for the sampler, a pruned trial without intermediate values
                # is worse than all others.
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
    """A context without Optuna's messages about new studies."""
    import optuna

    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)


def pruning_trial(curves: Sequence[Sequence[Sequence[float]]]) -> Any:
    """An Optuna trial whose `should_prune` compares it with the curves of complete trials.

    Args:
        curves: [number of the evaluation, step, tokens, loss] of each evaluation, by trial.
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
    """Importance of each key for the loss as a fraction, by PED-ANOVA (Watanabe et al. 2023,
    arXiv 2304.10255); empty if too few trials are complete."""
    import optuna

    if sum(line["state"] == "complete" for line in lines) < _TRIALS_TO_WEIGH:
        return {}
    with _quiet():
        found = optuna.importance.get_param_importances(
            _replayed(study, lines), evaluator=optuna.importance.PedAnovaImportanceEvaluator()
        )
    return {key: round(share, 3) for key, share in found.items()}


def trial_in_words(line: Mapping[str, Any], study: Study) -> str:
    """The result of a trial as one line of text."""
    head = f"trial {line['trial']}: {describe(line['values'])}"
    if line["state"] == "failed":
        return f"{head}: failed: {line['message']}"
    early = f", ended after {line['step']} steps" if line["state"] == "pruned" else ""
    return f"{head}: {study.objective} {line['objective']:.4f}{early}"

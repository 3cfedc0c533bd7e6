"""`firstlight tune`."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from firstlight.cli.options import path_option, recipe_argument, split_arguments
from firstlight.cli.output import show, show_rows, show_table, with_json
from firstlight.console import parse_time

if TYPE_CHECKING:
    from firstlight.tuning.search import TuneResult

#: Maximum number of trials in the printed table.
_SHOWN = 10


@click.command("tune", context_settings={"ignore_unknown_options": True})
@recipe_argument
@click.option(
    "--search",
    multiple=True,
    metavar="KEY=VALUES",
    help="Key to search, such as optimizer.learning_rate=1e-4..1e-2:log or "
    "batch.micro_batch_size=4,8,16. Can be repeated.  [default: learning rates, weight decay and "
    "warm-up around the values of the recipe]",
)
@click.option("--trials", type=int, default=24, show_default=True, help="Number of trials.")
@click.option(
    "--budget",
    metavar="TIME",
    default="1h",
    show_default=True,
    help="Time limit for the whole command, such as 30min, 1h, 2d.",
)
@click.option(
    "--trial-steps", type=int, help="Steps per trial.  [default: an equal part of the budget]"
)
@click.option("--trial-minutes", type=float, help="Minutes per trial, instead of --trial-steps.")
@click.option("--init-from", metavar="DIR_OR_HUB_ID", help="Start each trial from these weights.")
@path_option(
    "--out",
    help="Folder of the study, which is continued if it exists.  [default: run.dir with -tune]",
)
@with_json
def tune_command(
    arguments: tuple[str, ...], out: Path | None, budget: str, as_json: bool, **options: Any
) -> dict[str, Any]:
    """Search for the recipe values with the lowest held-out loss.

    The loss is measured in short training runs, which are called trials.

    Each trial trains the recipe in a separate process with a shortened schedule. All trials use the
    same seed and the same number of tokens. The first trial uses the values in the recipe, and
    Optuna proposes the values for all other trials. Unpromising trials are stopped early. To
    continue a study that was stopped, repeat the command.
    """
    path, overrides = split_arguments(arguments, "tune")
    from firstlight.recipe import load_recipe
    from firstlight.tuning.search import tune

    minutes = parse_time(budget) / 60
    result = tune(load_recipe(path, overrides), out, budget_minutes=minutes, **options)
    _show(result)
    found = dataclasses.asdict(result)
    study = found.pop("study")
    return {**found, "objective": study["objective"], "trial_steps": study["trial_steps"]}


def _show(result: TuneResult) -> None:
    from firstlight.tuning.study import table

    rows = table(result.study.search, result.study.objective, result.trials)
    show_table(rows[: _SHOWN + 1])
    if len(rows) > _SHOWN + 1:
        show(f"and {len(rows) - _SHOWN - 1} more, in {result.folder}")
    if result.importance:
        shares = ", ".join(f"{key} {share:.0%}" for key, share in result.importance.items())
        show(f"importance of each key for the difference between trials: {shares}")
    if result.best_recipe is not None:
        show_rows([("best recipe", result.best_recipe), ("picture", result.picture)])
        start = ["--init-from", init_from] if (init_from := result.study.init_from) else []
        show(f"next: {shlex.join(['firstlight', 'train', str(result.best_recipe), *start])}")

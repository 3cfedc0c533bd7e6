"""`firstlight train`."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from typing import Any

import click

from firstlight.cli.launch import LAUNCH_OPTIONS, launch_if_asked, launch_options
from firstlight.cli.output import show_rows, with_json
from firstlight.console import say
from firstlight.errors import ConfigError

#: Of a run that was stopped early and saved: sysexits.h's EX_TEMPFAIL, "try again later".
STOPPED_EXIT_CODE = 75
_EXIT_CODE = "firstlight.exit_code"

#: What launchers set: of several processes, only the main one forecasts, and which that is isn't
#: known before torch is imported.
_RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


class _TrainCommand(click.Command):
    """Starts several processes where that is asked for; lists the recipe's keys in its help, which
    needs torch and is done only then; has an exit code of its own for a run that was stopped."""

    def invoke(self, ctx: click.Context) -> Any:
        if (code := launch_if_asked(ctx)) is not None:
            ctx.exit(code)
        result = super().invoke(ctx)
        if _EXIT_CODE in ctx.meta:
            from firstlight.distributed.elastic import exit_code_of_rank

            ctx.exit(exit_code_of_rank(ctx.meta[_EXIT_CODE]))
        return result

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from firstlight.training.config import key_documentation, recipe_fields

        sections: dict[str, list[tuple[str, str]]] = {}
        for section, kind, key in recipe_fields():
            field = kind.model_fields[key]
            default = "required" if field.is_required() else json.dumps(field.default)
            family = f" ({kind.__name__.removesuffix('Config')})" if section == "model" else ""
            text = key_documentation(kind).get(key, "")
            sections.setdefault(section + family, []).append(
                (f"--{section}.{key}", f"{text} [{default}]".strip())
            )
        for title, rows in sections.items():
            with formatter.section(f"Recipe section {title}"):
                formatter.write_dl(rows, col_max=36)


@launch_options
@click.command("train", cls=_TrainCommand, context_settings={"ignore_unknown_options": True})
@click.argument(
    "arguments", nargs=-1, type=click.UNPROCESSED, metavar="RECIPE.yaml [--section.key VALUE]..."
)
@click.option("--resume", is_flag=True, help="Go on from the run's newest complete checkpoint.")
@click.option("--init-from", metavar="DIR_OR_HUB_ID", help="Start from these weights.")
@click.option(
    "--new-rows",
    metavar="mean|copy:TOKEN",
    default="mean",
    show_default=True,
    help="With --init-from and an extended tokenizer: what new tokens start from.",
)
@click.option(
    "--plan",
    type=click.Choice(["auto"]),
    help="Take the settings of the best plan for this machine, tried for two steps.",
)
@with_json
def train_command(
    arguments: tuple[str, ...],
    resume: bool,
    init_from: str | None,
    new_rows: str,
    plan: str | None,
    as_json: bool,
) -> dict[str, Any]:
    """Train a model as a recipe says.

    Every key of the recipe can be set here too, for instance --optimizer.learning_rate 3e-4.

    SIGTERM, SIGINT (Ctrl-C) and SIGUSR1 end the run after the step at hand, with a checkpoint: the
    exit code is 75, and --resume goes on. A second signal ends it at once. A file `save-now` in
    the run folder asks for a checkpoint.
    """
    path, overrides = split_arguments(arguments)
    from firstlight.planner.forecasting import RunForecaster

    with RunForecaster() as forecaster:
        if plan is None and not any(name in os.environ for name in _RANKS):
            # It imports torch while this process does.
            forecaster.start()
        from firstlight.distributed import find_world, is_main
        from firstlight.training.config import load_recipe
        from firstlight.training.loop import train
        from firstlight.training.report import REPORT_NAME
        from firstlight.training.starts import last_start

        recipe = load_recipe(path, overrides)
        if plan is not None:
            recipe = _planned(recipe, resume, init_from)
        result = train(
            recipe,
            resume=resume,
            init_from=init_from,
            new_rows=new_rows,
            progress=True,
            forecaster=forecaster,
        )
    rows: list[tuple[str, object]] = [
        ("checkpoint", result.checkpoint),
        ("report", result.run_folder / REPORT_NAME),
        ("steps", f"{result.step:,}"),
        ("tokens seen", f"{result.tokens_seen:,}"),
    ]
    if result.evaluation is not None:
        rows.append(("val/loss", f"{result.evaluation.loss:.4f}"))
    if is_main(find_world()):
        show_rows(rows)
    if result.stopped_by is not None:
        say(f"stopped by {result.stopped_by} and saved: go on with the same command and --resume")
        click.get_current_context().meta[_EXIT_CODE] = STOPPED_EXIT_CODE
    return {
        "run_folder": str(result.run_folder),
        "checkpoint": str(result.checkpoint),
        "step": result.step,
        "tokens_seen": result.tokens_seen,
        "train/loss": result.train_loss,
        "evaluation": None if result.evaluation is None else _figures(result.evaluation),
        "weight_decay": last_start(result.run_folder).get("weight_decay"),
        "stopped_by": result.stopped_by,
    }


def _figures(evaluation: Any) -> dict[str, Any]:
    """An evaluation's; of preference pairs there are none of some."""
    found = dataclasses.asdict(evaluation)
    return {key: value for key, value in found.items() if value == value}


def _planned(recipe: Any, resume: bool, init_from: str | None) -> Any:
    """The recipe as `--plan auto` sets it; on resume, as the run was started."""
    from pathlib import Path

    from firstlight.checkpoint import list_checkpoints
    from firstlight.distributed import find_world
    from firstlight.hardware import find_hardware
    from firstlight.planner.automatic import planned_elsewhere
    from firstlight.training.config import load_recipe
    from firstlight.training.job import RECIPE_NAME

    if find_world().size > 1:
        raise ConfigError("--plan auto is for one process: leave it out, or leave out --nproc")
    folder = Path(recipe.run.dir)
    if resume and list_checkpoints(folder) and (folder / RECIPE_NAME).is_file():
        before = load_recipe(folder / RECIPE_NAME)
        optimizer = recipe.optimizer.model_copy(
            update={
                "name": before.optimizer.name,
                "eight_bit_library": before.optimizer.eight_bit_library,
            }
        )
        return recipe.model_copy(
            update={
                "batch": before.batch,
                "efficiency": before.efficiency,
                "optimizer": optimizer,
            }
        )
    return planned_elsewhere(recipe, find_hardware(recipe.run.device), say, init_from)


def split_arguments(arguments: Sequence[str]) -> tuple[str, list[tuple[str, str]]]:
    """The recipe's path, and the (section.key, value) pairs.

    `--a.b VALUE`, `--a.b=VALUE`, and for switches `--a.b` alone.

    Raises:
        ConfigError: no recipe, more than one, or an option that is not one.
    """
    paths: list[str] = []
    overrides: list[tuple[str, str]] = []
    waiting = list(arguments)
    while waiting:
        argument = waiting.pop(0)
        if not argument.startswith("-") or argument == "-":
            paths.append(argument)
            continue
        name, equals, value = argument.removeprefix("--").partition("=")
        if not argument.startswith("--") or "." not in name:
            raise ConfigError(_unknown_option(argument, name))
        if not equals:
            has_value = bool(waiting) and not waiting[0].startswith("--")
            value = waiting.pop(0) if has_value else "true"
        overrides.append((name, value))
    if len(paths) != 1:
        problem = f"more than one recipe: {' '.join(paths)}" if paths else "no recipe given"
        raise ConfigError(f"{problem}; use: firstlight train RECIPE.yaml [--section.key VALUE]...")
    return paths[0], overrides


def _unknown_option(argument: str, name: str) -> str:
    from firstlight.errors import nearest
    from firstlight.training.config import key_of_other_name, known_keys

    if any(key.startswith(f"{name}.") for key in known_keys()):
        return f"{argument} is a section: set its keys, --{name}.KEY VALUE"
    meant = key_of_other_name(name.replace("-", "_"))
    own = ("resume", "init-from", "new-rows", "plan", "json", *LAUNCH_OPTIONS)
    options = [f"--{option}" for option in (*own, *known_keys())]
    hint = f" (did you mean '--{meant}'?)" if meant else nearest(argument, options)
    return f"unknown option {argument}{hint}"

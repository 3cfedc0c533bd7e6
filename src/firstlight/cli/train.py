"""`firstlight train`."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from firstlight.cli.launch import LAUNCH_OPTIONS, launch_if_asked, launch_options
from firstlight.cli.output import say_findings, show_rows, with_json
from firstlight.console import say
from firstlight.errors import DIVERGED_EXIT_CODE, ConfigError

if TYPE_CHECKING:
    from firstlight.training.loop import TrainResult

#: Exit code of a run that was stopped early and saved: sysexits.h's EX_TEMPFAIL, "try later".
STOPPED_EXIT_CODE = 75
_EXIT_CODE = "firstlight.exit_code"
_HELP_ALL = "firstlight.help_all"
_USUAL_KEYS = (
    *("run.dir", "data.dir", "data.seq_len", "batch.micro_batch_size"),
    *("batch.global_batch_tokens", "schedule.max_steps", "schedule.epochs"),
    *("optimizer.learning_rate", "efficiency.precision", "evaluation.every_steps"),
    *("checkpoint.every_steps", "lora.rank"),
)

#: Variables of launchers. Of several processes only the main one forecasts; its rank isn't known
#: before torch is imported.
_RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


class _TrainCommand(click.Command):
    """Starts several processes with --nproc, lists the recipe's keys in its help (which imports
    torch), and ends with the exit code of a stopped or diverged run."""

    def invoke(self, ctx: click.Context) -> Any:
        if (code := launch_if_asked(ctx)) is not None:
            ctx.exit(code)
        result = super().invoke(ctx)
        if _EXIT_CODE in ctx.meta:
            from firstlight.parallel.elastic import exit_code_of_rank

            ctx.exit(exit_code_of_rank(ctx.meta[_EXIT_CODE]))
        return result

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from firstlight.recipe import recipe_fields

        sections: dict[str, list[tuple[str, str]]] = {}
        for section, kind, key in recipe_fields():
            field = kind.model_fields[key]
            default = "required" if field.is_required() else json.dumps(field.default)
            family = f" ({kind.__name__.removesuffix('Config')})" if section == "model" else ""
            text = " ".join((field.description or "").split())
            sections.setdefault(section + family, []).append(
                (f"--{section}.{key}", f"{text} [{default}]".strip())
            )
        if not ctx.meta.get(_HELP_ALL):
            _write_short(formatter, sections)
            return
        for title, rows in sections.items():
            with formatter.section(f"Recipe section {title}"):
                formatter.write_dl(rows, col_max=36)


def _write_short(
    formatter: click.HelpFormatter, sections: Mapping[str, list[tuple[str, str]]]
) -> None:
    """The keys that are set most often, a line each, and the names of the sections."""
    known = {name: text for rows in sections.values() for name, text in rows}
    names = [f"--{key}" for key in _USUAL_KEYS if f"--{key}" in known]
    width = formatter.width - max(map(len, names)) - 6
    with formatter.section("Keys of the recipe that are set most often"):
        formatter.write_dl(
            [(name, textwrap.shorten(known[name], width, placeholder=" ...")) for name in names]
        )
    titles = dict.fromkeys(title.split()[0] for title in sections)
    count = len(known)
    formatter.write_paragraph()
    formatter.write_text(
        f"All {count} keys, of the sections {', '.join(titles)}: firstlight train --help-all"
    )


def _show_all_help(ctx: click.Context, _: click.Parameter, is_asked: bool) -> None:
    if is_asked and not ctx.resilient_parsing:
        ctx.meta[_HELP_ALL] = True
        click.echo(ctx.get_help())
        ctx.exit()


@launch_options
@click.command("train", cls=_TrainCommand, context_settings={"ignore_unknown_options": True})
@click.argument(
    "arguments", nargs=-1, type=click.UNPROCESSED, metavar="RECIPE.yaml [--section.key VALUE]..."
)
@click.option(
    "--help-all",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_all_help,
    help="Show every key of a recipe, too, and exit.",
)
@click.option("--resume", is_flag=True, help="Go on from the run's newest complete checkpoint.")
@click.option("--init-from", metavar="DIR_OR_HUB_ID", help="Start from these weights.")
@click.option(
    "--best",
    is_flag=True,
    help="With --init-from RUN: its checkpoint with the lowest validation loss, not the newest.",
)
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
    best: bool,
    new_rows: str,
    plan: str | None,
    as_json: bool,
) -> dict[str, Any]:
    """Train a model as a recipe says.

    Every key of the recipe can be set here too, for instance --optimizer.learning_rate 3e-4.

    SIGTERM, SIGINT (Ctrl-C) and SIGUSR1 end the run after the step at hand, with a checkpoint: the
    exit code is 75, and --resume goes on. A second signal ends it at once. A file `save-now` in
    the run folder asks for a checkpoint. A run that diverged has the exit code 76.
    """
    path, overrides = split_arguments(arguments, "train")
    from firstlight.planner.plan.processes import RunForecaster

    with RunForecaster() as forecaster:
        if plan is None and not any(name in os.environ for name in _RANKS):
            # It imports torch while this process does.
            forecaster.start()
        from firstlight.parallel import find_world
        from firstlight.recipe import load_recipe
        from firstlight.training.loop import train

        recipe = load_recipe(path, overrides)
        if best:
            init_from = _best_of(init_from)
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
    if find_world().is_main:
        _show(result)
    if result.stopped_by is not None:
        say(f"stopped by {result.stopped_by} and saved: go on with the same command and --resume")
        click.get_current_context().meta[_EXIT_CODE] = STOPPED_EXIT_CODE
    elif result.diverged:
        click.get_current_context().meta[_EXIT_CODE] = DIVERGED_EXIT_CODE
    return _as_json(result)


def _show(result: TrainResult) -> None:
    """Print a run's result for people."""
    from firstlight.report.report import REPORT_NAME

    rows: list[tuple[str, object]] = [
        ("checkpoint", result.checkpoint),
        ("report", result.run_folder / REPORT_NAME),
        ("steps", f"{result.step:,}"),
        ("tokens seen", f"{result.tokens_seen:,}"),
    ]
    if result.evaluation is not None:
        rows.append(("val/loss", f"{result.evaluation.loss:.4f}"))
    if result.best_checkpoint not in (None, result.checkpoint):
        rows.append(("best checkpoint", result.best_checkpoint))
    show_rows(rows)
    say_findings(result.findings)


def _as_json(result: TrainResult) -> dict[str, Any]:
    """A run's result as JSON values."""
    from firstlight.report.records import last_start

    best_folder = result.best_checkpoint
    return {
        "run_folder": str(result.run_folder),
        "checkpoint": str(result.checkpoint),
        "step": result.step,
        "tokens_seen": result.tokens_seen,
        "train/loss": result.train_loss,
        "evaluation": None if result.evaluation is None else _figures(result.evaluation),
        "weight_decay": last_start(result.run_folder).get("weight_decay"),
        "stopped_by": result.stopped_by,
        "diverged": result.diverged,
        "findings": [finding.as_json() for finding in result.findings],
        "best_checkpoint": None if best_folder is None else str(best_folder),
    }


def _best_of(init_from: str | None) -> str:
    """The folder of a run's best checkpoint, to start from.

    Raises:
        ConfigError: --init-from names no run.
        CheckpointError: the run has no checkpoint.
    """
    from firstlight.checkpoint.selection import resolve_model_folder

    if init_from is None:
        raise ConfigError("--best is for --init-from: name the run to start from")
    return str(resolve_model_folder(init_from, best=True))


def _figures(evaluation: Any) -> dict[str, Any]:
    """Figures of an evaluation, without those that preference pairs lack (NaN)."""
    found = dataclasses.asdict(evaluation)
    return {key: value for key, value in found.items() if value == value}


def _planned(recipe: Any, resume: bool, init_from: str | None) -> Any:
    """The recipe with the settings of `--plan auto`; on resume, with those of the run's start."""
    from pathlib import Path

    from firstlight.checkpoint.selection import list_checkpoints
    from firstlight.hardware.device import find_hardware
    from firstlight.parallel import find_world
    from firstlight.planner.plan.automatic import planned_elsewhere
    from firstlight.recipe import load_recipe
    from firstlight.report.records import RECIPE_NAME

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


#: Suffixes of texts that are no recipe, beside those that `prepare` reads.
_OTHER_TEXT = (".pdf", ".docx", ".odt", ".epub", ".html", ".xlsx", ".rtf", ".json", ".zip")
_EXAMPLES = {
    "train": "firstlight train recipes/demo.yaml --data.dir mine/data trains its model",
    "plan": 'firstlight plan recipes/gpt2-124m.yaml --gpu "RTX 4090" says whether it fits, and how '
    "fast it is",
}


def split_arguments(arguments: Sequence[str], verb: str) -> tuple[str, list[tuple[str, str]]]:
    """The recipe's path, and the (section.key, value) pairs.

    `--a.b VALUE`, `--a.b=VALUE`, and for switches `--a.b` alone.

    Args:
        verb: train or plan.

    Raises:
        ConfigError: no recipe, more than one, something else than a recipe, or an option that is
            not one.
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
        usage = f"firstlight {verb} RECIPE.yaml [--section.key VALUE]..."
        raise ConfigError(f"{problem}; use: {usage} (for instance {_EXAMPLES[verb]})")
    _require_recipe(paths[0], verb)
    return paths[0], overrides


def _require_recipe(path: str, verb: str) -> None:
    """Refuse a folder or text in place of a recipe, and name the command that takes it.

    Raises:
        ConfigError: `path` is a folder, a text or a corpus.
    """
    from firstlight.data.shards import MANIFEST_NAME
    from firstlight.data.sources import SUFFIXES
    from firstlight.report.records import RECIPE_NAME
    from firstlight.weights.huggingface import CONFIG_NAME

    place, quoted = Path(path).expanduser(), shlex.quote(path)
    use = f"firstlight {verb} recipes/demo.yaml"
    is_corpus = not place.exists() and (path == "stdlib" or path.startswith("hf:"))
    is_text = place.is_file() and path.lower().endswith((*SUFFIXES, *_OTHER_TEXT))
    if not place.is_dir() and not is_text and not is_corpus:
        return
    if (place / RECIPE_NAME).is_file():
        resume = " --resume" if verb == "train" else ""
        recipe = shlex.quote(str(place / RECIPE_NAME))
        what, then = "a run folder", f"firstlight {verb} {recipe}{resume}"
    elif (place / CONFIG_NAME).is_file():
        what, then = "a model's folder", f"{use} --init-from {quoted}"
    elif (place / MANIFEST_NAME).is_file():
        what, then = "a prepared corpus", f"{use} --data.dir {quoted}"
    else:
        what = "a folder" if place.is_dir() else "text"
        then = (
            f"prepare takes text: firstlight tokenizer train {quoted} --vocab-size 4096 --out "
            f"mine/tokenizer, then firstlight prepare {quoted} --tokenizer mine/tokenizer --out "
            f"mine/data, then {use} --data.dir mine/data"
        )
    raise ConfigError(f"{path} is {what}, and {verb} takes a recipe: {then}")


def _unknown_option(argument: str, name: str) -> str:
    from firstlight.errors import nearest
    from firstlight.recipe import key_of_other_name, known_keys

    if any(key.startswith(f"{name}.") for key in known_keys()):
        return f"{argument} is a section: set its keys, --{name}.KEY VALUE"
    meant = key_of_other_name(name.replace("-", "_"))
    own = ("help-all", "resume", "init-from", "best", "new-rows", "plan", "json", *LAUNCH_OPTIONS)
    options = [f"--{option}" for option in (*own, *known_keys())]
    hint = f" (did you mean '--{meant}'?)" if meant else nearest(argument, options)
    return f"unknown option {argument}{hint}"

"""The command `firstlight train`, which trains on text files (`firstlight train INPUT...`) or with
a recipe, in one or several processes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import psutil

from firstlight.cli.options import as_is_option, count_option, grouped, split_arguments, split_paths
from firstlight.cli.output import end_with, say_findings, show, show_rows, with_json
from firstlight.console import counted, parse_time, say, time_text
from firstlight.errors import DIVERGED_EXIT_CODE, STOPPED_EXIT_CODE, ConfigError, FirstlightError

if TYPE_CHECKING:
    from firstlight.from_texts.plan import RunPlan
    from firstlight.training.loop import TrainResult


# Training on text files instead of with a recipe

#: Files that distinguish a run, a model or a prepared corpus from a folder of text files. Each file
#: name is mapped to a pattern that the file must contain, because users' text files can have the
#: same names. The file names are also defined in other modules, but these modules import torch,
#: which would delay the first line of output.
_OTHER_FOLDERS = {
    "recipe.yaml": r"^data:",
    "config.json": r'"(model_type|architectures)"\s*:',
    "manifest.json": r'"tokenizer_sha256"\s*:',
}
#: Number of characters at the beginning of a file that are searched for the pattern.
_HEAD_BYTES = 1 << 20

#: Parameter names of the options that can be used only when training on text files.
TEXT_OPTIONS = (
    "budget",
    "tokens",
    "steps",
    "size",
    "plan_only",
    "explain",
    "gpu",
    "text_key",
    "val_inputs",
    "as_is",
    "keep",
    "replay",
)


#: Decorator that adds the options that can be used only when training on text files.
text_options = grouped(
    click.option("--budget", metavar="TIME", help="With texts: time for the command, such as 30m."),
    click.option("--tokens", metavar="N", help="With texts: tokens to train on, such as 10M."),
    click.option("--steps", type=int, metavar="N", help="With texts: optimizer steps to train."),
    click.option(
        "--size",
        metavar="SIZE",
        help="With texts: tiny to xl, or such as 10M.",
    ),
    click.option(
        "--plan-only", is_flag=True, help="With texts: show the plan of the run and exit."
    ),
    click.option("--explain", is_flag=True, help="With texts: show each setting and its reason."),
    click.option("--gpu", metavar="NAME", help="With --plan-only: GPU to plan for."),
    click.option(
        "--text-key",
        metavar="KEY",
        help="With texts: text field in JSONL, CSV, Parquet.",
    ),
    click.option(
        "--val-input",
        "val_inputs",
        multiple=True,
        metavar="INPUT",
        help="With texts: separate texts for validation.",
    ),
    as_is_option,
    click.option(
        "--keep",
        multiple=True,
        metavar="INPUT",
        help="With texts and --init-from: text not to forget.",
    ),
    click.option(
        "--replay",
        type=float,
        metavar="SHARE",
        help="With --init-from: share of kept text.",
    ),
)


def takes_texts(paths: Sequence[str]) -> bool:
    """Return True if the paths are text files or folders with text files. Return False for a
    recipe, a run, a model or a prepared corpus.
    """
    places = [Path(path).expanduser() for path in paths]
    if any(place.suffix.lower() in (".yaml", ".yml") for place in places):
        return False
    if len(paths) != 1:
        return len(paths) > 1
    (path,), (place,) = paths, places
    if place.is_dir():
        return not any(_holds(place / name, sign) for name, sign in _OTHER_FOLDERS.items())
    is_glob = any(character in path for character in "*?[")
    return place.is_file() or path == "stdlib" or path.startswith("hf:") or is_glob


def _holds(path: Path, sign: str) -> bool:
    """Return True if a file exists and contains the pattern `sign`, or if it can't be read.

    If the file can't be read, an error that is raised later reports this to the user.
    """
    if not path.is_file():
        return False
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return re.search(sign, file.read(_HEAD_BYTES), re.MULTILINE) is not None
    except OSError:
        return True


def train_texts_command(
    paths: Sequence[str], overrides: Sequence[tuple[str, str]], options: dict[str, Any]
) -> tuple[dict[str, Any], TrainResult | None]:
    """Train on text files or conversations. With --plan-only, only show the plan of the run.

    Args:
        paths: files or folders with text or conversations.
        overrides: pairs of `section.key` and value.
        options: values of the command-line options, keyed by parameter name.

    Returns:
        A tuple of the command's result as a JSON object, and the result of the training run, which
        is None if there was no training run.

    Raises:
        ConfigError: options contradict each other, or the user has started several processes.
    """
    from firstlight.from_texts.run import train_texts, work_of

    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError(
            "texts are prepared by one process: omit --nproc, stop the run once it trains, and "
            "continue with firstlight train RUN_FOLDER/recipe.yaml --resume --nproc N"
        )
    names = ["budget", "tokens", "steps", "size", "init_from", "val_inputs", "as_is"]
    names += ["keep", "replay"]
    asked = {name: options[name] for name in names}
    asked |= {"overrides": overrides, "text_key": options["text_key"] or "text"}
    if options["plan_only"]:
        if options["resume"]:
            raise ConfigError("--plan-only plans a new run: omit --resume or --plan-only")
        from firstlight.from_texts.request import DEFAULT_SECONDS, request_of
        from firstlight.from_texts.run_folder import command_of, length_options, own_options

        request = request_of(paths, **asked)
        if not request.has_length:
            say(f"no --budget given: planning for {time_text(DEFAULT_SECONDS)}")
            request = dataclasses.replace(request, seconds=DEFAULT_SECONDS)
        plan = work_of(request, say, progress=True).plan(request, options["gpu"])
        # Import this module after the first message has been printed, because it imports torch,
        # which takes several seconds.
        from firstlight.from_texts.machine import fitted_recipe

        plan = fitted_recipe(plan).applied_to(plan)
        for line in (*plan.lines(), *plan.table()):
            show(line)
        command = command_of(request, length_options(request) + own_options(request))
        show(f"nothing was trained; to train: {command}")
        return plan.record(), None
    if options["gpu"] is not None:
        raise ConfigError("--gpu needs --plan-only: add it, or train on a machine with that GPU")
    count = _StepCount()
    with count.explaining(lambda: f"to continue, {AGAIN}"):
        run = train_texts(
            paths,
            **asked,
            resume=options["resume"],
            on_step=count.add,
            explain=options["explain"],
            ask=_ask if sys.stdin.isatty() and sys.stderr.isatty() else None,
            began=psutil.Process().create_time(),
        )
    from firstlight.from_texts.result import result_lines

    for line in result_lines(run):
        show(line)
    found = dataclasses.asdict(dataclasses.replace(run, training=None))
    stopped_by = None if run.training is None else run.training.stopped_by
    return {**found, "stopped_by": stopped_by}, run.training


def _ask(plan: RunPlan) -> float:
    """Ask the user for the maximum duration of the run, and return it in seconds."""
    from firstlight.from_texts.plan import offers

    say("How long should the run take?")
    for seconds, choices in offers(plan):
        expected = counted(choices.epochs, "epoch", ".2g")
        if choices.bits_per_byte is not None:
            low, high = choices.bits_per_byte
            expected = f"expected {low:.2f} to {high:.2f} bits per byte"
        size = f"{choices.parameters / 1e6:,.1f}M parameters"
        say(f"  {time_text(seconds):<8}  {size}, {expected}")
    while True:
        answer = click.prompt("time, such as 10m", default="10m", err=True)
        try:
            if (seconds := parse_time(answer)) > 0:
                return seconds
            say("the time must be more than 0")
        except ConfigError as error:
            say(str(error))


# The command

#: Advice that is printed when a run has been stopped. `AGAIN` is for runs on text files, which
#: continue automatically, and `CONTINUE` is for runs with a recipe.
AGAIN = "run the same command again"
CONTINUE = "to continue, add --resume to the same command"


class Interrupted(FirstlightError):  # noqa: N818  (the error type in the output of --json)
    """A run was ended immediately by Ctrl-C."""

    exit_code = 130


class _StepCount:
    """Counter for the steps that this command has trained. Its method `add` is the `on_step`
    callback of a run.
    """

    def __init__(self) -> None:
        self.steps = 0

    def add(self, _: Mapping[str, Any]) -> None:
        self.steps += 1

    @contextlib.contextmanager
    def explaining(self, advice: Callable[[], str]) -> Iterator[None]:
        """Context manager that converts a KeyboardInterrupt to an `Interrupted` error.

        Args:
            advice: function that returns the advice for the user if at least one step has been
                trained. Before the first step, the user can always repeat the command.
        """
        try:
            yield
        except KeyboardInterrupt:
            if not self.steps:
                raise Interrupted(f"interrupted before the first step: {AGAIN}") from None
            raise Interrupted(f"interrupted: {advice()}") from None


_HELP_ALL = "firstlight.help_all"
#: Default of --new-rows.
_NEW_ROWS = "mean"
_USUAL_KEYS = (
    "run.dir",
    "data.dir",
    "data.seq_len",
    "batch.micro_batch_size",
    "batch.global_batch_tokens",
    "schedule.max_steps",
    "schedule.max_minutes",
    "schedule.epochs",
    "optimizer.learning_rate",
    "efficiency.precision",
    "evaluation.every_steps",
    "checkpoint.every_steps",
    "lora.rank",
)

#: Environment variables that are set by launchers. If one of them is set, the process that
#: estimates the duration of the run is not started early. Only rank 0 needs this process, and the
#: rank is not known until torch has been imported.
_RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


class _TrainCommand(click.Command):
    """A command with the option --nproc, which starts several processes. Its help text lists the
    keys of a recipe.

    The recipe keys are collected only when the help text is printed, because this imports torch.
    """

    def invoke(self, ctx: click.Context) -> Any:
        if (code := launch_if_asked(ctx)) is not None:
            ctx.exit(code)
        return super().invoke(ctx)

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
    """Write one line for each of the most commonly used recipe keys, followed by a list of all
    sections.
    """
    known = {name: text for rows in sections.values() for name, text in rows}
    names = [f"--{key}" for key in _USUAL_KEYS if f"--{key}" in known]
    width = formatter.width - max(map(len, names)) - 6
    with formatter.section("Most commonly set keys of the recipe"):
        formatter.write_dl(
            [(name, textwrap.shorten(known[name], width, placeholder=" ...")) for name in names]
        )
    titles = dict.fromkeys(title.split()[0] for title in sections)
    count = len(known)
    formatter.write_paragraph()
    formatter.write_text(
        f"All {count} keys in the sections {', '.join(titles)}: firstlight train --help-all"
    )


def _show_all_help(ctx: click.Context, _: click.Parameter, is_asked: bool) -> None:
    if is_asked and not ctx.resilient_parsing:
        ctx.meta[_HELP_ALL] = True
        click.echo(ctx.get_help())
        ctx.exit()


@click.command("train", cls=_TrainCommand, context_settings={"ignore_unknown_options": True})
@click.argument(
    "arguments",
    nargs=-1,
    type=click.UNPROCESSED,
    metavar="RECIPE.yaml|INPUT... [--section.key VALUE]...",
)
@text_options
@click.option(
    "--help-all",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_all_help,
    help="Show this help with all keys of a recipe.",
)
@click.option(
    "--patience", type=int, metavar="N", help="End after N evaluations without a lower loss."
)
@click.option("--resume", is_flag=True, help="Resume from the newest complete checkpoint.")
@click.option("--init-from", metavar="DIR|GGUF|HUB_ID", help="Start from these weights.")
@click.option(
    "--best",
    is_flag=True,
    help="With --init-from RUN: its best checkpoint instead of its newest.",
)
@click.option(
    "--new-rows",
    metavar="mean|copy:TOKEN",
    default=_NEW_ROWS,
    show_default=True,
    help="With --init-from and an extended tokenizer: initial embeddings of the new tokens.",
)
@count_option(
    "--cooldown",
    metavar="STEPS",
    help="Start a new run that decays the learning rate over STEPS steps. Instead of a recipe, "
    "name the run or checkpoint to branch off from; its schedule.kind must be wsd or constant.",
)
@click.option(
    "--plan",
    type=click.Choice(["auto"]),
    help="Use the best plan found for this machine.",
)
@with_json
@click.option(
    "--nproc",
    metavar="N|auto",
    help="Train with N processes on this machine; auto: one per GPU.",
)
@click.option(
    "--nnodes",
    type=click.IntRange(1),
    metavar="N",
    help="With --nproc: number of machines.",
)
@click.option("--node-rank", type=int, help="With --nnodes: rank of this machine, from 0.")
@click.option(
    "--rdzv-endpoint",
    metavar="HOST:PORT",
    help="With --nnodes: address of the rendezvous, on machine 0.",
)
@click.option(
    "--max-restarts",
    type=click.IntRange(0),
    metavar="N",
    help="With --nproc: maximum number of restarts after a process fails.",
)
def train_command(
    arguments: tuple[str, ...], as_json: bool, patience: int | None, **options: Any
) -> dict[str, Any]:
    """Train a model on texts or with a recipe, or fine-tune an existing model.

    INPUT specifies text in the same way as for `firstlight prepare`: files, folders, globs,
    `stdlib` or hf:NAME. The tokenizer, model, batch size, learning rates and number of steps are
    chosen based on the amount of text, this machine and --budget. With --init-from MODEL, the model
    is fine-tuned. In this case, INPUT can also be conversations or preference pairs.

    Each recipe key is also an option, such as --optimizer.learning_rate 3e-4.

    SIGTERM, Ctrl-C and SIGUSR1 stop the run after the current step. The run saves a checkpoint and
    exits with code 75. To continue, repeat the command; recipes need --resume. A second signal
    stops it at once. Create `save-now` in the run folder to save a checkpoint. A diverged run exits
    with code 76.
    """
    from firstlight.data.sources import missing_input, special_input, special_kind

    if patience is not None:
        arguments += ("--evaluation.patience", str(patience))
    paths, overrides = split_paths(arguments)
    if options["cooldown"] is None:
        if not paths:
            raise ConfigError(
                "no input given: use firstlight train my_texts/ --budget 10m, or with a recipe "
                "firstlight train RECIPE.yaml (such as recipes/demo.yaml)"
            )
        if takes_texts(paths):
            return _train_on_texts(paths, overrides, options)
        for name in paths:
            is_recipe = Path(name).suffix.lower() in (".yaml", ".yml")
            if not is_recipe and not Path(name).expanduser().exists():
                raise ConfigError(f"{missing_input(name)}, or a recipe (.yaml)")
    path, overrides = split_arguments(arguments, "train", is_run=options["cooldown"] is not None)
    for name in TEXT_OPTIONS:
        if options.pop(name) not in (None, False, ()):
            if kind := special_kind(Path(path).expanduser()):
                raise ConfigError(special_input(path, kind))
            option = name.removesuffix("s" if name == "val_inputs" else "").replace("_", "-")
            raise ConfigError(f"--{option} is only for texts: omit it with {path}")
    return _train_recipe(path, overrides, **options)


def _train_on_texts(
    paths: Sequence[str], overrides: Sequence[tuple[str, str]], options: dict[str, Any]
) -> dict[str, Any]:
    """Run `firstlight train` on text files or conversations."""
    if options["plan"]:
        raise ConfigError("--plan is only for recipes: omit it with texts, or use --plan-only")
    if options["new_rows"] != _NEW_ROWS:
        raise ConfigError(
            "--new-rows is only for recipes: omit it with texts, which use the model's own "
            "tokenizer"
        )
    if options["best"]:
        options |= {"init_from": _best_of(options["init_from"])}
    found, of_run = train_texts_command(paths, overrides, options)
    if of_run is not None:
        say_findings(of_run.findings)
        if of_run.stopped_by is not None or of_run.diverged:
            _end_stopped(of_run, f"to continue, {AGAIN}")
    return found


def _train_recipe(
    path: str,
    overrides: Sequence[tuple[str, str]],
    *,
    best: bool,
    cooldown: int | None,
    plan: str | None,
    **start: Any,
) -> dict[str, Any]:
    """Run `firstlight train` with a recipe. `start` contains the values of the options `resume`,
    `init_from` and `new_rows`.
    """
    from firstlight.planner.plan.processes import RunForecaster

    with RunForecaster() as forecaster:
        if plan is None and not any(name in os.environ for name in _RANKS):
            # Start the process that estimates the duration of the run early, so that it imports
            # torch at the same time as this process.
            forecaster.start()
        from firstlight.checkpoint.selection import list_checkpoints
        from firstlight.parallel import find_world
        from firstlight.recipe import load_recipe
        from firstlight.training.loop import train

        if cooldown is None:
            recipe, branch_from = load_recipe(path, overrides), None
        else:
            if start["init_from"] or best or plan:
                raise ConfigError(
                    "--cooldown starts from the given run or checkpoint: omit --init-from, --best "
                    "and --plan"
                )
            recipe, branch_from = _cooled(path, cooldown, overrides, start["resume"])
        if best:
            start["init_from"] = _best_of(start["init_from"])
        if plan is not None:
            recipe = _planned(recipe, start["resume"], start["init_from"])
        start |= {"branch_from": branch_from, "progress": True, "forecaster": forecaster}
        assert recipe.run.dir is not None  # This key is set by `load_recipe` and `cooldown_recipe`.
        folder = Path(recipe.run.dir).expanduser()
        # Do not suggest repeating the command for a cooldown, because the cooldown could then
        # branch off from a newer checkpoint.
        again = (
            f"continue with firstlight train {shlex.quote(str(folder / 'recipe.yaml'))} --resume"
        )
        advice = CONTINUE if cooldown is None else again

        def advice_if_interrupted() -> str:
            return advice if list_checkpoints(folder) and not start["resume"] else AGAIN

        count = _StepCount()
        with count.explaining(advice_if_interrupted):
            result = train(recipe, on_step=count.add, **start)
    if find_world().is_main:
        _show(result)
    if result.stopped_by is not None or result.diverged:
        _end_stopped(result, advice)
    return _as_json(result)


def _end_stopped(result: TrainResult, advice: str) -> None:
    """Set the exit code of the command if the run diverged or was stopped. `advice` explains how to
    resume a run that was stopped.
    """
    if result.stopped_by is not None:
        say(f"stopped by {result.stopped_by} and saved: {advice}")
        end_with(STOPPED_EXIT_CODE)
    else:
        end_with(DIVERGED_EXIT_CODE)


def _cooled(
    trunk: str, steps: int, overrides: Sequence[tuple[str, str]], resume: bool
) -> tuple[Any, Path]:
    """Return the recipe of a cooldown, and the checkpoint from which it branches off.

    Args:
        trunk: run folder or checkpoint folder.
        steps: number of steps of the cooldown.
        overrides: pairs of `section.key` and value.
        resume: True to resume the run of the cooldown.

    Raises:
        ConfigError: `trunk` is a run folder, and there are several processes or the run is resumed.
            In these cases, the newest checkpoint could be newer than the one from which the
            cooldown started.
    """
    from firstlight.parallel import find_world
    from firstlight.training.cooldown import cooldown_recipe

    recipe, checkpoint = cooldown_recipe(trunk, steps, overrides)
    if (resume or find_world().size > 1) and checkpoint != Path(trunk).expanduser():
        raise ConfigError(
            f"other processes or a later start may find a newer checkpoint in {trunk}: with "
            f"--nproc or --resume, give the path of a checkpoint, such as {checkpoint}"
        )
    return recipe, checkpoint


def _show(result: TrainResult) -> None:
    """Print the result of a run, and commands that use the trained model."""
    from firstlight.from_texts.result import command_lines, first_words, model_commands
    from firstlight.report.summary import kept_result
    from firstlight.run_log.names import REPORT_NAME, SAMPLES_NAME
    from firstlight.run_log.reader import last_start, sound_json_lines

    answers = bool(last_start(result.run_folder).get("conversations"))
    rows: list[tuple[str, object]] = [
        ("checkpoint", result.checkpoint),
        ("report", result.run_folder / REPORT_NAME),
        ("steps", f"{result.step:,}"),
        ("tokens seen", f"{result.tokens_seen:,}"),
    ]
    if result.evaluation is not None:
        rows.append(("val/loss", f"{result.evaluation.loss:.4f}"))
        # Bits per byte are not defined for preference pairs.
        if not math.isnan(result.evaluation.bits_per_byte):
            share = result.evaluation.rows / max(result.evaluation.total_rows, 1)
            part = f", measured on {100 * share:.0f}% of it" if share < 0.995 else ""
            gzip = result.evaluation.gzip_bits_per_byte
            beside = "" if gzip is None else f" (gzip -9: {gzip:.4f})"
            text = f"of held-out {'answers' if answers else 'text'}{part}{beside}"
            rows.append(("bits per byte", f"{result.evaluation.bits_per_byte:.4f} {text}"))
    if result.best_checkpoint not in (None, result.checkpoint):
        rows.append(("best checkpoint", result.best_checkpoint))
    if kept := kept_result(result.run_folder):
        rows.append(("kept text", kept))
    show_rows(rows)
    if result.stopped_by is None and not result.diverged:
        samples, _ = sound_json_lines(result.run_folder / SAMPLES_NAME)
        prompt = first_words(line.get("prompt") or "" for line in samples)
        for line in command_lines(model_commands(result.run_folder, prompt, answers=answers)):
            show(line)
    say_findings(result.findings)


def _as_json(result: TrainResult) -> dict[str, Any]:
    """Return a run's result as a JSON object."""
    from firstlight.run_log.reader import last_start

    return {
        "run_folder": result.run_folder,
        "checkpoint": result.checkpoint,
        "step": result.step,
        "tokens_seen": result.tokens_seen,
        "train/loss": result.train_loss,
        "evaluation": None if result.evaluation is None else _figures(result.evaluation),
        "weight_decay": last_start(result.run_folder).get("weight_decay"),
        "summary": dataclasses.asdict(result.summary),
        "stopped_by": result.stopped_by,
        "diverged": result.diverged,
        "findings": [finding.as_json() for finding in result.findings],
        "best_checkpoint": result.best_checkpoint,
    }


def _best_of(init_from: str | None) -> str:
    """Return the folder of the best checkpoint in the run folder `init_from`.

    Raises:
        ConfigError: --init-from is missing.
    """
    from firstlight.checkpoint.selection import resolve_model_folder

    if init_from is None:
        raise ConfigError("--best needs --init-from with the run to start from")
    return str(resolve_model_folder(init_from, best=True))


def _figures(evaluation: Any) -> dict[str, Any]:
    """Return the metrics of an evaluation without NaN values. NaN stands for metrics that are not
    defined for preference pairs.
    """
    found = dataclasses.asdict(evaluation)
    return {key: value for key, value in found.items() if value == value}


def _planned(recipe: Any, resume: bool, init_from: str | None) -> Any:
    """Return the recipe with the settings that `--plan auto` chooses.

    A resumed run keeps the settings that were chosen when it was started. They are read from the
    recipe in the run folder.

    Raises:
        ConfigError: there are several processes, or no valid plan was found.
    """
    from firstlight.checkpoint.selection import list_checkpoints
    from firstlight.hardware.device import find_hardware
    from firstlight.parallel import find_world
    from firstlight.planner.plan.automatic import planned_elsewhere
    from firstlight.recipe import load_recipe
    from firstlight.run_log.names import RECIPE_NAME

    if find_world().size > 1:
        raise ConfigError("--plan auto needs a single process: omit it or --nproc")
    folder = Path(recipe.run.dir)
    if resume and list_checkpoints(folder) and (folder / RECIPE_NAME).is_file():
        before = load_recipe(folder / RECIPE_NAME)
        kept = {key: getattr(before.optimizer, key) for key in ("name", "eight_bit_library")}
        return recipe.with_keys("optimizer", **kept).model_copy(
            update={"batch": before.batch, "efficiency": before.efficiency}
        )
    return planned_elsewhere(recipe, find_hardware(recipe.run.device), say, init_from)


# Several processes

#: Options that control how many processes are started.
LAUNCH_OPTIONS = ("nproc", "nnodes", "node-rank", "rdzv-endpoint", "max-restarts")


def launch_if_asked(ctx: click.Context) -> int | None:
    """Remove `LAUNCH_OPTIONS` from the parameters of a command, and start the processes that they
    request.

    Returns:
        The exit code of the processes, or None if no processes were requested and this process must
        run the command itself.

    Raises:
        ConfigError: the options contradict each other, or this process was started by a launcher.
        RankError: a rank failed.
    """
    asked = {name: ctx.params.pop(name.replace("-", "_")) for name in LAUNCH_OPTIONS}
    nproc = asked.pop("nproc")
    if nproc is None:
        given = next((name for name, value in asked.items() if value is not None), None)
        if given is not None:
            raise ConfigError(f"--{given} needs --nproc, the number of processes per machine")
        return None
    nnodes = 1 if asked["nnodes"] is None else asked["nnodes"]
    if nnodes > 1 and asked["node-rank"] is None:
        raise ConfigError("--nnodes needs --node-rank, the rank of this machine, counted from 0")
    _require_no_launcher(nnodes)
    count = _count(nproc)
    if count == 1 and nnodes == 1 and not asked["max-restarts"]:
        return None
    # Without this setting, torch's C++ code prints a long stack trace for each broken connection.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from firstlight.parallel.elastic import Launch, launch

    options = Launch(
        count,
        nnodes,
        asked["node-rank"] or 0,
        asked["rdzv-endpoint"] or "",
        max_restarts=asked["max-restarts"] or 0,
    )
    # The option -P prevents Python from importing modules from the current folder.
    command = [sys.executable, "-P", "-m", "firstlight", *arguments_of(ctx)]
    return launch(command, options, () if ctx.params.get("resume") else ("--resume",))


def arguments_of(ctx: click.Context) -> list[str]:
    """Return the name and the arguments of the command that a new process must run, without
    `LAUNCH_OPTIONS`.
    """
    assert ctx.info_name is not None
    arguments = [ctx.info_name]
    for parameter in ctx.command.params:
        assert parameter.name is not None
        value = ctx.params.get(parameter.name)
        if isinstance(parameter, click.Argument):
            arguments += value or ()
        elif isinstance(value, tuple):
            # An option that can be given several times has a tuple as its value.
            arguments += [word for one in value for word in (parameter.opts[0], str(one))]
        elif value is not None and value != parameter.get_default(ctx):
            arguments += [parameter.opts[0]] if value is True else [parameter.opts[0], str(value)]
    return arguments


def _require_no_launcher(nnodes: int) -> None:
    """Raise an error if this process was started by a launcher such as torchrun.

    Raises:
        ConfigError: a launcher started this process. With --nproc, each process started by the
            launcher would start several more processes.
    """
    from firstlight.parallel.world import find_world

    variables = {"TORCHELASTIC_RUN_ID", "LOCAL_RANK"}
    # If the run uses several machines, a launcher such as srun is allowed to start this command
    # once per machine.
    if variables & os.environ.keys() or (nnodes == 1 and find_world().size > 1):
        raise ConfigError(
            "a launcher started this process: omit --nproc, or run the command without the launcher"
        )


def _count(nproc: str) -> int:
    if nproc == "auto":
        import torch

        return max(torch.cuda.device_count(), 1)
    if not nproc.isdecimal() or int(nproc) < 1:
        raise ConfigError(f"--nproc is '{nproc}': it must be auto or a number of at least 1")
    return int(nproc)

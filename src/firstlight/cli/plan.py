"""`firstlight plan`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from firstlight.cli.options import path_option, recipe_argument, split_arguments
from firstlight.cli.output import end_with, show, show_table, with_json
from firstlight.console import parse_count, parse_time, say
from firstlight.errors import ConfigError

if TYPE_CHECKING:
    from firstlight.planner.plan.estimate import Estimate
    from firstlight.planner.plan.plan import Budget, Plan
    from firstlight.recipe import Recipe

#: Exit code of `firstlight plan` if the recipe does not fit in memory.
DOES_NOT_FIT_EXIT_CODE = 3


@click.command("plan", context_settings={"ignore_unknown_options": True})
@recipe_argument
@click.option(
    "--gpu", metavar="NAME", help='GPU to plan for, such as "RTX 4090".  [default: this machine]'
)
@click.option("--gpu-memory", metavar="SIZE", help="Memory of each GPU, such as 24GiB.")
@click.option("--gpus", type=int, default=1, show_default=True, help="Number of GPUs.")
@click.option(
    "--budget",
    metavar="TIME",
    help="Plan the best model for this training time, such as 90min, 24h or 3d.",
)
@click.option(
    "--tokens",
    metavar="COUNT",
    help="Plan the best model for this number of training tokens, such as 300M or 10B.",
)
@click.option(
    "--price-per-hour", type=float, help="Price of a GPU per hour, to show the cost of the run."
)
@click.option("--init-from", metavar="DIR", help="Folder of the weights to start from.")
@click.option(
    "--search/--no-search",
    default=True,
    show_default=True,
    help="Search for the best settings, and estimate each method separately.",
)
@path_option("--write", help="Write the recipe of the best plan to this new file.")
@with_json
def plan_command(
    arguments: tuple[str, ...],
    gpu: str | None,
    gpu_memory: str | None,
    gpus: int,
    budget: str | None,
    tokens: str | None,
    price_per_hour: float | None,
    init_from: str | None,
    search: bool,
    write: Path | None,
    as_json: bool,
) -> dict[str, Any]:
    """Predict the memory and speed of a run, on this machine or another GPU, and find the best
    settings.

    The model and the training step of the recipe are run on tensors that take no memory, so a
    laptop can plan a run for a GPU that it does not have. If the data has not been prepared yet,
    set planning.vocab_size.

    The exit code is 3 if the recipe does not fit in memory. With --write or --budget, it is 3 if no
    settings fit in memory.
    """
    path, overrides = split_arguments(arguments, "plan")
    device = {"--gpu": gpu, "--gpu-memory": gpu_memory, "--gpus": gpus if gpus > 1 else None}
    if write is not None and write.exists():
        raise ConfigError(f"{write} already exists: choose another file for --write")
    from firstlight.planner.plan import processes as workers

    # Start these processes before the slow imports below, so that they import their modules at the
    # same time as this process.
    with workers.started() as processes:
        from firstlight.console import progress_bar
        from firstlight.planner.plan.estimate import Estimator
        from firstlight.planner.plan.machine import find_machine, parse_bytes
        from firstlight.planner.plan.plan import make_plan
        from firstlight.recipe import load_recipe

        recipe = load_recipe(path, overrides)
        machine = find_machine(gpu, None if gpu_memory is None else parse_bytes(gpu_memory), gpus)
        with progress_bar() as bar:
            task = bar.add_task("plan", total=None)
            plan = make_plan(
                recipe,
                machine,
                init_from=init_from,
                budget=_budget(budget, tokens, price_per_hour),
                searches=search,
                estimator=Estimator(
                    processes, tell=lambda what: bar.update(task, description=f"plan: {what}")
                ),
            )
        _show(plan)
        written = _written(plan, write, search)
        found = plan.suggested or (None if written is None else plan.best) or plan.as_it_stands
        if not found.fits:
            end_with(DOES_NOT_FIT_EXIT_CODE)
        where = [str(word) for option in device.items() if option[1] for word in option]
        wanted = ["--tokens", tokens] if tokens is not None else ["--budget", budget or "24h"]
        command = next_command(
            plan, path, overrides, init_from, where=where, wanted=wanted, written=written
        )
        if (first := _preparation(plan.recipe)) is not None:
            show(f"first: {first}")
        show(f"next: {command}")
        return {**plan.to_json(), "next": command}


def _budget(time: str | None, tokens: str | None, price_per_hour: float | None) -> Budget:
    """Return the budget that is specified by --budget, --tokens and --price-per-hour.

    Raises:
        ConfigError: the duration or the number is invalid.
    """
    from firstlight.planner.plan.plan import Budget

    return Budget(
        None if time is None else parse_time(time),
        None if tokens is None else parse_count(tokens),
        price_per_hour,
    )


def _show(plan: Plan) -> None:
    from firstlight.planner.plan.text import blocks

    for block in blocks(plan):
        if isinstance(block, str):
            show(block)
        else:
            show_table(block)


def _written(plan: Plan, path: Path | None, searched: bool) -> Path | None:
    """Write the recipe of a plan to `path`. Return the path, or None if nothing was written."""
    if path is None:
        return None
    if searched and plan.chosen is None:
        say(f"{path} was not written: no plan fits in memory")
        return None
    write_recipe(path, plan.chosen or plan.recipe)
    show(f"written: {path}")
    return path


def next_command(
    plan: Plan,
    path: str,
    overrides: Sequence[tuple[str, str]],
    init_from: str | None,
    where: Sequence[str],
    wanted: Sequence[str],
    written: Path | None,
) -> str:
    """Return the command that the user should run next. It trains with the recipe or makes a
    different plan.

    Args:
        plan: the plan.
        path: path of the recipe given on the command line.
        overrides: overrides given on the command line, as pairs of `section.key` and value.
        init_from: value of --init-from given on the command line.
        where: device options given on the command line, as a list of words.
        wanted: budget options given on the command line, as a list of words. If none were given,
            options for a typical budget.
        written: path of the recipe written by --write. None if nothing was written.
    """
    from firstlight.planner.plan.text import changed_options

    way = plan.best or next((one for one in plan.nearest if not _needs_more_devices(one)), None)
    start = [] if init_from is None else ["--init-from", init_from]
    many = [] if plan.machine.count == 1 else ["--nproc", str(plan.machine.count)]
    given = dict(overrides)
    if written is not None:
        return shlex.join(["firstlight", "train", str(written), *start, *many])
    if plan.suggested is None and (way is not None or plan.as_it_stands.fits):
        given |= {} if way is None else changed_options(way)
        return shlex.join(["firstlight", "train", path, *_options(given), *start, *many])
    plan_again = ["firstlight", "plan", path, *_options(given), *start, *where]
    if plan.suggested is None and not plan.methods:
        return shlex.join(plan_again)  # The user has disabled the search with --no-search.
    new = f"{Path(path).stem}-planned.yaml"
    return shlex.join([*plan_again, *wanted, "--write", new])


def _options(values: Mapping[str, str]) -> list[str]:
    return [word for key, value in values.items() for word in (f"--{key}", value)]


def _needs_more_devices(one: Estimate) -> bool:
    return one.changes.get("distributed.engine") not in (None, "auto")


def _preparation(recipe: Recipe) -> str | None:
    """Return a command that prepares the first missing corpus of the recipe, or None if all corpora
    exist.
    """
    from firstlight.data.remote import is_url
    from firstlight.data.shards import MANIFEST_NAME

    mixed = [corpus.dir for corpus in recipe.data.mix or ()]
    for folder in (*mixed, recipe.data.dir):
        if folder and not is_url(folder) and not (Path(folder) / MANIFEST_NAME).is_file():
            out = shlex.quote(folder)
            return f"firstlight prepare YOUR_TEXT --tokenizer YOUR_TOKENIZER --out {out}"
    return None


def write_recipe(path: Path, recipe: Any) -> None:
    """Write a recipe with all of its keys to a YAML file."""
    from firstlight.files.atomic import write_file
    from firstlight.recipe.load import yaml_text

    text = yaml_text(recipe.model_dump())
    write_file(path, text)

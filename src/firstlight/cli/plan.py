"""`firstlight plan`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click

from firstlight.cli.output import show, show_table, with_json
from firstlight.cli.train import split_arguments
from firstlight.errors import ConfigError

_TIMES = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 604800}
_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


@click.command("plan", context_settings={"ignore_unknown_options": True})
@click.argument(
    "arguments", nargs=-1, type=click.UNPROCESSED, metavar="RECIPE.yaml [--section.key VALUE]..."
)
@click.option("--gpu", metavar="NAME", help='Such as "RTX 4090"; else what this machine has.')
@click.option("--gpu-memory", metavar="SIZE", help="Of each GPU, such as 24GiB.")
@click.option("--gpus", type=int, default=1, show_default=True, help="How many.")
@click.option("--budget", metavar="TIME", help="Say what to train in 24h, 90min, 3d.")
@click.option("--tokens", metavar="COUNT", help="Say what to train on 10B, 300M tokens.")
@click.option("--price-per-hour", type=float, help="Of one GPU, for the budget's cost.")
@click.option("--init-from", metavar="DIR", help="The folder of the weights to start from.")
@click.option(
    "--search/--no-search",
    default=True,
    show_default=True,
    help="Look for the best settings, and at each method alone.",
)
@click.option(
    "--write",
    type=click.Path(path_type=Path),
    help="Write the recipe that was found into this new file.",
)
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
    """Predict a run's memory and speed before it is started, on this machine or on GPUs elsewhere,
    and find the best settings for it.

    The recipe's real model and training step are run on tensors without memory, so a laptop plans
    for a GPU that it doesn't have.
    """
    path, overrides = split_arguments(arguments)
    if price_per_hour is not None and budget is None and tokens is None:
        raise ConfigError("--price-per-hour is for what --budget or --tokens would train: give one")
    if write is not None and write.exists():
        raise ConfigError(f"{write} exists: --write makes a new file")
    from firstlight.planner import workers

    # Before what takes seconds to import: the processes import it at the same time.
    with workers.started() as processes:
        from firstlight.console import progress_bar
        from firstlight.planner.machine import find_machine, parse_bytes
        from firstlight.planner.outcome import Oracle
        from firstlight.planner.plan import Budget, make_plan
        from firstlight.planner.plan_text import blocks
        from firstlight.training.config import load_recipe

        recipe = load_recipe(path, overrides)
        machine = find_machine(gpu, None if gpu_memory is None else parse_bytes(gpu_memory), gpus)
        given = Budget(
            None if budget is None else parse_time(budget),
            None if tokens is None else parse_count(tokens),
            price_per_hour,
        )
        with progress_bar() as bar:
            task = bar.add_task("plan", total=None)
            plan = make_plan(
                recipe,
                machine,
                init_from=init_from,
                budget=given,
                searches=search,
                oracle=Oracle(processes),
                tell=lambda what: bar.update(task, description=f"plan: {what}"),
            )
        for block in blocks(plan):
            if isinstance(block, str):
                show(block)
            else:
                show_table(block)
        if write is not None and search and plan.chosen is None:
            raise ConfigError(f"{write} is not written: nothing fits")
        if write is not None:
            write_recipe(write, plan.chosen or plan.recipe)
            show(f"written: {write}")
        return plan.to_json()


def write_recipe(path: Path, recipe: Any) -> None:
    """A recipe as a YAML file."""
    import yaml

    from firstlight.files import write_file

    text = yaml.safe_dump(recipe.model_dump(), sort_keys=False, allow_unicode=True)
    write_file(path, text)


def parse_time(text: str) -> float:
    """ "24h", "90min", "3d" -> seconds.

    Raises:
        ConfigError: it is no time.
    """
    match = re.fullmatch(r"\s*([0-9.]+)\s*([a-z]+)\s*", text.lower())
    return _value(match, _TIMES, text, "time: write for instance 24h, 90min or 3d")


def parse_count(text: str) -> float:
    """ "10B", "300M", "2e9" -> a number.

    Raises:
        ConfigError: it is none.
    """
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([kmbt]?)\s*", text.lower())
    return _value(match, _COUNTS, text, "number of tokens: write for instance 10B or 300M")


def _value(match: re.Match[str] | None, units: dict[str, int], text: str, what: str) -> float:
    try:
        if match is not None and match[2] in units:
            return float(match[1]) * units[match[2]]
    except ValueError:
        pass
    raise ConfigError(f"'{text}' is no {what}")
